"""The plain executor of loads, where the engine cannot move the bytes: a few threads of Python that read and copy.

It is used for sources that are no local files, for devices whose driver the engine does not know, and where there is
no engine (`STIO_NATIVE=0`). Each worker reads a block, copies it, and waits for the copy. It also waits for what
another load is reading into a cache.
Beside a busy Python thread it is slower: each call needs the interpreter's lock when it ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from stio.loading.plan import Block, Group
from stio.loading.read_paths import ReadPath
from stio.process import Condition
from stio.runtime import Cancelled, WorkerPool
from stio.runtime.reports import Trace, traced


class PlainExecutor:
    """Moves the bytes of one load by threads of Python.

    Args:
        paths: The read path of each of the plan's selections.
        num_workers: Threads that read.
        trace: Records a span for each block.
    """

    name = "plain"

    def __init__(self, paths: Sequence[ReadPath], *, num_workers: int, trace: Trace | None = None) -> None:
        self._paths = paths
        self._num_workers = num_workers
        self._trace = trace
        self._changed = Condition()
        self._workers = WorkerPool("read", changed=self._changed)
        self._blocks: deque[tuple[Group, Block]] = deque()
        self._orders: deque[Sequence[int]] = deque()
        self._num_left: dict[int, int] = {}  # blocks by group
        self._done: list[Group] = []
        self._num_threads = 0
        self._woken = False

    def add(self, groups: Sequence[Group]) -> None:
        """Move the bytes of groups that have begun, behind those that were added before."""
        with self._changed:
            for group in groups:
                self._num_left[group.index] = len(group.blocks)
                self._blocks.extend((group, block) for block in group.blocks)
                if not group.blocks:
                    self._done.append(group)
            self._changed.notify_all()
        if not self._num_threads:
            self._num_threads = self._workers.start(self._work, self._num_workers)

    def arrange(self, order: Sequence[int]) -> None:
        """Move blocks that nobody has begun in this order of groups, given by their indices; the others follow."""
        self._orders.append(order)  # the next worker that takes a block applies it: the caller takes no lock

    def _next_block(self) -> tuple[Group, Block] | None:
        """Take the next block, if there is one; the caller holds the lock."""
        while self._orders:
            order = self._orders.popleft()
            rank = {index: k for k, index in enumerate(dict.fromkeys(order))}
            self._blocks = deque(sorted(self._blocks, key=lambda one: rank.get(one[0].index, len(rank))))
        return self._blocks.popleft() if self._blocks else None

    def take(self) -> list[Group]:
        """Wait for groups that are complete; empty after `wake` or `stop`.

        Raises:
            BaseException: The first error of a worker, as it was raised.
        """
        if not self._num_threads and self._blocks:  # the system refuses new threads
            with self._changed:
                one = self._next_block()
            assert one is not None
            self._read(*one)
            self._woken = True  # nobody else would wake this thread for the next block
        with self._changed:
            self._changed.wait_for(lambda: self._done or self._woken or self._workers.stopped)
            self._woken = False
            done, self._done = self._done, []
        if self._workers.stopped:
            self._workers.join()
            self._workers.raise_error()
        return done

    def wake(self) -> None:
        """Let `take` return. Callable from any thread; takes no lock."""
        self._woken = True
        self._changed.wake()

    def stop(self) -> None:
        """End the workers after their current piece, and let `take` return. Callable from any thread."""
        self._workers.stop()

    def close(self) -> None:
        """Stop, and wait until no worker is left."""
        self._workers.stop()
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

    def _read(self, group: Group, block: Block) -> None:
        path = self._paths[group.selection]
        with traced(self._trace, path.label, num_bytes=block.nbytes, detail=type(path).__name__):
            path.read(group, block, self._workers.is_stopped)
        if self._workers.stopped:
            raise Cancelled
        with self._changed:
            self._num_left[group.index] -= 1
            if not self._num_left[group.index]:
                self._done.append(group)
                self._changed.notify_all()
