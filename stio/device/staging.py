"""Staging: a ring of host slots in front of a device, and the device memory that a group lands in.

A slot is filled by a reader, copied from by the device's queue, and comes back when the event behind that copy
has passed. The host never waits for a copy except to get a slot back.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from stio import counters
from stio.codec.dtypes import tensor_nbytes
from stio.device.base import Accelerator, Event
from stio.device.tensors import TORCH_DTYPES, torch_shape, typed
from stio.errors import DeviceError, StioError
from stio.events import Trace
from stio.memory import Region

__all__ = ["OWN_ALLOCATION_BYTES", "VECTOR_BYTES", "DeviceImage", "Stage"]

OWN_ALLOCATION_BYTES = 2 << 20
"""Tensors of this size and above are allocations of their own; smaller ones share some."""

VECTOR_BYTES = 16
"""Kernels load vectors of this size, and some do not look whether a tensor begins at a multiple of it, as each
allocation of torch's does. Shorter tensors are aligned as their dtype asks."""


@dataclass(frozen=True, slots=True)
class _Flight:
    event: Event
    slot: Region | None
    start: float
    nbytes: int


class Stage:
    """Slots of staging memory for one device.

    Args:
        accelerator: Makes the memory and does the copies.
        slot_bytes: Size of a slot, the largest block.
        num_slots: How many; they are made when first needed.
        trace: Where spans of copies go: from queueing to when the host saw the end, an upper bound.
    """

    def __init__(
        self, accelerator: Accelerator, *, slot_bytes: int, num_slots: int, trace: Trace | None = None
    ) -> None:
        self._accelerator = accelerator
        self._trace = trace
        self.slot_bytes = slot_bytes
        """Size of a slot."""
        self._unmade = num_slots
        self._making_ahead = False
        self._closing = False
        self._failure: BaseException | None = None
        self._free: list[Region] = []
        self._flying: deque[_Flight] = deque()
        self._landing = 0  # flights that some thread waits for right now
        self._lost: list[Region] = []
        self._changed = threading.Condition()
        self._submitting = threading.Lock()
        self.held_bytes = 0
        """Bytes of the slots that were made and not let go of."""
        counters.hold(self)

    def acquire(self, stopped: Callable[[], bool]) -> Region | None:
        """Return a free slot, waiting for the oldest copy if there is none; None once `stopped()`.

        Raises:
            DeviceError: That copy failed. Its slot is not given out again.
            MemoryError: There is no host memory for a slot.
        """
        while not stopped():
            with self._changed:
                if self._failure is not None:
                    raise self._failure
                if self._free:
                    return self._free.pop()
                make = self._unmade > 0 and not self._making_ahead
                if make:
                    self._unmade -= 1
                elif self._flying and (not self._making_ahead or self._flying[0].event.query()):
                    flight = self._take_off()
                else:
                    # All slots are in other readers' hands, or one is being made; `stopped` does not notify.
                    self._changed.wait(0.05)
                    continue
            if make:
                return self._make()
            slot = self._land(flight)
            if slot is not None:
                return slot
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

    def submit(self, slot: Region | None, pairs: list[tuple[torch.Tensor, Region]]) -> Event:
        """Queue the copies out of a slot; it comes back by itself when they are done, at once if they are refused.

        None: they come out of other memory, which somebody keeps as it is until this is closed.
        """
        with self._submitting:  # one submitter a device: copies and their event stay together in its queue
            try:
                event = self._accelerator.copy(pairs)
            except BaseException:
                if slot is not None:
                    self.give_back(slot)
                raise
            with self._changed:
                self._flying.append(_Flight(event, slot, perf_counter(), sum(region.nbytes for _, region in pairs)))
                self._changed.notify()
        return event

    def give_back(self, slot: Region) -> None:
        """Return a slot that no copy uses."""
        with self._changed:
            self._free.append(slot)
            self._changed.notify()

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
                slot = self._land(flight)
                if slot is not None:
                    self.give_back(slot)
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
        try:
            self.drain()
        finally:
            with self._changed:
                self._unmade += len(self._free)
                self.held_bytes -= self.slot_bytes * (len(self._free) + len(self._lost))
                self._free.clear()
                self._lost.clear()  # the allocator that pinned it waits for what it knows to be under way

    def _make_so_many(self, count: int) -> None:
        failure: BaseException | None = None
        try:
            for _ in range(count):
                with self._changed:
                    if self._closing:
                        break
                    self._unmade -= 1
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
            slot = self._accelerator.staging(self.slot_bytes)
        except BaseException:
            with self._changed:
                self._unmade += 1
                self._changed.notify()
            raise
        with self._changed:
            self.held_bytes += self.slot_bytes
        return slot

    def _take_off(self) -> _Flight:
        """Take the oldest flight, under the lock; who took it must `_land` it."""
        self._landing += 1
        return self._flying.popleft()

    def _land(self, flight: _Flight) -> Region | None:
        try:
            flight.event.synchronize()
        except BaseException as error:
            if flight.slot is not None:
                with self._changed:
                    # Whether the device still reads it nobody knows: it is kept, but never filled again, and another
                    # one may be made in its stead.
                    self._lost.append(flight.slot)
                    self._unmade += 1
            if isinstance(error, StioError) or not isinstance(error, Exception):
                raise
            raise DeviceError(f"copying to {self._accelerator.device} failed: {error}") from error
        finally:
            with self._changed:
                self._landing -= 1
                self._changed.notify_all()
        if self._trace is not None:
            self._trace.add("copy", flight.start, perf_counter(), num_bytes=flight.nbytes, lane="copy")
        return flight.slot


