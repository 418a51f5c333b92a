"""Operations and notifiers: waits of threads and of every kind of loop, and the state after a cancel."""

from __future__ import annotations

import asyncio
import errno
import gc
import importlib.metadata
import itertools
import signal
import sys
import threading
import weakref
from typing import Any

import anyio
import anyio.lowlevel
import pytest
from support import PATIENCE_SECONDS, backend_name, eventually, eventually_async, nothing_left, run_python, spin

from stio import process as switching
from stio.errors import ClosedError, StorageError
from stio.process import switch_interval
from stio.runtime import notifier as notifier_module
from stio.runtime import operation as runtime
from stio.runtime.calls import run_on_loop
from stio.runtime.notifier import Notifier
from stio.runtime.operation import Cancelled, Operation, close_all, start_thread
from stio.runtime.reports import counters

ANYIO = tuple(map(int, importlib.metadata.version("anyio").split(".")[:2]))

pytestmark = pytest.mark.usefixtures("plain_workers")


class Body:
    """A body that waits until it is let go or cancelled."""

    def __init__(self, value: Any = "value", error: BaseException | None = None, *, stubborn: bool = False) -> None:
        self.value, self.error, self.stubborn = value, error, stubborn
        self.begun, self.go, self.stop_seen, self.ended = (threading.Event() for _ in range(4))

    def __call__(self, operation: Operation[Any]) -> Any:
        self.begun.set()
        operation.on_cancel(self.stop_seen.set)
        if not self.stubborn:
            operation.on_cancel(self.go.set)
        try:
            assert self.go.wait(PATIENCE_SECONDS)
            if not self.stubborn:
                operation.check()
            if self.error is not None:
                raise self.error
            return self.value
        finally:
            self.ended.set()


def started(body: Body) -> Operation[Any]:
    operation = Operation(body, name="test").start()
    assert body.begun.wait(PATIENCE_SECONDS)
    return operation


# Notifiers.


@pytest.mark.anyio
async def test_notifier_wakes_a_task_from_another_thread():
    notifier, event = Notifier(), threading.Event()
    woken = []

    async def wait():
        await notifier.wait_for(event.is_set)
        woken.append(True)

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(wait)
        await eventually_async(lambda: len(notifier._wakers) == 3)

        def notify():
            notifier.notify()  # the condition does not hold yet: no task may continue
            event.set()
            notifier.notify()

        start_thread(notify, name="notify")
    assert woken == [True] * 3
    assert notifier._wakers == []


@pytest.mark.anyio
async def test_notifier_does_not_wait_when_the_condition_holds():
    notifier = Notifier()
    await notifier.wait_for(lambda: True)
    assert notifier._wakers == []


@pytest.mark.anyio
async def test_notify_between_the_check_and_the_registration_of_a_waker():
    notifier, looks = Notifier(), []

    def ready():
        looks.append(True)
        return len(looks) > 1

    await notifier.wait_for(ready)
    assert len(looks) == 2 or len(looks) == 3
    assert notifier._wakers == []


@pytest.mark.anyio
async def test_notifier_removes_the_waker_of_a_cancelled_task():
    notifier = Notifier()
    with anyio.move_on_after(0):
        await notifier.wait_for(lambda: False)
    assert notifier._wakers == []
    notifier.notify()


def test_notifier_wakes_threads():
    notifier, event, woken = Notifier(), threading.Event(), []
    for _ in range(3):
        start_thread(lambda: woken.append(notifier.block_until(event.is_set, PATIENCE_SECONDS)), name="waiter")
    assert eventually(lambda: len(notifier._wakers) == 3)
    event.set()
    notifier.notify()
    assert eventually(lambda: woken == [True] * 3)


def test_notifier_timeout():
    notifier = Notifier()
    assert notifier.block_until(lambda: False, 0.001) is False
    assert notifier.block_until(lambda: False, -1) is False


@pytest.mark.parametrize("timeout", [None, PATIENCE_SECONDS])
def test_a_blocked_thread_looks_now_and_then(monkeypatch, timeout):
    """A signal that came just before it began to wait has not woken it."""
    monkeypatch.setattr("stio.runtime.notifier._CHECK_SECONDS", 0.001)
    looks = itertools.count()
    assert Notifier().block_until(lambda: next(looks) >= 9, timeout)


