"""Sorting in pieces gives what one sort gives."""

from __future__ import annotations

import operator
import random

import pytest

from stio.format.gil_slices import ROWS, sort_in_slices


@pytest.mark.parametrize("count", [0, 1, ROWS, ROWS + 1, 5 * ROWS + 17])
@pytest.mark.parametrize("num_keys", [1, 7, 10**9])
def test_sorts_stably(count, num_keys):
    numbers = random.Random(count + num_keys)
    items = [(numbers.randrange(num_keys), place) for place in range(count)]
    assert sort_in_slices(items, key=operator.itemgetter(0)) == sorted(items, key=operator.itemgetter(0))


@pytest.mark.parametrize("step", [1, -1])
def test_sorts_what_is_sorted(step):
    names = [f"state/{number}/exp_avg" for number in range(3 * ROWS)][::step]
    assert sort_in_slices(names, key=str) == sorted(names)
