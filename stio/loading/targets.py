"""One device of a load: how long its reads are, and which way each file takes to it.

By memory mode, filesystem and residency. Storage and devices do not know each other; here they meet.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch

from stio.device.base import Accelerator, Target
from stio.device.cuda import TorchAccelerator
from stio.device.placement import Placement
from stio.device.ring import Stage
from stio.device.tensors import Casts
from stio.errors import DeviceError
from stio.format.header import Header
from stio.loading.cache.file_image import CachedFile, FileCache
from stio.loading.gds_path import DirectRing, GdsPath
from stio.loading.open import OpenCheckpoint
from stio.loading.plan import PlanOptions
from stio.loading.read_paths import CopiedPath, GroupMemories, MappedPath, StagedPath, Staging
from stio.loading.ring_size import Ring, ring_of, usable_cores
from stio.loading.scheduler import ReadPath
from stio.loading.select import DeviceSelection
from stio.runtime import memory
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.operation import start_thread
from stio.runtime.progress import ProgressEvent
from stio.runtime.trace import Trace
from stio.storage.base import Source
from stio.storage.gds import require_kvikio
from stio.storage.local import LocalFile
from stio.storage.mapped import MappedFile

__all__ = [
    "BLOCK_BYTES",
    "NUM_WORKERS",
    "DeviceTarget",
    "LoadOptions",
    "Memory",
    "host_is_shared",
    "read_directly",
    "resident_fraction",
    "targets_of",
]

Memory = Literal["auto", "map", "lazy", "copy", "gds"]
"""Where tensors on the CPU live; "gds": whether the host's memory is passed by on the way to an accelerator."""

_MIB = 1 << 20
BLOCK_BYTES = 32 * _MIB
"""4 workers of 32 MiB: as fast here as 16 of 8 MiB, cold and warm, with a quarter of the returns to Python."""
_LARGEST_GROUP_BYTES = 256 * _MIB
NUM_WORKERS = 4
_NUM_MAP_WORKERS = min(8, max(2, os.cpu_count() or 1))
"""Populating pages that are there already is bound by the cores: 1.7 GB in small folios and two cores took 50 ms with
2 workers, 57 with 4, 61 with 1, and 81 by faults."""
_COLD_BELOW = 0.5
"""Share of a file in the page cache from which on the disk does not set the pace."""
_SMALL_LOAD_BYTES = 16 * _MIB
"""Below this, asking the kernel what is resident costs more than reading the slower way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What a load shall do, resolved: defaults are in, `device` is checked."""

    device: Target | Placement
    """Where all tensors go, or where each does; an accelerator object stands for itself (tests)."""
    dtype: Casts | None = None
    """Cast to it; see `stio.device.tensors.Casts`."""
    memory: Memory = "auto"
    """How tensors on the CPU get their memory, or "gds"."""
    budget_bytes: int = 512 * _MIB
    """Most bytes between storage and consumer."""
    slices: Mapping[str, object] = field(default_factory=dict)
    """By name, the part to load."""
    prompt: bool = False
    """Cut small groups, so that the first are there early; else large ones, so that the last is."""
    progress: Callable[[ProgressEvent], object] | None = None
    """Called at the start and after each group."""
    trace: Trace | None = None
    """Where spans go."""
    cache: FileCache | None = None
    """Keeps files in host memory; tensors on the CPU are copies then."""


def targets_of(opened: OpenCheckpoint, wishes: Sequence[DeviceSelection], options: LoadOptions) -> list[DeviceTarget]:
    """Return the devices of a load, each ready to say how it is read for; they share one budget."""
    if options.budget_bytes <= 0:
        raise ValueError(f"budget_bytes must be positive, not {options.budget_bytes}")
    totals = [
        sum(_wanted_bytes(header, chosen) for header, chosen in zip(opened.headers, wish.positions, strict=True))
        for wish in wishes
    ]
    # Asked of the kernel once: it decides how long the blocks are, and how they are read.
    small = sum(totals) <= _SMALL_LOAD_BYTES
    resident = {
        file: _COLD_BELOW if small else resident_fraction(file)
        for shard, file in enumerate(opened.files)
        if isinstance(file, LocalFile) and any(wish.positions[shard] for wish in wishes)
    }
    accelerators = [_accelerator(wish.device) for wish in wishes]
    directly = options.memory == "gds"
    if directly:
        if accelerators and not any(accelerators):
            raise DeviceError("memory='gds' is a way to an accelerator", expected="an accelerator", found="cpu")
        require_kvikio()
    # Half for staging slots, half for what the consumer has not taken yet.
    num_rings = sum(accelerator is not None for accelerator in accelerators) * (2 if directly else 1)
    ring = ring_of(options.budget_bytes, num_rings, num_cores=usable_cores())
    run_budget_bytes = max(1, options.budget_bytes - ring.num_slots * num_rings * ring.slot_bytes)
    return [
        DeviceTarget(
            options,
            accelerator,
            total_bytes=total,
            run_budget_bytes=run_budget_bytes,
            ring=ring,
            resident={
                file: resident[file]
                for file, chosen in zip(opened.files, wish.positions, strict=True)
                if chosen and isinstance(file, LocalFile)
            },
        )
        for wish, accelerator, total in zip(wishes, accelerators, totals, strict=True)
    ]


