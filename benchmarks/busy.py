"""Measure every operation that moves tensors, alone and beside a busy Python thread: `python -m benchmarks.busy`.

    python -m benchmarks.busy --dir DIR                       # 10,000 tensors of 4 KiB, and 100 of 4 MB
    python -m benchmarks.busy --layout many --operations load stream --rounds 5
    python -m benchmarks.busy --tree BEFORE --tree AFTER      # the same operations by the stio of other source trees
    python -m benchmarks.busy --report FILE                   # the tables again, from the raw figures of --out

Each measurement has a process of its own. It does the operation once with three small tensors, which imports what it
needs and starts its threads, prepares what the operation takes (a module, an open checkpoint, a filled cache), and
then measures the time from the call to its end. On a device the end is when the device has done all its work. What a
call returns is released after that; only a stream's tensors are released as they come, as its users do. Files are in
the page cache. Saves are durable, so they wait for the disk. A `Saver` has made one save of the same tensors before.

The modes are: alone; beside a thread that counts in Python; beside a process that counts, which takes as much of the
processors, but not the interpreter's lock; beside the thread with `switch_interval=0.0005`, where an operation takes
that. Rounds are interleaved. In each round the source trees measure an operation one directly after another.

The lag of the event loop is measured in other processes, since its beats need the GIL too: it is the delay of sleeps of
1 ms while the operation is repeated. The baseline is the same without the operation.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import count, cycle
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import files, machine, meters, pagecache

ROOT = Path(__file__).resolve().parent.parent

MODES = ("alone", "busy", "busy process", "busy, 0.5 ms")
FACES = ("async", "blocking")
SWITCH_SECONDS = 0.0005
FEWEST_LAGS, MAX_LAG_SECONDS = meters.MIN_BEATS, 20.0
"""What a percentile is made of, at least, unless that takes longer."""

MAX_SECONDS = 300
"""For one process."""

QUIET_CPUS = 0.2
"""More CPU time than this of other processes changes the figures: they delay the busy thread, which then has no GIL."""

LAYOUTS = {
    "many": files.many_layout(10_000, 4096),
    "large": files.many_layout(100, 4_000_000),
    "small": files.many_layout(3, 4096),
}
"""The tensors of each checkpoint; `small` is what the first, unmeasured call has."""

Call = Callable[[], Any]
"""What is timed: returns the result, which is released afterwards, as an awaitable."""


# What an operation works with.


@dataclass
class Bench:
    """What the operations of one process share."""

    stio: Any
    """The package that is measured."""

    directory: Path
    """With the checkpoints; what is saved goes into its folder `saves`."""

    layout: str = "many"
    """A key of `LAYOUTS`."""

    device: Any = "cpu"
    """Where tensors are loaded to, or saved from."""

    is_blocking: bool = False
    """Whether the functions of `stio.sync` are measured."""

    switch_interval: float | None = None
    """Passed to each operation that takes it."""

    number: int = field(default=0, init=False)

    @property
    def api(self) -> Any:
        """The module whose functions are measured."""
        return self.stio.sync if self.is_blocking else self.stio

    @property
    def keywords(self) -> dict[str, Any]:
        """Keywords of a save, and of a load into memory that exists."""
        return {"switch_interval": self.switch_interval}

    @property
    def loads(self) -> dict[str, Any]:
        """Keywords of a load."""
        return {"device": self.device, **self.keywords}

    def path(self, suffix: str = ".safetensors") -> Path:
        """Return a checkpoint to read; its files are in the page cache."""
        return self.directory / f"{self.layout}{suffix}"

    def target(self, suffix: str = ".safetensors") -> Path:
        """Return a path that nothing was saved to."""
        self.number += 1
        return self.directory / "saves" / f"{os.getpid()}-{self.number}{suffix}"

    async def wait(self, value: Any) -> Any:
        """Return the result of a call. A blocking call has returned it; nothing is awaited then."""
        return value if self.is_blocking else await value

    @asynccontextmanager
    async def entered(self, context: Any) -> AsyncIterator[Any]:
        """Enter a context manager of the API."""
        if self.is_blocking:
            with context as value:
                yield value
        else:
            async with context as value:
                yield value

    @cached_property
    def _tensors(self) -> dict[str, Any]:
        return {}

    def tensors(self) -> dict[str, Any]:
        """Return the tensors of the layout on the device, filled."""
        import torch

        if self.layout not in self._tensors:
            tensors = LAYOUTS[self.layout].tensors
            made = {tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16) for tensor in tensors}
            files.fill_arrays(array for _, array in meters.tensor_arrays(made))
            self._tensors[self.layout] = {name: tensor.to(self.device) for name, tensor in made.items()}
        found: dict[str, Any] = self._tensors[self.layout]
        return found

    def state(self) -> dict[str, Any]:
        """Return the same tensors as an optimizer's state: a step and two moments for each parameter."""
        values = list(self.tensors().values())
        keys = ("exp_avg", "exp_avg_sq")
        pairs = [dict(zip(keys, values[k : k + 2], strict=False)) for k in range(0, len(values), 2)]
        return {"state": {k: {"step": 1, **pair} for k, pair in enumerate(pairs)}, "param_groups": [{"lr": 3e-4}]}

    def module(self, device: Any) -> Any:
        """Return a module with a parameter for each tensor of the layout."""
        import torch

        root = torch.nn.Module()
        for tensor in LAYOUTS[self.layout].tensors:
            *parents, last = tensor.name.split(".")
            owner = root
            for part in parents:
                if part not in owner._modules:
                    owner.add_module(part, torch.nn.Module())
                owner = owner._modules[part]
            data = torch.zeros(tensor.shape, dtype=torch.bfloat16, device=device)
            owner.register_parameter(last, torch.nn.Parameter(data, requires_grad=False))
        return root

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.device != "cpu":
            import torch

            torch.accelerator.synchronize(self.device)


