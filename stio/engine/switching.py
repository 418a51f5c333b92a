"""The interpreter's switch interval, shared by all operations that ask for a shorter one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["switch_interval"]

_interval_lock = threading.Lock()
_wishes: list[float] = []
_original = 0.0


@contextmanager
def switch_interval(seconds: float | None) -> Iterator[None]:
    """Shorten the interpreter's switch interval while the block runs; None leaves it alone.

    The setting is the interpreter's, so wishes are counted: the shortest holds, the last to leave restores.
    """
    global _original
    if seconds is None:
        yield
        return
    with _interval_lock:
        original = _original if _wishes else sys.getswitchinterval()
        sys.setswitchinterval(min(original, seconds, *_wishes))  # refuses what is not positive
        _original = original
        _wishes.append(seconds)
    try:
        yield
    finally:
        with _interval_lock:
            _wishes.remove(seconds)
            sys.setswitchinterval(min([_original, *_wishes]))


def _forget_parent() -> None:
    """Start afresh in a forked child: the threads that wished are not here."""
    global _interval_lock, _wishes
    _interval_lock = threading.Lock()
    if _wishes:
        sys.setswitchinterval(_original)
    _wishes = []


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parent)
