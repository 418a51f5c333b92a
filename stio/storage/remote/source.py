"""A place in a remote store as a `Root`, and its objects as `Source`s."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from stio.errors import CheckpointNotFoundError, StioError, StorageError
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX
from stio.runtime import memory
from stio.runtime.calls import Call
from stio.runtime.memory import Region
from stio.runtime.workers import WorkerPool
from stio.storage.base import Identity, Requests, Transaction
from stio.storage.checks import cut_short
from stio.storage.remote.failures import WrongAnswerError
from stio.storage.remote.plain_http import PlainHttp, PlainObject, plain_address
from stio.storage.remote.requests import Patience, Requester, require_usable
from stio.storage.remote.settings import Options
from stio.storage.remote.stores import (
    Location,
    authorization_of,
    link_to,
    locate,
    new_store,
    require_obstore,
)

REQUESTS = Requests(nbytes=8 << 20, num_in_flight=32, gap_bytes=1 << 20)
"""At 30 ms to the first byte and 60 MB/s a connection, 8 MiB take 0.17 s, a fifth of it latency, and 32 connections
give what a fast network has. A gap of 1 MiB takes less time than another request."""

_HEAD_BYTES = 128 << 10
"""Read when an object is opened: as much as the first read of a header needs (`stio.loading.open`)."""

_REMOTE_DEVICE = -1
"""`Identity.device` of all remote objects."""

# Names that are requested from a server of http, which lists no directories.
_USUAL_NAMES = (f"model{FILE_SUFFIX}{INDEX_SUFFIX}", f"model{FILE_SUFFIX}")


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of a range, and the state of the object from which they are."""

    data: Any
    """Memory of obstore's, with the buffer protocol."""
    identity: Identity
    """The state of the object."""


def open_url(url: str) -> tuple[RemoteRoot, str]:
    """Return the place of a URL, and the name of the file or index that it names; see `stio.storage.open.open_url`."""
    location = locate(url)
    if not location.key.endswith((FILE_SUFFIX, FILE_SUFFIX + INDEX_SUFFIX)):
        return RemoteRoot(location), ""
    folder, _, name = location.key.rpartition("/")
    return RemoteRoot(replace(location, key=folder)), name


