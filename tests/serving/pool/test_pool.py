"""`stio.ModelPool` on the CPU: right weights, bounds, callers that come and leave, failures, updates, the end."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import re
import signal
import threading
import time
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from crash.zygote import Zygote
from loops import on_all
from support import Cancelling, descriptors, eventually, eventually_async, nothing_left
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import stio
from stio import sync
from stio.errors import ClosedError, DeviceMemoryError, FormatError, StioError
from stio.loading.body import open_with_options
from stio.runtime.operation import Operation
from stio.serving.pool import content

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore:stio.sync blocks the running event loop"),  # `save` below
]

KIB = 1 << 10
MODEL_BYTES = 256 * KIB + 512
"""Bytes of one model on a device, in blocks of 512."""


def save(path: Path, value: float, *, width: int = 256) -> Path:
    """Write a model whose tensors have one value."""
    w = torch.full((width, 256), float(value))
    sync.save({"w": w, "tied": w, "b.c": torch.full((3,), float(value))}, path)
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    return [save(tmp_path / f"m{k}.safetensors", k) for k in range(5)]


def pool_of(files: list[Path], *, room: int = 2, **options: Any) -> stio.ModelPool:
    pool = stio.ModelPool(**{"device": "cpu", "device_bytes": room * MODEL_BYTES, "max_hold_seconds": 0.05} | options)
    for k, file in enumerate(files):
        pool.add(str(k), file)
    return pool


def value_of(tensors: dict[str, torch.Tensor]) -> float:
    (value,) = {float(one) for tensor in tensors.values() for one in tensor.unique()}
    return value


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(256, 256), requires_grad=False)
        self.tied = self.w
        self.b = nn.Module()
        self.b.register_buffer("c", torch.empty(3))
        self.register_buffer("table", torch.arange(4.0), persistent=False)


def make() -> nn.Module:
    with torch.device("meta"):
        network = Network()
    network.table = torch.arange(4.0)
    return network


@pytest.mark.matrix
@on_all
async def test_each_use_has_the_right_weights_and_the_bound_is_kept(files: list[Path]) -> None:
    async with pool_of(files) as pool:
        for name in "0123401234":
            async with pool.use(name) as tensors:
                assert value_of(tensors) == float(name)
                assert pool.status(name).tier == "device" and pool.status(name).num_users == 1
            assert not tensors, "a dictionary is empty after the block"
        stats = pool.stats()
        assert stats.peak_device_bytes == stats.device_bytes == 2 * MODEL_BYTES
        assert (stats.num_loads, stats.num_evictions, stats.num_failed) == (10, 8, 0)


async def test_a_load_that_follows_at_once_reads_from_the_files_that_were_measured(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it must wait for room, no file stays open, and it loads what is there then."""
    opened: list[object] = []

    def counting(operation: Operation[Any], source: Any, options: Any, **how: Any) -> Any:
        opened.append(source)
        return open_with_options(operation, source, options, **how)

    monkeypatch.setattr(content, "open_with_options", counting)
    values: list[float] = []

    async def use_other() -> None:
        async with pool.use("1") as tensors:
            values.append(value_of(tensors))

    async with pool_of(files, room=1, max_hold_seconds=60) as pool, anyio.create_task_group() as group:
        async with pool.use("0"):
            assert opened == [files[0]]
            group.start_soon(use_other)
            assert await eventually_async(lambda: opened == files[:2] and pool.status("1").nbytes is not None)
            assert await eventually_async(lambda: str(files[1]) not in descriptors())
            save(files[1], 7)
    assert values == [7.0] and opened == [files[0], files[1], files[1]]


async def test_an_update_that_is_cancelled_leaves_no_file_open(files: list[Path]) -> None:
    async with pool_of(files) as pool:
        async with pool.use("0") as tensors:
            kept = tensors["w"]  # the update waits for it
        with anyio.move_on_after(0.1):
            await pool.update("0", files[1], make=make)
        assert await eventually_async(lambda: str(files[1]) not in descriptors())
        del kept


