"""From headers and a wish to reads: select, slice, coalesce, align, cut, order. Pure; no I/O, no torch.

The wish becomes groups of neighbouring tensors. A group has one image: the memory in which its bytes land.
Where a run of the file is wanted almost whole, the image is that run, from a page border on, so that it can be
mapped, or read past the page cache. Elsewhere (slices, every other tensor) the image is compact and its blocks
say how the bytes of one read scatter into it. Blocks are what one worker reads at a time.
"""

from __future__ import annotations

import difflib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from stio.errors import FormatError, SliceError, TensorNotFoundError, printable
from stio.format.dtypes import bits
from stio.format.header import Header
from stio.format.slicing import Selection, select
from stio.runtime.limits import PAGE_BYTES

__all__ = ["GAP", "Block", "Group", "Names", "PlanOptions", "ReadPlan", "plan_reads", "select_names"]

GAP = -1
"""Landing place of bytes that are read through and thrown away."""

Names = str | Iterable[str] | Callable[[str], bool]
"""One name, several, or a predicate."""

_TENSOR_ALIGNMENT_BYTES = 64
_ALIGNED_FROM_BYTES = 4096
"""Smaller tensors are aligned to their own width only: thousands of them must not swell their image."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The sizes that a plan is cut by."""

    group_bytes: int = 32 << 20
    """Tensors are handed over in groups of about this size; a larger tensor is a group of its own."""
    block_bytes: int = 32 << 20
    """Largest read; a multiple of the page size."""
    gap_bytes: int = 256 << 10
    """Read through unwanted bytes up to this length: about what a disk delivers in one access time."""


@dataclass(frozen=True, slots=True)
class Block:
    """One read: a range of one file and where its bytes land."""

    group: int
    """Index of the group in the plan."""
    offset: int
    """First byte in the file."""
    nbytes: int
    """Length of the range."""
    at: int
    """Where the range lands in the group's image; for a scattered block, where its first kept byte does."""
    scatter: tuple[tuple[int, int], ...] = ()
    """Landing places in file order, (offset in the image or GAP, length). Empty: all of it at `at`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Neighbouring tensors that land in one image and are handed over together."""

    index: int
    """Position in the plan."""
    shard: int
    """Which of the plan's headers."""
    offset: int
    """File offset of the image's first byte, a multiple of the page size; -1 if the image is compact."""
    nbytes: int
    """Size of the image."""
    names: Sequence[str]
    """Names of the tensors."""
    dtypes: Sequence[str]
    """Their dtypes, as in the format."""
    shapes: Sequence[tuple[int, ...]]
    """Shapes of what is read of them, as in the format."""
    offsets: Sequence[int]
    """Where each begins in the image."""
    blocks: tuple[Block, ...]
    """The reads that fill the image; none if all tensors are empty."""
    posts: Mapping[int, Selection] = field(default_factory=dict)
    """By position in the group: what is still to be picked from a tensor once it is there."""
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
    """Return, for each shard, the ascending positions of the tensors that were asked for.

    Raises:
        TensorNotFoundError: A name that no shard has; the message proposes similar ones.
    """
    if names is None:
        return [range(len(header)) for header in headers]
    if callable(names):
        return [[k for k, name in enumerate(header.names) if names(name)] for header in headers]
    wanted: list[set[int]] = [set() for _ in headers]
    for name in [names] if isinstance(names, str) else names:
        for positions, header in zip(wanted, headers, strict=True):
            if name in header:
                positions.add(header.index_of(name))
                break
        else:
            raise _not_found(name, headers, path)
    return [sorted(positions) for positions in wanted]


def _not_found(name: str, headers: Sequence[Header], path: str) -> TensorNotFoundError:
    every = [known for header in headers for known in header.names]
    close = difflib.get_close_matches(name, every, n=3) if len(every) <= 20_000 else []
    hint = f"; did you mean {', '.join(map(repr, close))}?" if close else f"; it has {len(every):,} others"
    return TensorNotFoundError(f"the checkpoint has no such tensor{hint}", path=path, found=name)


def plan_reads(
    headers: Sequence[Header],
    positions: Sequence[Sequence[int]],
    *,
    slices: Mapping[str, object],
    options: PlanOptions | Sequence[PlanOptions],
) -> ReadPlan:
    """Turn selected tensors into groups and blocks, shard by shard in file order.

    Args:
        headers: One for each shard; a shard that is read for several devices stands here once for each.
        positions: For each of these, ascending positions in its header.
        slices: Name to index, for the tensors of which only a part is wanted.
        options: Sizes, for all or for each of these.

    Raises:
        SliceError: An index that does not fit its tensor.
    """
    groups: list[Group] = []
    each = [options] * len(headers) if isinstance(options, PlanOptions) else options
    for shard, (header, chosen, sizes) in enumerate(zip(headers, positions, each, strict=True)):
        sliced = [k for k in chosen if header.names[k] in slices] if slices else []
        whole = [k for k in chosen if header.names[k] not in slices] if sliced else chosen
        for run in _groups_of(header, whole, sizes):
            groups.append(_whole_group(len(groups), shard, header, run, sizes))
        for k in sliced:
            groups.append(_sliced_group(len(groups), shard, header, k, slices[header.names[k]], sizes))
    return ReadPlan(
        tuple(groups), sum(group.payload_bytes for group in groups), sum(len(group.names) for group in groups)
    )


