"""Files through aiofiles: for systems that have no positional read into given memory (Windows).

Each handle has one position, so each reader borrows a handle of its own; what comes back is the queue that the next
reader waits at. Further handles are opened when readers are many, and only while they lead to the same file: where
they do not, or the system has no more descriptors, fewer readers share what is there. Reads go straight into the
caller's memory, piece by piece, on the loop's executor threads.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import aiofiles
import anyio

from stio.errors import CheckpointNotFoundError, StorageError, TruncatedError
from stio.runtime.memory import Region
from stio.storage.base import Identity
from stio.storage.checks import OPEN_FLAGS, identity_of, refused, require_inside, require_regular, stat_of

__all__ = ["MAX_HANDLES", "PIECE_BYTES", "PortableFile", "PortableRoot", "open_file"]

T = TypeVar("T")

PIECE_BYTES = 8 << 20
"""Longest single read: a cancel waits for one. Two thread hops of 40-80 microseconds are lost in its milliseconds."""

MAX_HANDLES = 4
"""Most handles of one file: as many as the engine has readers. A checkpoint of 100 shards stays below 512 of them,
where the C runtime of Windows ends."""


@dataclass(slots=True)
class _Handle:
    file: Any  # aiofiles' AsyncFileIO
    position: int


async def open_file(path: str) -> PortableFile:
    """Open one file that the caller named; it may be a link to anywhere.

    Raises:
        CheckpointNotFoundError: It does not exist.
        StorageError: It is no regular file, or the system refuses.
    """
    handle, identity = await _open(path)
    return PortableFile(handle, path, identity)


class PortableRoot:
    """A checkpoint's directory, by its path; an `AsyncRoot`.

    Args:
        directory: The directory, trusted as the caller gave it (it may be a link).
        follow_symlinks: Let shards be links to anywhere; see `stio.storage.local.LocalRoot`.
    """

    def __init__(self, directory: str | os.PathLike[str], *, follow_symlinks: bool = False) -> None:
        self.path = os.fspath(directory)
        self._follow_symlinks = follow_symlinks

    async def listdir(self) -> list[str]:
        """Return the names in the directory, sorted.

        Raises:
            CheckpointNotFoundError: The directory does not exist.
            StorageError: The system refuses.
        """
        try:
            return sorted(await _in_thread(lambda: os.listdir(self.path)))
        except FileNotFoundError:
            raise CheckpointNotFoundError("there is no such directory", path=self.path) from None
        except (OSError, ValueError) as error:
            raise refused("listing the directory", self.path, error) from error

    async def open(self, name: str, *, trusted: bool = False) -> PortableFile:
        """Open one regular file of this directory; see `stio.storage.local.LocalRoot.open`."""
        path = os.path.join(self.path, name)
        if not (trusted or self._follow_symlinks):
            real, root = await _in_thread(lambda: (os.path.realpath(path), os.path.realpath(self.path)))
            require_inside(real, root, path)
        return await open_file(path)

    async def aclose(self) -> None:
        """Do nothing: no descriptor is held."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


class PortableFile:
    """One open regular file; an `AsyncSource`.

    Args:
        handle: An open handle, owned from here on.
        path: Name for messages, and where further handles come from.
        identity: The state of the file behind the handle.
    """

    def __init__(self, handle: _Handle, path: str, identity: Identity) -> None:
        self._path = path
        self._identity = identity
        self._first = handle
        self._num_handles = 1
        self._max_handles = MAX_HANDLES
        self._put, self._idle = anyio.create_memory_object_stream[_Handle](MAX_HANDLES)
        self._put.send_nowait(handle)

    @property
    def path(self) -> str:
        """Name for messages."""
        return self._path

    @property
    def identity(self) -> Identity:
        """The state of the file when it was opened."""
        return self._identity

    async def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other; a cancel waits until no thread writes into them any more.

        Raises:
            TruncatedError: The file ends before the last region is full.
            StorageError: The operating system refused.
        """
        handle = await self._borrow()
        try:
            for region in regions:
                await self._fill(handle, offset, region)
                offset += region.nbytes
        except BaseException:
            handle.position = -1  # unknown: the next reader seeks
            raise
        finally:
            self._put.send_nowait(handle)

    async def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if size or time of change differ from when the file was opened."""
        fd = self._first.file.fileno()
        found = await _in_thread(lambda: stat_of(fd, self._path))
        self._identity.require_same(identity_of(found), self._path)

    async def aclose(self) -> None:
        """Give the descriptors back. Idempotent; no read may be under way."""
        while self._num_handles:
            handle = self._idle.receive_nowait()
            self._num_handles -= 1
            await _uninterrupted(handle.file.close())
        self._put.close()
        self._idle.close()

    async def _borrow(self) -> _Handle:
        try:
            return self._idle.receive_nowait()
        except anyio.WouldBlock:
            pass
        if self._num_handles < self._max_handles:
            self._num_handles += 1  # at once: others look while this one opens
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
        """Open the file once more; None if that is not possible, or not the same file any more."""
        try:
            handle, identity = await _open(self._path)
        except (StorageError, CheckpointNotFoundError):
            return None
        if identity == self._identity:
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
                raise refused("reading", self._path, error, offset=position) from error
            if count is None:
                raise refused("reading", self._path, OSError(errno.EAGAIN, ""), offset=position)
            if count == 0:
                raise TruncatedError(
                    "the file ends before its tensors do; it was cut short",
                    path=self._path,
                    offset=position,
                    expected=f"{region.nbytes - done:,} more bytes",
                    found="the end of the file",
                )
            done += count
            handle.position = position + count


async def _open(path: str) -> tuple[_Handle, Identity]:
    def opener(name: str, flags: int) -> int:
        require_regular(os.stat(name), path)  # before: opening some devices acts
        return os.open(name, flags | OPEN_FLAGS)

    try:
        file: Any = await _uninterrupted(aiofiles.open(path, "rb", buffering=0, opener=opener), undo=_close)
    except StorageError:
        raise
    except FileNotFoundError:
        raise CheckpointNotFoundError("there is no such file or directory", path=path) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise refused("opening", path, error) from error
    try:
        found = stat_of(file.fileno(), path)
        require_regular(found, path)
    except BaseException:
        await _uninterrupted(file.close())
        raise
    return _Handle(file, 0), identity_of(found)


async def _close(file: Any) -> None:
    await file.close()


async def _in_thread(function: Callable[[], T]) -> T:
    return await _uninterrupted(asyncio.to_thread(function))


async def _uninterrupted(work: Awaitable[T], *, undo: Callable[[T], Awaitable[None]] | None = None) -> T:
    """Wait for a thread's work to its end, even if the caller is cancelled: it writes into the caller's memory.

    Args:
        work: What aiofiles gives; asyncio's, as aiofiles is.
        undo: Called with the result if a cancel keeps it from the caller.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):  # anyio's cancels wait outside; asyncio's own come through, once each
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
