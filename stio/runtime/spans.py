"""What was done when: spans, and what many of them say together.

Values and arithmetic. `trace.py` records spans, `timeline.py` draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

__all__ = ["Span", "Summary", "Total", "covered_seconds", "show_bytes", "show_seconds", "summarize"]


@dataclass(frozen=True, slots=True)
class Span:
    """One piece of work on one lane, times in seconds since the trace began."""

    name: str
    """What was done: `open`, `verify`, `plan`, `read`, `populate`, `map`, `copy`, `tensors` by loads; `plan`, `begin`,
    `stage`, `hash`, `write`, `sync`, `commit` by saves; `wait` by either, `consume` by who takes a load's tensors."""
    lane: str
    """The thread or device queue that did it."""
    start: float
    """Begin, seconds."""
    end: float
    """End, seconds (half-open)."""
    num_bytes: int = 0
    """Bytes moved, 0 where none were."""
    detail: str = ""
    """File, way in, or what was waited for."""


@dataclass(frozen=True, slots=True)
class Total:
    """What all spans of one name come to."""

    name: str
    """Theirs."""
    num_spans: int
    """How many."""
    seconds: float
    """Added up over lanes: of two threads that read for a second each, 2."""
    covered_seconds: float
    """Time in which at least one was under way."""
    num_bytes: int
    """Bytes moved."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a trace says at a glance."""

    start: float
    """The first span's begin."""
    end: float
    """The last span's end."""
    totals: tuple[Total, ...]
    """One for each name, in the order of their first spans."""
    num_bytes: int
    """What a save wrote, else what a load read."""
    sentence: str
    """Where the time went, in words."""


CALLER = "caller"
"""The lane of threads that are not stio's own."""

_AGE_SECONDS = 1e12
"""What is further away is no reading of a clock."""

_ACTIVITIES = {
    "reading": {"read", "populate"},
    "copying": {"copy"},
    "staging": {"stage"},
    "writing": {"write"},
    "syncing": {"sync"},
}
_MOVED = ({"write"}, {"read", "populate"})
"""Whose bytes are the operation's."""


def usable(spans: Iterable[Span]) -> list[Span]:
    """Return the spans that have a place in time, by their begin; of two that begin together the longer one first."""
    found = [span for span in spans if -_AGE_SECONDS < span.start <= span.end < _AGE_SECONDS]  # no NaN is
    return sorted(found, key=lambda span: (span.start, -span.end))


def summarize(spans: Iterable[Span]) -> Summary:
    """Add up spans; those without a place in time are left out."""
    ordered = usable(spans)
    by_name: dict[str, list[Span]] = {}
    for span in ordered:
        by_name.setdefault(span.name, []).append(span)
    totals = tuple(
        Total(
            name,
            len(mine),
            sum(span.end - span.start for span in mine),
            covered_seconds(mine),
            sum(span.num_bytes for span in mine),
        )
        for name, mine in by_name.items()
    )
    start = min((span.start for span in ordered), default=0.0)
    end = max((span.end for span in ordered), default=0.0)
    moved = next((found for names in _MOVED if (found := sum(s.num_bytes for s in ordered if s.name in names))), 0)
    return Summary(start, end, totals, moved, _sentence(ordered, end - start, moved))


def covered_seconds(ordered: Sequence[Span]) -> float:
    """Return the time in which at least one span was under way; they must come by their begin."""
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
    return text + _of_the_caller(ordered)


def _of_the_caller(ordered: Sequence[Span]) -> str:
    here = [span for span in ordered if span.lane == CALLER]
    used, waited = ([span for span in here if span.name == name] for name in ("consume", "wait"))
    if used:
        return (
            f"; the consumer worked {show_seconds(covered_seconds(used))} and waited "
            f"{show_seconds(covered_seconds(waited))}"
        )
    return f"; the caller waited {show_seconds(covered_seconds(waited))}" if waited else ""


def show_seconds(seconds: float) -> str:
    """Return a time for people: `1.52 s`, `0.42 s`, `20.1 ms`, `7 µs`."""
    if seconds >= 99.95:
        return f"{seconds:,.0f} s"
    if seconds >= 0.09995:
        return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds:.2f} s"
    if seconds >= 0.0009995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.0f} µs"


def show_bytes(nbytes: float) -> str:
    """Return a size for people, in powers of ten: `512 B`, `32 MB`, `1.74 GB`."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if value >= 99.95 or units[0] == "B" else f"{value:.3g} {units[0]}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
