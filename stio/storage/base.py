"""What every storage owes the engine: open files, an identity, and bytes put where they are wanted.

Two lanes share one contract (`stio.testing.SourceContract`): a `Source` blocks a worker thread, an
`AsyncSource` is awaited on the engine's loop. Both fill memory by address; neither knows tensors or devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stio.errors import ChangedDuringReadError
from stio.memory import Region

__all__ = ["AsyncRoot", "AsyncSource", "Identity", "Root", "Source"]


@dataclass(frozen=True, slots=True)
class Identity:
    """What tells one state of a file from another."""

    device: int
    """`st_dev`, 0 where there is none."""
    inode: int
    """`st_ino`, 0 where there is none."""
    nbytes: int
    """Size."""
    mtime_ns: int
    """Time of the last change, nanoseconds."""

    def require_same(self, now: Identity, path: str) -> None:
        """Raise `ChangedDuringReadError` unless `now` is this identity."""
        if self != now:
            raise ChangedDuringReadError(
                "the file changed while it was being read; load it again", path=path, expected=self, found=now
            )


class Source(Protocol):
    """One open file, read from worker threads. Every method may be called from several threads at once."""

    @property
    def path(self) -> str:
        """Name for messages."""

    @property
    def identity(self) -> Identity:
        """The state of the file when it was opened; its size among it."""

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on. Blocks.

        Raises:
            TruncatedError: The file ends before the last region is full.
            StorageError: The operating system refused; `errno` says why.
        """

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the file is not the one that was opened."""

    def close(self) -> None:
        """Give the descriptor back. Idempotent; no read may be under way."""


@runtime_checkable
class Root(Protocol):
    """A place that holds a checkpoint's files: a directory, or what a test puts in its stead."""

    path: str
    """Name for messages."""

    def listdir(self) -> Sequence[str]:
        """Return the names of the files, sorted."""

    def open(self, name: str, *, trusted: bool = False) -> Source:
        """Open one file; see `stio.storage.local.LocalRoot.open`."""

    def close(self) -> None:
        """Let go of the place; files opened from it stay open. Idempotent."""


class AsyncSource(Protocol):
    """One open file, read on the engine's event loop. The contract is `Source`'s."""

    @property
    def path(self) -> str:
        """Name for messages."""

    @property
    def identity(self) -> Identity:
        """The state of the file when it was opened."""

    async def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions; a cancel waits until no thread writes into them any more."""

    async def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the file is not the one that was opened."""

    async def aclose(self) -> None:
        """Give the descriptor back. Idempotent."""


@runtime_checkable
class AsyncRoot(Protocol):
    """A place that holds a checkpoint's files, used on the engine's event loop. The contract is `Root`'s."""

    path: str
    """Name for messages."""

    async def listdir(self) -> Sequence[str]:
        """Return the names of the files, sorted."""

    async def open(self, name: str, *, trusted: bool = False) -> AsyncSource:
        """Open one file; see `stio.storage.local.LocalRoot.open`."""

    async def aclose(self) -> None:
        """Let go of the place; files opened from it stay open. Idempotent."""
