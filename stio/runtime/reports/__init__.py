"""What an operation tells: its progress, its trace, and the counters of the process.

`progress.py` calls the caller's `progress=`. `timeline.py` has the pieces of work as values, sums them up and draws
them; `trace.py` records them. `counters.py` adds up what the operations of this process have done: `stio.stats()`.

Nothing here changes the outcome of an operation, and without a callable or a trace nothing is recorded.
"""

from stio.runtime.reports import counters
from stio.runtime.reports.counters import Stats, stats
from stio.runtime.reports.progress import Progress, ProgressEvent, ProgressReporter, close_bar, progress_callback
from stio.runtime.reports.timeline import CALLER, Span, covered_seconds, summarize, usable
from stio.runtime.reports.trace import Trace, shown, traced

__all__ = [
    "CALLER",
    "Progress",
    "ProgressEvent",
    "ProgressReporter",
    "Span",
    "Stats",
    "Trace",
    "close_bar",
    "counters",
    "covered_seconds",
    "progress_callback",
    "shown",
    "stats",
    "summarize",
    "traced",
    "usable",
]
