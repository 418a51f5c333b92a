"""What tests of devices share: which tests need a real one, and the devices that one body runs on."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import simdevice
import torch
from fakes import FakeDevice
from support import eventually, settled

from stio import native
from stio.device import cuda
from stio.device.base import Accelerator, resolve_device
from stio.device.cuda import TorchAccelerator, on_stream
from stio.runtime.memory import Region

HAVE_GPU = torch.accelerator.is_available()

NEEDS_GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(
        not HAVE_GPU,
        reason=simdevice.why_unavailable() or "torch sees no accelerator here; STIO_TEST_DEVICE=sim gives it one",
    ),
)
"""Marks of what only an accelerator can show."""

needs_two_devices = pytest.mark.skipif(not HAVE_GPU or torch.accelerator.device_count() < 2, reason="needs two devices")
"""Mark of what goes to a device that is not the first one. A build for a device that is not there raises when it is counted."""

BUSY_CYCLES = 400_000_000
"""About a fifth of a second of a GPU's clock: longer than a test takes to queue what must come behind."""

RIGS = [
    pytest.param("fake", id="fake"),
    pytest.param("real", id="real", marks=NEEDS_GPU),
]


def gpu(test: Any) -> Any:
    """Mark a test as one for a real device."""
    for mark in NEEDS_GPU:
        test = mark(test)
    return test


def module_of(device: torch.device) -> Any:
    """Return torch's module of an accelerator's kind."""
    return torch.get_device_module(device)


def keep_busy(cycles: int = BUSY_CYCLES) -> None:
    """Give the current stream of the accelerator something to do for a while."""
    module_of(resolve_device("auto"))._sleep(cycles)


