"""What saves have written in a directory: it is deleted, or replaced by a whole directory, and nothing else is.

A transaction records the identity of each file and directory that it published (`WrittenFiles`). A deletion compares
once more: what another program has replaced, changed or added since stays, and a warning names it. Only what arrives
between that comparison and the deletion, within microseconds, is lost. A directory that the save made, and that holds
nothing else, disappears in one step; then its content is deleted. A reader that opened the checkpoint before can read
its open files to the end. Each directory is opened by its path without links, one component at a time, and compared
with the recorded one.

What earlier processes have saved has no such record. Complete checkpoints are found by their names
(`find_earlier_saves`): an index, its shards, one file, a manifest. A list that is stored with a checkpoint
(`WrittenFiles.store_list`) contains names relative to its directory, with the identities that a deletion compares. It
is read as untrusted data: it can name only files and directories below its own directory. A copy on the same
filesystem is another directory, so its list is not valid.

A directory that another one replaces is moved under its own name into the staging directory of that one. If the save
dies, recovery puts it back. If the name is in use by then, what is in the list and unchanged is deleted. If anything is
left, it gets a name `.stio-kept-<id>`, which nothing in stio deletes, and a warning says so.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from stio.errors import StioError, StorageError, listed, printable
from stio.format.files import FILE_SUFFIX, INDEX_SUFFIX, MANIFEST_SUFFIX, FileName, parse_index
from stio.process import contextmanager
from stio.storage.base import Identity
from stio.storage.checks import refusals, resolve_links
from stio.storage.commit import syscalls as calls
from stio.storage.commit.destination import DirectoryIdentity, directory_identity, identities_at, identity_at
from stio.storage.commit.directory_lock import is_directory_lock, remove_free_lock
from stio.storage.commit.files import MAX_INDEX_BYTES, closing, read_small, status_at, write_small
from stio.storage.commit.journal import DELETED_PREFIX, KEPT_BY_SYSTEM
from stio.text import log


@dataclass(frozen=True, slots=True)
class WrittenFiles:
    """What a save published, by path without links."""

    files: Mapping[str, Identity] = field(default_factory=dict)
    """Its files."""
    directories: Mapping[str, DirectoryIdentity] = field(default_factory=dict)
    """The directories that hold them, and those above that the save worked in."""
    made: Set[str] = frozenset()
    """Those of the directories that the save made."""

    @classmethod
    def of_file(cls, path: str) -> Self:
        """Return one file and its manifest as what a save published; a deletion compares them with this.

        Args:
            path: The file. Links to its directory are followed; if it is a link itself, the link is described.

        Raises:
            StorageError: The operating system reported an error.
        """
        folder, name = os.path.split(path)
        with refusals("examining the checkpoint", path), suppress(FileNotFoundError):
            where = resolve_links(folder or ".")
            with closing(calls.open_directory(where)) as fd:
                files = _identities(fd, where, [name, name + MANIFEST_SUFFIX])
                return cls(files, {where: directory_identity(fd)})
        return cls()

    def is_whole(self) -> bool:
        """Return whether all of its files are there and unchanged; False too where that cannot be found out."""
        with suppress(OSError):
            for path, recorded in self.files.items():
                folder, name = os.path.split(path)
                with closing(calls.open_directory(folder)) as fd:
                    if not is_unchanged(recorded, identity_at(fd, name)):
                        return False
            return True
        return False

    def remove(self, *, spare: Set[str] = frozenset(), warns: bool = True) -> None:
        """Delete it, as far as it is unchanged. What does not exist any more is no error.

        Args:
            spare: Paths of files that newer checkpoints consist of. No warning names them.
            warns: Whether a warning names what stays.

        Raises:
            StorageError: The operating system reported an error.
        """
        with refusals("deleting the old checkpoint", next(iter(self.files), "")):
            _Removal(self, spare, warns).run()

    @staticmethod
    def store_list(directory: str, within: str) -> None:
        """Write a list of all files of a directory that is complete, before it is published; its sync is the caller's.

        Args:
            directory: The directory, a path without links.
            within: Name of a directory in it that will hold the list; if it does not exist, or if this is empty, the
                directory itself.

        Raises:
            StorageError: The operating system reported an error.
        """
        with refusals("writing the list of files", directory), closing(calls.open_directory(directory)) as fd:
            written = survey(fd, "")
            text = {
                "version": _VERSION,
                "device": written.directories[""][0],
                "directories": {name: inode for name, (_, inode) in written.directories.items()},
                "files": {name: [file.inode, file.nbytes, file.mtime_ns] for name, file in written.files.items()},
            }
            with closing(
                calls.open_directory(within if within and within in written.made else ".", dir_fd=fd)
            ) as where:
                write_small(where, LIST_NAME, json.dumps(text).encode(), durable=False)

    @classmethod
    def listed_in(cls, directory: str) -> WrittenFiles | None:
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


def survey(fd: int, path: str) -> WrittenFiles:
    """Return all files and directories of a directory that the save has made, before it is published.

    Args:
        fd: The directory.
        path: Path that it will have.

    Raises:
        OSError: The operating system reported an error.
    """
    files: dict[str, Identity] = {}
    directories: dict[str, DirectoryIdentity] = {}
    for folder, folders, names, below in os.fwalk(dir_fd=fd, onerror=raise_error):
        where = path if folder == "." else os.path.join(path, folder.removeprefix("./"))
        directories[where] = directory_identity(below)
        files |= _identities(below, where, [*folders, *names])  # links to directories are among these
    return WrittenFiles(files, directories, frozenset(directories))


def raise_error(error: OSError) -> None:
    """Raise an error; for `os.fwalk`."""
    raise error


def _identities(fd: int, path: str, names: Iterable[str]) -> dict[str, Identity]:
    """Return the identities of those of these files that exist in a directory, by path."""
    return {os.path.join(path, name): file for name, file in identities_at(fd, names).items()}


class _Removal:
    """One call of `WrittenFiles.remove`."""

    def __init__(self, written: WrittenFiles, spare: Set[str], warns: bool) -> None:
        self._files, self._directories, self._made = written.files, written.directories, written.made
        self._spare, self._warns = spare, warns
        self._warned: set[str] = set()

    def run(self) -> None:
        tops = [path for path in self._made if os.path.dirname(path) not in self._made]
        ended = [path for path in sorted(tops) if self._remove_whole(path)]
        by_directory: dict[str, list[str]] = {}
        for path in self._files:
            if not is_below_any(path, ended):
                by_directory.setdefault(os.path.dirname(path), []).append(os.path.basename(path))
        for directory, names in by_directory.items():
            self._remove_files(directory, names)
        for path in sorted(self._made, reverse=True):
            parent, name = os.path.split(path)
            with self._opened(parent) as fd, self._opened(path) as below:
                if fd is not None and below is not None:
                    with suppress(OSError):  # it is not empty
                        calls.remove_directory(name, dir_fd=fd)

    def _remove_whole(self, path: str) -> bool:
        """Delete a directory that the save made, if it holds only what was written with it.

        Returns:
            Whether nothing is left to do in it.
        """
        parent, name = os.path.split(path)
        with self._opened(parent) as fd:
            if fd is None:
                return True
            with self._opened(path) as below:
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
                with self._opened(below) as opened:
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
            if fd is None:
                return False
            # Without the index no reader takes the shards for a checkpoint.
            for name in sorted(names, key=lambda name: not name.endswith(INDEX_SUFFIX)):
                path, now = os.path.join(directory, name), identity_at(fd, name)
                if is_unchanged(self._files[path], now):
                    calls.unlink(name, dir_fd=fd)
                    is_any_removed = True
                elif path not in self._spare and (now is not None or calls.exists(name, dir_fd=fd)):
                    self._warn(path, "another program has replaced or changed it")
        return is_any_removed

    @contextmanager
    def _opened(self, path: str) -> Iterator[int | None]:
        """Open a directory; None if it does not exist, or is not the recorded one."""
        try:
            fd = calls.open_directory(path)
        except FileNotFoundError:
            yield None
            return
        except NotADirectoryError:
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
        if self._warns and path not in self._warned:
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


_MAX_DEPTH = 4
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
            return [*_saves_in(fd, root, {}, _MAX_DEPTH)]
    return []


def _saves_in(fd: int, path: str, above: dict[str, DirectoryIdentity], depth: int) -> Iterator[EarlierSave]:
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
        if not name.endswith(FILE_SUFFIX) or name in indexed or FileName(name).is_one_of_many:
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
                yield from _saves_in(below, place_below, own, depth - 1)


def _pattern(stem: str) -> str:
    return f"{stem.removesuffix(FILE_SUFFIX)}{{suffix}}{FILE_SUFFIX}"


def _shards(fd: int, path: str, index: str) -> tuple[str, ...]:
    raw = read_small(fd, index, MAX_INDEX_BYTES, where=path) or b""
    shards = parse_index(raw, path=os.path.join(path, index)).shards
    return () if any("/" in shard for shard in shards) else shards


def _files(fd: int, path: str, names: Sequence[str], stem: str) -> dict[str, Identity] | None:
    """Return the identities of files and of their manifest; None if one does not exist."""
    files = _identities(fd, path, [*names, stem + MANIFEST_SUFFIX])
    return files if all(os.path.join(path, name) in files for name in names) else None


LIST_NAME = ".stio-written.json"
"""Name of the list."""

_VERSION = 1
_MAX_BYTES = 64 << 20


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


_ASIDE_NAME = "aside"
"""Directory in a staging directory for what the new directory replaces."""

_KEPT_PREFIX = ".stio-kept-"
"""Prefix of the name of what could not be put back."""


def set_aside(home_fd: int, name: str, staging_fd: int) -> None:
    """Move what has a name into a staging directory, which must not be removed until it is put back.

    Raises:
        OSError: The operating system reported an error.
    """
    calls.make_directory(_ASIDE_NAME, dir_fd=staging_fd, mode=0o700)
    with closing(calls.open_directory(_ASIDE_NAME, dir_fd=staging_fd)) as fd:
        calls.rename(name, name, source_fd=home_fd, target_fd=fd)


def put_back(home_fd: int, staging_fd: int, staging: str, *, durable: bool) -> None:
    """Put back what is set aside, if anything is. Where its name is in use by now, keep what no save has written.

    Args:
        home_fd: The directory that it comes from.
        staging_fd: The staging directory.
        staging: Its path.
        durable: Whether that is made durable: the staging directory is removed next.

    Raises:
        OSError: The operating system reported an error; the rest can be put back later.
    """
    if not calls.exists(_ASIDE_NAME, dir_fd=staging_fd):
        return
    with closing(calls.open_directory(_ASIDE_NAME, dir_fd=staging_fd)) as fd:
        for name in sorted(os.listdir(fd)):
            if not name.startswith(KEPT_BY_SYSTEM):
                _put_back(home_fd, fd, name, staging)
    if durable:
        calls.sync_directory(home_fd)


def _put_back(home_fd: int, aside_fd: int, name: str, staging: str) -> None:
    status = status_at(aside_fd, name)
    is_directory = status is not None and stat.S_ISDIR(status.st_mode)
    try:
        calls.rename_new(name, name, source_fd=aside_fd, target_fd=home_fd, is_directory=is_directory)
        return
    except FileNotFoundError:
        return
    except OSError:
        if not calls.exists(name, dir_fd=home_fd):
            raise
    if is_directory and (written := WrittenFiles.listed_in(os.path.join(staging, _ASIDE_NAME, name))) is not None:
        with suppress(StorageError):
            written.remove(warns=False)
        if not calls.exists(name, dir_fd=aside_fd):
            return
    kept = f"{_KEPT_PREFIX}{secrets.token_hex(5)}"
    calls.rename(name, kept, source_fd=aside_fd, target_fd=home_fd)
    log(
        logging.WARNING,
        "%s was replaced; what stio did not write, or others have changed, is kept as %s",
        printable(os.path.join(os.path.dirname(staging), name)),
        printable(os.path.join(os.path.dirname(staging), kept)),
    )
