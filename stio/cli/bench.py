"""`stio bench [PATH]`: how fast this machine reads a checkpoint from its disk, stio beside what else is installed.

Small and honest: one process a run (`bench_child.py`), rounds in which every contestant runs once in an order drawn
anew, each run from a file that was evicted before, medians, and a verdict in words. The limit is a raw reader of the
same bytes past the page cache. Tensors of all contestants must come to one checksum.
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
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal

import click

from stio.cli.output import PATH, Bar, CommandError, aligned, one_line, rate_text, require_writable
from stio.format.header_build import build_header
from stio.format.sharding import parse_size
from stio.loading.open import OpenOptions, open_checkpoint
from stio.runtime.bar_chart import Rate, draw_rates, text_bar
from stio.runtime.memory import fits
from stio.runtime.spans import show_bytes

__all__ = ["bench", "verdict"]

LIMIT = "limit"
PEERS = {
    "safetensors": "safetensors",
    "runai_model_streamer": "runai-model-streamer",
    "fastsafetensors": "fastsafetensors",
}
"""Packages that load the format too: module, and name of the distribution."""

_TENSOR_BYTES = 32 << 20
_RUN_SECONDS = 900
_COLD_FRACTION = 0.02
_RESTLESS = 1.5
"""From this ratio of its slowest to its fastest run on, the limit itself says that something else uses the disk."""

_ALIKE = 0.05


@dataclass(slots=True)
class Contestant:
    """What was measured of one."""

    name: str
    """Its module, or `limit`."""
    label: str
    """Its name for people."""
    version: str = ""
    """Of its package."""
    seconds: list[float] = field(default_factory=list)
    """Of each run."""
    checksums: set[int] = field(default_factory=set)
    """Of each run's tensors."""
    failure: str | None = None
    """Why a run came to nothing."""

    @property
    def median(self) -> float | None:
        """Median of the runs, None if one failed or there are none."""
        return median(self.seconds) if self.seconds and self.failure is None else None


