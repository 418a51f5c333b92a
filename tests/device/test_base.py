"""Which device a name means: that of the caller's thread, while loads run on threads of their own."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerators import gpu, module_of, needs_two_devices
from fakes import FakeDevice, MemoryRoot, checkpoint_files

import stio.sync
from stio.device import base
from stio.device.base import current_device, resolve_device, with_current_index
from stio.loading.options import LoadOptions

SECOND = torch.device("cuda", 1)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """Stand for a CUDA whose current device is a thread's own, and 0 in the beginning."""
    threads = threading.local()
    driver = types.SimpleNamespace(has_begun=True, threads=threads)
    module = types.SimpleNamespace(is_initialized=lambda: driver.has_begun)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(base, "_current_index", lambda: getattr(threads, "index", 0))
    threads.index = 1
    return driver


@pytest.mark.parametrize("device", ["auto", "cuda", torch.device("cuda")])
def test_a_device_is_the_caller_s(driver: types.SimpleNamespace, device: Any) -> None:
    assert current_device() == SECOND
    settings = LoadOptions(device=device)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend([settings.device, current_device()]))
    thread.start()
    thread.join()
    assert found == [SECOND, torch.device("cuda", 0)]
    cache = stio.sync.HostCache(1, device=device)
    assert cache._device == SECOND


def test_each_of_several_devices_is(driver: types.SimpleNamespace) -> None:
    fake = FakeDevice()
    wishes: dict[str, Any] = {"a": "cuda", "b": "cuda:0", "c": "cpu", "d": 3, "e": fake, "f": "auto", "g": "nonsense"}
    expected = wishes | {"a": SECOND, "f": SECOND}
    assert LoadOptions(device=wishes).device == expected
    place: Any = LoadOptions(device=wishes.get).device
    assert {name: place(name) for name in wishes} == expected


@pytest.mark.parametrize("device", ["cuda:0", 0, "cpu", "xpu", "nonsense", None, torch.device("cuda", 2), FakeDevice()])
def test_what_is_named_or_no_device_stays(driver: types.SimpleNamespace, device: Any) -> None:
    assert with_current_index(device) is device
    driver.has_begun = False
    assert with_current_index("cuda") == "cuda"


def test_nothing_is_begun_to_find_out(driver: types.SimpleNamespace) -> None:
    driver.has_begun = False
    assert current_device() is None
    assert LoadOptions(device="cuda").device == "cuda"
    assert stio.sync.HostCache(1)._device == "auto"


def test_here() -> None:
    found = current_device()
    assert found is None or found == resolve_device("auto")


@gpu
@needs_two_devices
@pytest.mark.parametrize(
    "device",
    [lambda kind: "auto", lambda kind: kind, lambda kind: {"": kind}, lambda kind: lambda name: kind],
    ids=["auto", "kind", "mapping", "callable"],
)
def test_a_load_goes_to_the_caller_s_device(device: Callable[[str], Any]) -> None:
    root = MemoryRoot(checkpoint_files({"w": torch.arange(5)}))
    second = torch.device(resolve_device("auto").type, 1)
    with module_of(second).device(1):
        assert stio.sync.load(root, device=device(second.type))["w"].device == second
