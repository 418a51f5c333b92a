"""Files read through aiofiles: for systems that cannot read at an offset into given memory (Windows).

Each handle has one position, so a reader takes one handle out of a queue and puts it back. More handles are opened
while there are more readers than handles, but only of the same file. If the path leads to another file by now, or the
system reports an error, fewer handles serve all readers. Reads go directly into the caller's memory, piece by piece, on
threads of the event loop's executor; a worker that calls `read_into` blocks until its coroutine has ended.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import aiofiles
import anyio

from stio.errors import CheckpointNotFoundError, StorageError
from stio.runtime.calls import run_on_loop
from stio.runtime.memory import Region
from stio.storage.base import Identity
from stio.storage.checks import OPEN_FLAGS, cut_short, identity_of, refused, require_regular, stat_of, translated_errors

T = TypeVar("T")

PIECE_BYTES = 8 << 20
"""Longest single read; a cancel waits for one. It takes milliseconds; two thread switches take 40-80 microseconds."""

MAX_HANDLES = 4
"""Most handles of one file: as many as a load has workers. A checkpoint of 100 shards needs fewer than the 512 that the
C runtime of Windows has."""


@dataclass(slots=True)
class _Handle:
    file: Any  # aiofiles' AsyncFileIO
    position: int


def open_at(name: str, path: str, dir_fd: int | None) -> AsyncFile:
    """Open one file; see `stio.storage.local.open_at`."""
    handle, identity = run_on_loop(lambda: _open(name, path, dir_fd))
    return AsyncFile(handle, path, identity)


class AsyncFile:
    """One open regular file; a `Source` whose reads are coroutines on stio's event loop.

    Args:
        handle: An open handle, owned from here on.
        path: Name for messages, and path by which more handles are opened.
        identity: The state of the file behind the handle.
    """

    def __init__(self, handle: _Handle, path: str, identity: Identity) -> None:
        self.path = path
        """Name for messages."""
        self.identity = identity
        """The state of the file when it was opened."""
        self._first = handle
        self._num_handles = 1
        self._max_handles = MAX_HANDLES
        self._put, self._idle = anyio.create_memory_object_stream[_Handle](MAX_HANDLES)
        self._put.send_nowait(handle)

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on. Blocks; not on stio's event loop."""
        run_on_loop(lambda: self.read(offset, regions))

    async def read(self, offset: int, regions: Sequence[Region]) -> None:
        """Read as `read_into` does. A cancel takes effect when no thread writes into the regions.

        Raises:
            TruncatedError: The file ends before the last region is full.
            StorageError: The operating system reported an error.
        """
        handle = await self._take()
        try:
            for region in regions:
                await self._fill(handle, offset, region)
                offset += region.nbytes
        except BaseException:
            handle.position = -1  # unknown: the next reader seeks
            raise
        finally:
            self._put.send_nowait(handle)

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if size or time of change differ from when the file was opened."""
        self.identity.require_same(identity_of(stat_of(self._first.file.fileno(), self.path)), self.path)

    def close(self) -> None:
        """Close the handles. Blocks. Idempotent; no read may be under way."""
        run_on_loop(self._close_all)

    async def _close_all(self) -> None:
        while self._num_handles:
            handle = self._idle.receive_nowait()
            self._num_handles -= 1
            await _uninterrupted(handle.file.close())
        self._put.close()
        self._idle.close()

    async def _take(self) -> _Handle:
        with suppress(anyio.WouldBlock):
            return self._idle.receive_nowait()
        if self._num_handles < self._max_handles:
            self._num_handles += 1  # before the wait: other readers compare it in between
            handle = None
            try:
                handle = await self._another()
            finally:
                if handle is None:
                    self._num_handles -= 1
            if handle is not None:
                return handle
            self._max_handles = self._num_handles
        return await self._idle.receive()

    async def _another(self) -> _Handle | None:
        """Open the file once more; None if that is not possible, or if the path leads to another file by now."""
        with suppress(StorageError, CheckpointNotFoundError):
            handle, identity = await _open(self.path, self.path, None)
            if identity == self.identity:
                return handle
            await _uninterrupted(handle.file.close())
        return None

    async def _fill(self, handle: _Handle, offset: int, region: Region) -> None:
        done = 0
        while done < region.nbytes:
            position, step = offset + done, min(PIECE_BYTES, region.nbytes - done)
            target = (ctypes.c_char * step).from_address(region.address + done)
            try:
                if handle.position != position:
                    await _uninterrupted(handle.file.seek(position))
                count = await _uninterrupted(handle.file.readinto(target))
            except OSError as error:
                raise refused("reading", self.path, error, offset=position) from error
            if count is None:
                raise refused("reading", self.path, OSError(errno.EAGAIN, ""), offset=position)
            if count == 0:
                raise cut_short(self.path, position, region.nbytes - done)
            done += count
            handle.position = position + count


async def _open(name: str, path: str, dir_fd: int | None) -> tuple[_Handle, Identity]:
    def opener(_: str, flags: int) -> int:
        require_regular(os.stat(name, dir_fd=dir_fd), path)  # before: to open some devices has an effect
        return os.open(name, flags | OPEN_FLAGS, dir_fd=dir_fd)

    with translated_errors(path):
        opened = aiofiles.open(path, "rb", buffering=0, opener=opener)
        file: Any = await _uninterrupted(opened, undo=lambda file: file.close())
    try:
        found = stat_of(file.fileno(), path)
        require_regular(found, path)
    except BaseException:
        await _uninterrupted(file.close())
        raise
    return _Handle(file, 0), identity_of(found)


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
