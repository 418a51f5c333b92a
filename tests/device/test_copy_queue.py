"""The copy queue: no slot is filled too early, no copy is lost, and all copies end, whatever fails."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch

from stio.device.base import Event
from stio.device.copy_queue import CopyQueue
from stio.device.group_memory import GroupMemory
from stio.errors import DeviceError
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.runtime.trace import Trace
from stio.testing import POISON, FakeDevice

SLOT = 64


class Tensors(NamedTuple):
    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    offsets: list[int]


def never() -> bool:
    return False


def ignore(block: str) -> None:
    pass


def send(
    queue: CopyQueue[str], slot: Region | None, copies: list[tuple[torch.Tensor, Region]], block: str = ""
) -> GroupMemory:
    """Put copies and submit them, as a worker does; return the memory that notes their event."""
    memory = GroupMemory()
    queue.put(block, memory, copies, slot=slot)
    queue.submit(ignore)
    return memory


def put(queue: CopyQueue[str], device: FakeDevice, data: bytes, memory: GroupMemory | None = None) -> torch.Tensor:
    """Fill a slot and put its copies, as a worker does; return their target."""
    slot = queue.acquire(never)
    assert slot is not None
    slot.write(0, data)
    target = device.empty(len(data))
    queue.put(data.decode("latin-1"), memory or GroupMemory(), [(target, slot.sub(0, len(data)))], slot=slot)
    return target


def fill(queue: CopyQueue[str], device: FakeDevice, data: bytes) -> torch.Tensor:
    """Send data through a slot, as a worker does; return its target."""
    target = put(queue, device, data)
    queue.submit(ignore)
    return target


# Slots.


def test_slots_are_allocated_when_needed() -> None:
    device = FakeDevice()
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=3)
    assert device.num_staging == 0
    slot = queue.acquire(never)
    assert slot is not None
    assert slot.nbytes == SLOT
    queue.release(slot)
    assert queue.acquire(never) is slot
    assert device.num_staging == 1


# Slots that are allocated ahead.


class Slow(FakeDevice):
    """Allocates staging memory when the test allows it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.allowed = threading.Semaphore(0)

    def staging(self, nbytes: int) -> Region:
        assert self.allowed.acquire(timeout=30)
        return super().staging(nbytes)


def on_thread(make: Callable[[], None]) -> None:
    threading.Thread(target=make, daemon=True).start()


def test_slots_are_allocated_before_workers_need_them() -> None:
    device = FakeDevice()
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=3)
    queue.allocate_ahead(on_thread, 2)
    slots = [queue.acquire(never) for _ in range(3)]  # the third is allocated by the caller
    assert len({slot.address for slot in slots if slot}) == 3
    assert device.num_staging == 3
    queue.allocate_ahead(on_thread, 9)  # there are no more
    assert device.num_staging == 3
    for slot in slots:
        assert slot is not None
        queue.release(slot)
    queue.close()
    assert queue.held_bytes == 0


def test_workers_wait_for_a_slot_that_is_being_allocated_or_for_a_copy() -> None:
    """Two threads allocate no faster than one, and a copy ends sooner."""
    device = Slow(manual=True)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=4)
    queue.allocate_ahead(on_thread, 4)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.acquire, never)
        device.allowed.release()
        slot = waiting.result(30)
        assert slot is not None
        send(queue, slot, [(device.empty(1), slot.sub(0, 1))])
        waiting = pool.submit(queue.acquire, never)
        while not waiting.done():
            device.step()
        assert waiting.result() is slot
    assert device.num_staging == 1
    for _ in range(3):
        device.allowed.release()
    queue.release(slot)
    queue.close()


def test_a_copy_that_does_not_end_does_not_delay_a_slot_that_is_allocated() -> None:
    device = Slow(manual=True)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=2)
    queue.allocate_ahead(on_thread, 2)
    device.allowed.release()
    slot = queue.acquire(never)
    assert slot is not None
    send(queue, slot, [(device.empty(1), slot.sub(0, 1))])
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.acquire, never)
        with pytest.raises(TimeoutError):
            waiting.result(0.02)
        device.allowed.release()
        try:
            other = waiting.result(10)
        finally:
            device.step()
    assert other is not None
    assert other is not slot
    queue.release(other)
    queue.close()


def test_a_worker_that_is_stopped_does_not_wait_for_a_slot() -> None:
    device = Slow()
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    queue.allocate_ahead(on_thread, 1)
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(queue.acquire, stopped.is_set)
        stopped.set()
        assert waiting.result(30) is None
    device.allowed.release()
    queue.close()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_no_host_memory_for_a_slot_that_is_allocated_ahead(number: int) -> None:
    device = FakeDevice(refuse_staging=number)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=3)
    queue.allocate_ahead(on_thread, 3)
    with pytest.raises(MemoryError):
        while True:
            assert queue.acquire(never) is not None
    queue.close()
    assert queue.acquire(never) is not None


