"""An asyncio event loop on a thread of stio's own, for asynchronous storage and for coroutines of producers.

Workers are plain threads. A worker that needs the result of a coroutine sends the coroutine to this loop and blocks
until it has ended. The thread starts with the first coroutine and is shared by the whole process.
"""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from stio.errors import StorageError
from stio.runtime.locks import new_lock
from stio.runtime.process import after_fork_in_child

T = TypeVar("T")


class _LoopThread:
    def __init__(self) -> None:
        self._lock = new_lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def loop(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = _started_loop()
            return self._loop


def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    try:
        threading.Thread(target=loop.run_forever, name="stio-event-loop", daemon=True).start()
    except BaseException as error:
        loop.close()  # not kept: what waits for a loop without a thread would wait for ever
        if isinstance(error, RuntimeError):
            raise StorageError(
                "the system starts no thread for the event loop: a limit of threads or of memory is reached",
                errno=errno.EAGAIN,
            ) from error
        raise
    return loop


_loop_thread = _LoopThread()


def run_on_loop(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run the coroutine that `make` returns on the loop; block the calling thread until it has ended.

    Raises:
        StorageError: The system starts no thread for the loop.
        BaseException: The error of the coroutine, as it was raised.
    """
    loop = _loop_thread.loop()  # first: a coroutine that is made must run
    return asyncio.run_coroutine_threadsafe(make(), loop).result()


class LoopTask(Generic[T]):
    """A coroutine on the loop: a worker thread waits for it, and any thread may cancel it.

    Args:
        make: Returns the coroutine; called on the loop.

    Raises:
        StorageError: The system starts no thread for the loop.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._loop = _loop_thread.loop()
        self._task: asyncio.Task[T | None] | None = None
        self._exit: BaseException | None = None
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

    async def _run(self) -> T | None:
        try:
            return await self._make()
        except (KeyboardInterrupt, SystemExit) as error:  # raised by a task, they would end the loop for all tasks
            self._exit = error
            return None

    def _end(self, task: asyncio.Task[T | None]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception() or self._exit
        if error is None:
            self._ended.set_result(task.result())  # type: ignore[arg-type]  # None only beside `_exit`
        else:
            self._ended.set_exception(error)


@after_fork_in_child
def _reset() -> None:
    """Make the next coroutine start a new loop: the thread of the parent's loop is not in the child."""
    global _loop_thread
    _loop_thread = _LoopThread()
