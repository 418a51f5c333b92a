"""The entries of a host cache: which files are in memory, which loads use them, and which entry is evicted for another.

An entry is one state of one file. Another state under its inode, or another file under its name, is a miss, and the
entry is evicted. The memory of an entry stays unchanged while a load holds it. Only entries that no load holds are
evicted, the least recently used first, and only if that frees enough bytes. Decisions are made under the lock; memory
is freed after it.
"""

from __future__ import annotations

import errno
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from stio.errors import ClosedError, NoSpaceError, StorageError
from stio.runtime import memory
from stio.runtime.control_groups import room_in_memory
from stio.runtime.locks import new_lock
from stio.runtime.memory import Region
from stio.storage.base import Source
from stio.storage.checkpoint.caches import CachedFile, CacheStats, FileImage

T = TypeVar("T")
logger = logging.getLogger("stio")


@dataclass(frozen=True, slots=True)
class RequestedFile:
    """A file that a load reads."""

    file: Source
    """The open file."""
    label: str
    """Path of the file, its directory resolved."""
    nbytes: int
    """Number of its bytes that the load reads."""

    @property
    def key(self) -> tuple[int, int]:
        """Identifies the file."""
        return self.file.identity.device, self.file.identity.inode

    @property
    def state(self) -> tuple[int, int, int, str]:
        """Identifies its state."""
        identity = self.file.identity
        return identity.nbytes, identity.mtime_ns, identity.ctime_ns, identity.etag


@dataclass(slots=True, eq=False)
class _CacheEntry:
    key: tuple[int, int]
    state: tuple[int, int, int, str]
    label: str
    image: FileImage
    num_holds: int = 0
    is_listed: bool = True


