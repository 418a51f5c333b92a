"""The entries of a host cache: which files are there, who holds them, and which goes for another.

An entry is one state of one file. Another state under its inode, or another file under its name, is a miss, and the
entry goes. Who holds an entry keeps its memory as it is; only what nobody holds makes room, least recently used first,
and only where that is enough. It is decided under the lock; memory is given back after it.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from stio.errors import ClosedError, NoSpaceError, StorageError
from stio.loading.cache.file_image import CachedFile, Image
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.storage.base import Source

__all__ = ["CacheEntries", "CacheStats", "Wanted"]

logger = logging.getLogger("stio")


@dataclass(frozen=True, slots=True)
class CacheStats:
    """What a cache holds, and what it did so far."""

    entries: int = 0
    """Files that are kept."""
    held_bytes: int = 0
    """Their size, which counts against the budget; the memory for it is made as they are read."""
    hits: int = 0
    """Files of loads and prefetches that were there, if only in part."""
    misses: int = 0
    """Files of loads and prefetches that were not."""
    evictions: int = 0
    """Files that went: for others, by `evict`, or because they had changed."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file that a load reads."""

    file: Source
    """Open."""
    label: str
    """Where it stands."""
    nbytes: int
    """How much of it is wanted."""

    @property
    def key(self) -> tuple[int, int]:
        """What tells the file from others."""
        return self.file.identity.device, self.file.identity.inode

    @property
    def state(self) -> tuple[int, int, int]:
        """What tells its state from others."""
        identity = self.file.identity
        return identity.nbytes, identity.mtime_ns, identity.ctime_ns


@dataclass(slots=True, eq=False)
class _Entry:
    key: tuple[int, int]
    state: tuple[int, int, int]
    label: str
    image: Image
    num_holders: int = 0
    is_listed: bool = True


