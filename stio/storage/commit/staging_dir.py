"""The staging directory of a save that is under way. By a free lock recovery recognises a dead owner.

A save works in `.stio-<id>`, and holds a lock on the file `lock` in it until it ends. The directory's mode is 0700, so
other users cannot hold that lock.
"""

from __future__ import annotations

import errno
import logging
import secrets
from contextlib import ExitStack
from typing import Self

from stio.runtime.log import log
from stio.storage.checks import UNSUPPORTED
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import FileLock, is_same
from stio.storage.commit.files import closing
from stio.storage.commit.journal import remove_record

STAGING_PREFIX = ".stio-"
"""Prefix of a staging directory's name; the rest is the save's id."""

DELETED_PREFIX = ".stio-trash-"
"""Prefix of the name of a directory whose deletion has started."""

KEPT_BY_SYSTEM = (".fuse_hidden", ".nfs")
"""Prefixes of the names that network and user-space filesystems give to files that are removed while they are open."""

LOCK_NAME = "lock"
"""File in a staging directory; its owner holds the lock on it."""

FILES_NAME = "new"
"""Directory in a staging directory for the new files."""


class NoRenameError(OSError):
    """The filesystem renames no directories."""


class StagingDirectory:
    """The staging directory of one save, and the lock on it. Made by `create`.

    Args:
        home_fd: The directory that holds it; the caller keeps it open.
        save_id: End of its name.
        fd: The directory itself.
        files_fd: The directory in it for the new files.
        lock: The lock, held.
    """

    def __init__(self, home_fd: int, save_id: str, *, fd: int, files_fd: int, lock: FileLock) -> None:
        self._home_fd, self.save_id = home_fd, save_id
        self.fd, self.files_fd, self._lock = fd, files_fd, lock

    @classmethod
    def create(cls, home_fd: int, save_id: str) -> Self | None:
        """Make a staging directory and lock it.

        Args:
            home_fd: The directory that will hold it; the caller keeps it open.
            save_id: Random; end of its name.

        Returns:
            None if the name is taken, or if a recovery took the directory before it was locked.

        Raises:
            NoRenameError: The filesystem renames no directories, so that nothing could be published.
            OSError: The operating system reported an error.
        """
        name = STAGING_PREFIX + save_id
        try:
            calls.make_directory(name, dir_fd=home_fd, mode=0o700)
        except FileExistsError:
            return None
        with ExitStack() as stack:
            try:
                fd = calls.open_directory(name, dir_fd=home_fd)
                stack.callback(calls.close, fd)
                lock = FileLock(LOCK_NAME, fd, stays=True)
                stack.callback(lock.release)
                if lock.try_lock() and is_same(home_fd, name, fd):
                    _make_and_rename(fd)
                    created = cls(
                        home_fd, save_id, fd=fd, files_fd=calls.open_directory(FILES_NAME, dir_fd=fd), lock=lock
                    )
                    stack.pop_all()
                    return created
            except (FileExistsError, FileNotFoundError):
                pass
            except BaseException:
                stack.close()  # first: some filesystems keep the names of open files
                calls.remove_tree(name, dir_fd=home_fd)
                raise
        return None

    def remove(self) -> None:
        """Remove the directory and its content as far as possible, and close it. Never raises."""
        name = None
        try:
            name = rename_for_deletion(self._home_fd, STAGING_PREFIX + self.save_id)
        except FileNotFoundError:
            pass  # another program has removed it, or all of the destination
        except OSError as error:
            message = "a staging directory is left, the next save here or `stio gc` removes it: %s"
            log(logging.WARNING, message, error)
        # Before the removal: filesystems in user space keep the names of open files, and the directory with them. By
        # its new name it belongs to whoever deletes it.
        self.release()
        if name is not None:
            calls.remove_tree(name, dir_fd=self._home_fd)

    def release(self) -> None:
        """Close the directory and release its lock; the next recovery handles it. Idempotent."""
        self._lock.release()
        fds, self.fd, self.files_fd = (self.files_fd, self.fd), -1, -1
        for fd in fds:
            if fd >= 0:
                calls.close(fd)


def _make_and_rename(fd: int) -> None:
    """Make the directory for the new files by a rename: a mounted bucket would refuse that of the commit too."""
    calls.make_directory(f"{FILES_NAME}.made", dir_fd=fd)
    try:
        calls.rename(f"{FILES_NAME}.made", FILES_NAME, source_fd=fd, target_fd=fd)
    except OSError as error:
        if error.errno in UNSUPPORTED or error.errno == errno.EXDEV:
            raise NoRenameError(*error.args[:2]) from error
        raise


def rename_for_deletion(home_fd: int, name: str) -> str:
    """Rename a directory to a name with `DELETED_PREFIX`, before it is deleted; return the new name.

    Where the filesystem has no renames it keeps its name, and loses its record.

    Raises:
        OSError: The operating system reported an error.
    """
    # Before any file is deleted: recovery must not roll a half-deleted staging directory forward. The new name has not
    # the old one in it: that may be as long as the system allows.
    is_staged = name.startswith(STAGING_PREFIX)
    deleted = DELETED_PREFIX + (name.removeprefix(STAGING_PREFIX) if is_staged else secrets.token_hex(5))
    try:
        calls.rename(name, deleted, source_fd=home_fd, target_fd=home_fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        with closing(calls.open_directory(name, dir_fd=home_fd)) as fd:
            remove_record(fd, durable=False)
        return name
    return deleted
