"""A bound, its verdict, and the ways to make one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.stats import Measured, NoFigure, Runs, difference, plain, ratio

_SHORT_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound; without a limit the figure is only reported."""

    case: str
    """The case that it is measured in."""

    text: str
    """What the figure is."""

    measure: Callable[[Runs], Measured]
    """Makes the figure; raises `NoFigure`."""

    at_least: float | None = None
    """Lower limit."""

    at_most: float | None = None
    """Upper limit."""

    unit: str = "x"
    """x (a ratio), s, ms (figure in seconds, shown in milliseconds), MB."""

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


def faster(case: str, text: str, ours: str, theirs: str | tuple[str, ...], at_least: float | None = None) -> Bound:
    """How many times as fast ours is as theirs, of several the fastest."""
    return Bound(case, text, partial(ratio, case=case, ours=ours, theirs=theirs), at_least=at_least)


def cost(
    case: str, text: str, ours: str, theirs: str | tuple[str, ...], key: str, at_most: float | None = None
) -> Bound:
    """Our figure `key` through theirs, of several the smallest."""
    measure = partial(ratio, case=case, ours=ours, theirs=theirs, key=key, inverse=True)
    return Bound(case, text, measure, at_most=at_most)


def seconds(case: str, text: str, entry: str, key: str, at_most: float | None, unit: str = "s") -> Bound:
    """The figure `key` itself."""
    return Bound(case, text, partial(plain, case=case, entry=entry, key=key), at_most=at_most, unit=unit)


def lag(case: str, text: str, entry: str, at_most: float | None) -> Bound:
    """The loop's p99 lag less the baseline's of the same run."""
    measure = partial(difference, case=case, entry=entry, upper="lag.p99", lower="baseline.p99")
    return Bound(case, text, measure, at_most=at_most, unit="ms")


def held(entry: str, text: str) -> Bound:
    """The most memory that was held in the case `memory`, through what the entry may hold."""

    def measure(runs: Runs) -> Measured:
        limits = runs.values("memory", entry, "limit_bytes")
        held = runs.values("memory", entry, "held_peak_bytes")
        if errors := runs.failures("memory", entry):
            raise NoFigure(f"{entry} failed: {errors[0]}")
        limit = max(limits.values())
        worst = max(held.values())
        return Measured(worst / limit, min(held.values()) / limit, worst / limit, len(held), worst, limit, "limit")

    return Bound("memory", text, measure, at_most=1.0)
