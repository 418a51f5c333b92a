"""Rings: one for each device and copy stream, made anew after a failure; and whole loads through one, whose copies are late."""

from __future__ import annotations

import gc
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_driver import FakeDriver, Place
from fakes import FakeDevice
from support import needs_engine, nothing_left, require_equal, save_sharded

import stio
import stio.sync
from stio import native
from stio.device import cuda
from stio.device.cuda import DeviceRing, TorchAccelerator
from stio.errors import DeviceError, DeviceMemoryError, TruncatedError

pytestmark = needs_engine

SLOTS_BYTES = 6 << 20
"""Slots of one thread."""


def accelerator_of(stream: object) -> TorchAccelerator:
    accelerator = object.__new__(TorchAccelerator)
    accelerator.device, accelerator.copy_stream = torch.device("cpu"), stream
    return accelerator


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeDriver]]:
    """The drivers that were asked for."""
    found: list[FakeDriver] = []

    def open_driver(device: torch.device, stream: Any) -> tuple[native.Driver | str, int]:
        found.append(FakeDriver())
        return found[-1].driver, 0

    monkeypatch.setitem(cuda.drivers, "cpu", open_driver)
    monkeypatch.setattr(cuda, "_rings", {})
    yield found
    gc.collect()


def test_loads_to_a_device_share_its_ring(opened: list[FakeDriver]) -> None:
    stream = object()
    first = DeviceRing.of(accelerator_of(stream))
    assert first is not None
    assert DeviceRing.of(accelerator_of(stream)) is first
    other = DeviceRing.of(accelerator_of(object()))  # the stream of a module that was exchanged
    assert other is not None
    assert other is not first
    assert len(opened) == 2
    cuda._forget_parent()  # as a forked child does
    assert DeviceRing.of(accelerator_of(stream)) not in (first, other)


def test_there_is_none(monkeypatch: pytest.MonkeyPatch, opened: list[FakeDriver], caplog: Any) -> None:
    caplog.set_level(logging.INFO, "stio")
    assert DeviceRing.of(FakeDevice()) is None
    monkeypatch.setitem(cuda.drivers, "cpu", lambda *_: ("no such library", 0))
    for _ in range(3):
        assert DeviceRing.of(accelerator_of(object())) is None
    assert [record.getMessage() for record in caplog.records if "no such library" in record.getMessage()][1:] == []
    monkeypatch.delitem(cuda.drivers, "cpu")
    assert DeviceRing.of(accelerator_of(object())) is None
    monkeypatch.undo()
    monkeypatch.setattr(native, "available", lambda: False)
    assert DeviceRing.of(accelerator_of(object())) is None


def test_threads_of_the_engine_may_act_while_a_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """CUDA forbids other threads of the process to ask after events then, unless they say that they are not part of it."""
    place = Place(monkeypatch, context=47)
    save_sharded({f"w{k}": torch.full((3 << 20,), k, dtype=torch.uint8) for k in range(8)}, tmp_path)
    place.load(tmp_path)
    relaxed = 2
    assert place.driver.capture_modes
    assert {mode for _, mode in place.driver.capture_modes} == {relaxed}
    assert threading.get_ident() not in {thread for thread, _ in place.driver.capture_modes}


# Whole loads, to a fake device by the engine.


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Place]:
    return lambda **faults: Place(monkeypatch, **faults)


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    small = {f"small.{k:03}": torch.randn(k % 50 + 1, generator=chance) for k in range(200)}
    large = {f"large.{k}": torch.randn(1000, 1400 + k, generator=chance) for k in range(5)}
    return small | large | {"e": torch.empty(0, 2), "flag": torch.tensor([True, False, True])}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    return save_sharded(tensors, tmp_path_factory.mktemp("rings"), 2)


@pytest.mark.matrix
@pytest.mark.parametrize("budget_bytes", [64 << 10, 16 << 20, None])
def test_each_tensor_has_its_bytes(place: Any, source: Path, tensors: Any, budget_bytes: int | None) -> None:
    here, trace = place(), stio.Trace()
    with nothing_left():
        found = here.load(source, budget_bytes=budget_bytes, trace=trace)
    require_equal(found, tensors)
    assert {span.lane.rpartition("-")[0] for span in trace.spans if span.name == "read"} == {"engine"}
    assert {span.detail for span in trace.spans if span.name == "read"} == {"DevicePath"}
    assert here.device.num_staging == 0
    assert 0 < here.ring.held_bytes <= native.MAX_THREADS * SLOTS_BYTES
    assert here.driver.pinned_bytes == here.ring.held_bytes == stio.stats().staging_held_bytes
    here.ring.ring.trim()
    assert here.driver.pinned_bytes == here.ring.held_bytes == 0
    del found
    here.require_freed()


