"""What a load or a save cannot beat: the disk under a raw reader or writer, and memory under a plain copy.

Two readers. `prepare_ring` reads by sixteen requests in flight into private huge-page buffers that are there, and
touched, before the clock starts: the disk's limit, against which cold loads are judged. `prepare_whole` fills a fresh
result as a loader must, so the first touch of each huge page is inside the clock. The writer has nothing to copy: four
threads with 64 MiB each of the same memory, space allocated at once, writes past the page cache, one fsync. The copy
has a destination of the same kind, as large as all tensors, and two threads.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

READ_DEPTH = 16
"""Reads in flight."""

READ_BYTES = 8 << 20
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


def prepare_ring(depth: int = READ_DEPTH, block_bytes: int = READ_BYTES) -> Callable[[Path], int]:
    """Make the buffers and the threads, and give the reader that uses them."""
    buffers = [huge_buffer(block_bytes) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = 1
    pool = started_pool(depth)

    def read(path: Path) -> int:
        return _read_blocks(path, pool, depth, block_bytes, lambda worker, start: buffers[worker])

    return read


def prepare_whole(depth: int = READ_DEPTH, block_bytes: int = READ_BYTES) -> Callable[[Path], tuple[np.ndarray, int]]:
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


WRITE_DEPTH = 4
"""Writes in flight. With blocks of 64 MiB as fast as any other depth that was tried (design: 4.2-4.5 GB/s)."""

WRITE_BYTES = 64 << 20
"""Bytes of one write."""

COPY_THREADS = 2

_SECTOR_BYTES = 4096


def prepare_writer(depth: int = WRITE_DEPTH, block_bytes: int = WRITE_BYTES) -> Callable[[Path, int], None]:
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
