"""What every storage on a filesystem asks of a file before it reads: where it is, what it is, which one it is."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from stio.errors import StorageError, UnsafePathError
from stio.storage.base import Identity

__all__ = ["OPEN_FLAGS", "identity_of", "refused", "require_inside", "require_regular", "stat_of"]

# O_NONBLOCK: opening a FIFO must not wait for its writer.
OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)

_HUB_CACHE_PREFIXES = ("models--", "datasets--", "spaces--")


def refused(action: str, path: str, error: OSError | ValueError, *, offset: int | None = None) -> StorageError:
    """Return the error to raise for one of the operating system's, or for a path it cannot even look at."""
    number = getattr(error, "errno", None)
    reason = os.strerror(number) if number else str(error)
    if number in (errno.EMFILE, errno.ENFILE):
        reason += "; raise the limit of open files (ulimit -n) or load fewer shards at once"
    return StorageError(f"{action} failed: {reason}", path=path, errno=number, offset=offset)


def require_regular(found: os.stat_result, path: str) -> None:
    """Raise `StorageError` for what is no regular file: a FIFO or a device could block, or act, when read."""
    if not stat.S_ISREG(found.st_mode):
        number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        raise StorageError("not a regular file", path=path, errno=number, found=stat.filemode(found.st_mode))


def require_inside(real: str, root: str, path: str) -> None:
    """Raise `UnsafePathError` if a file is neither below its root nor a blob of the same Hugging Face cache.

    Args:
        real: Where the file is, links resolved.
        root: Where the checkpoint's directory is, links resolved.
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
    """Return `os.fstat`, its error as stio's own."""
    try:
        return os.fstat(fd)
    except OSError as error:
        raise refused("looking at the file", path, error) from error


def identity_of(found: os.stat_result) -> Identity:
    """Return a local file's identity."""
    return Identity(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)
