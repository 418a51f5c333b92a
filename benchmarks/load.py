"""Compare stio's loads with its peers' and with the disk's limit: `python -m benchmarks.load`, see tables.md."""

from __future__ import annotations

import asyncio
import functools
import shutil
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cgroups, files, machine, meters, pagecache, runner
from benchmarks.child import Spec
from benchmarks.contestants import LOADERS, Loader, WholeFile, import_stio
from benchmarks.report import (
    MEMORY_COLUMNS,
    beat_columns,
    cost,
    count_cell,
    difference,
    faster,
    held,
    lag,
    median_cell,
    plain,
    seconds,
)
from benchmarks.runs import Bound, Measured, Record, Runs
from benchmarks.suite import MEBI, Case, Columns, Entry, Measure, Panel, Settings, Suite

CAP_BYTES_PER_SECOND = 800_000_000
LOOP_READ_AHEAD_KB = 128
BUDGET_BYTES, SMALL_BUDGET_BYTES = 256 * MEBI, 64 * MEBI
MEMORY_SLACK_BYTES = 64 * MEBI
LAZY_BYTES = 100_000_000_000
MANY_TENSOR_BYTES, MANY_MORE_TENSOR_BYTES = 4096, 1024
BLOCKING_STEP_SECONDS = 0.2
_SMALL_PRIME_BYTES = 1_000_000_000


# Cases and bounds.


def make_layout(name: str, size_bytes: int) -> files.Layout:
    """Give the layout that a case names: model, many-10000, many-100000 or sparse."""
    if name == "model":
        return files.llama_layout(size_bytes)
    if name == "sparse":
        return files.sparse_layout(LAZY_BYTES)
    count = int(name.removeprefix("many-"))
    return files.many_layout(count, MANY_TENSOR_BYTES if count <= 10_000 else MANY_MORE_TENSOR_BYTES)


def _entries(*names: str) -> tuple[Entry, ...]:
    return tuple(Entry(name) for name in names)


def _busy(*names: str) -> tuple[Entry, ...]:
    return tuple(Entry(name, f"{name} busy", busy=True) for name in names)


def _beats(task: str, *names: str) -> tuple[Entry, ...]:
    return tuple(
        Entry(
            name,
            f"{name} {'busy' if busy else 'alone'}",
            task=task,
            busy=busy,
            rounds=None if name.startswith("stio") else 1,
        )
        for name in names
        for busy in ((True,) if name == "stio-switch" else (False, True))
    )


def _whole_result(layout: files.Layout) -> int:
    return layout.data_bytes + BUDGET_BYTES + MEMORY_SLACK_BYTES


def _one_tensor(layout: files.Layout) -> int:
    return layout.largest_bytes + BUDGET_BYTES + MEMORY_SLACK_BYTES


def _one_tensor_small_budget(layout: files.Layout) -> int:
    return layout.largest_bytes + SMALL_BUDGET_BYTES + MEMORY_SLACK_BYTES


_BUDGET = {"budget_bytes": BUDGET_BYTES}
_SMALL_BUDGET = {"budget_bytes": SMALL_BUDGET_BYTES}
_BESIDE_BUSY = (Entry("stio"), *_busy("stio", "stio-switch", "safetensors-clone", "safetensors-pread", "runai"))
_NOT_QUICK_BUSY = frozenset({"safetensors-clone busy", "runai busy"})

