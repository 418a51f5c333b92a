"""Who owns a staging directory, and what becomes of one whose owner died.

A save works in `.stio-<id>`, and holds a lock on a file in it for as long as it lives. On a filesystem of this
machine a free lock means a dead owner: its save is finished or undone by its record, the directory renamed to
`.stio-trash-<id>` and deleted. Elsewhere locks may not reach other machines, so age has to speak too.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import stat
import time
from dataclasses import dataclass

from stio.errors import CheckpointNotFoundError, ConcurrentSaveError
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.journal import (
    FILES_NAME,
    MAX_INDEX_BYTES,
    JournalRecord,
    digest_of,
    finish,
    is_committed,
    read_record,
    read_small,
    replace_files,
    roll_back,
)
from stio.storage.commit.staging_dir import LOCK_NAME, PREFIX, TRASH, boot_id, is_same, locked, to_trash
from stio.storage.local import is_local

__all__ = ["MAX_AGE_SECONDS", "GarbageReport", "collect_garbage", "reclaim"]

logger = logging.getLogger("stio")

MAX_AGE_SECONDS = 24 * 3600.0
"""Where locks cannot be trusted, a staging directory is given up after this long."""

_STAGING_NAME = re.compile(r"\.stio-[0-9a-f]{8,32}")
_UNLOCKED_SECONDS = 60.0
"""A directory comes before the lock in it; so long it may take."""

_MAX_LOCK_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """What a janitor did in the directories that it was sent to."""

    finished: tuple[str, ...] = ()
    """Staging directories whose save had committed; what was left to do is done."""
    undone: tuple[str, ...] = ()
    """Staging directories whose save had not committed; what it had begun is undone."""
    kept: tuple[str, ...] = ()
    """Staging directories that somebody works in, or may work in, or that could not be removed."""
    removed: tuple[str, ...] = ()
    """Directories that another janitor had done with, and not deleted to the end."""

    def __add__(self, other: GarbageReport) -> GarbageReport:
        return GarbageReport(
            self.finished + other.finished,
            self.undone + other.undone,
            self.kept + other.kept,
            self.removed + other.removed,
        )


def collect_garbage(
    path: str | os.PathLike[str], *, max_age_seconds: float = MAX_AGE_SECONDS, dry_run: bool = False
) -> GarbageReport:
    """Finish or undo saves whose process died, and remove what they left.

    Every save does that where it works; this is for places that none comes back to. Saves that are under way are
    left alone. Blocks.

    Args:
        path: A destination of saves. Both places are looked at in which a save to it works: itself and its parent.
        max_age_seconds: On filesystems whose locks do not tell whether an owner lives (NFS, FUSE and the like),
            younger staging directories are left alone.
        dry_run: Change nothing; the report says what would be done as things stand.

    Raises:
        CheckpointNotFoundError: There is neither such a destination nor its parent.
    """
    where = os.path.realpath(os.fsdecode(path))
    report, seen = GarbageReport(), 0
    for directory in (where, os.path.dirname(where)):
        try:
            fd = calls.open_directory(directory)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            if directory != where:
                continue  # a parent that may not be listed, where nothing was staged by us either
            raise refused("opening the directory", directory, error) from error
        seen += 1
        try:
            report += reclaim(fd, directory, max_age_seconds=max_age_seconds, dry_run=dry_run)
        finally:
            calls.close(fd)
    if not seen:
        raise CheckpointNotFoundError("there is no such destination", path=where)
    return report


def reclaim(
    home_fd: int, path: str, *, max_age_seconds: float = MAX_AGE_SECONDS, dry_run: bool = False
) -> GarbageReport:
    """Clean one directory; see `collect_garbage`. Where that is not possible it is left as it is, without an error.

    Args:
        home_fd: The directory, opened by the caller for itself (its lock is taken).
        path: Name for messages.
        max_age_seconds: Age from which on a lock that cannot be trusted is not asked any more.
        dry_run: Change nothing.
    """
    report = GarbageReport()
    try:
        # Trash first: it may have the name that what comes after it is to get.
        names = sorted((name for name in os.listdir(home_fd) if name.startswith(PREFIX)), key=_is_no_trash)
    except OSError:
        return report
    for name in names:
        where = os.path.join(path, name)
        if name.startswith(TRASH):
            if not dry_run:
                calls.remove_tree(name, dir_fd=home_fd)
            is_kept = not dry_run and calls.exists(name, dir_fd=home_fd)
            report += GarbageReport(**{"kept" if is_kept else "removed": (where,)})
        elif _STAGING_NAME.fullmatch(name):
            try:
                outcome = _reclaim_one(home_fd, name, path, max_age_seconds, dry_run)
            except (OSError, ConcurrentSaveError) as error:
                # A read-only directory among them: whoever can write there will clean it.
                logger.debug("%s is left alone: %s", where, error)
                outcome = "kept"
            if outcome is not None:
                report += GarbageReport(**{outcome: (where,)})
    return report


def _is_no_trash(name: str) -> bool:
    return not name.startswith(TRASH)


def _reclaim_one(home_fd: int, name: str, path: str, max_age_seconds: float, dry_run: bool) -> str | None:
    """Finish or undo one save if its owner is dead; return which, None if another janitor did."""
    fds: list[int] = []
    held = None
    try:
        try:
            fds.append(fd := calls.open_directory(name, dir_fd=home_fd))
            if not _may_speak(home_fd, fd):
                return "kept"
            lock = _open_lock(fd, may_create=not dry_run)
        except FileNotFoundError:
            return None
        if lock is None:
            return "kept"
        fds.append(lock)
        held = calls.try_lock(lock)
        if held is False or not ((held and is_local(lock)) or _is_forsaken(lock, max_age_seconds)):
            return "kept"
        if not is_same(home_fd, name, fd):
            return None
        if dry_run:
            return "finished" if _goes_forward(home_fd, read_record(fd)) else "undone"
        with locked(home_fd, path):
            outcome = _settle(home_fd, fd)
            trash = to_trash(home_fd, name)
        calls.remove_tree(trash, dir_fd=home_fd)
        return outcome
    finally:
        if held:
            calls.unlock(fds[-1])
        for fd in reversed(fds):
            calls.close(fd)


def _may_speak(home_fd: int, fd: int) -> bool:
    """Return whether a staging directory's record may say what is to be deleted beside it.

    In a directory such as /tmp everybody makes what he likes, and deletes his own only: somebody else's record there
    would borrow our rights.
    """
    home = os.fstat(home_fd)
    return not home.st_mode & stat.S_ISVTX or os.fstat(fd).st_uid in (os.geteuid(), home.st_uid)


def _open_lock(fd: int, *, may_create: bool) -> int | None:
    """Open a staging directory's lock; None if its owner may be about to create it."""
    try:
        return calls.open_file(LOCK_NAME, os.O_RDWR, dir_fd=fd)
    except FileNotFoundError:
        if time.time() - os.fstat(fd).st_mtime < _UNLOCKED_SECONDS:
            return None
    if not may_create:
        return calls.open_directory(".", dir_fd=fd)  # stands for it: an owner that has no lock by now is dead
    try:
        # Created here, so that an owner that is this slow finds it taken and goes elsewhere.
        return calls.open_file(LOCK_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, dir_fd=fd)
    except FileExistsError:
        return None


