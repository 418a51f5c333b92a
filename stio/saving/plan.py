"""From tensors and a wish to writes: what is kept, which shard, which header, which blocks. Pure; no I/O, no torch.

A block is one write: an aligned piece of a shard's file image. It says which bytes of the shard's header fall into
it, and which bytes of which tensors, so that any worker can fill any block. Equal tensors, metadata and sizes give
equal plans, and equal plans equal files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stio.format.header_build import build_header
from stio.format.sharding import TensorSource, build_index, split_into_shards
from stio.format.shared import ALIASES_KEY, SharedPolicy, aliases_json, resolve_shared
from stio.runtime.limits import PAGE_BYTES

__all__ = ["Piece", "ShardPlan", "WriteBlock", "WritePlan", "plan_files", "plan_writes"]

_FORMAT = {"format": "pt"}
"""What the hub and its readers want to find in every file."""


class Piece(NamedTuple):
    """Consecutive bytes of one tensor in one block."""

    source: int
    """Position of the tensor in the plan's sources."""
    start: int
    """First byte, counted in the tensor; on a border of its elements."""
    at: int
    """Where it lands in the block."""
    nbytes: int
    """Length."""
    ends: bool
    """Whether it is the tensor's last piece."""


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """One write: a range of one shard's file and where its bytes come from."""

    shard: int
    """Index of the shard in the plan."""
    offset: int
    """First byte in the file; a multiple of the block size."""
    nbytes: int
    """Length of the range; the block size, but for the last block of a file."""
    pieces: tuple[Piece, ...]
    """Tensors' bytes in it, in file order; with those of the header they fill it without a gap."""

    def head(self, header: bytes) -> bytes:
        """Return the bytes of the shard's header that fall into the block; they land at its start."""
        return header[self.offset : self.offset + self.nbytes]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardPlan:
    """One file."""

    header: bytes
    """Everything before the data: length, JSON, padding."""
    names: tuple[str, ...]
    """Names of its tensors, in the order of their data."""
    listed: tuple[str, ...]
    """The same names in the caller's order."""
    nbytes: int
    """Size of the file."""
    data_bytes: int
    """Bytes of its tensors."""
    blocks: tuple[WriteBlock, ...]
    """The writes that make up the file, in order; at least one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePlan:
    """All files of one save."""

    sources: tuple[TensorSource, ...]
    """The tensors that are saved with bytes of their own, in the caller's order. The index does not need them."""
    shards: tuple[ShardPlan, ...]
    """The files; at least one."""
    aliases: Mapping[str, str]
    """Names that were dropped, to the name whose data they share."""
    total_bytes: int
    """Bytes of all tensors, headers not counted."""
    metadata: Mapping[str, str]
    """The caller's text metadata."""

    def index(self, shard_names: Sequence[str]) -> bytes:
        """Return the bytes of the index, whether or not there is more than one shard.

        Args:
            shard_names: Name of each shard's file, in the plan's order.

        Raises:
            ValueError: Not one name for each shard.
        """
        # The hub's order: shard by shard, and inside a shard as the caller gave the tensors, not as they lie in it.
        weight_map = {name: file for shard, file in zip(self.shards, shard_names, strict=True) for name in shard.listed}
        return build_index(weight_map, self.total_bytes, {**self.metadata, **_alias_metadata(self.aliases)})


def plan_writes(
    sources: Sequence[TensorSource],
    *,
    max_shard_bytes: int | None,
    block_bytes: int,
    metadata: Mapping[str, str] | None = None,
    shared: SharedPolicy = "dedupe",
) -> WritePlan:
    """Turn tensors into files and writes.

    One file carries the caller's metadata, beside `format`, in its header; of several each says only `format`, and
    the index carries the metadata. Every tensor is counted by its own bytes, also where several lie on one storage:
    none of them shares bytes in the file, so that a shard is as large as the maximum says.

    Args:
        sources: The tensors, no name twice.
        max_shard_bytes: Largest shard, headers not counted; a larger tensor is a shard of its own. None: one file.
        block_bytes: Largest write; a multiple of `PAGE_BYTES`.
        metadata: Text to store. `format` may be given here, `total_size` and stio's own key may not.
        shared: See `resolve_shared`.

    Raises:
        SharedTensorsError: Tensors share memory, and that was to be an error.
        ValueError: A name or a metadata key that cannot be used, or a size that makes no sense.
        TypeError: A metadata key or value is no string.
        UnsupportedDtypeError: A dtype that the format does not have.
        LimitError: A header would be longer than readers accept.
    """
    if max_shard_bytes is not None and max_shard_bytes <= 0:
        raise ValueError(f"the largest shard must have one byte or more, not {max_shard_bytes}")
    described = dict(metadata or {})
    _check_metadata(described)
    kept, aliases = resolve_shared(sources, shared)
    # An alias is a tensor's name too, for whoever loads it, so it has to be one that can be written as such.
    build_header((alias, "U8", (0,)) for alias in aliases)
    if max_shard_bytes is None:
        split = [[source.name for source in kept]]
    else:
        split = split_into_shards(((source.name, source.nbytes, None) for source in kept), max_shard_bytes) or [[]]
    in_header = {**_FORMAT, **described, **_alias_metadata(aliases)} if len(split) == 1 else _FORMAT
    files = [(names, in_header) for names in split]
    return replace(plan_files(kept, files, block_bytes=block_bytes), aliases=aliases, metadata=described)


