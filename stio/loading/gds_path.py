"""The GDS read path: from the disk to the tensors by GPUDirect Storage, without host memory, for `memory="gds"`.

The engine carries it out: cuFile reads into the memory of the tensors. It waits for no stream, so `begin` waits until
the device has done what is queued there. Short and scattered ranges go through the ring, which reads several at once.
If a read fails, the load continues through the ring.

A file is opened once more for it, by the link of its descriptor in /proc: it is the file that was checked, and cuFile
accepts a descriptor once only.
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from stio import native
from stio.device import Accelerator, DeviceRing, LoadedGroup, TorchAccelerator
from stio.errors import StorageError, install_command
from stio.loading.plan import Block, Group
from stio.loading.read_paths import Delivery, DevicePath, StagingSlots
from stio.storage import LocalFile

logger = logging.getLogger("stio")

_MIN_BYTES = 64 << 10  # of a range for cuFile; the ring reads shorter ones together


_CUFILE = "libcufile.so.0"
_CUDA_LIBRARIES = "/usr/local/cuda/lib64"
_MODULES = Path("/proc/modules")


def _cufile_paths() -> Iterator[str]:
    """Return where the library may be: loaded by torch, known to the linker, in NVIDIA's wheels, in CUDA's toolkit."""
    yield _CUFILE
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/{_CUFILE}")))
    yield f"{_CUDA_LIBRARIES}/{_CUFILE}"


_load_cufile = cache(native.load_cufile)


class GdsFile(native.CuFile):
    """One open file that cuFile reads. The device is the current one of the thread that makes it.

    Args:
        file: The file; the caller owns it.

    Raises:
        ImportError: cuFile is not installed.
        StorageError: cuFile does not work on this machine, or not for this file.
    """

    def __init__(self, file: LocalFile) -> None:
        table, self._file = self.require_library(), file
        if not _MODULES.exists():  # cuFile 1.20 reads that file without end if it cannot be opened
            raise self._refused(f"this system has no {_MODULES}, which cuFile needs")
        link, flags = f"/proc/self/fd/{file.fd}", os.O_RDONLY | os.O_CLOEXEC
        try:
            try:
                self._fd = os.open(link, flags | os.O_DIRECT)
            except OSError:  # the filesystem has no direct I/O; cuFile decides
                self._fd = os.open(link, flags)
            try:
                super().__init__(table, self._fd)
            except BaseException:
                os.close(self._fd)
                raise
        except OSError as error:
            raise self._refused(str(error)) from error

    @staticmethod
    def require_library() -> int:
        """Load cuFile; return the table of its functions.

        Raises:
            ImportError: It is not installed, or cannot be loaded here.
        """
        reasons = []
        for path in _cufile_paths():
            try:
                return _load_cufile(path)
            except OSError as error:
                reasons.append(str(error))
        raise ImportError(
            f"memory='gds' reads with NVIDIA's cuFile ({_CUFILE}): {install_command('gds')}, or, with a torch for "
            f"CUDA 12, pip install nvidia-cufile-cu12; {reasons[0]}"
        )

    @property
    def error(self) -> StorageError | None:
        """The first read that failed, if one did."""
        found = self.failure
        if found is None:
            return None
        whys = {native.TRUNCATED: "the file ends there", native.READING: os.strerror(found.code)}
        return self._refused(whys.get(found.kind, found.text), offset=found.offset, doing="reading")

    def close(self) -> None:
        """Close it. No read may be under way."""
        super().close()
        os.close(self._fd)

    def _refused(self, why: str, *, offset: int | None = None, doing: str = "opening") -> StorageError:
        text = f"{doing} by GPUDirect Storage failed: {why}"
        return StorageError(text, path=self._file.path, offset=offset, errno=errno.EIO)


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
        if DeviceRing.of(accelerator) is not None and torch.version.hip is None:
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
        self.memory = device  # its allocations are waited for, see `begin`

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
