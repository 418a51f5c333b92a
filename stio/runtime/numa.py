"""NUMA: on which node of the host a device is, and memory that a thread allocates there.

A copy between a device and memory of another node crosses the link between the processors, which is slower than the
bus and shared with all other programs. The policy is one of the thread, so it is set for one allocation and restored.
On a host with one node, or where the node is not known, nothing is called. Only Linux is supported.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from stio.runtime.control_groups import read_text

logger = logging.getLogger("stio")

# Numbers of get_mempolicy and set_mempolicy, for which the C library has no functions.
_SYSCALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}

_PREFERRED = 1  # MPOL_PREFERRED: another node is used if this one is full
_MASK_WORDS = 16  # 1024 nodes, the most that Linux is built for
_Mask = ctypes.c_ulong * _MASK_WORDS
_WORD_BITS = 8 * ctypes.sizeof(ctypes.c_ulong)


def node_of(pci_address: str, *, sysfs: str = "/sys") -> int | None:
    """Return the node of a device; None if it is not known, or if the host has one node only.

    Args:
        pci_address: Address of the device on its bus, `"0000:3b:00.0"`.
        sysfs: Where the kernel's description of the devices is mounted.
    """
    nodes = read_text(f"{sysfs}/devices/system/node/has_memory").strip()
    if "," not in nodes and "-" not in nodes:
        return None
    text = read_text(f"{sysfs}/bus/pci/devices/{pci_address.lower()}/numa_node").strip()
    return int(text) if text.isdigit() else None  # the kernel writes -1 if the firmware does not say


@contextmanager
def preferring(node: int | None, *, call: Callable[..., int] | None = None) -> Iterator[None]:
    """Return a context in which this thread allocates memory on a node, as long as there is some.

    A system that refuses (containers often do) changes nothing.

    Args:
        node: The node; None: nothing is called.
        call: Makes a system call, for tests.
    """
    numbers = _SYSCALLS.get(platform.machine()) if sys.platform == "linux" else None
    if node is None or numbers is None or node >= _MASK_WORDS * _WORD_BITS:
        yield
        return
    call = call or _system_call
    get_policy, set_policy = numbers
    mode, before, wanted = ctypes.c_int(), _Mask(), _Mask()
    wanted[node // _WORD_BITS] = 1 << node % _WORD_BITS
    max_node = ctypes.c_ulong(_MASK_WORDS * _WORD_BITS)
    if call(get_policy, ctypes.byref(mode), before, max_node, None, ctypes.c_ulong(0)) or call(
        set_policy, ctypes.c_long(_PREFERRED), wanted, max_node
    ):
        _log_refusal(node)
        yield
        return
    try:
        yield
    finally:
        call(set_policy, ctypes.c_long(mode.value), before, max_node)


@cache
def _log_refusal(node: int) -> None:
    logger.debug("the system does not let this process choose NUMA node %d for memory", node)


def _system_call(number: int, *arguments: object) -> int:
    return int(_libc.syscall(ctypes.c_long(number), *arguments))


# The GIL is kept: such a call takes a microsecond.
_libc: Any = ctypes.PyDLL(None) if os.name == "posix" else None
