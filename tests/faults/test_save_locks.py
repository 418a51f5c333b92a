"""Faults 221, 222 and 228: calls that come while a save holds a lock, locks that others hold, places in the queue.

The scripts of 221 and 222 run in processes of their own, all at the same time: what hangs is killed, and hanging costs
the module one patience.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import anyio
import pytest
import torch
from crash.zygote import Zygote
from fakes import MemoryDestination
from faults.save_helpers import Outcome, generation, public_directory, run_together
from support import eventually, eventually_async

import stio
from stio import sync

IDLE_SECONDS = 2.5
"""After which time without any activity a script hangs."""
MOST_SECONDS = 2.5
"""How long a wait may take: a second is promised for a cancel, half a second is asked for as the patience; the rest is
for a busy machine."""


# 221: user code, signal handlers and finalisers that call stio from inside a save.

LINES = """
import ast
package = os.path.dirname(stio.__file__)

def at_lines(body, action, wanted):
    # Run `body`, and call `action` before each line of stio's code that is wanted, when this thread first comes to it.
    # A signal handler or a finaliser may run at most of them. Return the lines.
    lines = {}  # in their order

    def trace(frame, event, argument):
        if not frame.f_code.co_filename.startswith(package):
            return None
        line = frame.f_code.co_filename, frame.f_lineno
        if event == "line" and line not in lines:
            lines[line] = None
            if wanted(line):
                action()
        return trace

    sys.settrace(trace)
    try:
        body()
    finally:
        sys.settrace(None)
    return list(lines)

def critical_first(lines):
    # All lines in the body of a `with`, where a lock may be held, then as many others as there is time for.
    inside = {}
    for path in {path for path, _ in lines}:
        blocks = [node for node in ast.walk(ast.parse(Path(path).read_text())) if isinstance(node, ast.With)]
        inside[path] = {number for block in blocks for number in range(block.body[0].lineno, block.end_lineno + 1)}
    critical = [(path, number) for path, number in lines if number in inside[path]]
    yield from critical
    last = time.monotonic() + 0.3
    for line in lines:
        if line not in critical and time.monotonic() < last:
            yield line
"""

MODEL = """
class Model(torch.nn.Linear):
    def state_dict(self, *arguments, **keywords):
        during()
        return super().state_dict(*arguments, **keywords)

model = Model(2, 2)
"""

USER_CODE = {
    "state_dict reads pending": MODEL
    + """
during = lambda: len(saver.pending)
with sync.Saver() as saver:
    saver.save(model, where / "x").result()
""",
    "state_dict reads pending, asyncio": MODEL
    + """
during = lambda: len(saver.pending)
async def main():
    global saver
    async with stio.Saver() as saver:
        await (await saver.save(model, where / "x"))
asyncio.run(main())
""",
    "state_dict saves once more": MODEL
    + """
during = lambda: saver.save(generation(1), where / "y").result()
with sync.Saver() as saver:
    saver.save(model, where / "x").result()
require_generation(where / "y", 1)
""",
    "a mapping of tensors reads pending": """
class Gathered(Mapping):
    def __getitem__(self, name):
        len(saver.pending)
        return generation(1)[name]
    def __iter__(self):
        len(saver.pending)
        return iter(generation(1))
    def __len__(self):
        return 2
with sync.Saver() as saver:
    saver.save(Gathered(), where / "x").result()
require_generation(where / "x", 1)
""",
    "a destination's path reads pending": """
class Place:
    def __fspath__(self):
        len(saver.pending)
        return str(where / "x")
with sync.Saver() as saver:
    saver.save(generation(1), Place()).result()
""",
    "a log handler reads pending when a failure is logged": """
class Handler(logging.Handler):
    def emit(self, record):
        told.append(len(saver.pending))
told = []
logging.getLogger("stio").addHandler(Handler())
with sync.Saver() as saver:
    assert eventually(saver.save(generation(1), MemoryDestination(fail_at=1)).done)
    try:
        saver.save(generation(1), where / "x")
    except stio.StorageError:
        pass
    else:
        raise AssertionError("the failure was not raised")
assert told
""",
    "a log handler reads pending when a save begins": """
class Handler(logging.Handler):
    def emit(self, record):
        told.append(len(saver.pending))
told = []
logging.getLogger("stio").addHandler(Handler())
logging.getLogger("stio").setLevel(logging.DEBUG)
with sync.Saver() as saver:
    saver.save(generation(1), where / "x").result()
assert told
""",
    "a producer and a progress callback read pending": """
def produce():
    told.append(len(saver.pending))
    return torch.zeros(3)
