"""Loads by GPUDirect Storage: the same tensors, no host memory, no slot written too early; and the fallback to staged reads."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerators import gpu, keep_busy, module_of
from kvikio_stand_in import Kvikio
from support import eventually, nothing_left

import stio
import stio.sync
from stio.device.base import resolve_device
from stio.device.cuda import TorchAccelerator
from stio.device.group_memory import bytes_of_storage
from stio.errors import DeviceError, DeviceMemoryError, TruncatedError
from stio.loading import page_cache
from stio.loading.gds_path import GdsDevice
from stio.runtime.trace import Trace
from stio.testing import FakeDevice, write_checkpoint

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="GPUDirect Storage is Linux's"),
    pytest.mark.usefixtures("plain_workers"),
]

BUDGET = 512 << 10
"""Slots of 16 KiB: a load of many blocks."""


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    small = {f"small.{k:03}": torch.randn(k % 50 + 1, generator=chance) for k in range(100)}
    return small | {f"large.{k}": torch.randn(400, 400 + k, generator=chance) for k in range(6)}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("gds"), tensors, 2)


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch):
    """Take all files for cold: what was just written is not."""
    monkeypatch.setattr(page_cache, "SMALL_LOAD_BYTES", 0)
    monkeypatch.setattr(page_cache, "resident_fraction", lambda file: 0.0)
    with nothing_left():
        yield


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(delay_seconds=0.0001)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "stio")
    return lambda: [record.getMessage() for record in caplog.records]


def load(place: Path, device: Any, **keywords: Any) -> dict[str, torch.Tensor]:
    return stio.sync.load(place, device=device, **{"memory": "gds", "budget_bytes": BUDGET, **keywords})


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return set(found) == set(expected) and all(torch.equal(found[name], t) for name, t in expected.items())


def require_freed(device: FakeDevice, kvikio: Kvikio) -> None:
    def is_freed() -> bool:
        gc.collect()
        return not (device.used_bytes or device.staging_bytes or device.num_pending)

    assert eventually(is_freed), (device.used_bytes, device.staging_bytes, device.num_pending)
    assert (kvikio.num_open, kvikio.overwritten) == (0, False)


@pytest.mark.parametrize("budget_bytes", [64 << 10, BUDGET, 512 << 20])
def test_no_host_memory_and_no_slot_too_early(place, tensors, device, monkeypatch, warnings, budget_bytes) -> None:
    kvikio, trace = Kvikio(device).install(monkeypatch), Trace()
    found = load(place, device, budget_bytes=budget_bytes, trace=trace)
    assert same(found, tensors)
    assert kvikio.read_bytes >= sum(t.nbytes for t in tensors.values())
    assert device.num_staging == 0
    assert warnings() == []
    assert {span.detail for span in trace.spans if span.name == "read"} == {"GdsPath"}
    del found
    require_freed(device, kvikio)


def test_streams_casts_and_modules(place, tensors, device, monkeypatch) -> None:
    kvikio = Kvikio(device).install(monkeypatch)
    options = {"device": device, "memory": "gds", "budget_bytes": BUDGET, "dtype": torch.bfloat16}
    with stio.sync.open(place, **options) as checkpoint:
        found = dict(checkpoint.stream())
    assert same(found, {name: t.bfloat16() for name, t in tensors.items()})
    assert device.num_staging == 0
    del found
    require_freed(device, kvikio)


def test_slices_of_columns(place, tensors, device, monkeypatch) -> None:
    """Read as rows, cut on the device."""
    kvikio = Kvikio(device).install(monkeypatch)
    cut = np.s_[:, 7:90]
    found = load(place, device, names=["large.1"], slices={"large.1": cut})
    assert same(found, {"large.1": tensors["large.1"][cut]})
    assert device.num_staging == 0
    del found
    require_freed(device, kvikio)


def test_scattered_pieces_go_through_the_host(place, tensors, device, monkeypatch) -> None:
    """Each would be a read of the disk's."""
    kvikio = Kvikio(device).install(monkeypatch)
    names = [f"small.{k:03}" for k in range(0, 100, 4)]  # every other one of the first shard
    found = load(place, device, names=names)
    assert same(found, {name: tensors[name] for name in names})
    assert kvikio.num_reads == 1  # the trial
    assert device.num_staging == 1
    del found
    require_freed(device, kvikio)


def test_what_the_page_cache_holds_is_staged(place, tensors, device, monkeypatch) -> None:
    kvikio = Kvikio(device).install(monkeypatch)
    monkeypatch.setattr(page_cache, "resident_fraction", lambda file: 1.0)
    assert same(load(place, device), tensors)
    assert (kvikio.num_opened, device.num_staging > 0) == (0, True)


