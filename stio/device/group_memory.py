"""The device memory of one group of tensors: which allocation each byte of the group belongs to.

A large tensor is copied into an allocation of its own. Neighbouring small tensors are copied into one buffer, and
cloned from there: a call of torch for each tensor may wait for the GIL, and two calls make all of them (`separate`). So
every tensor has an allocation of its own in the device's allocator, and a user's `record_stream` protects it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from stio.device.base import Accelerator, Event
from stio.device.tensors import TORCH_DTYPES, torch_shape
from stio.device.torch_private import over_storages
from stio.format.dtypes import tensor_nbytes
from stio.runtime.memory import Region
from stio.runtime.process import collection_paused

LARGE_BYTES = 2 << 20
"""Tensors of this size and above are copied directly into their own allocation, smaller ones by way of a buffer."""


class Layout(Protocol):
    """The tensors of a group, as `stio.loading.plan.Group` has them."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the tensors."""

    @property
    def dtypes(self) -> Sequence[str]:
        """Their dtypes, as in the format."""

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Their shapes, as in the format."""

    @property
    def offsets(self) -> Sequence[int]:
        """Offset of each tensor in the group, ascending."""


class _Part(NamedTuple):
    """One tensor of a group, and its bytes `[start, stop)` in it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def is_small(self) -> bool:
        return 0 < self.stop - self.start < LARGE_BYTES

    def over(self, memory: torch.Tensor) -> tuple[torch.UntypedStorage, torch.dtype, Sequence[int]]:
        """Return what `over_storages` takes to make the tensor over memory of its own."""
        return memory.untyped_storage(), TORCH_DTYPES[self.dtype], torch_shape(self.dtype, self.shape)


@dataclass(frozen=True, slots=True)
class _Allocation:
    """Device memory for neighbouring parts; one part owns its allocation, several are cloned from theirs."""

    parts: Sequence[_Part]
    memory: torch.Tensor  # [stop - start] uint8 on the device

    @property
    def is_alone(self) -> bool:
        return len(self.parts) == 1

    @property
    def start(self) -> int:
        return self.parts[0].start

    @property
    def stop(self) -> int:
        return self.parts[-1].stop

    def pieces(self) -> list[torch.Tensor]:
        """Return the memory of each part, made in one call; a view each."""
        sizes, numbers, end = [], [], self.start
        for part in self.parts:
            if part.start > end:
                sizes.append(part.start - end)
            numbers.append(len(sizes))
            sizes.append(part.stop - part.start)
            end = part.stop
        views = torch.split(self.memory, sizes)
        return [views[number] for number in numbers]


@dataclass(slots=True)
class GroupMemory:
    """The device memory of one group. A byte of it is addressed by its offset in the group."""

    events: list[Event] = field(default_factory=list)
    """Events behind the copies that were submitted for the group."""
    _names: Sequence[str] = ()
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _allocations: list[_Allocation] = field(default_factory=list)

    @classmethod
    def allocate(cls, accelerator: Accelerator, layouts: Sequence[Layout]) -> list[GroupMemory]:
        """Allocate for the tensors of groups, in one call.

        Raises:
            DeviceMemoryError: The device is full; nothing stays allocated.
        """
        runs_of = [_runs(layout) for layout in layouts]
        sizes = [run[-1].stop - run[0].start for runs in runs_of for run in runs]
        memories = iter(accelerator.allocate(sizes))
        found = [
            cls(_names=layout.names, _allocations=[_Allocation(run, next(memories)) for run in runs])
            for layout, runs in zip(layouts, runs_of, strict=True)
        ]
        alone = [(one.memory, one.parts[0], memory) for memory in found for one in memory._allocations if one.is_alone]
        tensors = over_storages([part.over(flat) for flat, part, _ in alone])
        for (_, part, memory), tensor in zip(alone, tensors, strict=True):
            memory._tensors[part.name] = tensor
        return found

    def copies(self, start: int, region: Region) -> list[tuple[torch.Tensor, Region]]:
        """Return the copies out of a region that holds the group's bytes from `start` on, each with its target."""
        stop = start + region.nbytes
        found = []
        for one in self._allocations:
            low, high = max(start, one.start), min(stop, one.stop)
            if low < high:
                is_whole = high - low == one.stop - one.start
                target = one.memory if is_whole else one.memory[low - one.start : high - one.start]
                found.append((target, region.sub(low - start, high - low)))
        return found

    @property
    def is_shared(self) -> bool:
        """Whether several tensors are in one buffer, and must be cloned."""
        return not all(one.is_alone for one in self._allocations)

    def separate(self, accelerator: Accelerator) -> dict[str, torch.Tensor]:
        """Return the group's tensors by name, each with an allocation of its own; clone those that are in a buffer.

        Called behind all copies. With `is_shared`, the caller is `on_queue`, and an event must follow. It may be called
        again after an error.
        """
        with collection_paused(len(self._names)):
            for one in self._allocations:
                if not one.is_alone:
                    clones = accelerator.clone(one.pieces())
                    tensors = over_storages([part.over(clone) for part, clone in zip(one.parts, clones, strict=True)])
                    self._tensors |= zip((part.name for part in one.parts), tensors, strict=True)
        self._allocations.clear()
        return {name: self._tensors[name] for name in self._names}


def _runs(layout: Layout) -> list[list[_Part]]:
    """Return a group's tensors by allocation: each large or empty one alone, neighbouring small ones together."""
    runs: list[list[_Part]] = []
    for name, dtype, shape, start in zip(layout.names, layout.dtypes, layout.shapes, layout.offsets, strict=True):
        part = _Part(name, dtype, shape, start, start + tensor_nbytes(dtype, shape))
        if runs and part.is_small and runs[-1][-1].is_small:
            runs[-1].append(part)
        else:
            runs.append([part])
    return runs
