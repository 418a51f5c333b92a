"""Compare stio's drop-in modules with the packages that they stand in for: `python -m benchmarks.compat`.

The contestants are the same calls, of the official package and of stio's modules. Small operations are repeated in a
run, and their median is its figure; what a repetition left is freed or removed off the clock.
"""

from __future__ import annotations

import gc
import itertools
import json
import os
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks import files, meters, pagecache, runner
from benchmarks.child import Spec
from benchmarks.contestants import check_safetensors, fsync
from benchmarks.report import count_cell, faster, plain, ratio
from benchmarks.runs import Bound, Record, Runs
from benchmarks.save import make_tensors
from benchmarks.suite import Case, Columns, Entry, Measure, Settings, Suite

OFFICIAL, OURS = "safetensors", "stio.compat.safetensors"
ROWS = 8192
"""Rows and columns of the matrix of which one row is read."""

MATRIX = "matrix"
"""Its name."""

NUM_MATRICES, COLUMNS = 60, 2048
"""Of the file of which half of the columns are read: matrices, and rows and columns of each."""

NUM_PARAMETERS = 20_000
"""Of the optimizer's state, each with three tensors."""

_ELEMENTS = 64
"""Of each of a parameter's moments."""

_STATE_SEED = 7
_LAYOUTS = {"small": (64, 2, 6_000), "middle": (512, 9, 30_522)}
"""Hidden size, layers and vocabulary: 1 MB and 90 MB."""

_PRIME_SPARE = 1.25
_SMALL_PRIME_BYTES = 500_000_000
_LOAD_BYTES, _COLD_BYTES, _SAVE_BYTES = 6_000_000_000, 500_000_000, 500_000_000
"""What the repetitions of one process come to."""

_MAX_LOADS, _MAX_COLD, _MAX_SAVES = 200, 20, 20
_MIN_LOADS = 3
_ROWS_READ, _SLOW_ROWS_READ = 200, 5
_OPENINGS, _SLOW_OPENINGS = 50, 3
_SLOW_SECONDS = 0.02
_TASKS_DIRECTORY = "/proc/self/task"
_PATIENCE_SECONDS, _POLL_SECONDS = 1.0, 0.005


# Cases and bounds.


_SIDES = (Entry("stio"), Entry("official"))
_SAVERS = (Entry("stio"), Entry("official-fsync"), Entry("official-atomic"), Entry("official", rounds=3))

CASES: tuple[Case, ...] = (
    *(
        Case(f"load-{size}", f"load_file of {size}", _SIDES, rounds=5, layout=layout, state="load")
        for size, layout in (("1MB", "small"), ("90MB", "middle"), ("1.7GB", "model"))
    ),
    *(
        Case(f"save-{size}", f"save_file of {size}, to a fresh path", _SAVERS, rounds=5, layout=layout, state="save")
        for size, layout in (("1MB", "small"), ("90MB", "middle"), ("1.7GB", "model"))
    ),
    Case(
        "slice",
        f"one row of a matrix [{ROWS}, {ROWS}] of F32, warm",
        (*(Entry(name) for name in ("stio", "stio-pread", "official-pread")), Entry("official", rounds=3)),
        rounds=5,
        layout="matrix",
        state="slice",
    ),
    Case(
        "columns",
        f"half of the columns of {NUM_MATRICES} matrices [{COLUMNS}, {COLUMNS}] of F32, warm, in memory of their own",
        (*(Entry(name) for name in ("stio-slices", "stio", "official", "official-whole", "official-pread")),),
        rounds=5,
        layout="matrices",
        state="columns",
    ),
    Case(
        "state",
        f"an optimizer's state of {NUM_PARAMETERS:,} parameters, {3 * NUM_PARAMETERS:,} tensors",
        (Entry("stio-state"), Entry("torch-state")),
        rounds=5,
        layout="state",
        state="state",
    ),
)


_SIZES = ("1MB", "90MB", "1.7GB")


def _quicker(case: str, text: str, ours: str, theirs: str, key: str, at_least: float | None) -> Bound:
    """How many times as fast ours is as theirs, by the figure `key`."""
    return Bound(case, text, partial(ratio, case=case, ours=ours, theirs=theirs, key=key), at_least=at_least)


