"""The thread of a pool: it owns the pool's state, and carries out what the policy decides.

Callers append functions to its queue, and wake it; it calls them. What becomes of a model is a generator, its steps:
each function that it yields is an operation on another thread, whose outcome it gets. All else that it does is done on
the pool's thread, so no state is shared.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import torch

from stio import clock
from stio.device import TorchAccelerator, TorchEvent, resolve_device
from stio.errors import ClosedError, DeviceError, DeviceMemoryError, StioError, listed, printable
from stio.runtime import Notifier, Operation, copy_of
from stio.runtime.reports import Trace, traced
from stio.serving.follower import Loaded
from stio.serving.pool.content import Content, Contents, Leftover, Make
from stio.serving.pool.policy import Model, ModelRequest, Policy, PoolStats
from stio.storage.checkpoint import SourceLike

Outcome: TypeAlias = tuple[Any, BaseException | None]
"""The value of an operation, or its error."""

Steps: TypeAlias = Generator[tuple[str, Callable[[Operation[Any]], Any]], Any, None]
"""What becomes of a model; yields the name and the body of each operation."""


class Caller(ModelRequest):
    """One call of `ModelPool.use` or `ModelPool.update`, from the call until it has what it waits for."""

    def __init__(self, thread: PoolThread, entry: PooledModel, priority: int = 0) -> None:
        super().__init__(clock.monotonic(), priority)
        self.thread, self.entry = thread, entry
        """The pool's thread, and the model."""
        self.turn = 0
        """Of the pool's thread, in which it was seen."""
        self._notifier = Notifier()
        self._decided: dict[str, str] = {}  # "end": what came first; the first value stays
        self._error: BaseException | None = None
        self._value: Any = None

    def end(self, value: Any = None, error: BaseException | None = None) -> bool:
        """Give it a value or an error; return False if it has left."""
        self._value, self._error = value, error  # before the decision: a caller that loses it looks at them
        if self._decided.setdefault("end", "served") == "left":
            self._value = None
            return False
        self._notifier.notify()
        return True

    async def wait(self) -> Any:
        """Return the value, or raise the error. An interrupted wait leaves."""
        try:
            await self._notifier.wait_for(lambda: "end" in self._decided)
        except BaseException:  # a cancel, an interrupt
            self.leave()
            raise
        error, self._error = self._error, None
        if error is None:
            return self._value
        try:
            raise error
        finally:
            del error  # its traceback refers to this frame, and to the caller's

    def take(self) -> Any:
        """Return the value, once; None if there is none, or none any more."""
        value, self._value = self._value, None
        return value

    def leave(self) -> None:
        """End the wait, or give back the value."""
        is_served = self._decided.setdefault("end", "left") == "served"
        if not is_served or self.take() is not None:
            self.thread.post(self.thread.left, self, is_served)


class Change(Caller):
    """A call of `ModelPool.update`, `ModelPool.evict` or `ModelPool.remove`."""

    def __init__(
        self,
        thread: PoolThread,
        entry: PooledModel,
        source: Any = None,
        make: Make | None = None,
        *,
        evicts: bool = False,
        on_removal: Callable[[], object] | None = None,
    ) -> None:
        super().__init__(thread, entry)
        self.source, self.make = source, make
        """See `ModelPool.update`."""
        self.evicts = evicts
        """The model is evicted, and not updated."""
        self.on_removal = on_removal
        """Called when the model leaves the pool; None: it stays."""
        self.loaded: Loaded | None = None
        """What an update has done."""


class _EndNotifier(Notifier):
    """Tells the pool's thread that an operation has ended.

    Args:
        report: Posts it.
    """

    def __init__(self, report: Callable[[], None]) -> None:
        super().__init__()
        self._report = report

    def notify(self) -> None:
        """Wake those that wait for the operation, and the pool's thread."""
        super().notify()
        self._report()


