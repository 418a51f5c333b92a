"""`make demo`: a server that answers while a model loads, saves that are killed, and a picture of both. A minute.

Part one (`demo_server.py`): a server loads a checkpoint, by safetensors and by stio, that is not in the page cache.
Part two (`demo_kills.py`): a process that saves over its checkpoint is killed at random moments, and what is left is
read. All figures are measured in this run. The exit status is 1 if a save of stio left a broken checkpoint, or if stio
loads other bits than safetensors. Needs safetensors and huggingface_hub.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import math
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from demo_kills import Killed, kill_all
from demo_machine import disk_directory, evict, import_ahead
from demo_picture import draw, show
from demo_server import LOADS, Round, measure
from safetensors.torch import load_file

import stio.sync

MB = 1_000_000
PROBE_BYTES, LEAST_BYTES, MOST_BYTES = 64 * MB, 200 * MB, 1000 * MB
LOADS_SECONDS = 20.0
"""No further round of loads begins after this time."""

_, IN_A_THREAD, STIO = LOADS

Tensors = Mapping[str, torch.Tensor]


def main(options: argparse.Namespace) -> int:
    require_writable(options.picture)
    places = [Path(tempfile.gettempdir()), Path("/var/tmp"), Path("build").absolute()]
    place, is_disk = disk_directory([options.dir] if options.dir else places)
    if options.path:
        with stio.sync.open(options.path):  # refuses what is no checkpoint
            is_disk = evict(options.path)
    if not is_disk:
        print(f"files in {options.path.parent if options.path else place} stay in memory: nothing is read from a disk")
    with tempfile.TemporaryDirectory(dir=place, prefix="stio-demo-") as name:
        home = Path(name)
        path = options.path or make_checkpoint(home, options.size_mb)
        loaded = f"{path.stat().st_size / MB:,.0f} MB {'from a disk' if is_disk else 'from memory'}"
        print(f"\n1. A server answers health checks while it loads {loaded}\n", flush=True)
        rounds = measure_loads(home, path, options.rounds)
        print_loads(rounds)
        prove_equal(stio.sync.load(path), load_file(path))
        if path != options.path:
            path.unlink()
        print(f"\n2. A process that saves {options.save_mb} MB over its checkpoint is killed\n", flush=True)
        kills = kill_all(home / "kills", options.save_mb * MB, options.kill_seconds, options.kills)
        print_kills(kills)
    picture = draw(middle_of(rounds), kills, loaded=loaded, machine=machine())
    options.picture.write_text(picture, "utf-8")
    print(f"\npicture: {options.picture}")
    return int(any(killed.num_broken for name, killed in kills.items() if name.startswith("stio")))


# The checkpoint.


def make_checkpoint(home: Path, size_mb: int | None) -> Path:
    """Save random weights, as many as this machine loads in about a second."""
    size_bytes = size_mb * MB if size_mb else fitting_bytes(home)
    import_ahead()
    path = home / "model.safetensors"
    stio.sync.save(weights(size_bytes), path, budget_bytes=PROBE_BYTES)
    return path


def weights(size_bytes: int) -> dict[str, stio.LazyTensor]:
    """Return the tensors of a transformer; each is produced when it is saved."""
    hidden = 1024 if size_bytes >= PROBE_BYTES else 256
    shapes = {
        **{f"attention.{name}.weight": (hidden, hidden) for name in "qkvo"},
        "mlp.up.weight": (4 * hidden, hidden),
        "mlp.down.weight": (hidden, 4 * hidden),
        "norm.weight": (hidden,),
    }
    num_blocks = max(1, round(size_bytes / (12 * hidden * hidden * torch.bfloat16.itemsize)))
    return {
        f"blocks.{block}.{name}": stio.LazyTensor(torch.bfloat16, shape, partial(random_weights, shape))
        for block in range(num_blocks)
        for name, shape in shapes.items()
    }


def random_weights(shape: tuple[int, ...]) -> torch.Tensor:
    """Return random bits that are finite numbers; `randn` is slower than a disk."""
    bits = torch.empty(torch.Size(shape).numel() // 4, dtype=torch.int64).random_()
    return bits.bitwise_and_(0x3FFF_3FFF_3FFF_3FFF).view(torch.bfloat16).view(shape)


def fitting_bytes(home: Path) -> int:
    """Return how much is written in five seconds and loaded in one, within a third of the free disk and memory."""
    probe = home / "probe.safetensors"
    begin = perf_counter()
    stio.sync.save(weights(PROBE_BYTES), probe)
    saved = perf_counter()
    stio.sync.load(probe)  # a first load starts threads
    evict(probe)
    evicted = perf_counter()
    stio.sync.load(probe)
    loaded = perf_counter()
    size_bytes = probe.stat().st_size
    probe.unlink()
    limits = (
        MOST_BYTES,
        shutil.disk_usage(home).free // 3,
        free_memory_bytes() // 3,
        int(5 * size_bytes / (saved - begin)),
        int(size_bytes / (loaded - evicted)),
    )
    return max(LEAST_BYTES, min(limits))


def free_memory_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def prove_equal(found: Tensors, expected: Tensors) -> None:
    """Compare names, dtypes, shapes and every bit.

    Raises:
        SystemExit: Something differs.
    """
    if set(found) != set(expected):
        sys.exit(f"names differ: {sorted(set(found) ^ set(expected))}")
    for name, tensor in expected.items():
        mine = found[name]
        if (mine.dtype, mine.shape) != (tensor.dtype, tensor.shape) or not torch.equal(raw(mine), raw(tensor)):
            sys.exit(f"{name} differs")
    print(f"   All {len(expected)} tensors that stio loads are bit-equal to those of safetensors.")


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


# Part one.


def measure_loads(home: Path, path: Path, num_rounds: int) -> list[dict[str, Round]]:
    """Measure the contestants in turn, each with a new server; the file is evicted before each load.

    Another contestant is first in each round, because a disk may read the same data faster the second time.
    """
    tiny = home / "tiny.safetensors"
    stio.sync.save({"w": torch.zeros(4)}, tiny)
    rounds: list[dict[str, Round]] = []
    begin = perf_counter()
    while not rounds or (len(rounds) < num_rounds and perf_counter() - begin < LOADS_SECONDS):
        names = list(LOADS)
        first = len(rounds) % len(names)
        found = {}
        for name in names[first:] + names[:first]:
            evict(path)
            found[name] = measure(name, path, tiny)
        rounds.append({name: found[name] for name in names})
    return rounds


def print_loads(rounds: list[dict[str, Round]]) -> None:
    print(f"   {'':<37}{'longest wait':>13}{'99 %':>8}{'load':>19}")
    for name in LOADS:
        waits = sorted(wait for each in rounds for wait in each[name].waits())
        within = waits[math.ceil(0.99 * len(waits)) - 1]
        seconds = [each[name].load_seconds for each in rounds]
        load = f"{median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f}) s"
        print(f"   {name:<37}{show(waits[-1]):>13}{show(within):>8}{load:>19}")
    print("\n   99 %: 99 of 100 answers came within this time. Load: the time until all pages")
    print(f"   were used, the median of {len(rounds)} in turn, the shortest and the longest.\n")
    compare("longest wait", [max(each[STIO].waits()) / max(each[IN_A_THREAD].waits()) for each in rounds])
    compare("load", [each[STIO].load_seconds / each[IN_A_THREAD].load_seconds for each in rounds])


def compare(what: str, ratios: list[float]) -> None:
    """Print the ratios of the rounds, also if stio is worse."""
    middle, spread = median(ratios), f"({min(ratios):.2f} to {max(ratios):.2f})"
    worse = ", WORSE" if middle > 1 else ""
    print(f"   stio's {what}: {middle:.2f} x load_file's in a thread {spread}{worse}")


def middle_of(rounds: list[dict[str, Round]]) -> dict[str, Round]:
    """Return the round whose loads took the median time: the one that is drawn."""
    return sorted(rounds, key=lambda each: sum(one.load_seconds for one in each.values()))[len(rounds) // 2]


# Part two.


def print_kills(kills: Mapping[str, Killed]) -> None:
    print(f"   {'':<41}{'kills':>6}{'old':>5}{'new':>5}{'neither':>9}{'left over':>10}")
    for name, killed in kills.items():
        counts = killed.counts()
        left_over = f"{killed.left_over_bytes / MB:.0f} MB"
        row = f"{len(killed.kills):>6}{counts['old']:>5}{counts['new']:>5}{killed.num_broken:>9}{left_over:>10}"
        print(f"   {name:<41}{row}")
    print("\n   old, new: what was left, whole. Neither: mixed, unreadable or lost.")
    print("   Left over: files of killed saves that are still there after a complete save.")
    print("   Only stio's saves are synced to the disk: a power cut does not break them.")


# The rest.


def require_writable(picture: Path) -> None:
    """Make the directory of the picture.

    Raises:
        SystemExit: The picture cannot be written.
    """
    picture.parent.mkdir(parents=True, exist_ok=True)
    if picture.is_dir() or not os.access(picture if picture.exists() else picture.parent, os.W_OK):
        sys.exit(f"the demo cannot write {picture}: choose another file with --picture")


def machine() -> str:
    """Return the processors and the versions."""
    others = [f"{name} {importlib.metadata.version(name)}" for name in ("safetensors", "huggingface_hub", "torch")]
    versions = ", ".join([f"stio {stio.__version__}", *others])
    return f"{os.cpu_count()} processors; Python {sys.version.split()[0]}, {versions}"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "path", type=existing_file, nargs="?", help="a .safetensors file to load; by default random weights"
    )
    parser.add_argument("--picture", type=Path, default=Path("build/demo.svg"), help="build/demo.svg by default")
    parser.add_argument("--dir", type=Path, help="where files are written; by default a directory on a disk")
    parser.add_argument(
        "--size-mb", type=whole_number, help="size of the random weights; by default a second of loading"
    )
    parser.add_argument("--rounds", type=whole_number, default=5, help="loads of each kind, 5 by default")
    parser.add_argument(
        "--save-mb", type=whole_number, default=16, help="size of the checkpoint that is saved, 16 by default"
    )
    parser.add_argument("--kills", type=whole_number, default=40, help="most kills of each kind, 40 by default")
    parser.add_argument("--kill-seconds", type=finite_seconds, default=15.0, help="time for all kills, 15 by default")
    return parser.parse_args()


def existing_file(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no such file: {text}")
    return Path(text)


def whole_number(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"it takes a whole number, 1 or more, not {text}")
    return int(text)


def finite_seconds(text: str) -> float:
    if not 0 <= float(text) < math.inf:  # also False for NaN
        raise argparse.ArgumentTypeError(f"it takes a number of seconds, not {text}")
    return float(text)


def end_on_signals() -> None:
    """Let a signal that ends the process end it as Ctrl-C does: files and processes of the demo go first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup ignores one of them
            signal.signal(number, lambda number, _: sys.exit(128 + number))


if __name__ == "__main__":
    end_on_signals()
    try:
        sys.exit(main(arguments()))
    except KeyboardInterrupt:
        sys.exit(130)  # all files are removed, and all processes have ended
    except (stio.StioError, OSError) as error:
        sys.exit(f"the demo cannot go on: {error}")
