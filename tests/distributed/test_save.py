"""Saves of many ranks: the files of `stio.save` of the whole, on any number of ranks; and one failure raised on all."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from counts import LONG, count
from distributed.ranks import run_ranks
from support import before_writes, hook_writes
from test_load import WAYS, new_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import stio
from stio import sync
from stio.device.copy_out import Readiness
from stio.device.describe import LazyTensor
from stio.distributed.placements import Cut, local_part
from stio.errors import RankError
from stio.runtime.operation import is_interrupted
from stio.saving import pending
from stio.saving.staging_pool import StagingPool
from stio.storage.commit import syscalls as calls
from stio.storage.commit import transaction
from stio.storage.commit.transaction import LocalTransaction
from tests.storage.transactions import sweep

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.uint8]


def files_in(folder: str) -> dict[str, bytes]:
    """Return the files of a checkpoint; fail if there is anything else."""
    if os.path.isfile(folder):
        return {"": Path(folder).read_bytes()}
    return {name: Path(folder, name).read_bytes() for name in sorted(os.listdir(folder))}


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = torch.randint(0, 256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator)
    if dtype == torch.bool:
        return (made % 2).view(torch.bool).reshape(shape)
    return made.view(dtype).reshape(shape)


def odd_tensors() -> dict[str, torch.Tensor]:
    """Return tensors that are cut unevenly, or into parts of which some are empty, of several dtypes."""
    shapes = {"odd": (13, 7), "few": (3, 2), "one": (1, 5), "none": (0, 4), "deep": (5, 6, 3), "wide": (2, 9000)}
    dtypes = {"few": torch.bool, "one": torch.float8_e4m3fn, "deep": torch.int64}
    tensors = {
        name: tensor_of(shape, dtypes.get(name, torch.float32), k) for k, (name, shape) in enumerate(shapes.items())
    }
    tensors |= {f"{name}_16": tensor_of((*shape, 2), torch.bfloat16, 7) for name, shape in shapes.items()}
    return tensors | {"large": tensor_of((700, 501), torch.float32, 8), "flat": tensor_of((70_000,), torch.uint8, 9)}


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def spread_of(tensor: torch.Tensor, mesh: DeviceMesh, rule: Sequence[Placement]) -> DTensor:
    """Return a distributed tensor of a whole one. gloo cannot scatter all dtypes."""
    cuts = [Cut(one.dim) if isinstance(one, Shard) else None for one in rule]
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    local = tensor[local_part(tensor.shape, mesh.shape, coordinate, cuts)].clone()
    return DTensor.from_local(local, mesh, rule, run_check=False, shape=tensor.shape, stride=tensor.stride())


class Place:
    """The ranks below a number, and a folder: what they save is compared with what one of them saves alone."""

    def __init__(self, folder: str, num_ranks: int) -> None:
        self.folder, self.num_ranks = folder, num_ranks
        self.group = dist.new_group(list(range(num_ranks)))
        self.is_member = dist.get_rank() < num_ranks
        self.num_saves = 0

    def mesh(self, *shape: int) -> DeviceMesh:
        return DeviceMesh("cpu", torch.arange(self.num_ranks).reshape(shape or (self.num_ranks,)))

    def same_files(self, state: object, whole: object, *, name: str = "model", **options: Any) -> None:
        """Save, and compare with a save of the whole, which only the first rank has to have."""
        if not self.is_member:
            return
        self.num_saves += 1
        options.setdefault("durability", "none")
        path = f"{self.folder}/{self.num_ranks}-{self.num_saves}/{name}"
        result = sync.distributed.save(state, path, process_group=self.group, **options)
        if dist.get_rank() == 0:
            save: Any = sync.save if isinstance(whole, nn.Module) or is_flat(whole) else sync.save_state
            options.pop("budget_bytes", None)
            expected = save(whole, f"{path}-expected/{name}", **options)
            assert files_in(path) == files_in(f"{path}-expected/{name}")
            assert (result.files, result.total_bytes, result.file_bytes, result.aliases, result.hashes) == (
                expected.files, expected.total_bytes, expected.file_bytes, expected.aliases, expected.hashes
            )  # fmt: skip
            assert sorted(os.listdir(os.path.dirname(path))) == sorted([name, f"{name}-expected"])
        dist.barrier(self.group)


def is_flat(state: object) -> bool:
    return isinstance(state, dict) and all(isinstance(value, torch.Tensor | LazyTensor) for value in state.values())


# Files.


def placements(place: Place) -> None:
    tensors = odd_tensors()
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    meshes = [place.mesh()] + ([place.mesh(2, 2)] if place.num_ranks == 4 else [])
    for mesh in meshes:
        if not place.is_member:
            continue
        rows = (
            [[one] for one in choices] if mesh.ndim == 1 else [[a, b] for a in choices for b in choices][:: count(2, 1)]
        )
        for chosen in rows:
            spread = {
                name: spread_of(tensor.clone(), mesh, chosen if tensor.dim() > 1 else [Shard(0)] * mesh.ndim)
                for name, tensor in tensors.items()
            }
            spread["plain"] = torch.arange(100.0)
            spread["scalar"] = torch.tensor(3.5)
            whole = tensors | {"plain": torch.arange(100.0), "scalar": torch.tensor(3.5)}
            place.same_files(spread, whole)
            place.same_files(spread, whole, name="a.safetensors", metadata={"k": "v"})
            place.same_files(spread, whole, max_shard_size=20_000, metadata={"k": "v"}, hash="sha256")


def models(place: Place) -> None:
    for shard in WAYS:
        model = new_model()
        shard(model)
        place.same_files(model, new_model(), durability="full")
    tied, whole = new_model(), new_model()
    for model in (tied, whole):
        torch.manual_seed(2)
        model.other = model.head  # one row: the other ranks hold nothing of it
        model.up = nn.Linear(13, 27)
        model.up.weight = model.blocks[0].up.weight
    fully_shard(tied)
    place.same_files(tied, whole)
    place.same_files(tied, whole, shared="clone")
    with pytest.raises((stio.SharedTensorsError, RankError), match="tensors share memory"):
        sync.distributed.save(tied, f"{place.folder}/never", shared="error")
    # Parts of one storage that do not overlap are not tied.
    storage = torch.arange(40.0)
    state = {"a": storage[:20], "b": storage[20:]}
    place.same_files(state, {name: tensor.clone() for name, tensor in state.items()})
    lazy = {name: LazyTensor(torch.float32, (20,), tensor.clone) for name, tensor in state.items()}
    place.same_files(lazy, {name: tensor.clone() for name, tensor in state.items()})
    place.same_files({}, {})
    first = DeviceMesh("cpu", [0])  # the other ranks are not in it, and have nothing of its tensors
    scalar = distribute_tensor(torch.tensor(5.0), first, [Replicate()], src_data_rank=None)
    place.same_files({"scalar": scalar}, {"scalar": torch.tensor(5.0)})


def random_states(place: Place, seeds: range) -> None:
    """Random meshes, placements, shapes, dtypes, block sizes."""
    shapes = [shape for shape in [(4,), (2, 2), (4, 1)] if place.num_ranks == 4] or [(place.num_ranks,)]
    meshes = [place.mesh(*shape) for shape in shapes]
    if not place.is_member:
        return
    for seed in seeds:
        chance = random.Random(seed)
        spread, whole = {}, {}
        for k in range(chance.randint(1, 10)):
            shape = tuple(chance.choice([1, 2, 5, 16, 130]) for _ in range(chance.randint(1, 3)))
            tensor = tensor_of(shape, chance.choice(DTYPES), k)
            mesh = chance.choice(meshes)
            rule: list[Placement] = [
                Replicate() if chance.random() < 0.3 else Shard(chance.randrange(len(shape))) for _ in mesh.shape
            ]
            whole[f"t{k}"] = tensor
            spread[f"t{k}"] = tensor if chance.random() < 0.1 else spread_of(tensor.clone(), mesh, rule)
        place.same_files(
            spread,
            whole,
            max_shard_size=chance.choice([None, 1000, 100_000]),
            budget_bytes=chance.choice([None, 1 << 20]),
        )


def optimizer_state(place: Place) -> None:
    """State of an optimizer over an FSDP2 module; it can be set again, and is what one process saves."""

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(13, 27), nn.Linear(27, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 13)).sum().backward()
    optimizer.step()
    state = get_optimizer_state_dict(model, optimizer)
    extra = {"optimizer": state, "epoch": 3, "rng": torch.get_rng_state(), "long": ["x" * 1000] * 100}
    whole = {
        "optimizer": {
            "state": {
                name: {key: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for key, tensor in one.items()}
                for name, one in state["state"].items()
            },
            "param_groups": state["param_groups"],
        }
    }  # fmt: skip
    place.same_files(extra, {**extra, **whole})
    place.same_files(state, whole["optimizer"])
    path = f"{place.folder}/optimizer"
    sync.distributed.save({"optimizer": state}, path)
    loaded = sync.load_state(path)["optimizer"]
    for name, one in state["state"].items():
        for key, tensor in one.items():
            if isinstance(tensor, DTensor):
                loaded["state"][name][key] = spread_of(
                    loaded["state"][name][key], tensor.device_mesh, tensor.placements
                )
    set_optimizer_state_dict(model, optimizer, loaded)
    for name, one in get_optimizer_state_dict(model, optimizer)["state"].items():
        for key, tensor in one.items():
            assert torch.equal(local_of(tensor), local_of(state["state"][name][key]))


def within_budget(place: Place) -> None:
    """Staging memory of a rank is at most its budget."""
    whole = {f"w{k}": tensor_of((1000, 1024), torch.float32, k) for k in range(8)}
    mesh = place.mesh()
    spread = {name: spread_of(one.clone(), mesh, [Shard(k % 2)]) for k, (name, one) in enumerate(whole.items())}
    with recorded_pools() as made:
        place.same_files(spread, whole, budget_bytes=4 << 20)
    peaks = [pool.peak_bytes for pool in made if pool.block_bytes]
    assert 0 < peaks[0] <= 4 << 20


def over_old_checkpoints(place: Place) -> None:
    tensors = odd_tensors()
    spread = {name: spread_of(tensor.clone(), place.mesh(), [Shard(0)]) for name, tensor in tensors.items()}
    for k, (first, options) in enumerate(
        [({}, {}), ({"max_shard_size": 20_000}, {}), ({"max_shard_size": 20_000}, {"max_shard_size": 30_000}), (
            {"max_shard_size": 20_000}, {"max_shard_size": 20_000, "commit": "files", "shard_names": "hub"})]
    ):  # fmt: skip
        path = f"{place.folder}/old{k}"
        if dist.get_rank() == 0:
            sync.save({"old": torch.ones(10_000), "older": torch.ones(10)}, path, hash="sha256", **first)
            for name in os.listdir(path):
                os.chmod(f"{path}/{name}", 0o640)
        dist.barrier()
        result = sync.distributed.save(spread, path, hash="sha256", **options)
        assert result.path == path and result.hashes
        for name in result.files:
            assert os.stat(f"{path}/{name}").st_mode & 0o777 == 0o640, "as the file that it replaces"
        loaded = sync.load(path, verify=True)
        assert loaded.keys() == tensors.keys()
        assert all(torch.equal(loaded[name].view(torch.uint8), one.view(torch.uint8)) for name, one in tensors.items())
        assert not [name for name in os.listdir(path) if name.startswith(".stio")]


async def with_a_saver(place: Place) -> None:
    """The tensors change after the snapshot; old steps are deleted; a pending save is awaited or not."""
    mesh = place.mesh()
    whole = torch.arange(300_000.0).reshape(300, 1000)
    spread = {"w": spread_of(whole.clone(), mesh, [Shard(1)]), "step": torch.zeros(1)}
    folder = f"{place.folder}/steps"
    async with stio.distributed.Saver(keep_last=2, hash="sha256") as saver:
        for step in range(4):
            spread["w"].to_local().add_(1)
            spread["step"].fill_(step)
            save = await saver.save(spread, f"{folder}/step-{step}")
            assert save.staged
            with torch.no_grad():
                spread["w"].to_local().mul_(2)
            if step % 2:
                result = await save
                assert result.path == f"{folder}/step-{step}" and result.hashes
            with torch.no_grad():
                spread["w"].to_local().div_(2)
        state = await saver.save_state({"a": spread["w"], "b": [1, 2.5]}, f"{folder}/state-9.safetensors", hash=None)
        await state
    if dist.get_rank() == 0:
        assert sorted(os.listdir(folder)) == ["state-9.safetensors", "step-3"]
        assert torch.equal((await stio.load(f"{folder}/step-3", verify=True))["w"], whole + 4)
    loaded = await stio.load_state(f"{folder}/state-9.safetensors")
    assert loaded["b"] == [1, 2.5] and torch.equal(loaded["a"], whole + 4)


# Failures.


@contextmanager
def recorded_pools() -> Iterator[list[StagingPool]]:
    """Yield a list of the pools that saves make in the block."""
    made: list[StagingPool] = []

    def recorded(budget: int | None) -> StagingPool:
        made.append(StagingPool(budget))
        return made[-1]

    with patched(pending, "StagingPool", recorded):
        yield made


@contextmanager
def patched(owner: Any, name: str, value: object) -> Iterator[None]:
    old = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, old)


def failing_once(owner: Any, name: str = "") -> Callable[..., Any]:
    """Return the function of this name, which fails at its first call; without a name one that then does nothing."""
    function, failed = getattr(owner, name, lambda: None), []

    def call(*arguments: Any, **keywords: Any) -> Any:
        if not failed:
            failed.append(True)
            raise OSError(errno.EIO, "a disk that fails")
        return function(*arguments, **keywords)

    return call


class Failing(nn.Module):
    def state_dict(self, *_: Any, **__: Any) -> Any:
        raise KeyError("a module that fails")


def one_failure(path: str, text: str, state: object, **options: Any) -> tuple[str, str, float]:
    """Save over an old checkpoint; return the error. The old checkpoint must be there, with nothing beside it."""
    before = files_in(path)
    dist.barrier()
    begin = time.monotonic()
    with pytest.raises((RankError, OSError, ValueError, LookupError), match=text) as caught:
        sync.distributed.save(state, path, **options)
    seconds = time.monotonic() - begin
    error = caught.value
    dist.barrier()
    assert files_in(path) == before
    return type(error).__name__, type(error.__cause__).__name__, seconds


def failures(folder: str) -> dict[str, tuple[str, str, float]]:
    rank, mesh, path = dist.get_rank(), DeviceMesh("cpu", torch.arange(4)), f"{folder}/old"
    whole = {f"w{k}": tensor_of((400, 1024), torch.float32, k) for k in range(4)}
    spread = {name: spread_of(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    if rank == 0:
        sync.save({"old": torch.ones(3), "older": torch.zeros(2)}, path, max_shard_size=12)
    dist.barrier()
    found = {}

    def on(failing: int, state: Any) -> Any:
        return state if rank == failing else spread

    others = {
        "names": (2, {**spread, "more": torch.ones(2)}, "rank 2 has tensor 'more', and rank 0 has not"),
        "missing": (1, {k: v for k, v in spread.items() if k != "w3"}, "rank 0 has tensor 'w3', and rank 1 has not"),
        "dtype": (
            3,
            {**spread, "w1": torch.ones(3)},
            "tensor 'w1' differs: F32 .400, 1024. on mesh 0 with 1 copies on rank 0",
        ),
        "module": (1, Failing(), "a module that fails"),
        "kind": (2, {**spread, "w1": spread_of(torch.ones(4, 4), mesh, [Shard(0)]).sum(0)}, "Partial"),
    }
    for name, (failing, state, text) in others.items():
        found[name] = one_failure(path, text, on(failing, state))
    found["value"] = one_failure(
        path,
        r"state\['a'\] differs: 5 on rank 0, 4 on rank 3; all ranks save all names",
        {"a": 4 if rank == 3 else 5, **spread},
    )
    found["option"] = one_failure(path, "the option durability differs", spread, durability="none" if rank else "full")
    found["wrong"] = one_failure(path, "shared= takes", spread, shared="x" if rank == 1 else "clone")  # type: ignore[arg-type]
    found["part"] = of_some_ranks(path, spread)
    for name, failing, owner, attribute in [
        ("stage", 2, Readiness, "copy_pieces"),
        ("sync", 1, calls, "fsync"),
        ("create", 0, LocalTransaction, "create"),
        ("commit", 0, LocalTransaction, "prepare_commit"),
        ("publish", 0, calls, "rename"),
    ]:
        with patched(
            owner, attribute, failing_once(owner, attribute) if rank == failing else getattr(owner, attribute)
        ):
            found[name] = one_failure(path, "a disk that fails|Input/output error", spread)
    for name, failing in (("write", 3), ("write first", 0)):
        with before_writes(failing_once(None) if rank == failing else lambda: None):
            found[name] = one_failure(path, "a disk that fails|Input/output error", spread)
    with patched(transaction, "_open_files", (lambda _: -1) if rank == 1 else transaction._open_files):
        found["shared"] = one_failure(path, "a filesystem that all processes share", spread)
    found["cancel"] = asyncio.run(cancelled(path, spread))
    return found


def of_some_ranks(path: str, spread: dict[str, Any]) -> tuple[str, str, float]:
    """Save on three ranks what four ranks hold."""
    group = dist.new_group([0, 1, 2])
    if dist.get_rank() < 3:
        return one_failure(path, "do not make up the tensors", spread, process_group=group)
    dist.barrier()
    dist.barrier()
    return "", "", 0.0


async def cancelled(path: str, spread: dict[str, Any]) -> tuple[str, str, float]:
    """One rank cancels: a task that waits for `save`, at once and later; and a pending save."""
    before, rank = files_in(path), dist.get_rank()
    began = asyncio.Event()
    loop = asyncio.get_running_loop()
    seconds = 0.0

    def waits() -> None:
        if rank == 1:
            loop.call_soon_threadsafe(began.set)
            while not is_interrupted():
                time.sleep(0.001)

    for at_once in (True, False):
        began.clear()
        with before_writes(waits):
            task = asyncio.ensure_future(stio.distributed.save(spread, path))
            if rank == 1:
                await (asyncio.sleep(0) if at_once else began.wait())
                task.cancel()
            begin = time.monotonic()
            with pytest.raises(
                asyncio.CancelledError if rank == 1 else RankError, match=None if rank == 1 else "rank 1"
            ):
                await task
        seconds = max(seconds, time.monotonic() - begin)
        await asyncio.to_thread(dist.barrier)
        assert files_in(path) == before
    began.clear()
    async with stio.distributed.Saver() as saver:
        with before_writes(waits):
            save = await saver.save(spread, path)
            if rank == 1:
                await began.wait()
                save.cancel()
            with pytest.raises(stio.ClosedError if rank == 1 else RankError):
                await save
        await asyncio.to_thread(dist.barrier)
        assert files_in(path) == before
        await (await saver.save({"new": torch.ones(3)}, path + "-next"))
        with pytest.raises(RankError if rank != 2 else KeyError, match="a module that fails"):
            await saver.save(Failing() if rank == 2 else spread, path)
        with pytest.raises(RankError if rank != 3 else TypeError, match="save_state does not take"):
            await saver.save_state({"a": object() if rank == 3 else 1}, path)
        assert files_in(path) == before
        await (await saver.save({"new": torch.zeros(3)}, path + "-next"))
    return "", "", seconds


def everything(folder: str, num_random: int) -> dict[str, Any]:
    """Do all that the tests look at: the start of a process costs more."""
    places = [Place(folder, num_ranks) for num_ranks in (1, 2, 3, 4)]
    for place in places[count(1, 0) :: count(2, 1)]:
        placements(place)
        random_states(place, range(100 * place.num_ranks, 100 * place.num_ranks + num_random))
    whole = places[-1]
    models(whole)
    optimizer_state(whole)
    within_budget(whole)
    over_old_checkpoints(whole)
    asyncio.run(with_a_saver(whole))
    return {"saves": [place.num_saves for place in places], "failures": failures(folder)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of four ranks has found."""
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(everything, 4, folder, str(folder), count(1, 3))


