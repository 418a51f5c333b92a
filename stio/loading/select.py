"""Selects the tensors of a checkpoint for each device, and the names under which they are returned.

Names are those of the caller, aliases among them. If an alias and its target are on one device, both names are returned
with the same tensor. If they are on two devices, each device has its own tensor, and the data is read twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from stio.device.base import Target
from stio.device.placement import Placement
from stio.format.header import Header
from stio.loading.plan import Names, select_names

_Selected = tuple[Target, Sequence[Sequence[int]], Mapping[str, Sequence[str]]]


def select_by_device(
    headers: Sequence[Header],
    aliases: Mapping[str, str],
    names: Names | None,
    device: Target | Placement,
    *,
    path: str,
) -> list[_Selected]:
    """Return the selected tensors of each device; empty if no tensor is selected.

    Args:
        headers: Headers of all shards.
        aliases: Tied names without data, to the names that have the data.
        names: Names to select; None: all.
        device: Device of all tensors, or of each name.
        path: Path of the checkpoint, for messages.

    Returns:
        For each device: the device; for each shard, the ascending positions of its tensors in the header; by the name
        that has data, the names that were selected (empty: each tensor has one name, its own).

    Raises:
        TensorNotFoundError: The checkpoint does not have a name.
        DeviceError: A name has no device.
    """
    selected: dict[str, list[str]] = {}
    if aliases:
        for name in _listed(headers, aliases, names):
            selected.setdefault(aliases.get(name, name), []).append(name)
        names = list(selected)
    positions = select_names(headers, names, path=path)
    if isinstance(device, Placement):
        return _by_device(headers, positions, selected, device)
    return [(device, positions, selected)]


def _listed(headers: Sequence[Header], aliases: Mapping[str, str], names: Names | None) -> Iterable[str]:
    if isinstance(names, str):
        return [names]
    if names is not None and not callable(names):
        return names
    every = [name for header in headers for name in header.names] + list(aliases)
    return every if names is None else filter(names, every)


def _by_device(
    headers: Sequence[Header],
    positions: Sequence[Sequence[int]],
    selected: Mapping[str, Sequence[str]],
    place: Placement,
) -> list[_Selected]:
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
