"""The plan of a save: which tensors are saved, in which shard, with which header, in which blocks. Pure; no torch.

A block is one write: an aligned piece of a shard's file image. The plan says which bytes of the shard's header it
holds, and which bytes of which tensors, so that any worker can fill any block. Equal tensors, metadata and sizes give
equal plans, and equal plans give equal files.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii
from typing import Any, NamedTuple

from stio.errors import IndexFormatError, LimitError, printable
from stio.format import (
    ALIASES_KEY,
    MAX_HEADER_BYTES,
    SharedPolicy,
    TensorSource,
    TiedNames,
    build_header,
    check_name,
    require_text,
    resolve_shared,
    row_slices,
)
from stio.format.delta import ID_KEY
from stio.format.files import FileState, parse_index
from stio.limits import PAGE_BYTES
from stio.text import counted, show_bytes

_SHORT_INDEX_BYTES = 100_000
_TOTAL_SIZE = "total_size"
_TOTAL_PARAMETERS = "total_parameters"
_FORMAT = {"format": "pt"}
"""The metadata that the hub and its readers expect in every file."""


class Piece(NamedTuple):
    """Consecutive bytes of one tensor in one block."""

    source: int
    """Position of the tensor in the plan's sources."""
    start: int
    """First byte, counted in the tensor; where one of its elements begins."""
    at: int
    """Offset in the block."""
    nbytes: int
    """Length."""
    ends: bool
    """Whether it is the tensor's last piece. A tensor without elements has one piece, of no bytes."""


class Run(NamedTuple):
    """Bytes of a block that one call writes: one range of the file, or several of one length at even distances."""

    offset: int
    """First byte in the file."""
    at: int
    """Offset in the block, where they follow without a gap."""
    nbytes: int
    """Length of one range."""
    num_ranges: int = 1
    """Number of ranges."""
    stride: int = 0
    """Distance between the starts of two ranges in the file."""


@dataclass(frozen=True, slots=True)
class WriteBlock:
    """One write: a range of one shard's file, and the sources of its bytes. In a plan of parts, several ranges."""

    shard: int
    """Index of the shard in the plan."""
    offset: int
    """First byte in the file; a multiple of the block size."""
    nbytes: int
    """Length of the range; the block size, but for the last block of a file."""
    pieces: tuple[Piece, ...]
    """Tensors' bytes in it, in file order; with those of the header they fill it without a gap."""
    runs: tuple[Run, ...] = ()
    """In a plan of parts, where the bytes go. `offset` is then that of the first run, `nbytes` counts the gaps between
    runs in the block. Elsewhere empty: the block is the image of its range of the file."""

    @property
    def file_bytes(self) -> int:
        """Bytes that are written to the file."""
        return sum(run.nbytes * run.num_ranges for run in self.runs) if self.runs else self.nbytes

    def head(self, header: bytes) -> bytes:
        """Return the bytes of the shard's header that are in the block; they are at its start."""
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
    """The writes that make up the file, in order; at least one. In a plan of parts those of one process, perhaps none.
    """


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
    metadata: Mapping[str, str | int]
    """The caller's text metadata; a number is in the index alone."""
    ready_index: bytes | None = None
    """The index, where the caller of `plan_files` made it."""

    def summary(self) -> str:
        """Return the number of files and the bytes of tensors, such as `2 files, 1.5 GB`."""
        return f"{counted(len(self.shards), 'file')}, {show_bytes(self.total_bytes)}"

    def index(self, shard_names: Sequence[str]) -> bytes:
        """Return the bytes of the index, whether or not there is more than one shard.

        Args:
            shard_names: Name of each shard's file, in the plan's order.

        Raises:
            ValueError: Not one name for each shard.
        """
        if self.ready_index is not None:
            return self.ready_index
        # The hub's order: shard by shard, and inside a shard in the caller's order, not in the order of the data.
        weight_map = {name: file for shard, file in zip(self.shards, shard_names, strict=True) for name in shard.listed}
        return build_index(weight_map, self.total_bytes, {**self.metadata, **_alias_metadata(self.aliases)})


