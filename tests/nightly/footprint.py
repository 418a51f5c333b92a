"""What a process holds: files, threads, mappings, memory, objects."""

from __future__ import annotations

import ctypes
import gc
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path

from support import descriptors, eventually, num_threads


@dataclass(frozen=True, slots=True)
class Footprint:
    """A measurement."""

    files: int
    """Open files, without those of event loops."""
    threads: int
    """Threads that nothing below `threading` accounts for."""
    mappings: int
    """Lines of /proc/self/maps."""
    anonymous_kib: int
    """Resident memory that no file backs."""
    objects: int
    """Objects that the garbage collector knows."""

    def growth_since(self, earlier: Footprint) -> dict[str, int]:
        """Return by how much each number grew."""
        return {field.name: getattr(self, field.name) - getattr(earlier, field.name) for field in fields(self)}


ALLOWED = Footprint(files=0, threads=0, mappings=40, anonymous_kib=8 << 10, objects=400)
"""Growth over hundreds of cycles. One object a cycle, or 20 KiB a cycle, exceed it. Allocators keep some memory."""


def measure() -> Footprint:
    """Measure this process, when it has returned what it does not need."""
    for _ in range(2):
        gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    rollup = Path("/proc/self/smaps_rollup").read_text()
    anonymous = re.search(r"Anonymous: *(\d+) kB", rollup)
    assert anonymous is not None
    return Footprint(
        files=len(descriptors()),
        threads=num_threads(),
        mappings=Path("/proc/self/maps").read_bytes().count(b"\n"),
        anonymous_kib=int(anonymous[1]),
        objects=len(gc.get_objects()),
    )


def excess(before: Footprint, after: Footprint) -> list[str]:
    """Return what grew more than is allowed."""
    allowed = {field.name: getattr(ALLOWED, field.name) for field in fields(Footprint)}
    growth = after.growth_since(before)
    return [f"{name} grew by {growth[name]}" for name in allowed if growth[name] > allowed[name]]


def settled(before: Footprint) -> Footprint:
    """Wait until the threads are gone that a call may leave on their last steps; measure."""
    eventually(lambda: num_threads() <= before.threads)
    return measure()


def staging_directories(where: Path) -> list[str]:
    """Return the staging directories below a directory."""
    found = []
    for parent, directories, _ in os.walk(where):
        found += [os.path.join(parent, name) for name in directories if name.startswith(".stio-")]
    return found
