"""The device memory of one group of tensors: which allocation each byte of the group belongs to.

A large tensor is an allocation of its own. Neighbouring small tensors share one, because an allocation costs as much
as reading them, but each gets a storage of exactly its bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from stio.device.base import Accelerator, Event
from stio.device.tensors import TORCH_DTYPES, torch_shape, typed
from stio.device.torch_private import from_dlpack, to_dlpack
from stio.format.dtypes import tensor_nbytes
from stio.runtime.memory import Region

OWN_ALLOCATION_BYTES = 2 << 20
"""Tensors of this size and above are allocations of their own; smaller ones share allocations."""

VECTOR_BYTES = 16
"""Kernels load vectors of this size, and some do not check that a tensor starts at a multiple of it, as each allocation
of torch's does. Shorter tensors are aligned to the size of their elements."""


@dataclass(frozen=True, slots=True)
class _Small:
    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class _Allocation:
    start: int
    stop: int
    memory: torch.Tensor  # [stop - start] uint8 on the device; holds the bytes [start, stop) of the group


@dataclass(slots=True)
class GroupMemory:
    """The device memory of one group. A byte of it is addressed by its offset in the group."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """The group's tensors by name. Their values are complete when the events have passed."""
    shared: list[torch.Tensor] = field(default_factory=list)
    """Allocations that small tensors share."""
    events: list[Event] = field(default_factory=list)
    """Events behind the copies that were submitted for the group."""
    _allocations: list[_Allocation] = field(default_factory=list)

    @classmethod
    def allocate(
        cls,
        accelerator: Accelerator,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        offsets: Sequence[int],
    ) -> GroupMemory:
        """Allocate for a group's tensors; `offsets` are their offsets in the group, ascending.

        Raises:
            DeviceMemoryError: The device is full; the memory allocated so far is free again.
        """
        memory = cls()
        run: list[_Small] = []
        for name, dtype, shape, start in zip(names, dtypes, shapes, offsets, strict=True):
            nbytes = tensor_nbytes(dtype, shape)
            is_small = 0 < nbytes < OWN_ALLOCATION_BYTES
            if run and not (is_small and _is_aligned(start - run[0].start, dtype, nbytes)):
                memory._allocate_shared(accelerator, run)
                run = []
            if is_small:
                run.append(_Small(name, dtype, shape, start, start + nbytes))
                continue
            flat = accelerator.empty(nbytes)
            memory.tensors[name] = typed(flat, dtype, torch_shape(dtype, shape))
            if nbytes:
                memory._allocations.append(_Allocation(start, start + nbytes, flat))
        if run:
            memory._allocate_shared(accelerator, run)
        return memory

    def copies(self, start: int, region: Region) -> list[tuple[torch.Tensor, Region]]:
        """Return the copies out of a region that holds the group's bytes from `start` on, each with its target."""
        stop = start + region.nbytes
        found = []
        for one in self._allocations:
            low, high = max(start, one.start), min(stop, one.stop)
            if low < high:
                found.append((one.memory[low - one.start : high - one.start], region.sub(low - start, high - low)))
        return found

    def _allocate_shared(self, accelerator: Accelerator, run: Sequence[_Small]) -> None:
        start, stop = run[0].start, run[-1].stop
        flat = accelerator.empty(stop - start)
        self.shared.append(flat)
        self._allocations.append(_Allocation(start, stop, flat))
        for small in run:
            part = flat[small.start - start : small.stop - start]
            # Through DLPack, so that the tensor has a storage of exactly its bytes.
            own = from_dlpack(to_dlpack(part))
            self.tensors[small.name] = typed(own, small.dtype, torch_shape(small.dtype, small.shape))


def _is_aligned(offset: int, dtype: str, nbytes: int) -> bool:
    """Return whether a tensor may start at this offset in an allocation."""
    return not offset % (VECTOR_BYTES if nbytes >= VECTOR_BYTES else TORCH_DTYPES[dtype].itemsize)