@click.command()
@click.argument("path", type=PATH, required=False)
@click.option("--device", default="cpu", show_default=True, help="Where stio and its peers load to.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True, help="Runs of each contestant.")
@click.option("--size", metavar="SIZE", default="1GB", show_default=True, help="Of the file that is made without PATH.")
@click.option("--chart", metavar="FILE", type=PATH, help="Draw the comparison, as .svg.")
@click.option("--json", "as_json", is_flag=True, help="Write JSON: every run.")
@click.option("--no-progress", is_flag=True, help="Draw no bar. Pipes get none anyway.")
def bench(
    path: str | None, device: str, rounds: int, size: str, chart: str | None, as_json: bool, no_progress: bool
) -> int:
    """Measure stio on this machine.

    Beside the disk's limit, and what else is installed that loads safetensors. PATH is a checkpoint on the disk in
    question; without it a file is made in the working directory and removed after. All is read cold. Peers that take
    part if they are installed: safetensors, runai-model-streamer, fastsafetensors. A run takes some seconds beside its
    reading, most of them torch's import.
    """
    if sys.platform != "linux":
        raise CommandError("files can be evicted and read past the page cache on Linux only; run it there")
    if chart is not None:
        require_writable(chart, "chart", [".svg"])
    with _file_to_read(path, size) as source:
        paths, total_bytes = _files_of(source)
        if not fits(total_bytes + (1 << 30)):
            text = f"{one_line(source)}: {show_bytes(total_bytes)} do not fit into memory"
            raise CommandError(f"{text}; measure with one shard of it")
        contestants = [Contestant(name, label) for name, label in _present()]
        with Bar("measuring", is_wanted=not no_progress) as bar:
            notes = _run_all(
                contestants, {"source": source, "paths": paths, "device": device}, rounds, total_bytes, bar
            )
    notes += verdict(contestants)
    if chart is not None:
        title = f"{show_bytes(total_bytes)} from this disk to {device}"
        picture = draw_rates(list(_rates(contestants, total_bytes)), title=title, sentences=notes)
        Path(chart).write_text(picture, encoding="utf-8")
    if as_json:
        click.echo(json.dumps({**_as_json(contestants, notes, path, device, total_bytes), "chart": chart}, indent=2))
    else:
        click.echo("\n".join([*_table(contestants, total_bytes), *notes]))
        if chart is not None:
            click.echo(f"chart: {one_line(chart)}")
    return 0 if next(one for one in contestants if one.name == "stio").median is not None else 2


def _present() -> Iterator[tuple[str, str]]:
    yield LIMIT, "disk's limit"
    yield "stio", "stio"
    yield from ((module, distribution) for module, distribution in PEERS.items() if find_spec(module) is not None)


@contextmanager
def _file_to_read(path: str | None, size: str) -> Iterator[str]:
    """Yield the path, or that of a file made for the block under `with`."""
    if path is not None:
        yield path
        return
    try:
        nbytes = parse_size(size)
    except ValueError as error:
        raise CommandError(f"--size: {error}") from error
    if nbytes > shutil.disk_usage(".").free:
        raise CommandError(
            f"there is no room for {show_bytes(nbytes)} here; go to another disk, or take a smaller --size"
        )
    with tempfile.TemporaryDirectory(prefix="stio-bench-", dir=".") as folder:
        made = os.path.join(folder, "model.safetensors")
        _make(made, nbytes)
        yield made


def _make(path: str, nbytes: int) -> None:
    rows = max(1, min(nbytes, _TENSOR_BYTES) // 8192)
    count = max(1, nbytes // (rows * 8192))
    header, _ = build_header((f"layers.{k}.weight", "BF16", (rows, 4096)) for k in range(count))
    with open(path, "wb") as file:
        file.write(header)
        for _ in range(count):
            file.write(os.urandom(rows * 8192))  # fresh for each: a disk that finds equal blocks stores them once
        file.flush()
        os.fsync(file.fileno())


def _files_of(source: str) -> tuple[list[str], int]:
    opened = open_checkpoint(source, OpenOptions(strict=False))
    try:
        return [file.path for file in opened.files], sum(file.identity.nbytes for file in opened.files)
    finally:
        opened.close()


def _run_all(contestants: list[Contestant], task: dict[str, Any], rounds: int, total_bytes: int, bar: Bar) -> list[str]:
    """Run every contestant once a round; return what is to be said of the circumstances."""
    draw, warm, is_direct = random.Random(1), False, True
    for _ in range(rounds):
        for one in draw.sample(contestants, len(contestants)):
            if one.failure is None:
                record = _run({**task, "contestant": one.name, "package": PEERS.get(one.name, "")})
                one.failure = record.get("error")
                if one.failure is None:
                    one.version = record["version"]
                    one.seconds.append(record["seconds"])
                    one.checksums |= {record["checksum"]} - {None}
                    warm |= (record["resident_fraction"] or 0.0) > _COLD_FRACTION
                    is_direct &= record["is_direct"]
            bar.advance(total_bytes, total_bytes * rounds * len(contestants))
    notes = []
    expected = {checksum for one in contestants if one.name == "stio" for checksum in one.checksums}
    for one in contestants:
        if one.checksums and one.checksums != expected:
            one.failure = "its tensors are not those that stio loads"
    if warm:
        notes.append("The file could not be evicted, something maps it: these are rates of memory, not of the disk.")
    if not is_direct:
        notes.append("This filesystem has no direct reads: its limit was read through the page cache.")
    return notes


def _run(spec: dict[str, Any]) -> dict[str, Any]:
    """Run one process; whatever becomes of it is a record."""
    home = str(Path(__file__).resolve().parents[1])
    known = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(known), "RUNAI_STREAMER_LOG_LEVEL": "ERROR"}
    try:
        done = subprocess.run(  # -P: the working directory is the user's, not a place for modules
            [sys.executable, "-P", "-m", "stio.cli.bench_child", json.dumps(spec)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_RUN_SECONDS,
            env=environment,
            check=False,
        )
        record: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {_RUN_SECONDS} s"}
    except (IndexError, ValueError):
        lines = done.stderr.strip().splitlines()
        return {"error": one_line(lines[-1] if lines else f"exit status {done.returncode}")}
    return record


def _table(contestants: list[Contestant], total_bytes: int) -> Iterator[str]:
    rows = [["", "median", "rate", "fastest", "slowest", ""]]
    rates = {rate.label: rate.median for rate in _rates(contestants, total_bytes)}
    encoding = getattr(sys.stdout, "encoding", None)
    for one in contestants:
        if one.median is None:
            continue
        times = [f"{seconds:.3f} s" for seconds in (one.median, min(one.seconds), max(one.seconds))]
        drawn = text_bar(rates[_titled(one)] / max(rates.values()), encoding=encoding)
        rows.append([_titled(one), times[0], rate_text(total_bytes, one.median), *times[1:], drawn])
    yield from aligned(rows, right={1, 2, 3, 4})
    for one in contestants:
        if one.failure is not None:
            yield f"{one.label}: failed: {one.failure}"


def _titled(one: Contestant) -> str:
    return f"{one.label} {one.version}".rstrip()


def _rates(contestants: list[Contestant], total_bytes: int) -> Iterator[Rate]:
    for one in contestants:
        if one.median is not None:
            kind: Literal["limit", "ours", "peer"] = "peer" if one.name in PEERS else "limit"
            if one.name == "stio":
                kind = "ours"
            slow, median, fast = (
                total_bytes / max(seconds, 1e-9) for seconds in (max(one.seconds), one.median, min(one.seconds))
            )
            yield Rate(_titled(one), median, slow, fast, kind)


def verdict(contestants: list[Contestant]) -> list[str]:
    """Return what the medians say, as sentences."""
    by_name = {one.name: one for one in contestants}
    ours, limit = by_name["stio"], by_name[LIMIT]
    if ours.median is None:
        return ["stio could not load this; there is nothing to compare."]
    said = []
    if limit.median is not None:
        share = limit.median / ours.median
        reaches = f"reaches {share:.0%} of the disk's limit" if share <= 1 - _ALIKE else "reads as fast as a raw reader"
        said.append(f"stio {reaches}.")
    peers = [(seconds, one.name) for one in contestants if one.name in PEERS and (seconds := one.median) is not None]
    if peers:
        said += _beside(ours, by_name[min(peers)[1]], are_more=len(peers) > 1)
    else:
        said.append(f"There is no peer to compare it with: of {', '.join(PEERS.values())} none is installed and works.")
    if limit.median is not None and (swing := max(limit.seconds) / min(limit.seconds)) > _RESTLESS:
        said.append(f"The disk's own rate changed by a factor of {swing:.1f} meanwhile: run it again in a quiet hour.")
    return said


def _beside(ours: Contestant, best: Contestant, *, are_more: bool) -> Iterator[str]:
    """Say how stio does beside the best of its peers, and whether the runs bear that out."""
    assert ours.median is not None
    assert best.median is not None
    ratio, others = best.median / ours.median, ", the fastest of the others" if are_more else ""
    if abs(ratio - 1) <= _ALIKE:
        yield f"It is as fast as {best.label}{others}."
        return
    if ratio > 1:
        yield f"It is {ratio:.2g} times as fast as {best.label}{others}."
    else:
        yield f"{best.label} is {1 / ratio:.2g} times as fast as stio here."
    if min(len(ours.seconds), len(best.seconds)) < 2:
        yield "One round says little: take more to be sure."
    elif max(min(ours.seconds), min(best.seconds)) <= min(max(ours.seconds), max(best.seconds)):
        yield "Their runs overlap: take more rounds to be sure."


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
