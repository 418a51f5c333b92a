"""Work on long lists in slices, so that no single C call holds the interpreter's lock (the GIL) for long.

The interpreter releases its lock only between bytecodes. One `sort` of 100,000 rows, or one decode of a 13 MB header,
blocks every other thread, also that of an event loop, for 30-60 ms. Slices of a few thousand rows limit that to about
a millisecond and cost a few percent.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

T = TypeVar("T")

WINDOW_BYTES = 256 * 1024
"""Text handled by one C call. One msgspec decode of this takes 1.1 ms on a 2.x GHz server core."""

ROWS = 4096
"""Rows of a column handled by one C call: 0.1-0.5 ms."""

_NUM_SAMPLES = 16
"""Keys of each sorted run of `ROWS` items from which a sort chooses its cuts."""


def row_slices(count: int) -> Iterator[slice]:
    """Yield consecutive slices of at most `ROWS` rows that cover `range(count)`."""
    for start in range(0, count, ROWS):
        yield slice(start, min(start + ROWS, count))


def sort_in_slices(items: Sequence[T], key: Callable[[T], Any] | None = None) -> list[T]:
    """Return a stable sorted list; equal to `sorted(items, key=key)`."""
    values: Sequence[Any] = items
    runs = [sorted(values[rows], key=key) for rows in row_slices(len(values))]
    if len(runs) <= 1:
        return runs[0] if runs else []
    # One long sort in C would hold the lock, and a merge in Python takes as long as everything else together. So the
    # runs are cut at some of their keys, and the items between two cuts are merged by a sort of their own. It is
    # stable: equal keys are between the same cuts, in the order of their runs.
    samples = [run[k] for run in runs for k in range(0, len(run), ROWS // _NUM_SAMPLES)]
    keys = sorted(samples if key is None else map(key, samples))
    starts = [0] * len(runs)
    result: list[T] = []
    for cut in keys[_NUM_SAMPLES::_NUM_SAMPLES]:
        stops = [bisect_left(run, cut, start, key=key) for run, start in zip(runs, starts, strict=True)]
        result += _merged(runs, starts, stops, key)
        starts = stops
    result += _merged(runs, starts, list(map(len, runs)), key)
    return result


def _merged(runs: list[list[Any]], starts: list[int], stops: list[int], key: Callable[[Any], Any] | None) -> list[Any]:
    merged = []
    for run, start, stop in zip(runs, starts, stops, strict=True):
        merged += run[start:stop]
    merged.sort(key=key)
    return merged
