"""What an answer of a server says beside its bytes: how fast they come, when to try again, whether it is a web page."""

from __future__ import annotations

import re
import time
from email.utils import parsedate_to_datetime
from html import unescape

from stio.storage.remote.failures import PageError, StalledError

LEAST_BYTES_PER_SECOND = 4096
"""A connection that sends less, for the time of a stall, counts as stalled. 32 connections share 130 kB/s then."""

_TITLE = re.compile(rb"<title[^>]*>(.{0,200}?)</title", re.IGNORECASE | re.DOTALL)


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
        raise PageError(f"of the title {' '.join(text.split())!r}" if text.strip() else "")
