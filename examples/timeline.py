"""Draw what a load did: `python examples/timeline.py CHECKPOINT PICTURE`.

Each thread, and each device's copy queue, is a row; what overlaps in time stands above each other.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # pictures for files; no display is asked for

from matplotlib import pyplot as plt
from matplotlib.patches import Patch

import stio

COLOURS = {"read": "#3572b0", "populate": "#3572b0", "copy": "#e08e2b", "tensors": "#2f9e6e", "consume": "#b0508f"}
OTHER = "#b5b5b5"


async def record(path: str | Path, **keywords: Any) -> list[stio.Span]:
    """Stream a checkpoint and return what was done when; reading a tensor's bytes stands for using it."""
    trace = stio.Trace()
    async with stio.open(path, trace=trace, **keywords) as checkpoint, checkpoint.stream() as stream:
        async for _, tensor in stream:
            with trace.span("consume", num_bytes=tensor.nbytes):
                tensor.count_nonzero()
    return trace.spans


def draw(runs: Mapping[str, Sequence[stio.Span]], picture: str | Path) -> None:
    """Draw one panel for each run, one row for each lane.

    Args:
        runs: Title to spans.
        picture: File to write; its suffix says the format.
    """
    lanes = {title: _lanes(spans) for title, spans in runs.items()}
    heights = [0.9 + 0.3 * len(rows) for rows in lanes.values()]
    style = {"font.size": 9, "svg.fonttype": "none", "svg.hashsalt": "stio"}
    with plt.rc_context(style):
        figure, axes = plt.subplots(
            len(runs), figsize=(8, sum(heights)), height_ratios=heights, squeeze=False, layout="constrained"
        )
        for axis, (title, spans) in zip(axes[:, 0], runs.items(), strict=True):
            _panel(axis, title, spans, lanes[title])
        Path(picture).parent.mkdir(parents=True, exist_ok=True)
        plain = {"Date": None} if str(picture).endswith(".svg") else None
        figure.savefig(picture, metadata=plain, facecolor="white")
        plt.close(figure)


def _panel(axis: Any, title: str, spans: Sequence[stio.Span], lanes: Sequence[str]) -> None:
    origin = min((span.start for span in spans), default=0.0)
    for row, lane in enumerate(lanes):
        here = [span for span in spans if span.lane == lane]
        axis.broken_barh(
            [((span.start - origin) * 1e3, (span.end - span.start) * 1e3) for span in here],
            (row - 0.36, 0.72),
            facecolors=[COLOURS.get(span.name, OTHER) for span in here],
            edgecolor="white",
            linewidth=0.3,
        )
    axis.set_yticks(range(len(lanes)), lanes)
    axis.set_ylim(len(lanes) - 0.5, -0.5)
    axis.set_xlabel("milliseconds")
    axis.set_title(title, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    names = dict.fromkeys(span.name for span in spans)
    handles = [Patch(color=COLOURS.get(name, OTHER), label=name) for name in names]
    axis.legend(handles=handles, ncols=len(handles), loc="lower right", bbox_to_anchor=(1, 1), frameon=False)


def _lanes(spans: Sequence[stio.Span]) -> list[str]:
    """Return the rows: threads that read, then the device's queue, then the consumer."""
    order = {"copy": 1, "caller": 2}
    return sorted({span.lane for span in spans}, key=lambda lane: (order.get(lane, 0), lane))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    draw({sys.argv[1]: asyncio.run(record(sys.argv[1], memory="copy", budget_bytes=32 << 20))}, sys.argv[2])
