"""All system calls of a save, but for the engine's writes: every other change of a disk is made by a function here.

So a test can replace them: count the calls, let the n-th fail, or log them and derive the state after a power cut.
Functions that not every system has (`renameat2`, `fallocate`, `sync_file_range`, `flock`) are looked up here and have
their fallback here. All functions block, release the GIL, and raise plain `OSError`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from struct import unpack_from
from typing import Any

from stio import process
from stio.runtime.memory import libc
from stio.storage.checks import UNSUPPORTED, open_resolved
from stio.storage.local import function_of

_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW
_FILE_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_WRITE_MAX_BYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2

_INT, _UINT, _TEXT, _OFFSET = ctypes.c_int, ctypes.c_uint, ctypes.c_char_p, ctypes.c_int64
_linux = libc if sys.platform == "linux" else None
_pwrite: Any = function_of(libc, "pwrite", ctypes.c_ssize_t, _INT, ctypes.c_void_p, ctypes.c_size_t, _OFFSET)
_fallocate: Any = function_of(_linux, "fallocate", _INT, _INT, _INT, _OFFSET, _OFFSET)
_sync_file_range: Any = function_of(_linux, "sync_file_range", _INT, _INT, _OFFSET, _OFFSET, _UINT)
_renameat2: Any = function_of(_linux, "renameat2", _INT, _INT, _TEXT, _INT, _TEXT, _UINT)

_statx: Any = function_of(_linux, "statx", _INT, _INT, _TEXT, _INT, _UINT, ctypes.c_void_p)
_EMPTY_PATH, _BIRTH = 0x1000, 0x800  # of statx(2)


def _check(result: int, *names: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), *names)
    return result


def open_directory(name: str, *, dir_fd: int | None = None) -> int:
    """Open a directory; no link is followed. Without `dir_fd`, the name is a path that contains no links."""
    if dir_fd is None:
        return open_resolved(name)
    return os.open(name, _DIRECTORY_FLAGS, dir_fd=dir_fd)


def open_file(name: str, flags: int, *, dir_fd: int, mode: int = 0o666) -> int:
    """Open or create a file of a directory; never through a link."""
    return os.open(name, flags | _FILE_FLAGS, mode, dir_fd=dir_fd)


def close(fd: int) -> None:
    """Close a descriptor. An error is ignored: the `fsync` before has reported it."""
    _locked.discard(fd)
    with suppress(OSError):
        os.close(fd)


def make_directory(name: str, *, dir_fd: int | None = None, mode: int = 0o777) -> None:
    """Make a directory; its mode is limited by the umask."""
    os.mkdir(name, mode, dir_fd=dir_fd)


def rename(source: str, target: str, *, source_fd: int, target_fd: int) -> None:
    """Rename from one directory into another, and replace an entry of that name there."""
    os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)


def rename_new(source: str, target: str, *, source_fd: int, target_fd: int, is_directory: bool = False) -> None:
    """Rename from one directory into another; raise an error if the name is in use there.

    If the filesystem has no such rename, a file is linked to its new name first, which raises the same error; a
    directory is renamed plainly, which replaces at most an empty directory.

    Raises:
        FileExistsError: The name is in use (for a directory perhaps ENOTEMPTY or ENOTDIR instead).
    """
    if _renameat2 is not None:
        names = os.fsencode(source), os.fsencode(target)
        if _renameat2(source_fd, names[0], target_fd, names[1], _RENAME_NOREPLACE) == 0:
            return
        if ctypes.get_errno() not in UNSUPPORTED:
            _check(-1, source, target)
    if not is_directory:
        try:
            os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:
            # No hard links either (FAT, some FUSE). The caller holds the directory's lock: compare, then rename.
            if exists(target, dir_fd=target_fd):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        else:
            os.unlink(source, dir_fd=source_fd)
            return
    os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)


def exists(name: str, *, dir_fd: int) -> bool:
    """Return whether the name is in use, also by a link that leads to nothing."""
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def birth_of(fd: int) -> tuple[int, int, float] | None:
    """Return device, inode and time of birth of an open directory, None where the system does not say the time.

    Another one that gets its inode later was born later.
    """
    found = ctypes.create_string_buffer(256)
    if _statx is None or _statx(fd, b"", _EMPTY_PATH, _BIRTH, found) < 0 or not unpack_from("I", found)[0] & _BIRTH:
        return None
    status = os.fstat(fd)
    seconds, nanoseconds = unpack_from("qI", found, 80)
    return status.st_dev, status.st_ino, seconds + nanoseconds / 1e9


def unlink(name: str, *, dir_fd: int) -> None:
    """Remove a file; of a link, the link itself. If it does not exist, do nothing."""
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)


def remove_directory(name: str, *, dir_fd: int | None = None) -> None:
    """Remove an empty directory."""
    os.rmdir(name, dir_fd=dir_fd)


def remove_tree(name: str, *, dir_fd: int, check: Callable[[], None] = lambda: None) -> None:
    """Remove a directory with its content as far as possible; follows no link and raises no error.

    Another process may remove the same directory at the same time.

    Args:
        name: Its name.
        dir_fd: The directory that holds it.
        check: Called before each file; it raises to end the removal, as `Operation.check` does.
    """
    with suppress(OSError, RecursionError):
        _remove_below(name, dir_fd, check)


def _remove_below(name: str, dir_fd: int, check: Callable[[], None]) -> None:
    fd = os.open(name, _DIRECTORY_FLAGS, dir_fd=dir_fd)
    try:
        with os.scandir(fd) as entries:
            names = [(entry.name, entry.is_dir(follow_symlinks=False)) for entry in entries]
        for below, is_directory in names:
            check()
            with suppress(OSError, RecursionError):  # directories may be nested too deep
                if is_directory:
                    _remove_below(below, fd, check)
                else:
                    os.unlink(below, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=dir_fd)


def fsync(fd: int) -> None:
    """Make a file's content durable."""
    os.fsync(fd)


