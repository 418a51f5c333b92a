"""Who saves: each contestant prepares (imports, stagers and buffers, outside the clock) and gives its function.

A blocking one is given the tensors and the destination; one that stages first says how long that took. stio's are
for the event loop. A contestant that raises has failed in that run, and the table says so.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import files, meters, save_limits
from benchmarks.contestants import SWITCH_SECONDS, import_stio

Tensors = dict[str, Any]
Options = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Times:
    """One save, in seconds from its call."""

    staged: float
    """Until the tensors could change."""

    done: float
    """Until the caller had it: durable, where the contestant is."""

    committed: float | None = None
    """Until it was durable by the contestant's own clock: a caller whose loop is blocked hears of it later."""


Write = Callable[[Tensors, Path], float | None]
Save = Callable[[Path], Awaitable[Times]]
Session = Callable[[Tensors, Options], AbstractAsyncContextManager[Save]]


@dataclass(frozen=True, slots=True)
class Contestant:
    """One way to save."""

    label: str
    """For the table."""

    suffix: str = ""
    """Of its destination: empty for a directory."""

    prepare: Callable[[Tensors], Write] | None = None
    """Prepare a blocking function; it returns the seconds until the tensors could change, None for all of them."""

    session: Session | None = None
    """Prepare a function for the event loop, for as long as the context lasts."""

    check: Callable[[Path, Tensors], None] | None = None
    """Compare what was saved, raise where it differs."""

    num_copies: int = 1
    """Most copies of the checkpoint that it makes in memory, page cache included: so much is primed."""


@asynccontextmanager
async def opened(contestant: Contestant, tensors: Tensors, options: Options, own_thread: bool) -> AsyncIterator[Save]:
    """Give the contestant's function for the event loop; a blocking one runs right there, or in a thread."""
    if contestant.session is not None:
        async with contestant.session(tensors, options) as save:
            yield save
        return
    assert contestant.prepare is not None
    write = contestant.prepare(tensors)

    async def call(path: Path) -> Times:
        started = time.perf_counter()
        staged = await asyncio.to_thread(write, tensors, path) if own_thread else write(tensors, path)
        done = time.perf_counter() - started
        return Times(done if staged is None else staged, done)

    yield call


def _stio(**fixed: Any) -> Session:
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


def _safetensors(*, sync: bool) -> Callable[[Tensors], Write]:
    def prepare(tensors: Tensors) -> Write:
        from safetensors.torch import save_file

        def write(tensors: Tensors, path: Path) -> None:
            save_file(tensors, path)
            if sync:
                _fsync(path)
                _fsync(path.parent)

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
    """DCP's stager, kept and with it its buffers; in its thread or in the caller's, without what needs an accelerator.

    `BlockingAsyncStager(cache_staged_state_dict=True)` pins its buffers and fails where there is none to pin for.
    """

    def prepare(tensors: Tensors) -> Write:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=thread,
                use_non_blocking_copy=False,
            )
        )

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
    write_bytes = save_limits.prepare_writer()
    size_bytes = sum(tensor.nbytes for tensor in tensors.values())
    return lambda tensors, path: write_bytes(path, size_bytes)


def _memcpy(tensors: Tensors) -> Write:
    copy = save_limits.prepare_copier([array for _, array in meters.tensor_arrays(tensors)])
    return lambda tensors, path: copy()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_safetensors(path: Path, tensors: Tensors) -> None:
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


CONTESTANTS: dict[str, Contestant] = {
    "stio": Contestant("stio.save", session=_stio(), check=_check_safetensors),
    "stio-switch": Contestant(
        "stio.save, switch_interval 0.5 ms", session=_stio(switch_interval=SWITCH_SECONDS), check=_check_safetensors
    ),
    "stio-saver": Contestant("stio.Saver", session=_stio_saver, check=_check_safetensors),
    "safetensors-fsync": Contestant(
        "safetensors, fsync of file and directory",
        ".safetensors",
        _safetensors(sync=True),
        check=_check_safetensors,
    ),
    "safetensors": Contestant(
        "safetensors (not durable)", ".safetensors", _safetensors(sync=False), check=_check_safetensors
    ),
    "hub": Contestant("huggingface_hub, one shard (not durable)", prepare=_hub, check=_check_safetensors),
    "torch": Contestant("torch.save (not durable)", ".pt", _torch, check=_check_torch),
    "dcp": Contestant("DCP, FileSystemWriter", prepare=_dcp("FileSystemWriter"), check=_check_dcp),
    "dcp-hf": Contestant(
        "DCP, HuggingFaceStorageWriter",
        prepare=_dcp("HuggingFaceStorageWriter"),
        check=_check_safetensors,
        num_copies=2,
    ),
    "dcp-async": Contestant(
        "DCP async_save, DefaultStager's thread", prepare=_dcp_async(thread=True), check=_check_dcp, num_copies=2
    ),
    "dcp-caller": Contestant(
        "DCP async_save, DefaultStager in the caller's thread",
        prepare=_dcp_async(thread=False),
        check=_check_dcp,
        num_copies=2,
    ),
    "raw": Contestant("limit: O_DIRECT x 4 of 64 MiB, fsync", ".bin", _raw),
    "memcpy": Contestant("limit: memcpy by two threads, nothing written", prepare=_memcpy),
}
