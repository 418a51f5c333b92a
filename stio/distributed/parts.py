"""The parts of a checkpoint that the `DTensor`s of a module are on this rank."""

from __future__ import annotations

import hashlib

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from stio.errors import MismatchError, printable
from stio.format.placements import Cut, local_part
from stio.loading.module import Part


def parts_of(module: nn.Module) -> dict[str, Part]:
    """Return the local memory of each `DTensor` of a module, and its place in the whole tensor, by name.

    Raises:
        MismatchError: A placement is of a kind that no slice describes, or torch has cut the tensor otherwise.
    """
    found = {}
    for name, tensor in [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]:
        if isinstance(tensor, DTensor):
            found[name] = part_of(name, tensor)
    return found


def part_of(name: str, tensor: DTensor) -> Part:
    """Return the local memory of a `DTensor`, and its place.

    Raises:
        MismatchError: See `parts_of`.
    """
    mesh, shape = tensor.device_mesh, tuple(tensor.shape)
    with torch.no_grad():
        local = tensor.to_local()
    coordinate = mesh.get_coordinate()
    try:
        if coordinate is None:  # this rank is not in the mesh, and holds nothing
            index = tuple(slice(0, 0) for _ in shape)
        else:
            index = local_part(shape, tuple(mesh.shape), coordinate, [_cut(one) for one in tensor.placements])
    except ValueError as error:
        raise MismatchError(f"{printable(name)}: its part on this rank is not known: {error}") from error
    expected = tuple(one.stop - one.start for one in index)
    if coordinate is not None and tuple(local.shape) != expected:
        raise MismatchError(
            f"{printable(name)} has another local shape than its placements give; {tensor.placements} on a mesh of "
            f"{tuple(mesh.shape)}",
            expected=list(expected),
            found=list(local.shape),
        )
    return Part(local, shape, index)


def _cut(placement: Placement) -> Cut | None:
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
