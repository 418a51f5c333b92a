"""Host memory by address, and what this process may use: memory and processors.

A `Region` says where bytes are, and holds a reference to the object that owns them. Mappings are made through ctypes
and not by the `mmap` module, for three measured reasons. That module duplicates the file descriptor for the lifetime of
the mapping. Its anonymous maps are shared memory without huge pages (a copy into fresh 1.7 GB takes 740-930 ms against
88-123). Its `madvise` holds the GIL while the kernel reads from the disk.

A control group limits all processes in it and in the groups below it, so the groups above the process's own count too:
batch systems set the limit on the job and run each step in a group below. `/proc/self/cgroup` names the groups of the
process; a container may show the own group as the root of the tree. Both versions of control groups can be mounted at
once; a controller is in one of them. Limits change while a process runs, so every call reads them again; only the
places of the files are remembered. Memory that the kernel can reclaim counts as available, and a file that cannot be
read limits nothing.

Rules: memory that a process asks for is checked against its control groups before it is allocated where it is large
(`require`), and a failed allocation of anyone's becomes a `HostMemoryError` (`reporting_shortage`).
"""

from __future__ import annotations

import _thread
import atexit
import ctypes
import errno
import mmap
import operator
import os
import re
import sys
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from stio.errors import HostMemoryError
from stio.limits import DEFAULT_BUDGET_BYTES, HUGE_PAGE_BYTES
from stio.process import contextmanager

_SHORT_BYTES = 1 << 20
"""A copy shorter than this keeps the GIL (see `quick_libc`): it takes 80 microseconds at most."""

UNCHECKED_BYTES = 16 << 20
"""Up to this size the memory that is left is not examined: that takes 50 microseconds."""

_MIN_BUDGET_BYTES = 4 << 20

_UNMAP_HERE_BYTES = 128 << 20
"""Larger mappings are unmapped by a thread of their own."""

SYSTEM_PAGE_BYTES = mmap.PAGESIZE
"""Size of a page of this machine: 4 KiB, on some with ARM or POWER processors 64 KiB."""

_TORCH_SHORTAGE = re.compile(r"(?:can't allocate|not enough) memory: you tried to allocate (\d+) bytes")

_PROT_READ_WRITE = 3
_MAP_PRIVATE = 0x02
_MAP_ANONYMOUS = 0x20 if sys.platform == "linux" else 0x1000
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MAP_FAILED = ctypes.c_void_p(-1).value


def _declare(library: Any) -> Any:
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return library


# `libc` releases the GIL for the length of a call, `quick_libc` keeps it. Beside a busy Python thread it costs up to
# one switch interval (5 ms) to acquire the GIL again: more than a call that never waits for a disk.
libc: Any = _declare(ctypes.CDLL(None, use_errno=True))
quick_libc: Any = _declare(ctypes.PyDLL(None, use_errno=True))

_move_short: Any = quick_libc["memmove"]  # by subscript: a new function object, so its types are not shared
_move_short.argtypes, _move_short.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


def move(target: int, source: int, nbytes: int) -> None:
    """Copy bytes from address to address; without the GIL where that takes longer than to acquire it again."""
    (_move_short if nbytes < _SHORT_BYTES else ctypes.memmove)(target, source, nbytes)


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


class _Pages:
    """Owner of mapped pages, which are unmapped when its last reference is released.

    Only functions written in C do that: a KeyboardInterrupt that arrives meanwhile would be raised in a finaliser
    written in Python, and be lost there.
    """

    __slots__ = ("__weakref__",)


class _Mapping(weakref.ref[_Pages]):
    """A mapping; `free` is called when its pages have no owner any more."""

    __slots__ = ("free", "unmap")
    free: Callable[[], object]
    """Unmaps, here or on a thread."""
    unmap: list[Callable[[], object]]
    """The call that unmaps. The thread that takes it out of the list calls it, so it is called once."""


_mappings: dict[int, _Mapping] = {}  # by `id`; those that are unmapped are dropped now and then
_num_kept = 1000
_free = operator.methodcaller("free")


def _map(nbytes: int, flags: int, fd: int) -> tuple[int, _Pages]:
    """Map pages; return their address and their owner."""
    address = quick_libc.mmap(None, nbytes, _PROT_READ_WRITE, flags, fd, 0)
    if address in (None, _MAP_FAILED):
        number = ctypes.get_errno()
        if number == errno.ENOMEM:
            raise memory_error(nbytes, "the system refused to map memory")
        raise OSError(number, f"mmap of {nbytes:,} bytes failed: {os.strerror(number)}")
    unmap = partial((quick_libc if nbytes <= 2 * HUGE_PAGE_BYTES else libc).munmap, address, nbytes)
    # To unmap 1.7 GB of small pages takes 50 to 100 ms. The thread that releases the last tensor of a model may run an
    # event loop, and must not block for so long.
    if nbytes <= _UNMAP_HERE_BYTES:
        return address, _owner(unmap, [])
    once: list[Callable[[], object]] = [unmap]
    return address, _owner(partial(_thread.start_new_thread, _unmap_once, (once,)), once)


