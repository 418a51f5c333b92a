"""A place in a remote store as a `Root`, and its objects as `Source`s."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from stio.errors import CheckpointNotFoundError, StioError, StorageError, TruncatedError
from stio.format.files import FILE_SUFFIX, FILE_SUFFIXES, INDEX_SUFFIX, PICKLE_SUFFIXES, FileName
from stio.process import new_lock
from stio.remote.requests import (
    WEB_PAGE,
    Patience,
    RateWatch,
    Requester,
    RequestError,
    RequestFailure,
    Work,
    current_watch,
    for_each,
    is_page,
    patience_of,
)
from stio.remote.stores import Location, Options, locate, new_store, require_obstore
from stio.runtime import calls, memory
from stio.runtime.memory import Region
from stio.storage import Identity, Requests
from stio.text import log, without_secrets

REQUESTS = Requests(nbytes=8 << 20, num_in_flight=32, gap_bytes=1 << 20)
"""At 30 ms to the first byte and 60 MB/s a connection, 8 MiB take 0.17 s, a fifth of it latency, and 32 connections
give what a fast network has. A gap of 1 MiB takes less time than another request."""

_HEAD_BYTES = 128 << 10
"""Read when an object is opened: as much as the first read of a header needs (`stio.storage.checkpoint.open`)."""

_NO_PAGES = (FILE_SUFFIX, ".json")
"""Ends of the names of files that are no web pages."""

_REMOTE_DEVICE = -1
"""`Identity.device` of all remote objects."""

# Names that are requested from a server of http, which lists no directories.
_USUAL_NAMES = (f"model{FILE_SUFFIX}{INDEX_SUFFIX}", f"model{FILE_SUFFIX}")


def open_url(url: str, *, is_file: bool | None = None) -> tuple[RemoteRoot, str]:
    """Return the place of a URL, and the name of the file or index that it names; see `stio.storage.open.open_url`."""
    location = locate(url)
    if is_file is None:
        path = urlsplit(url).path if location.scheme in ("http", "https") else url
        is_file = (
            FileName(location.key).is_index or location.key.endswith((*FILE_SUFFIXES, *PICKLE_SUFFIXES))
        ) and not path.endswith("/")
    if not is_file:
        return RemoteRoot(location), ""
    folder, _, name = location.key.rpartition("/")
    return RemoteRoot(replace(location, key=folder)), name


def key_at(key: str, path: str, up: int, *, shown: str) -> str:
    """Return the key of a path relative to the directory `up` levels above that of a key; see `RootInTree`."""
    folders = key.split("/") if key else []
    if len(folders) < up:
        raise CheckpointNotFoundError("nothing is beside this directory", path=shown, requested=path)
    return "/".join([*folders[: len(folders) - up], *([path] if path else [])])


def place_of_url(url: str) -> str:
    """Return the URL below which all sources of a URL are; see `stio.schemes.register`."""
    return without_secrets(url).rstrip("/")


class RemoteRoot:
    """A "directory" in a store; a `Root`. It keeps connections, which are reused, until it is freed.

    Args:
        url: URL of the directory; see `stio.load`.
        config: Settings of obstore for this kind of store, such as `{"region": "eu-west-1"}`; they go before those of
            the environment.
        client_options: Settings of obstore's client, such as `{"proxy_url": "http://proxy:3128"}`.
        credential_provider: A credential provider of obstore (`obstore.auth`).
        patience: Seconds for which a request is repeated that the store refuses for the moment (status 429 or 503).
            None: 180.

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
        requests: Requests = REQUESTS,  # for tests: size and number of the reads of a load
        patience: Patience | float | None = None,
    ) -> None:
        self.location = locate(url) if isinstance(url, str) else url
        """The place in its store."""
        self.path = self.location.shown
        """The URL without its secrets."""
        self._requests = requests
        patience = patience_of(patience)
        self._settings: dict[str, Any] = {
            "config": config,
            "client_options": client_options,
            "credential_provider": credential_provider,
        }
        self.new_store = partial(new_store, self.location, stall_seconds=patience.stall_seconds, **self._settings)
        """Connects once more; see `stio.remote.stores.new_store`."""
        self.requester = Requester(self.new_store, patience, path=self.path)
        """Makes the requests."""
        self.config = dict(config or {})
        """See above."""
        self._ahead: dict[str, RemoteSource | StioError] = {}

    def listdir(self) -> list[str]:
        """Return the names of the objects of the directory, sorted.

        A server of http lists nothing. Its directory has the usual name of an index, or that of a single file. The same
        holds where obstore cannot list a directory because of one of its keys.

        Raises:
            StioError: The store cannot be listed.
        """
        if self.location.scheme in ("http", "https"):
            return self._usual_names()
        try:
            names = sorted(self.list_objects())
        except StorageError as error:
            if error.errno == errno.EILSEQ:  # a key that has nothing to do with the checkpoint
                with suppress(CheckpointNotFoundError):
                    (name,) = self._usual_names()
                    log(self.requester.warnings.level(), "%s. Only %s was looked for", error, name)
                    return [name]
            raise
        if not names:
            with suppress(CheckpointNotFoundError):  # obstore takes a web page for a listing without objects
                self._open(_USUAL_NAMES[0]).close()
        return names

    def list_objects(self, work: Work = "load") -> dict[str, Any]:
        """Return what a listing says of each object of the directory, by its name.

        Raises:
            StioError: The store cannot be listed.
        """
        prefix = self.location.key
        list_in = partial(require_obstore().list_with_delimiter, prefix=prefix or None)
        listing = self.requester.run(lambda store: list_in(store), self.path, work=work)
        start = len(prefix) + 1 if prefix else 0
        # A console that shows directories makes an empty object with the directory's own name.
        return {meta["path"][start:]: meta for meta in listing["objects"] if len(meta["path"]) > start}

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
        left = [name for name in dict.fromkeys(names) if name not in self._ahead]

        def open_one(name: str) -> None:
            try:
                self._ahead[name] = self._open(name)
            except StioError as error:
                self._ahead[name] = error

        if len(left) > 1:
            for_each(left, open_one, "open", self._requests.num_in_flight)

    def open(self, name: str, *, trusted: bool = False) -> RemoteSource:
        """Open one object.

        Args:
            name: Name of the object below this one's URL.
            trusted: Has no meaning here: a store has no links.

        Raises:
            CheckpointNotFoundError: There is no such object.
            StorageError: The store refuses it, or cannot be read.
        """
        ahead = self._ahead.pop(name, None)
        if isinstance(ahead, StioError):
            raise ahead
        return ahead or self._open(name)

    def _open(self, name: str) -> RemoteSource:
        place = self.location.below(name)
        source = self._ranged(place)
        if source is None:
            source = WholeObject(self.requester, place, self._requests)
            log(
                self.requester.warnings.level(),
                "%s: the server sends no parts of files (it ignores Range), so the whole file is read in order, by one "
                "connection",
                source.path,
            )
        if is_page(source.head) and name.endswith(_NO_PAGES):
            raise RequestFailure("page", WEB_PAGE).error(source.path)
        return source

    def _ranged(self, place: Location) -> RemoteSource | None:
        """Open an object; None: the server sends no parts of files."""
        try:
            pieces, identity = self.requester.run(partial(_get, place=place, end=_HEAD_BYTES), place.shown)
        except StorageError as error:
            if error.errno == errno.EOPNOTSUPP:
                return None
            if error.errno != errno.EINVAL:  # no such range, not even the first bytes: the object is empty
                raise
            pieces, identity = [], self.requester.run(partial(_head, place=place), place.shown)
            if identity.nbytes:
                raise
        return RemoteSource(self.requester, place, identity, b"".join(map(bytes, pieces)), self._requests)

    def at(self, path: str, *, up: int) -> RemoteRoot:
        """Return another directory of the same store, with the same settings; see `RootInTree`."""
        key = key_at(self.location.key, path, up, shown=self.path)
        location, patience = replace(self.location, key=key), self.requester.patience
        return RemoteRoot(location, **self._settings, requests=self._requests, patience=patience)

    def close(self) -> None:
        """Drop what was opened ahead; objects opened from it can still be read. Idempotent."""
        self._ahead.clear()


