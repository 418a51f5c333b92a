"""What this process may use: the memory and processors that its control groups and the machine leave it.

A control group limits all processes in it and in the groups below it, so the groups above the process's own count too:
batch systems set the limit on the job and run each step in a group below. `/proc/self/cgroup` names the groups of the
process; a container may show the own group as the root of the tree. Both versions of control groups can be mounted at
once; a controller is in one of them. Limits change while a process runs, so every call reads them again; only the
places of the files are remembered.

Memory that the kernel can reclaim counts as available, and a file that cannot be read limits nothing.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from functools import lru_cache

_libc = ctypes.PyDLL(None) if sys.platform == "linux" else None
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
    if _libc is None:
        return ""
    fd = _libc.open(path.encode(), os.O_RDONLY | os.O_CLOEXEC)
    if fd < 0:
        return ""
    buffer, text = ctypes.create_string_buffer(_READ_BYTES), b""
    while (count := _libc.read(fd, buffer, ctypes.c_size_t(_READ_BYTES))) > 0:
        text += buffer.raw[:count]
    _libc.close(fd)
    return text.decode(errors="replace")


# Memory.


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
