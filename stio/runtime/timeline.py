"""Draws a trace: one row a lane, a colour a kind of work, a legend, and a line that says where the time went.

Text without dependencies: an SVG, which `page.py` makes a page of. A lane with few spans shows each with a tooltip; one
with more than can be seen apart becomes columns, filled from below by the share that each kind had of the column's
time. Where the picture would be longer than `MAX_BYTES` all the same, columns become wider. Names may come out of
hostile files: they are cut and escaped, and never reach the style.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate, cycle, groupby
from math import floor, log10
from textwrap import wrap

from stio.errors import printable
from stio.runtime.spans import CALLER, Span, Summary, Total, show_bytes, show_seconds, summarize, usable

__all__ = ["MAX_BYTES", "draw"]

MAX_BYTES = 900_000
"""Of a picture, at most."""

_WIDTH, _LEFT, _RIGHT = 840, 104, 24
_PLOT = _WIDTH - _LEFT - _RIGHT
_LINE, _ROW, _BAR = 19, 22, 16
_MAX_ROWS, _MAX_KINDS = 24, 12
_MAX_BARS, _MAX_BARS_IN_ROW = 2_400, 400
_COLUMN = 2.0
_OTHERS = "others"

_KNOWN = {
    "read": ("#1f6fb4", "#4a9be0"),
    "populate": ("#4fa3d9", "#7cc0ec"),
    "map": ("#9cc9e8", "#46708c"),
    "copy": ("#e08e0b", "#f0a830"),
    "tensors": ("#0f8f68", "#2fbf92"),
    "consume": ("#b8578f", "#dc86b6"),
    "wait": ("#c3c9d1", "#4b5460"),
    "open": ("#8a6d3b", "#b8965c"),
    "verify": ("#b7a600", "#d8c92e"),
    "plan": ("#5b5f9e", "#9296d6"),
    "begin": ("#8a6d3b", "#b8965c"),
    "stage": ("#e08e0b", "#f0a830"),
    "hash": ("#b7a600", "#d8c92e"),
    "write": ("#1f6fb4", "#4a9be0"),
    "sync": ("#cc4b16", "#ef7a48"),
    "commit": ("#0f8f68", "#2fbf92"),
}
"""Colours on light and on dark; apart for colour-blind eyes within a load, and within a save."""
_FURTHER = [("#6b7f2a", "#a5bb5a"), ("#7a4fa3", "#b08ad6"), ("#3f7f7f", "#6fb5b5"), ("#a35a4f", "#d68e84")]

_STYLE = """\
.stio{font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.stio text{fill:#1f2328}.stio .title{font-size:15px;font-weight:600}.stio .soft{fill:#59636e}
.stio .paper{fill:#fff}.stio .row{fill:#f3f5f7}.stio .grid{stroke:#d1d9e0;fill:none;vector-effect:non-scaling-stroke}
.stio .bar{fill-opacity:.82;stroke-width:.7;vector-effect:non-scaling-stroke}
"""
_DARK = """\
.stio text{fill:#e6edf3}.stio .soft{fill:#9198a1}
.stio .paper{fill:#0d1117}.stio .row{fill:#161b22}.stio .grid{stroke:#30363d}
"""


@dataclass(slots=True)
class _Row:
    label: str
    spans: list[Span] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Scale:
    start: float
    seconds: float

    def at(self, time: float) -> float:
        return (time - self.start) / self.seconds * _PLOT


def draw(spans: Sequence[Span], *, title: str = "") -> str:
    """Return the picture of a trace as SVG, at most `MAX_BYTES` long in UTF-8.

    Args:
        spans: What was done when; those without a place in time are left out.
        title: A line above it.
    """
    ordered = usable(spans)
    summary = summarize(ordered)
    scale = _Scale(summary.start, max(summary.end - summary.start, 1e-6))
    kinds = _kinds(summary.totals)
    rows = _rows(ordered)
    coarse, text = 1, ""
    while not text or len(text.encode()) > MAX_BYTES:
        text = _picture(title, summary, kinds, rows, scale, coarse)
        coarse *= 2
    return text


def _kinds(totals: Sequence[Total]) -> dict[str, str]:
    """Return the class in the style for each name: a letter; the names that took least share the last one."""
    most = sorted(totals, key=lambda total: -total.seconds)[:_MAX_KINDS]
    letters = {total.name: chr(ord("a") + k) for k, total in enumerate(total for total in totals if total in most)}
    return {total.name: letters.get(total.name, chr(ord("a") + _MAX_KINDS)) for total in totals}


def _rows(ordered: Sequence[Span]) -> list[_Row]:
    """Return the rows: operations and their threads, device queues, then the caller; too many share the last one."""
    by_lane: dict[str, _Row] = {}
    for span in ordered:
        by_lane.setdefault(span.lane, _Row(span.lane)).spans.append(span)
    rows = sorted(by_lane.values(), key=lambda row: _place(row.label))
    if len(rows) > _MAX_ROWS:
        rest = rows[_MAX_ROWS - 1 :]
        rows[_MAX_ROWS - 1 :] = [_Row(f"{len(rest):,} more", usable(span for row in rest for span in row.spans))]
    return rows


def _place(lane: str) -> tuple[int, list[tuple[int, str]]]:
    parts = re.split("([0-9]+)", lane)
    natural = [(len(part), part) if part.isdecimal() else (0, part) for part in parts]  # read-2 before read-10
    return {"copy": 2, CALLER: 3}.get(lane, int(lane[-1:].isdecimal())), natural


def _picture(
    title: str, summary: Summary, kinds: Mapping[str, str], rows: Sequence[_Row], scale: _Scale, coarse: int
) -> str:
    head, top = _head(title, summary, kinds)
    height = _ROW * len(rows)
    labels = "".join(
        f'<text class="soft" x="{_LEFT - 8}" y="{top + _ROW * k + 16}" text-anchor="end">'
        f"{_text(row.label, 14)}<title>{_text(row.label)}</title></text>"
        for k, row in enumerate(rows)
    )
    paper = "".join(
        f'<rect class="row" x="0" y="{_ROW * k + 2}" width="{_PLOT}" height="{_ROW - 4}"/>' for k in range(len(rows))
    )
    most = min(_MAX_BARS_IN_ROW, _MAX_BARS // max(1, len(rows))) // coarse
    bars = "".join(
        f'<g transform="translate(0 {_ROW * k + (_ROW - _BAR) // 2})">'
        + "".join(_bars(row, kinds, scale) if len(row.spans) <= most else _columns(row, kinds, scale, _COLUMN * coarse))
        + "</g>"
        for k, row in enumerate(rows)
    )
    grid, axis = _axis(scale.seconds, top, height)
    bottom = top + height + 30
    return (
        f'<svg class="stio" xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom}" '
        f'viewBox="0 0 {_WIDTH} {bottom}" role="img" aria-label="{escape(summary.sentence)}">'
        f"<style>{_style(kinds)}</style>"
        f'<rect class="paper" width="{_WIDTH}" height="{bottom}"/>{head}{labels}'
        f'<svg class="plot" data-seconds="{scale.seconds!r}" x="{_LEFT}" y="{top}" width="{_PLOT}" height="{height}" '
        f'viewBox="0 0 {_PLOT} {height}" preserveAspectRatio="none">{paper}{grid}{bars}</svg>{axis}</svg>\n'
    )


def _head(title: str, summary: Summary, kinds: Mapping[str, str]) -> tuple[str, int]:
    """Return title, sentence and legend, and where the plot begins below them."""
    text, y = "", 8
    if title:
        y += 18
        text += f'<text class="title" x="12" y="{y}">{_text(title, 100)}</text>'
    for line in wrap(summary.sentence, 112):
        y += _LINE
        text += f'<text x="12" y="{y}">{_text(line)}</text>'
    x, y = 12.0, y + _LINE + 4
    for letter, shown, tip in _legend(summary.totals, kinds):
        width = 26 + 6.9 * len(shown)
        if x + width > _WIDTH - 12 and x > 12:
            x, y = 12.0, y + _LINE
        text += (
            f'<g><title>{tip}</title><rect class="bar {letter}" x="{x:.0f}" y="{y - 10}" width="11" height="11"/>'
            f'<text class="soft" x="{x + 16:.0f}" y="{y}">{_text(shown, 60)}</text></g>'
        )
        x += width
    return text, y + 12


def _legend(totals: Sequence[Total], kinds: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield letter, text and tooltip of each entry; the tooltip is escaped, the text is not yet."""
    by_letter: dict[str, list[Total]] = {}
    for total in totals:
        by_letter.setdefault(kinds[total.name], []).append(total)
    for letter, mine in sorted(by_letter.items()):
        name = _cut(printable(mine[0].name), 24) if len(mine) == 1 else _OTHERS
        seconds, nbytes = sum(total.seconds for total in mine), sum(total.num_bytes for total in mine)
        shown = f"{name} {show_seconds(seconds)}" + (f", {show_bytes(nbytes)}" if nbytes else "")
        covered = f", under way for {show_seconds(mine[0].covered_seconds)}" if len(mine) == 1 else ""
        tip = f"{name}: {_count(sum(total.num_spans for total in mine))}, added up over lanes{covered}"
        yield letter, shown, _text(tip)


def _bars(row: _Row, kinds: Mapping[str, str], scale: _Scale) -> Iterator[str]:
    """Yield a shape for each span, the outer one before what lies within it."""
    for span in row.spans:
        x, width = scale.at(span.start), (span.end - span.start) / scale.seconds * _PLOT
        y, height = (5, 6) if span.name == "wait" else (0, _BAR)  # thin: what lies below it shows
        yield (
            f'<path class="bar {kinds[span.name]}" d="M{_number(x)} {y}h{_number(width)}v{height}h-{_number(width)}z">'
            f"<title>{_tip(span, scale)}</title></path>"
        )


def _tip(span: Span, scale: _Scale) -> str:
    seconds = span.end - span.start
    text = f"{_cut(printable(span.name), 24)} {show_seconds(seconds)}"
    if span.num_bytes:
        text += f", {show_bytes(span.num_bytes)}"
        if seconds:
            text += f", {show_bytes(span.num_bytes / seconds)}/s"
    text += f", from {show_seconds(span.start - scale.start)} on"
    return _text(text) + (f"&#10;{_text(span.detail, 40)}" if span.detail else "")


def _columns(row: _Row, kinds: Mapping[str, str], scale: _Scale, width: float) -> Iterator[str]:
    """Yield a shape for each kind: the share that it had of each column's time, kinds standing upon each other."""
    count = int(_PLOT / width) + 1
    by_letter: dict[str, list[Span]] = {}
    for span in row.spans:
        by_letter.setdefault(kinds[span.name], []).append(span)
    shares = {letter: _shares(mine, scale, width, count) for letter, mine in sorted(by_letter.items())}
    wholes = [max(1.0, sum(column)) for column in zip(*shares.values(), strict=True)]  # above 1: they overlap
    low = [0.0] * count
    for letter, mine in shares.items():
        high = [below + share / whole for below, share, whole in zip(low, mine, wholes, strict=True)]
        edges = [(round(_BAR * (1 - b), 1), round(_BAR * (1 - a), 1)) for a, b in zip(low, high, strict=True)]
        low = high
        path, at = "", 0
        for (top, bottom), run in groupby(edges):
            length = len(list(run))
            if top < bottom:
                wide = _number(length * width)
                path += f"M{_number(at * width)} {_number(top)}h{wide}v{_number(bottom - top)}h-{wide}z"
            at += length
        yield f'<path class="bar {letter}" d="{path}"><title>{_text(_together(by_letter[letter]), 80)}</title></path>'


def _shares(spans: Sequence[Span], scale: _Scale, width: float, count: int) -> list[float]:
    """Return how much of each column's time the spans took, in one pass over them."""
    parts, steps = [0.0] * count, [0] * (count + 1)
    for span in spans:
        start, end = scale.at(span.start) / width, scale.at(span.end) / width
        first, last = min(int(start), count - 1), min(int(end), count - 1)
        if first == last:
            parts[first] += end - start
        else:
            parts[first] += first + 1 - start
            parts[last] += end - last
            steps[first + 1] += 1  # the columns between are full: begin here,
            steps[last] -= 1  # end there
    return [part + full for part, full in zip(parts, accumulate(steps), strict=False)]


def _together(spans: Sequence[Span]) -> str:
    name = _cut(printable(spans[0].name), 24) if len({span.name for span in spans}) == 1 else _OTHERS
    nbytes = sum(span.num_bytes for span in spans)
    seconds = sum(span.end - span.start for span in spans)
    return f"{name}: {_count(len(spans))}, {show_seconds(seconds)}" + (f", {show_bytes(nbytes)}" if nbytes else "")


def _axis(seconds: float, top: int, height: int) -> tuple[str, str]:
    """Return lines and labels at round times."""
    rough = seconds / 7
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    factor, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1.0, "s")
    lines = labels = ""
    for k in range(int(seconds / step * 1.000001) + 1):
        x = k * step / seconds * _PLOT
        lines += f"M{_number(x)} 0v{height}"
        labels += f'<text class="soft" x="{_number(_LEFT + x)}" y="{top + height + 18}" text-anchor="middle">'
        labels += f"{k * step * factor:.6g} {unit}</text>"
    return f'<path class="grid" d="{lines}"/>', f'<g class="axis">{labels}</g>'


def _style(kinds: Mapping[str, str]) -> str:
    """Return the style; of the names nothing but their letters gets into it."""
    further = cycle(_FURTHER)
    colours: dict[str, tuple[str, str]] = {}
    for name, letter in kinds.items():
        colours.setdefault(letter, _KNOWN.get(name) or next(further))
    light, dark = (
        "".join(f".stio .{letter}{{fill:{pair[k]};stroke:{pair[k]}}}" for letter, pair in colours.items())
        for k in range(2)
    )
    return f"{_STYLE}{light}\n@media (prefers-color-scheme:dark){{\n{_DARK}{dark}}}"


def _count(number: int) -> str:
    return f"{number:,} span" + ("s" if number != 1 else "")


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _text(text: str, limit: int = 200) -> str:
    """Return text as it may stand in markup: control characters shown as such, the rest escaped, cut to a length."""
    return escape(_cut(printable(text), limit))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"
