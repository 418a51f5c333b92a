"""What stands at a save's destination, and what follows from it: where to stage, which names, which step commits."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass, field
from typing import Literal

from stio.errors import StioError, StorageError
from stio.format.index import parse_index
from stio.format.naming import index_name, is_checkpoint_file, shard_name
from stio.runtime.limits import Limits
from stio.storage.base import Identity
from stio.storage.checks import identity_of, refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.journal import MAX_INDEX_BYTES, digest_of, read_small
from stio.storage.local import is_local

__all__ = [
    "Destination",
    "ExistingCheckpoint",
    "Names",
    "OneFile",
    "choose_names",
    "identity_at",
    "is_one_file",
    "look",
    "make_parents",
    "mode_at",
    "require_files",
    "resolve",
]

_SUFFIX = ".safetensors"


@dataclass(frozen=True, slots=True)
class OneFile:
    """A path as the drop-ins take it: one file whatever its name ends in, and of savers at once the last one wins."""

    path: str
    """The path."""

    def __fspath__(self) -> str:
        return self.path


def is_one_file(destination: str | os.PathLike[str]) -> bool:
    """Return whether a destination means one file, and not a directory."""
    return isinstance(destination, OneFile) or os.fsdecode(destination).endswith(_SUFFIX)


@dataclass(frozen=True, slots=True)
class Destination:
    """A save's destination, links followed."""

    path: str
    """As the caller gave it."""
    kind: Literal["file", "fresh", "update"]
    """One file; a directory that is not there yet; one that is."""
    home: str
    """Directory in which the save works: the destination itself if it is there, else what holds it."""
    name: str
    """Name in `home` of the file or the fresh directory; empty for an update."""

    @property
    def real(self) -> str:
        """The place itself: absolute, links followed."""
        return os.path.join(self.home, self.name) if self.name else self.home


def resolve(destination: str | os.PathLike[str]) -> Destination:
    """Find out what a path means as a destination.

    Args:
        destination: A file if it ends in `.safetensors` or is a `OneFile`, else a directory. Links are followed; what
            a dangling one leads to is created.

    Raises:
        StorageError: Something else stands there, or the system refuses to look.
    """
    path = os.fsdecode(destination)

    def wrong(number: int, message: str) -> StorageError:
        return StorageError(message, path=path, errno=number)

    if not path:
        raise wrong(errno.ENOENT, "the destination is an empty path")
    try:
        real = os.path.realpath(path)
        mode = os.stat(real).st_mode
    except FileNotFoundError:
        mode = 0
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise refused("looking at the destination", path, error) from error
    parent, name = os.path.split(real)
    if mode and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise wrong(errno.EINVAL, f"the destination is neither a file nor a directory: {stat.filemode(mode)}")
    if is_one_file(destination):
        if stat.S_ISDIR(mode):
            raise wrong(
                errno.EISDIR, f"a directory stands where the file shall be; a name ending in {_SUFFIX} means one file"
            )
        return Destination(path, "file", parent, name)
    if stat.S_ISREG(mode):
        raise wrong(
            errno.ENOTDIR, f"a file stands where the directory shall be; a name that means one file ends in {_SUFFIX}"
        )
    return Destination(path, "update", real, "") if mode else Destination(path, "fresh", parent, name)


def make_parents(directory: str, *, durable: bool) -> None:
    """Make a directory and its missing parents, and make their names durable, and its own if it was there.

    They stay if the save fails: another one may have begun in them.

    Raises:
        OSError: The system refused.
    """
    missing = []
    while not os.path.isdir(directory):
        if os.path.lexists(directory):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), directory)
        directory, name = os.path.split(directory)
        missing.append(name)
    if not missing:  # perhaps made a moment ago by the caller, who did not sync
        directory = os.path.dirname(directory)
    try:
        fd = calls.open_directory(directory)
    except PermissionError:
        if missing:
            raise
        return
    try:
        if durable and not missing:
            calls.sync_directory(fd)
        while missing:
            name = missing.pop()
            try:
                calls.make_directory(name, dir_fd=fd)
            except FileExistsError:
                pass  # made by another save meanwhile, whose sync may be still to come
            if durable:
                calls.sync_directory(fd)
            below = calls.open_directory(name, dir_fd=fd)
            calls.close(fd)
            fd = below
    finally:
        calls.close(fd)


@dataclass(frozen=True, slots=True)
class ExistingCheckpoint:
    """The checkpoint that stands at a destination."""

    index: str | None = None
    """Name that an index has or would have here; None for one file, and for a fresh directory."""
    index_sha256: str | None = None
    """Of the index' content; None where there is none."""
    files: dict[str, Identity] = field(default_factory=dict)
    """Its files of tensors: those that the index names, and those of a name that a checkpoint's file has."""
    index_mode: int | None = None
    """Mode of the index."""
    shard_mode: int | None = None
    """Mode of the first shard."""


