"""`Placements`: which part of each tensor a rank loads with `stio.load(..., placements=...)`, as a `DTensor`."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import mul
from typing import TypeAlias

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from stio.distributed.parts import cut_of, local_index
from stio.errors import DeviceError, MismatchError, printable
from stio.loading.select import PlacedPart

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
        self._exact: dict[str, tuple[Placement, ...]] = {}
        self._patterns: list[tuple[str, re.Pattern[str], tuple[Placement, ...]]] = []
        for rule, placements in rules.items() if isinstance(rules, Mapping) else ():
            if not isinstance(rule, str):
                raise TypeError(f"a rule is a name or a pattern, not {printable(type(rule).__name__)}")
            checked = self._checked(rule, placements)
            self._exact[rule] = checked
            if not _WILDCARDS.isdisjoint(rule):
                self._patterns.append((rule, re.compile(fnmatch.translate(rule)), checked))

    def __repr__(self) -> str:
        rules = {name: list(placements) for name, placements in self._exact.items()}
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
        if name in self._exact:
            return self._exact[name]
        matches = (placements for _, pattern, placements in self._patterns if pattern.match(name))
        return next(matches, self._replicated)

    def unused(self, names: Collection[str]) -> list[str]:
        """Return the rules that fit none of these names.

        Args:
            names: All names of a checkpoint.
        """
        patterns = {rule: pattern for rule, pattern, _ in self._patterns}
        return [
            rule
            for rule in self._exact
            if rule not in names and not (rule in patterns and any(map(patterns[rule].match, names)))
        ]

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
