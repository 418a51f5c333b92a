"""Plans a load: how each file is read for each device, in which order, and what moves the bytes.

A `DeviceLoad` has the tensors of one device. It decides the size of its blocks, and chooses the read path of each file,
by the kind of memory, the filesystem, and the fraction of the file in the page cache. The
engine carries a load out if it can do so for all of its files, otherwise the plain executor.

A file is cold if less than half of it is in the page cache. The disk limits the rate of a cold file: it is
read past the page cache (`read_past_cache`), or, mapped, each page is touched after its read. A file that is not cold
is read through the page cache. If the kernel does not report it, a file is neither cold nor resident (`UNKNOWN`). If
several ranks load on one host, no file is read past the cache: the first rank fills it for the others.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

import torch

from stio.device import TORCH_DTYPES, Accelerator, Lost, TorchAccelerator
from stio.errors import DeviceError
from stio.format import Header
from stio.format.delta import Patch
from stio.limits import ACCELERATOR_BUDGET_BYTES, DEFAULT_BUDGET_BYTES, PAGE_BYTES
from stio.loading.engine import EngineExecutor
from stio.loading.gds_path import GdsDevice, GdsPath
from stio.loading.options import LoadOptions
from stio.loading.patching import PatchingExecutor, SelectedPatches
from stio.loading.plain import InlineExecutor, PlainExecutor
from stio.loading.plan import GAP_BYTES, FileSelection, ReadPlan, plan_reads
from stio.loading.read_paths import CacheFillPath, CopiedPath, Delivery, DevicePath, MappedPath, ReadPath, StagingSlots
from stio.loading.scheduler import FIRST_BYTES, Executor, PlannedLoad
from stio.loading.select import DeviceSelection, SelectedTensors, selected_bytes
from stio.runtime import memory
from stio.runtime.reports import traced
from stio.storage import LocalFile, MappedFile, RequestedSource, Requests, Source
from stio.storage.checkpoint import CachedFile, FileCache, OpenCheckpoint

GROUP_BYTES = 64 << 20
"""Size of groups: memory is allocated, and tensors are made, for one at a time."""
NUM_WORKERS = 4
"""Threads of the plain executor that read local files."""
_is_native = attrgetter("is_native")
_SLOT_BYTES = 8 << 20
_MIN_SLOT_BYTES = 4096
_SMALLEST_PARTS = 64
"""With `Delivery.prompt`, a group is at most this part of all."""


def plan_load(selected: SelectedTensors, delivery: Delivery, *, max_workers: int | None = None) -> PlannedLoad:
    """Plan a load, and choose the read path of each of its files.

    Args:
        selected: What is read.
        delivery: How the consumer gets the tensors.
        max_workers: Most threads that read; None: as many as the devices and the processors make worthwhile.

    Raises:
        HostMemoryError: The tensors do not fit into memory.
        SliceError: A slice does not fit its tensor.
        UnsupportedDtypeError: torch does not have the dtype of a tensor.
    """
    opened, options = selected.opened, selected.options
    with ExitStack() as undo:
        owned = undo.enter_context(ExitStack())
        shards = selected.shards
        patches = selected.patches
        of_patches = _bytes_of_patches(patches)
        files = _open_files(selected, sorted({*shards, *of_patches}), of_patches, owned)
        lost = Lost() if options.lost is None else options.lost
        copied = frozenset() if selected.casts else delivery.copied
        delivery = replace(delivery, casts=selected.casts or None, copied=copied, lost=lost)
        loads = _device_loads([files[shard] for shard in shards], selected, delivery, patches)
        for load in loads:
            undo.callback(load.close)
        reads = _reads(opened, files, loads)
        plan = plan_reads([read.selection for read in reads], selected.slices)
        cached = (
            {}
            if options.host_cache is None
            else _held_images(
                options.host_cache, reads, plan, [(files[shard], nbytes) for shard, nbytes in of_patches.items()]
            )
        )
        for image in cached.values():
            owned.callback(image.release)
        paths = [read.load.read_path(read, cached.get(id(read.file))) for read in reads]
        budget_bytes = _budget_bytes(plan, paths, loads, keeps=delivery.keeps, path=opened.path)
        on_top = None
        if patches:
            held = {shard: (files[shard], cached.get(id(files[shard]))) for shard in of_patches}
            on_top = SelectedPatches.within(budget_bytes, patches, held)
            budget_bytes = max(1, budget_bytes - on_top.total_bytes)
        num_workers = min(loads[0].num_workers if loads else 1, max_workers or sys.maxsize)
        executor: Executor
        if on_top is None and _is_at_hand(plan, paths, budget_bytes):
            executor = InlineExecutor(paths, trace=options.trace)
        else:
            executor = moving = _executor(plan, paths, budget_bytes, options, num_workers)
            if on_top is not None:
                headers = [read.selection.header for read in reads]
                executor = PatchingExecutor(moving, paths, headers, on_top, trace=options.trace)
        must_grow = plan.total_bytes > FIRST_BYTES and any(load.must_grow for load in loads)
        planned = PlannedLoad(
            opened.path,
            plan,
            paths,
            executor,
            budget_bytes,
            names=[read.load.selected.names for read in reads],
            make_results=None if selected.placed is None else selected.placed.made,
            first_bytes=FIRST_BYTES if must_grow else sys.maxsize,
            files=list(dict.fromkeys([read.file for read in reads] + [files[shard] for shard in of_patches])),
            owned=owned,
            lost=lost,
        )
        undo.pop_all()  # the run closes them
        return planned


def _bytes_of_patches(patches: Mapping[str, Sequence[Patch]]) -> Counter[int]:
    """Return how many bytes of each shard patches are."""
    nbytes = Counter[int]()
    for patch in chain.from_iterable(patches.values()):
        for part in (patch.codes, patch.values):
            nbytes[part.shard] += part.nbytes
    return nbytes


def _open_files(
    selected: SelectedTensors, shards: Sequence[int], of_patches: Mapping[int, int], owned: ExitStack
) -> Sequence[Source]:
    """Return the files of all shards; those that are read are open, and, with a cache on disk, fetched."""
    opened, options = selected.opened, selected.options
    files = opened.open_files(shards, owned)
    if options.disk_cache is None:
        return files
    nbytes = [
        sum(selected_bytes(header, device.positions[shard], selected.slices) for device in selected.devices)
        + of_patches.get(shard, 0)
        for shard, header in enumerate(opened.headers)
    ]
    with traced(options.trace, "fetch"):
        budget_bytes = options.budget or DEFAULT_BUDGET_BYTES
        return options.disk_cache.fetch(files, nbytes, budget_bytes=budget_bytes, owned=owned)


def plan_prefetch(opened: OpenCheckpoint, cached: Sequence[CachedFile], options: LoadOptions) -> PlannedLoad:
    """Plan to read all files of a checkpoint into their images in a cache, which are released at the end."""
    requests = _requests(opened.files)
    block_bytes = GROUP_BYTES if requests is None else requests.nbytes
    plan = plan_reads(
        [
            FileSelection(header=header, positions=range(len(header)), block_bytes=block_bytes)
            for header in opened.headers
        ],
        slices={},
    )
    with ExitStack() as owned:
        files = opened.open_files(range(len(opened.files)), owned)
        for file in files:
            if isinstance(file, LocalFile):
                read_past_cache(file, resident_fraction(file))
        for image in cached:
            owned.callback(image.release)
        paths = [CacheFillPath(file, image) for file, image in zip(files, cached, strict=True)]
        num_workers = NUM_WORKERS if requests is None else requests.num_in_flight
        budget_bytes = sys.maxsize  # there is no consumer
        executor = _executor(plan, paths, budget_bytes, options, num_workers)
        return PlannedLoad(opened.path, plan, paths, executor, budget_bytes, files=files, owned=owned.pop_all())


@dataclass(kw_only=True)
class DeviceLoad:
    """The tensors of one device, and how they are read for it."""

    selected: DeviceSelection
    """The tensors."""
    accelerator: Accelerator | None
    """The device; None: the CPU."""
    options: LoadOptions
    """Options of the load."""
    delivery: Delivery
    """How the consumer gets the tensors."""
    num_accelerators: int
    """All of them share half of the budget for their slots."""
    budget_bytes: int
    """The load's budget, without the memory of a source behind a network."""
    resident: Mapping[LocalFile, float]
    """The resident fraction of each local file."""
    requests: Requests | None
    """How the files are read if they are behind a network."""
    patches: Mapping[str, Sequence[Patch]]
    """The patches of tensors, by name. Files with such tensors are not mapped."""

    def __post_init__(self) -> None:
        requests, options = self.requests, self.options
        self.num_workers = NUM_WORKERS if requests is None else requests.num_in_flight
        """Threads of the plain executor that read for it."""
        self._slots: StagingSlots | None = None
        self._gds: GdsDevice | None = None
        self.block_bytes = (
            whole_pages(min(GROUP_BYTES, self.budget_bytes // 4)) if requests is None else requests.nbytes
        )
        """Size of its groups, and of requests behind a network."""
        self.staging_bytes = 0
        """Part of the budget that slots of the plain executor use."""
        if (accelerator := self.accelerator) is not None:
            slot_bytes = min(_SLOT_BYTES, self.budget_bytes // (2 * self.num_workers * self.num_accelerators))
            if requests is not None:
                slot_bytes = requests.nbytes
            else:
                self.staging_bytes = slot_bytes * self.num_workers
            self._slots = StagingSlots(accelerator, max(_MIN_SLOT_BYTES, whole_pages(slot_bytes)))
            if options.memory == "gds":
                self._gds = GdsDevice(accelerator)
        if self.delivery.prompt:
            max_bytes = self.selected.total_bytes // _SMALLEST_PARTS if requests is None else requests.nbytes // 4
            self.block_bytes = min(self.block_bytes, whole_pages(max_bytes))

    @property
    def must_grow(self) -> bool:
        """Whether the device's allocator has not enough memory at hand for all tensors, as far as it says so."""
        accelerator = self.accelerator
        if self.selected.total_bytes <= FIRST_BYTES or not isinstance(accelerator, TorchAccelerator):
            return False
        return accelerator.must_grow(self.selected.total_bytes)

    def close(self) -> None:
        """Release staging memory and files, if nothing will be read."""
        with ExitStack() as closing:
            for part in (self._slots, self._gds):
                if part is not None:
                    closing.callback(part.close)

    def read(self, file: Source, header: Header, shard: int) -> _Read:
        """Return what is read of a shard for this device."""
        requests, positions = self.requests, self.selected.positions[shard]
        mapped = None
        if isinstance(file, LocalFile) and self._maps(file):
            if not (self.patches and any(header.names[k] in self.patches for k in positions)):
                mapped = file.map(lazy=not self._populates)
        selection = FileSelection(
            header=header,
            positions=positions,
            block_bytes=self.block_bytes,
            gap_bytes=GAP_BYTES if requests is None else requests.gap_bytes,
            rest_bytes=0 if requests is None or self._slots is not None else PAGE_BYTES,
            image_bytes=self.budget_bytes // 4 if mapped is None else sys.maxsize,
        )
        return _Read(file, self, selection, mapped)

    def read_path(self, read: _Read, cached: CachedFile | None) -> ReadPath:
        """Choose the read path of a file.

        Args:
            read: What is read of it.
            cached: Its image in a cache, if there is one.
        """
        file, fraction, delivery = read.file, UNKNOWN, self.delivery
        if isinstance(file, LocalFile):
            fraction = self.resident[file]
            if read.mapped is not None:
                cold = self._populates and fraction < UNKNOWN
                return MappedPath(read.mapped, delivery, populates=self._populates, cold=cold)
            read_past_cache(file, fraction)
        if self._slots is None:
            return CopiedPath(file, delivery, cached)
        # If the kernel does not report the resident fraction, memory="gds" decides.
        if self._gds is not None and isinstance(file, LocalFile) and fraction <= UNKNOWN:
            direct = self._gds.open(file)
            if direct is not None:
                return GdsPath(self._gds, direct, file, self._slots, delivery)
        return DevicePath(file, self._slots, delivery, cached, trace=self.options.trace)

    def _maps(self, file: LocalFile) -> bool:
        """Return whether a file is to be mapped."""
        kind = self.options.memory
        if self._slots is not None or kind == "copy" or self.options.host_cache is not None:
            return False
        return kind in ("map", "lazy") or file.on_local_filesystem

    @cached_property
    def _populates(self) -> bool:
        """Whether mapped files are read now: not if memory is too small to hold all their pages."""
        if self.options.memory == "lazy":
            return False
        return self.selected.total_bytes <= SMALL_LOAD_BYTES or memory.fits(self.selected.total_bytes)


def _device_loads(
    files: Sequence[Source], selected: SelectedTensors, delivery: Delivery, patches: Mapping[str, Sequence[Patch]]
) -> list[DeviceLoad]:
    """Return the load of each device; all share one budget."""
    devices, options, total_bytes = selected.devices, selected.options, selected.total_bytes
    accelerators = [_accelerator(device.device, options) for device in devices]
    num_accelerators = len(devices) - accelerators.count(None)
    if options.memory == "gds" and devices and not num_accelerators:
        raise DeviceError("memory='gds' reads to an accelerator", requested="cpu", expected="an accelerator")
    max_bytes = ACCELERATOR_BUDGET_BYTES if num_accelerators else DEFAULT_BUDGET_BYTES
    budget_bytes = options.budget or memory.default_budget_bytes(total_bytes, max_bytes=max_bytes)
    requests = _requests(files)
    if requests is not None:
        if options.memory in ("map", "lazy") and options.disk_cache is None:  # what is not in that is streamed
            raise ValueError(f"memory={options.memory!r} maps files of this machine; a URL needs 'auto' or 'copy'")
        # Half of the budget for what the source holds; with accelerators each request has a slot of its size too.
        requests = requests.within(budget_bytes // 2 // (1 + num_accelerators))
        budget_bytes -= requests.buffer_bytes * (1 + num_accelerators)
    resident = {
        file: UNKNOWN if total_bytes <= SMALL_LOAD_BYTES else resident_fraction(file)
        for file in files
        if isinstance(file, LocalFile)
    }
    return [
        DeviceLoad(
            selected=device,
            accelerator=accelerator,
            options=options,
            delivery=delivery,
            num_accelerators=num_accelerators,
            budget_bytes=max(1, budget_bytes),
            resident=resident,
            requests=requests,
            patches=patches,
        )
        for device, accelerator in zip(devices, accelerators, strict=True)
    ]


class _Read(NamedTuple):
    """What is read of one file for one device."""

    file: Source
    """The file."""
    load: DeviceLoad
    """The device."""
    selection: FileSelection
    """The tensors."""
    mapped: MappedFile | None
    """The mapping of the file, if it is mapped."""


def _reads(opened: OpenCheckpoint, files: Sequence[Source], loads: Sequence[DeviceLoad]) -> list[_Read]:
    """Return what is read of each file for each device.

    Raises:
        UnsupportedDtypeError: torch does not have the dtype of a tensor.
    """
    reads = [
        load.read(file, header, shard)
        for shard, (file, header) in enumerate(zip(files, opened.headers, strict=True))
        for load in loads
        if load.selected.positions[shard]
    ]
    for read in reads:
        dtypes, selection = read.selection.header.dtypes, read.selection
        TORCH_DTYPES.require(
            dtypes if selection.is_whole else [dtypes[k] for k in selection.positions], path=opened.path
        )
    return reads


def _executor(
    plan: ReadPlan, paths: Sequence[ReadPath], budget_bytes: int, options: LoadOptions, num_workers: int
) -> EngineExecutor | PlainExecutor:
    """Return the engine if it can move the bytes of all files, otherwise the plain executor."""
    if paths and all(map(_is_native, paths)):
        try:
            return EngineExecutor(paths, len(plan.groups), budget_bytes=budget_bytes, trace=options.trace)
        except OSError:
            pass  # no more threads: the plain executor reads on this one
    return PlainExecutor(paths, num_workers=max(1, min(num_workers, plan.num_reads)), trace=options.trace)


def _is_at_hand(plan: ReadPlan, paths: Sequence[ReadPath], budget_bytes: int) -> bool:
    """Return whether a load is small, out of the page cache, and waits for nothing: to wake a thread takes longer."""
    if plan.total_bytes > _AT_ONCE_BYTES or sum([group.nbytes for group in plan.groups]) > budget_bytes:
        return False
    for path in paths:
        if not (isinstance(path, CopiedPath) and path.is_native and path.image is None):
            return False
        file = path.file
        if file.identity.nbytes > _AT_ONCE_BYTES or file.resident_fraction() != 1:
            return False
    return True


def _held_images(
    cache: FileCache, reads: Sequence[_Read], plan: ReadPlan, patched: Sequence[tuple[Source, int]]
) -> dict[int, CachedFile]:
    """Return holds on the images of files in a cache in memory, by the identity of the file's object.

    Args:
        cache: The cache.
        reads: What is read for tensors.
        plan: Its plan.
        patched: Further files, and how much is read of each.
    """
    files = {id(read.file): read.file for read in reads}
    nbytes = {id(read.file): read.selection.header.data_start for read in reads}  # of a whole file: its header too
    for group in plan.groups:
        nbytes[id(reads[group.selection].file)] += group.payload_bytes
    for file, length in patched:
        files[id(file)] = file
        nbytes[id(file)] = nbytes.get(id(file), 0) + length
    held = cache.hold([(file, nbytes[key]) for key, file in files.items()])
    return {key: one for key, one in zip(files, held, strict=True) if one is not None}


def _budget_bytes(
    plan: ReadPlan, paths: Sequence[ReadPath], loads: Sequence[DeviceLoad], *, keeps: bool, path: str
) -> int:
    """Return the most bytes that may be under way, beside tensors that the consumer keeps.

    Raises:
        HostMemoryError: The tensors that the consumer keeps do not fit into memory.
    """
    budget_bytes = loads[0].budget_bytes if loads else DEFAULT_BUDGET_BYTES
    if not all(map(_is_native, paths)):
        budget_bytes = max(1, budget_bytes - sum(load.staging_bytes for load in loads))
    held = [paths[group.selection].held_bytes(group) for group in plan.groups] if keeps else []
    total_bytes = sum(held)
    if total_bytes <= memory.UNCHECKED_BYTES:
        return budget_bytes
    left = memory.require(total_bytes, path=path)
    if all(nbytes in (0, group.nbytes) for nbytes, group in zip(held, plan.groups, strict=True)):
        return budget_bytes  # what is under way is the tensors' own memory
    return min(budget_bytes, max(1, left))


def _requests(files: Sequence[Source]) -> Requests | None:
    """Return how files behind a network are read; None if there are none."""
    remote = [file.requests for file in files if not isinstance(file, LocalFile) and isinstance(file, RequestedSource)]
    return min(remote, key=lambda requests: requests.nbytes, default=None)


def _accelerator(device: torch.device | Accelerator, options: LoadOptions) -> Accelerator | None:
    if not isinstance(device, torch.device):
        return device
    if device.type == "cpu":
        return None
    if options.streams == "copy":
        return TorchAccelerator(device)
    # Where the runtime was not initialized at the call, its default stream was the current one.
    return TorchAccelerator(device, (options.streams or {}).get(device) or TorchAccelerator.default_stream(device))


def whole_pages(nbytes: int) -> int:
    """Return the size rounded down to whole pages, one page at least."""
    return max(PAGE_BYTES, nbytes // PAGE_BYTES * PAGE_BYTES)


UNKNOWN = 0.5
"""Resident fraction of a file if it is not known. From this fraction on the disk does not limit the rate."""
_AT_ONCE_BYTES = 4 << 20
"""Up to this size a load out of the page cache takes 0.2 ms to map its pages. The engine wakes all of its threads."""
SMALL_LOAD_BYTES = 16 << 20
"""Up to this size a query to the kernel costs more than a read by the slower read path."""


def resident_fraction(file: LocalFile) -> float:
    """Return the fraction of a file in the page cache, from 0 to 1; `UNKNOWN` if the kernel does not report it."""
    fraction = file.resident_fraction()
    return UNKNOWN if fraction is None else fraction


def read_past_cache(file: LocalFile, fraction: float) -> None:
    """Read a cold file past the page cache, unless ranks share the host: the first one fills the cache for all."""
    if fraction < UNKNOWN and not host_is_shared():
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
