"""Long ranges by several requests: the bytes of a plain read, its errors, and no descriptor or request left behind."""

from __future__ import annotations

import _thread
import ctypes
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stio.errors import TruncatedError
from stio.runtime import memory
from stio.runtime.limits import PAGE_BYTES
from stio.storage import parallel_read
from stio.storage.local import LocalFile, open_file
from stio.storage.parallel_read import num_requests, read_parallel

MIB = 1 << 20
SIZE = 80 * MIB + 12_345
IS_MAIN_THREAD = parallel_read._is_main_thread

pytestmark = pytest.mark.skipif(not parallel_read._is_supported(), reason="needs the GNU C library on 64 bits")


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(0).randbytes(SIZE)


@pytest.fixture
def file(tmp_path: Path, data: bytes) -> Iterator[LocalFile]:
    (tmp_path / "data").write_bytes(data)
    opened = open_file(str(tmp_path / "data"))
    yield opened
    opened.close()


@pytest.fixture(autouse=True)
def as_on_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread reads plainly; tests that are about requests make them there."""
    monkeypatch.setattr(parallel_read, "_is_main_thread", lambda: False)


def record(monkeypatch: pytest.MonkeyPatch, found: list[int]) -> None:
    submit = parallel_read._submit

    def counted(mode: int, pointers: object, count: int, event: object) -> int:
        found.append(count)
        return int(submit(mode, pointers, count, event))

    monkeypatch.setattr(parallel_read, "_submit", counted)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of requests of each call."""
    found: list[int] = []
    record(monkeypatch, found)
    return found


def descriptors() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    ("offset", "nbytes"), [(0, SIZE), (PAGE_BYTES * 7, 70 * MIB + 1), (MIB, 64 * MIB), (12_345, 65 * MIB)]
)
def test_the_bytes_are_those_of_a_plain_read(
    file: LocalFile, data: bytes, calls: list[int], offset: int, nbytes: int, direct: bool
) -> None:
    if direct and not file.use_direct():
        pytest.skip("the filesystem of the tests has no direct I/O")
    before = descriptors()
    region = memory.allocate(nbytes)
    file.read_into(offset, [region.sub(0, nbytes)])
    assert region.sub(0, nbytes).tobytes() == data[offset : offset + nbytes]
    assert calls == ([] if direct and offset % PAGE_BYTES else [4])
    assert descriptors() == before


def test_a_short_range_is_one_request(file: LocalFile, calls: list[int]) -> None:
    region = memory.allocate(SIZE)
    assert read_parallel(file.fd, region.address, 64 * MIB - 1, 0) == 0
    file.read_into(0, [region.sub(0, 64 * MIB - 1)])
    assert calls == []


@pytest.mark.parametrize(
    ("nbytes", "num_processors", "count"),
    [(64 * MIB - 1, 16, 1), (64 * MIB, 1, 4), (96 * MIB, 16, 6), (256 * MIB, 2, 4), (1 << 40, 64, 8)],
)
def test_number_of_requests(nbytes: int, num_processors: int, count: int) -> None:
    assert num_requests(nbytes, num_processors) == count


def test_c57_a_file_that_ends_earlier(file: LocalFile) -> None:
    """What is there is read by whole pages; the plain read of the rest reports the end."""
    region = memory.allocate(100 * MIB)
    start = SIZE // PAGE_BYTES * PAGE_BYTES - 40 * MIB
    assert read_parallel(file.fd, region.address, 70 * MIB, start) == 40 * MIB
    with pytest.raises(TruncatedError):
        file.read_into(start, [region.sub(0, 70 * MIB)])


@pytest.mark.parametrize("refused", [0, 1, 3])
def test_requests_that_the_library_refuses(
    file: LocalFile, data: bytes, monkeypatch: pytest.MonkeyPatch, refused: int
) -> None:
    """As where it gets no more threads: the others are waited for, and the plain read brings the rest."""
    submit = parallel_read._submit

    def submit_some(mode: int, pointers: object, count: int, event: object) -> int:
        pointers[refused] = None  # type: ignore[index]
        submit(mode, pointers, count, event)
        pointers[refused] = left  # type: ignore[index]
        return -1

    refused_request = parallel_read._Request()
    left = ctypes.addressof(refused_request)  # nothing was read by it
    monkeypatch.setattr(parallel_read, "_submit", submit_some)
    region = memory.allocate(SIZE)
    file.read_into(0, [region.sub(0, SIZE)])
    assert region.sub(0, SIZE).tobytes() == data


