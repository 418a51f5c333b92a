"""The scheduler of a load: gives blocks to workers and groups to the consumer, within one budget of bytes.

Workers take blocks in the plan's order. A group's memory counts against the budget from the moment when its first block
is taken until its last user releases it: the workers that read into it and deliver it and, with `hold`, the consumer.
The worker that reads the last block of a group makes its tensors and delivers them: one thread switch for each group,
and not for each block or tensor. An error or a cancel ends the queue; `run` returns when no worker and no copy touches
a buffer any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from time import perf_counter
from typing import Protocol

from stio.device.base import LoadedGroup
from stio.loading.cache.file_image import CachedFile
from stio.loading.plan import Block, Group, ReadPlan
from stio.runtime import stats
from stio.runtime.limits import checked_size
from stio.runtime.locks import Condition
from stio.runtime.process import be_nice
from stio.runtime.progress import ProgressEvent, ProgressReporter, close_bar
from stio.runtime.trace import Trace
from stio.runtime.workers import WorkerPool
from stio.storage.base import RequestedSource, Source

_SHOWN_SECONDS = 1e-4
"""Waits for a slot that are shorter are not recorded: taking a free slot takes as long."""


class ReadPath(Protocol):
    """How one file is read for one device (see `stio.loading.read_paths`). Called by several workers at once."""

    label: str
    """Name of its reads in a trace."""

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> float | None:
        """Read a block into the memory of its group. Blocks; may return early if `stopped()`.

        Returns:
            Seconds that it waited for staging memory; None if it uses none.
        """

    def complete(self, block: Block, arrived: Callable[[Block], None]) -> None:
        """Call `arrived` with a block that was read, when its copies are submitted.

        The thread may report blocks of other threads, and another thread may report this one.
        """

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Make the tensors of a group. All its blocks have been read, and their copies submitted."""

    def budget_bytes(self, group: Group) -> int:
        """Return how much of the load's budget a group uses while it is under way."""

    def held_bytes(self, group: Group) -> int:
        """Return how much host memory the tensors of a group will hold; pages of the page cache do not count."""

    def close(self) -> None:
        """Wait for copies under way, and release memory. No worker may be in a method."""


