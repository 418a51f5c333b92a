"""The commit of a save to a local filesystem: the steps that make its files visible, and how they are undone.

A plan has one step that publishes the files: the rename of a directory, of one file or of the index, or the journal's
record. Where others precede or follow it, their order protects the commit against a power cut: files and their record
are durable before a change is visible, the files that the commit refers to are durable before it, and old files are
removed only when it is durable. After a crash recovery does the rest by the same record (`journal.py`).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from stio.errors import CommitUncertainError, ConcurrentSaveError, StorageError
from stio.storage.base import Identity, Note
from stio.storage.commit import syscalls as calls
from stio.storage.commit.destination import (
    CommitPlan,
    DirectoryIdentity,
    Home,
    directory_identity,
    identities_at,
    identity_at,
)
from stio.storage.commit.directory_lock import is_same
from stio.storage.commit.files import (
    MAX_INDEX_BYTES,
    Stamp,
    attributes_at,
    digest_of,
    read_small,
    stamp_of,
    write_small,
)
from stio.storage.commit.journal import (
    FILES_NAME,
    MAX_NOTE_BYTES,
    STAGING_PREFIX,
    JournalRecord,
    StagingDirectory,
    clean_up,
    has_old_index,
    is_committed,
    make_visible,
    remove_record,
    roll_back,
    stage_notes,
    write_record,
)
from stio.storage.commit.retention import WrittenFiles, put_back, set_aside, survey

_INTERRUPTED = "replacing the files was interrupted; the next save here, or collect_garbage, completes it"
_SHADOWED = "the old index could not be removed, so readers load the old checkpoint; the next save here removes it"
_RENAMED = "the system reported an error for a rename that it did"
_UNREADABLE = (
    "publishing failed, and it cannot be read whether the new checkpoint is in place; check the destination, or save "
    "again"
)
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}


@dataclass
class Publication:
    """The commit of one transaction. Its files are complete and durable, and it holds the lock that the plan needs."""

    home: Home
    """The directory in which the save works; owned by the transaction."""
    staging: StagingDirectory
    """The staging directory with the new files."""
    lock: ExitStack
    """Holds the lock of the directory, where the plan needs it."""
    plan: CommitPlan
    """Their names, the files that they replace, and the step that commits."""
    written: WrittenFiles = field(default_factory=WrittenFiles)
    """What was published."""
    needs_recovery: bool = False
    """Whether the staging directory must stay: recovery reads it."""
    cleanup_error: OSError | None = None
    """Why cleaning up failed after the commit, or after a commit that failed."""

    def publish(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Publish the files by the step of the plan; see `Transaction.commit`.

        Raises:
            ConcurrentSaveError: Another save changed the destination. Nothing was changed.
            CommitUncertainError: See `LocalTransaction.commit`.
            OSError: The operating system reported an error; the old checkpoint is unchanged.
        """
        if self.plan.commit == "directory":
            self._publish_directory(index, notes)
        elif self.plan.commit == "replacement":
            self._replace_directory()
        else:
            self._publish_files(index, notes)

    def _publish_directory(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Write index and notes into a fresh directory, and rename it."""
        files_fd, name = self.staging.files_fd, self.home.destination.name
        small = [(self.plan.index, index), *((note.name, note.after) for note in notes)]
        names = [*self.plan.shards]
        for file, data in small:
            if file is not None and data is not None:
                write_small(files_fd, file, data, durable=self.home.durable)
                names.append(file)
        self.home.sync(files_fd)
        own = {self.home.destination.real: directory_identity(files_fd)}
        written = self._written(self.home.destination.real, identities_at(files_fd, names), own)
        try:
            calls.rename_new(FILES_NAME, name, source_fd=self.staging.fd, target_fd=self.home.fd, is_directory=True)
        except OSError as error:
            if error.errno in _TAKEN:
                raise self._conflict() from error
            if is_same(self.home.fd, name, files_fd):
                raise self._uncertain(_RENAMED, error) from error
            raise
        self.written = written
        self.close()
        self._confirm()

    def _replace_directory(self) -> None:
        """Rename a directory, whose files are durable; it replaces a directory of the same name."""
        home_fd, name = self.home.fd, self.home.destination.name
        new = survey(self.staging.files_fd, self.home.destination.real)
        written = self._written("", new.files, new.directories)
        try:
            if calls.exists(name, dir_fd=home_fd):
                self.needs_recovery = True
                set_aside(home_fd, name, self.staging.fd)
            calls.rename(FILES_NAME, name, source_fd=self.staging.fd, target_fd=home_fd)
        except OSError:
            with suppress(OSError):  # recovery puts it back
                self._put_back()
            raise
        self.written = written
        self._confirm()
        try:
            self._put_back()
        except OSError as error:
            self.cleanup_error = error

    def _put_back(self) -> None:
        """Put back what was set aside, as far as its name is free; the staging directory can be removed then."""
        staging = os.path.join(self.home.destination.home, STAGING_PREFIX + self.staging.save_id)
        put_back(self.home.fd, self.staging.fd, staging, durable=self.home.durable)
        self.needs_recovery = False

    def _publish_files(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Publish files in a directory that exists, under its lock."""
        self._require_unchanged()
        record, files = self._record(index, notes)
        home_fd, staging, durable = self.home.fd, self.staging, self.home.durable
        needs_record = bool(record.moves or record.unlink or record.notes)  # otherwise the commit is one rename
        self.needs_recovery = True
        try:
            if needs_record:
                write_record(staging.fd, record, durable=durable)
                self.home.sync()  # the staging directory's own name
            make_visible(home_fd, staging.fd, staging.files_fd, record, durable=durable)
        except BaseException as error:
            self._undo(record, error)
            if isinstance(error, FileExistsError):
                raise self._conflict() from error
            raise
        self.needs_recovery = needs_record
        if not needs_record:
            self.close()
        self._confirm()
        try:
            clean_up(self.home.fd, self.staging.fd, record, durable=self.home.durable)
            self.needs_recovery = False
        except OSError as error:
            if has_old_index(self.home.fd, record):
                raise self._uncertain(_SHADOWED, error) from error
            self.cleanup_error = error
        with suppress(OSError):  # retention does not delete what is not described
            for note in notes:
                if read_small(self.home.fd, note.name, MAX_NOTE_BYTES) == note.after:
                    files |= identities_at(self.home.fd, [note.name])
            self.written = self._written(self.home.destination.home, files, {})

    def _require_unchanged(self) -> None:
        """Require that the destination is as planned. Called under the lock, and also where locks do not exist."""
        existing = self.plan.existing
        if existing.index is not None:
            index = read_small(self.home.fd, existing.index, MAX_INDEX_BYTES)
            if digest_of(index) != existing.index_sha256:
                raise self._conflict()
        if identities_at(self.home.fd, (*existing.files, *self.plan.shards)) != existing.files:
            raise self._conflict()

    def _record(self, index: bytes | None, notes: Sequence[Note]) -> tuple[JournalRecord, dict[str, Identity]]:
        """Write index and notes into the staging directory; return the journal's record of the commit, and the files.

        Raises:
            OSError: The operating system reported an error.
        """
        plan, staging, shards = self.plan, self.staging, self.plan.shards
        assert plan.commit != "directory" and plan.commit != "replacement"
        moves, last = (shards, plan.index) if plan.index is not None else ((), shards[0])
        if plan.index is not None:
            assert index is not None
            attributes = attributes_at(self.home.fd, plan.index)
            write_small(staging.files_fd, plan.index, index, attributes=attributes, durable=self.home.durable)
        files = {name: self._staged(name) for name in (*moves, last)}
        record = JournalRecord(
            version=1,
            save_id=staging.save_id,
            commit=plan.commit,
            notes=stage_notes(self.home.fd, staging.fd, notes, durable=self.home.durable),
            last=last,
            last_stamp=Stamp.of(files[last]),
            last_sha256=digest_of(index),
            old_sha256=plan.existing.index_sha256,
            moves={name: Stamp.of(files[name]) for name in moves},
            unlink={name: Stamp.of(old) for name, old in plan.existing.files.items() if name not in shards},
        )
        if record.commit == "files":
            self.home.sync(staging.files_fd)  # this record is the commit: all that it names must be durable
        return record, files

    def _written(
        self, directory: str, files: Mapping[str, Identity], new: Mapping[str, DirectoryIdentity]
    ) -> WrittenFiles:
        """Return what was published.

        Args:
            directory: The directory of the files.
            files: The files, by name.
            new: The directories that were published, by path.
        """
        home = {self.home.destination.home: directory_identity(self.home.fd)}
        return WrittenFiles(
            {os.path.join(directory, name): identity for name, identity in files.items()},
            {**new, **home, **self.home.made},
            new.keys() | self.home.made.keys(),
        )

    def _staged(self, name: str) -> Identity:
        identity = identity_at(self.staging.files_fd, name)
        if identity is None:
            raise StorageError(
                "a new file was removed from the staging directory during the save; save again",
                path=self.home.destination.path,
                errno=errno.ENOENT,
                expected=name,
            )
        return identity

    def _undo(self, record: JournalRecord, error: BaseException) -> None:
        """Undo the visible changes; if that fails the record stays, for recovery.

        Args:
            record: What was to be changed.
            error: What ended that.

        Raises:
            CommitUncertainError: The commit is in place, or that cannot be read; or files are replaced one by one, and
                that has begun, or recovery will do it.
        """
        staging, replaces = self.staging, record.commit == "files"
        try:
            if not replaces:
                is_begun = is_committed(self.home.fd, record)
            else:
                names = (*record.moves, record.last)
                is_begun = any(stamp_of(staging.files_fd, name) is None for name in names)
        except OSError as failure:
            raise self._uncertain(_INTERRUPTED if replaces else _UNREADABLE, failure) from failure
        if is_begun:
            raise self._uncertain(_INTERRUPTED if replaces else _RENAMED, error) from error
        try:
            roll_back(self.home.fd, staging.fd, record, durable=self.home.durable)
            if replaces:
                remove_record(staging.fd, durable=self.home.durable)  # it is the commit
            self.needs_recovery = False
        except OSError as failure:
            if replaces:
                raise self._uncertain(_INTERRUPTED, error) from error
            self.cleanup_error = failure

    def close(self) -> None:
        """Release the lock, and remove the staging directory, unless recovery reads it. Idempotent; never raises.

        Where one rename is the commit this comes before its sync, which covers it: a change of a directory right after
        the sync would wait for the filesystem's journal again.
        """
        self.lock.close()
        self.staging.release() if self.needs_recovery else self.staging.remove()

    def _confirm(self) -> None:
        """Make the commit durable."""
        try:
            self.home.sync()
        except OSError as error:
            raise self._uncertain("syncing the directory failed after the commit", error) from error

    # Errors.

    def _uncertain(self, message: str, error: BaseException) -> CommitUncertainError:
        number = error.errno if isinstance(error, OSError) else None
        reason = f": {os.strerror(number)}" if number else ""
        return CommitUncertainError(message + reason, path=self.home.destination.path, errno=number)

    def _conflict(self) -> ConcurrentSaveError:
        return ConcurrentSaveError(
            "another save, or another program, changed the destination while this save was under way; this one was "
            "rolled back",
            path=self.home.destination.path,
        )
