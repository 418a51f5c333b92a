"""A save to a store: objects under their final names, and one put that publishes them.

A directory gets shards whose names hold the save's id, so no old object is overwritten; its index is put last, only if
the store still has the index that the save found (If-Match, If-None-Match), and that put is the commit. One file is one
multipart upload, whose completion is the commit. There are no renames, no locks and no journal: whatever happens before
the commit, readers have the old checkpoint, and what was uploaded by then is unused (`collect_unused`).

The answer to a commit may be lost. Then the object in the store is read; as long as that fails, nothing is removed.

obstore lists no uploads. Those of S3 are listed and aborted by boto3, if that is installed.
Azure deletes the blocks of uploads itself after a week; other stores need a rule (`AbortIncompleteMultipartUpload`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from stio import clock
from stio.errors import (
    CommitUncertainError,
    ConcurrentSaveError,
    IndexFormatError,
    StioError,
    StorageError,
    printable,
)
from stio.format.files import FILE_SUFFIX, INDEX_SUFFIX, FileName, FilePattern, parse_index
from stio.remote.folder import DEFAULT_BYTES, MIN_PART_BYTES, Folder, PartMemory, State, Upload
from stio.remote.requests import Attempts, RequestFailure, failure_of, short_line
from stio.remote.source import RemoteRoot
from stio.remote.stores import locate, s3_client
from stio.runtime import Cancelled, calls
from stio.storage import Note, Root, Transaction
from stio.storage.commit import MAX_AGE_SECONDS, GarbageReport
from stio.text import log, without_secrets


@dataclass(frozen=True, slots=True)
class RemoteDestination:
    """A directory or a file in a store; a `Destination`."""

    root: RemoteRoot
    """The directory, or the one that holds the file."""
    name: str = ""
    """Name of the file; "": the checkpoint is a directory."""
    buffer_bytes: int = DEFAULT_BYTES
    """Memory of the parts that one save has under way."""

    def __str__(self) -> str:
        return f"{self.root.path}/{self.name}" if self.name else self.root.path

    def within(self, budget_bytes: int) -> tuple[RemoteDestination, int]:
        """Return the destination with memory of its own that fits a budget, and how much that is: half, or one part."""
        nbytes = max(MIN_PART_BYTES, min(DEFAULT_BYTES, budget_bytes // 2))
        return replace(self, buffer_bytes=nbytes), nbytes

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
            return _OneObject(Folder(self.root), self.buffer_bytes, self.name)
        return _Directory(Folder(self.root), self.buffer_bytes, num_shards, filename_pattern)

    def join(self, shard_names: Sequence[str]) -> Uploads:
        """Return the uploads of this process, of shards of a save that another process has begun.

        Args:
            shard_names: The names of all shards; see `Transaction`.
        """
        return Uploads(Folder(self.root), self.buffer_bytes, tuple(shard_names))

    def collect_unused(self, *, max_age_seconds: float = MAX_AGE_SECONDS, dry_run: bool = False) -> GarbageReport:
        """Delete the shards of saves that did not commit, and abort their uploads, also those of the only file.

        Args:
            max_age_seconds: What is younger stays: no lock shows whether its save is under way.
            dry_run: Change nothing.

        Raises:
            StioError: The store cannot be read, or refuses to delete.
        """
        folder, name = Folder(self.root), self.name
        objects = folder.list()
        used = {shard for key in objects if key.endswith(INDEX_SUFFIX) for shard in _shards_of(folder, key)}
        now = clock.now()
        ages = {
            key: now - meta["last_modified"].timestamp()
            for key, meta in objects.items()
            if FileName(key).is_of_save and key not in used
        }
        old = sorted(key for key, age in ages.items() if age >= max_age_seconds)
        uploads = [
            upload for upload in _uploads(folder) if FileName(upload.name).is_of_save or (name and upload.name == name)
        ]
        ended = [upload for upload in uploads if now - upload.began >= max_age_seconds]
        if not dry_run:
            folder.delete(old)
            for upload in ended:
                upload.abort()
        kept = {*ages} - {*old} | {upload.name for upload in uploads if upload not in ended}
        return GarbageReport(
            unused=tuple(f"{folder.path}/{key}" for key in old),
            aborted=tuple(f"{folder.path}/{upload.name}" for upload in ended),
            kept=tuple(f"{folder.path}/{key}" for key in sorted(kept)),
        )


def open_destination(url: str | Root) -> RemoteDestination:
    """Return a URL, or a root, as a destination; see `stio.storage.open.open_destination`.

    Raises:
        TypeError: A root of another kind.
        ValueError: It looks like a file of another kind.
    """
    if isinstance(url, RemoteRoot):
        return RemoteDestination(url)
    if not isinstance(url, str):
        raise TypeError(f"a destination is a path, a URL or a RemoteRoot, not {type(url).__name__}")
    location = locate(url)
    folder, _, name = location.key.rpartition("/")
    advice = "" if url.endswith("/") else FileName(name).advice_for_destination
    if advice:
        raise ValueError(f"the destination {printable(without_secrets(url))!r} {advice}")
    if not location.key.endswith(FILE_SUFFIX) or url.endswith("/"):
        return RemoteDestination(RemoteRoot(location))
    return RemoteDestination(RemoteRoot(replace(location, key=folder)), name)


class Uploads(Transaction):
    """What one process uploads of a save. Several may upload shards, each its own; one of them has the transaction.

    Args:
        folder: The directory.
        buffer_bytes: Memory of parts.
        shard_names: The names of all shards.
    """

    takes_index = False

    def __init__(self, folder: Folder, buffer_bytes: int, shard_names: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self.path, self.shard_names = folder.path, shard_names
        self._parts = PartMemory(buffer_bytes)
        self._kept: str | None = None
        self._shared = False

    def _create(self, nbytes: Sequence[int]) -> Sequence[Upload]:
        """Return the writers of the shards. A store has no space to reserve; each upload begins with its first byte."""
        names = zip(self.shard_names, nbytes, strict=True)
        return [Upload(self._folder, name, size, self._parts) for name, size in names]

    def stop(self) -> None:
        """Begin to end the uploads; `roll_back` waits for it. Idempotent."""
        for upload in self._writers:
            upload.stop()

    def leave(self) -> None:
        """Leave the objects, which are complete, to the process that publishes or deletes them."""
        self._after("leave")

    def _end(self) -> None:
        """Abort the uploads, and delete what was uploaded, as far as the store answers, if the save is rolled back.

        After a cancel it returns within a second, and a slow store deletes the rest while this process lives.
        """
        if self.state != "rolled back":
            return
        self.stop()
        uploaded = {upload.name for upload in self._writers if upload.abort()}
        if self._shared:
            uploaded.update(self.shard_names)
        uploaded.discard(self._kept or "")
        if uploaded:
            with suppress(StioError, Cancelled):  # a cancel leaves the deletions behind; they go on
                calls.Call(partial(self._folder.delete, sorted(uploaded))).result()


class RemoteTransaction(Uploads):
    """What both kinds of transactions have in common. Old shards are deleted at the end; readers of those get an error.

    Args:
        folder: The directory.
        buffer_bytes: Memory of parts.
        last: The object whose put is the commit.
    """

    is_recorded = True

    def __init__(self, folder: Folder, buffer_bytes: int, last: str) -> None:
        super().__init__(folder, buffer_bytes)
        self._last = self._kept = last
        self._id = os.urandom(8).hex()
        self._before = folder.state(last)
        self._state: State = {}  # of the new checkpoint
        self._notes: dict[str, tuple[bytes | None, State]] = {}  # as they were found
        self._written: dict[Note, State] = {}  # the notes as this save has left them

    def share(self) -> None:
        """Let other processes upload shards too (`RemoteDestination.join`). A roll back deletes all shards.

        The caller makes it, when it has told the others of a commit that failed: deletions may take long.
        """
        self._shared, self._rolls_back_at_once = True, False

    def read_note(self, name: str) -> bytes | None:
        """Return the content of a small object."""
        data, state = self._folder.read(name) or (None, {})
        self._notes[name] = data, state
        return data

    def _publish(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Publish the checkpoint; see `Transaction.commit`.

        Raises:
            CommitUncertainError: The store does not say whether it has the new checkpoint. Nothing is deleted.
        """
        try:
            for note in notes:
                self._written[note] = self._change(note.name, note.before, self._notes[note.name][1])
            self._put_last(index or b"")
        except CommitUncertainError:
            raise
        except StioError:
            for note, state in self._written.items():
                with suppress(StioError):  # it belongs to another save by now
                    self._change(note.name, self._notes[note.name][0], state)
            raise

    def _end(self) -> None:
        super()._end()
        if self.state == "published":
            try:
                for note, state in self._written.items():
                    self._written[note] = self._change(note.name, note.after, state)
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
            if not _is_same(self._folder.state(name), state):
                raise self._conflict()
            self._folder.delete([name])
        return {}

    def _put(self, name: str, data: bytes, state: State) -> State:
        """Put a small object in place of one in a state ({}: none), and return its state.

        Args:
            name: Its name.
            data: Its content.
            state: The state of what it replaces.

        Raises:
            ConcurrentSaveError: It is in another state.
            CommitUncertainError: The store does not say whether it has it, and its put is the commit.
            StioError: The store refuses it, or does not say whether it has it.
        """
        attempts = Attempts(self._folder.root.requester, f"{self._folder.path}/{name}", work="save")
        may_arrive = False  # an attempt may be on its way still
        while True:
            try:
                return self._folder.put_once(name, data, state or "create")
            except Exception as error:
                failure = failure_of(error)
            may_arrive |= failure.may_have_worked
            try:
                now, new_state = self._folder.read(name) or (None, {})
            except StioError as error:
                raise self._unknown(name, failure) from error
            if now == data:
                return new_state  # the answer was lost
            if failure.kind in ("changed", "missing"):
                raise self._conflict()
            try:
                attempts.failed(failure)
            except StioError as error:  # if an attempt may have worked, that put may be on its way still
                raise self._unknown(name, failure) if may_arrive else error from None

    def published(self) -> RemoteFiles:
        """Return what was published, for its deletion later."""
        shards: dict[str, State] = {name: {} for name in self.shard_names if name != self._last}
        notes = {note.name: state for note, state in self._written.items() if state}
        return RemoteFiles(self._folder, self._last, self._state, shards | notes)

    def _conflict(self) -> ConcurrentSaveError:
        return ConcurrentSaveError("another save changed the destination at the same time", path=self.path)

    def _put_last(self, index: bytes) -> None:
        """Put the object whose put is the commit."""
        raise NotImplementedError

    def _delete_old(self) -> None:
        """Delete what the new checkpoint has replaced."""

    def _unknown(self, name: str, failure: RequestFailure) -> StioError:
        """Return the error where the store does not say whether it has an object."""
        if name != self._last:
            return failure.error(f"{self._folder.path}/{name}", work="save")
        return CommitUncertainError(
            f"the store does not say whether the checkpoint is published ({failure.kind}: {failure.cause}); "
            "check the destination, or save again",
            path=f"{self._folder.path}/{name}",
        )


