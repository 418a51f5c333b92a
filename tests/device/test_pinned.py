"""Pinned memory: refused and asked for again, near its device, returned to the system."""

from __future__ import annotations

import logging
import threading
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import simdevice
import torch
from accelerators import gpu
from support import PATIENCE_SECONDS, eventually, run_python

from stio.device import pinned as pinning
from stio.device.base import resolve_device
from stio.device.pinned import PinnedAllocator, give_back, is_pinned
from stio.runtime import memory, numa, operation
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
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        return Region(tensor.data_ptr(), nbytes, tensor)

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


def test_pinned_regions_are_returned_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The call holds the GIL: it must not release many gigabytes at once. The thread that calls does not wait for it."""
    tensors = [torch.empty(8, dtype=torch.uint8) for _ in range(3)]
    alive = [weakref.ref(tensor) for tensor in tensors]
    regions = [Region(tensor.data_ptr(), 8, tensor) for tensor in tensors]
    regions.insert(1, memory.allocate(8))
    del tensors
    left: list[int] = []
    may_go_on = threading.Event()

    def empty() -> None:
        assert may_go_on.wait(PATIENCE_SECONDS)
        left.append(sum(tensor() is not None for tensor in alive))

    monkeypatch.setattr(pinning, "empty_host_cache", empty)
    give_back(regions)
    assert regions == []
    may_go_on.set()
    assert eventually(lambda: len(left) == 4)
    assert left == [2, 1, 0, 0]


@pytest.mark.parametrize("kept", [False, True])
def test_what_a_thread_holds_a_moment_longer_is_returned_too(monkeypatch: pytest.MonkeyPatch, kept: bool) -> None:
    """What is held for ever stays with torch."""
    monkeypatch.setattr(pinning, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr(pinning, "_NUM_POLLS", 20 if kept else 1_000_000)
    tensor = torch.empty(8, dtype=torch.uint8)
    alive, regions = weakref.ref(tensor), [Region(tensor.data_ptr(), 8, tensor)]
    found: list[bool] = []
    monkeypatch.setattr(pinning, "empty_host_cache", lambda: found.append(alive() is not None))
    give_back(regions)
    assert eventually(lambda: found)
    if not kept:
        del tensor
    assert eventually(lambda: len(found) == 2)
    assert found == [True, kept]


def test_plain_memory_asks_torch_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def called(*_: object, **__: object) -> None:
        raise AssertionError

    monkeypatch.setattr(pinning, "Operation", called)
    monkeypatch.setattr(pinning, "empty_host_cache", called)
    regions = [memory.allocate(8), memory.allocate(8)]
    give_back(regions)
    assert regions == []


def test_without_another_thread_torch_keeps_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(operation, "start_thread", refuse)
    tensor = torch.empty(8, dtype=torch.uint8)
    regions = [Region(tensor.data_ptr(), 8, tensor)]
    give_back(regions)
    assert regions == []


# The node of the host.


@pytest.fixture
def properties(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """What torch says about a device."""
    found = types.SimpleNamespace(pci_domain_id=0, pci_bus_id=0x3B, pci_device_id=2)
    module = types.SimpleNamespace(get_device_properties=lambda device: found, device=lambda device: nullcontext())
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    pinning.node_of.cache_clear()
    yield found
    pinning.node_of.cache_clear()


@pytest.mark.parametrize("node", [None, 1])
def test_memory_is_allocated_on_the_node_of_its_device(
    monkeypatch: pytest.MonkeyPatch, properties: types.SimpleNamespace, node: int | None
) -> None:
    """On a host with one node `numa` is told None: it calls nothing then."""
    asked: list[Any] = []
    now: list[int | None] = []
    empty = torch.empty

    @contextmanager
    def preferring(wanted: int | None) -> Iterator[None]:
        now.append(wanted)
        yield
        now.pop()

    def allocate(nbytes: int, **keywords: Any) -> torch.Tensor:
        assert keywords.pop("pin_memory")
        assert now == [node]
        return empty(nbytes, **keywords)

    monkeypatch.setattr(numa, "node_of", lambda address: (asked.append(address), node)[1])
    monkeypatch.setattr(numa, "preferring", preferring)
    monkeypatch.setattr(torch, "empty", allocate)
    for _ in range(2):
        assert is_pinned(PinnedAllocator(DEVICE)(4096))
    assert asked == ["0000:3b:02.0"]  # once
    assert now == []


def test_a_torch_that_does_not_tell_the_address(properties: types.SimpleNamespace) -> None:
    del properties.pci_domain_id
    assert pinning.node_of(DEVICE) is None


# The device's own.


@gpu
def test_memory_is_pinned() -> None:
    region = PinnedAllocator(resolve_device("auto"))(MIB)
    assert region.owner.is_pinned()
    assert region.nbytes == MIB


@gpu
@pytest.mark.skipif(not simdevice.installed(), reason="only the simulated device counts what is pinned")
def test_memory_goes_back_to_the_system() -> None:
    torch.accelerator.empty_host_cache()
    before = simdevice.pinned_bytes(with_cached=True)
    allocate = PinnedAllocator(resolve_device("auto"))
    regions = [allocate(MIB) for _ in range(3)]
    kept = regions[0]
    assert simdevice.pinned_bytes(with_cached=True) == before + 3 * MIB
    give_back(regions)
    assert eventually(lambda: simdevice.pinned_bytes(with_cached=True) == before + MIB)
    assert kept.tobytes()


@gpu
@pytest.mark.parametrize("what", ["saver", "cache"])
def test_a_program_may_end_while_memory_is_returned(tmp_path: Path, what: str) -> None:
    """A thread that frees a tensor after the interpreter's end would abort the process."""
    done = run_python(
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
