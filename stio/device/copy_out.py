"""Copies bytes of tensors into host memory, for any layout and any device.

No temporary is as large as a tensor. Contiguous memory is copied by address, other layouts part by part, each part
directly to its target. Copies from a device run on their own stream, and are waited for once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from stio.device.base import Event
from stio.device.cuda import TorchAccelerator, TorchEvent, answering, bytes_of, has_streams, on_stream
from stio.device.tensors import INTEGERS
from stio.device.torch_private import conj_neg_bits, foreach_copy, without_torch_function
from stio.errors import DeviceError, DeviceMemoryError
from stio.runtime import memory
from stio.runtime.memory import HOLD_BYTES, Region, move, move_holding

Copy = tuple[torch.Tensor, int, Region]
"""A tensor, the first byte to copy (counted as if the tensor were contiguous), and the host memory to fill."""

_PART_BYTES = 16 << 20
"""Largest temporary on an accelerator, for tensors that are not contiguous there: its memory may be nearly full."""

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types that behave as torch defines, without code of a subclass."""

_TILE_COLUMNS = 64
"""Columns copied at a time from a transposed tensor: a 64 MiB block of float32 takes 21 ms by tiles, 175 by rows."""

_CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Readiness:
    """When the tensors of a save may be read: behind the work that was queued on their devices before the save."""

    _by_device: dict[torch.device, tuple[Any, Any]] = field(default_factory=dict)
    """An event behind that work, and the stream that copies the tensors."""

    @classmethod
    def now(cls, tensors: Mapping[str, object]) -> Readiness:
        """Record what the calling thread has queued on its current streams so far. Does not wait.

        Args:
            tensors: What will be saved, by name. Tensors on the CPU need no event; other values are ignored.

        Raises:
            DeviceError: A device does not answer.
        """
        found: dict[torch.device, tuple[Any, Any]] = {}
        for tensor in tensors.values():
            device = _accelerator_of(tensor)
            if device is not None and device not in found:
                module: Any = torch.get_device_module(device)
                with answering(device):
                    stream, event = module.Stream(device=device), module.Event()
                    event.record(module.current_stream(device))
                found[device] = event, stream
        return cls(found)

    def stream(self, device: torch.device) -> Any:
        """Return a stream of the device on which the tensors may be read."""
        known = self._by_device.get(device)
        if known is None:  # made after `now`, on this thread
            module: Any = torch.get_device_module(device)
            stream = module.Stream(device=device)
            stream.wait_stream(module.current_stream(device))
            return stream
        event, stream = known
        stream.wait_event(event)
        return stream

    def staging_allocator(self) -> Callable[[int], Region]:
        """Return the allocator of staging memory for copies of the tensors: pinned where one of them is on a device.

        Equal devices get an equal function, so a pool can compare functions to decide whether its memory fits.
        """
        return next(map(_pinned, self._by_device), memory.allocate)


def _accelerator_of(tensor: object) -> torch.device | None:
    """Return the device that a tensor's bytes are copied from; None for the CPU, and if it cannot be saved."""
    if not isinstance(tensor, torch.Tensor) or (type(tensor) in PLAIN and tensor.is_cpu):
        return None
    with without_torch_function():
        if tensor.is_cpu or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return None
        device = tensor.device
    return device if device.type != "meta" and has_streams(device) else None


@cache
def _pinned(device: torch.device) -> Callable[[int], Region]:
    return TorchAccelerator(device).staging


def copy_out(copies: Sequence[Copy], ready: Readiness | None = None) -> None:
    """Copy bytes of tensors into host memory. Blocks, mostly without the GIL; callable from any thread.

    A copy takes the bytes `[start, start + region.nbytes)` that the tensor would have if it were contiguous, with its
    conjugation and negation carried out. The copies of one device are queued together on a stream of their own, and
    waited for once; they are slow if the host memory is not pinned.

    Args:
        copies: What to copy. A tensor that is not contiguous is copied by whole elements only.
        ready: When tensors on devices may be read; None: behind what this thread has queued.

    Raises:
        ValueError: A range outside its tensor, or one that cuts an element of a tensor that is not contiguous.
        DeviceError: A copy was refused or failed. No region is being written to when this is raised.
        DeviceMemoryError: A device has no memory to make a part of a tensor contiguous.
    """
    by_device: dict[torch.device, list[Copy]] = {}
    on_cpu = []
    for copy in copies:
        tensor, start, region = copy
        if start < 0 or start + region.nbytes > tensor.nbytes:
            raise ValueError(f"bytes [{start}, {start + region.nbytes}) of a tensor of {tensor.nbytes}")
        if not region.nbytes:
            continue
        if tensor.is_cpu:
            on_cpu.append(copy)
        else:
            by_device.setdefault(tensor.device, []).append(copy)
    with ExitStack() as waits:  # all events are waited for, even if something fails
        for device, of_device in by_device.items():
            event = _queue_copies(device, of_device, ready or Readiness())
            waits.callback(event.synchronize)
        for tensor, start, region in on_cpu:
            _copy_on_cpu(tensor, start, region)


