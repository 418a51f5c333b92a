"""More workers where there are cores and room for large slots; the ring within half of the budget, whatever that is."""

from __future__ import annotations

import pytest

from stio.loading.ring_size import Ring, ring_of, usable_cores

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("num_cores", "num_workers"), [(1, 4), (2, 4), (6, 4), (8, 6), (10, 7), (12, 9), (15, 11), (16, 12), (128, 12)]
)
def test_workers_by_cores(num_cores: int, num_workers: int) -> None:
    ring = ring_of(512 * MIB, 1, num_cores=num_cores)
    assert ring.num_workers == num_workers
    assert ring.num_slots == num_workers + 4


@pytest.mark.parametrize(
    ("budget_bytes", "num_rings", "ring"),
    [
        (512 * MIB, 1, Ring(12, 16 * MIB)), (1024 * MIB, 1, Ring(12, 32 * MIB)), (64 << 30, 1, Ring(12, 32 * MIB)),
        (256 * MIB, 1, Ring(12, 8 * MIB)), (255 * MIB, 1, Ring(11, 8 * MIB)), (128 * MIB, 1, Ring(4, 8 * MIB)),
        (100 * MIB, 1, Ring(4, 4 * MIB)), (512 * MIB, 2, Ring(12, 8 * MIB)), (512 * MIB, 4, Ring(4, 8 * MIB)),
        (512 * MIB, 8, Ring(4, 4 * MIB)), (1 * MIB, 1, Ring(4, 64 * KIB)), (100 * KIB, 1, Ring(4, 4 * KIB)),
        (1, 1, Ring(4, 4 * KIB)), (1, 8, Ring(4, 4 * KIB)),
    ],
)  # fmt: skip
def test_slots_follow(budget_bytes: int, num_rings: int, ring: Ring) -> None:
    assert ring_of(budget_bytes, num_rings, num_cores=64) == ring


def test_as_it_was_where_there_are_few_cores() -> None:
    assert ring_of(512 * MIB, 1, num_cores=2) == Ring(4, 32 * MIB)


@pytest.mark.parametrize("num_cores", [1, 9, 16, 200])
@pytest.mark.parametrize("num_rings", [1, 2, 3, 8])
def test_p8_half_of_the_budget_at_most(num_cores: int, num_rings: int) -> None:
    """But for budgets so small that not even pages fit; a slot is whole pages, and torch pins what was asked for."""
    for exponent in range(40):
        for budget_bytes in (1 << exponent, (1 << exponent) + 4097, 3 << exponent):
            ring = ring_of(budget_bytes, num_rings, num_cores=num_cores)
            assert ring.slot_bytes % 4096 == 0
            assert ring.slot_bytes & (ring.slot_bytes - 1) == 0
            taken = ring.num_slots * ring.slot_bytes * num_rings
            assert taken <= max(budget_bytes // 2, 8 * 4096 * num_rings)


def test_usable_cores() -> None:
    assert usable_cores() >= 1
