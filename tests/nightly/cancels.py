"""Loads and saves that are cancelled at random times, on one event loop.

    python -m nightly.cancels LOOP DIRECTORY --count 2000 --seed 1 --keep DIRECTORY [--only NAME]

After each cancelled call: no file of it is open, its threads end, no staging directory is left, and a destination holds
the whole old or the whole new checkpoint. A call that was not reached by its cancel must have done its work. Regularly
memory, mappings and objects are compared with the begin.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import torch
from crash.generations import HASHED, MANY, ONE, Torn, leftovers, look, tensors_of
from nightly.footprint import Footprint, excess, measure, settled
from support import descriptors, eventually, num_threads
from torch import nn

import stio

LOOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "asyncio": ("asyncio", {"use_uvloop": False}),
    "uvloop": ("asyncio", {"use_uvloop": True}),
    "trio": ("trio", {}),
}
WARM_UP = 200
"""Calls before the first measurement of memory."""
LONGEST_SECONDS = 1.5
"""In which a cancel must be heard. Promised is one second; the rest is room for a busy machine."""


class Layers(nn.Module):
    """A module with the names of `tensors_of`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layer = nn.ParameterList(
            nn.Parameter(torch.zeros(len(tensor), dtype=tensor.dtype, device=device), requires_grad=False)
            for tensor in tensors_of(1).values()
        )

    def forward(self) -> int:
        return sum(int(parameter[0]) for parameter in self.layer)


class Calls:
    """What is cancelled: each method makes one call.

    Args:
        directory: An empty directory.
        numbers: Source of random choices.
    """

    def __init__(self, directory: Path, numbers: random.Random) -> None:
        self.directory, self.numbers = directory, numbers
        self.source = directory / "source"
        self.module = Layers("cpu")
        self.generation = 1
        self.destinations = [directory / "one" / "model", directory / "two" / "model.safetensors"]

    async def prepare(self) -> None:
        """Save what is loaded, and what is saved over."""
        await stio.save(tensors_of(7), self.source, **HASHED)
        await stio.save_state({"tensors": tensors_of(7), "step": 3}, self.directory / "state.safetensors")
        for destination in self.destinations:
            destination.parent.mkdir()
            await stio.save(tensors_of(1), destination)

    async def load(self) -> None:
        keywords: Any = {"memory": self.numbers.choice(["map", "copy", "lazy"]), "verify": self.numbers.random() < 0.3}
        tensors = await stio.load(self.source, **keywords)
        assert all(bool((tensor == 7).all()) for tensor in tensors.values())

    async def load_into(self) -> None:
        await stio.load_into(self.module, self.source, budget_bytes=self.numbers.choice([None, 30_000]))

    async def stream(self) -> None:
        async with stio.open(self.source, budget_bytes=self.numbers.choice([None, 30_000])) as checkpoint:
            async for _, tensor in checkpoint.stream():
                assert int(tensor[-1]) == 7
                if self.numbers.random() < 0.1:
                    break

    async def read(self) -> None:
        async with stio.open(self.source) as checkpoint:
            for name in list(checkpoint.keys()):
                await checkpoint.read(name)

    async def load_state(self) -> None:
        state = await stio.load_state(self.directory / "state.safetensors")
        assert state["step"] == 3

    async def warm_start(self) -> None:
        module = Layers("meta")
        async with stio.warm_start(module, self.source) as warm:
            await warm.done()

    async def save(self) -> None:
        await self._saving(lambda tensors, where, keywords: stio.save(tensors, where, **keywords))

    async def save_with_budget(self) -> None:
        await self._saving(lambda tensors, where, keywords: stio.save(tensors, where, budget_bytes=30_000, **keywords))

    async def saver(self) -> None:
        async def body(tensors: Any, where: Path, keywords: Any) -> None:
            async with stio.Saver() as saver:
                pending = await saver.save(tensors, where, **keywords)
                if self.numbers.random() < 0.5:
                    await pending

        await self._saving(body)

    async def save_state(self) -> None:
        await stio.save_state({"tensors": tensors_of(2), "step": [1]}, self.directory / "one" / "state.safetensors")

    async def _saving(self, body: Callable[[Any, Path, Any], Awaitable[object]]) -> None:
        where = self.numbers.choice(self.destinations)
        old = look(where)
        self.generation += 1
        keywords = self.numbers.choice([MANY, ONE, {"hash": "sha256"}])
        if where.suffix:
            keywords = {key: value for key, value in keywords.items() if key != "max_shard_size"}
        returned = False
        try:
            await body(tensors_of(self.generation), where, keywords)
            returned = True
        finally:
            found = look(where)
            if found != self.generation and (returned or found != old):
                raise Torn(f"{found} stands at {where.name}, {old} was the old checkpoint, returned: {returned}")
            if left := leftovers(where):
                raise Torn(f"left: {left}")


