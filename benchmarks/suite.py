"""What makes one benchmark: its cases and bounds, how they are run, and how they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from benchmarks.cases import Case
from benchmarks.processes import Record, Settings
from benchmarks.stats import Runs
from benchmarks.verdicts import Bound


@dataclass(frozen=True, slots=True)
class Columns:
    """A table of one kind of case, the contestant's column aside."""

    head: tuple[str, ...]
    """Titles."""

    row: Callable[[str, str, Runs], list[str]]
    """Gives the cells of a case's entry; raises `NoFigure` where nothing is there."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of the chart: rates of a case's contestants."""

    case: str
    """The case."""

    key: str
    """The seconds that make the rate."""

    text: str
    """Below the axis."""


@dataclass(frozen=True, slots=True)
class Suite:
    """One benchmark."""

    name: str
    """Names the module and the files of its results."""

    cases: tuple[Case, ...]
    """What can be run."""

    bounds: tuple[Bound, ...]
    """What is judged."""

    labels: Mapping[str, str]
    """Contestants, as people call them."""

    run: Callable[[list[Case], Settings, Callable[[Record], None]], None]
    """Runs cases, and hands out each record as it comes."""

    columns: Callable[[Case], Columns]
    """The table of a case."""

    panels: tuple[Panel, ...]
    """The chart."""

    markers: tuple[str, str]
    """Between them stand the tables, in README.md."""

    picture: str
    """What the chart shows, for those who cannot see it."""

    size_bytes: int = 1_700_000_000
    """Size of the model in a full run."""

    quick_size_bytes: int = 400_000_000
    """Its size in a quick one."""

    describe: Callable[[], Record] = dict
    """Says more about the machine than `machine.describe`."""
