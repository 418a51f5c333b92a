"""Local files: the contract, links and odd files, and what disks, signals and full tables do to reads."""

from __future__ import annotations

import errno
import os
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from stio.errors import (
    ChangedDuringReadError,
    CheckpointNotFoundError,
    StorageError,
    TruncatedError,
    UnsafePathError,
)
from stio.runtime import memory
from stio.storage import local
from stio.storage.base import Root, Source
from stio.storage.checks import identity_of
from stio.storage.local import LocalFile, LocalRoot
from stio.testing import SourceContract, read_guarded

DATA = random.Random(1).randbytes(100_000)
NAME = "model.safetensors"

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own descriptors and calls")


class TestLocalFile(SourceContract):
    def open(self, path: Path) -> Source:
        return LocalFile.open(str(path))


class TestDirectFile(SourceContract):
    """Reads past the page cache, where the filesystem has them; the same contract where it does not."""

    def open(self, path: Path) -> Source:
        file = LocalFile.open(str(path))
        file.use_direct()
        return file


class TestFileOfRoot(SourceContract):
    def open(self, path: Path) -> Source:
        with LocalRoot(path.parent) as root:
            return root.open(path.name)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    directory.mkdir()
    (directory / NAME).write_bytes(DATA)
    return directory


def content(root: LocalRoot, name: str, *, trusted: bool = False) -> bytes:
    file = root.open(name, trusted=trusted)
    try:
        return read_guarded(file, 0, file.identity.nbytes)
    finally:
        file.close()


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# Roots.


def test_root_is_a_root(place: Path) -> None:
    with LocalRoot(place) as root:
        assert isinstance(root, Root)
        assert root.listdir() == [NAME]
        assert content(root, NAME) == DATA
    root.close()


def test_files_outlive_their_root(place: Path) -> None:
    root = LocalRoot(place)
    file = root.open(NAME)
    root.close()
    assert read_guarded(file, 5, 10) == DATA[5:15]
    file.close()


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        LocalRoot(tmp_path / "nowhere")


def test_root_that_is_a_file(place: Path) -> None:
    with pytest.raises(StorageError) as caught:
        LocalRoot(place / NAME)
    assert caught.value.errno == errno.ENOTDIR


@pytest.mark.parametrize("opener", [LocalRoot, LocalFile.open])
def test_path_with_nul(opener: Callable[[str], object]) -> None:
    with pytest.raises(StorageError, match="null"):
        opener("a\0b")


def test_b80_missing_shard(place: Path) -> None:
    with LocalRoot(place) as root, pytest.raises(CheckpointNotFoundError) as caught:
        root.open("other.safetensors")
    assert caught.value.path == str(place / "other.safetensors")


