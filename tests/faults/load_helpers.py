"""What tests of faults of loads share: sparse files, coroutines that are closed where they wait, limited processes."""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import textwrap
import threading
import types
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FaultyRoot, MemoryDestination, MemoryRoot, checkpoint_files
from support import PATIENCE_SECONDS, eventually, num_threads

import stio

Tensors = dict[str, torch.Tensor]


def sparse_file(path: Path, nbytes: int, *, dtype: str = "U8", itemsize: int = 1) -> Path:
    """Write a checkpoint of one tensor `w` of zeros that takes no room on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = {"dtype": dtype, "shape": [nbytes // itemsize], "data_offsets": [0, nbytes]}
    header = json.dumps({"w": info}).encode()
    with open(path, "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + nbytes)
    return path


# Other processes.

_PRELUDE = """
import os, resource, sys, threading
from pathlib import Path
import torch
from torch import nn
import stio
from stio import sync
from fakes import FakeDevice
from support import eventually, num_threads
directory = Path(sys.argv[1])

def limit_address_space(room):
    status = Path("/proc/self/status").read_text()
    size = int(status.split("VmSize:")[1].split()[0]) << 10
    resource.setrlimit(resource.RLIMIT_AS, (size + room, resource.RLIM_INFINITY))

idle = num_threads()

def settle():
    assert eventually(lambda: num_threads() <= idle)  # a thread that ends holds its stack to its last step

def attempt(call):
    try:
        call()
    except stio.StioError as error:
        print("refused", type(error).__name__, error)
    except BaseException as error:
        print("raw", type(error).__name__, error)
    else:
        print("done")
    settle()
"""


def in_a_child(zygote: Any, code: str, directory: Path) -> list[str]:
    """Run a script in a forked process that ends by itself; return the lines that it printed."""
    found = zygote.run(_PRELUDE + textwrap.dedent(code), directory)
    assert found.returncode == 0, f"status {found.returncode}: {found.stdout}{found.stderr}"
    lines: list[str] = found.stdout.splitlines()
    return lines


# Coroutines that are closed where they wait.


class Scene:
    """Sources and destinations that hold every operation from `hold` or `shut` on, until `release`.

    Args:
        tensors: What the sources hold.
        path: A file with them.
    """

    def __init__(self, tensors: Tensors, path: Path) -> None:
        self.tensors = tensors
        self.path = path
        self.is_shut = False
        self.gate = threading.Event()
        self.gate.set()
        self.root = FaultyRoot(MemoryRoot(checkpoint_files(tensors)), gate=self.gate)
        self.destination = MemoryDestination(gate=self.gate)
        self.lazy = {"a": stio.LazyTensor(torch.float32, (3,), self._produce)}

    def hold(self) -> None:
        """Hold reads, writes, producers and progress."""
        self.gate.clear()

    def shut(self) -> None:
        """Hold everything, and count awaits from here on."""
        self.hold()
        self.is_shut = True

    def release(self) -> None:
        """Let everything go on."""
        self.gate.set()

    def wait(self, *_: object) -> None:
        """Wait for `release`; a progress callback."""
        assert self.gate.wait(PATIENCE_SECONDS), "the gate was not opened"

    def _produce(self) -> torch.Tensor:
        self.wait()
        return torch.zeros(3)

    def is_idle(self) -> bool:
        """Return whether no read, write or save is under way."""
        destination = self.destination
        return not (self.root.num_waiting or destination.num_waiting or destination.num_transactions)


Case = Callable[[Scene], Coroutine[Any, Any, object]]

WAYS = ["in its task", "without a loop", "collected", "on trio", "after a cancel"]
"""How a coroutine that waits is closed: in the task that runs it, on asyncio or on trio; when its loop has ended, by
`close()` or by the garbage collector, while it waits, or while it waits, cancelled, for the end of what it began."""


@types.coroutine
def _suspended(coroutine: Coroutine[Any, Any, object], scene: Scene, n: int, *, cancels: bool) -> Any:
    """Drive a coroutine in the current task, and leave it at its n-th await since `scene.shut`; tell if there was one.

    With `cancels` it is cancelled at the await before, while everything is still held.
    """
    send: Callable[[Any], Any] = coroutine.send
    value: Any = None
    while True:
        try:
            waited = send(value)
        except (StopIteration, asyncio.CancelledError):
            return False
        send, value = coroutine.send, None
        if scene.is_shut:
            if cancels:
                cancels, send, value = False, coroutine.throw, asyncio.CancelledError()
                continue
            if n == 0:
                return True
            n -= 1
            scene.release()
        try:
            value = yield waited
        except BaseException as error:
            send, value = coroutine.throw, error


def require_closable(case: Case, make: Callable[[], Scene], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Close a coroutine at each of its awaits; require that nothing is raised, and that nothing of it goes on.

    Args:
        case: Makes the coroutine, which calls `Scene.shut` before the call that is meant.
        make: Makes a fresh scene.
        way: One of `WAYS`.
        monkeypatch: The test's.
    """
    __tracebackhide__ = True  # what was raised stands in the message; a long traceback of each case takes 20 ms
    found: list[str] = []
    with monkeypatch.context() as patch:
        patch.setattr(sys, "unraisablehook", lambda it: found.append(repr(it.exc_value)))
        for n in range(10):
            reached = _close_at(0 if way == "after a cancel" else n, case, make(), way, found)
            if way == "after a cancel":
                if reached:
                    break
                continue  # the cancel came before the operation's thread had begun, so there was nothing to wait for
            # What is waited for must not come while the coroutine lies there: trio would wake the task that ran it.
            if not reached or way == "on trio":
                break
    assert reached or (n and way != "after a cancel"), "the coroutine did not wait"


def _close_at(n: int, case: Case, scene: Scene, way: str, found: list[str]) -> bool:
    """Close a coroutine at one of its awaits; return whether it had so many."""
    __tracebackhide__ = True
    before = num_threads()
    coroutines = [case(scene)]
    reached = False

    async def main() -> None:
        nonlocal reached
        reached = await _suspended(coroutines[0], scene, n, cancels=way == "after a cancel")
        if way in ("in its task", "on trio"):
            _close(coroutines[0], found)

    try:
        _run("trio" if way == "on trio" else "asyncio", main, found)
        if way != "collected":
            _close(coroutines[0], found)
        coroutines.clear()
        gc.collect()
    finally:
        scene.release()
    assert not found, found
    assert eventually(lambda: scene.is_idle() and num_threads() <= before), "the operation goes on"
    assert scene.destination.violations == []
    return reached


def _close(coroutine: Coroutine[Any, Any, object], found: list[str]) -> None:
    try:
        coroutine.close()
    except Exception as error:
        found.append(repr(error))


def _run(loop: str, main: Callable[[], Coroutine[Any, Any, None]], found: list[str]) -> None:
    """Run a coroutine function on a fresh loop, which is closed at the end."""
    if loop == "trio":
        trio = pytest.importorskip("trio")
        try:
            trio.run(main)
        except trio.TrioInternalError as error:  # a coroutine that goes on after it was closed disturbs its scopes
            found.append(repr(error))
        return

    async def watched() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(str(context)))
        await main()

    asyncio.run(watched())
