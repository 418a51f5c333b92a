"""The changed elements of deltas (`stio.format.delta`) in a load: applied to a group between its reads and its tensors.

An executor moves the bytes of a group out of the files that hold its tensors whole. If tensors of the group have
patches, a `PatchingExecutor` reads those, as many at a time as fit into scratch memory, and the group's read path
writes the elements into the group's memory. So selections and casts see what the delta has saved.

A patch is a prefix sum, so its codes are read from the first one on, even if only a part of the tensor is loaded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

from stio.format import Header
from stio.format.delta import FileRange, Patch
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
from stio.runtime import WorkerPool, memory
from stio.runtime.memory import Region, num_processors
from stio.runtime.reports import Trace, traced
from stio.storage import RequestedSource, Source
from stio.storage.checkpoint import CachedFile, Changes

_MAX_SCRATCH_BYTES = 64 << 20
_BATCH_BYTES = 4 << 20  # as many patches are read at a time, if those of one tensor are not more: they stay in caches
_MAX_THREADS = 8
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
    ) -> SelectedPatches:
        """Return patches with scratch memory of at most a quarter of a budget, or for the longest patch alone."""
        requests = [file.requests.num_in_flight for file, _ in files.values() if isinstance(file, RequestedSource)]
        num_threads = max([min(_MAX_THREADS, num_processors()), *requests])
        longest_bytes = max((_size_of(patch) for patches in by_name.values() for patch in patches), default=0)
        scratch_bytes = max(longest_bytes, min(_MAX_SCRATCH_BYTES, budget_bytes // (4 * num_threads)))
        num_threads = max(1, min(num_threads, budget_bytes // (4 * scratch_bytes))) if by_name else 0
        return cls(by_name, files, scratch_bytes, num_threads)

    @property
    def total_bytes(self) -> int:
        """Scratch memory of all threads."""
        return self.scratch_bytes * self.num_threads

    def read(self, patches: Iterable[Patch], scratch: Region, stopped: Callable[[], bool]) -> dict[FileRange, Region]:
        """Read the codes and values of patches into scratch memory, neighbors in one call.

        Raises:
            Cancelled: `stopped()` came first.
        """
        found = dict[FileRange, Region]()
        used, together = 0, list[FileRange]()
        for part in [*sorted(part for patch in patches for part in (patch.codes, patch.values)), None]:
            if together and not (part and _is_next(together[-1], part)):
                begin, last = together[0], together[-1]
                region = scratch.sub(used, last.offset + last.nbytes - begin.offset)
                self._read(begin.shard, begin.offset, region, stopped)
                for one in together:
                    found[one] = region.sub(one.offset - begin.offset, one.nbytes)
                used, together = used + region.nbytes, []
            if part:
                together.append(part)
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


def _is_next(before: FileRange, after: FileRange) -> bool:
    return before.shard == after.shard and 0 <= after.offset - before.offset - before.nbytes <= _GAP_BYTES


def _size_of(patch: Patch) -> int:
    """Return the most scratch memory that a patch takes."""
    return patch.nbytes + 2 * _GAP_BYTES


def _runs(tensors: Iterable[PatchedTensor], max_bytes: int) -> Iterator[list[PatchedTensor]]:
    """Cut patches into runs that fit into scratch memory; each tensor of a run has the patches that belong to it."""
    run, left = list[PatchedTensor](), max_bytes
    for tensor in tensors:
        patches = list[Patch]()
        for patch in tensor.patches:
            if _size_of(patch) > left:
                yield [*run, tensor._replace(patches=patches)]
                run, patches, left = [], [], max_bytes
            patches.append(patch)
            left -= _size_of(patch)
        run.append(tensor._replace(patches=patches))
    yield run


class PatchingExecutor:
    """An executor whose groups are patched before `take` returns them. With the interface of `EngineExecutor`.

    Args:
        executor: It moves the bytes.
        paths: The read path of each of the plan's selections.
        headers: The header of each of them.
        patches: What is applied.
        trace: Records a span for each piece of the work.
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
        self._workers = WorkerPool("patch")
        self._scratch: list[Region] = []  # that no thread uses
        self.add, self.arrange, self.wake = executor.add, executor.arrange, executor.wake

    def take(self) -> list[Group]:
        """Wait for groups that are complete; empty after `wake` or `stop`.

        Raises:
            FormatError: A patch does not fit its tensor.
            BaseException: The first error of the executor, or of a read, as it was raised.
        """
        groups = self._executor.take()
        if jobs := [(group, tensors) for group in groups for tensors in self._batches(group)]:
            jobs.reverse()  # the last is taken first
            self._workers.run(partial(self._work, jobs), min(len(jobs), self._patches.num_threads))
        return groups

    def stop(self) -> None:
        """End all threads after their current piece, and let `take` return. Callable from any thread."""
        self._workers.stop()
        self._executor.stop()

    def close(self) -> None:
        """Stop, and wait until nothing is under way."""
        self._workers.stop()
        self._executor.close()
        self._workers.join()

    def _batches(self, group: Group) -> Iterator[list[PatchedTensor]]:
        """Return the patched tensors of a group, those with few bytes of patches together."""
        batch, nbytes = list[PatchedTensor](), 0
        for tensor in patched_tensors(group, self._headers[group.selection], self._patches.by_name):
            batch.append(tensor)
            nbytes += sum(map(_size_of, tensor.patches))
            if nbytes >= _BATCH_BYTES:
                yield batch
                batch, nbytes = [], 0
        if batch:
            yield batch

    def _work(self, jobs: list[tuple[Group, list[PatchedTensor]]]) -> None:
        with memory.reporting_shortage():
            scratch = self._scratch.pop() if self._scratch else memory.allocate(self._patches.scratch_bytes)
        for group, tensors in self._workers.items(jobs):
            num_bytes = sum(patch.nbytes for tensor in tensors for patch in tensor.patches)
            with traced(self._trace, "patch", num_bytes=num_bytes, detail=type(self._paths[group.selection]).__name__):
                for run in _runs(tensors, self._patches.scratch_bytes):
                    self._apply(group, run, scratch)
        self._scratch.append(scratch)

    def _apply(self, group: Group, tensors: Sequence[PatchedTensor], scratch: Region) -> None:
        stopped = self._workers.is_stopped
        read = self._patches.read((patch for tensor in tensors for patch in tensor.patches), scratch, stopped)
        for tensor in tensors:
            require_not_stopped(stopped)
            changes = [
                Changes(
                    *(read[patch.codes], patch.code_bytes, read[patch.values], patch.count, patch.item_bytes),
                    path=self._patches.files[patch.codes.shard][0].path,
                )
                for patch in tensor.patches
            ]
            if changes:
                self._paths[group.selection].apply(group, changes, tensor.num_elements, tensor.pieces)
