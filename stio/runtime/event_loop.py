"""The engine's event loop, for storages that are asynchronous by nature; it starts when the first of them is used."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from stio.runtime.process import after_fork_in_child

__all__ = ["EngineTask", "engine_call"]

T = TypeVar("T")


class _EngineLoop:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=self._loop.run_forever, name="stio-engine", daemon=True).start()
            return self._loop


_engine = _EngineLoop()


def engine_call(make: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine on the engine's loop and wait for it in this worker thread."""
    return asyncio.run_coroutine_threadsafe(make(), _engine.get()).result()


class EngineTask(Generic[T]):
    """A coroutine on the engine's loop that a worker thread waits for, and any thread may cancel.

    Args:
        make: Returns the coroutine; called on the loop.
    """

    def __init__(self, make: Callable[[], Coroutine[Any, Any, T]]) -> None:
        self._make = make
        self._loop = _engine.get()
        self._task: asyncio.Task[T | None] | None = None
        self._exit: BaseException | None = None
        self._ended: Future[T] = Future()
        self._loop.call_soon_threadsafe(self._begin)

    def cancel(self) -> None:
        """Ask the coroutine to end; `result` returns when it has."""
        self._loop.call_soon_threadsafe(lambda: self._task is not None and self._task.cancel())

    def result(self) -> T:
        """Wait for the coroutine's end.

        Raises:
            asyncio.CancelledError: It was cancelled.
        """
        return self._ended.result()

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(self._end)

    async def _run(self) -> T | None:
        try:
            return await self._make()
        except (KeyboardInterrupt, SystemExit) as error:  # a task that raises them ends its loop, and all who wait
            self._exit = error
            return None

    def _end(self, task: asyncio.Task[T | None]) -> None:
        error = asyncio.CancelledError() if task.cancelled() else task.exception() or self._exit
        if error is None:
            self._ended.set_result(task.result())  # type: ignore[arg-type]  # None only beside `_exit`
        else:
            self._ended.set_exception(error)


@after_fork_in_child
def _forget_parent() -> None:
    """Start afresh in a forked child: the loop's thread is not here."""
    global _engine
    _engine = _EngineLoop()
