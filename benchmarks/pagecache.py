"""The page cache: evict a file, fill it with large or small folios, and check that it is so.

A run is only called cold when `mincore` finds none of the file in memory, and warm when it finds all of it; which
folios hold it is read from the kernel's page flags, where they can be read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

PAGE_BYTES = mmap.PAGESIZE
_READ_BYTES = 8 << 20
_COLD_FRACTION, _WARM_FRACTION = 0.002, 0.999
_FILL_ATTEMPTS = 4
_COMPOUND_BITS = (1 << 15) | (1 << 16)
_libc = ctypes.CDLL(None, use_errno=True)


class PageCacheError(RuntimeError):
    """The page cache is not in the state that a run needs."""


def evict(path: Path) -> None:
    """Drop `path` from the page cache, and verify it.

    Raises:
        PageCacheError: Part of it stays, most often because something maps the file.
    """
    for attempt in range(5):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        if resident_fraction(path) <= _COLD_FRACTION:
            return
        time.sleep(0.05 * (attempt + 1))
    raise PageCacheError(f"{path.name}: {resident_fraction(path):.1%} of it stays in the page cache")


def resident_fraction(path: Path) -> float:
    """Tell how much of `path` is in the page cache, from 0 to 1, as `mincore` sees it."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        view = np.frombuffer(mapping, np.uint8)
        vector = np.zeros(-(-len(mapping) // PAGE_BYTES), np.uint8)
        result = _libc.mincore(
            ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(len(mapping)), ctypes.c_void_p(vector.ctypes.data)
        )
        del view
    if result != 0:
        raise PageCacheError(f"mincore: {os.strerror(ctypes.get_errno())}")
    return float(np.mean(vector & 1))


def fill_by_reads(path: Path) -> None:
    """Fill the page cache by one sequential read: read-ahead makes large folios."""
    buffer = memoryview(bytearray(_READ_BYTES))

    def read() -> None:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    _fill(path, read)


def fill_by_faults(path: Path) -> None:
    """Fill the page cache by touching a mapping: the faults make small folios.

    From the end to the start: a fault that looks random reads around itself in pages of 4 KiB, while ascending
    faults are taken for a sequential reader, whose read-ahead makes large folios on recent kernels.
    """

    def touch() -> None:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            view = np.frombuffer(mapping, np.uint8)
            int(view[::-PAGE_BYTES].sum(dtype=np.uint64))
            del view

    _fill(path, touch)


def large_folio_fraction(path: Path) -> float | None:
    """Tell how much of a resident file lies in compound (large) folios; None where the kernel does not tell.

    Maps the file and reads `/proc/self/pagemap` and `/proc/kpageflags`, which only root may.
    """
    try:
        flags_file = os.open("/proc/kpageflags", os.O_RDONLY)
    except OSError:
        return None
    pagemap = os.open("/proc/self/pagemap", os.O_RDONLY)
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
            view = np.frombuffer(mapping, np.uint8)
            sample = np.arange(0, len(view), max(PAGE_BYTES, len(view) // 2048 // PAGE_BYTES * PAGE_BYTES))
            int(view[sample].sum(dtype=np.uint64))
            large = [_is_compound(pagemap, flags_file, view.ctypes.data + int(offset)) for offset in sample]
            del view
        return float(np.mean(large))
    finally:
        os.close(pagemap)
        os.close(flags_file)


def _is_compound(pagemap: int, flags_file: int, address: int) -> bool:
    entry = int.from_bytes(os.pread(pagemap, 8, address // PAGE_BYTES * 8), "little")
    frame = entry & ((1 << 55) - 1)
    flags = int.from_bytes(os.pread(flags_file, 8, frame * 8), "little")
    return bool(flags & _COMPOUND_BITS)


def _fill(path: Path, read: Callable[[], None]) -> None:
    """Evict, then read until all is there: the kernel may reclaim the first pages while the last are read."""
    evict(path)
    for _ in range(_FILL_ATTEMPTS):
        read()
        if (fraction := resident_fraction(path)) >= _WARM_FRACTION:
            return
    raise PageCacheError(f"{path.name}: only {fraction:.2%} of it came into the page cache")
