"""Small files and names in an open directory: read, written, compared, removed.

Each function takes the descriptor of a directory and a name in it. Functions that compare or remove a file never follow
a link: they compare or remove the link itself.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from stio.errors import StorageError
from stio.storage.checks import OPEN_FLAGS, require_regular
from stio.storage.commit import syscalls as calls
from stio.storage.commit.attributes import FileAttributes
from stio.storage.paths import open_by_rule, stat_by_rule

_ABSENT = {errno.ENOENT, errno.ENAMETOOLONG}
"""Errors of a name that nothing has. With the second one nothing can have it; an index may hold such a name."""

MAX_INDEX_BYTES = 256 << 20
"""Longest index that a save reads; a load has a smaller limit."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Distinguishes two files of one name. Without an inode: some FUSE filesystems assign a new one at each call."""

    nbytes: int
    """Size."""
    mtime_ns: int
    """Time of the last change, nanoseconds; a rename does not change it."""


@contextmanager
def closing(fd: int) -> Iterator[int]:
    """Give an open file or directory to a block, and close it at the end of the block."""
    try:
        yield fd
    finally:
        calls.close(fd)


def write_small(
    dir_fd: int, name: str, data: bytes, *, attributes: FileAttributes | None = None, durable: bool = True
) -> None:
    """Write a small new file.

    Args:
        dir_fd: Its directory.
        name: Its name, which must be free.
        data: Its content.
        attributes: Those of the file that it will replace; None: those that a new file gets.
        durable: Whether its content survives a power cut (its name needs a sync of the directory).

    Raises:
        OSError: The operating system reported an error; part of the file may be there.
    """
    with closing(calls.open_file(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=dir_fd)) as fd:
        write_whole(fd, data, 0)
        if attributes is not None:
            attributes.apply(fd)
        if durable:
            calls.fsync(fd)


def write_whole(fd: int, data: bytes, offset: int) -> None:
    """Write all bytes at an offset of an open file.

    Raises:
        OSError: The operating system reported an error, or wrote nothing; some of the bytes may be there.
    """
    done = 0
    while done < len(data):
        count = calls.write_bytes(fd, data[done:] if done else data, offset + done)
        if count <= 0:
            raise OSError(errno.EIO, "the system wrote no bytes")
        done += count


def read_small(dir_fd: int, name: str, limit_bytes: int, *, where: str = "") -> bytes | None:
    """Return the bytes of a small file, None if it does not exist.

    Args:
        dir_fd: Its directory.
        name: Its name; a link is followed by the rule of `stio.storage.paths`.
        limit_bytes: Its largest allowed size.
        where: Path of the directory, for messages.

    Raises:
        StorageError: It is larger, or no regular file.
        OSError: The operating system reported an error.
    """
    path = os.path.join(where, name)
    try:
        # Checked before it is opened: to open a device may have an effect.
        require_regular(stat_by_rule(name, dir_fd=dir_fd), path)
        fd = open_by_rule(name, OPEN_FLAGS, dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None
    with open(fd, "rb") as file:
        require_regular(os.fstat(fd), path)
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise StorageError(f"the file is larger than {limit_bytes:,} bytes", path=path, errno=errno.EOVERFLOW)
    return data


def remove_file(dir_fd: int, name: str) -> None:
    """Remove a file; if it does not exist, do nothing.

    Raises:
        OSError: The operating system reported an error.
    """
    with suppress(FileNotFoundError):
        calls.unlink(name, dir_fd=dir_fd)


def digest_of(data: bytes | None) -> str | None:
    """Return the SHA-256 of bytes, None for None."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def status_at(dir_fd: int, name: str, *, follow_symlinks: bool = False) -> os.stat_result | None:
    """Return the status of what has a name, None if nothing has it.

    Raises:
        OSError: The operating system reported an error.
    """
    try:
        if follow_symlinks:
            return stat_by_rule(name, dir_fd=dir_fd)
        return os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None


def file_at(dir_fd: int, name: str) -> os.stat_result | None:
    """Return the status of a regular file or a link, None if there is neither of this name.

    Raises:
        OSError: The operating system reported an error.
    """
    found = status_at(dir_fd, name)
    return found if found and (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)) else None


def stamp_of(dir_fd: int, name: str) -> Stamp | None:
    """Return the stamp of a regular file or a link, None if there is neither of this name."""
    found = file_at(dir_fd, name)
    return None if found is None else Stamp(found.st_size, found.st_mtime_ns)
