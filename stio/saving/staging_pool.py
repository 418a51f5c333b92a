"""Staging memory of saves: blocks of one size, reused by later saves and shared by those under way.

Memory that is touched for the first time costs more than the copy into it (4-5 GB/s against 22), so a block stays in
the pool after its use. The pool is also the budget: it makes no more blocks than the budget allows, and a save that
finds no block waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stio.runtime import memory, stats
from stio.runtime.limits import check_budget_bytes
from stio.runtime.memory import Region

SNAPSHOT_BLOCK_BYTES = 64 << 20
"""One copy, where a caller waits for the snapshot: few returns to Python. Four such writes saturate any disk."""

STREAM_BLOCK_BYTES = 16 << 20
"""One copy and one write, where the caller waits for the disk: the first write begins after 16 MiB were copied, and for
the last 16 MiB only the disk is busy. A 1.7 GB save reached 0.88 of a raw writer's rate with it, 0.80 with 32 MiB, 0.85
with 64."""

SMALLEST_BLOCK_BYTES = 1 << 20


def block_bytes_for(data_bytes: int, budget_bytes: int | None, *, stage_first: bool) -> int:
    """Return the block size for a snapshot, a power of two.

    A small snapshot gets smaller blocks, so that several workers can copy. So does a small budget: some blocks are
    written while others are filled.
    """
    largest = SNAPSHOT_BLOCK_BYTES if stage_first else STREAM_BLOCK_BYTES
    wanted = min(largest, max(data_bytes // 16, 4 * SMALLEST_BLOCK_BYTES))
    if budget_bytes is not None:
        wanted = min(wanted, max(budget_bytes // 4, SMALLEST_BLOCK_BYTES))
    return 1 << (wanted.bit_length() - 1)


class StagingPool:
    """Blocks of staging memory, for one save or for all saves of a saver.

    Args:
        budget_bytes: Most bytes of blocks, in use or free; None: no limit. One block is always available, even if it
            is larger than the budget.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        self.budget_bytes = None if budget_bytes is None else check_budget_bytes(budget_bytes)
        """See above."""
        self.changed = threading.Condition()
        """Guards the pool and the schedulers of its saves: a worker that waits for a block waits for other jobs too."""
        self.block_bytes = 0
        """Size of a block; 0 before `fit`."""
        self.peak_bytes = 0
        """Most bytes that it held at once."""
        self._make: Callable[[int], Region] = memory.allocate
        self._free: list[Region] = []
        self._makers: dict[int, Callable[[int], Region]] = {}  # of the blocks in use, by address
        self.held_bytes = 0
        """Bytes that it holds now, in use or free."""
        stats.add_holder(self)

    def fit(self, block_bytes: int, make: Callable[[int], Region]) -> None:
        """Provide blocks of this size from now on, made by `make`; others are released, once nothing uses them."""
        with self.changed:
            if block_bytes != self.block_bytes or make != self._make:
                self.block_bytes, self._make = block_bytes, make
                self.clear()

    def try_take(self) -> Region | None:
        """Return a block, None if the budget has none left. The caller holds `changed`."""
        if self._free:
            block = self._free.pop()
        else:
            size = self.block_bytes
            if self.held_bytes and self.budget_bytes is not None and self.held_bytes + size > self.budget_bytes:
                return None
            # This maps addresses and touches no page, except for pinned memory, which is made once.
            block = self._make(size).sub(0, size)
            self.held_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._makers[block.address] = self._make
        return block

    def give_back(self, block: Region) -> None:
        """Put back a block that nothing uses any more."""
        with self.changed:
            if self._makers.pop(block.address) == self._make and block.nbytes == self.block_bytes:
                self._free.append(block)
            else:
                self.held_bytes -= block.nbytes
            self.changed.notify_all()

    def clear(self) -> None:
        """Release the blocks that are not in use."""
        with self.changed:
            self.held_bytes -= sum(block.nbytes for block in self._free)
            self._free.clear()
