"""What loads to the device: each prepares (imports, buffers, outside the clock) and gives its function.

A loader takes the checkpoint's directory and gives tensors on the device, by name; a limit gives none. What has to be
closed goes on the stack that a contestant is given.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from benchmarks import files, gpu_device, gpu_limits
from benchmarks.contestants import import_stio
from benchmarks.gpu_child import SAFETENSORS, Absent
from benchmarks.gpu_stages import RINGS, ring_name

Tensors = dict[str, Any]
Load = Callable[[Path], Tensors | Awaitable[Tensors]]
Prepare = Callable[[ExitStack], Load]

_GIB = 1 << 30


def shards_of(directory: Path) -> list[Path]:
    """Give the files of a checkpoint, in the index's order."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return [directory / name for name in sorted(set(index["weight_map"].values()))]


def _stio(stack: ExitStack, **keywords: Any) -> Load:
    stio = import_stio()
    if keywords.get("memory") == "gds" and not gpu_device.has_gds():
        raise Absent("nvidia-fs, the driver of GPUDirect Storage, is not loaded")
    return partial(stio.load, device=gpu_device.device(), **keywords)


def _stio_cache(stack: ExitStack, **keywords: Any) -> Load:
    """Load out of a cache, which the first call fills."""
    stio = import_stio()
    caches: list[Any] = []

    async def load(directory: Path) -> Tensors:
        if not caches:
            size_bytes = sum(path.stat().st_size for path in shards_of(directory))
            caches.append(stack.enter_context(stio.HostCache(size_bytes + _GIB, device=gpu_device.device())))
            await caches[0].prefetch(directory)
        found: Tensors = await stio.load(directory, device=gpu_device.device(), cache=caches[0], **keywords)
        return found

    return load


def _safetensors(stack: ExitStack) -> Load:
    load_file = imported("safetensors").torch.load_file
    device = gpu_device.device()

    def load(directory: Path) -> Tensors:
        tensors: Tensors = {}
        for path in shards_of(directory):
            if gpu_device.is_simulated():  # it knows devices by their names
                tensors |= {name: tensor.to(device) for name, tensor in load_file(path).items()}
            else:
                tensors |= load_file(path, device=str(device))
        return tensors

    return load


def _safetensors_prefetch(stack: ExitStack) -> Load:
    """Start a loader for each shard, then take the tensors as they become ready.

    That is what its documentation says of a whole checkpoint: the loaders read in the background, and share one pool of
    pinned memory. The package has the name of the other safetensors, so its folder comes first, in a process where
    nothing has imported that.
    """
    folder = os.environ.get(SAFETENSORS)
    if not folder:
        raise Absent(f"{SAFETENSORS} names no folder with safetensors 0.9")
    sys.path.insert(0, folder)
    package = imported("safetensors")
    if not Path(package.__file__).resolve().is_relative_to(Path(folder).resolve()):
        raise Absent(f"safetensors is {package.__file__}, and not in {folder}")
    if not hasattr(package.safe_open, "prefetch"):
        raise Absent(f"the safetensors in {folder} has no prefetch")
    device = gpu_device.device()

    def load(directory: Path) -> Tensors:
        if gpu_device.is_simulated():  # it writes to CUDA's devices alone
            tensors: Tensors = {}
            for path in shards_of(directory):
                with package.safe_open(path, framework="pt") as file:
                    tensors |= {name: tensor.to(device) for name, tensor in file.get_tensors().items()}
            return tensors
        with ExitStack() as opened:
            shards = [
                opened.enter_context(package.safe_open(path, framework="pt", device=str(device)))
                for path in shards_of(directory)
            ]
            loaders = [opened.enter_context(shard.prefetch()) for shard in shards]
            return {name: tensor for loader in loaders for name, tensor in loader}

    return load


def _runai(stack: ExitStack) -> Load:
    os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "ERROR")
    streamer_class = imported("runai_model_streamer").SafetensorsStreamer

    def load(directory: Path) -> Tensors:
        with streamer_class() as streamer:
            streamer.stream_files([str(path) for path in shards_of(directory)])
            return {name: tensor.to(gpu_device.device(), copy=True) for name, tensor in streamer.get_tensors()}

    return load


