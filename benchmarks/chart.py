"""The chart: rates of the load cases side by side, one panel a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.cases import CASES
from benchmarks.contestants import CONTESTANTS
from benchmarks.stats import NoFigure, Runs, plain

_PANELS = ("cold-cap", "cold-loop", "cold", "warm", "faults", "busy-cold", "busy-warm")
_OURS, _LIMIT, _PEER = "#c2410c", "#9ca3af", "#475569"


def draw(records: list[dict[str, Any]], path: Path) -> bool:
    """Draw the medians, with the spread as error bars, to `path` (SVG); False where there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "stio", "svg.fonttype": "none"}
    runs = Runs(records)
    panels = [(case, bars) for case in CASES if case.name in _PANELS and (bars := _bars(case.name, runs))]
    if not panels:
        return False
    columns = 2
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(12, 2.6 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (case, bars) in zip(axes.flat, panels, strict=False):
        labels, rates, errors, colors = zip(*bars, strict=True)
        lower, upper = zip(*errors, strict=True)
        axis.barh(labels, rates, xerr=(lower, upper), color=colors, ecolor="#111827", capsize=2)
        axis.invert_yaxis()
        axis.set_title(case.title, fontsize=10)
        axis.set_xlabel("GB/s, every page touched; bar: median, line: all rounds", fontsize=8)
        axis.tick_params(labelsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _bars(case: str, runs: Runs) -> list[tuple[str, float, tuple[float, float], str]]:
    bars = []
    for entry in runs.names(case):
        try:
            seconds = plain(runs, case, entry, "seconds")
        except NoFigure:
            continue
        run = runs.of(case, entry)[0]
        name = entry.removesuffix(" busy")
        label = CONTESTANTS[name].label + (" (busy)" if entry.endswith(" busy") else "")
        color = _OURS if entry.startswith("stio") else _LIMIT if entry.startswith("raw") else _PEER
        rate = run["data_bytes"] / seconds.value / 1e9
        slow, fast = run["data_bytes"] / seconds.high / 1e9, run["data_bytes"] / seconds.low / 1e9
        bars.append((label, rate, (rate - slow, fast - rate), color))
    return sorted(bars, key=lambda bar: bar[1], reverse=True)
