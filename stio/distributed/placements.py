"""Which part of a tensor one rank of a mesh holds, and which rank reads the rows that several need. Pure; no torch.

A mesh has several dimensions, and for each of them the tensor has a placement: cut along one of the tensor's
dimensions, or whole. A cut into n parts gives parts of `ceil(size / n)`; the last ones are shorter, or empty. Several
mesh dimensions may cut one dimension of the tensor, one after the other, from left to right. A *strided* cut comes
after the plain ones: FSDP over tensor parallelism first cuts for the right mesh dimension, and then each part for the
left one.

In a file a tensor's elements are in row-major order. So a part that is cut along the first dimension is one range of
bytes, and other parts are many.

To read what ranks need in common, a tensor is a sequence of *rows*: its parts along the first dimension that has more
than one. The rows that ranks need in common are put in the order of the checkpoint and cut into *chunks*, contiguous
bytes of one file, which the ranks read and send in turn. All cuts are at borders of rows, so a chunk consists of rows
of one tensor or of several, and needs no other chunk to be used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any

from stio.distributed.plan_parts import ByteRange


@dataclass(frozen=True, slots=True)
class Cut:
    """The placement of a mesh dimension that cuts a tensor; None stands for one that does not."""

    dim: int
    """The tensor's dimension."""
    split_factor: int = 0
    """Of a strided cut, the number of parts that the mesh dimensions to its right have made; 0: a plain cut."""


def local_part(
    shape: Sequence[int], mesh: Sequence[int], coordinate: Sequence[int], cuts: Sequence[Cut | None]
) -> tuple[slice, ...]:
    """Return the part that a rank holds, one slice for each dimension of the tensor; start and stop are numbers.

    Args:
        shape: Shape of the whole tensor.
        mesh: Size of each mesh dimension.
        coordinate: The rank's place in each of them.
        cuts: Placement of each mesh dimension.

    Raises:
        ValueError: Mesh, coordinate and cuts do not fit together, or the order of cuts is not one that torch makes.
    """
    if not len(mesh) == len(coordinate) == len(cuts):
        raise ValueError(f"{len(mesh)} mesh dimensions, {len(coordinate)} coordinates, {len(cuts)} placements")
    for k, (size, place) in enumerate(zip(mesh, coordinate, strict=True)):
        if not 0 <= place < size:
            raise ValueError(f"there is no place {place} in mesh dimension {k}, which has {size}")
    parts = [(0, size) for size in shape]
    for k in _order(shape, mesh, cuts):
        cut = cuts[k]
        assert cut is not None
        dim = cut.dim % len(shape)
        begin, end = parts[dim]
        step = -(-(end - begin) // mesh[k])
        first = min(end, begin + coordinate[k] * step)
        parts[dim] = first, min(end, first + step)
    return tuple(slice(*part) for part in parts)


def byte_ranges(shape: Sequence[int], part: Sequence[slice], itemsize: int) -> list[ByteRange]:
    """Return where the elements of a part are in the whole tensor, in row-major order of the part.

    Args:
        shape: Shape of the whole tensor.
        part: See `local_part`.
        itemsize: Bytes of an element.

    Returns:
        As few ranges as possible; none if the part is empty.
    """
    lengths = [one.stop - one.start for one in part]
    if 0 in lengths:
        return []
    strides = [itemsize] * len(shape)
    for dim in range(len(shape) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    start = sum(one.start * stride for one, stride in zip(part, strides, strict=True))
    # From the innermost dimension outwards: whole ones, then one that is cut, make one range; then ranges at even
    # distances, as far as they go; each row of what is left has such ranges of its own.
    nbytes, count, stride, starts = itemsize, 1, 0, [start]
    for length, distance in zip(reversed(lengths), reversed(strides), strict=True):
        if length == 1:
            continue
        if len(starts) == 1 and count == 1 and distance == nbytes:
            nbytes *= length
        elif len(starts) == 1 and (count == 1 or distance == count * stride):
            stride = distance if count == 1 else stride
            count *= length
        else:
            starts = [row * distance + first for row in range(length) for first in starts]
    return [ByteRange(first, nbytes, count, stride) for first in starts]


def _order(shape: Sequence[int], mesh: Sequence[int], cuts: Sequence[Cut | None]) -> list[int]:
    """Return the mesh dimensions that cut, in the order of their cuts."""
    plain, strided = [], []
    for k, cut in enumerate(cuts):
        if cut is None:
            continue
        if not -len(shape) <= cut.dim < len(shape):
            raise ValueError(f"the tensor has {len(shape)} dimensions, and a placement cuts dimension {cut.dim}")
        if not cut.split_factor:
            plain.append(k)
            continue
        dim, later = cut.dim % len(shape), enumerate(cuts[k + 1 :], k + 1)
        right = [j for j, other in later if other is not None and other.dim % len(shape) == dim]
        if prod(mesh[j] for j in right) != cut.split_factor:
            raise ValueError(
                f"a strided placement has split_factor={cut.split_factor}, and the mesh dimensions to its right make "
                f"{prod(mesh[j] for j in right)} parts"
            )
        strided.append(k)
    return plain + strided[::-1]


# Rows that ranks have in common.

RowRange = tuple[int, int]
"""Half-open range of rows; `NO_ROWS` if there are none."""

NO_ROWS: RowRange = (0, 0)


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor as rows."""

    dim: int
    """The dimension; 0 for a tensor without dimensions, which is one row."""
    num: int
    """Number of rows; 0 if the tensor is empty."""
    nbytes: int
    """Bytes of one row."""


@dataclass(frozen=True, slots=True)
class RowTensor:
    """One tensor of the checkpoint, with data."""

    name: str
    """Its name."""
    file: int
    """Number of its file."""
    offset: int
    """Where its first row is in that file."""
    dtype: str
    """As in the format."""
    shape: tuple[int, ...]
    """In whole storage items."""
    rows: Rows
    """Its rows."""


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows of one tensor in a chunk."""

    tensor: int
    """Number of the tensor."""
    rows: RowRange
    """Which rows."""
    offset: int
    """Offset of the first of them in the chunk."""


@dataclass(slots=True)
class Chunk:
    """Bytes that one rank reads and sends at once."""

    file: int
    """Number of the file."""
    begin: int
    """First byte in the file."""
    nbytes: int = 0
    """Length."""
    pieces: list[ChunkRows] = field(default_factory=list)
    """What it consists of."""


_MIN_CHUNKS_OF_RANK = 4
"""Chunks of one rank, so that shares of ranks differ by a quarter at most; of few bytes a rank may have none."""


def rows_of(shape: Sequence[int], item_bytes: int) -> Rows:
    """Return how a tensor is divided into rows."""
    dim = next((k for k, size in enumerate(shape) if size != 1), max(0, len(shape) - 1))
    if 0 in shape:
        return Rows(dim, 0, 0)
    return Rows(dim, shape[dim] if shape else 1, prod(shape[dim + 1 :]) * item_bytes)


def needed_rows(rows: Rows, part: Sequence[Any]) -> RowRange:
    """Return the rows that hold a part of a tensor.

    Args:
        rows: The tensor's rows.
        part: A slice for each dimension, or several ascending ones; start and stop are numbers.
    """
    part = [slice(one[0].start, one[-1].stop) if isinstance(one, list) else one for one in part]
    if not rows.num or any(one.start >= one.stop for one in part):
        return NO_ROWS
    return (part[rows.dim].start, part[rows.dim].stop) if part else (0, rows.num)


def common_rows(needed: Sequence[RowRange]) -> RowRange:
    """Return the rows from the first to the last that any rank needs, if two ranks need one of them; else none.

    Args:
        needed: The rows that each rank needs of one tensor.
    """
    ranges = sorted(one for one in needed if one != NO_ROWS)
    if all(left[1] <= right[0] for left, right in pairwise(ranges)):
        return NO_ROWS
    return ranges[0][0], max(end for _, end in ranges)


def cut_chunks(
    tensors: Sequence[RowTensor], shared: Sequence[RowRange], num_ranks: int, chunk_bytes: int
) -> list[Chunk]:
    """Cut rows into chunks. The ranks read and send them in turn: rank k the chunks k, `num_ranks + k` and so on.

    Args:
        tensors: All tensors, in the order of the checkpoint: by file and offset.
        shared: The rows of each that are sent.
        num_ranks: Number of ranks.
        chunk_bytes: Largest chunk. A larger row is a chunk of its own.

    Returns:
        The chunks in the order of the checkpoint.
    """
    total = sum((end - begin) * one.rows.nbytes for one, (begin, end) in zip(tensors, shared, strict=True))
    chunk_bytes = min(chunk_bytes, -(-total // (_MIN_CHUNKS_OF_RANK * num_ranks)))
    chunks: list[Chunk] = []
    for tensor, (one, (row, end)) in enumerate(zip(tensors, shared, strict=True)):
        row_bytes = one.rows.nbytes
        while row < end:
            begin, last = one.offset + row * row_bytes, chunks[-1] if chunks else None
            follows = last is not None and (last.file, last.begin + last.nbytes) == (one.file, begin)
            if last is None or not follows or last.nbytes + row_bytes > chunk_bytes:
                last = Chunk(one.file, begin)
                chunks.append(last)
            num = min(end - row, max(1, (chunk_bytes - last.nbytes) // row_bytes))
            last.pieces.append(ChunkRows(tensor, (row, row + num), last.nbytes))
            last.nbytes += num * row_bytes
            row += num
    return chunks
