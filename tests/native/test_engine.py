"""The engine's contract, through its binding: what is moved, what is reported, what is waited for."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from counts import count
from native.support import (
    ENGINE_SOURCES,
    PATIENCE_SECONDS,
    POISON,
    PYTHON_PATH,
    REPOSITORY,
    Device,
    File,
    Memory,
    OpenedFile,
    compiled,
    engine_threads,
    random_bytes,
    run_script,
    take_all,
)

from stio import native
from stio.native import CHUNK_BYTES, Done, Failure, Ranges, Transfer

MIB = 1 << 20
FILE_BYTES = 11 * MIB + 77
FILE_SECONDS = 20.0
SOURCE = Memory(4 * MIB)
SOURCE.fill(random_bytes(4 * MIB, 2))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[File]:
    one = File(tmp_path_factory.mktemp("files") / "file", FILE_BYTES)
    yield one
    one.close()


def eventually(condition: Callable[[], bool]) -> bool:
    until = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


class Waiting:
    """A call on a thread of its own."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=call, daemon=True)
        self._thread.start()

    def ends(self, seconds: float = PATIENCE_SECONDS) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()


def settle(device: Device) -> int:
    """Wait until no further copy is queued on a paused device; return how many there were."""
    found, since = -1, time.monotonic()
    while time.monotonic() - since < 0.1:
        if device.num_copies != found:
            found, since = device.num_copies, time.monotonic()
        time.sleep(0.005)
    return found


# What is moved.

SIZES = [0, 1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * MIB + 3, 8 * MIB]
PLACES = [0, 4096, 1, 4097, 12345]
WAYS = ["file to host", "direct to host", "file to device", "direct to device", "host to host", "host to device"]


def add(
    ranges: Ranges, way: str, group: int, file: File, offset: int, nbytes: int, target: int, device: Device
) -> None:
    direct_fd = file.direct_fd if way.startswith("direct") else -1
    source = ctypes.cast(file.bytes, ctypes.c_void_p).value or 0
    if way == "host to host":
        ranges.host_to_host(group, source + offset, nbytes, target)
    elif way == "host to device":
        ranges.host_to_device(group, source + offset, nbytes, target, device.ring)
    elif way.endswith("device"):
        ranges.file_to_device(group, file.fd, direct_fd, offset, nbytes, target, device.ring)
    else:
        ranges.file_to_host(group, file.fd, direct_fd, offset, nbytes, target)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_bytes_arrive_and_no_others(way: str, file: File, device: Device) -> None:
    cases = [(offset, nbytes, shift) for nbytes in SIZES for offset in PLACES for shift in (0, 7)]
    cases += [(FILE_BYTES - nbytes, nbytes, 0) for nbytes in SIZES]
    memories, ranges, transfer = [], Ranges(), Transfer()
    for group, (offset, nbytes, shift) in enumerate(cases):
        memories.append(Memory(nbytes, shift))
        add(ranges, way, group, file, offset, nbytes, memories[-1].address, device)
    transfer.add(ranges)
    take_all(transfer, len(cases))
    for memory, (offset, nbytes, _) in zip(memories, cases, strict=True):
        assert memory[:] == file.bytes[offset : offset + nbytes]
        memory.require_guards()
    assert transfer.moved_bytes == sum(nbytes for _, nbytes, _ in cases)
    transfer.end()


@pytest.mark.matrix
@pytest.mark.parametrize("way", WAYS[:4])
@pytest.mark.parametrize("gap", [0, 1, 100, 4096, 65536, 65537, 300_000])
def test_ranges_of_a_group_share_reads_and_gaps_go_nowhere(way: str, gap: int, file: File, device: Device) -> None:
    for size, number in ((1, 1500), (10, 700), (5000, 60), (50_000, 30), (300_000, 20), (3 * MIB, 3)):
        offsets = [3 + k * (size + gap) for k in range(number)]
        offsets = [offset for offset in offsets if offset + size <= FILE_BYTES]
        memory = Memory(len(offsets) * (size + 5), 3)
        places = [k * (size + 5) for k in reversed(range(len(offsets)))]  # in memory in another order
        ranges, transfer = Ranges(), Transfer()
        for offset, place in zip(offsets, places, strict=True):
            add(ranges, way, 0, file, offset, size, memory.address + place, device)
        transfer.add(ranges)
        take_all(transfer, 1)
        for offset, place in zip(offsets, places, strict=True):
            assert memory[place : place + size + 5] == file.bytes[offset : offset + size] + bytes([POISON]) * 5
        memory.require_guards()


