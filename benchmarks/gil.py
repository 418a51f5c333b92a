"""A load to a device beside a busy Python thread, simulated: reads and the driver's calls are sleeps. Refuted by a GPU.

This simulation said that such a load keeps 0.38 of its idle rate. One NVIDIA H200 measured 0.054 on 2026-11-26
(`results/gpu-2026-11-26.jsonl`). On the H200 `record_stream` released the GIL for each of 435 tensors: 2.0 s of a load
of 2.4 s. The device of this file has no such call. It releases the GIL in fewer calls than CUDA does, where waits for
events, allocations and copies release it too. So neither its rates nor their share of idle say anything about a GPU,
and it has no goals. What it still counts is how often stio's own code waits for the interpreter.

    python -m benchmarks.gil --rounds 5
    python -m benchmarks.gil --tree BEFORE --tree AFTER     # by the stio of other source trees

A read takes as long as the cores that take part copy from the page cache (8 GB/s each, all reads together 100); of a
cold file all reads together take 12 GB/s from the disk. A copy takes as long as a bus does (50 GB/s), a call of the
driver 5 microseconds, an allocation 20. All of them release the GIL, and none of them occupies a processor. So the
rates are those of no machine. The rounds of all lines are interleaved, each round of a tree has a process of its own,
and each line has medians.

Turns are counted in two ways, both for a GiB. `calls` are the simulated calls that release the GIL: reads, calls of the
driver, allocations, and waits for events; each of them needs the GIL again when it ends. `switches` are the voluntary
context switches of all threads but the busy one: they include waits for locks and conditions, and each wait for the GIL
itself. The second figure is the upper bound, since a sleep of a call is a switch too.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

import stio.sync
from benchmarks import machine, meters
from stio.format.header_build import build_header
from stio.loading import prepare
from stio.runtime import memory
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region
from stio.storage.base import Identity

try:
    from stio.device.torch_private import new_bytes
except ImportError:  # an older tree, whose accelerator calls `torch.empty`

    def new_bytes(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
        """Return new tensors."""
        return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]


try:
    from stio.storage.parallel_read import num_requests
except ImportError:  # an older tree, whose calls read by one core

    def num_requests(nbytes: int, num_processors: int) -> int:
        """Return by how many cores one call reads."""
        return 1


ROOT = Path(__file__).resolve().parent.parent

READ_BYTES_PER_SECOND, BUS_BYTES_PER_SECOND = 8e9, 50e9
"""Of one core, and of the bus."""
MEMORY_BYTES_PER_SECOND, DISK_BYTES_PER_SECOND = 100e9, 12e9
"""All reads together, of resident and of cold files."""
CALL_SECONDS, ALLOCATION_SECONDS = 5e-6, 2e-5
NUM_CORES = 16
"""Of the host that is imagined."""

NUM_TENSORS, TENSOR_BYTES = 320, 40_000_000

LINES: dict[str, dict[str, Any]] = {
    "idle": {"busy": False},
    "busy": {"busy": True},
    "busy, 0.5 ms": {"busy": True, "switch_interval": 0.0005},
    "idle, 2 GiB": {"busy": False, "budget_bytes": 2 << 30},
    "busy, 2 GiB": {"busy": True, "budget_bytes": 2 << 30},
}
STATES = ("resident", "cold")
REFUTED = """\
Simulated, and refuted: this simulation said that a load beside a busy thread keeps 0.38 of its idle rate. One NVIDIA
H200 measured 0.054 (2026-11-26): record_stream released the GIL for each tensor, 2.0 s of a load of 2.4 s, and waits
for events, allocations and copies of CUDA release it too. These rates and shares say nothing about a GPU."""
"""What is printed with the figures."""

CALLS = ("read", "driver", "event", "allocation")

Figures = dict[str, float]

_usleep = ctypes.CDLL(None).usleep
_calls: list[str] = []  # an item for each simulated call; `append` is one step


def sleep(seconds: float, kind: str) -> None:
    """Sleep, without the GIL; `time.sleep` does more around it."""
    _calls.append(kind)
    _usleep(max(0, int(seconds * 1e6)))


class Channel:
    """What all reads share: each one has its turn when those before it have had theirs. No lock, which costs turns."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._free_at = 0.0

    def seconds(self, nbytes: int) -> float:
        """Take the next turn; return the seconds until it ends."""
        now = perf_counter()
        self._free_at = max(now, self._free_at) + nbytes / self._bytes_per_second
        return self._free_at - now


