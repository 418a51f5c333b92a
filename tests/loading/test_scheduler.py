"""The scheduler: plans written here, a read path that does what the test says, the plain executor or one of the test's."""

from __future__ import annotations

import itertools
import queue
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack

import pytest
from support import PATIENCE_SECONDS, eventually, nothing_left

from stio.device.base import LoadedGroup
from stio.errors import HostMemoryError
from stio.loading import scheduler as scheduler_module
from stio.loading.options import LoadOptions
from stio.loading.plain import PlainExecutor
from stio.loading.plan import Block, Group, ReadPlan
from stio.loading.read_paths import Delivery
from stio.loading.scheduler import LoadScheduler, PlannedLoad
from stio.runtime import workers
from stio.runtime.operation import Cancelled, start_thread
from stio.runtime.reports.progress import ProgressEvent
from stio.runtime.reports.trace import Trace

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

    image = None
    label = "read"
    is_native = False

    def __init__(
        self,
        on_read: Callable[[Group, Block], None] = lambda *_: None,
        on_finish: Callable[[Group], None] = lambda _: None,
    ) -> None:
        self.on_read, self.on_finish = on_read, on_finish
        self.begun: list[int] = []
        self.reads: list[tuple[int, int]] = []
        self.finished: list[int] = []
        self.inside = 0
        self.is_closed = self.is_completed = False
        self._lock = threading.Lock()

    @property
    def memory(self) -> object:
        return self

    def begin(self, groups: Sequence[Group]) -> None:
        self.begun += [group.index for group in groups]

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        assert group.index in self.begun
        with self._lock:
            self.reads.append((group.index, block.at))
            self.inside += 1
        try:
            self.on_read(group, block)
        finally:
            with self._lock:
                self.inside -= 1

    def budget_bytes(self, group: Group) -> int:
        return group.nbytes

    def make_tensors(self, group: Group) -> LoadedGroup:
        self.finished.append(group.index)
        self.on_finish(group)
        return LoadedGroup({})

    def complete(self) -> None:
        assert not self.is_completed
        self.is_completed = True

    def close(self) -> None:
        assert not self.inside
        self.is_closed = True


class Arranging(PlainExecutor):
    """Counts the calls that have reordered what is left."""

    num_arranged = 0

    def arrange(self, order: Iterable[int]) -> None:
        super().arrange(order)
        self.num_arranged += 1


class FakeExecutor:
    """Groups are complete when the test says so."""

    name = "fake"

    def __init__(self) -> None:
        self.added: list[list[int]] = []
        self.orders: list[list[int]] = []
        self.batches: queue.SimpleQueue[list[Group] | BaseException] = queue.SimpleQueue()
        self.groups: list[Group] = []
        self.num_stops = 0
        self.is_closed = False

    def add(self, groups: Sequence[Group]) -> None:
        self.added.append([group.index for group in groups])
        self.groups += groups

    def arrange(self, order: Iterable[int]) -> None:
        self.orders.append(list(order))

    def take(self) -> list[Group]:
        batch = self.batches.get(timeout=PATIENCE_SECONDS)
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def complete(self, *indices: int) -> None:
        self.batches.put([next(group for group in self.groups if group.index == index) for index in indices])

    def wake(self) -> None:
        self.batches.put([])

    def stop(self) -> None:
        self.num_stops += 1
        self.batches.put([])

    def close(self) -> None:
        self.is_closed = True


class Scheduler:
    """A run beside the test's thread."""

    def __init__(
        self,
        plan: ReadPlan,
        path: FakePath | None = None,
        *,
        budget_bytes: int = 1 << 30,
        num_workers: int = 1,
        executor=None,
        deliver=None,
        trace=None,
        progress=None,
        hold=False,
        on_blocked=lambda: None,
        **parts,
    ) -> None:
        self.path = path or FakePath()
        self.executor = executor or Arranging([self.path], num_workers=num_workers, trace=trace)
        self.delivered: list[int] = []
        self.error: BaseException | None = None
        self.over = threading.Event()
        self.run = LoadScheduler(
            PlannedLoad("", plan, [self.path], self.executor, budget_bytes, **parts),
            LoadOptions(progress=progress, trace=trace),
            Delivery(deliver=deliver or self.deliver, hold=hold, on_blocked=on_blocked),
        )

    def deliver(self, group: Group, loaded: LoadedGroup) -> None:
        self.delivered.append(group.index)

    @property
    def waits_for_budget(self) -> bool:
        """Whether nothing happens until a group is released."""
        return self.run._blocked and not self.path.inside and self.delivered == self.path.begun

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


