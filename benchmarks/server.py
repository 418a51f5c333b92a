"""Compare a server's latency while it loads by stio and by safetensors in a thread: `python -m benchmarks.server`."""

from __future__ import annotations

import sys

from benchmarks import command
from benchmarks.cases import Case
from benchmarks.report import count_cell, median_cell
from benchmarks.server_bounds import BOUNDS
from benchmarks.server_cases import CASES, LABELS
from benchmarks.server_runner import run_cases
from benchmarks.stats import Runs, plain
from benchmarks.suite import Columns, Suite

_HEAD = (
    "no load: p50 / p99 / max, ms",
    "loading: p50 / p99 / max, ms",
    "loads, s",
    "shutdown, s",
    "probes",
    "failed",
    "runs",
)


def _row(case: str, entry: str, runs: Runs) -> list[str]:
    stretches = [
        " / ".join(median_cell(runs, case, entry, f"{stretch}.{key}", 1e3, 1) for key in ("p50", "p99", "max"))
        for stretch in ("idle", "loading")
    ]
    return [
        *stretches,
        median_cell(runs, case, entry, "seconds", 1, 3),
        median_cell(runs, case, entry, "shutdown_seconds", 1, 2),
        f"{plain(runs, case, entry, 'loading.num_beats').low:.0f} or more",
        f"{plain(runs, case, entry, 'num_failed').high:.0f}",
        count_cell(runs, case, entry),
    ]


def _columns(case: Case) -> Columns:
    return Columns(_HEAD, _row)


SUITE = Suite(
    name="server",
    cases=CASES,
    bounds=BOUNDS,
    labels=LABELS,
    run=run_cases,
    columns=_columns,
    panels=(),
    markers=("<!-- server results: begin -->", "<!-- server results: end -->"),
    picture="",
)

if __name__ == "__main__":
    sys.exit(command.main(SUITE, __doc__ or ""))
