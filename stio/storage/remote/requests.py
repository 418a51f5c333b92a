"""Requests that a cancel leaves within a second, and that are repeated if they fail.

A call of obstore cannot be interrupted: it ends with its answer, or when the store was silent for too long. So it is a
`stio.runtime.calls.Call`, and writes only to memory that obstore allocates. A worker that ends leaves it behind.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from stio.errors import StorageError
from stio.runtime.calls import LOOK_SECONDS, Call
from stio.runtime.log import RareWarnings, log
from stio.runtime.operation import Cancelled
from stio.runtime.workers import is_interrupted
from stio.storage.remote.answers import RateWatch
from stio.storage.remote.failures import Failure, Work, failure_of
from stio.storage.remote.stores import STALL_SECONDS

T = TypeVar("T")


BUSY_SECONDS = 180.0
"""Longest time for which a request is repeated that the store refuses for the moment, unless the caller sets it."""

_MOST_JITTER_SECONDS = 1.0


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
    """Longest pause, unless the store requests a longer one."""
    stall_seconds: float = STALL_SECONDS
    """Longest time without a byte."""
    busy_seconds: float = 0.0
    """For so long a request is repeated that the store refuses for the moment (429, 503), however many attempts that
    takes; 0: by the number of attempts."""

    def pause_seconds(self, attempt: int, requested_seconds: float = 0.0) -> float:
        """Return the pause after an attempt, counted from 1.

        Args:
            attempt: Number of the attempt.
            requested_seconds: Shortest pause, which the store requests (Retry-After).
        """
        whole = min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** (attempt - 1))
        jitter = random.uniform(0.0, min(_MOST_JITTER_SECONDS, whole / 2))
        return max(whole * random.uniform(0.5, 1.0), requested_seconds + jitter if requested_seconds else 0.0)

    def is_over(self, failure: Failure, attempt: int, seconds: float, pause_seconds: float) -> bool:
        """Return whether a request that has failed is not repeated any more, for another reason than a stall.

        Args:
            failure: The failure.
            attempt: Number of the attempt, counted from 1.
            seconds: Time since the first attempt.
            pause_seconds: The pause before the next one.
        """
        if failure.is_throttled and self.busy_seconds:
            return pause_seconds > self.busy_seconds - seconds
        return attempt >= self.num_attempts or failure.retry_after_seconds > self.longest_pause_seconds


def patience_of(value: Patience | float | None) -> Patience:
    """Return how often requests are repeated, by what a caller gives: seconds, or None for the default.

    Raises:
        TypeError: It is no number.
        ValueError: It is negative, or no finite number.
    """
    if isinstance(value, Patience):
        return value
    if value is None:
        return Patience(busy_seconds=BUSY_SECONDS)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"patience= takes seconds, not {value!r}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"patience= takes a finite number of seconds, not {value!r}")
    return Patience(busy_seconds=float(value))


class Attempts:
    """The attempts at one request.

    Args:
        requester: Makes the request.
        path: URL of the object, without secrets.
        expected: Identity of the object, if it was opened before.
        work: What it is for.
    """

    def __init__(self, requester: Requester, path: str, *, expected: object = None, work: Work = "load") -> None:
        self._requester = requester
        self._path, self._expected, self._work = path, expected, work
        self._began = time.monotonic()
        self._num_slow = 0
        self._renewed = False
        self.number = 1
        """Number of the attempt that is under way."""

    def failed(self, failure: Failure) -> None:
        """Wait until the next attempt should be made.

        Raises:
            Cancelled: The calling thread should end.
            StioError: There is none; see `Failure.error`.
        """
        patience, requester = self._requester.patience, self._requester
        self._num_slow += failure.is_slow
        seconds = patience.pause_seconds(self.number, failure.retry_after_seconds)
        last = self._num_slow >= patience.num_stalls or patience.is_over(
            failure, self.number, time.monotonic() - self._began, seconds
        )
        if last or not failure.may_succeed or (failure.kind == "expired" and self._renewed):
            raise failure.error(
                self._path,
                self.number,
                stall_seconds=patience.stall_seconds,
                expected=self._expected,
                work=self._work,
            )
        most = patience.num_stalls if failure.is_slow else patience.num_attempts
        if failure.is_throttled and patience.busy_seconds:
            most = 0  # it is a matter of time
        detail = failure.cause or failure.rate
        requested = f"; the store requests a pause of {failure.retry_after_seconds:g} s"
        log(
            requester.warnings.level(),
            "%s: attempt %d%s failed (%s%s); trying again%s",
            self._path,
            self.number,
            f" of {most}" if most else "",
            failure.kind,
            f": {detail}" if detail else "",
            requested if failure.retry_after_seconds else "",
        )
        if failure.kind == "expired":
            self._renewed = True
            requester.connect_again()
        else:
            pause(seconds)
        self.number += 1


_thread_local = threading.local()


def current_watch() -> RateWatch:
    """Return what judges the rate of the request that this thread makes."""
    watch: RateWatch = _thread_local.watch
    return watch


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
        self.warnings = RareWarnings()
        """Gives the levels of lines about requests that are repeated."""

    def connect_again(self) -> None:
        """Make the store again, with new credentials."""
        self._store = self._connect()

    def begin(self, request: Callable[[Any], T]) -> Call[T]:
        """Start the first attempt at a request, which gets the store; `finish` returns its answer."""
        require_usable(self._path)
        store, watch = self._store, RateWatch(self.patience.stall_seconds, in_pieces=True)

        def work() -> T:
            _thread_local.watch = watch
            try:
                return request(store)
            finally:
                _thread_local.watch = None

        return Call(work, check=watch.check)

    def finish(
        self,
        first: Call[T],
        request: Callable[[Any], T],
        path: str,
        *,
        expected: object = None,
        work: Work = "load",
        again: Callable[[Any], T] | None = None,
    ) -> T:
        """Wait for an answer; repeat the request while it fails, and may succeed.

        Args:
            first: What `begin` returned.
            request: The request.
            path: URL of the object, without secrets.
            expected: Identity of the object, if it was opened before.
            work: What it is for.
            again: The same request by a client that says more about a refusal than obstore does.

        Raises:
            Cancelled: The calling thread should end (`is_interrupted`).
            StioError: The request failed; see `Failure.error`.
        """
        attempts = Attempts(self, path, expected=expected, work=work)
        call = first
        while True:
            try:
                return call.result()
            except Exception as error:
                failure = failure_of(error)
            del call  # its error refers to this frame
            if again is not None and expected is None and failure.kind in ("elsewhere", "unranged"):
                request, again = again, None  # it cannot succeed, but it says where, or what was sent
            else:
                attempts.failed(failure)
                if again is not None and failure.kind == "busy":
                    request = again
            call = self.begin(request)

    def run(
        self,
        request: Callable[[Any], T],
        path: str,
        *,
        expected: object = None,
        work: Work = "load",
        again: Callable[[Any], T] | None = None,
    ) -> T:
        """Make a request, and wait for its answer; see `finish`."""
        return self.finish(self.begin(request), request, path, expected=expected, work=work, again=again)


def pause(seconds: float) -> None:
    """Sleep; raise `Cancelled` soon after the calling thread should end."""
    until = time.monotonic() + seconds
    while (left := until - time.monotonic()) > 0:
        if is_interrupted():
            raise Cancelled
        time.sleep(min(left, LOOK_SECONDS))


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
