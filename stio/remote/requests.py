"""Requests by obstore: what their failures mean, how long they are repeated, and how a cancel leaves them.

A call of obstore cannot be interrupted: it ends with its answer, or when the store was silent for too long. So it is a
`stio.runtime.calls.Call`, and writes only to memory that obstore allocates. A worker that ends leaves it behind.

obstore has a class for few failures. It describes the others by a text, which also holds the whole URL and the whole
answer of the server. `RequestFailure` keeps the cause in one line without secrets. No error of obstore is chained to
one of stio, since a traceback would show its text.
"""

from __future__ import annotations

import errno
import os
import random
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from stio import clock
from stio.errors import (
    ChangedDuringReadError,
    CheckpointNotFoundError,
    ConcurrentSaveError,
    StallTimeoutError,
    StioError,
    StorageError,
    listed,
    one_line,
    printable,
)
from stio.remote.stores import STALL_SECONDS, set_variables
from stio.runtime import Cancelled, PanicError, WorkerPool, calls, is_interrupted, without_panic
from stio.text import RareWarnings, log, without_secrets

A = TypeVar("A")
T = TypeVar("T")

Kind = Literal[
    "busy", "stalled", "broken", "unreachable", "wrong", "expired", "anonymous",  # another attempt may succeed
    "missing", "no bucket", "no name", "odd key", "changed", "denied", "unranged", "tls", "elsewhere", "range", "other",
    "panic", "no credentials", "page",
]  # fmt: skip
"""Kinds of failures."""

Work = Literal["load", "save"]
"""What a request is for; errors say it."""

_AGAIN = ("busy", "stalled", "broken", "unreachable", "wrong", "expired", "anonymous")
_SLOW = ("stalled", "anonymous")

_STATUS = re.compile(r"status code: (\d{3})")
_ANSWERED = "Server returned non-2xx status code: "
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_ODD_KEY = re.compile(r'object with invalid path: [\w ]*"(.*?)"(?: contained|: Encountered)', re.DOTALL)
_LINK = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://[^\s<>\"']+")
_TLS = re.compile(
    r"InvalidCertificate\(\s*\w+|AlertReceived|Peer(Incompatible|Misbehaved)|Invalid(Message|ContentType)"
)
_NO_HOST = "no host has this name"
_CAUSES = (
    ("Connection ?refused", "the connection was refused"),
    ("Name or service not known|nodename nor servname|No address associated", _NO_HOST),
    ("dns error|failed to lookup", "the name of the host cannot be resolved now"),
    (
        "Connection ?reset|UnexpectedEof|Incomplete(Body|Message)|BrokenPipe|ConnectionAborted",
        "the connection was closed early",
    ),
)
_MAX_CHARACTERS = 300


MIN_BYTES_PER_SECOND = 4096
"""A connection that sends less, for the time of a stall, counts as stalled. 32 connections share 130 kB/s then."""

