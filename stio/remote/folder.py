"""The objects below a URL that a save reads, puts, uploads and deletes.

An upload copies bytes into parts, and obstore sends them. obstore takes the parts of an object from an iterator, sends
several at one time without a copy, and frees each when the store has it. It aborts the upload if the iterator raises.
The memory of all parts of a save has one bound.
"""

from __future__ import annotations

import errno
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import numpy as np

from stio.errors import CheckpointNotFoundError, StioError, StorageError
from stio.process import Condition
from stio.remote.requests import RequestFailure, failure_of, for_each
from stio.remote.source import RemoteRoot
from stio.remote.stores import require_obstore
from stio.runtime import Cancelled, calls, is_interrupted, mark_progress, memory
from stio.runtime.memory import Region
from stio.text import log

T = TypeVar("T")

State: TypeAlias = dict[str, Any]
"""What names the state of an object in a conditional put; {}: there is none."""

NUM_IN_FLIGHT = 16
"""Requests of one object under way at one time."""

_MAX_RETRIES = 1000

_ID_KEY = "stiosave"  # Azure allows names of variables only
"""Metadata of an object that is a checkpoint of its own: the id of the save that made it."""


class Folder:
    """The objects below the URL of a root. Each method blocks.

    Args:
        root: The directory.
    """

    def __init__(self, root: RemoteRoot) -> None:
        self.root = root
        """See above."""
        self.path = root.path
        """The URL without secrets."""
        self.patience = root.requester.patience
        """How often requests are repeated."""
        self._upload_store: Any = None

    def key(self, name: str) -> str:
        """Return the name of an object in the store."""
        return self.root.location.below(name).key

    def read(self, name: str) -> tuple[bytes, State] | None:
        """Return the content of a small object, and its state; None without it.

        Raises:
            StioError: The store cannot be read, or has no such bucket.
        """

        def get(store: Any) -> tuple[bytes, State]:
            result = require_obstore().get(store, self.key(name))
            return bytes(result.bytes()), _state_of(result.meta)

        with suppress(CheckpointNotFoundError):
            return self._run(get, name)
        return None

    def state(self, name: str) -> State:
        """Return the state of an object, of which one byte at most is read.

        Raises:
            StioError: The store cannot be read, or has no such bucket.
        """
        return self.state_and_id(name)[0]

    def state_and_id(self, name: str) -> tuple[State, str]:
        """Return the state of an object, and the id of the save that uploaded it; "": it has none.

        Raises:
            StioError: The store cannot be read, or has no such bucket.
        """

        def get(store: Any) -> tuple[State, str]:  # not a HEAD: without a body the store cannot say what is missing
            result = require_obstore().get(store, self.key(name), options={"range": (0, 1)})
            result.bytes()
            return _state_of(result.meta), str(result.attributes.get(_ID_KEY, ""))

        try:
            return self._run(get, name)
        except CheckpointNotFoundError:
            return {}, ""
        except StorageError as error:
            if error.errno != errno.EINVAL:  # it has no first byte
                raise
        meta = self._meta(name)
        return (_state_of(meta) if meta else {}), ""

    def list(self, known: Callable[[], Iterable[str]] | None = None) -> dict[str, Any]:
        """Return what obstore says of each object in it (`e_tag`, `last_modified`), by name.

        Args:
            known: Returns the names to look for if obstore cannot list the directory because of one of its keys. None:
                that is an error.

        Raises:
            StorageError: There is no such bucket or container, or it cannot be listed.
        """
        try:
            return self.root.list_objects("save")
        except CheckpointNotFoundError as error:
            message = "there is no such bucket or container"
            raise StorageError(message, path=self.path, errno=errno.ENOENT) from error
        except StorageError as error:
            if error.errno != errno.EILSEQ or known is None:
                raise
            log(self.root.requester.warnings.level(), "%s. The save replaces what the index names", error)
            return {name: meta for name in known() if (meta := self._meta(name))}

    def _meta(self, name: str) -> Any:
        with suppress(CheckpointNotFoundError):
            return self._run(lambda store: require_obstore().head(store, self.key(name)), name)
        return None

    def put_once(self, name: str, data: bytes, mode: Any) -> State:
        """Put a small object under a condition, in one attempt; return its state.

        Raises:
            Exception: What obstore raises; see `stio.remote.requests`.
        """

        def put(store: Any) -> State:
            return _state_of(require_obstore().put(store, self.key(name), data, mode=mode, use_multipart=False))

        return self.root.requester.begin(put).result()

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, several at one time; those that do not exist are no error.

        Raises:
            StioError: The store refuses it.
        """

        def delete_one(name: str) -> None:
            with suppress(CheckpointNotFoundError):
                self._run(lambda store: require_obstore().delete(store, self.key(name)), name)

        for_each(names, delete_one, "delete", NUM_IN_FLIGHT)

    def upload(self, name: str, parts: Iterator[Any], *, part_bytes: int, is_one: bool, save_id: str) -> str:
        """Upload an object of parts, and return its ETag; an error of the iterator aborts it.

        Args:
            name: Its name.
            parts: Its bytes. obstore keeps each until the store has it, or the upload ends.
            part_bytes: Size of each part but the last.
            is_one: There is only one.
            save_id: Stored with it; "": nothing.

        Raises:
            Exception: What obstore raises, or the iterator.
        """
        if self._upload_store is None:
            self._upload_store = self.root.new_store(retry_config=self._retries())
        result = require_obstore().put(
            self._upload_store,
            self.key(name),
            parts,
            attributes={_ID_KEY: save_id} if save_id else None,
            use_multipart=not is_one,
            chunk_size=part_bytes,
            max_concurrency=NUM_IN_FLIGHT,
        )
        return result["e_tag"] or ""

    def _retries(self) -> dict[str, Any]:
        """Return how obstore repeats the requests of uploads: every failure for the same time."""
        if not self.patience.busy_seconds:
            return {"max_retries": self.patience.num_attempts - 1}
        pauses = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=10), "base": 2}
        duration = timedelta(seconds=self.patience.busy_seconds)
        return {"max_retries": _MAX_RETRIES, "retry_timeout": duration, "backoff": pauses}

    def _run(self, request: Callable[[Any], T], name: str) -> T:
        return self.root.requester.run(request, f"{self.path}/{name}", work="save")


def _state_of(meta: Any) -> State:
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


_Bytes: TypeAlias = np.ndarray[Any, np.dtype[np.uint8]]

_MIB = 1 << 20

PART_BYTES = 8 << 20
"""One part of an upload. With 16 under way, 60 MB/s a connection give 1 GB/s."""

MIN_PART_BYTES = 5 << 20
"""By the rules of S3, for all parts but the last."""

DEFAULT_BYTES = (NUM_IN_FLIGHT + 2) * PART_BYTES
"""Memory of parts: those that are sent, one that is full, one that is being filled."""

_MAX_PARTS = 10_000
"""Of one object, by the stores' rules."""


