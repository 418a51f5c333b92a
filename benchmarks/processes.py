"""One process a run: starts it, watches its memory where asked, and makes a record of whatever becomes of it."""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import cgroups, machine
from benchmarks.cases import Case, Entry

Record = dict[str, Any]

_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line decides."""

    directory: Path
    """Where the files are made."""

    size_bytes: int
    """Size of the model."""

    prime_bytes: int
    """Memory to touch and free before each run."""

    rounds: int | None
    """Rounds of every case, in place of the case's own number."""

    quick: bool
    """One round, without the entries that no bound needs."""

    timeout_seconds: float = 180.0
    """For one run."""

    seed: int = 1
    """Of the order inside the rounds."""


def entries_of(case: Case, settings: Settings) -> list[Entry]:
    """Give the entries that take part: a quick run leaves some out."""
    return [entry for entry in case.entries if not (settings.quick and entry.name in case.not_quick)]


def interleaved(case: Case, settings: Settings) -> Iterator[tuple[int, Entry]]:
    """Yield the number of the round and the entry, each round in an order of its own."""
    shuffle = random.Random(settings.seed)
    rounds = settings.rounds or (1 if settings.quick else case.rounds)
    entries = entries_of(case, settings)
    for number in range(rounds):
        order = [entry for entry in entries if number < (entry.rounds or rounds)]
        shuffle.shuffle(order)
        for entry in order:
            yield number, entry


def run_watched(module: str, spec: Any, timeout_seconds: float, limit_bytes: int | None) -> Record:
    """Run in a memory group of its own, with the limit enforced by the kernel where there is one.

    Args:
        module: As for `run_child`.
        spec: As for `run_child`; it joins the group by its field `join`, and nothing is verified inside the group.
        timeout_seconds: For the run.
        limit_bytes: Memory that the group may hold.
    """
    with cgroups.group("memory") as target:
        if limit_bytes:
            cgroups.limit_memory(target, limit_bytes)
        spec = replace(spec, join=(*spec.join, target.procs), verify=False)
        with cgroups.MemoryWatch(target) as watch:
            record = run_child(module, spec, timeout_seconds)
        record["held_peak_bytes"] = watch.peak_bytes
        record["group_peak_bytes"] = cgroups.peak_bytes(target)
        record["limit_bytes"] = limit_bytes
        if kills := cgroups.oom_kills(target):
            record["error"] = f"killed by the kernel above {limit_bytes} bytes ({kills})"
    return record


def run_child(module: str, spec: Any, timeout_seconds: float) -> Record:
    """Run one process; whatever becomes of it is a record.

    Args:
        module: What `python -m` runs.
        spec: What it has to do, its argument by `spec.encode()`.
        timeout_seconds: After that it is killed.
    """
    environment = os.environ | {"PYTHONPATH": str(_ROOT), "RUNAI_STREAMER_LOG_LEVEL": "ERROR"}
    busy_before, own_before, started = machine.busy_cpu_seconds(), _child_cpu_seconds(), time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-m", module, spec.encode()],
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            cwd=_ROOT,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {timeout_seconds:.0f} s"}
    wall = time.monotonic() - started
    try:
        record: Record = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        record = {"error": f"exit status {done.returncode}: {lines[-1] if lines else 'no output'}"}
    others = machine.busy_cpu_seconds() - busy_before - (_child_cpu_seconds() - own_before)
    record["other_cpus"] = max(0.0, others / wall)
    record["process_seconds"] = wall
    return record


def _child_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
