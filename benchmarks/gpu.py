"""Compare stio's loads to a GPU, first forwards and saves with its peers' and with the machine's limits.

`python -m benchmarks.gpu`; see README.md. Where torch sees no CUDA device nothing is measured, and it says so;
`--rehearse` runs all of it on the CPU with a small model, to see that it runs.
"""

from __future__ import annotations

import os
import sys

from benchmarks import command, gpu_device
from benchmarks.cases import Case
from benchmarks.gpu_bounds import BOUNDS
from benchmarks.gpu_cases import CASES, LABELS
from benchmarks.gpu_runner import run_cases
from benchmarks.report import count_cell, median_cell
from benchmarks.stats import Runs, plain
from benchmarks.suite import Columns, Panel, Suite

_REHEARSE = "--rehearse"
_REHEARSAL_BYTES = 40_000_000


def _row(extra: str, case: str, entry: str, runs: Runs) -> list[str]:
    found = plain(runs, case, entry, "seconds")
    return [
        median_cell(runs, case, entry, extra, 1, 3),
        f"{found.value:.3f}",
        f"{found.low:.3f} to {found.high:.3f}",
        f"{runs.of(case, entry)[0]['data_bytes'] / found.value / 1e9:.2f}",
        median_cell(runs, case, entry, "device_peak_bytes", 1e-9, 2),
        count_cell(runs, case, entry),
    ]


def _columns(case: Case) -> Columns:
    extra, title = {
        "gpu-forward": ("load_seconds", "all loaded, s"),
        "gpu-save": ("done_seconds", "done, s"),
    }.get(case.name, ("first_seconds", "first load, s"))
    head = (title, "seconds", "min to max", "GB/s", "device memory, peak, GB", "runs")
    return Columns(head, lambda name, entry, runs: _row(extra, name, entry, runs))


SUITE = Suite(
    name="gpu",
    cases=CASES,
    bounds=BOUNDS,
    labels=LABELS,
    run=run_cases,
    columns=_columns,
    panels=(
        Panel("gpu-warm", "seconds", "GB/s until all is on the device"),
        Panel("gpu-cold", "seconds", "GB/s until all is on the device"),
        Panel("gpu-swap", "seconds", "GB/s, the second load"),
        Panel("gpu-save", "seconds", "GB/s of the time in which tensors may not change"),
    ),
    markers=("<!-- gpu results: begin -->", "<!-- gpu results: end -->"),
    picture="Rates of loads to a GPU",
    size_bytes=16_000_000_000,
    quick_size_bytes=2_000_000_000,
    describe=gpu_device.describe,
)


def main(arguments: list[str]) -> int:
    """Measure, or rehearse, or say why not; 1 where nothing was measured or a bound was missed."""
    if _REHEARSE in arguments:
        os.environ[gpu_device.REHEARSAL] = "1"
        arguments = [argument for argument in arguments if argument != _REHEARSE]
        arguments += ["--quick", "--size-bytes", str(_REHEARSAL_BYTES)]
    elif not gpu_device.is_there():
        print("torch sees no CUDA device here: nothing was measured (--rehearse runs it on the CPU)", file=sys.stderr)
        return 1
    return command.main(SUITE, __doc__ or "", arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
