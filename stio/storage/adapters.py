"""The two lanes of storage made one: the engine's workers are threads, so asynchronous sources come to them.

A worker that reads from an `AsyncSource` hands a coroutine to the engine's loop and blocks until it is done; it
holds nothing meanwhile that the loop needs. Here too it is chosen which lane serves local files.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from stio.runtime.event_loop import engine_call
from stio.runtime.memory import Region
from stio.storage import async_files as portable
from stio.storage import local
from stio.storage.base import AsyncRoot, AsyncSource, Identity, Root, Source

__all__ = ["BlockingRoot", "BlockingSource", "blocking", "open_directory", "open_file"]


class BlockingSource:
    """An asynchronous source for worker threads; a `Source`.

    Args:
        source: Opened on the engine's loop; owned from here on.
    """

    def __init__(self, source: AsyncSource) -> None:
        self._source = source

    @property
    def path(self) -> str:
        """Name for messages."""
        return self._source.path

    @property
    def identity(self) -> Identity:
        """The state of the file when it was opened."""
        return self._source.identity

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Fill the regions, one after the other, with the bytes from `offset` on."""
        engine_call(lambda: self._source.read_into(offset, regions))

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the file is not the one that was opened."""
        engine_call(self._source.check_unchanged)

    def close(self) -> None:
        """Give the descriptors back. Idempotent; no read may be under way."""
        engine_call(self._source.aclose)


class BlockingRoot:
    """An asynchronous root for worker threads; a `Root`.

    Args:
        root: The place; owned from here on.
    """

    def __init__(self, root: AsyncRoot) -> None:
        self.path = root.path
        self._root = root

    def listdir(self) -> Sequence[str]:
        """Return the names of the files, sorted."""
        return engine_call(self._root.listdir)

    def open(self, name: str, *, trusted: bool = False) -> BlockingSource:
        """Open one file; see `stio.storage.local.LocalRoot.open`."""
        return BlockingSource(engine_call(lambda: self._root.open(name, trusted=trusted)))

    def close(self) -> None:
        """Let go of the place; files opened from it stay open. Idempotent."""
        engine_call(self._root.aclose)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def blocking(root: Root | AsyncRoot) -> Root:
    """Return a root for worker threads, whichever lane it is of."""
    return root if isinstance(root, Root) else BlockingRoot(root)


def open_directory(path: str | os.PathLike[str], *, follow_symlinks: bool) -> local.LocalRoot | BlockingRoot:
    """Open a directory by the lane that this system has.

    Raises:
        CheckpointNotFoundError: It does not exist (the portable lane says so when it is listed).
        StorageError: The operating system refused.
    """
    if local.HAVE_PREADV:
        return local.LocalRoot(path, follow_symlinks=follow_symlinks)
    return BlockingRoot(portable.PortableRoot(path, follow_symlinks=follow_symlinks))


def open_file(path: str) -> Source:
    """Open one file that the caller named by the lane that this system has.

    Raises:
        CheckpointNotFoundError: It does not exist.
        StorageError: It is no regular file, or the operating system refused.
    """
    if local.HAVE_PREADV:
        return local.open_file(path)
    return BlockingSource(engine_call(lambda: portable.open_file(path)))
