"""Staging: a ring of slots in front of a device.

A slot is filled by a reader, copied from by the device's queue, and comes back when the event behind that copy
has passed. The host never waits for a copy except to get a slot back. One reader at a time queues copies, and takes
along what the others have filled meanwhile: one call and one event for all of it, however many they are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, TypeVar

import torch

from stio.device.base import Accelerator, Event
from stio.errors import DeviceError, StioError
from stio.runtime import stats as counters
from stio.runtime.memory import Region
from stio.runtime.trace import Trace

__all__ = ["Stage"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Filled(Generic[T]):
    slot: Region | None
    pairs: list[tuple[torch.Tensor, Region]]
    what: T


@dataclass(frozen=True, slots=True)
class _Flight:
    event: Event
    slots: list[Region]
    start: float
    nbytes: int


class Stage(Generic[T]):
    """Slots of staging memory for one device. `T` is whatever a reader calls what it fills a slot with.

    Args:
        accelerator: Makes the memory and does the copies.
        slot_bytes: Size of a slot, the largest block.
        num_slots: How many; they are made when first needed.
        make: Makes one; the accelerator's staging memory by default.
        trace: Where spans of copies go: from queueing to when the host saw the end, an upper bound.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        slot_bytes: int,
        num_slots: int,
        make: Callable[[int], Region] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._new_slot = make or accelerator.staging
        self._trace = trace
        self.slot_bytes = slot_bytes
        """Size of a slot."""
        self._unmade = num_slots
        self._making = 0
        self._making_ahead = False
        self._closing = False
        self._retired = False
        self._failure: BaseException | None = None
        self._free: list[Region] = []
        self._filled: list[_Filled[T]] = []
        self._is_submitting = False
        self._flying: deque[_Flight] = deque()
        self._landing = 0  # flights that some thread waits for right now
        self._lost: list[Region] = []
        self._changed = threading.Condition()
        self.held_bytes = 0
        """Bytes of the slots that were made and not let go of."""
        counters.hold(self)

    def acquire(self, stopped: Callable[[], bool]) -> Region | None:
        """Return a free slot, waiting for the oldest copy if there is none; None once `stopped()`.

        Raises:
            DeviceError: That copy failed. Its slot is not given out again.
            MemoryError: There is no memory for a slot, or none shall be taken any more (`retire`).
        """
        while not stopped():
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._retired:
                    raise MemoryError("this ring gives out no slots any more")
                if self._free:
                    return self._free.pop()
                make = self._unmade > 0 and not self._making_ahead
                if make:
                    self._unmade -= 1
                    self._making += 1
                elif self._flying and (not self._making_ahead or self._flying[0].event.query()):
                    flight = self._take_off()
                else:
                    # All slots are in other readers' hands, or one is being made; `stopped` does not notify.
                    self._changed.wait(0.05)
                    continue
            if make:
                return self._make()
            slots = self._land(flight)
            if slots:
                self._give_back(slots[1:])
                return slots[0]
        return None

    def make_ahead(self, start: Callable[[Callable[[], None]], None], num_slots: int) -> None:
        """Have slots made beside the caller, one after the other, before readers ask for them; returns at once.

        Making one takes as long as reading into it (it is pinned, 0.1 s per GB), and the driver makes one at a time.
        Readers take what is there, and make themselves what is not made here. A failure is theirs to raise.

        Args:
            start: Runs a function on a thread.
            num_slots: How many will be needed; more than there may be are not made.
        """
        with self._changed:
            count = min(num_slots, self._unmade)
            self._making_ahead = count > 0
        if not count:
            return
        try:
            start(lambda: self._make_so_many(count))
        except RuntimeError:  # the limit of threads: readers make their own
            self._made_ahead(None)

    def put(self, slot: Region | None, pairs: list[tuple[torch.Tensor, Region]], what: T) -> None:
        """Have copies out of a slot queued by the next `submit`; it comes back by itself when they are done.

        Args:
            slot: None: they come out of other memory, which somebody keeps as it is until this is closed.
            pairs: The copies.
            what: What they bring; `submit` returns it.
        """
        with self._changed:
            self._filled.append(_Filled(slot, pairs, what))

    def submit(self) -> tuple[Event, list[T]] | None:
        """Queue all copies that were put, with one event behind them; return it and what they bring.

        None if there is nothing, or another thread is at it: who calls this calls it again until there is nothing, so
        what comes while it is at it is not left behind. Beside a busy Python thread each call of the device's may wait
        a switch interval, and readers that wait in line for theirs would read nothing.

        Raises:
            DeviceError: The device refused; nothing is being copied that was not before.
        """
        with self._changed:
            filled = self._filled
            if self._is_submitting or not filled:
                return None
            self._is_submitting, self._filled = True, []
        slots = [one.slot for one in filled if one.slot is not None]
        flight = None
        try:
            pairs = [pair for one in filled for pair in one.pairs]
            event = self._accelerator.copy(pairs)
            flight = _Flight(event, slots, perf_counter(), sum(region.nbytes for _, region in pairs))
        finally:
            with self._changed:
                self._is_submitting = False
                if flight is not None:
                    self._flying.append(flight)
                    self._changed.notify()
            if flight is None:
                self._give_back(slots)
        return event, [one.what for one in filled]

    def give_back(self, slot: Region) -> None:
        """Return a slot that no copy uses."""
        self._give_back([slot])

    def retire(self, stopped: Callable[[], bool]) -> None:
        """Give out no slots any more, and wait until all that there are came back and went, or until `stopped()`.

        Who has one in his hands fills it and puts it, or gives it back, as ever. Callable by several threads.

        Raises:
            DeviceError: A copy failed.
        """
        with self._changed:
            self._retired = True
            self._drop_free()
            self._changed.notify_all()
        while not stopped():
            with self._changed:
                if not (self._making or self.held_bytes):
                    return
                if not self._flying:
                    self._changed.wait(0.005)  # the others' submit, or `stopped`, which does not notify
            self._land_oldest()

    def drain(self) -> None:
        """Wait until no copy reads a slot any more, whatever happens to some of them.

        Raises:
            DeviceError: A copy failed (the first one that did); all others have ended too.
        """
        failure: BaseException | None = None
        while True:
            with self._changed:
                if not self._flying:
                    self._changed.wait_for(lambda: not self._landing or self._flying)
                    if not self._flying:
                        break
                flight = self._take_off()
            try:
                self._give_back(self._land(flight))
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Drain, and let go of the slots at once: a thread that is about to end may hold this object a while longer.

        Raises:
            DeviceError: See `drain`.
        """
        with self._changed:
            self._closing = True
            self._changed.wait_for(lambda: not self._making_ahead)
            self._failure = None
            unsent, self._filled = self._filled, []  # of a load that ended before its time
            self._free += [one.slot for one in unsent if one.slot is not None]
        try:
            self.drain()
        finally:
            with self._changed:
                self._drop_free()
                self.held_bytes -= self.slot_bytes * len(self._lost)
                self._lost.clear()  # the allocator that pinned it waits for what it knows to be under way

    def _make_so_many(self, count: int) -> None:
        failure: BaseException | None = None
        try:
            for _ in range(count):
                with self._changed:
                    if self._closing:
                        break
                    self._unmade -= 1
                    self._making += 1
                self.give_back(self._make())
                with self._changed:
                    self._changed.notify_all()  # those who find no slot look whether a copy is over
        except BaseException as error:
            failure = error
        self._made_ahead(failure)

    def _made_ahead(self, failure: BaseException | None) -> None:
        with self._changed:
            self._failure = failure
            self._making_ahead = False
            self._changed.notify_all()

    def _make(self) -> Region:
        try:
            slot = self._new_slot(self.slot_bytes)
        except BaseException:
            with self._changed:
                self._unmade += 1
                self._making -= 1
                self._changed.notify()
            raise
        with self._changed:
            self._making -= 1
            self.held_bytes += self.slot_bytes
        return slot

    def _take_off(self) -> _Flight:
        """Take the oldest flight, under the lock; who took it must `_land` it."""
        self._landing += 1
        return self._flying.popleft()

    def _land_oldest(self) -> None:
        with self._changed:
            if not self._flying:
                return
            flight = self._take_off()
        self._give_back(self._land(flight))

    def _land(self, flight: _Flight) -> list[Region]:
        try:
            flight.event.synchronize()
        except BaseException as error:
            with self._changed:
                # Whether the device still reads them nobody knows: they are kept, but never filled again, and others
                # may be made in their stead.
                self._lost += flight.slots
                self._unmade += len(flight.slots)
            if isinstance(error, StioError) or not isinstance(error, Exception):
                raise
            raise DeviceError(f"copying to {self._accelerator.device} failed: {error}") from error
        finally:
            with self._changed:
                self._landing -= 1
                self._changed.notify_all()
        if self._trace is not None:
            self._trace.add("copy", flight.start, perf_counter(), num_bytes=flight.nbytes, lane="copy")
        return flight.slots

    def _give_back(self, slots: list[Region]) -> None:
        with self._changed:
            self._free += slots
            self._changed.notify(len(slots))
            if self._retired:
                self._drop_free()

    def _drop_free(self) -> None:
        self._unmade += len(self._free)
        self.held_bytes -= self.slot_bytes * len(self._free)
        self._free.clear()
