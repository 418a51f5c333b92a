"""Requests: repeated if they fail, left within a second by a cancel, judged by what an answer says beside its bytes.

Most are made by obstore (`Requester`). A call of obstore cannot be interrupted: it ends with its answer, or when the
store was silent for too long. So it is a `stio.runtime.calls.Call`, and writes only to memory that obstore allocates. A
worker that ends leaves it behind.

An error of obstore has a status and a text, but no `Retry-After`, no region of a bucket and no type of the content. So,
before it is repeated, Python's own client requests a part of the same (`ask`): its answer has the whole head. It also
makes the requests that obstore has no function for. It follows no redirect, and blocks: callers run it on a thread that
a cancel leaves behind.
"""

from __future__ import annotations

import os
import random
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from html import unescape
from http.client import HTTPException
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener

from stio.errors import StorageError
from stio.runtime import clock
from stio.runtime.calls import LOOK_SECONDS, Call
from stio.runtime.operation import Cancelled, is_interrupted
from stio.runtime.text import RareWarnings, log
from stio.storage.remote.failures import (
    LEAST_BYTES_PER_SECOND,
    WEB_PAGE,
    RefusedError,
    RequestError,
    RequestFailure,
    Work,
    failure_of,
    summary_of,
)
from stio.storage.remote.settings import added_authorities

_TITLE = re.compile(rb"<title[^>]*>(.{0,200}?)</title", re.IGNORECASE | re.DOTALL)


