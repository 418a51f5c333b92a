"""The ring of slots: nothing is filled too early, nothing is lost, and whatever fails, everything ends."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from stio.device.base import Event
from stio.device.ring import Stage
from stio.errors import DeviceError
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.runtime.trace import Trace
from stio.testing import POISON, FakeDevice

SLOT = 64


def never() -> bool:
    return False


def send(stage: Stage[str], slot: Region | None, pairs: list[tuple[torch.Tensor, Region]], what: str = "") -> list[str]:
    """Queue copies as a reader does; return what was queued with them."""
    stage.put(slot, pairs, what)
    sent = []
    while (queued := stage.submit()) is not None:
        sent += queued[1]
    return sent


def put(stage: Stage[str], device: FakeDevice, data: bytes) -> torch.Tensor:
    """Fill a slot, as a reader does."""
    slot = stage.acquire(never)
    assert slot is not None
    slot.write(0, data)
    target = device.empty(len(data))
    stage.put(slot, [(target, slot.sub(0, len(data)))], data.decode("latin-1"))
    return target


def fill(stage: Stage[str], device: FakeDevice, data: bytes) -> torch.Tensor:
    """Send data through a slot, as a reader does."""
    target = put(stage, device, data)
    while stage.submit() is not None:
        pass
    return target


# The ring.


def test_slots_are_made_when_needed() -> None:
    device = FakeDevice()
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=3)
    assert device.num_staging == 0
    slot = stage.acquire(never)
    assert slot is not None
    assert slot.nbytes == SLOT
    stage.give_back(slot)
    assert stage.acquire(never) is slot
    assert device.num_staging == 1


# Slots that are made ahead.


class Slow(FakeDevice):
    """Makes staging memory when it is let."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.allowed = threading.Semaphore(0)

    def staging(self, nbytes: int) -> Region:
        assert self.allowed.acquire(timeout=30)
        return super().staging(nbytes)


def on_thread(make: Callable[[], None]) -> None:
    threading.Thread(target=make, daemon=True).start()


def test_slots_are_made_before_readers_ask() -> None:
    device = FakeDevice()
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=3)
    stage.make_ahead(on_thread, 2)
    slots = [stage.acquire(never) for _ in range(3)]  # the third is made by who asks
    assert len({slot.address for slot in slots if slot}) == 3
    assert device.num_staging == 3
    stage.make_ahead(on_thread, 9)  # there are no more
    assert device.num_staging == 3
    for slot in slots:
        assert slot is not None
        stage.give_back(slot)
    stage.close()
    assert stage.held_bytes == 0


def test_readers_wait_for_what_is_made_or_for_a_copy() -> None:
    """Two that make slots are no faster than one, and a copy is over sooner."""
    device = Slow(manual=True)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=4)
    stage.make_ahead(on_thread, 4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stage.acquire, never)
        device.allowed.release()
        slot = waiting.result(30)
        assert slot is not None
        send(stage, slot, [(device.empty(1), slot.sub(0, 1))])
        waiting = pool.submit(stage.acquire, never)
        while not waiting.done():
            device.step()
        assert waiting.result() is slot
    assert device.num_staging == 1
    for _ in range(3):
        device.allowed.release()
    stage.give_back(slot)
    stage.close()


def test_a_copy_that_does_not_end_keeps_nobody_from_a_slot_that_is_made() -> None:
    device = Slow(manual=True)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=2)
    stage.make_ahead(on_thread, 2)
    device.allowed.release()
    slot = stage.acquire(never)
    assert slot is not None
    send(stage, slot, [(device.empty(1), slot.sub(0, 1))])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stage.acquire, never)
        with pytest.raises(TimeoutError):
            waiting.result(0.02)
        device.allowed.release()
        try:
            other = waiting.result(10)
        finally:
            device.step()
    assert other is not None
    assert other is not slot
    stage.give_back(other)
    stage.close()


