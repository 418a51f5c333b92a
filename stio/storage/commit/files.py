"""Files in an open directory: small ones read, written, compared, removed; what a new one keeps of the one it replaces.

Each function takes the descriptor of a directory and a name in it. Functions that compare or remove a file never follow
a link: they compare or remove the link itself.

A file that replaces another one gets its mode, and its owner and group as far as this process may set them, before it
is visible. Access control lists and extended attributes are not copied; a new file has the list that its directory
gives new files. Nobody gets wider rights by that: the rights of a group are not given to another group, and the group
bits of a file with a list of its own, which show the list's mask, are not taken for rights of its group.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Self

from stio.errors import StorageError
from stio.runtime.contexts import contextmanager
from stio.storage.base import Identity
from stio.storage.checks import OPEN_FLAGS, open_by_rule, require_regular, stat_by_rule
from stio.storage.commit import syscalls as calls


@dataclass(frozen=True, slots=True)
class FileAttributes:
    """Owner, group and mode of a file or a directory."""

    status: os.stat_result
    """All three."""
    has_list: bool
    """Whether it has an access control list."""

    def apply(self, fd: int) -> None:
        """Give a file, or a directory, these attributes as far as the system allows. Not for one that is visible.

        A directory stays writable for its owner: otherwise it could not be renamed.
        """
        calls.copy_owner(self.status, fd)
        # Of a directory also the sticky bit and the one that its group is inherited.
        mode = self.status.st_mode & (0o3777 if stat.S_ISDIR(self.status.st_mode) else 0o777)
        if os.fstat(fd).st_gid != self.status.st_gid or (self.has_list and not calls.has_access_list(fd)):
            rights = mode >> 3 & mode & 7
            mode = mode & ~0o077 | rights << 3 | rights
        calls.fchmod(fd, mode | 0o300 if stat.S_ISDIR(self.status.st_mode) else mode)


def attributes_at(dir_fd: int, name: str, *, follow_symlinks: bool = True) -> FileAttributes | None:
    """Return the attributes of a file or a directory, None if there is neither of this name.

    Args:
        dir_fd: The directory that holds it.
        name: Its name; a link is followed by the rule of `stio.storage.checks`.
        follow_symlinks: False: there is neither if this is the name of a link.

    Raises:
        OSError: The operating system reported an error.
    """
    status = status_at(dir_fd, name, follow_symlinks=follow_symlinks)
    if status is None or not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return None
    return FileAttributes(status, calls.has_access_list(f"/proc/self/fd/{dir_fd}/{name}"))


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

    @classmethod
    def of(cls, file: Identity) -> Self:
        """Return the stamp of a file."""
        return cls(file.nbytes, file.mtime_ns)


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


def write_whole(fd: int, data: bytes | memoryview, offset: int) -> None:
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
        name: Its name; a link is followed by the rule of `stio.storage.checks`.
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