@dataclass(slots=True, eq=False, kw_only=True)
class PooledModel(Model):
    """A model of the pool. All but `files` is set by the pool's thread."""

    source: SourceLike
    content: Content
    contents: Contents | None = None
    files: Sequence[str] = ()
    """Paths of its files, as a prefetch found them."""
    events: list[TorchEvent] = field(default_factory=list)
    """Behind the work of its users that was queued on the device."""
    changes: deque[Change] = field(default_factory=deque)
    operation: Operation[Any] | None = None
    """What is under way with it, until its steps have ended."""
    is_removed: bool = False


class PoolThread:
    """The state of a pool.

    Args:
        policy: What decides.
        device: Device of the models; examined on the thread.
        trace: Records loads, evictions and updates.
    """

    def __init__(self, policy: Policy[PooledModel], device: Any, trace: Trace | None) -> None:
        self.policy = policy
        """See above."""
        self.counts = PoolStats()
        """What it has done."""
        self.is_closed = False
        """Whether callers are refused."""
        self._device, self._trace = device, trace
        self._resolved: torch.device | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._notifier = Notifier()
        self._leftovers: list[Leftover] = []
        self._turn = 0
        self._operation: Operation[None] | None = None
        self._has_shut = False
        self._failure: BaseException | None = None

    # For callers' threads.

    def start(self) -> None:
        """Start the thread, once."""
        self.require_not_closed()
        if self._operation is not None:
            raise ValueError("a pool is entered once")
        self._operation = Operation(self._run, name="pool")
        self._operation.start()

    async def aclose(self) -> None:
        """End the thread, and all that is under way."""
        self.is_closed = True
        if self._operation is not None:
            await self._operation.aclose()

    def forget(self) -> None:
        """Close in a forked child: the thread is not there."""
        self.is_closed, self._operation = True, None

    def require_not_closed(self) -> None:
        """Raise `ClosedError` if the pool was closed."""
        if self.is_closed:
            message = "the pool was closed, or belongs to the process that this one was forked from"
            raise ClosedError(message) from self._failure

    def require_open(self) -> None:
        """Raise `ClosedError` unless the thread runs."""
        if self._operation is None or self.is_closed:
            self.require_not_closed()
            raise ClosedError("the pool is not open; use it inside `async with pool:`")

    def post(self, what: Callable[..., None], *args: Any) -> None:
        """Let the thread call a function. Callable from any thread; takes no lock."""
        self._inbox.append(partial(what, *args))
        self._notifier.notify()
        if self._has_shut:  # the thread looks no more
            self._drain()

    def event_now(self) -> TorchEvent | None:
        """Return an event behind the work that the calling thread has queued on its current stream."""
        device = self._resolved
        return (
            None
            if device is None or device.type == "cpu" or not TorchAccelerator.supports(device)
            else TorchEvent.now(device)
        )

    def _drain(self) -> None:
        while True:
            try:
                what = self._inbox.popleft()
            except IndexError:  # empty; not asked before, since another thread may be faster
                return
            what()

    # What callers post.

    def called(self, caller: Caller) -> None:
        """Add a caller, an update, or a removal."""
        if self.is_closed:
            caller.end(error=ClosedError("the pool was closed"))
        elif caller.entry.is_removed:
            caller.end(error=_removed(caller.entry))
        elif isinstance(caller, Change):
            caller.entry.changes.append(caller)
            caller.entry.wants_update = True
        else:
            caller.turn = self._turn
            caller.entry.calls.append(caller)

    def left(self, caller: Caller, is_served: bool) -> None:
        """Remove a caller that waits no longer, or a user. Cancel an update that is under way."""
        entry = caller.entry
        if is_served:
            self.released(entry)
        elif caller in entry.calls:
            entry.calls.remove(caller)
        elif entry.state == "updating" and entry.changes[0] is caller and entry.operation is not None:
            entry.operation.cancel()
        elif isinstance(caller, Change) and caller in entry.changes:
            entry.changes.remove(caller)
            entry.wants_update = bool(entry.changes)

    def released(self, entry: PooledModel, event: TorchEvent | None = None) -> None:
        """Remove a user, whose work on the device is before the event."""
        if event is not None:
            entry.events = [*filter(_is_pending, entry.events), event]
        self.policy.release(entry, clock.monotonic())

    # On the pool's thread.

    def _run(self, operation: Operation[None]) -> None:
        operation.on_cancel(self._notifier.notify)
        error: BaseException = ClosedError("the pool was closed")
        try:
            self._resolved = resolve_device(self._device)
            while not operation.cancelled:
                self._turn += 1
                self._drain()
                self._decide()
                for entry in self.policy.models:
                    if entry.state == "absent":  # it was measured, and there is no room for it yet
                        entry.content.close()
                self._notifier.block_until(
                    lambda: bool(self._inbox or operation.cancelled), self.policy.idle_in(clock.monotonic())
                )
        except BaseException as failed:  # there is no such device
            error = self._failure = failed
            raise
        finally:
            self._shut(error)

    def _shut(self, error: BaseException) -> None:
        self.is_closed = True
        operations = [entry.operation for entry in self.policy.models if entry.operation is not None]
        for operation in operations:
            operation.cancel()
        for operation in operations:
            operation.join()
        self._has_shut = True
        self._drain()
        for entry in self.policy.models:
            entry.operation = None
            callers: list[Any] = [*entry.calls, *entry.changes]
            for caller in callers:
                caller.end(error=copy_of(error))
            if entry.num_users:
                entry.content.forget()
            else:
                _wait_for(entry.events)
                entry.content.drop()

    def _decide(self) -> None:
        is_again = True
        while is_again:
            if self._leftovers:
                self._leftovers = [left for one in self._leftovers if (left := one.now())]
                self.policy.leftover_bytes = sum(one.nbytes for one in self._leftovers)
            decision = self.policy.decide(clock.monotonic(), self._limit())
            for entry, calls in decision.grant:
                self._grant(entry, calls)
            for entry in decision.cancel:
                if entry.operation is not None:
                    entry.operation.cancel()
            for entry in decision.refuse:
                self._fail(entry, self._too_large(entry))
            is_again = bool(decision.refuse)
            for entries, steps_of in (
                (decision.evict, self._evict),
                (decision.measure, self._measure),
                (decision.load, self._load),
                (decision.update, self._change),
            ):
                for entry in entries:
                    is_again |= self._go_on(entry, steps_of(entry))
            if decision.load or decision.update:
                peak_bytes = max(self.policy.held_bytes, self.counts.peak_device_bytes)
                self.counts = replace(self.counts, peak_device_bytes=peak_bytes)

    def _go_on(self, entry: PooledModel, steps: Steps, outcome: Outcome | None = None) -> bool:
        """Take the steps of a model up to its next operation, which is started; return whether there is none."""
        while True:
            try:
                name, body = steps.send(outcome)
            except StopIteration:
                entry.operation = None
                return True

            def work(operation: Operation[Any], name: str = name, body: Callable[..., Any] = body) -> Any:
                with traced(self._trace, name, detail=entry.name):
                    return body(operation)

            notifier = _EndNotifier(partial(self.post, self._ended, entry, steps))
            entry.operation = Operation(work, name=name, about=entry.name, notifier=notifier)
            try:
                entry.operation.start()
                return False
            except StioError as error:  # no more threads
                outcome = None, error

    def _ended(self, entry: PooledModel, steps: Steps) -> None:
        """Go on with a model whose operation has ended, unless the pool was closed."""
        operation = entry.operation
        if operation is None or self._has_shut:
            return
        try:
            outcome: Outcome = operation.outcome(), None
        except BaseException as error:  # without the frames of the pool's thread
            outcome = None, operation.failure or error.with_traceback(None)
        self._go_on(entry, steps, outcome)

    def _limit(self) -> int | None:
        """Return most bytes for models now, where others use the device too."""
        models, device = self.policy.models, self._resolved
        if device is None or device.type == "cpu":
            return None
        is_wanted = any(model.calls and model.state == "absent" for model in models)
        # Of a model under way it is not known how much memory is allocated.
        is_known = not any(model.state in ("loading", "updating") for model in models)
        free = TorchAccelerator.free_bytes(device) if is_wanted and is_known else None
        return None if free is None else self.policy.held_bytes + free

    def _count(self, **counts: Any) -> None:
        for name, value in counts.items():
            counts[name] = getattr(self.counts, name) + value
        self.counts = replace(self.counts, **counts)

    def _grant(self, entry: PooledModel, callers: Sequence[Any]) -> None:
        for caller in callers:
            waited = clock.monotonic() - caller.called
            counts = {"num_hits": 1} if caller.turn == self._turn else {"num_waits": 1, "wait_seconds": waited}
            self._count(**counts)  # before: the caller may look at once
            if not caller.end(entry.content.value()):
                self._count(**{name: -value for name, value in counts.items()})
                self.policy.release(entry, clock.monotonic())

    def _fail(self, entry: PooledModel, error: BaseException) -> None:
        self._count(num_failed=1)
        entry.nbytes = None  # the files may be others at the next attempt
        callers: list[Any] = self.policy.failed(entry)
        for caller in callers:
            caller.end(error=copy_of(error))

    def _too_large(self, entry: PooledModel) -> DeviceMemoryError:
        limit = self._limit()
        bound = self.policy.device_bytes if limit is None else min(limit, self.policy.device_bytes)
        pinned = self.policy.fixed_bytes - self.policy.leftover_bytes
        free = max(0, bound - self.policy.fixed_bytes)
        others = f", pinned models have {pinned:,}" if pinned else ""
        kept = f"; still referenced: {listed(map(str, self._leftovers), separator='; ')}" if self._leftovers else ""
        return DeviceMemoryError(
            f"the model {printable(entry.name)!r} does not fit into the pool{others}{kept}",
            needed_bytes=entry.nbytes,
            free_bytes=free,
            expected=f"{entry.nbytes:,} bytes",
            found=f"{free:,} of {bound:,}",
        )

    # The steps of a model.

    def _measure(self, entry: PooledModel) -> Steps:
        contents, error = yield "open", partial(entry.content.measure, source=entry.source)
        if error is None:
            entry.contents = contents
            self.policy.measured(entry, contents.nbytes)
        else:
            self._failed(entry, error)

    def _load(self, entry: PooledModel) -> Steps:
        began = clock.monotonic()
        contents = entry.contents
        assert contents is not None
        found, error = yield "swap", partial(entry.content.load, source=entry.source, expected=contents)
        if error is None and found != contents:  # it waits for room once more
            entry.contents = found
            self.policy.measured(entry, found.nbytes)
        elif error is None:
            self._count(num_loads=1, load_seconds=clock.monotonic() - began)
            self._grant(entry, self.policy.loaded(entry, clock.monotonic()))
        else:
            left, nbytes = entry.content.drop(), entry.nbytes
            self._failed(entry, error)
            if left is not None:
                entry.after("free")
                entry.nbytes = nbytes  # not free yet
                yield from self._free(entry, left)
                self.policy.evicted(entry)

    def _failed(self, entry: PooledModel, error: BaseException) -> None:
        if entry.operation is not None and entry.operation.cancelled:
            entry.after("cancelled")  # callers that came since then wait for another load
        else:
            self._fail(entry, error)

    def _evict(self, entry: PooledModel) -> Steps:
        self._count(num_evictions=1)
        left, is_used = None, any(map(_is_pending, entry.events))
        if not is_used:  # two threads less on the way of the next load
            with traced(self._trace, "evict", detail=entry.name):
                left = entry.content.drop()
        if is_used or left:
            yield from self._free(entry, left)
        self.policy.evicted(entry)

    def _free(self, entry: PooledModel, left: Leftover | None = None) -> Generator[Any, Any, None]:
        """Wait until the memory of a model is free, or a second; `left` is what was dropped, None if nothing was."""

        def drop() -> Leftover | None:
            _wait_for(entry.events)
            return left or entry.content.drop()

        last, error = yield "evict", lambda _: (dropped := drop()) and dropped.later()
        last = last if error is None else drop()  # an error: no thread was started
        entry.events = []
        self._leftovers += [last] if last else []

    def _take_out(self, entry: PooledModel, removal: Change) -> Steps:
        """Evict a model for a caller; remove it from the pool if the caller wants that."""
        nbytes = entry.nbytes
        if nbytes is not None:  # it is on the device
            self._count(num_evictions=1)
            yield from self._free(entry)
        self.policy.updated(entry, resident=False)
        entry.nbytes = nbytes
        entry.changes.popleft()
        entry.wants_update = bool(entry.changes)
        if removal.on_removal is not None:
            entry.is_removed = True
            self.policy.models.remove(entry)
            removal.on_removal()
            others: list[Any] = [*self.policy.failed(entry), *entry.changes]
            for caller in others:
                caller.end(error=_removed(entry))
        removal.end()

    def _change(self, entry: PooledModel) -> Steps:
        """Replace the weights of a model: in place if the new ones fit there, else it is loaded at the next use."""
        update, old = entry.changes[0], entry.contents
        source = update.source
        if update.evicts:
            yield from self._take_out(entry, update)
            return
        content = entry.content
        if update.make is not None:
            content = Content(entry.name, update.make, partial(replace, content.options))
        is_resident = entry.nbytes is not None
        left: Leftover | None = None
        in_place = False
        if entry.nbytes is not None and old is not None and old.can_replace and update.make is None:
            in_place = self.policy.device_bytes - self.policy.held_bytes >= old.update_bytes
            entry.nbytes += old.update_bytes if in_place else 0  # nobody else gets it meanwhile

        def work(operation: Operation[Any]) -> Contents:
            nonlocal is_resident, left
            with closing(content):  # what it has measured is not loaded at once
                new = content.measure(operation, source)
                update.loaded = new.loaded
                if is_resident:
                    _wait_for(entry.events)

                    def lose() -> None:
                        nonlocal is_resident
                        is_resident = False  # until all tensors are new

                    try:
                        if in_place and old is not None and new.can_replace and new.tensors == old.tensors:
                            done = content.replace(operation, source, lose)
                            update.loaded = done._replace(content=new.loaded.content)
                            operation.refuse_cancel()
                            is_resident = True
                        else:
                            lose()
                    finally:
                        if not is_resident:
                            left = (dropped := entry.content.drop()) and dropped.later()
                operation.refuse_cancel()
                return new

        new, error = yield "update", work
        entry.changes.popleft()
        self._leftovers += [left] if left else []
        self.policy.updated(entry, resident=is_resident)
        entry.wants_update = bool(entry.changes)
        if error is None:
            entry.content, entry.contents, entry.source = content, new, source
            self._count(num_updates=1)
        if (error is None or is_resident) and entry.contents is not None:
            entry.nbytes = entry.contents.nbytes
        update.end(error=None if error is None else copy_of(error))


def _removed(entry: PooledModel) -> ClosedError:
    return ClosedError(f"the model {printable(entry.name)!r} was removed from the pool")


def _wait_for(events: list[TorchEvent]) -> None:
    for event in events:
        with suppress(DeviceError):  # work that failed has ended
            event.synchronize()


def _is_pending(event: TorchEvent) -> bool:
    try:
        return not event.query()
    except DeviceError:  # work that failed has ended
        return False
