"""The shim between stio and libc (`shim.c`): built on first use, preloaded into a fresh process, armed in there."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkout import python_path

SOURCE = Path(__file__).with_name("shim.c")

WRITE, SYNC, RENAME, RESERVE, UNLINK, OPEN, MKDIR = (1 << k for k in range(7))
ALL = WRITE | SYNC | RENAME | RESERVE | UNLINK | OPEN | MKDIR
KINDS = {
    "write": WRITE,
    "sync": SYNC,
    "rename": RENAME,
    "reserve": RESERVE,
    "unlink": UNLINK,
    "open": OPEN,
    "mkdir": MKDIR,
}

FAIL, FAIL_AFTER, SHORT, KILL, KILL_AFTER = range(5)


def why_not() -> str | None:
    """Return why there can be no shim here, None if there can."""
    if sys.platform != "linux":
        return "the shim speaks Linux"
    return None if shutil.which("cc") else "there is no C compiler"


def build(directory: Path, source: Path = SOURCE) -> Path:
    """Compile the shim, or another library to preload."""
    target = (directory / source.name).with_suffix(".so")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-Wall", "-o", target, source, "-ldl"], check=True)
    return target


def run_module(
    module: str,
    *arguments: object,
    timeout: float,
    preload: Path | None = None,
    python: str | Path = sys.executable,
) -> str:
    """Run a module of the tests in a process of its own; return what it printed, or fail with it."""
    environment = {**os.environ, "PYTHONPATH": python_path()}
    if preload is not None:
        environment["LD_PRELOAD"] = str(preload)
    found = subprocess.run(
        [python, "-m", module, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=environment,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-6000:] + found.stderr[-6000:]
    return found.stdout


@dataclass(frozen=True, slots=True)
class Fault:
    """What the shim does to which calls."""

    kinds: int
    """Sum of the kinds of calls."""
    number: int = 0
    """The errno that they fail with."""
    how: int = FAIL
    """Fail instead of the call, or after it; take fewer bytes; or kill."""
    lasting: bool = False
    """Whether every call from the n-th on is hit."""


class Shim:
    """The shim of this process, which was started with it."""

    def __init__(self) -> None:
        library: Any = ctypes.CDLL(None)
        self._arm = library.shim_arm
        self._arm.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_int]
        self._disarm = library.shim_disarm
        self._disarm.restype = ctypes.c_long

    def arm(self, below: Path, fault: Fault, nth: int) -> None:
        """Hit the n-th call (from 1) on paths below a directory."""
        self._arm(os.fsencode(below), fault.kinds, nth, fault.number, fault.how, fault.lasting)

    def disarm(self) -> int:
        """Let everything pass; return how many calls there were since `arm`."""
        return int(self._disarm())
