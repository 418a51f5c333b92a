"""Compare stio's saves with its peers' and with the limits of disk and memory: `python -m benchmarks.save`."""

from __future__ import annotations

import sys

from benchmarks import command
from benchmarks.cases import Case
from benchmarks.report import MEMORY_COLUMNS, beat_columns, count_cell, median_cell
from benchmarks.save_bounds import BOUNDS
from benchmarks.save_cases import CASES
from benchmarks.save_contestants import CONTESTANTS
from benchmarks.save_runner import run_cases
from benchmarks.stats import Runs, plain
from benchmarks.suite import Columns, Panel, Suite


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
    labels={name: contestant.label for name, contestant in CONTESTANTS.items()},
    run=run_cases,
    columns=_columns,
    panels=(
        Panel("durable", "seconds", "GB/s until durable (or done)"),
        Panel("staged", "staged_seconds", "GB/s of staging, from the second save on"),
    ),
    markers=("<!-- save results: begin -->", "<!-- save results: end -->"),
    picture="Rates of saving and of staging",
)

if __name__ == "__main__":
    sys.exit(command.main(SUITE, __doc__ or ""))
