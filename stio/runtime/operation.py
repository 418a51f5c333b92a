"""Operations: blocking bodies on threads of stio's own, waited for from any loop, or from none.

The faces only wait. An operation's body never runs on the caller's loop, so a load goes on while that loop is
blocked, and nothing of the caller's (task groups, cancel scopes, exception groups) reaches into it. Between a
call and its result there are two handoffs, caller to thread and back: beside a busy Python thread each costs up
to a switch interval, which is why the body is a plain thread and not a task behind a second event loop.
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
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio

from stio.errors import ClosedError, printable
from stio.runtime import stats as counters
from stio.runtime.notifier import Notifier
from stio.runtime.process import after_fork_in_child
from stio.runtime.trace import name_thread

__all__ = ["Cancelled", "Operation", "start_thread"]

T = TypeVar("T")
logger = logging.getLogger("stio")

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

EXIT_PATIENCE_SECONDS = 10.0
"""How long the interpreter's exit waits for operations to give their buffers back."""


class Cancelled(BaseException):
    """Raised inside an operation's body once it was cancelled; a caller who still waits gets `ClosedError`."""


def start_thread(run: Callable[[], object], *, name: str) -> None:
    """Run a function on a new thread without waiting until it runs.

    `threading.Thread.start()` waits for that, a handoff of up to a switch interval beside a busy thread. The
    function must not raise, and must not ask for `threading.current_thread()`, which would leave a record behind.
    """
    work = [run]
    del run

    def body() -> None:
        name_thread(name)
        # Nothing of it may stay in this frame: an error that passed through `run` keeps the frames below it too,
        # and `traceback.clear_frames` does not reach those.
        work.pop()()

    _thread.start_new_thread(body, ())


