"""Pinned memory of the host, for copies from and to a device: on the node of the device, released with its last use.

The engine maps it, several threads touch it, and the driver pins it (`stio/native/pinned.c`). The last reference to a
region releases it at once, on a thread of the engine. Nothing records which copies use the memory: whoever copies from
or to it waits for its copies, after an error too, before it drops the region.

Where the engine has no driver of the device, torch pins. Its sizes are powers of two, and it keeps what is released.

The engine calls the functions of a device's driver: to copy from its rings, and to pin memory. CUDA has one, and ROCm,
whose torch calls its devices "cuda". Devices of other kinds (XPU) are loaded by the plain executor, and torch pins
memory for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from stio import native, process
from stio.runtime import memory
from stio.runtime.memory import Region, read_text


def numa_node(pci_address: str, *, sysfs: str = "/sys") -> int | None:
    """Return the node of a device; None if it is not known, or if the host has one node only.

    Args:
        pci_address: Address of the device on its bus, `"0000:3b:00.0"`.
        sysfs: Where the kernel's description of the devices is mounted.
    """
    nodes = read_text(f"{sysfs}/devices/system/node/has_memory").strip()
    if "," not in nodes and "-" not in nodes:
        return None
    text = read_text(f"{sysfs}/bus/pci/devices/{pci_address.lower()}/numa_node").strip()
    return int(text) if text.isdigit() else None  # the kernel writes -1 if the firmware does not say


def _cuda(device: torch.device, stream: Any) -> tuple[native.Driver | str, int]:
    driver = _known_drivers.get(device) or native.open_driver("hip" if torch.version.hip else "cuda", device.index)
    if isinstance(driver, native.Driver):
        _known_drivers[device] = driver
    return driver, 0 if stream is None else int(stream.cuda_stream)


_known_drivers: dict[torch.device, native.Driver] = {}
"""Drivers that were found: to open one retains the context of its device once more."""
process.after_fork_in_child(_known_drivers.clear)


drivers: dict[str, Callable[[torch.device, Any], tuple[native.Driver | str, int]]] = {"cuda": _cuda}
"""By type of device, a function that returns its driver, or why there is none, and the handle of a stream (None: 0).
Tests add the simulated device."""


def driver_of(device: torch.device, stream: Any = None) -> tuple[native.Driver, int] | None:
    """Return the driver of a device, and the handle of a stream; None if the engine, or its driver, is not here."""
    open_driver = drivers.get(device.type) if native.available() else None
    driver, handle = ("", 0) if open_driver is None else open_driver(device, stream)
    return (driver, handle) if isinstance(driver, native.Driver) else None


@cache
def node_of(device: torch.device) -> int | None:
    """Return the node of the host that a device is on, None if torch or the system does not report it."""
    try:
        found: Any = torch.get_device_module(device).get_device_properties(device)
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return numa_node(address)


logger = logging.getLogger("stio")

_of_torch: dict[int, torch.Tensor] = {}  # by address
_of_parent: list[torch.Tensor] = []


def pin(nbytes: int, device: torch.device) -> Region:
    """Return new pinned memory. Blocks, without the GIL, for 0.05 to 0.4 seconds a GiB.

    Args:
        nbytes: Size, not 0. A copy should not cross the end of a piece, see `stio.native.pin`.
        device: Memory is pinned in its context, and not in the context of the thread's current device.

    Raises:
        Failure: The driver refused, or there is no memory.
        RuntimeError: The same, where torch pins.
    """
    found = driver_of(device)
    with torch.get_device_module(device).device(device):
        if found is not None:
            region = memory.owned(*native.pin(found[0], nbytes, node_of(device)))
        else:
            tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            _of_torch[tensor.data_ptr()] = tensor
            region = memory.owned(tensor.data_ptr(), nbytes, partial(_of_torch.pop, tensor.data_ptr()))
    region.owner.is_pinned = True
    return region


def is_pinned(region: Region) -> bool:
    """Return whether `pin` made a region."""
    return hasattr(region.owner, "is_pinned")


class PinnedAllocator:
    """Allocates pinned memory for one load, one save or one use of a cache; plain memory once it was refused.

    Pinning is refused if the limit of locked memory is low, or the host is short of memory. Another allocator tries
    again. Two allocators are equal if memory of one may be used for the other: they are for one device, and neither was
    refused.

    Args:
        device: The device, its index resolved.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """The device."""
        self.was_refused = False
        """Whether it has allocated plain memory."""

    def __call__(self, nbytes: int) -> Region:
        """Return new memory. Callable from any thread; blocks while memory is pinned.

        Raises:
            HostMemoryError: There is no memory either.
        """
        if not self.was_refused:
            try:
                return pin(nbytes, self.device)
            except (native.Failure, RuntimeError) as error:
                if not self.was_refused:  # several threads may allocate at once
                    self.was_refused = True
                    logger.warning("pinning host memory failed, copies to %s will be slower: %s", self.device, error)
        return memory.allocate(nbytes)

    def __eq__(self, other: object) -> bool:
        if self is other or not isinstance(other, PinnedAllocator):
            return self is other
        return self.device == other.device and not self.was_refused and not other.was_refused

    def __hash__(self) -> int:
        return hash(self.device)


@process.after_fork_in_child
def _keep_of_parent() -> None:
    """Never free memory in a forked child that torch has pinned for its parent."""
    _of_parent.extend(_of_torch.values())
