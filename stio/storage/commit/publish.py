"""How staged files become a checkpoint: one rename that commits, what comes before and after it, and the way back.

The order is what survives a power cut: files and their record are durable before anything is visible, what the commit
refers to is durable before the commit, and nothing old goes before the commit is durable.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Sequence

from stio.errors import CommitUncertainError, ConcurrentSaveError, StorageError
from stio.storage.base import Note
from stio.storage.commit import syscalls as calls
from stio.storage.commit.file_writer import put
from stio.storage.commit.journal import (
    FILES_NAME,
    MAX_INDEX_BYTES,
    JournalRecord,
    Stamp,
    apply_notes,
    digest_of,
    finish,
    is_committed,
    leads_elsewhere,
    read_small,
    remove_record,
    replace_files,
    roll_back,
    stage_notes,
    stamp_of,
    write_record,
)
from stio.storage.commit.staging_dir import Staging, is_same, locked
from stio.storage.commit.target import Destination, ExistingCheckpoint, Names, identity_at

__all__ = ["Publisher"]

_INTERRUPTED = "replacing the files was interrupted; the next save here, or collect_garbage, goes on with it"
_SHADOWED = "the old index could not be removed, and readers still go by it; the next save here goes on with that"

logger = logging.getLogger("stio")

_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}


class Publisher:
    """Publishes one save's staged files.

    Args:
        destination: Where they go.
        standing: What stood there when the save began.
        names: What they are called, and which step commits.
        home_fd: `destination.home`, open.
        staging: Where they are.
        durable: Whether anything is synced.
        relook: For a face whose last writer wins. Called under the lock: what stands there by then is replaced,
            instead of compared with what stood there at the beginning. The files keep their names.
    """

    def __init__(
        self,
        destination: Destination,
        standing: ExistingCheckpoint,
        names: Names,
        *,
        home_fd: int,
        staging: Staging,
        durable: bool,
        relook: Callable[[], tuple[ExistingCheckpoint, Names]] | None = None,
    ) -> None:
        self._destination, self._standing, self._names = destination, standing, names
        self._home_fd, self._staging, self._durable = home_fd, staging, durable
        self._relook = relook
        self.path = destination.path
        """Name for messages."""
        self.must_stay = False
        """Whether the staging directory holds what a janitor needs to go on."""

    def publish(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Publish, once all files are finished.

        Args:
            index: The index, if there is to be one.
            notes: Small files that change with the commit.

        Raises:
            ConcurrentSaveError: The destination is not what it was.
            CommitUncertainError: The commit was done, but perhaps not durably.
            OSError: The system refused; what was visible is undone, or `must_stay` is set.
        """
        if self._names.commit == "directory":
            self._publish_directory(index, notes)
        else:
            self._publish_files(index, notes)

    # A fresh directory.

    def _publish_directory(self, index: bytes | None, notes: Sequence[Note]) -> None:
        files_fd, name = self._staging.files_fd, self._destination.name
        for file, data in ((self._names.index, index), *((note.name, note.after) for note in notes)):
            if file is not None and data is not None:
                put(files_fd, file, data, durable=self._durable)
        self._sync(files_fd)
        try:
            calls.rename_new(FILES_NAME, name, source_fd=self._staging.fd, target_fd=self._home_fd, is_directory=True)
        except OSError as error:
            if error.errno in _TAKEN:
                raise self._overtaken() from error
            if is_same(self._home_fd, name, files_fd):
                raise self._uncertain("the system reported an error for a rename that it did", error) from error
            raise
        self._confirm()

    # Files in a directory that is there.

    def _publish_files(self, index: bytes | None, notes: Sequence[Note]) -> None:
        with locked(self._home_fd, self.path):
            self._require_unchanged()
            try:
                intent = self._record(index, notes)
            except OSError as error:
                self._withdraw(error)
                raise
            if intent.commit == "files":
                self._replace_files(intent)
            else:
                self._move_in(intent)
                self.must_stay = _has_to_be_finished(intent)
                self._confirm()
            try:
                finish(self._home_fd, self._staging.fd, intent, durable=self._durable)
                self.must_stay = False
            except OSError as error:
                if leads_elsewhere(self._home_fd, intent):
                    raise self._uncertain(_SHADOWED, error) from error
                self._warn(error)

    def _require_unchanged(self) -> None:
        """Compare the destination with what it was; under the lock, but never by the lock alone."""
        if self._relook is not None:
            self._standing, self._names = self._relook()
        standing = self._standing
        if standing.index is not None:
            index = read_small(self._home_fd, standing.index, MAX_INDEX_BYTES)
            if digest_of(index) != standing.index_sha256:
                raise self._overtaken()
        for name in dict.fromkeys((*standing.files, *self._names.shards)):
            if identity_at(self._home_fd, name) != standing.files.get(name):
                raise self._overtaken()

    def _record(self, index: bytes | None, notes: Sequence[Note]) -> JournalRecord:
        """Stage index and notes, and write down what is to be done with them."""
        names, staging = self._names, self._staging
        shards = names.shards
        moves, last = (shards, names.index) if names.index is not None else ((), shards[0])
        if names.index is not None:
            assert index is not None
            put(staging.files_fd, names.index, index, mode=self._standing.index_mode, durable=self._durable)
        steps = stage_notes(self._home_fd, staging.fd, notes, durable=self._durable)
        assert names.commit != "directory"
        intent = JournalRecord(
            version=1,
            save_id=staging.save_id,
            commit=names.commit,
            last=last,
            last_stamp=self._stamp(last),
            last_sha256=digest_of(index),
            old_sha256=self._standing.index_sha256,
            moves={name: self._stamp(name) for name in moves},
            unlink={
                name: Stamp(identity.nbytes, identity.mtime_ns)
                for name, identity in self._standing.files.items()
                if name not in shards
            },
            notes=steps,
        )
        if intent.commit == "files":
            self._sync(staging.files_fd)  # a record that commits needs all that it names
        if _has_to_be_finished(intent):  # else one rename does it all
            write_record(staging.fd, intent, durable=self._durable)
            self._sync(self._home_fd)  # the staging directory's own name
        return intent

    def _stamp(self, name: str) -> Stamp:
        stamp = stamp_of(self._staging.files_fd, name)
        if stamp is None:
            raise StorageError("a staged file has vanished", path=self.path, errno=errno.ENOENT, expected=name)
        return stamp

    def _move_in(self, intent: JournalRecord) -> None:
        """Do what is seen before the commit, and the commit; undo it if that fails."""
        files_fd, home_fd = self._staging.files_fd, self._home_fd
        try:
            apply_notes(home_fd, self._staging.fd, intent.notes, "before")
            for name in intent.moves:
                try:
                    calls.rename_new(name, name, source_fd=files_fd, target_fd=home_fd)
                except FileExistsError as error:
                    raise self._overtaken() from error
            if intent.moves or intent.notes:
                self._sync(home_fd)
            calls.rename(intent.last, intent.last, source_fd=files_fd, target_fd=home_fd)
        except BaseException:
            self._undo(intent)
            raise

    def _undo(self, intent: JournalRecord) -> None:
        """Undo what was seen; where that fails the record stays, and a janitor goes on."""
        self.must_stay = True
        try:
            committed = intent.commit != "files" and is_committed(self._home_fd, intent)
            if not committed:
                roll_back(self._home_fd, self._staging.fd, intent, durable=self._durable)
                self.must_stay = False
        except OSError as error:
            self._warn(error)
            return
        if committed:
            raise self._uncertain("the system reported an error for a rename that it did")

    def _replace_files(self, intent: JournalRecord) -> None:
        """Replace the old files one by one; the record has committed that."""
        staging = self._staging
        self.must_stay = True
        try:
            replace_files(self._home_fd, staging.fd, staging.files_fd, intent, durable=self._durable)
        except OSError as error:
            if all(stamp_of(staging.files_fd, name) is not None for name in (*intent.moves, intent.last)):
                self._undo(intent)  # nothing was replaced yet
                if not self.must_stay:
                    self._withdraw(error)
                    raise
            raise self._uncertain(_INTERRUPTED, error) from error

    def _withdraw(self, error: OSError) -> None:
        """Take a record back that by itself commits, so that nobody goes on with a save that has failed."""
        if self._names.commit == "files":
            self.must_stay = True
            try:
                remove_record(self._staging.fd, durable=self._durable)
                self.must_stay = False
            except OSError:
                raise self._uncertain(_INTERRUPTED, error) from error

    def _confirm(self) -> None:
        try:
            self._sync(self._home_fd)
        except OSError as error:
            raise self._uncertain("syncing the directory failed after the commit", error) from error

    def _sync(self, directory_fd: int) -> None:
        if self._durable:
            calls.sync_directory(directory_fd)

    def _uncertain(self, message: str, error: OSError | None = None) -> CommitUncertainError:
        reason = f": {os.strerror(error.errno)}" if error is not None and error.errno else ""
        return CommitUncertainError(message + reason, path=self.path, errno=error.errno if error else None)

    def _overtaken(self) -> ConcurrentSaveError:
        return ConcurrentSaveError(
            "another save, or another program, changed the destination while this save was under way; this one was "
            "undone",
            path=self.path,
        )

    def _warn(self, error: OSError) -> None:
        logger.warning("%s: cleaning up failed, the next save here or `stio gc` goes on with it: %s", self.path, error)


def _has_to_be_finished(intent: JournalRecord) -> bool:
    return bool(intent.moves or intent.unlink or intent.notes)
