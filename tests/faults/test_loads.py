"""Faults of loads that were found by use: 202 to 217, but for those about modules as targets."""

from __future__ import annotations

import asyncio
import ctypes
import functools
import gc
import hashlib
import importlib
import json
import os
import re
import signal
import sys
import threading
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from fakes import FakeDevice, FaultyRoot, MemoryDestination, MemoryRoot, checkpoint_files, write_checkpoint
from faults.load_helpers import WAYS, Case, Scene, in_a_child, require_closable, sparse_file
from support import eventually, eventually_async, nothing_left, require_equal, save_file, spin
from torch import nn

import stio
from benchmarks import cgroups
from stio import sync
from stio.format.files.manifest import FileState, Manifest
from stio.storage.open import open_directory

MIB = 1 << 20


class Mine(Exception):
    """Raised by a user's own function."""


# 202. An index that is a tensor of one element.

MATRIX = torch.arange(24.0).reshape(4, 3, 2)


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([1]),
        torch.tensor([-1]),
        torch.tensor([[1]]),
        (slice(None), torch.tensor([2])),
        (torch.tensor([1]), torch.tensor([2])),
        (0, torch.tensor([2], dtype=torch.int32)),
        torch.tensor(1),
        torch.tensor([1, 3]),
        torch.tensor([], dtype=torch.int64),
        np.array([1]),
        np.array(1),
        [1],
        (slice(torch.tensor(1), None), torch.tensor(0)),
        torch.tensor([[1, 3], [0, 0]]),
        torch.tensor([[[2]]]),
        (torch.tensor([1]), torch.tensor([0, 2])),
        (torch.tensor([[3], [1]]), torch.tensor([2])),
        (slice(None), torch.tensor([0, 2]), torch.tensor([[1]])),
        (slice(None, None, 2), torch.tensor([[0, 1]]), None),
        (torch.tensor([2]), slice(None), torch.tensor([1])),
        (torch.tensor([], dtype=torch.int64), torch.tensor([1])),
        (..., torch.tensor([1])),
        (np.array([[2, 0]]), [1]),
        torch.zeros((0, 3), dtype=torch.int64),
    ],
    ids=repr,
)
def test_c202_an_index_tensor_gives_the_answer_of_torch(index: Any) -> None:
    root = MemoryRoot(checkpoint_files({"w": MATRIX}))
    with sync.open(root) as checkpoint:
        found = checkpoint.read("w", index)
    require_equal({"w": found}, {"w": MATRIX[index]})
    require_equal(sync.load(root, slices={"w": index}), {"w": MATRIX[index]})


@pytest.mark.parametrize(
    "index",
    [
        torch.tensor([True]),
        torch.tensor(True),
        torch.tensor([1.0]),
        np.array([True]),
        [torch.tensor(1), torch.tensor(2)],  # one dimension or two, by the version of torch
        [torch.tensor([1])],
        (slice(None), torch.tensor([1]), slice(None), torch.tensor([1])),
        (torch.tensor([0, 1]), torch.tensor([1, 2])),
    ],
    ids=repr,
)
def test_c202_what_is_refused(index: Any) -> None:
    with sync.open(MemoryRoot(checkpoint_files({"w": MATRIX}))) as checkpoint, pytest.raises(stio.SliceError):
        checkpoint.read("w", index)


# 203. `preload`: torch is imported, and the loop goes on.

