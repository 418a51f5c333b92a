"""Operations: each runs a blocking function, its body, on a thread of stio's own; callers wait in a loop or a thread.

The public functions only wait. A body never runs on the caller's loop, so a load continues while that loop is blocked,
and the caller's task groups, cancel scopes and exception groups have no effect inside it. Between a call and its result
there are two thread switches, caller to thread and back. Beside a busy Python thread each costs up to one switch
interval. So the body runs on a plain thread and not as a task of a second event loop.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import inspect
import logging
import threading
import time
import traceback
from collections.abc import Callable, Collection
from contextlib import nullcontext, suppress
from typing import Any, Generic, TypeVar

import anyio

from stio.errors import ClosedError, printable
from stio.runtime import stats
from stio.runtime.blocking import run_blocking, runs_blocking
from stio.runtime.notifier import Notifier
from stio.runtime.process import after_fork_in_child, name_thread

T = TypeVar("T")
logger = logging.getLogger("stio")

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

EXIT_PATIENCE_SECONDS = 10.0
"""Seconds that the interpreter's exit waits for cancelled operations to release their buffers."""


class Cancelled(BaseException):
    """Raised inside the body of a cancelled operation. A caller that still waits gets `ClosedError`."""


def start_thread(run: Callable[[], object], *, name: str) -> None:
    """Run a function on a new thread without waiting until it runs.

    `threading.Thread.start()` waits for that: up to one switch interval beside a busy thread. The function must not
    raise. It must not call `threading.current_thread()`, which would add a record that is never removed.
    """
    work = [run]
    del run

    def body() -> None:
        name_thread(name)
        # This frame must hold no reference to `run`: the traceback of an error that passes through `run` refers to the
        # frames below it too, and `traceback.clear_frames` does not clear those.
        work.pop()()

    _thread.start_new_thread(body, ())


