"""Blocking functions and classes of the same names: for scripts, notebooks and plain training loops.

    tensors = stio.sync.load("model/")

Each function runs the coroutine of the same name (`stio.runtime.notifier`): there is no second body. The work runs on
threads of stio's own, and this thread waits. So a call works under a running event loop too, for instance in a
notebook, but it blocks that loop. Outside notebooks the first such call warns.
"""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable, Coroutine, Iterator, Mapping
from importlib import import_module
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

import torch

import stio.conversion.api as conversion
import stio.loading.api as loading
import stio.saving.api as saving
import stio.serving.follower as followers
import stio.serving.host_cache as host_cache
import stio.serving.pool.api as pools
import stio.serving.warm_start.api as warm
import stio.state as state
from stio.loading import Names, PlacementsLike
from stio.process import contextmanager, new_lock
from stio.runtime import in_event_loop, run_blocking
from stio.saving import PendingSave

__all__ = [  # with those of `stio` that do not wait, see below
    "Checkpoint",
    "Follower",
    "HostCache",
    "ModelPool",
    "Saver",
    "Stream",
    "WarmStart",
    "convert",
    "follow",
    "load",
    "load_into",
    "load_state",
    "open",
    "preload",
    "save",
    "save_state",
    "warm_start",
]

_package = import_module("stio")
__all__[:] = sorted({*__all__, *_package.__all__} - {"__version__", "sync"})

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")

_warned = False


def _warn_under_a_loop(stacklevel: int = 3) -> None:
    """Warn once that the call blocks a running loop, except in a notebook, where that is intended."""
    global _warned
    if _warned or "ipykernel" in sys.modules or not in_event_loop():
        return
    _warned = True
    warnings.warn(
        "stio.sync blocks the running event loop until it is done; use the function of the same name in stio there",
        RuntimeWarning,
        stacklevel=stacklevel,
    )


def _blocking(function: Callable[P, Coroutine[Any, Any, T]], *, stacklevel: int = 3) -> Callable[P, T]:
    """Return the blocking twin of a public coroutine function."""

    @functools.wraps(function)
    def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        _warn_under_a_loop(stacklevel)
        return run_blocking(function(*args, **kwargs))

    twin.__module__ = __name__
    return twin


def _blocking_method(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Any, P], T]:
    """Return the blocking twin of a coroutine method, for a class whose `_twin` has that method."""
    return _same_method(_blocking(method, stacklevel=4))