class Mark:
    """An event that has passed when the bus has come so far."""

    def __init__(self, when: float) -> None:
        self._when = when

    def query(self) -> bool:
        """Tell whether it has."""
        return perf_counter() >= self._when

    def synchronize(self) -> None:
        """Wait until it has."""
        sleep(self._when - perf_counter(), "event")


class Device:
    """An accelerator that does nothing, and takes its time for it."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self._bus = Channel(BUS_BYTES_PER_SECOND)

    def staging(self, nbytes: int) -> Region:
        """Give a slot."""
        return memory.allocate(nbytes)

    def empty(self, nbytes: int) -> torch.Tensor:
        """Return memory that is not touched; older trees allocate so."""
        return self.allocate([nbytes])[0]

    def allocate(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return memory that is not touched, by the calls of torch that the tree's own accelerator makes."""
        sleep(ALLOCATION_SECONDS * len(sizes), "allocation")
        return new_bytes(sizes, self.device)

    def clone(self, tensors: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return memory that is not touched."""
        sleep(ALLOCATION_SECONDS * len(tensors), "allocation")
        return [torch.empty_like(tensor) for tensor in tensors]

    def copy(self, pairs: list[tuple[torch.Tensor, Region]]) -> Mark:
        """Queue copies."""
        sleep(CALL_SECONDS * (len(pairs) + 1), "driver")
        return Mark(perf_counter() + self._bus.seconds(sum(region.nbytes for _, region in pairs)))

    @contextmanager
    def on_queue(self) -> Iterator[None]:
        """Do nothing: nothing is cast."""
        yield

    def hand_over(self, tensors: Iterable[torch.Tensor], events: Iterable[object]) -> None:
        """Do nothing."""


class File:
    """A file with a header and nothing behind it; a `Source`, and the `Root` that it is alone in."""

    path = "model.safetensors"

    def __init__(self, num_tensors: int, tensor_bytes: int, *, state: str = "resident") -> None:
        self._channel = Channel(MEMORY_BYTES_PER_SECOND if state == "resident" else DISK_BYTES_PER_SECOND)
        self._header, _ = build_header((f"layers.{k}", "U8", (tensor_bytes,)) for k in range(num_tensors))
        self.data_bytes = num_tensors * tensor_bytes
        self.identity = Identity(0, 0, len(self._header) + self.data_bytes, 1)

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Give the header; sleep for what is behind it."""
        nbytes = 0
        for region in regions:
            if offset < len(self._header):
                region.write(0, self._header[offset : offset + region.nbytes])
            elif region.nbytes >= PAGE_BYTES:
                nbytes += region.nbytes
            offset += region.nbytes
        if nbytes:
            self._read(nbytes, num_requests(nbytes, NUM_CORES) if len(regions) == 1 else 1)

    def _read(self, nbytes: int, num_cores: int) -> None:
        """Read by some cores in one call."""
        own = nbytes / (num_cores * READ_BYTES_PER_SECOND)
        sleep(max(own, self._channel.seconds(nbytes)), "read")

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


def measure(file: File, *, busy: bool, **options: Any) -> Figures:
    """Load once; return bytes a second, and for each GiB the simulated calls by kind, and the context switches."""
    gib = file.data_bytes / (1 << 30)
    with meters.busy_thread(busy):
        spinning = [thread.native_id for thread in threading.enumerate() if thread.name == "busy"]
        _calls.clear()
        switches = _switches(spinning)
        start = perf_counter()
        loaded = stio.sync.load(file, device=Device(), **options)
        seconds = perf_counter() - start
        switches = _switches(spinning) - switches
        del loaded  # torch drops the GIL at the end of each tensor
    counts = Counter(_calls)
    figures = {"rate": file.data_bytes / seconds, "calls": counts.total() / gib, "switches": switches / gib}
    return figures | {kind: counts[kind] / gib for kind in CALLS}


def _switches(without: Iterable[int | None]) -> int:
    """Return the voluntary context switches of this process, without some of its threads."""
    count = resource.getrusage(resource.RUSAGE_SELF).ru_nvcsw
    for thread in without:
        status = Path(f"/proc/self/task/{thread}/status").read_text()
        count -= int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return count


def measure_round(states: Sequence[str]) -> dict[str, Figures]:
    """Measure each line once, in this process."""
    if hasattr(prepare, "num_processors"):
        prepare.num_processors = lambda: NUM_CORES
    found: dict[str, Figures] = {}
    for state in states:
        file = File(NUM_TENSORS, TENSOR_BYTES, state=state)
        measure(File(8, TENSOR_BYTES, state=state), busy=False)  # imports
        for name, options in LINES.items():
            found[f"{state}, {name}"] = measure(file, **options)
    return found


# The rounds, and the table.

_CHILD = """
import sys
import benchmarks  # of this tree
sys.path.insert(0, sys.argv[1])
from benchmarks import gil
gil.child(sys.argv[1], sys.argv[2:])
"""


def child(tree: str, states: Sequence[str]) -> None:
    """Measure a round in this process, print it, and end the process."""
    if not Path(stio.__file__).is_relative_to(tree):
        raise SystemExit(f"stio came from {stio.__file__}")
    print(json.dumps(measure_round(states)), flush=True)
    os._exit(0)


def run_round(tree: Path, states: Sequence[str]) -> dict[str, Figures]:
    """Measure each line once with the stio of a tree, in a fresh process."""
    command = (sys.executable, "-c", _CHILD, str(tree), *states)
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Figures] = json.loads(done.stdout)
    return found


