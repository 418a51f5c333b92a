"""One call that reads a long range of a file by several requests at the same time, without the GIL.

A thread that has read a block needs the GIL to begin the next one, and beside a busy Python thread it waits up to one
switch interval (5 ms) for it. All threads that need it wait one after another, so more reading threads do not help: the
bytes of one call decide. `lio_listio(3)` of the GNU C library reads by threads of its own, which never need the GIL,
and returns when all have ended. 1.7 GB in the page cache, two cores, beside a busy thread: 5.5 GB/s by 2 threads and
calls of 32 MiB, 7.9 by calls of 256 MiB, 9.6 by the same calls of 4 requests each. A copy from a mapping by torch's
threads reached 5.5, and a file that is cut short meanwhile would raise SIGBUS there.

The library reads one descriptor by one thread at a time, so each request has a duplicate of its own. In a forked child
the library still counts the parent's threads and would wait for them, so there nothing is read in parallel. Nor on the
main thread, where Python may run a signal handler, which may raise, between any two steps.
"""

from __future__ import annotations

import ctypes
import errno
import signal
import sys
import threading
from functools import cache
from typing import Any

from stio.runtime.control_groups import num_processors
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.memory import libc, quick_libc
from stio.runtime.process import after_fork_in_child

_REQUEST_BYTES = 16 << 20
"""Least bytes of a request. To start one takes some ten microseconds, to copy 16 MiB from the page cache 2 ms."""

LEAST_BYTES = 4 * _REQUEST_BYTES
"""Shorter ranges are read by one request: four at a time keep a disk busy."""

_MOST_REQUESTS = 8
"""Of one call. The library has 20 threads; two calls at a time keep a disk and the memory of a large host busy."""

_F_DUPFD_CLOEXEC = 1030
_SIGNALS = signal.valid_signals()
_LIO_READ, _LIO_WAIT, _SIGEV_NONE = 0, 0, 1


class _Sigevent(ctypes.Structure):
    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_rest", ctypes.c_char * 48),
    )


class _Request(ctypes.Structure):
    """`struct aiocb` of the GNU C library on 64-bit machines."""

    _fields_ = (
        ("fd", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("address", ctypes.c_void_p),
        ("nbytes", ctypes.c_size_t),
        ("event", _Sigevent),
        ("_next", ctypes.c_void_p),
        ("_absolute_priority", ctypes.c_int),
        ("_policy", ctypes.c_int),
        ("_error", ctypes.c_int),
        ("_result", ctypes.c_ssize_t),
        ("offset", ctypes.c_int64),
        ("_reserved", ctypes.c_char * 32),
    )


def _is_supported() -> bool:
    if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8 or not hasattr(libc, "gnu_get_libc_version"):
        return False
    return all(hasattr(libc, name) for name in ("lio_listio", "aio_suspend", "aio_error", "aio_return"))


_is_usable = _is_supported()

if _is_usable:
    _submit: Any = libc["lio_listio"]
    _submit.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    _suspend: Any = libc["aio_suspend"]
    _suspend.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
    _error: Any = quick_libc["aio_error"]
    _error.argtypes = [ctypes.c_void_p]
    _result: Any = quick_libc["aio_return"]
    _result.argtypes, _result.restype = [ctypes.c_void_p], ctypes.c_ssize_t


@after_fork_in_child
def _forget_threads() -> None:
    global _is_usable
    _is_usable = False


def read_parallel(fd: int, address: int, nbytes: int, offset: int) -> int:
    """Read a range of a file into memory by several requests at the same time. Blocks, without the GIL.

    When this returns no request is under way. The caller reads the rest by `preadv`, which also reports the error of a
    request that failed.

    Args:
        fd: Descriptor of the file; it may have O_DIRECT, if address and offset are aligned.
        address: Where to read to.
        nbytes: Length of the range.
        offset: Its first byte in the file.

    Returns:
        Bytes that were read, from the first one on; whole pages unless it is all. 0 if the range is short, if this
        system cannot read in parallel, or on the main thread.
    """
    count = num_requests(nbytes, _num_processors())
    if not _is_usable or count == 1 or _is_main_thread():
        return 0
    step = -(-nbytes // count // PAGE_BYTES) * PAGE_BYTES
    duplicates = _duplicates(fd, count - 1)
    descriptors = [fd, *duplicates]
    try:
        if len(descriptors) < count:  # the limit of descriptors
            return 0
        requests = (_Request * count)()
        pointers = (ctypes.c_void_p * count)()
        for k, (request, descriptor) in enumerate(zip(requests, descriptors, strict=True)):
            start = min(nbytes, k * step)
            request.fd, request.opcode = descriptor, _LIO_READ
            request.address, request.nbytes = address + start, min(step, nbytes - start)
            request.offset, request.event.notify = offset + start, _SIGEV_NONE
            pointers[k] = ctypes.addressof(request)
        done = _carry_out(requests, pointers)
        return done if done == nbytes else done // PAGE_BYTES * PAGE_BYTES
    finally:
        for duplicate in duplicates:
            quick_libc.close(duplicate)


def num_requests(nbytes: int, num_processors: int) -> int:
    """Return by how many requests one call reads a range. At least four keep a disk busy, also on one processor."""
    return min(_MOST_REQUESTS, max(4, num_processors), nbytes // _REQUEST_BYTES) if nbytes >= LEAST_BYTES else 1


def _is_main_thread() -> bool:
    # Not by `threading.current_thread()`, which adds a record of the thread that is never removed.
    return threading.get_ident() == threading.main_thread().ident


@cache
def _num_processors() -> int:
    """Return `num_processors()`, read once: to read the quotas releases the GIL."""
    return num_processors()


def _duplicates(fd: int, count: int) -> list[int]:
    """Return duplicates of a descriptor, fewer if there are no more; keeps the GIL."""
    found: list[int] = []
    while len(found) < count and (duplicate := quick_libc.fcntl(fd, _F_DUPFD_CLOEXEC, 0)) >= 0:
        found.append(duplicate)
    return found


def _carry_out(requests: Any, pointers: Any) -> int:
    """Carry out requests, which are for neighbouring ranges; return how many bytes were read without a gap."""
    count = len(requests)
    # If a signal handler ends the wait, the library later writes to the stack frame of the call that has ended (glibc
    # 2.36). So this thread takes no signal meanwhile; others do.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        _submit(_LIO_WAIT, pointers, count, None)  # returns early if a request is refused
        while left := [pointer for pointer in pointers if _error(pointer) == errno.EINPROGRESS]:
            _suspend((ctypes.c_void_p * len(left))(*left), len(left), None)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    done = 0
    for pointer, request in zip(pointers, requests, strict=True):
        if _error(pointer) != 0:
            break
        nbytes = max(0, _result(pointer))
        done += nbytes
        if nbytes < request.nbytes:
            break
    return done
