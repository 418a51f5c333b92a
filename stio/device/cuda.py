"""The accelerator of torch: CUDA, and the other kinds that have torch's generic streams (ROCm, XPU).

There is one copy stream for each device. Memory is allocated under that stream, so the allocator has a record
of the stream that writes it. The consumer's stream waits for the event behind the copies; the host never does. Staging
memory is pinned by torch's host allocator, which rounds up to powers of two and holds freed memory for the next load.

Every call of the driver is made with the target as the thread's current device. In a new thread device 0 is current;
to query an event or to leave a stream there creates a context on it, half a gigabyte of a device that the load does
not use.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from stio.device.torch_private import foreach_copy
from stio.errors import DeviceError, DeviceMemoryError, StioError
from stio.runtime import memory
from stio.runtime.locks import new_lock
from stio.runtime.memory import Region
from stio.runtime.process import after_fork_in_child

logger = logging.getLogger("stio")

STREAM_API = ("Event", "Stream", "current_stream", "device", "stream")
"""What torch's module of a kind of device must have for copies beside other work."""


def has_streams(device: torch.device) -> bool:
    """Return whether torch can copy from and to this kind of device beside its other work."""
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in STREAM_API)


@contextmanager
def answering(device: torch.device) -> Iterator[None]:
    """Return a context in which an error of torch is raised as the `DeviceError` of a device that does not answer."""
    try:
        yield
    except RuntimeError as error:
        raise DeviceError(f"{device} does not answer: {error}") from error


class TorchEvent:
    """An event of torch, used with its device as the thread's current one; see above.

    Args:
        module: torch's module of the device's kind.
        device: The device, its index resolved.
        stream: The event is behind all work that is queued there now.
    """

    def __init__(self, module: Any, device: torch.device, stream: Any) -> None:
        self._module, self._device = module, device
        # A waiting thread sleeps. By default it spins, and each worker that waits for the bus would occupy a core.
        self.event: Any = module.Event(blocking=True) if device.type == "cuda" else module.Event()
        """The event of torch, for streams that wait for it."""
        self.event.record(stream)

    def query(self) -> bool:
        """Return whether everything before the event has been done."""
        with self._module.device(self._device):
            return bool(self.event.query())

    def synchronize(self) -> None:
        """Block this thread, without the GIL, until everything before the event has been done.

        Raises:
            DeviceError: A copy failed.
        """
        try:
            with self._module.device(self._device):
                self.event.synchronize()
        except RuntimeError as error:
            raise DeviceError(f"copying on {self._device} failed: {error}") from error


@contextmanager
def on_stream(module: Any, device: torch.device, stream: Any) -> Iterator[None]:
    """Return a context in which torch's work is queued on this stream; it creates no other device's context."""
    with module.device(device), module.stream(stream):
        yield


_creating_stream = new_lock()
_copy_streams: dict[torch.device, tuple[Any, Any]] = {}


def _copy_stream(module: Any, device: torch.device) -> Any:
    """Return the process's copy stream of a device.

    torch's allocator reserves freed memory for the stream that it was allocated under. With a stream for each load, a
    model that replaces another one could not use its memory, and the device would be full.
    """
    with _creating_stream:  # `functools.cache` would let two first loads create one each
        known, stream = _copy_streams.get(device, (None, None))
        if known is not module:
            stream = module.Stream(device=device)
            _copy_streams[device] = module, stream
        return stream


@after_fork_in_child
def _forget_parent() -> None:
    """Forget the parent's streams in a forked child, where they are not valid and CUDA refuses them."""
    global _creating_stream
    _creating_stream = new_lock()
    _copy_streams.clear()


