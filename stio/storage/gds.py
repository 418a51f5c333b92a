"""Files read directly into the memory of a device: NVIDIA's GPUDirect Storage, through kvikio (an extra).

The contract is that of any `Source`; its regions are memory of the device. kvikio releases the GIL for the length of a
read. It opens a file by a path. stio passes the path of the descriptor in /proc, so kvikio opens the file that was
checked.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from stio.errors import StorageError, install_command
from stio.runtime.locks import new_lock
from stio.runtime.memory import Region
from stio.storage.checks import cut_short
from stio.storage.local import LocalFile


def require_kvikio() -> Any:
    """Return the module.

    Raises:
        ImportError: It is not installed, or cannot be loaded here.
    """
    try:
        return import_module("kvikio")
    except (ImportError, OSError, RuntimeError) as error:  # it loads other libraries
        raise ImportError(
            f"memory='gds' reads with kvikio: {install_command('gds')}, or, with a torch for CUDA 12, "
            f"pip install kvikio-cu12; {error}"
        ) from error


_opening = new_lock()


class _DeviceBuffer:
    """A region in the form that kvikio accepts."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "data": (region.address, False),
            "shape": (region.nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class GdsFile:
    """One open file, read without a copy in host memory; a `Source` whose regions are memory of the device.

    Args:
        file: The file; the caller owns it, and closes it after this one.
        current: Makes the device the current one of the thread: cuFile uses that, and not the address.

    Raises:
        ImportError: kvikio is not installed.
        StorageError: GPUDirect Storage is not set up on this machine, or not for this file.
    """

    def __init__(self, file: LocalFile, current: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._file = file
        self.path, self.identity = file.path, file.identity
        self._current = current
        self._handle: Any = None
        kvikio = require_kvikio()
        try:
            # Without it kvikio and cuFile would read through host memory too, and slower than a load with staging
            # memory. A handle keeps the mode that was set when it was made.
            if import_module("kvikio.cufile_driver").get("is_gds_available"):
                strictly = import_module("kvikio.defaults").set
                with _opening, strictly("compat_mode", kvikio.CompatMode.OFF), current():
                    self._handle = kvikio.CuFile(f"/proc/self/fd/{file.fd}", "r")
        except (ImportError, AttributeError, RuntimeError, OSError, ValueError) as error:
            raise _refused("opening", file.path, error) from error
        if self._handle is None:
            raise StorageError(
                "GPUDirect Storage is not set up on this machine", path=file.path, errno=errno.EOPNOTSUPP
            )

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the device's regions, one after the other, with the bytes from `offset` on. Blocks, without the GIL.

        Work on the device that was queued for these regions must have ended before.
        """
        for region in regions:
            done = 0
            while done < region.nbytes:
                left = region.sub(done, region.nbytes - done)
                try:
                    with self._current():
                        count = int(self._handle.raw_read(_DeviceBuffer(left), left.nbytes, offset + done, 0))
                except (RuntimeError, OSError, ValueError) as error:
                    raise _refused("reading", self.path, error, offset=offset + done) from error
                if count <= 0:
                    raise cut_short(self.path, offset + done, left.nbytes)
                done += count
            offset += region.nbytes

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the file is not the one that was opened."""
        self._file.check_unchanged()

    def close(self) -> None:
        """Close kvikio's descriptors; the caller closes the file itself. Idempotent; no read may be under way."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


def _refused(doing: str, path: str, error: Exception, **where: Any) -> StorageError:
    return StorageError(f"{doing} by GPUDirect Storage failed: {error}", path=path, errno=errno.EIO, **where)