class RemoteRoot:
    """A "directory" in a store; a `Root`. It keeps connections, which are reused, until it is freed.

    Args:
        url: URL of the directory; see `stio.load`.
        config: Settings of obstore for this kind of store, such as `{"region": "eu-west-1"}`; they go before those of
            the environment.
        client_options: Settings of obstore's client, such as `{"proxy_url": "http://proxy:3128"}`.
        credential_provider: A credential provider of obstore (`obstore.auth`).
        requests: Size and number of the reads of a load.
        patience: How often failed requests are repeated.

    Raises:
        ImportError: obstore is not installed.
        CheckpointNotFoundError: The URL names no bucket, container or host.
        StorageError: The settings do not make a store, or this process was forked from one that has read URLs.
    """

    def __init__(
        self,
        url: str | Location,
        *,
        config: Options | None = None,
        client_options: Options | None = None,
        credential_provider: Callable[[], Any] | None = None,
        requests: Requests = REQUESTS,
        patience: Patience | None = None,
    ) -> None:
        self.location = locate(url) if isinstance(url, str) else url
        """The place in its store."""
        self.path = self.location.shown
        """The URL without its secrets."""
        self._requests = requests
        patience = patience or Patience()
        connect = partial(
            new_store,
            self.location,
            stall_seconds=patience.stall_seconds,
            config=config,
            client_options=client_options,
            credential_provider=credential_provider,
        )
        self.requester = Requester(connect, patience, path=self.path)
        """Makes the requests."""
        self.new_store = connect
        """Connects once more; see `stio.storage.remote.stores.new_store`."""
        self.config = dict(config or {})
        """See above."""
        # What is given for obstore's client (headers, a proxy, certificates) is known to obstore alone.
        has_proxy = any("proxy" in str(name).lower() for name in config or ())
        self._may_be_plain = self.location.scheme in ("http", "s3") and not client_options and not has_proxy
        self._servers: dict[tuple[str, int], PlainHttp] = {}
        self._ahead: dict[str, RemoteSource | BaseException] = {}

    def listdir(self) -> list[str]:
        """Return the names of the objects of the directory, sorted.

        A server of http lists nothing. Its directory has the usual name of an index, or that of a single file.

        Raises:
            StioError: The store cannot be listed.
        """
        if self.location.scheme in ("http", "https"):
            return self._usual_names()
        listing = partial(require_obstore().list_with_delimiter, prefix=self.location.key or None)
        found = self.requester.run(lambda store: listing(store), self.path)
        start = len(self.location.key) + 1 if self.location.key else 0
        # A console that shows directories makes an empty object with the directory's own name.
        return sorted(one["path"][start:] for one in found["objects"] if len(one["path"]) > start)

    def _usual_names(self) -> list[str]:
        for name in _USUAL_NAMES:
            with suppress(CheckpointNotFoundError):
                self._ahead[name] = self._open(name)
                return [name]
        raise CheckpointNotFoundError(
            f"the server has no {' and no '.join(_USUAL_NAMES)} there, and http lists no directories; give the URL of "
            "an index or of a file",
            path=self.path,
        )

    def open_ahead(self, names: Sequence[str]) -> None:
        """Open objects at one time, each of which `open` returns later. Blocks; raises no error of an object."""
        left = [name for name in dict.fromkeys(names) if name not in self._ahead][::-1]

        def work() -> None:
            while left:
                try:
                    name = left.pop()
                except IndexError:
                    return
                try:
                    self._ahead[name] = self._open(name)
                except StioError as error:
                    self._ahead[name] = error

        if len(left) > 1:
            WorkerPool("open").run(work, min(len(left), self._requests.num_in_flight))

    def open(self, name: str, *, trusted: bool = False) -> RemoteSource:
        """Open one object.

        Args:
            name: Name of the object below this one's URL.
            trusted: Has no meaning here: a store has no links.

        Raises:
            CheckpointNotFoundError: There is no such object.
            StorageError: The store refuses it, or cannot be read.
        """
        found = self._ahead.pop(name, None)
        if isinstance(found, BaseException):
            raise found
        return self._open(name) if found is None else found

    def _open(self, name: str) -> RemoteSource:
        key = f"{self.location.key}/{name}" if self.location.key else name
        path = replace(self.location, key=key).shown
        head = partial(_get, key=key, path=path, begin=0, end=_HEAD_BYTES)
        try:
            answer = self.requester.run(head, path)
        except StorageError as error:
            if error.errno != errno.EINVAL:  # no such range, not even the first bytes: the object is empty
                raise
            answer = Answer(None, self.requester.run(partial(_head, key=key, path=path), path))
            if answer.identity.nbytes:
                raise
        plain = self._plain(replace(self.location, key=key), answer.identity) if self._may_be_plain else None
        return RemoteSource(self.requester, key, path, answer.identity, answer.data, self._requests, plain)

    def _plain(self, location: Location, identity: Identity) -> PlainObject | None:
        """Return an object as one that is read by plain http; None if its server has TLS, a proxy or no ETags."""
        if not identity.etag:
            return None

        def connect(store: Any) -> tuple[PlainHttp | None, tuple[str, float]]:
            link = link_to(store, location)
            address = plain_address(link[0])
            if address is None:
                self._may_be_plain = False
                return None, link
            if address not in self._servers:
                server = PlainHttp(address, stall_seconds=self.requester.patience.stall_seconds)
                self._servers.setdefault(address, server)
            return self._servers[address], link

        try:
            server, link = self.requester.run(connect, location.shown)
        except StioError:  # it cannot be signed, or there is no such host: obstore says what is wrong
            return None
        if server is None:
            return None
        authorization = authorization_of(link[0])
        return PlainObject(
            server,
            link,
            lambda: self.requester.run(partial(link_to, location=location), location.shown),
            headers=f"authorization: {authorization}\r\n" if authorization else "",
            warnings=self.requester.warnings,
        )

    def begin(self, **options: Any) -> Transaction:
        """Begin a save to the directory; see `stio.storage.remote.save.RemoteDestination`."""
        transaction: Transaction = import_module("stio.storage.remote.save").RemoteDestination(self).begin(**options)
        return transaction

    def within(self, budget_bytes: int) -> tuple[Any, int]:
        """Return it as a destination of saves; see `stio.storage.remote.save.RemoteDestination.within`."""
        found: tuple[Any, int] = import_module("stio.storage.remote.save").RemoteDestination(self).within(budget_bytes)
        return found

    def close(self) -> None:
        """Drop what was opened ahead; objects opened from it can still be read. Idempotent."""
        self._ahead.clear()


