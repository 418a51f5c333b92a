"""What belongs to the whole process: locks, forks, the interpreter's switch interval, its garbage collector.

**No user code under a lock.** What users pass (tensors with methods, producers, predicates, callbacks, paths, log
handlers) is called while the thread holds no lock of stio's, all of which are made here.

**No lock of stio's threads on a caller's thread.** A signal handler or a finaliser can interrupt a caller's thread
between any two steps, call stio again, and wait for a thread of stio. If the interrupted thread held a lock that the
other one needs, both would wait for ever. So callers' threads (all code that runs before the first wait of a public
function, a cancel, a finaliser, `stio.stats()`) change shared state by steps that the interpreter does not interrupt:
one assignment, `append` and `pop` of a list, `setdefault` and `pop` of a dict (ARCHITECTURE.md, "Without the GIL", says
which of these arguments hold there). They wake threads by `Condition.wake`,
which needs no lock. Locks are for stio's own threads. A `Saver` has one for callers' threads, which no thread of stio
takes; it is re-entrant.

Each thread counts the locks that it holds. `require_unlocked` raises if there is one: before user code is called, and
before a thread waits. So a finaliser that the collector runs on a thread of stio, in the middle of such a step, gets an
error if it waits for stio, and no deadlock.

Operations that run beside each other share settings: the switch interval (unchanged by default) and the garbage
collector, which pauses while more than 1,000 tensors are made. Each setting is counted: the first user changes it, the
last one restores it. A module whose state must not outlive a fork registers a function with `after_fork_in_child`. All
context managers of stio are made by `contextmanager`, which leaves no reference cycle behind. Nothing here needs an
event loop, so a program that imports `stio.compat` alone imports none.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import traceback
from _thread import allocate_lock
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import wraps
from types import TracebackType
from typing import Any, Generic, ParamSpec, TypeVar, cast

from stio.errors import printable

# Locks.


class _Held(threading.local):
    count = 0


_held = _Held()


def new_lock(*, of_callers: bool = False) -> Any:
    """Return a re-entrant lock: a finaliser may run on the thread that holds it, and use the same object.

    Args:
        of_callers: No thread of stio takes it. It is not counted: a signal handler may run under it.
    """
    return threading.RLock() if of_callers else Condition()


def require_unlocked() -> None:
    """Require that this thread holds no lock of stio's.

    Raises:
        RuntimeError: It holds one. A finaliser runs in the middle of a step of stio, or stio has a bug.
    """
    if _held.count:
        raise RuntimeError(
            f"this thread is in the middle of a step of stio, under {_held.count} lock(s): a finaliser that runs there "
            "must not use stio"
        )


class Condition:
    """A re-entrant lock, and threads of stio that sleep until the state behind it may have changed.

    It differs from `threading.Condition` in `wake`, which needs no lock, and counts the locks that its thread holds.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        self._waiting: list[Any] = []  # a lock for each thread that sleeps; its release wakes the thread
        self._last_wake = self._seen = object()

    def __enter__(self) -> None:
        is_nested = self._lock._is_owned()
        self._lock.acquire()
        _held.count += 1
        if not is_nested:  # a finaliser may enter it between a check of the state and the sleep
            self._seen = self._last_wake

    def __exit__(self, *error: object) -> None:
        _held.count -= 1
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Sleep until `notify_all` or `wake` is called, or for a time (seconds). The caller holds the lock.

        May return earlier, so the caller checks the state again. Returns False if the time passed.
        """
        woken = True
        mine = allocate_lock()
        mine.acquire()
        self._waiting.append(mine)
        try:
            if self._seen is self._last_wake:  # else `wake` was called since this thread checked the state
                state = self._lock._release_save()
                _held.count -= state[0]
                try:
                    woken = mine.acquire(True, -1 if timeout is None else max(0.0, timeout))
                finally:
                    self._lock._acquire_restore(state)
                    _held.count += state[0]
        finally:
            self._waiting.remove(mine)
            self._seen = self._last_wake
        return woken

    def wait_for(self, ready: Callable[[], object]) -> None:
        """Sleep until `ready()` is true. The caller holds the lock."""
        while not ready():
            self.wait()

    def notify_all(self) -> None:
        """Wake all threads that sleep. The caller holds the lock, and has changed the state under it."""
        if self._waiting:
            release_waiting(self._waiting)

    def wake(self) -> None:
        """Wake all threads that sleep, or are about to. Callable from any thread, with and without the lock."""
        self._last_wake = object()
        release_waiting(self._waiting)


def release_waiting(waiting: list[Any]) -> None:
    """Release locks that threads wait for; one that was released before is no error."""
    for lock in waiting.copy():
        try:
            lock.release()
        except RuntimeError:
            pass


# Context managers.

P = ParamSpec("P")
T = TypeVar("T")


class _Context(AbstractContextManager[T], Generic[T]):
    """A context manager of a generator, without the reference cycle that those of `contextlib` leave behind.

    In Python 3.12.1 and 3.13.0 the frame of a generator that has ended keeps the frame of its caller
    (https://github.com/python/cpython/issues/100964). For a context manager that is `__exit__`, which has the error of
    the block in a variable. If the generator handles the error, both refer to each other, and all frames below, with
    the memory of a save or the variables of a caller, stay until the collector runs. Here `__exit__` drops the error.
    """

    def __init__(self, steps: Iterator[T]) -> None:
        self._steps = cast(Generator[T, Any, Any], steps)

    def __enter__(self) -> T:
        return next(self._steps)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        try:
            if error is None:
                next(self._steps, None)
            else:
                self._steps.throw(error)
        except StopIteration:
            return True
        except BaseException as raised:
            # A generator raises a StopIteration of the block as the cause of a RuntimeError.
            if raised is not error and not (isinstance(error, StopIteration) and raised.__cause__ is error):
                raise
            error.__traceback__ = trace
        finally:
            del error, trace
        return False


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, AbstractContextManager[T]]:
    """Return a function that makes a context manager of a generator, as `contextlib.contextmanager` does."""

    @wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[T]:
        return _Context(function(*args, **kwargs))

    return make


# Forks and threads.

NICENESS = 5
"""Added to the nice value of stio's own threads, so that the thread of an event loop runs first when both are ready."""

_MANY_TENSORS = 1000

_at_fork: list[Callable[[], None]] = []


def after_fork_in_child(reset: Callable[[], None]) -> Callable[[], None]:
    """Register a function that each forked child calls, in the order of registration; usable as a decorator.

    A child has none of the parent's threads, and a lock that one of them held stays locked. So each function makes new
    locks, and drops the operations that only the parent can complete.
    """
    _at_fork.append(reset)
    return reset


def _run_after_fork() -> None:
    for reset in _at_fork:
        try:
            reset()
        except Exception:
            traceback.print_exc()  # as Python does for hooks of `os.register_at_fork`: the others must run


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_run_after_fork)


