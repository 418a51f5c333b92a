"""The plan of what one of several processes writes, where they write the files of one save together. Pure; no torch.

On a filesystem each process writes its bytes into the files (`plan_parts`). To a store, where one request writes many
bytes, each process sends its bytes to those that write the files (`plan_stream`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from stio.format import TensorSource
from stio.limits import PAGE_BYTES
from stio.saving import Piece, Run, ShardPlan, WriteBlock, WritePlan


@dataclass(frozen=True, slots=True)
class ByteRange:
    """Bytes of a tensor: one range, or several of one length at even distances."""

    start: int
    """First byte, counted in the tensor."""
    nbytes: int
    """Length of one range."""
    num_ranges: int = 1
    """Number of ranges."""
    stride: int = 0
    """Distance between the starts of two; more than the length. 0 for one range."""


class WrittenPart(NamedTuple):
    """The bytes of a tensor that one process writes."""

    source: TensorSource
    """The elements that the process has: in row-major order they are the bytes to write."""
    ranges: Sequence[ByteRange]
    """Where these bytes are in the whole tensor, in that order; no two overlap."""


def plan_parts(
    plan: WritePlan,
    parts: Mapping[str, WrittenPart],
    block_bytes: int,
    *,
    with_headers: bool,
) -> WritePlan:
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
    longest = min(_STRIDED_BYTES, block_bytes)
    headers = [shard.header if with_headers else b"" for shard in plan.shards]
    files, sources = _extents_of(plan, parts, longest, headers)
    shards = [
        replace(shard, blocks=_Packer(number, block_bytes).pack(extents))
        for number, (shard, extents) in enumerate(zip(plan.shards, files, strict=True))
    ]
    return replace(plan, sources=tuple(sources), shards=tuple(shards))


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
    plan: WritePlan, parts: Mapping[str, WrittenPart], windows: Sequence[Window], block_bytes: int
) -> tuple[WritePlan, list[Packet]]:
    """Plan what one process sends to the processes that write the files: its bytes of each window, one after the other.

    Args:
        plan: The plan of all of it.
        parts: See `plan_parts`.
        windows: They make up the files. Those of one file are in ascending order. None is longer than a block.
        block_bytes: Size of a block.

    Returns:
        The plan of one file, the *stream*, of packets in the order of the windows; it has no header, and may be empty.
        A block has whole packets, so its end may be empty. And the packets, for those windows of which the process has
        bytes.
    """
    files, sources = _extents_of(plan, parts, _STRIDED_BYTES, [b"" for _ in plan.shards])
    cutters = [_Cutter(extents) for extents in files]
    blocks: list[tuple[int, list[Piece]]] = []  # the length of each, and what is in it
    packets = []
    for number, window in enumerate(windows):
        ranges = list(cutters[window.file].take(window.end))
        runs, nbytes = [], 0
        for one, _ in ranges:
            nbytes += (one.start - nbytes) % _LARGEST_ITEM_BYTES  # blocks are copied by elements
            runs.append(Run(one.start, nbytes, one.nbytes, one.num_ranges, one.stride))
            nbytes += one.nbytes * one.num_ranges
        if not runs:
            continue
        end, pieces = blocks.pop() if blocks else (0, list[Piece]())
        begin = -(-end // _LARGEST_ITEM_BYTES) * _LARGEST_ITEM_BYTES
        if begin + nbytes > block_bytes:
            blocks.append((end, pieces))
            begin, pieces = 0, []
        for (_, origins), run in zip(ranges, runs, strict=True):
            pieces += origins.take(run.nbytes * run.num_ranges, begin + run.at)
        packets.append(Packet(number, len(blocks) * block_bytes + begin, nbytes, tuple(runs)))
        blocks.append((begin + nbytes, pieces))
    stream = [WriteBlock(0, k * block_bytes, nbytes, tuple(pieces)) for k, (nbytes, pieces) in enumerate(blocks)]
    size = stream[-1].offset + stream[-1].nbytes if stream else 0
    shard = ShardPlan(header=b"", names=(), listed=(), nbytes=size, data_bytes=size, blocks=tuple(stream))
    return replace(plan, sources=tuple(sources), shards=(shard,)), packets


_LARGEST_ITEM_BYTES = 8
"""Largest element of the format."""


_STRIDED_BYTES = 128 << 10
"""Ranges of this length are written one by one, past the page cache. Shorter ones are many, and most of their bytes may
be on pages that they share with other processes."""

_ALIGNED_BYTES = 8 * PAGE_BYTES
"""A run of this length is placed in the block so that its whole pages can be written past the page cache. Before it up
to one page of the block is left empty."""

_Origin = tuple[TensorSource, int, int] | None
"""A tensor, its position in the sources, and the first of its bytes; None: the header."""


class _Extents:
    """Collects ranges of one file in ascending order; neighbours become one extent.

    Args:
        longest: Ranges at even distances become extents of their own from this length on.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self.found: list[tuple[ByteRange, _Origins]] = []
        """Each extent, and what it consists of."""

    def add(self, one: ByteRange, origin: _Origin) -> None:
        """Add a range; or ranges at even distances, which have one origin."""
        if one.num_ranges > 1 and one.nbytes >= self._longest:
            for k in range(one.num_ranges):
                self.add(ByteRange(one.start + k * one.stride, one.nbytes), _after(origin, k * one.nbytes))
            return
        nbytes = one.nbytes * one.num_ranges
        last = self.found[-1] if self.found else None
        if (
            last is not None
            and one.num_ranges == last[0].num_ranges == 1
            and last[0].start + last[0].nbytes == one.start
        ):
            self.found[-1] = replace(last[0], nbytes=last[0].nbytes + one.nbytes), last[1]
        else:
            self.found.append((one, _Origins()))
        self.found[-1][1].add(nbytes, origin)


