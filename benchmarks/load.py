"""Compare stio's loads with its peers' and with the disk's limit: `python -m benchmarks.load`, see README.md."""

from __future__ import annotations

import sys

from benchmarks import command
from benchmarks.bounds import BOUNDS
from benchmarks.cases import CASES
from benchmarks.contestants import CONTESTANTS
from benchmarks.report import load_columns
from benchmarks.runner import run_cases
from benchmarks.suite import Panel, Suite

_PANELS = ("cold-cap", "cold-loop", "cold", "warm", "faults", "busy-cold", "busy-warm")

SUITE = Suite(
    name="load",
    cases=CASES,
    bounds=BOUNDS,
    labels={name: contestant.label for name, contestant in CONTESTANTS.items()},
    run=run_cases,
    columns=load_columns,
    panels=tuple(Panel(case, "seconds", "GB/s, every page touched") for case in _PANELS),
    markers=("<!-- results: begin -->", "<!-- results: end -->"),
    picture="Rates of the load cases",
)

if __name__ == "__main__":
    sys.exit(command.main(SUITE, __doc__ or ""))