told = []
with sync.Saver() as saver:
    lazy = stio.LazyTensor(torch.float32, (3,), produce)
    saver.save({"a": lazy}, where / "x", progress=lambda event: told.append(len(saver.pending))).result()
assert len(told) >= 3
""",
    "SIGTERM during state_dict saves on the same saver": MODEL
    + """
def handler(*_):
    saver.save(generation(9), where / "last").result()
signal.signal(signal.SIGTERM, handler)
during = lambda: signal.raise_signal(signal.SIGTERM)
with sync.Saver() as saver:
    saver.save(model, where / "x").result()
require_generation(where / "last", 9)
assert (where / "x").exists()
""",
    "SIGTERM during the wait for a snapshot saves on the same saver": """
def handler(*_):
    saver.save(generation(9), where / "last").result()
    handled.set()
handled = threading.Event()
signal.signal(signal.SIGTERM, handler)
def produce():
    os.kill(os.getpid(), signal.SIGTERM)
    return torch.zeros(3)
with sync.Saver() as saver:
    saver.save({"a": stio.LazyTensor(torch.float32, (3,), produce)}, where / "x").result()
assert handled.wait(10)
require_generation(where / "last", 9)
""",
    "SIGTERM while a save is pending saves on the same saver": """
def handler(*_):
    gate.set()
    saver.save(generation(9), where / "last").result()
signal.signal(signal.SIGTERM, handler)
gate = threading.Event()
with sync.Saver() as saver:
    saver.save(generation(1), MemoryDestination(gate=gate))
    signal.raise_signal(signal.SIGTERM)
require_generation(where / "last", 9)
""",
    "SIGTERM at any line of a save and of leaving saves on the same saver": LINES
    + """
def body():
    global saver
    with sync.Saver(durability="none") as saver:
        saver.save(generation(1), MemoryDestination()).result()

def handler():
    try:
        saver.save(generation(9), MemoryDestination()).result()
    except stio.StioError:
        pass  # closed meanwhile, or refused clearly

saver = sync.Saver()
handler()
lines = at_lines(body, handler, lambda line: False)
assert lines
for line in critical_first(lines):
    at_lines(body, handler, lambda found: found == line)
""",
    "SIGTERM at any line of a save of its own": LINES
    + """
def body():
    sync.save(generation(1), MemoryDestination())
def handler():
    sync.save(generation(9), MemoryDestination())
body()
lines = at_lines(body, handler, lambda line: False)
assert lines
for line in critical_first(lines):
    at_lines(body, handler, lambda found: found == line)
""",
    "a finaliser at any line reads pending and cancels": LINES
    + """
def body():
    global saver
    with sync.Saver(max_pending=2) as saver:
        pending.append(saver.save(generation(1), MemoryDestination()))
        pending[-1].result()
        pending.append(saver.save(generation(1), MemoryDestination()))
def finaliser():
    len(saver.pending)
    stio.stats()
    pending[0].cancel()
saver, pending = sync.Saver(), []
pending.append(saver.save(generation(1), MemoryDestination()))
pending[0].result()
assert len(at_lines(body, finaliser, lambda line: True)) > 50
""",
}
"""Scripts by what calls stio, and what holds a lock at that time."""

# 222: locks that others hold. Each script prints how long what it waited for took.

HELD = """
def old(path, **keywords):
    sync.save(generation(1), path, **keywords)
    return path

def staging_directories(directory):
    return [path for path in directory.rglob(".stio-*") if path.is_dir()]

def bytes_written():
    # An event that is set once all bytes are in staging memory or on disk, and the progress callback that sets it.
    event = threading.Event()
    def progress(happened):
        if happened.done_bytes == happened.total_bytes:
            event.set()
    return event, progress

def waits(pending, written):
    # Require that the save gets as far as the lock: its bytes are written, and it does not end by itself.
    assert written.wait(10)
    assert not eventually(pending.done, 0.15)
"""

LOCKED = {
    "reader: a directory with an index": HELD
    + """
path = old(where / "x", max_shard_size=SHARDED)
pid = reader_with_locks(where)
begin = time.monotonic()
sync.save(generation(2), path, max_shard_size=SHARDED)
print(time.monotonic() - begin)
end(pid)
require_generation(path, 2)
""",
    "reader: a file": HELD
    + """
path = old(where / "w.safetensors")
pid = reader_with_locks(where)
begin = time.monotonic()
sync.save(generation(2), path)
print(time.monotonic() - begin)
end(pid)
require_generation(path, 2)
""",
    "reader: a fresh directory beside dead saves": HELD
    + """
leave_behind(2, old(where / "w.safetensors"))()
pid = reader_with_locks(where)
begin = time.monotonic()
sync.save(generation(2), where / "fresh")
print(time.monotonic() - begin)
end(pid)
require_generation(where / "fresh", 2)
require_generation(where / "w.safetensors", 1)
""",
    "cancel: a directory with an index": HELD
    + """
