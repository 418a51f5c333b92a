"""Work on long lists in slices, so that no single C call holds the interpreter's lock (the GIL) for long.

The interpreter releases its lock only between bytecodes. One `sort` of 100,000 rows, or one decode of a 13 MB header,
blocks every other thread, also that of an event loop, for 30-60 ms. Slices of a few thousand rows limit that to about
a millisecond and cost a few percent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from typing import Any, TypeVar

T = TypeVar("T")

WINDOW_BYTES = 256 * 1024
"""Text handled by one C call. One msgspec decode of this takes 1.1 ms on a 2.x GHz server core."""

ROWS = 4096
"""Rows of a column handled by one C call: 0.1-0.5 ms."""


def row_slices(count: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `ROWS` rows that cover `range(count)`."""
    for start in range(0, count, ROWS):
        yield slice(start, min(start + ROWS, count))


def sort_in_slices(items: Sequence[T], key: Callable[[T], Any] | None = None) -> list[T]:
    """Return a stable sorted list; equal to `sorted(items, key=key)`."""
    values: Sequence[Any] = items
    if len(values) <= ROWS:
        return sorted(values, key=key)
    runs = [sorted(values[rows], key=key) for rows in row_slices(len(values))]
    # One long sort in C would hold the lock. The merge is Python code, and stable.
    return list(merge(*runs, key=key))
