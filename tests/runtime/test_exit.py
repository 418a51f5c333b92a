"""The ends of an operation that matter to a save: the point of no return, and the interpreter's exit."""

from __future__ import annotations

import gc
import threading

import anyio
import pytest
from support import PATIENCE_SECONDS, eventually_async, nothing_left, run_python

from stio.errors import ClosedError
from stio.runtime.operation import Cancelled, Operation

pytestmark = pytest.mark.usefixtures("plain_workers")


class Publishing:
    """A body that settles, waits for an event, and returns."""

    def __init__(self, *, error=None):
        self.error = error
        self.settled, self.go, self.told = (threading.Event() for _ in range(3))

    def __call__(self, operation):
        operation.on_cancel(self.told.set)
        operation.refuse_cancel()
        self.settled.set()
        assert self.go.wait(PATIENCE_SECONDS)
        operation.check()
        if self.error is not None:
            raise self.error
        return "published"


def begun(body):
    operation = Operation(body, name="save").start()
    assert body.settled.wait(PATIENCE_SECONDS)
    return operation


@pytest.fixture(autouse=True)
def _clean():
    gc.collect()
    with nothing_left():
        yield


def test_c110_a_cancel_before_the_commit_rolls_back():
    hold, reached = threading.Event(), []

    def body(operation):
        operation.on_cancel(hold.set)
        assert hold.wait(PATIENCE_SECONDS)
        operation.refuse_cancel()
        reached.append(1)

    operation = Operation(body, name="save").start()
    operation.close()
    assert reached == []
    with pytest.raises(ClosedError, match="save"):
        operation.result()


def test_c110_a_cancel_after_that_is_not_heard():
    body = Publishing()
    operation = begun(body)
    operation.cancel()
    assert not operation.cancelled
    assert not body.told.is_set()
    body.go.set()
    assert operation.result() == "published"
    operation.cancel()
    assert operation.result() == "published"


def test_close_waits_for_what_can_no_longer_be_undone():
    body = Publishing()
    operation = begun(body)
    closer = threading.Thread(target=operation.close)
    closer.start()
    closer.join(0.01)
    assert closer.is_alive()
    body.go.set()
    closer.join(PATIENCE_SECONDS)
    assert operation.done
    assert operation.result() == "published"


def test_errors_after_the_point_of_no_return_come_out():
    mine = OSError(5, "mine")
    body = Publishing(error=mine)
    operation = begun(body)
    operation.cancel()
    body.go.set()
    with pytest.raises(OSError, match="mine") as caught:
        operation.result()
    assert caught.value is mine


def test_settle_is_decided_once():
    """Either a cancel or the body wins, whichever comes first; never both."""
    for _ in range(50):
        line = threading.Barrier(2)

        def body(operation, line=line):
            line.wait(PATIENCE_SECONDS)
            operation.refuse_cancel()
            return "published"

        operation = Operation(body, name="save").start()
        line.wait(PATIENCE_SECONDS)
        operation.cancel()
        operation.join(PATIENCE_SECONDS)
        if operation.cancelled:
            with pytest.raises(ClosedError):
                operation.outcome()
        else:
            assert operation.outcome() == "published"


def test_settle_twice_is_no_harm():
    def body(operation):
        operation.refuse_cancel()
        operation.cancel()
        operation.refuse_cancel()
        return 5

    assert Operation(body, name="save").start().result() == 5


def test_settle_says_cancelled_to_the_body():
    caught = []

    def body(operation):
        operation.cancel()
        try:
            operation.refuse_cancel()
        except Cancelled as error:
            caught.append(error)
            raise

    with pytest.raises(ClosedError):
        Operation(body, name="save").start().result()
    assert len(caught) == 1


@pytest.mark.anyio
async def test_a_caller_that_is_cancelled_during_a_commit_waits_for_the_end():
    body = Publishing()
    operation = begun(body)
    waiting = anyio.Event()
    ended = []

    async def caller():
        waiting.set()
        try:
            await operation.wait()
        finally:
            ended.append(operation.done)

    async with anyio.create_task_group() as group:
        group.start_soon(caller)
        await waiting.wait()
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            assert await eventually_async(lambda: not ended)
            body.go.set()
    assert ended == [True]
    assert operation.outcome() == "published"


# The interpreter's exit.


def test_c121_exit_lets_a_save_go_on_and_ends_a_load():
    """The save ends only once the load was cancelled, so it was the load's turn first."""
    done = run_python(  # a real interpreter without torch: its exit
        """
        import threading
        from stio.runtime.operation import Cancelled, Operation

        begun, ended = [threading.Event(), threading.Event()], threading.Event()

        def save(operation):
            begun[0].set()
            assert ended.wait(30)
            operation.refuse_cancel()
            print("saved", operation.cancelled, flush=True)

        def load(operation):
            stop = threading.Event()
            operation.on_cancel(stop.set)
            begun[1].set()
            assert stop.wait(30)
            print("load ended", flush=True)
            ended.set()
            raise Cancelled

        Operation(save, name="save", exit_patience=30).start()
        Operation(load, name="load").start()
        for event in begun:
            assert event.wait(30)
        """
    )
    assert (done.returncode, done.stdout.split("\n")[:2], done.stderr) == (0, ["load ended", "saved False"], "")


def test_c121_exit_rolls_back_a_save_that_does_not_end_in_time():
    done = run_python(  # a real interpreter without torch: its exit
        """
        import threading
        from stio.runtime.operation import Operation

        begun = threading.Event()

        def save(operation):
            stop = threading.Event()
            operation.on_cancel(stop.set)
            begun.set()
            assert stop.wait(30)
            try:
                operation.refuse_cancel()
            finally:
                print("rolled back", flush=True)

        Operation(save, name="save", exit_patience=0.05).start()
        assert begun.wait(30)
        """
    )
    assert (done.returncode, done.stdout) == (0, "rolled back\n")
    assert done.stderr.startswith("save was rolled back at the program's end")


@pytest.mark.slow
def test_c121_patience_is_counted_together():
    """Two that do not end cost the patience of one."""
    done = run_python(  # a real interpreter without torch: its exit
        """
        import threading, time
        from stio.runtime.operation import Operation

        begun, clock = [], []

        def save(operation):
            stop = threading.Event()
            operation.on_cancel(stop.set)
            begun.append(1)
            assert stop.wait(60)
            clock.append(time.monotonic())
            if len(clock) == 2:
                print(clock[1] - clock[0] < 0.9, flush=True)

        for _ in range(2):
            Operation(save, name="save", exit_patience=1.0).start()
        while len(begun) < 2:
            time.sleep(0)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_exit_waits_for_calls_that_cancelled_operations_leave_behind():
    """The calls of an operation that still runs are no such calls: the operation would make the next one."""
    done = run_python(  # a real interpreter without torch: its exit
        """
        import time
        from stio.runtime import calls
        from stio.runtime.operation import Operation

        calls.LOOK_SECONDS, calls._EXIT_SECONDS = 0.01, 2.0

        def body(operation):
            def call():
                while not operation.cancelled:
                    time.sleep(0.01)
                time.sleep(0.2)
                print("the call ended", flush=True)

            calls.Call(call).result()

        Operation(body, name="load").start()
        while not calls._under_way:
            time.sleep(0.01)
        """
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "the call ended\n", "")
