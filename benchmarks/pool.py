"""Measure requests to more models than fit on a device: `python -m benchmarks.pool`.

    python -m benchmarks.pool                           # stio.ModelPool and two usual ways, on the simulated device
    python -m benchmarks.pool --ways pool --requests 1000
    python -m benchmarks.pool --report FILE             # the tables again, from the raw figures of --out

All ways answer the same requests: each of 32 callers takes the next one when it has its answer. The models are drawn by
a Zipf distribution. Some callers leave before they have an answer. In the second fifth of the requests the file of one
model is damaged; in the middle the weights of another one are replaced. An answer compares one element of each of eight
tensors with the value that all elements of that model have, on the device.

The ways have room for the same number of models on the device. `pool` has host memory for six of the eight. `to` keeps
all of them in host memory, as modules, and moves them by `module.to(device)` and `module.to("cpu")`. `load_file` reads
the file with safetensors each time. Both evict the least recently used model, and change models under one lock, as a
server does that has no pool.

The way `swap` measures swaps in a pool that is not busy, in turn with loads by `stio.load` from a `HostCache`.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks import machine

ROOT = Path(__file__).resolve().parent.parent
WAYS = ("pool", "to", "load_file")
NUM_TENSORS = 32
CHECKED = 8
"""Tensors of which an answer reads an element."""
STAGING_BYTES = 96 << 20
"""Host memory of loads to a device, beside the models."""
LEAVE_SECONDS = (0.002, 0.1)
MAX_SECONDS = 900

Record = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """What all ways have to do."""

    directory: Path
    num_models: int
    model_bytes: int
    num_on_device: int
    num_in_memory: int
    num_requests: int
    num_callers: int
    leaving: float
    """Share of the callers that leave early."""
    hold_seconds: float
    device: str

    def path(self, k: int) -> Path:
        """Return the file of a model."""
        return self.directory / f"m{k}.safetensors"

    @property
    def width(self) -> int:
        """Rows and columns of each tensor."""
        return int((self.model_bytes / NUM_TENSORS / 2) ** 0.5) // 8 * 8

    @property
    def device_bytes(self) -> int:
        """Room for the models on the device."""
        return self.num_on_device * (NUM_TENSORS * self.width**2 * 2 + (1 << 20))

    @property
    def host_bytes(self) -> int:
        """Room for the files in host memory."""
        return self.num_in_memory * (NUM_TENSORS * self.width**2 * 2 + (1 << 20)) + STAGING_BYTES

    def requests(self) -> list[tuple[int, float | None]]:
        """Return the model of each request, and after how many seconds its caller leaves."""
        rng = random.Random(0)
        models = rng.choices(range(self.num_models), [1 / (k + 1) for k in range(self.num_models)], k=self.num_requests)
        return [(k, rng.uniform(*LEAVE_SECONDS) if rng.random() < self.leaving else None) for k in models]


def write(work: Work, k: int, value: float) -> None:
    """Write a model whose elements have one value; the old file is replaced."""
    import torch
    from safetensors.torch import save_file

    tensors = {f"t{n}": torch.full((work.width, work.width), value, dtype=torch.bfloat16) for n in range(NUM_TENSORS)}
    new = work.path(k).with_suffix(".new")
    save_file(tensors, new)
    new.replace(work.path(k))


# The ways.


class Pool:
    """`stio.ModelPool`."""

    def __init__(self, work: Work) -> None:
        import stio

        self._trace = stio.Trace()
        self._pool = stio.ModelPool(
            device=work.device,
            device_bytes=work.device_bytes,
            host_bytes=work.host_bytes,
            max_hold_seconds=work.hold_seconds,
            trace=self._trace,
        )
        for k in range(work.num_models):
            self._pool.add(str(k), work.path(k))

    async def __aenter__(self) -> Pool:
        await self._pool.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._pool.__aexit__(*error)

    def use(self, k: int) -> Any:
        """Return a context in which a model is on the device."""
        return self._pool.use(str(k))

    async def update(self, k: int, path: Path) -> None:
        """Replace the weights of a model."""
        await self._pool.update(str(k), path)

    def host_bytes(self) -> int:
        """Return the host memory that files occupy."""
        return self._pool.stats().host_bytes

    def record(self) -> Record:
        """Return its own counters."""
        stats = self._pool.stats()
        return {
            "loads": stats.num_loads,
            "hits": stats.num_hits,
            "load_seconds": stats.load_seconds,
            "longest_load": max(span.end - span.start for span in self._trace.spans if span.name == "swap"),
            "evict_seconds": sum(span.end - span.start for span in self._trace.spans if span.name == "evict"),
            "peak_device_bytes": stats.peak_device_bytes,
        }


class Usual:
    """A dictionary of models on the device, of which the least recently used one is evicted, and one lock."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._device: OrderedDict[int, Any] = OrderedDict()
        self._users = dict.fromkeys(range(work.num_models), 0)
        self._lock = asyncio.Lock()
        self._idle = asyncio.Condition()
        self.loads: list[float] = []

    async def __aenter__(self) -> Any:
        await asyncio.to_thread(self.prepare)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._device.clear()

    def prepare(self) -> None:
        """Do what is done before requests come."""

    def load(self, k: int) -> Any:
        """Return the tensors of a model on the device."""
        raise NotImplementedError

    def evict(self, k: int, model: Any) -> None:
        """Move a model off the device."""

    def tensors(self, model: Any) -> dict[str, Any]:
        """Return the tensors by name."""
        raise NotImplementedError

    async def _bring(self, k: int) -> None:
        if len(self._device) == self._work.num_on_device:
            async with self._idle:
                await self._idle.wait_for(lambda: not all(self._users[one] for one in self._device))
            old = next(one for one in self._device if not self._users[one])
            await asyncio.to_thread(self.evict, old, self._device.pop(old))
        began = time.perf_counter()
        self._device[k] = await asyncio.to_thread(self.load, k)
        self.loads.append(time.perf_counter() - began)

    @asynccontextmanager
    async def use(self, k: int) -> AsyncIterator[Any]:
        """Return a context in which a model is on the device."""
        async with self._lock:
            if k not in self._device:
                change = asyncio.ensure_future(self._bring(k))
                try:
                    await asyncio.shield(change)
                except asyncio.CancelledError:
                    await asyncio.wait([change])  # no thread of it goes on
                    raise
            self._device.move_to_end(k)
            self._users[k] += 1
        try:
            yield self.tensors(self._device[k])
        finally:
            self._users[k] -= 1
            async with self._idle:
                self._idle.notify_all()

    async def update(self, k: int, path: Path) -> None:
        """Replace the weights of a model."""
        async with self._lock:
            async with self._idle:
                await self._idle.wait_for(lambda: not self._users[k])
            self._device.pop(k, None)
            await asyncio.to_thread(self.forget, k)

    def forget(self, k: int) -> None:
        """Drop old weights."""

    def host_bytes(self) -> int:
        """Return the host memory that files occupy."""
        return 0

    def record(self) -> Record:
        """Return its own counters."""
        return {"loads": len(self.loads), "load_seconds": sum(self.loads), "longest_load": max(self.loads)}


