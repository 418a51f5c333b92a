"""What Ctrl-C does to the program while it starts and when it ends: nothing is begun, or nothing is left to undo."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["die_at_once", "die_of_it", "starting"]


def die_at_once() -> bool:
    """Let Ctrl-C end the process at once, by the signal, from here on; return whether that changed anything.

    An ignored Ctrl-C (a background job's) stays ignored, a handler that somebody else put there stays too.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return False
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return True


@contextmanager
def starting() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without a traceback, while packages are imported.

    An import that is interrupted raises what it likes: torch's and numpy's turn a KeyboardInterrupt into errors of
    their own.
    """
    if not die_at_once():
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def die_of_it() -> NoReturn:
    """End as Ctrl-C ends a program: by the signal, so that a shell's loop around it ends too. Prints nothing.

    The interpreter does that for a KeyboardInterrupt that nobody catches, after its exit handlers have run.
    """
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt
