"""A save to a local filesystem as one transaction: prepare, commit, or roll back.

Prepare: new files are created in a staging directory, written and made durable (`create`, `finish_file`); then the
lock is taken that the commit needs (`prepare_commit`, the last step that can be cancelled). Commit: a `Publication`
makes them visible, by the plan that the transaction's policy made. Roll back: the staging directory is removed. After a
crash recovery does the same.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Literal

from stio.errors import StorageError
from stio.runtime.hashing import Hasher
from stio.runtime.log import log
from stio.storage.base import Note
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.attributes import FileAttributes, attributes_at, keep_default_list, keep_tree
from stio.storage.commit.directory_lock import LOCK_TIMEOUT_SECONDS, LockTimeout, directory_lock
from stio.storage.commit.file_writer import LocalFileWriter, create_files, write_refused
from stio.storage.commit.joined import NONCE_NAME, Invitation, digest_of_file
from stio.storage.commit.journal import MAX_NOTE_BYTES, is_plain
from stio.storage.commit.publication import Publication
from stio.storage.commit.recovery import recover
from stio.storage.commit.retention import WrittenFiles
from stio.storage.commit.small_files import closing, read_small, write_small
from stio.storage.commit.staging_dir import FILES_NAME, STAGING_PREFIX, StagingDirectory
from stio.storage.commit.target import (
    CommitPlan,
    CommitPolicy,
    DirectoryIdentity,
    OneFile,
    SaveTarget,
    choose_names,
    describe_existing,
    make_and_open,
    require_replaceable,
    resolve,
)
from stio.storage.paths import resolve_links

_ID_BYTES = 5
_NONCE_BYTES = 16
_ATTEMPTS = 8
_RECOVERY_SECONDS = 1.0
"""Most of its `lock_timeout` that a save spends on recovery, which it can do without."""
_DEFAULT_NAME_BYTES = 255


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
        self._target, self._home_fd, self._policy = target, home_fd, policy
        self._durable, self._last_wins = durable, last_wins
        self._writers: list[LocalFileWriter] = []
        self._finished: set[str] = set()  # names of the files that other libraries or processes wrote
        self._is_shared = False  # whether other processes write into the shards
        self._ended = False
        self._timeout = LockTimeout(lock_timeout)
        self._publication: Publication | None = None  # once the commit has begun
        self._lock: ExitStack | None = None  # holds the lock of the directory, where the commit needs it
        try:
            left = recover(home_fd, target.home, self._timeout.part(_RECOVERY_SECONDS), check)
            if left.newer and target.kind != "fresh":  # beside a new directory it concerns another destination
                raise StorageError(
                    "a save by another version of stio was interrupted here; run `stio gc` of that version, or delete "
                    "this directory if the checkpoint beside it is whole",
                    path=left.newer[0],
                    errno=errno.ENOTSUP,
                )
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
            if self._last_wins and plan.commit not in ("directory", "replacement"):
                self._plan = self._planned(self._staging.save_id)
            self._publication = Publication(
                self._target,
                self._home_fd,
                self._staging,
                self._plan,
                durable=self._durable,
                parents=self._parents,
                lock=self._lock or ExitStack(),
            )
            self._publication.publish(index, notes)
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            raise write_refused("publishing the checkpoint", self.path, error) from error
        finally:
            self._end()

    # The end.

    def published(self) -> WrittenFiles:
        """Return what the commit published."""
        return WrittenFiles() if self._publication is None else self._publication.written

    def roll_back(self) -> None:
        """Remove all new files. Idempotent; never raises; does nothing after a commit."""
        if not self._ended:
            self._end()

    def _end(self) -> None:
        self._ended = True
        if self._lock is not None:
            self._lock.close()
        for writer in self._writers:
            writer.close()
        begun = self._publication
        if begun is not None and begun.needs_recovery:
            self._staging.release()
        else:
            self._staging.remove()
        calls.close(self._home_fd)
        if begun is not None and begun.cleanup_error is not None:
            message = "%s: cleaning up failed, the next save here or `stio gc` completes it: %s"
            log(logging.WARNING, message, self._target.path, begun.cleanup_error)

    # Errors.

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            raise ValueError(f"{self.path}: {message}")


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
