"""Pinned memory: refused and asked for again, near its device, released with its last reference."""

from __future__ import annotations

import gc
import logging
import types
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import simdevice
import torch
from accelerators import busy_event, gpu, settled_pinned_bytes
from crash.zygote import Zygote
from fake_driver import FakeDriver
from support import eventually, needs_engine, settled

import stio
from stio import native
from stio.device import pinned as pinning
from stio.device.base import resolve_device
from stio.device.cuda import bytes_of
from stio.device.pinned import PinnedAllocator, drivers, is_pinned, node_of
from stio.runtime import memory
from stio.runtime.memory import Region

MIB = 1 << 20
DEVICE = torch.device("cuda:1")


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Pin without a device: memory of a tensor. True in the list: the next one is refused."""
    ahead: list[bool] = []

    def pin(nbytes: int, device: torch.device) -> Region:
        assert device == DEVICE
        if ahead and ahead.pop(0):
            raise RuntimeError("no more locked memory")
        region = memory.allocate(nbytes)
        region.owner.is_pinned = True
        return region

    monkeypatch.setattr(pinning, "pin", pin)
    return ahead


def test_what_was_refused_is_plain_and_not_asked_for_again(
    refusals: list[bool], caplog: pytest.LogCaptureFixture
) -> None:
    refusals += [False, True, False]
    allocate = PinnedAllocator(DEVICE)
    with caplog.at_level(logging.WARNING, "stio"):
        found = [allocate(4096) for _ in range(4)]
    assert [is_pinned(region) for region in found] == [True, False, False, False]
    assert [region.nbytes for region in found] == [4096] * 4
    assert refusals == [False]
    assert [record.message for record in caplog.records] == [
        "pinning host memory failed, copies to cuda:1 will be slower: no more locked memory"
    ]


def test_allocators_are_equal_if_memory_of_one_serves_for_the_other(refusals: list[bool]) -> None:
    first, second = PinnedAllocator(DEVICE), PinnedAllocator(torch.device("cuda:1"))
    assert first == second
    assert hash(first) == hash(second)
    assert first != PinnedAllocator(torch.device("cuda:0"))
    assert first != memory.allocate
    refusals.append(True)
    first(4096)
    assert first == first
    assert first != second
    assert second != first


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """What torch says about a device."""
    found = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=2)
    module = types.SimpleNamespace(get_device_properties=lambda device: found, device=lambda device: nullcontext())
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    node_of.cache_clear()
    yield found
    node_of.cache_clear()


# Who pins it, and when it is released.


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, properties: types.SimpleNamespace) -> FakeDriver:
    """The driver of `DEVICE`."""
    fake = FakeDriver()
    monkeypatch.setitem(drivers, "cuda", lambda device, stream: (fake.driver, 0))
    return fake


@needs_engine
def test_the_last_reference_releases_it(driver: FakeDriver) -> None:
    region = PinnedAllocator(DEVICE)(MIB)
    part, tensor = region.sub(4096, 4096), bytes_of(region)
    assert is_pinned(region) and is_pinned(part)
    assert driver.pinned == [MIB]
    tensor.fill_(7)
    del region, tensor
    gc.collect()
    assert part.tobytes() == bytes([7]) * 4096
    assert driver.pinned_bytes == MIB
    del part
    assert eventually(lambda: driver.pinned_bytes == 0)


@pytest.mark.slow
@needs_engine
def test_nothing_is_left_of_a_thousand_regions(driver: FakeDriver) -> None:
    allocate = PinnedAllocator(DEVICE)
    before = len(memory._mappings)
    for _ in range(1000):
        allocate(4096).write(0, b"1")
    assert len(driver.pinned) == 1000
    assert eventually(lambda: driver.pinned_bytes == 0)
    assert len(memory._mappings) <= before + 2000  # those that are released are dropped now and then


@needs_engine
def test_stats_count_it(driver: FakeDriver) -> None:
    before = settled(lambda: stio.stats().pinned_bytes)
    region = PinnedAllocator(DEVICE)(MIB)
    assert stio.stats().pinned_bytes == before + MIB
    del region
    assert eventually(lambda: stio.stats().pinned_bytes == before)


@pytest.mark.usefixtures("properties")
@pytest.mark.parametrize("why", ["no driver", "no library", "another kind of device"])
def test_without_a_driver_torch_pins(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    pinned, empty = [], torch.empty

    def allocate(nbytes: int, **keywords: Any) -> torch.Tensor:
        assert keywords.pop("pin_memory")
        pinned.append(weakref.ref(tensor := empty(nbytes, **keywords)))
        return tensor

    monkeypatch.setattr(torch, "empty", allocate)
    monkeypatch.setitem(drivers, "cuda", lambda device, stream: ("libcuda.so.1 is not here", 0))
    if why == "no library":
        monkeypatch.setattr(native, "available", lambda: False)
        monkeypatch.setitem(drivers, "cuda", lambda device, stream: pytest.fail("there is no engine"))
    region = PinnedAllocator(torch.device("xpu:0") if why == "another kind of device" else DEVICE)(MIB)
    assert is_pinned(region)
    region.write(0, b"here")
    tensor = pinned[0]()
    assert tensor is not None and bytes(tensor[:4].numpy()) == b"here"
    del tensor, region
    gc.collect()
    assert pinned[0]() is None


def test_memory_that_torch_pinned_for_a_parent_is_not_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.empty(8, dtype=torch.uint8)
    alive = weakref.ref(tensor)
    monkeypatch.setattr(pinning, "_of_torch", {1: tensor})
    monkeypatch.setattr(pinning, "_of_parent", [])
    pinning._keep_of_parent()  # as in a forked child
    pinning._of_torch.pop(1)
    del tensor
    assert alive() is not None


# The node of the host.


@needs_engine
@pytest.mark.parametrize("node", [None, 1])
def test_memory_is_pinned_on_the_node_of_its_device(
    monkeypatch: pytest.MonkeyPatch, driver: FakeDriver, node: int | None
) -> None:
    asked: list[Any] = []
    pinned: list[int | None] = []
    pin = native.pin

    def pin_there(driver: native.Driver, nbytes: int, where: int | None) -> Any:
        pinned.append(where)
        return pin(driver, nbytes, where)

    monkeypatch.setattr(pinning, "numa_node", lambda address: (asked.append(address), node)[1])
    monkeypatch.setattr(native, "pin", pin_there)
    for _ in range(2):
        assert is_pinned(PinnedAllocator(DEVICE)(4096))
    assert asked == ["0000:3b:02.0"]  # once
    assert pinned == [node, node]


def test_a_torch_that_does_not_tell_the_address(properties: types.SimpleNamespace) -> None:
    del properties.pci_domain_id
    assert node_of(DEVICE) is None


# The device's own.


@gpu
def test_torch_knows_that_it_is_pinned() -> None:
    """So its copies from and to it run beside the host."""
    device = resolve_device("auto")
    there = torch.arange(MIB, dtype=torch.int32).to(device).view(torch.uint8)
    torch.accelerator.synchronize(device)
    region = PinnedAllocator(device)(3 * MIB)
    tensor = bytes_of(region)
    assert tensor.is_pinned() and tensor[MIB:].is_pinned()
    assert not torch.empty(5).is_pinned()
    event = busy_event(device)
    tensor[: MIB // 2].copy_(there[: MIB // 2], non_blocking=True)
    assert not event.query()
    torch.accelerator.synchronize(device)
    assert torch.equal(tensor[: MIB // 2], there[: MIB // 2].cpu())


simulated = pytest.mark.skipif(not simdevice.installed(), reason="only the simulated device counts what is pinned")


@gpu
@simulated
@needs_engine
def test_memory_goes_back_to_the_system() -> None:
    before = settled_pinned_bytes()
    allocate = PinnedAllocator(resolve_device("auto"))
    regions = [allocate(MIB) for _ in range(3)]
    kept = regions[0]
    assert simdevice.pinned_bytes() == before + 3 * MIB
    regions.clear()
    assert eventually(lambda: simdevice.pinned_bytes() == before + MIB)
    assert kept.tobytes()


@pytest.mark.slow
@gpu
@simulated
@needs_engine
@pytest.mark.parametrize("ready", [False, True])
def test_memory_that_is_unpinned_early_is_noticed(torch_zygote: Zygote, ready: bool) -> None:
    """A control of what all tests require (`_nothing_is_unpinned_early`)."""
    done = torch_zygote.run(
        """
        import sys
        import simdevice, torch
        simdevice.install(delay_seconds=0.2)
        from fake_driver import _Table
        from stio.device.pinned import drivers
        from stio.device.cuda import bytes_of
        from stio.runtime import memory

        table = _Table.from_address(drivers["sim"](torch.device("sim:1"), None)[0].table)
        region = memory.allocate(1 << 20)
        there = torch.empty(1 << 20, dtype=torch.uint8, device="sim:1")
        assert table.pin(region.address, region.nbytes, 1) == 0
        there.copy_(bytes_of(region), non_blocking=True)
        if sys.argv[1] == "True":
            torch.accelerator.synchronize(1)
        assert table.unpin(region.address) == 0
        print(simdevice.num_unpinned_early())
        """,
        ready,
    )
    assert done.stdout == f"{int(not ready)}\n", done.stderr


@pytest.mark.slow
@gpu
@simulated
@needs_engine
def test_only_its_own_device_has_a_context(torch_zygote: Zygote) -> None:
    done = torch_zygote.run(
        """
        import simdevice, torch
        simdevice.install()
        from stio.device.pinned import PinnedAllocator, is_pinned
        from support import eventually

        region = PinnedAllocator(torch.device("sim:1"))(1 << 20)
        assert is_pinned(region) and torch.accelerator.current_device_index() == 0
        del region
        assert eventually(lambda: simdevice.pinned_bytes() == 0)
        print(simdevice.contexts())
        """
    )
    assert done.stdout == "{1}\n", done.stderr


@pytest.mark.slow
@gpu
@pytest.mark.parametrize("what", ["saver", "cache"])
def test_a_program_may_end_while_memory_is_returned(torch_zygote: Zygote, tmp_path: Path, what: str) -> None:
    """A thread that frees a tensor after the interpreter's end would abort the process."""
    done = torch_zygote.run(
        """
        import sys
        import simdevice, torch
        kind, what, path = sys.argv[1:]
        if kind == "sim":
            simdevice.install()
        import stio.sync

        there = {f"w{k}": torch.ones(1 << 20, dtype=torch.uint8, device=kind) for k in range(40)}
        if what == "saver":
            with stio.sync.Saver() as saver:
                saver.save(there, path).result()
        else:
            stio.sync.save(there, path)
            with stio.sync.HostCache(1 << 30) as cache:
                cache.prefetch(path)
        """,
        resolve_device("auto").type,
        what,
        str(tmp_path / "m.safetensors"),
    )
    assert done.returncode == 0, done.stderr
