"""The executor of loads that the engine carries out: it turns groups into ranges, and takes groups that are complete.

The bytes move on the engine's threads, whatever other Python threads do. One load is one transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from stio import native
from stio.loading.plan import Group
from stio.loading.read_paths import ReadPath
from stio.runtime.trace import Trace


class EngineExecutor:
    """Moves the bytes of one load by the engine.

    Args:
        paths: The read path of each of the plan's selections; all are native.
        budget_bytes: Slots of rings that are in use at one time are at most half of it, but one.
        trace: Records a span for each group.

    Raises:
        OSError: The process cannot start a thread.
    """

    name = "engine"

    def __init__(self, paths: Sequence[ReadPath], *, budget_bytes: int, trace: Trace | None = None) -> None:
        self._paths = paths
        self._trace = trace
        self._groups: dict[int, Group] = {}
        self._empty: list[Group] = []  # groups without bytes
        self._transfer = native.Transfer(most_chunks=max(1, budget_bytes // 2 // native.CHUNK_BYTES))

    def add(self, groups: Sequence[Group]) -> None:
        """Move the bytes of groups that have begun, behind those that were added before."""
        ranges = native.Ranges()
        for group in groups:
            before = len(ranges)
            self._paths[group.selection].add_ranges(group, ranges)
            if len(ranges) == before:
                self._empty.append(group)
            else:
                self._groups[group.index] = group
        self._transfer.add(ranges)

    def arrange(self, order: Iterable[int]) -> None:
        """Move groups that are not complete in this order, given by their indices."""
        self._transfer.arrange(order)

    def take(self) -> list[Group]:
        """Wait for groups that are complete; empty after `wake` or `stop`.

        Raises:
            StioError: A read or a copy failed.
        """
        if self._empty:
            empty, self._empty = self._empty, []
            return empty
        try:
            taken = self._transfer.take()
        except native.Failure as failure:
            group = self._groups[failure.group]
            raise self._paths[group.selection].error(failure) from None
        found = []
        for one in taken:
            group = self._groups.pop(one.group)
            found.append(group)
            if self._trace is not None:
                path = self._paths[group.selection]
                nbytes = sum(block.nbytes for block in group.blocks)
                lane = f"{path.label}-{one.thread + 1}"
                self._trace.add(
                    path.label, one.started, one.ended, num_bytes=nbytes, detail=type(path).__name__, lane=lane
                )
        return found

    def wake(self) -> None:
        """Let `take` return. Callable from any thread; takes no lock that Python code holds."""
        self._transfer.wake()

    def stop(self) -> None:
        """Begin no further read, and let `take` return. Callable from any thread."""
        self._transfer.stop()

    def close(self) -> None:
        """Stop, and wait until nothing is under way."""
        self._transfer.end()
