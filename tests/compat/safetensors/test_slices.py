"""Slices: what plain indexing gives, the original's errors, and only the bytes that are asked for."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as official
import torch
from support import HAVE_E8, needs_f4

from stio.compat.safetensors import SafetensorError, safe_open
from stio.runtime.memory import Region
from stio.storage.local import LocalFile

BACKENDS = ("mmap", "pread")
WHOLE = torch.arange(60, dtype=torch.float32).reshape(5, 3, 4)

BASIC: list[Any] = [
    (),
    ...,
    slice(None),
    0,
    4,
    -1,
    -5,
    np.int64(2),
    True,
    slice(1, 3),
    slice(0, 5, 2),
    slice(1, None, 3),
    (0, 1),
    (0, 1, 2),
    (slice(None), 1),
    (slice(None), slice(1, 2), 3),
    (..., 0),
    (..., slice(1, 3)),
    (0, ...),
    (0, ..., 1),
    (..., 0, 0, 0),
    (0, 0, 0, ...),
    (slice(1, 4), slice(None), slice(0, 4, 3)),
    [],
]
# Better: the original fails on these, by an OverflowError or a SystemError, but for torch's own indexing.
BETTER: list[Any] = [
    slice(-2, None),
    slice(None, -1),
    slice(-20, 2),
    slice(2, 1),
    slice(3, 3),
    slice(5, None),
    slice(0, 0),
    (slice(None), slice(-1, None), slice(None, -2)),
    (0, slice(2, 2)),
]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("slices") / "f.safetensors"
    official.save_file({"first": torch.zeros(7), "w": WHOLE, "s": torch.tensor(2.0), "e": torch.zeros(0, 3)}, path)
    return path


@pytest.mark.matrix
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("index", BASIC + BETTER, ids=repr)
def test_torch(file: Path, index: Any, backend: str) -> None:
    if index is True and backend == "mmap":
        expected = WHOLE[True]  # torch's own indexing: a new dimension
    else:
        expected = WHOLE[int(index) if index is True else index]
    found = safe_open(file, "pt", backend=backend).get_slice("w")[index]
    assert found.shape == expected.shape
    assert torch.equal(found, expected)
    assert_own_storage(found, backend, WHOLE)


def assert_own_storage(found: torch.Tensor, backend: str, whole: torch.Tensor) -> None:
    """A part has a storage of exactly its bytes. A strided one over a mapping is a view of its tensor, as in the original."""
    if backend == "mmap" and not found.is_contiguous():
        assert found.untyped_storage().nbytes() == whole.nbytes
    else:
        assert found.is_contiguous()
        assert found.untyped_storage().nbytes() == found.nbytes


@pytest.mark.matrix
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "index",
    [*BASIC, *BETTER, slice(None, None, -1), slice(3, 0, -2), (0, slice(None, None, -1)), slice(0, 3, -1)],
    ids=repr,
)
def test_numpy(file: Path, index: Any, backend: str) -> None:
    expected = WHOLE.numpy()[int(index) if index is True else index]
    found = safe_open(file, "np", backend=backend).get_slice("w")[index]
    assert isinstance(found, np.ndarray)
    np.testing.assert_array_equal(found, np.asarray(expected), strict=True)
    assert found.flags.c_contiguous


TORCH_ONLY: list[Any] = [
    [0, 2],
    [True, False, True, False, True],
    None,
    (0, [1, 2]),
    (slice(None), None, [2, 0]),
    np.array([3, 1]),
    torch.tensor([1, 1]),
    torch.tensor([True, False, False, True, False]),
    slice(0, 20),
    (..., ...),
]


@pytest.mark.parametrize("index", TORCH_ONLY, ids=repr)
def test_what_torch_takes_over_a_mapping(file: Path, index: Any) -> None:
    found = safe_open(file, "pt").get_slice("w")[index]
    assert torch.equal(found, WHOLE[index])
    assert_own_storage(found, "mmap", WHOLE)


def test_torch_s_errors_over_a_mapping(file: Path) -> None:
    part = safe_open(file, "pt").get_slice("w")
    with pytest.raises(IndexError, match="out of bounds"):
        part[5]
    with pytest.raises(IndexError, match="too many indices"):
        part[0, 0, 0, 0]
    with pytest.raises(ValueError, match="step must be greater than zero"):
        part[::-1]
    assert len(list(part)) == 5


ERRORS: list[tuple[Any, str]] = [
    ([0, 2], "Non empty lists are not implemented"),
    ((..., ...), "Only one ellipsis (...) is allowed in slice index"),
    (None, "Unsupported slice index at position 0: expected slice, int, or ellipsis"),
    ((0, [1]), "Unsupported slice index at position 1: expected slice, int, or ellipsis"),
    (1.5, "Unsupported slice index at position 0: expected slice, int, or ellipsis"),
    ("a", "Unsupported slice index at position 0: expected slice, int, or ellipsis"),
    (np.array([0, 1]), "Unsupported slice index at position 0: expected slice, int, or ellipsis"),
    (slice(None, None, 0), "Slice step must be a positive integer, got 0"),
    ((slice(None), -6), "Invalid index -6 for dimension 1 of size 3"),
    (5, "Error during slicing [5] with shape [5, 3, 4]: index 5 out of bounds for tensor dimension #0 of size 5"),
    (
        slice(0, 20),
        "Error during slicing [0:20] with shape [5, 3, 4]: index 19 out of bounds for tensor dimension #0 of size 5",
    ),
    (
        slice(7, 20),
        "Error during slicing [7:20] with shape [5, 3, 4]: index 7 out of bounds for tensor dimension #0 of size 5",
    ),
    (
        (slice(None), slice(None, 9, 2)),
        "Error during slicing [:, :9:2] with shape [5, 3, 4]: index 8 out of bounds for tensor dimension #1 of size 3",
    ),
    (
        (0, 0, 0, 0),
        "Error during slicing [0, 0, 0, 0] with shape [5, 3, 4]: more slicing indexes than dimensions in tensor",
    ),
]


@pytest.mark.parametrize(("framework", "backend"), [("np", "mmap"), ("np", "pread"), ("pt", "pread")])
@pytest.mark.parametrize(("index", "message"), ERRORS, ids=[repr(case[0]) for case in ERRORS])
def test_errors(file: Path, index: Any, message: str, framework: str, backend: str) -> None:
    with pytest.raises(SafetensorError) as caught:
        safe_open(file, framework, backend=backend).get_slice("w")[index]
    assert str(caught.value) == message


def test_negative_steps_are_no_index_of_torch_s(file: Path) -> None:
    with pytest.raises(SafetensorError, match="Slice step must be a positive integer, got -1"):
        safe_open(file, "pt", backend="pread").get_slice("w")[::-1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_scalars_and_empty_tensors(file: Path, backend: str) -> None:
    for framework in ("pt", "np"):
        opened = safe_open(file, framework, backend=backend)
        assert opened.get_slice("s")[()] == 2
        assert opened.get_slice("s")[...].shape == ()
        assert opened.get_slice("e")[:].shape == (0, 3)
        assert opened.get_slice("e")[:, 1].shape == (0,)
        with pytest.raises((IndexError, SafetensorError)):
            opened.get_slice("s")[0]


@pytest.mark.parametrize("framework", ["pt", "np"])
def test_pread_reads_the_bytes_that_it_needs(file: Path, framework: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Better: the original reads the whole tensor for one row."""
    read: list[int] = []
    plain = LocalFile.read_into

    def counted(self: LocalFile, offset: int, regions: Sequence[Region]) -> None:
        read.append(sum(region.nbytes for region in regions))
        plain(self, offset, regions)

    opened = safe_open(file, framework, backend="pread")
    monkeypatch.setattr(LocalFile, "read_into", counted)
    part = opened.get_slice("w")
    part[2]
    assert read == [48]
    read.clear()
    part[1:3, 1]
    assert sum(read) <= 2 * 48
    read.clear()
    part[4:4]
    assert sum(read) == 0