class To(Usual):
    """`module.to(device)` and `module.to("cpu")`."""

    def prepare(self) -> None:
        self._modules = {k: self._read(k) for k in range(self._work.num_models)}

    def _read(self, k: int) -> Any:
        import torch
        from safetensors.torch import load_file

        module = torch.nn.Module()
        for name, tensor in load_file(self._work.path(k)).items():
            module.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
        return module

    def load(self, k: int) -> Any:
        return self._modules[k].to(self._work.device)

    def evict(self, k: int, model: Any) -> None:
        model.to("cpu")

    def tensors(self, model: Any) -> dict[str, Any]:
        return dict(model.named_parameters())

    def forget(self, k: int) -> None:
        self._modules[k] = self._read(k)


class LoadFile(Usual):
    """safetensors, each time."""

    def load(self, k: int) -> Any:
        from safetensors.torch import load_file

        return {name: tensor.to(self._work.device) for name, tensor in load_file(self._work.path(k)).items()}

    def tensors(self, model: Any) -> dict[str, Any]:
        return model  # type: ignore[no-any-return]


# What is measured.


@contextmanager
def sampled(read: dict[str, Any]) -> Iterator[dict[str, int]]:
    """Return a context that keeps the largest of what functions return, every few milliseconds."""
    most = dict.fromkeys(read, 0)
    stop = threading.Event()

    def sample() -> None:
        while not stop.wait(0.005):
            for name, function in read.items():
                most[name] = max(most[name], function())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield most
    finally:
        stop.set()
        thread.join()