class PartMemory:
    """Memory of the parts of one save, from the first byte in a part until the store has it; then it is used again.

    An object of which no part is in memory always gets one: otherwise objects that are begun would wait for each other.

    Args:
        max_bytes: Most bytes of parts; by the rule above, one part more for each further object that is begun.
    """

    def __init__(self, max_bytes: int = DEFAULT_BYTES) -> None:
        self._max_bytes = max_bytes
        self.part_bytes = min(PART_BYTES, max(MIN_PART_BYTES, max_bytes // 4))
        """Size of a part, unless the object would have too many."""
        self.changed = Condition()
        """Guards this and the uploads."""
        self._held: dict[str, int] = {}  # bytes in memory, by object
        self._freed: deque[tuple[str, _Bytes]] = deque()  # by obstore's threads, which must not wait for the lock
        self._free: list[_Bytes] = []

    def has_room(self, name: str, nbytes: int) -> bool:
        """Return whether an object may take a part now. The caller holds the condition."""
        while self._freed:
            freed, whole = self._freed.popleft()
            self._held[freed] -= len(whole)
            self._free.append(whole)
        return not self._held.get(name) or sum(self._held.values()) + nbytes <= self._max_bytes

    def take(self, name: str, nbytes: int, *, whole_bytes: int) -> _Bytes:
        """Take a part for an object. The caller holds the condition.

        Args:
            name: Name of the object.
            nbytes: Size of the part.
            whole_bytes: Size of the object's other parts.
        """
        if self._free and len(self._free[-1]) != whole_bytes:
            self._free.clear()
        whole = self._free.pop() if self._free else np.empty(whole_bytes, np.uint8)
        self._held[name] = self._held.get(name, 0) + whole_bytes
        part = whole[:nbytes]  # obstore holds this object
        weakref.finalize(part, self._give_back, name, whole).atexit = False
        return part

    def _give_back(self, name: str, whole: _Bytes) -> None:
        self._freed.append((name, whole))
        self.changed.wake()


class Upload:
    """One object; a `FileWriter` in order. With its last byte the upload is completed, unless that is the commit.

    Args:
        folder: The directory.
        name: Name of the object.
        nbytes: Its size.
        parts: Memory of the save's parts.
        save_id: The object is the checkpoint: `complete` publishes it, and not `finish`. Stored with it.
    """

    is_ordered = True
    """See `FileWriter`."""

    def __init__(self, folder: Folder, name: str, nbytes: int, parts: PartMemory, *, save_id: str = "") -> None:
        self._folder, self.name, self._nbytes, self._save_id = folder, name, nbytes, save_id
        self.path = f"{folder.path}/{name}"
        """URL without secrets."""
        self._memory, self._changed = parts, parts.changed
        part_bytes = max(parts.part_bytes, -(-nbytes // _MAX_PARTS // _MIB) * _MIB)
        self.is_one = nbytes <= part_bytes
        """Whether it is one put, and not an upload of parts."""
        self._part_bytes = min(part_bytes, nbytes)
        self._at = 0  # bytes that were taken from the writers, which call in any order
        self._part: _Bytes = np.empty(0, np.uint8)
        self._filled = 0
        self._ready: deque[Any] = deque()
        self._ends = self._stopped = self._is_over = False
        self._call: calls.Call[None] | None = None
        self._error: BaseException | None = None
        self.etag = ""
        """Its ETag, once it is complete."""

    def write_from(self, offset: int, region: Region) -> None:
        """Take a block; wait until those before it were taken, and while too many parts are in memory."""
        with self._changed:
            self._wait(lambda: self._at == offset)
            if self._call is None:
                try:
                    self._call = calls.Call(self._put, on_own_thread=True)
                except RuntimeError as error:
                    text = f"the upload cannot begin, the system starts no more threads: {error}"
                    raise StorageError(text, path=self.path) from None
        at = 0
        while at < region.nbytes:
            if self._filled == len(self._part):
                self._part, self._filled = self._new_part(min(self._part_bytes, self._nbytes - offset - at)), 0
            length = min(region.nbytes - at, len(self._part) - self._filled)
            memory.move(self._part.ctypes.data + self._filled, region.address + at, length)
            at += length
            self._filled += length
            if self._filled == len(self._part):
                with self._changed:
                    self._ready.append(self._part)
                    self._part, self._filled = np.empty(0, np.uint8), 0
                    self._changed.notify_all()
        with self._changed:
            self._at = offset + region.nbytes
            self._ends = self._at == self._nbytes and not self._save_id
            self._changed.notify_all()

    def _new_part(self, nbytes: int) -> _Bytes:
        with self._changed:
            self._wait(lambda: not self._ready and self._memory.has_room(self.name, self._part_bytes))
            return self._memory.take(self.name, nbytes, whole_bytes=self._part_bytes)

    def finish(self) -> None:
        """Wait until the upload is complete, unless that is the commit.

        Raises:
            StorageError: It failed.
        """
        if not self._save_id and (failure := self.complete()) is not None:
            raise self._error_of(failure)

    def complete(self) -> RequestFailure | None:
        """Complete the upload; return what failed.

        Raises:
            Cancelled: The thread should end.
        """
        with self._changed:
            self._ends = True
            self._changed.notify_all()
        assert self._call is not None
        self._call.result()
        self._is_over = True
        return None if self._error is None else failure_of(self._error)

    @property
    def may_complete_yet(self) -> bool:
        """Whether the store may complete the upload, although it has failed: it was one put, or it was not aborted."""
        # obstore reports the failure of the abort, and not the one that led to it.
        return self._error is not None and (
            failure_of(self._error).may_have_worked and (self.is_one or "performing DELETE" in str(self._error))
        )

    def stop(self) -> None:
        """Begin to end the upload; `abort` waits for it. Idempotent."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def abort(self) -> bool:
        """End the upload; return whether there may be something of it in the store."""
        self.stop()
        if self._call is None:
            return False
        if not self._is_over:
            with suppress(Cancelled):
                self._call.result()
        return True

    def _error_of(self, failure: RequestFailure) -> StioError:
        attempts = self._folder.patience.num_attempts if failure.may_succeed else 1
        return failure.error(self.path, attempts, work="save")

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait, under the condition, until something holds.

        Raises:
            Cancelled: The thread should end.
            StorageError: The upload has failed.
        """
        while True:
            if self._error is not None:
                raise self._error_of(failure_of(self._error))
            if self._stopped or is_interrupted():
                raise Cancelled
            if ready():
                return
            self._changed.wait(calls.LOOK_SECONDS)

    def _put(self) -> None:
        try:
            self.etag = self._folder.upload(
                self.name,
                self._parts(),
                part_bytes=self._part_bytes,
                is_one=self.is_one,
                save_id=self._save_id,
            )
            if self._stopped and not self._save_id:
                self._folder.delete([self.name])  # a cancel came when all parts were under way
        except _StoppedError:
            pass
        except BaseException as error:
            self._error = error
        finally:
            with self._changed:
                self._changed.notify_all()

    def _parts(self) -> Iterator[Any]:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._ready or self._stopped or self._ends)
                if self._stopped:
                    raise _StoppedError
                if not self._ready:
                    return
                part = self._ready.popleft()
                self._changed.notify_all()
            yield part
            mark_progress()
            del part


class _StoppedError(Exception):
    """Raised to obstore, which aborts the upload then."""
