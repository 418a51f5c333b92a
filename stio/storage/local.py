"""Local files by positional reads into given memory: buffered, or past the page cache where that pays.

A `LocalRoot` holds the checkpoint's directory open, so that index and shards come from one directory even if
its path is renamed meanwhile. A `LocalFile` fills regions with `preadv(2)` straight from the page cache, or
with O_DIRECT where the file is cold and the memory fits; what direct I/O refuses is read buffered.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
import threading
from array import array
from collections.abc import Sequence
from typing import Any, Self

from stio.errors import CheckpointNotFoundError, TruncatedError
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region, libc, quick_libc
from stio.storage.base import Identity
from stio.storage.checks import OPEN_FLAGS, identity_of, refused, require_inside, require_regular, stat_of

__all__ = ["HAVE_PREADV", "LocalFile", "LocalRoot", "is_local", "open_file"]

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_O_PATH = getattr(os, "O_PATH", 0)
_HAVE_PROC = os.path.exists("/proc/self/fd")
_IOV_MAX = 1024
_READ_MAX_BYTES = 1 << 30  # Linux moves at most 2 GiB - 4 KiB a call, macOS refuses vectors above 2 GiB - 1


def _positional_read() -> Any:
    # Where `off_t` has 32 bits (glibc on 32-bit machines), only the name with 64 takes large offsets.
    for name in ("preadv64", "preadv"):
        function = getattr(libc, name, None)
        if function is not None:
            function.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
            function.restype = ctypes.c_ssize_t
            return function
    return None


def _seek() -> Any:
    for name in ("lseek64", "lseek"):
        function = getattr(quick_libc, name, None)
        if function is not None:
            function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int]
            function.restype = ctypes.c_int64
            return function
    return None


_preadv: Any = _positional_read() if libc is not None else None
_lseek: Any = _seek() if quick_libc is not None else None

HAVE_PREADV = _preadv is not None
"""Whether this system reads at an offset into given memory; where not, `stio.storage.async_files` serves."""

# Magic numbers of statfs(2) for filesystems whose page cache is coherent and whose files do not change under a
# mapping by another machine's hand. What is not listed (NFS, SMB, FUSE, 9p, Lustre, Ceph) is copied.
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
_MOST_SAMPLES = 64


def is_local(fd: int) -> bool:
    """Return whether a file lies on a filesystem of this machine's own (Linux; elsewhere False)."""
    buffer = (ctypes.c_long * 32)()
    return (
        sys.platform == "linux"
        and libc.fstatfs(fd, ctypes.byref(buffer)) == 0
        and (buffer[0] & 0xFFFFFFFF) in _LOCAL_FILESYSTEMS
    )


def open_file(path: str) -> LocalFile:
    """Open one file that the caller named; it may be a link to anywhere.

    Raises:
        CheckpointNotFoundError: It does not exist.
        StorageError: It is no regular file, or the system refuses.
    """
    return _open(path, path, None)


def _open(name: str, path: str, dir_fd: int | None) -> LocalFile:
    fd = _descriptor(name, path, dir_fd, OPEN_FLAGS)
    try:
        return LocalFile(fd, path)
    except BaseException:
        os.close(fd)
        raise


def _descriptor(name: str, path: str, dir_fd: int | None, flags: int) -> int:
    try:
        return os.open(name, flags, dir_fd=dir_fd)
    except FileNotFoundError:
        raise CheckpointNotFoundError("there is no such file or directory", path=path) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise refused("opening", path, error) from error


