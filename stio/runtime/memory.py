"""Host memory by address: regions, page mappings, and the few libc calls that the packages above share.

A `Region` says where bytes are, and holds a reference to the object that owns them. Mappings are made through ctypes
and not by the `mmap` module, for three measured reasons. That module duplicates the file descriptor for the lifetime of
the mapping. Its anonymous maps are shared memory without huge pages (a copy into fresh 1.7 GB takes 740-930 ms against
88-123). Its `madvise` holds the GIL while the kernel reads from the disk.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import os
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any

from stio.runtime.limits import HUGE_PAGE_BYTES, PAGE_BYTES

HOLD_BYTES = 1 << 20
"""A copy shorter than this keeps the GIL. The copy takes 80 microseconds at most; to acquire the GIL again takes up to
5 ms. Two threads that copy tensors of 512 KiB and keep the GIL reach 6.5 GB/s, and 4.1 beside a busy Python thread. If
they release it: 9.4 and 0.2."""

_UNMAP_HERE_BYTES = 128 << 20
"""Larger mappings are unmapped by a thread of their own."""

_PROT_READ_WRITE = 3
_MAP_PRIVATE = 0x02
_MAP_ANONYMOUS = 0x20 if sys.platform == "linux" else 0x1000
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MAP_FAILED = ctypes.c_void_p(-1).value

HAVE_MMAP = os.name == "posix"
"""False where no libc can map pages (Windows): all data are copied there."""


def _declare(library: Any) -> Any:
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


# `libc` releases the GIL for the length of a call, `quick_libc` keeps it. Beside a busy Python thread it costs up to
# one switch interval (5 ms) to acquire the GIL again: more than a call that never waits for a disk.
libc: Any = _declare(ctypes.CDLL(None, use_errno=True)) if HAVE_MMAP else None
quick_libc: Any = _declare(ctypes.PyDLL(None, use_errno=True)) if HAVE_MMAP else None


def _memmove(library: Any) -> Any:
    function = library["memmove"]  # by subscript: a new function object, so its types are not shared
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    return function


move: Any = _memmove(libc) if HAVE_MMAP else ctypes.memmove
"""`memmove(target, source, nbytes)`; releases the GIL."""
move_holding: Any = _memmove(quick_libc) if HAVE_MMAP else ctypes.memmove
"""The same function; keeps the GIL. For less than `HOLD_BYTES`."""


@dataclass(frozen=True, slots=True)
class Region:
    """A range of memory, and the object that keeps it allocated."""

    address: int
    """Address of the first byte."""
    nbytes: int
    """Length in bytes."""
    owner: Any = None
    """Object whose lifetime is that of the memory. On the host it has the buffer protocol, and its buffer begins at or
    before `address`."""
    device: str = "cpu"
    """Device of the memory, as torch names it."""

    def sub(self, start: int, nbytes: int) -> Region:
        """Return the part `[start, start + nbytes)`."""
        if start < 0 or nbytes < 0 or start + nbytes > self.nbytes:
            raise ValueError(f"[{start}, {start + nbytes}) is outside a region of {self.nbytes} bytes")
        return Region(self.address + start, nbytes, self.owner, self.device)

    def write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        """Copy `data` to `start` (host regions only)."""
        target = self.sub(start, len(data))
        ctypes.memmove(target.address, bytes(data), len(data))

    def tobytes(self) -> bytes:
        """Copy the bytes out (host regions only)."""
        return ctypes.string_at(self.address, self.nbytes)

    def view(self) -> memoryview:
        """Return the bytes without a copy (host regions only). The view does not keep the memory allocated."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address))


