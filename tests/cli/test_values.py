"""How `stio diff` compares the values of two pieces of memory, of every dtype."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.cli import diff
from stio.cli.diff import Difference
from stio.device.tensors import TORCH_DTYPES
from stio.format.dtypes import DTYPES

INTEGERS = {
    "I8": "<i1",
    "U8": "<u1",
    "I16": "<i2",
    "U16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "I64": "<i8",
    "U64": "<u8",
}


def differences(dtype: str, a: bytes, b: bytes, tolerance: float | None = None) -> Difference:
    return diff.differences(dtype, a, dtype, b, tolerance)


def data(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", ["F4", "F6_E2M3", "F6_E3M2"])
def test_packed_floats_are_compared_bit_by_bit(dtype: str) -> None:
    """0 and -0 of F4 differ by more than any tolerance: their distance is not known."""
    for tolerance in (None, 0.0, 100.0):
        assert differences(dtype, b"\x21\x00\x43", b"\x22\x00\x40", tolerance) == (2, None)
        assert differences(dtype, b"\x00\x00\x00", b"\x00\x00\x80", tolerance) == (1, None)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_bytes_do_not_differ(dtype: str) -> None:
    assert differences(dtype, bytes(range(240)), bytes(range(240))) == (0, None)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", INTEGERS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_integers_as_python_would(dtype: str, seed: int) -> None:
    a, b = (np.random.default_rng([seed, k]).bytes(240) for k in (0, 1))
    pairs = [(x, y) for x, y in zip(*(np.frombuffer(side, INTEGERS[dtype]).tolist() for side in (a, b)), strict=True)]
    found = differences(dtype, a, b)
    assert found[0] == sum(x != y for x, y in pairs)
    assert found[1] == pytest.approx(max(abs(x - y) for x, y in pairs), rel=1e-15)


def test_the_extremes_of_integers() -> None:
    low, high = (int(value).to_bytes(8, "little", signed=True) for value in (-(2**63), 2**63 - 1))
    assert differences("I64", low, high) == (1, 2**64)
    assert differences("U64", bytes(8), b"\xff" * 8) == (1, 2**64)
    assert differences("BOOL", b"\0\1\2", b"\1\1\1") == (2, 1)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([0.0], [-0.0], (1, 0.0)),
        ([math.nan, 1.0], [1.0, 1.0], (1, None)),
        ([math.nan, 1.0], [1.0, 1.5], (2, 0.5)),
        ([math.inf, 0.0], [1.0, 0.0], (1, math.inf)),
        ([math.inf], [-math.inf], (1, math.inf)),
        ([3e38], [-3e38], (1, 2 * float(np.float32(3e38)))),
        ([], [], (0, None)),
    ],
)
def test_floats_that_are_special(a: list[float], b: list[float], expected: tuple[int, float | None]) -> None:
    assert differences("F32", np.float32(a).tobytes(), np.float32(b).tobytes()) == expected


def test_nans_of_other_payloads_differ_by_nothing() -> None:
    a, b = (int(value).to_bytes(4, "little") for value in (0x7FC00000, 0x7FC00001))
    assert differences("F32", a, b) == (1, None)


def test_complex_values_differ_by_their_distance() -> None:
    a = torch.tensor([1 + 1j, 2 + 0j], dtype=torch.complex64)
    assert differences("C64", data(a), data(a + torch.tensor([3 + 4j, 0]))) == (1, 5.0)


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "expected"),
    [
        (complex(math.inf, 1), complex(math.inf, 4), 1.0, (1, math.inf)),
        (complex(math.inf, 1), complex(math.inf, 4), None, (1, math.inf)),
        (complex(math.inf, 1), complex(-math.inf, 1), 1.0, (1, math.inf)),
        (complex(math.nan, math.inf), complex(math.nan, -math.inf), 0.0, (0, None)),
        (complex(math.nan, math.inf), complex(1, 1), math.inf, (1, None)),
        (complex(math.nan, 1), complex(math.nan, 4), 0.0, (0, None)),
    ],
)
def test_complex_values_that_are_special(
    a: complex, b: complex, tolerance: float | None, expected: tuple[int, float | None]
) -> None:
    sides = (np.array([side, 2 + 1j], np.complex64).tobytes() for side in (a, b))
    assert differences("C64", *sides, tolerance) == expected


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_floats_as_torch_would(dtype: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(100, generator=generator).to(TORCH_DTYPES[dtype]) for _ in range(2))
    b[::3] = a[::3]
    count, largest = differences(dtype, data(a), data(b))
    assert (count, largest) == (int((a != b).sum()), float((a.double() - b.double()).abs().max()))


# With a tolerance.


@pytest.mark.parametrize(
    ("a", "b", "tolerance", "expected"),
    [
        ([0.0, 1.0], [-0.0, 1.5], 0.0, (1, 0.5)),
        ([0.0, 1.0], [-0.0, 1.5], 0.5, (0, 0.5)),
        ([math.nan, 1.0], [1.0, 1.5], 1.0, (1, 0.5)),
        ([math.nan, 2.0], [1.0, 2.0], math.inf, (1, None)),
        ([math.inf, math.inf], [math.inf, -math.inf], 1e300, (1, math.inf)),
        ([math.inf, math.inf], [math.inf, -math.inf], math.inf, (0, math.inf)),
    ],
)
def test_floats_within_a_tolerance(
    a: list[float], b: list[float], tolerance: float, expected: tuple[int, float | None]
) -> None:
    assert differences("F32", np.float32(a).tobytes(), np.float32(b).tobytes(), tolerance) == expected


def test_nans_of_other_payloads_are_within_every_tolerance() -> None:
    a, b = (int(value).to_bytes(4, "little") for value in (0x7FC00000, 0x7FC00001))
    assert differences("F32", a, b, 0.0) == (0, None)


def test_integers_within_a_tolerance() -> None:
    low, high = (int(value).to_bytes(8, "little", signed=True) for value in (-(2**63), 2**63 - 1))
    for gap in (1, 100):
        pair = [number.to_bytes(8, "little") for number in (2**62, 2**62 + gap)]
        assert differences("I64", pair[0], pair[1], gap / 2) == (1, gap)
    for tolerance, count in ((math.inf, 0), (2.0**64, 0), (2.0**63, 1), (0.5, 1)):
        assert differences("I64", low, high, tolerance) == (count, 2**64)
    assert differences("BOOL", b"\0\1", b"\1\1", 1.0) == (0, 1)
    assert differences("U8", b"\0\0\0", b"\1\2\3", 2.9) == (1, 3)


@pytest.mark.matrix
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32", "F64", "F8_E4M3"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), tolerance=st.floats(0, 3))
def test_a_tolerance_as_torch_would(dtype: str, seed: int, tolerance: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(100, generator=generator).to(TORCH_DTYPES[dtype]) for _ in range(2))
    count = differences(dtype, data(a), data(b), tolerance)[0]
    assert count == int(((a.double() - b.double()).abs() > tolerance).sum())