CASES: tuple[Case, ...] = (
    Case(
        "cold-cap",
        "cold, reads capped at 800 MB/s",
        _entries("stio", "safetensors-mmap", "safetensors-pread", "runai", "raw"),
        rounds=3,
        cap_bytes_per_second=CAP_BYTES_PER_SECOND,
        not_quick=frozenset({"safetensors-mmap", "safetensors-pread", "runai"}),
    ),
    Case(
        "cold-loop",
        "cold, loop mount, read-ahead 128 KiB",
        (
            # The disk behind it has slow minutes: many rounds of the two that the bound is about.
            *_entries("stio", "raw", "runai"),
            *(Entry(name, rounds=5) for name in ("safetensors-mmap", "safetensors-pread", "raw-whole")),
        ),
        rounds=15,
        place="loop",
        not_quick=frozenset({"raw-whole", "safetensors-pread"}),
    ),
    Case(
        "cold",
        "cold, the disk as it is",
        (
            *_entries("stio", "safetensors-mmap", "safetensors-pread", "runai"),
            Entry("raw", rounds=8),
            Entry("raw-whole", rounds=3),
            Entry("fastsafetensors", rounds=3),
        ),
        rounds=15,
        not_quick=frozenset({"raw-whole", "fastsafetensors", "safetensors-pread"}),
    ),
    Case(
        "warm",
        "warm, large folios",
        _entries("stio", "safetensors-mmap", "safetensors-pread", "runai", "stio-copy", "safetensors-clone"),
        rounds=5,
        state="warm",
        not_quick=frozenset({"safetensors-pread"}),
    ),
    Case("faults", "warm, small folios", _entries("stio", "safetensors-mmap"), rounds=5, state="faults"),
    Case("busy-cold", "cold, beside a busy Python thread", _BESIDE_BUSY, rounds=3, not_quick=_NOT_QUICK_BUSY),
    Case(
        "busy-warm",
        "warm, beside a busy Python thread",
        _BESIDE_BUSY,
        rounds=3,
        state="warm",
        not_quick=_NOT_QUICK_BUSY,
    ),
    Case(
        "many-busy",
        "10,000 tensors, warm, beside a busy Python thread",
        _busy("stio", "stio-switch", "safetensors-mmap", "runai"),
        rounds=3,
        layout="many-10000",
        state="warm",
        not_quick=frozenset({"runai busy", "safetensors-mmap busy"}),
    ),
    Case(
        "many",
        "100,000 tensors, warm",
        tuple(
            Entry(name, f"{name} {task}", task=task)
            for task in ("open", "load")
            for name in ("stio", "safetensors-mmap")
        ),
        rounds=5,
        layout="many-100000",
        state="warm",
    ),
    Case("loop-cold", "event loop's lag during cold loads", _beats("heartbeat-load", "stio", "stio-switch"), rounds=3),
    Case(
        "loop-warm",
        "event loop's lag during warm loads",
        _beats("heartbeat-load", "stio", "stio-switch", "safetensors-pread"),
        rounds=3,
        state="warm",
        not_quick=frozenset({"safetensors-pread alone", "safetensors-pread busy"}),
    ),
    Case(
        "loop-open",
        "event loop's lag during openings of 100,000 tensors",
        _beats("heartbeat-open", "stio", "stio-switch", "safetensors-mmap"),
        rounds=3,
        layout="many-100000",
        state="warm",
        not_quick=frozenset({"safetensors-mmap alone", "safetensors-mmap busy"}),
    ),
    Case(
        "blocked",
        "cold, the caller's loop blocked by 200 ms steps",
        (Entry("stio"), Entry("stio", "stio blocked", task="blocked")),
        rounds=3,
    ),
    Case(
        "memory",
        "memory held by a cold load, by control group",
        (
            Entry("stio-copy", options=_BUDGET, limit_bytes=_whole_result),
            Entry("stio-fake", options=_BUDGET, limit_bytes=_whole_result),
            Entry("stio", "stio stream", task="stream", options=_BUDGET, limit_bytes=_one_tensor),
            Entry("stio", "stio stream 64 MiB", "stream", options=_SMALL_BUDGET, limit_bytes=_one_tensor_small_budget),
            *_entries("safetensors-mmap", "safetensors-pread", "runai", "fastsafetensors"),
        ),
        rounds=1,
        watch_memory=True,
        not_quick=frozenset({"safetensors-mmap", "safetensors-pread", "runai", "fastsafetensors"}),
    ),
    Case(
        "lazy", "a sparse file of 100 GB, mapped lazily", (Entry("stio-lazy"),), rounds=3, layout="sparse", touch="ends"
    ),
)

SAFETENSORS = ("safetensors-mmap", "safetensors-pread")
_BUSY_SAFETENSORS = ("safetensors-clone busy", "safetensors-pread busy")