def test_closing_waits_for_the_slot_that_is_being_allocated() -> None:
    """And no other is allocated."""
    device = Slow()
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=3)
    queue.allocate_ahead(on_thread, 3)
    closer = threading.Thread(target=queue.close)
    closer.start()
    closer.join(0.02)
    assert closer.is_alive()
    device.allowed.release()
    closer.join(30)
    assert not closer.is_alive()
    assert device.num_staging == 1
    gc.collect()
    assert (queue.held_bytes, device.staging_bytes) == (0, 0)


def test_without_a_thread_workers_allocate_their_own() -> None:
    def refuse(make: Callable[[], None]) -> None:
        raise RuntimeError("can't start new thread")

    device = FakeDevice()
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=2)
    queue.allocate_ahead(refuse, 2)
    assert queue.acquire(never) is not None
    assert device.num_staging == 1


def test_a_slot_comes_back_when_its_event_has_passed() -> None:
    device = FakeDevice(manual=True)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=2)
    first, second = fill(queue, device, b"1" * SLOT), fill(queue, device, b"2" * SLOT)
    got: list[Region | None] = []
    waiter = threading.Thread(target=lambda: got.append(queue.acquire(never)))
    waiter.start()
    assert not got
    assert device.step() == 1
    waiter.join(30)
    assert got
    assert bytes(first.tolist()) == b"1" * SLOT
    assert bytes(second.tolist()) == bytes([POISON]) * SLOT
    device.step()
    queue.drain()
    assert bytes(second.tolist()) == b"2" * SLOT
    assert device.num_staging == 2


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_many_workers(num_slots: int) -> None:
    """Each target gets its own bytes: a slot that is filled too early would copy those of another one."""
    device = FakeDevice(delay_seconds=0.0001)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=num_slots)

    def send_some(seed: int) -> list[tuple[bytes, torch.Tensor]]:
        chance = random.Random(seed)
        sent = []
        for _ in range(30):
            data = chance.randbytes(chance.randint(1, SLOT))
            sent.append((data, fill(queue, device, data)))
        return sent

    with ThreadPoolExecutor(6) as pool:
        results = [pair for sent in pool.map(send_some, range(6)) for pair in sent]
    queue.drain()
    assert all(bytes(tensor.tolist()) == data for data, tensor in results)
    assert device.num_staging == num_slots
    assert device.peak_staging_bytes == num_slots * SLOT
    assert device.num_passed == device.num_copies <= 180
    assert device.num_pending == 0


def test_stop_while_waiting_for_a_slot() -> None:
    device = FakeDevice(manual=True)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    slot = queue.acquire(never)
    assert slot is not None
    stopped = threading.Event()
    got: list[Region | None] = []
    waiter = threading.Thread(target=lambda: got.append(queue.acquire(stopped.is_set)))
    waiter.start()
    stopped.set()
    waiter.join(30)
    assert got == [None]
    queue.release(slot)
    assert queue.acquire(never) is slot


def test_copies_out_of_other_memory_need_no_slot_and_release_none() -> None:
    device = FakeDevice(manual=True)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    kept = memory.allocate(SLOT)
    kept.write(0, b"k" * SLOT)
    target = device.empty(SLOT)
    send(queue, None, [(target, kept)])
    sent = fill(queue, device, b"s" * SLOT)
    with ThreadPoolExecutor(1) as pool:
        slot = pool.submit(queue.acquire, never)
        while not slot.done():
            device.step()
        first = slot.result()
    assert first is not None
    assert first.address != kept.address
    assert bytes(target.tolist()) == kept.tobytes() == b"k" * SLOT
    assert bytes(sent.tolist()) == b"s" * SLOT
    queue.drain()
    assert device.num_staging == 1


@pytest.mark.parametrize("fault", ["refuse_copy", "fail_copy"])
def test_failing_copies_out_of_other_memory(fault: str) -> None:
    device = FakeDevice(**{fault: 1})  # type: ignore[arg-type]
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    kept = memory.allocate(1)
    with pytest.raises(DeviceError):
        send(queue, None, [(device.empty(1), kept)])
        queue.close()
    assert device.num_pending == 0
    slot = queue.acquire(never)
    assert slot is not None
    assert slot.address != kept.address


# Slots that are retired.


