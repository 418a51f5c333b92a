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
from fakes import FaultyRoot, MemoryDestination, MemoryRoot, Read, Write, checkpoint_files, write_checkpoint

import stio.sync
from stio.errors import (
    CheckpointNotFoundError,
    CommitUncertainError,
    ConcurrentSaveError,
    NoSpaceError,
    StorageError,
    TruncatedError,
)
from stio.limits import PAGE_BYTES
from stio.runtime import memory
from stio.saving.options import Destination
from stio.storage.base import FileWriter, Note, Root, Source, Transaction
from stio.storage.local import LocalRoot
from stio.testing import SourceContract, read_guarded

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


# A place to save to.

SHARD = random.Random(4).randbytes(3 * PAGE_BYTES + 77)
INDEX = "model.safetensors.index.json"


def region_of(data: bytes) -> memory.Region:
    region = memory.allocate(len(data))
    region.write(0, data)
    return region.sub(0, len(data))


def put(sink: FileWriter, data: bytes = SHARD) -> None:
    """Write a file in two pieces, the second first."""
    sink.write_from(PAGE_BYTES, region_of(data[PAGE_BYTES:]))
    sink.write_from(0, region_of(data[:PAGE_BYTES]))
    sink.finish()


def publish(destination: MemoryDestination, num_shards: int = 1, data: bytes = SHARD, **options: object) -> Transaction:
    """Save as the engine does; abort what fails."""
    transaction = destination.begin(num_shards=num_shards, **options)  # type: ignore[arg-type]
    try:
        for sink in transaction.create([len(data)] * num_shards):
            put(sink, data)
        transaction.commit(index=b"index" if transaction.takes_index else None)
    finally:
        transaction.roll_back()
    return transaction


def require_ended(destination: MemoryDestination) -> None:
    assert (destination.num_open, destination.num_transactions, destination.num_waiting) == (0, 0, 0)


def test_saves_into_memory() -> None:
    destination = MemoryDestination()
    assert isinstance(destination, Destination)
    transaction = publish(destination)
    assert (transaction.path, transaction.shard_names, transaction.takes_index) == (
        "memory:", ("model.safetensors",), False,
    )  # fmt: skip
    assert destination.files == {"model.safetensors": SHARD}
    name = "model.safetensors"
    assert destination.writes == [Write(name, PAGE_BYTES, len(SHARD) - PAGE_BYTES), Write(name, 0, PAGE_BYTES)]
    assert destination.num_calls == {"begin": 1, "create": 1, "write": 2, "finish": 1, "commit": 1, "confirm": 1}
    assert (destination.num_commits, destination.violations) == (1, [])
    require_ended(destination)


def test_names_are_a_directorys() -> None:
    """Fresh files have the hub's names; those of a later save stand beside them until it is published."""
    destination = MemoryDestination({"tokenizer.json": b"{}"})
    publish(destination, 2)
    hub = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    assert set(destination.files) == {"tokenizer.json", INDEX, *hub}
    second = publish(destination, 2, SHARD[::-1])
    assert not hub & set(second.shard_names)
    assert set(destination.files) == {"tokenizer.json", INDEX, *second.shard_names}
    with pytest.raises(ValueError, match="hub"):
        destination.begin(num_shards=2, shard_names="hub")
    third = publish(destination, 2, shard_names="hub", commit="files")
    assert set(destination.files) == {"tokenizer.json", INDEX, *hub}
    assert third.takes_index
    assert publish(destination, 1).takes_index, "where an index was there is one again"
    assert len(destination.files) == 3
    require_ended(destination)


def test_notes() -> None:
    destination = MemoryDestination({"old": b"1", "gone": b"2"})
    transaction = destination.begin(num_shards=1)
    assert (transaction.read_note("old"), transaction.read_note("none")) == (b"1", None)
    put(transaction.create([len(SHARD)])[0])
    transaction.commit(index=None, notes=[Note("old", b"1 or 3", b"3"), Note("gone", None, None)])
    assert destination.files == {"model.safetensors": SHARD, "old": b"3"}


