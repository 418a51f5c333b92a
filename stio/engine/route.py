"""Picks the way in: for every file of a load, by device, memory mode, filesystem and residency.

Storage and devices do not know each other; here they meet. What comes out is a plan cut to size and a run that
carries it out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Literal

import torch

from stio import memory
from stio.device.base import Accelerator, Landed
from stio.device.cuda import TorchAccelerator
from stio.device.staging import Stage
from stio.device.tensors import Casts, require_dtypes
from stio.engine.load import LoadRun, Route
from stio.engine.opened import OpenCheckpoint
from stio.engine.ways import CopyRoute, MapRoute, StageRoute
from stio.events import ProgressEvent, Trace, traced
from stio.memory import PAGE_BYTES
from stio.plan.read import Group, Names, PlanOptions, ReadPlan, plan_reads, select_names
from stio.storage.base import Source
from stio.storage.local import LocalFile
from stio.storage.mapped import MappedFile

__all__ = ["LoadOptions", "Memory", "Transfer", "prepare"]

Memory = Literal["auto", "map", "lazy", "copy"]
"""Where tensors on the CPU live; see `stio.load`."""

_MIB = 1 << 20
_BLOCK_BYTES = 32 * _MIB
"""4 workers of 32 MiB: as fast here as 16 of 8 MiB, cold and warm, with a quarter of the returns to Python."""
_LARGEST_GROUP_BYTES = 256 * _MIB
_NUM_WORKERS = 4
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

    device: torch.device | Accelerator
    """Where tensors go; an accelerator object stands for itself (tests)."""
    dtype: Casts | None = None
    """Cast to it; see `stio.device.tensors.Casts`."""
    memory: Memory = "auto"
    """How tensors on the CPU get their memory."""
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


@dataclass(frozen=True, slots=True)
class Transfer:
    """A load made ready: run it, then close it."""

    plan: ReadPlan
    """What will be read."""
    run: LoadRun
    """Carries it out."""
    routes: tuple[Route, ...]
    """One for each shard."""
    files: tuple[Source, ...]
    """The shards that are read."""

    def carry_out(self) -> None:
        """Run to the end, then make sure that the files are still what was planned; blocks.

        Whatever happens, no thread and no copy touches a buffer when this returns.
        """
        with ExitStack() as closing:
            for route in self.routes:
                closing.callback(route.close)
            self.run.run()
            for shard in {group.shard for group in self.plan.groups}:
                self.files[shard].check_unchanged()


def prepare(
    opened: OpenCheckpoint,
    names: Names | None,
    options: LoadOptions,
    *,
    deliver: Callable[[Group, Landed], None],
    hold: bool = False,
) -> Transfer:
    """Plan a load and choose the way in for each of its files. Reads no data, allocates no tensor.

    Args:
        opened: The checkpoint.
        names: What to load; None for everything.
        options: How.
        deliver: Takes the groups (see `LoadRun`).
        hold: The consumer releases the groups' budget (see `LoadRun`).

    Raises:
        TensorNotFoundError: A name that is not there.
        SliceError: A slice that does not fit.
        UnsupportedDtypeError: A tensor that torch has no dtype for.
    """
    with traced(options.trace, "plan"):
        return _prepare(opened, names, options, deliver, hold)


def _prepare(
    opened: OpenCheckpoint,
    names: Names | None,
    options: LoadOptions,
    deliver: Callable[[Group, Landed], None],
    hold: bool,
) -> Transfer:
    positions = select_names(opened.headers, names, path=opened.path)
    for header, chosen in zip(opened.headers, positions, strict=True):
        everything = len(chosen) == len(header)
        require_dtypes(header.dtypes if everything else [header.dtypes[k] for k in chosen], path=opened.path)
    total = sum(
        header.data_bytes if len(chosen) == len(header) else sum(header.ends[k] - header.begins[k] for k in chosen)
        for header, chosen in zip(opened.headers, positions, strict=True)
    )
    chooser = _Chooser(options, total, [file for file, chosen in zip(opened.files, positions, strict=True) if chosen])
    plan = plan_reads(opened.headers, positions, slices=options.slices, options=chooser.plan_options())
    used = {group.shard for group in plan.groups}
    routes = tuple(chooser.route(file, needed=k in used) for k, file in enumerate(opened.files))
    run = LoadRun(
        plan,
        routes,
        deliver=deliver,
        hold=hold,
        budget_bytes=chooser.run_budget_bytes,
        num_workers=chooser.num_workers,
        progress=options.progress,
        trace=options.trace,
    )
    return Transfer(plan, run, routes, tuple(opened.files))


class _Chooser:
    def __init__(self, options: LoadOptions, total_bytes: int, files: Sequence[Source]) -> None:
        if options.budget_bytes <= 0:
            raise ValueError(f"budget_bytes must be positive, not {options.budget_bytes}")
        self._options = options
        self._total_bytes = total_bytes
        self._accelerator = _accelerator(options.device)
        # Asked of the kernel once: it decides how long the blocks are, and how they are read.
        self._resident = {file: self._resident_fraction(file) for file in files if isinstance(file, LocalFile)}
        self.run_budget_bytes = options.budget_bytes
        self.num_workers = _NUM_MAP_WORKERS if self.maps else _NUM_WORKERS
        self._block_bytes = _pages(min(_BLOCK_BYTES, options.budget_bytes // 4))
        self._stage: Stage | None = None
        if self._accelerator is not None:
            # Half for staging slots, two a worker: one is filled while the other is copied. Half for device memory
            # that the consumer has not taken yet.
            self._block_bytes = _pages(min(_BLOCK_BYTES, options.budget_bytes // (4 * _NUM_WORKERS)))
            self._stage = Stage(
                self._accelerator, slot_bytes=self._block_bytes, num_slots=2 * _NUM_WORKERS, trace=options.trace
            )
            self.run_budget_bytes = max(1, options.budget_bytes - 2 * _NUM_WORKERS * self._block_bytes)

    @property
    def maps(self) -> bool:
        return self._accelerator is None and self._options.memory != "copy" and memory.HAVE_MMAP

    def plan_options(self) -> PlanOptions:
        nbytes = self._group_bytes()
        if self._options.prompt:
            # All workers are on a group of their own when the first one is complete: a sixteenth of all is read then.
            nbytes = min(nbytes, _pages(self._total_bytes // (16 * _NUM_WORKERS)))
        return PlanOptions(group_bytes=nbytes, block_bytes=nbytes)

    def _group_bytes(self) -> int:
        if not self.maps:
            return self._block_bytes
        # Populating costs no memory of ours and no staging: blocks may be long, but a worker's share of the whole must
        # not be so long that the others wait for the last one. What is in memory already takes no time to speak of,
        # but beside a busy Python thread each block costs 5 ms: 1.7 GB in 115 ms with 16 blocks, in 62 with 9.
        warm = bool(self._resident) and min(self._resident.values()) == 1.0
        each = 4 if warm else 8
        share = min(_LARGEST_GROUP_BYTES, max(_BLOCK_BYTES, self._total_bytes // (_NUM_MAP_WORKERS * each)))
        return _pages(min(share, self._options.budget_bytes // (each // 2)))

    def route(self, file: Source, *, needed: bool) -> Route:
        options, dtype = self._options, self._options.dtype
        if not needed:
            return CopyRoute(file, dtype=dtype)
        if self.maps and isinstance(file, LocalFile) and (options.memory != "auto" or file.on_local_filesystem):
            populates = options.memory != "lazy" and self._affordable
            mapped = MappedFile(file, lazy=not populates)
            resident = self._resident[file]
            if populates and resident < _COLD_BELOW:
                self.num_workers = _NUM_WORKERS
            return MapRoute(
                mapped,
                CopyRoute(file, dtype=dtype),
                populates=populates,
                piece_bytes=_LARGEST_GROUP_BYTES if resident == 1.0 else _BLOCK_BYTES,
                dtype=dtype,
            )
        if isinstance(file, LocalFile) and self._resident[file] < _COLD_BELOW:
            file.use_direct()
        if self._accelerator is None or self._stage is None:
            return CopyRoute(file, dtype=dtype)
        return StageRoute(file, self._accelerator, self._stage, dtype=dtype)

    def _resident_fraction(self, file: LocalFile) -> float:
        fraction = file.resident_fraction() if self._total_bytes > _SMALL_LOAD_BYTES else None
        return _COLD_BELOW if fraction is None else fraction  # not known: neither the cold way nor the warm one

    @property
    def _affordable(self) -> bool:
        """Whether to populate: not where the page cache would have to drop its first pages for the last."""
        return self._total_bytes <= _SMALL_LOAD_BYTES or memory.fits(self._total_bytes)


def _accelerator(device: torch.device | Accelerator) -> Accelerator | None:
    if not isinstance(device, torch.device):
        return device
    return None if device.type == "cpu" else TorchAccelerator(device)


def _pages(nbytes: int) -> int:
    return max(PAGE_BYTES, nbytes // PAGE_BYTES * PAGE_BYTES)
