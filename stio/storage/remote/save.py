"""A save to a store: objects under their final names, and one put that publishes them.

A directory gets shards whose names hold the save's id, so no old object is overwritten; its index is put last, only if
the store still has the index that the save found (If-Match, If-None-Match), and that put is the commit. One file is one
multipart upload, whose completion is the commit. There are no renames, no locks and no journal: whatever happens before
the commit, readers have the old checkpoint, and what was uploaded by then is unused (`collect_garbage`).

The answer to a commit may be lost. Then the store is asked what it has; as long as it cannot say, nothing is removed.
"""

from __future__ import annotations

import errno
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

import numpy as np

from stio.errors import CheckpointNotFoundError, CommitUncertainError, ConcurrentSaveError, StioError, StorageError
from stio.format.index import parse_index
from stio.format.naming import (
    FILE_SUFFIX,
    INDEX_SUFFIX,
    MANIFEST_SUFFIX,
    index_name,
    is_checkpoint_file,
    is_of_save,
    manifest_name,
    shard_name,
    suffix_of_other_kind,
)
from stio.runtime import memory
from stio.runtime.calls import LOOK_SECONDS, Call
from stio.runtime.locks import Condition
from stio.runtime.log import log
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled
from stio.runtime.workers import WorkerPool, is_interrupted
from stio.storage.base import FileWriter, Note, Transaction
from stio.storage.commit.recovery import MAX_AGE_SECONDS, GarbageReport
from stio.storage.remote.failures import Failure, failure_of
from stio.storage.remote.source import RemoteRoot
from stio.storage.remote.stores import locate, require_obstore

T = TypeVar("T")

State: TypeAlias = dict[str, Any]
"""What names the state of an object in a conditional put; {}: there is none."""

_MIB = 1 << 20

PART_BYTES = 8 << 20
"""One part of an upload. With 16 under way, 60 MB/s a connection give 1 GB/s."""

NUM_IN_FLIGHT = 16
"""Parts of one object under way at one time: 128 MiB, beside the staging memory."""

_MOST_PARTS = 10_000
"""Of one object, by the stores' rules."""

_ID_KEY = "stiosave"  # Azure allows names of variables only
"""Metadata of an object that is a checkpoint of its own: the id of the save that made it."""


