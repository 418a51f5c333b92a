"""Runs the cases of the device: makes one sharded checkpoint, hands each run to a process, checks what was loaded."""

from __future__ import annotations

import shutil
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks import files, meters
from benchmarks.cases import Case
from benchmarks.gpu_cases import SAVE_BYTES, TRACED
from benchmarks.gpu_child import GpuSpec
from benchmarks.gpu_contestants import missing_package
from benchmarks.pagecache import PageCacheError
from benchmarks.processes import Record, Settings, interleaved, run_child

_MODULE = "benchmarks.gpu_child"
_SHARD_BYTES = 5_000_000_000
_FREE_BYTES_KEPT = 4_000_000_000


def run_cases(cases: list[Case], settings: Settings, emit: Callable[[Record], None]) -> None:
    """Run `cases` one after the other, and hand each record to `emit` as it comes."""
    layout = files.llama_layout(settings.size_bytes)
    directory = settings.directory / f"checkpoint-{layout.data_bytes}"  # with --keep there may be others
    free = shutil.disk_usage(settings.directory).free
    if free < layout.data_bytes + min(layout.data_bytes, 2 * SAVE_BYTES) + _FREE_BYTES_KEPT:
        raise SystemExit(f"only {free / 1e9:.1f} GB are free for the benchmark's files")
    if not directory.exists():
        print(f"making {layout.data_bytes / 1e9:.1f} GB in shards", file=sys.stderr, flush=True)
        partial = directory.with_suffix(".partial")  # of a run that was killed, perhaps
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        files.write_sharded(partial, layout, min(_SHARD_BYTES, -(-layout.data_bytes // 3)))
        partial.rename(directory)
    checksum = _checksum(directory)
    for case in cases:
        started = time.monotonic()
        try:
            _run_case(case, settings, layout, directory, checksum, emit)
        except (OSError, PageCacheError) as error:
            emit({"kind": "skipped", "case": case.name, "reason": str(error)})
        emit({"kind": "case", "case": case.name, "wall_seconds": time.monotonic() - started})


def _run_case(
    case: Case,
    settings: Settings,
    layout: files.Layout,
    directory: Path,
    checksum: int,
    emit: Callable[[Record], None],
) -> None:
    seen: set[str] = set()
    saves = case.name == "gpu-save"
    for number, entry in interleaved(case, settings):
        record: Record = {"kind": "run", "case": case.name, "entry": entry.name, "round": number}
        if package := missing_package(entry.contestant):
            if entry.name not in seen:
                emit(record | {"error": f"{package} is not installed"})
            seen.add(entry.name)
            continue
        size_bytes = min(settings.size_bytes, SAVE_BYTES) if saves else settings.size_bytes
        spec = GpuSpec(
            contestant=entry.contestant,
            directory=str(settings.directory / "saves" if saves else directory),
            size_bytes=size_bytes,
            task=entry.task,
            busy=entry.busy,
            state=case.state,
            verify=entry.name not in seen,
            prime_bytes=min(settings.prime_bytes, 3 * layout.data_bytes),  # all copies that a run can use
            timeline=str(_timeline(settings)) if entry.name == TRACED else "",
        )
        seen.add(entry.name)
        record["data_bytes"] = files.llama_layout(size_bytes).data_bytes if saves else layout.data_bytes
        record |= run_child(_MODULE, spec, settings.timeout_seconds)
        if record.get("checksum") not in (None, checksum):
            record["error"] = f"wrong bytes: checksum {record['checksum']}, not {checksum}"
        shutil.rmtree(settings.directory / "saves", ignore_errors=True)
        emit(record)


def _timeline(settings: Settings) -> Path:
    """Say where the timeline goes: a full run's is shown with the tables."""
    results = Path(__file__).resolve().parent / "results"
    return settings.directory / "timeline.svg" if settings.quick else results / "gpu-timeline.svg"


def _checksum(directory: Path) -> int:
    """Take the checksum of all tensors, by their names, out of the files themselves."""
    arrays: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, mode="r")
        arrays |= dict(meters.file_arrays(data, *files.read_header(path)))
    value = 1
    for name in sorted(arrays):
        value = zlib.adler32(arrays[name].data, value)
    return value
