"""The report: tables in markdown from the records, written between the markers of README.md."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cases import Case
from benchmarks.stats import NoFigure, Runs, plain
from benchmarks.suite import Columns, Suite
from benchmarks.verdicts import Bound, show

Record = dict[str, Any]

_OTHER_CPUS = 0.3
_BASELINE_SECONDS = {"alone": 0.003, "busy": 0.012}
_SWING = 1.5


def read_records(path: Path) -> list[Record]:
    """Read the raw figures."""
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def progress_line(record: Record) -> str:
    """Say one record in one line."""
    kind, case = record["kind"], record.get("case", "")
    if kind == "machine":
        return f"{record['cpu']}, {record['num_cpus']} CPUs, Linux {record['kernel']}"
    if kind == "skipped":
        return f"{case}: not run: {record['reason']}"
    if kind == "case":
        return f"{case}: {record['wall_seconds']:.0f} s in all"
    head = f"  {case} #{record['round']} {record['entry']}: "
    if record.get("error"):
        return head + f"FAILED: {record['error']}"
    if "lag" in record:
        lag, base = record["lag"], record["baseline"]
        return (
            head + f"p99 lag {lag['p99'] * 1e3:.1f} ms over {lag['num_beats']} beats, baseline {base['p99'] * 1e3:.1f}"
        )
    rate = record["data_bytes"] / record["seconds"] / 1e9
    staged = f", staged after {record['staged_seconds']:.3f} s" if "staged_seconds" in record else ""
    return head + f"{record['seconds']:.3f} s, {rate:.2f} GB/s{staged}"


def markdown(records: list[Record], suite: Suite) -> str:
    """Give the whole report."""
    runs = Runs(records)
    skipped = {record["case"]: record["reason"] for record in records if record["kind"] == "skipped"}
    shown = [case for case in suite.cases if runs.names(case.name) or case.name in skipped]
    names = {case.name for case in shown}
    parts = [
        _machine_text(next(record for record in records if record["kind"] == "machine")),
        _verdict_table([bound for bound in suite.bounds if bound.case in names], runs, skipped),
        *(_case_table(case, runs, suite) for case in shown if case.name not in skipped),
        _notes(shown, runs),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def write_between_markers(readme: Path, text: str, markers: tuple[str, str]) -> None:
    """Replace what stands between the markers."""
    begin, end = markers
    old = readme.read_text()
    head, rest = old.split(begin, 1)
    _, tail = rest.split(end, 1)
    readme.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}")


def num_missed(records: list[Record], suite: Suite) -> int:
    """Count the bounds that are missed or have no figure."""
    runs = Runs(records)
    present = {record.get("case") for record in records}
    rows = [_verdict_row(bound, runs, {}) for bound in suite.bounds if bound.case in present and bound.limit_text]
    return sum(not row.endswith("| met |") for row in rows)


def load_columns(case: Case) -> Columns:
    """Give the columns of a case of loading."""
    if any(entry.task.startswith("heartbeat") for entry in case.entries):
        return beat_columns("loading")
    if case.watch_memory:
        return MEMORY_COLUMNS
    return Columns(("load, s", "touch, s", "both, s", "min to max", "GB/s", "peak memory added, MB", "runs"), _load_row)


def beat_columns(doing: str) -> Columns:
    """Give the columns of a case that measures the loop's lag while `doing` something."""
    return Columns(("baseline p50 / p99 / max, ms", f"{doing} p50 / p99 / max, ms", "beats", "runs"), _beat_row)


def _machine_text(header: Record) -> str:
    disk = header["disk"]
    packages = ", ".join(f"{name} {version}" for name, version in header["packages"].items() if version)
    return (
        f"{header['date']}. {header['cpu']}, {header['num_cpus']} CPUs, {header['memory_bytes'] / 2**30:.0f} GiB, "
        f"Linux {header['kernel']}, {disk['filesystem']}, read-ahead {disk['read_ahead_kb']} KiB"
        f"{', ' + header['accelerator'] if 'accelerator' in header else ''}; Python "
        f"{header['python']}; {packages}. Model {header['size_bytes'] / 1e9:.1f} GB, up to "
        f"{header['prime_bytes'] / 1e9:.1f} GB of memory touched and freed before each run."
    )


def _verdict_table(bounds: list[Bound], runs: Runs, skipped: dict[str, str]) -> str:
    rows = [
        "| Case | Figure | stio | Against | Value | Rounds: min to max | 95 % | Bound | Verdict |",
        "|---|---|--:|--:|--:|--:|--:|--:|---|",
    ]
    return "\n".join(rows + [_verdict_row(bound, runs, skipped) for bound in bounds])


def _verdict_row(bound: Bound, runs: Runs, skipped: dict[str, str]) -> str:
    if bound.case in skipped:
        return f"| {bound.case} | {bound.text} | | | | | | {bound.limit_text} | not run: {skipped[bound.case]} |"
    try:
        found = bound.measure(runs)
    except NoFigure as error:
        return f"| {bound.case} | {bound.text} | | | | | | {bound.limit_text} | no figure: {_cell(str(error))} |"
    side_unit = ("MB" if bound.case == "memory" else "s") if bound.unit == "x" else bound.unit
    theirs = "" if found.theirs is None else f"{found.rival} {show(found.theirs, side_unit)}"
    spread = f"{show(found.low, bound.unit)} to {show(found.high, bound.unit)} ({found.num_rounds})"
    interval = "{:.2f} to {:.2f}".format(*found.interval) if found.interval else ""
    return (
        f"| {bound.case} | {bound.text} | {show(found.ours, side_unit)} | {theirs} | {show(found.value, bound.unit)} "
        f"| {spread} | {interval} | {bound.limit_text} | {bound.verdict(found.value)} |"
    )


