"""Spans of a trace as values; their summary, a sentence about the share of each kind of work; and their picture.

The picture is SVG: one row for each lane, one color for each kind of work, a legend, and the sentence. A lane is a
thread or a device queue. The work of one kind on one lane is one shape, whose tooltip has the sums. Spans that are
closer than about a pixel are drawn as one; `Trace.save_chrome` has each of them. Texts may come from hostile files:
`escaped` cuts and escapes them, and no text becomes part of the style.

Pure. `trace.py` records spans.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from math import floor, inf, log10
from textwrap import wrap
from typing import Any, NamedTuple

from stio.errors import printable
from stio.text import natural_key, show_bytes, show_seconds


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one lane. Times are in seconds since the start of the trace."""

    name: str
    """Kind of work. In a load: `open`, `verify`, `plan`, `read`, `populate`, `map`, `copy`, `tensors`, and `consume`
    for the work of the consumer of the tensors. In a save: `plan`, `begin`, `stage`, `hash`, `write`, `sync`, `commit`.
    In both: `wait`. In a pool of models: `open`, `swap` for a load, `evict`, `update`."""
    lane: str
    """The thread or device queue that did the work: one row of a timeline. `engine-1` and so on are the engine's
    threads. Each has the groups whose last bytes it moved, from a group's first read on."""
    start: float
    """Start, in seconds."""
    end: float
    """End, in seconds (half-open)."""
    num_bytes: int = 0
    """Bytes read, copied or written; 0 for other work."""
    detail: str = ""
    """A file, a read path, or what the thread waited for."""


class Summary(NamedTuple):
    """Summary of a trace."""

    start: float
    """Start of the first span."""
    end: float
    """End of the last span."""
    num_bytes: int
    """Bytes that a save wrote; without one, bytes that a load read."""
    sentence: str
    """Sentence with the rate, and each kind of work with its share of the time."""


CALLER = "caller"
"""Lane of all threads that stio did not start."""

_AGE_SECONDS = 1e12
"""A time further away than this did not come from a clock."""

_SHOWN = ("read", "populate", "copy", "stage", "write", "sync", "consume")
"""Names whose shares of the time are in the sentence."""


def usable(spans: Iterable[Span]) -> list[Span]:
    """Return the spans with a valid time, by their start; of two with the same start the longer one first."""
    valid = (span for span in spans if -_AGE_SECONDS < span.start <= span.end < _AGE_SECONDS)  # false for NaN
    return sorted(valid, key=lambda span: (span.start, -span.end))


def summarize(spans: Iterable[Span]) -> Summary:
    """Add up spans; those without a valid time are left out."""
    ordered = usable(spans)
    start = min((span.start for span in ordered), default=0.0)
    end = max((span.end for span in ordered), default=0.0)
    moved = {name: sum(span.num_bytes for span in ordered if span.name == name) for name in _SHOWN}
    num_bytes = moved["write"] or moved["read"] + moved["populate"]
    return Summary(start, end, num_bytes, _sentence(ordered, end - start, num_bytes))


def covered_seconds(ordered: Sequence[Span]) -> float:
    """Return the time in which at least one span was under way. The spans must be in the order of their start."""
    seconds, reached = 0.0, -inf
    for span in ordered:
        if span.end > reached:
            seconds += span.end - max(span.start, reached)
            reached = span.end
    return seconds


def _sentence(ordered: Sequence[Span], seconds: float, moved: int) -> str:
    if not ordered:
        return "nothing was recorded"
    text = f"{show_bytes(moved)} in {show_seconds(seconds)}" if moved else f"{show_seconds(seconds)} in all"
    if not seconds:
        return text
    kinds = {name: [span for span in ordered if span.name == name] for name in (*_SHOWN, "wait")}
    waits = kinds.pop("wait")
    kinds["threads waiting"] = [span for span in waits if span.lane != CALLER]
    kinds["caller waiting"] = [span for span in waits if span.lane == CALLER]
    shares = [f"{name} {100 * covered_seconds(own) / seconds:.0f} %" for name, own in kinds.items() if own]
    text += f", {show_bytes(moved / seconds)}/s" if moved else ""
    return f"{text}; {', '.join(shares)} of the time" if shares else text


