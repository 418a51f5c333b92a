"""`dcp.load` with `StioStorageReader`: what ranks hold is what torch's own reader gives them, and errors say why."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.ranks import run_ranks
from test_load import WAYS, large_model, local_of, new_model, odd_tensors
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

import stio
from stio import sync
from stio.distributed import StioStorageReader
from stio.distributed.parts import part_of
from stio.distributed.placements import Cut, local_part
from stio.errors import ClosedError, FormatError, MismatchError
from stio.loading.targets.base import joined

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.distributed is unavailable:UserWarning"),
]


# Ranks.


def locals_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: local_of(tensor).detach().clone() for name, tensor in state.items()}


def every_way(path: str) -> int:
    """Shard a model in every way; what torch leaves on the rank is what a load must bring back."""
    num_compared = 0
    for shard in WAYS:
        model = new_model()
        shard(model)
        state = model.state_dict()
        expected = locals_of(state)
        for reader in (StioStorageReader(path), dcp.HuggingFaceStorageReader(path)):
            with torch.no_grad():
                for tensor in state.values():
                    local_of(tensor).fill_(-1)
            dcp.load(state, storage_reader=reader)
            same = [torch.equal(local_of(tensor), expected[name]) for name, tensor in state.items()]
            assert all(same), (shard.__name__, type(reader).__name__)
            num_compared += len(same)
    return num_compared


def all_placements(path: str) -> int:
    """Distribute tensors over meshes, zero them, and load them."""
    tensors = sync.load(path)
    num = 0
    choices: list[Placement] = [Shard(0), Shard(1), Replicate()]
    for mesh in (init_device_mesh("cpu", (4,)), init_device_mesh("cpu", (2, 2))):
        for chosen in [[one] for one in choices] if mesh.ndim == 1 else [[a, b] for a in choices for b in choices]:
            state = {name: distribute_tensor(tensor.clone(), mesh, chosen) for name, tensor in tensors.items()}
            expected = locals_of(state)
            for tensor in state.values():
                tensor.to_local().zero_()
            dcp.load(state, storage_reader=StioStorageReader(path))
            for name, tensor in state.items():
                assert torch.equal(tensor.to_local(), expected[name]), (chosen, name)
                num += 1
    return num


def training_state(tensors: dict[str, Any], *, lr: float = 0.5, epoch: int = 3, note: bytes = b"x") -> dict[str, Any]:
    """Return the state of a model and of its optimizer, as `get_state_dict` of torch names it."""
    moments = {name: {"step": torch.tensor(float(epoch)), "exp_avg": tensor} for name, tensor in tensors.items()}
    groups = [{"lr": lr, "betas": (0.9, lr), "params": list(tensors) if epoch else []}]
    return {
        "optim": {"state": moments, "param_groups": groups},
        "epoch": epoch,
        "note": note,
        "sizes": [[1, 2], [epoch]],
        "mixed": [torch.full((2,), float(epoch)), {"none": None if epoch else 1}],
    }


def nested(path: str) -> dict[str, Any]:
    """Load nested state into `DTensor`s; return its other values."""
    mesh = init_device_mesh("cpu", (4,))
    spread = {name: distribute_tensor(one.clone(), mesh, [Shard(0)]) for name, one in odd_tensors().items()}
    expected = locals_of(spread)
    for tensor in spread.values():
        tensor.to_local().zero_()
    state = training_state(spread, lr=0.0, epoch=0, note=b"")
    dcp.load(state, storage_reader=StioStorageReader(path))
    for name, moments in state["optim"].pop("state").items():
        assert moments["exp_avg"] is spread[name]
        assert torch.equal(moments["exp_avg"].to_local(), expected[name])
        assert moments["step"].item() == 3
    return state


def refused(state: dict[str, Any], path: str) -> dict[int, str]:
    """Return the error of each rank, of a load that fails."""
    with pytest.raises(CheckpointException) as caught:
        dcp.load(state, storage_reader=StioStorageReader(path))
    return {rank: f"{type(error).__name__}: {error}" for rank, (error, _) in caught.value.failures.items()}


def one_rank_differs(path: str) -> dict[int, str]:
    """Load into an integer on one rank; nothing is read there, and the error is raised on all."""
    dtype = torch.int32 if dist.get_rank() == 1 else torch.float32
    target = torch.full((13, 7), 5, dtype=dtype)
    found = refused({"odd": target}, path)
    assert dist.get_rank() != 1 or (target == 5).all()
    return found


def own_share(path: str) -> tuple[int, int]:
    """Return the bytes that this rank reads, and holds."""
    model = large_model()
    for layer in model:
        fully_shard(layer)
    trace = stio.Trace()
    dcp.load(model.state_dict(), storage_reader=StioStorageReader(path, memory="copy", trace=trace))
    read = sum(span.num_bytes for span in trace.spans if span.name == "read")
    return read, sum(local_of(one).nbytes for one in model.parameters())


def everything(folder: str) -> dict[str, Any]:
    """Do all that the tests look at: the start of a process costs more."""
    return {
        "ways": every_way(f"{folder}/model"),
        "placements": all_placements(f"{folder}/odd.safetensors"),
        "nested": nested(f"{folder}/state"),
        "refused": one_rank_differs(f"{folder}/odd.safetensors"),
        "share": own_share(f"{folder}/large"),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of four ranks has found."""
    folder = tmp_path_factory.mktemp("ranks")
    sync.save(new_model(), folder / "model", max_shard_size=3000)
    sync.save(odd_tensors(), folder / "odd.safetensors")
    sync.save(large_model(), folder / "large")
    sync.save_state(training_state(odd_tensors()), folder / "state")
    return run_ranks(everything, 4, folder, str(folder))


