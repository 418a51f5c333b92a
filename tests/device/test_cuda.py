"""The code for real accelerators: failures, memory, whole loads that are late; see test_contract.py and tests/gpu."""

from __future__ import annotations

import logging
import time
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import simdevice
import torch
from accelerators import HAVE_GPU, gpu, module_of
from crash.zygote import Zygote
from fakes import MemoryRoot, checkpoint_files
from support import bits_of, require_equal

import stio.sync
from stio.device import cuda as cuda_module
from stio.device import pinned
from stio.device.base import resolve_device
from stio.device.cuda import STREAM_API, TorchAccelerator, TorchEvent, save_stream
from stio.errors import DeviceError, DeviceMemoryError

LATE_SECONDS = 0.01
"""How long the simulated device delays each copy: what does not wait for it reads too early."""


@pytest.mark.skipif(HAVE_GPU, reason="there is an accelerator")
def test_no_accelerator() -> None:
    assert resolve_device("auto") == torch.device("cpu")
    for device in ("cuda", "cuda:1", 0, torch.device("xpu")):
        with pytest.raises(DeviceError) as caught:
            resolve_device(device)
        lacks_cuda = str(device).startswith("cuda") and not (torch.version.cuda or torch.version.hip)
        assert ("built without CUDA" in str(caught.value)) is lacks_cuda


@pytest.mark.parametrize("device", ["nonsense", "meta", 1.5, None])
def test_what_is_no_device(device: object) -> None:
    with pytest.raises(DeviceError):
        resolve_device(device)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", torch.device("cpu")])
def test_cpu(device: object) -> None:
    assert resolve_device(device) == torch.device("cpu")


# Streams.


def kind_of_device(**changed: Any) -> types.SimpleNamespace:
    """Return what stands for torch's module of a kind of device: it has streams, and does nothing."""
    names: dict[str, Any] = {name: lambda *_, **__: nullcontext() for name in STREAM_API}
    return types.SimpleNamespace(**{**names, **changed})


@pytest.mark.parametrize("lacks", STREAM_API)
def test_device_without_streams(monkeypatch: pytest.MonkeyPatch, lacks: str) -> None:
    module = kind_of_device()
    delattr(module, lacks)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    assert not TorchAccelerator.supports(torch.device("cpu"))
    with pytest.raises(DeviceError, match="streams"):
        TorchAccelerator(torch.device("cpu"))


def test_a_device_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(device: torch.device) -> None:
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(torch, "get_device_module", lambda device: kind_of_device())
    monkeypatch.setattr(torch, "Stream", lost)
    with pytest.raises(DeviceError, match="does not answer: the device is lost"):
        TorchAccelerator(torch.device("cpu"))


