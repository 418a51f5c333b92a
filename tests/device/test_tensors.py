"""Tensors over memory: the right bits, a storage of exactly their bytes, and nothing shared that should not be."""

from __future__ import annotations

import ctypes
import gc
import random
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stio.device import tensors as module
from stio.device.casts import Casts, select_and_cast
from stio.device.tensors import FORMAT_DTYPES, TORCH_DTYPES, tensors_in, typed
from stio.errors import UnsupportedDtypeError
from stio.format.dtypes import BITS, DTYPES, LIBRARY_NAMES, tensor_nbytes
from stio.format.header import build_header, header_nbytes, parse_header
from stio.format.slicing import select
from stio.runtime import memory

SHAPES: list[tuple[int, ...]] = [(), (1,), (6,), (3, 4), (2, 1, 5, 2), (0,), (3, 0, 2), (1, 1)]
LOADABLE = [dtype for dtype in DTYPES if dtype in TORCH_DTYPES]


def shape_in_format(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """F4 counts elements, two to a byte, and has no 0-d tensors."""
    return (*shape[:-1], (shape or (1,))[-1] * 2) if dtype == "F4" else shape


def bytes_of(tensor: torch.Tensor) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.nbytes else b""


def place(*parts: bytes, gap: int = 0) -> tuple[memory.Region, list[int]]:
    """Put parts one after the other into memory, each `gap` bytes behind the one before."""
    region = memory.allocate(sum(map(len, parts)) + gap * (len(parts) + 1))
    offsets, at = [], gap
    for part in parts:
        region.write(at, part)
        offsets.append(at)
        at += len(part) + gap
    return region, offsets


def make(dtype: str, shape: tuple[int, ...], *, seed: int = 0, shift: int = 0) -> tuple[torch.Tensor, bytes]:
    nbytes = tensor_nbytes(dtype, shape)
    data = random.Random(seed).randbytes(nbytes)
    if dtype == "BOOL":
        data = bytes(byte & 1 for byte in data)
    region, offsets = place(bytes(shift) + data)
    return tensors_in(region, ["t"], [dtype], [shape], [offsets[0] + shift])["t"], data


def test_torch_has_all_but_the_six_bit_dtypes() -> None:
    assert set(DTYPES) - set(TORCH_DTYPES) <= {"F6_E2M3", "F6_E3M2", "F4", "F8_E8M0"}  # the latter two came late
    assert {FORMAT_DTYPES[dtype] for dtype in TORCH_DTYPES.values()} == set(TORCH_DTYPES)
    for name, dtype in TORCH_DTYPES.items():
        assert dtype.itemsize == max(1, BITS[name] // 8)


@pytest.mark.matrix
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", LOADABLE)
def test_bits_storage_and_version(dtype: str, shape: tuple[int, ...]) -> None:
    shape = shape_in_format(dtype, shape)
    tensor, data = make(dtype, shape)
    assert tensor.dtype == TORCH_DTYPES[dtype]
    assert tuple(tensor.shape) == TORCH_DTYPES.shape(dtype, shape)
    assert bytes_of(tensor) == data
    assert tensor.untyped_storage().nbytes() == len(data)
    assert tensor.storage_offset() == 0
    assert tensor.is_contiguous()
    assert not tensor._is_view()
    assert tensor._base is None
    assert tensor.is_leaf
    assert not tensor.requires_grad
    # A counter of its own. Where torch does not read the dtype from DLPack, as 2.6 with floats of 8 bits, it begins at 1.
    assert tensor._version == (0 if module._MAKERS[dtype].by_dlpack or not data else 1)


@pytest.mark.parametrize("dtype", [dtype for dtype in LOADABLE if dtype != "F4"])
def test_equals_the_reference(dtype: str, tmp_path: Path) -> None:
    shapes = {f"t{k}": shape for k, shape in enumerate(SHAPES)}
    head, order = build_header((name, dtype, shape) for name, shape in shapes.items())
    chance = random.Random(dtype)
    raw = head + b"".join(chance.randbytes(tensor_nbytes(dtype, shapes[name])) for name in order)
    if dtype == "BOOL":
        raw = head + bytes(byte & 1 for byte in raw[len(head) :])
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    header = parse_header(head[8:], file_bytes=len(raw), path="x", shard="x")
    assert header_nbytes(head[:8], file_bytes=len(raw), path="x") == len(head) - 8
    region, offsets = place(raw)
    begins = [offsets[0] + header.data_start + begin for begin in header.begins]
    found = tensors_in(region, header.names, header.dtypes, header.shapes, begins)
    expected = load_file(path)
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert found[name].stride() == tensor.stride()
        assert bytes_of(found[name]) == bytes_of(tensor)


def test_c_version_counters_are_apart() -> None:
    """An in-place change of one tensor is no change of its neighbour for autograd."""
    region, offsets = place(bytes(400), bytes(400))
    found = tensors_in(region, ["a", "b"], ["F32"] * 2, [(10, 10)] * 2, offsets)
    weight = torch.ones(10, 10, requires_grad=True)
    loss = (weight * found["b"]).sum()
    found["a"].add_(1)
    assert (found["a"]._version, found["b"]._version) == (1, 0)
    loss.backward()
    assert found["a"].untyped_storage().data_ptr() != found["b"].untyped_storage().data_ptr()


def test_tensors_keep_their_memory() -> None:
    region, offsets = place(bytes(range(100)), bytes(range(100, 200)))
    owner = weakref.ref(region.owner)
    found = tensors_in(region, ["a", "b"], ["U8"] * 2, [(100,)] * 2, offsets)
    del region
    kept = found.pop("a")
    found.clear()
    gc.collect()
    assert owner() is not None
    assert kept.tolist() == list(range(100))
    del kept
    gc.collect()
    assert owner() is None


@pytest.mark.matrix
@pytest.mark.parametrize("shift", range(1, 9))
@pytest.mark.parametrize("dtype", LOADABLE)
def test_a64_misaligned_tensors_are_copied(dtype: str, shift: int) -> None:
    tensor, data = make(dtype, (2, 8), shift=shift)
    assert bytes_of(tensor) == data
    assert tensor.data_ptr() % tensor.element_size() == 0
    assert tensor.untyped_storage().nbytes() == len(data)


def test_aligned_tensors_are_not_copied() -> None:
    region, offsets = place(bytes(64), bytes(64), gap=16)
    found = tensors_in(region, ["a", "b"], ["F64", "BF16"], [(8,), (32,)], offsets)
    assert [found[name].data_ptr() for name in "ab"] == [region.address + offset for offset in offsets]
    found["a"].fill_(1.0)
    assert region.sub(offsets[0], 8).tobytes() == np.float64(1).tobytes()


def test_part_of_a_larger_region() -> None:
    """Offsets count from the region, wherever in its owner it begins."""
    whole, _ = place(bytes(range(256)))
    part = whole.sub(16, 200)
    tensor = tensors_in(part, ["t"], ["U8"], [(4,)], [10])["t"]
    assert tensor.tolist() == [26, 27, 28, 29]


def test_nothing_but_empty_tensors_needs_no_memory() -> None:
    other = "F4" if "F4" in TORCH_DTYPES else "BF16"
    found = tensors_in(memory.Region(0, 0), ["a", "b"], ["F32", other], [(0, 3), (2, 0)], [0, 0])
    assert [tuple(found[name].shape) for name in "ab"] == [(0, 3), (2, 0)]


def test_a70_bool_bytes_are_kept() -> None:
    region, offsets = place(bytes([0, 1, 2, 255]))
    assert bytes_of(tensors_in(region, ["t"], ["BOOL"], [(4,)], offsets)["t"]) == bytes([0, 1, 2, 255])


def test_a71_nan_payloads_are_kept() -> None:
    data = bytes.fromhex("0100807f ffffffff 0100c07f")
    region, offsets = place(data)
    assert bytes_of(tensors_in(region, ["t"], ["F32"], [(3,)], offsets)["t"]) == data


@pytest.mark.parametrize("dtype", ["F6_E2M3", "F6_E3M2"])
def test_a63_dtypes_that_torch_lacks(dtype: str) -> None:
    TORCH_DTYPES.require(["F32", "BF16"], path="x")
    with pytest.raises(UnsupportedDtypeError, match=dtype) as caught:
        TORCH_DTYPES.require(["F32", dtype], path="some/file")
    assert caught.value.path == "some/file"


@pytest.fixture
def without_dlpack(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return what makes torch's DLPack refuse all dtypes, before the makers are chosen."""

    def refuse(capsule: object) -> torch.Tensor:
        raise BufferError("no such dtype")

    def install() -> None:
        monkeypatch.setattr(module, "from_dlpack", refuse)
        makers = {dtype: module._maker(dtype) for dtype in module._MAKERS}
        monkeypatch.setattr(module, "_MAKERS", makers)

    return install


@pytest.mark.matrix
@pytest.mark.parametrize("shape", [(), (6,), (3, 4), (2, 1, 5)], ids=str)
@pytest.mark.parametrize("dtype", LOADABLE)
def test_without_dlpack_tensors_are_the_same(
    without_dlpack: Callable[[], None], dtype: str, shape: tuple[int, ...]
) -> None:
    """Where this torch's DLPack does not know a dtype, a tensor is made over the storage of a byte tensor."""
    expected, data = make(dtype, shape_in_format(dtype, shape))
    without_dlpack()
    found, same = make(dtype, shape_in_format(dtype, shape))
    assert (found.dtype, found.shape, found.stride()) == (expected.dtype, expected.shape, expected.stride())
    assert bytes_of(found) == bytes_of(expected) == data == same
    assert found.untyped_storage().nbytes() == expected.untyped_storage().nbytes() == len(data)
    assert not found._is_view()


def test_typed_keeps_the_storage() -> None:
    flat = torch.arange(24, dtype=torch.uint8)
    tensor = typed(flat, (2, 3, 2), torch.int16)
    assert tensor.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()
    assert tensor.stride() == (6, 2, 1)
    assert typed(torch.empty(0, dtype=torch.uint8), (2, 0, 3), torch.float32).stride() == torch.empty(2, 0, 3).stride()


# What is left to do once a part has been read.


INDICES = [
    np.s_[2], np.s_[1:3], np.s_[::-1], np.s_[:, 1], np.s_[:, ::2], np.s_[1, ::-1], np.s_[[2, 0, 2]],
    np.s_[:, None, 1:3], np.s_[..., -1], np.s_[3:3], np.s_[1, 2],
]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", LOADABLE)
def test_parts_equal_torchs_own(dtype: str, index: object) -> None:
    whole, data = make(dtype, shape_in_format(dtype, (4, 6)))
    chosen = select(index, tuple(whole.shape), whole.element_size())
    read = b"".join(data[start : start + chosen.chunk_bytes] for start in chosen.starts)
    region, offsets = place(read or b"\0")
    shape = shape_in_format(dtype, chosen.read_shape)
    if dtype == "F4" and not chosen.read_shape:
        pytest.skip("one pair of F4 has no shape in the format")
    part = tensors_in(region, ["t"], [dtype], [shape], offsets)
    if chosen.post is not None or chosen.flip:
        part = select_and_cast(part, {"t": chosen}, Casts())
    expected = np.frombuffer(data, np.dtype(f"V{whole.element_size()}")).reshape(whole.shape)[index]
    assert part["t"].dtype == whole.dtype
    assert tuple(part["t"].shape) == expected.shape
    assert bytes_of(part["t"]) == expected.tobytes()
    assert part["t"].untyped_storage().nbytes() == expected.nbytes
    assert not part["t"]._is_view()


def test_casts_floating_tensors_only() -> None:
    region, offsets = place(np.float32([1.5, -2]).tobytes(), bytes(8), np.float16([3]).tobytes(), bytes(16), gap=16)
    found = tensors_in(region, list("abcd"), ["F32", "I32", "F16", "C64"], [(2,), (2,), (1,), (2,)], offsets)
    found = select_and_cast(found, {}, Casts(torch.float16))
    assert [found[name].dtype for name in "abcd"] == [torch.float16, torch.int32, torch.float16, torch.complex64]
    assert found["a"].tolist() == [1.5, -2]
    assert found["c"].data_ptr() == region.address + offsets[2]


@pytest.mark.skipif("F4" not in TORCH_DTYPES, reason="this torch has no F4")
def test_cast_of_packed_numbers_is_refused() -> None:
    tensor, _ = make("F4", (2, 4))
    with pytest.raises(UnsupportedDtypeError, match="'weight'"):
        select_and_cast({"weight": tensor}, {}, Casts(torch.bfloat16))


# Names of dtypes.


@pytest.mark.parametrize(("name", "dtype"), [*TORCH_DTYPES.items()])
def test_both_names_of_a_dtype_are_accepted(name: str, dtype: torch.dtype) -> None:
    for text in (name, name.lower(), LIBRARY_NAMES[name], str(dtype)):
        assert TORCH_DTYPES.parse(text) == dtype
    assert TORCH_DTYPES.parse(dtype) is dtype


@pytest.mark.parametrize("text", ["bf61", "", "tensor", "nn", "__name__", "\x1b[2J", "x" * 100_000, "F6_E2M3"])
def test_other_names_are_refused_with_an_example_in_both_spellings(text: str) -> None:
    with pytest.raises(ValueError, match="such as 'bfloat16' or 'BF16'") as caught:
        TORCH_DTYPES.parse(text)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300


def test_the_nearest_name_is_named() -> None:
    with pytest.raises(ValueError, match=r"did you mean 'bfloat16'\?"):
        TORCH_DTYPES.parse("bfloat61")
    with pytest.raises(TypeError, match="takes a torch.dtype or the name of one, not 16"):
        TORCH_DTYPES.parse(16)
