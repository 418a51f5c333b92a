"""Where tensors go: to one device, or each to the one that its name says.

A mapping is read as a `device_map`: by the tensor's name, or by the longest prefix of it that ends at a dot, so that
names of modules serve. What it leads to is resolved when a tensor goes there, and once: an entry for a device that
is not here does no harm to whoever loads other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from stio.device.base import Accelerator, Target, resolve_device
from stio.errors import DeviceError, printable

__all__ = ["Placement", "resolve_placement"]


class Placement:
    """A device for each name. Equal devices are one object.

    Args:
        where: Returns, for a tensor's name, what `torch.device` takes, `"auto"` or an `Accelerator`; or a mapping to
            those, see above.
    """

    def __init__(self, where: Callable[[str], Any] | Mapping[str, Any]) -> None:
        self._where = partial(_by_prefix, where) if isinstance(where, Mapping) else where
        self._known: dict[object, Target] = {}
        self._devices: dict[torch.device, torch.device] = {}

    def __call__(self, name: str) -> Target:
        """Return the device of a tensor.

        Raises:
            DeviceError: There is none for it, or none of that name here.
        """
        device = self._where(name)
        key = device if isinstance(device, str | int | torch.device) else id(device)
        target = self._known.get(key)
        if target is None:
            target = self._known[key] = self._resolved(device, name)
        return target

    def _resolved(self, device: Any, name: str) -> Target:
        if isinstance(device, Accelerator):
            return device
        try:
            found = resolve_device(device)
        except DeviceError as error:  # whose device it was
            message = f"{error.message}; device= leads {printable(name)!r} there"
            raise DeviceError(message, expected=error.expected, found=error.found) from error
        return self._devices.setdefault(found, found)


def resolve_placement(device: Any) -> Target | Placement:
    """Return the device that all tensors go to, its index set, or what says it for each of them.

    Raises:
        DeviceError: torch knows no such device, or it is not there.
    """
    if isinstance(device, Accelerator):
        return device
    # A torch.device is callable: it decorates functions.
    if isinstance(device, Mapping) or (callable(device) and not isinstance(device, torch.device)):
        return Placement(device)
    return resolve_device(device)


def _by_prefix(devices: Mapping[str, Any], name: str) -> Any:
    prefix = name
    while prefix not in devices:
        if not prefix:
            raise DeviceError(
                "device= says nothing of a tensor; an entry for '' stands for all that have none of their own",
                expected="an entry for its name, or for a prefix of it that ends at a dot",
                found=name,
            )
        prefix = prefix.rpartition(".")[0]
    return devices[prefix]
