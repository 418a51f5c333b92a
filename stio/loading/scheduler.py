"""The scheduler of a load: begins groups within one budget of bytes, and delivers those that are complete.

It runs on the thread of the load's operation. It begins groups in the plan's order: it allocates their memory and adds
them to the executor, which moves the bytes on other threads. It takes complete groups from the executor in batches,
makes their tensors and delivers them. A group's memory counts against the budget from its begin until it is delivered
and, with `hold`, until the consumer releases it. An error or a cancel ends the load; `run` returns when nothing touches
a buffer any more.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from time import perf_counter
from typing import Any, TypeAlias

import torch

from stio import process
from stio.device import Lost
from stio.loading.engine import EngineExecutor
from stio.loading.options import LoadOptions
from stio.loading.patching import PatchingExecutor
from stio.loading.plain import InlineExecutor
from stio.loading.plan import Group, ReadPlan
from stio.loading.read_paths import Delivery, ReadPath
from stio.runtime import Cancelled, Operation, WorkerPool
from stio.runtime.reports import ProgressReporter, close_bar, counters, progress_callback
from stio.storage import LocalFile, RequestedSource, Source

FIRST_BYTES = 512 << 20
"""The first groups, with so many bytes, are given to the executor alone. They move while the others are begun."""
_MAX_CHECKS = 16
"""Files behind a network that are looked at together at the end of a load."""

Executor: TypeAlias = EngineExecutor | InlineExecutor | PatchingExecutor
"""What moves the bytes of a load."""


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A load that is ready to run: what is read, in which order, and how. Nothing was read or allocated for it."""

    path: str
    """The checkpoint."""
    plan: ReadPlan
    """The reads, in their order."""
    paths: Sequence[ReadPath]
    """The read path of each of the plan's selections. The run closes them."""
    executor: Executor
    """Moves the bytes. The run closes it."""
    budget_bytes: int
    """Most bytes that may be under way."""
    names: Sequence[Mapping[str, Sequence[str]]] = ()
    """For each of the plan's selections, the names under which tensors are returned. Empty: their own."""
    make_results: Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]] | None = None
    """Makes of a group's tensors what the consumer gets, which shares their memory; None: it gets the tensors."""
    first_bytes: int = sys.maxsize
    """The first groups, with so many bytes, begin before memory is allocated for the others."""
    files: Sequence[Source] = ()
    """Files that must be unchanged at the end."""
    owned: ExitStack = field(default_factory=ExitStack)
    """What the run closes at its end: files, and holds on files in a cache."""
    lost: Lost = field(default_factory=Lost)
    """Values that casts lose."""