class CacheEntries:
    """Entries within a budget. Thread-safe.

    Args:
        budget_bytes: Most bytes of files in the cache.
        allocate: Allocates memory for images.
        keep: Called with memory of images that are evicted for others, so that it may be used again.
    """

    def __init__(
        self,
        budget_bytes: int,
        allocate: Callable[[int], Region],
        keep: Callable[[list[Region]], object] = lambda regions: None,
    ) -> None:
        self._budget_bytes = budget_bytes
        self._allocate = allocate
        self._keep = keep
        self._lock = new_lock()  # a finaliser may release while its own thread is inside
        self._entries: OrderedDict[tuple[int, int], _CacheEntry] = OrderedDict()
        self._labels: dict[str, tuple[int, int]] = {}
        self._held_bytes = 0
        self._counts = CacheStats()
        self._closed = False

    def stats(self) -> CacheStats:
        """Return a snapshot. Takes no lock: a load that goes on may change one figure before another."""
        return replace(self._counts, entries=len(self._entries), held_bytes=self._held_bytes)

    def hold(self, files: Sequence[RequestedFile], *, every: str | None = None) -> list[CachedFile | None]:
        """Return a hold on the image of each file; None for a file that is not in the cache and is not added.

        Args:
            files: A load's.
            every: Path of a checkpoint that must be added as a whole. Otherwise a file is added if the load reads half
                of it, and it fits after evictions.

        Raises:
            ClosedError: The cache was closed.
            NoSpaceError: The whole checkpoint does not fit; nothing was evicted for it.
            HostMemoryError: The host has too little memory for all of it.
            StorageError: A file has no inode, so it cannot be identified.
        """
        out: list[FileImage] = []
        short: list[str] = []
        held: list[CachedFile | None] = []
        try:
            with self._lock:
                self.require_open()
                # Those in the cache first, so that none of them is evicted for another.
                held += [self._hold(self._found(file, out)) for file in files]
                if every is not None:
                    self._admit_all([file for file, one in zip(files, held, strict=True) if one is None], every, out)
                for k, file in enumerate(files):
                    if held[k] is not None:
                        continue
                    if file.key not in self._entries and self._is_worthwhile(file) and not self._admit([file], out):
                        short.append(file.file.path)
                    held[k] = self._hold(self._entries.get(file.key))
            for path in short:
                logger.warning("host memory is short: %s is read without the cache", path)
        except BaseException:
            for one in held:
                if one is not None:
                    one.release()
            raise
        finally:
            regions = [region for image in out for region in image.take_memory()]
            with self._lock:
                if not self._closed:
                    self._keep(regions)
        return held

    def has(self, label: str) -> bool:
        """Return whether a file is in the cache as a whole. Takes no lock."""
        entry = self._entries.get(self._labels.get(label, (0, 0)))
        return entry is not None and entry.image.holds(0, entry.image.nbytes)

    def evict(self, selects: Callable[[str], bool]) -> list[FileImage]:
        """Evict entries that no load holds and whose path is selected; return their images, for the caller to free."""
        out: list[FileImage] = []
        with self._lock:
            for entry in self._listed():
                if not entry.num_holds and selects(entry.label):
                    self._drop(entry, out)
        return out

    def close(self) -> list[FileImage]:
        """Evict all entries, and add no more; return their images, for the caller to free.

        The memory of images that loads hold is freed with the last hold.
        """
        out: list[FileImage] = []
        with self._lock:
            self._closed = True
            for entry in self._listed():
                self._drop(entry, out)
        return out

    @property
    def is_closed(self) -> bool:
        """Whether the cache was closed."""
        return self._closed

    def abandon(self) -> None:
        """Remove all entries in a forked child, where the lock may be held for ever."""
        self._lock = new_lock()
        self._entries, self._labels = OrderedDict(), {}

    def require_open(self) -> None:
        """Raise `ClosedError` if the cache was closed."""
        if self._closed:
            raise ClosedError("the cache was closed")

    # Under the lock.

    def _found(self, file: RequestedFile, out: list[FileImage]) -> _CacheEntry | None:
        """Return a file's entry, if it is of this state; an entry of another state is evicted."""
        stale = self._entries.get(self._labels.get(file.label, file.key))
        if stale is not None and stale.key != file.key:
            self._drop(stale, out)  # another file has this path now
        entry = self._entries.get(file.key)
        if entry is not None and (entry.state != file.state or entry.image.failed):
            self._drop(entry, out)
            entry = None
        self._count(hits=int(entry is not None), misses=int(entry is None))
        return entry

    def _is_worthwhile(self, file: RequestedFile) -> bool:
        """Return whether a load reads at least half of a file, which has an inode and fits into the budget."""
        nbytes = file.file.identity.nbytes
        return bool(file.key[1]) and 0 < nbytes <= min(file.nbytes * 2, self._free_bytes())

    def _admit(self, files: Sequence[RequestedFile], out: list[FileImage]) -> bool:
        """Add files that fit into the budget, and evict others for them, unless the host has too little memory."""
        needed = sum(file.file.identity.nbytes for file in files)
        victims = self._victims(needed)
        if not self._fits_memory(needed, victims):
            return False
        for entry in victims:
            self._drop(entry, out)
        for file in files:
            nbytes = file.file.identity.nbytes
            image = FileImage(nbytes, self._allocate)
            self._entries[file.key] = _CacheEntry(file.key, file.state, file.label, image)
            self._labels[file.label] = file.key
            self._held_bytes += nbytes
        return True

    def _admit_all(self, files: Sequence[RequestedFile], path: str, out: list[FileImage]) -> None:
        """Add all files of a checkpoint, and evict others for them.

        Raises:
            StorageError: A file has no inode, so it cannot be identified.
            NoSpaceError: They do not fit into the budget; nothing is evicted.
            HostMemoryError: The host has too little memory for them; nothing is evicted.
        """
        for file in files:
            if not file.key[1]:
                message = "this file has no inode that identifies it: the cache cannot hold it"
                raise StorageError(message, path=file.file.path, errno=errno.ENOTSUP)
        files = list({file.key: file for file in files}.values())  # one file may have two names
        needed, free = sum(file.file.identity.nbytes for file in files), self._free_bytes()
        if needed > free:
            raise NoSpaceError(
                "the checkpoint does not fit into the cache; use a larger budget, or wait until other loads have ended",
                path=path,
                errno=errno.ENOSPC,
                needed_bytes=needed,
                free_bytes=free,
                expected=f"{needed:,} bytes",
                found=f"{free:,} of {self._budget_bytes:,}",
            )
        if not self._admit(files, out):
            message = "the host has too little memory for the cache"
            raise memory.memory_error(needed, message, path=path, free_bytes=room_in_memory())

    def _victims(self, nbytes: int) -> list[_CacheEntry]:
        """Return the entries to evict for so many bytes, the least recently used first."""
        victims: list[_CacheEntry] = []
        excess = self._held_bytes + nbytes - self._budget_bytes
        for entry in self._listed():
            if excess <= 0:
                break
            if not entry.num_holds:
                victims.append(entry)
                excess -= entry.image.nbytes
        return victims

    def _fits_memory(self, nbytes: int, victims: Sequence[_CacheEntry]) -> bool:
        """Return whether the host has memory for so many bytes, after these entries were evicted."""
        freed = {id(entry) for entry in victims}
        change = sum(
            -entry.image.allocated_bytes
            if id(entry) in freed
            else max(0, entry.image.nbytes - entry.image.allocated_bytes)  # allocated later, while loads read it
            for entry in self._listed()
        )
        return memory.fits(max(0, nbytes + change))

    def _free_bytes(self) -> int:
        """Return the free bytes of the budget, with those of entries that no load holds."""
        idle = sum(entry.image.nbytes for entry in self._listed() if not entry.num_holds)
        return max(0, self._budget_bytes - (self._held_bytes - idle))

    def _listed(self) -> list[_CacheEntry]:
        """Return all entries, in one step: a finaliser may release one while they are iterated."""
        return list(self._entries.values())

    def _hold(self, entry: _CacheEntry | None) -> CachedFile | None:
        if entry is None:
            return None
        self._entries.move_to_end(entry.key)
        entry.num_holds += 1
        return CachedFile(entry.image, lambda: self._release(entry))

    def _drop(self, entry: _CacheEntry, out: list[FileImage]) -> None:
        """Evict an entry; its memory is freed now, or with its last hold."""
        if not entry.is_listed:
            return
        self._unlist(entry)
        self._count(evictions=1)
        if not entry.num_holds:
            self._held_bytes -= entry.image.nbytes
            out.append(entry.image)

    def _unlist(self, entry: _CacheEntry) -> None:
        entry.is_listed = False
        del self._entries[entry.key]
        if self._labels.get(entry.label) == entry.key:
            del self._labels[entry.label]

    def _count(self, **more: int) -> None:
        self._counts = self._counts.plus(**more)

    # Called by holds.

    def _release(self, entry: _CacheEntry) -> None:
        regions: list[Region] = []  # released behind the lock
        with self._lock:
            entry.num_holds -= 1
            if entry.num_holds:
                return
            if entry.is_listed and (entry.image.is_empty or entry.image.failed) and entry.key in self._entries:
                self._unlist(entry)  # it was never read, or cannot be read
            if not entry.is_listed:
                self._held_bytes -= entry.image.nbytes
                regions = entry.image.take_memory()
                if not self._closed:
                    self._keep(regions)
