"""A place to save to, for tests: files in memory, a judge of the contract, and faults on request.

Public through `stio.testing`. It stands where a path stands (`stio.save(tensors, MemoryDestination())`), gives the
names that a directory gives, and nothing in it sleeps. Whoever breaks the contract of `Transaction` or `Sink` gets an
`AssertionError`, on the thread that broke it, and `violations` remembers it.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from stio.errors import CommitUncertainError, ConcurrentSaveError
from stio.format.naming import index_name, is_checkpoint_file
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region
from stio.storage.base import Identity, Note, Transaction
from stio.storage.commit.file_writer import write_refused
from stio.storage.commit.journal import digest_of
from stio.storage.commit.target import Destination, ExistingCheckpoint, Names, choose_names
from stio.testing.faulty_root import PATIENCE_SECONDS

__all__ = ["MemoryDestination", "Step", "Write"]

Step = Literal["begin", "create", "write", "finish", "commit", "confirm"]
"""What can fail; `confirm` comes after the publishing, as the sync of a directory does."""

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
    """File."""
    offset: int
    """First byte."""
    nbytes: int
    """Bytes that were brought."""


class MemoryDestination:
    """A directory in memory that checkpoints are saved to; a `Destination`.

    Calls are counted from 1 for each kind of step. Faults are attributes, they can be changed at any time.

    Args:
        files: What stands there already, bytes by name; where nothing does, the directory is a fresh one.
        path: Name for messages.
        fail_in: The kind of step that fails.
        fail_at: Number of the first step of that kind that fails, and all after it; None: nothing fails.
        error_number: With this errno; ENOSPC, EDQUOT and EFBIG make it a `NoSpaceError`.
        gate: Writes from number `gate_at` on wait until it is set.
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
        self.path = path
        self.files: dict[str, bytes] = dict(files or {})
        """What is published, by name."""
        self.fail_in = fail_in
        self.fail_at = fail_at
        self.error_number = error_number
        self.gate = gate
        self.gate_at = gate_at
        self.num_calls: Counter[Step] = Counter()
        """Steps that have begun, by kind."""
        self.num_commits = 0
        """Checkpoints that were published."""
        self.writes: list[Write] = []
        """All writes in the order of their begin."""
        self.num_waiting = 0
        """Writes that wait at the gate now."""
        self.num_open = 0
        """Files that are open now: created, and neither finished nor removed."""
        self.num_transactions = 0
        """Saves that are under way: begun, and neither committed nor aborted."""
        self.violations: list[str] = []
        """What broke the contract."""
        self._changed = threading.Condition()

    def wait_for_writers(self, count: int) -> None:
        """Block until so many writes wait at the gate.

        Raises:
            TimeoutError: They never came.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_waiting >= count, PATIENCE_SECONDS):
                raise TimeoutError(f"{self.num_waiting} writes wait at the gate, not {count}")

    def begin(
        self,
        *,
        num_shards: int,
        filename_pattern: str = "model{suffix}.safetensors",
        shard_names: Literal["auto", "hub"] = "auto",
        commit: Literal["index", "files"] = "index",
        durability: Literal["full", "none"] = "full",
    ) -> Transaction:
        """Begin one save; the names are those that `stio.storage.commit.transaction.begin_local` gives.

        Raises:
            ValueError: The hub's names are wanted where shards stand, and `commit="files"` is not.
            StorageError: It was asked to fail.
        """
        self.step("begin")
        with self._changed:
            index = index_name(filename_pattern)
            old = {name for name in self.files if name != index and is_checkpoint_file(name, filename_pattern)}
            names = choose_names(
                Destination(self.path, "update" if self.files else "fresh", self.path, ""),
                ExistingCheckpoint(index, digest_of(self.files.get(index)), dict.fromkeys(old, Identity(0, 0, 0, 0))),
                num_shards=num_shards,
                pattern=filename_pattern,
                shard_names=shard_names,
                commit=commit,
                save_id=f"{self.num_calls['begin']:08x}",
            )
            self.num_transactions += 1
            return _MemoryTransaction(self, names, old)

    # For its transactions and files.

    def step(self, step: Step, path: str = "", *, needed_bytes: int | None = None) -> None:
        """Count a step, and fail if this one was asked to."""
        with self._changed:
            self.num_calls[step] += 1
            number = self.num_calls[step]
        self.fail(step, number, path, needed_bytes=needed_bytes)

    def fail(
        self, step: Step, number: int, path: str, *, offset: int | None = None, needed_bytes: int | None = None
    ) -> None:
        """Fail if the step of this number was asked to."""
        if step != self.fail_in or self.fail_at is None or number < self.fail_at:
            return
        if step == "confirm":
            reason = os.strerror(self.error_number)
            message = f"syncing the directory failed after the commit: {reason}"
            raise CommitUncertainError(message, path=self.path, errno=self.error_number)
        free = None if needed_bytes is None else 0
        error = OSError(self.error_number, os.strerror(self.error_number))
        raise write_refused(
            _ACTIONS[step], path or self.path, error, offset=offset, needed_bytes=needed_bytes, free=free
        )

    def enter(self, write: Write) -> int:
        """Log a write, hold it at the gate; return its number."""
        with self._changed:
            self.writes.append(write)
            number = self.num_calls["write"] = len(self.writes)
            gate = self.gate
            if gate is None or number < self.gate_at:
                return number
            self.num_waiting += 1
            self._changed.notify_all()
        try:
            if not gate.wait(PATIENCE_SECONDS):
                raise TimeoutError("the gate was never opened")
        finally:
            with self._changed:
                self.num_waiting -= 1
        return number

    def count(self, *, files: int = 0, transactions: int = 0) -> None:
        """Note that files or saves were opened, or, below 0, that they ended."""
        with self._changed:
            self.num_open += files
            self.num_transactions += transactions

    def publish(self, new: Mapping[str, bytes], gone: set[str], num_commits: int) -> None:
        """Replace files in one step, unless another save has published since there were `num_commits`."""
        with self._changed:
            if self.num_commits != num_commits:
                raise ConcurrentSaveError("another save changed the destination meanwhile", path=self.path)
            kept = {name: data for name, data in self.files.items() if name not in gone}
            self.files = {**kept, **new}
            self.num_commits += 1

    def broken(self, message: str) -> NoReturn:
        """Note, and tell, that the contract was broken."""
        with self._changed:
            self.violations.append(message)
        raise AssertionError(message)


class _MemoryTransaction:
    """One save; a `Transaction`."""

    def __init__(self, destination: MemoryDestination, names: Names, old: set[str]) -> None:
        self._destination, self._names, self._old = destination, names, old
        self._num_commits = destination.num_commits
        self._sinks: list[_MemorySink] = []
        self.ended = False
        """True once it was committed or aborted."""

    @property
    def path(self) -> str:
        return self._destination.path

    @property
    def shard_names(self) -> tuple[str, ...]:
        return self._names.shards

    @property
    def wants_index(self) -> bool:
        return self._names.index is not None

    def create(self, nbytes: Sequence[int]) -> Sequence[_MemorySink]:
        self._require(not self.ended, "files are created after the save's end")
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
        self._require(not self.ended, "a note is read after the save's end")
        return self._destination.files.get(name)

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        self._require(not self.ended, "a save is committed after its end")
        self._require(bool(self._sinks), "a save is committed without files")
        for sink in self._sinks:
            self._require(sink.finished, f"a save is committed before {sink.name} is finished")
        self._require((index is not None) == self.wants_index, "an index is missing" if index is None else "no index")
        new = {sink.name: bytes(sink.data) for sink in self._sinks}
        new |= {note.name: note.after for note in notes if note.after is not None}
        if self._names.index is not None and index is not None:
            new[self._names.index] = index
        try:
            self._destination.step("commit")
            self._destination.publish(new, self._old | {note.name for note in notes}, self._num_commits)
            self._destination.step("confirm")
        finally:
            self._end()

    def abort(self) -> None:
        for sink in self._sinks:
            self._require(not sink.num_writing, f"a save is aborted while {sink.name} is written")
        if not self.ended:
            self._end()

    def _end(self) -> None:
        self.ended = True
        for sink in self._sinks:
            sink.close()
        self._destination.count(transactions=-1)

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            self._destination.broken(message)


class _MemorySink:
    """One new file; a `Sink`."""

    def __init__(self, destination: MemoryDestination, transaction: _MemoryTransaction, name: str, nbytes: int) -> None:
        self._destination, self._transaction = destination, transaction
        self._lock = threading.Lock()
        self._ranges: list[tuple[int, int]] = []
        self._open = True
        self.name = name
        """Name that it will have."""
        self.data = bytearray(nbytes)
        """Its bytes so far."""
        self.num_writing = 0
        """Writes that are under way now."""
        self.finished = False
        """True once it is whole and durable."""

    @property
    def path(self) -> str:
        return f"{self._destination.path}/{self.name}"

    def write_from(self, offset: int, region: Region) -> None:
        end = offset + region.nbytes
        what = f"bytes [{offset}, {end}) of {self.name}"
        self._require(not self._transaction.ended, f"{what} are written after the save's end")
        self._require(self._open, f"{what} are written after the file was finished")
        self._require(offset >= 0 and end <= len(self.data), f"{what}, which has {len(self.data)}")
        self._require(not offset % PAGE_BYTES and not region.address % PAGE_BYTES, f"{what} begin on no page's border")
        self._require(not end % PAGE_BYTES or end == len(self.data), f"{what} end inside a page and before the end")
        with self._lock:
            twice = any(low < end and offset < high for low, high in self._ranges)
            self._ranges.append((offset, end))
            self.num_writing += 1
        try:
            self._require(not twice, f"{what} are written twice")
            number = self._destination.enter(Write(self.name, offset, region.nbytes))
            self._destination.fail("write", number, self.path, offset=offset)
            self.data[offset:end] = region.tobytes()  # after the gate: what stands there now is what counts
            self._require(not self._transaction.ended, f"{what} are written across the save's end")
        finally:
            with self._lock:
                self.num_writing -= 1

    def finish(self) -> None:
        self._require(self._open, f"{self.name} is finished twice, or after the save's end")
        self._require(not self.num_writing, f"{self.name} is finished while it is written")
        missing = len(self.data) - sum(high - low for low, high in self._ranges)
        self._require(not missing, f"{self.name} is finished, and {missing} of its bytes were not written")
        try:
            self._destination.step("finish", self.path)
            self.finished = True
        finally:
            self.close()

    def close(self) -> None:
        """Give the file back, as the system takes a descriptor. Idempotent."""
        if self._open:
            self._open = False
            self._destination.count(files=-1)

    def _require(self, condition: bool, message: str) -> None:
        if not condition:
            self._destination.broken(message)
