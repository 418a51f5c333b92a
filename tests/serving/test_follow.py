"""`stio.follow`: each version bit for bit, only what differs is read and written, deletions, replacements, cancels, errors."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from clocks import Clock
from deltas import State, id_of, next_state, write_chain, write_checkpoint, write_delta
from loops import on_all
from support import eventually, eventually_async, module_of, nothing_left

import stio
from stio.errors import (
    ChangedDuringReadError,
    CheckpointNotFoundError,
    ClosedError,
    FormatError,
    IntegrityError,
    MismatchError,
    StorageError,
)
from stio.format.delta import ID_KEY
from stio.loading.targets import base
from stio.runtime.operation import Operation, is_interrupted
from stio.serving import follower
from stio.storage.checkpoint import open_checkpoint

pytestmark = pytest.mark.anyio


def first_state(seed: int = 1) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)

    def noise(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        width = dtype.itemsize
        return torch.randint(0, 256, (*shape, width), generator=chance, dtype=torch.uint8).view(dtype).reshape(shape)

    return {
        "w": noise(400, 30, dtype=torch.bfloat16),  # all bit patterns, NaNs too
        "b.c": noise(301, dtype=torch.float32),
        "long": noise(2, 70_000, dtype=torch.float16),
        "bytes": noise(999, dtype=torch.int8),
        "wide": noise(50, dtype=torch.float64),
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


def states_of(number: int, fraction: float = 0.02, seed: int = 1) -> list[dict[str, torch.Tensor]]:
    chance = torch.Generator().manual_seed(seed)
    states = [first_state(seed)]
    for _ in range(number - 1):
        states.append(next_state(states[-1], fraction, chance))
    return states


def extend(run: Path, states: list[dict[str, torch.Tensor]], step: int) -> Path:
    """Write the next delta of a chain."""
    path = run / f"step-{step}"
    write_delta(path, states[step - 1], states[step], base=f"step-{step - 1}", step=step)
    return path


def memory_for(state: State) -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def bits(tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {
        name: one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() if one.numel() else b""
        for name, one in tensors.items()
    }


def follow(target: Any, run: Path, **options: Any) -> stio.Follower:
    return stio.follow(target, run, **{"poll_seconds": 0.01} | options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


@on_all
@pytest.mark.parametrize("kind", ["module", "dict"])
async def test_each_version_is_applied_bit_for_bit_and_in_place(run: Path, kind: str) -> None:
    states = states_of(5)
    write_chain(run, states[:2])
    memory: dict[str, Any] = memory_for(states[0])
    target: Any = memory
    if kind == "module":
        target = module_of(memory)
        memory = target.state_dict(keep_vars=True)
    addresses = {name: one.data_ptr() for name, one in memory.items()}
    with nothing_left():
        async with follow(target, run) as updates:
            assert updates.version is not None
            assert (updates.version.step, updates.version.kind) == (1, "full")
            assert bits(memory) == bits(states[1])
            for step in (2, 3, 4):
                path = extend(run, states, step)
                version = await anext(updates)
                assert version == updates.version
                assert (version.path, version.step, version.kind) == (str(path), step, "delta")
                assert bits(memory) == bits(states[step])
                assert 0 < version.changed_bytes < sum(one.nbytes for one in states[0].values()) / 10
                assert version.seconds > 0
            assert await updates.apply() is None
    assert {name: one.data_ptr() for name, one in memory.items()} == addresses


async def test_several_deltas_at_once_are_one_version(run: Path) -> None:
    states = states_of(7)
    write_chain(run, states[:3])
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        for step in range(3, 7):
            extend(run, states, step)
        version = await updates.apply()
        assert version is not None and (version.step, version.kind) == (6, "delta")
        assert bits(memory) == bits(states[6])


async def test_tensors_that_a_delta_holds_whole_are_copied_and_changed_again(run: Path) -> None:
    """They are whole in one delta, and elements of them in the next, which are applied together."""
    states = states_of(2)
    states[1]["b.c"] = torch.randn(301)
    states.append(next_state(states[1], 0.05, torch.Generator().manual_seed(5)))
    write_chain(run, states[:1])
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        extend(run, states, 1)
        extend(run, states, 2)
        version = await updates.apply()
        assert version is not None and version.kind == "delta"
        assert bits(memory) == bits(states[2])


async def test_only_what_is_behind_the_held_version_is_read(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(3)
    paths = write_chain(run, states[:2])
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        extend(run, states, 2)
        with open(paths[0] / "model.safetensors", "r+b") as file:  # its header stays
            file.seek(-1000, 2)
            file.write(bytes(1000))
        assert (await anext(updates)).kind == "delta"
        assert bits(memory) == bits(states[2])


async def test_a_full_save_and_another_run_are_loaded_whole(run: Path) -> None:
    states, others = states_of(2), states_of(2, seed=9)
    write_chain(run, states)
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        write_checkpoint(run / "step-2", others[0], {"format": "pt", ID_KEY: id_of(77)})
        version = await anext(updates)
        assert (version.step, version.kind) == (2, "full")
        assert version.changed_bytes == sum(one.nbytes for one in others[0].values())
        assert bits(memory) == bits(others[0])
        shutil.rmtree(run)
        write_checkpoint(run / "step-1", states[1], {"format": "pt"})  # of another library: it has no id
        version = await anext(updates)
        assert (version.step, version.kind) == (1, "full")
        assert bits(memory) == bits(states[1])
        assert await updates.wait(0.05) is None


async def test_a_base_that_was_replaced_leaves_its_deltas_out(run: Path) -> None:
    states, others = states_of(3), states_of(1, seed=9)
    write_chain(run, states[:2])
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        shutil.rmtree(run / "step-0")
        write_checkpoint(run / "step-0", others[0], {"format": "pt", ID_KEY: id_of(77)})
        assert await updates.wait(0.05) is None, "what is loaded is whole, and nothing is newer"
        extend(run, states, 2)
        version = await anext(updates)
        assert (version.step, version.kind) == (0, "full")
        assert bits(memory) == bits(others[0])


@pytest.mark.parametrize("name", ["run", "run.safetensors"])
async def test_a_checkpoint_that_is_replaced_in_its_place_is_followed(tmp_path: Path, name: str) -> None:
    states = states_of(3)
    path = tmp_path / name
    await stio.save(states[0], path)
    memory = memory_for(states[0])
    async with follow(memory, path) as updates:
        assert updates.version is not None
        assert (updates.version.path, updates.version.step) == (str(path), None)
        for state in states[1:]:
            await stio.save(state, path)
            version = await anext(updates)
            assert version.path == str(path)
            assert bits(memory) == bits(state)


async def test_what_is_written_beside_the_checkpoint_is_no_version(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states)
    async with follow(memory_for(states[0]), run) as updates:
        (run / "step-1" / "config.json").write_text("{}")
        assert await updates.wait(0.05) is None
        assert await updates.apply() is None


async def test_an_incomplete_step_is_no_version_until_it_is_complete(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states)
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        write_checkpoint(run / "elsewhere", states[0], {"format": "pt"})
        data = (run / "elsewhere" / "model.safetensors").read_bytes()
        (run / "step-7").mkdir()
        (run / "step-7" / "model.safetensors").write_bytes(data[: len(data) // 2])
        assert await updates.wait(0.05) is None
        (run / "step-7" / "model.safetensors").write_bytes(data)
        assert (await anext(updates)).step == 7
        assert bits(memory) == bits(states[0])


@on_all
async def test_entering_waits_for_a_run_that_does_not_exist_yet(run: Path) -> None:
    states = states_of(1)
    memory = memory_for(states[0])
    with nothing_left():
        with anyio.move_on_after(0.1) as scope:
            async with follow(memory, run):
                pytest.fail("there is nothing to load")
        assert scope.cancelled_caught

        def write() -> None:
            write_checkpoint(run.parent / "new" / "step-3", states[0], {"format": "pt"})
            (run.parent / "new").rename(run)

        timer = threading.Timer(0.05, write)
        timer.start()
        async with follow(memory, run) as updates:
            assert updates.version is not None and updates.version.step == 3
        timer.join()
    assert bits(memory) == bits(states[0])


async def test_a_timeout_is_of_the_time_of_the_program(run: Path, clock: Clock) -> None:
    states = states_of(1)
    write_chain(run, states)
    async with follow(memory_for(states[0]), run) as updates:
        results: list[str | None] = []

        async def wait() -> None:
            results.append(await updates.wait(timeout=1000.0))

        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.sleep(0.05)
            assert not results
            clock.advance(1001.0)
        assert results == [None]
        assert await updates.wait(timeout=0) is None


async def test_a_step_that_is_deleted_between_look_and_load_is_looked_for_again(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states = states_of(3)
    write_chain(run, states)
    memory = memory_for(states[0])
    opened: list[str] = []
    real = follower.open_with_options

    def deleting(operation: Operation[Any], path: str, *rest: Any, **how: Any) -> Any:
        opened.append(Path(path).name)
        if path.endswith("step-2"):
            shutil.rmtree(path)
        return real(operation, path, *rest, **how)

    monkeypatch.setattr(follower, "open_with_options", deleting)
    async with follow(memory, run) as updates:
        assert updates.version is not None and updates.version.step == 1
    assert opened == ["step-2", "step-1"]
    assert bits(memory) == bits(states[1])


async def test_a_step_that_cannot_be_loaded_is_tried_twice(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(1)
    write_chain(run, states)
    calls: list[str] = []

    def failing(operation: Operation[Any], path: str, *rest: Any, **how: Any) -> Any:
        calls.append(path)
        raise ChangedDuringReadError("it changes all the time", path=path)

    monkeypatch.setattr(follower, "open_with_options", failing)
    with pytest.raises(ChangedDuringReadError, match="all the time"):
        async with follow(memory_for(states[0]), run):
            pytest.fail("it was not loaded")
    assert len(calls) == 2


def damage(path: Path) -> None:
    with open(next(path.glob("*.safetensors")), "r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)
        file.seek(-1, 2)
        file.write(bytes([last[0] ^ 1]))


async def test_a_damaged_delta_changes_nothing_and_the_next_one_is_applied(run: Path) -> None:
    """Its manifest tells; no byte of the memory is written before."""
    states = states_of(3)
    async with stio.Saver(full_every=10, hash="sha256") as saver:
        await (await saver.save(states[0], run / "step-0"))
        memory = memory_for(states[0])
        async with follow(memory, run) as updates:
            await (await saver.save(states[1], run / "step-1"))
            damage(run / "step-1")
            with pytest.raises(IntegrityError, match="differs from the manifest") as caught:
                await updates.apply()
            assert "another version" not in str(caught.value)
            assert bits(memory) == bits(states[0])
            damage(run / "step-1")  # back to what it was
            version = await updates.apply()
            assert version is not None and version.kind == "delta"
            assert bits(memory) == bits(states[1])


@pytest.mark.parametrize("budget_bytes", [None, 100])
async def test_a_damaged_delta_is_no_part_of_a_whole_load(run: Path, budget_bytes: int | None) -> None:
    states = states_of(2)
    memory = memory_for(states[0])
    async with stio.Saver(full_every=10) as saver:
        await (await saver.save(states[0], run / "step-0"))
        if budget_bytes is None:
            await (await saver.save(states[1], run / "step-1"))
            damage(run / "step-1")
            with pytest.raises(IntegrityError):
                async with follow(memory, run):
                    pass
            return
        async with follow(memory, run, budget_bytes=budget_bytes) as updates:
            await (await saver.save(states[1], run / "step-1"))
            damage(run / "step-1")
            with pytest.raises(IntegrityError):
                await updates.apply()
            assert bits(memory) == bits(states[0])


async def test_wrong_positions_change_nothing(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        path = extend(run, states, 1)
        data = bytearray((path / "model.safetensors").read_bytes())
        joined = open_checkpoint(path)
        patch = joined.patches["w"][0]
        joined.close()
        _, begin, nbytes = patch.codes
        data[begin : begin + nbytes] = b"\xfe" * nbytes  # they lead past the end
        (path / "model.safetensors").write_bytes(data)
        with pytest.raises(FormatError, match="positions"):
            await updates.apply()
        assert bits(memory) == bits(states[0])


@pytest.mark.parametrize("fails", ["apply_to_host", "apply_by_torch"])
async def test_an_error_between_two_tensors_is_told_and_the_next_load_is_whole(
    run: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    memory = memory_for(states[0])
    memory["b.c"] = torch.zeros(602)[::2]  # copied by torch
    real = getattr(base, fails)

    def failing(*arguments: Any) -> None:
        real(*arguments)
        raise StorageError("the power of the device failed")

    async with follow(memory, run) as updates:
        extend(run, states, 1)
        with monkeypatch.context() as patch:
            patch.setattr(base, fails, failing)
            with pytest.raises(StorageError, match="failed; some tensors are of another version than others"):
                await updates.apply()
        shutil.rmtree(run / "step-1")
        assert await updates.wait(0) == str(run / "step-0"), "what is loaded is not whole"
        version = await updates.apply()
        assert version is not None and (version.step, version.kind) == (0, "full")
        assert bits(memory) == bits(states[0])
        with monkeypatch.context() as patch:
            patch.setattr(base, fails, failing)
            extend(run, states, 1)
            with pytest.raises(StorageError, match="some tensors"):
                await updates.apply()
        shutil.rmtree(run)
        with pytest.raises(CheckpointNotFoundError, match="no checkpoint any more; some tensors"):
            await updates.apply()


async def test_memory_that_was_freed_is_refused_before_anything_changes(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        extend(run, states, 1)
        storage = memory["b.c"].untyped_storage()
        storage.resize_(0)
        with pytest.raises(MismatchError, match="freed or shrunk"):
            await updates.apply()
        others = {name: one for name, one in memory.items() if name != "b.c"}
        assert bits(others) == bits({name: states[0][name] for name in others})


CASTS = {torch.bfloat16: torch.float32, torch.float32: torch.float16, torch.float16: torch.float32}


async def test_other_dtypes_and_layouts_get_what_load_into_gives_them(run: Path) -> None:
    states = states_of(4)
    write_chain(run, states[:1])

    def make() -> dict[str, torch.Tensor]:
        made = {name: torch.zeros(one.shape, dtype=CASTS.get(one.dtype, one.dtype)) for name, one in states[0].items()}
        made["long"] = torch.zeros(70_000, 2, dtype=torch.float16).t()
        made["wide"] = torch.zeros(100, dtype=torch.float64)[::2]
        return made

    memory, expected = make(), make()
    async with follow(memory, run) as updates:
        for step in (1, 2, 3):
            path = extend(run, states, step)
            assert (await anext(updates)).kind == "delta"
            async with follow(expected, path):
                pass
            assert bits(memory) == bits(expected)


async def test_elements_that_are_wider_than_a_word(run: Path) -> None:
    states = [{"c": torch.randn(64, dtype=torch.complex64)}]
    states.append({"c": states[0]["c"].clone()})
    states[1]["c"][5] += 1
    write_chain(run, states[:1])
    memory = {"c": torch.zeros(64, dtype=torch.complex128)}
    async with follow(memory, run) as updates:
        extend(run, states, 1)
        version = await updates.apply()
        assert version is not None and version.kind == "delta"
        assert torch.equal(memory["c"], states[1]["c"].to(torch.complex128))


async def test_tied_and_overlapping_tensors(run: Path) -> None:
    """Two names of one tensor are one place; memory that overlaps is loaded whole, in the order of load_state_dict."""
    states = states_of(2)
    write_chain(run, states[:1])
    tied, apart = module_of(memory_for(states[0])), module_of(memory_for(states[0]))
    tied.also = tied.w  # not in the checkpoint: it is filled with `w`
    flat = torch.zeros(301 + 100)
    apart.other = torch.nn.Parameter(flat[100:], requires_grad=False)
    async with follow(tied, run) as updates, follow(apart, run, strict=False) as others:
        extend(run, states, 1)
        assert (await anext(updates)).kind == "delta"
        assert (await anext(others)).kind == "delta"
    assert bits({"w": tied.also}) == bits({"w": states[1]["w"]})


async def test_a_module_with_hooks_is_loaded_whole(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    module = module_of(memory_for(states[0]))
    module.register_load_state_dict_pre_hook(lambda *_: None)
    async with follow(module, run) as updates:
        extend(run, states, 1)
        assert (await anext(updates)).kind == "full"
        assert bits(module.state_dict()) == bits(states[1])


async def test_deltas_above_the_budget_are_loaded_whole(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    memory = memory_for(states[0])
    async with follow(memory, run, budget_bytes=4096) as updates:
        extend(run, states, 1)
        assert (await anext(updates)).kind == "full"
        assert bits(memory) == bits(states[1])


async def test_the_versions_of_autograd_rise(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        before = memory["w"]._version
        extend(run, states, 1)
        await anext(updates)
        assert memory["w"]._version > before


@on_all
async def test_a_cancel_of_a_wait_leaves_it_usable(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    memory = memory_for(states[0])
    with nothing_left():
        async with follow(memory, run, poll_seconds=60) as updates:
            with anyio.move_on_after(0.02) as scope:
                await updates.wait()
            assert scope.cancelled_caught
            extend(run, states, 1)
            assert await updates.wait() == str(run / "step-1")
            assert (await anext(updates)).kind == "delta"
    assert bits(memory) == bits(states[1])


@on_all
@pytest.mark.parametrize("where", ["open", "read", "write"])
async def test_a_cancel_of_apply_leaves_the_old_or_the_new_version(
    run: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    memory = memory_for(states[0])
    reached, go_on = threading.Event(), threading.Event()

    def held(real: Callable[..., Any]) -> Callable[..., Any]:
        def stand_in(*arguments: Any, **keywords: Any) -> Any:
            reached.set()
            assert eventually(lambda: is_interrupted() or go_on.is_set())
            return real(*arguments, **keywords)

        return stand_in

    async with follow(memory, run) as updates:
        extend(run, states, 1)
        module, name = {
            "open": (follower, "open_with_options"),
            "read": (base, "read_update"),
            "write": (base, "apply_to_host"),
        }[where]
        monkeypatch.setattr(module, name, held(getattr(module, name)))
        async with anyio.create_task_group() as group:
            group.start_soon(updates.apply)
            assert await eventually_async(reached.is_set)
            if where == "write":  # there a cancel has no effect
                timer = threading.Timer(0.05, go_on.set)
                timer.start()
            group.cancel_scope.cancel()
        monkeypatch.undo()
        expected = states[1] if where == "write" else states[0]
        assert bits(memory) == bits(expected)
        version = await updates.apply()
        assert version is not None and (version.step, version.kind) == (1, "delta")
        assert bits(memory) == bits(states[1])


async def test_a_cancel_of_a_whole_load_is_made_good(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states, others = states_of(1), states_of(1, seed=9)
    write_chain(run, states)
    memory = memory_for(states[0])
    async with follow(memory, run) as updates:
        write_checkpoint(run / "step-1", others[0], {"format": "pt", ID_KEY: id_of(77)})
        reached = threading.Event()
        real = base.LoadTarget.copy

        def slow(target: Any, group: Any) -> None:
            real(target, group)
            reached.set()

        monkeypatch.setattr(base.LoadTarget, "copy", slow)
        async with anyio.create_task_group() as group:
            group.start_soon(updates.apply)
            assert await eventually_async(reached.is_set)
            group.cancel_scope.cancel()
        monkeypatch.undo()
        version = await updates.apply()
        if version is not None:  # else the cancel came too late
            assert version.kind == "full"
        assert bits(memory) == bits(others[0])


@on_all
async def test_leaving_the_block_ends_what_waits(run: Path) -> None:
    states = states_of(1)
    write_chain(run, states)
    with nothing_left():
        ended: list[type[BaseException]] = []
        updates = follow(memory_for(states[0]), run, poll_seconds=60)

        async def wait() -> None:
            try:
                await updates.wait()
            except ClosedError as error:
                ended.append(type(error))

        async with anyio.create_task_group() as group:
            async with updates:
                group.start_soon(wait)
                await anyio.sleep(0.02)
        assert ended == [ClosedError]
        for call in (updates.wait, updates.apply, updates.__anext__):
            with pytest.raises(ClosedError, match="not open"):
                await call()
        with pytest.raises(RuntimeError, match="entered once"):
            await updates.__aenter__()


async def test_two_applies_at_once_are_refused(run: Path) -> None:
    states = states_of(2)
    write_chain(run, states[:1])
    async with follow(memory_for(states[0]), run) as updates:
        extend(run, states, 1)
        refused: list[str] = []

        async def apply() -> None:
            try:
                await updates.apply()
            except RuntimeError as error:
                refused.append(str(error))

        async with anyio.create_task_group() as group:
            group.start_soon(apply)
            group.start_soon(apply)
        assert refused == ["another call of apply() has not ended"]


async def test_a_poll_that_finds_nothing_opens_no_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = states_of(2)
    write_chain(run, states)
    async with follow(memory_for(states[0]), run) as updates:

        def opening(*_: Any) -> Any:
            raise AssertionError("a file is opened")

        monkeypatch.setattr(follower, "open_checkpoint", opening)
        monkeypatch.setattr(follower, "newest_in", opening)
        assert await updates.wait(0.05) is None


async def test_wrong_arguments(run: Path) -> None:
    tensor = torch.zeros(1)
    for keywords, kind in (
        ({"poll_seconds": 0}, ValueError),
        ({"poll_seconds": "1"}, TypeError),
        ({"poll_seconds": float("inf")}, ValueError),
        ({"budget_bytes": -1}, ValueError),
        ({"strict": 1}, TypeError),
    ):
        with pytest.raises(kind, match=next(iter(keywords))):
            stio.follow({"w": tensor}, run, **keywords)  # type: ignore[arg-type]
    for target in (tensor, {"w": 1}, torch.nn.Linear, None):
        with pytest.raises(TypeError, match="a module or a dictionary of tensors"):
            stio.follow(target, run)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="URL"):
        stio.follow({"w": tensor}, "s3://bucket/run")
    with pytest.raises(TypeError, match=r"stio\.sync\.follow"), stio.follow({"w": tensor}, run):  # type: ignore[attr-defined]
        pass


def test_the_blocking_twin(run: Path) -> None:
    states = states_of(4)
    write_chain(run, states[:1])
    memory = memory_for(states[0])
    with nothing_left():
        with stio.sync.follow(memory, run, poll_seconds=0.01) as updates:
            assert updates.wait(timeout=0.02) is None and updates.apply() is None
            seen = []
            extend(run, states, 1)
            for version in updates:
                seen.append(version)
                assert version == updates.version and bits(memory) == bits(states[len(seen)])
                if len(seen) == 3:
                    break
                extend(run, states, len(seen) + 1)
    assert [(one.step, one.kind) for one in seen] == [(1, "delta"), (2, "delta"), (3, "delta")]
