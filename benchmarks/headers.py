"""How long headers take: `python benchmarks/headers.py [--tensors 100000]`.

Compares reading, parsing and listing one file's header with what `safetensors.safe_open(...).keys()` takes, in turns,
and measures how long the parser keeps another thread waiting. Medians, with the spread beside them.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import safetensors

from stio.format.header import PREFIX_BYTES, Header, header_nbytes, parse_header
from stio.format.header_build import build_header
from stio.format.index import parse_index
from stio.runtime.limits import Limits


def make_file(path: Path, num_tensors: int) -> None:
    """Write a sparse file with the names of a mixture-of-experts checkpoint."""
    tensors = (
        (f"model.layers.{k // 1000}.mlp.experts.{k % 1000 // 4}.{'abcd'[k % 4]}_proj.weight", "BF16", (1 + k % 3, 64))
        for k in range(num_tensors)
    )
    raw, _ = build_header(tensors, {"format": "pt"})
    total = sum(128 * (1 + k % 3) for k in range(num_tensors))
    path.write_bytes(raw)
    os.truncate(path, len(raw) + total)


def read_stio(path: Path) -> Header:
    """Read and parse a header, as an engine's worker does."""
    with path.open("rb", buffering=0) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        nbytes = header_nbytes(file.read(PREFIX_BYTES), file_bytes=file_bytes, limits=Limits(), path=str(path))
        return parse_header(file.read(nbytes), file_bytes=file_bytes, path=str(path), shard=path.name)


def read_official(path: Path) -> list[str]:
    """Open a file and list its keys by the official package."""
    with safetensors.safe_open(path, "np") as file:
        return list(file.keys())


def timed(action: Callable[[], object]) -> float:
    """Return the seconds of one call, the freeing of its result left out."""
    start = time.perf_counter()
    kept = action()
    elapsed = time.perf_counter() - start
    del kept
    return elapsed


def longest_wait(action: Callable[[], object]) -> float:
    """Return how long a thread that wakes every 0.5 ms had to wait at most, with a switch interval of 0.5 ms."""
    worst, stop = 0.0, threading.Event()

    def tick() -> None:
        nonlocal worst
        last = time.perf_counter()
        while not stop.is_set():
            time.sleep(0.0005)
            now = time.perf_counter()
            worst, last = max(worst, now - last), now

    thread = threading.Thread(target=tick)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        thread.start()
        kept = action()
        stop.set()
        thread.join()
    finally:
        sys.setswitchinterval(interval)
    del kept
    return worst


def show(name: str, seconds: list[float]) -> None:
    """Print a median and its spread, in milliseconds."""
    low, middle, high = min(seconds), statistics.median(seconds), max(seconds)
    print(f"{name:32s} {middle * 1e3:8.1f} ms   ({low * 1e3:.1f} to {high * 1e3:.1f})")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        make_file(path, options.tensors)
        names = read_stio(path).names
        assert sorted(names) == sorted(read_official(path))
        rounds = [(timed(lambda: read_stio(path)), timed(lambda: read_official(path))) for _ in range(options.rounds)]
        waits = [longest_wait(lambda: read_stio(path)) for _ in range(options.rounds)]
        idle = [longest_wait(lambda: time.sleep(0.08)) for _ in range(options.rounds)]
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(names, "model.safetensors")}, indent=2).encode()
    print(f"{options.tensors} tensors, safetensors {safetensors.__version__}, msgspec {msgspec.__version__}")
    show("stio: read, parse, list", [ours for ours, _ in rounds])
    show("safetensors: safe_open, keys", [theirs for _, theirs in rounds])
    ratios = [theirs / ours for ours, theirs in rounds]
    print(f"{'ratio':32s} {statistics.median(ratios):8.2f}      ({min(ratios):.2f} to {max(ratios):.2f})")
    show("longest wait of a thread", waits)
    show("the same with nothing to do", idle)
    show("index: parse", [timed(lambda: parse_index(index, path="i")) for _ in range(options.rounds)])


if __name__ == "__main__":
    main()
