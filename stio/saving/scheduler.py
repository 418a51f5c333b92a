"""The save's scheduler: blocks of file images filled by copying, written while the next are filled.

Long-lived workers do two kinds of jobs. Where a caller waits for the snapshot, filling comes first: it is complete
before its writing costs anything, and where it does not fit the pool, a worker that finds no free block writes a full
one. Where nobody waits for it, writing comes first, so the disk is never idle and few blocks are touched. The last
block of a file makes it durable. Whoever fails or cancels stops both queues; the run ends when no worker touches a
tensor, a block or a file any more.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Protocol

from stio.device.save_sources import Copy, LazyTensor, Readiness, copy_out, copy_small
from stio.runtime import stats as counters
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled, start_thread
from stio.runtime.pacing import Pacer
from stio.runtime.process import be_nice
from stio.runtime.progress import ProgressEvent
from stio.runtime.trace import Trace
from stio.saving.plan import WriteBlock, WritePlan
from stio.saving.producers import Production
from stio.saving.staging_pool import StagingPool
from stio.storage.base import Sink

__all__ = ["Hasher", "SaveScheduler"]

WRITE_DEPTH = 4
"""So many writes under way reach what the disk gives."""

NUM_WORKERS = WRITE_DEPTH + 2
"""Two more than write, so that a full block is there when a write ends: writes that began together end together, and
where all of them then filled their next block first, the disk had nothing to do for 3 of 30 ms."""

AHEAD_BLOCKS = 4
"""So many full blocks wait for the disk, where nobody waits for the snapshot: one for each write that may end."""

MANY_PIECES = 64
"""A block of more of them is copied piece by piece in one loop."""


class Hasher(Protocol):
    """What `hashlib` and xxhash have in common."""

    def update(self, data: memoryview, /) -> None:
        """Take in bytes."""

    def hexdigest(self) -> str:
        """Return the digest of all of them."""


class _Digest:
    """Hashes one file's blocks in order, though they are written in any."""

    def __init__(self, hasher: Hasher) -> None:
        self.hasher = hasher
        self.next_offset = 0