def test_a_wait_that_ends_early(file: LocalFile, data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal ends the wait of the call; the requests are waited for nevertheless."""
    submit, suspend, suspended = parallel_read._submit, parallel_read._suspend, []

    def submit_only(_: int, pointers: object, count: int, event: object) -> int:
        submit(1, pointers, count, event)  # LIO_NOWAIT
        return -1

    def counted(pointers: object, count: int, timeout: object) -> int:
        suspended.append(count)
        return int(suspend(pointers, count, timeout))

    monkeypatch.setattr(parallel_read, "_submit", submit_only)
    monkeypatch.setattr(parallel_read, "_suspend", counted)
    region = memory.allocate(SIZE)
    file.read_into(0, [region.sub(0, SIZE)])
    assert region.sub(0, SIZE).tobytes() == data
    assert suspended


def test_signals_during_reads(file: LocalFile, data: bytes) -> None:
    """Handlers run between the calls; each read returns its own bytes."""
    received = []
    previous = signal.signal(signal.SIGALRM, lambda *_: received.append(None))
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
    try:
        region = memory.allocate(SIZE)
        while len(received) < 5:
            file.read_into(0, [region.sub(0, SIZE)])
            assert region.sub(0, SIZE).tobytes() == data
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def test_c99_without_descriptors_the_read_is_plain(file: LocalFile, data: bytes, calls: list[int]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    region = memory.allocate(SIZE)
    before = descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))  # what is open stays open
    try:
        file.read_into(0, [region.sub(0, SIZE)])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert region.sub(0, SIZE).tobytes() == data
    assert calls == []
    assert descriptors() == before


def test_several_threads_on_one_file(file: LocalFile, data: bytes) -> None:
    def read(k: int) -> bool:
        offset = k * PAGE_BYTES
        region = memory.allocate(64 * MIB)
        file.read_into(offset, [region.sub(0, 64 * MIB)])
        return region.sub(0, 64 * MIB).tobytes() == data[offset : offset + 64 * MIB]

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(read, range(12)))


def test_a_forked_child_reads_plainly(file: LocalFile, data: bytes) -> None:
    """The library would wait for the parent's threads there."""
    region = memory.allocate(SIZE)
    assert read_parallel(file.fd, region.address, SIZE, 0) == SIZE
    child = os.fork()
    if not child:
        threading.Timer(30, os._exit, (3,)).start()  # a hang
        region.write(0, bytes(100))
        alone = read_parallel(file.fd, region.address, SIZE, 0) == 0
        file.read_into(0, [region.sub(0, SIZE)])
        os._exit(0 if alone and region.sub(0, SIZE).tobytes() == data else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("main", [True, False])
def test_a_handler_that_raises_leaves_no_descriptor(
    file: LocalFile, monkeypatch: pytest.MonkeyPatch, main: bool
) -> None:
    """Python runs handlers on the main thread only, so nothing is read in parallel there."""
    monkeypatch.undo()
    found: list[int] = []
    record(monkeypatch, found)

    def interrupt(*_: object) -> None:
        raise InterruptedError("of the handler")

    region = memory.allocate(SIZE)
    before = descriptors()
    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with ThreadPoolExecutor(1) as thread, pytest.raises(InterruptedError):
            signal.setitimer(signal.ITIMER_REAL, 0.03)
            while True:
                if main:
                    file.read_into(0, [region.sub(0, SIZE)])
                else:
                    thread.submit(file.read_into, 0, [region.sub(0, SIZE)]).result()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert descriptors() == before
    assert set(found) == (set() if main else {4})


def test_a_worker_is_recognised_without_a_record_of_it() -> None:
    """`threading` never removes the record of a thread that it has not started."""
    found, ended = [], threading.Event()

    def body() -> None:
        threading._active.pop(threading.get_ident(), None)  # type: ignore[attr-defined]  # of an earlier thread
        found.append((IS_MAIN_THREAD(), threading.get_ident() in threading._active))  # type: ignore[attr-defined]
        ended.set()

    _thread.start_new_thread(body, ())
    assert ended.wait(60)
    assert found == [(False, False)]
    assert IS_MAIN_THREAD()
