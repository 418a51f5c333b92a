"""The staging pool: what it holds, what it uses again, and that the budget is never exceeded."""

from __future__ import annotations

import threading

import pytest
from support import PATIENCE_SECONDS

from stio.limits import PAGE_BYTES
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.saving.staging_pool import StagingPool, block_bytes_for

MIB = 1 << 20


def made(budget_bytes: int | None, block_bytes: int = PAGE_BYTES) -> StagingPool:
    pool = StagingPool(budget_bytes)
    pool.fit(block_bytes, memory.allocate)
    return pool


def take(pool: StagingPool) -> Region | None:
    with pool.changed:
        taken = pool.try_take()
    return taken and taken()


@pytest.mark.parametrize(
    ("data_bytes", "budget_bytes", "stage_first", "expected"),
    [
        (0, None, True, 4 * MIB),
        (100 * MIB, None, True, 4 * MIB),
        (500 * MIB, None, True, 16 * MIB),
        (10_000 * MIB, None, True, 64 * MIB),
        (10_000 * MIB, None, False, 16 * MIB),
        (10_000 * MIB, 100 * MIB, True, 16 * MIB),
        (10_000 * MIB, 10 * MIB, False, 2 * MIB),
        (10_000 * MIB, 1, True, MIB),
    ],
)
def test_block_sizes(data_bytes, budget_bytes, stage_first, expected):
    found = block_bytes_for(data_bytes, budget_bytes, stage_first=stage_first)
    assert found == expected
    assert found & (found - 1) == 0
    assert found % PAGE_BYTES == 0


@pytest.mark.parametrize(
    ("data_bytes", "num_tensors", "budget_bytes", "stage_first", "expected"),
    [
        (40 * MIB, 10_000, None, False, 16 * MIB),
        (40 * MIB, 640, None, False, 4 * MIB),
        (240 * MIB, 60_000, None, False, 16 * MIB),
        (240 * MIB, 60_000, None, True, 64 * MIB),
        (40 * MIB, 10_000, 8 * MIB, False, 2 * MIB),
        (MIB, 10_000, None, True, 4 * MIB),
    ],
)
def test_blocks_of_many_small_tensors_are_larger(data_bytes, num_tensors, budget_bytes, stage_first, expected):
    """Each block costs its workers several turns for the GIL."""
    found = block_bytes_for(data_bytes, budget_bytes, stage_first=stage_first, num_tensors=num_tensors)
    assert found == expected


