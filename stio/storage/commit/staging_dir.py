"""A save's staging directory, the lock that says that its owner lives, and the lock of a directory that is changed."""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from stio.errors import ConcurrentSaveError
from stio.storage.commit import syscalls as calls
from stio.storage.commit.journal import FILES_NAME

__all__ = ["LOCK_NAME", "PREFIX", "TRASH", "Staging", "boot_id", "is_same", "locked", "to_trash"]

logger = logging.getLogger("stio")

PREFIX = ".stio-"
"""A staging directory's name begins so, and ends in the save's id."""

TRASH = ".stio-trash-"
"""Begin of its name once there is nothing to do but to delete it."""

LOCK_NAME = "lock"
"""File in it whose lock its owner holds."""

_ID_BYTES = 5
_ATTEMPTS = 8
_PATIENCE_SECONDS = 60.0


def boot_id() -> str:
    """Return what tells this start of the machine from others, empty where it does not say."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


@contextmanager
def locked(dir_fd: int, path: str, *, patience_seconds: float = _PATIENCE_SECONDS) -> Iterator[None]:
    """Hold a directory's lock, which saves and janitors take for the moment in which they change it.

    Where there are no locks the block runs without one; whoever changes something compares first anyway.

    Args:
        dir_fd: The directory, opened by the caller for itself.
        path: Name for messages.
        patience_seconds: How long to wait for whoever has it.

    Raises:
        ConcurrentSaveError: It was not to be had.
    """
    deadline, pause = time.monotonic() + patience_seconds, 0.001
    while calls.try_lock(dir_fd) is False:
        if time.monotonic() >= deadline:
            raise ConcurrentSaveError(
                f"another save has been publishing here for {patience_seconds:.0f} s; this one was given up", path=path
            )
        time.sleep(pause)  # not a blocking flock: nothing could end its wait
        pause = min(2 * pause, 0.05)
    try:
        yield
    finally:
        calls.unlock(dir_fd)


class Staging:
    """One save's staging directory and the lock on it. Made by `create`.

    Args:
        home_fd: The directory that it stands in, kept open by the caller.
        save_id: Its name's end.
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
    def create(cls, home_fd: int) -> Self:
        """Make a staging directory under a name of its own.

        Raises:
            OSError: The system refused.
        """
        for _ in range(_ATTEMPTS):
            save_id = secrets.token_hex(_ID_BYTES)
            name = PREFIX + save_id
            try:
                calls.make_directory(name, dir_fd=home_fd, mode=0o700)
            except FileExistsError:
                continue
            staging = cls._own(home_fd, save_id)
            if staging is not None:
                return staging
        raise OSError(f"no staging directory in {_ATTEMPTS} attempts")

    @classmethod
    def _own(cls, home_fd: int, save_id: str) -> Self | None:
        """Lock a new directory; None if a janitor was there first."""
        name = PREFIX + save_id
        fds: list[int] = []
        try:
            fds.append(fd := calls.open_directory(name, dir_fd=home_fd))
            fds.append(lock := calls.open_file(LOCK_NAME, os.O_CREAT | os.O_EXCL | os.O_RDWR, dir_fd=fd))
            if calls.try_lock(lock) is not False and is_same(home_fd, name, fd):
                owner = {"pid": os.getpid(), "boot": boot_id(), "host": socket.gethostname(), "time": time.time()}
                calls.write_bytes(lock, json.dumps(owner).encode(), 0)
                calls.make_directory(FILES_NAME, dir_fd=fd)
                fds.append(files := calls.open_directory(FILES_NAME, dir_fd=fd))
                owned = cls(home_fd, save_id, fd=fd, files_fd=files, lock_fd=lock)
                fds.clear()
                return owned
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
        """Remove the directory with all that is in it, as far as that goes, and let go of it. Never raises."""
        try:
            calls.remove_tree(to_trash(self._home_fd, PREFIX + self.save_id), dir_fd=self._home_fd)
        except FileNotFoundError:
            pass  # somebody has removed it, or all of the destination
        except OSError as error:
            logger.warning("a staging directory stays behind, for the next save or `stio gc` to remove: %s", error)
        self.release()

    def release(self) -> None:
        """Let go of the directory and leave it to the next janitor. Idempotent."""
        fds, self.fd, self.files_fd, self._lock_fd = (self.files_fd, self.fd, self._lock_fd), -1, -1, -1
        if fds[-1] >= 0:
            calls.unlock(fds[-1])
        for fd in fds:
            if fd >= 0:
                calls.close(fd)


def is_same(dir_fd: int, name: str, fd: int) -> bool:
    """Return whether a name still is the directory that was opened."""
    try:
        found, opened = os.stat(name, dir_fd=dir_fd, follow_symlinks=False), os.fstat(fd)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)


def to_trash(home_fd: int, name: str) -> str:
    """Give a staging directory the name of one that is only to be deleted; return it.

    Raises:
        OSError: The system refused.
    """
    # Before anything is deleted: a directory that is half deleted must not be taken for a save that can be finished.
    trash = TRASH + name.removeprefix(PREFIX)
    calls.rename(name, trash, source_fd=home_fd, target_fd=home_fd)
    return trash
