"""Pinned memory of the host, for copies from and to a device: allocated near the device, and returned to the system.

torch's allocator pins it. It rounds sizes up to powers of two and keeps freed memory for the next allocation. It does
not reuse memory while a copy that torch has recorded reads or writes it. Nothing else can use the memory that it keeps.
So `give_back` returns the memory of a closed `Saver` or `HostCache` to the system. torch has one call for that, which
releases all free memory and holds the GIL meanwhile. So regions are freed one at a time.
"""

from __future__ import annotations

import logging
import time
import weakref
from contextlib import suppress
from functools import cache, partial
from typing import Any

import torch

from stio.device.torch_private import empty_host_cache
from stio.errors import StorageError
from stio.runtime import memory, numa
from stio.runtime.memory import Region
from stio.runtime.operation import Operation

logger = logging.getLogger("stio")

_POLL_SECONDS = 0.02
_NUM_POLLS = 25


def pin(nbytes: int, device: torch.device) -> Region:
    """Return new pinned memory, on the node of the host that the device is on.

    torch reuses a region of this size if it has kept one; that region may be on another node.

    Args:
        nbytes: Size; torch takes the next power of two.
        device: Memory is pinned in its context, and not in the context of the thread's current device.

    Raises:
        RuntimeError: The system or the driver refused. torch has cleared the error of the driver, which the next work
            of this thread would raise otherwise.
    """
    with torch.get_device_module(device).device(device), numa.preferring(node_of(device)):
        tensor = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    return Region(tensor.data_ptr(), nbytes, tensor)


def is_pinned(region: Region) -> bool:
    """Return whether `pin` made a region."""
    return isinstance(region.owner, torch.Tensor)


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
        """Return new memory. Callable from any thread; blocks without the GIL while memory is pinned.

        Raises:
            HostMemoryError: There is no memory either.
        """
        if not self.was_refused:
            try:
                return pin(nbytes, self.device)
            except RuntimeError as error:
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


def give_back(regions: list[Region]) -> None:
    """Release regions, and return the pinned ones to the system, on a thread of their own; the list is empty then.

    What else is free in torch's allocator is returned too. Memory that is still in use half a second later stays there.

    Args:
        regions: No copy that was submitted reads them or writes to them.
    """
    pinned = [region for region in regions if is_pinned(region)]
    regions.clear()
    if pinned:
        # An operation, since the interpreter's exit waits for its thread: one that frees a tensor then would abort.
        with suppress(StorageError):  # no more threads: torch keeps the memory
            Operation(partial(_return_to_system, pinned), name="release").start()


def _return_to_system(regions: list[Region], operation: Operation[None]) -> None:
    in_use = []
    while regions and not operation.cancelled:
        in_use.append(weakref.ref(regions.pop().owner))
        empty_host_cache()  # it holds the GIL for some milliseconds for each 64 MiB
    for _ in range(_NUM_POLLS):
        in_use = [owner for owner in in_use if owner() is not None]
        if not in_use or operation.cancelled:
            break
        time.sleep(_POLL_SECONDS)  # a thread that is ending refers to them
    empty_host_cache()


@cache
def node_of(device: torch.device) -> int | None:
    """Return the node of the host that a device is on, None if torch or the system does not report it."""
    try:
        found: Any = torch.get_device_module(device).get_device_properties(device)
        address = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return None
    return numa.node_of(address)
