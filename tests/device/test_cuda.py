"""The code for real accelerators, over a stand-in for `torch.cuda`: failures, contexts, whole loads; see test_contract.py."""

from __future__ import annotations

import logging
import time
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from accelerators import HAVE_GPU
from stand_in import DEVICE, HERE, THERE, StandIn, install
from support import bits_of, require_equal

import stio.sync
from stio import memory
from stio.device import copying
from stio.device import cuda as cuda_module
from stio.device.base import resolve_device
from stio.device.copying import Readiness, has_streams
from stio.device.cuda import HAVE_STREAMS, TorchAccelerator
from stio.errors import DeviceError, DeviceMemoryError
from stio.memory import Region
from stio.testing import MemoryRoot, checkpoint_files


@pytest.mark.skipif(HAVE_GPU, reason="there is an accelerator")
def test_no_accelerator() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    for device in ("cuda", "cuda:1", 0, torch.device("xpu")):
        with pytest.raises(DeviceError):
            resolve_device(device)


@pytest.mark.parametrize("device", ["nonsense", "meta", 1.5, None])
def test_what_is_no_device(device: object) -> None:
    with pytest.raises(DeviceError):
        resolve_device(device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_cpu(device: object) -> None:
    assert resolve_device(device) == torch.device("cpu")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    driver = StandIn(memory_bytes=64 << 20)
    install(monkeypatch, driver)
    return driver


@pytest.mark.parametrize("lacks", HAVE_STREAMS)
def test_device_without_streams(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    module = types.SimpleNamespace(**dict.fromkeys(set(HAVE_STREAMS) - {lacks}))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert not has_streams(DEVICE)
    with pytest.raises(DeviceError, match="streams"):
        TorchAccelerator(DEVICE)


def test_a_device_that_does_not_answer(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(driver, "Stream", lost)
    with pytest.raises(DeviceError, match="does not answer: the device is lost"):
        TorchAccelerator(DEVICE)


def test_loads_at_once_share_a_copy_stream(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that one of them frees is of use to the others only if it was allocated under the same stream."""
    make, made = driver.Stream, []

    def slow(device: torch.device) -> Any:
        time.sleep(0.02)
        made.append(make(device))
        return made[-1]

    monkeypatch.setattr(driver, "Stream", slow)
    with ThreadPoolExecutor(4) as pool:
        accelerators = list(pool.map(lambda _: TorchAccelerator(DEVICE), range(4)))
    assert len(made) == 1
    assert all(accelerator._stream is made[0] for accelerator in accelerators)
    cuda_module._forget_parent()  # as a forked child does
    assert TorchAccelerator(DEVICE)._stream is made[1]


def test_what_the_driver_refuses_is_a_device_error(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = TorchAccelerator(DEVICE)

    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(DeviceError, match="illegal memory access"):
        accelerator.empty(4096)


def test_c96_out_of_memory(driver: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = TorchAccelerator(DEVICE)

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(DeviceMemoryError) as caught:
        accelerator.empty(65 << 20)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (65 << 20, 64 << 20)
    with pytest.raises(DeviceMemoryError) as caught, accelerator.on_queue():  # a cast, say
        full()
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (None, 64 << 20)
    monkeypatch.setattr(driver, "mem_get_info", full)
    with pytest.raises(DeviceMemoryError) as caught, accelerator.on_queue():
        full()
    assert caught.value.free_bytes is None
    monkeypatch.delattr(StandIn, "mem_get_info")
    monkeypatch.delattr(driver, "mem_get_info")
    with pytest.raises(DeviceMemoryError), accelerator.on_queue():
        full()


def test_c97_pinning_fails(driver: StandIn, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    real, calls = torch.empty, []

    def empty(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            calls.append(args)
            raise RuntimeError("no memory may be locked")
        return real(*args, **more)

    monkeypatch.setattr(torch, "empty", empty)
    accelerator = TorchAccelerator(DEVICE)
    with caplog.at_level(logging.WARNING, "stio"):
        slots = [accelerator.staging(4096) for _ in range(3)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(calls) == 1
    slots[0].write(0, bytes(range(256)))
    target = real(256, dtype=torch.uint8)
    accelerator.copy([(target[:100], slots[0].sub(0, 100)), (target[100:], slots[0].sub(100, 156))]).synchronize()
    assert target.tolist() == list(range(256))


# Whole loads.


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    small = {f"small.{k:02}": torch.randn(k + 1, generator=chance) for k in range(50)}
    return small | {f"large.{k}": torch.randn(600, 1000 + k, generator=chance) for k in range(5)}


@pytest.mark.parametrize("budget_bytes", [1 << 18, 4 << 20, 512 << 20])
def test_a_load_waits_for_its_copies(driver: StandIn, tensors: dict[str, torch.Tensor], budget_bytes: int) -> None:
    """Streams do nothing until they must: what nobody waited for would be poison."""
    root = MemoryRoot(checkpoint_files(tensors, 2))
    for _ in range(2):
        found = stio.sync.load(root, device=TorchAccelerator(DEVICE), budget_bytes=budget_bytes)
        driver.current_stream(DEVICE).synchronize()
        require_equal(found, tensors)


def test_what_a_stream_drops_is_taken_over_when_its_consumer_is_through(
    driver: StandIn, tensors: dict[str, torch.Tensor]
) -> None:
    found: dict[str, bytes] = {}
    mine = driver.current_stream(DEVICE)
    device = TorchAccelerator(DEVICE)
    with stio.sync.open(MemoryRoot(checkpoint_files(tensors)), device=device, budget_bytes=1 << 20) as opened:
        for name, tensor in opened.stream():
            region = Region(tensor.data_ptr(), tensor.nbytes)
            mine.put(lambda name=name, region=region: found.setdefault(name, region.tobytes()))  # type: ignore[misc]
            del tensor
    device._stream.run()
    mine.run()
    assert found == {name: bits_of(tensor) for name, tensor in tensors.items()}


def test_all_loads_share_a_copy_stream(driver: StandIn, tensors: dict[str, torch.Tensor]) -> None:
    """Memory that was freed belongs to the stream that it was allocated under."""
    for _ in range(3):
        stio.sync.load(MemoryRoot(checkpoint_files(tensors)), device=TorchAccelerator(DEVICE))
    assert driver.num_streams == 1


def test_no_other_device_gets_a_context(driver: StandIn, tensors: dict[str, torch.Tensor]) -> None:
    """Not from a load's threads, nor from the consumer's; not from a save's."""
    stio.sync.load(MemoryRoot(checkpoint_files(tensors)), device=TorchAccelerator(DEVICE), budget_bytes=1 << 20)
    assert driver.contexts == {THERE}
    mark = TorchAccelerator(DEVICE).copy([])
    assert not mark.query()
    mark.synchronize()
    assert mark.query()
    assert driver.contexts == {THERE}
    regions = [memory.allocate(tensor.nbytes) for tensor in tensors.values()]
    copies = list(zip(tensors.values(), [0] * len(tensors), regions, strict=True))
    ready = Readiness({DEVICE: (driver.Event(), driver.Stream(DEVICE))})
    copying._wait_for([(DEVICE, copying._queue_copies(DEVICE, copies, ready))])
    for tensor, region in zip(tensors.values(), regions, strict=True):
        assert region.sub(0, tensor.nbytes).tobytes() == bits_of(tensor)
    assert driver.contexts == {THERE}


def test_the_stand_in_makes_contexts_as_torch_does(driver: StandIn) -> None:
    """Or the test above could not fail."""
    with driver.device(DEVICE):
        pass
    assert driver.contexts == {THERE}
    with driver.stream(driver.Stream(DEVICE)):
        pass
    assert driver.contexts == {HERE, THERE}