WEB_PAGE = "a web page (HTML)"


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One failed request."""

    kind: Kind
    """What went wrong."""
    cause: str
    """The message of the server or of the connection, on one line, without secrets."""
    is_throttled: bool = False
    """Whether the store says that it refuses the request for the moment (429, 503)."""

    @property
    def may_succeed(self) -> bool:
        """Whether another attempt may succeed."""
        return self.kind in _AGAIN

    @property
    def may_have_worked(self) -> bool:
        """Whether the store may have done what was requested, or may do it still."""
        return self.kind in ("busy", "stalled", "broken", "unreachable")

    @property
    def is_slow(self) -> bool:
        """Whether few attempts are made: a long time passed before it was known, or no host has the name."""
        return self.kind in _SLOW or self.cause == _NO_HOST

    def error(self, path: str, attempts: int = 1, *, expected: object = None, work: Work = "load") -> StioError:
        """Return the error to raise.

        Args:
            path: URL of the object, without secrets.
            attempts: Number of attempts that were made.
            expected: Identity of the object, if it was opened before.
            work: What it was for.
        """
        if self.kind == "changed" and work == "save":
            return ConcurrentSaveError("another save changed the destination at the same time", path=path)
        if self.kind == "changed" or (expected is not None and self.kind in ("missing", "range")):
            return ChangedDuringReadError(
                "the object was removed or replaced while it was being read; load it again",
                path=path,
                expected=None if expected is None else str(expected),
            )
        number, what, remedy = _MESSAGES["page" if self.kind == "unranged" and work == "save" else self.kind]
        if self.kind == "panic" and (names := set_variables(path.partition("://")[0])):
            remedy = f"{remedy}; these variables are set: {listed(names)}"
        tried = f" (in {attempts} attempts)" if attempts > 1 else ""
        cause = f": {self.cause}" if self.cause else ""
        if self.kind == "missing" or (self.kind == "no bucket" and work == "load"):
            return CheckpointNotFoundError(f"{what}{cause}", path=path)
        text = f"{what}{tried}; {remedy.format(work=work)}{cause}"
        if self.kind == "stalled":
            return StallTimeoutError(text, path=path, errno=number)
        return StorageError(text, path=path, errno=number)


_MESSAGES: dict[Kind, tuple[int, str, str]] = {
    "busy": (errno.EBUSY, "the store could not answer", "{work} again later"),
    "stalled": (
        errno.ETIMEDOUT,
        f"the store sent fewer than {MIN_BYTES_PER_SECOND:,} bytes/s for too long",
        "check the network, or {work} again",
    ),
    "missing": (errno.ENOENT, "the store has no such object", ""),
    "broken": (errno.ECONNRESET, "the connection to the store broke", "{work} again"),
    "unreachable": (errno.EHOSTUNREACH, "the store cannot be reached", "check address, endpoint and proxy"),
    "wrong": (errno.EPROTO, "the store did not send what was requested", "do not use this server or proxy"),
    "expired": (errno.EACCES, "the credentials or the signed URL have expired", "get new ones"),
    "anonymous": (
        errno.EACCES,
        "no credentials were found",
        "set those of your provider (AWS_ACCESS_KEY_ID, AWS_PROFILE=default for ~/.aws, "
        "GOOGLE_APPLICATION_CREDENTIALS), or AWS_SKIP_SIGNATURE=true, GOOGLE_SKIP_SIGNATURE=true for what is public",
    ),
    "no bucket": (errno.ENOENT, "there is no such bucket or container; check the URL and endpoint", "or make it"),
    "no name": (errno.EINVAL, "the name of the object is not allowed", "use another one"),
    "odd key": (
        errno.EILSEQ,
        "obstore cannot list the directory: a key has an empty segment, `.`, `..` or a control character",
        "delete or rename the object, or load the URL of an index or a file",
    ),
    "denied": (errno.EACCES, "the store refuses access", "check the credentials, and what they allow"),
    "unranged": (errno.EOPNOTSUPP, "the server sends no parts of files (it ignores Range)", "download the file first"),
    "tls": (
        errno.EPROTO,
        "no TLS connection, or the server's certificate is not accepted",
        "SSL_CERT_FILE or AWS_CA_BUNDLE names a private authority's certificate; a server without TLS has http://",
    ),
    "elsewhere": (
        errno.EREMOTE,
        "the store redirects to another place, which is not followed",
        "set AWS_REGION if the bucket is in another region, or give the URL of that place",
    ),
    "page": (
        errno.EACCES,
        "the server sent something else than the data, such as a login page",
        "log in, or correct the URL, the endpoint and the credentials",
    ),
    "panic": (errno.EIO, "obstore has failed inside (a panic)", "check the URL and the settings of the store"),
    "no credentials": (errno.EACCES, "the credential provider gives no credentials", "correct its settings"),
    "range": (errno.EINVAL, "the store has no such range of the object", "{work} again"),
    "other": (errno.EIO, "the request failed", "the store says why"),
}
"""The number of the error, what happened, and what to do."""


class RequestError(Exception):
    """A request or an answer of which stio itself found what is wrong.

    Args:
        kind: See `RequestFailure`.
        cause: See `RequestFailure`.
    """

    def __init__(self, kind: Kind, cause: str = "") -> None:
        self.failure = RequestFailure(kind, cause)
        super().__init__(cause)


def failure_of(error: BaseException) -> RequestFailure:
    """Return what an error of obstore means. Errors that a request cannot raise are raised again."""
    name = type(error).__name__
    if isinstance(error, RequestError):
        return error.failure
    error = without_panic(error)
    if isinstance(error, PanicError):
        return RequestFailure("panic", error.cause)
    if isinstance(error, StioError):
        raise error
    if type(error).__module__.partition(".")[0] != "obstore" and not isinstance(error, OSError | ValueError):
        raise error
    text, _, details = str(error).partition("Debug source:")
    answered = _STATUS.search(text)
    status = int(answered[1]) if answered else 0
    summary = summary_of(text)
    if name == "InvalidPathError" and (key := _ODD_KEY.search(text)):
        summary = printable(repr(key[1]))
    kind = next((kind for kind, pattern in _RULES if re.search(pattern, f"{name} {status} {text}")), None)
    if kind is None:
        return _without_status(summary, text + details)
    if kind == "anonymous":
        return RequestFailure(kind, f"the metadata service of the machine: {summary}")
    is_throttled = kind == "busy" and (status in (429, 503) or "SlowDown" in text)
    return RequestFailure(kind, "" if kind == "unranged" else summary, is_throttled=is_throttled)


_RULES: tuple[tuple[Kind, str], ...] = (
    (
        "no bucket",
        r"<Code>(NoSuchBucket|ContainerNotFound)</Code>|(?i:The specified (bucket|container) does not exist)",
    ),
    ("missing", r"\AFileNotFoundError "),
    ("no credentials", "credential provider"),
    ("anonymous", r"169\.254\.\d+\.\d+|metadata\.google\.internal|/latest/api/token|/metadata/identity"),
    ("no name", "Could not parse path"),
    ("odd key", r"\AInvalidPathError "),
    ("busy", "ConditionalRequestConflict"),  # S3 has not compared: another request to the object was under way
    ("missing", r"\A(NotFoundError |\w+ (404|410) )"),
    ("changed", r"\A(PreconditionError |AlreadyExistsError |\w+ 412 )"),
    ("page", "Header missing from response|invalid list response"),
    ("unranged", r"\ANotSupportedError |Received non-partial response"),
    ("range", r"\A\w+ 416 "),
    ("expired", r"\A\w+ 40[013] (?is:.*(expired|TokenRefreshRequired|AuthenticationFailed.*expir))"),
    ("denied", r"\A(PermissionDeniedError |UnauthenticatedError |\w+ 40[13] )"),
    ("busy", r"\A\w+ (408|409|425|429|5(?!01)\d\d) |RequestTimeout|SlowDown"),
    ("elsewhere", r"\A\w+ 3\d\d |Received redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed"),
    ("other", r"\A\w+ [1-9]"),
)
"""What an error means, by the name of its class, the status ("0": none), and its text; the first rule decides."""


def _without_status(summary: str, details: str) -> RequestFailure:
    """Return what an error means that came from the connection, or from obstore's own checks of an answer."""
    if "following redirect" in details:
        return RequestFailure("elsewhere", summary)
    if "UnexpectedRange" in details or "NoContentRange" in details or "ContentRange" in details:
        return RequestFailure("wrong", summary)
    if refusal := _TLS.search(details):
        return RequestFailure("tls", "".join(refusal[0].split()).replace("(", ": "))
    cause = next((words for pattern, words in _CAUSES if re.search(pattern, details, re.IGNORECASE)), summary)
    if "kind: Timeout" in details or "TimedOut" in details:
        return RequestFailure("unreachable" if "kind: Connect" in details else "stalled", "")
    if "kind: Connect" in details or "ConnectError" in details:
        return RequestFailure("unreachable", cause)
    if "HttpError" in details or "reqwest" in details or "hyper" in details:
        return RequestFailure("broken", cause)
    return RequestFailure("other", summary)


