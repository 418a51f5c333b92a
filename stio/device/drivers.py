"""The drivers of devices, whose functions the engine calls: to copy from its rings, and to pin memory of the host.

CUDA has one, and ROCm, whose torch calls its devices "cuda". Devices of other kinds (XPU) are loaded by the plain
executor, and torch pins memory for them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from stio import native
from stio.runtime import numa
from stio.runtime.process import after_fork_in_child


def _cuda(device: torch.device, stream: Any) -> tuple[native.Driver | str, int]:
    kind = "hip" if torch.version.hip else "cuda"
    return native.open_driver(kind, device.index), 0 if stream is None else int(stream.cuda_stream)


drivers: dict[str, Callable[[torch.device, Any], tuple[native.Driver | str, int]]] = {"cuda": _cuda}
"""By type of device, a function that returns its driver, or why there is none, and the handle of a stream (None: 0).
Tests add the simulated device."""


def driver_of(device: torch.device) -> native.Driver | None:
    """Return the driver of a device; None if the engine, or its driver, is not here."""
    open_driver = drivers.get(device.type) if native.available() else None
    if open_driver is None:
        return None
    known = _known.get((open_driver, device))
    if known is None:
        driver = open_driver(device, None)[0]
        if not isinstance(driver, native.Driver):
            return None
        known = _known.setdefault((open_driver, device), driver)
    return known


_known: dict[tuple[object, torch.device], native.Driver] = {}
"""Drivers that were found: to open one retains the context of its device once more."""
after_fork_in_child(_known.clear)


@cache
def node_of(device: torch.device) -> int | None:
    """Return the node of the host that a device is on, None if torch or the system does not report it."""
    try:
        found: Any = torch.get_device_module(device).get_device_properties(device)
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return numa.node_of(address)
