"""A range of an object by Python's own client of http, which shows the whole head of an answer.

An error of obstore has a status and a text. It has no `Retry-After`, no region of a bucket, no type of the content. So
an object of http without TLS is opened by this client. Elsewhere it repeats a request that obstore was refused. It
follows no redirect, and gives no reason for a connection that fails: obstore does both.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from html import unescape
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from stio.storage.remote.failures import PageError, RefusedError, StalledError

LEAST_BYTES_PER_SECOND = 4096
"""A connection that sends less, for the time of a stall, counts as stalled. 32 connections share 130 kB/s then."""

_PIECE_BYTES = 64 << 10
_MOST_BODY_BYTES = 64 << 10
_REGION = re.compile(r"<Region>([\w-]+)</Region>|s3[.-]([a-z]{2,}-[a-z-]+-\d)\.amazonaws")
_TITLE = re.compile(rb"<title[^>]*>(.{0,200}?)</title", re.IGNORECASE | re.DOTALL)


class ConnectionFailedError(Exception):
    """There was no answer."""


class RateWatch:
    """Judges whether bytes come fast enough. Written by one thread, checked by another.

    Args:
        stall_seconds: The time over which the rate is taken.
        in_pieces: Bytes are counted by whole pieces of `piece_bytes`, from a library that has a limit of its own for
            the time without any byte.
    """

    def __init__(self, stall_seconds: float, *, in_pieces: bool = False) -> None:
        self.piece_bytes = max(1, int(LEAST_BYTES_PER_SECOND * stall_seconds))
        """What must come within the time of a stall, at the least rate."""
        self._seconds = stall_seconds * _PIECES_FACTOR if in_pieces else stall_seconds
        self._in_pieces = in_pieces
        self._num_bytes = 0
        self._mark: tuple[float, int] | None = None

    def begin(self) -> None:
        """Begin to judge: the head of the answer is there."""
        self._mark = time.monotonic(), self._num_bytes

    def add(self, num_bytes: int) -> None:
        """Count bytes that came."""
        self._num_bytes += num_bytes

    def end(self) -> None:
        """Judge no more: all bytes came."""
        self._mark = None

    def check(self) -> None:
        """Require that the bytes since the last check came fast enough, if that was long enough ago.

        Raises:
            StalledError: They did not.
        """
        mark, now = self._mark, time.monotonic()
        if mark is None or now - mark[0] < self._seconds:
            return
        came = self._num_bytes - mark[1]
        if came < self.piece_bytes:
            if self._in_pieces:
                raise StalledError(f"fewer than {LEAST_BYTES_PER_SECOND:,} bytes/s")
            raise StalledError(f"only {came / (now - mark[0]):,.0f} bytes/s" if came else "")
        self._mark = now, self._num_bytes


_PIECES_FACTOR = 1.25


@dataclass(frozen=True, slots=True)
class Head:
    """The head of an answer, and its body."""

    status: int
    """200 or 206."""
    fields: Mapping[str, str]
    """Its fields, by their names in lower case."""
    body: bytes
    """As many bytes as were asked for; of a status 200 not more than those."""


def ask(
    url: str,
    headers: Mapping[str, str],
    num_bytes: int,
    *,
    stall_seconds: float,
    authorities: Mapping[str, Any],
) -> Head:
    """Make one request. Blocks, and cannot be interrupted.

    Args:
        url: A URL of http or https, without a user.
        headers: Fields of the request.
        num_bytes: Most bytes of the body to read.
        stall_seconds: Longest time without enough bytes; see `RateWatch`.
        authorities: See `stio.storage.remote.stores.added_authorities`.

    Raises:
        RefusedError: The status is no success.
        PageError: It is a web page.
        StalledError: The bytes come too slowly.
        ConnectionFailedError: There was no answer, or it ended early.
    """
    handlers: list[Any] = [_NoRedirect()]
    if url.lower().startswith("https:"):
        context = ssl.create_default_context()
        if authorities:
            context.load_verify_locations(cadata=authorities["root_certificate"].decode())
        handlers.append(HTTPSHandler(context=context))
    try:
        with build_opener(*handlers).open(Request(url, headers=dict(headers)), timeout=stall_seconds) as answer:
            fields = {name.lower(): value for name, value in answer.headers.items()}
            body = _read(answer, num_bytes, stall_seconds)
            require_no_page(fields.get("content-type", ""), body)
            return Head(answer.status, fields, body)
    except HTTPError as error:
        with error:
            raise _refused(error) from None
    except TimeoutError:
        raise StalledError("") from None
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(getattr(error, "reason", None), TimeoutError):
            raise StalledError("") from None
        raise ConnectionFailedError(str(error)) from None


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


def retry_after(text: str) -> float:
    """Return the seconds of a field `Retry-After`, which is a number or a date; 0: none that is later than now."""
    if re.fullmatch(r"\s*\d{1,9}(\.\d*)?\s*", text, re.ASCII):
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def is_page(body: bytes) -> bool:
    """Return whether bytes begin a web page."""
    start = body[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return start.startswith((b"<!doctype html", b"<html", b"<head", b"<!--"))


def require_no_page(content_type: str, body: bytes) -> None:
    """Require that an answer is no web page: neither a checkpoint nor a listing is one.

    Raises:
        PageError: It is one.
    """
    if is_page(body) or (content_type.lower().startswith("text/html") and body[:1] == b"<"):
        title = _TITLE.search(body)
        text = unescape(title[1].decode(errors="replace")) if title else ""
        raise PageError(f"its title is {' '.join(text.split())!r}" if text.strip() else "")


def split_user(url: str) -> str:
    """Return a URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
