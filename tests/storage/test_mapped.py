"""Mapped files: alive without their descriptor, private, and clear about files that shrink and disks that fail."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from stio.errors import StorageError, TruncatedError
from stio.runtime.memory import HAVE_MMAP
from stio.storage import mapped as mapped_module
from stio.storage.local import LocalFile, open_file
from stio.storage.mapped import MappedFile

pytestmark = pytest.mark.skipif(not HAVE_MMAP, reason="no mmap on this system")

DATA = random.Random(2).randbytes(3_000_001)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "faulty.bin"
    path.write_bytes(DATA)
    return path


@pytest.fixture
def file(path: Path) -> Iterator[LocalFile]:
    file = open_file(str(path))
    yield file
    file.close()


@pytest.mark.parametrize("lazy", [False, True])
def test_holds_the_files_bytes(file: LocalFile, lazy: bool) -> None:
    mapped = MappedFile(file, lazy=lazy)
    mapped.populate(0, len(DATA))
    assert mapped.region.nbytes == len(DATA)
    assert mapped.region.tobytes() == DATA


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 0), (1, 1), (4095, 2), (4096, 4096), (len(DATA), 0), (len(DATA) - 1, 1)]
)
def test_populates_any_range(file: LocalFile, offset: int, nbytes: int) -> None:
    mapped = MappedFile(file)
    mapped.populate(offset, nbytes)
    assert mapped.region.sub(offset, nbytes).tobytes() == DATA[offset : offset + nbytes]


def test_outlives_descriptor_and_name(path: Path) -> None:
    file = open_file(str(path))
    region = MappedFile(file).region
    file.close()
    path.unlink()
    assert region.tobytes() == DATA


def test_writing_leaves_the_file_alone(file: LocalFile, path: Path) -> None:
    first, second = MappedFile(file), MappedFile(file)
    first.populate(0, len(DATA))
    first.region.write(5000, b"changed")
    assert first.region.sub(5000, 7).tobytes() == b"changed"
    assert second.region.tobytes() == DATA
    assert path.read_bytes() == DATA


def test_c90_shrunk_before_populating(file: LocalFile, path: Path) -> None:
    mapped = MappedFile(file)
    with path.open("r+b") as other:
        other.truncate(10_000)
    mapped.populate(0, 10_000)
    assert mapped.region.sub(0, 10_000).tobytes() == DATA[:10_000]
    with pytest.raises(TruncatedError) as caught:
        mapped.populate(9_000, 2_000)
    assert caught.value.offset == 10_000
    assert caught.value.path == str(path)


@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, 0), (0, len(DATA)), (1, 1), (4096, 65_536), (70_000, 200_001), (len(DATA) - 1, 1)]
)
def test_touching_reads_a_range_and_no_more(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, offset: int, nbytes: int
) -> None:
    read, seen = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        seen.append((at, count := read(fd, buffers, at)))
        return count

    monkeypatch.setattr(mapped_module, "_TOUCH_BYTES", 3 << 16)
    monkeypatch.setattr(mapped_module, "_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(os, "preadv", preadv)
    MappedFile(file).touch(offset, nbytes)
    assert sum(count for _, count in seen) == nbytes
    assert [at for at, _ in seen] == list(range(offset, offset + nbytes, 3 << 16))


def test_nothing_is_touched_any_more_where_it_was_slow(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others want the processor, or the GIL: a server that answers comes before pages that are warm."""
    read, seen = os.preadv, []

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        seen.append(at)
        time.sleep(0.03)
        return read(fd, buffers, at)

    monkeypatch.setattr(os, "preadv", preadv)
    mapped = MappedFile(file)
    mapped.touch(1 << 20, 1 << 20)
    mapped.touch(0, len(DATA))
    assert seen == [1 << 20]


def test_one_slow_touch_among_many_is_forgiven(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        clock[0] += 0.015 if at == 1 << 20 else 0.0001
        return len(buffers[0])

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(mapped_module, "perf_counter", lambda: clock[0])
    MappedFile(file).touch(0, 3 << 20)
    assert clock[0] == pytest.approx(0.015 + 11 * 0.0001)


def test_one_thread_touches_at_a_time(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    read, inside, most = os.preadv, [], []

    def preadv(fd: int, buffers: list[memoryview], at: int) -> int:
        inside.append(at)
        most.append(len(inside))
        time.sleep(0.001)
        inside.remove(at)
        return read(fd, buffers, at)

    monkeypatch.setattr(mapped_module, "_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(os, "preadv", preadv)
    mapped = MappedFile(file)
    threads = [threading.Thread(target=mapped.touch, args=(k << 20, 1 << 19)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) > 5
    assert max(most) == 1


def test_c90_touching_a_file_that_was_cut_ends(file: LocalFile, path: Path) -> None:
    mapped = MappedFile(file)
    os.truncate(path, 10_000)
    mapped.touch(0, len(DATA))
    mapped.touch(20_000, 5)
    file.close()
    mapped.touch(0, 5)


def test_c90_shrunk_before_mapping(file: LocalFile, path: Path) -> None:
    path.write_bytes(b"")
    mapped = MappedFile(file)
    with pytest.raises(TruncatedError):
        mapped.populate(0, 1)


def test_closed_file(path: Path) -> None:
    file = open_file(str(path))
    mapped = MappedFile(file)
    file.close()
    with pytest.raises(StorageError):
        mapped.populate(0, 1)
    with pytest.raises(StorageError, match="mapping"):
        MappedFile(file)


def test_c89_disk_error(run_faulty: Callable[..., str], path: Path) -> None:
    """A fault does not say why; the read that follows it does."""
    run_faulty(
        """
        mapped = MappedFile(open_file(path))
        with pytest.raises(StorageError) as caught:
            mapped.populate(8192, 4096)
        assert (caught.value.errno, caught.value.offset) == (errno.EIO, 8192)
        """,
        path,
        modes="fault broken",
    )


def test_c90_fault_at_a_file_that_was_cut(run_faulty: Callable[..., str], path: Path) -> None:
    run_faulty(
        """
        mapped = MappedFile(open_file(path))
        from stio.storage.local import LocalFile
        real, cut = LocalFile.nbytes_now, []
        def late_cut(file):  # between the look at the size and the populating
            found = real(file)
            if not cut:
                cut.append(os.truncate(path, 9000))
            return found
        LocalFile.nbytes_now = late_cut
        with pytest.raises(TruncatedError) as caught:
            mapped.populate(8192, 4096)
        assert caught.value.offset == 9000
        """,
        path,
        modes="fault",
    )


@pytest.mark.parametrize("modes", ["fault", "oldkernel", "signal"])
def test_populating_is_advice(run_faulty: Callable[..., str], path: Path, modes: str) -> None:
    """A kernel that has no such call, a signal, a fault that does not come again: the bytes are there all the same."""
    run_faulty(
        """
        data, mapped = Path(path).read_bytes(), MappedFile(open_file(path))
        mapped.populate(100, 2_500_000)
        assert hits() >= 1
        assert mapped.region.tobytes() == data
        """,
        path,
        modes=modes,
    )


def test_c89_poisoned_page(run_faulty: Callable[..., str], path: Path) -> None:
    run_faulty(
        """
        with pytest.raises(StorageError, match="populating") as caught:
            MappedFile(open_file(path)).populate(0, 4096)
        assert caught.value.errno == 133  # EHWPOISON
        """,
        path,
        modes="poisoned",
    )
