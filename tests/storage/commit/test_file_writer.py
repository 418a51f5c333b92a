"""New files: space before bytes, ranges for the engine, and what happens when the disk is full or broken."""

from __future__ import annotations

import ctypes
import errno
import itertools
import os
import random
import stat
import subprocess
import sys
import types
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from crash.zygote import Zygote
from support import needs_engine

from stio import native
from stio.errors import NoSpaceError, StorageError
from stio.limits import PAGE_BYTES
from stio.runtime.memory import Region, allocate
from stio.storage.base import FileWriter
from stio.storage.commit import files
from stio.storage.commit import syscalls as calls
from stio.storage.commit.files import FileAttributes, LocalFileWriter, attributes_at, create_files, write_small

DATA = random.Random(1).randbytes(3 * PAGE_BYTES + 777)
linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own calls")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[int]:
    fd = calls.open_directory(str(tmp_path))
    yield fd
    os.close(fd)


def create(
    place: int, *files: tuple[str, int], attributes: FileAttributes | None = None, durable: bool = True
) -> list[LocalFileWriter]:
    writers = [
        LocalFileWriter(place, name, f"final/{name}", nbytes, attributes=attributes, durable=durable)
        for name, nbytes in files
    ]
    create_files(place, writers, path="final")
    return writers


def create_shared(place: int, nbytes: int) -> LocalFileWriter:
    writer = LocalFileWriter(place, "a", "p/a", nbytes, attributes=None, durable=True)
    writer.share(nbytes)
    create_files(place, [writer], path="p")
    return writer


def region_of(data: bytes) -> Region:
    region = allocate(len(data))
    region.write(0, data)
    return region.sub(0, len(data))


def write_all(writer: LocalFileWriter, data: bytes = DATA) -> None:
    writer.write_from(0, region_of(data))


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_file_has_its_bytes_and_its_space_beforehand(place: int, tmp_path: Path) -> None:
    before = num_descriptors()
    (one,) = create(place, ("a", len(DATA)))
    assert isinstance(one, LocalFileWriter) and one.path == "final/a"
    contract: FileWriter = one
    assert num_descriptors() == before, "hundreds of shards are created before the first is written"
    found = os.stat(tmp_path / "a")
    assert found.st_size == len(DATA)
    assert found.st_blocks * 512 >= len(DATA) // PAGE_BYTES * PAGE_BYTES
    write_all(one)
    assert not one.finished
    contract.finish()
    assert one.finished
    assert (tmp_path / "a").read_bytes() == DATA
    assert num_descriptors() == before
    one.close()


def test_blocks_come_in_any_order_from_any_thread(place: int, tmp_path: Path) -> None:
    data = random.Random(2).randbytes(300 * PAGE_BYTES + 5)
    (one,) = create(place, ("a", len(data)))
    region = region_of(data)
    starts = list(range(0, len(data), 7 * PAGE_BYTES))
    random.Random(3).shuffle(starts)
    with ThreadPoolExecutor(8) as pool:
        parts = ((start, region.sub(start, min(7 * PAGE_BYTES, len(data) - start))) for start in starts)
        list(pool.map(lambda part: one.write_from(*part), parts))
    one.finish()
    assert (tmp_path / "a").read_bytes() == data


