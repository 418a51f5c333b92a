"""The accelerator that torch sees: CUDA, and what else its generic stream API serves (ROCm, XPU).

One copy stream a device. Memory is allocated under that stream, so the allocator knows where it is written; the
consumer's stream waits for the event behind the copies, the host never does. Staging memory is pinned by torch's
own host allocator, in powers of two because it rounds up to them, and cached by it between loads.

Every call of the driver is made with the target as the thread's current device. A new thread's is number 0, and to ask
an event or to come back from a stream there makes a context on it: half a gigabyte, for a load that goes elsewhere.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch

from stio.errors import DeviceError, DeviceMemoryError, StioError
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.runtime.process import after_fork_in_child

__all__ = ["HAVE_STREAMS", "Mark", "TorchAccelerator", "bytes_of", "on_stream"]

logger = logging.getLogger("stio")

HAVE_STREAMS = ("Event", "Stream", "current_stream", "device", "stream")
"""What torch's module of a kind of device has if it can copy beside its other work."""


class Mark:
    """An event of torch's, asked with its device as the thread's current one; see above.

    Args:
        module: torch's module of the device's kind.
        device: The device, its index resolved.
        stream: What has been queued there is what the mark stands behind.
    """

    def __init__(self, module: Any, device: torch.device, stream: Any) -> None:
        self._module, self._device = module, device
        # Who waits for CUDA's sleeps: by default it spins, and readers that wait for the bus would take a core each.
        self.event: Any = module.Event(blocking=True) if device.type == "cuda" else module.Event()
        """torch's own, for streams that are to wait."""
        self.event.record(stream)

    def query(self) -> bool:
        """Return whether everything before the mark has been done."""
        with self._module.device(self._device):
            return bool(self.event.query())

    def synchronize(self) -> None:
        """Block this thread, without the GIL, until it has."""
        with self._module.device(self._device):
            self.event.synchronize()


@contextmanager
def on_stream(module: Any, device: torch.device, stream: Any) -> Iterator[None]:
    """Return a context in which torch's work goes to a stream of the device; no other device gets a context by it."""
    with module.device(device), module.stream(stream):
        yield


_making_streams = threading.Lock()
_copy_streams: dict[torch.device, tuple[Any, Any]] = {}


def _copy_stream(module: Any, device: torch.device) -> Any:
    """Return the process's copy stream of a device.

    torch's allocator keeps freed memory for the stream that it was allocated under: with a stream for each load, a
    model that replaces another one would find none of its memory, and the device would look full.
    """
    with _making_streams:  # not by `functools.cache`: two first loads at once would get two
        known, stream = _copy_streams.get(device, (None, None))
        if known is not module:
            stream = module.Stream(device=device)
            _copy_streams[device] = module, stream
        return stream


@after_fork_in_child
def _forget_parent() -> None:
    """Make streams anew in a forked child, where the parent's are none: CUDA says so then, and refuses."""
    global _making_streams
    _making_streams = threading.Lock()
    _copy_streams.clear()


class TorchAccelerator:
    """One accelerator device, for one load.

    Args:
        device: The device, its index resolved.

    Raises:
        DeviceError: torch serves this kind of device without streams (MPS), or the device does not answer.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        if not all(hasattr(self._module, name) for name in HAVE_STREAMS):
            raise DeviceError(
                "torch has no streams for this kind of device; load to the CPU and move the tensors",
                expected="cuda, or another device with streams",
                found=str(device),
            )
        try:
            self._stream: Any = _copy_stream(self._module, device)
        except RuntimeError as error:
            raise DeviceError(f"{device} does not answer: {error}") from error
        self._pinned = True

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""
        return self._device

    def as_current(self) -> AbstractContextManager[Any]:
        """Return a context in which the device is the calling thread's current one."""
        return self._module.device(self._device)  # type: ignore[no-any-return]  # torch's modules are untyped

    def staging(self, nbytes: int) -> Region:
        """Return pinned memory, or plain memory with a warning where pinning fails (a low memlock limit).

        torch's own allocator pins it: it clears the pending error that a refusal leaves in the driver (the next
        launch of that thread would raise it), rounds up to a power of two, and keeps what is let go for the next
        load. What copies still read there it does not give out again.
        """
        if self._pinned:
            try:
                with self.on_queue():  # pinning belongs to a device's context: to this one's, not to number 0's
                    tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                self._pinned = False
                logger.warning("pinning host memory failed, copies to %s will be slower: %s", self._device, error)
            else:
                return Region(tensor.data_ptr(), nbytes, tensor)
        return memory.allocate(nbytes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return a new 1-D uint8 tensor that the copy stream owns."""
        with self.on_queue(needed_bytes=nbytes):
            return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Mark:
        """Queue copies on the copy stream, in one call, and an event behind them.

        Raises:
            DeviceError: The device refused; what had been queued before that has ended.
        """
        sources = [bytes_of(region) for _, region in pairs]
        try:
            with on_stream(self._module, self._device, self._stream):
                if pairs:
                    torch._foreach_copy_([target for target, _ in pairs], sources, non_blocking=True)
                return Mark(self._module, self._device, self._stream)
        except RuntimeError as error:
            with suppress(RuntimeError):  # a device that is lost says so a second time
                self._stream.synchronize()
            raise DeviceError(f"copying to {self._device} failed: {error}") from error

    def hand_over(self, tensors: Iterable[torch.Tensor], events: Iterable[Any]) -> None:
        """Let the current stream wait for the copies, and the allocator know that it uses the memory.

        `record_stream` does nothing for a small tensor carved from a shared allocation: its memory is not the
        allocator's own but that allocation's, which is recorded here too.
        """
        stream = self._module.current_stream(self._device)
        for event in events:
            stream.wait_event(event.event)
        for tensor in tensors:
            tensor.record_stream(stream)

    @contextmanager
    def on_queue(self, *, needed_bytes: int | None = None) -> Iterator[None]:
        """Return a context in which torch's work goes to the copy stream.

        Raises:
            DeviceMemoryError: What was done in it needs more memory than the device has.
            DeviceError: The device refused what was done in it.
        """
        try:
            with on_stream(self._module, self._device, self._stream):
                yield
        except torch.OutOfMemoryError as error:
            free = self._free_bytes()
            raise DeviceMemoryError(
                f"{self._device} is out of memory; load fewer tensors, or cast with dtype=",
                needed_bytes=needed_bytes,
                free_bytes=free,
                expected=None if needed_bytes is None else f"{needed_bytes:,} bytes",
                found=None if free is None else f"{free:,} free",
            ) from error
        except RuntimeError as error:
            if isinstance(error, StioError):
                raise
            raise DeviceError(f"{self._device} failed: {error}") from error

    def _free_bytes(self) -> int | None:
        if not hasattr(self._module, "mem_get_info"):
            return None
        try:
            return int(self._module.mem_get_info(self._device)[0])
        except RuntimeError:
            return None


def bytes_of(region: Region) -> torch.Tensor:
    """Return a region as a 1-D uint8 tensor, pinned if its memory is."""
    if isinstance(region.owner, torch.Tensor):
        start = region.address - region.owner.data_ptr()
        return region.owner[start : start + region.nbytes]
    return torch.frombuffer(
        region.owner,
        dtype=torch.uint8,
        count=region.nbytes,
        offset=region.address - ctypes.addressof(region.owner),
    )