def _extents_of(
    plan: WritePlan, parts: Mapping[str, WrittenPart], longest: int, headers: Sequence[bytes]
) -> tuple[list[_Extents], list[TensorSource]]:
    """Return the extents of each file, and the sources of the parts, in the order of their places.

    Args:
        plan: The plan of all of it.
        parts: See `plan_parts`.
        longest: See `_Extents`.
        headers: What is written of the header of each file.
    """
    places, sources = data_places(plan), list[TensorSource]()
    files = [_Extents(longest) for _ in headers]
    for extents, header in zip(files, headers, strict=True):
        if header:
            extents.add(ByteRange(0, len(header)), None)
    for name in sorted(parts, key=lambda name: places[name]):
        number, begin = places[name]
        source, start = parts[name].source, 0
        for found in parts[name].ranges:
            files[number].add(replace(found, start=begin + found.start), (source, len(sources), start))
            start += found.nbytes * found.num_ranges
        sources.append(source)
    return files, sources


def _after(origin: _Origin, nbytes: int) -> _Origin:
    """Return what follows behind some bytes."""
    return None if origin is None else (origin[0], origin[1], origin[2] + nbytes)


class _Packer:
    """Puts extents of one file into blocks, one after the other; a long one is cut, between pages of the file."""

    def __init__(self, number: int, block_bytes: int) -> None:
        self._number, self._block_bytes = number, block_bytes
        self._blocks: list[WriteBlock] = []
        self._pieces: list[Piece] = []
        self._runs: list[Run] = []
        self._at = 0

    def pack(self, extents: _Extents) -> tuple[WriteBlock, ...]:
        """Return the blocks."""
        for extent, origins in extents.found:
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

    def __init__(self, extents: _Extents) -> None:
        self._left = extents.found[::-1]

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


class _Origins:
    """The parts of one extent, without a gap, taken from its beginning."""

    def __init__(self) -> None:
        self._parts: deque[tuple[int, _Origin]] = deque()  # length and origin of each

    def add(self, nbytes: int, origin: _Origin) -> None:
        """Add a part at the end."""
        self._parts.append((nbytes, origin))

    def take(self, nbytes: int, at: int) -> list[Piece]:
        """Return the pieces of the next bytes, which are at an offset of a block; the header has no piece."""
        pieces = []
        while nbytes:
            length, origin = self._parts.popleft()
            step = min(length, nbytes)
            if origin is not None:
                source, position, start = origin
                pieces.append(Piece(position, start, at, step, start + step == source.nbytes))
            if step < length:
                self._parts.appendleft((length - step, _after(origin, step)))
            nbytes, at = nbytes - step, at + step
        return pieces