def test_name_is_never_reused(place: int, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("mine")
    with pytest.raises(StorageError) as caught:
        create(place, ("a", 10))
    assert caught.value.errno == errno.EEXIST
    assert (tmp_path / "a").read_text() == "mine"


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_c118_mode_is_the_umasks_or_the_one_that_was_given(place: int, tmp_path: Path, umask: int) -> None:
    (tmp_path / "replaced").touch()
    (tmp_path / "replaced").chmod(0o440)
    before = os.umask(umask)
    try:
        (plain,) = create(place, ("plain", len(DATA)))
        (given,) = create(place, ("given", len(DATA)), attributes=attributes_at(place, "replaced"))
    finally:
        os.umask(before)
    for one in (plain, given):
        write_all(one)
        one.finish()
    assert stat.S_IMODE(os.stat(tmp_path / "plain").st_mode) == 0o666 & ~umask
    assert stat.S_IMODE(os.stat(tmp_path / "given").st_mode) == 0o440


def test_finish_wants_every_byte(place: int) -> None:
    (one,) = create(place, ("a", len(DATA)))
    one.write_from(0, region_of(DATA[:PAGE_BYTES]))
    with pytest.raises(StorageError, match="not all"):
        one.finish()
    assert not one.finished


def test_close_gives_up(place: int) -> None:
    before = num_descriptors()
    (one,) = create(place, ("a", len(DATA)))
    one.write_from(0, region_of(DATA[:PAGE_BYTES]))
    one.close()
    one.close()
    assert num_descriptors() == before


def test_nothing_is_synced_where_nothing_shall_be(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "fsync", lambda fd: pytest.fail("synced"))
    (one,) = create(place, ("a", len(DATA)), durable=False)
    write_all(one)
    one.finish()


# Direct and buffered.


def write_by_engine(parts: Sequence[tuple[LocalFileWriter, int, Region]]) -> None:
    """Write regions at offsets, all of them at one time."""
    ranges, transfer = native.Ranges(), native.Transfer()
    for group, (writer, offset, region) in enumerate(parts):
        assert writer.add_range(ranges, group, offset, region)
    transfer.add(ranges)
    num_done = 0
    try:
        while num_done < len(parts):
            for one in transfer.take():
                writer, _, region = parts[one.group]
                writer.count(region.nbytes)
                num_done += 1
    except native.Failure as failure:
        raise parts[failure.group][0].error(failure) from None
    finally:
        transfer.end()


def spy_on_writes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int, int]]:
    real, log = calls.write, []

    def write(fd: int, address: int, nbytes: int, offset: int) -> int:
        flags = int(Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0], 8)
        log.append((bool(flags & os.O_DIRECT), nbytes, offset))
        return real(fd, address, nbytes, offset)

    monkeypatch.setattr(calls, "write", write)
    return log


