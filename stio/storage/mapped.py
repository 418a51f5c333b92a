"""A file as memory: mapped privately, populated in parallel or left to be read at the first touch.

Nothing is copied. Populating through `madvise(MADV_POPULATE_READ)` makes one long call without the GIL where
faults would make one trap a page; the pages are the page cache's own, so many processes share them.
"""

from __future__ import annotations

import errno
import os
import threading
from time import perf_counter

from stio.errors import StorageError, TruncatedError
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.storage.local import LocalFile

__all__ = ["MappedFile"]

_TOUCH_BYTES = 256 << 10
_PATIENCE_SECONDS = 0.02
_SECONDS_A_BYTE = 1 / (1 << 30)
"""A touch of 256 KiB takes 30 to 100 microseconds. At 240 and more on the average, others wait for the processor or the
GIL (one wait for that takes 5 ms)."""


class MappedFile:
    """A private, writable mapping of a whole file. Writing to it copies the page and leaves the file alone.

    Args:
        file: The open file. The mapping needs it for `populate`'s checks only and outlives it.
        lazy: Nothing will be populated: ask for no read-ahead in huge pages, accesses may be sparse.

    Raises:
        StorageError: The system refuses to map.
    """

    def __init__(self, file: LocalFile, *, lazy: bool = False) -> None:
        self._file = file
        self._touching = threading.Lock()
        self._touches = hasattr(os, "preadv")
        self._patience_seconds = _PATIENCE_SECONDS
        try:
            self.region: Region = memory.map_file(file.fd, file.identity.nbytes, huge_pages=not lazy)
        except OSError as error:
            raise StorageError(f"mapping failed: {error.strerror}", path=file.path, errno=error.errno) from error

    def populate(self, offset: int, nbytes: int) -> None:
        """Read `[offset, offset + nbytes)` into the page cache and map it. Blocks, without the GIL.

        Raises:
            TruncatedError: The file is shorter than it was when it was opened.
            StorageError: The device failed to read.
        """
        # A touch past the end is SIGBUS, which no one can catch: look at the size just before.
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
        if number == errno.EFAULT:
            # Tell a failing device from a file that was cut: a read names its error where a fault does not.
            self._read_through(offset, nbytes)
        elif number == errno.EINVAL:
            # A kernel before 5.14: a plain read brings the pages into the cache, faults find them there.
            self._read_through(offset, nbytes)
        elif number not in (0, errno.EAGAIN):
            raise StorageError(
                f"populating failed: {os.strerror(number)}", path=self._file.path, errno=number, offset=offset
            )

    def touch(self, offset: int, nbytes: int) -> None:
        """Have the processor read what the device has just written, into a scratch. Blocks, without the GIL.

        On a virtual machine whose host gives memory when it is touched, a page that only a device has touched costs
        its first reader 0.3 to 1 microsecond and, on a host that is short of memory, up to 90. A disk leaves the
        processors time for that, if nobody else wants them: one thread touches at a time, and none any more once it
        takes longer than it saves. By a read and not over the mapping, where a file that was cut meanwhile would be
        SIGBUS. By short reads: a kernel that does not preempt itself stays in one, and 30 MiB held up all for 0.5 s.
        """
        scratch, at, end = memoryview(bytearray(_TOUCH_BYTES)), offset, offset + nbytes
        with self._touching:
            while at < end and self._touches:
                started = perf_counter()
                try:
                    done = os.preadv(self._file.fd, [scratch[: min(_TOUCH_BYTES, end - at)]], at)
                except OSError:
                    return  # whoever reads it for its bytes hears of it
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