def _fastsafetensors(stack: ExitStack) -> Load:
    fastsafe_open = imported("fastsafetensors").fastsafe_open
    gpu_device.cuda_runtime()

    def load(directory: Path) -> Tensors:
        paths = [str(path) for path in shards_of(directory)]
        with fastsafe_open(paths, framework="pytorch", device=str(gpu_device.device()), nogds=True) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping

    return load


def _instanttensor(stack: ExitStack, *, is_buffered: bool = False) -> Load:
    package = imported("instanttensor")
    gpu_device.cuda_runtime()
    # By default it reads past the page cache, and maps what lies in tmpfs.
    backend = package.BackendPolicy.BUFFERED if is_buffered else None

    def load(directory: Path) -> Tensors:
        paths = [str(path) for path in shards_of(directory)]
        with package.safe_open(paths, framework="pt", device=gpu_device.device().index, backend=backend) as file:
            return dict(file.tensors())

    return load


def _kvikio(stack: ExitStack) -> Load:
    """Read each file whole into the device's memory, with or without GPUDirect Storage; tensors are views."""
    kvikio = imported("kvikio")
    gpu_device.cuda_runtime()

    def load(directory: Path) -> Tensors:
        tensors: Tensors = {}
        for path in shards_of(directory):
            whole = torch.empty(path.stat().st_size, dtype=torch.uint8, device=gpu_device.device())
            with kvikio.CuFile(path, "r") as file:
                file.read(whole)
            data_start, spans = files.read_header(path)
            tensors |= {name: whole[data_start + start : data_start + end] for name, (start, end) in spans.items()}
        return tensors

    return load


def _limit(prepare: Callable[[ExitStack], gpu_limits.Read]) -> Prepare:
    def prepared(stack: ExitStack) -> Load:
        read = prepare(stack)

        def load(directory: Path) -> Tensors:
            read(shards_of(directory))
            return {}

        return load

    return prepared


def imported(name: str) -> Any:
    """Import a peer's package, and its module for torch.

    Raises:
        Absent: It is not installed, or lacks a library of the system.
    """
    if find_spec(name) is None:
        raise Absent(f"{name} is not installed")
    try:
        package = import_module(name)
        if name == "safetensors":
            import_module("safetensors.torch")
    except (ImportError, OSError) as error:
        raise Absent(f"{name} cannot be imported: {error}") from error
    return package


CONTESTANTS: dict[str, Prepare] = {
    "stio": _stio,
    "stio-gds": partial(_stio, memory="gds"),
    "stio-cache": _stio_cache,
    "safetensors": _safetensors,
    "safetensors-prefetch": _safetensors_prefetch,
    "runai": _runai,
    "fastsafetensors": _fastsafetensors,
    "instanttensor": _instanttensor,
    "instanttensor-buffered": partial(_instanttensor, is_buffered=True),
    "kvikio": _kvikio,
    "raw-bus": _limit(gpu_limits.bus),
    "raw-page-cache": _limit(gpu_limits.page_cache),
    "raw-registered": _limit(gpu_limits.mapping),
    "raw-disk": _limit(gpu_limits.disk),
    "raw-disk-pinned": _limit(partial(gpu_limits.disk, memory="pinned")),
    "raw-disk-registered": _limit(partial(gpu_limits.disk, memory="registered")),
    **{
        ring_name(threads, size) + suffix: _limit(
            partial(gpu_limits.ring, num_threads=threads, slot_bytes=size << 20, direct=bool(suffix))
        )
        for threads, size in RINGS
        for suffix in ("", "-direct")
    },
}


def prepared(name: str, stack: ExitStack, **keywords: Any) -> Callable[[Path], Tensors]:
    """Prepare a contestant; what it gives blocks, whichever way the contestant's own function goes.

    Raises:
        Absent: It cannot take part here.
    """
    load = CONTESTANTS[name](stack, **keywords)

    def call(directory: Path) -> Tensors:
        found = load(directory)
        return finished(found) if isinstance(found, Awaitable) else found

    return call


_runner = asyncio.Runner()


def finished(call: Awaitable[Any]) -> Any:
    """Run a call on the process's event loop, which is there already, as in a server; give its result.

    Not as the result of the loop's task: `asyncio` makes the text of that task, and so of tensors, at its end.
    """
    results = []

    async def run() -> None:
        results.append(await call)

    _runner.run(run())
    return results.pop()