def plan_files(
    sources: Sequence[TensorSource],
    files: Sequence[tuple[Sequence[str], Mapping[str, str] | None]],
    *,
    block_bytes: int,
) -> WritePlan:
    """Turn tensors that somebody has split into files already into writes.

    Args:
        sources: The tensors, no name twice.
        files: For each file the names of its tensors, and the text for its header (None: no metadata there). Every
            tensor is in one file.
        block_bytes: Largest write; a multiple of `PAGE_BYTES`.

    Raises:
        KeyError: A file wants a tensor that there is not.
        ValueError: A name or a metadata key that cannot be used, or a size that makes no sense.
        TypeError: A metadata key or value is no string.
        LimitError: A header would be longer than readers accept.
    """
    if block_bytes <= 0 or block_bytes % PAGE_BYTES:
        raise ValueError(f"blocks must be whole pages of {PAGE_BYTES} bytes, not {block_bytes} bytes")
    positions = {source.name: k for k, source in enumerate(sources)}
    shards = [
        _plan_shard(number, [positions[name] for name in names], sources, positions, metadata, block_bytes)
        for number, (names, metadata) in enumerate(files)
    ]
    return WritePlan(
        sources=tuple(sources),
        shards=tuple(shards),
        aliases={},
        total_bytes=sum(shard.data_bytes for shard in shards),
        metadata={},
    )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    """Refuse now what header or index would refuse later, when everything else has been written."""
    if ALIASES_KEY in metadata:
        raise ValueError(f"the metadata key {ALIASES_KEY!r} is stio's own; leave it out")
    build_header([], metadata)
    build_index({}, 0, metadata)


def _alias_metadata(aliases: Mapping[str, str]) -> dict[str, str]:
    return {ALIASES_KEY: aliases_json(aliases)} if aliases else {}


def _plan_shard(
    number: int,
    members: Sequence[int],
    sources: Sequence[TensorSource],
    positions: Mapping[str, int],
    metadata: Mapping[str, str] | None,
    block_bytes: int,
) -> ShardPlan:
    described = ((source.name, source.dtype, source.shape) for source in map(sources.__getitem__, members))
    header, order = build_header(described, metadata)
    blocks: list[WriteBlock] = []
    pieces: list[Piece] = []
    block_start, position = 0, len(header)
    for name in order:
        source = positions[name]
        nbytes = sources[source].nbytes
        at = position - block_start
        if 0 < nbytes <= block_bytes - at:  # nearly all, where there are many
            pieces.append(Piece(source, 0, at, nbytes, True))
            position += nbytes
            continue
        start = 0
        while start < nbytes:
            while position >= block_start + block_bytes:
                blocks.append(WriteBlock(number, block_start, block_bytes, tuple(pieces)))
                pieces = []
                block_start += block_bytes
            at = position - block_start
            step = min(nbytes - start, block_bytes - at)
            pieces.append(Piece(source, start, at, step, start + step == nbytes))
            start += step
            position += step
    while position > block_start:  # more than once only where a header of several blocks has no data behind it
        length = min(block_bytes, position - block_start)
        blocks.append(WriteBlock(number, block_start, length, tuple(pieces)))
        pieces = []
        block_start += length
    return ShardPlan(
        header=header,
        names=tuple(order),
        listed=tuple(sources[member].name for member in members),
        nbytes=position,
        data_bytes=position - len(header),
        blocks=tuple(blocks),
    )
