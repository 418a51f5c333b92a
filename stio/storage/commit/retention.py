"""Deletes what a save has written, and nothing else.

A transaction records the identity of each file and directory that it published (`WrittenFiles`). A deletion compares
again: what another program has replaced, changed or added since stays, and a warning names it. A directory that the
save made, and that holds nothing else, disappears in one step: it gets a name for directories that are being deleted.
Then its content is compared once more and deleted. A file is deleted right after its comparison: what another program
puts in its place between these two calls is deleted too. A reader that opened the checkpoint before can read its open
files to the end.

Each directory is opened by its path without links, one component at a time, and compared with the recorded one.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from stio.errors import listed, printable
from stio.format.naming import INDEX_SUFFIX, MANIFEST_SUFFIX
from stio.runtime.log import log
from stio.storage.base import Identity
from stio.storage.checks import refusals, resolve_links
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import is_directory_lock, remove_free_lock
from stio.storage.commit.files import closing, remove_file
from stio.storage.commit.staging_dir import DELETED_PREFIX, KEPT_BY_SYSTEM
from stio.storage.commit.target import DirectoryIdentity, directory_identity, identity_at


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What a save published, by path without links."""

    files: Mapping[str, Identity] = field(default_factory=dict)
    """Its files."""
    directories: Mapping[str, DirectoryIdentity] = field(default_factory=dict)
    """The directories that hold them, and those above that the save worked in."""
    made: Set[str] = frozenset()
    """Those of the directories that the save made."""

    def remove(self, *, spare: Set[str] = frozenset()) -> None:
        """Delete it; see `remove_checkpoint`."""
        remove_checkpoint(self, spare=spare)