def test_notifier_with_a_loop_that_has_ended():
    notifier = Notifier()
    for run in (lambda f: asyncio.run(f()), lambda f: __import__("trio").run(f)):

        async def hang_up():
            notifier._wakers.append(notifier_module._loop_event()[1])

        run(hang_up)
    assert len(notifier._wakers) == 2
    notifier.notify()  # no task is left to wake, and that is no error


# Operations, waited for in every way.


@pytest.mark.anyio
async def test_wait_returns_the_value():
    body = Body()
    with nothing_left():
        operation = started(body)
        body.go.set()
        assert await operation.wait() == "value"
        assert operation.done
        assert await operation.wait() == "value"


@pytest.mark.anyio
async def test_many_tasks_wait_for_one_operation():
    body, values = Body(), []
    operation = started(body)

    async def wait():
        values.append(await operation.wait())

    async with anyio.create_task_group() as group:
        for _ in range(5):
            group.start_soon(wait)
        await spin(3)
        body.go.set()
    assert values == ["value"] * 5


@pytest.mark.anyio
async def test_errors_come_out_as_they_were_raised():
    body = Body(error=KeyError("mine"))
    operation = started(body)
    body.go.set()
    with pytest.raises(KeyError) as caught:
        await operation.wait()
    assert caught.value is body.error
    with pytest.raises(KeyError):
        operation.result()


@pytest.mark.anyio
async def test_cancel_before_start_runs_nothing():
    body = Body()
    operation = Operation(body, name="test")
    operation.cancel()
    await operation.aclose()  # does not wait for what never began
    operation.start()
    with pytest.raises(ClosedError, match="test was cancelled"):
        await operation.wait()
    assert not body.begun.is_set()


@pytest.mark.anyio
async def test_cancelled_caller_waits_for_the_body(anyio_backend):
    body = Body(stubborn=True)
    operation = started(body)
    order = []

    async def wait():
        try:
            await operation.wait()
        finally:
            order.append(("wait over", body.ended.is_set(), operation.done))

    async with anyio.create_task_group() as group:
        group.start_soon(wait)
        await spin(3)
        group.cancel_scope.cancel()
        with anyio.CancelScope(shield=True):
            assert await eventually_async(body.stop_seen.is_set)
            await spin(20)
            assert order == []  # the body has not ended: neither has the wait
            body.go.set()
    assert order == [("wait over", True, True)]


@pytest.mark.anyio
async def test_cancel_after_the_end_changes_nothing():
    body = Body()
    body.go.set()
    operation = started(body)
    assert await operation.wait() == "value"
    operation.cancel()
    await operation.aclose()
    assert await operation.wait() == "value"


@pytest.mark.anyio
async def test_an_operation_that_was_closed_elsewhere_raises_closed_error():
    body = Body()
    operation = started(body)
    async with anyio.create_task_group() as group:

        async def wait():
            with pytest.raises(ClosedError):
                await operation.wait()

        group.start_soon(wait)
        await spin(3)
        await operation.aclose()
    with pytest.raises(ClosedError):
        operation.result()


@pytest.mark.parametrize("how", ["cancel", "wait", "result"])
def test_a_value_that_is_not_taken_is_discarded(how):
    discarded = []
    body = Body(stubborn=True)
    operation = Operation(body, name="test", discard=discarded.append).start()
    assert body.begun.wait(PATIENCE_SECONDS)
    if how == "cancel":  # cancelled first, done afterwards
        operation.cancel()
        body.go.set()
        operation.close()
    else:
        body.go.set()
        assert eventually(lambda: operation.done)
        operation.cancel()
    assert discarded == ["value"]
    operation.cancel()
    assert discarded == ["value"]
    with pytest.raises(ClosedError):
        operation.result()


def test_a_value_that_was_taken_is_not_discarded():
    discarded = []
    operation = Operation(lambda _: "value", name="test", discard=discarded.append).start()
    assert operation.result() == "value"
    operation.cancel()
    operation.close()
    assert discarded == []


def test_second_native_cancel_while_draining():
    async def main():
        body = Body(stubborn=True)
        operation = started(body)
        task = asyncio.ensure_future(operation.wait())
        await spin(3)
        for _ in range(3):
            task.cancel()
            await spin(5)
            assert not task.done()
        body.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert operation.done

    with nothing_left():
        asyncio.run(main())