def _share_of_cap(runs: Runs) -> Measured:
    """Give stio's rate through the cap, touching included."""
    found = plain(runs, "cold-cap", "stio", "seconds")
    data_bytes = runs.of("cold-cap", "stio")[0]["data_bytes"]
    share = [data_bytes / seconds / CAP_BYTES_PER_SECOND for seconds in (found.value, found.high, found.low)]
    return Measured(share[0], share[1], share[2], found.num_rounds, found.ours)


def _blocked(runs: Runs) -> Measured:
    return difference(runs, "blocked", "stio blocked", "load_seconds", "load_seconds", lower_entry="stio")


BOUNDS: tuple[Bound, ...] = (
    Bound("cold-cap", "share of the cap", _share_of_cap, at_least=0.95),
    faster("cold-cap", "stio / safetensors' better backend", "stio", SAFETENSORS),
    faster("cold-cap", "stio / Run:ai", "stio", "runai"),
    faster("cold-loop", "stio / raw O_DIRECT limit", "stio", "raw", 0.9),
    faster("cold-loop", "stio / the same limit filling a fresh result", "stio", "raw-whole"),
    faster("cold-loop", "stio / safetensors' better backend", "stio", SAFETENSORS),
    faster("cold-loop", "stio / Run:ai", "stio", "runai"),
    faster("cold", "stio / safetensors' better backend (expected 1.8)", "stio", SAFETENSORS),
    faster("cold", "stio / Run:ai (expected not behind)", "stio", "runai"),
    faster("cold", "stio / fastsafetensors", "stio", "fastsafetensors"),
    faster("cold", "stio / raw O_DIRECT limit", "stio", "raw"),
    faster("warm", "stio / safetensors mmap, every page touched", "stio", "safetensors-mmap", 0.95),
    faster("warm", "stio / Run:ai, every page touched", "stio", "runai", 6.0),
    faster("warm", 'stio memory="copy" / load_file + clone', "stio-copy", "safetensors-clone", 1.0),
    faster("faults", "stio / safetensors mmap, every page touched", "stio", "safetensors-mmap", 1.4),
    *(
        bound
        for case in ("busy-cold", "busy-warm")
        for bound in (
            faster(case, "stio busy / stio idle", "stio busy", "stio", 0.7),
            faster(case, "stio / safetensors, better of clone and pread", "stio busy", _BUSY_SAFETENSORS, 3.0),
            faster(case, "stio with switch_interval busy / stio idle", "stio-switch busy", "stio"),
            faster(case, "stio / Run:ai", "stio busy", "runai busy"),
        )
    ),
    seconds("many-busy", "stio loads 10,000 tensors", "stio busy", "load_seconds", 0.150, "ms"),
    seconds("many-busy", "the same with switch_interval", "stio-switch busy", "load_seconds", None, "ms"),
    seconds("many-busy", "safetensors loads them", "safetensors-mmap busy", "load_seconds", None, "ms"),
    seconds("many-busy", "Run:ai loads them", "runai busy", "load_seconds", None, "ms"),
    cost("many", "open and list: stio through safetensors", "stio open", "safetensors-mmap open", "seconds", 1.0),
    cost("many", "load: stio through load_file", "stio load", "safetensors-mmap load", "load_seconds", 0.6),
    *(
        bound
        for case in ("loop-cold", "loop-warm")
        for bound in (
            lag(case, "p99 lag above the baseline, alone", "stio alone", 0.005),
            lag(case, "p99 lag above the baseline, busy", "stio busy", 0.025),
            lag(case, "p99 lag above the baseline, busy, switch_interval 0.5 ms", "stio-switch busy", 0.005),
        )
    ),
    seconds("loop-open", "p99 lag, alone", "stio alone", "lag.p99", 0.015, "ms"),
    seconds("loop-open", "p99 lag, busy", "stio busy", "lag.p99", 0.030, "ms"),
    seconds("loop-open", "p99 lag, busy, switch_interval 0.5 ms", "stio-switch busy", "lag.p99", None, "ms"),
    Bound(
        "blocked",
        "seconds above an idle loop's load (three steps allowed)",
        _blocked,
        at_most=3 * BLOCKING_STEP_SECONDS,
        unit="s",
    ),
    held("stio-copy", 'memory="copy" through result + budget + 64 MiB'),
    held("stio-fake", "fake device through result + budget + 64 MiB"),
    held("stio stream", "stream through largest tensor + budget + 64 MiB"),
    held("stio stream 64 MiB", "stream, budget 64 MiB, through largest tensor + 128 MiB"),
    seconds("lazy", 'memory="lazy" loads 100 GB', "stio-lazy", "load_seconds", 1.0),
)

