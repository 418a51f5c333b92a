"""Streams, and what the caller's own code does inside a checkpoint's block: errors, breaks, drops, closes."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from contextlib import suppress

import anyio
import pytest
from support import (
    PATIENCE_SECONDS,
    Gate,
    HookedRoot,
    eventually,
    eventually_async,
    module_of,
    nothing_left,
    num_threads,
    oracle,
    quick_switches,
    ramp,
    require_equal,
    save_file,
    save_sharded,
    spin,
)

import stio
from stio import sync
from stio.errors import ClosedError, SliceError, TensorNotFoundError
from stio.loading import scheduler as load_module
from stio.runtime.operation import Operation

pytestmark = pytest.mark.anyio

KIB = 1 << 10
SMALL = {"memory": "copy", "budget_bytes": 64 * KIB}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_sharded({f"layer.{k}": ramp(64, 64 + k) for k in range(12)}, tmp_path_factory.mktemp("model"), 3)


@pytest.fixture
def root(directory):
    root = HookedRoot(directory)
    yield root
    root.close()


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


class Mine(Exception):
    """Raised by the caller's code."""


# Closes beside other threads.


def test_a_close_beside_threads_that_begin_operations(directory):
    """The close lists the operations of the checkpoint while another thread adds one."""
    with sync.open(directory) as checkpoint:
        own = checkpoint._twin._own

        def begin_operation():
            return own(Operation(lambda operation: None, name="load"))

        operations = [begin_operation() for _ in range(10_000)]

        def begin_operations():
            with suppress(ClosedError):
                while True:
                    operations.append(begin_operation())

        threads = [threading.Thread(target=begin_operations) for _ in range(8)]
        with quick_switches():
            for thread in threads:
                thread.start()
            checkpoint.close()
        for thread in threads:
            thread.join()


def test_a_closed_checkpoint_is_named_without_secrets():
    checkpoint = stio.open("https://me:secret@host/model.safetensors")
    with pytest.raises(ClosedError) as caught:
        checkpoint._own(Operation(lambda operation: None, name="load"))
    assert "host" in str(caught.value)
    assert "secret" not in str(caught.value)


# The caller's own errors.


async def test_the_callers_error_in_the_block_comes_out_as_it_is(directory):
    mine = Mine()
    with pytest.raises(Mine) as caught:
        async with stio.open(directory):
            raise mine
    assert caught.value is mine
    assert caught.value.__context__ is None


async def test_the_callers_error_in_a_stream_comes_out_as_it_is(directory):
    mine = Mine()
    with nothing_left(), pytest.raises(Mine) as caught:
        async with stio.open(directory, **SMALL) as checkpoint:
            async for _ in checkpoint.stream():
                raise mine
    assert caught.value is mine
    with nothing_left(), pytest.raises(Mine) as caught:
        async with stio.open(directory, **SMALL) as checkpoint, checkpoint.stream() as stream:
            async for _ in stream:
                raise mine
    assert caught.value is mine


async def test_the_callers_error_beside_a_running_load(root):
    """The block's end waits for the load of another task, which is told; the error stays what it was."""
    root.hook = gate = Gate()
    told = []

    async def load(checkpoint):
        try:
            await checkpoint.load()
        except ClosedError:
            told.append(True)

    async with anyio.create_task_group() as group:
        with pytest.raises(Mine):
            async with stio.open(root) as checkpoint:
                group.start_soon(load, checkpoint)
                assert await eventually_async(gate.reached.is_set)
                gate.opened.set()
                raise Mine
        assert all(file.closed for file in root.files)
    assert told == [True] or told == []


async def test_generators_that_yield_inside_the_block(directory):
    """A fixture-like generator around a checkpoint: no cancel scope of the caller's is held over the yield."""

    async def fixture():
        async with stio.open(directory) as checkpoint:
            yield checkpoint

    generator = fixture()
    checkpoint = await anext(generator)
    with anyio.CancelScope():
        assert await checkpoint.read("layer.1") is not None
    with pytest.raises(StopAsyncIteration):
        await anext(generator)


