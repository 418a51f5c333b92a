"""Measure broadcast loads on ranks of this machine: each rank reads a part, against each rank reads all.

    python -m benchmarks.distributed_broadcast                         # 5 rounds, 2 and 4 ranks
    python -m benchmarks.distributed_broadcast --rounds 1 --size-mb 100 --ranks 2

Every rank holds the whole model (replicated tensors). The sources are the slow store of `benchmarks.remote` (30 ms to
the first byte, 60 MB/s a connection), which counts what it sends, and the same file on the local disk, in the page
cache. Each measurement has processes of its own, which have loaded a small file in the same way before, and
whose module has memory that was touched. The time is that of the slowest rank, from a barrier to the end of its load.
Rounds are interleaved; ratios are medians of pairs of one round.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from benchmarks import files, machine, remote

GOAL_TIME, GOAL_BYTES = 0.7, 1.02
"""On the slow store: most time of the broadcast as a multiple of the other, most bytes as a multiple of the file."""

SOURCES = ("slow store", "local, warm")
MAX_SECONDS = 300
"""For one measurement."""


class Module(nn.Module):
    """A module of the tensors of a checkpoint's layout, replicated on every rank."""

    def __init__(self, layout: files.Layout) -> None:
        super().__init__()
        for tensor in layout.tensors:
            parts = tensor.name.split(".")
            owner: nn.Module = self
            for part in parts[:-1]:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = getattr(owner, part)
            owner.register_buffer(parts[-1], torch.zeros(tensor.shape, dtype=torch.bfloat16))


def rank_body(rank: int, arguments: dict[str, Any], results: Any) -> None:
    """Measure once in this process."""
    import stio.sync

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=arguments["meeting"], rank=rank, world_size=arguments["num_ranks"])
    load = stio.sync.distributed.load_into
    module = Module(files.llama_layout(arguments["size_bytes"]))
    small = Module(files.llama_layout(1_000_000))
    load(small, arguments["small"], broadcast=arguments["broadcast"])
    dist.barrier()
    before = num_served(arguments["store"])
    dist.barrier()
    start = time.perf_counter()
    load(module, arguments["source"], broadcast=arguments["broadcast"])
    seconds = time.perf_counter() - start
    sample = sum(float(one.flatten()[-1]) for one in module.buffers())
    results.put((rank, seconds, sample, num_served(arguments["store"]) - before))
    dist.barrier()
    dist.destroy_process_group()


def measure(num_ranks: int, arguments: dict[str, Any]) -> tuple[float, int]:
    """Measure one load of all ranks; return the seconds of the slowest one, and the bytes that the store has sent."""
    context = mp.get_context("spawn")
    results = context.Queue()
    arguments = arguments | {"num_ranks": num_ranks}
    processes = [context.Process(target=rank_body, args=(rank, arguments, results)) for rank in range(num_ranks)]
    for process in processes:
        process.start()
    try:
        found = [results.get(timeout=MAX_SECONDS) for _ in processes]
        for process in processes:
            process.join(MAX_SECONDS)
    finally:
        for process in processes:
            process.kill()
    if len({sample for _, _, sample, _ in found}) != 1:
        raise SystemExit("ranks have loaded different values")
    return max(seconds for _, seconds, _, _ in found), max(nbytes for _, _, _, nbytes in found)


def num_served(base: str) -> int:
    """Return how many bytes the slow store has sent."""
    with urllib.request.urlopen(f"{base}/{remote.SERVED}") as answer:
        return int(answer.read())


Results = dict[tuple[str, int, bool], list[tuple[float, int]]]


def table(found: Results, size_bytes: int) -> str:
    """Return the table of all times and bytes."""
    lines = [
        "| source | ranks | each reads all, s | broadcast, s: median (min to max) | time / time | goal | "
        "bytes / file: each reads all | broadcast | goal |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for source, num_ranks in dict.fromkeys((source, num) for source, num, _ in found):
        plain, sent = found[source, num_ranks, False], found[source, num_ranks, True]
        ratio = median(b / a for (a, _), (b, _) in zip(plain, sent, strict=True))
        times = [seconds for seconds, _ in sent]
        is_slow = source == "slow store"
        cells = [f"{median(nbytes for _, nbytes in one) / size_bytes:.3f}" if is_slow else "" for one in (plain, sent)]
        lines.append(
            f"| {source} | {num_ranks} | {median(seconds for seconds, _ in plain):.3f} | {median(times):.3f} "
            f"({min(times):.3f} to {max(times):.3f}) | {ratio:.2f} | {GOAL_TIME if is_slow else ''} | {cells[0]} | "
            f"{cells[1]} | {GOAL_BYTES if is_slow else ''} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Take the command's options, measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--size-mb", type=int, default=500)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--source", nargs="+", choices=SOURCES, default=SOURCES)
    parser.add_argument("--out", type=Path, help="append raw figures, as JSON lines")
    options = parser.parse_args()
    found: Results = {}
    with tempfile.TemporaryDirectory(prefix="broadcast-") as name:
        folder = Path(name)
        for path, size in ((remote.FILE, options.size_mb * 1_000_000), (remote.SMALL, 1_000_000)):
            (folder / path).parent.mkdir()
            files.write_file(folder / path, files.llama_layout(size))
        size_bytes = (folder / remote.FILE).stat().st_size
        with remote.slow_store(folder) as port:
            bases = {"slow store": f"http://127.0.0.1:{port}", "local, warm": str(folder)}
            for number in range(options.rounds):
                for source in options.source:
                    for num_ranks in options.ranks:
                        for broadcast in (False, True) if number % 2 == 0 else (True, False):
                            arguments = {
                                "source": f"{bases[source]}/{remote.FILE}",
                                "small": f"{bases[source]}/{remote.SMALL}",
                                "broadcast": broadcast,
                                "store": bases["slow store"],
                                "meeting": f"file://{folder}/meeting-{os.urandom(8).hex()}",
                                "size_bytes": options.size_mb * 1_000_000,
                            }
                            seconds, nbytes = measure(num_ranks, arguments)
                            found.setdefault((source, num_ranks, broadcast), []).append((seconds, nbytes))
                            line = {
                                "round": number,
                                "source": source,
                                "ranks": num_ranks,
                                "broadcast": broadcast,
                                "seconds": seconds,
                                "bytes": nbytes,
                            }
                            print(json.dumps(line), file=sys.stderr)
                            if options.out:
                                with options.out.open("a") as file:
                                    print(json.dumps(line), file=file)
    print(json.dumps(machine.describe()), file=sys.stderr)
    print(table(found, size_bytes))


if __name__ == "__main__":
    main()
