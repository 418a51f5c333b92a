"""Control groups, version 1 and 2: cap a disk's read rate, limit and watch memory.

A group is made for one run and removed after it. The contestant joins it when its imports are done and its memory is
primed, so everything that is charged to the group belongs to the load.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_POLL_SECONDS = 0.002


class CgroupUnavailable(RuntimeError):
    """This machine does not let the benchmark make the control group that it needs."""


@dataclass(frozen=True, slots=True)
class Group:
    """A control group of one controller."""

    path: Path
    """Its directory."""

    version: int
    """1 or 2."""

    @property
    def procs(self) -> str:
        """The file that a process writes its id to in order to join."""
        return str(self.path / "cgroup.procs")


@contextmanager
def group(controller: str) -> Iterator[Group]:
    """Make a group under `controller` ("memory", or "io", which version 1 calls blkio), and remove it after the block.

    Raises:
        CgroupUnavailable: No such controller, or no permission.
    """
    parent, version = _parent(controller)
    path = parent / f"stio-bench-{os.getpid()}-{time.monotonic_ns()}"
    try:
        path.mkdir()
    except OSError as error:
        raise CgroupUnavailable(f"cannot make a {controller} group: {error.strerror}") from error
    try:
        yield Group(path, version)
    finally:
        _remove(path)


def cap_reads(target: Group, device: str, bytes_per_second: int) -> None:
    """Cap the reads of `target` from the block device `device` ("major:minor")."""
    if target.version == 1:
        _write(target.path / "blkio.throttle.read_bps_device", f"{device} {bytes_per_second}")
    else:
        _write(target.path / "io.max", f"{device} rbps={bytes_per_second}")


def limit_memory(target: Group, limit_bytes: int) -> None:
    """Let the kernel kill what uses more than `limit_bytes` that it cannot reclaim."""
    _write(target.path / ("memory.limit_in_bytes" if target.version == 1 else "memory.max"), str(limit_bytes))


def peak_bytes(target: Group) -> int | None:
    """Give the most memory that was charged to `target`, page cache included; None where the kernel does not say."""
    try:
        return int((target.path / ("memory.max_usage_in_bytes" if target.version == 1 else "memory.peak")).read_text())
    except (OSError, ValueError):
        return None


def oom_kills(target: Group) -> int:
    """Count the processes of `target` that the kernel has killed for memory."""
    name = "memory.oom_control" if target.version == 1 else "memory.events"
    return _flat(target.path / name).get("oom_kill", 0)


class MemoryWatch:
    """Samples what `target` holds apart from the page cache: anonymous, shared and kernel memory."""

    def __init__(self, target: Group) -> None:
        self.peak_bytes = 0
        """The largest sample, in bytes."""
        self._target = target
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="memory-watch", daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(_POLL_SECONDS):
            try:
                self.peak_bytes = max(self.peak_bytes, _held_bytes(self._target))
            except OSError:
                continue


def _held_bytes(target: Group) -> int:
    stat = _flat(target.path / "memory.stat")
    if target.version == 1:
        return stat.get("total_rss", 0) + stat.get("total_shmem", 0)
    return sum(stat.get(key, 0) for key in ("anon", "shmem", "kernel"))


def _parent(controller: str) -> tuple[Path, int]:
    """Find the directory to make groups of `controller` in: below this process's own group where possible."""
    names = {"io": ("blkio", "io"), "memory": ("memory", "memory")}[controller]
    own = _own_groups()
    for mount, version, controllers in _mounts():
        if version == 1 and names[0] in controllers:
            beneath = mount / own.get(names[0], "/").lstrip("/")
            return (beneath if beneath.is_dir() else mount), 1
        if version == 2 and names[1] in (mount / "cgroup.controllers").read_text().split():
            try:
                (mount / "cgroup.subtree_control").write_text(f"+{names[1]}")
            except OSError as error:
                raise CgroupUnavailable(f"cannot enable {names[1]}: {error.strerror}") from error
            return mount, 2
    raise CgroupUnavailable(f"no {controller} controller is mounted")


def _mounts() -> list[tuple[Path, int, set[str]]]:
    found = []
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, kind, options, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            found.append((Path(point), 1 if kind == "cgroup" else 2, set(options.split(","))))
    return found


def _own_groups() -> dict[str, str]:
    groups: dict[str, str] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        groups |= dict.fromkeys(controllers.split(","), path)
    return groups


def _flat(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in path.read_text().splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise CgroupUnavailable(f"cannot write {path.name}: {error.strerror}") from error


def _remove(path: Path) -> None:
    for _ in range(100):
        try:
            path.rmdir()
            return
        except OSError:
            time.sleep(0.02)
