"""An object of a server that sends no parts of files (it ignores Range): read from its beginning, in order.

The loader reads such an object by one request at a time, in the order of the offsets. Bytes between two reads are
received and dropped. A read before the place of the last one begins the object again. So memory stays as small as with
ranges, and a load that needs few tensors receives most of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from stio.runtime.calls import Call
from stio.runtime.locks import new_lock
from stio.runtime.memory import Region
from stio.storage.base import Identity, Requests
from stio.storage.checks import cut_short
from stio.storage.remote.answers import RateWatch, require_no_page
from stio.storage.remote.failures import WrongAnswerError, failure_of
from stio.storage.remote.requests import Attempts, Requester
from stio.storage.remote.stores import require_obstore

T = TypeVar("T")


class WholeObject:
    """One object of which only the whole can be requested, in the state in which it was opened; a `Source`.

    Args:
        requester: Makes its requests.
        key: Its name in the store.
        path: Its URL without secrets.
        identify: Returns the identity by obstore's description of an object.
        requests: Size of the reads of a load.
        head_bytes: So many bytes, or some more, are read when it is opened, and kept for the header.
        target: Makes of regions what is filled with parts of some memory.

    Raises:
        StioError: It cannot be read.
    """

    def __init__(
        self,
        requester: Requester,
        key: str,
        path: str,
        *,
        identify: Callable[[Any], Identity],
        requests: Requests,
        head_bytes: int,
        target: Callable[[Sequence[Region]], Any],
    ) -> None:
        self.path = path
        """See above."""
        self.requests = replace(requests, num_in_flight=1)
        """See `RequestedSource`."""
        self._requester = requester
        self._key = key
        self._identify = identify
        self._target = target
        self._lock = new_lock()
        self._stream: Any = None
        self._piece: Any = b""  # the bytes that the stream gave last
        self._begin = 0  # their offset
        self.identity, self._head = self._repeated(lambda: self._open(head_bytes), None)
        """The state of the object."""

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on; see `RemoteSource.read_into`."""
        end = offset + sum(region.nbytes for region in regions)
        if end == offset:
            return
        if end > self.identity.nbytes:
            raise cut_short(self.path, self.identity.nbytes, end - max(offset, self.identity.nbytes))
        if end <= len(self._head):
            self._target(regions).fill(self._head, offset, end)
            return
        with self._lock:
            self._repeated(lambda: self._read(offset, end, self._target(regions)), self.identity)

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the server has another state of the object by now, or none."""
        found = self._requester.run(self._get, self.path, expected=self.identity)
        self.identity.require_same(self._identify(found.meta), self.path)

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

    def _open(self, head_bytes: int) -> tuple[Identity, bytes]:
        result = self._requester.begin(self._get).result()
        identity = self._identify(result.meta)
        stream, head = self._pieces(result), b""
        while len(head) < min(head_bytes, identity.nbytes):
            head += bytes(self._next(stream))
        require_no_page(str(result.attributes.get("Content-Type", "")), head)
        return identity, head

    def _pieces(self, result: Any) -> Any:
        """Return the iterator of the bytes of an answer, in pieces that come within the time of a stall."""
        return iter(result.stream(min_chunk_size=RateWatch(self._requester.patience.stall_seconds).piece_bytes))

    def _next(self, stream: Any) -> Any:
        """Return the next bytes of a stream, which has more.

        Raises:
            WrongAnswerError: It has ended.
        """
        watch = RateWatch(self._requester.patience.stall_seconds, in_pieces=True)
        watch.begin()
        piece = Call(lambda: next(stream, None), check=watch.check).result()
        if not piece:
            raise WrongAnswerError("the answer has ended early")
        return piece

    def _read(self, offset: int, end: int, target: Any) -> None:
        stream, self._stream = self._stream, None  # kept again if the read succeeds
        if stream is None or offset < self._begin:
            result = self._requester.begin(self._get).result()
            self.identity.require_same(self._identify(result.meta), self.path)
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
