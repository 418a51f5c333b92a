"""Saves by torch's distributed checkpoint: the files of `stio.save` where there are tensors only, or nested state."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.ranks import run_ranks
from safetensors import safe_open
from support import before_writes, eventually, hook_writes
from test_load import WAYS, Model, by_fsdp, by_hsdp, new_model
from test_save import failing_once, files_in, odd_tensors, patched, spread_of, tensor_of
from torch.distributed.checkpoint import DefaultSavePlanner, HuggingFaceStorageReader, SavePlan, SavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from stio import sync
from stio.distributed import StioStager, StioStorageWriter
from stio.errors import SaveInProgressError
from stio.saving import pending
from stio.saving.staging_pool import StagingPool
from stio.storage.commit.recovery import collect_garbage
from stio.storage.commit.transaction import FilesTransaction, LocalTransaction


def whole_of(tensor: Any) -> Any:
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else tensor


def whole_state(state: Any) -> Any:
    """Return nested state with whole tensors, and with text as keys as DCP has them."""
    if isinstance(state, dict):
        return {str(key): whole_state(value) for key, value in state.items()}
    return [whole_state(value) for value in state] if isinstance(state, list) else whole_of(state)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def require_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            require_equal(found[key], expected[key])
    elif isinstance(expected, list | tuple):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(bytes_of(found), bytes_of(expected))
    else:
        assert found == expected


def writer(path: str, **options: Any) -> StioStorageWriter:
    return StioStorageWriter(path, rank_timeout=30, **{"durability": "none", **options})


def saved_as_whole(folder: str, name: str, state: dict[str, Any], whole: dict[str, Any], **options: Any) -> None:
    """Save by DCP beside nothing, and over a checkpoint; the files are those of `stio.save` of the whole."""
    path, expected_path = f"{folder}/{name}", ""
    dcp.save(state, storage_writer=writer(path, **options))
    if dist.get_rank() == 0:
        expected_path = f"{folder}/whole-{name}"
        sync.save(whole, expected_path, shared="clone", **options)
        assert files_in(path) == files_in(expected_path), name
        sync.save({"old": torch.ones(3)}, path, **options)
    dist.barrier()
    dcp.save(state, storage_writer=writer(path, **options))
    if dist.get_rank() == 0:
        loaded = sync.load(path)
        assert list(loaded) == list(sync.load(expected_path))
        for key, tensor in sync.load(expected_path).items():
            assert torch.equal(bytes_of(loaded[key]), bytes_of(tensor))
    dist.barrier()


def tensors_only(folder: str) -> None:
    two = init_device_mesh("cpu", (2, 2))
    one = init_device_mesh("cpu", (4,))
    rules: list[tuple[DeviceMesh, Sequence[Placement]]] = [
        (one, [Shard(0)]),
        (one, [Shard(1)]),
        (one, [Replicate()]),
        (two, [Shard(0), Shard(1)]),
        (two, [Replicate(), Shard(0)]),
    ]
    whole = odd_tensors()
    for k, (mesh, rule) in enumerate(rules):
        flat = [Shard(0) if isinstance(one, Shard) else one for one in rule]
        state = {name: spread_of(tensor, mesh, rule if tensor.ndim > 1 else flat) for name, tensor in whole.items()}
        plain, size = {"plain": torch.arange(5)}, 300_000 if k % 2 else "1GB"
        durability = "none" if k else "full"
        saved_as_whole(folder, f"rule-{k}", state | plain, whole | plain, max_shard_size=size, durability=durability)
    state = {name: spread_of(tensor, one, [Shard(0)]) for name, tensor in whole.items()}
    saved_as_whole(folder, "one.safetensors", state, whole, metadata={"a": "b"}, hash="sha256")
    for shard in (by_fsdp, by_hsdp, *WAYS[2:]):
        model = new_model()
        shard(model)
        name = shard.__name__
        try:
            state = model.state_dict()
            saved_as_whole(folder, name, state, whole_state(state), max_shard_size=1000)
        except CheckpointException as error:  # torch cuts tensors wrongly that are cut twice
            assert name == "by_both" and ("stio.distributed.save" in str(error) or "global plan" in str(error)), error
            dist.barrier()


class Halving(DefaultSavePlanner):
    """A planner that makes other tensors of them."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        for item in plan.items:
            if item.tensor_data is not None:
                item.tensor_data.properties.dtype = torch.bfloat16
        return plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        found = super().resolve_data(write_item)
        return found if write_item.type == WriteItemType.BYTE_IO else found.to(torch.bfloat16)


