"""Files that NVIDIA's cuFile reads into the memory of a device: GPUDirect Storage.

The engine makes the reads (`stio/native/cufile.c`). This module finds the library, and opens files for it. A file is
opened once more, by the link of its descriptor in /proc: it is the file that was checked, and cuFile accepts a
descriptor once only.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from stio import native
from stio.errors import StorageError, install_command
from stio.storage.local import LocalFile

_LIBRARY = "libcufile.so.0"
_CUDA_LIBRARIES = "/usr/local/cuda/lib64"
_MODULES = Path("/proc/modules")


def _paths() -> Iterator[str]:
    """Return where the library may be: loaded by torch, known to the linker, in NVIDIA's wheels, in CUDA's toolkit."""
    yield _LIBRARY
    spec = find_spec("nvidia")
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from map(str, sorted(Path(folder).glob(f"*/lib/{_LIBRARY}")))
    yield f"{_CUDA_LIBRARIES}/{_LIBRARY}"


_load = cache(native.load_cufile)


def require_cufile() -> int:
    """Load cuFile; return the table of its functions.

    Raises:
        ImportError: It is not installed, or cannot be loaded here.
    """
    reasons = []
    for path in _paths():
        try:
            return _load(path)
        except OSError as error:
            reasons.append(str(error))
    raise ImportError(
        f"memory='gds' reads with NVIDIA's cuFile ({_LIBRARY}): {install_command('gds')}, or, with a torch for "
        f"CUDA 12, pip install nvidia-cufile-cu12; {reasons[0]}"
    )


class GdsFile(native.CuFile):
    """One open file that cuFile reads. The device is the current one of the thread that makes it.

    Args:
        file: The file; the caller owns it.

    Raises:
        ImportError: cuFile is not installed.
        StorageError: cuFile does not work on this machine, or not for this file.
    """

    def __init__(self, file: LocalFile) -> None:
        table, self._file = require_cufile(), file
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
