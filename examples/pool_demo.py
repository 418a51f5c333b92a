"""A picture of a pool of models under requests: `python examples/pool_demo.py pool.svg`.

Eight models are requested by 16 callers for some seconds, in a process with room for three of them, and host memory for
six. The picture has a row for each model. Its colour says where the model is: on the device (here: memory of its own),
on its way there, in host memory, or only in its file. Above are the requests, as marks whose height is how long they
waited.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

import torch

import stio.sync

WIDTH, LEFT, RIGHT, ROW, MARKS = 900, 96, 884, 44, 24
TIERS = {"device": "on the device", "loading": "loading", "host": "in host memory", "source": "in its file"}
STYLE = """
.pool{font:13px system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.pool text{fill:#1f2328}.pool .soft{fill:#59636e}.pool .title{font-size:17px;font-weight:600}.pool .paper{fill:#fff}
.pool .device{fill:#1f6fb4}.pool .loading{fill:#e08e0b}.pool .host{fill:#9cc9e8}.pool .source{fill:#e3e8ee}
.pool .request{stroke:#59636e;stroke-width:1;fill:none}
@media(prefers-color-scheme:dark){
.pool text{fill:#e6edf3}.pool .soft{fill:#9198a1}.pool .paper{fill:#0d1117}.pool .device{fill:#4a9be0}
.pool .loading{fill:#f0a830}.pool .host{fill:#46708c}.pool .source{fill:#262d37}.pool .request{stroke:#9198a1}}
"""


@dataclass
class Seen:
    """What was seen of one model: times are in seconds since the start."""

    tiers: list[tuple[float, str]] = field(default_factory=list)
    """When it came to a place."""
    requests: list[tuple[float, float]] = field(default_factory=list)
    """Time of a request, and how long it waited."""


async def watch(pool: stio.ModelPool, num_callers: int, seconds: float) -> dict[str, Seen]:
    """Run callers that draw models by a Zipf distribution, and look where each model is."""
    names = pool.names()
    seen = {name: Seen() for name in names}
    start = time.perf_counter()

    async def call(seed: int) -> None:
        rng = random.Random(seed)
        while (now := time.perf_counter() - start) < seconds:
            (name,) = rng.choices(names, [1 / (k + 1) for k in range(len(names))])
            async with pool.use(name) as tensors:
                seen[name].requests.append((now, time.perf_counter() - start - now))
                tensors["w0"][rng.randrange(len(tensors["w0"]))].sum()
                await asyncio.sleep(rng.uniform(0.001, 0.03))

    async def look() -> None:
        while (now := time.perf_counter() - start) < seconds:
            for name, one in seen.items():
                tier = pool.status(name).tier
                if not one.tiers or one.tiers[-1][1] != tier:
                    one.tiers.append((now, tier))
            await asyncio.sleep(0.002)

    await asyncio.gather(look(), *(call(seed) for seed in range(num_callers)))
    return seen


def draw(seen: dict[str, Seen], seconds: float, title: str) -> str:
    """Return the picture as SVG."""
    longest = max((wait for one in seen.values() for _, wait in one.requests), default=0.0) or 1.0
    top = 96
    height = top + ROW * len(seen) + 34

    def x(time: float) -> float:
        return LEFT + (RIGHT - LEFT) * min(time, seconds) / seconds

    parts = [f'<text x="16" y="30" class="title">{escape(title)}</text>']
    parts.append(
        f'<text x="16" y="51" class="soft">Marks: requests, as high as they waited; the highest {longest * 1e3:.0f} ms'
        "</text>"
    )
    for k, (tier, label) in enumerate(TIERS.items()):
        parts.append(f'<rect x="{16 + 150 * k}" y="64" width="14" height="12" class="{tier}"/>')
        parts.append(f'<text x="{36 + 150 * k}" y="75">{label}</text>')
    for k, (name, one) in enumerate(seen.items()):
        bar = top + ROW * k + MARKS
        parts.append(f'<text x="16" y="{bar + 11}">{escape(name)}</text>')
        ends = [began for began, _ in one.tiers[1:]] + [seconds]
        for (began, tier), end in zip(one.tiers, ends, strict=True):
            parts.append(
                f'<rect x="{x(began):.1f}" y="{bar}" width="{x(end) - x(began):.1f}" height="14" class="{tier}"/>'
            )
        marks = "".join(f"M{x(at):.1f} {bar - 1}v-{1 + (MARKS - 4) * wait / longest:.1f}" for at, wait in one.requests)
        if marks:
            parts.append(f'<path class="request" d="{marks}"/>')
    parts.append(f'<text x="{LEFT}" y="{height - 12}" class="soft">0 s</text>')
    parts.append(f'<text x="{RIGHT}" y="{height - 12}" class="soft" text-anchor="end">{seconds:g} s</text>')
    described = "; ".join(f"{name}: {len(one.requests)} requests" for name, one in seen.items())
    return (
        f'<svg class="pool" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="pool-title pool-desc">'
        f'<title id="pool-title">{escape(title)}</title><desc id="pool-desc">{escape(described)}</desc>'
        f'<style>{STYLE}</style><rect class="paper" width="{WIDTH}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


async def run(directory: Path, options: argparse.Namespace) -> str:
    """Write the models, run the callers, and return the picture."""
    width = int((options.mb * 10**6 / 8 / 4) ** 0.5)
    for k in range(options.models):
        tensors = {f"w{n}": torch.full((width, width), float(k)) for n in range(8)}
        await stio.save(tensors, directory / f"model-{k}.safetensors", durability="none")
    nbytes = 8 * width * width * 4 + (1 << 16)
    pool = stio.ModelPool(device="cpu", device_bytes=3 * nbytes, host_bytes=6 * nbytes, max_hold_seconds=options.hold)
    async with pool:
        for k in range(options.models):
            pool.add(f"model-{k}", directory / f"model-{k}.safetensors")
        seen = await watch(pool, options.callers, options.seconds)
        stats = pool.stats()
    num_requests = sum(len(one.requests) for one in seen.values())
    title = (
        f"{options.models} models, room for 3: {num_requests:,} requests, {stats.num_hits:,} without a wait, "
        f"{stats.num_loads} loads"
    )
    return draw(seen, options.seconds, title)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path, metavar="PICTURE", help="an SVG file")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--mb", type=int, default=100, help="size of a model")
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--hold", type=float, default=0.2, help="max_hold_seconds")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        arguments.picture.write_text(asyncio.run(run(Path(name), arguments)))
    print(arguments.picture)
