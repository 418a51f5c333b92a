"""The system calls that a save makes, all of them: whatever changes a disk goes through this module's functions.

So a test can stand between a save and the system: count the calls, let the n-th fail, or keep a log and ask what a
power cut would have left. What a system lacks (`renameat2`, `fallocate`, `sync_file_range`, `flock`) is looked up here
and has its fallback here. All functions block, drop the GIL while they do, and raise plain `OSError`.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import sys
from types import ModuleType
from typing import Any

from stio.runtime.memory import libc

__all__ = [
    "close",
    "exists",
    "fchmod",
    "fsync",
    "make_directory",
    "open_directory",
    "open_file",
    "remove_tree",
    "rename",
    "rename_new",
    "reserve",
    "start_writeback",
    "sync_directory",
    "try_lock",
    "unlink",
    "unlock",
    "write",
    "write_bytes",
]

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_DIRECTORY_FLAGS = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE_FLAGS = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_WRITE_MAX_BYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call
_RENAME_NOREPLACE = 1
_SYNC_FILE_RANGE_WRITE = 2
_NOT_SUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}


def _function(names: tuple[str, ...], *argtypes: Any) -> Any:
    # Where `off_t` has 32 bits (glibc on 32-bit machines), only the name with 64 takes large offsets.
    for name in names:
        function = getattr(libc, name, None)
        if function is not None:
            function.argtypes = argtypes
            function.restype = ctypes.c_ssize_t if name.startswith("pwrite") else ctypes.c_int
            return function
    return None


_LINUX = sys.platform == "linux"
_INT, _OFFSET = ctypes.c_int, ctypes.c_int64
_pwrite: Any = _function(("pwrite64", "pwrite"), _INT, ctypes.c_void_p, ctypes.c_size_t, _OFFSET)
_fallocate: Any = _function(("fallocate64", "fallocate"), _INT, _INT, _OFFSET, _OFFSET) if _LINUX else None
_sync_file_range: Any = _function(("sync_file_range",), _INT, _OFFSET, _OFFSET, ctypes.c_uint) if _LINUX else None
_renameat2: Any = (
    _function(("renameat2",), _INT, ctypes.c_char_p, _INT, ctypes.c_char_p, ctypes.c_uint) if _LINUX else None
)


def _check(result: int, *names: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), *names)
    return result


def open_directory(name: str, *, dir_fd: int | None = None) -> int:
    """Open a directory; a link is followed only where there is no `dir_fd`, that is where the caller named it."""
    return os.open(name, _DIRECTORY_FLAGS | (0 if dir_fd is None else getattr(os, "O_NOFOLLOW", 0)), dir_fd=dir_fd)


def open_file(name: str, flags: int, *, dir_fd: int, mode: int = 0o666) -> int:
    """Open or create a file of a directory; never through a link."""
    return os.open(name, flags | _FILE_FLAGS, mode, dir_fd=dir_fd)


def close(fd: int) -> None:
    """Give a descriptor back. What it could report, an `fsync` before it has reported."""
    try:
        os.close(fd)
    except OSError:
        pass


def make_directory(name: str, *, dir_fd: int | None = None, mode: int = 0o777) -> None:
    """Make a directory, its mode under the umask."""
    os.mkdir(name, mode, dir_fd=dir_fd)


def rename(source: str, target: str, *, source_fd: int, target_fd: int) -> None:
    """Rename from one directory into another, over what has that name there."""
    os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)


def rename_new(source: str, target: str, *, source_fd: int, target_fd: int, is_directory: bool = False) -> None:
    """Rename from one directory into another, where nothing may have that name.

    Where the filesystem has no such rename, a file is linked to its new name first, which refuses too; a directory
    is renamed plainly, which replaces an empty directory at most.

    Raises:
        FileExistsError: Something has the name (for a directory perhaps ENOTEMPTY or ENOTDIR instead).
    """
    if _renameat2 is not None:
        names = os.fsencode(source), os.fsencode(target)
        if _renameat2(source_fd, names[0], target_fd, names[1], _RENAME_NOREPLACE) == 0:
            return
        if ctypes.get_errno() not in _NOT_SUPPORTED:
            _check(-1, source, target)
    if not is_directory:
        try:
            os.link(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd, follow_symlinks=False)
        except FileExistsError:
            raise
        except OSError:
            # No hard links either (FAT, some FUSE). The caller holds the directory's lock: look, then rename.
            if exists(target, dir_fd=target_fd):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), target) from None
        else:
            os.unlink(source, dir_fd=source_fd)
            return
    os.rename(source, target, src_dir_fd=source_fd, dst_dir_fd=target_fd)


def exists(name: str, *, dir_fd: int) -> bool:
    """Return whether there is such a name, a link that leads nowhere too."""
    try:
        os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def unlink(name: str, *, dir_fd: int) -> None:
    """Remove a file's name; of a link the link."""
    os.unlink(name, dir_fd=dir_fd)


def remove_tree(name: str, *, dir_fd: int) -> None:
    """Remove a directory and what is in it, as far as that goes; follows no link and raises nothing."""
    shutil.rmtree(name, ignore_errors=True, dir_fd=dir_fd)


def fsync(fd: int) -> None:
    """Make a file's content durable."""
    if fcntl is not None and hasattr(fcntl, "F_FULLFSYNC"):
        try:
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)  # macOS: its fsync leaves the bytes in the drive's cache
            return
        except OSError:  # not every filesystem there has it
            pass
    os.fsync(fd)


def sync_directory(fd: int) -> None:
    """Make a directory's names durable; where the filesystem has no such call (SMB, some FUSE), do nothing."""
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


def fchmod(fd: int, mode: int) -> None:
    """Set a file's mode; a filesystem without modes may refuse, and nothing is lost by that."""
    try:
        os.fchmod(fd, mode)
    except (OSError, AttributeError):
        pass


def reserve(fd: int, nbytes: int) -> None:
    """Set a file's size, and reserve its space where that is possible.

    By `fallocate(2)` itself: `posix_fallocate` of glibc writes zeros where the filesystem cannot.
    """
    if nbytes and _fallocate is not None:
        while _fallocate(fd, 0, 0, nbytes) < 0:
            number = ctypes.get_errno()
            if number in _NOT_SUPPORTED:
                break
            if number != errno.EINTR:
                raise OSError(number, os.strerror(number))
        else:
            return
    os.ftruncate(fd, nbytes)  # parallel writes that extend a file wait for each other


def write(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Write memory at an offset; return how many bytes were taken, perhaps fewer."""
    return _check(_pwrite(fd, address, min(nbytes, _WRITE_MAX_BYTES), offset))


def write_bytes(fd: int, data: bytes, offset: int) -> int:
    """Write a small file's bytes at an offset; return how many were taken, perhaps fewer."""
    return os.pwrite(fd, data, offset)


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Let the kernel begin to write a range back now, and not all of it at the `fsync`; advice."""
    if _sync_file_range is not None:
        _sync_file_range(fd, offset, nbytes, _SYNC_FILE_RANGE_WRITE)


def try_lock(fd: int) -> bool | None:
    """Take the lock of an open file without waiting: True, False if another has it, None if there are no locks here."""
    if fcntl is None:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # ENOLCK, ENOTSUP; EBADF for a directory on NFS
        return None
    return True


def unlock(fd: int) -> None:
    """Give the lock back, for copies of the descriptor in forked children too."""
    if fcntl is not None:
        try:
            fcntl.flock(fd, fcntl.LOCK_UN)
        except OSError:
            pass
