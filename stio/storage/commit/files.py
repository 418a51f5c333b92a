"""Files in an open directory: small ones read, written, compared, removed; new shards, written by several threads.

Each function takes the descriptor of a directory and a name in it. Functions that compare or remove a file never follow
a link: they compare or remove the link itself.

A file that replaces another one gets its mode, and its owner and group as far as this process may set them, before it
is visible. Access control lists and extended attributes are not copied; a new file has the list that its directory
gives new files. Nobody gets wider rights by that: the rights of a group are not given to another group, and the group
bits of a file with a list of its own, which show the list's mask, are not taken for rights of its group.

A shard is written in blocks of tens of megabytes. The engine writes them (`add_range`): whole pages with O_DIRECT
(measured 4.2-4.5 GB/s against 2.6 buffered), the rest buffered. Where it cannot, a thread of Python writes a block
through the page cache (`write_from`), with one call.

Several processes may write one file, each its own ranges. A page that two ranges share is written through the page
cache by both: next to a direct write the kernel drops what the cache holds of the page. So only pages that are whole
in a range are written directly.

Between hosts there is no common page cache. A client that holds a page may send all of it, and so write old bytes over
those of another host (`nfs_can_extend_write` of Linux, FUSE with a write-back cache). So on a filesystem that is not
local the writers of one file send their exact ranges past the cache. The NFS client of Linux has no alignment rules for
O_DIRECT (open(2)). A filesystem that has them answers EINVAL, and gets whole pages and buffered edges by the engine, as
a local one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from stio import native
from stio.errors import StorageError
from stio.limits import PAGE_BYTES
from stio.process import new_lock
from stio.runtime.memory import Region
from stio.storage.base import Identity
from stio.storage.checks import OPEN_FLAGS, UNSUPPORTED, open_by_rule, refused, require_regular, stat_by_rule
from stio.storage.commit import syscalls as calls
from stio.storage.local import is_local


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


class closing:  # noqa: N801 - a context manager, as `contextlib.closing`
    """Give an open file or directory to a block, and close it at the end of the block."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __enter__(self) -> int:
        return self._fd

    def __exit__(self, *_: object) -> None:
        calls.close(self._fd)


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
    status = status_at(dir_fd, name)
    return status if status and (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)) else None


def stamp_of(dir_fd: int, name: str) -> Stamp | None:
    """Return the stamp of a regular file or a link, None if there is neither of this name."""
    status = file_at(dir_fd, name)
    return None if status is None else Stamp(status.st_size, status.st_mtime_ns)


_O_DIRECT = getattr(os, "O_DIRECT", 0)
_WRITEBACK_BYTES = 8 << 20
"""Buffered writes of at least this size are sent to the disk at once; below it the call costs more than it saves."""

_RANGES_BEHIND = 4
"""Strided writes after which the pages of one are sent to the disk: the processes that write between them are at about
the same place, and have then written those pages too."""


def free_bytes(fd: int) -> int | None:
    """Return how many bytes an unprivileged process may still write on the filesystem of an open file or directory.

    None where the filesystem does not count (ramfs, some in user space), or the system does not say.
    """
    try:
        space = os.fstatvfs(fd)
    except OSError:
        return None
    return space.f_bavail * space.f_frsize if space.f_blocks else None


