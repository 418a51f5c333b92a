"""Calls that differ between ranks, checkpoints that are replaced, and values that torch's store does not take.

Each must end on all ranks within seconds, with an error that says why, and the next call must work.
"""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.ranks import run_ranks
from test_save import patched
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from stio import sync
from stio.distributed import StioStager, StioStorageReader, StioStorageWriter, dcp_reader, ranks
from stio.distributed.agreement import RankState
from stio.distributed.ranks import Ranks
from stio.loading import body
from stio.runtime.notifier import run_blocking
from stio.storage.commit.transaction import LocalTransaction

pytestmark = pytest.mark.slow  # its ranks do all that it looks at for any of its tests

NUM_RANKS = 3


def outcome(act: Callable[[], object]) -> tuple[str, str, str, float]:
    """Return the class and the text of an error, the class of its cause, and the seconds until then."""
    begin = time.monotonic()
    try:
        act()
    except BaseException as error:
        text = "" if isinstance(error, Mute) else str(error)
        return type(error).__name__, text, type(error.__cause__).__name__, time.monotonic() - begin
    return "", "", "", time.monotonic() - begin


def spread(tensor: torch.Tensor) -> DTensor:
    mesh = DeviceMesh("cpu", torch.arange(NUM_RANKS))
    return distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)


def new_module(value: float = 0.0) -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(value)
    return module


# Arguments and calls that differ.


def wrong_arguments(folder: str) -> dict[str, Any]:
    """Rank 1 passes what no call accepts."""
    wrong = dist.get_rank() == 1
    state, found = {"w": spread(torch.ones(7, 3))}, {}
    shared: Any = "bogus" if wrong else "dedupe"
    with sync.distributed.Saver() as saver:
        found["option of saver"] = outcome(lambda: saver.save(state, f"{folder}/never", shared=shared))
        found["option of state"] = outcome(lambda: saver.save_state(state, f"{folder}/never", shared=shared))
        assert saver.save(state, f"{folder}/good").result().files, "the next save is the same one on all ranks"
    return found


def other_calls(folder: str) -> dict[str, Any]:
    rank = dist.get_rank()
    state, module, path = {"w": spread(torch.ones(7, 3))}, new_module(), f"{folder}/model"
    found = {}
    load, save = sync.distributed.load_into, sync.distributed.save
    found["load and save"] = outcome(
        lambda: load(module, path) if rank == 2 else save(state, f"{folder}/never", durability="none")
    )
    found["save and load"] = outcome(
        lambda: save(state, f"{folder}/never", durability="none") if rank == 0 else load(module, path)
    )
    whole = module.state_dict()
    found["module and state"] = outcome(lambda: load(whole if rank == 1 else module, path, broadcast=True))
    report = load(module, path)
    assert (report.missing, report.unexpected) == ((), ())
    return found


# Errors that are hard to send.


class Long(Exception):
    """Its text and its content are longer than what torch's store takes."""

    def __init__(self) -> None:
        super().__init__("x" * (12 << 20))


class Heavy(Exception):
    def __init__(self) -> None:
        super().__init__("heavy")
        self.content = os.urandom(12 << 20)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class NoError(Exception):
    def __reduce__(self) -> Any:
        return str, ("unpickled",)


ERRORS = {"long": Long, "heavy": Heavy, "mute": Mute, "no error": NoError, "surrogate": lambda: OSError(5, "a\udcffb")}


def blocking(make: Callable[[], Any]) -> Any:
    return run_blocking(make())


def errors() -> dict[str, Any]:
    found = {}
    for name, make in ERRORS.items():

        async def fail(make: Callable[[], Exception] = make) -> None:
            async with Ranks(about="load") as ranks:
                if ranks.rank == 1:
                    raise make()
                await ranks.arrive("end")

        found[name] = outcome(partial(blocking, fail))
    return found


