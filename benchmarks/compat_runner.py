"""Runs the cases of the drop-ins: makes the files, each side's its own, and starts each run in a fresh process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import compat_cases, files
from benchmarks.cases import Case
from benchmarks.compat_child import CompatSpec
from benchmarks.processes import Record, Settings, entries_of, interleaved, run_child

_MODULE = "benchmarks.compat_child"
_PRIME_SPARE = 1.25
_SMALL_PRIME_BYTES = 500_000_000


def run_cases(cases: list[Case], settings: Settings, emit: Callable[[Record], None]) -> None:
    """Run `cases` one after the other, and hand each record to `emit` as it comes."""
    for case in cases:
        started = time.monotonic()
        directory = settings.directory / case.name
        if directory.exists():  # of a run that was killed, in a directory that is kept
            files.discard(directory)
        directory.mkdir()
        try:
            _run_case(case, settings, directory, emit)
        except OSError as error:
            emit({"kind": "skipped", "case": case.name, "reason": str(error)})
        finally:
            files.discard(directory)
        emit({"kind": "case", "case": case.name, "wall_seconds": time.monotonic() - started})


def _run_case(case: Case, settings: Settings, directory: Path, emit: Callable[[Record], None]) -> None:
    saves = case.state in ("save", "state")
    sources = {} if saves else _sources(case, settings, directory)
    data_bytes = compat_cases.data_bytes(case, settings.size_bytes)
    verified: set[str] = set()
    for number, entry in interleaved(case, settings):
        target = directory / "saves"
        if saves:
            target.mkdir()
        spec = CompatSpec(
            contestant=entry.contestant,
            task=case.state,
            path=str(target if saves else sources[entry.contestant]),
            size_bytes=settings.size_bytes,
            case=case.name,
            verify=entry.name not in verified,
            prime_bytes=min(settings.prime_bytes, max(_SMALL_PRIME_BYTES, int(_PRIME_SPARE * data_bytes))),
        )
        verified.add(entry.name)
        record: Record = {"kind": "run", "case": case.name, "entry": entry.name, "round": number}
        try:
            record |= {"data_bytes": data_bytes} | run_child(_MODULE, spec, settings.timeout_seconds)
        finally:
            if saves:
                files.discard(target)
        emit(record)


def _sources(case: Case, settings: Settings, directory: Path) -> dict[str, Path]:
    """Make the files to read."""
    paths = {entry.contestant: directory / f"{entry.contestant}.safetensors" for entry in entries_of(case, settings)}
    for path in paths.values():
        if case.state == "slice":
            compat_cases.write_matrix(path)
        else:
            files.write_file(path, compat_cases.layout_of(case, settings.size_bytes))
    return paths
