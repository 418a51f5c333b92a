"""The contestants: each prepares (imports, stagers and buffers, outside the clock) and gives its function.

A loader takes the path and gives what it loaded: torch tensors by name, the whole file in memory (`WholeFile`), or None
where nothing is left behind. A saver takes the tensors and the destination. stio's functions are for the event loop. A
contestant that raises has failed in that run, and the table says so.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import files, limits, meters

Options = dict[str, Any]
Tensors = dict[str, Any]
SWITCH_SECONDS = 0.0005
"""The switch interval that a server would set."""


def import_stio() -> Any:
    """Import stio and all that it loads on first use."""
    import torch  # noqa: F401

    import stio
    import stio.sync

    return stio


# Loads.


@dataclass(frozen=True, slots=True)
class WholeFile:
    """A file's bytes, and some padding, in one buffer."""

    data: np.ndarray


Prepare = Callable[[Options], Callable[[Path], Any]]


@dataclass(frozen=True, slots=True)
class Loader:
    """A contestant that loads; `load` and `open` prepare blocking functions, the others some for the event loop."""

    label: str  # for the table
    load: Prepare | None = None
    load_async: Prepare | None = None
    open: Prepare | None = None  # opens and lists the names
    open_async: Prepare | None = None


def _safetensors(backend: str, *, clone: bool = False) -> Prepare:
    def prepare(options: Options) -> Callable[[Path], Any]:
        from safetensors.torch import load_file

        def load(path: Path) -> Any:
            tensors = load_file(path, backend=backend)
            return {name: tensor.clone() for name, tensor in tensors.items()} if clone else tensors

        return load

    return prepare


def _safetensors_open(options: Options) -> Callable[[Path], Any]:
    import torch  # noqa: F401 - safe_open imports it; that stays outside the clock
    from safetensors import safe_open

    def open_and_list(path: Path) -> Any:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())

    return open_and_list


def _runai(options: Options) -> Callable[[Path], Any]:
    os.environ.setdefault("RUNAI_STREAMER_LOG_LEVEL", "ERROR")
    from runai_model_streamer import SafetensorsStreamer

    def load(path: Path) -> Any:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(str(path))
            return dict(streamer.get_tensors())

    return load


def _fastsafetensors(options: Options) -> Callable[[Path], Any]:
    import torch  # noqa: F401
    from fastsafetensors import fastsafe_open

    def load(path: Path) -> Any:
        with fastsafe_open(str(path), framework="pytorch", device="cpu", nogds=True) as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping

    return load


def _raw_ring(options: Options) -> Callable[[Path], None]:
    read = limits.prepare_ring()

    def load(path: Path) -> None:
        read(path)

    return load


def _raw_whole(options: Options) -> Callable[[Path], WholeFile]:
    read = limits.prepare_whole()
    return lambda path: WholeFile(read(path)[0])


def _fake_devices() -> Callable[[], Any]:
    """Import the fake device of the tests."""
    sys.path.append(str(Path(__file__).parents[1] / "tests"))
    make: Callable[[], Any] = import_module("fakes").FakeDevice
    return make


def _stio(*, fake_device: bool = False, **fixed: Any) -> Prepare:
    def prepare(options: Options) -> Callable[[Path], Awaitable[Any]]:
        stio = import_stio()
        make_device = _fake_devices() if fake_device else None

        async def load(path: Path) -> Any:
            device = {"device": make_device()} if make_device is not None else {}
            return await stio.load(path, **device, **fixed, **options)

        return load

    return prepare


def _stio_open(**fixed: Any) -> Prepare:
    def prepare(options: Options) -> Callable[[Path], Awaitable[Any]]:
        stio = import_stio()

        async def open_and_list(path: Path) -> Any:
            async with stio.open(path, **fixed, **options) as checkpoint:
                return checkpoint, list(checkpoint.keys())

        return open_and_list

    return prepare


