"""What a save takes and returns: tensors, destination, options and result.

`SaveOptions` is checked once, when it is made, before any other step. The public functions have its fields as
keywords.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from threading import TIMEOUT_MAX
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, get_args, runtime_checkable

from stio import process
from stio.errors import StorageError, printable
from stio.format import SharedPolicy, may_be_copied
from stio.format.files import FileName, FilePattern, HashName, advice_for_path, new_hasher
from stio.limits import checked_size, parse_size
from stio.process import require_unlocked
from stio.runtime.reports import Progress, Trace, progress_callback
from stio.schemes import SAVERS
from stio.storage import Root, Transaction, local_directory, open_destination
from stio.storage.commit import LOCK_TIMEOUT_SECONDS, SingleFile, is_one_file
from stio.text import counted, is_url, show_bytes, show_seconds, without_secrets

DEFAULT_MAX_SHARD_BYTES = 5_000_000_000
DEFAULT_PATTERN = "model{suffix}.safetensors"

_SCHEME = re.compile("([a-z][a-z0-9+.-]+:)/", re.IGNORECASE)  # of a URL, also of one that was made a Path

ShardNames: TypeAlias = Literal["auto", "hub"]
"""How shards are named beside an old checkpoint."""

CommitStep: TypeAlias = Literal["index", "files"]
"""What publishes a checkpoint in a directory that holds one."""

Durability: TypeAlias = Literal["full", "none"]
"""Whether what was saved survives a power cut."""


@runtime_checkable
class Destination(Protocol):
    """A destination that is no path."""

    def begin(
        self,
        *,
        num_shards: int,
        filename_pattern: str,
        shard_names: ShardNames,
        commit: CommitStep,
        durability: Durability,
    ) -> Transaction:
        """Begin one save; see `stio.storage.commit.transaction.begin_local`."""


@runtime_checkable
class BufferedDestination(Protocol):
    """A destination of saves that needs memory of its own, as a source behind a network does (`Requests`)."""

    def within(self, budget_bytes: int) -> tuple[Any, int]:
        """Return the destination with less memory of its own.

        Args:
            budget_bytes: Of the whole save.

        Returns:
            The destination, and most bytes that it uses.
        """


DestinationLike: TypeAlias = str | os.PathLike[str] | Destination | Root
"""A path or URL ending in `.safetensors` (one file), any other (a directory), a `RemoteRoot`, an object with `begin`.