class Folder:
    """The objects below the URL of a root that a save reads, puts and deletes. Each method blocks.

    Args:
        root: The directory.
    """

    def __init__(self, root: RemoteRoot) -> None:
        self._root = root
        self.path = root.path
        """The URL without secrets."""
        self.patience = root.requester.patience
        """How often requests are repeated."""
        self._upload_store: Any = None

    def key(self, name: str) -> str:
        """Return the name of an object in the store."""
        prefix = self._root.location.key
        return f"{prefix}/{name}" if prefix else name

    def read(self, name: str) -> tuple[bytes, State] | None:
        """Return the content of a small object, and what names its state in a conditional put; None without it.

        Raises:
            StioError: The store cannot be read.
        """

        def get(store: Any) -> tuple[bytes, State]:
            result = require_obstore().get(store, self.key(name))
            return bytes(result.bytes()), _state_of(result.meta)

        try:
            return self._run(get, name)
        except CheckpointNotFoundError:
            return None

    def has_id(self, name: str, save_id: str) -> bool:
        """Return whether an object was uploaded by a save.

        Raises:
            StioError: The store cannot be read.
        """

        def get(store: Any) -> bool:
            result = require_obstore().get(store, self.key(name), options={"range": (0, 1)})
            return bool(result.attributes.get(_ID_KEY) == save_id)

        try:
            return self._run(get, name)
        except CheckpointNotFoundError:
            return False

    def list(self) -> dict[str, float]:
        """Return the names of the objects in it, with the times of their last change.

        Raises:
            StorageError: There is no such bucket or container, or it cannot be listed.
        """
        prefix = self._root.location.key
        start = len(prefix) + 1 if prefix else 0
        try:
            found = self._run(lambda store: require_obstore().list_with_delimiter(store, prefix=prefix or None), "")
        except CheckpointNotFoundError as error:
            message = "there is no such bucket or container"
            raise StorageError(message, path=self.path, errno=errno.ENOENT) from error
        return {one["path"][start:]: one["last_modified"].timestamp() for one in found["objects"]}

    def put_once(self, name: str, data: bytes, mode: Any) -> State:
        """Put a small object under a condition, in one attempt; return its state.

        Raises:
            Exception: What obstore raises; see `stio.storage.remote.failures`.
        """

        def put(store: Any) -> State:
            return _state_of(require_obstore().put(store, self.key(name), data, mode=mode, use_multipart=False))

        return self._root.requester.begin(put).result()

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, several at one time; those that do not exist are no error.

        Raises:
            StioError: The store refuses it.
        """
        left = iter([*names])

        def work() -> None:
            while (name := next(left, None)) is not None:  # one step: several workers call it
                with suppress(CheckpointNotFoundError):
                    self._run(partial(_delete, key=self.key(name)), name)

        WorkerPool("delete").run(work, min(len(names), NUM_IN_FLIGHT))

    def upload(self, name: str, parts: Iterator[Any], *, part_bytes: int, is_one: bool, save_id: str) -> str:
        """Upload an object of parts, and return its ETag; an error of the iterator aborts it.

        Args:
            name: Its name.
            parts: Its bytes.
            part_bytes: Size of each part but the last.
            is_one: There is only one.
            save_id: Stored with it; "": nothing.

        Raises:
            Exception: What obstore raises, or the iterator.
        """
        if self._upload_store is None:
            self._upload_store = self._root.new_store(num_retries=self.patience.num_attempts - 1)
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

    def _run(self, request: Callable[[Any], T], name: str) -> T:
        path = f"{self.path}/{name}" if name else self.path
        return self._root.requester.run(request, path, work="save")


def _state_of(meta: Any) -> State:
    return {key: meta[key] for key in ("e_tag", "version") if meta[key] is not None}


def _delete(store: Any, *, key: str) -> None:
    require_obstore().delete(store, key)


@dataclass(frozen=True, slots=True)
class RemoteDestination:
    """A directory or a file in a store; a `Destination`."""

    root: RemoteRoot
    """The directory, or the one that holds the file."""
    name: str = ""
    """Name of the file; "": the checkpoint is a directory."""

    def begin(
        self,
        *,
        num_shards: int,
        filename_pattern: str = "model{suffix}.safetensors",
        shard_names: Literal["auto", "hub"] = "auto",
        commit: Literal["index", "files"] = "index",
        durability: Literal["full", "none"] = "full",
    ) -> Transaction:
        """Begin one save; reads what the store has. `durability` has no meaning: a store keeps what it has confirmed.

        Raises:
            ValueError: Files would have to be replaced one by one.
            StioError: The store cannot be read.
        """
        if shard_names != "auto" or commit != "index":
            raise ValueError("shard_names= and commit= are for directories of this machine: a store has no renames")
        if self.name:
            return _OneObject(Folder(self.root), self.name)
        return _Directory(Folder(self.root), num_shards, filename_pattern)

    def collect_unused(self, *, max_age_seconds: float = MAX_AGE_SECONDS, dry_run: bool = False) -> GarbageReport:
        """Delete the shards of saves that did not commit.

        Uploads whose process was killed are no objects, and are not found; a rule of the bucket ends them.

        Args:
            max_age_seconds: Younger shards stay: no lock shows whether their save is under way.
            dry_run: Delete nothing.

        Raises:
            StioError: The store cannot be read, or refuses to delete.
        """
        folder = Folder(self.root)
        objects = folder.list()
        used: set[str] = set()
        for name in objects:
            found = folder.read(name) if name.endswith(INDEX_SUFFIX) else None
            if found is not None:
                used |= {*parse_index(found[0], path=f"{folder.path}/{name}").shards}
        unused = {
            name: time.time() - changed for name, changed in objects.items() if is_of_save(name) and name not in used
        }
        old = sorted(name for name, age in unused.items() if age >= max_age_seconds)
        if not dry_run:
            folder.delete(old)
        deleted, kept = (
            tuple(f"{folder.path}/{name}" for name in names) for names in (old, sorted({*unused} - {*old}))
        )
        return GarbageReport(unused=deleted, kept=kept)


def open_destination(url: str) -> RemoteDestination:
    """Return a URL as a destination; see `stio.storage.open.open_destination`.

    Raises:
        ValueError: It looks like a file of another kind.
    """
    location = locate(url)
    folder, _, name = location.key.rpartition("/")
    suffix = suffix_of_other_kind(name)
    if suffix is not None and not url.endswith("/"):
        raise ValueError(f"the destination looks like a file of another kind ({suffix}), and a save writes safetensors")
    if not location.key.endswith(FILE_SUFFIX) or url.endswith("/"):
        return RemoteDestination(RemoteRoot(location))
    return RemoteDestination(RemoteRoot(replace(location, key=folder)), name)


class _Remote:
    """What both kinds of transactions have in common.

    Args:
        folder: The directory.
        last: The object whose put is the commit.
    """

    path: str
    """The destination."""
    shard_names: tuple[str, ...]
    """See `Transaction`."""

    def __init__(self, folder: Folder, last: str) -> None:
        self._folder, self._last = folder, last
        self._id = os.urandom(8).hex()
        self._found = self._state(last)
        self._etag = ""  # of the new checkpoint
        self._notes: dict[str, tuple[bytes | None, State]] = {}  # as they were found
        self._uploads: list[_Upload] = []
        self._ended = False

    def _state(self, name: str) -> State:
        found = self._folder.read(name)
        return {} if found is None else found[1]

    def read_note(self, name: str) -> bytes | None:
        """Return the content of a small object."""
        data, state = self._folder.read(name) or (None, {})
        self._notes[name] = data, state
        return data

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        """Publish the checkpoint; see `Transaction`. Old shards are deleted then; readers of those get an error.

        Raises:
            CommitUncertainError: The store does not say whether it has the new checkpoint. Nothing is deleted.
        """
        mine: dict[str, State] = {}
        try:
            for note in notes:
                _, state = self._notes[note.name]
                mine[note.name] = self._change(note.name, note.before, state)
            self._publish(index or b"")
        except CommitUncertainError:
            self._ended = True  # what was uploaded stays: the checkpoint may consist of it
            raise
        except StioError:
            for name, state in mine.items():
                with suppress(StioError):  # it belongs to another save by now
                    self._change(name, self._notes[name][0], state)
            raise
        self._ended = True
        try:
            for note in notes:
                self._change(note.name, note.after, mine[note.name])
            self._delete_old()
        except StioError as error:
            log(logging.WARNING, "%s: saved; what the old checkpoint left is still there: %s", self.path, error)

    def _change(self, name: str, data: bytes | None, state: State) -> State:
        """Put or delete a small object that is in a state; return its new state.

        Raises:
            ConcurrentSaveError: It is in another state.
            StioError: The store refuses it, or does not say whether it has it.
        """
        if data is not None:
            return self._put(name, data, state)
        if state:  # a store has no conditional deletion
            if self._state(name).get("e_tag") != state.get("e_tag"):
                raise self._conflict()
            self._folder.delete([name])
        return {}

    def _put(self, name: str, data: bytes, state: State) -> State:
        """Put a small object in place of one in a state ({}: none), and return its state.

        Raises:
            ConcurrentSaveError: It is in another state.
            CommitUncertainError: The store does not say whether it has it.
            StioError: The store refuses it.
        """
        patience, attempt = self._folder.patience, 1
        while True:
            try:
                return self._folder.put_once(name, data, state or "create")
            except Exception as error:
                failure = failure_of(error)
            try:
                now, new_state = self._folder.read(name) or (None, {})
            except StioError as error:
                raise self._uncertain(failure) from error
            if now == data:
                return new_state  # the answer was lost
            if not failure.may_have_worked:
                raise self._error(failure)
            if attempt >= patience.num_attempts:
                raise self._uncertain(failure)  # the put may be on its way still
            time.sleep(patience.pause_seconds(attempt))
            attempt += 1

    def _conflict(self) -> ConcurrentSaveError:
        return ConcurrentSaveError("another save changed the destination at the same time", path=self.path)

    def _publish(self, index: bytes) -> None:
        raise NotImplementedError

    def _delete_old(self) -> None:
        """Delete what the new checkpoint has replaced."""

    def roll_back(self) -> None:
        """Abort the uploads, and delete what was uploaded, as far as the store answers. Never raises."""
        if self._ended:
            return
        self._ended = True
        uploaded = [upload.name for upload in self._uploads if upload.abort()]
        if uploaded and self._last not in uploaded:
            with suppress(StioError, Cancelled):
                self._folder.delete(uploaded)

    def _uncertain(self, failure: Failure) -> CommitUncertainError:
        return CommitUncertainError(
            f"the store does not say whether the checkpoint is published ({failure.kind}: {failure.cause}); "
            "look at it, or save again",
            path=f"{self._folder.path}/{self._last}",
        )

    def _error(self, failure: Failure) -> StioError:
        path = f"{self._folder.path}/{self._last}"
        return failure.error(path, 1, stall_seconds=self._folder.patience.stall_seconds, work="save")


class _Directory(_Remote):
    """A save of shards and an index; a `Transaction`.

    Args:
        folder: The directory.
        num_shards: Number of shards.
        pattern: Names of the files.
    """

    takes_index = True
    """See `Transaction`."""

    def __init__(self, folder: Folder, num_shards: int, pattern: str) -> None:
        self.path = folder.path
        """The destination."""
        super().__init__(folder, index_name(pattern))
        # After the look at the index: shards of a save that commits in between would not be deleted otherwise. Those of
        # one that commits later are in it too; it cannot commit any more once this one has.
        self._old = [name for name in folder.list() if name != self._last and is_checkpoint_file(name, pattern)]
        self._manifest = manifest_name(pattern)
        self.shard_names = tuple(shard_name(pattern, k, num_shards, save_id=self._id) for k in range(num_shards))

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Return the writers of the shards. A store has no space to reserve; each upload begins with its first byte."""
        names = zip(self.shard_names, nbytes, strict=True)
        self._uploads = [_Upload(self._folder, name, size) for name, size in names]
        return self._uploads

    def _publish(self, index: bytes) -> None:
        self._etag = self._put(self._last, index, self._found).get("e_tag", "")

    def _delete_old(self) -> None:
        self._folder.delete(self._old)

    def published(self) -> RemoteFiles:
        """Return what was published, for its deletion later."""
        return RemoteFiles(self._folder, self._last, self._etag, (*self.shard_names, self._manifest))


