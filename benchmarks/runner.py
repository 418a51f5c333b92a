"""Runs the cases of loading: makes the files and the places, hands each run to a process, checks what was read."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import cgroups, files, machine, meters, pagecache
from benchmarks.cases import LOOP_READ_AHEAD_KB, Case, make_layout
from benchmarks.child import RunSpec
from benchmarks.processes import Record, Settings, entries_of, interleaved, run_child, run_watched

_MODULE = "benchmarks.child"
_FREE_BYTES_KEPT = 4_000_000_000
_SMALL_PRIME_BYTES = 1_000_000_000


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
    verified: set[str] = set()
    layout = pool.layout(case.layout)
    owners = sorted({entry.contestant for entry in entries_of(case, settings)})
    for owner in owners:
        pool.path(case.layout, owner, directory)
    for number, entry in interleaved(case, settings):
        record: Record = {"kind": "run", "case": case.name, "entry": entry.name, "round": number}
        # Where a file lies decides how fast it is read, so the files change hands from round to round.
        owner = owners[(owners.index(entry.contestant) + number) % len(owners)]
        path = pool.path(case.layout, owner, directory)
        spec = RunSpec(
            contestant=entry.contestant,
            path=str(path),
            task=entry.task,
            busy=entry.busy,
            state=case.state,
            touch=case.touch,
            verify=entry.name not in verified and case.layout != "sparse",
            prime_bytes=_prime_bytes(settings, layout),
            join=(capped.procs,) if capped else (),
            options=entry.options,
        )
        verified.add(entry.name)
        record |= {"data_bytes": layout.data_bytes}
        if case.watch_memory:
            limit_bytes = entry.limit_bytes(layout) if entry.limit_bytes else None
            record |= run_watched(_MODULE, spec, settings.timeout_seconds, limit_bytes)
        else:
            record |= run_child(_MODULE, spec, settings.timeout_seconds)
        _check(record, case, pool)
        emit(record)
        if case.layout == "model":
            pagecache.evict(path)


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
