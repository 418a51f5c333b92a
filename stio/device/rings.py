"""The engine's rings: one of pinned memory for each device, out of which all loads to the device copy."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch

from stio import native
from stio.device.cuda import TorchAccelerator
from stio.device.drivers import drivers, node_of
from stio.errors import DeviceError
from stio.runtime import stats
from stio.runtime.locks import new_lock
from stio.runtime.process import after_fork_in_child

logger = logging.getLogger("stio")


class DeviceRing:
    """The ring of one device; held by each load that uses it.

    Args:
        device: The device.
        driver: Its driver.
        stream: Its copy stream.
        handle: The stream as the driver calls it.
    """

    def __init__(self, device: torch.device, driver: native.Driver, stream: Any, handle: int) -> None:
        self.device = device
        """The device."""
        self.stream = stream
        """The copy stream, which must exist as long as the ring."""
        self.ring = native.Ring(driver, handle, node_of(device))
        """The ring."""
        self._has_warned = False
        stats.add_holder(self)

    @property
    def held_bytes(self) -> int:
        """Size of its memory."""
        return self.ring.held_bytes

    def warn_if_refused(self) -> None:
        """Warn, once, if the driver has refused to pin memory."""
        if not self._has_warned and self.ring.was_refused:
            self._has_warned = True
            logger.warning("pinning host memory failed, copies to %s are slower", self.device)

    def error(self, failure: native.Failure) -> DeviceError:
        """Return the error of a copy that the driver refused or that failed."""
        return DeviceError(f"copying to {self.device} failed: {failure.text or f'code {failure.code} of its driver'}")

    def __del__(self) -> None:
        ring = getattr(self, "ring", None)
        if ring is not None:
            ring.release()


_making = new_lock()
_rings: dict[torch.device, DeviceRing] = {}


def ring_of(accelerator: object) -> DeviceRing | None:
    """Return the ring of a load's device; None if the engine cannot copy to it."""
    if not isinstance(accelerator, TorchAccelerator) or not native.available():
        return None
    device, stream = accelerator.device, accelerator.copy_stream
    open_driver = drivers.get(device.type)
    if open_driver is None:
        return None
    with _making:
        known = _rings.get(device)
        if known is not None and known.stream == stream and not known.ring.has_failed:
            return known
        driver, handle = open_driver(device, stream)
        if not isinstance(driver, str):
            _rings[device] = DeviceRing(device, driver, stream, handle)
            return _rings[device]
    _log_missing(driver)  # not under the lock: a handler may load
    return None


@cache
def _log_missing(why: str) -> None:
    logger.info("loads to devices use the plain executor, which is slower: %s", why)


@after_fork_in_child
def _forget_parent() -> None:
    """A forked child cannot use the parent's device."""
    global _making
    _making = new_lock()
    _rings.clear()
