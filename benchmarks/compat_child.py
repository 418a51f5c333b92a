"""One run of one side of the drop-ins in a process of its own: `python -m benchmarks.compat_child SPEC`, SPEC as JSON.

Imports are done, tensors and files are there and memory is primed before the clock starts. Small operations are done
again and again, and the median of the repetitions is the run's figure; what a repetition left is freed or removed
off the clock.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import compat_cases, files, meters, pagecache
from benchmarks.child import answer
from benchmarks.compat_contestants import CONTESTANTS, functions, opener
from benchmarks.save_contestants import CONTESTANTS as SAVERS

_LOAD_BYTES, _COLD_BYTES, _SAVE_BYTES = 6_000_000_000, 500_000_000, 500_000_000
"""What the repetitions of one process come to."""

_MAX_LOADS, _MAX_COLD, _MAX_SAVES = 200, 20, 20
_MIN_LOADS = 3
_ROWS_READ, _SLOW_ROWS_READ = 200, 5
_OPENINGS, _SLOW_OPENINGS = 50, 3
_SLOW_SECONDS = 0.02
_TASKS_DIRECTORY = "/proc/self/task"
_PATIENCE_SECONDS, _POLL_SECONDS = 1.0, 0.005

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class CompatSpec:
    """What one process has to do."""

    contestant: str
    """A key of `CONTESTANTS`."""

    task: str
    """load, save, slice or state."""

    path: str
    """The file to read, or the directory to save in."""

    size_bytes: int
    """Of the model."""

    case: str
    """Which tensors."""

    verify: bool = False
    """Compare all bytes, after the clock has stopped."""

    prime_bytes: int = 0
    """Memory to touch and free before."""

    def encode(self) -> str:
        """Give the spec as the argument of this module."""
        return json.dumps(asdict(self))


def run(spec: CompatSpec) -> Record:
    """Do one run; see the fields of the tasks below."""
    return _TASKS[spec.task](spec)


def _load(spec: CompatSpec) -> Record:
    """Load: untouched_seconds and touched_seconds warm, cold_seconds evicted and touched, and the checksum."""
    load, _ = functions(CONTESTANTS[spec.contestant])
    path = Path(spec.path)
    nbytes = path.stat().st_size
    checksums = set()

    def touched() -> Any:
        tensors = load(path)
        checksums.add(meters.touch_all(meters.tensor_arrays(tensors), "page"))
        return tensors

    _prime(spec)
    pagecache.fill_by_reads(path)
    record: Record = {}
    loads = _times(nbytes, _LOAD_BYTES, _MIN_LOADS, _MAX_LOADS)
    record["untouched_seconds"] = _median(lambda: load(path), loads)
    record["touched_seconds"] = record["seconds"] = _median(touched, loads)
    cold = _times(nbytes, _COLD_BYTES, 1, _MAX_COLD)
    record["cold_seconds"] = _median(touched, cold, before=lambda: pagecache.evict(path))
    data, (start, spans) = np.memmap(path, np.uint8, mode="r"), files.read_header(path)
    if checksums != {meters.touch_all(meters.file_arrays(data, start, spans), "page")}:
        raise ValueError("wrong bytes were loaded")
    if spec.verify:
        found = meters.checksum_all(meters.tensor_arrays(load(path)))
        if found != meters.checksum_all(meters.file_arrays(data, start, spans)):
            raise ValueError("wrong bytes were loaded")
    return record


def _save(spec: CompatSpec) -> Record:
    """Save to a fresh path: seconds, of the first save (first_seconds) and of all."""
    import torch

    _, save = functions(CONTESTANTS[spec.contestant])
    case = next(case for case in compat_cases.CASES if case.name == spec.case)
    layout = compat_cases.layout_of(case, spec.size_bytes)
    tensors = {tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16) for tensor in layout.tensors}
    files.fill_arrays(array for _, array in meters.tensor_arrays(tensors))
    paths = [
        Path(spec.path) / f"{number}.safetensors"
        for number in range(_times(layout.data_bytes, _SAVE_BYTES, 1, _MAX_SAVES))
    ]
    _prime(spec)
    seconds = []
    for path in paths:
        started = time.perf_counter()
        save(tensors, path)
        seconds.append(time.perf_counter() - started)
        if path != paths[-1]:
            files.discard(path)
    if spec.verify and (check := SAVERS["safetensors"].check):
        check(paths[-1], tensors)
    return {"seconds": median(seconds), "first_seconds": seconds[0]}


def _slice(spec: CompatSpec) -> Record:
    """Read rows of the matrix, each another one: row_seconds of an open file, open_seconds with opening it."""
    open_file = opener(CONTESTANTS[spec.contestant])
    path = Path(spec.path)
    pagecache.fill_by_reads(path)
    numbers = itertools.cycle(range(0, compat_cases.ROWS, 37))
    last: list[Any] = []

    def opened_row() -> Any:
        with open_file(path) as file:
            return file.get_slice(compat_cases.MATRIX)[next(numbers)]

    with open_file(path) as file:

        def row() -> Any:
            last[:] = (number := next(numbers)), file.get_slice(compat_cases.MATRIX)[number]

        started = time.perf_counter()
        row()
        slow = time.perf_counter() - started > _SLOW_SECONDS
        row_seconds = _median(row, _SLOW_ROWS_READ if slow else _ROWS_READ)
    open_seconds = _median(opened_row, _SLOW_OPENINGS if slow else _OPENINGS)
    start, spans = files.read_header(path)
    matrix = np.memmap(path, np.float32, mode="r", offset=start + spans[compat_cases.MATRIX][0])
    number, found = last
    if not np.array_equal(found.numpy(), matrix[number * compat_cases.ROWS :][: compat_cases.ROWS]):
        raise ValueError("a wrong row was read")
    return {"seconds": row_seconds, "row_seconds": row_seconds, "open_seconds": open_seconds}


def _state(spec: CompatSpec) -> Record:
    """Save and load nested state once each: save_seconds, load_seconds, and seconds for both."""
    contestant = CONTESTANTS[spec.contestant]
    assert contestant.state is not None
    save, load = contestant.state()
    state = compat_cases.make_state()
    path = Path(spec.path) / f"state{contestant.suffix}"
    _prime(spec)
    started = time.perf_counter()
    save(state, path)
    saved = time.perf_counter() - started
    gc.collect()
    started = time.perf_counter()
    found = load(path)
    loaded = time.perf_counter() - started
    if spec.verify and not _equal(found, state):
        raise ValueError("another state was loaded")
    return {
        "save_seconds": saved,
        "load_seconds": loaded,
        "seconds": saved + loaded,
        "file_bytes": path.stat().st_size,
    }


def _equal(one: Any, other: Any) -> bool:
    import torch

    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _prime(spec: CompatSpec) -> None:
    gc.collect()
    meters.prime_memory(min(spec.prime_bytes, meters.available_bytes() // 2))


def _wait_for_threads(most: int) -> None:
    """Wait until what was freed is: stio unmaps a large file on a thread, beside which nothing shall be measured."""
    deadline = time.perf_counter() + _PATIENCE_SECONDS
    while len(os.listdir(_TASKS_DIRECTORY)) > most and time.perf_counter() < deadline:
        time.sleep(_POLL_SECONDS)


def _times(nbytes: int, total_bytes: int, fewest: int, most: int) -> int:
    return max(fewest, min(most, total_bytes // nbytes))


def _median(work: Callable[[], Any], times: int, before: Callable[[], None] = lambda: None) -> float:
    seconds = []
    num_threads = len(os.listdir(_TASKS_DIRECTORY))
    for _ in range(times):
        _wait_for_threads(num_threads)
        before()
        started = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - started)
        del result
    return median(seconds)


_TASKS: dict[str, Callable[[CompatSpec], Record]] = {"load": _load, "save": _save, "slice": _slice, "state": _state}


if __name__ == "__main__":
    answer(run, CompatSpec)
