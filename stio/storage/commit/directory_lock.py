"""Lock files, and the lock of a directory that saves and recovery change: held while they change it, and only then.

A lock file (`FileLock`) is locked by `flock`. Its owner removes it before it releases the lock, so a file that a crash
left is free: the next owner of the lock takes and removes it. `stio pull` and `DiskCache` have such files too. The
lock of a staging directory is one that stays.

The lock of a directory is the file `.stio-lock` in it. Its mode follows from the directory's: the users that may write
the directory may open the file. Other users cannot hold the lock. A user who may write only by an access control list
saves without the lock, with a warning. In a sticky
directory such as /tmp each user has a file of its own, `.stio-lock-<uid>`: there no user can replace files of another
user. The owner of the lock writes its process into the file. Locks alone decide nothing: each change compares first
what is in the directory.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import socket
import stat
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache

from stio import clock
from stio.errors import ConcurrentSaveError, printable
from stio.process import contextmanager
from stio.storage.checks import UNSUPPORTED
from stio.storage.commit import syscalls as calls
from stio.storage.commit.files import FileAttributes, status_at
from stio.text import log

LOCK_TIMEOUT_SECONDS = 60.0
"""Default of `lock_timeout=`."""

DIRECTORY_LOCK_NAME = ".stio-lock"
"""Name of the lock file of a directory that is not sticky."""

_LOCK_FILE = re.compile(rf"{re.escape(DIRECTORY_LOCK_NAME)}(-\d+)?(\.[0-9a-f]{{10}})?")
"""The name of a lock file. A new one has a suffix until its rights are set: all users that may use the lock can open
it, even if its maker dies."""

_OWNER_BYTES = 512
"""Length of the owner's description, padded by spaces: so a new owner replaces all of an old one's."""

_UNUSABLE = {errno.EACCES, errno.EPERM, errno.ELOOP, errno.EMLINK, errno.EISDIR, errno.ENXIO, errno.ENODEV}


def _no_check() -> None:
    pass


class LockTimeout:
    """The time for which a save, or a recovery, waits for locks of others: all its waits together.

    Args:
        seconds: That time.
    """

    def __init__(self, seconds: float = LOCK_TIMEOUT_SECONDS) -> None:
        self.seconds = self._left_seconds = seconds

    def wait_until(self, ready: Callable[[], bool | None], check: Callable[[], None] = _no_check) -> bool:
        """Call `ready` again and again until it returns True; return False if the time passed before.

        Args:
            ready: Called at least once. No blocking `flock`: its wait could not be interrupted.
            check: Called between two calls; it raises to end the wait, as `Operation.check` does.
        """
        begin, pause, longest = clock.monotonic(), 0.001, self._left_seconds
        try:
            while not ready():
                check()
                left = begin + longest - clock.monotonic()
                if left <= 0:
                    return False
                clock.sleep(min(pause, left))
                pause = min(2 * pause, 0.05)
            return True
        finally:
            self._left_seconds = max(0.0, begin + longest - clock.monotonic())


@contextmanager
def directory_lock(
    dir_fd: int,
    path: str,
    timeout: LockTimeout | None = None,
    check: Callable[[], None] = _no_check,
    *,
    destination: str | None = None,
) -> Iterator[None]:
    """Hold the lock of a directory, which saves and recovery hold while they change it.

    Where there are no locks the block runs without one.

    Args:
        dir_fd: The directory.
        path: Its path, for messages.
        timeout: How long to wait; None: for `LOCK_TIMEOUT_SECONDS`.
        check: Raises to end the wait; see `LockTimeout.wait_until`.
        destination: What is saved there, for the error; None: the directory.

    Raises:
        ConcurrentSaveError: Another process holds the lock, and the time has passed.
        OSError: The lock file could not be made.
    """
    timeout = timeout or LockTimeout()
    lock = _DirectoryLock(dir_fd)
    try:
        if not timeout.wait_until(lambda: lock.try_lock() is not False, check):
            raise ConcurrentSaveError(
                f"another save has been publishing here; this one waited {timeout.seconds:g} s in all (lock_timeout=) "
                "and was rolled back",
                path=path if destination is None else destination,
                found=lock.owner,
            )
        if lock.is_unusable:
            message = "%s cannot be used as a lock; the files are compared and replaced without it"
            log(logging.WARNING, message, printable(os.path.join(path, lock.name)))
        yield
    finally:
        lock.release()


def remove_free_lock(dir_fd: int, name: str) -> None:
    """Remove a lock file that a crash left. One that is held, or that another user made, stays. Never raises."""
    with suppress(OSError):
        lock = _DirectoryLock(dir_fd)
        if name.startswith(f"{lock.name}."):
            status = status_at(dir_fd, name)  # its maker, if it lives, makes another one
            if status is not None and (not lock.is_sticky or status.st_uid == os.geteuid()):
                calls.unlink(name, dir_fd=dir_fd)
        elif name == lock.name:
            lock.try_lock(may_create=False)
            lock.release()


def is_directory_lock(name: str) -> bool:
    """Return whether a name is that of a directory's lock file."""
    return _LOCK_FILE.fullmatch(name) is not None


