"""The engine's executor on local files: each byte where it belongs, whichever way it is read, and nothing written at its end."""

from __future__ import annotations

import errno
import json
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support import eventually, needs_engine

from stio import native
from stio.errors import StorageError, TruncatedError
from stio.limits import PAGE_BYTES
from stio.loading.engine import EngineExecutor
from stio.loading.plan import GAP, Block, Group
from stio.loading.read_paths import CopiedPath, MappedPath, ReadPath
from stio.native import CHUNK_BYTES
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.runtime.reports.timeline import Span
from stio.runtime.reports.trace import Trace
from stio.storage.checkpoint.caches import CachedFile, FileImage
from stio.storage.local import LocalFile, MappedFile

pytestmark = needs_engine

MIB = 1 << 20
SIZE = 9 * MIB + 12_345


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Iterator[LocalFile]:
    (tmp_path / "data").write_bytes(data)
    opened = LocalFile.open(str(tmp_path / "data"))
    yield opened
    opened.close()


def group(index: int, offset: int, nbytes: int, *blocks: Block) -> Group:
    """Return a group of one tensor: a range of the file, or the image of scattered blocks."""
    return Group(
        index=index, selection=0, offset=-1 if blocks else offset, nbytes=nbytes, names=[f"t{index}"], dtypes=["U8"],
        shapes=[(nbytes,)], offsets=[0], payload_bytes=nbytes,
        blocks=blocks or ((Block(index, offset, nbytes, 0),) if nbytes else ()),
    )  # fmt: skip


def scattered(index: int, offset: int, *lengths: int) -> Group:
    """Return a group of runs of the file, given as lengths of a run, a gap, a run and so on."""
    places, at = [], 0
    for k, length in enumerate(lengths):
        places.append((GAP, length) if k % 2 else (at, length))
        at += 0 if k % 2 else length
    return group(index, offset, at, Block(index, offset, sum(lengths), 0, tuple(places)))


def path_of(file: LocalFile, kind: str) -> ReadPath:
    if kind == "direct" and not file.use_direct():
        pytest.skip("the filesystem of the tests has no direct I/O")
    return MappedPath(MappedFile(file), populates=True, cold=True) if kind == "map" else CopiedPath(file)


def load(path: ReadPath, groups: Sequence[Group], **options: Any) -> dict[int, bytes]:
    """Return the bytes of each group."""
    executor = EngineExecutor([path], 1000, budget_bytes=64 * MIB, **options)
    path.begin(groups)
    executor.add(groups)
    found: dict[int, bytes] = {}
    try:
        while len(found) < len(groups):
            for one in executor.take():
                (tensor,) = path.make_tensors(one).tensors.values()
                assert one.index not in found
                found[one.index] = bytes(tensor.numpy())
    finally:
        executor.close()
        path.close()
    return found


def bytes_of(data: bytes, group: Group) -> bytes:
    if group.offset >= 0:
        return data[group.offset : group.offset + group.nbytes]
    found, position = b"", group.blocks[0].offset
    for at, length in group.blocks[0].scatter:
        found += b"" if at == GAP else data[position : position + length]
        position += length
    return found


