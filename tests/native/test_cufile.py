"""Ranges that cuFile reads: what arrives, what is refused or fails, what is waited for."""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import cufile_stand_in
import pytest
from cufile_stand_in import CuFile
from native.support import POISON, Device, File, Memory, take_all
from support import eventually

from stio import native
from stio.native import CHUNK_BYTES, Failure, Ranges, Transfer

MIB = 1 << 20
FILE_BYTES = 11 * MIB + 77


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[File]:
    one = File(tmp_path_factory.mktemp("files") / "file", FILE_BYTES)
    yield one
    one.close()


@pytest.fixture
def make(file: File, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[CuFile, native.CuFile]]]:
    """Return a function that makes a stand-in, which may fail, and the file as it reads it."""
    made: list[native.CuFile] = []

    def make(**faults: int) -> tuple[CuFile, native.CuFile]:
        stand_in = cufile_stand_in.install(monkeypatch, **faults)
        stand_in.write = stand_in.current = None  # memory of the host
        made.append(native.CuFile(native.load_cufile(str(cufile_stand_in.library())), file.fd))
        return stand_in, made[-1]

    yield make
    for one in made:
        one.close()


@contextmanager
def new_transfer() -> Iterator[Transfer]:
    """Make a transfer that ends before the file that it reads is closed, also when the test fails."""
    transfer = Transfer()
    try:
        yield transfer
    finally:
        transfer.end()


def load(
    file: File, device: Device, handle: native.CuFile, parts: list[tuple[int, int, bool]], *, num_groups: int = 1
) -> list[Memory]:
    """Load parts of a file, by cuFile or by the ring; return the memory of each when all are complete."""
    memories, ranges = [], Ranges()
    for k, (offset, nbytes, is_cufile) in enumerate(parts):
        memories.append(Memory(nbytes, 7 * (k % 3)))
        target = memories[-1].address
        ranges.file_to_device(
            k * num_groups // len(parts), file.fd, file.direct_fd if k // 2 % 2 else -1, offset, nbytes, target,
            device.ring, handle if is_cufile else None,
        )  # fmt: skip
    with new_transfer() as transfer:
        transfer.add(ranges)
        take_all(transfer, num_groups)
        for memory, (offset, nbytes, _) in zip(memories, parts, strict=True):
            assert memory[:] == file.bytes[offset : offset + nbytes]
            memory.require_guards()
        assert transfer.moved_bytes >= sum(nbytes for _, nbytes, _ in parts)
    return memories


SIZES = [0, 1, 4095, 4096, 4097, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * MIB + 3]


@pytest.mark.matrix
@pytest.mark.parametrize("offset", [0, 4096, 1, 4097, 12345])
def test_bytes_arrive_and_no_others(make, file: File, device: Device, offset: int) -> None:
    stand_in, handle = make()
    before = device.num_copies
    parts = [(offset, nbytes, True) for nbytes in SIZES]
    load(file, device, handle, parts, num_groups=len(parts))
    assert stand_in.read_bytes == sum(SIZES)
    assert device.num_copies == before
    assert device.ring.held_bytes == 0
    assert handle.failure is None


def test_reads_begin_at_pages_and_end_within_a_chunk(make, file: File, device: Device) -> None:
    """So that a disk reads no page twice, and a cancel is heard."""
    stand_in, handle = make(max_bytes=0)
    load(file, device, handle, [(5000, 8 * MIB, True)])
    assert stand_in.num_reads == 5  # the first one ends 2 MiB behind the page in which it begins


def test_neighbours_of_other_kinds_are_read_apart(make, file: File, device: Device) -> None:
    """A group of tensors, large ones by cuFile and small ones by the ring."""
    stand_in, handle = make()
    parts, offset = [], 3
    for k in range(24):
        nbytes = (k % 4 < 2) * 300_000 + 100 + k
        parts.append((offset, nbytes, nbytes > 300_000))
        offset += nbytes
    load(file, device, handle, parts)
    assert stand_in.read_bytes == sum(nbytes for _, nbytes, is_cufile in parts if is_cufile)


def test_a_short_read_goes_on(make, file: File, device: Device) -> None:
    stand_in, handle = make(max_bytes=300_001)
    load(file, device, handle, [(12, 3 * MIB, True)])
    assert stand_in.num_reads == 7 + 4
    assert handle.failure is None


