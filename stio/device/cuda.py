"""The accelerator of torch: CUDA, and the other kinds that have torch's generic streams (ROCm, XPU).

There is one copy stream for each device, and one for the copies of saves. Memory is allocated under the stream that is
current where the load was called, so a model that is dropped gives its memory to the next load of the same caller.
Freed memory may still be in use by work that is queued there: the copy stream waits for an event behind each
allocation. The load waits on the host until copies have ended, so no consumer's stream waits and nothing is recorded.
Staging memory is pinned (`stio.device.pinned`).

Every call of the driver is made with the target as the thread's current device. In a new thread device 0 is current;
to query an event or to leave a stream there creates a context on it, half a gigabyte of a device that the load does
not use.

The engine has a ring of pinned memory for each device, out of which all loads to the device copy.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import cache
from math import prod
from typing import Any

import torch

from stio import native, process
from stio.device.base import current_device
from stio.device.pinned import PinnedAllocator, driver_of, drivers, is_pinned, node_of
from stio.device.torch_private import copy_each, new_tensors
from stio.errors import DeviceError, DeviceMemoryError, StioError
from stio.process import contextmanager, new_lock
from stio.runtime.memory import Region
from stio.runtime.reports import counters

STREAM_API = ("current_stream", "device", "stream")
"""What torch's module of a kind of device must have for copies beside other work; streams and events are generic."""