def long_differences(folder: str) -> dict[str, Any]:
    """Metadata that differ, and that the store takes in many parts, which are smaller here."""
    text = os.urandom(2000).hex() + str(dist.get_rank())
    state = {"é\u0301\ud7ff\U0001f600": spread(torch.ones(7, 3)), "": torch.ones(())}
    found = {"names": outcome(lambda: sync.distributed.save(state, f"{folder}/é\udcff", metadata={"ü": "ä"}))}
    with patched(ranks, "_MAX_PART_BYTES", 300):
        found["metadata"] = outcome(lambda: sync.distributed.save(state, f"{folder}/never", metadata={"ü": text}))
    assert sync.load(f"{folder}/é\udcff").keys() == state.keys()
    return found


def lies(folder: str) -> dict[str, Any]:
    """A rank sends what is of the right type, and does not fit what the others have."""
    rank, state, found = dist.get_rank(), {"w": spread(torch.ones(7, 3))}, {}
    invite, meshes = LocalTransaction.invite, RankState.meshes

    def invite_more(self: LocalTransaction) -> Any:
        invitation = invite(self)
        return replace(invitation, shard_names=(*invitation.shard_names, "another"))

    with patched(LocalTransaction, "invite", invite if rank else invite_more):
        found["names"] = outcome(lambda: sync.distributed.save(state, f"{folder}/never"))
    with patched(RankState, "meshes", (lambda self: [*meshes(self), "another"]) if rank == 1 else meshes):
        found["meshes"] = outcome(lambda: sync.distributed.save(state, f"{folder}/never"))
    return found


def late_begin() -> str:
    """A rank enters an object long after it was made, and another one a moment later."""

    async def body() -> list[bytes]:
        ranks = Ranks(about="load", timeout=30.0)
        for sign in ranks._signs.values():
            sign.seen -= 1000.0
        if ranks.rank:
            await_key("first has begun")
        async with ranks:
            if ranks.rank == 0:
                entered = ranks._looked
                wait_for(lambda: ranks._looked != entered or ranks.failure is not None)
                dist.distributed_c10d._get_default_store().set("first has begun", b"")
            return await ranks.arrive("end", b"1")

    return str(outcome(lambda: run_blocking(body()))[:2])


def wait_for(ready: Callable[[], bool]) -> None:
    while not ready():
        time.sleep(0.001)


def await_key(key: str) -> None:
    dist.distributed_c10d._get_default_store().get(key)


def no_connection(folder: str) -> tuple[str, str, str, float]:
    """The store does not take a new connection of rank 2, as when the rank that has it has just ended."""
    never, plain = (lambda store: threading.Event().wait()), ranks._own_connection
    for group in ranks._groups.values():
        group.idle.clear()  # connections that are kept for the next call
    with patched(ranks, "_own_connection", never if dist.get_rank() == 2 else plain):
        return outcome(lambda: sync.distributed.load_into(new_module(), f"{folder}/model", rank_timeout=2.0))


def no_address(folder: str) -> tuple[str, str, str, float]:
    """Gloo never has an address on rank 2, as when the name of the host is looked up in vain."""
    never, plain = (lambda *_: threading.Event().wait()), dist.ProcessGroupGloo
    for group in ranks._groups.values():
        group.groups.clear()
    with patched(dist, "ProcessGroupGloo", never if dist.get_rank() == 2 else plain):
        path = f"{folder}/model"
        return outcome(lambda: sync.distributed.load_into(new_module(), path, broadcast=True, rank_timeout=2.0))


# Checkpoints that are replaced.


@contextmanager
def replaced_between(path: str, *, is_state: bool = False) -> Iterator[None]:
    """Let rank 1 open a checkpoint after the others have, and replace it before that."""
    rank, plain = dist.get_rank(), body.open_with_options

    def open_with_options(*arguments: Any, **keywords: Any) -> Any:
        opened = None if rank == 1 else plain(*arguments, **keywords)
        dist.barrier()
        if rank == 1:
            save: Any = sync.save_state if is_state else sync.save
            save({"a": new_module(2.0).state_dict()} if is_state else new_module(2.0), path)
            opened = plain(*arguments, **keywords)
        dist.barrier()
        return opened

    with (
        patched(body, "open_with_options", open_with_options),
        patched(dcp_reader, "open_with_options", open_with_options),
    ):
        yield