class TwoParts(DefaultSavePlanner):
    """A planner that gives columns of one tensor to one rank, as several items."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            rows, columns = data.size
            for first in range(0, columns, 3):
                chunk = replace(
                    data.chunk, offsets=torch.Size([0, first]), sizes=torch.Size([rows, min(3, columns - first)])
                )
                index = replace(item.index, offset=chunk.offsets)
                tensor_data = replace(data, chunk=chunk)
                items.append(replace(item, index=index, type=WriteItemType.SHARD, tensor_data=tensor_data))
        return replace(plan, items=items)

    def lookup_object(self, index: Any) -> Any:
        tensor = self.state_dict[index.fqn]
        first = index.offset[1]
        return tensor[:, first : first + 3]


def other_planners(folder: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    whole = {"a": tensor_of((13, 7), torch.float32, 1), "b": tensor_of((40, 11), torch.float32, 2)}
    state = {name: spread_of(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    dcp.save(state | {"step": 3}, storage_writer=writer(f"{folder}/half"), planner=Halving())
    dcp.save(whole, storage_writer=writer(f"{folder}/parts"), planner=TwoParts())
    dcp.save({"a": {"b": [1, {"c": 2}]}}, storage_writer=writer(f"{folder}/deep"), planner=DefaultSavePlanner(False))
    if dist.get_rank() == 0:
        half = sync.load_state(f"{folder}/half")
        require_equal(half, {name: tensor.to(torch.bfloat16) for name, tensor in whole.items()} | {"step": 3})
        require_equal(sync.load(f"{folder}/parts"), dict(sorted(whole.items())))
        require_equal(sync.load_state(f"{folder}/deep"), {"a": {"b": [1, {"c": 2}]}})


def other_options(folder: str) -> None:
    """The coordinator's options count on all ranks: another header would move the data."""
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    whole = {f"w{k}": tensor_of((40, 11), torch.float32, k) for k in range(3)}
    state = {name: spread_of(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    own: list[dict[str, Any]] = [
        {"metadata": {"host": "x" * (10 + 50 * rank)}},
        {"metadata": None if rank else {"note": "hello"}},
        {"max_shard_size": 2000 + 2000 * rank},
        {"hash": None if rank else "sha256"},
    ]
    dcp.save(state, storage_writer=writer(f"{folder}/wrapped"), planner=Wrapping())
    if rank == 0:
        require_equal(sync.load(f"{folder}/wrapped"), whole)
    for k, options in enumerate(own):
        dcp.save(state, storage_writer=writer(f"{folder}/options{k}", **options))
        if rank == 0:
            require_equal(sync.load(f"{folder}/options{k}", verify="hash" in options), whole)
        dist.barrier()


class Wrapping(SavePlanner):
    """A planner that does not derive from torch's default one; it saves tensors only."""

    def __init__(self) -> None:
        self._inner = DefaultSavePlanner()

    def set_up_planner(self, *arguments: Any, **keywords: Any) -> None:
        self._inner.set_up_planner(*arguments, **keywords)

    def create_local_plan(self) -> SavePlan:
        return self._inner.create_local_plan()

    def create_global_plan(self, all_plans: list[SavePlan]) -> Any:
        return self._inner.create_global_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return self._inner.finish_plan(new_plan)

    def resolve_data(self, write_item: Any) -> Any:
        return self._inner.resolve_data(write_item)


class OtherValue(DefaultSavePlanner):
    """Saves another value than the state has."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return super().transform_object(write_item, 3 if object == 2 else object)


def trained(shard: Callable[[Model], None]) -> dict[str, Any]:
    """Return the state of a training: tensors, plain values, and what only looks like a tensor's name."""
    torch.manual_seed(1)
    model = new_model()
    shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.8, 0.9))
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optim": get_optimizer_state_dict(model, optimizer),
        "loop": {
            "step": 12345678901234567890,
            "loss": float("inf"),
            "name": "run-ü",
            "none": None,
            "raw": bytes(range(256)),
            "long": bytes(100_000),
            "shape": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "order": OrderedDict(b=1, a=2),
            "seen": [1, 2.5, True, "x"],
            "history": [{"epoch": 0, "best": torch.ones(2)}, {"epoch": 1, "best": torch.zeros(2)}],
            "pair": (1, ("a", None)),
            "empty": [],
            "a.b": 1,
        },
    }


