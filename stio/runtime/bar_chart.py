"""Draws rates side by side: a bar for each median, a line for its spread, one through all for the limit.

SVG text without dependencies, light or dark as its viewer is; `stio bench --chart` writes it. Labels are escaped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Literal

from stio.errors import printable
from stio.runtime.spans import show_bytes

__all__ = ["Rate", "draw_rates", "text_bar"]

_WIDTH, _LEFT, _RIGHT = 840, 230, 110
_PLOT = _WIDTH - _LEFT - _RIGHT
_LINE, _ROW, _BAR = 19, 28, 16
_LABEL_LENGTH = 34

_STYLE = """\
.stio{font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.stio text{fill:#1f2328}.stio .title{font-size:15px;font-weight:600}.stio .soft{fill:#59636e}.stio .paper{fill:#fff}
.stio .limit{fill:#c3c9d1}.stio .ours{fill:#1f6fb4}.stio .peer{fill:#b98a4b}
.stio .spread{stroke:#1f2328;fill:none}.stio .mark{stroke:#59636e;stroke-dasharray:3 3;fill:none}
@media (prefers-color-scheme:dark){
.stio text{fill:#e6edf3}.stio .soft{fill:#9198a1}.stio .paper{fill:#0d1117}
.stio .limit{fill:#4b5460}.stio .ours{fill:#4a9be0}.stio .peer{fill:#b8965c}
.stio .spread{stroke:#e6edf3}.stio .mark{stroke:#9198a1}}"""


@dataclass(frozen=True, slots=True)
class Rate:
    """What is drawn of one contestant; all in bytes a second, above 0."""

    label: str
    """Its name."""
    median: float
    """Of its runs."""
    low: float
    """The slowest of them."""
    high: float
    """The fastest."""
    kind: Literal["limit", "ours", "peer"]
    """Its colour; through the end of the limit's bar goes a line."""


def draw_rates(rates: Sequence[Rate], *, title: str, sentences: Sequence[str] = ()) -> str:
    """Return the picture of some rates as SVG.

    Args:
        rates: From top to bottom.
        title: A line above them.
        sentences: What they say, below the title.
    """
    lines = [line for sentence in sentences for line in wrap("".join(map(printable, sentence)), 112)]
    top = 26 + _LINE * len(lines) + 12
    bottom = top + _ROW * len(rates) + 12
    most = max((rate.high for rate in rates), default=1.0)
    head = f'<text class="title" x="12" y="26">{escape(printable(title))}</text>'
    head += "".join(f'<text x="12" y="{26 + _LINE * k}">{escape(line)}</text>' for k, line in enumerate(lines, 1))
    rows = "".join(_row(rate, top + _ROW * k, most) for k, rate in enumerate(rates))
    marks = "".join(
        f'<path class="mark" d="M{_at(rate.median, most)} {top}V{bottom - 12}"/>'
        for rate in rates
        if rate.kind == "limit"
    )
    return (
        f'<svg class="stio" xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom}" '
        f'viewBox="0 0 {_WIDTH} {bottom}" role="img" aria-label="{escape(" ".join(lines))}">'
        f'<style>{_STYLE}</style><rect class="paper" width="{_WIDTH}" height="{bottom}"/>{head}{rows}{marks}</svg>\n'
    )


def _row(rate: Rate, y: int, most: float) -> str:
    spread = f"{show_bytes(rate.low)}/s to {show_bytes(rate.high)}/s"
    label = printable(rate.label)
    label = label if len(label) <= _LABEL_LENGTH else f"{label[: _LABEL_LENGTH - 1]}…"
    middle, end = y + _ROW // 2, _at(rate.median, most)
    low, high, wide = _at(rate.low, most), _at(rate.high, most), round(end - _LEFT, 1)
    return (
        f'<text x="{_LEFT - 10}" y="{middle + 4}" text-anchor="end">{escape(label)}</text>'
        f'<rect class="{rate.kind}" x="{_LEFT}" y="{middle - _BAR // 2}" width="{wide}" height="{_BAR}">'
        f"<title>{escape(spread)}</title></rect>"
        f'<path class="spread" d="M{low} {middle}H{high}M{low} {middle - 4}v8M{high} {middle - 4}v8"/>'
        f'<text class="soft" x="{round(max(end, high) + 8, 1)}" y="{middle + 4}">{show_bytes(rate.median)}/s</text>'
    )


def _at(rate: float, most: float) -> float:
    return round(_LEFT + rate / most * _PLOT, 1)


def text_bar(share: float, *, width: int = 24, encoding: str | None = "utf-8") -> str:
    """Return a bar of so many characters, an eighth of one where the encoding has them.

    Args:
        share: Of the whole width, from 0 to 1.
        width: Characters at 1.
        encoding: Of who shows it; None is ASCII.
    """
    eighths = round(share * width * 8)
    drawn = "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()
    try:
        drawn.encode(encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#" * round(share * width)
    return drawn
