"""Chooses the implementation that reads local files: `preadv` if the system has it, else aiofiles."""

from __future__ import annotations

import os

from stio.storage import async_files, local
from stio.storage.base import Source


def open_directory(path: str | os.PathLike[str], *, follow_symlinks: bool) -> local.LocalRoot:
    """Open a directory; its files are read by the implementation that this system supports.

    Raises:
        CheckpointNotFoundError: It does not exist (on a system without directory descriptors, when it is listed).
        StorageError: The operating system reported an error.
    """
    open_at = local.open_at if local.HAVE_PREADV else async_files.open_at
    return local.LocalRoot(path, follow_symlinks=follow_symlinks, open_at=open_at)


def open_file(path: str) -> Source:
    """Open one file that the caller named; it may be a link to any place.

    Raises:
        CheckpointNotFoundError: It does not exist.
        StorageError: It is no regular file, or the operating system reported an error.
    """
    return local.open_file(path) if local.HAVE_PREADV else async_files.open_at(path, path, None)
