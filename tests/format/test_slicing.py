"""Selections against numpy and torch: what is read by them equals what the index gives, and no more is read."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from counts import count
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stio.device.casts import select_and_cast
from stio.errors import SliceError
from stio.format.slicing import MANY_CHUNKS, PAGE_BYTES, SMALL_CHUNK_BYTES, Selection, select

ITEM = 4


def apply(selection: Selection, raw: bytes) -> npt.NDArray[np.uint32]:
    compact = b"".join(raw[start : start + selection.chunk_bytes] for start in selection.starts)
    assert len(compact) == selection.nbytes
    array = np.frombuffer(compact, np.uint32).reshape(selection.read_shape)
    if selection.post is not None:
        array = array[selection.post]
    return np.flip(array, selection.flip) if selection.flip else array


def apply_torch(selection: Selection, raw: bytes) -> torch.Tensor:
    compact = bytearray(b"".join(raw[start : start + selection.chunk_bytes] for start in selection.starts))
    tensor = torch.frombuffer(compact, dtype=torch.int32) if compact else torch.empty(0, dtype=torch.int32)
    tensor = tensor.view(selection.read_shape)
    if selection.post is not None:
        tensor = tensor[selection.post]
    return tensor.flip(selection.flip) if selection.flip else tensor


def check(index: Any, shape: tuple[int, ...]) -> Selection:
    array = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    expected = array[index]
    selection = select(index, shape, ITEM)
    raw = array.tobytes()
    answer = apply(selection, raw)
    assert answer.shape == selection.shape == expected.shape
    assert np.array_equal(answer, expected)
    same = apply_torch(selection, raw)
    assert tuple(same.shape) == expected.shape
    assert np.array_equal(same.numpy().view(np.uint32), expected)
    assert list(selection.starts) == sorted(set(selection.starts))
    if expected.size:
        offsets = expected.ravel().astype(np.int64) * ITEM
        # Short rows are read whole, so that the last one may reach past the last byte asked for.
        assert selection.nbytes < int(offsets.max() - offsets.min()) + ITEM + PAGE_BYTES
        assert selection.starts[-1] + selection.chunk_bytes <= len(raw)
    else:
        assert selection.nbytes == 0
    return selection


shapes = st.lists(st.sampled_from([0, 1, 1, 2, 3, 4, 5, 8, 17, 300]), max_size=4).filter(
    lambda shape: math.prod(shape) <= 50_000
)


@st.composite
def indexed(draw: st.DrawFn) -> tuple[Any, tuple[int, ...]]:
    shape = tuple(draw(shapes))
    items: list[Any] = []
    with_list = draw(st.booleans())
    for length in shape[: draw(st.integers(0, len(shape)))]:
        kinds = ["slice", "slice"] + ["int"] * (length > 0) + ["list"] * with_list
        kind = draw(st.sampled_from(kinds))
        if kind == "int":
            items.append(draw(st.integers(-length, length - 1)))
        elif kind == "list":
            with_list = False
            rows = st.lists(st.integers(-length, length - 1), max_size=6) if length else st.just([])
            items.append(draw(rows))
        else:
            bound = st.none() | st.integers(-length - 2, length + 2)
            items.append(slice(draw(bound), draw(bound), draw(st.sampled_from([None, 1, 2, 3, 50, -1, -2, -7]))))
    for _ in range(draw(st.sampled_from([0, 0, 0, 1, 2]))):
        items.insert(draw(st.integers(0, len(items))), None)
    if draw(st.integers(0, 4)) == 0:
        # From its place on, the indices are those of the last dimensions.
        place = draw(st.integers(0, len(items)))
        tail = sum(item is not None for item in items[place:])
        fits = shape[len(shape) - tail :] == shape[sum(i is not None for i in items[:place]) :][:tail]
        assume(fits)
        items.insert(place, ...)
    return (items[0] if len(items) == 1 and draw(st.booleans()) else tuple(items)), shape


@pytest.mark.slow
@settings(max_examples=count(375, 1500), deadline=None)
@given(indexed())
def test_equal_to_numpy_and_torch(case: tuple[Any, tuple[int, ...]]) -> None:
    index, shape = case
    try:
        check(index, shape)
    except SliceError as error:
        assert "differently" in str(error)
        items = [item for item in index if item is not None]
        assert any(isinstance(item, list) for item in items)
        assert any(isinstance(item, int) for item in items)


@pytest.mark.parametrize(
    ("index", "shape"),
    [
        ((0, slice(None), [1, 2]), (2, 3, 4)),
        ((slice(None), 0, slice(None), [1, 2]), (3, 3, 4, 5)),
        ((slice(None), 0, ..., [1, 2, 3]), (2, 3, 4)),
        ((slice(None), [1, 2, 0], None, 0), (2, 3, 4)),
    ],
)
def test_refused_only_where_numpy_and_torch_differ(index: Any, shape: tuple[int, ...]) -> None:
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    assert array[index].shape != tuple(torch.from_numpy(array)[index].shape)
    with pytest.raises(SliceError, match="differently"):
        select(index, shape, ITEM)


@pytest.mark.parametrize(
    ("index", "shape"),
    [((0, [1, 2]), (2, 3, 4)), (([1, 0], slice(None), 2), (2, 3, 4)), ((slice(None), 1, [1, 2], ...), (2, 3, 4, 5))],
)
def test_a_list_beside_an_int(index: Any, shape: tuple[int, ...]) -> None:
    check(index, shape)


@pytest.mark.parametrize(
    ("index", "shape", "chunks", "chunk_bytes"),
    [
        (np.s_[...], (8, 16), 1, 512),
        (np.s_[0:4, :], (8, 16), 1, 256),
        (np.s_[3], (8, 16), 1, 64),
        (np.s_[3, 5], (8, 16), 1, 4),
        (np.s_[2:4, 1], (8, 3, 1000), 2, 4000),
        (np.s_[::2], (8, 1000), 4, 4000),
        (np.s_[::-2], (8, 1000), 4, 4000),
        (np.s_[:, 0:500], (8, 2000), 8, 2000),
        (np.s_[:, ::2], (8, 2000), 8, 7996),
        (np.s_[:, 0:2], (8, 4), 1, 128),
        (np.s_[::2], (1000,), 1, 3996),
        (np.s_[::1000], (100, 2000), 1, 8000),
        (np.s_[::10_000], (100_000,), 10, 4),
        (np.s_[[5, 3, 5, 4]], (8, 1000), 1, 12_000),
        (np.s_[[7, 0, 1]], (8, 1000), 3, 4000),
        (np.s_[1:1], (8,), 0, 0),
        (np.s_[()], (), 1, 4),
        (np.s_[None, ..., None], (2, 2), 1, 16),
    ],
)
def test_chunks(index: Any, shape: tuple[int, ...], chunks: int, chunk_bytes: int) -> None:
    selection = check(index, shape)
    assert (len(selection.starts), selection.chunk_bytes) == (chunks, chunk_bytes)


def test_regular_starts_take_no_memory() -> None:
    selection = select(np.s_[:, :, 0:500], (1_000_000, 1000, 1000), 4)
    assert selection.starts == range(0, 4 * 10**12, 4000)
    assert selection.nbytes == 2 * 10**12
    assert selection.post is None
    many = select(np.s_[::2], (4 * MANY_CHUNKS, 1024), 4)
    assert len(many.starts) == 1
    assert many.post == (slice(0, 4 * MANY_CHUNKS - 1, 2), slice(None))


@st.composite
def with_arrays(draw: st.DrawFn) -> tuple[tuple[Any, ...], tuple[int, ...]]:
    shape = (3, 5, 4, 7)[: draw(st.integers(1, 4))]
    items: list[Any] = []
    for length in shape:
        form = tuple(draw(st.sampled_from([(), (1,), (1,), (1, 1), (3,), (2, 2), (0,)])))
        count = math.prod(form)
        rows = draw(st.lists(st.integers(-length, length - 1), min_size=count, max_size=count))
        whole = draw(st.sampled_from([slice(None), slice(1, None, 2), slice(None, None, -1)]))
        items.append(draw(st.sampled_from([whole, np.array(rows, np.int64).reshape(form)])))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), None)
    return tuple(items), shape


@pytest.mark.slow
@settings(max_examples=count(125, 500), deadline=None)
@given(with_arrays())
def test_index_arrays_of_any_dimensions(case: tuple[tuple[Any, ...], tuple[int, ...]]) -> None:
    """The array of torch gives what that of numpy gives, and both the answer of numpy, or an error."""
    index, shape = case
    as_torch = tuple(torch.from_numpy(item) if isinstance(item, np.ndarray) else item for item in index)
    # Without dimensions it is an int, which numpy and torch treat differently beside a list.
    plain = tuple(item.item() if isinstance(item, np.ndarray) and not item.ndim else item for item in index)
    try:
        selection = check(plain, shape)
    except (SliceError, IndexError):  # an IndexError: numpy refuses it too
        arrays = [item for item in plain if isinstance(item, np.ndarray)]
        ints = [item for item in plain if isinstance(item, int)]
        assert len(arrays) + bool(ints) > 1, index
        with pytest.raises(SliceError):
            select(as_torch, shape, ITEM)
    else:
        assert select(as_torch, shape, ITEM) == selection


def test_whole_rows_leave_nothing_to_do() -> None:
    for index in (np.s_[0:128, :], np.s_[5], np.s_[5, 7:9], np.s_[..., 3:5, :], np.s_[None, 2], np.s_[[1, 2, 3]]):
        assert select(index, (200, 1000), SMALL_CHUNK_BYTES).post is None


@pytest.mark.parametrize(
    "index",
    [
        np.array([2, 0, 1]), np.array([1], np.uint8), torch.tensor([2, 0]), range(3), [np.int64(1), 2], np.int32(1),
        np.array(1), torch.tensor(2), (0, (2, 1)), (slice(np.int64(1), None),), range(2, -1, -1), [], ((), ),
    ],
)  # fmt: skip
def test_array_likes(index: Any) -> None:
    plain = index.tolist() if hasattr(index, "tolist") else index
    array = np.arange(60, dtype=np.uint32).reshape(3, 4, 5)
    expected = array[list(plain) if isinstance(plain, range) else plain]
    assert np.array_equal(apply(select(index, (3, 4, 5), ITEM), array.tobytes()), expected)


@pytest.mark.parametrize(
    "index",
    [
        True, np.True_, 1.0, np.float32(1), "a", b"a", 1j, {}, object(), 3, -4, (0, 4), (0, 0, 0, 0), (..., ...),
        slice(None, None, 0), slice("a", "b"), slice(0.0, 1.0), [True, False, True], [0.0], [3], [-4], [[0]], [None],
        np.array([True, False, True]), np.array([0.5]), np.array([]), np.array([[3]]), torch.tensor([True, True, False]),
        torch.tensor(True), torch.tensor([1], dtype=torch.uint8), torch.tensor([1.0]), ([0, 1], [1, 2]), np.datetime64("2020"),
    ],
    ids=lambda index: repr(index)[:40],
)  # fmt: skip
def test_refusals(index: Any) -> None:
    with pytest.raises(SliceError) as caught:
        select(index, (3, 4, 5), ITEM)
    assert "(3, 4, 5)" in str(caught.value)


# Whole rows instead of many chunks.


@pytest.mark.slow
@settings(max_examples=count(125, 500), deadline=None)
@given(indexed(), st.sampled_from([4, 40, 400, 1 << 30]), st.sampled_from([0, 64, 4096, 1 << 30]))
def test_whole_rows_give_the_same(case: tuple[Any, tuple[int, ...]], gap_bytes: int, image_bytes: int) -> None:
    index, shape = case
    try:
        plain = select(index, shape, ITEM)
    except SliceError:
        return
    wide = select(index, shape, ITEM, gap_bytes=gap_bytes, image_bytes=image_bytes)
    array = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
    assert np.array_equal(apply(wide, array.tobytes()), array[index])
    assert plain.shape == wide.shape
    assert len(wide.starts) <= len(plain.starts)
    assert wide.nbytes <= max(plain.nbytes, image_bytes)


@pytest.mark.parametrize(
    ("index", "shape", "gap_bytes", "chunks", "chunk_bytes"),
    [
        (np.s_[:, 0:500], (8, 2000), 6000, 1, 64_000),
        (np.s_[:, 0:500], (8, 2000), 5999, 8, 2000),
        (np.s_[2:5, 0:500], (8, 2000), 6000, 1, 24_000),
        (np.s_[:, 2, :], (8, 4, 1000), 12_000, 1, 128_000),
        (np.s_[:, 2, :], (8, 4, 1000), 11_999, 8, 4000),
        (np.s_[[0, 6], :, 0:500], (8, 4, 1000), 2000, 2, 16_000),  # inner dimensions whole, two ranges
        (np.s_[::2], (8, 1000), 4000, 1, 28_000),
        (np.s_[::2], (8, 1000), 3999, 4, 4000),
        (np.s_[3, 0:500], (8, 1000), 1 << 30, 1, 2000),  # contiguous already
        (np.s_[[0, 1, 3]], (8, 1000), 4000, 1, 16_000),
        (np.s_[[0, 1, 4]], (8, 1000), 4000, 3, 4000),
    ],
)
def test_where_whole_rows_are_read(
    index: Any, shape: tuple[int, ...], gap_bytes: int, chunks: int, chunk_bytes: int
) -> None:
    selection = select(index, shape, ITEM, gap_bytes=gap_bytes, image_bytes=1 << 30)
    assert (len(selection.starts), selection.chunk_bytes) == (chunks, chunk_bytes)
    bounded = select(index, shape, ITEM, gap_bytes=gap_bytes, image_bytes=selection.nbytes - 1)
    assert bounded == select(index, shape, ITEM)


# Several intervals.


@st.composite
def with_intervals(draw: st.DrawFn) -> tuple[list[Any], tuple[int, ...]]:
    shape = (6, 5, 9)[: draw(st.integers(1, 3))]
    items: list[Any] = []
    for length in shape:
        bound = st.none() | st.integers(-length - 2, length + 2)
        intervals = draw(st.lists(st.builds(slice, bound, bound, st.sampled_from([None, 1])), min_size=1, max_size=4))
        other = st.sampled_from([slice(None), slice(1, None, 2), slice(None, None, -1), 2, -1, [3, 0, 0]])
        items.append(draw(st.one_of(st.just(intervals), st.just(intervals), other)))
    assume(sum(isinstance(item, list) and isinstance(item[0], int) for item in items) < 2)
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), None)
    return items, shape


def joined(array: Any, items: list[Any]) -> Any:
    """The parts of each list of slices one after the other, then the other items."""
    dim, rest = 0, []
    for item in items:
        if isinstance(item, list) and isinstance(item[0], slice):
            array = np.concatenate([array[(slice(None),) * dim + (part,)] for part in item], dim)
            item = slice(None)
        rest.append(item)
        dim += item is not None
    return array[tuple(rest)]


@pytest.mark.slow
@settings(max_examples=count(125, 500), deadline=None)
@given(with_intervals(), st.sampled_from([0, 16, 1 << 30]))
def test_intervals(case: tuple[list[Any], tuple[int, ...]], gap_bytes: int) -> None:
    items, shape = case
    array = np.arange(math.prod(shape), dtype=np.int32).reshape(shape)
    try:
        selection = select(tuple(items), shape, ITEM, gap_bytes=gap_bytes, image_bytes=1 << 30)
    except SliceError as error:
        assert "differently" in str(error)
        return
    expected = joined(array, items)
    assert selection.shape == expected.shape
    raw = array.tobytes()
    compact = bytearray(b"".join(raw[start : start + selection.chunk_bytes] for start in selection.starts))
    if not compact:
        assert not expected.size
        return
    tensor = torch.frombuffer(compact, dtype=torch.int32).view(selection.read_shape)
    found = select_and_cast({"w": tensor}, {"w": selection}, None)["w"] if selection.post or selection.flip else tensor
    assert np.array_equal(found.numpy(), expected)
    assert found.untyped_storage().nbytes() == found.nbytes == expected.nbytes


def test_intervals_of_rows_are_read_alone() -> None:
    selection = select([slice(8, 16), slice(64, 72)], (96, 1000), ITEM)
    assert selection.nbytes == 16 * 4000
    assert selection.post is None
    assert select([slice(8, 16)], (96, 1000), ITEM) == select(slice(8, 16), (96, 1000), ITEM)
    backwards = select([slice(64, 72), slice(8, 16), slice(70, 80)], (96, 1000), ITEM)
    assert backwards.nbytes == (8 + 16) * 4000  # rows of two intervals are read once
    assert backwards.shape == (26, 1000)


@pytest.mark.parametrize("index", [[slice(0, 2), 1], [slice(0, 4, 2)], [slice(0, 1), slice(4, 1, -1)]], ids=repr)
def test_intervals_are_slices_of_step_1(index: Any) -> None:
    with pytest.raises(SliceError, match=r"step of 1|integers"):
        select(index, (3, 4, 5), ITEM)


def test_selection_is_frozen() -> None:
    with pytest.raises(AttributeError):
        select(0, (3,), 4).chunk_bytes = 3  # type: ignore[misc]