def _owner(free: Callable[[], object], unmap: list[Callable[[], object]]) -> _Pages:
    global _num_kept
    pages = _Pages()
    mapping = _Mapping(pages, _free)
    mapping.free, mapping.unmap = free, unmap
    if len(_mappings) >= _num_kept:
        _drop_unmapped()
        _num_kept = 2 * len(_mappings) + 1000
    _mappings[id(mapping)] = mapping
    return pages


def _unmap_once(unmap: list[Callable[[], object]]) -> None:
    with suppress(IndexError):
        unmap.pop()()


def _drop_unmapped() -> None:
    # A copy is one step. `list` of the items allocates, so the collector may run other code, which maps and unmaps.
    for key, mapping in _mappings.copy().items():
        if mapping() is None:
            _unmap_once(mapping.unmap)  # its thread could not start, or has not begun
            _mappings.pop(key, None)


@atexit.register
def _unmap_without_threads() -> None:
    """At its end the interpreter starts no more threads."""
    for mapping in list(_mappings.values()):
        if mapping.unmap:
            mapping.free = partial(_unmap_once, mapping.unmap)


def _region(address: int, nbytes: int, pages: _Pages) -> Region:
    buffer: Any = (ctypes.c_char * nbytes).from_address(address)
    buffer.pages = pages  # the buffer owns the pages, arrays and tensors own the buffer
    return Region(address, nbytes, buffer)


def owned(address: int, nbytes: int, free: Callable[[], object]) -> Region:
    """Return a region over memory that `free` releases; it is called once, with the last reference to the region.

    Args:
        address: Address of the memory.
        nbytes: Its size.
        free: A short function, written in C; see `_Pages`. It may be called on any thread.
    """
    return _region(address, nbytes, _owner(free, []))


def allocate(nbytes: int) -> Region:
    """Return new private memory, aligned to a huge page if it is as large as one.

    Huge pages are requested for the part that fills whole ones. The rest uses small pages, so a region costs no more
    than its own bytes.

    Raises:
        HostMemoryError: The address space or the overcommit limit is exhausted.
    """
    nbytes = max(nbytes, 1)
    # Only memory that can hold a whole huge page is aligned to one.
    slack = HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else 0
    address, pages = _map(nbytes + slack, _MAP_PRIVATE | _MAP_ANONYMOUS, -1)
    start = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES if slack else address
    whole = nbytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if whole and sys.platform == "linux":
        quick_libc.madvise(start, whole, _MADV_HUGEPAGE)  # only advice: a refusal costs speed
    return _region(start, nbytes, pages)


def map_file(fd: int, nbytes: int, *, huge_pages: bool) -> Region:
    """Map the first `nbytes` of a file privately; the mapping stays valid after the descriptor is closed.

    Args:
        fd: An open file.
        nbytes: Length, at most that of the file. An access to a page past the end raises SIGBUS.
        huge_pages: Request huge pages. For a file mapping the kernel then also reads ahead in pieces of 2 MiB, whatever
            the setting of the device is. To populate a cold 1.7 GB file with `read_ahead_kb=128` reached 1.7-2.0 GB/s
            instead of 1.0-1.4 (O_DIRECT: 1.5-1.8 there), and the pages come as large folios.
    """
    address, pages = _map(nbytes, _MAP_PRIVATE | _MAP_NORESERVE, fd)
    if huge_pages and sys.platform == "linux":
        quick_libc.madvise(address, nbytes, _MADV_HUGEPAGE)
    return _region(address, nbytes, pages)


def populate(region: Region, *, keeps_gil: bool = False) -> int:
    """Load the pages of a mapping into memory for reading; releases the GIL unless the pages are in the page cache.

    Returns:
        0, or an errno: EFAULT where an access would raise SIGBUS, EINVAL on kernels before 5.14.
    """
    start = region.address // SYSTEM_PAGE_BYTES * SYSTEM_PAGE_BYTES  # otherwise EINVAL
    length = region.address + region.nbytes - start
    if length == 0 or (quick_libc if keeps_gil else libc).madvise(start, length, _MADV_POPULATE_READ) == 0:
        return 0
    return ctypes.get_errno()


