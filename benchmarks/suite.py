"""What makes one benchmark: its cases with their entries, how a case is run, its bounds, tables and chart."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.files import Layout
from benchmarks.runs import Bound, Record, Runs

MEBI = 1 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One contestant's part in a case."""

    contestant: str  # a key of the benchmark's labels
    key: str = ""  # how the figures name it; the contestant itself where empty
    task: str = "load"  # what its process does, see the benchmark's tasks
    busy: bool = False  # beside a busy pure-Python thread
    options: dict[str, Any] = field(default_factory=dict)  # keywords for the contestant
    rounds: int | None = None  # at most so many rounds
    limit_bytes: Callable[[Layout], int] | None = None  # memory that the run may hold, enforced by the kernel
    behind: str = ""  # the entry in whose process it runs, after that one; in one of its own where empty
    limit_seconds: float | None = None  # its process is killed after so long

    @property
    def name(self) -> str:
        """Its name inside the case."""
        return self.key or self.contestant


@dataclass(frozen=True, slots=True)
class Case:
    """One situation, its contestants interleaved round by round."""

    name: str  # for `--cases`
    title: str  # for the table
    entries: tuple[Entry, ...]
    rounds: int  # of a full run; a quick one has one
    layout: str = "model"  # which tensors
    state: str = "cold"  # of the files: cold, warm (large folios), faults (small folios); compat: what is compared
    place: str = "disk"  # disk, loop (a loop mount) or tmpfs
    cap_bytes_per_second: int | None = None  # cap on the reads from the disk
    watch_memory: bool = False  # measure the memory of each run by a control group
    touch: str = "page"  # see `meters.touch_all`
    not_quick: frozenset[str] = frozenset()  # entries that a quick run leaves out: none that a bound needs


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line decides."""

    directory: Path  # where the files are made
    size_bytes: int  # of the model
    prime_bytes: int  # memory to touch and free before each run
    rounds: int | None  # of every case, in place of the case's own number
    quick: bool  # one round, without the entries that no bound needs
    timeout_seconds: float = 180.0  # for one run
    seed: int = 1  # of the order inside the rounds

    def entries(self, case: Case) -> list[Entry]:
        """Give the entries that take part: a quick run leaves some out."""
        return [entry for entry in case.entries if not (self.quick and entry.name in case.not_quick)]


Measure = Callable[[Entry, int, bool], Record]
"""Runs an entry in a fresh process: of the entry, the number of the round, and whether to verify every byte."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A table of one kind of case, the contestant's column aside."""

    head: tuple[str, ...]
    row: Callable[[str, str, Runs], list[str]]
    """Gives the cells of a case's entry; raises `NoFigure` where nothing is there."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel of the chart: rates of a case's contestants."""

    case: str
    key: str  # the seconds that make the rate
    text: str  # what was timed


@dataclass(frozen=True, slots=True)
class Suite:
    """One benchmark."""

    name: str  # names the module and the files of its results
    cases: tuple[Case, ...]
    bounds: tuple[Bound, ...]
    labels: Mapping[str, str]  # contestants, as the tables name them
    prepared: Callable[[Case, Settings], AbstractContextManager[Measure]] | None  # makes what a case needs
    columns: Callable[[Case], Columns]
    panels: tuple[Panel, ...] = ()
    picture: str = ""  # what the chart shows, as text
    size_bytes: int = 1_700_000_000  # of the model in a full run
    quick_size_bytes: int = 400_000_000

    @property
    def markers(self) -> tuple[str, str]:
        """The lines of tables.md between which the tables stand."""
        name = "results" if self.name == "load" else f"{self.name} results"
        return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
