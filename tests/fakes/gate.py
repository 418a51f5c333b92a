"""A gate for calls: calls are logged in their order, and from a chosen one on they wait until it is open."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

PATIENCE_SECONDS = 30.0
"""A wait for something that must happen fails after this time."""

T = TypeVar("T")


def wait_until(changed: threading.Condition, ready: Callable[[], bool], failure: str) -> None:
    """Block until `ready()`, which is checked at each notification of `changed`.

    Raises:
        TimeoutError: It did not happen in `PATIENCE_SECONDS`; `failure` is the message.
    """
    with changed:
        if not changed.wait_for(ready, PATIENCE_SECONDS):
            raise TimeoutError(failure)


class Gated:
    """The part that `FaultyRoot` and `MemoryDestination` share.

    Args:
        gate: Calls from number `gate_at` on wait until it is set; None: no call waits.
        gate_at: Number of the first call that waits, from 1.
    """

    def __init__(self, gate: threading.Event | None, gate_at: int) -> None:
        self.gate = gate
        self.gate_at = gate_at
        self.num_waiting = 0
        """Calls that wait at the gate now."""
        self._changed = threading.Condition()

    def pass_gate(self, log: list[T], call: T) -> int:
        """Append a call to the log, and wait while the gate is closed for it; return its number, from 1."""
        with self._changed:
            log.append(call)
            number, gate = len(log), self.gate
            if gate is None or number < self.gate_at:
                return number
            self.num_waiting += 1
            self._changed.notify_all()
        try:
            if not gate.wait(PATIENCE_SECONDS):
                raise TimeoutError("the gate was never opened")
        finally:
            with self._changed:
                self.num_waiting -= 1
        return number

    def wait_for_waiting(self, count: int, what: str) -> None:
        """Block until `count` calls wait at the gate; `what` they are is for the message."""
        wait_until(self._changed, lambda: self.num_waiting >= count, f"fewer than {count} {what} wait at the gate")
