"""One run of one contestant on the device, in a process of its own: `python -m benchmarks.gpu_child SPEC`, as JSON.

Imports are done and the device's context is made before the clock starts; it stops when the device has done all that
was asked of it. The last line of the output is the run's record.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import files, gpu_device, gpu_saves, meters, pagecache
from benchmarks.child import answer
from benchmarks.contestants import import_stio
from benchmarks.gpu_contestants import CONTESTANTS, AsyncLoad, bytes_of, shards_of
from benchmarks.gpu_decoder import make_decoder

_NUM_TOKENS = 512

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GpuSpec:
    """What one process has to do."""

    contestant: str
    """A key of `gpu_contestants.CONTESTANTS`, `gpu_saves.SAVERS` or `FORWARDS`."""

    directory: str
    """The checkpoint; where saves go, for a save."""

    size_bytes: int
    """Size of the model."""

    task: str = "load"
    """load, again (two loads, the first one dropped: the second counts), forward or save."""

    busy: bool = False
    """Beside a busy pure-Python thread."""

    state: str = "warm"
    """cold, warm, or empty: left as it is."""

    verify: bool = False
    """Read every byte back after the clock has stopped."""

    prime_bytes: int = 0
    """Memory to touch and free before."""

    timeline: str = ""
    """Where to draw the spans of the load, stio's only."""

    def encode(self) -> str:
        """Give the spec as the argument of this module."""
        return json.dumps(asdict(self))


def run(spec: GpuSpec) -> Record:
    """Do one run."""
    gpu_device.prepare()
    record: Record = {"prime_seconds": meters.prime_memory(min(spec.prime_bytes, meters.available_bytes() // 2))}
    asyncio.run(_TASKS[spec.task](spec, record))
    record["device_peak_bytes"] = gpu_device.peak_memory()
    return record


async def _load(spec: GpuSpec, record: Record) -> None:
    """Load once: `seconds`; twice, with `first_seconds`, where the task is "again"."""
    trace = import_stio().Trace() if spec.timeline else None
    call = _prepared(spec, {} if trace is None else {"trace": trace})
    directory = Path(spec.directory)
    tensors: dict[str, Any] = {}
    for turn in ("first_seconds", "seconds") if spec.task == "again" else ("seconds",):
        tensors.clear()
        gc.collect()
        _set_state(spec)
        with meters.busy_thread(spec.busy):
            started = time.perf_counter()
            tensors = await call(directory)
            gpu_device.synchronize()
            record[turn] = time.perf_counter() - started
    if trace is not None:
        trace.save_svg(spec.timeline, title=f"stio.load, {record['seconds']:.2f} s")
    if spec.verify and tensors:
        record["checksum"] = _checksum(tensors)


async def _forward(spec: GpuSpec, record: Record) -> None:
    """Take the time from the start to the end of a first forward: `seconds`; `load_seconds` to the last tensor."""
    layout = files.llama_layout(spec.size_bytes)
    module = make_decoder(layout).requires_grad_(False)
    tokens = torch.randint(0, module.lm_head.out_features, (1, _NUM_TOKENS), device=gpu_device.device())
    with ThreadPoolExecutor(1) as thread:  # cuBLAS has a handle for each thread: all forwards run on this one
        asyncio.get_running_loop().set_default_executor(thread)
        await asyncio.to_thread(_warm_up_kernels, layout, tokens)
        gpu_device.forget_peak()
        await _timed_forward(spec, module, tokens, record)


async def _timed_forward(spec: GpuSpec, module: Any, tokens: torch.Tensor, record: Record) -> None:
    forward = FORWARDS[spec.contestant]
    _set_state(spec)
    gc.collect()
    await forward(module, Path(spec.directory), tokens, record)
    if spec.verify:
        record["checksum"] = _checksum(dict(module.state_dict()))


async def _warm_start(module: Any, directory: Path, tokens: torch.Tensor, record: Record) -> None:
    stio = import_stio()
    started = time.perf_counter()
    async with stio.warm_start(module, directory, device=gpu_device.device()) as warm:
        await asyncio.to_thread(_forward_once, module, tokens)
        record["seconds"] = time.perf_counter() - started
        await warm.done()
        gpu_device.synchronize()
        record["load_seconds"] = time.perf_counter() - started


async def _load_then_forward(module: Any, directory: Path, tokens: torch.Tensor, record: Record) -> None:
    stio = import_stio()
    started = time.perf_counter()
    await stio.load_into(module, directory, device=gpu_device.device(), assign=True)
    gpu_device.synchronize()
    record["load_seconds"] = time.perf_counter() - started
    await asyncio.to_thread(_forward_once, module, tokens)
    record["seconds"] = time.perf_counter() - started


async def _safetensors_then_forward(module: Any, directory: Path, tokens: torch.Tensor, record: Record) -> None:
    from safetensors.torch import load_file

    started = time.perf_counter()
    tensors: dict[str, Any] = {}
    for path in shards_of(directory):
        tensors |= load_file(path, device=str(gpu_device.device()))
    module.load_state_dict(tensors, assign=True)
    gpu_device.synchronize()
    record["load_seconds"] = time.perf_counter() - started
    await asyncio.to_thread(_forward_once, module, tokens)
    record["seconds"] = time.perf_counter() - started


FORWARDS: dict[str, Callable[[Any, Path, torch.Tensor, Record], Awaitable[None]]] = {
    "stio-warm": _warm_start,
    "stio-then": _load_then_forward,
    "safetensors-then": _safetensors_then_forward,
}
FORWARD_LABELS = {
    "stio-warm": "stio.warm_start, forward at once",
    "stio-then": "stio.load_into(assign=True), then forward",
    "safetensors-then": "safetensors, load_state_dict(assign=True), then forward",
}


def _forward_once(module: Any, tokens: torch.Tensor) -> None:
    with torch.inference_mode():
        module(tokens)
    gpu_device.synchronize()


def _warm_up_kernels(layout: files.Layout, tokens: torch.Tensor) -> None:
    """Run the model with one layer once: loading kernels and cuBLAS takes its time, and is nobody's fault here."""
    short = [tensor for tensor in layout.tensors if ".layers." not in tensor.name or ".layers.0." in tensor.name]
    _forward_once(make_decoder(files.Layout(layout.label, tuple(short))).to_empty(device=tokens.device), tokens)


async def _save(spec: GpuSpec, record: Record) -> None:
    record |= await gpu_saves.measure(spec.contestant, Path(spec.directory), spec.size_bytes, verify=spec.verify)


def _prepared(spec: GpuSpec, keywords: dict[str, Any]) -> AsyncLoad:
    contestant = CONTESTANTS[spec.contestant]
    if contestant.prepare_async is not None:
        return contestant.prepare_async(keywords)
    assert contestant.prepare is not None
    blocking = contestant.prepare()

    async def call(directory: Path) -> dict[str, Any]:
        return blocking(directory)

    return call


def _set_state(spec: GpuSpec) -> None:
    for path in shards_of(Path(spec.directory)):
        if spec.state == "cold":
            pagecache.evict(path)
        elif spec.state == "warm" and pagecache.resident_fraction(path) < 1.0:
            pagecache.fill_by_reads(path)


def _checksum(tensors: dict[str, Any]) -> int:
    value = 1
    for name in sorted(tensors):
        value = zlib.adler32(bytes_of(tensors[name]).data, value)
    return value


_TASKS = {"load": _load, "again": _load, "forward": _forward, "save": _save}

if __name__ == "__main__":
    answer(run, GpuSpec)