# One run, in its own process.


def run(spec: Spec) -> Record:
    """Do one run; see the fields of the tasks below."""
    loader = LOADERS[spec.contestant]
    record: Record = {}
    job = _TASKS[spec.task](spec, loader, record)
    record["prime_seconds"] = spec.prime()
    _set_state(spec)
    if spec.state in ("warm", "faults"):
        record["large_folios"] = pagecache.large_folio_fraction(Path(spec.path))
    spec.join_groups()
    meters.reset_peak_rss()
    before = meters.rss_bytes()["rss_bytes"]
    asyncio.run(job())
    after = meters.rss_bytes()
    record["peak_rss_bytes"] = after["peak_rss_bytes"]
    record["peak_rss_added_bytes"] = after["peak_rss_bytes"] - before
    return record


def _set_state(spec: Spec) -> None:
    """Evict or fill the file, after priming: a fill would take the memory that was primed before it."""
    prepare = {"cold": pagecache.evict, "warm": pagecache.fill_by_reads, "faults": pagecache.fill_by_faults}
    if spec.state:
        prepare[spec.state](Path(spec.path))


def _load_task(spec: Spec, loader: Loader, record: Record) -> Any:
    """Load once: load_seconds to the result, touch_seconds for touching it, seconds for both, and the checksums."""
    call = _prepared(loader, spec, "load")

    async def job() -> None:
        with meters.busy_thread(spec.busy):
            started = time.perf_counter()
            result = await call(Path(spec.path))
            loaded = time.perf_counter()
        _finish(spec, record, result, loaded - started)

    return job


def _open_task(spec: Spec, loader: Loader, record: Record) -> Any:
    """Open and list once: seconds."""
    call = _prepared(loader, spec, "open")

    async def job() -> None:
        with meters.busy_thread(spec.busy):
            started = time.perf_counter()
            result = await call(Path(spec.path))
            record["seconds"] = time.perf_counter() - started
        names = result[1] if isinstance(result, tuple) else result
        record["num_tensors"] = len(names)

    return job


def _heartbeat_task(kind: str) -> Any:
    def task(spec: Spec, loader: Loader, record: Record) -> Any:
        """Load or open again and again until there are enough beats, see `meters.measure_lag`."""
        call = _prepared(loader, spec, kind, own_thread=True)

        def before() -> None:
            if spec.state == "cold":
                _set_state(spec)

        async def job() -> None:
            await meters.measure_lag(record, busy=spec.busy, before=before, turn=lambda: call(Path(spec.path)))

        return job

    return task


def _blocked_task(spec: Spec, loader: Loader, record: Record) -> Any:
    """Load while the caller's loop is blocked by steps of 200 ms, with one turn of the loop between them."""
    call = _prepared(loader, spec, "load", own_thread=True)

    async def job() -> None:
        started = time.perf_counter()
        loading = asyncio.ensure_future(call(Path(spec.path)))
        await asyncio.sleep(0)
        steps = 0
        while not loading.done():
            time.sleep(BLOCKING_STEP_SECONDS)
            steps += 1
            await asyncio.sleep(0)
        loaded = time.perf_counter()
        record["num_steps"] = steps
        _finish(spec, record, loading.result(), loaded - started)

    return job


def _stream_task(spec: Spec, loader: Loader, record: Record) -> Any:
    """Stream once, holding one tensor at a time, each touched as it comes: seconds."""
    stio = import_stio()

    async def job() -> None:
        sums = {}
        started = time.perf_counter()
        async with stio.open(Path(spec.path), **spec.options) as checkpoint:
            async for name, tensor in checkpoint.stream():
                ((_, array),) = meters.tensor_arrays({name: tensor})
                sums[name] = meters.touch(array, spec.touch)
                del tensor, array
        record["seconds"] = time.perf_counter() - started
        record["checksum"] = meters.combine(sums)

    return job


