"""As its users hold it: pytest-asyncio, asyncio's own tools, fixtures, servers, a loop that is watched for blocking."""

from __future__ import annotations

import asyncio

import blockbuster
import pytest
import pytest_asyncio
import torch
from support import (
    Gate,
    HookedRoot,
    eventually,
    eventually_async,
    nothing_left,
    oracle,
    ramp,
    require_equal,
    save_sharded,
)
from torch import nn

import stio

pytestmark = pytest.mark.asyncio

KIB = 1 << 10


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_sharded({f"layer.{k}": ramp(64, 64 + k) for k in range(12)}, tmp_path_factory.mktemp("model"), 3)


@pytest_asyncio.fixture
async def checkpoint(directory):
    """A fixture around a checkpoint: setup and teardown may run in different tasks."""
    async with stio.open(directory, memory="copy", budget_bytes=64 * KIB) as checkpoint:
        yield checkpoint


async def test_a_fixture_holds_a_checkpoint(checkpoint, directory):
    require_equal({name: tensor async for name, tensor in checkpoint.stream()}, oracle(directory))


async def test_a_fixture_is_torn_down_with_a_stream_open(checkpoint):
    stream = checkpoint.stream()
    await anext(stream)
    checkpoint.still_held = stream


async def test_entered_and_left_in_different_tasks(directory):
    checkpoint = stio.open(directory)
    await asyncio.create_task(checkpoint.__aenter__())
    tensors = await asyncio.create_task(checkpoint.load())
    await asyncio.create_task(checkpoint.__aexit__(None, None, None))
    require_equal(tensors, oracle(directory))


async def test_gather_and_task_groups(directory):
    with nothing_left():
        found = await asyncio.gather(*[stio.load(directory, names=f"layer.{k}") for k in range(12)])
        for k, tensors in enumerate(found):
            assert list(tensors) == [f"layer.{k}"]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(stio.load(directory)) for _ in range(4)]
        for task in tasks:
            require_equal(task.result(), oracle(directory))


async def test_c101_tasks_that_load_one_path_get_equal_tensors(directory):
    for keywords in ({"memory": "copy"}, {"memory": "map"}, {"memory": "lazy"}, {}):
        with nothing_left():
            for tensors in await asyncio.gather(*[stio.load(directory, **keywords) for _ in range(8)]):
                require_equal(tensors, oracle(directory))
            del tensors


async def test_task_group_with_a_failure(directory):
    root = HookedRoot(directory)
    root.hook = gate = Gate()

    async def fail():
        assert await eventually_async(gate.reached.is_set)
        gate.opened.set()
        raise KeyError("sibling")

    with nothing_left():
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.TaskGroup() as group:
                load = group.create_task(stio.load(root))
                group.create_task(fail())
        assert [type(error) for error in caught.value.exceptions] == [KeyError]
        assert load.cancelled()
    root.close()


async def test_wait_for_and_a_second_try(directory):
    root = HookedRoot(directory)
    root.hook = gate = Gate()
    asyncio.get_running_loop().call_later(0.02, gate.opened.set)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stio.load(root), 0.005)
    root.hook = lambda *_: None
    require_equal(await asyncio.wait_for(stio.load(root), 10), oracle(directory))
    root.close()


async def test_shield_lets_a_load_go_on(directory):
    root = HookedRoot(directory)
    root.hook = gate = Gate()
    load = asyncio.ensure_future(stio.load(root))
    outer = asyncio.ensure_future(asyncio.shield(load))
    assert await eventually_async(gate.reached.is_set)
    outer.cancel()
    gate.opened.set()
    require_equal(await load, oracle(directory))
    root.close()


async def test_as_completed_and_queues(directory):
    """A producer that streams into a bounded queue, a consumer that stops early."""
    queue: asyncio.Queue = asyncio.Queue(2)

    async def produce():
        async with stio.open(directory, memory="copy", budget_bytes=64 * KIB) as checkpoint:
            async for pair in checkpoint.stream():
                await queue.put(pair)

    with nothing_left():
        producer = asyncio.create_task(produce())
        assert len([await queue.get() for _ in range(3)]) == 3
        producer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await producer


async def test_anext_with_a_default(directory):
    async with stio.open(directory) as checkpoint:
        stream = checkpoint.stream(["layer.1"])
        assert (await anext(stream, None))[0] == "layer.1"
        assert await anext(stream, None) is None


async def test_eager_tasks(directory):
    factory = getattr(asyncio, "eager_task_factory", None)
    if factory is None:
        pytest.skip("Python 3.12")
    asyncio.get_running_loop().set_task_factory(factory)
    require_equal(await asyncio.create_task(stio.load(directory)), oracle(directory))


async def test_debug_mode(directory):
    asyncio.get_running_loop().set_debug(True)
    require_equal(await stio.load(directory), oracle(directory))


async def test_a_heartbeat_goes_on(directory):
    """A server's health check is answered while a load's reads are all held up."""
    root = HookedRoot(directory)
    root.hook = gate = Gate()
    load = asyncio.ensure_future(stio.load(root))
    assert await eventually_async(gate.reached.is_set)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not load.done()
    gate.opened.set()
    require_equal(await load, oracle(directory))
    root.close()


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["map", "copy", "lazy"])
async def test_the_loop_is_never_blocked(directory, memory):
    """No file is opened, read or mapped, and no lock or sleep is waited for, on the loop's own thread."""
    model = nn.Module()
    model.layer = nn.ParameterList([torch.zeros(64, 64 + k) for k in range(12)])
    await stio.load(directory)  # what is imported at first use is not a load's doing
    with blockbuster.blockbuster_ctx():
        await stio.load(directory, memory=memory)
        await stio.load_into(model, directory, memory=memory)
        async with stio.open(directory, memory=memory, budget_bytes=64 * KIB) as checkpoint:
            await checkpoint.read("layer.3")
            async for _ in checkpoint.stream():
                await asyncio.sleep(0)
            async for _ in checkpoint.stream():
                break
        task = asyncio.ensure_future(stio.load(directory, memory=memory))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(stio.CheckpointNotFoundError):
            await stio.load(directory / "absent")


async def test_loops_in_several_threads(directory):
    """Two event loops, each in a thread of its own, load at once."""
    found = []

    def other():
        found.append(asyncio.run(stio.load(directory)))

    threads = [asyncio.to_thread(other) for _ in range(3)]
    require_equal(await stio.load(directory), oracle(directory))
    await asyncio.gather(*threads)
    assert eventually(lambda: len(found) == 3)
    for tensors in found:
        require_equal(tensors, oracle(directory))
