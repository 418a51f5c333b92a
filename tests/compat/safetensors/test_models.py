"""`save_model` and `load_model`, and the helpers that say which tensors share memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch as official
import torch
from torch import nn

from stio.compat.safetensors import torch as ours


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.b = nn.Linear(4, 4)
        self.a = nn.Linear(4, 4, bias=False)
        self.a.weight = self.b.weight
        self.register_buffer("steps", torch.arange(3))


class Plain(nn.Module):
    def __init__(self, *, transposed: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        if transposed:
            self.a.weight = nn.Parameter(torch.randn(4, 4).t())


def test_tied_names_are_dropped_and_recorded(tmp_path: Path) -> None:
    model = Tied()
    ours.save_model(model, tmp_path / "ours")
    official.save_model(model, str(tmp_path / "theirs"))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    with safetensors.safe_open(tmp_path / "ours", "pt") as file:
        assert file.metadata() == {"b.weight": "a.weight"}
    fresh = Tied()
    assert ours.load_model(fresh, tmp_path / "ours") == (set(), [])
    assert fresh.a.weight is fresh.b.weight
    for name, tensor in fresh.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])


def test_the_caller_s_metadata(tmp_path: Path) -> None:
    """Better: the original writes into the caller's dict."""
    mine = {"b.weight": "mine", "k": "v"}
    ours.save_model(Tied(), tmp_path / "f", metadata=mine)
    assert mine == {"b.weight": "mine", "k": "v"}
    with safetensors.safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() == mine
    given: dict[str, str] = {}
    ours.save_model(Tied(), tmp_path / "f", metadata=given)
    assert given == {}
    ours.save_model(Plain(), tmp_path / "f")
    with safetensors.safe_open(tmp_path / "f", "pt") as file:
        assert file.metadata() is None


@pytest.mark.parametrize("module", [ours, official], ids=["ours", "theirs"])
def test_contiguity(tmp_path: Path, module: Any) -> None:
    model = Plain(transposed=True)
    with pytest.raises(
        ValueError, match=r"non contiguous tensor: `a.weight`.* Or use save_model\(\.\.\., force_contiguous=True\)"
    ):
        module.save_model(model, str(tmp_path / "f"), force_contiguous=False)
    assert not (tmp_path / "f").exists()
    module.save_model(model, str(tmp_path / "f"))
    fresh = Plain()
    ours.load_model(fresh, tmp_path / "f")
    assert torch.equal(fresh.a.weight, model.a.weight)


@pytest.mark.parametrize("backend", ["mmap", "pread"])
@pytest.mark.parametrize("kept", ["a.weight", "b.weight"])
def test_either_name_of_a_tie_may_be_in_the_file(tmp_path: Path, kept: str, backend: str) -> None:
    tensors = {name: t for name, t in Tied().state_dict().items() if not name.endswith("weight") or name == kept}
    official.save_file(tensors, tmp_path / "f")
    fresh = Tied()
    assert ours.load_model(fresh, str(tmp_path / "f"), backend=backend) == (set(), [])
    assert torch.equal(fresh.a.weight, tensors[kept])


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    ("tensors", "missing", "unexpected"),
    [
        ({"a.weight": torch.zeros(4, 4), "a.bias": torch.zeros(4)}, [], []),
        ({"a.weight": torch.zeros(4, 4)}, ["a.bias"], []),
        (
            {"a.weight": torch.zeros(4, 4), "a.bias": torch.zeros(4), "x": torch.zeros(1), "w": torch.zeros(1)},
            [],
            ["w", "x"],
        ),
        ({"x": torch.zeros(1)}, ["a.bias", "a.weight"], ["x"]),
    ],
)
def test_strict(
    tmp_path: Path, tensors: dict[str, torch.Tensor], missing: list[str], unexpected: list[str], strict: bool
) -> None:
    official.save_file(tensors, tmp_path / "f")
    outcomes = []
    for module in (ours, official):
        try:
            found = module.load_model(Plain(), tmp_path / "f", strict)
            outcomes.append((sorted(found[0]), sorted(found[1])))
        except RuntimeError as error:
            outcomes.append(str(error))
    assert outcomes[0] == outcomes[1]
    if strict and (missing or unexpected):
        assert outcomes[0].startswith("Error(s) in loading state_dict for Plain:\n    ")
    else:
        assert outcomes[0] == (missing, unexpected)


