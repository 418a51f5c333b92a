"""Few workers with long slots where there is memory for these; the slots within half of the budget, whatever it is."""

from __future__ import annotations

import pytest

from stio.loading.sizes import mapped_block_bytes, num_map_workers, request_sizes, staging_sizes, whole_pages
from stio.storage.base import Requests

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("budget_bytes", "num_queues", "total_bytes", "sizes"),
    [
        (1 * GIB, 1, 16 * GIB, (2, 2, 256 * MIB)), (2 * GIB, 1, 16 * GIB, (2, 2, 512 * MIB)),
        (64 * GIB, 1, 160 * GIB, (2, 6, 512 * MIB)), (1 * GIB, 2, 16 * GIB, (2, 2, 128 * MIB)),
        (1 * GIB, 1, 2 * GIB - 1, (2, 4, 128 * MIB)), (1 * GIB, 1, 512 * MIB, (2, 6, 64 * MIB)),
        (1 * GIB, 1, 512 * MIB - 1, (4, 8, 32 * MIB)), (1 * GIB, 1, 0, (4, 8, 32 * MIB)),
        (256 * MIB, 1, 16 * GIB, (2, 2, 64 * MIB)), (255 * MIB, 1, 16 * GIB, (4, 8, 8 * MIB)),
        (100 * MIB, 1, 16 * GIB, (4, 8, 4 * MIB)), (1 * GIB, 8, 16 * GIB, (4, 8, 8 * MIB)),
        (1 * MIB, 1, 16 * GIB, (4, 8, 64 * KIB)), (100 * KIB, 1, 16 * GIB, (4, 8, 4 * KIB)),
        (1, 1, 1, (4, 8, 4 * KIB)), (1, 8, 1, (4, 8, 4 * KIB)),
    ],
)  # fmt: skip
def test_long_slots_for_few_workers_or_short_ones_for_more(
    budget_bytes: int, num_queues: int, total_bytes: int, sizes: tuple[int, int, int]
) -> None:
    assert staging_sizes(budget_bytes, num_queues, total_bytes=total_bytes, switch_interval=0.005) == sizes


@pytest.mark.parametrize(
    ("budget_bytes", "sizes"),
    [
        (1 * GIB, (3, 4, 128 * MIB)), (2 * GIB, (3, 7, 128 * MIB)), (512 * MIB, (3, 4, 64 * MIB)),
        (256 * MIB, (4, 8, 16 * MIB)),
    ],
)  # fmt: skip
def test_more_slots_with_a_short_switch_interval(budget_bytes: int, sizes: tuple[int, int, int]) -> None:
    assert staging_sizes(budget_bytes, 1, total_bytes=16 * GIB, switch_interval=0.0005) == sizes


@pytest.mark.parametrize("total_bytes", [0, 1 << 20, 1 << 30, 1 << 40])
@pytest.mark.parametrize("num_queues", [1, 2, 3, 8])
@pytest.mark.parametrize("switch_interval", [0.005, 0.0005])
def test_p8_half_of_the_budget_at_most(total_bytes: int, num_queues: int, switch_interval: float) -> None:
    """But for budgets so small that not even pages fit; a slot is whole pages, and torch pins what was asked for."""
    for exponent in range(40):
        for budget_bytes in (1 << exponent, (1 << exponent) + 4097, 3 << exponent):
            _, num_slots, slot_bytes = staging_sizes(
                budget_bytes, num_queues, total_bytes=total_bytes, switch_interval=switch_interval
            )
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


REQUESTS = Requests(8 * MIB, 32, MIB)


@pytest.mark.parametrize(
    ("budget_bytes", "num_queues", "nbytes", "num_in_flight", "num_slots"),
    [
        (512 * MIB, 0, 8 * MIB, 32, 0), (4096 * MIB, 0, 8 * MIB, 32, 0), (64 * MIB, 0, 1 * MIB, 32, 0),
        (16 * MIB, 0, 1 * MIB, 8, 0), (1 * MIB, 0, 512 * KIB, 1, 0), (1, 0, 4 * KIB, 1, 0),
        (1024 * MIB, 1, 8 * MIB, 32, 36), (512 * MIB, 1, 4 * MIB, 32, 36), (512 * MIB, 2, 2 * MIB, 32, 36),
        (8 * MIB, 1, 1 * MIB, 2, 4), (1, 1, 4 * KIB, 1, 2),
    ],
)  # fmt: skip
def test_requests_by_budget(
    budget_bytes: int, num_queues: int, nbytes: int, num_in_flight: int, num_slots: int
) -> None:
    """A small budget makes requests smaller first, then fewer."""
    found, found_slots = request_sizes(budget_bytes, REQUESTS, num_queues)
    assert (found.nbytes, found.num_in_flight, found_slots) == (nbytes, num_in_flight, num_slots)
    assert found.gap_bytes == REQUESTS.gap_bytes


@pytest.mark.parametrize("num_queues", [0, 1, 2, 8])
@pytest.mark.parametrize("budget_bytes", [1 << k for k in range(20, 36)])
def test_p8_answers_and_slots_leave_a_part_of_the_budget(budget_bytes: int, num_queues: int) -> None:
    found, num_slots = request_sizes(budget_bytes, REQUESTS, num_queues)
    if budget_bytes >= 64 * MIB:
        assert found.buffer_bytes + num_queues * num_slots * found.nbytes <= budget_bytes * 0.6
    assert found.nbytes % 4096 == 0