def be_nice() -> None:
    """Lower the priority of the calling thread (Linux only, where each thread has its own). For stio's own threads."""
    if sys.platform == "linux":
        try:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + NICENESS)
        except OSError:
            pass  # a sandbox forbids it; only latency depends on it


this_thread = threading.local()
"""Of a thread of stio, which has no `threading.Thread`: its `name`, its `operation`, and its `pool` of workers."""


def thread_name() -> str:
    """Return the name of the calling thread, if it is one of stio's own, else an empty text."""
    return str(getattr(this_thread, "name", ""))


# The switch interval.

_interval_lock = new_lock()
_intervals: list[float] = []
_original_interval = 0.0


def check_switch_interval(seconds: object) -> None:
    """Check the value of `switch_interval=`.

    Raises:
        TypeError: It is neither None nor a number.
        ValueError: It is not positive.
    """
    if seconds is None:
        return
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        raise TypeError(f"switch_interval= takes a number of seconds, not {seconds!r}")
    if not seconds > 0:
        raise ValueError(f"switch_interval must be positive, not {printable(seconds)}")


def switch_interval(seconds: float | None) -> AbstractContextManager[None]:
    """Shorten the interpreter's switch interval while the block runs; None does not change it.

    Of several blocks the shortest interval holds. The last block to end restores the original one.
    """
    return nullcontext() if seconds is None else _shortened(seconds)


@contextmanager
def _shortened(seconds: float) -> Iterator[None]:
    global _original_interval
    with _interval_lock:
        original = _original_interval if _intervals else sys.getswitchinterval()
        sys.setswitchinterval(min(original, seconds, *_intervals))  # raises if it is not positive
        _original_interval = original
        _intervals.append(seconds)
    try:
        yield
    finally:
        with _interval_lock:
            _intervals.remove(seconds)
            sys.setswitchinterval(min([_original_interval, *_intervals]))


# The garbage collector.

_pauses: list[object] = []  # one item for each block under way; the last block to end enables the collector again


def collection_paused(num_tensors: int) -> AbstractContextManager[None]:
    """Pause the garbage collector while objects for many tensors are made; none of them is garbage.

    Beside torch's own objects a full collection holds the GIL for 50 to 200 ms, and making 100,000 tensors starts two
    or three. If the collector was disabled before, it stays disabled.
    """
    return nullcontext() if num_tensors <= _MANY_TENSORS else _paused()


@contextmanager
def _paused() -> Iterator[None]:
    if not _pauses and not gc.isenabled():
        yield
        return
    pause = object()
    try:
        _pauses.append(pause)
        gc.disable()
        yield
    finally:
        with suppress(ValueError):  # an interruption came before it was added
            _pauses.remove(pause)
        if not _pauses:
            gc.enable()


@after_fork_in_child
def _restore_settings() -> None:
    """Restore the settings that threads of the parent had changed: those threads are not in the child."""
    global _interval_lock, _intervals
    _held.count = 0  # the locks of the parent are not its own
    _interval_lock = new_lock()
    if _intervals:
        sys.setswitchinterval(_original_interval)
    _intervals = []
    if _pauses:
        gc.enable()
    _pauses.clear()
