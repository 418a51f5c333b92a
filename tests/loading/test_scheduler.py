"""The scheduler alone: plans written here, a read path that does what the test says."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
from support import PATIENCE_SECONDS, eventually, nothing_left

from stio.device.base import LoadedGroup
from stio.loading.plan import Block, Group, ReadPlan
from stio.loading.scheduler import LoadScheduler
from stio.runtime import workers
from stio.runtime.operation import Cancelled, start_thread
from stio.runtime.progress import ProgressEvent
from stio.runtime.trace import Trace

pytestmark = pytest.mark.usefixtures("plain_workers")


def plan_of(*sizes: int, blocks: int = 1) -> ReadPlan:
    """Return a plan of groups of these sizes, each read in `blocks` equal blocks."""
    groups = []
    for k, nbytes in enumerate(sizes):
        step = nbytes // blocks
        cut = tuple(Block(k, 4096 * k + i * step, step, i * step) for i in range(blocks)) if nbytes else ()
        groups.append(
            Group(
                index=k, selection=0, offset=4096 * k, nbytes=nbytes, names=[f"t{k}"], dtypes=["U8"], shapes=[(nbytes,)],
                offsets=[0], blocks=cut, payload_bytes=nbytes,
            )
        )  # fmt: skip
    return ReadPlan(tuple(groups), sum(sizes), len(sizes))


class FakePath:
    """Records the calls; `on_read` and `on_finish` may wait or raise."""

    label = "read"

    def __init__(
        self,
        on_read: Callable[[Group, Block], None] = lambda *_: None,
        on_finish: Callable[[Group], None] = lambda _: None,
    ) -> None:
        self.on_read, self.on_finish = on_read, on_finish
        self.reads: list[tuple[int, int]] = []
        self.finished: list[int] = []
        self.inside = 0
        self._lock = threading.Lock()

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        with self._lock:
            self.reads.append((group.index, block.at))
            self.inside += 1
        try:
            self.on_read(group, block)
        finally:
            with self._lock:
                self.inside -= 1

    def complete(self, block: Block, arrived: Callable[[Block], None]) -> None:
        arrived(block)

    def budget_bytes(self, group: Group) -> int:
        return group.nbytes

    def make_tensors(self, group: Group) -> LoadedGroup:
        with self._lock:
            self.finished.append(group.index)
        self.on_finish(group)
        return LoadedGroup({})

    def close(self) -> None:
        assert not self.inside


class Scheduler:
    """A run beside the test's thread."""

    def __init__(
        self,
        plan: ReadPlan,
        path: FakePath | None = None,
        *,
        budget_bytes: int = 1 << 30,
        num_workers: int = 1,
        deliver=None,
        **options,
    ) -> None:
        self.path = path or FakePath()
        self.delivered: list[int] = []
        self.lock = threading.Lock()
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.run = LoadScheduler(
            plan,
            [self.path],
            deliver=deliver or self.deliver,
            budget_bytes=budget_bytes,
            num_workers=num_workers,
            **options,
        )

    def deliver(self, group: Group, landed: LoadedGroup) -> None:
        with self.lock:
            self.delivered.append(group.index)

    def start(self):
        def body():
            try:
                self.run.run()
            except BaseException as error:  # noqa: BLE001  # the test looks at it
                self.error = error
            self.over.set()

        start_thread(body, name="run")
        return self

    def end(self) -> None:
        assert self.over.wait(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_everything_is_delivered_once(num_workers):
    made = Scheduler(plan_of(*[30] * 40, blocks=3), num_workers=num_workers)
    made.run.run()
    assert sorted(made.delivered) == list(range(40))
    assert sorted(made.path.reads) == [(k, at) for k in range(40) for at in (0, 10, 20)]
    assert sorted(made.path.finished) == list(range(40))
    assert made.run.budget.used_bytes == 0


def test_one_worker_keeps_the_plans_order():
    made = Scheduler(plan_of(*[30] * 5, blocks=3))
    made.run.run()
    assert made.path.reads == [(k, at) for k in range(5) for at in (0, 10, 20)]
    assert made.delivered == [0, 1, 2, 3, 4]


def test_a_group_is_finished_by_its_last_block():
    held, go = threading.Event(), threading.Event()

    def on_read(group, block):
        if block.at == 0:
            held.set()
            assert go.wait(PATIENCE_SECONDS)

    made = Scheduler(plan_of(30, blocks=3), FakePath(on_read), num_workers=2).start()
    assert held.wait(PATIENCE_SECONDS)
    assert eventually(lambda: len(made.path.reads) == 3 and made.path.inside == 1)
    assert made.path.finished == []
    go.set()
    made.end()
    assert made.delivered == [0]


def test_empty_plan_and_empty_groups():
    Scheduler(plan_of()).run.run()
    made = Scheduler(plan_of(0, 5, 0), budget_bytes=1)
    made.run.run()
    assert made.delivered == [0, 1, 2]
    assert made.path.reads == [(1, 0)]  # nothing to read of the empty ones


def test_no_more_workers_than_reads():
    seen = set()
    barrier = threading.Barrier(2)

    def on_read(*_):
        seen.add(threading.get_ident())
        barrier.wait(PATIENCE_SECONDS)

    Scheduler(plan_of(5, 5), FakePath(on_read), num_workers=50).run.run()
    assert len(seen) == 2


def test_fewer_threads_than_requested_do_the_work_too(monkeypatch):
    started = []

    def refuse(run, *, name):
        if started:
            raise RuntimeError("can't start new thread")
        started.append(name)
        start_thread(run, name=name)

    monkeypatch.setattr(workers, "start_thread", refuse)
    made = Scheduler(plan_of(*[5] * 20), num_workers=4)
    made.run.run()
    assert sorted(made.delivered) == list(range(20))


# The budget.


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("budget", [1, 64, 100, 1000])
def test_peak_stays_within_the_budget(num_workers, budget):
    sizes = [60, 10, 90, 10, 10, 60, 30] * 6
    made = Scheduler(plan_of(*sizes), budget_bytes=budget, num_workers=num_workers)
    made.run.run()
    assert len(made.delivered) == len(sizes)
    assert made.run.budget.peak_bytes <= max(budget, max(sizes))
    assert made.run.budget.used_bytes == 0


def test_an_oversized_group_runs_alone():
    together = []

    def on_read(group, _):
        together.append((group.index, made.run.budget.used_bytes))

    made = Scheduler(plan_of(10, 10, 500, 10, 10), FakePath(on_read), budget_bytes=100, num_workers=4)
    made.run.run()
    assert (2, 500) in together
    assert sorted(made.delivered) == [0, 1, 2, 3, 4]
    assert made.run.budget.peak_bytes == 500


def test_first_come_first_served():
    """A large group at the head is not overtaken by small ones that would fit beside what is out."""
    held, go = threading.Event(), threading.Event()

    def on_read(group, _):
        if group.index == 0:
            held.set()
            assert go.wait(PATIENCE_SECONDS)

    made = Scheduler(plan_of(60, 90, 10, 10, 10), FakePath(on_read), budget_bytes=100, num_workers=4).start()
    assert held.wait(PATIENCE_SECONDS)
    assert eventually(lambda: made.run._changed.num_sleeping == 3)  # all others wait for budget
    assert made.path.reads == [(0, 0)]
    go.set()
    made.end()
    assert made.path.reads[1] == (1, 0)


def test_hold_stops_reading_when_the_consumer_lags():
    made = Scheduler(plan_of(*[40] * 10), budget_bytes=100, num_workers=4, hold=True).start()
    assert eventually(lambda: len(made.delivered) == 2 and made.run._changed.num_sleeping == 4)
    assert made.path.reads == [(0, 0), (1, 0)]
    assert made.run.budget.used_bytes == 80
    groups = made.run.plan.groups
    for k in range(8):
        made.run.release(groups[made.delivered[k]])
        assert eventually(lambda k=k: len(made.delivered) == min(10, k + 3))
    made.end()
    assert made.run.budget.peak_bytes <= 100


def test_hold_of_oversized_groups_hands_over_one_by_one():
    made = Scheduler(plan_of(500, 500, 500), budget_bytes=100, num_workers=2, hold=True).start()
    for k in range(3):
        assert eventually(lambda k=k: made.delivered == list(range(k + 1)))
        made.run.release(made.run.plan.groups[k])
    made.end()
    assert made.run.budget.peak_bytes == 500


def test_p8_a_group_counts_until_the_worker_that_delivered_it_releases_it():
    """The consumer may have released a group while the worker that delivered it has not run a line since."""
    go = threading.Event()

    def deliver(group, landed):
        made.deliver(group, landed)
        made.run.release(group)  # the consumer's
        assert go.wait(PATIENCE_SECONDS)

    made = Scheduler(plan_of(60, 60), budget_bytes=100, num_workers=2, hold=True, deliver=deliver).start()
    assert eventually(lambda: made.delivered == [0] and made.run._changed.num_sleeping == 1)
    assert (made.path.reads, made.run.budget.used_bytes) == ([(0, 0)], 60)
    go.set()
    made.end()
    assert (made.delivered, made.run.budget.used_bytes) == ([0, 1], 0)


def test_p8_a_group_counts_until_its_readers_release_it():
    """Even if another worker submitted the copies of what this one read, and the consumer has taken the group."""
    read, go = threading.Event(), threading.Event()

    class Sharing(FakePath):
        """A path and its queue: whichever worker submits reports all blocks."""

        def __init__(self):
            super().__init__()
            self.there: list[Block] = []

        def read(self, group, block, stopped):
            super().read(group, block, stopped)
            self.there.append(block)
            if (group.index, block.at) == (0, 0):
                read.set()
                assert go.wait(PATIENCE_SECONDS)
            else:
                assert read.wait(PATIENCE_SECONDS)

        def complete(self, block, arrived):
            while self.there:
                arrived(self.there.pop())

    def deliver(group, landed):
        made.deliver(group, landed)
        made.run.release(group)

    made = Scheduler(
        plan_of(60, 60, blocks=2), Sharing(), budget_bytes=100, num_workers=2, hold=True, deliver=deliver
    ).start()
    assert eventually(lambda: made.delivered == [0] and made.run._changed.num_sleeping == 1)
    assert ({index for index, _ in made.path.reads}, made.run.budget.used_bytes) == ({0}, 60)
    go.set()
    made.end()
    assert (made.delivered, made.run.budget.used_bytes) == ([0, 1], 0)


def test_promote_moves_what_has_not_begun():
    held, go = threading.Event(), threading.Event()

    def on_read(group, _):
        if group.index == 0:
            held.set()
            assert go.wait(PATIENCE_SECONDS)

    made = Scheduler(plan_of(*[10] * 8), FakePath(on_read)).start()
    assert held.wait(PATIENCE_SECONDS)
    made.run.promote(["t6", "t4", "t0", "absent"])
    made.run.promote(["t7"])
    go.set()
    made.end()
    assert made.delivered == [0, 7, 4, 6, 1, 2, 3, 5]


def test_a_group_is_blocked_until_others_are_released():
    told = threading.Event()
    made = Scheduler(plan_of(60, 30, 60, 10), budget_bytes=100, num_workers=2, hold=True, on_blocked=told.set)
    groups = made.run.plan.groups
    assert not any(map(made.run.is_blocked, groups))
    made.start()
    assert told.wait(PATIENCE_SECONDS)
    assert [made.run.is_blocked(group) for group in groups] == [False, False, True, True]
    told.clear()
    made.run.promote(["t3"])  # it fits beside the others
    assert eventually(lambda: 3 in made.delivered)
    assert told.wait(PATIENCE_SECONDS)
    assert [made.run.is_blocked(group) for group in groups] == [False, False, True, False]
    for group in groups[:2]:
        assert eventually(lambda group=group: group.index in made.delivered)
        made.run.release(group)
    made.end()
    assert not made.run.is_blocked(groups[2])
    assert made.run.budget.peak_bytes == 100


def test_a_discarded_group_is_not_read():
    told = threading.Event()
    made = Scheduler(plan_of(60, 60, 60, 60), budget_bytes=100, num_workers=2, hold=True, on_blocked=told.set).start()
    groups = made.run.plan.groups
    assert told.wait(PATIENCE_SECONDS)
    assert eventually(lambda: made.delivered == [0])
    for k in (0, 1, 1, 3):  # the first one was read, so nothing happens to it
        made.run.discard(groups[k])
    assert made.run.budget.used_bytes == 60
    made.run.release(groups[0])
    assert eventually(lambda: made.delivered == [0, 2])
    made.end()
    assert made.path.reads == [(0, 0), (2, 0)]


def test_discarding_all_that_waits_is_the_end():
    told = threading.Event()
    made = Scheduler(plan_of(60, 60, 60), budget_bytes=100, num_workers=3, hold=True, on_blocked=told.set).start()
    assert told.wait(PATIENCE_SECONDS)
    for group in made.run.plan.groups[1:]:
        made.run.discard(group)
    made.end()
    assert made.delivered == [0]


def test_arranged_before_it_runs():
    made = Scheduler(plan_of(*[10] * 5))
    made.run.arrange([3, 1, 1, 4, 0, 2, 3])
    made.start().end()
    assert made.delivered == [3, 1, 4, 0, 2]


@pytest.mark.parametrize("budget_bytes", [100, 1000])
def test_arranged_while_it_runs(budget_bytes):
    """The rest of a group that has begun waits for what comes first now, unless the budget is too small for that."""
    held, go = threading.Event(), threading.Event()

    def on_read(group, block):
        if (group.index, block.at) == (0, 25):
            held.set()
            assert go.wait(PATIENCE_SECONDS)

    made = Scheduler(plan_of(*[100] * 4, blocks=4), FakePath(on_read), budget_bytes=budget_bytes).start()
    assert held.wait(PATIENCE_SECONDS)
    made.run.arrange([2, 3, 0, 1])
    go.set()
    made.end()
    assert made.delivered == ([2, 3, 0, 1] if budget_bytes == 1000 else [0, 2, 3, 1])
    assert len(made.path.reads) == 16
    assert made.run.budget.used_bytes == 0


# Ends.


def test_stop_before_it_runs():
    made = Scheduler(plan_of(5, 5))
    made.run.stop()
    with pytest.raises(Cancelled):
        made.run.run()
    assert made.path.reads == []


@pytest.mark.parametrize("n", range(7))
@pytest.mark.parametrize("num_workers", [1, 3])
def test_stop_at_every_read(n, num_workers):
    def on_read(*_):
        if len(made.path.reads) > n:
            made.run.stop()

    made = Scheduler(plan_of(*[10] * 6), FakePath(on_read), num_workers=num_workers, budget_bytes=20)
    if n >= 6:
        made.run.run()
        return
    with pytest.raises(Cancelled):
        made.run.run()
    assert made.path.inside == 0
    assert len(made.path.reads) <= n + num_workers


@pytest.mark.parametrize("where", ["finish", "deliver", "wait for budget", "progress"])
def test_stop_elsewhere(where):
    stop = [lambda *_: made.run.stop()]
    options = {}
    if where == "deliver":
        options["deliver"] = stop[0]
    if where == "progress":
        options["progress"] = stop[0]
    path = FakePath(on_finish=stop[0] if where == "finish" else lambda _: None)
    made = Scheduler(
        plan_of(*[10] * 6), path, num_workers=2, budget_bytes=10, hold=where == "wait for budget", **options
    )
    made.start()
    if where == "wait for budget":
        assert eventually(lambda: made.run._changed.num_sleeping == 2)
        made.run.stop()
    with pytest.raises(Cancelled):
        made.end()
    assert len(made.path.reads) < 6


def test_stop_waits_for_reads_under_way():
    held, go = threading.Event(), threading.Event()

    def on_read(*_):
        held.set()
        assert go.wait(PATIENCE_SECONDS)

    made = Scheduler(plan_of(10, 10, 10), FakePath(on_read), num_workers=2).start()
    assert held.wait(PATIENCE_SECONDS)
    made.run.stop()
    assert not made.over.wait(0.01)
    go.set()
    with pytest.raises(Cancelled):
        made.end()
    assert made.path.inside == 0


@pytest.mark.parametrize("num_workers", [1, 4])
@pytest.mark.parametrize("where", ["read", "finish", "deliver", "progress"])
def test_errors_come_out_unwrapped(where, num_workers):
    mine = OSError(5, "mine")

    def fail(*_):
        raise mine

    options = {where: fail} if where in ("deliver", "progress") else {}
    path = FakePath(**{f"on_{where}": fail} if where in ("read", "finish") else {})
    made = Scheduler(plan_of(*[10] * 8), path, num_workers=num_workers, budget_bytes=25, **options)
    with pytest.raises(OSError, match="mine") as caught:
        made.run.run()
    assert caught.value is mine
    assert made.path.inside == 0
    assert len(made.path.reads) <= num_workers


def test_first_error_wins():
    second_may, first_over = threading.Event(), threading.Event()

    def on_read(group, _):
        if group.index == 0:
            second_may.wait(PATIENCE_SECONDS)
            raise KeyError("first")
        second_may.set()
        assert eventually(made.run.is_stopped)
        raise ValueError("second")

    made = Scheduler(plan_of(10, 10), FakePath(on_read), num_workers=2)
    with pytest.raises(KeyError, match="first"):
        made.run.run()
    assert not first_over.is_set()


def test_a_run_does_not_keep_its_error():
    def fail(*_):
        raise KeyError

    made = Scheduler(plan_of(10), FakePath(fail))
    with pytest.raises(KeyError):
        made.run.run()
    assert made.run._workers._error is None


# What it says of itself.


def test_progress_is_monotonic_and_ends_at_the_totals():
    events: list[ProgressEvent] = []
    made = Scheduler(plan_of(*[10, 0, 30] * 10), num_workers=4, progress=events.append)
    made.run.run()
    assert len(events) == 31, "one at the start, one a group"
    for before, after in itertools.pairwise(events):
        assert before.done_bytes <= after.done_bytes
        assert before.done_tensors < after.done_tensors
        assert before.seconds <= after.seconds
    last = events[-1]
    assert (last.done_bytes, last.total_bytes, last.done_tensors, last.total_tensors) == (400, 400, 30, 30)


def test_progress_callbacks_are_never_called_twice_at_once():
    inside, most = [], []

    def progress(event):
        inside.append(event)
        most.append(len(inside))
        inside.pop()

    Scheduler(plan_of(*[10] * 50), num_workers=8, progress=progress).run.run()
    assert set(most) == {1}


def test_trace_has_a_span_a_block_and_a_span_a_group():
    trace = Trace()
    Scheduler(plan_of(30, 30, blocks=3), num_workers=2, trace=trace).run.run()
    names = [span.name for span in trace.spans]
    assert names.count("read") == 6
    assert names.count("tensors") == 2
    assert sum(span.num_bytes for span in trace.spans if span.name == "read") == 60
    assert all(span.start <= span.end for span in trace.spans)