def sync_directory(fd: int) -> None:
    """Make the names in a directory durable; if the filesystem has no such call (SMB, some FUSE), do nothing."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED - {errno.EPERM}:
            raise


def fchmod(fd: int, mode: int) -> None:
    """Set the mode of a file; an error is ignored: some filesystems have no modes."""
    with suppress(OSError):
        os.fchmod(fd, mode)


def copy_owner(status: os.stat_result, fd: int) -> None:
    """Give a file the group, and by root also the owner, of another one; an error is ignored."""
    with suppress(OSError):
        os.fchown(fd, -1 if os.geteuid() else status.st_uid, status.st_gid)


_ACCESS_LIST = "system.posix_acl_access"


def has_access_list(file: int | str) -> bool:
    """Return whether an open file, or the one of a path, has an access control list; False if the system has none."""
    with suppress(OSError):
        return _ACCESS_LIST in os.listxattr(file)
    return False


def remove_access_list(fd: int) -> None:
    """Remove the access control list that a new file got from its directory; an error is ignored."""
    with suppress(OSError):
        os.removexattr(fd, _ACCESS_LIST)


def reserve(fd: int, nbytes: int) -> None:
    """Set the size of a file, and reserve its space if that is possible.

    Not by `posix_fallocate`: glibc's writes zeros if the filesystem cannot reserve.
    """
    if nbytes and _fallocate is not None:
        while _fallocate(fd, 0, 0, nbytes) < 0:
            number = ctypes.get_errno()
            if number in UNSUPPORTED:
                break
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))
        else:
            return
    os.ftruncate(fd, nbytes)  # parallel writes that extend a file wait for each other


def write(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Write memory at an offset; return how many bytes were written, perhaps fewer."""
    return _check(_pwrite(fd, address, min(nbytes, _WRITE_MAX_BYTES), offset))


def write_bytes(fd: int, data: bytes | memoryview, offset: int) -> int:
    """Write bytes at an offset; return how many were written, perhaps fewer."""
    return os.pwrite(fd, data, offset)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Advise the kernel to start to write a range to the disk now, and not all of it at the `fsync`."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def try_lock(fd: int) -> bool | None:
    """Take the lock of an open file without waiting: True; False if another holds it; None if there are no locks."""
    _locked.add(fd)  # before: a child that is forked in between would hold the lock too
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:  # ENOLCK, ENOTSUP; EBADF for a directory on NFS
        _locked.discard(fd)
        return False if isinstance(error, BlockingIOError) else None
    return True


def unlock(fd: int) -> None:
    """Release the lock, also for copies of the descriptor in forked children."""
    _locked.discard(fd)
    with suppress(OSError):
        fcntl.flock(fd, fcntl.LOCK_UN)


_locked: set[int] = set()
"""Descriptors whose lock this process holds, or tries to take."""


@process.after_fork_in_child
def _close_locked() -> None:
    """Close the parent's locked files in a forked child: it would hold their locks after the parent's death."""
    while _locked:
        with suppress(OSError):
            os.close(_locked.pop())
