"""Counters of this process: operations, bytes, and memory that is held. `stio.stats()` takes a snapshot.

An operation is counted when it starts and when it ends. The bytes of a run (a scheduler of a load or a save) are added
when the run ends; only a snapshot reads the figures of runs under way. A forked child starts at zero, with a lock of
its own: the counters that it inherits belong to its parent. An operation under way at the fork is not counted in the
child.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Literal, Protocol
from weakref import WeakSet

from stio.runtime.process import after_fork_in_child

Kind = Literal["load", "save", "other"]
"""Kind of an operation."""
Outcome = Literal["done", "failed", "cancelled"]
"""How an operation ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of the process since its start, and what is under way now.

    Streams and loads into modules count as loads, conversions as saves. The drop-in for safetensors starts no
    operations, so its work is not counted.
    """

    num_loads_running: int
    """Loads under way."""
    num_loads_done: int
    """Loads that succeeded."""
    num_loads_failed: int
    """Loads that raised."""
    num_loads_cancelled: int
    """Loads that were cancelled. A stream that is closed before its end counts here."""
    load_seconds: float
    """Time of all loads that have ended, from call to end. Two loads at the same time both count in full."""
    num_saves_running: int
    """Saves under way, until they are durable."""
    num_saves_done: int
    """Saves that are durable."""
    num_saves_failed: int
    """Saves that raised."""
    num_saves_cancelled: int
    """Saves that were rolled back."""
    save_seconds: float
    """Time of all saves that have ended, added up in the same manner."""
    read_bytes: int
    """Bytes that loads and conversions read from storage or from the page cache. Not included: what a lazy mapping or a
    mapped pickle reads at its first access, and reads of a verification."""
    written_bytes: int
    """Bytes that saves wrote to storage."""
    budget_used_bytes: int
    """Bytes that loads under way have taken from their budgets."""
    staging_held_bytes: int
    """Staging memory of saves, savers and loads to devices, in use or cached for the next save. With `memory="gds"`
    the staging memory on the device is included."""


class Run(Protocol):
    """Scheduler of a load or a save under way."""

    @property
    def read_bytes(self) -> int:
        """Bytes that it has read."""

    @property
    def written_bytes(self) -> int:
        """Bytes that it has written."""

    @property
    def used_bytes(self) -> int:
        """Bytes that it has taken from its budget."""


class Holder(Protocol):
    """An object that holds staging memory."""

    @property
    def held_bytes(self) -> int:
        """Size of that memory."""


@dataclass(slots=True, eq=False)
class Tally:
    """Sums over the operations of one kind."""

    running: int = 0
    done: int = 0
    failed: int = 0
    cancelled: int = 0
    seconds: float = 0.0


class _Process:
    def __init__(self) -> None:
        # Re-entrant: a finalizer may run on the thread that holds the lock.
        self.lock = threading.RLock()
        self.tallies: dict[Kind, Tally] = {"load": Tally(), "save": Tally(), "other": Tally()}
        self.read_bytes = self.written_bytes = 0
        self.runs: set[Run] = set()
        self.holders: WeakSet[Holder] = WeakSet()


_process = _Process()


def stats() -> Stats:
    """Return a snapshot of the counters. Cheap enough for a call every second; callable from any thread."""
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


def count_start(kind: Kind) -> Tally:
    """Count an operation as running; pass the result to `count_end`."""
    process = _process
    with process.lock:
        tally = process.tallies[kind]
        tally.running += 1
    return tally


def count_end(tally: Tally, outcome: Outcome | None, seconds: float = 0.0) -> None:
    """Count the end of an operation; None means that its thread could not be started."""
    process = _process
    if not any(tally is mine for mine in process.tallies.values()):
        return  # the operation was started in the parent of this process
    with process.lock:
        tally.running -= 1
        tally.seconds += seconds
        if outcome is not None:
            setattr(tally, outcome, getattr(tally, outcome) + 1)


def add_run(run: Run) -> None:
    """Include the figures of a run in snapshots from now on."""
    process = _process
    with process.lock:
        process.runs.add(run)


def remove_run(run: Run) -> None:
    """Add the final figures of a run that has ended to the counters. Idempotent."""
    process = _process
    if run not in process.runs:
        return  # already counted, or started in the parent of this process
    with process.lock:
        process.runs.discard(run)
        process.read_bytes += run.read_bytes
        process.written_bytes += run.written_bytes


def add_holder(holder: Holder) -> None:
    """Include the staging memory of this object in snapshots, as long as the object exists."""
    process = _process
    with process.lock:
        process.holders.add(holder)


@after_fork_in_child
def _forget_parent() -> None:
    global _process
    _process = _Process()