class LoadScheduler:
    """One load from its first block to its last tensor.

    Args:
        plan: The reads, in their order.
        paths: The read path of each of the plan's selections; closed when the load has ended.
        deliver: Called on a worker with a group and its tensors. It may be called by several workers at once.
        hold: The budget of a group is released only when the consumer calls `release` too (streams).
        on_blocked: Called, under the scheduler's lock, when `is_blocked` may have become true. It must take no lock.
        budget_bytes: See `Budget`.
        num_workers: Threads that read, the thread that calls `run` among them.
        files: Files that must be unchanged at the end.
        owned: Closed when the load has ended.
        cached_files: Files in a cache that the load uses; released when the load has ended.
        progress: Called with an event at the start and after each group, one call at a time.
        trace: Records the spans of the load.
    """

    def __init__(
        self,
        plan: ReadPlan,
        paths: Sequence[ReadPath],
        *,
        deliver: Callable[[Group, LoadedGroup], None],
        hold: bool = False,
        on_blocked: Callable[[], None] = lambda: None,
        budget_bytes: int,
        num_workers: int,
        files: Sequence[Source] = (),
        owned: ExitStack | None = None,
        cached_files: Sequence[CachedFile] = (),
        progress: Callable[[ProgressEvent], object] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.plan = plan
        """See above."""
        self._paths = paths
        self._deliver = deliver
        self.budget = Budget(budget_bytes)
        """Guarded by the scheduler's lock."""
        self._num_workers = max(1, min(num_workers, plan.num_reads))
        self._files = files
        self._owned = owned
        self._cached_files = cached_files
        self._progress = ProgressReporter(progress, total_bytes=plan.total_bytes, total_tensors=plan.num_tensors)
        self._close_bar = partial(close_bar, progress)
        self._trace = trace
        self._changed = Condition()
        self._workers = WorkerPool("read", changed=self._changed)
        self._waiting: deque[Group] = deque(plan.groups)
        self._blocks: deque[Block] = deque()
        self._rank: dict[int, int] = {}
        self._num_left = [max(1, len(group.blocks)) for group in plan.groups]
        # A thread may be suspended after its last use of a group, while its frame still refers to the group's memory.
        self._num_users = [num_left + 1 for num_left in self._num_left]
        self._hold = hold
        self._read_groups: set[int] = set()  # that no worker uses any more
        self._consumed_groups: set[int] = set()  # that the consumer has released
        self._on_blocked = on_blocked
        self._blocked = False  # whether a worker waits for budget
        self._discarded_groups: set[int] = set()
        self._reorderings: deque[Callable[[], None]] = deque()
        self.read_bytes = 0
        """Bytes of the blocks that were read."""
        self.written_bytes = 0
        """Always 0; for `stio.runtime.stats`."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken from the budget."""
        return self.budget.used_bytes

    def describe(self) -> str:
        """Return number of bytes and tensors and the read paths, for the log."""
        used = sorted({type(self._paths[group.selection]).__name__ for group in self.plan.groups}) or ["nothing"]
        return f"{self.plan.total_bytes:,} bytes of {self.plan.num_tensors:,} tensors by {', '.join(used)}"

    def run(self) -> None:
        """Read and deliver all groups, on this thread and others; then check that the files are unchanged.

        When this returns or raises, no thread and no copy touches a buffer.

        Raises:
            Cancelled: `stop` was called.
            ChangedDuringReadError: A file was changed since it was opened.
            BaseException: The first error of a worker, as it was raised.
        """
        with ExitStack() as closing:
            closing.callback(self._close_bar)
            if self._owned is not None:
                closing.push(self._owned)
            for cached in self._cached_files:
                closing.callback(cached.release)
            for path in self._paths:  # closed before the cached files are released: copies read those
                closing.callback(path.close)
            stats.add_run(self)
            closing.callback(stats.remove_run, self)
            self._progress.report()
            self._workers.start(self._work, self._num_workers - 1)
            be_nice()  # after the start of the threads, which inherit the priority and lower it once more
            self._workers.work_along(self._work)
            self._workers.join()
            self._workers.raise_error()
            self._require_unchanged()

    def _require_unchanged(self) -> None:
        """Require that all files are unchanged; those behind a network are looked at together."""
        left = iter(list(self._files))

        def work() -> None:
            while (file := next(left, None)) is not None:  # one step: several workers call it
                file.check_unchanged()

        num_workers = sum(isinstance(file, RequestedSource) for file in self._files)
        WorkerPool("check").run(work, max(1, min(num_workers, self._num_workers)))

    def stop(self) -> None:
        """End the workers after their current piece. Never blocks for long; callable from any thread."""
        self._workers.stop()

    def release(self, group: Group) -> None:
        """Release a group for the consumer, with `hold`. Callable from any thread; takes no lock. Idempotent."""
        self._consumed_groups.add(group.index)
        self._free(group)

    def _release_use(self, group: Group) -> None:
        """Release a group for one use by a worker."""
        with self._changed:
            self._num_users[group.index] -= 1
            if self._num_users[group.index]:
                return
            self._read_groups.add(group.index)
        self._free(group)

    def _free(self, group: Group) -> None:
        """Free the budget of a group that is not used any more."""
        if group.index in self._read_groups and (not self._hold or group.index in self._consumed_groups):
            self.budget.release(group.index)
            self._changed.wake()

    def promote(self, names: Iterable[str]) -> None:
        """Move the groups with these names before all others that have not started, in the plan's order.

        Callable from any thread; takes no lock.
        """
        promoted = set(names)

        def reorder() -> None:
            first = [group for group in self._waiting if not promoted.isdisjoint(group.names)]
            chosen = {group.index for group in first}
            self._waiting = deque([*first, *(group for group in self._waiting if group.index not in chosen)])

        self._reorderings.append(reorder)
        self._blocked = False  # before the workers look again
        self._changed.wake()

    def is_blocked(self, group: Group) -> bool:
        """Return whether a group has not started, and the first of those that have not waits for budget.

        With `hold`, it may wait until the consumer releases other groups. Callable from any thread; takes no lock.
        """
        return self._blocked and not self.budget.holds(group.index)

    def discard(self, group: Group) -> None:
        """Do not read a group, unless its read has started. Callable from any thread; takes no lock. Idempotent."""
        self._discarded_groups.add(group.index)
        self._changed.wake()

    def arrange(self, order: Iterable[int]) -> None:
        """Read the remaining blocks in this order of groups; it must have the indices of all groups.

        The remaining blocks of a started group are reordered too: it may be one large tensor that nothing waits for.
        Callable from any thread; takes no lock.
        """
        rank = {index: k for k, index in enumerate(dict.fromkeys(order))}

        def reorder() -> None:
            self._rank = rank
            self._waiting = deque(sorted(self._waiting, key=lambda group: rank[group.index]))
            self._blocks = deque(sorted(self._blocks, key=lambda block: rank[block.group]))

        self._reorderings.append(reorder)
        self._changed.wake()

    def is_stopped(self) -> bool:
        """Return whether workers should end."""
        return self._workers.stopped

    def _work(self) -> None:
        while (block := self._take()) is not None:
            self._read(block)

    def _take(self) -> Block | None:
        """Return the next block, if necessary after a wait for budget; None if no block is left."""
        waits_since = 0.0
        with self._changed:
            while not self._workers.stopped:
                while self._reorderings:
                    self._reorderings.popleft()()
                if self._blocks and not self._is_overtaken():
                    return self._next_block(waits_since)
                if not self._waiting:
                    return None
                group = self._waiting[0]
                if group.index in self._discarded_groups:
                    self._waiting.popleft()
                    continue
                if self.budget.try_acquire(group.index, self._paths[group.selection].budget_bytes(group)):
                    self._waiting.popleft()
                    self._blocked = False
                    # A group of empty tensors has no reads; an empty block makes a worker deliver it.
                    blocks = group.blocks or [Block(group.index, max(group.offset, 0), 0, 0)]
                    self._blocks.extendleft(reversed(blocks))
                    self._changed.notify_all()
                    continue
                if self._blocks:
                    return self._next_block(waits_since)
                waits_since = waits_since or perf_counter()
                self._blocked = True
                self._on_blocked()
                self._changed.wait()
        return None

    def _next_block(self, waits_since: float) -> Block:
        """Take the first block; record the wait for budget before it, if there was one."""
        if waits_since and self._trace is not None:
            self._trace.add("wait", waits_since, perf_counter(), detail="for budget")
        return self._blocks.popleft()

    def _is_overtaken(self) -> bool:
        """Return whether a group that has not started is before the remaining blocks of started groups."""
        rank = self._rank
        return bool(rank and self._waiting and rank[self._waiting[0].index] < rank[self._blocks[0].group])

    def _read(self, block: Block) -> None:
        group = self.plan.groups[block.group]
        path = self._paths[group.selection]
        if block.nbytes:
            start = perf_counter()
            waited = path.read(group, block, self.is_stopped) or 0.0
            if self._trace is not None:
                if waited > _SHOWN_SECONDS:
                    self._trace.add("wait", start, start + waited, detail="for staging memory")
                self._trace.add(
                    path.label, start + waited, perf_counter(), num_bytes=block.nbytes, detail=type(path).__name__
                )
            self._release_use(group)
            path.complete(block, self._arrived)
        else:
            self._release_use(group)
            self._arrived(block)

    def _arrived(self, block: Block) -> None:
        """Count a block that is read, and its copies submitted; deliver the group if it is the last block."""
        group = self.plan.groups[block.group]
        path = self._paths[group.selection]
        with self._changed:
            if self._workers.stopped:
                return
            if path.label != "map":
                self.read_bytes += block.nbytes
            self._num_left[block.group] -= 1
            if self._num_left[block.group]:
                return
        start = perf_counter()
        loaded = path.make_tensors(group)
        if self._trace is not None:
            self._trace.add("tensors", start, perf_counter(), num_bytes=group.payload_bytes)
        self._deliver(group, loaded)
        del loaded
        self._release_use(group)
        self._progress.report(group.payload_bytes, len(group.names))


class Budget:
    """Counts bytes in use against a total. `try_acquire` needs its owner's lock, `release` needs none.

    Args:
        total_bytes: The most that may be in use, except for one request larger than all of it.

    Raises:
        ValueError: The total is not positive.
    """

    def __init__(self, total_bytes: int) -> None:
        self.total_bytes = checked_size(total_bytes)
        """The budget."""
        self._held: dict[int, int] = {}  # bytes by key
        self._held_bytes = 0
        self._released: list[int] = []  # keys that `try_acquire` has not counted yet
        self.peak_bytes = 0
        """Most bytes in use at one time."""

    @property
    def used_bytes(self) -> int:
        """Bytes in use now."""
        released = sum(self._held.get(key, 0) for key in set(self._released.copy()))
        return max(0, self._held_bytes - released)

    def try_acquire(self, key: int, nbytes: int) -> bool:
        """Take bytes if they fit, or if nothing else is in use (for a request larger than the budget)."""
        while self._released:
            self._held_bytes -= self._held.pop(self._released.pop(), 0)
        if self._held_bytes and self._held_bytes + nbytes > self.total_bytes:
            return False
        self._held[key] = nbytes
        self._held_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self._held_bytes)
        return True

    def holds(self, key: int) -> bool:
        """Return whether bytes are taken under a key, or were and are not counted as returned yet."""
        return key in self._held

    def release(self, key: int) -> None:
        """Return the bytes that were taken under a key. One step, and idempotent."""
        self._released.append(key)
