"""The way through aiofiles: the contract, and a whole load by it."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import anyio
import pytest
import torch

import stio.sync
from stio.errors import ChangedDuringReadError, CheckpointNotFoundError, StorageError, TruncatedError, UnsafePathError
from stio.runtime import memory
from stio.runtime.event_loop import engine_call
from stio.storage import async_files as portable
from stio.storage.adapters import BlockingSource
from stio.storage.async_files import PortableFile, PortableRoot
from stio.storage.base import AsyncRoot, Root, Source
from stio.testing import SourceContract, write_checkpoint

T = TypeVar("T")
DATA = random.Random(4).randbytes(200_000)
NAME = "model.safetensors"

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own descriptors and calls")


class TestPortableFile(SourceContract):
    def open(self, path: Path) -> Source:
        return BlockingSource(engine_call(lambda: portable.open_file(str(path))))


class TestPortableFileInPieces(SourceContract):
    @pytest.fixture(autouse=True)
    def small_pieces(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(portable, "PIECE_BYTES", 777)

    def open(self, path: Path) -> Source:
        return BlockingSource(engine_call(lambda: PortableRoot(path.parent).open(path.name)))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    directory = tmp_path / "a checkpoint ü"
    directory.mkdir()
    (directory / NAME).write_bytes(DATA)
    return directory


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def run(body: Callable[[], Coroutine[Any, Any, T]]) -> T:
    return asyncio.run(body())


async def read(file: PortableFile, offset: int, nbytes: int) -> bytes:
    region = memory.allocate(nbytes).sub(0, nbytes)
    await file.read_into(offset, [region])
    return region.tobytes()


def test_root(place: Path) -> None:
    async def body() -> None:
        async with PortableRoot(place) as root:
            assert isinstance(root, AsyncRoot)
            assert not isinstance(root, Root)
            assert await root.listdir() == [NAME]
            file = await root.open(NAME)
            assert await read(file, 3, 1000) == DATA[3:1003]
            await file.check_unchanged()
            await file.aclose()
            with pytest.raises(CheckpointNotFoundError):
                await root.open("other")
            with pytest.raises(StorageError, match="null"):
                await root.open("a\0b", trusted=True)
        with pytest.raises(CheckpointNotFoundError):
            await PortableRoot(place / "nowhere").listdir()
        with pytest.raises(StorageError):
            await PortableRoot(place / NAME).listdir()

    run(body)


@linux
@pytest.mark.timeout(20)
@pytest.mark.parametrize("kind", ["fifo", "directory", "device"])
def test_b78_odd_files_never_hang(place: Path, kind: str) -> None:
    path = place / "odd"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")

    async def body() -> None:
        before = num_descriptors()
        with pytest.raises(StorageError, match="not a regular file"):
            await PortableRoot(place, follow_symlinks=True).open("odd")
        assert num_descriptors() == before

    run(body)


def test_b77_links(place: Path) -> None:
    (place.parent / "secret").write_bytes(b"secret")
    (place / "out").symlink_to("../secret")
    (place / "in").symlink_to(NAME)

    async def body() -> None:
        root = PortableRoot(place)
        with pytest.raises(UnsafePathError):
            await root.open("out")
        for file in (
            await root.open("in"),
            await root.open("out", trusted=True),
            await PortableRoot(place, follow_symlinks=True).open("out"),
        ):
            await file.aclose()

    run(body)


@linux
def test_handles_are_bounded_and_given_back(place: Path) -> None:
    async def body() -> None:
        file = await PortableRoot(place).open(NAME)
        before = num_descriptors()
        parts = await asyncio.gather(*(read(file, k * 1000, 1000) for k in range(100)))
        assert b"".join(parts) == DATA[:100_000]
        assert num_descriptors() <= before + portable.MAX_HANDLES - 1
        await file.aclose()
        await file.aclose()
        assert num_descriptors() == before - 1

    run(body)


@linux
@pytest.mark.parametrize("trouble", ["replaced", "removed", "refused"])
def test_c99_readers_share_where_no_further_handle_is_had(
    place: Path, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another file at the path is never mixed in, and too few descriptors cost concurrency alone."""

    async def body() -> None:
        file = await PortableRoot(place).open(NAME)
        before = num_descriptors()
        if trouble == "replaced":
            (place / "new").write_bytes(bytes(len(DATA)))
            (place / "new").replace(place / NAME)
        elif trouble == "removed":
            (place / NAME).unlink()
        else:

            def refuse(*_: object, **__: object) -> int:
                raise OSError(errno.EMFILE, "no more of them")

            monkeypatch.setattr(portable.os, "open", refuse)
        parts = await asyncio.gather(*(read(file, k * 1000, 1000) for k in range(20)))
        assert b"".join(parts) == DATA[:20_000]
        assert num_descriptors() == before
        await file.check_unchanged()
        await file.aclose()

    run(body)