class DeviceTarget:
    """One device of a load: how long its reads are, and which way each file takes to it."""

    def __init__(
        self,
        options: LoadOptions,
        accelerator: Accelerator | None,
        *,
        total_bytes: int,
        run_budget_bytes: int,
        ring: Ring,
        resident: Mapping[LocalFile, float],
    ) -> None:
        self._options = options
        self._accelerator = accelerator
        self._total_bytes = total_bytes
        self._resident = resident
        self.run_budget_bytes = run_budget_bytes
        num_readers = NUM_WORKERS if accelerator is None else ring.num_workers
        self.num_workers = _NUM_MAP_WORKERS if self.maps else num_readers
        self._stage: Staging | None = None
        self._direct: DirectRing | None = None
        if accelerator is not None:
            slots = partial(
                Stage, accelerator, slot_bytes=ring.slot_bytes, num_slots=ring.num_slots, trace=options.trace
            )
            self._stage = slots()
            if options.memory == "gds":
                self._direct = DirectRing(accelerator, slots)
            elif options.cache is None and not options.slices:  # of which little may be staged
                self._stage.make_ahead(partial(start_thread, name="pin"), -(-total_bytes // ring.slot_bytes))
            nbytes = ring.slot_bytes
        else:
            nbytes = self._mapped_bytes() if self.maps else _pages(min(BLOCK_BYTES, run_budget_bytes // 4))
        if options.prompt:
            # All workers are on a group of their own when the first one is complete: a sixteenth of all is read then.
            nbytes = min(nbytes, _pages(total_bytes // (16 * num_readers)))
        self.plan_options = PlanOptions(group_bytes=nbytes, block_bytes=nbytes)

    def abandon(self) -> None:
        """Let go of what was made for it: nothing will be read."""
        with ExitStack() as closing:
            if self._stage is not None:
                closing.callback(self._stage.close)
            if self._direct is not None:
                closing.callback(self._direct.close)

    @property
    def maps(self) -> bool:
        """Whether its files are mapped, where they can be."""
        copies = self._options.memory == "copy" or self._options.cache is not None
        return self._accelerator is None and not copies and memory.HAVE_MMAP

    def _mapped_bytes(self) -> int:
        # Populating costs no memory of ours and no staging: blocks may be long, but a worker's share of the whole must
        # not be so long that the others wait for the last one. What is in memory already takes no time to speak of,
        # but beside a busy Python thread each block costs 5 ms: 1.7 GB in 115 ms with 16 blocks, in 62 with 9.
        warm = bool(self._resident) and min(self._resident.values()) == 1.0
        each = 4 if warm else 8
        share = min(_LARGEST_GROUP_BYTES, max(BLOCK_BYTES, self._total_bytes // (_NUM_MAP_WORKERS * each)))
        return _pages(min(share, self.run_budget_bytes // (each // 2)))

    def route(self, file: Source, kept: CachedFile | None) -> ReadPath:
        """Choose the way in for a file, of which `kept` is the image, if there is one."""
        options, dtype = self._options, self._options.dtype
        if (
            self.maps
            and isinstance(file, LocalFile)
            and (options.memory in ("map", "lazy") or file.on_local_filesystem)
        ):
            populates = options.memory != "lazy" and self._affordable
            mapped = MappedFile(file, lazy=not populates)
            resident = self._resident[file]
            cold = populates and resident < _COLD_BELOW
            if cold:
                self.num_workers = NUM_WORKERS
            return MappedPath(
                mapped,
                CopiedPath(file, dtype=dtype),
                populates=populates,
                cold=cold,
                piece_bytes=_LARGEST_GROUP_BYTES if resident == 1.0 else BLOCK_BYTES,
                dtype=dtype,
            )
        read_directly(file, self._resident[file] if isinstance(file, LocalFile) else _COLD_BELOW)
        if self._accelerator is None or self._stage is None:
            return CopiedPath(file, dtype=dtype, kept=kept)
        images = GroupMemories(self._accelerator)
        staged = StagedPath(file, images, self._stage, dtype=dtype, kept=kept)
        ring = self._direct
        # Where the kernel does not say what it has in memory, what was asked for counts.
        if ring is not None and ring.serves and isinstance(file, LocalFile) and self._resident[file] <= _COLD_BELOW:
            direct = ring.open(file)
            if direct is not None:
                return GdsPath(ring, StagedPath(direct, images, ring.stage, dtype=dtype), staged)
        return staged

    @property
    def _affordable(self) -> bool:
        """Whether to populate: not where the page cache would have to drop its first pages for the last."""
        return self._total_bytes <= _SMALL_LOAD_BYTES or memory.fits(self._total_bytes)


def _wanted_bytes(header: Header, chosen: Sequence[int]) -> int:
    if len(chosen) == len(header):
        return header.data_bytes
    return sum(header.ends[k] - header.begins[k] for k in chosen)


def resident_fraction(file: Source) -> float:
    """Return how much of a file is in the page cache, from 0 to 1, as far as that is known."""
    fraction = file.resident_fraction() if isinstance(file, LocalFile) else None
    return _COLD_BELOW if fraction is None else fraction  # not known: neither the cold way nor the warm one


def read_directly(file: Source, resident: float) -> None:
    """Read a cold file past the page cache; not where ranks share the host, who all want it: the first one fills it."""
    if isinstance(file, LocalFile) and resident < _COLD_BELOW and not host_is_shared():
        file.use_direct()


def _accelerator(device: Target) -> Accelerator | None:
    if not isinstance(device, torch.device):
        return device
    return None if device.type == "cpu" else TorchAccelerator(device)


def _pages(nbytes: int) -> int:
    return max(PAGE_BYTES, nbytes // PAGE_BYTES * PAGE_BYTES)


def host_is_shared() -> bool:
    """Return whether other ranks of this job run on this host.

    What torchrun says counts. Where no launcher tells how many ranks a host has (`torch.multiprocessing.spawn`), a
    process group of several is taken for one host's: to ask the others would be a collective, which a load must not be.
    """
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if told.isdecimal():
        return int(told) > 1
    distributed = torch.distributed
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
