"""What a load brings: which tensors of a checkpoint, to which device, and under which names they are shown.

Names come as the caller knows them. An alias is shown beside its target where both go to one device, and is the same
tensor there; where they go to two, each device gets a tensor of its own, read for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from stio.device.base import LoadedGroup, Target
from stio.device.placement import Placement
from stio.loading.open import OpenCheckpoint
from stio.loading.plan import Names, select_names

__all__ = ["DeviceSelection", "select_by_device"]


@dataclass(frozen=True, slots=True)
class DeviceSelection:
    """What goes to one device."""

    device: Target
    """The device."""
    positions: Sequence[Sequence[int]]
    """For each shard, the ascending positions of its tensors in the header."""
    shown: Mapping[str, Sequence[str]]
    """By the name that has data, the names that were asked for. Empty: they are called what they are called."""

    def dress(self, landed: LoadedGroup) -> LoadedGroup:
        """Show a group's tensors under the names that were asked for."""
        if self.shown:
            landed.tensors = {shown: tensor for name, tensor in landed.tensors.items() for shown in self.shown[name]}
        return landed


def select_by_device(opened: OpenCheckpoint, names: Names | None, device: Target | Placement) -> list[DeviceSelection]:
    """Return what was asked for, device by device; none at all if nothing goes anywhere.

    Args:
        opened: The checkpoint; aliases are tied names without data of their own.
        names: The caller's wish, None for everything.
        device: Where all of it goes, or where each name does.

    Raises:
        TensorNotFoundError: A name that is not there.
        DeviceError: A name that goes nowhere.
    """
    shown: dict[str, list[str]] = {}
    if opened.aliases:
        for name in _listed(opened, names):
            shown.setdefault(opened.aliases.get(name, name), []).append(name)
        names = list(shown)
    positions = select_names(opened.headers, names, path=opened.path)
    if isinstance(device, Placement):
        return _by_device(opened, positions, shown, device)
    return [DeviceSelection(device, positions, shown)]


def _listed(opened: OpenCheckpoint, names: Names | None) -> Iterable[str]:
    if isinstance(names, str):
        return [names]
    if names is not None and not callable(names):
        return names
    every = [name for header in opened.headers for name in header.names] + list(opened.aliases)
    return every if names is None else filter(names, every)


def _by_device(
    opened: OpenCheckpoint, positions: Sequence[Sequence[int]], shown: Mapping[str, Sequence[str]], place: Placement
) -> list[DeviceSelection]:
    found: dict[int, tuple[Target, list[list[int]], dict[str, list[str]]]] = {}
    for shard, (header, chosen) in enumerate(zip(opened.headers, positions, strict=True)):
        for k in chosen:
            name = header.names[k]
            for shown_name in shown.get(name, (name,)):
                target = place(shown_name)
                if id(target) not in found:
                    found[id(target)] = target, [[] for _ in opened.headers], {}
                _, mine, mine_shown = found[id(target)]
                if not mine[shard] or mine[shard][-1] != k:  # several names of one tensor: it is read once
                    mine[shard].append(k)
                if shown:
                    mine_shown.setdefault(name, []).append(shown_name)
    return [DeviceSelection(*wish) for wish in found.values()]