def copy_small(parts: Iterable[tuple[torch.Tensor, int, int, int]], target: Region) -> list[Copy]:
    """Copy the parts that are short and contiguous on the host; return the other copies, for `copy_out`.

    A region and a list entry for each of 60,000 tensors cost more than the copies, and start the garbage collector.

    Args:
        parts: A tensor, the first byte to copy, its offset in the target, and the number of bytes.
        target: Host memory.
    """
    left: list[Copy] = []
    address, size = target.address, target.nbytes
    for tensor, start, at, nbytes in parts:
        if (
            nbytes < HOLD_BYTES
            and tensor.is_cpu
            and 0 <= start <= tensor.nbytes - nbytes
            and 0 <= at <= size - nbytes
            and tensor.is_contiguous()
            and conj_neg_bits(tensor) == (False, False)
        ):
            move_holding(address + at, tensor.data_ptr() + start, nbytes)
        else:
            left.append((tensor, start, target.sub(at, nbytes)))
    return left


def _copy_on_cpu(tensor: torch.Tensor, start: int, region: Region) -> None:
    if tensor.is_contiguous() and not any(conj_neg_bits(tensor)):
        copy = move_holding if region.nbytes < HOLD_BYTES else move
        copy(region.address, tensor.data_ptr() + start, region.nbytes)
        return
    with torch.no_grad():
        source, begin, end = _elements(tensor, start, region)
        target = bytes_of(region).view(source.dtype)
        for part, at in _parts(source, begin, end):
            # Directly to the target. Numbers are moved as integers, so that no NaN changes.
            _copy_part(target[at : at + part.numel()].view(part.shape), part)


def _copy_part(target: torch.Tensor, part: torch.Tensor) -> None:
    """Copy into a contiguous tensor; in tiles where the elements of a row are on different cache lines."""
    far = part.dim() > 1 and part.stride(-1) * part.itemsize >= _CACHE_LINE_BYTES
    if not far or part.size(-1) < 2 * _TILE_COLUMNS:
        target.copy_(part)
        return
    foreach_copy(torch.split(target, _TILE_COLUMNS, -1), torch.split(part, _TILE_COLUMNS, -1))


def _elements(tensor: torch.Tensor, start: int, region: Region) -> tuple[torch.Tensor, int, int]:
    """Return the tensor, as integers unless it must be conjugated or negated, and the range of elements to copy."""
    item = tensor.dtype.itemsize
    if start % item or region.nbytes % item:
        raise ValueError(f"bytes [{start}, {start + region.nbytes}) cut an element of {item} bytes")
    source = tensor if any(conj_neg_bits(tensor)) else tensor.view(INTEGERS[item])
    return source, start // item, (start + region.nbytes) // item


def _parts(tensor: torch.Tensor, begin: int, end: int) -> Iterator[tuple[torch.Tensor, int]]:
    """Cut the elements `[begin, end)`, in row-major order, into whole sub-tensors: two for each dimension at most.

    Yields:
        A sub-tensor, and how many elements of the range come before it.
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
    """Queue a device's copies on a stream of their own, and an event behind them."""
    module: Any = torch.get_device_module(device)
    with answering(device):
        stream = ready.stream(device)
    try:
        with on_stream(module, device, stream), torch.no_grad():
            targets, parts = [], []
            for tensor, start, region in copies:
                if tensor.is_contiguous() and not any(conj_neg_bits(tensor)):
                    targets.append(bytes_of(region))
                    # Not view(-1): a tensor of one element may have any stride, and then has no view as bytes.
                    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                    parts.append(flat[start : start + region.nbytes])
                else:
                    _queue_strided(tensor, start, region)
            if targets:
                foreach_copy(targets, parts, non_blocking=True)
            return TorchEvent(module, device, stream)
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
    """Queue copies through small contiguous temporaries; the allocator reuses their memory in stream order."""
    source, begin, end = _elements(tensor, start, region)
    target = bytes_of(region).view(source.dtype)
    step = max(1, _PART_BYTES // source.dtype.itemsize)
    for low in range(begin, end, step):
        high = min(low + step, end)
        for part, at in _parts(source, low, high):
            flat = part.resolve_conj().resolve_neg().contiguous().view(-1)
            at += low - begin
            target[at : at + flat.numel()].copy_(flat, non_blocking=True)
