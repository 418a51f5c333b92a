"""The ways in: what fills which memory, and where tensors come from.

A route joins one open file to one device. `MappedPath` leaves the bytes in the page cache and maps them,
`CopiedPath` reads them straight into the tensors' own memory, `StagedPath` reads into a device's staging memory
and lets the device copy, `CacheFillPath` makes no tensors and reads what shall be kept. All answer to the same four calls
of the scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeAlias

import torch

from stio.device.base import Accelerator, LoadedGroup
from stio.device.group_memory import GroupMemory
from stio.device.ring import Stage
from stio.device.tensors import Casts, finish, tensors_in
from stio.loading.cache.file_image import CachedFile
from stio.loading.plan import GAP, Block, Group
from stio.loading.readers import CachedFileReader, reader
from stio.runtime import memory
from stio.runtime.limits import HUGE_PAGE_BYTES, PAGE_BYTES
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled
from stio.runtime.pacing import Pacer
from stio.storage.base import Source
from stio.storage.mapped import MappedFile

__all__ = ["CacheFillPath", "CopiedPath", "GroupMemories", "MappedPath", "StagedPath", "Staging"]

Staging: TypeAlias = Stage[tuple[GroupMemory, Block]]
"""Slots of a load, each filled with a block for an image."""


def _tensors(group: Group, region: Region, dtype: Casts | None) -> dict[str, torch.Tensor]:
    tensors = tensors_in(region, group.names, group.dtypes, group.shapes, group.offsets)
    if group.posts or dtype is not None:
        tensors = finish(tensors, {group.names[k]: post for k, post in group.posts.items()}, dtype)
    return tensors


@dataclass
class _Images:
    """The memory of groups under way, allocated when their first block comes."""

    regions: dict[int, Region] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self, group: Group) -> Region:
        with self.lock:
            region = self.regions.get(group.index)
            if region is None:
                # To the page's end: direct reads move whole pages.
                pages = -(-max(group.nbytes, 1) // PAGE_BYTES) * PAGE_BYTES
                region = self.regions[group.index] = memory.allocate(pages)
            return region

    def pop(self, group: Group) -> Region:
        with self.lock:
            return self.regions.pop(group.index, Region(0, 0))


class CopiedPath:
    """File to memory of the tensors' own, without a stop between, or with one in an image that is kept.

    Args:
        source: The open file.
        dtype: Cast to it; see `stio.device.tensors.Casts`.
        kept: The file's image.
    """

    def __init__(self, source: Source, *, dtype: Casts | None = None, kept: CachedFile | None = None) -> None:
        self._reader = reader(source, kept)
        self._images = _Images()
        self._dtype = dtype

    label = "read"

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Read a block into its group's image."""
        self._reader.read(group, block, self._images.get(group), 0, stopped)

    def settle(self, block: Block, settled: Callable[[Block], None]) -> None:
        """Say that the block is there."""
        settled(block)

    def finish(self, group: Group) -> LoadedGroup:
        """Make tensors over the image."""
        return LoadedGroup(_tensors(group, self._images.pop(group), self._dtype))

    def close(self) -> None:
        """Let go of images that were never finished."""
        self._images.regions.clear()


class MappedPath:
    """File to page cache, mapped; what is not contiguous in the file goes the copying way.

    Args:
        source: The open file.
        mapped: Its mapping.
        copy: The way for scattered groups.
        populates: Read it now; otherwise each page is read when it is touched.
        cold: The disk sets the pace, so that the processors have time to touch what it brings.
        piece_bytes: What the first call should populate; later ones by how long that took.
        dtype: Cast to it; see `stio.device.tensors.Casts`.
    """

    def __init__(
        self,
        mapped: MappedFile,
        copy: CopiedPath,
        *,
        populates: bool,
        cold: bool,
        piece_bytes: int,
        dtype: Casts | None = None,
    ) -> None:
        self._mapped = mapped
        self._copy = copy
        self._populates = populates
        self._cold = cold
        self._pacer = Pacer(piece_bytes)
        self._dtype = dtype
        self.label = "populate" if populates else "map"
        """What a trace calls its reads."""

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Populate a block's range."""
        if not self._is_mapped(group):
            self._copy.read(group, block, stopped)
            return
        if not self._populates:
            return
        for start, length in self._pacer.pieces(block.nbytes, stopped):
            self._mapped.populate(block.offset + start, length)
            if self._cold:
                self._mapped.touch(block.offset + start, length)

    def settle(self, block: Block, settled: Callable[[Block], None]) -> None:
        """Say that the block is there."""
        settled(block)

    def finish(self, group: Group) -> LoadedGroup:
        """Make tensors over the mapping."""
        if not self._is_mapped(group):
            return self._copy.finish(group)
        region = self._mapped.region
        return LoadedGroup(_tensors(group, region.sub(group.offset, group.nbytes), self._dtype))

    def _is_mapped(self, group: Group) -> bool:
        """A mapping is read in pieces of 2 MiB: a smaller slice is copied, so that only its bytes leave the disk."""
        return group.offset >= 0 and not (group.sliced and group.nbytes < HUGE_PAGE_BYTES)

    def close(self) -> None:
        """Let go of the copying way's memory; the mapping belongs to its tensors."""
        self._copy.close()