BOUNDS: tuple[Bound, ...] = (
    *(
        _quicker(f"load-{size}", f"load_file, {text}", "stio", "official", key, 1.0)
        for size in _SIZES
        for text, key in (
            ("warm, untouched", "untouched_seconds"),
            ("warm, every page touched", "touched_seconds"),
            ("cold, every page touched", "cold_seconds"),
        )
    ),
    *(
        faster(f"save-{size}", text, "stio", theirs, at_least)
        for size in _SIZES
        for text, theirs, at_least in (
            ("save_file (durable) / official + fsync of file and directory", "official-fsync", 1.0),
            ("save_file (durable) / official to another name, fsync, rename, fsync", "official-atomic", None),
            ("save_file (durable) / official, not durable", "official", None),
        )
    ),
    _quicker("slice", 'get_slice()[row], mmap / official "pread"', "stio", "official-pread", "row_seconds", 20.0),
    _quicker(
        "slice", 'get_slice()[row], "pread" / official "pread"', "stio-pread", "official-pread", "row_seconds", 20.0
    ),
    _quicker("slice", "open and get_slice()[row], mmap", "stio", "official-pread", "open_seconds", 20.0),
    _quicker("slice", 'open and get_slice()[row], "pread"', "stio-pread", "official-pread", "open_seconds", 20.0),
    _quicker("slice", "get_slice()[row], mmap / official mmap", "stio", "official", "row_seconds", None),
    _quicker(
        "columns", "stio.load(slices=) / everything mapped and copied", "stio-slices", "official-whole", "seconds", 0.83
    ),
    _quicker("columns", "stio.load(slices=) / official slices, copied", "stio-slices", "official", "seconds", 1.0),
    _quicker("columns", 'stio.load(slices=) / official "pread"', "stio-slices", "official-pread", "seconds", 1.0),
    _quicker(
        "columns", "drop-in's slices, copied / everything mapped and copied", "stio", "official-whole", "seconds", 0.83
    ),
    _quicker("columns", "drop-in's slices, copied / official slices, copied", "stio", "official", "seconds", 1.0),
    _quicker("state", "save_state / torch.save + fsync", "stio-state", "torch-state", "save_seconds", 5.0),
    _quicker("state", "load_state / torch.load", "stio-state", "torch-state", "load_seconds", 5.0),
)


# Contestants.


@dataclass(frozen=True, slots=True)
class Contestant:
    """One side."""

    label: str  # for the table
    package: str = ""  # whose `load_file`, `save_file` and `safe_open` are called
    backend: str = "mmap"  # of `safe_open`
    sync: bool = False  # sync the file and its directory after a save: the package does not do it itself
    atomic: bool = False  # save to another name, sync, rename, sync the directory: the least that is atomic and durable
    suffix: str = ".safetensors"  # of what a nested state is saved to
    whole: bool = False  # load tensors whole, then copy a part of each
    state: Callable[[], tuple[Callable[[Any, Path], Any], Callable[[Path], Any]]] | None = None
    """Gives how nested state is saved, durably, and loaded."""


def functions(contestant: Contestant) -> tuple[Callable[[Path], Any], Callable[[Any, Path], None]]:
    """Give how tensors are loaded from a file, and how they are saved to one."""
    module = import_module(f"{contestant.package}.torch")

    def save(tensors: Any, path: Path) -> None:
        target = path.with_suffix(".tmp") if contestant.atomic else path
        module.save_file(tensors, target)
        if contestant.sync:
            fsync(target, target.parent)
        if contestant.atomic:
            fsync(target)
            target.rename(path)
            fsync(path.parent)

    return module.load_file, save


def opener(contestant: Contestant) -> Callable[[Path], Any]:
    """Give how a file is opened for torch."""
    safe_open = import_module(contestant.package).safe_open
    return lambda path: safe_open(path, framework="pt", backend=contestant.backend)


def _stio_state() -> tuple[Callable[[Any, Path], Any], Callable[[Path], Any]]:
    module = import_module("stio.sync")
    return module.save_state, module.load_state


