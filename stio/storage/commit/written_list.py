"""A list of what a save published, stored with the checkpoint: by it a later process can delete the checkpoint.

The list contains names relative to the checkpoint's directory, with the identities that `retention.py` compares. It is
read as untrusted data: it can name only files and directories below its own directory. A copy of a checkpoint on the
same filesystem is another directory, so its list is not valid.
"""

from __future__ import annotations

import json
import os
import stat
from contextlib import ExitStack, suppress
from typing import Any

from stio.errors import StorageError
from stio.storage.base import Identity
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.aside import KEPT_BY_SYSTEM
from stio.storage.commit.directory_lock import is_directory_lock, remove_free_lock
from stio.storage.commit.retention import WrittenFiles, remove_unchanged, survey
from stio.storage.commit.small_files import closing, read_small, status_at, write_small
from stio.storage.commit.target import directory_identity, identity_at
from stio.storage.paths import resolve_links

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
    try:
        with closing(calls.open_directory(directory)) as fd:
            found = survey(fd, "")
            device, _ = found.directories[""]
            text = {
                "version": _VERSION,
                "device": device,
                "directories": {name: inode for name, (_, inode) in found.directories.items()},
                "files": {name: [one.inode, one.nbytes, one.mtime_ns] for name, one in found.files.items()},
            }
            with closing(calls.open_directory(within if within and within in found.made else ".", dir_fd=fd)) as where:
                write_small(where, LIST_NAME, json.dumps(text).encode(), durable=False)
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise refused("writing the list of files", directory, error) from error


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
