"""Durable saves of tensors that are sharded over ranks: stio, and torch's writer of the hub's layout.

    python -m benchmarks.distributed_save --ranks 2 --rounds 5 --folder /data

Each rank is a process of a gloo group with one thread of torch. The tensors are cut into rows, or into columns. The
contestants take turns; a round's time is that of the slowest rank, between barriers, until the checkpoint is there.
`torch` is `HuggingFaceStorageWriter(save_distributed=True, enable_consolidation=True)`: its consolidation has no fsync,
so `torch + sync` also syncs the files that it leaves. stio's saves are durable. `raw` is the limit of the disk: each
rank writes the bytes that it holds, which are one piece of memory, past the page cache into a half of one file, and
syncs it; there is no header, no agreement and no snapshot. Of columns it writes the same bytes in the same way. The
peak is the growth of the resident memory of one rank's process during its save, without the page cache.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import socket
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint import HuggingFaceStorageWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks import machine
from stio import sync

NUM_TENSORS, SIDE = 60, 2048
"""503 MB of BF16."""


def tensors(num_ranks: int, dim: int) -> dict[str, torch.Tensor]:
    """Return what this rank holds."""
    mesh = init_device_mesh("cpu", (num_ranks,))
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = [SIDE, SIDE]
    shape[dim] //= num_ranks
    return {
        f"layers.{k}.weight": DTensor.from_local(
            torch.randn(shape, generator=generator).bfloat16(), mesh, [Shard(dim)], run_check=False
        )
        for k in range(NUM_TENSORS)
    }


def by_stio(state: dict[str, torch.Tensor], path: str) -> None:
    """Save by stio; durable."""
    sync.distributed.save(state, path)


def by_torch(state: dict[str, torch.Tensor], path: str) -> None:
    """Save by torch, without a sync of the files that it leaves."""
    writer = HuggingFaceStorageWriter(path, save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)


def by_torch_synced(state: dict[str, torch.Tensor], path: str) -> None:
    """Save by torch, and sync the files that it leaves."""
    by_torch(state, path)
    if dist.get_rank() == 0:
        for name in Path(path).glob("*.*"):
            with open(name) as file:
                os.fsync(file.fileno())


_RAW_BLOCK_BYTES = 8 << 20


def by_raw_writes(state: dict[str, torch.Tensor], path: str) -> None:
    """Write as many bytes as this rank holds past the page cache, and sync the file."""
    nbytes = sum(tensor.to_local().nbytes for tensor in state.values())  # type: ignore[attr-defined]
    if dist.get_rank() == 0:
        os.mkdir(path)
    dist.barrier()
    fd = os.open(Path(path, "raw"), os.O_WRONLY | os.O_CREAT | os.O_DIRECT)
    try:
        begin = dist.get_rank() * nbytes
        for start in range(0, nbytes, _RAW_BLOCK_BYTES):
            block = memoryview(_raw_memory(nbytes))[start : min(start + _RAW_BLOCK_BYTES, nbytes)]
            assert os.pwrite(fd, block, begin + start) == len(block)
        os.fsync(fd)
    finally:
        os.close(fd)


@cache
def _raw_memory(nbytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, nbytes)
    memory.write(b"1" * nbytes)
    return memory


CONTESTANTS: dict[str, Callable[[dict[str, torch.Tensor], str], None]] = {
    "stio": by_stio,
    "torch": by_torch,
    "torch + sync": by_torch_synced,
    "raw": by_raw_writes,
}


@contextmanager
def peak_growth(found: list[int]) -> Iterator[None]:
    """Append the most bytes by which the anonymous memory of this process grows during the block."""
    before, highest, done = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not done.wait(0.005):
            highest[0] = max(highest[0], anonymous_bytes() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        found.append(highest[0])


def anonymous_bytes() -> int:
    """Return the resident memory of this process that belongs to no file."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("RssAnon"))


def rank_body(rank: int, num_ranks: int, port: int, folder: str, rounds: int, dim: int, names: Sequence[str]) -> None:
    """Run all rounds on one rank; the first one writes the figures."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=num_ranks)
    state = tensors(num_ranks, dim)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[int]] = {name: [] for name in names}
    for number in range(rounds + 1):  # the first is not counted: imports, first use of memory
        for name in names:
            path = f"{folder}/{name.replace(' ', '')}-{number}"
            dist.barrier()
            begin = time.perf_counter()
            with peak_growth(peaks[name]):
                CONTESTANTS[name](state, path)
            dist.barrier()
            seconds[name].append(time.perf_counter() - begin)
            dist.barrier()
            if rank == 0:
                shutil.rmtree(path)
                os.sync()
            dist.barrier()
    if rank == 0:
        figures = {name: {"seconds": seconds[name][1:], "peak_bytes": max(peaks[name][1:])} for name in names}
        Path(folder, "figures.json").write_text(json.dumps(figures))
    dist.destroy_process_group()


def measure(num_ranks: int, rounds: int, folder: Path, dim: int, names: Sequence[str]) -> dict[str, dict[str, object]]:
    """Return seconds of each round and the peak memory, by contestant."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
    with tempfile.TemporaryDirectory(dir=folder) as place:
        mp.spawn(rank_body, (num_ranks, port, place, rounds, dim, list(names)), nprocs=num_ranks)
        found: dict[str, dict[str, object]] = json.loads(Path(place, "figures.json").read_text())
    return found


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk to write to")
    parser.add_argument("--cut", choices=["rows", "columns"], nargs="+", default=["rows", "columns"])
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    given = parser.parse_args()
    print(json.dumps(machine.describe()))
    for num_ranks in given.ranks:
        for cut in given.cut:
            found = measure(num_ranks, given.rounds, given.folder, ("rows", "columns").index(cut), given.contestants)
            base = found.get("torch", {}).get("seconds")
            for name, figures in found.items():
                seconds = figures["seconds"]
                ratio = median(a / b for a, b in zip(seconds, base, strict=True)) if base else float("nan")  # type: ignore[arg-type,call-overload]
                times = ", ".join(f"{one:.2f}" for one in seconds)  # type: ignore[attr-defined]
                peak = int(figures["peak_bytes"]) / 1e6  # type: ignore[call-overload]
                print(
                    f"{num_ranks} ranks, {cut}: {name}: {median(seconds):.2f} s ({times}), {ratio:.2f} of torch, "  # type: ignore[call-overload]
                    f"{peak:.0f} MB more in the first rank"
                )


if __name__ == "__main__":
    main()