class LocalFileWriter:
    """One new file; a `FileWriter`. `create_files` creates the file.

    Args:
        dir_fd: The directory that holds it; it must stay open as long as this object is used.
        name: Name in it.
        path: Name for messages: the path that the file will have.
        nbytes: Its size.
        attributes: Those that `finish` gives it; None: those that a new file gets.
        durable: Whether `finish` syncs.
    """

    is_ordered = False
    """See `FileWriter`."""

    def __init__(
        self,
        dir_fd: int,
        name: str,
        path: str,
        nbytes: int,
        *,
        attributes: FileAttributes | None,
        durable: bool,
    ) -> None:
        self.name = name
        """Name in the staging directory; a commit does not change it."""
        self.path = path
        """Name for messages: the path that the file will have."""
        self._dir_fd, self._attributes, self._durable = dir_fd, attributes, durable
        self._lock = new_lock()
        self._fd = self._direct_fd = -1
        self._written_bytes = 0
        self._behind: deque[tuple[int, int]] = deque()  # ranges with strided writes
        self.own_bytes = nbytes
        """Bytes that this process writes; `finish` requires them. Less than the size where others write the rest."""
        self.direct_refused = not _O_DIRECT
        """True once a file could not be opened for direct I/O. The engine finds out by itself what refuses a write."""
        self._takes_exact_ranges = False
        self.finished = False
        """True once the file is complete, and durable if `durable` is set."""

    def share(self, own_bytes: int) -> None:
        """Note that other processes write the file too, and how many bytes this one writes. Called before it writes."""
        self.own_bytes = own_bytes
        self._takes_exact_ranges = not self.direct_refused and not is_local(self._dir_fd)

    def write_from(self, offset: int, region: Region) -> None:
        """Write a region's bytes at `offset`, which here may be any; see `FileWriter.write_from`.

        They go through the page cache. If other hosts may write the file too they go past it, where the filesystem
        takes that.
        """
        done, (fd, direct_fd) = 0, self._opened(direct=self._takes_exact_ranges)
        while done < region.nbytes:
            is_exact = self._takes_exact_ranges and direct_fd >= 0
            try:
                done += self._write(direct_fd if is_exact else fd, region, done, region.nbytes, offset)
            except StorageError as error:
                if not is_exact or error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._takes_exact_ranges = False  # the filesystem needs an alignment
        if region.nbytes >= _WRITEBACK_BYTES and not self._takes_exact_ranges:
            calls.start_writeback(fd, offset, region.nbytes)
        with self._lock:
            self._written_bytes += region.nbytes

    def add_range(self, ranges: native.Ranges, group: int, offset: int, region: Region) -> bool:
        """Add the write of a region at any offset for the engine, which writes whole pages past the page cache.

        `finish` must not be called before the engine has written it. Returns False where only `write_from` can.
        """
        if self._takes_exact_ranges:
            return False
        ranges.host_to_file(
            group, region.address, region.nbytes, *self._opened(direct=self.own_bytes >= PAGE_BYTES), offset
        )
        return True

    def count(self, nbytes: int) -> None:
        """Count bytes that the engine has written."""
        with self._lock:
            self._written_bytes += nbytes

    def error(self, failure: native.Failure) -> StorageError:
        """Return the error of a write by the engine, to be raised."""
        return self._refused(OSError(failure.code, ""), failure.offset, failure.nbytes)

    def write_strided(self, offset: int, region: Region, nbytes: int, stride: int) -> None:
        """Write parts of a region to places at even distances, as one of several processes. Blocks.

        Args:
            offset: First byte of the first place.
            region: Host memory; the parts follow each other in it without a gap.
            nbytes: Length of one part.
            stride: Distance between the starts of two places.

        Raises:
            StorageError: See `FileWriter.write_from`.
        """
        fd, done, gap = self._opened()[0], 0, stride - nbytes
        while done < region.nbytes:
            number = done // nbytes
            done += self._write(fd, region, done, (number + 1) * nbytes, offset + number * gap)
        with self._lock:
            self._written_bytes += region.nbytes
            self._behind.append((offset, region.nbytes // nbytes * stride))
            ranges = [self._behind.popleft()] if len(self._behind) > _RANGES_BEHIND else []
        for begin, length in ranges:
            calls.start_writeback(fd, begin, length)

    def finish(self) -> None:
        """Make the file durable, if `durable` is set, and close it; see `FileWriter.finish`."""
        try:
            if self._written_bytes != self.own_bytes:
                raise StorageError(
                    "not all of the file was written",
                    path=self.path,
                    expected=self.own_bytes,
                    found=self._written_bytes,
                )
            fd = self._opened()[0]
            if self._attributes is not None:
                # Not before: files are opened by name, and a mode without the owner's write bit would refuse that.
                self._attributes.apply(fd)
            if self._durable:
                try:
                    calls.fsync(fd)
                except OSError as error:
                    # The kernel has dropped what it could not write, and marked the pages clean: a second fsync would
                    # succeed and prove nothing. https://wiki.postgresql.org/wiki/Fsync_Errors
                    failure = refused("syncing", self.path, error)
                    failure.message += "; the content of this file is not reliable, and the save is rolled back"
                    raise failure from error
            self.finished = True
        finally:
            self.close()

    def close(self) -> None:
        """Close the descriptors. Idempotent; no write may be under way."""
        with self._lock:
            fds, self._fd, self._direct_fd = (self._fd, self._direct_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                calls.close(fd)

    def _opened(self, *, direct: bool = False) -> tuple[int, int]:
        """Return the descriptor, and one for writes past the page cache, or -1."""
        # Opened at the first write, not when it is created: a save may have hundreds of shards. Less than a page is
        # written past the page cache as an exact range only, and descriptors may be few.
        with self._lock:
            if self._fd < 0:
                self._fd = self._open(0)
            if direct and self._direct_fd < 0 and not self.direct_refused:
                try:
                    self._direct_fd = self._open(_O_DIRECT)
                except StorageError as error:
                    if error.errno not in UNSUPPORTED:
                        raise
                    self.direct_refused = True
            return self._fd, self._direct_fd

    def _open(self, flags: int) -> int:
        try:
            return calls.open_file(self.name, os.O_WRONLY | flags, dir_fd=self._dir_fd)
        except OSError as error:
            raise refused("opening for writing", self.path, error) from error

    def _write(self, fd: int, region: Region, done: int, end: int, offset: int) -> int:
        """Write the region's bytes from `done` to `end`, or the first of them; return how many."""
        while True:
            try:
                count = calls.write(fd, region.address + done, end - done, offset + done)
                if count <= 0:
                    raise OSError(errno.EIO, "the system wrote no bytes")
                return count
            except InterruptedError:
                continue
            except OSError as error:
                raise self._refused(error, offset + done, region.nbytes - done) from error

    def _refused(self, error: OSError, offset: int, missing: int) -> StorageError:
        space = {"needed_bytes": missing, "free_bytes": free_bytes(self._dir_fd)}
        return refused("writing", self.path, error, offset=offset, **space)


def create_files(dir_fd: int, writers: Sequence[LocalFileWriter], *, path: str) -> None:
    """Create the files of new writers with their space reserved; each is opened at its first write.

    Args:
        dir_fd: The directory to create them in, that of the writers.
        writers: Their `own_bytes` are the sizes.
        path: The destination, for messages.

    Raises:
        NoSpaceError: They do not fit.
        StorageError: The operating system reported an error.
    """
    needed = sum(writer.own_bytes for writer in writers)
    free = free_bytes(dir_fd)
    if free is not None and needed > free:
        # ext4 allocates all free space before it reports an error: until the files are removed no other process could
        # write a byte. And space that is reserved for the system is not used for checkpoints, even if root saves.
        raise refused("reserving space", path, OSError(errno.ENOSPC, ""), needed_bytes=needed, free_bytes=free)
    for writer in writers:
        try:
            with closing(calls.open_file(writer.name, os.O_CREAT | os.O_EXCL | os.O_RDWR, dir_fd=dir_fd)) as fd:
                calls.reserve(fd, writer.own_bytes)
        except OSError as error:
            raise refused("reserving space", writer.path, error, needed_bytes=needed, free_bytes=free) from error