class _Directory(RemoteTransaction):
    """A save of shards and an index; a `Transaction`.

    Args:
        folder: The directory.
        buffer_bytes: Memory of parts.
        num_shards: Number of shards.
        pattern: Names of the files.
    """

    takes_index = True

    def __init__(self, folder: Folder, buffer_bytes: int, num_shards: int, pattern: str) -> None:
        super().__init__(folder, buffer_bytes, FilePattern(pattern).index)
        # After the index was read: shards of a save that commits in between would not be deleted otherwise. Those of
        # one that commits later are in it too; it cannot commit any more once this one has.
        objects = folder.list(lambda: {*self._indexed(), FilePattern(pattern).whole})
        self._old = {
            name: meta for name, meta in objects.items() if name != self._last and FilePattern(pattern).matches(name)
        }
        self.shard_names = tuple(FilePattern(pattern).shard(k, num_shards, save_id=self._id) for k in range(num_shards))

    def _indexed(self) -> set[str]:
        with suppress(IndexFormatError):  # it is replaced
            return _shards_of(self._folder, self._last)
        return set()

    def _put_last(self, index: bytes) -> None:
        self._state = self._put(self._last, index, self._before)

    def _delete_old(self) -> None:
        if self._old:
            now = self._folder.list(lambda: self._old)  # what another program has put there since the save began stays
            self._folder.delete([name for name, meta in self._old.items() if now.get(name) == meta])


