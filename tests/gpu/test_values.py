"""What arrives on a device: every dtype, casts, slices, parts on the CPU, files from a cache, modules, the drop-in."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerators import PLACES, Place, gpu
from fakes import FaultyRoot, write_checkpoint
from support import assorted, bits_of, ramp, require_equal, save_file
from torch import nn

import stio
import stio.sync
from stio.compat.safetensors import _open, safe_open
from stio.compat.safetensors.torch import load_file
from stio.device.base import resolve_device
from stio.storage.local import LocalRoot

Tensors = dict[str, torch.Tensor]
MIB = 1 << 20
F4 = getattr(torch, "float4_e2m1fn_x2", None)

on_places = pytest.mark.parametrize("place", PLACES, indirect=True)


def require_there(found: Tensors, place: Place) -> None:
    for name, tensor in found.items():
        assert tensor.device == place.torch_device, name
        assert tensor.untyped_storage().nbytes() == tensor.nbytes, name


@on_places
@pytest.mark.parametrize("budget_bytes", [64 << 10, 512 * MIB])
def test_every_dtype(place: Place, tmp_path: Path, budget_bytes: int) -> None:
    tensors = assorted() | {f"complex.{k}": ramp(999, k + 1, dtype=torch.complex64) for k in range(3)}
    found = stio.sync.load(write_checkpoint(tmp_path, tensors, 2), device=place.device, budget_bytes=budget_bytes)
    require_there(found, place)
    require_equal(found, tensors)


@pytest.mark.skipif(F4 is None, reason="this torch has no F4")
@on_places
def test_packed_f4_passes_through(place: Place, tmp_path: Path) -> None:
    """With the scales that belong to it, untouched, aligned or not."""
    raw = {f"w{k}": ramp(64, 33 + k, dtype=torch.uint8) for k in range(4)}
    scales = {f"s{k}": ramp(64, 3, dtype=torch.float8_e8m0fnu) for k in range(4)}
    tensors = {name: tensor.view(F4) for name, tensor in raw.items()} | scales
    found = stio.sync.load(write_checkpoint(tmp_path, tensors), device=place.device)
    require_there(found, place)
    for name, tensor in raw.items():
        assert found[name].dtype == F4
        assert torch.equal(found[name].view(torch.uint8).cpu(), tensor)
    require_equal({name: found[name] for name in scales}, scales)


@on_places
@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn], ids=str
)
def test_casts(place: Place, tmp_path: Path, dtype: torch.dtype) -> None:
    chance = torch.Generator().manual_seed(3)
    numbers = torch.randn(300, 70, generator=chance)
    floats = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2)
    tensors = {str(own): numbers.to(own) for own in floats}
    tensors |= {"wave": torch.view_as_complex(numbers.view(-1, 2)), "count": torch.arange(9)}
    found = stio.sync.load(write_checkpoint(tmp_path, tensors), device=place.device, dtype=dtype)
    require_there(found, place)
    expected = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    require_equal(found, expected)


INDICES: list[Any] = [
    slice(2, 9), (slice(None), slice(5, 17)), slice(None, None, 3), (slice(None, None, -2), slice(3, 40)), 7,
    (slice(4, 30, 5), slice(None, None, -1)), slice(3, 3),
    [slice(2, 9), slice(30, 36)], (slice(None, None, 2), [slice(40, 50), slice(3, 5)]),
]  # fmt: skip


@pytest.mark.matrix
@on_places
@pytest.mark.parametrize("index", INDICES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_slices(place: Place, tmp_path: Path, index: Any, dtype: torch.dtype) -> None:
    tensors = {"a": ramp(40, 50, dtype=dtype), "b": ramp(40, 50, dtype=dtype, start=5)}
    write_checkpoint(tmp_path, tensors)
    with stio.sync.open(tmp_path, device=place.device) as opened:
        part = opened.read("b", index)
    assert part.device == place.torch_device
    steps = index if isinstance(index, tuple) else (index,)
    expected = tensors["b"].view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize])
    for dim, step in enumerate(steps):
        if isinstance(step, int):
            expected = expected[step]
        elif isinstance(step, list):
            expected = torch.cat([expected.narrow(dim, part.start, part.stop - part.start) for part in step], dim)
        else:
            expected = expected.index_select(
                dim, torch.tensor(range(*step.indices(expected.shape[dim])), dtype=torch.int64)
            )
    assert bits_of(part) == bits_of(expected)


@pytest.mark.matrix
@on_places
def test_ranks_of_tensor_parallelism_read_and_move_their_own_bytes(place: Place, tmp_path: Path) -> None:
    tensors = {f"w{k}": ramp(256, 8192, start=k) for k in range(4)}
    write_checkpoint(tmp_path, tensors)
    root = FaultyRoot(LocalRoot(tmp_path))
    before = place.used_bytes()
    rows = {name: slice(64, 128) for name in tensors}
    found = stio.sync.load(root, slices=rows, device=place.device)
    require_equal(found, {name: tensor[64:128].clone() for name, tensor in tensors.items()})
    wanted = sum(tensor.nbytes for tensor in tensors.values()) // 4
    assert sum(read.nbytes for read in root.reads) <= wanted + 2 * MIB
    assert place.used_bytes() - before <= wanted + MIB
    columns = stio.sync.load(root, slices={n: (slice(None), slice(0, 2048)) for n in tensors}, device=place.device)
    require_equal(columns, {name: tensor[:, :2048].clone() for name, tensor in tensors.items()})


@pytest.mark.matrix
@on_places
@pytest.mark.parametrize("ask", ["mapping", "callable"])
def test_a_part_stays_on_the_cpu(place: Place, checkpoint: Path, tensors: Tensors, ask: str) -> None:
    devices: Any = {"large": place.device, "large.3": "cpu", "": "cpu"}
    if ask == "callable":
        mapping = devices
        devices = lambda name: mapping.get(name, mapping.get(name.partition(".")[0], "cpu"))  # noqa: E731
    found = stio.sync.load(checkpoint, device=devices, budget_bytes=8 * MIB)
    require_equal(found, tensors)
    on_cpu = {name for name in found if found[name].is_cpu}
    assert on_cpu == {n for n in tensors if not place.is_real or not n.startswith("large") or n == "large.3"}
    del found
    place.require_freed()


@pytest.mark.matrix
@pytest.mark.anyio
@on_places
async def test_what_is_promoted_comes_early(place: Place, checkpoint: Path, tensors: Tensors) -> None:
    async with stio.open(checkpoint, device=place.device, budget_bytes=2 * MIB) as opened, opened.stream() as stream:
        stream.promote(["large.6"])
        order = {name: tensor async for name, tensor in stream}
    require_equal(order, tensors)
    assert list(order).index("large.6") < len(order) // 2


# Modules.


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(50, 40), nn.ModuleList(nn.Linear(40, 40) for _ in range(6))
        self.head = nn.Linear(40, 50, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mean", torch.rand(40))


@on_places
@pytest.mark.parametrize("assign", [False, True])
def test_load_into(place: Place, tmp_path: Path, assign: bool) -> None:
    real = Model()
    state = {name: value for name, value in real.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "m.safetensors")
    model = Model().to(place.torch_device)
    model.head.weight = (
        model.embed.weight
    )  # torch parts tied weights when it moves them to a kind of device it does not know
    before = dict(model.named_parameters())
    report = stio.sync.load_into(model, tmp_path, assign=assign, device=place.device)
    assert report == stio.LoadReport((), ())
    require_equal(dict(model.state_dict()), dict(real.state_dict()))
    assert model.head.weight is model.embed.weight
    assert all((model.get_parameter(name) is old) == (not assign) for name, old in before.items())
    assert all(value.device == place.torch_device for value in model.state_dict().values())


@on_places
@pytest.mark.parametrize("assign", [False, True])
def test_load_into_a_module_with_a_load_hook(place: Place, tmp_path: Path, assign: bool) -> None:
    """What the hook gets is kept on the CPU if it is copied: the device may have no room for a second copy."""
    real, devices = Model(), []
    state = {name: value for name, value in real.state_dict().items() if name != "head.weight"}
    save_file(state, tmp_path / "m.safetensors")
    model = Model().to(place.torch_device)
    model.head.weight = model.embed.weight
    model.layers[2].register_load_state_dict_pre_hook(
        lambda module, state, *_: devices.extend(value.device.type for value in state.values())
    )
    report = stio.sync.load_into(model, tmp_path, assign=assign, device=place.device)
    assert report == stio.LoadReport((), ())
    assert devices == [place.torch_device.type if assign else "cpu"] * 2
    require_equal(dict(model.state_dict()), dict(real.state_dict()))
    assert model.head.weight is model.embed.weight
    assert all(value.device == place.torch_device for value in model.state_dict().values())


# Files from a cache.


@pytest.mark.slow
@on_places
def test_a_cache(place: Place, checkpoint: Path, tensors: Tensors, tmp_path: Path) -> None:
    """Twice out of host memory, after an eviction, and when a file has changed."""
    directory = shutil.copytree(checkpoint, tmp_path / "model")
    with stio.sync.HostCache(256 * MIB) as cache:
        cache.prefetch(directory)
        assert (cache._memory._accelerator is not None) == torch.accelerator.is_available()
        for k in range(2):
            require_equal(stio.sync.load(directory, device=place.device, cache=cache), tensors)
            assert (cache.stats().hits, cache.stats().misses) == (3 * (k + 1), 3)
        cache.evict()
        require_equal(stio.sync.load(directory, device=place.device, cache=cache), tensors)
        assert cache.stats().misses == 6
        changed = {name: tensor + 1 for name, tensor in tensors.items()}
        write_checkpoint(directory, changed, 3)
        require_equal(stio.sync.load(directory, device=place.device, cache=cache), changed)
        slices = {"large.2": slice(1, 3)}
        part = stio.sync.load(directory, names=["large.2"], slices=slices, device=place.device, cache=cache)
        assert torch.equal(part["large.2"].cpu(), changed["large.2"][1:3])
        del part
    place.require_freed()


# The drop-in.


@gpu
@pytest.mark.parametrize("backend", ["mmap", "pread"])
def test_load_file(tmp_path: Path, backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = assorted()
    file = save_file(tensors, tmp_path / "m.safetensors")
    device = resolve_device("auto")
    monkeypatch.setattr(_open, "_DEVICES", (*_open._DEVICES, device.type))  # the original's list has no simulated one
    for spelled in (device.type, str(device), device.index):
        found = load_file(file, device=spelled, backend=backend)
        require_equal(found, tensors)
        assert {tensor.device for tensor in found.values()} == {device}
    with safe_open(file, "pt", device=device.type, backend=backend) as opened:
        require_equal({name: opened.get_tensor(name) for name in opened.keys()}, tensors)  # noqa: SIM118
        part = opened.get_slice("large")[10:20, 5:50]
    assert part.device == device
    assert bits_of(part) == bits_of(tensors["large"][10:20, 5:50])
