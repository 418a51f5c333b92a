"""Copies bytes of tensors into host memory, for any layout and any device.

No temporary is as large as a tensor. Contiguous memory is copied by address, other layouts part by part, each part
directly to its target. Copies from a device run on the stream of all saves, and are waited for once. Two saves at the
same time share that stream: the copies of both run in the order of their submission. A save whose tensors are not ready
yet waits on its own threads. If the stream waited, the copies of the other save would wait too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from stio import native
from stio.device.base import Event
from stio.device.cuda import TorchAccelerator, TorchEvent, answering, bytes_of, on_stream, queue_copies, save_stream
from stio.device.pinned import PinnedAllocator, driver_of
from stio.device.tensors import PLAIN, require_data, require_held
from stio.device.torch_private import INTEGERS, conj_neg_bits, copy_each, without_torch_function
from stio.errors import DeviceError, DeviceMemoryError, StioError
from stio.format import TensorSource
from stio.runtime import memory
from stio.runtime.memory import Region

Copy = tuple[torch.Tensor, int, Region]
"""A tensor, the first byte to copy (counted as if the tensor were contiguous), and the host memory to fill."""

_PART_BYTES = 16 << 20
"""Largest temporary on an accelerator, for tensors that are not contiguous there: its memory may be nearly full."""

PLAIN_LAYOUT = (None, (False, False))
"""`TensorSource.layout` of a contiguous tensor that is neither conjugated nor negated."""

_TILE_COLUMNS = 64
"""Columns copied at a time from a transposed tensor: a 64 MiB block of float32 takes 21 ms by tiles, 175 by rows."""

_CACHE_LINE_BYTES = 64


@dataclass(frozen=True, slots=True)
class Readiness:
    """When the tensors of a save may be read: behind the work that was queued on their devices before the save.

    `Readiness()`: behind what the thread that copies has queued.
    """

    _events: dict[torch.device, Event] = field(default_factory=dict)
    """For each device an event behind that work."""

    @classmethod
    def now(cls, tensors: Mapping[str, object]) -> Readiness:
        """Record what the calling thread has queued on its current streams so far. Does not wait.

        Args:
            tensors: What will be saved, by name. Tensors on the CPU need no event; other values are ignored.

        Raises:
            DeviceError: A device does not answer.
        """
        found: dict[torch.device, Event] = {}
        for tensor in tensors.values():
            if type(tensor) in PLAIN and tensor.is_cpu:  # type: ignore[attr-defined]
                continue
            device = _accelerator_of(tensor)
            if device is not None and device not in found:
                found[device] = TorchEvent.now(device)
        return cls(found)

    def event(self, device: torch.device) -> Event:
        """Return the event behind which the tensors on a device may be read."""
        known = self._events.get(device)
        return TorchEvent.now(device) if known is None else known  # made after `now`, on this thread

    def staging_allocator(self) -> Callable[[int], Region]:
        """Return an allocator of staging memory for copies of the tensors: pinned where one of them is on a device.

        Allocators are equal if memory of one serves for the other.
        """
        return next(map(PinnedAllocator, self._events), memory.allocate)

    def copy_out(self, copies: Iterable[Copy]) -> None:
        """Copy bytes of tensors into host memory, once they may be read. Blocks; callable from any thread.

        A copy takes the bytes `[start, start + region.nbytes)` that the tensor would have if it were contiguous, with
        its conjugation and negation carried out. The copies of one device are queued together on the stream of saves,
        and waited for once; they are slow if the host memory is not pinned.

        Args:
            copies: What to copy. A tensor that is not contiguous is copied by whole elements only.

        Raises:
            ValueError: A range outside its tensor, or one that cuts an element of a tensor that is not contiguous; or
                the memory of a tensor was freed or shrunk.
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
        held: list[tuple[torch.UntypedStorage, int, int]] = []  # until the events have passed
        with ExitStack() as waits:  # all events are waited for, even if something fails
            for device, of_device in by_device.items():
                event = _queue_copies(device, of_device, self, held)
                waits.callback(event.synchronize)
            for tensor, start, region in on_cpu:
                _copy_on_cpu(tensor, start, region)

    def copy_pieces(
        self,
        sources: Sequence[TensorSource],
        pieces: Iterable[tuple[int, int, int, int, bool]],
        target: Region,
        ranges: native.Ranges | None = None,
        group: int = 0,
    ) -> list[Any]:
        """Copy bytes of many tensors into one block of host memory, as `copy_out` does.

        Args:
            sources: The tensors.
            pieces: For each piece the position of its tensor, the first byte to copy, its offset in the target, the
                number of bytes, and whether it is the tensor's last piece. No piece is outside its tensor. The offsets
                ascend.
            target: Host memory.
            ranges: What the engine can copy is added to these, and not copied.
            group: Their group.

        Returns:
            What keeps the memory from which the engine is to copy; it must be kept until then.

        Raises:
            ValueError: A piece outside its tensor, which has changed, or outside the target.
            DeviceError: See `copy_out`.
            DeviceMemoryError: See `copy_out`.
        """
        storages: list[Any] = []
        rows: list[tuple[int, int, int, int]] = []
        others: list[Copy] = []
        to, room = target.address, target.nbytes if ranges is not None else -1
        for number, start, at, nbytes, _ in pieces:
            source = sources[number]
            found = _in_memory(source, start, nbytes) if 0 <= at <= room - nbytes else None
            if found is None:
                require_data(source.name, source.data)
                others.append((source.data, start, target.sub(at, nbytes)))
            else:
                address, storage = found
                storages.append(storage)
                rows.append((at, address, nbytes, to + at))
        if ranges is not None:
            ranges.host_to_host_each(group, rows)
        self.copy_out(others)
        return storages

    def bytes_at(self, source: TensorSource, start: int, nbytes: int, scratch: Callable[[], Region]) -> tuple[int, Any]:
        """Return an address of bytes of a tensor in host memory: in its own memory if that is there, else in a copy.

        Args:
            source: The tensor, which is not lazy.
            start: First byte, see `copy_out`.
            nbytes: Number of bytes.
            scratch: Returns memory for a copy of as many bytes.

        Returns:
            The address, and what keeps the memory allocated.

        Raises:
            ValueError: See `copy_out`.
            DeviceError: See `copy_out`.
        """
        if (found := _in_memory(source, start, nbytes)) is not None:
            return found
        require_data(source.name, source.data)
        region = scratch().sub(0, nbytes)
        self.copy_out([(source.data, start, region)])
        return region.address, region.owner


