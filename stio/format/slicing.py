"""From an index, as in `tensor[...]`, to byte ranges, so that only the selected bytes are read.

Each dimension selects rows: an int, a range or a list. From the innermost dimension outwards, full dimensions merge
into one contiguous chunk, up to the first that is not full. The rows of the outer dimensions determine where the chunks
start. All chunks have one length; chunk `i` is read to byte `i * chunk_bytes` of a compact buffer. The tensor library
does the rest: `tensor = compact.view(read_shape)[post].flip(flip)`.

The rest is: negative steps (rows are read forward and then flipped, because torch takes no negative step), lists out of
order or with repetitions (each row is read once), several intervals, steps inside rows that are too short to be worth
skipping, and inner dimensions where whole rows are read (`_whole_rows`).
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from types import EllipsisType
from typing import Any, Literal, NoReturn, TypeAlias

from stio.errors import SliceError, printable

Index: TypeAlias = Any
"""An index: int, slice, Ellipsis, None, list or array of ints, list of slices, or a tuple of those; at most one of the
lists and arrays of ints has another length than 1."""

Rows: TypeAlias = "range | list[int]"
"""Rows of one dimension, ascending and distinct; a list only if they are not evenly spaced."""

SMALL_CHUNK_BYTES = 512
"""Shorter chunks are widened where that is cheap. The bound is a disk's sector; copying it costs less than a call."""

PAGE_BYTES = 4096
"""Rows up to this size are read whole rather than in small chunks: the page is touched in any case."""

WORTHWHILE_STRIDE_BYTES = 16 * 1024
"""Small chunks at most this far apart are read with the bytes between them. At 4 GB/s that takes 4 us, about the time
of one request."""

MANY_CHUNKS = 1_000_000
"""More chunks than this are merged wherever possible: each costs about 36 bytes and a microsecond to plan."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The bytes of a tensor to read, and how to make the selected tensor from them.

    The selected tensor is `compact.view(read_shape)`, indexed by `post` unless that is None, then flipped along the
    dimensions `flip` of the indexed tensor. For `post`, torch and numpy give the same result: it has only ints of 0 and
    above, slices with positive steps, None, and at most one list (nested for an index array of several dimensions).
    An item that is a tuple of slices stands for their parts, one after the other along that dimension; see
    `stages`.
    """

    starts: Sequence[int]
    """First byte of each chunk, relative to the tensor's first byte, ascending; a `range` if they are evenly spaced.
    Chunks touch only where a list selects neighbours and other rows, since all chunks have one length."""
    chunk_bytes: int
    """Length of every chunk; 0 where nothing is read."""
    read_shape: tuple[int, ...]
    """Shape of the compact bytes, in C order."""
    post: tuple[Any, ...] | None
    """Index to apply to the compact tensor; None for no index."""
    flip: tuple[int, ...]
    """Dimensions to reverse after that; mostly empty."""
    shape: tuple[int, ...]
    """Shape of the selected tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes to read."""
        return len(self.starts) * self.chunk_bytes

    def stages(self) -> tuple[tuple[slice, ...], list[tuple[int, tuple[slice, ...]]], tuple[Any, ...]] | None:
        """Return `post` in three stages, None if it has no intervals.

        First an index of slices, one for each dimension. Then dimensions with their intervals, whose parts are joined
        along that dimension. Then an index for the rest: ints, new dimensions and a list.
        """
        items = [item for item in self.post or () if item is not None]
        joins = [(dim, item) for dim, item in enumerate(items) if isinstance(item, tuple)]
        if not joins or self.post is None:
            return None
        first = tuple(
            item if isinstance(item, slice) else slice(item, item + 1) if isinstance(item, int) else slice(None)
            for item in items
        )
        last = tuple(
            0 if isinstance(item, int) else item if item is None or isinstance(item, list) else slice(None)
            for item in self.post
        )
        return first, joins, last


