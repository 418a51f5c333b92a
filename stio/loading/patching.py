"""The changed elements of deltas (`stio.format.delta`) in a load: applied to a group between its reads and its tensors.

An executor moves the bytes of a group out of the files that hold its tensors whole. If tensors of the group have
patches, threads of a `PatchingExecutor` read those, as many at a time as fit into scratch memory, and its read path
writes the elements into the group's memory. So selections and casts see what the delta has saved. A patch that is
longer than the scratch memory is read and applied in parts.

A patch is a prefix sum, so its codes are read from the first one on, even if only a part of the tensor is loaded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

import numpy as np

from stio.errors import FormatError
from stio.format import Header
from stio.format.delta import Patch
from stio.loading.engine import EngineExecutor
from stio.loading.plain import PlainExecutor
from stio.loading.plan import Block, Group
from stio.loading.read_paths import (
    PIECE_BYTES,
    ReadPath,
    contiguous,
    fill_image,
    image_regions,
    read_ranges,
    reads_of,
    require_not_stopped,
)
from stio.process import Condition
from stio.runtime import WorkerPool, memory
from stio.runtime.memory import Region, num_processors
from stio.runtime.reports import Trace, traced
from stio.storage import RequestedSource, Source
from stio.storage.checkpoint import CachedFile, Changes, apply_changes

_MIN_SCRATCH_BYTES = 4096  # room for some elements of any dtype
_MAX_SCRATCH_BYTES = 64 << 20
_BATCH_BYTES = 4 << 20  # as many patches are read at a time, if those of one tensor are not more: they stay in caches
_MAX_THREADS = 8
_MAX_THREADS_WITH_SLOTS = 4  # as many as copy to a device from there
_GAP_BYTES = 64  # longest gap between ranges that are read in one call: what aligns tensors in a file


class PatchedTensor(NamedTuple):
    """A tensor of a group that has patches."""

    num_elements: int
    """Number of elements of the whole tensor."""
    pieces: Sequence[tuple[int, int, int]]
    """What the group has of it: first element, number of elements, offset in the image. Ascending."""
    patches: Sequence[Patch]
    """Its patches, the oldest first."""


def patched_tensors(group: Group, header: Header, patches: Mapping[str, Sequence[Patch]]) -> Iterator[PatchedTensor]:
    """Return the tensors of a group that have patches, and where their elements are in the group's image.

    Args:
        group: The group.
        header: That of its file.
        patches: By name, the patches of all tensors.
    """
    runs: list[tuple[int, int, int]] = []  # blocks may end within an element
    for block in group.blocks:
        for offset, at, length in contiguous(block):
            last = runs[-1] if runs else (-1, 0, 0)
            if (offset, at) == (last[0] + last[2], last[1] + last[2]):
                runs[-1] = *last[:2], last[2] + length
            else:
                runs.append((offset, at, length))
    if group.sliced and runs:  # a dense image begins at a page of the file, before the part
        offset, at, length = runs[0]
        before = max(0, group.offsets[0] - at)
        runs[0] = offset + before, at + before, length - before
    ends = [offset + length for offset, _, length in runs]
    for name in group.names:
        if name not in patches:
            continue
        row, item_bytes = header.positions[name], patches[name][0].item_bytes
        begin, end = header.data_start + header.begins[row], header.data_start + header.ends[row]
        pieces = []
        for offset, at, length in islice(runs, bisect_right(ends, begin), None):
            if offset >= end:
                break
            first = max(0, -(-(offset - begin) // item_bytes))
            stop = (min(end, offset + length) - begin) // item_bytes
            if first < stop:
                pieces.append((first, stop - first, at + begin + first * item_bytes - offset))
        if pieces:  # else an empty slice
            yield PatchedTensor((end - begin) // item_bytes, pieces, patches[name])


@dataclass(frozen=True, slots=True)
class SelectedPatches:
    """The patches of what a load reads."""

    by_name: Mapping[str, Sequence[Patch]]
    """By the name of the tensor, the oldest first."""
    files: Mapping[int, tuple[Source, CachedFile | None]]
    """By shard, the files that hold them, and those in a cache."""
    scratch_bytes: int
    """Scratch memory of each thread."""
    num_threads: int
    """Most threads that apply them."""

    @classmethod
    def within(
        cls,
        budget_bytes: int,
        by_name: Mapping[str, Sequence[Patch]],
        files: Mapping[int, tuple[Source, CachedFile | None]],
        paths: Sequence[ReadPath],
    ) -> SelectedPatches:
        """Return patches with scratch memory of at most a quarter of a budget; slots of a device have their size."""
        num_threads = min(_MAX_THREADS, num_processors())
        if any(path.slots is not None for path in paths):
            num_threads = min(_MAX_THREADS_WITH_SLOTS, num_threads)
        else:
            requests = [file.requests.num_in_flight for file, _ in files.values() if isinstance(file, RequestedSource)]
            num_threads = max([num_threads, *requests])
        scratch_bytes = min(_MAX_SCRATCH_BYTES, budget_bytes // (4 * num_threads))
        return cls(by_name, files, max(_MIN_SCRATCH_BYTES, scratch_bytes), num_threads if by_name else 0)

    @property
    def total_bytes(self) -> int:
        """Scratch memory of all threads."""
        return self.scratch_bytes * self.num_threads

    def read(
        self, ranges: Sequence[tuple[int, int, int]], scratch: Region, stopped: Callable[[], bool]
    ) -> list[Region]:
        """Read ranges of files (shard, offset, length) into scratch memory, neighbours in one call.

        Raises:
            Cancelled: `stopped()` came first.
        """
        found = [Region(0, 0)] * len(ranges)
        order = sorted(range(len(ranges)), key=ranges.__getitem__)
        used = begin = end = 0
        shard: int | None = None
        joined: list[list[int]] = []
        for k in order:
            number, offset, nbytes = ranges[k]
            if number != shard or not 0 <= offset - end <= _GAP_BYTES:
                joined.append([])
                shard, begin = number, offset
            joined[-1].append(k)
            end = offset + nbytes
        for together in joined:
            shard, begin, _ = ranges[together[0]]
            end = sum(ranges[together[-1]][1:])
            region = scratch.sub(used, end - begin)
            self._read(shard, begin, region, stopped)
            for k in together:
                found[k] = region.sub(ranges[k][1] - begin, ranges[k][2])
            used += end - begin
        return found

    def _read(self, shard: int, offset: int, target: Region, stopped: Callable[[], bool]) -> None:
        source, cached = self.files[shard]
        block = Block(0, offset, target.nbytes, 0)
        if cached is not None and fill_image(source, cached.image, block, stopped):
            for at, region in image_regions(cached.image, block):
                memory.move(target.address + at, region.address, region.nbytes)
            return
        max_bytes = target.nbytes if isinstance(source, RequestedSource) else PIECE_BYTES
        for read in reads_of(block, max_bytes):
            require_not_stopped(stopped)
            read_ranges(source, read, target, 0)


def _size_of(patch: Patch) -> int:
    """Return the most scratch memory that a patch takes."""
    return patch.codes_nbytes + patch.values_nbytes + 2 * _GAP_BYTES


def _ranges_of(patch: Patch) -> list[tuple[int, int, int]]:
    return [
        (patch.codes_shard, patch.codes_offset, patch.codes_nbytes),
        (patch.values_shard, patch.values_offset, patch.values_nbytes),
    ]


class PatchingExecutor:
    """Moves the bytes of a load by another executor, and applies patches to the groups that have some.

    Args:
        executor: Moves the bytes; it is closed with this one.
        paths: The read path of each of the plan's selections.
        headers: The header of each of them.
        patches: What is applied.
        trace: Records a span for each group.
    """

    def __init__(
        self,
        executor: EngineExecutor | PlainExecutor,
        paths: Sequence[ReadPath],
        headers: Sequence[Header],
        patches: SelectedPatches,
        *,
        trace: Trace | None = None,
    ) -> None:
        self.name = executor.name
        self._executor = executor
        self._paths = paths
        self._headers = headers
        self._patches = patches
        self._trace = trace
        self._changed = Condition()
        self._workers = WorkerPool("patch", changed=self._changed, on_stop=executor.wake)
        self._num_threads = 0
        self._unpatched: deque[Group] = deque()
        self._done: list[Group] = []
        self._scratch: list[Region] = []  # of the host, that no thread uses
        self.add, self.arrange, self.wake = executor.add, executor.arrange, executor.wake

    def take(self) -> list[Group]:
        """Wait for groups that are complete; empty after `wake` or `stop`.

        Raises:
            FormatError: A patch does not fit its tensor.
            BaseException: The first error of the executor, or of a read, as it was raised.
        """
        moved = [] if self._done else self._executor.take()
        complete: list[Group] = []
        patched: list[Group] = []
        for group in moved:
            (complete if self._patches.by_name.keys().isdisjoint(group.names) else patched).append(group)
        if patched:
            with self._changed:
                self._unpatched.extend(patched)
                self._changed.notify_all()
            if not self._num_threads:
                self._num_threads = self._workers.start(self._work, self._patches.num_threads)
            while not self._num_threads and self._unpatched:  # the system refuses new threads
                self._patch(self._unpatched.popleft())
        if self._workers.stopped:
            self._workers.join()
            self._workers.raise_error()
        with self._changed:
            done, self._done = self._done, []
        return complete + done

    def stop(self) -> None:
        """End all threads after their current piece, and let `take` return. Callable from any thread."""
        self._workers.stop()
        self._executor.stop()

    def close(self) -> None:
        """Stop, and wait until nothing is under way."""
        self._workers.stop()
        self._executor.close()
        self._workers.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._unpatched) or self._workers.stopped)
                if self._workers.stopped:
                    return
                group = self._unpatched.popleft()
            self._patch(group)

    def _patch(self, group: Group) -> None:
        path = self._paths[group.selection]
        with traced(self._trace, "patch", num_bytes=group.payload_bytes, detail=type(path).__name__):
            slots, nbytes = path.slots, self._patches.scratch_bytes
            scratch = self._host_scratch() if slots is None else slots.take()
            used = scratch.sub(0, min(nbytes, scratch.nbytes))
            _Patching(group, path, self._patches, used, self._workers.is_stopped).run(self._headers[group.selection])
            free = self._scratch.append if slots is None else slots.give
            free(scratch)  # not after an error: a device may read it
        with self._changed:
            self._done.append(group)
        self._executor.wake()

    def _host_scratch(self) -> Region:
        try:
            return self._scratch.pop()
        except IndexError:
            with memory.reporting_shortage():
                return memory.allocate(self._patches.scratch_bytes)


@dataclass(frozen=True, slots=True)
class _Patching:
    """The patches of one group on their way into its memory."""

    group: Group
    path: ReadPath
    patches: SelectedPatches
    scratch: Region
    stopped: Callable[[], bool]

    def run(self, header: Header) -> None:
        """Apply all patches of the group, as many together as fit into the scratch memory."""
        batch: list[tuple[PatchedTensor, list[Patch]]] = []
        left = self.scratch.nbytes
        for tensor in patched_tensors(self.group, header, self.patches.by_name):
            if self.scratch.nbytes - left >= _BATCH_BYTES:
                self._apply(batch)
                batch, left = [], self.scratch.nbytes
            batch.append((tensor, []))
            for patch in tensor.patches:
                size = _size_of(patch)
                if size > left:
                    self._apply(batch)
                    batch, left = [(tensor, [])], self.scratch.nbytes
                if size > left:
                    self._apply_in_parts(tensor, patch)
                else:
                    batch[-1][1].append(patch)
                    left -= size
        self._apply(batch)

    def _apply(self, batch: Sequence[tuple[PatchedTensor, Sequence[Patch]]]) -> None:
        ranges = [one for _, patches in batch for patch in patches for one in _ranges_of(patch)]
        regions = iter(self.patches.read(ranges, self.scratch, self.stopped))
        for tensor, patches in batch:
            changes = [
                Changes(next(regions), patch.code_bytes, next(regions), patch.count, patch.item_bytes)
                for patch in patches
            ]
            if not changes:
                continue
            require_not_stopped(self.stopped)
            try:
                self.path.apply(self.group, changes, tensor.num_elements, tensor.pieces)
            except FormatError:
                for one, patch in zip(changes, patches, strict=True):
                    self._check(one, tensor.num_elements, patch)
                raise

    def _check(self, changes: Changes, num_elements: int, patch: Patch) -> None:
        """Raise the error of a patch with the path of its delta, if it has one."""
        try:
            apply_changes([changes], num_elements, [])
        except FormatError as error:
            raise self._error(patch, num_elements, error.message) from None

    def _error(self, patch: Patch, num_elements: int, message: str) -> FormatError:
        expected = f"{patch.count:,} of {num_elements:,} elements"
        return FormatError(message, path=self.patches.files[patch.codes_shard][0].path, expected=expected)

    def _apply_in_parts(self, tensor: PatchedTensor, patch: Patch) -> None:
        """Apply a patch that is longer than the scratch memory."""
        width, item_bytes, largest = patch.code_bytes, patch.item_bytes, (1 << 8 * patch.code_bytes) - 1
        step = (self.scratch.nbytes - 2 * _GAP_BYTES) // (width + item_bytes)
        num_codes = patch.codes_nbytes // width
        code = value = first = 0  # the next code, the next value, and the element where the next gap begins
        ends_well = True
        while code < num_codes:
            num = min(step, num_codes - code)
            codes = self.scratch.sub(0, num * width)
            begin = patch.codes_offset + code * width
            self.patches.read([(patch.codes_shard, begin, num * width)], codes, self.stopped)
            gaps = np.frombuffer(codes.view(), "u1" if width == 1 else "<u2")
            elements = np.flatnonzero(gaps < largest)
            count, ends_well = len(elements), len(elements) > 0
            stop = int(elements[-1]) + 1 if ends_well else num
            behind = first + int(gaps[:stop].sum(dtype=np.int64)) + count
            if value + count > patch.count or behind > tensor.num_elements:
                break
            pieces = _pieces_between(tensor.pieces, first, behind, item_bytes) if count else []
            if pieces:
                begin, nbytes = patch.values_offset + value * item_bytes, count * item_bytes
                values = self.scratch.sub(-(-codes.nbytes // _GAP_BYTES) * _GAP_BYTES, nbytes)
                self.patches.read([(patch.values_shard, begin, nbytes)], values, self.stopped)
                part = Changes(codes.sub(0, stop * width), width, values, count, item_bytes)
                self.path.apply(self.group, [part], behind - first, pieces)
            first, code, value = behind, code + stop, value + count
        if code < num_codes or value != patch.count or not ends_well:
            message = "the positions of a delta lead past the end of its tensor, or are not as many as its values"
            raise self._error(patch, tensor.num_elements, message)


def _pieces_between(
    pieces: Sequence[tuple[int, int, int]], first: int, stop: int, item_bytes: int
) -> list[tuple[int, int, int]]:
    """Return what pieces have of the elements from `first` to `stop`, counted from `first`."""
    found = []
    for begin, number, at in pieces:
        low, high = max(begin, first), min(begin + number, stop)
        if low < high:
            found.append((low - first, high - low, at + (low - begin) * item_bytes))
    return found
