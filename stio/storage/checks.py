"""Checks of a file before a storage on a filesystem reads it (its place, its kind, its identity), and a rule for links.

Paths are resolved one component at a time, each relative to its open directory. In a directory that all may write and
that has the sticky bit, such as /tmp, a link is followed only if it belongs to the user of this process or to the owner
of the directory. Otherwise any user could decide by a link which file of another user is replaced. Linux has the same
rule (`protected_symlinks`, proc(5)), but it can be turned off, and it is applied to the last component of a path only.
Other links are followed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shlex import quote
from typing import NoReturn

from stio.errors import (
    CheckpointNotFoundError,
    NoSpaceError,
    StioError,
    StorageError,
    TruncatedError,
    UnsafePathError,
    printable,
)
from stio.format.files import FILE_SUFFIXES, FileName, advice_for_path, step_of
from stio.process import contextmanager
from stio.storage.base import Identity
from stio.text import is_url, without_secrets

if sys.platform != "win32":
    import resource

# O_NONBLOCK: opening a FIFO must not wait for its writer.
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

CHECKPOINT_SUFFIXES = (*FILE_SUFFIXES, ".ckpt")
"""Ends of the names of files that are checkpoints: those of safetensors, and of Lightning by stio."""

UNSUPPORTED = frozenset({errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL, errno.EPERM})
"""Error numbers of a call that the kernel, the filesystem or a sandbox (seccomp, gVisor) does not support."""

_USUAL_OPEN_FILES = 1024
_HUB_CACHE_PREFIXES = ("models--", "datasets--", "spaces--")


def refused(
    action: str,
    path: str,
    error: OSError | ValueError,
    *,
    offset: int | None = None,
    needed_bytes: int | None = None,
    free_bytes: int | None = None,
) -> StorageError:
    """Return the error to raise for an error of the operating system, or for a path that it does not accept.

    It is a `NoSpaceError` if space was missing.

    Args:
        action: The action that failed, as a participle.
        path: File or directory.
        error: The system's error.
        offset: Byte offset in the file.
        needed_bytes: Space that was needed.
        free_bytes: Space that was free.
    """
    number = getattr(error, "errno", None) or 0
    reason = _REASONS.get(number) or (os.strerror(number) if number else str(error))
    if number in _NO_SPACE:
        if needed_bytes is not None:
            reason += f"; {needed_bytes:,} bytes are needed"
        if free_bytes is not None:
            reason += f"; {free_bytes:,} bytes are free"
        text = f"{action} failed: {reason}"
        return NoSpaceError(
            text, path=path, errno=number, offset=offset, needed_bytes=needed_bytes, free_bytes=free_bytes
        )
    if number in (errno.EMFILE, errno.ENFILE):
        reason += f"; raise the limit of {open_files_limit():,} open files (ulimit -n) or load fewer shards at once"
    return StorageError(f"{action} failed: {reason}", path=path, errno=number or None, offset=offset)


_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_REASONS = {
    errno.ENOSPC: "there is too little space on the filesystem",
    errno.EDQUOT: "the quota of this user is used up",
    errno.EFBIG: "the file would be larger than the filesystem or the process's limit (ulimit -f) allows",
    errno.ESTALE: f"{os.strerror(errno.ESTALE)}; the file was replaced on the server: try again",
    errno.ENOTCONN: f"{os.strerror(errno.ENOTCONN)}; the mount is gone: mount it, and try again",
}


class refusals:  # noqa: N801 - a context manager, as `contextlib.suppress`
    """Raise an error of the operating system in a block, or of a path that it does not accept, as a `StorageError`.

    Args:
        action: What failed, as a participle.
        path: File or directory.
        caught: Classes of these errors. `ValueError`, a NUL in the path, is left out where the block has other causes.
    """

    __slots__ = ("_action", "_caught", "_path")

    def __init__(
        self, action: str, path: str, *, caught: tuple[type[OSError | ValueError], ...] = (OSError, ValueError)
    ) -> None:
        self._action, self._path, self._caught = action, path, caught

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if error is not None and isinstance(error, self._caught) and not isinstance(error, StioError):
            raise refused(self._action, self._path, error) from error


def open_files_limit() -> int:
    """Return how many files this process may open at one time."""
    if sys.platform == "win32":
        return sys.maxsize
    try:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    except OSError:  # a sandbox refuses it
        limit = _USUAL_OPEN_FILES
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def raise_opening_error(
    error: OSError | ValueError, path: str, action: str = "opening", what: str = "file or directory"
) -> NoReturn:
    """Raise an error of the operating system as `CheckpointNotFoundError`, or as `refused` makes it."""
    if isinstance(error, FileNotFoundError):
        raise CheckpointNotFoundError(f"there is no such {what}{broken_link(path)}", path=path) from None
    raise refused(action, path, error) from error


def broken_link(path: str) -> str:
    """Return a clause about the link that makes a path lead to nothing, if one does."""
    while path and not os.path.islink(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    with suppress(OSError, ValueError):
        if not os.path.exists(path):
            target = printable(os.readlink(path))
            return (
                f"; {printable(path)!r} is a link to {target!r}, which does not exist: restore that, or remove the link"
                + advice_for_hub_cache(path)
            )
    return ""


def cut_short(path: str, offset: int, missing_bytes: int) -> TruncatedError:
    """Return the error to raise where a file ends at `offset`, before a read is complete."""
    return TruncatedError(
        "the file ends before its tensors do; it was cut short",
        path=path,
        offset=offset,
        expected=f"{missing_bytes:,} more bytes",
        found="the end of the file",
    )


def require_regular(found: os.stat_result, path: str) -> None:
    """Raise `StorageError` unless it is a regular file: to read a FIFO or a device could block, or have an effect."""
    if not stat.S_ISREG(found.st_mode):
        is_directory = stat.S_ISDIR(found.st_mode)
        raise StorageError(
            f"not a regular file; {'give the path of a file' if is_directory else 'copy its data into one'}",
            path=path,
            errno=errno.EISDIR if is_directory else errno.EINVAL,
            found=kind_of_file(found.st_mode),
        )


def kind_of_file(mode: int) -> str:
    """Return what the mode of a status says about the kind of a file, for a message."""
    return next((text for is_kind, text in _KINDS if is_kind(mode)), "a file of another kind")


_KINDS = (
    (stat.S_ISREG, "a regular file"),
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISLNK, "a link"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def require_inside(real: str, root: str, path: str) -> None:
    """Raise `UnsafePathError` if a file is neither below its root nor a blob of the same Hugging Face cache.

    Args:
        real: Path of the file, links resolved.
        root: Path of the checkpoint's directory, links resolved.
        path: Name for messages.
    """
    file, directory = Path(real), Path(root)
    if file.is_relative_to(directory):
        return
    for revision in (directory, *directory.parents):
        # models--org--name/snapshots/<revision>/unet/x.safetensors -> ../../../blobs/<hash>
        repository = revision.parent.parent
        if revision.parent.name == "snapshots" and repository.name.startswith(_HUB_CACHE_PREFIXES):
            if file.is_relative_to(repository / "blobs"):
                return
    raise UnsafePathError(
        "the file is a link that leads out of the checkpoint; pass follow_symlinks=True if you trust it",
        path=path,
        expected=f"a file below {root}",
        found=real,
    )


_BLOB = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_IN_HUB_CACHE = re.compile(
    r"(?:(?P<cache>.*)/models--(?P<id>[^/]+)/snapshots/|hf://(?P<url_id>[^/@]+/[^/@]+)@)"
    r"(?P<commit>[^/]+)/(?P<file>.+)"
)


def digest_in_name(path: str) -> str:
    """Return the SHA-256 that is the name of a file in `blobs`, as in the cache of the hub; "" for other names.

    Args:
        path: Path of the file, or of a link to it.
    """
    folder, name = os.path.split("" if is_url(path) else os.path.realpath(path))
    return name if os.path.basename(folder) == "blobs" and _BLOB.fullmatch(name) else ""


def commits_in(repository: str) -> list[str]:
    """Return the commits that a repository's directory in the hub's cache has, [] for other directories."""
    with suppress(OSError):
        if os.path.basename(os.path.realpath(repository)).startswith(_HUB_CACHE_PREFIXES):
            with os.scandir(os.path.join(repository, "snapshots")) as entries:
                return sorted(one.name for one in entries if _COMMIT.fullmatch(one.name) and one.is_dir())
    return []


def advice_for_hub_cache(path: str) -> str:
    """Return a clause with the command that fetches a damaged file of the hub's cache again, "" for other files.

    Args:
        path: Path of the file, or its URL with the commit.
    """
    folder, name = os.path.split(path)
    found = _IN_HUB_CACHE.fullmatch(path if is_url(path) else os.path.join(os.path.realpath(folder), name))
    if found is None:
        is_there = os.path.exists(path) and digest_in_name(path)
        return f"; delete {os.path.realpath(path)} and download it again" if is_there else ""
    cache = f" --cache-dir {quote(found['cache'])}" if found["cache"] else ""
    repository = found["url_id"] or found["id"].replace("--", "/", 1)
    command = f"hf download {quote(repository)} {quote(found['file'])} --revision {quote(found['commit'])}"
    return f"; if the copy in the hub's cache is damaged, fetch it again: {command}{cache} --force-download"


def stat_of(fd: int, path: str) -> os.stat_result:
    """Return `os.fstat`; its error is raised as a `StorageError`."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise refused("reading the status", path, error) from error


