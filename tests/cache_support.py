"""What tests of the host cache share: reads that are counted, and memory that is."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

from fakes import FaultyRoot, Read

from stio.runtime import memory
from stio.runtime.memory import Region
from stio.storage.local import LocalRoot


def size_of(directory: Path) -> int:
    """Return the size of a checkpoint's shards."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def watched(directory: Path, **faults: Any) -> FaultyRoot:
    """Return a directory whose reads are logged."""
    return FaultyRoot(LocalRoot(directory), **faults)


def data_reads(root: FaultyRoot) -> list[Read]:
    """Return the reads after those that opening takes: the index, and the begin of each shard."""
    seen: set[str] = set()
    found = []
    for read in root.reads:
        if read.name in seen:
            found.append(read)
        seen.add(read.name)
    return found


class Recorder:
    """Makes plain memory, and knows how much of it is there."""

    def __init__(self, *, refuse: int | None = None) -> None:
        self.num_calls = 0
        self.live_bytes = 0
        self._refuse = refuse

    def __call__(self, nbytes: int) -> Region:
        self.num_calls += 1
        if self.num_calls == self._refuse:
            raise MemoryError
        region = memory.allocate(nbytes)
        self.live_bytes += nbytes
        weakref.finalize(region.owner, self._freed, nbytes)
        return region

    def _freed(self, nbytes: int) -> None:
        self.live_bytes -= nbytes


def recorded(cache: Any, **options: Any) -> Recorder:
    recorder = Recorder(**options)
    cache._memory._make = recorder
    cache._memory.begin_use = lambda: None
    return recorder
