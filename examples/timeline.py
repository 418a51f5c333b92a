"""Draw what a load did: `python examples/timeline.py CHECKPOINT PICTURE`; a PICTURE in .html can be zoomed.

Each thread, each device's copy queue and the consumer is a row; what overlaps in time stands above each other.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import stio


async def record(path: str | Path, **keywords: Any) -> stio.Trace:
    """Stream a checkpoint and return what was done when; reading a tensor's bytes stands for using it."""
    trace = stio.Trace()
    async with stio.open(path, trace=trace, **keywords) as checkpoint, checkpoint.stream() as stream:
        async for _, tensor in stream:
            tensor.count_nonzero()
    return trace


def draw(trace: stio.Trace, picture: Path, title: str) -> None:
    """Write the picture, a page or an SVG by its suffix, and the directories above it."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    save = trace.save_html if picture.suffix == ".html" else trace.save_svg
    save(picture, title=title)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    checkpoint = Path(sys.argv[1])
    made = asyncio.run(record(checkpoint, memory="copy", budget_bytes=32 << 20))
    draw(made, Path(sys.argv[2]), f"{checkpoint.name}, streamed")
