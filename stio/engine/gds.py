"""The way in that the host's memory has no part in: disk to device, by GPUDirect Storage, for who asks for it.

It reads into slots that lie on the device, as a load that stages reads into slots on the host: whole aligned blocks,
which the device then copies to where tensors lie, at the speed of its own memory. What the disk writes is in no
queue of the device's; the event behind a slot's copies says when it may be written again. Before the first tensor a
file is read both ways and compared; where they differ, or where GPUDirect Storage gives up later, it is staged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from stio import memory
from stio.device.base import Accelerator, Landed
from stio.device.cuda import bytes_of
from stio.engine.ways import StageRoute
from stio.errors import DeviceMemoryError, StioError, StorageError
from stio.memory import PAGE_BYTES, Region
from stio.plan.read import Block, Group
from stio.storage.gds import GdsFile
from stio.storage.local import LocalFile

__all__ = ["GdsRoute", "device_memory", "opened_directly"]

logger = logging.getLogger("stio")

_PROBE_BYTES = 1 << 20


class GdsRoute:
    """File to device memory, with another way to go on by.

    Args:
        file: The file; closed with this.
        direct: The way from it, through slots on the device.
        staged: The way through the host, of the same file, to the same memory.
    """

    label = "read"

    def __init__(self, file: GdsFile, direct: StageRoute, staged: StageRoute) -> None:
        self._file = file
        self._direct = direct
        self._staged = staged
        self._has_failed = False

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> float:
        """Read a block into a slot; return the seconds of waiting for one."""
        if not (self._has_failed or block.scatter):  # what is scattered would be many short reads
            try:
                return self._direct.read(group, block, stopped)
            except (StorageError, DeviceMemoryError) as error:  # the latter: no room for slots beside the tensors
                if not self._has_failed:
                    _warn(self._file.path, error)
                self._has_failed = True
        return self._staged.read(group, block, stopped)

    def settle(self, block: Block, settled: Callable[[Block], None]) -> None:
        """Queue the copies of what was read, by either way."""
        self._direct.settle(block, settled)
        self._staged.settle(block, settled)

    def finish(self, group: Group) -> Landed:
        """Return the device's tensors; the consumer's stream will wait for their last copy."""
        return self._staged.finish(group)

    def close(self) -> None:
        """Wait for the copies under way; then nothing reads a slot or writes to the device any more."""
        try:
            self._direct.close()
        finally:
            self._staged.close()
            self._file.close()


def device_memory(accelerator: Accelerator) -> Callable[[int], Region]:
    """Return what makes slots on the device."""

    def make(nbytes: int) -> Region:
        slot = accelerator.empty(nbytes)
        # The allocator gives out what the copy queue is about to be done with; the disk does not stand in that queue.
        accelerator.copy([]).synchronize()
        return Region(slot.data_ptr(), nbytes, slot)

    return make


def opened_directly(file: LocalFile, accelerator: Accelerator) -> GdsFile | None:
    """Open a file for GPUDirect Storage and try it out; None, with a warning, where it does not serve.

    Raises:
        TruncatedError: The file is shorter than it was.
        DeviceError: The device does not serve.
    """
    try:
        direct = GdsFile(file)
        try:
            _require_same(file, direct, accelerator)
        except BaseException:
            direct.close()
            raise
    except StorageError as error:
        _warn(file.path, error)
        return None
    return direct


def _require_same(plain: LocalFile, direct: GdsFile, accelerator: Accelerator) -> None:
    """Read a part of the file both ways."""
    nbytes = min(_PROBE_BYTES, plain.identity.nbytes)
    offset = (plain.identity.nbytes - nbytes) // 2 // PAGE_BYTES * PAGE_BYTES
    expected, wrong = memory.allocate(nbytes), memory.allocate(nbytes)
    plain.read_into(offset, [expected])
    torch.bitwise_not(bytes_of(expected), out=bytes_of(wrong))  # so that a read that does nothing does not pass
    target = accelerator.empty(nbytes)
    accelerator.copy([(target, wrong)]).synchronize()
    direct.read_into(offset, [Region(target.data_ptr(), nbytes, target)])
    with accelerator.on_queue():
        found = target.cpu()
    if not torch.equal(found, bytes_of(expected)):
        raise StorageError("GPUDirect Storage brings other bytes than a plain read", path=plain.path, offset=offset)


def _warn(path: str, error: StioError) -> None:
    # Its text alone: whoever keeps the record must not keep the error's frames, and by them the device's memory.
    logger.warning("GPUDirect Storage does not serve %s, which is read through the host: %s", path, str(error))