def replacements(folder: str) -> dict[str, Any]:
    rank, found, module = dist.get_rank(), {}, new_module()
    for name, act in {
        "model": lambda path: sync.distributed.load_into(module, path),
        "model.safetensors": lambda path: sync.distributed.load_into(module, path),
        "sent.safetensors": lambda path: sync.distributed.load_into(module, path, broadcast=True),
        "by-dcp": lambda path: dcp.load(module.state_dict(), storage_reader=StioStorageReader(path)),
        "state": lambda path: sync.distributed.load_into({"a": module.state_dict()}, path),
    }.items():
        path, is_state = f"{folder}/replaced/{name}", name == "state"
        if rank == 0:
            (sync.save_state if is_state else sync.save)(  # type: ignore[operator]
                {"a": new_module(1.0).state_dict()} if is_state else new_module(1.0), path
            )
        dist.barrier()
        with replaced_between(path, is_state=is_state):
            found[name] = outcome(partial(act, path))
        act(path)
        assert all((one == 2.0).all() for one in module.state_dict().values()), name
    return found


# Destinations.


def destinations(folder: str) -> dict[str, Any]:
    """Where nothing can be saved: below a file, and on a filesystem that is too small."""
    rank, found = dist.get_rank(), {}
    state = {"w": spread(torch.ones(900, 1000))}
    if rank == 0:
        Path(folder, "file").write_text("text")
        Path(folder, "directory.safetensors").mkdir()
    dist.barrier()
    for name in ("file", "file/below", "directory.safetensors"):
        found[name] = outcome(partial(sync.distributed.save, state, f"{folder}/{name}"))
    small = f"{folder}/small"
    if rank == 0:
        os.mkdir(small)
        mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", small]
        found["mounted"] = subprocess.run(mount, capture_output=True).returncode == 0
    dist.barrier()
    is_mounted = os.path.ismount(small)
    try:
        if is_mounted:
            found["full"] = outcome(lambda: sync.distributed.save(state, f"{small}/model"))
            dist.barrier()
            assert os.listdir(small) == []
            sync.distributed.save({"w": spread(torch.ones(9, 10))}, f"{small}/model")
    finally:
        dist.barrier()
        if is_mounted and rank == 0:
            subprocess.run(["umount", small], check=True)
    return found


# Tensors.


def tensors(folder: str) -> None:
    """A result of a collective that has not ended; scalars; nothing."""
    mesh = DeviceMesh("cpu", torch.arange(NUM_RANKS))
    whole = torch.arange(21.0).reshape(7, 3)
    pending = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None).redistribute(
        mesh, [Replicate()], async_op=True
    )
    with torch.no_grad():
        assert isinstance(pending.to_local(), AsyncCollectiveTensor)
    state = {
        "pending": pending,
        "scalar": distribute_tensor(torch.tensor(2.0), mesh, [Replicate()], src_data_rank=None),
        "nothing": distribute_tensor(torch.ones(0, 3), mesh, [Shard(0)], src_data_rank=None),
        "none": distribute_tensor(torch.ones(3, 0), mesh, [Shard(0)], src_data_rank=None),
    }
    expected = {"pending": whole, "scalar": torch.tensor(2.0), "nothing": torch.ones(0, 3), "none": torch.ones(3, 0)}
    sync.distributed.save(state, f"{folder}/tensors")
    assert same(sync.load(f"{folder}/tensors"), expected)
    dcp.save(state, storage_writer=StioStorageWriter(f"{folder}/by-dcp"))
    assert same(sync.load(f"{folder}/by-dcp"), expected)
    staged = StioStager().stage({"pending": pending})
    assert torch.equal(staged["pending"].to_local(), whole)
    with torch.no_grad():
        pending.to_local().fill_(-1)
    sync.distributed.load_into(state, f"{folder}/tensors")
    assert torch.equal(pending.full_tensor(), whole)


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def wrapped_module(folder: str) -> None:
    """Activation checkpointing adds hooks that leave its wrappers out of names; they may be sharded."""
    model = nn.Sequential(checkpoint_wrapper(nn.Linear(4, 6)), checkpoint_wrapper(nn.Linear(6, 5)))
    for module in [*model, model]:
        fully_shard(module)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.to_local().fill_(float(number))
    sync.distributed.save(model, f"{folder}/wrapped")
    assert sync.load(f"{folder}/wrapped").keys() == new_module().state_dict().keys()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().fill_(-1)
    report = sync.distributed.load_into(model, f"{folder}/wrapped")
    assert (report.missing, report.unexpected) == ((), ())
    assert [parameter.full_tensor().mean().item() for parameter in model.parameters()] == [0, 1, 2, 3]


