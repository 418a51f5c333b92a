"""The device memory that a group lands in, and which part of it each of a file's bytes goes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stio.device.base import Accelerator, Event
from stio.device.tensors import TORCH_DTYPES, torch_shape, typed
from stio.format.dtypes import tensor_nbytes
from stio.runtime.memory import Region

__all__ = ["OWN_ALLOCATION_BYTES", "VECTOR_BYTES", "GroupMemory"]

OWN_ALLOCATION_BYTES = 2 << 20
"""Tensors of this size and above are allocations of their own; smaller ones share some."""

VECTOR_BYTES = 16
"""Kernels load vectors of this size, and some do not look whether a tensor begins at a multiple of it, as each
allocation of torch's does. Shorter tensors are aligned as their dtype asks."""


@dataclass(frozen=True, slots=True)
class _Small:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(slots=True)
class _Piece:
    start: int
    stop: int
    target: torch.Tensor  # 1-D uint8 on the device; its first byte is the image's byte `start`


@dataclass(slots=True)
class GroupMemory:
    """The device memory of one group: an allocation for each large tensor, one for each aligned run of small ones."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The group's tensors, filled when the events have passed."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """Allocations that small tensors lie in."""
    events: list[Event] = field(default_factory=list)
    """Behind the copies that were queued for it."""
    _pieces: list[_Piece] = field(default_factory=list)

    @classmethod
    def allocate(
        cls,
        accelerator: Accelerator,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        offsets: Sequence[int],
    ) -> GroupMemory:
        """Allocate for a group's tensors; `offsets` are their places in the group's image, ascending.

        Raises:
            DeviceMemoryError: The device is full; what was allocated is free again.
        """
        image = cls()
        run: list[_Small] = []
        for name, dtype, shape, start in zip(names, dtypes, shapes, offsets, strict=True):
            nbytes = tensor_nbytes(dtype, shape)
            is_small = 0 < nbytes < OWN_ALLOCATION_BYTES
            if run and not (is_small and _is_aligned(start - run[0].start, dtype, nbytes)):
                image._carve(accelerator, run)
                run = []
            if is_small:
                run.append(_Small(name, dtype, shape, start, start + nbytes))
                continue
            flat = accelerator.empty(nbytes)
            image.tensors[name] = typed(flat, dtype, torch_shape(dtype, shape))
            if nbytes:
                image._pieces.append(_Piece(start, start + nbytes, flat))
        if run:
            image._carve(accelerator, run)
        return image

    def pairs(self, start: int, slot: Region) -> list[tuple[torch.Tensor, Region]]:
        """Return the copies that bring a slot, holding the image's bytes from `start` on, to where they belong."""
        stop = start + slot.nbytes
        found = []
        for piece in self._pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low < high:
                found.append((piece.target[low - piece.start : high - piece.start], slot.sub(low - start, high - low)))
        return found

    def _carve(self, accelerator: Accelerator, run: Sequence[_Small]) -> None:
        start, stop = run[0].start, run[-1].stop
        flat = accelerator.empty(stop - start)
        self.shared.append(flat)
        self._pieces.append(_Piece(start, stop, flat))
        for small in run:
            part = flat[small.start - start : small.stop - start]
            self.tensors[small.name] = _carved(part, small.dtype, small.shape)


def _is_aligned(offset: int, dtype: str, nbytes: int) -> bool:
    """Return whether a tensor may lie there in an allocation."""
    return not offset % (VECTOR_BYTES if nbytes >= VECTOR_BYTES else TORCH_DTYPES[dtype].itemsize)


def _carved(part: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor on a part of a larger allocation, with a storage of exactly its bytes, by way of DLPack."""
    # Not `Tensor.__dlpack__`: between streams it would make one wait for the other.
    return typed(torch._C._from_dlpack(torch._C._to_dlpack(part)), dtype, torch_shape(dtype, shape))
