"""The charts of README.md, drawn from the recorded figures: `python -m benchmarks.overview`. It measures nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from benchmarks import gpu_results, load, report, save
from benchmarks.runner import HERE
from benchmarks.runs import Record, Runs
from benchmarks.suite import Panel, Suite
from stio.runtime import svg

_LABELS = {"raw": "limit of the disk", "safetensors-fsync": "safetensors, then fsync"}
_GPU = "gpu-2026-11-26.jsonl"
_SAFETENSORS_8, _SAFETENSORS_9 = "safetensors 0.8.0", "safetensors 0.9.0rc1, prefetch"
_CONTESTANTS = {"stio": "stio", "st8": _SAFETENSORS_8, "st9": _SAFETENSORS_9, "itbuf": "InstantTensor, buffered"}
"""Of the contest on a GPU, without a prototype and without other settings of stio."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """A panel, and the contestants of it that the chart shows."""

    title: str
    suite: Suite
    results: str  # the file of its figures
    case: str
    entries: tuple[str, ...]
    text: str  # what was timed


_CHOSEN = (
    Chosen(
        "Load 1.7 GB from a disk of 3.2 GB/s, two cores",
        load.SUITE,
        "load-2026-11-24.jsonl",
        "cold",
        ("stio", "safetensors-pread", "safetensors-mmap", "runai", "fastsafetensors", "raw"),
        "every page used",
    ),
    Chosen(
        "The same, beside a busy Python thread",
        load.SUITE,
        "load-2026-11-24.jsonl",
        "busy-cold",
        ("stio busy", "safetensors-pread busy", "safetensors-clone busy", "runai busy"),
        "every page used",
    ),
    Chosen(
        "Load 1.7 GB from the page cache, two cores",
        load.SUITE,
        "load-2026-11-24.jsonl",
        "warm",
        ("stio", "safetensors-mmap", "safetensors-pread", "runai"),
        "every page used",
    ),
    Chosen(
        "Save 1.7 GB, synced to the disk, two cores",
        save.SUITE,
        "save.jsonl",
        "durable",
        ("stio", "safetensors-fsync", "dcp", "raw"),
        "until it is durable",
    ),
)


def charts() -> dict[str, str]:
    """Return each chart as SVG, by the name of its file in results/."""
    panels = {"overview.svg": [_panel(chosen) for chosen in _CHOSEN], "overview-gpu.svg": _gpu_panels()}
    return {name: svg.draw_panels(several) for name, several in panels.items()}


def _panel(chosen: Chosen) -> svg.Panel:
    records = report.read_records(HERE / "results" / chosen.results)
    runs = Runs(record for record in records if record.get("entry") in chosen.entries)
    suite = replace(chosen.suite, labels={**chosen.suite.labels, **_LABELS})
    rates = report.rates_of(Panel(chosen.case, "seconds", chosen.text), suite, runs)
    return svg.Panel(chosen.title, rates, [f"{chosen.text}; bar: median, line: all rounds"])


def _gpu_panels() -> list[svg.Panel]:
    records = gpu_results.read(HERE / "results" / _GPU)
    (num_bytes,) = {record["bytes"] for record in records if record.get("step") == "made"}
    idle, busy = (
        [record for record in records if record.get("where") == "page cache" and record["busy"] is is_busy]
        for is_busy in (False, True)
    )
    bus = [record["rate"] for record in records if record.get("case") == "swap" and record["entry"] == "raw-bus"]
    limit = svg.Rate("limit: the bus", median(bus), min(bus), max(bus), "limit")
    panels = {
        "Load 6.1 GB from the page cache to an H200, later loads": [limit, *_rates(idle, slice(1, None), num_bytes)],
        "The first such load of a process": _rates(idle, slice(1), num_bytes),
        "Such loads beside a busy Python thread": _rates(busy, slice(None), num_bytes),
    }
    return [svg.Panel(title, rates, ["bar: median, line: all loads"]) for title, rates in panels.items()]


def _rates(records: list[Record], loads: slice, num_bytes: int) -> list[svg.Rate]:
    """Return the rates of some loads of each process, the fastest contestant first."""
    rates = []
    for name, label in _CONTESTANTS.items():
        times = [seconds for record in records if record["name"] == name for seconds in record["times"][loads]]
        if found := [num_bytes / seconds for seconds in times]:
            kind: Literal["ours", "peer"] = "ours" if name == "stio" else "peer"
            rates.append(svg.Rate(label, median(found), min(found), max(found), kind))
    return sorted(rates, key=lambda rate: rate.median, reverse=True)


if __name__ == "__main__":
    for name, chart in charts().items():
        (HERE / "results" / name).write_text(chart, "utf-8")
        print(HERE / "results" / name)