@on_all
async def test_what_is_there_is_not_loaded_again(files: list[Path]) -> None:
    async with pool_of(files) as pool:
        addresses = set()
        for _ in range(3):
            async with pool.use("0") as tensors, pool.use("0") as again:
                addresses |= {tensors["w"].data_ptr(), again["w"].data_ptr()}
        assert len(addresses) == 1
        assert (pool.stats().num_loads, pool.stats().num_hits) == (1, 5)


@pytest.mark.matrix
@on_all
async def test_callers_of_one_model_wait_for_one_load(files: list[Path]) -> None:
    async with pool_of(files) as pool:
        found = []

        async def use() -> None:
            async with pool.use("3") as tensors:
                found.append(value_of(tensors))

        async with anyio.create_task_group() as tasks:
            for _ in range(20):
                tasks.start_soon(use)
        assert found == [3.0] * 20
        assert pool.stats().num_loads == 1


@pytest.mark.matrix
@on_all
async def test_a_model_in_use_is_not_evicted(files: list[Path]) -> None:
    async with pool_of(files) as pool, pool.use("0") as first:
        for name in "1234":
            async with pool.use(name):
                assert value_of(first) == 0.0
        async with pool.use("1") as second:
            waited = []

            async def wait() -> None:
                async with pool.use("2"):
                    waited.append(True)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                assert await eventually_async(lambda: pool.status("2").num_waiting == 1)
                await anyio.sleep(0.2)
                assert not waited and value_of(second) == 1.0 and value_of(first) == 0.0
                tasks.cancel_scope.cancel()


@pytest.mark.matrix
@on_all
async def test_a_pinned_model_stays(files: list[Path]) -> None:
    async with pool_of(files[1:]) as pool:
        pool.add("pinned", files[0], pin=True)
        async with pool.use("pinned") as tensors:
            address = tensors["w"].data_ptr()
        for name in "01230":
            async with pool.use(name):
                pass
        async with pool.use("pinned") as tensors:
            assert tensors["w"].data_ptr() == address


@pytest.mark.matrix
@on_all
async def test_a_module_is_made_once_and_is_on_meta_between_two_loads(files: list[Path]) -> None:
    made = []

    def count() -> nn.Module:
        made.append(make())
        return made[-1]

    async with pool_of(files) as pool:
        pool.add("network", files[2], make=count)
        for _ in range(2):
            async with pool.use("network") as network:
                assert network is made[0] and network.tied is network.w
                assert value_of({"w": network.w.data, "c": network.b.c}) == 2.0
                assert network.table.tolist() == [0.0, 1.0, 2.0, 3.0]
                assert isinstance(network.w, nn.Parameter) and not network.w.requires_grad
            for name in "01":
                async with pool.use(name):
                    pass
            assert made[0].w.is_meta and made[0].tied is made[0].w and made[0].b.c.is_meta
            assert made[0].table.tolist() == [0.0, 1.0, 2.0, 3.0]
        assert len(made) == 1


@on_all
@pytest.mark.usefixtures("clock")
async def test_a_tensor_that_is_kept_is_named_and_counts(files: list[Path]) -> None:
    async with pool_of(files, room=1) as pool:
        async with pool.use("0") as tensors:
            kept = [tensors["w"][3:5]]  # a view refers to all of the memory
        with pytest.raises(DeviceMemoryError, match="still referenced: w of '0'") as caught:
            async with pool.use("1"):
                pass
        assert caught.value.needed_bytes == MODEL_BYTES
        assert pool.stats().leftover_bytes == 256 * KIB
        kept.clear()
        async with pool.use("1") as tensors:
            assert value_of(tensors) == 1.0
        assert pool.stats().leftover_bytes == 0


@pytest.mark.matrix
@on_all
async def test_a_model_that_does_not_fit(files: list[Path], tmp_path: Path) -> None:
    async with pool_of(files) as pool:
        pool.add("large", save(tmp_path / "large.safetensors", 7.0, width=768))
        with pytest.raises(DeviceMemoryError, match="'large' does not fit"):
            async with pool.use("large"):
                pass
        async with pool.use("0") as tensors:
            assert value_of(tensors) == 0.0
        save(tmp_path / "large.safetensors", 7.0)  # the next attempt reads its size again
        async with pool.use("large") as tensors:
            assert value_of(tensors) == 7.0


