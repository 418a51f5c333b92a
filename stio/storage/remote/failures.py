"""Failed requests: what obstore's errors mean, whether another attempt may succeed, and the error that stio raises.

obstore has a class for few failures. It describes the others by a text, which also holds the whole URL and the whole
answer of the server. `RequestFailure` keeps the cause in one line without secrets. No error of obstore is chained to
one of stio, since a traceback would show its text.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass, replace
from typing import Literal

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
from stio.runtime.operation import PanicError, without_panic
from stio.runtime.text import without_secrets
from stio.storage.remote.settings import set_variables

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
_PROVIDER = re.compile(r"credential provider: (Busy)?CredentialsError: (.*)")
_ANSWERED = re.compile("Server returned non-2xx status code: ")
_CODE = re.compile(r"<Code>([^<]*)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]*)</Message>")
_ODD_KEY = re.compile(r'object with invalid path: [\w ]*"(.*?)"(?: contained|: Encountered)', re.DOTALL)
_LINK = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://[^\s<>\"']+")
_TLS = re.compile(
    r"InvalidCertificate\(\s*\w+|AlertReceived|Peer(Incompatible|Misbehaved)|Invalid(Message|ContentType)"
)
_CAUSES = (
    (re.compile(r"Connection ?refused", re.IGNORECASE), "the connection was refused"),
    (re.compile(r"dns error|failed to lookup|Name or service not known", re.IGNORECASE), "there is no such host"),
    (
        re.compile(
            r"Connection ?reset|UnexpectedEof|Incomplete(Body|Message)|BrokenPipe|ConnectionAborted", re.IGNORECASE
        ),
        "the connection was closed early",
    ),
)
_MOST_CHARACTERS = 300


class RefusedError(Exception):
    """An answer with a status that is no success, of which the whole head is known, unlike in an error of obstore.

    Args:
        status: The status.
        reason: The text of the status.
        body: The text of the answer.
        retry_after_seconds: The pause that the server requests; 0: none.
        region: Region of the bucket, if the answer names it.
    """

    def __init__(
        self, status: int, reason: str, body: str, *, retry_after_seconds: float = 0.0, region: str = ""
    ) -> None:
        super().__init__(f"Server returned non-2xx status code: {status} {reason}: {body}")
        self.status = status
        self.retry_after_seconds = retry_after_seconds
        self.region = region


LEAST_BYTES_PER_SECOND = 4096
"""A connection that sends less, for the time of a stall, counts as stalled. 32 connections share 130 kB/s then."""

WEB_PAGE = "a web page (HTML)"

PAGE = "no answer of a store"
"""What `StorageError.found` is where a server sent a web page, or what may be one."""


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One failed request."""

    kind: Kind
    """What went wrong."""
    cause: str
    """The message of the server or of the connection, on one line, without secrets."""
    retry_after_seconds: float = 0.0
    """The pause that the server requests; 0: none."""
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
    def requested_pause(self) -> str:
        """What a message says of the pause that the server requests."""
        return f"; it requests a pause of {self.retry_after_seconds:g} s" if self.retry_after_seconds else ""

    @property
    def is_slow(self) -> bool:
        """Whether a long time passed before it was known, so that few attempts are made."""
        return self.kind in _SLOW

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
        what, remedy, number = _MESSAGES[self.kind]
        if self.kind == "panic" and (names := set_variables(path.partition("://")[0])):
            remedy = f"{remedy}; these variables are set: {listed(names)}"
        tried = f" (in {attempts} attempts)" if attempts > 1 else ""
        cause = f": {self.cause}" if self.cause else ""
        if self.kind == "missing" or (self.kind == "no bucket" and work == "load"):
            return CheckpointNotFoundError(f"{what}{cause}", path=path)
        text = f"{what}{tried}; {remedy.format(work=work)}{self.requested_pause}{cause}"
        if self.kind == "stalled":
            return StallTimeoutError(text, path=path, errno=number)
        return StorageError(text, path=path, errno=number, found=PAGE if self.kind == "page" else None)


