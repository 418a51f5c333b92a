"""Files through aiofiles: the contract of a source, and a whole load by it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from fakes import write_checkpoint

import stio.sync
from stio.errors import ChangedDuringReadError, CheckpointNotFoundError, StorageError, TruncatedError, UnsafePathError
from stio.runtime import memory
from stio.runtime.calls import run_on_loop
from stio.storage import async_files
from stio.storage.async_files import AsyncFile, open_at
from stio.storage.base import Root, Source
from stio.storage.local import LocalRoot
from stio.testing import SourceContract

DATA = random.Random(4).randbytes(200_000)
NAME = "model.safetensors"

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own descriptors and calls")


def root_of(directory: Path, *, follow_symlinks: bool = False) -> LocalRoot:
    return LocalRoot(directory, follow_symlinks=follow_symlinks, open_at=open_at)


class TestAsyncFile(SourceContract):
    def open(self, path: Path) -> Source:
        return open_at(str(path), str(path), None)


class TestAsyncFileInPieces(SourceContract):
    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(async_files, "PIECE_BYTES", 777)

    def open(self, path: Path) -> Source:
        with root_of(path.parent) as root:
            return root.open(path.name)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "a checkpoint ü"
    directory.mkdir()
    (directory / NAME).write_bytes(DATA)
    return directory


@pytest.fixture
def file(place: Path) -> AsyncFile:
    path = str(place / NAME)
    return open_at(path, path, None)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def read(file: AsyncFile, offset: int, nbytes: int) -> bytes:
    region = memory.allocate(nbytes).sub(0, nbytes)
    await file.read(offset, [region])
    return region.tobytes()


def test_root(place: Path) -> None:
    with root_of(place) as root:
        assert isinstance(root, Root)
        assert root.listdir() == [NAME]
        file = root.open(NAME)
        assert isinstance(file, AsyncFile)
        region = memory.allocate(1000).sub(0, 1000)
        file.read_into(3, [region])
        assert region.tobytes() == DATA[3:1003]
        file.check_unchanged()
        file.close()
        with pytest.raises(CheckpointNotFoundError):
            root.open("other")
        with pytest.raises(StorageError, match="null"):
            root.open("a\0b", trusted=True)
    with pytest.raises(CheckpointNotFoundError):
        root_of(place / "nowhere")
    with pytest.raises(StorageError):
        root_of(place / NAME)


def test_root_without_directory_descriptors(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Windows: everything by its path."""
    monkeypatch.setattr(os, "supports_dir_fd", set())
    (place / "out").symlink_to("/etc/hostname")
    with root_of(place) as root:
        assert root.listdir() == [NAME, "out"]
        root.open(NAME).close()
        with pytest.raises(UnsafePathError):
            root.open("out")
        with pytest.raises(CheckpointNotFoundError):
            root.open("other")
    with pytest.raises(CheckpointNotFoundError):
        root_of(place / "nowhere").listdir()
    with pytest.raises(StorageError):
        root_of(place / NAME).listdir()


@linux
@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_b78_odd_files_never_hang(place: Path, file: AsyncFile, kind: str) -> None:
    path = place / "odd"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    with root_of(place, follow_symlinks=True) as root:
        before = num_descriptors()
        with pytest.raises(StorageError, match="not a regular file"):
            root.open("odd")
        assert num_descriptors() == before
    file.close()


def test_b77_links(place: Path) -> None:
    (place.parent / "secret").write_bytes(b"secret")
    (place / "out").symlink_to("../secret")
    (place / "in").symlink_to(NAME)
    with root_of(place) as root, root_of(place, follow_symlinks=True) as following:
        with pytest.raises(UnsafePathError):
            root.open("out")
        for file in (root.open("in"), root.open("out", trusted=True), following.open("out")):
            file.close()


@linux
def test_readers_take_turns_at_one_handle(file: AsyncFile) -> None:
    before = num_descriptors()

    async def body() -> list[bytes]:
        return list(await asyncio.gather(*(read(file, k * 1000, 1000) for k in range(100))))

    assert b"".join(run_on_loop(body)) == DATA[:100_000]
    assert num_descriptors() == before
    file.close()
    file.close()
    assert num_descriptors() == before - 1