class WritableMemory:
    """The memory of this process that could be written at one time.

    Args:
        mappings: The mappings of the process, as `/proc/self/maps` lists them; None: all memory counts as writable.
    """

    def __init__(self, mappings: str | None) -> None:
        self._is_known = mappings is not None
        self._begins: list[int] = []
        self._ends: list[int] = []
        for line in (mappings or "").splitlines():
            span, access = line.split(" ", 2)[:2]
            if access[1] == "w":
                begin, end = (int(address, 16) for address in span.split("-"))
                if self._ends and self._ends[-1] == begin:
                    self._ends[-1] = end
                else:
                    self._begins.append(begin)
                    self._ends.append(end)

    @classmethod
    def now(cls) -> WritableMemory:
        """Return what can be written now. Takes 1 ms for 500 mappings."""
        try:
            with open("/proc/self/maps", errors="surrogateescape") as file:
                return cls(file.read())
        except OSError:  # not Linux, or not allowed
            return cls(None)

    def holds(self, address: int, nbytes: int) -> bool:
        """Return whether all bytes of a range can be written."""
        if not self._is_known:
            return True
        at = bisect_right(self._begins, address) - 1
        return at >= 0 and address + nbytes <= self._ends[at]


# What this process may use.

_READ_BYTES = 16384
_MOUNT = "/sys/fs/cgroup"
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    2: ("memory.max", "memory.current", ""),
}
"""By version: the files with the limit and the use of memory, and what the keys of `memory.stat` begin with."""


def read_text(path: str) -> str:
    """Return the text of a file of /proc or /sys, empty if it cannot be read.

    The GIL is kept: such files come from memory and never wait for a disk.
    """
    if sys.platform != "linux":
        return ""
    fd = quick_libc.open(path.encode(), os.O_RDONLY | os.O_CLOEXEC)
    if fd < 0:
        return ""
    buffer, text = ctypes.create_string_buffer(_READ_BYTES), b""
    while (count := quick_libc.read(fd, buffer, ctypes.c_size_t(_READ_BYTES))) > 0:
        text += buffer.raw[:count]
    quick_libc.close(fd)
    return text.decode(errors="replace")


def available_bytes() -> int:
    """Return how much memory this process can still allocate and use; for more the kernel would kill it.

    Free memory counts, memory that the kernel can reclaim (page cache, but no shared memory), and free swap.
    """
    return _bytes_left(with_swap=True)


def room_in_memory() -> int:
    """Return how many bytes fit into memory without swapping and without being throttled."""
    return _bytes_left(with_swap=False)


def address_space_left() -> int:
    """Return how many bytes this process may still map (`ulimit -v`)."""
    match = re.search(r"^Max address space +(\d+) ", read_text("/proc/self/limits"), re.MULTILINE)
    if match is None:  # unlimited
        return sys.maxsize
    return max(0, int(match[1]) - _first_number(read_text("/proc/self/statm")) * os.sysconf("SC_PAGE_SIZE"))


def _bytes_left(*, with_swap: bool) -> int:
    machine, left, total = _numbers("/proc/meminfo"), sys.maxsize, sys.maxsize
    swap = machine.get("SwapFree:", 0) << 10 if with_swap else 0
    if "MemAvailable:" in machine:
        total = machine["MemTotal:"] << 10
        zfs = re.search(r"^size +\d+ +(\d+)$", read_text("/proc/spl/kstat/zfs/arcstats"), re.MULTILINE)  # its own cache
        left = (machine["MemAvailable:"] << 10) + swap + (int(zfs[1]) if zfs is not None else 0)
    for version, directory in _groups("memory"):
        limit_file, used_file, prefix = _MEMORY_FILES[version]
        limit = _number(f"{directory}/{limit_file}", sys.maxsize)
        if not with_swap:  # beyond `memory.high` the kernel throttles and reclaims, but kills nothing
            limit = min(limit, _number(f"{directory}/memory.high", sys.maxsize))
        if limit >= total:
            continue
        stat = _numbers(f"{directory}/memory.stat")
        reclaimable = sum(stat.get(key, 0) for key in (f"{prefix}active_file", f"{prefix}inactive_file"))
        # Version 1 does not report which part of the kernel's memory can be reclaimed: all of it counts.
        reclaimable += stat.get("slab_reclaimable", 0) + _number(f"{directory}/memory.kmem.usage_in_bytes", 0)
        used = _number(f"{directory}/{used_file}", 0)
        group_swap = _number(f"{directory}/memory.swap.max", swap) - _number(f"{directory}/memory.swap.current", 0)
        both = _number(f"{directory}/memory.memsw.limit_in_bytes", sys.maxsize)  # of version 1: memory and swap
        both -= _number(f"{directory}/memory.memsw.usage_in_bytes", 0)
        group_swap = min(group_swap, both - (limit - used))
        left = min(left, limit - used + reclaimable + max(0, min(swap, group_swap)))
    return max(0, left)


