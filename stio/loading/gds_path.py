"""The GDS read path: from the disk to the tensors by GPUDirect Storage, without host memory, for `memory="gds"`.

The engine carries it out: cuFile reads into the memory of the tensors. It waits for no stream, so `begin` waits until
the device has done what is queued there. Short and scattered ranges go through the ring, which reads several at once.
If a read fails, the load continues through the ring.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext

import torch

from stio import native
from stio.device.base import Accelerator, LoadedGroup
from stio.device.cuda import TorchAccelerator, ring_of
from stio.errors import StorageError
from stio.loading.plan import Block, Group
from stio.loading.read_paths import Delivery, DevicePath, StagingSlots
from stio.storage.local import GdsFile, LocalFile

logger = logging.getLogger("stio")

_MIN_BYTES = 64 << 10  # of a range for cuFile; the ring reads shorter ones together


class GdsDevice:
    """GPUDirect Storage to one device of a load: its open files, and whether it is usable.

    Args:
        accelerator: The device.

    Raises:
        ImportError: cuFile is not installed.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.is_usable = True
        """False after the first failure."""
        self._is_compatible = False
        self._files = ExitStack()
        self._accelerator = accelerator
        if ring_of(accelerator) is not None and torch.version.hip is None:
            GdsFile.require_library()
        else:
            self.disable("it needs " + ("a GPU of NVIDIA" if native.available() else "the engine"))

    def open(self, file: LocalFile) -> GdsFile | None:
        """Open a file; None, with a warning, if GPUDirect Storage is not usable."""
        if not self.is_usable:
            return None
        accelerator = self._accelerator
        try:
            # Any other kind of accelerator is a fake (tests), which has no current device.
            with accelerator.as_current() if isinstance(accelerator, TorchAccelerator) else nullcontext():
                direct = GdsFile(file)
        except StorageError as error:
            self.disable(str(error))
            return None
        self._files.callback(direct.close)
        if not direct.has_driver and not self._is_compatible:
            self._is_compatible = True
            logger.warning("cuFile finds no driver nvidia-fs: in its compatibility mode memory='gds' is no faster")
        return direct

    def disable(self, reason: str) -> None:
        """Stop the use of GPUDirect Storage; only the first call warns."""
        is_first, self.is_usable = self.is_usable, False
        if is_first:
            # The text alone: a log record that is stored must not hold an error's frames, and device memory by them.
            logger.warning("GPUDirect Storage is not usable, files are read through the host: %s", reason)

    def close(self) -> None:
        """Close the files. Nothing is under way any more. Idempotent."""
        self._files.close()


class GdsPath(DevicePath):
    """Reads a file into the memory of a device by cuFile, and what is left after a failure through the ring.

    Args:
        device: GPUDirect Storage to the device, shared by all files of the load.
        direct: The file, opened for GPUDirect Storage.
        file: The file.
        slots: See `DevicePath`.
        delivery: See `DevicePath`.
    """

    def __init__(
        self, device: GdsDevice, direct: GdsFile, file: LocalFile, slots: StagingSlots, delivery: Delivery
    ) -> None:
        super().__init__(file, slots, delivery)
        self._device = device
        self._direct = direct

    @property
    def memory(self) -> object:
        """Of the device, but it is waited for (see `begin`)."""
        return self._device

    def begin(self, groups: Sequence[Group]) -> None:
        """Allocate the tensors of groups; wait until nothing that is queued uses their memory."""
        super().begin(groups)
        # The allocator returns memory that earlier work on the device may still use.
        self._accelerator.copy([]).synchronize()

    def cufile(self, block: Block, nbytes: int) -> native.CuFile | None:
        """Return the file for cuFile, None for ranges that go through the ring."""
        is_direct = self._device.is_usable and not block.scatter and nbytes >= _MIN_BYTES
        return self._direct if is_direct else None

    def make_tensors(self, group: Group) -> LoadedGroup:
        """See `DevicePath`; warn if a read has failed."""
        if self._device.is_usable and (error := self._direct.error) is not None:
            self._device.disable(str(error))
        return super().make_tensors(group)

    def close(self) -> None:
        """Release memory and files."""
        with ExitStack() as closing:
            closing.callback(super().close)
            closing.callback(self._device.close)