def summary_of(text: str) -> str:
    """Return the message of a server as one short line without URLs."""
    code, message = _CODE.search(text), _MESSAGE.search(text)
    if code is not None:
        text = f"{code[1]}: {message[1]}" if message is not None else code[1]
    else:
        answer = text.partition("Debug source:")[0].rpartition(" - ")[2].replace(_ANSWERED, "")
        text = answer.partition("<")[0].rstrip(": \n")
    return short_line(text)


def short_line(text: str) -> str:
    """Return a text on one short line, with its URLs as they may be shown."""
    line = one_line(" ".join(_LINK.sub(lambda link: without_secrets(link[0]), text).split()))
    return line if len(line) <= _MAX_CHARACTERS else line[:_MAX_CHARACTERS] + "..."


class RateWatch:
    """Judges whether bytes come fast enough. Written by one thread, checked by another.

    Args:
        stall_seconds: The time of a stall. The rate is taken over somewhat more: bytes are counted by whole pieces, and
            clients have a limit of their own for the time without any byte.
    """

    def __init__(self, stall_seconds: float) -> None:
        self.piece_bytes = max(1, int(MIN_BYTES_PER_SECOND * stall_seconds))
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


def is_page(body: bytes) -> bool:
    """Return whether bytes begin a web page."""
    start = body[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head", b"<!--"))


BUSY_SECONDS = 180.0
"""Longest time for which a request is repeated that the store refuses for the moment, unless the caller sets it."""


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
    busy_seconds: float = 0.0
    """For so long a request is repeated that the store refuses for the moment (429, 503), however many attempts that
    takes; 0: by the number of attempts."""

    def pause_seconds(self, attempt: int) -> float:
        """Return the pause after an attempt, counted from 1."""
        whole = min(self.longest_pause_seconds, self.first_pause_seconds * 2.0 ** (attempt - 1))
        return whole * random.uniform(0.5, 1.0)

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
        return attempt >= self.num_attempts


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
    """The attempts at one request; see `Requester.run`."""

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
        seconds = patience.pause_seconds(self.number)
        is_last = patience.is_over(failure, self.number, clock.monotonic() - self._began, seconds)
        is_last = is_last or self._num_slow >= patience.num_stalls or (failure.kind == "expired" and self._renewed)
        if is_last or not failure.may_succeed:
            raise failure.error(self._path, self.number, expected=self._expected, work=self._work)
        of_all = f" of {patience.num_stalls if failure.is_slow else patience.num_attempts}"
        if failure.is_throttled and patience.busy_seconds:
            of_all = ""
        why = f"{failure.kind}: {failure.cause}" if failure.cause else failure.kind
        message = "%s: attempt %d%s failed (%s); trying again"
        log(requester.warnings.level(), message, self._path, self.number, of_all, why)
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

    def begin(self, request: Callable[[Any], T]) -> calls.Call[T]:
        """Start one attempt at a request, which gets the store."""
        require_usable(self._path)
        store, watch = self._store, RateWatch(self.patience.stall_seconds)

        def work() -> T:
            _thread_local.watch = watch
            return request(store)

        return calls.Call(work, check=watch.check)

    def run(self, request: Callable[[Any], T], path: str, *, expected: object = None, work: Work = "load") -> T:
        """Make a request, and wait for its answer; repeat it while it fails, and may succeed.

        Args:
            request: The request.
            path: URL of the object, without secrets.
            expected: Identity of the object, if it was opened before.
            work: What it is for.

        Raises:
            Cancelled: The calling thread should end (`is_interrupted`).
            StioError: The request failed; see `RequestFailure.error`.
        """
        return self.repeat(lambda: self.begin(request).result(), path, expected=expected, work=work)

    def repeat(self, attempt: Callable[[], T], path: str, *, expected: object = None, work: Work = "load") -> T:
        """Call a function that makes requests, and again while it fails and may succeed; see `run`."""
        attempts = Attempts(self, path, expected=expected, work=work)
        while True:
            try:
                return attempt()
            except Exception as error:
                failure = failure_of(error)
            attempts.failed(failure)


def for_each(items: Iterable[A], work: Callable[[A], object], name: str, max_workers: int) -> None:
    """Call a function with each item, on several threads at one time; the first error ends all.

    Args:
        items: In the order in which they are begun.
        work: The function.
        name: Of the threads.
        max_workers: Most threads, this one among them.
    """
    left, pool = [*items][::-1], WorkerPool(name)

    def call_each() -> None:
        for item in pool.items(left):
            work(item)

    if left:
        pool.run(call_each, min(len(left), max_workers))


def pause(seconds: float) -> None:
    """Sleep; raise `Cancelled` soon after the calling thread should end."""
    until = clock.monotonic() + seconds
    while (left := until - clock.monotonic()) > 0:
        if is_interrupted():
            raise Cancelled
        clock.sleep(min(left, calls.LOOK_SECONDS))


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