@pytest.mark.parametrize("size", [1, 100, 5000, 300_000])
def test_copies_of_a_group_share_chunks(size: int) -> None:
    """The offsets only say which copies follow each other; gaps are not copied, and any order is right."""
    source, count = SOURCE.address, min(2000, 3 * MIB // size)
    for style in ("ascending", "gaps", "equal", "descending"):
        memory, ranges, transfer = Memory(count * (size + 3)), Ranges(), Transfer()
        for k in range(count):
            offset = {"ascending": k * size, "gaps": 2 * k * size, "equal": 0, "descending": (count - k) * size}[style]
            ranges.host_to_host(0, source + k * size, size, memory.address + k * (size + 3), offset)
        transfer.add(ranges)
        take_all(transfer, 1)
        for k in range(count):
            found = memory[k * (size + 3) : (k + 1) * (size + 3)]
            assert found == SOURCE[k * size : (k + 1) * size] + bytes([POISON]) * 3
        memory.require_guards()


# Writes.


class Target(OpenedFile):
    """A file to write into."""

    def __init__(self, path: Path, nbytes: int) -> None:
        super().__init__(path, bytes([POISON]) * nbytes, os.O_RDWR)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[Target]:
    one = Target(tmp_path / "target", 18 * MIB)
    yield one
    one.close()


@pytest.mark.matrix
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("shift", [0, 1, 512, 4095])
def test_bytes_are_written_and_no_others(direct: bool, shift: int, file: File, target: Target) -> None:
    source = Memory(17 * MIB, shift)
    source.fill(file.bytes)
    source.fill_at(FILE_BYTES, file.bytes[: 17 * MIB - FILE_BYTES])
    for offset in (0, 1, 4095, 4096, 12_345):
        for nbytes in (0, 1, 4095, 4096, 4097, 12_289, 8 * MIB, 8 * MIB + 1, 16 * MIB + 4097):
            os.pwrite(target.fd, bytes([POISON]) * (offset + nbytes + 5000), 0)
            # Of memory and file the first page is at the same place, where the source is aligned.
            at = offset % 4096 if shift == 0 else 0
            transfer, ranges = Transfer(max_chunks=2), Ranges()
            ranges.host_to_file(0, source.address + at, nbytes, target.fd, target.direct_fd if direct else -1, offset)
            transfer.add(ranges)
            take_all(transfer, 1)
            transfer.end()
            found = os.pread(target.fd, nbytes + 5000, offset)
            assert found == source[at : at + nbytes] + bytes([POISON]) * 5000
            assert os.pread(target.fd, offset, 0) == bytes([POISON]) * offset
            assert transfer.moved_bytes == nbytes


@pytest.mark.parametrize("offset", [0, 5000])
def test_direct_writes_go_past_the_page_cache(offset: int, tmp_path: Path) -> None:
    file = File(tmp_path / "file", FILE_BYTES)
    target = Target(file.path, FILE_BYTES)
    try:
        os.fsync(target.fd)
        os.posix_fadvise(target.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if target.direct_fd < 0 or resident_pages(file):
            pytest.skip("this filesystem has no writes past the page cache, or its cache cannot be emptied")
        ranges, transfer, source = Ranges(), Transfer(), Memory(9 * MIB)
        at = offset % 4096
        source.fill(file.bytes[: 9 * MIB])
        ranges.host_to_file(0, source.address + at, 8 * MIB + 1, target.fd, target.direct_fd, offset)
        transfer.add(ranges)
        take_all(transfer, 1)
        assert resident_pages(file) < 40
        assert file.path.read_bytes()[offset : offset + 8 * MIB + 1] == source[at : at + 8 * MIB + 1]
    finally:
        target.close()
        file.close()


def test_many_writes_beside_copies(file: File, target: Target) -> None:
    """What a save does: blocks are filled from small tensors, then written, several at a time."""
    blocks, transfer = [Memory(MIB) for _ in range(16)], Transfer(max_chunks=4)
    source = Memory(FILE_BYTES)
    source.fill(file.bytes)
    ranges = Ranges()
    for number, block in enumerate(blocks):
        for at in range(0, MIB, 1000):
            nbytes = min(1000, MIB - at)
            place = (at + number * 7919) % (FILE_BYTES - 1000)
            ranges.host_to_host(number, source.address + place, nbytes, block.address + at, at)
    transfer.add(ranges)
    num_written = 0
    while num_written < 16:
        found = transfer.take(PATIENCE_SECONDS)
        assert found
        ranges = Ranges()
        for one in found:
            if one.group < 16:
                address, fds = blocks[one.group].address, (target.fd, target.direct_fd)
                ranges.host_to_file(16 + one.group, address, MIB, *fds, one.group * MIB)
            num_written += one.group >= 16
        transfer.add(ranges)
        transfer.arrange(range(16))
    for number, block in enumerate(blocks):
        expected = b"".join(
            file.bytes[place : place + min(1000, MIB - at)]
            for at in range(0, MIB, 1000)
            for place in [(at + number * 7919) % (FILE_BYTES - 1000)]
        )
        assert block[:] == expected == os.pread(target.fd, MIB, number * MIB)
        block.require_guards()


@pytest.mark.parametrize("name", ["EBADF", "EFAULT", "ESPIPE", "ENOSPC", "EINVAL"])
def test_a_write_fails(name: str, target: Target) -> None:
    source, opened = Memory(2 * MIB), []
    address, fd, offset = source.address, target.fd, 4096
    if name == "EBADF":
        fd = os.open(target.path, os.O_RDONLY)
        opened = [fd]
    elif name == "ESPIPE":
        opened = [*os.pipe()]
        fd = opened[1]
    elif name == "EFAULT":
        address = 4096  # no page is there
    elif name == "ENOSPC":
        fd = os.open("/dev/full", os.O_WRONLY)
        opened = [fd]
    else:
        offset = -4096  # refused for O_DIRECT means: through the page cache; there it is an error
    transfer, ranges = Transfer(), Ranges()
    ranges.host_to_file(3, address, 2 * MIB, fd, target.direct_fd if name == "EINVAL" else -1, offset)
    transfer.add(ranges)
    with pytest.raises(Failure) as caught:
        while True:
            assert transfer.take(PATIENCE_SECONDS)
    found = caught.value
    assert (found.kind, found.code, found.group, found.populates) == (native.READING, getattr(errno, name), 3, False)
    assert (found.offset, found.nbytes) == (offset, 2 * MIB)
    transfer.end()
    for one in opened:
        os.close(one)


@pytest.mark.slow
def test_no_write_begins_behind_a_stop(target: Target) -> None:
    source = Memory(16 * MIB)
    for _ in range(20):
        os.pwrite(target.fd, bytes(16 * MIB), 0)
        transfer, ranges = Transfer(max_chunks=1), Ranges()
        for group in range(16):
            ranges.host_to_file(group, source.address + group * MIB, MIB, target.fd, target.direct_fd, group * MIB)
        transfer.add(ranges)
        transfer.take(PATIENCE_SECONDS)
        transfer.stop()
        transfer.end()
        found = os.pread(target.fd, 16 * MIB, 0)
        written = [found[k * MIB : (k + 1) * MIB] for k in range(16)]
        assert set(written) <= {bytes(MIB), source[:MIB]}
        assert written == sorted(written, reverse=True)  # a whole number of them, in order
        transfer.take(0)  # what was complete before the stop
        transfer.add(ranges)
        assert transfer.take(0) == []


def test_nothing_is_left_of_a_thousand_writes(target: Target) -> None:
    source = Memory(3 * MIB)

    def once() -> None:
        transfer, ranges = Transfer(max_chunks=2), Ranges()
        for group in range(3):
            ranges.host_to_file(group, source.address, 10_000, target.fd, target.direct_fd, group * MIB)
            ranges.host_to_host(3 + group, source.address, 5000, source.address + MIB)
        transfer.add(ranges)
        transfer.take(None)
        transfer.end()

    def held() -> tuple[int, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        return len(os.listdir("/proc/self/fd")), resident

    for _ in range(100):
        once()
    before = held()
    for _ in range(1000):
        once()
    after = held()
    assert after[0] == before[0]
    assert after[1] < before[1] + 4 * MIB


def resident_pages(file: File) -> int:
    """Return how many pages of a file are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    num_pages = -(-len(file.bytes) // mmap.PAGESIZE)
    with mmap.mmap(file.fd, len(file.bytes), access=mmap.ACCESS_COPY) as mapping:
        pages = (ctypes.c_ubyte * num_pages)()
        held = ctypes.c_char.from_buffer(mapping)
        assert libc.mincore(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(len(file.bytes)), pages) == 0
        del held
    return sum(page & 1 for page in pages)


@pytest.mark.parametrize("way", ["direct to host", "direct to device"])
@pytest.mark.parametrize("offset", [0, 5000])
def test_direct_reads_go_past_the_page_cache(way: str, offset: int, tmp_path: Path, device: Device) -> None:
    file = File(tmp_path / "file", FILE_BYTES)
    try:
        os.fsync(file.fd)
        os.posix_fadvise(file.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        if file.direct_fd < 0 or resident_pages(file):
            pytest.skip("this filesystem has no reads past the page cache, or its cache cannot be emptied")
        if way == "direct to host":
            offset = offset // 4096 * 4096  # other places cannot be read so
        memory, ranges, transfer = Memory(8 * MIB), Ranges(), Transfer()
        add(ranges, way, 0, file, offset, memory.nbytes, memory.address, device)
        transfer.add(ranges)
        take_all(transfer, 1)
        assert memory[:] == file.bytes[offset : offset + memory.nbytes]
        assert resident_pages(file) < 40
    finally:
        file.close()


def mapped_bytes(address: int) -> int:
    """Return how many bytes of the mapping at an address are in the page tables."""
    is_here = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (word := line.split()[0]) and not word.endswith(":"):
            is_here = int(word.split("-")[0], 16) <= address < int(word.split("-")[1], 16)
        elif is_here and word == "Rss:":
            return int(line.split()[1]) * 1024
    raise AssertionError("there is no such mapping")


@pytest.mark.matrix
@pytest.mark.parametrize("flags", [native.POPULATE, native.POPULATE | native.TOUCH])
def test_a_mapping_is_populated(flags: int, file: File) -> None:
    with mmap.mmap(file.fd, FILE_BYTES, access=mmap.ACCESS_COPY) as mapping:
        held = ctypes.c_char.from_buffer(mapping)
        address = ctypes.addressof(held)
        os.lseek(file.fd, 123, os.SEEK_SET)
        before = mapped_bytes(address)
        memory, ranges, transfer = Memory(5000), Ranges(), Transfer()
        ranges.file_to_host(0, file.fd, -1, 100, 9 * MIB, address + 100, flags)
        ranges.file_to_host(0, file.fd, -1, 100 + 9 * MIB, 5000, memory.address)  # next to it, and moved in another way
        transfer.add(ranges)
        take_all(transfer, 1)
        assert mapped_bytes(address) >= before + 9 * MIB
        assert mapping[100 : 100 + 9 * MIB] == file.bytes[100 : 100 + 9 * MIB]
        assert memory[:] == file.bytes[100 + 9 * MIB :][:5000]
        assert os.lseek(file.fd, 0, os.SEEK_CUR) == 123  # the position is the caller's
        del held


# What is reported.


def plan(count: int, nbytes: int, target: Memory, first: int = 0) -> Ranges:
    """Return groups that move memory to memory."""
    ranges = Ranges()
    for k in range(count):
        ranges.host_to_host(first + k, SOURCE.address, nbytes, target.address)
    return ranges


def test_many_groups_come_in_one_call() -> None:
    target, transfer = Memory(100), Transfer()
    transfer.add(plan(600, 100, target))
    assert eventually(lambda: transfer.moved_bytes == 60_000)
    found = [transfer.take(0), transfer.take(0), transfer.take(0)]
    assert [len(one) for one in found] == [256, 256, 88]
    assert sorted(done.group for one in found for done in one) == list(range(600))
    assert transfer.take(0) == []


def test_groups_begin_in_their_order(file: File) -> None:
    memory, ranges, transfer = Memory(200 * 4000), Ranges(), Transfer()
    for group in range(200):
        ranges.file_to_host(group, file.fd, -1, group * 5000, 4000, memory.address + group * 4000)
    before = time.perf_counter()
    transfer.add(ranges)
    done = take_all(transfer, 200)
    started = [one.started for one in sorted(done)]
    assert started == sorted(started)
    assert all(before <= one.started <= one.ended <= time.perf_counter() for one in done)
    assert {one.thread for one in done} <= set(range(native.num_threads()))


def started_order(done: list[Done]) -> list[int]:
    return [one.group for one in sorted(done, key=lambda one: one.started)]


def test_arranged_groups_are_next_and_none_is_lost(file: File, device: Device) -> None:
    device.pause()
    memory, ranges, transfer = Memory(12 * MIB), Ranges(), Transfer(max_chunks=1)
    ranges.file_to_device(0, file.fd, -1, 0, 5 * MIB, memory.address, device.ring)  # in three chunks
    for group in range(1, 10):
        ranges.file_to_device(
            group, file.fd, -1, group * 1000, 1000, memory.address + 6 * MIB + group * 1000, device.ring
        )
    transfer.add(ranges)
    assert eventually(lambda: device.num_copies > 0)
    settle(device)
    transfer.arrange([7, 99, -1, 3, 7])
    device.resume()
    done = take_all(transfer, 10)
    assert started_order(done) == [0, 7, 3, 1, 2, 4, 5, 6, 8, 9]
    assert [one.group for one in done][:2] == [7, 3]  # the rest of the first group is behind them
    assert memory[: 5 * MIB] == file.bytes[: 5 * MIB]
    transfer.arrange([1, 2])
    transfer.arrange([])
    assert transfer.take(0) == []


def test_take_waits_for_its_time() -> None:
    transfer = Transfer()
    start = time.monotonic()
    assert transfer.take(0.1) == []
    assert 0.1 <= time.monotonic() - start < FILE_SECONDS
    assert transfer.take(0) == []
    assert transfer.take(1e-9) == []
    transfer.wake()
    assert transfer.take(1e9) == []  # milliseconds beyond an int


def test_a_wake_up_is_not_lost() -> None:
    transfer = Transfer()
    transfer.wake()
    assert Waiting(lambda: transfer.take(None)).ends()  # the one before the call
    for _ in range(200):
        waiting = Waiting(lambda: transfer.take(None))
        transfer.wake()
        assert waiting.ends()
    waiting = Waiting(lambda: transfer.take(None))
    assert not waiting.ends(0.1)
    transfer.wake()
    assert waiting.ends()


def test_take_waits_no_more_behind_a_stop() -> None:
    transfer = Transfer()
    waiting = Waiting(lambda: transfer.take(None))
    transfer.wake()
    transfer.stop()
    assert waiting.ends()
    for _ in range(3):
        assert transfer.take(None) == []
    transfer.add(plan(1, 100, Memory(100)))
    assert transfer.take(None) == []
    transfer.end()
    transfer.end()


def test_a_group_that_comes_wakes_the_consumer(file: File) -> None:
    memory = Memory(1000)
    for _ in range(300):
        transfer, found = Transfer(), []
        waiting = Waiting(lambda transfer=transfer, found=found: found.extend(transfer.take(None)))
        ranges = Ranges()
        ranges.file_to_host(0, file.fd, -1, 0, 1000, memory.address)
        transfer.add(ranges)
        assert waiting.ends()
        assert len(found) == 1


def test_work_is_shared_by_weight() -> None:
    target = Memory(4 * MIB)
    for _ in range(50):
        first, second = Transfer(weight=1), Transfer(weight=3)
        first.add(plan(100, 2 * MIB, target))
        second.add(plan(100, 2 * MIB, target))
        ours = [(one.started, 1) for one in take_all(first, 100)]
        theirs = [(one.started, 3) for one in take_all(second, 100)]
        both = sorted(ours + theirs)
        both = both[both.index(min(theirs)) :]
        if sum(weight == 1 for _, weight in both) >= 40:
            break  # otherwise the first had nearly ended before this thread could add the second
    assert 45 <= sum(weight == 3 for _, weight in both[:80]) <= 70  # 60 of 80


def test_a_transfer_that_had_no_work_does_not_stop_others() -> None:
    target = Memory(4 * MIB)
    late, busy = Transfer(), Transfer()
    busy.add(plan(300, 2 * MIB, target))
    take_all(busy, 300)
    busy.add(plan(150, 2 * MIB, target, first=300))
    late.add(plan(150, 2 * MIB, target))
    busy_starts = [one.started for one in take_all(busy, 150)]
    late_starts = [one.started for one in take_all(late, 150)]
    beside = sum(min(late_starts) < one < max(late_starts) for one in busy_starts)
    assert beside > 50


# Errors.


@pytest.fixture
def broken(file: File, device: Device) -> Iterator[Callable[..., Failure]]:
    """Return a function that adds a range with a fault behind good ones, and returns how the transfer fails."""
    memory = Memory(3 * MIB)

    def run(describe: Callable[[Ranges], None], *, max_chunks: int = 0) -> Failure:
        ranges, transfer = Ranges(), Transfer(max_chunks=max_chunks)
        for group in range(5):
            ranges.file_to_host(group, file.fd, -1, group * 1000, 1000, memory.address + group * 1000)
        describe(ranges)
        transfer.add(ranges)
        with pytest.raises(Failure) as caught:
            num_done = 0
            while num_done < 6:
                found = transfer.take(PATIENCE_SECONDS)
                assert found
                num_done += len(found)
        with pytest.raises(Failure) as again:
            transfer.take(None)
        assert vars(again.value) == vars(caught.value)
        transfer.add(plan(1, 10, memory, first=50))  # ignored
        transfer.end()
        assert not device.refers_to(memory)
        memory.require_guards()
        return caught.value

    yield run


@pytest.mark.parametrize("way", ["file to host", "direct to host", "file to device", "direct to device"])
def test_a_truncated_file_fails(way: str, file: File, device: Device, broken: Callable[..., Failure]) -> None:
    for offset in (FILE_BYTES - 10_000, FILE_BYTES // 4096 * 4096 - 8192, FILE_BYTES, FILE_BYTES + 100_000):
        memory = Memory(20_000)
        found = broken(lambda ranges: add(ranges, way, 9, file, offset, 20_000, memory.address, device))  # noqa: B023
        assert (found.kind, found.group, found.populates) == (native.TRUNCATED, 9, False)
        assert found.offset == max(FILE_BYTES, offset)
        assert found.nbytes == offset + 20_000 - found.offset
        memory.require_guards()


@pytest.mark.parametrize("name", ["EBADF", "EISDIR", "EFAULT", "ESPIPE"])
@pytest.mark.parametrize("to_device", [False, True])
def test_an_errno_is_reported(
    name: str, to_device: bool, file: File, device: Device, broken: Callable[..., Failure], tmp_path: Path
) -> None:
    if to_device and name == "EFAULT":
        pytest.skip("the target is the slot")
    memory = Memory(5000)
    target, fd, opened = memory.address, file.fd, []
    if name == "EBADF":
        fd = 100_000
    elif name == "EISDIR":
        opened = [os.open(tmp_path, os.O_RDONLY)]
    elif name == "ESPIPE":
        opened = [*os.pipe()]
    else:
        target = 4096  # no page is there
    fd = opened[0] if opened else fd

    def describe(ranges: Ranges) -> None:
        if to_device:
            ranges.file_to_device(6, fd, -1, 777, 5000, target, device.ring)
        else:
            ranges.file_to_host(6, fd, -1, 777, 5000, target)

    found = broken(describe)
    assert (found.kind, found.code, found.group, found.offset) == (native.READING, getattr(errno, name), 6, 777)
    assert set(memory[:]) == {POISON}
    for one in opened:
        os.close(one)


def test_a_mapping_of_a_file_that_was_cut(tmp_path: Path, broken: Callable[..., Failure]) -> None:
    file = File(tmp_path / "cut", 100_000)
    with mmap.mmap(file.fd, 100_000, access=mmap.ACCESS_COPY) as mapping:
        held = ctypes.c_char.from_buffer(mapping)
        address = ctypes.addressof(held)
        os.truncate(file.path, 30_000)
        found = broken(lambda ranges: ranges.file_to_host(6, file.fd, -1, 0, 100_000, address, native.POPULATE))
        assert (found.kind, found.offset, found.nbytes, found.populates) == (native.SHRUNK, 30_000, 70_000, True)
        found = broken(lambda ranges: ranges.file_to_host(6, 100_000, -1, 0, 100_000, address, native.POPULATE))
        assert (found.kind, found.code, found.populates) == (native.READING, errno.EBADF, True)
        del held
    file.close()


@pytest.mark.matrix
@pytest.mark.parametrize("which", ["copy", "event", "creation", "context"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_failure_of_the_driver(
    which: str, nth: int, file: File, device: Device, devices: list[Device], broken: Callable[..., Failure]
) -> None:
    if which == "context" and nth > 1:
        pytest.skip("a thread makes a context the current one once")
    memory = Memory(8 * MIB)

    def describe(ranges: Ranges) -> None:
        for k in range(8):
            ranges.file_to_device(6, file.fd, -1, k * MIB, 1000, memory.address + 4 * MIB + k * 1000, ring)
        ranges.file_to_device(6, file.fd, -1, 8 * MIB, 2 * MIB, memory.address, ring)

    ring = device.ring
    device.delay(2000)  # so that events are waited for
    if which == "context":  # the threads use another device's
        other, transfer, ranges = Memory(64 * MIB), Transfer(), Ranges()
        for k in range(32):
            ranges.host_to_device(k, SOURCE.address, 2 * MIB, other.address + 2 * MIB * k, devices[1].ring)
        transfer.add(ranges)
        take_all(transfer, 32)
    device.fail(**{which: nth})
    found = broken(describe)
    codes = {"copy": 801, "event": 719, "creation": 2, "context": 201}
    assert (found.kind, found.code, found.group) == (native.DRIVER, codes[which], 6)
    assert found.text == ("copy refused" if which == "copy" else "another error")
    assert not device.refers_to(memory)
    assert device.ring.has_failed == (which == "event")  # a copy that is refused is the error of its load alone
    device.fail()
    if device.ring.has_failed:  # then all of its chunks fail
        assert broken(describe).code == codes[which]
        device.renew()
    ring = device.ring
    transfer, ranges = Transfer(), Ranges()
    describe(ranges)
    transfer.add(ranges)
    take_all(transfer, 1)
    assert memory[: 2 * MIB] == file.bytes[8 * MIB : 10 * MIB]


def test_refused_pinning_is_slower_and_right(file: File, device: Device) -> None:
    device.fail(pin=True)
    memory, ranges, transfer = Memory(9 * MIB), Ranges(), Transfer()
    assert not device.ring.was_refused
    ranges.file_to_device(0, file.fd, -1, 0, memory.nbytes, memory.address, device.ring)
    transfer.add(ranges)
    take_all(transfer, 1)
    assert memory[:] == file.bytes[: memory.nbytes]
    assert device.ring.was_refused and not device.ring.has_failed
    transfer.end()
    device.ring.trim()
    assert device.ring.held_bytes == 0


# Devices: what is waited for.


def whole_file(file: File, device: Device, memory: Memory, group: int = 0) -> Ranges:
    ranges = Ranges()
    ranges.file_to_device(group, file.fd, -1, 0, memory.nbytes, memory.address, device.ring)
    return ranges


def test_a_group_is_complete_behind_its_copies(file: File, device: Device) -> None:
    device.pause()
    memory, transfer = Memory(FILE_BYTES), Transfer()
    transfer.add(whole_file(file, device, memory))
    assert eventually(lambda: device.num_copies > 0)
    assert transfer.take(0.2) == []
    assert transfer.moved_bytes == 0
    device.resume()
    take_all(transfer, 1)
    assert not device.refers_to(memory)
    assert memory[:] == file.bytes


def test_a_group_is_complete_behind_each_of_its_events(file: File, device: Device) -> None:
    device.pause()
    memory, transfer = Memory(3 * CHUNK_BYTES), Transfer()
    before = device.num_copies
    transfer.add(whole_file(file, device, memory))
    assert eventually(lambda: device.num_copies == before + 3)
    settle(device)
    for _ in range(5):  # a copy and an event of each chunk; the last event is missing
        device.step(1)
        assert transfer.take(0.1) == []
    device.step(1)
    take_all(transfer, 1)
    assert memory[:] == file.bytes[: memory.nbytes]


def test_a_failure_is_reported_behind_the_copies_before_it(file: File, device: Device) -> None:
    device.pause()
    device.fail(copy=3)
    memory, ranges, transfer = Memory(50_000), Ranges(), Transfer()
    for k in range(5):
        ranges.file_to_device(0, file.fd, -1, k * 10_000, 9000, memory.address + k * 10_000, device.ring)
    before = device.num_copies
    transfer.add(ranges)
    assert eventually(lambda: device.num_copies == before + 2)
    assert transfer.take(0.2) == []
    device.resume()
    with pytest.raises(Failure, match="code 801"):
        transfer.take(PATIENCE_SECONDS)
    assert not device.refers_to(memory)


@pytest.mark.slow
def test_a_slot_is_filled_again_behind_its_copies(file: File, device: Device) -> None:
    memories, transfer = [Memory(FILE_BYTES) for _ in range(10)], Transfer()  # more than all slots of all threads
    device.pause()
    before = device.num_copies
    for group, memory in enumerate(memories):
        transfer.add(whole_file(file, device, memory, group))
    num_queued = settle(device) - before
    assert 0 < num_queued <= 3 * native.num_threads()
    device.delay(300)
    device.resume()
    take_all(transfer, len(memories))
    assert all(memory[:] == file.bytes for memory in memories)


@pytest.mark.parametrize("way", ["host to host", "host to device"])
def test_other_work_without_end_does_not_keep_a_copy_from_its_end(
    way: str, file: File, devices: list[Device], device: Device
) -> None:
    """No thread is idle then, and none needs the slot again."""
    other = next(one for one in devices if one is not device)
    sink, target = Memory(8 * MIB), Memory(MIB)
    ranges, long = Ranges(), Transfer()
    for group in range(2000):
        add(ranges, way, group, file, 0, sink.nbytes, sink.address, other)
    long.add(ranges)
    assert long.take()
    ranges, short = Ranges(), Transfer()
    ranges.file_to_device(0, file.fd, -1, 0, MIB, target.address, device.ring)
    short.add(ranges)
    assert [one.group for one in short.take()] == [0]
    assert target[:] == file.bytes[:MIB]
    assert long.moved_bytes < 1500 * sink.nbytes
    long.end()
    short.end()
    other.renew()


def test_a_device_that_stands_still_keeps_no_other_one_from_its_end(
    file: File, devices: list[Device], device: Device
) -> None:
    source = ctypes.cast(file.bytes, ctypes.c_void_p).value or 0
    other = next(one for one in devices if one is not device)
    sink, targets, ranges, long = Memory(8 * MIB), [Memory(5 * MIB), Memory(5 * MIB)], Ranges(), Transfer()
    for group in range(2000):
        ranges.host_to_host(group, source, sink.nbytes, sink.address)
    long.add(ranges)
    late, early = transfers = [Transfer(), Transfer()]
    device.pause()
    for one, target, transfer in zip((device, other), targets, transfers, strict=True):
        ranges = Ranges()
        ranges.file_to_device(0, file.fd, -1, 0, target.nbytes, target.address, one.ring)
        transfer.add(ranges)
    assert [one.group for one in early.take()] == [0]
    assert long.moved_bytes < 1500 * sink.nbytes
    long.end()
    assert late.take(0) == []
    device.resume()
    assert [one.group for one in late.take()] == [0]
    assert [target[:] for target in targets] == [file.bytes[: 5 * MIB]] * 2
    early.end()
    late.end()
    other.renew()


def test_no_more_chunks_than_allowed_are_under_way(file: File, device: Device) -> None:
    device.pause()
    before = device.num_copies
    memory, transfer = Memory(FILE_BYTES), Transfer(max_chunks=2)
    transfer.add(whole_file(file, device, memory))
    assert eventually(lambda: device.num_copies > before)
    assert settle(device) == before + 2
    device.resume()
    take_all(transfer, 1)
    assert memory[:] == file.bytes


@pytest.mark.parametrize("stops_first", [True, False])
def test_the_end_waits_for_copies(stops_first: bool, file: File, device: Device) -> None:
    device.pause()
    memory, transfer = Memory(FILE_BYTES), Transfer()
    transfer.add(whole_file(file, device, memory))
    assert eventually(lambda: device.num_copies > 0)
    settle(device)
    if stops_first:
        transfer.stop()
    ending = Waiting(transfer.end)
    assert not ending.ends(0.2)
    device.resume()
    assert ending.ends()
    assert not device.refers_to(memory)
    assert transfer.take(None) == []
    memory.require_guards()


def test_a_transfer_that_is_dropped_is_waited_for_without_the_gil(file: File, device: Device) -> None:
    device.pause()
    memory, transfer = Memory(FILE_BYTES), Transfer()
    transfer.add(whole_file(file, device, memory))
    assert eventually(lambda: device.num_copies > 0)

    def resume() -> None:  # needs the GIL
        time.sleep(0.2)
        device.resume()

    waiting = Waiting(resume)
    del transfer
    assert not device.refers_to(memory)
    assert waiting.ends()


def test_a_stop_begins_no_chunk(file: File, device: Device) -> None:
    device.pause()
    memory, transfer = Memory(FILE_BYTES), Transfer(max_chunks=1)
    transfer.add(whole_file(file, device, memory))
    assert eventually(lambda: device.num_copies > 0)
    count = settle(device)
    transfer.stop()
    device.resume()
    transfer.end()
    assert device.num_copies == count
    assert memory[CHUNK_BYTES:] == bytes([POISON]) * (FILE_BYTES - CHUNK_BYTES)


def test_two_devices_at_once(file: File, devices: list[Device], device: Device) -> None:
    memories, transfers = [Memory(FILE_BYTES) for _ in range(8)], [Transfer() for _ in range(4)]
    for k, memory in enumerate(memories):
        transfers[k // 2].add(whole_file(file, devices[k % 2], memory, k))
    for transfer in transfers:
        take_all(transfer, 2)
    assert all(memory[:] == file.bytes for memory in memories)


# The memory of rings.


def test_a_ring_is_trimmed_and_released(file: File, device: Device) -> None:
    native.set_idle(100)
    memory, transfer = Memory(FILE_BYTES), Transfer()
    pinned = device.pinned_bytes - device.ring.held_bytes
    transfer.add(whole_file(file, device, memory))
    take_all(transfer, 1)
    held = device.ring.held_bytes
    assert held > 0 and device.pinned_bytes == pinned + held
    device.ring.trim()  # in use: behind the end
    assert device.ring.held_bytes == held
    transfer.end()
    assert eventually(lambda: device.ring.held_bytes == 0 and device.pinned_bytes == pinned)
    for _ in range(20):
        transfer = Transfer()
        transfer.add(whole_file(file, device, memory))
        take_all(transfer, 1)
        transfer.end()
        assert device.ring.held_bytes > 0
        device.ring.trim()
        assert device.ring.held_bytes == 0
        assert device.pinned_bytes == pinned
    transfer = Transfer()
    transfer.add(whole_file(file, device, memory))
    device.renew()  # releases it while it is in use
    take_all(transfer, 1)
    assert memory[:] == file.bytes
    transfer.end()
    assert eventually(lambda: device.pinned_bytes == pinned)
    native.set_idle(10)


@pytest.mark.slow
def test_memory_that_is_being_released_is_not_used_again(file: File, device: Device) -> None:
    def load_all() -> tuple[list[Memory], Transfer]:
        """Fill the slots of all threads that are free, on a paused device."""
        device.pause()
        memories, transfer = [Memory(FILE_BYTES) for _ in range(6)], Transfer()
        for group, memory in enumerate(memories):
            transfer.add(whole_file(file, device, memory, group))
        settle(device)
        return memories, transfer

    pinned = device.pinned_bytes - device.ring.held_bytes
    memories, transfer = load_all()
    device.resume()
    take_all(transfer, len(memories))
    transfer.end()
    device.hold_unpin(True)
    trimming = Waiting(device.ring.trim)
    assert eventually(lambda: device.unpin_waits)
    memories, transfer = load_all()  # the ring is in use again, and none of its memory is back at the system yet
    assert not trimming.ends(0.1)
    device.hold_unpin(False)
    assert trimming.ends()  # the device would refer to what was unpinned
    device.resume()
    take_all(transfer, len(memories))
    assert all(memory[:] == file.bytes for memory in memories)
    transfer.end()
    device.ring.trim()
    assert device.pinned_bytes == pinned


def test_a_ring_without_users_is_given_back_in_time(file: File, device: Device) -> None:
    try:
        for seconds in (0.1, 0.0):
            native.set_idle(seconds)
            memory, transfer = Memory(FILE_BYTES), Transfer()
            transfer.add(whole_file(file, device, memory))
            take_all(transfer, 1)
            time.sleep(0.2)
            assert device.ring.held_bytes > 0  # in use
            start = time.monotonic()
            transfer.end()
            assert eventually(lambda: device.ring.held_bytes == 0)
            assert time.monotonic() - start >= seconds
        before = time.process_time()  # no thread turns without work
        time.sleep(0.2)
        assert time.process_time() - before < 0.01  # on a busy machine a thread that turns gets little more
    finally:
        native.set_idle(10)


# Processes, threads, signals.

START = """
import ctypes, errno, os, signal, sys, threading, time, warnings
from pathlib import Path
from native.support import Device, File, Memory, devices_of, engine_threads, take_all
from stio import native
from stio.native import Failure, Ranges, Transfer
warnings.simplefilter("ignore")  # about forks of a process with threads
device = devices_of(Path(sys.argv[1]))[0]
file = File(Path(sys.argv[2]), 9 << 20)
memory = Memory(9 << 20)
def load(transfer, to_device=True):
    ranges = Ranges()
    if to_device:
        ranges.file_to_device(0, file.fd, -1, 0, memory.nbytes, memory.address, device.ring)
    else:
        ranges.file_to_host(0, file.fd, -1, 0, memory.nbytes, memory.address)
    transfer.add(ranges)
"""

FORKS = (
    START
    + """
for _ in range(5):
    device.pause()
    transfer = Transfer()
    load(transfer)
    while device.num_copies == 0:
        time.sleep(0.001)
    taking = threading.Thread(target=lambda: take_all(transfer, 1))
    taking.start()
    time.sleep(0.05)
    pid = os.fork()
    if pid == 0:
        try:
            assert native.num_threads() == 0
            try:
                transfer.take(None)
            except Failure as failure:
                assert failure.code == errno.ECHILD
            else:
                os._exit(2)
            transfer.wake()
            transfer.stop()
            transfer.end()
            device.ring.trim()
            assert device.ring.held_bytes == 0
            own = Transfer()
            load(own, to_device=False)
            device.ring.trim()
            take_all(own, 1)
            assert memory[:] == file.bytes
            own.end()
            del own, transfer
            grandchild = os.fork()
            if grandchild == 0:
                own = Transfer()
                load(own, to_device=False)
                take_all(own, 1)
                os._exit(0)
            os._exit(os.waitstatus_to_exitcode(os.waitpid(grandchild, 0)[1]))
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(3)
    deadline = time.monotonic() + 20
    while (found := os.waitpid(pid, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            sys.exit("the child does not end")
        time.sleep(0.01)
    assert found[1] == 0, found
    device.resume()
    taking.join()
    assert memory[:] == file.bytes
    transfer.end()
"""
)


@pytest.mark.slow
def test_a_forked_child_uses_the_engine_anew(device_library: Path, tmp_path: Path) -> None:
    done = run_script(FORKS, device_library, tmp_path / "file")
    assert done.returncode == 0, done.stdout + done.stderr


EXITS = (
    START
    + """
transfer = Transfer()
if sys.argv[3] == "copies":
    device.delay(200_000)
    load(transfer)
    while device.num_copies == 0:
        time.sleep(0.001)
else:
    ranges = Ranges()
    for k in range(100_000):
        ranges.host_to_host(k, memory.address, 4 << 20, memory.address + (4 << 20))
    transfer.add(ranges)
    threading.Thread(target=lambda: [transfer.take(None) for _ in range(3)], daemon=True).start()
    other = Transfer()
    threading.Thread(target=lambda: other.take(None), daemon=True).start()
    time.sleep(0.1)
print("now", flush=True)
"""
)


@pytest.mark.matrix
@pytest.mark.parametrize("what", ["copies", "host memory"])
def test_a_process_ends_with_a_transfer_under_way(what: str, device_library: Path, tmp_path: Path) -> None:
    # A real interpreter without torch: its end.
    command = [sys.executable, "-c", EXITS, str(device_library), str(tmp_path / "file"), what]
    environment = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        said = process.stdout.readline()
        start = time.monotonic()
        try:
            status = process.wait(20)
        finally:
            process.kill()
        assert (said, status) == ("now\n", 0), process.stderr.read()
        assert time.monotonic() - start < 2


ENDS = (
    START
    + """
device.delay(3000)
transfer = Transfer()
load(transfer)
library = native._functions()
ends = [threading.Thread(target=library.engine_end, args=(20_000,)) for _ in range(3)]
for one in ends:
    one.start()
for one in ends:
    one.join()
assert native.num_threads() == 0 and engine_threads() == []
assert not device.refers_to(memory)
assert len(transfer.take(None)) <= 1
transfer.end()
try:
    Transfer()
except OSError:
    pass
else:
    sys.exit("a thread was started behind the end")
device.ring.trim()
device.ring.release()
"""
)


def test_the_end_of_the_engine(device_library: Path, tmp_path: Path) -> None:
    done = run_script(ENDS, device_library, tmp_path / "file")
    assert done.returncode == 0, done.stdout + done.stderr


def test_signals_are_for_the_programs_threads(file: File) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append(threading.get_native_id()))
    try:
        memory, transfer = Memory(FILE_BYTES), Transfer()
        for group in range(50):
            ranges = Ranges()
            ranges.file_to_host(group, file.fd, -1, 0, memory.nbytes, memory.address)
            transfer.add(ranges)
            os.kill(os.getpid(), signal.SIGUSR1)
        take_all(transfer, 50)
        assert eventually(lambda: bool(seen))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert set(seen) == {threading.main_thread().native_id}
    threads = engine_threads()
    assert len(threads) == native.num_threads() > 0
    raised_by_the_thread = {signal.SIGSEGV, signal.SIGBUS}
    for thread in threads:
        fields = dict(line.split(":\t") for line in (thread / "status").read_text().splitlines() if ":\t" in line)
        blocked = int(fields["SigBlk"], 16)
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, *raised_by_the_thread}:
            assert blocked >> (number - 1) & 1, number
        assert not any(blocked >> (number - 1) & 1 for number in raised_by_the_thread)


@pytest.mark.slow
@pytest.mark.parametrize("cancels", [False, True])
def test_nothing_is_left_of_a_thousand_transfers(cancels: bool, file: File, device: Device) -> None:
    memory = Memory(3 * MIB)

    def once() -> None:
        transfer, ranges = Transfer(), Ranges()
        for group in range(10):
            ranges.file_to_host(group, file.fd, file.direct_fd, 0, 10_000, memory.address)
            ranges.file_to_device(10 + group, file.fd, -1, 0, 3 * MIB, memory.address, device.ring)
        transfer.add(ranges)
        if cancels:
            transfer.take(0)
            transfer.stop()
        else:
            transfer.take(None)
        transfer.end()

    def held() -> tuple[int, int, int]:
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), resident

    for _ in range(100):
        once()
    before, pinned = held(), device.pinned_bytes
    for _ in range(count(300, 1000)):
        once()
    after = held()
    assert after[:2] <= before[:2] or after[1] <= before[1] + 16  # threads may have started
    assert after[0] == before[0]
    assert after[2] < before[2] + 4 * MIB + (device.pinned_bytes - pinned)


def test_one_build_for_all_versions_of_python_and_no_dependencies() -> None:
    done = subprocess.run(["readelf", "-d", str(native.LIBRARY)], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("there is no readelf")
    needed = [line.split("[")[1].split("]")[0] for line in done.stdout.splitlines() if "(NEEDED)" in line]
    assert all(name.startswith(("libc.so", "libdl.so", "libpthread.so", "ld-linux")) for name in needed)


def test_it_can_be_switched_off() -> None:
    done = run_script("from stio import native; print(native.available(), native.num_threads())", STIO_NATIVE="0")
    assert done.stdout == "False 0\n", done.stderr


@pytest.mark.slow
def test_the_stress_finds_nothing(tmp_path: Path) -> None:
    stress = compiled(tmp_path / "stress", "stress.c", *ENGINE_SOURCES)
    seed = int(time.time())
    done = subprocess.run(
        [stress, str(count(1, 5)), str(seed)], cwd=tmp_path, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_sources_are_short() -> None:
    lines = [
        line
        for path in (REPOSITORY / "stio" / "native").glob("*.[ch]")
        for line in path.read_text().splitlines()
        if line.strip() and not line.lstrip().startswith(("/*", "*", "#include"))
    ]
    assert len(lines) < 2000


def test_a_device_that_stands_still_stops_no_other_load(file, device) -> None:
    """Its stream may wait for work of the caller, for as long as that takes."""
    target, sink = Memory(10 * MIB), Memory(MIB)
    device.pause()
    stalled, ranges = Transfer(), Ranges()
    for group in range(20):
        ranges.file_to_device(group, file.fd, -1, 0, 10 * MIB, target.address, device.ring)
    stalled.add(ranges)
    settle(device)
    other, ranges = Transfer(), Ranges()
    ranges.file_to_host(0, file.fd, -1, 0, MIB, sink.address)
    other.add(ranges)
    try:
        assert [one.group for one in other.take(10.0)] == [0]
    finally:
        device.resume()
    other.end()
    stalled.end()


@pytest.mark.parametrize(("is_checkout", "level"), [(True, "WARNING"), (False, "INFO")])
def test_a_missing_library_is_logged(
    is_checkout: bool, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In a checkout nobody decided to have none, and the command that compiles it is known."""
    monkeypatch.setattr(native, "LIBRARY", tmp_path / "stio" / "native" / "libstio.so")
    monkeypatch.delenv("STIO_NATIVE", raising=False)
    if is_checkout:
        (tmp_path / "hatch_build.py").touch()
    caplog.set_level("INFO", logger="stio")
    assert native._library.__wrapped__() is None
    (record,) = caplog.records
    assert record.levelname == level
    assert (f"`python {tmp_path}/hatch_build.py` compiles it" in record.getMessage()) == is_checkout
