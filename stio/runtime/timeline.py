"""Draws a trace as SVG: one row for each lane, one colour for each kind of work, a legend, and a summary sentence.

A lane is a thread or a device queue. Each span is a shape with a tooltip. Of a picture that would be longer than the
limit, short spans of one kind that follow one another are one shape: the longer the picture, the wider.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
_MAX_ROWS = 24
_MOST_SHAPES = 2400
_WIDTHS = [0.0, *(float(1 << k) for k in range(11))]
"""Widths in pixels within which spans of one kind become one shape. With the last one that is the whole row."""

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
_FURTHER = {
    "other0": ("#6b7f2a", "#a5bb5a"),
    "other1": ("#7a4fa3", "#b08ad6"),
    "other2": ("#3f7f7f", "#6fb5b5"),
    "other3": ("#a35a4f", "#d68e84"),
}
"""Colours of all other kinds of work."""


def _colours(paper: int) -> str:
    """Return the rules for the classes of all kinds: the same in every picture, since a page may hold several."""
    colours = {kind: pair[paper] for kind, pair in (_KNOWN | _FURTHER).items()}
    return "".join(f".stio .{kind}{{fill:{colour};stroke:{colour}}}" for kind, colour in colours.items())


_LIGHT = f"""\
.stio .row{{fill:#f3f5f7}}.stio .grid{{stroke:#d1d9e0;fill:none}}
.stio .bar{{fill-opacity:.82;stroke-width:.7}}
{_colours(0)}"""
_DARK = f".stio .row{{fill:#161b22}}.stio .grid{{stroke:#30363d}}{_colours(1)}"


@dataclass(frozen=True, slots=True)
class _Scale:
    start: float
    seconds: float

    def at(self, time: float) -> float:
        return (time - self.start) / self.seconds * _PLOT


def draw(spans: Sequence[Span], *, title: str = "") -> str:
    """Return the picture of a trace as SVG, at most `MAX_BYTES` long in UTF-8.

    Args:
        spans: The spans; those without a valid time are left out.
        title: A line above the picture.
    """
    ordered = usable(spans)
    summary = summarize(ordered)
    scale = _Scale(summary.start, max(summary.end - summary.start, 1e-6))
    rows = _rows(ordered)
    head, top = _head(title, summary)
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
    text = ""
    for width in _WIDTHS:
        runs = [_runs(own, scale, width, _MOST_SHAPES // len(rows)) for _, own in rows]
        if None in runs and width != _WIDTHS[-1]:
            continue
        bars = "".join(
            f'<g transform="translate(0 {_ROW * k + (_ROW - _BAR) // 2})">{"".join(_bars(own or [], scale))}</g>'
            for k, own in enumerate(runs)
        )
        plot = f'<svg class="plot" x="{_LEFT}" y="{top}" width="{_PLOT}" height="{height}">{paper}{grid}{bars}</svg>'
        body, below = head + labels + plot + axis, top + height + 30
        text = svg.document(body, height=below, label=summary.sentence, light=_LIGHT, dark=_DARK)
        if len(text.encode()) <= MAX_BYTES:
            break
    return text


def _kind(name: str) -> str:
    """Return the class of a name in the style."""
    return name if name in _KNOWN else f"other{crc32(name.encode(errors='replace')) % len(_FURTHER)}"


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


def _head(title: str, summary: Summary) -> tuple[str, int]:
    """Return title, sentence and legend, and the y coordinate of the plot below them."""
    text, y = "", 8
    if title:
        y += 18
        text += f'<text class="title" x="12" y="{y}">{svg.text(title, 100)}</text>'
    for line in wrap(summary.sentence, 112):
        y += svg.LINE_HEIGHT
        text += f'<text x="12" y="{y}">{svg.text(line)}</text>'
    x, y = 12.0, y + svg.LINE_HEIGHT + 4
    by_kind: dict[str, list[Total]] = {}
    for total in summary.totals:
        by_kind.setdefault(_kind(total.name), []).append(total)
    for kind, totals in by_kind.items():
        nbytes = sum(total.num_bytes for total in totals)
        shown = f"{_name(totals)} {_amount(sum(total.seconds for total in totals), nbytes)}"
        width = 26 + 6.9 * len(shown)
        if x + width > svg.WIDTH - 12 and x > 12:
            x, y = 12.0, y + svg.LINE_HEIGHT
        text += (
            f'<rect class="bar {kind}" x="{x:.0f}" y="{y - 10}" width="11" height="11"/>'
            f'<text class="soft" x="{x + 16:.0f}" y="{y}">{svg.text(shown, 60)}</text>'
        )
        x += width
    return text, y + 12


def _runs(spans: Sequence[Span], scale: _Scale, width: float, most: int) -> list[list[Span]] | None:
    """Return spans in runs that lie within a width, an outer one before those inside it; None if there are more."""
    runs: list[list[Span]] = []
    last: dict[str, list[Span]] = {}
    for span in spans:
        run = last.get(_kind(span.name))
        if run is not None and scale.at(span.end) - scale.at(run[0].start) <= width:
            run.append(span)
        else:
            if len(runs) == most:
                return None
            last[_kind(span.name)] = run = [span]
            runs.append(run)
    return runs


def _bars(runs: Sequence[Sequence[Span]], scale: _Scale) -> Iterator[str]:
    """Yield a shape for each run."""
    for run in runs:
        x, end = scale.at(run[0].start), max(scale.at(span.end) for span in run)
        y, height = (5, 6) if run[0].name == "wait" else (0, _BAR)  # thin, so that spans behind it are visible
        yield (
            f'<path class="bar {_kind(run[0].name)}" d="M{_number(x)} {y}h{_number(end - x)}v{height}'
            f'h-{_number(end - x)}z"><title>{_tip(run, scale)}</title></path>'
        )


def _tip(run: Sequence[Span], scale: _Scale) -> str:
    seconds, nbytes = sum(span.end - span.start for span in run), sum(span.num_bytes for span in run)
    many = f" in {counted(len(run), 'span')}" if len(run) > 1 else ""
    text = f"{_name(run)} {_amount(seconds, nbytes)}{many}"
    if nbytes and seconds:
        text += f", {show_bytes(nbytes / seconds)}/s"
    text += f", from {show_seconds(run[0].start - scale.start)} on"
    return svg.text(text) + (f"&#10;{svg.text(run[0].detail, 40)}" if run[0].detail and not many else "")


def _name(named: Sequence[Span | Total]) -> str:
    return svg.cut(printable(named[0].name), 24) if len({one.name for one in named}) == 1 else "others"


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


def _number(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
