"""Tensors made while they are saved: what producers may give, what is refused by name, what is held and for how long."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest
import torch
from support import PATIENCE_SECONDS, bits_of, eventually, nothing_left, ramp

from stio.device.copy_out import Readiness
from stio.device.describe import LazyTensor, describe_tensors
from stio.runtime import memory
from stio.runtime.calls import LoopTask, run_on_loop
from stio.runtime.operation import Cancelled, start_thread
from stio.saving.tensors import ProducedTensors

pytestmark = pytest.mark.usefixtures("plain_workers")

WHOLE = ramp(10, 4)


def source_of(produce, tensor=WHOLE):
    return describe_tensors({"t": LazyTensor(tensor.dtype, tensor.shape, produce)})[0]


def produced(source, *, step_bytes=None, production=None):
    """Bring a tensor's bytes into memory, in pieces as blocks cut them."""
    production = production or ProducedTensors()
    region = memory.allocate(source.nbytes)
    step = step_bytes or source.nbytes
    for start in range(0, source.nbytes, step):
        target = region.sub(start, min(step, source.nbytes - start))
        for copy in production.copies(source, start, target):
            Readiness().copy_out([copy])
            del copy
    assert production._part is None, "something is held"
    return region.sub(0, source.nbytes).tobytes()


async def awaited(value):
    await asyncio.sleep(0)
    return value


def in_rows(tensor, *counts):
    at = 0
    for count in counts:
        yield tensor[at : at + count]
        at += count


class Awaitable:
    def __init__(self, value):
        self.value = value

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return self.value


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


# What may be given.


@pytest.mark.matrix
@pytest.mark.parametrize("step_bytes", [None, 4, 12, 20, 64, 156])
@pytest.mark.parametrize(
    "produce",
    [
        pytest.param(lambda: WHOLE, id="tensor"),
        pytest.param(lambda: WHOLE.T.contiguous().T, id="transposed"),
        pytest.param(lambda: torch.nn.Parameter(WHOLE), id="parameter"),
        pytest.param(lambda: awaited(WHOLE), id="coroutine"),
        pytest.param(lambda: Awaitable(WHOLE), id="awaitable"),
        pytest.param(lambda: awaited(in_rows(WHOLE, 4, 6)), id="awaited rows"),
        pytest.param(lambda: in_rows(WHOLE, 10), id="all rows"),
        pytest.param(lambda: in_rows(WHOLE, 1, 3, 2, 4), id="uneven rows"),
        pytest.param(lambda: in_rows(WHOLE, 0, 4, 0, 0, 6, 0), id="some of no rows"),
        pytest.param(lambda: in_rows(WHOLE, *[1] * 10), id="row by row"),
        pytest.param(lambda: list(in_rows(WHOLE, 7, 3)), id="list"),
    ],
)
def test_what_may_be_given(produce, step_bytes):
    assert produced(source_of(produce), step_bytes=step_bytes) == bits_of(WHOLE)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_any_dtype(dtype):
    tensor = ramp(6, 3, dtype=dtype)
    assert produced(source_of(lambda: in_rows(tensor, 2, 4), tensor), step_bytes=8) == bits_of(tensor)


@pytest.mark.parametrize("shape", [(0,), (0, 4), (3, 0), (2, 0, 5)])
@pytest.mark.parametrize("give", [lambda t: t, lambda t: awaited(t), lambda t: iter([t]), lambda t: t.split(1)])
def test_no_elements(shape, give):
    tensor, calls = torch.empty(shape), []
    source = source_of(lambda: calls.append(1) or give(tensor), tensor)
    production = ProducedTensors()
    assert list(production.copies(source, 0, memory.allocate(1).sub(1, 0))) == []
    assert calls == [1]