def test_a_reader_that_is_stopped_does_not_wait_for_a_slot() -> None:
    device = Slow()
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    stage.make_ahead(on_thread, 1)
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(stage.acquire, stopped.is_set)
        stopped.set()
        assert waiting.result(30) is None
    device.allowed.release()
    stage.close()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_host_memory_for_a_slot_that_is_made_ahead(number: int) -> None:
    device = FakeDevice(refuse_staging=number)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=3)
    stage.make_ahead(on_thread, 3)
    with pytest.raises(MemoryError):
        while True:
            assert stage.acquire(never) is not None
    stage.close()
    assert stage.acquire(never) is not None


def test_closing_waits_for_the_slot_that_is_being_made() -> None:
    """And has no others made."""
    device = Slow()
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=3)
    stage.make_ahead(on_thread, 3)
    closer = threading.Thread(target=stage.close)
    closer.start()
    closer.join(0.02)
    assert closer.is_alive()
    device.allowed.release()
    closer.join(30)
    assert not closer.is_alive()
    assert device.num_staging == 1
    gc.collect()
    assert (stage.held_bytes, device.staging_bytes) == (0, 0)


def test_without_a_thread_readers_make_their_own() -> None:
    def refuse(make: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    device = FakeDevice()
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=2)
    stage.make_ahead(refuse, 2)
    assert stage.acquire(never) is not None
    assert device.num_staging == 1


def test_a_slot_comes_back_when_its_event_has_passed() -> None:
    device = FakeDevice(manual=True)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=2)
    first, second = fill(stage, device, b"1" * SLOT), fill(stage, device, b"2" * SLOT)
    got: list[Region | None] = []
    waiter = threading.Thread(target=lambda: got.append(stage.acquire(never)))
    waiter.start()
    assert not got
    assert device.step() == 1
    waiter.join(30)
    assert got
    assert bytes(first.tolist()) == b"1" * SLOT
    assert bytes(second.tolist()) == bytes([POISON]) * SLOT
    device.step()
    stage.drain()
    assert bytes(second.tolist()) == b"2" * SLOT
    assert device.num_staging == 2


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_many_readers(num_slots: int) -> None:
    """Each sees its own bytes arrive: a slot that is filled before its time would bring another's."""
    device = FakeDevice(delay_seconds=0.0001)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=num_slots)

    def send_some(seed: int) -> list[tuple[bytes, torch.Tensor]]:
        chance = random.Random(seed)
        sent = []
        for _ in range(30):
            data = chance.randbytes(chance.randint(1, SLOT))
            sent.append((data, fill(stage, device, data)))
        return sent

    with ThreadPoolExecutor(6) as pool:
        results = [pair for sent in pool.map(send_some, range(6)) for pair in sent]
    stage.drain()
    assert all(bytes(tensor.tolist()) == data for data, tensor in results)
    assert device.num_staging == num_slots
    assert device.peak_staging_bytes == num_slots * SLOT
    assert device.num_passed == device.num_copies <= 180
    assert device.num_pending == 0


def test_stop_while_waiting_for_a_slot() -> None:
    device = FakeDevice(manual=True)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    slot = stage.acquire(never)
    assert slot is not None
    stopped = threading.Event()
    got: list[Region | None] = []
    waiter = threading.Thread(target=lambda: got.append(stage.acquire(stopped.is_set)))
    waiter.start()
    stopped.set()
    waiter.join(30)
    assert got == [None]
    stage.give_back(slot)
    assert stage.acquire(never) is slot


def test_copies_out_of_other_memory_need_no_slot_and_give_none() -> None:
    device = FakeDevice(manual=True)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    kept = memory.allocate(SLOT)
    kept.write(0, b"k" * SLOT)
    target = device.empty(SLOT)
    send(stage, None, [(target, kept)])
    sent = fill(stage, device, b"s" * SLOT)
    with ThreadPoolExecutor(1) as pool:
        slot = pool.submit(stage.acquire, never)
        while not slot.done():
            device.step()
        first = slot.result()
    assert first is not None
    assert first.address != kept.address
    assert bytes(target.tolist()) == kept.tobytes() == b"k" * SLOT
    assert bytes(sent.tolist()) == b"s" * SLOT
    stage.drain()
    assert device.num_staging == 1


