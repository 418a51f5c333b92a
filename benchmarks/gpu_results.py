"""The results of the GPU benchmark: JSON lines, each on the disk as soon as it exists, and the report made from them.

A file holds one or more commands' lines: `machine`, then for each stage `begin`, `device`, `run`, `note`, `absent` and
`left-out` lines and one `end`. What comes from a `begin` on is one attempt at a stage; of each stage one is reported.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import report
from benchmarks.runs import Record
from benchmarks.suite import Suite

FILE_NAME = "results.jsonl"
FEWEST_ROUNDS = 3
"""Medians of fewer are marked."""


def append(path: Path, record: Record) -> None:
    """Append one line, synced; what a writer that died has left of a line is ended first."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size_bytes = os.fstat(descriptor).st_size
        is_torn = size_bytes > 0 and os.pread(descriptor, 1, size_bytes - 1) != b"\n"
        os.write(descriptor, b"\n" * is_torn + json.dumps(record).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read(path: Path) -> list[Record]:
    """Read all whole lines; none where there is no file."""
    records = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue  # its writer died inside it
    return records


@dataclass(slots=True)
class Attempt:
    """One run of a stage."""

    begin: Record  # its first line
    records: list[Record] = field(default_factory=list)  # what came between
    end: Record = field(default_factory=lambda: {"status": "failed", "how": "no end was written: interrupted"})

    @property
    def is_complete(self) -> bool:
        """Whether the stage came to its end, with a whole budget."""
        return bool(self.end["status"] == "complete")

    @property
    def left_out(self) -> list[str]:
        """What was not measured, and why."""
        return [
            f"{record['what']}: {record['reason']}"
            for record in self.records
            if record["kind"] != "run" and "what" in record
        ]


def attempts(records: list[Record]) -> dict[str, Attempt]:
    """Give the attempt that counts of each stage: the last complete one, else the last one."""
    found: dict[str, Attempt] = {}
    current: Attempt | None = None
    for record in records:
        stage = record.get("stage", "")
        if record["kind"] == "begin":
            current = Attempt(record)
            if stage not in found or not found[stage].is_complete:
                found[stage] = current
        elif record["kind"] == "machine":  # another command: the one before was cut off, if no end was written
            current = None
        elif record["kind"] == "left-out" and current is None:
            found.setdefault(stage, Attempt(record, [record], {"status": "left out"}))
        elif current is not None and stage == current.begin["stage"]:
            if record["kind"] == "end":
                current.end = record
                if current.is_complete:
                    found[stage] = current
                current = None
            else:
                current.records.append(record)
    return found


def counted(records: list[Record]) -> list[Record]:
    """Give the lines of the attempts that count."""
    return [record for attempt in attempts(records).values() for record in attempt.records]


def markdown(records: list[Record], suite: Suite) -> str:
    """Give the whole report: how each stage ended, then the tables of what was measured."""
    if not records:
        return "Nothing was measured.\n"
    inner = counted(records)
    devices = sorted({record["accelerator"] for record in inner if record["kind"] == "device"})
    machine = next(record for record in reversed(records) if record["kind"] == "machine")
    parts = [
        _stages(attempts(records)),
        report.markdown([machine | {"accelerator": "; ".join(devices)}, *inner], suite),
    ]
    runs = [record for record in inner if record["kind"] == "run"]
    rounds: dict[str, int] = {}
    for run in runs:
        rounds[run["case"]] = max(rounds.get(run["case"], 0), run["round"] + 1)
    if few := sorted(case for case, number in rounds.items() if number < FEWEST_ROUNDS):
        parts.append(f"Fewer than {FEWEST_ROUNDS} rounds, so no spread to speak of: {', '.join(few)}.\n")
    return "\n\n".join(parts)


def summary(text: str) -> str:
    """Give a report's beginning: how the stages ended, the machine, and the bounds."""
    return text.partition("\n\n**")[0]


def _stages(counted: dict[str, Attempt]) -> str:
    rows = ["| Stage | Ended | Seconds | Remarks |", "|---|---|--:|---|"]
    for name, attempt in counted.items():
        remarks = [attempt.end.get("how", ""), *attempt.left_out]
        remarks += [record["text"] for record in attempt.records if record["kind"] == "note"]
        text = "; ".join(remark for remark in remarks if remark).replace("|", "/").replace("\n", " ")
        rows.append(f"| {name} | {attempt.end['status']} | {attempt.end.get('seconds', 0):.0f} | {text} |")
    return "\n".join(rows)