def test_tensors_on_the_cpu_beside(place, tensors, device, monkeypatch) -> None:
    kvikio = Kvikio(device).install(monkeypatch)
    found = load(place, {"": device, "large.3": "cpu"})
    assert same(found, tensors)
    assert kvikio.num_reads
    del found
    require_freed(device, kvikio)


# Fallback.


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ({"is_there": False}, "not set up"),
        ({"refuse_open": 1}, "no such driver"),
        ({"refuse_open": 2}, "no such driver"),
        ({"does": "nothing"}, "other bytes"),
        ({"does": "wrong"}, "other bytes"),
        ({"fail_read": 1}, "I/O error"),
    ],
    ids=str,
)
def test_what_does_not_serve_is_staged(place, tensors, device, monkeypatch, warnings, fault, says) -> None:
    """Found out before the first tensor; and said once, not for each file."""
    kvikio = Kvikio(device, **fault).install(monkeypatch)
    found = load(place, device)
    assert same(found, tensors)
    (warning,) = warnings()
    assert says in warning
    del found
    require_freed(device, kvikio)


def test_failing_read_at_every_number(place, tensors, monkeypatch, warnings) -> None:
    """The staged path reads the rest into the same memory, whichever block failed."""
    number = 0
    while True:
        number += 1
        device = FakeDevice(delay_seconds=0.0001)
        kvikio = Kvikio(device, fail_read=number).install(monkeypatch)
        found = load(place, device, budget_bytes=4 << 20)
        assert same(found, tensors)
        del found
        require_freed(device, kvikio)
        if kvikio.num_reads < number:
            break
        assert len(warnings()) == number  # one for each load, whichever files it had
    assert number > 10


@pytest.mark.parametrize("num_slots", [1, 2, 5, 20])
@pytest.mark.parametrize(("budget_bytes", "slot_bytes"), [(BUDGET, 16 << 10), (64 << 20, 2 << 20)])
def test_c96_slots_are_freed_for_tensors(
    place, tensors, monkeypatch, warnings, num_slots, budget_bytes, slot_bytes
) -> None:
    """What fits in a staged load fits: slots that were allocated first are freed when a tensor needs their memory."""
    total = sum(t.nbytes for t in tensors.values())
    device = FakeDevice(delay_seconds=0.0001, memory_bytes=total + num_slots * slot_bytes)
    kvikio = Kvikio(device).install(monkeypatch)
    found = load(place, device, budget_bytes=budget_bytes)
    assert same(found, tensors)
    assert len(warnings()) <= 1
    del found
    require_freed(device, kvikio)


def test_c96_out_of_memory_at_every_allocation(place, tensors, monkeypatch) -> None:
    """Of a slot, of the trial's memory: staged. Of a tensor: tried once more without the slots."""

    class Refusing(FakeDevice):
        left = 0

        def empty(self, nbytes: int) -> torch.Tensor:
            self.left -= 1
            if self.left == 0:
                raise DeviceMemoryError("full, as it was asked", needed_bytes=nbytes)
            return super().empty(nbytes)

    number, device = 0, Refusing()
    while device.left <= 0:
        number += 1
        device = Refusing(delay_seconds=0.0001)
        device.left = number
        kvikio = Kvikio(device).install(monkeypatch)
        found = load(place, device, budget_bytes=8 << 20)
        assert same(found, tensors)
        del found
        require_freed(device, kvikio)
    assert number > 10