@pytest.mark.parametrize("fault", ["refuse_copy", "fail_copy"])
def test_failing_copies_out_of_other_memory(fault: str) -> None:
    device = FakeDevice(**{fault: 1})  # type: ignore[arg-type]
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    kept = memory.allocate(1)
    with pytest.raises(DeviceError):
        send(stage, None, [(device.empty(1), kept)])
        stage.close()
    assert device.num_pending == 0
    slot = stage.acquire(never)
    assert slot is not None
    assert slot.address != kept.address


# A ring that is given up.


def test_retiring_waits_for_slots_in_hands_and_in_flight() -> None:
    device = FakeDevice(manual=True)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=4)
    in_hand, idle = stage.acquire(never), stage.acquire(never)
    assert in_hand is not None
    assert idle is not None
    flying = fill(stage, device, b"f")
    stage.give_back(idle)
    del idle
    with ThreadPoolExecutor(1) as pool:
        retiring = pool.submit(stage.retire, never)
        while stage.held_bytes > 2 * SLOT:
            threading.Event().wait(0.001)
        with pytest.raises(MemoryError, match="no slots any more"):
            stage.acquire(never)
        device.step()
        send(stage, in_hand, [(target := device.empty(1), in_hand.sub(0, 1))])
        in_hand = None
        with pytest.raises(TimeoutError):
            retiring.result(0.02)
        device.step()
        retiring.result(30)
    assert (stage.held_bytes, flying.item(), target.item()) == (0, ord("f"), POISON)
    stage.close()


def test_retiring_ends_with_the_load() -> None:
    stage = Stage[str](FakeDevice(), slot_bytes=SLOT, num_slots=1)
    slot = stage.acquire(never)
    assert slot is not None
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        retiring = pool.submit(stage.retire, stopped.is_set)
        with pytest.raises(TimeoutError):
            retiring.result(0.02)
        stopped.set()
        retiring.result(30)
    stage.give_back(slot)
    stage.close()
    assert stage.held_bytes == 0


def test_retiring_tells_of_a_copy_that_failed() -> None:
    device = FakeDevice(fail_copy=1)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    fill(stage, device, b"x")
    with pytest.raises(DeviceError, match="failed"):
        stage.retire(never)
    stage.close()


# One submits for all.