async def test_errors_of_predicates_and_progress_come_out_as_they_are(directory):
    def fail(_):
        raise mine

    mine = Mine()
    for keywords in [{"names": fail}, {"progress": fail}]:
        with nothing_left(), pytest.raises(Mine) as caught:
            await stio.load(directory, **keywords)
        assert caught.value is mine
    async with stio.open(directory, progress=fail) as checkpoint:
        with pytest.raises(Mine):
            async for _ in checkpoint.stream():
                pass


# Breaking out, dropping, closing.


async def test_break_leaves_nothing_running(directory):
    async with stio.open(directory, **SMALL) as checkpoint:
        before = num_threads()
        async for _ in checkpoint.stream():
            break
        gc.collect()
        assert await eventually_async(lambda: num_threads() <= before)


async def test_dropping_a_stream_ends_it(root):
    async with stio.open(root, **SMALL) as checkpoint:
        stream = checkpoint.stream()
        await anext(stream)
        operation = weakref.ref(stream._queue.operation)
        del stream
        assert await eventually_async(lambda: operation() is None or operation().done)
    assert len(root.log) < 20


async def test_dropping_a_stream_that_never_began(root):
    async with stio.open(root) as checkpoint:
        opened = len(root.log)
        checkpoint.stream()
        stream = checkpoint.stream()
        del stream
        await spin(5)
        assert len(root.log) == opened


async def test_a_stream_as_a_block(directory):
    expected = oracle(directory)
    async with stio.open(directory, **SMALL) as checkpoint:
        async with checkpoint.stream() as stream:
            name, tensor = await anext(stream)
            require_equal({name: tensor}, {name: expected[name]})
        with pytest.raises(ClosedError):
            await anext(stream)
        await stream.aclose()


async def test_a_stream_that_ended_stays_ended(directory):
    async with stio.open(directory, **SMALL) as checkpoint:
        stream = checkpoint.stream()
        assert len([pair async for pair in stream]) == 12
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(stream)


async def test_two_streams_at_once(directory):
    async with stio.open(directory, **SMALL) as checkpoint:
        first, second = checkpoint.stream(), checkpoint.stream(lambda name: name != "layer.4")
        found_first, found_second = {}, {}
        async for name, tensor in first:
            found_first[name] = tensor
            async for other, part in second:
                found_second[other] = part
                break
        async for other, part in second:
            found_second[other] = part
    expected = oracle(directory)
    require_equal(found_first, expected)
    del expected["layer.4"]
    require_equal(found_second, expected)


async def test_two_tasks_take_from_one_stream(directory):
    """Each tensor goes to one of them, and no budget is lost on the way."""
    found = {}
    async with stio.open(directory, memory="copy", budget_bytes=20 * KIB) as checkpoint:
        stream = checkpoint.stream()

        async def take():
            async for name, tensor in stream:
                assert name not in found
                found[name] = tensor
                await anyio.lowlevel.checkpoint()

        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(take)
    require_equal(found, oracle(directory))


async def test_closing_under_a_waiting_consumer(root):
    root.hook = gate = Gate(after=1)
    async with anyio.create_task_group() as group:
        checkpoint = stio.open(root, **SMALL)
        await checkpoint.__aenter__()
        stream, told = checkpoint.stream(), []

        async def take():
            with pytest.raises(ClosedError):
                async for _ in stream:
                    pass
            told.append(True)

        group.start_soon(take)
        assert await eventually_async(gate.reached.is_set)
        gate.opened.set()
        await checkpoint.aclose()
    assert told == [True]


async def test_use_after_close(directory):
    checkpoint = stio.open(directory)
    with pytest.raises(ClosedError, match="not open"):
        checkpoint.keys()
    async with checkpoint:
        late = checkpoint.stream()
    module = __import__("torch").nn.Linear(1, 1)
    for use in [
        checkpoint.keys, checkpoint.stream, lambda: len(checkpoint), lambda: "a" in checkpoint, lambda: list(checkpoint),
        lambda: checkpoint.metadata, lambda: checkpoint.aliases, lambda: checkpoint.info("layer.0"),
    ]:  # fmt: skip
        with pytest.raises(ClosedError):
            use()
    for use in [checkpoint.load, lambda: checkpoint.read("layer.0"), lambda: checkpoint.load_into(module)]:
        with pytest.raises(ClosedError):
            await use()
    with pytest.raises(ClosedError):
        await anext(late)
    await checkpoint.aclose()
    async with checkpoint:  # it may be opened again
        assert len(checkpoint) == 12


