"""Who loads to the device: each prepares (imports, buffers, outside the clock) and gives its function.

A loader takes the checkpoint's directory and gives tensors on the device, by name; a limit gives none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_device, gpu_limits
from benchmarks.contestants import SWITCH_SECONDS, import_stio

Tensors = dict[str, Any]
Load = Callable[[Path], Tensors]
AsyncLoad = Callable[[Path], Awaitable[Tensors]]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to load a checkpoint to the device."""

    label: str
    """For the table."""

    prepare: Callable[[], Load] | None = None
    """Prepare a blocking loader."""

    prepare_async: Callable[[dict[str, Any]], AsyncLoad] | None = None
    """Prepare a loader for the event loop, from keywords of `stio.load`."""


def shards_of(directory: Path) -> list[Path]:
    """Give the files of a checkpoint, in the index's order."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    return [directory / name for name in sorted(set(index["weight_map"].values()))]


def size_of(directory: Path) -> int:
    """Give the bytes of its files."""
    return sum(path.stat().st_size for path in shards_of(directory))


def _stio(**fixed: Any) -> Callable[[dict[str, Any]], AsyncLoad]:
    def prepare(keywords: dict[str, Any]) -> AsyncLoad:
        stio = import_stio()

        async def load(directory: Path) -> Tensors:
            found: Tensors = await stio.load(directory, device=gpu_device.device(), **fixed, **keywords)
            return found

        return load

    return prepare


def _stio_cache(keywords: dict[str, Any]) -> AsyncLoad:
    """Load twice: the first load is the model before, which brings this one into the cache."""
    stio = import_stio()
    caches: list[Any] = []

    async def load(directory: Path) -> Tensors:
        if not caches:
            caches.append(stio.HostCache(size_of(directory) + _GIB, device=gpu_device.device()))
            await caches[0].prefetch(directory)
        found: Tensors = await stio.load(directory, device=gpu_device.device(), cache=caches[0], **keywords)
        return found

    return load


def _safetensors() -> Load:
    from safetensors.torch import load_file

    device = str(gpu_device.device())

    def load(directory: Path) -> Tensors:
        tensors: Tensors = {}
        for path in shards_of(directory):
            tensors |= load_file(path, device=device)
        return tensors

    return load


def _runai() -> Load:
    os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "ERROR")
    from runai_model_streamer import SafetensorsStreamer

    device = gpu_device.device()

    def load(directory: Path) -> Tensors:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in shards_of(directory)])
            return {name: tensor.to(device, copy=True) for name, tensor in streamer.get_tensors()}

    return load


def _fastsafetensors() -> Load:
    from fastsafetensors import fastsafe_open

    device = gpu_device.device()
    place = str(device) if device.type != "cpu" else "cpu"

    def load(directory: Path) -> Tensors:
        paths = [str(path) for path in shards_of(directory)]
        with fastsafe_open(paths, framework="pytorch", device=place, nogds=True) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping

    return load


def _instanttensor() -> Load:
    from instanttensor import safe_open

    index = gpu_device.device().index

    def load(directory: Path) -> Tensors:
        with safe_open([str(path) for path in shards_of(directory)], framework="pt", device=index) as file:
            return dict(file.tensors())

    return load


def _limit(prepare: Callable[[], Callable[[list[Path]], None]]) -> Callable[[], Load]:
    def prepared() -> Load:
        read = prepare()

        def load(directory: Path) -> Tensors:
            read(shards_of(directory))
            return {}

        return load

    return prepared


def _bus() -> Callable[[list[Path]], None]:
    copy = gpu_limits.prepare_bus(to_device=True)
    return lambda paths: copy(sum(path.stat().st_size for path in paths))


RINGS = ((4, 32), (8, 16), (8, 32), (16, 8), (16, 16))
"""Threads and MiB of a slot."""


def ring_name(num_threads: int, mebibytes: int) -> str:
    """Name a shape of the bare ring."""
    return f"raw-ring-{num_threads}x{mebibytes}"


def _rings(*, direct: bool) -> dict[str, Contestant]:
    return {
        ring_name(threads, size) + ("-direct" if direct else ""): Contestant(
            f"limit: a bare ring, {threads} threads, two slots of {size} MiB each" + (", O_DIRECT" if direct else ""),
            _limit(partial(gpu_limits.prepare_ring, threads, size << 20, direct=direct)),
        )
        for threads, size in RINGS
    }


CONTESTANTS: dict[str, Contestant] = {
    "stio": Contestant("stio", prepare_async=_stio()),
    "stio-switch": Contestant("stio, switch_interval 0.5 ms", prepare_async=_stio(switch_interval=SWITCH_SECONDS)),
    "stio-gds": Contestant("stio, memory='gds'", prepare_async=_stio(memory="gds")),
    "stio-cache": Contestant("stio, from a HostCache", prepare_async=_stio_cache),
    "safetensors": Contestant("safetensors, load_file of each shard", _safetensors),
    "runai": Contestant("Run:ai streamer, .to(device)", _runai),
    "fastsafetensors": Contestant("fastsafetensors, no GDS", _fastsafetensors),
    "instanttensor": Contestant("InstantTensor, its default (direct I/O)", _instanttensor),
    "raw-bus": Contestant("limit: pinned memory to device, 64 MiB a copy", _limit(_bus)),
    "raw-page-cache": Contestant("limit: page cache, every processor reading", _limit(gpu_limits.prepare_page_cache)),
    "raw-registered": Contestant(
        "limit: a registered mapping of the files, copied from there", _limit(gpu_limits.prepare_registered)
    ),
    "raw-disk": Contestant("limit: O_DIRECT x 16, buffers of its own, reused", _limit(gpu_limits.prepare_disk)),
    **_rings(direct=False),
    **_rings(direct=True),
}
_IMPORTS = {
    "stio-gds": "kvikio",
    "safetensors": "safetensors",
    "runai": "runai_model_streamer",
    "fastsafetensors": "fastsafetensors",
    "instanttensor": "instanttensor",
}


def missing_package(contestant: str) -> str | None:
    """Name the package that a contestant needs and this machine has not, or what the package needs."""
    from importlib.util import find_spec

    needed = _IMPORTS.get(contestant)
    if needed is not None and find_spec(needed) is None:
        return needed
    return "GPUDirect Storage" if needed == "kvikio" and not gpu_device.has_gds() else None


def bytes_of(tensor: torch.Tensor) -> Any:
    """Give a tensor's bytes, brought to the host, as an array."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()
