"""Files mapped into memory: privately, and populated by parallel calls or read at the first access.

Nothing is copied. `madvise(MADV_POPULATE_READ)` populates in one long call without the GIL; page faults would cost one
trap for each page. The pages are those of the page cache, so many processes share them.
"""

from __future__ import annotations

import errno
import os
from time import perf_counter

from stio.errors import HostMemoryError, StorageError, TruncatedError, printable, without_path
from stio.runtime import memory
from stio.runtime.locks import new_lock
from stio.runtime.log import RareWarnings, log
from stio.runtime.memory import Region
from stio.storage.checks import refused
from stio.storage.local import LocalFile

_TOUCH_BYTES = 256 << 10
_PATIENCE_SECONDS = 0.02
_SECONDS_A_BYTE = 1 / (1 << 30)
"""A touch of 256 KiB takes 30 to 100 microseconds. If the average is 240 or more, threads wait for the processor or for
the GIL (one wait for that takes 5 ms)."""


_refusals = RareWarnings()


def map_if_possible(file: LocalFile, *, lazy: bool = False) -> MappedFile | None:
    """Return a mapping of a file; None, with a line in the log, where the system refuses: the caller reads it then.

    Some filesystems map no files (ENODEV), and a limit may leave too little address space for a file of which few
    tensors are needed.
    """
    try:
        return MappedFile(file, lazy=lazy)
    except (HostMemoryError, StorageError) as error:
        log_unmapped(file.path, without_path(error))
        return None


def log_unmapped(path: str, reason: str) -> None:
    """Write into the log that a file is read into memory."""
    log(_refusals.level(), "%s is read into memory, since it cannot be mapped: %s", printable(path), reason)


class MappedFile:
    """A private, writable mapping of a whole file. A write to it copies the page and does not change the file.

    Args:
        file: The open file. Only `populate` needs it, for its checks; the mapping outlives it.
        lazy: `populate` will not be called. No read-ahead in huge pages, since accesses may be sparse.

    Raises:
        HostMemoryError: The limit of address space is too low.
        StorageError: The operating system reported an error.
    """

    def __init__(self, file: LocalFile, *, lazy: bool = False) -> None:
        self._file = file
        self.path = file.path
        """Path of the file."""
        self._touching = new_lock()
        self._touches = hasattr(os, "preadv")
        self._patience_seconds = _PATIENCE_SECONDS
        try:
            with memory.reporting_shortage(file.path):
                self.region: Region = memory.map_file(file.fd, file.identity.nbytes, huge_pages=not lazy)
        except OSError as error:
            raise refused("mapping", file.path, error) from error

    def populate(self, offset: int, nbytes: int) -> None:
        """Read `[offset, offset + nbytes)` into the page cache and map it. Blocks, without the GIL.

        Raises:
            TruncatedError: The file is shorter than it was when it was opened.
            StorageError: The disk failed to read.
        """
        # An access past the end is SIGBUS, which cannot be caught: compare the size shortly before.
        size = self._file.nbytes_now()
        if offset + nbytes > size:
            raise TruncatedError(
                "the file shrank while it was being loaded",
                path=self._file.path,
                offset=size,
                expected=f"{self._file.identity.nbytes:,} bytes",
                found=f"{size:,} bytes",
            )
        number = errno.EINTR
        while number == errno.EINTR:
            number = memory.populate(self.region.sub(offset, nbytes))
        if number in (errno.EFAULT, errno.EINVAL):
            # EFAULT: a failing disk, or a file that was cut; a read returns an error number, a page fault does not.
            # EINVAL: a kernel before 5.14; a plain read brings the pages into the page cache, where faults find them.
            self._read_through(offset, nbytes)
        elif number not in (0, errno.EAGAIN):
            raise refused("populating", self._file.path, OSError(number, ""), offset=offset)

    def touch(self, offset: int, nbytes: int) -> None:
        """Read pages that the disk has just written to memory once, into a buffer. Blocks, without the GIL.

        A virtual machine may get its memory from the host at the first access. There, the first read of a page that
        only a disk has written costs 0.3 to 1 microsecond and, on a host that is short of memory, up to 90. Idle
        processors can do this while the disk works. One thread at a time touches; all stop as soon as it takes longer
        than it saves. It reads the file and not the mapping: if the file was cut, an access to the mapping raises
        SIGBUS. It reads 256 KiB at a time, since a kernel without preemption does not leave a call: 30 MiB in one call
        stopped all threads for 0.5 s.
        """
        scratch, at, end = memoryview(bytearray(_TOUCH_BYTES)), offset, offset + nbytes
        with self._touching:
            while at < end and self._touches:
                started = perf_counter()
                try:
                    done = os.preadv(self._file.fd, [scratch[: min(_TOUCH_BYTES, end - at)]], at)
                except OSError:
                    return  # the read of its bytes raises it
                if not done:
                    return
                at += done
                self._patience_seconds += done * _SECONDS_A_BYTE - (perf_counter() - started)
                self._touches = self._patience_seconds > 0

    def _read_through(self, offset: int, nbytes: int) -> None:
        step = min(nbytes, 1 << 20)
        scratch = memory.allocate(step)
        for position in range(offset, offset + nbytes, step):
            self._file.read_into(position, [scratch.sub(0, min(step, offset + nbytes - position))])
