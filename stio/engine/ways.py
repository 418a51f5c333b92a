"""The ways in: what fills which memory, and where tensors come from.

A route joins one open file to one device. `MapRoute` leaves the bytes in the page cache and maps them,
`CopyRoute` reads them straight into the tensors' own memory, `StageRoute` reads into a device's staging memory
and lets the device copy. All three answer to the same three calls of the scheduler.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import torch

from stio import memory
from stio.device.base import Accelerator, Landed
from stio.device.staging import DeviceImage, Stage
from stio.device.tensors import Casts, finish, tensors_in
from stio.engine.runtime import Cancelled
from stio.memory import HUGE_PAGE_BYTES, PAGE_BYTES, Region
from stio.plan.read import GAP, Block, Group
from stio.storage.base import Source
from stio.storage.mapped import MappedFile

__all__ = ["CopyRoute", "MapRoute", "Pacer", "StageRoute"]

_PIECE_SECONDS = 0.02
_SMALLEST_PIECE_BYTES = 1 << 20


@dataclass
class Pacer:
    """Cuts a block into pieces of about 20 ms each.

    Longer calls return less often to Python, where each return may wait a switch interval; shorter ones let a
    cancel through sooner. One pacer serves a file, so what one worker learns of its speed helps the others.
    """

    piece_bytes: int = 32 << 20
    """What the next piece should measure."""

    def pieces(self, nbytes: int, stopped: Callable[[], bool]) -> Iterator[tuple[int, int]]:
        """Yield (start, length) of pieces until all is covered or `stopped()`; times each piece."""
        at = 0
        while at < nbytes and not stopped():
            step = min(self.piece_bytes, nbytes - at)
            if nbytes - at - step < _SMALLEST_PIECE_BYTES:
                step = nbytes - at  # no crumbs
            begin = perf_counter()
            yield at, step
            self._learn(step, perf_counter() - begin)
            at += step

    def _learn(self, nbytes: int, seconds: float) -> None:
        if nbytes >= self.piece_bytes and seconds < _PIECE_SECONDS / 2:
            self.piece_bytes *= 2
        elif seconds > _PIECE_SECONDS * 4 and self.piece_bytes > _SMALLEST_PIECE_BYTES:
            self.piece_bytes = max(_SMALLEST_PIECE_BYTES, self.piece_bytes // 2)


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


class _Reader:
    """Brings a block's bytes from a source into the image of its group.

    Args:
        source: The open file.
    """

    def __init__(self, source: Source) -> None:
        self.source = source
        self._pacer = Pacer()
        self._trash: Region | None = None

    def read(self, group: Group, block: Block, target: Region, base: int, stopped: Callable[[], bool]) -> None:
        """Fill `target`, whose first byte is the image's byte `base`, with what the block brings."""
        if block.scatter:
            self.source.read_into(
                block.offset, [self._landing(target, at - base, length, at) for at, length in block.scatter]
            )
            return
        start, nbytes = block.at - base, block.nbytes
        if group.offset >= 0:
            # The page that a dense image's end shares with the next group is read whole: direct reads stay direct.
            whole = -(-nbytes // PAGE_BYTES) * PAGE_BYTES
            nbytes = max(nbytes, min(whole, target.nbytes - start, self.source.identity.nbytes - block.offset))
        for at, length in self._pacer.pieces(nbytes, stopped):
            self.source.read_into(block.offset + at, [target.sub(start + at, length)])

    def _landing(self, target: Region, start: int, length: int, at: int) -> Region:
        if at != GAP:
            return target.sub(start, length)
        if self._trash is None or self._trash.nbytes < length:
            self._trash = memory.allocate(max(length, 1 << 20))  # what lands here is never looked at: shared
        return self._trash.sub(0, length)


class CopyRoute:
    """File to memory of the tensors' own, without a stop between.

    Args:
        source: The open file.
        dtype: Cast to it; see `stio.device.tensors.Casts`.
    """

    def __init__(self, source: Source, *, dtype: Casts | None = None) -> None:
        self._reader = _Reader(source)
        self._images = _Images()
        self._dtype = dtype

    label = "read"

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Read a block into its group's image."""
        self._reader.read(group, block, self._images.get(group), 0, stopped)

    def finish(self, group: Group) -> Landed:
        """Make tensors over the image."""
        return Landed(_tensors(group, self._images.pop(group), self._dtype))

    def close(self) -> None:
        """Let go of images that were never finished."""
        self._images.regions.clear()


class MapRoute:
    """File to page cache, mapped; what is not contiguous in the file goes the copying way.

    Args:
        source: The open file.
        mapped: Its mapping.
        copy: The way for scattered groups.
        populates: Read it now; otherwise each page is read when it is touched.
        piece_bytes: What the first call should populate; later ones by how long that took.
        dtype: Cast to it; see `stio.device.tensors.Casts`.
    """

    def __init__(
        self,
        mapped: MappedFile,
        copy: CopyRoute,
        *,
        populates: bool,
        piece_bytes: int,
        dtype: Casts | None = None,
    ) -> None:
        self._mapped = mapped
        self._copy = copy
        self._populates = populates
        self._pacer = Pacer(piece_bytes)
        self._dtype = dtype

    label = "populate"

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Populate a block's range."""
        if not self._is_mapped(group):
            self._copy.read(group, block, stopped)
            return
        if not self._populates:
            return
        for start, length in self._pacer.pieces(block.nbytes, stopped):
            self._mapped.populate(block.offset + start, length)

    def finish(self, group: Group) -> Landed:
        """Make tensors over the mapping."""
        if not self._is_mapped(group):
            return self._copy.finish(group)
        region = self._mapped.region
        return Landed(_tensors(group, region.sub(group.offset, group.nbytes), self._dtype))

    def _is_mapped(self, group: Group) -> bool:
        """A mapping is read in pieces of 2 MiB: a smaller slice is copied, so that only its bytes leave the disk."""
        return group.offset >= 0 and not (group.sliced and group.nbytes < HUGE_PAGE_BYTES)

    def close(self) -> None:
        """Let go of the copying way's memory; the mapping belongs to its tensors."""
        self._copy.close()


class StageRoute:
    """File to staging memory to device, the next block being read while the last is copied.

    Args:
        source: The open file.
        accelerator: The device.
        stage: Its staging slots, shared by all files of the load.
        dtype: Cast to it on the device; see `stio.device.tensors.Casts`.
    """

    def __init__(self, source: Source, accelerator: Accelerator, stage: Stage, *, dtype: Casts | None = None) -> None:
        self._reader = _Reader(source)
        self._accelerator = accelerator
        self._stage = stage
        self._dtype = dtype
        self._lock = threading.Lock()
        self._images: dict[int, DeviceImage] = {}

    label = "read"

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Read a block into a slot and queue its copies."""
        slot = self._stage.acquire(stopped)
        if slot is None:
            return
        try:
            self._reader.read(group, block, slot, block.at, stopped)
            if stopped():
                raise Cancelled
            pairs = self._image(group).pairs(block.at, slot.sub(0, _landing_bytes(block)))
        except BaseException:
            self._stage.give_back(slot)
            raise
        event = self._stage.submit(slot, pairs)
        with self._lock:
            self._images[group.index].events.append(event)

    def finish(self, group: Group) -> Landed:
        """Return the device's tensors; the consumer's stream will wait for their last copy."""
        image = self._image(group)
        with self._lock:
            del self._images[group.index]
        tensors, events = image.tensors, image.events
        if group.posts or self._dtype is not None:
            with self._accelerator.on_queue():
                tensors = finish(tensors, {group.names[k]: post for k, post in group.posts.items()}, self._dtype)
            events = [self._accelerator.copy([])]
        accelerator, memory_in_use = self._accelerator, [*tensors.values(), *image.shared]
        return Landed(tensors, lambda: accelerator.hand_over(memory_in_use, events), events)

    def close(self) -> None:
        """Wait for the copies under way; then nothing reads a slot or writes to the device any more."""
        try:
            self._stage.close()
        finally:
            self._images.clear()

    def _image(self, group: Group) -> DeviceImage:
        with self._lock:
            image = self._images.get(group.index)
            if image is None:
                image = DeviceImage.allocate(self._accelerator, group.names, group.dtypes, group.shapes, group.offsets)
                self._images[group.index] = image
            return image


def _landing_bytes(block: Block) -> int:
    """Return how much of the image a block fills, from `block.at` on."""
    if not block.scatter:
        return block.nbytes
    return max(at + length for at, length in block.scatter if at != GAP) - block.at
