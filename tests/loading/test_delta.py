"""Loads of deltas: each reader returns what was saved, bit for bit, out of a chain of a full checkpoint and deltas."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import gpu
from bit_paths import integers, read_files, require_same_bits, sliced
from counts import count
from deltas import TORCH_DTYPES, State, next_state, write_chain
from fakes import FakeDevice
from support import module_of, nothing_left

from stio import native, sync
from stio.device.base import resolve_device
from stio.errors import ChangedDuringReadError, ClosedError, FormatError
from stio.format import ALIASES_KEY
from stio.format.state import STATE_KEY
from stio.loading import Delivery, LoadOptions, fill_from, patching, read_paths, scheduled, select_tensors
from stio.loading.planned import plan_load
from stio.loading.targets import StateTarget
from stio.runtime import Operation, memory, run_blocking
from stio.storage.checkpoint import OpenOptions, apply_changes, open_checkpoint

DTYPES = [dtype for name, dtype in TORCH_DTYPES.items() if name != "F4"]
SHAPES = [(), (0,), (3, 0), (1,), (7,), (300,), (33, 17), (6, 5, 9), (130, 3)]
FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def random_state(chance: random.Random, num: int = 4) -> dict[str, torch.Tensor]:
    """Return tensors of random dtypes, shapes and bits, one of them a matrix of floats."""
    kinds = [(chance.choice(DTYPES), chance.choice(SHAPES)) for _ in range(num)]
    kinds.append((chance.choice(FLOATS), (40, 12)))
    found = {}
    for k, (dtype, shape) in enumerate(kinds):
        whole = torch.Size(shape).numel() * dtype.itemsize
        bits = torch.frombuffer(bytearray(chance.randbytes(whole) or b"0"), dtype=torch.uint8)[:whole]
        found[f"layer.t{k}"] = bits.view(dtype).reshape(shape) if whole else torch.empty(shape, dtype=dtype)
    return found


def random_chain(chance: random.Random) -> list[dict[str, torch.Tensor]]:
    """Return the states of a chain; between some of them tensors change as a whole, or nothing."""
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    states = [random_state(chance)]
    for _ in range(chance.randint(1, 4)):
        after = next_state(states[-1], chance.choice([0.003, 0.02, 0.2, 0.9]), generator)
        for name in chance.sample(sorted(after), chance.randint(0, 2)):
            after[name] = states[-1][name]
        states.append(after)
    return states


# Readers: each is given a path, what was saved, a device and a source of chance, and compares what it loads.

Reader = Callable[[Path, State, Any, random.Random], None]


def by_load(path: Path, saved: State, device: Any, chance: random.Random, **keywords: Any) -> None:
    require_same_bits(sync.load(path, device=device, **keywords), saved)


def by_names(path: Path, saved: State, device: Any, chance: random.Random) -> None:
    names = chance.sample(sorted(saved), 2)
    require_same_bits(sync.load(path, names=names, device=device), {name: saved[name] for name in names})


def by_stream(path: Path, saved: State, device: Any, chance: random.Random) -> None:
    with sync.open(path, device=device, budget_bytes=20_000) as opened, opened.stream() as stream:
        require_same_bits(dict(stream), saved)


def by_read(path: Path, saved: State, device: Any, chance: random.Random) -> None:
    with sync.open(path, device=device) as opened:
        require_same_bits({name: opened.read(name) for name in opened}, saved)


def random_index(chance: random.Random, shape: tuple[int, ...]) -> Any:
    """Return an index of a tensor: a number, a slice, or a list of slices, for some of its dimensions."""

    def of(size: int) -> Any:
        begin, stop = sorted((chance.randint(0, size), chance.randint(0, size)))
        kinds: list[Any] = [slice(begin, stop), slice(begin, stop, 3), slice(None, None, -2), slice(-5, None)]
        if size > 6:
            kinds += [chance.randrange(size), -1, [slice(0, 2), slice(4, size)]]
        return chance.choice(kinds)

    dims = chance.randint(1, len(shape))
    index = tuple(slice(None) if chance.random() < 0.3 else of(size) for size in shape[:dims])
    return index if sum(isinstance(one, list) for one in index) < 2 else index[0]


def by_slices(path: Path, saved: State, device: Any, chance: random.Random) -> None:
    slices = {name: random_index(chance, one.shape) for name, one in saved.items() if one.dim()}
    found = sync.load(path, slices=slices, device=device)
    expected = {
        name: sliced(integers(one), slices[name]).view(one.dtype) if name in slices else one
        for name, one in saved.items()
    }
    require_same_bits(found, expected)


def by_cast(path: Path, saved: State, device: Any, chance: random.Random) -> None:
    name = max(saved)
    (found,) = sync.load(path, names=name, dtype={name: torch.float64}, device=device).values()
    require_same_bits({name: found}, {name: saved[name].double()})


def by_module(path: Path, saved: State, device: Any, chance: random.Random, **keywords: Any) -> None:
    zeros = {name: torch.zeros_like(integers(one)).view(one.dtype) for name, one in saved.items()}
    module = module_of(
        {name: one.to("cpu" if isinstance(device, FakeDevice) else device) for name, one in zeros.items()}
    )
    sync.load_into(module, path, **keywords)
    require_same_bits(module.state_dict(), saved)


READERS: dict[str, Reader] = {
    "load": by_load,
    "load, copy": partial(by_load, memory="copy"),
    "load, map": partial(by_load, memory="map"),
    "load, lazy": partial(by_load, memory="lazy"),
    "load, a budget of 1 MB": partial(by_load, budget_bytes=1_000_000),
    "load, a small budget": partial(by_load, budget_bytes=9_000),
    "names": by_names,
    "stream": by_stream,
    "read": by_read,
    "slices": by_slices,
    "slices again": by_slices,
    "cast": by_cast,
    "module": by_module,
    "module, a small budget": partial(by_module, budget_bytes=9_000),
}
ON_CPU_ONLY = ("load, map", "load, lazy")


def load_chains(folder: Path, device: Any, number: int, seed: int) -> None:
    """Write random chains, and load each step of them by one reader after the other."""
    readers = [(name, read) for name, read in READERS.items() if device == "cpu" or name not in ON_CPU_ONLY]
    turn = seed
    for k in range(number):
        chance = random.Random(f"{seed}.{k}")
        states = random_chain(chance)
        for path, saved in zip(write_chain(folder / f"chain-{k}", states), states, strict=True):
            turn += 1
            name, read = readers[turn % len(readers)]
            try:
                read(path, saved, device() if callable(device) else device, chance)
            except BaseException as error:
                error.add_note(f"chain {seed}.{k}, {path.name}, by {name}")
                raise


@pytest.mark.parametrize("seed", range(count(4, 20)))
def test_each_step_of_a_chain_is_what_was_saved(fast_path: Path, seed: int) -> None:
    load_chains(fast_path, "cpu", count(60, 500), seed)


def test_without_the_engine(fast_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_library", lambda: None)
    load_chains(fast_path, "cpu", count(40, 1000), 100)


def test_on_a_device_of_ones_own(fast_path: Path) -> None:
    load_chains(fast_path, partial(FakeDevice, delay_seconds=0), count(30, 1000), 200)


@gpu
def test_on_a_device(fast_path: Path) -> None:
    load_chains(fast_path, str(resolve_device("auto")), count(40, 1000), 300)


@pytest.fixture
def long_chain(fast_path: Path) -> tuple[list[Path], list[dict[str, torch.Tensor]]]:
    """Return a chain whose patches are longer than the scratch memory of a small budget."""
    generator = torch.Generator().manual_seed(1)
    states = [{f"t{k}": torch.rand(200_000, generator=generator).to(torch.bfloat16) for k in range(3)}]
    for _ in range(4):
        states.append(next_state(states[-1], 0.3, generator))
    return write_chain(fast_path / "chain", states), states


Chain = tuple[list[Path], list[dict[str, torch.Tensor]]]


@pytest.mark.parametrize(("budget_bytes", "max_bytes"), [(1_000_000, 250_000), (9_000, 200_000 * 2)])
@pytest.mark.parametrize("device", ["cpu", FakeDevice(delay_seconds=0)], ids=["cpu", "device"])
def test_patches_have_a_part_of_the_budget(
    long_chain: Chain, device: Any, budget_bytes: int, max_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a budget below the longest patch of a tensor, one of them is in memory, which is shorter than the tensor."""
    paths, states = long_chain
    held: list[int] = []
    apply = patching.PatchingExecutor._apply

    def counted(executor: Any, group: Any, tensors: Any, scratch: Any) -> None:
        held.append(scratch.nbytes * executor._patches.num_threads)
        apply(executor, group, tensors, scratch)

    monkeypatch.setattr(patching.PatchingExecutor, "_apply", counted)
    with sync.open(paths[-1], device=device, budget_bytes=budget_bytes) as opened, opened.stream() as stream:
        require_same_bits(dict(stream), states[-1])
    assert held and max(held) <= max_bytes < os.path.getsize(paths[-1] / "model.safetensors")


