"""A stand-in for kvikio where there is no GPU: "device memory" is what a fake device gives out, and reads are plain.

What kvikio 26.10 does was looked at: it takes what has `__cuda_array_interface__`, raises `RuntimeError`, opens
/proc/self/fd, and says whether GPUDirect Storage is there by `cufile_driver.get`.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from stio.testing import FakeDevice

__all__ = ["Kvikio"]


class Kvikio:
    """What the module does, and what a test asks of it beside that.

    Args:
        device: Whose memory is read into; what it still has to copy must not be written over.
        is_there: Whether GPUDirect Storage is set up.
        refuse_open: Number of the file, from 1, that cannot be opened.
        fail_read: Number of the read, from 1, from which on reads fail.
        most_bytes: What one read brings at most.
        does: "right", "nothing" (reads say that they read), or "wrong" (one bit of the last byte).
        put: Brings bytes to a buffer of a real device's; an address of the host's by default.
        require_current: Called before each use: the device must be the thread's current one.
    """

    def __init__(
        self,
        device: FakeDevice | None = None,
        *,
        is_there: bool = True,
        refuse_open: int = 0,
        fail_read: int = 0,
        most_bytes: int = 1 << 40,
        does: str = "right",
        put: Callable[[Any, bytes], None] | None = None,
        require_current: Callable[[], None] = lambda: None,
    ) -> None:
        self.device, self.is_there = device, is_there
        self.refuse_open, self.fail_read, self.most_bytes, self.does = refuse_open, fail_read, most_bytes, does
        self.put, self.require_current = put, require_current
        self.mode: object = "auto"
        self.num_opened = self.num_open = self.num_reads = self.read_bytes = 0
        self.overwritten = False
        """Whether something was read to where a copy was still to come from."""
        self.lock = threading.Lock()

    def install(self, patch: pytest.MonkeyPatch) -> Kvikio:
        """Be what `import kvikio` finds."""
        kvikio, driver, defaults = (ModuleType(f"kvikio{part}") for part in ("", ".cufile_driver", ".defaults"))
        kvikio.CuFile = lambda path, flags: File(self, path, flags)  # type: ignore[attr-defined]
        driver.get = lambda name: {"is_gds_available": self.is_there}[name]  # type: ignore[attr-defined]
        kvikio.CompatMode = SimpleNamespace(OFF="strict")  # type: ignore[attr-defined]
        defaults.set = self._set  # type: ignore[attr-defined]
        for module in (kvikio, driver, defaults):
            patch.setitem(sys.modules, module.__name__, module)
        return self

    @contextmanager
    def _set(self, name: str, value: object) -> Iterator[None]:
        assert (name, self.mode) == ("compat_mode", "auto")
        self.mode = value
        yield
        self.mode = "auto"


class File:
    """kvikio's `CuFile`."""

    def __init__(self, kvikio: Kvikio, path: str, flags: str) -> None:
        assert (flags, kvikio.mode) == ("r", "strict")  # else it would read through the host without a word
        kvikio.require_current()
        with kvikio.lock:
            kvikio.num_opened += 1
            if kvikio.num_opened == kvikio.refuse_open:
                raise RuntimeError("cuFile error: no such driver")
            kvikio.num_open += 1
        self._kvikio, self._fd = kvikio, os.open(path, os.O_RDONLY)

    def raw_read(self, buf: Any, size: int, file_offset: int, dev_offset: int) -> int:
        """Read into device memory; blocks."""
        self._kvikio.require_current()
        kvikio, interface = self._kvikio, buf.__cuda_array_interface__
        address, read_only = interface["data"]
        assert not read_only
        assert (interface["typestr"], interface["shape"], dev_offset) == ("|u1", (size,), 0)
        with kvikio.lock:
            kvikio.num_reads += 1
            if 0 < kvikio.fail_read <= kvikio.num_reads:
                raise RuntimeError("cuFile error: I/O error")
        if kvikio.device is not None and self._is_wanted(kvikio.device, address, size):
            kvikio.overwritten = True
        data = os.pread(self._fd, min(size, kvikio.most_bytes), file_offset)
        if kvikio.does == "wrong" and data:
            data = data[:-1] + bytes([data[-1] ^ 1])
        if kvikio.does != "nothing":
            if kvikio.put is not None:
                kvikio.put(buf, data)
            else:
                ctypes.memmove(address, data, len(data))
        with kvikio.lock:
            kvikio.read_bytes += len(data)
        return len(data)

    def close(self) -> None:
        """Close it."""
        os.close(self._fd)
        with self._kvikio.lock:
            self._kvikio.num_open -= 1

    @staticmethod
    def _is_wanted(device: FakeDevice, address: int, size: int) -> bool:
        regions = [region for work in list(device._queue) for _, region in list(work.pairs)]
        return any(region.address < address + size and address < region.address + region.nbytes for region in regions)