def _is_forsaken(lock_fd: int, max_age_seconds: float) -> bool:
    """Return whether age alone says that an owner is dead: nobody else can be asked."""
    found = os.fstat(lock_fd)
    if time.time() - found.st_mtime < max_age_seconds:
        return False
    try:
        owner = json.loads(os.pread(lock_fd, _MAX_LOCK_BYTES, 0))
        if (owner["host"], owner["boot"]) != (socket.gethostname(), boot_id()):
            return True
        os.kill(int(owner["pid"]), 0)  # signal 0 only asks whether there is such a process
    except ProcessLookupError:
        return True
    except PermissionError:
        return False  # it lives, as another user's
    except (ValueError, TypeError, KeyError, OverflowError):
        return True
    return False


def _goes_forward(home_fd: int, intent: JournalRecord | None) -> bool:
    """Return whether a dead save is to be finished, not undone."""
    if intent is None:
        return False
    if is_committed(home_fd, intent):
        return True
    # Forward only over the very checkpoint that it had begun to replace: where locks do not reach, somebody may have
    # saved since.
    return (
        intent.commit == "files" and digest_of(read_small(home_fd, intent.last, MAX_INDEX_BYTES)) == intent.old_sha256
    )


def _settle(home_fd: int, fd: int) -> str:
    """Roll a dead save forward if it had committed, else back."""
    intent = read_record(fd)
    if intent is None:
        return "undone"  # nothing was visible yet
    if not _goes_forward(home_fd, intent):
        roll_back(home_fd, fd, intent, durable=True)
        return "undone"
    if intent.commit == "files":
        files_fd = calls.open_directory(FILES_NAME, dir_fd=fd)
        try:
            replace_files(home_fd, fd, files_fd, intent, durable=True)
        finally:
            calls.close(files_fd)
    calls.sync_directory(home_fd)  # the commit's own sync may be what its owner died before
    finish(home_fd, fd, intent, durable=True)
    return "finished"
