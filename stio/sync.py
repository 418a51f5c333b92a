"""The same names, blocking: for scripts, notebooks and plain training loops.

    tensors = stio.sync.load("model/")

A thin face over the same operations: they run on threads of stio's own, this one only waits. So it works under a
running event loop too (a notebook's), but blocks it; outside notebooks that earns a warning, once.
"""

from __future__ import annotations

import asyncio
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from types import TracebackType
from typing import Any, Self, Unpack

import torch
from torch import nn

from stio.conversion.api import ConvertKeywords, PathLike, start_conversion
from stio.loading.body import IntoLoad, start_load
from stio.loading.cache.host_cache import HostCacheBase, PrefetchKeywords
from stio.loading.module import LoadReport
from stio.loading.options import Keywords, Settings, SourceLike
from stio.loading.plan import Names
from stio.loading.session import CheckpointBase, StreamBase
from stio.loading.warm_start.api import WarmStartBase
from stio.runtime.limits import DEFAULT_BUDGET_BYTES
from stio.saving.nested import flatten_blocking
from stio.saving.options import DestinationLike, SaveKeywords, SaveOptions, SaveResult, TensorsLike
from stio.saving.pending import PendingSave
from stio.saving.saver import SaverBase
from stio.saving.staging_pool import StagingPool
from stio.state import start_load_state

__all__ = [
    "Checkpoint",
    "HostCache",
    "Saver",
    "Stream",
    "WarmStart",
    "convert",
    "load",
    "load_into",
    "load_state",
    "open",
    "save",
    "save_state",
    "warm_start",
]

_warned = False


def load(
    source: SourceLike,
    *,
    names: Names | None = None,
    slices: Mapping[str, object] | None = None,
    **keywords: Unpack[Keywords],
) -> dict[str, torch.Tensor]:
    """Load a checkpoint; see `stio.load`. A KeyboardInterrupt ends the load before it comes out."""
    _warn_under_a_loop()
    take = start_load(source, Settings(**keywords), names, slices).result()
    return take()


def load_into(
    module: nn.Module, source: SourceLike, *, assign: bool = False, **keywords: Unpack[Keywords]
) -> LoadReport:
    """Load a checkpoint into a module; see `stio.load_into`."""
    _warn_under_a_loop()
    return _place(IntoLoad(source, module, Settings(**keywords), assign=assign))


def _place(load: IntoLoad) -> LoadReport:
    load.feed.operation.start()
    try:
        while (landed := load.feed.next_blocking()) is not None:
            load.place(landed)
    except BaseException:
        try:
            load.feed.close()  # placing failed: nobody takes what is still to come
        finally:
            load.discard()
        raise
    return load.complete()


def open(source: SourceLike, **keywords: Unpack[Keywords]) -> Checkpoint:
    """Return a checkpoint to be opened by `with`; see `stio.open`."""
    return Checkpoint(source, Settings(**keywords))


class Checkpoint(CheckpointBase):
    """An open checkpoint; the blocking twin of `stio.Checkpoint`."""

    def __enter__(self) -> Self:
        _warn_under_a_loop()
        self._opened = self._start_open().result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End operations under way, and give the descriptors back. Idempotent."""
        opened, operations = self._begin_close()
        interrupted: BaseException | None = None
        for operation in operations:
            while operation.running:
                try:
                    operation.close()
                except BaseException as error:
                    interrupted = error  # a KeyboardInterrupt has to wait until no thread reads from the files
        if opened is not None:
            opened.discard()
        if interrupted is not None:
            raise interrupted

    def load(self, names: Names | None = None, slices: Mapping[str, object] | None = None) -> dict[str, torch.Tensor]:
        """Load tensors; see `stio.load`."""
        take = self._start_load(names, slices).result()
        return take()

    def read(self, name: str, index: object = None) -> torch.Tensor:
        """Load one tensor, or a part of it; see `stio.Checkpoint.read`."""
        take = self._start_load(*self._one(name, index)).result()
        return take()[name]

    def stream(self, names: Names | None = None, slices: Mapping[str, object] | None = None) -> Stream:
        """Return tensors as they become ready, within the budget; see `Stream`."""
        return Stream(self._feed(names, slices))

    def load_into(self, module: nn.Module, *, strict: bool | None = None, assign: bool = False) -> LoadReport:
        """Load into a module; see `stio.load_into`."""
        return _place(self._into(module, strict=strict, assign=assign))


class Stream(StreamBase, Iterator[tuple[str, torch.Tensor]]):
    """Pairs of name and tensor as they become ready; the blocking twin of `stio.Stream`."""

    def __next__(self) -> tuple[str, torch.Tensor]:
        with self._turn:  # several threads may share a stream
            self._begin()
            while not self._names:
                landed = self._feed.next_blocking()
                if landed is None:
                    raise StopIteration
                self._unpack(landed)
            return self._pop()

    def __enter__(self) -> Self:
        self._begin()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the reading, and wait until nothing of it is left. Idempotent."""
        self._end()
        self._feed.close()


class HostCache(HostCacheBase):
    """Keeps files of checkpoints in host memory; the blocking twin of `stio.HostCache`. Any load takes either."""

    def prefetch(self, source: SourceLike, **keywords: Unpack[PrefetchKeywords]) -> None:
        """Bring all files of a checkpoint; see `stio.HostCache.prefetch`."""
        _warn_under_a_loop()
        self._start_prefetch(source, keywords).result()


