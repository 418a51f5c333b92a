"""Waits: a `Notifier` wakes tasks of asyncio, uvloop and trio, and plain threads, when a condition may have changed.

The public functions are written once, as coroutines. They suspend in one place only: `Notifier.wait_for`. Under
`run_blocking` that wait blocks the calling thread, so the coroutine runs to its end without being suspended, and no
event loop is needed. `stio.sync` is made of such calls.

A context variable records whether waits block. User code that runs in between may start an event loop of its own, whose
tasks inherit the variable; so it holds for the task under which it was set, and for no other.
"""

from __future__ import annotations

import asyncio
import sys
import time
from _thread import allocate_lock
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

import anyio
import anyio.lowlevel

from stio.process import release_waiting, require_unlocked

# Waits that block.

T = TypeVar("T")

_NOT_SET: Any = object()
_blocking_task: ContextVar[object] = ContextVar("stio_blocking_task", default=_NOT_SET)


def current_task() -> object | None:
    """Return the task of asyncio or trio that runs in this thread; None if there is none."""
    if asyncio._get_running_loop() is not None and (task := asyncio.current_task()) is not None:
        return task
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)  # another thread may be importing trio now
    return lowlevel.current_task() if lowlevel is not None and lowlevel.in_trio_task() else None


def in_event_loop() -> bool:
    """Return whether an event loop of asyncio or trio runs in this thread, in a task or in a callback."""
    lowlevel = getattr(sys.modules.get("trio"), "lowlevel", None)
    return asyncio._get_running_loop() is not None or (lowlevel is not None and lowlevel.in_trio_run())


def runs_blocking() -> bool:
    """Return whether waits in this thread block now, because `run_blocking` runs the coroutine that waits."""
    task = _blocking_task.get()
    return task is not _NOT_SET and task is current_task()


def run_blocking(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine of stio's to its end in this thread, and return its result. Its waits block the thread.

    A KeyboardInterrupt during a wait is raised there, as a cancel is in a task: the coroutine ends its
    operation, and this function raises the interrupt when no thread uses the operation's buffers.
    """
    try:
        token = _blocking_task.set(current_task())
        try:
            coroutine.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            _blocking_task.reset(token)
    finally:
        coroutine.close()  # an interrupt before its first step would otherwise warn that it was never awaited
    raise RuntimeError("a coroutine of stio waited for something else than an operation; this is a bug in stio")


class AsyncOnly:
    """Base of objects that take `async with`: a plain `with` raises an error that names their blocking twin."""

    _sync_name: ClassVar[str]
    """Name of the twin, or of the function that makes it, in `stio.sync`."""

    if not TYPE_CHECKING:  # a type checker reports a plain `with`

        def __enter__(self) -> NoReturn:
            name = type(self).__name__
            raise TypeError(f"{name} takes `async with`; for a plain `with`, use stio.sync.{self._sync_name}")

        def __exit__(self, *error: object) -> None:
            """Python looks for it before it calls `__enter__`."""


# The notifier.

_CHECK_SECONDS = 1.0
"""Longest wait of a thread at a time. A signal that arrives just before a thread starts to wait does not end the wait.
So Ctrl-C takes effect after this time at the latest."""


class Notifier:
    """Wakes tasks of any event loop, and threads, when a condition may have changed. It has no lock.

    Conditions are read without a lock: each must be a single read of state that is set before `notify` is called. One
    that waits registers first and reads then, so no change is missed.
    """

    def __init__(self) -> None:
        self._wakers: list[Callable[[], None]] = []

    def notify(self) -> None:
        """Wake all that wait. Callable from any thread, signal handler and finaliser; never blocks."""
        for wake in self._wakers.copy():
            wake()

    async def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`: in the current task, or in the current thread under `run_blocking`."""
        if runs_blocking():
            self.block_until(ready)
            return
        while not ready():
            wait, wake = _loop_event()
            self._wakers.append(wake)
            try:
                if not ready():
                    await wait()
            finally:
                self._wakers.remove(wake)

    def block_until(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in the current thread until `ready()`; False if the timeout (seconds) came first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            lock = allocate_lock()  # not a `threading.Event`, which has a lock of its own
            lock.acquire()
            wake = partial(release_waiting, [lock])
            self._wakers.append(wake)
            try:
                if ready():
                    return True
                require_unlocked()
                left = _CHECK_SECONDS
                if deadline is not None:
                    left = min(left, max(0.0, deadline - time.monotonic()))
                if not lock.acquire(True, left) and deadline is not None and time.monotonic() >= deadline:
                    return ready()
            finally:
                self._wakers.remove(wake)


def _loop_event() -> tuple[Callable[[], Awaitable[object]], Callable[[], None]]:
    """Return how the current task waits, and a function that ends the wait from any thread.

    On asyncio without anyio: importing anyio's backend takes 40 to 80 ms, which would stop a server's loop at its first
    load.
    """
    event: asyncio.Event | anyio.Event
    woken: list[bool] = []
    if asyncio._get_running_loop() is not None and asyncio.current_task() is not None:
        event = asyncio.Event()
        post: Callable[..., object] = asyncio.get_running_loop().call_soon_threadsafe
    else:
        event = anyio.Event()
        post = anyio.lowlevel.current_token().native_token.run_sync_soon  # type: ignore[attr-defined]  # a TrioToken

    def wake() -> None:
        if woken:
            return  # a task that has not run yet needs no second callback
        with suppress(RuntimeError):  # the loop has ended, nothing waits in it (trio's error is one too)
            post(event.set)
        woken.append(True)

    return event.wait, wake
