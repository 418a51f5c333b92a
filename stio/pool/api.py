"""`ModelPool`: models by name, loaded when they are needed, and evicted when others need their room.

The pool's thread owns all state (`stio.pool.policy`). Callers append to its queue what they want, and wake it; each
waits for a notifier of its own. Whether a caller got its model or left first is decided by one `dict.setdefault`.
"""

from __future__ import annotations

import copy
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch

from stio.device.base import current_device, resolve_device, with_current_index
from stio.device.cuda import TorchEvent, answering, has_streams
from stio.device.tensors import DtypeLike
from stio.errors import ClosedError, DeviceError, DeviceMemoryError, StioError, listed, printable
from stio.loading.cache.disk_cache import DiskCache
from stio.loading.cache.host_cache import HostCache
from stio.loading.options import LoadOptions, SourceLike
from stio.loading.prepare import ACCELERATOR_BUDGET_BYTES
from stio.pool.content import Content, Contents, Leftover, Make, OtherContents, free_bytes
from stio.pool.policy import Call, Model, Policy
from stio.pool.status import ModelStatus, PoolStats, Tier
from stio.runtime.limits import Limits, checked_size
from stio.runtime.notifier import Notifier
from stio.runtime.operation import Operation
from stio.runtime.process import after_fork_in_child
from stio.runtime.progress import Progress, ProgressEvent
from stio.runtime.trace import Trace, traced

RING_BYTES = 96 << 20
"""Most staging memory of loads to a device."""

_LEAST_BUDGET_BYTES = 4 << 20
_MOST_SHOWN = 3
"""Evicted models that an error names: each is searched for in all objects."""


class _Caller:
    """One call of `ModelPool.use` or `ModelPool.update`, from the call until it has what it waits for."""

    def __init__(self, priority: int = 0) -> None:
        self.priority = priority
        self.called = time.monotonic()
        self.call: Call | None = None
        """Set by the pool's thread."""
        self.turn = 0
        """Of the pool's thread, in which it was seen."""
        self._notifier = Notifier()
        self._decided: dict[str, str] = {}  # "end": what came first; the first value stays
        self._is_over = False
        self._error: BaseException | None = None
        self._value: Any = None

    def end(self, value: Any = None, error: BaseException | None = None) -> bool:
        """Give it a value or an error; return False if it has left."""
        self._value, self._error = value, error  # before the decision: a caller that loses it looks at them
        if self._decided.setdefault("end", "served") == "left":
            self._value = None
            return False
        self._is_over = True
        self._notifier.notify()
        return True

    async def wait(self, leave: Callable[[bool], None]) -> Any:
        """Return the value, or raise the error. An interrupted wait leaves."""
        try:
            await self._notifier.wait_for(lambda: self._is_over)
        except BaseException:  # a cancel, an interrupt
            self.leave(leave)
            raise
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # its traceback refers to this frame, and to the caller's
        return self._value

    def take(self) -> Any:
        """Return the value, once; None if there is none, or none any more."""
        value, self._value = self._value, None
        return value

    def leave(self, leave: Callable[[bool], None]) -> None:
        """End the wait, or give back the value; `leave` is called with whether it had one."""
        if self._decided.setdefault("end", "left") == "left":
            leave(False)
        elif self.take() is not None:
            leave(True)


@dataclass(slots=True, eq=False)
class _Update:
    """A call of `ModelPool.update`."""

    source: SourceLike
    make: Make | None
    caller: _Caller


@dataclass(slots=True, eq=False)
class _Entry:
    """A model of the pool. All but `progress` is set by the pool's thread."""

    model: Model
    source: SourceLike
    content: Content
    contents: Contents | None = None
    files: Sequence[str] = ()
    """Paths of its files, as a prefetch found them."""
    callers: dict[Call, _Caller] = field(default_factory=dict)
    events: list[TorchEvent] = field(default_factory=list)
    """Behind the work of its users that was queued on the device."""
    updates: deque[_Update] = field(default_factory=deque)
    operation: Operation[Any] | None = None
    """What is under way with it."""
    progress: _Progress = field(default_factory=lambda: _Progress())