@on_all
async def test_a_load_that_fails_is_raised_to_all_and_tried_again(files: list[Path]) -> None:
    whole = files[0].read_bytes()
    files[0].write_bytes(whole[:100])
    async with pool_of(files) as pool:
        errors = []

        async def use() -> None:
            try:
                async with pool.use("0"):
                    pass
            except FormatError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(use)
        assert len(errors) == 5 and len(set(map(id, errors))) == 5
        assert {error.path for error in errors} == {str(files[0])}
        files[0].write_bytes(whole)
        async with pool.use("0") as tensors:
            assert value_of(tensors) == 0.0


@on_all
@pytest.mark.usefixtures("clock")
async def test_what_a_failed_load_leaves_counts_until_it_is_free(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stio.serving.pool import content

    async with pool_of(files, room=1) as pool:
        kept = []

        def fail(self: Any, *_: Any, **__: Any) -> None:
            self._tensors = {"w": torch.empty(256, 256)}
            kept.append(self._tensors["w"])
            raise OSError("the disk failed")

        with monkeypatch.context() as patched:
            patched.setattr(content.Content, "load", fail)
            with pytest.raises(OSError, match="the disk failed"):
                async with pool.use("0"):
                    pass
        with pytest.raises(DeviceMemoryError, match="still referenced: w of '0'"):
            async with pool.use("1"):
                pass
        kept.clear()
        async with pool.use("0") as tensors:
            assert value_of(tensors) == 0.0


@on_all
async def test_what_make_raises_is_raised_to_its_callers(files: list[Path]) -> None:
    def fail() -> nn.Module:
        raise RuntimeError("no such network")

    async with pool_of(files) as pool:
        pool.add("broken", files[0], make=fail)
        pool.add("wrong", files[0], make=lambda: "text")  # type: ignore[arg-type,return-value]
        with pytest.raises(RuntimeError, match="no such network"):
            async with pool.use("broken"):
                pass
        with pytest.raises(TypeError, match="not a module"):
            async with pool.use("wrong"):
                pass


@pytest.mark.matrix
@on_all
async def test_files_that_change_are_read_anew(files: list[Path]) -> None:
    async with pool_of(files, room=1, host_bytes="4MB") as pool:
        async with pool.use("0") as tensors:
            assert value_of(tensors) == 0.0
        async with pool.use("1"):
            pass
        assert pool.status("0").tier == "host"
        save(files[0], 9.0)
        async with pool.use("0") as tensors:
            assert value_of(tensors) == 9.0
        async with pool.use("1"):
            pass
        save(files[0], 8.0, width=128)
        async with pool.use("0") as tensors:
            assert value_of(tensors) == 8.0 and pool.status("0").nbytes == MODEL_BYTES // 2 + 256


@pytest.mark.matrix
@on_all
async def test_prefetch_reads_into_host_memory(files: list[Path]) -> None:
    async with pool_of(files, host_bytes="600KB") as pool:
        assert pool.status("0").tier == "source"
        await pool.prefetch("0")
        async with pool.use("0"), pool.use("1"):
            pass
        async with pool.use("2"), pool.use("3"):
            pass
        assert pool.stats().host_bytes <= 600_000
        await pool.prefetch("0")
        assert pool.status("0").tier == "host"
    async with pool_of(files) as pool:
        with pytest.raises(ValueError, match="host_bytes"):
            await pool.prefetch("0")


# Updates.


@pytest.mark.matrix
@on_all
@pytest.mark.parametrize("kind", ["dictionary", "module"])
async def test_an_update_of_the_same_shapes_keeps_the_addresses(files: list[Path], tmp_path: Path, kind: str) -> None:
    async with pool_of([], room=1000) as pool:
        pool.add("m", files[1], make=make if kind == "module" else None)
        async with pool.use("m") as model:
            before = model.w if kind == "module" else model["w"]
            address = before.data_ptr()
            if kind == "dictionary":
                del before
        await pool.update("m", files[2])
        async with pool.use("m") as model:
            after = model.w if kind == "module" else model["w"]
            assert after.data_ptr() == address and float(after[0, 0]) == 2.0
        assert (pool.stats().num_updates, pool.stats().num_loads) == (1, 1)


@on_all
async def test_an_update_of_other_shapes_is_a_new_load(files: list[Path], tmp_path: Path) -> None:
    async with pool_of(files, room=1000) as pool:
        async with pool.use("0"):
            pass
        await pool.update("0", save(tmp_path / "other.safetensors", 7.0, width=64))
        async with pool.use("0") as tensors:
            assert tensors["w"].shape == (64, 256) and value_of(tensors) == 7.0
        assert pool.stats().device_bytes == 64 * KIB + 512


@on_all
async def test_callers_in_a_block_keep_the_old_weights(files: list[Path]) -> None:
    async with pool_of(files, room=1000) as pool, anyio.create_task_group() as tasks:
        later = []

        async def update() -> None:
            await pool.update("0", files[3])

        async def use() -> None:
            async with pool.use("0") as tensors:
                later.append(value_of(tensors))

        async with pool.use("0") as tensors:
            tasks.start_soon(update)
            assert await eventually_async(lambda: pool._entries["0"].wants_update)
            tasks.start_soon(use)
            await anyio.sleep(0.1)
            assert value_of(tensors) == 0.0 and not later
        assert await eventually_async(lambda: later == [3.0])


@on_all
async def test_an_update_that_fails_leaves_the_old_weights(files: list[Path], tmp_path: Path) -> None:
    (tmp_path / "cut.safetensors").write_bytes(files[1].read_bytes()[:5000])
    async with pool_of(files, room=1000) as pool:
        for _ in range(2):  # absent, then resident
            with pytest.raises(StioError):
                await pool.update("0", tmp_path / "cut.safetensors")
            with pytest.raises(StioError):
                await pool.update("0", tmp_path / "missing.safetensors")
            async with pool.use("0") as tensors:
                assert value_of(tensors) == 0.0


@on_all
async def test_an_update_that_fails_while_it_copies_loads_the_old_weights_again(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stio.serving.pool import content

    async with pool_of(files, room=1000) as pool:
        async with pool.use("0"):
            pass

        def fail(self: Any, operation: Any, source: Any, on_write: Any) -> None:
            on_write()
            self._tensors["w"].fill_(99.0)
            raise OSError("the disk failed")

        with monkeypatch.context() as patched:
            patched.setattr(content.Content, "replace", fail)
            with pytest.raises(OSError, match="the disk failed"):
                await pool.update("0", files[1])
        assert pool.status("0").tier != "device"
        async with pool.use("0") as tensors:
            assert value_of(tensors) == 0.0


@on_all
async def test_an_update_that_is_cancelled_behind_its_copies_keeps_one_version(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is on the device then is what is loaded after an eviction."""
    from stio.serving.pool import content

    async with pool_of(files, room=1000) as pool:
        async with pool.use("0"):
            pass
        replace = content.Content.replace

        def replace_and_leave(self: Any, operation: Any, *rest: Any) -> Any:
            done = replace(self, operation, *rest)
            operation.cancel()
            return done

        with monkeypatch.context() as patched:
            patched.setattr(content.Content, "replace", replace_and_leave)
            with pytest.raises(ClosedError):
                await pool.update("0", files[1])
        async with pool.use("0") as tensors:
            assert value_of(tensors) == 0.0


@on_all
async def test_what_an_update_needs_on_the_way_is_reserved(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from stio.serving.pool import content

    async with pool_of(files, room=4) as pool:
        async with pool.use("0"):
            pass
        entered, gate = threading.Event(), threading.Event()

        replace = content.Content.replace

        def wait(self: Any, *rest: Any) -> Any:
            entered.set()
            assert gate.wait(10)
            return replace(self, *rest)

        monkeypatch.setattr(content.Content, "replace", wait)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(pool.update, "0", files[1])
            assert await eventually_async(entered.is_set)
            assert MODEL_BYTES * 2 - 512 <= pool.stats().device_bytes <= MODEL_BYTES * 2 + 1024
            gate.set()
        assert pool.stats().device_bytes == MODEL_BYTES
        entered.clear()
        monkeypatch.undo()
        with pytest.raises(StioError):
            await pool.update("0", files[1].parent / "missing")
        assert pool.stats().device_bytes == MODEL_BYTES


@on_all
async def test_without_room_on_the_way_an_update_loads_anew(files: list[Path]) -> None:
    async with pool_of(files, room=1) as pool:
        async with pool.use("0"):
            pass
        await pool.update("0", files[1])
        assert pool.status("0").tier == "source"
        async with pool.use("0") as tensors:
            assert value_of(tensors) == 1.0
        assert pool.stats().peak_device_bytes == MODEL_BYTES


# Callers that leave, and the end.


@pytest.mark.matrix
@on_all
async def test_a_cancel_at_every_await_leaves_no_user(files: list[Path]) -> None:
    async with pool_of(files) as pool:
        async with pool.use("0"):
            pass

        async def run() -> None:
            async with pool.use("1"):
                await anyio.lowlevel.checkpoint()
            await pool.update("1", files[1])
            async with pool.use("0"):
                pass

        for name in "234":  # what is loaded first is imported
            async with pool.use(name):
                pass
        for n in range(50):  # the load of a caller that has left ends later, so something may be left for a moment
            with anyio.CancelScope() as scope:
                cancelling = Cancelling(n, scope.cancel)
                await cancelling.run(run())
            if not cancelling.reached:
                break
        assert 1 < n < 49
        assert await eventually_async(lambda: not any(pool.status(name).num_users for name in "01234"))
        assert not any(pool.status(name).num_waiting for name in "01234")
        async with pool.use("1") as tensors:
            assert value_of(tensors) == 1.0


@on_all
async def test_a_use_that_was_interrupted_before_its_block_ends(files: list[Path]) -> None:
    async with pool_of(files) as pool:
        use = pool.use("0")
        await use.__aenter__()
        assert pool.status("0").num_users == 1
        del use  # as after an interrupt between the wait and the block
        gc.collect()
        assert await eventually_async(lambda: pool.status("0").num_users == 0)


def test_a_caller_that_leaves_while_it_gets_an_error_gives_back_nothing() -> None:
    from stio.serving.pool.thread import Caller

    left: list[bool] = []

    class Thread:
        left = None

        def post(self, what: object, caller: Caller, is_served: bool) -> None:
            left.append(is_served)

    class Racing(dict[str, str]):
        def setdefault(self, key: str, value: str) -> str:  # type: ignore[override]
            found = super().setdefault(key, value)
            if value == "served":
                caller.leave()  # between the decision and what follows it
            return found

    thread: Any = Thread()
    entry: Any = None
    caller = Caller(thread, entry)
    caller._decided = Racing()
    caller.end(error=ValueError("no load"))
    assert left == []
    caller = Caller(thread, entry)
    caller._decided = Racing()
    caller.end({"w": 1})
    assert left == [True] and caller.take() is None


@on_all
async def test_an_error_of_the_pool_s_own_thread_reaches_its_callers(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pool_of(files) as pool:

        def fail(*_: Any) -> Any:
            raise RuntimeError("this is a mistake")

        monkeypatch.setattr(pool._thread.policy, "decide", fail)
        with pytest.raises(RuntimeError, match="this is a mistake"):
            async with pool.use("0"):
                pass
        with pytest.raises(ClosedError) as caught:
            async with pool.use("0"):
                pass
        assert isinstance(caught.value.__cause__, RuntimeError)


@on_all
async def test_a_caller_that_leaves_does_not_end_the_load_of_others(files: list[Path]) -> None:
    async with pool_of([]) as pool:
        gate = threading.Event()
        pool.add("slow", files[1], make=lambda: (gate.wait(10), make())[1])
        found = []

        async def use() -> None:
            async with pool.use("slow") as network:
                found.append(float(network.w[0, 0]))

        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope() as leaving:
                tasks.start_soon(use)
                leaving.cancel()
                await use()
            assert await eventually_async(lambda: pool.status("slow").num_waiting == 1)
            gate.set()
        assert found == [1.0]


@on_all
async def test_the_end_with_callers_inside(files: list[Path]) -> None:
    with nothing_left():
        ended: list[str] = []
        pool = pool_of(files, room=1)

        async def use() -> None:
            try:
                async with pool.use("1"):
                    pass
            except ClosedError:
                ended.append("closed")

        async with anyio.create_task_group() as tasks:
            async with pool, pool.use("0") as tensors:
                tasks.start_soon(use)
                assert await eventually_async(lambda: pool.status("1").num_waiting == 1)
                await pool.aclose()
                assert value_of(tensors) == 0.0
        assert ended == ["closed"]
        with pytest.raises(ClosedError):
            async with pool.use("0"):
                pass
        with pytest.raises(ClosedError):
            await pool.update("0", files[0])
        with pytest.raises(ClosedError):
            pool.add("new", files[0])


@on_all
async def test_a_closed_pool_refers_to_no_tensors(files: list[Path]) -> None:
    """Also not to those of callers that were inside."""
    pool = pool_of(files)
    async with pool, pool.use("0") as tensors:
        storage = StorageWeakRef(tensors["w"].untyped_storage())
        await pool.aclose()
        assert value_of(tensors) == 0.0
    assert not tensors
    assert await eventually_async(storage.expired)


def test_a_pool_that_is_not_entered_is_not_kept(files: list[Path]) -> None:
    pool = weakref.ref(pool_of(files))
    gc.collect()
    assert pool() is None


@on_all
async def test_wrong_arguments(files: list[Path]) -> None:
    for options in ({"device_bytes": 0}, {"max_hold_seconds": -1}, {"max_loads": 0}, {"host_bytes": "x"}):
        with pytest.raises(ValueError):
            pool_of([], **options)
    for options in ({"device": 1.5}, {"disk": "path"}, {"device_bytes": None}):
        with pytest.raises(TypeError):
            pool_of([], **options)
    pool = pool_of(files)
    with pytest.raises(ValueError, match="has a model '0'"):
        pool.add("0", files[1])
    with pytest.raises(ValueError, match="it has: '?0"):
        pool.use("x")
    with pytest.raises(TypeError):
        pool.use("0", priority=1.5)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        pool.add("y", files[0], make=3)  # type: ignore[arg-type]
    with pytest.raises(ClosedError, match="not open"):
        async with pool.use("0"):
            pass
    async with pool:
        use = pool.use("0")
        async with use:
            pass
        with pytest.raises(ValueError, match="entered once"):
            async with use:
                pass
    with pytest.raises((ClosedError, ValueError)):
        async with pool:
            pass


@on_all
async def test_a_device_that_is_not_here(files: list[Path]) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    async with pool_of(files, device="cuda") as pool:
        with pytest.raises(StioError):
            async with pool.use("0"):
                pass


def test_a_trace_shows_swaps(files: list[Path], tmp_path: Path) -> None:
    trace = stio.Trace()
    with sync.ModelPool(device="cpu", device_bytes=MODEL_BYTES, trace=trace) as pool:
        for k in (0, 1):
            pool.add(str(k), files[k])
        for name in "010":
            with pool.use(name):
                pass
        pool.update("0", files[2])
    own = [span for span in trace.spans if span.name in ("swap", "evict", "update") or span.detail in ("0", "1")]
    assert [(span.name, span.detail) for span in own] == [
        *(("open", "0"), ("swap", "0"), ("open", "1"), ("evict", "0"), ("swap", "1"), ("evict", "1"), ("swap", "0")),
        ("update", "0"),
    ]
    assert {span.lane for span in own} == {"open", "swap", "pool", "update"}
    for before, after in pairwise([span for span in own if span.name in ("swap", "evict")]):
        assert before.end <= after.start, "the old model goes before the new one comes"
    trace.save_svg(tmp_path / "pool.svg")
    text = (tmp_path / "pool.svg").read_text()
    assert all(re.search(rf">{word}\b", text) for word in ("swap", "pool", "update", "open"))
    assert "evict" in text


@pytest.mark.slow
def test_threads_share_a_pool(files: list[Path]) -> None:
    wrong: list[float] = []
    with sync.ModelPool(device="cpu", device_bytes=2 * MODEL_BYTES, host_bytes="4MB", max_hold_seconds=0.01) as pool:
        for k, file in enumerate(files):
            pool.add(str(k), file)

        def work(seed: int) -> None:
            rng = random.Random(seed)
            for _ in range(50):
                name = rng.choice("01234")
                with pool.use(name) as tensors:
                    if value_of(tensors) != float(name):
                        wrong.append(float(name))

        threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
        for thread in threads:
            thread.start()
        pool.prefetch("4")
        for thread in threads:
            thread.join()
        assert not wrong
        assert pool.stats().peak_device_bytes <= 2 * MODEL_BYTES
        assert pool.stats().num_hits + pool.stats().num_waits == 400
        pool.update("0", files[1])
        with pool.use("0") as tensors:
            assert value_of(tensors) == 1.0
    with pytest.raises(ClosedError), pool.use("0"):
        pass


def test_an_error_does_not_hold_the_frames_of_its_caller(files: list[Path]) -> None:
    """Tensors of the caller are free when the error was handled, without a collection of cycles."""
    files[0].write_bytes(b"no checkpoint")
    with sync.ModelPool(device="cpu", device_bytes="4MB") as pool:
        pool.add("0", files[0])

        def use() -> weakref.ref[torch.Tensor]:
            own = torch.empty(3)
            try:
                with pool.use("0"):
                    pass
            except StioError:
                return weakref.ref(own)
            raise AssertionError

        use()
        gc.disable()
        try:
            assert use()() is None
        finally:
            gc.enable()


def test_an_eviction_without_a_thread(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The system starts no thread: what is left is not waited for, and counts."""
    with sync.ModelPool(device="cpu", device_bytes=MODEL_BYTES) as pool:
        for k in (0, 1):
            pool.add(str(k), files[k])
        with pool.use("0") as tensors:
            storage = StorageWeakRef(tensors["w"].untyped_storage())
        start = Operation.start

        def refuse(self: Any) -> Any:
            if self._name == "evict":
                raise stio.StorageError("no more threads")
            return start(self)

        monkeypatch.setattr(Operation, "start", refuse)
        with pool.use("1") as tensors:
            assert value_of(tensors) == 1.0 and storage.expired()
            kept = tensors["w"]
        with pytest.raises(DeviceMemoryError, match="still referenced: w of '1'"), pool.use("0"):
            pass
        del kept
        with pool.use("0") as tensors:
            assert value_of(tensors) == 0.0
        assert pool.stats().device_bytes == MODEL_BYTES


def test_an_interrupted_thread_leaves(files: list[Path]) -> None:
    """Ctrl-C while the main thread waits for a load; nobody else wants it, so it ends."""
    with sync.ModelPool(device="cpu", device_bytes="4MB") as pool:
        entered, gate = threading.Event(), threading.Event()

        def slow() -> nn.Module:
            entered.set()
            assert gate.wait(20)
            return make()

        def interrupt() -> None:
            assert entered.wait(20)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        pool.add("slow", files[1], make=slow)
        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(KeyboardInterrupt), pool.use("slow"):
            pass
        thread.join()
        assert eventually(lambda: pool.status("slow").num_waiting == 0)
        gate.set()
        assert eventually(lambda: pool.status("slow").tier == "source")
        with pool.use("slow") as network:
            assert float(network.w[0, 0]) == 1.0


def test_an_open_pool_does_not_hold_the_exit(zygote: Zygote, files: list[Path]) -> None:
    done = zygote.run(
        """
        import sys, stio.sync
        pool = stio.sync.ModelPool(device="cpu", device_bytes="4MB").__enter__()
        pool.add("0", sys.argv[1])
        use = pool.use("0")
        print(sorted(use.__enter__()))
        """,
        files[0],
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "['b.c', 'tied', 'w']", "")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Python, about forks beside threads
def test_a_forked_child_gets_an_error(files: list[Path]) -> None:
    with sync.ModelPool(device="cpu", device_bytes="4MB") as pool:
        pool.add("0", files[0])
        with pool.use("0"):
            pid = os.fork()
            if pid == 0:
                try:
                    with pool.use("0"):
                        os._exit(2)
                except ClosedError:
                    os._exit(0)
                finally:
                    os._exit(3)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        with pool.use("0") as tensors:
            assert value_of(tensors) == 0.0


@pytest.mark.slow
def test_the_memory_of_evicted_models_is_freed(files: list[Path]) -> None:
    with nothing_left(), sync.ModelPool(device="cpu", device_bytes=2 * MODEL_BYTES) as pool:
        for k, file in enumerate(files):
            pool.add(str(k), file)
        for turn in range(100):
            with pool.use(str(turn % 5)):
                pass
        gc.collect()
        alive = [one for one in gc.get_objects() if isinstance(one, torch.Tensor) and one.shape == (256, 256)]
        assert len(alive) <= 2


@asynccontextmanager
async def requests_of(pool: stio.ModelPool, num_callers: int, num_requests: int) -> AsyncIterator[dict[str, Any]]:
    """Run callers that choose models by a Zipf distribution; some leave early."""
    found: dict[str, Any] = {"wrong": 0, "served": 0, "failed": 0, "waits": []}
    names = pool.names()
    weights = [1 / (k + 1) for k in range(len(names))]
    left = iter(range(num_requests))
    expected: dict[str, set[float]] = {name: {float(name)} for name in names}
    found["expected"] = expected

    async def call(seed: int) -> None:
        rng = random.Random(seed)
        for _ in left:
            (name,) = rng.choices(names, weights)
            scope = anyio.CancelScope(deadline=anyio.current_time() + 0.002 if rng.random() < 0.05 else float("inf"))
            began = time.perf_counter()
            with scope:
                try:
                    async with pool.use(name, priority=rng.choice([0, 0, 0, 1])) as tensors:
                        found["waits"].append(time.perf_counter() - began)
                        await anyio.sleep(rng.uniform(0, 0.004))
                        found["wrong"] += float(tensors["w"][0, 0]) not in expected[name]
                        found["wrong"] += float(tensors["b.c"][0]) != float(tensors["w"][-1, -1])
                        found["served"] += 1
                except StioError:
                    found["failed"] += 1

    async with anyio.create_task_group() as tasks:
        for seed in range(num_callers):
            tasks.start_soon(call, seed)
        yield found


@pytest.mark.slow
@on_all
async def test_many_callers_with_cancels_failures_and_an_update(files: list[Path]) -> None:
    whole = files[4].read_bytes()
    async with pool_of(files, host_bytes="4MB", max_hold_seconds=0.02) as pool:
        async with requests_of(pool, 16, 600) as found:
            await anyio.sleep(0.1)
            found["expected"]["1"].add(3.0)
            await pool.update("1", files[3])
            found["expected"]["1"] = {3.0}
            files[4].write_bytes(whole[:50])
            await anyio.sleep(0.1)
            files[4].write_bytes(whole)
        assert not found["wrong"]
        assert found["served"] > 400
        assert pool.stats().peak_device_bytes <= 2 * MODEL_BYTES
        statuses = lambda: [pool.status(name) for name in pool.names()]  # noqa: E731
        assert await eventually_async(lambda: not any(one.num_users or one.num_waiting for one in statuses()))


@pytest.mark.costly("models are swapped for a second")
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_loop_is_not_held_while_models_are_swapped(files: list[Path]) -> None:
    async with pool_of(files, room=1) as pool:
        for name in "01":
            async with pool.use(name):
                pass

        async def longest_turn() -> float:
            longest, stop = 0.0, False

            async def tick() -> None:
                nonlocal longest
                while not stop:
                    began = time.perf_counter()
                    await asyncio.sleep(0)
                    longest = max(longest, time.perf_counter() - began)

            ticking = asyncio.ensure_future(tick())
            for k in range(20):
                async with pool.use(str(k % 2)):
                    pass
            stop = True
            await ticking
            return longest

        # Other processes may hold the processors: the best run counts.
        assert min([await longest_turn() for _ in range(5)]) < 0.1