path = old(where / "x", max_shard_size=SHARDED)
pid = saver_that_gets(signal.SIGSTOP, path)
written, progress = bytes_written()
saver = sync.Saver()
pending = saver.save(generation(2), path, max_shard_size=SHARDED, progress=progress)
waits(pending, written)
begin = time.monotonic()
pending.cancel()
try:
    pending.result(10)
except stio.ClosedError:
    print(time.monotonic() - begin)
assert len(staging_directories(where)) == 1  # of the one that is stopped
end(pid)
sync.save(generation(3), path, max_shard_size=SHARDED)
require_generation(path, 3)
assert staging_directories(where) == []
""",
    "cancel: a file, by asyncio": HELD
    + """
path = old(where / "w.safetensors")
pid = saver_that_gets(signal.SIGSTOP, path)
written, progress = bytes_written()

async def main():
    task = asyncio.ensure_future(stio.save(generation(2), path, progress=progress))
    while not written.is_set():
        await asyncio.sleep(0.001)
    done, _ = await asyncio.wait([task], timeout=0.15)
    assert not done
    begin = time.monotonic()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    print(time.monotonic() - begin)

asyncio.run(main())
assert len(staging_directories(where)) == 1
end(pid)
require_generation(path, 1)
""",
    "cancel: a file, by Ctrl-C": HELD
    + """
path = old(where / "w.safetensors")
pid = saver_that_gets(signal.SIGSTOP, path)
written, progress = bytes_written()

def interrupt():
    global begin
    assert written.wait(10)
    time.sleep(0.15)  # until it has come to the lock, which nothing tells
    begin = time.monotonic()
    os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
threading.Thread(target=interrupt, daemon=True).start()
try:
    sync.save(generation(2), path, progress=progress)
except KeyboardInterrupt:
    print(time.monotonic() - begin)
assert len(staging_directories(where)) == 1
end(pid)
require_generation(path, 1)
""",
    "cancel: shards one by one, by leaving a saver": HELD
    + """
path = old(where / "x", max_shard_size=SHARDED)
pid = saver_that_gets(signal.SIGSTOP, path)
written, progress = bytes_written()

async def main():
    async with stio.Saver(shard_names="hub", commit="files") as saver:
        pending = await saver.save(generation(2), path, max_shard_size=SHARDED, progress=progress)
        while not written.is_set():
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.15)
        begin.append(time.monotonic())
        raise asyncio.CancelledError

begin = []
try:
    asyncio.run(main())
except asyncio.CancelledError:
    print(time.monotonic() - begin[0])
assert len(staging_directories(where)) == 1
end(pid)
require_generation(path, 1)
""",
    "cancel: cleaning up after dead saves": HELD
    + """
path = old(where / "w.safetensors")
appear = leave_behind(2, path)
pid = saver_that_gets(signal.SIGSTOP, path)
appear()
saver = sync.Saver()
pending = saver.save(generation(2), where / "fresh")
begin = time.monotonic()
if not eventually(pending.done, 0.15):  # it may as well leave the cleaning to others
    begin = time.monotonic()
    pending.cancel()
    try:
        pending.result(10)
    except stio.ClosedError:
        pass
print(time.monotonic() - begin)
end(pid)
""",
    "patience: a directory with an index": HELD
    + """
path = old(where / "x", max_shard_size=SHARDED)
pid = saver_that_gets(signal.SIGSTOP, path)
begin = time.monotonic()
try:
    sync.save(generation(2), path, max_shard_size=SHARDED, lock_timeout=0.5)
except stio.ConcurrentSaveError as error:
    assert str(path) == error.path
    assert f"process {pid} on" in str(error) and "0.5 s" in str(error)
    print(time.monotonic() - begin)
end(pid)
require_generation(path, 1)
""",
    "patience: a saver's, for a file": HELD
    + """
path = old(where / "w.safetensors")
pid = saver_that_gets(signal.SIGSTOP, path)
with sync.Saver(lock_timeout=60) as saver:
    begin = time.monotonic()
    pending = saver.save_state({"a": generation(2)}, path, lock_timeout=0.2)
    try:
        pending.result(10)
    except stio.ConcurrentSaveError as error:
        assert f"process {pid} on" in str(error)
        print(time.monotonic() - begin)
end(pid)
require_generation(path, 1)
sync.save(generation(3), path, lock_timeout=0)
require_generation(path, 3)
""",
    "patience: cleaning up and publishing": HELD
    + """
