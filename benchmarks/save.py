"""Compare stio's saves with its peers' and with the limits of disk and memory: `python -m benchmarks.save`.

Tensors, stagers and buffers of a run are made before its clock starts. What was saved is removed off the clock.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from benchmarks import files, meters, runner
from benchmarks.child import Spec
from benchmarks.contestants import SAVERS, Save, Tensors, Times, opened
from benchmarks.load import BLOCKING_STEP_SECONDS, SMALL_BUDGET_BYTES
from benchmarks.report import (
    MEMORY_COLUMNS,
    beat_columns,
    cost,
    count_cell,
    faster,
    held,
    lag,
    median_cell,
    plain,
    seconds,
)
from benchmarks.runs import Bound, Record, Runs
from benchmarks.suite import MEBI, Case, Columns, Entry, Measure, Panel, Settings, Suite

BUDGET_BYTES = 512 * MEBI
SLACK_BYTES = 64_000_000
"""What a save may hold above its budget: the engine's thread, workers, headers."""
REPEATS = 3
"""Saves of the task "again": the first, and those whose median counts."""

_COPIES = 2
"""Of the checkpoint, on the disk at once: the one that is written, and one whose blocks are not free yet."""
_PRIME_SPARE = 0.25
_MIN_LOOP_SAVES = 3
_STEP_SIZE = 512

_PEERS = ("safetensors", "hub", "torch")
_WATCHED = ("safetensors-fsync", "dcp", "dcp-async", "dcp-hf", *_PEERS)


def _budgeted(contestant: str, budget_bytes: int) -> Entry:
    def limit_bytes(layout: files.Layout) -> int:
        return budget_bytes + SLACK_BYTES

    return Entry(
        contestant,
        f"{contestant} {budget_bytes // MEBI} MiB",
        options={"budget_bytes": budget_bytes},
        limit_bytes=limit_bytes,
    )


CASES: tuple[Case, ...] = (
    Case(
        "durable",
        "one save, from the call until it is durable",
        (
            *(Entry(name) for name in ("stio", "raw", "safetensors-fsync", "dcp")),
            Entry("stio-saver", task="again", rounds=5),
            *(Entry(name, rounds=3) for name in _PEERS),
            Entry("dcp-hf", rounds=2),
        ),
        rounds=15,
        not_quick=frozenset({*_PEERS, "dcp-hf"}),
    ),
    Case(
        "staged",
        "three saves by one saver: until the tensors may change",
        (
            *(Entry(name, task="again") for name in ("stio-saver", "memcpy", "dcp-async")),
            Entry("dcp-caller", task="again", rounds=2),
        ),
        rounds=5,
    ),
    Case(
        "training",
        "one save, the caller's loop blocked by 200 ms steps",
        (
            Entry("stio"),
            Entry("stio", "stio beside steps", task="steps"),
            Entry("stio", "stio beside sleeps", task="sleeps"),
        ),
        rounds=5,
    ),
    Case(
        "memory",
        "memory held by one save, the tensors aside, by control group",
        (
            *(_budgeted(name, size) for name in ("stio", "stio-saver") for size in (BUDGET_BYTES, SMALL_BUDGET_BYTES)),
            *(Entry(name) for name in ("stio-saver", *_WATCHED)),
        ),
        rounds=1,
        watch_memory=True,
        not_quick=frozenset({"stio-saver", *_WATCHED}),
    ),
    Case(
        "loop",
        "event loop's lag during saves",
        (
            Entry("stio", "stio alone", task="heartbeat"),
            Entry("stio", "stio busy", task="heartbeat", busy=True),
            Entry("stio-switch", "stio-switch busy", task="heartbeat", busy=True),
            Entry("stio-saver", "stio-saver alone", task="heartbeat"),
            Entry("safetensors-fsync", "safetensors-fsync alone", task="heartbeat", rounds=1),
            Entry("dcp-async", "dcp-async alone", task="heartbeat", rounds=1),
        ),
        rounds=3,
        not_quick=frozenset({"stio-saver alone", "safetensors-fsync alone", "dcp-async alone"}),
    ),
)

_DCP_STAGERS = ("dcp-async", "dcp-caller")