def test_a_part_of_the_positions_may_have_no_element(fast_path: Path) -> None:
    """A long gap before the last element, with small budgets too."""
    before = {"w": torch.zeros(3_000_000, dtype=torch.uint8)}
    after = {"w": before["w"].clone()}
    after["w"][:20_000] = 1
    after["w"][-1] = 2
    path = write_chain(fast_path / "gap", [before, after])[-1]
    for budget_bytes in (None, 64 << 10):
        require_same_bits(sync.load(path, budget_bytes=budget_bytes), after)


def rewrite(path: Path, change: Callable[[bytearray, Mapping[str, Any], int], None]) -> None:
    """Change bytes of the file of a delta; the function gets them, the header, and where the data begins."""
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    end = 8 + int.from_bytes(data[:8], "little")
    change(data, json.loads(data[8:end]), end)
    file.write_bytes(data)


def _past_the_end(data: bytearray, begin: int, end: int) -> None:
    data[begin:end] = b"\xfe" * (end - begin)


def _too_few(data: bytearray, begin: int, end: int) -> None:
    data[begin] = 0xFF


def _no_element_at_the_end(data: bytearray, begin: int, end: int) -> None:
    data[end - 1] = 0xFF


@pytest.mark.parametrize("change", [_past_the_end, _too_few, _no_element_at_the_end])
@pytest.mark.parametrize("budget_bytes", [None, 50_000])
@pytest.mark.parametrize("device", ["cpu", FakeDevice(delay_seconds=0)], ids=["cpu", "device"])
def test_hostile_positions_are_an_error_that_names_the_delta(
    long_chain: Chain, change: Callable[[bytearray, int, int], None], budget_bytes: int | None, device: Any
) -> None:
    paths, states = long_chain

    def spoil(data: bytearray, header: Mapping[str, Any], start: int) -> None:
        begin, end = header["/stio.delta/1/positions"]["data_offsets"]
        change(data, start + begin, start + end)

    rewrite(paths[2], spoil)
    delivered: list[str] = []
    with nothing_left():
        with pytest.raises(FormatError) as found, ExitStack() as stack:
            opened = stack.enter_context(sync.open(paths[-1], device=device, budget_bytes=budget_bytes))
            for name, _ in stack.enter_context(opened.stream()):
                delivered.append(name)
        assert found.value.path == str(paths[2] / "model.safetensors")
        assert "t1" not in delivered
        require_same_bits(sync.load(paths[1]), states[1])