def test_every_way_to_shard(found: list[dict[str, Any]]) -> None:
    """FSDP2, HSDP, tensor parallelism and both: as torch's own reader, over several files with an index."""
    assert {one["ways"] for one in found} == {2 * len(WAYS) * len(new_model().state_dict())}


def test_every_placement(found: list[dict[str, Any]]) -> None:
    """Rows and inner dimensions, uneven and empty parts, on meshes of one and two dimensions."""
    assert {one["placements"] for one in found} == {12 * len(odd_tensors())}


def test_nested_state(found: list[dict[str, Any]]) -> None:
    """The state of an optimizer and plain values, which stio saved, under the names of DCP."""
    expected = training_state(odd_tensors())
    del expected["optim"]["state"]
    for one in found:
        mixed = one["nested"]["mixed"]
        assert torch.equal(mixed[0], torch.full((2,), 3.0))
        assert mixed[1] == {"none": None}
        assert {key: one["nested"][key] for key in expected if key != "mixed"} == {
            key: value for key, value in expected.items() if key != "mixed"
        }


def test_an_error_of_one_rank_is_raised_on_all(found: list[dict[str, Any]]) -> None:
    for one in found:
        assert list(one["refused"]) == [1]
        assert one["refused"][1].startswith("MismatchError: ")
        assert "another dtype" in one["refused"][1]


def test_a_rank_reads_its_share(found: list[dict[str, Any]]) -> None:
    """At most 2 % more than it holds."""
    for read, held in (one["share"] for one in found):
        assert held == 8 * 512 * 512 * 4 // 4
        assert held <= read <= 1.02 * held