class FileLock:
    """A lock that a file stands for: held by at most one user on this machine, and free when its process dies.

    Args:
        name: Name of the lock file.
        dir_fd: Its directory; the caller keeps it open.
        stays: The file is removed with its directory, which the caller compares. Then it may be needed where there are
            no locks: it has the owner.
    """

    def __init__(self, name: str, dir_fd: int, *, stays: bool = False) -> None:
        self.name, self._dir_fd, self._stays = name, dir_fd, stays
        self._fd, self._pid = -1, 0
        self.owner: str | None = None
        """Description of the process that holds it, as far as it is known."""

    def try_lock(self) -> bool | None:
        """Take the lock without waiting; return False if another user holds it.

        Raises:
            OSError: The file could not be made, or the filesystem has no locks.
        """
        return self._try(calls.open_file(self.name, os.O_RDWR | os.O_CREAT, dir_fd=self._dir_fd))

    def _try(self, fd: int) -> bool:
        """Take the lock of a file that is open, which is closed otherwise."""
        taken: bool | None = False
        try:
            taken = calls.try_lock(fd)
            if taken is None and not self._stays:
                with suppress(FileNotFoundError):  # it has no use where there are no locks; another save may remove it
                    calls.unlink(self.name, dir_fd=self._dir_fd)
                raise NoLocksError("the filesystem has no locks")
            if taken is not False and (self._stays or is_same(self._dir_fd, self.name, fd)):
                try:
                    calls.write_bytes(fd, owner_record().ljust(_OWNER_BYTES), 0)
                except OSError:
                    if self._stays:  # recovery needs it where there are no locks; elsewhere it is for messages only
                        raise
                self._fd, self._pid = fd, os.getpid()
                return True
            if not taken:
                self.owner = _read_owner(fd)
            return False  # held by another, or its last owner has removed the file
        finally:
            if self._fd != fd:
                if taken:
                    calls.unlock(fd)
                calls.close(fd)

    @property
    def is_held(self) -> bool:
        """Whether the lock is held."""
        return self._fd >= 0

    def release(self) -> None:
        """Remove the file and release the lock, if it is held. Never raises."""
        fd, self._fd = self._fd, -1
        if fd >= 0 and self._pid == os.getpid():  # a forked child has not the descriptor any more
            with suppress(OSError):
                if not self._stays and is_same(self._dir_fd, self.name, fd):
                    calls.unlink(self.name, dir_fd=self._dir_fd)
            calls.unlock(fd)
            calls.close(fd)


class NoLocksError(OSError):
    """The filesystem has no locks."""


class _DirectoryLock(FileLock):
    """The lock of a directory.

    Args:
        dir_fd: The directory; the caller keeps it open.
    """

    def __init__(self, dir_fd: int) -> None:
        self._home = os.fstat(dir_fd)
        self.is_sticky = bool(self._home.st_mode & stat.S_ISVTX)
        self.is_unusable = False
        """Whether what has its name is no lock file that this process may use."""
        super().__init__(f"{DIRECTORY_LOCK_NAME}-{os.geteuid()}" if self.is_sticky else DIRECTORY_LOCK_NAME, dir_fd)

    def try_lock(self, *, may_create: bool = True) -> bool | None:
        """Take the lock without waiting: True; False if another holds it; None if there is none to take.

        Raises:
            OSError: The file could not be made.
        """
        must_create = may_create and status_at(self._dir_fd, self.name) is None
        try:
            if must_create:
                fd = self._create()
            else:
                fd = calls.open_file(self.name, os.O_RDWR | getattr(os, "O_NONBLOCK", 0), dir_fd=self._dir_fd)
            status = os.fstat(fd)
            # Another user may have put it here: a link to a file of this user would be written.
            is_own = not self.is_sticky or status.st_uid == os.geteuid()
            if is_own and stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
                return self._try(fd)
            calls.close(fd)
        except FileExistsError:
            return False
        except NoLocksError:
            return None
        except OSError as error:
            if not must_create and error.errno == errno.ENOENT:
                return False  # it was removed in this moment
            if error.errno not in _UNUSABLE:
                raise
        self.is_unusable = True
        return None

    def _create(self) -> int:
        """Make the file.

        Raises:
            FileExistsError: Another process has made it meanwhile, or a recovery has removed this one.
        """
        new = f"{self.name}.{secrets.token_hex(5)}"
        fd = calls.open_file(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, dir_fd=self._dir_fd, mode=0o600)
        try:
            calls.remove_access_list(fd)
            if not self.is_sticky:  # who may write the directory may read and write the file
                mode = 0o600 | sum(6 << shift for shift in (3, 0) if self._home.st_mode >> shift & 2)
                status = os.stat_result((stat.S_IFREG | mode, *tuple(self._home)[1:]))
                FileAttributes(status, calls.has_access_list(self._dir_fd)).apply(fd)
            calls.rename_new(new, self.name, source_fd=self._dir_fd, target_fd=self._dir_fd)
        except BaseException as error:
            calls.close(fd)
            with suppress(OSError):
                calls.unlink(new, dir_fd=self._dir_fd)
            if isinstance(error, FileNotFoundError):
                raise FileExistsError(*error.args[:2]) from error
            if isinstance(error, OSError) and error.errno in UNSUPPORTED:
                raise NoLocksError(*error.args[:2]) from error
            raise
        return fd


# The owner of a lock.


def owner_record() -> bytes:
    """Return the identity of this process, as the owner of a lock writes it into the lock file."""
    owner = {"pid": os.getpid(), "boot": boot_id(), "host": socket.gethostname(), "time": clock.now()}
    return json.dumps(owner).encode()


@cache
def boot_id() -> str:
    """Return the id of this start of the machine, empty if the system has none; it is read once a process."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return file.read().strip()
    except OSError:
        return ""


def is_same(dir_fd: int, name: str, fd: int) -> bool:
    """Return whether a name in a directory still is that of an open file or directory."""
    status = status_at(dir_fd, name)
    return status is not None and os.path.samestat(status, os.fstat(fd))


def _read_owner(fd: int) -> str | None:
    try:
        owner = json.loads(os.pread(fd, _OWNER_BYTES, 0))
        return f"the lock of process {int(owner['pid'])} on {printable(str(owner['host']))}"
    except (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
        return None
