"""Chooses the implementation of a storage: by the URL, or, for local files, by what the system has."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

from stio import schemes
from stio.errors import listed
from stio.runtime.memory import Region
from stio.storage import async_files, local
from stio.storage.base import Identity, Root, Source
from stio.storage.checks import open_files_limit
from stio.text import without_secrets


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
    return local.LocalFile.open(path) if local.HAVE_PREADV else async_files.open_at(path, path, None)


def open_url(url: str, *, is_file: bool | None = None) -> tuple[Root, str]:
    """Return the place of a URL in its store, and the name of an object in it that the URL names; "": a directory.

    Sends nothing.

    Args:
        url: A URL with a registered scheme (`stio.schemes`).
        is_file: It names an object, or a directory, whatever its name. None: the name decides, and a slash at its end
            means a directory. Not for URLs of the hub.

    Raises:
        ImportError: obstore, or for hf:// huggingface_hub, is not installed.
        CheckpointNotFoundError: It names no bucket, container, host or repository.
        StorageError: The settings for this store are wrong.
    """
    root, name = schemes.reader_of(url).open_url(url, is_file=is_file)
    return root, name


def open_destination(url: str | Root) -> Any:
    """Return a URL, or a `RemoteRoot`, as a destination of saves (`stio.saving.options.Destination`); sends nothing.

    Raises:
        ImportError: obstore is not installed.
        TypeError: It is a root of another kind.
        ValueError: Nothing can be saved there.
        StioError: The URL or the settings for its store are wrong.
    """
    saver = schemes.saver_of(url if isinstance(url, str) else url.path)
    if saver is None and isinstance(url, str):
        raise ValueError(
            f"saves go to local paths, and to URLs of {listed(schemes.SAVERS)}; not to {without_secrets(url)}"
        )
    if saver is None:
        raise TypeError(f"a destination is a path, a URL or a RemoteRoot, not {type(url).__name__}")
    return saver.open_destination(url)


def is_hub(url: str) -> bool:
    """Return whether a URL is one of the Hugging Face hub."""
    return schemes.scheme_of(url) == "hf"


def max_open_files() -> int:
    """Return how many files one checkpoint may keep open: a quarter of what this process may open.

    A comparison opens two, and a load keeps some of its own.
    """
    return open_files_limit() // 4


class ReopenedFile:
    """A file of which only path and identity are kept, and which each read opens; a `Source`.

    Args:
        path: Name for messages.
        identity: The state of the file.
        open_again: Opens the file in this state, or raises.
    """

    def __init__(self, path: str, identity: Identity, open_again: Callable[[], Source]) -> None:
        self.path = path
        """See above."""
        self.identity = identity
        """See above."""
        self._open_again = open_again

    def read_into(self, offset: int, regions: Sequence[Region]) -> None:
        """Open the file, fill the regions, and close it; see `Source.read_into`."""
        with closing(self._open_again()) as file:
            file.read_into(offset, regions)

    def check_unchanged(self) -> None:
        """Raise `ChangedDuringReadError` if the file is not the one that was opened first."""
        self._open_again().close()

    def close(self) -> None:
        """Do nothing: it is not open."""


class SingleFileRoot:
    """One file of a directory that the caller did not name itself, as a `Root` of its own.

    A path would be opened as the caller's own choice, wherever it leads. This is opened by the rule for shards.

    Args:
        directory: The directory; its owner closes it.
        name: Name of the file, relative to the directory.
    """

    def __init__(self, directory: Root, name: str) -> None:
        self.path = directory.path
        self.name = name
        self.directory = directory
        """See above."""

    def listdir(self) -> list[str]:
        """Return the name of the file."""
        return [self.name]

    def open(self, name: str, *, trusted: bool = False) -> Source:
        """Open a file of the directory; see `LocalRoot.open`."""
        return self.directory.open(name, trusted=trusted)

    def close(self) -> None:
        """Do nothing: the directory stays open."""
