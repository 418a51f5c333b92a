"""What a worker thread waits for: calls of other libraries that cannot be interrupted, and coroutines.

A call of another library runs on a thread of its own. The worker that needs its result waits for it, and checks now and
then whether it should end. If so, it leaves the call behind within a second, and the result is dropped. So such a call
must touch no buffer of the operation.

A coroutine of an asynchronous storage or of a producer runs on an asyncio loop on a thread of stio's own. The worker
sends it there and blocks until it has ended. The thread starts with the first coroutine and is shared by the whole
process.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import errno
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from stio import clock
from stio.errors import StorageError
from stio.process import after_fork_in_child, new_lock
from stio.runtime.operation import Cancelled, current_operation, end_all_at_exit, is_interrupted, without_panic

T = TypeVar("T")

LOOK_SECONDS = 0.5
"""Time between two checks of a waiting worker whether it should end. Each check needs the GIL, and 32 workers may
wait."""
_EXIT_SECONDS = 2.0
"""Longest time that the interpreter's exit waits for calls that were left behind."""


class Call(Generic[T]):
    """A function that runs on another thread, unless the calling thread cannot be interrupted anyway.

    Args:
        work: The function.
        on_own_thread: It always runs on another thread: the calling thread gives it its work piece by piece.
        check: Called now and then while a caller waits for the result; what it raises, the caller gets, and leaves the
            function behind.

    Raises:
        RuntimeError: It needs a thread of its own, and the system starts no more threads.
    """

    def __init__(
        self, work: Callable[[], T], *, on_own_thread: bool = False, check: Callable[[], None] = lambda: None
    ) -> None:
        self._check = check
        self._work: Callable[[], T] | None = work
        self._value: T | None = None
        self._error: BaseException | None = None
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        _under_way.add(self)
        try:
            if current_operation() is not None or on_own_thread:
                _thread.start_new_thread(self._run, ())
                return
        except RuntimeError:  # the system starts no more threads
            if on_own_thread:
                _under_way.discard(self)
                raise
        self._run()  # it cannot be interrupted

    def result(self) -> T:
        """Wait until the function has ended; return what it returned, or raise what it raised. Called once.

        Raises:
            Cancelled: The calling thread should end; the function may go on.
        """
        while not self._ended.acquire(True, LOOK_SECONDS):
            if is_interrupted():
                raise Cancelled
            self._check()
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        value, self._value = self._value, None
        return value  # type: ignore[return-value]  # set whenever there is no error

    def _run(self) -> None:
        work, self._work = self._work, None
        try:
            self._value = work()  # type: ignore[misc]  # set until here
        except BaseException as error:
            self._error = without_panic(error)
        del work
        _under_way.discard(self)
        self._ended.release()


_under_way: set[Call[Any]] = set()


@atexit.register
def _wait_at_exit() -> None:
    """Wait for calls that were left behind: they must not return to an interpreter that has ended."""
    end_all_at_exit()  # the operations leave their calls behind; until then each of them makes the next one
    until = clock.monotonic() + _EXIT_SECONDS
    while _under_way and clock.monotonic() < until:
        clock.sleep(0.01)


@after_fork_in_child
def _forget_threads() -> None:
    global _loop, _loop_lock
    _loop, _loop_lock = None, new_lock()
    _under_way.clear()


# Coroutines.


_loop_lock = new_lock()
_loop: asyncio.AbstractEventLoop | None = None


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop
    with _loop_lock:
        if _loop is None:
            loop = asyncio.new_event_loop()
            try:
                threading.Thread(target=loop.run_forever, name="stio-event-loop", daemon=True).start()
            except RuntimeError as error:
                loop.close()  # not kept: what waits for a loop without a thread would wait for ever
                raise StorageError(
                    "the system starts no thread for the event loop: a limit of threads or of memory is reached",
                    errno=errno.EAGAIN,
                ) from error
            _loop = loop
        return _loop


def run_on_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `make` returns on the loop; block the calling thread until it has ended.

    Raises:
        StorageError: The system starts no thread for the loop.
        BaseException: The error of the coroutine, as it was raised.
    """
    return LoopTask(make).result()


class LoopTask(Generic[T]):
    """A coroutine on the loop: a worker thread waits for it, and any thread may cancel it.

    Args:
        make: Returns the coroutine; called on the loop.

    Raises:
        StorageError: The system starts no thread for the loop.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._loop = _running_loop()
        self._task: asyncio.Task[None] | None = None
        self._ended: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Request the end of the coroutine; `result` returns when it has ended."""
        self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())

    def result(self) -> T:
        """Block until the coroutine has ended; return or raise its outcome.

        Raises:
            asyncio.CancelledError: It was cancelled.
        """
        return self._ended.result()

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    async def _run(self) -> None:
        try:
            self._ended.set_result(await self._make())
        except BaseException as error:  # raised by a task, a KeyboardInterrupt would end the loop for all tasks
            self._ended.set_exception(error)

    def _end(self, task: asyncio.Task[None]) -> None:
        if not self._ended.done():  # cancelled before its first step
            self._ended.set_exception(asyncio.CancelledError())