@linux
@pytest.mark.parametrize("trouble", ["replaced", "removed"])
def test_another_file_at_the_path_is_never_mixed_in(place: Path, file: AsyncFile, trouble: str) -> None:
    before = num_descriptors()
    if trouble == "replaced":
        (place / "new").write_bytes(bytes(len(DATA)))
        (place / "new").replace(place / NAME)
    else:
        (place / NAME).unlink()

    async def body() -> list[bytes]:
        return list(await asyncio.gather(*(read(file, k * 1000, 1000) for k in range(20))))

    assert b"".join(run_on_loop(body)) == DATA[:20_000]
    assert num_descriptors() == before
    file.check_unchanged()
    file.close()


class _Slow:
    """A handle whose read waits in its thread until `go_on` is set."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.inside, self.go_on = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    async def readinto(self, target: Any) -> int:
        def work() -> int:
            self.inside.set()
            assert self.go_on.wait(30)
            return int(os.readv(self._file.fileno(), [target]))

        return await asyncio.to_thread(work)


@pytest.mark.parametrize("kind", ["task", "scope"])
def test_c95_cancel_waits_until_no_thread_writes(file: AsyncFile, kind: str) -> None:
    async def body() -> None:
        slow = file._file = _Slow(file._file)
        region = memory.allocate(1000).sub(0, 1000)
        scope = anyio.CancelScope()
        ended = asyncio.Event()

        async def reader() -> None:
            try:
                with scope:
                    await file.read(0, [region])
            finally:
                ended.set()

        task = asyncio.create_task(reader())
        assert await asyncio.to_thread(slow.inside.wait, 30)
        for _ in range(3):  # a second cancel changes nothing
            if kind == "task":
                task.cancel()
            else:
                scope.cancel()
            for _ in range(5):
                await asyncio.sleep(0)
            assert not ended.is_set()
        slow.go_on.set()
        await asyncio.wait([task])
        assert task.cancelled() == (kind == "task")
        assert region.tobytes() == DATA[:1000]
        file._file = slow._file
        assert await read(file, 5, 10) == DATA[5:15]  # the turn is over, and the position known

    run_on_loop(body)
    file.close()


def test_c89_disk_error(file: AsyncFile) -> None:
    class Broken:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        async def readinto(self, target: Any) -> int:
            raise OSError(errno.EIO, "broken")

    async def body() -> None:
        whole, file._file = file._file, Broken(file._file)
        with pytest.raises(StorageError) as caught:
            await read(file, 4096, 10)
        assert (caught.value.errno, caught.value.offset) == (errno.EIO, 4096)
        file._file = whole
        assert await read(file, 4096, 10) == DATA[4096:4106]

    run_on_loop(body)
    file.close()


# The whole load.


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {f"layer.{k}": torch.randn(300, 100 + k, generator=chance) for k in range(40)} | {"e": torch.empty(0, 3)}


@pytest.fixture(scope="module", params=[1, 3])
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("async"), tensors, request.param)


@pytest.mark.matrix
@linux
def test_load(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    with root_of(checkpoint) as root:
        stio.sync.load(root)
        before = num_descriptors()
        loaded = stio.sync.load(root, budget_bytes=1 << 20)  # many blocks, so many readers
        assert num_descriptors() == before
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.matrix
def test_stream_and_slices(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    with root_of(checkpoint) as root, stio.sync.open(root, budget_bytes=1 << 20) as opened:
        assert torch.equal(opened.read("layer.7", (slice(10, 200, 3), slice(5, 9))), tensors["layer.7"][10:200:3, 5:9])
        assert torch.equal(opened.read("layer.8"), tensors["layer.8"])
        found = dict(opened.stream())
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


@pytest.mark.matrix
def test_loads_at_the_same_time(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    with root_of(checkpoint) as root, stio.sync.open(root) as opened, ThreadPoolExecutor(6) as pool:
        for loaded in pool.map(lambda _: opened.load(), range(6)):
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.anyio
async def test_async_face(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    with root_of(checkpoint) as root:
        loaded = await stio.load(root, names=["layer.3"])
    assert torch.equal(loaded["layer.3"], tensors["layer.3"])


def test_c90_and_c91_in_a_load(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "x", {"t": torch.arange(100_000)})
    file = directory / NAME
    with root_of(directory) as root, stio.sync.open(root) as opened:
        data = file.read_bytes()
        file.write_bytes(data)
        os.utime(file, ns=(0, 0))
        with pytest.raises(ChangedDuringReadError):
            opened.load()
        os.truncate(file, 5000)
        with pytest.raises(TruncatedError):
            opened.load()