@dataclass(frozen=True, slots=True)
class PlannedSave:
    """What a save writes, and in which pieces. Nothing is allocated or created for it."""

    files: WritePlan
    """All files."""
    own: WritePlan
    """What this process stages and writes of them; the same, unless many ranks save together."""
    block_bytes: int
    """Size of a block of staging memory."""
    budget_bytes: int | None
    """Most bytes of staging memory; None: no limit."""

    def __repr__(self) -> str:
        num_blocks = sum(len(shard.blocks) for shard in self.own.shards)
        blocks = f"{counted(num_blocks, 'block')} of {show_bytes(self.block_bytes)}"
        return f"<PlannedSave: {self.files.summary()}, {blocks}>"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenSave:
    """What was written and is durable, but not published."""

    path: str
    """The destination."""
    plan: WritePlan
    """All files, without the tensors."""
    names: tuple[str, ...]
    """Names of the files with tensors, in the plan's order."""
    index: str | None
    """Name of the index, if there is to be one."""
    hashes: Mapping[str, str]
    """Digest of each file by its name; empty without `hash=`."""
    seconds: float
    """Time from the call until all of it was durable."""

    def __repr__(self) -> str:
        return f"<WrittenSave {printable(self.path)!r}: {self.plan.summary()}>"

    @property
    def tensor_names(self) -> list[str]:
        """Names of the tensors that have bytes in the files."""
        return [name for shard in self.plan.shards for name in shard.names]

    def file_states(self) -> dict[str, FileState]:
        """Return size and digest of each file by its name, for the manifest; empty without digests."""
        if not self.hashes:
            return {}
        shards = zip(self.names, self.plan.shards, strict=True)
        return {name: FileState(shard.nbytes, self.hashes[name]) for name, shard in shards}


def plan_writes(
    sources: Sequence[TensorSource],
    block_bytes: int,
    *,
    max_shard_bytes: int | None,
    metadata: Mapping[str, str] | None = None,
    shared: SharedPolicy = "dedupe",
    tied: TiedNames | None = None,
) -> WritePlan:
    """Turn tensors into files and writes.

    The header of each file has the caller's metadata, beside `format`: some readers look at the shards alone. If there
    are several files, the index has the metadata too, and alone what only stio reads, but for the id of the save, which
    tells their files from those of another save. Every tensor counts with its own
    bytes, also where several share a storage: no two share bytes in a file, so no shard gets larger than the maximum
    says.

    Args:
        sources: The tensors, no name twice.
        block_bytes: Largest write; a multiple of `PAGE_BYTES`.
        max_shard_bytes: Largest shard, headers not counted; a larger tensor is a shard of its own. None: one file.
        metadata: Text to store. `format` is allowed here; `total_size` and the key of stio are not.
        shared: See `resolve_shared`.
        tied: See `resolve_shared`.

    Raises:
        SharedTensorsError: Tensors share memory, and `shared` is `"error"`.
        ValueError: A name or a metadata key cannot be used, or a size is not positive.
        TypeError: A metadata key or value is no string.
        UnsupportedDtypeError: A dtype that the format does not have.
        LimitError: A header would be longer than readers accept.
    """
    if max_shard_bytes is not None and max_shard_bytes <= 0:
        raise ValueError(f"the largest shard must have one byte or more, not {max_shard_bytes}")
    text = dict(metadata or {})
    if text:
        _check_metadata(text)  # now, and not after everything else was written
    saved, aliases = resolve_shared(sources, shared, tied)
    for alias in aliases:  # it is loaded as a tensor's name too
        check_name(alias)
    return plan_resolved(saved, aliases, block_bytes, max_shard_bytes=max_shard_bytes, metadata=text)


