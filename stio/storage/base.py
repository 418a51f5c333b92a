"""What every storage owes the engine: open files, an identity, and bytes put where they are wanted; or a transaction.

Two lanes share one contract (`stio.testing.SourceContract`): a `Source` blocks a worker thread, an
`AsyncSource` is awaited on the engine's loop. Both fill memory by address; neither knows tensors or devices.
Saving goes through a `Transaction`: files are written where nobody sees them, and published in one step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from stio.errors import ChangedDuringReadError
from stio.runtime.memory import Region

__all__ = ["AsyncRoot", "AsyncSource", "Identity", "Note", "Root", "Sink", "Source", "Transaction"]


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
    ctime_ns: int = field(default=0, compare=False)
    """Time of the last change of content, name or mode; 0 where there is none. Nobody can set it back, but a rename
    and a link that goes move it too: it tells what may have changed, not what has."""

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


class Sink(Protocol):
    """One new file, written from several worker threads at once. Each byte is written exactly once."""

    @property
    def path(self) -> str:
        """Name for messages: where the file will stand."""

    def write_from(self, offset: int, region: Region) -> None:
        """Write a region's bytes at `offset`. Blocks.

        Args:
            offset: A multiple of `PAGE_BYTES`.
            region: Begins on a page border; ends inside a page only where the file ends.

        Raises:
            NoSpaceError: There is no room after all.
            StorageError: The operating system refused; `errno` says why.
        """

    def finish(self) -> None:
        """Make the file durable, as far as the transaction wants that, and give descriptors back. Called once.

        Raises:
            StorageError: The system could not; nothing of this file is to be trusted.
        """


@dataclass(frozen=True, slots=True)
class Note:
    """A small file beside the checkpoint that must be right before and after the commit; None: it is not there."""

    name: str
    """Name in the destination's directory."""
    before: bytes | None
    """What stands in it from shortly before the commit on; must be right for the old and the new checkpoint."""
    after: bytes | None
    """What stands in it once the commit is done."""


class Transaction(Protocol):
    """One save: new files that nobody sees, then one step that publishes them all.

    Used by one operation; `create` comes before the first byte is written, `Sink.finish` of all before `commit`.
    """

    @property
    def path(self) -> str:
        """The destination, for messages and results."""

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names that the shards will have once they are published, in the plan's order."""

    @property
    def wants_index(self) -> bool:
        """Whether `commit` takes an index (more than one shard, or a directory that has one already)."""

    def create(self, nbytes: Sequence[int]) -> Sequence[Sink]:
        """Create all shards, their space reserved.

        Args:
            nbytes: Size of each shard's file.

        Raises:
            NoSpaceError: They do not fit (ENOSPC, EDQUOT, EFBIG); known here, before the first byte.
            StorageError: The operating system refused.
        """

    def read_note(self, name: str) -> bytes | None:
        """Return the content of a small file beside the old checkpoint, None if there is none."""

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        """Publish. Once this has begun it is carried to its end.

        Raises:
            ConcurrentSaveError: Another save changed the destination since this one began. Nothing was changed.
            CommitUncertainError: The checkpoint is in place, but perhaps not durable.
            StorageError: The operating system refused; the old checkpoint stands.
        """

    def abort(self) -> None:
        """Remove everything that was staged; idempotent, never raises, and does nothing after a commit."""
