"""Copies an object of a remote store to a file of this machine: parallel, resumed after a crash, published by a rename.

A `Download` is a file of a hidden name, in its full size from the start, so that its space is reserved. Behind the
bytes of the object it has a mark for each block that is complete. Another process continues the download after a kill,
and reads the other blocks only. After a restart of the machine it reads all of them: a mark may then be on the disk
and its block may not. When all are there, the marks are cut off, the file is made durable and renamed. The name of the
file identifies the object and its state (`object_key`), so blocks of two states never mix.

The caller owns the file by a lock of its own (`FileLock`); nothing else here excludes a second writer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress

from stio.runtime import memory
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled, is_interrupted
from stio.runtime.process import contextmanager
from stio.runtime.workers import WorkerPool
from stio.storage.base import Identity, Requests, Source
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import LockTimeout, boot_id
from stio.storage.commit.files import write_whole

PART_SUFFIX = ".part"
"""End of the name of a file that is not complete."""

LOCK_SUFFIX = ".lock"
"""End of the name of a lock file."""

BLOCK_BYTES = 8 << 20
"""Bytes for which there is one mark."""

_MARKS_VERSION = b"stio-marks-1 "
_LOOK_SECONDS = 0.5


def object_key(path: str, identity: Identity) -> str:
    """Return a name for one state of one object; "" if the store says nothing that identifies a state.

    Args:
        path: URL of the object without secrets.
        identity: Its state.
    """
    state = identity.etag or (identity.mtime_ns and str(identity.mtime_ns))
    if not state:
        return ""
    return hashlib.sha256(f"{path}\n{state}\n{identity.nbytes}".encode("utf-8", "surrogatepass")).hexdigest()[:40]


def check_interrupted() -> None:
    """Raise `Cancelled` if the calling thread should end (`stio.runtime.operation.is_interrupted`)."""
    if is_interrupted():
        raise Cancelled


def wait_until(ready: Callable[[], bool | None]) -> None:
    """Call `ready` again and again until it is true.

    Raises:
        Cancelled: The calling thread should end.
    """
    while not LockTimeout(_LOOK_SECONDS).wait_until(ready, check_interrupted):
        pass


class Download:
    """The file of an object that is being copied. One user at a time; close it before the lock is released.

    Args:
        name: Name of the file; it must identify the object and its state.
        nbytes: Size of the object.
        dir_fd: Its directory; the caller keeps it open.

    Raises:
        OSError: The file could not be made. ENOSPC: there is too little space; then nothing is left of it.
    """

    def __init__(self, name: str, nbytes: int, dir_fd: int) -> None:
        self._name = name
        self._nbytes = nbytes
        self._dir_fd = dir_fd
        self._num_blocks = -(-nbytes // BLOCK_BYTES)
        self._done = bytearray(self._num_blocks)
        self._seal = _MARKS_VERSION + boot_id().encode()[:36].ljust(36)
        is_new = not calls.exists(name, dir_fd=dir_fd)
        self._fd = calls.open_file(name, os.O_RDWR | os.O_CREAT, dir_fd=dir_fd, mode=0o666)
        try:
            if is_new or not self._read_marks():
                os.ftruncate(self._fd, 0)
                calls.reserve(self._fd, self._nbytes + self._num_blocks + len(self._seal))
                write_whole(self._fd, bytes(self._num_blocks) + self._seal, self._nbytes)
        except BaseException:
            self.close()
            with suppress(OSError):
                calls.unlink(name, dir_fd=dir_fd)
            raise

    @property
    def missing_bytes(self) -> int:
        """Bytes that are still to be read."""
        return sum(stop - begin for begin, stop in self._missing())

    def fill(
        self, source: Source, requests: Requests, *, report: Callable[[int], object] = lambda nbytes: None
    ) -> None:
        """Read the missing blocks. Blocks; on an error or a cancel the blocks that are complete stay.

        Args:
            source: The object, in the state that the name stands for.
            requests: Size and number of the reads; so much memory is used as well (`Requests.buffer_bytes`).
            report: Called with the number of bytes after each block, on several threads.

        Raises:
            StioError: The object could not be read.
            OSError: The file could not be written.
            Cancelled: The calling thread should end.
        """
        blocks = list(self._missing())[::-1]
        step = min(requests.nbytes, BLOCK_BYTES)
        pool = WorkerPool("fetch")

        def work() -> None:
            region: Region | None = None
            for begin, stop in pool.items(blocks):
                check_interrupted()
                region = region or memory.allocate(min(step, self._nbytes))
                for at in range(begin, stop, step):
                    part = region.sub(0, min(step, stop - at))
                    source.read_into(at, [part])
                    write_whole(self._fd, part.view(), at)
                self._complete(begin, stop)
                report(stop - begin)

        if blocks:
            pool.run(work, min(len(blocks), requests.num_in_flight))

    def publish(self, name: str, *, read_only: bool = True) -> None:
        """Make the file durable and give it its name. All blocks must be there.

        Args:
            name: Its name, relative to the directory; it replaces a file of that name.
            read_only: Take the right to write it from all users.

        Raises:
            OSError: The file could not be made durable; its content must not be used.
        """
        os.ftruncate(self._fd, self._nbytes)
        if read_only:
            calls.fchmod(self._fd, os.fstat(self._fd).st_mode & 0o444)
        calls.fsync(self._fd)
        calls.rename(self._name, name, source_fd=self._dir_fd, target_fd=self._dir_fd)
        calls.sync_directory(self._dir_fd)

    def close(self) -> None:
        """Close the file; what is complete of it stays. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            calls.close(fd)

    def _missing(self) -> Iterator[tuple[int, int]]:
        for k, done in enumerate(self._done):
            if not done:
                yield k * BLOCK_BYTES, min(self._nbytes, (k + 1) * BLOCK_BYTES)

    def _complete(self, begin: int, stop: int) -> None:
        self._done[begin // BLOCK_BYTES] = 1
        calls.start_writeback(self._fd, begin, stop - begin)  # or the `fsync` at the end would write all of it
        write_whole(self._fd, b"\1", self._nbytes + begin // BLOCK_BYTES)

    def _read_marks(self) -> bool:
        """Read the marks of an earlier download; return whether there are any that hold."""
        nbytes = self._num_blocks + len(self._seal)
        if not boot_id() or os.fstat(self._fd).st_size != self._nbytes + nbytes:
            return False
        raw = os.pread(self._fd, nbytes, self._nbytes)
        if len(raw) != nbytes or not raw.endswith(self._seal):
            return False
        marks = raw[: self._num_blocks]
        if not set(marks) <= {0, 1}:
            return False
        self._done[:] = marks
        return True


@contextmanager
def opened_directory(path: str, *, make: bool = False, parent_fd: int | None = None) -> Iterator[int]:
    """Open a directory for the duration of a block.

    Args:
        path: Its path.
        make: Make it, for this user only, if it is not there.
        parent_fd: The path is a name in this directory, and no link is followed.

    Raises:
        OSError: It cannot be opened, or made.
    """
    if make:
        os.makedirs(path, mode=0o700, exist_ok=True)
    flags = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
    fd = os.open(path, flags) if parent_fd is None else calls.open_directory(path, dir_fd=parent_fd)
    try:
        yield fd
    finally:
        os.close(fd)
