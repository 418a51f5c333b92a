"""The device memory of one group of tensors: a storage of exactly its bytes for each tensor.

So each tensor is an allocation of its own: it is freed alone, and a user's `record_stream` protects it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from stio.device.base import Accelerator
from stio.device.tensors import TORCH_DTYPES, torch_shape
from stio.device.torch_private import over_storages
from stio.format.dtypes import tensor_nbytes
from stio.runtime.memory import Region
from stio.runtime.process import collection_paused


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


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The device memory of one group. A byte of it is addressed by its offset in the group."""

    tensors: dict[str, torch.Tensor]
    """The tensors by name, in their order."""
    _storages: Sequence[torch.UntypedStorage]
    _starts: Sequence[int]

    @classmethod
    def allocate(cls, accelerator: Accelerator, layouts: Sequence[Layout]) -> list[GroupMemory]:
        """Allocate for the tensors of groups, in one call.

        Raises:
            DeviceMemoryError: The device is full; nothing stays allocated.
        """
        sizes = [
            tensor_nbytes(dtype, shape)
            for layout in layouts
            for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)
        ]
        with collection_paused(len(sizes)):
            storages = accelerator.allocate(sizes)
            wanted = [
                (TORCH_DTYPES[dtype], torch_shape(dtype, shape))
                for layout in layouts
                for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)
            ]
            with accelerator.on_stream():  # torch allocates one element for a moment, for each tensor
                tensors = over_storages((storage, *one) for storage, one in zip(storages, wanted, strict=True))
            found, first = [], 0
            for layout in layouts:
                stop = first + len(layout.names)
                named = dict(zip(layout.names, tensors[first:stop], strict=True))
                found.append(cls(named, storages[first:stop], layout.offsets))
                first = stop
        return found

    def places(self, start: int, nbytes: int) -> Iterator[tuple[torch.UntypedStorage, int, int, int]]:
        """Return where the group's bytes `[start, start + nbytes)` belong: runs of them, each in one storage.

        Returns:
            Storage, offset in it, offset in the group, length. Bytes between tensors belong nowhere.
        """
        stop = start + nbytes
        for k in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            begin = self._starts[k]
            if begin >= stop:
                break
            storage = self._storages[k]
            low, high = max(start, begin), min(stop, begin + storage.nbytes())
            if low < high:
                yield storage, low - begin, low, high - low

    def copies(self, start: int, region: Region) -> list[tuple[torch.Tensor, Region]]:
        """Return the copies out of a region that holds the group's bytes from `start` on, each with its target."""
        return [
            (bytes_of_storage(storage, at, length), region.sub(low - start, length))
            for storage, at, low, length in self.places(start, region.nbytes)
        ]


def bytes_of_storage(storage: torch.UntypedStorage, start: int, nbytes: int) -> torch.Tensor:
    """Return bytes of a storage as a uint8 tensor `[nbytes]`."""
    (whole,) = over_storages([(storage, torch.uint8, (storage.nbytes(),))])
    return whole if nbytes == storage.nbytes() else whole[start : start + nbytes]