@pytest.mark.parametrize("rank", range(6))
def test_places_that_torch_computes_wrongly(tmp_path: Path, rank: int) -> None:
    """13 and 27 rows over FSDP on 3 ranks and tensor parallelism on 2: torch's helper is wrong for some of them."""
    whole = {f"w{rows}": torch.arange(float(rows * 3)).reshape(rows, 3) for rows in (13, 27)}
    sync.save(whole, tmp_path / "m.safetensors")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
    try:
        mesh = init_device_mesh("cpu", (3, 2))
        state = {}
        for name, tensor in whole.items():
            shape, coordinate = tuple(tensor.shape), mesh.get_coordinate()
            assert coordinate is not None
            index = local_part(shape, (3, 2), coordinate, [Cut(0, 2), Cut(0)])
            local, placements = torch.zeros_like(tensor[index]), [_StridedShard(0, split_factor=2), Shard(0)]
            state[name] = DTensor.from_local(local, mesh, placements, shape=tensor.shape, stride=(3, 1))
        dcp.load(state, storage_reader=StioStorageReader(tmp_path / "m.safetensors"), no_dist=True)
        for name, tensor in state.items():
            assert torch.equal(tensor.to_local(), whole[name][part_of(name, tensor).index])
    finally:
        dist.destroy_process_group()


# One process.


class Halves(DefaultLoadPlanner):
    """Reads each tensor by several items: corners, or rows that are not neighbours."""

    def __init__(self, boxes: list[tuple[slice, ...]]) -> None:
        super().__init__()
        self._boxes = boxes
        self.committed: list[torch.Tensor] = []

    def create_local_plan(self) -> LoadPlan:
        plan = super().create_local_plan()
        items = []
        for item in plan.items:
            for box in self._boxes:
                offsets, sizes = torch.Size([s.start for s in box]), torch.Size([s.stop - s.start for s in box])
                items.append(
                    ReadItem(item.type, item.dest_index, offsets, item.storage_index, offsets, sizes),
                )
        return LoadPlan(items)

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.committed.append(tensor.clone())


BOXES = {
    "rows": [(slice(0, 2), slice(0, 6)), (slice(5, 8), slice(0, 6))],
    "touching": [(slice(0, 4), slice(0, 6)), (slice(4, 8), slice(0, 6))],
    "columns": [(slice(0, 8), slice(1, 2)), (slice(0, 8), slice(4, 6))],
    "corners": [(slice(0, 3), slice(0, 2)), (slice(6, 8), slice(3, 6)), (slice(0, 1), slice(5, 6))],
    "same": [(slice(1, 3), slice(2, 4)), (slice(1, 3), slice(2, 4))],
}


