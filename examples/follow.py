"""A trainer writes a checkpoint at each step, and two other processes keep their copies of the model at the newest one.

    python examples/follow.py run/ versions.svg

Most steps are written as deltas: the elements that changed since the step before. A follower applies what is new in
place, between two of its batches, and its module never holds a mixture of two steps. The picture shows which step each
process had at which time. The trainer is killed once, and goes on from the newest step.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing as mp
import signal
import time
from collections.abc import Sequence
from html import escape
from pathlib import Path

import torch
from torch import nn

import stio

NAMES = ("trainer", "follower 1", "follower 2")
BATCH_SECONDS = {"follower 1": 0.05, "follower 2": 0.4}
"""How long a follower computes between two looks for a newer version."""


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(4096, 256), nn.Linear(256, 256), nn.Linear(256, 4096)).bfloat16()


async def train(run: Path, log: Path, num_steps: int) -> None:
    model, done = build(), 0
    if (newest := stio.latest(run, default=None)) is not None:
        await stio.load_into(model, newest)
        done = int(Path(newest).name.removeprefix("step-"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-6)
    async with stio.Saver(keep_last=4, full_every=10) as saver:
        for step in range(done + 1, num_steps + 1):
            tokens = torch.randint(4096, (8, 32))
            loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            pending = await saver.save(model, run / f"step-{step}")
            result = await pending
            note(log, step, f"{result.kind}, {result.written_bytes:,} bytes")


async def answer(name: str, run: Path, log: Path, num_steps: int) -> None:
    model = build()
    async with stio.follow(model, run, poll_seconds=0.05) as updates:
        while True:
            version = await updates.wait(timeout=BATCH_SECONDS[name])
            if version is not None:
                version = await updates.apply()  # between two batches
                note(log, version.step, f"{version.kind}, {version.seconds * 1e3:.1f} ms")
                if version.step == num_steps:
                    return
            with torch.inference_mode():
                model(torch.randint(4096, (1, 32)))
            await asyncio.sleep(BATCH_SECONDS[name])


def note(log: Path, step: int, detail: str) -> None:
    with open(log, "a") as file:
        file.write(json.dumps([time.time(), step, detail]) + "\n")


def work(name: str, run: Path, log: Path, num_steps: int) -> None:
    torch.set_num_threads(1)
    asyncio.run(train(run, log, num_steps) if name == "trainer" else answer(name, run, log, num_steps))


def main(run: Path, picture: Path, num_steps: int) -> None:
    run.mkdir(parents=True, exist_ok=True)
    context = mp.get_context("spawn")
    logs = {name: picture.with_name(f"{name.replace(' ', '-')}.jsonl") for name in NAMES}
    processes = {name: context.Process(target=work, args=(name, run, logs[name], num_steps)) for name in NAMES}
    for log in logs.values():
        log.unlink(missing_ok=True)
    for process in processes.values():
        process.start()
    while len(noted(logs["trainer"])) < num_steps // 2:
        time.sleep(0.01)
    processes["trainer"].kill()
    processes["trainer"].join()
    again = context.Process(target=work, args=("trainer", run, logs["trainer"], num_steps))
    again.start()
    for process in [again, *processes.values()]:
        process.join()
        assert process.exitcode in (0, -signal.SIGKILL)
    found = {name: noted(log) for name, log in logs.items()}
    picture.write_text(draw(found))
    for name, rows in found.items():
        print(f"{name}: {len(rows)} versions, the last one is step {rows[-1][1]} ({rows[-1][2]})")


def noted(log: Path) -> list[tuple[float, int, str]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [tuple(json.loads(line)) for line in lines]


# The picture: the step that each process had, over time. It follows the light or dark colours of its viewer.

WIDTH, HEIGHT, LEFT, TOP = 760, 330, 60, 54
STYLE = """
.follow{font:13px system-ui,sans-serif}.follow text{fill:#1f2328}.follow .paper{fill:#fff}
.follow path{fill:none;stroke-width:2}.follow .l0{stroke:#59636e}.follow .l1{stroke:#1f6fb4}.follow .l2{stroke:#a8702a}
@media(prefers-color-scheme:dark){.follow text{fill:#e6edf3}.follow .paper{fill:#0d1117}
.follow .l0{stroke:#9198a1}.follow .l1{stroke:#4a9be0}.follow .l2{stroke:#d29c52}}
"""


def draw(found: dict[str, list[tuple[float, int, str]]]) -> str:
    """Return the picture as SVG."""
    begin = min(rows[0][0] for rows in found.values())
    end = max(rows[-1][0] for rows in found.values())
    last = max(rows[-1][1] for rows in found.values())

    def place(when: float, step: float) -> tuple[float, float]:
        x = LEFT + (when - begin) / (end - begin) * (WIDTH - LEFT - 20)
        return x, HEIGHT - 40 - step / last * (HEIGHT - TOP - 50)

    title = f"Steps over {end - begin:.1f} s: a trainer, killed once, and two followers"
    body = f'<text x="16" y="26" font-size="16">{escape(title)}</text>'
    for k, (name, rows) in enumerate(found.items()):
        body += f'<path class="l{k}" d="{stairs([place(when, step) for when, step, _ in rows])}"/>'
        body += f'<path class="l{k}" d="M{LEFT + 150 * k} 42h18"/><text x="{LEFT + 24 + 150 * k}" y="46">{name}</text>'
    for step in (0, last // 2, last):
        body += f'<text x="16" y="{place(begin, step)[1] + 4:.0f}">{step}</text>'
    body += f'<text x="{WIDTH - 130}" y="{HEIGHT - 14}">seconds, to {end - begin:.1f}</text>'
    return (
        f'<svg class="follow" xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}"><style>{STYLE}</style>'
        f'<rect class="paper" width="{WIDTH}" height="{HEIGHT}"/>{body}</svg>\n'
    )


def stairs(points: Sequence[tuple[float, float]]) -> str:
    (x, y), *others = points
    return f"M{x:.1f} {y:.1f}" + "".join(f"H{x:.1f}V{y:.1f}" for x, y in others)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the steps")
    parser.add_argument("picture", type=Path, help="where the picture is written")
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    main(given.run, given.picture, given.steps)
