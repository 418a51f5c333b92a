"""The picture of the demo: the answers of each server while it loads, and what was left after each kill. An SVG.

It needs no plotting library, loads nothing, and follows the light or dark colours of its viewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise

from demo_kills import Killed
from demo_server import PACE_SECONDS, Round

WIDTH, LEFT, RIGHT = 900, 304, 884
ROW, STRIP = 92, 50
SHORTEST, LONGEST = 0.0002, 5.0
"""The scale of waiting times, logarithmic, in seconds."""
MARK = 4.5
"""Radius of the mark of a kill."""

STYLE = """
.demo{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.demo text{fill:#1f2328}.demo .soft{fill:#59636e}
.demo .title{font-size:17px;font-weight:600}.demo .name{font-weight:600}
.demo .end{text-anchor:end}.demo .middle{text-anchor:middle}
.demo .paper{fill:#fff}.demo .row{fill:#f3f5f7}.demo .load{fill:#e3e8ee}.demo .grid{stroke:#d1d9e0;fill:none}
.demo .stio{stroke:#1f6fb4}.demo .other{stroke:#a8702a}
.demo .dots{fill:none;stroke-width:3.4;stroke-linecap:round}
.demo .old{fill:none;stroke:#59636e;stroke-width:1.6}.demo .new{fill:#0f8f68}
.demo .broken{fill:none;stroke:#cf222e;stroke-width:2.4}.demo text.bad{fill:#cf222e}
@media(prefers-color-scheme:dark){
.demo text{fill:#e6edf3}.demo .soft{fill:#9198a1}.demo .paper{fill:#0d1117}.demo .row{fill:#161b22}
.demo .load{fill:#262d37}.demo .grid{stroke:#30363d}.demo .stio{stroke:#4a9be0}.demo .other{stroke:#d29c52}
.demo .old{stroke:#9198a1}.demo .new{fill:#2fbf92}.demo .broken{stroke:#ff7b72}.demo text.bad{fill:#ff7b72}}
"""


def draw(rounds: Mapping[str, Round], kills: Mapping[str, Killed], *, loaded: str, machine: str) -> str:
    """Return the picture as SVG.

    Args:
        rounds: One load of each contestant.
        kills: The kills of each contestant.
        loaded: What was loaded, and from where.
        machine: A line about machine and versions.
    """
    title = "A server that answers while a model loads, and saves that are killed"
    body = text(16, 30, title, "title") + text(16, 51, machine, "soft")
    servers, y = draw_servers(rounds, 84, loaded)
    strips, y = draw_kills(kills, y + 34)
    sentences = [f"{name}: {waits_of(one)}." for name, one in rounds.items()]
    sentences += [f"{name}: {left_by(killed)}." for name, killed in kills.items()]
    return (
        f'<svg class="demo" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y}" viewBox="0 0 {WIDTH} {y}" '
        f'role="img" aria-labelledby="demo-title demo-desc"><title id="demo-title">{escape(title)}</title>'
        f'<desc id="demo-desc">{escape(" ".join([f"Loads of {loaded}:", *sentences]))}</desc><style>{STYLE}</style>'
        f'<rect class="paper" width="{WIDTH}" height="{y}"/>{body}{servers}{strips}</svg>\n'
    )


# Servers.


def draw_servers(rounds: Mapping[str, Round], y: int, loaded: str) -> tuple[str, int]:
    """Return a row for each server with an axis of seconds below, and where they end."""
    head = f"Health checks while a server loads {loaded}"
    pace = f"A request is sent every {PACE_SECONDS * 1e3:.0f} ms, and each dot is an answer"
    note = f"{pace}: the higher, the longer the wait for it. The grey area is the load."
    body = text(16, y, head, "name") + text(16, y + 19, note, "soft")
    top = y + 32
    begin = min(answered for one in rounds.values() for _, answered in one.answers)
    end = max(answered for one in rounds.values() for _, answered in one.answers)
    for number, (name, one) in enumerate(rounds.items()):
        body += draw_server(name, one, top + number * (ROW + 8), (begin, end))
    bottom = top + len(rounds) * (ROW + 8) - 8
    return body + draw_axis(begin, end, bottom, "seconds since the load began"), bottom + 34


def draw_server(name: str, one: Round, top: int, span: tuple[float, float]) -> str:
    def height(wait: float) -> float:
        part = math.log(min(max(wait, SHORTEST), LONGEST) / SHORTEST) / math.log(LONGEST / SHORTEST)
        return top + ROW - 5 - part * (ROW - 10)

    left, right = (at(seconds, *span) for seconds in (0.0, one.load_seconds))
    body = rect(LEFT, top, RIGHT - LEFT, ROW, "row") + rect(left, top, right - left, ROW, "load")
    for wait, label in ((0.001, "1 ms"), (0.01, "10 ms"), (0.1, "100 ms"), (1.0, "1 s")):
        body += f'<path class="grid" d="M{LEFT} {height(wait):.1f}H{RIGHT}"/>'
        body += text(LEFT - 6, height(wait) + 4, label, "soft end")
    dots = "".join(f"M{at(answered, *span):.1f} {height(answered - sent):.1f}h0" for sent, answered in one.answers)
    body += f'<path class="dots {kind_of(name)}" d="{dots}"/>'
    gap, begin, end = longest_gap(one)
    if at(end, *span) - at(begin, *span) > 130:
        middle = (at(begin, *span) + at(end, *span)) / 2
        body += text(middle, top + ROW - 18, f"no answer for {show(gap)}", "middle")
    library, _, call = name.partition(": ")
    labels = text(16, top + 20, library, "name") + text(16, top + 38, call)
    labels += text(16, top + 60, f"longest wait {show(max(one.waits()))}", "soft")
    return body + labels + text(16, top + 78, f"loaded in {show(one.load_seconds)}", "soft")


def longest_gap(one: Round) -> tuple[float, float, float]:
    """Return the longest time between two answers, its begin and its end."""
    times = sorted(answered for _, answered in one.answers)
    return max((after - before, before, after) for before, after in pairwise(times))


def waits_of(one: Round) -> str:
    return f"longest wait {show(max(one.waits()))}, loaded in {show(one.load_seconds)}"


# Kills.


def draw_kills(kills: Mapping[str, Killed], y: int) -> tuple[str, int]:
    """Return a strip of marks for each contestant with an axis of seconds below, and where they end."""
    body = text(16, y, "A process that saves over its checkpoint is killed: what is left", "name")
    x = 16.0
    for left, words in (("old", "the old checkpoint, whole"), ("new", "the new one, whole"), ("mixed", "neither")):
        body += mark(x + 6, y + 15, left) + text(x + 18, y + 19, words, "soft")
        x += 40 + 6.6 * len(words)
    top = y + 32
    end = max(kill.seconds for killed in kills.values() for kill in killed.kills) * 1.02
    for number, (name, killed) in enumerate(kills.items()):
        body += draw_strip(name, killed, top + number * (STRIP + 8), end)
    bottom = top + len(kills) * (STRIP + 8) - 8
    return body + draw_axis(0.0, end, bottom, "seconds since the killed save began"), bottom + 38


def draw_strip(name: str, killed: Killed, top: int, end: float) -> str:
    body = rect(LEFT, top, RIGHT - LEFT, STRIP, "row")
    levels: dict[int, int] = {}
    for kill in sorted(killed.kills, key=lambda kill: kill.seconds):
        x = at(kill.seconds, 0.0, end)
        # Marks at nearly the same place are drawn above and below each other.
        column = round(x / (2 * MARK + 1))
        level = levels[column] = levels.get(column, -1) + 1
        offset = (level + 1) // 2 * (1 if level % 2 else -1) * (2 * MARK + 1)
        body += mark(x, top + STRIP / 2 + max(-19.0, min(19.0, offset)), kill.left)
    library, _, call = name.partition(": ")
    body += f'<text x="16" y="{top + 20}"><tspan class="name">{escape(library)}</tspan> {escape(call)}</text>'
    return body + text(16, top + 39, left_by(killed), "bad" if killed.num_broken else "soft")


def mark(x: float, y: float, left: str) -> str:
    if left in ("old", "new"):
        return f'<circle class="{left}" cx="{x:.1f}" cy="{y:.1f}" r="{MARK - (0.8 if left == "old" else 0)}"/>'
    size = 2 * MARK - 1
    return f'<path class="broken" d="M{x - size / 2:.1f} {y - size / 2:.1f}l{size} {size}m{-size} 0l{size} {-size}"/>'


def left_by(killed: Killed) -> str:
    counts = killed.counts()
    numbers = [(counts["old"], "old"), (counts["new"], "new"), (killed.num_broken, "neither")]
    words = ", ".join(f"{number} {left}" for number, left in numbers if number)
    left_over = f"; {killed.left_over_bytes / 1e6:,.0f} MB left over" if killed.left_over_bytes else ""
    return words + left_over


# Elements.


def draw_axis(begin: float, end: float, y: float, label: str) -> str:
    """Return an axis of seconds with round numbers."""
    step = next(step for step in steps() if (end - begin) / step <= 8)
    digits = max(0, -math.floor(math.log10(step)))
    body = ""
    for number in range(math.ceil(begin / step), math.floor(end / step) + 1):
        x = at(number * step, begin, end)
        body += f'<path class="grid" d="M{x:.1f} {y}v5"/>' + text(
            x, y + 19, f"{number * step:.{digits}f}", "soft middle"
        )
    return body + text(LEFT - 20, y + 19, label, "soft end")


def steps() -> Sequence[float]:
    return [factor * 10.0**power for power in range(-3, 4) for factor in (1, 2, 5)]


def at(seconds: float, begin: float, end: float) -> float:
    return LEFT + (seconds - begin) / (end - begin) * (RIGHT - LEFT)


def rect(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"/>'


def text(x: float, y: float, words: str, kind: str = "") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}">{escape(words)}</text>'


def kind_of(name: str) -> str:
    return "stio" if name.startswith("stio") else "other"


def show(seconds: float) -> str:
    """Return a time as text: `1.52 s`, `20 ms`, `0.7 ms`."""
    if seconds >= 0.9995:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.00995 else f"{seconds * 1e3:.1f} ms"