def warm_start(
    module: nn.Module, source: SourceLike, *, order: Iterable[str] | None = None, **keywords: Unpack[Keywords]
) -> WarmStart:
    """Load a module on `meta` while its forward may run already; see `stio.warm_start`."""
    return WarmStart(module, source, Settings(**keywords), order)


class WarmStart(WarmStartBase):
    """A warm start under way; the blocking twin of `stio.WarmStart`."""

    def __enter__(self) -> Self:
        _warn_under_a_loop()
        module = self._module
        ready = self._begin().result()
        assert module is not None
        self._go_on(module, ready)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.done()
        finally:
            self.close()

    def done(self) -> LoadReport:
        """Wait until all parameters are there; see `stio.WarmStart.done`."""
        load = self._load
        load.notifier.wait_for_blocking(lambda: load.operation.done)
        return self._outcome()

    def close(self) -> None:
        """End the load, if it has not ended, and wait until nothing of it is left. Idempotent."""
        if self._filling is None:
            return
        interrupted: BaseException | None = None
        while self._filling.operation.running:
            try:
                self._filling.operation.close()
            except BaseException as error:
                interrupted = error  # a KeyboardInterrupt has to wait until no thread fills parameters
        self._filling.close()
        if interrupted is not None:
            raise interrupted


def save(
    tensors: TensorsLike,
    destination: DestinationLike,
    *,
    budget_bytes: int | None = None,
    **keywords: Unpack[SaveKeywords],
) -> SaveResult:
    """Save a checkpoint; see `stio.save`. A KeyboardInterrupt rolls it back before it comes out."""
    _warn_under_a_loop()
    return PendingSave(
        tensors,
        destination,
        SaveOptions(**keywords),
        pool=StagingPool(DEFAULT_BUDGET_BYTES if budget_bytes is None else budget_bytes),
        stage_first=False,
    ).complete_blocking()


def save_state(
    state: object, destination: DestinationLike, *, budget_bytes: int | None = None, **keywords: Unpack[SaveKeywords]
) -> SaveResult:
    """Save nested state; see `stio.save_state`."""
    _warn_under_a_loop()
    tensors, keywords = flatten_blocking(state, keywords)
    return save(tensors, destination, budget_bytes=budget_bytes, **keywords)


def load_state(source: SourceLike, **keywords: Unpack[Keywords]) -> Any:
    """Load nested state; see `stio.load_state`."""
    _warn_under_a_loop()
    take = start_load_state(source, keywords).result()
    return take()


def convert(source: PathLike, destination: PathLike, **keywords: Unpack[ConvertKeywords]) -> SaveResult:
    """Convert a checkpoint; see `stio.convert`. A KeyboardInterrupt rolls it back before it comes out."""
    _warn_under_a_loop()
    return start_conversion(source, destination, **keywords).result()


class Saver(SaverBase):
    """Saves that cost the caller the snapshot alone; the blocking twin of `stio.Saver`."""

    def save(self, tensors: TensorsLike, destination: DestinationLike, **keywords: Unpack[SaveKeywords]) -> PendingSave:
        """Begin a save; return once its snapshot is complete. See `stio.Saver.save`."""
        while (pending := self._submit(tensors, destination, keywords)) is None:
            if (oldest := self._oldest()) is not None:
                oldest.join()
        pending.wait_staged_blocking()
        return pending

    def save_state(self, state: object, destination: DestinationLike, **keywords: Unpack[SaveKeywords]) -> PendingSave:
        """Begin to save nested state; return once its snapshot is complete. See `stio.Saver.save_state`."""
        tensors, keywords = flatten_blocking(state, self._keywords | keywords)
        return self.save(tensors, destination, **keywords)

    def close(self) -> None:
        """Wait for what is under way; raise what failed and nobody was told of. Idempotent.

        A KeyboardInterrupt meanwhile rolls back what is left.
        """
        self._close()
        try:
            self._drain()
        finally:
            failed = self._finish()
        if failed is not None:
            raise failed

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        self._close()
        try:
            if isinstance(error, Exception | SystemExit):
                self._drain()
            else:
                self._roll_back()
        finally:
            self._finish()  # the exception at hand goes first; failures were logged

    def _drain(self) -> None:
        try:
            while (oldest := self._oldest()) is not None:
                oldest.join()
        except BaseException:
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        for pending in reversed(self.pending):  # the first to go would let the next one begin
            pending.cancel()
        for pending in self.pending:
            pending.close()


def _warn_under_a_loop() -> None:
    """Say once that a running loop stands still meanwhile, unless it is a notebook's, where that is meant."""
    global _warned
    if _warned or "ipykernel" in sys.modules:
        return
    if not _in_a_loop():
        return
    _warned = True
    warnings.warn(
        "stio.sync blocks the running event loop until it is done; use the awaitable twin there",
        RuntimeWarning,
        stacklevel=3,
    )


def _in_a_loop() -> bool:
    trio = sys.modules.get("trio")  # who runs it has imported it
    if trio is not None and trio.lowlevel.in_trio_run():
        return True
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
