"""Runs the cases of the server: makes two files of one model, and starts each run in a fresh process."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable

from benchmarks import files, pagecache
from benchmarks.cases import Case
from benchmarks.processes import Record, Settings, interleaved, run_child
from benchmarks.server_cases import server_layout
from benchmarks.server_client import NAMES, ServerSpec

_MODULE = "benchmarks.server_client"
_FREE_BYTES_KEPT = 4_000_000_000


def run_cases(cases: list[Case], settings: Settings, emit: Callable[[Record], None]) -> None:
    """Run `cases` one after the other, and hand each record to `emit` as it comes."""
    layout = server_layout(settings.size_bytes)
    for name in NAMES:
        path = settings.directory / name
        if path.exists() and path.stat().st_size == len(files.encode_header(layout)) + layout.data_bytes:
            continue  # of an earlier run, in a directory that is kept
        free = shutil.disk_usage(settings.directory).free
        if free < layout.data_bytes + _FREE_BYTES_KEPT:
            raise OSError(f"only {free / 1e9:.1f} GB are free for the benchmark's files")
        files.write_file(path, layout)
        pagecache.evict(path)
    for case in cases:
        started = time.monotonic()
        for number, entry in interleaved(case, settings):
            spec = ServerSpec(
                contestant=entry.contestant,
                directory=str(settings.directory),
                busy=entry.busy,
                state=case.state,
                prime_bytes=settings.prime_bytes,
            )
            record: Record = {"kind": "run", "case": case.name, "entry": entry.name, "round": number}
            emit(record | {"data_bytes": layout.data_bytes} | run_child(_MODULE, spec, settings.timeout_seconds))
        emit({"kind": "case", "case": case.name, "wall_seconds": time.monotonic() - started})