def on_copy_stream(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which torch's work is queued on the stream of all copies of loads."""
    return on_stream(module_of(device), device, TorchAccelerator(device).copy_stream)


def busy_event(device: torch.device, cycles: int = BUSY_CYCLES) -> Any:
    """Keep the current stream of a device busy; return an event behind that."""
    module = module_of(device)
    keep_busy(cycles)
    event = module.Event()
    event.record(module.current_stream(device))
    return event


def settled_pinned_bytes() -> int:
    """Return how much the simulated device has pinned, when the engine has unpinned what nobody uses any more."""
    return settled(lambda: simdevice.pinned_bytes(with_cached=native.available()))


def trim_rings() -> None:
    """Return the memory of all rings that no load uses to the system."""
    for known in list(cuda._rings.values()):
        known.ring.trim()


def new_rings() -> None:
    """Let the next load to a device make a ring."""
    trim_rings()
    cuda._rings.clear()


class Rig:
    """A fake device, and what a test of the contract asks of it beside the contract.

    Args:
        patch: Undone at the test's end.
    """

    MEMORY_BYTES = 8 << 20

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.fake = FakeDevice(memory_bytes=self.MEMORY_BYTES)
        self._patch = patch

    @property
    def accelerator(self) -> Accelerator:
        """The device."""
        return self.fake

    @property
    def too_much(self) -> int:
        """More bytes than there are."""
        return self.MEMORY_BYTES + 1

    def used_bytes(self) -> int:
        """Return what tensors hold there."""
        gc.collect()
        return self.fake.used_bytes

    @contextmanager
    def standing(self) -> Iterator[None]:
        """Keep the copy queue from moving, as far as the block's end at least."""
        with self.fake._passing:
            yield

    def own_stream(self) -> Any:
        """Return a context in which the calling thread has a stream of its own."""
        return nullcontext()

    @contextmanager
    def caller(self) -> Iterator[Accelerator]:
        """Return a context in which the thread has a stream of its own; the device is that of a load called there."""
        yield self.accelerator

    def read(self, tensor: torch.Tensor) -> bytes:
        """Return the bytes that the current stream finds."""
        return bytes(tensor.tolist())

    def read_later(self, tensor: torch.Tensor) -> Callable[[], bytes]:
        """Have the current stream read, behind much else; it does not hold the tensor."""
        found = self.read(tensor)
        return lambda: found

    def twin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Have the current stream copy a tensor."""
        return tensor.clone()

    def refused(self, pair: tuple[torch.Tensor, Region]) -> list[tuple[torch.Tensor, Region]]:
        """Return a batch with this pair that the device will refuse, once it has queued as much of it as it ever does."""
        self._patch.setattr(self.fake, "_refuse_copy", self.fake.num_copies + 1)
        return [pair]


class RealRig(Rig):
    """What torch sees."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._accelerator = TorchAccelerator(resolve_device("auto"))
        self._module = module_of(self._accelerator.device)

    @property
    def accelerator(self) -> Accelerator:
        return self._accelerator

    @property
    def too_much(self) -> int:
        return 1 << 50

    def used_bytes(self) -> int:
        gc.collect()
        return int(self._module.memory_allocated(self._accelerator.device))

    @contextmanager
    def standing(self) -> Iterator[None]:
        with on_copy_stream(self._accelerator.device):
            keep_busy()
        yield

    def own_stream(self) -> Any:
        return self._module.stream(self._module.Stream(self._accelerator.device))

    @contextmanager
    def caller(self) -> Iterator[Accelerator]:
        stream = self._module.Stream(self._accelerator.device)
        with self._module.stream(stream):
            yield TorchAccelerator(self._accelerator.device, stream)

    def read_later(self, tensor: torch.Tensor) -> Callable[[], bytes]:
        keep_busy()
        seen, stream = tensor.clone(), self._module.current_stream(self._accelerator.device)

        def read() -> bytes:
            with self._module.stream(stream):
                return self.read(seen)

        return read

    def refused(self, pair: tuple[torch.Tensor, Region]) -> list[tuple[torch.Tensor, Region]]:
        target, region = pair
        return [pair, (target[: target.nbytes - 1], region)]


def rig_of(kind: str, patch: pytest.MonkeyPatch) -> Rig:
    """Return the rig of one of `RIGS`."""
    return {"fake": Rig, "real": RealRig}[kind](patch)


class Place:
    """A device that loads go to, and what it holds.

    Args:
        kind: `"fake"` or `"real"`.
    """

    def __init__(self, kind: str) -> None:
        self.is_real = kind == "real"
        self.device: Any = resolve_device("auto") if self.is_real else FakeDevice(delay_seconds=0.0001)
        """What `device=` takes."""
        self._before_bytes = self.used_bytes()

    @property
    def torch_device(self) -> torch.device:
        """What its tensors say."""
        return self.device if self.is_real else self.device.device

    def used_bytes(self) -> int:
        """Return what tensors hold there."""
        gc.collect()
        if not self.is_real:
            return int(self.device.used_bytes)
        torch.accelerator.synchronize(self.device)
        if self.device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()  # what a matrix product leaves for the next one
        return int(module_of(self.device).memory_allocated(self.device))

    def require_freed(self) -> None:
        """Require that it holds what it held at first; threads that have ended for us may be on their way out."""
        assert eventually(lambda: self.used_bytes() == self._before_bytes), (self.used_bytes(), self._before_bytes)

    def own_stream(self) -> Any:
        """Return a context in which the calling thread has a stream of its own."""
        if not self.is_real:
            return nullcontext()
        module = module_of(self.device)
        of_stio = TorchAccelerator(self.device).copy_stream
        streams = (module.Stream(self.device) for _ in range(33))
        # torch gives out 32 streams in turn, so one in 32 is that of stio's copies.
        return module.stream(next(stream for stream in streams if stream.stream_id != of_stio.stream_id))

    def keep_busy(self, cycles: int) -> None:
        """Give the current stream something to do."""
        if self.is_real:
            keep_busy(cycles)


PLACES = [pytest.param("fake", id="fake"), pytest.param("real", id="real", marks=NEEDS_GPU)]
"""The engine's part of a promise shows on the first, the device's on the second."""
