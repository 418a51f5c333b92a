"""`ModelPool.follow`: users keep their version, later ones get the newest; only what differs is read on the device."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from deltas import State, id_of, next_state, write_chain, write_checkpoint, write_delta
from loops import on_all
from support import module_of, nothing_left

import stio
from stio.errors import ClosedError, FormatError, StorageError
from stio.format.delta import ID_KEY
from stio.loading.targets import base
from stio.serving.pool import content

pytestmark = pytest.mark.anyio


def states_of(number: int) -> list[dict[str, torch.Tensor]]:
    chance = torch.Generator().manual_seed(3)
    states = [{"w": torch.randn(300, 40, generator=chance).bfloat16(), "b.c": torch.randn(77, generator=chance)}]
    for _ in range(number - 1):
        states.append(next_state(states[-1], 0.03, chance))
    return states


def extend(run: Path, states: list[dict[str, torch.Tensor]], step: int) -> None:
    write_delta(run / f"step-{step}", states[step - 1], states[step], base=f"step-{step - 1}", step=step)


def bits(model: Any) -> dict[str, bytes]:
    tensors: State = model if isinstance(model, dict) else model.state_dict()
    return {name: one.cpu().view(torch.uint8).numpy().tobytes() for name, one in tensors.items()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def pool_of(run: Path, state: State | None = None) -> stio.ModelPool:
    pool = stio.ModelPool(device="cpu", device_bytes="200MB", max_hold_seconds=0.05)
    make: Callable[[], torch.nn.Module] | None = None
    if state is not None:
        make = lambda: module_of({name: torch.empty_like(one) for name, one in state.items()})  # noqa: E731
    pool.add("chat", run / "step-0", make=make)
    return pool


@on_all
@pytest.mark.parametrize("kind", ["module", "dict"])
async def test_users_keep_their_version_and_later_ones_get_the_newest(run: Path, kind: str) -> None:
    states = states_of(3)
    write_chain(run, states[:1])
    with nothing_left():
        async with pool_of(run, states[0] if kind == "module" else None) as pool:
            async with pool.use("chat") as model:
                assert bits(model) == bits(states[0])
                del model
            async with pool.follow("chat", run, poll_seconds=0.01) as updates:
                for step in (1, 2):
                    extend(run, states, step)
                    async with anyio.create_task_group() as group:
                        async with pool.use("chat") as model:
                            assert bits(model) == bits(states[step - 1])
                            group.start_soon(updates.apply)
                            await anyio.sleep(0.05)
                            assert bits(model) == bits(states[step - 1])
                            del model
                    assert updates.version is not None
                    assert (updates.version.step, updates.version.kind) == (step, "delta")
                    async with pool.use("chat") as model:
                        assert bits(model) == bits(states[step])
                        del model
                assert await updates.wait(0) is None
            assert pool.stats().num_loads == 1


async def test_a_model_that_is_not_on_the_device_is_loaded_from_the_newest_at_its_next_use(run: Path) -> None:
    states = states_of(3)
    write_chain(run, states[:1])
    async with pool_of(run) as pool, pool.follow("chat", run, poll_seconds=0.01) as updates:
        extend(run, states, 1)
        version = await anext(updates)
        assert (version.step, version.kind) == (1, "full")
        assert pool.stats().num_loads == 0
        async with pool.use("chat") as model:
            assert bits(model) == bits(states[1])
        extend(run, states, 2)
        assert (await anext(updates)).kind == "delta"
        await pool.evict("chat")
        async with pool.use("chat") as model:
            assert bits(model) == bits(states[2])


async def test_an_update_to_another_checkpoint_in_between_is_known(run: Path, tmp_path: Path) -> None:
    states = states_of(3)
    write_chain(run, states[:1])
    write_checkpoint(tmp_path / "other", states[2], {"format": "pt", ID_KEY: id_of(99)})
    async with pool_of(run) as pool, pool.follow("chat", run, poll_seconds=0.01) as updates:
        async with pool.use("chat"):
            pass
        await pool.update("chat", tmp_path / "other")
        extend(run, states, 1)
        await anext(updates)
        async with pool.use("chat") as model:
            assert bits(model) == bits(states[1])


async def test_an_error_in_the_middle_evicts_and_the_next_use_is_whole(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    async with pool_of(run) as pool, pool.follow("chat", run, poll_seconds=0.01) as updates:
        async with pool.use("chat"):
            pass
        extend(run, states, 1)
        real = base.apply_to_host

        def failing(jobs: Any) -> None:
            real(jobs)
            raise StorageError("the power of the device failed")

        with monkeypatch.context() as patch:
            patch.setattr(base, "apply_to_host", failing)
            with pytest.raises(StorageError, match="failed$"):
                await updates.apply()
        async with pool.use("chat") as model:
            assert bits(model) == bits(states[0]), "the update has failed: the old checkpoint is loaded again"
        assert (await anext(updates)).kind == "delta"
        async with pool.use("chat") as model:
            assert bits(model) == bits(states[1])


async def test_a_damaged_delta_evicts_nothing_of_others_and_is_an_error(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    async with pool_of(run) as pool, pool.follow("chat", run, poll_seconds=0.01) as updates:
        async with pool.use("chat"):
            pass
        extend(run, states, 1)
        file = run / "step-1" / "model.safetensors"
        data = file.read_bytes()
        file.write_bytes(data[: len(data) - 300] + b"\xfe" * 300)
        with pytest.raises(FormatError):
            await updates.apply()
        shutil.move(run / "step-0", run / "away")  # what is on the device needs no file
        async with pool.use("chat") as model:
            assert bits(model) == bits(states[0])
        shutil.move(run / "away", run / "step-0")
        shutil.rmtree(run / "step-1")
        extend(run, states, 1)
        await anext(updates)
        async with pool.use("chat") as model:
            assert bits(model) == bits(states[1])


async def test_a_delta_may_be_larger_than_what_a_whole_update_holds(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(content, "_UPDATE_BYTES", 256)
    states = states_of(2)
    write_chain(run, states[:1])
    async with pool_of(run) as pool, pool.follow("chat", run, poll_seconds=0.01) as updates:
        async with pool.use("chat"):
            pass
        extend(run, states, 1)
        version = await updates.apply()
        assert version is not None and version.kind == "delta"
        async with pool.use("chat") as model:
            assert bits(model) == bits(states[1])


async def test_a_cancelled_apply_is_made_again(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    async with pool_of(run) as pool, pool.follow("chat", run, poll_seconds=0.01) as updates:
        extend(run, states, 1)
        async with pool.use("chat") as model:
            with anyio.move_on_after(0.05) as scope:
                await updates.apply()
            assert scope.cancelled_caught
            assert bits(model) == bits(states[0])
        assert (await anext(updates)).step == 1
        async with pool.use("chat") as model:
            assert bits(model) == bits(states[1])


async def test_wrong_calls(run: Path) -> None:
    write_chain(run, states_of(1))
    pool = pool_of(run)
    with pytest.raises(ValueError, match="no model 'other'"):
        pool.follow("other", run)
    with pytest.raises(ValueError, match="poll_seconds"):
        pool.follow("chat", run, poll_seconds=-1)
    with pytest.raises(ClosedError, match="the pool is not open"):
        async with pool.follow("chat", run):
            pytest.fail("the pool is not open")


def test_the_blocking_twin(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    with stio.sync.ModelPool(device="cpu", device_bytes="200MB") as pool:
        pool.add("chat", run / "step-0")
        with pool.use("chat"):
            pass
        with pool.follow("chat", run, poll_seconds=0.01) as updates:
            extend(run, states, 1)
            version = next(updates)
            assert (version.step, version.kind) == (1, "delta")
            with pool.use("chat") as model:
                assert bits(model) == bits(states[1])
                del model
