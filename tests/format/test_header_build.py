"""Headers are written as the reference writer does it, and the same ones each time."""

from __future__ import annotations

import ctypes
import json
import random
import sys
import time

import pytest
import safetensors
from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.errors import FormatError, LimitError, UnsupportedDtypeError
from stio.format.dtypes import BITS, DTYPES, tensor_nbytes
from stio.format.header import (
    HEADER_ALIGNMENT,
    METADATA_KEY,
    PREFIX_BYTES,
    Header,
    build_header,
    parse_header,
)

# What the reference writer can write, by its own names. It has none for F6; C64 of its writer wants 8 bytes.
REFERENCE_NAMES = {
    "BOOL": "bool", "I8": "int8", "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32",
    "I64": "int64", "U64": "uint64", "F16": "float16", "F32": "float32", "F64": "float64", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz", "F8_E8M0": "float8_e8m0fnu", "C64": "complex64",
}  # fmt: skip

Tensors = list[tuple[str, str, tuple[int, ...]]]

names = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), max_size=12) | st.sampled_from(
    ["a", "a.b", "\u007f", '\u001f\n"\\/', "\ud7ff", "\ue000", "😀", "é", "e\u0301", "\u2028"]
)
tensor_lists = st.lists(
    st.tuples(
        names.filter(lambda name: name != METADATA_KEY),  # which hypothesis finds in the source, now and then
        st.sampled_from(sorted(REFERENCE_NAMES)),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    max_size=12,
    unique_by=lambda tensor: tensor[0],
)


def reference(tensors: Tensors, metadata: dict[str, str] | None) -> bytes:
    buffer = ctypes.create_string_buffer(1024)
    specs = {
        name: safetensors.TensorSpec(
            dtype=REFERENCE_NAMES[dtype],
            shape=list(shape),
            data_ptr=ctypes.addressof(buffer),
            data_len=tensor_nbytes(dtype, shape),
        )
        for name, dtype, shape in tensors
    }
    return bytes(safetensors.serialize(specs, metadata))


def read_back(header: bytes, tensors: Tensors) -> Header:
    total = sum(tensor_nbytes(dtype, shape) for _, dtype, shape in tensors)
    return parse_header(header[PREFIX_BYTES:], file_bytes=len(header) + total, path="f", shard="f")


@settings(max_examples=count(100, 400), deadline=None)
@given(tensor_lists, st.none() | st.dictionaries(names, names, max_size=1))
def test_equal_to_the_reference_writer(tensors: Tensors, metadata: dict[str, str] | None) -> None:
    header, order = build_header(tensors, metadata)
    expected = reference(tensors, metadata)
    if not (tensors == [] and metadata == {}):  # there the reference writes broken JSON
        assert expected[: len(header)] == header
        assert len(expected) == len(header) + sum(tensor_nbytes(d, s) for _, d, s in tensors)
    parsed = read_back(header, tensors)
    assert {name: parsed.info(name).shape for name in parsed} == {name: shape for name, _, shape in tensors}
    assert parsed.metadata == (metadata or {})
    # Empty tensors share their offset with the next one, so only the others have one place.
    assert [n for n in parsed.names if parsed.info(n).nbytes] == [n for n in order if parsed.info(n).nbytes]


def test_every_dtype_in_its_place() -> None:
    tensors: Tensors = [(f"t{k}", dtype, (8,)) for k, dtype in enumerate(DTYPES)]
    random.Random(0).shuffle(tensors)
    header, order = build_header(tensors, None)
    assert [{n: d for n, d, _ in tensors}[name] for name in order] == list(DTYPES)
    parsed = read_back(header, tensors)
    assert parsed.names == order
    for row, dtype in enumerate(parsed.dtypes):  # each tensor is aligned to its own width
        assert parsed.begins[row] * 8 % max(8, BITS[dtype]) == 0 or dtype == "BOOL"


def test_f4_counts_elements() -> None:
    header, _ = build_header([("x", "F4", (2, 16))])
    assert b'"shape":[2,16],"data_offsets":[0,16]' in header
    spec = safetensors.TensorSpec(dtype="float4_e2m1fn_x2", shape=[2, 8], data_ptr=ctypes.addressof(ctypes.create_string_buffer(16)), data_len=16)  # fmt: skip
    assert safetensors.serialize({"x": spec}, None).startswith(header)


@pytest.mark.slow
@given(st.dictionaries(names, names, max_size=6), st.randoms())
def test_metadata_order_does_not_matter(metadata: dict[str, str], rng: random.Random) -> None:
    shuffled = list(metadata.items())
    rng.shuffle(shuffled)
    tensors: Tensors = [("a", "F32", (2,))]
    header, _ = build_header(tensors, metadata)
    assert build_header(tensors, dict(shuffled))[0] == header
    assert read_back(header, tensors).metadata == metadata
    assert list(json.loads(header[PREFIX_BYTES:])["__metadata__"]) == sorted(metadata)


@pytest.mark.slow
@given(tensor_lists, st.randoms())
def test_order_of_tensors_does_not_matter(tensors: Tensors, rng: random.Random) -> None:
    shuffled = list(tensors)
    rng.shuffle(shuffled)
    assert build_header(shuffled) == build_header(tensors)


@pytest.mark.slow
@given(tensor_lists)
def test_data_start_is_aligned(tensors: Tensors) -> None:
    assert len(build_header(tensors)[0]) % HEADER_ALIGNMENT == 0


def test_empty() -> None:
    assert build_header([]) == (b"\x08\0\0\0\0\0\0\0{}      ", [])
    assert build_header([], {})[0][PREFIX_BYTES:].rstrip() == b'{"__metadata__":{}}'


@pytest.mark.matrix
@pytest.mark.costly("large numbers are what it is about")
@pytest.mark.parametrize(
    ("tensors", "metadata", "error"),
    [
        ([("__metadata__", "F32", (1,))], None, ValueError),
        ([("a\0b", "F32", (1,))], None, ValueError),
        ([("\ud800", "F32", (1,))], None, ValueError),
        ([("a", "F32", (1,)), ("a", "F32", (1,))], None, ValueError),
        ([("a", "F32", (1,)), ("a", "I32", (1,))], None, ValueError),
        ([("a", "f32", (1,))], None, UnsupportedDtypeError),
        ([("a", "F128", (1,))], None, UnsupportedDtypeError),
        ([("a", "F32", (-1,))], None, FormatError),
        ([("a", "F32", (2**62,))], None, FormatError),
        ([("a", "F4", (3,))], None, FormatError),
        ([], {"k": 1}, TypeError),
        ([], {1: "v"}, TypeError),
        ([], {"a": "v", 1: "v"}, TypeError),
        ([], {"k": "\ud800"}, ValueError),
        ([], {"\udfff": "v"}, ValueError),
        ([], {"k": "v" * 100_000_000}, LimitError),
    ],
)
def test_refusals(tensors: Tensors, metadata: dict[str, str] | None, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        build_header(tensors, metadata)
    assert len(str(caught.value)) < 1000


@pytest.mark.slow
def test_longest_header() -> None:
    overhead = len('{"__metadata__":{"k":""}}')
    header, _ = build_header([], {"k": "v" * (100_000_000 - overhead)})
    assert len(header) == 100_000_000 + PREFIX_BYTES
    with pytest.raises(LimitError):
        build_header([], {"k": "v" * (100_000_001 - overhead)})


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_100_000_tensors() -> None:
    tensors: Tensors = [(f"layer.{k}.weight", ("BF16", "F32")[k % 2], (2, k % 5)) for k in range(100_000)]
    random.Random(1).shuffle(tensors)
    start = time.perf_counter()
    header, order = build_header(tensors)
    assert time.perf_counter() - start < 5  # 0.4 s on a quiet machine
    assert order == sorted((n for n, d, _ in tensors if d == "F32")) + sorted(n for n, d, _ in tensors if d == "BF16")
    assert sys.getsizeof(header) > 1_000_000
    assert len(read_back(header, tensors)) == 100_000
