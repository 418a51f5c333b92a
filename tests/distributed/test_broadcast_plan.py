"""The plan of a broadcast: rows, what ranks need in common, and who reads which bytes."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stio.distributed.placements import (
    NO_ROWS,
    Rows,
    SharedRows,
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
def shared_rows(draw: st.DrawFn) -> list[SharedRows]:
    found, offset, file = [], 0, 0
    for tensor in range(draw(st.integers(0, 12))):
        if draw(st.booleans()) and found:
            file, offset = (file + 1, 0) if draw(st.booleans()) else (file, offset + draw(st.integers(1, 50)))
        row_bytes, first, num = draw(st.integers(1, 40)), draw(st.integers(0, 5)), draw(st.integers(1, 30))
        found.append(SharedRows(tensor, file, offset, row_bytes, (first, first + num)))
        offset += num * row_bytes
    return found


@pytest.mark.slow
@given(shared_rows(), st.integers(1, 9), st.integers(1, 200))
def test_chunks_cover_each_row_once(shared: list[SharedRows], num_ranks: int, chunk_bytes: int):
    chunks = cut_chunks(shared, num_ranks, chunk_bytes)
    rows: dict[int, list[int]] = {one.tensor: [] for one in shared}
    by_tensor = {one.tensor: one for one in shared}
    for chunk in chunks:
        end = chunk.begin
        for piece in chunk.pieces:
            one = by_tensor[piece.tensor]
            assert one.file == chunk.file
            assert chunk.begin + piece.offset == end == one.offset + (piece.rows[0] - one.rows[0]) * one.row_bytes
            rows[piece.tensor] += range(*piece.rows)
            end += (piece.rows[1] - piece.rows[0]) * one.row_bytes
        assert end == chunk.begin + chunk.nbytes
        is_one_row = len(chunk.pieces) == 1 and chunk.pieces[0].rows[1] - chunk.pieces[0].rows[0] == 1
        assert chunk.nbytes <= chunk_bytes or is_one_row
    assert rows == {one.tensor: list(range(*one.rows)) for one in shared}

    places = [(chunk.file, chunk.begin) for chunk in chunks]
    assert places == sorted(places) and [chunk.owner for chunk in chunks] == sorted(chunk.owner for chunk in chunks)
    shares = [sum(chunk.nbytes for chunk in chunks if chunk.owner == rank) for rank in range(num_ranks)]
    longest = max((one.row_bytes for one in shared), default=0)
    assert all(abs(share - sum(shares) / num_ranks) <= longest + 1 for share in shares)


def test_a_large_row_goes_whole():
    small = SharedRows(0, 0, 0, 10, (0, 3))
    large = SharedRows(1, 0, 30, 1000, (0, 1))
    assert [(one.owner, one.begin, one.nbytes) for one in cut_chunks([small, large], 2, 100)] == [
        (0, 0, 30),
        (1, 30, 1000),
    ]
    assert [one.nbytes for one in cut_chunks([large], 4, 100)] == [1000]
