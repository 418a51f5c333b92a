"""`ModelPool`: models by name, loaded when they are needed, and evicted when others need their room.

What is here runs on callers' threads. They post to the pool's thread (`thread.py`) what they want, and each waits for a
notifier of its own. Whether a caller got its model or left first is decided by one `dict.setdefault`.
"""

from __future__ import annotations

import os
import weakref
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, Self

import torch

from stio import clock, process
from stio.errors import CheckpointNotFoundError, listed, printable
from stio.limits import ACCELERATOR_BUDGET_BYTES, Limits, checked_size
from stio.loading import DtypesLike, LoadOptions, load
from stio.remote import DiskCache
from stio.runtime import AsyncOnly
from stio.runtime.reports import Progress, Trace
from stio.serving.follower import Follower, Loaded, Own, follow
from stio.serving.host_cache import HostCache
from stio.serving.pool.content import Content, Make
from stio.serving.pool.policy import ModelStatus, Policy, PoolStats, State, Tier
from stio.serving.pool.thread import Caller, Change, PooledModel, PoolThread
from stio.storage import broken_link
from stio.storage.checkpoint import SourceLike
from stio.text import described_by, is_url

RING_BYTES = 96 << 20
"""Most staging memory of loads to a device."""

_MIN_BUDGET_BYTES = 4 << 20

_TIERS: dict[State, Tier] = {"resident": "device", "updating": "device", "loading": "loading", "measuring": "loading"}


class ModelUse(AsyncOnly, Caller):
    """One use of a model, entered once by `async with`; made by `ModelPool.use`."""

    _sync_name = "ModelPool"
    _is_entered = False

    async def __aenter__(self) -> Any:
        """Wait until the model is on the device, and return it."""
        if self._is_entered:
            raise ValueError("a use of a model is entered once; call pool.use() for each")
        self.thread.require_open()
        self._is_entered, self.called = True, clock.monotonic()
        self.thread.post(self.thread.called, self)
        return await self.wait()

    async def __aexit__(self, *error: object) -> None:
        """Give the model back. A dictionary is empty then. Does not wait."""
        value, event = self.take(), None
        if value is None:
            return
        try:
            event = self.thread.event_now()
        finally:  # a device that does not answer ends the use too
            if isinstance(value, dict):
                value.clear()
            self.thread.post(self.thread.released, self.entry, event)

    def __del__(self) -> None:
        is_waiting = self._value is not None or not self._decided
        if self._is_entered and is_waiting and not self.thread.is_closed:  # interrupted between the wait and the block
            self.leave()


