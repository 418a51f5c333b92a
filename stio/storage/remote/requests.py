"""Requests that a cancel leaves within a second, and that are repeated if they fail.

A call of obstore cannot be interrupted: it ends with its answer, or when the store was silent for too long. So it is a
`stio.runtime.calls.Call`, and writes only to memory that obstore allocates. A worker that ends leaves it behind.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from stio.errors import StorageError
from stio.runtime.calls import LOOK_SECONDS, Call
from stio.runtime.log import RareWarnings, log
from stio.runtime.operation import Cancelled
from stio.runtime.workers import is_interrupted
from stio.storage.remote.failures import Work, failure_of
from stio.storage.remote.stores import STALL_SECONDS

T = TypeVar("T")


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
        self.warnings = RareWarnings()
        """Gives the levels of lines about requests that are repeated."""

    def begin(self, request: Callable[[Any], T]) -> Call[T]:
        """Start the first attempt at a request, which gets the store; `finish` returns its answer."""
        require_usable(self._path)
        store = self._store
        return Call(lambda: request(store))

    def finish(
        self, first: Call[T], request: Callable[[Any], T], path: str, *, expected: object = None, work: Work = "load"
    ) -> T:
        """Wait for an answer; repeat the request while it fails, and may succeed.

        Args:
            first: What `begin` returned.
            request: The request.
            path: URL of the object, without secrets.
            expected: Identity of the object, if it was opened before.
            work: What it is for.

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
                raise failure.error(
                    path, attempt, stall_seconds=self.patience.stall_seconds, expected=expected, work=work
                )
            log(
                self.warnings.level(),
                "%s: attempt %d of %d failed (%s%s); trying again",
                path,
                attempt,
                self.patience.num_stalls if failure.is_slow else self.patience.num_attempts,
                failure.kind,
                f": {failure.cause}" if failure.cause else "",
            )
            if failure.kind == "expired":
                renewed, self._store = True, self._connect()
            else:
                pause(self.patience.pause_seconds(attempt))
            attempt += 1
            call = self.begin(request)

    def run(self, request: Callable[[Any], T], path: str, *, expected: object = None, work: Work = "load") -> T:
        """Make a request, and wait for its answer; see `finish`."""
        return self.finish(self.begin(request), request, path, expected=expected, work=work)


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