async def test_open_twice_is_refused(directory):
    async with stio.open(directory) as checkpoint:
        with pytest.raises(RuntimeError, match="open already"):
            async with checkpoint:
                pass
        assert len(checkpoint) == 12


async def test_promote_reads_sooner(root):
    async with stio.open(root, memory="copy", budget_bytes=20 * KIB) as checkpoint:
        stream = checkpoint.stream()
        stream.promote(["layer.11", "layer.5"])
        order = [name async for name, _ in stream]
    assert set(order[:2]) == {"layer.11", "layer.5"}
    assert len(order) == 12
    async with stio.open(root, memory="copy", budget_bytes=1) as checkpoint, checkpoint.stream() as stream:
        order = [(await anext(stream))[0]]
        stream.promote(["layer.11"])
        order += [name async for name, _ in stream]
    assert order.index("layer.11") <= 2


async def test_reads_beside_a_stream(directory):
    expected = oracle(directory)
    async with stio.open(directory, **SMALL) as checkpoint:
        async for name, _ in checkpoint.stream():
            require_equal({name: await checkpoint.read(name)}, {name: expected[name]})


async def test_a_stream_without_aliases_or_with_wrong_names(directory):
    async with stio.open(directory) as checkpoint:
        with pytest.raises(TensorNotFoundError, match="did you mean 'layer.1"):
            await anext(checkpoint.stream(["layer.1x"]))
        with pytest.raises(TensorNotFoundError, match="slices="):
            await anext(checkpoint.stream(slices={"nothing": 3}))
        with pytest.raises(SliceError):
            await anext(checkpoint.stream(slices={"layer.1": 3000}))


# Backpressure, and a loop that stands still.


async def test_reading_stops_when_the_consumer_lags(root, monkeypatch):
    runs = []
    original = load_module.LoadScheduler.__init__
    monkeypatch.setattr(
        load_module.LoadScheduler, "__init__", lambda self, *a, **k: (original(self, *a, **k), runs.append(self))[0]
    )
    async with stio.open(root, **SMALL) as checkpoint, checkpoint.stream() as stream:
        await anext(stream)
        run = runs[0]
        # All that has begun is delivered, and what has not waits for budget.
        assert await eventually_async(lambda: run._blocked and run._delivered_groups == set(run.budget._held))
        asked = len(root.log)
        await spin(50)
        assert len(root.log) == asked
        assert run.budget.used_bytes <= 64 * KIB
        async for _ in stream:
            assert run.budget.used_bytes <= 64 * KIB
    assert run.budget.peak_bytes <= 64 * KIB


@pytest.mark.parametrize("what", ["load", "load_into", "stream"])
async def test_work_goes_on_while_the_loop_is_blocked(root, directory, what):
    """Each read waits for a permit that the blocked loop's thread gives: progress must rise meanwhile."""
    import torch

    permits, events = threading.Semaphore(0), []
    root.hook = lambda *_: permits.acquire(timeout=PATIENCE_SECONDS) or pytest.fail("no permit")
    expected = oracle(directory)

    tensors = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    model = module_of(tensors)
    found = {}

    async def work():
        if what == "load":
            found.update(await stio.load(root, memory="copy", budget_bytes=64 * KIB, progress=events.append))
        elif what == "load_into":
            await stio.load_into(model, root, memory="copy", budget_bytes=64 * KIB, progress=events.append)
            found.update(tensors)
        else:
            async with stio.open(root, memory="copy", budget_bytes=256 * KIB, progress=events.append) as checkpoint:
                found.update({name: tensor async for name, tensor in checkpoint.stream()})

    async with anyio.create_task_group() as group:
        group.start_soon(work)
        assert await eventually_async(lambda: len(root.log) > 4)  # it is really reading
        for _ in range(2):
            count, moved = len(events), False
            while not moved:  # with as few permits as it takes: the second round needs some that are not used yet
                permits.release()
                assert eventually(lambda: not permits._value), "nothing moved while the loop stood still"
                moved = eventually(lambda count=count: len(events) > count, 0.2)
        permits.release(100)
    require_equal(found, expected)


