"""Which part of a tensor one rank of a mesh holds. Pure; no torch.

A mesh has several dimensions, and for each of them the tensor has a placement: cut along one of the tensor's
dimensions, or whole. A cut into n parts gives parts of `ceil(size / n)`; the last ones are shorter, or empty. Several
mesh dimensions may cut one dimension of the tensor, one after the other, from left to right. A *strided* cut comes
after the plain ones: FSDP over tensor parallelism first cuts for the right mesh dimension, and then each part for the
left one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


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
