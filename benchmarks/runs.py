"""The runs of one benchmark, and the bounds of its figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]

_SHORT_SECONDS = 0.01


class NoFigure(Exception):
    """A figure cannot be had; the message says why."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One figure with what it was made of."""

    value: float  # the ratio or difference of the medians, or the median itself
    low: float  # the smallest of the rounds' own figures
    high: float  # the largest of them
    num_rounds: int  # rounds that entered
    ours: float  # stio's median
    theirs: float | None = None  # the other side's median
    rival: str = ""  # the other side's name
    interval: tuple[float, float] | None = None  # 95 % bootstrap interval of a ratio, rounds resampled in pairs


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


def _dig(record: Record, key: str) -> float | None:
    value: Any = record
    for part in key.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound; without a limit the figure is only reported."""

    case: str  # the case that it is measured in
    text: str  # what the figure is
    measure: Callable[[Runs], Measured]  # makes the figure; raises `NoFigure`
    at_least: float | None = None  # lower limit
    at_most: float | None = None  # upper limit

    unit: str = "x"
    """x (a ratio of two figures), s, ms (figure in seconds, shown in milliseconds), MB; empty: a plain number."""

    def verdict(self, value: float) -> str:
        """Judge a value."""
        if self.at_least is None and self.at_most is None:
            return "reported"
        good = (self.at_least is None or value >= self.at_least) and (self.at_most is None or value <= self.at_most)
        return "met" if good else "missed"

    @property
    def limit_text(self) -> str:
        """Say the limit."""
        if self.at_least is not None:
            return f"at least {show(self.at_least, self.unit)}"
        if self.at_most is not None:
            return f"at most {show(self.at_most, self.unit)}"
        return ""


def show(value: float, unit: str) -> str:
    """Print a figure with its unit."""
    if unit == "ms":
        return f"{value * 1e3:.1f} ms"
    if unit == "MB":
        return f"{value / 1e6:.0f} MB"
    if unit == "s":
        return f"{value:.3f} s" if abs(value) >= _SHORT_SECONDS else f"{value * 1e3:.3f} ms"
    return f"{value:.3g}"
