"""Plans the reads of selected tensors from headers: slice, coalesce, align, cut, order. Pure; no I/O, no torch.

Selected tensors become groups of neighbours. A group has one image: the memory for its bytes. If a run of the file is
selected almost completely, the image is dense: it equals that run, from a page boundary on, so that it can be mapped,
or read past the page cache. Otherwise (slices, every other tensor) the image is compact, and each block has the places
in the image to which its bytes are scattered. A block is one read.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from stio.errors import FormatError, SliceError, TensorNotFoundError, printable
from stio.format import BITS, Header, Selection, select
from stio.limits import PAGE_BYTES

GAP_BYTES = 256 << 10
"""Longest gap that is read on a local disk."""

GAP = -1
"""Place of bytes that are read and discarded."""

Names = str | Iterable[str] | Callable[[str], bool]
"""One name, several, or a predicate."""

_TENSOR_ALIGNMENT_BYTES = 64
_ALIGNED_FROM_BYTES = 4096
"""Smaller tensors are aligned only to the size of their items: thousands of them would make the image too large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSelection:
    """The tensors of one file that are read for one device, and the size of the reads."""

    header: Header
    """The file's header."""
    positions: Sequence[int]
    """Ascending positions of the selected tensors in the header."""
    block_bytes: int
    """Largest read, a multiple of the page size. Groups are about as large; a larger tensor is a group of its own."""
    gap_bytes: int = GAP_BYTES
    """Longest run of other bytes that is read and discarded: about the bytes that a disk reads in one access time."""
    rest_bytes: int = 0
    """Longest rest of a dense image that the last full block reads too. An image starts at a page boundary, so the rest
    of a group as large as a block is less than a page, and would cost a request of its own behind a network."""
    image_bytes: int = 0
    """Largest image that may be made of whole rows of a tensor, of which a part is selected then; 0: the block size.
    A mapping needs no memory for it, so there it may have any size."""

    @property
    def is_whole(self) -> bool:
        """Whether all tensors of the file are selected. There are no gaps then."""
        return len(self.positions) == len(self.header.names) and not self.header.has_holes


