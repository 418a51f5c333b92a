"""P8: memory stays within the budget, and nothing grows over hundreds of loads, cancels and breaks."""

from __future__ import annotations

import asyncio
import gc
import json
import os

import anyio
import pytest
import torch
from counts import count
from fakes import FakeDevice
from loops import others_are_slow
from support import (
    bits_of,
    descriptors,
    eventually,
    module_of,
    nothing_left,
    num_threads,
    ramp,
    save_file,
    save_sharded,
    spin,
)

import stio
from stio import sync
from stio.loading import scheduler as load_module
from stio.runtime import memory as memory_module

pytestmark = pytest.mark.anyio

MIB = 1 << 20


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.fixture(scope="module")
def tensors():
    small = {f"small.{k:02}": ramp(64, 64, start=k) for k in range(64)}
    return small | {f"large.{k:02}": ramp(128, 700 + k, start=k) for k in range(50)}


@pytest.fixture(scope="module")
def file(tmp_path_factory, tensors):
    """A file of about 20 MiB, beside budgets of 1 MiB."""
    file = save_file(tensors, tmp_path_factory.mktemp("model") / "model.safetensors")
    assert 18 * MIB < file.stat().st_size < 22 * MIB
    return file


@pytest.fixture
def runs(monkeypatch):
    made = []
    original = load_module.LoadScheduler.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(load_module.LoadScheduler, "__init__", init)
    return made


@pytest.fixture
def images(monkeypatch):
    """Bytes of memory that stio allocated and that are still held, and their peak."""
    import weakref

    held = {"now": 0, "peak": 0}
    original = memory_module.allocate

    def allocate(nbytes):
        region = original(nbytes)
        held["now"] += nbytes
        held["peak"] = max(held["peak"], held["now"])
        weakref.finalize(region.owner, lambda: held.update(now=held["now"] - nbytes))
        return region

    monkeypatch.setattr(memory_module, "allocate", allocate)
    return held


@pytest.mark.matrix
async def test_p8_stream_of_copies(file, tensors, runs, images):
    before = resident_bytes()
    peak = 0
    with nothing_left():
        async with stio.open(file, memory="copy", budget_bytes=MIB) as checkpoint:
            count = 0
            async for name, tensor in checkpoint.stream():
                assert bits_of(tensor) == bits_of(tensors[name])
                peak = max(peak, resident_bytes())
                count += 1
                await anyio.lowlevel.checkpoint()
                del tensor
    assert count == len(tensors)
    assert runs[0].budget.peak_bytes <= MIB
    assert images["peak"] <= MIB + 64 * 1024  # images are whole pages
    assert peak - before < 8 * MIB


@pytest.mark.matrix
async def test_p8_stream_to_a_device(file, tensors):
    device = FakeDevice()
    with nothing_left():
        async with stio.open(file, device=device, budget_bytes=MIB) as checkpoint:
            count = 0
            async for name, tensor in checkpoint.stream():
                assert bits_of(tensor) == bits_of(tensors[name])
                count += 1
                del tensor
    gc.collect()
    assert count == len(tensors)
    assert device.peak_bytes + device.peak_staging_bytes <= MIB
    assert eventually(lambda: (device.used_bytes, device.staging_bytes, device.num_pending) == (0, 0, 0))


@pytest.mark.matrix
@pytest.mark.parametrize("device", [None, FakeDevice], ids=["copy", "device"])
async def test_p8_abandoned_streams(file, device):
    """Streams that are dropped halfway give back what they held."""
    made = device() if device else "cpu"
    with nothing_left():
        async with stio.open(file, memory="copy", device=made, budget_bytes=MIB) as checkpoint:
            for _ in range(10):
                stream = checkpoint.stream()
                await anext(stream)
                await anext(stream)
                del stream
            stream = checkpoint.stream()
            await anext(stream)
    del stream
    gc.collect()
    if device:
        assert eventually(lambda: (made.used_bytes, made.staging_bytes, made.num_pending) == (0, 0, 0))


