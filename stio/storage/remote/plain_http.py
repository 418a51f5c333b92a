"""Ranges of objects by http without TLS, each read from its connection into its destination.

obstore collects an answer in memory of its own, on a thread of its own: the bytes are copied once more, and the worker
takes five turns at the interpreter's lock a request. This takes two and copies nothing. It does one thing, a range of
an object whose state is known. Whatever else a server does is a `NotServedError`, and the caller gets the range by
obstore, which handles redirects, proxies and errors, and repeats what may succeed.

`ask` makes one request by Python's own client, with TLS too, and returns the whole head of the answer. An error of
obstore has a status and a text, but no `Retry-After`, no region of a bucket and no type of the content. So an object of
http without TLS is opened by it. Elsewhere it repeats a request that obstore was refused. It follows no redirect.
"""

from __future__ import annotations

import errno
import itertools
import logging
import re
import select
import socket
import ssl
import struct
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from ctypes import c_char_p, c_int, c_size_t, c_ssize_t, c_ubyte
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit, urlunsplit
from urllib.request import (
    HTTPRedirectHandler,
    HTTPSHandler,
    ProxyHandler,
    Request,
    build_opener,
    getproxies,
    proxy_bypass,
)

from stio.runtime.calls import LOOK_SECONDS
from stio.runtime.log import RareWarnings, log
from stio.runtime.memory import Region, quick_libc
from stio.runtime.operation import Cancelled
from stio.runtime.urls import without_secrets
from stio.runtime.workers import is_interrupted
from stio.storage.base import Identity
from stio.storage.remote.answers import RateWatch, require_no_page, retry_after
from stio.storage.remote.failures import RefusedError, StalledError

_CONNECT_SECONDS = 10.0
"""For all addresses of a host."""
_REQUEST_SECONDS = 600.0
"""Bound for a server that sends a byte now and then."""
_IDLE_SECONDS = 20.0
"""A connection without requests for so long is not used again: servers close such connections."""
_MOST_FAILURES = 3
"""After so many failures without a success between them, an object is read by obstore alone."""
_HEAD_BYTES = 8 << 10
"""Longest head of an answer."""


class ConnectionFailedError(Exception):
    """There was no answer."""


class NotServedError(Exception):
    """The range did not come as it was requested; the destination may hold other bytes. The text says why."""


class _ClosedError(NotServedError):
    """The server closed the connection, and sent nothing."""


class _SilentError(NotServedError):
    """The server sent no bytes, or too few, for too long."""


class _BusyError(NotServedError):
    """The server refuses the request for the moment, and says for how long."""

    def __init__(self, status: int, reason: str, seconds: float) -> None:
        super().__init__(f"the server answered {status}")
        self.refused = RefusedError(status, reason, "", retry_after_seconds=seconds)


class PlainObject:
    """One object that is read by plain http, as long as that works.

    Args:
        server: Connections to its server.
        link: Its URL, and the time (of `time.monotonic`) until when that may be used.
        renew: Returns another such pair.
        headers: See `PlainHttp.read`.
        warnings: Gives the levels of lines about a silent server.
    """

    def __init__(
        self,
        server: PlainHttp,
        link: tuple[str, float],
        renew: Callable[[], tuple[str, float]],
        *,
        headers: str,
        warnings: RareWarnings,
    ) -> None:
        self._server = server
        self._link = link
        self._renew = renew
        self._headers = headers
        self._warnings = warnings
        self._num_failures = 0

    def read(
        self,
        begin: int,
        regions: Sequence[Region],
        expected: Identity,
        wait: Callable[[RefusedError], None] | None = None,
    ) -> bool:
        """Fill the regions, as `PlainHttp.read` does; return False if that fails.

        Args:
            begin: See `PlainHttp.read`.
            regions: See `PlainHttp.read`.
            expected: See `PlainHttp.read`.
            wait: Called before another attempt where the server requests a pause; it may raise.

        Raises:
            Cancelled: The thread should end.
            StioError: There is no new URL.
        """
        if self._num_failures >= _MOST_FAILURES:
            return False
        try:
            while True:
                if time.monotonic() >= self._link[1]:
                    self._link = self._renew()
                try:
                    self._server.read(self._link[0], begin, regions, expected, self._headers)
                    break
                except _BusyError as error:
                    if wait is None:
                        raise
                    wait(error.refused)
        except NotServedError as error:
            self._num_failures += 1
            # Another failure may only mean that this server needs obstore. If that fails too, there is a warning.
            level = self._warnings.level() if isinstance(error, _SilentError) else logging.INFO
            log(level, "%s: reading a range by obstore: %s", without_secrets(self._link[0]), error)
            return False
        self._num_failures = 0
        return True


