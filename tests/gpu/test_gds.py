"""memory='gds' on a device: what the disk writes is in none of its queues. kvikio's part is a stand-in's, or its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import simdevice
import torch
from accelerators import PLACES, Place, gpu, module_of, needs_two_devices
from kvikio_stand_in import Kvikio
from support import require_equal

import stio.sync
from stio.loading import page_cache

Tensors = dict[str, torch.Tensor]

on_places = pytest.mark.parametrize("place", PLACES, indirect=True)


def put(place: Place) -> Callable[[Any, bytes], None] | None:
    """Return how bytes come to the device at once, beside its queues; None where an address is enough."""
    if not place.is_real:
        return None

    def to_device(buffer: Any, data: bytes) -> None:
        if simdevice.installed():  # torch knows the array interface of CUDA's memory only
            simdevice.write(buffer.__cuda_array_interface__["data"][0], data)
            return
        memory = torch.as_tensor(buffer, device=place.torch_device)
        module = module_of(place.torch_device)
        stream = module.Stream(place.torch_device)
        with module.stream(stream):
            memory[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        stream.synchronize()

    return to_device


@on_places
@pytest.mark.parametrize("budget_bytes", [2 << 20, 64 << 20])
def test_every_bit_arrives(
    place: Place, checkpoint: Path, tensors: Tensors, budget_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round upon round in memory that is recycled: a slot that is written too early shows."""
    monkeypatch.setattr(page_cache, "SMALL_LOAD_BYTES", 0)
    monkeypatch.setattr(page_cache, "resident_fraction", lambda file: 0.0)
    kvikio = Kvikio(None if place.is_real else place.device, put=put(place))
    kvikio.install(monkeypatch)
    for _ in range(3):
        found = stio.sync.load(checkpoint, device=place.device, memory="gds", budget_bytes=budget_bytes)
        place.keep_busy(3_000_000)
        require_equal(found, tensors)
        del found
    assert kvikio.read_bytes >= 3 * sum(tensor.nbytes for tensor in tensors.values())
    assert not kvikio.overwritten
    place.require_freed()


@gpu
@needs_two_devices
@pytest.mark.parametrize("place", [PLACES[1]], indirect=True)
def test_reads_are_made_with_the_device_as_the_current_one(
    place: Place, checkpoint: Path, tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuFile goes by the thread's context, and a new thread's is number 0's."""
    monkeypatch.setattr(page_cache, "SMALL_LOAD_BYTES", 0)
    monkeypatch.setattr(page_cache, "resident_fraction", lambda file: 0.0)
    place.device, seen = torch.device(place.torch_device.type, 1), []
    kvikio = Kvikio(put=put(place), require_current=lambda: seen.append(torch.accelerator.current_device_index()))
    kvikio.install(monkeypatch)
    require_equal(stio.sync.load(checkpoint, device=place.device, memory="gds"), tensors)
    assert set(seen) == {1}
    assert len(seen) == kvikio.num_reads + kvikio.num_opened


@gpu
@pytest.mark.skipif(find_spec("kvikio") is None, reason="there is no kvikio here")
@pytest.mark.parametrize("place", [PLACES[1]], indirect=True)
def test_kvikio_itself(place: Place, checkpoint: Path, tensors: Tensors) -> None:
    """By GPUDirect Storage where it is set up, through the host where it is not."""
    for path in checkpoint.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    found = stio.sync.load(checkpoint, device=place.device, memory="gds")
    require_equal(found, tensors)
