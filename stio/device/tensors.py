"""Between the format's dtypes and torch's, and tensors made over memory that somebody else filled.

Every tensor gets a storage of exactly its bytes and a version counter of its own: views of one big buffer
poison `torch.save`, the hub's splitter, `save_model` and in-place edits under autograd. DLPack gives both
without a copy, and without dropping the GIL (nearly every other torch call drops it, which costs up to 5 ms a
tensor beside a busy Python thread). One tensor takes about 1 microsecond.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from stio.errors import UnsupportedDtypeError, printable
from stio.format.slicing import Selection
from stio.runtime.memory import Region
from stio.runtime.process import collection_paused

__all__ = [
    "FORMAT_DTYPES",
    "TORCH_DTYPES",
    "Casts",
    "cast",
    "finish",
    "require_dtypes",
    "tensors_in",
    "torch_shape",
    "typed",
]

# DLPack's DLDataTypeCode (dlpack.h 1.1).
_INT, _UINT, _FLOAT, _BFLOAT, _COMPLEX, _BOOL = 0, 1, 2, 4, 5, 6
_F8_E4M3, _F8_E4M3FNUZ, _F8_E5M2, _F8_E5M2FNUZ, _F8_E8M0, _F4_E2M1 = 10, 11, 12, 13, 14, 17

# Name in the format: (name in torch, numpy dtype of the same size, DLPack code, bits, lanes).
_TABLE: dict[str, tuple[str, str, int, int, int]] = {
    "BOOL": ("bool", "u1", _BOOL, 8, 1),
    "F4": ("float4_e2m1fn_x2", "u1", _F4_E2M1, 4, 2),
    "U8": ("uint8", "u1", _UINT, 8, 1),
    "I8": ("int8", "i1", _INT, 8, 1),
    "F8_E5M2": ("float8_e5m2", "u1", _F8_E5M2, 8, 1),
    "F8_E4M3": ("float8_e4m3fn", "u1", _F8_E4M3, 8, 1),
    "F8_E8M0": ("float8_e8m0fnu", "u1", _F8_E8M0, 8, 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", "u1", _F8_E4M3FNUZ, 8, 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", "u1", _F8_E5M2FNUZ, 8, 1),
    "I16": ("int16", "i2", _INT, 16, 1),
    "U16": ("uint16", "u2", _UINT, 16, 1),
    "F16": ("float16", "f2", _FLOAT, 16, 1),
    "BF16": ("bfloat16", "u2", _BFLOAT, 16, 1),
    "I32": ("int32", "i4", _INT, 32, 1),
    "U32": ("uint32", "u4", _UINT, 32, 1),
    "F32": ("float32", "f4", _FLOAT, 32, 1),
    "C64": ("complex64", "c8", _COMPLEX, 64, 1),
    "F64": ("float64", "f8", _FLOAT, 64, 1),
    "I64": ("int64", "i8", _INT, 64, 1),
    "U64": ("uint64", "u8", _UINT, 64, 1),
}

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, row[0]) for name, row in _TABLE.items() if hasattr(torch, row[0])
}
"""The format's dtype names that this torch has a type for."""

FORMAT_DTYPES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The way back."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_NUMPY = {name: np.dtype(row[1]) for name, row in _TABLE.items()}
# What numpy itself says in a capsule; where it differs from the truth (bfloat16 as uint16), the word is patched.
_WORDS = {name: code | bits << 8 | lanes << 16 for name, (_, _, code, bits, lanes) in _TABLE.items()}
_DLTENSOR_DTYPE_AT = 20  # void* data, int32 device type and id, int32 ndim, then the dtype's four bytes

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def require_dtypes(dtypes: Sequence[str], *, path: str) -> None:
    """Raise `UnsupportedDtypeError` for the first dtype that this torch cannot hold."""
    for dtype in dict.fromkeys(dtypes):
        if dtype not in TORCH_DTYPES:
            raise UnsupportedDtypeError(
                "torch has no such dtype; leave these tensors out by names=, or convert the file",
                path=path,
                expected=f"one of {', '.join(sorted(TORCH_DTYPES))}",
                found=dtype,
            )


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return torch's shape for a shape of the format: two F4 numbers are one element of torch's."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape


def _patched(array: np.ndarray[Any, Any], word: int) -> torch.Tensor:
    capsule = array.__dlpack__()
    ctypes.c_uint32.from_address(_capsule_pointer(capsule, b"dltensor") + _DLTENSOR_DTYPE_AT).value = word
    return torch._C._from_dlpack(capsule)  # torch.from_dlpack would ask the array for a capsule of its own


