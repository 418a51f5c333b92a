"""A whole directory in the place of another: the old one is set aside, and what its save did not write is kept.

A list that is stored with the checkpoint says what its save has written. It contains names relative to the checkpoint's
directory, with the identities that `retention.py` compares. It is read as untrusted data: it can name only files and
directories below its own directory. A copy of a checkpoint on the same filesystem is another directory, so its list is
not valid.

The old directory is moved under its own name into a new directory, `.stio-aside-<id>`. If the save dies, recovery puts
it back. If the name is in use by then, what is in the list and unchanged is deleted, and what others have added moves
into the new directory. If anything is left, it gets a name `.stio-kept-<id>`,
which nothing in stio deletes, and a warning says so.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

from stio.errors import printable
from stio.runtime.contexts import contextmanager
from stio.runtime.log import log
from stio.storage.base import Identity
from stio.storage.checks import refusals, resolve_links
from stio.storage.commit import syscalls as calls
from stio.storage.commit.destination import directory_identity, identity_at
from stio.storage.commit.directory_lock import is_directory_lock, remove_free_lock
from stio.storage.commit.files import closing, read_small, remove_file, status_at, write_small
from stio.storage.commit.retention import WrittenFiles, is_below_any, is_unchanged, survey
from stio.storage.commit.staging_dir import DELETED_PREFIX, KEPT_BY_SYSTEM, rename_for_deletion

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


def read_list(directory: str) -> WrittenFiles | None:
    """Return what a save published to a directory, None if there is no valid list in it, or in a directory in it.

    Args:
        directory: The directory. Links to its parent are followed; a link in its place has no list.
    """
    with suppress(OSError):
        parent, name = os.path.split(os.path.abspath(directory))
        real = os.path.join(resolve_links(parent), name)
        with closing(calls.open_directory(real)) as fd:
            for folder in (".", *sorted(os.listdir(fd))):
                with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
                    with closing(calls.open_directory(folder, dir_fd=fd)) as where:
                        own, raw = identity_at(where, LIST_NAME), read_small(where, LIST_NAME, _MAX_BYTES)
                    if own is not None and raw is not None:
                        path = os.path.normpath(os.path.join(real, folder, LIST_NAME))
                        written = _parsed(json.loads(raw), real, directory_identity(fd), {path: own})
                        if written is not None:
                            return written
    return None


def _parsed(text: Any, path: str, identity: tuple[int, int], own: dict[str, Identity]) -> WrittenFiles | None:
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
    return WrittenFiles(files | own, directories, directories.keys())


def _below(path: str, name: str) -> str:
    parts = name.split("/")
    if any(part in ("", ".", "..") for part in parts):
        raise ValueError(f"not a name below the directory: {name!r}")
    return os.path.join(path, *parts)


ASIDE_PREFIX = ".stio-aside-"
"""Prefix of the name of a directory for what is set aside."""

KEPT_PREFIX = ".stio-kept-"
"""Prefix of the name of what could not be put back."""


class Aside(NamedTuple):
    """An open directory for what is set aside."""

    name: str
    """Its name in the directory that holds it."""
    fd: int
    """The directory itself."""


@contextmanager
def aside_directory(home_fd: int) -> Iterator[Aside]:
    """Make a directory for what is set aside. At the end it is removed if it is empty.

    Args:
        home_fd: The directory that will hold it; the caller has its lock, for which recovery waits.

    Raises:
        OSError: The operating system reported an error.
    """
    name = f"{ASIDE_PREFIX}{secrets.token_hex(5)}"
    calls.make_directory(name, dir_fd=home_fd, mode=0o700)
    with closing(calls.open_directory(name, dir_fd=home_fd)) as fd:
        try:
            yield Aside(name, fd)
        finally:
            remove_aside(home_fd, Aside(name, fd))


def entries(aside: Aside) -> list[str]:
    """Return the names of what is set aside."""
    return [name for name in sorted(os.listdir(aside.fd)) if not name.startswith(KEPT_BY_SYSTEM)]


def remove_aside(home_fd: int, aside: Aside) -> None:
    """Remove the directory if nothing is left in it. Never raises."""
    with suppress(OSError):
        if not entries(aside):
            try:
                calls.remove_directory(aside.name, dir_fd=home_fd)
            except OSError:
                rename_for_deletion(home_fd, aside.name)  # the system keeps a file; the next recovery deletes it


def put_back(home_fd: int, home: str, aside: Aside) -> None:
    """Put all that is set aside back to its names. Where a name is in use by now, keep what no save has written.

    Args:
        home_fd: The directory that it comes from.
        home: Path of this directory.
        aside: Where it is.

    Raises:
        OSError: The operating system reported an error.
    """
    for name in entries(aside):
        status = status_at(aside.fd, name)
        is_directory = status is not None and stat.S_ISDIR(status.st_mode)
        try:
            calls.rename_new(name, name, source_fd=aside.fd, target_fd=home_fd, is_directory=is_directory)
            continue
        except FileNotFoundError:
            continue
        except OSError:
            if not calls.exists(name, dir_fd=home_fd):
                raise
        path = os.path.join(home, aside.name, name)
        is_merged = False
        if is_directory and (written := read_list(path)) is not None:
            with suppress(OSError):
                is_merged = _merge(aside.fd, home_fd, name, path, written)
        if is_merged:
            with suppress(FileNotFoundError):  # if it is there, it holds only what the system keeps
                deleted = f"{DELETED_PREFIX}{secrets.token_hex(5)}"
                calls.rename(name, deleted, source_fd=aside.fd, target_fd=home_fd)
            continue
        kept = f"{KEPT_PREFIX}{secrets.token_hex(5)}"
        calls.rename(name, kept, source_fd=aside.fd, target_fd=home_fd)
        log(
            logging.WARNING,
            "%s was replaced; what stio did not write, or others have changed, is kept as %s",
            printable(os.path.join(home, name)),
            printable(os.path.join(home, kept)),
        )


def _merge(old_dir_fd: int, new_dir_fd: int, name: str, path: str, written: WrittenFiles) -> bool:
    """Delete what a save published in a directory, and move what others have added into the one that replaced it.

    What was changed since stays where it is, and so does what has the name of a new file.

    Args:
        old_dir_fd: The directory that holds the old one.
        new_dir_fd: The directory that holds the new one, which is made for the time if there is none.
        name: Name of both.
        path: Path of the old one in `written`.
        written: What the save published.

    Returns:
        Whether nothing has to be kept; then the old one is removed, if that is possible.

    Raises:
        OSError: The operating system reported an error.
    """
    is_made = not calls.exists(name, dir_fd=new_dir_fd)
    if is_made:
        calls.make_directory(name, dir_fd=new_dir_fd)
    try:
        with ExitStack() as stack:
            old, new = (
                stack.enter_context(closing(calls.open_directory(name, dir_fd=fd))) for fd in (old_dir_fd, new_dir_fd)
            )
            # The list is deleted last: after a crash in between it still says what the save has written.
            last = next(file for file in written.files if os.path.basename(file) == LIST_NAME)
            order = sorted((is_below_any(last, [os.path.join(path, entry)]), entry) for entry in os.listdir(old))
            kept = [
                entry for _, entry in order if not _merge_entry(old, new, entry, os.path.join(path, entry), written)
            ]
    finally:
        if is_made:
            with suppress(OSError):  # something was moved into it
                calls.remove_directory(name, dir_fd=new_dir_fd)
    if not kept:
        with suppress(OSError):  # it holds what the system keeps
            calls.remove_directory(name, dir_fd=old_dir_fd)
    return not kept


def _merge_entry(old: int, new: int, name: str, path: str, written: WrittenFiles) -> bool:
    """Delete or move one entry of a directory that was replaced; return whether nothing of it has to be kept."""
    if is_directory_lock(name):
        remove_free_lock(old, name)
        return not calls.exists(name, dir_fd=old)
    if name.startswith(KEPT_BY_SYSTEM):
        return True
    with suppress(OSError):  # it stays
        if path in written.files:
            if not is_unchanged(written.files[path], identity_at(old, name)):
                return False
            remove_file(old, name)
            return True
        status = status_at(old, name)
        is_directory = status is not None and stat.S_ISDIR(status.st_mode)
        if path not in written.made:
            with suppress(OSError):
                calls.rename_new(name, name, source_fd=old, target_fd=new, is_directory=is_directory)
                return True
        return is_directory and _merge(old, new, name, path, written)
    return False