def require_streams(device: torch.device) -> None:
    """Raise `DeviceError` if torch has no streams for this kind of device (MPS)."""
    if not TorchAccelerator.supports(device):
        message = "torch has no streams for this kind of device; use tensors on the CPU, and move them"
        raise DeviceError(message, requested=str(device), expected="cuda, or another device with streams")


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
        stream: The event is behind all work that is queued there now. For CUDA a `torch.cuda.Stream`.
    """

    def __init__(self, module: Any, device: torch.device, stream: Any) -> None:
        self._module, self._device = module, device
        # A waiting thread sleeps. By default it spins, and each worker that waits for the bus would occupy a core.
        # torch's generic event has that option too and ignores it.
        self.event: Any = module.Event(blocking=True) if device.type == "cuda" else torch.Event(device=device)
        """The event of torch, for streams that wait for it."""
        with module.device(device):
            self.event.record(stream)

    @classmethod
    def now(cls, device: torch.device) -> TorchEvent:
        """Return an event behind what this thread has queued on its current stream of a device.

        Raises:
            DeviceError: The device does not answer.
        """
        module: Any = torch.get_device_module(device)
        with answering(device):
            return cls(module, device, module.current_stream(device))

    def query(self) -> bool:
        """Return whether everything before the event has been done.

        Raises:
            DeviceError: A copy failed.
        """
        with self._reporting():
            return bool(self.event.query())

    def synchronize(self) -> None:
        """Block this thread until everything before the event has been done.

        Raises:
            DeviceError: A copy failed.
        """
        with self._reporting():
            self.event.synchronize()

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            with self._module.device(self._device):
                yield
        except RuntimeError as error:
            raise DeviceError(f"copying on {self._device} failed: {error}") from error


def queue_copies(device: torch.device, stream: Any, ranges: native.Ranges, *, to_host: bool = False) -> None:
    """Queue copies of a device's memory on a stream, by its driver; see `stio.native.queue_copies`.

    No tensor is made: beside a busy Python thread the deallocation of each takes up to a switch interval.

    Raises:
        DeviceError: The device refused a copy; those before it are queued.
    """
    found = driver_of(device, stream)
    assert found is not None
    driver, handle = found
    try:
        with torch.get_device_module(device).device(device):  # the call changes the thread's current device
            native.queue_copies(driver, handle, ranges, to_host=to_host)
    except native.Failure as failure:
        raise _copy_error(device, failure) from None


def _copy_error(device: torch.device, failure: native.Failure) -> DeviceError:
    return DeviceError(f"copying on {device} failed: {failure.text or f'code {failure.code} of its driver'}")


@contextmanager
def on_stream(module: Any, device: torch.device, stream: Any) -> Iterator[None]:
    """Return a context in which torch's work is queued on this stream; it creates no other device's context."""
    with module.device(device), module.stream(stream):
        yield


_streams: dict[torch.device, tuple[Any, Any, Any]] = {}
"""By device, its module, the stream of all copies of loads, and that of all copies of saves."""


def _streams_of(module: Any, device: torch.device) -> tuple[Any, Any, Any]:
    """Return what the process has in `_streams` for a device.

    With a copy stream for each load, copies of several loads would share the bus in pieces, and none would be early.
    torch has 32 streams for a device and gives them out in turn, so with a stream for each save one save in 32 would
    wait for the copies of loads. Takes no lock: the drop-in modules call this on their caller's thread.
    """
    known = _streams.get(device)
    if known is not None and known[0] is not module:
        _streams.pop(device, None)
        known = None
    if known is None:
        # `torch.cuda.Event` of torch 2.10 and older accepts no generic stream: it reads past the end of that object.
        make: Any = module.Stream if device.type == "cuda" else torch.Stream
        with module.device(device):  # to create a stream elsewhere creates a context of the current device
            of_loads, of_saves = make(device=device), make(device=device)
        known = _streams.setdefault(device, (module, of_loads, of_saves))
    return known


def save_stream(module: Any, device: torch.device) -> Any:
    """Return the process's stream for the copies of saves, never the one of loads. All saves share it.

    Only copies of saves are queued here, and the stream waits for no other stream, so a save that waits for a caller's
    work delays no other save.
    """
    return _streams_of(module, device)[2]


class TorchAccelerator:
    """One accelerator device, for one load.

    Args:
        device: The device, its index resolved.
        stream: Memory is allocated under it, and casts run on it. None: the copy stream, so that the load waits for no
            work of its caller; another stream may then use the memory once it is recorded (`record`).

    Raises:
        DeviceError: torch has no streams for this kind of device (MPS), or the device does not answer.
    """

    def __init__(self, device: torch.device, stream: Any = None) -> None:
        self.device = device
        """Device of the tensors."""
        self._module: Any = torch.get_device_module(device)
        require_streams(device)
        with answering(device):
            self.copy_stream: Any = _streams_of(self._module, device)[1]
            """The stream of all copies of loads."""
            self._stream = self.copy_stream if stream is None else stream
        self._staging = PinnedAllocator(device)

    @staticmethod
    def supports(device: torch.device) -> bool:
        """Return whether torch can copy from and to this kind of device beside its other work."""
        module = torch.get_device_module(device)
        return all(hasattr(module, name) for name in STREAM_API)

    @staticmethod
    def current_streams() -> Mapping[torch.device, Any]:
        """Return the calling thread's current stream of each accelerator; empty where torch has not initialized one.

        A load allocates memory under the stream that is current where it was called, on a thread of its own.
        """
        current = current_device()
        module: Any = None if current is None else torch.get_device_module(current)
        if current is None or not hasattr(module, "current_stream"):
            return {}
        devices = [torch.device(current.type, index) for index in range(torch.accelerator.device_count())]
        return {device: module.current_stream(device) for device in devices}

    @staticmethod
    @contextmanager
    def on_streams(streams: Mapping[torch.device, Any]) -> Iterator[None]:
        """Return a context in which streams, such as those of another thread, are the current ones of their devices."""
        with ExitStack() as modes:
            for device, stream in streams.items():
                module: Any = torch.get_device_module(device)
                modes.enter_context(module.device(device))
                modes.enter_context(module.stream(stream))
            yield

    @staticmethod
    def default_stream(device: torch.device) -> Any:
        """Return the default stream of a device; where its module does not name it, the current one of this thread.

        Raises:
            DeviceError: torch has no streams for this kind of device, or the device does not answer.
        """
        module: Any = torch.get_device_module(device)
        require_streams(device)
        with answering(device), module.device(device):
            return getattr(module, "default_stream", module.current_stream)(device)

    @staticmethod
    def has_pinned(region: Region) -> bool:
        """Return whether a region is pinned memory that `staging` of an accelerator has returned."""
        return is_pinned(region)

    @staticmethod
    def free_bytes(device: torch.device) -> int | None:
        """Return the memory of a device that torch can still allocate; None if the device does not report it."""
        module: Any = torch.get_device_module(device)
        try:
            free = int(module.mem_get_info(device)[0])
            return free + int(module.memory_reserved(device)) - int(module.memory_allocated(device))
        except (AttributeError, RuntimeError):
            return None

    def as_current(self) -> AbstractContextManager[Any]:
        """Return a context in which the device is the calling thread's current one."""
        return self._module.device(self.device)  # type: ignore[no-any-return]  # torch's modules are untyped

    def staging(self, nbytes: int) -> Region:
        """Return pinned memory, or plain memory with a warning where pinning fails (a low memlock limit)."""
        return self._staging(nbytes)

    def must_grow(self, nbytes: int) -> bool:
        """Return whether torch would ask the driver for memory to allocate so many bytes; False if it does not say.

        False too if the device has too little memory: all is allocated in one call then, and its error has the whole
        size.
        """
        try:
            found = self._module.memory_stats_as_nested_dict(self.device)
            reserved, used = (found[name]["all"]["current"] for name in ("reserved_bytes", "allocated_bytes"))
        except (AttributeError, KeyError, RuntimeError):
            return False
        free = self.free_bytes(self.device) if reserved - used < nbytes else None
        return free is not None and nbytes <= free

    def allocate(self, wanted: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
        """Return new tensors, allocated under the load's stream. Copies wait for what is queued there now."""
        with self.on_stream(needed_bytes=sum(prod(shape) * dtype.itemsize for dtype, shape in wanted)):
            tensors = new_tensors(wanted, self.device)
            if self._stream != self.copy_stream:
                self.copy_stream.wait_event(TorchEvent(self._module, self.device, self._stream).event)
        return tensors

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> TorchEvent:
        """Queue copies on the copy stream, in one call, and an event behind them.

        Raises:
            DeviceError: The device refused; the copies that were queued before that have ended.
        """
        sources = [bytes_of(region) for _, region in pairs]
        try:
            with on_stream(self._module, self.device, self.copy_stream):
                copy_each([target for target, _ in pairs], sources, non_blocking=True)
                return TorchEvent(self._module, self.device, self.copy_stream)
        except RuntimeError as error:
            with suppress(RuntimeError):  # a lost device raises its error again
                self.copy_stream.synchronize()
            raise DeviceError(f"copying to {self.device} failed: {error}") from error

    def record(self, tensors: Iterable[torch.Tensor], stream: Any) -> None:
        """Record in the allocator that a stream, None: the default one, uses memory of the copy stream."""
        stream = self.default_stream(self.device) if stream is None else stream
        for tensor in tensors:
            tensor.record_stream(stream)

    @contextmanager
    def on_stream(self, *, needed_bytes: int | None = None) -> Iterator[None]:
        """Return a context in which torch's work is queued on the load's stream.

        Work on the copy stream has ended when the context ends; the caller's stream is not waited for.

        Raises:
            DeviceMemoryError: The work in it needs more memory than the device has.
            DeviceError: The device refused the work in it.
        """
        try:
            with on_stream(self._module, self.device, self._stream):
                yield
            if self._stream == self.copy_stream and needed_bytes is None:
                TorchEvent(self._module, self.device, self._stream).synchronize()
        except torch.OutOfMemoryError as error:
            free = self.free_bytes(self.device)
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


def bytes_of(region: Region) -> torch.Tensor:
    """Return a region as a uint8 tensor `[region.nbytes]`, pinned if its memory is."""
    if isinstance(region.owner, torch.Tensor):  # memory of a device
        start = region.address - region.owner.data_ptr()
        return region.owner[start : start + region.nbytes]
    return torch.frombuffer(
        region.owner, dtype=torch.uint8, count=region.nbytes, offset=region.address - ctypes.addressof(region.owner)
    )


# The engine's rings.

logger = logging.getLogger("stio")


class DeviceRing:
    """The ring of one device; held by each load that uses it.

    Args:
        device: The device.
        driver: Its driver.
        stream: Its copy stream.
        handle: The stream as the driver calls it.
    """

    def __init__(self, device: torch.device, driver: native.Driver, stream: Any, handle: int) -> None:
        self.device = device
        """The device."""
        self.stream = stream
        """The copy stream, which must exist as long as the ring."""
        self.ring = native.Ring(driver, handle, node_of(device))
        """The ring."""
        self._has_warned = False
        counters.add_holder(self)

    @classmethod
    def of(cls, accelerator: object) -> DeviceRing | None:
        """Return the ring of a load's device; None if the engine cannot copy to it."""
        if not isinstance(accelerator, TorchAccelerator) or not native.available():
            return None
        device, stream = accelerator.device, accelerator.copy_stream
        open_driver = drivers.get(device.type)
        if open_driver is None:
            return None
        with _making:
            known = _rings.get(device)
            if known is not None and known.stream == stream and not known.ring.has_failed:
                return known
            driver, handle = open_driver(device, stream)
            if not isinstance(driver, str):
                _rings[device] = cls(device, driver, stream, handle)
                return _rings[device]
        _log_missing(driver)  # not under the lock: a handler may load
        return None

    def error(self, failure: native.Failure) -> DeviceError:
        """Return the error of a copy that the driver refused or that failed."""
        return _copy_error(self.device, failure)

    @property
    def held_bytes(self) -> int:
        """Size of its memory."""
        return self.ring.held_bytes

    def warn_if_refused(self) -> None:
        """Warn, once, if the driver has refused to pin memory."""
        if not self._has_warned and self.ring.was_refused:
            self._has_warned = True
            logger.warning("pinning host memory failed, copies to %s are slower", self.device)

    def __del__(self) -> None:
        ring = getattr(self, "ring", None)
        if ring is not None:
            ring.release()


_making = new_lock()
_rings: dict[torch.device, DeviceRing] = {}


@cache
def _log_missing(why: str) -> None:
    logger.info("loads to devices use the plain executor, which is slower: %s", why)


@process.after_fork_in_child
def _forget_parent() -> None:
    """Forget the parent's streams and rings in a forked child, which cannot use them."""
    global _making
    _making = new_lock()
    _streams.clear()
    _rings.clear()