async def serve(work: Work, way: Any) -> Record:
    """Answer all requests; return the waits, and whether each answer was right."""
    rng = random.Random(1)
    todo = iter(enumerate(work.requests()))
    allowed = {k: {float(k + 1)} for k in range(work.num_models)}
    found: Record = {"waits": [], "wrong": 0, "left": 0, "failed": 0}
    damaged, renewed = min(6, work.num_models - 1), 1
    whole = work.path(damaged).with_suffix(".whole")

    def begin_damage() -> None:
        if isinstance(way, To):
            return  # it reads no file
        work.path(damaged).rename(whole)
        work.path(damaged).write_bytes(whole.read_bytes()[: 1 << 20])

    def end_damage() -> None:
        if whole.exists():
            whole.replace(work.path(damaged))

    async def renew() -> None:
        new = float(work.num_models + 1)
        allowed[renewed].add(new)
        await asyncio.to_thread(write, work, renewed, new)
        await way.update(renewed, work.path(renewed))
        allowed[renewed] = {new}

    events = {work.num_requests // 5: begin_damage, 2 * work.num_requests // 5: end_damage}
    others: list[asyncio.Task[None]] = []

    async def answer(k: int, began: float) -> None:
        async with way.use(k) as tensors:
            values = {
                float(tensors[f"t{n}"][rng.randrange(work.width), rng.randrange(work.width)])
                for n in rng.sample(range(NUM_TENSORS), CHECKED)
            }
            found["waits"].append(time.perf_counter() - began)
            found["wrong"] += len(values) != 1 or not values <= allowed[k]
            await asyncio.sleep(0)
            del tensors

    async def call() -> None:
        for number, (k, leaves_after) in todo:
            if number in events:
                await asyncio.to_thread(events.pop(number))
            if number == work.num_requests // 2:
                others.append(asyncio.ensure_future(renew()))
            began = time.perf_counter()
            try:
                async with asyncio.timeout(leaves_after):
                    await answer(k, began)
            except TimeoutError:
                found["left"] += 1
            except Exception as error:  # of the damaged model
                found["failed"] += 1
                if k != damaged:
                    raise RuntimeError(f"model {k} failed") from error

    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(work.num_callers)))
    found["seconds"] = time.perf_counter() - began
    await asyncio.gather(*others)
    end_damage()
    return found