NAMES = [name for name in vars(Calls) if not name.startswith("_") and name != "prepare"]


async def cancelled_by_scope(call: Callable[[], Awaitable[None]], seconds: float) -> tuple[bool, float]:
    """Make a call in a scope that is cancelled; return whether it was, and how long that took."""
    with anyio.move_on_after(seconds) as scope:
        await call()
    return scope.cancelled_caught, max(0.0, anyio.current_time() - scope.deadline)


async def cancelled_as_task(call: Callable[[], Any], seconds: float) -> tuple[bool, float]:
    """Make a call in a task that is cancelled once, as asyncio does it."""
    task = asyncio.ensure_future(call())
    await asyncio.wait([task], timeout=seconds)
    begun = time.monotonic()
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    return task.cancelled(), time.monotonic() - begun


class Cancelling:
    """Cancels calls, and looks at what is left.

    Args:
        loop: Name of the event loop.
        directory: An empty directory.
        seed: Of all random choices.
        names: What to call.
    """

    def __init__(self, loop: str, directory: Path, seed: int, names: list[str]) -> None:
        self.loop, self.names = loop, names
        self.numbers = random.Random(seed)
        self.calls = Calls(directory, self.numbers)
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.slowest = 0.0

    async def run(self, count: int) -> None:
        """Cancel so many calls."""
        await self.calls.prepare()
        usual = {name: await self._usual_seconds(name) for name in self.names}
        first: Footprint | None = None
        for k in range(count):
            if k == min(WARM_UP, count // 2):
                first = measure()
            name = self.numbers.choice(self.names)
            try:
                await self._one(name, usual[name])
            except Exception as error:  # noqa: BLE001 - everything is a finding
                self.problems.append(f"call {k}, {name}: {type(error).__name__}: {error}")
                if len(self.problems) >= 20:
                    break
        if first is not None:
            self.problems += [f"after {count} calls: {problem}" for problem in excess(first, settled(first))]

    async def _usual_seconds(self, name: str) -> float:
        seconds = []
        for _ in range(5):
            begun = time.perf_counter()
            await getattr(self.calls, name)()
            seconds.append(time.perf_counter() - begun)
        return statistics.median(seconds)

    async def _one(self, name: str, usual_seconds: float) -> None:
        call = getattr(self.calls, name)
        files, threads = descriptors(), num_threads()
        # Early moments come more often than late ones: the first steps of a call are the shortest.
        seconds = usual_seconds * 1.3 * self.numbers.random() ** 1.5
        as_task = self.loop != "trio" and self.numbers.random() < 0.5
        cancelled, took = await (cancelled_as_task if as_task else cancelled_by_scope)(call, seconds)
        self.counts[f"{name} {'cancelled' if cancelled else 'done'}"] += 1
        self.slowest = max(self.slowest, took if cancelled else 0.0)
        if cancelled and took > LONGEST_SECONDS:
            raise AssertionError(f"a cancel took {took:.2f} s")
        if (after := descriptors()) != files:
            raise AssertionError(f"files are open: {sorted(set(after) - set(files))}")
        if num_threads() > threads and not eventually(lambda: num_threads() <= threads):
            raise AssertionError(f"{num_threads()} threads, were {threads}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loop", choices=LOOPS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", action="append", choices=NAMES)
    parser.add_argument("--keep", type=Path, help="where the directory is copied if anything is found")
    options = parser.parse_args()
    torch.set_num_threads(1)
    backend, backend_options = LOOPS[options.loop]
    cancelling = Cancelling(options.loop, options.directory, options.seed, options.only or NAMES)
    anyio.run(cancelling.run, options.count, backend=backend, backend_options=backend_options)
    if cancelling.problems and options.keep:
        shutil.copytree(options.directory, options.keep / "directory", dirs_exist_ok=True)
    for name, number in sorted(cancelling.counts.items()):
        print(f"{number:8,d} {name}")
    print(*(problem[:500] for problem in cancelling.problems), sep="\n")
    num_cancelled = sum(number for name, number in cancelling.counts.items() if name.endswith("cancelled"))
    print(
        f"{options.loop}: {sum(cancelling.counts.values()):,} calls, {num_cancelled:,} cancelled, the slowest cancel took "
        f"{cancelling.slowest * 1000:.0f} ms, {len(cancelling.problems)} problems"
    )
    return 1 if cancelling.problems else 0


if __name__ == "__main__":
    sys.exit(main())
