"""Spans of a trace as values, and their summary: totals for each kind of work, and a sentence about their shares.

Pure arithmetic. `trace.py` records spans, `timeline.py` draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import inf

from stio.runtime.text import show_bytes, show_seconds


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


@dataclass(frozen=True, slots=True)
class Total:
    """Sum of all spans of one name."""

    name: str
    """Name of the spans."""
    seconds: float
    """Time, added up over lanes: 2 for two threads that read for one second each."""
    num_bytes: int
    """Bytes read, copied or written."""


@dataclass(frozen=True, slots=True)
class Summary:
    """Summary of a trace."""

    start: float
    """Start of the first span."""
    end: float
    """End of the last span."""
    totals: tuple[Total, ...]
    """One for each name, in the order of their first spans."""
    num_bytes: int
    """Bytes that a save wrote; without one, bytes that a load read."""
    sentence: str
    """Sentence with the rate, and each kind of work with its share of the time."""


CALLER = "caller"
"""Lane of all threads that stio did not start."""

_AGE_SECONDS = 1e12
"""A time further away than this did not come from a clock."""

_ACTIVITIES = {
    "reading": {"read", "populate"},
    "copying": {"copy"},
    "staging": {"stage"},
    "writing": {"write"},
    "syncing": {"sync"},
}
_MOVED = ({"write"}, {"read", "populate"})
"""Names whose bytes are those of the operation: the first that occur."""


def usable(spans: Iterable[Span]) -> list[Span]:
    """Return the spans with a valid time, by their start; of two with the same start the longer one first."""
    found = [span for span in spans if -_AGE_SECONDS < span.start <= span.end < _AGE_SECONDS]  # false for NaN
    return sorted(found, key=lambda span: (span.start, -span.end))


def in_tracks(spans: Iterable[Span]) -> Iterator[tuple[Span, int]]:
    """Yield each usable span with the number of its track in its lane; on a track spans nest, or follow each other."""
    tracks: dict[str, list[list[float]]] = {}  # of each lane: the ends of the spans that are open
    for span in usable(spans):
        own = tracks.setdefault(span.lane, [])
        for ends in own:
            while ends and ends[-1] <= span.start:
                ends.pop()
        free = (k for k, ends in enumerate(own) if not ends or span.end <= ends[-1])
        if (number := next(free, len(own))) == len(own):
            own.append([])
        own[number].append(span.end)
        yield span, number


def summarize(spans: Iterable[Span]) -> Summary:
    """Add up spans; those without a valid time are left out."""
    ordered = usable(spans)
    by_name: dict[str, list[Span]] = {}
    for span in ordered:
        by_name.setdefault(span.name, []).append(span)
    totals = tuple(
        Total(name, sum(span.end - span.start for span in mine), sum(span.num_bytes for span in mine))
        for name, mine in by_name.items()
    )
    start = min((span.start for span in ordered), default=0.0)
    end = max((span.end for span in ordered), default=0.0)
    moved = next((found for names in _MOVED if (found := sum(s.num_bytes for s in ordered if s.name in names))), 0)
    return Summary(start, end, totals, moved, _sentence(ordered, end - start, moved))


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
    if moved and seconds:
        text += f", {show_bytes(moved / seconds)}/s"
    shares = [
        (verb, covered_seconds(mine))
        for verb, names in _ACTIVITIES.items()
        if (mine := [span for span in ordered if span.name in names])
    ]
    held_back = [span for span in ordered if span.name == "wait" and span.lane != CALLER]
    if held_back:
        shares.append(("threads waiting", covered_seconds(held_back)))
    if shares and seconds:
        (verb, first), *others = shares
        text += f"; {verb} was under way {_percent(first / seconds)} of the time"
        text += "".join(f", {verb} {_percent(covered / seconds)}" for verb, covered in others)
    return text + _caller_part(ordered)


def _caller_part(ordered: Sequence[Span]) -> str:
    here = [span for span in ordered if span.lane == CALLER]
    used, waited = ([span for span in here if span.name == name] for name in ("consume", "wait"))
    if used:
        return (
            f"; the consumer worked {show_seconds(covered_seconds(used))} and waited "
            f"{show_seconds(covered_seconds(waited))}"
        )
    return f"; the caller waited {show_seconds(covered_seconds(waited))}" if waited else ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
