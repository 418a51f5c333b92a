"""The devices of tensors: one device for all, or one for each that depends on its name.

A mapping is read as a `device_map`: by the tensor's name, or by the longest prefix of the name that ends at a dot, so
names of modules work. A device is resolved for its first tensor. An entry for a device that this machine
does not have is no error for loads of other tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from stio.device.base import Accelerator, Target, resolve_device
from stio.errors import DeviceError, printable


class Placement:
    """A device for each name. Equal devices are one object.

    Args:
        where: Returns for a tensor's name what `torch.device` accepts, `"auto"` or an `Accelerator`; or a mapping to
            those, see above.
    """

    def __init__(self, where: Callable[[str], Any] | Mapping[str, Any]) -> None:
        self._where = partial(_by_prefix, where) if isinstance(where, Mapping) else where
        self._known: dict[str | int | torch.device, Target] = {}
        self._devices: dict[torch.device, torch.device] = {}

    def __call__(self, name: str) -> Target:
        """Return the device of a tensor.

        Raises:
            DeviceError: No device is given for it, or this machine does not have it.
        """
        device = self._where(name)
        if not isinstance(device, str | int | torch.device):
            return self._resolved(device, name)
        target = self._known.get(device)
        if target is None:
            target = self._known[device] = self._resolved(device, name)
        return target

    def _resolved(self, device: Any, name: str) -> Target:
        if isinstance(device, Accelerator):
            return device
        try:
            found = resolve_device(device)
        except DeviceError as error:  # add the tensor's name
            message = f"{error.message}; device= leads {printable(name)!r} there"
            raise DeviceError(message, requested=error.requested, expected=error.expected) from error
        return self._devices.setdefault(found, found)


def resolve_placement(device: Any) -> Target | Placement:
    """Return the device of all tensors, its index set, or a device for each of them.

    Raises:
        DeviceError: torch has no such device, or this machine does not.
    """
    # First, because the check of a protocol takes 10 us.
    if device is None or isinstance(device, str | int | torch.device):
        return resolve_device(device)
    if isinstance(device, Accelerator):
        return device
    if isinstance(device, Mapping) or callable(device):
        return Placement(device)
    return resolve_device(device)


def _advice_on_keys(devices: Mapping[str, Any], name: str) -> str:
    """Return what to do about a mapping without an entry for a tensor, by the entry that comes nearest to it."""
    for key in devices:
        plain = key.rstrip(".*")
        if plain != key and (name == plain or name.startswith(f"{plain}.")):
            return f"; instead of {printable(key)!r} write {printable(plain)!r}: a prefix has no dot or star at its end"
    below = [key for key in devices if key and f".{name}".find(f".{key}.") > 0]
    if below:
        return f"; {printable(below[0])!r} is in the name, but not at its start"
    above = [key for key in devices if key.endswith((f".{name}", f".{name.partition('.')[0]}"))]
    return f"; the entry {printable(above[0])!r} has a prefix that the name lacks" if above else ""


def _by_prefix(devices: Mapping[str, Any], name: str) -> Any:
    prefix = name
    while prefix not in devices:
        if not prefix:
            raise DeviceError(
                "device= has no entry for a tensor; add one, or an entry for '', which stands for all other tensors"
                + _advice_on_keys(devices, name),
                requested=name,
                expected="an entry for its name, or for a prefix of it that ends at a dot",
            )
        prefix = prefix.rpartition(".")[0]
    return devices[prefix]
