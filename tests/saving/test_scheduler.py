"""The save's scheduler alone: small blocks, a destination in memory that judges the contract, workers held where the test says."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import itertools
import threading
import weakref
from contextlib import contextmanager

import pytest
import torch
from fakes import MemoryDestination, MemoryRoot, checkpoint_bytes
from support import PATIENCE_SECONDS, assorted, eventually, nothing_left, ramp, require_equal

import stio.sync
from stio import native
from stio.device.copy_out import Readiness
from stio.device.describe import LazyTensor, describe_tensors
from stio.errors import NoSpaceError, StorageError
from stio.limits import PAGE_BYTES
from stio.runtime import memory, workers
from stio.runtime.operation import Cancelled, start_thread
from stio.runtime.reports.progress import ProgressEvent
from stio.runtime.reports.trace import Trace
from stio.saving.plan import plan_writes
from stio.saving.scheduler import AHEAD_BLOCKS, NUM_WORKERS, WRITE_DEPTH, SaveScheduler
from stio.saving.staging_pool import StagingPool

pytestmark = pytest.mark.usefixtures("plain_workers")

BLOCK = 2 * PAGE_BYTES
FORMAT = {"format": "pt"}


def pages(count, start=0):
    """Return a tensor of so many blocks, almost."""
    return ramp(count * BLOCK // 4 - 100, start=start)


class Saving:
    """A save of a plan to a destination, in this thread (`save`) or beside it (`start`, `end`)."""

    def __init__(self, tensors, *, blocks=None, max_shard_bytes=None, destination=None, **options):
        self.plan = plan_writes(describe_tensors(tensors), max_shard_bytes=max_shard_bytes, block_bytes=BLOCK)
        self.num_blocks = sum(len(shard.blocks) for shard in self.plan.shards)
        self.pool = StagingPool(None if blocks is None else blocks * BLOCK)
        self.pool.fit(BLOCK, memory.allocate)
        self.destination = destination or MemoryDestination()
        self.staged, self.over, self.error, self.digests = threading.Event(), threading.Event(), None, None
        self.num_staged = 0
        self.on_staged = options.pop("on_staged", self.tell_staged)
        self.hasher = options.pop("hasher", None)
        self.run = SaveScheduler(self.plan, self.pool, **options)

    def tell_staged(self):
        self.num_staged += 1
        self.staged.set()

    def save(self):
        """Do what a save's body does; whatever becomes of it, nothing may be left."""
        transaction = None
        try:
            self.run.start(on_staged=self.on_staged)
            transaction = self.destination.begin(num_shards=len(self.plan.shards))
            self.run.write_to(transaction.create([shard.nbytes for shard in self.plan.shards]), self.hasher)
            self.digests = self.run.complete()
            index = self.plan.index(transaction.shard_names) if transaction.takes_index else None
            transaction.commit(index=index)
        finally:
            self.run.stop()
            self.run.join()
            if transaction is not None:
                transaction.roll_back()
            self.require_nothing_left()
        return self

    def require_nothing_left(self):
        self.pool.clear()
        assert self.pool.held_bytes == 0, "blocks are not back"
        assert self.run._workers._num_working == 0
        assert self.run._sources == ()
        assert self.destination.num_open == self.destination.num_transactions == self.destination.num_waiting == 0
        assert self.destination.violations == []

    def start(self):
        def body():
            try:
                self.save()
            except BaseException as error:  # noqa: BLE001  # the test looks at it
                self.error = error
            self.over.set()

        start_thread(body, name="save")
        return self

    def end(self):
        assert self.over.wait(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        return self

    @property
    def files(self):
        return self.destination.files


@contextmanager
def opened_after(gate):
    """Open a gate whatever happens: no test that fails may leave a thread behind it."""
    try:
        yield gate
    finally:
        gate.set()


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    monkeypatch.setattr(workers, "be_nice", lambda: None)  # with one priority, threads work in the order of their start
    with nothing_left():
        yield


@pytest.fixture(autouse=True, params=[True, False], ids=["engine", "plain"])
def by_engine(request, monkeypatch):
    """Whether the engine fills the blocks; the destination is no local one, so it writes none."""
    if not request.param:
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip("there is no engine here")
    return request.param


@pytest.fixture
def plain_only(by_engine):
    if by_engine:
        pytest.skip("the order is that of the engine's threads")


@pytest.fixture
def gate():
    with opened_after(threading.Event()) as gate:
        yield gate


@pytest.fixture
def alone(monkeypatch):
    """Give the run no thread of its own: the one that completes does everything, in an order that is fixed."""

    def refuse(*_, **__):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(workers, "start_thread", refuse)


@contextmanager
def copies_hooked(monkeypatch, hook):
    """Call `hook` before each block is filled with the bytes of tensors."""
    real = Readiness.copy_pieces

    def copy_pieces(self, sources, pieces, target, *rest):
        hook([(sources[piece.source].data, piece.start, target) for piece in pieces])
        return real(self, sources, pieces, target, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Readiness, "copy_pieces", copy_pieces)
        yield


# What comes out.


@pytest.mark.matrix
@pytest.mark.parametrize("stage_first", [True, False])
@pytest.mark.parametrize("blocks", [None, 1, 2, 5])
def test_the_file_is_the_formats(blocks, stage_first):
    tensors = assorted()
    made = Saving(tensors, blocks=blocks, stage_first=stage_first, hasher=hashlib.sha256).save()
    assert made.files == {"model.safetensors": checkpoint_bytes(tensors, FORMAT)}
    assert made.digests == [hashlib.sha256(made.files["model.safetensors"]).hexdigest()]
    assert made.num_staged == 1
    if blocks is not None:
        assert made.pool.peak_bytes <= blocks * BLOCK < made.plan.total_bytes
    assert sum(write.nbytes for write in made.destination.writes) == made.plan.shards[0].nbytes


@pytest.mark.matrix
@pytest.mark.parametrize("stage_first", [True, False])
@pytest.mark.parametrize("blocks", [None, 1, 3])
def test_many_shards(blocks, stage_first):
    tensors = {f"t{k}": ramp(1000 * k + 1, start=k) for k in range(12)} | {"none": torch.empty(0, 3)}
    made = Saving(
        tensors, blocks=blocks, max_shard_bytes=3 * BLOCK, stage_first=stage_first, hasher=hashlib.sha256
    ).save()
    shards = [data for name, data in made.files.items() if name.endswith(".safetensors")]
    assert len(shards) == len(made.plan.shards) > 4
    assert made.digests == [hashlib.sha256(data).hexdigest() for data in shards]
    require_equal(stio.sync.load(MemoryRoot(made.files)), tensors)


@pytest.mark.parametrize("tensors", [{}, {"none": torch.empty(0)}, {"one": torch.tensor(1.5)}], ids=str)
def test_hardly_anything(tensors):
    events = []
    made = Saving(tensors, progress=events.append, hasher=hashlib.sha256).save()
    assert made.files == {"model.safetensors": checkpoint_bytes(tensors, FORMAT)}
    assert made.num_staged == 1
    assert (events[-1].done_tensors, events[-1].done_bytes) == (len(tensors), made.plan.total_bytes)


def test_a_header_of_many_blocks():
    tensors = {f"{k:0100}": torch.empty(0) for k in range(300)} | {"last": ramp(10)}
    made = Saving(tensors, blocks=2, hasher=hashlib.sha256).save()
    assert made.num_blocks > 5
    assert made.files == {"model.safetensors": checkpoint_bytes(tensors, FORMAT)}
    assert made.digests == [hashlib.sha256(made.files["model.safetensors"]).hexdigest()]


@pytest.mark.parametrize("blocks", [None, 4])
def test_digests_of_blocks_that_are_filled_in_any_order(monkeypatch, blocks):
    """The first block is filled last, and in a pool of four it is the last to be written too."""
    others = threading.Semaphore(0)

    def hook(copies):
        if any(not start and tensor.nbytes > BLOCK for tensor, start, _ in copies):
            for _ in range(3):
                assert others.acquire(timeout=PATIENCE_SECONDS)
        else:
            others.release()

    with copies_hooked(monkeypatch, hook):
        made = Saving({"t": pages(9)}, blocks=blocks, hasher=hashlib.sha256).save()
    assert made.digests == [hashlib.sha256(made.files["model.safetensors"]).hexdigest()]
    assert made.files == {"model.safetensors": checkpoint_bytes({"t": pages(9)}, FORMAT)}


# Order and budget.


@pytest.mark.parametrize(
    ("stage_first", "blocks", "expected"),
    [(True, None, "ssssswwwww"), (False, None, "swswswswsw"), (True, 2, "sswswswsww"), (True, 1, "swswswswsw")],
)
def test_order_of_one_worker(alone, plain_only, stage_first, blocks, expected):
    trace = Trace()
    made = Saving({"t": pages(5)}, blocks=blocks, stage_first=stage_first, trace=trace).save()
    assert "".join(span.name[0] for span in trace.spans if span.name in ("stage", "write")) == expected
    assert [write.offset for write in made.destination.writes] == [k * BLOCK for k in range(5)]


def test_a_snapshot_does_not_wait_for_the_disk(gate):
    """Nothing can be written, and it is complete all the same."""
    made = Saving({"t": pages(12)}, destination=MemoryDestination(gate=gate)).start()
    assert made.staged.wait(PATIENCE_SECONDS)
    made.destination.wait_for_writers(4)
    assert len(made.destination.writes) == 4
    assert not made.over.is_set()
    gate.set()
    made.end()
    assert made.num_staged == 1


@pytest.mark.parametrize("tensors", [{"t": torch.tensor(1)}, {"t": pages(6)}], ids=["one block", "many"])
def test_a_snapshot_does_not_wait_for_the_destination(tensors):
    made = Saving(tensors)
    made.run.start(on_staged=made.on_staged)
    try:
        assert made.staged.wait(PATIENCE_SECONDS)
        assert made.destination.writes == []
    finally:
        made.run.stop()
        made.run.join()
    made.require_nothing_left()


def test_writing_comes_first_where_the_caller_waits_for_the_end(gate):
    """No more blocks are touched than are written at once and wait for that."""
    made = Saving({"t": pages(40)}, stage_first=False, destination=MemoryDestination(gate=gate))
    transaction = made.destination.begin(num_shards=1)
    made.run.write_to(transaction.create([made.plan.shards[0].nbytes]))
    made.run.start(on_staged=made.on_staged)
    made.destination.wait_for_writers(WRITE_DEPTH)
    # Those that wait at one moment may have been woken already: all blocks ahead are filled at the end only.
    assert eventually(lambda: made.pool.peak_bytes == (WRITE_DEPTH + AHEAD_BLOCKS) * BLOCK)
    assert eventually(lambda: len(made.pool.changed._waiting) == NUM_WORKERS - 1 - WRITE_DEPTH)  # the others wait
    # A worker that has staged a block may begin to write after one that has staged a later block.
    offsets = {write.offset for write in made.destination.writes}
    assert len(offsets) == len(made.destination.writes) == WRITE_DEPTH
    assert offsets <= {BLOCK * k for k in range(WRITE_DEPTH + AHEAD_BLOCKS)}
    gate.set()
    made.run.complete()
    transaction.commit(index=None)
    assert made.pool.peak_bytes <= (WRITE_DEPTH + AHEAD_BLOCKS) * BLOCK
    made.require_nothing_left()


@pytest.mark.parametrize("stage_first", [True, False])
def test_p8_one_shard_is_written_while_the_next_is_staged(gate, stage_first):
    trace, destination = Trace(), MemoryDestination(gate=gate)
    second = pages(3, start=5)

    def produce():
        destination.wait_for_writers(1)
        gate.set()
        return second

    tensors = {"a": pages(3), "b": LazyTensor(second.dtype, second.shape, produce)}
    made = Saving(
        tensors, blocks=4, max_shard_bytes=3 * BLOCK, destination=destination, trace=trace, stage_first=stage_first
    ).save()
    assert len(made.plan.shards) == 2
    assert made.pool.peak_bytes <= 4 * BLOCK < made.plan.total_bytes
    writes = [span for span in trace.spans if (span.name, span.detail) == ("write", "shard 1")]
    stages = [span for span in trace.spans if (span.name, span.detail) == ("stage", "shard 2")]
    assert any(one.start < other.end and other.start < one.end for one in writes for other in stages)
    require_equal(stio.sync.load(MemoryRoot(made.files)), {"a": pages(3), "b": second})


def test_two_saves_share_one_budget(gate, by_engine):
    """The second waits for blocks of the first, and gets them."""
    first = Saving({"t": pages(4)}, blocks=4, destination=MemoryDestination(gate=gate))
    first.require_nothing_left = lambda: None  # the second may hold blocks when the first ends
    first.start()
    assert first.staged.wait(PATIENCE_SECONDS)
    first.destination.wait_for_writers(1)
    second = Saving({"t": pages(6)}, destination=MemoryDestination())
    second.pool = first.pool
    second.run = SaveScheduler(second.plan, first.pool)
    second.run.start(on_staged=second.on_staged)
    # With the engine there is one worker for the fills of a file: of each save, and the first has two that do not write.
    assert eventually(lambda: len(first.pool.changed._waiting) == (2 if by_engine else NUM_WORKERS))
    assert not second.staged.is_set()
    gate.set()
    second.run.write_to(second.destination.begin(num_shards=1).create([second.plan.shards[0].nbytes]))
    second.run.complete()
    first.end()
    del first.require_nothing_left
    first.require_nothing_left()
    assert first.pool.peak_bytes == 4 * BLOCK
    assert second.num_staged == 1


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_fewer_threads_do_the_work_too(monkeypatch, allowed):
    started = []

    def refuse(run, *, name):
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(name)
        start_thread(run, name=name)

    monkeypatch.setattr(workers, "start_thread", refuse)
    made = Saving({"t": pages(7)}, blocks=3, hasher=hashlib.sha256).save()
    assert len(started) == allowed
    assert made.files == {"model.safetensors": checkpoint_bytes({"t": pages(7)}, FORMAT)}


# What it holds on to.


def test_c111_tensors_are_released_once_they_are_staged(gate):
    tensors = {f"t{k}": pages(2, start=k) for k in range(3)}
    expected = checkpoint_bytes(tensors, FORMAT)
    alive = [weakref.ref(tensor) for tensor in tensors.values()]
    made = Saving(tensors, destination=MemoryDestination(gate=gate))
    made.plan = plan_writes([], max_shard_bytes=None, block_bytes=BLOCK)  # the caller's plan goes, as a save's does
    sizes = [len(expected)]
    transaction = made.destination.begin(num_shards=1)
    made.run.start(on_staged=made.on_staged)
    assert made.staged.wait(PATIENCE_SECONDS)
    tensors["t0"].zero_()
    tensors.clear()
    assert eventually(lambda: [tensor() for tensor in alive] == [None] * 3)  # a worker may be returning from a copy
    made.run.write_to(transaction.create(sizes))
    gate.set()
    made.run.complete()
    transaction.commit(index=None)
    assert made.files == {"model.safetensors": expected}


def test_a_run_that_was_stopped_releases_its_tensors():
    tensors = {"t": pages(8)}
    alive = weakref.ref(tensors["t"])
    made = Saving(tensors, blocks=2)
    made.plan = None
    del tensors
    made.run.start(on_staged=made.on_staged)
    assert eventually(lambda: len(made.run._full) == 2 and len(made.pool.changed._waiting) == made.run._num_threads)
    assert alive() is not None
    made.run.stop()
    made.run.join()
    assert alive() is None
    assert not made.staged.is_set()


def test_a_run_does_not_keep_its_error():
    made = Saving({"t": pages(3)}, destination=MemoryDestination(fail_at=1))
    with pytest.raises(StorageError):
        made.save()
    assert made.run._workers._error is None


# Failures.


@pytest.mark.matrix
@pytest.mark.parametrize("stage_first", [True, False])
@pytest.mark.parametrize("blocks", [None, 1, 3])
@pytest.mark.parametrize("step", ["write", "finish"])
def test_c105_c106_a_failure_at_every_step(step, blocks, stage_first):
    tensors = {"a": pages(3), "b": pages(2), "c": pages(3)}
    for number in itertools.count(1):
        destination = MemoryDestination(fail_in=step, fail_at=number)
        made = Saving(
            tensors,
            blocks=blocks,
            max_shard_bytes=3 * BLOCK,
            destination=destination,
            stage_first=stage_first,
            hasher=hashlib.sha256,
        )
        try:
            made.save()
        except StorageError as error:
            assert error.errno == errno.EIO
            assert made.files == {}
            assert made.num_staged <= 1
            continue
        break
    assert number == destination.num_calls[step] + 1 == (made.num_blocks if step == "write" else 3) + 1


def test_c103_no_space_is_known_before_the_first_byte():
    destination = MemoryDestination(fail_in="create", fail_at=1, error_number=errno.ENOSPC)
    made = Saving({"t": pages(5)}, destination=destination)
    with pytest.raises(NoSpaceError) as caught:
        made.save()
    assert (caught.value.needed_bytes, destination.writes) == (made.plan.shards[0].nbytes, [])


@pytest.mark.parametrize("where", ["on_staged", "progress", "hash", "make"])
def test_errors_come_out_as_they_were_raised(where, monkeypatch):
    mine = KeyError("mine")
    calls = []

    def fail(*_):
        calls.append(1)
        if len(calls) > 1 or where != "progress":
            raise mine

    class Hasher:
        update = fail

    options = {"hash": {"hasher": Hasher}, "make": {}}.get(where, {where: fail})
    made = Saving({"t": pages(6)}, blocks=3, **options)
    if where == "make":
        made.pool.fit(BLOCK, fail)
    with pytest.raises(KeyError) as caught:
        made.save()
    assert caught.value is mine
    assert made.files == {}


def test_the_first_error_wins(gate):
    """A write that was under way fails after it, and is waited for."""
    destination = MemoryDestination(fail_at=1, gate=gate)
    made = Saving({"t": pages(8)}, destination=destination).start()
    destination.wait_for_writers(4)
    gate.set()
    with pytest.raises(StorageError) as caught:
        made.end()
    assert caught.value.errno == errno.EIO
    assert len(destination.writes) == 4


# Stops.


def test_stop_before_the_start():
    made = Saving({"t": pages(4)})
    made.run.stop()
    with pytest.raises(Cancelled):
        made.save()
    assert made.destination.writes == []
    assert made.pool.peak_bytes == 0


def test_an_engine_that_has_ended_ends_the_save(by_engine, monkeypatch):
    if not by_engine:
        pytest.skip("there is no engine in it")
    monkeypatch.setattr(native.Transfer, "take", lambda self, seconds=None: [])
    with pytest.raises(Cancelled):
        Saving({"a": pages(3)}).save()


def test_stop_while_nothing_may_be_written():
    made = Saving({"t": pages(8)}, blocks=3)
    made.run.start(on_staged=made.on_staged)
    assert eventually(lambda: len(made.run._full) == 3)
    made.run.stop()
    with pytest.raises(Cancelled):
        made.run.complete()
    made.require_nothing_left()


class Steps:
    """Counts calls, and acts at one of them."""

    def __init__(self, number):
        self.number, self.act = number, None
        self._count = itertools.count(1)

    def __call__(self, *_):
        if next(self._count) == self.number:
            self.act()


class Counting(MemoryDestination):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def start_write(self, write):
        self.steps()
        return super().start_write(write)


@pytest.mark.matrix
@pytest.mark.parametrize("stage_first", [True, False])
@pytest.mark.parametrize("hasher", [None, hashlib.sha256])
def test_stop_at_every_copy_and_every_write(monkeypatch, stage_first, hasher):
    """Counted together; the first number that is not reached ends the search."""
    for number in itertools.count(1):
        steps = Steps(number)
        options = {"blocks": 3, "stage_first": stage_first, "hasher": hasher}
        made = Saving({"t": pages(5)}, destination=Counting(steps), **options)
        steps.act = made.run.stop
        with copies_hooked(monkeypatch, steps):
            try:
                made.save()
            except Cancelled:
                assert made.files == {}
                continue
        break
    assert number == 2 * made.num_blocks + 1


@pytest.mark.parametrize("where", ["on_staged", "progress"])
def test_stop_in_a_callback(where):
    made = Saving({"t": pages(6)}, **{where: lambda *_: made.run.stop()})
    with pytest.raises(Cancelled):
        made.save()


def test_p4_stop_waits_for_writes_under_way(gate):
    made = Saving({"t": pages(8)}, destination=MemoryDestination(gate=gate)).start()
    made.destination.wait_for_writers(4)
    made.run.stop()
    assert not made.over.wait(0.01)
    gate.set()
    with pytest.raises(Cancelled):
        made.end()
    assert len(made.destination.writes) == 4


def test_stop_is_idempotent_and_too_late_changes_nothing():
    made = Saving({"t": pages(2)}).save()
    made.run.stop()
    made.run.join()
    assert made.files == {"model.safetensors": checkpoint_bytes({"t": pages(2)}, FORMAT)}


# Tensors that are made meanwhile.


def lazy(tensor, produce):
    return LazyTensor(tensor.dtype, tensor.shape, produce)


async def awaited(make):
    await asyncio.sleep(0)
    return make()


def in_rows(tensor):
    yield from (tensor[:1], tensor[1:1000], tensor[1000:1000], tensor[1000:])


def producing(tensors, kind):
    make = {
        "tensor": lambda tensor: lambda: tensor.clone(),
        "awaitable": lambda tensor: lambda: awaited(tensor.clone),
        "rows": lambda tensor: lambda: in_rows(tensor),
    }[kind]
    return {name: lazy(tensor, make(tensor)) for name, tensor in tensors.items()}


@pytest.mark.matrix
@pytest.mark.parametrize("kind", ["tensor", "awaitable", "rows"])
@pytest.mark.parametrize("blocks", [None, 1, 3])
@pytest.mark.parametrize("stage_first", [True, False])
def test_produced_tensors_are_saved_as_given_ones_are(kind, blocks, stage_first):
    tensors = {f"t{k}": pages(k + 1, start=k) for k in range(4)}
    mixed = {**producing(tensors, kind), "given": ramp(5000)}
    made = Saving(mixed, blocks=blocks, stage_first=stage_first, hasher=hashlib.sha256).save()
    assert made.files == {"model.safetensors": checkpoint_bytes({**tensors, "given": ramp(5000)}, FORMAT)}
    assert made.digests == [hashlib.sha256(made.files["model.safetensors"]).hexdigest()]


@pytest.mark.parametrize("sizes", [[100] * 20, [5000, 100, 7000, 3, 2048]], ids=["small", "uneven"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_p8_one_at_a_time_in_order_each_once(sizes, in_parts):
    alive, order = [], []

    def make(name, *shape):
        assert all(part() is None for part in alive), f"something is held when {name} is made"
        tensor = ramp(*shape)
        alive.append(weakref.ref(tensor))
        return tensor

    def producer(name, size):
        def produce():
            order.append(name)
            return make(name, size)

        def produce_parts():
            order.append(name)
            for k in range(0, size, 700):
                yield make(name, min(700, size - k))

        return produce_parts if in_parts else produce

    tensors = {
        f"t{k:02}": LazyTensor(torch.float32, [size], producer(f"t{k:02}", size)) for k, size in enumerate(sizes)
    }
    made = Saving(tensors).save()
    assert order == [name for shard in made.plan.shards for name in shard.names]
    assert all(part() is None for part in alive)


def test_a_tensor_without_bytes_is_produced_once():
    calls = []
    empty = LazyTensor(torch.float32, [0, 3], lambda: calls.append(1) or torch.empty(0, 3))
    made = Saving({"empty": empty}).save()
    assert calls == [1]
    assert made.files == {"model.safetensors": checkpoint_bytes({"empty": torch.empty(0, 3)}, FORMAT)}


@pytest.mark.parametrize("produce", [lambda: None, lambda: ramp(7), lambda: iter([ramp(5)]), lambda: ramp(6).double()])
def test_a_producer_that_gives_something_else(produce):
    made = Saving({"a": pages(3), "b": LazyTensor(torch.float32, [6], produce)}, blocks=2)
    with pytest.raises(ValueError, match="producer of 'b'"):
        made.save()
    assert made.files == {}


@pytest.mark.parametrize("where", ["call", "coroutine", "rows"])
def test_a_producer_that_raises(where):
    mine = OSError(5, "mine")

    def fail():
        raise mine

    async def fail_later():
        raise mine

    def rows():
        yield ramp(3)
        raise mine

    produce = {"call": fail, "coroutine": fail_later, "rows": rows}[where]
    made = Saving({"a": pages(3), "b": LazyTensor(torch.float32, [6], produce)}, blocks=2)
    with pytest.raises(OSError, match="mine") as caught:
        made.save()
    assert caught.value is mine


class Endless:
    """An awaitable producer that ends by a cancel only."""

    def __init__(self):
        self.begun, self.ended = threading.Event(), threading.Event()

    async def __call__(self):
        self.begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.ended.set()


def test_stop_ends_an_awaitable_producer():
    endless = Endless()
    made = Saving({"a": pages(3), "b": LazyTensor(torch.float32, [6], endless)}).start()
    assert endless.begun.wait(PATIENCE_SECONDS)
    made.run.stop()
    with pytest.raises(Cancelled):
        made.end()
    assert endless.ended.is_set()
    assert not made.staged.is_set()


def test_a_failed_write_ends_an_awaitable_producer(gate):
    endless = Endless()
    destination = MemoryDestination(fail_at=1, gate=gate)
    made = Saving(
        {"a": pages(3), "b": LazyTensor(torch.float32, [6], endless)}, destination=destination, stage_first=False
    ).start()
    try:
        destination.wait_for_writers(1)
        assert endless.begun.wait(PATIENCE_SECONDS)
        gate.set()
        with pytest.raises(StorageError):
            made.end()
        assert endless.ended.is_set()
    finally:
        made.run.stop()
        assert made.over.wait(PATIENCE_SECONDS)


def test_stop_between_rows():
    made_rows = []

    def rows():
        for k in range(50):
            made_rows.append(k)
            if k == 3:
                made.run.stop()
            yield ramp(10)

    made = Saving({"t": LazyTensor(torch.float32, [500], rows)})
    with pytest.raises(Cancelled):
        made.save()
    assert made_rows == [0, 1, 2, 3]


# What it says of itself.


@pytest.mark.parametrize("stage_first", [True, False])
def test_progress_is_monotonic_and_ends_at_the_totals(stage_first):
    events: list[ProgressEvent] = []
    inside = []

    def progress(event):
        inside.append(event)
        assert len(inside) == 1, "called twice at once"
        events.append(event)
        inside.pop()

    tensors = {f"t{k}": ramp(700 * k) for k in range(20)} | {"none": torch.empty(0)}
    made = Saving(tensors, blocks=4, max_shard_bytes=50_000, progress=progress, stage_first=stage_first).save()
    assert len(events) == made.num_blocks + 1, "one at the start, one a block"
    assert (events[0].done_bytes, events[0].done_tensors) == (0, 0)
    for before, after in itertools.pairwise(events):
        assert before.done_bytes <= after.done_bytes
        assert before.done_tensors <= after.done_tensors
        assert before.seconds <= after.seconds
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert {(event.total_bytes, event.total_tensors) for event in events} == {(total, 21)}
    assert (events[-1].done_bytes, events[-1].done_tensors) == (total, 21)


def test_trace_has_spans_for_each_block_and_each_file():
    trace = Trace()
    made = Saving({"a": pages(3), "b": pages(2)}, max_shard_bytes=3 * BLOCK, trace=trace, hasher=hashlib.sha256).save()
    file_bytes = sum(shard.nbytes for shard in made.plan.shards)
    for name in ("stage", "write", "hash"):
        spans = [span for span in trace.spans if span.name == name]
        assert len(spans) == made.num_blocks
        assert sum(span.num_bytes for span in spans) == file_bytes
    assert sorted(span.detail for span in trace.spans if span.name == "sync") == ["shard 1", "shard 2"]
    assert all(span.start <= span.end for span in trace.spans)
    lanes = {"caller", "save", *(f"save-{k}" for k in range(1, NUM_WORKERS))}
    assert {span.lane for span in trace.spans} <= lanes | {f"engine-{k}" for k in range(1, native.MAX_THREADS + 1)}