class RemoteSource:
    """One object of a store, in the state in which it was opened; a `Source`.

    Args:
        requester: Makes its requests.
        place: Its place in the store.
        identity: Its state.
        head: Its first bytes, which came with its state.
        requests: Size and number of the reads of a load.
    """

    def __init__(
        self, requester: Requester, place: Location, identity: Identity, head: bytes, requests: Requests
    ) -> None:
        self.path = place.shown
        """Its URL without secrets."""
        self.identity = identity
        """See above."""
        self.head = head
        """See above; dropped with the first read behind it, since only tensors follow the header."""
        self.requests = requests
        """See above."""
        self._requester = requester
        self._place = place

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on. Blocks.

        On a thread of stio's, `Cancelled` is raised within a second after the thread should end
        (`stio.runtime.operation.is_interrupted`).

        Raises:
            TruncatedError: The object ends before the last region is full.
            ChangedDuringReadError: The store has another state of the object by now, or none.
            StallTimeoutError: The store sent no bytes for too long.
            StorageError: The request failed.
        """
        end, nbytes = offset + sum(region.nbytes for region in regions), self.identity.nbytes
        if end > nbytes:
            missing = f"{end - max(offset, nbytes):,} more bytes"
            raise TruncatedError(
                "the object ends before its tensors do; it was cut short",
                path=self.path,
                offset=nbytes,
                expected=missing,
                found="the end of the object",
            )
        head = self.head
        if end <= len(head):
            _Target(regions).fill(head, offset, end)
        else:
            self._read(offset, end, regions)

    def _read(self, offset: int, end: int, regions: Sequence[Region]) -> None:
        target, self.head = _Target(regions), b""
        step = 2 * self.requests.nbytes  # reads of a load are shorter; a header may be longer
        for at in range(offset, end, step):
            for data in self._get(at, min(at + step, end)):
                target.fill(data, 0, len(data))

    def _get(self, begin: int, end: int) -> Sequence[Any]:
        request = partial(_get, place=self._place, begin=begin, end=end, expected=self.identity)
        pieces, identity = self._requester.run(request, self.path, expected=self.identity)
        self.identity.require_same(identity, self.path)
        return pieces

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the store has another state of the object by now, or none.

        It reads one byte: a URL that was signed for reading allows no other request.
        """
        if self.identity.nbytes:
            self._get(0, 1)
            return
        request = partial(_head, place=self._place)
        self.identity.require_same(self._requester.run(request, self.path, expected=self.identity), self.path)

    def close(self) -> None:
        """Free the first bytes. Idempotent; no read may be under way."""
        self.head = b""


