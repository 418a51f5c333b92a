"""Every bit arrives while streams race: consumers on their own streams, memory that is recycled at once, many loads."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import PLACES, Place, gpu, keep_busy, module_of, needs_two_devices, on_copy_stream
from crash.zygote import Zygote
from fakes import write_checkpoint
from support import eventually, require_equal

import stio.sync
from stio.device.base import resolve_device
from stio.device.cuda import TorchAccelerator
from stio.loading import planned, scheduler
from stio.runtime.reports.trace import Trace

Tensors = dict[str, torch.Tensor]
MIB = 1 << 20
SHORT_CYCLES = 3_000_000
"""Some milliseconds: the copies of several groups."""
LATE_CYCLES = 300_000_000
"""About 0.15 s."""

on_places = pytest.mark.parametrize("place", PLACES, indirect=True)


def consumed(place: Place, checkpoint: Path, budget_bytes: int) -> Tensors:
    """Stream a checkpoint; each tensor is used late, on the current stream, and dropped at once."""
    seen: Tensors = {}
    with stio.sync.open(checkpoint, device=place.device, budget_bytes=budget_bytes) as opened:
        for k, (name, tensor) in enumerate(opened.stream()):
            if k % 5 == 0:
                place.keep_busy(SHORT_CYCLES)
            seen[name] = tensor.clone()
            del tensor
    return seen


@pytest.mark.slow
@on_places
@pytest.mark.parametrize("own_stream", [False, True])
@pytest.mark.parametrize("budget_bytes", [2 * MIB, 16 * MIB])
def test_tensors_that_are_dropped_at_once(
    place: Place, checkpoint: Path, tensors: Tensors, own_stream: bool, budget_bytes: int
) -> None:
    """Nobody waits between the rounds: what the next one recycles is still to be read by the one before."""
    rounds = []
    for _ in range(3):
        if own_stream:
            with place.own_stream():
                rounds.append(consumed(place, checkpoint, budget_bytes))
        else:
            rounds.append(consumed(place, checkpoint, budget_bytes))
    if place.is_real:
        torch.accelerator.synchronize()
    for seen in rounds:
        require_equal(seen, tensors)


@pytest.mark.slow
@on_places
def test_several_loads_at_once(place: Place, checkpoint: Path, tensors: Tensors) -> None:
    """In threads, each on a stream of its own, over memory that the others drop."""
    barrier = threading.Barrier(4)

    def rounds(number: int) -> list[Tensors]:
        with place.own_stream():
            barrier.wait(30)
            found = []
            for k in range(3):
                if (k + number) % 2:
                    found.append(consumed(place, checkpoint, 4 * MIB))
                else:
                    loaded = stio.sync.load(checkpoint, device=place.device, budget_bytes=8 * MIB)
                    place.keep_busy(SHORT_CYCLES)
                    found.append({name: tensor.clone() for name, tensor in loaded.items()})
                    del loaded
            return found

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(rounds, range(4)))
    if place.is_real:
        torch.accelerator.synchronize()
    for found in results:
        for seen in found:
            require_equal(seen, tensors)


@pytest.mark.slow
@on_places
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_casts_that_are_dropped_at_once(place: Place, checkpoint: Path, tensors: Tensors, dtype: torch.dtype) -> None:
    """The memory that a cast was made from is free as soon as the copy queue is through with it."""
    rounds = []
    for _ in range(3):
        with place.own_stream():
            loaded = stio.sync.load(checkpoint, device=place.device, dtype=dtype, budget_bytes=4 * MIB)
            place.keep_busy(SHORT_CYCLES)
            rounds.append({name: tensor.clone() for name, tensor in loaded.items()})
            del loaded
    if place.is_real:
        torch.accelerator.synchronize()
    expected = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
    for seen in rounds:
        require_equal(seen, expected)


@pytest.mark.matrix
@gpu
@pytest.mark.parametrize("in_parts", [False, True])
def test_work_that_is_queued_behind_a_load_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_parts: bool
) -> None:
    """A load waits for what its caller's stream had to do when its memory was allocated, and for nothing later."""
    device = resolve_device("auto")
    tensors = {f"w{k}": torch.full((MIB,), k, dtype=torch.uint8) for k in range(24)}
    path = write_checkpoint(tmp_path, tensors)
    stio.sync.load(path, device=device)  # what is made once a process is there, and torch has memory at hand
    if in_parts:  # as a large load
        monkeypatch.setattr(planned, "FIRST_BYTES", 1)
        monkeypatch.setattr(scheduler, "FIRST_BYTES", 1)
    torch.accelerator.synchronize(device)
    module: Any = module_of(device)
    trace, found = Trace(), {}

    def load() -> None:
        with module.stream(mine):
            found.update(stio.sync.load(path, device=device, trace=trace))

    mine = module.Stream(device)
    with on_copy_stream(device):
        keep_busy(LATE_CYCLES)  # the load is not over before there is work behind it
    loading = threading.Thread(target=load)
    loading.start()
    assert eventually(lambda: any(span.name == "begin" for span in list(trace.spans)))
    with module.stream(mine):
        for _ in range(10):
            keep_busy()
        event = module.Event()
        event.record(mine)
    loading.join(60)
    assert not event.query()
    require_equal(found, tensors)