def plain_address(url: str) -> tuple[str, int] | None:
    """Return host and port of a URL that is read without TLS and without a proxy of the environment; else None."""
    parts = urlsplit(url)
    if sys.platform != "linux" or parts.scheme != "http" or not parts.hostname:
        return None
    if not url.isascii() or not url.isprintable() or " " in url:  # obstore encodes it
        return None
    if getproxies().keys() & {"http", "all"} and not proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    return parts.hostname, parts.port or 80


_Address = tuple[int, Any]
"""Family of an address, and the address as `socket.connect` takes it."""


class PlainHttp:
    """Connections to one server. Thread-safe. They are reused, and closed when this is freed.

    Args:
        address: Host and port.
        stall_seconds: Longest time without a byte.

    Raises:
        OSError: There is no such host.
    """

    def __init__(self, address: tuple[str, int], *, stall_seconds: float) -> None:
        found = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        self._addresses = [(family, place) for family, _, _, _, place in found]
        self._turns = itertools.count()
        self._stall_seconds = stall_seconds
        self._idle: list[tuple[socket.socket, float]] = []
        weakref.finalize(self, _close_all, self._idle)

    def read(self, url: str, begin: int, regions: Sequence[Region], expected: Identity, headers: str = "") -> None:
        """Fill the regions, one after the other, with the bytes of an object from `begin` on. Blocks.

        Args:
            url: Its URL. A user in it is not sent.
            begin: Offset in the object.
            regions: Host memory.
            expected: State of the object, with an ETag.
            headers: Further lines of the request's head, each with its end.

        Raises:
            Cancelled: The thread should end (`stio.runtime.workers.is_interrupted`); raised within half a second.
            NotServedError: The server sent something else, or nothing.
        """
        parts = urlsplit(url)
        end = begin + sum(region.nbytes for region in regions)
        if not expected.etag.startswith("W/"):
            headers += f"if-match: {expected.etag}\r\n"
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        request = (
            f"GET {target} HTTP/1.1\r\nhost: {parts.netloc.rpartition('@')[2]}\r\naccept: */*\r\n"
            f"range: bytes={begin}-{end - 1}\r\n{headers}\r\n"
        ).encode("latin-1")
        until = time.monotonic() + max(_REQUEST_SECONDS, 2 * self._stall_seconds)
        while True:
            connection, is_used = self._connection()
            try:
                _send(connection, request)
                keeps = self._receive(connection, begin, end, regions, expected, until)
            except BaseException as error:
                connection.close()
                if isinstance(error, _ClosedError | ConnectionError) and is_used:
                    continue  # the server closed it while it was idle
                if isinstance(error, OSError):
                    raise NotServedError(error.strerror or str(error)) from None
                raise
            if keeps:
                self._idle.append((connection, time.monotonic()))
            else:
                connection.close()
            return

    def _connection(self) -> tuple[socket.socket, bool]:
        """Return a connection, and whether it was used before."""
        while self._idle:
            try:
                connection, since = self._idle.pop()
            except IndexError:  # another thread took the last
                break
            if time.monotonic() - since < _IDLE_SECONDS:
                return connection, True
            connection.close()
        return self._connect(), False

    def _connect(self) -> socket.socket:
        """Connect to the next address of the host. One that fails while another works is not used again."""
        addresses, first = self._addresses, next(self._turns)
        failed: list[_Address] = []
        for k in range(len(addresses)):
            address = addresses[(first + k) % len(addresses)]
            try:
                connection = _connected(address, _CONNECT_SECONDS / len(addresses), self._stall_seconds)
            except NotServedError:
                failed.append(address)
                if len(failed) == len(addresses):
                    raise
                continue
            if failed:
                self._addresses = [one for one in addresses if one not in failed]
            return connection
        raise NotServedError("the host has no address")

    def _receive(
        self,
        connection: socket.socket,
        begin: int,
        end: int,
        regions: Sequence[Region],
        expected: Identity,
        until: float,
    ) -> bool:
        """Read the answer, until a time at most; return whether the connection may be used again."""
        buffer = bytearray(_HEAD_BYTES)
        num, head_end = 0, -1
        watch = RateWatch(self._stall_seconds)
        while head_end < 0:
            if num == len(buffer):
                raise NotServedError("the head of the answer is too long")
            got = self._some(connection, memoryview(buffer)[num:], until)
            if not got:
                raise (
                    NotServedError("the server closed the connection")
                    if num
                    else _ClosedError("the server closed the connection")
                )
            num += got
            head_end = buffer.find(b"\r\n\r\n", 0, num)
        keeps = _check_head(bytes(buffer[:head_end]).decode("latin-1"), begin, end, expected)
        ahead = memoryview(buffer)[head_end + 4 : num]
        if len(ahead) > end - begin:
            raise NotServedError("the answer is too long")
        watch.begin()
        for region in regions:
            at = min(len(ahead), region.nbytes)
            if at:
                region.write(0, ahead[:at])
                ahead = ahead[at:]
            while at < region.nbytes:
                part = (c_ubyte * (region.nbytes - at)).from_address(region.address + at)
                got = self._some(connection, part, until, socket.MSG_WAITALL)
                watch.add(got)
                try:
                    watch.check()
                except StalledError as error:
                    raise _SilentError(f"the server sends too slowly: {error} for {self._stall_seconds:g} s") from None
                if not got:
                    raise NotServedError("the server closed the connection early")
                at += got
        return keeps

    def _some(self, connection: socket.socket, buffer: Any, until: float, flags: int = 0) -> int:
        """Wait for bytes; return their number, 0 at the end of the connection."""
        silent_until = time.monotonic() + self._stall_seconds
        while True:
            if is_interrupted():
                raise Cancelled
            if time.monotonic() >= until:
                raise _SilentError("the server sends too slowly")
            try:
                return connection.recv_into(buffer, 0, flags)
            except BlockingIOError:
                if time.monotonic() >= silent_until:
                    raise _SilentError(f"the server sent no bytes for {self._stall_seconds:g} s") from None


