"""Which part of a checkpoint's tensor a `DTensor` is on this rank: one that exists, or that `Placements` describe."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from operator import mul
from typing import TypeAlias

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from stio.distributed.placements import Cut, local_part
from stio.errors import DeviceError, MismatchError, printable
from stio.loading import PlacedPart
from stio.loading.targets import LocalPart


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


def local_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor, without a gradient; waits for the collective call that makes it."""
    with torch.no_grad():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return a `DTensor` like another one, over other local memory.

    `DTensor.from_local` would copy memory of the host to the device of the mesh.
    """
    made: Callable[..., DTensor] = DTensor
    return made(local, tensor._spec, requires_grad=False)


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


Rules: TypeAlias = Mapping[str, Sequence[Placement]] | Callable[[str, tuple[int, ...]], Sequence[Placement] | None]
"""Placements by a name or a pattern; or a callable that gets a name and a shape."""

_WILDCARDS = frozenset("*?[")


class Placements:
    """Where the tensors of a checkpoint are on a mesh of ranks, for loads without a module.

        rules = {"*.q_proj.weight": [Shard(0)], "*.o_proj.weight": [Shard(1)]}
        placements = stio.distributed.Placements(mesh, rules)
        tensors = await stio.load("model/", placements=placements)

    Each rank of the mesh makes the same rules, and the load reads its part of each tensor. The results are `DTensor`s.
    Such a load is no collective call: ranks do not wait for each other, and do not compare what they have opened. If
    the checkpoint is replaced between their opens, they get parts of different checkpoints; `load_into` refuses that.

    Args:
        mesh: The ranks. Tensors are on devices of its type.
        rules: Placements of tensors, one for each dimension of the mesh: a mapping, by name or by pattern as in
            `fnmatch` (`*` matches dots too; an exact name counts before patterns, and the first pattern that matches
            counts), or a callable that gets a name and the tensor's shape. It is called on a thread of the load, and
            returns None for tensors that it does not place. Tensors without placements are replicated.

    Raises:
        TypeError: Rules or placements of another type.
        ValueError: Not as many placements as the mesh has dimensions, or one that no slice describes (`Partial`).
    """

    def __init__(self, mesh: DeviceMesh, rules: Rules) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh is a DeviceMesh, not {printable(type(mesh).__name__)}")
        if not isinstance(rules, Mapping) and not callable(rules):
            raise TypeError(f"rules are a mapping or a callable, not {printable(type(rules).__name__)}")
        self.mesh = mesh
        """The ranks."""
        self._function = None if isinstance(rules, Mapping) else rules
        self._rules: dict[str, tuple[Placement, ...]] = {}
        for rule, placements in rules.items() if isinstance(rules, Mapping) else ():
            if not isinstance(rule, str):
                raise TypeError(f"a rule is a name or a pattern, not {printable(type(rule).__name__)}")
            self._rules[rule] = self._checked(rule, placements)
        self._patterns = [rule for rule in self._rules if not _WILDCARDS.isdisjoint(rule)]

    def __repr__(self) -> str:
        rules = {name: list(placements) for name, placements in self._rules.items()}
        return f"Placements({self.mesh!r}, {self._function or rules!r})"

    def of(self, name: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
        """Return the placements of a tensor.

        Args:
            name: Its name.
            shape: Its shape.
        """
        if self._function is not None:
            found = self._function(name, shape)
            return self._replicated if found is None else self._checked(name, found)
        if name in self._rules:
            return self._rules[name]
        matches = (self._rules[rule] for rule in self._patterns if fnmatchcase(name, rule))
        return next(matches, self._replicated)

    def unused(self, names: Collection[str]) -> list[str]:
        """Return the rules that fit none of these names.

        Args:
            names: All names of a checkpoint.
        """
        patterns = {rule for rule in self._patterns if any(fnmatchcase(name, rule) for name in names)}
        return [rule for rule in self._rules if rule not in names and rule not in patterns]

    def part(self, name: str, shape: tuple[int, ...], device: torch.device) -> PlacedPart:
        """Return the part of a tensor that this rank loads.

        Args:
            name: Its name.
            shape: Its shape.
            device: Where it is loaded to.

        Raises:
            MismatchError: This rank is not in the mesh, or the placements do not fit the shape.
            DeviceError: The mesh is of devices of another type.
        """
        if device.type != self.mesh.device_type:
            raise DeviceError(
                f"{printable(name)} would be loaded to a device of another type than those of the mesh; pass "
                f"device={self.mesh.device_type!r}",
                requested=str(device),
                expected=self.mesh.device_type,
            )
        placements = self.of(name, shape)
        try:
            index = local_index(shape, self.mesh, placements)
        except ValueError as error:
            raise MismatchError(
                f"{printable(name)} cannot be loaded on this rank: {error}", requested=f"{list(placements)} for {shape}"
            ) from error
        if all(cut_of(one) is None for one in placements):
            return PlacedPart(None, partial(_distributed, self.mesh, placements, None), placements)
        return PlacedPart(index, partial(_distributed, self.mesh, placements, shape), placements)

    @property
    def _replicated(self) -> tuple[Placement, ...]:
        return (Replicate(),) * self.mesh.ndim

    def _checked(self, rule: str, placements: Sequence[Placement]) -> tuple[Placement, ...]:
        if isinstance(placements, Placement) or not isinstance(placements, Sequence):
            raise TypeError(
                f"the placements of {printable(rule)} are a list, one for each dimension of the mesh, "
                f"not {printable(repr(placements))}"
            )
        for one in placements:
            if not isinstance(one, Placement):
                raise TypeError(f"the placements of {printable(rule)} have a {printable(type(one).__name__)}")
            cut_of(one)  # raises for one that no slice describes
        if len(placements) != self.mesh.ndim:
            raise ValueError(
                f"the mesh has {self.mesh.ndim} dimensions, and {printable(rule)} has {len(placements)} placements"
            )
        return tuple(placements)


def _distributed(
    mesh: DeviceMesh, placements: tuple[Placement, ...], shape: tuple[int, ...] | None, local: torch.Tensor
) -> DTensor:
    """Return a `DTensor` of the part that this rank has; without a shape, of a replica."""
    whole = tuple(local.shape) if shape is None else shape
    stride = tuple(accumulate((max(1, size) for size in whole[:0:-1]), mul, initial=1))[::-1] if whole else ()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(whole), stride=stride)
