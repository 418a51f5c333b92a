"""What `serialize` is told of a tensor: dtype by numpy's and torch's name for it, shape, and where its bytes lie."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

from stio.compat.safetensors._errors import SafetensorError, wrong_type
from stio.errors import printable

__all__ = ["FORMAT_NAMES", "TensorSpec", "unknown_dtype"]

FORMAT_NAMES = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "int32": "I32",
    "uint32": "U32",
    "int64": "I64",
    "uint64": "U64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
    "complex64": "C64",
}
"""What numpy and torch call the dtypes, to what the format calls them."""

_U64_MAX = 2**64 - 1


def unknown_dtype(dtype: str) -> SafetensorError:
    """Return the error for a dtype that the format does not have."""
    return SafetensorError(f'Unknown dtype "{printable(dtype)}". Supported dtypes: {", ".join(FORMAT_NAMES)}')


def _unsigned(argument: str, value: Any) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"argument '{argument}': '{type(value).__name__}' object cannot be interpreted as an integer"
        ) from None
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number > _U64_MAX:
        raise OverflowError("int too big to convert")
    return number


class TensorSpec:
    """Where a tensor's contiguous bytes lie in memory, and what they are. The caller keeps them there.

    Args:
        dtype: Name as numpy and torch have it, such as `"float32"`.
        shape: Dimensions; of packed F4 as torch counts, the last one is doubled here.
        data_ptr: Address of the first byte.
        data_len: Number of bytes.

    Raises:
        SafetensorError: The format has no such dtype.
        TypeError: A value of a wrong type.
        OverflowError: A number that is negative or above 64 bits.
    """

    __module__ = "stio.compat.safetensors"
    __slots__ = ("_data_len", "_data_ptr", "_dtype", "_shape")

    def __init__(
        self, *, dtype: str, shape: Sequence[SupportsIndex], data_ptr: SupportsIndex, data_len: SupportsIndex
    ) -> None:
        if not isinstance(dtype, str):
            raise wrong_type("dtype", dtype, "str")
        if dtype not in FORMAT_NAMES:
            raise unknown_dtype(dtype)
        if isinstance(shape, str | bytes) or not hasattr(shape, "__len__"):
            raise wrong_type("shape", shape, "Sequence")
        self._dtype = FORMAT_NAMES[dtype]
        self._shape = [_unsigned("shape", size) for size in shape]
        if self._dtype == "F4" and self._shape:
            self._shape[-1] *= 2
        self._data_ptr = _unsigned("data_ptr", data_ptr)
        self._data_len = _unsigned("data_len", data_len)

    @property
    def dtype(self) -> str:
        """Dtype as the format spells it."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """Dimensions as a header has them."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """Number of bytes."""
        return self._data_len

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype='{self._dtype}', shape={self._shape}, data_ptr={self._data_ptr}, "
            f"data_len={self._data_len})"
        )