class _Unmap:
    """Unmaps pages when the last reference to them is released."""

    __slots__ = ("_address", "_munmap", "_nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes
        # Stored here: at interpreter exit the globals of this module may be cleared before this object.
        self._munmap = (quick_libc if nbytes <= 2 * HUGE_PAGE_BYTES else libc).munmap

    def __del__(self) -> None:
        if self._nbytes > _UNMAP_HERE_BYTES:
            # To unmap 1.7 GB of small pages takes 50 to 100 ms. The thread that releases the last tensor of a model may
            # run an event loop, and must not block for so long.
            try:
                _thread.start_new_thread(self._munmap, (self._address, self._nbytes))
                return
            except RuntimeError:  # no further threads, or the interpreter is at its end
                pass
        self._munmap(self._address, self._nbytes)


def _map(nbytes: int, flags: int, fd: int) -> tuple[int, _Unmap]:
    address = quick_libc.mmap(None, nbytes, _PROT_READ_WRITE, flags, fd, 0)
    if address in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        if number == errno.ENOMEM:
            raise MemoryError(f"cannot map {nbytes:,} bytes")
        raise OSError(number, f"mmap of {nbytes:,} bytes failed: {os.strerror(number)}")
    return address, _Unmap(address, nbytes)


def _region(address: int, nbytes: int, unmap: _Unmap) -> Region:
    buffer: Any = (ctypes.c_char * nbytes).from_address(address)
    buffer.unmap = unmap  # the buffer owns the pages, arrays and tensors own the buffer
    return Region(address, nbytes, buffer)


def allocate(nbytes: int) -> Region:
    """Return new private memory, aligned to a huge page if it is as large as one.

    Huge pages are requested for the part that fills whole ones. The rest uses small pages, so a region costs no more
    than its own bytes.

    Raises:
        MemoryError: The address space or the overcommit limit is exhausted.
    """
    nbytes = max(nbytes, 1)
    if not HAVE_MMAP:
        buffer = ctypes.create_string_buffer(nbytes)
        return Region(ctypes.addressof(buffer), nbytes, buffer)
    # Only memory that can hold a whole huge page is aligned to one.
    slack = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 0
    address, unmap = _map(nbytes + slack, _MAP_PRIVATE | _MAP_ANONYMOUS, -1)
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if slack else address
    whole = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole and sys.platform == "linux":
        quick_libc.madvise(start, whole, _MADV_HUGEPAGE)  # only advice: a refusal costs speed
    return _region(start, nbytes, unmap)


def copy(target: Region, source: Region) -> None:
    """Copy a whole region to the start of another one (host regions only)."""
    to = target.sub(0, source.nbytes)
    (move_holding if source.nbytes < HOLD_BYTES else move)(to.address, source.address, source.nbytes)


def map_file(fd: int, nbytes: int, *, huge_pages: bool) -> Region:
    """Map the first `nbytes` of a file privately; the mapping stays valid after the descriptor is closed.

    Args:
        fd: An open file.
        nbytes: Length, at most that of the file. An access to a page past the end raises SIGBUS.
        huge_pages: Request huge pages. For a file mapping the kernel then also reads ahead in pieces of 2 MiB, whatever
            the setting of the device is. To populate a cold 1.7 GB file with `read_ahead_kb=128` reached 1.7-2.0 GB/s
            instead of 1.0-1.4 (O_DIRECT: 1.5-1.8 there), and the pages come as large folios.
    """
    address, unmap = _map(nbytes, _MAP_PRIVATE | _MAP_NORESERVE, fd)
    if huge_pages and sys.platform == "linux":
        quick_libc.madvise(address, nbytes, _MADV_HUGEPAGE)
    return _region(address, nbytes, unmap)


def populate(region: Region) -> int:
    """Load the pages of a mapping into memory for reading; releases the GIL.

    Returns:
        0, or an errno: EFAULT where an access would raise SIGBUS, EINVAL on kernels before 5.14.
    """
    start = region.address // PAGE_BYTES * PAGE_BYTES
    length = region.address + region.nbytes - start
    if length == 0 or libc.madvise(start, length, _MADV_POPULATE_READ) == 0:
        return 0
    return ctypes.get_errno()


def fits(nbytes: int) -> bool:
    """Return whether the kernel and the cgroup have so much memory left for this process.

    The cheapest sources are read first.
    """
    if sys.platform != "linux":
        return True
    limit = _cgroup_limit_bytes()
    if limit < sys.maxsize and nbytes > limit - _cgroup_used_bytes():
        return False
    if nbytes < os.sysconf("SC_AVPHYS_PAGES") * PAGE_BYTES:
        return True
    for line in _text("/proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return nbytes < int(line.split()[1]) * 1024
    return True


_CGROUP1 = "/sys/fs/cgroup/memory/memory."


@cache
def _cgroup_limit_bytes() -> int:
    """Return the memory limit of the cgroup, read once in a process; `sys.maxsize` if there is none."""
    limit = _number("/sys/fs/cgroup/memory.max", _CGROUP1 + "limit_in_bytes")
    return limit if 0 < limit < os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES else sys.maxsize


def _cgroup_used_bytes() -> int:
    """Return the memory use of the cgroup without the page cache, which the kernel can reclaim."""
    used = _number("/sys/fs/cgroup/memory.current", _CGROUP1 + "usage_in_bytes")
    for path, key in (("/sys/fs/cgroup/memory.stat", "file "), (_CGROUP1 + "stat", "total_cache ")):
        for line in _text(path).splitlines():
            if line.startswith(key):
                return max(0, used - int(line.split()[1]))
    return used


def _number(*paths: str) -> int:
    for path in paths:
        text = _text(path).strip()
        if text.isdigit():
            return int(text)
    return 0


def _text(path: str) -> str:
    """Read a file of /proc or /sys and keep the GIL: such files come from memory and never wait for a disk."""
    fd = quick_libc.open(path.encode(), os.O_RDONLY | os.O_CLOEXEC)
    if fd < 0:
        return ""
    buffer = ctypes.create_string_buffer(16384)
    count = quick_libc.read(fd, buffer, ctypes.c_size_t(len(buffer)))
    quick_libc.close(fd)
    return buffer.raw[: max(0, count)].decode()
