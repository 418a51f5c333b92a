"""Requests that a cancel leaves within a second, and that are repeated if they fail.

A call of obstore cannot be interrupted: it ends with its answer, or when the store was silent for too long. So it runs
on a thread of its own, and writes only to memory that obstore allocates; the worker that needs the answer waits for it,
and looks now and then whether it should end. A worker that ends leaves the call behind: it touches no buffer of the
load, and its answer is dropped.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from stio.errors import StorageError
from stio.runtime.log import log
from stio.runtime.operation import Cancelled, current_operation
from stio.runtime.process import after_fork_in_child
from stio.runtime.workers import is_interrupted
from stio.storage.remote.failures import failure_of
from stio.storage.remote.stores import STALL_SECONDS

T = TypeVar("T")

_LOOK_SECONDS = 0.5
"""A worker looks so often whether it should end. Each look needs the interpreter, which 32 of them share."""
_IDLE_SECONDS = 5.0
_EXIT_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a failed request is repeated, and after which pauses."""

    num_attempts: int = 8
    """Most attempts at one request."""
    num_stalls: int = 3
    """Most of them that may end because the store, or the service that gives credentials, sent no bytes."""
    first_pause_seconds: float = 0.2
    """Pause before the second attempt; it doubles with each attempt. Half of it is random, so that workers that failed
    together do not come back together."""
    longest_pause_seconds: float = 10.0
    """Longest pause."""
    stall_seconds: float = STALL_SECONDS
    """Longest time without a byte."""

    def pause_seconds(self, attempt: int) -> float:
        """Return the pause after an attempt, counted from 1."""
        whole = min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** (attempt - 1))
        return whole * random.uniform(0.5, 1.0)


class Requester:
    """Makes the requests to one store. Thread-safe.

    Args:
        connect: Makes the store; called again when its credentials have expired.
        patience: How often requests are repeated.
        path: URL of the store, for errors.
    """

    def __init__(self, connect: Callable[[], Any], patience: Patience, *, path: str) -> None:
        require_usable(path)
        self._path = path
        self._connect = connect
        self._store = connect()
        self.patience = patience
        """See above."""

    def begin(self, request: Callable[[Any], T]) -> Call[T]:
        """Start the first attempt at a request, which gets the store; `finish` returns its answer."""
        require_usable(self._path)
        store = self._store
        return Call(lambda: request(store))

    def finish(self, first: Call[T], request: Callable[[Any], T], path: str, *, expected: object = None) -> T:
        """Wait for an answer; repeat the request while it fails, and may succeed.

        Args:
            first: What `begin` returned.
            request: The request.
            path: URL of the object, without secrets.
            expected: Identity of the object, if it was opened before.

        Raises:
            Cancelled: The calling thread should end (`is_interrupted`).
            StioError: The request failed; see `Failure.error`.
        """
        call, attempt, num_slow, renewed = first, 1, 0, False
        while True:
            try:
                return call.result()
            except Exception as error:
                failure = failure_of(error)
            del call  # its error refers to this frame
            num_slow += failure.is_slow
            last = attempt >= self.patience.num_attempts or num_slow >= self.patience.num_stalls
            if last or not failure.may_succeed or (failure.kind == "expired" and renewed):
                raise failure.error(path, attempt, stall_seconds=self.patience.stall_seconds, expected=expected)
            log(
                logging.WARNING if failure.is_slow else logging.INFO,
                "%s: attempt %d failed (%s%s); trying again",
                path,
                attempt,
                failure.kind,
                f": {failure.cause}" if failure.cause else "",
            )
            if failure.kind == "expired":
                renewed, self._store = True, self._connect()
            else:
                pause(self.patience.pause_seconds(attempt))
            attempt += 1
            call = self.begin(request)

    def run(self, request: Callable[[Any], T], path: str, *, expected: object = None) -> T:
        """Make a request, and wait for its answer; see `finish`."""
        return self.finish(self.begin(request), request, path, expected=expected)


def pause(seconds: float) -> None:
    """Sleep; raise `Cancelled` soon after the calling thread should end."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if is_interrupted():
            raise Cancelled
        time.sleep(min(left, _LOOK_SECONDS))


class Call(Generic[T]):
    """A function that runs on another thread, unless the calling thread cannot be interrupted anyway.

    Args:
        work: The function.
    """

    def __init__(self, work: Callable[[], T]) -> None:
        self._work: Callable[[], T] | None = work
        self._value: T | None = None
        self._error: BaseException | None = None
        self._ended = _thread.allocate_lock()
        self._ended.acquire()
        if current_operation() is None:
            self._run()
        else:
            _submit(self)

    def result(self) -> T:
        """Wait until the function has ended; return what it returned, or raise what it raised. Called once.

        Raises:
            Cancelled: The calling thread should end; the function may go on.
        """
        while not self._ended.acquire(True, _LOOK_SECONDS):
            if is_interrupted():
                raise Cancelled
        error, self._error = self._error, None
        if error is not None:
            try:
                raise error
            finally:
                del error
        value, self._value = self._value, None
        return value  # type: ignore[return-value]  # set whenever there is no error

    def _run(self) -> None:
        work, self._work = self._work, None
        try:
            self._value = work()  # type: ignore[misc]  # set until here
        except BaseException as error:
            self._error = error
        del work
        self._ended.release()


# Threads. Each serves one call after the other, and ends when there was none for some seconds.


class _Thread:
    def __init__(self, call: Call[Any]) -> None:
        self.call: Call[Any] | None = call
        self.wake = _thread.allocate_lock()
        self.wake.acquire()

    def run(self) -> None:
        while self.call is not None:
            call, self.call = self.call, None
            call._run()
            _under_way.discard(call)
            del call
            _idle.append(self)
            if not self.wake.acquire(True, _IDLE_SECONDS):
                try:
                    _idle.remove(self)
                    return
                except ValueError:  # it was taken in between: its call is coming
                    self.wake.acquire()


_idle: list[_Thread] = []
_under_way: set[Call[Any]] = set()


def _submit(call: Call[Any]) -> None:
    _under_way.add(call)
    try:
        thread = _idle.pop()
    except IndexError:
        try:
            _thread.start_new_thread(_Thread(call).run, ())
        except RuntimeError:  # the limit of threads: it cannot be interrupted then
            call._run()
            _under_way.discard(call)
    else:
        thread.call = call
        thread.wake.release()


@atexit.register
def _wait_at_exit() -> None:
    """Give calls that were left behind some time: obstore must not return to an interpreter that is gone."""
    until = time.monotonic() + _EXIT_SECONDS
    while _under_way and time.monotonic() < until:
        time.sleep(0.01)


# Fork: obstore's own threads are not in the child, and a request would wait for them for ever.

_user_pid = 0


def require_usable(path: str) -> None:
    """Require that this process can make requests.

    Raises:
        StorageError: It was forked from a process that had made requests.
    """
    global _user_pid
    if not _user_pid:
        _user_pid = os.getpid()
    elif _user_pid != os.getpid():
        raise StorageError(
            "this process was forked from one that has read URLs, and obstore does not work in it; start processes by "
            "'spawn' or 'forkserver' (multiprocessing.set_start_method), or read no URL before the fork",
            path=path,
        )


@after_fork_in_child
def _forget_threads() -> None:
    _idle.clear()
    _under_way.clear()