def plan_resolved(
    saved: Sequence[TensorSource],
    aliases: Mapping[str, str],
    block_bytes: int,
    *,
    max_shard_bytes: int | None,
    metadata: Mapping[str, str],
) -> WritePlan:
    """Turn tensors into files and writes, where it is decided which of them are saved; see `plan_writes`.

    Args:
        saved: The tensors with bytes of their own.
        aliases: The other names, to those that are saved.
        block_bytes: See `plan_writes`.
        max_shard_bytes: See `plan_writes`.
        metadata: The text, checked.
    """
    text = dict(metadata)
    if max_shard_bytes is None:
        split = [[source.name for source in saved]]
    else:
        split = split_into_shards([(source.name, source.nbytes) for source in saved], max_shard_bytes) or [[]]
    in_header = {**_FORMAT, **text, **_alias_metadata(aliases)}
    if len(split) > 1:
        in_header = {key: value for key, value in in_header.items() if key == ID_KEY or not key.startswith("stio.")}
    files = [(names, in_header) for names in split]
    return replace(plan_files(saved, block_bytes, files=files), aliases=aliases, metadata=text)


def plan_files(
    sources: Sequence[TensorSource],
    block_bytes: int,
    *,
    files: Sequence[tuple[Sequence[str], Mapping[str, str] | None]] | None = None,
    metadata: Mapping[str, str] | None = None,
    index: bytes | None = None,
) -> WritePlan:
    """Turn tensors into writes, where the caller has split them into files.

    Args:
        sources: The tensors, no name twice.
        block_bytes: Largest write; a multiple of `PAGE_BYTES`.
        files: For each file the names of its tensors, and the text for its header (None: no metadata there). Each
            tensor is in one file. By default there is one file with all tensors.
        metadata: The text for the header of that one file.
        index: The index, if there is one.

    Raises:
        KeyError: A file names a tensor that is not among the sources.
        ValueError: A name or a metadata key cannot be used, or a size is not positive.
        TypeError: A metadata key or value is no string.
        LimitError: A header would be longer than readers accept.
    """
    if block_bytes <= 0 or block_bytes % PAGE_BYTES:
        raise ValueError(f"blocks must be whole pages of {PAGE_BYTES} bytes, not {block_bytes} bytes")
    positions = {source.name: k for k, source in enumerate(sources)}
    shards = [
        _plan_shard(number, names, text, sources, positions, block_bytes)
        for number, (names, text) in enumerate([(list(positions), metadata)] if files is None else files)
    ]
    return WritePlan(
        sources=tuple(sources),
        shards=tuple(shards),
        aliases={},
        total_bytes=sum(shard.data_bytes for shard in shards),
        metadata={},
        ready_index=index,
    )


def _check_metadata(text: dict[str, str]) -> None:
    """Require that readers take the caller's metadata; the bounds of an index are narrower than those of a header.

    Raises:
        ValueError: They do not, or a key is stio's own.
        TypeError: A key or a value is no string.
    """
    if ALIASES_KEY in text:
        raise ValueError(f"the metadata key {ALIASES_KEY!r} is stio's own; leave it out")
    require_text(list(text.items()), "metadata")
    index = build_index({}, 0, text)
    if not _SHORT_INDEX_BYTES < len(index) <= MAX_HEADER_BYTES:  # more is refused for the header too
        return
    try:
        parse_index(index, path="")
    except (IndexFormatError, LimitError) as error:
        raise ValueError(f"metadata= is more than readers of an index take ({error.message}); save it apart") from None


