"""Finds the checkpoints that an earlier process left in a directory, as what a save published (`WrittenFiles`).

Only complete checkpoints count, and only the files that belong to them: an index, its shards, one file, a manifest.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from stio.errors import StioError
from stio.format.index import parse_index
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX, MANIFEST_SUFFIX, is_shard_name
from stio.storage.base import Identity
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.retention import WrittenFiles
from stio.storage.commit.small_files import MAX_INDEX_BYTES, closing, read_small
from stio.storage.commit.target import DirectoryIdentity, directory_identity, identity_at
from stio.storage.paths import resolve_links

_DEEPEST = 4
"""Most directories inside each other that are searched: `run/epoch-1/step-100/model/`."""


@dataclass(frozen=True, slots=True)
class EarlierSave:
    """A checkpoint of an earlier process."""

    path: str
    """Its destination: absolute, links resolved."""
    filename_pattern: str | None
    """Pattern of the file names in a directory; None: it is one file."""
    written: WrittenFiles
    """Its files, and the directories below the one that was searched."""


def find_earlier_saves(directory: str) -> list[EarlierSave]:
    """Return the checkpoints in a directory and below it; none if it does not exist. Links in it are not followed.

    A file that may be a whole directory's checkpoint is returned as both.

    Raises:
        StorageError: The operating system reported an error.
    """
    try:
        root = resolve_links(directory)
        with closing(calls.open_directory(root)) as fd:
            return [*_found(fd, root, {}, _DEEPEST)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise refused("looking for earlier checkpoints", directory, error) from error


def _found(fd: int, path: str, above: dict[str, DirectoryIdentity], depth: int) -> Iterator[EarlierSave]:
    """Yield the checkpoints of an open directory.

    Args:
        fd: The directory.
        path: Its path.
        above: It and the directories above it, up to the one that is searched, which is not among them.
        depth: How many levels below it are searched.
    """
    names = sorted(name for name in os.listdir(fd) if not name.startswith("."))
    indexed: set[str] = set()
    for name in names:
        if name.endswith(FILE_SUFFIX + INDEX_SUFFIX):
            with suppress(StioError):  # no index that can be followed: its files stay
                shards = _shards(fd, path, name)
                indexed.update(shards)
                stem = name.removesuffix(INDEX_SUFFIX)
                if shards and (files := _files(fd, path, [name, *shards], stem)) is not None:
                    yield EarlierSave(path, _pattern(stem), WrittenFiles(files, above, above.keys()))
    for name in names:
        if not name.endswith(FILE_SUFFIX) or name in indexed or is_shard_name(name):
            continue
        if (files := _files(fd, path, [name], name)) is not None:
            written = WrittenFiles(files, above, above.keys())
            yield EarlierSave(os.path.join(path, name), None, written)
            yield EarlierSave(path, _pattern(name), written)  # a save to the directory may have written this file
    for name in names if depth else ():
        with suppress(FileNotFoundError, NotADirectoryError):
            if not stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                continue
            with closing(calls.open_directory(name, dir_fd=fd)) as below:
                place_below = os.path.join(path, name)
                own = {**above, place_below: directory_identity(below)}
                yield from _found(below, place_below, own, depth - 1)


def _pattern(stem: str) -> str:
    return f"{stem.removesuffix(FILE_SUFFIX)}{{suffix}}{FILE_SUFFIX}"


def _shards(fd: int, path: str, index: str) -> tuple[str, ...]:
    raw = read_small(fd, index, MAX_INDEX_BYTES, where=path) or b""
    shards = parse_index(raw, path=os.path.join(path, index)).shards
    return () if any("/" in shard for shard in shards) else shards


def _files(fd: int, path: str, names: Sequence[str], stem: str) -> dict[str, Identity] | None:
    """Return the identities of files and of their manifest; None if one does not exist."""
    found = {os.path.join(path, name): identity_at(fd, name) for name in names}
    manifest = identity_at(fd, stem + MANIFEST_SUFFIX)
    if manifest is not None:
        found[os.path.join(path, stem + MANIFEST_SUFFIX)] = manifest
    files = {file: identity for file, identity in found.items() if identity is not None}
    return files if len(files) == len(found) else None
