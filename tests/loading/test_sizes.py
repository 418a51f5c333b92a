"""More workers where there are cores and memory for large slots; the slots within half of the budget, whatever it is."""

from __future__ import annotations

import pytest

from stio.loading.sizes import mapped_block_bytes, num_map_workers, staging_sizes, whole_pages

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("num_cores", "num_workers"), [(1, 4), (2, 4), (6, 4), (8, 6), (10, 7), (12, 9), (15, 11), (16, 12), (128, 12)]
)
def test_workers_by_cores(num_cores: int, num_workers: int) -> None:
    assert staging_sizes(512 * MIB, 1, num_cores=num_cores)[:2] == (num_workers, num_workers + 4)


@pytest.mark.parametrize(
    ("budget_bytes", "num_queues", "num_workers", "slot_bytes"),
    [
        (512 * MIB, 1, 12, 16 * MIB), (1024 * MIB, 1, 12, 32 * MIB), (64 << 30, 1, 12, 32 * MIB),
        (256 * MIB, 1, 12, 8 * MIB), (255 * MIB, 1, 11, 8 * MIB), (128 * MIB, 1, 4, 8 * MIB),
        (100 * MIB, 1, 4, 4 * MIB), (512 * MIB, 2, 12, 8 * MIB), (512 * MIB, 4, 4, 8 * MIB),
        (512 * MIB, 8, 4, 4 * MIB), (1 * MIB, 1, 4, 64 * KIB), (100 * KIB, 1, 4, 4 * KIB),
        (1, 1, 4, 4 * KIB), (1, 8, 4, 4 * KIB),
    ],
)  # fmt: skip
def test_slots_follow(budget_bytes: int, num_queues: int, num_workers: int, slot_bytes: int) -> None:
    assert staging_sizes(budget_bytes, num_queues, num_cores=64) == (num_workers, num_workers + 4, slot_bytes)


def test_few_cores() -> None:
    assert staging_sizes(512 * MIB, 1, num_cores=2) == (4, 8, 32 * MIB)


@pytest.mark.parametrize("num_cores", [1, 9, 16, 200])
@pytest.mark.parametrize("num_queues", [1, 2, 3, 8])
def test_p8_half_of_the_budget_at_most(num_cores: int, num_queues: int) -> None:
    """But for budgets so small that not even pages fit; a slot is whole pages, and torch pins what was asked for."""
    for exponent in range(40):
        for budget_bytes in (1 << exponent, (1 << exponent) + 4097, 3 << exponent):
            _, num_slots, slot_bytes = staging_sizes(budget_bytes, num_queues, num_cores=num_cores)
            assert slot_bytes % 4096 == 0
            assert slot_bytes & (slot_bytes - 1) == 0
            assert num_slots * slot_bytes * num_queues <= max(budget_bytes // 2, 8 * 4096 * num_queues)


@pytest.mark.parametrize("num_workers", [2, 8])
@pytest.mark.parametrize("budget_bytes", [1, 4096, 1 << 20, 64 << 20, 1 << 40])
@pytest.mark.parametrize("total_bytes", [0, 1, 100 << 20, 14 << 30])
def test_mapped_blocks_are_whole_pages_within_the_budget(total_bytes: int, budget_bytes: int, num_workers: int) -> None:
    cold, resident = (
        mapped_block_bytes(total_bytes, budget_bytes, resident=known, num_workers=num_workers)
        for known in (False, True)
    )
    assert 4096 <= cold <= resident <= 256 * MIB
    assert cold % 4096 == resident % 4096 == 0
    assert resident <= max(4096, budget_bytes // 2)
    assert cold <= max(4096, budget_bytes // 4)


def test_whole_pages() -> None:
    assert [whole_pages(nbytes) for nbytes in (0, 1, 4096, 8191, 8192)] == [4096, 4096, 4096, 4096, 8192]


@pytest.mark.parametrize(("num_cores", "num_workers"), [(1, 2), (2, 2), (3, 3), (8, 8), (64, 8)])
def test_map_workers_by_cores(num_cores: int, num_workers: int) -> None:
    assert num_map_workers(num_cores) == num_workers