@linux
def test_a_write_of_a_thread_goes_through_the_page_cache_in_one_call(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (one,) = create(place, ("a", len(DATA)))
    log = spy_on_writes(monkeypatch)
    write_all(one)
    one.finish()
    assert log == [(False, len(DATA), 0)]
    assert (tmp_path / "a").read_bytes() == DATA


@needs_engine
@pytest.mark.parametrize("shift", [0, 1, 512])
def test_the_engine_writes_wherever_the_memory_begins(place: int, tmp_path: Path, shift: int) -> None:
    (one,) = create(place, ("a", len(DATA)))
    region = allocate(len(DATA) + shift)
    region.write(shift, DATA)
    write_by_engine([(one, 0, region.sub(shift, len(DATA)))])
    assert not one.finished
    one.finish()
    assert (tmp_path / "a").read_bytes() == DATA


@needs_engine
def test_c98_a_filesystem_that_opens_no_file_for_direct_io(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = calls.open_file

    def open_file(name: str, flags: int, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "")
        return real(name, flags, **kwargs)

    monkeypatch.setattr(calls, "open_file", open_file)
    (one,) = create(place, ("a", len(DATA)))
    write_by_engine([(one, 0, region_of(DATA))])
    one.finish()
    assert one.direct_refused
    assert (tmp_path / "a").read_bytes() == DATA


@needs_engine
@pytest.mark.parametrize("number", [errno.EIO, errno.EMFILE])
def test_an_error_of_the_second_open_is_raised(place: int, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    real = calls.open_file

    def open_file(name: str, flags: int, **kwargs: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(number, "")
        return real(name, flags, **kwargs)

    (one,) = create(place, ("a", len(DATA)))
    before = num_descriptors()
    monkeypatch.setattr(calls, "open_file", open_file)
    with pytest.raises(StorageError, match="opening") as caught:
        write_by_engine([(one, 0, region_of(DATA))])
    assert caught.value.errno == number
    one.close()
    assert num_descriptors() == before


@needs_engine
@linux
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_c105_a_write_of_the_engine_fails(place: int, number: int) -> None:
    (one,) = create(place, ("a", len(DATA)))
    failure = types.SimpleNamespace(code=number, offset=2 * PAGE_BYTES, nbytes=1000)
    error = one.error(failure)  # type: ignore[arg-type]
    assert (error.errno, error.offset, error.path) == (number, 2 * PAGE_BYTES, "final/a")
    assert os.strerror(number) in str(error) or isinstance(error, NoSpaceError)
    assert isinstance(error, NoSpaceError) == (number != errno.EIO)
    if isinstance(error, NoSpaceError):
        assert error.needed_bytes == 1000 and error.free_bytes is not None


@needs_engine
@linux
def test_c103_the_engine_writes_beyond_the_file_size_limit(zygote: Zygote, tmp_path: Path) -> None:
    done = zygote.run(
        """
        import os, resource, sys
        sys.path.insert(0, sys.argv[2])
        from stio.errors import NoSpaceError
        from stio.storage.commit import syscalls as calls
        from test_file_writer import *
        place = calls.open_directory(sys.argv[1])
        (one,) = create(place, ("a", 2 << 20))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            write_by_engine([(one, 0, region_of(bytes(2 << 20)))])
        except NoSpaceError as error:
            print(error.errno, error.offset, error.needed_bytes)
        """,
        tmp_path,
        Path(__file__).parent,
    )
    assert done.stdout.split() == [str(errno.EFBIG), str(1 << 20), str(1 << 20)]


def test_large_buffered_writes_begin_to_be_written_back(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WRITEBACK_BYTES", 3 * PAGE_BYTES)
    ranges: list[tuple[int, int]] = []
    monkeypatch.setattr(calls, "start_writeback", lambda fd, offset, nbytes: ranges.append((offset, nbytes)))
    (one,) = create(place, ("a", len(DATA)))
    write_all(one)
    one.finish()
    assert ranges == [(0, len(DATA))]


@pytest.mark.parametrize("step", [1, 511, PAGE_BYTES, PAGE_BYTES + 1])
def test_c104_short_writes_go_on(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    real, interrupted = calls.write, []

    def write(fd: int, address: int, nbytes: int, offset: int) -> int:
        if len(interrupted) < 3:
            interrupted.append(offset)
            raise InterruptedError(errno.EINTR, "")
        return real(fd, address, min(nbytes, step), offset)

    monkeypatch.setattr(calls, "write", write)
    (one,) = create(place, ("a", len(DATA)))
    write_all(one)
    one.finish()
    assert (tmp_path / "a").read_bytes() == DATA
    write_small(place, "note", b"x" * 100)
    assert (tmp_path / "note").read_bytes() == b"x" * 100


@pytest.mark.parametrize("count", [0, -1])
def test_a_write_of_nothing_is_an_error(place: int, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr(calls, "write", lambda *_: count)
    monkeypatch.setattr(calls, "write_bytes", lambda *_: count)
    (one,) = create(place, ("a", len(DATA)))
    with pytest.raises(StorageError):
        write_all(one)
    with pytest.raises(OSError, match="no bytes"):
        write_small(place, "note", b"x")


# Failures.


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_c105_write_fails(place: int, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    (one,) = create(place, ("a", 4 * len(DATA)))

    def write(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(calls, "write", write)
    with pytest.raises(StorageError) as caught:
        one.write_from(2 * PAGE_BYTES, region_of(DATA))
    assert (caught.value.errno, caught.value.offset, caught.value.path) == (number, 2 * PAGE_BYTES, "final/a")
    assert isinstance(caught.value, NoSpaceError) == (number != errno.EIO)
    if isinstance(caught.value, NoSpaceError):
        assert caught.value.needed_bytes == len(DATA) and caught.value.free_bytes is not None
    one.close()


def test_c106_failed_fsync_is_final(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = num_descriptors()
    (one,) = create(place, ("a", len(DATA)))
    write_all(one)

    def fsync(fd: int) -> None:
        raise OSError(errno.EIO, "")

    monkeypatch.setattr(calls, "fsync", fsync)
    with pytest.raises(StorageError, match="not reliable") as caught:
        one.finish()
    assert caught.value.errno == errno.EIO and not one.finished
    assert num_descriptors() == before


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_c103_missing_space_is_known_before_the_first_byte(
    place: int, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    real, sizes = calls.reserve, []

    def reserve(fd: int, nbytes: int) -> None:
        sizes.append(nbytes)
        if len(sizes) == 2:
            raise OSError(number, os.strerror(number))
        real(fd, nbytes)

    monkeypatch.setattr(calls, "reserve", reserve)
    with pytest.raises(NoSpaceError) as caught:
        create(place, ("a", 10_000), ("b", 20_000))
    assert caught.value.errno == number
    assert caught.value.needed_bytes == 30_000
    assert f"{caught.value.needed_bytes:,}" in str(caught.value) and f"{caught.value.free_bytes:,}" in str(caught.value)


def test_c103_where_nothing_can_be_reserved_the_count_decides(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    monkeypatch.setattr(calls, "_fallocate", refuse)
    create(place, ("a", 10_000))
    with pytest.raises(NoSpaceError):
        create(place, ("b", files.free_bytes(place) + 1))


def test_c103_nothing_is_reserved_of_what_cannot_fit(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """ext4 hands out all that it has before it says no, and until that is given back nobody else can write."""
    monkeypatch.setattr(calls, "reserve", lambda *_: pytest.fail("it was asked to reserve"))
    found = os.fstatvfs(place)
    with pytest.raises(NoSpaceError) as caught:
        create(place, ("a", found.f_bavail * found.f_frsize), ("b", 1 << 30))  # others may free something meanwhile
    assert caught.value.needed_bytes == found.f_bavail * found.f_frsize + (1 << 30)
    assert not os.listdir(place)


@pytest.mark.parametrize("reserves", [True, False])
def test_c103_a_filesystem_that_counts_nothing(place: int, monkeypatch: pytest.MonkeyPatch, reserves: bool) -> None:
    """ramfs reports zeros, and so do some of those in user space."""
    counts = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
    monkeypatch.setattr(files.os, "fstatvfs", lambda _: counts)
    if not reserves:
        monkeypatch.setattr(calls, "_fallocate", None)
    (one,) = create(place, ("a", len(DATA)))
    write_all(one)
    one.finish()
    assert os.stat("a", dir_fd=place).st_size == len(DATA)


@pytest.mark.root
@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounts")
def test_c103_small_disk(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", mount], check=False).returncode:
        pytest.skip("may not mount")
    fd = None
    try:
        fd = calls.open_directory(str(mount))
        with pytest.raises(NoSpaceError) as caught:
            create(fd, ("a", 1 << 20), ("b", 3 << 20))
        assert caught.value.needed_bytes == 4 << 20
        assert caught.value.free_bytes == 2 << 20
        assert not os.listdir(mount)
        (one,) = create(fd, ("c", len(DATA)))
        write_all(one)
        one.finish()
        assert (mount / "c").read_bytes() == DATA
    finally:
        if fd is not None:
            os.close(fd)
        subprocess.run(["umount", mount], check=True)


@linux
def test_c103_file_size_limit(zygote: Zygote, tmp_path: Path) -> None:
    done = zygote.run(
        """
        import os, resource, sys
        from stio.errors import NoSpaceError
        from stio.storage.commit import syscalls as calls
        from stio.storage.commit.files import LocalFileWriter
        from stio.storage.commit.files import create_files
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        fd = calls.open_directory(sys.argv[1])
        try:
            create_files(fd, [LocalFileWriter(fd, "a", "p/a", 2 << 20, attributes=None, durable=True)], path="p")
        except NoSpaceError as error:
            print(error.errno, error.needed_bytes)
        """,
        tmp_path,
    )
    assert done.stdout.split() == [str(errno.EFBIG), str(2 << 20)]


# Ranges of several processes.


@needs_engine
@linux
def test_ranges_of_two_writers_share_pages(place: int, tmp_path: Path) -> None:
    """The page between two ranges is written through the cache by both, at one time."""
    data = random.Random(5).randbytes(40 * PAGE_BYTES + 100)
    cuts = [0, 100, 5 * PAGE_BYTES + 7, 5 * PAGE_BYTES + 50, 20 * PAGE_BYTES, 33 * PAGE_BYTES - 1, len(data)]
    for number in range(20):
        (one,) = create(place, (f"a{number}", len(data)))
        other = LocalFileWriter(place, f"a{number}", "final/a", 0, attributes=None, durable=True)
        parts = []
        for k, (begin, end) in enumerate(itertools.pairwise(cuts)):
            at = begin % PAGE_BYTES
            memory = allocate(end - begin + PAGE_BYTES)
            memory.write(at, data[begin:end])
            parts.append(((one, other)[k % 2], begin, memory.sub(at, end - begin)))
        write_by_engine(parts)
        for writer in (one, other):
            writer.own_bytes = sum(region.nbytes for of, _, region in parts if of is writer)
            writer.finish()
            assert writer.finished
        assert (tmp_path / f"a{number}").read_bytes() == data


class DirectIO:
    """Stands between a writer and the system: a filesystem of a network, which takes direct writes of any range or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, takes_any: bool) -> None:
        self.direct: list[tuple[int, int]] = []
        self.refused: list[tuple[int, int]] = []
        self.buffered: list[tuple[int, int]] = []
        self.writer: LocalFileWriter
        self._write, self._takes_any = calls.write, takes_any
        monkeypatch.setattr(files, "is_local", lambda fd: False)
        monkeypatch.setattr(calls, "write", self.write)

    def write(self, fd: int, address: int, nbytes: int, offset: int) -> int:
        """Write through the page cache in any case, in short pieces: only the order of the calls counts here."""
        nbytes = min(nbytes, 3 * PAGE_BYTES)
        if fd != self.writer._opened()[1]:
            self.buffered.append((offset, nbytes))
            return self._write(fd, address, nbytes, offset)
        if not self._takes_any and (offset % PAGE_BYTES or nbytes % PAGE_BYTES):
            self.refused.append((offset, nbytes))
            raise OSError(errno.EINVAL, "not aligned")
        self.direct.append((offset, nbytes))
        return self._write(self.writer._opened()[0], address, nbytes, offset)


@linux
@pytest.mark.parametrize("takes_any", [True, False])
def test_between_hosts_exact_ranges_go_past_the_page_cache(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, takes_any: bool
) -> None:
    """A page that was cached here would overwrite bytes of another host."""
    system = DirectIO(monkeypatch, takes_any=takes_any)
    data = random.Random(6).randbytes(9 * PAGE_BYTES)
    system.writer = writer = create_shared(place, len(data))
    memory = allocate(len(data) + PAGE_BYTES)
    cuts = [0, 100, 120, 5 * PAGE_BYTES + 7, len(data)]
    for begin, end in itertools.pairwise(cuts):
        memory.write(begin % PAGE_BYTES, data[begin:end])
        writer.write_from(begin, memory.sub(begin % PAGE_BYTES, end - begin))
    writer.finish()
    assert (tmp_path / "a").read_bytes() == data
    if writer.direct_refused:
        pytest.skip("no O_DIRECT here")
    if takes_any:
        assert not system.buffered and sum(nbytes for _, nbytes in system.direct) == len(data)
    else:
        assert system.refused == [(0, 100)], "the first one, and then none"
        assert not system.direct and sum(nbytes for _, nbytes in system.buffered) == len(data)
    assert writer.add_range(native.Ranges(), 0, 0, memory) is not takes_any  # the engine writes whole pages


@linux
def test_between_hosts_less_than_a_page_goes_past_the_page_cache_too(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system = DirectIO(monkeypatch, takes_any=True)
    system.writer = writer = create_shared(place, 700)
    memory = allocate(PAGE_BYTES)
    memory.write(0, bytes(range(256)) * 2 + bytes(188))
    writer.write_from(0, memory.sub(0, 700))
    writer.finish()
    assert (tmp_path / "a").read_bytes() == memory.sub(0, 700).tobytes()
    if writer.direct_refused:
        pytest.skip("no O_DIRECT here")
    assert not system.buffered and system.direct == [(0, 700)]


@linux
def test_an_error_of_an_exact_range_is_raised(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "is_local", lambda fd: False)
    writer = LocalFileWriter(place, "a", "final/a", len(DATA), attributes=None, durable=True)
    writer.share(len(DATA))
    create(place, ("a", len(DATA)))

    def fail(*args: object) -> int:
        raise OSError(errno.EIO, "a broken connection")

    monkeypatch.setattr(calls, "write", fail)
    with pytest.raises(StorageError, match="writing"):
        write_all(writer)
    writer.close()


def test_ranges_at_even_distances(place: int, tmp_path: Path) -> None:
    """Two writers write the left and the right part of each row, with a short write between."""
    rows = [random.Random(k).randbytes(30) for k in range(50)]
    (one,) = create(place, ("a", 1500))
    other = LocalFileWriter(place, "a", "final/a", 1000, attributes=None, durable=False)
    one.own_bytes = 500
    one.write_strided(0, region_of(b"".join(row[:10] for row in rows)), 10, 30)
    other.write_strided(10, region_of(b"".join(row[10:] for row in rows[:20])), 20, 30)
    with pytest.raises(StorageError, match="not all of the file"):
        other.finish()
    other = LocalFileWriter(place, "a", "final/a", 600, attributes=None, durable=False)
    other.write_strided(610, region_of(b"".join(row[10:] for row in rows[20:])), 20, 30)
    one.finish()
    other.finish()
    assert (tmp_path / "a").read_bytes() == b"".join(rows)