def test_loads_at_once_share_a_copy_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that one of them frees is of use to the others only if it was allocated under the same stream."""
    made: list[object] = []

    def slow(device: torch.device) -> object:
        time.sleep(0.02)
        made.append(object())
        return made[-1]

    module, device = kind_of_device(), torch.device("cpu")
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch, "Stream", slow)
    with ThreadPoolExecutor(4) as pool:
        accelerators = list(pool.map(lambda _: TorchAccelerator(device), range(4)))
    first = accelerators[0].copy_stream
    assert all(accelerator.copy_stream is first for accelerator in accelerators)
    assert save_stream(module, device) is not first
    cuda_module._forget_parent()  # as a forked child does
    assert TorchAccelerator(device).copy_stream not in (first, save_stream(module, device))
    cuda_module._forget_parent()


def test_events_of_cuda_get_streams_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.cuda.Event` of torch 2.10 and older reads behind the end of a generic stream (pytorch issue 173792)."""

    class Stream:
        def __init__(self, device: torch.device) -> None:
            self.device = device

    class Event:
        def __init__(self, *, blocking: bool) -> None:
            self.blocking = blocking

        def record(self, stream: object) -> None:
            recorded.append(stream)

    recorded: list[object] = []
    module, device = kind_of_device(Stream=Stream, Event=Event), torch.device("cuda", 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    TorchAccelerator(device).copy([])
    TorchEvent(module, device, save_stream(module, device))
    assert [type(stream) for stream in recorded] == [Stream, Stream]
    assert recorded[0] is not recorded[1]
    cuda_module._forget_parent()


# Refusals.


@pytest.fixture
def accelerator() -> TorchAccelerator:
    return TorchAccelerator(resolve_device("auto"))


@gpu
def test_what_the_driver_refuses_is_a_device_error(
    accelerator: TorchAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(cuda_module, "new_tensors", refuse)
    with pytest.raises(DeviceError, match="illegal memory access"):
        accelerator.allocate([(torch.uint8, (4096,))])


@gpu
def test_c96_out_of_memory(accelerator: TorchAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = module_of(accelerator.device)

    def full(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(DeviceMemoryError) as caught:
        accelerator.allocate([(torch.uint8, (1 << 50,))])
    assert caught.value.needed_bytes == 1 << 50
    assert 0 < (caught.value.free_bytes or 0) < 1 << 50
    with pytest.raises(DeviceMemoryError) as caught, accelerator.on_stream():  # a cast, say
        full()
    assert caught.value.needed_bytes is None
    assert 0 < (caught.value.free_bytes or 0) < 1 << 50
    monkeypatch.setattr(module, "mem_get_info", full)
    with pytest.raises(DeviceMemoryError) as caught, accelerator.on_stream():
        full()
    assert caught.value.free_bytes is None
    monkeypatch.delattr(module, "mem_get_info")
    with pytest.raises(DeviceMemoryError) as caught, accelerator.on_stream():
        full()
    assert caught.value.free_bytes is None


def test_whether_the_allocator_must_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = object.__new__(TorchAccelerator)
    accelerator.device = torch.device("cuda:0")
    found: Any = {"reserved_bytes": {"all": {"current": 1000}}, "allocated_bytes": {"all": {"current": 600}}}
    accelerator._module = types.SimpleNamespace(memory_stats_as_nested_dict=lambda device: found)
    monkeypatch.setattr(TorchAccelerator, "free_bytes", lambda self, device: 5000)
    assert [accelerator.must_grow(nbytes) for nbytes in (400, 401, 5000, 5001)] == [False, True, True, False]
    found.clear()  # CUDA is not initialised
    assert not accelerator.must_grow(401)
    accelerator._module = types.SimpleNamespace()  # another kind of device
    assert not accelerator.must_grow(401)


@gpu
def test_c97_pinning_fails(
    accelerator: TorchAccelerator, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls: list[int] = []

    def refuse(nbytes: int, device: torch.device) -> Any:
        calls.append(nbytes)
        raise RuntimeError("no memory may be locked")

    monkeypatch.setattr(pinned, "pin", refuse)
    with caplog.at_level(logging.WARNING, "stio"):
        slots = [accelerator.staging(4096) for _ in range(3)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert len(calls) == 1
    slots[0].write(0, bytes(range(256)))
    target = accelerator.allocate([(torch.uint8, (256,))])[0]
    accelerator.copy([(target[:100], slots[0].sub(0, 100)), (target[100:], slots[0].sub(100, 156))]).synchronize()
    assert target.tolist() == list(range(256))


# Whole loads, whose copies are late.


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    small = {f"small.{k:02}": torch.randn(k + 1, generator=chance) for k in range(50)}
    return small | {f"large.{k}": torch.randn(600, 1000 + k, generator=chance) for k in range(5)}


@pytest.mark.slow
@gpu
@pytest.mark.parametrize("budget_bytes", [1 << 18, 4 << 20, 512 << 20])
def test_a_load_waits_for_its_copies(tensors: dict[str, torch.Tensor], budget_bytes: int) -> None:
    """Memory that is read without waiting holds the pattern that fresh memory is filled with."""
    root = MemoryRoot(checkpoint_files(tensors, 2))
    for _ in range(2):
        with simdevice.delayed(LATE_SECONDS):
            found = stio.sync.load(root, device="auto", budget_bytes=budget_bytes)
            seen = {name: tensor.clone() for name, tensor in found.items()}
        require_equal(found, tensors)
        require_equal(seen, tensors)


@gpu
def test_what_a_stream_drops_is_taken_over_when_its_consumer_is_through(tensors: dict[str, torch.Tensor]) -> None:
    device = resolve_device("auto")
    stream = module_of(device).Stream(device=device)
    found: dict[str, torch.Tensor] = {}
    with simdevice.delayed(LATE_SECONDS / 10), module_of(device).stream(stream):
        with stio.sync.open(MemoryRoot(checkpoint_files(tensors)), device=device, budget_bytes=1 << 20) as opened:
            for name, tensor in opened.stream():
                found[name] = tensor.clone()  # queued
                del tensor
        stream.synchronize()
    assert {name: bits_of(tensor.cpu()) for name, tensor in found.items()} == {
        name: bits_of(tensor) for name, tensor in tensors.items()
    }


@pytest.mark.slow
@gpu
def test_all_loads_share_a_copy_stream(torch_zygote: Zygote) -> None:
    """Memory that was freed belongs to the stream that it was allocated under. The pool's streams are taken in turn."""
    done = torch_zygote.run(
        """
        import sys
        import simdevice, torch
        if sys.argv[1] == "sim":
            simdevice.install()
        import stio.sync
        from fakes import MemoryRoot, checkpoint_files

        def next_stream():
            return torch.Stream(device=torch.device(sys.argv[1], 0)).stream_id

        distance = next_stream() - next_stream()
        before = next_stream()
        for _ in range(3):
            stio.sync.load(MemoryRoot(checkpoint_files({"w": torch.ones(1000)})), device="auto")
        assert before - next_stream() == 3 * distance, "two streams for three loads and all saves"
        """,
        resolve_device("auto").type,
    )
    assert done.returncode == 0, done.stderr