_MESSAGES: dict[Kind, tuple[str, str, int]] = {
    "busy": ("the store could not answer", "{work} again later", errno.EBUSY),
    "stalled": (
        f"the store sent fewer than {LEAST_BYTES_PER_SECOND:,} bytes/s for too long",
        "check the network, or {work} again",
        errno.ETIMEDOUT,
    ),
    "missing": ("the store has no such object", "", errno.ENOENT),
    "broken": ("the connection to the store broke", "{work} again", errno.ECONNRESET),
    "unreachable": ("the store cannot be reached", "check address, endpoint and proxy", errno.EHOSTUNREACH),
    "wrong": ("the store did not send what was requested", "do not use this server or proxy", errno.EPROTO),
    "expired": ("the credentials or the signed URL have expired", "get new ones", errno.EACCES),
    "anonymous": (
        "no credentials were found",
        "set those of your provider (AWS_ACCESS_KEY_ID, AWS_PROFILE, GOOGLE_APPLICATION_CREDENTIALS, ...), or "
        "AWS_SKIP_SIGNATURE=true, GOOGLE_SKIP_SIGNATURE=true for what is public",
        errno.EACCES,
    ),
    "no bucket": ("there is no such bucket or container; check the URL and the endpoint", "or make it", errno.ENOENT),
    "no name": ("the name of the object is not allowed", "use another one", errno.EINVAL),
    "odd key": (
        "the directory cannot be listed, since obstore refuses keys with an empty segment, `.`, `..` or a control "
        "character",
        "delete or rename the object, or load the URL of an index or a file, which lists nothing",
        errno.EILSEQ,
    ),
    "denied": ("the store refuses access", "check the credentials, and what they allow", errno.EACCES),
    "unranged": (
        "the server sends no parts of files (it ignores Range), so it cannot be streamed",
        "download the file, and load that",
        errno.EOPNOTSUPP,
    ),
    "tls": (
        "no TLS connection, or the server's certificate is not accepted",
        "SSL_CERT_FILE or AWS_CA_BUNDLE names the certificate of a private authority; a server without TLS has http://",
        errno.EPROTO,
    ),
    "elsewhere": (
        "the store redirects to another place, which is not followed",
        "set AWS_REGION if the bucket is in another region, or give the URL of that place (from https:// none is "
        "followed to http://)",
        errno.EREMOTE,
    ),
    "page": (
        "the server sent something else than the data, such as a login page",
        "log in, or correct the URL, the endpoint and the credentials",
        errno.EACCES,
    ),
    "panic": (
        "obstore has failed inside (a panic)",
        "check the URL and the settings of the store for values that a URL or a header cannot have",
        errno.EIO,
    ),
    "no credentials": ("there are no credentials", "correct what the variable names", errno.EACCES),
    "range": ("the store has no such range of the object", "{work} again", errno.EINVAL),
    "other": ("the request failed", "the store says why", errno.EIO),
}
"""What happened, what to do, and the number of the error."""


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
    if isinstance(error, RefusedError):
        found = _of_text(name, str(error), "")
        if found.kind == "elsewhere" and error.region:
            cause = f"the bucket is in the region {error.region}: AWS_REGION={error.region}"
            return replace(found, cause=f"{cause}; {found.cause}".rstrip("; "))
        return replace(found, retry_after_seconds=error.retry_after_seconds)
    if type(error).__module__.partition(".")[0] != "obstore" and not isinstance(error, OSError | ValueError):
        raise error
    text, _, details = str(error).partition("Debug source:")
    return _of_text(name, text, details)


_RULES: tuple[tuple[Kind, str], ...] = (
    (
        "no bucket",
        r"<Code>(NoSuchBucket|ContainerNotFound)</Code>|(?i:The specified (bucket|container) does not exist)",
    ),
    ("missing", r"\AFileNotFoundError "),
    ("no credentials", _PROVIDER.pattern),
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


def _of_text(name: str, text: str, details: str) -> RequestFailure:
    """Return what an error means by the name of its class, its text, and obstore's description of its source."""
    answered = _STATUS.search(text)
    status = int(answered[1]) if answered else 0
    summary = summary_of(text)
    if name == "InvalidPathError" and (key := _ODD_KEY.search(text)):
        summary = printable(repr(key[1]))
    kind = next((kind for kind, pattern in _RULES if re.search(pattern, f"{name} {status} {text}")), None)
    if kind == "no credentials" and (found := _PROVIDER.search(text)):
        return RequestFailure("busy" if found[1] else "no credentials", found[2])
    if kind is None:
        return _without_status(summary, text + details)
    if kind == "anonymous":
        return RequestFailure(kind, f"the metadata service of the machine: {summary}")
    is_throttled = kind == "busy" and (status in (429, 503) or "SlowDown" in text)
    return RequestFailure(kind, "" if kind == "unranged" else summary, is_throttled=is_throttled)


def _without_status(summary: str, details: str) -> RequestFailure:
    """Return what an error means that came from the connection, or from obstore's own checks of an answer."""
    if "following redirect" in details:
        return RequestFailure("elsewhere", summary)
    if "UnexpectedRange" in details or "NoContentRange" in details or "ContentRange" in details:
        return RequestFailure("wrong", summary)
    if found := _TLS.search(details):
        return RequestFailure("tls", "".join(found[0].split()).replace("(", ": "))
    cause = next((words for pattern, words in _CAUSES if pattern.search(details)), summary)
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
        text = (
            _ANSWERED.sub("", text.partition("Debug source:")[0].rpartition(" - ")[2]).partition("<")[0].rstrip(": \n")
        )
    line = one_line(" ".join(_LINK.sub(lambda link: without_secrets(link[0]), text).split()))
    return line if len(line) <= _MOST_CHARACTERS else line[:_MOST_CHARACTERS] + "..."
