"""`stio bench [PATH]`: measures how fast this machine loads a checkpoint from its disk, by stio and by safetensors.

Each run is a process of its own (`bench_child.py`). In each round every contestant runs once, in a random order. Before
each run memory is written to and freed, and the files are evicted from the page cache, as in the project's benchmarks.
The results are medians and a verdict in words: contestants are compared within each round, and a difference on which
the rounds do not agree is called noise. The limit is a raw reader of the same bytes, without the page cache. The
tensors of all contestants must have the same checksum.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from math import comb
from pathlib import Path
from statistics import median
from typing import Any, Literal

import click

from stio.cli.output import (
    JSON_OPTION,
    NO_PROGRESS_OPTION,
    PATH,
    Bar,
    CommandError,
    WholeNumber,
    aligned,
    print_result,
    rate_text,
    require_writable,
    width_of,
)
from stio.errors import one_line
from stio.format.header import build_header
from stio.loading.open import open_checkpoint
from stio.runtime.control_groups import room_in_memory
from stio.runtime.limits import parse_size
from stio.runtime.memory import fits
from stio.runtime.svg import Rate, draw_rates, text_bar
from stio.runtime.text import counted, show_bytes, show_seconds
from stio.runtime.urls import is_url, without_secrets

LIMIT = "limit"
PEER = "safetensors"
"""The package that stio is compared with. The benchmarks of the project measure others too."""

_KINDS: Mapping[str, Literal["limit", "ours", "peer"]] = {LIMIT: "limit", "stio": "ours", PEER: "peer"}

_TENSOR_BYTES = 32 << 20
_MARGIN_BYTES = 1 << 30
"""Memory that a run needs beside the tensors."""

_COPIES, _BUFFER_BYTES = 2, 256 << 20
"""Most copies of the tensors that a contestant has in memory, page cache included, and memory for its buffers."""

_MAX_RUN_SECONDS = 900
_COLD_FRACTION = 0.02
"""Part of a file that may still be in the page cache when the file counts as evicted."""

_UNSTEADY = 1.5
"""Ratio of the slowest to the fastest run of the limit that shows another user of the disk."""

_TABLE_WIDTH, _MAX_BAR, _MIN_BAR = 80, 24, 4
"""Columns of the table where the output is no terminal, and the longest bar in it, and what this is at least."""

_EQUAL = 0.05
"""Rates count as equal up to this difference."""

_FEWEST_ROUNDS = 4
"""With fewer rounds, equal contestants often seem different: see `_agree`."""

_SLOW_FIRST_WRITE = 2
"""Ratio of the times of the first and of a later write to memory above which the first one is called slow."""


@dataclass(slots=True)
class Contestant:
    """Measurements of one contestant."""

    name: str
    """Name of its package, or `limit`."""
    version: str = ""
    """Version of its package."""
    seconds: list[float] = field(default_factory=list)
    """Time of each run."""
    checksums: set[int] = field(default_factory=set)
    """Checksums of the tensors of its runs."""
    failure: str | None = None
    """Reason why a run failed."""

    @property
    def label(self) -> str:
        """Name in the table."""
        return "disk's limit" if self.name == LIMIT else self.name

    @property
    def title(self) -> str:
        """Name in the table, with the version."""
        return f"{self.label} {self.version}".rstrip()

    @property
    def median(self) -> float | None:
        """Median time of the runs, None if one failed or there are none."""
        return median(self.seconds) if self.seconds and self.failure is None else None

    def ratios_to(self, other: Contestant) -> list[float]:
        """Return how many times as fast as another contestant it was, round by round."""
        return [theirs / own for own, theirs in zip(self.seconds, other.seconds, strict=True)]


_NO_URLS = (
    "{url}: `stio bench` measures files on a disk: it evicts them from memory, and reads them without stio to find the "
    "limit, and a store allows neither; `stio load {url}` prints the rate of a load, and `stio pull` copies the files "
    "to a disk"
)


@click.command()
@click.argument("path", type=PATH, required=False)
@click.option("--device", default="cpu", show_default=True, help="Device to load to.")
@click.option(
    "--rounds", metavar="N", type=WholeNumber(min=1), default=7, show_default=True, help="Runs of each contestant."
)
@click.option("--size", metavar="SIZE", default="1GB", show_default=True, help="Size of the file to make without PATH.")
@click.option("--chart", metavar="FILE", type=PATH, help="Draw the comparison as .svg.")
@JSON_OPTION
@NO_PROGRESS_OPTION
def bench(
    path: str | None, device: str, rounds: int, size: str, chart: str | None, as_json: bool, no_progress: bool
) -> int:
    """Measure stio on this machine.

    It compares stio with the limit of the disk, and with safetensors if that is installed. PATH is a checkpoint on the
    disk to measure, and no URL: `stio load URL` prints the rate of a load from a store. Without PATH a file is made in
    the working directory, and removed at the end. No file is read from the page cache. Each run takes some seconds in
    addition to its load, to import torch and to write to memory, so all of them take minutes.
    """
    if path is not None and is_url(path):
        raise CommandError(_NO_URLS.format(url=one_line(without_secrets(path))))
    if sys.platform != "linux":
        raise CommandError("only Linux can evict files and read them without the page cache; run it there")
    if chart is not None:
        require_writable(chart, "chart", [".svg"])
    with _file_to_read(path, size) as source:
        with closing(open_checkpoint(source, strict=False)) as opened:
            paths, total_bytes = [one.path for one in opened.files], sum(one.identity.nbytes for one in opened.files)
        if not fits(total_bytes + _MARGIN_BYTES):
            text = f"{one_line(source)}: {show_bytes(total_bytes)} do not fit into memory"
            raise CommandError(f"{text}; measure with one shard of it")
        contestants = [Contestant(name) for name in (LIMIT, "stio", *([PEER] if find_spec(PEER) is not None else []))]
        task = {"source": source, "paths": paths, "device": device}
        with Bar("measuring", is_wanted=not no_progress) as bar:
            notes = _run_all(contestants, task, rounds, total_bytes, bar)
    notes = verdict(contestants) + notes
    if chart is not None:
        title = f"{show_bytes(total_bytes)} from this disk to {device}"
        picture = draw_rates(list(_rates(contestants, total_bytes)), title=title, sentences=notes)
        Path(chart).write_text(picture, encoding="utf-8")
    drawn = [] if chart is None else [f"chart: {one_line(chart)}"]
    found = {**_as_json(contestants, notes, path, device, total_bytes), "chart": chart}
    print_result(found, [*_table(contestants, total_bytes), *notes, *drawn], as_json=as_json)
    return 0 if next(one for one in contestants if one.name == "stio").median is not None else 2


@contextmanager
def _file_to_read(path: str | None, size: str) -> Iterator[str]:
    """Yield the path; without one, the path of a file that exists under `with` only."""
    if path is not None:
        yield path
        return
    try:
        nbytes = parse_size(size)
    except ValueError as error:
        raise CommandError(f"--size: {error}") from error
    if nbytes > shutil.disk_usage(".").free:
        raise CommandError(f"there is no space for {show_bytes(nbytes)} here; use another disk, or a smaller --size")
    if not fits(nbytes + _MARGIN_BYTES):
        raise CommandError(f"{show_bytes(nbytes)} do not fit into memory; use a smaller --size")
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
    draw, warm, is_direct, writes = random.Random(1), False, True, list[list[float]]()
    memory_bytes = max(mmap.PAGESIZE, min(_COPIES * total_bytes + _BUFFER_BYTES, room_in_memory() // 2))
    for _ in range(rounds):
        for one in draw.sample(contestants, len(contestants)):
            if one.failure is None:
                record = _run(task | {"contestant": one.name, "memory_bytes": memory_bytes})
                one.failure = record.get("error")
                if one.failure is None:
                    one.version = record["version"]
                    one.seconds.append(record["seconds"])
                    one.checksums |= {record["checksum"]} - {None}
                    warm |= (record["resident_fraction"] or 0.0) > _COLD_FRACTION
                    is_direct &= record["is_direct"]
                    writes += [record["write_seconds"]] if record["write_seconds"] else []
            bar.advance(total_bytes, total_bytes * rounds * len(contestants))
    notes = []
    expected = {checksum for one in contestants if one.name == "stio" for checksum in one.checksums}
    for one in contestants:
        if one.checksums and one.checksums != expected:
            one.failure = "its tensors are not those that stio loads"
    if warm:
        notes.append(
            "The file could not be evicted, since something maps it: these are rates of memory, not of the disk."
        )
    if not is_direct:
        notes.append("This filesystem has no direct reads: the limit was read through the page cache.")
    if writes:
        notes.append(_memory_note(writes, memory_bytes, total_bytes))
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
    rows = [["", "median", "rate", "fastest", "slowest", ""]]
    shares = [0.0]
    rates = {rate.label: rate.median for rate in _rates(contestants, total_bytes)}
    for one in contestants:
        if one.median is None:
            continue
        times = [f"{seconds:.3f} s" for seconds in (one.median, min(one.seconds), max(one.seconds))]
        rows.append([one.title, times[0], rate_text(total_bytes, one.median), *times[1:], ""])
        shares.append(rates[one.title] / max(rates.values()))
    encoding = getattr(sys.stdout, "encoding", None)
    width = (width_of(sys.stdout) or _TABLE_WIDTH) - max(map(len, aligned(rows, right={1, 2, 3, 4}))) - 2
    for row, share in zip(rows, shares, strict=True):
        row[-1] = text_bar(share, width=min(_MAX_BAR, max(_MIN_BAR, width)), encoding=encoding)
    yield from aligned(rows, right={1, 2, 3, 4})
    for one in contestants:
        if one.failure is not None:
            yield f"{one.label}: failed: {one.failure}"


def _rates(contestants: list[Contestant], total_bytes: int) -> Iterator[Rate]:
    for one in contestants:
        if one.median is not None:
            rates = [total_bytes / max(seconds, 1e-9) for seconds in (one.median, max(one.seconds), min(one.seconds))]
            yield Rate(one.title, rates[0], rates[1], rates[2], _KINDS[one.name])


def verdict(contestants: list[Contestant]) -> list[str]:
    """Return the meaning of the runs as sentences. Only runs of the same round are compared."""
    by_name = {one.name: one for one in contestants}
    ours, limit = by_name["stio"], by_name[LIMIT]
    if ours.median is None:
        return ["stio could not load this; there is nothing to compare."]
    sentences = []
    if limit.median is not None:
        shares = ours.ratios_to(limit)
        share, spread = median(shares), f"{min(shares):.0%} to {max(shares):.0%} in {counted(len(shares), 'round')}"
        reaches = f"reaches {share:.0%} of the disk's limit" if share <= 1 - _EQUAL else "reads as fast as a raw reader"
        sentences.append(f"stio {reaches} ({spread}).")
    peer = by_name.get(PEER)
    if peer is None or peer.median is None:
        sentences.append(f"There is no peer to compare it with: {PEER} is not installed, or does not work.")
    else:
        sentences.append(_compared(ours, peer))
        if len(ours.seconds) < _FEWEST_ROUNDS:
            sentences.append(f"Fewer than {_FEWEST_ROUNDS} rounds show no difference reliably: run more rounds.")
    if limit.median is not None and (swing := max(limit.seconds) / min(limit.seconds)) > _UNSTEADY:
        sentences.append(
            f"The disk's own rate changed by a factor of {swing:.1f}: run it again when nothing else uses the disk."
        )
    return sentences


def _compared(ours: Contestant, peer: Contestant) -> str:
    """Compare stio with a peer, and say whether the rounds agree on which is faster."""
    ratios = ours.ratios_to(peer)
    ratio, rounds = median(ratios), counted(len(ratios), "round")
    spread = f"({min(ratios):.2f} to {max(ratios):.2f} in {rounds})"
    if abs(ratio - 1) <= _EQUAL:
        return f"It is as fast as {peer.label} {spread}."
    if len(ratios) >= _FEWEST_ROUNDS and not _agree(ratios):
        return f"Its difference from {peer.label} is within the noise: {ratio:.2f} times as fast {spread}."
    if ratio > 1:
        return f"It is {ratio:.2f} times as fast as {peer.label} {spread}."
    spread = f"({1 / max(ratios):.2f} to {1 / min(ratios):.2f} in {rounds})"
    return f"{peer.label} is {1 / ratio:.2f} times as fast as stio here {spread}."


def _agree(ratios: Sequence[float]) -> bool:
    """Return whether so many rounds agree that equal contestants would do so in one of eight measurements at most.

    This is the sign test: it allows one exception in 7 rounds, and 2 in 10.
    """
    faster = sum(ratio > 1 for ratio in ratios)
    exceptions = min(faster, len(ratios) - faster)
    return 16 * sum(comb(len(ratios), k) for k in range(exceptions + 1)) <= 1 << len(ratios)


def _memory_note(writes: list[list[float]], memory_bytes: int, total_bytes: int) -> str:
    """Say how fast memory is at its first write and at a later one, by the run in which they differ most."""
    first, later = max(writes, key=lambda pair: pair[0] / pair[1])
    text = f"First write to memory: {rate_text(memory_bytes, first)}; later ones: {rate_text(memory_bytes, later)}."
    if first <= _SLOW_FIRST_WRITE * later:
        return f"{text} So new memory delays no load here."
    lost = (first - later) * total_bytes / memory_bytes
    return (
        f"{text} The host of a virtual machine provides memory at the first write: a load into new memory takes up to "
        f"{show_seconds(lost)} longer than these."
    )


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
