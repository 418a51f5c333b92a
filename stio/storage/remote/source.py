"""A place in a remote store as a `Root`, and its objects as `Source`s."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from stio.errors import CheckpointNotFoundError, StioError, StorageError
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX, names_file
from stio.runtime import memory
from stio.runtime.calls import Call
from stio.runtime.locks import new_lock
from stio.runtime.memory import Region
from stio.runtime.process import contextmanager
from stio.runtime.text import log
from stio.runtime.workers import WorkerPool
from stio.storage.base import Identity, Requests, Source
from stio.storage.checks import cut_short
from stio.storage.remote.failures import (
    PAGE,
    WEB_PAGE,
    RefusedError,
    RequestError,
    RequestFailure,
    failure_of,
)
from stio.storage.remote.requests import (
    Attempts,
    Patience,
    RateWatch,
    Requester,
    ask,
    current_watch,
    is_page,
    patience_of,
    require_no_page,
)
from stio.storage.remote.settings import Options
from stio.storage.remote.stores import (
    Location,
    authorization_of,
    link_to,
    locate,
    new_store,
    require_obstore,
    without_user,
)

T = TypeVar("T")

REQUESTS = Requests(nbytes=8 << 20, num_in_flight=32, gap_bytes=1 << 20)
"""At 30 ms to the first byte and 60 MB/s a connection, 8 MiB take 0.17 s, a fifth of it latency, and 32 connections
give what a fast network has. A gap of 1 MiB takes less time than another request."""

_HEAD_BYTES = 128 << 10
"""Read when an object is opened: as much as the first read of a header needs (`stio.loading.open`)."""

_ASKED_BYTES = 1 << 10
"""Read of an answer by Python's client: the title of a web page is in them."""

_NO_PAGES = (FILE_SUFFIX, ".json")
"""Ends of the names of files that are no web pages."""

_REMOTE_DEVICE = -1
"""`Identity.device` of all remote objects."""

# Names that are requested from a server of http, which lists no directories.
_USUAL_NAMES = (f"model{FILE_SUFFIX}{INDEX_SUFFIX}", f"model{FILE_SUFFIX}")


@dataclass(frozen=True, slots=True)
class Range:
    """A range of an object that is requested."""

    key: str
    """Name of the object in the store."""
    path: str
    """Its URL without secrets."""
    begin: int
    """Offset of the first byte."""
    end: int
    """Offset behind the last byte; the end of the object may come before it if no state is expected."""
    expected: Identity | None = None
    """State of the object; None: any."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The bytes of a range, and the state of the object from which they are."""

    pieces: Sequence[Any]
    """Its bytes in order; each has the buffer protocol."""
    identity: Identity
    """The state of the object."""


