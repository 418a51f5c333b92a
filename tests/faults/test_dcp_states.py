"""407. A state that torch's distributed checkpoint saves by stio's writer comes back by each reader, or is refused."""

from __future__ import annotations

import copy
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed.ranks import run_ranks
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from stio import sync
from stio.distributed import StioStager, StioStorageReader, StioStorageWriter


def trained(*, shard: bool = False, kind: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
    if shard:
        fully_shard(model)
    optimizer = kind(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return model, optimizer


def save(state: dict[str, Any], path: Path, **options: Any) -> None:
    writer = StioStorageWriter(path, durability="none", rank_timeout=30)
    dcp.save(state, storage_writer=writer, no_dist=not dist.is_initialized(), **options)


def whole(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: whole(one) for key, one in value.items()}
    if isinstance(value, list):
        return [whole(one) for one in value]
    return value.full_tensor() if isinstance(value, DTensor) else value


def require_equal(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in expected]
        for key in expected:
            require_equal(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            require_equal(one, other)
    elif isinstance(expected, torch.Tensor):
        assert torch.equal(whole(found), whole(expected))
    else:
        assert found == expected


def zeroed(state: Any) -> Any:
    state = copy.deepcopy(state)
    for values in state["optim"]["state"].values():
        for tensor in values.values():
            tensor.zero_()
    return state


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_c407_an_optimizer_comes_back_by_each_reader(kind: Any, tmp_path: Path) -> None:
    model, optimizer = trained(kind=kind)
    state = {"model": dict(model.state_dict()), "optim": optimizer.state_dict()}
    save(state, tmp_path / "a")
    require_equal(sync.load_state(tmp_path / "a"), state)
    again = kind(model.parameters(), lr=0.5)
    again.load_state_dict(sync.load_state(tmp_path / "a")["optim"])
    require_equal(again.state_dict(), optimizer.state_dict())
    by_name = sync.load(tmp_path / "a")
    for number, values in state["optim"]["state"].items():
        for name, tensor in values.items():
            if isinstance(tensor, torch.Tensor):
                assert torch.equal(by_name[f"optim.state.{number}.{name}"], tensor)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_c407_an_optimizer_comes_back_in_place(tmp_path: Path) -> None:
    model, optimizer = trained()
    state = {"model": dict(model.state_dict()), "optim": optimizer.state_dict()}
    save(state, tmp_path / "a")
    target = zeroed(state)
    dcp.load(target, storage_reader=StioStorageReader(tmp_path / "a"), no_dist=True)
    require_equal(target, state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_c407_plain_values_at_number_keys_are_refused_by_dcp(tmp_path: Path) -> None:
    """torch's planner would leave the old value at 0, and put the new one at "0"."""
    save({"state": {0: {"step": 7, "m": torch.ones(2)}}, "list": [{"x": 1}], "text": {"0": 2}}, tmp_path / "a")
    target = {"state": {0: {"step": 0, "m": torch.zeros(2)}}, "list": [{"x": 0}], "text": {"0": 0}}
    with pytest.raises(CheckpointException, match="state.0.step is a plain value.*stio.load_state"):
        dcp.load(target, storage_reader=StioStorageReader(tmp_path / "a"), no_dist=True)
    require_equal(target, {"state": {0: {"step": 0, "m": torch.zeros(2)}}, "list": [{"x": 0}], "text": {"0": 0}})
    del target["state"][0]["step"]
    dcp.load(target, storage_reader=StioStorageReader(tmp_path / "a"), no_dist=True)
    require_equal(target, {"state": {0: {"m": torch.ones(2)}}, "list": [{"x": 1}], "text": {"0": 2}})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_c407_keys_and_empty_containers(tmp_path: Path) -> None:
    state: dict[Any, Any] = {
        "int": {0: 1, -3: torch.ones(2), "7": 2},
        "bool": {True: 1, None: 2},
        "float": {0.5: [{}]},
        "tuple": {(0, "a"): torch.ones(1)},
        "none": {},
        "list": [],
        "deep": {"a": {"b": {}}, "c": [1, {2: {}}]},
        5: torch.zeros(3),
        "a.b": {"c": 1},
        "last": {},
        "pair": ({0: 1}, {}),
    }
    save(state, tmp_path / "a")
    require_equal(sync.load_state(tmp_path / "a"), state)
    save({"ordered": OrderedDict([(1, 2)])}, tmp_path / "b")
    require_equal(sync.load_state(tmp_path / "b"), {"ordered": {1: 2}})
    save({"plain": {"0": torch.ones(2)}}, tmp_path / "c")  # all in the name
    assert sync.load(tmp_path / "c").keys() == {"plain.0"}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_c407_after_a_snapshot(tmp_path: Path) -> None:
    state = {"state": {0: {"m": torch.ones(2)}, 1: {}}, "empty": {}, "step": 3}
    writer = StioStorageWriter(tmp_path / "a", durability="none")
    dcp.async_save(state, storage_writer=writer, async_stager=StioStager(), no_dist=True).result()
    require_equal(sync.load_state(tmp_path / "a"), state)


class Renaming(DefaultSavePlanner):
    """Saves another state than that of the call."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        super().set_up_planner({"renamed": state_dict}, storage_meta, is_coordinator)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_c407_a_planner_of_another_state(tmp_path: Path) -> None:
    """Text keys are as the planner has them; numbers are not known, and refused."""
    save({"a": {"b": 1, "c": torch.ones(1)}}, tmp_path / "a", planner=Renaming())
    require_equal(sync.load_state(tmp_path / "a"), {"renamed": {"a": {"b": 1, "c": torch.ones(1)}}})
    with pytest.raises(CheckpointException, match="'renamed.a.0'.*torch's own planner"):
        save({"a": {0: 1, "c": torch.ones(1)}}, tmp_path / "b", planner=Renaming())
    assert not (tmp_path / "b").exists()


def on_ranks(folder: str) -> None:
    path, rank = Path(folder), dist.get_rank()
    model, optimizer = trained(shard=True)
    state = {"model": dict(model.state_dict()), "optim": optimizer.state_dict(), "of": {rank: {"x": rank}, "none": {}}}
    save(state, path / "a")
    both = {**state, "of": {0: {"x": 0}, "none": {}, 1: {"x": 1}}}
    expected = whole(both)
    loaded = sync.load_state(path / "a")
    require_equal(loaded, expected)
    target = {key: zeroed(state)[key] for key in ("model", "optim")}  # torch puts other values at keys of text
    dcp.load(target, storage_reader=StioStorageReader(path / "a"))
    require_equal(target, {key: state[key] for key in target})
    target = zeroed(both)
    sync.distributed.load_into(target, path / "a")
    require_equal(target, both)


def test_c407_on_two_ranks(tmp_path: Path) -> None:
    run_ranks(on_ranks, 2, tmp_path, str(tmp_path))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "state",
    [{"a": {0: torch.ones(2)}}, {"m": {"w": torch.ones(1)}, "optim": {"state": {}}}, {"a": {}, "b": {"c": {}}}],
    ids=["number", "empty beside", "empty"],
)
def test_c407_a_state_without_plain_values(state: dict[str, Any], tmp_path: Path) -> None:
    save(state, tmp_path / "s")
    require_equal(sync.load_state(tmp_path / "s"), state)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_c407_a_planner_that_leaves_a_key_out(tmp_path: Path) -> None:
    class Fewer(DefaultSavePlanner):
        def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
            kept = {name: value for name, value in state_dict.items() if name != "left"}
            super().set_up_planner(kept, storage_meta, is_coordinator)

    state = {"layers": {"0": torch.ones(2)}, "left": torch.zeros(1)}
    dcp.save(state, storage_writer=StioStorageWriter(tmp_path / "s"), planner=Fewer(), no_dist=True)
    assert list(sync.load(tmp_path / "s")) == ["layers.0"]