def _case_table(case: Case, runs: Runs, suite: Suite) -> str:
    columns = suite.columns(case)
    head = ["Contestant", *columns.head]
    lines = [f"**{case.name}**: {case.title}", "", _line(head), "|---" + "|--:" * (len(head) - 1) + "|"]
    for entry in case.entries:
        if runs.of(case.name, entry.name):
            label = suite.labels[entry.contestant] + _variant(entry.name, entry.contestant)
            failures = runs.failures(case.name, entry.name)
            try:
                lines.append(_line([label, *columns.row(case.name, entry.name, runs)]))
            except NoFigure:
                lines.append(_line([label, f"failed: {_cell(failures[0])}", *[""] * (len(head) - 2)]))
    return "\n".join(lines)


def _load_row(case: str, entry: str, runs: Runs) -> list[str]:
    both = plain(runs, case, entry, "seconds")
    data_bytes = runs.of(case, entry)[0]["data_bytes"]
    return [
        median_cell(runs, case, entry, "load_seconds", 1, 3),
        median_cell(runs, case, entry, "touch_seconds", 1, 3),
        f"{both.value:.3f}",
        f"{both.low:.3f} to {both.high:.3f}",
        f"{data_bytes / both.value / 1e9:.2f}",
        median_cell(runs, case, entry, "peak_rss_added_bytes", 1e-6, 0),
        count_cell(runs, case, entry),
    ]


def _beat_row(case: str, entry: str, runs: Runs) -> list[str]:
    cells = [
        " / ".join(median_cell(runs, case, entry, f"{stretch}.{key}", 1e3, 1) for key in ("p50", "p99", "max"))
        for stretch in ("baseline", "lag")
    ]
    return [*cells, f"{plain(runs, case, entry, 'lag.num_beats').low:.0f} or more", count_cell(runs, case, entry)]


def _memory_row(case: str, entry: str, runs: Runs) -> list[str]:
    return [
        median_cell(runs, case, entry, "seconds", 1, 3),
        median_cell(runs, case, entry, "held_peak_bytes", 1e-6, 0),
        median_cell(runs, case, entry, "group_peak_bytes", 1e-6, 0),
        median_cell(runs, case, entry, "limit_bytes", 1e-6, 0),
        count_cell(runs, case, entry),
    ]


MEMORY_COLUMNS = Columns(("seconds", "held at the peak, MB", "with page cache, MB", "limit, MB", "runs"), _memory_row)
"""The columns of a case that runs in memory groups."""


def _notes(shown: list[Case], runs: Runs) -> str:
    """Say what a reader should doubt: failures, a disturbed baseline, a disk that swung, other people's load."""
    notes = []
    for case in shown:
        for entry in runs.names(case.name):
            if errors := runs.failures(case.name, entry):
                notes.append(f"{case.name}, {entry}: {len(errors)} failed, {_cell(errors[0])}")
            notes += _baseline_note(case.name, entry, runs)
        others = [run["other_cpus"] for run in runs.records if run["case"] == case.name and "seconds" in run]
        if others and median(others) > _OTHER_CPUS:
            notes.append(f"{case.name}: something else kept {median(others):.1f} CPUs busy")
        notes += _folio_note(case, runs)
        try:
            raw = plain(runs, case.name, "raw", "seconds")
        except NoFigure:
            continue
        if raw.high > _SWING * raw.low:
            notes.append(f"{case.name}: the limit itself swung by {raw.high / raw.low:.1f} between rounds")
    return "Notes:\n\n" + "\n".join(f"- {note}" for note in notes) if notes else ""


def _folio_note(case: Case, runs: Runs) -> list[str]:
    """Say it where the page cache did not have the folios that the case is named after."""
    if case.layout != "model":
        return []
    shares = [
        run["large_folios"] for run in runs.records if run["case"] == case.name and run.get("large_folios") is not None
    ]
    wrong = [share for share in shares if (share > 0.1 if case.state == "faults" else share < 0.9)]
    return [f"{case.name}: in {len(wrong)} of {len(shares)} runs the folios were not as meant"] if wrong else []


def _baseline_note(case: str, entry: str, runs: Runs) -> list[str]:
    try:
        base = plain(runs, case, entry, "baseline.p99")
    except NoFigure:
        return []
    usual = _BASELINE_SECONDS["busy" if entry.endswith("busy") else "alone"]
    if base.value <= usual:
        return []
    return [f"{case}, {entry}: the baseline looks disturbed, p99 {base.value * 1e3:.1f} ms (usual {usual * 1e3:.0f})"]


def median_cell(runs: Runs, case: str, entry: str, key: str, factor: float, digits: int) -> str:
    """Give the median of a figure, empty where the runs that succeeded have none."""
    try:
        return f"{plain(runs, case, entry, key).value * factor:.{digits}f}"
    except NoFigure:
        if not runs.failures(case, entry) or any(not run.get("error") for run in runs.of(case, entry)):
            return ""
        raise


def count_cell(runs: Runs, case: str, entry: str) -> str:
    """Give the number of runs, and how many of them were good."""
    total, failed = len(runs.of(case, entry)), len(runs.failures(case, entry))
    return f"{total - failed} of {total}" if failed else str(total)


def _variant(name: str, contestant: str) -> str:
    rest = name.removeprefix(contestant).strip()
    return f", {rest}" if rest else ""


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _cell(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")[:160]