class RemoteSource:
    """One object of a store, in the state in which it was opened; a `Source`.

    Args:
        requester: Makes its requests.
        key: Its name in the store.
        path: Its URL without secrets.
        identity: Its state.
        head: Its first bytes, which came with its state; None: none.
        requests: Size and number of the reads of a load.
        plain: The same object, read without obstore; None: it cannot be.
    """

    def __init__(
        self,
        requester: Requester,
        key: str,
        path: str,
        identity: Identity,
        head: Any,
        requests: Requests,
        plain: PlainObject | None = None,
    ) -> None:
        self.path = path
        """See above."""
        self.identity = identity
        """See above."""
        self.requests = requests
        """See above."""
        self._requester = requester
        self._key = key
        self._head = head
        self._plain = plain

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on. Blocks.

        A long read is several requests at one time. On a thread of stio's, `Cancelled` is raised within a second after
        the thread should end (`stio.runtime.workers.is_interrupted`).

        Raises:
            TruncatedError: The object ends before the last region is full.
            ChangedDuringReadError: The store has another state of the object by now, or none.
            StallTimeoutError: The store sent no bytes for too long.
            StorageError: The request failed.
        """
        end = offset + sum(region.nbytes for region in regions)
        if end == offset:
            return
        if end > self.identity.nbytes:
            raise cut_short(self.path, self.identity.nbytes, end - max(offset, self.identity.nbytes))
        target = _Target(regions)
        head = self._head
        if head is not None and end <= len(head):
            target.fill(head, offset, end)
            return
        self._head = None  # the header was read: only tensors follow
        if self._plain is not None and end - offset < 2 * self.requests.nbytes:
            require_usable(self.path)
            if self._plain.read(offset, regions, self.identity):
                return
        for data in self._ranges(offset, end):
            target.fill(data, 0, len(data))

    def _ranges(self, offset: int, end: int) -> Iterator[Any]:
        """Yield the bytes of a range, one request's at a time; a few requests are under way."""
        step = self.requests.nbytes
        whole = 1 if end - offset < 2 * step else max(1, min(_MOST_AT_ONCE, self.requests.num_in_flight))
        ahead: list[tuple[Call[Answer], Callable[[Any], Answer]]] = []
        at = offset
        while at < end or ahead:
            while at < end and len(ahead) < whole:
                stop = end if whole == 1 else min(at + step, end)
                request: Callable[[Any], Answer] = partial(
                    _get, key=self._key, path=self.path, begin=at, end=stop, expected=self.identity
                )
                ahead.append((self._requester.begin(request), request))
                at = stop
            answer = self._requester.finish(*ahead.pop(0), self.path, expected=self.identity)
            self.identity.require_same(answer.identity, self.path)
            yield answer.data

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the store has another state of the object by now, or none.

        It reads one byte: a URL that was signed for reading allows no other request.
        """
        if self.identity.nbytes:
            require_usable(self.path)
            byte = memory.allocate(1)
            if self._plain is not None and self._plain.read(0, [byte], self.identity):
                return
            request = partial(_get, key=self._key, path=self.path, begin=0, end=1, expected=self.identity)
            found = self._requester.run(request, self.path, expected=self.identity).identity
        else:
            found = self._requester.run(
                partial(_head, key=self._key, path=self.path), self.path, expected=self.identity
            )
        self.identity.require_same(found, self.path)

    def close(self) -> None:
        """Free the first bytes. Idempotent; no read may be under way."""
        self._head = None


_MOST_AT_ONCE = 8
"""Requests of one read. Several threads read at one time."""


class _Target:
    """Regions that are filled one after the other."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = iter(regions)
        self._region = next(self._regions)
        self._at = 0

    def fill(self, data: Any, begin: int, end: int) -> None:
        """Fill with a part of some memory."""
        address = np.frombuffer(data, np.uint8).ctypes.data
        while begin < end:
            while self._at == self._region.nbytes:
                self._region, self._at = next(self._regions), 0
            nbytes = min(end - begin, self._region.nbytes - self._at)
            move = memory.move if nbytes >= memory.HOLD_BYTES else memory.move_holding
            move(self._region.address + self._at, address + begin, nbytes)
            self._at += nbytes
            begin += nbytes


# Requests. Each function is called with the store, on a thread that may be left behind.


def _get(store: Any, *, key: str, path: str, begin: int, end: int, expected: Identity | None = None) -> Answer:
    """Return the bytes of a range, which the end of the object may shorten if no state is expected.

    Raises:
        WrongAnswerError: The answer has other bytes than were requested.
        ChangedDuringReadError: The answer is from another state than the expected one.
    """
    options: dict[str, Any] = {"range": (begin, end)}
    if expected is not None and expected.etag and not expected.etag.startswith("W/"):
        options["if_match"] = expected.etag  # a server may ignore it
    result = require_obstore().get(store, key, options=options)
    identity = _identity(result.meta, path)
    if expected is not None and identity != expected:
        return Answer(b"", identity)  # the caller compares it
    wanted = (begin, min(end, identity.nbytes))
    if tuple(result.range) != wanted:
        raise WrongAnswerError(
            f"bytes {result.range[0]:,} to {result.range[1]:,} instead of {wanted[0]:,} to {wanted[1]:,}"
        )
    data = result.bytes()
    if len(data) != wanted[1] - wanted[0]:
        raise WrongAnswerError(f"{len(data):,} bytes instead of {wanted[1] - wanted[0]:,}")
    return Answer(data, identity)


def _head(store: Any, *, key: str, path: str) -> Identity:
    return _identity(require_obstore().head(store, key), path)


def _identity(meta: Any, path: str) -> Identity:
    etag, changed = meta["e_tag"] or meta["version"] or "", meta["last_modified"]
    return Identity(
        device=_REMOTE_DEVICE,
        inode=int.from_bytes(hashlib.blake2b(path.encode(), digest_size=8).digest(), "big") or 1,
        nbytes=meta["size"],
        # Without an ETag the time has to do. With one it is not compared: servers behind one address may differ in it.
        mtime_ns=0 if etag or changed is None else int(changed.timestamp()) * 10**9,
        etag=etag,
    )
