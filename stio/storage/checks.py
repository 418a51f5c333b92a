"""Checks of a file before a storage on a filesystem reads it: its place, its kind, its identity."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from stio.errors import CheckpointNotFoundError, StioError, StorageError, TruncatedError, UnsafePathError, printable
from stio.storage.base import Identity

if sys.platform != "win32":
    import resource

# O_NONBLOCK: opening a FIFO must not wait for its writer.
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_HUB_CACHE_PREFIXES = ("models--", "datasets--", "spaces--")


def refused(action: str, path: str, error: OSError | ValueError, *, offset: int | None = None) -> StorageError:
    """Return the error to raise for an error of the operating system, or for a path that it does not accept."""
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else str(error)
    if number in (errno.EMFILE, errno.ENFILE):
        reason += f"; raise the limit of {open_files_limit():,} open files (ulimit -n) or load fewer shards at once"
    return StorageError(f"{action} failed: {reason}", path=path, errno=number, offset=offset)


@contextmanager
def refusals(
    action: str, path: str, error_of: Callable[[str, str, OSError | ValueError], StorageError] = refused
) -> Iterator[None]:
    """Raise an error of the operating system in a block, or of a path that it does not accept, as a `StorageError`.

    Args:
        action: What failed, as a participle.
        path: File or directory.
        error_of: Makes the error.
    """
    try:
        yield
    except StioError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        raise error_of(action, path, error) from error


def open_files_limit() -> int:
    """Return how many files this process may open at one time."""
    if sys.platform == "win32":
        return sys.maxsize
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


@contextmanager
def translated_errors(path: str, action: str = "opening", what: str = "file or directory") -> Iterator[None]:
    """Raise an error of the operating system in a block as `CheckpointNotFoundError`, or as `refused` makes it."""
    with refusals(action, path):
        try:
            yield
        except StioError:
            raise
        except FileNotFoundError:
            raise CheckpointNotFoundError(f"there is no such {what}{broken_link(path)}", path=path) from None


def broken_link(path: str) -> str:
    """Return a clause about the link that makes a path lead to nothing, if one does."""
    while path and not os.path.islink(path) and os.path.dirname(path) != path:
        path = os.path.dirname(path)
    with suppress(OSError, ValueError):
        if not os.path.exists(path):
            target = printable(os.readlink(path))
            return (
                f"; {printable(path)!r} is a link to {target!r}, which does not exist: restore that, or remove the link"
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


def stat_of(fd: int, path: str) -> os.stat_result:
    """Return `os.fstat`; its error is raised as a `StorageError`."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise refused("reading the status", path, error) from error


def identity_of(found: os.stat_result) -> Identity:
    """Return the identity of a local file."""
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