@pytest.mark.parametrize("link", [0, 2, 4])
@pytest.mark.parametrize("replaces", [False, True])
def test_a_link_that_is_changed_during_the_load(
    long_chain: Chain, link: int, replaces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = long_chain
    file = paths[link] / "model.safetensors"

    def apply(*arguments: Any) -> None:
        if replaces:
            (file.parent / "new").write_bytes(file.read_bytes())
            os.replace(file.parent / "new", file)
        else:
            os.utime(file, (1, 1))
        apply_changes(*arguments)

    monkeypatch.setattr(read_paths, "apply_changes", apply)
    if replaces:
        before = os.stat(file).st_ino
        sync.load(paths[-1])  # the open file is the old one, and unchanged
        assert os.stat(file).st_ino != before
    else:
        with pytest.raises(ChangedDuringReadError) as found:
            sync.load(paths[-1])
        assert found.value.path == str(file)


@pytest.mark.parametrize("device", ["cpu", FakeDevice(delay_seconds=0)], ids=["cpu", "device"])
@pytest.mark.parametrize("budget_bytes", [None, 50_000])
def test_a_cancel_ends_a_load_between_two_patches(
    long_chain: Chain, device: Any, budget_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths, _ = long_chain
    delivered: list[object] = []
    calls: list[int] = []

    with nothing_left(), ExitStack() as stack:
        opened = open_checkpoint(paths[-1], OpenOptions())
        stack.callback(opened.close)
        options = LoadOptions(device=device, budget_bytes=budget_bytes)
        delivery = Delivery(deliver=lambda group, loaded: delivered.append(loaded))
        scheduler = scheduled(select_tensors(opened, None, options), delivery)

        def apply(*arguments: Any) -> None:
            calls.append(1)
            scheduler.stop()
            apply_changes(*arguments)

        monkeypatch.setattr(read_paths, "apply_changes", apply)
        with pytest.raises(ClosedError):  # what a result says that was cancelled
            Operation(scheduler.run_for, name="load", kind="load").result()
        assert not delivered
        # Each thread ends with the call that it is in; on a device a call comes before the copy too.
        assert 1 <= len(calls) <= 2 * memory.num_processors()


def test_a_system_without_threads(long_chain: Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    paths, states = long_chain
    monkeypatch.setattr(patching.WorkerPool, "start", lambda self, work, num: 0)
    require_same_bits(sync.load(paths[-1]), states[-1])


def test_tied_names(fast_path: Path) -> None:
    states = random_chain(random.Random(5))
    name = max(states[0])
    path = write_chain(fast_path / "chain", states, {ALIASES_KEY: json.dumps({"tied": name})})[-1]
    found = sync.load(path)
    assert found["tied"] is found[name]
    require_same_bits({name: sync.load(path, names="tied")["tied"]}, {name: states[-1][name]})


def test_devices_by_name(fast_path: Path) -> None:
    states = random_chain(random.Random(6))
    path = write_chain(fast_path / "chain", states)[-1]
    devices = [FakeDevice(delay_seconds=0), FakeDevice(delay_seconds=0)]
    where = {name: devices[k % 2] for k, name in enumerate(states[-1])} | {min(states[-1]): "cpu"}
    require_same_bits(sync.load(path, device=lambda name: where[name]), states[-1])


def test_nested_state_and_its_host_values(fast_path: Path) -> None:
    """An array of numpy and the tensors of a nested state have patches."""
    np = pytest.importorskip("numpy")
    state = {"weights": [torch.rand(500), torch.rand(20, 3)], "array": np.arange(400.0), "step": 3}
    sync.save_state(state, fast_path / "state")
    with sync.open(fast_path / "state") as opened:
        tree = opened.metadata[STATE_KEY]
    saved = read_files(fast_path / "state")
    states = [next_state(saved, 0.05, torch.Generator().manual_seed(1)), saved]
    path = write_chain(fast_path / "chain", states, {STATE_KEY: tree})[-1]
    found = sync.load_state(path)
    assert found["step"] == 3
    assert found["array"].tobytes() == state["array"].tobytes()
    require_same_bits(dict(enumerate(found["weights"])), dict(enumerate(state["weights"])))
    mine = {"weights": [torch.zeros(500), torch.zeros(20, 3)], "array": np.zeros(400), "step": 0}
    run_blocking(fill_from(path, StateTarget(mine), LoadOptions()))
    assert mine["array"].tobytes() == state["array"].tobytes()
    require_same_bits(dict(enumerate(mine["weights"])), dict(enumerate(state["weights"])))


def paths_of(path: Path, names: list[str], memory: str) -> set[str]:
    """Return the classes of the read paths of a load."""
    with ExitStack() as stack:
        opened = open_checkpoint(path, OpenOptions())
        stack.callback(opened.close)
        selected = select_tensors(opened, names, LoadOptions(memory=memory))
        planned = plan_load(selected, read_paths.AS_READ)
        stack.callback(planned.owned.close)
        stack.callback(planned.executor.close)
        return {type(one).__name__ for one in planned.paths}


@pytest.mark.parametrize("memory", ["map", "lazy"])
def test_only_files_without_patched_tensors_are_mapped(fast_path: Path, memory: str) -> None:
    before = {"kept": torch.rand(1000), "patched": torch.rand(1000), "replaced": torch.rand(1000)}
    after = before | {"patched": before["patched"].clone(), "replaced": torch.rand(1000)}
    after["patched"][7] = 0
    path = write_chain(fast_path / "chain", [before, after])[-1]
    assert paths_of(path, ["kept", "replaced"], memory) == {"MappedPath"}
    assert paths_of(path, ["patched"], memory) == {"CopiedPath"}
    require_same_bits(sync.load(path, memory=memory), after)
