"""Local files: read at an offset into given memory, or mapped.

A `LocalRoot` holds the checkpoint's directory open, so that index and shards come from one directory even if its path
is renamed in between. A `LocalFile` fills regions with `preadv(2)`, through the page cache. The engine reads past it if
the file is cold.

A `MappedFile` is mapped privately, and populated by parallel calls or read at the first access. Nothing is copied.
`madvise(MADV_POPULATE_READ)` populates in one long call without the GIL; page faults would cost one trap for each page.
The pages are those of the page cache, so many processes share them.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import sys
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property
from struct import unpack_from
from typing import Any, Self

from stio import native
from stio.errors import HostMemoryError, StioError, StorageError, TruncatedError, printable, without_path
from stio.process import new_lock
from stio.runtime import memory
from stio.runtime.memory import SYSTEM_PAGE_BYTES, Region, libc, quick_libc
from stio.storage.base import Identity, Source
from stio.storage.checks import (
    OPEN_FLAGS,
    UNSUPPORTED,
    cut_short,
    identity_of,
    raise_opening_error,
    refused,
    require_inside,
    require_regular,
    stat_of,
)
from stio.text import RareWarnings, log

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_PATH = getattr(os, "O_PATH", 0)
_HAVE_PROC = os.path.exists("/proc/self/fd")
_RWF_NOWAIT = 8  # fails with EAGAIN where the read would wait for a disk
_SHORT_READ_BYTES = 256 << 10
_SHORT_POPULATE_BYTES = 1 << 20
_READ_MAX_BYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call, macOS refuses 2 GiB


def function_of(library: Any, name: str, restype: Any, *argtypes: Any) -> Any:
    """Return a function of the C library, None where it has none of this name."""
    function = getattr(library, name, None)
    if function is not None:
        function.restype, function.argtypes = restype, argtypes
    return function


_INT, _OFFSET = ctypes.c_int, ctypes.c_int64
_preadv: Any = function_of(libc, "preadv", ctypes.c_ssize_t, _INT, ctypes.c_void_p, _INT, _OFFSET)
_preadv2: Any = function_of(quick_libc, "preadv64v2", ctypes.c_ssize_t, _INT, ctypes.c_void_p, _INT, _OFFSET, _INT)
_statx: Any = function_of(quick_libc, "statx", _INT, _INT, ctypes.c_char_p, _INT, ctypes.c_uint, ctypes.c_void_p)
_lseek: Any = function_of(quick_libc, "lseek", _OFFSET, _INT, _OFFSET, _INT)

HAVE_PREADV = _preadv is not None
"""Whether this system reads at an offset into given memory; if not, `stio.storage.async_files` is used."""

# Magic numbers of statfs(2) for filesystems whose page cache is coherent and whose files no other machine changes under
# a mapping. Files on filesystems that are not listed (NFS, SMB, FUSE, 9p, Lustre, Ceph) are copied.
_LOCAL_FILESYSTEMS = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x2FC12FC1: "zfs",
    0xF2F52010: "f2fs",
    0xCA451A4E: "bcachefs",
    0x73717368: "squashfs",
    0xE0F5E1E2: "erofs",
}
_SYS_CACHESTAT = 451  # Linux 6.5
_SAMPLE_BYTES = 256 << 10
_MAX_SAMPLES = 64


# Calls about an open file of these filesystems are answered out of memory, so they keep the GIL: 4 shards have 8 of
# them, and beside a busy Python thread each that releases it costs 5 ms (see `quick_libc`). Others that have a block
# device (FUSE, Lustre, OCFS2) ask a daemon or another machine. A virus scanner that is asked at each read is not known.
_ANSWER_AT_ONCE = frozenset({"ext4", "xfs", "f2fs", "bcachefs", "squashfs", "erofs"})
_EMPTY_PATH, _BASIC_STATS, _STATX_BYTES = 0x1000, 0x7FF, 256  # of statx(2)
_answer_at_once: dict[int, bool] = {}  # by device


def answers_at_once(fd: int, state: os.stat_result) -> bool:
    """Return whether calls about an open file are answered out of memory."""
    if sys.platform != "linux" or not os.major(state.st_dev):  # no device: such numbers are used again
        return False
    known = _answer_at_once.get(state.st_dev)
    if known is None:
        known = _answer_at_once[state.st_dev] = _filesystem(fd) in _ANSWER_AT_ONCE
    return known


def _identity_at_once(fd: int) -> tuple[Identity, int] | None:
    """Return the identity and the number of links of a file for which `answers_at_once`; None: the system refuses."""
    found = ctypes.create_string_buffer(_STATX_BYTES)
    if _statx is None or _statx(fd, b"", _EMPTY_PATH, _BASIC_STATS, found) != 0:
        return None
    (links,), (inode, nbytes) = unpack_from("=I", found, 16), unpack_from("=QQ", found, 32)
    changed_s, changed_ns, modified_s, modified_ns = unpack_from("=qI4xqI", found, 96)
    device = os.makedev(*unpack_from("=II", found, 136))
    return Identity(device, inode, nbytes, modified_s * 10**9 + modified_ns, changed_s * 10**9 + changed_ns), links


def is_local(fd: int) -> bool:
    """Return whether a file is on a local filesystem of this machine (Linux; elsewhere False)."""
    return _filesystem(fd) is not None


def _filesystem(fd: int) -> str | None:
    """Return the name of the filesystem of a file, None if it is not one of `_LOCAL_FILESYSTEMS`."""
    buffer = (ctypes.c_long * 32)()
    if sys.platform != "linux" or libc.fstatfs(fd, ctypes.byref(buffer)) != 0:
        return None
    return _LOCAL_FILESYSTEMS.get(buffer[0] & 0xFFFFFFFF)


def open_at(name: str, path: str, dir_fd: int | None) -> LocalFile:
    """Open one file of a directory.

    Args:
        name: Name of the file, relative to the directory.
        path: Path of the file, for messages.
        dir_fd: Descriptor of the directory. None: `name` is a path.

    Raises:
        CheckpointNotFoundError: It does not exist.
        StorageError: It is no regular file, or the operating system reported an error.
    """
    try:
        fd = os.open(name, OPEN_FLAGS, dir_fd=dir_fd)
    except (OSError, ValueError) as error:
        raise_opening_error(error, path)
    try:
        return LocalFile(fd, path)
    except BaseException:
        os.close(fd)
        raise


class LocalRoot:
    """A checkpoint's directory, held open; a `Root`. All of its files are opened through it.

    Args:
        directory: The directory. The caller chose it, so it may be a link.
        follow_symlinks: Whether a file may be a link to any place. If not, a link may lead to a file inside the root,
            or into the `blobs/` of the same Hugging Face cache repository.
        open_at: Opens a file; see the function of this name.

    Raises:
        CheckpointNotFoundError: The directory does not exist.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        follow_symlinks: bool = False,
        open_at: Callable[[str, str, int | None], Source] = open_at,
    ) -> None:
        self.path = os.fspath(directory)
        self._follow_symlinks = follow_symlinks
        self._open_at = open_at
        self._fd: int | None = None
        if os.open in os.supports_dir_fd:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except (OSError, ValueError) as error:
                raise_opening_error(error, self.path, "opening the directory", "directory")

    def open(self, name: str, *, trusted: bool = False) -> Source:
        """Open one regular file of this directory for reading.

        Args:
            name: Path relative to the root; one that comes from an index has been checked.
            trusted: The caller of stio chose this file by its path, so it may be a link to any place.

        Raises:
            CheckpointNotFoundError: It does not exist.
            UnsafePathError: It is a link that leads out of the root.
            StorageError: It is no regular file, or the operating system reported an error.
        """
        path = os.path.join(self.path, name)
        if not (trusted or self._follow_symlinks):
            if self._fd is not None and _O_PATH and _HAVE_PROC:
                return self._open_inside(name, path, self._fd)
            require_inside(os.path.realpath(path), os.path.realpath(self.path), path)
        return self._open_at(path if self._fd is None else name, path, self._fd)

    def _open_inside(self, name: str, path: str, dir_fd: int) -> Source:
        """Check the place and the kind of a file before it is opened for reading."""
        # The file is checked, not its name, which another program could give to another file in between. And it is
        # checked before it is opened for reading: that may have an effect on a device, O_PATH has none.
        # A name without "/" that is no link needs no comparison of paths.
        for follows in (False, True) if os.sep not in name else (True,):
            try:
                flags = _O_PATH | os.O_CLOEXEC | (0 if follows else os.O_NOFOLLOW)
                found = os.open(name, flags, dir_fd=dir_fd)
            except (OSError, ValueError) as error:
                raise_opening_error(error, path)
            try:
                link, state = f"/proc/self/fd/{found}", os.fstat(found)
                if not follows and stat.S_ISLNK(state.st_mode):
                    continue
                if follows:
                    require_inside(os.readlink(link), os.readlink(f"/proc/self/fd/{dir_fd}"), path)
                require_regular(state, path)
                return self._open_at(link, path, None)
            finally:
                os.close(found)
        raise AssertionError

    def listdir(self) -> list[str]:
        """Return the names in the directory, sorted."""
        try:
            return sorted(os.listdir(self._fd if self._fd is not None else self.path))
        except (OSError, ValueError) as error:
            raise_opening_error(error, self.path, "listing the directory", "directory")

    def close(self) -> None:
        """Close the directory. Files opened from it stay open. Idempotent."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LocalFile:
    """One open regular file; a `Source`.

    Args:
        fd: Its descriptor, owned from here on (only if the constructor returns).
        path: Name for messages.
    """

    def __init__(self, fd: int, path: str) -> None:
        status = stat_of(fd, path)
        require_regular(status, path)
        self.fd = fd
        """The descriptor, for mappings; -1 once it is closed."""
        self.path = path
        """Name for messages."""
        self.identity = self._state = identity_of(status)
        """The state of the file when it was opened."""
        self._answers_at_once = answers_at_once(fd, status)
        self._opening = new_lock()
        self.direct_fd = -1
        """A descriptor for reads of the engine past the page cache; -1: they go through it."""

    @classmethod
    def open(cls, path: str) -> LocalFile:
        """Open one file that the caller named; it may be a link to any place.

        Raises:
            CheckpointNotFoundError: It does not exist.
            StorageError: It is no regular file, or the operating system reported an error.
        """
        return open_at(path, path, None)

    @cached_property
    def on_local_filesystem(self) -> bool:
        """Whether only the page cache is between this file and its disk: no network, no other machine."""
        return _filesystem(self.fd) is not None

    def nbytes_now(self) -> int:
        """Return the size of the file at this moment; keeps the GIL on a local filesystem, where the call is short.

        Raises:
            StorageError: The operating system reported an error.
        """
        if _lseek is None or not self.on_local_filesystem:
            return stat_of(self.fd, self.path).st_size
        size = int(_lseek(self.fd, 0, os.SEEK_END))  # no read here uses the position of the descriptor
        if size < 0:
            raise refused("reading the size", self.path, OSError(ctypes.get_errno(), ""))
        return size

    def resident_fraction(self) -> float | None:
        """Return the fraction of the file in the page cache, by samples; None if the kernel cannot report it."""
        nbytes = self.identity.nbytes
        if sys.platform != "linux" or not nbytes:
            return None
        # To count all pages of 1.7 GB in small folios takes the kernel 4 ms, more than the rest of the opening.
        sample = step = nbytes
        if nbytes > _SAMPLE_BYTES * _MAX_SAMPLES:
            sample, step = _SAMPLE_BYTES, nbytes // _MAX_SAMPLES // SYSTEM_PAGE_BYTES * SYSTEM_PAGE_BYTES
        span, counts = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
        looked = resident = 0
        for offset in range(0, nbytes, step):
            span[0], span[1] = offset, min(sample, nbytes - offset)
            if quick_libc.syscall(_SYS_CACHESTAT, self.fd, ctypes.byref(span), ctypes.byref(counts), 0) != 0:
                return None
            looked += -(-span[1] // SYSTEM_PAGE_BYTES)
            resident += counts[0]
        return min(1.0, resident / looked)

    def map(self, *, lazy: bool = False) -> MappedFile | None:
        """Return a mapping; None, with a line in the log, where the system refuses: the caller reads the file then.

        Some filesystems map no files (ENODEV), and a limit may leave too little address space for a file of which few
        tensors are needed.
        """
        try:
            return MappedFile(self, lazy=lazy)
        except (HostMemoryError, StorageError) as error:
            reason = without_path(error)
            log(
                _refusals.level(), "%s is read into memory, since it cannot be mapped: %s", printable(self.path), reason
            )
            return None

    def use_direct(self) -> None:
        """Let the engine read past the page cache from now on, where the filesystem supports that."""
        with self._opening:  # two loads of one open checkpoint may both call this
            if _O_DIRECT and self.direct_fd < 0:
                with suppress(OSError):
                    self.direct_fd = os.open(f"/proc/self/fd/{self.fd}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)

    def error(self, failure: native.Failure) -> StioError:
        """Return the error of a read by the engine, to be raised."""
        if failure.kind == native.TRUNCATED:
            return cut_short(self.path, failure.offset, failure.nbytes)
        if failure.kind == native.SHRUNK:
            return shrunk(self, failure.offset)
        doing = "populating" if failure.populates else "reading"
        return refused(doing, self.path, OSError(failure.code, ""), offset=failure.offset)

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on; see `Source.read_into`."""
        begin = offset
        for region in regions:
            done = 0
            while done < region.nbytes:
                count = _read_at(self.fd, region.address + done, min(region.nbytes - done, _READ_MAX_BYTES), offset)
                if count == 0:
                    end = begin + sum(region.nbytes for region in regions)
                    raise cut_short(self.path, offset, end - offset)
                if count > 0:
                    done += count
                    offset += count
                elif (number := ctypes.get_errno()) != errno.EINTR:
                    raise refused("reading", self.path, OSError(number, ""), offset=offset)

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if size or time of change differ from when the file was opened."""
        quick = _identity_at_once(self.fd) if self._answers_at_once else None
        self._state.require_same(quick[0] if quick else identity_of(stat_of(self.fd, self.path)), self.path)

    def close(self) -> None:
        """Close the descriptors. Idempotent; no read may be under way."""
        # Reset first: after an interruption a second call must not close a descriptor that another file has by now.
        fds, self.fd, self.direct_fd = (self.fd, self.direct_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                # The last close of a file without a name frees its blocks, which takes long.
                quick = _identity_at_once(fd) if self._answers_at_once else None
                (quick_libc if quick is not None and quick[1] > 0 else os).close(fd)


def shrunk(file: LocalFile, nbytes_now: int) -> TruncatedError:
    """Return the error to raise where a file has become shorter since it was opened."""
    return TruncatedError(
        "the file shrank while it was being loaded",
        path=file.path,
        offset=nbytes_now,
        expected=f"{file.identity.nbytes:,} bytes",
        found=f"{nbytes_now:,} bytes",
    )


def _read_at(fd: int, address: int, nbytes: int, offset: int) -> int:
    vector = array("Q", (address, nbytes))
    where = vector.buffer_info()[0]
    if _preadv2 is not None and nbytes <= _SHORT_READ_BYTES:
        # Out of the page cache, with the GIL; see `quick_libc`. Any error, and the file's end, comes again below.
        count = int(_preadv2(fd, where, 1, offset, _RWF_NOWAIT))
        if count > 0:
            return count
    return int(_preadv(fd, where, 1, offset))


_refusals = RareWarnings()


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
            self.region: Region = memory.map_file(file.fd, file.identity.nbytes, huge_pages=not lazy)
        except HostMemoryError as error:
            error.path = file.path
            raise
        except OSError as error:
            raise refused("mapping", file.path, error) from error

    def populate(self, offset: int, nbytes: int) -> None:
        """Read `[offset, offset + nbytes)` into the page cache and map it. Blocks, without the GIL unless it is short.

        Raises:
            TruncatedError: The file is shorter than it was when it was opened.
            StorageError: The disk failed to read.
        """
        # An access past the end is SIGBUS, which cannot be caught: compare the size shortly before.
        size = self.file.nbytes_now()
        if offset + nbytes > size:
            raise shrunk(self.file, size)
        # To map pages out of the page cache takes less than to acquire the GIL again; see `quick_libc`.
        is_short = size <= _SHORT_POPULATE_BYTES and self.file.resident_fraction() == 1
        number = errno.EINTR
        while number == errno.EINTR:
            number = memory.populate(self.region.sub(offset, nbytes), keeps_gil=is_short)
        if number == errno.EFAULT or number in UNSUPPORTED:
            # EFAULT: a failing disk, or a file that was cut; a read returns an error number, a page fault does not.
            # EINVAL: a kernel before 5.14; a plain read brings the pages into the page cache, where faults find them.
            # EPERM, ENOSYS: a sandbox.
            self._read_through(offset, nbytes)
        elif number not in (0, errno.EAGAIN):
            raise refused("populating", self.file.path, OSError(number, ""), offset=offset)

    def _read_through(self, offset: int, nbytes: int) -> None:
        step = min(nbytes, 1 << 20)
        scratch = memory.allocate(step)
        for position in range(offset, offset + nbytes, step):
            self.file.read_into(position, [scratch.sub(0, min(step, offset + nbytes - position))])