def _torch_state() -> tuple[Callable[[Any, Path], Any], Callable[[Path], Any]]:
    import torch

    def save(state: Any, path: Path) -> None:
        torch.save(state, path)
        fsync(path, path.parent)

    return save, lambda path: torch.load(path, weights_only=True)


CONTESTANTS: dict[str, Contestant] = {
    "stio": Contestant("stio.compat.safetensors", OURS),
    "official": Contestant("safetensors", OFFICIAL),
    "official-fsync": Contestant("safetensors, fsync of file and directory", OFFICIAL, sync=True),
    "official-atomic": Contestant(
        "safetensors to another name, fsync, rename, fsync of directory", OFFICIAL, atomic=True
    ),
    "stio-pread": Contestant('stio.compat.safetensors, backend="pread"', OURS, "pread"),
    "official-pread": Contestant('safetensors, backend="pread"', OFFICIAL, "pread"),
    "stio-slices": Contestant("stio.sync.load(slices=)"),
    "official-whole": Contestant("safetensors, load_file and one strided copy a tensor", OFFICIAL, whole=True),
    "stio-state": Contestant("stio.sync.save_state, load_state", state=_stio_state),
    "torch-state": Contestant(
        "torch.save, fsync of file and directory; torch.load(weights_only=True)", suffix=".pt", state=_torch_state
    ),
}


# Files and states.


def layout_of(case: Case, size_bytes: int) -> files.Layout:
    """Give the tensors of a case of loading or saving."""
    if case.layout == "model":
        return files.llama_layout(size_bytes)
    return files.bert_layout(case.layout, *_LAYOUTS[case.layout])


def data_bytes(case: Case, size_bytes: int) -> int:
    """Give the bytes of data that one operation of a case is about."""
    if case.layout == "matrix":
        return ROWS * 4
    if case.layout == "state":
        return NUM_PARAMETERS * (2 * _ELEMENTS + 1) * 4
    if case.layout == "matrices":
        return NUM_MATRICES * COLUMNS * COLUMNS * 4 // 2
    return layout_of(case, size_bytes).data_bytes


