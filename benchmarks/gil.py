"""What a busy Python thread costs a load to a device, without a device: reads and the driver's calls are sleeps.

    python -m benchmarks.gil --rounds 5

A read takes as long as one core copies out of the page cache (8 GB/s), a copy as long as a bus does (50), a call of
the driver 5 microseconds, an allocation 20; all of them without the GIL, and none of them takes a processor. So the
rates are no machine's: what they show is how often a load has to wait for the interpreter. Each line is a median.
"""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from time import perf_counter

import torch

import stio.sync
from benchmarks import meters
from stio.format.header_build import build_header
from stio.loading import prepare
from stio.runtime import memory
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region
from stio.storage.base import Identity

READ_BYTES_PER_SECOND, BUS_BYTES_PER_SECOND = 8e9, 50e9
CALL_SECONDS, ALLOCATION_SECONDS = 5e-6, 2e-5
NUM_CORES = 16
"""Of the host that is imagined."""

_usleep = ctypes.CDLL(None).usleep


def sleep(seconds: float) -> None:
    """Sleep, without the GIL; `time.sleep` does more around it."""
    _usleep(max(0, int(seconds * 1e6)))


class Mark:
    """An event that has passed when the bus has come so far."""

    def __init__(self, when: float) -> None:
        self._when = when

    def query(self) -> bool:
        """Tell whether it has."""
        return perf_counter() >= self._when

    def synchronize(self) -> None:
        """Wait until it has."""
        sleep(self._when - perf_counter())


class Device:
    """An accelerator that does nothing, and takes its time for it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._free_at = 0.0

    def staging(self, nbytes: int) -> Region:
        """Give a slot."""
        return memory.allocate(nbytes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Give memory that is not touched."""
        sleep(ALLOCATION_SECONDS)
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Mark:
        """Queue copies."""
        sleep(CALL_SECONDS * (len(pairs) + 1))
        nbytes = sum(region.nbytes for _, region in pairs)
        self._free_at = max(perf_counter(), self._free_at) + nbytes / BUS_BYTES_PER_SECOND
        return Mark(self._free_at)

    @contextmanager
    def on_queue(self) -> Iterator[None]:
        """Do nothing: nothing is cast."""
        yield

    def hand_over(self, tensors: Iterable[torch.Tensor], events: Iterable[object]) -> None:
        """Do nothing."""


class File:
    """A file with a header and nothing behind it; a `Source`, and the `Root` that it is alone in."""

    path = "model.safetensors"

    def __init__(self, num_tensors: int, tensor_bytes: int) -> None:
        self._header, _ = build_header((f"layers.{k}", "U8", (tensor_bytes,)) for k in range(num_tensors))
        self.data_bytes = num_tensors * tensor_bytes
        self.identity = Identity(0, 0, len(self._header) + self.data_bytes, 1)

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Give the header; sleep for what is behind it."""
        for region in regions:
            if offset < len(self._header):
                region.write(0, self._header[offset : offset + region.nbytes])
            elif region.nbytes >= PAGE_BYTES:
                sleep(region.nbytes / READ_BYTES_PER_SECOND)
            offset += region.nbytes

    def open(self, name: str, *, trusted: bool = False) -> File:
        """Give itself."""
        return self

    def listdir(self) -> list[str]:
        """Give its name."""
        return [self.path]

    def check_unchanged(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def rate(file: File, *, busy: bool, switch_interval: float | None) -> float:
    """Load once; give GB/s."""
    with meters.busy_thread(busy):
        start = perf_counter()
        stio.sync.load(file, device=Device(), switch_interval=switch_interval)
        return file.data_bytes / (perf_counter() - start) / 1e9


def main() -> None:
    """Measure the three, in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    prepare.num_processors = lambda: NUM_CORES
    file = File(num_tensors=320, tensor_bytes=40_000_000)
    runs = {
        "idle": {"busy": False, "switch_interval": None},
        "busy": {"busy": True, "switch_interval": None},
        "busy, switch_interval 0.5 ms": {"busy": True, "switch_interval": 0.0005},
    }
    rate(file, busy=False, switch_interval=None)  # imports
    found: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, options in runs.items():
            found[name].append(rate(file, **options))
    for name, rates in found.items():
        print(f"{name:30} {median(rates):6.1f} GB/s  ({min(rates):.1f} to {max(rates):.1f})")


if __name__ == "__main__":
    main()
