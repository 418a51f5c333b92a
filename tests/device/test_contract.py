"""The contract of a device (`stio.device.base.Accelerator`), tested on each kind of device.

The fake passes events late, the simulated device runs streams on threads, a real one has its own timing: what holds on
all of them does not depend on when a copy happens.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from accelerators import RIGS, Rig, rig_of

from stio.device.base import Accelerator, Event
from stio.device.tensors import GroupMemory
from stio.errors import DeviceError, DeviceMemoryError
from stio.loading.plan import Group
from stio.runtime import memory
from stio.runtime.memory import Region


@pytest.fixture(params=RIGS)
def rig(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Rig:
    return rig_of(request.param, monkeypatch)


@pytest.fixture
def device(rig: Rig) -> Iterator[Accelerator]:
    yield rig.accelerator
    gc.collect()
    rig.accelerator.copy([]).synchronize()  # nothing of a test is under way when the next one begins
    _filled.clear()


@pytest.fixture(params=[False, True], ids=["usual stream", "own stream"])
def consumer(request: pytest.FixtureRequest, rig: Rig) -> Iterator[None]:
    if request.param:
        with rig.own_stream():
            yield
    else:
        yield


_filled: list[Region] = []  # until its copies have ended: a region is released with the last reference to it


def filled(device: Accelerator, data: bytes) -> Region:
    slot = device.staging(len(data))
    slot.write(0, data)
    _filled.append(slot)
    return slot.sub(0, len(data))


def sent(device: Accelerator, data: bytes) -> tuple[torch.Tensor, Event]:
    target = empty(device, len(data))
    return target, device.copy([(target, filled(device, data))])


def empty(device: Accelerator, nbytes: int) -> torch.Tensor:
    return device.allocate([(torch.uint8, (nbytes,))])[0]


def test_it_answers_to_the_protocol(device: Accelerator) -> None:
    assert isinstance(device, Accelerator)
    assert device.device.type == "cpu" or device.device.index is not None


# Memory.


@pytest.mark.parametrize("nbytes", [1, 4096, 100_001, 2 << 20])
def test_staging_memory(device: Accelerator, nbytes: int) -> None:
    """It has the requested size, can be written, and shares no byte with other staging memory."""
    slots = [device.staging(nbytes) for _ in range(3)]
    for k, slot in enumerate(slots):
        assert slot.nbytes == nbytes
        slot.write(0, bytes([k]) * nbytes)
    assert [slot.tobytes() for slot in slots] == [bytes([k]) * nbytes for k in range(3)]


@pytest.mark.parametrize("nbytes", [0, 1, 5000])
def test_tensors(device: Accelerator, nbytes: int) -> None:
    tensors = device.allocate([(torch.uint8, (nbytes,)), (torch.bfloat16, (7, 1, 3)), (torch.float64, (nbytes, 0))])
    assert [(one.dtype, tuple(one.shape)) for one in tensors] == [
        (torch.uint8, (nbytes,)),
        (torch.bfloat16, (7, 1, 3)),
        (torch.float64, (nbytes, 0)),
    ]
    for tensor, size in zip(tensors, [nbytes, 42, 0], strict=True):
        assert (tensor.untyped_storage().nbytes(), tensor.device) == (size, device.device)
        assert tensor.is_contiguous()
        assert not tensor._is_view()
        assert not tensor.is_inference()
    assert len({tensor.data_ptr() for tensor in tensors if tensor.nbytes}) == (2 if nbytes else 1)
    assert device.allocate([]) == []


def test_c96_out_of_memory(rig: Rig, device: Accelerator) -> None:
    before = rig.used_bytes()
    with pytest.raises(DeviceMemoryError) as caught:
        device.allocate([(torch.uint8, (rig.too_much,))])
    assert caught.value.needed_bytes == rig.too_much
    assert caught.value.free_bytes is not None
    assert caught.value.free_bytes < rig.too_much
    del caught
    assert rig.used_bytes() == before
    target, event = sent(device, b"it goes on")
    event.synchronize()
    assert rig.read(target) == b"it goes on"


def test_c96_a_group_that_finds_no_memory_halfway(rig: Rig, device: Accelerator) -> None:
    before = rig.used_bytes()
    sizes = [1 << 18, 5, rig.too_much]
    with pytest.raises(DeviceMemoryError):
        GroupMemory.allocate(device, [group_of(sizes, [0, sizes[0], 1 << 21])])
    assert rig.used_bytes() == before


def group_of(sizes: list[int], offsets: list[int]) -> Group:
    """Return a group of U8 tensors `abc...`."""
    return Group(
        index=0, selection=0, offset=0, nbytes=offsets[-1] + sizes[-1], names="abc"[: len(sizes)],
        dtypes=["U8"] * len(sizes), shapes=[(size,) for size in sizes], offsets=offsets, blocks=(),
        payload_bytes=sum(sizes),
    )  # fmt: skip


# Copies.


def test_one_call_brings_many_parts_to_many_places(rig: Rig, device: Accelerator) -> None:
    data = bytes(range(250))
    slot, targets = filled(device, data), [empty(device, n) for n in (1, 99, 150)]
    parts = [(targets[0], slot.sub(0, 1)), (targets[1][10:50], slot.sub(1, 40)), (targets[2], slot.sub(100, 150))]
    event = device.copy(parts)
    event.synchronize()
    assert rig.read(targets[0]) == data[:1]
    assert rig.read(targets[1])[10:50] == data[1:41]
    assert rig.read(targets[2]) == data[100:]


def test_copy_waits_for_nothing(rig: Rig, device: Accelerator) -> None:
    slot, target = filled(device, b"later"), empty(device, 5)
    with rig.standing():
        first, second = device.copy([(target, slot)]), device.copy([])
        assert not first.query()
        assert not second.query()
    second.synchronize()
    assert first.query()
    assert second.query()


def test_events_pass_in_order_and_behind_their_copies(rig: Rig, device: Accelerator) -> None:
    with rig.standing():
        pairs = [sent(device, bytes([k]) * 3000) for k in range(20)]
    pairs[11][1].synchronize()
    assert all(event.query() for _, event in pairs[:12])
    assert [rig.read(target) for target, _ in pairs[:12]] == [bytes([k]) * 3000 for k in range(12)]
    pairs[-1][1].synchronize()
    assert all(event.query() for _, event in pairs)


def test_of_copies_to_one_place_the_last_one_stays(rig: Rig, device: Accelerator) -> None:
    """Within a batch and between batches."""
    target = empty(device, 3000)
    slots = [filled(device, bytes([k]) * 3000) for k in range(9)]
    with rig.standing():
        for k in range(0, 9, 3):
            event = device.copy([(target, slot) for slot in slots[k : k + 3]])
    event.synchronize()
    assert rig.read(target) == bytes([8]) * 3000


def test_a_region_may_be_filled_again_after_its_event(rig: Rig, device: Accelerator) -> None:
    slot, targets, events = device.staging(50_000), [], []
    for k in range(6):
        slot.write(0, bytes([k]) * 50_000)
        targets.append(empty(device, 50_000))
        events.append(device.copy([(targets[-1], slot.sub(0, 50_000))]))
        events[-1].synchronize()
    assert [rig.read(target) for target in targets] == [bytes([k]) * 50_000 for k in range(6)]


def test_an_event_is_anybody_s(rig: Rig, device: Accelerator) -> None:
    with rig.standing():
        _, event = sent(device, b"abc")
    waiter = threading.Thread(target=event.synchronize)
    waiter.start()
    waiter.join(30)
    assert not waiter.is_alive()
    assert event.query()


def test_what_is_not_staging_memory_is_copied_from_too(rig: Rig, device: Accelerator) -> None:
    """It stays unchanged until the copy has ended."""
    kept, target = memory.allocate(8192), empty(device, 100)
    kept.write(0, bytes(range(256)) * 32)
    event = device.copy([(target, kept.sub(5000, 100))])
    event.synchronize()
    assert rig.read(target) == (bytes(range(256)) * 32)[5000:5100]
    assert kept.tobytes() == bytes(range(256)) * 32


# Who uses what is there.


def test_what_has_arrived_is_there_for_any_stream(rig: Rig, device: Accelerator, consumer: None) -> None:
    """The consumer's stream waits for nothing, and nothing is recorded."""
    data = bytes(range(256)) * 400
    with rig.standing():
        (first, one), (second, two) = sent(device, data), sent(device, data[::-1])
    one.synchronize()
    two.synchronize()
    assert rig.read(first) == data
    assert rig.read(second) == data[::-1]