def open_url(url: str, *, is_file: bool | None = None) -> tuple[RemoteRoot, str]:
    """Return the place of a URL, and the name of the file or index that it names; see `stio.storage.open.open_url`."""
    location = locate(url)
    if is_file is None:
        path = urlsplit(url).path if location.scheme in ("http", "https") else url
        is_file = names_file(location.key) and not path.endswith("/")
    if not is_file:
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
        patience: Seconds for which a request is repeated that the store refuses for the moment (status 429 or 503). A
            pause that the store requests (Retry-After) is made if it ends within them. None: 180.

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
        self._may_be_asked = self.location.scheme in ("http", "https", "s3") and not client_options and not has_proxy
        self._ahead: dict[str, RemoteSource | WholeObject | BaseException] = {}

    def listdir(self) -> list[str]:
        """Return the names of the objects of the directory, sorted.

        A server of http lists nothing. Its directory has the usual name of an index, or that of a single file. The same
        holds where obstore cannot list a directory because of one of its keys.

        Raises:
            StioError: The store cannot be listed.
        """
        if self.location.scheme in ("http", "https"):
            return self._usual_names()
        listing = partial(require_obstore().list_with_delimiter, prefix=self.location.key or None)
        try:
            with self.explained(_USUAL_NAMES[0]):
                found = self.requester.run(lambda store: listing(store), self.path)
        except StorageError as error:
            if error.errno == errno.EILSEQ:  # a key that has nothing to do with the checkpoint
                with suppress(CheckpointNotFoundError):
                    names = self._usual_names()
                    log(self.requester.warnings.level(), "%s. Only %s was looked for", error, names[0])
                    return names
            raise
        if not found["objects"] and not found["common_prefixes"]:
            self._require_store()
        start = len(self.location.key) + 1 if self.location.key else 0
        # A console that shows directories makes an empty object with the directory's own name.
        return sorted(one["path"][start:] for one in found["objects"] if len(one["path"]) > start)

    @contextmanager
    def explained(self, name: str) -> Iterator[None]:
        """Raise what a request for an object says of a redirect or of a web page, in place of obstore's error.

        Args:
            name: Name of the object.
        """
        try:
            yield
        except StorageError as error:
            if error.errno in (errno.EREMOTE, errno.EOPNOTSUPP, errno.EPROTO):
                with suppress(CheckpointNotFoundError):
                    self._open(name).close()
            raise

    def _require_store(self) -> None:
        """Require that a listing without objects is no web page, which obstore takes for an empty one.

        Raises:
            StorageError: A request for an object gets a page too.
        """
        try:
            self._open(_USUAL_NAMES[0]).close()
        except StioError as error:
            if error.found == PAGE:
                raise

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
        pool = WorkerPool("open")

        def work() -> None:
            for name in pool.items(left):
                try:
                    self._ahead[name] = self._open(name)
                except StioError as error:
                    self._ahead[name] = error

        if len(left) > 1:
            pool.run(work, min(len(left), self._requests.num_in_flight))

    def open(self, name: str, *, trusted: bool = False) -> RemoteSource | WholeObject:
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

    def _open(self, name: str) -> RemoteSource | WholeObject:
        key = f"{self.location.key}/{name}" if self.location.key else name
        path = replace(self.location, key=key).shown
        wanted = Range(key, path, 0, _HEAD_BYTES)
        try:
            answer = self.requester.run(partial(_get, wanted=wanted), path, again=self.again(wanted))
        except StorageError as error:
            if error.errno == errno.EOPNOTSUPP:
                return self._whole(key, path)
            if error.errno != errno.EINVAL:  # no such range, not even the first bytes: the object is empty
                raise
            answer = Answer((), self.requester.run(partial(_head, key=key, path=path), path))
            if answer.identity.nbytes:
                raise
        head = b"".join(map(bytes, answer.pieces))
        if is_page(head) and name.endswith(_NO_PAGES):
            raise RequestFailure("page", WEB_PAGE).error(path)
        return RemoteSource(self, key, path, answer.identity, head, self._requests)

    def _whole(self, key: str, path: str) -> WholeObject:
        """Open an object of a server that sends no parts of files."""
        found = WholeObject(self.requester, key, path, self._requests)
        log(
            self.requester.warnings.level(),
            "%s: the server sends no parts of files (it ignores Range), so the whole file is read in order, by one "
            "connection",
            path,
        )
        return found

    def again(self, wanted: Range) -> Callable[[Any], Answer] | None:
        """Return a request of a range that says more of a refusal, by `ask`; None: that cannot make this one."""
        return partial(self._asked, wanted=wanted) if self._may_be_asked else None

    def _asked(self, store: Any, wanted: Range) -> Answer:
        """Return a range as `_get` does, once Python's client has got its beginning."""
        try:
            link = link_to(store, replace(self.location, key=wanted.key))
        except Exception:  # it cannot be signed, and obstore says why
            return _get(store, wanted)
        headers = {"Range": f"bytes={wanted.begin}-{min(wanted.end, wanted.begin + _ASKED_BYTES) - 1}", "Accept": "*/*"}
        if authorization := authorization_of(link):
            headers["Authorization"] = authorization
        try:
            status, _ = ask(
                without_user(link),
                headers,
                _ASKED_BYTES,
                stall_seconds=self.requester.patience.stall_seconds,
                scheme=self.location.scheme,
            )
            if status != 206:
                raise RequestError("unranged")
        except RequestError as error:
            if error.failure.kind != "unreachable":
                raise
        except RefusedError as error:
            if not 300 <= error.status < 400 or error.region:  # otherwise obstore follows it, or says why not
                raise
        return _get(store, wanted)

    def close(self) -> None:
        """Drop what was opened ahead; objects opened from it can still be read. Idempotent."""
        self._ahead.clear()


