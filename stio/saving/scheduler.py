"""The scheduler of a save: workers fill blocks of file images by copying, and write full blocks at the same time.

Each worker does both kinds of jobs. Where a caller waits for the snapshot, filling has priority: writes do not
delay the snapshot. If the snapshot is larger than the staging memory, a worker that finds no free block writes a full
one. Where the caller waits for the end of the save, writing has priority: the disk is never idle and few blocks are
used. The last block of a file makes the file durable. The first error or a cancel stops both kinds of jobs;
the run ends when no worker uses a tensor, a block or a file any more.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter

from stio.device.copy_out import Copy, Readiness, copy_out, copy_pieces
from stio.device.describe import LazyTensor
from stio.device.tensor_memory import require_data
from stio.runtime import stats
from stio.runtime.hashing import Hasher
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled
from stio.runtime.pacing import Pacer
from stio.runtime.process import be_nice
from stio.runtime.progress import ProgressEvent, ProgressReporter, close_bar
from stio.runtime.trace import Trace
from stio.runtime.workers import WorkerPool
from stio.saving.plan import WriteBlock, WritePlan
from stio.saving.producers import ProducedTensors
from stio.saving.staging_pool import StagingPool
from stio.storage.base import FileWriter, OrderedWriter, PartWriter

WRITE_DEPTH = 4
"""Most writes under way at once; so many reach the rate of the disk."""

NUM_WORKERS = WRITE_DEPTH + 2
"""Two more than write, so that a full block is ready when a write ends. Writes that start together end together; where
all workers then filled their next block first, the disk was idle for 3 of 30 ms."""

AHEAD_BLOCKS = 4
"""Most full blocks that wait for the disk, where no caller waits for the snapshot: one for each write that may end."""

STRIDED_BYTES = 4 << 20
"""Bytes of small ranges that are written between two checks whether the save was stopped."""

MANY_PIECES = 64
"""A block of more pieces is copied piece by piece in one loop."""


class SaveScheduler:
    """One save from its first copy to its last durable byte; the commit is the transaction's.

    Args:
        plan: The files and their blocks; of a plan of parts, files that are `PartWriter`s.
        pool: Staging memory; its condition guards this run too.
        ready: When the devices' tensors may be read.
        on_staged: Called once, on a worker, when every tensor was copied and may change.
        stage_first: Whether the snapshot is more urgent than the disk.
        hasher: Makes one for each file; None: no digests.
        progress: Called with an event at the start and after each block that was written, one call at a time.
        trace: Records spans.
        on_stop: Called when the run is stopped, or has failed. It must take no lock.
    """

    def __init__(
        self,
        plan: WritePlan,
        pool: StagingPool,
        *,
        ready: Readiness | None = None,
        on_staged: Callable[[], None] = lambda: None,
        stage_first: bool = True,
        hasher: Callable[[], Hasher] | None = None,
        progress: Callable[[ProgressEvent], object] | None = None,
        trace: Trace | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ) -> None:
        self._sources = plan.sources
        self._shards = plan.shards
        self._blocks = [block for shard in plan.shards for block in shard.blocks]
        self._has_lazy = any(isinstance(source.data, LazyTensor) for source in plan.sources)
        self._produced = ProducedTensors()
        self._pool = pool
        self._changed = pool.changed
        # The function that is passed does not refer to this object, which refers to the workers: see `WorkerPool`.
        self._workers = WorkerPool("save", changed=pool.changed, on_stop=partial(_stopped, self._produced, on_stop))
        self._ready = ready
        self._on_staged = on_staged
        self._stage_first = stage_first
        self._close_bar = partial(close_bar, progress)
        self._progress = ProgressReporter(
            progress,
            total_bytes=sum(source.nbytes for source in plan.sources),
            total_tensors=len(plan.sources),
        )
        self._trace = trace
        self._pacer = Pacer(pool.block_bytes)
        self._writers: Sequence[FileWriter] | None = None
        self._num_fills = self._num_filling = 0  # blocks that were begun; those that are being filled
        self._num_writes = self._num_writing = self._num_written = 0
        self._full: list[tuple[int, Region]] = []  # a heap: the lowest block is written first, and hashed in order
        self._left = [len(shard.blocks) for shard in plan.shards]
        self._hashers = [hasher() for _ in plan.shards] if hasher is not None else None
        self._in_order = hasher is not None  # digests are computed in order
        self._hashed_bytes = [0] * len(plan.shards)
        self.written_bytes = 0
        """Bytes of the blocks that were written."""
        self.read_bytes = self.used_bytes = 0
        """None; see `stio.runtime.stats`. The pool counts the staging memory."""

    def start(self) -> None:
        """Begin to fill blocks on the run's own threads; `complete` or `stop`, and then `join`, must follow."""
        self._progress.report()
        stats.add_run(self)
        self._workers.start(self._work, min(NUM_WORKERS - 1, len(self._blocks)))
        if not self._blocks:  # of a plan of parts
            self._on_staged()

    def write_to(self, writers: Sequence[FileWriter]) -> None:
        """Set the files to write to; before this call nothing is written."""
        in_order = any(isinstance(writer, OrderedWriter) for writer in writers)
        with self._changed:
            self._writers, self._in_order = writers, self._in_order or in_order
            self._changed.notify_all()

    def complete(self) -> list[str] | None:
        """Work on this thread too, until every file is durable.

        Returns:
            The digest of each file, in the plan's order, if a hasher was given.

        Raises:
            Cancelled: `stop` was called.
            BaseException: The first error of a worker, as it was raised.
        """
        be_nice()
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
        with self._changed:
            full, self._full = self._full, []
        stats.remove_run(self)
        self._close_bar()
        self._produced.clear()
        self._sources = ()
        for _, region in full:
            self._pool.give_back(region)

    def _work(self) -> None:
        while (job := self._next_job()) is not None:
            job()

    def _next_job(self) -> Callable[[], None] | None:
        """Wait for a block to fill or to write; return what to do with it, None at the end."""
        with self._changed:
            while not self._workers.stopped and self._num_written < len(self._blocks):
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
                    return partial(self._write_block, *heapq.heappop(self._full))
                self._changed.wait()
        return None

    def _may_write(self) -> bool:
        """Return whether a full block may be written now. The caller holds the condition."""
        if not self._full or self._writers is None or self._num_writing == WRITE_DEPTH:
            return False
        # Later blocks must not occupy all writers before the next one, for which they wait.
        return not self._in_order or self._full[0][0] == self._num_writes

    def _block_to_fill(self) -> Callable[[], Region] | None:
        """Take memory for the next block, None if it must wait. The caller holds the condition."""
        if self._num_fills == len(self._blocks):
            return None
        # Lazy tensors are produced one at a time, in order. Copies of many pieces hold the GIL: two workers would only
        # wait for each other, and let others wait.
        is_alone = self._has_lazy or len(self._blocks[self._num_fills].pieces) > MANY_PIECES
        if is_alone and self._num_filling:
            return None
        if not self._stage_first and len(self._full) + self._num_filling >= AHEAD_BLOCKS:
            return None
        return self._pool.try_take()

    def _fill_block(self, number: int, take: Callable[[], Region]) -> None:
        block, region = self._blocks[number], take()
        start = perf_counter()
        try:
            self._fill(block, region)
        except BaseException:
            self._pool.give_back(region)
            raise
        self._span("stage", start, block)
        with self._changed:
            heapq.heappush(self._full, (number, region))
            self._num_filling -= 1
            staged = self._num_fills == len(self._blocks) and not self._num_filling
            self._changed.notify_all()
        if staged:
            self._sources = ()  # a tensor that the caller drops now is freed
            self._on_staged()

    def _fill(self, block: WriteBlock, region: Region) -> None:
        head = block.head(self._shards[block.shard].header)
        if head:
            region.write(0, head)
        sources = self._sources
        if len(block.pieces) > MANY_PIECES and not self._has_lazy:
            copy_pieces(sources, block.pieces, region, self._ready)
            return
        copies: list[Copy] = []
        for piece in block.pieces:
            source, target = sources[piece.source], region.sub(piece.at, piece.nbytes)
            if isinstance(source.data, LazyTensor):
                for copy in self._produced.copies(source, piece.start, target):
                    copy_out([copy], None)
                    del copy  # with the tensor in it, before the next one is made
            else:
                require_data(source.name, source.data)  # the copy checks it too, and does not know the name
                copies.append((source.data, piece.start, target))
        copy_out(copies, self._ready)

    def _write_block(self, number: int, region: Region) -> None:
        block = self._blocks[number]
        assert self._writers is not None
        writer = self._writers[block.shard]
        start = perf_counter()
        try:
            if self._hashers is not None:
                self._hash(self._hashers[block.shard], block, region)
            if block.runs:
                self._write_runs(writer, block, region)
            else:
                for at, length in self._pacer.pieces(block.nbytes, self._workers.is_stopped):
                    writer.write_from(block.offset + at, region.sub(at, length))
        finally:
            with self._changed:
                self._num_writing -= 1
            self._pool.give_back(region)
        self._span("write", start, block)
        with self._changed:
            if self._workers.stopped:
                return
            self.written_bytes += block.file_bytes
            self._left[block.shard] -= 1
            last = not self._left[block.shard]
        if last:
            start = perf_counter()
            writer.finish()
            if self._trace is not None:
                self._trace.add("sync", start, perf_counter(), detail=f"shard {block.shard + 1}")
        with self._changed:
            self._num_written += 1
            self._changed.notify_all()
        self._progress.report(sum(piece.nbytes for piece in block.pieces), sum(piece.ends for piece in block.pieces))

    def _write_runs(self, writer: FileWriter, block: WriteBlock, region: Region) -> None:
        """Write a block of a plan of parts."""
        assert isinstance(writer, PartWriter)
        for run in block.runs:
            if run.num_ranges == 1:
                for at, length in self._pacer.pieces(run.nbytes, self._workers.is_stopped):
                    writer.write_from(run.offset + at, region.sub(run.at + at, length))
                continue
            step = max(1, STRIDED_BYTES // run.nbytes)
            for first in range(0, run.num_ranges, step):
                if self._workers.stopped:
                    return
                part = region.sub(run.at + first * run.nbytes, min(step, run.num_ranges - first) * run.nbytes)
                writer.write_strided(run.offset + first * run.stride, part, run.nbytes, run.stride)

    def _hash(self, hasher: Hasher, block: WriteBlock, region: Region) -> None:
        """Add a block to its file's digest, once all blocks before it were added."""
        hashed_bytes = self._hashed_bytes
        with self._changed:
            # Never a deadlock: writes begin in order, so some worker has the lowest block.
            self._changed.wait_for(lambda: hashed_bytes[block.shard] == block.offset or self._workers.stopped)
            if self._workers.stopped:
                raise Cancelled
        start = perf_counter()
        hasher.update(region.sub(0, block.nbytes).view())
        self._span("hash", start, block)
        with self._changed:
            hashed_bytes[block.shard] += block.nbytes
            self._changed.notify_all()

    def _span(self, name: str, start: float, block: WriteBlock) -> None:
        if self._trace is not None:
            self._trace.add(name, start, perf_counter(), num_bytes=block.file_bytes, detail=f"shard {block.shard + 1}")


def _stopped(produced: ProducedTensors, on_stop: Callable[[], None]) -> None:
    produced.stop()
    on_stop()
