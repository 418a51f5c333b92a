"""Loads in which this process gets a part of each tensor: the interface behind `placements=`.

Nothing here depends on ranks or meshes. An object of the caller (`stio.distributed.Placements`) returns, for a name, a
shape and a device, which part is read, and how the result is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch

from stio.device.base import Placement, Target
from stio.device.tensors import torch_shape
from stio.errors import MismatchError, TensorNotFoundError, listed, printable
from stio.format.header import Header
from stio.loading.plan import Names
from stio.loading.select import listed_names


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """The part of a tensor that this process loads."""

    index: tuple[slice, ...] | None
    """Which part it is, a slice for each dimension; None: the whole."""
    make: Callable[[torch.Tensor], torch.Tensor]
    """Makes the result, which shares the part's memory. Called on a thread of the load; on a device the copies of the
    part may be under way."""
    key: object
    """Equal for equal parts and results of one tensor."""


@runtime_checkable
class PlacementsLike(Protocol):
    """What `placements=` takes: `stio.distributed.Placements`, or an object of your own."""

    def part(self, name: str, shape: tuple[int, ...], device: torch.device) -> PlacedPart:
        """Return the part of a tensor that this process loads. Called on a thread of the load.

        Raises:
            StioError: The placements do not fit the tensor or the device.
        """

    def unused(self, names: Collection[str]) -> list[str]:
        """Return the rules that fit none of these names, which are all names of the checkpoint."""


@dataclass(frozen=True, slots=True)
class Placed:
    """The parts that a load reads, and what is made from them."""

    slices: Mapping[str, object]
    """Index of each tensor of which a part is read, by a name of it."""
    parts: Mapping[str, PlacedPart] = field(default_factory=dict)
    """By name; empty: tensors are returned as they are loaded."""

    def made(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return what is made of loaded tensors. Names of one tensor get one result."""
        found: dict[int, torch.Tensor] = {}
        result = {}
        for name, tensor in tensors.items():
            if id(tensor) not in found:
                found[id(tensor)] = self.parts[name].make(tensor)
            result[name] = found[id(tensor)]
        return result


def place(
    headers: Sequence[Header],
    aliases: Mapping[str, str],
    names: Names | None,
    slices: Mapping[str, object],
    placements: PlacementsLike,
    device: Target | Placement,
    *,
    path: str,
    strict: bool,
) -> Placed:
    """Return the parts of the selected tensors.

    Args:
        headers: Headers of all shards.
        aliases: Tied names without data, to the names that have the data.
        names: Names to load, which may be iterated twice; None: all.
        slices: The caller's slices.
        placements: See `PlacementsLike`.
        device: Device of all tensors, or of each name.
        path: Path of the checkpoint, for messages.
        strict: With `names=None`, each rule must fit a tensor.

    Raises:
        TensorNotFoundError: A rule fits no tensor.
        MismatchError: Placements do not fit a tensor, or two names of one tensor have different ones.
        ValueError: A tensor has slices, and a placement that cuts it.
    """
    stored = {
        name: torch_shape(dtype, shape) if dtype == "F4" else shape
        for header in headers
        for name, dtype, shape in zip(header.names, header.dtypes, header.shapes, strict=True)
    }
    if names is None and strict and (unused := placements.unused(stored.keys() | aliases.keys())):
        raise TensorNotFoundError(
            "a rule of placements= matches no tensor of the checkpoint; strict=False allows that",
            path=path,
            requested=listed(unused),
        )
    parts: dict[str, PlacedPart] = {}
    by_source: dict[str, str] = {}
    indexes = dict(slices)
    sliced = {aliases.get(name, name) for name in slices}
    for name in listed_names(headers, aliases, names):
        source = aliases.get(name, name)
        if source not in stored:
            continue  # the selection raises for it
        target = device(name) if isinstance(device, Placement) else device
        where = target if isinstance(target, torch.device) else target.device
        part = parts[name] = placements.part(name, stored[source], where)
        first = by_source.setdefault(source, name)
        if parts[first].key != part.key:
            raise MismatchError(
                "two names of one tensor have different placements; give both the same, or load one of them",
                path=path,
                found=f"{printable(first)} and {printable(name)}",
            )
        if part.index is None:
            continue
        if source in sliced:
            raise ValueError(
                f"{printable(name)} has an index in slices=, and placements= cut it: choose one of the two, "
                "or let placements= replicate it"
            )
        indexes[source] = part.index
    return Placed(indexes, parts)


def checked_placements(placements: Any) -> PlacementsLike | None:
    """Return the value of `placements=`.

    Raises:
        TypeError: It is of another kind.
    """
    if placements is None or isinstance(placements, PlacementsLike):
        return placements
    raise TypeError(
        f"placements= takes stio.distributed.Placements(mesh, rules), not {printable(type(placements).__name__)}"
    )
