"""Parts of uploads: their memory, and how an upload ends that cannot go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import eventually

import stio
from stio.errors import StorageError
from stio.remote import save as remote_save
from stio.remote.folder import DEFAULT_BYTES, MIN_PART_BYTES, PART_BYTES, Folder, PartMemory, Upload
from stio.remote.requests import Patience
from stio.remote.source import RemoteRoot
from stio.runtime import calls, memory
from stio.saving.scheduler import WRITE_DEPTH, SaveScheduler
from stio.saving.staging_pool import StagingPool

pytestmark = pytest.mark.usefixtures("_no_uploads")

MIB = 1 << 20


class SilentFolder:
    """A folder whose store takes no part before `answer` is called."""

    path = "s3://bucket/m"
    patience = Patience()

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.answers = False
        self.total_bytes = 0
        self.lock = threading.Lock()

    def upload(self, name: str, parts: Iterator[Any], **options: Any) -> str:
        for part in parts:
            with self.lock:
                self.total_bytes += len(part)
                if not self.answers:
                    self.held.append(part)
            del part
        return "etag"

    def answer(self) -> None:
        with self.lock:
            self.answers = True
            self.held.clear()


@pytest.mark.parametrize("max_mib", [5, 24, 60])
def test_the_parts_of_all_shards_have_one_bound(max_mib: int) -> None:
    """A store that is silent holds up the save, and not its memory; each shard that has begun may have one part."""
    folder: Any = SilentFolder()
    parts = PartMemory(max_mib * MIB)
    size, num = 40 * MIB, 3
    uploads = [Upload(folder, f"shard-{k}", size, parts) for k in range(num)]
    block = memory.allocate(4 * MIB)

    def write(upload: Upload) -> None:
        for offset in range(0, size, block.nbytes):
            upload.write_from(offset, block)
        upload.finish()

    def is_full() -> bool:
        with parts.changed:
            return all(not parts.has_room(upload.name, parts.part_bytes) for upload in uploads)

    threads = [threading.Thread(target=write, args=(upload,)) for upload in uploads]
    for thread in threads:
        thread.start()
    assert eventually(is_full)
    assert sum(parts._held.values()) <= max_mib * MIB + (num - 1) * parts.part_bytes
    folder.answer()
    for thread in threads:
        thread.join(20)
    assert folder.total_bytes == num * size
    assert eventually(lambda: parts.has_room("another", parts.part_bytes) and not sum(parts._held.values()))


def test_the_memory_of_parts_is_within_the_budget() -> None:
    destination = remote_save.RemoteDestination(RemoteRoot("s3://bucket/m", config={"region": "us-east-1"}))
    for budget in (6 * MIB, 64 * MIB, 512 * MIB, 8 << 30):
        changed, nbytes = destination.within(budget)
        assert changed.buffer_bytes == nbytes <= DEFAULT_BYTES
        assert nbytes < budget
        part = PartMemory(nbytes).part_bytes
        assert MIN_PART_BYTES <= part <= min(PART_BYTES, nbytes)
    root = RemoteRoot("s3://bucket/m", config={"region": "us-east-1"})
    assert remote_save.open_destination(root).within(64 * MIB)[0].root is root


@pytest.mark.slow
@pytest.mark.parametrize("budget_mib", [8, 64])
def test_staging_and_parts_together_fit_the_budget(s3: Any, monkeypatch: pytest.MonkeyPatch, budget_mib: int) -> None:
    pools: list[Any] = []
    found: list[PartMemory] = []
    plain_pool, plain_parts = StagingPool.__init__, PartMemory.__init__

    def pool(self: Any, *values: Any) -> None:
        pools.append(self)
        plain_pool(self, *values)

    def parts(self: Any, *values: Any) -> None:
        found.append(self)
        plain_parts(self, *values)

    monkeypatch.setattr(StagingPool, "__init__", pool)
    monkeypatch.setattr(PartMemory, "__init__", parts)
    tensors = {f"w{k}": torch.zeros(4 * MIB) for k in range(6)}
    stio.sync.save(tensors, "s3://bucket/m", budget_bytes=budget_mib * MIB, max_shard_size="40MB")
    assert 0 < pools[0].peak_bytes + found[0]._max_bytes <= budget_mib * MIB


@pytest.mark.parametrize("place", ["s3://bucket/m", "s3://bucket/m.safetensors"])
def test_an_error_that_is_no_failure_of_a_request(s3: Any, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    def upload(self: Any, name: str, parts: Iterator[Any], **options: Any) -> str:
        next(iter(parts))
        raise MemoryError("no memory for the answer")

    monkeypatch.setattr(Folder, "upload", upload)
    with pytest.raises(MemoryError, match="no memory for the answer"):
        stio.sync.save({"w": torch.zeros(10 * MIB)}, place, budget_bytes=16 * MIB)


@pytest.mark.slow
def test_blocks_that_are_staged_late_are_written_first(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All writers took later blocks, and waited for the first one, which no writer was left to take."""
    plain = SaveScheduler._fill

    def fill(self: Any, group: int, block: Any, *rest: Any) -> list[Any]:
        if block is self._blocks[0]:
            with self._changed:
                while self._num_writing != WRITE_DEPTH and self._changed.wait(0.5):
                    pass
        return plain(self, group, block, *rest)

    monkeypatch.setattr(SaveScheduler, "_fill", fill)
    with stio.sync.Saver() as saver:
        pending = saver.save({"w": torch.ones(16 * MIB)}, "s3://bucket/m")
        try:
            pending.result(20)
        finally:
            pending.cancel()
    assert torch.equal(stio.sync.load("s3://bucket/m")["w"], torch.ones(16 * MIB))


def test_a_thread_that_the_system_refuses(s3: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*values: Any) -> None:
        raise RuntimeError("can't start new thread")

    threads = SimpleNamespace(allocate_lock=calls._thread.allocate_lock, start_new_thread=refuse)
    monkeypatch.setattr(calls, "_thread", threads)
    with pytest.raises(StorageError, match="starts no more threads"):
        stio.sync.save({"w": torch.zeros(4)}, "s3://bucket/m")
    assert eventually(lambda: not s3.list_objects_v2(Bucket="bucket").get("Contents"))


def test_a_call_on_its_own_thread_never_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*values: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(calls._thread, "start_new_thread", refuse)
    before = len(calls._under_way)
    with pytest.raises(RuntimeError):
        calls.Call(lambda: None, on_own_thread=True)
    assert len(calls._under_way) == before