@dataclass(frozen=True, slots=True)
class _Term:
    """One part of an index after normalization."""

    dim: int
    """Dimension of the tensor, -1 for a new one."""
    rows: range | list[int]
    """The selected rows, in order; empty for a new dimension."""
    kind: Literal["int", "slice", "list", "new", "intervals"]
    """Kind of this part of the index; `new` is a new dimension, `intervals` a list of slices."""
    list_shape: tuple[int, ...] = ()
    """Of a list: its dimensions, which replace the indexed one."""
    intervals: tuple[range, ...] = ()
    """Of a list of slices: the rows of each that has any, in order."""

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The dimensions of the result that it stands for."""
        if self.kind == "list":
            return self.list_shape
        return () if self.kind == "int" else (1 if self.kind == "new" else len(self.rows),)


def select(index: Index, shape: Sequence[int], itemsize: int, *, gap_bytes: int = 0, image_bytes: int = 0) -> Selection:
    """Return the bytes to read for `tensor[index]`.

    Args:
        index: As `numpy.s_[...]` gives it: ints, slices of any step, Ellipsis, None, sequences of ints (list, range,
            tuple inside the tuple), arrays of ints with any number of dimensions, or a tuple of these. At most one
            sequence or array has another length than 1. An array without dimensions is an int. A list of slices with
            step 1 selects several intervals of its dimension, one after the other, in the order of the list.
        shape: The tensor's dimensions.
        itemsize: Bytes of one element.
        gap_bytes: Where at most so many bytes lie between two chunks, whole rows are read: one long read, and one
            strided copy of the selected part.
        image_bytes: Largest selection for which whole rows are read.

    Returns:
        The selection; numpy and torch both give its result for this index.

    Raises:
        SliceError: The index is of another kind (masks and floats are), out of range, longer than the shape, or one
            for which numpy and torch order the dimensions differently (`[:, 0, :, [1, 2]]`), or put the dimension of
            several lists first (`[:, [0], :, [1, 2]]`).
    """
    shape = tuple(shape)
    terms = _one_list(_normalize(index, shape), index, shape)
    _refuse_ambiguous(terms, index, shape)
    result_shape = tuple(size for term in terms for size in term.result_shape)
    if 0 in result_shape or 0 in shape:
        return Selection((), 0, result_shape, None, (), result_shape)
    wanted = {term.dim: term for term in terms if term.kind != "new"}
    read = [_ascending(wanted[dim].rows) for dim in range(len(shape))]
    if gap_bytes:
        read = _whole_rows(read, shape, itemsize, gap_bytes, image_bytes)
    starts, chunk_bytes = _chunks(read, shape, itemsize)
    sources = [term for term in terms for _ in term.result_shape]  # of each dimension of the result
    flip = tuple(k for k, term in enumerate(sources) if isinstance(term.rows, range) and term.rows.step < 0)
    post = tuple(_post_item(term, read) for term in terms)
    if all(item is None or item == 0 or item == slice(None) for item in post) and all(
        len(read[term.dim]) == 1 for term in terms if term.kind == "int"
    ):
        return Selection(starts, chunk_bytes, result_shape, None, flip, result_shape)
    post = tuple(_nested(item, term) for item, term in zip(post, terms, strict=True))
    return Selection(starts, chunk_bytes, tuple(map(len, read)), post, flip, result_shape)


def _normalize(index: Index, shape: tuple[int, ...]) -> list[_Term]:
    """Turn an index into one term for each dimension, in order, and those for new dimensions."""
    items = list(index) if isinstance(index, tuple) else [index]
    num_ellipses = sum(isinstance(item, EllipsisType) for item in items)
    num_dims = sum(item is not None for item in items) - num_ellipses
    if num_ellipses > 1:
        _refuse("more than one Ellipsis", index, shape)
    if num_dims > len(shape):
        _refuse("more indices than dimensions", index, shape)
    if not num_ellipses:
        items.append(...)
    terms: list[_Term] = []
    dim = 0
    for item in items:
        if item is None:
            terms.append(_Term(-1, [], "new"))
        elif isinstance(item, EllipsisType):
            for _ in range(len(shape) - num_dims):
                terms.append(_Term(dim, range(shape[dim]), "slice"))
                dim += 1
        else:
            terms.append(_term(item, dim, index, shape))
            dim += 1
    return terms


def _one_list(terms: list[_Term], index: Index, shape: tuple[int, ...]) -> list[_Term]:
    """Broadcast several lists as numpy and torch do: one keeps the dimensions of the result, the others become ints."""
    lists = [k for k, term in enumerate(terms) if term.kind == "list"]
    if len(lists) < 2:
        return terms
    longer = [k for k in lists if len(terms[k].rows) != 1]
    if len(longer) > 1:
        _refuse("more than one list has a length other than 1", index, shape)
    kept = longer[0] if longer else lists[0]
    plain = [k for k, term in enumerate(terms) if term.kind not in ("int", "list")]
    if any(k < kept for k in plain) and any(lists[0] < k < lists[-1] for k in plain):
        _refuse("lists around a slice put their dimension first (index by one list after the other)", index, shape)
    num_dims = max(len(terms[k].list_shape) for k in lists)
    for k in lists:
        term, own = terms[k], terms[k].list_shape
        if k == kept:
            terms[k] = replace(term, list_shape=(1,) * (num_dims - len(own)) + own)
        else:
            terms[k] = _Term(term.dim, range(term.rows[0], term.rows[0] + 1), "int")
    return terms


def _term(item: Any, dim: int, index: Index, shape: tuple[int, ...]) -> _Term:
    length = shape[dim]
    if isinstance(item, slice):
        return _Term(dim, _range(item, length, index, shape), "slice")
    if isinstance(item, (list, tuple)) and item and all(isinstance(part, slice) for part in item):
        intervals = [_range(part, length, index, shape) for part in item]
        if any(rows.step != 1 for rows in intervals):
            _refuse("the slices in a list must have a step of 1", index, shape)
        intervals = [rows for rows in intervals if rows]
        if len(intervals) < 2:
            return _Term(dim, intervals[0] if intervals else range(0), "slice")
        return _Term(dim, [row for rows in intervals for row in rows], "intervals", (), tuple(intervals))
    dtype = str(getattr(item, "dtype", "int"))
    # uint8 is a mask in torch and not in numpy. A bool is no index, though `operator.index` takes torch's.
    if "int" not in dtype or dtype == "torch.uint8" or isinstance(item, (bool, str, bytes)):
        _refuse("masks, floats and text cannot be indices", index, shape)
    if getattr(item, "ndim", 0) == 0:  # torch's arrays of one element have `__index__`, whatever their dimensions
        try:
            return _Term(dim, range(_row(operator.index(item), length, index, shape), length)[:1], "int")
        except TypeError:
            pass
    values, list_shape = item, None
    if hasattr(item, "tolist"):
        list_shape = tuple(getattr(item, "shape", ()))
        values = item.reshape(-1).tolist() if len(list_shape) > 1 else item.tolist()
    if not isinstance(values, (list, tuple, range)):
        _refuse(f"a {type(item).__name__} cannot be an index", index, shape)
    rows = []
    for value in values:
        if isinstance(value, bool) or not hasattr(value, "__index__") or getattr(value, "ndim", 0) != 0:
            _refuse("a list of indices may hold integers only", index, shape)
        if item is index and str(getattr(value, "dtype", "")).startswith("torch."):
            _refuse("torch reads a list of tensors as a tuple, numpy as an array: pass one of these", index, shape)
        try:
            rows.append(_row(operator.index(value), length, index, shape))
        except TypeError:
            _refuse("a list of indices may hold integers only", index, shape)
    return _Term(dim, rows, "list", list_shape or (len(rows),))


def _range(item: slice, length: int, index: Index, shape: tuple[int, ...]) -> range:
    try:
        return range(length)[item]
    except (TypeError, ValueError) as problem:  # bounds that are no integers, a step of zero
        _refuse(str(problem), index, shape)


def _row(value: int, length: int, index: Index, shape: tuple[int, ...]) -> int:
    if not -length <= value < length:
        _refuse(f"{printable(value)} is out of range for a dimension of {length}", index, shape)
    return value + length if value < 0 else value


def _refuse(reason: str, index: Index, shape: tuple[int, ...]) -> NoReturn:
    # The text of the index, not the index: an error must not keep the caller's arrays alive.
    raise SliceError(
        f"the index does not fit the tensor: {reason}", requested=repr(index), expected=f"one for shape {shape}"
    )


def _refuse_ambiguous(terms: list[_Term], index: Index, shape: tuple[int, ...]) -> None:
    """Refuse an index that numpy and torch interpret differently.

    If there is a list, numpy treats ints as lists too. If another part is between them, numpy puts the list's
    dimension first, and torch leaves it in its place. Both agree if its place is the first.
    """
    if all(term.kind != "list" for term in terms):
        return
    parts: list[str] = [term.kind for term in terms]
    # In numpy an Ellipsis for no dimension separates too. Only the index itself still shows it.
    if isinstance(index, tuple) and len(index) == len(terms) + 1:
        place = next((k for k, item in enumerate(index) if isinstance(item, EllipsisType)), len(parts))
        parts.insert(place, "ellipsis")
    places = [place for place, kind in enumerate(parts) if kind in ("int", "list")]
    separated = places[-1] - places[0] + 1 != len(places)
    if separated and any(kind in ("slice", "new", "intervals") for kind in parts[: parts.index("list")]):
        _refuse(
            "numpy and torch order its dimensions differently (index by the int and the list in turn)", index, shape
        )


def _ascending(rows: range | list[int]) -> Rows:
    """Return the distinct rows in order, as a range if they are evenly spaced."""
    if isinstance(rows, range):
        return rows if rows.step > 0 else rows[::-1]
    distinct = sorted(set(rows))
    step = distinct[1] - distinct[0] if len(distinct) > 1 else 1
    regular = range(distinct[0], distinct[-1] + 1, step)
    return regular if len(regular) == len(distinct) and list(regular) == distinct else distinct


def _whole_rows(
    read: list[Rows], shape: tuple[int, ...], itemsize: int, gap_bytes: int, image_bytes: int
) -> list[Rows]:
    """Return the rows to read where chunks with short gaps between them become one: whole inner dimensions.

    One call for each chunk of some kilobytes costs more than the bytes between them: half of the columns of 60 matrices
    of 16 MiB took 6.4 times as long as whole rows and one strided copy.

    Args:
        read: The selected rows of each dimension.
        shape: The tensor's dimensions.
        itemsize: Bytes of one element.
        gap_bytes: Longest run of other bytes that is read along.
        image_bytes: Most bytes that are read; if there would be more, `read` is returned.
    """
    wide = list(read)
    row_bytes = itemsize
    for dim in reversed(range(len(shape))):
        rows, length = wide[dim], shape[dim]
        span = range(rows[0], rows[-1] + 1)
        if len(span) != len(rows):
            widest = rows.step if isinstance(rows, range) else max(map(operator.sub, rows[1:], rows))
            if (widest - 1) * row_bytes > gap_bytes:
                break
            wide[dim] = span
        if len(span) != length:
            if prod(map(len, wide[:dim])) == 1 or (length - len(span)) * row_bytes > gap_bytes:
                break
            wide[dim] = range(length)
        row_bytes *= length
    return wide if prod(map(len, wide)) * itemsize <= image_bytes else read


def _chunks(read: list[Rows], shape: tuple[int, ...], itemsize: int) -> tuple[Sequence[int], int]:
    """Return starts and length of the chunks. Widens rows in `read` where that is cheaper."""
    chunk_bytes = row_bytes = itemsize
    dim = len(shape) - 1
    base = 0
    while dim >= 0:
        num_outer = prod(map(len, read[:dim]))
        read[dim] = rows = _widened(read[dim], shape[dim], row_bytes, num_outer)
        row_bytes *= shape[dim]
        if len(rows) > 1 and rows[-1] - rows[0] + 1 != len(rows):
            break  # not contiguous: this dimension's rows are chunks
        base += rows[0] * (row_bytes // shape[dim])
        chunk_bytes *= len(rows)
        dim -= 1
        if len(rows) != shape[dim + 1]:
            break
    starts: Sequence[int] = range(base, base + 1)
    stride = itemsize * prod(shape[dim + 1 :])
    for outer in range(dim, -1, -1):
        starts = _repeat(starts, read[outer], stride)
        stride *= shape[outer]
    return starts, chunk_bytes


def _widened(rows: Rows, length: int, row_bytes: int, num_outer: int) -> Rows:
    """Return the rows to read of a dimension with contiguous rows: the selected ones, or some more.

    Args:
        rows: The selected rows.
        length: Size of the dimension.
        row_bytes: Bytes of one row.
        num_outer: How often the rows are read: once for each combination of rows of the outer dimensions.
    """
    span = range(rows[0], rows[-1] + 1)
    if len(span) != len(rows):
        near = len(span) * row_bytes <= WORTHWHILE_STRIDE_BYTES * len(rows)
        if (row_bytes >= SMALL_CHUNK_BYTES or not near) and len(rows) * num_outer <= MANY_CHUNKS:
            return rows
    if num_outer > 1 and len(span) * row_bytes < SMALL_CHUNK_BYTES and length * row_bytes <= PAGE_BYTES:
        return range(length)
    return span


def _repeat(starts: Sequence[int], rows: Rows, stride: int) -> Sequence[int]:
    """Return the starts for each row of an outer dimension; a range if they stay evenly spaced."""
    if isinstance(starts, range) and isinstance(rows, range):
        first, step = starts[0] + rows[0] * stride, rows.step * stride
        if len(rows) == 1:
            return range(first, first + (starts[-1] - starts[0]) + 1, starts.step)
        if len(starts) == 1 or starts.step * len(starts) == step:
            step = starts.step if len(starts) > 1 else step
            return range(first, first + step * len(starts) * len(rows), step)
    return [row * stride + start for row in rows for start in starts]


def _post_item(term: _Term, read: list[Rows]) -> Any:
    """Return the index that selects a term's rows among those that are read; a flip is applied later."""
    if term.kind == "new":
        return None
    got = read[term.dim]
    if term.kind == "int":
        return term.rows[0] - got[0]
    if isinstance(term.rows, range):
        rows = _ascending(term.rows)
        if len(rows) == len(got):
            return slice(None)
        return slice(rows[0] - got[0], rows[-1] - got[0] + 1, rows[1] - rows[0] if len(rows) > 1 else 1)
    if len(got) == len(term.rows) and list(got) == term.rows:
        return slice(None)
    if term.intervals:  # the rows that are read contain each interval whole, so it is a range of them
        firsts = [(bisect_left(got, rows[0]), len(rows)) for rows in term.intervals]
        return tuple(slice(first, first + count) for first, count in firsts)
    place = {row: k for k, row in enumerate(got)}
    return [place[row] for row in term.rows]


def _nested(item: Any, term: _Term) -> Any:
    """Return an item of `post`; that of a list with several dimensions as nested lists."""
    if len(term.list_shape) < 2:
        return item
    rows = list(range(len(term.rows))) if isinstance(item, slice) else item
    for size in reversed(term.list_shape[1:]):
        rows = [rows[k : k + size] for k in range(0, len(rows), size)]
    return rows
