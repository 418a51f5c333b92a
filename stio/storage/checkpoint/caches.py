"""What loads know of caches: files in host memory, and objects of stores on this machine's disk.

A `FileImage` is one file: segments of memory, allocated when they are first needed, and chunks that are missing, being
read or present. A reader claims missing chunks and reads them into their place; others that need them wait. So loads
that run together read each byte once. If a load fails or is cancelled, its claimed chunks become missing again, and
another load reads them. A load holds each image that it uses by a `CachedFile`. `stio.HostCache` and `stio.DiskCache`
implement the interfaces `FileCache` and `ObjectCache`.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from typing import ClassVar, Protocol, TypeAlias, runtime_checkable

from stio import process
from stio.errors import StioError
from stio.limits import PAGE_BYTES
from stio.process import Condition
from stio.runtime import Cancelled, start_thread
from stio.runtime.memory import Region
from stio.storage.base import Source

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


def add_counts(counts: CacheStats, **more: int) -> CacheStats:
    """Return the counters with these added."""
    return replace(counts, **{name: getattr(counts, name) + number for name, number in more.items()})


CHUNK_BYTES = 2 << 20
"""Unit of a claim. Neighbouring blocks share one chunk at most, and the second reader waits for it."""

_MISSING, _CLAIMED, _PRESENT = 0, 1, 2
_POLL_SECONDS = 0.05


class FileImage:
    """The bytes of one file, at their file offsets. Thread-safe.

    Args:
        nbytes: Size of the file.
        allocate: Allocates a number of bytes; raises `MemoryError` if the host has too little memory.
    """

    SEGMENT_BYTES: ClassVar = 64 << 20
    """Memory is allocated in pieces of this size: reads go on while the next piece is pinned, and a cancel cannot
    interrupt the pinning."""

    def __init__(self, nbytes: int, allocate: Callable[[int], Region]) -> None:
        self.nbytes = nbytes
        """Size of the file."""
        self.failed = False
        """Whether an allocation failed: there was no memory for the whole file."""
        self._allocate = allocate
        self._starts = [*range(0, nbytes, self.SEGMENT_BYTES), -(-nbytes // PAGE_BYTES) * PAGE_BYTES]
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
        if self._release is not None and not process.thread_name():  # a thread of a caller's, which takes no lock
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


CacheLike: TypeAlias = FileCache | ObjectCache | tuple[FileCache | ObjectCache, ...]
"""A `stio.HostCache` or a `stio.DiskCache`, or one of each in a tuple."""
