"""The staging directory of a save and its lock, and the lock of the directory that a save changes.

A save works in `.stio-<id>` and holds a lock on the file `lock` in it until it ends: by a free lock, recovery
recognises a dead save. The other lock is on the destination's directory. It is held only while that directory is
changed.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from stio.errors import ConcurrentSaveError
from stio.storage.commit import syscalls as calls
from stio.storage.commit.small_files import status_at

logger = logging.getLogger("stio")

STAGING_PREFIX = ".stio-"
"""Prefix of a staging directory's name; the rest is the save's id."""

DELETED_PREFIX = ".stio-trash-"
"""Prefix of the name of a directory whose deletion has started."""

LOCK_NAME = "lock"
"""File in a staging directory; its owner holds the lock on it."""

FILES_NAME = "new"
"""Directory in a staging directory for the new files."""

LOCK_TIMEOUT_SECONDS = 60.0
"""Seconds that a save or a recovery waits for the lock of the destination's directory."""


def boot_id() -> str:
    """Return the id of this start of the machine, empty if the system has none."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


@contextmanager
def directory_lock(dir_fd: int, path: str) -> Iterator[None]:
    """Hold the lock of a directory, which saves and recovery hold while they change it.

    Where locks do not exist the block runs without one: each change compares first, with and without a lock.

    Args:
        dir_fd: The directory, by a descriptor that the caller alone uses.
        path: Name for messages.

    Raises:
        ConcurrentSaveError: Another process held the lock for `LOCK_TIMEOUT_SECONDS`.
    """
    deadline, pause = time.monotonic() + LOCK_TIMEOUT_SECONDS, 0.001
    while calls.try_lock(dir_fd) is False:
        if time.monotonic() >= deadline:
            raise ConcurrentSaveError(
                f"another save has been publishing here for {LOCK_TIMEOUT_SECONDS:.0f} s; this one was rolled back",
                path=path,
            )
        time.sleep(pause)  # no blocking flock: its wait cannot be interrupted
        pause = min(2 * pause, 0.05)
    try:
        yield
    finally:
        calls.unlock(dir_fd)


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
                owner = {"pid": os.getpid(), "boot": boot_id(), "host": socket.gethostname(), "time": time.time()}
                calls.write_bytes(lock, json.dumps(owner).encode(), 0)
                calls.make_directory(FILES_NAME, dir_fd=fd)
                fds.append(files := calls.open_directory(FILES_NAME, dir_fd=fd))
                created = cls(home_fd, save_id, fd=fd, files_fd=files, lock_fd=lock)
                fds.clear()
                return created
        except (FileExistsError, FileNotFoundError):
            pass
        except BaseException:
            calls.remove_tree(name, dir_fd=home_fd)
            raise
        finally:
            for fd in fds:
                calls.close(fd)
        return None

    def remove(self) -> None:
        """Remove the directory and its content as far as possible, and close it. Never raises."""
        try:
            name = rename_for_deletion(self._home_fd, STAGING_PREFIX + self.save_id)
            calls.remove_tree(name, dir_fd=self._home_fd)
        except FileNotFoundError:
            pass  # another program has removed it, or all of the destination
        except OSError as error:
            logger.warning("a staging directory is left, the next save here or `stio gc` removes it: %s", error)
        self.release()

    def release(self) -> None:
        """Close the directory and release its lock; the next recovery handles it. Idempotent."""
        fds, self.fd, self.files_fd, self._lock_fd = (self.files_fd, self.fd, self._lock_fd), -1, -1, -1
        if fds[-1] >= 0:
            calls.unlock(fds[-1])
        for fd in fds:
            if fd >= 0:
                calls.close(fd)


def is_same(dir_fd: int, name: str, fd: int) -> bool:
    """Return whether a name in a directory still is that of an open directory."""
    found = status_at(dir_fd, name)
    return found is not None and os.path.samestat(found, os.fstat(fd))


def rename_for_deletion(home_fd: int, name: str) -> str:
    """Rename a directory to a name with `DELETED_PREFIX`, before it is deleted; return the new name.

    Raises:
        OSError: The operating system reported an error.
    """
    # Before any file is deleted: recovery must not roll a half-deleted staging directory forward.
    deleted = DELETED_PREFIX + name.removeprefix(STAGING_PREFIX)
    calls.rename(name, deleted, source_fd=home_fd, target_fd=home_fd)
    return deleted
