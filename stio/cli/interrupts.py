"""Ctrl-C at the start and at the end of the program, when there is no work to roll back.

At the start it ends the program at once, at the end it does nothing. In between, a command handles KeyboardInterrupt.
`stio.__main__` imports this module before click, so it imports little.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from stio.process import contextmanager


def _is_ours() -> bool:
    """Return whether Python handles Ctrl-C here: it is not ignored (a background job), and has no other handler."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@contextmanager
def starting() -> Iterator[None]:
    """Let Ctrl-C end the process at once, without a traceback, while packages are imported.

    An interrupted import may raise any error: torch and numpy turn a KeyboardInterrupt into errors of their own.
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
    """Let Ctrl-C do nothing from here on: the work is done, and the exit status must stay as it is."""
    if _is_ours():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def die_of_interrupt() -> NoReturn:
    """End the program by the signal of Ctrl-C, so that a loop of the shell around it ends too. Prints nothing.

    The interpreter does this for a KeyboardInterrupt that is not caught, after its exit handlers.
    """
    sys.excepthook = lambda *_: None
    raise KeyboardInterrupt
