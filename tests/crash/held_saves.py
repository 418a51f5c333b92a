"""Scripts about a save that is held where it syncs its first file."""

from __future__ import annotations

import textwrap

from crash.zygote import Child, Zygote
from support import eventually

SAVING = """
import asyncio, atexit, faulthandler, os, signal, sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
import stio
from stio import sync
from stio.runtime import operation as runtime
from stio.storage.commit import syscalls as calls
from crash.generations import MANY, save, tensors_of
from support import eventually
where, keywords = Path(sys.argv[1]), {} if sys.argv[1].endswith(".safetensors") else MANY
plain, reached, opened = calls.fsync, threading.Event(), threading.Event()

def held(fd):
    reached.set()
    opened.wait(30)
    plain(fd)

calls.fsync = held

def open_once_cancelled():
    def body():
        running = runtime.counters.running
        if not eventually(lambda: bool(running) and all(o.cancelled for o in list(running)), 20):
            faulthandler.dump_traceback()
            raise AssertionError(f"not cancelled: {list(running)}")
        opened.set()
    threading.Thread(target=body, daemon=True).start()
"""
"""Begin of scripts about a save that is held where it syncs its first file, until `opened` is set."""


def script(code: str) -> str:
    """Return a script about a save that is held."""
    return SAVING + textwrap.dedent(code)


def started(zygote: Zygote, code: str, *arguments: object) -> Child:
    """Start a script about a save that is held, and wait until it says that it is up."""
    child = zygote.start(script(code), *arguments)
    assert eventually(lambda: child.stdout() == "up\n", 20), child.wait()
    return child