def _accelerator_of(tensor: object) -> torch.device | None:
    """Return the device that a tensor's bytes are copied from; None for the CPU, and if it cannot be saved."""
    if not isinstance(tensor, torch.Tensor):
        return None
    with without_torch_function():
        if tensor.is_cpu or type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            return None
        device = tensor.device
    return device if device.type != "meta" and TorchAccelerator.supports(device) else None


def _in_memory(source: TensorSource, start: int, nbytes: int) -> tuple[int, torch.UntypedStorage] | None:
    """Return the address of bytes of a tensor, and its storage; None if they are not consecutive in host memory.

    The tensor may have changed since it was described: an access outside its memory would end the process.
    """
    tensor: torch.Tensor = source.data
    if source.layout != PLAIN_LAYOUT or not tensor.is_cpu or not tensor.is_contiguous():
        return None
    storage, address, tensor_bytes = tensor.untyped_storage(), tensor.data_ptr(), tensor.nbytes
    base = storage.data_ptr()
    has_data = base and address + tensor_bytes <= base + storage.nbytes()
    return (address + start, storage) if has_data and 0 <= start <= tensor_bytes - nbytes else None


def _copy_on_cpu(tensor: torch.Tensor, start: int, region: Region) -> None:
    require_data("", tensor)
    if tensor.is_contiguous() and not any(conj_neg_bits(tensor)):
        memory.move(region.address, tensor.data_ptr() + start, region.nbytes)
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
    copy_each(torch.split(target, _TILE_COLUMNS, -1), torch.split(part, _TILE_COLUMNS, -1))


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


def _queue_copies(
    device: torch.device,
    copies: Sequence[Copy],
    ready: Readiness,
    held: list[tuple[torch.UntypedStorage, int, int]],
) -> Event:
    """Queue a device's copies on the stream of saves, once they may be made; return an event behind them.

    Storages that must be held until the event has passed are added to `held`, with their address and the end of what
    is copied: meanwhile another thread may give a tensor other memory.

    The driver copies what is contiguous, in one call (`queue_copies`); torch where the engine has no driver.
    """
    module: Any = torch.get_device_module(device)
    with answering(device):
        stream = save_stream(module, device)
    may_begin = ready.event(device)
    try:
        with on_stream(module, device, stream), torch.no_grad():
            ranges, has_driver = native.Ranges(), driver_of(device) is not None
            strided, targets, parts = [], [], []
            for tensor, start, region in copies:
                storage = tensor.untyped_storage()
                begin, end, address, _ = require_data("", tensor)
                if not tensor.is_contiguous() or any(conj_neg_bits(tensor)):
                    strided.append((tensor, start, region))
                    continue
                if tensor.device != device or start + region.nbytes > end - begin:
                    raise ValueError(f"bytes [{start}, {start + region.nbytes}) of a tensor that has changed")
                held.append((storage, address, end))
                if has_driver:
                    ranges.of_device(address + begin + start, region.nbytes, region.address)
                else:
                    # Not view(-1): a tensor of one element may have any stride, and then has no view as bytes.
                    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
                    parts.append(flat[start : start + region.nbytes])
                    targets.append(bytes_of(region))
            may_begin.synchronize()
            for storage, address, end in held:
                require_held(storage, address, end)
            for tensor, start, region in strided:
                require_data("", tensor)
                _queue_strided(tensor, start, region)
            if len(ranges):
                queue_copies(device, stream, ranges, to_host=True)
            if targets:
                copy_each(targets, parts, non_blocking=True)
            return TorchEvent(module, device, stream)
    except BaseException as error:
        with suppress(RuntimeError):  # a lost device raises its error again
            stream.synchronize()
        if not isinstance(error, RuntimeError) or isinstance(error, StioError):
            raise
        if isinstance(error, torch.OutOfMemoryError):
            raise DeviceMemoryError(
                f"{device} has no memory to make a part of a tensor contiguous; free some, or save it from the CPU",
                needed_bytes=_PART_BYTES,
                expected=f"{_PART_BYTES:,} bytes",
            ) from error
        raise DeviceError(f"copying on {device} failed: {error}") from error


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