def test_two_tensors_for_one_memory_are_unexpected(tmp_path: Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in Tied().state_dict().items()}
    official.save_file(tensors, tmp_path / "f")
    messages = []
    for module in (ours, official):
        with pytest.raises(RuntimeError, match="Unexpected key") as caught:
            module.load_model(Tied(), tmp_path / "f")
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert ours.load_model(Tied(), tmp_path / "f", strict=False) == official.load_model(
        Tied(), tmp_path / "f", strict=False
    )


def test_a_shape_that_does_not_fit(tmp_path: Path) -> None:
    official.save_file({"a.weight": torch.zeros(2, 2), "a.bias": torch.zeros(4)}, tmp_path / "f")
    with pytest.raises(RuntimeError, match="size mismatch"):
        ours.load_model(Plain(), tmp_path / "f")
    with pytest.raises(FileNotFoundError):
        ours.load_model(Plain(), tmp_path / "nope")


def test_a_part_of_something_larger_is_refused(tmp_path: Path) -> None:
    model = Plain()
    model.a.weight = nn.Parameter(torch.zeros(8, 4)[:4])
    for module in (ours, official):
        with pytest.raises(RuntimeError, match="None is covering the entire storage"):
            module.save_model(model, str(tmp_path / "f"))


BASE = torch.arange(10.0)
SHARING: list[dict[str, torch.Tensor]] = [
    {"a": BASE, "b": BASE},
    {"a": BASE, "b": BASE[:3], "c": torch.ones(2)},
    {"a": BASE[:5], "b": BASE[5:]},
    {"a": BASE[:5], "b": BASE[4:]},
    {"a": BASE[:2], "b": BASE[2:4], "c": BASE[:1]},
    {"a": BASE[::4], "b": BASE[9:]},
    {"a": torch.zeros(0), "b": torch.zeros(3, device="meta"), "c": torch.zeros(())},
    {"b": BASE, "a": BASE, "d": torch.ones(1), "c": BASE.view(2, 5)},
]


@pytest.mark.parametrize("tensors", SHARING, ids=range(len(SHARING)))
def test_who_shares(tensors: dict[str, torch.Tensor]) -> None:
    assert ours._find_shared_tensors(tensors) == official._find_shared_tensors(tensors)
    for name, tensor in tensors.items():
        assert ours.storage_ptr(tensor) == official.storage_ptr(tensor)
        assert ours.storage_size(tensor) == official.storage_size(tensor)
        if tensor.device.type != "meta":
            assert ours._is_complete(tensor) == official._is_complete(tensor), name
            assert ours._end_ptr(tensor) == official._end_ptr(tensor), name


@pytest.mark.parametrize(
    "keywords",
    [
        {},
        {"preferred_names": ["b"]},
        {"preferred_names": ["x"]},
        {"discard_names": ["a"]},
        {"discard_names": ["a", "b", "c"]},
        {"preferred_names": ["a"], "discard_names": ["a"]},
    ],
)
@pytest.mark.parametrize("tensors", SHARING, ids=range(len(SHARING)))
def test_who_is_kept(tensors: dict[str, torch.Tensor], keywords: dict[str, Any]) -> None:
    try:
        expected = official._remove_duplicate_names(tensors, **keywords)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="found no suitable name to keep"):
            ours._remove_duplicate_names(tensors, **keywords)
    else:
        assert ours._remove_duplicate_names(tensors, **keywords) == expected


def test_the_end_of_what_cannot_be_flattened() -> None:
    """Better: the original raises for it."""
    matrix = torch.zeros(3, 4)
    assert ours._end_ptr(matrix.t()) == matrix.data_ptr() + 48
    assert ours._end_ptr(matrix[:, :2]) == matrix.data_ptr() + 40
