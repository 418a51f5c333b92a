"""Read paths: from an open file to the tensors of one device.

`MappedPath` maps the file, so the bytes stay in the page cache. `CopiedPath` reads into memory of the tensors' own.
`DevicePath` reads into memory of a device; `GdsPath`, in `gds_path`, without host memory. `CacheFillPath` reads into a
cache and makes no tensors. The scheduler calls `begin` for groups, an executor moves their bytes, then `make_tensors`
is called.

The engine (`engine.py`) moves what `add_ranges` describes. The plain executor (`plain.py`) calls `read` for each block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from time import perf_counter
from typing import TypeGuard

import torch

from stio import native
from stio.device import (
    TORCH_DTYPES,
    Accelerator,
    Casts,
    DeviceRing,
    GroupMemory,
    LoadedGroup,
    Lost,
    select_and_cast,
    tensors_in,
)
from stio.errors import StioError
from stio.format import BITS
from stio.limits import HUGE_PAGE_BYTES, PAGE_BYTES
from stio.loading.plan import GAP, Block, Group
from stio.runtime import Cancelled, memory
from stio.runtime.memory import Region
from stio.runtime.reports import Trace, counters
from stio.storage import LocalFile, MappedFile, RequestedSource, Source
from stio.storage.checkpoint import CachedFile, Changes, FileImage, apply_changes

_MIN_IMAGE_BYTES = 2 << 20  # of one tensor: a shorter one is copied by this thread, which costs less

PIECE_BYTES = 8 << 20
"""Bytes that the plain executor reads in one call: a cancel takes effect between two of them."""


# Blocks.


def contiguous(block: Block) -> Iterator[tuple[int, int, int]]:
    """Return a block's contiguous parts: offset in the file, offset in the image, length."""
    position = block.offset
    for at, length in block.scatter or ((block.at, block.nbytes),):
        if at != GAP and length:
            yield position, at, length
        position += length


def reads_of(block: Block, max_bytes: int) -> Iterator[list[tuple[int, int, int]]]:
    """Cut a block into reads: lists of ranges as of `contiguous`, over so many bytes of file and image at most."""
    read: list[tuple[int, int, int]] = []
    for offset, at, length in contiguous(block):
        for start in range(0, length, max_bytes):
            nbytes = min(max_bytes, length - start)
            end, end_at = offset + start + nbytes, at + start + nbytes
            if read and max(end - read[0][0], end_at - read[0][1]) > max_bytes:
                yield read
                read = []
            read.append((offset + start, at + start, nbytes))
    if read:
        yield read


def read_ranges(source: Source, read: Sequence[tuple[int, int, int]], target: Region, base: int) -> None:
    """Fill `target`, which holds the group's bytes from `base` on, in one call; gaps of the file are discarded."""
    ends = [offset + length for offset, _, length in read]
    gaps = [0, *(begin - end for (begin, _, _), end in zip(read[1:], ends, strict=False))]
    discarded = memory.allocate(max(gaps)) if any(gaps) else target
    regions: list[Region] = []
    for gap, (_, at, length) in zip(gaps, read, strict=True):
        regions += [discarded.sub(0, gap)] * (gap > 0) + [target.sub(at - base, length)]
    source.read_into(read[0][0], regions)


# Tensors.


