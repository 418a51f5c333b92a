"""The plan of a save: which tensors are saved, in which shard, with which header, in which blocks. Pure; no torch.

A block is one write: an aligned piece of a shard's file image. The plan says which bytes of the shard's header it
holds, and which bytes of which tensors, so that any worker can fill any block. Equal tensors, metadata and sizes give
equal plans, and equal plans give equal files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stio.format.header_build import build_header
from stio.format.placements import ByteRange
from stio.format.sharding import TensorSource, build_index, split_into_shards
from stio.format.shared import ALIASES_KEY, SharedPolicy, aliases_json, resolve_shared
from stio.runtime.limits import PAGE_BYTES

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
    metadata: Mapping[str, str]
    """The caller's text metadata."""
    ready_index: bytes | None = None
    """The index, where the caller of `plan_files` made it."""

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


def plan_writes(
    sources: Sequence[TensorSource],
    block_bytes: int,
    *,
    max_shard_bytes: int | None,
    metadata: Mapping[str, str] | None = None,
    shared: SharedPolicy = "dedupe",
) -> WritePlan:
    """Turn tensors into files and writes.

    If there is one file, its header has the caller's metadata, beside `format`. If there are several, each header has
    only `format`, and the index has the metadata. Every tensor counts with its own bytes, also where several share a
    storage: no two share bytes in a file, so no shard gets larger than the maximum says.

    Args:
        sources: The tensors, no name twice.
        block_bytes: Largest write; a multiple of `PAGE_BYTES`.
        max_shard_bytes: Largest shard, headers not counted; a larger tensor is a shard of its own. None: one file.
        metadata: Text to store. `format` is allowed here; `total_size` and the key of stio are not.
        shared: See `resolve_shared`.

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
    if ALIASES_KEY in text:
        raise ValueError(f"the metadata key {ALIASES_KEY!r} is stio's own; leave it out")
    build_header([], text)  # refuses now what header or index would refuse later, after everything else was written
    build_index({}, 0, text)
    saved, aliases = resolve_shared(sources, shared)
    # An alias is loaded as a tensor's name too, so it must be a name that a header can hold.
    build_header((alias, "U8", (0,)) for alias in aliases)
    if max_shard_bytes is None:
        split = [[source.name for source in saved]]
    else:
        split = split_into_shards(((source.name, source.nbytes, None) for source in saved), max_shard_bytes) or [[]]
    in_header = {**_FORMAT, **text, **_alias_metadata(aliases)} if len(split) == 1 else _FORMAT
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
        _plan_shard(number, [positions[name] for name in names], sources, positions, text, block_bytes)
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


class Part(NamedTuple):
    """The bytes of a tensor that one process writes."""

    source: TensorSource
    """The elements that the process has: in row-major order they are the bytes to write."""
    ranges: Sequence[ByteRange]
    """Where these bytes are in the whole tensor, in that order; no two overlap."""


def plan_parts(plan: WritePlan, parts: Mapping[str, Part], block_bytes: int, *, with_headers: bool) -> WritePlan:
    """Return the plan of what one process writes, where several write the files of a plan together.

    On a local filesystem no page is written partly past the page cache and partly through it, whichever processes write
    it: a run of at least `_ALIGNED_BYTES` has the position of its file in the block, so its whole pages can be written
    past the page cache. Runs are not rounded to pages; `LocalFileWriter` says how several hosts write one page.

    Args:
        plan: The plan of all of it.
        parts: By tensor, the bytes that this process writes; tensors that it writes nothing of may be left out.
        block_bytes: Size of a block; a multiple of `PAGE_BYTES`.
        with_headers: Whether this process writes the headers.

    Returns:
        The same files with other blocks. Its sources are those of the parts.
    """
    return plan_placed(plan, _placed(plan, parts), block_bytes, with_headers=with_headers)


def _placed(plan: WritePlan, parts: Mapping[str, Part]) -> list[list[tuple[int, Part]]]:
    """Return for each file the first byte of a tensor's data, and the part of it; in ascending order."""
    places = data_places(plan)
    return [[(places[name][1], parts[name]) for name in shard.names if name in parts] for shard in plan.shards]


