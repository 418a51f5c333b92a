"""The dtypes of the safetensors format: names, widths, and the bytes that a tensor takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from stio.errors import FormatError

DtypeName = Literal[
    "U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "F8_E5M2FNUZ", "F8_E4M3FNUZ",
    "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F6_E3M2", "F6_E2M3", "F4", "BOOL",
]  # fmt: skip
"""A dtype as the header spells it, in the order in which a writer lays out the data."""

DTYPES: tuple[DtypeName, ...] = get_args(DtypeName)

# The other widths are part of the name.
_WIDTH_OF_NAME = {"C64": 64, "BOOL": 8}

BITS: dict[str, int] = {name: _WIDTH_OF_NAME.get(name) or int(name.split("_")[0].lstrip("BFUI")) for name in DTYPES}
"""Bits of one element, by dtype name."""

WHOLE_BYTES: dict[str, int] = {name: width // 8 for name, width in BITS.items() if width % 8 == 0}
"""Bytes of one element; the dtypes packed below a byte are absent."""

LIBRARY_NAMES: dict[str, str] = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "F4": "float4_e2m1fn_x2", "C64": "complex64",
}  # fmt: skip
"""Name of each dtype in torch, numpy and `ml_dtypes`, for those that one of them has. F4 is a pair of numbers there."""

MAX_ELEMENTS = 2**63 - 1
"""Most elements for which tensor libraries have strides. The format's bound is 2**64 - 1; stio is stricter."""

U64_MAX = 2**64 - 1
"""Largest number that the format can express."""


def tensor_nbytes(dtype: str, shape: Sequence[int], *, path: str | None = None) -> int:
    """Return the bytes that a tensor's data takes in a file.

    The product is checked from the left, as the format's reference reader does: `[2**32, 2**32, 0]` overflows
    although the tensor would be empty.

    Args:
        dtype: Name as in the header.
        shape: Dimensions as in the header (for F4 the last one counts elements, not pairs).
        path: File to name in errors.

    Raises:
        FormatError: Unknown dtype, negative dimension, overflow of a u64, more than `MAX_ELEMENTS` elements when
            empty dimensions are left out (no library has strides for those), or a size that is not whole bytes.
    """
    width = BITS.get(dtype)
    if width is None:
        raise FormatError("unknown dtype", path=path, expected="a dtype of the format, such as 'F32'", found=dtype)
    count, strided = 1, 1
    for dimension in shape:
        if not 0 <= dimension <= U64_MAX:
            # The number is not shown: converting thousands of digits to text is slow, and the interpreter refuses it.
            raise FormatError("a dimension is negative or overflows 64 bits", path=path, expected="0 to 2**64 - 1")
        count *= dimension
        strided *= dimension or 1
        if count > U64_MAX:
            raise FormatError("the shape overflows 64 bits", path=path, found=list(shape))
        # Checked inside the loop, so that a shape of many large dimensions cannot produce a huge integer.
        if strided > MAX_ELEMENTS:
            message = "the shape has more elements than a tensor can have"
            raise FormatError(message, path=path, expected=f"at most {MAX_ELEMENTS}", found=list(shape))
    if count * width > U64_MAX:
        raise FormatError("the tensor's size overflows 64 bits", path=path, found=f"{dtype} {list(shape)}")
    nbytes, rest = divmod(count * width, 8)
    if rest:
        raise FormatError(
            f"{dtype} is packed below a byte, and this shape does not fill whole bytes", path=path, found=list(shape)
        )
    return nbytes