class LoadScheduler:
    """One load from its first group to its last tensor.

    Args:
        planned: What is read. Its read paths, executor and files are closed when the load has ended.
        options: Its progress and trace; values that casts lose are reported unless it collects them.
        delivery: Called with groups on the thread of `run`.
        doing: What the load does, for the text before a bar.
    """

    def __init__(
        self, planned: PlannedLoad, options: LoadOptions, delivery: Delivery, *, doing: str = "loading"
    ) -> None:
        self.plan = planned.plan
        """The reads, in their order."""
        self._planned = planned
        self._paths = planned.paths
        self._executor = planned.executor
        self._delivery = delivery
        self.budget = Budget(planned.budget_bytes)
        """Used by the thread of `run`, except `release`."""
        callback = self._progress_callback = (
            None if options.progress is None else progress_callback(options.progress, doing)
        )
        self._progress: ProgressReporter | None = None
        if callback is not None:
            totals = self.plan.total_bytes, self.plan.num_tensors
            self._progress = ProgressReporter(callback, total_bytes=totals[0], total_tensors=totals[1])
        self._trace = options.trace
        self._reports_lost = options.lost is None
        self._waiting: deque[Group] = deque(self.plan.groups)
        self._num_left = Counter([group.selection for group in self.plan.groups])  # groups of each read path
        self._hold = delivery.hold
        self._delivered_groups: set[int] = set()
        self._consumed_groups: set[int] = set()  # that the consumer has released
        self._blocked = False  # whether the first waiting group waits for budget
        self._stopped = False
        self._discarded_groups: set[int] = set()
        self._reorderings: deque[Callable[[], None]] = deque()
        self.read_bytes = 0
        """Bytes of the groups that were read."""
        self.written_bytes = 0
        """Always 0; for `stio.runtime.reports.counters`."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken from the budget."""
        return self.budget.used_bytes

    def describe(self) -> str:
        """Return number of bytes and tensors, the read paths and the executor, for the log."""
        used = sorted({type(self._paths[group.selection]).__name__ for group in self.plan.groups}) or ["nothing"]
        figures = f"{self.plan.total_bytes:,} bytes of {self.plan.num_tensors:,} tensors"
        return f"{figures} by {', '.join(used)}, {self._executor.name}"

    def run(self) -> None:
        """Read and deliver all groups; then check that the files are unchanged.

        When this returns or raises, no thread and no copy touches a buffer.

        Raises:
            Cancelled: `stop` was called.
            ChangedDuringReadError: A file was changed since it was opened.
            BaseException: The first error of the executor or of `deliver`, as it was raised.
        """
        with ExitStack() as closing:
            closing.push(self._ended)
            closing.push(self._planned.owned)
            for path in self._paths:  # closed before the files in a cache are released: copies read those
                closing.callback(path.close)
            closing.callback(self._executor.close)
            counters.add_run(self)
            closing.callback(counters.remove_run, self)
            if self._progress is not None:
                self._progress.report()
            self._load()
            self._require_unchanged()

    def _ended(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._progress_callback is not None:
            close_bar(self._progress_callback)
        if kind in (None, Cancelled) and self._reports_lost and self._planned.lost:
            self._planned.lost.report(self._planned.path)

    def run_for(self, operation: Operation[Any]) -> None:
        """Run the load on the thread of an operation; a cancel of the operation stops it."""
        operation.set_log_detail(self.describe)
        operation.on_cancel(self.stop)
        self.run()

    def _load(self) -> None:
        num_under_way = self._begin_groups(self._planned.first_bytes)
        if type(self._executor) is not InlineExecutor:  # that ends before other threads would have a turn
            process.be_nice()  # after the start of threads, which inherit the priority and lower it once more
        while not self.is_stopped():
            if self._waiting or self._reorderings:
                num_under_way += self._begin_groups(sys.maxsize)
            if not num_under_way and not self._waiting:
                return
            start, waits_for_budget = perf_counter(), self._blocked and not num_under_way
            complete = self._executor.take()
            if waits_for_budget and self._trace is not None:
                self._trace.add("wait", start, perf_counter(), detail="for budget")
            for group in complete:
                self._complete(group)
                num_under_way -= 1
                if self._stopped:
                    break
        raise Cancelled

    def _begin_groups(self, max_bytes: int) -> int:
        """Begin as many groups as the budget allows, until they have so many bytes; return their number."""
        begun: list[Group] = []
        nbytes = 0
        while self._reorderings:
            self._reorderings.popleft()()
        self._blocked = False
        while self._waiting and nbytes < max_bytes:
            group = self._waiting[0]
            if group.index in self._discarded_groups:
                self._count_down(self._waiting.popleft())
                continue
            if not self.budget.try_acquire(group.index, self._paths[group.selection].budget_bytes(group)):
                self._blocked = True
                break
            begun.append(self._waiting.popleft())
            nbytes += group.nbytes
        if begun:
            start = perf_counter()
            self._add(begun, nbytes)
            if self._trace is not None:
                self._trace.add("begin", start, perf_counter(), num_bytes=nbytes)
        if self._blocked:
            self._delivery.on_blocked()
        return len(begun)

    def _add(self, groups: Sequence[Group], nbytes: int) -> None:
        """Allocate the memory of groups, and add them to the executor: first those that move while it adds the rest."""
        together: dict[object, list[Group]] = {}
        for group in groups:
            path = self._paths[group.selection]
            together.setdefault(path if path.memory is None else path.memory, []).append(group)
        for of_one_memory in together.values():
            self._paths[of_one_memory[0].selection].begin(of_one_memory)
        num_first = len(groups)
        if nbytes > FIRST_BYTES:
            num_first = bisect_left(list(accumulate(group.nbytes for group in groups)), FIRST_BYTES) + 1
        self._executor.add(groups[:num_first])
        if num_first < len(groups):
            self._executor.add(groups[num_first:])

    def _complete(self, group: Group) -> None:
        """Make the tensors of a group, and deliver them."""
        path = self._paths[group.selection]
        if path.label != "map":
            self.read_bytes += sum([block.nbytes for block in group.blocks])
        start = perf_counter()
        loaded = path.make_tensors(group)
        if self._planned.names and (names := self._planned.names[group.selection]):
            loaded.rename(names)
        if self._planned.make_results is not None:  # on this thread: torch imports its compiler for the first one
            loaded.results = self._planned.make_results(loaded.tensors)
        self._count_down(group)
        if self._trace is not None:
            self._trace.add("tensors", start, perf_counter(), num_bytes=group.payload_bytes)
        self._delivery.deliver(group, loaded)
        del loaded
        self._delivered_groups.add(group.index)
        self._free(group)
        if self._progress is not None:
            self._progress.report(group.payload_bytes, len(group.names))

    def _count_down(self, group: Group) -> None:
        self._num_left[group.selection] -= 1
        if not self._num_left[group.selection]:
            self._paths[group.selection].complete()

    def _require_unchanged(self) -> None:
        """Require that all files are unchanged; those behind a network are looked at together."""
        others: list[Source] = []
        for file in self._planned.files:
            if isinstance(file, LocalFile):
                file.check_unchanged()
            else:
                others.append(file)
        if not others:
            return
        left = iter(others)

        def work() -> None:
            while (file := next(left, None)) is not None:  # one step: several workers call it
                file.check_unchanged()

        # A file of this machine that is opened again for it would need a descriptor for each worker.
        num_behind_networks = sum(isinstance(file, RequestedSource) for file in others)
        if num_behind_networks > 1:
            WorkerPool("check").run(work, min(_MAX_CHECKS, num_behind_networks))
        else:
            work()

    def stop(self) -> None:
        """End the load after its current pieces. Never blocks for long; callable from any thread."""
        self._stopped = True
        self._executor.stop()

    def is_stopped(self) -> bool:
        """Return whether `stop` was called."""
        return self._stopped

    def release(self, group: Group) -> None:
        """Release a group for the consumer, with `hold`. Callable from any thread; takes no lock. Idempotent."""
        self._consumed_groups.add(group.index)
        self._free(group)
        if self._hold:
            self._executor.wake()

    def _free(self, group: Group) -> None:
        """Free the budget of a group that is not used any more."""
        if group.index in self._delivered_groups and (not self._hold or group.index in self._consumed_groups):
            self.budget.release(group.index)

    def promote(self, names: Iterable[str]) -> None:
        """Move the groups with these names before all others, in the plan's order.

        Callable from any thread; takes no lock.
        """
        promoted = set(names)
        self.arrange([group.index for group in self.plan.groups if not promoted.isdisjoint(group.names)])

    def is_blocked(self, group: Group) -> bool:
        """Return whether a group has not begun, and the first of those that have not waits for budget.

        With `hold`, it may wait until the consumer releases other groups. Callable from any thread; takes no lock.
        """
        return self._blocked and not self.budget.holds(group.index)

    def discard(self, group: Group) -> None:
        """Do not read a group, unless it has begun. Callable from any thread; takes no lock. Idempotent."""
        self._discarded_groups.add(group.index)
        self._executor.wake()

    def arrange(self, order: Iterable[int]) -> None:
        """Read what is left in this order of groups, given by their indices; the others follow as they were.

        What is left of a group that has begun is reordered too: it may be one large tensor that nothing waits for.
        Callable from any thread; takes no lock.
        """
        order = list(order)
        rank = {index: k for k, index in enumerate(dict.fromkeys(order))}

        def reorder() -> None:
            self._waiting = deque(sorted(self._waiting, key=lambda group: rank.get(group.index, len(rank))))
            self._executor.arrange(order)

        self._reorderings.append(reorder)
        self._blocked = False  # before the scheduler looks again
        self._executor.arrange(order)  # what has begun; a thread that must be woken would come later
        self._executor.wake()


class Budget:
    """Counts bytes in use against a total. `try_acquire` needs its owner's lock, `release` needs none.

    Args:
        total_bytes: The most that may be in use, except for one request larger than all of it.

    Raises:
        ValueError: The total is not positive.
    """

    def __init__(self, total_bytes: int) -> None:
        if total_bytes <= 0:
            raise ValueError(f"a budget must be positive, not {total_bytes}")
        self.total_bytes = total_bytes
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
