"""Spans of a trace as values, and their summary: a sentence about the share of each kind of work.

Pure arithmetic. `trace.py` records spans, `timeline.py` draws them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from stio.text import show_bytes, show_seconds


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
