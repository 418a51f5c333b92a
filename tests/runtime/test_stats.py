"""`stio.stats()`: what has ended, what is under way, and what a forked child sees."""

from __future__ import annotations

import dataclasses
import errno
import gc
import pickle
import threading
from pathlib import Path

import anyio
import pytest
import torch
from fakes import FakeDevice, MemoryDestination
from support import Gate, HookedRoot, eventually, eventually_async, ramp, run_python, save_sharded, spin

import stio
from stio import native, sync

pytestmark = pytest.mark.anyio

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return save_sharded({f"layer.{k}": ramp(256, 256) for k in range(8)}, tmp_path_factory.mktemp("model"), 2)


DATA_BYTES = 8 * 256 * 256 * 4
PAGES_BYTES = 2 * 4096
"""Blocks begin and end at page borders: so much more is read of the two files, at most."""


class Since:
    """What was added to the process's figures since it was made."""

    def __init__(self) -> None:
        self._before = stio.stats()

    def added(self) -> dict[str, float]:
        now, before = dataclasses.asdict(stio.stats()), dataclasses.asdict(self._before)
        return {name: now[name] - before[name] for name in now if now[name] != before[name]}

    def counts(self) -> dict[str, float]:
        return {name: value for name, value in self.added().items() if name.startswith("num_")}


@pytest.mark.parametrize("memory", ["map", "copy", "lazy"])
async def test_a_load(directory, memory):
    since = Since()
    await stio.load(directory, memory=memory)
    added = since.added()
    assert added.pop("load_seconds") > 0
    read_bytes = added.pop("read_bytes", 0)
    assert read_bytes == 0 if memory == "lazy" else DATA_BYTES <= read_bytes <= DATA_BYTES + PAGES_BYTES
    assert added == {"num_loads_done": 1}


def test_each_kind_of_load_counts_as_one(directory):
    since = Since()
    with sync.open(directory) as checkpoint:
        assert since.counts() == {}  # opening reads headers only
        checkpoint.read("layer.1")
        assert since.counts() == {"num_loads_done": 1}
        assert len(list(checkpoint.stream())) == 8
        assert since.counts() == {"num_loads_done": 2}
    module = torch.nn.Module()
    module.layer = torch.nn.ParameterList([torch.zeros(256, 256) for _ in range(8)])
    sync.load_into(module, directory)
    assert since.counts() == {"num_loads_done": 3}
    sync.save_state({"a": torch.ones(3), "b": 1}, destination := MemoryDestination())
    assert destination is not None
    assert since.counts() == {"num_loads_done": 3, "num_saves_done": 1}


def test_a_slice_counts_what_was_read(directory):
    since = Since()
    with sync.open(directory, memory="copy") as checkpoint:
        checkpoint.read("layer.1", slice(0, 64))
    assert 64 * 256 * 4 <= since.added()["read_bytes"] <= 64 * 256 * 4 + 8 * KIB


def test_loads_that_fail(directory, tmp_path):
    since = Since()
    with pytest.raises(stio.CheckpointNotFoundError):
        sync.load(tmp_path / "nothing")
    with pytest.raises(stio.TensorNotFoundError):
        sync.load(directory, names="nobody")
    with pytest.raises(TypeError):
        sync.load(directory, progress=3)  # refused before anything begins: no operation
    assert since.counts() == {"num_loads_failed": 2}


def test_a_load_that_fails_in_the_middle_counts_what_it_read(directory):
    def hook(name, offset, nbytes):
        if offset > 2 * 256 * 1024:
            raise stio.StorageError("broken", errno=errno.EIO)

    since = Since()
    with pytest.raises(stio.StorageError):
        sync.load(HookedRoot(directory, hook), memory="copy", budget_bytes=MIB)
    assert since.counts() == {"num_loads_failed": 1}
    assert since.added().get("read_bytes", 0) < DATA_BYTES
    assert since.added().get("budget_used_bytes", 0) == 0


