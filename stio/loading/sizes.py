"""The number of workers that read for a device, and the size of their blocks. Only arithmetic.

A worker returns to Python after each block, and beside a busy Python thread each return may wait a switch interval,
one thread after another. So blocks are as large as the budget allows. Two or three workers read for a device: a long
block is read by several requests at a time (`storage/parallel_read.py`), so few workers keep a disk and the memory of
the host busy, and while one waits for the GIL or for a slot another one reads. Where slots are small, more workers
read.
"""

from __future__ import annotations

from dataclasses import replace

from stio.runtime.limits import PAGE_BYTES
from stio.storage.base import Requests

_MIB = 1 << 20

BLOCK_BYTES = 32 * _MIB
"""4 workers of 32 MiB are as fast as 16 of 8 MiB, cold and warm, with a quarter of the returns to Python."""
LARGEST_BLOCK_BYTES = 256 * _MIB
"""Largest block of a mapped file."""
NUM_WORKERS = 4
"""Threads that read files into memory, and cold files into the page cache."""

ACCELERATOR_BUDGET_BYTES = 1 << 30
"""Default budget of a load to an accelerator. Half of it is pinned as two slots of 256 MiB: beside a busy Python thread
a load on an H200 takes about 5 blocks a second, whatever their size (2026-11-26)."""

AHEAD_BYTES = 1 << 30
"""Memory on a device that is allocated in one call, if the caller keeps all tensors."""

_MOST_MAP_WORKERS = 8
_SHORT_SWITCH_SECONDS = 0.001
"""Up to here a turn at the GIL takes less time than the bus needs for a slot of 64 MiB."""
_LEAST_LONG_SLOT_BYTES = 64 * _MIB
"""Slots of this size are filled by several requests at a time."""
_NUM_COPIED_SLOTS = 4
"""Short slots beyond one for each worker: these are copied while all workers read."""
_SMALLEST_SLOT_BYTES = 4096


def staging_sizes(
    budget_bytes: int, num_queues: int, *, total_bytes: int, switch_interval: float
) -> tuple[int, int, int]:
    """Return number of workers, number of slots and bytes of a slot for each copy queue of a load.

    All slots together use half of the budget, or more if slots have their least size. The size of a slot is a power of
    two: torch rounds pinned memory up to one.

    Args:
        budget_bytes: Budget of the load.
        num_queues: Number of copy queues: one for each accelerator, or two. 0 of a load to the CPU, which has no slots
            and ignores the result.
        total_bytes: Bytes of the load: a slot is at most an eighth of them, so that reads and copies overlap.
        switch_interval: The interpreter's, in seconds. While a thread waits for the GIL the bus should have work: in
            0.5 ms it copies 25 MB. So with a short interval more and smaller slots are faster.
    """
    share_bytes = budget_bytes // (2 * max(1, num_queues))
    num_workers, most_bytes = (2, 512 * _MIB) if switch_interval > _SHORT_SWITCH_SECONDS else (3, 128 * _MIB)
    least_slots = 2 * num_workers - 2
    slot_bytes = _power_of_two(min(most_bytes, share_bytes // least_slots, total_bytes // 8))
    if slot_bytes >= _LEAST_LONG_SLOT_BYTES:
        return num_workers, min(share_bytes // slot_bytes, num_workers + _NUM_COPIED_SLOTS), slot_bytes
    num_slots = NUM_WORKERS + _NUM_COPIED_SLOTS
    slot_bytes = max(_SMALLEST_SLOT_BYTES, min(BLOCK_BYTES, share_bytes // num_slots))
    return NUM_WORKERS, num_slots, _power_of_two(slot_bytes)


def _power_of_two(nbytes: int) -> int:
    return 1 << (nbytes.bit_length() - 1) if nbytes else 0


def request_sizes(budget_bytes: int, requests: Requests, num_queues: int) -> tuple[Requests, int]:
    """Return the requests that a budget allows for files behind a network, and the number of slots of a copy queue.

    A quarter of the budget is for the memory in which the source holds answers. Without a copy queue the rest is for
    groups under way; with queues another quarter is for their slots, of which each request needs one.
    """
    if not num_queues:
        return requests.within(budget_bytes // 2), 0
    within = requests.within(budget_bytes // 4 // num_queues)
    slot_bytes = max(_SMALLEST_SLOT_BYTES, 1 << (within.nbytes.bit_length() - 1))
    return replace(within, nbytes=slot_bytes), within.num_in_flight + min(_NUM_COPIED_SLOTS, within.num_in_flight)


def num_map_workers(num_cores: int) -> int:
    """Return how many threads populate mappings.

    The cores limit the rate if the pages are in the page cache: 1.7 GB in small folios on two cores took 50 ms with 2
    workers, 57 with 4, 61 with 1, and 81 by page faults.
    """
    return min(_MOST_MAP_WORKERS, max(2, num_cores))


def mapped_block_bytes(total_bytes: int, budget_bytes: int, *, resident: bool, num_workers: int) -> int:
    """Return the size of the blocks in which mapped files are populated.

    Populating needs no memory of stio and no staging memory, so blocks may be long. But they must not be so long that
    all workers wait for the last one. Pages in the page cache take little time, but beside a busy Python thread each
    block costs 5 ms: 1.7 GB in 115 ms with 16 blocks, in 62 with 9.

    Args:
        total_bytes: Bytes to populate.
        budget_bytes: Budget of the load.
        resident: Whether all bytes are in the page cache.
        num_workers: Threads that populate; see `num_map_workers`.
    """
    num_shares = 4 if resident else 8
    share = min(LARGEST_BLOCK_BYTES, max(BLOCK_BYTES, total_bytes // (num_workers * num_shares)))
    return whole_pages(min(share, budget_bytes // (num_shares // 2)))


def whole_pages(nbytes: int) -> int:
    """Return the size rounded down to whole pages, one page at least."""
    return max(PAGE_BYTES, nbytes // PAGE_BYTES * PAGE_BYTES)
