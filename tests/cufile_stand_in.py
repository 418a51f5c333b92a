"""A stand-in for NVIDIA's cuFile (`tests/native/cufile.h`): its five functions, as a library that `stio` loads."""

from __future__ import annotations

import ctypes
import os
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import simdevice

from stio.loading import gds_path

RIGHT, NOTHING, WRONG = range(3)
"""What reads do."""

_INT64, _INT32 = ctypes.c_int64, ctypes.c_int32


class CuFile(ctypes.Structure):
    """What the stand-in refuses or does wrongly, and what it counts; `cufile_state` in cufile.h explains the fields."""

    _fields_ = (
        *((name, _INT64) for name in ("num_open", "num_opened", "num_reads", "read_bytes", "max_bytes")),
        *((name, _INT32) for name in ("open_code", "refuse_file", "fail_read", "fail_code", "does", "has_driver")),
        *((name, _INT32) for name in ("hold_read", "is_held", "device", "is_misused")),
        ("write", ctypes.c_void_p),
        ("current", ctypes.c_void_p),
    )

    def reset(self, **fields: Any) -> CuFile:
        """Do everything right, count from 0, and then as the fields say."""
        open_files = self.num_open
        ctypes.memset(ctypes.byref(self), 0, ctypes.sizeof(self))
        self.num_open, self.has_driver, self.device, self.fail_code = open_files, 1, -1, -5044
        self.write, self.current = _functions_of_device()
        for name, value in fields.items():
            setattr(self, name, value)
        return self


@cache
def library() -> Path:
    """Compile the stand-in into `build/` of the checkout, once a process."""
    here = Path(__file__).parent
    folder = here.parent / "build" / "cufile"
    folder.mkdir(parents=True, exist_ok=True)
    made, new = folder / "libcufile.so.0", folder / f"new.{os.getpid()}"
    flags = ("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-shared", "-fPIC")
    subprocess.run(["cc", *flags, "-o", str(new), str(here / "native" / "fake_cufile.c")], check=True, timeout=100)
    return new.replace(made)  # another process may have loaded the old one


def _functions_of_device() -> tuple[int | None, int | None]:
    """Return how bytes come to the device at once, and which one is current: the simulated one's, or CUDA's driver's."""
    names = ("sim_write", "sim_current") if simdevice.installed() else ("cuMemcpyHtoD_v2", "cuCtxGetDevice")
    try:
        driver = simdevice.library() if simdevice.installed() else ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None, None
    write, current = (ctypes.cast(getattr(driver, name), ctypes.c_void_p).value for name in names)
    return write, current


def install(patch: pytest.MonkeyPatch, **fields: Any) -> CuFile:
    """Be the cuFile that stio finds, until the test's end; see `CuFile`."""
    path = library()
    patch.setattr(gds_path, "_cufile_paths", lambda: [str(path)])
    patch.setattr(gds_path, "_MODULES", path)
    return CuFile.in_dll(ctypes.CDLL(str(path)), "cufile").reset(**fields)
