"""The entries of a host cache: which files are in memory, which loads use them, and which entry is evicted for another.

A `FileImage` is one file: segments of memory, allocated when they are first needed, and chunks that are missing, being
read or present. A reader claims missing chunks and reads them into their place; others that need them wait. So loads
that run together read each byte once. If a load fails or is cancelled, its claimed chunks become missing again, and
another load reads them. A load holds each image that it uses by a `CachedFile`. Loads know both kinds of caches by the
interfaces `FileCache` and `ObjectCache`.

An entry is one state of one file. Another state under its inode, or another file under its name, is a miss, and the
entry is evicted. The memory of an entry stays unchanged while a load holds it. Only entries that no load holds are
evicted, the least recently used first, and only if that frees enough bytes. Decisions are made under the lock; memory
is freed after it.
"""

from __future__ import annotations

import errno
import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar, runtime_checkable

from stio.errors import ClosedError, NoSpaceError, StioError, StorageError
from stio.runtime import memory
from stio.runtime.control_groups import room_in_memory
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.locks import Condition, new_lock
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled, Operation, start_thread
from stio.runtime.process import thread_name
from stio.storage.base import Source

T = TypeVar("T")
logger = logging.getLogger("stio")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Contents of a cache in numbers, and counters since it was made."""

    entries: int = 0
    """Files in the cache."""
    held_bytes: int = 0
    """Size of these files; it counts against the budget. Their memory is allocated when they are read."""
    hits: int = 0
    """Files of loads and prefetches that were in the cache, perhaps in part."""
    misses: int = 0
    """Files of loads and prefetches that were not in the cache."""
    evictions: int = 0
    """Files that were evicted: to hold others, by `evict`, or because they had changed."""


def counted(counts: CacheStats, **more: int) -> CacheStats:
    """Return counters with these added."""
    return replace(counts, **{name: getattr(counts, name) + number for name, number in more.items()})


def on_own_thread(work: Callable[[], T]) -> T:
    """Call a function that takes locks on a thread of stio's, and wait for it; see `stio.runtime.locks`."""
    if not thread_name():
        with suppress(StorageError):  # no more threads
            return Operation(lambda _: work(), name="evict").result()
    return work()


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
        self._counts = counted(self._counts, **more)

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


CHUNK_BYTES = 2 << 20
"""Unit of a claim. Neighbouring blocks share one chunk at most, and the second reader waits for it."""

SEGMENT_BYTES = 64 << 20
"""Memory is allocated in pieces of this size: reads go on while the next piece is pinned, and a cancel cannot interrupt
the pinning."""

_MISSING, _CLAIMED, _PRESENT = 0, 1, 2
_POLL_SECONDS = 0.05


