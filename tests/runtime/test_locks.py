"""Tests of stio.process: conditions, and the check that user code is called under no lock."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import MemoryDestination
from support import eventually

import stio
from stio import process as locks
from stio import sync
from stio.process import Condition, new_lock, require_unlocked
from stio.runtime.notifier import Notifier


def test_a_thread_counts_its_locks() -> None:
    lock = new_lock()
    require_unlocked()
    with lock, lock:
        with pytest.raises(RuntimeError, match="2 lock"):
            require_unlocked()
    require_unlocked()


def test_a_wait_releases_the_lock_and_the_count() -> None:
    changed, seen = Condition(), []

    def wait() -> None:
        with changed:
            changed.wait(5)
            with pytest.raises(RuntimeError):
                require_unlocked()
        require_unlocked()
        seen.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    while thread.is_alive():
        with changed:
            changed.notify_all()
        time.sleep(0.001)
    assert seen == [True]


def _sleepers(changed: Condition, count: int, ready: Callable[[], bool]) -> list[threading.Thread]:
    def sleep() -> None:
        with changed:
            changed.wait_for(ready)

    threads = [threading.Thread(target=sleep) for _ in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_wake_needs_no_lock() -> None:
    """A thread that holds the lock for ever, as an interrupted one does, does not keep others asleep from a wake."""
    changed, state = Condition(), list[bool]()
    threads = _sleepers(changed, 3, lambda: bool(state))
    assert eventually(lambda: len(changed._waiting) == 3)
    state.append(True)
    changed.wake()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()


def test_no_wake_is_missed() -> None:
    """State changes, and `wake` is called, at any moment of the other thread's look at it."""
    changed, rounds = Condition(), 3000
    counts = [0, 0]

    def other() -> None:
        for k in range(1, rounds + 1):
            counts[0] = k
            changed.wake()
            while counts[1] != k:
                pass

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread = threading.Thread(target=other)
        thread.start()
        for k in range(1, rounds + 1):
            with changed:
                changed.wait_for(lambda k=k: counts[0] == k)  # type: ignore[misc]
            counts[1] = k
        thread.join()
    finally:
        sys.setswitchinterval(before)


def test_a_wake_during_the_look_at_the_state_is_not_missed() -> None:
    """A finaliser changes the state after this thread has looked, and before it sleeps."""
    changed, state = Condition(), list[bool]()

    def ready() -> bool:
        found = bool(state)
        if not found:
            state.append(True)
            changed.wake()
        return found

    with changed:
        changed.wait_for(ready)
    assert state


def test_notify_wakes_all() -> None:
    changed, tokens = Condition(), list[int]()

    def take() -> None:
        with changed:
            while not tokens:
                changed.wait(20)
            tokens.pop()

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(changed._waiting) == 3)
    with changed:
        tokens += [1, 2]
        changed.notify_all()
    assert eventually(lambda: sum(thread.is_alive() for thread in threads) == 1)
    with changed:
        tokens.append(3)
        changed.notify_all()
    for thread in threads:
        thread.join(5)


def test_a_wait_ends_at_its_timeout() -> None:
    changed = Condition()
    begin = time.monotonic()
    with changed:
        assert not changed.wait(0.05)
    assert time.monotonic() - begin < 5
    assert len(changed._waiting) == 0


def test_a_notifier_wakes_while_its_own_thread_is_interrupted_in_it() -> None:
    """Each line of `notify` is interrupted by a handler that notifies and waits in a thread."""
    notifier, state = Notifier(), list[bool]()
    threads = [threading.Thread(target=lambda: notifier.block_until(lambda: bool(state), 20)) for _ in range(2)]
    for thread in threads:
        thread.start()
    assert eventually(lambda: len(notifier._wakers) == 2)

    def trace(frame: Any, event: str, argument: object) -> Any:
        if frame.f_globals.get("__name__") != "stio.runtime.notifier":
            return None
        if event == "line" and not state:
            state.append(True)
            notifier.notify()
            for thread in threads:
                thread.join(10)
        return trace

    sys.settrace(trace)
    try:
        notifier.notify()
    finally:
        sys.settrace(None)
    assert not any(thread.is_alive() for thread in threads)


