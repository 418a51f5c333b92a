"""Draw a timeline of a load: `python examples/timeline.py CHECKPOINT PICTURE`, an SVG.

Each thread, each copy queue of a device and the consumer is a row. Work that overlaps in time is drawn in one column.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import stio


async def record(path: str | Path, **keywords: Any) -> stio.Trace:
    """Stream a checkpoint and return a trace of the load; reading the bytes of a tensor represents its use."""
    trace = stio.Trace()
    async with stio.open(path, trace=trace, **keywords) as checkpoint, checkpoint.stream() as stream:
        async for _, tensor in stream:
            tensor.count_nonzero()
    return trace


def draw(trace: stio.Trace, picture: Path, title: str) -> None:
    """Write the picture. Make the directories above it."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    trace.save_svg(picture, title=title)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    checkpoint = Path(sys.argv[1])
    made = asyncio.run(record(checkpoint, memory="copy", budget_bytes=32 << 20))
    draw(made, Path(sys.argv[2]), f"{checkpoint.name}, streamed")
