"""A saver in a training loop: snapshots, order, failures that were not awaited, retention, cancels."""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import threading

import anyio
import pytest
import torch
from fakes import MemoryDestination
from loops import others_are_slow
from support import (
    backend_name,
    before_writes,
    cancelled_after_every_round,
    cancelled_at_every_await,
    cancelled_natively_at_every_await,
    eventually_async,
    hook_writes,
    nothing_left,
    ramp,
    require_equal,
)

import stio
import stio.sync

pytestmark = pytest.mark.anyio

MIB = 1 << 20


def generation(number, *, count=6):
    return {f"t{k}": torch.full((20_000,), float(number)) for k in range(count)}


class Hold:
    """Holds writing until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self):
        self.reached.set()
        assert self.opened.wait(20)


@pytest.fixture
def hold():
    hold = Hold()
    with before_writes(hold):
        yield hold
        hold.opened.set()


def failing(monkeypatch, number=errno.EIO):
    def fail():
        raise OSError(number, "as asked")

    hook_writes(fail, monkeypatch.setattr)


# Snapshots.


async def test_c111_what_was_staged_is_what_is_written(tmp_path, hold):
    tensors = {f"t{k}": ramp(300, 500, start=k) for k in range(8)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    async with stio.Saver() as saver:
        pending = await saver.save(tensors, tmp_path / "x")
        for tensor in tensors.values():
            tensor.zero_()
        assert pending.staged
        assert not pending.done()
        hold.opened.set()
        result = await pending
    require_equal(await stio.load(tmp_path / "x"), expected)
    assert result.staged_seconds < result.committed_seconds


async def test_a_training_loop(tmp_path):
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = {}
    async with stio.Saver(keep_last=2) as saver:
        for step in range(8):
            model(torch.ones(4, 200)).sum().backward()
            optimizer.step()
            seen[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            await saver.save(model, tmp_path / f"step-{step}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-6", "step-7"]
    for step in (6, 7):
        require_equal(await stio.load(tmp_path / f"step-{step}"), seen[step])


async def test_staging_memory_is_reused(tmp_path):
    async with stio.Saver() as saver:
        for step in range(4):
            await (await saver.save(generation(step), tmp_path / "x"))
            peak = saver._shared.pool.peak_bytes
            assert saver._shared.pool.held_bytes == peak
    assert saver._shared.pool.held_bytes == 0


# Several saves.


async def test_c112_waits_for_the_one_under_way(tmp_path, hold):
    async with stio.Saver() as saver:
        first = await saver.save(generation(1), tmp_path / "x")
        begun = []

        async def second():
            begun.append(await saver.save(generation(2), tmp_path / "x"))

        async with anyio.create_task_group() as group:
            group.start_soon(second)
            await eventually_async(hold.reached.is_set)
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert not begun
            hold.opened.set()
        assert first.done()
    require_equal(await stio.load(tmp_path / "x"), generation(2))


async def test_c112_or_raises(tmp_path, hold):
    async with stio.Saver(when_full="error") as saver:
        first = await saver.save(generation(1), tmp_path / "x")
        with pytest.raises(stio.SaveInProgressError, match="under way"):
            await saver.save(generation(2), tmp_path / "x")
        hold.opened.set()
        await first
        await saver.save(generation(3), tmp_path / "x")
    require_equal(await stio.load(tmp_path / "x"), generation(3))


async def test_several_are_published_in_the_order_of_their_calls(tmp_path, hold):
    async with stio.Saver(max_pending=3) as saver:
        saves = [await saver.save(generation(k), tmp_path / "x") for k in range(3)]
        assert [save.staged for save in saves] == [True] * 3
        assert len(saver.pending) == 3
        hold.opened.set()
        await saves[2]
        assert all(save.done() for save in saves)
    require_equal(await stio.load(tmp_path / "x"), generation(2))


@pytest.mark.matrix
async def test_many_tasks_share_a_saver_with_a_small_budget(tmp_path):
    async with stio.Saver(max_pending=4, budget_bytes=4 * MIB) as saver:

        async def one(k):
            tensors = {f"t{i}": torch.full((1 << 20,), float(k)) for i in range(4)}
            await (await saver.save(tensors, tmp_path / str(k)))

        async with anyio.create_task_group() as group:
            for k in range(6):
                group.start_soon(one, k)
        assert saver._shared.pool.peak_bytes <= 4 * MIB
    for k in range(6):
        assert (await stio.load(tmp_path / str(k)))["t0"][0] == k


@pytest.mark.slow
@others_are_slow
async def test_saves_of_different_sizes_begin_at_once(tmp_path):
    sizes = [1 << 12, 1 << 25]
    async with stio.Saver(max_pending=2) as saver:

        async def one(k):
            await (await saver.save({"a": torch.full((sizes[k],), float(k))}, tmp_path / str(k)))

        for _ in range(3):
            async with anyio.create_task_group() as group:
                group.start_soon(one, 1)
                group.start_soon(one, 0)
    for k in range(2):
        assert (await stio.load(tmp_path / str(k)))["a"].sum() == k * sizes[k]


async def test_one_cancelled_in_line_does_not_let_the_next_overtake(tmp_path, hold):
    async with stio.Saver(max_pending=3) as saver:
        first = await saver.save(generation(1), tmp_path / "x")
        second = await saver.save(generation(2), tmp_path / "x")
        second.cancel()
        assert await eventually_async(second.done)
        third = await saver.save(generation(3), tmp_path / "x")
        for _ in range(50):
            await anyio.lowlevel.checkpoint()
        hold.opened.set()
        await first
        await third
    require_equal(await stio.load(tmp_path / "x"), generation(3))


async def test_retention_leaves_a_destination_that_is_no_path(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"not the saver's")
    destinations = [MemoryDestination(path=str(tmp_path)), MemoryDestination(path="memory:")]
    async with stio.Saver(keep_last=1) as saver:
        for destination in destinations:
            await (await saver.save(generation(1), destination))
    assert (tmp_path / "model.safetensors").exists()
    assert all("model.safetensors" in destination.files for destination in destinations)


# Failures.


async def test_c105_await_raises(tmp_path, monkeypatch):
    await stio.save(generation(0), tmp_path / "x")
    async with stio.Saver() as saver:
        failing(monkeypatch)
        with nothing_left():
            pending = await saver.save(generation(1), tmp_path / "x")
            with pytest.raises(stio.StorageError) as caught:
                await pending
        assert caught.value.errno == errno.EIO
        monkeypatch.undo()
        require_equal(await stio.load(tmp_path / "x"), generation(0))
        await (await saver.save(generation(2), tmp_path / "x"))  # it was delivered: the next one goes on
    require_equal(await stio.load(tmp_path / "x"), generation(2))


async def test_c113_the_next_save_raises(tmp_path, monkeypatch, caplog):
    async with stio.Saver() as saver:
        failing(monkeypatch)
        pending = await saver.save(generation(1), tmp_path / "x")
        await eventually_async(pending.done)
        monkeypatch.undo()
        with caplog.at_level(logging.ERROR, "stio"), pytest.raises(stio.StorageError):
            await saver.save(generation(2), tmp_path / "x")
        assert "was not awaited" in caplog.text
        await saver.save(generation(3), tmp_path / "x")
    require_equal(await stio.load(tmp_path / "x"), generation(3))


async def test_c113_leaving_raises(tmp_path, monkeypatch, caplog):
    failing(monkeypatch)
    with pytest.raises(stio.StorageError):
        async with stio.Saver() as saver:
            await saver.save(generation(1), tmp_path / "x")
    assert "was not awaited" in caplog.text
    with pytest.raises(stio.ClosedError):
        await saver.save(generation(2), tmp_path / "x")
    await saver.aclose()


async def test_c113_an_error_of_the_users_goes_first(tmp_path, monkeypatch, caplog):
    failing(monkeypatch)
    with pytest.raises(KeyError, match="mine"):
        async with stio.Saver() as saver:
            await saver.save(generation(1), tmp_path / "x")
            raise KeyError("mine")
    assert "was not awaited" in caplog.text


async def test_leaving_drains_by_an_exception_too(tmp_path):
    with pytest.raises(KeyError, match="mine"):
        async with stio.Saver() as saver:
            await saver.save(generation(1), tmp_path / "x")
            raise KeyError("mine")
    require_equal(await stio.load(tmp_path / "x"), generation(1))


async def test_one_that_fails_does_not_stop_the_next(tmp_path, hold, monkeypatch):
    async with stio.Saver(max_pending=2) as saver:
        broken = {"a": torch.ones(3), "b": stio.LazyTensor(torch.float32, (3,), lambda: 1 / 0)}
        with pytest.raises(ZeroDivisionError):
            await saver.save(broken, tmp_path / "x")
        pending = await saver.save(generation(1), tmp_path / "x")
        hold.opened.set()
        await pending
    require_equal(await stio.load(tmp_path / "x"), generation(1))


# Cancels.


async def test_c110_cancelled_before_the_commit(tmp_path, hold):
    await stio.save({"old": torch.ones(3)}, tmp_path / "x", durability="none") if hold.opened.set() else None
    hold.opened.clear()
    async with stio.Saver() as saver:
        with nothing_left():
            pending = await saver.save(generation(1), tmp_path / "x")
            await eventually_async(hold.reached.is_set)
            pending.cancel()
            hold.opened.set()
            with pytest.raises(stio.ClosedError):
                await pending
        assert not (tmp_path / "x").exists()
        assert not list(tmp_path.iterdir())
        await saver.save(generation(2), tmp_path / "x")
    require_equal(await stio.load(tmp_path / "x"), generation(2))


async def test_c110_cancelled_after_the_commit_began(tmp_path, monkeypatch):
    from stio.storage.commit.transaction import LocalTransaction

    commit, begun, go = LocalTransaction.commit, threading.Event(), threading.Event()

    def held(self, **keywords):
        begun.set()
        assert go.wait(20)
        commit(self, **keywords)

    monkeypatch.setattr(LocalTransaction, "commit", held)
    async with stio.Saver() as saver:
        pending = await saver.save(generation(1), tmp_path / "x")
        await eventually_async(begun.is_set)
        pending.cancel()
        go.set()
        assert (await pending).files == ("model.safetensors",)
    require_equal(await stio.load(tmp_path / "x"), generation(1))


async def test_cancelling_a_wait_cancels_the_wait_alone(tmp_path, hold):
    async with stio.Saver() as saver:
        pending = await saver.save(generation(1), tmp_path / "x")
        with anyio.move_on_after(0.01) as scope:
            await pending
        assert scope.cancelled_caught
        hold.opened.set()
        await pending
    require_equal(await stio.load(tmp_path / "x"), generation(1))


async def test_leaving_by_a_cancel_rolls_back(tmp_path, hold):
    with nothing_left():
        with anyio.CancelScope() as scope:
            async with stio.Saver(max_pending=2) as saver:
                await saver.save(generation(1), tmp_path / "x")
                await saver.save(generation(2), tmp_path / "x")
                await eventually_async(hold.reached.is_set)
                threading.Timer(0.05, hold.opened.set).start()
                scope.cancel()
                await anyio.lowlevel.checkpoint()
        assert scope.cancelled_caught
        assert not list(tmp_path.iterdir())


async def save_once(directory):
    await stio.save(generation(1, count=3), directory, durability="none", max_shard_size="100KB")


async def saver_twice(directory):
    async with stio.Saver(durability="none", max_pending=2) as saver:
        await saver.save(generation(1, count=3), directory)
        pending = await saver.save(generation(1, count=3), directory)
        await pending


async def with_producer(directory):
    async def produce():
        await asyncio.sleep(0)
        return torch.ones(30)

    await stio.save({"a": stio.LazyTensor(torch.float32, (30,), produce)}, directory, durability="none")


@pytest.mark.matrix
@pytest.mark.parametrize("call", [save_once, saver_twice, with_producer], ids=lambda call: call.__name__)
@pytest.mark.parametrize("how", ["scope", "native", "resume", "rounds"])
async def test_c95_a_cancel_at_every_await(tmp_path, anyio_backend, call, how):
    await with_producer(tmp_path / "warm-up")  # starts stio's event loop
    target = tmp_path / "out"

    def make():
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".stio")] == []
        return call(target)

    if how == "scope":
        await cancelled_at_every_await(make)
    elif how == "rounds":
        await cancelled_after_every_round(make)
    elif backend_name(anyio_backend) == "asyncio":
        await cancelled_natively_at_every_await(make, at_resume=how == "resume")
    gc.collect()
    assert sorted(path.name for path in tmp_path.iterdir()) in (["out", "warm-up"], ["warm-up"])


# Retention.


async def test_c122_keeps_the_newest_and_what_is_not_its_own(tmp_path):
    (tmp_path / "old-0").mkdir()
    (tmp_path / "old-0" / "config.json").write_text("{}")
    async with stio.Saver(keep_last=2) as saver:
        for name in ("old-0", "a-1", "b-2.safetensors", "c-3", "a-1", "d-4"):
            await (await saver.save(generation(1), tmp_path / name))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a-1", "d-4", "old-0"]
    assert [path.name for path in (tmp_path / "old-0").iterdir()] == ["config.json"]


async def test_c122_nothing_goes_before_the_newer_is_durable(tmp_path, monkeypatch):
    async with stio.Saver(keep_last=1) as saver:
        await (await saver.save(generation(1), tmp_path / "a-1"))
        failing(monkeypatch)
        pending = await saver.save(generation(2), tmp_path / "b-2")
        with pytest.raises(stio.StorageError):
            await pending
        monkeypatch.undo()
        require_equal(await stio.load(tmp_path / "a-1"), generation(1))
        await (await saver.save(generation(3), tmp_path / "c-3"))
    assert [path.name for path in tmp_path.iterdir()] == ["c-3"]


# The blocking twin.


def test_sync_saver(tmp_path):
    with stio.sync.Saver(keep_last=2) as saver:
        for step in range(4):
            pending = saver.save(generation(step), tmp_path / f"step-{step}")
            assert pending.staged
        result = pending.result(20)
        assert pending.done()
    assert result.path == str(tmp_path / "step-3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-3"]
    require_equal(stio.sync.load(tmp_path / "step-3"), generation(3))


def test_sync_timeout(tmp_path, hold):
    with stio.sync.Saver() as saver:
        pending = saver.save(generation(1), tmp_path / "x")
        with pytest.raises(TimeoutError):
            pending.result(0.01)
        hold.opened.set()
        pending.result()


def test_sync_keyboard_interrupt_rolls_back(tmp_path, hold):
    with nothing_left():
        with pytest.raises(KeyboardInterrupt):
            with stio.sync.Saver() as saver:
                saver.save(generation(1), tmp_path / "x")
                timer = threading.Timer(0.05, hold.opened.set)
                timer.start()
                raise KeyboardInterrupt
        timer.join()
        assert not list(tmp_path.iterdir())


def test_sync_failure_is_raised_on_leaving(tmp_path, monkeypatch):
    failing(monkeypatch, errno.EDQUOT)
    with pytest.raises(stio.NoSpaceError):
        with stio.sync.Saver() as saver:
            saver.save(generation(1), tmp_path / "x")


@pytest.mark.parametrize(
    ("keyword", "value", "error"),
    [
        *((keyword, 0, ValueError) for keyword in ("keep_last", "max_pending", "budget_bytes")),
        *((keyword, True, TypeError) for keyword in ("keep_last", "max_pending", "budget_bytes")),
        *((keyword, 1.5, TypeError) for keyword in ("keep_last", "max_pending", "budget_bytes")),
        *((keyword, "1GB", TypeError) for keyword in ("keep_last", "max_pending")),
        ("budget_bytes", "1 GBit", ValueError),
        ("when_full", "drop", ValueError),
        ("hash", "md5", ValueError),
    ],
)
def test_wrong_settings(keyword, value, error):
    with pytest.raises(error, match=keyword.removesuffix("_bytes")):
        stio.Saver(**{keyword: value})