path = old(where / "w.safetensors")
appear = leave_behind(1, path)
pid = saver_that_gets(signal.SIGSTOP, path)
appear()
begin = time.monotonic()
try:
    sync.save(generation(2), path, lock_timeout=0.7)
except stio.ConcurrentSaveError:
    print(time.monotonic() - begin)
end(pid)
sync.save(generation(3), path)
require_generation(path, 3)
assert staging_directories(where) == []
""",
    "patience: cleaning up after dead saves": HELD
    + """
path = old(where / "w.safetensors")
appear = leave_behind(6, path)
pid = saver_that_gets(signal.SIGSTOP, path)
appear()
begin = time.monotonic()
try:
    sync.save(generation(2), where / "fresh", lock_timeout=0.5)
except stio.ConcurrentSaveError:
    pass
print(time.monotonic() - begin)
end(pid)
""",
}
"""Scripts by what they wait for."""

NOT_ROOT = "a reader without rights to write takes another user to be"


@pytest.fixture(scope="module")
def outcomes(zygote: Zygote) -> Iterator[dict[str, Outcome]]:
    """Run all scripts."""
    locked = {name: code for name, code in LOCKED.items() if os.geteuid() == 0 or not name.startswith("reader")}
    with public_directory() as directory:
        yield run_together(zygote, USER_CODE | locked, directory, IDLE_SECONDS)


class ScriptError(Exception):
    """A script has failed: none of what its test is about."""


def require_ended(outcome: Outcome) -> None:
    """Require that a script has neither failed nor hung."""
    if outcome.stderr:
        raise ScriptError(outcome.stderr)
    assert outcome.ended, "it hangs"


@pytest.mark.matrix
@pytest.mark.parametrize("name", list(USER_CODE))
def test_c221_no_user_code_is_called_under_a_lock(outcomes: dict[str, Outcome], name: str) -> None:
    require_ended(outcomes[name])


@pytest.mark.parametrize("name", LOCKED)
def test_c222_a_lock_that_others_hold(outcomes: dict[str, Outcome], name: str) -> None:
    """A reader's lock is no obstacle; a cancel ends the wait within a second; all waits of a save have one patience."""
    if name not in outcomes:
        pytest.skip(NOT_ROOT)
    require_ended(outcomes[name])
    assert float(outcomes[name].stdout) < MOST_SECONDS


# 228: places in the queue.


@pytest.fixture
def anyio_backend() -> tuple[str, dict[str, bool]]:
    """Return the one loop that these tests run on: a failure costs them a second."""
    return "asyncio", {"use_uvloop": False}


def test_c228_a_save_that_has_ended_takes_no_place() -> None:
    gate, place = threading.Event(), MemoryDestination()
    with sync.Saver(max_pending=2, when_full="error") as saver:
        try:
            first = saver.save(generation(1), MemoryDestination(gate=gate))
            second = saver.save(generation(2), MemoryDestination())
            second.cancel()
            assert eventually(second.done)
            third = saver.save(generation(3), place)
            assert saver.pending == (first, third)
        finally:
            gate.set()
    assert place.num_commits == 1


@pytest.mark.anyio
async def test_c228_the_next_save_waits_for_no_place() -> None:
    """Its snapshot is complete while the first save is held."""
    gate = threading.Event()
    async with stio.Saver(max_pending=2) as saver:
        try:
            await saver.save(generation(1), MemoryDestination(gate=gate))
            second = await saver.save(generation(2), MemoryDestination())
            second.cancel()
            assert await eventually_async(second.done)
            with anyio.move_on_after(1) as scope:
                await saver.save(generation(3), MemoryDestination())
            assert not scope.cancelled_caught
        finally:
            gate.set()


@pytest.mark.anyio
async def test_c228_a_snapshot_that_fails_is_told_while_an_earlier_save_is_written() -> None:
    """It ends at once, so that it takes no place either."""
    gate = threading.Event()
    async with stio.Saver(max_pending=2) as saver:
        try:
            await saver.save(generation(1), MemoryDestination(gate=gate))
            with anyio.move_on_after(1) as scope, pytest.raises(ZeroDivisionError):
                await saver.save({"a": stio.LazyTensor(torch.float32, (3,), lambda: 1 / 0)}, MemoryDestination())
            assert not scope.cancelled_caught
        finally:
            gate.set()


def test_c228_a_save_that_runs_takes_a_place() -> None:
    gate = threading.Event()
    with sync.Saver(max_pending=2, when_full="error") as saver:
        try:
            saver.save(generation(1), MemoryDestination(gate=gate))
            saver.save(generation(2), MemoryDestination())
            with pytest.raises(stio.SaveInProgressError, match="under way"):
                saver.save(generation(3), MemoryDestination())
        finally:
            gate.set()