def _same_method(method: Callable[Concatenate[A, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method that calls the method of `_twin`, which does not wait."""

    @functools.wraps(method)
    def twin(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(self._twin, *args, **kwargs)

    twin.__module__ = __name__
    return twin


def _takes_what(made: Callable[P, A]) -> Callable[[Callable[[Any, A], None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator of an `__init__` that gets an asynchronous object: it takes the arguments of its class."""

    def decorate(init: Callable[[Any, A], None]) -> Callable[Concatenate[Any, P], None]:
        @functools.wraps(made.__init__)
        def twin(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> None:
            init(self, made(*args, **kwargs))

        return twin

    return decorate


def _twin_of(function: Callable[P, A], twin_class: Callable[[A], T]) -> Callable[P, T]:
    """Return a function that makes the blocking twin of the object that a public function returns."""

    @functools.wraps(function)
    def twin(*args: P.args, **kwargs: P.kwargs) -> T:
        return twin_class(function(*args, **kwargs))

    twin.__module__ = __name__
    return twin


def __getattr__(name: str) -> Any:
    """Return a public name that does not wait.

    The blocking twins of `stio.distributed`, which imports torch.distributed, are made when they are first used.
    """
    if name in _package.__all__ or name == "compat":
        return getattr(_package, name)
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

    def __init__(self, twin: Any) -> None:
        self._twin = twin

    def __enter__(self) -> Self:
        _warn_under_a_loop()
        run_blocking(self._twin.__aenter__())
        return self

    def __exit__(self, *error: object) -> None:
        run_blocking(self._twin.__aexit__(*error))

    def close(self) -> None:
        """End the work under way and release its resources, as leaving the block does. Idempotent."""
        run_blocking(self._twin.aclose())


class Checkpoint(_Twin):
    """An open checkpoint; the blocking twin of `stio.Checkpoint`.

    Outside a `with` block, `open` or the first use opens it, and `close` closes it.
    """

    def __init__(self, checkpoint: loading.Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._is_new = True  # it was neither opened nor closed
        self._is_outside = False  # `open` or a use has opened it; a block may take it over
        self._lock = new_lock(of_callers=True)

    @property
    def _twin(self) -> loading.Checkpoint:  # it is opened when it is needed
        return self.open()._checkpoint

    def open(self) -> Self:
        """Open the checkpoint now, and not at its first use; return it. Idempotent.

        Raises:
            StioError: See `stio.load`.
        """
        with self._lock:
            if self._is_new:
                self.__enter__()
                self._is_outside = True
        return self

    def __enter__(self) -> Self:
        if self._is_outside:
            self._is_outside = False
            return self
        _warn_under_a_loop()
        run_blocking(self._checkpoint.__aenter__())
        self._is_new = False
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel operations under way, wait until they have ended, and close the files. Idempotent."""
        self._is_new = self._is_outside = False
        run_blocking(self._checkpoint.aclose())

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.read(name)

    def __repr__(self) -> str:
        return repr(self._checkpoint)

    keys = _same_method(loading.Checkpoint.keys)
    info = _same_method(loading.Checkpoint.info)
    load = _blocking_method(loading.Checkpoint.load)
    read = _blocking_method(loading.Checkpoint.read)
    load_into = _blocking_method(loading.Checkpoint.load_into)
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

    promote = _same_method(loading.Stream.promote)

    def __next__(self) -> tuple[str, torch.Tensor]:
        pair = self._twin._take_nowait() or run_blocking(self._twin._take())
        if pair is None:
            raise StopIteration
        return pair  # type: ignore[no-any-return]  # `_twin` is untyped


_prefetch = _blocking(host_cache.HostCache.prefetch)


class HostCache(host_cache.HostCache):
    """Holds files of checkpoints in host memory; the blocking twin of `stio.HostCache`. Each load accepts both."""

    prefetch = _prefetch  # type: ignore[assignment]  # it blocks here


class Follower(_Twin, Iterator[followers.Version]):
    """Follows the newest checkpoint of a run; the blocking twin of `stio.Follower`."""

    wait = _blocking_method(followers.Follower.wait)
    apply = _blocking_method(followers.Follower.apply)
    __next__ = _blocking_method(followers.Follower.__anext__)

    @property
    def version(self) -> followers.Version | None:
        """The version that was applied last; None: there was none yet."""
        version: followers.Version | None = self._twin.version
        return version


class ModelPool(_Twin):
    """Serves more models than a device holds; the blocking twin of `stio.ModelPool`. Threads may share one."""

    @_takes_what(pools.ModelPool)
    def __init__(self, pool: pools.ModelPool) -> None:
        self._twin = pool

    add = _same_method(pools.ModelPool.add)
    prefetch = _blocking_method(pools.ModelPool.prefetch)
    update = _blocking_method(pools.ModelPool.update)
    follow = _twin_of(_same_method(pools.ModelPool.follow), Follower)
    evict = _blocking_method(pools.ModelPool.evict)
    remove = _blocking_method(pools.ModelPool.remove)
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

    done = _blocking_method(warm.WarmStart.done)


class Saver(_Twin):
    """Saves that block the caller only for the snapshot; the blocking twin of `stio.Saver`."""

    @_takes_what(saving.Saver)
    def __init__(self, saver: saving.Saver) -> None:
        self._twin = saver
        saver._is_used = True  # its `save` needs no `await`

    save = _blocking_method(saving.Saver.save)
    save_state = _blocking_method(saving.Saver.save_state)
    __reduce__ = saving.Saver.__reduce__  # raises

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """Saves that have not ended, the oldest first."""
        pending: tuple[PendingSave, ...] = self._twin.pending
        return pending


def _saver_of(saver_class: type[saving.Saver]) -> type[Saver]:
    """Return the blocking twin of a class of savers."""

    @_takes_what(saver_class)
    def make(self: Saver, saver: saving.Saver) -> None:
        self._twin = saver
        saver._is_used = True

    twin: type[Saver] = type(saver_class.__name__, (Saver,), {"__doc__": saver_class.__doc__, "__init__": make})
    return twin


load = _blocking(loading.load)
load_into = _blocking(loading.load_into)
load_state = _blocking(state.load_state)
save = _blocking(saving.save)
save_state = _blocking(state.save_state)
convert = _blocking(conversion.convert)
preload = _blocking(_package.preload)
open = _twin_of(loading.open, Checkpoint)
follow = _twin_of(followers.follow, Follower)
warm_start = _twin_of(warm.warm_start, WarmStart)
