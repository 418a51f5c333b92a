"""What leaves a pool: 455."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from safetensors.torch import save_file
from support import eventually_async

import stio
from stio import sync
from stio.serving.pool.policy import Model, ModelRequest, Policy

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save_file({"w": torch.ones(256)}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def pool_of(path: Path, **options: Any) -> stio.ModelPool:
    pool = stio.ModelPool(**({"device": "cpu", "device_bytes": "1MB"} | options))
    pool.add("m", path, pin=True)
    return pool


async def test_c455_an_evicted_model_is_loaded_again(path: Path) -> None:
    async with pool_of(path, host_bytes="1MB") as pool:
        await pool.evict("m")  # it is not on the device
        async with pool.use("m"):
            assert pool.status("m").tier == "device"
        await pool.evict("m")
        assert pool.status("m").tier == "host" and pool.status("m").nbytes
        assert pool.stats().device_bytes == 0 and pool.stats().host_bytes > 0
        async with pool.use("m") as tensors:
            assert tensors["w"].sum() == 256
        await pool.evict("m", host=True)
        assert pool.status("m").tier == "source" and pool.stats().host_bytes == 0
        assert pool.stats().num_evictions == 2 and pool.stats().num_loads == 2
        with pytest.raises(ValueError, match="no model 'n'"):
            await pool.evict("n")


async def test_c455_an_eviction_waits_for_the_users_and_gets_no_others(path: Path) -> None:
    async with pool_of(path) as pool:
        async with anyio.create_task_group() as tasks:
            async with pool.use("m") as tensors:
                tasks.start_soon(pool.evict, "m")
                await anyio.wait_all_tasks_blocked()
                assert tensors["w"].sum() == 256 and pool.status("m").tier == "device"
        assert pool.status("m").tier == "source"


async def test_c455_a_cancelled_eviction_leaves_the_model(path: Path) -> None:
    async with pool_of(path) as pool:
        async with pool.use("m"):
            with anyio.move_on_after(0.05):
                await pool.evict("m")
        async with pool.use("m"):
            pass
        assert pool.stats().num_loads == 1


async def test_c455_a_removed_model_is_gone(path: Path) -> None:
    async with pool_of(path, host_bytes="1MB") as pool:
        late = pool.use("m")
        errors: list[Exception] = []

        async def wait_for_it() -> None:
            try:
                async with pool.use("m"):
                    pass
            except stio.ClosedError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            async with pool.use("m"):
                tasks.start_soon(pool.remove, "m")
                await anyio.wait_all_tasks_blocked()
                tasks.start_soon(wait_for_it)
                await anyio.wait_all_tasks_blocked()
        assert pool.names() == [] and pool.stats().device_bytes == pool.stats().host_bytes == 0
        assert "'m' was removed" in str(errors[0])
        with pytest.raises(ValueError, match="no model 'm'"):
            pool.use("m")
        with pytest.raises(stio.ClosedError, match="'m' was removed"):
            async with late:
                pass
        pool.add("m", path)
        async with pool.use("m") as tensors:
            assert len(tensors) == 1


async def test_c455_an_update_without_a_source_is_no_eviction(path: Path) -> None:
    async with pool_of(path) as pool:
        async with pool.use("m"):
            pass
        with pytest.raises(TypeError, match="a source must be a path, .*NoneType"):
            await pool.update("m", None)  # type: ignore[arg-type]
        assert pool.status("m").tier == "device" and pool.stats().num_evictions == 0


async def test_c455_two_removals_at_once(path: Path) -> None:
    async with pool_of(path) as pool:
        errors: list[Exception] = []

        async def remove() -> None:
            try:
                await pool.remove("m")
            except stio.ClosedError as error:
                errors.append(error)

        async with anyio.create_task_group() as tasks:
            async with pool.use("m"):
                tasks.start_soon(remove)
                tasks.start_soon(remove)
                await anyio.wait_all_tasks_blocked()
        assert len(errors) == 1 and pool.names() == []


@pytest.mark.parametrize("pinned", [False, True])
async def test_c455_an_idle_model_is_evicted(path: Path, pinned: bool) -> None:
    async with stio.ModelPool(device="cpu", device_bytes="1MB", idle_seconds=0.05) as pool:
        pool.add("m", path, pin=pinned)
        async with pool.use("m"):
            await anyio.sleep(0.1)
            assert pool.status("m").tier == "device"
        if pinned:
            await anyio.sleep(0.1)
        else:
            assert await eventually_async(lambda: pool.status("m").tier == "source")
        assert pool.stats().num_evictions == (not pinned)


def test_c455_the_policy_counts_idle_time_from_the_last_use() -> None:
    policy: Policy[Model] = Policy(100, hold_seconds=1, max_loads=1, idle_seconds=10)
    used, new = Model("used", nbytes=10, state="resident", used=5), Model("new", nbytes=10, state="resident", used=8)
    busy = Model("busy", nbytes=10, state="resident", used=0, num_users=1)
    policy.models = [used, new, busy, Model("pinned", pinned=True, state="resident"), Model("absent")]
    assert policy.idle_in(6) == 9 and policy.decide(14.9).evict == []
    assert policy.decide(15).evict == [used] and policy.idle_in(16) == 2
    new.calls.append(ModelRequest(called=17))
    assert policy.idle_in(20) is None and policy.decide(20).evict == []
    assert Policy[Model](100, hold_seconds=1, max_loads=1).idle_in(0) is None


@pytest.mark.parametrize("wrong", [-1, float("nan"), "5", True])
async def test_c455_a_wrong_time_is_refused(wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="idle_seconds"):
        stio.ModelPool(device="cpu", device_bytes="1MB", idle_seconds=wrong)


async def test_c455_a_missing_path_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    pool = stio.ModelPool(device="cpu", device_bytes="1MB")
    for place in (tmp_path / "no", str(tmp_path / "no"), tmp_path / "broken"):
        with pytest.raises(stio.CheckpointNotFoundError, match="no such file"):
            pool.add("m", place)
    assert pool.names() == []
    pool.add("remote", "s3://bucket/model/")  # nothing is asked
    assert pool.names() == ["remote"]


def test_c455_the_blocking_twin_has_both(path: Path) -> None:
    with sync.ModelPool(device="cpu", device_bytes="1MB") as pool:
        pool.add("m", path)
        with pool.use("m"):
            pass
        pool.evict("m")
        assert pool.status("m").tier == "source"
        pool.remove("m")
        assert pool.names() == []
