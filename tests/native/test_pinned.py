"""Pinned memory of the engine: what it is, what is left of it after a refusal, a fork, an end; who unpins it."""

from __future__ import annotations

import ctypes
import mmap
import resource
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from crash.zygote import Zygote
from fake_driver import REFUSED, FakeDriver
from native.support import Device, Memory, take_all
from support import eventually

from stio import native
from stio.native import Failure, Ranges, Transfer, pin

MIB = 1 << 20
HUGE_PAGE_BYTES = 2 * MIB


@pytest.fixture
def before() -> Iterator[int]:
    """What rings have pinned; nothing more is pinned behind the test."""
    native.set_idle(0)
    before = native.pinned_bytes()
    yield before
    assert eventually(lambda: native.pinned_bytes() <= before)
    native.set_idle(10)


@pytest.mark.parametrize("nbytes", [1, 4096, MIB + 1, 9 * MIB])
def test_memory_is_pinned_and_released(device: Device, before: int, nbytes: int) -> None:
    of_device = device.pinned_bytes
    address, length, free = pin(device.driver, nbytes, None)
    assert length == nbytes
    assert address % HUGE_PAGE_BYTES == 0
    whole_pages = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    assert device.pinned_bytes - of_device == native.pinned_bytes() - before == whole_pages
    assert ctypes.string_at(address, nbytes) == bytes(nbytes)
    ctypes.memset(address, 7, whole_pages)
    free()
    assert eventually(lambda: device.pinned_bytes == of_device)


@pytest.mark.slow
@pytest.mark.usefixtures("before")
def test_it_is_pinned_in_pieces() -> None:
    """Some systems refuse 2 GiB at once."""
    fake = FakeDriver()
    _, _, free = pin(fake.driver, native.PINNED_BYTES + 3 * MIB, None)
    assert fake.pinned == [native.PINNED_BYTES, 3 * MIB]
    free()
    assert eventually(lambda: fake.pinned_bytes == 0)


@pytest.mark.slow
@pytest.mark.usefixtures("before")
def test_several_threads_touch_it(device: Device) -> None:
    """So the calling thread does not fault in all of its pages."""
    native.set_threads(4)

    def caller_s_part() -> float:
        kinds = resource.RUSAGE_THREAD, resource.RUSAGE_SELF
        first = [resource.getrusage(kind).ru_minflt for kind in kinds]
        _, _, free = pin(device.driver, 256 * MIB, None)
        last = [resource.getrusage(kind).ru_minflt for kind in kinds]
        free()
        return (last[0] - first[0]) / max(1, last[1] - first[1])

    assert eventually(lambda: caller_s_part() < 0.75)


@pytest.mark.slow
@pytest.mark.usefixtures("before")
def test_memory_is_the_callers_when_it_is_pinned(device: Device) -> None:
    """Nobody touches it any more."""
    native.set_threads(4)
    for _ in range(20):
        address, nbytes, free = pin(device.driver, 20 * MIB, None)
        ctypes.memset(address, 7, nbytes)
        time.sleep(0.03)
        assert ctypes.string_at(address, nbytes) == bytes([7]) * nbytes
        free()


@pytest.mark.usefixtures("before")
def test_each_device_pins_and_unpins_in_its_context(devices: list[Device], device: Device) -> None:
    """The devices require that."""
    of_devices = device.pinned_bytes
    made = [pin(devices[k % 2].driver, MIB, None) for k in range(10)]
    for _, _, free in made:
        free()
    assert eventually(lambda: device.pinned_bytes == of_devices)


@pytest.mark.slow
def test_nothing_is_left_of_a_thousand(device: Device, before: int) -> None:
    def once() -> None:
        address, _, free = pin(device.driver, 300_000, None)
        ctypes.memset(address, 1, 300_000)
        free()

    def resident() -> int:
        assert eventually(lambda: native.pinned_bytes() <= before)
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    def num_mappings() -> int:
        return len(Path("/proc/self/maps").read_text().splitlines())

    for _ in range(100):
        once()
    resident_before, mappings_before = resident(), num_mappings()
    for _ in range(1000):
        once()
    assert resident() < resident_before + 4 * MIB
    assert num_mappings() < mappings_before + 20


# Who unpins it, and when.


def test_a_release_waits_for_nothing_and_loads_go_on(device: Device, before: int) -> None:
    """One thread of the engine unpins. The others move the bytes of loads."""
    native.set_threads(4)
    made = [pin(device.driver, MIB, None) for _ in range(8)]
    device.hold_unpin(True)
    start = time.monotonic()
    for _, _, free in made:
        free()
    assert time.monotonic() - start < 1
    assert eventually(lambda: device.unpin_waits)
    source, target = Memory(MIB), Memory(MIB)
    transfer, ranges = Transfer(), Ranges()
    for group in range(20):
        ranges.host_to_host(group, source.address, MIB, target.address)
    transfer.add(ranges)
    take_all(transfer, 20)
    transfer.end()
    assert native.pinned_bytes() >= before + 8 * MIB
    device.hold_unpin(False)
    assert eventually(lambda: native.pinned_bytes() <= before)


# Where it is refused.


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2])
def test_a_refusal_of_the_driver_leaves_nothing(before: int, number: int) -> None:
    """Where the second piece is refused the first one is unpinned."""
    fake = FakeDriver(refuse_pin=number)
    with pytest.raises(Failure) as caught:
        pin(fake.driver, native.PINNED_BYTES + MIB, None)
    assert (caught.value.kind, caught.value.code) == (native.DRIVER, REFUSED)
    assert str(caught.value) == f"as the test asked, code {REFUSED}"
    assert len(fake.pinned) == number - 1
    assert fake.pinned_bytes == 0
    assert native.pinned_bytes() <= before


