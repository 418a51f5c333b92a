"""`HostCache`: checkpoints in host memory, so that the next load of them reads no disk.

A file is identified by device, inode, size and times of change, as it was opened; memory is pinned where there is an
accelerator. Loads call `hold` (`stio.loading.planned`); a prefetch is a load without tensors. `entries.py` decides
which files are held and which are evicted.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any, Self, TypeVar

import torch

from stio.device.base import current_device, resolve_device, with_current_index
from stio.device.cuda import TorchAccelerator, has_streams
from stio.device.pinned import is_pinned
from stio.format.naming import is_index
from stio.loading.api import load
from stio.loading.body import fetch_all, open_with_options
from stio.loading.caches import SEGMENT_BYTES, CachedFile, CacheStats, FileImage, on_own_thread
from stio.loading.options import LoadOptions, SourceLike
from stio.loading.planned import plan_prefetch
from stio.loading.read_paths import Delivery
from stio.loading.scheduler import LoadScheduler
from stio.runtime import clock, memory, schemes
from stio.runtime.limits import Limits, checked_size
from stio.runtime.locks import new_lock
from stio.runtime.memory import Region
from stio.runtime.operation import Operation, start_thread
from stio.runtime.process import after_fork_in_child
from stio.runtime.progress import Progress
from stio.runtime.text import described_by, is_url, keywords_for
from stio.runtime.trace import Trace
from stio.serving.entries import CacheEntries, RequestedFile
from stio.storage.base import Root, Source

T = TypeVar("T")
logger = logging.getLogger("stio")

_TICK_SECONDS = 0.05
"""The clock of a filesystem advances every 1 to 10 ms. If a file changes twice in between, its times do not show it."""

_CLEAR_HERE_BYTES = 128 << 20
"""To free more than this takes milliseconds, and an event loop should not be blocked for so long."""


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
                if device.type != "cpu" and (self._device != "auto" or has_streams(device)):
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
        self._kept += [region for region in regions if region.nbytes == SEGMENT_BYTES and is_pinned(region)]

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
        self._device: str | int | torch.device = with_current_index(device, current_device())
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
            with closing(open_with_options(operation, source, options)) as opened:
                if options.disk_cache is not None:
                    fetch_all(opened, options.disk_cache, options)
                requested = self._requested([(file, file.identity.nbytes) for file in opened.files])
                held = [one for one in self._entries.hold(requested, every=opened.path) if one is not None]
                planned = plan_prefetch(opened, held, options)
                LoadScheduler(planned, options, Delivery(), doing="prefetching").run_for(operation)
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
        return on_own_thread(
            lambda: self._free(self._entries.evict(lambda label: place is None or _is_below(label, place)))
        )

    def close(self) -> None:
        """Cancel prefetches and evict all files; further use raises `ClosedError`. Idempotent; does not wait.

        Loads under way continue; the memory that they use is freed when they have ended.
        """
        on_own_thread(lambda: self._free(self._entries.close()))
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
        return place.rpartition("/")[0] if is_index(place) else place
    if is_index(path):
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


@after_fork_in_child
def _forget_parent() -> None:
    """Empty all caches in a forked child: the threads that fill the parent's images are not there."""
    for cache in _caches:
        cache._entries.abandon()
        if not cache._entries.is_closed:
            cache._begin()
