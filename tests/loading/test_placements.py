"""`placements=`: an object of the caller says which part of a tensor is read, and makes the result. No ranks here."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeDevice

import stio
from stio import sync
from stio.errors import MismatchError
from stio.loading.select import PlacedPart


class Marked(torch.Tensor):
    """What the results are."""


class LowerRows:
    """Places each tensor of two dimensions: the first `num` rows are read."""

    def __init__(self, num: int = 2) -> None:
        self.num = num
        self.devices: set[torch.device] = set()

    def part(self, name: str, shape: tuple[int, ...], device: torch.device) -> PlacedPart:
        self.devices.add(device)
        is_matrix = len(shape) == 2
        index = (slice(0, self.num), slice(0, shape[1])) if is_matrix else None
        return PlacedPart(index, lambda tensor: tensor.as_subclass(Marked), (is_matrix, name == "odd"))

    def unused(self, names: Collection[str]) -> list[str]:
        return [] if "w" in names else ["w"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    w = torch.arange(12.0).reshape(4, 3)
    sync.save({"w": w, "tied": w, "odd": w, "v": torch.arange(5, dtype=torch.int32)}, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("memory", ["auto", "copy", "lazy"])
def test_the_parts_are_read_and_results_made(path: Path, memory: Any) -> None:
    found = sync.load(path, names=["w", "tied", "v"], placements=LowerRows(), memory=memory)
    assert found.keys() == {"w", "v", "tied"}
    assert {type(tensor) for tensor in found.values()} == {Marked}
    assert found["w"] is found["tied"]
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert found["v"].tolist() == [0, 1, 2, 3, 4]
    assert found["w"].untyped_storage().nbytes() == 24


def test_copies_of_a_device_have_passed(path: Path) -> None:
    device, placements = FakeDevice(), LowerRows(3)
    found = sync.load(path, names="w", placements=placements, device=device)
    assert type(found["w"]) is Marked
    assert found["w"].tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert device.num_pending == 0
    assert placements.devices == {device.device}


def test_a_stream(path: Path) -> None:
    with (
        sync.open(path) as checkpoint,
        checkpoint.stream(lambda name: name != "odd", placements=LowerRows(1)) as stream,
    ):
        found = dict(stream)
    assert found["w"].tolist() == [[0, 1, 2]]
    assert type(found["v"]) is Marked


def test_names_of_one_tensor_with_different_parts(path: Path) -> None:
    with pytest.raises(MismatchError, match=r"two names of one tensor have different placements.*odd"):
        sync.load(path, placements=LowerRows())


def test_slices_and_parts(path: Path) -> None:
    with pytest.raises(ValueError, match=r"w has an index in slices="):
        sync.load(path, names="w", slices={"w": slice(1)}, placements=LowerRows())
    with pytest.raises(ValueError, match=r"tied has an index in slices="):  # it is the same tensor
        sync.load(path, names="tied", slices={"w": slice(1)}, placements=LowerRows())
    found = sync.load(path, names=["v"], slices={"v": slice(1, 3)}, placements=LowerRows())
    assert found["v"].tolist() == [1, 2]


def test_rules_that_fit_nothing(tmp_path: Path) -> None:
    sync.save({"v": torch.zeros(2)}, tmp_path / "v.safetensors")
    with pytest.raises(stio.TensorNotFoundError, match=r"a rule of placements= matches no tensor.*strict=False"):
        sync.load(tmp_path / "v.safetensors", placements=LowerRows())
    assert list(sync.load(tmp_path / "v.safetensors", placements=LowerRows(), strict=False)) == ["v"]


def test_another_object_is_refused_at_the_call(tmp_path: Path) -> None:
    wrong: Any = {"w": 0}
    with pytest.raises(TypeError, match=r"placements= takes stio\.distributed\.Placements\(mesh, rules\), not dict"):
        sync.load(tmp_path / "missing", placements=wrong)
