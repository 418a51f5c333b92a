"""Widths, writing order and sizes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stio.errors import FormatError
from stio.format.dtypes import BITS, DTYPES, MAX_ELEMENTS, WHOLE_BYTES, tensor_nbytes

U64_MAX = 2**64 - 1


def test_widths() -> None:
    expected = {
        64: {"U64", "I64", "F64", "C64"},
        32: {"F32", "U32", "I32"},
        16: {"BF16", "F16", "U16", "I16"},
        8: {"F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"},
        6: {"F6_E3M2", "F6_E2M3"},
        4: {"F4"},
    }
    assert {width: {name for name in DTYPES if BITS[name] == width} for width in expected} == expected
    assert len(DTYPES) == len(BITS) == 22
    assert {name: width * 8 for name, width in WHOLE_BYTES.items()} == {n: b for n, b in BITS.items() if b >= 8}


@pytest.mark.parametrize("name", ["f32", "F33", "", "__metadata__", "float32"])
def test_unknown_dtype(name: str) -> None:
    with pytest.raises(FormatError):
        tensor_nbytes(name, (1,))
    with pytest.raises(FormatError):
        tensor_nbytes(name, (1,))


@pytest.mark.slow
@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 2**20), max_size=4))
def test_size_is_the_product(dtype: str, shape: list[int]) -> None:
    total = math.prod(shape) * BITS[dtype]
    strided = math.prod(n or 1 for n in shape)
    if total % 8 or strided > MAX_ELEMENTS or total > U64_MAX:
        with pytest.raises(FormatError):
            tensor_nbytes(dtype, shape)
    elif all(shape) or math.prod(shape[: shape.index(0)]) <= U64_MAX:
        assert tensor_nbytes(dtype, shape) == total // 8


def test_scalar_and_empty() -> None:
    assert tensor_nbytes("F64", ()) == 8
    assert tensor_nbytes("BF16", (3, 0, 5)) == 0
    assert tensor_nbytes("F4", (0,)) == 0


@pytest.mark.parametrize("shape", [(1,), (3, 5), ()])
def test_odd_f4_is_refused(shape: tuple[int, ...]) -> None:
    assert tensor_nbytes("F4", (2, 3)) == 3
    with pytest.raises(FormatError, match="whole bytes"):
        tensor_nbytes("F4", shape)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        ("U8", (2**64,)),
        ("U8", (2**32, 2**32, 0)),
        ("U8", (0, 2**63)),
        ("U8", (0, 2**32, 2**32)),
        ("F32", (2**62,)),
        ("F64", (2**58,)),
        ("U8", (2**61,)),
        ("U8", (-1,)),
        ("U8", (-2, -3)),
        ("U8", (10**5000,)),
        ("U8", (0, 10**5000)),
        ("U8", (2**40,) * 10_000),
    ],
)
def test_overflow_is_refused(dtype: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError) as caught:
        tensor_nbytes(dtype, shape, path="x.safetensors")
    assert "x.safetensors" in str(caught.value)


def test_largest_sizes_pass() -> None:
    assert tensor_nbytes("U8", (2**61 - 1,)) == 2**61 - 1
    assert tensor_nbytes("U8", (2**30, 2**30)) == 2**60
    assert tensor_nbytes("U8", (0, 2**63 - 1)) == 0
