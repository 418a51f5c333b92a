"""Notifier: wakes what waits for a condition. That may be tasks of asyncio, uvloop and trio, and plain threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import anyio.lowlevel

from stio.runtime.blocking import runs_blocking

_CHECK_SECONDS = 1.0
"""Longest wait of a thread at a time. A signal that arrives just before a thread starts to wait does not end the wait.
So Ctrl-C takes effect after this time at the latest."""


class Notifier:
    """Wakes tasks of any event loop, and threads, when a condition may have changed.

    Conditions are read without a lock: each must be a single read of state that is set before `notify` is called.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finaliser may notify while its own thread adds or removes a waker
        self._wakers: list[Callable[[], None]] = []

    def notify(self) -> None:
        """Wake all that wait. Callable from any thread, never blocks."""
        with self._lock:
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    async def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`: in the current task, or in the current thread under `run_blocking`."""
        if runs_blocking():
            self.block_until(ready)
            return
        while not ready():
            wait, wake = _loop_event()
            with self._lock:
                self._wakers.append(wake)
            try:
                if not ready():  # `notify` may have been called before the waker was added
                    await wait()
            finally:
                self._forget(wake)

    def block_until(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in the current thread until `ready()`; False if the timeout (seconds) came first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            event = threading.Event()
            with self._lock:
                self._wakers.append(event.set)
            try:
                left = _CHECK_SECONDS
                if deadline is not None:
                    left = min(left, max(0.0, deadline - time.monotonic()))
                if not (ready() or event.wait(left)) and deadline is not None and time.monotonic() >= deadline:
                    return ready()
            finally:
                self._forget(event.set)
        return True

    def _forget(self, wake: Callable[[], None]) -> None:
        with self._lock, suppress(ValueError):
            self._wakers.remove(wake)


def _loop_event() -> tuple[Callable[[], Awaitable[object]], Callable[[], None]]:
    """Return how the current task waits, and a function that ends the wait from any thread.

    On asyncio without anyio: importing anyio's backend takes 40 to 80 ms, which would stop a server's loop at its first
    load.
    """
    event: asyncio.Event | anyio.Event
    if _in_asyncio_task():
        event = asyncio.Event()
        post: Callable[..., object] = asyncio.get_running_loop().call_soon_threadsafe
    else:
        event = anyio.Event()
        post = anyio.lowlevel.current_token().native_token.run_sync_soon  # type: ignore[attr-defined]  # a TrioToken

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended, nothing waits in it (trio's error is one too)
            post(event.set)

    return event.wait, wake


def _in_asyncio_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no asyncio loop runs in this thread
        return False
