"""`HostCache`: checkpoints in host memory, so that the next load of them reads no disk.

What is kept is known by its identity: device, inode, size and times of change of the file that was opened; memory is
pinned where there is an accelerator. Loads come by `hold` (`stio.loading.prepare`), a prefetch is a load without tensors.
Which file is there and which goes is the shelf's part (`stio.loading.cache.entries`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import torch

from stio.device.base import current_device, numbered, resolve_device
from stio.device.copy_out import has_streams
from stio.device.cuda import TorchAccelerator
from stio.loading.cache.entries import CacheEntries, CacheStats, Wanted
from stio.loading.cache.file_image import CachedFile, Image
from stio.loading.open import open_checkpoint
from stio.loading.options import Settings, SourceLike
from stio.loading.prepare import prepare_prefetch
from stio.runtime import memory
from stio.runtime.limits import Limits
from stio.runtime.memory import Region
from stio.runtime.operation import Operation, start_thread
from stio.runtime.process import after_fork_in_child
from stio.runtime.progress import Progress, progress_callback
from stio.runtime.trace import Trace
from stio.storage.base import AsyncRoot, Root, Source

__all__ = ["CacheStats", "HostCache", "HostCacheBase", "PrefetchKeywords"]

logger = logging.getLogger("stio")

_TICK_SECONDS = 0.05
"""The clock of a filesystem ticks every 1 to 10 ms: within one tick a file may change twice and look the same."""

_CLEAR_HERE_BYTES = 128 << 20
"""Giving more than this back takes milliseconds, for which an event loop should not stand still."""


class PrefetchKeywords(TypedDict, total=False):
    """Keywords of `HostCache.prefetch`; they mean what they mean to `stio.open`."""

    strict: bool
    limits: Limits | None
    follow_symlinks: bool
    progress: Progress
    trace: Trace | None


class _Memory:
    """Makes memory, pinned for an accelerator; which one it is, is looked at when that is first asked.

    Args:
        device: What `torch.device` takes, or `"auto"`.
    """

    def __init__(self, device: str | int | torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._make: Callable[[int], Region] | None = None

    @property
    def is_pinned(self) -> bool:
        """Whether a driver knows of it."""
        return self._make not in (None, memory.allocate)

    def resolve(self) -> Callable[[int], Region]:
        """Return what makes it.

        Raises:
            DeviceError: There is no such device.
        """
        with self._lock:
            if self._make is None:
                device = resolve_device(self._device)
                plain = device.type == "cpu" or (self._device == "auto" and not has_streams(device))
                self._make = memory.allocate if plain else TorchAccelerator(device).staging
            return self._make

    def allocate(self, nbytes: int) -> Region:
        """Return memory.

        Raises:
            MemoryError: There is none.
        """
        try:
            return self.resolve()(nbytes)
        except MemoryError:
            logger.warning("there is no host memory for the cache: what it cannot keep is read without it")
            raise


class HostCacheBase:
    """All of a cache but the waiting, in which the faces differ.

    Args:
        budget_bytes: See `HostCache`.
        device: See `HostCache`.
    """

    def __init__(self, budget_bytes: int, *, device: str | int | torch.device = "auto") -> None:
        if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool):
            raise TypeError(f"budget_bytes takes a number of bytes, not {budget_bytes!r}")
        if budget_bytes <= 0:
            raise ValueError(f"budget_bytes must be positive, not {budget_bytes}")
        if not isinstance(device, str | int | torch.device):
            raise TypeError(f"device= takes a device of torch's or 'auto', not {device!r}")
        self._budget_bytes = budget_bytes
        self._device: str | int | torch.device = numbered(device, current_device())
        self._begin()
        _caches.add(self)

    def _begin(self) -> None:
        self._memory = _Memory(self._device)
        self._shelf = CacheEntries(self._budget_bytes, self._memory.allocate)
        self._operations: weakref.WeakSet[Operation[None]] = weakref.WeakSet()

    def stats(self) -> CacheStats:
        """Return what it holds, and what it did so far."""
        return self._shelf.stats()

    def evict(self, source: SourceLike | None = None) -> int:
        """Let go of files that no load uses now. More than 128 MiB is given back on a thread, a little later.

        Args:
            source: A file; or a directory, or an index in it, for all that was kept from below. All by default.

        Returns:
            Their size in bytes.
        """
        place = None if source is None else _place_of(source)
        return _give_back(self._shelf.evict(lambda label: place is None or _is_below(label, place)))

    def close(self) -> None:
        """End prefetches, let go of everything, refuse further use. Idempotent.

        Loads under way go on; what they use is given back when they have ended.
        """
        images = self._shelf.close()
        for operation in list(self._operations):
            operation.cancel()
        _give_back(images)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hold(self, files: Sequence[tuple[Source, int]]) -> Sequence[CachedFile | None]:
        """Return what is kept of a load's files, for the engine; see `stio.loading.cache.file_image.FileCache`."""
        return self._shelf.hold(self._wanted(files))

    def _wanted(self, files: Sequence[tuple[Source, int]]) -> list[Wanted]:
        self._memory.resolve()
        _wait_for_tick([file for file, _ in files])
        return [Wanted(file, _label(file.path), nbytes) for file, nbytes in files]

    def _start_prefetch(self, source: SourceLike, keywords: PrefetchKeywords) -> Operation[None]:
        settings = Settings(**keywords)

        def body(operation: Operation[None]) -> None:
            opened = open_checkpoint(source, settings.open_options(), check=operation.check)
            try:
                wanted = self._wanted([(file, file.identity.nbytes) for file in opened.files])
                kept = [one for one in self._shelf.hold(wanted, every=opened.path) if one is not None]
                progress = progress_callback(settings.progress)
                transfer = prepare_prefetch(opened, kept, progress=progress, trace=settings.trace)
                operation.on_cancel(transfer.run.stop)
                transfer.carry_out()
            finally:
                opened.close()

        self._shelf.require_open()
        operation = Operation(body, name="prefetch")
        self._operations.add(operation)
        return operation.start()