@dataclass(frozen=True, slots=True)
class _Small:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(slots=True)
class _Piece:
    start: int
    stop: int
    target: torch.Tensor  # 1-D uint8 on the device; its first byte is the image's byte `start`


@dataclass(slots=True)
class DeviceImage:
    """The device memory of one group: an allocation for each large tensor, one for each aligned run of small ones."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The group's tensors, filled when the events have passed."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """Allocations that small tensors lie in."""
    events: list[Event] = field(default_factory=list)
    """Behind the copies that were queued for it."""
    _pieces: list[_Piece] = field(default_factory=list)

    @classmethod
    def allocate(
        cls,
        accelerator: Accelerator,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        offsets: Sequence[int],
    ) -> DeviceImage:
        """Allocate for a group's tensors; `offsets` are their places in the group's image, ascending.

        Raises:
            DeviceMemoryError: The device is full; what was allocated is free again.
        """
        image = cls()
        run: list[_Small] = []
        for name, dtype, shape, start in zip(names, dtypes, shapes, offsets, strict=True):
            nbytes = tensor_nbytes(dtype, shape)
            is_small = 0 < nbytes < OWN_ALLOCATION_BYTES
            if run and not (is_small and _is_aligned(start - run[0].start, dtype, nbytes)):
                image._carve(accelerator, run)
                run = []
            if is_small:
                run.append(_Small(name, dtype, shape, start, start + nbytes))
                continue
            flat = accelerator.empty(nbytes)
            image.tensors[name] = typed(flat, dtype, torch_shape(dtype, shape))
            if nbytes:
                image._pieces.append(_Piece(start, start + nbytes, flat))
        if run:
            image._carve(accelerator, run)
        return image

    def pairs(self, start: int, slot: Region) -> list[tuple[torch.Tensor, Region]]:
        """Return the copies that bring a slot, holding the image's bytes from `start` on, to where they belong."""
        stop = start + slot.nbytes
        found = []
        for piece in self._pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                found.append((piece.target[low - piece.start : high - piece.start], slot.sub(low - start, high - low)))
        return found

    def _carve(self, accelerator: Accelerator, run: Sequence[_Small]) -> None:
        start, stop = run[0].start, run[-1].stop
        flat = accelerator.empty(stop - start)
        self.shared.append(flat)
        self._pieces.append(_Piece(start, stop, flat))
        for small in run:
            part = flat[small.start - start : small.stop - start]
            self.tensors[small.name] = _carved(part, small.dtype, small.shape)


def _is_aligned(offset: int, dtype: str, nbytes: int) -> bool:
    """Return whether a tensor may lie there in an allocation."""
    return not offset % (VECTOR_BYTES if nbytes >= VECTOR_BYTES else TORCH_DTYPES[dtype].itemsize)


def _carved(part: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor on a part of a larger allocation, with a storage of exactly its bytes, by way of DLPack."""
    # Not `Tensor.__dlpack__`: between streams it would make one wait for the other.
    return typed(torch._C._from_dlpack(torch._C._to_dlpack(part)), dtype, torch_shape(dtype, shape))