class RateWatch:
    """Judges whether bytes come fast enough. Written by one thread, checked by another.

    Args:
        stall_seconds: The time of a stall. The rate is taken over somewhat more: bytes are counted by whole pieces, and
            clients have a limit of their own for the time without any byte.
    """

    def __init__(self, stall_seconds: float) -> None:
        self.piece_bytes = max(1, int(LEAST_BYTES_PER_SECOND * stall_seconds))
        """What must come within the time of a stall, at the least rate."""
        self._seconds = stall_seconds * _PIECES_FACTOR
        self._num_bytes = 0
        self._mark: tuple[float, int] | None = None

    def begin(self) -> None:
        """Begin to judge: the head of the answer is there."""
        self._mark = clock.monotonic(), self._num_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes that came."""
        self._num_bytes += num_bytes

    def end(self) -> None:
        """Judge no more: all bytes came."""
        self._mark = None

    def check(self) -> None:
        """Require that the bytes since the last check came fast enough, if that was long enough ago.

        Raises:
            RequestError: They did not.
        """
        mark, now = self._mark, clock.monotonic()
        if mark is None or now - mark[0] < self._seconds:
            return
        if self._num_bytes - mark[1] < self.piece_bytes:
            raise RequestError("stalled")
        self._mark = now, self._num_bytes


_PIECES_FACTOR = 1.25


def retry_after(text: str) -> float:
    """Return the seconds of a field `Retry-After`, which is a number or a date; 0: none that is later than now."""
    if re.fullmatch(r"\s*\d{1,9}(\.\d*)?\s*", text, re.ASCII):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - clock.now())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def is_page(body: bytes) -> bool:
    """Return whether bytes begin a web page."""
    start = body[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head", b"<!--"))


def require_no_page(content_type: str, body: bytes) -> None:
    """Require that an answer is no web page: neither a checkpoint nor a listing is one.

    Raises:
        RequestError: It is one.
    """
    if is_page(body) or (content_type.lower().startswith("text/html") and body[:1] == b"<"):
        title = _TITLE.search(body)
        text = unescape(title[1].decode(errors="replace")) if title else ""
        titled = f"of the title {' '.join(text.split())!r}" if text.strip() else ""
        raise RequestError("page", f"{WEB_PAGE} {summary_of(titled)}".rstrip())


T = TypeVar("T")


STALL_SECONDS = 30.0
"""Longest time without a byte before a request counts as failed."""

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

    def is_over(self, failure: RequestFailure, attempt: int, seconds: float, pause_seconds: float) -> bool:
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
        self._began = clock.monotonic()
        self._num_slow = 0
        self._renewed = False
        self.number = 1
        """Number of the attempt that is under way."""

    def failed(self, failure: RequestFailure) -> None:
        """Wait until the next attempt should be made.

        Raises:
            Cancelled: The calling thread should end.
            StioError: There is none; see `RequestFailure.error`.
        """
        patience, requester = self._requester.patience, self._requester
        self._num_slow += failure.is_slow
        seconds = patience.pause_seconds(self.number, failure.retry_after_seconds)
        last = self._num_slow >= patience.num_stalls or patience.is_over(
            failure, self.number, clock.monotonic() - self._began, seconds
        )
        if last or not failure.may_succeed or (failure.kind == "expired" and self._renewed):
            raise failure.error(self._path, self.number, expected=self._expected, work=self._work)
        most = patience.num_stalls if failure.is_slow else patience.num_attempts
        log(
            requester.warnings.level(),
            "%s: attempt %d%s failed (%s%s); trying again%s",
            self._path,
            self.number,
            # Throttled requests are repeated for a time, however often.
            "" if failure.is_throttled and patience.busy_seconds else f" of {most}",
            failure.kind,
            f": {failure.cause}" if failure.cause else "",
            failure.requested_pause,
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
        """Start one attempt at a request, which gets the store."""
        require_usable(self._path)
        store, watch = self._store, RateWatch(self.patience.stall_seconds)

        def work() -> T:
            _thread_local.watch = watch
            try:
                return request(store)
            finally:
                _thread_local.watch = None

        return Call(work, check=watch.check)

    def run(
        self,
        request: Callable[[Any], T],
        path: str,
        *,
        expected: object = None,
        work: Work = "load",
        again: Callable[[Any], T] | None = None,
    ) -> T:
        """Make a request, and wait for its answer; repeat it while it fails, and may succeed.

        Args:
            request: The request.
            path: URL of the object, without secrets.
            expected: Identity of the object, if it was opened before.
            work: What it is for.
            again: The same request by a client that says more about a refusal than obstore does.

        Raises:
            Cancelled: The calling thread should end (`is_interrupted`).
            StioError: The request failed; see `RequestFailure.error`.
        """
        attempts = Attempts(self, path, expected=expected, work=work)
        call = self.begin(request)
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


def pause(seconds: float) -> None:
    """Sleep; raise `Cancelled` soon after the calling thread should end."""
    until = clock.monotonic() + seconds
    while (left := until - clock.monotonic()) > 0:
        if is_interrupted():
            raise Cancelled
        clock.sleep(min(left, LOOK_SECONDS))


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


_REGION = re.compile(r"<Region>([\w-]+)</Region>|s3[.-]([a-z]{2,}-[a-z-]+-\d)\.amazonaws")
_PIECE_BYTES = 64 << 10
_MOST_BODY_BYTES = 64 << 10
"""Of the answer of a request that was refused."""


def ask(
    url: str,
    headers: Mapping[str, str],
    num_bytes: int,
    *,
    stall_seconds: float,
    scheme: str,
    method: str = "GET",
    data: bytes | None = None,
    is_local: bool = False,
) -> tuple[int, bytes]:
    """Make one request. Blocks, and cannot be interrupted.

    Args:
        url: A URL of http or https, without a user.
        headers: Fields of the request.
        num_bytes: Most bytes of the body to read.
        stall_seconds: Longest time without enough bytes; see `RateWatch`.
        scheme: Scheme of the store, for the authorities of TLS.
        method: Its method.
        data: Body of the request.
        is_local: No proxy is used.

    Returns:
        The status, which is a success, and the body.

    Raises:
        RefusedError: The status is no success.
        RequestError: It is a web page, the bytes come too slowly, or there was no answer, or it ended early.
        StorageError: The authorities of the environment cannot be read.
    """
    handlers: list[Any] = [_NoRedirect(), *([ProxyHandler({})] if is_local else [])]
    if url.lower().startswith("https:"):
        context = ssl.create_default_context()
        if added := added_authorities(scheme):
            context.load_verify_locations(cadata=added["root_certificate"].decode())
        handlers.append(HTTPSHandler(context=context))
    try:
        request = Request(url, data, dict(headers), method=method)
        with build_opener(*handlers).open(request, timeout=stall_seconds) as answer:
            body = _read(answer, num_bytes, stall_seconds)
            require_no_page(answer.headers.get("Content-Type", ""), body)
            return answer.status, body
    except HTTPError as error:
        with error:
            raise _refused(error) from None
    except TimeoutError:
        raise RequestError("stalled") from None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise RequestError("stalled") from None
        raise RequestError("unreachable", summary_of(str(error))) from None


class _NoRedirect(HTTPRedirectHandler):
    def redirect_request(self, *values: Any) -> None:
        return None


def _read(answer: Any, num_bytes: int, stall_seconds: float) -> bytes:
    watch, found = RateWatch(stall_seconds), bytearray()
    watch.begin()
    while len(found) < num_bytes:
        data = answer.read1(min(_PIECE_BYTES, num_bytes - len(found)))
        if not data:
            break
        found += data
        watch.add(len(data))
        watch.check()
    return bytes(found)


def _refused(error: HTTPError) -> Exception:
    try:
        body = error.read(_MOST_BODY_BYTES)
    except (OSError, HTTPException):
        body = b""
    text = body.decode(errors="replace")
    region = _REGION.search(text)
    named = error.headers.get("x-amz-bucket-region") or (region and (region[1] or region[2])) or ""
    return RefusedError(
        error.code,
        str(error.reason or ""),
        text,
        retry_after_seconds=retry_after(error.headers.get("Retry-After", "")),
        region=named if re.fullmatch(r"[\w-]{1,40}", named) else "",
    )