def identity_at(dir_fd: int, name: str) -> Identity | None:
    """Return the identity of a regular file or link, None if there is none of this name.

    Raises:
        OSError: The system did not say.
    """
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        return None
    identity = identity_of(found)
    # Some FUSE filesystems number their files anew at each look.
    return identity if is_local(dir_fd) else Identity(0, 0, identity.nbytes, identity.mtime_ns)


def look(home_fd: int, destination: Destination, pattern: str) -> ExistingCheckpoint:
    """Look at the checkpoint that a save will replace.

    Args:
        home_fd: `destination.home`, open.
        destination: Where the save goes.
        pattern: Of the files' names.

    Raises:
        OSError: The system refused.
    """
    if destination.kind == "fresh":
        return ExistingCheckpoint()
    if destination.kind == "file":
        identity = identity_at(home_fd, destination.name)
        found = {destination.name: identity} if identity else {}
        return ExistingCheckpoint(files=found, shard_mode=mode_at(home_fd, destination.name))
    index = index_name(pattern)
    raw = read_small(home_fd, index, MAX_INDEX_BYTES, where=destination.path)
    shards: tuple[str, ...] = ()
    if raw is not None:
        try:
            shards = parse_index(raw, path=index, limits=Limits(header_bytes=MAX_INDEX_BYTES)).shards
        except StioError:
            pass  # a broken checkpoint may be saved over; its files are known by their names
    # Only files of this very directory: what an index names below it stays, for nobody else here would look there.
    names = [*shards, *(name for name in sorted(os.listdir(home_fd)) if is_checkpoint_file(name, pattern))]
    files = {
        name: identity
        for name in dict.fromkeys(names)
        if name != index and "/" not in name and (identity := identity_at(home_fd, name)) is not None
    }
    modes = (mode for name in files if (mode := mode_at(home_fd, name)) is not None)
    return ExistingCheckpoint(index, digest_of(raw), files, mode_at(home_fd, index), next(modes, None))


def mode_at(dir_fd: int, name: str) -> int | None:
    """Return the mode of a file, None if there is none of this name.

    Raises:
        OSError: The system did not say.
    """
    try:
        return stat.S_IMODE(os.stat(name, dir_fd=dir_fd).st_mode) & 0o777
    except FileNotFoundError:
        return None


@dataclass(frozen=True, slots=True)
class Names:
    """What a save writes, and which step publishes it."""

    commit: Literal["directory", "file", "index", "files"]
    """The rename of the directory, of the only file, of the index, or the record of an intent."""
    shards: tuple[str, ...]
    """Names of the shards, in order."""
    index: str | None
    """Name of the index, None where there is none."""


def choose_names(
    destination: Destination,
    standing: ExistingCheckpoint,
    *,
    num_shards: int,
    pattern: str,
    shard_names: Literal["auto", "hub"],
    commit: Literal["index", "files"],
    save_id: str,
) -> Names:
    """Decide what the new files are called and how they are published; see `begin_local`.

    Raises:
        ValueError: The hub's names are wanted where shards stand, and `commit="files"` is not.
    """
    if destination.kind == "file":
        return Names("file", (destination.name,), None)
    index = index_name(pattern)
    hub = tuple(shard_name(pattern, k, num_shards) for k in range(num_shards))
    if destination.kind == "fresh":
        return Names("directory", hub, index if num_shards > 1 else None)
    has_index = standing.index_sha256 is not None
    if not has_index and (num_shards == 1 or not standing.files):
        return Names("index", hub, index) if num_shards > 1 else Names("file", hub, None)
    # A checkpoint with an index, or one that is about to get one. With an index there is always an index again, so
    # that whoever goes by it cannot take the wrong files.
    if shard_names == "auto":
        names = (shard_name(pattern, k, num_shards, save_id=save_id) for k in range(num_shards))
        return Names("index", tuple(names), index)
    if commit != "files":
        raise ValueError(
            f'{destination.path}: a checkpoint stands here; shard_names="hub" would replace its files one by one. '
            'Allow that by commit="files" (its documentation says what it means), or save to a fresh directory'
        )
    # Where no name is taken, nothing has to be replaced one by one after all.
    return Names("files" if set(hub) & standing.files.keys() else "index", hub, index)


def require_files(home_fd: int, destination: Destination, names: Names) -> None:
    """Require that whatever has the name of a new file is a file or a link itself, so that it may be replaced.

    Raises:
        StorageError: It is a directory, a pipe or the like.
        OSError: The system did not say.
    """
    if destination.kind == "fresh":
        return
    for name in names.shards:
        try:
            mode = os.stat(name, dir_fd=home_fd, follow_symlinks=False).st_mode
        except FileNotFoundError:
            continue
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise StorageError(
                "what stands here under a name that the save needs is no file",
                path=os.path.join(destination.path, name),
                errno=errno.EISDIR if stat.S_ISDIR(mode) else errno.EEXIST,
                found=stat.filemode(mode),
            )
