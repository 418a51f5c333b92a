"""A worker pool: all work is done by some thread, the first error comes out, nothing is left when it has ended."""

from __future__ import annotations

import gc
import os
import sys
import threading
import weakref
from collections import deque

import pytest
from support import PATIENCE_SECONDS, eventually, nothing_left

from stio.process import NICENESS, Condition, require_unlocked
from stio.runtime import workers
from stio.runtime.operation import Cancelled, Operation, is_interrupted, start_thread
from stio.runtime.workers import WorkerPool


@pytest.fixture(autouse=True)
def _clean():
    with nothing_left():
        yield


class Queue:
    """Numbers for workers; owns its pool, as a scheduler does."""

    def __init__(self, count: int, on_take=lambda number: None) -> None:
        self.pool = WorkerPool("test")
        self.left = deque(range(count))
        self.done: list[int] = []
        self.on_take = on_take

    def work(self) -> None:
        while not self.pool.stopped and self.left:
            try:
                number = self.left.popleft()
            except IndexError:
                return
            self.on_take(number)
            self.done.append(number)


@pytest.mark.parametrize("num_workers", [1, 2, 8])
def test_all_is_done_once(num_workers):
    queue = Queue(100)
    queue.pool.run(queue.work, num_workers)
    assert sorted(queue.done) == list(range(100))


def test_the_calling_thread_works_along_and_the_others_beside_it():
    barrier, threads = threading.Barrier(3), set()

    def on_take(_):
        threads.add(threading.get_ident())
        barrier.wait(PATIENCE_SECONDS)

    queue = Queue(3, on_take)
    queue.pool.run(queue.work, 3)
    assert threading.get_ident() in threads and len(threads) == 3


def test_started_before_anybody_works_along():
    queue = Queue(5)
    queue.pool.start(queue.work, 1)
    assert eventually(lambda: len(queue.done) == 5)
    queue.pool.work_along(queue.work)
    queue.pool.join()
    queue.pool.raise_error()


@pytest.mark.parametrize("allowed", [0, 1])
def test_the_system_refuses_threads(monkeypatch, allowed):
    started = []

    def refuse(run, *, name):
        if len(started) == allowed:
            raise RuntimeError("can't start new thread")
        started.append(name)
        start_thread(run, name=name)

    monkeypatch.setattr(workers, "start_thread", refuse)
    queue = Queue(50)
    queue.pool.run(queue.work, 8)
    assert sorted(queue.done) == list(range(50))
    assert started == ["test-1"][:allowed]


@pytest.mark.parametrize("num_workers", [1, 4])
def test_an_error_comes_out_as_it_was_raised(num_workers):
    mine = OSError(5, "mine")

    def fail(number):
        if number == 3:
            raise mine

    queue = Queue(1000, fail)
    with pytest.raises(OSError, match="mine") as caught:
        queue.pool.run(queue.work, num_workers)
    assert caught.value is mine
    assert queue.pool.stopped and queue.left
    with pytest.raises(Cancelled):
        queue.pool.raise_error()  # the error itself is not kept


def test_the_first_error_wins():
    failed = threading.Barrier(2)

    def fail(number):
        failed.wait(PATIENCE_SECONDS)
        if number == 1:
            assert eventually(queue.pool.is_stopped)
        raise ValueError(number)

    queue = Queue(2, fail)
    with pytest.raises(ValueError, match="0"):
        queue.pool.run(queue.work, 2)


def test_a_cancel_is_no_error():
    def fail(number):
        if number == 0:
            raise Cancelled
        assert eventually(queue.pool.is_stopped)
        raise KeyError("after it")

    queue = Queue(1, fail)
    with pytest.raises(Cancelled):
        queue.pool.run(queue.work, 1)


def test_stop_wakes_workers_that_wait_and_is_told_once_more_by_an_error():
    told = []
    pool = WorkerPool("test", on_stop=lambda: (require_unlocked(), told.append(True)))

    def work():
        with pool.changed:
            pool.changed.wait_for(pool.is_stopped)

    pool.start(work, 2)
    pool.stop()
    pool.work_along(work)
    pool.join()
    with pytest.raises(Cancelled):
        pool.raise_error()
    assert told == [True]


def test_a_condition_of_its_owner():
    changed = Condition()
    pool = WorkerPool("test", changed=changed)
    assert pool.changed is changed
    with pytest.raises(ZeroDivisionError):
        pool.run(lambda: 1 // 0, 2)


def test_owner_and_pool_are_freed_without_the_collector():
    queue = Queue(10)
    queue.pool.run(queue.work, 3)
    found = weakref.ref(queue)
    gc.disable()
    try:
        del queue
        assert eventually(lambda: found() is None)
    finally:
        gc.enable()


@pytest.mark.skipif(sys.platform != "linux", reason="a thread has a priority of its own on Linux")
def test_its_own_threads_are_nice_the_calling_one_is_not():
    before, found = os.getpriority(os.PRIO_PROCESS, 0), {}
    barrier = threading.Barrier(2)

    def on_take(_):
        barrier.wait(PATIENCE_SECONDS)
        found[threading.get_ident()] = os.getpriority(os.PRIO_PROCESS, 0)

    queue = Queue(2, on_take)
    queue.pool.run(queue.work, 2)
    assert found.pop(threading.get_ident()) == before
    assert list(found.values()) == [min(19, before + NICENESS)]


def test_workers_know_that_they_should_end():
    """By a cancel of their operation, and by the stop of their pool; after the pool the thread is as before."""
    seen = []

    def look(label):
        seen.append((label, is_interrupted()))

    def body(operation):
        pool = WorkerPool("test")

        def work():
            look("in a pool")
            pool.stop()
            look("in a stopped pool")

        with pytest.raises(Cancelled):
            pool.run(work, 1)
        look("after the pool")
        operation.cancel()
        look("in a cancelled operation")

    look("outside")
    operation = Operation(body, name="test").start()
    assert operation.join(PATIENCE_SECONDS)
    assert seen == [
        ("outside", False),
        ("in a pool", False),
        ("in a stopped pool", True),
        ("after the pool", False),
        ("in a cancelled operation", True),
    ]