def test_native_cancel_of_a_close_is_not_lost():
    """A task that is cancelled while it closes hears of it once the close is over."""

    async def main():
        body = Body(stubborn=True)
        operation = started(body)
        after = []

        async def close():
            await operation.aclose()
            after.append("went on")

        task = asyncio.ensure_future(close())
        await spin(3)
        task.cancel()
        await spin(5)
        assert not task.done()
        body.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not after

    asyncio.run(main())


def test_timeouts_of_asyncio_wait_for_the_drain():
    async def main():
        for limit in (
            lambda wait: asyncio.wait_for(wait, 0.001),
            lambda wait: _under_timeout(wait),
        ):
            body = Body(stubborn=True)
            operation = started(body)
            start_thread(lambda body=body: body.stop_seen.wait(PATIENCE_SECONDS) and body.go.set(), name="helper")
            with pytest.raises(TimeoutError):
                await limit(operation.wait())
            assert body.ended.is_set()
        assert asyncio.current_task().cancelling() == 0

    async def _under_timeout(wait):
        async with asyncio.timeout(0.001):
            await wait

    asyncio.run(main())


@pytest.mark.anyio
async def test_anyio_scopes_catch_their_own_cancel():
    body = Body()
    operation = started(body)
    with anyio.move_on_after(0.001) as scope:
        await operation.wait()
    assert scope.cancelled_caught
    assert operation.done


@pytest.mark.skipif(ANYIO < (4, 16), reason="anyio before 4.16 drops a native cancel in a cancelled scope")
@pytest.mark.anyio
async def test_native_cancel_inside_a_cancelled_scope_goes_through(anyio_backend):
    if backend_name(anyio_backend) == "trio":
        return
    body = Body(stubborn=True)
    operation = started(body)
    after = []

    async def wait():
        with anyio.CancelScope() as scope:
            scopes.append(scope)
            await operation.wait()
        await anyio.lowlevel.checkpoint()
        after.append("went on")

    scopes: list[anyio.CancelScope] = []
    task = asyncio.ensure_future(wait())
    await spin(3)
    scopes[0].cancel()
    await spin(3)
    task.cancel()
    await spin(3)
    body.go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not after


@pytest.mark.anyio
async def test_a_coroutine_thrown_away_does_not_wait():
    body = Body()
    operation = started(body)
    coroutine = operation.wait()

    async def leave():
        raise TimeoutError

    async def first_step():
        coroutine.send(None)

    if "trio" in sys.modules and sys.modules["trio"].lowlevel.in_trio_run():
        coroutine.close()  # never begun: there is nothing to end
        operation.cancel()
    else:
        await first_step()
        coroutine.close()
    assert await eventually_async(lambda: operation.done)
    with pytest.raises(TimeoutError):
        await leave()


# Operations, waited for by threads.


