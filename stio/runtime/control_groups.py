"""What this process may use: the memory and processors that its control groups and the machine leave it.

A control group limits all processes in it and in the groups below it, so the groups above the process's own count too:
batch systems set the limit on the job and run each step in a group below. `/proc/self/cgroup` names the groups of the
process, `/proc/self/mountinfo` says where their files are; in a container only a part of the tree may be mounted. Both
versions of control groups can be mounted at once; a controller is in one of them. Limits change while a process runs,
so every call reads them again; only the places of the files are remembered.

All numbers are upper bounds: memory that the kernel can reclaim counts as available, and a file that cannot be read
limits nothing. So a check against them never refuses what would fit.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache

_libc = ctypes.PyDLL(None) if sys.platform == "linux" else None
_READ_BYTES = 16384


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


def available_bytes(enough: int = sys.maxsize) -> int:
    """Return how much memory this process can still allocate and use; for more the kernel would kill it.

    Free memory counts, memory that the kernel can reclaim (page cache, but no shared memory), and free swap.

    Args:
        enough: The result may be any number from this on. Fewer files are read then.
    """
    if sys.platform != "linux":
        return sys.maxsize
    return max(0, min([_machine_bytes(enough), *_group_bytes(enough, with_swap=True)]))


def room_in_memory(enough: int = sys.maxsize) -> int:
    """Return how many bytes fit into memory without swapping and without being throttled.

    Args:
        enough: See `available_bytes`.
    """
    if sys.platform != "linux":
        return sys.maxsize
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < enough:
        free = _meminfo().get("MemAvailable:", sys.maxsize)
    return max(0, min([free, *_group_bytes(enough, with_swap=False)]))


def address_space_left() -> int:
    """Return how many bytes this process may still map (`ulimit -v`)."""
    found = re.search(r"^Max address space +(\d+) ", read_text("/proc/self/limits"), re.MULTILINE)
    if found is None:  # unlimited
        return sys.maxsize
    return max(0, int(found[1]) - _first_number(read_text("/proc/self/statm")) * os.sysconf("SC_PAGE_SIZE"))


def _machine_bytes(enough: int) -> int:
    """Return what the whole machine has left."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free >= enough:
        return free
    found = _meminfo()
    if "MemFree:" not in found:
        return sys.maxsize
    # Not MemAvailable, which estimates what fits without swapping. `Cached` includes shared memory.
    cached = max(0, found.get("Cached:", 0) - found.get("Shmem:", 0)) + found.get("Buffers:", 0)
    kernel = found.get("KReclaimable:", found.get("SReclaimable:", 0))
    zfs = re.search(r"^size +\d+ +(\d+)$", read_text("/proc/spl/kstat/zfs/arcstats"), re.MULTILINE)  # ZFS's own cache
    return found["MemFree:"] + cached + kernel + found.get("SwapFree:", 0) + (int(zfs[1]) if zfs is not None else 0)


def _meminfo() -> dict[str, int]:
    """Return /proc/meminfo in bytes, keys with their colon."""
    return {key: number << 10 for key, number in _numbers("/proc/meminfo").items()}


def _group_bytes(enough: int, *, with_swap: bool) -> Iterator[int]:
    """Yield what each limited group has left."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # a limit from this on is none
    for version, path in _groups("memory"):
        left = (_left_in_version_1 if version == 1 else _left_in_version_2)(path, most, enough, with_swap)
        if left is not None:
            yield left


def _left_in_version_2(path: str, most: int, enough: int, with_swap: bool) -> int | None:
    limit = _number(f"{path}/memory.max", most)
    if not with_swap:  # beyond `memory.high` the kernel throttles and reclaims, but kills nothing
        limit = min(limit, _number(f"{path}/memory.high", most))
    if limit >= most:
        return None
    left = limit - _number(f"{path}/memory.current", 0)
    if left < enough:
        stat = _numbers(f"{path}/memory.stat")
        left += stat.get("active_file", 0) + stat.get("inactive_file", 0) + stat.get("slab_reclaimable", 0)
    if left < enough and with_swap:
        swap = _number(f"{path}/memory.swap.max", sys.maxsize) - _number(f"{path}/memory.swap.current", 0)
        left += max(0, min(swap, _meminfo().get("SwapFree:", 0)))
    return left


def _left_in_version_1(path: str, most: int, enough: int, with_swap: bool) -> int | None:
    limit = _number(f"{path}/memory.limit_in_bytes", most)
    if limit >= most:
        return None
    left = limit - _number(f"{path}/memory.usage_in_bytes", 0)
    if left >= enough:
        return left
    stat = _numbers(f"{path}/memory.stat")
    reclaimable = stat.get("total_active_file", 0) + stat.get("total_inactive_file", 0)
    # Version 1 does not report which part of the kernel's memory can be reclaimed: all of it counts.
    reclaimable += _number(f"{path}/memory.kmem.usage_in_bytes", 0)
    left += reclaimable
    if left < enough and with_swap and (free_swap := _meminfo().get("SwapFree:", 0)):
        both = _number(f"{path}/memory.memsw.limit_in_bytes", sys.maxsize)
        both -= _number(f"{path}/memory.memsw.usage_in_bytes", 0)
        left = max(left, min(left + free_swap, both + reclaimable))
    return left


# Processors.


def num_processors() -> int:
    """Return how many processors this process can keep busy, one at least: by its affinity and its groups' quotas.

    The affinity includes the control groups' sets of processors.
    """
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
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
    """Return the groups by the text of /proc/self/cgroup, as far as they are mounted."""
    own: dict[str, str] = {}
    for line in memberships.splitlines():
        _, names, path = [*line.split(":", 2), "", ""][:3]
        if path.startswith("/"):  # other lines are malformed, and limit nothing
            own |= dict.fromkeys(names.split(","), path)  # version 2 has the name ""
    version, path = (1, own[controller]) if controller in own else (2, own.get("", "/.."))
    found: tuple[tuple[int, str], ...] = ()
    for mount, root in _mounts(version, controller):
        below = _below(path, root)
        if below is not None and os.path.isdir(mount + below):
            found = tuple((version, directory) for directory in _upwards(mount, below))  # the last mount hides others
    return found


def _upwards(mount: str, below: str) -> Iterator[str]:
    """Yield the directories from a group up to the mount's own."""
    while True:
        yield mount + below
        if not below or read_text(f"{os.path.dirname(mount + below)}/memory.use_hierarchy").strip() == "0":
            return  # old kernels: the group above does not count what is used below it
        below = os.path.dirname(below).rstrip("/")


def _below(path: str, root: str) -> str | None:
    """Return a group's path below the root of a mount, empty for the root itself; None if it is not there."""
    if set(root.split("/")) == {"", ".."}:
        return ""  # the mount begins above the namespace: its root is a group above this process's own
    if path == "/.." or path.startswith("/../"):
        return None  # a group outside the namespace
    root = root.rstrip("/")
    if path != root and not path.startswith(root + "/"):
        return None
    return path[len(root) :].rstrip("/")


def _mounts(version: int, controller: str) -> Iterator[tuple[str, str]]:
    """Yield mount point and root of each mount of a controller's tree."""
    for line in read_text("/proc/self/mountinfo").splitlines():
        fields, _, kinds = line.partition(" - ")
        parts, kind = fields.split(" "), kinds.split(" ")
        if len(parts) < 5 or len(kind) < 3:
            continue
        if kind[0] == "cgroup2" if version == 2 else kind[0] == "cgroup" and controller in kind[2].split(","):
            yield _unescaped(parts[4]), _unescaped(parts[3])


def _unescaped(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


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
