"""The interfaces of a storage: for loads open files that fill given memory, for saves a transaction.

A `Root` opens `Source`s; worker threads call them and block. A storage with an asynchronous interface runs its
coroutines by `stio.runtime.calls.run_on_loop`. `stio.testing.SourceContract` is the contract as a test suite. A
storage moves bytes, not tensors. A save writes files that no reader sees, and a `Transaction` publishes them in one
step.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

from stio.errors import ChangedDuringReadError, CommitUncertainError
from stio.format.files import Hasher
from stio.limits import PAGE_BYTES
from stio.runtime.memory import Region, allocate

_HEAP_BYTES = 64 << 10
"""Up to this size memory comes from the heap: to map and unmap pages takes longer than to clear it."""

_SMALL_REQUEST_BYTES = 1 << 20
"""With less memory than all requests need, they become smaller down to this size before they become fewer."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Identifies one state of one file: two opens with equal identities read the same bytes."""

    device: int
    """`st_dev`, 0 if there is none."""
    inode: int
    """`st_ino`, 0 if there is none."""
    nbytes: int
    """Size."""
    mtime_ns: int
    """Time of the last change, nanoseconds."""
    ctime_ns: int = field(default=0, compare=False)
    """Time of the last change of content, name or mode; 0 if there is none. No program can set it back. A rename or a
    removed hard link changes it too, so a new value means only that the content may have changed."""
    etag: str = ""
    """Entity tag of an object in a remote store, which names one content; empty if there is none."""

    def require_same(self, now: Identity, path: str) -> None:
        """Raise `ChangedDuringReadError` unless `now` is this identity."""
        if self != now:
            raise ChangedDuringReadError(
                "the file changed while it was being read; load it, or open it, again",
                path=path,
                expected=str(self),
                found=str(now),
            )

    def __str__(self) -> str:
        if self.etag:
            return f"ETag {self.etag}"
        return f"{self.nbytes:,} bytes, inode {self.inode}, changed at {self.mtime_ns / 1e9:.6f}"


class Source(Protocol):
    """One open file, read from worker threads. Every method may be called from several threads at once."""

    @property
    def path(self) -> str:
        """Name for messages."""

    @property
    def identity(self) -> Identity:
        """The state of the file when it was opened, with its size."""

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on. Blocks.

        Raises:
            TruncatedError: The file ends before the last region is full.
            StorageError: The operating system reported an error; `errno` is its number.
        """

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the file is not the one that was opened."""

    def close(self) -> None:
        """Close the file. Idempotent; no read may be under way."""


def digest_of_source(source: Source, hasher: Hasher, memory: Region, check: Callable[[int], object]) -> str:
    """Read a file from its begin to its end, and return its digest.

    Args:
        source: The file.
        hasher: A new one.
        memory: It is read into this, piece by piece.
        check: Called with the bytes of each piece before it is read; it raises to end this.

    Raises:
        ChangedDuringReadError: The file was changed; it may be undamaged.
        StioError: It could not be read.
    """
    nbytes = source.identity.nbytes
    for offset in range(0, nbytes, memory.nbytes):
        piece = memory.sub(0, min(memory.nbytes, nbytes - offset))
        check(piece.nbytes)
        source.read_into(offset, [piece])
        hasher.update(piece.view())
    source.check_unchanged()
    return hasher.hexdigest()


