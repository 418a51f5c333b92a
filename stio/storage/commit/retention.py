"""Deletes what a save has written, and nothing else; finds what earlier processes have saved.

A transaction records the identity of each file and directory that it published (`WrittenFiles`). A deletion compares
once more: what another program has replaced, changed or added since stays, and a warning names it. Only a change
between that comparison and the deletion, within microseconds, is not noticed. A directory that the save made, and that
holds nothing else, disappears in one step; then its content is deleted. A reader that opened the checkpoint before can
read its open files to the end.

Each directory is opened by its path without links, one component at a time, and compared with the recorded one. What
earlier processes have saved (`find_earlier_saves`) has no record: only complete checkpoints count, and only the files
that belong to them: an index, its shards, one file, a manifest.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field

from stio.errors import StioError, listed, printable
from stio.format.index import parse_index
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX, MANIFEST_SUFFIX, is_shard_name
from stio.runtime.contexts import contextmanager
from stio.runtime.log import log
from stio.storage.base import Identity
from stio.storage.checks import refusals, resolve_links
from stio.storage.commit import syscalls as calls
from stio.storage.commit.destination import DirectoryIdentity, directory_identity, identity_at
from stio.storage.commit.directory_lock import is_directory_lock, remove_free_lock
from stio.storage.commit.files import MAX_INDEX_BYTES, closing, read_small, remove_file
from stio.storage.commit.staging_dir import DELETED_PREFIX, KEPT_BY_SYSTEM


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
    with refusals("deleting the old checkpoint", next(iter(written.files), "")):
        _Removal(written, spare).run()


class _Removal:
    """One call of `remove_checkpoint`."""

    def __init__(self, written: WrittenFiles, spare: Set[str]) -> None:
        self._files, self._directories, self._made = written.files, written.directories, written.made
        self._spare = spare
        self._warned: set[str] = set()

    def run(self) -> None:
        tops = [path for path in self._made if os.path.dirname(path) not in self._made]
        ended = [path for path in sorted(tops) if self._remove_whole(path)]
        by_directory: dict[str, list[str]] = {}
        for path in self._files:
            if not is_below_any(path, ended):
                by_directory.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
        emptied = [directory for directory, names in by_directory.items() if self._remove_files(directory, names)]
        for path in sorted(self._made, reverse=True):
            if any(is_below_any(directory, [path]) for directory in emptied):
                self._remove_empty(path)

    def _remove_whole(self, path: str) -> bool:
        """Delete a directory that the save made, if it holds only what was written with it.

        Returns:
            Whether nothing is left to do in it.
        """
        parent, name = os.path.split(path)
        with self._opened(parent) as fd:
            if fd is None:
                return True
            with self._opened(path, name, fd) as below:
                if below is None:
                    return True
                num_files, is_pure = self._compare(below, path)
            if not (num_files and is_pure):
                return False
            deleted = f"{DELETED_PREFIX}{secrets.token_hex(5)}"
            try:
                calls.rename(name, deleted, source_fd=fd, target_fd=fd)
            except OSError:  # the filesystem may be full; then its files are deleted one by one
                return False
            calls.remove_tree(deleted, dir_fd=fd)  # what cannot be deleted is left to the next recovery
            return True

    def _compare(self, fd: int, path: str) -> tuple[int, bool]:
        """Return how many of the files are in a directory and below it, and whether nothing else is."""
        num_files, is_pure, added = 0, True, []
        for name in sorted(os.listdir(fd)):
            below = os.path.join(path, name)
            if is_directory_lock(name):
                remove_free_lock(fd, name)
                is_pure = is_pure and not calls.exists(name, dir_fd=fd)
            elif below in self._files:
                is_own = is_unchanged(self._files[below], identity_at(fd, name))
                num_files, is_pure = num_files + is_own, is_pure and is_own
            elif below in self._made:
                with self._opened(below, name, fd) as opened:
                    inside = (0, False) if opened is None else self._compare(opened, below)
                num_files, is_pure = num_files + inside[0], is_pure and inside[1]
            elif not name.startswith(KEPT_BY_SYSTEM):
                is_pure = False
                if not any(is_below_any(file, [below]) for file in self._spare):
                    added.append(name)
        if added:
            self._warn(path, f"it holds what its save did not write: {listed(added)}")
        return num_files, is_pure

    def _remove_files(self, directory: str, names: list[str]) -> bool:
        """Delete files of one directory that are those of the save; return whether there were any."""
        is_any_removed = False
        with self._opened(directory) as fd:
            # Without the index no reader takes the shards for a checkpoint.
            for name in sorted(names, key=lambda name: not name.endswith(INDEX_SUFFIX)) if fd is not None else ():
                path, now = os.path.join(directory, name), identity_at(fd, name)
                if is_unchanged(self._files[path], now):
                    remove_file(fd, name)
                    is_any_removed = True
                elif path not in self._spare and (now is not None or calls.exists(name, dir_fd=fd)):
                    self._warn(path, "another program has replaced or changed it")
        return is_any_removed

    def _remove_empty(self, path: str) -> None:
        """Delete a directory that the save made, if it is empty and the same one."""
        parent, name = os.path.split(path)
        with self._opened(parent) as fd:
            if fd is None:
                return
            with self._opened(path, name, fd) as below:
                is_own = below is not None
            if is_own:
                with suppress(OSError):  # it is not empty
                    calls.remove_directory(name, dir_fd=fd)

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
            recorded = self._directories.get(path, (0, 0))
            is_same = recorded == (0, 0) or recorded == directory_identity(fd)
            if not is_same:
                self._warn(path, "another directory has its name")
            yield fd if is_same else None

    def _warn(self, path: str, reason: str) -> None:
        if path not in self._warned:
            self._warned.add(path)
            log(logging.WARNING, "%s stays, although its checkpoint is to be deleted: %s", printable(path), reason)


def is_below_any(path: str, directories: Iterable[str]) -> bool:
    """Return whether a path is one of these directories, or below one."""
    return any(path == directory or path.startswith(os.path.join(directory, "")) for directory in directories)


def is_unchanged(recorded: Identity, now: Identity | None) -> bool:
    """Return whether what has a name now is the recorded file."""
    if now is None or recorded == now:
        return now is not None
    # A record from another start of the machine has no inode that could be compared.
    has_inode = recorded.device or recorded.inode
    return not has_inode and (recorded.nbytes, recorded.mtime_ns) == (now.nbytes, now.mtime_ns)


# Checkpoints of earlier processes.


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
