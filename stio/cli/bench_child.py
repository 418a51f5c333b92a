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
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

import numpy as np

from stio import __version__
from stio.runtime.control_groups import num_processors
from stio.runtime.memory import allocate
from stio.storage.local import open_file

if TYPE_CHECKING:
    import torch  # the limit needs none, and its import takes seconds

_DEPTH, _BLOCK_BYTES = 16, 8 << 20
"""Number of reads at once for the limit, and bytes of one read. More reads, or larger ones, have the same rate."""

_EVICTIONS, _EVICTION_SECONDS = 5, 0.05
"""Number of attempts to evict a file, and the time to wait before the second one; pages that are in use stay."""

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
    blocks = iter([(k, start) for k, size in enumerate(sizes) for start in range(0, size, _BLOCK_BYTES)])
    regions = [allocate(_BLOCK_BYTES) for _ in range(_DEPTH)]
    for region in regions:
        region.write(0, bytes(_BLOCK_BYTES))
    lock = threading.Lock()
    pool = ThreadPoolExecutor(_DEPTH)
    barrier = threading.Barrier(_DEPTH)
    for future in [pool.submit(barrier.wait) for _ in range(_DEPTH)]:
        future.result()  # every thread has started

    def work(buffer: Any) -> None:
        while True:
            with lock:
                block = next(blocks, None)
            if block is None:
                return
            k, start = block
            if os.preadv(fds[k], [buffer], start) < min(_BLOCK_BYTES, sizes[k] - start):
                raise OSError(f"{paths[k]} ends early: a read at byte {start:,} returned fewer bytes than the file had")

    def read() -> None:
        list(pool.map(work, [region.owner for region in regions]))

    return read, bool(direct)


def _write_memory(nbytes: int) -> float:
    """Write to every page of new memory, by a thread for each processor, and free it; return the time of the writes.

    Otherwise the first runs, and those of contestants that need more memory, would include the time in which the host
    of a virtual machine provides it. It takes back free memory, some hosts after seconds, so each run does this.
    """
    with mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(getattr(mmap, "MADV_HUGEPAGE", mmap.MADV_NORMAL))
        pages = np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE]
        with ThreadPoolExecutor(num_processors()) as pool:
            began = perf_counter()
            list(pool.map(lambda part: part.fill(1), np.array_split(pages, num_processors())))
            seconds = perf_counter() - began
        del pages
    return seconds


def _evict(paths: list[str]) -> float | None:
    """Evict files from the page cache; return the largest part still in it, None if the kernel cannot report it."""
    known = [fraction for path in paths if (fraction := _evict_one(path)) is not None]
    return max(known) if known else None


def _evict_one(path: str) -> float | None:
    for attempt in range(_EVICTIONS):
        sleep(_EVICTION_SECONDS * attempt)
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
        with closing(open_file(path)) as file:
            left = file.resident_fraction()
        if not left:
            break
    return left


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
    takes_memory = name != "limit" or not is_direct
    writes = [_write_memory(task["memory_bytes"]) for _ in range(2)] if takes_memory else None
    resident = _evict(paths)
    began = perf_counter()
    tensors = load()
    checksum = None if tensors is None else _touch(tensors)
    return {
        "seconds": perf_counter() - began,
        "write_seconds": writes,
        "checksum": checksum,
        "resident_fraction": resident,
        "is_direct": is_direct,
        "version": __version__ if name == "stio" else getattr(sys.modules.get(name), "__version__", ""),
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1])))
