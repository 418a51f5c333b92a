"""A save to a local filesystem as one transaction: prepare, commit, or roll back.

Prepare: new files are created in a staging directory, written and made durable (`create`, `finish_file`); then the
lock is taken that the commit needs (`prepare_commit`, the last step that can be cancelled). Commit: a `Publication`
makes them visible, by the plan that the transaction's policy made. Roll back: the staging directory is removed. After a
crash recovery does the same.

Other processes may write into the files too. The process that has the transaction owns the staging directory: it makes
it, locks it, creates the files, commits, and removes it. It gives the others an `Invitation`. They open the directory
by its path, and compare a random text in it, since the same path may lead to another directory on another machine. They
hold no lock: if the owner dies, recovery removes the directory, and what they still write goes into files that have no
name any more. Their `JoinedTransaction` ends with the last byte that they write.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from typing import Self

import msgspec

from stio.errors import CommitUncertainError, StioError, StorageError
from stio.format.files import INDEX_SUFFIX, MANIFEST_SUFFIX, Hasher
from stio.runtime import mark_progress
from stio.runtime.memory import allocate
from stio.storage.base import Note, SaveRules, Transaction, digest_of_source
from stio.storage.checks import open_existing, refusals, refused, resolve_links
from stio.storage.commit import syscalls as calls
from stio.storage.commit.destination import (
    CommitPlan,
    CommitPolicy,
    Home,
    LocalDestination,
    SingleFile,
    choose_names,
    describe_existing,
    existing_checkpoint,
    is_one_file,
    open_home,
    require_replaceable,
    resolve,
)
from stio.storage.commit.directory_lock import (
    LOCK_TIMEOUT_SECONDS,
    LockTimeout,
    directory_lock,
    is_directory_lock,
    is_same,
)
from stio.storage.commit.files import (
    MAX_INDEX_BYTES,
    FileAttributes,
    LocalFileWriter,
    attributes_at,
    closing,
    create_files,
    read_small,
    write_small,
    write_whole,
)
from stio.storage.commit.journal import (
    FILES_NAME,
    MAX_NOTE_BYTES,
    STAGED_FILE_SUFFIX,
    STAGING_PREFIX,
    NoRenameError,
    StagingDirectory,
    is_plain,
)
from stio.storage.commit.publication import Publication
from stio.storage.commit.recovery import recover
from stio.storage.commit.retention import WrittenFiles
from stio.storage.local import is_local, open_at
from stio.text import log

NONCE_NAME = "shared"
"""File in a staging directory with the text that the processes compare."""

_ID_BYTES = 5
_NONCE_BYTES = 16
_ATTEMPTS = 8
_RECOVERY_SECONDS = 1.0
"""Longest time that a save waits for a lock in the recovery that it begins with, which it can do without."""
_VISIBLE_SECONDS = 5.0
"""Longest time after which a network filesystem shows a new directory to another machine."""
_USUAL_NAME_BYTES = 255
_HASHED_BYTES = 4 << 20


def begin_local(
    destination: str | os.PathLike[str],
    num_shards: int,
    rules: SaveRules,
    check: Callable[[], None] = lambda: None,
) -> LocalTransaction:
    """Begin the transaction of a save of tensors: recover dead saves, plan the commit, make a staging directory.

    With `commit="files"` over a checkpoint its files are replaced one by one under the old index, and **a reader in
    that window (some milliseconds) may mix both**. After a crash in the window the mixture stays until the next save
    or `collect_garbage` rolls the save forward. Without durability a crash of the process still leaves the old or the
    new checkpoint.

    Args:
        destination: One file if it ends in `.safetensors`, else a directory. Links are followed, missing parents made.
        num_shards: Number of files of tensors.
        rules: Names of the files, what publishes them, and how safe that is.
        check: Called while it waits here; it raises to end the wait, as `Operation.check` does.

    Raises:
        ValueError: Arguments contradict each other, or do not fit the content of the destination.
        StorageError: The destination is of another kind, or cannot be written.
    """
    if num_shards != 1 and is_one_file(destination):
        raise ValueError(f"{os.fsdecode(destination)}: one file cannot hold {num_shards} shards; give a directory")
    local = resolve(destination)

    def policy(home_fd: int, save_id: str) -> CommitPlan:
        existing = describe_existing(home_fd, local, rules.filename_pattern)
        plan = choose_names(local, existing, rules, num_shards, save_id)
        if local.kind != "fresh":
            require_replaceable(home_fd, local, plan.shards)
        return plan

    durable = rules.durability == "full"
    return LocalTransaction(local, policy, durable=durable, lock_timeout=rules.lock_timeout, check=check)


def begin_directory(path: str | os.PathLike[str], *, durable: bool) -> LocalTransaction:
    """Begin the transaction of a directory whose files other libraries and other saves write, below its `files_path`.

    `commit` makes every file in it durable and renames it to `path`, in the place of a directory of this name. That
    one is set aside shortly before: if the process dies between these two steps, there is no directory at `path` until
    the next save there, or `collect_garbage`, puts the old one back.

    Of the old directory only that is deleted which its list (`retention.py`) names and that is unchanged. What else is
    in it is kept beside it as `.stio-kept-<id>`, with a warning; without a list that is all of it.

    Args:
        path: Path of the directory. Links to its parent are followed, missing parents made.
        durable: Whether anything is synced.

    Raises:
        StorageError: The operating system reported an error.
    """
    with refusals("examining the destination", os.fspath(path)):
        home, name = os.path.split(os.path.abspath(path))  # raises if there is no working directory
        if "\0" in name:
            raise ValueError("a path cannot contain NUL")
        fd, real, rest = open_existing(home)
    home = os.path.join(real, *rest)
    destination = LocalDestination(os.fspath(path), "fresh", home, name, above_fd=fd, missing=tuple(rest))
    return LocalTransaction(destination, lambda home_fd, save_id: CommitPlan("replacement", (), None), durable=durable)


def write_small_file(destination: SingleFile, data: bytes) -> bool:
    """Write one small file, durably and in one step, in the calling thread; without a staging directory.

    The new file gets a name beside its destination, and is locked until it is renamed: recovery removes one that is
    not. Two directories, two locks and their removal would take longer than to write a file of 1 MiB.

    Args:
        destination: The file; its directory exists.
        data: Its content.

    Returns:
        False: nothing was done, since here a transaction has more to do: other saves may be under way, files beside
        this one describe it or hide it, or the filesystem is not of this machine.

    Raises:
        StorageError: The destination is of another kind, or the operating system reported an error.
        CommitUncertainError: See `LocalTransaction.commit`.
    """
    local = resolve(destination)
    name = f"{STAGING_PREFIX}{secrets.token_hex(_ID_BYTES)}{STAGED_FILE_SUFFIX}"
    try:
        home = open_home(local, durable=True)
        with closing(home.fd):
            if not is_local(home.fd) or _concerns_transactions(home.fd):
                return False
            require_replaceable(home.fd, local, (local.name,))
            attributes = attributes_at(home.fd, local.name)
            with closing(calls.open_file(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=home.fd)) as fd:
                try:
                    if not calls.try_lock(fd) or not is_same(home.fd, name, fd):
                        return False  # a recovery has seen it before it was locked
                    write_whole(fd, data, 0)
                    if attributes is not None:
                        attributes.apply(fd)
                    calls.fsync(fd)
                    return _publish_alone(home, name)
                finally:
                    with suppress(OSError):
                        calls.unlink(name, dir_fd=home.fd)  # nothing, once it is renamed
    except StioError:
        raise
    except OSError as error:
        raise _refused_here("saving", local.path, error) from error


def _publish_alone(home: Home, name: str) -> bool:
    """Rename a staged file to the destination's name, if no other save has begun here; return whether it did.

    That is looked at under the directory's lock, under which other saves compare what they found with what is there.

    Raises:
        CommitUncertainError: The directory was not synced behind the rename.
    """
    local = home.destination
    with directory_lock(home.fd, local.home, destination=local.path):
        if _concerns_transactions(home.fd, own=name):
            return False
        calls.rename(name, local.name, source_fd=home.fd, target_fd=home.fd)
        try:
            home.sync()
        except OSError as error:
            reason = f"syncing the directory failed after the commit: {error.strerror}"
            raise CommitUncertainError(reason, path=local.path, errno=error.errno) from error
    return True


def _concerns_transactions(home_fd: int, own: str = "") -> bool:
    """Return whether a directory holds what a transaction would look at, besides its lock and this name."""
    return any(
        (name != own and not is_directory_lock(name) and name.startswith(STAGING_PREFIX))
        or name.endswith((INDEX_SUFFIX, MANIFEST_SUFFIX))
        for name in os.listdir(home_fd)
    )


def _refused_here(what: str, path: str, error: OSError) -> StorageError:
    failure = refused(what, path, error)
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        failure.message += "; the directory that holds the checkpoint must be readable and writable"
    return failure


@dataclass(frozen=True, slots=True)
class NamedFiles:
    """Files of an existing directory whose names another library chooses, as the destination of a save.

    Of several saves at once, each replaces the files that exist at that moment.
    """

    path: str
    """The directory, as the caller gave it."""
    files: tuple[str, ...]
    """Names of the new files of tensors."""
    index: str
    """Name of the index, which several files get."""

    def begin(self, **_: object) -> LocalTransaction:
        """Begin a save. It is durable, whatever the options.

        Raises:
            FileNotFoundError, NotADirectoryError: There is no such directory.
            StorageError: The operating system refused.
        """
        real, home_fd = self._open()
        destination = LocalDestination(self.path, "update", real, "", last_wins=True, above_fd=home_fd)
        return LocalTransaction(destination, self._plan, durable=True)

    def clear(self) -> None:
        """Remove the old files if no new ones replace them; an index first."""
        refuses = refusals("saving", self.path, caught=(OSError,))
        with closing(self._open()[1]) as home_fd, refuses, directory_lock(home_fd, self.path):
            for name in self._plan(home_fd, "").existing.files:
                calls.unlink(name, dir_fd=home_fd)
                if name.endswith(INDEX_SUFFIX):
                    calls.sync_directory(home_fd)
            calls.sync_directory(home_fd)

    def old_names(self, names: Sequence[str], index: bytes | None) -> Sequence[str]:
        """Return the files that are removed or replaced, an index first.

        Args:
            names: What is in the directory, sorted.
            index: Content of its index, None if there is none.
        """
        return ()

    def _plan(self, home_fd: int, save_id: str) -> CommitPlan:
        raw = read_small(home_fd, self.index, MAX_INDEX_BYTES, where=self.path)
        is_sharded = len(self.files) > 1
        names = (*self.old_names(sorted(os.listdir(home_fd)), raw), *self.files)
        names = tuple(name for name in names if not (is_sharded and name == self.index))
        existing = existing_checkpoint(home_fd, self.index, raw, names)
        if not is_sharded:
            return CommitPlan("file", self.files, None, existing)
        # Existing names are replaced one by one. After a crash, recovery completes the replacement from a record.
        taken = existing.files.keys() & set(self.files)
        return CommitPlan("files" if taken else "index", self.files, self.index, existing)

    def _open(self) -> tuple[str, int]:
        """Return the path of the directory without links, and the directory, open."""
        try:
            real = resolve_links(self.path)
            return real, calls.open_directory(real)
        except (StorageError, FileNotFoundError, NotADirectoryError):
            raise
        except OSError as error:
            raise refused("opening the directory", self.path, error) from error


class FilesTransaction(Transaction):
    """What the transactions have in common that write into one staging directory."""

    _files_fd = -1
    """The directory with the new files."""
    _is_one_file = False
    """Whether the destination is one file."""
    _durable: bool
    """Whether complete files must survive a power cut."""
    _own_bytes: Sequence[int] | None = None

    def create(self, nbytes: Sequence[int], own_bytes: Sequence[int] | None = None) -> Sequence[LocalFileWriter]:
        """Create all shards, their space reserved, or open those of the owner; see `Transaction.create`.

        Args:
            nbytes: Size of each.
            own_bytes: Bytes of each that this process writes. If given, other processes write the rest: a writer's
                `finish` makes this process's part durable, and `finish_file` completes a shard when all have ended.
        """
        self._own_bytes = own_bytes
        super().create(nbytes)
        return self._writers

    def digest(self, name: str, hasher: Hasher, check: Callable[[], None]) -> str:
        """Return the digest of a shard that is complete.

        Args:
            name: Its name.
            hasher: A new one.
            check: Called between reads; it raises to end them.

        Raises:
            StorageError: The operating system reported an error.
        """

        def before_read(_: int) -> None:
            mark_progress()
            check()

        file = open_at(name, self._final_path(name), self._files_fd)
        try:
            return digest_of_source(file, hasher, allocate(_HASHED_BYTES), before_read)
        finally:
            file.close()

    def _end(self) -> None:
        for writer in self._writers:
            writer.close()

    def _writer(self, name: str, nbytes: int, attributes: FileAttributes | None = None) -> LocalFileWriter:
        """Return the writer of a shard, of which this process writes so many bytes."""
        return LocalFileWriter(
            self._files_fd,
            name,
            self._final_path(name),
            nbytes,
            attributes=attributes,
            durable=self._durable,
        )

    def _final_path(self, name: str) -> str:
        """Return the path that a file will have, for messages."""
        return self.path if self._is_one_file else os.path.join(self.path, name)


class LocalTransaction(FilesTransaction):
    """One save to a local filesystem. Made by `begin_local` or `begin_directory`.

    If the last of several saves wins, `commit` makes the plan again, under the lock, and replaces the files of that
    moment. Otherwise it raises if the destination has changed since the first plan.

    Args:
        destination: Its destination; its `above_fd` is closed, also if this raises.
        policy: Makes the plan: names of new files, files to replace, step that commits.
        durable: Whether anything is synced.
        lock_timeout: Seconds for which it waits for locks of other saves, all waits together.
        check: Called while it waits here; it raises to end the wait.

    Raises:
        ValueError: The policy refused.
        StorageError: A name is too long, the old checkpoint could not be read, or the operating system reported an
            error. All that was made is removed again.
    """

    is_recorded = True

    def __init__(
        self,
        destination: LocalDestination,
        policy: CommitPolicy,
        *,
        durable: bool,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._destination, self._policy, self._durable = destination, policy, durable
        self.path = destination.real
        self._is_one_file = destination.kind == "file"
        self._finished: set[str] = set()  # names of the files that other libraries or processes wrote
        self._timeout = LockTimeout(lock_timeout)
        self._lock = ExitStack()  # holds the lock of the directory, where the commit needs it
        try:
            self._home = open_home(destination, durable=durable)
            try:
                self._recover(LockTimeout(min(_RECOVERY_SECONDS, lock_timeout)), check)
                self._plan, self._staging = self._stage()
            except BaseException:
                calls.close(self._home.fd)
                raise
        except StorageError:
            raise
        except OSError as error:
            raise self._begin_refused(error) from error
        self._files_fd = self._staging.files_fd
        self._publication = Publication(self._home, self._staging, self._lock, self._plan)
        self.shard_names, self.takes_index = self._plan.shards, self._plan.index is not None

    def _recover(self, timeout: LockTimeout, check: Callable[[], None]) -> None:
        left = recover(self._home.fd, self._destination.home, timeout, check)
        if left.newer and self._destination.kind != "fresh":  # beside a new directory it concerns another destination
            raise StorageError(
                "a save by another version of stio was interrupted here; run `stio gc` of that version, or delete this "
                "directory if the checkpoint beside it is whole",
                path=left.newer[0],
                errno=errno.ENOTSUP,
            )

    def _begin_refused(self, error: OSError) -> StorageError:
        failure = _refused_here("beginning the save", self._destination.path, error)
        if isinstance(error, NoRenameError):
            failure.message += (
                "; a save publishes by a rename, which this filesystem does not have: save to another one, or to a "
                "bucket that is mounted here (mount-s3) by its URL, s3://bucket/path"
            )
            for parent in reversed(self._home.made):
                with suppress(OSError):  # it has been used meanwhile
                    calls.remove_directory(parent)
        return failure

    def _stage(self) -> tuple[CommitPlan, StagingDirectory]:
        for _ in range(_ATTEMPTS):
            save_id = secrets.token_hex(_ID_BYTES)
            plan = self._planned(save_id)  # first: it raises before anything is made
            self.require_names(*plan.shards, *([] if plan.index is None else [plan.index]))
            with suppress(FileExistsError):
                return plan, StagingDirectory(self._home.fd, save_id)
        raise OSError(f"no staging directory in {_ATTEMPTS} attempts")

    def _planned(self, save_id: str) -> CommitPlan:
        """Return the policy's plan; it reads the old checkpoint."""
        try:
            return self._policy(self._home.fd, save_id)
        except StorageError:
            raise
        except OSError as error:
            path = self._destination.path
            if isinstance(error.filename, str):
                path = os.path.join(self._destination.home, error.filename)
            raise refused("reading the old checkpoint", path, error) from error

    @property
    def files_path(self) -> str:
        """Directory of the new files while the transaction is open, for libraries that write files by their path."""
        return os.path.join(self._destination.home, STAGING_PREFIX + self._staging.save_id, FILES_NAME)

    # Prepare.

    def require_names(self, *names: str) -> None:
        """Require that the filesystem allows names of this length, before anything is written.

        Raises:
            StorageError: One is too long.
        """
        try:
            limit = os.fpathconf(self._home.fd, "PC_NAME_MAX")
        except OSError:  # a sandbox refuses it
            limit = _USUAL_NAME_BYTES
        for name in names:
            if len(os.fsencode(name)) > limit:
                raise StorageError(
                    "the name of a file is too long for the filesystem; choose a shorter one",
                    path=os.path.join(self._destination.home, name),
                    errno=errno.ENAMETOOLONG,
                    expected=f"at most {limit} bytes",
                    found=len(os.fsencode(name)),
                )

    def invite(self) -> Invitation:
        """Return what other processes need to write into the shards (`JoinedTransaction`); called once, after `create`.

        Raises:
            StorageError: The operating system reported an error.
        """
        nonce = secrets.token_hex(_NONCE_BYTES)
        with refusals("preparing the files for several processes", self.path):
            write_small(self._staging.fd, NONCE_NAME, nonce.encode(), durable=False)
        return Invitation(
            staging=os.path.dirname(self.files_path),
            nonce=nonce,
            destination=self.path,
            shard_names=self.shard_names,
            is_file=self._is_one_file,
            durable=self._durable,
        )

    def _create(self, nbytes: Sequence[int]) -> Sequence[LocalFileWriter]:
        own_bytes = self._own_bytes
        writers = [
            self._writer(name, size, None if own_bytes else self._replaced_attributes(name))
            for name, size in zip(self.shard_names, nbytes, strict=True)
        ]
        create_files(self._files_fd, writers, path=self.path)
        for writer, own in zip(writers, own_bytes or (), strict=own_bytes is not None):
            writer.share(own)
        return writers

    def _replaced_attributes(self, shard: str) -> FileAttributes | None:
        """Return the attributes that a new shard keeps: of the file that it replaces, else of an old shard."""
        existing = self._plan.existing
        own = attributes_at(self._home.fd, shard) if shard in existing.files else None
        return own or existing.shard_attributes

    def finish_file(self, name: str, nbytes: int | None = None) -> None:
        """Complete a shard that another library or other processes wrote: set its attributes, make it durable.

        Args:
            name: Its name below `files_path`.
            nbytes: Size that it must have, if that is known.

        Raises:
            StorageError: It has another size, or the operating system reported an error.
        """
        path = self._final_path(name)
        with refusals("syncing", path), ExitStack() as stack:
            fd = stack.enter_context(closing(calls.open_file(name, os.O_RDWR, dir_fd=self._files_fd)))
            if nbytes is not None and (size := os.fstat(fd).st_size) != nbytes:
                message = "a file has another size than it was created with"
                raise StorageError(message, path=path, expected=nbytes, found=size)
            attributes = self._replaced_attributes(name)
            if attributes is not None:
                attributes.apply(fd)
            if self._durable:
                calls.fsync(fd)
        mark_progress()
        self._finished.add(name)

    def read_note(self, name: str) -> bytes | None:
        """Return the content of a small file beside the old checkpoint, None if it does not exist.

        Raises:
            StorageError: The operating system reported an error, or it is larger than 64 MiB.
        """
        _require_plain(name)
        self._require_open()
        if self._destination.kind == "fresh":
            return None
        with refusals(f"reading {name}", self.path):
            return read_small(self._home.fd, name, MAX_NOTE_BYTES, where=self.path)

    def _prepare(self, check: Callable[[], None]) -> None:
        """Take the directory's lock where the commit needs it; complete a directory that other libraries have filled.

        Raises:
            ConcurrentSaveError: Another save holds the lock, and the save's `lock_timeout` has passed.
            StorageError: The operating system reported an error.
        """
        if self._plan.commit == "directory":
            return
        with refusals("publishing the checkpoint", self.path):
            if self._plan.commit == "replacement":
                _finish_tree(self._files_fd, self._home.fd, self._destination.name, check, durable=self._durable)
            home, path = self._destination.home, self._destination.path
            self._lock.enter_context(directory_lock(self._home.fd, home, self._timeout, check, destination=path))

    # Commit.

    def _require_complete(self, notes: Sequence[Note]) -> None:
        written = {writer.name for writer in self._writers if writer.finished and self._own_bytes is None}
        if not (self._finished | written).issuperset(self.shard_names):
            raise ValueError(f"{self.path}: not all files are finished")
        for note in notes:
            _require_plain(note.name)

    def _publish(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Publish; see `Transaction.commit`.

        Raises:
            CommitUncertainError: The checkpoint is in place, but may not be durable; or, with `commit="files"`, some
                of its files are replaced, and the next save or `collect_garbage` replaces the others.
        """
        with refusals("publishing the checkpoint", self.path):
            if self._destination.last_wins and self._plan.commit not in ("directory", "replacement"):
                self._publication.plan = self._planned(self._staging.save_id)
            self._publication.publish(index, notes)

    # The end.

    def published(self) -> WrittenFiles:
        """Return what the commit published."""
        return self._publication.written

    def _end(self) -> None:
        """Close everything, and remove the staging directory, unless recovery reads it; see `Publication`."""
        super()._end()
        publication = self._publication
        publication.close()
        calls.close(self._home.fd)
        if publication.cleanup_error is not None:
            message = "%s: cleaning up failed, the next save here or `stio gc` completes it: %s"
            log(logging.WARNING, message, self._destination.path, publication.cleanup_error)


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What another process needs to write into the files of a save."""

    staging: str
    """Path of the staging directory."""
    nonce: str
    """Text of the file `NONCE_NAME` in it."""
    destination: str
    """The destination, links followed."""
    shard_names: tuple[str, ...]
    """Names of the files, in the plan's order."""
    is_file: bool
    """Whether the destination is one file."""
    durable: bool
    """Whether complete files must survive a power cut."""

    def to_json(self) -> bytes:
        """Return it as text for another process."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Return the invitation that `to_json` described.

        Raises:
            StorageError: It is none.
        """
        try:
            values = json.loads(text)  # msgspec's own decoder refuses surrogates, which paths may have
            if values.keys() - cls.__dataclass_fields__.keys():
                raise ValueError("unknown keys")
            return msgspec.convert(values, cls)
        except (msgspec.MsgspecError, ValueError, AttributeError, RecursionError) as error:
            raise StorageError("another process has sent no valid invitation to its save", found=text[:80]) from error


class JoinedTransaction(FilesTransaction):
    """The part of a process that writes into the files of another process's save, which that one commits.

    Args:
        invitation: The owner's.
        check: Called while it waits for a network filesystem; it raises to end the wait.

    Raises:
        StorageError: This process does not see the owner's staging directory.
    """

    takes_index = False

    def __init__(self, invitation: Invitation, check: Callable[[], None] = lambda: None) -> None:
        self.invitation, self.path = invitation, invitation.destination
        self.shard_names, self._is_one_file = invitation.shard_names, invitation.is_file
        self._durable = invitation.durable

        def look() -> bool:
            self._files_fd = _open_files(invitation)
            return self._files_fd >= 0 or _is_on_local_filesystem(invitation.staging)

        with refusals("opening the staging directory of the save", invitation.staging):
            LockTimeout(_VISIBLE_SECONDS).wait_until(look, check)
        if self._files_fd < 0:
            raise StorageError(
                "this process does not see the files that the owner of the save has made; is the destination on a "
                "filesystem that all processes share?",
                path=invitation.destination,
                errno=errno.ENOENT,
                expected=invitation.staging,
            )

    def _create(self, nbytes: Sequence[int]) -> list[LocalFileWriter]:
        """Return writers of the files, which the owner has created; `finish` makes the part of this process durable."""
        writers = [self._writer(name, 0) for name in self.shard_names]
        for writer, own in zip(writers, self._own_bytes or nbytes, strict=True):
            writer.share(own)
        return writers

    def _publish(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Do nothing: the owner commits."""

    def _end(self) -> None:
        """Close all descriptors; no write may be under way."""
        super()._end()
        calls.close(self._files_fd)


def _open_files(invitation: Invitation) -> int:
    """Open the directory of the files; -1 if the staging directory is not there, or is another one."""
    try:
        with closing(calls.open_directory(resolve_links(invitation.staging))) as fd:
            nonce = read_small(fd, NONCE_NAME, 2 * _NONCE_BYTES, where=invitation.staging)
            return calls.open_directory(FILES_NAME, dir_fd=fd) if nonce == invitation.nonce.encode() else -1
    except FileNotFoundError:
        return -1


def _is_on_local_filesystem(staging: str) -> bool:
    """Return whether the directory above a staging directory is here, on a filesystem of this machine."""
    try:
        with closing(calls.open_directory(resolve_links(os.path.dirname(staging)))) as fd:
            return is_local(fd)
    except FileNotFoundError:
        return False


def _require_plain(name: str) -> None:
    if not is_plain(name):
        raise ValueError(f"a note is a file beside the checkpoint; its name must not contain a directory: {name!r}")


def _finish_tree(fd: int, old_dir_fd: int, name: str, check: Callable[[], None], *, durable: bool) -> None:
    """Complete a directory that other libraries have filled, or a file in it; see `LocalTransaction.finish_file`.

    Args:
        fd: The directory or file.
        old_dir_fd: The directory that holds the one that it will replace; -1: there is none.
        name: Name of that one.
        check: Called after each file; it raises to end this.
        durable: Whether all is made durable.
    """
    mode = os.fstat(fd).st_mode
    old = attributes_at(old_dir_fd, name, follow_symlinks=False) if old_dir_fd >= 0 else None
    if old is not None and stat.S_IFMT(old.status.st_mode) != stat.S_IFMT(mode):
        old = None
    if old is None and not durable:
        return
    if stat.S_ISDIR(mode):
        with ExitStack() as stack:
            old_fd = -1
            if old is not None:
                with suppress(PermissionError):  # then what is in it is not for this user either
                    old_fd = stack.enter_context(closing(calls.open_directory(name, dir_fd=old_dir_fd)))
            for entry in os.listdir(fd):
                kind = stat.S_IFMT(os.stat(entry, dir_fd=fd, follow_symlinks=False).st_mode)
                if kind in (stat.S_IFREG, stat.S_IFDIR):
                    with closing(calls.open_file(entry, os.O_RDONLY, dir_fd=fd)) as below:
                        _finish_tree(below, old_fd, entry, check, durable=durable)
    if old is not None:
        old.apply(fd)
    if durable:
        calls.sync_directory(fd) if stat.S_ISDIR(mode) else calls.fsync(fd)
    mark_progress()
    check()
