"""The GDS read path: from the disk to the device by GPUDirect Storage, without host memory, for `memory="gds"`.

It reads whole aligned blocks into slots on the device, and the device copies them to the tensors at the speed of its
memory: a staged path with slots on the device. The writes of the disk are in no stream of the device, so a slot is
filled again only after the event behind its copies. Before the first tensor a part of each file is read by both paths
and compared. If the bytes differ, or GPUDirect Storage fails later, the load continues through the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import torch

from stio.device.base import Accelerator, LoadedGroup
from stio.device.copy_queue import CopyQueue
from stio.device.cuda import TorchAccelerator, bytes_of
from stio.errors import DeviceMemoryError, StorageError
from stio.loading.plan import Block, Group
from stio.loading.scheduler import ReadPath
from stio.runtime import memory
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.locks import new_lock
from stio.runtime.memory import Region
from stio.storage.gds import GdsFile
from stio.storage.local import LocalFile

logger = logging.getLogger("stio")

_PROBE_BYTES = 1 << 20
_NO_MEMORY: tuple[type[Exception], ...] = (DeviceMemoryError, MemoryError)
_NO_MEMORY_OR_READ: tuple[type[Exception], ...] = (StorageError, *_NO_MEMORY)


class GdsDevice:
    """GPUDirect Storage to one device of a load: its open files, slots on the device, and whether it is usable.

    Args:
        accelerator: The device.
        new_queue: Returns a copy queue whose slots are allocated by the function given as `allocate`.
    """

    def __init__(self, accelerator: Accelerator, new_queue: Callable[..., CopyQueue[Block]]) -> None:
        self._accelerator = accelerator
        self._slots: list[torch.Tensor] = []
        self._freeing = new_lock()
        self.copy_queue = new_queue(allocate=self._allocate)
        """Copies from slots on the device."""
        self.is_usable = True
        """False after the first failure."""
        self._disabling = new_lock()
        self._files = ExitStack()

    def open(self, file: LocalFile) -> GdsFile | None:
        """Open a file and test a read; None, with a warning, if GPUDirect Storage is not usable.

        Raises:
            ImportError: kvikio is not installed.
            TruncatedError: The file is shorter than when it was opened.
            DeviceError: The device is not usable.
        """
        accelerator = self._accelerator
        try:
            # Any other kind of accelerator is a fake (tests), which has no current device.
            direct = GdsFile(file, accelerator.as_current if isinstance(accelerator, TorchAccelerator) else nullcontext)
            try:
                _require_same(file, direct, accelerator)
            except BaseException:
                direct.close()
                raise
        except (StorageError, DeviceMemoryError) as error:
            self.disable(str(error))
            return None
        self._files.callback(direct.close)
        return direct

    def disable(self, reason: str) -> None:
        """Stop the use of GPUDirect Storage; only the first call warns."""
        with self._disabling:
            is_first, self.is_usable = self.is_usable, False
        if is_first:
            # The text alone: a log record that is stored must not hold an error's frames, and device memory by them.
            logger.warning("GPUDirect Storage is not usable, files are read through the host: %s", reason)

    def free_slots(self, stopped: Callable[[], bool]) -> None:
        """Free the slots, since tensors need their memory; wait until it is free, until `stopped()`, or an error.

        Raises:
            DeviceError: A copy failed.
        """
        if not self.copy_queue.retire(stopped):
            return
        # Not by dropping a reference: the frame of a thread that has released a slot may have the last one, and torch
        # frees the memory without the GIL, some time after a weak reference has ended.
        with self._freeing:
            while self._slots:
                self._slots.pop().set_()  # type: ignore[call-overload]

    def close(self) -> None:
        """Wait for the copies under way, free the slots, and close the files. Idempotent."""
        with self._files:
            try:
                self.copy_queue.close()
            finally:
                self._slots.clear()

    def _allocate(self, nbytes: int) -> Region:
        (slot,) = self._accelerator.allocate([nbytes])
        # The allocator returns memory that earlier work on the copy stream may still use. The disk does not wait for
        # that stream, so the host does.
        self._accelerator.copy([]).synchronize()
        self._slots.append(slot)
        return _region(slot, self._accelerator)


class GdsPath:
    """Reads a file into slots on the device, or by the staged path after a failure.

    Args:
        device: GPUDirect Storage to the device, shared by all files of the load.
        direct: The read path through slots on the device.
        staged: The read path of the same file through the host, to the same memory.
    """

    label = "read"

    def __init__(self, device: GdsDevice, direct: ReadPath, staged: ReadPath) -> None:
        self._device = device
        self._direct = direct
        self._staged = staged
        self._stopped: Callable[[], bool] = lambda: False

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> float | None:
        """Read a block into a slot and queue its copies; return the seconds of the wait for a slot."""
        self._stopped = stopped  # of the load, the same at each call
        device = self._device
        if device.is_usable:
            # A scattered block would be many short reads. In both cases memory for slots or tensors may be missing.
            path = self._staged if block.scatter else self._direct
            failures = _NO_MEMORY if block.scatter else _NO_MEMORY_OR_READ
            try:
                return path.read(group, block, stopped)
            except failures as error:
                reason = str(error)
            device.disable(reason)
        device.free_slots(stopped)
        return self._staged.read(group, block, stopped)

    def complete(self, block: Block, arrived: Callable[[Block], None]) -> None:
        """Submit all copies that are in the queues of both read paths, and report their blocks."""
        for path in (self._direct, self._staged):
            path.complete(block, arrived)

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Return tensors on the device; the stream that uses them must wait for the events behind their copies."""
        try:
            return self._staged.make_tensors(group)
        except _NO_MEMORY as error:
            self._device.disable(str(error))
        self._device.free_slots(self._stopped)
        return self._staged.make_tensors(group)

    def budget_bytes(self, group: Group) -> int:
        """Return what the staged path uses."""
        return self._staged.budget_bytes(group)

    def held_bytes(self, group: Group) -> int:
        """Return 0: the tensors are on the device."""
        return 0

    def close(self) -> None:
        """Wait for the copies under way; after that no copy reads a slot or writes to the device."""
        with ExitStack() as closing:
            closing.callback(self._staged.close)
            closing.callback(self._device.close)


def _require_same(plain: LocalFile, direct: GdsFile, accelerator: Accelerator) -> None:
    """Read a part of the file by both read paths, and compare.

    Raises:
        StorageError: The bytes differ, or a read fails.
    """
    nbytes = min(_PROBE_BYTES, plain.identity.nbytes)
    offset = (plain.identity.nbytes - nbytes) // 2 // PAGE_BYTES * PAGE_BYTES
    expected, wrong = memory.allocate(nbytes), memory.allocate(nbytes)
    plain.read_into(offset, [expected])
    torch.bitwise_not(bytes_of(expected), out=bytes_of(wrong))  # so that a read that does nothing does not pass
    (target,) = accelerator.allocate([nbytes])
    accelerator.copy([(target, wrong)]).synchronize()
    direct.read_into(offset, [_region(target, accelerator)])
    with accelerator.on_queue():
        found = target.cpu()
    if not torch.equal(found, bytes_of(expected)):
        raise StorageError("GPUDirect Storage reads other bytes than a plain read", path=plain.path, offset=offset)


def _region(memory: torch.Tensor, accelerator: Accelerator) -> Region:
    return Region(memory.data_ptr(), memory.nbytes, memory, str(accelerator.device))
