"""numpy arrays over a file's bytes, without torch.

Whole arrays are views of the mapping, or have memory of their own (`pread`). They are writable; writing never changes
the file. numpy itself has no bfloat16 and no float8: these work once `ml_dtypes` has been imported.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import numpy as np

from stio.compat.safetensors._errors import SafetensorError, UnsupportedDtypeError, reading
from stio.compat.safetensors._file import DropInFile, Framework, checked, offsets_in
from stio.format.dtypes import LIBRARY_NAMES
from stio.format.header import Header
from stio.format.slicing import select
from stio.runtime.memory import Region

Array = np.ndarray[Any, Any]

_IN_NUMPY = ("F64", "F32", "F16", "I64", "U64", "I32", "U32", "I16", "U16", "I8", "U8", "C64")
NUMPY_TYPES: dict[str, Any] = {name: getattr(np, LIBRARY_NAMES[name]) for name in _IN_NUMPY} | {"BOOL": bool}
"""Types that numpy has by itself. It finds the others by name once `ml_dtypes` has registered them."""

# On a little-endian machine `newbyteorder("<")` would be another object, with "<f4" for memoryview, which it refuses.
_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(kind) if sys.byteorder == "little" else np.dtype(kind).newbyteorder("<")
    for name, kind in NUMPY_TYPES.items()
}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for one of the format.

    Raises:
        UnsupportedDtypeError: numpy has none.
    """
    found = _DTYPES.get(dtype)
    if found is not None:
        return found
    name = LIBRARY_NAMES.get(dtype)
    if name is None or dtype == "F4":  # packed in the file, and in no type of `ml_dtypes`
        raise UnsupportedDtypeError(f"Dtype not understood: {dtype}; numpy has no such type")
    try:
        return np.dtype(name)
    except TypeError as error:
        raise UnsupportedDtypeError(
            f"data type {name!r} not understood: import ml_dtypes first, or use framework='pt'"
        ) from error


class Arrays(Framework):
    """Makes numpy arrays; see `Framework`."""

    def __init__(self, device: str | int) -> None:
        if device != "cpu":
            raise SafetensorError(f"Device {device} is not supported for framework numpy")

    def make(self, region: Region, header: Header, rows: slice) -> dict[str, Array]:
        columns = header.names[rows], header.dtypes[rows], header.shapes[rows], offsets_in(header, rows)
        base = region.address - ctypes.addressof(region.owner)
        return {
            name: _array(region.owner, base + offset, numpy_dtype(dtype), shape)
            for name, dtype, shape, offset in zip(*columns, strict=True)
        }

    def make_part(self, file: DropInFile, row: int, index: Any) -> Array:
        header = file.header
        shape, kind = header.shapes[row], numpy_dtype(header.dtypes[row])
        index = checked(index, shape, negative_steps=True)
        if file.is_mapped:
            rows = slice(row, row + 1)
            return np.asarray(self.make(file.region_of(rows), header, rows)[header.names[row]][index], order="C")
        with reading(file.path):
            selection = select(index, shape, kind.itemsize)
        region = file.gather(row, selection)
        base = region.address - ctypes.addressof(region.owner)
        compact = _array(region.owner, base, kind, selection.read_shape)
        if selection.post is not None:
            compact = compact[(*selection.post, ...)]
        if selection.flip:
            compact = np.flip(compact, selection.flip)
        return np.asarray(compact, order="C")


def _array(owner: Any, at: int, kind: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the array at an offset in memory, or a copy of it if it would not be aligned."""
    if 0 in shape:
        return np.zeros(shape, kind)
    array: Array = np.ndarray(shape, kind, owner, at)
    return array if array.flags.aligned else array.copy()