@dataclass(frozen=True, slots=True)
class Block:
    """One read: a range of one file, and the places of its bytes in the image."""

    group: int
    """Index of the group in the plan."""
    offset: int
    """First byte in the file."""
    nbytes: int
    """Length of the range."""
    at: int
    """Offset of the range in the group's image; for a scattered block, offset of its first byte in the image."""
    scatter: tuple[tuple[int, int], ...] = ()
    """Places in file order, (offset in the image or GAP, length). Empty: the whole range at `at`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Neighbouring tensors that have one image and are delivered together."""

    index: int
    """Position in the plan."""
    selection: int
    """Index of its selection in the plan."""
    offset: int
    """File offset of the image's first byte, a multiple of the page size; -1 if the image is compact."""
    nbytes: int
    """Size of the image."""
    names: Sequence[str]
    """Names of the tensors."""
    dtypes: Sequence[str]
    """Their dtypes, as in the format."""
    shapes: Sequence[tuple[int, ...]]
    """Shapes of the parts that are read, as in the format."""
    offsets: Sequence[int]
    """Offset of each tensor in the image."""
    blocks: tuple[Block, ...]
    """The reads that fill the image; none if all tensors are empty."""
    posts: Mapping[int, Selection] = field(default_factory=dict)
    """Selection that remains to be made from a tensor after its read, by position in the group."""
    sliced: bool = False
    """Whether it is a part of one tensor."""
    payload_bytes: int
    """Bytes of tensors in the image."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """All groups of one load, in the order in which they are read."""

    groups: tuple[Group, ...]
    """Groups; `groups[k].index == k`."""
    total_bytes: int
    """Bytes of tensors."""
    num_tensors: int
    """Number of tensors."""

    @property
    def num_reads(self) -> int:
        """Number of blocks."""
        return sum(len(group.blocks) for group in self.groups)


def select_names(headers: Sequence[Header], names: Names | None, *, path: str) -> list[Sequence[int]]:
    """Return, for each shard, the ascending positions of the tensors with these names.

    Raises:
        TensorNotFoundError: No shard has a name; the message proposes similar names.
    """
    if names is None:
        return [range(len(header.names)) for header in headers]
    if callable(names):
        return [[k for k, name in enumerate(header.names) if names(name)] for header in headers]
    shards = [(header.positions, set[int]()) for header in headers]
    for name in [names] if isinstance(names, str) else names:
        for positions, selected in shards:
            position = positions.get(name)
            if position is not None:
                selected.add(position)
                break
        else:
            raise _not_found(name, headers, path)
    return [sorted(selected) for _, selected in shards]


def _not_found(name: str, headers: Sequence[Header], path: str) -> TensorNotFoundError:
    every = [known for header in headers for known in header.names]
    close = similar_names(name, every)
    hint = f"; did you mean {', '.join(map(repr, close))}?" if close else f"; it has {len(every):,} others"
    if "*" in name:
        hint = "; names are whole: for a pattern pass a function, such as lambda name: fnmatch.fnmatch(name, PATTERN)"
    return TensorNotFoundError(f"the checkpoint has no such tensor{hint}", path=path, requested=name)


def similar_names(name: str, known: Collection[str], num: int = 3) -> list[str]:
    """Return the names that are most like another one; none if there are so many that the comparison takes long."""
    return difflib.get_close_matches(name, known, n=num) if len(known) <= 20_000 else []


def plan_reads(selections: Sequence[FileSelection], slices: Mapping[str, object]) -> ReadPlan:
    """Turn selected tensors into groups and blocks, file by file in file order.

    Args:
        selections: One for each file and each device that it is read for.
        slices: Name to index, for the tensors of which only a part is read.

    Raises:
        SliceError: An index does not fit its tensor.
    """
    groups: list[Group] = []
    total_bytes = num_tensors = 0
    for number, selection in enumerate(selections):
        names, chosen = selection.header.names, selection.positions
        sliced = [k for k in chosen if names[k] in slices] if slices else []
        whole = replace(selection, positions=[k for k in chosen if names[k] not in slices]) if sliced else selection
        for run in _neighbours(whole):
            groups.append(_whole_group(len(groups), number, run, selection))
        for k in sliced:
            groups.append(_sliced_group(len(groups), number, k, slices[names[k]], selection))
    for group in groups:
        total_bytes += group.payload_bytes
        num_tensors += len(group.names)
    return ReadPlan(tuple(groups), total_bytes, num_tensors)


def _neighbours(selection: FileSelection) -> Iterator[Sequence[int]]:
    """Cut the positions at gaps that are too long to be read, and where a group is full."""
    begins, ends, chosen = selection.header.begins, selection.header.ends, selection.positions
    everything, first = selection.is_whole, 0
    while first < len(chosen):
        limit = begins[chosen[first]] + selection.block_bytes
        if everything:
            last = max(first + 1, bisect_right(ends, limit, first))
        else:
            last = first + 1
            while (
                last < len(chosen)
                and ends[chosen[last]] <= limit
                and begins[chosen[last]] - ends[chosen[last - 1]] <= selection.gap_bytes
            ):
                last += 1
        yield chosen[first:last]
        first = last


def _whole_group(index: int, number: int, run: Sequence[int], selection: FileSelection) -> Group:
    """Plan whole tensors: dense if at most an eighth of the run is not selected, otherwise compact."""
    header, first, stop = selection.header, run[0], run[-1] + 1
    data, begin, end = header.data_start, header.begins[run[0]], header.ends[run[-1]]
    if len(run) == stop - first and not header.has_holes:
        span = slice(first, stop)
        names, dtypes, shapes = header.names[span], header.dtypes[span], header.shapes[span]
        begins, payload = header.begins[span], end - begin
    else:
        names, dtypes = [header.names[k] for k in run], [header.dtypes[k] for k in run]
        shapes, begins = [header.shapes[k] for k in run], [header.begins[k] for k in run]
        payload = sum(header.ends[k] - header.begins[k] for k in run)
    if payload * 8 >= (end - begin) * 7:
        start = (data + begin) // PAGE_BYTES * PAGE_BYTES if payload else data + begin
        shift = data - start
        offsets: Sequence[int] = [at + shift for at in begins]
        nbytes = end + shift if payload else 0
        blocks = _dense_blocks(index, start, nbytes, selection)
    else:
        start = -1
        lengths = [header.ends[k] - header.begins[k] for k in run]
        offsets, nbytes = _pack(dtypes, lengths)
        pieces = [(data + at, length, to) for at, length, to in zip(begins, lengths, offsets, strict=True) if length]
        blocks = _scattered_blocks(index, pieces, selection)
    return Group(
        index=index,
        selection=number,
        offset=start,
        nbytes=nbytes,
        names=names,
        dtypes=dtypes,
        shapes=shapes,
        offsets=offsets,
        blocks=blocks,
        payload_bytes=payload,
    )


def _sliced_group(index: int, number: int, k: int, part: object, selection: FileSelection) -> Group:
    """Plan a part of one tensor: dense if its bytes are contiguous or whole rows are read, otherwise compact."""
    header = selection.header
    name, dtype = header.names[k], header.dtypes[k]
    shape, item_bytes = stored_shape(dtype, header.shapes[k], name=name)
    whole_rows = partial(select, part, shape, item_bytes, gap_bytes=selection.gap_bytes)
    try:
        chosen = whole_rows(image_bytes=max(selection.image_bytes, selection.block_bytes))
        if len(chosen.starts) > 1 and chosen.nbytes > selection.block_bytes:  # not one range, so it is not mapped
            chosen = whole_rows(image_bytes=selection.block_bytes)
    except SliceError as error:  # add the name of the tensor
        message = f"{printable(name)!r}: {error.message}"
        raise SliceError(message, requested=error.requested, expected=error.expected) from None
    absolute = header.data_start + header.begins[k]
    if len(chosen.starts) == 1:
        begin = absolute + chosen.starts[0]
        start = begin // PAGE_BYTES * PAGE_BYTES
        at = begin - start
        nbytes = at + chosen.chunk_bytes
        blocks = _dense_blocks(index, start, nbytes, selection)
    else:
        start, at, nbytes = -1, 0, chosen.nbytes
        pieces = [
            (absolute + begin, chosen.chunk_bytes, i * chosen.chunk_bytes) for i, begin in enumerate(chosen.starts)
        ]
        blocks = _scattered_blocks(index, pieces, selection)
    return Group(
        index=index,
        selection=number,
        offset=start,
        nbytes=nbytes,
        names=[name],
        dtypes=[dtype],
        shapes=[_format_shape(dtype, chosen.read_shape)],
        offsets=[at],
        blocks=blocks,
        posts={0: chosen} if chosen.post is not None or chosen.flip else {},
        sliced=True,
        payload_bytes=chosen.nbytes,
    )


def stored_shape(dtype: str, shape: tuple[int, ...], *, name: str) -> tuple[tuple[int, ...], int]:
    """Return the shape in whole storage items and the bytes of one; two F4 share a byte, as in torch.

    Raises:
        FormatError: The last dimension of an F4 tensor is odd.
    """
    if BITS[dtype] >= 8:
        return shape, BITS[dtype] // 8
    if not shape or shape[-1] * BITS[dtype] % 8:
        message = (
            f"tensor {printable(name)!r}: torch has no rows of {dtype} that end within a byte; leave it out by names="
        )
        raise FormatError(message, found=list(shape))
    return (*shape[:-1], shape[-1] * BITS[dtype] // 8), 1


def _format_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if BITS[dtype] >= 8 or not shape else (*shape[:-1], shape[-1] * 8 // BITS[dtype])


def _dense_blocks(index: int, start: int, nbytes: int, selection: FileSelection) -> tuple[Block, ...]:
    """Cut an image that equals a range of the file, at page boundaries."""
    step, rest = selection.block_bytes, selection.rest_bytes
    places = range(0, max(1, nbytes - rest) if nbytes else 0, step)
    return tuple([Block(index, start + at, step if at + step + rest < nbytes else nbytes - at, at) for at in places])


def _pack(dtypes: Sequence[str], lengths: Sequence[int]) -> tuple[list[int], int]:
    """Place tensors one after the other, each aligned; return their offsets and the total size."""
    offsets, end = [], 0
    for dtype, length in zip(dtypes, lengths, strict=True):
        align = _TENSOR_ALIGNMENT_BYTES if length >= _ALIGNED_FROM_BYTES else max(1, BITS[dtype] // 8)
        start = -(-end // align) * align
        offsets.append(start)
        end = start + length
    return offsets, end


def _scattered_blocks(
    index: int, pieces: Sequence[tuple[int, int, int]], selection: FileSelection
) -> tuple[Block, ...]:
    """Coalesce pieces (file offset, length, place in the image; ascending) into reads.

    Pieces with a short gap between them share a read that discards the gap. A read ends when it is full, or when the
    part of the image that it fills (with padding between tensors) would be larger than a block.
    """
    blocks: list[Block] = []
    landings: list[tuple[int, int]] = []
    begin = end = 0

    def flush() -> None:
        if landings:
            whole = len(landings) == 1
            blocks.append(Block(index, begin, end - begin, landings[0][0], () if whole else tuple(landings)))
            landings.clear()

    for offset, length, at in pieces:
        taken = 0
        while taken < length:
            position = offset + taken
            gap = position - end
            left = selection.block_bytes
            if landings:
                left -= max(position - begin, at + taken - landings[0][0])
                if gap > selection.gap_bytes or left <= 0:
                    flush()
                    left = selection.block_bytes
            if not landings:
                begin = position
            elif gap:
                landings.append((GAP, gap))
            step = min(length - taken, left)
            if landings and not gap and landings[-1][0] >= 0 and sum(landings[-1]) == at + taken:
                landings[-1] = (landings[-1][0], landings[-1][1] + step)
            else:
                landings.append((at + taken, step))
            taken += step
            end = position + step
    flush()
    return tuple(blocks)