@pytest.mark.matrix
@pytest.mark.parametrize("budget", [1, 4096, 100_000])
@pytest.mark.parametrize("device", ["cpu", FakeDevice], ids=["copy", "device"])
async def test_budgets_that_are_smaller_than_a_tensor(file, tensors, budget, device):
    names = [name for name in tensors if name.endswith("3")]
    made = device if device == "cpu" else device(delay_seconds=0.0001)  # there are hundreds of copies
    found = await stio.load(file, names=names, memory="copy", device=made, budget_bytes=budget)
    assert {name: bits_of(tensor) for name, tensor in found.items()} == {name: bits_of(tensors[name]) for name in names}
    async with stio.open(file, memory="copy", device=made, budget_bytes=budget) as checkpoint:
        assert {name async for name, _ in checkpoint.stream(names)} == set(names)


async def test_a_load_into_needs_no_second_copy_of_the_model(file, tensors, images):
    module = module_of({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
    await stio.load_into(module, file, memory="copy", budget_bytes=MIB)
    assert images["peak"] <= 2 * MIB
    assert bits_of(module.get_buffer("large.07")) == bits_of(tensors["large.07"])


# Nothing grows.


@pytest.mark.slow
@others_are_slow
async def test_many_cycles(tmp_path):
    num_cycles = count(60, 300)
    gc.collect()
    mapped = mapped_bytes()  # what other tests still hold is not ours
    directory = save_sharded({f"t{k}": ramp(40, 100 + k) for k in range(30)}, tmp_path, 3)

    async def cycle(k):
        memory = ["copy", "map"][k % 2]
        await stio.load(directory, memory=memory)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: stio.load(directory, memory=memory, budget_bytes=40_000))
            await spin(k % 40)
            group.cancel_scope.cancel()
        async with stio.open(directory, memory=memory, budget_bytes=40_000) as checkpoint:
            async for _ in checkpoint.stream():
                if k % 3:
                    break
        if k % 10 == 0:
            with pytest.raises(stio.StioError):
                await stio.load(directory, names="absent")

    for k in range(count(30, 60)):
        await cycle(k)
    gc.collect()
    files, threads = descriptors(), num_threads()
    before = resident_bytes()
    for k in range(num_cycles):
        await cycle(k)
    gc.collect()
    assert descriptors() == files
    assert eventually(lambda: num_threads() <= threads), "threads are left"
    assert resident_bytes() - before < 8 * MIB
    assert eventually(lambda: mapped_bytes() <= mapped), "memory is still mapped"


def test_nothing_is_left_for_the_collector(tmp_path):
    """A load, a stream and an error leave no cycle that holds memory: counting alone frees it."""
    file = save_file({f"t{k}": ramp(100, 100) for k in range(4)}, tmp_path / "x.safetensors")

    async def main():
        await stio.load(file)
        async with stio.open(file) as checkpoint:
            async for _ in checkpoint.stream():
                break

    asyncio.run(main())
    sync.load(file)
    gc.collect()
    gc.disable()
    try:
        for memory in ["map", "copy"]:
            before = mapped_bytes()
            tensors = sync.load(file, memory=memory)
            assert mapped_bytes() > before
            del tensors
            assert eventually(lambda before=before: mapped_bytes() == before)
            with sync.open(file, memory=memory) as checkpoint:
                for _name, _tensor in checkpoint.stream():
                    break
                del _tensor, _name
            assert eventually(lambda before=before: mapped_bytes() == before)
    finally:
        gc.enable()


def mapped_bytes() -> int:
    """Return the bytes of checkpoints that are mapped, and one for each piece of anonymous memory of stio's."""
    with open("/proc/self/maps") as file:
        ranges = [line.split()[0].split("-") for line in file if line.rstrip().endswith(".safetensors")]
    pieces = sum(mapping() is not None for mapping in list(memory_module._mappings.values()))
    return sum(int(stop, 16) - int(start, 16) for start, stop in ranges) + pieces


@pytest.mark.matrix
async def test_json_of_many_names_costs_no_copy_each(tmp_path):
    """A checkpoint of many tensors is opened once; reading one of them does not list all."""
    header, at = {}, 0
    for k in range(20_000):
        header[f"t{k}"] = {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
        at += 1
    text = json.dumps(header).encode()
    file = tmp_path / "x.safetensors"
    file.write_bytes(len(text).to_bytes(8, "little") + text + bytes(k % 251 for k in range(at)))
    async with stio.open(file) as checkpoint:
        for k in range(0, 20_000, 999):
            assert (await checkpoint.read(f"t{k}")).tolist() == [k % 251]