def _alias_metadata(aliases: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata that record aliases: compact JSON, sorted."""
    if not aliases:
        return {}
    return {ALIASES_KEY: json.dumps(aliases, ensure_ascii=False, separators=(",", ":"), sort_keys=True)}


def _plan_shard(
    number: int,
    names: Sequence[str],
    metadata: Mapping[str, str] | None,
    sources: Sequence[TensorSource],
    positions: Mapping[str, int],
    block_bytes: int,
) -> ShardPlan:
    members = [sources[positions[name]] for name in names]
    described = [(source.name, source.dtype, source.shape) for source in members]
    header, order = build_header(described, metadata)
    blocks: list[WriteBlock] = []
    pieces: list[Piece] = []
    block_start, position = 0, len(header)
    for name in order:
        source = positions[name]
        nbytes = sources[source].nbytes
        at = position - block_start
        if nbytes <= block_bytes - at:  # nearly all, where there are many
            pieces.append(Piece(source, 0, at, nbytes, True))
            position += nbytes
            continue
        start, ends = 0, False
        while not ends:
            # A piece of no bytes may be at the end of a block: no block may follow.
            while position - block_start >= block_bytes + (not nbytes):
                blocks.append(WriteBlock(number, block_start, block_bytes, tuple(pieces)))
                pieces = []
                block_start += block_bytes
            at = position - block_start
            step = min(nbytes - start, block_bytes - at)
            ends = start + step == nbytes
            pieces.append(Piece(source, start, at, step, ends))
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
        listed=tuple(names),
        nbytes=position,
        data_bytes=position - len(header),
        blocks=tuple(blocks),
    )


# Shards and their index, as the hub splits and writes them: its readers read stio's checkpoints.


def split_into_shards(sizes: Iterable[tuple[str, int]], max_shard_bytes: int) -> list[list[str]]:
    """Split tensors into shards by the hub's greedy rule.

    In the order given, a tensor that would make the open shard larger than the maximum starts a new one. One that is
    larger than the maximum by itself becomes a shard of its own at once, before the one that is open.

    Args:
        sizes: Name and bytes of each.
        max_shard_bytes: Largest shard, headers not counted.

    Returns:
        The names in each shard; without tensors there are no shards.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    for name, nbytes in sizes:
        if nbytes > max_shard_bytes:
            shards.append([name])
            continue
        if current_bytes + nbytes > max_shard_bytes:
            shards.append(current)
            current, current_bytes = [], 0
        current.append(name)
        current_bytes += nbytes
    return [*shards, current] if current else shards


def build_index(weight_map: Mapping[str, str], total_bytes: int, metadata: Mapping[str, str | int]) -> bytes:
    """Return the bytes of an index, as the hub writes it by `json.dump(indent=2)`.

    Composed line by line (`gil_slices.py`).

    Args:
        weight_map: Shard of each tensor, in the order to be written.
        total_bytes: Bytes of all tensors, each storage counted once.
        metadata: Text to store beside `total_size`; sorted, so that equal checkpoints are equal files. The hub's
            `total_parameters` may be a number.

    Raises:
        TypeError: A name, shard, metadata key or value is not text.
        ValueError: The metadata hold `total_size`, or a text holds half of a surrogate pair.
    """
    if _TOTAL_SIZE in metadata:
        raise ValueError(f"the index counts {_TOTAL_SIZE!r} itself; leave it out of the metadata")
    texts: dict[str, Any] = dict(metadata)
    numbers = {_TOTAL_SIZE: operator.index(total_bytes)}
    if type(texts.get(_TOTAL_PARAMETERS)) is int:
        numbers[_TOTAL_PARAMETERS] = texts.pop(_TOTAL_PARAMETERS)
    require_text(list(texts.items()), "metadata")
    described = json.dumps({**numbers, **dict(sorted(texts.items()))}, indent=2).replace("\n", "\n  ")
    shards = {shard: encode_basestring_ascii(shard) for shard in dict.fromkeys(weight_map.values())}
    pairs = list(weight_map.items())
    parts = []
    for rows in row_slices(len(pairs)):
        part = pairs[rows]
        require_text(part, "weight_map")
        lines = [f"    {encode_basestring_ascii(name)}: {shards[shard]}" for name, shard in part]
        parts.append(",\n".join(lines).encode())
    mapped = b"{\n" + b",\n".join(parts) + b"\n  }" if parts else b"{}"
    return b'{\n  "metadata": ' + described.encode() + b',\n  "weight_map": ' + mapped + b"\n}"
