"""One load to several devices: each tensor where its name says, under one budget, and everything ended everywhere."""

from __future__ import annotations

import gc
import json
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from fakes import FakeDevice, FaultyRoot, MemoryRoot, checkpoint_files
from support import eventually, nothing_left, ramp, require_equal, save_file, save_sharded
from torch import nn

import stio
import stio.sync
from stio.errors import DeviceError, DeviceMemoryError, TensorNotFoundError

Tensors = dict[str, torch.Tensor]


class Known(FakeDevice):
    """A fake that knows its own memory again."""

    _owner_of: dict[int, Known] = {}  # by address; an address that was freed may be another device's next

    def empty(self, nbytes: int) -> torch.Tensor:
        tensor = super().empty(nbytes)
        self._owner_of[tensor.data_ptr()] = self
        return tensor

    def holds(self, tensor: torch.Tensor) -> bool:
        return self._owner_of.get(tensor.data_ptr()) is self


def where(tensor: torch.Tensor, *devices: Known) -> list[int]:
    return [k for k, device in enumerate(devices) if device.holds(tensor)]


def require_freed(*devices: FakeDevice) -> None:
    deadline = time.monotonic() + 30
    while any(device.used_bytes or device.staging_bytes for device in devices):
        gc.collect()
        assert time.monotonic() < deadline, [(device.used_bytes, device.staging_bytes) for device in devices]
        threading.Event().wait(0.001)
    assert not any(device.num_pending for device in devices)


@pytest.fixture(scope="module")
def tensors() -> Tensors:
    chance = torch.Generator().manual_seed(0)
    layers = {
        f"layers.{k}.{name}": torch.randn(size, generator=chance)
        for k in range(6)
        for name, size in (("w", 90_000), ("norm.scale", 300), ("b", 7))
    }
    return {
        "embed.w": torch.randn(50_000, generator=chance),
        **layers,
        "flag": torch.tensor([True]),
        "e": torch.ones(0),
    }


@pytest.fixture(scope="module")
def files(tensors: Tensors) -> dict[str, bytes]:
    return checkpoint_files(tensors, 2)


def by_layer(first: object, second: object, rest: object = "cpu") -> dict[str, Any]:
    """Place a pipeline: layers on two stages, their norms on the first, all else elsewhere."""
    stages = {f"layers.{k}": first if k < 3 else second for k in range(6)}
    return {**stages, "layers.5.norm": first, "": rest}


def expected_stage(name: str) -> list[int]:
    if not name.startswith("layers."):
        return []
    return [0] if int(name.split(".")[1]) < 3 or name.startswith("layers.5.norm") else [1]


def by_stage(devices: dict[tuple[int, ...], Any], name: str) -> Any:
    return devices[tuple(expected_stage(name))]


