"""A device for tests, on CPU memory: copies are made when their event passes, and not before.

A mistake that shows on a real device only sometimes shows on this one each time: a slot
that is filled again before its event has passed gives wrong bytes, and so does a tensor that is read too early.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fakes.gate import PATIENCE_SECONDS, wait_until
from stio.device.base import Event
from stio.device.torch_private import over_storages
from stio.errors import DeviceError, DeviceMemoryError
from stio.runtime import memory
from stio.runtime.memory import Region

POISON = 0xCB
"""Fills new device memory, and slots after their copies: a byte that was not copied in time is visible.

A slot is memory that the device itself allocated as staging memory. Other sources of copies (the memory of a
`HostCache`) are not changed.
"""


@dataclass(slots=True, eq=False)
class _Work:
    """One batch of copies, and the event after it."""

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
        self.pairs = []  # references to the memory are released before the event passes

    def query(self) -> bool:
        if self.passed.is_set():
            self.synchronize()  # which raises if the copy failed
            return True
        return False

    def synchronize(self) -> None:
        if not self.passed.wait(PATIENCE_SECONDS):
            raise TimeoutError(f"event {self.number} did not pass in time; does the test call step()?")
        if self.fails:
            raise DeviceError(f"copy {self.number} failed, as the test requested")


class FakeDevice:
    """An `Accelerator` whose tensors are on the CPU.

    Args:
        delay_seconds: Time between two events. A thread lets them pass, and ends when the queue is empty.
        manual: Events pass only by `step`. A load waits for each of its copies, so it needs a thread that steps.
        memory_bytes: Memory of the device; an allocation beyond it fails.
        refuse_copy: Number of the `copy` call, from 1, that raises an error.
        fail_copy: Number of the `copy` call whose copies are not made; its event raises the error.
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
        self.device = torch.device("cpu")
        """Device of the tensors, as torch names it."""
        self._delay_seconds = delay_seconds
        self._manual = manual
        self._memory_bytes = memory_bytes
        self._refuse_copy, self._fail_copy, self._refuse_staging = refuse_copy, fail_copy, refuse_staging
        self._changed = threading.Condition(
            threading.RLock()
        )  # re-entrant: a finalizer may run on the thread that holds it
        self._passing = threading.Lock()
        self._queue: deque[_Work] = deque()
        self._runs = False
        self._slots: set[int] = set()
        self._used_bytes = 0
        self._arrays: dict[int, tuple[weakref.ref[Any], int]] = {}
        # What a weak reference calls is no Python code, so no thread sees memory as in use that was freed before.
        self._freed: deque[weakref.ref[Any]] = deque()
        self.peak_bytes = 0
        """Most device memory in use at once."""
        self.staging_bytes = 0
        """Staging memory on the host in use now."""
        self.peak_staging_bytes = 0
        """Most staging memory in use at once."""
        self.num_staging = 0
        """Number of calls of `staging`."""
        self.num_copies = 0
        """Number of calls of `copy`; each accepted call has an event."""
        self.num_passed = 0
        """Number of events that have passed."""

    @property
    def used_bytes(self) -> int:
        """Device memory in use now."""
        with self._changed:
            while self._freed:
                self._used_bytes -= self._arrays.pop(id(self._freed.popleft()))[1]
            return self._used_bytes

    @property
    def num_pending(self) -> int:
        """Number of events that have not passed yet."""
        return len(self._queue)

    def staging(self, nbytes: int) -> Region:
        """Return new host memory."""
        with self._changed:
            self.num_staging += 1
            if self.num_staging == self._refuse_staging:
                raise MemoryError(f"no {nbytes:,} bytes of staging memory, as the test requested")
            self.staging_bytes += nbytes
            self.peak_staging_bytes = max(self.peak_staging_bytes, self.staging_bytes)
        region = memory.allocate(nbytes)
        region.write(0, bytes([POISON]) * nbytes)
        self._slots.add(id(region.owner))
        weakref.finalize(region.owner, self._freed_staging, nbytes, id(region.owner))
        return region.sub(0, nbytes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a new uint8 tensor `[nbytes]`, filled with `POISON`."""
        with self._changed:
            free = self._free_bytes()
            if free is not None and nbytes > free:
                raise _out_of_memory(nbytes, free)
            array = np.full(nbytes, POISON, dtype=np.uint8)
            reference = weakref.ref[Any](array, self._freed.append)
            self._arrays[id(reference)] = reference, nbytes
            self._used_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return torch.from_numpy(array)

    def allocate(self, wanted: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
        """Return new tensors, filled with `POISON`; the error of a device that is full has the size of all of them."""
        free = self._free_bytes()
        sizes = [math.prod(shape) * dtype.itemsize for dtype, shape in wanted]
        try:
            storages = [self.empty(size).untyped_storage() for size in sizes]
        except DeviceMemoryError:
            if free is None:  # a test's own error
                raise
            raise _out_of_memory(sum(sizes), free) from None
        return over_storages((storage, *one) for storage, one in zip(storages, wanted, strict=True))

    def _free_bytes(self) -> int | None:
        return None if self._memory_bytes is None else self._memory_bytes - self.used_bytes

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Event:
        """Queue copies, and an event after them."""
        with self._changed:
            self.num_copies += 1
            number = self.num_copies
            if number == self._refuse_copy:
                del pairs  # an error keeps this frame: stio clears only frames of its own
                raise DeviceError(f"copy {number} refused, as the test requested")
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
        """Let the oldest events pass, at most `count`; return their number."""
        passed = 0
        while passed < count and self._pass_one():
            passed += 1
        return passed

    def wait_for_pending(self, count: int) -> None:
        """Block until `count` events are queued.

        Raises:
            TimeoutError: It did not happen in time.
        """
        wait_until(self._changed, lambda: len(self._queue) >= count, f"fewer than {count} events are queued")

    def on_stream(self) -> AbstractContextManager[None]:
        """Return a context for torch's work; the copies before it have ended."""
        return nullcontext()

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
        with self._passing:  # one at a time, in the order of the queue
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

    def _freed_staging(self, nbytes: int, owner: int) -> None:
        with self._changed:
            self.staging_bytes -= nbytes
            self._slots.discard(owner)


def _out_of_memory(nbytes: int, free: int) -> DeviceMemoryError:
    return DeviceMemoryError(
        "the fake device is out of memory",
        needed_bytes=nbytes,
        free_bytes=free,
        expected=f"{nbytes:,} bytes",
        found=f"{free:,} free",
    )
