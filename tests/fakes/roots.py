"""Storages for tests: files in memory, and a root whose n-th read fails, ends early or waits.

Both take the place of a path.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from fakes.gate import Gated
from stio.errors import CheckpointNotFoundError, TruncatedError
from stio.runtime.memory import Region
from stio.storage.base import Identity, Root, Source
from stio.storage.checks import refused


class MemoryRoot:
    """A directory of files in memory; a `Root`.

    Args:
        files: Content of each file, by name.
        path: Name of the directory in messages.
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
            CheckpointNotFoundError: There is no file of this name.
        """
        if name not in self._files:
            raise CheckpointNotFoundError("there is no such file", path=f"{self.path}/{name}")
        return _MemoryFile(self, name)

    def rewrite(self, name: str, data: bytes) -> None:
        """Replace the content of a file in place: open sources read the new bytes, and detect the change."""
        self._files[name] = (data, self._files[name][1] + 1)

    def content(self, name: str) -> tuple[bytes, Identity]:
        """Return the content and the identity of a file."""
        data, version = self._files[name]
        return data, Identity(0, 0, len(data), version)

    def close(self) -> None:
        """Do nothing: there is nothing to close."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _MemoryFile:
    def __init__(self, root: MemoryRoot, name: str) -> None:
        self._root, self._name = root, name
        self.path = f"{root.path}/{name}"
        self.identity = root.content(name)[1]

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        data = self._root.content(self._name)[0]
        for region in regions:
            part = data[offset : offset + region.nbytes]
            region.write(0, part)
            if len(part) < region.nbytes:
                raise TruncatedError(
                    "the file ends before its tensors do",
                    path=self.path,
                    offset=offset + len(part),
                    expected=f"{region.nbytes - len(part):,} more bytes",
                )
            offset += region.nbytes

    def check_unchanged(self) -> None:
        self.identity.require_same(self._root.content(self._name)[1], self.path)

    def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Read:
    """One call of `read_into`."""

    name: str
    """Name of the file."""
    offset: int
    """Offset of the first byte."""
    nbytes: int
    """Length in bytes."""


class FaultyRoot(Gated):
    """A root that logs each read of its files, and makes reads fail on request; a `Root`.

    Reads are counted from 1. Those of headers and of the index count too: with `fail_at = root.num_reads + n`, set
    once a checkpoint is open, its n-th read of data fails. Faults are attributes; a test may change them at any time.

    Args:
        root: The real root.
        fail_at: Number of the first read that fails; all later ones fail too.
        error_number: The errno of that failure.
        short_at: Number of the read that finds the end of the file halfway.
        gate: Reads from number `gate_at` on wait until this event is set.
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
        super().__init__(gate, gate_at)
        self.path = root.path
        self._root = root
        self.fail_at = fail_at
        self.error_number = error_number
        self.short_at = short_at
        self.reads: list[Read] = []
        """All reads, in the order of their start."""
        self.num_open = 0
        """Files that are open now."""

    @property
    def num_reads(self) -> int:
        """Number of reads that have started."""
        return len(self.reads)

    @property
    def num_bytes(self) -> int:
        """Bytes of all reads."""
        return sum(read.nbytes for read in self.reads)

    def wait_for_readers(self, count: int) -> None:
        """Block until `count` reads wait at the gate.

        Raises:
            TimeoutError: It did not happen in time.
        """
        self.wait_for_waiting(count, "reads")

    def listdir(self) -> Sequence[str]:
        """Return the names of the files, sorted."""
        return self._root.listdir()

    def open(self, name: str, *, trusted: bool = False) -> Source:
        """Open one file of the real root."""
        source = self._root.open(name, trusted=trusted)
        self.count_open(1)
        return _FaultyFile(self, name, source)

    def close(self) -> None:
        """Close the real root."""
        self._root.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def count_open(self, change: int) -> None:
        """Count a file that was opened (1) or closed (-1)."""
        with self._changed:
            self.num_open += change


class _FaultyFile:
    def __init__(self, root: FaultyRoot, name: str, source: Source) -> None:
        self._root, self._name, self._source = root, name, source
        self.path, self.identity = source.path, source.identity
        self._closed = False

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        root, nbytes = self._root, sum(region.nbytes for region in regions)
        number = root.pass_gate(root.reads, Read(self._name, offset, nbytes))
        if root.fail_at is not None and number >= root.fail_at:
            del regions  # an error keeps this frame: stio clears only frames of its own
            raise refused("reading", self.path, OSError(root.error_number, ""), offset=offset)
        if number == root.short_at:
            self._read_half(offset, nbytes // 2, regions)
            del regions
            raise TruncatedError("the file ends before its tensors do", path=self.path, offset=offset + nbytes // 2)
        self._source.read_into(offset, regions)

    def _read_half(self, offset: int, nbytes: int, regions: Sequence[Region]) -> None:
        left = nbytes
        for region in regions:
            part = min(left, region.nbytes)
            self._source.read_into(offset + nbytes - left, [region.sub(0, part)])
            left -= part

    def check_unchanged(self) -> None:
        self._source.check_unchanged()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._root.count_open(-1)
        self._source.close()
