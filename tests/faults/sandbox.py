"""A sandbox for the calling process: seccomp refuses a system call with an error number, as containers and gVisor do."""

from __future__ import annotations

import ctypes
import struct
import sys

_NUMBERS = {
    "fallocate": 285,
    "renameat2": 316,
    "fstatfs": 138,
    "sched_getaffinity": 204,
    "prlimit64": 302,
    "statx": 332,
    "flock": 73,
    "linkat": 265,
    "preadv": 295,
    "preadv2": 327,
    "pread64": 17,
}
"""Numbers on x86-64."""
_WITH_FLAG = {"O_DIRECT": (257, 2, 0o40000), "populate": (28, 2, 22)}
"""Number, argument, and a value that it must contain: `openat` with O_DIRECT, `madvise` with MADV_POPULATE_READ."""
CALLS = ("populate", "O_DIRECT", "fallocate", "renameat2", "fstatfs", "sched_getaffinity", "prlimit64")
"""Calls that have a slower way."""
_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2


def is_possible() -> bool:
    """Whether numbers and offsets here are those of this system."""
    return sys.platform == "linux" and sys.implementation._multiarch.startswith("x86_64")  # type: ignore[attr-defined]


def refuse(call: str, number: int) -> None:
    """Refuse a system call in this process from now on, and in its children.

    Args:
        call: One of `CALLS`.
        number: Its error.
    """

    def line(code: int, true: int, false: int, value: int) -> bytes:
        return struct.pack("HBBI", code, true, false, value)

    lines = [line(_LOAD, 0, 0, 0)]
    if call in _WITH_FLAG:
        system_call, argument, value = _WITH_FLAG[call]
        test = _ANY_BIT if call == "O_DIRECT" else _EQUAL
        lines += [line(_EQUAL, 0, 3, system_call), line(_LOAD, 0, 0, 16 + 8 * argument), line(test, 0, 1, value)]
    else:
        lines.append(line(_EQUAL, 0, 1, _NUMBERS[call]))
    lines += [line(_RETURN, 0, 0, _ERROR | number), line(_RETURN, 0, 0, _ALLOW)]
    program = ctypes.create_string_buffer(b"".join(lines))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program)))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_NO_NEW_PRIVILEGES, 1, 0, 0, 0), (_SECCOMP, _FILTER, ctypes.byref(header), 0, 0)):
        if libc.prctl(*arguments) != 0:
            raise OSError(ctypes.get_errno(), "prctl")