def identity_of(found: os.stat_result) -> Identity:
    """Return the identity of a local file."""
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


_SCHEME = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+:")  # of a URL, also of one that was made a Path
_ANYONE_STICKY = stat.S_ISVTX | stat.S_IWOTH
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_LISTED = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
# With O_PATH the right to pass through a directory is enough. Other systems need the right to list it.
_PASSED = _LISTED | getattr(os, "O_PATH", 0)
_MAX_LINKS = 40  # as the kernel


def local_directory(path: object, keyword: str) -> str:
    """Return the absolute path of a directory of this machine that a caller names; it need not exist.

    Args:
        path: What the caller passed.
        keyword: What it is for, for the error.

    Raises:
        TypeError: It is no path.
        ValueError: It is empty, or begins like a URL or with `~`, and no directory does.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise TypeError(f"{keyword} takes the path of a directory, not {printable(path)}")
    text = os.fsdecode(path)
    first = text.partition(os.sep)[0]
    if not text:
        raise ValueError(f"{keyword} takes a directory, not an empty path")
    if first == "~" and not os.path.isdir(first):
        raise ValueError(f"{keyword}: {printable(text)!r} cannot be used; {advice_for_path(text)}")
    if _SCHEME.fullmatch(first) and not os.path.isdir(first):
        raise ValueError(f"{keyword} takes a directory of this machine, not the URL {printable(without_secrets(text))}")
    return os.path.abspath(text)


def steps_in(directory: str) -> dict[int | None, list[str]]:
    """Return the paths in a directory that may be checkpoints of a training, by the steps in their names.

    Under None are those whose names hold a date instead. Hidden names and files of other kinds are left out.

    Raises:
        OSError: The operating system reported an error.
    """
    by_step: dict[int | None, list[str]] = defaultdict(list)
    for name in sorted(os.listdir(directory)):
        step, file, path = step_of(name), FileName(name), os.path.join(directory, name)
        if (step is not None or (file.is_dated and not file.is_hidden)) and _may_be_checkpoint(path):
            by_step[None if step is None else step.number].append(path)
    return by_step


def _may_be_checkpoint(path: str) -> bool:
    if os.path.islink(path) and not os.path.exists(path):
        return path.endswith(CHECKPOINT_SUFFIXES) or not os.path.splitext(path)[1]
    return os.path.isdir(path) or (path.endswith(CHECKPOINT_SUFFIXES) and os.path.isfile(path))


def resolve_links(path: str) -> str:
    """Return a path as absolute and without links. Names that do not exist are kept, as by `os.path.realpath`.

    Raises:
        StorageError: A link of another user in a directory such as /tmp is on the way.
        OSError: The operating system reported an error.
        ValueError: The path contains a NUL.
    """
    fd, real, rest = open_existing(path)
    os.close(fd)
    return os.path.join(real, *rest)


def open_existing(path: str) -> tuple[int, str, list[str]]:
    """Open the part of a path that exists, links followed by the rule of this module; raises as `resolve_links` does.

    Returns:
        The last directory, open, not for reading; its path without links; the names that are left: the first is no
        directory or does not exist.
    """
    fd, passed, rest = _follow(path if os.path.isabs(path) else os.path.join(os.getcwd(), path), None)
    return fd, os.sep + os.sep.join(passed), rest


def open_resolved(path: str) -> int:
    """Open a directory by the path that `resolve_links` returned; a link in it has been made since, and is an error.

    Raises:
        NotADirectoryError: A part of the path is a link, or another kind of file.
        OSError: The operating system reported an error.
    """
    names = path.strip(os.sep).split(os.sep) if path != os.sep else []
    fd = os.open(os.sep, _PASSED if names else _LISTED)
    for position, name in enumerate(names, 1):
        try:
            below = os.open(name, (_LISTED if position == len(names) else _PASSED) | _NO_FOLLOW, dir_fd=fd)
        except OSError as error:
            number = errno.ENOTDIR if error.errno == errno.ELOOP else error.errno or errno.EIO
            raise OSError(number, os.strerror(number), path) from None
        finally:
            os.close(fd)
        fd = below
    return fd


def open_by_rule(name: str, flags: int, *, dir_fd: int) -> int:
    """Open a file of a directory; a link is followed by the rule of this module.

    Args:
        name: Its name in the directory.
        flags: Flags of `os.open`.
        dir_fd: The directory.

    Raises:
        StorageError: A link of another user in a directory such as /tmp is on the way.
        OSError: The operating system reported an error.
    """
    try:
        return os.open(name, flags | _NO_FOLLOW, dir_fd=dir_fd)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
    with _target(name, dir_fd) as (fd, last):
        return os.open(last, flags | _NO_FOLLOW, dir_fd=fd)


def stat_by_rule(name: str, *, dir_fd: int) -> os.stat_result:
    """Return the status of a file of a directory; a link is followed by the rule of this module.

    Raises:
        StorageError: A link of another user in a directory such as /tmp is on the way.
        OSError: The operating system reported an error.
    """
    found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    if not stat.S_ISLNK(found.st_mode):
        return found
    with _target(name, dir_fd) as (fd, last):
        return os.stat(last, dir_fd=fd, follow_symlinks=False)


@contextmanager
def _target(name: str, dir_fd: int) -> Iterator[tuple[int, str]]:
    """Give the place of a link's target to a block: a directory, open, and a name in it that is no link."""
    fd, _, rest = _follow(name, dir_fd)
    try:
        if len(rest) > 1:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        yield fd, rest[0] if rest else "."
    finally:
        os.close(fd)