class _Slow:
    """A handle whose read is held in its thread until it is let go."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self.inside, self.let_go = threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    async def readinto(self, target: Any) -> int:
        def work() -> int:
            self.inside.set()
            assert self.let_go.wait(30)
            return int(os.readv(self._file.fileno(), [target]))

        return await asyncio.to_thread(work)


@pytest.mark.parametrize("kind", ["task", "scope"])
def test_c95_cancel_waits_until_no_thread_writes(place: Path, kind: str) -> None:
    async def body() -> None:
        file = await PortableRoot(place).open(NAME)
        slow = file._first.file = _Slow(file._first.file)
        region = memory.allocate(1000).sub(0, 1000)
        scope = anyio.CancelScope()
        ended = asyncio.Event()

        async def reader() -> None:
            try:
                with scope:
                    await file.read_into(0, [region])
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
        slow.let_go.set()
        await asyncio.wait([task])
        assert task.cancelled() == (kind == "task")
        assert region.tobytes() == DATA[:1000]
        file._first.file = slow._file
        assert await read(file, 5, 10) == DATA[5:15]  # the handle is back, its position known
        await file.aclose()

    run(body)


def test_c89_disk_error(place: Path) -> None:
    class Broken:
        def __init__(self, file: Any) -> None:
            self._file = file

        def __getattr__(self, name: str) -> Any:
            return getattr(self._file, name)

        async def readinto(self, target: Any) -> int:
            raise OSError(errno.EIO, "broken")

    async def body() -> None:
        file = await PortableRoot(place).open(NAME)
        whole, file._first.file = file._first.file, Broken(file._first.file)
        with pytest.raises(StorageError) as caught:
            await read(file, 4096, 10)
        assert (caught.value.errno, caught.value.offset) == (errno.EIO, 4096)
        file._first.file = whole
        assert await read(file, 4096, 10) == DATA[4096:4106]
        await file.aclose()

    run(body)


# The whole load.


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    return {f"layer.{k}": torch.randn(300, 100 + k, generator=chance) for k in range(40)} | {"e": torch.empty(0, 3)}


@pytest.fixture(scope="module", params=[1, 3])
def checkpoint(request: Any, tmp_path_factory: pytest.TempPathFactory, tensors: dict[str, torch.Tensor]) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("portable"), tensors, request.param)


@linux
def test_load(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    stio.sync.load(PortableRoot(checkpoint))
    before = num_descriptors()
    loaded = stio.sync.load(PortableRoot(checkpoint), budget_bytes=1 << 20)  # many blocks, so many readers
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert num_descriptors() == before


def test_stream_and_slices(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    with stio.sync.open(PortableRoot(checkpoint), budget_bytes=1 << 20) as opened:
        assert torch.equal(opened.read("layer.7", (slice(10, 200, 3), slice(5, 9))), tensors["layer.7"][10:200:3, 5:9])
        assert torch.equal(opened.read("layer.8"), tensors["layer.8"])
        found = dict(opened.stream())
    assert set(found) == set(tensors)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_loads_at_the_same_time(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    with stio.sync.open(PortableRoot(checkpoint)) as opened, ThreadPoolExecutor(6) as pool:
        for loaded in pool.map(lambda _: opened.load(), range(6)):
            assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.anyio
async def test_async_face(checkpoint: Path, tensors: dict[str, torch.Tensor]) -> None:
    loaded = await stio.load(PortableRoot(checkpoint), names=["layer.3"])
    assert torch.equal(loaded["layer.3"], tensors["layer.3"])


def test_c90_and_c91_in_a_load(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "x", {"t": torch.arange(100_000)})
    file = directory / NAME
    with stio.sync.open(PortableRoot(directory)) as opened:
        data = file.read_bytes()
        file.write_bytes(data)
        os.utime(file, ns=(0, 0))
        with pytest.raises(ChangedDuringReadError):
            opened.load()
        os.truncate(file, 5000)
        with pytest.raises(TruncatedError):
            opened.load()