class WholeObject(RemoteSource):
    """One object of a server that sends no parts of files (it ignores Range), in the state in which it was opened.

    The loader reads it by one request at a time, in the order of the offsets. Bytes between two reads are received and
    dropped. A read before the place of the last one begins the object again. So memory stays as small as with ranges,
    and a load that needs few tensors receives most of the file.

    Args:
        requester: Makes its requests.
        place: Its place in the store.
        requests: Size of the reads of a load.

    Raises:
        StioError: It cannot be read.
    """

    def __init__(self, requester: Requester, place: Location, requests: Requests) -> None:
        self._requester, self._place = requester, place
        self._lock = new_lock()
        self._stream: Any = None
        self._piece: Any = b""  # the bytes that the stream gave last
        self._begin = 0  # their offset
        identity, head = requester.repeat(self._open, place.shown)
        super().__init__(requester, place, identity, head, replace(requests, num_in_flight=1))

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the server has another state of the object by now, or none."""
        self._requester.repeat(self._new_stream, self.path, expected=self.identity)

    def close(self) -> None:
        """End the request that is under way. Idempotent; no read may be under way."""
        super().close()
        self._stream = None

    def _open(self) -> tuple[Identity, bytes]:
        identity, stream = self._request()
        head = b""
        while len(head) < min(_HEAD_BYTES, identity.nbytes):
            head += bytes(self._next(stream))
        return identity, head

    def _request(self) -> tuple[Identity, Any]:
        """Return the state of the object, and its bytes, in pieces that come within the time of a stall."""
        result = self._requester.begin(lambda store: require_obstore().get(store, self._place.key)).result()
        piece_bytes = RateWatch(self._requester.patience.stall_seconds).piece_bytes
        return _identity(result.meta, self._place), iter(result.stream(min_chunk_size=piece_bytes))

    def _new_stream(self) -> Any:
        identity, stream = self._request()
        self.identity.require_same(identity, self.path)
        return stream

    def _next(self, stream: Any) -> Any:
        """Return the next bytes of a stream, which has more.

        Raises:
            RequestError: It has ended.
        """
        watch = RateWatch(self._requester.patience.stall_seconds)
        watch.begin()
        piece = calls.Call(lambda: next(stream, None), check=watch.check).result()
        if not piece:
            raise RequestError("wrong", "the answer has ended early")
        return piece

    def _read(self, offset: int, end: int, regions: Sequence[Region]) -> None:
        with self._lock:
            self._requester.repeat(
                lambda: self._receive(offset, end, _Target(regions)), self.path, expected=self.identity
            )

    def _receive(self, offset: int, end: int, target: _Target) -> None:
        stream, self._stream = self._stream, None  # kept again if the read succeeds
        if stream is None or offset < self._begin:
            stream, self._piece, self._begin = self._new_stream(), b"", 0
        while True:
            stop = self._begin + len(self._piece)
            if offset < stop:
                target.fill(self._piece, offset - self._begin, min(end, stop) - self._begin)
                offset = min(end, stop)
            if offset >= end:
                self._stream = stream
                return
            self._piece, self._begin = self._next(stream), stop


class _Target:
    """Regions that are filled one after the other."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._left = [*regions][::-1]
        self._at = 0

    def fill(self, data: Any, begin: int, end: int) -> None:
        """Fill with a part of some memory."""
        address = np.frombuffer(data, np.uint8).ctypes.data
        while begin < end:
            region = self._left[-1]
            nbytes = min(end - begin, region.nbytes - self._at)
            memory.move(region.address + self._at, address + begin, nbytes)
            self._at += nbytes
            begin += nbytes
            if self._at == region.nbytes:
                self._left.pop()
                self._at = 0


