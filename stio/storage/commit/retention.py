"""Deletes what a save has written, and nothing else.

A transaction records the identity of each file and directory that it published (`WrittenFiles`). A deletion compares
again: what another program has replaced, changed or added since stays, and a warning names it. A directory that the
save made, and that holds nothing else, disappears in one step; then its content is deleted. Directories and files are
first set aside (`staging_dir.py`) and compared there: what took the name, or was added, between a comparison and the
move is put back. A reader that opened the checkpoint before can read its open files to the end.

Each directory is opened by its path without links, one component at a time, and compared with the recorded one.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Iterator, Mapping, Set
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from stio.errors import listed, printable
from stio.format.naming import INDEX_SUFFIX, MANIFEST_SUFFIX
from stio.runtime.process import contextmanager
from stio.runtime.text import log
from stio.storage.base import Identity
from stio.storage.checks import refusals, refused, resolve_links
from stio.storage.commit import syscalls as calls
from stio.storage.commit.destination import DirectoryIdentity, directory_identity, identity_at
from stio.storage.commit.directory_lock import is_directory_lock, remove_free_lock
from stio.storage.commit.files import closing, remove_file
from stio.storage.commit.staging_dir import DELETED_PREFIX, KEPT_BY_SYSTEM, Aside, aside_directory, put_back


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
    removal = _Removal(written, spare)
    try:
        removal.run()
    except OSError as error:
        raise refused("deleting the old checkpoint", removal.path, error) from error


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
        self._ended: set[str] = set()  # directories of which nothing is left to do
        self._emptied: set[str] = set()  # directories in or below which files were removed
        self._warned: set[str] = set()
        self.path = next(iter(written.files), "")
        """What it works on, for messages."""

    def run(self) -> None:
        made = sorted(self._made)
        for path in made:
            if os.path.dirname(path) not in self._made:
                self._remove_whole(path)
        by_directory: dict[str, list[str]] = {}
        for path in self._files:
            by_directory.setdefault(os.path.dirname(path), []).append(path)
        for directory, paths in by_directory.items():
            if not self._has_ended(directory):
                names = [os.path.basename(path) for path in paths]
                # Without the index no reader takes the shards for a checkpoint.
                self._remove_files(directory, sorted(names, key=lambda name: not name.endswith(INDEX_SUFFIX)))
        for path in reversed(made):
            if not self._has_ended(path) and path in self._emptied:
                self._remove_empty(path)

    # Directories.

    def _remove_whole(self, path: str) -> None:
        """Delete a directory that the save made, if it holds only what was written with it."""
        parent, name = os.path.split(self._at(path))
        with self._opened(parent) as fd:
            if fd is None:
                self._ended.add(path)
                return
            with self._opened(path, name, fd) as below:
                if below is None:
                    self._ended.add(path)
                    return
                num_files, is_pure = self._compare(below, path, warn=True)
            if not (num_files and is_pure):
                return
            with ExitStack() as stack:
                try:
                    aside = stack.enter_context(aside_directory(fd))
                except OSError:  # the filesystem may be full; then its files are deleted one by one
                    return
                calls.rename(name, name, source_fd=fd, target_fd=aside.fd)
                if self._delete_aside(fd, aside, name, path):
                    self._ended.add(path)
                    return
                # It was exchanged, or something was put into it, since it was compared: its files go one by one.
                put_back(fd, parent, aside)
                self._warn(path, "another program is changing it")

    def _delete_aside(self, fd: int, aside: Aside, name: str, path: str) -> bool:
        """Delete a directory that is set aside, if it still is the one of this path and holds nothing else."""
        with self._opened(path, name, aside.fd) as below:
            if below is None or not self._compare(below, path, warn=False)[1]:
                return False
        deleted = f"{DELETED_PREFIX}{secrets.token_hex(5)}"
        calls.rename(name, deleted, source_fd=aside.fd, target_fd=fd)
        is_pure = self._clear(fd, deleted, path)
        if not is_pure:
            with suppress(FileNotFoundError):
                calls.rename(deleted, name, source_fd=fd, target_fd=aside.fd)
        return is_pure

    def _compare(self, fd: int, path: str, *, warn: bool) -> tuple[int, bool]:
        """Return how many of the files are in a directory and below it, and whether nothing else is."""
        num_files, is_pure, added = 0, True, []
        for name in sorted(os.listdir(fd)):
            below = os.path.join(path, name)
            if is_directory_lock(name):
                remove_free_lock(fd, name)
                is_pure = is_pure and not calls.exists(name, dir_fd=fd)
            elif below in self._files:
                is_own = _is_same(self._files[below], identity_at(fd, name))
                num_files, is_pure = num_files + is_own, is_pure and is_own
            elif below in self._made:
                with self._opened(below, name, fd) as opened:
                    inside = (0, False) if opened is None else self._compare(opened, below, warn=warn)
                num_files, is_pure = num_files + inside[0], is_pure and inside[1]
            elif not name.startswith(KEPT_BY_SYSTEM):
                is_pure = False
                if not any(file == below or file.startswith(f"{below}{os.sep}") for file in self._spare):
                    added.append(name)
        if added and warn:
            self._warn(path, f"it holds what its save did not write: {listed(added)}")
        return num_files, is_pure

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
        parent, name = os.path.split(self._at(path))
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
        with self._opened(self._at(directory)) as fd:
            if fd is None:
                return
            own = []
            for name in names:
                found = identity_at(fd, name)
                if found is None and not calls.exists(name, dir_fd=fd):
                    continue
                if _is_same(self._files[os.path.join(directory, name)], found):
                    own.append(name)
                else:
                    self._warn_changed(directory, name)
            if own:
                self._unlink(fd, directory, own)
                while directory and directory not in self._emptied:
                    self._emptied.add(directory)
                    directory = os.path.dirname(directory)

    def _unlink(self, fd: int, directory: str, names: list[str]) -> None:
        with ExitStack() as stack:
            try:
                aside = stack.enter_context(aside_directory(fd))
            except OSError:  # the filesystem may be full
                for name in names:
                    remove_file(fd, name)
                return
            for name in names:
                recorded = self._files[os.path.join(directory, name)]
                try:
                    calls.rename(name, name, source_fd=fd, target_fd=aside.fd)
                except FileNotFoundError:  # another program has removed the new directory, or the file
                    if _is_same(recorded, identity_at(fd, name)):
                        remove_file(fd, name)
                    continue
                if _is_same(recorded, identity_at(aside.fd, name)):
                    remove_file(aside.fd, name)
                else:
                    put_back(fd, directory, aside)
                    self._warn_changed(directory, name)

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

    def _at(self, path: str) -> str:
        self.path = path
        return path

    def _has_ended(self, path: str) -> bool:
        return any(path == ended or path.startswith(f"{ended}{os.sep}") for ended in self._ended)

    def _warn_changed(self, directory: str, name: str) -> None:
        path = os.path.join(directory, name)
        if path not in self._spare:
            self._warn(path, "another program has replaced or changed it")

    def _warn(self, path: str, reason: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            log(logging.WARNING, "%s stays, although its checkpoint is to be deleted: %s", printable(path), reason)


def _is_same(recorded: Identity, found: Identity | None) -> bool:
    if found is None or recorded == found:
        return found is not None
    # A record from another start of the machine has no inode that could be compared.
    has_inode = recorded.device or recorded.inode
    return not has_inode and (recorded.nbytes, recorded.mtime_ns) == (found.nbytes, found.mtime_ns)