def test_c114_two_saves_at_once() -> None:
    destination = MemoryDestination()
    first, second = (destination.begin(num_shards=1) for _ in range(2))
    for transaction in (first, second):
        put(transaction.create([len(SHARD)])[0])
    first.commit(index=None)
    with pytest.raises(ConcurrentSaveError, match="memory"):
        second.commit(index=None)
    second.roll_back()
    assert destination.num_commits == 1
    require_ended(destination)


@pytest.mark.parametrize(("step", "count"), [("begin", 1), ("create", 1), ("write", 4), ("finish", 2), ("commit", 1)])
@pytest.mark.parametrize(("number", "error"), [(errno.EIO, StorageError), (errno.ENOSPC, NoSpaceError)])
def test_fails_at_the_nth_step(step: str, count: int, number: int, error: type[Exception]) -> None:
    for n in range(1, count + 2):
        destination = MemoryDestination({"model.safetensors": b"old"}, fail_in=step, fail_at=n, error_number=number)  # type: ignore[arg-type]
        try:
            publish(destination, 2)
        except error as caught:
            assert caught.errno == number  # type: ignore[attr-defined]
            assert destination.num_calls[step] == n
            assert destination.files == {"model.safetensors": b"old"}
            require_ended(destination)
            continue
        break
    assert n == count + 1
    assert destination.num_commits == 1


def test_c107_published_and_not_confirmed() -> None:
    destination = MemoryDestination(fail_in="confirm", fail_at=1)
    with pytest.raises(CommitUncertainError) as caught:
        publish(destination)
    assert caught.value.errno == errno.EIO
    assert destination.files == {"model.safetensors": SHARD}
    require_ended(destination)


def test_c103_says_how_much_is_missing() -> None:
    destination = MemoryDestination(fail_in="create", fail_at=1, error_number=errno.EDQUOT)
    with pytest.raises(NoSpaceError, match="quota") as caught:
        publish(destination, 3)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (3 * len(SHARD), 0)


def test_writes_wait_at_the_gate() -> None:
    """What stands in the region when the gate opens is what is written."""
    destination = MemoryDestination(gate=threading.Event(), gate_at=2)
    transaction = destination.begin(num_shards=1)
    sink = transaction.create([3 * PAGE_BYTES])[0]
    sink.write_from(0, region_of(bytes(PAGE_BYTES)))
    region = region_of(bytes(2 * PAGE_BYTES))
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(sink.write_from, k * PAGE_BYTES, region.sub((k - 1) * PAGE_BYTES, PAGE_BYTES)) for k in (1, 2)
        ]
        destination.wait_for_writers(2)
        assert not any(future.done() for future in futures)
        region.write(0, b"late")
        destination.gate.set()  # type: ignore[union-attr]
        for future in futures:
            future.result()
    sink.finish()
    transaction.commit(index=None)
    assert destination.files["model.safetensors"][PAGE_BYTES : PAGE_BYTES + 4] == b"late"
    require_ended(destination)


def _across_the_end(transaction: Transaction, sink: FileWriter, destination: MemoryDestination) -> None:
    destination.gate = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(sink.write_from, 0, region_of(SHARD))
        destination.wait_for_writers(1)
        try:
            transaction.roll_back()
        finally:
            destination.gate.set()
            future.result()


