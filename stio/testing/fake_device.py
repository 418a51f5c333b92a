"""A device for tests, on CPU memory: copies happen when their event passes, and not a moment earlier.

Public through `stio.testing`. What a real device does wrong only now and then, this one does each time: a slot that
is filled again before its event has passed gives the wrong bytes, and so does a tensor that is looked at too early.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from stio.device.base import Event
from stio.errors import DeviceError, DeviceMemoryError
from stio.runtime import memory
from stio.runtime.memory import Region

__all__ = ["POISON", "FakeDevice"]

POISON = 0xCB
"""Fills fresh device memory, and slots once their copies are done: a byte that was not copied in time shows.

Slots are what the device gave out as staging memory. What else it copies from (a `HostCache`'s memory) stays as it is.
"""

_PATIENCE_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class _Work:
    """One batch of copies, and the mark behind it."""

    number: int
    pairs: list[tuple[torch.Tensor, Region]]
    fails: bool
    is_slot: Callable[[Region], bool]
    passed: threading.Event = field(default_factory=threading.Event)

    def carry_out(self) -> None:
        if not self.fails:
            for target, region in self.pairs:
                target.copy_(torch.frombuffer(bytearray(region.tobytes()), dtype=torch.uint8))
        for _, region in self.pairs:
            if self.is_slot(region):
                region.write(0, bytes([POISON]) * region.nbytes)
        self.pairs = []  # the memory is let go before the event passes

    def query(self) -> bool:
        return self.passed.is_set()

    def synchronize(self) -> None:
        if not self.passed.wait(_PATIENCE_SECONDS):
            raise TimeoutError(f"event {self.number} never passed; is somebody calling step()?")
        if self.fails:
            raise DeviceError(f"copy {self.number} failed, as it was asked to")


class FakeDevice:
    """An `Accelerator` whose tensors are on the CPU.

    Args:
        delay_seconds: A thread of its own lets each event pass so long after the one before; it ends when nothing
            is queued.
        manual: Events pass by `step` alone (and by whatever waits for the device itself: `hand_over`, `on_queue`).
        memory_bytes: What the device has; an allocation beyond it is refused.
        refuse_copy: Number of the `copy` call, from 1, that the device refuses.
        fail_copy: Number of the `copy` call whose copies are not done, as its event tells whoever waits for it.
        refuse_staging: Number of the `staging` call, from 1, that finds no host memory.
    """

    def __init__(
        self,
        *,
        delay_seconds: float = 0.001,
        manual: bool = False,
        memory_bytes: int | None = None,
        refuse_copy: int | None = None,
        fail_copy: int | None = None,
        refuse_staging: int | None = None,
    ) -> None:
        self._delay_seconds = delay_seconds
        self._manual = manual
        self._memory_bytes = memory_bytes
        self._refuse_copy, self._fail_copy, self._refuse_staging = refuse_copy, fail_copy, refuse_staging
        self._changed = threading.Condition(threading.RLock())  # a finalizer may run while its thread is inside
        self._passing = threading.Lock()
        self._queue: deque[_Work] = deque()
        self._runs = False
        self._slots: set[int] = set()
        self.used_bytes = 0
        """Device memory that tensors hold now."""
        self.peak_bytes = 0
        """The most that they held at once."""
        self.staging_bytes = 0
        """Host memory that was given out for staging and is still held."""
        self.peak_staging_bytes = 0
        """The most of it at once."""
        self.num_staging = 0
        """Calls of `staging`."""
        self.num_copies = 0
        """Calls of `copy`; the accepted ones each have an event."""
        self.num_passed = 0
        """Events that have passed."""
        self.num_hand_overs = 0
        """Calls of `hand_over`."""

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return torch.device("cpu")

    @property
    def num_pending(self) -> int:
        """Events that have not passed yet."""
        return len(self._queue)

    def staging(self, nbytes: int) -> Region:
        """Return host memory."""
        with self._changed:
            self.num_staging += 1
            if self.num_staging == self._refuse_staging:
                raise MemoryError(f"no {nbytes:,} bytes of staging memory, as it was asked")
            self.staging_bytes += nbytes
            self.peak_staging_bytes = max(self.peak_staging_bytes, self.staging_bytes)
        region = memory.allocate(nbytes)
        region.write(0, bytes([POISON]) * nbytes)
        self._slots.add(id(region.owner))
        weakref.finalize(region.owner, self._freed_staging, nbytes, id(region.owner))
        return region.sub(0, nbytes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a new 1-D uint8 tensor, poisoned."""
        with self._changed:
            free = None if self._memory_bytes is None else self._memory_bytes - self.used_bytes
            if free is not None and nbytes > free:
                raise DeviceMemoryError(
                    "the fake device is out of memory",
                    needed_bytes=nbytes,
                    free_bytes=free,
                    expected=f"{nbytes:,} bytes",
                    found=f"{free:,} free",
                )
            self.used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        array = np.full(nbytes, POISON, dtype=np.uint8)
        weakref.finalize(array, self._freed, nbytes)
        return torch.from_numpy(array)

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Event:
        """Queue copies and a mark behind them."""
        with self._changed:
            self.num_copies += 1
            number = self.num_copies
            if number == self._refuse_copy:
                raise DeviceError(f"copy {number} refused, as it was asked")
            for target, region in pairs:
                if target.dtype != torch.uint8 or target.dim() != 1 or target.nbytes != region.nbytes:
                    raise ValueError(f"copy of {region.nbytes} bytes into {target.dtype} {list(target.shape)}")
            fails = number == self._fail_copy
            work = _Work(number, pairs, fails, lambda region: id(region.owner) in self._slots)
            self._queue.append(work)
            self._changed.notify_all()
            if not (self._manual or self._runs):
                self._runs = True
                threading.Thread(target=self._run, name="fake-device", daemon=True).start()
        return work

    def step(self, count: int = 1) -> int:
        """Let the oldest events pass, at most so many; return how many did."""
        passed = 0
        while passed < count and self._pass_one():
            passed += 1
        return passed

    def wait_for_pending(self, count: int) -> None:
        """Block until so many events are queued.

        Raises:
            TimeoutError: They never were.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._queue) >= count, _PATIENCE_SECONDS):
                raise TimeoutError(f"{len(self._queue)} events are queued, not {count}")

    @contextmanager
    def on_queue(self) -> Iterator[None]:
        """Return a context in which torch's work comes after what was queued: done now, as the CPU waits for none."""
        while self._pass_one():
            pass
        yield

    def hand_over(self, tensors: Iterable[torch.Tensor], events: Iterable[Event]) -> None:
        """Let everything up to the marks happen, as the consumer's stream would find it."""
        with self._changed:
            self.num_hand_overs += 1
        for event in events:
            while not event.query() and self._pass_one():
                pass
            event.synchronize()

    def _run(self) -> None:
        pause = threading.Event()
        while True:
            pause.wait(self._delay_seconds)
            self._pass_one()
            with self._changed:
                if not self._queue:
                    self._runs = False
                    return

    def _pass_one(self) -> bool:
        with self._passing:  # one after the other, in the order of the queue
            with self._changed:
                if not self._queue:
                    return False
                work = self._queue[0]
            work.carry_out()
            with self._changed:
                self._queue.popleft()
                self.num_passed += 1
                work.passed.set()
                self._changed.notify_all()
        return True

    def _freed(self, nbytes: int) -> None:
        with self._changed:
            self.used_bytes -= nbytes

    def _freed_staging(self, nbytes: int, owner: int) -> None:
        with self._changed:
            self.staging_bytes -= nbytes
            self._slots.discard(owner)