A path that looks like a file of another kind or name (`w.pt`, `w.sft`) is refused, unless it is a directory already or
ends in a slash.
"""


def absolute_destination(destination: DestinationLike) -> str | SingleFile | Destination:
    """Return a destination that stays the same when the working directory changes during the save.

    Raises:
        TypeError: Neither a path nor a `Destination`.
        ValueError: It looks like a file of another kind.
        StorageError: It is relative, and the working directory does not exist any more.
    """
    require_unlocked()
    if isinstance(destination, Destination):
        return destination
    if isinstance(destination, Root) or (isinstance(destination, str) and is_url(destination)):
        remote: Destination = open_destination(destination)
        return remote
    if not isinstance(destination, str | os.PathLike):
        raise TypeError(f"a destination is a path, a URL or a RemoteRoot, not {type(destination).__name__}")
    require_checkpoint_path(destination)
    path = os.fsdecode(destination)
    if path and not os.path.isabs(path):  # the transaction refuses an empty one
        try:
            path = os.path.join(os.getcwd(), path)  # not abspath: a slash at its end means a directory
        except FileNotFoundError as error:
            raise StorageError("the working directory does not exist any more", path=path, errno=error.errno) from error
    return replace(destination, path=path) if isinstance(destination, SingleFile) else path


def require_checkpoint_path(destination: str | os.PathLike[str]) -> None:
    """Refuse what looks like a file of another kind, a URL or a home directory: a directory of this name is a mistake.

    Raises:
        ValueError: It ends like such a file, and is no directory; or it begins like a URL or with `~`, and no directory
            does.
    """
    path = os.fsdecode(destination)
    if path.partition(os.sep)[0] == "~" and not os.path.isdir("~"):
        raise ValueError(f"the destination {printable(path)!r} cannot be used; {advice_for_path(path)}")
    scheme = _SCHEME.match(path)
    if scheme is not None and not os.path.isdir(scheme[1]):
        if missing := advice_for_path(path, SAVERS):
            raise ValueError(f"the destination {printable(without_secrets(path))!r} cannot be used; {missing}")
        raise ValueError(
            f"the destination {printable(without_secrets(path))!r} looks like a URL; saves go to local paths, and to "
            "URLs of s3, gs and az, passed as text"
        )
    advice = "" if isinstance(destination, SingleFile) else FileName(os.path.basename(path)).advice_for_destination
    if advice and not os.path.isdir(path):
        raise ValueError(f"the destination {printable(path)!r} {advice}")


def adopted_directory(adopt: str | os.PathLike[str]) -> str:
    """Return the directory whose steps a saver takes over, as an absolute path.

    Raises:
        TypeError: It is no path.
        ValueError: It is a URL, empty or a file.
    """
    path = local_directory(adopt, "adopt=")
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"adopt= takes a directory, not {printable(os.fsdecode(adopt))!r}")
    return path


class Inherited(Enum):
    """The type of `INHERITED`."""

    INHERITED = "the saver's own"

    def __repr__(self) -> str:
        return "<the saver's own>"


INHERITED = Inherited.INHERITED
"""Default of the keywords of `Saver.save`: the value that the saver was made with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """The keywords of `save` and `Saver.save`.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is not allowed.
        ImportError: A package that a value needs is not installed.
    """

    EXIT_PATIENCE_SECONDS: ClassVar[float] = 60.0
    """Longest time that the interpreter's exit waits for saves that make no progress, before they are rolled back."""

    max_shard_size: int | str | None = None
    """Most bytes of tensors in one file of a directory; None: `"5GB"`. Not for a destination that is one file."""
    metadata: Mapping[str, str] | None = None
    """Text to store with the checkpoint, without the keys that each save makes anew."""
    filename_pattern: str = DEFAULT_PATTERN
    """Names of the files in a directory; `{suffix}` becomes empty or `-00001-of-00003`."""
    shared: SharedPolicy = "dedupe"
    """Tensors that share memory: saved once and restored as one, saved each, or refused."""
    shard_names: ShardNames = "auto"
    """`"hub"` keeps the plain names in a directory that holds shards; needs `commit="files"`."""
    commit: CommitStep = "index"
    """What publishes a checkpoint in a directory that holds one: the rename of its index, or of file after file."""
    durability: Durability = "full"
    """`"none"` leaves out every fsync: a crash of the process does no harm, a power cut does."""
    hash: HashName | None = None
    """Write a manifest with a digest of every file."""
    lock_timeout: float = LOCK_TIMEOUT_SECONDS
    """Seconds for which the save waits for locks of other saves, all waits together; then it raises
    `ConcurrentSaveError`."""
    progress: Progress = None
    """A callable that gets events, a bar, or None."""
    trace: Trace | None = None
    """Record of spans."""
    switch_interval: float | None = None
    """The interpreter's switch interval during the save, in seconds; None: unchanged."""

    def __post_init__(self) -> None:
        progress_callback(self.progress)  # for its errors
        if self.metadata is not None:
            if not isinstance(self.metadata, Mapping):
                raise TypeError(f"metadata= takes a mapping from text to text, not {printable(self.metadata)}")
            passed_on = {key: text for key, text in self.metadata.items() if may_be_copied(key)}
            object.__setattr__(self, "metadata", passed_on)
        if self.max_shard_size is not None:
            checked_size(self.max_shard_size, "max_shard_size")
        if self.filename_pattern != DEFAULT_PATTERN:
            FilePattern(self.filename_pattern).require_safe()
        for keyword, value, choices in (
            ("shared", self.shared, get_args(SharedPolicy)),
            ("shard_names", self.shard_names, get_args(ShardNames)),
            ("commit", self.commit, get_args(CommitStep)),
            ("durability", self.durability, get_args(Durability)),
        ):
            if value not in choices:
                raise ValueError(f"{keyword}= takes one of {', '.join(map(repr, choices))}, not {value!r}")
        if self.hash is not None:
            new_hasher(self.hash)  # for its errors
        if isinstance(self.lock_timeout, bool) or not isinstance(self.lock_timeout, int | float):
            raise TypeError(f"lock_timeout= takes a number of seconds, not {self.lock_timeout!r}")
        if not 0 <= self.lock_timeout <= TIMEOUT_MAX:  # also False for NaN
            raise ValueError(
                f"lock_timeout must be from 0 to {TIMEOUT_MAX:.0f} seconds, not {printable(self.lock_timeout)}"
            )
        process.check_switch_interval(self.switch_interval)
        if self.trace is not None and not isinstance(self.trace, Trace):
            raise TypeError(f"trace= takes a stio.Trace, not {self.trace!r}")

    def with_changes(self, **changes: object) -> SaveOptions:
        """Return these options with the given fields replaced; fields that are `INHERITED` stay as they are."""
        given: dict[str, Any] = {name: value for name, value in changes.items() if value is not INHERITED}
        return replace(self, **given) if given else self

    def max_shard_bytes(self, destination: DestinationLike) -> int | None:
        """Return the most bytes of tensors in one file; None if the destination is one file.

        Raises:
            ValueError: `max_shard_size` was given, and the destination is one file.
        """
        if isinstance(destination, str | os.PathLike) and is_one_file(destination):
            if self.max_shard_size is not None:
                raise ValueError("max_shard_size is for directories; a destination ending in .safetensors is one file")
            return None
        return DEFAULT_MAX_SHARD_BYTES if self.max_shard_size is None else parse_size(self.max_shard_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """Report of a save."""

    path: str
    """The destination: a path with links resolved, or a URL without secrets."""
    kind: Literal["full", "delta"]
    """What was written: all tensors, or what differs from the checkpoint before it."""
    files: tuple[str, ...]
    """Names of the files that hold tensors, in order; the index is not among them."""
    total_bytes: int
    """Bytes of tensors, whether or not all of them were written."""
    changed_bytes: int
    """Bytes of the elements that changed; of a full save, and of tensors that a delta has whole, of all elements."""
    file_bytes: int
    """Bytes of those files, headers included."""
    written_bytes: int
    """Bytes of all files that the save wrote: index and manifest too."""
    aliases: Mapping[str, str]
    """Names that share another tensor's data in the checkpoint, to that tensor's name."""
    staged_seconds: float
    """Time from the call until the snapshot was complete and the tensors could change."""
    written_seconds: float
    """Time from the call until every file was written and durable, before the commit."""
    committed_seconds: float
    """Time from the call until the checkpoint was published and durable."""
    hashes: Mapping[str, str]
    """Digest of each file by its name; empty without `hash=`."""
    out_of_range: Mapping[str, int] = field(default_factory=dict)
    """By name, the number of values that were outside the range of the dtype to which they were cast."""

    def __repr__(self) -> str:
        size = f"{counted(len(self.files), 'file')}, {show_bytes(self.total_bytes)}"
        if self.kind == "delta":
            size = f"delta of {show_bytes(self.written_bytes)} for {show_bytes(self.total_bytes)}"
        seconds = show_seconds(self.committed_seconds)
        return f"<SaveResult {printable(self.path)!r}: {size}, published after {seconds}>"
