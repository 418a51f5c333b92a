"""The scheduler of a save: decides which block of a file image is filled next, and which full block is written.

The engine copies tensors in host memory, and writes local files. A worker, a thread of Python, gives such a block to
the engine and goes on; one worker at a time waits for all blocks that the engine has, without the GIL. The workers do
the rest themselves: tensors on devices, of other layouts, and lazy ones; digests; fsync; destinations that are no local
files; and everything where there is no engine.

Where a caller waits for the snapshot, filling has priority: writes do not delay the snapshot. If the snapshot is larger
than the staging memory, a worker that finds no free block writes a full one. Where the caller waits for the end of the
save, writing has priority: the disk is never idle and few blocks are used. Behind the last block of a file the file is
made durable. The first error or a cancel stops all; the run ends when nothing uses a tensor, a block or a file any
more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any

from stio import native, process
from stio.device import LazyTensor, Readiness, require_values
from stio.format.files import Hasher
from stio.runtime import Cancelled, WorkerPool, mark_progress, memory
from stio.runtime.memory import Region, num_processors
from stio.runtime.reports import ProgressEvent, ProgressReporter, Trace, close_bar, counters, traced
from stio.saving.plan import Run, WriteBlock, WritePlan
from stio.saving.staging_pool import Blocks
from stio.saving.tensors import ProducedTensors
from stio.storage import FileWriter
from stio.storage.commit import LocalFileWriter
from stio.text import counted

WRITE_DEPTH = 4
"""Most writes under way at once; so many reach the rate of the disk."""

NUM_WORKERS = WRITE_DEPTH + 2
"""Most workers; where the engine does the work there are fewer. Two more than write, so that a full block is ready
when a write ends: writes that start together end together."""

AHEAD_BLOCKS = 4
"""Most full blocks that wait for the disk, where no caller waits for the snapshot: one for each write that may end."""

SMALL_BLOCK_BYTES = 2 << 20
"""A save of one block up to this size is copied and written by its own thread: the engine would take longer."""

PIECE_BYTES = 16 << 20
"""Bytes that a worker writes between two checks whether the save was stopped."""

STRIDED_BYTES = 4 << 20
"""The same, of small ranges."""


class SaveScheduler:
    """One save from its first copy to its last durable byte; the commit is the transaction's.

    Args:
        plan: The files and their blocks; of a plan of parts, files with `write_strided`.
        pool: Staging memory, in the order of the blocks; its condition guards this run too.
        stage_first: Whether the snapshot is more urgent than the disk.
        progress: Called with an event at the start and after each block that was written, one call at a time.
        trace: Records spans.
    """

    def __init__(
        self,
        plan: WritePlan,
        pool: Blocks,
        *,
        stage_first: bool = True,
        progress: Callable[[ProgressEvent], object] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._sources = plan.sources
        self._shards = plan.shards
        self._blocks = [block for shard in plan.shards for block in shard.blocks]
        # One block is staged and written by the save's own thread: beside three busy processes a save of four small
        # tensors took 12 to 16 ms so, and 23 to 30 with a worker (medians of 60, five pairs); alone 0.9 of it.
        self._is_single = len(self._blocks) == 1
        self._has_lazy = any(isinstance(source.data, LazyTensor) for source in plan.sources)
        self._produced = ProducedTensors()
        self._pool = pool
        self._changed = pool.changed
        self._transfer: Any = None
        is_small = self._is_single and self._blocks[0].nbytes <= SMALL_BLOCK_BYTES
        if native.available() and not is_small:
            native.count_processors(num_processors)
            with suppress(OSError):  # no more threads
                self._transfer = native.Transfer(max_chunks=WRITE_DEPTH)
        # The function that is passed does not refer to this object, which refers to the workers: see `WorkerPool`.
        self._stops = [self._produced.stop, *([] if self._transfer is None else [self._transfer.stop])]
        self._workers = WorkerPool("save", changed=pool.changed, on_stop=partial(_call_each, self._stops))
        self._num_threads = 0
        self._moving: dict[int, list[Any]] = {}  # groups that the engine has, and the storages that it copies from
        self._moved: list[native.Done] = []  # groups that it has moved
        self._is_taking = False
        self._ready = Readiness()
        self._stage_first = stage_first
        self._progress: ProgressReporter | None = None
        if progress is not None:
            total_bytes = sum(source.nbytes for source in plan.sources)
            self._progress = ProgressReporter(progress, total_bytes=total_bytes, total_tensors=len(plan.sources))
        self._close_bar = partial(close_bar, progress)
        self._trace = trace
        self._writers: Sequence[Any] = ()
        self._num_fills = self._num_filling = 0  # blocks that were begun; those that are being filled
        self._num_writes = self._num_writing = self._num_written = 0
        self._num_finishing = 0  # files
        self._regions: dict[int, Region] = {}  # of blocks that were begun and are not written
        self._full: list[int] = []  # a heap: the lowest block is written first, and hashed in order
        self._left = [len(shard.blocks) for shard in plan.shards]
        self._hashers: list[Hasher] | None = None
        self._in_order = False
        self._is_hashing = False
        self.written_bytes = 0
        """Bytes of the blocks that were written."""
        self.read_bytes = self.used_bytes = 0
        """None; see `stio.runtime.reports.counters`. The pool counts the staging memory."""

    def __repr__(self) -> str:
        state = "staging" if self._sources else "staged"
        written = f"{self._num_written:,} of {counted(len(self._blocks), 'block')} written"
        return f"<SaveScheduler: {state}, {written}>"

    def on_stop(self, stop: Callable[[], None]) -> None:
        """Call `stop` when the run is stopped, or has failed. It must take no lock."""
        self._stops.append(stop)

    def start(self, ready: Readiness | None = None, on_staged: Callable[[], None] = lambda: None) -> None:
        """Begin to fill blocks; `complete` or `stop`, and then `join`, must follow.

        A save of one block needs no other thread than the caller's: it is staged when this returns.

        Args:
            ready: When the devices' tensors may be read.
            on_staged: Called once, on the thread that copied the last tensor, when every tensor was copied and may
                change.
        """
        self._ready, self._on_staged = ready or Readiness(), on_staged
        if self._progress is not None:
            self._progress.report()
        counters.add_run(self)
        # With the engine one worker fills; there are others for fsync, one for each file.
        by_engine = self._transfer is not None and not self._has_lazy and self._pool.allocate == memory.allocate
        if not self._blocks:  # of a plan of parts
            self._on_staged()
        elif self._is_single and not self._has_lazy:
            self._work()
        else:
            self._start_threads(len(self._shards) if by_engine else len(self._blocks))

    def write_to(self, writers: Sequence[FileWriter], hasher: Callable[[], Hasher] | None = None) -> None:
        """Set the files to write to; before this call nothing is written.

        Args:
            writers: One for each file.
            hasher: Makes a hasher for each file; None: no digests.
        """
        with self._changed:
            self._hashers = None if hasher is None else [hasher() for _ in writers]
            self._in_order = hasher is not None or any(writer.is_ordered for writer in writers)
            self._writers = writers
            self._changed.notify_all()
        if not self._is_single and (
            any(block.runs for block in self._blocks) or not isinstance(writers[0], LocalFileWriter)
        ):
            self._start_threads(len(self._blocks))

    def _start_threads(self, num_jobs: int) -> None:
        """Have threads for so many jobs at one time."""
        wanted = min(num_jobs, NUM_WORKERS - 1, len(self._blocks))
        self._num_threads += self._workers.start(self._work, wanted - self._num_threads)

    def complete(self) -> list[str] | None:
        """Work on this thread too, until every file is durable.

        Returns:
            The digest of each file, in the plan's order, if a hasher was given.

        Raises:
            Cancelled: `stop` was called.
            BaseException: The first error of a worker, as it was raised.
        """
        if not self._is_single:  # one block is written at once, and delays no event loop
            process.be_nice()
        self._workers.work_along(self._work)
        self.join()
        self._workers.raise_error()
        return None if self._hashers is None else [hasher.hexdigest() for hasher in self._hashers]

    def stop(self) -> None:
        """Let workers end after their current piece. Callable from any thread."""
        self._workers.stop()

    def is_stopped(self) -> bool:
        """Return whether it was stopped, or has failed: then `complete` raises."""
        return self._workers.stopped

    def join(self) -> None:
        """Wait until no worker is left, and return the blocks to the pool. Idempotent."""
        self._workers.join()
        if self._transfer is not None:
            self._transfer.end()
        counters.remove_run(self)
        self._close_bar()
        self._produced.clear()
        self._sources = ()
        self._moving.clear()
        while self._regions:
            self._pool.give_back(self._regions.popitem()[1])

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            job()
            mark_progress()

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for something to do; return it, None at the end."""
        with self._changed:
            while not self._workers.stopped and self._num_written < len(self._blocks):
                if self._moved:
                    return partial(self._end_move, self._moved.pop(0))
                may_write = self._may_write()
                if self._stage_first or not may_write:
                    take = self._block_to_fill()
                    if take is not None:
                        self._num_fills += 1
                        self._num_filling += 1
                        return partial(self._fill_block, self._num_fills - 1, take)
                if may_write:
                    self._num_writing += 1
                    self._num_writes += 1
                    self._is_hashing = self._hashers is not None
                    return partial(self._write_block, heapq.heappop(self._full))
                if self._moving and not self._is_taking:
                    self._is_taking = True
                    return self._take
                if self._is_single and self._full and not self._writers:
                    return None  # `complete` writes the only block
                self._changed.wait()
        return None

    def _may_write(self) -> bool:
        """Return whether a full block may be written now. The caller holds the condition."""
        if not self._full or not self._writers or self._num_writing == WRITE_DEPTH or self._is_hashing:
            return False
        if self._num_writing + self._num_finishing >= NUM_WORKERS:
            return False  # each may be another open file
        # Later blocks must not occupy all writers before the next one, for which they wait.
        return not self._in_order or self._full[0] == self._num_writes

    def _block_to_fill(self) -> Callable[[], Region] | None:
        """Take memory for the next block, None if it must wait. The caller holds the condition."""
        is_blocked = self._has_lazy and self._num_filling  # lazy tensors are produced one at a time, in order
        is_ahead = not self._stage_first and len(self._full) + self._num_filling >= AHEAD_BLOCKS
        if is_blocked or is_ahead or self._num_fills == len(self._blocks):
            return None
        return self._pool.try_take()

    def _fill_block(self, number: int, take: Callable[[], Region]) -> None:
        block, region = self._blocks[number], take()
        self._regions[number] = region
        start = perf_counter()
        region.write(0, block.head(self._shards[block.shard].header))
        ranges = None if self._transfer is None else native.Ranges()
        storages = self._fill(2 * number, block, region, ranges)
        if ranges is not None and storages:
            self._move(2 * number, ranges, storages, is_urgent=self._stage_first)
            return
        self._span("stage", start, perf_counter(), block)
        self._end_fill(number)

    def _fill(self, group: int, block: WriteBlock, region: Region, ranges: native.Ranges | None) -> list[Any]:
        """Fill a block, except for ranges of a group that the engine is to copy; return what keeps their memory."""
        sources = self._sources
        if not self._has_lazy:
            with process.collection_paused(len(block.pieces)):
                return self._ready.copy_pieces(sources, block.pieces, region, ranges, group)
        copies = []
        for piece in block.pieces:
            source, target = sources[piece.source], region.sub(piece.at, piece.nbytes)
            if isinstance(source.data, LazyTensor):
                for copy in self._produced.copies(source, piece.start, target):
                    Readiness().copy_out([copy])
                    del copy  # with the tensor in it, before the next one is made
            else:
                require_values({source.name: source.data})  # the copy checks it too, and does not know the name
                copies.append((source.data, piece.start, target))
        self._ready.copy_out(copies)
        return []

    def _end_fill(self, number: int) -> None:
        with self._changed:
            heapq.heappush(self._full, number)
            self._num_filling -= 1
            staged = self._num_fills == len(self._blocks) and not self._num_filling
            self._changed.notify_all()
        if staged:
            self._sources = ()  # a tensor that the caller drops now is freed
            self._on_staged()

    def _write_block(self, number: int) -> None:
        block, region = self._blocks[number], self._regions[number]
        writer = self._writers[block.shard]
        if self._hashers is not None:
            self._hash(self._hashers[block.shard], block, region)
        start = perf_counter()
        runs = block.runs or (Run(block.offset, 0, block.nbytes),)
        if self._transfer is not None and isinstance(writer, LocalFileWriter):
            ranges = native.Ranges()
            for run in runs:
                part = region.sub(run.at, run.nbytes * run.num_ranges)
                if run.num_ranges > 1 or not writer.add_range(ranges, 2 * number + 1, run.offset, part):
                    break
            else:
                self._move(2 * number + 1, ranges, [], is_urgent=not self._stage_first)
                return
        for run in runs:
            self._write_run(writer, run, region)
        self._span("write", start, perf_counter(), block)
        self._end_write(number)

    def _write_run(self, writer: Any, run: Run, region: Region) -> None:
        if run.num_ranges == 1:
            for at in range(0, run.nbytes, PIECE_BYTES):
                self._require_going_on()
                writer.write_from(run.offset + at, region.sub(run.at + at, min(PIECE_BYTES, run.nbytes - at)))
            return
        step = max(1, STRIDED_BYTES // run.nbytes)
        for first in range(0, run.num_ranges, step):
            self._require_going_on()
            part = region.sub(run.at + first * run.nbytes, min(step, run.num_ranges - first) * run.nbytes)
            writer.write_strided(run.offset + first * run.stride, part, run.nbytes, run.stride)

    def _end_write(self, number: int) -> None:
        block = self._blocks[number]
        self._pool.give_back(self._regions.pop(number))
        with self._changed:
            self._num_writing -= 1
            if self._workers.stopped:
                raise Cancelled
            self.written_bytes += block.file_bytes
            self._left[block.shard] -= 1
            last = not self._left[block.shard]
            self._num_finishing += last
        if last:
            with traced(self._trace, "sync", detail=f"shard {block.shard + 1}"):
                self._writers[block.shard].finish()
        with self._changed:
            self._num_finishing -= last
            self._num_written += 1
            self._changed.notify_all()
        if self._progress is not None:
            self._progress.report(
                sum(piece.nbytes for piece in block.pieces), sum(piece.ends for piece in block.pieces)
            )

    def _move(self, group: int, ranges: native.Ranges, storages: list[Any], *, is_urgent: bool) -> None:
        """Give a block to the engine: its copies are an even group, its write is an odd one."""
        with self._changed:
            self._transfer.add(ranges)
            self._moving[group] = storages
            if is_urgent and len(self._moving) > 1:
                self._transfer.arrange([one for one in self._moving if one % 2 == group % 2])
            self._changed.notify_all()

    def _take(self) -> None:
        """Wait for blocks that the engine has copied or written, without the GIL."""
        try:
            taken = self._transfer.take()
        except native.Failure as failure:
            raise self._writers[self._blocks[failure.group // 2].shard].error(failure) from None
        if not taken:  # the engine has ended, at the exit of the process
            self._workers.stop()
        with self._changed:
            self._is_taking = False
            self._moved += taken
            for one in taken:
                del self._moving[one.group]
            self._changed.notify_all()

    def _end_move(self, moved: native.Done) -> None:
        number, is_write = divmod(moved.group, 2)
        name, end = ("write", self._end_write) if is_write else ("stage", self._end_fill)
        self._span(name, moved.started, moved.ended, self._blocks[number], lane=f"engine-{moved.thread + 1}")
        if is_write:
            self._writers[self._blocks[number].shard].count(self._blocks[number].file_bytes)
        end(number)

    def _hash(self, hasher: Hasher, block: WriteBlock, region: Region) -> None:
        """Add a block to its file's digest; one worker at a time does."""
        start = perf_counter()
        hasher.update(region.sub(0, block.nbytes).view())
        self._span("hash", start, perf_counter(), block)
        with self._changed:
            self._is_hashing = False
            self._changed.notify_all()

    def _require_going_on(self) -> None:
        mark_progress()
        if self._workers.stopped:
            raise Cancelled

    def _span(self, name: str, start: float, end: float, block: WriteBlock, lane: str | None = None) -> None:
        if self._trace is not None:
            detail = f"shard {block.shard + 1}"
            self._trace.add(name, start, end, num_bytes=block.file_bytes, detail=detail, lane=lane)


def _call_each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()
