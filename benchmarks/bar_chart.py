"""Rates as a bar chart in SVG: a bar for each median, a line for its spread, one line at the limit.

A chart has several panels, one below the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Literal

from stio.errors import one_line
from stio.runtime.reports.timeline import LINE_HEIGHT, WIDTH, document, escaped
from stio.text import show_bytes

_LEFT, _RIGHT = 280, 110
_PLOT = WIDTH - _LEFT - _RIGHT
_ROW, _BAR = 28, 16

_LIGHT = """\
.stio .limit{fill:#c3c9d1}.stio .ours{fill:#1f6fb4}.stio .peer{fill:#b98a4b}
.stio .spread{stroke:#1f2328;fill:none}.stio .mark{stroke:#59636e;stroke-dasharray:3 3;fill:none}"""
_DARK = """\
.stio .limit{fill:#4b5460}.stio .ours{fill:#4a9be0}.stio .peer{fill:#b8965c}
.stio .spread{stroke:#e6edf3}.stio .mark{stroke:#9198a1}"""


@dataclass(frozen=True, slots=True)
class Rate:
    """One bar. All rates are in bytes per second, above 0."""

    label: str
    """Name beside the bar."""
    median: float
    """Median of the runs."""
    low: float
    """Slowest run."""
    high: float
    """Fastest run."""
    kind: Literal["limit", "ours", "peer"]
    """Selects the colour. A dashed line through the chart marks the limit."""


@dataclass(frozen=True, slots=True)
class Panel:
    """Bars with one scale."""

    title: str
    """A line above the bars."""
    rates: Sequence[Rate]
    """From top to bottom."""
    sentences: Sequence[str] = ()
    """Text below the title."""


def draw_panels(panels: Sequence[Panel]) -> str:
    """Return a chart of several panels as SVG. Each panel has a scale of its own."""
    body, label, y = "", "", 0
    for panel in panels:
        lines = [line for sentence in panel.sentences for line in wrap(one_line(sentence), 112)]
        body += f'<text class="title" x="12" y="{y + 26}">{escaped(panel.title)}</text>'
        for k, line in enumerate(lines, 1):
            body += f'<text x="12" y="{y + 26 + LINE_HEIGHT * k}">{escaped(line)}</text>'
        top = y + 26 + LINE_HEIGHT * len(lines) + 12
        y = top + _ROW * len(panel.rates) + 12
        body += _bars(panel.rates, top, y - 12)
        label += " ".join([*([panel.title] if len(panels) > 1 else []), *lines, ""])
    return document(body, height=y, label=label.strip(), light=_LIGHT, dark=_DARK)


def _bars(rates: Sequence[Rate], top: int, bottom: int) -> str:
    most = max((rate.high for rate in rates), default=1.0)
    rows = "".join(_row(rate, top + _ROW * k, most) for k, rate in enumerate(rates))
    return rows + "".join(
        f'<path class="mark" d="M{_at(rate.median, most)} {top}V{bottom}"/>' for rate in rates if rate.kind == "limit"
    )


def _row(rate: Rate, y: int, most: float) -> str:
    middle, end = y + _ROW // 2, _at(rate.median, most)
    low, high, wide = _at(rate.low, most), _at(rate.high, most), round(end - _LEFT, 1)
    return (
        f'<text x="{_LEFT - 10}" y="{middle + 4}" text-anchor="end">{escaped(rate.label, 38)}</text>'
        f'<rect class="{rate.kind}" x="{_LEFT}" y="{middle - _BAR // 2}" width="{wide}" height="{_BAR}">'
        f"<title>{show_bytes(rate.low)}/s to {show_bytes(rate.high)}/s</title></rect>"
        f'<path class="spread" d="M{low} {middle}H{high}M{low} {middle - 4}v8M{high} {middle - 4}v8"/>'
        f'<text class="soft" x="{round(max(end, high) + 8, 1)}" y="{middle + 4}">{show_bytes(rate.median)}/s</text>'
    )


def _at(rate: float, most: float) -> float:
    return round(_LEFT + rate / most * _PLOT, 1)
