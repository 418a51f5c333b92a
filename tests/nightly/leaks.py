"""Calls of stio a thousand times each: open files, threads, mappings, memory and objects stay the same.

python -m nightly.leaks DIRECTORY --cycles 1000 --seed 1 [--only NAME]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from nightly.footprint import excess, measure, settled, staging_directories
from torch import nn

import stio
from stio import sync

WARM_UP_CYCLES = 100
"""Before the first measurement: pools fill, caches of Python and torch too."""


def module(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        return nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))


class Calls:
    """The calls, each of them a cycle that ends where it began.

    Args:
        directory: An empty directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.module = module()
        self.sharded = directory / "sharded"
        self.file = directory / "model.safetensors"
        self.state = directory / "state.safetensors"
        sync.save(self.module, self.sharded, max_shard_size=60_000)
        sync.save(self.module, self.file)
        self.nested = {
            "step": 1,
            "lr": [0.1, 0.2],
            "moments": {k: torch.ones(100) for k in range(5)},
            "raw": b"x" * 200,
        }
        sync.save_state(self.nested, self.state)
        self.loop = asyncio.new_event_loop()
        self.saver = sync.Saver(keep_last=2)
        self.num_saved = 0

    def close(self) -> None:
        self.saver.close()
        self.loop.close()

    def load(self) -> None:
        sync.load(self.sharded, memory="copy")

    def load_mapped(self) -> None:
        sync.load(self.sharded, memory="map")

    def load_lazily(self) -> None:
        sync.load(self.file, memory="lazy")

    def load_async(self) -> None:
        self.loop.run_until_complete(stio.load(self.sharded))

    def stream(self) -> None:
        with sync.open(self.sharded) as checkpoint:
            for _, tensor in checkpoint.stream():
                tensor.sum()

    def stream_async(self) -> None:
        async def body() -> None:
            async with stio.open(self.sharded) as checkpoint:
                async for _, tensor in checkpoint.stream():
                    tensor.sum()

        self.loop.run_until_complete(body())

    def load_into(self) -> None:
        sync.load_into(self.module, self.sharded)

    def load_into_assign(self) -> None:
        sync.load_into(module("meta"), self.sharded, assign=True)

    def save(self) -> None:
        sync.save(self.module, self.directory / "saved", max_shard_size=60_000)

    def save_file(self) -> None:
        sync.save(self.module, self.directory / "saved.safetensors", hash="sha256")

    def save_async(self) -> None:
        self.loop.run_until_complete(stio.save(self.module, self.directory / "saved", max_shard_size=60_000))

    def saver_save(self) -> None:
        self.num_saved += 1
        self.saver.save(self.module, self.directory / f"step-{self.num_saved}").result()

    def saver_new(self) -> None:
        with sync.Saver() as saver:
            saver.save(self.module, self.directory / "saved")

    def warm_start(self) -> None:
        made = module("meta")
        with sync.warm_start(made, self.sharded) as warm:
            made(torch.ones(1, 64))
            warm.done()

    def save_state(self) -> None:
        sync.save_state(self.nested, self.directory / "saved-state.safetensors")

    def load_state(self) -> None:
        sync.load_state(self.state)

    def refused(self) -> None:
        """Calls that fail: their errors hold nothing."""
        for call in (
            lambda: sync.load(self.directory / "none"),
            lambda: sync.load_into(nn.Linear(2, 2), self.sharded),
            lambda: sync.save({"w": torch.ones(2), "v": object()}, self.directory / "refused"),
        ):
            try:
                call()
            except (stio.StioError, TypeError):
                continue
            raise AssertionError("not refused")


NAMES = [
    name for name, value in vars(Calls).items() if callable(value) and not name.startswith("_") and name != "close"
]


def run(call: Callable[[], Any], cycles: int) -> list[str]:
    """Make a call many times; return what grew."""
    for _ in range(min(WARM_UP_CYCLES, cycles)):
        call()
    first = measure()
    for _ in range(cycles):
        call()
    problems = excess(first, settled(first))
    if not problems:
        return []
    # What is allocated late, once, is no leak: a leak grows again.
    second = measure()
    for _ in range(cycles):
        call()
    return excess(second, settled(second))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--cycles", type=int, default=1000)
    parser.add_argument("--only", action="append", choices=NAMES)
    options = parser.parse_args()
    torch.set_num_threads(1)
    calls = Calls(options.directory)
    problems = []
    names = options.only or NAMES
    for name in names:
        start = time.perf_counter()
        found = run(getattr(calls, name), options.cycles)
        problems += [f"{name}: {problem}" for problem in found]
        print(f"{name}: {', '.join(found) or 'flat'}, {time.perf_counter() - start:.1f} s", flush=True)
    calls.close()
    left = staging_directories(options.directory)
    problems += [f"left: {path}" for path in left]
    print(*problems, sep="\n")
    print(f"{len(names)} calls, {options.cycles:,} cycles each, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
