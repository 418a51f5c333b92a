"""Blocking functions and classes of the same names: for scripts, notebooks and plain training loops.

    tensors = stio.sync.load("model/")

Each function runs the coroutine of the same name (`stio.runtime.blocking`): there is no second body. The work runs on
threads of stio's own, and this thread waits. So a call works under a running event loop too, for instance in a
notebook, but it blocks that loop. Outside notebooks the first such call warns.
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from inspect import iscoroutinefunction
from types import SimpleNamespace, TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch

import stio.conversion.api as conversion
import stio.loading.api as loading
import stio.loading.cache.host_cache as host_cache
import stio.loading.warm_start.api as warm
import stio.pool.api as pools
import stio.saving.api as saving
import stio.state as state
from stio.format.shared import SharedPolicy
from stio.loading.cache.disk_cache import DiskCache
from stio.loading.options import SourceLike
from stio.loading.plan import Names
from stio.loading.select import PlacementsLike
from stio.runtime.blocking import in_event_loop, run_blocking
from stio.runtime.hashing import HashName
from stio.runtime.limits import Limits
from stio.runtime.progress import Progress
from stio.runtime.trace import Trace
from stio.saving.options import DEFAULT_PATTERN, CommitStep, Durability, ShardNames
from stio.saving.pending import PendingSave
from stio.storage.commit.directory_lock import LOCK_TIMEOUT_SECONDS

__all__ = [
    "Checkpoint",
    "HostCache",
    "ModelPool",
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

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")

_warned = False


def _warn_under_a_loop() -> None:
    """Warn once that the call blocks a running loop, except in a notebook, where that is intended."""
    global _warned
    if _warned or "ipykernel" in sys.modules or not in_event_loop():
        return
    _warned = True
    warnings.warn(
        "stio.sync blocks the running event loop until it is done; use the function of the same name in stio there",
        RuntimeWarning,
        stacklevel=3,
    )


def _blocking(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Return the blocking twin of a public coroutine function."""

    @functools.wraps(function)
    def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        _warn_under_a_loop()
        return run_blocking(function(*args, **kwargs))

    twin.__module__ = __name__
    return twin


