"""What a close, a fork or a second consumer must not tear apart."""

import asyncio
import gc
import os
import threading
import weakref

import anyio
import pytest
import torch
from fakes import FaultyRoot, MemoryRoot, checkpoint_bytes
from support import ramp, save_file
from torch import nn

import stio
from stio import process as process_module
from stio import sync
from stio.runtime.operation import Operation

pytestmark = pytest.mark.anyio


def test_closing_ends_every_operation_before_the_files_close(tmp_path):
    """A second native cancel while the first operation drains must not leave the others on closed descriptors."""
    file = save_file({f"t{k}": ramp(50, 100) for k in range(20)}, tmp_path / "x.safetensors")

    async def main():
        checkpoint = stio.open(file, memory="copy", budget_bytes=64 << 10)
        await checkpoint.__aenter__()
        loads = [asyncio.ensure_future(checkpoint.load()) for _ in range(4)]
        await asyncio.sleep(0)
        operations = list(checkpoint._operations.values())
        closing = asyncio.ensure_future(checkpoint.aclose())
        await asyncio.sleep(0)
        for _ in range(5):
            closing.cancel()
            await asyncio.sleep(0)
        outcomes = await asyncio.gather(closing, *loads, return_exceptions=True)
        assert all(operation.done for operation in operations)
        assert not any(isinstance(outcome, stio.StorageError) for outcome in outcomes), outcomes

    for _ in range(20):
        asyncio.run(main())


async def test_consumers_of_one_stream_share_it_without_loss(tmp_path):
    names = [f"t{k:03}" for k in range(200)]
    file = save_file({name: ramp(30, 40) for name in names}, tmp_path / "x.safetensors")
    async with stio.open(file, memory="copy", budget_bytes=64 << 10) as checkpoint:
        stream, seen = checkpoint.stream(), []

        async def consume():
            async for name, _ in stream:
                seen.append(name)

        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(consume)
    assert sorted(seen) == names


def test_threads_of_one_stream_share_it_without_loss(tmp_path):
    names = [f"t{k:03}" for k in range(200)]
    file = save_file({name: ramp(30, 40) for name in names}, tmp_path / "x.safetensors")
    seen = []
    with sync.open(file, memory="copy", budget_bytes=64 << 10) as checkpoint:
        stream = checkpoint.stream()
        threads = [threading.Thread(target=lambda: seen.extend(name for name, _ in stream)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert sorted(seen) == names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_c100_a_fork_while_collection_is_paused_leaves_it_on_in_the_child():
    with process_module.collection_paused(1_000_000):
        pid = os.fork()
        if not pid:
            os._exit(0 if gc.isenabled() and not process_module._pauses else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3, bias=False)
        self.b = nn.Linear(4, 3, bias=False)
        self.b.weight = self.a.weight


def test_assigning_both_names_of_a_tie_keeps_it(tmp_path):
    file = save_file({"a.weight": torch.ones(3, 4), "b.weight": torch.ones(3, 4)}, tmp_path / "x.safetensors")
    module = Tied()
    sync.load_into(module, file, assign=True)
    assert module.a.weight is module.b.weight


def test_assigning_a_dtype_without_gradients_is_refused_before_anything_is_replaced(tmp_path):
    file = save_file({"weight": torch.ones(3, 4, dtype=torch.int8)}, tmp_path / "x.safetensors")
    module = nn.Linear(4, 3, bias=False)
    old = module.weight
    with pytest.raises(stio.MismatchError, match="I8 for weight"):
        sync.load_into(module, file, assign=True)
    assert module.weight is old


class Extra(nn.Linear):
    extra = None

    def get_extra_state(self):
        return torch.ones(2)

    def set_extra_state(self, state):
        self.extra = state


def test_extra_state_is_set_and_never_registered_as_a_tensor(tmp_path):
    module = Extra(4, 3, bias=False)
    file = save_file({"weight": torch.ones(3, 4), "_extra_state": torch.ones(2)}, tmp_path / "x.safetensors")
    assert sync.load_into(module, file, assign=True) == stio.LoadReport((), ())
    assert torch.equal(module.extra, torch.ones(2))
    assert "_extra_state" not in dict(module.named_buffers())


def test_the_budget_holds_where_a_file_is_copied_after_all():
    """A root of one's own cannot be mapped: `auto` copies, in groups that fit the budget."""
    raw = checkpoint_bytes({f"t{k}": ramp(256, 1024) for k in range(16)})
    root = FaultyRoot(MemoryRoot({"model.safetensors": raw}))
    module = nn.Module()
    for k in range(16):
        module.register_buffer(f"t{k}", torch.zeros_like(ramp(256, 1024)))
    sync.load_into(module, root, budget_bytes=4 << 20)
    assert max(read.nbytes for read in root.reads) <= (1 << 20) + 8192, "a quarter of the budget, and its pages"


def _loaded(path):
    return list(sync.load(path).values())


def _loaded_state(path):
    return list(sync.load_state(path).values())


def _read(path):
    with sync.open(path) as checkpoint:
        return [*checkpoint.load().values(), checkpoint.read("w0")]


def _streamed(path):
    with sync.open(path) as checkpoint:
        return [tensor for _, tensor in checkpoint.stream()]


@pytest.mark.parametrize("load", [_loaded, _loaded_state, _read, _streamed])
def test_the_caller_s_thread_is_the_last_to_hold_tensors(load, tmp_path, monkeypatch):
    """A thread of stio's that frees tensors while the interpreter ends aborts the process: the deleter needs the GIL."""
    run, go = Operation._run, threading.Event()

    def lingering(operation):
        run(operation)
        assert go.wait(30)

    path = tmp_path / "state.safetensors"
    sync.save_state({f"w{k}": torch.full((3,), float(k)) for k in range(5)}, path)
    monkeypatch.setattr(Operation, "_run", lingering)
    try:
        tensors = load(path)
        alive = [weakref.ref(tensor) for tensor in tensors]
        assert alive
        del tensors
        assert not any(tensor() is not None for tensor in alive)
    finally:
        go.set()