def _groups_of(header: Header, chosen: Sequence[int], options: PlanOptions) -> Iterator[Sequence[int]]:
    """Cut the chosen positions where a gap is too wide to read through, and where a group is full."""
    begins, ends = header.begins, header.ends
    everything = len(chosen) == len(header)  # no gaps: a header has no holes
    first = 0
    while first < len(chosen):
        limit = begins[chosen[first]] + options.group_bytes
        if everything:
            last = max(first + 1, bisect_right(ends, limit, first))
        else:
            last = first + 1
            while (
                last < len(chosen)
                and ends[chosen[last]] <= limit
                and begins[chosen[last]] - ends[chosen[last - 1]] <= options.gap_bytes
            ):
                last += 1
        yield chosen[first:last]
        first = last


def _whole_group(index: int, shard: int, header: Header, run: Sequence[int], options: PlanOptions) -> Group:
    """Plan whole tensors: densely where at most an eighth of the run is not wanted, compactly elsewhere."""
    first, stop = run[0], run[-1] + 1
    data, begin, end = header.data_start, header.begins[run[0]], header.ends[run[-1]]
    if len(run) == stop - first:
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
        blocks, nbytes = _dense_blocks(index, start, end + shift if payload else 0, options)
    else:
        start = -1
        lengths = [header.ends[k] - header.begins[k] for k in run]
        offsets, nbytes = _pack(dtypes, lengths)
        pieces = [(data + at, length, to) for at, length, to in zip(begins, lengths, offsets, strict=True) if length]
        blocks = _scattered_blocks(index, pieces, options)
    return Group(
        index=index,
        shard=shard,
        offset=start,
        nbytes=nbytes,
        names=names,
        dtypes=dtypes,
        shapes=shapes,
        offsets=offsets,
        blocks=blocks,
        payload_bytes=payload,
    )


def _sliced_group(index: int, shard: int, header: Header, k: int, wish: object, options: PlanOptions) -> Group:
    """Plan a part of one tensor: densely if its bytes are contiguous, compactly if not."""
    name, dtype = header.names[k], header.dtypes[k]
    try:
        chosen = select(wish, *stored_shape(dtype, header.shapes[k], name=name))
    except SliceError as error:  # which of many it was
        message = f"{printable(name)!r}: {error.message}"
        raise SliceError(message, expected=error.expected, found=error.found) from None
    absolute = header.data_start + header.begins[k]
    if len(chosen.starts) == 1:
        begin = absolute + chosen.starts[0]
        start = begin // PAGE_BYTES * PAGE_BYTES
        at = begin - start
        blocks, nbytes = _dense_blocks(index, start, at + chosen.chunk_bytes, options)
    else:
        start, at, nbytes = -1, 0, chosen.nbytes
        pieces = [
            (absolute + begin, chosen.chunk_bytes, i * chosen.chunk_bytes) for i, begin in enumerate(chosen.starts)
        ]
        blocks = _scattered_blocks(index, pieces, options)
    return Group(
        index=index,
        shard=shard,
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
        FormatError: An F4 tensor whose last dimension is odd.
    """
    if bits(dtype) >= 8:
        return shape, bits(dtype) // 8
    if not shape or shape[-1] * bits(dtype) % 8:
        raise FormatError(f"rows of {dtype} do not end on a byte", found=f"{name} of shape {list(shape)}")
    return (*shape[:-1], shape[-1] * bits(dtype) // 8), 1


def _format_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if bits(dtype) >= 8 or not shape else (*shape[:-1], shape[-1] * 8 // bits(dtype))


def _dense_blocks(index: int, start: int, nbytes: int, options: PlanOptions) -> tuple[tuple[Block, ...], int]:
    """Cut an image that equals a range of the file; cuts fall on page borders."""
    step = options.block_bytes
    blocks = [Block(index, start + at, min(step, nbytes - at), at) for at in range(0, nbytes, step)]
    return tuple(blocks), nbytes


def _pack(dtypes: Sequence[str], lengths: Sequence[int]) -> tuple[list[int], int]:
    """Lay tensors out one after the other, each aligned; return offsets and the size of it all."""
    offsets, end = [], 0
    for dtype, length in zip(dtypes, lengths, strict=True):
        align = _TENSOR_ALIGNMENT_BYTES if length >= _ALIGNED_FROM_BYTES else max(1, bits(dtype) // 8)
        start = -(-end // align) * align
        offsets.append(start)
        end = start + length
    return offsets, end


def _scattered_blocks(index: int, pieces: Sequence[tuple[int, int, int]], options: PlanOptions) -> tuple[Block, ...]:
    """Coalesce wanted pieces (file offset, length, place in the image; ascending) into reads.

    Pieces a short gap apart share a read that throws the gap away. A read ends where it is full, and where what it
    fills of the image, padding between tensors included, would outgrow a block too.
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
            room = options.block_bytes
            if landings:
                room -= max(position - begin, at + taken - landings[0][0])
                if gap > options.gap_bytes or room <= 0:
                    flush()
                    room = options.block_bytes
            if not landings:
                begin = position
            elif gap:
                landings.append((GAP, gap))
            step = min(length - taken, room)
            if landings and not gap and landings[-1][0] >= 0 and sum(landings[-1]) == at + taken:
                landings[-1] = (landings[-1][0], landings[-1][1] + step)
            else:
                landings.append((at + taken, step))
            taken += step
            end = position + step
    flush()
    return tuple(blocks)
