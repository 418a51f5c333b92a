"""The command line of a benchmark: run the chosen cases, keep the raw figures, report them."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import chart, machine, report
from benchmarks.cases import Case
from benchmarks.processes import Settings
from benchmarks.suite import Suite

HERE = Path(__file__).resolve().parent
PRIME_BYTES, QUICK_PRIME_BYTES = 4_000_000_000, 1_000_000_000


def main(suite: Suite, description: str, arguments: list[str] | None = None) -> int:
    """Run the chosen cases and report them; 1 where a bound was missed or has no figure, else 0."""
    options = _parser(suite, description).parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that files, mounts and groups are removed
    partial = bool(options.quick or options.cases or options.rounds or options.size_bytes)
    out = options.out or HERE / "results" / f"{suite.name}{'-partial' if partial else ''}.jsonl"
    if options.report_only:
        records = report.read_records(out)
    else:
        cases = [case for case in suite.cases if not options.cases or case.name in options.cases]
        with _directory(options.dir, options.keep) as directory:
            records = _run(suite, cases, _settings(options, suite, directory), out)
    _publish(suite, records, out, write_readme=options.publish or not partial)
    return 1 if report.num_missed(records, suite) else 0


def _run(suite: Suite, cases: list[Case], settings: Settings, out: Path) -> list[dict[str, Any]]:
    """Run, with each record on disk as soon as it is there."""
    records: list[dict[str, Any]] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "w") as file:

        def emit(record: dict[str, Any]) -> None:
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(report.progress_line(record), file=sys.stderr, flush=True)

        emit(
            {
                "kind": "machine",
                **machine.describe(),
                **suite.describe(),
                "disk": machine.describe_disk(settings.directory),
                "date": time.strftime("%Y-%m-%d"),
                "size_bytes": settings.size_bytes,
                "prime_bytes": settings.prime_bytes,
            }
        )
        suite.run(cases, settings, emit)
    return records


def _publish(suite: Suite, records: list[dict[str, Any]], out: Path, *, write_readme: bool) -> None:
    """Print the tables, draw the chart beside the raw figures, and update the page."""
    text = report.markdown(records, suite)
    print(text)
    drawn = out.resolve().with_suffix(".svg")
    try:
        is_drawn = chart.draw(records, suite, drawn)
    except ImportError as error:
        is_drawn = False
        print(f"no chart: {error}", file=sys.stderr)
    if is_drawn and write_readme and drawn.is_relative_to(HERE):
        text += f"\n![{suite.picture}]({drawn.relative_to(HERE)})\n"
    if write_readme:
        report.write_between_markers(HERE / "README.md", text, suite.markers)


def _settings(options: argparse.Namespace, suite: Suite, directory: Path) -> Settings:
    return Settings(
        directory=directory,
        size_bytes=options.size_bytes or (suite.quick_size_bytes if options.quick else suite.size_bytes),
        prime_bytes=QUICK_PRIME_BYTES if options.quick else PRIME_BYTES,
        rounds=options.rounds,
        quick=options.quick,
        timeout_seconds=options.timeout,
    )


@contextmanager
def _directory(parent: Path, keep: bool) -> Iterator[Path]:
    if keep:
        kept = parent / "stio-bench"
        kept.mkdir(exist_ok=True)
        yield kept
        return
    with tempfile.TemporaryDirectory(prefix="stio-bench-", dir=parent) as name:
        yield Path(name)


def _parser(suite: Suite, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"benchmarks.{suite.name}", description=description)
    names = [case.name for case in suite.cases]
    parser.add_argument("--cases", nargs="+", choices=names, metavar="CASE", help=f"of: {', '.join(names)}")
    parser.add_argument("--rounds", type=int, help="rounds of every case")
    parser.add_argument("--size-bytes", type=int, help=f"size of the model, {suite.size_bytes} by default")
    parser.add_argument("--quick", action="store_true", help="a small file, one round: does it run, how fast roughly")
    parser.add_argument("--out", type=Path, help="the raw figures, JSON lines; the chart goes beside them")
    parser.add_argument("--dir", type=Path, default=HERE.parent.parent, help="a directory on a real disk for the files")
    parser.add_argument("--keep", action="store_true", help="keep the files, and use those that are there")
    parser.add_argument("--timeout", type=float, default=180.0, help="seconds for one run")
    parser.add_argument("--publish", action="store_true", help="write the tables of a partial run to README.md too")
    parser.add_argument("--report-only", action="store_true", help="report the figures of --out again, run nothing")
    return parser
