"""The locks of stio, all made here, and the two rules that exclude deadlocks with the code of users.

**No user code under a lock.** What users pass (tensors with methods, producers, predicates, callbacks, paths, log
handlers) is called while the thread holds none of these locks.

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
"""

from __future__ import annotations

import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from typing import Any


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


def forget_held() -> None:
    """Count no lock as held, in a forked child: those of the parent are not its own."""
    _held.count = 0


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
            if mine in self._waiting:
                self._waiting.remove(mine)
            self._seen = self._last_wake
        return woken

    def wait_for(self, ready: Callable[[], object], timeout: float | None = None) -> bool:
        """Sleep until `ready()` is true; False if the timeout (seconds) came first. The caller holds the lock."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not ready():
            left = None if deadline is None else deadline - time.monotonic()
            if left is not None and left <= 0:
                return False
            self.wait(left)
        return True

    def notify(self, count: int = 1) -> None:
        """Wake some threads that sleep. The caller holds the lock, and has changed the state under it."""
        chosen, self._waiting[:count] = self._waiting[:count], []
        release_waiting(chosen)

    def notify_all(self) -> None:
        """Wake all threads that sleep. The caller holds the lock, and has changed the state under it."""
        if self._waiting:
            self.notify(len(self._waiting))

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
