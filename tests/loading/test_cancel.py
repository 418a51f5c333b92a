"""C95: a cancel at every await of every face leaves no thread, no descriptor, no buffer behind."""

from __future__ import annotations

import asyncio
import gc
import weakref

import anyio
import pytest
import torch
from fakes import FakeDevice
from loops import on_all
from support import (
    Gate,
    HookedRoot,
    backend_name,
    cancelled_after_every_round,
    cancelled_at_every_await,
    cancelled_natively_at_every_await,
    eventually,
    eventually_async,
    module_of,
    nothing_left,
    oracle,
    ramp,
    require_equal,
    save_sharded,
    spin,
)

import stio
from stio.loading import scheduler as load_module
from stio.runtime import memory
from stio.runtime.operation import start_thread

pytestmark = pytest.mark.anyio

KIB = 1 << 10


@pytest.fixture(scope="module")
def tensors():
    return {f"layer.{k}": ramp(64, 64 + k) for k in range(12)}


@pytest.fixture(scope="module")
def directory(tmp_path_factory, tensors):
    return save_sharded(tensors, tmp_path_factory.mktemp("model"), 3)


def zeros_of(tensors):
    """Return a module with buffers of zeros."""
    return module_of({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})


WAYS = [
    "load copy",
    "load map",
    "load device",
    "open",
    "stream",
    "stream device",
    "read",
    "load_into",
    "context load_into",
    "everything",
]


@pytest.fixture(params=WAYS)
def make(request, directory, tensors):
    async def load_copy():
        await stio.load(directory, memory="copy", budget_bytes=64 * KIB)

    async def load_map():
        await stio.load(directory, memory="map")

    async def load_device():
        await stio.load(directory, device=FakeDevice(), budget_bytes=128 * KIB)

    async def stream_device():
        async with stio.open(directory, device=FakeDevice(), budget_bytes=128 * KIB) as checkpoint:
            async for _ in checkpoint.stream():
                pass

    async def open_only():
        async with stio.open(directory):
            pass

    async def stream():
        async with stio.open(directory, memory="copy", budget_bytes=64 * KIB) as checkpoint:
            async for _ in checkpoint.stream():
                await anyio.lowlevel.checkpoint()

    async def read():
        async with stio.open(directory) as checkpoint:
            await checkpoint.read("layer.3")
            await checkpoint.read("layer.4", 3)

    async def load_into():
        await stio.load_into(zeros_of(tensors), directory, budget_bytes=64 * KIB)

    async def context_load_into():
        async with stio.open(directory, memory="copy", budget_bytes=64 * KIB) as checkpoint:
            await checkpoint.load_into(zeros_of(tensors))

    async def everything():
        async with stio.open(directory, memory="copy", budget_bytes=64 * KIB) as checkpoint:
            async with checkpoint.stream() as stream:
                await anext(stream)
                await checkpoint.load("layer.2")
                await anext(stream)
                async for _ in checkpoint.stream(["layer.7", "layer.8"]):
                    pass

    return {
        "load copy": load_copy, "load map": load_map, "load device": load_device, "open": open_only, "stream": stream,
        "stream device": stream_device, "read": read, "load_into": load_into, "context load_into": context_load_into,
        "everything": everything,
    }[request.param]  # fmt: skip


@pytest.mark.matrix
@on_all
async def test_cancel_at_every_await(make):
    assert await cancelled_at_every_await(make) > 0


@pytest.mark.matrix
@pytest.mark.parametrize("at_resume", [False, True], ids=["at the await", "at its end"])
@pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"use_uvloop": False}), ("asyncio", {"use_uvloop": True})], ids=["asyncio", "uvloop"]
)
async def test_native_cancel_at_every_await(make, at_resume):
    assert await cancelled_natively_at_every_await(make, at_resume=at_resume) > 0


@pytest.mark.matrix
async def test_cancel_after_every_round_of_the_loop(make):
    assert await cancelled_after_every_round(make) > 3


# Cancels while a read is really under way.


@pytest.fixture
def root(directory):
    root = HookedRoot(directory)
    yield root
    root.close()


@pytest.fixture
def runs(monkeypatch):
    """Every run that is made, so that its budget can be looked at."""
    made = []
    original = load_module.LoadScheduler.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(load_module.LoadScheduler, "__init__", init)
    return made


async def test_cancelled_load_waits_for_reads_under_way(root):
    root.hook = gate = Gate(after=2)
    over = []

    async def load():
        try:
            await stio.load(root, budget_bytes=64 * KIB)
        finally:
            over.append(sum(file.inside for file in root.files))

    with nothing_left():
        async with anyio.create_task_group() as group:
            group.start_soon(load)
            assert await eventually_async(gate.reached.is_set)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await spin(30)
                assert over == []  # a thread uses a buffer: the cancel is not passed on yet
                gate.opened.set()
        assert over == [0]
        assert all(file.closed for file in root.files)


async def test_cancelled_stream_and_its_budget(root, runs):
    root.hook = gate = Gate(after=4)  # two groups of two blocks
    with nothing_left():
        async with stio.open(root, memory="copy", budget_bytes=64 * KIB) as checkpoint:
            stream = checkpoint.stream()
            taken = [(await anext(stream))[0] for _ in range(2)]

            async def rest():
                async for name, _ in stream:
                    taken.append(name)

            async with anyio.create_task_group() as group:
                group.start_soon(rest)
                assert await eventually_async(gate.reached.is_set)
                await anyio.wait_all_tasks_blocked()  # else it may end before it waits, and is not cancelled
                group.cancel_scope.cancel()
                gate.opened.set()
            with pytest.raises(stio.ClosedError):
                await anext(stream)
    assert len(taken) < 12
    assert runs[0].budget.peak_bytes <= 64 * KIB


