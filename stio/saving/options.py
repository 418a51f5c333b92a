"""The keywords of saves, checked at the call, and what a save returns."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypedDict, runtime_checkable

import torch
from torch import nn

from stio.device.save_sources import LazyTensor
from stio.errors import StorageError
from stio.format.naming import check_pattern
from stio.format.sharding import parse_size
from stio.runtime.hashing import ALGORITHMS, HashName, new_hasher
from stio.runtime.progress import Progress, progress_callback
from stio.runtime.trace import Trace
from stio.storage.base import Transaction
from stio.storage.commit.target import OneFile, is_one_file

__all__ = [
    "Destination",
    "DestinationLike",
    "SaveKeywords",
    "SaveOptions",
    "SaveResult",
    "TensorsLike",
    "named",
    "settled",
]

DEFAULT_MAX_SHARD_SIZE = "5GB"
DEFAULT_PATTERN = "model{suffix}.safetensors"


@runtime_checkable
class Destination(Protocol):
    """A place of one's own to save to (`stio.testing.MemoryDestination`)."""

    def begin(
        self,
        *,
        num_shards: int,
        filename_pattern: str,
        shard_names: Literal["auto", "hub"],
        commit: Literal["index", "files"],
        durability: Literal["full", "none"],
    ) -> Transaction:
        """Begin one save; see `stio.storage.commit.transaction.begin_local`."""


DestinationLike: TypeAlias = str | os.PathLike[str] | Destination
"""A path ending in `.safetensors` (one file), any other path (a directory), or a place of one's own."""

TensorsLike: TypeAlias = Mapping[str, torch.Tensor] | Mapping[str, torch.Tensor | LazyTensor] | nn.Module
"""Tensors by name, some of them perhaps lazy, or a module, whose `state_dict()` is meant."""


def named(tensors: TensorsLike) -> dict[str, torch.Tensor | LazyTensor]:
    """Return what is to be saved, by name, in a mapping that is nobody else's.

    Raises:
        TypeError: Neither a mapping nor a module.
    """
    if isinstance(tensors, nn.Module):
        return dict(tensors.state_dict())
    if not isinstance(tensors, Mapping):
        raise TypeError(f"tensors must be a mapping of names to tensors or a module, not {type(tensors).__name__}")
    return dict(tensors)


def settled(destination: DestinationLike) -> str | OneFile | Destination:
    """Return a destination that stays where it is when the working directory changes while the save is under way.

    Raises:
        TypeError: Neither a path nor a place of one's own.
        StorageError: It is relative to a working directory that is gone.
    """
    if isinstance(destination, Destination):
        return destination
    path = os.fsdecode(destination)
    if path and not os.path.isabs(path):  # an empty one is refused with the other places that cannot be
        try:
            path = os.path.join(os.getcwd(), path)  # not abspath: a slash at its end means a directory
        except FileNotFoundError as error:
            raise StorageError("the working directory does not exist any more", path=path, errno=error.errno) from error
    return OneFile(path) if isinstance(destination, OneFile) else path


class SaveKeywords(TypedDict, total=False):
    """Keywords that `save` and `Saver.save` share; their meaning and defaults stand in `SaveOptions`."""

    max_shard_size: int | str | None
    metadata: Mapping[str, str] | None
    filename_pattern: str
    shared: Literal["dedupe", "clone", "error"]
    shard_names: Literal["auto", "hub"]
    commit: Literal["index", "files"]
    durability: Literal["full", "none"]
    hash: HashName | None
    progress: Progress
    trace: Trace | None
    switch_interval: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveOptions:
    """The keywords of `save` and `Saver.save`, as they came."""

    max_shard_size: int | str | None = None
    """Most bytes of tensors in one file of a directory, `"5GB"` unless said otherwise; a file destination has none."""
    metadata: Mapping[str, str] | None = None
    """Text to store with the checkpoint."""
    filename_pattern: str = DEFAULT_PATTERN
    """Names of the files in a directory; `{suffix}` becomes empty or `-00001-of-00003`."""
    shared: Literal["dedupe", "clone", "error"] = "dedupe"
    """Tensors that are the same memory: saved once and restored as one, saved each, or refused."""
    shard_names: Literal["auto", "hub"] = "auto"
    """`"hub"` keeps the plain names in a directory that has shards already; needs `commit="files"`."""
    commit: Literal["index", "files"] = "index"
    """What publishes a new generation in a directory that holds one: its index, or file by file."""
    durability: Literal["full", "none"] = "full"
    """`"none"` leaves out every fsync: a crash of the process is harmless, a power cut is not."""
    hash: HashName | None = None
    """Write a manifest with a digest of every file."""
    progress: Progress = None
    """Callable, bar or nothing."""
    trace: Trace | None = None
    """Record of spans."""
    switch_interval: float | None = None
    """Seconds; None leaves the interpreter's alone."""

    def __post_init__(self) -> None:
        progress_callback(self.progress)  # raises for what it cannot use, before anything begins
        if self.max_shard_size is not None:
            parse_size(self.max_shard_size)
        check_pattern(self.filename_pattern)
        _require_one_of("shared", self.shared, ("dedupe", "clone", "error"))
        _require_one_of("shard_names", self.shard_names, ("auto", "hub"))
        _require_one_of("commit", self.commit, ("index", "files"))
        _require_one_of("durability", self.durability, ("full", "none"))
        if self.hash is not None:
            _require_one_of("hash", self.hash, ALGORITHMS)
            new_hasher(self.hash)  # raises where the package for it is missing
        if self.switch_interval is not None and not self.switch_interval > 0:
            raise ValueError(f"switch_interval must be positive, not {self.switch_interval}")

    def max_shard_bytes(self, destination: DestinationLike) -> int | None:
        """Return the most bytes of tensors in one file, None where there is one file only."""
        if isinstance(destination, str | os.PathLike) and is_one_file(destination):
            if self.max_shard_size is not None:
                raise ValueError("max_shard_size is for directories; a destination ending in .safetensors is one file")
            return None
        return parse_size(self.max_shard_size or DEFAULT_MAX_SHARD_SIZE)


def _require_one_of(keyword: str, value: object, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"{keyword}= takes one of {', '.join(map(repr, choices))}, not {value!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveResult:
    """What a save did."""

    path: str
    """The destination, links resolved."""
    files: tuple[str, ...]
    """Names of the files with tensors in them, in order; the index is not among them."""
    total_bytes: int
    """Bytes of tensors."""
    file_bytes: int
    """Bytes of those files, headers included."""
    aliases: Mapping[str, str]
    """Names that were saved as another one's, to that one."""
    staged_seconds: float
    """From the call until the tensors could change."""
    written_seconds: float
    """From the call until every file was written and durable, nothing published yet."""
    committed_seconds: float
    """From the call until the checkpoint was published and durable."""
    hashes: Mapping[str, str]
    """Digest of each file, where `hash=` asked for it."""