def test_no_room_for_the_tensors(place, tensors, monkeypatch) -> None:
    device = FakeDevice(delay_seconds=0.0001, memory_bytes=sum(t.nbytes for t in tensors.values()) // 2)
    kvikio = Kvikio(device).install(monkeypatch)
    with pytest.raises(DeviceMemoryError):
        load(place, device)
    require_freed(device, kvikio)


@pytest.mark.parametrize("number", [4, 5, 6, 9])
def test_a_copy_that_fails(place, monkeypatch, number) -> None:
    """Whichever ring it came from, both are given back, and the files of both."""
    device = FakeDevice(delay_seconds=0.0001, fail_copy=number)
    kvikio = Kvikio(device, fail_read=12).install(monkeypatch)
    with pytest.raises(DeviceError):
        load(place, device)
    require_freed(device, kvikio)


def test_both_rings_are_within_the_budget(place, device, monkeypatch) -> None:
    kvikio = Kvikio(device, fail_read=40).install(monkeypatch)
    held: list[int] = []
    load(place, device, progress=lambda event: held.append(stio.stats().staging_held_bytes))
    assert 0 < max(held) <= BUDGET // 2
    assert kvikio.num_reads >= 40


def test_where_the_kernel_does_not_say_what_is_in_memory(place, tensors, device, monkeypatch) -> None:
    """`memory="gds"` decides then."""
    kvikio = Kvikio(device).install(monkeypatch)
    monkeypatch.setattr(page_cache, "resident_fraction", lambda file: page_cache.UNKNOWN)
    assert same(load(place, device), tensors)
    assert kvikio.num_opened == 2


def test_c90_truncated_file(tmp_path, tensors, device, monkeypatch) -> None:
    kvikio = Kvikio(device).install(monkeypatch)
    place = write_checkpoint(tmp_path / "m", tensors)
    with stio.sync.open(place, device=device, memory="gds", budget_bytes=BUDGET) as checkpoint:
        with open(place / "model.safetensors", "rb+") as file:
            file.truncate(2_000_000)
        with pytest.raises(TruncatedError):
            list(checkpoint.stream())
    require_freed(device, kvikio)


def test_c90_truncated_second_file(tmp_path, tensors, device, monkeypatch) -> None:
    """What was opened for the first is closed."""
    kvikio = Kvikio(device).install(monkeypatch)
    place = write_checkpoint(tmp_path / "m", tensors, 2)
    with stio.sync.open(place, device=device, memory="gds", budget_bytes=BUDGET) as checkpoint:
        with open(place / "model-00002-of-00002.safetensors", "rb+") as file:
            file.truncate(800_000)
        with pytest.raises(TruncatedError):
            list(checkpoint.stream())
    assert kvikio.num_opened == 2
    require_freed(device, kvikio)


def test_cancel(place, monkeypatch) -> None:
    """In the middle of a read: it is waited for, and nothing is left on the device."""
    device = FakeDevice(delay_seconds=0.0001)
    kvikio = Kvikio(device).install(monkeypatch)
    entered, go = threading.Event(), threading.Event()
    opened = sys.modules["kvikio"].CuFile

    def slow(path: str, flags: str) -> Any:
        file = opened(path, flags)
        read = file.raw_read

        def raw_read(*arguments: Any) -> int:
            if kvikio.num_reads > 20:
                entered.set()
                assert go.wait(30)
            return read(*arguments)

        file.raw_read = raw_read
        return file

    monkeypatch.setattr(sys.modules["kvikio"], "CuFile", slow)

    async def cancel_in_a_read() -> None:
        task = asyncio.create_task(stio.load(place, device=device, memory="gds", budget_bytes=BUDGET))
        assert await asyncio.to_thread(entered.wait, 30)
        task.cancel()
        threading.Timer(0.05, go.set).start()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert go.is_set()  # it was waited for

    asyncio.run(cancel_in_a_read())
    require_freed(device, kvikio)


@gpu
def test_a_slot_is_given_out_when_the_stream_is_done() -> None:
    """The allocator gives memory out again for work that is queued behind its last use; the disk is in no queue."""
    device = TorchAccelerator(resolve_device("auto"))
    source = device.staging(4096)
    source.write(0, b"s" * 4096)
    target = bytes_of_storage(device.allocate([4096])[0], 0, 4096)
    with module_of(device.device).stream(device.copy_stream):
        keep_busy()
    event = device.copy([(target, source)])
    assert not event.query()  # or this shows nothing
    gds = GdsDevice(device, 4096)
    gds.take()
    assert event.query()
    gds.close()


# Wrong arguments.


def test_without_kvikio(place, device, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)
    with pytest.raises(ImportError, match="stio-torch.gds"):
        load(place, device)
    gc.collect()
    assert (device.used_bytes, device.staging_bytes) == (0, 0)


def test_on_the_cpu_alone(place) -> None:
    """Refused before kvikio is imported."""
    with pytest.raises(DeviceError, match="reads to an accelerator"):
        load(place, "cpu")


@pytest.mark.parametrize("error", [OSError("libcufile.so: cannot open"), RuntimeError("no library")])
def test_a_kvikio_that_cannot_be_loaded(place, device, monkeypatch, error) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr("stio.storage.gds.import_module", fail)
    with pytest.raises(ImportError, match=str(error)):
        load(place, device)


def test_beside_a_cache(place, device) -> None:
    with pytest.raises(ValueError, match="cache="), stio.sync.HostCache(1 << 20) as cache:
        load(place, device, cache=cache)
