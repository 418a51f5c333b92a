"""The load's scheduler: a plan's blocks to workers, one budget, groups to the consumer.

Long-lived workers take blocks in the plan's order; a group's image is paid for from the budget when its first
block is taken, and given back when all who had a hand on it let go: its readers, who delivered it, and where the run
holds it the consumer. The last block of a group makes its tensors and hands them over: one hop a group, never one a
block or a tensor. Whoever fails or cancels stops the queue; the run ends when no worker touches a buffer any more.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Protocol

from stio.device.base import LoadedGroup
from stio.loading.plan import Block, Group, ReadPlan
from stio.runtime import stats as counters
from stio.runtime.operation import Cancelled, start_thread
from stio.runtime.process import be_nice
from stio.runtime.progress import ProgressEvent
from stio.runtime.trace import Trace

__all__ = ["Budget", "LoadScheduler", "ReadPath"]


_SHOWN_SECONDS = 1e-4
"""Shorter waits for a slot are none: taking a free one takes as long."""


class ReadPath(Protocol):
    """One way from a file to tensors (see `stio.loading.read_paths`). Called from several workers at once."""

    label: str
    """What a trace calls its reads."""

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> float | None:
        """Bring a block's bytes to where its group lands. Blocks; may return early once `stopped()`.

        Returns:
            Seconds that it waited for staging memory before that, where there is some to wait for.
        """

    def settle(self, block: Block, settled: Callable[[Block], None]) -> None:
        """Send on what was read; called after each `read`.

        `settled` is called with each block that is where it lands, or on its way there in an order that nobody
        overtakes: this one, or others that were read, for other routes of the run too. What is left out, another call
        will bring.
        """

    def finish(self, group: Group) -> LoadedGroup:
        """Make the tensors of a group whose blocks have all been read."""

    def close(self) -> None:
        """Wait for copies under way and let go of memory. No worker is inside any more."""


class LoadScheduler:
    """One load from its first block to its last tensor.

    Args:
        plan: What to read, in which order.
        routes: One for each of the plan's headers.
        deliver: Called on a worker with a group and its tensors. It may be called by several workers at once.
        hold: The budget stays taken after delivery, until the consumer calls `release` too (streams).
        budget_bytes: See `Budget`.
        num_workers: Threads that read, this run's own thread among them.
        progress: Called with an event at the start and after each group, one call at a time.
        trace: Where spans go.
    """

    def __init__(
        self,
        plan: ReadPlan,
        routes: Sequence[ReadPath],
        *,
        deliver: Callable[[Group, LoadedGroup], None],
        hold: bool = False,
        budget_bytes: int,
        num_workers: int,
        progress: Callable[[ProgressEvent], object] | None = None,
        trace: Trace | None = None,
    ) -> None:
        self._plan = plan
        self._routes = routes
        self._deliver = deliver
        self.budget = Budget(budget_bytes)
        self._num_workers = max(1, min(num_workers, plan.num_reads))
        self._progress = progress
        self._trace = trace
        self._started = perf_counter()
        self._changed = threading.Condition()
        self._waiting: deque[Group] = deque(plan.groups)
        self._blocks: deque[Block] = deque()
        self._rank: dict[int, int] = {}
        self._left = [max(1, len(group.blocks)) for group in plan.groups]
        # A thread may stand still between its last line with a group and its next one, its frame full of the memory.
        self._hands = [left + 1 + hold for left in self._left]
        self._workers = 0
        self._stopped = False
        self._error: BaseException | None = None
        self._done_bytes = self._done_tensors = 0
        self._reporting = threading.Lock()
        self.read_bytes = 0
        """Bytes of the blocks that were read."""
        self.written_bytes = 0
        """None; see `stio.runtime.stats`."""

    @property
    def used_bytes(self) -> int:
        """What is taken of the budget."""
        return self.budget.used_bytes

    def run(self) -> None:
        """Work until everything is delivered, on this thread and the run's own others.

        Raises:
            Cancelled: `stop` was called.
            BaseException: The first error of a worker, as it was raised.
        """
        counters.enter(self)
        try:
            self._run()
        finally:
            counters.leave(self)

    def _run(self) -> None:
        self._report(None)
        self._workers = 1
        for k in range(1, self._num_workers):
            with self._changed:
                self._workers += 1
            try:
                start_thread(self._work, name=f"read-{k}")
            except RuntimeError:  # the limit of threads: this one can do it all
                with self._changed:
                    self._workers -= 1
                break
        self._work()
        with self._changed:
            self._changed.wait_for(lambda: not self._workers)
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            if self._stopped:
                raise Cancelled
        finally:
            del error

    def stop(self) -> None:
        """Let workers end after their current piece. Never blocks for long; callable from any thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def release(self, group: Group) -> None:
        """Say that the consumer, or a worker, has let go of a group's memory; after the last it is paid back."""
        with self._changed:
            self._hands[group.index] -= 1
            if not self._hands[group.index]:
                self.budget.release(group.nbytes)
                self._changed.notify_all()

    def promote(self, names: Iterable[str]) -> None:
        """Move the groups that hold these names to the front of what has not begun, in the plan's order."""
        wanted = set(names)
        with self._changed:
            first = [group for group in self._waiting if not wanted.isdisjoint(group.names)]
            chosen = {group.index for group in first}
            self._waiting = deque([*first, *(group for group in self._waiting if group.index not in chosen)])

    def arrange(self, order: Iterable[int]) -> None:
        """Take what is left in this order of the groups' indices, every one of them named.

        What is left of a group that has begun is put off too: it may be one large tensor, and nobody waits for it.
        """
        rank = {index: k for k, index in enumerate(dict.fromkeys(order))}
        with self._changed:
            self._rank = rank
            self._waiting = deque(sorted(self._waiting, key=lambda group: rank[group.index]))
            self._blocks = deque(sorted(self._blocks, key=lambda block: rank[block.group]))

    def is_stopped(self) -> bool:
        """Whether workers should end."""
        return self._stopped

    def _work(self) -> None:
        be_nice()
        try:
            while (block := self._take()) is not None:
                self._bring(block)
        except BaseException as error:
            with self._changed:
                if self._error is None and not isinstance(error, Cancelled):
                    self._error = error
                self._stopped = True
        with self._changed:
            self._workers -= 1
            self._changed.notify_all()

    def _take(self) -> Block | None:
        """Return the next block, waiting for budget if need be; None when there is nothing left to take."""
        waits_since = 0.0
        with self._changed:
            while not self._stopped:
                if self._blocks and not self._is_overtaken():
                    return self._next_block(waits_since)
                if not self._waiting:
                    return None
                group = self._waiting[0]
                if self.budget.try_acquire(group.nbytes):
                    self._waiting.popleft()
                    # A group of empty tensors has no reads; an empty block carries it through the same door.
                    blocks = group.blocks or [Block(group.index, max(group.offset, 0), 0, 0)]
                    self._blocks.extendleft(reversed(blocks))
                    self._changed.notify_all()
                    continue
                if self._blocks:
                    return self._next_block(waits_since)
                waits_since = waits_since or perf_counter()
                self._changed.wait()
        return None

    def _next_block(self, waits_since: float) -> Block:
        """Take the first block; record the wait for budget that came before it, if there was one."""
        if waits_since and self._trace is not None:
            self._trace.add("wait", waits_since, perf_counter(), detail="for budget")
        return self._blocks.popleft()

    def _is_overtaken(self) -> bool:
        """Whether a group that has not begun is wanted before what is left of those that have."""
        rank = self._rank
        return bool(rank and self._waiting and rank[self._waiting[0].index] < rank[self._blocks[0].group])

    def _bring(self, block: Block) -> None:
        group = self._plan.groups[block.group]
        route = self._routes[group.shard]
        if block.nbytes:
            start = perf_counter()
            waited = route.read(group, block, self.is_stopped) or 0.0
            if self._trace is not None:
                if waited > _SHOWN_SECONDS:
                    self._trace.add("wait", start, start + waited, detail="for staging memory")
                self._trace.add(
                    route.label, start + waited, perf_counter(), num_bytes=block.nbytes, detail=type(route).__name__
                )
            self.release(group)
            route.settle(block, self._settled)
        else:
            self.release(group)
            self._settled(block)

    def _settled(self, block: Block) -> None:
        """Count a block that is on its way; hand its group over if it is the last of it."""
        group = self._plan.groups[block.group]
        route = self._routes[group.shard]
        with self._changed:
            if self._stopped:
                return
            if route.label != "map":
                self.read_bytes += block.nbytes
            self._left[block.group] -= 1
            if self._left[block.group]:
                return
        start = perf_counter()
        landed = route.finish(group)
        if self._trace is not None:
            self._trace.add("tensors", start, perf_counter(), num_bytes=group.payload_bytes)
        self._deliver(group, landed)
        del landed
        self.release(group)
        self._report(group)

    def _report(self, group: Group | None) -> None:
        """Tell the progress: None at the start, then each group that was delivered."""
        if self._progress is None:
            return
        with self._reporting:
            if group is not None:
                self._done_bytes += group.payload_bytes
                self._done_tensors += len(group.names)
            self._progress(
                ProgressEvent(
                    done_bytes=self._done_bytes,
                    total_bytes=self._plan.total_bytes,
                    done_tensors=self._done_tensors,
                    total_tensors=self._plan.num_tensors,
                    seconds=perf_counter() - self._started,
                )
            )


class Budget:
    """Counts bytes in use against a total.

    Args:
        total_bytes: The most that may be in use, except for one request larger than all of it.

    Raises:
        ValueError: The total is not positive.
    """

    def __init__(self, total_bytes: int) -> None:
        if total_bytes <= 0:
            raise ValueError(f"a budget must be positive, not {total_bytes} bytes")
        self.total_bytes = total_bytes
        """The budget."""
        self.used_bytes = 0
        """What is in use now."""
        self.peak_bytes = 0
        """The most that was in use at once."""

    def try_acquire(self, nbytes: int) -> bool:
        """Take bytes if they fit, or if nothing else is in use (an oversized request runs alone)."""
        if self.used_bytes and self.used_bytes + nbytes > self.total_bytes:
            return False
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def release(self, nbytes: int) -> None:
        """Give bytes back."""
        if nbytes > self.used_bytes:
            raise ValueError(f"{nbytes} bytes given back, {self.used_bytes} are in use")
        self.used_bytes -= nbytes
