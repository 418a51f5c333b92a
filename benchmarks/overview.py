"""The charts of README.md, drawn from the recorded figures: `python -m benchmarks.overview`. It measures nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace

from benchmarks import bar_chart, gpu_results, gpu_stages, load, report, save
from benchmarks.runner import HERE
from benchmarks.runs import Runs
from benchmarks.suite import Panel, Suite

_LABELS = {"raw": "limit of the disk", "safetensors-fsync": "safetensors, then fsync"}
_GPU = "gpu-2026-11-27.jsonl"
_GPU_LABELS = {
    "stio": "stio",
    "safetensors-prefetch": "safetensors 0.9.0rc1, prefetch",
    "instanttensor-buffered": "InstantTensor, buffered",
    "raw-bus": "limit: the bus",
    "prefetch-copy": "safetensors 0.9.0rc1, prefetch, then a copy",
    "stio-refresh": "stio.load_into",
}
_GPU_PANELS = (
    Panel("loads", "seconds", "Load 6.1 GB from the page cache to an H200, later loads"),
    Panel("loads", "first_seconds", "The first such load of a process"),
    Panel("busy", "first_seconds", "The first load beside a busy Python thread"),
    Panel("busy", "seconds", "The next load beside it"),
    Panel("refresh", "seconds", "New weights for a module on the device"),
)


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
    return {name: bar_chart.draw_panels(several) for name, several in panels.items()}


def _panel(chosen: Chosen) -> bar_chart.Panel:
    records = report.read_records(HERE / "results" / chosen.results)
    runs = Runs(record for record in records if record.get("entry") in chosen.entries)
    suite = replace(chosen.suite, labels={**chosen.suite.labels, **_LABELS})
    rates = report.rates_of(Panel(chosen.case, "seconds", chosen.text), suite, runs)
    return bar_chart.Panel(chosen.title, rates, [f"{chosen.text}; bar: median, line: all rounds"])


def _gpu_panels() -> list[bar_chart.Panel]:
    records = [record for record in gpu_results.read(HERE / "results" / _GPU) if record["kind"] == "run"]
    suite = replace(gpu_stages.SUITE, labels={**gpu_stages.SUITE.labels, **_GPU_LABELS})
    panels = []
    for panel in _GPU_PANELS:
        busy = " busy" if panel.case == "busy" else ""
        runs = Runs(record for record in records if record["entry"] in {name + busy for name in _GPU_LABELS})
        panels.append(
            bar_chart.Panel(panel.text, report.rates_of(panel, suite, runs), ["bar: median, line: all processes"])
        )
    return panels


if __name__ == "__main__":
    for name, chart in charts().items():
        (HERE / "results" / name).write_text(chart, "utf-8")
        print(HERE / "results" / name)
