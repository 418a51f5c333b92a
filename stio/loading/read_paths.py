"""Read paths: from an open file to the tensors of one device.

`MappedPath` maps the file, so the bytes stay in the page cache. `CopiedPath` reads into memory of the tensors' own.
`StagedPath` reads into staging memory of a device, and the device copies. `CacheFillPath` reads into a cache and makes
no tensors; `GdsPath` is in `gds_path`. The scheduler calls `read` for each block of a group, then `make_tensors`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from time import perf_counter
from typing import Generic, TypeVar

import torch

from stio.device.base import Accelerator, LoadedGroup
from stio.device.copy_queue import CopyQueue
from stio.device.group_memory import LARGE_BYTES, GroupMemory
from stio.device.tensors import TORCH_DTYPES, Casts, cast_dtype, select_and_cast, tensors_in
from stio.errors import DeviceMemoryError
from stio.format.dtypes import BITS
from stio.loading.cache.file_image import CachedFile
from stio.loading.plan import GAP, Block, Group
from stio.loading.readers import CachedBlockReader, block_reader
from stio.loading.sizes import BLOCK_BYTES
from stio.runtime import memory
from stio.runtime.limits import HUGE_PAGE_BYTES, PAGE_BYTES
from stio.runtime.locks import new_lock
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled
from stio.runtime.pacing import Pacer
from stio.storage.base import Source
from stio.storage.mapped import MappedFile

M = TypeVar("M")


@dataclass(slots=True, eq=False)
class _Entry(Generic[M]):
    lock: threading.Lock = field(default_factory=threading.Lock)
    memory: M | None = None


class GroupMemories(Generic[M]):
    """Memory of groups under way. The first thread that needs a group's memory allocates it, while others wait.

    Args:
        allocate: Allocates the memory of a group.
        release: Releases what was allocated and not returned.
    """

    def __init__(self, allocate: Callable[[Group], M], release: Callable[[], None] = lambda: None) -> None:
        self._allocate = allocate
        self._release = release
        self._entries: dict[int, _Entry[M]] = {}

    def get(self, group: Group) -> M:
        """Return a group's memory.

        Raises:
            HostMemoryError: There is too little memory (`DeviceMemoryError` on a device).
        """
        entry = self._entries.get(group.index) or self._entries.setdefault(group.index, _Entry())
        with entry.lock:  # of this group alone: others are allocated at the same time
            if entry.memory is None:
                entry.memory = self._allocate(group)
            return entry.memory

    def pop(self, group: Group) -> M:
        """Return a group's memory, and remove it here. All its blocks have been read or submitted."""
        found = self.get(group)
        del self._entries[group.index]
        return found

    def clear(self) -> None:
        """Release all of it."""
        self._entries.clear()
        self._release()


def device_memories(
    accelerator: Accelerator, groups: Sequence[Group], *, ahead_bytes: int
) -> GroupMemories[GroupMemory]:
    """Return the memory of a file's groups on a device.

    Args:
        accelerator: The device.
        groups: All groups of the file, in the plan's order.
        ahead_bytes: Allocate for so many bytes of the following groups in one call: a call may wait for the GIL.
    """
    waiting = {group.index: group for group in groups}
    made: dict[int, GroupMemory] = {}
    allocating = new_lock()

    def allocate(group: Group) -> GroupMemory:
        with allocating:
            if group.index not in made:
                waiting.pop(group.index, None)
                ahead = _first(waiting.values(), ahead_bytes - group.nbytes)
                with memory.reporting_shortage():
                    try:
                        memories = GroupMemory.allocate(accelerator, [group, *ahead])
                    except DeviceMemoryError:
                        ahead = []  # a group that is complete may release memory
                        memories = GroupMemory.allocate(accelerator, [group])
                for one, its_memory in zip([group, *ahead], memories, strict=True):
                    made[one.index] = its_memory
                    waiting.pop(one.index, None)
            return made.pop(group.index)

    return GroupMemories(allocate, made.clear)


def _first(groups: Iterable[Group], nbytes: int) -> list[Group]:
    """Return the first groups that have no more than so many bytes together."""
    found: list[Group] = []
    for group in groups:
        nbytes -= group.nbytes
        if nbytes < 0:
            break
        found.append(group)
    return found


