"""What a load to a device cannot beat: the bus, the page cache under all processors, the disk, a bare ring of them.

Each moves as many bytes as the checkpoint has, through buffers that are there and touched before the clock starts.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks import gpu_device, raw

CHUNK_BYTES = 64 << 20
"""Of one copy over the bus."""

_NUM_CHUNKS = 4
_REGISTER_READ_ONLY = 8
_READ_BYTES = 8 << 20
"""Of one read out of the page cache: a thread's buffer stays in the caches of its core."""


def pinned(size_bytes: int) -> torch.Tensor:
    """Give host memory that the device reads without help, touched."""
    memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=gpu_device.is_pinned())
    return memory.fill_(1)


def prepare_bus(*, to_device: bool) -> Callable[[int], None]:
    """Make pinned chunks and their like on the device, and give the function that copies so many bytes between them."""
    host = [pinned(CHUNK_BYTES) for _ in range(_NUM_CHUNKS)]
    there = [torch.ones(CHUNK_BYTES, dtype=torch.uint8, device=gpu_device.device()) for _ in range(_NUM_CHUNKS)]
    targets, sources = (there, host) if to_device else (host, there)

    def copy(total_bytes: int) -> None:
        for number, start in enumerate(range(0, total_bytes, CHUNK_BYTES)):
            length = min(CHUNK_BYTES, total_bytes - start)
            k = number % _NUM_CHUNKS
            targets[k][:length].copy_(sources[k][:length], non_blocking=True)
        gpu_device.synchronize()

    copy(_NUM_CHUNKS * CHUNK_BYTES)
    return copy


def prepare_page_cache() -> Callable[[list[Path]], None]:
    """Make a thread and a buffer for each processor, and give the function that reads files through them."""
    depth = len(os.sched_getaffinity(0))
    buffers = [raw.huge_buffer(_READ_BYTES) for _ in range(depth)]
    for buffer in buffers:
        buffer[:] = 1
    pool = raw.started_pool(depth)

    def read(paths: list[Path]) -> None:
        with _Blocks(paths, _READ_BYTES, 0) as blocks:

            def work(worker: int) -> None:
                for descriptor, start, length in blocks:
                    _read(descriptor, buffers[worker][:length], start)

            list(pool.map(work, range(depth)))

    return read


def prepare_disk() -> Callable[[list[Path]], None]:
    """Give a reader past the page cache, sixteen reads in flight, file after file."""
    read = raw.prepare_ring()

    def read_all(paths: list[Path]) -> None:
        for path in paths:
            read(path)

    return read_all


def prepare_ring(num_threads: int, slot_bytes: int, *, direct: bool) -> Callable[[list[Path]], None]:
    """Make two pinned slots a thread, and give the function that reads files into them and copies them to the device.

    That is the whole way without a library on it: no headers, no tensors, one stream, an event a slot. Of its shapes
    the fastest says how large a ring should be here.
    """
    device = gpu_device.device()
    slots = [[pinned(slot_bytes) for _ in range(2)] for _ in range(num_threads)]
    there = torch.ones(slot_bytes * num_threads, dtype=torch.uint8, device=device)
    pool = raw.started_pool(num_threads)
    stream = torch.cuda.Stream(device) if gpu_device.is_pinned() else None

    def send(target: torch.Tensor, slot: torch.Tensor) -> torch.cuda.Event | None:
        if stream is None:
            target.copy_(slot)
            return None
        with torch.cuda.stream(stream):
            target.copy_(slot, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        return event

    def read(paths: list[Path]) -> None:
        with _Blocks(paths, slot_bytes, os.O_DIRECT if direct else 0) as blocks:

            def work(worker: int) -> None:
                target = there[worker * slot_bytes : (worker + 1) * slot_bytes]
                events: list[torch.cuda.Event | None] = [None, None]
                for number, (descriptor, start, length) in enumerate(blocks):
                    slot, event = slots[worker][number % 2], events[number % 2]
                    if event is not None:
                        event.synchronize()
                    _read(descriptor, slot.numpy()[: slot_bytes if direct else length], start)
                    events[number % 2] = send(target[:length], slot[:length])

            list(pool.map(work, range(num_threads)))
        gpu_device.synchronize()

    return read


def prepare_registered() -> Callable[[list[Path]], None]:
    """Give the function that maps files, registers the mappings with the device and copies out of the page cache.

    Registering pins the file's pages, on the clock; it is what a load out of the page cache without a ring would be.
    """
    device = gpu_device.device()
    there = torch.ones(CHUNK_BYTES, dtype=torch.uint8, device=device)
    runtime = torch.cuda.cudart() if gpu_device.is_pinned() else None

    def copy(view: np.ndarray) -> None:
        address = view.ctypes.data
        if runtime is not None:
            status = int(runtime.cudaHostRegister(address, len(view), _REGISTER_READ_ONLY))  # an enum: always true
            if status:
                raise OSError(f"cudaHostRegister of a file's mapping: error {status}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it cannot be written to
                source = torch.from_numpy(view)
            for start in range(0, len(view), CHUNK_BYTES):
                length = min(CHUNK_BYTES, len(view) - start)
                there[:length].copy_(source[start : start + length], non_blocking=True)
            gpu_device.synchronize()
        finally:
            if runtime is not None:
                runtime.cudaHostUnregister(address)

    def copy_all(paths: list[Path]) -> None:
        for path in paths:
            with open(path, "rb") as file:
                # Unmapped when the last view of it goes: an error's traceback holds one.
                copy(np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8))

    return copy_all


class _Blocks:
    """The blocks of several files, given out one by one to whichever thread asks."""

    def __init__(self, paths: list[Path], block_bytes: int, flags: int) -> None:
        self._descriptors = [os.open(path, os.O_RDONLY | flags) for path in paths]
        self._blocks = self._all(block_bytes)
        self._lock = threading.Lock()

    def __enter__(self) -> _Blocks:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)

    def __iter__(self) -> Iterator[tuple[int, int, int]]:
        while True:
            with self._lock:
                block = next(self._blocks, None)
            if block is None:
                return
            yield block

    def _all(self, block_bytes: int) -> Iterator[tuple[int, int, int]]:
        for descriptor in self._descriptors:
            size_bytes = os.fstat(descriptor).st_size
            for start in range(0, size_bytes, block_bytes):
                yield descriptor, start, min(block_bytes, size_bytes - start)


def _read(descriptor: int, buffer: np.ndarray, start: int) -> None:
    """Read as much as there is for a buffer; a direct read of a file's end is shorter than the buffer."""
    got = os.preadv(descriptor, [buffer.data], start)
    wanted = min(len(buffer), os.fstat(descriptor).st_size - start)
    while got < wanted:
        if not (more := os.preadv(descriptor, [buffer[got:].data], start + got)):
            raise OSError(f"the file ended at {start + got}")
        got += more