# The picture.

WIDTH = 840
"""Of every picture, in pixels."""

LINE_HEIGHT = 19

_STYLE = """\
.stio{font:12.5px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.stio .title{font-size:15px;font-weight:600}
.stio text{fill:#1f2328}.stio .soft{fill:#59636e}.stio .paper{fill:#fff}"""
_STYLE_IN_THE_DARK = ".stio text{fill:#e6edf3}.stio .soft{fill:#9198a1}.stio .paper{fill:#0d1117}"

MAX_BYTES = 900_000
"""Largest picture."""

_LEFT, _RIGHT = 104, 24
_PLOT = WIDTH - _LEFT - _RIGHT
_ROW, _BAR = 22, 16
_MAX_ROWS = 24
_GAP = 0.025
"""Widest gap in pixels that is not drawn, for each shape of a picture: with all kinds in 24 rows, 7 pixels. With a
block of 27 bytes after each gap, all shapes together stay below `MAX_BYTES`."""

_COLORS = {
    "#1f6fb4": ("read", "write"),
    "#4fa3d9": ("populate",),
    "#9cc9e8": ("map",),
    "#e08e0b": ("copy", "stage"),
    "#0f8f68": ("tensors", "commit"),
    "#b8578f": ("consume",),
    "#c3c9d1": ("wait",),
    "#8a6d3b": ("open", "begin"),
    "#b7a600": ("verify", "hash"),
    "#5b5f9e": ("plan",),
    "#cc4b16": ("sync",),
    "#6b7f2a": ("other",),
}
"""Kinds of work of each color. Within a load, and within a save, color-blind readers can distinguish them."""

_KINDS = {kind: color for color, kinds in _COLORS.items() for kind in kinds}
_LIGHT = ".stio .row{fill:#f3f5f7}.stio .grid{stroke:#d1d9e0;fill:none}.stio .bar{fill-opacity:.82;stroke-width:.7}"
_LIGHT += "".join(f".stio .{kind}{{fill:{color};stroke:{color}}}" for kind, color in _KINDS.items())
_DARK = ".stio .row{fill:#161b22}.stio .grid{stroke:#30363d}.stio .bar{filter:brightness(1.3)}.stio .wait{fill:#4b5460}"


def draw(spans: Sequence[Span], *, title: str = "") -> str:
    """Return the picture of a trace as SVG, at most `MAX_BYTES` long in UTF-8.

    Args:
        spans: The spans; those without a valid time are left out.
        title: A line above the picture.
    """
    ordered = usable(spans)
    summary = summarize(ordered)
    seconds = max(summary.end - summary.start, 1e-6)
    rows = [(lane, _by_kind(spans)) for lane, spans in _rows(ordered)]
    gap = _GAP * sum(len(kinds) for _, kinds in rows)
    head, top = _head(title, summary, ordered)
    labels = paper = bars = ""
    for k, (lane, kinds) in enumerate(rows):
        labels += f'<text class="soft" x="{_LEFT - 8}" y="{top + _ROW * k + 16}" text-anchor="end">'
        labels += f"{escaped(lane, 14)}<title>{escaped(lane)}</title></text>"
        paper += f'<rect class="row" x="0" y="{_ROW * k + 2}" width="{_PLOT}" height="{_ROW - 4}"/>'
        shapes = "".join(_shape(kind, own, summary.start, _PLOT / seconds, gap) for kind, own in kinds.items())
        bars += f'<g transform="translate(0 {_ROW * k + (_ROW - _BAR) // 2})">{shapes}</g>'
    height = _ROW * len(rows)
    grid, axis = _axis(seconds, top, height)
    plot = f'<svg class="plot" x="{_LEFT}" y="{top}" width="{_PLOT}" height="{height}">{paper}{grid}{bars}</svg>'
    body = head + labels + plot + axis
    return document(body, height=top + height + 30, label=summary.sentence, light=_LIGHT, dark=_DARK)


def _by_kind(spans: Iterable[Span]) -> dict[str, list[Span]]:
    """Return spans by their class in the style."""
    kinds: dict[str, list[Span]] = {}
    for span in spans:
        kinds.setdefault(span.name if span.name in _KINDS else "other", []).append(span)
    return kinds


