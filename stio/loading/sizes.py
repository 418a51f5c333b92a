"""The number of workers that read for a device, and the size of their blocks. Only arithmetic.

A worker returns to Python after each block, and each return may wait a switch interval: so blocks are as large as the
budget allows. One core copies 8 to 10 GB/s from the page cache, and a bus accepts 55 (that of an H200): with more cores
more workers read into staging memory, but not if that makes slots small. A worker fills one slot at a time, and a fast
bus has few uncopied slots, so a few slots are enough beyond one for each worker.
"""

from __future__ import annotations

from stio.runtime.limits import PAGE_BYTES

_MIB = 1 << 20

BLOCK_BYTES = 32 * _MIB
"""4 workers of 32 MiB are as fast as 16 of 8 MiB, cold and warm, with a quarter of the returns to Python."""
LARGEST_BLOCK_BYTES = 256 * _MIB
"""Largest block of a mapped file."""
NUM_WORKERS = 4
"""Threads that read files into memory, and cold files into the page cache."""

_MOST_MAP_WORKERS = 8
_MOST_STAGING_WORKERS = 12
_NUM_COPIED_SLOTS = 4
"""Slots beyond one for each worker: these are copied while all workers read."""
_LARGEST_SLOT_BYTES = 32 * _MIB
_LARGE_SLOT_BYTES = 8 * _MIB
_SMALLEST_SLOT_BYTES = 4096


def staging_sizes(budget_bytes: int, num_queues: int, *, num_cores: int) -> tuple[int, int, int]:
    """Return number of workers, number of slots and bytes of a slot for each copy queue of a load.

    All slots together use half of the budget, or more if slots have their least size. Four workers read; from 6 cores
    on, three for every four cores, up to 12, if slots stay large. The size of a slot is a power of two: torch rounds
    pinned memory up to one.

    Args:
        budget_bytes: Budget of the load.
        num_queues: Number of copy queues: one for each accelerator, or two. With 0 the result is not used.
        num_cores: Cores that this process may use.
    """
    share_bytes = budget_bytes // (2 * max(1, num_queues))
    most = min(_MOST_STAGING_WORKERS, num_cores * 3 // 4, share_bytes // _LARGE_SLOT_BYTES - _NUM_COPIED_SLOTS)
    num_workers = max(NUM_WORKERS, most)
    num_slots = num_workers + _NUM_COPIED_SLOTS
    slot_bytes = min(_LARGEST_SLOT_BYTES, max(_SMALLEST_SLOT_BYTES, share_bytes // num_slots))
    return num_workers, num_slots, 1 << (slot_bytes.bit_length() - 1)


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