def test_221_progress_may_call_stio() -> None:
    """Each event of a load starts another load, which has events of its own."""
    source, events = MemoryDestination(), list[int]()
    del source
    seen = []

    def progress(event: stio.ProgressEvent) -> None:
        seen.append(stio.stats().num_loads_running)
        events.append(event.done_bytes)

    pending = sync.save({"a": torch.zeros(100)}, MemoryDestination(), progress=progress)
    assert pending.total_bytes == 400
    assert events == [0, 400]
    assert seen == [0, 0]


PACKAGE = str(Path(stio.__file__).parent)


def on_each_line(body: Callable[[], object], action: Callable[[], object], lines: set[tuple[str, int]]) -> None:
    """Run `body`; call `action` before each line of stio's code on this thread that is not in `lines` yet."""
    is_acting = False

    def trace(frame: Any, event: str, argument: object) -> Any:
        nonlocal is_acting
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and not is_acting and line not in lines:
            lines.add(line)
            is_acting = True
            try:
                action()
            finally:
                is_acting = False
        return trace

    sys.settrace(trace)
    try:
        body()
    finally:
        sys.settrace(None)


@pytest.fixture
def checkpoint_file(tmp_path: Path) -> Path:
    sync.save({f"t{k}": torch.full((1000,), float(k)) for k in range(6)}, tmp_path / "x.safetensors")
    return tmp_path / "x.safetensors"


def _read_stream(checkpoint: sync.Checkpoint) -> dict[str, torch.Tensor]:
    stream = checkpoint.stream()
    return dict(stream)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_221_a_handler_at_any_line_of_a_stream_loads_and_closes(checkpoint_file: Path) -> None:
    """It loads by itself, from the same checkpoint, and closes another stream of it."""
    with sync.open(checkpoint_file, budget_bytes=4096, memory="copy") as checkpoint:

        def handler() -> None:
            assert len(sync.load(checkpoint_file, names=["t1"])) == 1
            assert checkpoint.read("t2")[0] == 2
            other = checkpoint.stream()
            next(other)
            other.close()
            stio.stats()

        lines: set[tuple[str, int]] = set()
        on_each_line(lambda: _read_stream(checkpoint), handler, lines)
        assert len(lines) > 40


@pytest.mark.timeout(60)
def test_221_a_handler_at_any_line_takes_from_the_same_stream(checkpoint_file: Path) -> None:
    """Each tensor comes once, to the handler or to the code that it interrupts."""
    lines: set[tuple[str, int]] = set()
    for _ in range(4):
        with sync.open(checkpoint_file, budget_bytes=4096, memory="copy") as checkpoint:
            stream, found = checkpoint.stream(), list[str]()

            def handler(stream: Any = stream, found: list[str] = found) -> None:
                found.extend(name for name, _ in [next(stream, ("", None))] if name)

            def body(stream: Any = stream, found: list[str] = found) -> None:
                for name, _ in stream:
                    found.append(name)

            on_each_line(body, handler, lines)
            assert sorted(found) == [f"t{k}" for k in range(6)]
    assert len(lines) > 40


@pytest.mark.timeout(60)
def test_221_a_handler_at_any_line_of_closing_closes_too(checkpoint_file: Path) -> None:
    lines: set[tuple[str, int]] = set()
    for _ in range(6):
        checkpoint = sync.open(checkpoint_file, budget_bytes=4096, memory="copy")
        checkpoint.__enter__()
        stream = checkpoint.stream()
        next(stream)
        on_each_line(checkpoint.close, checkpoint.close, lines)
        with pytest.raises(stio.ClosedError):
            next(stream)
            next(stream)


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_221_a_handler_at_any_line_of_a_cache(checkpoint_file: Path) -> None:
    with sync.HostCache(1 << 20, device="cpu") as cache:

        def body() -> None:
            sync.load(checkpoint_file, cache=cache)
            cache.prefetch(checkpoint_file)
            cache.stats()
            cache.evict()

        def handler() -> None:
            sync.load(checkpoint_file, cache=cache)
            cache.evict()

        lines: set[tuple[str, int]] = set()
        on_each_line(body, handler, lines)
        assert len(lines) > 40


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_221_a_finaliser_that_waits_runs_at_any_collection(checkpoint_file: Path) -> None:
    """A collection, wherever one starts, frees an object whose finaliser loads; workers collect too."""
    done = []

    class Loads:
        def __init__(self) -> None:
            self.myself = self

        def __del__(self) -> None:
            done.append(len(sync.load(checkpoint_file, names=["t1"])))

    before = gc.get_threshold()
    gc.set_threshold(5)
    try:
        for _ in range(20):
            Loads()
            sync.load(checkpoint_file)
            with sync.Saver() as saver:
                Loads()
                saver.save({"a": torch.zeros(10)}, MemoryDestination()).result()
    finally:
        gc.set_threshold(*before)
    gc.collect()
    assert done == [1] * 40


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="there are no POSIX signals")
@pytest.mark.timeout(60)
def test_221_real_signals_while_saves_run(tmp_path: Path) -> None:
    """A timer interrupts a loop of saves and loads again and again; each handler saves on the same saver."""
    tensors, num_handled, depth = {"a": torch.zeros(100)}, 0, 0

    def handler(number: int, frame: object) -> None:
        nonlocal num_handled, depth
        if depth == 3:
            return
        depth += 1
        try:
            saver.save(tensors, MemoryDestination()).result()
            num_handled += 1
        except stio.ClosedError:
            pass
        finally:
            depth -= 1

    before = signal.signal(signal.SIGALRM, handler)
    try:
        with sync.Saver() as saver:
            signal.setitimer(signal.ITIMER_REAL, 0.003, 0.0037)
            deadline = time.monotonic() + 2
            while time.monotonic() < deadline:
                saver.save(tensors, MemoryDestination()).result()
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert num_handled > 10
    assert locks._held.count == 0