@pytest.mark.matrix
@pytest.mark.parametrize("budget_bytes", [1 << 16, 1 << 20, 512 << 20])
@pytest.mark.parametrize("ask", ["mapping", "callable"])
def test_each_tensor_goes_where_its_name_says(
    files: dict[str, bytes], tensors: Tensors, ask: str, budget_bytes: int
) -> None:
    first, second = Known(), Known()
    devices: Any = by_layer(first, second)
    if ask == "callable":
        devices = partial(by_stage, {(): "cpu", (0,): first, (1,): second})
    found = stio.sync.load(MemoryRoot(files), device=devices, budget_bytes=budget_bytes)
    assert list(found) == [name for file in sorted(files) if file.endswith("s") for name in order(files[file])]
    require_equal(found, tensors)
    for name, tensor in found.items():
        if tensor.numel():
            assert where(tensor, first, second) == expected_stage(name), name
    assert first.peak_staging_bytes + second.peak_staging_bytes <= max(budget_bytes // 2, 2 * 8 * 4096)
    del found, tensor
    require_freed(first, second)


def order(data: bytes) -> list[str]:
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    entries = [(entry["data_offsets"], name) for name, entry in header.items() if name != "__metadata__"]
    return [name for _, name in sorted(entries, key=lambda entry: entry[0])]


@pytest.mark.parametrize("memory", ["auto", "map", "lazy", "copy"])
def test_files_on_disk_to_the_cpu_and_a_device(tmp_path: Path, tensors: Tensors, memory: Any) -> None:
    directory = save_sharded(tensors, tmp_path / "model", 3)
    device = Known()
    found = stio.sync.load(directory, device={"layers.1": device, "": "cpu"}, memory=memory)
    require_equal(found, tensors)
    for name, tensor in found.items():
        assert bool(where(tensor, device)) == name.startswith("layers.1."), name


@pytest.mark.matrix
@pytest.mark.anyio
async def test_streams_and_reads_of_an_open_checkpoint(files: dict[str, bytes], tensors: Tensors) -> None:
    first, second = Known(), Known()
    async with stio.open(MemoryRoot(files), device=by_layer(first, second), dtype=torch.float64) as checkpoint:
        seen = {name: tensor async for name, tensor in checkpoint.stream()}
        require_equal(seen, {n: t.double() if t.is_floating_point() else t for n, t in tensors.items()})
        rows = await checkpoint.read("layers.4.w", slice(5, 90_000, 3))
        assert torch.equal(rows, tensors["layers.4.w"][5::3].double())
    first, second = Known(), Known()  # memory of the others, freed by the cast, may be used again
    async with stio.open(MemoryRoot(files), device=by_layer(first, second)) as checkpoint:
        part = await checkpoint.read("layers.4.w", slice(5, 99))
        assert torch.equal(part, tensors["layers.4.w"][5:99])
        assert where(part, first, second) == [1]
        some = await checkpoint.load(lambda name: name.endswith("scale"))
        assert {name: where(tensor, first, second) for name, tensor in some.items()} == {
            f"layers.{k}.norm.scale": [0 if k < 3 or k == 5 else 1] for k in range(6)
        }


def test_the_caller_s_mapping_may_change_afterwards(files: dict[str, bytes], tensors: Tensors) -> None:
    first, second = Known(), Known()
    devices: dict[str, Any] = {"": first}
    with stio.sync.open(MemoryRoot(files), device=devices) as checkpoint:
        devices[""] = second
        require_equal(checkpoint.load(), tensors)
    assert (first.num_copies > 0, second.num_copies) == (True, 0)


def test_nothing_goes_anywhere() -> None:
    assert stio.sync.load(MemoryRoot(checkpoint_files({})), device={}) == {}
    root = MemoryRoot(checkpoint_files({"w": ramp(3)}))
    assert stio.sync.load(root, names=[], device={}) == {}
    assert stio.sync.load(root, names=lambda name: False, device=lambda name: 1 / 0) == {}


# Tied names.


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    aliases = {"head.w": "embed.w", "twin.w": "embed.w"}
    return save_file(
        {"embed.w": ramp(64, 9), "norm.w": ramp(9)}, tmp_path / "m.safetensors", {"stio.aliases": json.dumps(aliases)}
    )


def test_tied_names_on_two_devices_are_a_tensor_on_each(tied: Path) -> None:
    first, last = Known(), Known()
    found = stio.sync.load(tied, device={"embed": first, "norm": first, "head": last, "twin": first})
    assert list(found) == ["embed.w", "norm.w", "head.w", "twin.w"]
    assert found["twin.w"] is found["embed.w"]
    assert found["head.w"] is not found["embed.w"]
    assert where(found["embed.w"], first, last) == [0]
    assert where(found["head.w"], first, last) == [1]
    for name in ("embed.w", "head.w"):
        assert torch.equal(found[name], ramp(64, 9))
    found["head.w"].zero_()
    assert torch.equal(found["embed.w"], ramp(64, 9))


def test_an_alias_alone_goes_by_its_own_name(tied: Path) -> None:
    first, last = Known(), Known()
    found = stio.sync.load(tied, names="head.w", device={"embed": first, "head": last})
    assert list(found) == ["head.w"]
    assert where(found["head.w"], first, last) == [1]
    assert first.num_copies == 0
    with stio.sync.open(tied, device={"embed": first, "head": last}) as checkpoint:
        row = checkpoint.read("head.w", 3)
    assert torch.equal(row, ramp(64, 9)[3])
    assert where(row, first, last) == [1]


# Modules.


class Model(nn.Module):
    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed, self.norm, self.head, self.twin = (nn.Module() for _ in range(4))
        for module, shape in ((self.embed, (64, 9)), (self.norm, (9,)), (self.head, (64, 9)), (self.twin, (64, 9))):
            module.w = nn.Parameter(torch.zeros(shape), requires_grad=False)
        if is_tied:
            self.head.w = self.twin.w = self.embed.w


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_module_s_tensors_are_replaced_by_those_of_their_devices(tied: Path, is_tied: bool) -> None:
    first, last = Known(), Known()
    model = Model(is_tied=is_tied)
    stio.sync.load_into(model, tied, assign=True, device={"embed": first, "head": last, "": "cpu"})
    assert torch.equal(model.embed.w, ramp(64, 9))
    assert where(model.embed.w, first, last) == [0]
    assert where(model.norm.w, first, last) == []
    if is_tied:  # one parameter: it is where the first of its names goes
        assert model.head.w is model.twin.w is model.embed.w
    else:
        assert where(model.head.w, first, last) == [1]
        assert where(model.twin.w, first, last) == []
        assert torch.equal(model.head.w, ramp(64, 9))


def test_a_module_that_is_copied_into_decides_itself(tied: Path) -> None:
    device = Known()
    model = Model(is_tied=True)
    stio.sync.load_into(model, tied, device={"nothing that is there": device})
    assert torch.equal(model.head.w, ramp(64, 9))
    assert device.num_staging == 0


# What goes wrong.


def test_a_name_that_goes_nowhere_is_named_before_anything_is_read(files: dict[str, bytes]) -> None:
    root, device = FaultyRoot(MemoryRoot(files)), Known()
    with pytest.raises(DeviceError, match="has no entry for a tensor") as caught:
        stio.sync.load(root, device={"layers": device, "flag": "cpu", "e": "cpu"})
    assert caught.value.requested == "embed.w"
    assert root.num_reads == 3  # the index and two headers
    assert root.num_open == 0
    assert device.num_staging == 0


@pytest.mark.parametrize("device", [{"": "nonsense"}, {"": None}, lambda name: "meta"])
def test_a_device_that_is_none(files: dict[str, bytes], device: Any) -> None:
    with pytest.raises(DeviceError, match="device= leads '"):
        stio.sync.load(MemoryRoot(files), device=device)


def test_an_unknown_name_is_not_asked_about(files: dict[str, bytes]) -> None:
    with pytest.raises(TensorNotFoundError):
        stio.sync.load(MemoryRoot(files), names=["nope"], device={"layers": "cpu"})


def test_wrong_mappings_are_refused_at_the_call() -> None:
    with pytest.raises(TypeError, match="from names, not from 0"):
        stio.open("nowhere", device={0: "cpu"})  # type: ignore[dict-item]


@pytest.mark.parametrize("fault", ["refuse_copy", "fail_copy", "memory_bytes", "refuse_staging"])
def test_one_device_fails(files: dict[str, bytes], fault: str) -> None:
    """Whatever one refuses, nothing goes on at the others."""
    bad, good = Known(**{fault: 2 if fault != "memory_bytes" else 400_000}), Known(delay_seconds=0.002)
    errors: dict[str, type[Exception]] = {"memory_bytes": DeviceMemoryError, "refuse_staging": MemoryError}
    with pytest.raises(errors.get(fault, DeviceError)) as caught:
        stio.sync.load(MemoryRoot(files), device=by_layer(good, bad), budget_bytes=1 << 20)
    assert (good.num_pending, bad.num_pending) == (0, 0)
    del caught
    require_freed(bad, good)


def test_p8_all_devices_together_stay_within_the_budget(files: dict[str, bytes], tensors: Tensors) -> None:
    devices, budget = [Known() for _ in range(3)], 2 << 20
    with stio.sync.open(
        MemoryRoot(files), device=lambda name: devices[sum(name.encode()) % 3], budget_bytes=budget
    ) as checkpoint:
        peak = 0
        for name, tensor in checkpoint.stream():
            assert torch.equal(tensor, tensors[name])
            del tensor
            peak = max(peak, sum(device.staging_bytes + device.used_bytes for device in devices))
    assert peak <= budget + max(tensor.nbytes for tensor in tensors.values())
    assert sum(device.peak_staging_bytes for device in devices) <= budget // 2


def test_p4_closing_waits_for_the_copies_of_all_devices(files: dict[str, bytes]) -> None:
    first, second = Known(manual=True), Known(manual=True)
    with nothing_left():
        with stio.sync.open(MemoryRoot(files), device=by_layer(first, second), budget_bytes=2 << 20) as checkpoint:
            stream = checkpoint.stream()
            stream.__enter__()
            for device in (first, second):
                device.wait_for_pending(1)
            closer = threading.Thread(target=stream.close)
            closer.start()
            while closer.is_alive():
                first.step()
                if not first.num_pending:
                    second.step()
                closer.join(0.001)
            assert (first.num_pending, second.num_pending) == (0, 0)
        del stream
        require_freed(first, second)


@pytest.mark.anyio
@pytest.mark.parametrize("num_rounds", [0, 1, 3])
async def test_p4_a_cancel(files: dict[str, bytes], num_rounds: int) -> None:
    first, second = Known(delay_seconds=0.002), Known(delay_seconds=0.002)
    with anyio.CancelScope() as scope:
        async with stio.open(MemoryRoot(files), device=by_layer(first, second), budget_bytes=1 << 18) as checkpoint:
            taken = 0
            async for _ in checkpoint.stream():
                if (taken := taken + 1) > num_rounds:
                    scope.cancel()
    assert scope.cancelled_caught
    assert (first.num_pending, second.num_pending) == (0, 0)


def test_a_callable_runs_beside_the_caller(files: dict[str, bytes]) -> None:
    threads: set[int] = set()
    names: list[str] = []

    def place(name: str) -> str:
        threads.add(threading.get_ident())
        names.append(name)
        return "cpu"

    found = stio.sync.load(MemoryRoot(files), device=place)
    assert threading.get_ident() not in threads
    assert sorted(names) == sorted(found)  # once each


def test_errors_of_the_callable_come_out_as_they_are(files: dict[str, bytes]) -> None:
    class Mine(Exception):
        pass

    def place(name: str) -> str:
        raise Mine(name)

    root = FaultyRoot(MemoryRoot(files))
    with pytest.raises(Mine):
        stio.sync.load(root, device=place)
    assert eventually(lambda: root.num_open == 0)