@pytest.mark.usefixtures("before")
def test_a_context_that_is_refused(device: Device) -> None:
    of_device = device.pinned_bytes
    device.fail(context=1)
    with pytest.raises(Failure) as caught:
        pin(device.driver, MIB, None)
    assert caught.value.kind == native.DRIVER
    assert device.pinned_bytes == of_device
    pin(device.driver, MIB, None)[2]()


@pytest.mark.usefixtures("before")
def test_no_memory() -> None:
    fake = FakeDriver()
    with pytest.raises(Failure) as caught:
        pin(fake.driver, 1 << 60, None)
    assert (caught.value.kind, caught.value.nbytes, str(caught.value)) == (
        native.NO_MEMORY,
        1 << 60,
        "no memory, code 12",
    )
    assert fake.pinned == []


# Processes.

START = """
import ctypes, os, sys, threading, time
from pathlib import Path
from fake_driver import FakeDriver
from native.support import devices_of
from stio import native
from stio.native import Failure, pin
from support import eventually
MIB = 1 << 20
"""

UNPIN_IS_REFUSED = (
    START
    + """
fake = FakeDriver(refuse_unpin=True)
address, _, free = pin(fake.driver, MIB, None)
ctypes.memset(address, 7, MIB)
free()
_, _, free = pin(fake.driver, MIB, None)
free()
time.sleep(0.2)
assert ctypes.string_at(address, MIB) == bytes([7]) * MIB
assert native.pinned_bytes() == fake.pinned_bytes == 2 * MIB
"""
)

FORK = (
    START
    + """
import warnings
warnings.simplefilter("ignore")  # about forks of a process with threads
device = devices_of(Path(sys.argv[1]))[0]
first, second = (pin(device.driver, 5 * MIB, None) for _ in range(2))
ctypes.memset(first[0], 7, 5 * MIB)
child = os.fork()
if not child:
    try:
        assert native.pinned_bytes() == 0
        first[2]()
        second[2]()
        address, _, free = pin(device.driver, 64 * MIB, None)  # its own
        assert native.pinned_bytes() == 64 * MIB
        ctypes.memset(address, 9, 64 * MIB)
        free()
        assert eventually(lambda: native.pinned_bytes() == 0)
        assert device.pinned_bytes == 10 * MIB  # what the child's copy of the driver knows of the parent's
        os._exit(0)
    except BaseException:
        import traceback
        traceback.print_exc()
    finally:
        os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert ctypes.string_at(first[0], 5 * MIB) == bytes([7]) * 5 * MIB
assert device.pinned_bytes == native.pinned_bytes() == 10 * MIB
first[2]()
second[2]()
assert eventually(lambda: device.pinned_bytes == 0)
"""
)

EXIT = (
    START
    + """
device = devices_of(Path(sys.argv[1]))[0]
made = [pin(device.driver, MIB, None) for _ in range(20)]
native._functions().engine_end(10_000)
made[0][2]()  # nobody unpins it: the system does
later = pin(device.driver, 9 * MIB, None)  # by this thread alone
time.sleep(0.1)
assert device.pinned_bytes == native.pinned_bytes() == 29 * MIB
"""
)

EXIT_WHILE_RELEASED = (
    START
    + """
device = devices_of(Path(sys.argv[1]))[0]
for one in [pin(device.driver, MIB, None) for _ in range(200)]:
    one[2]()
"""
)

MEMLOCK = (
    START
    + """
import logging, resource
import torch
from stio.device.pinned import drivers
from stio.device import pinned

class Locking(FakeDriver):
    \"\"\"Locks memory instead of pinning it: the system refuses what is more than its limit.\"\"\"

    def _pin(self, address, nbytes, flags):
        return ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)) and 12

resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))
if os.geteuid() == 0:
    os.setresuid(65534, 65534, 65534)  # root has no limit
driver = Locking().driver
drivers["cuda"] = lambda device, stream: (driver, 0)
class Module:
    def device(self, device):
        from contextlib import nullcontext
        return nullcontext()
torch.get_device_module = lambda device: Module()
allocate = pinned.PinnedAllocator(torch.device("cuda:0"))
logging.basicConfig(format="%(message)s", stream=sys.stdout)
found = [allocate(64 << 10), allocate(8 << 20), allocate(64 << 10)]
assert [pinned.is_pinned(one) for one in found] == [True, False, False]
assert [one.nbytes for one in found] == [64 << 10, 8 << 20, 64 << 10]
"""
)


@pytest.mark.matrix
@pytest.mark.parametrize(
    "script", [UNPIN_IS_REFUSED, FORK, EXIT, EXIT_WHILE_RELEASED], ids=["unpin is refused", "fork", "exit", "release"]
)
def test_processes(zygote: Zygote, script: str, device_library: Path) -> None:
    """What the driver does not unpin stays mapped: the device may still use it. A child unpins nothing of its parent."""
    done = zygote.run(script, device_library)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_low_limit_of_locked_memory(zygote: Zygote) -> None:
    done = zygote.run(MEMLOCK)
    assert done.returncode == 0, done.stdout + done.stderr
    warning = "pinning host memory failed, copies to cuda:0 will be slower: as the test asked, code 12"
    assert done.stdout.splitlines() == [warning]