def test_contiguous_parts_lie_on_the_mapping(file: Path) -> None:
    opened = safe_open(file, "pt")
    whole, part = opened.get_tensor("w"), opened.get_slice("w")[2:4]
    assert part.data_ptr() == whole[2].data_ptr()
    strided = opened.get_slice("w")[:, :, 1:3]
    assert (strided.data_ptr() - whole.data_ptr(), strided.stride()) == (whole.itemsize, whole.stride())
    del opened, whole
    assert torch.equal(strided, WHOLE[:, :, 1:3])  # it keeps the mapping


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "dtype",
    [
        torch.float8_e4m3fn,
        *([torch.float8_e8m0fnu] if HAVE_E8 else []),
        torch.uint16,
        torch.uint64,
        torch.complex64,
        torch.bool,
        torch.bfloat16,
    ],
    ids=str,
)
def test_dtypes(tmp_path: Path, dtype: torch.dtype, backend: str) -> None:
    whole = (
        torch.arange(1, 25, dtype=torch.uint8)
        .repeat_interleave(dtype.itemsize)
        .view(dtype if dtype != torch.bool else torch.uint8)
    )
    whole = (whole % 2 == 0 if dtype == torch.bool else whole).reshape(6, 4)
    official.save_file({"w": whole}, tmp_path / "f")
    part = safe_open(tmp_path / "f", "pt", backend=backend).get_slice("w")
    for index in ((slice(1, 6, 2), slice(0, 2)), 3, (slice(None), 1)):
        found, expected = part[index], whole[index].contiguous()
        assert found.dtype == dtype
        assert found.shape == expected.shape
        assert found.contiguous().view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


@needs_f4
@pytest.mark.parametrize("backend", BACKENDS)
def test_f4_is_sliced_in_its_other_dimensions(tmp_path: Path, backend: str) -> None:
    header = json.dumps({"x": {"dtype": "F4", "shape": [4, 2, 4], "data_offsets": [0, 16]}}).encode()
    (tmp_path / "f").write_bytes(struct.pack("<Q", len(header)) + header + bytes(range(16)))
    part = safe_open(tmp_path / "f", "pt", backend=backend).get_slice("x")
    assert part.get_shape() == [4, 2, 4]
    whole = torch.arange(16, dtype=torch.uint8).reshape(4, 2, 2)
    for index in (slice(1, 3), 2, (slice(None), 1), (slice(0, 4, 2), 0), ..., (1, 1, slice(None)), (..., slice(None))):
        found = part[index]
        assert found.dtype == torch.float4_e2m1fn_x2
        assert found.view(torch.uint8).tolist() == whole[index].tolist()
        assert_own_storage(found, backend, whole)
    for index in ((..., 0), (..., slice(0, 2)), (slice(None), slice(None), slice(2, 4)), (0, 0, 3)):
        with pytest.raises(SafetensorError, match="F4 packs two elements"):
            part[index]
    if backend == "mmap":
        assert part[[True, False, True, False]].view(torch.uint8).tolist() == whole[[0, 2]].tolist()