class RemoteSource:
    """One object of a store, in the state in which it was opened; a `Source`.

    Args:
        root: The directory.
        key: Its name in the store.
        path: Its URL without secrets.
        identity: Its state.
        head: Its first bytes, which came with its state; None: none.
        requests: Size and number of the reads of a load.
    """

    def __init__(
        self,
        root: RemoteRoot,
        key: str,
        path: str,
        identity: Identity,
        head: Any,
        requests: Requests,
    ) -> None:
        self.path = path
        """See above."""
        self.identity = identity
        """See above."""
        self.requests = requests
        """See above."""
        self._requester = root.requester
        self._again = root.again
        self._key = key
        self._head = head

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
        end = _end_of(self, offset, regions)
        target = _Target(regions)
        if self._head is not None and end <= len(self._head):
            target.fill(self._head, offset, end)
            return
        self._head = None  # the header was read: only tensors follow
        step = 2 * self.requests.nbytes  # reads of a load are shorter; a header may be longer
        for at in range(offset, end, step):
            stop = min(at + step, end)
            answer = self._answer(Range(self._key, self.path, at, stop, self.identity))
            self.identity.require_same(answer.identity, self.path)
            for data in answer.pieces:
                target.fill(data, 0, len(data))

    def _answer(self, wanted: Range) -> Answer:
        request, again = partial(_get, wanted=wanted), self._again(wanted)
        return self._requester.run(request, self.path, expected=self.identity, again=again)

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the store has another state of the object by now, or none.

        It reads one byte: a URL that was signed for reading allows no other request.
        """
        if self.identity.nbytes:
            found = self._answer(Range(self._key, self.path, 0, 1, self.identity)).identity
        else:
            found = self._requester.run(
                partial(_head, key=self._key, path=self.path), self.path, expected=self.identity
            )
        self.identity.require_same(found, self.path)

    def close(self) -> None:
        """Free the first bytes. Idempotent; no read may be under way."""
        self._head = None


class WholeObject:
    """One object of a server that sends no parts of files (it ignores Range), in the state in which it was opened.

    A `Source`. The loader reads it by one request at a time, in the order of the offsets. Bytes between two reads are
    received and dropped. A read before the place of the last one begins the object again. So memory stays as small as
    with ranges, and a load that needs few tensors receives most of the file.

    Args:
        requester: Makes its requests.
        key: Its name in the store.
        path: Its URL without secrets.
        requests: Size of the reads of a load.

    Raises:
        StioError: It cannot be read.
    """

    def __init__(self, requester: Requester, key: str, path: str, requests: Requests) -> None:
        self.path = path
        """See above."""
        self.requests = replace(requests, num_in_flight=1)
        """See `RequestedSource`."""
        self._requester = requester
        self._key = key
        self._lock = new_lock()
        self._stream: Any = None
        self._piece: Any = b""  # the bytes that the stream gave last
        self._begin = 0  # their offset
        self.identity, self._head = self._repeated(self._open, None)
        """The state of the object."""

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on; see `RemoteSource.read_into`."""
        end = _end_of(self, offset, regions)
        if end <= len(self._head):
            _Target(regions).fill(self._head, offset, end)
            return
        with self._lock:
            self._repeated(lambda: self._read(offset, end, _Target(regions)), self.identity)

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the server has another state of the object by now, or none."""
        found = self._requester.run(self._get, self.path, expected=self.identity)
        self.identity.require_same(_identity(found.meta, self.path), self.path)

    def close(self) -> None:
        """End the request that is under way. Idempotent; no read may be under way."""
        self._stream = None
        self._head = b""

    def _get(self, store: Any) -> Any:
        return require_obstore().get(store, self._key)

    def _repeated(self, work: Callable[[], T], expected: Identity | None) -> T:
        """Call a function again while it fails, and may succeed."""
        attempts = Attempts(self._requester, self.path, expected=expected)
        while True:
            try:
                return work()
            except Exception as error:
                failure = failure_of(error)
            attempts.failed(failure)

    def _open(self) -> tuple[Identity, bytes]:
        result = self._requester.begin(self._get).result()
        identity = _identity(result.meta, self.path)
        stream, head = self._pieces(result), b""
        while len(head) < min(_HEAD_BYTES, identity.nbytes):
            head += bytes(self._next(stream))
        require_no_page(str(result.attributes.get("Content-Type", "")), head)
        return identity, head

    def _pieces(self, result: Any) -> Any:
        """Return the iterator of the bytes of an answer, in pieces that come within the time of a stall."""
        return iter(result.stream(min_chunk_size=RateWatch(self._requester.patience.stall_seconds).piece_bytes))

    def _next(self, stream: Any) -> Any:
        """Return the next bytes of a stream, which has more.

        Raises:
            RequestError: It has ended.
        """
        watch = RateWatch(self._requester.patience.stall_seconds)
        watch.begin()
        piece = Call(lambda: next(stream, None), check=watch.check).result()
        if not piece:
            raise RequestError("wrong", "the answer has ended early")
        return piece

    def _read(self, offset: int, end: int, target: _Target) -> None:
        stream, self._stream = self._stream, None  # kept again if the read succeeds
        if stream is None or offset < self._begin:
            result = self._requester.begin(self._get).result()
            self.identity.require_same(_identity(result.meta, self.path), self.path)
            stream = self._pieces(result)
            self._piece, self._begin = b"", 0
        while True:
            stop = self._begin + len(self._piece)
            if offset < stop:
                target.fill(self._piece, offset - self._begin, min(end, stop) - self._begin)
                offset = min(end, stop)
            if offset >= end:
                self._stream = stream
                return
            self._piece, self._begin = self._next(stream), stop


def _end_of(source: Source, offset: int, regions: Sequence[Region]) -> int:
    """Return where a read ends; raise `TruncatedError` if the object ends before."""
    end, nbytes = offset + sum(region.nbytes for region in regions), source.identity.nbytes
    if end > nbytes:
        raise cut_short(source.path, nbytes, end - max(offset, nbytes))
    return end


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


def _get(store: Any, wanted: Range) -> Answer:
    """Return the bytes of a range, which the end of the object may shorten if no state is expected.

    Raises:
        RequestError: The answer has other bytes than were requested.
        ChangedDuringReadError: The answer is from another state than the expected one.
    """
    options: dict[str, Any] = {"range": (wanted.begin, wanted.end)}
    if wanted.expected is not None and wanted.expected.etag and not wanted.expected.etag.startswith("W/"):
        options["if_match"] = wanted.expected.etag  # a server may ignore it
    result = require_obstore().get(store, wanted.key, options=options)
    identity = _identity(result.meta, wanted.path)
    if wanted.expected is not None and identity != wanted.expected:
        return Answer((), identity)  # the caller compares it
    begin, end = wanted.begin, min(wanted.end, identity.nbytes)
    if tuple(result.range) != (begin, end):
        first, stop = result.range
        raise RequestError("wrong", f"bytes {first:,} to {stop:,} instead of {begin:,} to {end:,}")
    watch = current_watch()
    watch.begin()
    pieces = []
    for piece in result.stream(min_chunk_size=watch.piece_bytes):
        pieces.append(piece)
        watch.add(len(piece))
    watch.end()
    num_bytes = sum(map(len, pieces))
    if num_bytes != end - begin:
        raise RequestError("wrong", f"{num_bytes:,} bytes instead of {end - begin:,}")
    return Answer(pieces, identity)


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
