"""A save to a local filesystem as one transaction: prepare, commit, or roll back.

Prepare: new files are created in a staging directory, written and made durable (`create`, `finish_file`); then the
lock is taken that the commit needs (`prepare_commit`, the last step that can be cancelled). Commit: one step publishes
them, by the plan that the transaction's policy made: the rename of a directory, of one file, of the index, or the
journal's record. Roll back: the staging directory is removed. After a crash recovery does the same.

The order of the steps protects a commit against a power cut: files and their record are durable before a change is
visible, the files that the commit refers to are durable before it, and old files are removed only when it is durable.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Literal

from stio.errors import CommitUncertainError, ConcurrentSaveError, StorageError
from stio.runtime.hashing import Hasher
from stio.runtime.log import log
from stio.storage.base import Identity, Note
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.aside import Aside, aside_directory, put_back
from stio.storage.commit.attributes import FileAttributes, attributes_at, keep_default_list, keep_tree
from stio.storage.commit.directory_lock import LOCK_TIMEOUT_SECONDS, LockTimeout, directory_lock, is_same
from stio.storage.commit.file_writer import LocalFileWriter, create_files, write_refused
from stio.storage.commit.joined import NONCE_NAME, Invitation, digest_of_file
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
from stio.storage.commit.retention import WrittenFiles, survey
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
)
from stio.storage.commit.target import (
    CommitPlan,
    CommitPolicy,
    DirectoryIdentity,
    OneFile,
    SaveTarget,
    choose_names,
    describe_existing,
    directory_identity,
    identity_at,
    make_and_open,
    require_replaceable,
    resolve,
)
from stio.storage.commit.written_list import merge_replaced
from stio.storage.paths import resolve_links

_ID_BYTES = 5
_NONCE_BYTES = 16
_ATTEMPTS = 8
_RECOVERY_SECONDS = 1.0
"""Most of its `lock_timeout` that a save spends on recovery, which it can do without."""
_DEFAULT_NAME_BYTES = 255
_INTERRUPTED = "replacing the files was interrupted; the next save here, or collect_garbage, completes it"
_SHADOWED = "the old index could not be removed, so readers load the old checkpoint; the next save here removes it"
_UNREADABLE = (
    "publishing failed, and it cannot be read whether the new checkpoint is in place; check the destination, or save "
    "again"
)
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR}


def begin_local(
    destination: str | os.PathLike[str],
    *,
    num_shards: int,
    filename_pattern: str = "model{suffix}.safetensors",
    shard_names: Literal["auto", "hub"] = "auto",
    commit: Literal["index", "files"] = "index",
    durability: Literal["full", "none"] = "full",
    lock_timeout: float = LOCK_TIMEOUT_SECONDS,
    check: Callable[[], None] = lambda: None,
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
        lock_timeout: Seconds for which the whole save waits for locks of other saves.
        check: Called while it waits here; it raises to end the wait, as `Operation.check` does.

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

    return _begin(
        target,
        policy,
        durable=durability == "full",
        last_wins=isinstance(destination, OneFile),
        lock_timeout=lock_timeout,
        check=check,
    )


def begin_directory(path: str | os.PathLike[str], *, durable: bool) -> LocalTransaction:
    """Begin the transaction of a directory whose files other libraries and other saves write, below its `files_path`.

    `commit` makes every file in it durable and renames it to `path`, in the place of a directory of this name. That
    one is set aside shortly before: if the process dies between these two steps, there is no directory at `path` until
    the next save there, or `collect_garbage`, puts the old one back.

    Of the old directory only that is deleted which its list (`written_list.py`) names and that is unchanged. What
    others have added is moved into the new directory if no new file has its name; what else is left is kept beside it
    as `.stio-kept-<id>`, with a warning. Without a list that is all of the old directory.

    Args:
        path: Path of the directory. Links to its parent are followed, missing parents made.
        durable: Whether anything is synced.

    Raises:
        StorageError: The operating system reported an error.
    """
    try:
        home, name = os.path.split(os.path.abspath(path))  # raises if there is no working directory
        if "\0" in name:
            raise ValueError("a path cannot contain NUL")
        target = SaveTarget(os.fspath(path), "fresh", resolve_links(home), name)
    except StorageError:
        raise
    except (OSError, ValueError) as error:
        raise refused("examining the destination", os.fspath(path), error) from error
    return _begin(target, lambda home_fd, save_id: CommitPlan("replacement", (), None), durable=durable)


def _begin(
    target: SaveTarget,
    policy: CommitPolicy,
    *,
    durable: bool,
    last_wins: bool = False,
    lock_timeout: float = LOCK_TIMEOUT_SECONDS,
    check: Callable[[], None] = lambda: None,
) -> LocalTransaction:
    if os.open not in os.supports_dir_fd:
        raise StorageError("saving needs a system with POSIX files", errno=errno.ENOSYS)
    needed = "readable and writable"
    try:
        home_fd, made = make_and_open(target.home, durable=durable)
        needed = "writable"
        return LocalTransaction(
            target,
            home_fd,
            policy,
            durable=durable,
            last_wins=last_wins,
            made=made,
            lock_timeout=lock_timeout,
            check=check,
        )
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        failure = write_refused("beginning the save", target.path, error)
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            failure.message += f"; the directory that holds the checkpoint must be {needed}"
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
        made: The parents of the destination that were made for this save.
        lock_timeout: Seconds for which it waits for locks of other saves, all waits together.
        check: Called while it waits here; it raises to end the wait.

    Raises:
        ValueError: The policy refused.
        StorageError: A name is too long, or the old checkpoint could not be read.
        OSError: The operating system reported an error. All that was made is removed again.
    """

    def __init__(
        self,
        target: SaveTarget,
        home_fd: int,
        policy: CommitPolicy,
        *,
        durable: bool,
        last_wins: bool,
        made: Mapping[str, DirectoryIdentity] | None = None,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._parents = dict(made or {})
        self._published = WrittenFiles()
        self._target, self._home_fd, self._policy = target, home_fd, policy
        self._durable, self._last_wins = durable, last_wins
        self._writers: list[LocalFileWriter] = []
        self._finished: set[str] = set()  # names of the files that other libraries or processes wrote
        self._is_shared = False  # whether other processes write into the shards
        self._ended = False
        self._needs_recovery = False  # if True, the staging directory stays: recovery reads it
        self._timeout = LockTimeout(lock_timeout)
        self._cleanup_error: OSError | None = None  # why cleaning up failed; logged when the lock is released
        self._lock: ExitStack | None = None  # holds the lock of the directory, where the commit needs it
        try:
            recover(home_fd, target.home, self._timeout.part(_RECOVERY_SECONDS), check)
            self._plan, self._staging = self._stage()
        except BaseException:
            calls.close(home_fd)
            raise

    def _stage(self) -> tuple[CommitPlan, StagingDirectory]:
        for _ in range(_ATTEMPTS):
            save_id = secrets.token_hex(_ID_BYTES)
            plan = self._planned(save_id)  # first: it raises before anything is made
            self.require_names(*plan.shards, *([] if plan.index is None else [plan.index]))
            staging = StagingDirectory.create(self._home_fd, save_id)
            if staging is not None:
                if plan.commit == "replacement":
                    keep_default_list(self._home_fd, self._target.name, staging.files_fd)
                return plan, staging
        raise OSError(f"no staging directory in {_ATTEMPTS} attempts")

    def _planned(self, save_id: str) -> CommitPlan:
        """Return the policy's plan; it reads the old checkpoint."""
        try:
            return self._policy(self._home_fd, save_id)
        except StorageError:
            raise
        except OSError as error:
            path = self._target.path
            if isinstance(error.filename, str):
                path = os.path.join(self._target.home, error.filename)
            raise refused("reading the old checkpoint", path, error) from error

    @property
    def path(self) -> str:
        """The destination, links followed, for messages and results."""
        return self._target.real

    @property
    def files_path(self) -> str:
        """Directory of the new files while the transaction is open, for libraries that write files by their path."""
        return os.path.join(self._target.home, STAGING_PREFIX + self._staging.save_id, FILES_NAME)

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names that the shards will have after the commit, in the plan's order."""
        return self._plan.shards

    @property
    def takes_index(self) -> bool:
        """Whether `commit` takes an index (more than one shard, or a directory that has one already)."""
        return self._plan.index is not None

    # Prepare.

    def require_names(self, *names: str) -> None:
        """Require that the filesystem allows names of this length, before anything is written.

        Raises:
            StorageError: One is too long.
        """
        try:
            limit = os.fpathconf(self._home_fd, "PC_NAME_MAX")
        except (OSError, ValueError):
            limit = _DEFAULT_NAME_BYTES
        for name in names:
            if len(os.fsencode(name)) > limit:
                raise StorageError(
                    "the name of a file is too long for the filesystem; choose a shorter one",
                    path=os.path.join(self._target.home, name),
                    errno=errno.ENAMETOOLONG,
                    expected=f"at most {limit} bytes",
                    found=len(os.fsencode(name)),
                )

    def invite(self) -> Invitation:
        """Return what other processes need to write into the shards (`JoinedStaging`); called once, after `create`.

        Raises:
            StorageError: The operating system reported an error.
        """
        nonce = secrets.token_hex(_NONCE_BYTES)
        try:
            write_small(self._staging.fd, NONCE_NAME, nonce.encode(), durable=False)
        except OSError as error:
            raise write_refused("preparing the files for several processes", self.path, error) from error
        return Invitation(
            staging=os.path.dirname(self.files_path),
            nonce=nonce,
            destination=self.path,
            shard_names=self.shard_names,
            is_file=self._target.kind == "file",
            takes_index=self.takes_index,
            durable=self._durable,
        )

    def create(self, nbytes: Sequence[int], own_bytes: Sequence[int] | None = None) -> Sequence[LocalFileWriter]:
        """Create all shards, their space reserved; see `Transaction.create`.

        Args:
            nbytes: Size of each.
            own_bytes: Bytes of each that this process writes. If given, other processes write the rest: a writer's
                `finish` makes this process's part durable, and `finish_file` completes a shard when all have ended.
        """
        shards = self._plan.shards
        self._require(not self._ended, "the save has ended")
        self._require(not self._writers and len(nbytes) == len(shards), f"{len(shards)} shards are created, once")
        single = self._target.kind == "file"
        self._writers = create_files(
            self._staging.files_fd,
            list(zip(shards, nbytes, strict=True)),
            path=self.path,
            where=[self.path if single else os.path.join(self.path, name) for name in shards],
            attributes=[None if own_bytes else self._replaced_attributes(name) for name in shards],
            durable=self._durable,
            is_shared=own_bytes is not None,
        )
        if own_bytes is not None:
            self._is_shared = True
            for writer, own in zip(self._writers, own_bytes, strict=True):
                writer.own_bytes = own
        return self._writers

    def _replaced_attributes(self, shard: str) -> FileAttributes | None:
        """Return the attributes that a new shard keeps: of the file that it replaces, else of an old shard."""
        existing = self._plan.existing
        own = attributes_at(self._home_fd, shard) if shard in existing.files else None
        return own or existing.shard_attributes

    def finish_file(self, name: str, nbytes: int | None = None) -> None:
        """Complete a shard that another library or other processes wrote: set its attributes, make it durable.

        Args:
            name: Its name below `files_path`.
            nbytes: Size that it must have, if that is known.

        Raises:
            StorageError: It has another size, or the operating system reported an error.
        """
        try:
            with closing(calls.open_file(name, os.O_RDWR, dir_fd=self._staging.files_fd)) as fd:
                found = os.fstat(fd).st_size
                if nbytes is not None and found != nbytes:
                    message, path = "a file has another size than it was created with", os.path.join(self.path, name)
                    raise StorageError(message, path=path, expected=nbytes, found=found)
                attributes = self._replaced_attributes(name)
                if attributes is not None:
                    attributes.apply(fd)
                if self._durable:
                    calls.fsync(fd)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise write_refused("syncing", os.path.join(self.path, name), error) from error
        self._finished.add(name)

    def digest(self, name: str, hasher: Hasher, check: Callable[[], None]) -> str:
        """Return the digest of a shard that is complete; see `digest_of_file`."""
        return digest_of_file(self._staging.files_fd, name, os.path.join(self.path, name), hasher, check)

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
            raise refused(f"reading {name}", self.path, error) from error

    def prepare_commit(self, check: Callable[[], None] = lambda: None) -> None:
        """Do all that precedes the commit and can be cancelled: take the directory's lock where the commit needs it.

        `commit` does this itself if it was not called. After an error or a cancel the caller rolls back.

        Args:
            check: Called during the wait; it raises to end it, as `Operation.check` does.

        Raises:
            ConcurrentSaveError: Another save holds the lock, and the save's `lock_timeout` has passed.
            StorageError: The operating system reported an error.
        """
        if self._lock is not None or self._ended:
            return
        try:
            if self._plan.commit == "replacement":
                keep_tree(self._home_fd, self._target.name, self._staging.files_fd)
                if self._durable:
                    _sync_tree(self.files_path)
            with ExitStack() as stack:
                if self._plan.commit != "directory":
                    stack.enter_context(self._directory_lock(check))
                self._lock = stack.pop_all()
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise write_refused("publishing the checkpoint", self.path, error) from error

    def _directory_lock(self, check: Callable[[], None]) -> AbstractContextManager[None]:
        home, path = self._target.home, self._target.path
        return directory_lock(self._home_fd, home, self._timeout, check, destination=path)

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
        written = (writer.name for writer in self._writers if writer.finished and not self._is_shared)
        finished = self._finished.union(written)
        self._require(not self._ended, "the save has ended")
        self._require(finished.issuperset(plan.shards), "not all files are finished")
        self._require((index is not None) == self.takes_index, "an index is missing" if index is None else "no index")
        for note in notes:
            _require_plain(note.name)
        try:
            self.prepare_commit()
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
        written = self._surveyed()
        try:
            calls.rename_new(FILES_NAME, name, source_fd=self._staging.fd, target_fd=self._home_fd, is_directory=True)
        except OSError as error:
            if error.errno in _TAKEN:
                raise self._conflict() from error
            if is_same(self._home_fd, name, files_fd):
                raise self._uncertain("the system reported an error for a rename that it did", error) from error
            raise
        self._published = written
        self._confirm()

    def _replace_directory(self) -> None:
        """Rename a directory, whose files are durable; it replaces a directory of the same name."""
        home_fd, name = self._home_fd, self._target.name
        written = self._surveyed()
        with ExitStack() as stack:
            aside = None
            if calls.exists(name, dir_fd=home_fd):
                aside = stack.enter_context(aside_directory(home_fd))
                calls.rename(name, name, source_fd=home_fd, target_fd=aside.fd)
            try:
                calls.rename(FILES_NAME, name, source_fd=self._staging.fd, target_fd=home_fd)
            except OSError:
                if aside is not None:
                    with suppress(OSError):  # recovery puts it back
                        put_back(home_fd, self._target.home, aside)
                raise
            self._published = written
            self._unlock()
            self._confirm()
            if aside is not None:
                self._remove_replaced(aside)

    def _remove_replaced(self, aside: Aside) -> None:
        """Delete what a save has written in the directory that was replaced; keep the rest."""
        home_fd, home = self._home_fd, self._target.home
        where = os.path.join(home, aside.name)
        try:
            put_back(home_fd, home, aside, lambda name: merge_replaced(where, aside.fd, home_fd, name))
        except OSError as error:
            self._cleanup_error = error

    def _publish_files(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Publish files in a directory that exists, under its lock."""
        if self._last_wins:
            self._plan = self._planned(self._staging.save_id)
        self._require_unchanged()
        try:
            record = self._record(index, notes)
            files = {name: identity_at(self._staging.files_fd, name) for name in (*record.moves, record.last)}
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
            self._cleanup_error = error
        with suppress(OSError):  # retention does not delete what is not described
            self._published = self._written(files, notes)

    def _require_unchanged(self) -> None:
        """Require that the destination is as planned. Called under the lock, and also where locks do not exist."""
        existing = self._plan.existing
        if existing.index is not None:
            index = read_small(self._home_fd, existing.index, MAX_INDEX_BYTES)
            if digest_of(index) != existing.index_sha256:
                raise self._conflict()
        for name in dict.fromkeys((*existing.files, *self._plan.shards)):
            if identity_at(self._home_fd, name) != existing.files.get(name):
                raise self._conflict()

    def _record(self, index: bytes | None, notes: Sequence[Note]) -> JournalRecord:
        """Write index and notes into the staging directory, and the journal's record of the commit."""
        plan, staging, shards = self._plan, self._staging, self._plan.shards
        assert plan.commit != "directory" and plan.commit != "replacement"
        moves, last = (shards, plan.index) if plan.index is not None else ((), shards[0])
        if plan.index is not None:
            assert index is not None
            write_small(
                staging.files_fd, plan.index, index, attributes=plan.existing.index_attributes, durable=self._durable
            )
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

    def _surveyed(self) -> WrittenFiles:
        """Return what the rename of the staged directory will publish."""
        found = survey(self._staging.files_fd, self._target.real)
        parents = {self._target.home: directory_identity(self._home_fd), **self._parents}
        return WrittenFiles(found.files, {**found.directories, **parents}, found.made | self._parents.keys())

    def _written(self, files: Mapping[str, Identity | None], notes: Sequence[Note]) -> WrittenFiles:
        """Return what was published in a directory that existed: files that were staged, and notes."""
        home, found = self._target.home, dict(files)
        for note in notes:
            identity = identity_at(self._home_fd, note.name)
            if note.after is not None and read_small(self._home_fd, note.name, MAX_NOTE_BYTES) == note.after:
                found[note.name] = identity
        return WrittenFiles(
            {os.path.join(home, name): identity for name, identity in found.items() if identity is not None},
            {home: directory_identity(self._home_fd), **self._parents},
            self._parents.keys(),
        )

    def _stamp(self, name: str) -> Stamp:
        stamp = stamp_of(self._staging.files_fd, name)
        if stamp is None:
            raise StorageError(
                "a new file was removed from the staging directory during the save; save again",
                path=self._target.path,
                errno=errno.ENOENT,
                expected=name,
            )
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
                    raise self._conflict() from error
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
            if self._are_all_staged(record):
                self._undo(record)  # nothing was replaced yet
                if not self._needs_recovery:
                    self._withdraw(error)
                    raise
            raise self._uncertain(_INTERRUPTED, error) from error

    def _are_all_staged(self, record: JournalRecord) -> bool:
        """Return whether all new files are still in the staging directory; False if that cannot be read."""
        files_fd = self._staging.files_fd
        try:
            return all(stamp_of(files_fd, name) is not None for name in (*record.moves, record.last))
        except OSError:
            return False

    def _undo(self, record: JournalRecord) -> None:
        """Undo the visible changes; if that fails the record stays, for recovery.

        Raises:
            CommitUncertainError: The commit is in place, or that cannot be read.
        """
        self._needs_recovery = True
        try:
            committed = record.commit != "files" and is_committed(self._home_fd, record)
        except OSError as error:
            raise self._uncertain(_UNREADABLE, error) from error
        if committed:
            raise self._uncertain("the system reported an error for a rename that it did")
        try:
            roll_back(self._home_fd, self._staging.fd, record, durable=self._durable)
            self._needs_recovery = False
        except OSError as error:
            self._cleanup_error = error

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

    def published(self) -> WrittenFiles:
        """Return what the commit published."""
        return self._published

    def roll_back(self) -> None:
        """Remove all new files. Idempotent; never raises; does nothing after a commit."""
        if not self._ended:
            self._end()

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def _end(self) -> None:
        self._ended = True
        self._unlock()
        for writer in self._writers:
            writer.close()
        if self._needs_recovery:
            self._staging.release()
        else:
            self._staging.remove()
        calls.close(self._home_fd)
        self._log_cleanup_error()

    # Errors.

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.path}: {message}")

    def _uncertain(self, message: str, error: OSError | None = None) -> CommitUncertainError:
        reason = f": {os.strerror(error.errno)}" if error is not None and error.errno else ""
        return CommitUncertainError(message + reason, path=self._target.path, errno=error.errno if error else None)

    def _conflict(self) -> ConcurrentSaveError:
        return ConcurrentSaveError(
            "another save, or another program, changed the destination while this save was under way; this one was "
            "rolled back",
            path=self._target.path,
        )

    def _log_cleanup_error(self) -> None:
        error, self._cleanup_error = self._cleanup_error, None
        if error is not None:
            message = "%s: cleaning up failed, the next save here or `stio gc` completes it: %s"
            log(logging.WARNING, message, self._target.path, error)


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