def elements_in(changes: Changes, dtype: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tensors over changed elements: codes, U8 or U16, and values of this dtype."""
    num_codes = changes.codes.nbytes // changes.code_bytes
    codes = tensors_in(changes.codes, [""], [f"U{8 * changes.code_bytes}"], [(num_codes,)], [0])[""]
    count = changes.values.nbytes * 8 // BITS[dtype]
    return codes, tensors_in(changes.values, [""], [dtype], [(count,)], [0])[""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """How the consumer of a load gets its tensors."""

    deliver: Callable[[Group, LoadedGroup], object] = lambda group, loaded: None
    """Called on the thread of the load with each group and its tensors."""
    hold: bool = False
    """The budget of a group is released only when the consumer calls `LoadScheduler.release` too (streams)."""
    on_blocked: Callable[[], object] = lambda: None
    """Called when `LoadScheduler.is_blocked` may have become true. It must take no lock."""
    keeps: bool = True
    """The consumer keeps the tensors: all must fit into memory at once, and memory that they own is not under way."""
    views: bool = False
    """On the CPU, selected parts are views of what was read: for a consumer that copies them and keeps none."""
    copied: AbstractSet[str] = frozenset()
    """Names of tensors whose bytes the consumer copies as they are, into memory of the same device. Of a group of these
    only it gets the bytes, and no tensors (`LoadedGroup.image`). Each is a name that has data."""
    prompt: bool = False
    """Make small groups, so that the first ones are loaded early. Otherwise large ones, for a short load."""
    casts: Casts | None = None
    """What the load casts, None: nothing; set when it is planned."""
    lost: Lost = field(default_factory=Lost)
    """Values that the casts of the load have lost; set when it is planned."""

    def finish(self, group: Group, tensors: dict[str, torch.Tensor], *, views: bool = False) -> dict[str, torch.Tensor]:
        """Return what the consumer gets for what was read of a group: selections and casts are made."""
        posts = {group.names[k]: post for k, post in group.posts.items()}
        return select_and_cast(tensors, posts, self.casts, self.lost, views=views)


AS_READ = Delivery()


class ReadPath:
    """How one file is read for one device.

    Args:
        source: The open file.
        delivery: How the consumer gets the tensors.
        cached: The file in a cache.
    """

    label = "read"
    """Name of its reads in a trace."""
    _max_bytes = sys.maxsize  # of a read by the plain executor

    def __init__(self, source: Source, delivery: Delivery = AS_READ, cached: CachedFile | None = None) -> None:
        self._source = source
        self._delivery = delivery
        self.memory: object = None
        """What its groups are allocated from; None: of its own. Groups of paths with the same one begin in one call."""
        self.image = None if cached is None else cached.image
        """The file in a cache. The engine fills it first; what there is no memory for is read from the file."""
        is_there = self.image is not None and self.image.holds(0, self.image.nbytes)
        is_local = getattr(type(source), "read_into", None) is LocalFile.read_into  # also one of `DiskCache`
        self.is_native = (is_there or is_local) and native.available()
        """Whether the engine can move its bytes."""

    @property
    def file(self) -> LocalFile:
        """The file, of a native path."""
        assert isinstance(self._source, LocalFile)
        return self._source

    def begin(self, groups: Sequence[Group]) -> None:
        """Allocate the memory of groups of all paths with the same `memory`. Called on the thread of the scheduler.

        Raises:
            HostMemoryError: There is too little memory (`DeviceMemoryError` on a device).
        """
        raise NotImplementedError

    def add_ranges(self, group: Group, ranges: native.Ranges) -> None:
        """Add the bytes of a group that has begun; nothing if there is nothing to read."""
        raise NotImplementedError

    def error(self, failure: native.Failure) -> StioError:
        """Return the error of the engine for one of its groups, to be raised."""
        return read_error(self._source, failure)

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Read a block into the memory of its group, for any thread and stream. Called by several workers at once.

        Raises:
            Cancelled: `stopped()` came first.
        """
        image = self.image
        if image is not None and fill_image(self._source, image, block, stopped):
            self._copy(group, image_regions(image, block), stopped)
            return
        # A request behind a network is not cut for a cancel.
        max_bytes = sys.maxsize if isinstance(self._source, RequestedSource) else PIECE_BYTES
        for read in reads_of(block, min(max_bytes, self._max_bytes)):
            require_not_stopped(stopped)
            self._read(group, read, stopped)

    def _copy(self, group: Group, regions: Iterable[tuple[int, Region]], stopped: Callable[[], bool]) -> None:
        """Copy regions of host memory, each with its offset in the group, into the group's memory."""
        raise NotImplementedError

    def _read(self, group: Group, read: Sequence[tuple[int, int, int]], stopped: Callable[[], bool]) -> None:
        """Read ranges of the file, as `reads_of` returns them, into the group's memory."""
        raise NotImplementedError

    def apply(
        self, group: Group, changes: Sequence[Changes], num_elements: int, pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        """Write changed elements of a tensor into the memory of a group whose bytes are there; see `apply_changes`.

        Called on another thread than the scheduler's, on one at a time for a group. The changes may be dropped then.

        Args:
            group: The group.
            changes: Of one tensor, the oldest first, in scratch memory.
            num_elements: Number of elements of the whole tensor.
            pieces: What the group has of it: first element, number of elements, offset in the image.

        Raises:
            FormatError: The changes do not fit the tensor; none was applied.
        """
        raise NotImplementedError

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Make the tensors of a group whose bytes are there. Called on the thread of the scheduler."""
        raise NotImplementedError

    def budget_bytes(self, group: Group) -> int:
        """Return how much of the load's budget a group uses: its memory, if it is not what the consumer keeps."""
        delivery = self._delivery
        return 0 if delivery.keeps and delivery.casts is None and not group.posts else group.nbytes

    def held_bytes(self, group: Group) -> int:
        """Return how much host memory the tensors of a group will hold; pages of the page cache do not count."""
        return 0

    def complete(self) -> None:
        """Release what only further groups would need: the tensors of the last one have been made."""

    def close(self) -> None:
        """Release memory. Nothing is under way any more."""


class CopiedPath(ReadPath):
    """Reads a file into separate memory of the tensors, directly or through the file's image in a cache.

    Args:
        source: The open file.
        delivery: See `ReadPath`.
        cached: See `ReadPath`.
    """

    def __init__(self, source: Source, delivery: Delivery = AS_READ, cached: CachedFile | None = None) -> None:
        super().__init__(source, delivery, cached)
        self._regions: dict[int, Region] = {}  # by group

    def begin(self, groups: Sequence[Group]) -> None:
        """Allocate the image of each group."""
        for group in groups:
            with memory.reporting_shortage(self._source.path):
                # To the end of a page: direct reads move whole pages.
                nbytes = -(-group.nbytes // PAGE_BYTES) * PAGE_BYTES
                self._regions[group.index] = memory.allocate(nbytes) if nbytes else Region(0, 0)

    def add_ranges(self, group: Group, ranges: native.Ranges) -> None:
        """Add the group's bytes of the file. An image of whole pages is read by whole pages, as direct reads are."""
        region = self._regions[group.index]
        for block in group.blocks:
            if is_in_image(self.image, block):
                for at, source in image_regions(self.image, block):
                    ranges.host_to_host(group.index, source.address, source.nbytes, region.address + at)
                continue
            file = self.file
            for offset, at, length in contiguous(block):
                if group.offset >= 0 and at + length == group.nbytes:
                    length = max(length, min(region.nbytes - at, file.identity.nbytes - offset))
                ranges.file_to_host(group.index, file.fd, file.direct_fd, offset, length, region.address + at)

    def _copy(self, group: Group, regions: Iterable[tuple[int, Region]], stopped: Callable[[], bool]) -> None:
        for at, region in regions:
            require_not_stopped(stopped)
            target = self._regions[group.index].sub(at, region.nbytes)
            memory.move(target.address, region.address, region.nbytes)

    def _read(self, group: Group, read: Sequence[tuple[int, int, int]], stopped: Callable[[], bool]) -> None:
        read_ranges(self._source, read, self._regions[group.index], 0)

    def apply(
        self, group: Group, changes: Sequence[Changes], num_elements: int, pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        """See `ReadPath.apply`."""
        address = self._regions[group.index].address
        apply_changes(changes, num_elements, [(first, number, address + at) for first, number, at in pieces])

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Make tensors over the group's memory, which they own together."""
        return self._tensors_over(group, self._regions.pop(group.index))

    def _tensors_over(self, group: Group, region: Region) -> LoadedGroup:
        delivery = self._delivery
        with memory.reporting_shortage(self._source.path):
            is_worthwhile = len(group.names) > 1 or group.nbytes >= _MIN_IMAGE_BYTES
            if is_worthwhile and delivery.copied and GroupMemory.is_copied_whole(group, delivery.copied):
                whole = tensors_in(region, [""], ["U8"], [(group.nbytes,)], [0])
                return LoadedGroup({}, GroupMemory.image_over(whole[""], group))
            tensors = tensors_in(region, group.names, group.dtypes, group.shapes, group.offsets)
            if delivery.casts is not None or group.posts:
                tensors = delivery.finish(group, tensors, views=delivery.views)
            return LoadedGroup(tensors)

    def held_bytes(self, group: Group) -> int:
        """See `ReadPath.held_bytes`."""
        is_mapped, casts = self._is_mapped(group), self._delivery.casts
        if casts is None and not group.posts:
            return 0 if is_mapped else group.nbytes
        total = 0
        for k, (name, stored, shape) in enumerate(zip(group.names, group.dtypes, group.shapes, strict=True)):
            own = TORCH_DTYPES[stored]
            wanted = own if casts is None else casts.dtype(name, own)
            post = group.posts.get(k)
            if wanted != own or post is not None or not is_mapped:
                num_bits = BITS[stored] if wanted == own else wanted.itemsize * 8
                total += prod(shape if post is None else post.shape) * num_bits // 8
        return total

    def _is_mapped(self, group: Group) -> bool:
        """Return whether the tensors of a group use the page cache."""
        return False

    def close(self) -> None:
        """Release the memory of groups that were not completed."""
        self._regions.clear()


class MappedPath(CopiedPath):
    """Maps a file, so that its tensors use the page cache. Slices that are not contiguous in the file are copied.

    Args:
        mapped: The mapping of the file.
        delivery: See `ReadPath`.
        populates: Read now; otherwise each page is read at its first access.
        cold: The disk limits the rate, so there is time to touch each page after its read.
    """

    def __init__(self, mapped: MappedFile, delivery: Delivery = AS_READ, *, populates: bool, cold: bool) -> None:
        # A copy out of pages that are not populated waits for the disk, and would stop threads of the engine.
        super().__init__(mapped.file, delivery if populates else replace(delivery, copied=frozenset()))
        self._mapped = mapped
        self._populates = populates
        self._cold = cold
        self.label = "populate" if populates else "map"

    def begin(self, groups: Sequence[Group]) -> None:
        """Allocate the images of scattered groups."""
        if copied := [group for group in groups if not self._is_mapped(group)]:
            super().begin(copied)

    def add_ranges(self, group: Group, ranges: native.Ranges) -> None:
        """Add the group's pages."""
        if not self._is_mapped(group):
            super().add_ranges(group, ranges)
        elif self._populates and group.nbytes:
            flags = native.POPULATE | (native.TOUCH if self._cold else 0)
            address = self._mapped.region.address + group.offset
            ranges.file_to_host(group.index, self._mapped.file.fd, -1, group.offset, group.nbytes, address, flags)

    def complete(self) -> None:
        """Release the mapping, whose pages count as memory of the process while it or one of its tensors is there."""
        del self._mapped

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Populate a block's range of the mapping."""
        if not self._is_mapped(group):
            super().read(group, block, stopped)
            return
        for start in range(0, block.nbytes, PIECE_BYTES) if self._populates else ():
            require_not_stopped(stopped)
            self._mapped.populate(block.offset + start, min(PIECE_BYTES, block.nbytes - start))

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Make tensors over the mapping, which they own together."""
        if not self._is_mapped(group):
            return super().make_tensors(group)
        return self._tensors_over(group, self._mapped.region.sub(group.offset, group.nbytes))

    def _is_mapped(self, group: Group) -> bool:
        """Return whether a group is mapped. A mapping reads 2 MiB at a time: a smaller slice is copied instead."""
        return group.offset >= 0 and not (group.sliced and group.nbytes < HUGE_PAGE_BYTES)


class StagingSlots:
    """What the read paths of a load share for one device: the memory of groups that have begun, and staging memory.

    Staging memory is a slot for each worker of the plain executor that copies to the device.

    Args:
        accelerator: The device, which allocates the slots.
        slot_bytes: Size of a slot.
    """

    def __init__(self, accelerator: Accelerator, slot_bytes: int) -> None:
        self.accelerator = accelerator
        """The device."""
        self.slot_bytes = slot_bytes
        """Size of a slot."""
        self.held_bytes = 0
        """Size of all slots."""
        self.memories: dict[int, GroupMemory] = {}
        """The memory of groups under way, by their numbers."""
        self._slots: list[Region] = []
        self._free: list[Region] = []
        counters.add_holder(self)

    def take(self) -> Region:
        """Return a free slot.

        Raises:
            HostMemoryError: There is no memory for one.
        """
        try:
            return self._free.pop()
        except IndexError:
            with memory.reporting_shortage():
                slot = self.accelerator.staging(self.slot_bytes)
            self._slots.append(slot)
            self.held_bytes = self.slot_bytes * len(self._slots)
            return slot

    def give(self, slot: Region) -> None:
        """Give a slot back that no copy reads."""
        self._free.append(slot)

    def close(self) -> None:
        """Release all slots, and the memory of groups under way."""
        self.memories.clear()
        self._free.clear()
        self._slots.clear()
        self.held_bytes = 0


class DevicePath(ReadPath):
    """Reads a file into the memory of a device.

    If a cache has the bytes of a block, the device copies from the cache.

    Args:
        source: The open file.
        slots: The device, and staging memory for the plain executor, for all files of the load.
        delivery: See `ReadPath`.
        cached: See `ReadPath`.
        trace: Records spans of copies by the plain executor.
    """

    def __init__(
        self,
        source: Source,
        slots: StagingSlots,
        delivery: Delivery = AS_READ,
        cached: CachedFile | None = None,
        *,
        trace: Trace | None = None,
    ) -> None:
        super().__init__(source, delivery, cached)
        self._slots = slots
        self.memory = slots
        self._accelerator = slots.accelerator
        self._trace = trace
        self._memories = slots.memories
        self._max_bytes = slots.slot_bytes
        self._ring: DeviceRing | None = DeviceRing.of(self._accelerator) if self.is_native else None
        self.is_native = self._ring is not None

    def begin(self, groups: Sequence[Group]) -> None:
        """Allocate the tensors of groups, in one call."""
        copied = self._delivery.copied if self._ring is not None else frozenset()
        with memory.reporting_shortage(self._source.path):
            memories = GroupMemory.allocate(self._accelerator, groups, copied)
        self._memories.update((group.index, one) for group, one in zip(groups, memories, strict=True))

    def add_ranges(self, group: Group, ranges: native.Ranges) -> None:
        """Add the bytes of each tensor."""
        target, ring = self._memories[group.index], self._ring
        assert ring is not None
        for block in group.blocks:
            if is_in_image(self.image, block):
                for begin, region in image_regions(self.image, block):
                    for tensor, start, low, nbytes in target.places(begin, region.nbytes):
                        source, where = region.address + low - begin, tensor.data_ptr() + start
                        ranges.host_to_device(group.index, source, nbytes, where, ring.ring)
                continue
            file = self.file
            for offset, at, length in contiguous(block):
                for tensor, start, low, nbytes in target.places(at, length):
                    where = tensor.data_ptr() + start
                    begin, cufile = offset + low - at, self.cufile(block, nbytes)
                    ranges.file_to_device(group.index, file.fd, file.direct_fd, begin, nbytes, where, ring.ring, cufile)

    def cufile(self, block: Block, nbytes: int) -> native.CuFile | None:
        """Return what reads so many bytes of a block instead of the ring: nothing."""
        return None

    def error(self, failure: native.Failure) -> StioError:
        """Return the error of a read or of a copy."""
        if failure.kind == native.DRIVER and self._ring is not None:
            return self._ring.error(failure)
        return super().error(failure)

    def _read(self, group: Group, read: Sequence[tuple[int, int, int]], stopped: Callable[[], bool]) -> None:
        """Read into a slot, and copy from there."""
        begin, end = read[0][1], read[-1][1] + read[-1][2]
        slot = self._slots.take()
        read_ranges(self._source, read, slot, begin)
        self._copy(group, [(begin, slot.sub(0, end - begin))], stopped)
        self._slots.give(slot)  # not after a failed copy: the device may read it

    def _copy(self, group: Group, regions: Iterable[tuple[int, Region]], stopped: Callable[[], bool]) -> None:
        """Copy to the device, and wait for that."""
        target, start = self._memories[group.index], perf_counter()
        pairs = [pair for at, region in regions for pair in target.copies(at, region)]
        self._accelerator.copy(pairs).synchronize()
        if self._trace is not None:
            nbytes = sum(region.nbytes for _, region in pairs)
            self._trace.add("copy", start, perf_counter(), num_bytes=nbytes, lane="copy")

    def apply(
        self, group: Group, changes: Sequence[Changes], num_elements: int, pieces: Sequence[tuple[int, int, int]]
    ) -> None:
        """See `ReadPath.apply`. The positions are decoded on the device; when this returns, all is done there."""
        apply_changes(changes, num_elements, [])  # checked on the host: nothing waits for the device
        with self._accelerator.on_stream():
            self._memories[group.index].write_changes(
                [(*elements_in(one, "U8"), one.item_bytes) for one in changes], pieces
            )
        self._accelerator.allocate([])  # copies wait for what is queued on the stream of the load
        self._accelerator.copy([]).synchronize()

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Return tensors on the device. Casts and selections are queued on the stream of the load."""
        made = self._memories.pop(group.index)
        tensors = made.tensors
        if self._ring is not None:
            self._ring.warn_if_refused()
        if made.image is None and (self._delivery.casts is not None or group.posts):
            with self._accelerator.on_stream():
                tensors = self._delivery.finish(group, tensors)
        return LoadedGroup(tensors, made.image)

    def close(self) -> None:
        """Release what all files of the load share; wait for the numbers of lost values, if there are some."""
        self._slots.close()
        lost = self._delivery.lost
        if any(isinstance(number, torch.Tensor) for number in lost.values()):
            with suppress(RuntimeError), self._accelerator.on_stream():  # of a device that does not answer
                device = self._accelerator.device
                own = {k: n for k, n in lost.items() if isinstance(n, torch.Tensor) and n.device == device}
                lost.update((name, int(number)) for name, number in own.items())


class CacheFillPath(ReadPath):
    """Reads a file into its image in a cache, without tensors.

    Args:
        source: The open file.
        cached: The file in the cache; its holder releases it.
    """

    def __init__(self, source: Source, cached: CachedFile) -> None:
        super().__init__(source, cached=cached)

    def begin(self, groups: Sequence[Group]) -> None:
        """Do nothing: the image allocates its memory."""

    def add_ranges(self, group: Group, ranges: native.Ranges) -> None:
        """Add nothing: the image is filled.

        Raises:
            HostMemoryError: The host has too little memory for it.
        """
        for block in group.blocks:
            if not is_in_image(self.image, block):
                raise self._shortage(block)

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Read a block into the image.

        Raises:
            HostMemoryError: The host has too little memory.
        """
        if self.image is None or not fill_image(self._source, self.image, block, stopped):
            raise self._shortage(block)

    def _shortage(self, block: Block) -> StioError:
        message = "the host has too little memory for the cache"
        return memory.memory_error(block.nbytes, message, path=self._source.path)

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Make no tensors."""
        return LoadedGroup({})

    def budget_bytes(self, group: Group) -> int:
        """Return 0: the image is the cache's memory."""
        return 0


# Images of cached files.


def fill_image(source: Source, image: FileImage, block: Block, stopped: Callable[[], bool]) -> bool:
    """Read the missing bytes of a block's range into the image; return False if there is no memory for them.

    Raises:
        Cancelled: `stopped()` came first.
    """
    try:
        while claimed := image.claim(block.offset, block.offset + block.nbytes, stopped):
            _read_claimed(source, image, claimed, stopped)
    except MemoryError:
        return False
    return True


def _read_claimed(source: Source, image: FileImage, claimed: range, stopped: Callable[[], bool]) -> None:
    done = claimed.start
    max_bytes = len(claimed) if isinstance(source, RequestedSource) else PIECE_BYTES
    try:
        for start in range(claimed.start, claimed.stop, max_bytes):
            require_not_stopped(stopped)
            length = min(max_bytes, claimed.stop - start)
            source.read_into(start, image.regions(start, length))
            done = start + length
            image.mark_present(claimed.start, done)
    finally:
        image.mark_missing(done, claimed.stop)


def require_not_stopped(stopped: Callable[[], bool]) -> None:
    """Raise `Cancelled` if a load was stopped."""
    if stopped():
        raise Cancelled


def is_in_image(image: FileImage | None, block: Block) -> TypeGuard[FileImage]:
    """Return whether a cache has all bytes of a block."""
    return image is not None and image.holds(block.offset, block.offset + block.nbytes)


def image_regions(image: FileImage, block: Block) -> Iterator[tuple[int, Region]]:
    """Return the image's memory of a block, each region with its offset in the group."""
    for offset, at, length in contiguous(block):
        for region in image.regions(offset, length):
            yield at, region
            at += region.nbytes


def read_error(source: Source, failure: native.Failure) -> StioError:
    """Return the error of a read by the engine, to be raised."""
    if failure.kind == native.NO_MEMORY:
        return memory.memory_error(failure.nbytes, "the host has too little memory for a copy", path=source.path)
    assert isinstance(source, LocalFile)
    return source.error(failure)