def test_result_returns_or_raises():
    assert Operation(lambda _: 5, name="test").start().result() == 5
    with pytest.raises(ZeroDivisionError):
        Operation(lambda _: 1 // 0, name="test").start().result()


def test_join_with_a_timeout_leaves_the_operation_alone():
    body = Body()
    operation = started(body)
    for timeout in (0, 0.001):
        assert operation.join(timeout) is False
        assert not operation.cancelled
    body.go.set()
    assert operation.join(PATIENCE_SECONDS)
    assert operation.result() == "value"


def test_a_body_may_raise_timeouts_of_its_own():
    body = Body(error=TimeoutError("of the body"))
    body.go.set()
    with pytest.raises(TimeoutError, match="of the body"):
        started(body).result()


def test_keyboard_interrupt_cancels_and_waits():
    body = Body()
    operation = started(body)
    seen = []

    def interrupt():
        eventually(lambda: bool(operation._notifier._wakers))
        signal.raise_signal(signal.SIGINT) if False else None
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with nothing_left():
        start_thread(interrupt, name="interrupter")
        with pytest.raises(KeyboardInterrupt):
            operation.result()
        seen.append((body.ended.is_set(), operation.done))
    assert seen == [(True, True)]


def test_errors_do_not_keep_buffers():
    class Buffer:
        pass

    buffers = []

    def body(_):
        buffer = Buffer()
        buffers.append(weakref.ref(buffer))
        try:
            deeper(buffer)
        except KeyError as error:
            raise ValueError("outer") from error

    def deeper(buffer):
        mine = Buffer()
        buffers.append(weakref.ref(mine))
        raise KeyError(str(type(buffer)))

    for function in (body, deeper):  # frames of stio's alone are cleared
        function.__code__ = function.__code__.replace(co_filename=runtime.__file__)
    operation = Operation(body, name="test").start()
    with pytest.raises(ValueError, match="outer") as caught:
        operation.result()
    gc.collect()
    assert [buffer() for buffer in buffers] == [None, None]
    assert isinstance(caught.value.__cause__, KeyError)


@pytest.mark.anyio
async def test_an_error_raised_again_does_not_end_the_task_that_waits():
    mine = KeyError("mine")

    def fail(_):
        raise mine

    for _ in range(3):
        with pytest.raises(KeyError) as caught:
            await Operation(fail, name="test").start().wait()
        assert caught.value is mine


def test_the_body_is_free_before_the_waiter_goes_on():
    class Closure:
        pass

    held = Closure()
    alive = weakref.ref(held)
    operation = Operation(lambda _, held=held: None, name="test")
    del held
    assert alive() is not None
    operation.start().result()
    assert alive() is None


def test_stops_are_called_by_each_cancel_and_at_once_when_late():
    calls = []
    body = Body()
    operation = started(body)
    operation.on_cancel(lambda: calls.append("first"))
    operation.cancel()
    operation.cancel()
    operation.on_cancel(lambda: calls.append("late"))
    assert calls == ["first", "first", "late"]
    operation.close()
    with pytest.raises(Cancelled):
        operation.check()


def test_no_thread_to_be_had(monkeypatch):
    """A refused thread is an error of the call, not a wait for ever."""

    def refuse(*_):
        raise RuntimeError("can't start new thread")

    operation = Operation(lambda _: None, name="test")
    monkeypatch.setattr(runtime._thread, "start_new_thread", refuse)
    with pytest.raises(StorageError, match="starts no thread") as caught:
        operation.start()
    assert caught.value.errno == errno.EAGAIN
    operation.close()
    asyncio.run(operation.aclose())
    assert operation not in runtime.counters.running


def test_221_a_start_that_a_signal_handler_interrupts_and_does_too():
    """The body runs once, the start is counted once."""
    calls = []
    operation = Operation(lambda _: calls.append(True), name="test", kind="load")
    before = counters.stats().num_loads_done
    operation.start()
    operation.start()
    operation.result()
    assert eventually(lambda: counters.stats().num_loads_running == 0)
    assert calls == [True]
    assert counters.stats().num_loads_done == before + 1


def test_206_close_all_on_a_closed_coroutine_releases_when_all_have_ended():
    """What the operations use is freed by a thread, and not before."""
    bodies, released = [Body(), Body()], threading.Event()
    operations = [started(body) for body in bodies]
    coroutine = close_all(operations, released.set, may_wait=False)
    with pytest.raises(StopIteration):
        coroutine.send(None)
    assert all(operation.cancelled for operation in operations)
    assert released.wait(PATIENCE_SECONDS)
    assert all(operation.done for operation in operations)


# The engine's loop.


def test_engine_call_runs_coroutines_for_threads():
    async def answer():
        await asyncio.sleep(0)
        return threading.get_ident()

    async def fail():
        raise KeyError("there")

    first, second = run_on_loop(answer), run_on_loop(answer)
    assert first == second != threading.get_ident()
    with pytest.raises(KeyError):
        run_on_loop(fail)


# The switch interval.


@pytest.fixture
def interval():
    before = sys.getswitchinterval()
    yield before
    assert sys.getswitchinterval() == before
    assert switching._intervals == []


def test_switch_interval_is_left_alone_by_default(interval):
    with switch_interval(None):
        assert sys.getswitchinterval() == interval


def test_switch_interval_nests(interval):
    with switch_interval(0.002):
        assert sys.getswitchinterval() == pytest.approx(0.002)
        with switch_interval(0.0005):
            assert sys.getswitchinterval() == pytest.approx(0.0005)
            with switch_interval(0.001):
                assert sys.getswitchinterval() == pytest.approx(0.0005)
        assert sys.getswitchinterval() == pytest.approx(0.002)


def test_switch_interval_never_lengthens(interval):
    with switch_interval(interval * 10):
        assert sys.getswitchinterval() == interval


def test_switch_interval_of_overlapping_users(interval):
    """The one that came first leaves first: the other's wish holds until it leaves too."""
    first, second = switch_interval(0.0005), switch_interval(0.001)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(0.001)
    second.__exit__(None, None, None)


def test_switch_interval_is_restored_after_errors(interval):
    with pytest.raises(KeyError), switch_interval(0.001):
        raise KeyError


@pytest.mark.parametrize("seconds", [0, -1.0])
def test_switch_interval_must_be_positive(interval, seconds):
    with pytest.raises(ValueError, match="positive"), switch_interval(seconds):
        pass


def test_switch_interval_of_many_threads(interval):
    failures, barrier = [], threading.Barrier(4)

    def use(seconds):
        barrier.wait(PATIENCE_SECONDS)
        for _ in range(50):
            with switch_interval(seconds):
                if sys.getswitchinterval() > seconds + 1e-6:
                    failures.append(seconds)

    threads = [threading.Thread(target=use, args=(seconds,)) for seconds in (0.0005, 0.001, 0.002, 0.003)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Exit and fork.


def test_exit_waits_until_callbacks_are_freed():
    """They may hold tensors, which must not be freed beside an interpreter that ends."""
    was_running = []

    class Stop:
        def __call__(self):
            pass

        def __del__(self):
            was_running.append(operation in counters.running)

    def body(operation):
        operation.on_cancel(Stop())

    operation = Operation(body, name="x")
    operation.result()
    assert was_running == [True]


def test_c121_exit_ends_operations():
    found = run_python(  # a real interpreter without torch: its exit
        """
        import threading
        from stio.runtime.operation import Operation
        begun = threading.Event()
        def body(operation):
            stopped = threading.Event()
            operation.on_cancel(stopped.set)
            begun.set()
            stopped.wait()
            print("ended", flush=True)
        Operation(body, name="load").start()
        begun.wait()
        """
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "ended\n", "")


def test_exit_does_not_wait_for_ever():
    found = run_python(  # a real interpreter without torch: its exit
        """
        import threading
        from stio.runtime import operation as runtime
        runtime.EXIT_PATIENCE_SECONDS = 0.05
        begun = threading.Event()
        def body(operation):
            begun.set()
            threading.Event().wait()
        runtime.Operation(body, name="stubborn").start()
        begun.wait()
        """
    )
    assert found.returncode == 0
    assert "stubborn did not end within" in found.stderr


@pytest.mark.slow
def test_c100_a_child_does_not_wait_for_its_parents_threads():
    found = run_python(  # a real interpreter without torch: a fork of it
        """
        import os, threading, warnings
        from stio.runtime import operation as runtime
        from stio.runtime.operation import Operation
        from stio.errors import ClosedError
        warnings.simplefilter("ignore")
        begun, go = threading.Event(), threading.Event()
        lock = threading.Lock()
        def body(operation):
            operation.on_cancel(lock.acquire)  # held for ever in the child
            begun.set()
            with lock:
                go.wait()
            return 7
        operation = Operation(body, name="parent").start()
        begun.wait()
        pid = os.fork()
        if not pid:
            operation.cancel()
            try:
                operation.result()
            except ClosedError:
                value = Operation(lambda _: 42, name="child").start().result()
                os._exit(value)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 42
        go.set()
        assert operation.result() == 7
        """
    )
    assert (found.returncode, found.stderr) == (0, "")


def test_a_value_that_cannot_be_discarded_wakes_all_that_wait(caplog):
    entered, go = threading.Event(), threading.Event()

    def body(operation):
        entered.set()
        assert go.wait(PATIENCE_SECONDS)
        return "value"

    def discard(value):
        raise OSError("no")

    operation = Operation(body, name="test", discard=discard).start()
    assert entered.wait(PATIENCE_SECONDS)
    operation.cancel()
    go.set()
    assert operation.join(PATIENCE_SECONDS)
    late = Operation(lambda _: "value", name="late", discard=discard).start()
    assert late.join(PATIENCE_SECONDS)
    late.cancel()
    assert caplog.text.count("its result could not be released: no") == 2