def _blocking_method(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking twin of a coroutine method, for a class whose `_twin` has that method."""

    @functools.wraps(method)
    def twin(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        _warn_under_a_loop()
        return run_blocking(method(self._twin, *args, **kwargs))

    twin.__module__ = __name__
    return twin


def _same_method(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls the method of `_twin`, which does not wait."""

    @functools.wraps(method)
    def twin(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._twin, *args, **kwargs)

    twin.__module__ = __name__
    return twin


def _twin_of(function: Callable[P, A], twin_class: Callable[[A], T]) -> Callable[P, T]:
    """Return a function that makes the blocking twin of the object that a public function returns."""

    @functools.wraps(function)
    def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return twin_class(function(*args, **kwargs))

    twin.__module__ = __name__
    return twin


def __getattr__(name: str) -> Any:
    """Make the blocking twins of `stio.distributed`, which imports torch.distributed, when they are first used."""
    if name != "distributed":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module("stio.distributed")
    found = {name: getattr(module, name) for name in module.__all__}
    twins = SimpleNamespace(**{name: _public_twin(one) for name, one in found.items()})
    return globals().setdefault(name, twins)  # of several threads one makes the classes that all get


def _public_twin(public: Any) -> Any:
    """Return the blocking twin of a public name; the name itself if it does not wait."""
    if isinstance(public, type) and issubclass(public, saving.Saver):
        return _saver_of(public)
    return _blocking(public) if iscoroutinefunction(public) else public


class _Twin:
    """Base of the blocking twins of asynchronous context managers."""

    _twin: Any

    def __enter__(self) -> Self:
        _warn_under_a_loop()
        run_blocking(self._twin.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        run_blocking(self._twin.__aexit__(kind, error, trace))

    def close(self) -> None:
        """End the work under way and release its resources, as leaving the block does. Idempotent."""
        run_blocking(self._twin.aclose())


class Checkpoint(_Twin):
    """An open checkpoint; the blocking twin of `stio.Checkpoint`."""

    def __init__(self, checkpoint: loading.Checkpoint) -> None:
        self._twin = checkpoint

    keys = _same_method(loading.Checkpoint.keys)
    info = _same_method(loading.Checkpoint.info)
    load = _blocking_method(loading.Checkpoint.load)
    read = _blocking_method(loading.Checkpoint.read)
    load_into = _blocking_method(loading.Checkpoint.load_into)
    __repr__ = _same_method(loading.Checkpoint.__repr__)
    _repr_html_ = _same_method(loading.Checkpoint._repr_html_)
    __len__ = _same_method(loading.Checkpoint.__len__)
    __contains__ = _same_method(loading.Checkpoint.__contains__)
    __iter__ = _same_method(loading.Checkpoint.__iter__)

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Text metadata of the shards and of their index."""
        metadata: Mapping[str, Any] = self._twin.metadata
        return metadata

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names that share another tensor's data (tied weights), to that tensor's name."""
        aliases: Mapping[str, str] = self._twin.aliases
        return aliases

    def stream(
        self,
        names: Names | None = None,
        slices: Mapping[str, object] | None = None,
        *,
        placements: PlacementsLike | None = None,
    ) -> Stream:
        """Return a stream of the tensors as they become ready, within the budget; see `stio.Stream`."""
        return Stream(self._twin.stream(names, slices, placements=placements))


class Stream(_Twin, Iterator[tuple[str, torch.Tensor]]):
    """Pairs of name and tensor as they become ready; the blocking twin of `stio.Stream`. Threads may share one."""

    def __init__(self, stream: loading.Stream) -> None:
        self._twin = stream

    promote = _same_method(loading.Stream.promote)

    def __next__(self) -> tuple[str, torch.Tensor]:
        pair = self._twin._take_nowait() or run_blocking(self._twin._take())
        if pair is None:
            raise StopIteration
        return pair  # type: ignore[no-any-return]  # `_twin` is untyped


class HostCache(host_cache.HostCache):
    """Holds files of checkpoints in host memory; the blocking twin of `stio.HostCache`. Each load accepts both."""

    def prefetch(  # type: ignore[override]  # it blocks here
        self,
        source: SourceLike,
        *,
        strict: bool = True,
        limits: Limits | None = None,
        follow_symlinks: bool = False,
        progress: Progress = None,
        trace: Trace | None = None,
    ) -> None:
        """Read all files of a checkpoint into the cache; see `stio.HostCache.prefetch`."""
        _warn_under_a_loop()
        run_blocking(
            super().prefetch(
                source, strict=strict, limits=limits, follow_symlinks=follow_symlinks, progress=progress, trace=trace
            )
        )


class ModelPool(_Twin):
    """Serves more models than a device holds; the blocking twin of `stio.ModelPool`. Threads may share one."""

    def __init__(
        self,
        *,
        device: str | int | torch.device = "auto",
        device_bytes: int | str,
        host_bytes: int | str = 0,
        disk: DiskCache | None = None,
        max_hold_seconds: float = 1.0,
        max_loads: int = 1,
        trace: Trace | None = None,
    ) -> None:
        self._twin = pools.ModelPool(
            device=device,
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            disk=disk,
            max_hold_seconds=max_hold_seconds,
            max_loads=max_loads,
            trace=trace,
        )

    add = _same_method(pools.ModelPool.add)
    prefetch = _blocking_method(pools.ModelPool.prefetch)
    update = _blocking_method(pools.ModelPool.update)
    status = _same_method(pools.ModelPool.status)
    names = _same_method(pools.ModelPool.names)
    stats = _same_method(pools.ModelPool.stats)

    @contextmanager
    def use(self, name: str, *, priority: int = 0) -> Iterator[Any]:
        """Return a context in which a model is on the device; see `stio.ModelPool.use`."""
        use = self._twin.use(name, priority=priority)
        _warn_under_a_loop()
        model = run_blocking(use.__aenter__())
        try:
            yield model
        finally:
            del model
            run_blocking(use.__aexit__(None, None, None))


class WarmStart(_Twin):
    """A warm start under way; the blocking twin of `stio.WarmStart`."""

    def __init__(self, warm_start: warm.WarmStart) -> None:
        self._twin = warm_start

    done = _blocking_method(warm.WarmStart.done)


class Saver(_Twin):
    """Saves that block the caller only for the snapshot; the blocking twin of `stio.Saver`."""

    def __init__(
        self,
        *,
        keep_last: int | None = None,
        adopt: str | os.PathLike[str] | None = None,
        max_pending: int = 1,
        when_full: saving.WhenFull = "wait",
        budget_bytes: int | str | None = None,
        max_shard_size: int | str | None = None,
        metadata: Mapping[str, str] | None = None,
        filename_pattern: str = DEFAULT_PATTERN,
        shared: SharedPolicy = "dedupe",
        shard_names: ShardNames = "auto",
        commit: CommitStep = "index",
        durability: Durability = "full",
        hash: HashName | None = None,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        progress: Progress = None,
        trace: Trace | None = None,
        switch_interval: float | None = None,
    ) -> None:
        self._twin = saving.Saver(
            keep_last=keep_last,
            adopt=adopt,
            max_pending=max_pending,
            when_full=when_full,
            budget_bytes=budget_bytes,
            max_shard_size=max_shard_size,
            metadata=metadata,
            filename_pattern=filename_pattern,
            shared=shared,
            shard_names=shard_names,
            commit=commit,
            durability=durability,
            hash=hash,
            lock_timeout=lock_timeout,
            progress=progress,
            trace=trace,
            switch_interval=switch_interval,
        )

    save = _blocking_method(saving.Saver.save)
    save_state = _blocking_method(saving.Saver.save_state)

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """Saves that have not ended, the oldest first."""
        pending: tuple[PendingSave, ...] = self._twin.pending
        return pending


def _saver_of(saver_class: type[saving.Saver]) -> type[Saver]:
    """Return the blocking twin of a class of savers."""

    def make(self: Saver, **keywords: Any) -> None:
        self._twin = saver_class(**keywords)

    members = {"__doc__": saver_class.__doc__, "__init__": functools.wraps(saver_class.__init__)(make)}
    twin: type[Saver] = type(saver_class.__name__, (Saver,), members)
    return twin


load = _blocking(loading.load)
load_into = _blocking(loading.load_into)
load_state = _blocking(state.load_state)
save = _blocking(saving.save)
save_state = _blocking(state.save_state)
convert = _blocking(conversion.convert)
open = _twin_of(loading.open, Checkpoint)
warm_start = _twin_of(warm.warm_start, WarmStart)