class LocalRoot:
    """A checkpoint's directory, held open; the only way to a shard.

    Args:
        directory: The directory, trusted as the caller gave it (it may be a link).
        follow_symlinks: Let shards be links to anywhere. Otherwise a link may lead to a file inside the root, or
            into the `blobs/` of the same Hugging Face cache repository.

    Raises:
        CheckpointNotFoundError: The directory does not exist.
    """

    def __init__(self, directory: str | os.PathLike[str], *, follow_symlinks: bool = False) -> None:
        self.path = os.fspath(directory)
        self._follow_symlinks = follow_symlinks
        self._fd: int | None = None
        if os.open in os.supports_dir_fd:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                raise CheckpointNotFoundError("there is no such directory", path=self.path) from None
            except (OSError, ValueError) as error:
                raise refused("opening the directory", self.path, error) from error

    def open(self, name: str, *, trusted: bool = False) -> LocalFile:
        """Open one regular file of this directory for reading.

        Args:
            name: Path relative to the root, already checked by the codec where it came from an index.
            trusted: The caller of stio named this very file, so it may be a link to anywhere.

        Raises:
            CheckpointNotFoundError: It does not exist.
            UnsafePathError: It is a link that leads out of the root.
            StorageError: It is no regular file, or the system refuses.
        """
        path = os.path.join(self.path, name)
        if not (trusted or self._follow_symlinks):
            return self._open_inside(name, path)
        return _open(path if self._fd is None else name, path, self._fd)

    def _open_inside(self, name: str, path: str) -> LocalFile:
        """Open a file only once it is known where it is and what it is."""
        if self._fd is not None and _O_PATH and _HAVE_PROC:
            # Judge the file and not its name, which could be swapped in between; and before it is opened for
            # reading, since opening a device may act. An O_PATH descriptor finds it and touches nothing.
            found = _descriptor(name, path, self._fd, _O_PATH | os.O_CLOEXEC)
            try:
                link = f"/proc/self/fd/{found}"
                require_inside(os.readlink(link), os.readlink(f"/proc/self/fd/{self._fd}"), path)
                require_regular(os.fstat(found), path)
                return _open(link, path, None)
            finally:
                os.close(found)
        real = os.path.realpath(path)
        require_inside(real, os.path.realpath(self.path), path)
        return _open(path if self._fd is None else name, path, self._fd)

    def listdir(self) -> list[str]:
        """Return the names in the directory, sorted."""
        try:
            return sorted(os.listdir(self._fd if self._fd is not None else self.path))
        except OSError as error:
            raise refused("listing the directory", self.path, error) from error

    def close(self) -> None:
        """Give the directory's descriptor back. Files opened from it stay open. Idempotent."""
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
        found = stat_of(fd, path)
        require_regular(found, path)
        self._fd = fd
        self._path = path
        self._identity = identity_of(found)
        self._opening = threading.Lock()
        self._direct_fd: int | None = None
        self._is_local: bool | None = None
        self.direct_refused = False
        """True once direct I/O was tried and refused; reads are buffered from then on."""

    @property
    def path(self) -> str:
        """Name for messages."""
        return self._path

    @property
    def identity(self) -> Identity:
        """The state of the file when it was opened."""
        return self._identity

    @property
    def fd(self) -> int:
        """The descriptor, for mappings."""
        return self._fd

    @property
    def on_local_filesystem(self) -> bool:
        """Whether the page cache is all there is between this file and its disk."""
        if self._is_local is None:
            self._is_local = is_local(self._fd)
        return self._is_local

    def nbytes_now(self) -> int:
        """Return the size of the file at this moment; without dropping the GIL where no other machine is asked.

        Raises:
            StorageError: The system does not say.
        """
        if _lseek is None or not self.on_local_filesystem:
            return stat_of(self._fd, self._path).st_size
        size = int(_lseek(self._fd, 0, os.SEEK_END))  # nothing here goes by the descriptor's own position
        if size < 0:
            raise refused("looking at", self._path, OSError(ctypes.get_errno(), ""))
        return size

    def resident_fraction(self) -> float | None:
        """Return how much of the file the page cache holds, 0 to 1, by samples; None where the kernel does not say."""
        nbytes = self._identity.nbytes
        if sys.platform != "linux" or not nbytes:
            return None
        # Counting all of 1.7 GB in small folios takes the kernel 4 ms, more than the rest of the opening.
        step = max(_SAMPLE_BYTES, nbytes // _MOST_SAMPLES // PAGE_BYTES * PAGE_BYTES)
        span, counts = (ctypes.c_uint64 * 2)(), (ctypes.c_uint64 * 5)()
        looked = resident = 0
        for offset in range(0, nbytes, step):
            span[0], span[1] = offset, min(_SAMPLE_BYTES, nbytes - offset)
            if quick_libc.syscall(_SYS_CACHESTAT, self._fd, ctypes.byref(span), ctypes.byref(counts), 0) != 0:
                return None
            looked += -(-span[1] // PAGE_BYTES)
            resident += counts[0]
        return min(1.0, resident / looked)

    def use_direct(self) -> bool:
        """Read past the page cache from now on, where memory and offsets allow it; False if the system refuses."""
        with self._opening:  # two loads of one open checkpoint may both ask
            if self._direct_fd is None and not self.direct_refused:
                try:
                    if not _O_DIRECT:
                        raise OSError(errno.EINVAL, "no O_DIRECT on this system")
                    self._direct_fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC | _O_DIRECT)
                except OSError:
                    self.direct_refused = True
            return not self.direct_refused

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on."""
        done = 0
        if len(regions) == 1 and self._direct_fd is not None and not self.direct_refused:
            done = self._read_direct(self._direct_fd, offset, regions[0])
        self._read_buffered(offset, regions, done)

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if size or time of change differ from when the file was opened."""
        self._identity.require_same(identity_of(stat_of(self._fd, self._path)), self._path)

    def close(self) -> None:
        """Give the descriptors back. Idempotent; no read may be under way."""
        for fd in (self._fd, self._direct_fd):
            if fd is not None and fd >= 0:
                os.close(fd)
        self._fd, self._direct_fd = -1, None

    def _read_direct(self, fd: int, offset: int, region: Region) -> int:
        """Read whole pages past the page cache; return how many bytes are there, the rest is buffered's."""
        if offset % PAGE_BYTES or region.address % PAGE_BYTES:
            return 0
        done, whole = 0, region.nbytes // PAGE_BYTES * PAGE_BYTES
        while done < whole:
            count = _read_at(fd, [region.address + done, min(whole - done, _READ_MAX_BYTES)], offset + done)
            if count < 0 and ctypes.get_errno() == errno.EINTR:
                continue
            if count < 0:
                # EINVAL: the filesystem wants another alignment, or none at all. Any other error shows itself
                # again, with its own name, in the buffered read of the same bytes.
                self.direct_refused = True
            if count <= 0 or count % PAGE_BYTES:
                break
            done += count
        return done

    def _read_buffered(self, offset: int, regions: Sequence[Region], done: int) -> None:
        vectors = [
            number
            for region in regions
            for at in range(done, region.nbytes, _READ_MAX_BYTES)  # `done` is 0 unless there is one region
            for number in (region.address + at, min(_READ_MAX_BYTES, region.nbytes - at))
        ]
        position = offset + done
        first = 0
        while first < len(vectors):
            window = vectors[first : first + 2 * _IOV_MAX]
            if sum(window[1::2]) > _READ_MAX_BYTES:
                window = _first_vectors(window)
            count = _read_at(self._fd, window, position)
            if count < 0:
                number = ctypes.get_errno()
                if number == errno.EINTR:
                    continue
                raise refused("reading", self._path, OSError(number, ""), offset=position)
            if count == 0:
                raise TruncatedError(
                    "the file ends before its tensors do; it was cut short",
                    path=self._path,
                    offset=position,
                    expected=f"{sum(vectors[first + 1 :: 2]):,} more bytes",
                    found="the end of the file",
                )
            position += count
            while count:  # advance through the vectors that this call filled, the last one perhaps in part
                step = min(count, vectors[first + 1])
                vectors[first] += step
                vectors[first + 1] -= step
                count -= step
                first += 0 if vectors[first + 1] else 2


def _first_vectors(vectors: list[int]) -> list[int]:
    """Return as many vectors from the front as one call takes; each one alone is small enough."""
    total = 0
    for k in range(0, len(vectors), 2):
        total += vectors[k + 1]
        if total > _READ_MAX_BYTES:
            return vectors[:k]
    return vectors


def _read_at(fd: int, vectors: list[int], offset: int) -> int:
    packed: Any = array("Q", vectors)
    return int(_preadv(fd, packed.buffer_info()[0], len(vectors) // 2, offset))