LOADERS: dict[str, Loader] = {
    "stio": Loader("stio", load_async=_stio(), open_async=_stio_open()),
    "stio-switch": Loader(
        "stio, switch_interval 0.5 ms",
        load_async=_stio(switch_interval=SWITCH_SECONDS),
        open_async=_stio_open(switch_interval=SWITCH_SECONDS),
    ),
    "stio-copy": Loader('stio, memory="copy"', load_async=_stio(memory="copy")),
    "stio-lazy": Loader('stio, memory="lazy"', load_async=_stio(memory="lazy")),
    "stio-fake": Loader("stio, fake device", load_async=_stio(fake_device=True)),
    "safetensors-mmap": Loader("safetensors (mmap)", load=_safetensors("mmap"), open=_safetensors_open),
    "safetensors-pread": Loader("safetensors (pread)", load=_safetensors("pread")),
    "safetensors-clone": Loader("safetensors (mmap) + clone", load=_safetensors("mmap", clone=True)),
    "runai": Loader("Run:ai streamer", load=_runai),
    "fastsafetensors": Loader("fastsafetensors, no GDS", load=_fastsafetensors),
    "raw": Loader("limit: O_DIRECT x 16, buffers of its own, reused", load=_raw_ring),
    "raw-whole": Loader("limit: O_DIRECT x 16 into a fresh result", load=_raw_whole),
}


# Saves.


@dataclass(frozen=True, slots=True)
class Times:
    """One save, in seconds from its call."""

    staged: float  # until the tensors could change
    done: float  # until the caller had it: durable, where the contestant is
    committed: float | None = None  # until it was durable by the contestant's own clock: a blocked caller sees it later


Write = Callable[[Tensors, Path], float | None]
"""Saves, blocking; returns the seconds until the tensors could change, None for all of them."""
Save = Callable[[Path], Awaitable[Times]]


@dataclass(frozen=True, slots=True)
class Saver:
    """A contestant that saves; one of `prepare` (a blocking function) and `session` (one for the event loop) is set."""

    label: str  # for the table
    suffix: str = ""  # of its destination: empty for a directory
    prepare: Callable[[Tensors], Write] | None = None
    session: Callable[[Tensors, Options], AbstractAsyncContextManager[Save]] | None = None
    check: Callable[[Path, Tensors], None] | None = None  # compares what was saved, raises where it differs
    num_copies: int = 1  # most copies of the checkpoint that it makes in memory, page cache included: so much is primed


@asynccontextmanager
async def opened(saver: Saver, tensors: Tensors, options: Options, own_thread: bool) -> AsyncIterator[Save]:
    """Give the contestant's function for the event loop; a blocking one runs right there, or in a thread."""
    if saver.session is not None:
        async with saver.session(tensors, options) as save:
            yield save
        return
    assert saver.prepare is not None
    write = saver.prepare(tensors)

    async def call(path: Path) -> Times:
        started = time.perf_counter()
        staged = await asyncio.to_thread(write, tensors, path) if own_thread else write(tensors, path)
        done = time.perf_counter() - started
        return Times(done if staged is None else staged, done)

    yield call


def _stio_save(**fixed: Any) -> Callable[[Tensors, Options], AbstractAsyncContextManager[Save]]:
    @asynccontextmanager
    async def session(tensors: Tensors, options: Options) -> AsyncIterator[Save]:
        save = import_stio().save

        async def call(path: Path) -> Times:
            started = time.perf_counter()
            result = await save(tensors, path, **fixed, **options)
            return Times(result.staged_seconds, time.perf_counter() - started, result.committed_seconds)

        yield call

    return session


@asynccontextmanager
async def _stio_saver(tensors: Tensors, options: Options) -> AsyncIterator[Save]:
    async with import_stio().Saver(**options) as saver:

        async def call(path: Path) -> Times:
            started = time.perf_counter()
            pending = await saver.save(tensors, path)
            staged = time.perf_counter() - started
            result = await pending
            return Times(staged, time.perf_counter() - started, result.committed_seconds)

        yield call


def _safetensors_save(*, sync: bool) -> Callable[[Tensors], Write]:
    def prepare(tensors: Tensors) -> Write:
        from safetensors.torch import save_file

        def write(tensors: Tensors, path: Path) -> None:
            save_file(tensors, path)
            if sync:
                fsync(path, path.parent)

        return write

    return prepare


def _hub(tensors: Tensors) -> Write:
    from huggingface_hub import save_torch_state_dict

    def write(tensors: Tensors, path: Path) -> None:
        path.mkdir()
        save_torch_state_dict(tensors, path, max_shard_size="100GB")

    return write


def _torch(tensors: Tensors) -> Write:
    import torch

    return lambda tensors, path: torch.save(tensors, path)


def _dcp(writer: str) -> Callable[[Tensors], Write]:
    def prepare(tensors: Tensors) -> Write:
        import torch.distributed.checkpoint as dcp

        make_writer = getattr(dcp, writer)

        def write(tensors: Tensors, path: Path) -> None:
            dcp.save(tensors, storage_writer=make_writer(str(path)), no_dist=True)

        return write

    return prepare


