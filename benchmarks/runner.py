"""Runs a benchmark: a fresh process for each run, entries interleaved, records on the disk as they come, the report.

Each round runs every entry of a case once, in an order of its own. A run that dies, or takes too long, is a record
with an error. `--report-only` makes the tables from the records of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks import cgroups, machine, pagecache, report
from benchmarks.child import Spec
from benchmarks.files import Layout
from benchmarks.runs import Record
from benchmarks.suite import Case, Entry, Settings, Suite

HERE = Path(__file__).resolve().parent
PRIME_BYTES, QUICK_PRIME_BYTES = 4_000_000_000, 1_000_000_000
FREE_BYTES_KEPT = 4_000_000_000
"""Of the disk, beside what a benchmark writes."""


def run_cases(suite: Suite, cases: list[Case], settings: Settings, emit: Callable[[Record], None]) -> None:
    """Run `cases` one after the other, and pass each record to `emit` as it comes.

    An entry that took longer than the limit takes no part in the later rounds of its case.
    """
    assert suite.prepared is not None
    for case in cases:
        started, verified, too_slow = time.monotonic(), set[str](), set[str]()
        try:
            with suite.prepared(case, settings) as measure:
                for number, entry in interleaved(case, settings):
                    if entry.name in too_slow:
                        continue
                    record: Record = {"kind": "run", "case": case.name, "entry": entry.name, "round": number}
                    record |= measure(entry, number, entry.name not in verified)
                    emit(record)
                    verified.add(entry.name)
                    if record.get("timed_out"):
                        too_slow.add(entry.name)
        except (cgroups.CgroupUnavailable, machine.MountUnavailable, pagecache.PageCacheError, OSError) as error:
            emit({"kind": "skipped", "case": case.name, "reason": str(error)})
        emit({"kind": "case", "case": case.name, "wall_seconds": time.monotonic() - started})


def interleaved(case: Case, settings: Settings) -> Iterator[tuple[int, Entry]]:
    """Yield the number of the round and the entry, each round in an order of its own."""
    shuffle = random.Random(settings.seed)
    rounds = settings.rounds or (1 if settings.quick else case.rounds)
    entries = settings.entries(case)
    for number in range(rounds):
        order = [entry for entry in entries if number < (entry.rounds or rounds)]
        shuffle.shuffle(order)
        for entry in order:
            yield number, entry


def require_space(directory: Path, size_bytes: int) -> None:
    """Raise OSError where a disk has no room for so much, and some to spare."""
    free = shutil.disk_usage(directory).free
    if free < size_bytes + FREE_BYTES_KEPT:
        raise OSError(f"only {free / 1e9:.1f} GB are free for the benchmark's files")


def run_entry(module: str, spec: Spec, case: Case, entry: Entry, layout: Layout, settings: Settings) -> Record:
    """Run a spec, in a memory group of its own where the case watches memory."""
    if not case.watch_memory:
        return run_child(module, spec, settings.timeout_seconds)
    limit_bytes = entry.limit_bytes(layout) if entry.limit_bytes else None
    with cgroups.group("memory") as target:
        if limit_bytes:
            cgroups.limit_memory(target, limit_bytes)
        spec = replace(spec, join=(*spec.join, target.procs), verify=False)  # verifying would take memory
        with cgroups.MemoryWatch(target) as watch:
            record = run_child(module, spec, settings.timeout_seconds)
        record["held_peak_bytes"] = watch.peak_bytes
        record["group_peak_bytes"] = cgroups.peak_bytes(target)
        record["limit_bytes"] = limit_bytes
        if kills := cgroups.oom_kills(target):
            record["error"] = f"killed by the kernel above {limit_bytes} bytes ({kills})"
    return record


def run_child(module: str, spec: Spec, timeout_seconds: float) -> Record:
    """Run one process, killed after `timeout_seconds`; however it ends, the result is a record."""
    environment = os.environ | {"PYTHONPATH": str(HERE.parent), "RUNAI_STREAMER_LOG_LEVEL": "ERROR"}
    command = [sys.executable, "-m", "benchmarks.child", module, spec.encode()]
    busy_before, own_before, started = machine.busy_cpu_seconds(), _child_cpu_seconds(), time.monotonic()
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            cwd=HERE.parent,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {timeout_seconds:.0f} s", "timed_out": True}
    wall = time.monotonic() - started
    try:
        record: Record = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        record = {"error": f"exit status {done.returncode}: {lines[-1] if lines else 'no output'}"}
    others = machine.busy_cpu_seconds() - busy_before - (_child_cpu_seconds() - own_before)
    return record | {"other_cpus": max(0.0, others / wall), "process_seconds": wall}


def _child_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


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
            settings = Settings(
                directory=directory,
                size_bytes=options.size_bytes or (suite.quick_size_bytes if options.quick else suite.size_bytes),
                prime_bytes=QUICK_PRIME_BYTES if options.quick else PRIME_BYTES,
                rounds=options.rounds,
                quick=options.quick,
                timeout_seconds=options.timeout,
            )
            records = _run(suite, cases, settings, out)
    text = report.markdown(records, suite)
    print(text)
    page = HERE / "tables.md" if options.publish or not partial else None
    report.publish(suite, records, report.summary(records, suite), out.resolve().with_suffix(".svg"), page)
    return 1 if report.num_missed(records, suite) else 0


def _run(suite: Suite, cases: list[Case], settings: Settings, out: Path) -> list[Record]:
    """Run, with each record on disk as soon as it is there."""
    records: list[Record] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with open(out, "w") as file:

        def emit(record: Record) -> None:
            records.append(record)
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(report.progress_line(record), file=sys.stderr, flush=True)

        emit(machine.record(settings.directory, settings.size_bytes, settings.prime_bytes))
        run_cases(suite, cases, settings, emit)
    return records


@contextmanager
def _directory(parent: Path, keep: bool) -> Iterator[Path]:
    if keep:
        stays = parent / "stio-bench"
        stays.mkdir(parents=True, exist_ok=True)
        yield stays
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
    parser.add_argument("--publish", action="store_true", help="write the tables of a partial run to tables.md too")
    parser.add_argument("--report-only", action="store_true", help="report the figures of --out again, run nothing")
    return parser