BOUNDS: tuple[Bound, ...] = (
    faster("durable", "stio.save / raw O_DIRECT writer", "stio", "raw", 0.9),
    faster("durable", "stio.save / safetensors + fsync of file and directory", "stio", "safetensors-fsync", 1.25),
    faster("durable", "stio.save / DCP", "stio", "dcp", 3.0),
    faster("durable", "a Saver's later saves / raw O_DIRECT writer", "stio-saver", "raw"),
    faster("durable", "a Saver's later saves / safetensors + fsync", "stio-saver", "safetensors-fsync"),
    faster("durable", "stio.save / DCP's HuggingFaceStorageWriter", "stio", "dcp-hf"),
    faster("durable", "stio.save / safetensors, not durable", "stio", "safetensors"),
    faster("durable", "stio.save / huggingface_hub, not durable", "stio", "hub"),
    faster("durable", "stio.save / torch.save, not durable", "stio", "torch"),
    cost("staged", "later saves: staging through one memcpy", "stio-saver", "memcpy", "staged_seconds", 1.3),
    cost("staged", "later saves: staging through DCP's own", "stio-saver", _DCP_STAGERS, "staged_seconds", 1.2),
    seconds("staged", "later saves: staging", "stio-saver", "staged_seconds", None, "ms"),
    seconds("staged", "the first save: staging", "stio-saver", "first_staged_seconds", None, "ms"),
    cost("staged", "the first save: staging through DCP's own", "stio-saver", _DCP_STAGERS, "first_staged_seconds"),
    cost(
        "training", "durable: beside torch steps through alone", "stio beside steps", "stio", "committed_seconds", 1.5
    ),
    cost("training", "the same, as the blocked caller sees it", "stio beside steps", "stio", "seconds"),
    cost("training", "durable: beside sleeping steps through alone", "stio beside sleeps", "stio", "committed_seconds"),
    held("stio 512 MiB", "stio.save, budget 512 MiB, through budget + 64 MB"),
    held("stio 64 MiB", "stio.save, budget 64 MiB, through budget + 64 MB"),
    held("stio-saver 512 MiB", "Saver, budget 512 MiB, through budget + 64 MB"),
    held("stio-saver 64 MiB", "Saver, budget 64 MiB, through budget + 64 MB"),
    lag("loop", "p99 lag above the baseline, alone", "stio alone", 0.005),
    lag("loop", "p99 lag above the baseline, busy", "stio busy", 0.025),
    lag("loop", "p99 lag above the baseline, busy, switch_interval 0.5 ms", "stio-switch busy", 0.005),
    lag("loop", "p99 lag above the baseline, alone, a Saver", "stio-saver alone", None),
)


# One run, in its own process.


def run(spec: Spec) -> Record:
    """Do one run; see the fields of the tasks below; `load`, the default, is one save."""
    return asyncio.run(_run(spec))


async def _run(spec: Spec) -> Record:
    saver = SAVERS[spec.contestant]
    tensors = make_tensors(files.llama_layout(spec.size_bytes))
    record: Record = {}
    async with opened(saver, tensors, spec.options, spec.task == "heartbeat") as save:
        record["prime_seconds"] = spec.prime()
        spec.join_groups()
        meters.reset_peak_rss()
        before = meters.rss_bytes()["rss_bytes"]
        last = await _TASKS[spec.task](spec, save, record)
        record["peak_rss_added_bytes"] = meters.rss_bytes()["peak_rss_bytes"] - before
    if spec.verify and saver.check is not None:
        saver.check(last, tensors)
    return record


def make_tensors(layout: files.Layout) -> Tensors:
    """Make tensors, each in memory of its own, filled."""
    import torch

    tensors = {tensor.name: torch.empty(tensor.shape, dtype=torch.bfloat16) for tensor in layout.tensors}
    files.fill_arrays(array for _, array in meters.tensor_arrays(tensors))
    return tensors


async def _once(spec: Spec, save: Save, record: Record) -> Path:
    """Save once: staged_seconds, seconds and, where the contestant says it, committed_seconds."""
    path = _destination(spec, 0)
    _note(record, [await save(path)])
    return path


async def _again(spec: Spec, save: Save, record: Record) -> Path:
    """Save several times to fresh destinations: the first one's figures, and the medians of the others."""
    times = []
    for number in range(REPEATS):
        path = _destination(spec, number)
        times.append(await save(path))
        if number < REPEATS - 1:
            files.discard(path)
    _note(record, times[1:])
    record |= {"first_staged_seconds": times[0].staged, "first_seconds": times[0].done}
    record["all_staged_seconds"] = [each.staged for each in times]
    return path


async def _heartbeat(spec: Spec, save: Save, record: Record) -> Path:
    """Save again and again until there are enough beats, see `meters.measure_lag`."""
    path = _destination(spec, 0)
    await meters.measure_lag(
        record, busy=spec.busy, before=lambda: files.discard(path), turn=lambda: save(path), min_turns=_MIN_LOOP_SAVES
    )
    return path


def _beside(prepare_step: Callable[[], Callable[[], None]]) -> Callable[[Spec, Save, Record], Awaitable[Path]]:
    async def task(spec: Spec, save: Save, record: Record) -> Path:
        """Save while the caller's loop is blocked by steps of 200 ms, with one turn of the loop between them."""
        path = _destination(spec, 0)
        step = prepare_step()
        saving = asyncio.ensure_future(save(path))
        await asyncio.sleep(0)
        steps = 0
        while not saving.done():
            step()
            steps += 1
            await asyncio.sleep(0)
        _note(record, [saving.result()])
        record["num_steps"] = steps
        return path

    return task


def _prepare_training() -> Callable[[], None]:
    """Give a step that computes on one core, in torch."""
    import torch

    torch.set_num_threads(1)
    a, b = torch.randn(_STEP_SIZE, _STEP_SIZE), torch.randn(_STEP_SIZE, _STEP_SIZE)
    a @ b  # the library's own set-up

    def step() -> None:
        end = time.perf_counter() + BLOCKING_STEP_SECONDS
        while time.perf_counter() < end:
            a @ b

    return step