@pytest.mark.parametrize("num_threads", [0, 1])
def test_fewer_threads_than_requested_do_the_work_too(monkeypatch, num_threads):
    """Where the system refuses all of them, the scheduler's own thread reads."""
    started = []

    def refuse(run, *, name):
        if len(started) == num_threads:
            raise RuntimeError("can't start new thread")
        started.append(name)
        start_thread(run, name=name)

    monkeypatch.setattr(workers, "start_thread", refuse)
    made = Scheduler(plan_of(*[6] * 20, blocks=3), num_workers=4, budget_bytes=30)
    made.run.run()
    assert sorted(made.delivered) == list(range(20))
    assert len(made.path.reads) == 60


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
    assert eventually(lambda: made.run._blocked)
    assert made.path.begun == [0]
    go.set()
    made.end()
    assert made.path.reads[1] == (1, 0)


def test_hold_stops_reading_when_the_consumer_lags():
    made = Scheduler(plan_of(*[40] * 10), budget_bytes=100, num_workers=4, hold=True).start()
    assert eventually(lambda: len(made.delivered) == 2 and made.waits_for_budget)
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


def test_p8_a_group_counts_until_its_delivery_has_ended():
    """The consumer may have released a group while the thread that delivers it has not run a line since."""
    entered, go = threading.Event(), threading.Event()

    def deliver(group, loaded):
        made.deliver(group, loaded)
        made.run.release(group)  # the consumer's
        entered.set()
        assert go.wait(PATIENCE_SECONDS)

    made = Scheduler(plan_of(60, 60), budget_bytes=100, num_workers=2, hold=True, deliver=deliver).start()
    assert entered.wait(PATIENCE_SECONDS)
    assert (made.path.begun, made.run.budget.used_bytes) == ([0], 60)
    go.set()
    made.end()
    assert (made.delivered, made.run.budget.used_bytes) == ([0, 1], 0)


def test_groups_without_bytes_of_the_load_need_no_budget():
    """They all begin at once: the consumer keeps their memory."""

    class Kept(FakePath):
        def budget_bytes(self, group: Group) -> int:
            return 0

    made = Scheduler(plan_of(*[60] * 9), Kept(), budget_bytes=1, executor=FakeExecutor())
    made.start()
    assert eventually(lambda: made.executor.added == [list(range(9))])
    made.executor.complete(*range(9))
    made.end()
    assert made.run.budget.peak_bytes == 0


@pytest.mark.parametrize("first_bytes", [1, sys.maxsize])
def test_the_first_groups_move_before_the_others_are_added(monkeypatch, first_bytes):
    """With `first_bytes` also before the memory of the others is allocated."""
    monkeypatch.setattr(scheduler_module, "FIRST_BYTES", 150)
    calls, executor = [], FakeExecutor()

    class Calls(FakePath):
        def begin(self, groups):
            calls.append(("begin", [group.index for group in groups]))

    add = executor.add
    executor.add = lambda groups: (calls.append(("add", [group.index for group in groups])), add(groups))
    made = Scheduler(plan_of(*[100] * 5), Calls(), executor=executor, first_bytes=first_bytes).start()
    executor.batches.put(list(made.run.plan.groups))
    made.end()
    assert made.delivered == [0, 1, 2, 3, 4]
    split = [("begin", [0]), ("add", [0]), ("begin", [1, 2, 3, 4]), ("add", [1, 2]), ("add", [3, 4])]
    whole = [("begin", [0, 1, 2, 3, 4]), ("add", [0, 1]), ("add", [2, 3, 4])]
    assert calls == (split if first_bytes == 1 else whole)