def test_parts_and_casts(place: Any, source: Path, tensors: Any) -> None:
    here = place()
    cast = here.load(source, dtype=torch.bfloat16)
    require_equal(cast, {n: t.bfloat16() if t.is_floating_point() else t for n, t in tensors.items()})
    name = "large.3"
    for index in (slice(3, 500, 7), (slice(None), slice(5, 9)), slice(None, None, -1)):
        expected = tensors[name].flip(0) if index == slice(None, None, -1) else tensors[name][index]
        require_equal(here.load(source, names=[name], slices={name: index}), {name: expected})
    some = sorted(tensors)[::3]
    require_equal(here.load(source, names=some), {name: tensors[name] for name in some})


def test_nothing_is_delivered_before_its_event_has_passed(place: Any, source: Path, tensors: Any) -> None:
    """And no slot is filled again: what is copied late is still right."""
    here = place(manual=True)
    found: list[dict[str, torch.Tensor]] = []
    loading = threading.Thread(target=lambda: found.append(here.load(source)))
    loading.start()
    here.driver.wait_for_events(4)
    loading.join(0.05)
    assert not found
    here.driver.go.set()
    loading.join(60)
    require_equal(found[0], tensors)


def test_p4_a_cancel_waits_for_the_copies(place: Any, source: Path) -> None:
    here = place(manual=True)
    with stio.sync.open(source, device=here.device) as checkpoint:
        stream = checkpoint.stream()
        stream.__enter__()
        here.driver.wait_for_events(2)
        closer = threading.Thread(target=stream.close)
        closer.start()
        closer.join(0.05)
        assert closer.is_alive()
        here.driver.go.set()
        closer.join(60)
        assert not closer.is_alive()
        assert here.driver.num_pending == 0
    del stream
    here.require_freed()


@pytest.mark.matrix
@pytest.mark.parametrize("number", [1, 2, 5])
@pytest.mark.parametrize("fault", ["refuse_copy", "fail_event"])
def test_a_copy_that_fails_ends_the_load(place: Any, source: Path, fault: str, number: int) -> None:
    here = place(**{fault: number})
    with pytest.raises(DeviceError, match="copying on cpu failed: as the test asked"):
        here.load(source)
    assert here.ring.ring.has_failed == (fault == "fail_event")  # a refused copy is the error of its load alone
    here.require_freed()


def test_a_ring_that_failed_is_replaced(opened: list[FakeDriver], monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = accelerator_of(object())
    first = DeviceRing.of(accelerator)
    assert first is not None
    monkeypatch.setattr(type(first.ring), "has_failed", property(lambda ring: ring is first.ring))
    assert DeviceRing.of(accelerator) is not first


def test_c97_pinning_is_refused(place: Any, source: Path, tensors: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Copies from plain memory are right too; said once."""
    here = place(refuse_pin=1)
    caplog.set_level(logging.WARNING, "stio")
    for _ in range(2):
        require_equal(here.load(source), tensors)
    assert [record.getMessage() for record in caplog.records] == [
        "pinning host memory failed, copies to cpu are slower"
    ]


def test_c96_out_of_memory_and_once_more(place: Any, source: Path, tensors: Any) -> None:
    here = place()
    here.device._memory_bytes = 8 << 20
    with pytest.raises(DeviceMemoryError):
        here.load(source)
    here.require_freed()
    here.device._memory_bytes = None
    require_equal(here.load(source), tensors)


def test_c90_a_file_that_is_cut(place: Any, tmp_path: Path, tensors: Any) -> None:
    here = place()
    path = save_sharded({"w": torch.zeros(4 << 20)}, tmp_path, 1)
    with stio.sync.open(path, device=here.device) as checkpoint:
        (file,) = tmp_path.glob("*.safetensors")
        os.truncate(file, 5 << 20)
        with pytest.raises(TruncatedError) as caught:
            checkpoint.load()
    assert 5 << 20 <= (caught.value.offset or 0) < 16 << 20  # of the threads that find nothing, one is the first
    del caught
    here.require_freed()


def test_memory_is_released_for_loads_to_come(opened: list[FakeDriver]) -> None:
    ring = DeviceRing.of(accelerator_of(object()))
    assert ring is not None
    ring.ring.trim()
    assert ring.held_bytes == 0