TORCH_IS_NEW = """
import sys
from importlib.machinery import ModuleSpec

ALL_OF_TORCH = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "torch"}

class Torch:  # imports it again, by a call of `during` only
    during = staticmethod(lambda: None)

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name == "torch" else None

    def create_module(self, spec):
        return ALL_OF_TORCH["torch"]

    def exec_module(self, module):
        self.during()
        sys.modules.update(ALL_OF_TORCH)

sys.meta_path.insert(0, Torch())
"""
"""Begin of scripts that find torch not imported, in a process where it is."""


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "trio"])
def test_c203_preload_imports_torch_on_a_thread(torch_zygote: Any, loop: str, tmp_path: Path) -> None:
    if loop == "trio":
        pytest.importorskip("trio")
    path = save_file({"w": torch.zeros(3)}, tmp_path / "x.safetensors")
    done = torch_zygote.run(
        TORCH_IS_NEW
        + """
import threading, time
import anyio
import stio
path, loop = sys.argv[1:]

async def main():
    assert "torch" not in sys.modules
    beats = []
    async def beat():
        while True:
            beats.append(1)
            await anyio.sleep(0.001)
    def during():  # the import of torch
        assert threading.current_thread() is not threading.main_thread()
        deadline = time.monotonic() + 10
        while len(beats) <= 20 and time.monotonic() < deadline:
            time.sleep(0.001)
    Torch.during = staticmethod(during)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        tasks.start_soon(stio.preload)
        await stio.preload()
        tasks.cancel_scope.cancel()
    assert len(beats) > 20, len(beats)
    before = set(sys.modules)
    assert (await stio.load(path))["w"].tolist() == [0, 0, 0]
    imported = {name for name in set(sys.modules) - before if name.partition(".")[0] in ("stio", "torch")}
    assert not imported, imported
    await stio.preload()

anyio.run(main, backend=loop)
""",
        path,
        loop,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_c203_an_import_that_fails_is_repeated(torch_zygote: Any, tmp_path: Path) -> None:
    path = save_file({"w": torch.zeros(3)}, tmp_path / "x.safetensors")
    done = torch_zygote.run(
        TORCH_IS_NEW
        + """
import asyncio
import stio

def during():  # the import of torch
    raise ImportError("torch is broken")

async def main():
    Torch.during, works = staticmethod(during), Torch.during
    for use in (stio.preload, lambda: stio.load(sys.argv[1])):
        try:
            await use()
        except ImportError as error:
            assert "torch is broken" in str(error)
        else:
            raise AssertionError
    Torch.during = staticmethod(works)
    assert (await stio.load(sys.argv[1]))["w"].tolist() == [0, 0, 0]

asyncio.run(main())
""",
        path,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_c203_a_cancel_while_torch_is_imported(torch_zygote: Any) -> None:
    done = torch_zygote.run(
        TORCH_IS_NEW
        + """
import asyncio, threading
import stio

reached, gate, waited = threading.Event(), threading.Event(), []

def during():  # the import of torch
    assert threading.current_thread() is not threading.main_thread()
    reached.set()
    waited.append(gate.wait(10))

Torch.during = staticmethod(during)

async def main():
    task = asyncio.create_task(stio.preload())
    while not reached.is_set():
        await asyncio.sleep(0.001)
    task.cancel()
    await asyncio.sleep(0.05)
    gate.set()
    try:
        await task
    except asyncio.CancelledError:
        assert waited == [True]
        return
    raise AssertionError

asyncio.run(main())
"""
    )
    assert done.returncode == 0, done.stderr


# 204 and 205. `promote`.


class HashedElsewhere(str):
    """A name that waits where another thread than the main one looks it up."""

    reached: threading.Event
    promoted: threading.Event

    def __hash__(self) -> int:
        if threading.current_thread() is not threading.main_thread() and not self.reached.is_set():
            self.reached.set()
            self.promoted.wait(1)
        return str.__hash__(self)

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other)  # type: ignore[no-any-return]


def test_c204_promote_while_a_stream_begins() -> None:
    tensors = {f"layer.{k}": torch.full((3,), float(k)) for k in range(9)}
    name = HashedElsewhere("layer.3")
    name.reached, name.promoted = threading.Event(), threading.Event()
    with sync.open(MemoryRoot(checkpoint_files(tensors))) as checkpoint:
        stream = checkpoint.stream()
        stream.promote([name])
        with stream:
            name.reached.wait(0.3)
            stream.promote([f"layer.{k}" for k in range(4, 9)])
            name.promoted.set()
            require_equal(dict(stream), tensors)


def _is_read_first(name: str, promoted: Any) -> bool:
    """Return whether a tensor is among the first that a stream reads, if these are promoted."""
    tensors = {name: torch.zeros(3000) for name in [*(f"layer.{k:02}" for k in range(30)), "x", "xy", "y"]}
    root = FaultyRoot(MemoryRoot(checkpoint_files(tensors)), gate=threading.Event(), gate_at=1 << 30)
    with sync.open(root, memory="copy", budget_bytes=64 << 10) as checkpoint:
        info = checkpoint.info(name)
        root.gate_at = root.num_reads + 1

        def has_begun() -> bool:
            begin, end = info.file_offset, info.file_offset + info.nbytes
            return any(read.offset <= begin and end <= read.offset + read.nbytes for read in root.reads[1:])

        stream = checkpoint.stream()
        stream.promote(promoted)
        with stream:
            try:
                eventually(lambda: has_begun() or root.num_waiting >= 4)  # several workers read at once
                return has_begun()
            finally:
                assert root.gate is not None
                root.gate.set()


def test_c205_a_string_is_one_name() -> None:
    assert _is_read_first("xy", "xy")


def test_c205_a_list_of_names_goes_first() -> None:
    assert _is_read_first("xy", ["xy"])


@pytest.mark.parametrize("promoted", [{"xy": 1}, {"xy"}, iter(["xy"])], ids=["mapping", "set", "iterator"])
def test_c205_any_names_go_first(promoted: Any) -> None:
    assert _is_read_first("xy", promoted)


def test_c204_promote_by_many_threads_while_a_stream_begins() -> None:
    tensors = {f"layer.{k}": torch.full((3,), float(k)) for k in range(50)}
    with sync.open(MemoryRoot(checkpoint_files(tensors))) as checkpoint:
        for _ in range(20):
            stream = checkpoint.stream()
            threads = [
                threading.Thread(target=lambda: [stream.promote(name) for name in tensors])  # noqa: B023  # joined below
                for _ in range(2)
            ]
            for thread in threads:
                thread.start()
            try:
                require_equal(dict(stream), tensors)
            finally:
                for thread in threads:
                    thread.join()


@pytest.mark.parametrize(
    "wrong", [5, None, lambda name: True, [5], b"xy", [None]],
    ids=["number", "none", "predicate", "numbers", "bytes", "nones"],
)  # fmt: skip
def test_c205_what_is_no_name_is_refused(wrong: Any) -> None:
    with sync.open(MemoryRoot(checkpoint_files({"w": MATRIX}))) as checkpoint:
        with pytest.raises(TypeError):
            checkpoint.stream().promote(wrong)


# 206. Coroutines that are closed where they wait.

WEIGHTS = {f"layer.{k}": torch.full((200, 100), float(k)) for k in range(6)}
SMALL: dict[str, Any] = {"memory": "copy", "budget_bytes": 64 << 10}
"""Several reads, and room for few of them."""

convert = importlib.import_module("stio.conversion.api")
convert = getattr(convert, "convert", convert)


class Layers(nn.Module):
    """A module that `WEIGHTS` fit."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.layer = nn.ParameterList([nn.Parameter(torch.empty(200, 100, device=device)) for _ in range(6)])


async def _entered(scene: Scene) -> stio.Checkpoint:
    checkpoint = stio.open(scene.root, **SMALL)
    return await checkpoint.__aenter__()


async def _begun(scene: Scene) -> tuple[stio.Checkpoint, stio.Stream]:
    checkpoint = await _entered(scene)
    stream = checkpoint.stream()
    await anext(stream)
    scene.shut()
    return checkpoint, stream


async def load(scene: Scene) -> None:
    scene.shut()
    await stio.load(scene.root)


async def load_into(scene: Scene) -> None:
    scene.shut()
    await stio.load_into(Layers(), scene.root, **SMALL)


async def load_into_assign(scene: Scene) -> None:
    scene.shut()
    await stio.load_into(Layers("meta"), scene.root, assign=True)


async def load_state(scene: Scene) -> None:
    scene.shut()
    await stio.load_state(scene.path.parent / "state.safetensors", progress=scene.wait)


async def checkpoint_enter(scene: Scene) -> None:
    scene.shut()
    await stio.open(scene.root).__aenter__()


async def checkpoint_read(scene: Scene) -> None:
    checkpoint = await _entered(scene)
    scene.shut()
    await checkpoint.read("layer.1")


async def checkpoint_load(scene: Scene) -> None:
    checkpoint = await _entered(scene)
    scene.shut()
    await checkpoint.load()


async def checkpoint_load_into(scene: Scene) -> None:
    checkpoint = await _entered(scene)
    scene.shut()
    await checkpoint.load_into(Layers())


async def checkpoint_aclose(scene: Scene) -> None:
    checkpoint, stream = await _begun(scene)
    await checkpoint.aclose()
    del stream


async def checkpoint_aclose_of_two_streams(scene: Scene) -> None:
    checkpoint = await _entered(scene)
    streams = [checkpoint.stream(), checkpoint.stream()]
    for stream in streams:
        await anext(stream)
    scene.shut()
    await checkpoint.aclose()


async def checkpoint_block(scene: Scene) -> None:
    async with stio.open(scene.root, **SMALL) as checkpoint:
        scene.shut()
        await checkpoint.read("layer.1")


async def checkpoint_block_left_with_a_stream(scene: Scene) -> None:
    async with stio.open(scene.root, **SMALL) as checkpoint:
        stream = checkpoint.stream()
        await anext(stream)
        scene.shut()


async def stream_next(scene: Scene) -> None:
    _, stream = await _begun(scene)
    async for _ in stream:
        pass


async def stream_aclose(scene: Scene) -> None:
    _, stream = await _begun(scene)
    await stream.aclose()


async def stream_block(scene: Scene) -> None:
    checkpoint = await _entered(scene)
    async with checkpoint.stream() as stream:
        await anext(stream)
        scene.shut()
        await anyio.sleep(0.01)  # the user's own code waits


async def save(scene: Scene) -> None:
    scene.shut()
    await stio.save(scene.tensors, scene.destination)


async def save_state(scene: Scene) -> None:
    scene.shut()
    await stio.save_state(scene.tensors, scene.destination)


async def saver_save(scene: Scene) -> None:
    saver = stio.Saver()
    scene.shut()
    await saver.save(scene.lazy, scene.destination)


async def saver_save_state(scene: Scene) -> None:
    saver = stio.Saver()
    scene.shut()
    await saver.save_state(scene.lazy, scene.destination)


async def _pending(scene: Scene) -> tuple[stio.Saver, stio.PendingSave]:
    saver = stio.Saver()
    scene.hold()
    pending = await saver.save(scene.tensors, scene.destination)
    scene.shut()
    return saver, pending


async def pending(scene: Scene) -> None:
    _, pending = await _pending(scene)
    await pending


async def saver_aclose(scene: Scene) -> None:
    saver, _ = await _pending(scene)
    await saver.aclose()


async def saver_block(scene: Scene) -> None:
    async with stio.Saver() as saver:
        scene.hold()
        pending = await saver.save(scene.tensors, scene.destination)
        scene.shut()
        await pending


async def saver_block_left(scene: Scene) -> None:
    async with stio.Saver() as saver:
        scene.hold()
        await saver.save(scene.tensors, scene.destination)
        scene.shut()


async def saver_block_left_by_an_error(scene: Scene) -> None:
    with suppress(Mine):
        async with stio.Saver() as saver:
            scene.hold()
            await saver.save(scene.tensors, scene.destination)
            scene.shut()
            raise Mine


def _warm(scene: Scene) -> stio.WarmStart:
    return stio.warm_start(Layers("meta"), scene.root, progress=scene.wait, **SMALL)


async def warm_start_enter(scene: Scene) -> None:
    warm = _warm(scene)
    scene.shut()
    await warm.__aenter__()


async def warm_start_done(scene: Scene) -> None:
    warm = _warm(scene)
    scene.root.gate = None  # a held progress alone: what is not filled yet waits for no read
    await warm.__aenter__()
    scene.shut()
    await warm.done()


async def warm_start_aclose(scene: Scene) -> None:
    warm = await _warm(scene).__aenter__()
    scene.shut()
    await warm.aclose()


async def warm_start_block_left(scene: Scene) -> None:
    async with _warm(scene):
        scene.shut()


async def cache_prefetch(scene: Scene) -> None:
    cache = stio.HostCache(MIB, device="cpu")
    scene.shut()
    await cache.prefetch(scene.path, progress=scene.wait)


async def conversion(scene: Scene) -> None:
    scene.shut()
    await convert(scene.path, scene.path.parent / "out.safetensors", progress=scene.wait)


CLOSED: dict[str, Case] = {
    case.__name__: case
    for case in [
        load, load_into, load_into_assign, load_state, checkpoint_enter, checkpoint_read, checkpoint_load,
        checkpoint_load_into, checkpoint_aclose, checkpoint_aclose_of_two_streams, checkpoint_block,
        checkpoint_block_left_with_a_stream, stream_next, stream_aclose, stream_block, save, save_state, saver_save,
        saver_save_state, pending, saver_aclose, saver_block, saver_block_left, saver_block_left_by_an_error,
        warm_start_enter, warm_start_done, warm_start_aclose, warm_start_block_left, cache_prefetch, conversion,
    ]
}  # fmt: skip

CANCEL_THE_WAIT_ALONE = {"pending", "warm_start_done"}

EVERY_WAY = {
    "load", "load_into", "checkpoint_aclose", "checkpoint_block", "stream_next", "stream_aclose", "save", "saver_save",
    "saver_aclose", "saver_block_left", "pending", "warm_start_block_left",
}  # fmt: skip
"""One of each kind; the others are not repeated on trio and for the garbage collector."""


def _closings() -> Iterator[Any]:
    for name in CLOSED:
        for way in WAYS:
            if way == "after a cancel" and name in CANCEL_THE_WAIT_ALONE:
                continue
            if way in ("on trio", "collected") and name not in EVERY_WAY:
                continue
            yield pytest.param(name, way, id=f"{name}-{way.replace(' ', '_')}")


@pytest.mark.matrix
@pytest.mark.parametrize(("name", "way"), list(_closings()))
def test_c206_closed_where_it_waits(name: str, way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = save_file(WEIGHTS, tmp_path / "x.safetensors")
    if name == "load_state":
        sync.save_state(WEIGHTS, tmp_path / "state.safetensors")
    require_closable(CLOSED[name], lambda: Scene(WEIGHTS, path), way, monkeypatch)


# 207. Ctrl-C while memory is unmapped.


class Interrupting:
    """Delivers SIGINT when it is freed, from C: the next code of Python that runs is the code that receives the exception."""

    def __init__(self) -> None:
        call = ctypes.PyDLL(None)["raise"]
        call.argtypes = [ctypes.c_int, ctypes.py_object]
        self.reference = weakref.ref(self, functools.partial(call, signal.SIGINT))


@pytest.mark.skipif(sys.platform == "win32", reason="there is no libc to raise a signal by")
@pytest.mark.parametrize(
    ("nbytes", "memory"), [(MIB, "lazy"), (MIB, "copy"), (150 * MIB, "lazy")], ids=["small", "copied", "large"]
)
def test_c207_an_interrupt_while_memory_is_freed(
    nbytes: int, memory: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda it: lost.append(it.exc_type))
    tensors = sync.load(sparse_file(tmp_path / "x.safetensors", nbytes), memory=memory)
    interrupting = Interrupting()
    reference = interrupting.reference
    box = [tensors.pop("w"), interrupting]  # a list frees its last item first
    del interrupting
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    heard = False
    try:
        del box
        for _ in range(100):
            pass
    except KeyboardInterrupt:
        heard = True
    finally:
        signal.signal(signal.SIGINT, before)
    assert reference() is None
    assert heard
    assert lost == []


# 209. Bars.


class Bar:
    """Has the methods of a tqdm bar that are used, and remembers what became of it."""

    made: list[Bar] = []

    def __init__(self, *args: object, total: float | None = None, desc: str | None = None, **options: object) -> None:
        self.n, self.total, self.desc, self.closed = 0.0, total, desc, False
        Bar.made.append(self)

    def update(self, n: float = 1) -> None:
        self.n += n

    def set_description(self, desc: str | None = None, refresh: bool = True) -> None:
        self.desc = desc

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Bar]:
    monkeypatch.setattr(Bar, "made", [])
    return Bar.made


def _save_with_a_bar(path: Path) -> None:
    sync.save(WEIGHTS, MemoryDestination(), progress=Bar)


def _save_state_with_a_bar(path: Path) -> None:
    sync.save_state({"weights": WEIGHTS, "epoch": 3}, MemoryDestination(), progress=Bar)


def _saver_with_a_bar(path: Path) -> None:
    with sync.Saver(progress=Bar) as saver:
        saver.save(WEIGHTS, MemoryDestination()).result()


def _convert_with_a_bar(path: Path) -> None:
    sync.convert(path, path.parent / "out.safetensors", progress=Bar)


def _load_with_a_bar(path: Path) -> None:
    sync.load(path, progress=Bar)


def _prefetch_with_a_bar(path: Path) -> None:
    sync.HostCache(100 * MIB, device="cpu").prefetch(path, progress=Bar)


def _stream_with_a_bar(path: Path) -> None:
    with sync.open(path, progress=Bar) as checkpoint:
        dict(checkpoint.stream())


@pytest.mark.parametrize(
    ("call", "description"),
    [
        (_load_with_a_bar, "loading"),
        (_stream_with_a_bar, "loading"),
        (_prefetch_with_a_bar, "prefetching"),
        (_save_with_a_bar, "saving"),
        (_save_state_with_a_bar, "saving"),
        (_saver_with_a_bar, "saving"),
        (_convert_with_a_bar, "converting"),
    ],
)
def test_c209_a_bar_says_what_is_done(
    call: Callable[[Path], None], description: str, bars: list[Bar], tmp_path: Path
) -> None:
    call(save_file(WEIGHTS, tmp_path / "x.safetensors"))
    (bar,) = bars
    assert bar.desc == description
    assert bar.closed
    assert bar.n == bar.total


def _failing_load() -> None:
    root = FaultyRoot(MemoryRoot(checkpoint_files(WEIGHTS)), fail_at=4)
    with pytest.raises(stio.StorageError):
        sync.load(root, progress=Bar, **SMALL)


def _failing_load_into() -> None:
    root = FaultyRoot(MemoryRoot(checkpoint_files(WEIGHTS)), fail_at=4)
    with pytest.raises(stio.StorageError):
        sync.load_into(Layers(), root, progress=Bar, **SMALL)


def _failing_warm_start() -> None:
    root = FaultyRoot(MemoryRoot(checkpoint_files(WEIGHTS)), fail_at=4)
    with pytest.raises(stio.StorageError):
        with sync.warm_start(Layers("meta"), root, progress=Bar, **SMALL) as warm:
            warm.done()


def _failing_save() -> None:
    with pytest.raises(stio.StorageError):
        sync.save(WEIGHTS, MemoryDestination(fail_at=1), progress=Bar)


def _stream_that_was_left() -> None:
    with sync.open(MemoryRoot(checkpoint_files(WEIGHTS)), progress=Bar, **SMALL) as checkpoint:
        with checkpoint.stream() as stream:
            next(stream)


def _stream_that_was_dropped() -> None:
    with sync.open(MemoryRoot(checkpoint_files(WEIGHTS)), progress=Bar, **SMALL) as checkpoint:
        next(checkpoint.stream())
        gc.collect()
        eventually(lambda: Bar.made[0].closed, 0.3)  # nothing waits for the end of what was dropped


def _cancelled_load() -> None:
    async def main() -> None:
        root = FaultyRoot(MemoryRoot(checkpoint_files(WEIGHTS)), gate=threading.Event(), gate_at=4)
        task = asyncio.ensure_future(stio.load(root, progress=Bar, **SMALL))
        assert await eventually_async(lambda: root.num_waiting > 0)
        task.cancel()
        await spin(3)  # until the load has heard of it
        assert root.gate is not None
        root.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def _failing_bar() -> None:
    def fail(self: Bar, n: float = 1) -> None:
        raise Mine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bar, "update", fail)
        with pytest.raises(Mine):
            sync.load(MemoryRoot(checkpoint_files(WEIGHTS)), progress=Bar)


def _cancelled_save() -> None:
    async def main() -> None:
        destination = MemoryDestination(gate=threading.Event())
        task = asyncio.ensure_future(stio.save(WEIGHTS, destination, progress=Bar))
        assert await eventually_async(lambda: destination.num_waiting > 0)
        task.cancel()
        await spin(3)
        assert destination.gate is not None
        destination.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def _checkpoint_closed_beside_a_stream() -> None:
    with sync.open(MemoryRoot(checkpoint_files(WEIGHTS)), progress=Bar, **SMALL) as checkpoint:
        stream = checkpoint.stream()
        next(stream)
    with pytest.raises(stio.ClosedError):
        dict(stream)


def _closed_warm_start() -> None:
    root = FaultyRoot(MemoryRoot(checkpoint_files(WEIGHTS)), gate=threading.Event(), gate_at=4)
    with pytest.raises(Mine), sync.warm_start(Layers("meta"), root, progress=Bar, **SMALL):
        eventually(lambda: root.num_waiting > 0)
        threading.Timer(0.05, root.gate.set).start()  # type: ignore[union-attr]  # it has one
        raise Mine


@pytest.mark.parametrize(
    "call",
    [
        _failing_load, _failing_load_into, _failing_warm_start, _failing_save, _failing_bar, _stream_that_was_left,
        _stream_that_was_dropped, _checkpoint_closed_beside_a_stream, _cancelled_load, _cancelled_save,
        _closed_warm_start,
    ],
)  # fmt: skip
def test_c209_a_bar_is_closed_whatever_happens(call: Callable[[], None], bars: list[Bar]) -> None:
    call()
    (bar,) = bars
    assert bar.closed


# 210. What a control group leaves.


@pytest.fixture
def memory_group() -> Iterator[cgroups.Group]:
    """A control group below the one of this process, for the memory of a child."""
    with ExitStack() as leaving:
        try:
            group = leaving.enter_context(cgroups.group("memory"))
            cgroups.limit_memory(group, 96 * MIB)
        except cgroups.CgroupUnavailable as error:
            pytest.skip(str(error))
        yield group


_PREFETCH = """
attempt(lambda: sync.HostCache(1 << 30, device="cpu").prefetch(directory / "x.safetensors"))
"""


def _in_a_group(zygote: Any, procs: object, code: str, directory: Path) -> str:
    joining = f"Path({str(procs)!r}).write_text(str(os.getpid()))\n"
    leaving = (
        "sys.stdout.flush()\nos._exit(0)\n"  # the end of an interpreter copies memory that it shared with its parent
    )
    return in_a_child(zygote, joining + code + leaving, directory)[-1]


@pytest.mark.matrix
@pytest.mark.root
@pytest.mark.parametrize("where", ["own group", "group above"])
def test_c210_the_limit_of_a_nested_group(where: str, memory_group: cgroups.Group, zygote: Any, tmp_path: Path) -> None:
    sparse_file(tmp_path / "x.safetensors", 160 * MIB)
    inner = memory_group.path / "inner"
    if where == "group above":
        inner.mkdir()
    try:
        procs = inner / "cgroup.procs" if where == "group above" else memory_group.procs
        found = _in_a_group(zygote, procs, _PREFETCH, tmp_path)
    finally:
        if inner.exists():
            assert eventually(lambda: _is_removed(inner))
    assert found.startswith("refused "), found


def _is_removed(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:  # a process that has ended is not gone yet
        return False
    return True


@pytest.mark.root
def test_c210_shared_memory_does_not_give_way(memory_group: cgroups.Group, zygote: Any, tmp_path: Path) -> None:
    sparse_file(tmp_path / "x.safetensors", 56 * MIB)
    code = f"""
import mmap
shared = mmap.mmap(-1, {56 * MIB})
torch.frombuffer(shared, dtype=torch.uint8).fill_(1)  # `share_memory_` would need the memory twice
{_PREFETCH}
"""
    found = _in_a_group(zygote, memory_group.procs, code, tmp_path)
    assert found.startswith("refused "), found


@pytest.mark.root
def test_c210_the_page_cache_gives_way(memory_group: cgroups.Group, zygote: Any, tmp_path: Path) -> None:
    sparse_file(tmp_path / "x.safetensors", 32 * MIB)
    sparse_file(tmp_path / "other", 80 * MIB)
    code = f"""
with open(directory / "other", "rb") as file:
    while file.read(1 << 20):
        pass
{_PREFETCH}
"""
    assert _in_a_group(zygote, memory_group.procs, code, tmp_path) == "done"


# 211. Locals of the user's own functions in a traceback.


def _fail_with_a_cause(*_: object) -> Any:
    precious = "of fail"
    try:
        _cause_of_it()
    except KeyError as error:
        raise Mine(precious) from error


def _cause_of_it() -> None:
    precious = "of cause"
    raise KeyError(precious)


class FailingRoot:
    """A place of the user's own that fails."""

    path = "mine:"

    def listdir(self) -> list[str]:
        return ["model.safetensors"]

    def open(self, name: str, *, trusted: bool = False) -> Any:
        return _fail_with_a_cause()

    def close(self) -> None:
        pass


def _rows() -> Iterator[torch.Tensor]:
    yield torch.zeros(1)
    _fail_with_a_cause()


async def _awaited() -> torch.Tensor:
    _fail_with_a_cause()
    return torch.zeros(3)


def _save_lazily(produce: Callable[[], Any]) -> None:
    sync.save({"a": stio.LazyTensor(torch.float32, (3,), produce)}, MemoryDestination())


SOURCE = MemoryRoot(checkpoint_files({"w": MATRIX}))

FAILING_CALLS: dict[str, Callable[[], object]] = {
    "predicate": lambda: sync.load(SOURCE, names=_fail_with_a_cause),
    "device": lambda: sync.load(SOURCE, device=_fail_with_a_cause),
    "progress": lambda: sync.load(SOURCE, progress=_fail_with_a_cause),
    "progress of a save": lambda: sync.save({"w": MATRIX}, MemoryDestination(), progress=_fail_with_a_cause),
    "producer": lambda: _save_lazily(_fail_with_a_cause),
    "rows of a producer": lambda: _save_lazily(_rows),
    "awaitable of a producer": lambda: _save_lazily(_awaited),
    "root": lambda: sync.load(FailingRoot()),
}


@pytest.mark.parametrize("name", FAILING_CALLS)
def test_c211_an_error_keeps_the_locals_of_user_code(name: str) -> None:
    with pytest.raises(Mine) as caught:
        FAILING_CALLS[name]()
    found = {}
    for error in (caught.value, caught.value.__cause__):
        assert error is not None
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if frame.f_code.co_name in (_fail_with_a_cause.__name__, _cause_of_it.__name__):
                found[frame.f_code.co_name] = frame.f_locals.get("precious")
    assert found == {_fail_with_a_cause.__name__: "of fail", _cause_of_it.__name__: "of cause"}


def test_c211_an_error_from_before_the_call_keeps_its_locals() -> None:
    try:
        _cause_of_it()
    except KeyError as error:
        earlier = error

    def fail(name: str) -> bool:
        raise Mine from earlier

    with pytest.raises(Mine):
        sync.load(SOURCE, names=fail)
    frames = [frame for frame, _ in traceback.walk_tb(earlier.__traceback__)]
    assert frames[-1].f_locals.get("precious") == "of cause"


# 212. What a cache gives up for a file that it then refuses.


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing says how much memory there is")
@pytest.mark.parametrize("shape", ["file", "shards", "many"])
def test_c212_a_refused_file_costs_no_entry(shape: str, tmp_path: Path) -> None:
    small = sparse_file(tmp_path / "small.safetensors", MIB)
    huge_bytes = 4 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    huge = sparse_file(tmp_path / "huge" / "model.safetensors", huge_bytes)
    budget_bytes = huge.stat().st_size + MIB
    if shape == "shards":
        save_file({"v": torch.zeros(3)}, huge.parent / "other.safetensors")
        index = {"metadata": {}, "weight_map": {"v": "other.safetensors", "w": "model.safetensors"}}
        (huge.parent / "model.safetensors.index.json").write_text(json.dumps(index))
        budget_bytes = sum(file.stat().st_size for file in huge.parent.glob("*.safetensors")) + MIB // 2
    with sync.HostCache(budget_bytes, device="cpu") as cache:
        cache.prefetch(small)
        if shape == "many":
            for k in range(3):
                cache.prefetch(sparse_file(tmp_path / f"{k}.safetensors", 256 << 10))
        before = cache.stats()
        with pytest.raises(stio.StioError):
            cache.prefetch(huge.parent)
        after = cache.stats()
    assert (after.entries, after.held_bytes, after.evictions) == (before.entries, before.held_bytes, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing says how much memory there is")
def test_c212_a_load_reads_a_refused_file_without_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = sparse_file(tmp_path / "small.safetensors", MIB)
    other = sparse_file(tmp_path / "other.safetensors", MIB)
    with sync.HostCache(MIB + MIB // 2, device="cpu") as cache:
        cache.prefetch(small)
        with monkeypatch.context() as patch:
            patch.setattr("stio.runtime.memory.fits", lambda nbytes: False)
            assert sync.load(other, cache=cache)["w"].numel() == MIB
        assert (cache.stats().entries, cache.stats().evictions) == (1, 0)
        sync.load(other, cache=cache)
        assert (cache.stats().entries, cache.stats().evictions) == (1, 1)


# 213. Errors of the system that come out as they are.

_USES = """
def stream():
    with sync.open(source, memory="copy") as checkpoint:
        settle()
        for _ in checkpoint.stream():
            pass

"""

_LARGE = """
def into():
    module = nn.Module()
    module.w = nn.Parameter(torch.empty(num_elements, dtype=torch.float16, device="meta"))
    sync.load_into(module, source, assign=True, memory="copy")

"""

TOO_LARGE = {
    "map": "sync.load(source, memory='map')",
    "lazy": "sync.load(source, memory='lazy')",
    "copy": "sync.load(source, memory='copy')",
    "slice": "sync.load(source, slices={'w': slice(0, num_elements - 1)})",
    "cast": "sync.load(source, dtype=torch.float64, names='w', memory='copy')",
    "device": "sync.load(source, device=FakeDevice())",
    "stream": "stream()",
    "load_into": "into()",
    "cache": "sync.load(source, cache=sync.HostCache(1 << 30, device='cpu'))",
}


@pytest.fixture(scope="module")
def without_address_space(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return by use what came of it in a process that may not map what is loaded."""
    directory = tmp_path_factory.mktemp("large")
    sparse_file(directory / "x.safetensors", 128 * MIB, dtype="F16", itemsize=2)
    code = "source, num_elements = directory / 'x.safetensors', 64 << 20\n" + _USES + _LARGE
    code += "limit_address_space(96 << 20)\n" + "".join(f"attempt(lambda: {use})\n" for use in TOO_LARGE.values())
    return dict(zip(TOO_LARGE, in_a_child(zygote, code, directory), strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not obeyed everywhere")
@pytest.mark.parametrize("use", TOO_LARGE)
def test_c213_too_little_address_space(use: str, without_address_space: dict[str, str]) -> None:
    assert without_address_space[use].startswith("refused ")


THREADED = {
    "load": "sync.load(source)",
    "copy": "sync.load(source, memory='copy', budget_bytes=1 << 20)",
    "stream": "stream()",
    "load_into": "into()",
    "verify": "sync.load(hashed, verify=True)",
    "prefetch": "sync.HostCache(1 << 30, device='cpu').prefetch(source)",
    "warm_start": "warm()",
    "save": "sync.save(sync_tensors, directory / 'out.safetensors')",
    "saver": "sync.Saver().save(sync_tensors, directory / 'out2.safetensors').result()",
    "convert": "sync.convert(source, directory / 'converted')",
}

_THREADS = """
hashed, source = directory / "hashed", directory / "model"
sync_tensors = {f"a.{k}": torch.ones(1000, 1000) for k in range(4)}

def module():
    module = nn.Module()
    module.layer = nn.ParameterList([nn.Parameter(torch.empty(300, 300, device="meta")) for _ in range(20)])
    return module

def warm():
    with sync.warm_start(module(), source) as warm:
        warm.done()

def into():
    sync.load_into(module(), source, assign=True)

sync.save(sync_tensors, hashed, hash="sha256")
"""


@pytest.fixture(scope="module")
def with_few_threads(zygote: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, str]]:
    """Return a function that returns the outcome of each use in a process that can start so many threads at a time."""
    directory = tmp_path_factory.mktemp("threads")
    write_checkpoint(directory / "model", {f"layer.{k}": torch.ones(300, 300) for k in range(20)}, 2)

    @functools.cache
    def outcomes(count: int) -> dict[str, str]:
        # Stacks that are larger than what may still be mapped.
        code = _USES + _THREADS + "threading.stack_size(1 << 30)\n"
        code += f"limit_address_space({count} * (1 << 30) + (512 << 20))\n"
        code += "".join(f"attempt(lambda: {use})\n" for use in THREADED.values())
        return dict(zip(THREADED, in_a_child(zygote, code, directory), strict=True))

    return outcomes


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not obeyed everywhere")
@pytest.mark.parametrize("use", THREADED)
def test_c213_no_thread_can_be_started(use: str, with_few_threads: Callable[[int], dict[str, str]]) -> None:
    found = with_few_threads(0)[use]
    assert found.startswith("refused ") or found == "done"


@pytest.mark.matrix
@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not obeyed everywhere")
@pytest.mark.parametrize("use", [use for use in THREADED if use not in ("convert", "warm_start")])
def test_c213_one_thread_must_do(use: str, with_few_threads: Callable[[int], dict[str, str]]) -> None:
    assert with_few_threads(1)[use] == "done"


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS is not obeyed everywhere")
def test_c213_a_conversion_with_one_thread(with_few_threads: Callable[[int], dict[str, str]]) -> None:
    found = with_few_threads(1)["convert"]
    assert found.startswith("refused ") or found == "done"


def test_c213_no_memory_for_staging() -> None:
    with pytest.raises(stio.StioError):
        sync.load(SOURCE, device=FakeDevice(refuse_staging=1))


# 214. More shards than descriptors.

MANY = 1000


@pytest.fixture(scope="module")
def many_shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {f"layer.{k}": torch.full((2,), float(k)) for k in range(MANY)}
    directory = write_checkpoint(tmp_path_factory.mktemp("many"), tensors, MANY)
    states = {}
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        states[path.name] = (FileState(len(data), hashlib.sha256(data).hexdigest()),)
    manifest = Manifest("sha256", states).encode()
    (directory / "model.safetensors.manifest.json").write_bytes(manifest)
    return directory


_MANY = """
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

def require(found):
    assert list(found) == ["layer.777"], list(found)
    assert found["layer.777"].tolist() == [777.0, 777.0]

def read():
    with sync.open(directory) as checkpoint:
        assert checkpoint.info("layer.777").shape == (2,)
        require({"layer.777": checkpoint.read("layer.777")})

def stream():
    with sync.open(directory) as checkpoint:
        require(dict(checkpoint.stream(["layer.777"])))

class Module(nn.Module):
    def __init__(self, device="cpu"):
        super().__init__()
        self.layer = nn.Module()
        self.layer.register_parameter("777", nn.Parameter(torch.zeros(2, device=device)))

def into(assign=False):
    module = Module()
    sync.load_into(module, directory, strict=False, assign=assign)
    require(dict(module.state_dict()))

def warm():
    module = Module("meta")
    with sync.warm_start(module, directory, strict=False) as warm:
        warm.done()
    require(dict(module.state_dict()))

def reads():
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    with sync.open(directory) as checkpoint:
        assert len(checkpoint) == 1000
        before = descriptors()
        streams = [checkpoint.stream([f"layer.{k}", f"layer.{k + 1}"]) for k in range(10)]
        for k, stream in enumerate(streams):
            assert {name: tensor[0].item() for name, tensor in stream} == {f"layer.{k}": k, f"layer.{k + 1}": k + 1}
        for k in range(0, 1000, 100):
            assert checkpoint.read(f"layer.{k}").tolist() == [k, k]
        assert eventually(lambda: descriptors() <= before), (before, descriptors())

def command(*arguments):
    from click.testing import CliRunner
    from stio.cli.main import main
    result = CliRunner().invoke(main, [*arguments, str(directory)])
    assert result.exit_code == 0, result.output

def verified():
    with sync.open(directory, verify=True) as checkpoint:
        require({"layer.777": checkpoint.read("layer.777")})

def unknown():
    try:
        sync.load(directory, names=["layer.777", "absent"])
    except stio.TensorNotFoundError:
        return
    raise AssertionError

"""

FEW_OF_MANY = {
    "name": "require(sync.load(directory, names='layer.777'))",
    "names": "require(sync.load(directory, names=['layer.777']))",
    "predicate": "require(sync.load(directory, names=lambda name: name == 'layer.777'))",
    "read": "read()",
    "stream": "stream()",
    "load_into": "into()",
    "load_into assign": "into(assign=True)",
    "lenient predicate": "require(sync.load(directory, names=lambda name: name == 'layer.777', strict=False))",
    "slices": "require(sync.load(directory, names=['layer.777'], slices={'layer.777': slice(0, 2)}))",
    "copy": "require(sync.load(directory, names=['layer.777'], memory='copy'))",
    "device": "require(sync.load(directory, names=['layer.777'], device={'': FakeDevice(), 'layer.777': 'cpu'}))",
    "index": "require(sync.load(directory / 'model.safetensors.index.json', names='layer.777'))",
    "reads": "reads()",
    "warm_start": "warm()",
    "verify": "verified()",
    "inspect": "command('inspect')",
    "unknown name": "unknown()",
}


@pytest.mark.matrix
@pytest.mark.parametrize("use", FEW_OF_MANY)
def test_c214_one_name_of_a_thousand_shards(use: str, zygote: Any, many_shards: Path) -> None:
    assert in_a_child(zygote, _MANY + f"attempt(lambda: {FEW_OF_MANY[use]})", many_shards) == ["done"]


class CountingRoot:
    """A directory that remembers which files were opened."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.opened: list[str] = []
        self._root = open_directory(path, follow_symlinks=False)

    def listdir(self) -> list[str]:
        return self._root.listdir()

    def open(self, name: str, *, trusted: bool = False) -> Any:
        self.opened.append(name)
        return self._root.open(name, trusted=trusted)

    def close(self) -> None:
        self._root.close()


def _shards_opened(path: Path, **keywords: Any) -> list[str]:
    root = CountingRoot(path)
    try:
        sync.load(root, **keywords)
    finally:
        root.close()
    return [name for name in root.opened if name.endswith(".safetensors")]


TIED = {"a": torch.zeros(3), "b": torch.ones(3), "c": torch.full((3,), 2.0)}


@pytest.mark.parametrize(
    ("keywords", "count"),
    [
        ({"names": "a"}, 1),
        ({"names": ["a", "b"]}, 2),
        ({"names": iter(["b"])}, 1),
        ({"names": lambda name: name == "c"}, 1),
        ({"names": lambda name: name == "c", "strict": False}, 3),
        ({"names": "a", "strict": False}, 1),
        ({"names": "a", "slices": {"b": slice(0, 1)}}, 2),
        ({}, 3),
        ({"names": []}, 0),
    ],
    ids=["one", "two", "iterator", "predicate", "lenient predicate", "lenient", "slices", "all", "none"],
)
def test_c214_a_load_opens_the_shards_that_hold_its_names(keywords: dict[str, Any], count: int, tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", TIED, 3)
    assert len(_shards_opened(tmp_path / "m", **keywords)) == count


@pytest.mark.parametrize("names", ["tied", ["a", "tied"], lambda name: name == "tied", None], ids=repr)
@pytest.mark.parametrize("few", [True, False], ids=["in turns", "kept open"])
def test_c214_aliases(names: Any, few: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if few:
        monkeypatch.setattr("stio.storage.checkpoint.shards.max_open_files", lambda: 1)
    shared = torch.ones(2000)
    sync.save({"a": torch.zeros(2000), "b": shared, "tied": shared}, tmp_path / "m", max_shard_size=8000)
    expected = {"a": torch.zeros(2000), "b": shared, "tied": shared}
    wanted = (
        set(expected) if names is None else {"tied"} if callable(names) else {*names} if names != "tied" else {"tied"}
    )
    require_equal(sync.load(tmp_path / "m", names=names), {name: expected[name] for name in expected if name in wanted})
    require_equal(sync.load(tmp_path / "m", names=["a"]), {"a": expected["a"]})


def test_c214_a_predicate_is_called_once_for_each_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", TIED, 3)
    asked: list[str] = []
    sync.load(tmp_path / "m", names=lambda name: asked.append(name) is None)
    assert sorted(asked) == ["a", "b", "c"]


@pytest.fixture
def in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint of three shards where one file may stay open."""
    monkeypatch.setattr("stio.storage.checkpoint.shards.max_open_files", lambda: 1)
    return write_checkpoint(tmp_path / "m", TIED, 3)


SHARD_OF_B = "model-00002-of-00003.safetensors"


def _rewrite(directory: Path) -> None:
    file = directory / SHARD_OF_B
    data = file.read_bytes()
    os.utime(file, ns=(1, 1))
    file.write_bytes(data)


CHANGES: dict[str, Callable[[Path], object]] = {
    "replaced": lambda m: save_file({"b": torch.zeros(3)}, m / "new").replace(m / SHARD_OF_B),
    "rewritten": _rewrite,
    "removed": lambda m: (m / SHARD_OF_B).unlink(),
    "saved": lambda m: sync.save({name: tensor + 1 for name, tensor in TIED.items()}, m, max_shard_size=12),
}


@pytest.mark.matrix
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("use", ["read", "stream", "load_into"])
def test_c214_no_other_generation_gets_in(change: str, use: str, in_turns: Path) -> None:
    module = nn.Module()
    module.b = nn.Parameter(torch.full((3,), 7.0))
    with sync.open(in_turns, strict=False) as checkpoint:
        require_equal({"b": checkpoint.read("b")}, {"b": TIED["b"]})
        CHANGES[change](in_turns)
        with nothing_left(), pytest.raises(stio.ChangedDuringReadError):
            if use == "read":
                checkpoint.read("b")
            elif use == "stream":
                dict(checkpoint.stream(["a", "b"]))
            else:
                checkpoint.load_into(module)
    assert module.b.tolist() == [7, 7, 7]


def test_c214_a_directory_that_is_renamed_stays_the_same(in_turns: Path) -> None:
    with nothing_left(), sync.open(in_turns) as checkpoint:
        in_turns.rename(in_turns.with_name("old"))
        write_checkpoint(in_turns, {name: tensor + 1 for name, tensor in TIED.items()}, 3)
        require_equal(checkpoint.load(), TIED)
        require_equal(dict(checkpoint.stream()), TIED)


def test_c214_what_is_opened_again_is_closed_again(in_turns: Path, tmp_path: Path) -> None:
    state = {"m": {"step": torch.ones(3000)}, "n": torch.zeros(3000)}
    sync.save_state(state, tmp_path / "s", max_shard_size=12000)
    with nothing_left():
        require_equal(sync.load(in_turns), TIED)
        assert torch.equal(sync.load_state(tmp_path / "s")["m"]["step"], torch.ones(3000))
        sync.convert(in_turns, tmp_path / "all.safetensors")
        with sync.HostCache(MIB, device="cpu") as cache:
            cache.prefetch(in_turns)
            assert cache.stats().entries == 3
            require_equal(sync.load(in_turns, cache=cache), TIED)
        with pytest.raises(stio.SliceError), sync.open(in_turns) as checkpoint:
            checkpoint.read("a", slice("x"))
    require_equal(sync.load(tmp_path / "all.safetensors"), TIED)


def test_c214_a_shard_that_is_not_wanted_may_be_missing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "m", TIED, 3)
    (tmp_path / "m" / SHARD_OF_B).unlink()
    require_equal(sync.load(tmp_path / "m", names=["a"]), {"a": TIED["a"]})
    with pytest.raises(stio.CheckpointNotFoundError):
        sync.load(tmp_path / "m")
    with pytest.raises(stio.CheckpointNotFoundError):
        sync.load(tmp_path / "m", names=["a", "b"])


@pytest.mark.slow
def test_c214_all_of_a_thousand_shards(zygote: Any, many_shards: Path) -> None:
    """All of them load, or the error says what to do."""
    code = "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))\nattempt(lambda: sync.load(directory))\n"
    (found,) = in_a_child(zygote, code, many_shards)
    assert found == "done" or (found.startswith("refused StorageError") and "ulimit -n" in found)


# 215. Two devices, of which one fails.


class CountedDevice(FakeDevice):
    """Fails at the n-th look at one of its attributes, once the other device makes staging memory."""

    def __init__(self, fail_at: int, other: SlowDevice) -> None:
        super().__init__()
        self._left, self._other = fail_at, other
        self.has_failed = False

    def __getattribute__(self, name: str) -> Any:
        if name in ("allocate", "copy", "device", "empty", "on_stream", "staging"):
            self._left -= 1
            if self._left < 0:
                self._other.begun.wait(0.02)
                self.has_failed = True
                raise stio.DeviceError("the device failed, as it was asked to")
        return super().__getattribute__(name)


class SlowDevice(FakeDevice):
    """Says when it makes staging memory, which takes a while."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.num_begun, self.num_inside = threading.Event(), 0, 0
        self._pause = threading.Event()

    def staging(self, nbytes: int) -> Any:
        self.num_begun += 1
        self.num_inside += 1
        self.begun.set()
        self._pause.wait(0.03)
        try:
            return super().staging(nbytes)
        finally:
            self.num_inside -= 1


@pytest.mark.slow
@pytest.mark.parametrize("first", ["a", "b"])
def test_c215_one_device_fails_and_the_other_gives_its_memory_back(first: str) -> None:
    tensors = {f"{'ab'[k % 2]}.{k}": torch.zeros(3000) for k in range(20)}
    source = MemoryRoot(checkpoint_files(tensors))
    for n in range(200):
        good = SlowDevice()
        bad = CountedDevice(n, good)
        devices = {"a": good, "b": bad} if first == "a" else {"a": bad, "b": good}
        with nothing_left():
            try:
                found = sync.load(source, device=devices, budget_bytes=MIB)
            except stio.DeviceError:
                pass
            else:
                del found
            at_the_end = good.num_begun, good.num_inside
        # What goes on would begin or end one more piece until its thread is gone.
        assert at_the_end == (good.num_begun, 0), n
        assert (good.staging_bytes, good.used_bytes) == (0, 0), n
        if not bad.has_failed:
            break
    assert 5 < n < 199


# 217. Errors that say what to do.


def _message_of(call: Callable[[], Any], *kinds: type[BaseException]) -> str:
    """Return what a call says that is refused, at once or when it is awaited."""

    async def awaited(awaitable: Any) -> None:
        await awaitable

    with pytest.raises(kinds) as caught:
        found = call()
        if asyncio.iscoroutine(found):
            asyncio.run(awaited(found))
    return str(caught.value)


def _entering(context: Any) -> None:
    with context:
        pass


def _command(*arguments: str) -> None:
    """Raise what a command prints, where it fails."""
    pytest.importorskip("click")
    from click.testing import CliRunner

    from stio.cli.main import main

    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2, result.output
    raise stio.StioError(result.output)


SOURCE_CALLS: dict[str, Callable[[Any], Any]] = {
    "load": lambda source: stio.load(source),
    "sync.load": lambda source: sync.load(source),
    "sync.open": lambda source: _entering(sync.open(source)),
    "load_into": lambda source: stio.load_into(nn.Linear(2, 2), source),
    "load_state": lambda source: stio.load_state(source),
    "sync.warm_start": lambda source: _entering(sync.warm_start(nn.Linear(2, 2, device="meta"), source)),
    "prefetch": lambda source: stio.HostCache(MIB, device="cpu").prefetch(source),
    "sync.load_state": lambda source: sync.load_state(source),
    "convert": lambda source: stio.convert(source, "out.safetensors"),
    "cli": lambda source: _command("inspect", source),
    "cli load": lambda source: _command("load", source),
    "cli convert": lambda source: _command("convert", source, "out.safetensors"),
}


@pytest.mark.parametrize(
    ("call", "source"),
    [
        *((call, "foo://bucket/model") for call in SOURCE_CALLS),
        ("load", "ftp://host/model.safetensors"),
        ("load", "abfs://host/model.safetensors.index.json"),
        ("convert", "ftp://host/w.bin"),
        ("load", "FOO://bucket/model/"),
    ],
)
def test_c217_a_scheme_that_is_not_known(call: str, source: str) -> None:
    message = _message_of(lambda: SOURCE_CALLS[call](source), stio.StioError, ValueError)
    assert "scheme" in message
    assert source[:3].lower() in message.lower()


def test_c217_a_url_of_a_file_of_this_machine() -> None:
    message = _message_of(lambda: SOURCE_CALLS["load"]("file:///w.bin"), stio.StioError)
    assert message.endswith("pass the path of a file of this machine, not a URL: '/w.bin'")


def test_c217_a_url_that_was_made_a_path() -> None:
    message = _message_of(lambda: sync.load(Path("s3://bucket/model")), stio.StioError, ValueError)
    assert "s3://" in message


@pytest.mark.parametrize("call", SOURCE_CALLS)
def test_c217_what_looks_like_a_hub_id(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = _message_of(lambda: SOURCE_CALLS[call]("meta-llama/Llama-3.1-8B"), stio.StioError)
    assert "pass 'hf://meta-llama/Llama-3.1-8B'" in message


@pytest.mark.parametrize("call", SOURCE_CALLS)
def test_c217_a_path_below_a_home_directory(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "os.path.expanduser" in _message_of(lambda: SOURCE_CALLS[call]("~/model"), stio.StioError)
    Path("~").mkdir()
    Path("~", "model").mkdir()  # it is the name of a directory like any other
    assert "expanduser" not in _message_of(lambda: SOURCE_CALLS[call]("~/model"), stio.StioError)


def test_c217_a_hub_id_as_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`tests/remote/test_hub.py` has those that are right."""
    monkeypatch.chdir(tmp_path)
    assert "pass the URL as text" in _message_of(lambda: sync.load(Path("hf://a/b")), stio.StioError)
    assert "not of datasets" in _message_of(lambda: sync.load("hf://datasets/a/b"), stio.StioError)
    assert "scheme" not in _message_of(lambda: sync.load("s3:/"), stio.StioError)


@pytest.mark.parametrize(
    ("names", "message"),
    [([1], "a name must be a str, not int"), (5, "names must be a str or several of them, not int")],
)
def test_c217_what_is_no_name(names: Any, message: str) -> None:
    root = MemoryRoot(checkpoint_files({"w": MATRIX, "v": MATRIX}, 2))
    with pytest.raises(TypeError, match=message):
        sync.load(root, names=names)
    with sync.open(root) as checkpoint:
        with pytest.raises(TypeError, match=message):
            checkpoint.load(names)
        with pytest.raises(TypeError, match=message):
            list(checkpoint.stream(names))
        with pytest.raises(TypeError, match=message):
            checkpoint.stream().promote(names)


@pytest.mark.parametrize(
    "source",
    ["models/x.safetensors", "/models/x", "a/b/c", "./a/b", "../a/b", "here/b", "w.pt", "a/model.bin", "C:/x", "x:y"],
)
def test_c217_what_is_a_path_looks_like_no_hub_id(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    message = _message_of(lambda: sync.load(source), stio.CheckpointNotFoundError)
    assert "hf:" not in message
    assert "scheme" not in message


def test_c217_a_directory_that_is_named_like_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_checkpoint(tmp_path / "foo:" / "bucket", {"w": MATRIX}, 2)
    require_equal(sync.load("foo://bucket"), {"w": MATRIX})
    assert "scheme" not in _message_of(lambda: sync.load("foo://absent"), stio.CheckpointNotFoundError)
    write_checkpoint(tmp_path / "s3:" / "bucket", {"w": MATRIX}, 2)
    require_equal(sync.load(Path("s3:") / "bucket"), {"w": MATRIX})
    require_equal(sync.load("./s3://bucket"), {"w": MATRIX})


def _write_pickle(kind: str, directory: Path) -> Path:
    """Write what `torch.save` writes under a name of some kind; return what is given to a load."""
    name, _, layout = kind.partition(", ")
    path = directory / name
    path.parent.mkdir(exist_ok=True)
    torch.save({"weight": torch.zeros(2, 2)}, path, _use_new_zipfile_serialization=layout != "old format")
    if layout == "directory":
        return path.parent
    if layout == "index":
        index = path.parent / "pytorch_model.bin.index.json"
        index.write_text(json.dumps({"metadata": {}, "weight_map": {"weight": path.name}}))
        return index
    return path


@pytest.mark.parametrize(
    "kind",
    [
        "w.pt", "w.bin", "w.pth, old format", "model.safetensors", "model.safetensors, old format",
        "m/pytorch_model.bin, directory", "m/pytorch_model.bin, index", "m/a.ckpt, directory",
    ],
)  # fmt: skip
def test_c217_a_file_of_torch_save(kind: str, tmp_path: Path) -> None:
    source = _write_pickle(kind, tmp_path)
    message = _message_of(lambda: sync.load(source), stio.StioError)
    assert "stio convert" in message


TYPO: dict[str, Any] = {"devise": "cpu"}

TYPO_CALLS: dict[str, Callable[[], Any]] = {
    "load": lambda: stio.load("x", **TYPO),
    "open": lambda: stio.open("x", **TYPO),
    "load_into": lambda: stio.load_into(nn.Linear(1, 1), "x", **TYPO),
    "load_state": lambda: stio.load_state("x", **TYPO),
    "warm_start": lambda: stio.warm_start(nn.Linear(1, 1, device="meta"), "x", **TYPO),
    "save": lambda: stio.save({}, MemoryDestination(), **TYPO),
    "save_state": lambda: stio.save_state({}, MemoryDestination(), **TYPO),
    "Saver": lambda: stio.Saver(**TYPO),
    "Saver.save": lambda: stio.Saver().save({}, MemoryDestination(), **TYPO),
    "Saver.save_state": lambda: stio.Saver().save_state({}, MemoryDestination(), **TYPO),
    "convert": lambda: convert("x", "y", **TYPO),
    "HostCache": lambda: stio.HostCache(1, **TYPO),
    "prefetch": lambda: stio.HostCache(1).prefetch("x", **TYPO),
    "sync.load": lambda: sync.load("x", **TYPO),
    "sync.open": lambda: sync.open("x", **TYPO),
    "sync.load_into": lambda: sync.load_into(nn.Linear(1, 1), "x", **TYPO),
    "sync.load_state": lambda: sync.load_state("x", **TYPO),
    "sync.warm_start": lambda: sync.warm_start(nn.Linear(1, 1, device="meta"), "x", **TYPO),
    "sync.save": lambda: sync.save({}, MemoryDestination(), **TYPO),
    "sync.save_state": lambda: sync.save_state({}, MemoryDestination(), **TYPO),
    "sync.Saver": lambda: sync.Saver(**TYPO),
    "sync.Saver.save": lambda: sync.Saver().save({}, MemoryDestination(), **TYPO),
    "sync.convert": lambda: sync.convert("x", "y", **TYPO),
}

PLAIN_CALLS: dict[str, Callable[[], Any]] = {
    "Checkpoint.load_into": lambda: stio.open("x").load_into(nn.Linear(1, 1), **TYPO),
    "Limits": lambda: stio.Limits(**TYPO),
    "Trace": lambda: stio.Trace(**TYPO),
}


def _require_told(name: str, call: Callable[[], Any]) -> None:
    message = _message_of(call, TypeError)
    assert "devise" in message
    assert name.rpartition(".")[2] in message
    assert not re.search(r"LoadOptions|Keywords|Base\b|Operation", message), message


@pytest.mark.parametrize("name", TYPO_CALLS)
def test_c217_a_keyword_that_there_is_not(name: str) -> None:
    _require_told(name, TYPO_CALLS[name])


@pytest.mark.parametrize("name", PLAIN_CALLS)
def test_c217_a_keyword_that_a_plain_signature_lacks(name: str) -> None:
    _require_told(name, PLAIN_CALLS[name])