def _dcp_async(*, thread: bool) -> Callable[[Tensors], Write]:
    """Use DCP's stager again for each save, and its buffers, in its thread or the caller's, without an accelerator.

    `BlockingAsyncStager(cache_staged_state_dict=True)` pins its buffers and fails where there is no accelerator.
    """

    def prepare(tensors: Tensors) -> Write:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        no_accelerator = {"use_pinned_memory": False, "use_shared_memory": False, "use_non_blocking_copy": False}
        stager = DefaultStager(StagingOptions(use_async_staging=thread, **no_accelerator))

        def write(tensors: Tensors, path: Path) -> float:
            started = time.perf_counter()
            writer = dcp.FileSystemWriter(str(path))
            response = dcp.async_save(tensors, storage_writer=writer, async_stager=stager, no_dist=True)
            if thread:
                response.staging_completion.result()
            staged = time.perf_counter() - started
            (response.upload_completion if thread else response).result()
            return staged

        return write

    return prepare


def _raw(tensors: Tensors) -> Write:
    write_bytes = limits.prepare_writer()
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return lambda tensors, path: write_bytes(path, size_bytes)


def _memcpy(tensors: Tensors) -> Write:
    copy = limits.prepare_copier([array for _, array in meters.tensor_arrays(tensors)])
    return lambda tensors, path: copy()


def fsync(*paths: Path) -> None:
    """Make files, and the names in directories, durable."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_safetensors(path: Path, tensors: Tensors) -> None:
    """Compare with the files' bytes, read without stio."""
    found = {}
    for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
        data = np.memmap(file, np.uint8, mode="r")
        found |= dict(meters.file_arrays(data, *files.read_header(file)))
    _compare(found, tensors)


def _check_torch(path: Path, tensors: Tensors) -> None:
    import torch

    _compare(dict(meters.tensor_arrays(torch.load(path, mmap=True))), tensors)


def _check_dcp(path: Path, tensors: Tensors) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    dcp.load(found, storage_reader=dcp.FileSystemReader(str(path)), no_dist=True)
    _compare(dict(meters.tensor_arrays(found)), tensors)


def _compare(found: dict[str, np.ndarray], tensors: Tensors) -> None:
    if found.keys() != tensors.keys():
        raise ValueError(f"other names were saved: {len(found)} of {len(tensors)}")
    for name, array in meters.tensor_arrays(tensors):
        if not np.array_equal(found[name], array):
            raise ValueError(f"wrong bytes were saved: {name}")


_ONE_FILE = {"suffix": ".safetensors", "check": check_safetensors}
_DCP_STAGED = {"check": _check_dcp, "num_copies": 2}

SAVERS: dict[str, Saver] = {
    "stio": Saver("stio.save", session=_stio_save(), check=check_safetensors),
    "stio-switch": Saver(
        "stio.save, switch_interval 0.5 ms", session=_stio_save(switch_interval=SWITCH_SECONDS), check=check_safetensors
    ),
    "stio-saver": Saver("stio.Saver", session=_stio_saver, check=check_safetensors),
    "safetensors-fsync": Saver(
        "safetensors, fsync of file and directory", prepare=_safetensors_save(sync=True), **_ONE_FILE
    ),
    "safetensors": Saver("safetensors (not durable)", prepare=_safetensors_save(sync=False), **_ONE_FILE),
    "hub": Saver("huggingface_hub, one shard (not durable)", prepare=_hub, check=check_safetensors),
    "torch": Saver("torch.save (not durable)", ".pt", _torch, check=_check_torch),
    "dcp": Saver("DCP, FileSystemWriter", prepare=_dcp("FileSystemWriter"), check=_check_dcp),
    "dcp-hf": Saver(
        "DCP, HuggingFaceStorageWriter", prepare=_dcp("HuggingFaceStorageWriter"), check=check_safetensors, num_copies=2
    ),
    "dcp-async": Saver("DCP async_save, DefaultStager's thread", prepare=_dcp_async(thread=True), **_DCP_STAGED),
    "dcp-caller": Saver(
        "DCP async_save, DefaultStager in the caller's thread", prepare=_dcp_async(thread=False), **_DCP_STAGED
    ),
    "raw": Saver("limit: O_DIRECT x 4 of 64 MiB, fsync", ".bin", _raw),
    "memcpy": Saver("limit: memcpy by two threads, nothing written", prepare=_memcpy),
}
