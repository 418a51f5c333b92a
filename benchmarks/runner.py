"""Runs the cases: prepares each file's state, starts each contestant in a fresh process, collects the records."""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import cgroups, files, machine, meters, pagecache
from benchmarks.cases import LOOP_READ_AHEAD_KB, Case, Entry, make_layout
from benchmarks.child import RunSpec

Record = dict[str, Any]

_ROOT = Path(__file__).resolve().parent.parent
_FREE_BYTES_KEPT = 4_000_000_000
_SMALL_PRIME_BYTES = 1_000_000_000


@dataclass(slots=True)
class Settings:
    """What the command line decides."""

    directory: Path
    """Where the files are made."""

    size_bytes: int
    """Size of the model's file."""

    prime_bytes: int
    """Memory to touch and free before each run."""

    rounds: int | None
    """Rounds of every case, in place of the case's own number."""

    quick: bool
    """One round, without the entries that no bound needs."""

    timeout_seconds: float = 180.0
    """For one run."""

    seed: int = 1
    """Of the order inside the rounds."""


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
            free = shutil.disk_usage(path.parent).free
            if name != "sparse" and directory is None and free < layout.data_bytes + _FREE_BYTES_KEPT:
                raise OSError(f"only {free / 1e9:.1f} GB are free for the benchmark's files")
            files.write_file(path, layout, sparse=name == "sparse")
            self._remember(name, path)
            pagecache.evict(path) if name != "sparse" else None
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


def run_cases(cases: list[Case], settings: Settings, emit: Callable[[Record], None]) -> None:
    """Run `cases` one after the other, and hand each record to `emit` as it comes."""
    pool = FilePool(settings.directory, settings.size_bytes)
    for case in cases:
        started = time.monotonic()
        try:
            with _place(case, settings, pool) as directory, _read_cap(case, settings) as capped:
                _run_case(case, settings, pool, directory, capped, emit)
        except (cgroups.CgroupUnavailable, machine.MountUnavailable, pagecache.PageCacheError, OSError) as error:
            emit({"kind": "skipped", "case": case.name, "reason": str(error)})
        emit({"kind": "case", "case": case.name, "wall_seconds": time.monotonic() - started})


def _run_case(
    case: Case,
    settings: Settings,
    pool: FilePool,
    directory: Path | None,
    capped: cgroups.Group | None,
    emit: Callable[[Record], None],
) -> None:
    shuffle = random.Random(settings.seed)
    verified: set[str] = set()
    rounds = settings.rounds or (1 if settings.quick else case.rounds)
    entries = [entry for entry in case.entries if not (settings.quick and entry.name in case.not_quick)]
    for entry in entries:
        pool.path(case.layout, entry.contestant, directory)
    for number in range(rounds):
        order = [entry for entry in entries if number < (entry.rounds or rounds)]
        shuffle.shuffle(order)
        for entry in order:
            record: Record = {"kind": "run", "case": case.name, "entry": entry.name, "round": number}
            path = pool.path(case.layout, entry.contestant, directory)
            spec = RunSpec(
                contestant=entry.contestant,
                path=str(path),
                task=entry.task,
                busy=entry.busy,
                state=case.state,
                touch=case.touch,
                verify=entry.name not in verified and case.layout != "sparse",
                prime_bytes=_prime_bytes(settings, pool.layout(case.layout)),
                join=(capped.procs,) if capped else (),
                options=entry.options,
            )
            verified.add(entry.name)
            layout = pool.layout(case.layout)
            record |= {"data_bytes": layout.data_bytes}
            record |= _run_watched(case, entry, layout, spec, settings)
            _check(record, case, pool)
            emit(record)
            if case.layout == "model":
                pagecache.evict(path)


def _prime_bytes(settings: Settings, layout: files.Layout) -> int:
    """Prime no more than a load of a small file, in all its copies, can use."""
    if layout.label == "sparse":
        return 0
    return min(settings.prime_bytes, max(_SMALL_PRIME_BYTES, 3 * layout.data_bytes))


def _run_watched(case: Case, entry: Entry, layout: files.Layout, spec: RunSpec, settings: Settings) -> Record:
    """Run in a memory group where the case asks for it, its limit enforced where the entry has one."""
    if not case.watch_memory:
        return _run_child(spec, settings.timeout_seconds)
    with cgroups.group("memory") as target:
        limit = entry.limit_bytes(layout) if entry.limit_bytes else None
        if limit:
            cgroups.limit_memory(target, limit)
        spec = replace(spec, join=(*spec.join, target.procs), verify=False)
        with cgroups.MemoryWatch(target) as watch:
            record = _run_child(spec, settings.timeout_seconds)
        record["held_peak_bytes"] = watch.peak_bytes
        record["group_peak_bytes"] = cgroups.peak_bytes(target)
        record["limit_bytes"] = limit
        if kills := cgroups.oom_kills(target):
            record["error"] = f"killed by the kernel above {limit} bytes ({kills})"
    return record


def _run_child(spec: RunSpec, timeout_seconds: float) -> Record:
    """Run one process; whatever becomes of it is a record."""
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "RUNAI_STREAMER_LOG_LEVEL": "ERROR"}
    busy_before, own_before, started = machine.busy_cpu_seconds(), _child_cpu_seconds(), time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.child", spec.encode()],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            cwd=_ROOT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {timeout_seconds:.0f} s"}
    wall = time.monotonic() - started
    try:
        record: Record = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        record = {"error": f"exit status {done.returncode}: {lines[-1] if lines else 'no output'}"}
    others = machine.busy_cpu_seconds() - busy_before - (_child_cpu_seconds() - own_before)
    record["other_cpus"] = max(0.0, others / wall)
    record["process_seconds"] = wall
    return record


def _check(record: Record, case: Case, pool: FilePool) -> None:
    """Turn a wrong checksum into a failure."""
    expected = {"checksum": case.touch, "full_checksum": "full"}
    for key, mode in expected.items():
        if record.get(key) is not None and record[key] != pool.checksums.get((case.layout, mode)):
            record["error"] = f"wrong bytes: {key} {record[key]}"


def _child_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@contextmanager
def _place(case: Case, settings: Settings, pool: FilePool) -> Iterator[Path | None]:
    """Give the directory of a case that needs one of its own."""
    if case.place == "disk":
        yield None
        return
    owners = {entry.contestant for entry in case.entries}
    size_bytes = int(pool.layout(case.layout).data_bytes * (len(owners) + 0.2)) + (256 << 20)
    if shutil.disk_usage(settings.directory).free < size_bytes + _FREE_BYTES_KEPT:
        raise machine.MountUnavailable(f"the loop mount needs {size_bytes / 1e9:.0f} GB of disk")
    with machine.loop_mount(settings.directory / "loop.img", size_bytes, LOOP_READ_AHEAD_KB) as point:
        yield point


@contextmanager
def _read_cap(case: Case, settings: Settings) -> Iterator[cgroups.Group | None]:
    if case.cap_bytes_per_second is None:
        yield None
        return
    with ExitStack() as stack:
        target = stack.enter_context(cgroups.group("io"))
        cgroups.cap_reads(target, machine.block_device(settings.directory), case.cap_bytes_per_second)
        yield target