@pytest.mark.matrix
async def test_a_load_under_way_and_cancelled(directory):
    since, gate, scope = Since(), Gate(), anyio.CancelScope()

    def first_two_tensors(name, offset, nbytes):
        if offset > 2 * 256 * KIB:
            gate(name, offset, nbytes)

    async def load():
        with scope:
            # Tensors that are cast: what the caller keeps as it was read needs no budget.
            await stio.load(
                HookedRoot(directory, first_two_tensors), memory="copy", budget_bytes=MIB, dtype=torch.bfloat16
            )

    async with anyio.create_task_group() as group:
        group.start_soon(load)
        assert await eventually_async(lambda: since.added().get("read_bytes", 0) > 0 and gate.reached.is_set())
        added = since.added()
        assert added["num_loads_running"] == 1
        assert 0 < added["budget_used_bytes"] <= MIB
        assert 0 < added["read_bytes"] < DATA_BYTES
        scope.cancel()
        await spin(20)  # the load has heard of it, and waits for its reads
        gate.opened.set()
    assert since.counts() == {"num_loads_cancelled": 1}
    assert since.added().get("budget_used_bytes", 0) == 0
    assert since.added()["read_bytes"] >= added["read_bytes"]  # the gate may have let all of them through by then


async def test_a_stream_that_is_left_is_cancelled(directory):
    since = Since()
    async with stio.open(directory, memory="copy", budget_bytes=256 * KIB) as checkpoint:
        async with checkpoint.stream() as stream:
            async for _ in stream:
                break
    assert since.counts() == {"num_loads_cancelled": 1}


async def test_a_stream_that_never_began_counts_nowhere(directory):
    since = Since()
    async with stio.open(directory) as checkpoint:
        checkpoint.stream()
    assert since.counts() == {}


def test_a_save(tmp_path):
    since = Since()
    result = sync.save({"a": ramp(512, 1024)}, tmp_path / "out")
    added = since.added()
    assert added.pop("save_seconds") > 0
    assert added.pop("written_bytes") == result.file_bytes
    assert added.pop("staging_held_bytes", 0) <= 0  # at once; and what other tests left may go meanwhile
    assert added == {"num_saves_done": 1}


def test_saves_that_fail_or_are_rolled_back(tmp_path):
    since, gate = Since(), threading.Event()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(stio.StorageError):
        sync.save({"a": ramp(3)}, tmp_path / "file" / "below")
    assert since.counts() == {"num_saves_failed": 1}
    with sync.Saver() as saver:
        pending = saver.save({"a": ramp(512, 1024)}, MemoryDestination(gate=gate))
        assert since.counts() == {"num_saves_failed": 1, "num_saves_running": 1}
        assert since.added()["staging_held_bytes"] >= 2 * MIB
        pending.cancel()
        gate.set()
        with pytest.raises(stio.ClosedError):
            pending.result()
    assert since.counts() == {"num_saves_failed": 1, "num_saves_cancelled": 1}


def test_a_conversion_is_a_save(directory, tmp_path):
    since = Since()
    result = sync.convert(directory, tmp_path / "one.safetensors")
    added = since.added()
    assert since.counts() == {"num_saves_done": 1}
    assert DATA_BYTES <= added["read_bytes"] <= DATA_BYTES + PAGES_BYTES
    assert added["written_bytes"] == result.file_bytes


def test_staging_memory_of_a_device_is_held_while_it_loads(directory):
    gc.collect()  # what other tests left behind
    since, seen = Since(), []
    sync.load(
        directory,
        device=FakeDevice(),
        budget_bytes=4 * MIB,
        progress=lambda _: seen.append(since.added().get("staging_held_bytes", 0)),
    )
    assert max(seen) > 0
    # A reader's thread may hold the last reference for a moment after the load has returned.
    assert eventually(lambda: since.added().get("staging_held_bytes", 0) <= 0)


@pytest.mark.parametrize("end", ["done", "cancelled"])
def test_staging_memory_of_a_saver_is_held_until_it_goes(tmp_path, end):
    gc.collect()  # what other tests left behind
    since = Since()
    saver = sync.Saver()
    saver.save({"a": ramp(512, 1024)}, tmp_path / "a").result()
    assert since.added()["staging_held_bytes"] >= 2 * MIB
    if end == "cancelled":
        saver.save({"a": ramp(512, 1024)}, tmp_path / "b").cancel()
    saver.close()
    gc.disable()  # the reference counts alone free it: the collector may not run for a long time
    try:
        del saver
        assert eventually(lambda: since.added().get("staging_held_bytes", 0) <= 0)
    finally:
        gc.enable()


