"""`stio bench [PATH]`: measures how fast this machine loads a checkpoint from its disk, by stio and by safetensors.

Each run is a process of its own (`bench_child.py`). In each round every contestant runs once, in a random order. Before
each run memory is written to and freed, and the files are evicted from the page cache, as in the project's benchmarks.
The results are medians, and ratios within each round. The limit is a raw reader of the same bytes, without the page
cache. The tensors of all contestants must have the same checksum.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import click

from stio.cli.output import (
    JSON_OPTION,
    NO_PROGRESS_OPTION,
    PATH,
    Bar,
    CommandError,
    joined,
    print_result,
    rate_text,
    table,
    wrong_arguments,
)
from stio.errors import one_line
from stio.format.header import build_header
from stio.loading.open import open_checkpoint
from stio.runtime.control_groups import room_in_memory
from stio.runtime.limits import parse_size
from stio.runtime.memory import fits
from stio.runtime.process import contextmanager
from stio.runtime.text import counted, is_url, show_bytes, without_secrets

LIMIT = "limit"
PEER = "safetensors"
"""The package that stio is compared with. The benchmarks of the project measure others too."""

_TENSOR_BYTES = 32 << 20
_MARGIN_BYTES = 1 << 30
"""Memory that a run needs beside the tensors."""

_MAX_RUN_SECONDS = 900
_COLD_FRACTION = 0.02
"""Part of a file that may still be in the page cache when the file counts as evicted."""


@dataclass(slots=True)
class Contestant:
    """Measurements of one contestant."""

    name: str
    """Name of its package, or `limit`."""
    version: str = ""
    """Version of its package."""
    seconds: list[float] = field(default_factory=list)
    """Time of each run."""
    checksum: int | None = None
    """That of the tensors of its last run."""
    failure: str | None = None
    """Reason why a run failed."""

    @property
    def label(self) -> str:
        """Name in the table."""
        return "disk's limit" if self.name == LIMIT else self.name

    @property
    def median(self) -> float | None:
        """Median time of the runs, None if one failed or there are none."""
        return median(self.seconds) if self.seconds and self.failure is None else None


@click.command()
@click.argument("path", type=PATH, required=False)
@click.option("--device", default="cpu", show_default=True, help="Device to load to.")
@click.option(
    "--rounds", metavar="N", type=click.IntRange(min=1), default=7, show_default=True, help="Runs of each contestant."
)
@click.option("--size", metavar="SIZE", default="1GB", show_default=True, help="Size of the file to make without PATH.")
@JSON_OPTION
@NO_PROGRESS_OPTION
def bench(path: str | None, device: str, rounds: int, size: str, as_json: bool, no_progress: bool) -> int:
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
        with closing(open_checkpoint(source, strict=False)) as opened:
            paths, total_bytes = [one.path for one in opened.files], sum(one.identity.nbytes for one in opened.files)
        if not fits(total_bytes + _MARGIN_BYTES):
            text = f"{one_line(source)}: {show_bytes(total_bytes)} do not fit into memory"
            raise CommandError(f"{text}; measure with one shard of it, or with a smaller --size")
        contestants = [Contestant(name) for name in (LIMIT, "stio", *([PEER] if find_spec(PEER) is not None else []))]
        task = {
            "source": source,
            "paths": paths,
            "device": device,
            "memory_bytes": min(2 * total_bytes, room_in_memory() // 2),
        }
        with Bar("measuring", is_wanted=not no_progress) as bar:
            notes = _run_all(contestants, task, rounds, total_bytes, bar)
    notes = verdict(contestants) + notes
    found = _as_json(contestants, notes, path, device, total_bytes)
    print_result(found, [*_table(contestants, total_bytes), *notes], as_json=as_json)
    return 0 if contestants[1].median is not None else 2


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
        made = os.path.join(directory, "model.safetensors")
        _make(made, nbytes)
        yield made


def _make(path: str, nbytes: int) -> None:
    rows = max(1, min(nbytes, _TENSOR_BYTES) // 8192)
    count = max(1, nbytes // (rows * 8192))
    header, _ = build_header((f"layers.{k}.weight", "BF16", (rows, 4096)) for k in range(count))
    with open(path, "wb") as file:
        file.write(header)
        for _ in range(count):
            file.write(os.urandom(rows * 8192))  # random: some disks store equal blocks only once
        file.flush()
        os.fsync(file.fileno())


def _run_all(contestants: list[Contestant], task: dict[str, Any], rounds: int, total_bytes: int, bar: Bar) -> list[str]:
    """Run every contestant once in each round; return notes about the conditions of the measurement."""
    draw, warm, is_direct = random.Random(1), False, True
    for _ in range(rounds):
        for one in draw.sample(contestants, len(contestants)):
            if one.failure is None:
                record = _run(task | {"contestant": one.name})
                one.failure = record.get("error")
                if one.failure is None:
                    one.version = record["version"]
                    one.seconds.append(record["seconds"])
                    one.checksum = record["checksum"]
                    warm |= (record["resident_fraction"] or 0.0) > _COLD_FRACTION
                    is_direct &= record["is_direct"]
            bar.advance(total_bytes, total_bytes * rounds * len(contestants))
    notes = []
    for one in contestants:
        if one.checksum not in (None, contestants[1].checksum):
            one.failure = "its tensors are not those that stio loads"
    if warm:
        notes.append(
            "The file could not be evicted, since something maps it: these are rates of memory, not of the disk."
        )
    if not is_direct:
        notes.append("This filesystem has no direct reads: the limit was read through the page cache.")
    return notes


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one process; return its record, or a record with its error."""
    root = str(Path(__file__).resolve().parents[2])
    known = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(known)}
    try:
        done = subprocess.run(  # -P: import no modules from the working directory
            [sys.executable, "-P", "-m", "stio.cli.bench_child", json.dumps(spec)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MAX_RUN_SECONDS,
            env=environment,
            check=False,
        )
        record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {_MAX_RUN_SECONDS} s"}
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return {"error": one_line(lines[-1] if lines else f"exit status {done.returncode}")}
    return record


def _table(contestants: list[Contestant], total_bytes: int) -> Iterator[str]:
    rows = [["", "median", "rate", "fastest", "slowest"]]
    for one in contestants:
        if one.median is not None:
            times = [f"{seconds:.3f} s" for seconds in (one.median, min(one.seconds), max(one.seconds))]
            rows.append(
                [f"{one.label} {one.version}".rstrip(), times[0], rate_text(total_bytes, one.median), *times[1:]]
            )
    yield from map(joined, table(rows, right={1, 2, 3, 4}))
    for one in contestants:
        if one.failure is not None:
            yield f"{one.label}: failed: {one.failure}"


def verdict(contestants: list[Contestant]) -> list[str]:
    """Return the meaning of the runs as sentences. Only runs of the same round are compared."""
    ours = contestants[1]
    if ours.median is None:
        return ["stio could not load this; there is nothing to compare."]
    sentences = []
    for other in contestants:
        if other is ours or other.median is None:
            continue
        ratios = [theirs / own for own, theirs in zip(ours.seconds, other.seconds, strict=True)]
        low, high, rounds = min(ratios), max(ratios), counted(len(ratios), "round")
        if other.name == LIMIT:
            span = f"{low:.0%} to {high:.0%} in {rounds}" if len(ratios) > 1 else rounds
            sentences.append(f"stio reaches {median(ratios):.0%} of the disk's limit ({span}).")
            continue
        span = f"{low:.2f} to {high:.2f} in {rounds}" if len(ratios) > 1 else rounds
        text = f"It is {median(ratios):.2f} times as fast as {other.label} ({span})."
        if low < 1 < high or len(ratios) == 1:
            text += " The rounds do not show which is faster: run more of them, when nothing else uses the machine."
        sentences.append(text)
    if len(contestants) == 2:
        sentences.append(f"{PEER}, with which stio is compared, is not installed.")
    return sentences


def _as_json(
    contestants: list[Contestant], notes: list[str], path: str | None, device: str, total_bytes: int
) -> dict[str, object]:
    return {
        "path": path,
        "device": device,
        "total_bytes": total_bytes,
        "contestants": [
            {
                "name": one.name,
                "label": one.label,
                "version": one.version,
                "median_seconds": one.median,
                "bytes_per_second": None if one.median is None else total_bytes / one.median,
                "seconds": one.seconds,
                "failure": one.failure,
            }
            for one in contestants
        ],
        "verdict": notes,
    }
