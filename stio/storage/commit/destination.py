"""Describes the destination of a save, and plans from it the names of the new files and the step that commits."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from stio import clock
from stio.errors import StioError, StorageError
from stio.format.files import FILE_SUFFIX, FilePattern, parse_index
from stio.limits import Limits
from stio.storage.base import Identity, SaveRules
from stio.storage.checks import identity_of, kind_of_file, open_existing, refusals
from stio.storage.commit import syscalls as calls
from stio.storage.commit.files import (
    MAX_INDEX_BYTES,
    FileAttributes,
    attributes_at,
    closing,
    digest_of,
    file_at,
    read_small,
    status_at,
)
from stio.storage.local import is_local


@dataclass(frozen=True, slots=True)
class SingleFile:
    """A path of the drop-ins: one file under any name. Of several saves at once, the last one replaces the others."""

    path: str
    """The path."""
    replaces_link: bool = False
    """Whether a link of this name is replaced; otherwise it is followed."""

    def __fspath__(self) -> str:
        return self.path


def is_one_file(destination: str | os.PathLike[str]) -> bool:
    """Return whether a destination means one file, and not a directory."""
    return isinstance(destination, SingleFile) or os.fsdecode(destination).endswith(FILE_SUFFIX)


@dataclass(frozen=True, slots=True)
class LocalDestination:
    """The destination of a save, links followed."""

    path: str
    """The path as the caller passed it."""
    kind: Literal["file", "fresh", "update"]
    """One file; a directory that does not exist yet; one that exists."""
    home: str
    """Directory in which the save works: the destination itself if it exists, else its parent."""
    name: str
    """Name in `home` of the file or the fresh directory; empty for an update."""
    last_wins: bool = False
    """Whether, of several saves at once, the last one replaces the others. Otherwise the first one wins."""
    above_fd: int = -1
    """The last directory on the way to `home` that exists, or `home`, open; `open_home` closes it."""
    missing: tuple[str, ...] = ()
    """Names of the directories below that one which are made for `home`."""

    @property
    def real(self) -> str:
        """The destination's path: absolute, links followed."""
        return os.path.join(self.home, self.name) if self.name else self.home


def resolve(destination: str | os.PathLike[str]) -> LocalDestination:
    """Return what a path means as a destination, and open the directory above it.

    Args:
        destination: A file if it ends in `.safetensors` or is a `SingleFile`, else a directory. Links are followed,
            unless the `SingleFile` replaces them; where one leads to nothing, the file or directory is created there.

    Raises:
        StorageError: Something of another kind has this path, a link of another user in a directory such as /tmp is on
            the way (`stio.storage.checks`), or the operating system reported an error.
    """
    path = os.fsdecode(destination)
    if not path:
        raise StorageError("the destination is an empty path; give a file, a directory or a URL", errno=errno.ENOENT)
    is_file, last_wins = is_one_file(destination), isinstance(destination, SingleFile)
    with refusals("examining the destination", path):
        replaces_link = isinstance(destination, SingleFile) and destination.replaces_link and os.path.islink(path)
        folder, link = os.path.split(path) if replaces_link else (path, "")
        fd, real, rest = open_existing(folder or ".")
        try:
            if replaces_link:
                rest.append(link)
            else:
                status = status_at(fd, os.path.join(*rest)) if rest else os.fstat(fd)
                _require_kind(path, status, is_file=is_file)
        except BaseException:
            calls.close(fd)
            raise
    if not rest:
        return LocalDestination(path, "update", real, "", last_wins, fd)
    *missing, name = rest
    home = os.path.join(real, *missing)
    return LocalDestination(path, "file" if is_file else "fresh", home, name, last_wins, fd, tuple(missing))


def _require_kind(path: str, status: os.stat_result | None, *, is_file: bool) -> None:
    """Require that what is at a destination, None if nothing is, may be replaced by what is saved there."""
    mode = 0 if status is None else status.st_mode
    if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        number, message = errno.EINVAL, f"the destination is {kind_of_file(mode)}; choose another path"
    elif is_file and stat.S_ISDIR(mode):
        number, message = errno.EISDIR, f"the destination is a directory; a name ending in {FILE_SUFFIX} means one file"
    elif not is_file and stat.S_ISREG(mode):
        number, message = errno.ENOTDIR, f"the destination is a file; a name that means one file ends in {FILE_SUFFIX}"
    else:
        return
    raise StorageError(message, path=path, errno=number)


