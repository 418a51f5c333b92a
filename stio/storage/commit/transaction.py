"""A save to a local filesystem as one transaction: prepare, commit, or roll back.

Prepare: new files are created in a staging directory, written and made durable (`create`, `finish_file`). Commit: one
step publishes them, by the plan that the transaction's policy made: the rename of a directory, of one file, of the
index, or the journal's record. Roll back: the staging directory is removed. After a crash recovery does the same.

The order of the steps protects a commit against a power cut: files and their record are durable before a change is
visible, the files that the commit refers to are durable before it, and old files are removed only when it is durable.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Sequence
from typing import Literal

from stio.errors import CommitUncertainError, ConcurrentSaveError, StorageError
from stio.storage.base import Note
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.file_writer import LocalFileWriter, create_files, write_refused
from stio.storage.commit.journal import (
    MAX_NOTE_BYTES,
    JournalRecord,
    apply_notes,
    clean_up,
    has_old_index,
    is_committed,
    is_plain,
    remove_record,
    replace_files,
    roll_back,
    stage_notes,
    write_record,
)
from stio.storage.commit.recovery import recover
from stio.storage.commit.small_files import (
    MAX_INDEX_BYTES,
    Stamp,
    closing,
    digest_of,
    read_small,
    stamp_of,
    write_small,
)
from stio.storage.commit.staging_dir import (
    FILES_NAME,
    STAGING_PREFIX,
    StagingDirectory,
    directory_lock,
    is_same,
    rename_for_deletion,
)
from stio.storage.commit.target import (
    CommitPlan,
    CommitPolicy,
    OneFile,
    SaveTarget,
    choose_names,
    describe_existing,
    identity_at,
    make_parents,
    require_replaceable,
    resolve,
)

logger = logging.getLogger("stio")

_ID_BYTES = 5
_ATTEMPTS = 8
_INTERRUPTED = "replacing the files was interrupted; the next save here, or collect_garbage, completes it"
_SHADOWED = "the old index could not be removed, so readers load the old checkpoint; the next save here removes it"
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}


def begin_local(
    destination: str | os.PathLike[str],
    *,
    num_shards: int,
    filename_pattern: str = "model{suffix}.safetensors",
    shard_names: Literal["auto", "hub"] = "auto",
    commit: Literal["index", "files"] = "index",
    durability: Literal["full", "none"] = "full",
) -> LocalTransaction:
    """Begin the transaction of a save of tensors: recover dead saves, plan the commit, make a staging directory.

    `SaveOptions` has checked the values of the keywords.

    Args:
        destination: One file if it ends in `.safetensors`, else a directory. Links are followed, missing parents made.
        num_shards: Number of files of tensors.
        filename_pattern: Pattern of their names, in a directory.
        shard_names: "auto": shards have the hub's names in a directory without a checkpoint, and names with the save's
            id beside an old one. "hub": they always have the hub's names.
        commit: "index": readers through the index see the old or the new checkpoint, never both. "files" is needed
            for `shard_names="hub"` over a checkpoint. Its files are then replaced one by one under the old index, and
            **a reader in that window (some milliseconds) may mix both**. After a crash in the window the mixture stays
            until the next save or `collect_garbage` rolls the save forward.
        durability: "full": after `commit` the checkpoint survives a power cut. "none": nothing is synced; a crash of
            the process still leaves the old or the new checkpoint.

    Raises:
        ValueError: Arguments contradict each other, or do not fit the content of the destination.
        StorageError: The destination is of another kind, or cannot be written.
    """
    if num_shards < 1:
        raise ValueError(f"a checkpoint has at least one file, not {num_shards}")
    target = resolve(destination)
    if target.kind == "file" and num_shards != 1:
        raise ValueError(f"{target.path}: one file cannot hold {num_shards} shards; give a directory")

    def policy(home_fd: int, save_id: str) -> CommitPlan:
        plan = choose_names(
            target,
            describe_existing(home_fd, target, filename_pattern),
            num_shards=num_shards,
            pattern=filename_pattern,
            shard_names=shard_names,
            commit=commit,
            save_id=save_id,
        )
        if target.kind != "fresh":
            require_replaceable(home_fd, target, plan.shards)
        return plan

    return _begin(target, policy, durable=durability == "full", last_wins=isinstance(destination, OneFile))


def begin_directory(path: str | os.PathLike[str], *, durable: bool) -> LocalTransaction:
    """Begin the transaction of a directory whose files other libraries and other saves write, below its `files_path`.

    `commit` makes every file in it durable and renames it to `path`, in the place of a directory of this name. That
    one is renamed shortly before: if the process dies between these two steps, there is no directory at `path`.

    Args:
        path: Path of the directory. Links to its parent are followed, missing parents made.
        durable: Whether anything is synced.

    Raises:
        StorageError: The operating system reported an error.
    """
    home, name = os.path.split(os.path.abspath(path))
    target = SaveTarget(os.fspath(path), "fresh", os.path.realpath(home), name)
    return _begin(target, lambda home_fd, save_id: CommitPlan("replacement", (), None), durable=durable)


def _begin(target: SaveTarget, policy: CommitPolicy, *, durable: bool, last_wins: bool = False) -> LocalTransaction:
    if os.open not in os.supports_dir_fd:
        raise StorageError("saving needs a system with POSIX files", errno=errno.ENOSYS)
    try:
        make_parents(target.home, durable=durable)
        return LocalTransaction(target, calls.open_directory(target.home), policy, durable=durable, last_wins=last_wins)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        failure = write_refused("beginning the save", target.path, error)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            failure.message += "; the directory that holds the checkpoint must be writable"
        raise failure from error


class LocalTransaction:
    """One save to a local filesystem; a `Transaction`. Made by `begin_local` or `begin_directory`.

    Args:
        target: Its destination.
        home_fd: `target.home`, open; owned by the transaction, also if this raises.
        policy: Makes the plan: names of new files, files to replace, step that commits.
        durable: Whether anything is synced.
        last_wins: Of several saves at once the last one replaces the others: `commit` makes the plan again, under the
            lock, and replaces the files of that moment. Otherwise it raises if the destination has changed since the
            first plan.

    Raises:
        ValueError: The policy refused.
        OSError: The operating system reported an error. All that was made is removed again.
    """

    def __init__(
        self, target: SaveTarget, home_fd: int, policy: CommitPolicy, *, durable: bool, last_wins: bool
    ) -> None:
        self._target, self._home_fd, self._policy = target, home_fd, policy
        self._durable, self._last_wins = durable, last_wins
        self._writers: list[LocalFileWriter] = []
        self._finished: set[str] = set()  # names of the files that other libraries wrote
        self._ended = False
        self._needs_recovery = False  # if True, the staging directory stays: recovery reads it
        try:
            recover(home_fd, target.home)
            self._plan, self._staging = self._stage()
        except BaseException:
            calls.close(home_fd)
            raise

    def _stage(self) -> tuple[CommitPlan, StagingDirectory]:
        for _ in range(_ATTEMPTS):
            save_id = secrets.token_hex(_ID_BYTES)
            plan = self._policy(self._home_fd, save_id)  # first: it raises before anything is made
            staging = StagingDirectory.create(self._home_fd, save_id)
            if staging is not None:
                return plan, staging
        raise OSError(f"no staging directory in {_ATTEMPTS} attempts")

    @property
    def path(self) -> str:
        """The destination, links followed, for messages and results."""
        return self._target.real

    @property
    def files_path(self) -> str:
        """Directory of the new files while the transaction is open, for libraries that write files by their path."""
        return os.path.join(self._target.home, STAGING_PREFIX + self._staging.save_id, FILES_NAME)

    @property
    def makes_directory(self) -> bool:
        """Whether the save makes the checkpoint's directory: it did not exist."""
        return self._target.kind == "fresh"

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names that the shards will have after the commit, in the plan's order."""
        return self._plan.shards

    @property
    def takes_index(self) -> bool:
        """Whether `commit` takes an index (more than one shard, or a directory that has one already)."""
        return self._plan.index is not None

    # Prepare.

    def create(self, nbytes: Sequence[int]) -> Sequence[LocalFileWriter]:
        """Create all shards, their space reserved; see `Transaction.create`."""
        shards = self._plan.shards
        self._require(not self._ended, "the save has ended")
        self._require(not self._writers and len(nbytes) == len(shards), f"{len(shards)} shards are created, once")
        single = self._target.kind == "file"
        self._writers = create_files(
            self._staging.files_fd,
            list(zip(shards, nbytes, strict=True)),
            path=self.path,
            where=[self.path if single else os.path.join(self.path, name) for name in shards],
            mode=self._plan.existing.shard_mode,
            durable=self._durable,
        )
        return self._writers

    def finish_file(self, name: str) -> None:
        """Complete a shard that another library wrote below `files_path`: set its mode, make it durable.

        Raises:
            StorageError: The operating system reported an error.
        """
        try:
            with closing(calls.open_file(name, os.O_RDWR, dir_fd=self._staging.files_fd)) as fd:
                if self._plan.existing.shard_mode is not None:
                    calls.fchmod(fd, self._plan.existing.shard_mode)
                if self._durable:
                    calls.fsync(fd)
        except OSError as error:
            raise write_refused("syncing", os.path.join(self.path, name), error) from error
        self._finished.add(name)

    def read_note(self, name: str) -> bytes | None:
        """Return the content of a small file beside the old checkpoint, None if it does not exist.

        Raises:
            StorageError: The operating system reported an error, or it is larger than 64 MiB.
        """
        _require_plain(name)
        self._require(not self._ended, "the save has ended")
        if self._target.kind == "fresh":
            return None
        try:
            return read_small(self._home_fd, name, MAX_NOTE_BYTES, where=self.path)
        except StorageError:
            raise
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return None  # the name of its file may be as long as the system allows, and a note's name is longer
            raise refused(f"reading {name}", self.path, error) from error

    # Commit.

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        """Publish; see `Transaction.commit`. After any error but a ValueError the transaction has ended.

        Raises:
            ValueError: Files are not complete, or an index is missing or superfluous; nothing was done.
            ConcurrentSaveError: Another save changed the destination since this one started. Nothing was changed.
            CommitUncertainError: The checkpoint is in place, but may not be durable; or, with `commit="files"`, some
                of its files are replaced, and the next save or `collect_garbage` replaces the others.
            StorageError: The operating system reported an error; the old checkpoint is unchanged.
        """
        plan = self._plan
        finished = self._finished.union(writer.name for writer in self._writers if writer.finished)
        self._require(not self._ended, "the save has ended")
        self._require(finished.issuperset(plan.shards), "not all files are finished")
        self._require((index is not None) == self.takes_index, "an index is missing" if index is None else "no index")
        for note in notes:
            _require_plain(note.name)
        try:
            if plan.commit == "directory":
                self._publish_directory(index, notes)
            elif plan.commit == "replacement":
                self._replace_directory()
            else:
                self._publish_files(index, notes)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise write_refused("publishing the checkpoint", self.path, error) from error
        finally:
            self._end()

    def _publish_directory(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Write index and notes into a fresh directory, and rename it."""
        files_fd, name = self._staging.files_fd, self._target.name
        for file, data in ((self._plan.index, index), *((note.name, note.after) for note in notes)):
            if file is not None and data is not None:
                write_small(files_fd, file, data, durable=self._durable)
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

    def _replace_directory(self) -> None:
        """Sync all files of a directory and rename it; it replaces a directory of the same name."""
        home_fd, name = self._home_fd, self._target.name
        if self._durable:
            _sync_tree(self.files_path)
        with directory_lock(home_fd, self._target.path):
            try:
                old = rename_for_deletion(home_fd, name)
            except FileNotFoundError:
                old = None
            try:
                calls.rename(FILES_NAME, name, source_fd=self._staging.fd, target_fd=home_fd)
            except OSError:
                if old is not None:
                    calls.rename(old, name, source_fd=home_fd, target_fd=home_fd)
                raise
        try:
            self._confirm()
        finally:
            if old is not None:
                calls.remove_tree(old, dir_fd=home_fd)

    def _publish_files(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Publish files in a directory that exists, under its lock."""
        with directory_lock(self._home_fd, self._target.path):
            if self._last_wins:
                self._plan = self._policy(self._home_fd, self._staging.save_id)
            self._require_unchanged()
            try:
                record = self._record(index, notes)
            except OSError as error:
                self._withdraw(error)
                raise
            if record.commit == "files":
                self._replace_files(record)
            else:
                self._rename_files(record)
                self._needs_recovery = _needs_record(record)
                self._confirm()
            try:
                clean_up(self._home_fd, self._staging.fd, record, durable=self._durable)
                self._needs_recovery = False
            except OSError as error:
                if has_old_index(self._home_fd, record):
                    raise self._uncertain(_SHADOWED, error) from error
                self._warn(error)

    def _require_unchanged(self) -> None:
        """Require that the destination is as planned. Called under the lock, and also where locks do not exist."""
        existing = self._plan.existing
        if existing.index is not None:
            index = read_small(self._home_fd, existing.index, MAX_INDEX_BYTES)
            if digest_of(index) != existing.index_sha256:
                raise self._overtaken()
        for name in dict.fromkeys((*existing.files, *self._plan.shards)):
            if identity_at(self._home_fd, name) != existing.files.get(name):
                raise self._overtaken()

    def _record(self, index: bytes | None, notes: Sequence[Note]) -> JournalRecord:
        """Write index and notes into the staging directory, and the journal's record of the commit."""
        plan, staging, shards = self._plan, self._staging, self._plan.shards
        assert plan.commit != "directory" and plan.commit != "replacement"
        moves, last = (shards, plan.index) if plan.index is not None else ((), shards[0])
        if plan.index is not None:
            assert index is not None
            write_small(staging.files_fd, plan.index, index, mode=plan.existing.index_mode, durable=self._durable)
        record = JournalRecord(
            version=1,
            save_id=staging.save_id,
            commit=plan.commit,
            notes=stage_notes(self._home_fd, staging.fd, notes, durable=self._durable),
            last=last,
            last_stamp=self._stamp(last),
            last_sha256=digest_of(index),
            old_sha256=plan.existing.index_sha256,
            moves={name: self._stamp(name) for name in moves},
            unlink={
                name: Stamp(identity.nbytes, identity.mtime_ns)
                for name, identity in plan.existing.files.items()
                if name not in shards
            },
        )
        if record.commit == "files":
            self._sync(staging.files_fd)  # this record is the commit: all that it names must be durable
        if _needs_record(record):
            write_record(staging.fd, record, durable=self._durable)
            self._sync(self._home_fd)  # the staging directory's own name
        return record

    def _stamp(self, name: str) -> Stamp:
        stamp = stamp_of(self._staging.files_fd, name)
        if stamp is None:
            raise StorageError("a staged file has vanished", path=self._target.path, errno=errno.ENOENT, expected=name)
        return stamp

    def _rename_files(self, record: JournalRecord) -> None:
        """Make the changes that are visible before the commit, then the commit; undo them if it fails."""
        files_fd, home_fd = self._staging.files_fd, self._home_fd
        try:
            apply_notes(home_fd, self._staging.fd, record.notes, "before")
            for name in record.moves:
                try:
                    calls.rename_new(name, name, source_fd=files_fd, target_fd=home_fd)
                except FileExistsError as error:
                    raise self._overtaken() from error
            if record.moves or record.notes:
                self._sync(home_fd)
            calls.rename(record.last, record.last, source_fd=files_fd, target_fd=home_fd)
        except BaseException:
            self._undo(record)
            raise

    def _replace_files(self, record: JournalRecord) -> None:
        """Replace the old files one by one; the record is the commit."""
        staging = self._staging
        self._needs_recovery = True
        try:
            replace_files(self._home_fd, staging.fd, staging.files_fd, record, durable=self._durable)
        except OSError as error:
            if all(stamp_of(staging.files_fd, name) is not None for name in (*record.moves, record.last)):
                self._undo(record)  # nothing was replaced yet
                if not self._needs_recovery:
                    self._withdraw(error)
                    raise
            raise self._uncertain(_INTERRUPTED, error) from error

    def _undo(self, record: JournalRecord) -> None:
        """Undo the visible changes; if that fails the record stays, for recovery."""
        self._needs_recovery = True
        try:
            committed = record.commit != "files" and is_committed(self._home_fd, record)
            if not committed:
                roll_back(self._home_fd, self._staging.fd, record, durable=self._durable)
                self._needs_recovery = False
        except OSError as error:
            self._warn(error)
            return
        if committed:
            raise self._uncertain("the system reported an error for a rename that it did")

    def _withdraw(self, error: OSError) -> None:
        """Remove a record that is the commit, so that no recovery completes a save that has failed."""
        if self._plan.commit == "files":
            self._needs_recovery = True
            try:
                remove_record(self._staging.fd, durable=self._durable)
                self._needs_recovery = False
            except OSError:
                raise self._uncertain(_INTERRUPTED, error) from error

    def _confirm(self) -> None:
        """Make the commit durable."""
        try:
            self._sync(self._home_fd)
        except OSError as error:
            raise self._uncertain("syncing the directory failed after the commit", error) from error

    def _sync(self, directory_fd: int) -> None:
        if self._durable:
            calls.sync_directory(directory_fd)

    # The end.

    def roll_back(self) -> None:
        """Remove all new files. Idempotent; never raises; does nothing after a commit."""
        if not self._ended:
            self._end()

    def _end(self) -> None:
        self._ended = True
        for writer in self._writers:
            writer.close()
        if self._needs_recovery:
            self._staging.release()
        else:
            self._staging.remove()
        calls.close(self._home_fd)

    # Errors.

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.path}: {message}")

    def _uncertain(self, message: str, error: OSError | None = None) -> CommitUncertainError:
        reason = f": {os.strerror(error.errno)}" if error is not None and error.errno else ""
        return CommitUncertainError(message + reason, path=self._target.path, errno=error.errno if error else None)

    def _overtaken(self) -> ConcurrentSaveError:
        return ConcurrentSaveError(
            "another save, or another program, changed the destination while this save was under way; this one was "
            "rolled back",
            path=self._target.path,
        )

    def _warn(self, error: OSError) -> None:
        logger.warning(
            "%s: cleaning up failed, the next save here or `stio gc` completes it: %s", self._target.path, error
        )


def _needs_record(record: JournalRecord) -> bool:
    return bool(record.moves or record.unlink or record.notes)  # otherwise the commit is one rename


def _require_plain(name: str) -> None:
    if not is_plain(name):
        raise ValueError(f"a note is a file beside the checkpoint; its name must not contain a directory: {name!r}")


def _sync_tree(path: str) -> None:
    """Make all files below a directory durable, and the directories that name them."""
    for _, _, names, fd in os.fwalk(path, topdown=False):
        for name in names:
            with closing(calls.open_file(name, os.O_RDONLY, dir_fd=fd)) as file:
                calls.fsync(file)
        calls.sync_directory(fd)
