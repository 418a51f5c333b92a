"""Selects what a load reads: the tensors of each device, the names under which they are returned, the parts of ranks.

Names are those of the caller, aliases among them. If an alias and its target are on one device, both names are returned
with the same tensor. If they are on two devices, each device has its own tensor, and the data is read twice.

With `placements=` this process gets a part of each tensor (`placed_parts`). Nothing here depends on ranks or meshes: an
object of the caller (`stio.distributed.Placements`) returns, for a name, a shape and a device, which part is read, and
how the result is made from it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

import torch

from stio.device import TORCH_DTYPES, Accelerator, Casts, DeviceMap
from stio.errors import MismatchError, TensorNotFoundError, listed, printable
from stio.format import ALIASES_KEY, Header
from stio.format.delta import Patch
from stio.format.files import ShardIndex
from stio.loading.casts import planned_casts
from stio.loading.options import LoadOptions
from stio.loading.plan import Names, select_names, similar_names
from stio.storage.checkpoint import OpenCheckpoint


@dataclass(frozen=True, slots=True)
class DeviceSelection:
    """The tensors that a load brings to one device."""

    device: torch.device | Accelerator
    """The device."""
    positions: Sequence[Sequence[int]]
    """For each shard, the ascending positions of its tensors in the header."""
    names: Mapping[str, Sequence[str]]
    """By the name that has data, the names that were selected. Empty: each tensor has one name, its own."""
    total_bytes: int
    """Size of the tensors."""


@dataclass(frozen=True, slots=True)
class SelectedTensors:
    """What a load reads of an open checkpoint, and what it makes of that. Nothing is opened or allocated for it."""

    opened: OpenCheckpoint
    """The checkpoint."""
    options: LoadOptions
    """Options of the load."""
    devices: Sequence[DeviceSelection]
    """The tensors of each device. A `DeviceMap` gives only devices that have a tensor."""
    slices: Mapping[str, object]
    """By the name that has data, the part of a tensor to read."""
    casts: Casts
    """What is cast."""
    placed: PlacedParts | None
    """What is made of the parts that this process loads."""

    @property
    def shards(self) -> list[int]:
        """Shards that have a selected tensor."""
        positions = zip(*[device.positions for device in self.devices], strict=True)
        return [shard for shard, of_devices in enumerate(positions) if any(of_devices)]

    @property
    def patches(self) -> dict[str, Sequence[Patch]]:
        """By the name that has data, the patches of the selected tensors."""
        known = self.opened.patches
        found: dict[str, Sequence[Patch]] = {}
        for device in self.devices if known else ():
            for header, positions in zip(self.opened.headers, device.positions, strict=True):
                found |= {name: known[name] for k in positions if (name := header.names[k]) in known}
        return found

    @property
    def total_bytes(self) -> int:
        """Size of the tensors, once for each device."""
        return sum([device.total_bytes for device in self.devices])


def select_tensors(
    opened: OpenCheckpoint,
    names: Names | None,
    options: LoadOptions,
    *,
    slices: Mapping[str, object] | None = None,
    placements: PlacementsLike | None = None,
    casts: Casts | None = None,
) -> SelectedTensors:
    """Select what a load reads.

    Args:
        opened: The checkpoint.
        names: Names to load, also aliases; None: all.
        options: Options of the load. The device is resolved here, which may start its runtime.
        slices: By name, the part to load.
        placements: The parts that this process loads; names of other tensors than those of `names` have no part.
        casts: Cast to it instead of `options.dtype`.

    Raises:
        TensorNotFoundError: The checkpoint does not have a name, or one that is a key of a mapping.
        DeviceError: There is no such device, or a name has no device.
        UnsupportedDtypeError: A quantized tensor would be cast without its scales.
    """
    names, slices, placed = reusable_names(names), checked_slices(slices), None
    device = DeviceMap.of(options.device)
    if isinstance(options.device, Mapping):
        require_keys(opened, "device", options.device, prefixes=True)
    if isinstance(options.dtype, Mapping):
        require_keys(opened, "dtype", options.dtype, prefixes=False)
    if placements is not None:
        placed = placed_parts(opened, names, slices, placements, device, strict=options.strict)
        slices = placed.slices
    stored_slices = _by_stored_name(slices, opened) if slices else {}
    devices = select_by_device(opened, names, device)
    if casts is None and options.casts is not None:
        dtypes = {
            name: dtype for header in opened.headers for name, dtype in zip(header.names, header.dtypes, strict=True)
        }
        selected = [
            header.names[k]
            for one in devices
            for header, positions in zip(opened.headers, one.positions, strict=True)
            for k in positions
        ]
        casts = planned_casts(dtypes, options.casts, path=opened.path, selected=selected, further=opened.index_names)
    return SelectedTensors(opened, options, devices, stored_slices, casts or Casts(), placed)


def _by_stored_name(slices: Mapping[str, object], opened: OpenCheckpoint) -> dict[str, object]:
    """Return slices by the names that have data, aliases resolved.

    Raises:
        TensorNotFoundError: A name does not exist.
        ValueError: Two names of one tensor have different slices.
    """
    stored: dict[str, object] = {}
    for name, index in slices.items():
        target = opened.aliases.get(name, name)
        if not any(target in header for header in opened.headers):
            raise TensorNotFoundError("slices= names a tensor that does not exist", path=opened.path, requested=name)
        if target in stored and not _is_same_index(stored[target], index):
            raise ValueError(f"slices= has two different parts of one tensor, {printable(name)} and another name of it")
        stored[target] = index
    return stored


def _is_same_index(one: object, other: object) -> bool:
    try:
        return bool(one == other)
    except (RuntimeError, ValueError):  # arrays of several elements
        return False


def selected_bytes(header: Header, positions: Sequence[int], without: Collection[str] = ()) -> int:
    """Return the bytes of the tensors at these positions, without those of some names."""
    if len(positions) == len(header.names) and not without:
        return header.data_bytes
    return sum(header.ends[k] - header.begins[k] for k in positions if header.names[k] not in without)


def select_by_device(
    opened: OpenCheckpoint, names: Names | None, device: torch.device | Accelerator | DeviceMap
) -> list[DeviceSelection]:
    """Return the selected tensors of each device.

    Args:
        opened: The checkpoint.
        names: Names to select, as `reusable_names` returns them.
        device: Device of all tensors, or of each name.

    Returns:
        The selection of each device; of a single device even if it has no tensor.

    Raises:
        TensorNotFoundError: The checkpoint does not have a name.
        DeviceError: A name has no device.
    """
    selected: dict[str, list[str]] = {}
    if opened.aliases:
        for name in listed_names(opened, names):
            selected.setdefault(opened.aliases.get(name, name), []).append(name)
        names = list(selected)
    positions = select_names(opened.headers, names, path=opened.path)
    by_device: dict[int, tuple[torch.device | Accelerator, list[Sequence[int]], dict[str, list[str]]]] = {}
    if not isinstance(device, DeviceMap):
        by_device[0] = device, positions, selected
    else:
        for shard, (header, chosen) in enumerate(zip(opened.headers, positions, strict=True)):
            for k in chosen:
                name = header.names[k]
                for selected_name in selected.get(name, (name,)):
                    own = device(selected_name)
                    if id(own) not in by_device:
                        by_device[id(own)] = own, [[] for _ in opened.headers], {}
                    _, of_shards, own_names = by_device[id(own)]
                    of_shard = cast(list[int], of_shards[shard])
                    if not of_shard or of_shard[-1] != k:  # several names of one tensor: it is read once
                        of_shard.append(k)
                    if selected:
                        own_names.setdefault(name, []).append(selected_name)
    return [
        DeviceSelection(own, of_shards, own_names, sum(map(selected_bytes, opened.headers, of_shards)))
        for own, of_shards, own_names in by_device.values()
    ]


def require_keys(opened: OpenCheckpoint, argument: str, keys: Iterable[str], *, prefixes: bool) -> None:
    """Require that each key of a mapping stands for a tensor of the checkpoint, selected or not.

    Args:
        opened: The checkpoint.
        argument: Name of the argument.
        keys: The keys.
        prefixes: Whether a key may be a prefix that ends at a dot, or empty for all others.

    Raises:
        TensorNotFoundError: A key stands for none; it names the nearest.
    """
    known = dict.fromkeys([*(name for header in opened.headers for name in header.names), *opened.aliases])
    known |= dict.fromkeys(opened.index_names)
    missing = [key for key in keys if key not in known and (key or not prefixes)]
    if missing and prefixes:
        every = {name[:end] for name in known for end, character in enumerate(name) if character == "."}
        known |= dict.fromkeys(every)
        missing = [key for key in missing if key not in every]
    if missing:
        close = similar_names(missing[0], known, 1)
        nearest = f"; did you mean {printable(close[0])!r}?" if close else ""
        message = f"{argument}= has an entry for a tensor that the checkpoint does not have{nearest}"
        raise TensorNotFoundError(message, path=opened.path, requested=missing[0])


def shards_of(
    index: ShardIndex, *, names: Names | None, slices: Mapping[str, object] | None, strict: bool
) -> Collection[str] | None:
    """Return the shards to open for what is selected, by the index; None: nothing is selected by name.

    These are all shards if the index does not determine where a name is.

    Args:
        index: The index.
        names: Names to select, as `reusable_names` returns them.
        slices: By name, the part of a tensor to select; all names must exist.
        strict: Whether all names of the shards must be in the index.
    """
    if names is None:
        return None
    if callable(names) and (ALIASES_KEY in index.metadata or not strict):
        return index.shards
    selected = [*checked_slices(slices), *(filter(names, index.weight_map) if callable(names) else names)]
    if any(name not in index.weight_map for name in selected):
        return index.shards  # an alias, or a name that does not exist
    return frozenset(index.weight_map[name] for name in selected)


def checked_slices(slices: Mapping[str, object] | None) -> Mapping[str, object]:
    """Return the value of `slices=`, or an empty mapping.

    Raises:
        TypeError: It is no mapping.
    """
    if slices is not None and not isinstance(slices, Mapping):
        raise TypeError(f"slices= takes a mapping from names to indices, not {printable(slices)}")
    return slices or {}


def plain_names(names: str | Iterable[str]) -> set[str]:
    """Return one name or several as a set of plain strings, whose methods are not the caller's.

    Raises:
        TypeError: It is neither a name nor names.
    """
    return set(_plain(names))


def _plain(names: str | Iterable[str]) -> list[str]:
    if not any(hasattr(type(names), method) for method in ("__iter__", "__getitem__")):
        raise TypeError(f"names must be a str or several of them, not {type(names).__name__}")
    found = [names] if isinstance(names, str) else list(names)
    kinds = set(map(type, found))
    for kind in kinds:
        if not issubclass(kind, str):
            raise TypeError(f"a name must be a str, not {kind.__name__}")
    return found if kinds <= {str} else list(map(str.__str__, found))


def reusable_names(names: Names | None) -> Names | None:
    """Return names that may be iterated, or a predicate that may be called, twice with one result."""
    if names is None:
        return None
    return cache(names) if callable(names) else _plain(names)


def listed_names(opened: OpenCheckpoint, names: Names | None) -> Iterable[str]:
    """Return the selected names, aliases among them; names that are listed by the caller may not exist."""
    if names is not None and not callable(names):
        return names
    every = [name for header in opened.headers for name in header.names] + list(opened.aliases)
    return every if names is None else filter(names, every)


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
class PlacedParts:
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


def placed_parts(
    opened: OpenCheckpoint,
    names: Names | None,
    slices: Mapping[str, object],
    placements: PlacementsLike,
    device: torch.device | Accelerator | DeviceMap,
    *,
    strict: bool,
) -> PlacedParts:
    """Return the parts of the selected tensors.

    Args:
        opened: The checkpoint.
        names: Names to load, which may be iterated twice; None: all.
        slices: The caller's slices.
        placements: See `PlacementsLike`.
        device: Device of all tensors, or of each name.
        strict: With `names=None`, each rule must fit a tensor.

    Raises:
        TensorNotFoundError: A rule fits no tensor.
        MismatchError: Placements do not fit a tensor, or two names of one tensor have different ones.
        ValueError: A tensor has slices, and a placement that cuts it.
    """
    stored, aliases = opened.dtypes_and_shapes(), opened.aliases
    if names is None and strict and (unused := placements.unused(stored.keys() | aliases.keys())):
        message = "a rule of placements= matches no tensor of the checkpoint; strict=False allows that"
        raise TensorNotFoundError(message, path=opened.path, requested=listed(unused))
    parts: dict[str, PlacedPart] = {}
    by_source: dict[str, str] = {}
    indexes = dict(slices)
    sliced = {aliases.get(name, name) for name in slices}
    for name in listed_names(opened, names):
        source = aliases.get(name, name)
        if source not in stored:
            continue  # the selection raises for it
        own = device(name) if isinstance(device, DeviceMap) else device
        where = own if isinstance(own, torch.device) else own.device
        part = parts[name] = placements.part(name, TORCH_DTYPES.shape(*stored[source]), where)
        first = by_source.setdefault(source, name)
        if parts[first].key != part.key:
            message = "two names of one tensor have different placements; give both the same, or load one of them"
            raise MismatchError(message, path=opened.path, found=f"{printable(first)} and {printable(name)}")
        if part.index is None:
            continue
        if source in sliced:
            raise ValueError(
                f"{printable(name)} has an index in slices=, and placements= cut it; choose one of the two"
            )
        indexes[source] = part.index
    return PlacedParts(indexes, parts)


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
