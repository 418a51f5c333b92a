"""What a load to a device cannot beat: the bus, the page cache under all processors, the disk, a bare ring of them.

Each moves as many bytes as the checkpoint has, through buffers that are there and touched before the clock starts. What
it has to give back it leaves on a stack, which is emptied behind the clock.
"""

from __future__ import annotations

import mmap
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch

from benchmarks import gpu_device, limits

CHUNK_BYTES = 64 << 20
"""Of one copy over the bus."""

REHEARSAL_BYTES = 1 << 20
"""What chunks and slots shrink to in a rehearsal."""

Read = Callable[[list[Path]], None]

_NUM_CHUNKS = 4


def prepare_bus(*, to_device: bool) -> Callable[[int], None]:
    """Make pinned chunks and their like on the device, and give the function that copies so many bytes between them."""
    chunk_bytes = _rehearsed(CHUNK_BYTES)
    host = [gpu_device.pinned(chunk_bytes) for _ in range(_NUM_CHUNKS)]
    there = [torch.ones(chunk_bytes, dtype=torch.uint8, device=gpu_device.device()) for _ in range(_NUM_CHUNKS)]
    targets, sources = (there, host) if to_device else (host, there)

    def copy(total_bytes: int) -> None:
        for number, start in enumerate(range(0, total_bytes, chunk_bytes)):
            length = min(chunk_bytes, total_bytes - start)
            k = number % _NUM_CHUNKS
            targets[k][:length].copy_(sources[k][:length], non_blocking=True)
        gpu_device.synchronize()

    copy(_NUM_CHUNKS * chunk_bytes)
    return copy


def _rehearsed(size_bytes: int) -> int:
    return min(size_bytes, REHEARSAL_BYTES) if gpu_device.is_simulated() else size_bytes


def bus(stack: ExitStack) -> Read:
    """Copy as many bytes over the bus as the files have."""
    copy = prepare_bus(to_device=True)
    return lambda paths: copy(sum(path.stat().st_size for path in paths))


def page_cache(stack: ExitStack) -> Read:
    """Read with every processor; a thread's buffer stays in the caches of its core."""
    return _reader(stack, [limits.huge_buffer(_rehearsed(limits.READ_BYTES)) for _ in os.sched_getaffinity(0)], 0)


def disk(stack: ExitStack, memory: str = "plain") -> Read:
    """Read past the page cache, sixteen reads in flight, into memory that is plain, pinned by torch, or registered."""
    if memory == "pinned":
        buffers = [gpu_device.pinned(_rehearsed(limits.READ_BYTES)).numpy() for _ in range(limits.READ_DEPTH)]
    else:
        buffers = [limits.huge_buffer(_rehearsed(limits.READ_BYTES)) for _ in range(limits.READ_DEPTH)]
    read = _reader(stack, buffers, os.O_DIRECT)
    for buffer in buffers if memory == "registered" else ():
        stack.enter_context(gpu_device.registered(buffer))
    return read


def _reader(stack: ExitStack, buffers: list[np.ndarray], flags: int) -> Read:
    """Give a thread to each buffer, and give the function that reads files through them."""
    for buffer in buffers:
        buffer[:] = 1
    pool = stack.enter_context(limits.started_pool(len(buffers)))

    def read(paths: list[Path]) -> None:
        with _Blocks(paths, len(buffers[0]), flags) as blocks:

            def work(buffer: np.ndarray) -> None:
                for descriptor, start, length in blocks:
                    read_block(descriptor, buffer if flags else buffer[:length], start)

            list(pool.map(work, buffers))

    return read


def ring(stack: ExitStack, num_threads: int, slot_bytes: int, *, direct: bool) -> Read:
    """Make two pinned slots a thread, and give the function that reads files into them and copies them to the device.

    That is the path without a library: no headers, no tensors, one stream, an event a slot. Of its shapes
    the fastest says how large a ring should be here.
    """
    slot_bytes = _rehearsed(slot_bytes)
    slots = [[gpu_device.pinned(slot_bytes) for _ in range(2)] for _ in range(num_threads)]
    there = torch.ones(slot_bytes * num_threads, dtype=torch.uint8, device=gpu_device.device())
    pool = stack.enter_context(limits.started_pool(num_threads))
    stream = gpu_device.stream()

    def read(paths: list[Path]) -> None:
        with _Blocks(paths, slot_bytes, os.O_DIRECT if direct else 0) as blocks:

            def work(worker: int) -> None:
                target = there[worker * slot_bytes : (worker + 1) * slot_bytes]
                events: list[torch.Event | None] = [None, None]
                for number, (descriptor, start, length) in enumerate(blocks):
                    slot, event = slots[worker][number % 2], events[number % 2]
                    if event is not None:
                        event.synchronize()
                    read_block(descriptor, slot.numpy()[: slot_bytes if direct else length], start)
                    with gpu_device.on(stream):
                        target[:length].copy_(slot[:length], non_blocking=True)
                        events[number % 2] = gpu_device.recorded(stream)

            list(pool.map(work, range(num_threads)))
        gpu_device.synchronize()

    return read


def mapping(stack: ExitStack) -> Read:
    """Map files, register the mappings with the device and copy out of the page cache.

    Registering pins the file's pages, on the clock; it is what a load out of the page cache without a ring would be.
    """
    gpu_device.cuda_runtime()
    there = torch.ones(CHUNK_BYTES, dtype=torch.uint8, device=gpu_device.device())

    def copy(view: np.ndarray) -> None:
        with gpu_device.registered(view, read_only=True), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it cannot be written to
            source = torch.from_numpy(view)
            for start in range(0, len(view), CHUNK_BYTES):
                length = min(CHUNK_BYTES, len(view) - start)
                there[:length].copy_(source[start : start + length], non_blocking=True)
            gpu_device.synchronize()

    def copy_all(paths: list[Path]) -> None:
        for path in paths:
            with open(path, "rb") as file:
                # Unmapped when the last view of it goes: an error's traceback holds one.
                copy(np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8))

    return copy_all


class _Blocks:
    """The blocks of several files; several threads take them one by one."""

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


def read_block(descriptor: int, buffer: np.ndarray, start: int) -> None:
    """Read as much as there is for a buffer; a direct read of a file's end is shorter than the buffer."""
    got = os.preadv(descriptor, [buffer.data], start)
    wanted = min(len(buffer), os.fstat(descriptor).st_size - start)
    while got < wanted:
        if not (more := os.preadv(descriptor, [buffer[got:].data], start + got)):
            raise OSError(f"the file ended at {start + got}")
        got += more
