"""Decisions of a host cache about its entries: which file is held, which one is added, and which one is evicted for it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from stio.errors import ClosedError, NoSpaceError, StorageError
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.serving.host_cache import CacheEntries, RequestedFile
from stio.storage.base import Identity
from stio.storage.checkpoint.caches import CachedFile, CacheStats


class File:
    """The part of a source that the entries use."""

    def __init__(self, inode: int, nbytes: int = 100, version: int = 1, *, ctime: int = 1, path: str = "") -> None:
        self.path = path or f"file {inode}"
        self.identity = Identity(1 if inode else 0, inode, nbytes, version, ctime)

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        raise AssertionError

    def check_unchanged(self) -> None:
        raise AssertionError

    def close(self) -> None:
        raise AssertionError


def wanted(inode: int, nbytes: int = 100, *, part: int | None = None, label: str = "", **state: int) -> RequestedFile:
    file = File(inode, nbytes, **state)
    return RequestedFile(file, label or file.path, nbytes if part is None else part)


def fill(holds: Sequence[CachedFile | None]) -> None:
    """Do as a load does: read everything, then release the holds."""
    for one in holds:
        if one is not None:
            image = one.image
            if image.claim(0, image.nbytes, lambda: False):
                image.mark_present(0, image.nbytes)
            one.release()


@pytest.fixture
def entries() -> CacheEntries:
    return CacheEntries(300, memory.allocate)


def test_least_recently_used_goes_first(entries: CacheEntries) -> None:
    for inode in (1, 2, 3, 1, 4):
        fill(entries.hold([wanted(inode)]))
    assert entries.stats() == CacheStats(entries=3, held_bytes=300, hits=1, misses=4, evictions=1)
    fill(entries.hold([wanted(1), wanted(3), wanted(4)]))
    assert entries.stats().hits == 4


def test_no_entry_is_evicted_in_vain(entries: CacheEntries) -> None:
    fill(entries.hold([wanted(1)]))
    [held] = entries.hold([wanted(2, 200)])
    assert held is not None
    assert entries.hold([wanted(3, 150)]) == [None]  # it would not fit even without 1
    assert entries.stats().evictions == 0
    held.release()
    assert entries.stats() == CacheStats(entries=1, held_bytes=100, hits=0, misses=3, evictions=0)  # 2 was never read


def test_files_of_one_load_do_not_push_each_other_out(entries: CacheEntries) -> None:
    for _ in range(3):
        holds = entries.hold([wanted(inode) for inode in (1, 2, 3, 4)])
        assert [one is not None for one in holds] == [True, True, True, False]
        fill(holds)
    assert entries.stats() == CacheStats(entries=3, held_bytes=300, hits=6, misses=6, evictions=0)


@pytest.mark.parametrize(("part", "is_let_in"), [(0, False), (49, False), (50, True), (100, True)])
def test_half_of_a_file_lets_it_in(entries: CacheEntries, part: int, is_let_in: bool) -> None:
    [holds] = entries.hold([wanted(1, part=part)])
    assert (holds is not None) == is_let_in


def test_two_names_of_one_file(entries: CacheEntries) -> None:
    first, second = entries.hold([wanted(1, label="a"), wanted(1, label="b")])
    assert first is not None
    assert second is not None
    assert first.image is second.image
    assert entries.stats().held_bytes == 100
    fill([first, second])
    assert [image.nbytes for image in entries.evict(lambda label: label == "a")] == [100]


@pytest.mark.parametrize("state", [{"version": 2}, {"ctime": 2}, {"nbytes": 101}])
def test_another_state_is_a_miss_and_the_old_one_goes(entries: CacheEntries, state: dict[str, int]) -> None:
    [old] = entries.hold([wanted(1)])
    assert old is not None
    [new] = entries.hold([wanted(1, **state)])  # type: ignore[arg-type]
    assert new is not None
    assert new.image is not old.image
    assert entries.stats().held_bytes == old.image.nbytes + new.image.nbytes  # its memory is still in use
    fill([old, new])
    assert entries.stats() == CacheStats(entries=1, held_bytes=new.image.nbytes, hits=0, misses=2, evictions=1)


def test_another_file_under_its_name(entries: CacheEntries) -> None:
    fill(entries.hold([wanted(1, label="x")]))
    fill(entries.hold([wanted(2, label="x")]))
    assert entries.stats() == CacheStats(entries=1, held_bytes=100, hits=0, misses=2, evictions=1)


def test_all_or_nothing(entries: CacheEntries) -> None:
    fill(entries.hold([wanted(1)]))
    with pytest.raises(NoSpaceError) as caught:
        entries.hold([wanted(2, 200), wanted(3, 101)], every="model")
    assert (caught.value.path, caught.value.needed_bytes, caught.value.free_bytes) == ("model", 301, 300)
    assert entries.stats().entries == 1
    with pytest.raises(NoSpaceError) as caught:
        entries.hold([wanted(1), wanted(3, 201)], every="model")  # what is there counts as used
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (201, 200)
    with pytest.raises(StorageError, match="inode"):
        entries.hold([wanted(1), wanted(0)], every="model")
    holds = entries.hold([wanted(1), wanted(2, part=1), wanted(2, part=1)], every="model")
    assert None not in holds
    fill(holds)
    assert [image.nbytes for image in entries.evict(lambda label: True)] == [100, 100]  # nobody holds anything


def test_too_little_memory_for_all(entries: CacheEntries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "fits", lambda nbytes: nbytes < 50)
    with pytest.raises(MemoryError):
        entries.hold([wanted(1, 40), wanted(2, 60)], every="model")
    assert entries.stats() == CacheStats(misses=2)
    assert entries.hold([wanted(2, 60)]) == [None]


def test_what_memory_failed_for_is_not_there(entries: CacheEntries) -> None:
    [holds] = entries.hold([wanted(1)])
    assert holds is not None
    holds.image.failed = True
    [other] = entries.hold([wanted(1)])
    assert other is not None
    assert other.image is not holds.image
    holds.release()
    fill([other])
    assert entries.stats().entries == 1


def test_closed(entries: CacheEntries) -> None:
    fill(entries.hold([wanted(1)]))
    [holds] = entries.hold([wanted(2)])
    assert holds is not None
    assert len(entries.close()) == 1
    assert entries.close() == []
    assert entries.stats().held_bytes == 100
    with pytest.raises(ClosedError):
        entries.hold([])
    holds.release()
    assert entries.stats().held_bytes == 0


def test_many_threads(entries: CacheEntries) -> None:
    """Whatever they do, the budget holds, and in the end nobody holds anything."""
    worst, lock = [0], threading.Lock()

    def work(seed: int) -> None:
        for k in range(200):
            holds = entries.hold([wanted(1 + (seed * 7 + k * 3) % 5), wanted(6 + (seed + k) % 3, 90)])
            with lock:
                worst[0] = max(worst[0], entries.stats().held_bytes)
            if k % 9 == 0:
                entries.evict(lambda label: label.endswith("1"))
            fill(holds)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert worst[0] <= 300
    entries.evict(lambda label: True)
    assert entries.stats().held_bytes == entries.stats().entries == 0