def run(work: Work, name: str) -> Record:
    """Run one way in this process; return its figures."""
    module = _module_of(work)
    base = module.memory_allocated() if module else 0
    if module:
        module.reset_peak_memory_stats()
    way_of = {"pool": Pool, "to": To, "load_file": LoadFile}[name]

    async def body() -> Record:
        async with way_of(work) as way:
            gc.collect()
            reads: dict[str, Any] = {"host_bytes": way.host_bytes}
            if work.device == "sim":
                import simdevice

                reads["pinned_bytes"] = simdevice.pinned_bytes
            with sampled(reads) as most:
                found = await serve(work, way)
            found |= {f"max_{key}": value for key, value in most.items()} | way.record()
            found["max_device_bytes"] = module.max_memory_allocated() - base if module else 0
            return found

    found = asyncio.run(body())
    waits = sorted(found.pop("waits"))
    found |= {
        "way": name,
        "answers": len(waits),
        "answers_per_second": len(waits) / found["seconds"],
        "p50": waits[len(waits) // 2],
        "p99": waits[int(len(waits) * 0.99)],
        "longest_wait": waits[-1],
        "device_bytes": work.device_bytes,
        "host_bytes": work.host_bytes,
    }
    return found


def _module_of(work: Work) -> Any:
    """Return torch's module of the device, which is ready for use; None for the CPU."""
    if work.device == "sim":
        sys.path.insert(0, str(ROOT / "tests"))
        import simdevice

        simdevice.install()
        simdevice.set_fills(False)
        simdevice.set_released(0)
    import torch

    return None if work.device == "cpu" else torch.get_device_module(work.device)


def swaps(work: Work, rounds: int) -> Record:
    """Measure a swap from host memory, and a load of the same bytes from a `HostCache` by `stio.load`, in turn."""
    _module_of(work)
    import stio

    async def body() -> Record:
        seconds: dict[str, list[float]] = {"swap": [], "load": []}
        pool = stio.ModelPool(
            device=work.device,
            device_bytes=work.device_bytes // work.num_on_device,
            host_bytes=work.host_bytes,
        )
        async with pool, stio.HostCache(work.host_bytes) as cache:
            for k in range(2):
                pool.add(str(k), work.path(k))
                await pool.prefetch(str(k))
                await cache.prefetch(work.path(k))
            for n in range(rounds + 2):  # the first ones start threads and pin memory
                began = time.perf_counter()
                async with pool.use(str(n % 2)):
                    swap = time.perf_counter() - began
                began = time.perf_counter()
                tensors = await stio.load(work.path(n % 2), device=work.device, cache=cache)
                load = time.perf_counter() - began
                del tensors
                if n >= 2:
                    seconds["swap"].append(swap)
                    seconds["load"].append(load)
        ratios = [load / swap for swap, load in zip(seconds["swap"], seconds["load"], strict=True)]
        return {
            "way": "swap",
            **{f"{name}_seconds": median(values) for name, values in seconds.items()},
            "ratio": median(ratios),
            "min_ratio": min(ratios),
            "max_ratio": max(ratios),
        }

    return asyncio.run(body())


# The parent.


def table(records: list[Record]) -> str:
    """Return the tables as Markdown."""
    lines = [
        "| way | answers/s | p50 of the wait | p99 | longest | loads | longest load | p99 / longest load | wrong "
        "| on the device, of its bound |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for one in records:
        if one["way"] in WAYS:
            longest = one.get("longest_load", 0.0)
            lines.append(
                f"| {one['way']} | {one['answers_per_second']:,.0f} | {one['p50'] * 1e3:,.1f} ms | {one['p99']:.2f} s "
                f"| {one['longest_wait']:.2f} s | {one['loads']:,} | {longest:.2f} s "
                f"| {one['p99'] / longest if longest else 0:.2f} | {one['wrong']} "
                f"| {one['max_device_bytes'] / one['device_bytes']:.3f} |"
            )
    for one in records:
        if one["way"] == "swap":
            lines.append("")
            lines.append(
                f"Swap from host memory {one['swap_seconds']:.3f} s, load from a `HostCache` "
                f"{one['load_seconds']:.3f} s: {one['ratio']:.2f} ({one['min_ratio']:.2f} to {one['max_ratio']:.2f})"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", nargs="+", default=[*WAYS, "swap"], choices=[*WAYS, "swap"])
    parser.add_argument("--dir", type=Path, help="where the models are written")
    parser.add_argument("--device", default="sim", help="sim, cpu, or torch's name of one")
    parser.add_argument("--models", type=int, default=8)
    parser.add_argument("--mb", type=int, default=300, help="size of a model")
    parser.add_argument("--on-device", type=int, default=3, help="models that fit on the device")
    parser.add_argument("--in-memory", type=int, default=6, help="models that fit into host memory")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--callers", type=int, default=32)
    parser.add_argument("--leaving", type=float, default=0.05, help="share of callers that leave early")
    parser.add_argument("--hold", type=float, default=0.2, help="max_hold_seconds")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--out", type=Path, help="raw figures, one JSON line each")
    parser.add_argument("--report", type=Path, help="print the tables of such a file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.report:
        print(table([json.loads(line) for line in options.report.read_text().splitlines()]))
        return 0
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        work = Work(
            Path(directory) if options.child is None else options.dir,
            options.models,
            options.mb * 10**6,
            options.on_device,
            options.in_memory,
            options.requests,
            options.callers,
            options.leaving,
            options.hold,
            options.device,
        )
        if options.child is not None:
            print(json.dumps(swaps(work, options.swaps) if options.child == "swap" else run(work, options.child)))
            return 0
        records = [{"way": "machine", **machine.describe(), "load_average": os.getloadavg()}]
        for way in options.ways:
            for k in range(work.num_models):
                write(work, k, float(k + 1))
            done = subprocess.run(
                [sys.executable, "-m", "benchmarks.pool", *sys.argv[1:], "--dir", directory, "--child", way],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                timeout=MAX_SECONDS,
            )
            if done.returncode:
                return done.returncode
            records.append({"load_average": os.getloadavg(), **json.loads(done.stdout.splitlines()[-1])})
            print(table(records[-1:]), flush=True)
            if options.out:
                options.out.write_text("".join(json.dumps(one) + "\n" for one in records))
        print(table(records))
    return 0


if __name__ == "__main__":
    with suppress(BrokenPipeError):
        sys.exit(main())
