"""The plain executor: what it promises to the scheduler, and what becomes of the slots that devices copy from."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from fakes import FakeDevice
from support import PATIENCE_SECONDS, eventually, nothing_left

from stio.errors import DeviceError, HostMemoryError, StorageError
from stio.loading.plain import PlainExecutor
from stio.loading.plan import Block, Group
from stio.loading.read_paths import DevicePath, StagingSlots
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled
from stio.runtime.reports.trace import Trace


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


def group(index: int, nbytes: int, num_blocks: int = 1) -> Group:
    """Return a group of one tensor, in the file behind all groups of this size with a lower index."""
    start, step = index * nbytes, nbytes // num_blocks
    blocks = tuple(Block(index, start + at, step, at) for at in range(0, nbytes, step)) if nbytes else ()
    return Group(
        index=index, selection=0, offset=-1, nbytes=nbytes, names=[f"t{index}"], dtypes=["U8"], shapes=[(nbytes,)],
        offsets=[0], blocks=blocks, payload_bytes=nbytes,
    )  # fmt: skip


class Path:
    """Records the reads; `on_read` may wait or raise."""

    label = "read"
    is_native = False
    image = None

    def __init__(self, on_read: Callable[[Group, Block], None] = lambda *_: None) -> None:
        self.reads: list[tuple[int, int]] = []
        self.num_inside = 0
        self._on_read = on_read
        self._lock = threading.Lock()

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        with self._lock:
            self.reads.append((group.index, block.at))
            self.num_inside += 1
        try:
            self._on_read(group, block)
        finally:
            with self._lock:
                self.num_inside -= 1


class Held(Path):
    """Holds the first read until `go` is set."""

    def __init__(self) -> None:
        super().__init__(self._hold)
        self.entered, self.go = threading.Event(), threading.Event()

    def _hold(self, *_: object) -> None:
        if not self.entered.is_set():
            self.entered.set()
            assert self.go.wait(PATIENCE_SECONDS)


def executor_of(path: Any, num_workers: int = 1, **options: Any) -> PlainExecutor:
    return PlainExecutor([path], num_workers=num_workers, **options)


def take_all(executor: PlainExecutor, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        found += [one.index for one in executor.take()]
    return found


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


# Groups.


def test_groups_are_complete_once_those_without_bytes_too() -> None:
    path = Path()
    executor = executor_of(path, 3)
    executor.add([group(k, 30 * (k % 3), 3) for k in range(30)])
    executor.add([group(30, 0)])
    assert sorted(take_all(executor, 31)) == list(range(31))
    assert len(path.reads) == len(set(path.reads)) == 60
    executor.close()


def test_what_is_arranged_is_read_next_and_the_rest_as_before() -> None:
    path = Held()
    executor = executor_of(path)
    executor.add([group(k, 4, 2) for k in range(4)])
    assert path.entered.wait(PATIENCE_SECONDS)
    executor.arrange([3, 9, 1, 3])
    path.go.set()
    assert take_all(executor, 4) == [3, 1, 0, 2]
    assert path.reads == [(0, 0), (3, 0), (3, 2), (1, 0), (1, 2), (0, 2), (2, 0), (2, 2)]
    executor.close()


def test_a_wake_before_the_wait_counts() -> None:
    executor = executor_of(Path())
    executor.wake()
    assert executor.take() == []
    waiter = in_thread(executor.take)
    assert eventually(lambda: len(executor._changed._waiting) == 1)
    executor.wake()
    waiter.join(PATIENCE_SECONDS)
    assert not waiter.is_alive()
    executor.close()


# Ends.


@pytest.mark.parametrize("end", ["stop", "close"])
def test_the_end_waits_for_the_read_under_way(end: str) -> None:
    path = Held()
    executor = executor_of(path)
    executor.add([group(k, 4) for k in range(4)])
    assert path.entered.wait(PATIENCE_SECONDS)

    def stop() -> None:
        executor.stop()
        with pytest.raises(Cancelled):
            executor.take()

    ending = in_thread(stop if end == "stop" else executor.close)
    ending.join(0.02)
    assert ending.is_alive()
    path.go.set()
    ending.join(PATIENCE_SECONDS)
    executor.close()
    assert (path.num_inside, path.reads) == (0, [(0, 0)])


def test_the_first_error_is_raised_and_nothing_begins_behind_it() -> None:
    second_has_begun = threading.Event()
    first = KeyError("first")

    def on_read(group: Group, block: Block) -> None:
        if group.index == 0:
            assert second_has_begun.wait(PATIENCE_SECONDS)
            raise first
        second_has_begun.set()
        assert eventually(lambda: executor._workers.stopped)
        raise ValueError("second")

    path = Path(on_read)
    executor = executor_of(path, 2)
    executor.add([group(k, 4) for k in range(8)])
    with pytest.raises(KeyError) as caught:
        take_all(executor, 1)
    assert caught.value is first
    assert path.num_inside == 0
    executor.close()
    assert len(path.reads) == 2


def test_spans_of_reads() -> None:
    trace = Trace()
    executor = executor_of(Path(), 2, trace=trace)
    executor.add([group(k, 30, 3) for k in range(2)])
    take_all(executor, 2)
    executor.close()
    assert [(span.name, span.num_bytes, span.detail) for span in trace.spans] == [("read", 10, "Path")] * 6


# Slots.

SIZE = 60_000


class Bytes:
    """A source of bytes in memory; the read of one number may fail."""

    path = "bytes"

    def __init__(self, data: bytes, fail_read: int = 0) -> None:
        self._data = data
        self._fail_read = fail_read
        self.num_reads = 0

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        self.num_reads += 1
        if self.num_reads == self._fail_read:
            raise StorageError("it broke", path=self.path)
        for region in regions:
            region.write(0, self._data[offset : offset + region.nbytes])
            offset += region.nbytes


class Loading:
    """Reads groups to a fake device, by slots of 1,000 bytes."""

    def __init__(
        self,
        device: FakeDevice,
        num_groups: int = 6,
        *,
        num_workers: int = 4,
        fail_read: int = 0,
        trace: Any = None,
        kind: type[DevicePath] = DevicePath,
    ) -> None:
        self.data = random.Random(0).randbytes(num_groups * SIZE)
        self.slots = StagingSlots(device, 1000)
        source: Any = Bytes(self.data, fail_read)
        self.path = kind(source, self.slots, trace=trace)
        self.executor = executor_of(self.path, num_workers, trace=trace)
        self.groups = [group(k, SIZE, 10) for k in range(num_groups)]
        self.path.begin(self.groups)

    def run(self) -> None:
        """Load all, and compare."""
        try:
            self.executor.add(self.groups)
            for index in take_all(self.executor, len(self.groups)):
                found = self.path.make_tensors(self.groups[index]).tensors[f"t{index}"]
                assert bytes(found.tolist()) == self.data[index * SIZE : (index + 1) * SIZE]
        finally:
            self.close()

    def close(self) -> None:
        self.executor.close()
        self.path.close()


def is_freed(device: FakeDevice) -> bool:
    gc.collect()
    return not (device.used_bytes or device.staging_bytes or device.num_pending)


@pytest.mark.matrix
@pytest.mark.parametrize("num_workers", [1, 4, 9])
def test_a_slot_is_filled_again_behind_its_copies_only(num_workers: int) -> None:
    """The fake device copies late and poisons slots, so each mistake is a wrong byte."""
    device = FakeDevice(delay_seconds=0.0001)
    loading = Loading(device, num_workers=num_workers)
    loading.run()
    assert 1 <= device.num_staging <= num_workers
    assert (loading.slots.held_bytes, device.peak_staging_bytes) == (0, device.num_staging * 1000)
    assert eventually(lambda: is_freed(device))


def test_groups_are_complete_behind_their_copies_only() -> None:
    device = FakeDevice(manual=True)
    loading = Loading(device, 1)
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(loading.run)
        while device.num_passed < 60:
            assert not running.done() or running.result() is not None
            device.wait_for_pending(1)
            device.step()
        running.result(PATIENCE_SECONDS)
    assert device.num_copies == 60


@pytest.mark.parametrize("number", [1, 2, 30, 60])
@pytest.mark.parametrize("fault", ["refuse_copy", "fail_copy"])
def test_a_slot_of_a_failed_copy_is_never_filled_again(fault: str, number: int) -> None:
    """The device may still read it."""
    lost: list[Region] = []

    class Recording(DevicePath):
        def _copy(self, group: Group, regions: Any, stopped: Any) -> None:
            assert not any(region.owner is one.owner for _, region in regions for one in lost)
            try:
                super()._copy(group, regions, stopped)
            except DeviceError:
                lost.extend(region for _, region in regions)
                raise

    faults: dict[str, Any] = {fault: number}
    device = FakeDevice(delay_seconds=0.0001, **faults)
    loading = Loading(device, 1, num_workers=2, kind=Recording)
    with pytest.raises(DeviceError):
        loading.executor.add(loading.groups)
        take_all(loading.executor, 1)
    assert lost
    assert not any(region.owner is slot.owner for region in lost for slot in loading.slots._free)
    loading.close()
    assert not device.num_pending
    assert loading.slots.held_bytes == 0


@pytest.mark.parametrize("number", [1, 7, 40])
def test_a_failed_read_waits_for_the_copies_under_way(number: int) -> None:
    device = FakeDevice()
    with pytest.raises(StorageError, match="it broke"):
        Loading(device, 1, num_workers=3, fail_read=number).run()
    assert not device.num_pending
    assert eventually(lambda: is_freed(device))


def test_no_host_memory_for_a_slot() -> None:
    device = FakeDevice(refuse_staging=1)
    with pytest.raises(HostMemoryError):
        Loading(device, 1).run()
    assert eventually(lambda: is_freed(device))


def test_a_cancel_waits_for_the_copies() -> None:
    device = FakeDevice(manual=True)
    loading = Loading(device, 2, num_workers=3)
    executor = loading.executor
    executor.add(loading.groups)
    device.wait_for_pending(3)
    closing = in_thread(loading.close)
    workers = executor._workers
    assert eventually(workers.is_stopped)
    closing.join(0.02)
    assert closing.is_alive()
    assert device.step(3) == 3
    closing.join(PATIENCE_SECONDS)
    assert not closing.is_alive()
    assert (device.num_copies, device.num_pending) == (3, 0)
    del loading, closing, executor
    assert eventually(lambda: is_freed(device))


def test_spans_of_copies() -> None:
    trace = Trace()
    Loading(FakeDevice(delay_seconds=0.0001), 1, trace=trace).run()
    copies = [span.num_bytes for span in trace.spans if span.name == "copy"]
    assert (len(copies), sum(copies)) == (60, SIZE)
