"""How many cases `make test` tries of what has very many: all of them run in `make nightly`, which sets STIO_TEST_LONG."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TypeVar

import pytest

T = TypeVar("T")

LONG = os.environ.get("STIO_TEST_LONG") == "1"
PART = 8
"""Of a matrix, `make test` runs one case of so many."""
LOOP = "anyio_backend"
"""The parameter that names an event loop."""


def count(quick: int, long: int) -> int:
    """Return how often a test does its random or repeated work: the first number in `make test`, the second nightly."""
    return long if LONG else quick


def eighth(columns: Sequence[T], row: int) -> Sequence[T]:
    """Return the columns that `make test` tries in a row of a matrix inside a test: with the rows they take turns."""
    return columns if LONG else columns[row % PART :: PART]


def part_of(cases: Sequence[Mapping[str, object]], part: int = PART) -> list[int]:
    """Return the numbers of the cases that stand for all: one of `part`, and at least one with each value of a parameter.

    A value that no two cases have in common, but for their event loops, is a case and not a row of a matrix.

    Args:
        cases: The values of the parameters of each case.
        part: One case of so many.
    """
    values = [{(name, _identity(value)) for name, value in case.items()} for case in cases]
    counts = Counter(chain.from_iterable(values))
    num_loops = sum(name == LOOP for name, _ in counts)
    # Not each eighth one: the values of a parameter may take turns with that period.
    chosen = [k for k in range(len(cases)) if (k + k // part) % part == 0]
    missing = {value for value, num in counts.items() if num > max(num_loops, 1)}
    missing -= set().union(*(values[k] for k in chosen))
    while missing:
        chosen.append(max(range(len(cases)), key=lambda k: len(values[k] & missing)))
        missing -= values[chosen[-1]]
    return sorted(chosen)


def _identity(value: object) -> object:
    """Return what two equal parameters have in common; other objects than plain values are equal to themselves only."""
    return value if isinstance(value, str | int | float | type(None)) else id(value)


def mark_slow(items: Sequence[pytest.Item]) -> None:
    """Mark the cases of matrices that `make test` leaves out: of a test with the mark `matrix`."""
    tests: defaultdict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if (
            isinstance(item, pytest.Function)
            and item.get_closest_marker("matrix")
            and not item.get_closest_marker("slow")
        ):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        chosen = set(part_of([case.callspec.params for case in cases]))
        for k, case in enumerate(cases):
            if k not in chosen:
                case.add_marker(pytest.mark.slow)