# Requests. Each function is called with the store, on a thread that may be left behind.


def _get(
    store: Any, *, place: Location, begin: int = 0, end: int, expected: Identity | None = None
) -> tuple[Sequence[Any], Identity]:
    """Return the bytes of a range, and the state of the object; the end of the object may shorten the range.

    With another state than the expected one there are no bytes, and the caller compares the states.

    Raises:
        RequestError: The answer has other bytes than were requested.
    """
    options: dict[str, Any] = {"range": (begin, end)}
    if expected is not None and expected.etag and not expected.etag.startswith("W/"):
        options["if_match"] = expected.etag  # a server may ignore it
    result = require_obstore().get(store, place.key, options=options)
    identity = _identity(result.meta, place)
    if expected is not None and identity != expected:
        return (), identity
    end = min(end, identity.nbytes)
    if tuple(result.range) != (begin, end):
        first, stop = result.range
        raise RequestError("wrong", f"bytes {first:,} to {stop:,} instead of {begin:,} to {end:,}")
    watch = current_watch()
    watch.begin()
    pieces = []
    for piece in result.stream(min_chunk_size=watch.piece_bytes):
        pieces.append(piece)
        watch.add(len(piece))
    num_bytes = sum(map(len, pieces))
    if num_bytes != end - begin:
        raise RequestError("wrong", f"{num_bytes:,} bytes instead of {end - begin:,}")
    return pieces, identity


def _head(store: Any, *, place: Location) -> Identity:
    return _identity(require_obstore().head(store, place.key), place)


def _identity(meta: Any, place: Location) -> Identity:
    etag, changed = meta["e_tag"] or meta["version"] or "", meta["last_modified"]
    return Identity(
        device=_REMOTE_DEVICE,
        inode=int.from_bytes(hashlib.blake2b(place.shown.encode(), digest_size=8).digest(), "big") or 1,
        nbytes=meta["size"],
        # Without an ETag the time has to do. With one it is not compared: servers behind one address may differ in it.
        mtime_ns=0 if etag or changed is None else int(changed.timestamp()) * 10**9,
        etag=etag,
    )
