"""Pinning host memory, without a device: the engine's way and that of torch's allocator, part by part.

    python -m benchmarks.pinning [--bytes 1000000000] [--rounds 5]

Simulated: `mlock` stands for the driver, which also walks the pages of a range and holds each of them. torch has the
driver allocate and pin pages of 4 KiB, on one thread. The engine maps huge pages, touches them by its threads and the
caller, and pins them in pieces. Then, on the simulated device of the tests, whose pinning costs nothing: the first save
of a `Saver` and later ones, and the fill of a `HostCache` with new memory and with memory that it has.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import simdevice
import torch
from fake_driver import FakeDriver
from fakes import MemoryDestination

import stio.sync
from benchmarks.limits import huge_buffer
from stio import native
from stio.runtime.memory import num_processors

_libc = ctypes.CDLL(None, use_errno=True)


class LockingDriver(FakeDriver):
    """Locks memory in place of pinning it."""

    def _pin(self, address: int, nbytes: int, flags: int) -> int:
        return int(_libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)))

    def _unpin(self, address: int) -> int:
        return 0  # unmapping unlocks it


def seconds_of(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def touch_before(nbytes: int) -> None:
    """Get so much memory from the host of a virtual machine, which takes back what is free."""
    huge_buffer(nbytes)[:: mmap.PAGESIZE] = 1


def small_pages(nbytes: int) -> tuple[float, float]:
    """Touch and lock pages of 4 KiB on one thread, as a driver does that allocates them; return the times."""
    touch_before(nbytes)
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    view = (ctypes.c_char * nbytes).from_buffer(mapping)
    touching = seconds_of(lambda: ctypes.memset(view, 0, nbytes))
    return touching, seconds_of(lambda: _locked(ctypes.addressof(view), nbytes))


def huge_pages(nbytes: int) -> tuple[float, float]:
    """The same with huge pages, still on one thread."""
    touch_before(nbytes)
    buffer = huge_buffer(nbytes)
    touching = seconds_of(lambda: buffer.__setitem__(slice(None, None, mmap.PAGESIZE), 0))
    return touching, seconds_of(lambda: _locked(buffer.ctypes.data, nbytes))


def engine(nbytes: int) -> float:
    """Pin by the engine in pieces of 64 MiB, as savers and caches do; return the time."""
    touch_before(nbytes)
    native.set_threads(num_processors())
    driver = LockingDriver().driver
    made: list[Any] = []
    piece = 64 << 20
    found = seconds_of(lambda: made.extend(native.pin(driver, piece, None) for _ in range(nbytes // piece)))
    for _, _, free in made:
        free()
    while native.pinned_bytes():
        time.sleep(0.001)
    return found


def _locked(address: int, nbytes: int) -> None:
    if _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
        sys.exit("the system does not let this process lock so much memory: raise the limit (ulimit -l)")


def saves(nbytes: int, rounds: int) -> tuple[float, float]:
    """Return for how long the first save of a saver blocks, and a later one."""
    tensors = {f"w{k}": torch.ones(nbytes // 32, dtype=torch.uint8, device=simdevice.NAME) for k in range(32)}
    torch.accelerator.synchronize()
    touch_before(nbytes)
    with stio.sync.Saver() as saver:
        staged = [saver.save(tensors, MemoryDestination()).result().staged_seconds for _ in range(1 + rounds)]
    return staged[0], statistics.median(staged[1:])


def fills(nbytes: int, folder: Path) -> tuple[float, float]:
    """Return how long it takes to fill a cache with new memory, and with that of an evicted file."""
    paths = [folder / f"{k}.safetensors" for k in range(2)]
    for path in paths:
        stio.sync.save({"w": torch.ones(nbytes, dtype=torch.uint8)}, path)
    with stio.sync.HostCache(nbytes + (1 << 20)) as cache:
        touch_before(nbytes)
        return seconds_of(lambda: cache.prefetch(paths[0])), seconds_of(lambda: cache.prefetch(paths[1]))


def named(names: str, values: tuple[float, float], factor: float = 1.0) -> dict[str, float]:
    """Return two figures, and their ratio, under the names behind the colon."""
    of, first, second = names.replace(": ", ", ").rsplit(", ", 2)
    sums = {f"{of}: {first}": values[0] * factor, f"{of}: {second}": values[1] * factor}
    return sums | ({f"{of}: {first} / {second}": values[0] / values[1]} if factor == 1 else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    nbytes, rounds = options.bytes // (64 << 20) * (64 << 20), options.rounds
    simdevice.install()
    simdevice.set_released(0)
    simdevice.set_fills(False)
    found: dict[str, list[float]] = {}
    per_gib = (1 << 30) / nbytes
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        parts = [
            lambda: named("s a GiB, 4 KiB pages, one thread: touched, locked", small_pages(nbytes), per_gib),
            lambda: named("s a GiB, huge pages, one thread: touched, locked", huge_pages(nbytes), per_gib),
            lambda: {"s a GiB, engine: touched by its threads, locked": engine(nbytes) * per_gib},
            lambda: named("s, a saver's saves: first, later", saves(nbytes // 2, 3)),
            lambda: named("s, a cache filled: new memory, again", fills(nbytes // 2, Path(folder))),
        ]
        for _ in range(rounds):
            random.shuffle(parts)  # what is freed by one part may be cheaper for the next one
            for part in parts:
                gc.collect()
                for name, value in part().items():
                    found.setdefault(name, []).append(value)
    for name, values in sorted(found.items()):
        print(f"{name:56} {statistics.median(values):6.3f}  ({min(values):.3f} to {max(values):.3f})")


if __name__ == "__main__":
    main()