@pytest.mark.parametrize(
    ("shape", "value", "found"),
    [
        ((3, 0), [torch.empty(2, 0)], "2 rows, 0 bytes in all"),
        ((3, 0), [], "0 rows, 0 bytes in all"),
        ((3, 0), [torch.empty(2, 0), torch.empty(2, 0)], "more rows"),
        ((3, 0), torch.empty(4, 0), r"\[4, 0\]"),
        ((0, 4), [torch.empty(0, 5)], r"\[0, 5\]"),
        ((0, 4), [torch.empty(1, 4)], "more rows"),
        ((0, 4), torch.empty(0, 4, dtype=torch.int32), "int32"),
        ((0, 4), [torch.empty(0, 4, device="meta")], "meta"),
        ((0, 4), [None], "NoneType"),
        ((0, 4), None, "NoneType"),
    ],
)
def test_no_elements_of_another_kind(shape, value, found):
    source = source_of(lambda: value, torch.empty(shape))
    with pytest.raises(ValueError, match=f"'t' gave .*{found}"):
        list(ProducedTensors().copies(source, 0, memory.allocate(1).sub(1, 0)))


def test_a_scalar():
    tensor = torch.tensor(2.5)
    assert produced(source_of(lambda: tensor, tensor)) == bits_of(tensor)


# What may not.


WRONG = [
    pytest.param(lambda: None, "NoneType", id="nothing"),
    pytest.param(lambda: 7, "int", id="number"),
    pytest.param(lambda: "rows", "str", id="text"),
    pytest.param(lambda: WHOLE.numpy(), "ndarray", id="array"),
    pytest.param(lambda: iter([None]), "NoneType", id="rows of nothing"),
    pytest.param(lambda: awaited(None), "NoneType", id="awaited nothing"),
    pytest.param(lambda: LazyTensor(WHOLE.dtype, WHOLE.shape, lambda: WHOLE), "LazyTensor", id="another producer"),
    pytest.param(lambda: WHOLE.double(), "float64", id="dtype"),
    pytest.param(lambda: WHOLE.reshape(4, 10), r"\[4, 10\]", id="shape"),
    pytest.param(lambda: WHOLE[:9], r"\[9, 4\]", id="shorter"),
    pytest.param(lambda: WHOLE.reshape(-1), r"\[40\]", id="flat"),
    pytest.param(lambda: in_rows(WHOLE.double(), 5, 5), "float64", id="rows' dtype"),
    pytest.param(lambda: in_rows(WHOLE.reshape(10, 2, 2), 5, 5), r"\[5, 2, 2\]", id="rows' shape"),
    pytest.param(lambda: in_rows(WHOLE, 5, 4), "144 bytes in all", id="too few rows"),
    pytest.param(lambda: iter([]), "0 bytes in all", id="no rows"),
    pytest.param(lambda: iter([*in_rows(WHOLE, 10), WHOLE[:1]]), "more rows", id="one part too many"),
    pytest.param(lambda: iter([WHOLE[:8], WHOLE[:3]]), "more rows", id="the last part too long"),
    pytest.param(lambda: iter([WHOLE, None]), "NoneType", id="something after the rows"),
    pytest.param(lambda: WHOLE.to("meta"), "meta", id="meta"),
]  # fmt: skip


@pytest.mark.matrix
@pytest.mark.parametrize(("produce", "found"), WRONG)
@pytest.mark.parametrize("step_bytes", [None, 64])
def test_what_is_not_what_was_announced(produce, found, step_bytes):
    with pytest.raises(ValueError, match=rf"producer of 't' gave .*{found}.*, not torch.float32 \[10, 4\]"):
        produced(source_of(produce), step_bytes=step_bytes)


def test_a_row_of_a_vector_is_no_scalar():
    vector = ramp(3)
    with pytest.raises(ValueError, match=r"gave torch.float32 \[\]"):
        produced(source_of(lambda: iter(vector), vector))


def test_a_scalar_has_no_rows():
    scalar = torch.tensor(2.5)
    with pytest.raises(ValueError, match="gave"):
        produced(source_of(lambda: iter([scalar]), scalar))


def freed():
    tensor = WHOLE.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("produce", [freed, WHOLE.to_sparse, lambda: iter([freed()])], ids=["freed", "sparse", "rows"])
