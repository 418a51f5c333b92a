"""Raw memory to bytes and back: `TensorSpec`, `serialize`, `deserialize`, `load`, and the private helpers beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch as official
import torch
from support import needs_f4

from stio.compat.safetensors import SafetensorError, TensorSpec, deserialize, serialize, serialize_file
from stio.compat.safetensors import numpy as in_numpy
from stio.compat.safetensors import torch as in_torch

T = torch.arange(4.0)
A = np.arange(4, dtype=np.float32)


def spec(**changes: Any) -> TensorSpec:
    return TensorSpec(**{"dtype": "float32", "shape": [4], "data_ptr": A.ctypes.data, "data_len": 16, **changes})


def test_spec() -> None:
    one = spec(shape=(2, 2))
    assert (one.dtype, one.shape, one.data_ptr, one.data_len) == ("F32", [2, 2], A.ctypes.data, 16)
    theirs = safetensors.TensorSpec(dtype="float32", shape=(2, 2), data_ptr=A.ctypes.data, data_len=16)
    assert repr(one) == repr(theirs)
    assert spec(dtype="float4_e2m1fn_x2", shape=[2, 2]).shape == [2, 4]
    assert spec(shape=torch.Size([2, 2])).shape == [2, 2]
    assert spec(shape=np.array([4])).shape == [4]
    with pytest.raises(AttributeError):
        one.dtype = "F64"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"dtype": "F32"}, "SafetensorError"),
        ({"dtype": 1}, "TypeError"),
        ({"shape": [-1]}, "OverflowError"),
        ({"shape": [2**64]}, "OverflowError"),
        ({"shape": [1.0]}, "TypeError"),
        ({"shape": "12"}, "TypeError"),
        ({"shape": None}, "TypeError"),
        ({"shape": iter([4])}, "TypeError"),
        ({"data_ptr": -1}, "OverflowError"),
        ({"data_len": 1.5}, "TypeError"),
    ],
)
def test_specs_that_cannot_be(changes: dict[str, Any], kind: str) -> None:
    with pytest.raises(Exception) as ours:
        spec(**changes)
    with pytest.raises(Exception) as theirs:
        safetensors.TensorSpec(**{"dtype": "float32", "shape": [4], "data_ptr": 0, "data_len": 16, **changes})
    assert type(ours.value).__name__ == type(theirs.value).__name__ == kind


def test_spec_takes_no_positions() -> None:
    with pytest.raises(TypeError):
        TensorSpec("float32", [4], 0, 0)  # type: ignore[misc]


def both(tensors: Any, tmp_path: Path, metadata: Any = None) -> bytes:
    raw = serialize(tensors, metadata)
    serialize_file(tensors, tmp_path / "f", metadata)
    assert (tmp_path / "f").read_bytes() == raw
    return raw


def test_serialize(tmp_path: Path) -> None:
    bits = np.arange(6, dtype=np.uint8)
    theirs = {
        "a": safetensors.TensorSpec(dtype="float32", shape=[4], data_ptr=A.ctypes.data, data_len=16),
        "f": safetensors.TensorSpec(dtype="float4_e2m1fn_x2", shape=[3, 2], data_ptr=bits.ctypes.data, data_len=6),
        "e": safetensors.TensorSpec(dtype="float8_e8m0fnu", shape=[6], data_ptr=bits.ctypes.data, data_len=6),
        "n": safetensors.TensorSpec(dtype="bfloat16", shape=[0], data_ptr=0, data_len=0),
    }
    ours = {
        "a": spec(),
        "f": spec(dtype="float4_e2m1fn_x2", shape=[3, 2], data_ptr=bits.ctypes.data, data_len=6),
        "e": spec(dtype="float8_e8m0fnu", shape=[6], data_ptr=bits.ctypes.data, data_len=6),
        "n": spec(dtype="bfloat16", shape=[0], data_ptr=0, data_len=0),
    }
    assert both(ours, tmp_path, {"k": "v"}) == safetensors.serialize(theirs, {"k": "v"})
    assert both({}, tmp_path) == safetensors.serialize({})


@pytest.mark.parametrize(
    ("tensors", "kind", "message"),
    [
        ([("a", spec())], TypeError, "argument 'tensor_dict': 'list' object is not an instance of 'dict'"),
        ({1: spec()}, TypeError, "argument 'tensor_dict': 'int' object is not an instance of 'str'"),
        (
            {"a": {"dtype": "float32"}},
            TypeError,
            "argument 'tensor_dict': 'dict' object is not an instance of 'TensorSpec'",
        ),
        (
            {"a": spec(data_len=12)},
            SafetensorError,
            "Error while serializing: invalid shape, data type, or offset for tensor",
        ),
        (
            {"a": spec(data_ptr=0)},
            SafetensorError,
            "Error while serializing: invalid shape, data type, or offset for tensor",
        ),
        (
            {"a": spec(shape=[2**40, 2**40], data_len=0)},
            SafetensorError,
            "Error while serializing: overflow computing buffer size",
        ),
        ({"a": spec(dtype="float4_e2m1fn_x2", shape=[], data_len=1)}, SafetensorError, "Error while serializing"),
    ],
)
def test_what_serialize_refuses(tmp_path: Path, tensors: Any, kind: type[Exception], message: str) -> None:
    for call in (lambda: serialize(tensors), lambda: serialize_file(tensors, tmp_path / "f")):
        with pytest.raises(kind) as caught:
            call()
        assert str(caught.value).startswith(message)
    assert os.listdir(tmp_path) == []


def test_deserialize() -> None:
    raw = official.save({"b": T, "a": torch.arange(3), "e": torch.zeros(2, 0, dtype=torch.int16)}, {"k": "v"})
    assert sorted(deserialize(raw)) == sorted(safetensors.deserialize(raw))
    assert [name for name, _ in deserialize(raw)][:2] == ["a", "b"]
    for wrong in (bytearray(raw), memoryview(raw), "text", None):
        with pytest.raises(TypeError, match="argument 'bytes'"):
            deserialize(wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="argument 'bytes'"):
            in_torch.load(wrong)  # type: ignore[arg-type]


def test_load_makes_copies() -> None:
    raw = official.save({"b": T.clone(), "a": torch.arange(3)})
    found = in_torch.load(raw)
    found["b"].add_(1)
    assert in_torch.load(raw)["b"].tolist() == T.tolist()
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in found.values())
    array = in_numpy.load(raw)["a"]
    array[0] = 7
    assert in_numpy.load(raw)["a"][0] == 0


@needs_f4
def test_load_of_dtypes_that_the_original_cannot() -> None:
    """Better: `load` knows no F8_E8M0 and no F4 there."""
    tensors = {
        "e": torch.arange(4, dtype=torch.uint8).view(torch.float8_e8m0fnu),
        "f": torch.arange(4, dtype=torch.uint8).reshape(2, 2).view(torch.float4_e2m1fn_x2),
    }
    found = in_torch.load(in_torch.save(tensors))
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()