@pytest.mark.parametrize("boxes", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("memory", ["map", "copy"])
def test_several_items_of_one_tensor(tmp_path: Path, boxes: list[tuple[slice, ...]], memory: Any) -> None:
    whole = torch.arange(48.0).reshape(8, 6)
    sync.save({"w": whole}, tmp_path / "m.safetensors")
    target, expected = torch.full((8, 6), -1.0), torch.full((8, 6), -1.0)
    for box in boxes:
        expected[box] = whole[box]
    planner = Halves(boxes)
    reader = StioStorageReader(tmp_path / "m.safetensors", memory=memory)
    dcp.load({"w": target}, storage_reader=reader, planner=planner, no_dist=True)
    assert torch.equal(target, expected)
    assert [one.tolist() for one in planner.committed] == [whole[box].tolist() for box in boxes]


@pytest.mark.parametrize("boxes", BOXES.values(), ids=BOXES)
def test_joined_boxes_are_in_what_is_read(boxes: list[tuple[slice, ...]]) -> None:
    whole = torch.arange(48).reshape(8, 6)
    index, places = joined(boxes)
    read = whole
    for dim, one in enumerate(index):
        parts = one if isinstance(one, list) else [one]
        read = torch.cat([read.narrow(dim, part.start, part.stop - part.start) for part in parts], dim)
    for box, place in zip(boxes, places, strict=True):
        assert torch.equal(read[place], whole[box])


def test_gaps_between_rows_are_not_read() -> None:
    assert joined(BOXES["rows"])[0] == ([slice(0, 2), slice(5, 8)], slice(0, 6))
    assert joined(BOXES["touching"])[0] == (slice(0, 8), slice(0, 6))


def load(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=StioStorageReader(path, **options), no_dist=True)


def failure(state: dict[str, Any], path: Path, **options: Any) -> BaseException:
    with pytest.raises(CheckpointException) as caught:
        load(state, path, **options)
    return caught.value.failures[0][0]


def test_floating_tensors_are_cast_and_memory_is_filled_in_place(tmp_path: Path) -> None:
    whole = torch.randn(4, 3).bfloat16()
    sync.save({"w": whole, "tied": whole, "n": torch.tensor(7), "none": torch.zeros(0, 2)}, tmp_path / "m")
    state = {"w": torch.zeros(4, 3), "tied": torch.zeros(3, 4).T, "n": torch.tensor(0), "none": torch.zeros(0, 2)}
    targets = dict(state)
    load(state, tmp_path / "m")
    assert all(state[name] is targets[name] for name in targets)
    assert torch.equal(state["w"], whole.float())
    assert torch.equal(state["tied"], whole.float())
    assert state["n"] == 7


@pytest.mark.parametrize(
    ("state", "kind", "text"),
    [
        ({"w": torch.ones(4, 4)}, ValueError, "Size mismatch"),
        ({"lacking": torch.ones(4)}, RuntimeError, "Missing key"),
        ({"w": torch.ones(4, 3, dtype=torch.int64)}, MismatchError, r"m: w has another dtype.*expected torch\.int64"),
        ({"n": torch.ones(())}, MismatchError, r"n has another dtype"),
        ({"w": torch.ones(4, 1).expand(4, 3)}, MismatchError, "share memory"),
    ],
)
def test_differences_are_errors_before_a_read(
    tmp_path: Path, state: dict[str, Any], kind: type[Exception], text: str
) -> None:
    sync.save({"w": torch.zeros(4, 3), "n": torch.tensor(7), "other": torch.zeros(5)}, tmp_path / "m")
    state = {"other": torch.ones(5), **state}
    found = failure(state, tmp_path / "m")
    assert isinstance(found, kind)
    with pytest.raises(kind, match=text):
        raise found
    assert (state["other"] == 1).all()


def test_an_error_of_the_open_is_that_of_the_load(tmp_path: Path) -> None:
    """torch 2.13 would make an AssertionError of one that `read_metadata` raises."""
    found = failure({"w": torch.ones(1)}, tmp_path / "none")
    assert isinstance(found, stio.CheckpointNotFoundError) and "there is no such" in str(found)
    reader = StioStorageReader(tmp_path / "none")
    with pytest.raises(stio.CheckpointNotFoundError, match="there is no such"):
        _ = reader.read_metadata().state_dict_metadata
    with pytest.raises(stio.CheckpointNotFoundError, match="there is no such"):
        reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
    (tmp_path / "bad.safetensors").write_bytes(b"\x00" * 20)
    assert isinstance(failure({"w": torch.ones(1)}, tmp_path / "bad.safetensors"), FormatError)


def test_verify_and_limits(tmp_path: Path) -> None:
    sync.save({"w": torch.zeros(4, 3)}, tmp_path / "m")
    assert "manifest" in str(failure({"w": torch.ones(4, 3)}, tmp_path / "m", verify=True))
    sync.save({"w": torch.zeros(4, 3)}, tmp_path / "hashed", hash="sha256")
    state = {"w": torch.ones(4, 3)}
    load(state, tmp_path / "hashed", verify=True)
    assert not state["w"].any()
    assert "limit" in str(failure(state, tmp_path / "m", limits=stio.Limits(max_tensors=0)))


def test_nothing_of_a_file_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the planner unpickles was pickled here, from the values that stio decoded."""
    sync.save_state({"a": b"cos\nsystem\n(S'false'\ntR.", "n": 1}, tmp_path / "s")
    pickled: list[object] = []
    save = torch.save
    monkeypatch.setattr(torch, "save", lambda value, to: (pickled.append(value), save(value, to)))
    state = {"a": b"", "n": 0}
    load(state, tmp_path / "s")
    assert state == {"a": b"cos\nsystem\n(S'false'\ntR.", "n": 1}
    assert pickled == [state["a"], 1]


def test_nested_states_that_do_not_fit(tmp_path: Path) -> None:
    sync.save_state({"t": (torch.ones(2), 1), "n": 1}, tmp_path / "tuple")
    state = {"n": 0}
    load(state, tmp_path / "tuple")
    assert state == {"n": 1}
    assert "a tuple with tensors" in str(failure({"t": 0}, tmp_path / "tuple"))
    sync.save_state({"a.b": 1, "a": {"b": 2}}, tmp_path / "same")
    with pytest.raises(MismatchError, match="one name"):
        _ = StioStorageReader(tmp_path / "same").read_metadata().state_dict_metadata
    sync.save({"x": torch.ones(1)}, tmp_path / "bad", metadata={"stio.states": "1"})
    assert list(StioStorageReader(tmp_path / "bad").read_metadata().state_dict_metadata) == ["x"]


def test_long_values_and_trees(tmp_path: Path) -> None:
    """A long tree, and long bytes, are tensors in the file, and not in the state."""
    state = {"long": b"x" * 100_000, "many": {str(k): k for k in range(20_000)}, "w": torch.arange(3)}
    sync.save_state(state, tmp_path / "s")
    loaded = {"long": b"", "w": torch.zeros(3, dtype=torch.int64), "many": {"19999": 0}}
    load(loaded, tmp_path / "s")
    assert loaded["long"] == state["long"]
    assert loaded["many"] == {"19999": 19999}
    assert torch.equal(loaded["w"], torch.arange(3))


def test_a_state_without_a_template(tmp_path: Path) -> None:
    """torch's converters rebuild the state from the metadata."""
    state = training_state({"w": torch.ones(2, 3)})
    sync.save_state(state, tmp_path / "s")
    from_keys = dcp.state_dict_loader._load_state_dict_from_keys
    found = from_keys({"optim"}, storage_reader=StioStorageReader(tmp_path / "s"))
    assert found["optim"]["param_groups"] == state["optim"]["param_groups"]
    assert torch.equal(found["optim"]["state"]["w"]["exp_avg"], torch.ones(2, 3))


def test_the_life_of_a_reader(tmp_path: Path) -> None:
    for k in range(2):
        sync.save({"w": torch.full((3,), float(k))}, tmp_path / f"{k}.safetensors")
    reader = StioStorageReader(tmp_path / "0.safetensors")
    for k in (0, 1, 0):
        state = {"w": torch.ones(3)}
        dcp.load(state, storage_reader=reader, checkpoint_id=tmp_path / f"{k}.safetensors", no_dist=True)
        assert (state["w"] == k).all()
        assert reader.checkpoint_id == str(tmp_path / f"{k}.safetensors")
    with pytest.raises(ClosedError, match="read_metadata"):
        reader.read_data(LoadPlan([]), DefaultLoadPlanner())
    assert reader.validate_checkpoint_id(tmp_path)
    assert reader.validate_checkpoint_id("s3://bucket/model/")
    assert not reader.validate_checkpoint_id(tmp_path / "none")
    (tmp_path / "0.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(FormatError):
        _ = StioStorageReader(tmp_path / "0.safetensors").read_metadata().state_dict_metadata


def test_files_are_closed(tmp_path: Path) -> None:
    """After a load, and when a plan has failed and the reader is gone."""
    sync.save({"w": torch.zeros(4, 3)}, tmp_path / "m")
    where = Path("/proc/self/fd")
    if not where.exists():
        pytest.skip("the system does not list open files")

    def num_open() -> int:
        return sum(str(tmp_path) in os.readlink(one) for one in where.iterdir() if one.is_symlink())

    load({"w": torch.zeros(4, 3)}, tmp_path / "m", memory="copy")
    failure({"lacking": torch.zeros(4, 3)}, tmp_path / "m")
    reader = StioStorageReader(tmp_path / "m")
    reader.read_metadata()
    assert num_open() > 0
    reader.reset()
    gc.collect()  # the functions of torch that failed are in a cycle with their reader
    assert num_open() == 0