def test_retiring_waits_for_slots_that_are_filled_or_copied() -> None:
    device = FakeDevice(manual=True)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=4)
    in_hand, idle = queue.acquire(never), queue.acquire(never)
    assert in_hand is not None
    assert idle is not None
    flying = fill(queue, device, b"f")
    queue.release(idle)
    del idle
    with ThreadPoolExecutor(1) as pool:
        retiring = pool.submit(queue.retire, never)
        while queue.held_bytes > 2 * SLOT:
            threading.Event().wait(0.001)
        with pytest.raises(MemoryError, match="retired"):
            queue.acquire(never)
        device.step()
        send(queue, in_hand, [(target := device.empty(1), in_hand.sub(0, 1))])
        in_hand = None
        with pytest.raises(TimeoutError):
            retiring.result(0.02)
        device.step()
        assert retiring.result(30)
    assert (queue.held_bytes, flying.item(), target.item()) == (0, ord("f"), POISON)
    queue.close()


def test_retiring_ends_with_the_load() -> None:
    queue = CopyQueue[str](FakeDevice(), slot_bytes=SLOT, num_slots=1)
    slot = queue.acquire(never)
    assert slot is not None
    stopped = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        retiring = pool.submit(queue.retire, stopped.is_set)
        with pytest.raises(TimeoutError):
            retiring.result(0.02)
        stopped.set()
        retiring.result(30)
    queue.release(slot)
    queue.close()
    assert queue.held_bytes == 0


def test_retiring_raises_the_error_of_a_copy() -> None:
    device = FakeDevice(fail_copy=1)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    fill(queue, device, b"x")
    with pytest.raises(DeviceError, match="failed"):
        queue.retire(never)
    queue.close()


def test_retiring_ends_after_a_failed_copy() -> None:
    """Its slot is in use until the end; another thread has got the error."""
    device = FakeDevice(fail_copy=1)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    fill(queue, device, b"x")
    with pytest.raises(DeviceError, match="failed"):
        queue.drain()
    assert not queue.retire(never)
    queue.close()
    assert queue.held_bytes == 0


def test_retiring_ends_after_a_refused_copy() -> None:
    """Nobody submits what others put meanwhile: the load ends."""
    device = Stalling(refuse_copy=1)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=2)
    with ThreadPoolExecutor(1) as pool:
        put(queue, device, b"0")
        submitter = pool.submit(queue.submit, ignore)
        assert device.entered.wait(30)
        put(queue, device, b"1")
        queue.submit(ignore)
        device.allowed.set()
        with pytest.raises(DeviceError, match="refused"):
            submitter.result(30)
        assert not pool.submit(queue.retire, never).result(30)
    queue.close()
    assert queue.held_bytes == 0


# One thread submits for all.