class TorchAccelerator:
    """One accelerator device, for one load.

    Args:
        device: The device, its index resolved.

    Raises:
        DeviceError: torch has no streams for this kind of device (MPS), or the device does not answer.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """Device of the tensors."""
        self._module: Any = torch.get_device_module(device)
        if not has_streams(device):
            raise DeviceError(
                "torch has no streams for this kind of device; load to the CPU and move the tensors",
                expected="cuda, or another device with streams",
                found=str(device),
            )
        with answering(device):
            self._stream: Any = _copy_stream(self._module, device)
        self._pinned = True

    def as_current(self) -> AbstractContextManager[Any]:
        """Return a context in which the device is the calling thread's current one."""
        return self._module.device(self.device)  # type: ignore[no-any-return]  # torch's modules are untyped

    def staging(self, nbytes: int) -> Region:
        """Return pinned memory, or plain memory with a warning where pinning fails (a low memlock limit).

        torch's host allocator pins it. That clears the error that a refusal leaves in the driver (the next launch of
        the thread would raise it). The allocator rounds up to a power of two, keeps freed memory for the next load, and
        does not return memory again while a copy reads it.
        """
        if self._pinned:
            try:
                with self.on_queue():  # memory is pinned in the context of a device: of this one, not of device 0
                    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pinned = False
                logger.warning("pinning host memory failed, copies to %s will be slower: %s", self.device, error)
            else:
                return Region(tensor.data_ptr(), nbytes, tensor)
        return memory.allocate(nbytes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a new uint8 tensor `[nbytes]`, allocated under the copy stream."""
        with self.on_queue(needed_bytes=nbytes):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> TorchEvent:
        """Queue copies on the copy stream, in one call, and an event behind them.

        Raises:
            DeviceError: The device refused; the copies that were queued before that have ended.
        """
        sources = [bytes_of(region) for _, region in pairs]
        try:
            with on_stream(self._module, self.device, self._stream):
                if pairs:
                    foreach_copy([target for target, _ in pairs], sources, non_blocking=True)
                return TorchEvent(self._module, self.device, self._stream)
        except RuntimeError as error:
            with suppress(RuntimeError):  # a device that is lost says so a second time
                self._stream.synchronize()
            raise DeviceError(f"copying to {self.device} failed: {error}") from error

    def hand_over(self, tensors: Iterable[torch.Tensor], events: Iterable[Any]) -> None:
        """Let the current stream wait for the events, and record in the allocator that it uses the memory.

        `record_stream` does nothing for a small tensor in a shared allocation, because the allocator has no record of
        its storage. The shared allocation is among `tensors` for that reason.
        """
        stream = self._module.current_stream(self.device)
        for event in events:
            stream.wait_event(event.event)
        for tensor in tensors:
            tensor.record_stream(stream)

    @contextmanager
    def on_queue(self, *, needed_bytes: int | None = None) -> Iterator[None]:
        """Return a context in which torch's work is queued on the copy stream.

        Raises:
            DeviceMemoryError: The work in it needs more memory than the device has.
            DeviceError: The device refused the work in it.
        """
        try:
            with on_stream(self._module, self.device, self._stream):
                yield
        except torch.OutOfMemoryError as error:
            free = self._free_bytes()
            raise DeviceMemoryError(
                f"{self.device} is out of memory; load fewer tensors, or cast with dtype=",
                needed_bytes=needed_bytes,
                free_bytes=free,
                expected=None if needed_bytes is None else f"{needed_bytes:,} bytes",
                found=None if free is None else f"{free:,} free",
            ) from error
        except RuntimeError as error:
            if isinstance(error, StioError):
                raise
            raise DeviceError(f"{self.device} failed: {error}") from error

    def _free_bytes(self) -> int | None:
        with suppress(AttributeError, RuntimeError):  # not every kind of device reports it
            return int(self._module.mem_get_info(self.device)[0])
        return None


def bytes_of(region: Region) -> torch.Tensor:
    """Return a region as a uint8 tensor `[region.nbytes]`, pinned if its memory is."""
    if isinstance(region.owner, torch.Tensor):
        start = region.address - region.owner.data_ptr()
        return region.owner[start : start + region.nbytes]
    return torch.frombuffer(
        region.owner,
        dtype=torch.uint8,
        count=region.nbytes,
        offset=region.address - ctypes.addressof(region.owner),
    )