class _OneObject(RemoteTransaction):
    """A save of one file; a `Transaction`. Two saves at one time: the one that ends last is there.

    Args:
        folder: The directory.
        buffer_bytes: Memory of parts.
        name: Name of the file.
    """

    def __init__(self, folder: Folder, buffer_bytes: int, name: str) -> None:
        super().__init__(folder, buffer_bytes, name)
        self.path, self.shard_names = f"{folder.path}/{name}", (name,)

    def _create(self, nbytes: Sequence[int]) -> Sequence[Upload]:
        """Return the writer of the file, which `commit` completes."""
        return [Upload(self._folder, self._last, nbytes[0], self._parts, save_id=self._id)]

    def _put_last(self, index: bytes) -> None:
        (upload,) = self._writers
        if not _is_same(self._folder.state(self._last), self._before):
            raise self._conflict()
        failure = upload.complete()
        if failure is None:
            self._state = {"e_tag": upload.etag}
            return
        try:
            state, save_id = self._folder.state_and_id(self._last)
        except StioError as error:
            raise self._unknown(self._last, failure) from error
        if save_id != self._id:
            known = failure.error(self.path, work="save")
            raise self._unknown(self._last, failure) if upload.may_complete_yet else known
        self._state = state  # the answer was lost


def _is_same(now: State, before: State) -> bool:
    return now.get("e_tag") == before.get("e_tag")


