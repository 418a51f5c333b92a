"""Traces: an operation records what each of its threads did and when, and the trace is saved as a picture or as JSON.

`Trace.add` may be called from any thread: it is one append to a list. `timeline.py` defines a span, adds spans up and
draws them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from stio.process import contextmanager, thread_name
from stio.runtime.reports.timeline import CALLER, Span, draw, usable
from stio.text import counted, without_secrets


@dataclass(slots=True)
class Trace:
    """Record of the spans of one or more operations. Pass it as `trace=`, and read it when they have ended.

        trace = stio.Trace()
        await stio.load("model/", trace=trace)
        trace.save_svg("load.svg")

    A span costs two clock reads and one append. There is one span for each block that is read, not for each tensor.
    """

    spans: list[Span] = field(default_factory=list)
    """All spans, in the order of their ends."""
    origin: float = field(default_factory=perf_counter)
    """Reading of `perf_counter()` at time zero of the trace."""

    def __repr__(self) -> str:
        return f"<Trace: {counted(len(self.spans), 'span')}>"

    def _repr_svg_(self) -> str:
        """Return the picture of `save_svg` for notebooks."""
        return draw(tuple(self.spans))

    @contextmanager
    def span(self, name: str, *, num_bytes: int = 0, detail: str = "") -> Iterator[None]:
        """Record the block under `with` as one span on the lane of the current thread."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, start, perf_counter(), num_bytes=num_bytes, detail=detail)

    def add(
        self, name: str, start: float, end: float, *, num_bytes: int = 0, detail: str = "", lane: str | None = None
    ) -> None:
        """Record one span; `start` and `end` are readings of `perf_counter()`."""
        lane = lane or thread_name() or CALLER
        self.spans.append(Span(name, lane, start - self.origin, end - self.origin, num_bytes, detail))

    def save_chrome(self, path: str | Path) -> None:
        """Write the trace as JSON for Perfetto (ui.perfetto.dev) and for the tracing page of Chrome.

        Spans of one lane that overlap are on several rows of this name.
        """
        rows: list[tuple[str, float]] = []  # the lane of each, and the end of its last span
        events: list[dict[str, object]] = []
        for span in usable(self.spans):
            fits = (k for k, (lane, end) in enumerate(rows) if lane == span.lane and end <= span.start)
            row = next(fits, len(rows))
            rows[row : row + 1] = [(span.lane, span.end)]
            times = {"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6}
            details = {"num_bytes": span.num_bytes, "detail": span.detail}
            events.append({"ph": "X", "name": span.name, "pid": 1, "tid": row, **times, "args": details})
        for row, (lane, _) in enumerate(rows):
            events.append({"ph": "M", "name": "thread_name", "pid": 1, "tid": row, "args": {"name": lane}})
        Path(path).write_text(json.dumps({"traceEvents": events}))

    def save_svg(self, path: str | Path, *, title: str = "") -> None:
        """Write a picture of the trace: one row for each lane, one colour for each kind of work.

        The file is an SVG below one megabyte, whatever the number of spans. It needs no other file, and is light or
        dark as the viewer is.

        Args:
            path: The file; replaced if it exists.
            title: A line above the picture.
        """
        Path(path).write_text(draw(tuple(self.spans), title=title), encoding="utf-8")


def shown(place: object) -> str:
    """Return the name of a source or destination for logs and traces: its path, or the type of an object."""
    return without_secrets(os.fsdecode(place)) if isinstance(place, str | os.PathLike) else type(place).__name__


def traced(trace: Trace | None, name: str, *, num_bytes: int = 0, detail: str = "") -> AbstractContextManager[None]:
    """Return a context that records one span; without a trace it does nothing."""
    return nullcontext() if trace is None else trace.span(name, num_bytes=num_bytes, detail=detail)
