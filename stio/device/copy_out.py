"""Bytes of tensors into host memory, whatever their layout and wherever they are.

Nothing here makes a temporary of a tensor's size. Where memory is contiguous it is copied by address, elsewhere part
by part straight into its place. A device's copies go to a stream beside those that compute, and are waited for once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from stio.device.base import Event
from stio.device.cuda import HAVE_STREAMS, Mark, TorchAccelerator, bytes_of, on_stream
from stio.errors import DeviceError, DeviceMemoryError
from stio.runtime import memory
from stio.runtime.memory import HOLD_BYTES, Region, move, move_holding

__all__ = ["PLAIN", "Copy", "Readiness", "copy_out", "copy_small", "has_streams", "pending", "staging_for"]

Copy = tuple[torch.Tensor, int, Region]
"""A tensor, the first byte of its contiguous image that is wanted, and the host memory where the bytes land."""

_PART_BYTES = 16 << 20
"""Largest temporary on an accelerator, for tensors that are not contiguous there: it may be full."""

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types without a mind of their own."""

_TILE_COLUMNS = 64
"""Width of a tile where a transposed tensor is copied: a 64 MiB block of float32 takes 21 ms by tiles, 175 by rows."""

_CACHE_LINE_BYTES = 64

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


_NOTHING_PENDING = (False, False)
_known_pending: dict[int, tuple[bool, bool]] = {}


