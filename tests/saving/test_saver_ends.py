"""How a saver's saves end where several have a say in it: a close meanwhile, a cancel too late, a fork, a producer."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import threading
import time
import warnings

import anyio
import pytest
import torch
from fakes import MemoryDestination
from support import eventually, eventually_async, require_equal

import stio
import stio.sync
from stio.runtime.notifier import run_blocking

pytestmark = pytest.mark.anyio

PATIENCE_SECONDS = 20


class Gate:
    """Holds a producer until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def lazy(self):
        def produce():
            self.reached.set()
            assert self.opened.wait(PATIENCE_SECONDS)
            return torch.ones(3)

        return {"a": stio.LazyTensor(torch.float32, (3,), produce)}


async def test_closing_takes_no_further_saves(tmp_path):
    gate = threading.Event()
    destination = MemoryDestination(gate=gate)
    saver = stio.Saver(max_pending=2)
    pending = await saver.save({"a": torch.ones(3)}, destination)
    async with anyio.create_task_group() as group:
        group.start_soon(saver.aclose)
        await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        with pytest.raises(stio.ClosedError):
            await saver.save({"a": torch.ones(3)}, tmp_path / "late")
        assert not pending.done()
        gate.set()
    assert pending.done()
    assert not (tmp_path / "late").exists()


@pytest.mark.slow
def test_closing_and_saving_from_two_threads_leaves_no_save_behind(tmp_path):
    for number in range(20):
        saver = stio.sync.Saver(max_pending=4)

        def save(saver=saver, number=number):
            try:
                for k in range(100):
                    saver.save({"a": torch.ones(3)}, tmp_path / f"{number}-{k}", durability="none")
            except stio.ClosedError:
                pass

        thread = threading.Thread(target=save)
        thread.start()
        saver.save({"a": torch.ones(3)}, tmp_path / f"{number}-own", durability="none")
        saver.close()
        assert not saver.pending
        thread.join(PATIENCE_SECONDS)


async def test_a_cancel_too_late_does_not_hide_that_the_commit_is_uncertain(tmp_path, caplog):
    destination = MemoryDestination(fail_in="confirm", fail_at=1)
    commit, begun, go = MemoryDestination.publish, threading.Event(), threading.Event()

    def held(*arguments):
        begun.set()
        assert go.wait(PATIENCE_SECONDS)
        commit(destination, *arguments)

    destination.publish = held
    with pytest.raises(stio.CommitUncertainError):
        async with stio.Saver() as saver:
            pending = await saver.save({"a": torch.ones(3)}, destination)
            await eventually_async(begun.is_set)
            pending.cancel()
            go.set()
    assert "was not awaited" in caplog.text


async def test_a_cancelled_save_is_no_failure():
    destination = MemoryDestination(gate=threading.Event())
    async with stio.Saver() as saver:
        pending = await saver.save({"a": torch.ones(3)}, destination)
        pending.cancel()
        destination.gate.set()


def test_a_producer_that_is_cancelled_fails_its_save(tmp_path):
    async def cancelled():
        raise asyncio.CancelledError

    async def main():
        async with asyncio.TaskGroup() as group:
            group.create_task(stio.save({"a": stio.LazyTensor(torch.float32, (3,), cancelled)}, tmp_path / "x"))

    with pytest.raises(ExceptionGroup) as caught:  # no cancel that a group takes for the end of its task
        asyncio.run(main())
    assert caught.group_contains(RuntimeError, match="was cancelled")


def test_a_saver_starts_afresh_in_a_forked_child(tmp_path):
    gate = Gate()
    with stio.sync.Saver(budget_bytes=1 << 20, keep_last=1) as saver:
        saver.save({"a": torch.zeros(3)}, tmp_path / "before-0").result()
        thread = threading.Thread(target=saver.save, args=(gate.lazy(), tmp_path / "parent-1"))
        thread.start()
        assert gate.reached.wait(PATIENCE_SECONDS)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's own, of forks beside threads
            child = os.fork()
        if not child:
            code = 1
            try:
                saver.save({"a": torch.ones(3)}, tmp_path / "child-2").result(PATIENCE_SECONDS)
                saver.close()
                code = 0 if (tmp_path / "before-0").exists() else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        gate.opened.set()
        thread.join(PATIENCE_SECONDS)
    require_equal(stio.sync.load(tmp_path / "child-2"), {"a": torch.ones(3)})
    assert sorted(os.listdir(tmp_path)) == ["child-2", "parent-1"]


@pytest.mark.parametrize("length", [242, 255])
def test_a_file_whose_name_is_too_long_for_a_manifest_beside_it(tmp_path, length):
    path = tmp_path / f"{'x' * (length - 12)}.safetensors"
    stio.sync.save({"a": torch.ones(3)}, path)
    require_equal(stio.sync.load(path), {"a": torch.ones(3)})
    with pytest.raises(stio.StorageError) as caught:
        stio.sync.save({"a": torch.zeros(3)}, path, hash="sha256")
    assert caught.value.errno == errno.ENAMETOOLONG
    require_equal(stio.sync.load(path), {"a": torch.ones(3)})
    assert os.listdir(tmp_path) == [path.name]