@linux
@pytest.mark.parametrize(
    "name", ["with spaces.safetensors", "größe-模型-🙂.safetensors", os.fsdecode(b"raw\xff.safetensors")]
)
def test_odd_names(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "a b" / "ü"
    directory.mkdir(parents=True)
    try:
        (directory / name).write_bytes(DATA)
    except OSError as error:
        pytest.skip(f"the filesystem takes no such name: {error}")
    with LocalRoot(directory) as root:
        assert root.listdir() == [name]
        assert content(root, name) == DATA


@linux
def test_directory_swapped_while_open(place: Path) -> None:
    """Index and shards come from the directory that was opened, whatever stands at its path by now."""
    with LocalRoot(place) as root:
        place.rename(place.with_name("moved"))
        place.mkdir()
        (place / NAME).write_bytes(b"of another save")
        assert content(root, NAME) == DATA
        (place.with_name("moved") / NAME).unlink()
        with pytest.raises(CheckpointNotFoundError):
            root.open(NAME)


# Reads that go wrong.


def test_c88_short_reads(run_faulty: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "faulty.bin"
    path.write_bytes(DATA)
    run_faulty(
        """
        data, file = Path(path).read_bytes(), LocalFile.open(path)
        assert read(file, 0, len(data)) == data
        assert read(file, 17, 5, 0, 20_000, 3, 1, 900) == data[17 : 17 + 20_909]
        with pytest.raises(TruncatedError) as caught:
            read(file, 99_000, 500, 600)
        assert caught.value.offset == 100_000
        assert hits() > 150
        """,
        path,
        modes="short",
    )


@pytest.mark.slow
def test_c88_interrupted_reads(run_faulty: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "faulty.bin"
    path.write_bytes(DATA)
    run_faulty(
        """
        data, file = Path(path).read_bytes(), LocalFile.open(path)
        assert read(file, 0, len(data)) == data
        assert read(file, 1, 2, 3) == data[1:6]
        assert hits() >= 3
        """,
        path,
        modes="interrupted",
    )


def test_c89_disk_error(run_faulty: Callable[..., str], tmp_path: Path) -> None:
    path = tmp_path / "faulty.bin"
    path.write_bytes(DATA)
    run_faulty(
        """
        file = LocalFile.open(path)
        assert read(file, 0, 10) == Path(path).read_bytes()[:10]
        for _ in range(2):
            with pytest.raises(StorageError) as caught:
                read(file, 4096, 4096)
            assert (caught.value.errno, caught.value.offset, caught.value.path) == (errno.EIO, 4096, path)
        file.close()
        """,
        path,
        modes="broken",
        after=1,
    )


@pytest.mark.slow
def test_c89_disk_error_in_a_load(run_faulty: Callable[..., str], tmp_path: Path) -> None:
    """Through the whole engine: the error comes out as it is, and every descriptor is back."""
    torch = pytest.importorskip("torch")
    from fakes import write_checkpoint

    directory = write_checkpoint(tmp_path / "faulty", {f"t{k}": torch.arange(50_000) for k in range(20)}, 2)
    run_faulty(
        """
        import stio.sync
        before = len(os.listdir("/proc/self/fd"))
        for way in ("copy", "map"):
            with stio.sync.open(path, memory=way) as checkpoint:
                assert len(checkpoint) == 20
                ctypes.CDLL(None).setenv(b"SHIM_MODES", b"broken fault", 1)
                with pytest.raises(StorageError) as caught:
                    checkpoint.load()
                assert caught.value.errno == errno.EIO, way
            ctypes.CDLL(None).setenv(b"SHIM_MODES", b"", 1)
        assert len(os.listdir("/proc/self/fd")) == before
        """,
        directory,
        modes="",
    )


@pytest.mark.slow
def test_c98_direct_io_refused_by_the_read(run_faulty: Callable[..., str], tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from fakes import write_checkpoint

    directory = write_checkpoint(tmp_path / "faulty", {f"t{k}": torch.arange(50_000) for k in range(20)}, 2)
    run_faulty(
        """
        import stio.sync
        import torch
        from stio.storage.local import LocalFile
        LocalFile.resident_fraction = lambda self: 0.0
        found = stio.sync.load(path, memory="copy")
        assert len(found) == 20 and all(torch.equal(one, torch.arange(50_000)) for one in found.values())
        """,
        directory,
        modes="direct",
    )


def test_c98_direct_io_refused_by_the_open(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = LocalFile.open(str(place / NAME))

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EINVAL, "no direct I/O here")

    monkeypatch.setattr(os, "open", refuse)
    file.use_direct()
    assert file.direct_fd == -1
    assert read_guarded(file, 0, 8192) == DATA[:8192]
    file.close()


@linux
def test_direct_io_is_opened_once(place: Path) -> None:
    before = num_descriptors()
    file = LocalFile.open(str(place / NAME))
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: file.use_direct(), range(32)):
            pass
    assert num_descriptors() == before + 1 + (file.direct_fd >= 0)
    file.close()
    assert num_descriptors() == before


def test_reads_longer_than_a_call_takes(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_READ_MAX_BYTES", 8192)
    file = LocalFile.open(str(place / NAME))
    assert read_guarded(file, 1, 99_999) == DATA[1:]
    assert read_guarded(file, 1, 5000, 1, 0, 2, 30_000, 5000, 5000) == DATA[1 : 1 + 45_003]
    file.close()


@pytest.mark.slow
@linux
def test_c99_no_descriptors_left(run_script: Callable[..., str], place: Path) -> None:
    run_script(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
        root, files = LocalRoot(path), []
        with pytest.raises(StorageError, match="ulimit -n") as caught:
            while True:
                files.append(root.open("model.safetensors"))
        assert caught.value.errno == errno.EMFILE
        assert len(files) > 10
        with pytest.raises(OSError):
            while True:
                os.dup(0)
        assert not files[0].use_direct()  # it would need one more: done without
        assert read(files[0], 0, 4096) == read(files[-1], 0, 4096)
        for file in files[:3]:
            file.close()
        root.open("model.safetensors").close()
        """,
        place,
    )


def test_closed_file(place: Path) -> None:
    file = LocalFile.open(str(place / NAME))
    file.close()
    with pytest.raises(StorageError) as caught:
        file.check_unchanged()
    assert caught.value.errno == errno.EBADF


def test_c91_replaced_file_keeps_its_bytes(place: Path) -> None:
    """A rename over it makes another file: the open one stays whole, and is what was planned."""
    with LocalRoot(place) as root:
        file = root.open(NAME)
        (place / "new").write_bytes(b"new" * 50_000)
        (place / "new").replace(place / NAME)
        assert read_guarded(file, 0, len(DATA)) == DATA
        file.check_unchanged()
        file.close()


def test_what_the_page_cache_holds(place: Path) -> None:
    file = LocalFile.open(str(place / NAME))
    assert isinstance(file, LocalFile)
    assert 0 <= file.resident_fraction() <= 1
    assert isinstance(file.on_local_filesystem, bool)
    file.close()


@pytest.mark.parametrize("local", [True, False])
def test_the_size_is_that_of_the_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    monkeypatch.setattr("stio.storage.local.is_local", lambda fd: local)
    file = LocalFile.open(str(path))
    assert file.nbytes_now() == 5
    os.truncate(path, 3)
    assert (file.nbytes_now(), file.identity.nbytes) == (3, 5)
    region = memory.allocate(3)
    file.read_into(0, [region.sub(0, 3)])  # the position is nobody's
    assert region.tobytes() == b"123"
    file.close()
    with pytest.raises(StorageError, match="reading the (size|status) failed"):
        file.nbytes_now()


@linux
def test_the_page_cache_is_counted_in_pages_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).write_bytes(bytes(3 << 16))
    file = LocalFile.open(str(tmp_path / NAME))
    assert isinstance(file, LocalFile)

    class Libc:
        def syscall(self, number: int, fd: int, span: Any, counts: Any, flags: int) -> int:
            counts._obj[0] = -(-span._obj[1] // (1 << 16))
            return 0

    with monkeypatch.context() as patch:
        patch.setattr(local, "quick_libc", Libc())
        patch.setattr(local, "SYSTEM_PAGE_BYTES", 1 << 16)
        assert file.resident_fraction() == 1.0
    file.close()


@linux
def test_an_interrupted_close_is_not_repeated(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By then the number may be that of another file."""
    monkeypatch.setattr(local, "answers_at_once", lambda fd, state: False)
    file = LocalFile.open(str(place / NAME))
    real = os.close

    def close(fd: int) -> None:
        real(fd)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "close", close)
        with pytest.raises(KeyboardInterrupt):
            file.close()
    file.close()


# Calls that keep the GIL.


@linux
@pytest.mark.parametrize("has_it", [True, False])
def test_short_reads_with_and_without_the_gil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_it: bool) -> None:
    data = bytes(range(256)) * 40
    (tmp_path / "f").write_bytes(data)
    calls = []
    real = local._preadv2

    def count(*arguments: Any) -> int:
        calls.append(arguments)
        return int(real(*arguments))

    monkeypatch.setattr(local, "_preadv2", count if has_it else None)
    file = LocalFile.open(str(tmp_path / "f"))
    region = memory.allocate(len(data))
    file.read_into(0, [region.sub(0, 100), region.sub(100, len(data) - 100)])
    assert region.tobytes() == data
    assert len(calls) == (2 if has_it else 0)
    with pytest.raises(TruncatedError):
        file.read_into(len(data) - 10, [region.sub(0, 11)])
    file.close()


@linux
def test_the_identity_of_an_open_file_is_the_same_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"1234567")
    os.utime(path, ns=(1_600_000_000_123_456_789, 1_500_000_000_987_654_321))
    with path.open("rb") as file:
        found = local._identity_at_once(file.fileno())
        assert found is not None
        expected = identity_of(os.fstat(file.fileno()))
        assert found == (expected, 1)
        assert found[0].ctime_ns == expected.ctime_ns
        path.unlink()
        assert local._identity_at_once(file.fileno()) == (expected, 0)
    assert local._identity_at_once(-1) is None


@linux
def test_a_deleted_file_is_closed_without_the_gil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks are freed then, which takes 0.2 s a GB. It may be deleted after the last check."""
    closed: list[int] = []
    real = os.close
    monkeypatch.setattr(os, "close", lambda fd: (closed.append(fd), real(fd))[1])
    for removes in (False, True):
        (tmp_path / "f").write_bytes(b"1234567")
        file = LocalFile.open(str(tmp_path / "f"))
        file._answers_at_once = True
        file.check_unchanged()
        if removes:
            (tmp_path / "f").unlink()
        before, fd = len(closed), file.fd
        file.close()
        assert closed[before:] == ([fd] if removes else [])


@linux
@pytest.mark.parametrize("kind", ["ext4", "btrfs", "fuseblk", None])
def test_which_filesystems_answer_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    """Those that ask a daemon or another machine have block devices too. The kind is asked for once a device."""
    asked = []
    monkeypatch.setattr(local, "_filesystem", lambda fd: (asked.append(fd), kind)[1])
    monkeypatch.setattr(local, "_answer_at_once", {})
    (tmp_path / "f").touch()
    state = (tmp_path / "f").stat()
    on_device, without = (os.stat_result((*state[:2], device, *state[3:])) for device in (os.makedev(254, 1), 47))
    assert [local.answers_at_once(3, on_device) for _ in range(3)] == [kind == "ext4"] * 3
    assert asked == [3]
    assert not local.answers_at_once(3, without)


@linux
@pytest.mark.parametrize("at_once", [True, False])
def test_a_change_is_seen_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: bool) -> None:
    monkeypatch.setattr(local, "answers_at_once", lambda fd, state: at_once)
    path = tmp_path / "f"
    path.write_bytes(b"1234567")
    file = LocalFile.open(str(path))
    file.check_unchanged()
    os.utime(path, ns=(0, 0))
    with pytest.raises(ChangedDuringReadError):
        file.check_unchanged()
    file.close()


@linux
def test_no_descriptor_is_left(tmp_path: Path) -> None:
    """Also of a file whose last name is gone, which the close frees."""
    before = set(os.listdir("/proc/self/fd"))
    for removes in (False, True):
        path = tmp_path / "f"
        path.write_bytes(b"1234567")
        with local.LocalRoot(tmp_path) as root:
            file = root.open("f")
        if removes:
            path.unlink()
        file.check_unchanged()
        file.close()
        file.close()
    assert set(os.listdir("/proc/self/fd")) == before


@linux
def test_a_link_is_followed_and_checked(tmp_path: Path) -> None:
    """A name that is no link is not compared with the path of its directory; a link is."""
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.write_bytes(b"secret")
    (inside / "file").write_bytes(b"1234")
    (inside / "link").symlink_to("file")
    (inside / "away").symlink_to(outside)
    (inside / "none").symlink_to("nothing")
    (inside / "directory").mkdir()
    with local.LocalRoot(inside) as root:
        for name in ("file", "link"):
            file = root.open(name)
            assert file.identity.nbytes == 4
            file.close()
        with pytest.raises(UnsafePathError):
            root.open("away")
        with pytest.raises(CheckpointNotFoundError):
            root.open("none")
        with pytest.raises(StorageError):
            root.open("directory")
