"""`HostCache`: checkpoints in host memory, so that the next load of them reads no disk.

A file is identified by device, inode, size and times of change, as it was opened; memory is pinned where there is an
accelerator. Loads call `hold` (`stio.loading.planned`); a prefetch is a load without tensors.

`CacheEntries` decides which files are held. An entry is one state of one file. Another state under its inode, or
another file under its name, is a miss, and the entry is evicted. The memory of an entry stays unchanged while a load
holds it. Only entries that no load holds are evicted, the least recently used first, and only if that frees enough
bytes. Decisions are made under the lock; memory is freed after it.
"""

from __future__ import annotations

import errno
import logging
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from stio import clock, process, schemes
from stio.device import TorchAccelerator, resolve_device, with_current_index
from stio.errors import ClosedError, NoSpaceError, StorageError
from stio.format.files import FileName
from stio.limits import DEFAULT_BUDGET_BYTES, Limits, checked_size
from stio.loading import LoadOptions, load, open_with_options, prefetch
from stio.process import new_lock
from stio.runtime import Operation, memory, start_thread
from stio.runtime.memory import Region, room_in_memory
from stio.runtime.reports import Progress, Trace
from stio.storage import Root, Source
from stio.storage.checkpoint import CachedFile, CacheStats, FileImage, SourceLike, add_counts
from stio.text import described_by, is_url, keywords_for

logger = logging.getLogger("stio")

_TICK_SECONDS = 0.05
"""The clock of a filesystem advances every 1 to 10 ms. If a file changes twice in between, its times do not show it."""

_CLEAR_HERE_BYTES = 128 << 20
"""To free more than this takes milliseconds, and an event loop should not be blocked for so long."""


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

    def evict(self, selects: Callable[[str], bool], *, also_held: bool = False) -> list[FileImage]:
        """Evict entries whose path is selected; return their images, for the caller to free.

        Args:
            selects: Called with each path.
            also_held: Evict those that loads hold too. Their memory is freed with the last hold.
        """
        out: list[FileImage] = []
        with self._lock:
            for entry in self._listed():
                if (also_held or not entry.num_holds) and selects(entry.label):
                    self._drop(entry, out)
        return out

    def close(self) -> list[FileImage]:
        """Evict all entries, also those that loads hold, and add no more; see `evict`."""
        self._closed = True
        return self.evict(lambda label: True, also_held=True)

    def abandon(self) -> bool:
        """Remove all entries in a forked child, where the lock may be held for ever; return whether it was closed."""
        self._lock = new_lock()
        self._entries, self._labels = OrderedDict(), {}
        return self._closed

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
        self._counts = add_counts(self._counts, **more)

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


class _Memory:
    """Allocates memory, pinned for an accelerator; the device is examined at the first use.

    Args:
        device: What `torch.device` takes, or `"auto"`.
    """

    def __init__(self, device: str | int | torch.device) -> None:
        self._device = device
        self._lock = new_lock()
        self._accelerator: torch.device | None = None
        self._make: Callable[[int], Region] | None = None
        self._kept: list[Region] = []  # pinned, of one size

    def begin_use(self) -> None:
        """Examine the device at the first use. If memory could not be pinned, try again from now on.

        Raises:
            DeviceError: There is no such device.
        """
        with self._lock:
            if self._make is None:
                device = resolve_device(self._device)
                if device.type != "cpu" and (self._device != "auto" or TorchAccelerator.supports(device)):
                    self._accelerator = device
            # A new object for each use: an allocator that was refused once does not try to pin again.
            self._make = memory.allocate if self._accelerator is None else TorchAccelerator(self._accelerator).staging

    def allocate(self, nbytes: int) -> Region:
        """Return new memory, once a use was begun.

        Raises:
            MemoryError: The host has too little memory.
        """
        assert self._make is not None
        try:
            kept = self._kept.pop()
        except IndexError:
            return self._make(nbytes)
        if kept.nbytes == nbytes:
            return kept
        del kept  # it is larger, and both together could exceed the budget
        return self._make(nbytes)

    def keep(self, regions: list[Region]) -> None:
        """Use pinned memory again: to pin it anew would take longer than to read into it."""
        self._kept += [
            region
            for region in regions
            if region.nbytes == FileImage.SEGMENT_BYTES and TorchAccelerator.has_pinned(region)
        ]

    def clear(self) -> None:
        """Release what is kept."""
        self._kept.clear()