@dataclass(frozen=True, slots=True)
class Requests:
    """How a source behind a network is read best: its latency is high, and one connection is slow."""

    nbytes: int
    """Size of one read, a multiple of the page size."""
    num_in_flight: int
    """Reads that should be under way at one time."""
    gap_bytes: int
    """Longest run of bytes of no use that costs less to read than another request."""

    @property
    def buffer_bytes(self) -> int:
        """Memory that the source uses of its own while all reads are under way: an answer is read as a whole."""
        return self.nbytes * self.num_in_flight

    def within(self, total_bytes: int) -> Requests:
        """Return fewer and smaller requests, whose `buffer_bytes` are at most a total, or one page if that is less."""
        num_in_flight = max(1, min(self.num_in_flight, total_bytes // min(self.nbytes, _SMALL_REQUEST_BYTES)))
        nbytes = min(self.nbytes, total_bytes // num_in_flight)
        return replace(self, nbytes=max(PAGE_BYTES, nbytes // PAGE_BYTES * PAGE_BYTES), num_in_flight=num_in_flight)


@runtime_checkable
class RequestedSource(Source, Protocol):
    """A source behind a network. A load takes the sizes of its reads, and their number, from it."""

    @property
    def requests(self) -> Requests:
        """How it is read best."""


@runtime_checkable
class Root(Protocol):
    """A place that holds the files of a checkpoint: a directory, or a replacement of one in a test."""

    path: str
    """Name for messages."""

    def listdir(self) -> Sequence[str]:
        """Return the names of the files, sorted."""

    def open(self, name: str, *, trusted: bool = False) -> Source:
        """Open one file; see `stio.storage.local.LocalRoot.open`."""

    def close(self) -> None:
        """Close it; files opened from it stay open. Idempotent."""


@runtime_checkable
class ParallelRoot(Root, Protocol):
    """A root that opens many files in the time of one."""

    def open_ahead(self, names: Sequence[str]) -> None:
        """Start to open these files, each of which `open` returns later. Blocks; raises no error of a file."""


@runtime_checkable
class RootInTree(Root, Protocol):
    """A root with others beside it, such as those of a run's other steps."""

    def at(self, path: str, *, up: int) -> Root:
        """Return the directory at a path, which may be empty, relative to the one `up` levels above this.

        Raises:
            CheckpointNotFoundError: There are not so many levels.
        """


class FileWriter(Protocol):
    """One new file, written from several worker threads at once. Each byte is written exactly once."""

    is_ordered: bool
    """Whether `write_from` waits until the bytes before were written.

    Then the calls must begin in the order of the offsets. Otherwise all threads may wait for a block that none of them
    has.
    """

    @property
    def path(self) -> str:
        """Name for messages: the path that the file will have."""

    def write_from(self, offset: int, region: Region) -> None:
        """Write a region's bytes at `offset`. Blocks.

        Args:
            offset: A multiple of `PAGE_BYTES`.
            region: Host memory that starts at a page boundary. It ends inside a page only at the end of the file.

        Raises:
            NoSpaceError: There is too little space, although it was reserved.
            StorageError: The operating system reported an error; `errno` is its number.
        """

    def finish(self) -> None:
        """Complete the file: make it durable, if the transaction is durable, and close it. Called once.

        Raises:
            StorageError: The operating system reported an error; the content of this file must not be used.
        """


@dataclass(frozen=True, slots=True)
class Note:
    """A small file beside the checkpoint, with a content before and one after the commit; None: it does not exist."""

    name: str
    """Name in the destination's directory."""
    before: bytes | None
    """Its content from shortly before the commit on; it must be valid for the old and for the new checkpoint."""
    after: bytes | None
    """Its content after the commit."""


class SaveRules(Protocol):
    """What a transaction needs of `SaveOptions`, which has checked the values."""

    @property
    def filename_pattern(self) -> str:
        """Pattern of the names of files in a directory."""

    @property
    def shard_names(self) -> Literal["auto", "hub"]:
        """Names of shards: "hub", or "auto": the same, but with the save's id beside an old checkpoint."""

    @property
    def commit(self) -> Literal["index", "files"]:
        """What publishes a checkpoint in a directory that holds one: the index, or its files one by one."""

    @property
    def durability(self) -> Literal["full", "none"]:
        """Whether anything is synced."""

    @property
    def lock_timeout(self) -> float:
        """Seconds for which the whole save waits for locks of other saves."""


State: TypeAlias = Literal["open", "prepared", "committing", "published", "uncertain", "rolled back"]
"""What has become of a save. Uncertain: it is not known whether readers find the new checkpoint, or whether they still
will after a power cut."""

Event: TypeAlias = Literal["prepare", "commit", "publish", "doubt", "leave", "roll back"]
"""What a save does, or what became of its commit."""

LIFE_CYCLE: Mapping[tuple[State, Event], State] = {
    ("open", "prepare"): "prepared",
    ("prepared", "commit"): "committing",
    ("committing", "publish"): "published",
    ("committing", "doubt"): "uncertain",
    ("open", "leave"): "published",  # another process publishes the files, or removes them
    ("prepared", "leave"): "published",
    ("open", "roll back"): "rolled back",
    ("prepared", "roll back"): "rolled back",
    ("committing", "roll back"): "rolled back",
}
"""The state of a save after an event. A state without a row is an end; in each other one a save can be rolled back."""


class Transaction:
    """One save: prepare new files that no reader sees, then commit (one step publishes them all) or roll back.

    The base of the transactions of all destinations. It has the order of the steps, and says what ends a save; a
    destination has the steps: `_create`, `_prepare`, `_publish`, `_end`. One operation calls `create`, then
    `FileWriter.write_from` and `finish` of all files, then `prepare_commit` and `commit`. Before the commit it may call
    `roll_back`.

    `LIFE_CYCLE` has the states. `prepare_commit` works in the first one only, `roll_back` does nothing after an end;
    `create`, `read_note` and `commit` raise `ValueError` once a commit has begun. A commit that raises a `StioError`
    has rolled back; only after `CommitUncertainError` the new files stay, since the checkpoint may consist of them.
    After another exception in the middle, such as a `MemoryError`, the next save there, or `stio gc`, completes the
    commit or rolls it back.
    """

    path: str
    """The destination, for messages and results."""
    shard_names: tuple[str, ...]
    """Names that the shards will have after the commit, in the plan's order."""
    takes_index: bool
    """Whether `commit` takes an index (more than one shard, or a directory that has one already)."""
    is_recorded = False
    """Whether `published` says what was published, so that a `Saver` may delete it later."""
    state: State = "open"
    """See above."""
    _rolls_back_at_once = True  # False: by the caller of a commit that failed
    _writers: Sequence[Any] = ()

    @property
    def has_ended(self) -> bool:
        """Whether it was committed or rolled back."""
        return (self.state, "roll back") not in LIFE_CYCLE

    def require_names(self, *names: str) -> None:
        """Require that files can have names of this length.

        Raises:
            StorageError: One is too long.
        """

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Create all shards and reserve their space.

        Args:
            nbytes: Size of each shard's file.

        Raises:
            NoSpaceError: They do not fit (ENOSPC, EDQUOT, EFBIG). This is detected before the first byte is written.
            StorageError: The operating system reported an error.
        """
        self._require_open()
        if self._writers or len(nbytes) != len(self.shard_names):
            raise ValueError(f"{self.path}: {len(self.shard_names)} shards are created, once")
        self._writers = self._create(nbytes)
        return self._writers

    def read_note(self, name: str) -> bytes | None:
        """Return the content of a small file beside the old checkpoint, None if it does not exist."""
        return None

    def digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> list[str] | None:
        """Return the digest of each file, in the plan's order, where several processes have written them; else None.

        Args:
            new_hasher: Makes one for each file.
            check: Called during waits and reads; it raises to end them.

        Raises:
            StioError: A file cannot be read, or another process has failed.
        """
        return None

    def prepare_commit(self, check: Callable[[], None] = lambda: None) -> None:
        """Do all that precedes the commit and can be cancelled. Idempotent; `commit` does it otherwise.

        Args:
            check: Called during waits; it raises to end them, as `Operation.check` does.

        Raises:
            StioError: The files cannot be published; the caller rolls back.
        """
        if self.state == "open":
            self._prepare(check)
            self._after("prepare")

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        """Publish the new files. A commit that has started cannot be cancelled.

        Args:
            index: Content of the new index; None unless `takes_index`.
            notes: Small files that change with the commit.

        Raises:
            ValueError: The save has ended, or files or the index are missing or superfluous; nothing was done.
            ConcurrentSaveError: Another save changed the destination since this one started. Nothing was changed.
            CommitUncertainError: The new checkpoint is in place, or may be, but may not be durable.
            StorageError: The operating system reported an error; the old checkpoint is unchanged.
        """
        self._require_open()
        if (index is not None) != self.takes_index:
            raise ValueError(f"{self.path}: " + ("an index is missing" if index is None else "no index"))
        self._require_complete(notes)
        try:
            self.prepare_commit()
            self._after("commit")
            self._publish(index, notes)
        except BaseException as error:
            if isinstance(error, CommitUncertainError):
                self._after("doubt")
            elif self._rolls_back_at_once:
                self.roll_back()
            raise
        self._after("publish")

    def published(self) -> Published | None:
        """Return what was published, if it `is_recorded`; called after the commit.

        Raises:
            StioError: It cannot be read.
        """
        return None

    def roll_back(self) -> None:
        """Remove all new files. Idempotent; never raises; does nothing after a commit."""
        if not self.has_ended:
            self._after("roll back")

    # What a destination does.

    def _create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Create the shards; see `create`."""
        raise NotImplementedError

    def _require_complete(self, notes: Sequence[Note]) -> None:
        """Require that all files are finished; raise `ValueError` otherwise."""

    def _prepare(self, check: Callable[[], None]) -> None:
        """Do what precedes the commit; see `prepare_commit`."""

    def _publish(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Make the new files visible in one step; see `commit`."""
        raise NotImplementedError

    def _end(self) -> None:
        """Release everything, and remove what has no use in this `state`. Called once, at the end; never raises."""

    def _after(self, event: Event) -> None:
        self.state = LIFE_CYCLE[self.state, event]
        if (self.state, "roll back") not in LIFE_CYCLE:
            self._end()

    def _require_open(self) -> None:
        if self.state not in ("open", "prepared"):
            raise ValueError(f"{self.path}: the save has ended")


class Published(Protocol):
    """What a save has published, for its deletion later (`keep_last`)."""

    @property
    def files(self) -> Collection[str]:
        """Paths or URLs of its files."""

    def remove(self, *, spare: Set[str] = frozenset()) -> None:
        """Delete it, as far as it is unchanged. What does not exist any more is no error.

        Args:
            spare: Files that newer checkpoints consist of.

        Raises:
            StioError: It cannot be deleted.
        """


def read_bytes(source: Source, offset: int, nbytes: int) -> bytes:
    """Return `nbytes` bytes of a source from `offset` on; raises as `Source.read_into` does."""
    if not nbytes:
        return b""
    if nbytes > _HEAP_BYTES:
        region = allocate(nbytes).sub(0, nbytes)
        source.read_into(offset, [region])
        return region.tobytes()
    memory = array("B", bytes(nbytes))
    source.read_into(offset, [Region(memory.buffer_info()[0], nbytes, memory)])
    return memory.tobytes()