@dataclass(frozen=True, slots=True)
class Home:
    """The directory in which a save works, open."""

    destination: LocalDestination
    """The save's destination, which has its path."""
    fd: int
    """The directory."""
    durable: bool
    """Whether anything is synced."""
    made: dict[str, DirectoryIdentity]
    """The directories that were made for this save, by path: this one, and those above it."""

    def sync(self, fd: int | None = None) -> None:
        """Make the names in this directory, or in another one, durable."""
        if self.durable:
            calls.sync_directory(self.fd if fd is None else fd)


def open_home(destination: LocalDestination, *, durable: bool) -> Home:
    """Open the home of a destination; make it if it is missing, and make its name durable, also if it existed.

    What was made stays if the save fails: another save may work in it.

    Args:
        destination: The destination; its `above_fd` is closed.
        durable: Whether names are made durable.

    Raises:
        OSError: The operating system reported an error.
    """
    path, made = destination.home, {}
    for _ in destination.missing:
        path = os.path.dirname(path)
    with closing(destination.above_fd):
        fd = calls.open_directory(".", dir_fd=destination.above_fd)
    try:
        if durable:
            _sync_name(path, fd)
        for name in destination.missing:
            path, above, is_made = os.path.join(path, name), fd, False
            with suppress(FileExistsError):  # another save has just made it, and may not have synced it yet
                calls.make_directory(name, dir_fd=above)
                is_made = True
            if durable:
                calls.sync_directory(above)
            fd = calls.open_directory(name, dir_fd=above)
            calls.close(above)
            if is_made:
                made[path] = directory_identity(fd)
    except BaseException:
        calls.close(fd)
        raise
    return Home(destination, fd, durable, made)


_durable_names: dict[str, tuple[int, int, float]] = {}
"""Device, inode and time of birth of directories whose name this process has made durable, by path."""
_MAX_DURABLE_NAMES = 256
_SETTLED_SECONDS = 1.0
"""A directory that is older differs from each later one in the time of its birth, if not in its inode."""


def _sync_name(directory: str, fd: int) -> None:
    """Make the name of an open directory durable, once: somebody may have made it a moment ago, without a sync."""
    birth = calls.birth_of(fd) if is_local(fd) else None
    if birth is not None and _durable_names.get(directory) == birth:
        return
    with suppress(PermissionError), closing(calls.open_directory(os.path.dirname(directory))) as above:
        calls.sync_directory(above)
        if birth is not None and clock.now() - birth[2] > _SETTLED_SECONDS:
            if len(_durable_names) >= _MAX_DURABLE_NAMES:
                _durable_names.clear()
            _durable_names[directory] = birth


@dataclass(frozen=True, slots=True)
class ExistingCheckpoint:
    """The checkpoint at a destination before the save."""

    index: str | None = None
    """Name that an index has or would have there; None for one file and for a fresh directory."""
    index_sha256: str | None = None
    """SHA-256 of the index's content; None if there is none."""
    files: dict[str, Identity] = field(default_factory=dict)
    """Its files of tensors: those that the index names, and those with the name of a checkpoint's file."""
    shard_attributes: FileAttributes | None = None
    """Attributes of the shard that the fewest users may read, for new shards that replace no file of their name."""


DirectoryIdentity: TypeAlias = tuple[int, int]
"""Device and inode of a directory; zeros where inodes are not stable."""


def directory_identity(fd: int) -> DirectoryIdentity:
    """Return the identity of an open directory.

    Raises:
        OSError: The operating system reported an error.
    """
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino) if is_local(fd) else (0, 0)


def identity_at(dir_fd: int, name: str) -> Identity | None:
    """Return the identity of a regular file or a link, None if there is neither of this name.

    Raises:
        OSError: The operating system reported an error.
    """
    return identities_at(dir_fd, [name]).get(name)


def identities_at(dir_fd: int, names: Iterable[str]) -> dict[str, Identity]:
    """Return the identities of those of these names that regular files or links have, without repetitions.

    Raises:
        OSError: The operating system reported an error.
    """
    statuses = {name: status for name in dict.fromkeys(names) if (status := file_at(dir_fd, name)) is not None}
    files = {name: identity_of(status) for name, status in statuses.items()}
    # Some FUSE filesystems assign a new inode at each call.
    if files and not is_local(dir_fd):
        files = {name: Identity(0, 0, file.nbytes, file.mtime_ns) for name, file in files.items()}
    return files


