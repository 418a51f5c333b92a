"""`stio bench [PATH]`: measures how fast this machine loads a checkpoint from its disk, by stio and by safetensors.

In each round every contestant runs once, in a random order. The results are medians, and ratios within each round. The
limit is a raw reader of the same bytes, without the page cache. The tensors of all contestants must have the same
checksum.

Each run is a process of its own, `python -m stio.cli.bench SPEC`: SPEC is JSON, and so is its output (`measure`).
Before the measured time the imports are done, the runtime of the device is started, memory is written to and freed, and
the files are evicted from the page cache, as in the project's benchmarks. The measured time starts at the call of the
loader. It ends when one byte of every page of every tensor was read through the tensor, on its device.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import click

from stio import __version__
from stio.cli.output import (
    ERROR,
    JSON_OPTION,
    NO_PROGRESS_OPTION,
    PATH,
    Bar,
    CommandError,
    joined,
    print_result,
    table,
    wrong_arguments,
)
from stio.errors import one_line
from stio.format import build_header
from stio.limits import parse_size
from stio.process import contextmanager
from stio.runtime.memory import Region, allocate, fits, room_in_memory
from stio.storage import LocalFile
from stio.storage.checkpoint import OpenOptions, open_checkpoint
from stio.text import counted, is_url, show_bytes, without_secrets

LIMIT = "limit"
PEER = "safetensors"
"""The package that stio is compared with. The benchmarks of the project measure others too."""

_TENSOR_BYTES = 32 << 20
_MARGIN_BYTES = 1 << 30
"""Memory that a run needs beside the tensors."""

_MAX_RUN_SECONDS = 900
_COLD_FRACTION = 0.02
"""Part of a file that may still be in the page cache when the file counts as evicted."""

_LABELS = {LIMIT: "disk's limit"}

Runs = dict[str, list[dict[str, Any]]]
"""For each contestant (`limit`, or the name of its package) what its processes reported."""


@click.command()
@click.argument("path", type=PATH, required=False)
@click.option("--device", default="cpu", show_default=True, help="Device to load to.")
@click.option(
    "--rounds", metavar="N", type=click.IntRange(min=1), default=7, show_default=True, help="Runs of each contestant."
)
@click.option("--size", metavar="SIZE", default="1GB", show_default=True, help="Size of the file to make without PATH.")
@JSON_OPTION
@NO_PROGRESS_OPTION
def bench(path: str | None, device: str, rounds: int, size: str) -> int:
    """Measure stio on this machine.

    It compares stio with the limit of the disk, and with safetensors if that is installed. PATH is a checkpoint on the
    disk to measure, and no URL: `stio load URL` prints the rate of a load from a store. Without PATH a file is made in
    the working directory, and removed at the end. No file is read from the page cache. Each run takes some seconds in
    addition to its load, to import torch and to write to memory, so all of them take minutes.
    """
    if path is not None and is_url(path):
        url = one_line(without_secrets(path))
        raise CommandError(f"{url}: `stio bench` measures files on a disk; `stio load {url}` prints the rate of a load")
    if sys.platform != "linux":
        raise CommandError("only Linux can evict files and read them without the page cache; run it there")
    with _file_to_read(path, size) as source:
        with closing(open_checkpoint(source, OpenOptions(strict=False))) as opened:
            if opened.links:
                base = one_line(opened.links[0].path)
                raise CommandError(
                    f"{one_line(source)}: this is a delta, which safetensors cannot load; measure {base}"
                )
            paths, total_bytes = [file.path for file in opened.files], sum(f.identity.nbytes for f in opened.files)
        if not fits(total_bytes + _MARGIN_BYTES):
            text = f"{one_line(source)}: {show_bytes(total_bytes)} do not fit into memory"
            raise CommandError(f"{text}; measure with one shard of it, or with a smaller --size")
        names = [LIMIT, "stio", *([PEER] if find_spec(PEER) is not None else [])]
        memory_bytes = min(2 * total_bytes, room_in_memory() // 2)
        task = {"source": source, "paths": paths, "device": device, "memory_bytes": memory_bytes}
        with Bar("measuring") as bar:
            runs = _run_all(names, task, rounds, lambda: bar.advance(total_bytes, total_bytes * rounds * len(names)))
    results = [_result(name, runs, total_bytes) for name in names]
    sentences = verdict({one["name"]: one["seconds"] for one in results if one["failure"] is None}, len(names))
    sentences += _notes(runs)
    result = {"path": path, "device": device, "total_bytes": total_bytes, "contestants": results, "verdict": sentences}
    print_result(result, lambda: [*_table(results), *sentences])
    return 0 if results[1]["failure"] is None else ERROR


@contextmanager
def _file_to_read(path: str | None, size: str) -> Iterator[str]:
    """Yield the path; without one, the path of a file that exists under `with` only."""
    if path is not None:
        yield path
        return
    with wrong_arguments():
        nbytes = parse_size(size)
    if nbytes > shutil.disk_usage(".").free:
        raise CommandError(f"there is no space for {show_bytes(nbytes)} here; use another disk, or a smaller --size")
    with tempfile.TemporaryDirectory(prefix="stio-bench-", dir=".") as directory:
        rows = max(1, min(nbytes, _TENSOR_BYTES) // 8192)
        count = max(1, nbytes // (rows * 8192))
        with open(os.path.join(directory, "model.safetensors"), "wb") as file:
            file.write(build_header((f"layers.{k}.weight", "BF16", (rows, 4096)) for k in range(count))[0])
            for _ in range(count):
                file.write(os.urandom(rows * 8192))  # random: some disks store equal blocks only once
            file.flush()
            os.fsync(file.fileno())
        yield file.name


def _run_all(names: list[str], task: dict[str, Any], rounds: int, progress: Callable[[], object]) -> Runs:
    """Run every contestant once in each round, in a random order, until it fails."""
    draw, runs = random.Random(1), Runs((name, []) for name in names)
    for _ in range(rounds):
        for name in draw.sample(names, len(names)):
            if not any("error" in run for run in runs[name]):
                runs[name].append(_run(task | {"contestant": name}))
            progress()
    return runs


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one process; return its record, or a record with its error."""
    root = str(Path(__file__).resolve().parents[2])
    search_path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    try:
        done = subprocess.run(  # -P: import no modules from the working directory
            [sys.executable, "-P", "-m", "stio.cli.bench", json.dumps(spec)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MAX_RUN_SECONDS,
            env=os.environ | {"PYTHONPATH": search_path},
            check=False,
        )
        record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {_MAX_RUN_SECONDS} s"}
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return {"error": one_line(lines[-1] if lines else f"exit status {done.returncode}")}
    return record


def _result(name: str, runs: Runs, total_bytes: int) -> dict[str, Any]:
    """Return the measurements of a contestant."""
    last, done = runs[name][-1], [run for run in runs[name] if "error" not in run]
    failure, seconds = last.get("error"), [run["seconds"] for run in done]
    if failure is None and last["checksum"] not in (None, runs["stio"][-1].get("checksum")):
        failure = "its tensors are not those that stio loads"
    middle = median(seconds) if failure is None else None
    return {
        "name": name,
        "version": done[0]["version"] if done else "",
        "median_seconds": middle,
        "bytes_per_second": middle and total_bytes / middle,
        "seconds": seconds,
        "failure": failure,
    }


def _table(results: list[dict[str, Any]]) -> Iterator[str]:
    rows, failures = [["", "median", "rate", "fastest", "slowest"]], []
    for one in results:
        label, seconds = _LABELS.get(one["name"], one["name"]), one["seconds"]
        if one["failure"] is not None:
            failures.append(f"{label}: failed: {one['failure']}")
            continue
        times = [f"{time:.3f} s" for time in (one["median_seconds"], min(seconds), max(seconds))]
        rate = f"{show_bytes(one['bytes_per_second'])}/s"
        rows.append([f"{label} {one['version']}".rstrip(), times[0], rate, *times[1:]])
    yield from map(joined, table(rows, right={1, 2, 3, 4}))
    yield from failures


def verdict(seconds: Mapping[str, list[float]], num_contestants: int) -> list[str]:
    """Return the meaning of the runs as sentences. Only runs of the same round are compared."""
    if "stio" not in seconds:
        return ["stio could not load this; there is nothing to compare."]
    sentences = []
    for name, theirs in seconds.items():
        ratios = [their / own for own, their in zip(seconds["stio"], theirs, strict=True)]
        low, high, rounds = min(ratios), max(ratios), counted(len(ratios), "round")
        if name == LIMIT:
            span = f"{low:.0%} to {high:.0%} in {rounds}"
            sentences.append(f"stio reaches {median(ratios):.0%} of the disk's limit ({span}).")
        elif name != "stio":
            span = f"{low:.2f} to {high:.2f} in {rounds}"
            sentences.append(f"It is {median(ratios):.2f} times as fast as {name} ({span}).")
            if low < 1 < high or len(ratios) == 1:
                text = "The rounds do not show which is faster: run more of them, when nothing else uses the machine."
                sentences[-1] += f" {text}"
    if num_contestants == 2:
        sentences.append(f"{PEER}, with which stio is compared, is not installed.")
    return sentences


def _notes(runs: Runs) -> Iterator[str]:
    """Yield sentences about the conditions of the measurement."""
    records = [run for records in runs.values() for run in records if "error" not in run]
    if any((run["resident_fraction"] or 0.0) > _COLD_FRACTION for run in records):
        yield "The file could not be evicted, since something maps it: these are rates of memory, not of the disk."
    if not all(run["is_direct"] for run in records):
        yield "This filesystem has no direct reads: the limit was read through the page cache."


# One run.


_DEPTH, _BLOCK_BYTES = 16, 8 << 20
"""Number of reads at once for the limit, and bytes of one read. More reads, or larger ones, have the same rate."""

Loader = Callable[[], dict[str, Any]]


def _stio(source: str, paths: list[str], device: str) -> Loader:
    load = import_module("stio.sync").load
    return lambda: dict(load(source, device=device))


def _safetensors(source: str, paths: list[str], device: str) -> Loader:
    load_file = import_module("safetensors.torch").load_file
    return lambda: {name: tensor for path in paths for name, tensor in load_file(path, device=device).items()}


_LOADERS = {"stio": _stio, PEER: _safetensors}


def _limit(paths: list[str]) -> tuple[Callable[[], None], bool]:
    """Return a function that reads all files into existing buffers, and whether it reads without the page cache."""
    direct = getattr(os, "O_DIRECT", 0)
    try:
        fds = [os.open(path, os.O_RDONLY | direct) for path in paths]
    except OSError:  # this filesystem has no direct reads
        direct, fds = 0, [os.open(path, os.O_RDONLY) for path in paths]
    sizes = [os.fstat(fd).st_size for fd in fds]
    blocks = [(k, start) for k, size in enumerate(sizes) for start in range(0, size, _BLOCK_BYTES)]
    regions = [allocate(_BLOCK_BYTES) for _ in range(_DEPTH)]
    for region in regions:
        region.write(0, bytes(_BLOCK_BYTES))

    def work(number: int, region: Region) -> None:
        for k, start in blocks[number::_DEPTH]:
            if os.preadv(fds[k], [region.owner], start) < min(_BLOCK_BYTES, sizes[k] - start):
                raise OSError(f"{paths[k]} ends early: a read at byte {start:,} returned fewer bytes than the file had")

    def read() -> None:
        with ThreadPoolExecutor(_DEPTH) as pool:
            list(pool.map(work, range(_DEPTH), regions))

    return read, bool(direct)


def _write_memory(nbytes: int) -> None:
    """Write to every page of new memory, and free it.

    Otherwise the first runs would include the time in which the host of a virtual machine provides it. It takes back
    free memory, some hosts after seconds, so each run does this.
    """
    b"\1" * nbytes


def _evict(path: str) -> float | None:
    """Evict a file from the page cache; return the part still in it, None if the kernel cannot report it."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
    with closing(LocalFile.open(path)) as file:
        return file.resident_fraction()


def _touch(tensors: dict[str, Any]) -> int:
    """Read a byte of every page, and the last byte of each tensor; return their sum, which waits for the device."""
    torch, total = import_module("torch"), 0
    for tensor in {id(tensor): tensor for tensor in tensors.values()}.values():  # a tied weight counts once
        if tensor.numel():
            raw = tensor.reshape(-1).view(torch.uint8)
            total += int(raw[::4096].sum(dtype=torch.int64)) + int(raw[-1])
    return total


def measure(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Do one run in this process; return its record."""
    paths, device, name = spec["paths"], spec["device"], spec["contestant"]
    load: Callable[[], Any]
    if name == LIMIT:
        load, is_direct = _limit(paths)
    else:
        load, is_direct = _LOADERS[name](spec["source"], paths, device), True
        import_module("torch").zeros(1, device=device)
    _write_memory(spec["memory_bytes"])
    resident = max((_evict(path) or 0.0 for path in paths), default=0.0)
    began = perf_counter()
    tensors = load()
    checksum = None if tensors is None else _touch(tensors)
    return {
        "seconds": perf_counter() - began,
        "checksum": checksum,
        "resident_fraction": resident,
        "is_direct": is_direct,
        "version": __version__ if name == "stio" else getattr(sys.modules.get(name), "__version__", ""),
    }


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))))
