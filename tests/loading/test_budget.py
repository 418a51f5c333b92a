"""A budget counts bytes; first come, first served is its caller's part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stio.loading.scheduler import Budget


def test_takes_what_fits_and_gives_back():
    budget = Budget(100)
    assert budget.try_acquire(60)
    assert budget.try_acquire(40)
    assert not budget.try_acquire(1)
    budget.release(40)
    assert budget.try_acquire(39)
    assert (budget.used_bytes, budget.peak_bytes, budget.total_bytes) == (99, 100, 100)


def test_an_oversized_request_runs_alone():
    budget = Budget(100)
    assert budget.try_acquire(1)
    assert not budget.try_acquire(1000)
    budget.release(1)
    assert budget.try_acquire(1000)
    assert not budget.try_acquire(1)
    assert budget.try_acquire(0) is False  # nothing goes beside it
    budget.release(1000)
    assert budget.used_bytes == 0
    assert budget.peak_bytes == 1000


def test_empty_requests_pass():
    budget = Budget(1)
    assert budget.try_acquire(0)
    assert budget.try_acquire(1)
    assert budget.try_acquire(0)


@pytest.mark.parametrize("total", [0, -1])
def test_a_total_must_be_positive(total):
    with pytest.raises(ValueError, match="positive"):
        Budget(total)


def test_more_cannot_come_back_than_went_out():
    budget = Budget(10)
    assert budget.try_acquire(4)
    with pytest.raises(ValueError, match="are released, but"):
        budget.release(5)
    assert budget.used_bytes == 4


@given(st.integers(1, 50), st.lists(st.tuples(st.booleans(), st.integers(0, 80)), max_size=60))
def test_is_never_exceeded_but_by_one_alone(total, steps):
    budget, held = Budget(total), []
    for take, nbytes in steps:
        if take:
            if budget.try_acquire(nbytes):
                held.append(nbytes)
        elif held:
            budget.release(held.pop(nbytes % len(held)))
        assert budget.used_bytes == sum(held)
        assert budget.used_bytes <= total or sum(1 for h in held if h) == 1
