"""Decides which file counts as cold.

A file is cold if less than half of it is in the page cache (`is_cold`). The disk limits the rate of a cold file: it is
read past the page cache (`read_past_cache`), or, mapped, by fewer workers that touch each page. A file that is not cold
is read through the page cache. If the kernel does not report it, a file is neither cold nor resident (`UNKNOWN`). If
several ranks load on one host, no file is read past the cache: the first rank fills it for the others.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch

from stio.storage.base import Source
from stio.storage.local import LocalFile

UNKNOWN = 0.5
"""Resident fraction of a file if it is not known. From this fraction on the disk does not limit the rate."""
SMALL_LOAD_BYTES = 16 << 20
"""Up to this size a query to the kernel costs more than a read by the slower read path."""


def resident_fractions(files: Iterable[Source], total_bytes: int) -> dict[LocalFile, float]:
    """Return the resident fraction of each local file of a load that reads so many bytes; `UNKNOWN` if they are few."""
    is_small = total_bytes <= SMALL_LOAD_BYTES
    return {file: UNKNOWN if is_small else resident_fraction(file) for file in files if isinstance(file, LocalFile)}


def resident_fraction(file: Source) -> float:
    """Return the fraction of a file in the page cache, from 0 to 1; `UNKNOWN` if the kernel does not report it."""
    fraction = file.resident_fraction() if isinstance(file, LocalFile) else None
    return UNKNOWN if fraction is None else fraction


def is_cold(fraction: float) -> bool:
    """Return whether a file counts as cold, of which this fraction is in the page cache."""
    return fraction < UNKNOWN


def read_past_cache(file: Source, fraction: float) -> None:
    """Read a cold file past the page cache, unless ranks share the host: the first one fills the cache for all."""
    if isinstance(file, LocalFile) and is_cold(fraction) and not host_is_shared():
        file.use_direct()


def host_is_shared() -> bool:
    """Return whether other ranks of this job run on this host.

    `LOCAL_WORLD_SIZE`, which torchrun sets, decides. If no launcher sets it (`torch.multiprocessing.spawn`), all ranks
    of a process group are assumed to be on one host: a query of the other ranks would be a collective operation, and a
    load must not be one.
    """
    local_ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local_ranks.isdecimal():
        return int(local_ranks) > 1
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