def one_rank_on_meta(folder: str) -> tuple[str, str, str, float]:
    state = {"w": spread(torch.ones(7, 3)), "x": torch.ones(3)}
    if dist.get_rank() == 2:
        state["x"] = state["x"].to("meta")
    return outcome(lambda: sync.distributed.save(state, f"{folder}/never"))


# Several at a time.


def at_once(folder: str) -> None:
    """Several savers, and calls of several threads, each in a group of its own."""
    groups = [dist.new_group(list(range(NUM_RANKS))) for _ in range(3)]
    mesh_state = {"w": spread(torch.arange(2000.0).reshape(200, 10))}
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(2):
                path = f"{folder}/at-once/{number}/step-{step}"
                state = {"w": mesh_state["w"], "number": number}
                sync.distributed.save(state, path, process_group=groups[number], durability="none")
                into = {"w": spread(torch.zeros(200, 10)), "number": -1}
                sync.distributed.load_into(into, path, process_group=groups[number])
                assert into["number"] == number and torch.equal(into["w"].to_local(), mesh_state["w"].to_local())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    with sync.distributed.Saver(max_pending=2) as one, sync.distributed.Saver(durability="none") as other:
        pending = [
            saver.save(mesh_state, f"{folder}/savers/{k}-{step}")
            for step in range(2)
            for k, saver in enumerate([one, other])
        ]
        for save in pending:
            assert save.result().files


# The test.


