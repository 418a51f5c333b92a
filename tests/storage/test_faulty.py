"""The fakes keep the contract themselves while no fault is asked for, and each fault is the one that was asked for."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import stio.sync
from stio.errors import CheckpointNotFoundError, StorageError, TruncatedError
from stio.storage.base import Root, Source
from stio.storage.local import LocalRoot
from stio.testing import FaultyRoot, MemoryRoot, Read, SourceContract, checkpoint_files, read_guarded, write_checkpoint

DATA = random.Random(3).randbytes(10_000)


class TestMemoryFile(SourceContract):
    def create(self, directory: Path, data: bytes) -> Source:
        self.root = MemoryRoot({"x": data})
        return self.root.open("x")

    def overwrite(self, data: bytes) -> None:
        self.root.rewrite("x", data)


class TestFaultyFile(SourceContract):
    def open(self, path: Path) -> Source:
        return FaultyRoot(LocalRoot(path.parent)).open(path.name)


@pytest.fixture
def root() -> FaultyRoot:
    return FaultyRoot(MemoryRoot({"x": DATA, "y": DATA[::-1]}))


def test_memory_root() -> None:
    root = MemoryRoot({"b": b"2", "a": b"1"})
    assert isinstance(root, Root)
    assert root.listdir() == ["a", "b"]
    with pytest.raises(CheckpointNotFoundError, match="nowhere"):
        root.open("nowhere")


def test_log(root: FaultyRoot) -> None:
    assert isinstance(root, Root)
    assert root.listdir() == ["x", "y"]
    x, y = root.open("x"), root.open("y")
    assert root.num_open == 2
    read_guarded(x, 5, 10, 0, 20)
    read_guarded(y, 0, 1)
    assert root.reads == [Read("x", 5, 30), Read("y", 0, 1)]
    assert (root.num_reads, root.num_bytes) == (2, 31)
    x.close()
    x.close()
    assert root.num_open == 1


def test_fails_from_the_nth_read(root: FaultyRoot) -> None:
    root.fail_at, root.error_number = 2, errno.ETIMEDOUT
    x = root.open("x")
    assert read_guarded(x, 0, 10) == DATA[:10]
    for _ in range(2):
        with pytest.raises(StorageError) as caught:
            read_guarded(x, 7, 10)
        assert (caught.value.errno, caught.value.offset) == (errno.ETIMEDOUT, 7)
    root.fail_at = None
    assert read_guarded(x, 0, 10) == DATA[:10]


def test_ends_early(root: FaultyRoot) -> None:
    root.short_at = 1
    x = root.open("x")
    with pytest.raises(TruncatedError) as caught:
        read_guarded(x, 100, 30, 10, 60)
    assert caught.value.offset == 150
    assert read_guarded(x, 100, 30) == DATA[100:130]


def test_waits_at_the_gate(root: FaultyRoot) -> None:
    root.gate, root.gate_at = threading.Event(), 2
    x = root.open("x")
    read_guarded(x, 0, 1)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(read_guarded, x, k, 10) for k in range(3)]
        root.wait_for_readers(3)
        assert not any(future.done() for future in futures)
        root.gate.set()
        assert [future.result() for future in futures] == [DATA[k : k + 10] for k in range(3)]
    assert root.num_waiting == 0


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("kind", ["memory", "directory"])
def test_stands_where_a_path_stands(tmp_path: Path, num_shards: int, kind: str) -> None:
    tensors = {f"t{k}": torch.arange(k * 10).float() for k in range(7)}
    root: MemoryRoot | str = MemoryRoot(checkpoint_files(tensors, num_shards))
    if kind == "directory":
        root = str(write_checkpoint(tmp_path / "x", tensors, num_shards))
    loaded = stio.sync.load(root)
    assert set(loaded) == set(tensors)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize("fault", ["fail_at", "short_at"])
def test_load_survives_a_fault_at_every_read(fault: str) -> None:
    """Nothing stays open, whichever read it is that fails; the first number that no read has ends the search."""
    tensors = {f"t{k}": torch.arange(1000) + k for k in range(4)}
    files = checkpoint_files(tensors, 2)
    number = 0
    while True:
        number += 1
        root = FaultyRoot(MemoryRoot(files))
        setattr(root, fault, number)
        try:
            stio.sync.load(root)
        except (StorageError, TruncatedError):
            assert root.num_open == 0
            continue
        break
    assert number == root.num_reads + 1 >= 5


def test_load_reads_only_what_is_wanted() -> None:
    tensors = {f"t{k:03}": torch.arange(100_000) + k for k in range(20)}
    root = FaultyRoot(MemoryRoot(checkpoint_files(tensors)))
    with stio.sync.open(root) as checkpoint:
        root.reads.clear()
        part = checkpoint.load(names=["t003", "t011"], slices={"t011": slice(10, 20)})
        info = checkpoint.info("t003")
    assert torch.equal(part["t003"], tensors["t003"])
    assert torch.equal(part["t011"], tensors["t011"][10:20])
    assert root.num_reads == 2
    # Whole pages, so that direct reads stay direct: at most one more at each end.
    assert info.nbytes + 80 <= root.num_bytes <= info.nbytes + 80 + 4 * 4096
    assert root.num_open == 0


def test_cancel_waits_for_reads_under_way() -> None:
    root = FaultyRoot(MemoryRoot(checkpoint_files({"t": torch.arange(100)})), gate=threading.Event(), gate_at=2)
    done: list[BaseException] = []

    def consume(use: Callable[[], object]) -> None:
        try:
            use()
        except BaseException as error:
            done.append(error)

    with stio.sync.open(root) as checkpoint:
        stream = checkpoint.stream()
        reader = threading.Thread(target=consume, args=(lambda: next(stream),))
        reader.start()
        root.wait_for_readers(1)
        closer = threading.Thread(target=stream.close)
        closer.start()
        closer.join(0.05)
        assert closer.is_alive()
        root.gate.set()  # type: ignore[union-attr]
        closer.join(30)
        reader.join(30)
        assert not closer.is_alive()
        assert root.num_waiting == 0
    assert root.num_open == 0