class HostCache(HostCacheBase):
    """Keeps files of checkpoints in host memory, for loads with `cache=`.

    A load takes from it what is there, and leaves there what it reads, if that is at least half of a file. To an
    accelerator copies run straight out of pinned memory; tensors on the CPU are copies too: what a tensor holds never
    depends on the cache. Entries are files; those without an inode (a storage of one's own) are not kept.

    Args:
        budget_bytes: Most bytes of files that are kept. A file for which there is no room, since it is larger or loads
            under way use the rest, is read without the cache.
        device: Where loads will go: `"auto"` (the accelerator, if there is one), or a device. Memory is pinned for an
            accelerator, plain for the CPU. The device is looked at when the first file comes. Pinned memory that is let
            go of stays with torch, which gives it out again when it next pins.
    """

    async def prefetch(self, source: SourceLike, **keywords: Unpack[PrefetchKeywords]) -> None:
        """Bring all files of a checkpoint. A cancel leaves what was read there.

        Args:
            source: See `stio.load`.
            **keywords: See `PrefetchKeywords`.

        Raises:
            NoSpaceError: It is larger than the budget, or than what loads under way leave of it.
            MemoryError: The host has too little memory.
            ClosedError: The cache was closed.
            StioError: See `stio.load`.
        """
        await self._start_prefetch(source, keywords).wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _place_of(source: SourceLike) -> str:
    path = source.path if isinstance(source, Root | AsyncRoot) else os.fsdecode(source)
    if path.endswith(".index.json"):
        path = os.path.dirname(path) or "."
    return os.path.realpath(path) if os.path.isdir(path) else _label(path)


def _label(path: str) -> str:
    """Return where a file stands; a link of its own is not followed: what it leads to has a name that nobody uses."""
    folder, name = os.path.split(path)
    return os.path.join(os.path.realpath(folder), name)


def _is_below(label: str, place: str) -> bool:
    return label == place or label.startswith(os.path.join(place, ""))


def _wait_for_tick(files: Sequence[Source]) -> None:
    """Wait until a further change of the files would show in their times of change."""
    youngest = max((file.identity.ctime_ns for file in files), default=0)
    left = youngest / 1e9 + _TICK_SECONDS - time.time()
    if left > 0:
        time.sleep(min(left, _TICK_SECONDS))


def _give_back(images: list[Image]) -> int:
    """Clear images, many bytes on a thread; return their size."""
    nbytes = sum(image.nbytes for image in images)

    def clear() -> None:
        for image in images:
            image.clear()

    if nbytes > _CLEAR_HERE_BYTES:
        try:
            start_thread(clear, name="evict")
            return nbytes
        except RuntimeError:  # no more threads
            pass
    clear()
    return nbytes


# Fork.

_caches: weakref.WeakSet[HostCacheBase] = weakref.WeakSet()
_graveyard: list[Any] = []


@after_fork_in_child
def _forget_parent() -> None:
    """Start afresh in a forked child: what fills the parent's images is not here."""
    for cache in _caches:
        images = cache._shelf.abandon()
        if cache._memory.is_pinned:  # never freed here: the driver that pinned it does not know this process
            _graveyard.append(images)
        if not cache._shelf.is_closed:
            cache._begin()