class SaveScheduler:
    """One save from its first copy to its last durable byte; publishing is the transaction's.

    Args:
        plan: What to write where.
        pool: Staging memory; its condition guards this run too.
        ready: When the devices' tensors may be read.
        on_staged: Called once, on a worker, when every tensor was copied and may change.
        stage_first: Whether the snapshot is more urgent than the disk.
        hasher: Makes one for each file; None: no digests.
        progress: Called with an event at the start and after each block that was written, one call at a time.
        trace: Where spans go.
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
    ) -> None:
        self._sources = plan.sources
        self._shards = plan.shards
        self._blocks = [block for shard in plan.shards for block in shard.blocks]
        self._num_tensors = len(plan.sources)
        self._total_bytes = plan.total_bytes
        self._lazy = any(isinstance(source.data, LazyTensor) for source in plan.sources)
        self._production = Production()
        self._pool = pool
        self._changed = pool.changed
        self._ready = ready
        self._on_staged = on_staged
        self._stage_first = stage_first
        self._progress = progress
        self._trace = trace
        self._pacer = Pacer(pool.block_bytes)
        self._sinks: Sequence[Sink] | None = None
        self._next = self._num_staging = self._num_writing = self._num_taken = self._num_written = 0
        self._full: list[tuple[int, Region]] = []  # a heap: the lowest block is written first, and hashed in order
        self._left = [len(shard.blocks) for shard in plan.shards]
        self._digests = [_Digest(hasher()) for _ in plan.shards] if hasher is not None else None
        self._workers = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._started = perf_counter()
        self._done_bytes = 0
        self._done_tensors = sum(not source.nbytes for source in plan.sources)  # there is nothing to write of those
        self._reporting = threading.Lock()
        self.written_bytes = 0
        """Bytes of the blocks that were written."""
        self.read_bytes = self.used_bytes = 0
        """None; see `stio.runtime.stats`. The pool says what staging memory it holds."""

    def start(self) -> None:
        """Begin to fill blocks on threads of the run's own; `complete` must follow."""
        self._report(None)
        counters.enter(self)
        for k in range(1, 1 + min(NUM_WORKERS - 1, len(self._blocks))):
            with self._changed:
                self._workers += 1
            try:
                start_thread(self._work, name=f"save-{k}")
            except RuntimeError:  # the limit of threads: the one that completes can do it all
                with self._changed:
                    self._workers -= 1
                break

    def write_to(self, sinks: Sequence[Sink]) -> None:
        """Say where the files are; before that nothing is written."""
        with self._changed:
            self._sinks = sinks
            self._changed.notify_all()

    def complete(self) -> list[str] | None:
        """Work along until every file is durable.

        Returns:
            The digest of each file, in the plan's order, if a hasher was given.

        Raises:
            Cancelled: `stop` was called.
            BaseException: The first error of a worker, as it was raised.
        """
        with self._changed:
            self._workers += 1
        self._work()
        self.join()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            if self._stopped:
                raise Cancelled
        finally:
            del error
        return None if self._digests is None else [digest.hasher.hexdigest() for digest in self._digests]

    def stop(self) -> None:
        """Let workers end after their current piece. Callable from any thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        self._production.stop()

    def join(self) -> None:
        """Wait until no worker is left, and give the blocks back."""
        with self._changed:
            self._changed.wait_for(lambda: not self._workers)
            full, self._full = self._full, []
        counters.leave(self)
        self._production.clear()
        self._sources = ()
        for _, region in full:
            self._pool.give_back(region)

    def _work(self) -> None:
        be_nice()
        try:
            while (job := self._take()) is not None:
                number, region = job
                if number < 0:
                    self._stage(-1 - number, region)
                else:
                    self._write(number, region)
        except BaseException as error:
            with self._changed:
                if self._error is None and not isinstance(error, Cancelled):
                    self._error = error
            self.stop()  # an awaitable that another worker waits for among them
        with self._changed:
            self._workers -= 1
            self._changed.notify_all()

    def _take(self) -> tuple[int, Region] | None:
        """Return a block and its memory: to be written, or, numbered from -1 down, to be filled; None at the end."""
        with self._changed:
            while not self._stopped and self._num_written < len(self._blocks):
                may_write = self._may_write()
                if not (may_write and not self._stage_first):
                    region = self._block_to_fill()
                    if region is not None:
                        self._next += 1
                        self._num_staging += 1
                        return -self._next, region
                if may_write:
                    self._num_writing += 1
                    self._num_taken += 1
                    return heapq.heappop(self._full)
                self._changed.wait()
        return None

    def _may_write(self) -> bool:
        """Return whether a full block may be written now. Call it holding the condition."""
        if not self._full or self._sinks is None or self._num_writing == WRITE_DEPTH:
            return False
        # Digests are taken in order: were the places of writers taken by later blocks, the next would find none.
        return self._digests is None or self._full[0][0] == self._num_taken

    def _block_to_fill(self) -> Region | None:
        """Return memory for the next block, None if it is not its turn yet. Call it holding the condition."""
        if self._next == len(self._blocks) or (self._lazy and self._num_staging):
            return None  # what is produced is held one at a time, and in order
        if not self._stage_first and len(self._full) + self._num_staging >= AHEAD_BLOCKS:
            return None
        return self._pool.try_take()

    def _stage(self, number: int, region: Region) -> None:
        block = self._blocks[number]
        start = perf_counter()
        try:
            self._fill(block, region)
        except BaseException:
            self._pool.give_back(region)
            raise
        self._span("stage", start, block)
        with self._changed:
            heapq.heappush(self._full, (number, region))
            self._num_staging -= 1
            staged = self._next == len(self._blocks) and not self._num_staging
            self._changed.notify_all()
        if staged:
            self._sources = ()  # whoever drops a tensor now frees it
            self._on_staged()

    def _fill(self, block: WriteBlock, region: Region) -> None:
        head = block.head(self._shards[block.shard].header)
        if head:
            region.write(0, head)
        sources = self._sources
        if len(block.pieces) > MANY_PIECES and not self._lazy:
            parts = ((sources[number].data, start, at, nbytes) for number, start, at, nbytes, _ in block.pieces)
            copy_out(copy_small(parts, region), self._ready)
            return
        copies: list[Copy] = []
        for piece in block.pieces:
            source, target = sources[piece.source], region.sub(piece.at, piece.nbytes)
            if isinstance(source.data, LazyTensor):
                for copy in self._production.copies(source, piece.start, target):
                    copy_out([copy], None)
                    del copy  # with the tensor in it, before the next one is made
            else:
                copies.append((source.data, piece.start, target))
        copy_out(copies, self._ready)

    def _write(self, number: int, region: Region) -> None:
        block = self._blocks[number]
        assert self._sinks is not None
        sink = self._sinks[block.shard]
        start = perf_counter()
        try:
            if self._digests is not None:
                self._hash(self._digests[block.shard], block, region)
            for at, length in self._pacer.pieces(block.nbytes, self._is_stopped):
                sink.write_from(block.offset + at, region.sub(at, length))
        finally:
            with self._changed:
                self._num_writing -= 1
            self._pool.give_back(region)
        self._span("write", start, block)
        with self._changed:
            if self._stopped:
                return
            self.written_bytes += block.nbytes
            self._left[block.shard] -= 1
            last = not self._left[block.shard]
        if last:
            start = perf_counter()
            sink.finish()
            if self._trace is not None:
                self._trace.add("sync", start, perf_counter(), detail=f"shard {block.shard + 1}")
        with self._changed:
            self._num_written += 1
            self._changed.notify_all()
        self._report(block)

    def _hash(self, digest: _Digest, block: WriteBlock, region: Region) -> None:
        with self._changed:
            # Never a deadlock: blocks are taken in order, so the lowest is in some worker's hands.
            self._changed.wait_for(lambda: digest.next_offset == block.offset or self._stopped)
            if self._stopped:
                raise Cancelled
        start = perf_counter()
        digest.hasher.update(region.sub(0, block.nbytes).view())
        self._span("hash", start, block)
        with self._changed:
            digest.next_offset += block.nbytes
            self._changed.notify_all()

    def _is_stopped(self) -> bool:
        return self._stopped

    def _span(self, name: str, start: float, block: WriteBlock) -> None:
        if self._trace is not None:
            self._trace.add(name, start, perf_counter(), num_bytes=block.nbytes, detail=f"shard {block.shard + 1}")

    def _report(self, block: WriteBlock | None) -> None:
        """Tell the progress: None at the start, then each block that was written."""
        if self._progress is None:
            return
        with self._reporting:
            if block is not None:
                self._done_bytes += sum(piece.nbytes for piece in block.pieces)
                self._done_tensors += sum(piece.ends for piece in block.pieces)
            self._progress(
                ProgressEvent(
                    done_bytes=self._done_bytes,
                    total_bytes=self._total_bytes,
                    done_tensors=self._done_tensors,
                    total_tensors=self._num_tensors,
                    seconds=perf_counter() - self._started,
                )
            )