class ModelPool(AsyncOnly):
    """Serves more models than a device holds: each is loaded when it is needed, and evicted when others need its room.

        async with stio.ModelPool(device="cuda", device_bytes="60GB", host_bytes="200GB") as pool:
            pool.add("chat", "models/chat/", make=lambda: Network(config))
            async with pool.use("chat") as model:
                ...

    A model in use stays on the device. Room is made before a load begins, by eviction of models without users, the
    least recently used first, so the bound of the device is never exceeded. All callers that wait for a model get it
    together. While others wait for room, a model in use gets further users for at most `max_hold_seconds`. So requests
    that alternate between models share loads, and each is served if each use ends.

    The memory of an evicted model is free when nothing refers to its tensors. So do not keep a tensor of a model after
    the block; an error names what is kept. Work that is queued on the current stream at the end of the block is waited
    for before the memory is used again. Work on other streams must end inside the block.

    Args:
        device: Device of the models: `"auto"`, or an argument of `torch.device`. With `"cpu"` they are read into memory
            of their own.
        device_bytes: Most bytes of the device for models, with what loads need on the way: a number, or text such as
            `"60GB"`. Where others use the device too, and less is free, that is the bound.
        host_bytes: Most bytes of host memory for files of models (a `stio.HostCache`), with the staging memory of
            loads. 0: every load reads its files.
        disk: A `stio.DiskCache` for models with a URL.
        max_hold_seconds: See above. A step of priority counts as so much time of waiting.
        max_loads: Most loads to the device at one time.
        idle_seconds: Evict models that were not used for so long, except pinned ones. None: only for others.
        trace: A `stio.Trace` that records loads, evictions and updates.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A size or a time is out of range.
    """

    _sync_name = "ModelPool"

    def __init__(
        self,
        *,
        device: str | int | torch.device = "auto",
        device_bytes: int | str,
        host_bytes: int | str = 0,
        disk: DiskCache | None = None,
        max_hold_seconds: float = 1.0,
        max_loads: int = 1,
        idle_seconds: float | None = None,
        trace: Trace | None = None,
    ) -> None:
        if not isinstance(device, str | int | torch.device):
            raise TypeError(f"device= takes a device of torch's or 'auto', not {device!r}")
        idle_seconds = inf if idle_seconds is None else idle_seconds
        for keyword, seconds in (("max_hold_seconds", max_hold_seconds), ("idle_seconds", idle_seconds)):
            if isinstance(seconds, bool) or not isinstance(seconds, int | float):
                raise TypeError(f"{keyword}= takes a number of seconds, not {seconds!r}")
            if not seconds >= 0:
                raise ValueError(f"{keyword} must not be negative, not {seconds!r}")
        if not isinstance(max_loads, int) or max_loads < 1:
            raise ValueError(f"max_loads must be a positive whole number, not {max_loads!r}")
        if disk is not None and not isinstance(disk, DiskCache):
            raise TypeError(f"disk= takes a stio.DiskCache, not {disk!r}")
        bound = checked_size(device_bytes, "device_bytes")
        budget = max(_MIN_BUDGET_BYTES, min(ACCELERATOR_BUDGET_BYTES, bound // 8))
        self._options = LoadOptions(device=device, memory="copy", budget_bytes=budget, trace=trace, streams="copy")
        where: Any = self._options.device
        self._disk, self._host = disk, None
        if host_bytes != 0:
            left = checked_size(host_bytes, "host_bytes") - (0 if str(where) == "cpu" else RING_BYTES)
            if left <= 0:
                raise ValueError(f"host_bytes must be more than the staging memory of loads, {RING_BYTES:,} bytes")
            self._host = HostCache(left, device=where)
        self._caches = (*([] if disk is None else [disk]), *([] if self._host is None else [self._host])) or None
        self._entries: dict[str, PooledModel] = {}
        policy: Policy[PooledModel] = Policy(
            bound, hold_seconds=max_hold_seconds, max_loads=max_loads, idle_seconds=idle_seconds
        )
        self._thread = PoolThread(policy, where, trace)
        _pools.add(self)

    @described_by(load)
    def add(
        self,
        name: str,
        source: SourceLike,
        *,
        make: Make | None = None,
        pin: bool = False,
        dtype: DtypesLike | None = None,
        strict: bool = True,
        limits: Limits | None = None,
        verify: bool = False,
        follow_symlinks: bool = False,
    ) -> None:
        """Add a model. Nothing is read before it is needed; a path must exist.

        Args:
            name: Its name in the pool.
            make: Makes the module, on `meta` where that is possible; called once, on a thread of the pool. The
                checkpoint is loaded into it as by `stio.load_into` with `assign=True`. Between two loads its tensors
                are on `meta`. None: the model is a dictionary of tensors.
            pin: Never evict it.
            strict: See `stio.load`. With `make`, module and checkpoint must hold the same names.
            verify: See `stio.load`. This is done at each load.
            ...: The other arguments are those of `stio.load`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The pool has a model of this name, or an argument is wrong.
            CheckpointNotFoundError: There is nothing at this path.
            ClosedError: The pool was closed.
        """
        self._thread.require_not_closed()
        if not isinstance(name, str):
            raise TypeError(f"the name of a model is a str, not {name!r}")
        if make is not None and not callable(make):
            raise TypeError(f"make= takes a function that returns a module, not {make!r}")
        if isinstance(source, str | os.PathLike) and not (os.path.exists(path := os.fspath(source)) or is_url(path)):
            raise CheckpointNotFoundError(f"there is no such file or directory{broken_link(path)}", path=path)
        own = {"dtype": dtype, "strict": strict, "limits": limits, "verify": verify, "follow_symlinks": follow_symlinks}
        content = Content(name, make, partial(replace, self._options, cache=self._caches, **own))
        entry = PooledModel(name, bool(pin), source=source, content=content)
        if self._entries.setdefault(name, entry) is not entry:
            raise ValueError(f"the pool has a model {name!r}; replace its weights by update(), or choose another name")
        self._thread.post(self._thread.policy.models.append, entry)

    def use(self, name: str, *, priority: int = 0) -> ModelUse:
        """Return a use of a model, for `async with`: inside the block it is on the device, and is not evicted.

        The block gets the module, or a dictionary of the tensors by name, which is empty after the block. Other callers
        use the same tensors at the same time. Inside the block a wait for another model ends only if both fit, and a
        wait for an update of this one does not end.

        Args:
            name: Name of the model.
            priority: A caller with a higher priority goes before those that have waited for at most `max_hold_seconds`
                longer, for each step.

        Raises:
            ValueError: There is no such model.
            DeviceMemoryError: On entering the block: the model does not fit, whatever is evicted.
            ClosedError: On entering the block: the pool is not open.
            StioError: On entering the block: the load failed, see `stio.load`. Each caller that waited gets the error;
                the next one tries again.
        """
        if not isinstance(priority, int):
            raise TypeError(f"priority= takes a whole number, not {priority!r}")
        return ModelUse(self._thread, self._entry(name), priority)

    @described_by(load)
    async def prefetch(self, name: str, *, progress: Progress = None) -> None:
        """Read the files of a model into host memory; see `stio.HostCache.prefetch`.

        Args:
            name: Name of the model.
            ...: The other arguments are those of `stio.load`.

        Raises:
            ValueError: There is no such model, or the pool has no host memory.
            ClosedError: The pool is not open.
            StioError: See `stio.HostCache.prefetch`.
        """
        entry = self._entry(name)
        self._thread.require_open()
        if self._host is None:
            raise ValueError("the pool has no host memory to read models into; give it host_bytes=")
        options = replace(entry.content.options, progress=progress, streams=None)
        entry.files = await self._host.prefetch_by(entry.source, options)

    @described_by(load)
    async def update(self, name: str, source: SourceLike, *, make: Make | None = None) -> None:
        """Replace the weights of a model. Callers that use it keep the old ones; later callers get the new ones.

        The update begins when the model has no users, and it gets none meanwhile. If the names, shapes and dtypes are
        those of the old weights, and the pool has room for 64 MiB on the way, or for the largest tensor, the new ones
        are copied into the same memory. Otherwise, and for nested state, the next use loads the model anew. After an
        error the model has its old weights.

        Args:
            name: Name of the model.
            source: See `stio.load`. It has the new weights.
            make: Makes the new module; None: the module stays.

        Raises:
            ValueError: There is no such model.
            ClosedError: The pool is not open.
            StioError: See `stio.load`.
        """
        await self._change(name, source=source, make=make)

    @described_by(follow)
    def follow(self, name: str, path: str | os.PathLike[str], *, poll_seconds: float = 0.5) -> Follower:
        """Return a follower, which keeps a model at the newest checkpoint of a run; see `stio.follow`.

        It applies a version by `update`: callers that use the model keep the old one until they leave. If the model is
        on the device, and the version is a delta on what is there, only the elements that differ are read and written.
        If it is not, the version is loaded at the next use.

        Args:
            name: Name of the model.
            ...: The other arguments are those of `stio.follow`.

        Raises:
            ValueError: There is no such model, or the path is a URL.
            ClosedError: On entering the block: the pool is not open.
            StioError: On entering the block; see `stio.load`.
        """
        return Follower(path, _PoolLoads(self, name), poll_seconds, self._entry(name).content.options)

    async def evict(self, name: str, *, host: bool = False) -> None:
        """Remove a model from the device, also if it is pinned; the next use loads it again.

        This waits until the model has no users, and it gets none meanwhile. Do not call it inside a use of the model.

        Args:
            name: Name of the model.
            host: Remove its files from host memory too.

        Raises:
            ValueError: There is no such model.
            ClosedError: The pool is not open, or the model is removed.
        """
        entry = (await self._change(name, evicts=True)).entry
        if host and self._host is not None:
            self._host.evict(entry.source)

    async def remove(self, name: str) -> None:
        """Remove a model from the pool, with its files in host memory; see `evict`.

        Callers that wait for it get `ClosedError`. Its name can be added again.

        Args:
            name: Name of the model.

        Raises:
            ValueError: There is no such model.
            ClosedError: The pool is not open, or the model is removed.
        """
        removal = await self._change(name, evicts=True, on_removal=partial(self._entries.pop, name, None))
        if self._host is not None:
            self._host.evict(removal.entry.source)

    async def _change(self, name: str, **change: Any) -> Change:
        """Let the pool's thread change a model, and wait until it has; see `Change`."""
        entry = self._entry(name)
        self._thread.require_open()
        call = Change(self._thread, entry, **change)
        self._thread.post(self._thread.called, call)
        await call.wait()
        return call

    def status(self, name: str) -> ModelStatus:
        """Return where a model is now.

        Raises:
            ValueError: There is no such model.
        """
        entry = self._entry(name)
        files = entry.files if entry.contents is None else entry.contents.files
        is_in_host_memory = bool(files) and self._host is not None and self._host.has(files)
        tier = _TIERS.get(entry.state) or ("host" if is_in_host_memory else "source")
        progress = {"device": 1.0, "loading": entry.content.progress}.get(tier, 0.0)
        users, waiting = entry.num_users, len(entry.calls)
        return ModelStatus(tier=tier, nbytes=entry.nbytes, num_users=users, num_waiting=waiting, progress=progress)

    def names(self) -> list[str]:
        """Return the names of all models."""
        return list(self._entries)

    def stats(self) -> PoolStats:
        """Return a snapshot of the pool in numbers."""
        return replace(
            self._thread.counts,
            device_bytes=self._thread.policy.held_bytes,
            leftover_bytes=self._thread.policy.leftover_bytes,
            host_bytes=0 if self._host is None else self._host.stats().held_bytes,
            disk_bytes=0 if self._disk is None else self._disk.stats().held_bytes,
        )

    async def aclose(self) -> None:
        """End loads, and free all models without users. Callers that wait get `ClosedError`. Idempotent.

        Callers that use a model keep it; its memory is freed when they drop it.
        """
        try:
            await self._thread.aclose()
        finally:
            if self._host is not None:
                self._host.close()

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _entry(self, name: str) -> PooledModel:
        entry = self._entries.get(name)
        if entry is None:
            known = listed(sorted(self._entries)) or "none"
            raise ValueError(f"the pool has no model {printable(str(name))!r}; it has: {known}")
        return entry


class _PoolLoads:
    """Loads versions into a model of a pool; see `stio.serving.follower.Loads`."""

    is_whole = True  # what fails in between is evicted, and loaded at the next use

    def __init__(self, pool: ModelPool, name: str) -> None:
        self._pool, self._name = pool, name

    async def __call__(self, path: str, own: Own) -> Loaded:
        """Let the pool's thread replace the weights, and wait until it has."""
        loaded = (await self._pool._change(self._name, source=path)).loaded
        assert loaded is not None  # it has ended without an error
        return loaded


_pools: weakref.WeakSet[ModelPool] = weakref.WeakSet()


@process.after_fork_in_child
def _forget_parent() -> None:
    """Close all pools in a forked child: their threads are not in the child."""
    for pool in list(_pools):
        pool._thread.forget()
