"""Host memory by address: regions, page mappings and the few libc calls that the rooms above share.

A `Region` says where bytes are and who keeps them there. Mappings are made through ctypes and not by the
`mmap` module for three measured reasons: that module duplicates the file descriptor for as long as a tensor
lives, its anonymous maps are shared memory without huge pages (a fresh 1.7 GB copy 740-930 ms against 88-123),
and its `madvise` holds the GIL while the kernel reads from the disk.
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

__all__ = ["HOLD_BYTES", "Region", "allocate", "copy", "fits", "map_file", "move", "move_holding", "populate"]


HOLD_BYTES = 1 << 20
"""A copy shorter than this keeps the GIL: it takes 80 microseconds at most, getting the GIL back up to 5 ms. Two
threads bring tensors of 512 KiB at 6.5 GB/s so, 4.1 beside a busy Python thread; releasing it, 9.4 and 0.2."""

_UNMAP_HERE_BYTES = 128 << 20

_PROT_READ_WRITE = 3
_MAP_PRIVATE = 0x02
_MAP_ANONYMOUS = 0x20 if sys.platform == "linux" else 0x1000
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MAP_FAILED = ctypes.c_void_p(-1).value

HAVE_MMAP = os.name == "posix"
"""False where there is no libc to map pages with (Windows): everything is copied there."""


def _declare(library: Any) -> Any:
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


# `libc` drops the GIL for the length of a call, `quick_libc` keeps it: getting it back costs up to a switch
# interval (5 ms) beside a busy Python thread, more than a call that never waits for a disk.
libc: Any = _declare(ctypes.CDLL(None, use_errno=True)) if HAVE_MMAP else None
quick_libc: Any = _declare(ctypes.PyDLL(None, use_errno=True)) if HAVE_MMAP else None


def _memmove(library: Any) -> Any:
    function = library["memmove"]  # by subscript: an object of our own, whose types nobody else sets
    function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None
    return function


move: Any = _memmove(libc) if HAVE_MMAP else ctypes.memmove
"""`memmove(target, source, nbytes)` without the GIL."""
move_holding: Any = _memmove(quick_libc) if HAVE_MMAP else ctypes.memmove
"""The same, keeping the GIL: for less than `HOLD_BYTES`."""


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of memory that somebody keeps alive."""

    address: int
    """First byte."""
    nbytes: int
    """Length in bytes."""
    owner: Any = None
    """Keeps the memory; on the host it has the buffer protocol and begins at or before `address`."""
    device: str = "cpu"
    """Where the memory is, as torch names it."""

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
        """Return the bytes without a copy (host regions only). The view does not keep the memory."""
        return memoryview((ctypes.c_ubyte * self.nbytes).from_address(self.address))


class _Unmap:
    """Unmaps pages when nothing refers to them any more."""

    __slots__ = ("_address", "_munmap", "_nbytes")

    def __init__(self, address: int, nbytes: int) -> None:
        self._address, self._nbytes = address, nbytes
        # Kept: at interpreter exit the module's globals may be gone before us.
        self._munmap = (quick_libc if nbytes <= 2 * HUGE_PAGE_BYTES else libc).munmap

    def __del__(self) -> None:
        if self._nbytes > _UNMAP_HERE_BYTES:
            # Unmapping 1.7 GB of small pages takes 50 to 100 ms. Whoever drops the last tensor of a model, an event
            # loop perhaps, should not stand still for that.
            try:
                _thread.start_new_thread(self._munmap, (self._address, self._nbytes))
                return
            except RuntimeError:  # no more threads, or the interpreter is going away
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
    buffer.unmap = unmap  # the buffer owns the pages; arrays and tensors own the buffer
    return Region(address, nbytes, buffer)


def allocate(nbytes: int) -> Region:
    """Return fresh private memory that begins on a huge page.

    Whole huge pages inside it are asked for as such; the rest stays in small ones, so that the region costs no
    more than its own bytes.

    Raises:
        MemoryError: The address space or the overcommit limit is exhausted.
    """
    nbytes = max(nbytes, 1)
    if not HAVE_MMAP:
        buffer = ctypes.create_string_buffer(nbytes)
        return Region(ctypes.addressof(buffer), nbytes, buffer)
    # Only what crosses a huge page's border is worth aligning to one.
    slack = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 0
    address, unmap = _map(nbytes + slack, _MAP_PRIVATE | _MAP_ANONYMOUS, -1)
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if slack else address
    whole = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole and sys.platform == "linux":
        quick_libc.madvise(start, whole, _MADV_HUGEPAGE)  # advice: a refusal costs speed, nothing else
    return _region(start, nbytes, unmap)


def copy(target: Region, source: Region) -> None:
    """Copy all of a region to the begin of another one (host regions only)."""
    to = target.sub(0, source.nbytes)
    (move_holding if source.nbytes < HOLD_BYTES else move)(to.address, source.address, source.nbytes)


def map_file(fd: int, nbytes: int, *, huge_pages: bool) -> Region:
    """Map a file's first `nbytes` privately; the mapping outlives the descriptor.

    Args:
        fd: An open file.
        nbytes: Length, at most the file's (pages past the end raise SIGBUS when touched).
        huge_pages: Ask for huge pages. For a file mapping that also makes the kernel read ahead in pieces of
            2 MiB whatever the device's own setting: populating a cold 1.7 GB file behind `read_ahead_kb=128`
            went from 1.0-1.4 to 1.7-2.0 GB/s (O_DIRECT 1.5-1.8 there), and the pages come as large folios.
    """
    address, unmap = _map(nbytes, _MAP_PRIVATE | _MAP_NORESERVE, fd)
    if huge_pages and sys.platform == "linux":
        quick_libc.madvise(address, nbytes, _MADV_HUGEPAGE)
    return _region(address, nbytes, unmap)


def populate(region: Region) -> int:
    """Fault in a mapping's pages for reading, without the GIL.

    Returns:
        0, or the errno: EFAULT where a touch would raise SIGBUS, EINVAL where the kernel (before 5.14) cannot.
    """
    start = region.address // PAGE_BYTES * PAGE_BYTES
    length = region.address + region.nbytes - start
    if length == 0 or libc.madvise(start, length, _MADV_POPULATE_READ) == 0:
        return 0
    return ctypes.get_errno()


def fits(nbytes: int) -> bool:
    """Return whether this process may fill so much more memory, by the kernel's and the cgroup's word.

    Asked in order of cost.
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
    """Return the limit of the container's cgroup, looked up once a process; `sys.maxsize` where there is none."""
    limit = _number("/sys/fs/cgroup/memory.max", _CGROUP1 + "limit_in_bytes")
    return limit if 0 < limit < os.sysconf("SC_PHYS_PAGES") * PAGE_BYTES else sys.maxsize


def _cgroup_used_bytes() -> int:
    """Return what the container's cgroup cannot give back: its usage without the page cache."""
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
    """Read a file of /proc or /sys, without dropping the GIL: they come from memory and never wait."""
    fd = quick_libc.open(path.encode(), os.O_RDONLY | os.O_CLOEXEC)
    if fd < 0:
        return ""
    buffer = ctypes.create_string_buffer(16384)
    count = quick_libc.read(fd, buffer, ctypes.c_size_t(len(buffer)))
    quick_libc.close(fd)
    return buffer.raw[: max(0, count)].decode()
