"""The plan of a broadcast: rows, what ranks need in common, and who reads which bytes."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stio.distributed.placements import (
    NO_ROWS,
    Rows,
    RowTensor,
    common_rows,
    cut_chunks,
    needed_rows,
    rows_of,
)


@pytest.mark.parametrize(
    ("shape", "rows"),
    [
        ((), Rows(0, 1, 4)),
        ((5,), Rows(0, 5, 4)),
        ((5, 3), Rows(0, 5, 12)),
        ((1, 5, 3), Rows(1, 5, 12)),
        ((1, 1), Rows(1, 1, 4)),
        ((0, 5), Rows(0, 0, 0)),
        ((5, 0), Rows(0, 0, 0)),
    ],
)
def test_rows_of_a_shape(shape: tuple[int, ...], rows: Rows):
    assert rows_of(shape, 4) == rows
    assert rows.num * rows.nbytes == prod(shape) * 4


def test_the_rows_of_a_part():
    rows = rows_of((1, 6, 4), 2)
    assert needed_rows(rows, (slice(0, 1), slice(2, 4), slice(0, 4))) == (2, 4)
    assert needed_rows(rows, (slice(0, 1), slice(0, 6), slice(1, 2))) == (0, 6)
    assert needed_rows(rows, (slice(1, 1), slice(0, 6), slice(0, 4))) == NO_ROWS
    assert needed_rows(rows, (slice(0, 1), slice(0, 6), slice(4, 4))) == NO_ROWS
    assert needed_rows(rows_of((), 2), ()) == (0, 1)
    assert needed_rows(rows_of((0, 2), 2), (slice(0, 0), slice(0, 2))) == NO_ROWS


@pytest.mark.parametrize(
    ("needed", "common"),
    [
        ([(0, 8), (0, 8)], (0, 8)),
        ([(0, 4), (4, 8)], NO_ROWS),
        ([(4, 8), (0, 4)], NO_ROWS),
        ([(0, 4), (4, 8), (0, 4), (4, 8)], (0, 8)),
        ([(0, 5), (4, 8)], (0, 8)),
        ([(0, 8), NO_ROWS], NO_ROWS),
        ([(0, 8), (2, 3), (3, 4)], (0, 8)),
        ([NO_ROWS, NO_ROWS], NO_ROWS),
        ([(2, 3), (2, 3), (6, 7)], (2, 7)),
    ],
)
def test_rows_that_ranks_need_in_common(needed: list[tuple[int, int]], common: tuple[int, int]):
    assert common_rows(needed) == common


@st.composite
def tensors(draw: st.DrawFn) -> tuple[list[RowTensor], list[tuple[int, int]]]:
    """Return tensors in the order of the checkpoint, and the rows of each that are sent."""
    found, shared, offset, file = [], [], 0, 0
    for tensor in range(draw(st.integers(0, 12))):
        if draw(st.booleans()) and found:
            file, offset = (file + 1, 0) if draw(st.booleans()) else (file, offset + draw(st.integers(1, 50)))
        row_bytes, num = draw(st.integers(1, 40)), draw(st.integers(1, 30))
        found.append(RowTensor(f"t{tensor}", file, offset, "U8", (num, row_bytes), Rows(0, num, row_bytes)))
        first = draw(st.integers(0, num))
        shared.append(
            (first, draw(st.integers(first, num)))
            if draw(st.booleans())
            else draw(st.sampled_from([(0, num), NO_ROWS]))
        )
        offset += num * row_bytes
    return found, shared


@pytest.mark.slow
@given(tensors(), st.integers(1, 9), st.integers(1, 200))
def test_chunks_cover_each_row_once(
    case: tuple[list[RowTensor], list[tuple[int, int]]], num_ranks: int, chunk_bytes: int
):
    stored, shared = case
    chunks = cut_chunks(stored, shared, num_ranks, chunk_bytes)
    rows: list[list[int]] = [[] for _ in stored]
    for chunk in chunks:
        end = chunk.begin
        for piece in chunk.pieces:
            one = stored[piece.tensor]
            assert one.file == chunk.file
            assert chunk.begin + piece.offset == end == one.offset + piece.rows[0] * one.rows.nbytes
            rows[piece.tensor] += range(*piece.rows)
            end += (piece.rows[1] - piece.rows[0]) * one.rows.nbytes
        assert end == chunk.begin + chunk.nbytes
        is_one_row = len(chunk.pieces) == 1 and chunk.pieces[0].rows[1] - chunk.pieces[0].rows[0] == 1
        assert chunk.nbytes <= chunk_bytes or is_one_row
    assert rows == [list(range(*one)) for one in shared]
    places = [(chunk.file, chunk.begin) for chunk in chunks]
    assert places == sorted(places)


def test_shares_of_ranks_are_nearly_equal():
    stored = [RowTensor(f"t{k}", 0, 1000 * k, "U8", (1000,), Rows(0, 1000, 1)) for k in range(30)]
    for num_ranks, chunk_bytes in [(2, 500), (7, 500), (7, 10_000)]:
        chunks = cut_chunks(stored, [(0, 1000)] * 30, num_ranks, chunk_bytes)
        shares = [sum(chunk.nbytes for chunk in chunks[rank::num_ranks]) for rank in range(num_ranks)]
        assert sum(shares) == 30_000 and max(shares) - min(shares) <= 30_000 / num_ranks / 4 + 1


def test_a_large_row_goes_whole():
    small = RowTensor("small", 0, 0, "U8", (3, 10), Rows(0, 3, 10))
    large = RowTensor("large", 0, 30, "U8", (1, 1000), Rows(0, 1, 1000))
    chunks = cut_chunks([small, large], [(0, 3), (0, 1)], 2, 100)
    assert [(one.begin, one.nbytes) for one in chunks] == [(0, 30), (30, 1000)]
    assert [one.nbytes for one in cut_chunks([large], [(0, 1)], 4, 100)] == [1000]
