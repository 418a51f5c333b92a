"""numpy arrays over a file's bytes, without torch.

Whole arrays lie on the mapping, or on memory of their own (`pread`); they may be written to, and the file never
changes by that. What numpy itself has no type for (bfloat16, float8) is there once `ml_dtypes` has been imported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from stio.compat.safetensors._errors import SafetensorError, UnsupportedDtypeError
from stio.compat.safetensors._file import File
from stio.compat.safetensors._index import checked
from stio.format.slicing import select
from stio.runtime.memory import Region

__all__ = ["NUMPY_TYPES", "Arrays", "numpy_dtype"]

Array = np.ndarray[Any, Any]

NUMPY_TYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "I64": np.int64,
    "U64": np.uint64,
    "I32": np.int32,
    "U32": np.uint32,
    "I16": np.int16,
    "U16": np.uint16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": bool,
    "C64": np.complex64,
}
"""Types that numpy has by itself."""

_BY_NAME = {
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
"""Names under which `ml_dtypes` registers the others."""

_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(kind).newbyteorder("<") for name, kind in NUMPY_TYPES.items()}


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for one of the format.

    Raises:
        UnsupportedDtypeError: numpy has none.
    """
    found = _DTYPES.get(dtype)
    if found is not None:
        return found
    name = _BY_NAME.get(dtype)
    if name is None:
        raise UnsupportedDtypeError(f"Dtype not understood: {dtype}; numpy has no such type")
    try:
        return np.dtype(name)
    except TypeError as error:
        raise UnsupportedDtypeError(
            f"data type {name!r} not understood: import ml_dtypes first, or use framework='pt'"
        ) from error


class Arrays:
    """Makes numpy arrays."""

    def __init__(self, device: str | int) -> None:
        if device != "cpu":
            raise SafetensorError(f"Device {device} is not supported for framework numpy")

    def make(
        self,
        region: Region,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        offsets: Sequence[int],
    ) -> dict[str, Array]:
        """Return arrays over a region, by name; one that is not aligned there is copied."""
        owner = region.owner
        base = region.address - ctypes.addressof(owner)
        arrays: dict[str, Array] = {}
        for name, dtype, shape, offset in zip(names, dtypes, shapes, offsets, strict=True):
            kind = numpy_dtype(dtype)
            if 0 in shape:
                arrays[name] = np.zeros(shape, kind)
                continue
            array: Array = np.ndarray(shape, kind, owner, base + offset)
            arrays[name] = array if array.flags.aligned else array.copy()
        return arrays

    def whole(self, file: File) -> dict[str, Array] | None:
        """Return None: there is no shorter way to all arrays of a file than `make`."""
        return None

    def pick(self, file: File, row: int, index: Any) -> Array:
        """Return a part of an array; only its bytes are read."""
        header = file.header
        dtype, shape, begin = header.dtypes[row], header.shapes[row], header.begins[row]
        kind = numpy_dtype(dtype)
        wanted = checked(index, shape, negative_steps=True)
        if file.is_mapped:
            whole = self.make(file.region(begin, header.ends[row] - begin), [""], [dtype], [shape], [0])[""]
            part: Array = whole[(*wanted, ...)]
            return part if part.flags.c_contiguous else part.copy()
        selection = select(wanted, shape, kind.itemsize)
        region = file.gather(begin, selection.starts, selection.chunk_bytes)
        compact = self.make(region, [""], [dtype], [selection.read_shape], [0])[""]
        if selection.post is not None:
            compact = compact[(*selection.post, ...)]
        if selection.flip:
            compact = np.flip(compact, selection.flip)
        return compact if compact.flags.c_contiguous else compact.copy()
