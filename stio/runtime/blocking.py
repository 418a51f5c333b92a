"""One body for each operation and two kinds of wait: coroutines that a thread without an event loop can run too.

The public functions are written once, as coroutines. They suspend in one place only: `Notifier.wait_for`. Under
`run_blocking` that wait blocks the calling thread, so the coroutine runs to its end without being suspended, and no
event loop is needed. `stio.sync` is made of such calls.

A context variable records whether waits block. User code that runs in between may start an event loop of its own, whose
tasks inherit the variable; so it holds for the task under which it was set, and for no other.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar

T = TypeVar("T")

_NOT_SET: Any = object()
_blocking_task: ContextVar[object] = ContextVar("stio_blocking_task", default=_NOT_SET)


def current_task() -> object | None:
    """Return the task of asyncio or trio that runs in this thread; None if there is none."""
    try:
        task: object | None = asyncio.current_task()
    except RuntimeError:  # no asyncio loop runs in this thread
        task = None
    lowlevel = _trio_lowlevel()
    return lowlevel.current_task() if task is None and lowlevel is not None and lowlevel.in_trio_task() else task


def in_event_loop() -> bool:
    """Return whether an event loop of asyncio or trio runs in this thread, in a task or in a callback."""
    lowlevel = _trio_lowlevel()
    return asyncio._get_running_loop() is not None or (lowlevel is not None and lowlevel.in_trio_run())


def _trio_lowlevel() -> Any:
    """Return `trio.lowlevel` if it is imported; another thread may be importing trio at this moment."""
    return getattr(sys.modules.get("trio"), "lowlevel", None)


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