class ModelUse:
    """One use of a model, entered once by `async with`; made by `ModelPool.use`."""

    def __init__(self, pool: ModelPool, entry: _Entry, priority: int) -> None:
        self._pool, self._entry, self._priority = pool, entry, priority
        self._caller: _Caller | None = None

    async def __aenter__(self) -> Any:
        """Wait until the model is on the device, and return it."""
        if self._caller is not None:
            raise ValueError("a use of a model is entered once; call pool.use() for each")
        pool, entry = self._pool, self._entry
        pool._require_open()
        self._caller = caller = _Caller(self._priority)
        pool._post(partial(pool._called, entry, caller))
        return await caller.wait(self._leave)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the model back. A dictionary is empty then. Does not wait."""
        value = None if self._caller is None else self._caller.take()
        if value is None:
            return
        release = self._pool._released
        try:
            release = partial(release, event=self._pool._event_now())
        finally:  # a device that does not answer ends the use too
            if isinstance(value, dict):
                value.clear()
            self._pool._post(partial(release, self._entry))

    async def aclose(self) -> None:
        """Give the model back."""
        await self.__aexit__(None, None, None)

    def _leave(self, has_model: bool) -> None:
        pool, entry, caller = self._pool, self._entry, self._caller
        assert caller is not None
        pool._post(partial(pool._released, entry) if has_model else partial(pool._left, entry, caller))

    def __del__(self) -> None:
        if self._caller is not None and not self._pool._is_closed:  # interrupted between the wait and the block
            self._caller.leave(self._leave)


class ModelPool:
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
        trace: A `stio.Trace` that records loads, evictions and updates.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: A size or a time is out of range.
    """

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
        if not isinstance(device, str | int | torch.device):
            raise TypeError(f"device= takes a device of torch's or 'auto', not {device!r}")
        if disk is not None and not isinstance(disk, DiskCache):
            raise TypeError(f"disk= takes a stio.DiskCache, not {disk!r}")
        if trace is not None and not isinstance(trace, Trace):
            raise TypeError(f"trace= takes a stio.Trace, not {trace!r}")
        if isinstance(max_hold_seconds, bool) or not isinstance(max_hold_seconds, int | float):
            raise TypeError(f"max_hold_seconds= takes a number of seconds, not {max_hold_seconds!r}")
        if not max_hold_seconds >= 0:
            raise ValueError(f"max_hold_seconds must not be negative, not {max_hold_seconds!r}")
        if not isinstance(max_loads, int) or max_loads < 1:
            raise ValueError(f"max_loads must be a positive whole number, not {max_loads!r}")
        self._device: Any = with_current_index(device, current_device())
        self._resolved: torch.device | None = None
        bound = checked_size(device_bytes, "device_bytes")
        self._policy = Policy(bound, hold_seconds=max_hold_seconds, max_loads=max_loads)
        self._budget_bytes = max(_LEAST_BUDGET_BYTES, min(ACCELERATOR_BUDGET_BYTES, bound // 8))
        self._disk, self._trace = disk, trace
        self._host = None if host_bytes == 0 else self._host_cache(checked_size(host_bytes, "host_bytes"))
        self._entries: dict[str, _Entry] = {}
        self._inbox: deque[Callable[[], None]] = deque()
        self._notifier = Notifier()
        self._running: list[tuple[Operation[Any], Callable[[], None]]] = []
        self._leftovers: list[Leftover] = []
        self._counts = PoolStats()
        self._turn = 0
        self._thread: Operation[None] | None = None
        self._is_closed = False
        self._has_shut = False
        self._failure: BaseException | None = None
        _pools.add(self)

    def _host_cache(self, host_bytes: int) -> HostCache:
        left = host_bytes - (0 if str(self._device) == "cpu" else RING_BYTES)
        if left <= 0:
            raise ValueError(f"host_bytes must be more than the staging memory of loads, {RING_BYTES:,} bytes")
        return HostCache(left, device=self._device)

    # For callers' threads.

    def add(
        self,
        name: str,
        source: SourceLike,
        *,
        make: Make | None = None,
        pin: bool = False,
        dtype: DtypeLike | None = None,
        strict: bool = True,
        limits: Limits | None = None,
        verify: bool = False,
        follow_symlinks: bool = False,
    ) -> None:
        """Add a model. Nothing is read before it is needed.

        Args:
            name: Its name in the pool.
            source: See `stio.load`.
            make: Makes the module, on `meta` where that is possible; called once, on a thread of the pool. The
                checkpoint is loaded into it as by `stio.load_into` with `assign=True`. Between two loads its tensors
                are on `meta`. None: the model is a dictionary of tensors.
            pin: Never evict it.
            dtype: See `stio.load`.
            strict: See `stio.load`, and `stio.load_into`.
            limits: See `stio.load`.
            verify: See `stio.load`; at each load.
            follow_symlinks: See `stio.load`.

        Raises:
            TypeError: An argument has the wrong type.
            ValueError: The pool has a model of this name, or an argument is wrong.
            ClosedError: The pool was closed.
        """
        self._require_not_closed()
        if not isinstance(name, str):
            raise TypeError(f"the name of a model is a str, not {name!r}")
        if make is not None and not callable(make):
            raise TypeError(f"make= takes a function that returns a module, not {make!r}")
        caches = tuple(cache for cache in (self._disk, self._host) if cache is not None)
        progress = _Progress()
        options = LoadOptions(
            device=self._device,
            dtype=dtype,
            memory="copy",
            budget_bytes=self._budget_bytes,
            strict=strict,
            limits=limits,
            verify=verify,
            follow_symlinks=follow_symlinks,
            progress=progress,
            cache=caches or None,
            trace=self._trace,
            streams="copy",
        )
        entry = _Entry(Model(name, pinned=bool(pin)), source, Content(name, make, options), progress=progress)
        if self._entries.setdefault(name, entry) is not entry:
            raise ValueError(f"the pool has a model {name!r}; replace its weights by update(), or choose another name")
        self._post(partial(self._policy.models.append, entry.model))

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
        return ModelUse(self, self._entry(name), priority)

    async def prefetch(self, name: str, *, progress: Progress = None) -> None:
        """Read the files of a model into host memory; see `stio.HostCache.prefetch`.

        Args:
            name: Name of the model.
            progress: See `stio.load`.

        Raises:
            ValueError: There is no such model, or the pool has no host memory.
            ClosedError: The pool is not open.
            StioError: See `stio.HostCache.prefetch`.
        """
        entry = self._entry(name)
        self._require_open()
        if self._host is None:
            raise ValueError("the pool has no host memory to read models into; give it host_bytes=")
        options = replace(entry.content.options, progress=progress, streams=None)
        entry.files = await self._host.prefetch_by(entry.source, options)

    async def update(self, name: str, source: SourceLike, *, make: Make | None = None) -> None:
        """Replace the weights of a model. Callers that use it keep the old ones; later callers get the new ones.

        The update begins when the model has no users, and it gets none meanwhile. If the names, shapes and dtypes are
        those of the old weights, and the pool has room for 64 MiB on the way, or for the largest tensor, the new ones
        are copied into the same memory. Otherwise the next use loads the model anew. After an error the model has its
        old weights.

        Args:
            name: Name of the model.
            source: The new weights; see `stio.load`.
            make: Makes the new module; None: the module stays.

        Raises:
            ValueError: There is no such model.
            ClosedError: The pool is not open.
            StioError: See `stio.load`.
        """
        entry = self._entry(name)
        update = _Update(source, make, _Caller())
        self._require_open()
        self._post(partial(self._requested_update, entry, update))

        def leave(is_updated: bool) -> None:
            if not is_updated:
                self._post(partial(self._withdrawn_update, entry, update))

        await update.caller.wait(leave)

    def status(self, name: str) -> ModelStatus:
        """Return where a model is now.

        Raises:
            ValueError: There is no such model.
        """
        entry = self._entry(name)
        model, files = entry.model, entry.files if entry.contents is None else entry.contents.files
        tier: Tier = "source"
        if model.state in ("resident", "updating"):
            tier = "device"
        elif model.state in ("loading", "measuring"):
            tier = "loading"
        elif files and self._host is not None and self._host.has(files):
            tier = "host"
        progress = 1.0 if tier == "device" else entry.progress.fraction if tier == "loading" else 0.0
        return ModelStatus(
            tier=tier,
            nbytes=model.nbytes,
            num_users=model.num_users,
            num_waiting=len(model.calls),
            progress=progress,
        )

    def names(self) -> list[str]:
        """Return the names of all models."""
        return list(self._entries)

    def stats(self) -> PoolStats:
        """Return a snapshot of the pool in numbers."""
        return replace(
            self._counts,
            device_bytes=self._policy.held_bytes,
            leftover_bytes=self._policy.leftover_bytes,
            host_bytes=0 if self._host is None else self._host.stats().held_bytes,
            disk_bytes=0 if self._disk is None else self._disk.stats().held_bytes,
        )

    async def aclose(self) -> None:
        """End loads, and free all models without users. Callers that wait get `ClosedError`. Idempotent.

        Callers that use a model keep it; its memory is freed when they drop it.
        """
        self._is_closed = True
        try:
            if self._thread is not None:
                await self._thread.aclose()
        finally:
            if self._host is not None:
                self._host.close()

    async def __aenter__(self) -> Self:
        self._require_not_closed()
        if self._thread is not None:
            raise ValueError("a pool is entered once")
        self._thread = Operation(self._run, name="pool")
        self._thread.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            known = listed(sorted(self._entries)) or "none"
            raise ValueError(f"the pool has no model {printable(str(name))!r}; it has: {known}")
        return entry

    def _require_not_closed(self) -> None:
        if self._is_closed:
            raise ClosedError(
                "the pool was closed, or belongs to the process that this one was forked from"
            ) from self._failure

    def _require_open(self) -> None:
        self._require_not_closed()
        if self._thread is None:
            raise ClosedError("the pool is not open; use it inside `async with pool:`")

    def _post(self, what: Callable[[], None]) -> None:
        """Let the pool's thread call a function. Callable from any thread; takes no lock."""
        self._inbox.append(what)
        self._notifier.notify()
        if self._has_shut:  # its thread looks no more
            self._drain()

    def _drain(self) -> None:
        while self._inbox:
            try:
                what = self._inbox.popleft()
            except IndexError:  # another thread was faster
                return
            what()

    def _event_now(self) -> TorchEvent | None:
        """Return an event behind the work that this thread has queued on its current stream."""
        device = self._resolved
        if device is None or not has_streams(device) or device.type == "cpu":
            return None
        module: Any = torch.get_device_module(device)
        with answering(device):
            return TorchEvent(module, device, module.current_stream(device))

    # On the pool's thread.

    def _run(self, operation: Operation[None]) -> None:
        operation.on_cancel(self._notifier.notify)
        error: BaseException = ClosedError("the pool was closed")
        try:
            self._resolved = resolve_device(self._device)
            while not operation.cancelled:
                self._turn += 1
                self._drain()
                for one in [one for one in self._running if one[0].done]:
                    self._running.remove(one)
                    one[1]()
                self._decide()
                self._notifier.block_until(lambda: bool(self._inbox) or operation.cancelled or self._has_ended())
        except BaseException as failed:  # there is no such device
            error = self._failure = failed
            raise
        finally:
            self._shut(error)

    def _has_ended(self) -> bool:
        return any(operation.done for operation, _ in self._running)

    def _shut(self, error: BaseException) -> None:
        self._is_closed = True
        for operation, _ in self._running:
            operation.cancel()
        for operation, _ in self._running:
            operation.join()
        self._has_shut = True
        self._drain()
        for entry in list(self._entries.values()):
            for caller in [*entry.callers.values(), *(update.caller for update in entry.updates)]:
                caller.end(error=_own(error))
            if entry.model.num_users:
                entry.content.forget()
            else:
                _wait_for(entry.events)
                entry.content.drop()

    def _decide(self) -> None:
        self._leftovers = [left for one in self._leftovers if (left := one.now()) is not None]
        self._policy.leftover_bytes = sum(one.nbytes for one in self._leftovers)
        is_again = True
        while is_again:
            decision = self._policy.decide(time.monotonic(), self._limit())
            for model, calls in decision.grant:
                self._grant(self._entries[model.name], calls)
            for model in decision.cancel:
                operation = self._entries[model.name].operation
                if operation is not None:
                    operation.cancel()
            gone = [self._begin_evict(self._entries[model.name]) for model in decision.evict]
            for model in decision.measure:
                self._begin(self._entries[model.name], "open", self._measure, self._measured)
            for model in decision.load:
                self._begin(self._entries[model.name], "swap", self._load, self._loaded)
            for model in decision.update:
                self._begin_update(self._entries[model.name])
            for model in decision.refuse:
                self._fail(self._entries[model.name], self._too_large(model))
            is_again = bool(decision.refuse) or any(gone)
        self._count_peak()

    def _limit(self) -> int | None:
        """Return most bytes for models now, where others use the device too."""
        if not any(model.calls and model.state == "absent" for model in self._policy.models):
            return None
        if self._resolved is None or self._resolved.type == "cpu":
            return None
        if any(model.state in ("loading", "updating") for model in self._policy.models):
            return None  # how much of their memory is allocated is not known
        free = free_bytes(self._resolved)
        return None if free is None else self._policy.held_bytes + free

    def _count_peak(self) -> None:
        held = self._policy.held_bytes
        if held > self._counts.peak_device_bytes:
            self._counts = replace(self._counts, peak_device_bytes=held)

    def _count(self, **added: float) -> None:
        counts: Any = {name: getattr(self._counts, name) + value for name, value in added.items()}
        self._counts = replace(self._counts, **counts)

    def _called(self, entry: _Entry, caller: _Caller) -> None:
        if self._is_closed:
            caller.end(error=ClosedError("the pool was closed"))
            return
        caller.turn = self._turn
        caller.call = self._policy.call(entry.model, caller.called, caller.priority)
        entry.callers[caller.call] = caller

    def _left(self, entry: _Entry, caller: _Caller) -> None:
        if caller.call in entry.callers:
            del entry.callers[caller.call]
            self._policy.withdraw(entry.model, caller.call)

    def _released(self, entry: _Entry, event: TorchEvent | None = None) -> None:
        if event is not None:
            entry.events = [one for one in entry.events if _is_pending(one)]
            entry.events.append(event)
        self._policy.release(entry.model, time.monotonic())

    def _grant(self, entry: _Entry, calls: list[Call]) -> None:
        for call in calls:
            caller = entry.callers.pop(call)
            waited = time.monotonic() - caller.called
            counts = {"num_hits": 1} if caller.turn == self._turn else {"num_waits": 1, "wait_seconds": waited}
            self._count(**counts)  # before: the caller may look at once
            if not caller.end(entry.content.value()):
                self._count(**{name: -value for name, value in counts.items()})
                self._policy.release(entry.model, time.monotonic())

    def _fail(self, entry: _Entry, error: BaseException) -> None:
        self._count(num_failed=1)
        entry.model.nbytes = None  # the files may be others at the next attempt
        for call in self._policy.failed(entry.model):
            entry.callers.pop(call).end(error=_own(error))

    def _too_large(self, model: Model) -> DeviceMemoryError:
        limit = self._limit()
        bound = self._policy.device_bytes if limit is None else min(limit, self._policy.device_bytes)
        pinned = sum(one.held_bytes for one in self._policy.models if one.pinned)
        free = max(0, bound - pinned - self._policy.leftover_bytes)
        others = f", pinned models have {pinned:,}" if pinned else ""
        shown = "; ".join(one.describe() for one in self._leftovers[:_MOST_SHOWN])
        kept = f"; still referenced: {shown}" if shown else ""
        return DeviceMemoryError(
            f"the model {printable(model.name)!r} does not fit into the pool{others}{kept}",
            needed_bytes=model.nbytes,
            free_bytes=free,
            expected=f"{model.nbytes:,} bytes",
            found=f"{free:,} of {bound:,}",
        )

    def _begin(
        self,
        entry: _Entry,
        name: str,
        body: Callable[[_Entry, Operation[Any]], Any],
        done: Callable[[_Entry, Callable[[], Any], bool], None],
    ) -> None:
        """Start an operation with a model; `done` gets the model, how to get the outcome, and if it was cancelled."""

        def work(operation: Operation[Any]) -> Any:
            with traced(self._trace, name, detail=entry.model.name):
                return body(entry, operation)

        operation: Operation[Any] = Operation(work, name=name, about=entry.model.name, notifier=self._notifier)
        entry.operation = operation

        def end() -> None:
            entry.operation = None
            done(entry, operation.outcome, operation.cancelled)

        try:
            operation.start()
        except StioError as error:  # no more threads
            entry.operation = None

            def fail(error: StioError = error) -> Any:
                raise error

            self._inbox.append(lambda: done(entry, fail, False))
            return
        self._running.append((operation, end))

    # Operations, on threads of their own, and what their ends mean.

    def _measure(self, entry: _Entry, operation: Operation[Any]) -> Contents:
        return entry.content.measure(operation, entry.source)

    def _measured(self, entry: _Entry, outcome: Callable[[], Contents], is_cancelled: bool) -> None:
        try:
            entry.contents = outcome()
        except BaseException as error:
            self._failed(entry, error, is_cancelled)
        else:
            self._policy.measured(entry.model, entry.contents.nbytes)

    def _load(self, entry: _Entry, operation: Operation[Any]) -> float:
        began = time.monotonic()
        entry.progress.fraction = 0.0
        assert entry.contents is not None
        entry.content.load(operation, entry.source, entry.contents)
        return time.monotonic() - began

    def _loaded(self, entry: _Entry, outcome: Callable[[], float], is_cancelled: bool) -> None:
        try:
            seconds = outcome()
        except OtherContents as changed:  # it waits for room once more
            entry.contents = changed.contents
            self._policy.measured(entry.model, changed.contents.nbytes)
        except BaseException as error:
            left, nbytes = entry.content.drop(), entry.model.nbytes
            self._failed(entry, error, is_cancelled)
            if left is not None:
                self._policy.freeing(entry.model, nbytes)
                self._begin(entry, "evict", lambda *_: left.later(), partial(self._freed, left=left))
        else:
            self._count(num_loads=1, load_seconds=seconds)
            self._grant(entry, self._policy.loaded(entry.model, time.monotonic()))

    def _failed(self, entry: _Entry, error: BaseException, is_cancelled: bool) -> None:
        if is_cancelled:
            self._policy.evicted(entry.model)  # callers that came since then wait for another load
        else:
            self._fail(entry, error)

    def _begin_evict(self, entry: _Entry) -> bool:
        """Evict a model, at once if nothing is to be waited for; return whether its memory is free."""
        if not any(map(_is_pending, entry.events)):  # two threads less on the way of the next load
            with traced(self._trace, "evict", detail=entry.model.name):
                left = entry.content.drop()
            if left is None:
                self._evicted(entry, lambda: None, False)
                return True
            self._count(num_evictions=1)
            self._begin(entry, "evict", lambda *_: left.later(), partial(self._freed, left=left))
        else:
            self._begin(entry, "evict", self._evict, self._evicted)
        return False

    def _evict(self, entry: _Entry, operation: Operation[Any]) -> Leftover | None:
        _wait_for(entry.events)
        return entry.content.evict()

    def _evicted(self, entry: _Entry, outcome: Callable[[], Leftover | None], is_cancelled: bool) -> None:
        self._count(num_evictions=1)
        self._freed(entry, outcome, is_cancelled)

    def _freed(
        self,
        entry: _Entry,
        outcome: Callable[[], Leftover | None],
        is_cancelled: bool,
        left: Leftover | None = None,
    ) -> None:
        try:
            left = outcome()
        except BaseException:  # no thread was started
            _wait_for(entry.events)
            left = left or entry.content.drop()
        entry.events = []
        self._keep_count_of(left)
        self._policy.evicted(entry.model)

    def _keep_count_of(self, left: Leftover | None) -> None:
        if left is not None:
            self._leftovers.append(left)

    # Updates.

    def _requested_update(self, entry: _Entry, update: _Update) -> None:
        if self._is_closed:
            update.caller.end(error=ClosedError("the pool was closed"))
            return
        entry.updates.append(update)
        entry.model.wants_update = True

    def _withdrawn_update(self, entry: _Entry, update: _Update) -> None:
        if entry.updates and entry.updates[0] is update and entry.model.state == "updating":
            if entry.operation is not None:
                entry.operation.cancel()
        elif update in entry.updates:
            entry.updates.remove(update)
            entry.model.wants_update = bool(entry.updates)

    def _begin_update(self, entry: _Entry) -> None:
        update = entry.updates[0]
        is_resident = entry.model.nbytes is not None
        may_replace = False
        if is_resident and update.make is None and entry.content.can_replace():
            assert entry.contents is not None and entry.model.nbytes is not None
            room, needed = self._policy.device_bytes - self._policy.held_bytes, entry.contents.update_bytes
            may_replace = room >= needed
            entry.model.nbytes += needed if may_replace else 0  # nobody else gets it meanwhile
        state = _UpdateState(is_resident)
        self._begin(
            entry,
            "update",
            lambda entry, operation: self._replace(entry, update, state, may_replace, operation),
            lambda entry, outcome, _: self._updated(entry, update, state, outcome),
        )

    def _replace(
        self, entry: _Entry, update: _Update, state: _UpdateState, may_replace: bool, operation: Operation[Any]
    ) -> tuple[Content, Contents]:
        content = entry.content if update.make is None else entry.content.with_module(update.make)
        contents = content.measure(operation, update.source)
        if state.is_resident:
            _wait_for(entry.events)
            is_same = entry.contents is not None and contents.tensors == entry.contents.tensors
            state.is_resident = False  # until all tensors are new
            try:
                if may_replace and is_same:
                    entry.content.replace(operation, update.source)
                    operation.refuse_cancel()
                    state.is_resident = True
            finally:
                if not state.is_resident:
                    state.leftover = entry.content.evict()
        if not state.is_resident:
            operation.refuse_cancel()
        return content, contents

    def _updated(
        self,
        entry: _Entry,
        update: _Update,
        state: _UpdateState,
        outcome: Callable[[], tuple[Content, Contents]],
    ) -> None:
        entry.updates.popleft()
        self._keep_count_of(state.leftover)
        self._policy.updated(entry.model, resident=state.is_resident)
        entry.model.wants_update = bool(entry.updates)
        try:
            entry.content, entry.contents = outcome()
        except BaseException as error:
            if state.is_resident and entry.contents is not None:
                entry.model.nbytes = entry.contents.nbytes
            update.caller.end(error=error)
            return
        entry.source = update.source
        entry.model.nbytes = entry.contents.nbytes
        self._count(num_updates=1)
        update.caller.end()


@dataclass(slots=True)
class _UpdateState:
    """What an update has done to its model so far."""

    is_resident: bool
    leftover: Leftover | None = None


class _Progress:
    """How much of a load is done; a `progress=` callable."""

    def __init__(self) -> None:
        self.fraction = 0.0

    def __call__(self, event: ProgressEvent) -> None:
        self.fraction = event.done_bytes / event.total_bytes if event.total_bytes else 1.0


def _wait_for(events: list[TorchEvent]) -> None:
    for event in events:
        with suppress(DeviceError):  # work that failed has ended
            event.synchronize()


def _is_pending(event: TorchEvent) -> bool:
    try:
        return not event.query()
    except DeviceError:  # work that failed has ended
        return False


def _own(error: BaseException) -> BaseException:
    """Return a copy of an error for one of several callers: raising it adds to its traceback."""
    try:
        made = copy.copy(error)
    except Exception:
        return error
    made.__cause__ = error.__cause__
    return made if type(made) is type(error) else error


_pools: weakref.WeakSet[ModelPool] = weakref.WeakSet()


@after_fork_in_child
def _forget_parent() -> None:
    """Close all pools in a forked child: their threads are not in the child."""
    for pool in list(_pools):
        pool._is_closed = True
        pool._thread = None