def _through_bytes(array: np.ndarray[Any, Any], dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Take the long way for dtypes that this torch's DLPack does not read: the storage of a byte tensor."""
    return typed(torch.from_numpy(array.reshape(-1).view(np.uint8)), dtype, shape)


def typed(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor on the storage of `flat`, which begins at its start and is no view of it.

    Args:
        flat: Any tensor whose storage holds exactly the bytes.
        dtype: The new tensor's dtype, in the format.
        shape: Its shape, as torch counts.
    """
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    wanted = torch.empty(0, dtype=TORCH_DTYPES[dtype], device=flat.device)
    with torch.no_grad():
        wanted.set_(flat.untyped_storage(), 0, shape, strides[::-1])
    return wanted


def _dlpack_reads(dtype: str) -> bool:
    try:
        return _patched(np.zeros(2, _NUMPY[dtype]), _WORDS[dtype]).dtype == TORCH_DTYPES[dtype]
    except (BufferError, RuntimeError, ValueError):
        return False


@dataclass(frozen=True, slots=True)
class _Layout:
    """How tensors of one dtype are made."""

    numpy: np.dtype[Any]
    torch: torch.dtype
    alignment: int
    word: int  # what to write over the capsule's dtype; 0 where numpy's own is the truth
    by_dlpack: bool


def _layout(dtype: str) -> _Layout:
    numpy = _NUMPY[dtype]
    by_dlpack = _dlpack_reads(dtype)
    tells_truth = by_dlpack and torch._C._from_dlpack(np.zeros(2, numpy).__dlpack__()).dtype == TORCH_DTYPES[dtype]
    # Not numpy's alignment: to numpy a C64 is two floats, to torch eight bytes.
    return _Layout(numpy, TORCH_DTYPES[dtype], numpy.itemsize, 0 if tells_truth else _WORDS[dtype], by_dlpack)


_LAYOUTS = {dtype: _layout(dtype) for dtype in TORCH_DTYPES}


def tensors_in(
    region: Region,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[int],
) -> dict[str, torch.Tensor]:
    """Make tensors over host memory.

    Args:
        region: The memory; each tensor keeps its owner alive.
        names: Names of the tensors.
        dtypes: Their dtypes in the format, all known to this torch.
        shapes: Their shapes in the format.
        offsets: Where each begins in the region. One that does not fall on its dtype's alignment is copied.

    Returns:
        The tensors by name, each with a storage of exactly its bytes.
    """
    with collection_paused(len(names)):
        return _make(region, names, dtypes, shapes, offsets)


def _make(
    region: Region,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[int],
) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    owner = region.owner
    base = region.address - ctypes.addressof(owner) if owner is not None else 0
    address, array, word_at = region.address, np.ndarray, ctypes.c_uint32.from_address
    # Everything that costs a call is bound to a local: the loop is what 100,000 tensors wait for.
    pointer, from_dlpack, layouts = _capsule_pointer, torch._C._from_dlpack, _LAYOUTS
    for name, dtype, shape, offset in zip(names, dtypes, shapes, offsets, strict=True):
        layout = layouts[dtype]
        if dtype == "F4":
            shape = torch_shape(dtype, shape)
        if 0 in shape:
            result[name] = torch.empty(shape, dtype=layout.torch, device="cpu")  # not where a default device says
            continue
        data = array(shape, layout.numpy, owner, base + offset)
        if (address + offset) % layout.alignment:
            data = data.copy()
        if not layout.by_dlpack:
            result[name] = _through_bytes(data, dtype, shape)
            continue
        capsule = data.__dlpack__()
        if layout.word:
            word_at(pointer(capsule, b"dltensor") + _DLTENSOR_DTYPE_AT).value = layout.word
        result[name] = from_dlpack(capsule)
    return result


Casts: TypeAlias = torch.dtype | Mapping[str, torch.dtype]
"""What to cast to: one dtype, for the floating tensors; or by name, for those that are named, whatever they are."""


def finish(
    tensors: dict[str, torch.Tensor], posts: Mapping[str, Selection], dtype: Casts | None
) -> dict[str, torch.Tensor]:
    """Pick what is left to pick from partly read tensors, and cast, where they are.

    Raises:
        UnsupportedDtypeError: torch has no cast from a tensor's dtype (packed F4).
    """
    for name, selection in posts.items():
        own = tensors[name].dtype
        # Bits are moved, not numbers: as integers, since torch neither flips nor picks every dtype.
        tensor = tensors[name].view(_INTEGERS[own.itemsize])
        if selection.post is not None:
            tensor = tensor[selection.post]
        tensor = tensor.flip(selection.flip) if selection.flip else tensor.clone(memory_format=torch.contiguous_format)
        tensors[name] = typed(tensor, FORMAT_DTYPES[own], tuple(tensor.shape))
    if dtype is not None:
        for name, tensor in tensors.items():
            wanted = dtype if isinstance(dtype, torch.dtype) else dtype.get(name)
            floats = tensor.is_floating_point() or not isinstance(dtype, torch.dtype)
            if floats and wanted is not None and tensor.dtype != wanted:
                tensors[name] = cast(name, tensor, wanted)
    return tensors


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of another dtype.

    Raises:
        UnsupportedDtypeError: torch has no such cast (packed F4).
    """
    try:
        return tensor.to(dtype)
    except NotImplementedError as error:
        raise UnsupportedDtypeError(
            f"torch cannot cast {printable(name)!r}; leave it out by names=, or load it as it is",
            expected=str(dtype),
            found=str(tensor.dtype),
        ) from error
