"""Files read through aiofiles: for systems that cannot read at an offset into given memory (Windows).

A handle has one position, so one reader at a time has it. Reads go directly into the caller's memory, piece by piece,
on threads of the event loop's executor; a worker that calls `read_into` blocks until its coroutine has ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import aiofiles
import anyio

from stio.errors import StioError
from stio.runtime import calls
from stio.runtime.memory import Region
from stio.storage.base import Identity
from stio.storage.checks import (
    OPEN_FLAGS,
    cut_short,
    identity_of,
    raise_opening_error,
    refused,
    require_regular,
    stat_of,
)

T = TypeVar("T")

PIECE_BYTES = 8 << 20
"""Longest single read; a cancel waits for one. It takes milliseconds; two thread switches take 40-80 microseconds."""


def open_at(name: str, path: str, dir_fd: int | None) -> AsyncFile:
    """Open one file; see `stio.storage.local.open_at`."""
    return AsyncFile(*calls.run_on_loop(lambda: _open(name, path, dir_fd)), path)


class AsyncFile:
    """One open regular file; a `Source` whose reads are coroutines on stio's event loop.

    Args:
        file: It, opened by aiofiles; owned from here on.
        identity: Its state.
        path: Name for messages.
    """

    def __init__(self, file: Any, identity: Identity, path: str) -> None:
        self.path = path
        """Name for messages."""
        self.identity = identity
        """The state of the file when it was opened."""
        self._file = file
        self._position: int | None = 0  # None: unknown
        self._turn = anyio.Lock()

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on. Blocks; not on stio's event loop."""
        calls.run_on_loop(lambda: self.read(offset, regions))

    async def read(self, offset: int, regions: Sequence[Region]) -> None:
        """Read as `read_into` does. A cancel takes effect when no thread writes into the regions.

        Raises:
            TruncatedError: The file ends before the last region is full.
            StorageError: The operating system reported an error.
        """
        async with self._turn:
            for region in regions:
                await self._fill(offset, region)
                offset += region.nbytes

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if size or time of change differ from when the file was opened."""
        self.identity.require_same(identity_of(stat_of(self._file.fileno(), self.path)), self.path)

    def close(self) -> None:
        """Close the file. Blocks. Idempotent; no read may be under way."""
        calls.run_on_loop(lambda: _uninterrupted(self._file.close()))

    async def _fill(self, offset: int, region: Region) -> None:
        done = 0
        while done < region.nbytes:
            at, step = offset + done, min(PIECE_BYTES, region.nbytes - done)
            target = (ctypes.c_char * step).from_address(region.address + done)
            position, self._position = self._position, None  # a read that fails, or is cancelled, leaves it unknown
            try:
                if position != at:
                    await _uninterrupted(self._file.seek(at))
                count = await _uninterrupted(self._file.readinto(target))
            except OSError as error:
                raise refused("reading", self.path, error, offset=at) from error
            if count is None:
                raise refused("reading", self.path, OSError(errno.EAGAIN, ""), offset=at)
            if count == 0:
                raise cut_short(self.path, at, region.nbytes - done)
            done += count
            self._position = at + count


async def _open(name: str, path: str, dir_fd: int | None) -> tuple[Any, Identity]:
    def opener(_: str, flags: int) -> int:
        require_regular(os.stat(name, dir_fd=dir_fd), path)  # before: to open some devices has an effect
        return os.open(name, flags | OPEN_FLAGS, dir_fd=dir_fd)

    try:
        opened = aiofiles.open(path, "rb", buffering=0, opener=opener)
        file: Any = await _uninterrupted(opened, undo=lambda file: file.close())
    except StioError:
        raise
    except (OSError, ValueError) as error:
        raise_opening_error(error, path)
    try:
        found = stat_of(file.fileno(), path)
        require_regular(found, path)
    except BaseException:
        await _uninterrupted(file.close())
        raise
    return file, identity_of(found)


async def _uninterrupted(work: Awaitable[T], *, undo: Callable[[T], Awaitable[None]] | None = None) -> T:
    """Wait until a thread has completed its work, even after a cancel: the thread writes into the caller's memory.

    Args:
        work: An awaitable of aiofiles, and so of asyncio.
        undo: Called with the result if it is not returned because of a cancel.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # blocks anyio's cancels; each cancel of asyncio is raised here once
        while not task.done():
            try:
                await asyncio.wait([task])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            if task.exception() is None and undo is not None:
                await undo(task.result())
            raise cancelled
    return task.result()
