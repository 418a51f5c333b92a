"""The bounds that stio has to keep, each with the figure that is held against it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from benchmarks.cases import CAP_BYTES_PER_SECOND
from benchmarks.child import BLOCKING_STEP_SECONDS
from benchmarks.stats import Measured, NoFigure, Runs, difference, plain, ratio

SAFETENSORS = ("safetensors-mmap", "safetensors-pread")
_BUSY_SAFETENSORS = ("safetensors-clone busy", "safetensors-pread busy")


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
        return f"{value:.3f} s"
    return f"{value:.3g}"


def _share_of_cap(runs: Runs) -> Measured:
    """Give stio's rate through the cap, touching included."""
    found = plain(runs, "cold-cap", "stio", "seconds")
    data_bytes = runs.of("cold-cap", "stio")[0]["data_bytes"]
    share = [data_bytes / seconds / CAP_BYTES_PER_SECOND for seconds in (found.value, found.high, found.low)]
    return Measured(share[0], share[1], share[2], found.num_rounds, found.ours)


def _faster(case: str, text: str, ours: str, theirs: str | tuple[str, ...], at_least: float | None = None) -> Bound:
    return Bound(case, text, partial(ratio, case=case, ours=ours, theirs=theirs), at_least=at_least)


def _cost(case: str, text: str, ours: str, theirs: str, key: str, at_most: float) -> Bound:
    measure = partial(ratio, case=case, ours=ours, theirs=theirs, key=key, inverse=True)
    return Bound(case, text, measure, at_most=at_most)


def _seconds(case: str, text: str, entry: str, key: str, at_most: float | None, unit: str = "s") -> Bound:
    return Bound(case, text, partial(plain, case=case, entry=entry, key=key), at_most=at_most, unit=unit)


def _lag(case: str, text: str, entry: str, at_most: float | None) -> Bound:
    measure = partial(difference, case=case, entry=entry, upper="lag.p99", lower="baseline.p99")
    return Bound(case, text, measure, at_most=at_most, unit="ms")


def _held(entry: str, text: str) -> Bound:
    def measure(runs: Runs) -> Measured:
        limits = runs.values("memory", entry, "limit_bytes")
        held = runs.values("memory", entry, "held_peak_bytes")
        if errors := runs.failures("memory", entry):
            raise NoFigure(f"{entry} failed: {errors[0]}")
        limit = max(limits.values())
        worst = max(held.values())
        return Measured(worst / limit, min(held.values()) / limit, worst / limit, len(held), worst, limit, "limit")

    return Bound("memory", text, measure, at_most=1.0)


def _blocked(runs: Runs) -> Measured:
    return difference(runs, "blocked", "stio blocked", "load_seconds", "load_seconds", lower_entry="stio")


BOUNDS: tuple[Bound, ...] = (
    Bound("cold-cap", "share of the cap", _share_of_cap, at_least=0.95),
    _faster("cold-cap", "stio / safetensors' better backend", "stio", SAFETENSORS),
    _faster("cold-cap", "stio / Run:ai", "stio", "runai"),
    _faster("cold-loop", "stio / raw O_DIRECT limit", "stio", "raw", 0.9),
    _faster("cold-loop", "stio / the same limit filling a fresh result", "stio", "raw-whole"),
    _faster("cold-loop", "stio / safetensors' better backend", "stio", SAFETENSORS),
    _faster("cold-loop", "stio / Run:ai", "stio", "runai"),
    _faster("cold", "stio / safetensors' better backend (expected 1.8)", "stio", SAFETENSORS),
    _faster("cold", "stio / Run:ai (expected not behind)", "stio", "runai"),
    _faster("cold", "stio / fastsafetensors", "stio", "fastsafetensors"),
    _faster("cold", "stio / raw O_DIRECT limit", "stio", "raw"),
    _faster("warm", "stio / safetensors mmap, every page touched", "stio", "safetensors-mmap", 0.95),
    _faster("warm", "stio / Run:ai, every page touched", "stio", "runai", 6.0),
    _faster("warm", 'stio memory="copy" / load_file + clone', "stio-copy", "safetensors-clone", 1.0),
    _faster("faults", "stio / safetensors mmap, every page touched", "stio", "safetensors-mmap", 1.4),
    *(
        bound
        for case in ("busy-cold", "busy-warm")
        for bound in (
            _faster(case, "stio busy / stio idle", "stio busy", "stio", 0.7),
            _faster(case, "stio / safetensors, better of clone and pread", "stio busy", _BUSY_SAFETENSORS, 3.0),
            _faster(case, "stio with switch_interval busy / stio idle", "stio-switch busy", "stio"),
            _faster(case, "stio / Run:ai", "stio busy", "runai busy"),
        )
    ),
    _seconds("many-busy", "stio loads 10,000 tensors", "stio busy", "load_seconds", 0.150, "ms"),
    _seconds("many-busy", "the same with switch_interval", "stio-switch busy", "load_seconds", None, "ms"),
    _seconds("many-busy", "safetensors loads them", "safetensors-mmap busy", "load_seconds", None, "ms"),
    _seconds("many-busy", "Run:ai loads them", "runai busy", "load_seconds", None, "ms"),
    _cost("many", "open and list: stio through safetensors", "stio open", "safetensors-mmap open", "seconds", 1.0),
    _cost("many", "load: stio through load_file", "stio load", "safetensors-mmap load", "load_seconds", 0.6),
    *(
        bound
        for case in ("loop-cold", "loop-warm")
        for bound in (
            _lag(case, "p99 lag above the baseline, alone", "stio alone", 0.005),
            _lag(case, "p99 lag above the baseline, busy", "stio busy", 0.025),
            _lag(case, "p99 lag above the baseline, busy, switch_interval 0.5 ms", "stio-switch busy", 0.005),
        )
    ),
    _seconds("loop-open", "p99 lag, alone", "stio alone", "lag.p99", 0.015, "ms"),
    _seconds("loop-open", "p99 lag, busy", "stio busy", "lag.p99", 0.030, "ms"),
    _seconds("loop-open", "p99 lag, busy, switch_interval 0.5 ms", "stio-switch busy", "lag.p99", None, "ms"),
    Bound(
        "blocked",
        "seconds above an idle loop's load (three steps allowed)",
        _blocked,
        at_most=3 * BLOCKING_STEP_SECONDS,
        unit="s",
    ),
    _held("stio-copy", 'memory="copy" through result + budget + 64 MiB'),
    _held("stio-fake", "fake device through result + budget + 64 MiB"),
    _held("stio stream", "stream through largest tensor + budget + 64 MiB"),
    _held("stio stream 64 MiB", "stream, budget 64 MiB, through largest tensor + 128 MiB"),
    _seconds("lazy", 'memory="lazy" loads 100 GB', "stio-lazy", "load_seconds", 1.0),
)