def _finish(spec: Spec, record: Record, result: Any, load_seconds: float) -> None:
    """Touch the result on the clock, verify it off the clock."""
    record["load_seconds"] = load_seconds
    started = time.perf_counter()
    arrays = _arrays(spec, result)
    checksum = None if arrays is None else meters.touch_all(arrays, spec.touch)
    record["touch_seconds"] = time.perf_counter() - started
    record["seconds"] = load_seconds + record["touch_seconds"]
    record["checksum"] = checksum
    record["anonymous_bytes"] = meters.rss_bytes()["anonymous_bytes"]
    if spec.verify and (again := _arrays(spec, result)) is not None:
        record["full_checksum"] = meters.checksum_all(again)


def _arrays(spec: Spec, result: Any) -> Any:
    if result is None:
        return None
    if isinstance(result, WholeFile):
        return meters.file_arrays(result.data, *files.read_header(Path(spec.path)))
    return meters.tensor_arrays(result)


def _prepared(loader: Loader, spec: Spec, kind: str, *, own_thread: bool = False) -> Callable[[Path], Awaitable[Any]]:
    """Prepare the contestant's call for the event loop; a blocking one runs right there, or in a thread."""
    prepare_async, prepare = {"load": (loader.load_async, loader.load), "open": (loader.open_async, loader.open)}[kind]
    if prepare_async is not None:
        return prepare_async(spec.options)
    if prepare is None:
        raise NotImplementedError(f"{loader.label} has no {kind}")
    blocking = prepare(spec.options)

    async def call(path: Path) -> Any:
        return await asyncio.to_thread(blocking, path) if own_thread else blocking(path)

    return call


_TASKS = {
    "load": _load_task,
    "open": _open_task,
    "heartbeat-load": _heartbeat_task("load"),
    "heartbeat-open": _heartbeat_task("open"),
    "blocked": _blocked_task,
    "stream": _stream_task,
}


# The files.


@dataclass(slots=True)
class FilePool:
    """The files of a directory: one for each contestant and layout, made on first use."""

    directory: Path
    size_bytes: int
    layouts: dict[str, files.Layout] = field(default_factory=dict)
    checksums: dict[tuple[str, str], int] = field(default_factory=dict)
    """By layout and touch mode, "full" for every byte."""

    def layout(self, name: str) -> files.Layout:
        """Give a layout by its name."""
        if name not in self.layouts:
            self.layouts[name] = make_layout(name, self.size_bytes)
        return self.layouts[name]

    def path(self, name: str, contestant: str, directory: Path | None = None) -> Path:
        """Give the file of `contestant`, in `directory` where it is not the pool's."""
        path = (directory or self.directory) / f"{name}-{contestant}.safetensors"
        if not path.exists():
            layout = self.layout(name)
            if name != "sparse" and directory is None:
                runner.require_space(path.parent, layout.data_bytes)
            files.write_file(path, layout, sparse=name == "sparse")
            self._remember(name, path)
            if name != "sparse":
                pagecache.evict(path)
        return path

    def _remember(self, name: str, path: Path) -> None:
        """Take the checksums of a layout from the first file of it: all have the same bytes."""
        if (name, "page") in self.checksums:
            return
        start, spans = files.read_header(path)
        if name == "sparse":
            self.checksums |= {(name, "page"): 0, (name, "ends"): 0}
            return
        data = np.memmap(path, np.uint8, mode="r")
        for mode in ("page", "ends"):
            self.checksums[name, mode] = meters.touch_all(meters.file_arrays(data, start, spans), mode)
        self.checksums[name, "full"] = meters.checksum_all(meters.file_arrays(data, start, spans))
        del data


# The runs of a case.


@functools.cache
def _pool(directory: Path, size_bytes: int) -> FilePool:
    """Give the files of a whole benchmark: cases share them."""
    return FilePool(directory, size_bytes)


