"""Saves of tensors on a device: what was there at the call is saved, whatever its streams do before and after."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch as official
import torch
from accelerators import NEEDS_GPU, keep_busy
from support import assorted, ramp, require_equal

import stio
import stio.sync
from stio.device.base import resolve_device

Tensors = dict[str, torch.Tensor]
MIB = 1 << 20

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("auto", id="real", marks=NEEDS_GPU)]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    return resolve_device(request.param)


def busy(device: torch.device) -> None:
    if device.type != "cpu":
        keep_busy()


@pytest.fixture(params=[False, True], ids=["usual stream", "own stream"])
def training(request: pytest.FixtureRequest, device: torch.device) -> Iterator[None]:
    """Have a stream on which a training step would run."""
    module: Any = torch.get_device_module(device)
    with module.stream(module.Stream(device)) if request.param and device.type != "cpu" else nullcontext():
        yield


def require_saved(path: Path, expected: Tensors) -> None:
    found = official.load_file(path) if path.is_file() else stio.sync.load(path)
    require_equal(found, {name: tensor.cpu() for name, tensor in expected.items()})


def test_save_is_bit_equal(device: torch.device, tmp_path: Path) -> None:
    tensors = {name: tensor.to(device) for name, tensor in assorted().items()}
    stio.sync.save(tensors, tmp_path / "m.safetensors")
    require_saved(tmp_path / "m.safetensors", tensors)
    stio.sync.save(tensors, tmp_path / "model", max_shard_size="100KB")
    require_saved(tmp_path / "model", tensors)


def test_layouts(device: torch.device, tmp_path: Path) -> None:
    base = ramp(70, 90, 11, dtype=torch.int32).to(device)
    wave = torch.view_as_complex(torch.randn(40, 50, 2)).to(device)
    tensors = {
        "turned": base.permute(2, 0, 1), "part": base[3:9, ::2], "row": base[5, :, 3], "one": base[0, 0, 0],
        "conj": wave.conj(), "turned conj": wave.conj().t(), "neg": wave.conj().imag,
    }  # fmt: skip
    plain = {name: tensor.resolve_conj().resolve_neg().contiguous() for name, tensor in tensors.items()}
    stio.sync.save(tensors, tmp_path / "m.safetensors", shared="clone")
    require_saved(tmp_path / "m.safetensors", plain)


@pytest.mark.slow
@pytest.mark.parametrize("budget_bytes", [None, 8 * MIB])
def test_a_training_step_changes_them_at_once(
    device: torch.device, training: None, tmp_path: Path, budget_bytes: int | None
) -> None:
    """What its stream was told before the save is in it, what it is told when the save has returned is not."""
    tensors = {f"w{k}": torch.zeros(MIB, device=device) for k in range(8)} | {"b": torch.zeros(7, device=device)}
    pendings = []
    with stio.sync.Saver(budget_bytes=budget_bytes) as saver:
        for step in range(1, 4):
            busy(device)
            for tensor in tensors.values():
                tensor.fill_(step)
            pendings.append(saver.save(tensors, tmp_path / f"{step}.safetensors"))
            for tensor in tensors.values():
                tensor.fill_(-step)
        for pending in pendings:
            pending.result()
    for step in range(1, 4):
        found = official.load_file(tmp_path / f"{step}.safetensors")
        assert {float(value) for tensor in found.values() for value in tensor.unique()} == {float(step)}


@pytest.mark.matrix
def test_tensors_that_are_dropped_at_once(device: torch.device, training: None, tmp_path: Path) -> None:
    """Their memory may be written to again as soon as the save has returned."""
    with stio.sync.Saver() as saver:
        busy(device)
        tensors = {f"w{k}": torch.full((MIB,), float(k), device=device) for k in range(6)}
        pending = saver.save(tensors, tmp_path / "m.safetensors")
        tensors.clear()
        kept = [torch.full((MIB,), -1.0, device=device) for _ in range(12)]
        pending.result()
    assert len(kept) == 12
    found = official.load_file(tmp_path / "m.safetensors")
    assert {name: float(tensor.unique().item()) for name, tensor in found.items()} == {f"w{k}": k for k in range(6)}


@pytest.mark.anyio
async def test_on_a_loop(device: torch.device, tmp_path: Path) -> None:
    tensors = {f"w{k}": ramp(1 << 18, start=k).to(device) for k in range(5)}
    expected = {name: tensor.clone() for name, tensor in tensors.items()}
    async with stio.Saver() as saver:
        busy(device)
        pending = await saver.save(tensors, tmp_path / "m.safetensors")
        for tensor in tensors.values():
            tensor.zero_()
        await pending
    require_saved(tmp_path / "m.safetensors", expected)


def test_a_save_takes_no_memory_of_the_device(device: torch.device, tmp_path: Path) -> None:
    if device.type == "cpu":
        pytest.skip("counts a device's memory")
    module: Any = torch.get_device_module(device)
    tensors = {f"w{k}": torch.zeros(4 * MIB, device=device) for k in range(4)}
    torch.accelerator.synchronize(device)
    before = module.memory_allocated(device)
    module.reset_peak_memory_stats(device)
    stio.sync.save(tensors, tmp_path / "m.safetensors")
    assert module.max_memory_allocated(device) == module.memory_allocated(device) == before


def test_from_one_device_to_the_disk_and_back(device: torch.device, tmp_path: Path) -> None:
    tensors = {name: tensor.to(device) for name, tensor in assorted().items()}
    stio.sync.save(tensors, tmp_path / "m.safetensors")
    found = stio.sync.load(tmp_path / "m.safetensors", device=device)
    require_equal(found, tensors)
    assert {tensor.device for tensor in found.values()} == {device}