def test_what_cannot_be_saved_is_refused_as_a_given_tensor_is(produce):
    with pytest.raises(ValueError, match="'t'"):
        produced(source_of(produce))


@pytest.mark.parametrize("where", ["call", "coroutine", "rows", "end"])
def test_errors_come_out_as_they_were_raised(where):
    mine = KeyError("mine")

    def fail():
        raise mine

    async def fail_later():
        raise mine

    def rows():
        yield from in_rows(WHOLE, 4, 6 if where == "end" else 2)
        raise mine

    with pytest.raises(KeyError) as caught:
        produced(source_of({"call": fail, "coroutine": fail_later}.get(where, rows)))
    assert caught.value is mine


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
def test_an_awaitable_that_wants_to_exit_does_not_end_the_loop(kind):
    async def leave():
        raise kind("mine")

    with pytest.raises(kind, match="mine"):
        produced(source_of(leave))
    assert run_on_loop(lambda: awaited(5)) == 5


# What is held.


def test_produced_once_whatever_the_blocks():
    calls = []

    def produce():
        calls.append(1)
        return WHOLE

    produced(source_of(produce), step_bytes=8)
    assert len(calls) == 1


@pytest.mark.parametrize("kind", ["tensor", "awaitable", "rows"])
def test_released_with_its_last_byte(kind):
    alive = []

    def make():
        tensor = WHOLE.clone()
        alive.append(weakref.ref(tensor))
        return tensor

    def rows():
        tensor = make()
        yield from in_rows(tensor, 6, 4)

    production = ProducedTensors()
    source = source_of({"tensor": make, "awaitable": lambda: awaited(make()), "rows": rows}[kind])
    region = memory.allocate(source.nbytes)
    for start in (0, 80):
        for copy in production.copies(source, start, region.sub(start, 80)):
            Readiness().copy_out([copy])
            assert alive[0]() is not None
            del copy
    # The loop's thread may be on its last steps out of the task.
    assert eventually(lambda: alive[0]() is None) if kind == "awaitable" else alive[0]() is None


def test_one_part_at_a_time():
    alive = []

    def rows():
        for k in range(10):
            assert all(part() is None for part in alive), f"a part is held when part {k} is made"
            part = WHOLE[k : k + 1].clone()
            alive.append(weakref.ref(part))
            yield part
            del part

    assert produced(source_of(rows), step_bytes=24) == bits_of(WHOLE)
    assert len(alive) == 10


def test_clear_releases_what_was_not_used_up():
    closed = []

    def rows():
        try:
            yield from in_rows(WHOLE, 4, 6)
        finally:
            closed.append(1)

    production = ProducedTensors()
    source = source_of(rows)
    assert len(list(production.copies(source, 0, memory.allocate(80).sub(0, 80)))) == 2
    assert not closed
    production.clear()
    assert closed


# Stops.


class Pending:
    """An awaitable producer that waits until it is cancelled or released."""

    def __init__(self, *, stubborn=False):
        self.begun, self.ended = threading.Event(), threading.Event()
        self.release = None
        self.stubborn = stubborn
        self.cancels = 0

    async def produce(self):
        self.release = asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self.begun.set()
        try:
            while not self.release.is_set():
                try:
                    await self.release.wait()
                except asyncio.CancelledError:
                    self.cancels += 1
                    if not self.stubborn:
                        raise
        finally:
            self.ended.set()
        return WHOLE

    def go(self):
        self.loop.call_soon_threadsafe(self.release.set)


class Consumer:
    """Brings a tensor on a thread of its own."""

    def __init__(self, produce):
        self.production, self.over, self.error = ProducedTensors(), threading.Event(), None
        self.data = b""

        def body():
            try:
                self.data = produced(source_of(produce), production=self.production)
            except BaseException as error:  # noqa: BLE001  # the test looks at it
                self.error = error
            self.over.set()

        start_thread(body, name="consumer")

    def end(self):
        assert self.over.wait(PATIENCE_SECONDS)
        if self.error is not None:
            raise self.error
        return self.data