@pytest.mark.timeout(30)
def test_221_a_wait_under_a_lock_is_an_error_and_no_deadlock(checkpoint_file: Path) -> None:
    """As of a finaliser that runs on a thread of stio between two steps."""
    with new_lock(), pytest.raises(RuntimeError, match="finaliser"):
        sync.load(checkpoint_file)
    assert len(sync.load(checkpoint_file)) == 6


@pytest.mark.timeout(30)
@pytest.mark.parametrize("max_pending", [1, 2])
@pytest.mark.parametrize("where", ["progress", "producer"])
def test_221_a_save_that_waits_for_itself_is_an_error(where: str, max_pending: int) -> None:
    """A callback of a save saves on the same saver, and waits until that is durable."""
    found = []

    def save_again(*_: object) -> torch.Tensor:
        if not found:
            found.append(None)
            with pytest.raises(stio.SaveInProgressError) as caught:
                saver.save({"b": torch.zeros(2)}, MemoryDestination()).result()
            found.append(caught.value)
        return torch.zeros(3)

    with sync.Saver(max_pending=max_pending) as saver:
        if where == "progress":
            saver.save({"a": torch.zeros(3)}, MemoryDestination(), progress=save_again).result()
        else:
            saver.save({"a": stio.LazyTensor(torch.float32, (3,), save_again)}, MemoryDestination()).result()
    assert len(found) == 2


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_221_a_handler_at_any_line_of_a_save_closes_the_saver() -> None:
    """And waits for what is under way: a save that it has interrupted is refused, or durable."""
    found: set[tuple[str, int]] = set()

    def body(saver: sync.Saver) -> None:
        try:
            assert saver.save({"a": torch.zeros(3)}, MemoryDestination()).result() is not None
        except stio.ClosedError:
            pass
        saver.close()

    def handler(saver: sync.Saver) -> None:
        for pending in saver.pending:
            assert pending.result() is not None
        saver.close()

    on_each_line(lambda: body(sync.Saver()), lambda: None, found)
    lines = [line for line in sorted(found) if line[0].endswith(("saving/api.py", "saving/pending.py", "operation.py"))]
    assert len(lines) > 60
    for line in lines:
        saver = sync.Saver()
        on_each_line(partial(body, saver), partial(handler, saver), found - {line})


def test_207_a_late_thread_unmaps_its_own_pages_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large pages whose thread has not begun are unmapped by another allocation, at whose address others are mapped."""
    from stio.runtime import memory

    late: list[Any] = []
    monkeypatch.setattr(memory._thread, "start_new_thread", lambda run, arguments: late.append((run, arguments)))
    monkeypatch.setattr(memory, "_UNMAP_HERE_BYTES", 1 << 20)
    region = memory.allocate(4 << 20)
    address = region.address
    del region
    assert len(late) == 1
    memory._drop_unmapped()
    again = [memory.allocate(4 << 20) for _ in range(8)]
    for run, arguments in late:
        run(*arguments)
    for region in again:
        region.write(0, b"still there")
        assert region.tobytes()[:11] == b"still there"
    assert address
