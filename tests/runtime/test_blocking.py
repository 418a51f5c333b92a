"""One body, two ways to wait: coroutines that run in a thread without a loop, and what interrupts them there."""

from __future__ import annotations

import asyncio
import contextvars
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from support import Gate, HookedRoot, eventually, save_file

import stio
import stio.sync
from stio.runtime import notifier as blocking
from stio.runtime.notifier import Notifier, current_task, in_event_loop, run_blocking, runs_blocking
from stio.runtime.operation import Operation, close_all


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return save_file({"a": torch.ones(3), "b": torch.zeros(4)}, tmp_path / "x.safetensors")


def test_an_interrupt_before_the_first_step_leaves_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> object:
        raise KeyboardInterrupt

    async def body() -> None:
        raise AssertionError("it was started")

    with monkeypatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("error")
        patched.setattr(blocking, "current_task", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_blocking(body())


def test_a_wait_blocks_under_run_blocking_and_nowhere_else():
    seen = []

    async def body():
        seen.append(runs_blocking())
        await Notifier().wait_for(lambda: True)
        return 5

    assert run_blocking(body()) == 5
    assert asyncio.run(body()) == 5
    assert seen == [True, False]
    assert not runs_blocking()


def test_a_loop_that_user_code_starts_meanwhile_is_not_blocked():
    async def inner():
        return runs_blocking(), current_task() is not None, in_event_loop()

    async def body():
        return asyncio.run(inner()), runs_blocking()

    assert run_blocking(body()) == ((False, True, True), True)


def test_a_task_of_a_running_loop_that_inherits_the_context_is_not_blocked():
    async def main():
        async def body():
            return contextvars.copy_context()

        context = run_blocking(body())
        return await asyncio.get_running_loop().create_task(later(), context=context)

    async def later():
        return runs_blocking()

    assert asyncio.run(main()) is False


def test_a_coroutine_that_waits_for_something_else_is_a_bug():
    class Suspends:
        def __await__(self):
            try:
                yield
            finally:
                ended.append(True)

    async def body():
        await Suspends()

    ended = []
    with pytest.raises(RuntimeError, match="bug in stio"):
        run_blocking(body())
    assert ended == [True]  # the coroutine was closed
    assert not runs_blocking()


def test_the_variable_is_restored_after_errors():
    async def body():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_blocking(body())
    assert not runs_blocking()


@pytest.mark.parametrize("error", [StopIteration, StopAsyncIteration])
def test_an_end_of_iteration_out_of_a_callback_ends_no_stream_quietly(file, error):
    def progress(event):
        raise error("x")

    with stio.sync.open(file, progress=progress) as checkpoint, pytest.raises(RuntimeError, match=error.__name__):
        list(checkpoint.stream())
    with pytest.raises(RuntimeError, match=error.__name__):
        stio.sync.load(file, progress=progress)


def test_a_blocking_call_in_a_callback_of_a_loop_warns(file, monkeypatch):
    monkeypatch.setattr(stio.sync, "_warned", False)
    caught = []

    async def main():
        done = asyncio.Event()

        def call():
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                stio.sync.load(file)
            caught.extend(found)
            done.set()

        asyncio.get_running_loop().call_soon(call)
        await done.wait()

    asyncio.run(main())
    assert [warning.category for warning in caught] == [RuntimeWarning]


def test_trio_that_is_being_imported_is_none(monkeypatch):
    monkeypatch.setitem(blocking.sys.modules, "trio", object())
    assert current_task() is None
    assert not in_event_loop()


def is_inside(name, frame):
    return frame is not None and (frame.f_code.co_name == name or is_inside(name, frame.f_back))


class Alarm(Exception):
    """Raised by a signal handler."""


@pytest.mark.parametrize("error", [Alarm, SystemExit, KeyboardInterrupt])
def test_p4_close_waits_for_readers_whatever_interrupts_it(tmp_path, error):
    """A signal handler's exception ends the wait of `close`; the files stay open until no thread reads from them."""
    root = HookedRoot(save_file({"a": torch.ones(1 << 16)}, tmp_path / "y.safetensors").parent)
    gate = Gate(after=0)

    def handler(number, frame):
        raise error

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with stio.sync.open(root, memory="copy") as checkpoint:
            root.hook = gate
            stream = checkpoint.stream()
            stream.__enter__()
            assert eventually(lambda: gate.reached.is_set())

            def interrupt():
                main = threading.main_thread().ident
                assert eventually(lambda: is_inside("close", sys._current_frames()[main]))
                signal.pthread_kill(main, signal.SIGALRM)
                time.sleep(0.1)
                gate.opened.set()

            threading.Thread(target=interrupt).start()
            with pytest.raises(error):
                checkpoint.close()
            assert gate.opened.is_set(), "close returned while a thread was reading"
    finally:
        gate.opened.set()
        signal.signal(signal.SIGALRM, before)


def test_close_all_waits_for_every_operation_of_several():
    go = threading.Event()
    begun, ended = [], []

    def body(operation):
        begun.append(1)
        go.wait(10)
        ended.append(1)

    operations = [Operation(body, name="test").start() for _ in range(3)]
    assert eventually(lambda: len(begun) == 3)  # a cancel before that would run nothing
    threading.Timer(0.05, go.set).start()
    run_blocking(close_all(operations))
    assert len(ended) == 3
    assert all(operation.done for operation in operations)
