"""Which rows of a checkpoint's tensors several ranks need, and which rank reads which of them. Pure; no torch.

A tensor is a sequence of *rows*: its parts along the first dimension that has more than one. The rows that ranks need
in common are put in the order of the checkpoint and cut into as many contiguous shares of nearly equal size as there
are ranks. Each share is cut into *chunks*, contiguous bytes of one file, which are read and sent one by one. All cuts
are at borders of rows, so a chunk consists of rows of one tensor or of several, and needs no other chunk to be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

RowRange = tuple[int, int]
"""Half-open range of rows; `NO_ROWS` if there are none."""

NO_ROWS: RowRange = (0, 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor as rows."""

    dim: int
    """The dimension; 0 for a tensor without dimensions, which is one row."""
    num: int
    """Number of rows; 0 if the tensor is empty."""
    nbytes: int
    """Bytes of one row."""


@dataclass(frozen=True, slots=True)
class SharedRows:
    """Rows of one tensor that ranks need in common."""

    tensor: int
    """Number of the tensor; the caller chooses it."""
    file: int
    """Number of its file."""
    offset: int
    """Where the first of these rows is in that file."""
    row_bytes: int
    """Bytes of one row."""
    rows: RowRange
    """Which rows."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one tensor in a chunk."""

    tensor: int
    """Number of the tensor."""
    rows: RowRange
    """Which rows."""
    offset: int
    """Offset of the first of them in the chunk."""


_LARGE_BYTES = 1 << 20
"""Rows of this size do not share a chunk with others of this size: each can be received where it belongs."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Bytes that one rank reads and sends at once."""

    owner: int
    """The rank."""
    file: int
    """Number of the file."""
    begin: int
    """First byte in the file."""
    nbytes: int
    """Length."""
    pieces: tuple[Piece, ...]
    """What it consists of."""


def rows_of(shape: Sequence[int], item_bytes: int) -> Rows:
    """Return how a tensor is divided into rows."""
    dim = next((k for k, size in enumerate(shape) if size != 1), max(0, len(shape) - 1))
    if 0 in shape:
        return Rows(dim, 0, 0)
    return Rows(dim, shape[dim] if shape else 1, prod(shape[dim + 1 :]) * item_bytes)


def needed_rows(rows: Rows, part: Sequence[Any]) -> RowRange:
    """Return the rows that hold a part of a tensor.

    Args:
        rows: The tensor's rows.
        part: A slice for each dimension, or several ascending ones; start and stop are numbers.
    """
    part = [slice(one[0].start, one[-1].stop) if isinstance(one, list) else one for one in part]
    if not rows.num or any(one.start >= one.stop for one in part):
        return NO_ROWS
    return (part[rows.dim].start, part[rows.dim].stop) if part else (0, rows.num)


def common_rows(needed: Sequence[RowRange]) -> RowRange:
    """Return the rows from the first to the last that any rank needs, if two ranks need one of them; else none.

    Args:
        needed: The rows that each rank needs of one tensor.
    """
    ranges = sorted(one for one in needed if one != NO_ROWS)
    if all(left[1] <= right[0] for left, right in pairwise(ranges)):
        return NO_ROWS
    return ranges[0][0], max(end for _, end in ranges)


def cut_chunks(shared: Sequence[SharedRows], num_ranks: int, chunk_bytes: int) -> list[Chunk]:
    """Divide rows among ranks, and each rank's share into chunks.

    Args:
        shared: The rows, in the order of the checkpoint: by file and offset.
        num_ranks: Number of shares.
        chunk_bytes: Largest chunk. A larger row is a chunk of its own.

    Returns:
        The chunks in the order of the checkpoint. A share differs from the others by at most about a row; it may be
        empty.
    """
    total = sum((one.rows[1] - one.rows[0]) * one.row_bytes for one in shared)
    chunks = _Chunks(chunk_bytes)
    owner = done = 0
    for one in shared:
        row, end = one.rows
        while row < end:
            num = end - row
            if owner < num_ranks - 1:
                left = total * (owner + 1) // num_ranks - done
                num = min(num, (2 * left + one.row_bytes) // (2 * one.row_bytes))  # the nearest border of a row
                if num <= 0:
                    owner += 1
                    continue
            chunks.add(owner, one, row, row + num)
            row += num
            done += num * one.row_bytes
    chunks.close()
    return chunks.closed


class _Chunks:
    """Chunks, of which the last one is not full."""

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._owner = self._file = self._begin = self._nbytes = 0
        self._pieces: list[Piece] = []
        self.closed: list[Chunk] = []

    def add(self, owner: int, shared: SharedRows, row: int, end: int) -> None:
        """Add rows of one tensor."""
        while row < end:
            offset = shared.offset + (row - shared.rows[0]) * shared.row_bytes
            if (owner, shared.file, offset) != (self._owner, self._file, self._begin + self._nbytes):
                self.close()
            if min(self._nbytes, (end - row) * shared.row_bytes) >= _LARGE_BYTES:
                self.close()
            num = (self._chunk_bytes - self._nbytes) // shared.row_bytes
            if num <= 0 and self._pieces:
                self.close()
                continue
            if not self._pieces:
                self._owner, self._file, self._begin = owner, shared.file, offset
            num = min(max(1, num), end - row)
            self._pieces.append(Piece(shared.tensor, (row, row + num), self._nbytes))
            self._nbytes += num * shared.row_bytes
            row += num

    def close(self) -> None:
        """End the chunk under way."""
        if self._pieces:
            self.closed.append(Chunk(self._owner, self._file, self._begin, self._nbytes, tuple(self._pieces)))
        self._pieces, self._nbytes = [], 0
