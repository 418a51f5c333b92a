"""Runs the cases of saving: starts each run in a fresh process, and removes what it has saved, all off the clock."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from benchmarks import cgroups, files
from benchmarks.cases import Case, Entry
from benchmarks.processes import Record, Settings, interleaved, run_child, run_watched
from benchmarks.save_child import SaveSpec
from benchmarks.save_contestants import CONTESTANTS

_MODULE = "benchmarks.save_child"
_FREE_BYTES_KEPT = 4_000_000_000
_COPIES = 2
"""Of the checkpoint, on the disk at once: the one that is written, and one whose blocks are not free yet."""
_PRIME_SPARE = 0.25


def run_cases(cases: list[Case], settings: Settings, emit: Callable[[Record], None]) -> None:
    """Run `cases` one after the other, and hand each record to `emit` as it comes."""
    layout = files.llama_layout(settings.size_bytes)
    for case in cases:
        started = time.monotonic()
        try:
            free = shutil.disk_usage(settings.directory).free
            if free < _COPIES * layout.data_bytes + _FREE_BYTES_KEPT:
                raise OSError(f"only {free / 1e9:.1f} GB are free for the benchmark's files")
            _run_case(case, settings, layout, emit)
        except (cgroups.CgroupUnavailable, OSError) as error:
            emit({"kind": "skipped", "case": case.name, "reason": str(error)})
        emit({"kind": "case", "case": case.name, "wall_seconds": time.monotonic() - started})


def _run_case(case: Case, settings: Settings, layout: files.Layout, emit: Callable[[Record], None]) -> None:
    verified: set[str] = set()
    for number, entry in interleaved(case, settings):
        directory = settings.directory / "saves"
        if directory.exists():  # of a run that was killed, in a directory that is kept
            files.discard(directory)
        directory.mkdir()
        spec = SaveSpec(
            contestant=entry.contestant,
            directory=str(directory),
            size_bytes=settings.size_bytes,
            task=entry.task if entry.task != "load" else "save",
            busy=entry.busy,
            verify=entry.name not in verified and entry.task != "heartbeat",
            prime_bytes=_prime_bytes(entry, settings, layout),
            options=entry.options,
        )
        verified.add(entry.name)
        record: Record = {"kind": "run", "case": case.name, "entry": entry.name, "round": number}
        record["data_bytes"] = layout.data_bytes
        try:
            if case.watch_memory:
                limit_bytes = entry.limit_bytes(layout) if entry.limit_bytes else None
                record |= run_watched(_MODULE, spec, settings.timeout_seconds, limit_bytes)
            else:
                record |= run_child(_MODULE, spec, settings.timeout_seconds)
        finally:
            files.discard(directory)
        emit(record)


def _prime_bytes(entry: Entry, settings: Settings, layout: files.Layout) -> int:
    """Prime no more than the contestant can use, and some: it is most of a run's time where the host takes it back."""
    copies = CONTESTANTS[entry.contestant].num_copies + _PRIME_SPARE
    return min(settings.prime_bytes, int(copies * layout.data_bytes))
