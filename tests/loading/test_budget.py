"""A budget counts bytes; first come, first served is its caller's part."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stio.loading.scheduler import Budget


def test_takes_what_fits_and_gives_back():
    budget = Budget(100)
    assert budget.try_acquire(0, 60)
    assert budget.try_acquire(1, 40)
    assert not budget.try_acquire(2, 1)
    budget.release(1)
    assert budget.try_acquire(2, 39)
    assert (budget.used_bytes, budget.peak_bytes, budget.total_bytes) == (99, 100, 100)


def test_an_oversized_request_runs_alone():
    budget = Budget(100)
    assert budget.try_acquire(0, 1)
    assert not budget.try_acquire(1, 1000)
    budget.release(0)
    assert budget.try_acquire(1, 1000)
    assert not budget.try_acquire(2, 1)
    assert budget.try_acquire(2, 0) is False  # nothing goes beside it
    budget.release(1)
    assert budget.used_bytes == 0
    assert budget.peak_bytes == 1000


def test_empty_requests_pass():
    budget = Budget(1)
    assert budget.try_acquire(0, 0)
    assert budget.try_acquire(1, 1)
    assert budget.try_acquire(2, 0)


@pytest.mark.parametrize("total", [0, -1])
def test_a_total_must_be_positive(total):
    with pytest.raises(ValueError, match="positive"):
        Budget(total)


def test_221_a_key_comes_back_once():
    """A signal handler may release what the code that it interrupts releases too."""
    budget = Budget(10)
    assert budget.try_acquire(0, 4)
    assert budget.try_acquire(1, 4)
    for _ in range(3):
        budget.release(0)
        assert budget.used_bytes == 4
    assert budget.try_acquire(2, 6)
    budget.release(0)
    assert budget.used_bytes == 10
    assert not budget.try_acquire(3, 1)


@given(st.integers(1, 50), st.lists(st.tuples(st.booleans(), st.integers(0, 80)), max_size=60))
def test_is_never_exceeded_but_by_one_alone(total, steps):
    budget, held = Budget(total), {}
    for key, (take, nbytes) in enumerate(steps):
        if take:
            if budget.try_acquire(key, nbytes):
                held[key] = nbytes
        elif held:
            gone = list(held)[nbytes % len(held)]
            del held[gone]
            budget.release(gone)
        assert budget.used_bytes == sum(held.values())
        assert budget.used_bytes <= total or sum(1 for h in held.values() if h) == 1
