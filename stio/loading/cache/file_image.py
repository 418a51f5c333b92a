"""Files kept in host memory: which of their bytes are there, who brings the others, and where they lie.

An `Image` is one file: segments of memory, made when they are first needed, and chunks that are missing, coming or
there. Whoever needs a missing chunk claims it and reads it into its place; who needs one that is coming waits. So loads
that run together read each byte once, and one that fails or is cancelled leaves its chunks to the others. Which files
are kept, and for how long, a `FileCache` decides (`stio.HostCache`); a load holds what it uses (`CachedFile`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled
from stio.storage.base import Source

__all__ = ["CHUNK_BYTES", "SEGMENT_BYTES", "CachedFile", "FileCache", "Image"]

CHUNK_BYTES = 2 << 20
"""What is claimed at least. Neighbouring blocks share a chunk at most, and the second to come waits for it."""

SEGMENT_BYTES = 64 << 20
"""Memory is made in pieces of this size: a power of two, since torch rounds what it pins up to one, and as long as a
cancel may take, since pinning cannot be interrupted (0.1 s per GB)."""

_MISSING, _COMING, _THERE = 0, 1, 2
_LOOK_SECONDS = 0.05


class Image:
    """The bytes of one file, at their file offsets. Thread-safe.

    Args:
        nbytes: Size of the file.
        allocate: Makes memory; raises `MemoryError` where there is none.
    """

    def __init__(self, nbytes: int, allocate: Callable[[int], Region]) -> None:
        self.nbytes = nbytes
        """Size of the file."""
        self.failed = False
        """Whether there was no memory for all of it."""
        self._allocate = allocate
        self._starts = _segment_starts(nbytes)
        self._segments: list[Region | None] = [None] * (len(self._starts) - 1)
        self._chunks = bytearray(-(-nbytes // CHUNK_BYTES))
        self._changed = threading.Condition()
        self._allocating = threading.Lock()

    @property
    def is_empty(self) -> bool:
        """Whether nothing of it is there."""
        return _THERE not in self._chunks

    @property
    def allocated_bytes(self) -> int:
        """Memory that was made for it so far."""
        return sum(segment.nbytes for segment in self._segments if segment is not None)

    def claim(self, begin: int, end: int, stopped: Callable[[], bool]) -> range:
        """Return the next bytes that the caller must read for `[begin, end)` to be there; empty once all is.

        Waits while somebody else reads. What was claimed must be told of by `landed`, and what is left by `give_up`.

        Raises:
            Cancelled: `stopped()` came first.
            MemoryError: There is no memory for what is missing.
        """
        first, last = begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        with self._changed:
            while not stopped():
                at = self._chunks.find(_MISSING, first, last)
                if at < 0 and self._chunks.find(_COMING, first, last) < 0:
                    return range(0)
                if self.failed:
                    raise MemoryError("there is no memory to keep the file in")
                if at >= 0:
                    stop = at
                    while stop < last and self._chunks[stop] == _MISSING:
                        self._chunks[stop] = _COMING
                        stop += 1
                    return range(at * CHUNK_BYTES, min(stop * CHUNK_BYTES, self.nbytes))
                self._changed.wait(_LOOK_SECONDS)  # `stopped` does not notify
        raise Cancelled

    def landed(self, begin: int, end: int) -> None:
        """Say that `[begin, end)` of what was claimed is there; `begin` is where the claim began."""
        self._mark(begin, end if end == self.nbytes else end // CHUNK_BYTES * CHUNK_BYTES, _THERE)

    def give_up(self, begin: int, end: int) -> None:
        """Say that the rest of what was claimed, from `begin` on, will not come."""
        if begin < end:
            self._mark(begin // CHUNK_BYTES * CHUNK_BYTES, end, _MISSING)

    def regions(self, begin: int, nbytes: int) -> list[Region]:
        """Return the memory of `[begin, begin + nbytes)`, piece by piece, making what is not there yet.

        Raises:
            MemoryError: There is none; all who need more of it hear the same.
        """
        found = []
        k = bisect_right(self._starts, begin) - 1
        end = begin + nbytes
        while begin < end:
            start, stop = self._starts[k], min(self._starts[k + 1], end)
            found.append(self._segment(k).sub(begin - start, stop - begin))
            begin, k = stop, k + 1
        return found

    def clear(self) -> None:
        """Let go of the memory. Nobody holds the image any more."""
        self._segments = []

    def _segment(self, k: int) -> Region:
        region = self._segments[k]
        if region is not None:
            return region
        with self._allocating:
            region = self._segments[k]
            if region is None:
                try:
                    region = self._segments[k] = self._allocate(self._starts[k + 1] - self._starts[k])
                except MemoryError:
                    with self._changed:
                        self.failed = True
                        self._changed.notify_all()
                    raise
        return region

    def _mark(self, begin: int, end: int, state: int) -> None:
        if begin < end:
            first, last = begin // CHUNK_BYTES, -(-end // CHUNK_BYTES)
            with self._changed:
                self._chunks[first:last] = bytes([state]) * (last - first)
                self._changed.notify_all()


def _segment_starts(nbytes: int) -> list[int]:
    """Return where segments begin, and the end: whole ones, then ever smaller powers of two, down to a page."""
    starts, size = [0], SEGMENT_BYTES
    while starts[-1] < nbytes:
        left = nbytes - starts[-1]
        while size > PAGE_BYTES and size > left:
            size //= 2
        starts.append(starts[-1] + size)
    return starts


class CachedFile:
    """One load's hold on an image, which stays as it is until it is released (or dropped).

    Args:
        image: The image.
        release: Called once.
    """

    def __init__(self, image: Image, release: Callable[[], None]) -> None:
        self.image = image
        """The image."""
        self._release: Callable[[], None] | None = release

    def release(self) -> None:
        """Let go of it: nothing reads it any more. Idempotent."""
        release, self._release = self._release, None
        if release is not None:
            release()

    def __del__(self) -> None:
        self.release()


@runtime_checkable
class FileCache(Protocol):
    """What decides which files are kept."""

    def hold(self, files: Sequence[tuple[Source, int]]) -> Sequence[CachedFile | None]:
        """Return, for each file, its image, or None where it is to be read as it is. May block for some milliseconds.

        Args:
            files: Open files, each with the number of its bytes that are wanted.
        """