def test_files_are_those_of_one_process(found: list[dict[str, Any]]) -> None:
    """At 2 and 4 ranks, in `make nightly` at 1 and 3 too; the comparison is in the ranks."""
    assert all(one["saves"][3] > count(20, 30) for one in found)
    assert found[0]["saves"][:3] == ([12, 12, 12] if LONG else [0, 10, 0])


def test_one_failure_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    """With its cause, and within two seconds; the old checkpoint is unchanged, and nothing is beside it."""
    for name in found[0]["failures"]:
        outcomes = [one["failures"][name] for one in found]
        if name in ("cancel", "part"):
            continue
        own = [kind for kind, _, _ in outcomes if kind != "RankError"]
        assert own, name
        assert {cause for kind, cause, _ in outcomes if kind == "RankError"} <= set(own), (name, outcomes)
    assert max(seconds for one in found for _, _, seconds in one["failures"].values()) < 2
    assert {one["failures"]["part"][0] for one in found[:3]} <= {"MismatchError", "RankError"}


# A rank that is killed.


def killed(folder: str, victim: int, moment: str) -> tuple[str, str, float]:
    """Save over an old checkpoint; one rank ends at its first write, or before the commit."""
    rank, path = dist.get_rank(), f"{folder}/old"
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    spread = {f"w{k}": spread_of(torch.ones(300, 1024), mesh, [Shard(0)]) for k in range(3)}
    if rank == 0:
        sync.save({"old": torch.ones(3), "older": torch.zeros(2)}, path, max_shard_size=12)
    dist.barrier()
    if rank == victim:
        if moment == "write":
            hook_writes(lambda: os.kill(os.getpid(), signal.SIGKILL))
        else:
            LocalTransaction.prepare_commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        sync.distributed.save(spread, path, rank_timeout=2.0)
    seconds = time.monotonic() - begin
    if rank == 0:
        assert not [name for name in os.listdir(path) if name.startswith(".stio")], "the first rank has removed all"
    return type(caught.value).__name__, str(caught.value), seconds