def _prepare_sleeping() -> Callable[[], None]:
    return lambda: time.sleep(BLOCKING_STEP_SECONDS)


def _destination(spec: Spec, number: int) -> Path:
    return Path(spec.path) / f"step-{number}{SAVERS[spec.contestant].suffix}"


def _note(record: Record, times: list[Times]) -> None:
    record["staged_seconds"] = median(each.staged for each in times)
    record["seconds"] = median(each.done for each in times)
    committed = [each.committed for each in times if each.committed is not None]
    if committed:
        record["committed_seconds"] = median(committed)


_TASKS: dict[str, Callable[[Spec, Save, Record], Awaitable[Path]]] = {
    "load": _once,
    "again": _again,
    "heartbeat": _heartbeat,
    "steps": _beside(_prepare_training),
    "sleeps": _beside(_prepare_sleeping),
}


# The runs of a case.


@contextmanager
def prepared(case: Case, settings: Settings) -> Iterator[Measure]:
    """Give the function that runs an entry: it saves in a directory of its own, which is removed after it."""
    layout = files.llama_layout(settings.size_bytes)
    runner.require_space(settings.directory, _COPIES * layout.data_bytes)

    def measure(entry: Entry, number: int, verify: bool) -> Record:
        directory = settings.directory / "saves"
        if directory.exists():  # of a run that was killed, in a directory that stays
            files.discard(directory)
        directory.mkdir()
        # No more than the contestant can use, and some: it is most of a run's time where the host takes it back.
        copies = SAVERS[entry.contestant].num_copies + _PRIME_SPARE
        spec = Spec(
            contestant=entry.contestant,
            path=str(directory),
            size_bytes=settings.size_bytes,
            task=entry.task,
            busy=entry.busy,
            verify=verify and entry.task != "heartbeat",
            prime_bytes=min(settings.prime_bytes, int(copies * layout.data_bytes)),
            options=entry.options,
        )
        try:
            record = runner.run_entry("benchmarks.save", spec, case, entry, layout, settings)
        finally:
            files.discard(directory)
        return {"data_bytes": layout.data_bytes} | record

    yield measure


def _columns(case: Case) -> Columns:
    if case.watch_memory:
        return MEMORY_COLUMNS
    if any(entry.task == "heartbeat" for entry in case.entries):
        return beat_columns("saving")
    if case.name == "staged":
        head = ("first staged, s", "later staged, s", "min to max", "GB/s", "later done, s", "runs")
        return Columns(head, _staged_row)
    if case.name == "training":
        head = ("staged, s", "durable, s", "min to max", "seen by the caller, s", "steps", "runs")
        return Columns(head, _training_row)
    head = ("staged, s", "done, s", "min to max", "GB/s", "peak memory added, MB", "runs")
    return Columns(head, _durable_row)


def _durable_row(case: str, entry: str, runs: Runs) -> list[str]:
    done = plain(runs, case, entry, "seconds")
    return [
        median_cell(runs, case, entry, "staged_seconds", 1, 3),
        f"{done.value:.3f}",
        f"{done.low:.3f} to {done.high:.3f}",
        f"{runs.of(case, entry)[0]['data_bytes'] / done.value / 1e9:.2f}",
        median_cell(runs, case, entry, "peak_rss_added_bytes", 1e-6, 0),
        count_cell(runs, case, entry),
    ]


def _staged_row(case: str, entry: str, runs: Runs) -> list[str]:
    staged = plain(runs, case, entry, "staged_seconds")
    return [
        median_cell(runs, case, entry, "first_staged_seconds", 1, 3),
        f"{staged.value:.3f}",
        f"{staged.low:.3f} to {staged.high:.3f}",
        f"{runs.of(case, entry)[0]['data_bytes'] / staged.value / 1e9:.2f}",
        median_cell(runs, case, entry, "seconds", 1, 3),
        count_cell(runs, case, entry),
    ]


def _training_row(case: str, entry: str, runs: Runs) -> list[str]:
    durable = plain(runs, case, entry, "committed_seconds")
    return [
        median_cell(runs, case, entry, "staged_seconds", 1, 3),
        f"{durable.value:.3f}",
        f"{durable.low:.3f} to {durable.high:.3f}",
        median_cell(runs, case, entry, "seconds", 1, 3),
        median_cell(runs, case, entry, "num_steps", 1, 0),
        count_cell(runs, case, entry),
    ]


SUITE = Suite(
    name="save",
    cases=CASES,
    bounds=BOUNDS,
    labels={name: saver.label for name, saver in SAVERS.items()},
    prepared=prepared,
    columns=_columns,
    panels=(
        Panel("durable", "seconds", "until durable (or done)"),
        Panel("staged", "staged_seconds", "staging, from the second save on"),
    ),
    picture="Rates of saving and of staging",
)

if __name__ == "__main__":
    sys.exit(runner.main(SUITE, __doc__ or ""))
