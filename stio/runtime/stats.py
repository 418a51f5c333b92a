"""What this process has done so far: operations, bytes, memory that is held. `stio.stats()` takes a snapshot.

An operation is counted when it begins and when it ends, a run's bytes when it ends; what is under way is asked only by
a snapshot. A forked child begins at zero, with a lock of its own: what it inherited was its parent's, and an operation
that was forked in the middle counts nowhere.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, Protocol
from weakref import WeakSet

from stio.runtime.process import after_fork_in_child

__all__ = ["Stats", "stats"]

Kind = Literal["load", "save", "other"]
"""What an operation counts as."""
Outcome = Literal["done", "failed", "cancelled"]
"""How it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """What the process has done since it began, and what it does now.

    Streams and loads into modules are loads; conversions are saves. What the drop-in for safetensors does is not
    counted: it has no operations.
    """

    num_loads_running: int
    """Loads under way."""
    num_loads_done: int
    """Loads that ended well."""
    num_loads_failed: int
    """Loads that raised."""
    num_loads_cancelled: int
    """Loads that were cancelled, streams that were left before their end among them."""
    load_seconds: float
    """Time that loads took which have ended, from call to end; of two at once, each counts."""
    num_saves_running: int
    """Saves under way, until they are durable."""
    num_saves_done: int
    """Saves that are durable."""
    num_saves_failed: int
    """Saves that raised."""
    num_saves_cancelled: int
    """Saves that were rolled back."""
    save_seconds: float
    """Time that saves took which have ended, likewise."""
    read_bytes: int
    """Bytes that loads and conversions brought from storage, or found in the page cache; not what a lazy mapping or a
    mapped pickle reads when it is touched, nor what is read to verify."""
    written_bytes: int
    """Bytes that saves wrote to storage."""
    budget_used_bytes: int
    """What loads under way have taken of their budgets."""
    staging_held_bytes: int
    """Staging memory, in use or kept for the next save: of saves, savers, and loads to devices; with `memory="gds"`
    that on the device too."""


class Run(Protocol):
    """A load's or a save's scheduler while it works."""

    @property
    def read_bytes(self) -> int:
        """Bytes it has read."""

    @property
    def written_bytes(self) -> int:
        """Bytes it has written."""

    @property
    def used_bytes(self) -> int:
        """What it has taken of its budget."""


class Holder(Protocol):
    """Something that keeps staging memory."""

    @property
    def held_bytes(self) -> int:
        """How much."""


@dataclass(slots=True, eq=False)
class Tally:
    """What operations of one kind come to."""

    running: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    seconds: float = 0.0


class _Process:
    def __init__(self) -> None:
        # A finalizer may end up here while its own thread is inside.
        self.lock = threading.RLock()
        self.tallies: dict[Kind, Tally] = {"load": Tally(), "save": Tally(), "other": Tally()}
        self.read_bytes = self.written_bytes = 0
        self.runs: set[Run] = set()
        self.holders: WeakSet[Holder] = WeakSet()


_process = _Process()


def stats() -> Stats:
    """Return what this process has done so far: cheap enough to be asked every second, callable from any thread."""
    process = _process
    with process.lock:
        loads, saves = process.tallies["load"], process.tallies["save"]
        runs = list(process.runs)
        return Stats(
            num_loads_running=loads.running,
            num_loads_done=loads.done,
            num_loads_failed=loads.failed,
            num_loads_cancelled=loads.cancelled,
            load_seconds=loads.seconds,
            num_saves_running=saves.running,
            num_saves_done=saves.done,
            num_saves_failed=saves.failed,
            num_saves_cancelled=saves.cancelled,
            save_seconds=saves.seconds,
            read_bytes=process.read_bytes + sum(run.read_bytes for run in runs),
            written_bytes=process.written_bytes + sum(run.written_bytes for run in runs),
            budget_used_bytes=sum(run.used_bytes for run in runs),
            staging_held_bytes=sum(holder.held_bytes for holder in process.holders),
        )


def begin(kind: Kind) -> Tally:
    """Count an operation as running; `end` takes what this returns."""
    process = _process
    with process.lock:
        tally = process.tallies[kind]
        tally.running += 1
    return tally


def end(tally: Tally, outcome: Outcome | None, seconds: float = 0.0) -> None:
    """Count an operation's end; None: it never ran."""
    process = _process
    if not any(tally is mine for mine in process.tallies.values()):
        return  # it began in the parent of this process
    with process.lock:
        tally.running -= 1
        tally.seconds += seconds
        if outcome is not None:
            setattr(tally, outcome, getattr(tally, outcome) + 1)


def enter(run: Run) -> None:
    """Have snapshots ask a run for its figures from now on."""
    process = _process
    with process.lock:
        process.runs.add(run)


def leave(run: Run) -> None:
    """Take over a run's figures; it has ended. Idempotent."""
    process = _process
    if run not in process.runs:
        return  # it was counted, or it began in the parent of this process
    with process.lock:
        process.runs.discard(run)
        process.read_bytes += run.read_bytes
        process.written_bytes += run.written_bytes


def hold(holder: Holder) -> None:
    """Have snapshots ask for the staging memory that this object holds, as long as it lives."""
    process = _process
    with process.lock:
        process.holders.add(holder)


@after_fork_in_child
def _forget_parent() -> None:
    global _process
    _process = _Process()
