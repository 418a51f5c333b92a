"""A destination for tests: files in memory, checks of the contract, and faults on request.

It takes the place of a path (`stio.save(tensors, MemoryDestination())`) and gives its files
the names that they would have in a directory. A call that breaks the contract of `Transaction` or `FileWriter` raises
an `AssertionError` on its thread, and `violations` lists it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from fakes.gate import Gated
from stio.errors import CommitUncertainError, ConcurrentSaveError
from stio.format.files.names import FilePattern
from stio.limits import PAGE_BYTES
from stio.runtime.memory import Region
from stio.saving.options import SaveOptions
from stio.storage.base import Identity, Note, Transaction
from stio.storage.checks import refused
from stio.storage.commit.destination import CommitPlan, ExistingCheckpoint, LocalDestination, choose_names
from stio.storage.commit.files import digest_of

Step = Literal["begin", "create", "write", "finish", "commit", "confirm"]
"""Kinds of steps that can fail. `confirm` follows the commit, as the sync of a directory does."""

_ACTIONS: Mapping[Step, str] = {
    "begin": "beginning the save",
    "create": "reserving space",
    "write": "writing",
    "finish": "syncing",
    "commit": "publishing the checkpoint",
}


@dataclass(frozen=True, slots=True)
class Write:
    """One call of `write_from`."""

    name: str
    """Name of the file."""
    offset: int
    """Offset of the first byte."""
    nbytes: int
    """Length in bytes."""


class MemoryDestination(Gated):
    """A directory in memory to save checkpoints to; a `Destination`.

    Steps of each kind are counted from 1. Faults are attributes; a test may change them at any time.

    Args:
        files: Content of the files that exist already, by name. Without files the directory does not exist yet.
        path: Name of the directory in messages.
        fail_in: Kind of the steps that fail.
        fail_at: Number of the first step of that kind that fails; all later ones fail too. None: nothing fails.
        error_number: The errno of that failure; ENOSPC, EDQUOT and EFBIG raise a `NoSpaceError`.
        gate: Writes from number `gate_at` on wait until this event is set.
        gate_at: Number of the first write that waits.
    """

    def __init__(
        self,
        files: Mapping[str, bytes] | None = None,
        *,
        path: str = "memory:",
        fail_in: Step = "write",
        fail_at: int | None = None,
        error_number: int = errno.EIO,
        gate: threading.Event | None = None,
        gate_at: int = 1,
    ) -> None:
        super().__init__(gate, gate_at)
        self.path = path
        self.files: dict[str, bytes] = dict(files or {})
        """Content of the published files, by name."""
        self.fail_in = fail_in
        self.fail_at = fail_at
        self.error_number = error_number
        self.num_calls: Counter[Step] = Counter()
        """Number of steps that have started, by kind."""
        self.num_commits = 0
        """Number of checkpoints that were committed."""
        self.writes: list[Write] = []
        """All writes, in the order of their start."""
        self.num_open = 0
        """Number of open files: created, and neither finished nor removed."""
        self.num_transactions = 0
        """Number of saves under way: started, and neither committed nor rolled back."""
        self.violations: list[str] = []
        """Messages of all calls that broke the contract."""

    def wait_for_writers(self, count: int) -> None:
        """Block until `count` writes wait at the gate.

        Raises:
            TimeoutError: It did not happen in time.
        """
        self.wait_for_waiting(count, "writes")

    def begin(
        self,
        *,
        num_shards: int,
        filename_pattern: str = "model{suffix}.safetensors",
        shard_names: Literal["auto", "hub"] = "auto",
        commit: Literal["index", "files"] = "index",
        durability: Literal["full", "none"] = "full",
    ) -> Transaction:
        """Start one save; the names are those that `stio.storage.commit.transaction.begin_local` gives.

        Raises:
            ValueError: `shard_names="hub"` over existing shards, without `commit="files"`.
            StorageError: The step fails on request.
        """
        self.step("begin")
        with self._changed:
            index = FilePattern(filename_pattern).index
            old = {name for name in self.files if name != index and FilePattern(filename_pattern).matches(name)}
            names = choose_names(
                LocalDestination(self.path, "update" if self.files else "fresh", self.path, ""),
                ExistingCheckpoint(index, digest_of(self.files.get(index)), dict.fromkeys(old, Identity(0, 0, 0, 0))),
                SaveOptions(filename_pattern=filename_pattern, shard_names=shard_names, commit=commit),
                num_shards,
                f"{self.num_calls['begin']:08x}",
            )
            self.num_transactions += 1
            return _MemoryTransaction(self, names, old)

    # Called by transactions and files.

    def step(self, step: Step, path: str = "", *, needed_bytes: int | None = None) -> None:
        """Count a step; fail if it is to fail."""
        with self._changed:
            self.num_calls[step] += 1
            number = self.num_calls[step]
        self.fail(step, number, path, needed_bytes=needed_bytes)

    def fail(
        self, step: Step, number: int, path: str, *, offset: int | None = None, needed_bytes: int | None = None
    ) -> None:
        """Raise an error if the step of this number is to fail."""
        if step != self.fail_in or self.fail_at is None or number < self.fail_at:
            return
        if step == "confirm":
            reason = os.strerror(self.error_number)
            message = f"syncing the directory failed after the commit: {reason}"
            raise CommitUncertainError(message, path=self.path, errno=self.error_number)
        free = None if needed_bytes is None else 0
        error = OSError(self.error_number, os.strerror(self.error_number))
        raise refused(
            _ACTIONS[step], path or self.path, error, offset=offset, needed_bytes=needed_bytes, free_bytes=free
        )

    def start_write(self, write: Write) -> int:
        """Log a write, and hold it at the gate; return its number."""
        with self._changed:
            self.num_calls["write"] += 1
        return self.pass_gate(self.writes, write)

    def count(self, *, files: int = 0, transactions: int = 0) -> None:
        """Count files or saves that were opened; a negative number counts those that ended."""
        with self._changed:
            self.num_open += files
            self.num_transactions += transactions

    def publish(self, new: Mapping[str, bytes], removed: set[str], num_commits: int) -> None:
        """Replace files in one step. Refuse it if there were other commits since the count was `num_commits`."""
        with self._changed:
            if self.num_commits != num_commits:
                raise ConcurrentSaveError("another save changed the destination at the same time", path=self.path)
            unchanged = {name: data for name, data in self.files.items() if name not in removed}
            self.files = {**unchanged, **new}
            self.num_commits += 1

    def require(self, condition: bool, message: str) -> None:
        """Record that a call broke the contract, and raise an error, unless the condition is met."""
        if not condition:
            with self._changed:
                self.violations.append(message)
            raise AssertionError(message)


class _MemoryTransaction(Transaction):
    """One save; a `Transaction`."""

    def __init__(self, destination: MemoryDestination, names: CommitPlan, old: set[str]) -> None:
        self._destination, self._names, self._old = destination, names, old
        self._num_commits = destination.num_commits
        self._sinks: list[_MemorySink] = []
        self.path, self.shard_names, self.takes_index = destination.path, names.shards, names.index is not None

    def create(self, nbytes: Sequence[int]) -> Sequence[_MemorySink]:
        self._require(not self.has_ended, "files are created after the save's end")
        self._require(not self._sinks, "files are created twice")
        self._require(len(nbytes) == len(self.shard_names), f"{len(nbytes)} files for {len(self.shard_names)} names")
        self._destination.step("create", needed_bytes=sum(nbytes))
        self._sinks = [
            _MemorySink(self._destination, self, name, size)
            for name, size in zip(self.shard_names, nbytes, strict=True)
        ]
        self._destination.count(files=len(self._sinks))
        return self._sinks

    def read_note(self, name: str) -> bytes | None:
        self._require(not self.has_ended, "a note is read after the save's end")
        return self._destination.files.get(name)

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        self._require(not self.has_ended, "a save is committed after its end")
        self._require(bool(self._sinks), "a save is committed without files")
        for sink in self._sinks:
            self._require(sink.finished, f"a save is committed before {sink.name} is finished")
        self._require((index is not None) == self.takes_index, "an index is missing" if index is None else "no index")
        new = {sink.name: bytes(sink.data) for sink in self._sinks}
        new |= {note.name: note.after for note in notes if note.after is not None}
        if self._names.index is not None and index is not None:
            new[self._names.index] = index
        try:
            self._destination.step("commit")
            self._destination.publish(new, self._old | {note.name for note in notes}, self._num_commits)
            self._destination.step("confirm")
        finally:
            self._after("leave")

    def roll_back(self) -> None:
        for sink in self._sinks:
            self._require(not sink.num_writing, f"a save is aborted while {sink.name} is written")
        super().roll_back()

    def _require(self, condition: bool, message: str) -> None:
        self._destination.require(condition, message)

    def _end(self) -> None:
        for sink in self._sinks:
            sink.close()
        self._destination.count(transactions=-1)


class _MemorySink:
    """One new file; a `FileWriter`."""

    is_ordered = False

    def __init__(self, destination: MemoryDestination, transaction: _MemoryTransaction, name: str, nbytes: int) -> None:
        self._destination, self._transaction = destination, transaction
        self._require = destination.require
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []
        self._open = True
        self.name = name
        """Name that the file will have."""
        self.path = f"{destination.path}/{name}"
        self.data = bytearray(nbytes)
        """Content so far."""
        self.num_writing = 0
        """Number of writes under way."""
        self.finished = False
        """True once the file is complete and durable."""

    def write_from(self, offset: int, region: Region) -> None:
        end = offset + region.nbytes
        what = f"bytes [{offset}, {end}) of {self.name}"
        self._require(not self._transaction.has_ended, f"{what} are written after the save's end")
        self._require(self._open, f"{what} are written after the file was finished")
        self._require(offset >= 0 and end <= len(self.data), f"{what}, which has {len(self.data)}")
        self._require(not offset % PAGE_BYTES and not region.address % PAGE_BYTES, f"{what} do not begin at a page")
        self._require(not end % PAGE_BYTES or end == len(self.data), f"{what} end inside a page and before the end")
        with self._lock:
            twice = any(low < end and offset < high for low, high in self._ranges)
            self._ranges.append((offset, end))
            self.num_writing += 1
        try:
            self._require(not twice, f"{what} are written twice")
            number = self._destination.start_write(Write(self.name, offset, region.nbytes))
            self._destination.fail("write", number, self.path, offset=offset)
            # After the gate, so that late changes of the memory are written too.
            self.data[offset:end] = region.tobytes()
            self._require(not self._transaction.has_ended, f"{what} are written across the save's end")
        except BaseException:
            del region  # an error keeps this frame: stio clears only frames of its own
            raise
        finally:
            with self._lock:
                self.num_writing -= 1

    def finish(self) -> None:
        self._require(self._open, f"{self.name} is finished twice, or after the save's end")
        self._require(not self.num_writing, f"{self.name} is finished while it is written")
        missing = len(self.data) - sum(high - low for low, high in self._ranges)
        self._require(not missing, f"{self.name} is finished, but {missing} of its bytes were not written")
        try:
            self._destination.step("finish", self.path)
            self.finished = True
        finally:
            self.close()

    def close(self) -> None:
        """Close the file. Idempotent."""
        if self._open:
            self._open = False
            self._destination.count(files=-1)
