"""From records to the report: medians, paired ratios and their spread, bounds and verdicts, tables, chart."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np

from benchmarks import bar_chart
from benchmarks.runs import Bound, Measured, NoFigure, Record, Runs, show
from benchmarks.suite import Case, Columns, Panel, Suite

_RESAMPLES = 10_000


def plain(runs: Runs, case: str, entry: str, key: str) -> Measured:
    """Give the median of a figure."""
    values = list(runs.values(case, entry, key).values())
    return Measured(median(values), min(values), max(values), len(values), median(values))


def ratio(
    runs: Runs, case: str, ours: str, theirs: str | tuple[str, ...], *, key: str = "seconds", inverse: bool = False
) -> Measured:
    """Compare stio with a peer, with the best of several where more are named.

    Args:
        runs: The runs.
        case: The case.
        ours: stio's entry.
        theirs: The peer's entry, or the entries of which the fastest counts.
        key: The figure, the smaller the better.
        inverse: Give ours through theirs, instead of theirs through ours (how many times as fast).

    Raises:
        NoFigure: One side has none.
    """
    mine = runs.values(case, ours, key)
    rival, other = _best(runs, case, (theirs,) if isinstance(theirs, str) else theirs, key)
    shared = sorted(mine.keys() & other.keys())
    if not shared:
        raise NoFigure(f"{ours} and {rival} share no round")
    a, b = np.array([mine[number] for number in shared]), np.array([other[number] for number in shared])
    upper, lower = (a, b) if inverse else (b, a)
    paired = upper / lower
    return Measured(
        value=float(np.median(upper) / np.median(lower)),
        low=float(paired.min()),
        high=float(paired.max()),
        num_rounds=len(shared),
        ours=float(np.median(a)),
        theirs=float(np.median(b)),
        rival=rival,
        interval=_bootstrap(upper, lower) if len(shared) >= 5 else None,
    )


def difference(runs: Runs, case: str, entry: str, upper: str, lower: str, *, lower_entry: str = "") -> Measured:
    """Give the median of a figure less another one: of the same run, or of another entry's median."""
    high = runs.values(case, entry, upper)
    if lower_entry:
        base = median(runs.values(case, lower_entry, lower).values())
        low = dict.fromkeys(high, base)
    else:
        low = runs.values(case, entry, lower)
    each = [high[number] - low[number] for number in high if number in low]
    return Measured(
        median(each), min(each), max(each), len(each), median(high.values()), median(low.values()), "baseline"
    )


def _best(runs: Runs, case: str, entries: tuple[str, ...], key: str) -> tuple[str, dict[int, float]]:
    found = {}
    reasons = []
    for entry in entries:
        try:
            found[entry] = runs.values(case, entry, key)
        except NoFigure as error:
            reasons.append(str(error))
    if not found:
        raise NoFigure("; ".join(reasons))
    name = min(found, key=lambda entry: median(found[entry].values()))
    return name, found[name]


