"""What is measured inside a contestant's process: touching, heartbeat, busy thread, memory."""

from __future__ import annotations

import asyncio
import gc
import mmap
import os
import subprocess
import sys
import threading
import time
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

BEAT_SECONDS = 0.001
"""The heartbeat's sleeps."""

MIN_BEATS = 300
"""What a percentile is made of, at least."""

_MAX_TURNS = 200
_MAX_HEARTBEAT_SECONDS = 60.0

PAGE_BYTES = mmap.PAGESIZE
_MODULUS = 2**64


def touch(array: np.ndarray, mode: str) -> int:
    """Read one byte of every page of `array` and its last one ("page"), or only its first one ("ends")."""
    if not array.size:
        return 0
    if mode == "ends":
        return int(array[0])
    return int(np.add.reduce(array[::PAGE_BYTES], dtype=np.uint64)) + int(array[-1])


def combine(sums: dict[str, int]) -> int:
    """Make one checksum of the tensors' sums, each weighted by its place in the order of names."""
    return sum(place * sums[name] for place, name in enumerate(sorted(sums), 1)) % _MODULUS


def touch_all(arrays: Iterable[tuple[str, np.ndarray]], mode: str) -> int:
    """Touch every tensor ("page"), or the first and the last by name ("ends"); give the checksum of what was read."""
    if mode == "ends":
        ordered = sorted(arrays, key=lambda item: item[0])
        arrays = [ordered[0], ordered[-1]]
    return combine({name: touch(array, mode) for name, array in arrays})


def checksum_all(arrays: Iterable[tuple[str, np.ndarray]]) -> int:
    """Read every byte in order; give a checksum of all tensors in the order of their names."""
    value = 1
    for _, array in sorted(arrays, key=lambda item: item[0]):
        value = zlib.adler32(array.data, value)
    return value


def tensor_arrays(tensors: dict[str, Any]) -> Iterator[tuple[str, np.ndarray]]:
    """Give torch tensors as arrays of their bytes, without a copy."""
    import torch

    for name, tensor in tensors.items():
        yield name, tensor.reshape(-1).view(torch.uint8).numpy()


