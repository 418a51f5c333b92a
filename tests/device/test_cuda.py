"""The real accelerator, where there is one; its failures, which few machines show on demand, with a module in its stead."""

from __future__ import annotations

import gc
import logging
import types
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import stio.sync
from stio.device.base import Accelerator, resolve_device
from stio.device.cuda import TorchAccelerator
from stio.errors import DeviceError, DeviceMemoryError
from stio.memory import Region
from stio.testing import write_checkpoint

HAVE_GPU = torch.accelerator.is_available()


def gpu(test: Any) -> Any:
    return pytest.mark.gpu(pytest.mark.skipif(not HAVE_GPU, reason="torch sees no accelerator here")(test))


# Without one.


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


class FakeStream:
    def __init__(self, device: torch.device | None = None) -> None:
        self.waits = 0

    def synchronize(self) -> None:
        self.waits += 1


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand for `torch.cuda`, over the CPU."""
    module = types.SimpleNamespace(
        Event=FakeEvent,
        Stream=FakeStream,
        current_stream=lambda device: FakeStream(),
        stream=lambda stream: nullcontext(),
        mem_get_info=lambda device: (1000, 2000),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


def test_device_without_streams(module: types.SimpleNamespace) -> None:
    del module.Stream
    with pytest.raises(DeviceError, match="streams"):
        TorchAccelerator(torch.device("cpu"))


def test_c96_out_of_memory(module: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = TorchAccelerator(torch.device("cpu"))

    def full(*_: object, **__: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        with pytest.raises(DeviceMemoryError) as caught:
            accelerator.empty(4096)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (4096, 1000)
    with pytest.raises(DeviceMemoryError) as caught, accelerator.on_queue():  # a cast, say
        full()
    assert caught.value.free_bytes == 1000
    del module.mem_get_info
    with pytest.raises(DeviceMemoryError), accelerator.on_queue():
        full()


def test_c97_pinning_fails(
    module: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, calls = torch.empty, []

    def empty(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        if pin_memory:
            calls.append(args)
            raise RuntimeError("no memory may be locked")
        return real(*args, **more)

    monkeypatch.setattr(torch, "empty", empty)
    accelerator = TorchAccelerator(torch.device("cpu"))
    with caplog.at_level(logging.WARNING, "stio"):
        slots = [accelerator.staging(4096) for _ in range(3)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(calls) == 1
    slots[0].write(0, bytes(range(256)))
    target = real(256, dtype=torch.uint8)
    accelerator.copy([(target[:100], slots[0].sub(0, 100)), (target[100:], slots[0].sub(100, 156))])
    assert target.tolist() == list(range(256))


def test_refused_copies_have_ended(module: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = TorchAccelerator(torch.device("cpu"))
    assert isinstance(accelerator, Accelerator)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("launch failed")

    monkeypatch.setattr(torch, "_foreach_copy_", refuse)
    slot = accelerator_slot(accelerator)
    with pytest.raises(DeviceError, match="launch failed"):
        accelerator.copy([(torch.empty(1, dtype=torch.uint8), slot.sub(0, 1))])
    assert accelerator._stream.waits == 1


def accelerator_slot(accelerator: TorchAccelerator) -> Region:
    accelerator._pinned = False
    return accelerator.staging(64)


# With one.


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    small = {f"small.{k}": torch.randn(k + 1, generator=chance) for k in range(50)}
    large = {f"large.{k}": torch.randn(1000, 1000 + k, generator=chance) for k in range(10)}
    return small | large | {"e": torch.empty(0, 3), "h": torch.randn(77, generator=chance).bfloat16()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gpu"), tensors, 2)


@gpu
@pytest.mark.parametrize("budget_bytes", [4 << 20, 512 << 20])
def test_gpu_load(checkpoint: Path, tensors: dict[str, torch.Tensor], budget_bytes: int) -> None:
    loaded = stio.sync.load(checkpoint, device="auto", budget_bytes=budget_bytes)
    assert set(loaded) == set(tensors)
    for name, tensor in tensors.items():
        assert loaded[name].device == resolve_device("auto")
        assert torch.equal(loaded[name].cpu(), tensor)
        assert loaded[name].untyped_storage().nbytes() == tensor.nbytes


@gpu
def test_gpu_stream_reuses_memory_safely(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Dropped tensors give their memory back while the consumer's stream may still read them."""
    for _ in range(3):
        with stio.sync.open(checkpoint, device="auto", budget_bytes=8 << 20) as opened:
            sums = {name: (tensor.double() * 2).sum() for name, tensor in opened.stream()}
        for name, tensor in tensors.items():
            torch.testing.assert_close(sums[name].cpu(), (tensor.double() * 2).sum())


@gpu
def test_gpu_cast_and_slice(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    with stio.sync.open(checkpoint, device="auto", dtype=torch.float16) as opened:
        part = opened.read("large.3", (slice(None, None, -2), slice(3, 9)))
    assert torch.equal(part.cpu(), tensors["large.3"].flip(0)[::2, 3:9].half())


@gpu
def test_gpu_pinned_memory_is_reused(checkpoint: Path) -> None:
    accelerator = TorchAccelerator(resolve_device("auto"))
    first = accelerator.staging(1 << 20)
    assert first.owner.is_pinned()
    address = first.address
    del first
    gc.collect()
    assert TorchAccelerator(resolve_device("auto")).staging(1 << 20).address == address


@gpu
def test_gpu_c96_out_of_memory() -> None:
    accelerator = TorchAccelerator(resolve_device("auto"))
    with pytest.raises(DeviceMemoryError) as caught:
        accelerator.empty(1 << 50)
    assert caught.value.needed_bytes == 1 << 50
    assert accelerator.empty(1024).nbytes == 1024
