"""A device has its memory back however a load ends; what is freed is what the next load takes."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
import torch
from accelerators import PLACES, Place, gpu, module_of
from fakes import FakeDevice, FaultyRoot, write_checkpoint
from support import eventually, quick_switches, require_equal, spin

import stio
import stio.sync
from stio.device.base import LoadedGroup, resolve_device
from stio.errors import DeviceMemoryError, StorageError, TruncatedError
from stio.loading.api import Stream
from stio.storage.local import LocalRoot

Tensors = dict[str, torch.Tensor]
MIB = 1 << 20

on_places = pytest.mark.parametrize("place", PLACES, indirect=True)


@pytest.mark.matrix
@on_places
@pytest.mark.parametrize("budget_bytes", [4 * MIB, 512 * MIB])
def test_after_a_load(place: Place, checkpoint: Path, tensors: Tensors, budget_bytes: int) -> None:
    for _ in range(3):
        found = stio.sync.load(checkpoint, device=place.device, budget_bytes=budget_bytes)
        assert place.used_bytes() >= sum(tensor.nbytes for tensor in tensors.values())
        require_equal(found, tensors)
        del found
        place.require_freed()


@on_places
@pytest.mark.parametrize("taken", [0, 1, 5, 40])
def test_after_a_stream_that_was_left(place: Place, checkpoint: Path, taken: int) -> None:
    with stio.sync.open(checkpoint, device=place.device, budget_bytes=8 * MIB) as opened:
        with opened.stream() as stream:
            for _ in range(taken):
                next(stream)
    del stream
    place.require_freed()


@gpu
@pytest.mark.parametrize("end", ["next group", "end of the stream", "close", "no reference"])
def test_a_stream_frees_dropped_tensors_with_its_next_group(tmp_path: Path, end: str) -> None:
    """Not at the end of a tensor, which releases the GIL while it frees memory of a device: 5 ms beside a busy thread."""
    num_groups, group_bytes = 1 if end == "end of the stream" else 2, MIB
    tensors = {f"{k}.{name}": torch.ones(MIB // 2, dtype=torch.uint8) for k in range(num_groups) for name in "ab"}
    write_checkpoint(tmp_path, tensors, num_groups)
    place = Place("real")
    before = place.used_bytes()
    with stio.sync.open(tmp_path, device=place.device) as opened:
        stream = opened.stream()
        for _ in "ab":
            next(stream)
        assert eventually(lambda: place.used_bytes() - before == num_groups * group_bytes)
        if end == "next group":
            next(stream)
            assert place.used_bytes() - before == group_bytes
        elif end == "end of the stream":
            assert next(stream, None) is None
            place.require_freed()
        elif end == "close":
            stream.close()
            place.require_freed()
        del stream
    place.require_freed()


@gpu
@pytest.mark.anyio
async def test_consumers_of_one_stream_hold_one_group_together() -> None:
    """The budget of each taken group is free as soon as another consumer waits."""
    place = Place("real")
    groups = [
        LoadedGroup({name: torch.empty(MIB, dtype=torch.uint8, device=place.torch_device)}) for name in ("a", "b", "c")
    ]
    before, waiting = place.used_bytes(), anyio.Event()

    class Queue:
        operation = SimpleNamespace(start=lambda: None, cancel=lambda: None)

        async def next(self) -> LoadedGroup:
            await waiting.wait()
            return groups.pop()

    stream = Stream(Queue())  # type: ignore[arg-type]
    names = []

    async def consume() -> None:
        names.append((await anext(stream))[0])

    async with anyio.create_task_group() as group:
        for _ in "abc":
            group.start_soon(consume)
        await anyio.sleep(0.01)
        waiting.set()
    assert sorted(names) == ["a", "b", "c"]
    assert place.used_bytes() == before - 2 * MIB


@pytest.mark.slow
@pytest.mark.anyio
@on_places
async def test_after_a_cancel(place: Place, checkpoint: Path) -> None:
    """Ever later: before anything is read, in the middle, and when all is there."""
    rounds, finished = 0, False
    while not finished:

        async def load() -> None:
            nonlocal finished
            await stio.load(checkpoint, device=place.device, budget_bytes=8 * MIB)
            finished = True

        with quick_switches():
            async with anyio.create_task_group() as group:
                group.start_soon(load)
                await spin(rounds, lambda: finished)
                group.cancel_scope.cancel()
        rounds = rounds * 2 + 1
        place.require_freed()


@pytest.mark.matrix
@on_places
def test_after_a_file_that_was_cut(place: Place, checkpoint: Path, tmp_path: Path) -> None:
    directory = shutil.copytree(checkpoint, tmp_path / "model")
    with stio.sync.open(directory, device=place.device, budget_bytes=8 * MIB) as opened:
        file = max(directory.glob("*.safetensors"))
        os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(TruncatedError):
            opened.load()
    place.require_freed()


@pytest.mark.matrix
@on_places
@pytest.mark.parametrize("number", [5, 7, 10, 14])
def test_after_a_read_that_failed(place: Place, checkpoint: Path, number: int) -> None:
    with pytest.raises(StorageError):
        stio.sync.load(FaultyRoot(LocalRoot(checkpoint), fail_at=number), device=place.device, budget_bytes=8 * MIB)
    place.require_freed()


@pytest.fixture
def little(request: pytest.FixtureRequest) -> Any:
    """A device with room for a part of the checkpoint."""
    kind = request.param
    place = Place(kind)
    if kind == "fake":
        place.device = FakeDevice(memory_bytes=20 * MIB)
        yield place
        return
    module = module_of(place.device)
    module.empty_cache()
    total = module.get_device_properties(place.device).total_memory
    try:
        # Of what is reserved, whole segments: 20 MiB for tensors of this size, so that the second one is too much.
        module.set_per_process_memory_fraction((module.memory_reserved(place.device) + 24 * MIB) / total, place.device)
        yield place
    finally:
        module.set_per_process_memory_fraction(1.0, place.device)


@pytest.mark.matrix
@pytest.mark.parametrize("little", PLACES, indirect=True)
@pytest.mark.parametrize("call", ["load", "stream", "cast"])
def test_c96_after_the_memory_was_out(little: Place, checkpoint: Path, call: str) -> None:
    keywords: dict[str, Any] = {"device": little.device, "budget_bytes": 512 * MIB if call == "load" else 64 * MIB}
    if call == "cast":
        keywords["dtype"] = torch.float64
    with pytest.raises(DeviceMemoryError) as caught:
        if call == "stream":
            with stio.sync.open(checkpoint, **keywords) as opened:
                kept = dict(opened.stream())
        else:
            stio.sync.load(checkpoint, **keywords)
    assert caught.value.needed_bytes is None or caught.value.needed_bytes > 0
    kept = {}
    assert not kept
    del caught
    little.require_freed()
    some = stio.sync.load(checkpoint, names=lambda name: name.startswith("small"), device=little.device)
    assert len(some) == 60


# Only a real one has these.


@pytest.mark.slow
@gpu
def test_a_load_takes_over_the_memory_of_the_one_before(checkpoint: Path) -> None:
    """torch keeps freed memory for the stream that it was allocated under: it must be the same one for all loads."""
    device = resolve_device("auto")
    module = module_of(device)

    def load() -> int:
        stio.sync.load(checkpoint, device=device)
        gc.collect()
        torch.accelerator.synchronize(device)
        return int(module.memory_reserved(device))

    load()
    after_two = load()
    grown_bytes = max(load() for _ in range(6)) - after_two
    assert grown_bytes < 42 * MIB  # workers allocate in any order, so how it is cut differs; without it, six times that