@dataclass(frozen=True, slots=True)
class RemoteFiles:
    """What a save has published in a store; for `keep_last`, a `Published`."""

    folder: Folder
    """The directory."""
    first: str
    """The object that is the checkpoint to readers: an index, or the only file."""
    state: State
    """Its state."""
    others: dict[str, State]
    """The objects that it needs, with their states; {}: the name holds the id of the save."""

    @property
    def files(self) -> Set[str]:
        """The URLs of all."""
        return {self._url(name) for name in (self.first, *self.others)}

    def remove(self, *, spare: Set[str] = frozenset()) -> None:
        """Delete the checkpoint, unless another save has replaced it; what it names is deleted after it.

        Args:
            spare: URLs of objects that newer checkpoints consist of.

        Raises:
            StioError: The store refuses it.
        """
        if self._url(self.first) in spare:
            return  # a save has replaced it, and deleted its shards
        now = self.folder.state(self.first)
        if now and not _is_same(now, self.state):
            log(logging.WARNING, "%s: it was replaced, and is not deleted", self._url(self.first))
            return
        if now:
            self.folder.delete([self.first])
        unchanged = [
            name
            for name, state in self.others.items()
            if self._url(name) not in spare and (not state or _is_same(self.folder.state(name), state))
        ]
        self.folder.delete(unchanged)

    def _url(self, name: str) -> str:
        return f"{self.folder.path}/{name}"


def _shards_of(folder: Folder, index: str) -> set[str]:
    content, _ = folder.read(index) or (None, {})
    try:
        return set() if content is None else {*parse_index(content, path=f"{folder.path}/{index}").shards}
    except IndexFormatError:
        if index.endswith(FILE_SUFFIX + INDEX_SUFFIX):
            raise
        return set()  # it is of files of another kind


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """An upload that was neither completed nor aborted."""

    name: str
    began: float
    abort: Callable[[], object]


def _uploads(folder: Folder) -> list[_Unfinished]:
    """Return the uploads to objects of a directory that were neither completed nor aborted; [] if nothing says which.

    They are listed by boto3, which finds credentials where obstore does: obstore knows only uploads of its own.
    """
    if folder.root.location.scheme != "s3":
        return []
    try:
        return sorted(_listed_uploads(folder), key=lambda upload: (upload.name, upload.began))
    except Exception as error:  # botocore's own classes, or there is no boto3
        log(
            logging.WARNING,
            "the uploads that interrupted saves have left cannot be listed (with boto3); a rule of the bucket ends "
            "them (AbortIncompleteMultipartUpload): %s",
            short_line(str(error)),
        )
        return []


def _listed_uploads(folder: Folder) -> Iterator[_Unfinished]:
    bucket, prefix = folder.root.location.store, folder.key("")
    client = s3_client(folder.root.location, folder.root.config)
    for page in client.get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=prefix):
        for upload in page.get("Uploads", ()):
            key, upload_id = upload["Key"], upload["UploadId"]
            if "/" not in key.removeprefix(prefix):
                abort = partial(_abort, client, folder, Bucket=bucket, Key=key, UploadId=upload_id)
                yield _Unfinished(key.removeprefix(prefix), upload["Initiated"].timestamp(), abort)


def _abort(client: Any, folder: Folder, **upload: str) -> None:
    try:
        client.abort_multipart_upload(**upload)
    except client.exceptions.NoSuchUpload:  # it was completed or aborted by now
        pass
    except Exception as error:  # botocore's own classes
        raise StorageError(f"an upload cannot be aborted: {short_line(str(error))}", path=folder.path) from None
