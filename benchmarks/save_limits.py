"""What a save cannot beat: the disk under a raw writer, and memory under a plain copy.

The writer has nothing to copy: four threads with 64 MiB each of private huge pages that are there, and touched,
before the clock starts; space is allocated at once, writes go past the page cache, one fsync ends it. The copy has a
destination of the same kind, as large as all tensors, and two threads.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.raw import huge_buffer, started_pool

DEPTH = 4
"""Writes in flight. With blocks of 64 MiB as fast as any other depth that was tried (design: 4.2-4.5 GB/s)."""

BLOCK_BYTES = 64 << 20
"""Bytes of one write."""

COPY_THREADS = 2

_SECTOR_BYTES = 4096


def prepare_writer(depth: int = DEPTH, block_bytes: int = BLOCK_BYTES) -> Callable[[Path, int], None]:
    """Make the buffers and the threads, and give the function that writes so many bytes, rounded up to a sector."""
    noise = np.random.default_rng(1).integers(0, 256, block_bytes, dtype=np.uint8)
    buffers = [huge_buffer(block_bytes) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = noise
    pool = started_pool(depth)

    def write(path: Path, size_bytes: int) -> None:
        size_bytes = -(-size_bytes // _SECTOR_BYTES) * _SECTOR_BYTES
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT, 0o644)
        starts = iter(range(0, size_bytes, block_bytes))
        lock = threading.Lock()

        def work(worker: int) -> None:
            while True:
                with lock:
                    start = next(starts, None)
                if start is None:
                    return
                block = buffers[worker][: size_bytes - start].data
                if (put := os.pwrite(descriptor, block, start)) < len(block):
                    raise OSError(f"short write of {put} bytes at {start}")

        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            list(pool.map(work, range(depth)))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    return write


def prepare_copier(sources: list[np.ndarray]) -> Callable[[], None]:
    """Make and touch a destination for all sources, and give the function that copies them there, by two threads."""
    target = huge_buffer(sum(len(source) for source in sources))
    target[:] = 1
    pool = started_pool(COPY_THREADS)
    shares = _shares(sources, target.ctypes.data)

    def copy_share(share: list[tuple[int, int, int]]) -> None:
        for to, source, size_bytes in share:
            ctypes.memmove(to, source, size_bytes)  # without the GIL

    def copy() -> None:
        list(pool.map(copy_share, shares))
        assert target is not None  # it lives as long as this function

    return copy


def _shares(sources: list[np.ndarray], target: int) -> list[list[tuple[int, int, int]]]:
    """Cut all bytes into equal shares, each a list of target address, source address and bytes."""
    total = sum(len(source) for source in sources)
    cuts = [total * part // COPY_THREADS for part in range(COPY_THREADS + 1)]
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(COPY_THREADS)]
    at = 0
    for source in sources:
        for share, low, high in zip(shares, cuts, cuts[1:], strict=False):
            start, end = max(at, low), min(at + len(source), high)
            if start < end:
                share.append((target + start, source.ctypes.data + start - at, end - start))
        at += len(source)
    return shares