BREACHES: list[tuple[str, Callable[[Transaction, FileWriter, MemoryDestination], object]]] = [
    ("twice", lambda t, s, d: [s.write_from(0, region_of(SHARD[:PAGE_BYTES])) for _ in range(2)]),
    ("twice", lambda t, s, d: [s.write_from(k * PAGE_BYTES, region_of(SHARD[: 2 * PAGE_BYTES])) for k in (0, 1)]),
    ("do not begin at a page", lambda t, s, d: s.write_from(8, region_of(SHARD[:-8]))),
    ("do not begin at a page", lambda t, s, d: s.write_from(0, region_of(SHARD + b"x" * 8).sub(8, len(SHARD)))),
    ("inside a page", lambda t, s, d: s.write_from(0, region_of(SHARD[:100]))),
    ("which has", lambda t, s, d: s.write_from(0, region_of(SHARD + b"x"))),
    ("which has", lambda t, s, d: s.write_from(-PAGE_BYTES, region_of(SHARD))),
    ("not written", lambda t, s, d: s.finish()),
    ("finished twice", lambda t, s, d: [put(s), s.finish()]),
    ("after the file was finished", lambda t, s, d: [put(s), s.write_from(0, region_of(SHARD))]),
    ("before model.safetensors is finished", lambda t, s, d: t.commit(index=None)),
    ("no index", lambda t, s, d: [put(s), t.commit(index=b"{}")]),
    ("committed after its end", lambda t, s, d: [put(s), t.commit(index=None), t.commit(index=None)]),
    ("committed after its end", lambda t, s, d: [put(s), t.roll_back(), t.commit(index=None)]),
    ("created twice", lambda t, s, d: t.create([1])),
    ("created after", lambda t, s, d: [t.roll_back(), t.create([1])]),
    ("after the save's end", lambda t, s, d: [t.roll_back(), s.write_from(0, region_of(SHARD))]),
    ("after the save's end", lambda t, s, d: [t.roll_back(), s.finish()]),
    ("after the save's end", lambda t, s, d: [t.roll_back(), t.read_note("x")]),
    ("aborted while", _across_the_end),
    ("2 files for 1 names", lambda t, s, d: d.begin(num_shards=1).create([1, 2])),
    ("without files", lambda t, s, d: d.begin(num_shards=1).commit(index=None)),
    ("an index is missing", lambda t, s, d: _commit_two_without_index(d)),
]


def _commit_two_without_index(destination: MemoryDestination) -> None:
    transaction = destination.begin(num_shards=2)
    for sink in transaction.create([len(SHARD)] * 2):
        put(sink)
    transaction.commit(index=None)


@pytest.mark.parametrize(("message", "breach"), BREACHES, ids=[f"{k}: {m}" for k, (m, _) in enumerate(BREACHES)])
def test_breaches_of_the_contract(
    message: str, breach: Callable[[Transaction, FileWriter, MemoryDestination], object]
) -> None:
    destination = MemoryDestination()
    transaction = destination.begin(num_shards=1)
    sink = transaction.create([len(SHARD)])[0]
    with pytest.raises(AssertionError, match=message):
        breach(transaction, sink, destination)
    assert message in destination.violations[0]


def test_abort_is_idempotent_and_does_nothing_after_a_commit() -> None:
    destination = MemoryDestination()
    publish(destination).roll_back()
    transaction = destination.begin(num_shards=1)
    transaction.create([5])
    assert (destination.num_open, destination.num_transactions) == (1, 1)
    transaction.roll_back()
    transaction.roll_back()
    assert destination.files == {"model.safetensors": SHARD}
    require_ended(destination)


@pytest.mark.parametrize("num_shards", [1, 3])
def test_stands_where_a_destination_stands(num_shards: int) -> None:
    """What the public face saves there, a memory root loads."""
    tensors = {f"t{k}": torch.arange(1000).float() + k for k in range(3 if num_shards > 1 else 1)}
    destination = MemoryDestination()
    result = stio.sync.save(tensors, destination, max_shard_size=4000)
    assert len(result.files) == num_shards
    loaded = stio.sync.load(MemoryRoot(destination.files))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert destination.violations == []
    require_ended(destination)


@pytest.mark.parametrize("step", ["begin", "create", "write", "finish", "commit"])
def test_save_survives_a_fault_at_every_step(step: str) -> None:
    """Nothing stays open and the old checkpoint stands, whichever step fails."""
    tensors = {f"t{k}": torch.arange(1000) + k for k in range(4)}
    destination = MemoryDestination()
    stio.sync.save(tensors, destination)
    old = dict(destination.files)
    destination.fail_in, number = step, 0  # type: ignore[assignment]
    while True:
        number += 1
        destination.fail_at, destination.num_calls[step] = number, 0  # type: ignore[index]
        destination.writes.clear()
        try:
            stio.sync.save({"other": torch.arange(20)}, destination)
        except StorageError:
            assert destination.files == old
            require_ended(destination)
            continue
        break
    assert number == destination.num_calls[step] + 1  # type: ignore[index]
    assert destination.files != old
    assert destination.violations == []