def table(rounds: dict[str, list[dict[str, Figures]]]) -> str:
    """Return a line for each line that was measured, and each tree; ratios are medians of pairs of one round."""
    trees = list(rounds)
    lines = [
        f"{'simulated':24} {'GB/s: median (min to max)':28} {'of idle':>7} {'to first tree':>13} {'calls':>7} "
        f"{'switches':>8} a GiB: {' / '.join(CALLS)}"
    ]
    for name in rounds[trees[0]][0]:
        state, _, line = name.partition(", ")
        idle = f"{state}, idle, 2 GiB" if "2 GiB" in line else f"{state}, idle"
        for number, tree in enumerate(trees):
            found = rounds[tree]
            rates = [each[name]["rate"] / 1e9 for each in found]
            share = f"{median(each[name]['rate'] / each[idle]['rate'] for each in found):.2f}"
            pairs = zip(rounds[trees[0]], found, strict=True)
            to_first = f"{median(b[name]['rate'] / a[name]['rate'] for a, b in pairs):.2f}" if number else ""
            middle = {key: median(each[name][key] for each in found) for key in ("calls", "switches", *CALLS)}
            rate = f"{median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"
            label = name if not number else f"  {tree_name(tree, trees)}"
            kinds = " / ".join(f"{middle[kind]:.1f}" for kind in CALLS)
            lines.append(
                f"{label:24} {rate:28} {share:>7} {to_first:>13} {middle['calls']:7.1f} "
                f"{middle['switches']:8.1f}        {kinds}"
            )
    return "\n".join(lines)


def tree_name(tree: str, trees: Sequence[str]) -> str:
    """Return a short name of a source tree: its folder's, and its place if others have that too."""
    names = [Path(each).name for each in trees]
    name = Path(tree).name
    return name if names.count(name) == 1 else f"{name} {trees.index(tree) + 1}"


def main() -> None:
    """Measure all lines in turn, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--state", nargs="+", choices=STATES, default=STATES, help="of the file")
    parser.add_argument(
        "--tree", type=Path, action="append", help="a source tree; may be repeated; by default this one"
    )
    parser.add_argument("--json", action="store_true", help="print the figures of all rounds instead of a table")
    options = parser.parse_args()
    trees = [str(tree.resolve()) for tree in options.tree or [ROOT]]
    rounds: dict[str, list[dict[str, Figures]]] = {tree: [] for tree in trees}
    for number in range(options.rounds):
        for tree in trees if number % 2 == 0 else trees[::-1]:
            rounds[tree].append(run_round(Path(tree), options.state))
    if options.json:
        print(json.dumps({"refuted": REFUTED, "machine": machine.describe(), "rounds": rounds}))
    else:
        print(f"{REFUTED}\n\n{table(rounds)}")


if __name__ == "__main__":
    main()
