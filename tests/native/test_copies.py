"""Copies that are queued on a stream of a caller: their order, their bytes, what is refused."""

from __future__ import annotations

import pytest
from native.support import POISON, Device, Memory, random_bytes
from support import eventually

from stio import native
from stio.native import Failure, Ranges

BOTH = pytest.mark.parametrize("to_host", [False, True])
SIZES = [1, 0, 4096, 7, 100_003, 0]
NBYTES = 2 * sum(SIZES) + len(SIZES)


def queue(device: Device, ranges: Ranges, *, to_host: bool) -> None:
    native.queue_copies(device.driver, device.pointer, ranges, to_host=to_host)


def waited_for(device: Device, memory: Memory) -> None:
    assert eventually(lambda: not device.refers_to(memory))


@BOTH
def test_bytes_arrive_and_no_others(device: Device, to_host: bool) -> None:
    source, target, ranges, expected = Memory(NBYTES), Memory(NBYTES), Ranges(), bytearray([POISON]) * NBYTES
    source.fill(random_bytes(NBYTES))
    begin = at = 0
    for nbytes in SIZES:
        ranges.of_device(source.address + begin, nbytes, target.address + at)
        expected[at : at + nbytes] = source[begin : begin + nbytes]
        begin, at = begin + 2 * nbytes, at + nbytes + 1
    before = device.num_copies
    queue(device, ranges, to_host=to_host)
    waited_for(device, target)
    assert target[:] == bytes(expected)
    target.require_guards()
    assert device.num_copies - before == sum(nbytes > 0 for nbytes in SIZES)


@BOTH
def test_they_are_queued_in_their_order_and_not_waited_for(device: Device, to_host: bool) -> None:
    one, other, ranges = Memory(100), Memory(100), Ranges()
    one.fill(b"a" * 100)
    ranges.of_device(one.address, 100, other.address)
    ranges.of_device(other.address, 50, one.address + 50)
    ranges.of_device(other.address + 99, 1, one.address)
    other.fill(b"b" * 100)
    device.pause()
    queue(device, ranges, to_host=to_host)
    assert device.refers_to(one)
    assert other[:] == b"b" * 100
    device.step(1)
    assert eventually(lambda: other[:] == b"a" * 100)
    device.resume()
    waited_for(device, one)
    assert one[:] == b"a" * 100


@BOTH
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_refused_copy_is_told_and_those_before_it_are_queued(device: Device, to_host: bool, number: int) -> None:
    source, target, ranges = Memory(300), Memory(300), Ranges()
    source.fill(b"x" * 300)
    for k in range(3):
        ranges.of_device(source.address + 100 * k, 100, target.address + 100 * k)
    device.fail(copy=number)
    with pytest.raises(Failure) as caught:
        queue(device, ranges, to_host=to_host)
    assert (caught.value.kind, caught.value.code, caught.value.text) == (native.DRIVER, 801, "copy refused")
    waited_for(device, target)
    done = 100 * (number - 1)
    assert target[:] == b"x" * done + bytes([POISON]) * (300 - done)


def test_a_context_that_is_refused(device: Device) -> None:
    memory, ranges = Memory(100), Ranges()
    ranges.of_device(memory.address, 50, memory.address + 50)
    device.fail(context=1)
    before = device.num_copies
    with pytest.raises(Failure) as caught:
        queue(device, ranges, to_host=False)
    assert (caught.value.kind, caught.value.text) == (native.DRIVER, "another error")
    assert device.num_copies == before


def test_nothing_to_copy(device: Device) -> None:
    queue(device, Ranges(), to_host=True)