def data_places(plan: WritePlan) -> dict[str, tuple[int, int]]:
    """Return where the data of each tensor are: the number of the file, and the first byte in it."""
    sizes = {source.name: source.nbytes for source in plan.sources}
    found = {}
    for number, shard in enumerate(plan.shards):
        begin = len(shard.header)
        for name in shard.names:
            found[name] = number, begin
            begin += sizes[name]
    return found


def plan_placed(
    plan: WritePlan, placed: Sequence[Sequence[tuple[int, Part]]], block_bytes: int, *, with_headers: bool
) -> WritePlan:
    """Return the plan of what one process writes, as `plan_parts` does, where the caller says where the tensors are.

    Args:
        plan: The files; what they hold beside the parts does not matter.
        placed: For each file the first byte of a tensor's data, and the part of it; in ascending order.
        block_bytes: See `plan_parts`.
        with_headers: See `plan_parts`.
    """
    sources = [part.source for of_shard in placed for _, part in of_shard]
    shards, position = [], 0
    for number, (shard, of_shard) in enumerate(zip(plan.shards, placed, strict=True)):
        extents = _Extents(min(_STRIDED_BYTES, block_bytes))
        if with_headers:
            extents.add(ByteRange(0, len(shard.header)), None)
        position = extents.add_parts(of_shard, position)
        shards.append(replace(shard, blocks=_Packer(number, sources, block_bytes).pack(extents)))
    return replace(plan, sources=tuple(sources), shards=tuple(shards))


class Window(NamedTuple):
    """A range of one file, whose bytes several processes send to the one that writes the file."""

    file: int
    """Number of the file in the plan."""
    begin: int
    """First byte; a multiple of `PAGE_BYTES`."""
    end: int
    """The byte after the last one."""


class Packet(NamedTuple):
    """The bytes that one process has of a window, without a gap of more than a few bytes between them."""

    window: int
    """Number of the window."""
    begin: int
    """Offset of the first byte in the stream of the process."""
    nbytes: int
    """Length."""
    runs: tuple[Run, ...]
    """Where the bytes go in the file. `at` is the offset in the packet."""


