"""The drop-in and huggingface_hub side by side, on random state dicts: the same files, index and refusals."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file as load
from torch import nn

from stio.compat import huggingface_hub as ours

theirs = pytest.importorskip("huggingface_hub.serialization")

QUICK = settings(
    max_examples=int(os.environ.get("HUB_EXAMPLES", "60")), deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.float8_e4m3fn,
    torch.uint16,
]
NAMES = st.sampled_from([*"abcdefgh", "layer.0.weight", "layer.10.weight", "ä", "z z", '"', "\\", "日本"])
SIZES = st.one_of(st.integers(0, 300), st.sampled_from(["1KB", "0.1kb", " 0.05 KB ", "5GB"]))
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=6)


@st.composite
def state_dicts(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Return tensors of which some are the same, some views of another, some without elements."""
    bases: list[torch.Tensor] = []
    found: dict[str, torch.Tensor] = {}
    for name in draw(st.lists(NAMES, unique=True, max_size=8)):
        kind = draw(st.sampled_from(["new", "new", "same", "flat", "part", "tail", "transposed"]))
        if kind == "new" or not bases:
            shape = draw(st.lists(st.integers(0, 5), max_size=3))
            dtype = draw(st.sampled_from(DTYPES))
            count = 1
            for size in shape:
                count *= size
            raw = torch.arange(count * dtype.itemsize, dtype=torch.int64).to(torch.uint8) % (
                2 if dtype == torch.bool else 251
            )
            bases.append(raw.view(dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype))
            found[name] = bases[-1]
            continue
        one = draw(st.sampled_from(bases))
        found[name] = {
            "same": lambda one=one: one,
            "flat": lambda one=one: one.view(-1),
            "part": lambda one=one: one.view(-1)[: one.numel() // 2],
            "tail": lambda one=one: one.view(-1)[one.numel() // 2 :],
            "transposed": lambda one=one: one.clone().t() if one.ndim == 2 else one.clone(),
        }[kind]()
    for name in draw(st.lists(st.sampled_from(sorted(found)), max_size=2)) if found else []:
        found.pop(name, None)
    return found


def outcome(function: Any, *args: Any, **keywords: Any) -> tuple[Any, Exception | None]:
    try:
        return function(*args, **keywords), None
    except Exception as error:
        return None, error


def files_of(folder: Path) -> Mapping[str, bytes]:
    return {name: (folder / name).read_bytes() for name in sorted(os.listdir(folder))}


def is_better(state: Mapping[str, torch.Tensor]) -> bool:
    """Return whether there is a part of a storage that shares nothing: the hub refuses it."""
    for name, tensor in state.items():
        start, stop = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        alone = not any(
            other.data_ptr() < stop and start < other.data_ptr() + other.nbytes
            for key, other in state.items()
            if key != name
        )
        if alone and tensor.untyped_storage().nbytes() != tensor.nbytes:
            return True
    return False


@QUICK
@given(
    state=state_dicts(),
    most=SIZES,
    key=st.one_of(st.none(), TEXT),
    value=TEXT,
    discard=st.lists(NAMES, max_size=3),
    safe=st.sampled_from([True, True, True, False]),
    force=st.sampled_from([True, True, False]),
)
def test_files(
    state: dict[str, torch.Tensor], most: Any, key: str | None, value: str, discard: list[str], safe: bool, force: bool
) -> None:
    metadata = None if key is None else {key: value}
    keywords: dict[str, Any] = {
        "max_shard_size": most,
        "shared_tensors_to_discard": discard,
        "safe_serialization": safe,
        "force_contiguous": force,
    }
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as two:
        _, mine = outcome(ours.save_torch_state_dict, state, one, metadata=metadata, **keywords)
        _, other = outcome(
            theirs.save_torch_state_dict, dict(state), two, metadata=metadata and dict(metadata), **keywords
        )
        if safe and is_better(state):
            assert isinstance(other, RuntimeError)
            if mine is None:
                found = {name: value for path in Path(one).glob("*.safetensors") for name, value in load(path).items()}
                assert all(torch.equal(value, state[name]) for name, value in found.items())
            else:  # for another tensor: overlaps that cover nothing, a layout that was to be refused
                assert isinstance(mine, RuntimeError) or not (force or all_contiguous(state))
            return
        if other is not None:
            assert isinstance(mine, ValueError if isinstance(other, ValueError) else type(other)), (mine, other)
            assert files_of(Path(one)) == {}
            return
        assert mine is None, mine
        files, expected = files_of(Path(one)), files_of(Path(two))
        assert list(files) == list(expected)
        for name, data in files.items():
            if data != expected[name]:  # the official writer puts several metadata keys in any order
                assert name == "model.safetensors", name
                assert same_but_for_order(data, expected[name])


def all_contiguous(state: Mapping[str, torch.Tensor]) -> bool:
    return all(tensor.is_contiguous() for tensor in state.values())


def same_but_for_order(one: bytes, two: bytes) -> bool:
    cut = 8 + int.from_bytes(one[:8], "little")
    return len(one) == len(two) and one[cut:] == two[cut:] and sorted(one[:cut]) == sorted(two[:cut])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.two.weight = self.one.weight


@pytest.mark.costly("random cases")
@QUICK
@given(
    most=st.sampled_from(["5GB", 12, 36]),
    safe=st.booleans(),
    by_us=st.booleans(),
    extra=st.booleans(),
    drop=st.booleans(),
)
def test_each_loads_what_the_other_saved(most: Any, safe: bool, by_us: bool, extra: bool, drop: bool) -> None:
    state = Model().state_dict()
    if extra:
        state["extra"] = torch.ones(9)
    if drop:
        del state["one.bias"]
    with tempfile.TemporaryDirectory() as folder:
        (ours if by_us else theirs).save_torch_state_dict(state, folder, max_shard_size=most, safe_serialization=safe)
        mine, other = Model(), Model()
        for parameter in (*mine.parameters(), *other.parameters()):
            nn.init.zeros_(parameter)
        one = ours.load_torch_model(mine, folder, safe=safe)
        two = theirs.load_torch_model(other, folder, safe=safe)
        assert sorted(one.missing_keys) == sorted(two.missing_keys)
        assert sorted(one.unexpected_keys) == sorted(two.unexpected_keys)
        assert all(torch.equal(a, b) for a, b in zip(mine.parameters(), other.parameters(), strict=True))