def test_a_destination_that_is_removed_meanwhile_is_not_said_to_stay_behind(tmp_path, caplog):
    gate, place = Gate(), tmp_path / "x"
    place.mkdir()

    def remove():
        if eventually(lambda: any(place.glob(".stio-*/new/model*"))):
            shutil.rmtree(place)
        gate.opened.set()

    thread = threading.Thread(target=remove)
    thread.start()
    with pytest.raises(stio.StorageError):
        stio.sync.save(gate.lazy(), place)
    thread.join(PATIENCE_SECONDS)
    assert not place.exists()
    assert "stays behind" not in caplog.text


@pytest.mark.parametrize("dropped", ["at once", "later"])
def test_c113_a_failure_of_a_saver_that_was_dropped_is_logged(caplog, dropped):
    destination = MemoryDestination(gate=threading.Event(), fail_at=1)
    saver = stio.sync.Saver()
    pending = saver.save({"a": torch.ones(3)}, destination)
    if dropped == "at once":
        del saver, pending
        destination.gate.set()
    else:
        destination.gate.set()
        run_blocking(pending.ended())
        del saver, pending
    assert eventually(lambda: gc.collect() >= 0 and "was not awaited" in caplog.text)
    assert caplog.text.count("was not awaited") == 1


@pytest.mark.costly("processes of its own")
def test_c113_a_failure_is_logged_at_the_interpreters_end(zygote):
    code = """
        import sys, threading, torch, stio.sync
        from fakes import MemoryDestination
        destination = MemoryDestination(gate=threading.Event(), fail_at=1)
        saver = stio.sync.Saver()
        saver.save({"a": torch.ones(3)}, destination)
        threading.Timer(0.0, destination.gate.set).start()
        """
    ended = zygote.run(code)
    assert ended.returncode == 0
    assert ended.stderr.count("was not awaited") == 1


def test_c113_a_failure_that_was_told_is_not_logged_again(caplog):
    destination = MemoryDestination(fail_at=1)
    saver = stio.sync.Saver()
    with pytest.raises(stio.StorageError):
        saver.save({"a": torch.ones(3)}, destination).result()
    with pytest.raises(stio.StorageError):
        stio.sync.save({"a": torch.ones(3)}, MemoryDestination(fail_at=1))
    del saver
    gc.collect()
    assert not caplog.text


@pytest.mark.parametrize("end", ["close", "leave"])
def test_221_a_save_that_closes_its_saver_is_refused_and_goes_on(tmp_path, end):
    """Its thread would wait for its own end."""
    saver, raised = stio.sync.Saver(), []

    def close(event):
        try:
            if end == "close":
                saver.close()
            else:
                with saver:
                    pass
        except stio.SaveInProgressError as error:
            raised.append(str(error))

    saver.save({"a": torch.ones(1000)}, tmp_path / "a", progress=close).result(timeout=30)
    assert raised and all("its own thread cannot wait for its end" in text for text in raised)
    saver.save({"a": torch.ones(1000)}, tmp_path / "b").result(timeout=30)  # it stayed open
    saver.close()


def test_221_a_finaliser_that_closes_its_saver_on_a_thread_of_the_save(tmp_path):
    class Trainer:
        def __init__(self):
            self.saver, self.me = stio.sync.Saver(), self

        def __del__(self):
            with pytest.raises(stio.SaveInProgressError):
                self.saver.close()
            ended.append(True)

    ended, events, begun = [], [], threading.Event()

    def collect(event):
        events.append(event)
        if len(events) > 1:  # the first comes before the snapshot, for which the caller waits
            begun.wait(30)
            gc.collect()

    def begin():
        return Trainer().saver.save({"a": torch.ones(1000)}, tmp_path / "a", progress=collect)

    gc.collect()
    gc.disable()
    try:
        pending = begin()
        begun.set()
        pending.result(timeout=30)
    finally:
        gc.enable()
    assert ended


@pytest.mark.slow
def test_206_a_cancel_ends_the_plan_of_many_tensors(tmp_path):
    many = {f"t{k}": tensor for k, tensor in enumerate(torch.zeros(200_000, 1).unbind())}
    saver = stio.sync.Saver()

    def cancel():
        assert eventually(lambda: saver.pending)
        time.sleep(0.05)  # the plan has begun
        for save in saver.pending:
            save.cancel()

    thread = threading.Thread(target=cancel)
    thread.start()
    started = time.monotonic()
    with pytest.raises(stio.ClosedError):
        saver.save(many, tmp_path / "a").result()
    assert time.monotonic() - started < 10  # 0.3 s on a quiet machine; the whole save takes much longer
    thread.join()
    saver.close()