class CacheEntries:
    """Entries within a budget. Thread-safe.

    Args:
        budget_bytes: Most bytes of files that are kept.
        allocate: Makes memory for images.
    """

    def __init__(self, budget_bytes: int, allocate: Callable[[int], Region]) -> None:
        self._budget_bytes = budget_bytes
        self._allocate = allocate
        self._lock = threading.RLock()  # a finalizer may release while its own thread is inside
        self._entries: OrderedDict[tuple[int, int], _Entry] = OrderedDict()
        self._labels: dict[str, tuple[int, int]] = {}
        self._held_bytes = 0
        self._counts = CacheStats()
        self._closed = False

    def stats(self) -> CacheStats:
        """Return what is there now."""
        with self._lock:
            return replace(self._counts, entries=len(self._entries), held_bytes=self._held_bytes)

    def hold(self, files: Sequence[Wanted], *, every: str | None = None) -> list[CachedFile | None]:
        """Return what is kept of files; None for what is not there and is not let in.

        Args:
            files: A load's.
            every: Path of a checkpoint that must be let in as a whole; otherwise a file is let in if half of it is
                wanted, and there is or can be made room.

        Raises:
            ClosedError: The shelf was closed.
            NoSpaceError: There is no room for all of it; nothing went for it.
            MemoryError: The host has too little memory for all of it.
            StorageError: Nothing tells a file from others.
        """
        out: list[Image] = []
        held: list[CachedFile | None] = []
        try:
            with self._lock:
                self.require_open()
                # Those that are there first, so that none of them goes for another.
                held += [self._kept(self._found(file, out)) for file in files]
                if every is not None:
                    self._require_room([file for file, kept in zip(files, held, strict=True) if kept is None], every)
                for k, file in enumerate(files):
                    if held[k] is None and (every is not None or file.nbytes * 2 >= file.file.identity.nbytes):
                        held[k] = self._kept(self._let_in(file, out))
            if every is not None and None in held:
                raise MemoryError("the host has too little memory to keep the checkpoint in")
        except BaseException:
            for kept in held:
                if kept is not None:
                    kept.release()
            raise
        finally:
            _clear(out)
        return held

    def evict(self, is_meant: Callable[[str], bool]) -> list[Image]:
        """Take entries off that nobody holds, by where their files stand; return their images, to be cleared."""
        out: list[Image] = []
        with self._lock:
            for entry in self._listed():
                if not entry.num_holders and is_meant(entry.label):
                    self._drop(entry, out)
        return out

    def close(self) -> list[Image]:
        """Take everything off and let nothing in; return images to be cleared. What is held goes with its holders."""
        out: list[Image] = []
        with self._lock:
            self._closed = True
            for entry in self._listed():
                self._drop(entry, out)
        return out

    @property
    def is_closed(self) -> bool:
        """Whether nothing is let in any more."""
        return self._closed

    def abandon(self) -> list[Image]:
        """Forget all, in a forked child: threads of the parent's may hold the lock. Return what was there."""
        self._lock = threading.RLock()
        images = [entry.image for entry in self._listed()]
        self._entries, self._labels = OrderedDict(), {}
        return images

    def require_open(self) -> None:
        """Raise `ClosedError` once it was closed."""
        if self._closed:
            raise ClosedError("the cache was closed")

    # Under the lock.

    def _found(self, file: Wanted, out: list[Image]) -> _Entry | None:
        """Return a file's entry, if it is of this state; what is there of another one goes."""
        stale = self._entries.get(self._labels.get(file.label, file.key))
        if stale is not None and stale.key != file.key:
            self._drop(stale, out)  # another file stands there now
        entry = self._entries.get(file.key)
        if entry is not None and (entry.state != file.state or entry.image.failed):
            self._drop(entry, out)
            entry = None
        self._count(hits=int(entry is not None), misses=int(entry is None))
        return entry

    def _let_in(self, file: Wanted, out: list[Image]) -> _Entry | None:
        """Make an entry, and room for it; None if it cannot be."""
        if file.key in self._entries:
            return self._entries[file.key]  # another name of the same file came just before
        nbytes = file.file.identity.nbytes
        if not file.key[1] or not nbytes or nbytes > self._free_bytes():
            return None
        before = self._held_bytes
        for entry in [entry for entry in self._listed() if not entry.num_holders]:
            if self._held_bytes + nbytes <= self._budget_bytes:
                break
            self._drop(entry, out)
        if not memory.fits(max(0, nbytes - (before - self._held_bytes))):
            logger.warning("host memory is short: %s is read without the cache", file.file.path)
            return None
        entry = _Entry(file.key, file.state, file.label, Image(nbytes, self._allocate))
        self._entries[file.key] = entry
        self._labels[file.label] = file.key
        self._held_bytes += nbytes
        return entry

    def _require_room(self, files: Sequence[Wanted], path: str) -> None:
        for file in files:
            if not file.key[1]:
                raise StorageError(
                    "nothing tells this file from others (it has no inode): it cannot be kept",
                    path=file.file.path,
                    errno=errno.ENOTSUP,
                )
        needed = sum({file.key: file.file.identity.nbytes for file in files}.values())
        free = self._free_bytes()
        if needed > free:
            raise NoSpaceError(
                "the cache has no room for the checkpoint; give it a larger budget, or let other loads end first",
                path=path,
                errno=errno.ENOSPC,
                needed_bytes=needed,
                free_bytes=free,
                expected=f"{needed:,} bytes",
                found=f"{free:,} of {self._budget_bytes:,}",
            )

    def _free_bytes(self) -> int:
        """Return what is free, or would be if all went that nobody holds."""
        idle = sum(entry.image.nbytes for entry in self._listed() if not entry.num_holders)
        return max(0, self._budget_bytes - (self._held_bytes - idle))

    def _listed(self) -> list[_Entry]:
        """Return all entries, in one step: a finalizer may release one while they are looked through."""
        return list(self._entries.values())

    def _kept(self, entry: _Entry | None) -> CachedFile | None:
        if entry is None:
            return None
        self._entries.move_to_end(entry.key)
        entry.num_holders += 1
        return CachedFile(entry.image, lambda: self._release(entry))

    def _drop(self, entry: _Entry, out: list[Image]) -> None:
        """Take an entry off; its memory goes now, or with the last who holds it."""
        if not entry.is_listed:
            return
        self._unlist(entry)
        self._count(evictions=1)
        if not entry.num_holders:
            self._held_bytes -= entry.image.nbytes
            out.append(entry.image)

    def _unlist(self, entry: _Entry) -> None:
        entry.is_listed = False
        del self._entries[entry.key]
        if self._labels.get(entry.label) == entry.key:
            del self._labels[entry.label]

    def _count(self, hits: int = 0, misses: int = 0, evictions: int = 0) -> None:
        counts = self._counts
        self._counts = replace(
            counts,
            hits=counts.hits + hits,
            misses=counts.misses + misses,
            evictions=counts.evictions + evictions,
        )

    # By whoever holds an entry.

    def _release(self, entry: _Entry) -> None:
        out: list[Image] = []
        with self._lock:
            entry.num_holders -= 1
            if entry.num_holders:
                return
            if entry.is_listed and (entry.image.is_empty or entry.image.failed) and entry.key in self._entries:
                self._unlist(entry)  # it was never read, or cannot be: it would take room for nothing
            if not entry.is_listed:
                self._held_bytes -= entry.image.nbytes
                out.append(entry.image)
        _clear(out)


def _clear(images: list[Image]) -> None:
    for image in images:
        image.clear()