def everything(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["tensors"] = outcome(lambda: tensors(folder))
    found["wrapped"] = outcome(lambda: wrapped_module(folder))
    found["replaced"] = replacements(folder)
    found["arguments"] = wrong_arguments(folder)
    found["calls"] = other_calls(folder)
    found["errors"] = errors()
    found["differences"] = long_differences(folder)
    found["lies"] = lies(folder)
    found["late"] = late_begin()
    found["connection"] = no_connection(folder)
    found["address"] = no_address(folder)
    found["destinations"] = destinations(folder)
    found["meta"] = one_rank_on_meta(folder)
    found["at once"] = outcome(lambda: at_once(folder))
    left = [name for name in os.listdir(folder) if name.startswith(".stio") or name == "never"]
    assert not left, left
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each rank has found. The store is torch's usual one, with its limits."""
    folder = tmp_path_factory.mktemp("hostile")
    sync.save(new_module(1.0), folder / "model")
    return run_ranks(everything, NUM_RANKS, folder, str(folder), over_tcp=True)


def kinds(found: list[dict[str, Any]], group: str, name: str) -> list[str]:
    """Return the class of the error on each rank; all must have come soon."""
    assert max(one[group][name][3] for one in found) < 20, name
    return [one[group][name][0] for one in found]


def test_wrong_arguments_of_one_rank(found: list[dict[str, Any]]) -> None:
    for name, kind in [
        ("option of saver", "ValueError"),
        ("option of state", "ValueError"),
    ]:
        assert kinds(found, "arguments", name) == ["RankError", kind, "RankError"], name
        assert {one["arguments"][name][2] for one in (found[0], found[2])} == {kind}, name


def test_other_calls_on_one_rank(found: list[dict[str, Any]]) -> None:
    for name in ("load and save", "save and load"):
        assert kinds(found, "calls", name) == ["RankError"] * NUM_RANKS
        assert "must make the same calls in the same order" in found[0]["calls"][name][1]
    assert set(kinds(found, "calls", "module and state")) <= {"ValueError", "RankError"}
    assert "broadcast= must be the same on all ranks" in found[1]["calls"]["module and state"][1]


def test_errors_that_are_hard_to_send(found: list[dict[str, Any]]) -> None:
    for name, make in ERRORS.items():
        own = type(make()).__name__
        assert kinds(found, "errors", name) == ["RankError", own, "RankError"], name
        assert f"the load failed on rank 1: {own}: " in found[0]["errors"][name][1]
        assert len(found[0]["errors"][name][1]) < 5000
    assert found[0]["errors"]["surrogate"][1].isprintable()
    assert found[0]["errors"]["surrogate"][2] == "OSError"


def test_long_differences(found: list[dict[str, Any]]) -> None:
    assert set(kinds(found, "differences", "metadata")) <= {"MismatchError", "RankError"}
    assert "the metadata under 'ü' differs: " in found[0]["differences"]["metadata"][1]
    assert kinds(found, "differences", "names") == [""] * NUM_RANKS


def test_values_of_the_right_type_that_do_not_fit(found: list[dict[str, Any]]) -> None:
    for name, text in (("names", "another number of files"), ("meshes", "another number of meshes")):
        assert kinds(found, "lies", name) == ["RankError"] * NUM_RANKS
        assert all(text in one["lies"][name][1] for one in found), [one["lies"][name] for one in found]


def test_an_object_that_is_entered_long_after_it_was_made(found: list[dict[str, Any]]) -> None:
    assert [one["late"] for one in found] == ["('', '')"] * NUM_RANKS


def test_a_connection_that_is_not_made(found: list[dict[str, Any]]) -> None:
    assert kinds([{"all": one} for one in found], "all", "connection") == ["RankError"] * NUM_RANKS
    assert kinds([{"all": one} for one in found], "all", "address") == ["RankError"] * NUM_RANKS
    assert "the connection to another rank broke during the broadcast" in found[2]["address"][1]


def test_a_checkpoint_that_is_replaced_between_the_opens_of_two_ranks(found: list[dict[str, Any]]) -> None:
    for name in found[0]["replaced"]:
        kind = {"CheckpointException"} if name == "by-dcp" else {"ChangedDuringReadError", "RankError"}
        assert set(kinds(found, "replaced", name)) <= kind, name
        assert "ranks 0 and 1 have opened different checkpoints" in found[2]["replaced"][name][1], name


def test_destinations_where_nothing_can_be_saved(found: list[dict[str, Any]]) -> None:
    for name in set(found[0]["destinations"]) - {"mounted"}:
        assert kinds(found, "destinations", name)[1:] == ["RankError"] * 2, name
        own = "NoSpaceError" if name == "full" else "StorageError"
        assert found[0]["destinations"][name][0] == found[1]["destinations"][name][2] == own, name
    if found[0]["destinations"]["mounted"]:
        assert "too little space" in found[2]["destinations"]["full"][1]


def test_tensors_of_all_kinds(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert one["tensors"][:2] == ("", "")
        assert one["wrapped"][:2] == ("", "")
    assert set(kinds([{"all": one} for one in found], "all", "meta")) == {"RankError", "ValueError"}


def test_several_at_a_time(found: list[dict[str, Any]]) -> None:
    assert [one["at once"][:2] for one in found] == [("", "")] * NUM_RANKS
