"""What both parts of the demo need: a directory on a disk, files out of the page cache, processes to be killed."""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

PATIENCE_SECONDS = 60.0

# Processes are forked from one that has imported all that they need, so each of them starts in a moment. The first save
# of huggingface_hub imports `torch.distributed.tensor`, that of safetensors `numpy.ctypeslib`.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    ["stio.sync", "safetensors.torch", "numpy.ctypeslib", "huggingface_hub", "torch.distributed.tensor"]
)
_libc = ctypes.CDLL(None, use_errno=True)


def disk_directory(candidates: list[Path]) -> tuple[Path, bool]:
    """Return the first directory whose files can be evicted from the page cache, and whether there is one.

    A file of a tmpfs cannot be evicted: it is in memory and nowhere else. If all directories are like that, the first
    one is returned.
    """
    usable = []
    for folder in candidates:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=folder) as file:
                file.write(bytes(1 << 20))
                file.flush()
                if evict(Path(file.name)):
                    return folder, True
        except OSError:
            continue
        usable.append(folder)
    if not usable:
        raise SystemExit(f"the demo cannot write to {', '.join(map(str, candidates))}: choose a directory with --dir")
    return usable[0], False


def evict(path: Path) -> bool:
    """Drop a file from the page cache, and return whether that succeeded."""
    for attempt in range(5):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            if not hasattr(os, "posix_fadvise"):
                return False
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if resident_fraction(path) < 0.01:
            return True
        time.sleep(0.02 * attempt)  # pages that are still in use elsewhere
    return False


def resident_fraction(path: Path) -> float:
    """Return which part of a file is in the page cache, from 0 to 1."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapping:
        data = np.frombuffer(mapping, np.uint8)
        pages = np.zeros(-(-len(data) // mmap.PAGESIZE), np.uint8)
        failed = _libc.mincore(
            ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(len(data)), ctypes.c_void_p(pages.ctypes.data)
        )
        del data
    return 1.0 if failed else float((pages & 1).mean())


@contextmanager
def child(target: Callable[..., None], *arguments: Any) -> Iterator[tuple[BaseProcess, Connection]]:
    """Run `target(connection, *arguments)` in a process, which is killed at the end of the block.

    Returns:
        The process, and the other end of its connection.
    """
    import_ahead()
    ours, theirs = _context.Pipe()
    process = _context.Process(target=target, args=(theirs, *arguments), daemon=True)
    try:
        with _signals_later():
            process.start()
        theirs.close()
        yield process, ours
    finally:
        if process.pid is not None:
            process.kill()
            process.join()
        ours.close()


@cache
def import_ahead() -> None:
    """Start the process that all others are forked from. It imports for seconds, beside the work of the caller.

    Ctrl-C reaches all processes. The first one ends the others, so they ignore it: they inherit that from this process.
    """
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, previous)


@contextmanager
def _signals_later() -> Iterator[None]:
    """Let a signal that ends the demo take effect at the end of the block: within it a process is half started."""
    arrived: list[int] = []
    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {number: signal.signal(number, lambda number, _: arrived.append(number)) for number in ending}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


def receive(connection: Connection) -> Any:
    """Return the next message of a child.

    Raises:
        RuntimeError: The child ended, or sent nothing for a minute.
    """
    try:
        if connection.poll(PATIENCE_SECONDS):
            return connection.recv()
    except EOFError:
        raise RuntimeError("a process of the demo ended early; its error is above") from None
    raise RuntimeError(f"a process of the demo sent nothing for {PATIENCE_SECONDS:.0f} s")
