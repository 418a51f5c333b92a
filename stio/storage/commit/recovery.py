"""Recovery: finds staging directories with a dead owner, and rolls their saves forward or back.

A save works in `.stio-<id>` and holds a lock on a file in it until it ends. On a filesystem of this machine a
free lock means a dead owner: the save is rolled forward or back by its journal record, then the directory is renamed to
`.stio-trash-<id>` and deleted. What it has set aside is put back before. On other filesystems locks may not reach
other machines: there the age decides too. It is measured by the clock of the filesystem, since the clocks of machines
differ.

A save does not need the recovery that it begins with: what could not be recovered, since another save holds the lock of
the directory, is left to a later one.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
import socket
import stat
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import astuple, dataclass
from operator import add

from stio import clock
from stio.errors import CheckpointNotFoundError, ConcurrentSaveError
from stio.storage.checks import refusals, refused, resolve_links
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import (
    LockTimeout,
    boot_id,
    directory_lock,
    is_directory_lock,
    is_same,
    remove_free_lock,
)
from stio.storage.commit.files import MAX_INDEX_BYTES, closing, digest_of, read_small, status_at
from stio.storage.commit.journal import (
    DELETED_PREFIX,
    FILES_NAME,
    LOCK_NAME,
    STAGED_FILE_SUFFIX,
    STAGING_PREFIX,
    JournalRecord,
    UnknownRecordError,
    clean_up,
    has_version,
    is_committed,
    make_visible,
    read_record,
    rename_for_deletion,
    roll_back,
)
from stio.storage.commit.retention import put_back
from stio.storage.local import is_local
from stio.text import log

MAX_AGE_SECONDS = 24 * 3600.0
"""On filesystems whose locks prove nothing, the owner of an older staging directory counts as dead."""

_STAGING_NAME = re.compile(r"\.stio-[0-9a-f]{8,32}")
_STAGED_FILE = re.compile(_STAGING_NAME.pattern + re.escape(STAGED_FILE_SUFFIX))
_UNLOCKED_SECONDS = 60.0
"""A staging directory is made before the lock in it; a running owner needs less time than this between the two."""

_MAX_LOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """Result of a recovery in the directories of a destination: their paths."""

    finished: tuple[str, ...] = ()
    """Staging directories whose save had committed and was rolled forward."""
    undone: tuple[str, ...] = ()
    """Staging directories whose save had not committed and was rolled back."""
    kept: tuple[str, ...] = ()
    """Staging directories whose owner runs or may run, or that could not be removed."""
    removed: tuple[str, ...] = ()
    """Directories whose deletion an earlier process had started."""
    unused: tuple[str, ...] = ()
    """Shards in a store that no index names, and that were deleted."""
    aborted: tuple[str, ...] = ()
    """Objects of a store with an upload that was begun and not completed, and that was aborted."""
    newer: tuple[str, ...] = ()
    """Those of `kept` that another version of stio has left, and only that version can complete or roll back."""
    failed: tuple[str, ...] = ()
    """Those of `kept` that have no owner, and that the system did not let this process recover or remove."""

    def __add__(self, other: GarbageReport) -> GarbageReport:
        return GarbageReport(*map(add, astuple(self), astuple(other)))


def collect_garbage(
    path: str | os.PathLike[str], *, max_age_seconds: float = MAX_AGE_SECONDS, dry_run: bool = False
) -> GarbageReport:
    """Complete or roll back saves whose process died, and remove their files.

    Every save does this in the directory where it works; this function is for a directory without further saves. Saves
    under way are not changed. Blocks.

    Args:
        path: A destination of saves. A save works in the destination or in its parent; both are searched.
        max_age_seconds: On filesystems whose locks do not show whether an owner runs (NFS, FUSE and similar ones),
            younger staging directories are not changed.
        dry_run: Change nothing; the report has what would be done now. Ages are then by the clock of this machine.

    Returns:
        Paths of the staging directories, by what was done with them.

    Raises:
        CheckpointNotFoundError: Neither the destination nor its parent exists.
        StorageError: The destination exists, but cannot be opened, or a link of another user in a directory such as
            /tmp is on the way.
    """
    name = os.fsdecode(path)
    with refusals("examining the destination", name):
        where = resolve_links(name)
    report, num_opened, timeout = GarbageReport(), 0, LockTimeout()
    for directory in (where, os.path.dirname(where)):
        try:
            opened = calls.open_directory(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if directory != where:
                continue  # this process may not list the parent, so no save of it could work there
            raise refused("opening the directory", directory, error) from error
        num_opened += 1
        with closing(opened) as fd:
            report += recover(fd, directory, timeout, max_age_seconds=max_age_seconds, dry_run=dry_run)
    if not num_opened:
        raise CheckpointNotFoundError("there is no such destination, and no save to it was interrupted", path=where)
    return report


def recover(
    home_fd: int,
    path: str,
    timeout: LockTimeout | None = None,
    check: Callable[[], None] = lambda: None,
    *,
    max_age_seconds: float = MAX_AGE_SECONDS,
    dry_run: bool = False,
) -> GarbageReport:
    """Clean up one directory; see `collect_garbage`. A directory that cannot be removed stays, without an error.

    Args:
        home_fd: The directory.
        path: Name for messages.
        timeout: How long to wait for the directory's lock, for all staging directories together; None: the default.
        check: Called between steps and during waits; it raises to end the recovery, as `Operation.check` does.
        max_age_seconds: See `collect_garbage`.
        dry_run: Change nothing.
    """
    outcomes: dict[str, list[str]] = defaultdict(list)
    recovery = _Recovery(home_fd, path, timeout or LockTimeout(), check, max_age_seconds, dry_run)
    names: list[str] = []
    with suppress(OSError):
        names = [name for name in os.listdir(home_fd) if name.startswith(STAGING_PREFIX)]
    # Interrupted deletions come first: one of them may have the name that a staging directory gets next.
    for name in sorted(names, key=lambda name: not name.startswith(DELETED_PREFIX)):
        check()
        for outcome in recovery.run(name):
            outcomes[outcome].append(os.path.join(path, name))
    return GarbageReport(**{outcome: tuple(where) for outcome, where in outcomes.items()})


@dataclass(frozen=True, slots=True)
class _Recovery:
    """The recovery of one directory; see `recover`."""

    home_fd: int
    path: str
    timeout: LockTimeout
    check: Callable[[], None]
    max_age_seconds: float
    dry_run: bool

    def run(self, name: str) -> tuple[str, ...]:
        """Clean up after what has this name; return the fields of the report to which it belongs."""
        if name.startswith(DELETED_PREFIX):
            if not self._is_trusted(status_at(self.home_fd, name)):
                return ("kept",)
            return ("removed",) if self.dry_run or self._delete(name) else ("kept", "failed")
        if is_directory_lock(name):
            if not self.dry_run:
                remove_free_lock(self.home_fd, name)
            return ()
        is_file = _STAGED_FILE.fullmatch(name) is not None
        if not is_file and not _STAGING_NAME.fullmatch(name):
            return ()
        try:
            outcome, deleted = (self._remove_staged(name), None) if is_file else self._recover(name)
            if deleted is not None and not self._delete(deleted) and deleted == name:
                raise OSError(errno.ENOTEMPTY, "it cannot be removed")
            return () if outcome is None else (outcome,)
        except (OSError, ConcurrentSaveError) as error:
            # A read-only directory too: a process that can write there will clean it up.
            log(logging.DEBUG, "%s is left alone: %s", os.path.join(self.path, name), error)
            if not isinstance(error, OSError):
                return ("kept",)
            return ("kept", "newer" if isinstance(error, UnknownRecordError) else "failed")

    def _delete(self, name: str) -> bool:
        """Delete a directory; return whether it does not exist any more."""
        calls.remove_tree(name, dir_fd=self.home_fd, check=self.check)
        try:
            return not calls.exists(name, dir_fd=self.home_fd)
        except OSError:
            return False

    def _remove_staged(self, name: str) -> str | None:
        """Remove a file that `write_small_file` has not renamed, if its owner is dead; return what was done."""
        try:
            with closing(calls.open_file(name, os.O_RDWR, dir_fd=self.home_fd)) as fd:
                if not self._is_trusted(os.fstat(fd)) or not is_local(fd) or not calls.try_lock(fd):
                    return "kept"
                if not self.dry_run:
                    calls.unlink(name, dir_fd=self.home_fd)
                calls.unlock(fd)
                return "undone"
        except FileNotFoundError:
            return None
        except PermissionError:
            return "kept"  # that of another user

    def _recover(self, name: str) -> tuple[str | None, str | None]:
        """Roll one save forward or back, if its owner is dead.

        Returns:
            What was done, None if another recovery did it; and the directory's new name, to delete it by. It is deleted
            when none of its files is open: filesystems in user space keep the names of open files.
        """
        home_fd, fd = self.home_fd, -1
        with ExitStack() as stack:
            try:
                fd = stack.enter_context(closing(calls.open_directory(name, dir_fd=home_fd)))
                lock = self._open_lock(fd) if self._is_trusted(os.fstat(fd)) else None
            except FileNotFoundError:
                return None, None
            except PermissionError:
                if fd >= 0:
                    raise
                return "kept", None  # that of another user, whose save may run
            if lock is None:
                return "kept", None
            stack.callback(calls.close, lock)
            held = calls.try_lock(lock)
            if held:
                stack.callback(calls.unlock, lock)
            if held is False or not ((held and is_local(lock)) or self._is_old(lock)):
                return "kept", None
            if not is_same(home_fd, name, fd):
                return None, None
            # Another version may have a record of another name; its lock says so.
            if has_version(read_small(fd, LOCK_NAME, _MAX_LOCK_BYTES) or b""):
                raise UnknownRecordError(errno.ENOTSUP, "the lock of another version of stio")
            if self.dry_run:
                return "finished" if _is_forward(home_fd, read_record(fd)) else "undone", None
            with directory_lock(home_fd, self.path, self.timeout, self.check):
                outcome = _roll(home_fd, fd)
                put_back(home_fd, fd, os.path.join(self.path, name), durable=True)
                return outcome, rename_for_deletion(home_fd, name)

    def _is_trusted(self, status: os.stat_result | None) -> bool:
        """Return whether a directory may be deleted, and its record may decide what is deleted beside it.

        In a directory such as /tmp every user may create files, and may delete only files of that user. There, the
        record of another user would cause deletions with the rights of this process.
        """
        home = os.fstat(self.home_fd)
        return status is None or not home.st_mode & stat.S_ISVTX or status.st_uid in (os.geteuid(), home.st_uid)

    def _open_lock(self, fd: int) -> int | None:
        """Open the lock of a staging directory; None if its owner may be about to create it."""
        try:
            return calls.open_file(LOCK_NAME, os.O_RDWR, dir_fd=fd)
        except FileNotFoundError:
            if self._age_seconds(fd) < _UNLOCKED_SECONDS:
                return None
        if self.dry_run:
            return calls.open_directory(".", dir_fd=fd)  # in place of the lock: an owner that has made none is dead
        try:
            # Created and held here: an owner that is only slow cannot take it, and makes another staging directory.
            return calls.open_file(LOCK_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, dir_fd=fd)
        except FileExistsError:
            return None

    def _is_old(self, lock: int) -> bool:
        """Return whether the owner of a lock counts as dead where the lock proves nothing."""
        return self._age_seconds(lock) >= self.max_age_seconds and not _owner_runs_here(lock)

    def _age_seconds(self, fd: int) -> float:
        """Return the time since a file, or a directory, of a directory was changed.

        A network filesystem sets that time by its own clock, which may differ from the one of this machine by hours. So
        it is compared with the time of a new directory beside it; in a dry run with this machine's clock.
        """
        changed = os.fstat(fd).st_mtime
        if self.dry_run:
            return clock.now() - changed
        name = DELETED_PREFIX + secrets.token_hex(5)  # if this process dies, the next recovery deletes it
        with suppress(OSError):
            calls.make_directory(name, dir_fd=self.home_fd, mode=0o700)
            new = status_at(self.home_fd, name)
            calls.remove_directory(name, dir_fd=self.home_fd)
            if new is not None:
                return new.st_mtime - changed
        return -math.inf  # nothing can be recovered here


def _owner_runs_here(lock_fd: int) -> bool:
    """Return whether the owner of a lock is a process of this machine that runs."""
    try:
        owner = json.loads(os.pread(lock_fd, _MAX_LOCK_BYTES, 0))
        if (owner["host"], owner["boot"]) != (socket.gethostname(), boot_id()):
            return False
        os.kill(int(owner["pid"]), 0)  # signal 0 only checks whether there is such a process
    except PermissionError:
        return True  # as a process of another user
    except (ProcessLookupError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return False
    return True


def _is_forward(home_fd: int, record: JournalRecord | None) -> bool:
    """Return whether a dead save is to be rolled forward."""
    if record is None:
        return False
    if is_committed(home_fd, record):
        return True
    # Forward only over the checkpoint that it had started to replace: without locks between machines, another save
    # may have published one since.
    return (
        record.commit == "files" and digest_of(read_small(home_fd, record.last, MAX_INDEX_BYTES)) == record.old_sha256
    )


def _roll(home_fd: int, fd: int) -> str:
    """Roll a dead save forward if it had committed, otherwise back; return the name of the report's field."""
    record = read_record(fd)
    if record is None:
        return "undone"  # nothing was visible yet
    if not _is_forward(home_fd, record):
        roll_back(home_fd, fd, record, durable=True)
        return "undone"
    if record.commit == "files":
        with closing(calls.open_directory(FILES_NAME, dir_fd=fd)) as files_fd:
            make_visible(home_fd, fd, files_fd, record, durable=True)
    calls.sync_directory(home_fd)  # its owner may have died before the commit's own sync
    clean_up(home_fd, fd, record, durable=True)
    return "finished"
