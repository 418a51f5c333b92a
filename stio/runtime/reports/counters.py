"""Counters of this process: operations, bytes, and memory that is held. `stio.stats()` takes a snapshot.

An operation is counted when it starts and when it ends. The bytes of a run (a scheduler of a load or a save) are added
when the run ends; only a snapshot reads the figures of runs under way. Callers' threads count starts and take snapshots
without a lock: the sums are one value that stio's threads replace. A forked child starts at zero: the counters that it
inherits belong to its parent. An operation under way at the fork is not counted in the child.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol
from weakref import ReferenceType, ref

from stio import native
from stio.process import after_fork_in_child, new_lock

Kind = Literal["load", "save", "other"]
"""Kind of an operation."""
Outcome = Literal["done", "failed", "cancelled"]
"""How an operation ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """Counters of the process since its start, and what is under way now.

    Streams and loads into modules count as loads, conversions as saves. Of the drop-in for safetensors, a prefetch
    counts as a load; its other work is not counted.
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
    """Staging memory of saves, savers and loads to devices, in use or cached for the next save."""
    pinned_bytes: int
    """Memory of the host that the engine has pinned for copies: of savers, of `HostCache`s, of loads to devices."""
    engine: str
    """What moves the bytes of loads and saves in this process: `"engine 5"`, the compiled library with its version, or
    `"plain"`, Python, which is slower. It is plain where stio was built without a C compiler, and with
    `STIO_NATIVE=0`."""


class RunningScheduler(Protocol):
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


@dataclass(frozen=True, slots=True)
class _Sums:
    """What has ended, and the runs under way. Replaced as a whole: `dataclasses.replace` would take 7 us more."""

    ended: dict[tuple[Kind, Outcome], int]
    seconds: dict[Kind, float]
    read_bytes: int
    written_bytes: int
    runs: tuple[RunningScheduler, ...]


class _Process:
    def __init__(self) -> None:
        self.lock = new_lock()  # of stio's threads, which replace `sums`
        self.sums = _Sums({}, {}, 0, 0, ())
        self.holders: dict[int, ReferenceType[Holder]] = {}


_process = _Process()

running: set[Any] = set()
"""The operations that have started and not ended, each with its `kind`. `stio.runtime.operation` changes it; each read
and change is one atomic step."""


def stats() -> Stats:
    """Return a snapshot of the counters. Cheap enough for a call every second; callable from any thread."""
    process = _process
    kinds = [operation.kind for operation in list(running)]
    sums = process.sums
    holders = [holder for reference in list(process.holders.values()) if (holder := reference()) is not None]
    return Stats(
        num_loads_running=kinds.count("load"),
        num_loads_done=sums.ended.get(("load", "done"), 0),
        num_loads_failed=sums.ended.get(("load", "failed"), 0),
        num_loads_cancelled=sums.ended.get(("load", "cancelled"), 0),
        load_seconds=sums.seconds.get("load", 0.0),
        num_saves_running=kinds.count("save"),
        num_saves_done=sums.ended.get(("save", "done"), 0),
        num_saves_failed=sums.ended.get(("save", "failed"), 0),
        num_saves_cancelled=sums.ended.get(("save", "cancelled"), 0),
        save_seconds=sums.seconds.get("save", 0.0),
        read_bytes=sums.read_bytes + sum(run.read_bytes for run in sums.runs),
        written_bytes=sums.written_bytes + sum(run.written_bytes for run in sums.runs),
        budget_used_bytes=sum(run.used_bytes for run in sums.runs),
        staging_held_bytes=sum(holder.held_bytes for holder in holders),
        pinned_bytes=native.pinned_bytes(),
        engine=native.name(),
    )


def count_end(kind: Kind, outcome: Outcome, seconds: float) -> None:
    """Count the end of an operation. Called on a thread of stio's."""
    process = _process
    with process.lock:
        sums, key = process.sums, (kind, outcome)
        ended = {**sums.ended, key: sums.ended.get(key, 0) + 1}
        of_all = {**sums.seconds, kind: sums.seconds.get(kind, 0.0) + seconds}
        process.sums = _Sums(ended, of_all, sums.read_bytes, sums.written_bytes, sums.runs)


def add_run(run: RunningScheduler) -> None:
    """Include the figures of a run in snapshots from now on. Called on a thread of stio's."""
    process = _process
    with process.lock:
        sums = process.sums
        process.sums = _Sums(sums.ended, sums.seconds, sums.read_bytes, sums.written_bytes, (*sums.runs, run))


def remove_run(run: RunningScheduler) -> None:
    """Add the final figures of a run that has ended to the counters. Called on a thread of stio's. Idempotent."""
    process = _process
    with process.lock:
        sums = process.sums
        if run not in sums.runs:
            return  # already counted, or started in the parent of this process
        at = sums.runs.index(run)
        runs = sums.runs[:at] + sums.runs[at + 1 :]
        read_bytes, written_bytes = sums.read_bytes + run.read_bytes, sums.written_bytes + run.written_bytes
        process.sums = _Sums(sums.ended, sums.seconds, read_bytes, written_bytes, runs)


def add_holder(holder: Holder) -> None:
    """Include the staging memory of this object in snapshots, as long as the object exists."""
    holders, key = _process.holders, id(holder)
    holders[key] = ref(holder, lambda _: holders.pop(key, None))


@after_fork_in_child
def _forget_parent() -> None:
    global _process
    _process = _Process()
