"""Saves of tensors that are on the device: for how long may they not be changed?

Each contestant saves three times in a process. The clock runs from the call until a change in place, queued on the
training stream as soon as the contestant allows it, has been made; the median of the later saves counts, since the
first one makes pinned memory.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks import files, gpu_device, gpu_limits, meters
from benchmarks.contestants import import_stio
from benchmarks.gpu_contestants import bytes_of

REPEATS = 3

Tensors = dict[str, Any]
Finish = Callable[[], Awaitable[None]]
Begin = Callable[[Path], Awaitable[Finish]]
"""Returns when the tensors may change; what it gives waits until the save is done."""


@asynccontextmanager
async def _stio(tensors: Tensors) -> AsyncIterator[Begin]:
    async with import_stio().Saver() as saver:

        async def begin(path: Path) -> Finish:
            pending = await saver.save(tensors, path)

            async def finish() -> None:
                await pending

            return finish

        yield begin


@asynccontextmanager
async def _dcp(tensors: Tensors) -> AsyncIterator[Begin]:
    """DCP's own way for a GPU: pinned memory that is kept, copied to without blocking, on a thread of the stager's."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    pinned = gpu_device.is_pinned()
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=pinned, use_shared_memory=False, use_async_staging=True, use_non_blocking_copy=pinned
        )
    )

    async def begin(path: Path) -> Finish:
        writer = dcp.FileSystemWriter(str(path))
        response = dcp.async_save(tensors, storage_writer=writer, async_stager=stager, no_dist=True)
        await asyncio.to_thread(response.staging_completion.result)

        async def finish() -> None:
            await asyncio.to_thread(response.upload_completion.result)

        return finish

    yield begin


@asynccontextmanager
async def _bus(tensors: Tensors) -> AsyncIterator[Begin]:
    copy = gpu_limits.prepare_bus(to_device=False)
    total_bytes = sum(tensor.nbytes for tensor in tensors.values())

    async def nothing() -> None:
        """There is nothing to wait for."""

    async def begin(path: Path) -> Finish:
        copy(total_bytes)
        return nothing

    yield begin


SAVERS: dict[str, Callable[[Tensors], AbstractAsyncContextManager[Begin]]] = {
    "stio-saver": _stio,
    "dcp": _dcp,
    "raw-d2h": _bus,
}
SAVER_LABELS = {
    "stio-saver": "stio.Saver",
    "dcp": "DCP async_save, DefaultStager, pinned memory",
    "raw-d2h": "limit: device to pinned memory, 64 MiB a copy",
}


async def measure(contestant: str, directory: Path, size_bytes: int, *, verify: bool) -> dict[str, Any]:
    """Save `REPEATS` times; give `first_seconds`, `seconds` until they had changed, `done_seconds` to the end."""
    tensors = make_tensors(size_bytes)
    blocked, done = [], []
    directory.mkdir(parents=True, exist_ok=True)
    async with SAVERS[contestant](tensors) as begin:
        for number in range(REPEATS):
            last = verify and number == REPEATS - 1 and contestant == "stio-saver"
            before = {name: bytes_of(tensor).copy() for name, tensor in tensors.items()} if last else {}
            path = directory / f"save-{number}"
            gpu_device.synchronize()
            started = time.perf_counter()
            finish = await begin(path)
            torch._foreach_neg_(list(tensors.values()))
            gpu_device.synchronize()
            blocked.append(time.perf_counter() - started)
            await finish()
            done.append(time.perf_counter() - started)
            if last:
                _compare(path, before)
            shutil.rmtree(path, ignore_errors=True)
    return {"first_seconds": blocked[0], "seconds": median(blocked[1:]), "done_seconds": median(done[1:])}


def make_tensors(size_bytes: int) -> Tensors:
    """Make the tensors of a model on the device, of pseudo-random bits."""
    torch.manual_seed(1)
    device = gpu_device.device()
    return {
        tensor.name: torch.randint(-(2**15), 2**15, tensor.shape, dtype=torch.int16, device=device)
        for tensor in files.llama_layout(size_bytes).tensors
    }


def _compare(directory: Path, before: dict[str, np.ndarray]) -> None:
    found: dict[str, np.ndarray] = {}
    for path in sorted(directory.glob("*.safetensors")):
        data = np.memmap(path, np.uint8, mode="r")
        found |= dict(meters.file_arrays(data, *files.read_header(path)))
    if found.keys() != before.keys():
        raise ValueError(f"other names were saved: {len(found)} of {len(before)}")
    for name, array in before.items():
        if not np.array_equal(found[name], array):
            raise ValueError(f"wrong bytes were saved: {name}")
