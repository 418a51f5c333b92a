"""The contestants: each is a function that prepares (imports included, outside the clock) and gives its loader.

A loader takes the path and gives what it loaded: a dict of torch tensors, the whole file in memory (`WholeFile`), or
None where nothing is left behind. A contestant that raises has failed in that run, and the table says so.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import raw

Options = dict[str, Any]
Loader = Callable[[Path], Any]
AsyncLoader = Callable[[Path], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file's bytes in one buffer."""

    data: np.ndarray
    """All of them, and some padding."""


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to load a file."""

    label: str
    """For the table."""

    load: Callable[[Options], Loader] | None = None
    """Prepare a blocking loader."""

    load_async: Callable[[Options], AsyncLoader] | None = None
    """Prepare a loader for the event loop."""

    open: Callable[[Options], Loader] | None = None
    """Prepare a blocking function that opens and lists the names."""

    open_async: Callable[[Options], AsyncLoader] | None = None
    """The same for the event loop."""


def _safetensors(backend: str, *, clone: bool = False) -> Callable[[Options], Loader]:
    def prepare(options: Options) -> Loader:
        from safetensors.torch import load_file

        def load(path: Path) -> Any:
            tensors = load_file(path, backend=backend)
            return {name: tensor.clone() for name, tensor in tensors.items()} if clone else tensors

        return load

    return prepare


def _safetensors_open(options: Options) -> Loader:
    import torch  # noqa: F401 - safe_open imports it; that stays outside the clock
    from safetensors import safe_open

    def open_and_list(path: Path) -> Any:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())

    return open_and_list


def _runai(options: Options) -> Loader:
    os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "ERROR")
    from runai_model_streamer import SafetensorsStreamer

    def load(path: Path) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return dict(streamer.get_tensors())

    return load


def _fastsafetensors(options: Options) -> Loader:
    import torch  # noqa: F401
    from fastsafetensors import fastsafe_open

    def load(path: Path) -> Any:
        with fastsafe_open(str(path), framework="pytorch", device="cpu", nogds=True) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping

    return load


def _raw_ring(options: Options) -> Loader:
    read = raw.prepare_ring()

    def load(path: Path) -> None:
        read(path)

    return load


def _raw_whole(options: Options) -> Loader:
    read = raw.prepare_whole()
    return lambda path: WholeFile(read(path)[0])


def _stio(**fixed: Any) -> Callable[[Options], AsyncLoader]:
    def prepare(options: Options) -> AsyncLoader:
        stio = import_stio()

        async def load(path: Path) -> Any:
            return await stio.load(path, **fixed, **options)

        return load

    return prepare


def _stio_fake_device(options: Options) -> AsyncLoader:
    stio = import_stio()

    async def load(path: Path) -> Any:
        return await stio.load(path, device=_fake_device(), **options)

    return load


def _fake_device() -> Any:
    """Make stio's fake accelerator: the one place that knows how."""
    from stio.testing import FakeDevice

    return FakeDevice()


def _stio_open(**fixed: Any) -> Callable[[Options], AsyncLoader]:
    def prepare(options: Options) -> AsyncLoader:
        stio = import_stio()

        async def open_and_list(path: Path) -> Any:
            async with stio.open(path, **fixed, **options) as checkpoint:
                return checkpoint, list(checkpoint.keys())

        return open_and_list

    return prepare


def import_stio() -> Any:
    """Import stio and all that it loads on first use."""
    import torch  # noqa: F401

    import stio
    import stio.sync

    return stio


SWITCH_SECONDS = 0.0005
"""The switch interval that a server would set."""

CONTESTANTS: dict[str, Contestant] = {
    "stio": Contestant("stio", load_async=_stio(), open_async=_stio_open()),
    "stio-switch": Contestant(
        "stio, switch_interval 0.5 ms",
        load_async=_stio(switch_interval=SWITCH_SECONDS),
        open_async=_stio_open(switch_interval=SWITCH_SECONDS),
    ),
    "stio-copy": Contestant('stio, memory="copy"', load_async=_stio(memory="copy")),
    "stio-lazy": Contestant('stio, memory="lazy"', load_async=_stio(memory="lazy")),
    "stio-fake": Contestant("stio, fake device", load_async=_stio_fake_device),
    "safetensors-mmap": Contestant("safetensors (mmap)", load=_safetensors("mmap"), open=_safetensors_open),
    "safetensors-pread": Contestant("safetensors (pread)", load=_safetensors("pread")),
    "safetensors-clone": Contestant("safetensors (mmap) + clone", load=_safetensors("mmap", clone=True)),
    "runai": Contestant("Run:ai streamer", load=_runai),
    "fastsafetensors": Contestant("fastsafetensors, no GDS", load=_fastsafetensors),
    "raw": Contestant("limit: O_DIRECT x 16, buffers of its own, reused", load=_raw_ring),
    "raw-whole": Contestant("limit: O_DIRECT x 16 into a fresh result", load=_raw_whole),
}
