"""Medians, paired ratios and their spread, over the records of a run. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

Record = dict[str, Any]
_RESAMPLES = 10_000


class NoFigure(Exception):
    """A figure cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure with what it was made of."""

    value: float
    """The ratio or difference of the medians, or the median itself."""

    low: float
    """The smallest of the rounds' own figures."""

    high: float
    """The largest of them."""

    num_rounds: int
    """Rounds that entered."""

    ours: float
    """stio's median."""

    theirs: float | None = None
    """The other side's median."""

    rival: str = ""
    """The other side's name."""

    interval: tuple[float, float] | None = None
    """95 % bootstrap interval of a ratio, rounds resampled in pairs."""


class Runs:
    """The runs among the records of one benchmark."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = [record for record in records if record.get("kind") == "run"]

    def names(self, case: str) -> list[str]:
        """Name the entries of `case`, as they first came."""
        return list(dict.fromkeys(record["entry"] for record in self.records if record["case"] == case))

    def of(self, case: str, entry: str) -> list[Record]:
        """Give all runs of an entry."""
        return [record for record in self.records if record["case"] == case and record["entry"] == entry]

    def values(self, case: str, entry: str, key: str) -> dict[int, float]:
        """Give the figure `key` ("lag.p99" goes into a nested record) of each round that succeeded.

        Raises:
            NoFigure: There is none.
        """
        runs = self.of(case, entry)
        found = {run["round"]: _dig(run, key) for run in runs if not run.get("error")}
        good = {number: value for number, value in found.items() if value is not None}
        if not good:
            errors = [run["error"] for run in runs if run.get("error")]
            raise NoFigure(f"{entry} failed: {errors[0]}" if errors else f"{entry} did not run")
        return good

    def failures(self, case: str, entry: str) -> list[str]:
        """Give the errors of an entry's runs."""
        return [run["error"] for run in self.of(case, entry) if run.get("error")]


def plain(runs: Runs, case: str, entry: str, key: str) -> Measured:
    """Give the median of a figure."""
    values = list(runs.values(case, entry, key).values())
    return Measured(median(values), min(values), max(values), len(values), median(values))


def ratio(
    runs: Runs, case: str, ours: str, theirs: str | tuple[str, ...], *, key: str = "seconds", inverse: bool = False
) -> Measured:
    """Compare stio with a peer, with the best of several where more are named.

    Args:
        runs: The runs.
        case: The case.
        ours: stio's entry.
        theirs: The peer's entry, or the entries of which the fastest counts.
        key: The figure, the smaller the better.
        inverse: Give ours through theirs, instead of theirs through ours (how many times as fast).

    Raises:
        NoFigure: One side has none.
    """
    mine = runs.values(case, ours, key)
    rival, other = _best(runs, case, (theirs,) if isinstance(theirs, str) else theirs, key)
    shared = sorted(mine.keys() & other.keys())
    if not shared:
        raise NoFigure(f"{ours} and {rival} share no round")
    a, b = np.array([mine[number] for number in shared]), np.array([other[number] for number in shared])
    upper, lower = (a, b) if inverse else (b, a)
    paired = upper / lower
    return Measured(
        value=float(np.median(upper) / np.median(lower)),
        low=float(paired.min()),
        high=float(paired.max()),
        num_rounds=len(shared),
        ours=float(np.median(a)),
        theirs=float(np.median(b)),
        rival=rival,
        interval=_bootstrap(upper, lower) if len(shared) >= 5 else None,
    )


def difference(runs: Runs, case: str, entry: str, upper: str, lower: str, *, lower_entry: str = "") -> Measured:
    """Give the median of a figure less another one: of the same run, or of another entry's median."""
    high = runs.values(case, entry, upper)
    if lower_entry:
        base = median(runs.values(case, lower_entry, lower).values())
        low = dict.fromkeys(high, base)
    else:
        low = runs.values(case, entry, lower)
    each = [high[number] - low[number] for number in high if number in low]
    return Measured(
        median(each), min(each), max(each), len(each), median(high.values()), median(low.values()), "baseline"
    )


def _best(runs: Runs, case: str, entries: tuple[str, ...], key: str) -> tuple[str, dict[int, float]]:
    found = {}
    reasons = []
    for entry in entries:
        try:
            found[entry] = runs.values(case, entry, key)
        except NoFigure as error:
            reasons.append(str(error))
    if not found:
        raise NoFigure("; ".join(reasons))
    name = min(found, key=lambda entry: median(found[entry].values()))
    return name, found[name]


def _bootstrap(upper: np.ndarray, lower: np.ndarray) -> tuple[float, float]:
    picks = np.random.default_rng(0).integers(0, len(upper), (_RESAMPLES, len(upper)))
    ratios = np.median(upper[picks], axis=1) / np.median(lower[picks], axis=1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)


def _dig(record: Record, key: str) -> float | None:
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value is None else float(value)
