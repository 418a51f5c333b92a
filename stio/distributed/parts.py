"""The parts of a checkpoint's tensors that `DTensor`s are on this rank."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from stio.distributed.torch_private import local_memory
from stio.errors import MismatchError, printable
from stio.format.placements import Cut, local_part
from stio.loading.target import LocalPart


def part_of(name: str, tensor: torch.Tensor) -> LocalPart | None:
    """Return the local memory of a `DTensor`, and its place in the whole tensor; None for any other tensor.

    Raises:
        MismatchError: A placement is of a kind that no slice describes, or torch has cut the tensor otherwise.
    """
    if not isinstance(tensor, DTensor):
        return None
    mesh, shape, local = tensor.device_mesh, tuple(tensor.shape), local_memory(tensor)
    if mesh.get_coordinate() is None:  # this rank is not in the mesh, and holds nothing
        return LocalPart(local.new_empty([0] * len(shape)), shape, tuple(slice(0, 0) for _ in shape))
    try:
        _require_default_order(tensor)
        index = local_index(shape, mesh, tensor.placements)
    except ValueError as error:
        raise MismatchError(f"{printable(name)}: its part on this rank is not known: {error}") from error
    expected = tuple(one.stop - one.start for one in index)
    if tuple(local.shape) != expected:
        raise MismatchError(
            f"{printable(name)} has another local shape than its placements give; {tensor.placements} on a mesh of "
            f"{tuple(mesh.shape)}",
            expected=list(expected),
            found=list(local.shape),
        )
    return LocalPart(local, shape, index)


def local_index(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[slice, ...]:
    """Return which part of a tensor this rank holds, a slice for each dimension.

    Raises:
        ValueError: The rank is not in the mesh, a placement is of a kind that no slice describes, or it does not fit
            the shape.
    """
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise ValueError("the mesh does not have this rank")
    return local_part(shape, tuple(mesh.shape), coordinate, [cut_of(one) for one in placements])


def cut_of(placement: Placement) -> Cut | None:
    """Return how a placement cuts a tensor; None: not at all.

    Raises:
        ValueError: No slice describes it.
    """
    # `_StridedShard` is private, and not a `Shard` in all versions of torch.
    if type(placement).__name__ == "_StridedShard":
        return Cut(placement.dim, placement.split_factor)  # type: ignore[attr-defined]
    if type(placement) is Shard:
        return Cut(placement.dim)
    if type(placement) is Replicate:
        return None
    raise ValueError(f"its placement is {placement!r}; tensors must be sharded or replicated")


def replica_of(tensor: DTensor) -> tuple[int, int]:
    """Return which copy of its part in its mesh a `DTensor` is on this rank, and how many copies that mesh has."""
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    number, num_replicas = 0, 1
    for k, placement in enumerate(tensor.placements):
        if type(placement) is Replicate:
            number = number * mesh.size(k) + (0 if coordinate is None else coordinate[k])
            num_replicas *= mesh.size(k)
    return number, num_replicas


def identify(mesh: DeviceMesh) -> str:
    """Return a text that meshes of the same ranks in the same places have in common."""
    text = f"{mesh.device_type} {mesh.mesh.tolist()}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _require_default_order(tensor: DTensor) -> None:
    """Raise if several mesh dimensions cut one dimension in another order than from left to right.

    New versions of torch can express that, and have no public way to read it.
    """
    order = getattr(tensor._spec, "shard_order", None)
    if order is not None and any(list(entry.mesh_dims) != sorted(entry.mesh_dims) for entry in order):
        raise ValueError(f"its mesh dimensions cut in the order {order}; only the order from left to right is known")
