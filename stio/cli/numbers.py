"""Differences between values of each dtype of the format, by numpy: bytes become numbers, and the result is exact.

Integers are subtracted modulo 2**64, which is exact for the larger minus the smaller. Floats are subtracted as float64,
which holds each value of the smaller types. numpy has no 8, 6 and 4-bit floats: they are looked up in tables made here.
Packed values are unpacked from the lowest bit of the first byte on, as torch and the microscaling formats define it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from stio.format.dtypes import BITS

Array = NDArray[Any]

Found: TypeAlias = tuple[int, float | int | None, int]
"""The fields of a `Difference` of `cli/diff.py`: values that differ, the largest distance, NaNs on one side only."""

_CHUNK_VALUES = 1 << 16
"""Values of a side that become numbers at once; the numbers take some megabytes."""

# Bits of the exponent and of the mantissa, bias, and the meaning of special codes: infinities and NaN as in IEEE 754,
# the last code is NaN ("fn"), NaN in place of -0 ("fnuz"), or none ("finite").
_SMALL_FLOATS = {
    "F8_E5M2": (5, 2, 15, "ieee"),
    "F8_E4M3": (4, 3, 7, "fn"),
    "F8_E5M2FNUZ": (5, 2, 16, "fnuz"),
    "F8_E4M3FNUZ": (4, 3, 8, "fnuz"),
    "F6_E3M2": (3, 2, 3, "finite"),
    "F6_E2M3": (2, 3, 1, "finite"),
    "F4": (2, 1, 1, "finite"),
}

_DIGITS = {
    "F64": (52, -1074),
    "F32": (23, -149),
    "F16": (10, -24),
    "BF16": (7, -133),
    "F8_E8M0": (0, -127),
    **{name: (mantissa, 1 - bias - mantissa) for name, (_, mantissa, bias, _) in _SMALL_FLOATS.items()},
}
"""Bits of the mantissa of each floating dtype, and the exponent of its smallest positive value."""

_QUIET = np.errstate(invalid="ignore", over="ignore")
"""No warnings for subtracted infinities and cast signalling NaNs: the code below handles both."""


def differences(dtype_a: str, a: bytes, dtype_b: str, b: bytes, tolerance: float | None = None) -> list[Found]:
    """Compare two pieces of memory that hold as many whole values of one dtype, or of two floating ones, part by part.

    Args:
        dtype_a: Name in the format of the dtype of `a`.
        a: One side.
        dtype_b: That of the dtype of `b`.
        b: The other side.
        tolerance: Values differ if they are further apart, or one of them is NaN. None: if their bits differ; of two
            dtypes, if they are further apart than rounding to the narrower one can move them.
    """
    found: list[Found] = []
    bytes_a, bytes_b = (_CHUNK_VALUES * BITS[dtype] // 8 for dtype in (dtype_a, dtype_b))
    for k in range(-(-len(a) // bytes_a)):
        codes_a = _codes(dtype_a, a[k * bytes_a : (k + 1) * bytes_a])
        codes_b = _codes(dtype_b, b[k * bytes_b : (k + 1) * bytes_b])
        if dtype_a == dtype_b:
            differing = codes_a != codes_b
            codes_a, codes_b = codes_a[differing], codes_b[differing]
        if codes_a.size:
            found.append(_compared(dtype_a, codes_a, dtype_b, codes_b, tolerance))
    return found


def _rounding(dtype_a: str, dtype_b: str, sizes: Array) -> Array:
    """Return how far rounding to the nearest value of the narrower dtype can move values of these sizes."""
    digits = min(_DIGITS[dtype_a][0], _DIGITS[dtype_b][0])
    smallest = max(2.0 ** _DIGITS[dtype_a][1], 2.0 ** _DIGITS[dtype_b][1])
    relative: Array = np.where(np.isfinite(sizes), sizes, 0.0) * 2.0 ** -(digits + 1)
    return np.maximum(relative, smallest / 2)


def _codes(dtype: str, data: bytes) -> Array:
    """Return the bits of each value as an unsigned integer."""
    width = BITS[dtype]
    if width % 8 == 0:
        return np.frombuffer(data, f"<u{width // 8}")
    if width == 4:
        packed = np.frombuffer(data, np.uint8)
        return np.stack((packed & 15, packed >> 4), axis=-1).reshape(-1)
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").reshape(-1, width)
    return bits @ (1 << np.arange(width, dtype=np.uint8))


@_QUIET
def numbers(dtype: str, codes: Array) -> Array:
    """Return the numbers of codes: integers unchanged, floats as float64, complex numbers as complex128."""
    if dtype in _SMALL_FLOATS or dtype == "F8_E8M0":
        return _table(dtype).take(codes)
    if dtype == "BF16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "C64":
        return codes.view(np.complex64).astype(np.complex128)
    if dtype.startswith("F"):
        return codes.view(f"<f{codes.itemsize}").astype(np.float64)
    return codes.view(f"<i{codes.itemsize}") if dtype.startswith("I") else codes


@cache
def _table(dtype: str) -> Array:
    """Return the number of each code of a small float."""
    if dtype == "F8_E8M0":  # powers of two, no sign, the last code NaN
        powers: Array = np.ldexp(1.0, np.arange(-127, 129))
        powers[-1] = np.nan
        return powers
    exponent_bits, mantissa_bits, bias, kind = _SMALL_FLOATS[dtype]
    codes = np.arange(1 << (1 + exponent_bits + mantissa_bits))
    top = (1 << exponent_bits) - 1
    exponents, mantissas = codes >> mantissa_bits & top, codes & ((1 << mantissa_bits) - 1)
    is_normal = exponents > 0
    steps: Array = np.where(is_normal, mantissas + (1 << mantissa_bits), mantissas)
    values: Array = np.ldexp(steps.astype(np.float64), np.where(is_normal, exponents, 1) - bias - mantissa_bits)
    if kind == "ieee":
        values[(exponents == top) & (mantissas == 0)] = np.inf
        values[(exponents == top) & (mantissas > 0)] = np.nan
    half = len(codes) // 2
    values[half:] *= -1
    if kind == "fn":
        values[[half - 1, -1]] = np.nan
    elif kind == "fnuz":
        values[half] = np.nan
    return values


@_QUIET
def _compared(dtype_a: str, codes_a: Array, dtype_b: str, codes_b: Array, tolerance: float | None) -> Found:
    """Return the difference of two arrays of values; if they are of one dtype, each pair has other bits."""
    a, b = numbers(dtype_a, codes_a), numbers(dtype_b, codes_b)
    if a.dtype.kind in "iu":
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        larger, smaller = (pick(a, b).astype(wide).view(np.uint64) for pick in (np.maximum, np.minimum))
        gaps: Array = larger - smaller
        if tolerance is None:
            return len(a), int(gaps.max()), 0
        beyond = 0 if tolerance >= 2**64 else int(np.count_nonzero(gaps > np.uint64(int(tolerance))))
        return beyond, int(gaps.max()), 0
    nan_a, nan_b = np.isnan(a), np.isnan(b)
    num_nan = int(np.count_nonzero(nan_a != nan_b))
    both = ~(nan_a | nan_b)
    gaps = _distances(a[both], b[both])
    largest = float(gaps.max()) if gaps.size else None
    if tolerance is None and dtype_a == dtype_b:
        return len(a), largest, num_nan
    allowed: Any = tolerance
    if tolerance is None:
        allowed = _rounding(dtype_a, dtype_b, np.maximum(np.abs(a[both]), np.abs(b[both])))
    return int(np.count_nonzero(gaps > allowed)) + num_nan, largest, num_nan


def _distances(a: Array, b: Array) -> Array:
    """Return the distances of values that are no NaN; equal infinities, also in a part of a complex number, add 0."""
    if a.dtype.kind == "c":
        return np.hypot(_distances(a.real, b.real), _distances(a.imag, b.imag))
    return np.abs(np.where(a == b, 0.0, a - b))