@pytest.mark.parametrize("budget", [1, PAGE_BYTES, 3 * PAGE_BYTES, 3 * PAGE_BYTES + 1, 4 * PAGE_BYTES - 1])
def test_never_more_than_the_budget_and_never_less_than_one(budget):
    pool = made(budget)
    blocks = []
    while (block := take(pool)) is not None:
        blocks.append(block)
    assert len(blocks) == max(1, budget // PAGE_BYTES)
    assert len({block.address for block in blocks}) == len(blocks)
    assert pool.peak_bytes == len(blocks) * PAGE_BYTES
    for block in blocks:
        pool.give_back(block)
    assert take(pool) is not None
    assert pool.peak_bytes == len(blocks) * PAGE_BYTES


def test_without_a_budget_there_is_always_one():
    pool = made(None)
    assert len([take(pool) for _ in range(100)]) == 100
    assert pool.peak_bytes == 100 * PAGE_BYTES


def test_used_blocks_are_given_out_again():
    pool = made(None)
    first = take(pool)
    pool.give_back(first)
    assert take(pool) is first
    pool.give_back(first)
    pool.fit(PAGE_BYTES, memory.allocate)  # the same as before: the blocks stay
    assert take(pool) is first


def test_other_sizes_and_makers_start_anew():
    pool = made(4 * PAGE_BYTES)
    first = [take(pool), take(pool)]
    for block in first:
        pool.give_back(block)
    pool.fit(2 * PAGE_BYTES, memory.allocate)
    blocks = [take(pool), take(pool), take(pool)]
    assert [block and block.nbytes for block in blocks] == [2 * PAGE_BYTES, 2 * PAGE_BYTES, None]
    calls = []

    def make(nbytes):
        calls.append(nbytes)
        return memory.allocate(2 * nbytes)  # pinned memory comes in powers of two

    for block in blocks[:2]:
        pool.give_back(block)
    pool.fit(2 * PAGE_BYTES, make)
    assert take(pool).nbytes == 2 * PAGE_BYTES
    assert calls == [2 * PAGE_BYTES]


def test_a_block_of_an_earlier_size_is_paid_for_until_it_is_back():
    pool = made(4 * PAGE_BYTES)
    out = take(pool)
    pool.fit(4 * PAGE_BYTES, memory.allocate)
    assert take(pool) is None, "the budget holds across sizes"
    pool.give_back(out)
    assert take(pool).nbytes == 4 * PAGE_BYTES
    assert take(pool) is None


def test_a_block_of_an_earlier_maker_is_not_given_out_again():
    pool = made(2 * PAGE_BYTES)
    out = take(pool)

    def pinned(nbytes):
        return memory.allocate(nbytes)

    pool.fit(PAGE_BYTES, pinned)  # as a save from a device does, whose copies need its own memory
    pool.give_back(out)
    assert take(pool).address != out.address
    assert take(pool) is not None, "the one that is back does not count any more"
    assert take(pool) is None


def test_clear_releases_what_is_not_in_use():
    pool = made(2 * PAGE_BYTES)
    used, unused = take(pool), take(pool)
    pool.give_back(unused)
    pool.clear()
    assert take(pool) is not unused
    assert take(pool) is None, "the one in use still counts"
    pool.give_back(used)


def test_a_block_that_cannot_be_made_costs_nothing():
    pool = StagingPool(PAGE_BYTES)

    def refuse(_):
        raise MemoryError

    pool.fit(PAGE_BYTES, refuse)
    with pytest.raises(MemoryError):
        take(pool)
    assert pool.held_bytes == 0
    pool.fit(PAGE_BYTES, memory.allocate)
    assert take(pool) is not None


def test_a_waiting_thread_is_notified_of_a_block_that_is_back():
    pool = made(PAGE_BYTES)
    block = take(pool)
    found, waiting = [], threading.Event()

    def wait():
        with pool.changed:
            waiting.set()
            while (mine := pool.try_take()) is None:
                assert pool.changed.wait(PATIENCE_SECONDS)
            found.append(mine())

    thread = threading.Thread(target=wait)
    thread.start()
    assert waiting.wait(PATIENCE_SECONDS)
    pool.give_back(block)
    thread.join(PATIENCE_SECONDS)
    assert found == [block]


@pytest.mark.parametrize("budget", [0, -1])
def test_a_budget_is_positive(budget):
    with pytest.raises(ValueError, match="positive"):
        StagingPool(budget)


@pytest.mark.parametrize(
    ("budget", "data", "free", "expected"),
    [
        (None, 100, 100, None), (None, 100, 99, 49), (None, 100, 0, 1), (50, 100, 60, 50), (50, 100, 40, 20),
        (None, 15, 0, None), (10, 100, 0, 10),
    ],
)  # fmt: skip
def test_the_budget_is_smaller_where_memory_is_short(
    budget: int | None, data: int, free: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MiB; up to 16 nothing is examined."""
    mib = 1 << 20
    monkeypatch.setattr("stio.saving.staging_pool.available_bytes", lambda: free * mib)
    pool = StagingPool(None if budget is None else budget * mib)
    found = pool.budget_for(data * mib)
    assert found is None if expected is None else found is not None and found // mib == expected


def test_a_limit_holds_until_the_next_fit() -> None:
    pool = StagingPool(None)
    pool.fit(PAGE_BYTES, memory.allocate, limit_bytes=2 * PAGE_BYTES)
    blocks = [take(pool) for _ in range(3)]
    assert [block is None for block in blocks] == [False, False, True]
    pool.fit(PAGE_BYTES, memory.allocate)
    with pool.changed:
        assert pool.try_take() is not None


@pytest.mark.parametrize(
    ("budget", "data", "room", "expected"),
    [
        (None, 100, 200, None), (None, 100, 199, 99), (None, 100, 0, 1), (None, 15, 0, None),
        (50, 100, 50, 50), (50, 100, 49, 24),
    ],
)  # fmt: skip
def test_pinned_memory_takes_half_of_what_is_left_at_most(
    budget: int | None, data: int, room: int, expected: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In MiB. Swap does not count, since pinned memory cannot be swapped. A budget of the caller's is the caller's."""
    monkeypatch.setattr("stio.saving.staging_pool.available_bytes", lambda: 1 << 50)
    monkeypatch.setattr("stio.saving.staging_pool.room_in_memory", lambda: room * MIB)
    found = StagingPool(None if budget is None else budget * MIB).budget_for(data * MIB, pinned=True)
    assert found is None if expected is None else found is not None and found // MIB == expected


def test_blocks_that_are_free_need_no_memory_and_those_in_use_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """A saver with several saves under way: each holds its own snapshot."""
    monkeypatch.setattr("stio.saving.staging_pool.room_in_memory", lambda: 80 * MIB)
    pool = made(None, 20 * MIB)
    used, free = take(pool), take(pool)
    assert pool.budget_for(60 * MIB, pinned=True) == 80 * MIB  # 40 that it holds, and half of what is left
    pool.give_back(free)
    assert pool.budget_for(60 * MIB, pinned=True) is None  # 40 more are needed
    pool.give_back(used)
    assert pool.budget_for(60 * MIB, pinned=True) is None


class Pinning:
    """Allocates as `PinnedAllocator` does; equal to others that were not refused."""

    def __init__(self, refuses: bool) -> None:
        self.refuses = refuses

    def __call__(self, nbytes: int) -> Region:
        return memory.allocate(nbytes)

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Pinning) and not self.refuses and not other.refuses)

    __hash__ = None


@pytest.mark.parametrize("refuses", [False, True])
def test_the_next_save_pins_again_what_was_refused(refuses: bool) -> None:
    """During a save, and after it if nothing was refused, blocks are used again."""
    pool = StagingPool(None)
    pool.fit(PAGE_BYTES, Pinning(refuses))
    block = take(pool)
    pool.give_back(block)
    assert take(pool) is block
    pool.give_back(block)
    pool.fit(PAGE_BYTES, Pinning(False))
    assert (take(pool) is block) == (not refuses)


def test_blocks_are_allocated_at_once_and_without_the_lock() -> None:
    """To pin a block takes long. Meanwhile others are pinned, and what waits for the lock goes on."""
    both = threading.Barrier(2)

    def make(nbytes: int) -> Region:
        both.wait(PATIENCE_SECONDS)
        with pool.changed:
            pass
        both.wait(PATIENCE_SECONDS)
        return memory.allocate(nbytes)

    pool = StagingPool(None)
    pool.fit(PAGE_BYTES, make)
    found: list[Region | None] = []
    threads = [threading.Thread(target=lambda: found.append(take(pool))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    assert len({block.address for block in found if block is not None}) == 2