@pytest.mark.parametrize("kind", ["copy", "direct", "map"])
def test_each_byte_where_it_belongs(file: LocalFile, data: bytes, kind: str) -> None:
    page = PAGE_BYTES
    groups = [
        group(0, 0, SIZE), group(1, 0, 1), group(2, page, 5 * MIB), group(3, 3 * page, 2 * page + 7), group(4, 0, 0),
        group(5, SIZE // page * page, SIZE % page), group(6, SIZE // page * page - page, SIZE % page + page),
        scattered(7, 12_345, 3, 500, 4 * MIB, 3 * MIB, 77), scattered(8, 5, *[11, 1000] * 700, 9),
        scattered(9, page, page, page, page), group(10, page, 100), group(11, 4 * MIB, 2 * MIB + 1),
    ]  # fmt: skip
    found = load(path_of(file, kind), groups)
    assert [k for k in range(12) if found[k] != bytes_of(data, groups[k])] == []


@pytest.mark.parametrize(("kind", "name"), [("copy", "read"), ("map", "populate")])
def test_each_group_is_a_span_on_the_row_of_its_thread(
    file: LocalFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    done: list[native.Done] = []
    take = native.Transfer.take

    def remember(transfer: native.Transfer) -> list[native.Done]:
        done.extend(found := take(transfer))
        return found

    monkeypatch.setattr(native.Transfer, "take", remember)
    trace, path = Trace(origin=0.0), path_of(file, kind)
    load(path, [group(k, k * MIB, MIB - k) for k in range(9)], trace=trace)
    assert sorted(one.group for one in done) == list(range(9))
    assert trace.spans == [
        Span(name, f"engine-{one.thread + 1}", one.started, one.ended, MIB - one.group, type(path).__name__)
        for one in done
    ]
    assert all(0 < span.start <= span.end for span in trace.spans)
    trace.save_svg(tmp_path / "a.svg")
    trace.save_chrome(tmp_path / "a.json")
    events = json.loads((tmp_path / "a.json").read_text())["traceEvents"]
    rows = {span.lane for span in trace.spans}
    assert rows == {event["args"]["name"] for event in events if event["ph"] == "M"}
    assert all(f">{row}<" in (tmp_path / "a.svg").read_text() for row in rows)


def test_whatever_is_arranged_each_group_comes_once(file: LocalFile, data: bytes) -> None:
    path, chance = CopiedPath(file), random.Random(1)
    executor = EngineExecutor([path], 1000, budget_bytes=64 * MIB)
    groups = [group(k, k * PAGE_BYTES, 100 * PAGE_BYTES) for k in range(200)]
    found: list[int] = []
    for k in range(0, 200, 20):
        path.begin(groups[k : k + 20])
        executor.add(groups[k : k + 20])
        executor.arrange(chance.choices(range(220), k=50))
    while len(found) < 200:
        executor.arrange(chance.choices(range(220), k=50))
        for one in executor.take():
            assert bytes(path.make_tensors(one).tensors[f"t{one.index}"].numpy()) == bytes_of(data, one)
            found.append(one.index)
    executor.close()
    assert sorted(found) == list(range(200))


# Ends.


def test_a_wake_before_the_wait_counts_and_one_in_it(file: LocalFile) -> None:
    executor = EngineExecutor([path_of(file, "copy")], 1000, budget_bytes=MIB)
    executor.wake()
    assert executor.take() == []
    for end in (executor.wake, executor.stop):
        waiter = threading.Thread(target=executor.take)
        waiter.start()
        waiter.join(0.01)
        assert waiter.is_alive()
        end()
        waiter.join(30)
        assert not waiter.is_alive()
    assert executor.take() == []  # stopped
    executor.close()
    executor.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["copy", "direct", "map"])
def test_p4_nothing_is_written_after_the_end(file: LocalFile, kind: str) -> None:
    for delay in range(20):
        path = path_of(file, kind)
        executor = EngineExecutor([path], 1000, budget_bytes=64 * MIB)
        groups = [scattered(k, k * 5 + 1, 4 * MIB, 10, 4 * MIB) for k in range(4)]
        path.begin(groups)
        assert isinstance(path, CopiedPath)
        regions = list(path._regions.values())
        executor.add(groups)
        threading.Event().wait(delay * 0.0002)
        executor.close()
        for region in regions:
            region.write(0, b"\xcb" * region.nbytes)
        threading.Event().wait(0.002)
        assert all(region.tobytes() == b"\xcb" * region.nbytes for region in regions)


@pytest.mark.parametrize("kind", ["copy", "direct", "map"])
@pytest.mark.parametrize("left", [0, 1, MIB, 5 * MIB + 3])
def test_c90_a_file_that_is_cut(file: LocalFile, kind: str, left: int) -> None:
    path = path_of(file, kind)
    os.truncate(file.path, left)
    with pytest.raises(TruncatedError) as caught:
        load(path, [group(0, 0, SIZE)])
    assert caught.value.path == file.path
    # Of the threads that find nothing, one is the first; a mapping reports the size.
    assert caught.value.offset == left if kind == "map" else left <= (caught.value.offset or 0) < SIZE


@pytest.mark.parametrize("kind", ["copy", "map"])
def test_c89_a_file_that_cannot_be_read(file: LocalFile, data: bytes, kind: str) -> None:
    """The errors of other groups do not matter, whatever their order."""
    path = path_of(file, kind)
    unreadable = os.open(file.path, os.O_WRONLY)
    os.dup2(unreadable, file.fd)
    os.close(unreadable)
    with pytest.raises(StorageError) as caught:
        load(path, [scattered(k, 5 + k * MIB, 10, 100, 10) for k in range(5)])
    assert caught.value.errno == errno.EBADF
    assert caught.value.path == file.path
    assert caught.value.offset in {5 + k * MIB for k in range(5)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of Python, about forks beside threads
def test_a_child_forked_during_a_load_gets_an_error(file: LocalFile) -> None:
    path, groups = path_of(file, "copy"), [group(0, 0, SIZE)]
    executor = EngineExecutor([path], 1, budget_bytes=64 * MIB)
    path.begin(groups)
    pid = os.fork()
    if pid == 0:
        try:
            executor.add(groups)
            executor.take()
        except StorageError as error:
            os._exit(0 if error.errno == errno.ECHILD and "forked" in str(error) else 2)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    executor.close()


def test_no_thread(file: LocalFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native._functions(), "transfer_new", lambda *_: None, raising=False)
    with pytest.raises(OSError, match="cannot start a thread"):
        EngineExecutor([path_of(file, "copy")], 1000, budget_bytes=MIB)


def test_loads_at_once(file: LocalFile, data: bytes) -> None:
    """Several transfers share the engine's threads, and each gets its own bytes."""
    found: list[bool] = []

    def work(k: int) -> None:
        groups = [group(i, i * k * PAGE_BYTES, 300_000 + k) for i in range(20)]
        loaded = load(CopiedPath(file), groups)
        found.append(all(loaded[one.index] == bytes_of(data, one) for one in groups))

    workers = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert found == [True] * 8
    assert eventually(lambda: 1 <= native.num_threads() <= native.MAX_THREADS)


def test_an_image_of_whole_pages_is_read_by_whole_pages(file: LocalFile) -> None:
    """As reads past the page cache need it; a file's last page is read to its end."""
    path = CopiedPath(file)
    last = SIZE // PAGE_BYTES * PAGE_BYTES
    groups = [group(0, 0, 100), group(1, PAGE_BYTES, PAGE_BYTES + 1), group(2, last, 10)]
    added: list[int] = []

    class Recorded(native.Ranges):
        def file_to_host(self, group: int, fd: int, direct_fd: int, offset: int, nbytes: int, *rest: int) -> None:
            added.append(nbytes)

    path.begin(groups)
    for one in groups:
        path.add_ranges(one, Recorded())
        assert path._regions[one.index].address % memory.SYSTEM_PAGE_BYTES == 0
    assert added == [PAGE_BYTES, 2 * PAGE_BYTES, SIZE - last]


# Files in a cache.


def cached_path(file: LocalFile, image: FileImage) -> CopiedPath:
    return CopiedPath(file, cached=CachedFile(image, lambda: None))


def test_what_another_load_reads_may_come_before_it_is_watched(file: LocalFile, data: bytes) -> None:
    """Otherwise nobody wakes the load that waits for it."""

    class Late(FileImage):
        def watch(self, changed: Callable[[], None]) -> None:
            self.regions(0, CHUNK_BYTES)[0].write(0, data[:CHUNK_BYTES])
            self.mark_present(0, CHUNK_BYTES)
            super().watch(changed)

    image = Late(SIZE, memory.allocate)
    assert image.claim_now(0, CHUNK_BYTES)  # by the other load
    path, groups = cached_path(file, image), [group(0, 100, 5000)]
    executor = EngineExecutor([path], 1, budget_bytes=MIB)
    try:
        path.begin(groups)
        executor.add(groups)
        assert not executor._unread
        assert [one.index for one in executor.take()] == [0]
    finally:
        executor.close()
        path.close()


def test_an_error_while_a_file_is_claimed_leaves_nothing_claimed(file: LocalFile) -> None:
    def allocate(nbytes: int) -> Region:
        raise ZeroDivisionError

    image = FileImage(SIZE, allocate)
    path, groups = cached_path(file, image), [group(0, 0, SIZE)]
    executor = EngineExecutor([path], 1, budget_bytes=MIB)
    path.begin(groups)
    with pytest.raises(ZeroDivisionError):
        executor.add(groups)
    executor.close()
    path.close()
    assert not any(image._chunks)


class Orders:
    """A transfer that records the numbers of groups that are added and arranged, and moves nothing."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.done: list[int] = []

    def add(self, ranges: native.Ranges) -> None:
        numbers = [number & 0xFFFFFFFF for number in ranges._fields[6::7]]
        self.calls += [("add", list(dict.fromkeys(numbers)))] if numbers else []

    def arrange(self, groups: Sequence[int]) -> None:
        self.calls.append(("arrange", list(groups)))

    def take(self) -> list[native.Done]:
        done, self.done = self.done, []
        return [native.Done(number, 0, 0.0, 0.0) for number in done]

    def wake(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def end(self) -> None:
        pass


@pytest.fixture
def cached_groups(file: LocalFile) -> Iterator[tuple[EngineExecutor, Orders, list[Group], FileImage]]:
    """Four groups of a file that a cache has not, and an executor whose transfer moves nothing."""
    image = FileImage(SIZE, memory.allocate)
    path, groups = cached_path(file, image), [group(k, k * CHUNK_BYTES, CHUNK_BYTES) for k in range(4)]
    executor, orders = EngineExecutor([path], 4, budget_bytes=MIB), Orders()
    executor._transfer.end()
    executor._transfer = orders  # type: ignore[assignment]
    path.begin(groups)
    yield executor, orders, groups, image
    executor.close()
    path.close()


def test_what_is_read_into_a_cache_is_copied_before_what_is_read_later(
    cached_groups: tuple[EngineExecutor, Orders, list[Group], FileImage],
) -> None:
    executor, orders, groups, _ = cached_groups
    executor.add(groups)
    orders.calls, orders.done = [], [4, 5]  # reads into the cache
    assert executor.take() == []
    assert orders.calls == [("add", [0]), ("add", [1]), ("arrange", [0, 1])]


def test_a_group_that_is_read_into_a_cache_is_arranged_too(
    cached_groups: tuple[EngineExecutor, Orders, list[Group], FileImage],
) -> None:
    executor, orders, groups, _ = cached_groups
    executor.add(groups)
    orders.done = [4]
    executor.take()
    executor.arrange([3, 0, 1, 2])
    assert orders.calls[-1] == ("arrange", [7, 0, 5, 6])


def test_reads_into_a_cache_do_not_wait_for_all_of_its_memory_and_a_stop_neither(
    cached_groups: tuple[EngineExecutor, Orders, list[Group], FileImage], monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, orders, groups, image = cached_groups
    claim, added = image.claim_now, []

    def claim_now(begin: int, end: int) -> list[range]:
        added.append(len(orders.calls))
        if len(added) == 3:
            executor.stop()
        return claim(begin, end)

    monkeypatch.setattr(image, "claim_now", claim_now)
    executor.add(groups)
    assert added == [0, 1, 2]
