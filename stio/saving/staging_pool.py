"""Staging memory of saves: blocks of one size, reused by later saves and shared by those under way.

Memory that is touched for the first time costs more than the copy into it (4-5 GB/s against 22), so a block stays in
the pool after its use. The pool is also the budget: it makes no more blocks than the budget allows, and a save that
finds no block waits. Blocks are allocated and pinned outside of the lock, several at once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

from stio.limits import checked_size
from stio.process import Condition
from stio.runtime import memory
from stio.runtime.memory import Region, available_bytes, room_in_memory
from stio.runtime.reports import counters

SNAPSHOT_BLOCK_BYTES = 64 << 20
"""One copy, where a caller waits for the snapshot: few returns to Python. Four such writes saturate any disk."""

STREAM_BLOCK_BYTES = 16 << 20
"""One copy and one write, where the caller waits for the disk: the first write begins after 16 MiB were copied, and for
the last 16 MiB only the disk is busy."""

SMALLEST_BLOCK_BYTES = 1 << 20

SMALL_TENSOR_BYTES = 64 << 10
"""Tensors that are smaller on average are many. Beside a busy Python thread each block costs its workers several turns
for the GIL, of 5 ms each: a save of 10,000 tensors of 4 KiB needed 30 turns with blocks of 4 MiB."""


def block_bytes_for(data_bytes: int, budget_bytes: int | None, *, stage_first: bool, num_tensors: int = 0) -> int:
    """Return the block size for a snapshot, a power of two.

    A small snapshot gets smaller blocks, so that several workers can copy. Not one of many small tensors: their copies
    keep the GIL, so workers would only wait for each other. With a small budget the blocks are smaller too, so that
    some are written while others are filled.
    """
    largest = SNAPSHOT_BLOCK_BYTES if stage_first else STREAM_BLOCK_BYTES
    num_blocks = 2 if data_bytes < num_tensors * SMALL_TENSOR_BYTES else 16
    wanted = min(largest, max(data_bytes // num_blocks, 4 * SMALLEST_BLOCK_BYTES))
    if budget_bytes is not None:
        wanted = min(wanted, max(budget_bytes // 4, SMALLEST_BLOCK_BYTES))
    return 1 << (wanted.bit_length() - 1)


class Blocks(Protocol):
    """Where a save gets its blocks from: a `StagingPool`, or the image that a saver keeps of a snapshot."""

    changed: Condition
    """See `StagingPool.changed`."""
    allocate: Callable[[int], Region]
    """What allocates the memory of the blocks."""

    def try_take(self) -> Callable[[], Region] | None:
        """Take the next block; see `StagingPool.try_take`."""

    def give_back(self, block: Region) -> None:
        """Put back a block that nothing uses any more."""


class StagingPool:
    """Blocks of staging memory, for one save or for all saves of a saver.

    Args:
        budget_bytes: Most bytes of blocks, in use or free; None: no limit. One block is always available, even if it
            is larger than the budget.
    """

    def __init__(self, budget_bytes: int | str | None) -> None:
        self.budget_bytes = None if budget_bytes is None else checked_size(budget_bytes)
        """See above."""
        self._max_bytes = self.budget_bytes
        self.changed = Condition()
        """Guards the pool and the schedulers of its saves: a worker that waits for a block waits for other jobs too."""
        self.block_bytes = 0
        """Size of a block; 0 before `fit`."""
        self.peak_bytes = 0
        """Most bytes that it held at once."""
        self.allocate: Callable[[int], Region] = memory.allocate
        """Allocates a block; set by `fit`."""
        self._free: list[Region] = []
        self._makers: dict[int, Callable[[int], Region]] = {}  # of the blocks in use, by address
        self.held_bytes = 0
        """Bytes that it holds now, in use or free."""
        counters.add_holder(self)

    def budget_for(self, data_bytes: int, *, pinned: bool = False) -> int | None:
        """Return the budget for a save of so many bytes: less than the pool's own if the host has too little memory.

        The save is then written while it is staged, and half of the memory that is left stays free. Pinned memory can
        be neither swapped nor reclaimed: without a budget of the pool it never takes more than half of what is left.

        Args:
            data_bytes: Bytes of the save.
            pinned: Whether the blocks are pinned.
        """
        with self.changed:
            held, idle = self.held_bytes, sum(block.nbytes for block in self._free)
        needed = data_bytes - idle
        if self.budget_bytes is not None:
            needed = min(needed, self.budget_bytes - held)
        if needed <= memory.UNCHECKED_BYTES:
            return self.budget_bytes
        if pinned:
            free = room_in_memory()
            fits = needed <= (free // 2 if self.budget_bytes is None else free)
        else:
            free = available_bytes()
            fits = needed <= free
        return self.budget_bytes if fits else max(SMALLEST_BLOCK_BYTES, held + free // 2)

    def fit(self, block_bytes: int, make: Callable[[int], Region], *, limit_bytes: int | None = None) -> None:
        """Provide blocks of this size from now on, made by `make`; others are released, once nothing uses them.

        Args:
            block_bytes: Size of a block.
            make: Allocates a block.
            limit_bytes: Most bytes of blocks, in use or free, see `budget_for`; None: the pool's budget.
        """
        with self.changed:
            self._max_bytes = self.budget_bytes if limit_bytes is None else limit_bytes
            if block_bytes != self.block_bytes or make != self.allocate:
                self.block_bytes, self.allocate = block_bytes, make
                self.clear()

    def try_take(self) -> Callable[[], Region] | None:
        """Take a block, None if the budget has none left. The caller holds `changed`.

        Returns:
            A function that returns the block. It may allocate, and pin, so it is called without the lock.
        """
        if self._free:
            return partial(self._use, self._free.pop(), self.allocate)
        size = self.block_bytes
        if self.held_bytes and self._max_bytes is not None and self.held_bytes + size > self._max_bytes:
            return None
        self.held_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        return partial(self._allocate, size, self.allocate)

    def _allocate(self, size: int, make: Callable[[int], Region]) -> Region:
        try:
            # This maps addresses and touches no page, except for pinned memory, which is made once.
            block = make(size).sub(0, size)
        except BaseException:
            with self.changed:
                self.held_bytes -= size
                self.changed.notify_all()
            raise
        return self._use(block, make)

    def _use(self, block: Region, make: Callable[[int], Region]) -> Region:
        self._makers[block.address] = make
        return block

    def give_back(self, block: Region) -> None:
        """Put back a block that nothing uses any more."""
        with self.changed:
            if self._makers.pop(block.address) == self.allocate and block.nbytes == self.block_bytes:
                self._free.append(block)
            else:
                self.held_bytes -= block.nbytes
            self.changed.notify_all()

    def clear(self) -> None:
        """Release the blocks that are not in use."""
        with self.changed:
            self.held_bytes -= sum(block.nbytes for block in self._free)
            self._free.clear()
