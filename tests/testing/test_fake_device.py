"""The fake device does nothing before its time, and everything that it is asked to do wrong; see test_contract.py too."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable

import pytest
import torch
from fakes import POISON, FakeDevice

from stio.errors import DeviceError, DeviceMemoryError
from stio.runtime import memory
from stio.runtime.memory import Region


def filled(device: FakeDevice, data: bytes) -> Region:
    slot = device.staging(len(data))
    slot.write(0, data)
    return slot


def test_copies_happen_when_the_event_passes() -> None:
    device = FakeDevice(manual=True)
    assert device.device == torch.device("cpu")
    slot, target = filled(device, b"abcdef"), device.empty(6)
    event = device.copy([(target[:2], slot.sub(0, 2)), (target[2:], slot.sub(2, 4))])
    assert bytes(target.tolist()) == bytes([POISON]) * 6
    assert not event.query()
    slot.write(0, b"ABC")  # too early: what is copied is what is there when the copy happens
    assert device.step() == 1
    assert event.query()
    event.synchronize()
    assert bytes(target.tolist()) == b"ABCdef"
    assert slot.tobytes() == bytes([POISON]) * 6
    assert device.step() == 0


def test_memory_that_is_no_slot_of_its_own_stays_as_it_is() -> None:
    device = FakeDevice(manual=True)
    kept, target = memory.allocate(3), device.empty(3)
    kept.write(0, b"abc")
    device.copy([(target, kept.sub(0, 3))])
    device.step()
    assert bytes(target.tolist()) == kept.tobytes() == b"abc"


def test_events_pass_in_order_by_themselves() -> None:
    device = FakeDevice()
    targets = [device.empty(1) for _ in range(20)]
    events = [device.copy([(target, filled(device, bytes([k])))]) for k, target in enumerate(targets)]
    events[-1].synchronize()
    assert all(event.query() for event in events)
    assert [target.item() for target in targets] == list(range(20))
    assert (device.num_copies, device.num_passed, device.num_pending) == (20, 20, 0)


def test_tensors_are_new_memory() -> None:
    device = FakeDevice()
    tensors = device.allocate([(torch.uint8, (3,)), (torch.float32, (0,)), (torch.int16, (2, 1))])
    assert ([one.untyped_storage().nbytes() for one in tensors], device.peak_bytes) == ([3, 0, 4], 7)


def test_memory_is_counted_and_ends() -> None:
    device = FakeDevice(memory_bytes=100)
    tensor = device.empty(80)
    with pytest.raises(DeviceMemoryError) as caught:
        device.empty(21)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (21, 20)
    other = device.empty(20)
    assert (device.used_bytes, device.peak_bytes) == (100, 100)
    del tensor, other, caught
    gc.collect()
    assert (device.used_bytes, device.peak_bytes) == (0, 100)


def test_staging_is_counted() -> None:
    device = FakeDevice(refuse_staging=3)
    slots = [device.staging(10), device.staging(20)]
    with pytest.raises(MemoryError):
        device.staging(30)
    assert (device.staging_bytes, device.peak_staging_bytes) == (30, 30)
    slots.clear()
    gc.collect()
    assert (device.staging_bytes, device.peak_staging_bytes) == (0, 30)


def test_refused_and_failing_copies() -> None:
    device = FakeDevice(manual=True, refuse_copy=1, fail_copy=2)
    target, slot = device.empty(1), filled(device, b"x")
    with pytest.raises(DeviceError, match="refused"):
        device.copy([(target, slot)])
    assert device.num_pending == 0
    event = device.copy([(target, slot)])
    device.step()
    with pytest.raises(DeviceError, match="failed"):
        event.synchronize()
    assert target.item() == POISON


def test_mistakes_of_the_caller() -> None:
    device = FakeDevice()
    region = memory.allocate(8).sub(0, 8)
    wrong: list[Callable[[], torch.Tensor]] = [
        lambda: torch.empty(2), lambda: torch.empty(7, dtype=torch.uint8), lambda: torch.empty(2, 4, dtype=torch.uint8),
    ]  # fmt: skip
    for make in wrong:
        with pytest.raises(ValueError, match="8 bytes"):
            device.copy([(make(), region)])


def test_waiting_for_work() -> None:
    device = FakeDevice(manual=True)
    seen: list[int] = []
    waiter = threading.Thread(target=lambda: (device.wait_for_pending(2), seen.append(device.num_pending)))
    waiter.start()
    for _ in range(2):
        device.copy([])
    waiter.join(30)
    assert seen == [2]