def test_nothing_is_lost_between_threads(directory):
    since, failures = Since(), []
    sync.load(directory)
    once = since.added()["read_bytes"]

    def work():
        try:
            for _ in range(5):
                sync.load(directory)
                before = stio.stats()
                after = stio.stats()
                assert after.num_loads_done >= before.num_loads_done
                assert after.read_bytes >= before.read_bytes
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert since.counts() == {"num_loads_done": 21}
    assert since.added()["read_bytes"] == 21 * once


def test_a_snapshot_is_a_value():
    snapshot = stio.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        snapshot.num_loads_done = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(snapshot)) == snapshot
    counters = dataclasses.asdict(snapshot)
    assert counters.pop("engine") == native.name()
    assert all(value >= 0 for value in counters.values())


@pytest.mark.parametrize("switch", ["0", "1"])
def test_the_engine_has_a_name(switch, monkeypatch):
    """It is what the library says, `plain` without it; the command line prints it too."""
    code = "import stio.native; print(stio.stats().engine, stio.native.available())"
    monkeypatch.setenv("STIO_NATIVE", switch)
    found = run_python(code)  # a real interpreter without torch: what it imports
    assert found.stdout in (["plain False\n"] if switch == "0" else ["plain False\n", "engine 5 True\n"]), found.stderr


def test_a_fresh_process_has_done_nothing_and_needs_no_torch():
    found = run_python(  # a real interpreter without torch: what it imports
        """
        import dataclasses, sys, stio
        assert {value for name, value in dataclasses.asdict(stio.stats()).items() if name != "engine"} == {0}
        assert "torch" not in sys.modules
        """
    )
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
def test_a_forked_child_begins_at_zero(zygote, directory, tmp_path):
    """One is forked between operations, one in the middle of one, by the thread that carries it on."""
    found = zygote.run(
        """
        import dataclasses, os, sys, warnings
        import stio
        from stio import sync
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads

        def child(check):
            pid = os.fork()
            if not pid:
                try:
                    check()
                    os._exit(0)
                except BaseException as error:
                    print(repr(error), file=sys.stderr, flush=True)
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

        def at_zero():
            counters = dataclasses.asdict(stio.stats())
            del counters["engine"]
            assert set(counters.values()) == {0}, counters

        def counts_its_own():
            at_zero()
            sync.load(sys.argv[1])
            assert stio.stats().num_loads_done == 1
            assert stio.stats().num_loads_running == 0

        sync.load(sys.argv[1])
        with sync.Saver() as saver:
            saver.save({"a": next(iter(sync.load(sys.argv[1]).values()))}, sys.argv[2]).result()
            child(counts_its_own)
            forked = []

            def progress(event):
                if not forked:
                    forked.append(True)
                    child(at_zero)

            sync.load(sys.argv[1], progress=progress)
        assert stio.stats().num_loads_done == 3
        assert stio.stats().num_loads_running == 0
        print("good")
        """,
        directory,
        Path(tmp_path, "out"),
    )
    assert found.stdout == "good\n", found.stderr


@pytest.mark.slow
def test_an_operation_that_ends_in_a_forked_child_is_not_counted(directory):
    found = run_python(  # a real interpreter without torch: a fork of it
        """
        import os, sys, warnings
        import stio
        from stio.runtime.operation import Operation
        warnings.simplefilter("ignore", DeprecationWarning)
        in_child = []
        def body(operation):
            pid = os.fork()
            if pid:
                return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            in_child.append(True)
        def end(run):
            def _run(self):
                run(self)
                if in_child:
                    os._exit(stio.stats().num_loads_done + stio.stats().num_loads_running)
            return _run
        Operation._run = end(Operation._run)
        assert Operation(body, name="load", kind="load").result() == 0
        assert stio.stats().num_loads_done == 1
        """
    )
    assert found.returncode == 0, found.stderr
