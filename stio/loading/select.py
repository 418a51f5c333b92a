"""Selects the tensors of a checkpoint for each device, and the names under which they are returned.

Names are those of the caller, aliases among them. If an alias and its target are on one device, both names are returned
with the same tensor. If they are on two devices, each device has its own tensor, and the data is read twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache

from stio.device.base import Target
from stio.device.placement import Placement
from stio.errors import printable
from stio.format.header import Header
from stio.format.index import ShardIndex
from stio.format.shared import ALIASES_KEY
from stio.loading.plan import Names, select_names

Selected = tuple[Target, Sequence[Sequence[int]], Mapping[str, Sequence[str]]]
"""A device; for each shard, the positions of its tensors; see `select_by_device`."""


def select_by_device(
    headers: Sequence[Header],
    aliases: Mapping[str, str],
    names: Names | None,
    device: Target | Placement,
    *,
    path: str,
) -> list[Selected]:
    """Return the selected tensors of each device.

    Args:
        headers: Headers of all shards.
        aliases: Tied names without data, to the names that have the data.
        names: Names to select; None: all.
        device: Device of all tensors, or of each name.
        path: Path of the checkpoint, for messages.

    Returns:
        For each device: the device; for each shard, the ascending positions of its tensors in the header; by the name
        that has data, the names that were selected (empty: each tensor has one name, its own). A `Placement` gives only
        devices that have a tensor; a single device is returned even if it has none.

    Raises:
        TensorNotFoundError: The checkpoint does not have a name.
        DeviceError: A name has no device.
    """
    if names is not None and not callable(names):
        names = _plain(names)
    selected: dict[str, list[str]] = {}
    if aliases:
        for name in listed_names(headers, aliases, names):
            selected.setdefault(aliases.get(name, name), []).append(name)
        names = list(selected)
    positions = select_names(headers, names, path=path)
    if isinstance(device, Placement):
        return _by_device(headers, positions, selected, device)
    return [(device, positions, selected)]


def shards_of(
    index: ShardIndex, *, names: Names | None, slices: Mapping[str, object] | None, strict: bool
) -> Collection[str] | None:
    """Return the shards to open for what is selected, by the index; None: nothing is selected by name.

    These are all shards if the index does not determine where a name is.

    Args:
        index: The index.
        names: Names to select. No iterator, which could be used only once.
        slices: By name, the part of a tensor to select; all names must exist.
        strict: Whether all names of the shards must be in the index.
    """
    if names is None:
        return None
    if callable(names) and (ALIASES_KEY in index.metadata or not strict):
        return index.shards
    selected = [*checked_slices(slices), *_selected(index.weight_map, names)]
    if any(name not in index.weight_map for name in selected):
        return index.shards  # an alias, or a name that does not exist
    return frozenset(index.weight_map[name] for name in selected)


def _selected(known: Iterable[str], names: Names) -> Iterable[str]:
    if isinstance(names, str):
        return [names]
    return filter(names, known) if callable(names) else names


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


def listed_names(headers: Sequence[Header], aliases: Mapping[str, str], names: Names | None) -> Iterable[str]:
    """Return the selected names, aliases among them; names that are listed by the caller may not exist."""
    if names is not None and not callable(names):
        return [names] if isinstance(names, str) else names
    every = [name for header in headers for name in header.names] + list(aliases)
    return every if names is None else filter(names, every)


def _by_device(
    headers: Sequence[Header],
    positions: Sequence[Sequence[int]],
    selected: Mapping[str, Sequence[str]],
    place: Placement,
) -> list[Selected]:
    found: dict[int, tuple[Target, list[list[int]], dict[str, list[str]]]] = {}
    for shard, (header, chosen) in enumerate(zip(headers, positions, strict=True)):
        for k in chosen:
            name = header.names[k]
            for selected_name in selected.get(name, (name,)):
                device = place(selected_name)
                if id(device) not in found:
                    found[id(device)] = device, [[] for _ in headers], {}
                _, mine, my_names = found[id(device)]
                if not mine[shard] or mine[shard][-1] != k:  # several names of one tensor: it is read once
                    mine[shard].append(k)
                if selected:
                    my_names.setdefault(name, []).append(selected_name)
    return list(found.values())
