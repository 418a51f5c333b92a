"""One run of one contestant of `stio bench`, in a process of its own: `python -m stio.cli.bench_child SPEC`.

SPEC is JSON, and so is the output. Before the measured time the imports are done, the runtime of the device is started,
memory is written to and freed, and the files are evicted. The measured time starts at the call of the loader. It ends
when one byte of every page of every tensor was read through the tensor, on its device.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from stio import __version__
from stio.runtime.memory import Region, allocate
from stio.storage import LocalFile

if TYPE_CHECKING:
    import torch  # the limit needs none, and its import takes seconds

_DEPTH, _BLOCK_BYTES = 16, 8 << 20
"""Number of reads at once for the limit, and bytes of one read. More reads, or larger ones, have the same rate."""

Loader = Callable[[], "dict[str, torch.Tensor]"]


def _stio(source: str, paths: list[str], device: str) -> Loader:
    load = import_module("stio.sync").load
    return lambda: dict(load(source, device=device))


def _safetensors(source: str, paths: list[str], device: str) -> Loader:
    load_file = import_module("safetensors.torch").load_file
    return lambda: {name: tensor for path in paths for name, tensor in load_file(path, device=device).items()}


_LOADERS = {"stio": _stio, "safetensors": _safetensors}


def _limit(paths: list[str]) -> tuple[Callable[[], None], bool]:
    """Return a function that reads all files into existing buffers, and whether it reads without the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        fds = [os.open(path, os.O_RDONLY | direct) for path in paths]
    except OSError:  # this filesystem has no direct reads
        direct, fds = 0, [os.open(path, os.O_RDONLY) for path in paths]
    sizes = [os.fstat(fd).st_size for fd in fds]
    blocks = [(k, start) for k, size in enumerate(sizes) for start in range(0, size, _BLOCK_BYTES)]
    regions = [allocate(_BLOCK_BYTES) for _ in range(_DEPTH)]
    for region in regions:
        region.write(0, bytes(_BLOCK_BYTES))

    def work(number: int, region: Region) -> None:
        for k, start in blocks[number::_DEPTH]:
            if os.preadv(fds[k], [region.owner], start) < min(_BLOCK_BYTES, sizes[k] - start):
                raise OSError(f"{paths[k]} ends early: a read at byte {start:,} returned fewer bytes than the file had")

    def read() -> None:
        with ThreadPoolExecutor(_DEPTH) as pool:
            list(pool.map(work, range(_DEPTH), regions))

    return read, bool(direct)


def _write_memory(nbytes: int) -> None:
    """Write to every page of new memory, and free it.

    Otherwise the first runs would include the time in which the host of a virtual machine provides it. It takes back
    free memory, some hosts after seconds, so each run does this.
    """
    np.empty(max(nbytes, 1), np.uint8)[:: mmap.PAGESIZE] = 1


def _evict(path: str) -> float | None:
    """Evict a file from the page cache; return the part still in it, None if the kernel cannot report it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    with closing(LocalFile.open(path)) as file:
        return file.resident_fraction()


def _touch(tensors: dict[str, torch.Tensor]) -> int:
    """Read a byte of every page, and the last byte of each tensor; return their sum, which waits for the device."""
    torch, total = import_module("torch"), 0
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():  # a tied weight counts once
        if tensor.numel():
            raw = tensor.reshape(-1).view(torch.uint8)
            total += int(raw[::4096].sum(dtype=torch.int64)) + int(raw[-1])
    return total


def main(spec: str) -> dict[str, Any]:
    """Do one run; return its record."""
    task = json.loads(spec)
    paths, device, name = task["paths"], task["device"], task["contestant"]
    load: Callable[[], Any]
    if name == "limit":
        load, is_direct = _limit(paths)
    else:
        load, is_direct = _LOADERS[name](task["source"], paths, device), True
        import_module("torch").zeros(1, device=device)
    _write_memory(task["memory_bytes"])
    resident = max((_evict(path) or 0.0 for path in paths), default=0.0)
    began = perf_counter()
    tensors = load()
    checksum = None if tensors is None else _touch(tensors)
    return {
        "seconds": perf_counter() - began,
        "checksum": checksum,
        "resident_fraction": resident,
        "is_direct": is_direct,
        "version": __version__ if name == "stio" else getattr(sys.modules.get(name), "__version__", ""),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
