"""Files mapped into memory: privately, and populated by parallel calls or read at the first access.

Nothing is copied. `madvise(MADV_POPULATE_READ)` populates in one long call without the GIL; page faults would cost one
trap for each page. The pages are those of the page cache, so many processes share them.
"""

from __future__ import annotations

import errno

from stio.errors import HostMemoryError, StorageError, printable, without_path
from stio.runtime import memory
from stio.runtime.log import RareWarnings, log
from stio.runtime.memory import Region
from stio.storage.checks import refused
from stio.storage.local import LocalFile, shrunk

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
        self.file = file
        """The file."""
        self.path = file.path
        """Path of the file."""
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
        size = self.file.nbytes_now()
        if offset + nbytes > size:
            raise shrunk(self.file, size)
        number = errno.EINTR
        while number == errno.EINTR:
            number = memory.populate(self.region.sub(offset, nbytes))
        if number in (errno.EFAULT, errno.EINVAL):
            # EFAULT: a failing disk, or a file that was cut; a read returns an error number, a page fault does not.
            # EINVAL: a kernel before 5.14; a plain read brings the pages into the page cache, where faults find them.
            self._read_through(offset, nbytes)
        elif number not in (0, errno.EAGAIN):
            raise refused("populating", self.file.path, OSError(number, ""), offset=offset)

    def _read_through(self, offset: int, nbytes: int) -> None:
        step = min(nbytes, 1 << 20)
        scratch = memory.allocate(step)
        for position in range(offset, offset + nbytes, step):
            self.file.read_into(position, [scratch.sub(0, min(step, offset + nbytes - position))])