def plan_stream(
    plan: WritePlan, parts: Mapping[str, Part], windows: Sequence[Window], block_bytes: int
) -> tuple[WritePlan, list[Packet]]:
    """Plan what one process sends to the processes that write the files: its bytes of each window, one after the other.

    Args:
        plan: The plan of all of it.
        parts: See `plan_parts`.
        windows: They make up the files. Those of one file are in ascending order.
        block_bytes: See `plan_parts`.

    Returns:
        The plan of one file, the *stream*, of packets in the order of the windows; it has no header, and may be empty.
        And the packets, for those windows of which the process has bytes.
    """
    placed = _placed(plan, parts)
    sources = [part.source for of_file in placed for _, part in of_file]
    files, position = [], 0
    for of_file in placed:
        extents = _Extents(_STRIDED_BYTES)
        position = extents.add_parts(of_file, position)
        files.append(_Cutter(extents, sources))
    stream, packets, end = _Stream(block_bytes), [], 0
    for number, window in enumerate(windows):
        begin = at = -(-end // _LARGEST_ITEM_BYTES) * _LARGEST_ITEM_BYTES
        runs = []
        for one, origins in files[window.file].take(window.end):
            at += (one.start - at) % _LARGEST_ITEM_BYTES  # blocks of the stream are cut between elements then
            runs.append(Run(one.start, at - begin, one.nbytes, one.num_ranges, one.stride))
            stream.add(at, one.nbytes * one.num_ranges, origins)
            at += one.nbytes * one.num_ranges
        if runs:
            packets.append(Packet(number, begin, at - begin, tuple(runs)))
            end = at
    blocks = stream.blocks(end)
    shard = ShardPlan(header=b"", names=(), listed=(), nbytes=end, data_bytes=end, blocks=blocks)
    return replace(plan, sources=tuple(sources), shards=(shard,)), packets


_LARGEST_ITEM_BYTES = 8
"""Largest element of the format."""


_STRIDED_BYTES = 128 << 10
"""Ranges of this length are written one by one, past the page cache. Shorter ones are many, and most of their bytes may
be on pages that they share with other processes."""

_ALIGNED_BYTES = 8 * PAGE_BYTES
"""A run of this length is placed in the block so that its whole pages can be written past the page cache. Before it up
to one page of the block is left empty."""

_Origin = tuple[int, int] | None
"""Position of a tensor in the sources, and the first of its bytes; None: the header."""


class _Extents:
    """Collects ranges of one file in ascending order; neighbours become one extent.

    Args:
        longest: Ranges at even distances become extents of their own from this length on.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.found: list[tuple[ByteRange, list[tuple[int, _Origin]]]] = []
        """Each extent, and what it consists of: the length and the origin of each part, without a gap."""

    def add_parts(self, placed: Sequence[tuple[int, Part]], position: int) -> int:
        """Add parts of tensors, each with the first byte of the tensor's data.

        Args:
            placed: They are in ascending order.
            position: Of the first one in the sources.

        Returns:
            The position after the last one.
        """
        for k, (begin, part) in enumerate(placed, position):
            start = 0
            for found in part.ranges:
                self.add(replace(found, start=begin + found.start), (k, start))
                start += found.nbytes * found.num_ranges
        return position + len(placed)

    def add(self, one: ByteRange, origin: _Origin) -> None:
        """Add a range; or ranges at even distances, which have one origin."""
        if one.num_ranges > 1 and one.nbytes >= self._longest:
            for k in range(one.num_ranges):
                after = None if origin is None else (origin[0], origin[1] + k * one.nbytes)
                self.add(ByteRange(one.start + k * one.stride, one.nbytes), after)
            return
        part = one.nbytes * one.num_ranges, origin
        last = self.found[-1] if self.found else None
        if (
            last is not None
            and one.num_ranges == last[0].num_ranges == 1
            and last[0].start + last[0].nbytes == one.start
        ):
            last[1].append(part)
            self.found[-1] = replace(last[0], nbytes=last[0].nbytes + one.nbytes), last[1]
        else:
            self.found.append((one, [part]))


class _Packer:
    """Puts extents of one file into blocks, one after the other; a long one is cut, between pages of the file."""

    def __init__(self, number: int, sources: Sequence[TensorSource], block_bytes: int) -> None:
        self._number, self._sources, self._block_bytes = number, sources, block_bytes
        self._blocks: list[WriteBlock] = []
        self._pieces: list[Piece] = []
        self._runs: list[Run] = []
        self._at = 0

    def pack(self, extents: _Extents) -> tuple[WriteBlock, ...]:
        """Return the blocks."""
        for extent, parts in extents.found:
            origins = _Origins(parts, self._sources)
            if extent.num_ranges == 1:
                self._add_range(extent.start, extent.nbytes, origins)
            else:
                self._add_ranges(extent, origins)
        self._close()
        return tuple(self._blocks)

    def _add_range(self, offset: int, left: int, origins: _Origins) -> None:
        while left:
            skip = (offset - self._at) % PAGE_BYTES if left >= _ALIGNED_BYTES else 0
            room = self._block_bytes - self._at - skip
            step = left if left <= room else room - (offset + room) % PAGE_BYTES
            if step <= 0:
                self._close()
                continue
            self._at += skip
            self._add(Run(offset, self._at, step), origins)
            offset, left = offset + step, left - step

    def _add_ranges(self, extent: ByteRange, origins: _Origins) -> None:
        offset, left = extent.start, extent.num_ranges
        while left:
            count = min(left, (self._block_bytes - self._at) // extent.nbytes)
            if not count:
                self._close()
                continue
            self._add(Run(offset, self._at, extent.nbytes, count, extent.stride), origins)
            offset, left = offset + count * extent.stride, left - count

    def _add(self, run: Run, origins: _Origins) -> None:
        self._runs.append(run)
        self._pieces += origins.take(run.nbytes * run.num_ranges, run.at)
        self._at = run.at + run.nbytes * run.num_ranges

    def _close(self) -> None:
        if self._runs:
            block = WriteBlock(self._number, self._runs[0].offset, self._at, tuple(self._pieces), tuple(self._runs))
            self._blocks.append(block)
        self._pieces, self._runs, self._at = [], [], 0


class _Cutter:
    """Cuts the extents of one file at the ends of windows."""

    def __init__(self, extents: _Extents, sources: Sequence[TensorSource]) -> None:
        self._left = [(extent, _Origins(parts, sources)) for extent, parts in reversed(extents.found)]

    def take(self, end: int) -> Iterator[tuple[ByteRange, _Origins]]:
        """Yield what is left before a byte of the file: ranges, and whence the caller takes the bytes of each."""
        while self._left and self._left[-1][0].start < end:
            extent, origins = self._left.pop()
            before, after = _cut(extent, end)
            self._left += [(one, origins) for one in reversed(after)]
            for one in before:
                yield one, origins


def _cut(extent: ByteRange, end: int) -> tuple[list[ByteRange], list[ByteRange]]:
    """Return what is before a byte of the file, and what is after it. The extent begins before it."""
    start, nbytes, num_ranges, stride = extent.start, extent.nbytes, extent.num_ranges, extent.stride
    room = end - start - nbytes
    num_before = min(num_ranges, max(0, room // stride + 1)) if stride else int(room >= 0)
    before = [ByteRange(start, nbytes, num_before, stride if num_before > 1 else 0)] if num_before else []
    after = []
    start += num_before * stride
    if num_before < num_ranges and start < end:
        before.append(ByteRange(start, end - start))
        after.append(ByteRange(end, start + nbytes - end))
        num_before, start = num_before + 1, start + stride
    num_after = num_ranges - num_before
    if num_after:
        after.append(ByteRange(start, nbytes, num_after, stride if num_after > 1 else 0))
    return before, after


class _Stream:
    """Collects the bytes of a stream, in blocks."""

    def __init__(self, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._pieces: list[list[Piece]] = []

    def add(self, at: int, nbytes: int, origins: _Origins) -> None:
        """Add the next bytes, at an offset of the stream; between them and those before may be a gap."""
        while nbytes:
            number, offset = divmod(at, self._block_bytes)
            while len(self._pieces) <= number:
                self._pieces.append([])
            step = min(nbytes, self._block_bytes - offset)
            self._pieces[number] += origins.take(step, offset)
            at, nbytes = at + step, nbytes - step

    def blocks(self, nbytes: int) -> tuple[WriteBlock, ...]:
        """Return the blocks of a stream of this length."""
        size = self._block_bytes
        return tuple(
            WriteBlock(0, k * size, min(size, nbytes - k * size), tuple(found)) for k, found in enumerate(self._pieces)
        )


class _Origins:
    """The parts of one extent, taken from its beginning."""

    def __init__(self, parts: Sequence[tuple[int, _Origin]], sources: Sequence[TensorSource]) -> None:
        self._parts, self._sources = list(reversed(parts)), sources

    def take(self, nbytes: int, at: int) -> list[Piece]:
        """Return the pieces of the next bytes, which are at an offset of a block; the header has no piece."""
        pieces = []
        while nbytes:
            length, origin = self._parts.pop()
            step = min(length, nbytes)
            if origin is not None:
                source, start = origin
                pieces.append(Piece(source, start, at, step, start + step == self._sources[source].nbytes))
            if step < length:
                self._parts.append((length - step, None if origin is None else (origin[0], origin[1] + step)))
            nbytes, at = nbytes - step, at + step
        return pieces


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
        listed=tuple(sources[member].name for member in members),
        nbytes=position,
        data_bytes=position - len(header),
        blocks=tuple(blocks),
    )
