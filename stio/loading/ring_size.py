"""How a load stages: how many workers read for a device, into how many slots of which size. Arithmetic alone.

One core copies 8 to 10 GB/s out of the page cache, and a bus takes 55 (an H200's): where there are cores, more of them
read. Each return to Python may wait a switch interval: more readers wait beside each other, and a budget is not cut
into slots that are small for their sake. A reader has one slot in its hands, and what the bus has not copied yet is
little where it is fast, so a few slots beyond that serve them all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["Ring", "ring_of", "usable_cores"]

_MIB = 1 << 20
_FEWEST_WORKERS, _MOST_WORKERS = 4, 12
_NUM_COPIED = 4
"""Slots beyond the readers': what is being copied while all of them read."""
_LARGEST_SLOT_BYTES = 32 * _MIB
_LARGE_SLOT_BYTES = 8 * _MIB
_SMALLEST_SLOT_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Ring:
    """What a load stages by, on each of its accelerators."""

    num_workers: int
    """Threads that read."""
    slot_bytes: int
    """A power of two: torch rounds pinned memory up to one."""

    @property
    def num_slots(self) -> int:
        """One for each worker, and those that are being copied."""
        return self.num_workers + _NUM_COPIED


def ring_of(budget_bytes: int, num_rings: int, *, num_cores: int) -> Ring:
    """Return the size of each ring; together they take half of the budget, or the least that there is.

    Four workers read; from 6 cores on three for every four cores, up to 12, if slots stay large.

    Args:
        budget_bytes: The load's.
        num_rings: One for each accelerator, or two; for none it does not matter what this returns.
        num_cores: Those that this process may use.
    """
    share_bytes = budget_bytes // (2 * max(1, num_rings))
    most = min(_MOST_WORKERS, num_cores * 3 // 4, share_bytes // _LARGE_SLOT_BYTES - _NUM_COPIED)
    num_workers = max(_FEWEST_WORKERS, most)
    slot_bytes = min(_LARGEST_SLOT_BYTES, max(_SMALLEST_SLOT_BYTES, share_bytes // (num_workers + _NUM_COPIED)))
    return Ring(num_workers, 1 << (slot_bytes.bit_length() - 1))


def usable_cores() -> int:
    """Return how many cores this process may use, as far as the system says."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