def _bootstrap(upper: np.ndarray, lower: np.ndarray) -> tuple[float, float]:
    picks = np.random.default_rng(0).integers(0, len(upper), (_RESAMPLES, len(upper)))
    ratios = np.median(upper[picks], axis=1) / np.median(lower[picks], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


# Bounds.


def faster(
    case: str,
    text: str,
    ours: str,
    theirs: str | tuple[str, ...],
    at_least: float | None = None,
    *,
    key: str = "seconds",
) -> Bound:
    """How many times as fast ours is as theirs, of several the fastest."""
    return Bound(case, text, partial(ratio, case=case, ours=ours, theirs=theirs, key=key), at_least=at_least)


def cost(
    case: str, text: str, ours: str, theirs: str | tuple[str, ...], key: str, at_most: float | None = None
) -> Bound:
    """Our figure `key` through theirs, of several the smallest."""
    measure = partial(ratio, case=case, ours=ours, theirs=theirs, key=key, inverse=True)
    return Bound(case, text, measure, at_most=at_most)


def seconds(case: str, text: str, entry: str, key: str, at_most: float | None, unit: str = "s") -> Bound:
    """The figure `key` itself."""
    return Bound(case, text, partial(plain, case=case, entry=entry, key=key), at_most=at_most, unit=unit)


def lag(case: str, text: str, entry: str, at_most: float | None) -> Bound:
    """The loop's p99 lag less the baseline's of the same run."""
    measure = partial(difference, case=case, entry=entry, upper="lag.p99", lower="baseline.p99")
    return Bound(case, text, measure, at_most=at_most, unit="ms")


def held(entry: str, text: str) -> Bound:
    """The most memory that was held in the case `memory`, through what the entry may hold."""

    def measure(runs: Runs) -> Measured:
        limits = runs.values("memory", entry, "limit_bytes")
        held = runs.values("memory", entry, "held_peak_bytes")
        if errors := runs.failures("memory", entry):
            raise NoFigure(f"{entry} failed: {errors[0]}")
        limit = max(limits.values())
        worst = max(held.values())
        return Measured(worst / limit, min(held.values()) / limit, worst / limit, len(held), worst, limit, "limit")

    return Bound("memory", text, measure, at_most=1.0)


# Tables.


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


def summary(records: list[Record], suite: Suite) -> str:
    """Give the part of the report that tables.md shows: the machine, a short row for each bound, notes."""
    runs = Runs(records)
    skipped = {record["case"]: record["reason"] for record in records if record["kind"] == "skipped"}
    shown = [case for case in suite.cases if runs.names(case.name) or case.name in skipped]
    names = {case.name for case in shown}
    rows = ["| Case | Figure | stio | Against | Value (rounds) | Bound |", "|---|---|--:|--:|--:|---|"]
    for bound in suite.bounds:
        if bound.case in names:
            *cells, value, rounds, _, limit, verdict = _verdict_cells(bound, runs, skipped)
            ends = [] if verdict in ("met", "reported") else [f"**{verdict}**"]
            ends = [limit, *ends] if limit else ends
            spread, _, _ = rounds.rpartition(" (")
            rows.append(_line([*cells, f"{value} ({spread})" if spread else value, ", ".join(ends)]))
    machine_text = _machine_text(next(record for record in records if record["kind"] == "machine"))
    return "\n\n".join(part for part in (machine_text, "\n".join(rows), _notes(shown, runs)) if part) + "\n"


def publish(suite: Suite, records: list[Record], text: str, drawn: Path, page: Path | None) -> None:
    """Draw the chart to `drawn`, and write the report between its markers of `page`, with the chart if beside it."""
    is_drawn = draw(records, suite, drawn)
    if page is None:
        return
    if is_drawn and drawn.resolve().is_relative_to(page.parent):
        text += f"\n![{suite.picture}]({drawn.resolve().relative_to(page.parent)})\n"
    begin, end = suite.markers
    head, rest = page.read_text().split(begin, 1)
    _, tail = rest.split(end, 1)
    page.write_text(f"{head}{begin}\n\n{text}\n{end}{tail}")


def num_missed(records: list[Record], suite: Suite) -> int:
    """Count the bounds that are missed or have no figure."""
    runs = Runs(records)
    present = {record.get("case") for record in records}
    rows = [_verdict_row(bound, runs, {}) for bound in suite.bounds if bound.case in present and bound.limit_text]
    return sum(not row.endswith("| met |") for row in rows)


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
    return _line(_verdict_cells(bound, runs, skipped))


def _verdict_cells(bound: Bound, runs: Runs, skipped: dict[str, str]) -> list[str]:
    head, empty = [bound.case, bound.text], [""] * 5
    if bound.case in skipped:
        return [*head, *empty, bound.limit_text, f"not run: {skipped[bound.case]}"]
    try:
        found = bound.measure(runs)
    except NoFigure as error:
        return [*head, *empty, bound.limit_text, f"no figure: {_cell(str(error))}"]
    side_unit = ("MB" if bound.case == "memory" else "s") if bound.unit == "x" else bound.unit
    theirs = "" if found.theirs is None else f"{found.rival} {show(found.theirs, side_unit)}"
    spread = f"{show(found.low, bound.unit)} to {show(found.high, bound.unit)} ({found.num_rounds})"
    interval = "{:.2f} to {:.2f}".format(*found.interval) if found.interval else ""
    figures = [show(found.ours, side_unit), theirs, show(found.value, bound.unit), spread, interval]
    return [*head, *figures, bound.limit_text, bound.verdict(found.value)]


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
    """Name the doubtful figures: failures, a disturbed baseline, a disk that swung, load by other processes."""
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


# The chart: rates of the contestants side by side, one panel a case.


_LIMITS = ("raw", "memcpy")


def draw(records: list[dict[str, Any]], suite: Suite, path: Path) -> bool:
    """Draw the medians, with the spread as lines, to `path` (SVG); False where there is nothing to draw."""
    runs = Runs(records)
    titles = {case.name: case.title for case in suite.cases}
    panels = [
        bar_chart.Panel(titles[panel.case], rates, [f"{panel.text}; bar: median, line: all rounds"])
        for panel in suite.panels
        if (rates := rates_of(panel, suite, runs))
    ]
    if panels:
        path.write_text(bar_chart.draw_panels(panels), "utf-8")
    return bool(panels)


def rates_of(panel: Panel, suite: Suite, runs: Runs) -> list[bar_chart.Rate]:
    """Return the rates of a panel, the fastest first."""
    rates = []
    contestants = {
        entry.name: entry.contestant for case in suite.cases if case.name == panel.case for entry in case.entries
    }
    for entry in runs.names(panel.case):
        try:
            seconds = plain(runs, panel.case, entry, panel.key)
        except NoFigure:
            continue
        num_bytes = runs.of(panel.case, entry)[0]["data_bytes"]
        label = suite.labels[contestants[entry]] + (" (busy)" if entry.endswith(" busy") else "")
        kind: Literal["limit", "ours", "peer"] = (
            "ours" if entry.startswith("stio") else "limit" if entry.startswith(_LIMITS) else "peer"
        )
        rates.append(
            bar_chart.Rate(label, num_bytes / seconds.value, num_bytes / seconds.high, num_bytes / seconds.low, kind)
        )
    return sorted(rates, key=lambda rate: rate.median, reverse=True)