class Stalling(FakeDevice):
    """Its first copy is queued when the test allows it."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.entered, self.allowed = threading.Event(), threading.Event()

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Event:
        self.entered.set()
        assert self.allowed.wait(30)
        return super().copy(pairs)


def test_the_submitting_thread_takes_along_what_others_put_meanwhile() -> None:
    """The others do not wait for it; what they put meanwhile is one call and one event."""
    device = Stalling(manual=True)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=4)
    alone, together = GroupMemory(), GroupMemory()
    reported: list[tuple[int, str]] = []
    with ThreadPoolExecutor(1) as pool:
        first = put(queue, device, b"0", alone)
        submitter = pool.submit(queue.submit, lambda block: reported.append((threading.get_ident(), block)))
        assert device.entered.wait(30)
        targets = [put(queue, device, data, together) for data in (b"1", b"2", b"3")]
        queue.submit(lambda block: pytest.fail(f"another thread submits, and this one reported {block}"))
        device.allowed.set()
        submitter.result(30)
    assert [block for _, block in reported] == ["0", "1", "2", "3"]
    assert len({thread for thread, _ in reported} - {threading.get_ident()}) == 1
    (_,), (event,) = alone.events, together.events
    assert device.num_copies == device.num_pending == 2
    assert device.step() == 1
    assert not event.query()
    assert device.step() == 1
    assert event.query()
    assert [target.item() for target in (first, *targets)] == [ord(digit) for digit in "0123"]
    slots = [queue.acquire(never) for _ in range(4)]  # an event releases all slots that were copied before it
    assert len({slot.address for slot in slots if slot}) == 4
    assert device.num_staging == 4


def test_c96_who_reports_may_wait_for_the_slots_of_others() -> None:
    """What another thread put meanwhile is submitted before a block is reported: no other thread submits it."""
    device = Stalling()
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=2)
    reported: list[str] = []

    def report(block: str) -> None:
        reported.append(block)
        queue.retire(never)

    with ThreadPoolExecutor(1) as pool:
        first = put(queue, device, b"0")
        submitter = pool.submit(queue.submit, report)
        assert device.entered.wait(30)
        second = put(queue, device, b"1")
        queue.submit(lambda block: pytest.fail(f"another thread submits, and this one reported {block}"))
        device.allowed.set()
        submitter.result(30)
    assert reported == ["0", "1"]
    assert (first.item(), second.item(), queue.held_bytes) == (ord("0"), ord("1"), 0)
    queue.close()


def test_one_group_at_a_time_is_cloned() -> None:
    """Of two groups in a device that is nearly full, the second finds the memory that the first has given back."""
    device = FakeDevice(memory_bytes=3 * 800)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    names = [f"t{k}" for k in range(200)]
    layout = Tensors(names, ["F32"] * 200, [()] * 200, [4 * k for k in range(200)])
    inside = threading.Barrier(2)

    def make(group: GroupMemory) -> int:
        def work() -> dict[str, torch.Tensor]:
            made = group.separate(device)
            threading.Event().wait(0.02)  # another call that runs meanwhile finds no memory
            return made

        inside.wait(30)
        return len(queue.run(work, group))

    groups = GroupMemory.allocate(device, [layout, layout])
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(make, groups.pop()) for _ in range(2)]
        assert [one.result(30) for one in made] == [200, 200]
    queue.close()


@pytest.mark.parametrize("fault", ["refuse_copy", "fail_copy"])
def test_a_copy_of_several_slots_that_fails(fault: str) -> None:
    """Refused, all of them are free again; failed, none is filled again. In both cases the number of slots is the same."""
    device = FakeDevice(**{fault: 1})  # type: ignore[arg-type]
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=3)
    for data in (b"1", b"2", b"3"):
        put(queue, device, data)
    with pytest.raises(DeviceError):
        queue.submit(ignore)
        queue.drain()
    queue.submit(lambda block: pytest.fail(f"{block} was submitted already"))
    slots = [queue.acquire(never) for _ in range(3)]
    assert len({slot.address for slot in slots if slot}) == 3
    assert device.num_staging == (3 if fault == "refuse_copy" else 6)


def test_closing_drops_what_was_put_and_never_submitted() -> None:
    device = FakeDevice()
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=3)
    fill(queue, device, b"0")
    targets = [put(queue, device, b"1"), put(queue, device, b"2")]
    queue.close()
    queue.submit(lambda block: pytest.fail(f"{block} was dropped"))
    assert [target.item() for target in targets] == [POISON] * 2
    gc.collect()
    assert (queue.held_bytes, device.staging_bytes, device.num_copies) == (0, 0, 1)


def test_a_refused_copy_releases_its_slot() -> None:
    device = FakeDevice(refuse_copy=1)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    with pytest.raises(DeviceError, match="refused"):
        fill(queue, device, b"x")
    assert bytes(fill(queue, device, b"y").tolist()) in (b"y", bytes([POISON]))
    queue.drain()
    assert device.num_staging == 1


def test_a_failed_copy_is_raised_to_the_thread_that_waits_for_its_slot() -> None:
    """That slot is never filled again, as the device may still read it; another one is allocated instead."""
    device = FakeDevice(manual=True, fail_copy=1)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    lost = queue.acquire(never)
    assert lost is not None
    send(queue, lost, [(device.empty(1), lost.sub(0, 1))])
    device.step()
    with pytest.raises(DeviceError, match="failed"):
        queue.acquire(never)
    slot = queue.acquire(never)
    assert slot is not None
    assert slot.address != lost.address
    assert device.num_staging == 2


def test_drain_waits_for_all_copies_whatever_fails() -> None:
    device = FakeDevice(fail_copy=2)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=4)
    targets = [fill(queue, device, bytes([k])) for k in range(4)]
    with pytest.raises(DeviceError, match="copy 2 failed"):
        queue.drain()
    assert device.num_pending == 0
    assert [target.item() for target in targets] == [0, POISON, 2, 3]
    queue.drain()
    slots = [queue.acquire(never) for _ in range(4)]
    assert len({slot.address for slot in slots if slot}) == 4
    assert device.num_staging == 5


def test_drain_waits_for_slots_that_others_wait_for() -> None:
    device = FakeDevice(manual=True)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    fill(queue, device, b"x")
    acquirer = threading.Thread(target=lambda: queue.acquire(never))
    acquirer.start()
    drainer = threading.Thread(target=queue.drain)
    drainer.start()
    assert device.num_pending == 1
    device.step()
    for thread in (acquirer, drainer):
        thread.join(30)
        assert not thread.is_alive()


def test_no_host_memory_for_a_slot() -> None:
    device = FakeDevice(refuse_staging=1)
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1)
    with pytest.raises(MemoryError):
        queue.acquire(never)
    assert queue.acquire(never) is not None


def test_copies_are_traced() -> None:
    device, trace = FakeDevice(), Trace()
    queue = CopyQueue[str](device, slot_bytes=SLOT, num_slots=1, trace=trace)
    fill(queue, device, b"abc")
    queue.drain()
    assert [(span.name, span.lane, span.num_bytes) for span in trace.spans] == [("copy", "copy", 3)]