def host_memories(path: str) -> GroupMemories[Region]:
    """Return the memory of groups on the host; `path` is the file that they are read from, for errors."""

    def allocate(group: Group) -> Region:
        if not group.nbytes:
            return Region(0, 0)
        with memory.reporting_shortage(path):
            # To the end of a page: direct reads move whole pages.
            return memory.allocate(-(-group.nbytes // PAGE_BYTES) * PAGE_BYTES)

    return GroupMemories(allocate)


def _tensors_of(
    group: Group, region: Region, dtype: Casts | None, path: str, *, views: bool
) -> dict[str, torch.Tensor]:
    with memory.reporting_shortage(path):
        tensors = tensors_in(region, group.names, group.dtypes, group.shapes, group.offsets)
        return _finished(group, tensors, dtype, views=views)


def _held_bytes(group: Group, dtype: Casts | None, *, is_mapped: bool) -> int:
    """Return how much memory the tensors of a group on the host will hold, those over its image included."""
    if not group.posts and dtype is None:
        return 0 if is_mapped else group.nbytes
    total = 0
    for k, (name, stored, shape) in enumerate(zip(group.names, group.dtypes, group.shapes, strict=True)):
        own = TORCH_DTYPES[stored]
        wanted = own if dtype is None else cast_dtype(name, own, dtype)
        post = group.posts.get(k)
        if wanted != own:
            total += prod(shape if post is None else post.shape) * wanted.itemsize
        elif post is not None or not is_mapped:
            total += prod(shape if post is None else post.shape) * BITS[stored] // 8
    return total


def _finished(
    group: Group, tensors: dict[str, torch.Tensor], dtype: Casts | None, *, views: bool = False
) -> dict[str, torch.Tensor]:
    if not group.posts and dtype is None:
        return tensors
    posts = {group.names[k]: post for k, post in group.posts.items()}
    return select_and_cast(tensors, posts, dtype, views=views)


class CopiedPath:
    """Reads a file into separate memory of the tensors, directly or through the file's image in a cache.

    Args:
        source: The open file.
        dtype: Cast to it; see `stio.device.tensors.Casts`.
        cached: The file in the cache.
        views: See `stio.device.tensors.select_and_cast`.
    """

    label = "read"

    def __init__(
        self, source: Source, *, dtype: Casts | None = None, cached: CachedFile | None = None, views: bool = False
    ) -> None:
        self._reader = block_reader(source, cached)
        self._memories = host_memories(source.path)
        self._dtype = dtype
        self._path = source.path
        self._views = views

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Read a block into its group's memory."""
        self._reader.read(group, block, self._memories.get(group), 0, stopped)

    def complete(self, block: Block, arrived: Callable[[Block], None]) -> None:
        """Report a block, which is complete when it is read."""
        arrived(block)

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Make tensors over the group's memory, which they own together."""
        return LoadedGroup(_tensors_of(group, self._memories.pop(group), self._dtype, self._path, views=self._views))

    def budget_bytes(self, group: Group) -> int:
        """Return the size of the group's image."""
        return group.nbytes

    def held_bytes(self, group: Group) -> int:
        """Return how much host memory the tensors of a group will hold."""
        return _held_bytes(group, self._dtype, is_mapped=False)

    def close(self) -> None:
        """Release the memory of groups that were not completed."""
        self._memories.clear()


class MappedPath:
    """Maps a file, so that its tensors use the page cache. Slices that are not contiguous in the file are copied.

    Args:
        mapped: The mapping of the file.
        copy: The read path of scattered groups.
        populates: Read now; otherwise each page is read at its first access.
        cold: The disk limits the rate, so there is time to touch each page after its read.
        piece_bytes: Bytes that the first call populates; later calls depend on how long that took.
        dtype: Cast to it; see `stio.device.tensors.Casts`.
        views: See `stio.device.tensors.select_and_cast`.
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
        views: bool = False,
    ) -> None:
        self._mapped = mapped
        self._views = views
        self._copy = copy
        self._populates = populates
        self._cold = cold
        self._pacer = Pacer(piece_bytes)
        self._dtype = dtype
        self.label = "populate" if populates else "map"
        """Name of its reads in a trace."""

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Populate a block's range of the mapping."""
        if not self._is_mapped(group):
            self._copy.read(group, block, stopped)
            return
        if not self._populates:
            return
        for start, length in self._pacer.pieces(block.nbytes, stopped):
            self._mapped.populate(block.offset + start, length)
            if self._cold:
                self._mapped.touch(block.offset + start, length)

    def complete(self, block: Block, arrived: Callable[[Block], None]) -> None:
        """Report a block, which is complete when it is read."""
        arrived(block)

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Make tensors over the mapping, which they own together."""
        if not self._is_mapped(group):
            return self._copy.make_tensors(group)
        region = self._mapped.region.sub(group.offset, group.nbytes)
        return LoadedGroup(_tensors_of(group, region, self._dtype, self._mapped.path, views=self._views))

    def budget_bytes(self, group: Group) -> int:
        """Return the size of the group's image."""
        return group.nbytes

    def held_bytes(self, group: Group) -> int:
        """Return how much host memory the tensors of a group will hold beside the mapping."""
        return _held_bytes(group, self._dtype, is_mapped=self._is_mapped(group))

    def _is_mapped(self, group: Group) -> bool:
        """Return whether a group is mapped. A mapping reads 2 MiB at a time: a smaller slice is copied instead."""
        return group.offset >= 0 and not (group.sliced and group.nbytes < HUGE_PAGE_BYTES)

    def close(self) -> None:
        """Release the memory of groups that were not completed. The tensors own the mapping."""
        self._copy.close()


class StagedPath:
    """Reads a file into slots of staging memory, which the device copies; the next block is read during the copies.

    If a cache has the bytes of a block, the device copies from the cache.

    Args:
        source: The open file.
        queue: Copies to the device, for all files of the load; its slots are the staging memory.
        memories: The memory of groups on the device.
        dtype: Cast to it on the device; see `stio.device.tensors.Casts`.
        cached: The file in the cache, held until this is closed.
        piece_bytes: See `BlockReader`.
    """

    label = "read"

    def __init__(
        self,
        source: Source,
        queue: CopyQueue[Block],
        memories: GroupMemories[GroupMemory],
        *,
        dtype: Casts | None = None,
        cached: CachedFile | None = None,
        piece_bytes: int = BLOCK_BYTES,
    ) -> None:
        self._reader = block_reader(source, cached, piece_bytes)
        self._queue = queue
        self._memories = memories
        self._dtype = dtype

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> float:
        """Read a block into a slot, or find it in the cache, and queue its copies.

        Returns:
            Seconds of the wait for a slot.
        """
        target = self._memories.get(group)
        regions = self._reader.cached_regions(block, stopped)
        if regions is not None:
            self._queue.put(block, target, [copy for at, region in regions for copy in target.copies(at, region)])
            return 0.0
        start = perf_counter()
        slot = self._queue.acquire(stopped)
        waited = perf_counter() - start
        if slot is None:
            return waited
        try:
            self._reader.read(group, block, slot, block.at, stopped)
            if stopped():
                raise Cancelled
            copies = target.copies(block.at, slot.sub(0, _filled_bytes(block)))
        except BaseException:
            self._queue.release(slot)
            raise
        self._queue.put(block, target, copies, slot=slot)
        return waited

    def complete(self, block: Block, arrived: Callable[[Block], None]) -> None:
        """Submit all copies that are in the queue, and report their blocks."""
        self._queue.submit(arrived)

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Return tensors on the device; the stream that uses them must wait for the events behind their copies."""
        target, accelerator = self._memories.get(group), self._queue.accelerator

        def make() -> dict[str, torch.Tensor]:
            return _finished(group, target.separate(accelerator), self._dtype)

        needs_work = target.is_shared or group.posts or self._dtype is not None
        tensors = self._queue.run(make, target) if needs_work else target.separate(accelerator)
        self._memories.pop(group)
        return LoadedGroup(tensors, accelerator.hand_over, target.events)

    def budget_bytes(self, group: Group) -> int:
        """Return the size of the group's image; twice that if its tensors are small on average: clones of a buffer."""
        has_small = len(group.names) > 1 and group.nbytes < len(group.names) * LARGE_BYTES
        return group.nbytes * 2 if has_small else group.nbytes

    def held_bytes(self, group: Group) -> int:
        """Return 0: the tensors are on the device."""
        return 0

    def close(self) -> None:
        """Close the queue, which all files of the load share, then release the memory of groups under way.

        When it is closed all copies have ended, so no copy reads a slot or writes to the memory.
        """
        try:
            self._queue.close()
        finally:
            self._memories.clear()


class CacheFillPath:
    """Reads a file into its image in a cache, without tensors.

    Args:
        source: The open file.
        cached: The file in the cache; its holder releases it.
    """

    label = "read"

    def __init__(self, source: Source, cached: CachedFile) -> None:
        self._reader = CachedBlockReader(source, cached)

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Read a block into the image.

        Raises:
            HostMemoryError: The host has too little memory.
        """
        if not self._reader.fill_image(block, stopped):
            message = "the host has too little memory for the cache"
            raise memory.memory_error(block.nbytes, message, path=self._reader.source.path)

    def complete(self, block: Block, arrived: Callable[[Block], None]) -> None:
        """Report a block, which is complete when it is read."""
        arrived(block)

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Make no tensors."""
        return LoadedGroup({})

    def budget_bytes(self, group: Group) -> int:
        """Return the size of the group's image."""
        return group.nbytes

    def held_bytes(self, group: Group) -> int:
        """Return 0: there are no tensors."""
        return 0

    def close(self) -> None:
        """Do nothing; the cache owns the image."""


def _filled_bytes(block: Block) -> int:
    """Return how many bytes of its group a block fills, from `block.at` on."""
    if not block.scatter:
        return block.nbytes
    return max(at + length for at, length in block.scatter if at != GAP) - block.at