class Operation(Generic[T]):
    """One piece of cancellable work on a thread of its own.

    Args:
        body: Called with this operation on the new thread. It should read `cancelled` between steps, or register a
            callback with `on_cancel`. When it returns or raises, it must have released its files, buffers and threads.
        name: Name of the thread, also its lane in traces.
        kind: Kind under which `stio.stats()` counts it.
        about: What it works on, for the log. The text may come from an untrusted file.
        notifier: Notified when the body has ended. A caller that also waits for other events of the body passes its
            own.
        discard: Called with the value of the body if the operation was cancelled before a caller took the value.
        exit_patience: Seconds that the interpreter's exit waits for its end before it is cancelled.
    """

    def __init__(
        self,
        body: Callable[[Operation[T]], T],
        *,
        name: str,
        kind: stats.Kind = "other",
        about: str = "",
        notifier: Notifier | None = None,
        discard: Callable[[T], object] = lambda _: None,
        exit_patience: float = 0.0,
    ) -> None:
        self._body = body
        self._name = name
        self._kind: stats.Kind = kind
        self.about = about
        """See above."""
        self._log_detail = ""
        self._lock = threading.RLock()  # a finalizer may cancel while its own thread is inside
        self._stops: list[Callable[[], None]] = []
        self._discard = discard
        self.exit_patience = exit_patience
        """See above."""
        self._started = False
        self._cancel_refused = False
        self._done = False
        self._taken = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._notifier = notifier or Notifier()
        self.cancelled = False
        """True once `cancel` was called."""

    def start(self) -> Operation[T]:
        """Start the thread; returns at once."""
        self._log("begins")
        _live.add(self)
        self._began = time.perf_counter()
        self._tally = stats.count_start(self._kind)
        self._started = True  # before the thread starts: a `close` at the same time must wait for it
        try:
            start_thread(self._run, name=self._name)
        except BaseException:
            self._started = False
            stats.count_end(self._tally, None)
            _live.discard(self)
            raise
        return self

    def set_log_detail(self, make_text: Callable[[], str]) -> None:
        """Set the text that the log line at the end adds (for bodies). Not called if debug logging is off."""
        if logger.isEnabledFor(logging.DEBUG):
            self._log_detail = f"; {make_text()}"

    def cancel(self) -> None:
        """Request the end of the body. Never blocks; callable from any thread and from finalizers. Idempotent.

        Has no effect after `refuse_cancel`.
        """
        with self._lock:
            if self._cancel_refused:
                return
            self.cancelled = True
            stops, self._stops = self._stops, []
            late = self._done and not self._taken
        for stop in stops:
            stop()
        if late:
            self._discard_value()

    def on_cancel(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the operation is cancelled; at once if it already is."""
        with self._lock:
            if not self.cancelled:
                self._stops.append(stop)
                return
        stop()

    def check(self) -> None:
        """Raise `Cancelled` if the operation was cancelled (for bodies, between steps)."""
        if self.cancelled:
            raise Cancelled

    def refuse_cancel(self) -> None:
        """Ignore every later cancel (for bodies, before a step that cannot be undone).

        Raises:
            Cancelled: The operation was cancelled before.
        """
        with self._lock:
            self.check()
            self._cancel_refused = True

    @property
    def done(self) -> bool:
        """Whether the body has ended, and all its threads with it; its buffers are released."""
        return self._done

    @property
    def failure(self) -> BaseException | None:
        """The error that the body raised; None if it raised none, or `Cancelled`."""
        return None if isinstance(self._error, Cancelled) else self._error

    @property
    def running(self) -> bool:
        """Whether the operation was started and its body has not ended."""
        return self._started and not self._done

    async def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()` or until the body has ended: in a task of any loop, or in a thread (`run_blocking`).

        An interruption of the caller is handled here for every public function. A cancel or a KeyboardInterrupt cancels
        the operation, and is raised again when no thread uses the operation's buffers. A coroutine that is closed
        (GeneratorExit) must not wait again: it only cancels the operation.

        Args:
            ready: Reads state that is set before the operation's notifier is called.
        """
        try:
            await self._notifier.wait_for(lambda: self._done or ready())
        except GeneratorExit:
            self.cancel()
            raise
        except BaseException:
            # The first exception is the one that is raised; `Task.cancelling` remembers a second cancel.
            with suppress(asyncio.CancelledError):
                await self.aclose()
            raise

    async def wait(self) -> T:
        """Wait for the result. For interruptions see `wait_until`, for errors see `outcome`."""
        await self.wait_until(lambda: False)
        return self.outcome()

    async def aclose(self) -> None:
        """Cancel, and wait until the body has ended. A cancel of the caller during the wait is raised after that."""
        self.cancel()
        await self.ended()

    async def ended(self) -> None:
        """Wait until the body has ended, for any reason. A cancel of the caller is raised after that.

        A KeyboardInterrupt in a blocked thread is raised at once: it is the second one, or the caller waits again.
        """
        interrupted: BaseException | None = None
        with nullcontext() if runs_blocking() else anyio.CancelScope(shield=True):
            while self.running:
                try:
                    await self._notifier.wait_for(lambda: self._done)
                except asyncio.CancelledError as error:
                    interrupted = error  # asyncio's own task.cancel() passes through anyio's shield
        if interrupted is not None:
            raise interrupted

    def result(self) -> T:
        """Wait for the result in this thread; see `wait`."""
        return run_blocking(self.wait())

    def close(self, timeout: float | None = None) -> None:
        """Cancel, and wait in this thread until the body has ended."""
        self.cancel()
        self.join(timeout)

    def join(self, timeout: float | None = None) -> bool:
        """Wait in this thread until the body has ended; False if the timeout (seconds) came first."""
        return not self._started or self._notifier.block_until(lambda: self._done, timeout)

    def outcome(self) -> T:
        """Return the value of the body, or raise its error; only when `done`.

        Raises:
            ClosedError: The operation was cancelled, and not by the caller that waits.
            BaseException: The error of the body, as it was raised.
        """
        with self._lock:
            value, error = self._value, self._error
            self._taken = value is not None
        if isinstance(error, Cancelled):
            raise ClosedError(f"the {self._name} was cancelled: the object that it belongs to was closed")
        if isinstance(error, StopIteration | StopAsyncIteration):  # in a coroutine or an iterator it would mean the end
            raise RuntimeError(f"the {self._name} was ended by {type(error).__name__} out of a callback") from error
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # set whenever there is no error

    def _run(self) -> None:
        try:
            self.check()
            self._value = self._body(self)
        except BaseException as error:
            _clear_frames(error)
            self._error = error
        # The body's closure refers to plans, files and buffers: they must be freed before a caller is woken.
        del self._body
        _live.discard(self)
        self._count_end()
        with self._lock:
            self._stops = []
            late = self.cancelled
            self._done = not late
        if late:
            self._discard_value()
            self._done = True
        self._notifier.notify()

    def _count_end(self) -> None:
        """Count the end, and log it, before any caller is woken."""
        cancelled = self.cancelled or isinstance(self._error, Cancelled)
        outcome: stats.Outcome = "cancelled" if cancelled else "done" if self._error is None else "failed"
        seconds = time.perf_counter() - self._began
        stats.count_end(self._tally, outcome, seconds)
        text = f"failed by {type(self._error).__name__}" if outcome == "failed" else outcome
        self._log("%s after %.3f s%s", text, seconds, "" if outcome == "cancelled" else self._log_detail)

    def _log(self, message: str, *values: object) -> None:
        """Log one line at debug level. Errors of log handlers are ignored: they must not change the outcome."""
        if logger.isEnabledFor(logging.DEBUG):
            with suppress(Exception):
                logger.debug(f"%s: {message}", f"{self._name} {printable(self.about)}".rstrip(), *values)

    def _discard_value(self) -> None:
        """Pass a value that came after the cancel to `discard`; the outcome is that of a cancelled operation."""
        with self._lock:
            value, self._value = self._value, None
            if self._error is None:
                self._error = Cancelled()
        if value is not None:
            self._discard(value)

    def _end_in_child(self) -> None:
        """Mark as ended in a forked child: its thread is not there, and may have held any lock at the fork."""
        self._lock = threading.RLock()
        self._stops = []
        self.cancelled = self._done = True
        self._error = Cancelled()


def _clear_frames(error: BaseException | None) -> None:
    """Clear the frames in the traceback of an error, so that a reference to the error holds no buffers and files.

    Frames of coroutines and generators are not cleared. A callback may raise an error that was raised before in the
    task that waits for this operation; to clear a suspended frame of that task would end the task.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if not frame.f_code.co_flags & _SUSPENDABLE:
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        error = error.__cause__ or error.__context__


# All operations with a thread; the thread refers to its operation anyway. Each read and change is one atomic step.
async def close_all(operations: Collection[Operation[Any]]) -> None:
    """Cancel operations and wait until all have ended, however often the caller is interrupted; then pass that on.

    For callers that free what the operations use. Only a coroutine that is closed (GeneratorExit) cannot wait again.
    """
    for operation in operations:
        operation.cancel()
    interrupted: BaseException | None = None
    for operation in operations:
        while operation.running:
            try:
                await operation.ended()
            except GeneratorExit as error:
                interrupted = error
                break
            except BaseException as error:
                interrupted = error
    if interrupted is not None:
        raise interrupted


_live: set[Operation[Any]] = set()


# Exit and fork.


@atexit.register
def _end_all_at_exit() -> None:
    """End the operations that still run: no thread may read into memory after the interpreter has freed it."""
    operations = list(_live)
    begin = time.monotonic()
    for operation in sorted(operations, key=lambda operation: operation.exit_patience):
        operation.join(max(0.0, begin + operation.exit_patience - time.monotonic()))
        operation.cancel()
    deadline = time.monotonic() + EXIT_PATIENCE_SECONDS
    for operation in operations:
        operation.close(max(0.0, deadline - time.monotonic()))
        if not operation.done:
            logger.warning("%s did not end within %.0f s of exit", operation._name, EXIT_PATIENCE_SECONDS)


@after_fork_in_child
def _forget_parent() -> None:
    """Mark all operations as ended in a forked child: their threads are not in the child."""
    global _live
    for operation in _live:
        operation._end_in_child()
    _live = set()