class HostCache:
    """Holds files of checkpoints in host memory, for loads with `cache=`.

    A load uses the files in the cache. A file that it reads is added if the load reads at least half of it. Copies to
    an accelerator run directly from pinned memory. Tensors on the CPU are copies too, so no tensor depends on the
    cache. An entry is one file; a file without an inode (in a storage of your own) is not held.

    Args:
        budget_bytes: Most bytes of files that are held: a number, or text such as `"40GB"`. A file that does not fit,
            since it is larger or loads under way use the rest, is read without the cache.
        device: Device of the loads: `"auto"` (the accelerator, if there is one), or a device as `torch.device` takes
            it. Memory is pinned for an accelerator, plain for the CPU. The device is examined when the first file is
            read. Pinned memory of a file that is evicted for another one is used again; `evict` and `close` return it
            to the system.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `budget_bytes` is not positive, or no size.
    """

    def __init__(self, budget_bytes: int | str, *, device: str | int | torch.device = "auto") -> None:
        if not isinstance(device, str | int | torch.device):
            raise TypeError(f"device= takes a device of torch's or 'auto', not {device!r}")
        self._budget_bytes = checked_size(budget_bytes)
        self._device: str | int | torch.device = with_current_index(device)
        self._begin()
        _caches.add(self)

    def _begin(self) -> None:
        self._memory = _Memory(self._device)
        self._entries = CacheEntries(self._budget_bytes, self._memory.allocate, self._memory.keep)
        # By id: a `WeakSet` cannot be listed while another thread adds to it.
        self._operations: weakref.WeakValueDictionary[int, Operation[Any]] = weakref.WeakValueDictionary()

    @described_by(load)
    async def prefetch(
        self,
        source: SourceLike,
        *,
        strict: bool = True,
        limits: Limits | None = None,
        follow_symlinks: bool = False,
        progress: Progress = None,
        trace: Trace | None = None,
    ) -> None:
        """Read all files of a checkpoint into the cache. After a cancel the parts that were read stay in the cache.

        Args:
            ...: The other arguments are those of `stio.load`.

        Raises:
            NoSpaceError: The checkpoint is larger than the budget, or than the part that loads under way do not use.
            HostMemoryError: The host has too little memory.
            ClosedError: The cache was closed.
            StioError: See `stio.load`.
        """
        options = LoadOptions(**keywords_for(LoadOptions, locals()))
        await self.prefetch_by(source, options)

    async def prefetch_by(self, source: SourceLike, options: LoadOptions) -> list[str]:
        """Do what `prefetch` does, by options; return the paths of the files.

        With a `DiskCache` in the options, objects of URLs are fetched into it first.
        """

        def body(operation: Operation[list[str]]) -> list[str]:
            with closing(open_with_options(operation, source, replace(options, verify=False))) as opened:
                if options.disk_cache is not None:
                    opened.fetch(options.disk_cache, budget_bytes=options.budget or DEFAULT_BUDGET_BYTES)
                requested = self._requested([(file, file.identity.nbytes) for file in opened.files])
                held = [one for one in self._entries.hold(requested, every=opened.path) if one is not None]
                prefetch(operation, opened, held, options)
                return [file.path for file in opened.files]

        self._entries.require_open()
        operation = Operation(body, name="prefetch")
        self._operations[id(operation)] = operation
        return await operation.wait()

    def has(self, paths: Iterable[str]) -> bool:
        """Return whether these files are in the cache as a whole."""
        return all(self._entries.has(_label(path)) for path in paths)

    def stats(self) -> CacheStats:
        """Return the present contents in numbers, and counters since the cache was made."""
        return self._entries.stats()

    def evict(self, source: SourceLike | None = None) -> int:
        """Evict files that no load uses now. Pinned memory, or more than 128 MiB, is freed after this call.

        Args:
            source: A file; or a directory, or an index in it, for all files below it. None: all files.

        Returns:
            Size of the evicted files, in bytes.
        """
        place = None if source is None else _place_of(source)
        return Operation.result_of(
            lambda: self._free(self._entries.evict(lambda label: place is None or _is_below(label, place))),
            name="evict",
        )

    def close(self) -> None:
        """Cancel prefetches and evict all files; further use raises `ClosedError`. Idempotent; does not wait.

        Loads under way continue; the memory that they use is freed when they have ended.
        """
        Operation.result_of(lambda: self._free(self._entries.close()), name="evict")
        for known in self._operations.valuerefs():
            operation = known()
            if operation is not None:
                operation.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()

    def hold(self, files: Sequence[tuple[Source, int]]) -> Sequence[CachedFile | None]:
        """Return holds on the images of a load's files, for the scheduler; see `FileCache`."""
        return self._entries.hold(self._requested(files))

    def _requested(self, files: Sequence[tuple[Source, int]]) -> list[RequestedFile]:
        self._memory.begin_use()
        _wait_for_tick([file for file, _ in files])
        return [RequestedFile(file, _label(file.path), nbytes) for file, nbytes in files]

    def _free(self, images: list[FileImage]) -> int:
        """Return the memory of images to the system, many bytes on a thread; return their size in bytes."""
        self._memory.clear()
        nbytes = sum(image.nbytes for image in images)

        def clear() -> None:
            for image in images:
                image.take_memory()

        if nbytes > _CLEAR_HERE_BYTES:
            try:
                start_thread(clear, name="evict")
                return nbytes
            except RuntimeError:  # no more threads
                pass
        clear()
        return nbytes


def _place_of(source: SourceLike) -> str:
    path = source.path if isinstance(source, Root) else os.fsdecode(source)
    if is_url(path):
        place: str = schemes.reader_of(path).place_of_url(path)
        return place.rpartition("/")[0] if FileName(place).is_index else place
    if FileName(path).is_index:
        path = os.path.dirname(path) or "."
    return os.path.realpath(path) if os.path.isdir(path) else _label(path)


def _label(path: str) -> str:
    """Return a file's path with its directory resolved. The file itself may be a link, which is not followed."""
    if is_url(path):
        return path
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def _is_below(label: str, place: str) -> bool:
    return label == place or label.startswith(os.path.join(place, ""))


def _wait_for_tick(files: Sequence[Source]) -> None:
    """Wait until a further change of the files would change their times."""
    youngest = max((file.identity.ctime_ns for file in files), default=0)
    left = youngest / 1e9 + _TICK_SECONDS - clock.now()
    if left > 0:
        clock.sleep(min(left, _TICK_SECONDS))


# Fork.

_caches: weakref.WeakSet[HostCache] = weakref.WeakSet()


@process.after_fork_in_child
def _forget_parent() -> None:
    """Empty all caches in a forked child: the threads that fill the parent's images are not there."""
    for cache in _caches:
        if not cache._entries.abandon():
            cache._begin()