def survey(fd: int, path: str) -> WrittenFiles:
    """Return all files and directories of a directory that the save has made, before it is published.

    Args:
        fd: The directory.
        path: Path that it will have.

    Raises:
        OSError: The operating system reported an error.
    """
    files: dict[str, Identity] = {}
    directories = {path: directory_identity(fd)}
    for name in sorted(os.listdir(fd)):
        below = os.path.join(path, name)
        found = identity_at(fd, name)
        if found is not None:
            files[below] = found
        elif stat.S_ISDIR(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
            with closing(calls.open_directory(name, dir_fd=fd)) as opened:
                deeper = survey(opened, below)
            files |= deeper.files
            directories |= deeper.directories
    return WrittenFiles(files, directories, frozenset(directories))


def describe_file(path: str) -> WrittenFiles:
    """Return one file and its manifest as what a save published; they are compared with this when they are deleted.

    Args:
        path: The file. Links to its directory are followed; if it is a link itself, the link is described.

    Raises:
        StorageError: The operating system reported an error.
    """
    folder, name = os.path.split(path)
    files, directories = {}, {}
    with refusals("examining the checkpoint", path), suppress(FileNotFoundError):
        where = resolve_links(folder or ".")
        with closing(calls.open_directory(where)) as fd:
            directories[where] = directory_identity(fd)
            for file in (name, f"{name}{MANIFEST_SUFFIX}"):
                found = identity_at(fd, file)
                if found is not None:
                    files[os.path.join(where, file)] = found
    return WrittenFiles(files, directories)


def remove_checkpoint(written: WrittenFiles, *, spare: Set[str] = frozenset()) -> None:
    """Delete what a save published, as far as it is unchanged. What does not exist any more is no error.

    Args:
        written: What it published.
        spare: Paths of files that newer checkpoints consist of. No warning names them.

    Raises:
        StorageError: The operating system reported an error.
    """
    with refusals("deleting the old checkpoint", next(iter(written.files), ""), caught=(OSError,)):
        _Removal(written, spare).run()


def remove_unchanged(dir_fd: int, name: str, path: str, written: WrittenFiles) -> bool:
    """Delete what a save published in a directory, as far as it is unchanged; and the directory, if it is empty.

    Args:
        dir_fd: The directory that holds it.
        name: Its name there.
        path: Its path in `written`.
        written: What the save published.

    Returns:
        Whether it held nothing else.

    Raises:
        OSError: The operating system reported an error.
    """
    return _Removal(written, frozenset())._clear(dir_fd, name, path)


class _Removal:
    """One call of `remove_checkpoint`."""

    def __init__(self, written: WrittenFiles, spare: Set[str]) -> None:
        self._files, self._directories, self._made = written.files, written.directories, written.made
        self._spare = spare
        self._warned: set[str] = set()

    def run(self) -> None:
        made = sorted(self._made)
        for path in made:
            if os.path.dirname(path) not in self._made:
                self._remove_whole(path)
        by_directory: dict[str, list[str]] = {}
        for path in self._files:
            by_directory.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
        for directory, names in by_directory.items():
            # Without the index no reader takes the shards for a checkpoint.
            self._remove_files(directory, sorted(names, key=lambda name: not name.endswith(INDEX_SUFFIX)))
        for path in reversed(made):
            self._remove_empty(path)

    # Directories.

    def _remove_whole(self, path: str) -> None:
        """Delete a directory that the save made, if it holds only what was written with it."""
        parent, name = os.path.split(path)
        with self._opened(parent) as fd:
            if fd is None:
                return
            with self._opened(path, name, fd) as below:
                if below is None or not self._is_pure(below, path):
                    return
            deleted = f"{DELETED_PREFIX}{secrets.token_hex(5)}"
            calls.rename(name, deleted, source_fd=fd, target_fd=fd)
            if not self._clear(fd, deleted, path):  # something was added since it was compared
                with suppress(OSError):
                    calls.rename_new(deleted, name, source_fd=fd, target_fd=fd)

    def _is_pure(self, fd: int, path: str) -> bool:
        """Return whether a directory, and what is below it, holds nothing but files of the save."""
        is_pure, added = True, []
        for name in sorted(os.listdir(fd)):
            below = os.path.join(path, name)
            if is_directory_lock(name):
                remove_free_lock(fd, name)
                is_pure = is_pure and not calls.exists(name, dir_fd=fd)
            elif below in self._files:
                is_pure = is_pure and _is_same(self._files[below], identity_at(fd, name))
            elif below in self._made:
                with self._opened(below, name, fd) as opened:
                    is_pure = opened is not None and self._is_pure(opened, below) and is_pure
            elif not name.startswith(KEPT_BY_SYSTEM):
                is_pure = False
                if not any(file == below or file.startswith(f"{below}{os.sep}") for file in self._spare):
                    added.append(name)
        if added:
            self._warn(path, f"it holds what its save did not write: {listed(added)}")
        return is_pure

    def _clear(self, dir_fd: int, name: str, path: str) -> bool:
        """Delete a directory with its files, if it is the one of this path; return whether it holds nothing else."""
        is_pure = True
        try:
            fd = calls.open_directory(name, dir_fd=dir_fd)
        except FileNotFoundError:
            return True  # a recovery has deleted it
        except NotADirectoryError:
            return False
        with closing(fd):
            if not self._is_directory(fd, path):
                return False
            for entry in sorted(os.listdir(fd)):
                below = os.path.join(path, entry)
                if below in self._files and _is_same(self._files[below], identity_at(fd, entry)):
                    remove_file(fd, entry)
                elif not calls.exists(entry, dir_fd=fd):
                    continue
                elif below in self._made:
                    is_pure = self._clear(fd, entry, below) and is_pure
                elif not entry.startswith(KEPT_BY_SYSTEM):
                    is_pure = False
        if is_pure:
            # What the system keeps there goes later: by its name, the directory belongs to the next recovery.
            with suppress(OSError):
                calls.remove_directory(name, dir_fd=dir_fd)
        return is_pure

    def _remove_empty(self, path: str) -> None:
        """Delete a directory that the save made, if it is empty and the same one."""
        parent, name = os.path.split(path)
        with self._opened(parent) as fd:
            if fd is None:
                return
            with self._opened(path, name, fd) as below:
                is_own = below is not None and not os.listdir(below)
            if is_own:
                with suppress(OSError):  # a file was added in this moment
                    calls.remove_directory(name, dir_fd=fd)

    # Files.

    def _remove_files(self, directory: str, names: list[str]) -> None:
        """Delete files of one directory that are those of the save."""
        with self._opened(directory) as fd:
            if fd is None:
                return
            for name in names:
                found = identity_at(fd, name)
                if _is_same(self._files[os.path.join(directory, name)], found):
                    remove_file(fd, name)
                elif found is not None or calls.exists(name, dir_fd=fd):
                    self._warn(os.path.join(directory, name), "another program has replaced or changed it")

    # Comparing.

    @contextmanager
    def _opened(self, path: str, name: str = "", dir_fd: int | None = None) -> Iterator[int | None]:
        """Open a directory, by its path or in another one; None if it does not exist, or is not the recorded one."""
        try:
            fd = calls.open_directory(name or path, dir_fd=dir_fd)
        except OSError as error:
            if not isinstance(error, FileNotFoundError):
                if dir_fd is None and not isinstance(error, NotADirectoryError):
                    raise
                self._warn(path, "it is a link, or no directory")
            yield None
            return
        with closing(fd):
            yield fd if self._is_directory(fd, path, warn=True) else None

    def _is_directory(self, fd: int, path: str, *, warn: bool = False) -> bool:
        recorded = self._directories.get(path, (0, 0))
        is_same = recorded == (0, 0) or recorded == directory_identity(fd)
        if warn and not is_same:
            self._warn(path, "another directory has its name")
        return is_same

    def _warn(self, path: str, reason: str) -> None:
        if path not in self._warned and path not in self._spare:
            self._warned.add(path)
            log(logging.WARNING, "%s stays, although its checkpoint is to be deleted: %s", printable(path), reason)


def _is_same(recorded: Identity, found: Identity | None) -> bool:
    if found is None or recorded == found:
        return found is not None
    # A record from another start of the machine has no inode that could be compared.
    has_inode = recorded.device or recorded.inode
    return not has_inode and (recorded.nbytes, recorded.mtime_ns) == (found.nbytes, found.mtime_ns)