@gpu
@pytest.mark.parametrize("grows", [False, True])
def test_memory_that_the_driver_must_give_is_allocated_in_two_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grows: bool
) -> None:
    device = resolve_device("auto")
    tensors = {f"w{k}": torch.full((MIB,), k, dtype=torch.uint8) for k in range(24)}
    path = write_checkpoint(tmp_path, tensors)
    allocate, sizes = TorchAccelerator.allocate, []

    def counted(accelerator: TorchAccelerator, wanted: Any) -> Any:
        sizes.append(len(wanted))
        return allocate(accelerator, wanted)

    monkeypatch.setattr(TorchAccelerator, "allocate", counted)
    monkeypatch.setattr(TorchAccelerator, "must_grow", lambda accelerator, nbytes: grows)
    monkeypatch.setattr(planned, "FIRST_BYTES", MIB)
    # With a budget of 8 MiB a group has 2 MiB.
    require_equal(stio.sync.load(path, device=device, budget_bytes=8 * MIB), tensors)
    assert sizes == ([2, 22] if grows else [24])


SCRIPT = """
import sys
import simdevice
import torch
from torch import nn
import stio.sync

directory, kind = sys.argv[1:]
if kind == "sim":
    simdevice.install()
place = torch.device(kind, 1)

def has_context(number):
    return number in simdevice.contexts() if kind == "sim" else torch._C._cuda_hasPrimaryContext(number)

def load():
    stio.sync.load(directory, device=place, dtype=torch.float16)
    return stio.sync.load(directory, device=place, budget_bytes=8 << 20)

def load_with_a_cache():
    with stio.sync.HostCache(1 << 30, device=place) as cache:
        stio.sync.load(directory, device=place, cache=cache, budget_bytes=8 << 20)
        stio.sync.load(directory, device=place, cache=cache, dtype=torch.float16)

def save():
    stio.sync.save(load(), directory + "/again/a.safetensors")

def start_warm():
    with torch.device("meta"):
        module = nn.Module()
        module.small = nn.Module()
        for k in range(10):
            setattr(module.small, f"{k:02}", nn.Parameter(torch.empty(k * k + 1)))
    with stio.sync.warm_start(module, directory, device=place, strict=False):
        pass

for call in (load, load_with_a_cache, save, start_warm):
    call()
    torch.get_device_module(place).synchronize(place)
    assert not has_context(0), f"the default device has a context after {call.__name__}"
    assert has_context(1)
"""


@pytest.mark.slow
@gpu
@needs_two_devices
def test_the_default_device_stays_without_a_context(torch_zygote: Zygote, checkpoint: Path, tmp_path: Path) -> None:
    """See tests/device/test_cuda.py for the same without two devices."""
    directory = shutil.copytree(checkpoint, tmp_path / "model")
    found = torch_zygote.run(SCRIPT, directory, resolve_device("auto").type)
    assert found.returncode == 0, found.stderr
