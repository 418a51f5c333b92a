"""What an operation says of itself while it runs: progress events, the spans of a trace; and limits it keeps.

Who records them is the engine. What spans are, and what they come to, is in `spans.py`; `timeline.py` draws them.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from stio.runtime.spans import CALLER, Span
from stio.runtime.timeline import draw
from stio.runtime.trace_page import page

__all__ = ["Trace"]

_lane = threading.local()


def name_thread(name: str) -> None:
    """Name the calling thread's lane in traces."""
    _lane.name = name


@dataclass(slots=True)
class Trace:
    """Record of the spans of an operation, or of several; pass it as `trace=` and read it afterwards.

        trace = stio.Trace()
        await stio.load("model/", trace=trace)
        trace.save_svg("load.svg")

    Recording costs two clock reads and one append a span, and there is one span a block, not a tensor.
    """

    spans: list[Span] = field(default_factory=list)
    """All spans, in order of their end."""
    origin: float = field(default_factory=perf_counter)
    """`perf_counter()` at the trace's zero."""

    @contextmanager
    def span(self, name: str, *, num_bytes: int = 0, detail: str = "") -> Iterator[None]:
        """Record the block under `with` as one span on the current thread's lane."""
        start = perf_counter()
        try:
            yield
        finally:
            self.add(name, start, perf_counter(), num_bytes=num_bytes, detail=detail)

    def add(
        self, name: str, start: float, end: float, *, num_bytes: int = 0, detail: str = "", lane: str | None = None
    ) -> None:
        """Record one span; `start` and `end` are `perf_counter()` readings."""
        lane = lane or str(getattr(_lane, "name", CALLER))
        self.spans.append(Span(name, lane, start - self.origin, end - self.origin, num_bytes, detail))

    def save_chrome(self, path: str | Path) -> None:
        """Write the trace as Chrome/Perfetto JSON (open it in a browser's tracing page)."""
        lanes = {lane: k for k, lane in enumerate(dict.fromkeys(s.lane for s in self.spans))}
        events: list[dict[str, object]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": k, "args": {"name": lane}} for lane, k in lanes.items()
        ]
        events += [
            {
                "ph": "X",
                "name": s.name,
                "pid": 1,
                "tid": lanes[s.lane],
                "ts": s.start * 1e6,
                "dur": (s.end - s.start) * 1e6,
                "args": {"num_bytes": s.num_bytes, "detail": s.detail},
            }
            for s in self.spans
        ]
        Path(path).write_text(json.dumps({"traceEvents": events}))

    def save_svg(self, path: str | Path, *, title: str = "") -> None:
        """Write a picture that shows at a glance where the time went: a row a lane, a colour a kind of work.

        It is below a megabyte however many spans there are, light or dark as its viewer is, and self-contained.

        Args:
            path: The file, replaced if it is there.
            title: A line above the picture.
        """
        Path(path).write_text(draw(tuple(self.spans), title=title), encoding="utf-8")

    def save_html(self, path: str | Path, *, title: str = "") -> None:
        """Write a page with the picture of `save_svg`, to be zoomed by the mouse wheel; it needs no network.

        Args:
            path: The file, replaced if it is there.
            title: A line above the picture, and the page's title.
        """
        Path(path).write_text(page(draw(tuple(self.spans), title=title), title=title), encoding="utf-8")


def shown(place: object) -> str:
    """Return where something comes from or goes to, for logs and traces; a place of one's own by its type."""
    return os.fsdecode(place) if isinstance(place, str | os.PathLike) else type(place).__name__


def traced(trace: Trace | None, name: str, *, detail: str = "") -> AbstractContextManager[None]:
    """Return a context that records one span, or nothing where nobody asked for a trace."""
    return nullcontext() if trace is None else trace.span(name, detail=detail)
