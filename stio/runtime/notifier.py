"""Waking whoever waits, wherever it waits: tasks of asyncio, uvloop and trio, and plain threads."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import anyio.lowlevel

__all__ = ["Notifier"]

_LOOK_SECONDS = 1.0
"""A signal that comes just before a thread begins to wait does not end the wait: Ctrl-C is heard when it is over."""


class Notifier:
    """Wakes tasks of any event loop, and threads, when a condition may have changed.

    Conditions are looked at without a lock: they must be single reads of state that the ringer set before.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a finalizer may ring while its own thread hangs a waker up
        self._wakers: list[Callable[[], None]] = []

    def notify(self) -> None:
        """Wake everybody who waits. Callable from any thread, never blocks."""
        with self._lock:
            wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    async def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait in the current task until `ready()`."""
        while not ready():
            wait, wake = _loop_event()
            with self._lock:
                self._wakers.append(wake)
            try:
                if not ready():  # it may have been rung between the look and the hanging up
                    await wait()
            finally:
                self._forget(wake)

    def wait_for_blocking(self, ready: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait in the current thread until `ready()`; False if the timeout (seconds) came first."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            event = threading.Event()
            with self._lock:
                self._wakers.append(event.set)
            try:
                left = _LOOK_SECONDS if deadline is None else min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))
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

    On asyncio without anyio: importing its backend takes 40 to 80 ms, which a server's loop would stand still for
    at its first load.
    """
    event: asyncio.Event | anyio.Event
    if _in_asyncio_task():
        event = asyncio.Event()
        post: Callable[..., object] = asyncio.get_running_loop().call_soon_threadsafe
    else:
        event = anyio.Event()
        post = anyio.lowlevel.current_token().native_token.run_sync_soon  # type: ignore[attr-defined]  # a TrioToken

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended meanwhile, nobody is left to wake (trio's error is one too)
            post(event.set)

    return event.wait, wake


def _in_asyncio_task() -> bool:
    try:
        return asyncio.current_task() is not None
    except RuntimeError:  # no asyncio loop runs in this thread
        return False
