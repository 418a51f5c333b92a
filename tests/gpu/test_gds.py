"""memory='gds' on a device: what the disk writes is in none of its queues. cuFile is a stand-in, or itself."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import cufile_stand_in
import pytest
import simdevice
import torch
from accelerators import PLACES, Place, gpu, needs_two_devices
from support import needs_engine, require_equal

import stio.sync
from stio.loading import gds_path, planned
from stio.loading.gds_path import GdsPath
from stio.runtime.reports.trace import Trace

Tensors = dict[str, torch.Tensor]

pytestmark = needs_engine
on_device = pytest.mark.parametrize("place", [PLACES[1]], indirect=True)


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take all files for cold: what was just written is not."""
    monkeypatch.setattr(planned, "SMALL_LOAD_BYTES", 0)
    monkeypatch.setattr(planned, "resident_fraction", lambda file: 0.0)


@pytest.mark.matrix
@gpu
@on_device
@pytest.mark.parametrize("budget_bytes", [2 << 20, 64 << 20])
def test_every_bit_arrives(
    place: Place, checkpoint: Path, tensors: Tensors, budget_bytes: int, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round upon round in memory that is recycled: memory that is written too early shows."""
    cufile = cufile_stand_in.install(monkeypatch)
    for _ in range(3):
        found = stio.sync.load(checkpoint, device=place.device, memory="gds", budget_bytes=budget_bytes)
        place.keep_busy(3_000_000)
        require_equal(found, tensors)
        del found
    assert cufile.read_bytes >= 3 * 40 << 20
    assert cufile.num_open == 0
    place.require_freed()


@gpu
@on_device
@pytest.mark.parametrize("fail_read", [4, 9])
def test_a_failure_on_the_way(
    place: Place, checkpoint: Path, tensors: Tensors, fail_read: int, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ring writes to the same memory, in the order of its stream."""
    cufile_stand_in.install(monkeypatch, fail_read=fail_read)
    require_equal(stio.sync.load(checkpoint, device=place.device, memory="gds"), tensors)
    place.require_freed()


@gpu
@needs_two_devices
@on_device
def test_reads_are_made_with_the_device_as_the_current_one(
    place: Place, checkpoint: Path, tensors: Tensors, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuFile goes by the thread's context, and a new thread's is number 0's."""
    place.device = torch.device(place.torch_device.type, 1)
    cufile = cufile_stand_in.install(monkeypatch, device=1)
    require_equal(stio.sync.load(checkpoint, device=place.device, memory="gds"), tensors)
    assert cufile.num_reads > 10
    assert not cufile.is_misused


@pytest.fixture
def cufile_itself() -> Iterator[None]:
    if simdevice.installed():
        pytest.skip("cuFile reads to devices of NVIDIA's")
    try:
        gds_path.GdsFile.require_library()
    except ImportError as error:
        pytest.skip(str(error))
    yield


@gpu
@on_device
def test_cufile_itself(
    place: Place,
    checkpoint: Path,
    tensors: Tensors,
    cold: None,
    cufile_itself: None,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """By GPUDirect Storage where it is set up, in compatibility mode or through the host where it is not: it is named."""
    for path in checkpoint.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    trace = Trace()
    found = stio.sync.load(checkpoint, device=place.device, memory="gds", trace=trace)
    require_equal(found, tensors)
    paths = {span.detail for span in trace.spans if span.name == "read"}
    assert paths == {GdsPath.__name__} or "is not usable" in caplog.text
    print(f"read by {', '.join(sorted(map(str, paths)))}; {caplog.text}")