def pending(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return whether a conjugation and a negation are still to be done.

    The public calls drop the GIL; both bits are in the tensor's set of dispatch keys, of which there are few.
    """
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    found = _known_pending.get(keys)
    if found is None:
        found = _known_pending[keys] = (tensor.is_conj(), tensor.is_neg())
    return found


@dataclass(frozen=True, slots=True)
class Readiness:
    """When the tensors of a save may be read: after what their devices were told to do before it."""

    _marks: dict[torch.device, tuple[Any, Any]] = field(default_factory=dict)  # an event to wait for, a stream to use

    @classmethod
    def now(cls, tensors: Mapping[str, object]) -> Readiness:
        """Mark what the calling thread has queued on its current streams so far. Does not wait.

        Args:
            tensors: Those that are going to be saved, by name; the CPU's need no mark, and what is no tensor none.

        Raises:
            DeviceError: A device does not answer.
        """
        marks: dict[torch.device, tuple[Any, Any]] = {}
        for tensor in tensors.values():
            device = _accelerator_of(tensor)
            if device is not None and device not in marks:
                module: Any = torch.get_device_module(device)
                try:
                    stream, event = module.Stream(device=device), module.Event()
                    event.record(module.current_stream(device))
                except RuntimeError as error:
                    raise DeviceError(f"{device} does not answer: {error}") from error
                marks[device] = event, stream
        return cls(marks)

    def queue(self, device: torch.device) -> Any:
        """Return a stream of the device on which the tensors may be read."""
        mark = self._marks.get(device)
        if mark is None:  # made later, by this thread
            module: Any = torch.get_device_module(device)
            stream = module.Stream(device=device)
            stream.wait_stream(module.current_stream(device))
            return stream
        event, stream = mark
        stream.wait_event(event)
        return stream


def staging_for(tensors: Iterable[object]) -> Callable[[int], Region]:
    """Return what makes staging memory for copies of these tensors: pinned where one of them is on a device.

    Equal devices get an equal function, so that whoever keeps the memory can tell whether it still fits.
    """
    for tensor in tensors:
        device = _accelerator_of(tensor)
        if device is not None:
            return _pinned(device)
    return memory.allocate


def _accelerator_of(tensor: object) -> torch.device | None:
    """Return the device that a tensor's bytes are copied from, None for the CPU and for what cannot be saved anyway."""
    if not isinstance(tensor, torch.Tensor) or (type(tensor) in PLAIN and tensor.is_cpu):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.is_cpu or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return None
        device = tensor.device
    return device if device.type != "meta" and has_streams(device) else None


def has_streams(device: torch.device) -> bool:
    """Return whether torch can copy from this kind of device beside its other work."""
    module = torch.get_device_module(device)
    return all(hasattr(module, needed) for needed in HAVE_STREAMS)


@cache
def _pinned(device: torch.device) -> Callable[[int], Region]:
    return TorchAccelerator(device).staging


def copy_out(copies: Sequence[Copy], ready: Readiness | None = None) -> None:
    """Copy bytes of tensors into host memory. Blocks, mostly without the GIL; callable from any thread.

    What is wanted of a tensor are the bytes `[start, start + region.nbytes)` of its contiguous image, with pending
    conjugation and negation done. A device's copies are queued together on a stream beside those that compute, and
    waited for once; staging memory for them is pinned, or they are slow.

    Args:
        copies: What goes where. Of a tensor that is not contiguous, only whole elements can be had.
        ready: When the tensors of devices may be read; None: when what this thread has queued is done.

    Raises:
        ValueError: A range outside its tensor, or one that cuts an element where it must not.
        DeviceError: A device refused. No region is being written to any more, whatever is raised.
        DeviceMemoryError: A device has no memory to make a part of a tensor contiguous.
    """
    elsewhere: dict[torch.device, list[Copy]] = {}
    here = []
    for copy in copies:
        tensor, start, region = copy
        if start < 0 or start + region.nbytes > tensor.nbytes:
            raise ValueError(f"bytes [{start}, {start + region.nbytes}) of a tensor of {tensor.nbytes}")
        if not region.nbytes:
            continue
        if tensor.is_cpu:
            here.append(copy)
        else:
            elsewhere.setdefault(tensor.device, []).append(copy)
    flights: list[tuple[torch.device, Event]] = []
    try:
        for device, theirs in elsewhere.items():
            flights.append((device, _queue_copies(device, theirs, ready or Readiness())))
        for tensor, start, region in here:
            _copy_here(tensor, start, region)
    finally:
        _wait_for(flights)


def copy_small(parts: Iterable[tuple[torch.Tensor, int, int, int]], target: Region) -> list[Copy]:
    """Copy what is short and lies contiguous on the host; return what is left for `copy_out`.

    A region and a list entry for each of 60,000 tensors cost more than the copies, and wake the garbage collector.

    Args:
        parts: A tensor, the first byte of it that is wanted, where it lands in the target, and the number of bytes.
        target: Host memory.
    """
    left: list[Copy] = []
    address, room = target.address, target.nbytes
    for tensor, start, at, nbytes in parts:
        if (
            nbytes < HOLD_BYTES
            and tensor.is_cpu
            and 0 <= start <= tensor.nbytes - nbytes
            and 0 <= at <= room - nbytes
            and tensor.is_contiguous()
            and pending(tensor) == _NOTHING_PENDING
        ):
            move_holding(address + at, tensor.data_ptr() + start, nbytes)
        else:
            left.append((tensor, start, target.sub(at, nbytes)))
    return left


def _copy_here(tensor: torch.Tensor, start: int, region: Region) -> None:
    if tensor.is_contiguous() and not any(pending(tensor)):
        copy = move_holding if region.nbytes < HOLD_BYTES else move
        copy(region.address, tensor.data_ptr() + start, region.nbytes)
        return
    with torch.no_grad():
        source, begin, end = _elements(tensor, start, region)
        target = bytes_of(region).view(source.dtype)
        for part, at in _parts(source, begin, end):
            # Straight into its place; numbers are moved as integers, so that no NaN changes on the way.
            _copy_part(target[at : at + part.numel()].view(part.shape), part)


def _copy_part(target: torch.Tensor, part: torch.Tensor) -> None:
    """Copy into a contiguous tensor, in tiles where neighbours in a row lie on cache lines far from each other."""
    far = part.dim() > 1 and part.stride(-1) * part.itemsize >= _CACHE_LINE_BYTES
    if not far or part.size(-1) < 2 * _TILE_COLUMNS:
        target.copy_(part)
        return
    # All in one call, which drops the GIL once.
    torch._foreach_copy_(torch.split(target, _TILE_COLUMNS, -1), torch.split(part, _TILE_COLUMNS, -1))


def _elements(tensor: torch.Tensor, start: int, region: Region) -> tuple[torch.Tensor, int, int]:
    """Return the tensor as integers, unless arithmetic is pending, and the range of elements that is wanted."""
    item = tensor.dtype.itemsize
    if start % item or region.nbytes % item:
        raise ValueError(f"bytes [{start}, {start + region.nbytes}) cut an element of {item} bytes")
    source = tensor if any(pending(tensor)) else tensor.view(_INTEGERS[item])
    return source, start // item, (start + region.nbytes) // item


def _parts(tensor: torch.Tensor, begin: int, end: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Cut the elements `[begin, end)`, in row-major order, into whole sub-tensors: two for each dimension at most.

    Yields:
        A sub-tensor, and how many elements come before it in the range.
    """
    if end - begin == tensor.numel():
        yield tensor, 0
        return
    row = tensor.numel() // tensor.shape[0]
    at = begin
    while at < end:
        k, inside = divmod(at, row)
        whole = (end - at) // row
        if inside or not whole:
            stop = min(end - k * row, row)
            for part, before in _parts(tensor.select(0, k), inside, stop):
                yield part, at - begin + before
            at = k * row + stop
        else:
            yield tensor.narrow(0, k, whole), at - begin
            at += whole * row


def _queue_copies(device: torch.device, copies: Sequence[Copy], ready: Readiness) -> Event:
    """Queue a device's copies on a side stream, and an event behind them."""
    module: Any = torch.get_device_module(device)
    try:
        stream = ready.queue(device)
    except RuntimeError as error:
        raise DeviceError(f"{device} does not answer: {error}") from error
    try:
        with on_stream(module, device, stream), torch.no_grad():
            targets, parts = [], []
            for tensor, start, region in copies:
                if tensor.is_contiguous() and not any(pending(tensor)):
                    targets.append(bytes_of(region))
                    # Not view(-1): one element may have a stride of anything, and then cannot be seen as bytes.
                    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                    parts.append(flat[start : start + region.nbytes])
                else:
                    _queue_strided(tensor, start, region)
            if targets:
                torch._foreach_copy_(targets, parts, non_blocking=True)
            return Mark(module, device, stream)
    except BaseException as error:
        with suppress(RuntimeError):  # a device that is lost says so a second time
            stream.synchronize()
        if not isinstance(error, RuntimeError):
            raise
        if isinstance(error, torch.OutOfMemoryError):
            raise DeviceMemoryError(
                f"{device} has no memory to make a part of a tensor contiguous; free some, or save it from the CPU",
                needed_bytes=_PART_BYTES,
                expected=f"{_PART_BYTES:,} bytes",
            ) from error
        raise DeviceError(f"copying from {device} failed: {error}") from error


def _queue_strided(tensor: torch.Tensor, start: int, region: Region) -> None:
    """Queue copies by way of small contiguous temporaries; the stream's allocator uses their memory in turn."""
    source, begin, end = _elements(tensor, start, region)
    target = bytes_of(region).view(source.dtype)
    step = max(1, _PART_BYTES // source.dtype.itemsize)
    for low in range(begin, end, step):
        high = min(low + step, end)
        for part, at in _parts(source, low, high):
            flat = part.resolve_conj().resolve_neg().contiguous().view(-1)
            at += low - begin
            target[at : at + flat.numel()].copy_(flat, non_blocking=True)


def _wait_for(flights: Sequence[tuple[torch.device, Event]]) -> None:
    """Wait for all events, whatever happens to some of them; raise the first failure."""
    failure: DeviceError | None = None
    for device, event in flights:
        try:
            event.synchronize()
        except RuntimeError as error:
            failure = failure or DeviceError(f"copying from {device} failed: {error}")
            failure.__cause__ = failure.__cause__ or error
    if failure is not None:
        raise failure
