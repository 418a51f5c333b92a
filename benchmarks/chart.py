"""The chart: rates of the contestants side by side, one panel a case."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.stats import NoFigure, Runs, plain
from benchmarks.suite import Panel, Suite

_LIMITS = ("raw", "memcpy")
_OURS, _LIMIT, _PEER = "#c2410c", "#9ca3af", "#475569"


def draw(records: list[dict[str, Any]], suite: Suite, path: Path) -> bool:
    """Draw the medians, with the spread as error bars, to `path` (SVG); False where there is nothing to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams |= {"svg.hashsalt": "stio", "svg.fonttype": "none"}
    runs = Runs(records)
    titles = {case.name: case.title for case in suite.cases}
    panels = [(panel, bars) for panel in suite.panels if (bars := _bars(panel, suite, runs))]
    if not panels:
        return False
    columns = 2
    rows = -(-len(panels) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(12, 2.6 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, (panel, bars) in zip(axes.flat, panels, strict=False):
        labels, rates, errors, colors = zip(*bars, strict=True)
        lower, upper = zip(*errors, strict=True)
        axis.barh(labels, rates, xerr=(lower, upper), color=colors, ecolor="#111827", capsize=2)
        axis.invert_yaxis()
        axis.set_title(titles[panel.case], fontsize=10)
        axis.set_xlabel(f"{panel.text}; bar: median, line: all rounds", fontsize=8)
        axis.tick_params(labelsize=8)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
    return True


def _bars(panel: Panel, suite: Suite, runs: Runs) -> list[tuple[str, float, tuple[float, float], str]]:
    bars = []
    contestants = {
        entry.name: entry.contestant for case in suite.cases if case.name == panel.case for entry in case.entries
    }
    for entry in runs.names(panel.case):
        try:
            seconds = plain(runs, panel.case, entry, panel.key)
        except NoFigure:
            continue
        run = runs.of(panel.case, entry)[0]
        label = suite.labels[contestants[entry]] + (" (busy)" if entry.endswith(" busy") else "")
        color = _OURS if entry.startswith("stio") else _LIMIT if entry.startswith(_LIMITS) else _PEER
        rate = run["data_bytes"] / seconds.value / 1e9
        slow, fast = run["data_bytes"] / seconds.high / 1e9, run["data_bytes"] / seconds.low / 1e9
        bars.append((label, rate, (rate - slow, fast - rate), color))
    return sorted(bars, key=lambda bar: bar[1], reverse=True)
