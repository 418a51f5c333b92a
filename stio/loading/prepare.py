"""Makes a load ready: its plan, cut to the size that its devices want, the ways in, and the run that carries it out.

Files and devices meet here, a lane for each pair; `target.py` says which way a lane takes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from stio.device.base import LoadedGroup
from stio.device.tensors import require_dtypes
from stio.format.header import Header
from stio.loading.cache.file_image import CachedFile, FileCache
from stio.loading.open import OpenCheckpoint
from stio.loading.plan import Group, Names, PlanOptions, ReadPlan, plan_reads
from stio.loading.read_paths import CacheFillPath
from stio.loading.scheduler import LoadScheduler, ReadPath
from stio.loading.select import DeviceSelection, select_by_device
from stio.loading.targets import (
    BLOCK_BYTES,
    NUM_WORKERS,
    DeviceTarget,
    LoadOptions,
    read_directly,
    resident_fraction,
    targets_of,
)
from stio.runtime.progress import ProgressEvent
from stio.runtime.trace import Trace, traced
from stio.storage.base import Source

__all__ = ["Transfer", "prepare", "prepare_prefetch"]


@dataclass(frozen=True, slots=True)
class _Lane:
    """What one file brings to one device."""

    file: Source
    header: Header
    wish: DeviceSelection
    target: DeviceTarget
    positions: Sequence[int]


@dataclass(frozen=True, slots=True)
class Transfer:
    """A load made ready: run it, then close it."""

    plan: ReadPlan
    """What will be read."""
    run: LoadScheduler
    """Carries it out."""
    routes: tuple[ReadPath, ...]
    """One for each file and device that it is read for."""
    files: tuple[Source, ...]
    """Their files."""
    kept: tuple[CachedFile, ...] = ()
    """What a cache keeps of them; let go of at the end."""

    def describe(self) -> str:
        """Return what is read and by which way in, for the log."""
        ways = sorted({type(self.routes[group.shard]).__name__ for group in self.plan.groups}) or ["nothing"]
        return f"{self.plan.total_bytes:,} bytes of {self.plan.num_tensors:,} tensors by {', '.join(ways)}"

    def carry_out(self) -> None:
        """Run to the end, then make sure that the files are still what was planned; blocks.

        Whatever happens, no thread and no copy touches a buffer when this returns.
        """
        with ExitStack() as closing:
            for kept in self.kept:
                closing.callback(kept.release)
            for route in self.routes:  # first: their copies read what is kept
                closing.callback(route.close)
            self.run.run()
            for file in {id(file): file for file in self.files}.values():
                file.check_unchanged()


def prepare(
    opened: OpenCheckpoint,
    names: Names | None,
    options: LoadOptions,
    *,
    deliver: Callable[[Group, LoadedGroup], None],
    hold: bool = False,
) -> Transfer:
    """Plan a load and choose the way in for each of its files. Reads no data, allocates no tensor.

    Args:
        opened: The checkpoint.
        names: What to load, aliases among it; None for everything.
        options: How.
        deliver: Takes the groups (see `LoadScheduler`).
        hold: The consumer releases the groups' budget (see `LoadScheduler`).

    Raises:
        TensorNotFoundError: A name that is not there.
        DeviceError: A name that goes nowhere.
        SliceError: A slice that does not fit.
        UnsupportedDtypeError: A tensor that torch has no dtype for.
    """
    with traced(options.trace, "plan"):
        return _prepare(opened, names, options, deliver, hold)


def _prepare(
    opened: OpenCheckpoint,
    names: Names | None,
    options: LoadOptions,
    deliver: Callable[[Group, LoadedGroup], None],
    hold: bool,
) -> Transfer:
    wishes = select_by_device(opened, names, options.device)
    targets = targets_of(opened, wishes, options)
    try:
        return _planned(opened, wishes, targets, options, deliver, hold)
    except BaseException:
        for target in targets:
            target.abandon()
        raise


def _planned(
    opened: OpenCheckpoint,
    wishes: Sequence[DeviceSelection],
    targets: Sequence[DeviceTarget],
    options: LoadOptions,
    deliver: Callable[[Group, LoadedGroup], None],
    hold: bool,
) -> Transfer:
    lanes = [
        _Lane(file, header, wish, target, wish.positions[shard])
        for shard, (file, header) in enumerate(zip(opened.files, opened.headers, strict=True))
        for wish, target in zip(wishes, targets, strict=True)
        if wish.positions[shard]
    ]
    for lane in lanes:
        dtypes = lane.header.dtypes
        everything = len(lane.positions) == len(lane.header)
        require_dtypes(dtypes if everything else [dtypes[k] for k in lane.positions], path=opened.path)
    plan = plan_reads(
        [lane.header for lane in lanes],
        [lane.positions for lane in lanes],
        slices=options.slices,
        options=[lane.target.plan_options for lane in lanes],
    )
    held = _held(options.cache, plan, lanes)
    try:
        routes = tuple(lane.target.route(lane.file, held.get(id(lane.file))) for lane in lanes)
    except BaseException:
        for kept in held.values():
            kept.release()
        raise
    run = LoadScheduler(
        plan,
        routes,
        deliver=lambda group, landed: deliver(group, lanes[group.shard].wish.dress(landed)),
        hold=hold,
        budget_bytes=targets[0].run_budget_bytes if targets else options.budget_bytes,
        num_workers=max((target.num_workers for target in targets), default=1),
        progress=options.progress,
        trace=options.trace,
    )
    return Transfer(plan, run, routes, tuple(lane.file for lane in lanes), tuple(held.values()))


def prepare_prefetch(
    opened: OpenCheckpoint,
    kept: Sequence[CachedFile],
    *,
    progress: Callable[[ProgressEvent], object] | None,
    trace: Trace | None,
) -> Transfer:
    """Plan to read all files of a checkpoint into their images, which are let go of at the end."""
    for file in opened.files:
        read_directly(file, resident_fraction(file))
    sizes = PlanOptions(group_bytes=BLOCK_BYTES, block_bytes=BLOCK_BYTES)
    everything = [range(len(header)) for header in opened.headers]
    plan = plan_reads(opened.headers, everything, slices={}, options=sizes)
    routes = tuple(CacheFillPath(file, image) for file, image in zip(opened.files, kept, strict=True))
    run = LoadScheduler(
        plan,
        routes,
        deliver=lambda group, landed: None,
        budget_bytes=sys.maxsize,  # nothing is on the way to anybody
        num_workers=NUM_WORKERS,
        progress=progress,
        trace=trace,
    )
    return Transfer(plan, run, routes, tuple(opened.files), tuple(kept))


def _held(cache: FileCache | None, plan: ReadPlan, lanes: Sequence[_Lane]) -> dict[int, CachedFile]:
    """Return what the cache keeps of the files that a plan reads, by the file's `id`."""
    if cache is None:
        return {}
    files = {id(lane.file): lane.file for lane in lanes}
    wanted = {id(lane.file): lane.header.data_start for lane in lanes}  # of a file as a whole: its header counts
    for group in plan.groups:
        wanted[id(lanes[group.shard].file)] += group.payload_bytes
    found = cache.hold([(files[key], nbytes) for key, nbytes in wanted.items()])
    return {key: kept for key, kept in zip(wanted, found, strict=True) if kept is not None}