def _send(connection: socket.socket, data: bytes) -> None:
    """Send a request. The socket's buffer is empty and takes it at once, so the call keeps the GIL."""
    sent = max(0, _send_holding(connection.fileno(), data, len(data), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL))
    if sent < len(data):
        connection.sendall(data[sent:])  # it waits, or raises what is wrong


def _new_send() -> Any:
    function = quick_libc["send"]  # by subscript: a new function object, so its types are not shared
    function.argtypes, function.restype = [c_int, c_char_p, c_size_t, c_int], c_ssize_t
    return function


_send_holding: Any = _new_send() if sys.platform == "linux" else None


def _connected(address: _Address, seconds: float, stall_seconds: float) -> socket.socket:
    """Return a new connection to an address, whose reads return now and then."""
    try:
        connection = socket.socket(address[0], socket.SOCK_STREAM)
    except OSError as error:  # no descriptor is left, or there are no addresses of this family here
        raise NotServedError(f"no connection ({error.strerror})") from None
    try:
        connection.setblocking(False)
        status = connection.connect_ex(address[1])
        if status == errno.EINPROGRESS:
            _wait_connected(connection, seconds)
            status = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status:
            raise NotServedError(f"no connection ({errno.errorcode.get(status, status)})")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A time limit of Python's makes the socket non-blocking, and MSG_WAITALL returns early then.
        connection.setblocking(True)
        look_seconds = min(LOOK_SECONDS, stall_seconds)
        connection.setsockopt(
            socket.SOL_SOCKET,
            socket.SO_RCVTIMEO,
            struct.pack("ll", int(look_seconds), int(look_seconds % 1 * 1e6)),
        )
    except OSError as error:
        connection.close()
        raise NotServedError(f"no connection ({error.strerror})") from None
    except BaseException:
        connection.close()
        raise
    return connection


