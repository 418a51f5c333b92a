"""The way in that the host's memory has no part in: disk to device, by GPUDirect Storage, for who asks for it.

It reads into slots that lie on the device, as a load that stages reads into slots on the host: whole aligned blocks,
which the device then copies to where tensors lie, at the speed of its own memory. What the disk writes is in no
queue of the device's; the event behind a slot's copies says when it may be written again. Before the first tensor a
file is read both ways and compared; where they differ, or where GPUDirect Storage gives up later, all goes on staged.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from time import sleep

import torch

from stio.device.base import Accelerator, LoadedGroup
from stio.device.cuda import TorchAccelerator, bytes_of
from stio.errors import DeviceMemoryError, StorageError
from stio.loading.plan import Block, Group
from stio.loading.read_paths import StagedPath, Staging
from stio.runtime import memory
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import Region
from stio.storage.gds import GdsFile
from stio.storage.local import LocalFile

__all__ = ["DirectRing", "GdsPath"]

logger = logging.getLogger("stio")

_PROBE_BYTES = 1 << 20
_NO_ROOM = (DeviceMemoryError, MemoryError)


class DirectRing:
    """Slots on one device of a load, the files that are read into them, and whether that serves.

    Args:
        accelerator: The device.
        slots: Makes the slots, of memory that it gets by `make=`.
    """

    def __init__(self, accelerator: Accelerator, slots: Callable[..., Staging]) -> None:
        self._accelerator = accelerator
        self._made: list[weakref.ref[torch.Tensor]] = []
        self.stage = slots(make=self._make)
        """The slots."""
        self.serves = True
        """Whether it has not failed yet."""
        self._failing = threading.Lock()
        self._files = ExitStack()

    def open(self, file: LocalFile) -> GdsFile | None:
        """Open a file and try it out; None, with a warning, where it does not serve.

        Raises:
            ImportError: There is no kvikio.
            TruncatedError: The file is shorter than it was.
            DeviceError: The device does not serve.
        """
        accelerator = self._accelerator
        try:
            # Any other kind of accelerator stands for one of torch's (tests): it has no current device.
            direct = GdsFile(file, accelerator.as_current if isinstance(accelerator, TorchAccelerator) else nullcontext)
            try:
                _require_same(file, direct, accelerator)
            except BaseException:
                direct.close()
                raise
        except (StorageError, DeviceMemoryError) as error:
            self.fail(str(error))
            return None
        self._files.callback(direct.close)
        return direct

    def fail(self, reason: str) -> None:
        """Use it no more; the first to say so warns."""
        with self._failing:
            is_first, self.serves = self.serves, False
        if is_first:
            # Its text alone: whoever keeps the record must not keep an error's frames, and by them the device's memory.
            logger.warning("GPUDirect Storage does not serve, files are read through the host: %s", reason)

    def make_room(self, stopped: Callable[[], bool]) -> None:
        """Let go of the slots, which tensors want the room of; wait until it is free, or until `stopped()`.

        Raises:
            DeviceError: A copy failed.
        """
        self.stage.retire(stopped)
        # A thread that is done with a slot may have it in a frame for a moment more.
        while any(slot() is not None for slot in self._made) and not stopped():
            sleep(0.001)

    def close(self) -> None:
        """Wait for the copies under way, and close the files. Idempotent."""
        with self._files:
            self.stage.close()

    def _make(self, nbytes: int) -> Region:
        slot = self._accelerator.empty(nbytes)
        # The allocator gives out what the copy queue is about to be done with; the disk does not stand in that queue.
        self._accelerator.copy([]).synchronize()
        self._made.append(weakref.ref(slot))
        return _region(slot, self._accelerator)


class GdsPath:
    """File to device memory, with another way to go on by.

    Args:
        ring: The device's, shared by all files of the load.
        direct: The way through its slots.
        staged: The way through the host, of the same file, to the same memory.
    """

    label = "read"

    def __init__(self, ring: DirectRing, direct: StagedPath, staged: StagedPath) -> None:
        self._ring = ring
        self._direct = direct
        self._staged = staged

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> float:
        """Read a block into a slot; return the seconds of waiting for one."""
        ring = self._ring
        if ring.serves:
            # What is scattered would be many short reads. Tensors may want the room that slots take.
            way, failures = (self._staged, _NO_ROOM) if block.scatter else (self._direct, (StorageError, *_NO_ROOM))
            try:
                return way.read(group, block, stopped)
            except failures as error:
                reason = str(error)
            ring.fail(reason)
        ring.make_room(stopped)
        return self._staged.read(group, block, stopped)

    def settle(self, block: Block, settled: Callable[[Block], None]) -> None:
        """Queue the copies of what was read, by either way."""
        self._direct.settle(block, settled)
        self._staged.settle(block, settled)

    def finish(self, group: Group) -> LoadedGroup:
        """Return the device's tensors; the consumer's stream will wait for their last copy."""
        return self._staged.finish(group)

    def close(self) -> None:
        """Wait for the copies under way; then nothing reads a slot or writes to the device any more."""
        with ExitStack() as closing:
            closing.callback(self._staged.close)
            closing.callback(self._ring.close)


def _require_same(plain: LocalFile, direct: GdsFile, accelerator: Accelerator) -> None:
    """Read a part of the file both ways.

    Raises:
        StorageError: What comes is not the same, or nothing does.
    """
    nbytes = min(_PROBE_BYTES, plain.identity.nbytes)
    offset = (plain.identity.nbytes - nbytes) // 2 // PAGE_BYTES * PAGE_BYTES
    expected, wrong = memory.allocate(nbytes), memory.allocate(nbytes)
    plain.read_into(offset, [expected])
    torch.bitwise_not(bytes_of(expected), out=bytes_of(wrong))  # so that a read that does nothing does not pass
    target = accelerator.empty(nbytes)
    accelerator.copy([(target, wrong)]).synchronize()
    direct.read_into(offset, [_region(target, accelerator)])
    with accelerator.on_queue():
        found = target.cpu()
    if not torch.equal(found, bytes_of(expected)):
        raise StorageError("GPUDirect Storage brings other bytes than a plain read", path=plain.path, offset=offset)


def _region(memory: torch.Tensor, accelerator: Accelerator) -> Region:
    return Region(memory.data_ptr(), memory.nbytes, memory, str(accelerator.device))