# Processors.


def num_processors() -> int:
    """Return how many processors this process can keep busy, one at least: by its affinity and its groups' quotas.

    The affinity includes the control groups' sets of processors.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except (OSError, AttributeError):  # a sandbox refuses it, or the system does not have it
        count = os.cpu_count() or 1
    for version, path in _groups("cpu"):
        if version == 1:
            quota, period = _number(f"{path}/cpu.cfs_quota_us", 0), _number(f"{path}/cpu.cfs_period_us", 0)
        else:
            texts = read_text(f"{path}/cpu.max").split()
            quota, period = (int(text) if text.isdigit() else 0 for text in texts) if len(texts) == 2 else (0, 0)
        if quota > 0 and period > 0:
            count = min(count, -(-quota // period))
    return max(1, count)


# Places of the files.


def _groups(controller: str) -> tuple[tuple[int, str], ...]:
    """Return version and directory of each group that limits this process, its own first, then those above it."""
    return _find_groups(controller, read_text("/proc/self/cgroup")) if sys.platform == "linux" else ()


@lru_cache(maxsize=8)
def _find_groups(controller: str, memberships: str) -> tuple[tuple[int, str], ...]:
    """Return the groups by the text of /proc/self/cgroup."""
    own: dict[str, str] = {}
    for line in memberships.splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if path.startswith("/"):  # other lines are malformed, and limit nothing
            own |= dict.fromkeys(names.split(","), path)  # version 2 has the name ""
    version, mount = (1, f"{_MOUNT}/{controller}") if controller in own else (2, _MOUNT)
    path = own.get(controller, own.get("", "")).rstrip("/")
    if not os.path.isdir(mount + path):
        path = ""  # in a container the root of the mount is its own group
    groups = [(version, mount + path)]
    while path:
        path = path.rpartition("/")[0]
        groups.append((version, mount + path))
    return tuple(groups)


def _number(path: str, default: int) -> int:
    """Return the number in a file; the default if it holds none ("max", -1), or cannot be read."""
    return _first_number(read_text(path), default)


def _first_number(text: str, default: int = 0) -> int:
    words = text.split(None, 1)
    return int(words[0]) if words and words[0].isdigit() else default


def _numbers(path: str) -> dict[str, int]:
    """Return the first number of each line of a file, by the word before it."""
    rows = (line.split() for line in read_text(path).splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) >= 2 and row[1].isdigit()}


# Budgets and shortages.


def fits(nbytes: int) -> bool:
    """Return whether so many bytes fit into memory without swapping, by the machine and the control groups."""
    return room_in_memory() >= nbytes


def default_budget_bytes(total_bytes: int = sys.maxsize, *, max_bytes: int = DEFAULT_BUDGET_BYTES) -> int:
    """Return the budget of an operation for which none was given: less than the default where memory is short.

    Args:
        total_bytes: Bytes that the operation moves.
        max_bytes: The default where memory is not short.
    """
    if total_bytes <= UNCHECKED_BYTES:
        return max_bytes
    return min(max_bytes, max(_MIN_BUDGET_BYTES, available_bytes() // 2))


def require(nbytes: int, *, path: str) -> int:
    """Return how many bytes are left beyond `nbytes` that a load of `path` will hold at once.

    Raises:
        HostMemoryError: There is less memory.
    """
    free = available_bytes()
    if nbytes > free:
        message = "the tensors do not fit into memory; load fewer of them, or map the file (memory='map', no cast)"
        raise memory_error(nbytes, message, path=path, free_bytes=free)
    return free - nbytes


def memory_error(
    nbytes: int | None, message: str, *, path: str | None = None, free_bytes: int | None = None
) -> HostMemoryError:
    """Return the error of a refused allocation; `free_bytes` is read from the system unless it is given."""
    free = min(available_bytes(), address_space_left()) if free_bytes is None else free_bytes
    return HostMemoryError(
        message,
        path=path,
        needed_bytes=nbytes,
        free_bytes=free,
        expected=None if nbytes is None else f"{nbytes:,} bytes",
        found=f"{free:,} available",
    )


@contextmanager
def reporting_shortage(path: str | None = None) -> Iterator[None]:
    """Return a context in which a failed allocation, also of numpy or torch, is raised as `HostMemoryError`.

    Args:
        path: The file whose bytes the memory is for.
    """
    try:
        yield
    except HostMemoryError as error:
        error.path = error.path or path
        raise
    except MemoryError as error:
        raise memory_error(None, str(error) or "the host has too little memory", path=path) from error
    except RuntimeError as error:
        shortage = _TORCH_SHORTAGE.search(str(error))
        if shortage is None:
            raise
        raise memory_error(int(shortage[1]), "torch cannot allocate host memory", path=path) from error