@pytest.mark.parametrize(
    ("victim", "moment", "text"),
    [
        pytest.param(1, "write", "rank 1 gave no sign of life for 2 s", marks=pytest.mark.slow),
        pytest.param(0, "write", "does not answer", marks=pytest.mark.slow),
        (0, "commit", "does not answer"),
    ],
)
def test_a_killed_rank_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, moment: str, text: str
) -> None:
    """The others raise; what the first rank leaves behind is found by the next save, or by `stio gc`."""
    results = run_ranks(killed, 3, tmp_path, str(tmp_path), victim, moment, killed=[victim])
    assert results[victim] is None
    for kind, message, seconds in (result for result in results if result is not None):
        assert kind == "RankError" and text in message and seconds < 3, message
    path = tmp_path / "old"
    left = [name for name in os.listdir(path) if name.startswith(".stio")]
    assert bool(left) == (victim == 0)
    assert sync.load(path)["old"].tolist() == [1, 1, 1]
    assert len(sweep(monkeypatch, path).undone) == len(left)
    assert sync.load(path)["old"].tolist() == [1, 1, 1]
    assert not [name for name in os.listdir(path) if name.startswith(".stio")]


@pytest.mark.slow
def test_random_states(tmp_path: Path) -> None:
    """Many random meshes, placements, shapes and dtypes, on 1 to 4 ranks."""
    run_ranks(many_random_states, 4, tmp_path, str(tmp_path), 60)


def many_random_states(folder: str, num_random: int) -> None:
    for place in [Place(folder, num_ranks) for num_ranks in (1, 2, 3, 4)]:
        random_states(place, range(1000 * place.num_ranks, 1000 * place.num_ranks + num_random))
