"""Copies of loaded tensors into memory of the caller, whose checks are in `tensor_memory.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

import torch

from stio import native
from stio.device.base import Image
from stio.device.cuda import queue_copies
from stio.device.tensor_memory import require_memory
from stio.device.tensors import PLAIN, Lost, count_lost
from stio.device.torch_private import conj_neg_bits, copy_each, has_no_overrides, traits_of
from stio.runtime.operation import Cancelled, is_interrupted


def copy_all(
    targets: Sequence[torch.Tensor],
    sources: Sequence[torch.Tensor],
    names: Sequence[str],
    *,
    path: str | None,
    lost: Lost | None = None,
) -> None:
    """Copy tensors into others of the same shapes, in order; on a device in the order of the current stream.

    One call for all plain ones (`torch_private`). A subclass of `torch.Tensor` that overrides torch's functions has a
    copy of its own, which only the call for one tensor reaches.

    Args:
        targets: Tensors of the caller; nothing is copied unless all of them have their memory.
        sources: What is copied.
        names: Names of the targets, for the error.
        path: The checkpoint, for the error.
        lost: Where to count the values that leave the range of their target's dtype; None: they are not counted.

    Raises:
        MismatchError: Since the load began, the memory of a target was freed or shrunk.
    """
    plain = []
    sources = [
        source.reshape(()) if source.shape == (1,) and not target.dim() else source
        for target, source in zip(targets, sources, strict=True)
    ]
    for name, target, source in zip(names, targets, sources, strict=True):
        require_memory(name, target, path=path)
        plain.append(
            _is_plain(type(target)) and _is_plain(type(source)) and conj_neg_bits(target) == _NO_BITS
        )  # lists of torch have no targets with such bits
    copy_each(compress(targets, plain), compress(sources, plain), non_blocking=True)
    for name, target, source, is_plain in zip(names, targets, sources, plain, strict=True):
        if not is_plain:
            require_memory(name, target, path=path)
            target.copy_(source, non_blocking=True)
        elif lost is not None and target.dtype != source.dtype:
            count_lost(lost, name, source, target)


def copy_from_image(image: Image, places: Sequence[tuple[str, str, torch.Tensor]], *, path: str | None) -> None:
    """Copy tensors of an image into others on its device; on an accelerator in the order of the current stream.

    One call makes or queues the copies, and no tensor is made for them. On the CPU the engine makes them, and they have
    ended when this returns.

    Args:
        image: The bytes of the tensors.
        places: For each copy its name for the error, the name in the image, and the tensor of the caller. Nothing is
            copied unless all of these have their memory. What has become another dtype, shape, layout or device since
            the load began is copied by torch; everything is, if the process can start no thread.
        path: The checkpoint, for the error.

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
        begin, end, address, _ = require_memory(name, target, path=path, storage=storage)
        traits, nbytes = traits_of(target), end - begin
        is_same = target.dtype == dtype and target.shape == shape and target.device == device
        is_plain = _is_plain(type(target)) and target.is_contiguous() and traits.bits == _NO_BITS
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
        copy_all([target], [part.view(dtype).view(shape)], [name], path=path)


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


def has_plain_bytes(tensor: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is the bytes of its values, and its class copies them as torch does.

    Conjugations and negations that are not carried out yet are not looked for here.
    """
    return _is_plain(type(tensor)) and tensor.is_contiguous()


_NO_BITS = (False, False)


def _is_plain(kind: type[torch.Tensor]) -> bool:
    return kind in PLAIN or has_no_overrides(kind)
