"""Files to an accelerator: whole ones by the engine, with the original's errors; the CPU stays without it."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as official
import torch
from fakes import FakeDevice
from support import nothing_left, ramp, require_equal

from stio.compat.safetensors import SafetensorError, _tensors, safe_open
from stio.compat.safetensors.torch import load_file, load_model
from stio.device.base import resolve_device
from stio.errors import DeviceError, StorageError
from stio.storage.local import LocalFile

BACKENDS = ("mmap", "pread")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    return {
        "w": ramp(300, 400),
        "b": ramp(7, dtype=torch.bfloat16),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(3.0),
        "large": ramp(1_000_000),
    }


@pytest.fixture
def file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    path = tmp_path / "model.safetensors"
    official.save_file(tensors, path, {"stio.aliases": json.dumps({"tied": "w"})})
    return path


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Stand for "cuda:0"."""
    fake = FakeDevice()
    monkeypatch.setattr(_tensors, "served", lambda device: fake if device in ("cuda:0", 0) else None)
    return fake


@pytest.mark.matrix
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("spelled", ["cuda", "cuda:0", 0, torch.device("cuda")])
def test_all_of_a_file(
    file: Path, tensors: dict[str, torch.Tensor], device: FakeDevice, backend: str, spelled: Any
) -> None:
    with nothing_left():
        found = load_file(file, device=spelled, backend=backend)
        assert list(found) == list(official.load_file(file))  # the key that ties names is stio's own
        require_equal(found, tensors)
        assert device.num_copies > 0
        with safe_open(file, "pt", device=spelled, backend=backend) as opened:
            require_equal(opened.get_tensors(), tensors)
            assert opened.metadata() == {"stio.aliases": '{"tied": "w"}'}
        with pytest.raises(SafetensorError, match="File is closed"):
            opened.get_tensors()
    assert device.num_pending == 0


def test_the_file_that_was_opened_is_read(file: Path, tensors: dict[str, torch.Tensor], device: FakeDevice) -> None:
    for backend in BACKENDS:
        official.save_file(tensors, file)
        with safe_open(file, "pt", device="cuda", backend=backend) as opened:
            official.save_file({"other": torch.zeros(3)}, file.parent / "new")
            os.replace(file.parent / "new", file)
            require_equal(opened.get_tensors(), tensors)


def test_a_module(file: Path, tensors: dict[str, torch.Tensor], device: FakeDevice) -> None:
    module = torch.nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, torch.zeros_like(tensor))
    assert load_model(module, file, device="cuda") == (set(), [])
    require_equal(module.state_dict(), tensors)
    assert device.num_copies > 0


def test_a_device_that_the_engine_does_not_serve_is_torch_s(
    file: Path, tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Any] = []

    def to(self: torch.Tensor, device: Any) -> torch.Tensor:
        moved.append(device)
        return self

    monkeypatch.setattr(_tensors, "served", lambda device: None)
    monkeypatch.setattr(torch.Tensor, "to", to)
    require_equal(load_file(file, device="xla"), tensors)
    assert moved == ["xla:0"] * len(tensors)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_a_device_that_is_not_there(file: Path) -> None:
    for device in ("cuda", "cuda:5", "xpu", "mps"):
        assert _tensors.served(device) is None
    with pytest.raises((RuntimeError, AssertionError)):
        load_file(file, device="cuda")


@pytest.mark.parametrize("has_streams", [False, True])
def test_what_is_served(monkeypatch: pytest.MonkeyPatch, has_streams: bool) -> None:
    found = torch.device("cuda", 1)
    monkeypatch.setattr(_tensors, "resolve_device", lambda device: found if device == 1 else resolve_device("cpu"))
    monkeypatch.setattr(_tensors.TorchAccelerator, "supports", lambda device: has_streams)
    assert _tensors.served(1) == (found if has_streams else None)
    assert _tensors.served("cpu") is None


# Errors.


def test_a_dtype_that_torch_has_not(tmp_path: Path, device: FakeDevice) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path = tmp_path / "f"
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"abc")
    with pytest.raises(SafetensorError, match="^Dtype not understood: F6_E2M3") as caught:
        load_file(path, device="cuda")
    assert isinstance(caught.value, TypeError)


def test_a_device_that_is_full(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensors, "served", lambda device: FakeDevice(memory_bytes=1000))
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        load_file(file, device="cuda")


def test_a_device_that_fails(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_tensors, "served", lambda device: FakeDevice(fail_copy=1))
    with pytest.raises(SafetensorError, match="failed") as caught:
        load_file(file, device="cuda")
    assert isinstance(caught.value.__cause__, DeviceError)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_file_that_is_cut(file: Path, device: FakeDevice, backend: str) -> None:
    with safe_open(file, "pt", device="cuda", backend=backend) as opened:
        os.truncate(file, 100_000)
        with pytest.raises(SafetensorError, match="ends before"):
            opened.get_tensors()
    assert device.num_pending == 0


def test_a_disk_that_fails(file: Path, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    with safe_open(file, "pt", device="cuda") as opened:
        real = LocalFile.read_into

        def read_into(self: LocalFile, offset: int, regions: Any) -> None:
            real(self, offset, regions)
            raise StorageError("broken", errno=errno.EIO)

        monkeypatch.setattr(LocalFile, "read_into", read_into)
        with pytest.raises(OSError) as caught:
            opened.get_tensors()
        assert caught.value.errno == errno.EIO


def test_leaving_a_file_that_is_being_read(file: Path, tensors: dict[str, torch.Tensor], device: FakeDevice) -> None:
    opened = safe_open(file, "pt", device="cuda")
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(opened.get_tensors())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    opened.__exit__(None, None, None)
    assert len(results) == 4
    for found in results:
        require_equal(found, tensors)


@pytest.mark.slow
def test_the_cpu_needs_no_engine(file: Path, torch_zygote: Any) -> None:
    code = (
        "import sys; from stio.compat.safetensors import safe_open\n"
        f"with safe_open({str(file)!r}, 'pt') as f: f.get_tensors()\n"
        "print(sys.modules['stio.runtime.reports'].stats().num_loads_done, sys.modules['stio.native'].pinned_bytes())"
    )
    found = subprocess.run([torch_zygote.python, "-c", code], check=True, capture_output=True, text=True).stdout
    assert found.strip() == "0 0"