@pytest.mark.parametrize("error", [MemoryError, Cancelled])
def test_an_end_between_the_first_groups_and_the_others(error):
    """What has begun is stopped; nothing is delivered, and everything is closed."""

    class Refusing(FakePath):
        def begin(self, groups):
            super().begin(groups)
            if 0 in self.begun and groups[0].index == 1:
                raise error

    made = Scheduler(plan_of(*[100] * 3), Refusing(), executor=FakeExecutor(), first_bytes=1).start()
    with pytest.raises(error):
        made.end()
    assert made.delivered == []
    assert made.executor.is_closed
    assert made.path.is_closed
    assert made.executor.added == [[0]]


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
    assert eventually(lambda: made.executor.num_arranged == 2)
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
    assert eventually(lambda: made.waits_for_budget)
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
    assert eventually(lambda: made.executor.num_arranged == 1)
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
        assert eventually(lambda: made.waits_for_budget)
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
    assert len(made.path.reads) <= 2, "no group begins after the error"


def test_first_error_wins():
    second_has_begun = threading.Event()

    def on_read(group, _):
        if group.index == 0:
            second_has_begun.wait(PATIENCE_SECONDS)
            raise KeyError("first")
        second_has_begun.set()
        assert eventually(lambda: made.executor._workers.stopped)
        raise ValueError("second")

    made = Scheduler(plan_of(10, 10), FakePath(on_read), num_workers=2)
    with pytest.raises(KeyError, match="first"):
        made.run.run()


def test_a_run_does_not_keep_its_error():
    def fail(*_):
        raise KeyError

    made = Scheduler(plan_of(10), FakePath(fail))
    with pytest.raises(KeyError):
        made.run.run()
    assert made.executor._workers._error is None


@pytest.mark.parametrize("end", ["well", "stop", "take", "begin", "make_tensors"])
def test_the_executor_is_closed_before_the_memory_is_released(end):
    closed = []

    class Path(FakePath):
        def begin(self, groups):
            super().begin(groups)
            if end == "begin" and len(self.begun) > 1:
                raise HostMemoryError("no memory")

        def close(self):
            closed.append("path")

    class Executor(FakeExecutor):
        def close(self):
            closed.append("executor")

    def finish(_):
        if end == "make_tensors":
            raise KeyError("mine")

    owned = ExitStack()
    owned.callback(closed.append, "files")
    made = Scheduler(
        plan_of(60, 60), Path(on_finish=finish), executor=Executor(), budget_bytes=100, owned=owned
    ).start()  # fmt: skip
    assert eventually(lambda: made.executor.added == [[0]])
    if end == "stop":
        made.run.stop()
        made.executor.complete(0)
    elif end == "take":
        made.executor.batches.put(OSError(5, "mine"))
    else:
        made.executor.complete(0)
    if end == "well":
        assert eventually(lambda: len(made.executor.added) == 2)
        made.executor.complete(1)
        made.end()
    else:
        with pytest.raises((Cancelled, OSError, KeyError, HostMemoryError)):
            made.end()
    assert closed == ["executor", "path", "files"]
    assert made.delivered == {"well": [0, 1], "begin": [0]}.get(end, [])


# The executor.


def test_what_is_complete_is_delivered_in_its_order_and_makes_room():
    made = Scheduler(plan_of(*[40] * 5), executor=FakeExecutor(), budget_bytes=120).start()
    assert eventually(lambda: made.executor.added == [[0, 1, 2]])
    made.executor.complete(1, 0)
    assert eventually(lambda: made.executor.added == [[0, 1, 2], [3, 4]])
    made.executor.complete(4)
    made.executor.wake()  # nothing
    made.executor.complete(2, 3)
    made.end()
    assert made.delivered == [1, 0, 4, 2, 3]
    assert made.run.read_bytes == 200


def test_a_stop_delivers_nothing_of_a_batch_that_is_taken():
    made = Scheduler(plan_of(10, 10, 10), executor=FakeExecutor(), deliver=lambda group, loaded: made.run.stop())
    made.start()
    assert eventually(lambda: made.executor.groups)
    made.executor.complete(0, 1, 2)
    with pytest.raises(Cancelled):
        made.end()
    assert made.path.finished == [0]
    assert made.executor.is_closed


def test_it_says_who_moves_the_bytes():
    made = Scheduler(plan_of(10), executor=FakeExecutor())
    assert made.run.describe() == "10 bytes of 1 tensors by FakePath, fake"


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
    assert names.count("begin") == 1
    assert sum(span.num_bytes for span in trace.spans if span.name == "read") == 60
    assert all(span.start <= span.end for span in trace.spans)