class Operation(Generic[T]):
    """One piece of work on a thread of its own.

    Args:
        body: Called with this operation on the new thread. It should look at `cancelled` or hang a callback on
            `on_cancel`, and must leave nothing behind when it returns or raises.
        name: Name of the thread, a lane of traces.
        kind: What it counts as in `stio.stats()`.
        about: What it works on, for the log; it may come out of a file.
        notifier: Rung when the body has ended, for those who wait for other things of it too.
        discard: Called with a value that nobody will take, the operation having been cancelled meanwhile.
        exit_patience: Seconds that the interpreter's exit waits for its end before it is cancelled.
    """

    def __init__(
        self,
        body: Callable[[Operation[T]], T],
        *,
        name: str,
        kind: counters.Kind = "other",
        about: str = "",
        notifier: Notifier | None = None,
        discard: Callable[[T], object] = lambda _: None,
        exit_patience: float = 0.0,
    ) -> None:
        self._body = body
        self._name = name
        self._kind: counters.Kind = kind
        self.about = about
        """See above."""
        self._remark = ""
        self._lock = threading.RLock()  # a finalizer may cancel while its own thread is inside
        self._stops: list[Callable[[], None]] = []
        self._discard = discard
        self.exit_patience = exit_patience
        """See above."""
        self._started = False
        self._settled = False
        self._done = False
        self._taken = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._notifier = notifier or Notifier()
        self.cancelled = False
        """True once `cancel` was called."""

    def start(self) -> Operation[T]:
        """Begin; returns at once."""
        self._log("begins")
        _live.add(self)
        self._began = time.perf_counter()
        self._tally = counters.begin(self._kind)
        self._started = True  # before the thread: who closes us meanwhile must wait for it
        try:
            start_thread(self._run, name=self._name)
        except BaseException:
            self._started = False
            counters.end(self._tally, None)
            _live.discard(self)
            raise
        return self

    def remark(self, say: Callable[[], str]) -> None:
        """Say what the log shall tell of it at its end (for bodies); not even asked where nobody listens."""
        if logger.isEnabledFor(logging.DEBUG):
            self._remark = f"; {say()}"

    def cancel(self) -> None:
        """Ask the body to end. Never blocks; callable from any thread, a finalizer included. Idempotent."""
        with self._lock:
            if self._settled:
                return
            self.cancelled = True
            stops, self._stops = self._stops, []
            late = self._done and not self._taken
        for stop in stops:
            stop()
        if late:
            self._drop()

    def on_cancel(self, stop: Callable[[], None]) -> None:
        """Have `stop` called when the operation is cancelled; at once if it was."""
        with self._lock:
            if not self.cancelled:
                self._stops.append(stop)
                return
        stop()

    def check(self) -> None:
        """Raise `Cancelled` if the operation was cancelled (for bodies, between steps)."""
        if self.cancelled:
            raise Cancelled

    def settle(self) -> None:
        """Pass the point of no return: raise `Cancelled` now, or be deaf to cancels from here on."""
        with self._lock:
            self.check()
            self._settled = True

    @property
    def done(self) -> bool:
        """Whether the body has ended, and with it every thread and buffer of the operation."""
        return self._done

    @property
    def failure(self) -> BaseException | None:
        """What the body raised; None if it has not, or because it was cancelled."""
        return None if isinstance(self._error, Cancelled) else self._error

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._started and not self._done

    async def wait(self) -> T:
        """Wait for the result from any anyio-supported loop.

        If the caller is cancelled meanwhile, the operation is cancelled too, and this returns (by the caller's
        own cancellation) only when nothing touches the operation's buffers any more.
        """
        try:
            await self._notifier.wait_for(lambda: self._done)
        except GeneratorExit:
            self.cancel()  # the coroutine is thrown away, it must not wait any more
            raise
        except BaseException:
            # The exception at hand goes first; `Task.cancelling` remembers a second cancel.
            with suppress(asyncio.CancelledError):
                await self.aclose()
            raise
        return self.outcome()

    async def aclose(self) -> None:
        """Cancel, and wait until the body has ended; a caller who is cancelled meanwhile hears of it after that."""
        self.cancel()
        await self.ended()

    async def ended(self) -> None:
        """Wait until the body has ended, however it does; a cancel of the caller is passed on after that."""
        interrupted: BaseException | None = None
        with anyio.CancelScope(shield=True):
            while self._started and not self._done:
                try:
                    await self._notifier.wait_for(lambda: self._done)
                except asyncio.CancelledError as error:
                    interrupted = error  # asyncio's own task.cancel() passes through anyio's shield
        if interrupted is not None:
            raise interrupted

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result in this thread; a KeyboardInterrupt cancels and waits for the end.

        Raises:
            TimeoutError: The timeout (seconds) passed; the operation goes on.
        """
        try:
            if not self._notifier.wait_for_blocking(lambda: self._done, timeout):
                raise TimeoutError(f"{self._name} is not done after {timeout} s")
        except TimeoutError:
            raise
        except BaseException:
            self.close()
            raise
        return self.outcome()

    def close(self, timeout: float | None = None) -> None:
        """Cancel, and wait in this thread until the body has ended."""
        self.cancel()
        self.join(timeout)

    def join(self, timeout: float | None = None) -> bool:
        """Wait in this thread until the body has ended; False if the timeout (seconds) came first."""
        return not self._started or self._notifier.wait_for_blocking(lambda: self._done, timeout)

    def outcome(self) -> T:
        """Return or raise what the body did; only once it is `done`.

        Raises:
            ClosedError: It was cancelled by somebody else than the caller who waits.
            BaseException: Whatever the body raised.
        """
        with self._lock:
            value, error = self._value, self._error
            self._taken = value is not None
        if isinstance(error, Cancelled):
            raise ClosedError(f"the {self._name} was ended before it was done: what it belongs to was closed")
        if error is not None:
            raise error
        return value  # type: ignore[return-value]  # set whenever there is no error

    def _run(self) -> None:
        try:
            self.check()
            self._value = self._body(self)
        except BaseException as error:
            _let_go(error)
            self._error = error
        # The body's closure holds plans, files and buffers: they must be free before the waiter goes on.
        del self._body
        _live.discard(self)
        self._account()
        with self._lock:
            self._stops = []
            late = self.cancelled
            self._done = not late
        if late:
            self._drop()
            self._done = True
        self._notifier.notify()

    def _account(self) -> None:
        """Count the end, and log it; nobody who waits has heard of it yet."""
        cancelled = self.cancelled or isinstance(self._error, Cancelled)
        outcome: counters.Outcome = "cancelled" if cancelled else "done" if self._error is None else "failed"
        seconds = time.perf_counter() - self._began
        counters.end(self._tally, outcome, seconds)
        told = f"failed by {type(self._error).__name__}" if outcome == "failed" else outcome
        self._log("%s after %.3f s%s", told, seconds, "" if outcome == "cancelled" else self._remark)

    def _log(self, message: str, *values: object) -> None:
        """Write a line for who looks for them. Never in a loop; a handler that raises must not keep us from ending."""
        if logger.isEnabledFor(logging.DEBUG):
            with suppress(Exception):
                logger.debug(f"%s: {message}", f"{self._name} {printable(self.about)}".rstrip(), *values)

    def _drop(self) -> None:
        """Get rid of a value that came too late; ends as any cancelled operation does."""
        with self._lock:
            value, self._value = self._value, None
            if self._error is None:
                self._error = Cancelled()
        if value is not None:
            self._discard(value)

    def _abandon(self) -> None:
        """Count as ended, in a forked child: the thread is not here, and may have held any lock when it was left."""
        self._lock = threading.RLock()
        self._stops = []
        self.cancelled = self._done = True
        self._error = Cancelled()


def _let_go(error: BaseException | None) -> None:
    """Empty the frames that an error passed through: whoever keeps it must not keep their buffers and files.

    Coroutines and generators are spared. A callback may raise an error that it raised before: the caller's own
    task, which waits for us, then is in its traceback, and to clear a suspended frame is to end it.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if not frame.f_code.co_flags & _SUSPENDABLE:
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        error = error.__cause__ or error.__context__


_live: set[Operation[Any]] = set()  # those with a thread, which would keep them anyway; copied and changed in one step


# Exit and fork.


@atexit.register
def _drain() -> None:
    """End what still runs: a thread that reads into memory must not outlive the interpreter that frees it."""
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
    """Start afresh in a forked child: the parent's threads are not here, its locks may be held for ever."""
    global _live
    for operation in _live:
        operation._abandon()
    _live = set()
