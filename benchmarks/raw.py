"""The limit: what the disk gives to O_DIRECT reads with sixteen requests in flight, into huge-page buffers.

Two readers. `read_ring` reads into sixteen private buffers that are there, and touched, before the clock starts: the
disk's limit, against which cold loads are judged. `read_whole` leaves a result behind as a loader must: its memory
is fresh, so the first touch of each huge page is inside the clock; where that costs, no loader can reach the ring.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

DEPTH = 16
"""Reads in flight."""

BLOCK_BYTES = 8 << 20
"""Bytes of one read. 2, 4, 8 and 16 MiB at depth 16, and 4 MiB at 8 and 32, came to the same rate; 1 MiB to half."""

_HUGE_BYTES = 2 << 20


def huge_buffer(size_bytes: int) -> np.ndarray:
    """Allocate private anonymous memory, 2 MiB aligned, on huge pages, untouched.

    Python's own `mmap(-1, n)` is shared memory, which gets no huge pages.
    """
    rounded = -(-size_bytes // _HUGE_BYTES) * _HUGE_BYTES
    mapping = mmap.mmap(-1, rounded + _HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(mapping, np.uint8)
    start = -view.ctypes.data % _HUGE_BYTES
    return view[start : start + rounded]


def prepare_ring(depth: int = DEPTH, block_bytes: int = BLOCK_BYTES) -> Callable[[Path], int]:
    """Make the buffers and the threads, and give the reader that uses them."""
    buffers = [huge_buffer(block_bytes) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = 1
    pool = started_pool(depth)

    def read(path: Path) -> int:
        return _read_blocks(path, pool, depth, block_bytes, lambda worker, start: buffers[worker])

    return read


def prepare_whole(depth: int = DEPTH, block_bytes: int = BLOCK_BYTES) -> Callable[[Path], tuple[np.ndarray, int]]:
    """Make the threads, and give the reader that fills memory of its own with the whole file."""
    pool = started_pool(depth)

    def read(path: Path) -> tuple[np.ndarray, int]:
        result = huge_buffer(os.stat(path).st_size)
        size_bytes = _read_blocks(
            path, pool, depth, block_bytes, lambda worker, start: result[start : start + block_bytes]
        )
        return result, size_bytes

    return read


def started_pool(depth: int) -> ThreadPoolExecutor:
    """Start all threads, so that none is started inside the clock."""
    pool = ThreadPoolExecutor(depth)
    barrier = threading.Barrier(depth)
    for future in [pool.submit(barrier.wait) for _ in range(depth)]:
        future.result()
    return pool


def _read_blocks(
    path: Path, pool: ThreadPoolExecutor, depth: int, block_bytes: int, target: Callable[[int, int], np.ndarray]
) -> int:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    size_bytes = os.fstat(descriptor).st_size
    starts = iter(range(0, size_bytes, block_bytes))
    lock = threading.Lock()

    def work(worker: int) -> int:
        total = 0
        while True:
            with lock:
                start = next(starts, None)
            if start is None:
                return total
            got = os.preadv(descriptor, [target(worker, start).data], start)
            if got < min(block_bytes, size_bytes - start):
                raise OSError(f"short read of {got} bytes at {start}")
            total += got

    try:
        return sum(pool.map(work, range(depth)))
    finally:
        os.close(descriptor)