def _follow(path: str, dir_fd: int | None) -> tuple[int, list[str], list[str]]:
    """Follow a path, from the root or from a directory, as far as there are directories.

    Returns:
        The last directory, open; the names passed since the root, links resolved; the names that are left: the first
        is no directory or does not exist.
    """
    fd = os.open(os.sep if dir_fd is None else ".", _PASSED, dir_fd=dir_fd)
    passed: list[str] = []
    rest: list[str] = []
    ahead = path.split(os.sep)[::-1]
    num_links = 0
    try:
        while ahead:
            name = ahead.pop()
            if name in ("", "."):
                continue
            if rest:
                rest.pop() if name == ".." else rest.append(name)
                continue
            try:
                below = os.open(name, _PASSED | _NO_FOLLOW, dir_fd=fd)
            except FileNotFoundError:
                rest.append(name)
                continue
            except OSError as error:
                if error.errno not in (errno.ENOTDIR, errno.ELOOP):
                    raise
            else:
                os.close(fd)
                fd = below
                passed = passed[:-1] if name == ".." else [*passed, name]
                continue
            found = os.stat(name, dir_fd=fd, follow_symlinks=False)
            if stat.S_ISLNK(found.st_mode):
                num_links += 1
                if num_links > _MAX_LINKS:
                    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
                _require_followable(os.fstat(fd), found, os.sep.join(("", *passed, name)))
                target = os.readlink(name, dir_fd=fd)
                ahead += target.split(os.sep)[::-1]
                if target.startswith(os.sep):
                    root = os.open(os.sep, _PASSED)
                    os.close(fd)
                    fd = root
                    passed.clear()
            else:
                rest.append(name)
    except BaseException:
        os.close(fd)
        raise
    return fd, passed, rest


def _require_followable(directory: os.stat_result, link: os.stat_result, path: str) -> None:
    if directory.st_mode & _ANYONE_STICKY == _ANYONE_STICKY and link.st_uid not in (os.geteuid(), directory.st_uid):
        raise StorageError(
            "a link of another user in a directory that all users may write is not followed",
            path=path,
            errno=errno.EACCES,
            expected=f"a link of user {os.geteuid()} or {directory.st_uid}",
            found=f"a link of user {link.st_uid}",
        )
