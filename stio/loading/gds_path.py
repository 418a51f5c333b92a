"""The GDS read path: from the disk to the device by GPUDirect Storage, without host memory, for `memory="gds"`.

It reads whole aligned pieces into slots on the device, and the device copies them to the tensors at the speed of its
memory. The writes of the disk are in no stream of the device, so a slot is filled again only after the event behind
its copies. Before the first tensor a part of each file is read by both paths and compared. If the bytes differ, or
GPUDirect Storage fails later, the load continues through the host. The plain executor carries it out.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext

import torch

from stio import native
from stio.device.base import Accelerator, LoadedGroup
from stio.device.cuda import TorchAccelerator, bytes_of
from stio.device.group_memory import bytes_of_storage
from stio.errors import DeviceMemoryError, StioError, StorageError
from stio.loading.plan import Block, Group
from stio.loading.read_paths import DevicePath, filled_bytes, pieces, read_block
from stio.runtime import memory, stats
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.locks import Condition, new_lock
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled
from stio.storage.gds import GdsFile
from stio.storage.local import LocalFile

logger = logging.getLogger("stio")

_PROBE_BYTES = 1 << 20
_POLL_SECONDS = 0.005
_NO_MEMORY: tuple[type[Exception], ...] = (DeviceMemoryError, MemoryError)
_NO_MEMORY_OR_READ: tuple[type[Exception], ...] = (StorageError, *_NO_MEMORY)


class GdsDevice:
    """GPUDirect Storage to one device of a load: its open files, slots on the device, and whether it is usable.

    Args:
        accelerator: The device.
        slot_bytes: Size of a slot; each worker has one.
    """

    def __init__(self, accelerator: Accelerator, slot_bytes: int) -> None:
        self.accelerator = accelerator
        """The device."""
        self.is_usable = True
        """False after the first failure."""
        self.held_bytes = 0
        """Size of all slots."""
        self._slot_bytes = slot_bytes
        self._changed = Condition()
        self._free: list[torch.Tensor] = []
        self._in_use: list[torch.Tensor] = []
        self._disabling = new_lock()
        self._files = ExitStack()
        stats.add_holder(self)

    def open(self, file: LocalFile) -> GdsFile | None:
        """Open a file and test a read; None, with a warning, if GPUDirect Storage is not usable.

        Raises:
            ImportError: kvikio is not installed.
            TruncatedError: The file is shorter than when it was opened.
            DeviceError: The device is not usable.
        """
        accelerator = self.accelerator
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

    def take(self) -> Region:
        """Return a slot that nothing reads or writes.

        Raises:
            DeviceMemoryError: The device is full.
        """
        with self._changed:
            slot = self._free.pop() if self._free else None
            if slot is not None:
                self._in_use.append(slot)
        if slot is None:
            (storage,) = self.accelerator.allocate([self._slot_bytes])
            # The allocator returns memory that earlier work on the device may still use. The disk does not wait for
            # that, so the host does.
            self.accelerator.copy([]).synchronize()
            slot = bytes_of_storage(storage, 0, self._slot_bytes)
            with self._changed:
                self._in_use.append(slot)
                self.held_bytes += self._slot_bytes
        return _region(slot, self.accelerator)

    def give(self, slot: Region) -> None:
        """Give a slot back that no copy reads."""
        with self._changed:
            mine = next(k for k, one in enumerate(self._in_use) if one is slot.owner)
            self._free.append(self._in_use.pop(mine))
            if not self.is_usable:
                self._drop_free()
            self._changed.notify_all()

    def free_slots(self, stopped: Callable[[], bool]) -> None:
        """Free the slots, since tensors need their memory; wait until no worker uses one, or until `stopped()`."""
        with self._changed:
            self._drop_free()
            while self._in_use and not stopped():
                self._changed.wait(_POLL_SECONDS)  # `stopped` does not notify

    def close(self) -> None:
        """Free the slots, and close the files. Nothing is under way any more. Idempotent."""
        with self._files, self._changed:
            self._free += self._in_use
            self._in_use = []
            self._drop_free()

    def _drop_free(self) -> None:
        # Not by dropping a reference: the frame of a thread that has given back a slot may have the last one.
        for slot in self._free:
            slot.set_()  # type: ignore[call-overload]
        self.held_bytes -= self._slot_bytes * len(self._free)
        self._free = []


class GdsPath:
    """Reads a file into slots on the device, or by the staged path after a failure.

    Args:
        device: GPUDirect Storage to the device, shared by all files of the load.
        direct: The file, opened for GPUDirect Storage.
        staged: The read path of the same file through the host; it has the memory of the groups.
    """

    label = "read"
    is_native = False
    image = None

    def __init__(self, device: GdsDevice, direct: GdsFile, staged: DevicePath) -> None:
        self._device = device
        self._direct = direct
        self._staged = staged
        self._stopped: Callable[[], bool] = lambda: False

    @property
    def file(self) -> LocalFile:
        """See `stio.loading.read_paths.ReadPath`."""
        return self._staged.file

    def begin(self, groups: Sequence[Group]) -> None:
        """Allocate the tensors of groups; the slots give way if the device is full."""
        try:
            self._staged.begin(groups)
        except _NO_MEMORY as error:
            self._give_way(error)
            self._staged.begin(groups)

    def add_ranges(self, group: Group, ranges: native.Ranges) -> None:
        """Is not called."""

    def error(self, failure: native.Failure) -> StioError:
        """Return the error of a read."""
        return self._staged.error(failure)

    def read(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        """Read a block into slots and copy it from there, or read it through the host."""
        self._stopped = stopped  # of the load, the same at each call
        # A scattered block would be many short reads.
        if self._device.is_usable and not block.scatter:
            try:
                self._read_directly(group, block, stopped)
                return
            except _NO_MEMORY_OR_READ as error:
                reason = str(error)
            self._device.disable(reason)
        if not self._device.is_usable:
            self._device.free_slots(stopped)
        self._staged.read(group, block, stopped)

    def _read_directly(self, group: Group, block: Block, stopped: Callable[[], bool]) -> None:
        slot = self._device.take()
        try:
            for piece in pieces(block, slot.nbytes):
                if stopped():
                    raise Cancelled
                read_block(self._direct, piece, slot, piece.at)
                self._staged.copy(group, piece.at, slot.sub(0, filled_bytes(piece)))
        finally:
            self._device.give(slot)

    def make_tensors(self, group: Group) -> LoadedGroup:
        """Return tensors on the device; the slots give way if casts need their memory."""
        try:
            return self._staged.make_tensors(group)
        except _NO_MEMORY as error:
            self._give_way(error)
        return self._staged.make_tensors(group)

    def _give_way(self, error: Exception) -> None:
        self._device.disable(str(error))
        self._device.free_slots(self._stopped)

    def budget_bytes(self, group: Group) -> int:
        """Return what the staged path uses."""
        return self._staged.budget_bytes(group)

    def held_bytes(self, group: Group) -> int:
        """Return 0: the tensors are on the device."""
        return 0

    def close(self) -> None:
        """Release memory and files."""
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
    (storage,) = accelerator.allocate([nbytes])
    target = bytes_of_storage(storage, 0, nbytes)
    accelerator.copy([(target, wrong)]).synchronize()
    direct.read_into(offset, [_region(target, accelerator)])
    with accelerator.on_stream():
        found = target.cpu()
    if not torch.equal(found, bytes_of(expected)):
        raise StorageError("GPUDirect Storage reads other bytes than a plain read", path=plain.path, offset=offset)


def _region(memory: torch.Tensor, accelerator: Accelerator) -> Region:
    return Region(memory.data_ptr(), memory.nbytes, memory, str(accelerator.device))