@pytest.mark.matrix
@pytest.mark.parametrize("code", [-5044, errno.EIO, errno.ENODEV, 0])
@pytest.mark.parametrize("number", [1, 2, 3, 6])
def test_after_a_failure_the_ring_reads_the_rest(make, file: File, device: Device, code: int, number: int) -> None:
    """Also what the failing read has begun."""
    _, handle = make(fail_read=number, fail_code=code, max_bytes=1_500_000)
    load(file, device, handle, [(4, 6 * MIB, True), (7 * MIB + 1, 4 * MIB, True)], num_groups=2)
    failure = handle.failure
    assert failure is not None
    kind = native.DRIVER if code < 0 else native.READING if code else native.TRUNCATED
    assert (failure.kind, failure.code) == (kind, abs(code))
    assert failure.text == ("cuFile's error 5044" if code < 0 else "")
    assert 4 <= failure.offset < FILE_BYTES
    assert device.num_copies


@pytest.mark.slow
def test_after_a_failure_cufile_is_not_tried_again(make, file: File, device: Device) -> None:
    """By the transfer; the next one tries it."""
    stand_in, handle = make(fail_read=1)
    for k in range(1, 3):
        load(file, device, handle, [(k, FILE_BYTES - k, True)] * 12)
        assert k <= stand_in.num_reads <= k * native.MAX_THREADS


def test_an_error_that_stays_is_the_ring_s(make, file: File, device: Device) -> None:
    _, handle = make()
    memory, ranges = Memory(MIB), Ranges()
    ranges.file_to_device(5, file.fd, -1, FILE_BYTES - 1000, MIB, memory.address, device.ring, handle)
    with new_transfer() as transfer:
        transfer.add(ranges)
        with pytest.raises(Failure) as caught:
            transfer.take(20)
    found = caught.value
    assert (found.kind, found.group, found.offset) == (native.TRUNCATED, 5, FILE_BYTES)
    memory.require_guards()
    assert memory[1000:] == bytes([POISON]) * (MIB - 1000)


def test_a_context_that_is_refused(make, file: File, device: Device, devices: list[Device]) -> None:
    """No read is made then, and the ring asks for the context once more."""
    stand_in, handle = make()
    for _ in range(200):  # until the thread has used another device before
        load(file, devices[1], handle, [(0, FILE_BYTES, True)])
        device.fail(context=1)
        before = stand_in.num_reads
        load(file, device, handle, [(0, MIB, True)])
        if handle.failure is not None:
            break
    assert handle.failure is not None
    assert (handle.failure.kind, handle.failure.text) == (native.DRIVER, "another error")
    assert stand_in.num_reads == before
    devices[1].reset()


def test_the_device_is_the_current_one(make, file: File, devices: list[Device], device: Device) -> None:
    stand_in, handle = make()
    library = devices[0]._library
    stand_in.current = ctypes.cast(library.fake_current, ctypes.c_void_p).value
    for number in (0, 1, 0):
        stand_in.device = number
        load(file, devices[number], handle, [(0, FILE_BYTES, True)])
    assert not stand_in.is_misused
    devices[1].reset()


def test_an_end_waits_for_a_read_and_begins_no_other(make, file: File, device: Device) -> None:
    stand_in, handle = make(hold_read=1)
    memory, ranges = Memory(3 * FILE_BYTES), Ranges()
    for group in range(3):  # 18 chunks, more than threads
        target = memory.address + group * FILE_BYTES
        ranges.file_to_device(group, file.fd, -1, 0, FILE_BYTES, target, device.ring, handle)
    with new_transfer() as transfer:
        transfer.add(ranges)
        try:
            assert eventually(lambda: stand_in.is_held)
            transfer.stop()
            under_way = stand_in.num_reads
            assert under_way < 18
            assert not eventually(lambda: stand_in.num_reads > under_way + 4, 0.05)
        finally:
            stand_in.hold_read = 0
    found, num_reads = memory[:], stand_in.num_reads
    assert not eventually(lambda: memory[:] != found or stand_in.num_reads != num_reads, 0.05)


def test_slots_end_while_cufile_reads_without_end(make, file: File, device: Device) -> None:
    """A thread that is busy with such reads still looks whether the copies of others have passed."""
    stand_in, handle = make()
    memory, ranges, num_groups = Memory(FILE_BYTES), Ranges(), 3000  # the same bytes again: 18,000 reads, seconds
    for group in range(num_groups):
        ranges.file_to_device(group, file.fd, -1, 0, FILE_BYTES, memory.address, device.ring, handle)
    target, one = Memory(1000), Ranges()
    one.file_to_device(0, file.fd, -1, 5, 1000, target.address, device.ring)
    with new_transfer() as busy, new_transfer() as small:
        busy.add(ranges)
        small.add(one)
        take_all(small, 1)
        assert target[:] == file.bytes[5:1005]
        assert stand_in.num_reads < 6 * num_groups


def test_a_library_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"libcufile.so.0: cannot open shared object file"):
        native.load_cufile(str(tmp_path / "libcufile.so.0"))