@dataclass(slots=True, eq=False)
class _Coming:
    lock: threading.Lock = field(default_factory=threading.Lock)
    image: GroupMemory | None = None


class GroupMemories:
    """The device memory of groups under way, each allocated by the first who needs it; others wait for that one alone.

    Args:
        accelerator: The device.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        """The device."""
        self._coming: dict[int, _Coming] = {}

    def get(self, group: Group) -> GroupMemory:
        """Return a group's memory.

        Raises:
            DeviceMemoryError: The device is full.
        """
        coming = self._coming.get(group.index) or self._coming.setdefault(group.index, _Coming())
        with coming.lock:
            if coming.image is None:
                coming.image = GroupMemory.allocate(
                    self.accelerator, group.names, group.dtypes, group.shapes, group.offsets
                )
            return coming.image

    def pop(self, group: Group) -> GroupMemory:
        """Return a group's memory, whose copies are all queued, and forget it."""
        image = self.get(group)
        del self._coming[group.index]
        return image

    def clear(self) -> None:
        """Let go of all of it."""
        self._coming.clear()


class StagedPath:
    """File to staging memory to device, the next block being read while the last is copied.

    From an image that is kept the device copies directly.

    Args:
        source: The open file.
        images: The device's memory.
        stage: Its staging slots, shared by all files of the load.
        dtype: Cast to it on the device; see `stio.device.tensors.Casts`.
        kept: The file's image; it must be held until this is closed.
    """

    def __init__(
        self,
        source: Source,
        images: GroupMemories,
        stage: Staging,
        *,
        dtype: Casts | None = None,
        kept: CachedFile | None = None,
    ) -> None:
        self._reader = reader(source, kept)
        self._images = images
        self._stage = stage
        self._dtype = dtype

    label = "read"

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> float:
        """Read a block into a slot, or have it lent; return the seconds of waiting for a slot."""
        image = self._images.get(group)
        lent = self._reader.lend(block, stopped)
        if lent is not None:
            pairs = [pair for at, region in lent for pair in image.pairs(at, region)]
            self._stage.put(None, pairs, (image, block))
            return 0.0
        start = perf_counter()
        slot = self._stage.acquire(stopped)
        waited = perf_counter() - start
        if slot is None:
            return waited
        try:
            self._reader.read(group, block, slot, block.at, stopped)
            if stopped():
                raise Cancelled
            pairs = image.pairs(block.at, slot.sub(0, _landing_bytes(block)))
        except BaseException:
            self._stage.give_back(slot)
            raise
        self._stage.put(slot, pairs, (image, block))
        return waited

    def settle(self, block: Block, settled: Callable[[Block], None]) -> None:
        """Queue the copies of what was read, by whichever reader; say which blocks that were."""
        while (queued := self._stage.submit()) is not None:
            event, arrived = queued
            for image, _ in arrived:
                if event not in image.events[-1:]:
                    image.events.append(event)
            blocks = [one for _, one in arrived]
            del queued, arrived, image  # a consumer may drop a group's tensors while others are still settled here
            for one in blocks:
                settled(one)

    def finish(self, group: Group) -> LoadedGroup:
        """Return the device's tensors; the consumer's stream will wait for their last copy."""
        image, accelerator = self._images.pop(group), self._images.accelerator
        tensors, events = image.tensors, image.events
        if group.posts or self._dtype is not None:
            with accelerator.on_queue():
                tensors = finish(tensors, {group.names[k]: post for k, post in group.posts.items()}, self._dtype)
            events = [*events, accelerator.copy([])]  # a copy that failed is told by its own
        memory_in_use = [*tensors.values(), *image.shared]
        return LoadedGroup(tensors, lambda: accelerator.hand_over(memory_in_use, events), events)

    def close(self) -> None:
        """Wait for the copies under way; then nothing reads a slot or writes to the device any more."""
        try:
            self._stage.close()
        finally:
            self._images.clear()


class CacheFillPath:
    """File to its image, and no further.

    Args:
        source: The open file.
        kept: Its image.
    """

    def __init__(self, source: Source, kept: CachedFile) -> None:
        self._reader = CachedFileReader(source, kept)

    label = "read"

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Read a block into the image.

        Raises:
            MemoryError: There is no memory for it.
        """
        if not self._reader.bring(block, stopped):
            raise MemoryError("there is no host memory to keep the checkpoint in")

    def settle(self, block: Block, settled: Callable[[Block], None]) -> None:
        """Say that the block is there."""
        settled(block)

    def finish(self, group: Group) -> LoadedGroup:
        """Make no tensors."""
        return LoadedGroup({})

    def close(self) -> None:
        """Do nothing: who holds the image lets go of it."""


def _landing_bytes(block: Block) -> int:
    """Return how much of the image a block fills, from `block.at` on."""
    if not block.scatter:
        return block.nbytes
    return max(at + length for at, length in block.scatter if at != GAP) - block.at