def test_stop_ends_an_awaitable_and_waits_for_it():
    pending = Pending()
    consumer = Consumer(pending.produce)
    assert pending.begun.wait(PATIENCE_SECONDS)
    consumer.production.stop()
    with pytest.raises(Cancelled):
        consumer.end()
    assert pending.ended.is_set()
    consumer.production.stop()


def test_stop_waits_for_an_awaitable_that_will_not_end():
    pending = Pending(stubborn=True)
    consumer = Consumer(pending.produce)
    assert pending.begun.wait(PATIENCE_SECONDS)
    consumer.production.stop()
    assert eventually(lambda: pending.cancels == 1)
    assert not consumer.over.is_set()
    pending.go()
    with pytest.raises(Cancelled):
        consumer.end()
    assert pending.ended.is_set()


def test_stop_of_a_coroutine_that_has_not_begun():
    """It is closed, so Python does not warn that it was never awaited."""
    gate, held = threading.Event(), threading.Event()

    def hold():
        held.set()
        gate.wait(PATIENCE_SECONDS)

    loop = run_on_loop(asyncio_loop)
    loop.call_soon_threadsafe(hold)
    assert held.wait(PATIENCE_SECONDS)
    pending = Pending()
    consumer = Consumer(pending.produce)
    try:
        assert eventually(lambda: consumer.production._awaited is not None)
        consumer.production.stop()
    finally:
        gate.set()
    with pytest.raises(Cancelled):
        consumer.end()
    assert not pending.begun.is_set()
    gc.collect()  # a complaint would fail the test


async def asyncio_loop():
    return asyncio.get_running_loop()


def test_after_a_stop_nothing_is_produced():
    production = ProducedTensors()
    production.stop()
    with pytest.raises(Cancelled):
        produced(source_of(lambda: pytest.fail("produced")), production=production)


def test_a_stop_inside_the_producer_leaves_its_coroutine_closed():
    production = ProducedTensors()

    def produce():
        production.stop()
        return awaited(WHOLE)

    with pytest.raises(Cancelled):
        produced(source_of(produce), production=production)
    gc.collect()


def test_a_stop_is_seen_between_rows():
    production, made = ProducedTensors(), []

    def rows():
        for k in range(10):
            made.append(k)
            if k == 3:
                production.stop()
            yield WHOLE[k : k + 1]

    with pytest.raises(Cancelled):
        produced(source_of(rows), production=production)
    assert made == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["coroutine", "call", "rows"])
def test_a_cancel_that_is_not_ours_is_a_failure(kind):
    def call():
        raise asyncio.CancelledError("theirs")

    async def coroutine():
        call()

    def rows():
        yield WHOLE[:3]
        call()

    with pytest.raises(RuntimeError, match="producer of .* was cancelled"):
        produced(source_of({"coroutine": coroutine, "call": call, "rows": rows}[kind]))


def test_a_stop_is_seen_between_rows_that_come_after_the_last_one():
    production = ProducedTensors()

    def rows():
        yield WHOLE
        for k in range(100):
            if k == 3:
                production.stop()
            assert k < 4
            yield WHOLE[:0]

    with pytest.raises(Cancelled):
        produced(source_of(rows), production=production)


# The task below it.


def test_tasks_return_and_raise():
    assert LoopTask(lambda: awaited(3)).result() == 3
    assert LoopTask(lambda: awaited(None)).result() is None

    async def fail():
        raise OSError(5, "mine")

    with pytest.raises(OSError, match="mine"):
        LoopTask(fail).result()


def test_a_cancel_too_late_changes_nothing():
    task = LoopTask(lambda: awaited(3))
    assert task.result() == 3
    task.cancel()
    run_on_loop(asyncio_loop)
    assert task.result() == 3


def test_a_cancelled_task_says_so():
    pending = Pending()
    task = LoopTask(pending.produce)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        task.result()
