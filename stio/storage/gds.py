"""Files read straight into a device's memory: NVIDIA's GPUDirect Storage, by way of kvikio (an extra).

The same contract as any `Source`, with regions that are a device's. kvikio drops the GIL for the length of a read, and
opens a file by its path: it gets the one of the descriptor, so it is the file that was opened and no other.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from stio.errors import StorageError, TruncatedError
from stio.runtime.memory import Region
from stio.storage.base import Identity
from stio.storage.local import LocalFile

__all__ = ["GdsFile", "require_kvikio"]


def require_kvikio() -> Any:
    """Return the module.

    Raises:
        ImportError: It is not installed, or cannot be loaded here.
    """
    try:
        return import_module("kvikio")
    except (ImportError, OSError, RuntimeError) as error:  # it loads libraries of its own
        raise ImportError(
            f"memory='gds' reads by kvikio: pip install kvikio-cu13 (or kvikio-cu12, as torch's CUDA is); {error}"
        ) from error


_opening = threading.Lock()


class _DeviceBuffer:
    """A region as kvikio takes it."""

    def __init__(self, region: Region) -> None:
        self.__cuda_array_interface__ = {
            "data": (region.address, False),
            "shape": (region.nbytes,),
            "strides": None,
            "typestr": "|u1",
            "version": 3,
        }


class GdsFile:
    """One open file, read past the host's memory; a `Source` whose regions are the device's.

    Args:
        file: The file, which stays the caller's; it must outlive this.
        current: Makes the device the thread's current one: cuFile goes by that, not by the address.

    Raises:
        ImportError: There is no kvikio.
        StorageError: GPUDirect Storage is not set up on this machine, or not for this file.
    """

    def __init__(self, file: LocalFile, current: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self._file = file
        self._current = current
        self._handle: Any = None
        kvikio = require_kvikio()
        try:
            # Where it is not set up, kvikio and cuFile would read through the host too, and slower than a load that
            # stages. A handle keeps the mode that was when it was made.
            if import_module("kvikio.cufile_driver").get("is_gds_available"):
                strictly = import_module("kvikio.defaults").set
                with _opening, strictly("compat_mode", kvikio.CompatMode.OFF), current():
                    self._handle = kvikio.CuFile(f"/proc/self/fd/{file.fd}", "r")
        except (ImportError, AttributeError, RuntimeError, OSError, ValueError) as error:
            raise _refused("opening", file.path, error) from error
        if self._handle is None:
            raise StorageError("it is not set up on this machine", path=file.path, errno=errno.EOPNOTSUPP)

    @property
    def path(self) -> str:
        """Name for messages."""
        return self._file.path

    @property
    def identity(self) -> Identity:
        """The state of the file when it was opened."""
        return self._file.identity

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the device's regions, one after the other, with the bytes from `offset` on. Blocks, without the GIL.

        What was queued on the device for these regions must have happened before.
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
                    raise TruncatedError(
                        "the file ends before its tensors do; it was cut short",
                        path=self.path,
                        offset=offset + done,
                        expected=f"{left.nbytes:,} more bytes",
                        found="the end of the file",
                    )
                done += count
            offset += region.nbytes

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the file is not the one that was opened."""
        self._file.check_unchanged()

    def close(self) -> None:
        """Let go of kvikio's descriptors; the file itself is the caller's. Idempotent; no read may be under way."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.close()


def _refused(doing: str, path: str, error: Exception, **where: Any) -> StorageError:
    return StorageError(f"{doing} by GPUDirect Storage failed: {error}", path=path, errno=errno.EIO, **where)