def test_work_after_the_copies_sees_them_and_is_there_for_any_stream(
    rig: Rig, device: Accelerator, consumer: None
) -> None:
    """A cast of a load; the rigs' devices have no stream of a caller, so its end is waited for."""
    with rig.standing():
        target, event = sent(device, b"cast me")
    event.synchronize()
    with device.on_stream():
        twin = rig.twin(target)
    assert rig.read(twin) == b"cast me"


def test_memory_of_one_s_own_stream_stays_until_that_is_through(rig: Rig, device: Accelerator) -> None:
    """Who dropped the tensors may have new ones made at once, which take over the memory: copies wait for the work."""
    data = bytes(range(256)) * 400
    with rig.caller() as mine:
        target, event = sent(mine, data)
        event.synchronize()
        later = rig.read_later(target)
        del target
        gc.collect()
        others = [sent(mine, b"\xee" * len(data)) for _ in range(3)]
        others[-1][1].synchronize()
        assert later() == data


# Refusals.


def test_a_refused_copy_leaves_nobody_who_reads(rig: Rig, device: Accelerator) -> None:
    """What was queued before the refusal has ended: the region is the caller's again."""
    target, slot = empty(device, 3000), filled(device, b"a" * 3000)
    sent(device, b"before")[1].synchronize()
    with rig.standing():
        batch = rig.refused((target, slot))
    with pytest.raises(DeviceError):
        device.copy(batch)
    slot.write(0, b"b" * 3000)
    device.copy([]).synchronize()
    assert b"b" not in rig.read(target)
    device.copy([(target, slot)]).synchronize()
    assert rig.read(target) == b"b" * 3000
