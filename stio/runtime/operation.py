"""Operations: each runs a blocking function, its body, on a thread of stio's own; callers wait in a loop or a thread.

Callers' threads and the body share no lock (`stio.process` says why). What is decided once, such as whether a
cancel or the end came first, is decided by `dict.setdefault`: the first value stays.

The public functions only wait. A body never runs on the caller's loop, so a load continues while that loop is blocked,
and the caller's task groups, cancel scopes and exception groups have no effect inside it. Between a call and its result
there are two thread switches, caller to thread and back. Beside a busy Python thread each costs up to one switch
interval. So the body runs on a plain thread and not as a task of a second event loop.

A fault inside a library that is written in Rust is a panic. Its Python binding (pyo3) raises a `PanicException`, which
derives from `BaseException`. It passes through every `except Exception` and would end a task of a server without a line
in its log. stio raises a `StorageError` instead.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import copy
import errno
import inspect
import logging
import os
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

import anyio

from stio import clock
from stio.errors import ClosedError, StioError, StorageError, printable
from stio.process import after_fork_in_child, contextmanager, this_thread, thread_name
from stio.runtime.notifier import Notifier, run_blocking, runs_blocking
from stio.runtime.reports import counters
from stio.text import log


class PanicError(StorageError):
    """A library has ended a call by a panic; the text is the library's own."""

    @property
    def cause(self) -> str:
        """The text of the library."""
        return str(self._details.get("cause", ""))


def without_panic(error: BaseException) -> BaseException:
    """Return an error that is an `Exception` for a panic; any other error unchanged.

    KeyboardInterrupt, SystemExit and the cancels of event loops are no panics.
    """
    if type(error).__name__ != "PanicException" or isinstance(error, Exception):
        return error
    cause = printable(str(error))
    return PanicError(
        f"a library that is written in Rust has failed inside (a panic); report it to its project: {cause}",
        errno=errno.EIO,
        cause=cause,
    )


def copy_of(error: BaseException) -> BaseException:
    """Return a copy of an error, for another caller: raising an error adds the frames of that caller to it.

    An error that cannot be copied is returned itself.
    """
    kind = type(error)
    copied: BaseException | None = None
    try:
        with suppress(Exception):  # its `__init__` may take other arguments than those that it keeps
            copied = copy.copy(error)
        if type(copied) is not kind or copied.args != error.args:
            copied = kind.__new__(kind, *error.args)
        copied.__dict__.update(error.__dict__)
    except Exception:
        return error
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


T = TypeVar("T")
logger = logging.getLogger("stio")

_SUSPENDABLE = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")

EXIT_PATIENCE_SECONDS = 10.0
"""Seconds that the interpreter's exit waits for cancelled operations to release their buffers."""


_progressed = 0.0  # time of the last `mark_progress`


def mark_progress() -> None:
    """Note that work goes on (for bodies and their threads): the interpreter's exit waits as long as it does."""
    global _progressed
    _progressed = clock.monotonic()


class Cancelled(BaseException):
    """Raised inside the body of a cancelled operation. A caller that still waits gets `ClosedError`."""


def current_operation() -> Operation[Any] | None:
    """Return the operation to which the calling thread belongs; None for a thread that is not one of stio's."""
    return getattr(this_thread, "operation", None)


def is_interrupted() -> bool:
    """Return whether the calling thread should end: its operation was cancelled, or its pool stopped.

    For storages that wait for something that may never come. On a thread that is not one of stio's it is False.
    """
    operation = current_operation()
    pool = getattr(this_thread, "pool", None)
    return (operation is not None and operation.cancelled) or (pool is not None and pool.stopped)


