"""Storages for tests: files in memory, and a place whose n-th read fails, ends early or waits.

Public through `stio.testing`. Both stand where a path stands; nothing here sleeps.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from stio.errors import CheckpointNotFoundError, TruncatedError
from stio.runtime.memory import Region
from stio.storage.base import Identity, Root, Source
from stio.storage.checks import refused

__all__ = ["PATIENCE_SECONDS", "FaultyRoot", "MemoryRoot", "Read"]

PATIENCE_SECONDS = 30.0
"""After this long, waiting for something that should happen is given up with an error."""


class MemoryRoot:
    """A directory of files in memory; a `Root`.

    Args:
        files: Bytes by name.
        path: Name for messages.
    """

    def __init__(self, files: Mapping[str, bytes], *, path: str = "memory:") -> None:
        self.path = path
        self._files: dict[str, tuple[bytes, int]] = {name: (data, 1) for name, data in files.items()}

    def listdir(self) -> list[str]:
        """Return the names of the files, sorted."""
        return sorted(self._files)

    def open(self, name: str, *, trusted: bool = False) -> Source:
        """Open one file.

        Raises:
            CheckpointNotFoundError: There is none of this name.
        """
        if name not in self._files:
            raise CheckpointNotFoundError("there is no such file", path=f"{self.path}/{name}")
        return _MemoryFile(self, name)

    def rewrite(self, name: str, data: bytes) -> None:
        """Replace a file's bytes in place: sources that are open see them, and that the file changed."""
        self._files[name] = (data, self._files[name][1] + 1)

    def content(self, name: str) -> tuple[bytes, Identity]:
        """Return a file's bytes and its state."""
        data, version = self._files[name]
        return data, Identity(0, 0, len(data), version)

    def close(self) -> None:
        """Do nothing: nothing is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _MemoryFile:
    def __init__(self, root: MemoryRoot, name: str) -> None:
        self._root, self._name = root, name
        self._path = f"{root.path}/{name}"
        self._identity = root.content(name)[1]

    @property
    def path(self) -> str:
        return self._path

    @property
    def identity(self) -> Identity:
        return self._identity

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        data = self._root.content(self._name)[0]
        for region in regions:
            part = data[offset : offset + region.nbytes]
            region.write(0, part)
            if len(part) < region.nbytes:
                raise TruncatedError(
                    "the file ends before its tensors do",
                    path=self._path,
                    offset=offset + len(part),
                    expected=f"{region.nbytes - len(part):,} more bytes",
                )
            offset += region.nbytes

    def check_unchanged(self) -> None:
        self._identity.require_same(self._root.content(self._name)[1], self._path)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Read:
    """One call of `read_into`."""

    name: str
    """File."""
    offset: int
    """First byte."""
    nbytes: int
    """Bytes that were asked for."""


class FaultyRoot:
    """A place whose files are read through a log, and through faults; a `Root`.

    Reads are counted from 1, headers and index among them: set `fail_at = root.num_reads + n` once a checkpoint
    is open to hit its n-th read of data. Faults are attributes, they can be changed at any time.

    Args:
        root: The real place.
        fail_at: Number of the first read that fails, and all after it.
        error_number: With this errno.
        short_at: Number of the read that finds the end of the file halfway.
        gate: Reads from number `gate_at` on wait until it is set.
        gate_at: Number of the first read that waits.
    """

    def __init__(
        self,
        root: Root,
        *,
        fail_at: int | None = None,
        error_number: int = errno.EIO,
        short_at: int | None = None,
        gate: threading.Event | None = None,
        gate_at: int = 1,
    ) -> None:
        self.path = root.path
        self._root = root
        self._changed = threading.Condition()
        self.fail_at = fail_at
        self.error_number = error_number
        self.short_at = short_at
        self.gate = gate
        self.gate_at = gate_at
        self.reads: list[Read] = []
        """All reads in the order of their begin."""
        self.num_waiting = 0
        """Reads that wait at the gate now."""
        self.num_open = 0
        """Files that are open now."""

    @property
    def num_reads(self) -> int:
        """Reads that have begun."""
        return len(self.reads)

    @property
    def num_bytes(self) -> int:
        """Bytes that were asked for."""
        return sum(read.nbytes for read in self.reads)

    def wait_for_readers(self, count: int) -> None:
        """Block until so many reads wait at the gate.

        Raises:
            TimeoutError: They never came.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.num_waiting >= count, PATIENCE_SECONDS):
                raise TimeoutError(f"{self.num_waiting} reads wait at the gate, not {count}")

    def listdir(self) -> Sequence[str]:
        """Return the names of the files, sorted."""
        return self._root.listdir()

    def open(self, name: str, *, trusted: bool = False) -> Source:
        """Open one file of the real place."""
        source = self._root.open(name, trusted=trusted)
        with self._changed:
            self.num_open += 1
        return _FaultyFile(self, name, source)

    def close(self) -> None:
        """Let go of the real place."""
        self._root.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def begin(self, read: Read) -> int:
        """Log a read, hold it at the gate; return its number."""
        with self._changed:
            self.reads.append(read)
            number, gate = len(self.reads), self.gate
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

    def ended(self) -> None:
        """Count a file that was closed."""
        with self._changed:
            self.num_open -= 1


class _FaultyFile:
    def __init__(self, root: FaultyRoot, name: str, source: Source) -> None:
        self._root, self._name, self._source = root, name, source
        self._closed = False

    @property
    def path(self) -> str:
        return self._source.path

    @property
    def identity(self) -> Identity:
        return self._source.identity

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        root, nbytes = self._root, sum(region.nbytes for region in regions)
        number = root.begin(Read(self._name, offset, nbytes))
        if root.fail_at is not None and number >= root.fail_at:
            raise refused("reading", self.path, OSError(root.error_number, ""), offset=offset)
        if number == root.short_at:
            left = nbytes // 2
            for region in regions:
                part = min(left, region.nbytes)
                self._source.read_into(offset + nbytes // 2 - left, [region.sub(0, part)])
                left -= part
            raise TruncatedError("the file ends before its tensors do", path=self.path, offset=offset + nbytes // 2)
        self._source.read_into(offset, regions)

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._root.ended()
        self._source.close()
