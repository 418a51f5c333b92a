"""Recovery: finds staging directories with a dead owner, and rolls their saves forward or back.

A save works in `.stio-<id>` and holds a lock on a file in it until it ends. On a filesystem of this machine a
free lock means a dead owner: the save is rolled forward or back by its journal record, then the directory is renamed to
`.stio-trash-<id>` and deleted. What a dead owner has set aside is put back. On other filesystems locks may not reach
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
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from operator import add

from stio.errors import CheckpointNotFoundError, ConcurrentSaveError
from stio.runtime import clock
from stio.runtime.log import log
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
    JournalRecord,
    UnknownRecordError,
    clean_up,
    has_version,
    is_committed,
    read_record,
    replace_files,
    roll_back,
)
from stio.storage.commit.replacement import ASIDE_PREFIX, Aside, entries, put_back, remove_aside
from stio.storage.commit.staging_dir import DELETED_PREFIX, FILES_NAME, LOCK_NAME, STAGING_PREFIX, rename_for_deletion
from stio.storage.local import is_local

MAX_AGE_SECONDS = 24 * 3600.0
"""On filesystems whose locks prove nothing, the owner of an older staging directory counts as dead."""

_STAGING_NAME = re.compile(r"\.stio-[0-9a-f]{8,32}")
_UNLOCKED_SECONDS = 60.0
"""A staging directory is made before the lock in it; a running owner needs less time than this between the two."""

_MAX_LOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """Result of a recovery in the directories of a destination: their paths."""

    finished: tuple[str, ...] = ()
    """Staging directories whose save had committed and was rolled forward."""
    undone: tuple[str, ...] = ()
    """Staging directories whose save had not committed and was rolled back; and directories with what a save had set
    aside, which was put back."""
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
    report, timeout = GarbageReport(), timeout or LockTimeout()
    try:
        names = [name for name in os.listdir(home_fd) if name.startswith(STAGING_PREFIX)]
    except OSError:
        return report
    # Interrupted deletions come first: one of them may have the name that a staging directory gets next.
    for name in sorted(names, key=lambda name: not name.startswith(DELETED_PREFIX)):
        where = os.path.join(path, name)
        check()
        if name.startswith(DELETED_PREFIX):
            is_trusted = _is_trusted(home_fd, status_at(home_fd, name))
            has_failed = is_trusted and not dry_run and not _delete(home_fd, name, check)
            report += GarbageReport(**{"removed" if is_trusted and not has_failed else "kept": (where,)})
            report += GarbageReport(failed=(where,) if has_failed else ())
        elif is_directory_lock(name) and not dry_run:
            remove_free_lock(home_fd, name)
        elif _STAGING_NAME.fullmatch(name) or name.startswith(ASIDE_PREFIX):
            try:
                outcome, deleted = _recover_one(home_fd, name, path, max_age_seconds, dry_run, timeout, check)
                if deleted is not None and not _delete(home_fd, deleted, check) and deleted == name:
                    raise OSError(errno.ENOTEMPTY, "it cannot be removed")
            except (OSError, ConcurrentSaveError) as error:
                # A read-only directory too: a process that can write there will clean it up.
                log(logging.DEBUG, "%s is left alone: %s", where, error)
                outcome = "kept"
                if isinstance(error, OSError):
                    is_newer = isinstance(error, UnknownRecordError)
                    report += GarbageReport(**{"newer" if is_newer else "failed": (where,)})
            if outcome is not None:
                report += GarbageReport(**{outcome: (where,)})
    return report


def _delete(home_fd: int, name: str, check: Callable[[], None]) -> bool:
    """Delete a directory; return whether it does not exist any more."""
    calls.remove_tree(name, dir_fd=home_fd, check=check)
    try:
        return not calls.exists(name, dir_fd=home_fd)
    except OSError:
        return False


def _recover_one(
    home_fd: int,
    name: str,
    path: str,
    max_age_seconds: float,
    dry_run: bool,
    timeout: LockTimeout,
    check: Callable[[], None],
) -> tuple[str | None, str | None]:
    """Roll one save forward or back, or put back what was set aside, if its owner is dead.

    Returns:
        What was done, None if another recovery did it; and the directory's new name, to delete it by. It is deleted
        when none of its files is open: filesystems in user space keep the names of open files.
    """
    is_aside, fd = name.startswith(ASIDE_PREFIX), -1
    with ExitStack() as stack:
        try:
            fd = stack.enter_context(closing(calls.open_directory(name, dir_fd=home_fd)))
            if not _is_trusted(home_fd, os.fstat(fd)):
                return "kept", None
            lock = fd if is_aside else _open_lock(home_fd, fd, may_create=not dry_run)
        except FileNotFoundError:
            return None, None
        except PermissionError:
            if fd < 0:  # that of another user, whose save may run
                return "kept", None
            raise
        if lock is None:
            return "kept", None
        if lock != fd:
            stack.callback(calls.close, lock)
        held = calls.try_lock(lock)
        if held:
            stack.callback(calls.unlock, lock)
        is_dead = held is not False and (
            (held and is_local(lock))
            or (
                _age_seconds(home_fd, lock, dry_run=dry_run) >= max_age_seconds
                and (is_aside or not _owner_runs_here(lock))
            )
        )
        if not is_dead:
            return "kept", None
        if not is_same(home_fd, name, fd):
            return None, None
        # What is set aside has names of its own; in a staging directory a record with another name has a version.
        if not is_aside and has_version(read_small(fd, LOCK_NAME, _MAX_LOCK_BYTES) or b""):
            raise UnknownRecordError(errno.ENOTSUP, "the lock of another version of stio")
        if dry_run:
            return "finished" if not is_aside and _is_forward(home_fd, read_record(fd)) else "undone", None
        with directory_lock(home_fd, path, timeout, check):
            if not is_aside:
                return _roll(home_fd, fd), rename_for_deletion(home_fd, name)
            aside = Aside(name, fd)
            put_back(home_fd, path, aside)
        remove_aside(home_fd, aside)
        return "kept" if entries(aside) else "undone", None


def _is_trusted(home_fd: int, found: os.stat_result | None) -> bool:
    """Return whether a directory may be deleted, and its record may decide what is deleted beside it.

    In a directory such as /tmp every user may create files, and may delete only files of that user. There, the record
    of another user would cause deletions with the rights of this process.

    Args:
        home_fd: The directory that holds it.
        found: Its status; None: it does not exist.
    """
    home = os.fstat(home_fd)
    return found is None or not home.st_mode & stat.S_ISVTX or found.st_uid in (os.geteuid(), home.st_uid)


def _open_lock(home_fd: int, fd: int, *, may_create: bool) -> int | None:
    """Open the lock of a staging directory; None if its owner may be about to create it."""
    try:
        return calls.open_file(LOCK_NAME, os.O_RDWR, dir_fd=fd)
    except FileNotFoundError:
        if _age_seconds(home_fd, fd, dry_run=not may_create) < _UNLOCKED_SECONDS:
            return None
    if not may_create:
        return calls.open_directory(".", dir_fd=fd)  # in place of the lock: an owner that has made none by now is dead
    try:
        # Created and held here: an owner that is only slow cannot take it, and makes another staging directory.
        return calls.open_file(LOCK_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, dir_fd=fd)
    except FileExistsError:
        return None


def _age_seconds(home_fd: int, fd: int, *, dry_run: bool) -> float:
    """Return the time since a file, or a directory, of a directory was changed.

    A network filesystem sets that time by its own clock, which may differ from the one of this machine by hours. So it
    is compared with the time of a new directory beside it; in a dry run with this machine's clock.
    """
    changed = os.fstat(fd).st_mtime
    if dry_run:
        return clock.now() - changed
    name = DELETED_PREFIX + secrets.token_hex(5)  # if this process dies, the next recovery deletes it
    try:
        calls.make_directory(name, dir_fd=home_fd, mode=0o700)
        made = status_at(home_fd, name)
        calls.remove_directory(name, dir_fd=home_fd)
    except OSError:  # nothing can be recovered here
        return -math.inf
    return -math.inf if made is None else made.st_mtime - changed


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
            replace_files(home_fd, fd, files_fd, record, durable=True)
    calls.sync_directory(home_fd)  # its owner may have died before the commit's own sync
    clean_up(home_fd, fd, record, durable=True)
    return "finished"
