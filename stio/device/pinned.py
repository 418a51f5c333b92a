"""Pinned memory of the host, for copies from and to a device: on the node of the device, released with its last use.

The engine maps it, several threads touch it, and the driver pins it (`stio/native/pinned.c`). The last reference to a
region releases it at once, on a thread of the engine. Nothing records which copies use the memory: whoever copies from
or to it waits for its copies, after an error too, before it drops the region.

Where the engine has no driver of the device, torch pins. Its sizes are powers of two, and it keeps what is released.
"""

from __future__ import annotations

import logging
from functools import partial

import torch

from stio import native
from stio.device.drivers import driver_of, node_of
from stio.runtime import memory
from stio.runtime.memory import Region
from stio.runtime.process import after_fork_in_child

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
    driver = driver_of(device)
    with torch.get_device_module(device).device(device):
        if driver is not None:
            region = memory.owned(*native.pin(driver, nbytes, node_of(device)))
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


@after_fork_in_child
def _keep_of_parent() -> None:
    """Never free memory in a forked child that torch has pinned for its parent."""
    _of_parent.extend(_of_torch.values())
