"""The plain executor of loads, where the engine cannot move the bytes: a few threads of Python that read and copy.

It is used for sources that are no local files, for devices whose driver the engine does not know, and where there is
no engine (`STIO_NATIVE=0`). Each worker reads a block, copies it, and waits for the copy. It also waits for what
another load is reading into a cache.
Beside a busy Python thread it is slower: each call needs the interpreter's lock when it ends.

A small load out of the page cache that fits into its budget is read by an `InlineExecutor`, on the thread of the load:
it is shorter than to wake another thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stio.loading.plan import Block, Group
from stio.loading.read_paths import ReadPath
from stio.process import Condition
from stio.runtime import Cancelled, WorkerPool
from stio.runtime.reports import Trace, traced


class InlineExecutor:
    """Moves the bytes of one load on the thread that calls `take`, block by block; waits for nothing.

    Args:
        paths: The read path of each of the plan's selections.
        trace: Records a span for each block.
    """

    name = "plain"

    def __init__(self, paths: Sequence[ReadPath], *, trace: Trace | None = None) -> None:
        self._paths = paths
        self._trace = trace
        self._blocks: deque[tuple[Group, Block]] = deque()
        self._orders: deque[Sequence[int]] = deque()
        self._num_left: dict[int, int] = {}  # blocks by group
        self._done: list[Group] = []
        self._woken = self._stopped = False

    def add(self, groups: Sequence[Group]) -> None:
        """Move the bytes of groups that have begun, behind those that were added before."""
        for group in groups:
            self._num_left[group.index] = len(group.blocks)
            self._blocks.extend([(group, block) for block in group.blocks])
            if not group.blocks:
                self._done.append(group)

    def arrange(self, order: Sequence[int]) -> None:
        """Move blocks that nobody has begun in this order of groups, given by their indices; the others follow."""
        self._orders.append(order)  # what takes the next block applies it: the caller takes no lock

    def _next_block(self) -> tuple[Group, Block] | None:
        """Take the next block, if there is one; not called by two threads at a time."""
        while self._orders:
            order = self._orders.popleft()
            rank = {index: k for k, index in enumerate(dict.fromkeys(order))}
            self._blocks = deque(sorted(self._blocks, key=lambda one: rank.get(one[0].index, len(rank))))
        return self._blocks.popleft() if self._blocks else None

    def _read(self, group: Group, block: Block) -> None:
        path = self._paths[group.selection]
        with traced(self._trace, path.label, num_bytes=block.nbytes, detail=type(path).__name__):
            path.read(group, block, self.is_stopped)
        if self.is_stopped():
            raise Cancelled

    def _count(self, group: Group) -> bool:
        """Count a block of a group as moved; return whether the group is complete."""
        self._num_left[group.index] -= 1
        is_complete = not self._num_left[group.index]
        if is_complete:
            self._done.append(group)
        return is_complete

    def take(self) -> list[Group]:
        """Wait for groups that are complete; empty after `wake` or `stop`.

        Raises:
            BaseException: The first error of a read, as it was raised.
        """
        while not (self._done or self._woken or self._stopped) and (one := self._next_block()) is not None:
            self._read(*one)
            self._count(one[0])
        self._woken = False
        done, self._done = self._done, []
        return done

    def wake(self) -> None:
        """Let `take` return. Callable from any thread; takes no lock."""
        self._woken = True

    def is_stopped(self) -> bool:
        """Return whether the load was stopped."""
        return self._stopped

    def stop(self) -> None:
        """End the reads after their current piece, and let `take` return. Callable from any thread."""
        self._stopped = True

    def close(self) -> None:
        """Stop, and wait until nothing is under way."""
        self.stop()


class PlainExecutor(InlineExecutor):
    """Moves the bytes of one load by threads of Python; if the system refuses new ones, on the thread of `take`.

    Args:
        paths: See `InlineExecutor`.
        num_workers: Threads that read.
        trace: See `InlineExecutor`.
    """

    def __init__(self, paths: Sequence[ReadPath], *, num_workers: int, trace: Trace | None = None) -> None:
        super().__init__(paths, trace=trace)
        self._num_workers = num_workers
        self._changed = Condition()
        self._workers = WorkerPool("read", changed=self._changed)
        self._num_threads = 0

    def add(self, groups: Sequence[Group]) -> None:
        """See `InlineExecutor.add`."""
        with self._changed:
            super().add(groups)
            self._changed.notify_all()
        if not self._num_threads:
            self._num_threads = self._workers.start(self._work, self._num_workers)

    def take(self) -> list[Group]:
        """See `InlineExecutor.take`."""
        if not self._num_threads and self._blocks:
            return super().take()
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._woken or self._workers.stopped)
            self._woken = False
            done, self._done = self._done, []
        if self._workers.stopped:
            self._workers.join()
            self._workers.raise_error()
        return done

    def wake(self) -> None:
        """See `InlineExecutor.wake`."""
        super().wake()
        self._changed.wake()

    def is_stopped(self) -> bool:
        """See `InlineExecutor.is_stopped`."""
        return self._workers.stopped

    def stop(self) -> None:
        """See `InlineExecutor.stop`."""
        super().stop()
        self._workers.stop()

    def close(self) -> None:
        """Stop, and wait until no worker is left."""
        self.stop()
        self._workers.join()

    def _work(self) -> None:
        while True:
            one = None
            with self._changed:
                while not self._workers.stopped and (one := self._next_block()) is None:
                    self._changed.wait()
            if one is None or self._workers.stopped:
                return
            self._read(*one)
            with self._changed:
                if self._count(one[0]):
                    self._changed.notify_all()