# The operations. Each one prepares, yields the call that is timed, and cleans up.


@asynccontextmanager
async def _load(bench: Bench, **options: Any) -> AsyncIterator[Call]:
    yield lambda: bench.wait(bench.api.load(bench.path(), **bench.loads, **options))


@asynccontextmanager
async def _load_verified(bench: Bench) -> AsyncIterator[Call]:
    yield lambda: bench.wait(bench.api.load(bench.path("-hashed"), verify=True, **bench.loads))


@asynccontextmanager
async def _open(bench: Bench) -> AsyncIterator[Call]:
    async def call() -> Any:
        async with bench.entered(bench.api.open(bench.path(), **bench.loads)) as checkpoint:
            return [checkpoint.info(name) for name in checkpoint.keys()]  # noqa: SIM118 - no mapping

    yield call


@asynccontextmanager
async def _checkpoint_load(bench: Bench) -> AsyncIterator[Call]:
    async with bench.entered(bench.api.open(bench.path(), **bench.loads)) as checkpoint:
        yield lambda: bench.wait(checkpoint.load())


@asynccontextmanager
async def _read(bench: Bench) -> AsyncIterator[Call]:
    async with bench.entered(bench.api.open(bench.path(), **bench.loads)) as checkpoint:
        names = checkpoint.keys()
        yield lambda: bench.wait(checkpoint.read(names[len(names) // 2]))


@asynccontextmanager
async def _stream(bench: Bench) -> AsyncIterator[Call]:
    async def call(checkpoint: Any) -> None:
        if bench.is_blocking:
            for _, tensor in checkpoint.stream():
                del tensor
        else:
            async for _, tensor in checkpoint.stream():
                del tensor

    async with bench.entered(bench.api.open(bench.path(), **bench.loads)) as checkpoint:
        yield partial(call, checkpoint)


@asynccontextmanager
async def _load_into(bench: Bench, *, assign: bool = False) -> AsyncIterator[Call]:
    module = bench.module("meta" if assign else bench.device)
    options = bench.loads if assign else bench.keywords
    yield lambda: bench.wait(bench.api.load_into(module, bench.path(), assign=assign, **options))


@asynccontextmanager
async def _checkpoint_load_into(bench: Bench) -> AsyncIterator[Call]:
    module = bench.module(bench.device)
    async with bench.entered(bench.api.open(bench.path(), **bench.keywords)) as checkpoint:
        yield lambda: bench.wait(checkpoint.load_into(module))


@asynccontextmanager
async def _warm_start(bench: Bench) -> AsyncIterator[Call]:
    module = bench.module("meta")

    async def call() -> None:
        async with bench.entered(bench.api.warm_start(module, bench.path(), **bench.loads)) as warm:
            await bench.wait(warm.done())

    yield call


def _cache(bench: Bench) -> Any:
    return bench.api.HostCache(2 * LAYOUTS[bench.layout].data_bytes + (64 << 20), device=bench.device)


@asynccontextmanager
async def _prefetch(bench: Bench) -> AsyncIterator[Call]:
    with _cache(bench) as cache:
        yield lambda: bench.wait(cache.prefetch(bench.path()))


@asynccontextmanager
async def _swap(bench: Bench) -> AsyncIterator[Call]:
    """Two models, of which one fits at a time; both are in host memory."""
    data_bytes = LAYOUTS[bench.layout].data_bytes
    pool = bench.api.ModelPool(
        device=bench.device, device_bytes=data_bytes * 3 // 2, host_bytes=2 * data_bytes + (256 << 20)
    )
    names = cycle("01")
    async with bench.entered(pool):

        async def swap() -> None:
            async with bench.entered(pool.use(next(names))):
                pass

        for name in "01":
            pool.add(name, bench.path())
            await bench.wait(pool.prefetch(name))
            await swap()
        yield swap


@asynccontextmanager
async def _update(bench: Bench) -> AsyncIterator[Call]:
    """New weights at the same addresses."""
    pool = bench.api.ModelPool(device=bench.device, device_bytes=2 * LAYOUTS[bench.layout].data_bytes + (128 << 20))
    async with bench.entered(pool):
        pool.add("model", bench.path())
        async with bench.entered(pool.use("model")):
            pass
        yield lambda: bench.wait(pool.update("model", bench.path()))


@asynccontextmanager
async def _cached_load(bench: Bench) -> AsyncIterator[Call]:
    with _cache(bench) as cache:
        await bench.wait(cache.prefetch(bench.path()))
        yield lambda: bench.wait(bench.api.load(bench.path(), cache=cache, **bench.loads))


@asynccontextmanager
async def _save(bench: Bench) -> AsyncIterator[Call]:
    tensors = bench.tensors()
    yield lambda: bench.wait(bench.api.save(tensors, bench.target(), **bench.keywords))


@asynccontextmanager
async def _save_state(bench: Bench) -> AsyncIterator[Call]:
    state = bench.state()
    yield lambda: bench.wait(bench.api.save_state(state, bench.target(), **bench.keywords))


@asynccontextmanager
async def _saver(bench: Bench, *, method: str, is_durable: bool) -> AsyncIterator[Call]:
    value = bench.state() if method == "save_state" else bench.tensors()

    async def ended(pending: Any) -> Any:
        return pending.result() if bench.is_blocking else await pending

    async def call(*, waits: bool) -> Any:
        pending = await bench.wait(getattr(saver, method)(value, bench.target()))
        return await ended(pending) if waits else pending

    async with bench.entered(bench.api.Saver(**bench.keywords)) as saver:
        await call(waits=True)
        yield partial(call, waits=is_durable)
        for pending in saver.pending:
            await ended(pending)


@asynccontextmanager
async def _load_state(bench: Bench) -> AsyncIterator[Call]:
    yield lambda: bench.wait(bench.api.load_state(bench.path("-state.safetensors"), **bench.loads))


@asynccontextmanager
async def _convert(bench: Bench) -> AsyncIterator[Call]:
    yield lambda: bench.wait(bench.api.convert(bench.path(".pt"), bench.target()))


@asynccontextmanager
async def _follow(bench: Bench) -> AsyncIterator[Call]:
    """One element of a tensor in eight changes; the delta is saved and applied to a module."""
    tensors, run, steps = bench.tensors(), bench.target().with_suffix(""), count()

    async def save() -> None:
        for tensor in list(tensors.values())[::8]:
            tensor.view(-1)[0] += 1
        pending = await bench.wait(saver.save(tensors, run / f"step-{next(steps)}"))
        pending.result() if bench.is_blocking else await pending

    async def call() -> Any:
        await save()
        return await bench.wait(updates.apply())

    async with bench.entered(bench.api.Saver(full_every=64, keep_last=2)) as saver:
        await save()
        async with bench.entered(bench.api.follow(bench.module(bench.device), run)) as updates:
            yield call


def _blocking(call: Callable[[Bench], Any]) -> Callable[[Bench], AbstractAsyncContextManager[Call]]:
    """Return an operation that has a blocking form only: a call of the drop-in modules, or of the command line."""

    @asynccontextmanager
    async def operation(bench: Bench) -> AsyncIterator[Call]:
        async def blocking() -> Any:
            return work()

        work = call(bench)
        yield blocking

    return operation


def _load_file(bench: Bench) -> Callable[[], Any]:
    from stio.compat.safetensors.torch import load_file

    return lambda: load_file(bench.path())


def _save_file(bench: Bench) -> Callable[[], Any]:
    from stio.compat.safetensors.torch import save_file

    tensors = bench.tensors()
    return lambda: save_file(tensors, bench.target())


def _verify(bench: Bench) -> Callable[[], Any]:
    from stio.cli.verify import examine

    return lambda: examine(str(bench.path("-hashed")), hash_required=True)


@dataclass(frozen=True, slots=True)
class Operation:
    """A line of the tables."""

    name: str
    prepare: Callable[[Bench], AbstractAsyncContextManager[Call]]
    covers: tuple[str, ...] = ()
    """Public names of `stio` and of `stio.sync` that it measures; `Checkpoint.read` is a method."""

    on_device: bool = False
    """Whether it is measured to or from a device too."""

    has_switch_interval: bool = True
    """Whether it takes `switch_interval`."""

    faces: tuple[str, ...] = FACES


_BLOCKING = ("blocking",)

OPERATIONS = (
    Operation("load", _load, ("load",), on_device=True),
    Operation('load, memory="map"', partial(_load, memory="map")),
    Operation('load, memory="copy"', partial(_load, memory="copy")),
    Operation("load, verify=True", _load_verified),
    Operation("open and list", _open, ("open", "Checkpoint.info", "Checkpoint.keys")),
    Operation("Checkpoint.load", _checkpoint_load, ("Checkpoint.load",)),
    Operation("Checkpoint.read of one", _read, ("Checkpoint.read",), on_device=True),
    Operation("stream", _stream, ("Checkpoint.stream", "Stream.__anext__", "Stream.__next__"), on_device=True),
    Operation("load_into", _load_into, ("load_into",), on_device=True),
    Operation("load_into, assign=True", partial(_load_into, assign=True), on_device=True),
    Operation("Checkpoint.load_into", _checkpoint_load_into, ("Checkpoint.load_into",)),
    Operation("warm_start until done", _warm_start, ("warm_start", "WarmStart.done"), on_device=True),
    Operation("HostCache.prefetch", _prefetch, ("HostCache.prefetch",), has_switch_interval=False),
    Operation("load from a HostCache", _cached_load, ("HostCache.hold",), on_device=True),
    Operation(
        "ModelPool.use, a swap",
        _swap,
        ("ModelPool.use", "ModelPool.prefetch"),
        on_device=True,
        has_switch_interval=False,
    ),
    Operation("ModelPool.update", _update, ("ModelPool.update",), on_device=True, has_switch_interval=False),
    Operation("save", _save, ("save",), on_device=True),
    Operation(
        "Saver.save until staged", partial(_saver, method="save", is_durable=False), ("Saver.save",), on_device=True
    ),
    Operation(
        "Saver.save until durable",
        partial(_saver, method="save", is_durable=True),
        ("PendingSave.__await__", "PendingSave.result"),
        on_device=True,
    ),
    Operation(
        "Saver.save_state until staged", partial(_saver, method="save_state", is_durable=False), ("Saver.save_state",)
    ),
    Operation("save_state", _save_state, ("save_state",), on_device=True),
    Operation("load_state", _load_state, ("load_state",), on_device=True),
    Operation("a delta, saved and followed", _follow, ("follow", "Follower.apply"), has_switch_interval=False),
    Operation("convert from torch.save", _convert, ("convert",), has_switch_interval=False),
    Operation("compat load_file", _blocking(_load_file), has_switch_interval=False, faces=_BLOCKING),
    Operation("compat save_file", _blocking(_save_file), on_device=True, has_switch_interval=False, faces=_BLOCKING),
    Operation("stio verify", _blocking(_verify), has_switch_interval=False, faces=_BLOCKING),
)

MOVE_NO_TENSORS = frozenset(
    {
        *("latest", "preload", "stats"),
        *("Checkpoint.aclose", "Checkpoint.__iter__", "Checkpoint.close", "Checkpoint.open"),
        *("DiskCache.discard", "DiskCache.evict", "DiskCache.fetch", "DiskCache.leftovers", "DiskCache.replacement"),
        "DiskCache.stats",
        *("Follower.__anext__", "Follower.__iter__", "Follower.__next__", "Follower.aclose", "Follower.close"),
        *("Follower.wait", "ModelPool.follow"),
        *("HostCache.close", "HostCache.evict", "HostCache.has", "HostCache.prefetch_by", "HostCache.stats"),
        *("ModelPool.aclose", "ModelPool.add", "ModelPool.close", "ModelPool.names", "ModelPool.stats"),
        *("ModelPool.evict", "ModelPool.remove", "ModelPool.status"),
        *("PendingSave.aclose", "PendingSave.cancel", "PendingSave.comes_before", "PendingSave.complete"),
        *("PendingSave.done", "PendingSave.ended", "PendingSave.outcome", "PendingSave.start"),
        "PendingSave.wait_staged",
        *("RemoteRoot.at", "RemoteRoot.close", "RemoteRoot.listdir", "RemoteRoot.open", "RemoteRoot.open_ahead"),
        "RemoteRoot.list_objects",
        *("SaveOptions.max_shard_bytes", "SaveOptions.with_changes"),
        *("Saver.aclose", "Saver.close"),
        *("Stream.aclose", "Stream.close", "Stream.__iter__", "Stream.promote"),
        *("Trace.add", "Trace.save_chrome", "Trace.save_svg", "Trace.span"),
        *("WarmStart.aclose", "WarmStart.close"),
    }
)
"""Public names that move no tensors, or that only measured ones call."""


# One measurement, in a process of its own.


@dataclass(frozen=True, slots=True)
class Run:
    """One measurement."""

    kind: str
    """`time` or `lag`."""

    tree: str
    """The source tree whose stio is measured."""

    operation: str
    layout: str
    device: str
    face: str
    mode: str

    @property
    def line(self) -> tuple[str, str, str, str]:
        """The line of a table."""
        return (self.operation, self.layout, self.device, self.face)


def measure(run: Run, directory: Path) -> dict[str, Any]:
    """Do one measurement in this process.

    Raises:
        RuntimeError: `stio` is not that of the tree.
    """
    warnings.filterwarnings("ignore", message=".*event loop.*")
    sys.path.insert(0, run.tree)
    import stio
    import stio.sync

    if not Path(stio.__file__).is_relative_to(run.tree):
        raise RuntimeError(f"stio came from {stio.__file__}")
    operation = next(each for each in OPERATIONS if each.name == run.operation)
    device: Any = "cpu"
    if run.device != "cpu":
        from benchmarks import gpu_device

        gpu_device.use(run.device)
        device = gpu_device.device()
    bench = Bench(stio, directory, device=device, is_blocking=run.face == "blocking")
    bench.switch_interval = SWITCH_SECONDS if run.mode == MODES[3] else None
    is_busy = run.mode in (MODES[1], MODES[3])
    with meters.busy_process(run.mode == MODES[2]):
        if run.kind == "lag":
            return asyncio.run(_lag(bench, operation, run.layout, is_busy))
        work = _time(bench, operation, run.layout, is_busy)
        return _at_once(work) if bench.is_blocking else asyncio.run(work)


def _at_once(coroutine: Any) -> Any:
    """Run a coroutine that awaits nothing, without an event loop, since blocking functions warn beside one."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("a blocking operation awaited something")


async def _time(bench: Bench, operation: Operation, layout: str, is_busy: bool) -> dict[str, float]:
    for bench.layout in ("small", layout):
        async with operation.prepare(bench) as call:
            gc.collect()
            bench.synchronize()
            with meters.busy_thread(is_busy and bench.layout == layout):
                start = time.perf_counter()
                result = await call()
                bench.synchronize()
                seconds = time.perf_counter() - start
            del result
    return {"seconds": seconds}


async def _lag(bench: Bench, operation: Operation, layout: str, is_busy: bool) -> dict[str, Any]:
    await _time(bench, operation, "small", False)
    bench.layout = layout
    with meters.busy_thread(is_busy):
        async with meters.Heartbeat() as heart:
            async with heart.recording():
                while len(heart.lags) < FEWEST_LAGS:
                    await asyncio.sleep(0.01)
            baseline, heart.lags = meters.percentiles(heart.lags), []
            deadline, turns = time.monotonic() + MAX_LAG_SECONDS, 0
            while len(heart.lags) < FEWEST_LAGS and time.monotonic() < deadline:
                async with operation.prepare(bench) as call:
                    gc.collect()
                    async with heart.recording():
                        result = await call()
                    del result
                _empty(bench.directory / "saves")
                turns += 1
    return {"baseline": baseline, "lag": meters.percentiles(heart.lags), "beats": len(heart.lags), "turns": turns}


def _empty(directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(exist_ok=True)


# The runs, in turn.


def make_files(directory: Path, layouts: list[str], tree: str) -> None:
    """Write the checkpoints that are loaded, by the stio of one tree."""
    command = (sys.executable, "-m", "benchmarks.busy", "--dir", str(directory), "--tree", tree, "--make", *layouts)
    subprocess.run(command, cwd=ROOT, check=True)


def _make_files(directory: Path, layouts: list[str], tree: str) -> None:
    sys.path.insert(0, tree)
    import torch

    import stio

    (directory / "saves").mkdir(parents=True, exist_ok=True)
    for layout in layouts:
        bench = Bench(stio, directory, layout=layout, is_blocking=True)
        files.write_file(bench.path(), LAYOUTS[layout])
        torch.save(bench.tensors(), bench.path(".pt"))
        stio.sync.save(bench.tensors(), bench.path("-hashed"), hash="sha256")
        stio.sync.save_state(bench.state(), bench.path("-state.safetensors"))


def _make_resident(directory: Path) -> None:
    for path in directory.glob("**/*"):
        if path.suffix in (".safetensors", ".pt") and pagecache.resident_fraction(path) < 1:
            pagecache.fill_by_reads(path)


def plan(options: argparse.Namespace) -> Iterator[list[Run]]:
    """Yield the runs of one round, those that belong together in one list: the same with each tree."""
    for operation in OPERATIONS:
        if options.operations and operation.name not in options.operations:
            continue
        face = options.face if options.face in operation.faces else operation.faces[0]
        for device in options.device:
            if device != "cpu" and not operation.on_device:
                continue
            for layout in options.layout:
                for mode in options.mode:
                    if mode == MODES[3] and not operation.has_switch_interval:
                        continue
                    kinds = [kind for kind in options.kind if kind == "time" or face == "async"]
                    for kind in kinds:
                        yield [
                            Run(kind, str(tree), operation.name, layout, device, face, mode) for tree in options.tree
                        ]


def run_child(run: Run, directory: Path) -> dict[str, Any]:
    """Measure in a fresh process; return figures, or `error`, and how many processors were busy with other work."""
    _empty(directory / "saves")
    _make_resident(directory)
    start, busy, own = time.perf_counter(), machine.busy_cpu_seconds(), _child_cpu_seconds()
    figures = _figures_of_child(run, directory)
    others = machine.busy_cpu_seconds() - busy - (_child_cpu_seconds() - own)
    return {**figures, "other_cpus": max(0.0, others / (time.perf_counter() - start))}


def _child_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _figures_of_child(run: Run, directory: Path) -> dict[str, Any]:
    fields = {name: getattr(run, name) for name in run.__slots__}
    command = (sys.executable, "-m", "benchmarks.busy", "--dir", str(directory), "--child", json.dumps(fields))
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        printed, errors = child.communicate(timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.communicate()
        return {"error": f"no end after {MAX_SECONDS} s"}
    finally:
        _empty(directory / "saves")
    if child.returncode:
        last = (errors.strip().splitlines() or [""])[-1]
        how = signal.Signals(-child.returncode).name if child.returncode < 0 else f"status {child.returncode}"
        return {"error": f"{how}: {last}"}
    figures: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return figures


def run_all(options: argparse.Namespace, add: Callable[[dict[str, Any]], None]) -> None:
    """Do all runs, in interleaved rounds."""
    together = list(plan(options))
    for number in range(options.rounds):
        for place, runs in enumerate(together):
            if runs[0].kind == "lag" and number:
                continue  # its percentiles have hundreds of beats
            for run in runs if (number + place) % 2 == 0 else runs[::-1]:
                figures = run_child(run, options.dir)
                record = {name: getattr(run, name) for name in run.__slots__}
                add({**record, "round": number, **figures})
                _progress(options, number, place, len(together), run, figures)


def _progress(
    options: argparse.Namespace, number: int, place: int, count: int, run: Run, figures: dict[str, Any]
) -> None:
    found = figures.get("error") or figures.get("seconds") or figures["lag"]["p99"]
    where = f"round {number + 1} of {options.rounds}, {place + 1} of {count}"
    print(f"{where}: {run.operation}, {run.layout}, {run.device}, {run.mode}, {run.kind}: {found}", file=sys.stderr)


# The tables.


def report(records: list[dict[str, Any]]) -> str:
    """Return the tables: times, then lags; a row for each operation, layout and device."""
    first = records[0]
    lines = [machine_line(first), ""]
    trees: list[str] = first["trees"]
    names = [f" {Path(tree).name}" if len(trees) > 1 else "" for tree in trees]
    modes = [(mode, tree, name) for mode in MODES for tree, name in zip(trees, names, strict=True)]
    runs = [record for record in records if record.get("kind") in ("time", "lag")]
    for kind, title in (("time", "seconds: median (min to max)"), ("lag", "p99 lag of the loop, ms (baseline)")):
        own = [record for record in runs if record["kind"] == kind]
        if not own:
            continue
        lines += [f"| {title} | | | " + " | ".join(mode + name for mode, _, name in modes) + " |"]
        lines += ["|---|---|---|" + "--:|" * len(modes)]
        rows = dict.fromkeys((each["layout"], each["device"], each["operation"], each["face"]) for each in own)
        for layout, device, operation, face in sorted(rows, key=lambda row: (row[0] != "many", row[1] != "cpu")):
            cells = []
            for mode, tree, _ in modes:
                key = {"layout": layout, "device": device, "operation": operation, "face": face}
                key |= {"mode": mode, "tree": tree}
                cells.append(_cell(kind, [each for each in own if all(each[k] == v for k, v in key.items())]))
            name = operation if face == "async" or operation not in _IN_BOTH else f"sync {operation}"
            lines.append(f"| {name} | {layout} | {device} | " + " | ".join(cells) + " |")
        lines.append("")
    others = [record["other_cpus"] for record in runs if "other_cpus" in record]
    if others and median(others) > QUIET_CPUS:
        lines.append(f"Other processes kept {median(others):.1f} CPUs busy: these figures are not comparable.")
    return "\n".join(lines)


_IN_BOTH = frozenset(operation.name for operation in OPERATIONS if operation.faces == FACES)


def _cell(kind: str, records: list[dict[str, Any]]) -> str:
    if not records:
        return ""
    if errors := [record["error"] for record in records if "error" in record]:
        return f"failed: {errors[0]}".replace("|", "/")
    if kind == "lag":
        lags, baselines = ([record[key]["p99"] for record in records] for key in ("lag", "baseline"))
        return f"{median(lags) * 1000:.1f} ({median(baselines) * 1000:.1f})"
    seconds = [record["seconds"] for record in records]
    return f"{_short(median(seconds))} ({_short(min(seconds))} to {_short(max(seconds))})"


def _short(seconds: float) -> str:
    return f"{seconds:.4f}" if seconds < 0.1 else f"{seconds:.3f}" if seconds < 1 else f"{seconds:.2f}"


def machine_line(record: dict[str, Any]) -> str:
    """Return one line about the machine and the versions."""
    versions = ", ".join(f"{name} {number}" for name, number in record["packages"].items() if number)
    return (
        f"{record['date']}. {record['cpu']}, {record['num_cpus']} CPUs, {record['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {record['kernel']}, {record['disk']['filesystem']}; Python {record['python']}; {versions}."
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [operation.name for operation in OPERATIONS]
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--operations", nargs="+", choices=names, metavar="NAME", help=f"some of: {'; '.join(names)}")
    parser.add_argument("--layout", nargs="+", choices=("many", "large"), default=["many", "large"])
    parser.add_argument("--device", nargs="+", default=["cpu", "sim"], help="cpu, sim, or torch's name of one")
    parser.add_argument("--kind", nargs="+", choices=("time", "lag"), default=["time", "lag"])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--face", choices=FACES, default="async", help="functions of stio, or of stio.sync")
    parser.add_argument(
        "--tree", type=Path, action="append", help="a source tree; may be repeated; by default this one"
    )
    parser.add_argument("--dir", type=Path, help="for the files, removed at the end; by default below build/")
    parser.add_argument("--out", type=Path, help="append raw figures, as JSON lines")
    parser.add_argument("--report", type=Path, help="print the tables of raw figures, and measure nothing")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.tree = [tree.resolve() for tree in options.tree or [ROOT]]
    return options


def main() -> int:
    """Measure, and print the tables; the exit status is 1 if a run failed."""
    options = parse()
    if options.child:
        print(json.dumps(measure(Run(**options.child), options.dir)), flush=True)
        os._exit(0)  # what ends after that is not measured
    if options.make:
        _make_files(options.dir, options.make, str(options.tree[0]))
        return 0
    if options.report:
        print(report([json.loads(line) for line in options.report.read_text().splitlines()]))
        return 0
    records: list[dict[str, Any]] = []

    def add(record: dict[str, Any]) -> None:
        records.append(record)
        if options.out:
            with open(options.out, "a") as file:
                print(json.dumps(record), file=file)

    with ExitStack() as stack:
        parent = options.dir or ROOT / "build"
        parent.mkdir(parents=True, exist_ok=True)
        options.dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="busy-", dir=parent)))
        add(machine.record(options.dir, 0, 0) | {"trees": [str(tree) for tree in options.tree]})
        make_files(options.dir, ["small", *options.layout], str(options.tree[0]))
        run_all(options, add)
    print(report(records))
    return int(any("error" in record for record in records))


if __name__ == "__main__":
    sys.exit(main())
