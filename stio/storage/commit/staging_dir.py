"""The staging directory of a save, and the lock on it.

A save works in `.stio-<id>` and holds a lock on the file `lock` in it until it ends: by a free lock, recovery
recognises a dead save. The directory's mode is 0700, so other users cannot hold that lock.
"""

from __future__ import annotations

import logging
import os
import secrets
from typing import Self

from stio.runtime.log import log
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import is_same, owner_record

STAGING_PREFIX = ".stio-"
"""Prefix of a staging directory's name; the rest is the save's id."""

DELETED_PREFIX = ".stio-trash-"
"""Prefix of the name of a directory whose deletion has started."""

LOCK_NAME = "lock"
"""File in a staging directory; its owner holds the lock on it."""

FILES_NAME = "new"
"""Directory in a staging directory for the new files."""


class StagingDirectory:
    """The staging directory of one save, and the lock on it. Made by `create`.

    Args:
        home_fd: The directory that holds it; the caller keeps it open.
        save_id: End of its name.
        fd: The directory itself.
        files_fd: The directory in it for the new files.
        lock_fd: The file whose lock is held.
    """

    def __init__(self, home_fd: int, save_id: str, *, fd: int, files_fd: int, lock_fd: int) -> None:
        self._home_fd = home_fd
        self.save_id = save_id
        self.fd = fd
        self.files_fd = files_fd
        self._lock_fd = lock_fd

    @classmethod
    def create(cls, home_fd: int, save_id: str) -> Self | None:
        """Make a staging directory and lock it.

        Args:
            home_fd: The directory that will hold it; the caller keeps it open.
            save_id: Random; end of its name.

        Returns:
            None if the name is taken, or if a recovery took the directory before it was locked.

        Raises:
            OSError: The operating system reported an error.
        """
        name = STAGING_PREFIX + save_id
        try:
            calls.make_directory(name, dir_fd=home_fd, mode=0o700)
        except FileExistsError:
            return None
        fds: list[int] = []
        try:
            fds.append(fd := calls.open_directory(name, dir_fd=home_fd))
            fds.append(lock := calls.open_file(LOCK_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, dir_fd=fd))
            if calls.try_lock(lock) is not False and is_same(home_fd, name, fd):
                calls.write_bytes(lock, owner_record(), 0)
                calls.make_directory(FILES_NAME, dir_fd=fd)
                fds.append(files := calls.open_directory(FILES_NAME, dir_fd=fd))
                created = cls(home_fd, save_id, fd=fd, files_fd=files, lock_fd=lock)
                fds.clear()
                return created
        except (FileExistsError, FileNotFoundError):
            pass
        except BaseException:
            _close_all(fds)  # first: some filesystems keep the names of open files
            calls.remove_tree(name, dir_fd=home_fd)
            raise
        finally:
            _close_all(fds)
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
        fds, self.fd, self.files_fd, self._lock_fd = (self.files_fd, self.fd, self._lock_fd), -1, -1, -1
        if fds[-1] >= 0:
            calls.unlock(fds[-1])
        _close_all([fd for fd in fds if fd >= 0])


def _close_all(fds: list[int]) -> None:
    while fds:
        calls.close(fds.pop())


def rename_for_deletion(home_fd: int, name: str) -> str:
    """Rename a directory to a name with `DELETED_PREFIX`, before it is deleted; return the new name.

    Raises:
        OSError: The operating system reported an error.
    """
    # Before any file is deleted: recovery must not roll a half-deleted staging directory forward. The new name has not
    # the old one in it: that may be as long as the system allows.
    is_staged = name.startswith(STAGING_PREFIX)
    deleted = DELETED_PREFIX + (name.removeprefix(STAGING_PREFIX) if is_staged else secrets.token_hex(5))
    calls.rename(name, deleted, source_fd=home_fd, target_fd=home_fd)
    return deleted