@contextmanager
def prepared(case: Case, settings: Settings) -> Iterator[Measure]:
    """Make the place and the files of a case; give the function that runs an entry."""
    pool = _pool(settings.directory, settings.size_bytes)
    layout = pool.layout(case.layout)
    owners = sorted({entry.contestant for entry in settings.entries(case)})
    with _place(case, settings, pool) as directory, _read_cap(case, settings) as capped:
        for owner in owners:
            pool.path(case.layout, owner, directory)

        def measure(entry: Entry, number: int, verify: bool) -> Record:
            # Where a file lies decides how fast it is read, so the entries exchange files from round to round.
            owner = owners[(owners.index(entry.contestant) + number) % len(owners)]
            path = pool.path(case.layout, owner, directory)
            spec = Spec(
                contestant=entry.contestant,
                path=str(path),
                task=entry.task,
                busy=entry.busy,
                state=case.state,
                touch=case.touch,
                verify=verify and case.layout != "sparse",
                prime_bytes=_prime_bytes(settings, layout),
                join=(capped.procs,) if capped else (),
                options=entry.options,
            )
            record = {"data_bytes": layout.data_bytes}
            record |= runner.run_entry("benchmarks.load", spec, case, entry, layout, settings)
            _check(record, case, pool)
            if case.layout == "model":
                pagecache.evict(path)
            return record

        yield measure


def _prime_bytes(settings: Settings, layout: files.Layout) -> int:
    """Prime no more than a load of a small file, in all its copies, can use."""
    if layout.label == "sparse":
        return 0
    return min(settings.prime_bytes, max(_SMALL_PRIME_BYTES, 3 * layout.data_bytes))


def _check(record: Record, case: Case, pool: FilePool) -> None:
    """Turn a wrong checksum into a failure."""
    expected = {"checksum": case.touch, "full_checksum": "full"}
    for key, mode in expected.items():
        if record.get(key) is not None and record[key] != pool.checksums.get((case.layout, mode)):
            record["error"] = f"wrong bytes: {key} {record[key]}"


@contextmanager
def _place(case: Case, settings: Settings, pool: FilePool) -> Iterator[Path | None]:
    """Give the directory of a case that needs one of its own."""
    if case.place == "disk":
        yield None
        return
    owners = {entry.contestant for entry in case.entries}
    size_bytes = int(pool.layout(case.layout).data_bytes * (len(owners) + 0.2)) + (256 << 20)
    if shutil.disk_usage(settings.directory).free < size_bytes + runner.FREE_BYTES_KEPT:
        raise machine.MountUnavailable(f"the loop mount needs {size_bytes / 1e9:.0f} GB of disk")
    with machine.loop_mount(settings.directory / "loop.img", size_bytes, LOOP_READ_AHEAD_KB) as point:
        yield point


@contextmanager
def _read_cap(case: Case, settings: Settings) -> Iterator[cgroups.Group | None]:
    if case.cap_bytes_per_second is None:
        yield None
        return
    with cgroups.group("io") as target:
        cgroups.cap_reads(target, machine.block_device(settings.directory), case.cap_bytes_per_second)
        yield target


def _columns(case: Case) -> Columns:
    if any(entry.task.startswith("heartbeat") for entry in case.entries):
        return beat_columns("loading")
    if case.watch_memory:
        return MEMORY_COLUMNS
    return Columns(("load, s", "touch, s", "both, s", "min to max", "GB/s", "peak memory added, MB", "runs"), _row)


def _row(case: str, entry: str, runs: Runs) -> list[str]:
    both = plain(runs, case, entry, "seconds")
    data_bytes = runs.of(case, entry)[0]["data_bytes"]
    return [
        median_cell(runs, case, entry, "load_seconds", 1, 3),
        median_cell(runs, case, entry, "touch_seconds", 1, 3),
        f"{both.value:.3f}",
        f"{both.low:.3f} to {both.high:.3f}",
        f"{data_bytes / both.value / 1e9:.2f}",
        median_cell(runs, case, entry, "peak_rss_added_bytes", 1e-6, 0),
        count_cell(runs, case, entry),
    ]


_PANELS = ("cold-cap", "cold-loop", "cold", "warm", "faults", "busy-cold", "busy-warm")

SUITE = Suite(
    name="load",
    cases=CASES,
    bounds=BOUNDS,
    labels={name: loader.label for name, loader in LOADERS.items()},
    prepared=prepared,
    columns=_columns,
    panels=tuple(Panel(case, "seconds", "every page touched") for case in _PANELS),
    picture="Rates of the load cases",
)

if __name__ == "__main__":
    sys.exit(runner.main(SUITE, __doc__ or ""))