def write_matrix(path: Path) -> None:
    """Write a file with one matrix of F32."""
    nbytes = ROWS * ROWS * 4
    entry = {MATRIX: {"dtype": "F32", "shape": [ROWS, ROWS], "data_offsets": [0, nbytes]}}
    text = json.dumps(entry, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    numbers = np.random.default_rng(_STATE_SEED).random((ROWS, ROWS), np.float32)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.write(numbers.data)


def write_matrices(path: Path, num_rows: int = COLUMNS) -> None:
    """Write a file with the matrices of F32, of which half of the columns are read."""
    nbytes = num_rows * COLUMNS * 4
    entries = {
        f"{MATRIX}.{k}": {"dtype": "F32", "shape": [num_rows, COLUMNS], "data_offsets": [k * nbytes, (k + 1) * nbytes]}
        for k in range(NUM_MATRICES)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    chance = np.random.default_rng(_STATE_SEED)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _ in range(NUM_MATRICES):
            file.write(chance.random((num_rows, COLUMNS), np.float32).data)


def make_state() -> dict[str, Any]:
    """Make a state as AdamW's: a step and two moments a parameter, each tensor in memory of its own."""
    import torch

    torch.manual_seed(_STATE_SEED)
    return {
        "state": {
            number: {
                "step": torch.tensor(float(number)),
                "exp_avg": torch.randn(_ELEMENTS),
                "exp_avg_sq": torch.rand(_ELEMENTS),
            }
            for number in range(NUM_PARAMETERS)
        },
        "param_groups": [
            {
                "lr": 3e-4,
                "betas": (0.9, 0.95),
                "eps": 1e-8,
                "weight_decay": 0.1,
                "amsgrad": False,
                "maximize": False,
                "foreach": None,
                "capturable": False,
                "differentiable": False,
                "fused": None,
                "params": list(range(NUM_PARAMETERS)),
            }
        ],
    }


# One run, in its own process.


def run(spec: Spec) -> Record:
    """Do one run; see the fields of the tasks below."""
    return _TASKS[spec.task](spec)


def _load(spec: Spec) -> Record:
    """Load: untouched_seconds and touched_seconds warm, cold_seconds evicted and touched, and the checksum."""
    load, _ = functions(CONTESTANTS[spec.contestant])
    path = Path(spec.path)
    nbytes = path.stat().st_size
    checksums = set()

    def touched() -> Any:
        tensors = load(path)
        checksums.add(meters.touch_all(meters.tensor_arrays(tensors), "page"))
        return tensors

    spec.prime()
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


def _save(spec: Spec) -> Record:
    """Save to a fresh path: seconds, of the first save (first_seconds) and of all."""
    _, save = functions(CONTESTANTS[spec.contestant])
    case = next(case for case in CASES if case.name == spec.case)
    layout = layout_of(case, spec.size_bytes)
    tensors = make_tensors(layout)
    paths = [
        Path(spec.path) / f"{number}.safetensors"
        for number in range(_times(layout.data_bytes, _SAVE_BYTES, 1, _MAX_SAVES))
    ]
    spec.prime()
    seconds = []
    for path in paths:
        started = time.perf_counter()
        save(tensors, path)
        seconds.append(time.perf_counter() - started)
        if path != paths[-1]:
            files.discard(path)
    if spec.verify:
        check_safetensors(paths[-1], tensors)
    return {"seconds": median(seconds), "first_seconds": seconds[0]}


def _slice(spec: Spec) -> Record:
    """Read rows of the matrix, each another one: row_seconds of an open file, open_seconds with opening it."""
    open_file = opener(CONTESTANTS[spec.contestant])
    path = Path(spec.path)
    pagecache.fill_by_reads(path)
    numbers = itertools.cycle(range(0, ROWS, 37))
    last: list[Any] = []

    def opened_row() -> Any:
        with open_file(path) as file:
            return file.get_slice(MATRIX)[next(numbers)]

    with open_file(path) as file:

        def row() -> Any:
            last[:] = (number := next(numbers)), file.get_slice(MATRIX)[number]

        started = time.perf_counter()
        row()
        slow = time.perf_counter() - started > _SLOW_SECONDS
        row_seconds = _median(row, _SLOW_ROWS_READ if slow else _ROWS_READ)
    open_seconds = _median(opened_row, _SLOW_OPENINGS if slow else _OPENINGS)
    start, spans = files.read_header(path)
    matrix = np.memmap(path, np.float32, mode="r", offset=start + spans[MATRIX][0])
    number, found = last
    if not np.array_equal(found.numpy(), matrix[number * ROWS :][:ROWS]):
        raise ValueError("a wrong row was read")
    return {"seconds": row_seconds, "row_seconds": row_seconds, "open_seconds": open_seconds}


def _columns_of(contestant: Contestant) -> Callable[[Path], dict[str, Any]]:
    """Give how half of the columns of each matrix are loaded, into memory of their own."""
    part = np.s_[:, : COLUMNS // 2]
    names = [f"{MATRIX}.{k}" for k in range(NUM_MATRICES)]
    if not contestant.package:
        load = import_module("stio.sync").load
        return lambda path: load(path, slices=dict.fromkeys(names, part))
    if contestant.whole:
        load_file = import_module(f"{contestant.package}.torch").load_file
        return lambda path: {name: tensor[part].contiguous() for name, tensor in load_file(path).items()}
    open_file = opener(contestant)

    def sliced(path: Path) -> dict[str, Any]:
        with open_file(path) as file:
            return {name: file.get_slice(name)[part].contiguous() for name in names}

    return sliced


def _half_columns(spec: Spec) -> Record:
    """Read half of the columns of each matrix: seconds, of a warm file, once in a process."""
    path = Path(spec.path)
    load = _columns_of(CONTESTANTS[spec.contestant])
    small = path.with_suffix(".small")
    write_matrices(small, 8)
    load(small)  # imports modules; its memory is too small to be of use to the next call
    spec.prime()
    pagecache.fill_by_reads(path)
    started = time.perf_counter()
    found = load(path)
    seconds = time.perf_counter() - started
    start, spans = files.read_header(path)
    for name, tensor in found.items():
        matrix = np.memmap(path, np.float32, mode="r", offset=start + spans[name][0], shape=(COLUMNS, COLUMNS))
        if not np.array_equal(tensor.numpy(), matrix[:, : COLUMNS // 2]):
            raise ValueError("wrong columns were read")
    return {"seconds": seconds}


def _state(spec: Spec) -> Record:
    """Save and load nested state once each: save_seconds, load_seconds, and seconds for both."""
    contestant = CONTESTANTS[spec.contestant]
    assert contestant.state is not None
    save, load = contestant.state()
    state = make_state()
    path = Path(spec.path) / f"state{contestant.suffix}"
    spec.prime()
    started = time.perf_counter()
    save(state, path)
    saved = time.perf_counter() - started
    gc.collect()
    started = time.perf_counter()
    found = load(path)
    loaded = time.perf_counter() - started
    if spec.verify and not _equal(found, state):
        raise ValueError("another state was loaded")
    return {"save_seconds": saved, "load_seconds": loaded, "seconds": saved + loaded, "file_bytes": path.stat().st_size}


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


_TASKS: dict[str, Callable[[Spec], Record]] = {
    "load": _load,
    "save": _save,
    "slice": _slice,
    "columns": _half_columns,
    "state": _state,
}


# The runs of a case.


@contextmanager
def prepared(case: Case, settings: Settings) -> Iterator[Measure]:
    """Make the files that a case reads, each side's its own; give the function that runs an entry."""
    directory = settings.directory / case.name
    if directory.exists():  # of a run that was killed, in a directory that stays
        files.discard(directory)
    directory.mkdir()
    saves = case.state in ("save", "state")
    num_bytes = data_bytes(case, settings.size_bytes)

    def measure(entry: Entry, number: int, verify: bool) -> Record:
        target = directory / ("saves" if saves else f"{entry.contestant}.safetensors")
        if saves:
            target.mkdir()
        spec = Spec(
            contestant=entry.contestant,
            task=case.state,
            path=str(target),
            size_bytes=settings.size_bytes,
            case=case.name,
            verify=verify,
            prime_bytes=min(settings.prime_bytes, max(_SMALL_PRIME_BYTES, int(_PRIME_SPARE * num_bytes))),
        )
        try:
            return {"data_bytes": num_bytes} | runner.run_child("benchmarks.compat", spec, settings.timeout_seconds)
        finally:
            if saves:
                files.discard(target)

    try:
        for entry in () if saves else settings.entries(case):
            path = directory / f"{entry.contestant}.safetensors"
            if case.state == "slice":
                write_matrix(path)
            elif case.state == "columns":
                write_matrices(path)
            else:
                files.write_file(path, layout_of(case, settings.size_bytes))
        yield measure
    finally:
        files.discard(directory)


# Tables.


_KEYS = {
    "load": {
        "warm, untouched": "untouched_seconds",
        "warm, touched": "touched_seconds",
        "cold, touched": "cold_seconds",
    },
    "save": {"median of a process's saves": "seconds", "its first save": "first_seconds"},
    "columns": {"half of the columns": "seconds"},
    "slice": {"one row": "row_seconds", "open and one row": "open_seconds"},
    "state": {"save": "save_seconds", "load": "load_seconds"},
}


def _columns(case: Case) -> Columns:
    keys = _KEYS[case.state]

    def row(name: str, entry: str, runs: Runs) -> list[str]:
        cells = [_cell(runs, name, entry, key) for key in keys.values()]
        return [*cells, count_cell(runs, name, entry)]

    return Columns((*(f"{text}, ms (min to max)" for text in keys), "runs"), row)


def _cell(runs: Runs, case: str, entry: str, key: str) -> str:
    found = plain(runs, case, entry, key)
    return f"{_ms(found.value)} ({_ms(found.low)} to {_ms(found.high)})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.{0 if seconds >= 0.1 else 1 if seconds >= 0.01 else 3}f}"


SUITE = Suite(
    name="compat",
    cases=CASES,
    bounds=BOUNDS,
    labels={name: contestant.label for name, contestant in CONTESTANTS.items()},
    prepared=prepared,
    columns=_columns,
)

if __name__ == "__main__":
    sys.exit(runner.main(SUITE, __doc__ or ""))