def start_thread(run: Callable[[], object], *, name: str) -> None:
    """Run a function on a new thread without waiting until it runs.

    `threading.Thread.start()` waits for that: up to one switch interval beside a busy thread. The function must not
    raise. It must not call `threading.current_thread()`, which would add a record that is never removed.
    """
    work = [run]
    del run
    operation = current_operation()

    def body() -> None:
        this_thread.name = name
        this_thread.operation = operation
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
        exit_patience: Seconds without progress (`mark_progress`) after which the interpreter's exit cancels it.
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
        self.kind: counters.Kind = kind
        """See above."""
        self.about = about
        """See above."""
        self._log_detail = ""
        # The first value of each key stays. "thread": the thread that runs the body; "end": how a cancel and the end
        # of the body were ordered; "value": whether the value was taken or discarded.
        self._decided: dict[str, object] = {}
        self._stops: list[Callable[[], None]] = []
        self._discard = discard
        self.exit_patience = exit_patience
        """See above."""
        self._started = False
        self.done = False
        """Whether the body has ended, and all its threads with it; its buffers are released."""
        self._value: T | None = None
        self._error: BaseException | None = None
        self._notifier = notifier or Notifier()
        self.cancelled = False
        """True once `cancel` was called."""

    def start(self) -> Operation[T]:
        """Start the thread; returns at once. A second call does nothing.

        Raises:
            StorageError: The system starts no more threads.
        """
        if "thread" in self._decided:
            return self
        try:
            self._began = time.perf_counter()
            counters.running.add(self)
            start_thread(self._run_once, name=self._name)
        except BaseException as error:
            if not isinstance(error, RuntimeError):
                self.close()  # a KeyboardInterrupt may come after the start; a thread that has not begun ends at once
            counters.running.discard(self)
            if isinstance(error, RuntimeError) and not isinstance(error, RecursionError):
                raise StorageError(
                    f"the system starts no thread for the {self._name}: a limit of threads or of memory is reached",
                    path=self.about or None,
                    errno=errno.EAGAIN,
                ) from error
            raise
        self._started = True
        return self

    def set_log_detail(self, make_text: Callable[[], str]) -> None:
        """Set the text that the log line at the end adds (for bodies). Not called if debug logging is off."""
        if logger.isEnabledFor(logging.DEBUG):
            self._log_detail = f"; {make_text()}"

    def cancel(self) -> None:
        """Request the end of the body. Never blocks; callable from any thread, signal handler and finaliser.

        Idempotent. Has no effect after `refuse_cancel`.
        """
        end = self._decided.setdefault("end", "cancelled")
        if end == "refused":
            return
        self.cancelled = True
        for stop in self._stops.copy():
            stop()
        if end == "over":
            self._discard_value()

    def on_cancel(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the operation is cancelled; at once if it already is. It may be called more than once.

        It must take no lock: see `stio.process`.
        """
        self._stops.append(stop)
        if self.cancelled:
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
        if self._decided.setdefault("end", "refused") == "cancelled":
            raise Cancelled

    @property
    def failure(self) -> BaseException | None:
        """The error that the body raised; None if it raised none, or `Cancelled`."""
        return None if isinstance(self._error, Cancelled) else self._error

    @property
    def running(self) -> bool:
        """Whether the operation was started and its body has not ended."""
        return self._started and not self.done

    async def wait_until(self, ready: Callable[[], bool] | None = None) -> None:
        """Wait until `ready()` or until the body has ended: in a task of any loop, or in a thread (`run_blocking`).

        Starts the operation if it was not: between a start and the wait for it an interruption would leave it running.

        An interruption of the caller is handled here for every public function. A cancel or a KeyboardInterrupt cancels
        the operation, and is raised again when no thread uses the operation's buffers. A coroutine that is closed
        (GeneratorExit) must not wait again: it only cancels the operation.

        Args:
            ready: Reads state that is set before the operation's notifier is called. None: wait for the end.

        Raises:
            StioError: This is a thread of the operation itself.
        """
        is_ready: Callable[[], bool] = (lambda: self.done) if ready is None else (lambda: self.done or ready())
        if current_operation() is self and not is_ready():
            raise StioError(f"the {self._name} cannot wait for its own end on its own thread; wait in another thread")
        try:
            if not self._started:
                self.start()
            await self._notifier.wait_for(is_ready)
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
        await self.wait_until()
        return self.outcome()

    async def aclose(self) -> None:
        """Cancel, and wait until the body has ended. A cancel of the caller during the wait is raised after that."""
        self.cancel()
        await self.ended()

    async def ended(self) -> None:
        """Wait until the body has ended, for any reason. A cancel of the caller is raised after that.

        A KeyboardInterrupt in a blocked thread is raised at once: it is the second one, or the caller waits again.
        """
        interrupted: list[BaseException] = []
        with _shielded():
            while self.running and current_operation() is not self:  # a finaliser may run on its own thread
                try:
                    await self._notifier.wait_for(lambda: self.done)
                except asyncio.CancelledError as error:
                    interrupted = [error]  # asyncio's own task.cancel() passes through anyio's shield
        if interrupted:
            raise interrupted.pop()  # its traceback refers to this frame, which must not refer to it

    def result(self) -> T:
        """Wait for the result in this thread; see `wait`."""
        return run_blocking(self.wait())

    @staticmethod
    def result_of(work: Callable[[], T], *, name: str) -> T:
        """Call a function that takes locks on a thread of stio's, and wait for it; see `stio.process`."""
        if not thread_name():
            with suppress(StorageError):  # no more threads
                return Operation[T](lambda _: work(), name=name).result()
        return work()

    def close(self, timeout: float | None = None) -> None:
        """Cancel, and wait in this thread until the body has ended."""
        self.cancel()
        self.join(timeout)

    def join(self, timeout: float | None = None) -> bool:
        """Wait in this thread until the body has ended; False if the timeout (seconds) came first."""
        return not self._started or self._notifier.block_until(lambda: self.done, timeout)

    def outcome(self) -> T:
        """Return the value of the body, or raise its error; only when `done`.

        The error gets the frames of the caller, with their variables. So the operation does not keep it: a later call
        raises a copy.

        Raises:
            ClosedError: The operation was cancelled, and not by the caller that waits.
            BaseException: The error of the body, as it was raised.
        """
        error = self._error
        if error is None and self._decided.setdefault("value", "taken") == "discarded":
            error = Cancelled()
        if isinstance(error, Cancelled):
            raise ClosedError(f"the {self._name} was cancelled: the object that it belongs to was closed")
        if isinstance(error, StopIteration | StopAsyncIteration):  # in a coroutine or an iterator it would mean the end
            raise RuntimeError(f"the {self._name} was ended by {type(error).__name__} out of a callback") from error
        if error is not None:
            self._error = copy_of(error)
            try:
                raise error
            finally:
                del error  # its traceback refers to this frame
        return self._value  # type: ignore[return-value]  # set whenever there is no error

    def _run_once(self) -> None:
        mine = object()
        if self._decided.setdefault("thread", mine) is not mine:  # another thread, or a signal handler, started it too
            if self.done:
                counters.running.discard(self)
            return
        self._started = True
        this_thread.operation = self
        self._run()
        del self  # as in `_run`

    def _run(self) -> None:
        if logger.isEnabledFor(logging.DEBUG):
            self._log("begins")
        try:
            self.check()
            self._value = self._body(self)
        except BaseException as error:
            _clear_frames(error)
            self._error = without_panic(error)
        # The body's closure and its callbacks refer to plans, files and buffers: free them before a caller is woken,
        # while the interpreter's exit still waits for this thread.
        del self._body
        self._stops.clear()
        if self._decided.setdefault("end", "over") == "cancelled":
            self._discard_value()
        self._count_end()
        self.done = True
        self._notifier.notify()
        del self  # the traceback of the error refers to this frame

    def _count_end(self) -> None:
        """Count the end, and log it, before any caller is woken."""
        cancelled = self.cancelled or isinstance(self._error, Cancelled)
        outcome: counters.Outcome = "cancelled" if cancelled else "done" if self._error is None else "failed"
        seconds = time.perf_counter() - self._began
        if self in counters.running:  # else it was started in the parent of this process
            counters.count_end(self.kind, outcome, seconds)
            counters.running.discard(self)
        if logger.isEnabledFor(logging.DEBUG):
            text = f"failed by {type(self._error).__name__}" if outcome == "failed" else outcome
            self._log("%s after %.3f s%s", text, seconds, "" if outcome == "cancelled" else self._log_detail)

    def _log(self, message: str, *values: object) -> None:
        """Log one line at debug level."""
        log(logging.DEBUG, f"%s: {message}", f"{self._name} {printable(self.about)}".rstrip(), *values)

    def _discard_value(self) -> None:
        """Pass a value that came after the cancel to `discard`, once, unless a caller has taken it."""
        if self._error is None and self._decided.setdefault("value", "discarded") == "discarded":
            value, self._value = self._value, None
            if value is not None:
                try:
                    self._discard(value)
                except Exception as error:  # those that wait for the end must be woken; a cancel raises nothing
                    log(logging.ERROR, "%s: its result could not be released: %s", self._name, error)

    def _end_in_child(self) -> None:
        """Mark as ended in a forked child: its thread is not there."""
        self._stops = []
        self.cancelled = self.done = True
        self._error = Cancelled()


def _clear_frames(error: BaseException | None) -> None:
    """Clear stio's frames in the traceback of an error, so that a reference to the error holds no buffers and files.

    Frames of users' code keep their variables, which debuggers show. Frames of coroutines and generators are not
    cleared. A callback may raise an error that was raised before in the task that waits for this operation; to clear a
    suspended frame of that task would end the task.
    """
    seen = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        for frame, _ in traceback.walk_tb(error.__traceback__):
            code = frame.f_code
            if code.co_filename.startswith(_PACKAGE) and not code.co_flags & _SUSPENDABLE:
                with suppress(RuntimeError):  # it still runs
                    frame.clear()
        error = error.__cause__ or error.__context__


@contextmanager
def _shielded() -> Iterator[None]:
    """Shield a wait in a task from cancels by anyio's scopes; nothing to do in a thread that blocks.

    A coroutine that is closed (GeneratorExit) may be outside its task, or outside any loop. Then the scope cannot be
    left, and need not be.
    """
    if runs_blocking():
        yield
        return
    scope = anyio.CancelScope(shield=True)
    scope.__enter__()
    try:
        yield
    except GeneratorExit:
        with suppress(RuntimeError):
            scope.__exit__(None, None, None)
        raise
    except BaseException as error:
        scope.__exit__(type(error), error, error.__traceback__)
        raise
    else:
        scope.__exit__(None, None, None)


async def close_all(
    operations: Collection[Operation[Any]], release: Callable[[], None] = lambda: None, *, may_wait: bool = True
) -> None:
    """Cancel operations and wait until all have ended, however often the caller is interrupted; then pass that on.

    A coroutine that is closed (GeneratorExit) must not wait. Then a thread waits for the operations.

    Args:
        operations: What may run.
        release: Frees what the operations use; called when all have ended.
        may_wait: False where the caller handles a GeneratorExit.
    """
    for operation in operations:
        operation.cancel()
    interrupted: list[BaseException] = []
    for operation in operations:
        while operation.running and may_wait:
            try:
                await operation.ended()
            except GeneratorExit as error:
                interrupted, may_wait = [error], False
            except BaseException as error:
                interrupted = [error]
    left = [operation for operation in operations if operation.running]
    if left:
        with suppress(RuntimeError):  # no more threads: what they use is freed with the last reference
            start_thread(lambda: _release_after(left, release), name="close")
    else:
        release()
    if interrupted:
        raise interrupted.pop()  # see `Operation.ended`


def _release_after(operations: Collection[Operation[Any]], release: Callable[[], None]) -> None:
    for operation in operations:
        operation.join()
    release()


# Exit and fork.


@atexit.register
def end_all_at_exit(*, patient_only: bool = False) -> None:
    """End the operations that still run: no thread may read into memory after the interpreter has freed it.

    Also called by other functions of the exit whose work begins when all operations have ended.

    Args:
        patient_only: Leave out those without an `exit_patience`: threads of the program may still wait for them.
    """
    operations = [one for one in counters.running.copy() if one.exit_patience or not patient_only]
    operations.sort(key=lambda operation: (operation.exit_patience, operation._began))
    begin = clock.monotonic()
    given_up: set[Operation[Any]] = set()

    def give_up(operation: Operation[Any]) -> None:
        if operation.exit_patience and not (operation.done or operation.cancelled):
            given_up.add(operation)
        operation.cancel()

    with suppress(KeyboardInterrupt):
        for operation in operations:
            _wait_while_it_progresses(operation, begin)
            give_up(operation)
    for operation in reversed(operations):  # after a KeyboardInterrupt; in their order the next one could begin
        give_up(operation)
    deadline = clock.monotonic() + EXIT_PATIENCE_SECONDS
    for operation in operations:
        operation.close(max(0.0, deadline - clock.monotonic()))
        what = f"{operation._name} {printable(operation.about)}".rstrip()
        if not operation.done:
            level = logging.ERROR if operation in given_up else logging.WARNING
            log(level, "%s did not end within %.0f s of exit", what, EXIT_PATIENCE_SECONDS)
        elif operation in given_up and isinstance(operation._error, Cancelled):
            log(
                logging.ERROR,
                "%s was rolled back at the program's end (Ctrl-C, or %.0f s without progress); wait for its result, or "
                "close its saver, before the program ends",
                what,
                operation.exit_patience,
            )


def _wait_while_it_progresses(operation: Operation[Any], begin: float) -> None:
    """Wait until an operation has ended, or nothing has made progress for as long as its patience lasts."""
    while not operation.done:
        last = max(begin, _progressed)
        operation.join(max(0.0, last + operation.exit_patience - clock.monotonic()))
        if last == max(begin, _progressed) or not operation.exit_patience:
            return


@after_fork_in_child
def _forget_parent() -> None:
    """Mark all operations as ended in a forked child: their threads are not in the child."""
    for operation in counters.running:
        operation._end_in_child()
    counters.running.clear()
