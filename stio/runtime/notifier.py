"""Notifier: wakes what waits for a condition. That may be tasks of asyncio, uvloop and trio, and plain threads."""

from __future__ import annotations

import asyncio
import time
from _thread import allocate_lock
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial

import anyio
import anyio.lowlevel

from stio.runtime.blocking import runs_blocking
from stio.runtime.locks import release_waiting, require_unlocked

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
        while not ready():
            require_unlocked()
            lock = allocate_lock()  # not a `threading.Event`, which has a lock of its own
            lock.acquire()
            wake = partial(release_waiting, [lock])
            self._wakers.append(wake)
            try:
                left = _CHECK_SECONDS
                if deadline is not None:
                    left = min(left, max(0.0, deadline - time.monotonic()))
                if not (ready() or lock.acquire(True, left)) and deadline is not None and time.monotonic() >= deadline:
                    return ready()
            finally:
                self._wakers.remove(wake)
        return True


def _loop_event() -> tuple[Callable[[], Awaitable[object]], Callable[[], None]]:
    """Return how the current task waits, and a function that ends the wait from any thread.

    On asyncio without anyio: importing anyio's backend takes 40 to 80 ms, which would stop a server's loop at its first
    load.
    """
    event: asyncio.Event | anyio.Event
    woken: list[bool] = []
    if _in_asyncio_task():
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


def _in_asyncio_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no asyncio loop runs in this thread
        return False
