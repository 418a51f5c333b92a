"""Images of files: memory in powers of two, each byte read once whoever needs it, and nothing claimed for ever."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import eventually

from stio.errors import StorageError
from stio.limits import PAGE_BYTES
from stio.loading import read_paths
from stio.loading.plan import GAP, Block, Group
from stio.loading.read_paths import CopiedPath, contiguous, fill_image, image_regions
from stio.native import CHUNK_BYTES
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled
from stio.storage.base import Identity
from stio.storage.checkpoint.caches import CachedFile, FileImage

pytestmark = pytest.mark.usefixtures("plain_workers")

MIB = 1 << 20


def never() -> bool:
    return False


class CountingSource:
    """Bytes in memory, and how often each chunk of them was read."""

    path = "counted"

    def __init__(self, data: bytes, fail: Sequence[int] = ()) -> None:
        self.data = data
        self.identity = Identity(1, 1, len(data), 1)
        self.counts = [0] * -(-len(data) // CHUNK_BYTES)
        self._fail = set(fail)
        self._lock = threading.Lock()
        self.num_reads = 0

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        with self._lock:
            self.num_reads += 1
            failing = self.num_reads in self._fail
        for region in regions:
            if failing:
                region.write(0, b"\xcb" * (region.nbytes // 2))
                continue
            region.write(0, self.data[offset : offset + region.nbytes])
            with self._lock:
                for k in range(offset // CHUNK_BYTES, -(-(offset + region.nbytes) // CHUNK_BYTES)):
                    self.counts[k] += 1
            offset += region.nbytes
        if failing:
            raise StorageError("it broke", path=self.path)

    def check_unchanged(self) -> None:
        pass

    def close(self) -> None:
        pass


def read(source: CountingSource, image: FileImage, block: Block) -> bytes:
    """Return the image of a group with one block, as a load on the CPU reads it."""
    nbytes = sum(length for _, _, length in contiguous(block))
    group = Group(
        index=0, selection=0, offset=-1, nbytes=nbytes, names=["t"], dtypes=["U8"], shapes=[(nbytes,)], offsets=[0],
        blocks=(block,), payload_bytes=nbytes,
    )  # fmt: skip
    path = CopiedPath(source, cached=CachedFile(image, lambda: None))
    path.begin([group])
    path.read(group, block, never)
    return path.make_tensors(group).tensors["t"].numpy().tobytes()


def bytes_of(image: FileImage, begin: int, nbytes: int) -> bytes:
    return b"".join(region.tobytes() for region in image.regions(begin, nbytes))


# Memory.


@pytest.mark.parametrize(
    "nbytes",
    [
        1,
        100,
        PAGE_BYTES,
        PAGE_BYTES + 1,
        MIB - 1,
        47 * MIB + 5,
        FileImage.SEGMENT_BYTES,
        FileImage.SEGMENT_BYTES + 1,
        200 * MIB + 12345,
    ],
)
def test_segments_are_of_one_size_but_the_last_and_waste_less_than_a_page(nbytes: int) -> None:
    sizes: list[int] = []

    def allocate(size: int) -> Region:
        sizes.append(size)
        return Region(0, size)

    image = FileImage(nbytes, allocate)
    assert image.allocated_bytes == 0
    regions = image.regions(0, nbytes)
    assert sum(region.nbytes for region in regions) == nbytes
    assert sizes[:-1] == [FileImage.SEGMENT_BYTES] * (len(sizes) - 1)
    assert PAGE_BYTES <= sizes[-1] <= FileImage.SEGMENT_BYTES and sizes[-1] % PAGE_BYTES == 0
    assert 0 <= sum(sizes) - nbytes < PAGE_BYTES
    assert image.allocated_bytes == sum(sizes)
    image.take_memory()
    assert image.allocated_bytes == 0


def test_regions_lie_where_their_bytes_do() -> None:
    image = FileImage(130 * MIB, memory.allocate)
    for begin, nbytes in [(0, 1), (63 * MIB, 3 * MIB), (64 * MIB, 10), (127 * MIB, 3 * MIB), (5, 129 * MIB)]:
        [first, *_] = image.regions(begin, nbytes)
        first.write(0, begin.to_bytes(8, "little")[: first.nbytes])
        assert bytes_of(image, begin, min(nbytes, 8)) == begin.to_bytes(8, "little")[: min(nbytes, 8)]
    assert sum(region.nbytes for region in image.regions(5, 129 * MIB)) == 129 * MIB


def test_missing_memory_is_an_error_for_all_readers() -> None:
    calls = 0

    def allocate(size: int) -> Region:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise MemoryError
        return memory.allocate(size)

    data = bytes(100) * MIB
    source = CountingSource(data)
    image = FileImage(len(data), allocate)
    assert fill_image(source, image, Block(0, 0, 2 * MIB, 0), never)
    assert not fill_image(source, image, Block(0, 66 * MIB, 2 * MIB, 0), never)
    assert image.failed
    assert fill_image(source, image, Block(0, 0, 2 * MIB, 0), never)  # what is there is there
    assert not fill_image(source, image, Block(0, 4 * MIB, 2 * MIB, 0), never)
    assert read(source, image, Block(0, 66 * MIB, 2 * MIB, 0)) == data[66 * MIB : 68 * MIB]  # as without an image


# Chunks.


def test_what_is_missing_is_claimed_once() -> None:
    image = FileImage(7 * CHUNK_BYTES - 5, memory.allocate)
    assert image.is_empty
    assert image.claim(CHUNK_BYTES + 3, 3 * CHUNK_BYTES + 1, never) == range(CHUNK_BYTES, 4 * CHUNK_BYTES)
    assert image.claim(0, 6 * CHUNK_BYTES, never) == range(CHUNK_BYTES)
    assert image.claim(0, 6 * CHUNK_BYTES, never) == range(4 * CHUNK_BYTES, 6 * CHUNK_BYTES)
    assert image.claim(6 * CHUNK_BYTES, image.nbytes, never) == range(6 * CHUNK_BYTES, image.nbytes)
    image.mark_present(6 * CHUNK_BYTES, image.nbytes)
    assert not image.claim(6 * CHUNK_BYTES, image.nbytes, never)
    assert not image.is_empty


def test_pieces_land_as_far_as_they_fill_chunks() -> None:
    image = FileImage(4 * CHUNK_BYTES, memory.allocate)
    claimed = image.claim(0, image.nbytes, never)
    image.mark_present(0, CHUNK_BYTES + 5)
    assert not image.claim(0, CHUNK_BYTES, never)
    image.mark_missing(CHUNK_BYTES + 5, claimed.stop)
    assert image.claim(0, image.nbytes, never) == range(CHUNK_BYTES, image.nbytes)


def test_a_whole_claim_that_landed_leaves_nothing_to_give_up() -> None:
    image = FileImage(CHUNK_BYTES + 100, memory.allocate)
    claimed = image.claim(0, image.nbytes, never)
    image.mark_present(0, claimed.stop)
    image.mark_missing(claimed.stop, claimed.stop)
    assert not image.claim(0, image.nbytes, never)


@pytest.mark.parametrize("end", ["landed", "given up", "stopped", "no memory"])
def test_whoever_needs_what_is_coming_waits(end: str) -> None:
    def allocate(size: int) -> Region:
        raise MemoryError

    image = FileImage(3 * CHUNK_BYTES, allocate)
    image.claim(CHUNK_BYTES, 2 * CHUNK_BYTES, never)
    stopped = threading.Event()
    entered = threading.Event()

    def look() -> bool:
        entered.set()
        return stopped.is_set()

    with ThreadPoolExecutor(1) as pool:
        waiter = pool.submit(image.claim, CHUNK_BYTES, 2 * CHUNK_BYTES, look)
        assert entered.wait(5)
        assert not waiter.done()
        if end == "landed":
            image.mark_present(CHUNK_BYTES, 2 * CHUNK_BYTES)
            assert not waiter.result(5)
        elif end == "given up":
            image.mark_missing(CHUNK_BYTES, 2 * CHUNK_BYTES)
            assert waiter.result(5) == range(CHUNK_BYTES, 2 * CHUNK_BYTES)
        elif end == "stopped":
            stopped.set()
            with pytest.raises(Cancelled):
                waiter.result(5)
        else:
            with pytest.raises(MemoryError):
                image.regions(0, 1)
            with pytest.raises(MemoryError):
                waiter.result(5)


@pytest.mark.matrix
@pytest.mark.parametrize("fail", [(), (1,), (2, 3), (1, 2, 3, 4, 5, 6, 7)])
def test_many_readers_read_each_byte_once(fail: tuple[int, ...]) -> None:
    """Whatever ranges they want, and whoever of them fails: what one leaves the others bring."""
    chance = random.Random(3)
    data = chance.randbytes(9 * CHUNK_BYTES + 777)
    source = CountingSource(data, fail)
    image = FileImage(len(data), memory.allocate)
    failed: list[int] = []

    def work(seed: int) -> None:
        mine = random.Random(seed)
        for _ in range(12):
            begin = mine.randrange(len(data))
            nbytes = mine.randint(1, min(4 * CHUNK_BYTES, len(data) - begin))
            block = Block(0, begin, nbytes, 0)
            try:
                assert fill_image(source, image, block, never)
            except StorageError:
                failed.append(seed)
                continue
            lent = list(image_regions(image, block))
            assert b"".join(region.tobytes() for _, region in lent) == data[begin : begin + nbytes]
            assert lent[0][0] == 0

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert len(failed) == len([k for k in fail if k <= source.num_reads])
    while True:
        try:
            assert fill_image(source, image, Block(0, 0, len(data), 0), never)
            break
        except StorageError:
            continue
    assert bytes_of(image, 0, len(data)) == data
    assert set(source.counts) == {1}


def test_a_stop_between_pieces_leaves_the_rest_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    data = random.Random(5).randbytes(6 * CHUNK_BYTES)
    source = CountingSource(data)
    image = FileImage(len(data), memory.allocate)
    monkeypatch.setattr(read_paths, "PIECE_BYTES", CHUNK_BYTES)
    with pytest.raises(Cancelled):
        fill_image(source, image, Block(0, 0, len(data), 0), lambda: source.num_reads >= 2)
    assert source.num_reads == 2
    assert fill_image(source, image, Block(0, 0, len(data), 0), never)
    assert bytes_of(image, 0, len(data)) == data
    assert set(source.counts) == {1}


# Blocks.


def test_scattered_blocks_are_gathered() -> None:
    data = random.Random(7).randbytes(CHUNK_BYTES + 50)
    source, image = CountingSource(data), FileImage(len(data), memory.allocate)
    block = Block(0, 10, 30, 0, scatter=((0, 5), (GAP, 10), (5, 15)))
    assert read(source, image, block) == data[10:15] + data[25:40]
    assert [at for at, _ in image_regions(image, block)] == [0, 5]


def test_a_dense_block_lies_in_the_image_piece_by_piece() -> None:
    data = random.Random(8).randbytes(PAGE_BYTES) * (FileImage.SEGMENT_BYTES // PAGE_BYTES + 3)
    source, image = CountingSource(data), FileImage(len(data), memory.allocate)
    block = Block(0, FileImage.SEGMENT_BYTES - 10, 2 * PAGE_BYTES, 4096)
    assert fill_image(source, image, block, never)
    lent = list(image_regions(image, block))
    assert [(at, region.nbytes) for at, region in lent][:2] == [(4096, 10), (4106, 2 * PAGE_BYTES - 10)]
    assert b"".join(region.tobytes() for _, region in lent) == data[FileImage.SEGMENT_BYTES - 10 :][: 2 * PAGE_BYTES]


def test_a_hold_is_released_once_and_by_being_dropped() -> None:
    released: list[int] = []
    image = FileImage(1, memory.allocate)
    hold = CachedFile(image, lambda: released.append(1))
    hold.release()
    hold.release()
    assert released == [1]
    hold = CachedFile(image, lambda: released.append(2))
    del hold
    assert eventually(lambda: released == [1, 2])


def test_a_shortage_in_the_middle_of_a_claim_leaves_no_chunk_claimed() -> None:
    """Another reader may find that there is no memory at any moment."""

    class Failing(FileImage):
        looks = 0

        @property
        def failed(self) -> bool:
            self.looks += 1
            return self.looks > 1

        @failed.setter
        def failed(self, _: bool) -> None:
            pass

    image = Failing(5 * CHUNK_BYTES, memory.allocate)
    image._chunks[1] = 2  # present: the missing ones are two runs
    claimed = image.claim_now(0, image.nbytes)
    for one in claimed:
        image.mark_missing(one.start, one.stop)
    assert bytes(image._chunks) == bytes([0, 2, 0, 0, 0])