class _OneObject(_Remote):
    """A save of one file; a `Transaction`. Two saves at one time: the one that ends last is there.

    Args:
        folder: The directory.
        name: Name of the file.
    """

    takes_index = False
    """See `Transaction`."""

    def __init__(self, folder: Folder, name: str) -> None:
        self.path = f"{folder.path}/{name}"
        """The destination."""
        folder.list()  # whether there is such a bucket
        super().__init__(folder, name)
        self.shard_names = (name,)

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Return the writer of the file, which `commit` completes."""
        (size,) = nbytes
        self._uploads = [_Upload(self._folder, self._last, size, save_id=self._id)]
        return self._uploads

    def _publish(self, index: bytes) -> None:
        (upload,) = self._uploads
        if self._state(self._last).get("e_tag") != self._found.get("e_tag"):
            raise self._conflict()
        failure = upload.complete()
        if failure is None:
            self._etag = upload.etag
            return
        try:
            if self._folder.has_id(self._last, self._id):
                return  # the answer was lost
        except StioError as error:
            raise self._uncertain(failure) from error
        # obstore has aborted an upload of several parts, so that it cannot be completed any more.
        raise self._uncertain(failure) if failure.may_have_worked and upload.is_one else self._error(failure)

    def published(self) -> RemoteFiles:
        """Return what was published, for its deletion later."""
        return RemoteFiles(self._folder, self._last, self._etag, (self._last + MANIFEST_SUFFIX,))


class _Upload:
    """One object; a `FileWriter`. obstore takes its parts from an iterator, and aborts the upload if that raises.

    Args:
        folder: The directory.
        name: Name of the object.
        nbytes: Its size.
        save_id: The object is the checkpoint: `complete` publishes it, and not `finish`. Stored with it.
    """

    def __init__(self, folder: Folder, name: str, nbytes: int, *, save_id: str = "") -> None:
        self._folder, self.name, self._nbytes, self._save_id = folder, name, nbytes, save_id
        self.path = f"{folder.path}/{name}"
        """URL without secrets."""
        self._part_bytes = max(PART_BYTES, -(-nbytes // _MOST_PARTS // _MIB) * _MIB)
        self.is_one = nbytes <= self._part_bytes
        """Whether it is one put, and not an upload of parts."""
        self._changed = Condition()
        self._at = 0  # bytes that were taken from the writers, who come in any order
        self._part = np.empty(0, np.uint8)
        self._filled = 0
        self._ready: deque[Any] = deque()
        self._ends = self._stopped = self._is_over = False
        self._call: Call[None] | None = None
        self._failure: Failure | None = None
        self.etag = ""
        """Its ETag, once it is complete."""

    def write_from(self, offset: int, region: Region) -> None:
        """Take a block; wait until those before it were taken, and while enough parts are under way."""
        with self._changed:
            self._wait(lambda: self._at == offset)
            if self._call is None:
                self._call = Call(self._put, on_own_thread=True)
        at = 0
        while at < region.nbytes:
            if self._filled == len(self._part):
                self._part = np.empty(min(self._part_bytes, self._nbytes - offset - at), np.uint8)
                self._filled = 0
            length = min(region.nbytes - at, len(self._part) - self._filled)
            move = memory.move if length >= memory.HOLD_BYTES else memory.move_holding
            move(self._part.ctypes.data + self._filled, region.address + at, length)
            at += length
            self._filled += length
            if self._filled == len(self._part):
                with self._changed:
                    self._wait(lambda: not self._ready)
                    self._ready.append(self._part)
                    self._changed.notify_all()
        with self._changed:
            self._at = offset + region.nbytes
            self._changed.notify_all()

    def finish(self) -> None:
        """Complete the upload, unless that is the commit.

        Raises:
            StorageError: It failed.
        """
        if not self._save_id and (failure := self.complete()) is not None:
            raise self._error(failure)

    def complete(self) -> Failure | None:
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
        return self._failure

    def abort(self) -> bool:
        """End the upload; return whether there may be something of it in the store."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._call is None:
            return False
        if not self._is_over:
            with suppress(Cancelled):
                self._call.result()
        return True

    def _error(self, failure: Failure) -> StioError:
        return failure.error(
            self.path,
            self._folder.patience.num_attempts if failure.may_succeed else 1,
            stall_seconds=self._folder.patience.stall_seconds,
            work="save",
        )

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Wait, under the condition, until something holds.

        Raises:
            Cancelled: The thread should end.
            StorageError: The upload has failed.
        """
        while True:
            if self._failure is not None:
                raise self._error(self._failure)
            if self._stopped or is_interrupted():
                raise Cancelled
            if ready():
                return
            self._changed.wait(LOOK_SECONDS)

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
        except Exception as error:
            self._failure = failure_of(error)
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
            del part


class _StoppedError(Exception):
    """Raised to obstore, which aborts the upload then."""


# Old checkpoints, and what interrupted saves left.


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """What a save has published in a store; for `keep_last`, a `Published`."""

    folder: Folder
    """The directory."""
    first: str
    """The object that is the checkpoint to readers: an index, or the only file."""
    etag: str
    """Its ETag; "": unknown, because the answer was lost."""
    others: tuple[str, ...]
    """The objects that it names, and the manifest."""

    @property
    def files(self) -> Set[str]:
        """The URLs of all."""
        return {f"{self.folder.path}/{name}" for name in (self.first, *self.others)}

    def remove(self, *, spare: Set[str] = frozenset()) -> None:
        """Delete the checkpoint, unless another save has replaced it; what it names is deleted after it.

        Args:
            spare: URLs of objects that newer checkpoints consist of.

        Raises:
            StioError: The store refuses it.
        """
        found = self.folder.read(self.first)
        if f"{self.folder.path}/{self.first}" in spare:
            return  # a save has replaced it, and deleted its shards
        if found is not None and found[1].get("e_tag") != self.etag:
            log(logging.WARNING, "%s/%s: it was replaced, and is not deleted", self.folder.path, self.first)
            return
        self.folder.delete([self.first, *self.others])