def _wait_connected(connection: socket.socket, seconds: float) -> None:
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    until = time.monotonic() + seconds
    while not poll.poll(LOOK_SECONDS * 1000):
        if is_interrupted():
            raise Cancelled
        if time.monotonic() >= until:
            raise _SilentError("the server accepts no connection")


def _check_head(head: str, begin: int, end: int, expected: Identity) -> bool:
    """Require that an answer is the range, from the expected state; return whether the connection may be used again."""
    first, *lines = head.split("\r\n")
    fields: dict[str, list[str]] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip().lower(), []).append(value.strip())
    if not first.startswith("HTTP/1.1 206"):
        busy = re.match(r"HTTP/1\.[01] (429|503) ?(.{0,40})", first)
        seconds = retry_after(fields.get("retry-after", [""])[0])
        if busy is not None and seconds:
            raise _BusyError(int(busy[1]), busy[2], seconds)
        raise NotServedError(f"the server answered {first[:40]!r}")
    wanted = {
        "content-range": [f"bytes {begin}-{end - 1}/{expected.nbytes}"],
        "content-length": [str(end - begin)],
        "etag": [expected.etag],
    }
    for name, values in wanted.items():
        if fields.get(name) != values:
            raise NotServedError(f"{name} is {fields.get(name)}, not {values[0]}")
    if "transfer-encoding" in fields or fields.get("content-encoding", ["identity"]) != ["identity"]:
        raise NotServedError("the answer is encoded")
    return "close" not in " ".join(fields.get("connection", [])).lower()


def _close_all(idle: list[tuple[socket.socket, float]]) -> None:
    """Close connections without dropping the GIL, which 32 calls of `socket.close` do."""
    while idle:
        quick_libc.close(idle.pop()[0].detach())


# One request by Python's client.

_REGION = re.compile(r"<Region>([\w-]+)</Region>|s3[.-]([a-z]{2,}-[a-z-]+-\d)\.amazonaws")
_PIECE_BYTES = 64 << 10
_MOST_BODY_BYTES = 64 << 10


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
    data: bytes | None = None,
    is_local: bool = False,
) -> Head:
    """Make one request. Blocks, and cannot be interrupted.

    Args:
        url: A URL of http or https, without a user.
        headers: Fields of the request.
        num_bytes: Most bytes of the body to read.
        stall_seconds: Longest time without enough bytes; see `RateWatch`.
        authorities: See `stio.storage.remote.stores.added_authorities`.
        data: Body of the request; with one it is a POST.
        is_local: No proxy is used.

    Raises:
        RefusedError: The status is no success.
        PageError: It is a web page.
        StalledError: The bytes come too slowly.
        ConnectionFailedError: There was no answer, or it ended early.
    """
    handlers: list[Any] = [_NoRedirect(), *([ProxyHandler({})] if is_local else [])]
    if url.lower().startswith("https:"):
        context = ssl.create_default_context()
        if authorities:
            context.load_verify_locations(cadata=authorities["root_certificate"].decode())
        handlers.append(HTTPSHandler(context=context))
    try:
        with build_opener(*handlers).open(Request(url, data, dict(headers)), timeout=stall_seconds) as answer:
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


def split_user(url: str) -> str:
    """Return a URL without user and password."""
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))