async def test_cancelled_images_are_freed(root, monkeypatch):
    """Memory that was allocated for groups under way goes when the cancelled call returns."""
    regions = []
    original = memory.allocate

    def allocate(nbytes):
        region = original(nbytes)
        regions.append(weakref.ref(region.owner))
        return region

    monkeypatch.setattr(memory, "allocate", allocate)
    root.hook = gate = Gate(after=3)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: stio.load(root, memory="copy", budget_bytes=64 * KIB))
        assert await eventually_async(gate.reached.is_set)
        group.cancel_scope.cancel()
        gate.opened.set()
    gc.collect()
    assert regions
    # A reader on its last steps out of the process still holds the run, but uses it no more.
    assert eventually(lambda: all(region() is None for region in regions))


async def test_cancelled_copies_to_a_device_drain(root):
    """Slots and device memory are back, and no copy is queued, when the cancelled call returns."""
    device = FakeDevice()
    root.hook = gate = Gate(after=5)  # more than there are workers
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: stio.load(root, device=device, budget_bytes=256 * KIB))
        assert await eventually_async(gate.reached.is_set)
        assert device.num_copies
        group.cancel_scope.cancel()
        gate.opened.set()
    assert device.num_pending == 0
    gc.collect()
    assert eventually(lambda: (device.used_bytes, device.staging_bytes) == (0, 0))


async def test_move_on_after(root, directory):
    root.hook = gate = Gate()
    with nothing_left():
        async with anyio.create_task_group() as group:
            with anyio.move_on_after(0.01) as scope:

                async def open_the_gate():
                    assert await eventually_async(lambda: scope.cancel_called)
                    gate.opened.set()

                group.start_soon(open_the_gate)
                await stio.load(root)
        assert scope.cancelled_caught
    root.hook = lambda *_: None
    require_equal(await stio.load(root), oracle(directory))


def open_when_cancelled(gate, scope):
    """Open the gate from a thread once the scope was cancelled."""

    def body():
        eventually(lambda: scope.cancel_called)
        gate.opened.set()

    start_thread(body, name="gate")


async def test_asyncio_timeouts(root, anyio_backend):
    if backend_name(anyio_backend) == "trio":
        return

    class Scope:
        cancel_called = False

    for limit in ("wait_for", "timeout"):
        root.hook = gate = Gate()
        scope = Scope()
        open_when_cancelled(gate, scope)
        asyncio.get_running_loop().call_later(0.005, setattr, scope, "cancel_called", True)
        with nothing_left(), pytest.raises(TimeoutError):
            if limit == "wait_for":
                await asyncio.wait_for(stio.load(root), 0.001)
            else:
                async with asyncio.timeout(0.001):
                    await stio.load(root)
        assert asyncio.current_task().cancelling() == 0


async def test_a_failing_sibling_cancels_a_load(root):
    root.hook = gate = Gate()

    async def fail():
        assert await eventually_async(gate.reached.is_set)
        gate.opened.set()
        raise KeyError("sibling")

    with nothing_left():
        with pytest.raises(BaseExceptionGroup) as caught:
            async with anyio.create_task_group() as group:
                group.start_soon(fail)
                await stio.load(root)
        assert [type(error) for error in caught.value.exceptions] == [KeyError]


async def test_second_native_cancel_while_a_load_drains(root, anyio_backend):
    if backend_name(anyio_backend) == "trio":
        return
    root.hook = gate = Gate()
    with nothing_left():
        task = asyncio.ensure_future(stio.load(root))
        assert await eventually_async(gate.reached.is_set)
        for _ in range(3):
            task.cancel()
            await spin(5)
            assert not task.done()
        gate.opened.set()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_cancel_while_closing_still_closes(root, anyio_backend):
    """The block's end is cancelled while it waits for a stream: descriptors are back all the same."""
    root.hook = gate = Gate(after=2)
    with nothing_left():
        inside = anyio.Event()

        async def use():
            async with stio.open(root, memory="copy", budget_bytes=64 * KIB) as checkpoint:
                stream = checkpoint.stream()
                await anext(stream)
                assert await eventually_async(gate.reached.is_set)
                inside.set()

        async with anyio.create_task_group() as group:
            group.start_soon(use)
            await inside.wait()
            await spin(3)
            group.cancel_scope.cancel()
            with anyio.CancelScope(shield=True):
                await spin(10)
                gate.opened.set()
        assert all(file.closed for file in root.files)


async def test_scope_cancelled_before_the_call(directory):
    with nothing_left():
        with anyio.CancelScope() as scope:
            scope.cancel()
            await stio.load(directory)
            await anyio.lowlevel.checkpoint()
        with anyio.CancelScope() as scope:
            scope.cancel()
            async with stio.open(directory) as checkpoint:
                await checkpoint.load()


async def test_cancel_in_the_hands_of_the_consumer(directory):
    """The consumer is cancelled in its own await, with the stream only held by the loop."""
    with nothing_left():
        with anyio.CancelScope() as scope:
            async with stio.open(directory, memory="copy", budget_bytes=64 * KIB) as checkpoint:
                async for _ in checkpoint.stream():
                    scope.cancel()
                    await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught


async def test_cancelled_load_into_leaves_the_module_usable(root, tensors, directory):
    root.hook = gate = Gate(after=4)
    model = zeros_of(tensors)
    async with anyio.create_task_group() as group:
        group.start_soon(lambda: stio.load_into(model, root, memory="copy", budget_bytes=64 * KIB))
        assert await eventually_async(gate.reached.is_set)
        group.cancel_scope.cancel()
        gate.opened.set()
    root.hook = lambda *_: None
    await stio.load_into(model, root)
    require_equal(model.state_dict(), oracle(directory))
