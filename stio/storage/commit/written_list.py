"""What an earlier process published, so that this one can delete it (`WrittenFiles`).

A list that is stored with the checkpoint contains names relative to the checkpoint's directory, with the identities
that `retention.py` compares. It is read as untrusted data: it can name only files and directories below its own
directory. A copy of a checkpoint on the same filesystem is another directory, so its list is not valid.

Without a list (`find_earlier_saves`) only complete checkpoints count, and only the files that belong to them: an index,
its shards, one file, a manifest.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

from stio.errors import StioError
from stio.format.index import parse_index
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX, MANIFEST_SUFFIX, is_shard_name
from stio.storage.base import Identity
from stio.storage.checks import refusals, resolve_links
from stio.storage.commit import syscalls as calls
from stio.storage.commit.destination import DirectoryIdentity, directory_identity, identity_at
from stio.storage.commit.directory_lock import is_directory_lock, remove_free_lock
from stio.storage.commit.files import MAX_INDEX_BYTES, closing, read_small, status_at, write_small
from stio.storage.commit.retention import WrittenFiles, remove_unchanged, survey
from stio.storage.commit.staging_dir import KEPT_BY_SYSTEM

LIST_NAME = ".stio-written.json"
"""Name of the list."""

_VERSION = 1
_MAX_BYTES = 64 << 20


def write_list(directory: str, within: str) -> None:
    """Write the list of all files of a directory that is complete, before it is published; its sync is the caller's.

    Args:
        directory: The directory, a path without links.
        within: Name of a directory in it that will hold the list; if it does not exist, or if this is empty, the
            directory itself.

    Raises:
        StorageError: The operating system reported an error.
    """
    with refusals("writing the list of files", directory), closing(calls.open_directory(directory)) as fd:
        found = survey(fd, "")
        text = {
            "version": _VERSION,
            "device": found.directories[""][0],
            "directories": {name: inode for name, (_, inode) in found.directories.items()},
            "files": {name: [one.inode, one.nbytes, one.mtime_ns] for name, one in found.files.items()},
        }
        with closing(calls.open_directory(within if within and within in found.made else ".", dir_fd=fd)) as where:
            write_small(where, LIST_NAME, json.dumps(text).encode(), durable=False)


def read_list(directory: str, within: str) -> WrittenFiles | None:
    """Return what a save published to a directory, None if there is no list that is valid for it.

    Args:
        directory: The directory. Links to its parent are followed; a link in its place has no list.
        within: See `write_list`.
    """
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        parent, name = os.path.split(os.path.abspath(directory))
        real = os.path.join(resolve_links(parent), name)
        with closing(calls.open_directory(real)) as fd:
            for folder in (within or ".", "."):
                own, raw = _read_in(fd, folder)
                if own is not None and raw is not None:
                    found = _parsed(json.loads(raw), real, directory_identity(fd))
                    path = os.path.normpath(os.path.join(real, folder, LIST_NAME))
                    return (
                        None
                        if found is None
                        else WrittenFiles({**found.files, path: own}, found.directories, found.made)
                    )
    return None


def merge_replaced(aside: str, aside_fd: int, home_fd: int, name: str) -> bool:
    """Delete what a save published in a directory, and move what others have added into the one that replaced it.

    Without a valid list nothing is changed. What is in the list and was changed since stays where it is, and so does
    what has the name of a new file.

    Args:
        aside: Path of the directory that holds the old directory.
        aside_fd: The same.
        home_fd: The directory that holds the new one.
        name: Name of both.

    Returns:
        Whether nothing of the old directory has to be kept.

    Raises:
        OSError: The operating system reported an error.
    """
    path = os.path.join(aside, name)
    written = _found_list(path, aside_fd, name)
    if written is None:
        return False
    # The list is deleted last: after a crash in between it still says what the save has written.
    others = {file: one for file, one in written.files.items() if os.path.basename(file) != LIST_NAME}
    remove_unchanged(aside_fd, name, path, WrittenFiles(others, written.directories, written.made))
    with ExitStack() as stack:
        stack.enter_context(suppress(FileNotFoundError, NotADirectoryError))
        old, new = (stack.enter_context(closing(calls.open_directory(name, dir_fd=fd))) for fd in (aside_fd, home_fd))
        _move_added(old, new, path, written)
    return remove_unchanged(aside_fd, name, path, written)


def _found_list(path: str, dir_fd: int, name: str) -> WrittenFiles | None:
    """Return the valid list of a directory, which may be in each of the directories in it."""
    try:
        with closing(calls.open_directory(name, dir_fd=dir_fd)) as fd:
            folders = [one for one in sorted(os.listdir(fd)) if _read_in(fd, one)[1] is not None]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next((found for within in ("", *folders) if (found := read_list(path, within)) is not None), None)


def _move_added(old: int, new: int, path: str, written: WrittenFiles) -> None:
    """Move what a save has not written from one directory into another, where no file has its name."""
    for name in sorted(os.listdir(old)):
        below = os.path.join(path, name)
        if is_directory_lock(name):
            remove_free_lock(old, name)
        elif below not in written.files and not name.startswith(KEPT_BY_SYSTEM):
            with suppress(OSError):  # it stays
                _move_one(old, new, name, below, written)


def _move_one(old: int, new: int, name: str, path: str, written: WrittenFiles) -> None:
    found = status_at(old, name)
    is_directory = found is not None and stat.S_ISDIR(found.st_mode)
    is_made = False
    if path in written.made:
        with suppress(FileExistsError):
            calls.make_directory(name, dir_fd=new)
            is_made = True
    else:
        try:
            calls.rename_new(name, name, source_fd=old, target_fd=new, is_directory=is_directory)
            return
        except OSError:
            if not is_directory:
                raise
    with ExitStack() as stack:
        inner, target = (stack.enter_context(closing(calls.open_directory(name, dir_fd=fd))) for fd in (old, new))
        _move_added(inner, target, path, written)
    if is_made:
        with suppress(OSError):
            calls.remove_directory(name, dir_fd=new)  # if nothing was moved into it
    if path not in written.made:
        calls.remove_directory(name, dir_fd=old)


def _read_in(fd: int, folder: str) -> tuple[Identity | None, bytes | None]:
    """Return identity and content of the list in a directory below another one."""
    try:
        with closing(calls.open_directory(folder, dir_fd=fd)) as where:
            return identity_at(where, LIST_NAME), read_small(where, LIST_NAME, _MAX_BYTES)
    except OSError:
        return None, None


def _parsed(text: Any, path: str, identity: tuple[int, int]) -> WrittenFiles | None:
    device = int(text["device"])
    # After a move to another filesystem, or on one without stable inodes, there is none to compare.
    has_inodes = device == identity[0] != 0
    if text["version"] != _VERSION or (has_inodes and int(text["directories"][""]) != identity[1]):
        return None
    directories = {
        _below(path, name) if name else path: (device, int(inode)) if has_inodes else (0, 0)
        for name, inode in text["directories"].items()
    }
    files = {
        _below(path, name): Identity(*((device, int(inode)) if has_inodes else (0, 0)), int(nbytes), int(mtime_ns))
        for name, (inode, nbytes, mtime_ns) in text["files"].items()
    }
    return WrittenFiles(files, directories, directories.keys())


def _below(path: str, name: str) -> str:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"not a name below the directory: {name!r}")
    return os.path.join(path, *parts)


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
    with refusals("looking for earlier checkpoints", directory), suppress(FileNotFoundError):
        root = resolve_links(directory)
        with closing(calls.open_directory(root)) as fd:
            return [*_found(fd, root, {}, _DEEPEST)]
    return []


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