def _rows(ordered: Sequence[Span]) -> list[tuple[str, list[Span]]]:
    """Return the spans of each lane: operations and their threads, device queues, then the caller."""
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


def _head(title: str, summary: Summary, ordered: Sequence[Span]) -> tuple[str, int]:
    """Return title, sentence and legend, and the y coordinate of the plot below them."""
    text, y = "", 8
    if title:
        y += 18
        text += f'<text class="title" x="12" y="{y}">{escaped(title, 100)}</text>'
    for line in wrap(summary.sentence, 112):
        y += LINE_HEIGHT
        text += f'<text x="12" y="{y}">{escaped(line)}</text>'
    y += 4
    for k, (kind, spans) in enumerate(_by_kind(ordered).items()):
        x = 12 + k % 3 * 272
        y += LINE_HEIGHT if k % 3 == 0 else 0
        text += f'<rect class="bar {kind}" x="{x}" y="{y - 10}" width="11" height="11"/>'
        text += f'<text class="soft" x="{x + 16}" y="{y}">{escaped(_amount(spans), 38)}</text>'
    return text, y + 12


def _shape(kind: str, spans: Sequence[Span], start: float, scale: float, gap: float) -> str:
    blocks: list[tuple[float, float]] = []
    for span in spans:
        x, end = (span.start - start) * scale, (span.end - start) * scale
        if blocks and x - blocks[-1][1] <= gap:
            x, end = blocks[-1][0], max(blocks.pop()[1], end)
        blocks.append((x, end))
    y, height = (5, 6) if kind == "wait" else (0, _BAR)  # thin, so that work behind it is visible
    d = "".join(f"M{x:.1f} {y}h{end - x:.1f}v{height}h-{end - x:.1f}z" for x, end in blocks)
    return f'<path class="bar {kind}" d="{d}"><title>{escaped(_amount(spans))}</title></path>'


def _amount(spans: Sequence[Span]) -> str:
    """Return name, time, bytes and rate of spans of one kind."""
    text = cut(printable(spans[0].name), 24) if len({span.name for span in spans}) == 1 else "others"
    nbytes, seconds = sum(span.num_bytes for span in spans), sum(span.end - span.start for span in spans)
    text += f" {show_seconds(seconds)}" + (f", {show_bytes(nbytes)}" if nbytes else "")
    return text + (f", {show_bytes(nbytes / seconds)}/s" if nbytes and seconds else "")


def _axis(seconds: float, top: int, height: int) -> tuple[str, str]:
    """Return grid lines and labels at round times."""
    rough = seconds / 7
    power = 10.0 ** floor(log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    factor, unit = (1e6, "µs") if seconds < 1e-3 else (1e3, "ms") if seconds < 1 else (1.0, "s")
    lines = labels = ""
    for k in range(int(seconds / step * 1.000001) + 1):
        x = round(k * step / seconds * _PLOT, 2)
        lines += f"M{x} 0v{height}"
        labels += f'<text class="soft" x="{_LEFT + x}" y="{top + height + 18}" text-anchor="middle">'
        labels += f"{k * step * factor:.6g} {unit}</text>"
    return f'<path class="grid" d="{lines}"/>', f'<g class="axis">{labels}</g>'


def document(body: str, *, height: int, label: str, light: str, dark: str) -> str:
    """Return an SVG document.

    Args:
        body: Its elements.
        height: In pixels.
        label: Description for screen readers, not escaped yet.
        light: Style rules in addition to the common ones.
        dark: Rules that replace them for a dark viewer.
    """
    style = f"{_STYLE}{light}\n@media (prefers-color-scheme:dark){{{_STYLE_IN_THE_DARK}{dark}}}"
    return (
        f'<svg class="stio" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label)}"><style>{style}</style>'
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>{body}</svg>\n'
    )


def escaped(value: str, limit: int = 200) -> str:
    """Return text for markup: control characters made visible, cut to `limit` characters, the rest escaped."""
    return escape(cut(printable(value), limit))


def cut(value: str, limit: int) -> str:
    """Return at most `limit` characters, the last one an ellipsis if some are left out."""
    return value if len(value) <= limit else value[: limit - 1] + "…"