# Tensors outlive everything.


@pytest.mark.parametrize("memory", ["map", "lazy", "copy"])
async def test_tensors_survive_close_collection_and_unlink(tmp_path, memory):
    file = save_file({"a": ramp(300, 300), "b": ramp(5)}, tmp_path / "x.safetensors")
    expected = oracle(file)
    expected = {name: tensor.clone() for name, tensor in expected.items()}
    async with stio.open(file, memory=memory) as checkpoint:
        stream = checkpoint.stream()
        found = dict([await anext(stream), await anext(stream)])
        read = await checkpoint.read("a", slice(1, 3))
        del stream
    del checkpoint
    loaded = await stio.load(file, memory=memory)
    file.unlink()
    gc.collect()
    require_equal(found, expected)
    require_equal(loaded, expected)
    del loaded["a"]
    gc.collect()
    require_equal(loaded, {"b": expected["b"]})
    require_equal({"a": read}, {"a": expected["a"][1:3]})


async def test_tensors_survive_a_cancel_of_what_comes_after(root, directory):
    found = {}
    with anyio.CancelScope() as scope:
        async with stio.open(root, **SMALL) as checkpoint:
            async for name, tensor in checkpoint.stream():
                found[name] = tensor
                if len(found) == 3:
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
    gc.collect()
    expected = oracle(directory)
    require_equal(found, {name: expected[name] for name in found})


# The blocking twins.


async def test_sync_streams_break_drop_and_close(directory, monkeypatch):
    monkeypatch.setattr(sync, "_warned", True)
    expected = oracle(directory)
    with sync.open(directory, **SMALL) as checkpoint:
        require_equal(dict(checkpoint.stream()), expected)
        for _ in checkpoint.stream():
            break
        with checkpoint.stream() as stream:
            next(stream)
        with pytest.raises(ClosedError):
            next(stream)
        late = checkpoint.stream()
        next(late)
        with pytest.raises(RuntimeError, match="open already"), checkpoint:
            pass
    with pytest.raises(ClosedError):
        for _ in late:
            pass
    with pytest.raises(ClosedError):
        checkpoint.load()


@pytest.mark.parametrize("anyio_backend", [("asyncio", {})], ids=["asyncio"])
async def test_asyncgen_hooks_see_nothing_of_ours(directory):
    """Streams are no asynchronous generators: a loop's end has nothing to finalize."""
    async with stio.open(directory) as checkpoint:
        stream = checkpoint.stream()
        await anext(stream)
        assert not asyncio.get_running_loop()._asyncgens


@pytest.mark.anyio
async def test_a_consumer_that_leaves_does_not_stop_another_one(tmp_path):
    """Two tasks share a stream under the smallest budget; one takes a single tensor."""
    file = save_file({f"t{k}": ramp(10, 10) for k in range(20)}, tmp_path / "x.safetensors")
    found = []
    async with stio.open(file, memory="copy", budget_bytes=1) as checkpoint:
        stream = checkpoint.stream()

        async def take_one():
            async for name, _ in stream:
                found.append(name)
                return

        async def take_all():
            async for name, _ in stream:
                found.append(name)

        with anyio.fail_after(PATIENCE_SECONDS):
            async with anyio.create_task_group() as group:
                group.start_soon(take_one)
                group.start_soon(take_all)
    assert sorted(found) == sorted(f"t{k}" for k in range(20))


def test_a_file_whose_tensors_were_released_is_mapped_no_longer(tmp_path):
    path = save_sharded({f"layer.{k}": ramp(1 << 20) for k in range(8)}, tmp_path / "model", 4)

    def mapped():
        with open("/proc/self/maps") as maps:
            return {line.rpartition("/")[2].strip() for line in maps if str(path) in line}

    with sync.open(path, memory="map", budget_bytes="8MB") as checkpoint, checkpoint.stream() as stream:
        shards = [shard for name in checkpoint if (shard := checkpoint.info(name).shard)]
        for _ in range(5):
            _, tensor = next(stream)
        assert eventually(lambda: mapped() == {*shards[4:]}), "all but the first two files"
        del tensor
