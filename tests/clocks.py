"""The time of a test: it passes when stio pauses, and when the test says so. So no test waits for a timeout."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from stio import clock as clock_of_stio


class Clock:
    """What stands for `stio.clock`. Thread-safe.

    Its time stands still otherwise: what stio does within a time does not depend on the load of the machine, and what
    stands for something slow, such as a server, calls `advance`. Pauses of several threads add up. Only `now` follows
    the real time too, as the dates of files and of servers do, with which stio compares it.
    """

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self.seconds = 0.0
        """How much time has passed."""
        self.during_pause: Callable[[], object] = lambda: None
        """Called on the thread that pauses, before the time of the pause passes."""

    def monotonic(self) -> float:
        return self._began + self.seconds

    def now(self) -> float:
        return time.time() + self.seconds

    def sleep(self, seconds: float) -> None:
        """Let the time of a pause pass, and other threads run."""
        self.during_pause()
        self.advance(seconds)
        time.sleep(0)

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        with self._lock:
            self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Give the time of this test."""
    return replaced_clock(monkeypatch)


def replaced_clock(patch: pytest.MonkeyPatch) -> Clock:
    """Replace the time of this process until the patch is undone; return the new one."""
    clock = Clock()
    for name in ("monotonic", "now", "sleep"):
        patch.setattr(clock_of_stio, name, getattr(clock, name))
    return clock
