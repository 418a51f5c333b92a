"""What Ctrl-C does to the program while it starts and when it ends: nothing is begun, or nothing is left to undo."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["die_of_it", "ignore", "starting"]


def _is_ours() -> bool:
    """Return whether Ctrl-C is Python's here: not ignored (a background job's), not handled by somebody else."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def starting() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without a traceback, while packages are imported.

    An import that is interrupted raises what it likes: torch's and numpy's turn a KeyboardInterrupt into errors of
    their own.
    """
    if not _is_ours():
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def ignore() -> None:
    """Let Ctrl-C do nothing from here on: the work is done, its status says how, and must not become another one."""
    if _is_ours():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_of_it() -> NoReturn:
    """End as Ctrl-C ends a program: by the signal, so that a shell's loop around it ends too. Prints nothing.

    The interpreter does that for a KeyboardInterrupt that nobody catches, after its exit handlers have run.
    """
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt
