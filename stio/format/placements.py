"""Which part of a tensor one rank of a mesh holds. Pure; no torch.

A mesh has several dimensions, and for each of them the tensor has a placement: cut along one of the tensor's
dimensions, or whole. A cut into n parts gives parts of `ceil(size / n)`; the last ones are shorter, or empty. Several
mesh dimensions may cut one dimension of the tensor, one after the other, from left to right. A *strided* cut comes
after the plain ones: FSDP over tensor parallelism first cuts for the right mesh dimension, and then each part for the
left one.

In a file a tensor's elements are in row-major order. So a part that is cut along the first dimension is one range of
bytes, and other parts are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


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
        right = [j for j in range(k + 1, len(cuts)) if _cuts(cuts[j], cut.dim % len(shape), len(shape))]
        if prod(mesh[j] for j in right) != cut.split_factor:
            raise ValueError(
                f"a strided placement has split_factor={cut.split_factor}, and the mesh dimensions to its right make "
                f"{prod(mesh[j] for j in right)} parts"
            )
        strided.append(k)
    return plain + strided[::-1]


def _cuts(cut: Cut | None, dim: int, num_dims: int) -> bool:
    return cut is not None and cut.dim % num_dims == dim