def describe_existing(home_fd: int, destination: LocalDestination, pattern: str) -> ExistingCheckpoint:
    """Describe the checkpoint that a save will replace.

    Args:
        home_fd: `destination.home`, open.
        destination: The save's destination.
        pattern: Pattern of the files' names.

    Raises:
        OSError: The operating system reported an error.
    """
    if destination.kind == "fresh":
        return ExistingCheckpoint()
    if destination.kind == "file":
        files = identities_at(home_fd, [destination.name])
        return ExistingCheckpoint(files=files, shard_attributes=attributes_at(home_fd, destination.name))
    index = FilePattern(pattern).index
    raw = read_small(home_fd, index, MAX_INDEX_BYTES, where=destination.path)
    shards: tuple[str, ...] = ()
    if raw is not None:
        with suppress(StioError):
            # A broken checkpoint may be replaced; its files are recognised by their names.
            shards = parse_index(raw, path=index, limits=Limits(header_bytes=MAX_INDEX_BYTES)).shards
    # Only files of this directory. A file below it that an index names stays: recovery would not find it there.
    names = [*shards, *(name for name in sorted(os.listdir(home_fd)) if FilePattern(pattern).matches(name))]
    return existing_checkpoint(home_fd, index, raw, [name for name in names if name != index and "/" not in name])


def existing_checkpoint(home_fd: int, index: str, raw: bytes | None, names: Iterable[str]) -> ExistingCheckpoint:
    """Return the checkpoint in a directory.

    Args:
        home_fd: The directory, open.
        index: Name of its index.
        raw: Content of its index, None if there is none.
        names: Names of its files of tensors; those that do not exist are left out.

    Raises:
        OSError: The operating system reported an error.
    """
    files = identities_at(home_fd, names)
    statuses = {name: status_at(home_fd, name, follow_symlinks=True) for name in files if name != index}
    readers = {name: status.st_mode & 0o044 for name, status in statuses.items() if status is not None}
    shard = attributes_at(home_fd, min(readers, key=readers.__getitem__)) if readers else None
    return ExistingCheckpoint(index, digest_of(raw), files, shard)


@dataclass(frozen=True, slots=True)
class CommitPlan:
    """The files that a save writes and replaces, and the step that publishes them."""

    commit: Literal["directory", "replacement", "file", "index", "files"]
    """The rename of a fresh directory; of a directory in the place of another; of the only file; of the index; or the
    journal's record, after which the files are replaced one by one."""
    shards: tuple[str, ...]
    """Names of the shards, in order; none where other libraries write a directory's files."""
    index: str | None
    """Name of the index, None if there is none."""
    existing: ExistingCheckpoint = field(default_factory=ExistingCheckpoint)
    """The checkpoint at the destination before the save."""


CommitPolicy: TypeAlias = Callable[[int, str], CommitPlan]
"""Makes a save's plan from the descriptor of `LocalDestination.home` and the save's id. It changes nothing, and raises
`ValueError`, `StorageError` or `OSError` if the save is not possible."""


def choose_names(
    destination: LocalDestination,
    existing: ExistingCheckpoint,
    rules: SaveRules,
    num_shards: int,
    save_id: str,
) -> CommitPlan:
    """Choose the names of the new files and the step that publishes them; pure.

    Raises:
        ValueError: The hub's names would be those of existing shards, and `commit="files"` was not given.
    """
    if destination.kind == "file":
        return CommitPlan("file", (destination.name,), None, existing)
    pattern, numbers = FilePattern(rules.filename_pattern), range(num_shards)
    hub = tuple([pattern.shard(k, num_shards) for k in numbers])
    if destination.kind == "fresh":
        return CommitPlan("directory", hub, pattern.index if num_shards > 1 else None, existing)
    index = pattern.index
    has_index = existing.index_sha256 is not None
    if not has_index and (num_shards == 1 or not existing.files):
        if num_shards > 1:
            return CommitPlan("index", hub, index, existing)
        return CommitPlan("file", hub, None, existing)
    # A checkpoint that has an index, or gets one now. If there was an index the new checkpoint has one too; otherwise a
    # reader could load the wrong files.
    if rules.shard_names == "auto":
        names = tuple([pattern.shard(k, num_shards, save_id=save_id) for k in numbers])
        return CommitPlan("index", names, index, existing)
    if rules.commit != "files":
        raise ValueError(
            f'{destination.path}: the directory holds a checkpoint; shard_names="hub" would replace its files one by '
            'one. Allow that by commit="files" (see its documentation), or save to a fresh directory'
        )
    # If no name is in use, no file has to be replaced.
    return CommitPlan("files" if set(hub) & existing.files.keys() else "index", hub, index, existing)


def require_replaceable(home_fd: int, destination: LocalDestination, names: tuple[str, ...]) -> None:
    """Require that an existing entry with the name of a new file is a file or a link, so that it may be replaced."""
    for name in names:
        status = status_at(home_fd, name)
        if status is not None and not (stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)):
            raise StorageError(
                "the save needs this name, and what has it is not a file; move it, or save elsewhere",
                path=os.path.join(destination.path, name),
                errno=errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EEXIST,
                found=kind_of_file(status.st_mode),
            )