class Stalling(FakeDevice):
    """Its first copy is queued when it is let."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.entered, self.allowed = threading.Event(), threading.Event()

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Event:
        self.entered.set()
        assert self.allowed.wait(30)
        return super().copy(pairs)


def test_who_submits_takes_along_what_others_fill_meanwhile() -> None:
    """They read on instead of waiting in line; what comes meanwhile is one call and one event."""
    device = Stalling(manual=True)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=4)
    with ThreadPoolExecutor(1) as pool:
        first = put(stage, device, b"0")
        sender = pool.submit(lambda: [queued for _ in range(3) if (queued := stage.submit()) is not None])
        assert device.entered.wait(30)
        targets = [fill(stage, device, data) for data in (b"1", b"2", b"3")]
        device.allowed.set()
        (_, alone), (event, together) = sender.result(30)
    assert (alone, together) == (["0"], ["1", "2", "3"])
    assert device.num_copies == device.num_pending == 2
    assert device.step() == 1
    assert not event.query()
    assert device.step() == 1
    assert event.query()
    assert [target.item() for target in (first, *targets)] == [ord(digit) for digit in "0123"]
    slots = [stage.acquire(never) for _ in range(4)]  # an event gives back all that were copied before it
    assert len({slot.address for slot in slots if slot}) == 4
    assert device.num_staging == 4


@pytest.mark.parametrize("fault", ["refuse_copy", "fail_copy"])
def test_a_copy_of_several_slots_that_fails(fault: str) -> None:
    """Refused, all of them come back; failed, none is filled again. The ring stays as wide, whichever it was."""
    device = FakeDevice(**{fault: 1})  # type: ignore[arg-type]
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=3)
    for data in (b"1", b"2", b"3"):
        put(stage, device, data)
    with pytest.raises(DeviceError):
        stage.submit()
        stage.drain()
    assert stage.submit() is None
    slots = [stage.acquire(never) for _ in range(3)]
    assert len({slot.address for slot in slots if slot}) == 3
    assert device.num_staging == (3 if fault == "refuse_copy" else 6)


def test_closing_drops_what_was_filled_and_never_sent() -> None:
    device = FakeDevice()
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=3)
    fill(stage, device, b"0")
    targets = [put(stage, device, b"1"), put(stage, device, b"2")]
    stage.close()
    assert stage.submit() is None
    assert [target.item() for target in targets] == [POISON] * 2
    gc.collect()
    assert (stage.held_bytes, device.staging_bytes, device.num_copies) == (0, 0, 1)


def test_refused_copy_gives_the_slot_back() -> None:
    device = FakeDevice(refuse_copy=1)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    with pytest.raises(DeviceError, match="refused"):
        fill(stage, device, b"x")
    assert bytes(fill(stage, device, b"y").tolist()) in (b"y", bytes([POISON]))
    stage.drain()
    assert device.num_staging == 1


def test_failed_copy_is_told_to_who_waits_for_its_slot() -> None:
    """That slot is never filled again, since nobody knows what the device does with it, but the ring stays as wide."""
    device = FakeDevice(manual=True, fail_copy=1)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    lost = stage.acquire(never)
    assert lost is not None
    send(stage, lost, [(device.empty(1), lost.sub(0, 1))])
    device.step()
    with pytest.raises(DeviceError, match="failed"):
        stage.acquire(never)
    slot = stage.acquire(never)
    assert slot is not None
    assert slot.address != lost.address
    assert device.num_staging == 2


def test_drain_ends_everything_whatever_fails() -> None:
    device = FakeDevice(fail_copy=2)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=4)
    targets = [fill(stage, device, bytes([k])) for k in range(4)]
    with pytest.raises(DeviceError, match="copy 2 failed"):
        stage.drain()
    assert device.num_pending == 0
    assert [target.item() for target in targets] == [0, POISON, 2, 3]
    stage.drain()
    slots = [stage.acquire(never) for _ in range(4)]
    assert len({slot.address for slot in slots if slot}) == 4
    assert device.num_staging == 5


def test_drain_waits_for_slots_that_others_wait_for() -> None:
    device = FakeDevice(manual=True)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    fill(stage, device, b"x")
    acquirer = threading.Thread(target=lambda: stage.acquire(never))
    acquirer.start()
    drainer = threading.Thread(target=stage.drain)
    drainer.start()
    assert device.num_pending == 1
    device.step()
    for thread in (acquirer, drainer):
        thread.join(30)
        assert not thread.is_alive()


def test_unknown_errors_of_a_device_become_stios() -> None:
    class Lost:
        def query(self) -> bool:
            return False

        def synchronize(self) -> None:
            raise RuntimeError("illegal address")

    class Device(FakeDevice):
        def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Event:
            return Lost()

    device = Device()
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    fill(stage, device, b"x")
    with pytest.raises(DeviceError, match="illegal address"):
        stage.drain()


def test_no_host_memory_for_a_slot() -> None:
    device = FakeDevice(refuse_staging=1)
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1)
    with pytest.raises(MemoryError):
        stage.acquire(never)
    assert stage.acquire(never) is not None


def test_copies_are_traced() -> None:
    device, trace = FakeDevice(), Trace()
    stage = Stage[str](device, slot_bytes=SLOT, num_slots=1, trace=trace)
    fill(stage, device, b"abc")
    stage.drain()
    assert [(span.name, span.lane, span.num_bytes) for span in trace.spans] == [("copy", "copy", 3)]
