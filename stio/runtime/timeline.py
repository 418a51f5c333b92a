"""Draws a trace as SVG: one row for each lane, one colour for each kind of work, a legend, and a summary sentence.

A lane is a thread or a device queue. A lane with few spans shows each span, with a tooltip. A lane with too many of
them becomes columns: each kind of work fills a column by its share of the column's time. If the picture is still longer
than the limit, the columns become wider.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, groupby
from math import floor, log10
from textwrap import wrap
from typing import Any
from zlib import crc32

from stio.errors import printable
from stio.runtime import svg
from stio.runtime.spans import CALLER, Span, Summary, Total, summarize, usable
from stio.runtime.text import counted, natural_key, show_bytes, show_seconds

MAX_BYTES = 900_000
"""Largest picture."""

_LEFT, _RIGHT = 104, 24
_PLOT = svg.WIDTH - _LEFT - _RIGHT
_ROW, _BAR = 22, 16
_MAX_ROWS, _MAX_KINDS = 24, 12
_MAX_BARS, _MAX_BARS_IN_ROW = 2_400, 400
_COLUMN = 2.0
_COARSE = [1 << k for k in range(10)]
"""Factors of the width of a column. With the last one a row is one column; it has no tooltips, whose names may be long
after escaping."""
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
"""Colours on light and on dark paper. Within a load, and within a save, colour-blind readers can distinguish them."""
_FURTHER = [("#6b7f2a", "#a5bb5a"), ("#7a4fa3", "#b08ad6"), ("#3f7f7f", "#6fb5b5"), ("#a35a4f", "#d68e84")]

_LIGHT = """\
.stio .row{fill:#f3f5f7}.stio .grid{stroke:#d1d9e0;fill:none}
.stio .bar{fill-opacity:.82;stroke-width:.7}
"""
_DARK = ".stio .row{fill:#161b22}.stio .grid{stroke:#30363d}"


@dataclass(frozen=True, slots=True)
class _Scale:
    start: float
    seconds: float

    def at(self, time: float) -> float:
        return (time - self.start) / self.seconds * _PLOT


def draw(spans: Sequence[Span], *, title: str = "", max_bytes: int = MAX_BYTES) -> str:
    """Return the picture of a trace as SVG, at most `max_bytes` long in UTF-8.

    Args:
        spans: The spans; those without a valid time are left out.
        title: A line above the picture.
        max_bytes: Largest picture; 100 kB are enough for every trace.
    """
    ordered = usable(spans)
    summary = summarize(ordered)
    scale = _Scale(summary.start, max(summary.end - summary.start, 1e-6))
    kinds = _kinds(summary.totals)
    rows = _rows(ordered)
    head, top = _head(title, summary, kinds)
    height = _ROW * len(rows)
    labels = "".join(
        f'<text class="soft" x="{_LEFT - 8}" y="{top + _ROW * k + 16}" text-anchor="end">'
        f"{svg.text(lane, 14)}<title>{svg.text(lane)}</title></text>"
        for k, (lane, _) in enumerate(rows)
    )
    paper = "".join(
        f'<rect class="row" x="0" y="{_ROW * k + 2}" width="{_PLOT}" height="{_ROW - 4}"/>' for k in range(len(rows))
    )
    grid, axis = _axis(scale.seconds, top, height)
    palette, (light, dark) = _style(kinds)
    light, dark = _LIGHT + light, _DARK + dark
    text = ""
    for coarse in _COARSE:
        most = min(_MAX_BARS_IN_ROW, _MAX_BARS // max(1, len(rows))) // coarse
        bars = "".join(
            f'<g transform="translate(0 {_ROW * k + (_ROW - _BAR) // 2})">'
            + "".join(_bars(own, kinds, scale) if len(own) <= most else _columns(own, kinds, scale, _COLUMN * coarse))
            + "</g>"
            for k, (_, own) in enumerate(rows)
        )
        plot = f'<svg class="plot" x="{_LEFT}" y="{top}" width="{_PLOT}" height="{height}">{paper}{grid}{bars}</svg>'
        body, below = head + labels + plot + axis, top + height + 30
        text = svg.document(body, height=below, label=summary.sentence, light=light, dark=dark, palette=palette)
        if len(text.encode()) <= max_bytes:
            break
    return text


def _kinds(totals: Sequence[Total]) -> dict[str, str]:
    """Return a letter for each name, its class in the style. Names beyond the longest `_MAX_KINDS` share one letter."""
    most = sorted(totals, key=lambda total: -total.seconds)[:_MAX_KINDS]
    letters = {total.name: chr(ord("a") + k) for k, total in enumerate(total for total in totals if total in most)}
    return {total.name: letters.get(total.name, chr(ord("a") + _MAX_KINDS)) for total in totals}


def _rows(ordered: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Return the rows: operations and their threads, device queues, then the caller. Rows beyond the most share one."""
    by_lane: dict[str, list[Span]] = {}
    for span in ordered:
        by_lane.setdefault(span.lane, []).append(span)
    rows = sorted(by_lane.items(), key=lambda row: _place(row[0]))
    if len(rows) > _MAX_ROWS:
        rest = rows[_MAX_ROWS - 1 :]
        rows[_MAX_ROWS - 1 :] = [(f"{len(rest):,} more", usable(span for _, spans in rest for span in spans))]
    return rows


def _place(lane: str) -> tuple[int, tuple[list[Any], str]]:
    return {"copy": 2, CALLER: 3}.get(lane, int(lane[-1:].isdecimal())), natural_key(lane)


def _head(title: str, summary: Summary, kinds: Mapping[str, str]) -> tuple[str, int]:
    """Return title, sentence and legend, and the y coordinate of the plot below them."""
    text, y = "", 8
    if title:
        y += 18
        text += f'<text class="title" x="12" y="{y}">{svg.text(title, 100)}</text>'
    for line in wrap(summary.sentence, 112):
        y += svg.LINE_HEIGHT
        text += f'<text x="12" y="{y}">{svg.text(line)}</text>'
    x, y = 12.0, y + svg.LINE_HEIGHT + 4
    for letter, shown, tip in _legend(summary.totals, kinds):
        width = 26 + 6.9 * len(shown)
        if x + width > svg.WIDTH - 12 and x > 12:
            x, y = 12.0, y + svg.LINE_HEIGHT
        text += (
            f'<g><title>{tip}</title><rect class="bar {letter}" x="{x:.0f}" y="{y - 10}" width="11" height="11"/>'
            f'<text class="soft" x="{x + 16:.0f}" y="{y}">{svg.text(shown, 60)}</text></g>'
        )
        x += width
    return text, y + 12


def _legend(totals: Sequence[Total], kinds: Mapping[str, str]) -> Iterator[tuple[str, str, str]]:
    """Yield letter, text and tooltip of each entry. The tooltip is escaped, the text is not."""
    by_letter: dict[str, list[Total]] = {}
    for total in totals:
        by_letter.setdefault(kinds[total.name], []).append(total)
    for letter, mine in sorted(by_letter.items()):
        name = svg.cut(printable(mine[0].name), 24) if len(mine) == 1 else _OTHERS
        seconds, nbytes = sum(total.seconds for total in mine), sum(total.num_bytes for total in mine)
        shown = f"{name} {_amount(seconds, nbytes)}"
        covered = f", under way for {show_seconds(mine[0].covered_seconds)}" if len(mine) == 1 else ""
        tip = f"{name}: {counted(sum(total.num_spans for total in mine), 'span')}, added up over lanes{covered}"
        yield letter, shown, svg.text(tip)


def _bars(spans: Sequence[Span], kinds: Mapping[str, str], scale: _Scale) -> Iterator[str]:
    """Yield a shape for each span, an outer span before those inside it."""
    for span in spans:
        x, width = scale.at(span.start), (span.end - span.start) / scale.seconds * _PLOT
        y, height = (5, 6) if span.name == "wait" else (0, _BAR)  # thin, so that spans behind it are visible
        yield (
            f'<path class="bar {kinds[span.name]}" d="M{_number(x)} {y}h{_number(width)}v{height}h-{_number(width)}z">'
            f"<title>{_tip(span, scale)}</title></path>"
        )


def _tip(span: Span, scale: _Scale) -> str:
    seconds = span.end - span.start
    text = f"{svg.cut(printable(span.name), 24)} {_amount(seconds, span.num_bytes)}"
    if span.num_bytes and seconds:
        text += f", {show_bytes(span.num_bytes / seconds)}/s"
    text += f", from {show_seconds(span.start - scale.start)} on"
    return svg.text(text) + (f"&#10;{svg.text(span.detail, 40)}" if span.detail else "")


def _columns(spans: Sequence[Span], kinds: Mapping[str, str], scale: _Scale, width: float) -> Iterator[str]:
    """Yield a shape for each kind of work: its share of each column's time, stacked on the kinds before it."""
    count = int(_PLOT / width) + 1
    by_letter: dict[str, list[Span]] = {}
    for span in spans:
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
        tip = f"<title>{svg.text(_together(by_letter[letter]), 80)}</title>" if count > 1 else ""
        yield f'<path class="bar {letter}" d="{path}">{tip}</path>'


def _shares(spans: Sequence[Span], scale: _Scale, width: float, count: int) -> list[float]:
    """Return the share of each column's time that the spans took, in one pass over them."""
    parts, steps = [0.0] * count, [0] * (count + 1)
    for span in spans:
        start, end = scale.at(span.start) / width, scale.at(span.end) / width
        first, last = min(int(start), count - 1), min(int(end), count - 1)
        if first == last:
            parts[first] += end - start
        else:
            parts[first] += first + 1 - start
            parts[last] += end - last
            steps[first + 1] += 1  # the columns between are full: from here
            steps[last] -= 1  # to there
    return [part + full for part, full in zip(parts, accumulate(steps), strict=False)]


def _together(spans: Sequence[Span]) -> str:
    name = svg.cut(printable(spans[0].name), 24) if len({span.name for span in spans}) == 1 else _OTHERS
    nbytes = sum(span.num_bytes for span in spans)
    seconds = sum(span.end - span.start for span in spans)
    return f"{name}: {counted(len(spans), 'span')}, {_amount(seconds, nbytes)}"


def _amount(seconds: float, nbytes: int) -> str:
    return show_seconds(seconds) + (f", {show_bytes(nbytes)}" if nbytes else "")


def _axis(seconds: float, top: int, height: int) -> tuple[str, str]:
    """Return grid lines and labels at round times."""
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


def _style(kinds: Mapping[str, str]) -> tuple[str, list[str]]:
    """Return a class for the colours, and the rules for them on light and on dark paper: with the letters, no names.

    A page may hold several pictures, such as a notebook: rules of one hold for all. So other colours are another class.
    """
    further = cycle(_FURTHER)
    colours: dict[str, tuple[str, str]] = {}
    for name, letter in kinds.items():
        colours.setdefault(letter, _KNOWN.get(name) or next(further))
    palette = f"p{crc32(repr(colours).encode()):08x}"
    return palette, [
        "".join(f".{palette} .{letter}{{fill:{pair[k]};stroke:{pair[k]}}}" for letter, pair in colours.items())
        for k in range(2)
    ]


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
