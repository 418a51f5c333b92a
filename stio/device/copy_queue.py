"""The copy queue of one device, and the slots of staging memory that its copies read.

A worker takes a slot, fills it and puts its copies in the queue. One worker at a time submits. It submits all copies
that are in the queue, also those of other workers, with one call of the device and one event. A slot is free again when
the event behind its copies has passed; the host waits for copies only when it needs a slot, and at the end.

A submission contains blocks of any file of the load, so `submit` reports blocks and not read paths.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

import torch

from stio.device.base import Accelerator, Event
from stio.device.group_memory import GroupMemory
from stio.runtime import stats
from stio.runtime.locks import Condition, new_lock
from stio.runtime.memory import Region, reporting_shortage
from stio.runtime.trace import Trace

B = TypeVar("B")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Filled(Generic[B]):
    """A block with copies that are not submitted yet."""

    block: B
    memory: GroupMemory
    copies: list[tuple[torch.Tensor, Region]]
    slot: Region | None


@dataclass(frozen=True, slots=True)
class _Batch:
    """Copies that were submitted together."""

    event: Event
    slots: list[Region]
    start: float
    num_bytes: int


class CopyQueue(Generic[B]):
    """Submits the copies of one load to one device, and manages the slots that they read. Thread-safe.

    `B` is the caller's type of a block.

    Args:
        accelerator: Allocates slots and does the copies.
        slot_bytes: Size of a slot; no block is larger.
        num_slots: Most slots; each is allocated when it is first needed.
        allocate: Allocates a slot; by default the accelerator's staging memory.
        trace: Records spans of copies. A span ends when the host has seen the event, so it is an upper bound.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        slot_bytes: int,
        num_slots: int,
        allocate: Callable[[int], Region] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.accelerator = accelerator
        """The device."""
        self.slot_bytes = slot_bytes
        """Size of a slot."""
        self.held_bytes = 0
        """Size of all slots that are allocated, or being allocated."""
        self._allocate_slot = allocate or accelerator.staging
        self._trace = trace
        # One lock for slots and submissions: a worker without a slot waits until a slot is released, or until there is
        # a submission whose event it can wait for.
        self._changed = Condition()
        self._num_unallocated = num_slots
        self._is_allocating_ahead = False
        self._is_closing = False
        self._is_retired = False
        self._has_failed = False  # a copy was refused or has failed: slots may stay in use until the end
        self._failure: BaseException | None = None
        self._free: list[Region] = []
        self._lost: list[Region] = []
        self._filled: list[_Filled[B]] = []
        self._is_submitting = False
        self._running = new_lock()  # for `run`
        self._submitted: deque[_Batch] = deque()
        self._num_waited_for = 0  # batches that some thread waits for right now; they are not in `_submitted`
        stats.add_holder(self)

    def acquire(self, stopped: Callable[[], bool]) -> Region | None:
        """Return a free slot. If there is none, wait for the oldest batch of copies; None once `stopped()`.

        The caller fills the slot and passes it to `put`, or gives it back with `release`.

        Raises:
            DeviceError: The oldest batch failed. Its slots are not used again.
            HostMemoryError: There is no memory for a slot.
            MemoryError: The slots are retired.
        """
        while not stopped():
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._is_retired:
                    raise MemoryError("the slots of this copy queue are retired")
                if self._free:
                    return self._free.pop()
                allocates = self._num_unallocated > 0 and not self._is_allocating_ahead
                if allocates:
                    self._count_allocated(1)
                elif self._submitted and (not self._is_allocating_ahead or self._submitted[0].event.query()):
                    batch = self._take_oldest()
                else:
                    # All slots are in use by other workers, or one is being allocated; `stopped` does not notify.
                    self._changed.wait(0.05)
                    continue
            if allocates:
                return self._allocate()
            slots = self._wait_for(batch)
            if slots:
                self.release(*slots[1:])
                return slots[0]
        return None

    def allocate_ahead(self, start: Callable[[Callable[[], None]], None], num_slots: int) -> None:
        """Allocate slots on another thread, one after the other, before workers need them; return at once.

        Pinning takes as long as reading (0.1 s per GB), and the driver does one at a time. Workers use the slots that
        are allocated, and allocate those beyond `num_slots` themselves. A failure is raised by `acquire`.

        Args:
            start: Runs a function on a thread.
            num_slots: How many will be needed. It may be more than the queue has.
        """
        with self._changed:
            count = min(num_slots, self._num_unallocated)
            self._is_allocating_ahead = count > 0
        if not count:
            return
        try:
            start(lambda: self._allocate_many(count))
        except RuntimeError:  # the limit of threads: workers allocate their own
            self._end_allocating_ahead(None)

    def put(
        self, block: B, memory: GroupMemory, copies: list[tuple[torch.Tensor, Region]], *, slot: Region | None = None
    ) -> None:
        """Have the copies of a block submitted by the next `submit`.

        Args:
            block: What `submit` reports.
            memory: The memory that the copies write to; the event behind them is noted there.
            copies: Regions of host memory, each with the bytes of `memory` that it is copied to.
            slot: The slot that all copies read; it is free again when they are done. None: they read other memory,
                which must stay unchanged until this queue is closed.
        """
        with self._changed:
            self._filled.append(_Filled(block, memory, copies, slot))

    def submit(self, on_submitted: Callable[[B], None]) -> None:
        """Submit all copies that were put; report their blocks, whichever threads put them.

        Returns at once while another thread is submitting. That thread continues until nothing is left, so each thread
        calls this after its `put`. Beside a busy Python thread each call of the device may wait a switch interval;
        workers that waited to submit their own copies would read nothing during that time.

        Args:
            on_submitted: Called with each block, on this thread, when the event behind its copies is noted in its
                memory. Copies are done in the order of their submission.

        Raises:
            DeviceError: The device refused a batch. None of its regions is being read.
        """
        submitted: list[B] = []
        while blocks := self._submit_batch():
            submitted += blocks
        # Only now: `on_submitted` may wait until all slots are free (`retire`). Copies that are not submitted yet keep
        # slots in use, and no other thread submits them.
        for block in submitted:
            on_submitted(block)

    def run(self, work: Callable[[], T], memory: GroupMemory) -> T:
        """Run work of torch behind the copies of a group; an event behind it is noted in the group's memory.

        One call runs at a time, so that no more than one group holds a buffer and the clones of its tensors together.

        Args:
            work: Queues its work on the device; it may raise what `Accelerator.on_queue` reports.
            memory: The memory that the work reads or writes.

        Raises:
            DeviceError: The device refused.
            DeviceMemoryError: The device is full.
        """
        try:
            with self._running, self.accelerator.on_queue():
                return work()
        finally:  # also after an error: a part of the work may be queued, and `drain` waits for it
            event = self.accelerator.copy([])
            memory.events.append(event)
            with self._changed:
                self._submitted.append(_Batch(event, [], perf_counter(), 0))
                self._changed.notify()

    def release(self, *slots: Region) -> None:
        """Give back slots that no copy reads."""
        with self._changed:
            self._free += slots
            self._changed.notify(len(slots))
            if self._is_retired:
                self._drop_free()

    def retire(self, stopped: Callable[[], bool]) -> bool:
        """Free all slots for good; wait until the last one is free, until `stopped()`, or until a copy has failed.

        `acquire` raises from now on. Slots that are in use are put or released as before. Any number of threads may
        call this.

        Returns:
            Whether all slots are free.

        Raises:
            DeviceError: A copy failed; of several threads, one gets the error.
        """
        with self._changed:
            self._is_retired = True
            self._drop_free()
            self._changed.notify_all()
        while not stopped():
            with self._changed:
                if not self.held_bytes or self._has_failed:
                    break
                if not self._submitted:
                    self._changed.wait(0.005)  # for a submission of another thread, or `stopped`, which does not notify
                batch = self._take_oldest() if self._submitted else None
            if batch is not None:
                self.release(*self._wait_for(batch))
        return not self.held_bytes

    def drain(self) -> None:
        """Wait until all copies that were submitted have ended, even if some fail.

        Raises:
            DeviceError: A copy failed; this is the first one.
        """
        failure: BaseException | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._submitted or not self._num_waited_for)
                if not self._submitted:
                    break
                batch = self._take_oldest()
            try:
                self.release(*self._wait_for(batch))
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Drain, then free the slots at once: a thread that is ending may still hold this object. Idempotent.

        Copies that were put and never submitted are dropped.

        Raises:
            DeviceError: See `drain`.
        """
        with self._changed:
            self._is_closing = True
            self._changed.wait_for(lambda: not self._is_allocating_ahead)
            self._failure = None
            dropped, self._filled = self._filled, []
            self._free += [one.slot for one in dropped if one.slot is not None]
        try:
            self.drain()
        finally:
            with self._changed:
                self._drop_free()
                self.held_bytes -= self.slot_bytes * len(self._lost)
                self._lost.clear()  # the allocator that pinned them waits for the copies in its record

    def _submit_batch(self) -> list[B]:
        """Submit all copies that were put, with one event behind them; return their blocks.

        Returns nothing while another thread is submitting. The frame holds group memory: it must end before a block is
        reported, because a consumer may then drop the group's tensors.
        """
        with self._changed:
            filled = self._filled
            if self._is_submitting or not filled:
                return []
            self._is_submitting, self._filled = True, []
        slots = [one.slot for one in filled if one.slot is not None]
        batch = None
        try:
            copies = [copy for one in filled for copy in one.copies]
            event = self.accelerator.copy(copies)
            batch = _Batch(event, slots, perf_counter(), sum(region.nbytes for _, region in copies))
        finally:
            with self._changed:
                self._is_submitting = False
                if batch is not None:
                    self._submitted.append(batch)
                    self._changed.notify()
                else:
                    self._has_failed = True
            if batch is None:
                self.release(*slots)
        for one in filled:
            if event not in one.memory.events[-1:]:
                one.memory.events.append(event)
        return [one.block for one in filled]

    def _allocate_many(self, count: int) -> None:
        failure: BaseException | None = None
        try:
            for _ in range(count):
                with self._changed:
                    if self._is_closing or self._is_retired:
                        break
                    self._count_allocated(1)
                self.release(self._allocate())
                with self._changed:
                    self._changed.notify_all()  # workers without a slot check whether a copy has ended
        except BaseException as error:
            failure = error
        self._end_allocating_ahead(failure)

    def _end_allocating_ahead(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure = failure
            self._is_allocating_ahead = False
            self._changed.notify_all()

    def _allocate(self) -> Region:
        """Allocate a slot that the caller has counted."""
        try:
            with reporting_shortage():
                return self._allocate_slot(self.slot_bytes)
        except BaseException:
            with self._changed:
                self._count_allocated(-1)
                self._changed.notify()
            raise

    def _count_allocated(self, num_slots: int) -> None:
        self._num_unallocated -= num_slots
        self.held_bytes += num_slots * self.slot_bytes

    def _take_oldest(self) -> _Batch:
        """Take the oldest batch. The caller holds the lock; it must then call `_wait_for`, without the lock."""
        self._num_waited_for += 1
        return self._submitted.popleft()

    def _wait_for(self, batch: _Batch) -> list[Region]:
        """Wait until a batch is done; return its slots, which are the caller's to use or release."""
        try:
            if not batch.event.query():  # to synchronize releases the GIL, also if there is nothing to wait for
                batch.event.synchronize()
        except BaseException:
            with self._changed:
                self._has_failed = True
                # The device may still read them: they are held until the end and never filled again. Others may be
                # allocated instead.
                self._lost += batch.slots
                self._num_unallocated += len(batch.slots)
            raise
        finally:
            with self._changed:
                self._num_waited_for -= 1
                self._changed.notify_all()
        if self._trace is not None and batch.num_bytes:
            self._trace.add("copy", batch.start, perf_counter(), num_bytes=batch.num_bytes, lane="copy")
        return batch.slots

    def _drop_free(self) -> None:
        self._count_allocated(-len(self._free))
        self._free.clear()