def nested(folder: str) -> None:
    for k, options in enumerate([{}, {"max_shard_size": 3000, "hash": "sha256"}]):
        state, path = trained(by_fsdp if k else by_hsdp), f"{folder}/nested-{k}"
        if dist.get_rank() == 0:
            sync.save({"old": torch.ones(3)}, path)
        dist.barrier()
        once = writer(path, metadata={"a": "b"}, **options)
        hashed = names_of_hashed_files(lambda: dcp.save(state, storage_writer=once))  # noqa: B023  # called at once
        require_shared_hashes(hashed, bool(options))
        whole = whole_state(state)
        whole["loop"]["order"] = {"b": 1, "a": 2}  # DCP makes dicts of all mappings
        if dist.get_rank():
            assert once.result is None
            continue
        require_equal(sync.load_state(path), whole)
        assert once.result is not None and once.result.total_bytes == sum(t.nbytes for t in sync.load(path).values())
        names = {"model.head.weight", "optim.state.head.weight.exp_avg", "loop.history.1.best", "/stio.state"}
        found = {}
        for file in once.result.files:
            with safe_open(f"{path}/{file}", framework="pt") as opened:
                found |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        assert names <= found.keys()
        wanted = {name: torch.zeros_like(found[name]) for name in names}
        dcp.load(wanted, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
        assert all(torch.equal(wanted[name], found[name]) for name in names)
        assert sync.load_state(path, verify=bool(options))["loop"]["raw"] == bytes(range(256))
        assert once.result.hashes.keys() == (set(once.result.files) if options else set())


def names_of_hashed_files(save: Callable[[], object]) -> list[str]:
    """Return the names of the files of a save that this rank has read to hash them."""
    names, digest = list[str](), FilesTransaction.digest

    def noted(self: FilesTransaction, name: str, *rest: Any) -> str:
        names.append(name)
        return digest(self, name, *rest)

    with patched(FilesTransaction, "digest", noted):
        save()
    return names


def require_shared_hashes(hashed: list[str], expected: bool) -> None:
    """Require that each file was read on one rank, and that all ranks have read some."""
    of_ranks: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(of_ranks, hashed)
    every = [name for names in of_ranks for name in names]
    assert len(set(every)) == len(every)
    assert all(bool(names) is expected for names in of_ranks), of_ranks


def asynchronous(folder: str) -> None:
    """Two saves by one stager: the state changes after each snapshot, and the second one uses the memory again."""
    state = trained(by_fsdp)
    tensors = [*state["model"].values(), state["loop"]["history"][0]["best"]]
    stager, seen = StioStager(), []
    for k in range(3):
        expected = whole_state(state)
        saving = dcp.async_save(state, storage_writer=writer(f"{folder}/async-{k}"), async_stager=stager)
        state["loop"]["seen"].append(k)
        with torch.no_grad():
            for tensor in tensors:
                tensor.add_(1)
        saving.result()
        del saving
        assert eventually(lambda: (gc.collect(), stager._free)[1]), "DCP's thread releases the snapshot"
        seen.append({memory[1].address for memory in stager._free})
        if dist.get_rank() == 0:
            found = sync.load_state(f"{folder}/async-{k}")
            expected["loop"]["order"] = {"b": 1, "a": 2}
            expected["loop"]["seen"] = [1, 2.5, True, "x", *range(k)]
            require_equal(found, expected)
    assert seen[1] == seen[2] != set(), "the memory of a snapshot is used for the next one"
    first = stager.stage(state)
    second = stager.stage(state)
    one, other = first["model"]["head.weight"], second["model"]["head.weight"]
    assert isinstance(one, DTensor) and one.placements == state["model"]["head.weight"].placements
    if one.to_local().numel():
        assert one.to_local().data_ptr() != other.to_local().data_ptr(), "the first snapshot is in use"
    stager.close()
    assert not stager._free
    del first, one
    assert not stager._free


class Odd:
    """A value that nothing can restore without its class."""


def staging_in(path: str) -> list[str]:
    return [name for name in os.listdir(path) if name.startswith(".stio")]


def refused(path: str, text: str, state: Any, *, planner: SavePlanner | None = None, **options: Any) -> float:
    """Save over an old checkpoint; the error is raised on all ranks. What was there is there, and nothing else."""
    before = files_in(path)
    dist.barrier()
    begin = time.monotonic()
    saving = writer(path, **options)
    with pytest.raises(CheckpointException, match=text):
        dcp.save(state, storage_writer=saving, planner=planner)
    seconds = time.monotonic() - begin
    dist.barrier()
    assert files_in(path) == before, "the coordinator has removed what it had written"
    dist.barrier()
    return seconds


class Swapped(DefaultSavePlanner):
    """Takes the parts of two ranks for each other, as torch's own offsets do where a dimension is cut twice."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            data = item.tensor_data
            assert data is not None
            first = {0: 100, 100: 0}.get(data.chunk.offsets[0], data.chunk.offsets[0])
            chunk = replace(data.chunk, offsets=torch.Size([first, 0]))
            index = replace(item.index, offset=chunk.offsets)
            items.append(replace(item, index=index, tensor_data=replace(data, chunk=chunk)))
        return replace(plan, items=items)


class LateFailure(StioStorageWriter):
    """A writer that fails on one rank when all have written."""

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        super().write_data(plan, planner)
        if dist.get_rank() == 1:
            raise OSError("a late failure")
        return super_future()


class FailingPlanner(DefaultSavePlanner):
    """Fails on one rank before the writer is called there."""

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        if dist.get_rank() == 2:
            raise OSError("a planner that fails")
        return super().finish_plan(new_plan)


def super_future() -> Any:
    future: torch.futures.Future[list[Any]] = torch.futures.Future()
    future.set_result([])
    return future


def failures(folder: str) -> list[float]:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (4,))
    path = f"{folder}/old"
    whole = {f"w{k}": tensor_of((400, 1024), torch.float32, k) for k in range(4)}
    spread: dict[str, Any] = {name: spread_of(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    if rank == 0:
        sync.save({"old": torch.ones(3), "older": torch.zeros(2)}, path, max_shard_size=12)
    dist.barrier()
    cached = DefaultSavePlanner(enable_plan_caching=True)
    dcp.save(spread, storage_writer=writer(f"{folder}/cached"), planner=cached)
    seconds = [
        refused(path, r"state\['x.y'\]\[0\] is a .*Odd", spread | {"x": {"y": (Odd(), 1), "z": 2}}),
        refused(path, "is a tensor inside of a value", spread | {"x": (torch.ones(2),)}),
        refused(path, "no such dtype", spread | {"x": torch.ones(2, dtype=torch.complex128)}),
        refused(path, "stio's own", spread | {"step": 1, "/stio.state": torch.ones(1)}),
        refused(path, "caches plans", spread, planner=cached),
        refused(path, "'step': the planner saves another value", spread | {"step": 2}, planner=OtherValue()),
        refused(path, "another part of 'w0' to this rank", spread, planner=Swapped()),
    ]
    for failing in (0, 2):
        with before_writes(failing_once(None) if rank == failing else lambda: None):
            seconds.append(refused(path, "Input/output error", spread))
    with patched(LocalTransaction, "prepare_commit", failing_once(LocalTransaction, "prepare_commit")):
        seconds.append(refused(path, "a disk that fails", spread | {"step": 3}))
    saving = writer(path)
    saving._rank_timeout = 1
    with pytest.raises(CheckpointException, match="a planner that fails"):
        dcp.save(spread, storage_writer=saving, planner=FailingPlanner())
    dist.barrier()
    assert not staging_in(path)
    late_failure(path, spread)
    saving._is_writing = True
    with pytest.raises(SaveInProgressError, match="writing another save"):
        saving.set_up_storage_writer(rank == 0)
    with pytest.raises(ValueError, match="use_collectives=False"):
        writer(path).set_up_storage_writer(rank == 0, rank=rank, use_collectives=False)
    with pytest.raises(ValueError, match="no path"):
        StioStorageWriter().set_up_storage_writer(rank == 0)
    for destination, text in (("s3://bucket/x", "filesystem that all ranks share"), ("a.pt", "another kind")):
        with pytest.raises(ValueError, match=text):
            StioStorageWriter(destination)
        assert not StioStorageWriter.validate_checkpoint_id(destination)
    assert StioStorageWriter.validate_checkpoint_id(path)
    return seconds


def late_failure(path: str, state: dict[str, Any]) -> None:
    """What fails when all ranks have written is too late: the new checkpoint is there, complete."""
    with pytest.raises(CheckpointException, match="a late failure"):
        dcp.save(state, storage_writer=LateFailure(path))
    dist.barrier()
    assert not staging_in(path)
    assert set(sync.load(path)) == state.keys()
    dist.barrier()


def of_some_ranks(folder: str) -> None:
    """Two ranks save; the writer has to know which ones."""
    pair = dist.new_group([1, 3])
    if dist.get_rank() in (1, 3):
        mesh = DeviceMesh.from_group(pair, "cpu")
        state: dict[str, Any] = {"w": spread_of(torch.arange(7.0), mesh, [Shard(0)]), "step": 3}
        with pytest.raises(CheckpointException, match="process group of dcp.save"):
            dcp.save(state, storage_writer=writer(f"{folder}/pair"), process_group=pair)
        dcp.save(
            state,
            checkpoint_id=f"{folder}/pair",
            storage_writer=StioStorageWriter(process_group=pair),
            process_group=pair,
        )
        if dist.get_rank() == 1:
            require_equal(sync.load_state(f"{folder}/pair"), {"w": torch.arange(7.0), "step": 3})
    dist.barrier()


def within_budget(folder: str) -> None:
    """Staging memory stays within the budget; torch gets no copies."""
    mesh, peaks = init_device_mesh("cpu", (4,)), []
    state = {f"w{k}": spread_of(tensor_of((256, 8192), torch.float32, k), mesh, [Shard(k % 2)]) for k in range(4)}

    class Counted(StagingPool):
        def clear(self) -> None:
            peaks.append(self.peak_bytes)
            super().clear()

    with patched(pending, "StagingPool", Counted):
        dcp.save(state, storage_writer=writer(f"{folder}/budget", budget_bytes=4 << 20))
    assert 0 < max(peaks) <= 4 << 20


def everything(folder: str) -> list[float]:
    for part in (tensors_only, other_planners, other_options, nested, asynchronous, of_some_ranks, within_budget):
        part(folder)
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    return failures(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[list[float]], Path]:
    folder = tmp_path_factory.mktemp("dcp")
    (folder / "saved").mkdir()
    return run_ranks(everything, 4, folder, str(folder / "saved")), folder / "saved"


@pytest.mark.slow
def test_files_are_those_of_one_process(found: tuple[list[list[float]], Path]) -> None:
    """Run `everything`: its asserts are in the ranks. No file of DCP's own format is left."""
    names = {path.name for path in found[1].rglob("*") if path.is_file()}
    assert names and not [name for name in names if name.endswith(".distcp") or name == ".metadata"]


@pytest.mark.slow
def test_one_failure_is_raised_on_all(found: tuple[list[list[float]], Path]) -> None:
    assert max(max(seconds) for seconds in found[0]) < 15, "no rank waits for a deadline (30 s)"


def dying(path: str, dead: int) -> float:
    mesh = init_device_mesh("cpu", (2,))
    state = {f"w{k}": spread_of(torch.rand(4000, 100), mesh, [Shard(0)]) for k in range(3)}
    if dist.get_rank() == dead:
        hook_writes(lambda: os.kill(os.getpid(), signal.SIGKILL))
    begin = time.monotonic()
    saving = StioStorageWriter(path, rank_timeout=1)
    # DCP then waits for the dead rank in a collective call, which fails.
    with pytest.raises((CheckpointException, RuntimeError)):
        dcp.save(state, storage_writer=saving)
    return time.monotonic() - begin


@pytest.mark.slow
@pytest.mark.parametrize("dead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank(dead: int, tmp_path: Path) -> None:
    """The old checkpoint remains. If the coordinator was killed, recovery removes what it has left."""
    path = tmp_path / "old"
    sync.save({"old": torch.ones(3)}, path)
    before = files_in(str(path))
    results = run_ranks(dying, 2, tmp_path, str(path), dead, killed=[dead])
    assert results[1 - dead] < 4
    assert bool(staging_in(str(path))) is not bool(dead)
    assert set(sync.load(path)) == {"old"}
    collect_garbage(path)
    assert files_in(str(path)) == before


def test_one_process(tmp_path: Path) -> None:
    """Without torch.distributed; the writer and the stager can be used again, and the writer can be pickled."""
    saving, stager = pickle.loads(pickle.dumps(StioStorageWriter(tmp_path / "a", budget_bytes=1 << 20))), StioStager()
    state: dict[str, Any] = {"w": torch.arange(5.0), "half": torch.ones(2, 3).to(torch.float16), "step": 1}
    with pytest.warns(UserWarning, match="single process"):
        for name in ("a", "b"):
            dcp.save(state, checkpoint_id=tmp_path / name, storage_writer=saving)
            require_equal(sync.load_state(tmp_path / name), state)
            assert saving.result.path == str(tmp_path / name)
    with pytest.warns(UserWarning, match="single process"):
        dcp.async_save(state, storage_writer=StioStorageWriter(tmp_path / "c"), async_stager=stager).result()
    require_equal(sync.load_state(tmp_path / "c"), state)
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({}, storage_writer=StioStorageWriter(tmp_path / "none"))
        dcp.save({"x": 1}, storage_writer=StioStorageWriter(tmp_path / "value.safetensors"))
    assert sync.load(tmp_path / "none") == {}
    assert sync.load_state(tmp_path / "value.safetensors") == {"x": 1}
    assert sorted(os.listdir(tmp_path)) == ["a", "b", "c", "none", "value.safetensors"]
