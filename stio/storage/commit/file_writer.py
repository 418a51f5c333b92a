"""New local files: created with their space reserved, written from several threads past the page cache, made durable.

A shard is written in blocks of tens of megabytes, whole pages with O_DIRECT (measured 4.2-4.5 GB/s against 2.6
buffered), the rest buffered. One call for each block: beside a busy Python thread each return from the kernel costs up
to 5 ms, so no clock is read and no other call made between two writes.

Several processes may write one file, each its own ranges. A page that two ranges share is written through the page
cache by both: next to a direct write the kernel drops what the cache holds of the page. So only pages that are whole
in a range are written directly.

Between hosts there is no common page cache. A client that holds a page may send all of it, and so write old bytes over
those of another host (`nfs_can_extend_write` of Linux, FUSE with a write-back cache). So on a filesystem that is not
local the writers of one file send their exact ranges past the cache. The NFS client of Linux has no alignment rules for
O_DIRECT (open(2)). A filesystem that has them answers EINVAL, and gets whole pages and buffered edges, as a local one.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence

from stio.errors import NoSpaceError, StorageError
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.locks import new_lock
from stio.runtime.memory import Region
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.attributes import FileAttributes
from stio.storage.commit.small_files import closing
from stio.storage.local import is_local

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WRITEBACK_BYTES = 8 << 20
"""Buffered writes of at least this size are sent to the disk at once; below it the call costs more than it saves."""

_RANGES_BEHIND = 4
"""Strided writes after which the pages of one are sent to the disk: the processes that write between them are at about
the same place, and have then written those pages too."""


def free_bytes(fd: int) -> int | None:
    """Return how many bytes an unprivileged process may still write on the filesystem of an open file or directory.

    None where the filesystem does not count (ramfs, some in user space).
    """
    found = os.fstatvfs(fd)
    return found.f_bavail * found.f_frsize if found.f_blocks else None


def write_refused(
    action: str,
    path: str,
    error: OSError | ValueError,
    *,
    offset: int | None = None,
    needed_bytes: int | None = None,
    free: int | None = None,
) -> StorageError:
    """Return the error to raise for a refused write: `NoSpaceError` if space was missing.

    Args:
        action: The action that failed, as a participle.
        path: File or directory.
        error: The system's error.
        offset: Byte offset in the file.
        needed_bytes: Space that was needed.
        free: Space that was free.
    """
    number = getattr(error, "errno", None)
    if number not in _NO_SPACE:
        return refused(action, path, error, offset=offset)
    reason = {
        errno.EDQUOT: "the quota of this user is used up",
        errno.EFBIG: "the file would be larger than the filesystem or the process's limit (ulimit -f) allows",
    }.get(number or 0, "there is too little space on the filesystem")
    if needed_bytes is not None:
        reason += f"; {needed_bytes:,} bytes are needed"
    if free is not None:
        reason += f", {free:,} are free" if needed_bytes is not None else f"; {free:,} bytes are free"
    return NoSpaceError(
        f"{action} failed: {reason}", path=path, errno=number, offset=offset, needed_bytes=needed_bytes, free_bytes=free
    )


class LocalFileWriter:
    """One new file; a `FileWriter`. Made by `create_files`.

    Args:
        dir_fd: The directory that holds it; it must stay open as long as this object is used.
        name: Name in it.
        path: Name for messages: the path that the file will have.
        nbytes: Its size.
        attributes: Those that `finish` gives it; None: those that a new file gets.
        durable: Whether `finish` syncs.
        is_shared: Whether other processes write the file too.
    """

    def __init__(
        self,
        dir_fd: int,
        name: str,
        path: str,
        nbytes: int,
        *,
        attributes: FileAttributes | None,
        durable: bool,
        is_shared: bool = False,
    ) -> None:
        self.name = name
        """Name in the staging directory; a commit does not change it."""
        self.path = path
        """Name for messages: the path that the file will have."""
        self._dir_fd, self._attributes, self._durable = dir_fd, attributes, durable
        self._lock = new_lock()
        self._fd: int | None = None
        self._direct_fd: int | None = None
        self._written_bytes = 0
        self._behind: deque[tuple[int, int]] = deque()  # ranges with strided writes
        self.own_bytes = nbytes
        """Bytes that this process writes; `finish` requires them. Less than the size where others write the rest."""
        self.direct_refused = not _O_DIRECT
        """True once direct I/O was tried and refused; writes are buffered from then on."""
        self._takes_exact_ranges = is_shared and not self.direct_refused and not is_local(dir_fd)
        self.finished = False
        """True once the file is complete, and durable if `durable` is set."""

    def write_from(self, offset: int, region: Region) -> None:
        """Write a region's bytes at `offset`, which here may be any; see `FileWriter.write_from`.

        Whole pages of the file that begin at a page of memory are written past the page cache; if other hosts may write
        the file too, all bytes, where the filesystem takes that.
        """
        done = self._write_exact_range(offset, region) if self._takes_exact_ranges else 0
        if done < region.nbytes:
            self._write_pages(offset + done, region.sub(done, region.nbytes - done))
        with self._lock:
            self._written_bytes += region.nbytes

    def _write_pages(self, offset: int, region: Region) -> None:
        done, head = 0, -offset % PAGE_BYTES
        if not (self.direct_refused or (region.address + head) % PAGE_BYTES or region.nbytes - head < PAGE_BYTES):
            if head:
                self._write_buffered(offset, region.sub(0, head), 0)
            done = self._write_direct(offset, region, head)
        if done < region.nbytes:
            self._write_buffered(offset, region, done)

    def write_strided(self, offset: int, region: Region, nbytes: int, stride: int) -> None:
        """Write parts of a region to places at even distances; see `PartWriter.write_strided`."""
        fd, address, start, at = self._opened(), region.address, 0, offset
        write = calls.write
        while start < region.nbytes:
            try:
                count = write(fd, address + start, nbytes, at)
            except InterruptedError:
                continue
            except OSError as error:
                raise self._refused(error, at, region.nbytes - start) from error
            done = count
            while done < nbytes:
                done += self._write(fd, region.sub(start, nbytes), done, nbytes, at)
            start += nbytes
            at += stride
        with self._lock:
            self._written_bytes += region.nbytes
            self._behind.append((offset, at - offset))
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
            fd = self._opened()
            if self._attributes is not None:
                # Not before: files are opened by name, and a mode without the owner's write bit would refuse that.
                self._attributes.apply(fd)
            if self._durable:
                self._sync(fd)
            self.finished = True
        finally:
            self.close()

    def close(self) -> None:
        """Close the descriptors. Idempotent; no write may be under way."""
        with self._lock:
            fds, self._fd, self._direct_fd = (self._fd, self._direct_fd), None, None
        for fd in fds:
            if fd is not None:
                calls.close(fd)

    def _sync(self, fd: int) -> None:
        try:
            calls.fsync(fd)
        except OSError as error:
            # The kernel has dropped what it could not write, and marked the pages clean: a second fsync would succeed
            # and prove nothing. https://wiki.postgresql.org/wiki/Fsync_Errors
            failure = write_refused("syncing", self.path, error)
            failure.message += "; the content of this file is not reliable, and the save is rolled back"
            raise failure from error

    def _opened(self) -> int:
        # Opened at the first write, not when it is created: a save may have hundreds of shards.
        with self._lock:
            if self._fd is None:
                self._fd = self._open(0)
            return self._fd

    def _opened_direct(self) -> int | None:
        with self._lock:
            if self._direct_fd is None and not self.direct_refused:
                try:
                    self._direct_fd = self._open(_O_DIRECT)
                except StorageError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
                    self.direct_refused = True
            return self._direct_fd

    def _open(self, flags: int) -> int:
        try:
            return calls.open_file(self.name, os.O_WRONLY | flags, dir_fd=self._dir_fd)
        except OSError as error:
            raise refused("opening for writing", self.path, error) from error

    def _write_exact_range(self, offset: int, region: Region) -> int:
        """Write a region past the page cache, wherever it begins and ends; return the end of what was written."""
        done, fd = 0, self._opened_direct()
        while fd is not None and done < region.nbytes:
            try:
                done += self._write(fd, region, done, region.nbytes, offset)
            except StorageError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self._takes_exact_ranges = False  # the filesystem needs an alignment
                break
        return done

    def _write_direct(self, offset: int, region: Region, done: int) -> int:
        """Write the whole pages from `done` on past the page cache; return the end of what was written.

        The rest must be written buffered.
        """
        begin, whole = done, done + (region.nbytes - done) // PAGE_BYTES * PAGE_BYTES
        fd = self._opened_direct() if whole > begin else None
        while fd is not None and done < whole and (done - begin) % PAGE_BYTES == 0:
            try:
                done += self._write(fd, region, done, whole, offset)
            except StorageError as error:
                # EINVAL: the filesystem needs another alignment, or has no direct I/O. Any other error is raised: the
                # page cache would accept the same bytes, and lose them later.
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct_refused = True
                break
        return done

    def _write_buffered(self, offset: int, region: Region, done: int) -> None:
        fd, start = self._opened(), done
        while done < region.nbytes:
            done += self._write(fd, region, done, region.nbytes, offset)
        if done - start >= _WRITEBACK_BYTES:
            calls.start_writeback(fd, offset + start, done - start)

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
        free = free_bytes(self._dir_fd) if error.errno in _NO_SPACE else None
        return write_refused("writing", self.path, error, offset=offset, needed_bytes=missing, free=free)


def create_files(
    dir_fd: int,
    files: Sequence[tuple[str, int]],
    *,
    path: str,
    where: Sequence[str],
    attributes: Sequence[FileAttributes | None],
    durable: bool,
    is_shared: bool = False,
) -> list[LocalFileWriter]:
    """Create files with their space reserved; each is opened at its first write.

    Args:
        dir_fd: The directory to create them in; the caller keeps it open.
        files: Name and size of each.
        path: The destination, for messages.
        where: Path that each will have, for messages.
        attributes: Those that `finish` gives each; None: those that a new file gets.
        durable: Whether complete files must survive a power cut.
        is_shared: Whether other processes write the files too.

    Raises:
        NoSpaceError: They do not fit.
        StorageError: The operating system reported an error.
    """
    needed = sum(nbytes for _, nbytes in files)
    free = free_bytes(dir_fd)
    if free is not None and needed > free:
        # ext4 allocates all free space before it reports an error: until the files are removed no other process could
        # write a byte. And space that is reserved for the system is not used for checkpoints, even if root saves.
        raise write_refused("reserving space", path, OSError(errno.ENOSPC, ""), needed_bytes=needed, free=free)
    writers = []
    for (name, nbytes), final, kept in zip(files, where, attributes, strict=True):
        try:
            with closing(calls.open_file(name, os.O_CREAT | os.O_EXCL | os.O_RDWR, dir_fd=dir_fd)) as fd:
                calls.reserve(fd, nbytes)
        except OSError as error:
            raise write_refused("reserving space", final, error, needed_bytes=needed, free=free) from error
        writer = LocalFileWriter(dir_fd, name, final, nbytes, attributes=kept, durable=durable, is_shared=is_shared)
        writers.append(writer)
    return writers
