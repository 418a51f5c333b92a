"""Memory of the caller that a load fills: checked when the load begins and just before each copy, and copied into.

A tensor over a mapping may be read-only: a write would end the process. Of tensors that torch has not allocated itself
the mappings of the process are read once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from stio import native
from stio.device.base import Image
from stio.device.casts import Lost
from stio.device.changes import write_changes
from stio.device.cuda import queue_copies
from stio.device.tensors import PLAIN, Extent, ShortStorageError, dense_parts, extent_of
from stio.device.torch_private import (
    conj_neg_bits,
    copy_each,
    copy_of,
    has_no_overrides,
    traits_of,
    without_torch_function,
)
from stio.errors import MismatchError, printable
from stio.runtime import Cancelled, is_interrupted
from stio.runtime.memory import WritableMemory


class TargetMemory:
    """Checks the memory of tensors that one load will write, and copies into it.

    Args:
        path: The checkpoint, for errors.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._writable: WritableMemory | None = None

    def require(self, name: str, tensor: torch.Tensor) -> None:
        """Raise if a tensor has no memory that can be written.

        Args:
            name: The tensor, for the error.
            tensor: The tensor; see `dense_parts`.

        Raises:
            MismatchError: The memory was freed or shrunk, or is read-only.
        """
        is_plain = type(tensor) in PLAIN and tensor.layout is torch.strided and not (tensor.is_nested or tensor.is_meta)
        # Most are plain, and need no generator: a module may have 100,000 tensors.
        for part in (tensor,) if is_plain else dense_parts(tensor):
            storage = part.untyped_storage()
            begin, end, address, _ = self.extent(name, part, storage)
            if begin == end or storage.resizable() or not part.is_cpu:
                continue
            if self._writable is None:
                self._writable = WritableMemory.now()
            if not self._writable.holds(address + begin, end - begin):
                raise MismatchError(
                    f"{printable(name)} cannot be filled: its memory is read-only, as that of a file that is mapped "
                    "for reading; put a clone() of it into its place first",
                    path=self._path,
                    expected="memory that can be written",
                    found="memory that is read-only or not mapped",
                )

    def extent(self, name: str, tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> Extent:
        """Return where a tensor is that a load will write.

        Args:
            name: The tensor, for the error.
            tensor: A dense tensor with a storage.
            storage: The storage that it had, and that the caller holds: another thread may have given it another one.

        Raises:
            MismatchError: Its storage does not have all of its bytes.
        """
        try:
            if type(tensor) in PLAIN:
                return extent_of(tensor, storage)
            with without_torch_function():
                return extent_of(tensor, storage)
        except ShortStorageError as error:
            raise MismatchError(
                f"{printable(name)} cannot be filled: {error}; wake or gather the model first, or resize the memory: "
                f"untyped_storage().resize_({error.needed_bytes})",
                path=self._path,
                expected=f"{error.needed_bytes:,} bytes",
                found=f"{error.held_bytes:,} bytes",
            ) from None

    @staticmethod
    def has_memory(tensor: torch.Tensor) -> bool:
        """Return whether the storage of a dense tensor has all of its bytes now."""
        try:
            extent_of(tensor)
        except ShortStorageError:
            return False
        return True

    @staticmethod
    def has_plain_bytes(tensor: torch.Tensor) -> bool:
        """Return whether the memory of a tensor is the bytes of its values, and its class copies them as torch does.

        Conjugations and negations that are not carried out yet are not looked for here.
        """
        return _is_plain(type(tensor)) and tensor.is_contiguous()

    @staticmethod
    def copy_elements(target: torch.Tensor, codes: torch.Tensor, values: torch.Tensor) -> None:
        """Copy changed elements into a tensor; on a device on the current stream.

        Args:
            target: The tensor; see `has_elements`.
            codes: Where they are, U8 or U16 (`stio.format.delta`), on the CPU; they were checked.
            values: The elements, of the tensor's dtype.
        """
        flat = target if target.is_contiguous() else copy_of(target)
        memory, new = (one.detach().view(-1).view(torch.uint8) for one in (flat, values))
        write_changes(memory, codes, new, flat.itemsize, [(0, flat.numel(), 0)])
        if flat is not target:
            copy_each([target], [flat])

    @staticmethod
    def has_elements(tensor: torch.Tensor) -> bool:
        """Return whether elements of a tensor can be copied alone: its class copies them as torch does."""
        is_dense = tensor.layout is torch.strided and not tensor.is_quantized
        return is_dense and _is_plain(type(tensor)) and conj_neg_bits(tensor) == _NO_BITS

    def copy(self, copies: Sequence[tuple[str, torch.Tensor, torch.Tensor]], *, lost: Lost | None = None) -> None:
        """Copy tensors into others of the same shapes, in order; on a device in the order of the current stream.

        One call for all plain ones (`torch_private`). A subclass of `torch.Tensor` that overrides torch's functions has
        a copy of its own, which only the call for one tensor reaches.

        Args:
            copies: Names for the error, tensors of the caller, and what is copied into them. Nothing is copied unless
                all of them have their memory.
            lost: Where to count the values that leave the range of their target's dtype; None: they are not counted.

        Raises:
            MismatchError: Since the load began, the memory of a target was freed or shrunk.
        """
        plain: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        others: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for name, target, source in copies:
            self.extent(name, target)
            source = source.reshape(()) if source.shape == (1,) and not target.dim() else source
            # Lists of torch have no targets with such bits.
            is_plain = _is_plain(type(target)) and _is_plain(type(source)) and conj_neg_bits(target) == _NO_BITS
            (plain if is_plain else others).append((name, target, source))
        copy_each([target for _, target, _ in plain], [source for _, _, source in plain], non_blocking=True)
        for name, target, source in others:
            self.extent(name, target)
            target.copy_(source, non_blocking=True)
        for name, target, source in plain:
            if lost is not None and target.dtype != source.dtype:
                lost.count(name, source, target)

    def copy_image(self, image: Image, places: Sequence[tuple[str, str, torch.Tensor]]) -> None:
        """Copy tensors of an image into others on its device; on an accelerator in the order of the current stream.

        One call makes or queues the copies, and no tensor is made for them. On the CPU the engine makes them, and they
        have ended when this returns.

        Args:
            image: The bytes of the tensors.
            places: For each copy its name for the error, the name in the image, and the tensor of the caller. Nothing
                is copied unless all of these have their memory. What has become another dtype, shape, layout or device
                since the load began is copied by torch; everything is, if the process can start no thread.

        Raises:
            Cancelled: On the CPU, if the operation of this thread was cancelled.
            MismatchError: Since the load began, the memory of a target was freed or shrunk.
            DeviceError: The device refused a copy. The version of each target is higher nevertheless.
        """
        ranges, base, device = native.Ranges(), image.memory.data_ptr(), image.memory.device
        image_bytes = image.memory.nbytes
        transfer = _new_transfer() if device.type == "cpu" else None
        by_torch = device.type == "cpu" and transfer is None
        written, others = [], []
        held = []  # until the copies have ended: another thread may give a tensor another storage at any moment
        for name, source, target in places:
            at, dtype, shape = image.tensors[source]
            storage = target.untyped_storage()
            begin, end, address, _ = self.extent(name, target, storage)
            traits, nbytes = traits_of(target), end - begin
            is_there = traits.is_cpu if device.type == "cpu" else target.device == device
            is_same = target.dtype == dtype and target.shape == shape and is_there
            is_plain = self.has_plain_bytes(target) and traits.bits == _NO_BITS
            if by_torch or not (is_same and is_plain and at + nbytes <= image_bytes):
                others.append((name, target, (at, dtype, shape)))
                continue
            held.append(storage)
            if not traits.is_inference:
                written.append(target)
            if nbytes and transfer is not None:
                ranges.host_to_host(0, base + at, nbytes, address + begin, at)
            elif nbytes:
                ranges.of_device(base + at, nbytes, address + begin)
        for target in written:
            torch.autograd.graph.increment_version(target)  # first: the device may refuse a copy behind others
        if transfer is not None:
            _move(transfer, ranges)
        elif not by_torch:
            stream = torch.get_device_module(device).current_stream(device)
            image.memory.record_stream(stream)  # it may be another one than that under which the image was allocated
            if len(ranges):
                queue_copies(device, stream, ranges)
        for name, target, (at, dtype, shape) in others:
            part = image.memory[at : at + math.prod(shape) * dtype.itemsize]
            if at % dtype.itemsize:
                part = part.clone()
            self.copy([(name, target, part.view(dtype).view(shape))])


def _new_transfer() -> native.Transfer | None:
    """Return a transfer of the engine; None if the process can start no thread."""
    try:
        return native.Transfer()
    except OSError:
        return None


def _move(transfer: native.Transfer, ranges: native.Ranges) -> None:
    """Let the engine move ranges of one group, and wait without the GIL.

    Raises:
        Cancelled: The operation of this thread was cancelled; nothing is written any more.
    """
    try:
        transfer.add(ranges)
        while len(ranges) and not transfer.take(_CANCEL_SECONDS):
            if is_interrupted():
                raise Cancelled
    finally:
        transfer.end()


_CANCEL_SECONDS = 0.1
"""How often a copy looks for a cancel."""

_NO_BITS = (False, False)


def _is_plain(kind: type[torch.Tensor]) -> bool:
    return kind in PLAIN or has_no_overrides(kind)