def file_arrays(
    data: np.ndarray, data_start: int, spans: dict[str, tuple[int, int]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Give the tensors of a whole file in memory as arrays of their bytes."""
    for name, (start, end) in spans.items():
        yield name, data[data_start + start : data_start + end]


def prime_memory(size_bytes: int) -> float:
    """Touch and free `size_bytes`, so that the host has handed the memory out before the clock starts.

    A virtual machine whose host takes idle memory back pays for it at the first touch (0.5 GB/s where recycled
    memory takes 20 GB/s were measured), and would charge it to the first run.

    Returns:
        The seconds that it took.
    """
    if size_bytes <= 0:
        return 0.0
    started = time.perf_counter()
    mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_HUGEPAGE)
    view = np.frombuffer(mapping, np.uint8)
    parts = np.array_split(view, len(os.sched_getaffinity(0)))
    threads = [threading.Thread(target=_touch_for_writing, args=(part,)) for part in parts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del view, parts, threads
    mapping.close()
    return time.perf_counter() - started


def _touch_for_writing(array: np.ndarray) -> None:
    array[::PAGE_BYTES] = 1


@contextmanager
def busy_thread(enabled: bool) -> Iterator[None]:
    """Keep a pure-Python thread busy inside the block; it has stopped when the block is left.

    The simulated device, if there is one, gives up the GIL to it where calls for CUDA do.
    """
    if not enabled:
        yield
        return
    stop: list[bool] = []
    started = threading.Event()

    def spin() -> None:
        started.set()
        count = 0
        while not stop:
            count += 1

    thread = threading.Thread(target=spin, name="busy", daemon=True)
    thread.start()
    started.wait()
    device: Any = sys.modules.get("simdevice")
    is_simulated = device is not None and device.installed()
    if is_simulated:
        device.set_released(device.RELEASED_SECONDS)
    try:
        yield
    finally:
        stop.append(True)
        thread.join()
        if is_simulated:
            device.set_released(0)


@contextmanager
def busy_process(enabled: bool) -> Iterator[None]:
    """Keep a process busy inside the block, which takes as much of the processors as a busy thread, and no GIL."""
    if not enabled:
        yield
        return
    # It ends with its parent, which may be killed, and holds no pipe that somebody reads to its end.
    spin = f"import os\nprint(flush=True)\nwhile os.getppid() == {os.getpid()}:\n    for _ in range(1000000): pass"
    process = subprocess.Popen(
        [sys.executable, "-c", spin], stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert process.stdout is not None
        process.stdout.readline()  # it has started
        yield
    finally:
        process.kill()
        process.communicate()


class Heartbeat:
    """A task that sleeps for short times on the loop, and records by how much each sleep came late."""

    def __init__(self) -> None:
        self.lags: list[float] = []
        """Lateness in seconds of each recorded beat."""
        self._recording = False
        self._counts = False
        self._waiters: list[asyncio.Future[None]] = []
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Heartbeat:
        self._task = asyncio.create_task(self._beat())
        await self._next_beat()
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    @asynccontextmanager
    async def recording(self) -> AsyncIterator[None]:
        """Record the beats of the block.

        A beat is in flight when the block starts, so what blocks the loop at once is seen; the beat in flight when
        it ends is waited for, so what blocks the loop last is seen; the one after that, in which the caller frees what
        it has loaded, is not recorded.
        """
        self._recording = True
        await self._next_beat()
        try:
            yield
            await self._next_beat()
        finally:
            self._recording = self._counts = False

    async def _next_beat(self) -> None:
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    async def _beat(self) -> None:
        while True:
            self._counts = self._recording
            due = time.perf_counter() + BEAT_SECONDS
            await asyncio.sleep(BEAT_SECONDS)
            if self._counts:
                self.lags.append(max(0.0, time.perf_counter() - due))
            for waiter in self._waiters:
                waiter.set_result(None)
            self._waiters = []


async def measure_lag(
    record: dict[str, Any],
    *,
    busy: bool,
    before: Callable[[], None],
    turn: Callable[[], Awaitable[object]],
    min_turns: int = 1,
) -> None:
    """Take as many beats as are needed, first with nothing to do, then beside turns of the work.

    Args:
        record: Gets `baseline` and `lag` (percentiles, in seconds), `num_turns`, and `error` where beats were too few.
        busy: Beside a busy pure-Python thread.
        before: Called before each turn; not recorded, as is the freeing of a turn's result.
        turn: The work.
        min_turns: Do it so often, even if there are beats enough.
    """
    with busy_thread(busy):
        async with Heartbeat() as heart:
            async with heart.recording():
                while len(heart.lags) < MIN_BEATS:
                    await asyncio.sleep(0.01)
            record["baseline"], heart.lags = percentiles(heart.lags), []
            deadline = time.monotonic() + _MAX_HEARTBEAT_SECONDS
            for number in range(1, _MAX_TURNS + 1):
                before()
                async with heart.recording():
                    result = await turn()
                del result
                gc.collect()
                record["num_turns"] = number
                if (len(heart.lags) >= MIN_BEATS and number >= min_turns) or time.monotonic() > deadline:
                    break
    record["lag"] = percentiles(heart.lags)
    if len(heart.lags) < MIN_BEATS:
        record["error"] = f"only {len(heart.lags)} beats"


def percentiles(lags: list[float]) -> dict[str, float | None]:
    """Give count, median, p99 and maximum."""
    ordered = sorted(lags)

    def pick(share: float) -> float | None:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None

    return {"num_beats": len(ordered), "p50": pick(0.5), "p99": pick(0.99), "max": pick(1.0)}


def reset_peak_rss() -> None:
    """Let the kernel forget the peak of this process's resident memory."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def rss_bytes() -> dict[str, int]:
    """Give this process's resident memory: now, its peak, and the anonymous part now."""
    fields = {"VmRSS": "rss_bytes", "VmHWM": "peak_rss_bytes", "RssAnon": "anonymous_bytes"}
    found = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        key, _, value = line.partition(":")
        if key in fields:
            found[fields[key]] = int(value.split()[0]) * 1024
    return found


def available_bytes() -> int:
    """Give the memory that the kernel says is available."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
