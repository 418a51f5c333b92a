"""The executor of loads that the engine carries out: it turns groups into ranges, and takes groups that are complete.

The bytes move on the engine's threads, whatever other Python threads do. One load is one transfer. The bytes of a file
in a cache (`HostCache`) are moved twice: missing ones into the cache's memory, then from there. What another load is
reading into the cache is waited for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from time import perf_counter

from stio import native
from stio.errors import StorageError
from stio.loading.plan import Group
from stio.loading.read_paths import ReadPath
from stio.runtime.memory import num_processors
from stio.runtime.reports import Trace
from stio.storage.checkpoint import FileImage

_MAX_CHUNKS = 1 << 20  # as good as no limit, and an int of C


class EngineExecutor:
    """Moves the bytes of one load by the engine.

    Args:
        paths: The read path of each of the plan's selections; all are native.
        num_groups: Number of groups of the plan.
        budget_bytes: Slots of rings that are in use at one time are at most half of it, but one.
        trace: Records a span for each group.

    Raises:
        OSError: The process cannot start a thread.
    """

    name = "engine"

    def __init__(
        self, paths: Sequence[ReadPath], num_groups: int, *, budget_bytes: int, trace: Trace | None = None
    ) -> None:
        self._paths = paths
        self._trace = trace
        self._groups: dict[int, Group] = {}  # by their numbers in the transfer
        self._done: list[Group] = []  # groups without bytes
        self._fills: dict[int, tuple[Group, FileImage, list[range]]] = {}  # by their numbers in the transfer: claims
        self._next_fill = num_groups
        self._unread: list[Group] = []  # other loads read some of their bytes into a cache
        self._watched: set[FileImage] = set()
        self._stopped = False
        native.count_processors(num_processors)
        self._transfer = native.Transfer(max_chunks=max(1, min(_MAX_CHUNKS, budget_bytes // 2 // native.CHUNK_BYTES)))

    def add(self, groups: Sequence[Group]) -> None:
        """Move the bytes of groups that have begun, behind those that were added before."""
        ranges = native.Ranges()
        for group in groups:
            if self._stopped:
                return
            self._add(group, ranges)
            if self._paths[group.selection].image is not None:
                # To allocate and pin a cache's memory takes 0.1 to 0.4 s per GB: reads do not wait for all of it.
                self._transfer.add(ranges)
                ranges = native.Ranges()
        self._transfer.add(ranges)

    def _add(self, group: Group, ranges: native.Ranges) -> None:
        path = self._paths[group.selection]
        if path.image is not None and not self._is_filled(group, path.image, ranges):
            return
        before = len(ranges)
        path.add_ranges(group, ranges)
        if len(ranges) == before:
            self._done.append(group)
            if path.image is None and group.blocks:  # pages that are read when they are used
                self._record(group, perf_counter(), perf_counter())
        else:
            self._groups[group.index] = group

    def _is_filled(self, group: Group, image: FileImage, ranges: native.Ranges) -> bool:
        """Return whether a cache has the group's bytes, or no memory for them; otherwise add what is missing."""
        spans = [(block.offset, block.offset + block.nbytes) for block in group.blocks]
        claims: list[range] = []
        places = []
        try:
            for begin, end in spans:
                claims += image.claim_now(begin, end)
            for claim in claims:
                position = claim.start
                for region in image.regions(position, len(claim)):
                    places.append((position, region))
                    position += region.nbytes
        except MemoryError:
            _unclaim(image, claims)
            return True
        except BaseException:
            _unclaim(image, claims)  # other loads wait for them
            raise
        if claims:
            number, self._next_fill = self._next_fill, self._next_fill + 1
            self._fills[number] = group, image, claims
            file = self._paths[group.selection].file
            for position, region in places:
                ranges.file_to_host(number, file.fd, file.direct_fd, position, region.nbytes, region.address)
            return False
        if all(image.holds(begin, end) for begin, end in spans):
            return True
        if image not in self._watched:
            self._watched.add(image)
            image.watch(self.wake)
            return self._is_filled(group, image, ranges)  # what changed before the watch has woken nobody
        self._unread.append(group)
        return False

    def arrange(self, order: Sequence[int]) -> None:
        """Move groups that are not complete in this order, given by their indices. Callable from any thread."""
        fills = {group.index: number for number, (group, _, _) in self._fills.copy().items()}
        self._transfer.arrange([fills.get(index, index) for index in order])

    def take(self) -> list[Group]:
        """Wait for groups that are complete; empty after `wake` or `stop`.

        Raises:
            StioError: A read or a copy failed; or this process was forked while the load was under way.
        """
        if not self._done:
            self._take()
        if self._unread:
            unread, self._unread = self._unread, []
            self.add(unread)
        done, self._done = self._done, []
        return done

    def _take(self) -> None:
        try:
            taken = self._transfer.take()
        except native.Failure as failure:
            if failure.group < 0:
                raise StorageError(
                    "the load is of the process that this one was forked from; load again here", errno=failure.code
                ) from None
            group = self._groups[failure.group] if failure.group in self._groups else self._fills[failure.group][0]
            raise self._paths[group.selection].error(failure) from None
        filled = []
        for one in taken:
            fill = self._fills.pop(one.group, None)
            if fill is None:
                group = self._groups.pop(one.group)
                self._done.append(group)
            else:
                group, image, claims = fill
                for claim in claims:
                    image.mark_present(claim.start, claim.stop)
                filled.append(group)
            self._record(group, one.started, one.ended, lane=f"engine-{one.thread + 1}")
        if filled:
            self.add(filled)
            if self._fills:  # not behind all other reads: tensors come in the plan's order, and copies run beside reads
                self._transfer.arrange([group.index for group in filled])

    def _record(self, group: Group, started: float, ended: float, lane: str | None = None) -> None:
        """Add a span of a group to the trace: on the lane of the engine's thread that ended it, or of this thread."""
        if self._trace is not None:
            path = self._paths[group.selection]
            nbytes = sum(block.nbytes for block in group.blocks)
            self._trace.add(path.label, started, ended, num_bytes=nbytes, detail=type(path).__name__, lane=lane)

    def wake(self) -> None:
        """Let `take` return. Callable from any thread; takes no lock that Python code holds."""
        self._transfer.wake()

    def stop(self) -> None:
        """Begin no further read, and let `take` return. Callable from any thread."""
        self._stopped = True
        self._transfer.stop()

    def close(self) -> None:
        """Stop, and wait until nothing is under way; what was not read into a cache is missing there again."""
        self._transfer.end()
        for image in self._watched:
            image.unwatch(self.wake)
        while self._fills:
            _, (_, image, claims) = self._fills.popitem()
            _unclaim(image, claims)


def _unclaim(image: FileImage, claims: Iterable[range]) -> None:
    for claim in claims:
        image.mark_missing(claim.start, claim.stop)
