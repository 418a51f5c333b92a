"""Staging memory for saves: blocks of one size, kept between saves and shared by those under way.

Memory that is touched for the first time costs more than the copy into it (4-5 GB/s against 22), so a block that was
used is kept. The pool is also the budget: it makes no more blocks than fit, and a save that finds none waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from stio.runtime import memory
from stio.runtime import stats as counters
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region

__all__ = ["StagingPool", "block_bytes_for"]

SNAPSHOT_BLOCK_BYTES = 64 << 20
"""One copy, where a snapshot is waited for: few returns to Python. Four writes of it keep any disk busy."""

STREAM_BLOCK_BYTES = 16 << 20
"""One copy and one write, where the disk is waited for: the first write begins after 16 MiB, and the last ends alone
for as long. A 1.7 GB save reached 0.88 of a raw writer's rate with it, 0.80 with 32 MiB, 0.85 with 64."""

SMALLEST_BLOCK_BYTES = 1 << 20


def block_bytes_for(data_bytes: int, budget_bytes: int | None, *, stage_first: bool) -> int:
    """Return the block size for a snapshot, a power of two.

    Small snapshots are cut so that several workers have something to copy; a small budget so that there are blocks
    to write while others are filled.
    """
    largest = SNAPSHOT_BLOCK_BYTES if stage_first else STREAM_BLOCK_BYTES
    wanted = min(largest, max(data_bytes // 16, 4 * SMALLEST_BLOCK_BYTES))
    if budget_bytes is not None:
        wanted = min(wanted, max(budget_bytes // 4, SMALLEST_BLOCK_BYTES))
    return 1 << (wanted.bit_length() - 1)


class StagingPool:
    """Blocks of staging memory, for one save or for all of a saver.

    Args:
        budget_bytes: Most bytes of blocks, used and kept ones together; None: as many as are asked for. At least
            one block is given out, whatever it says.
    """

    def __init__(self, budget_bytes: int | None) -> None:
        if budget_bytes is not None and (isinstance(budget_bytes, bool) or not isinstance(budget_bytes, int)):
            raise TypeError(f"budget_bytes takes a number of bytes, not {budget_bytes!r}")
        if budget_bytes is not None and budget_bytes <= 0:
            raise ValueError(f"a budget must be positive, not {budget_bytes} bytes")
        self.budget_bytes = budget_bytes
        """See above."""
        self.changed = threading.Condition()
        """Guards the pool, and the saves that use it: whoever waits for a block waits for other things too."""
        self.block_bytes = 0
        """Size of a block; 0 before `fit`."""
        self.peak_bytes = 0
        """The most that it held at once."""
        self._make: Callable[[int], Region] = memory.allocate
        self._free: list[Region] = []
        self._makers: dict[int, Callable[[int], Region]] = {}  # of the blocks in use, by address
        self._held_bytes = 0
        counters.hold(self)

    @property
    def held_bytes(self) -> int:
        """What it holds now, in use or kept."""
        return self._held_bytes

    def fit(self, block_bytes: int, make: Callable[[int], Region]) -> None:
        """Give out blocks of this size from now on, made by `make`; others go, at once or once they are back."""
        if block_bytes % PAGE_BYTES:
            raise ValueError(f"blocks must be whole pages, not {block_bytes} bytes")
        with self.changed:
            if block_bytes != self.block_bytes or make != self._make:
                self.block_bytes, self._make = block_bytes, make
                self._drop()

    def try_take(self) -> Region | None:
        """Return a block, None where the budget has none left. Call it holding `changed`."""
        if self._free:
            block = self._free.pop()
        else:
            size = self.block_bytes
            if self._held_bytes and self.budget_bytes is not None and self._held_bytes + size > self.budget_bytes:
                return None
            # Maps addresses and touches none, but for pinned memory, which is made once.
            block = self._make(size).sub(0, size)
            self._held_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        self._makers[block.address] = self._make
        return block

    def give_back(self, block: Region) -> None:
        """Return a block that nothing uses any more."""
        with self.changed:
            if self._makers.pop(block.address) == self._make and block.nbytes == self.block_bytes:
                self._free.append(block)
            else:
                self._held_bytes -= block.nbytes
            self.changed.notify_all()

    def clear(self) -> None:
        """Let go of the blocks that are not in use."""
        with self.changed:
            self._drop()

    def _drop(self) -> None:
        self._held_bytes -= sum(block.nbytes for block in self._free)
        self._free.clear()