class FileImage:
    """The bytes of one file, at their file offsets. Thread-safe.

    Args:
        nbytes: Size of the file.
        allocate: Allocates a number of bytes; raises `MemoryError` if the host has too little memory.
    """

    def __init__(self, nbytes: int, allocate: Callable[[int], Region]) -> None:
        self.nbytes = nbytes
        """Size of the file."""
        self.failed = False
        """Whether an allocation failed: there was no memory for the whole file."""
        self._allocate = allocate
        self._starts = [*range(0, nbytes, SEGMENT_BYTES), -(-nbytes // PAGE_BYTES) * PAGE_BYTES]
        self._segments: list[Region | None] = [None] * (len(self._starts) - 1)
        self._chunks = bytearray(-(-nbytes // CHUNK_BYTES))
        self._changed = Condition()
        self._being_allocated: set[int] = set()  # segments
        self._watchers: list[Callable[[], None]] = []

    @property
    def is_empty(self) -> bool:
        """Whether no chunk is present."""
        return _PRESENT not in self._chunks

    @property
    def allocated_bytes(self) -> int:
        """Size of the memory that is allocated for it, in bytes."""
        return sum(segment.nbytes for segment in self._segments if segment is not None)

    def claim(self, begin: int, end: int, stopped: Callable[[], bool]) -> range:
        """Claim the next missing bytes of `[begin, end)`, which the caller must read; empty if all are present.

        Waits while other readers read the missing bytes. The caller reports the bytes that it has read by
        `mark_present`, and the rest of the claim by `mark_missing`.

        Returns:
            File offsets of the claim, half-open.

        Raises:
            Cancelled: `stopped()` was true first.
            MemoryError: There is no memory for the missing bytes.
        """
        first, last = begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        with self._changed:
            while not stopped():
                at = self._chunks.find(_MISSING, first, last)
                if at < 0 and self._chunks.find(_CLAIMED, first, last) < 0:
                    return range(0)
                if self.failed:
                    raise MemoryError("there is no memory for the file")
                if at >= 0:
                    return self._claim_run(at, last)
                self._changed.wait(_POLL_SECONDS)  # `stopped` does not notify
        raise Cancelled

    def claim_now(self, begin: int, end: int) -> list[range]:
        """Claim all missing bytes of `[begin, end)` without waiting for other readers; see `claim`.

        Returns:
            File offsets of the claims. If there are none, and `holds` is false, other readers have claimed the rest.

        Raises:
            MemoryError: There is no memory for the missing bytes.
        """
        first, last = begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        found: list[range] = []
        with self._changed:
            while (at := self._chunks.find(_MISSING, first, last)) >= 0:
                if self.failed and not found:  # later it may be set by another reader: what is claimed is returned
                    raise MemoryError("there is no memory for the file")
                found.append(self._claim_run(at, last))
        return found

    def holds(self, begin: int, end: int) -> bool:
        """Return whether all bytes of `[begin, end)` are present."""
        first, last = begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        return self._chunks.count(_PRESENT, first, last) == last - first

    def watch(self, changed: Callable[[], None]) -> None:
        """Call a function whenever other bytes are present or missing, until `unwatch`. It must take no lock."""
        self._watchers.append(changed)

    def unwatch(self, changed: Callable[[], None]) -> None:
        """Do not call it any more. Idempotent."""
        with suppress(ValueError):
            self._watchers.remove(changed)

    def mark_present(self, begin: int, end: int) -> None:
        """Report that `[begin, end)` of a claim is present; `begin` is the start of the claim."""
        self._mark(begin, end if end == self.nbytes else end // CHUNK_BYTES * CHUNK_BYTES, _PRESENT)

    def mark_missing(self, begin: int, end: int) -> None:
        """Release the rest of a claim, `[begin, end)`, which will not be read."""
        if begin < end:
            self._mark(begin // CHUNK_BYTES * CHUNK_BYTES, end, _MISSING)

    def regions(self, begin: int, nbytes: int) -> list[Region]:
        """Return the memory of `[begin, begin + nbytes)`, one region for each segment; allocates missing segments.

        Raises:
            MemoryError: The host has too little memory; every later call that must allocate raises it too.
        """
        found = []
        k = bisect_right(self._starts, begin) - 1
        end = begin + nbytes
        while begin < end:
            start, stop = self._starts[k], min(self._starts[k + 1], end)
            found.append(self._segment(k).sub(begin - start, stop - begin))
            begin, k = stop, k + 1
        return found

    def take_memory(self) -> list[Region]:
        """Return the memory, which the image then no longer has. No load may hold the image."""
        regions = [region for region in self._segments if region is not None]
        self._segments = []
        return regions

    def _segment(self, k: int) -> Region:
        """Return a segment. One thread allocates it, without a lock, while others that need it wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._segments[k] is not None or k not in self._being_allocated)
            region = self._segments[k]
            if region is not None:
                return region
            self._being_allocated.add(k)
        try:
            region = self._allocate(self._starts[k + 1] - self._starts[k])
        except MemoryError:
            self.failed = True
            logger.warning("too little host memory for the cache: files that it cannot hold are read without it")
            raise
        finally:
            with self._changed:
                self._segments[k] = region
                self._being_allocated.discard(k)
                self._changed.notify_all()
        return region

    def _claim_run(self, at: int, last: int) -> range:
        """Claim the missing chunks from `at` on, up to the first that is not missing; the caller holds the lock."""
        stop = at
        while stop < last and self._chunks[stop] == _MISSING:
            self._chunks[stop] = _CLAIMED
            stop += 1
        return range(at * CHUNK_BYTES, min(stop * CHUNK_BYTES, self.nbytes))

    def _mark(self, begin: int, end: int, state: int) -> None:
        if begin < end:
            first, last = begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)
            with self._changed:
                self._chunks[first:last] = bytes([state]) * (last - first)
                self._changed.notify_all()
            for changed in self._watchers.copy():
                changed()


class CachedFile:
    """The hold of one load on an image. The image stays unchanged until the hold is released or deleted.

    Args:
        image: The image.
        release: Called once, when the hold is released.
    """

    def __init__(self, image: FileImage, release: Callable[[], None]) -> None:
        self.image = image
        """The image."""
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Release the hold: the load must not read the image after this call. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        if self._release is not None and not thread_name():  # a thread of a caller's, which takes no lock
            with suppress(RuntimeError):  # no more threads
                start_thread(self._release, name="release")
                return
        self.release()


@runtime_checkable
class FileCache(Protocol):
    """Decides which files are held in memory."""

    def hold(self, files: Sequence[tuple[Source, int]]) -> Sequence[CachedFile | None]:
        """Return a hold on the image of each file; None for a file to be read without the cache.

        May block for some milliseconds.

        Args:
            files: Open files, each with the number of its bytes that the load reads.
        """


@runtime_checkable
class ObjectCache(Protocol):
    """Keeps objects of remote stores as files of this machine. Its methods are called on threads of an operation."""

    def replacement(self, source: Source) -> Source:
        """Return a local file with the content of an open object, and close that; or the object itself."""

    def fetch(
        self, files: Sequence[Source], nbytes: Sequence[int], *, budget_bytes: int, owned: ExitStack
    ) -> list[Source]:
        """Return the files of a load, local files in place of objects where it can.

        Args:
            files: Open files.
            nbytes: Number of bytes of each that the load reads.
            budget_bytes: Memory that may be used.
            owned: Closes the local files.
        """

    def discard(self, error: StioError) -> None:
        """Remove the local file that an error names, and note that in the error: the next load fetches it again."""
