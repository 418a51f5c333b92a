"""A stand-in for `torch.cuda` over CPU memory, with the habits of the real one that tests on a CPU never meet.

Streams do what was queued at the last moment that is allowed, threads have a current device, contexts are counted, and
memory goes back to its stream as torch's allocator has it: at once, unless another stream was recorded. It stands for
device number 1; a thread begins with number 0, where nobody should leave anything.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

POISON = 0xA7
"""Fills memory that nobody owns."""

DEVICE = torch.device("cpu")
"""What torch's tensors say; the stand-in takes it for number 1."""

HERE, THERE = 0, 1


class Stream:
    """A queue of work, done when somebody waits for it."""

    def __init__(self, driver: StandIn, index: int) -> None:
        self._driver = driver
        self._work: list[Callable[[], object]] = []
        self.index = index
        self.done = 0
        """How much of it is done."""

    def put(self, work: Callable[[], object]) -> int:
        """Queue something; return how much there is now."""
        with self._driver.lock:
            self._work.append(work)
            return len(self._work)

    def run(self, until: int | None = None) -> None:
        """Do what was queued, or the first part of it."""
        with self._driver.lock:
            while self.done < (len(self._work) if until is None else until):
                work, self._work[self.done] = self._work[self.done], _nothing
                self.done += 1
                work()

    def wait_event(self, event: Event) -> None:
        """Do nothing further before the event."""
        self.put(event.happen)

    def wait_stream(self, stream: Stream) -> None:
        """Do nothing further before what is queued there now."""
        self.put(partial(stream.run, len(stream._work)))

    def synchronize(self) -> None:
        """Do everything."""
        self.run()


class Event:
    """A place in a stream."""

    def __init__(self, driver: StandIn) -> None:
        self._driver = driver
        self._stream: Stream | None = None
        self._number = 0

    def record(self, stream: Stream) -> None:
        """Take the place behind what is queued."""
        self._stream, self._number = stream, stream.put(_nothing)

    def happen(self) -> None:
        """Have everything before it done."""
        if self._stream is not None:
            self._stream.run(self._number)

    def query(self) -> bool:
        """Return whether it is."""
        self._driver.touch()
        return self._stream is None or self._stream.done >= self._number

    def synchronize(self) -> None:
        """Wait for it."""
        self._driver.touch()
        self.happen()


@dataclass(eq=False)
class Block:
    """Memory of the device: never given back to the system, so that whoever reads it too late finds poison."""

    memory: np.ndarray[Any, Any]
    stream: Stream
    recorded: set[Stream] = field(default_factory=set)


class StandIn:
    """What `torch.get_device_module` returns.

    Args:
        memory_bytes: What the device has.
    """

    def __init__(self, memory_bytes: int = 1 << 40) -> None:
        self.lock = threading.RLock()  # a finalizer may run while its thread is inside
        self.contexts: set[int] = set()
        """Numbers of the devices that the process has a context on."""
        self.memory_bytes = memory_bytes
        self.used_bytes = 0
        """What tensors hold."""
        self.num_streams = 0
        """How many were made."""
        self.current = threading.local()
        self._defaults = {index: Stream(self, index) for index in (HERE, THERE)}
        self._blocks: dict[int, Block] = {}

    # What torch's modules have.

    def Event(self) -> Event:  # noqa: N802  # torch's name
        """Make an event."""
        return Event(self)

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802  # torch's name
        """Make a stream."""
        self.num_streams += 1
        with self.device(device):
            return Stream(self, THERE)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        """Make the device current; the way back makes no context (`_maybe_exchange_device`)."""
        before, self.current.index = self.index, THERE
        self.touch()
        try:
            yield
        finally:
            self.current.index = before

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Make a stream current, and its device; the way back sets the device that was, and that makes a context."""
        index, before = self.index, self.stream_of(stream.index)
        self.current.index = stream.index
        self.touch()
        setattr(self.current, f"stream{stream.index}", stream)
        try:
            yield
        finally:
            setattr(self.current, f"stream{stream.index}", before)
            if index != stream.index:
                self.current.index = index
                self.touch()

    def current_stream(self, device: torch.device) -> Stream:
        """Return the calling thread's."""
        return self.stream_of(THERE)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Return what is free, and all."""
        return self.memory_bytes - self.used_bytes, self.memory_bytes

    # What is behind them.

    @property
    def index(self) -> int:
        """Number of the calling thread's device."""
        return getattr(self.current, "index", HERE)

    def stream_of(self, index: int) -> Stream:
        """Return the calling thread's stream of a device."""
        return getattr(self.current, f"stream{index}", self._defaults[index])

    def touch(self) -> None:
        """Do what every call of the driver does: make a context where there is none."""
        self.contexts.add(self.index)

    def copy(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], non_blocking: bool) -> None:
        """Stand for `torch._foreach_copy_`; a pair that does not fit is refused when those before it are queued."""
        assert non_blocking
        self.touch()
        for target, source in zip(targets, sources, strict=True):
            if target.nbytes != source.nbytes:
                raise RuntimeError(f"{target.nbytes} bytes for {source.nbytes}")
            self.stream_of(self.index).put(partial(_move, target.data_ptr(), source))

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Stand for `torch.empty` on the device."""
        with self.lock:
            if nbytes > self.memory_bytes - self.used_bytes:
                raise torch.OutOfMemoryError("full")
            self.used_bytes += nbytes
            memory = np.full(nbytes, POISON, dtype=np.uint8)
            view = memory[:]  # dies with the tensor's storage, while the memory stays
            block = self._blocks[memory.ctypes.data] = Block(memory, self.stream_of(self.index))
            weakref.finalize(view, self._freed, block)
        return torch.from_numpy(view)

    def record(self, tensor: torch.Tensor, stream: Stream) -> None:
        """Stand for `Tensor.record_stream`, which knows its own allocations only."""
        block = self._blocks.get(tensor.untyped_storage().data_ptr())
        if block is not None and tensor.untyped_storage().nbytes() == block.memory.nbytes:
            block.recorded.add(stream)

    def _freed(self, block: Block) -> None:
        with self.lock:
            self.used_bytes -= block.memory.nbytes
            for stream in block.recorded:
                block.stream.wait_stream(stream)
            block.stream.put(partial(block.memory.fill, POISON))


def _nothing() -> None:
    pass


def _move(address: int, source: torch.Tensor) -> None:
    ctypes.memmove(address, source.data_ptr(), source.nbytes)


def install(patch: pytest.MonkeyPatch, driver: StandIn) -> None:
    """Let torch's calls that TorchAccelerator makes go to the stand-in, as long as a patch lasts."""
    empty = torch.empty

    def allocate(*size: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        on_device = more == {"dtype": torch.uint8, "device": DEVICE} and driver.index == THERE
        return driver.allocate(*size) if on_device else empty(*size, **more)

    patch.setattr(torch, "get_device_module", lambda device: driver)
    patch.setattr(torch, "empty", allocate)
    patch.setattr(torch, "_foreach_copy_", driver.copy)
    patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: driver.record(tensor, stream))
