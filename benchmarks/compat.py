"""Compare stio's drop-in modules with the packages that they stand in for: `python -m benchmarks.compat`."""

from __future__ import annotations

import sys

from benchmarks import command
from benchmarks.cases import Case
from benchmarks.compat_bounds import BOUNDS
from benchmarks.compat_cases import CASES
from benchmarks.compat_contestants import CONTESTANTS
from benchmarks.compat_runner import run_cases
from benchmarks.report import count_cell
from benchmarks.stats import Runs, plain
from benchmarks.suite import Columns, Suite

_KEYS = {
    "load": {
        "warm, untouched": "untouched_seconds",
        "warm, touched": "touched_seconds",
        "cold, touched": "cold_seconds",
    },
    "save": {"median of a process's saves": "seconds", "its first save": "first_seconds"},
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
    run=run_cases,
    columns=_columns,
    panels=(),
    markers=("<!-- compat results: begin -->", "<!-- compat results: end -->"),
    picture="",
)

if __name__ == "__main__":
    sys.exit(command.main(SUITE, __doc__ or ""))
