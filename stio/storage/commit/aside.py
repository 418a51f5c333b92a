"""Files and directories that are set aside: out of the way, and not deleted before they are compared.

They are moved under their own names into a new directory, `.stio-aside-<id>`, whose owner holds the lock on it. If the
owner dies, recovery puts them back. What cannot go back, since its name is in use, gets a name `.stio-kept-<id>`, which
nothing in stio deletes, and a warning says so.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from stio.errors import printable
from stio.runtime.log import log
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import is_same
from stio.storage.commit.small_files import closing
from stio.storage.commit.staging_dir import DELETED_PREFIX, rename_for_deletion

ASIDE_PREFIX = ".stio-aside-"
"""Prefix of the name of a directory for what is set aside."""

KEPT_PREFIX = ".stio-kept-"
"""Prefix of the name of what could not be put back."""

KEPT_BY_SYSTEM = (".fuse_hidden", ".nfs")
"""Prefixes of the names that network and user-space filesystems give to files that are removed while they are open."""

_ATTEMPTS = 8


class Aside(NamedTuple):
    """An open directory for what is set aside."""

    name: str
    """Its name in the directory that holds it."""
    fd: int
    """The directory itself."""


@contextmanager
def aside_directory(home_fd: int) -> Iterator[Aside]:
    """Make a directory for what is set aside, and lock it. At the end it is removed if it is empty.

    Args:
        home_fd: The directory that will hold it.

    Raises:
        OSError: The operating system reported an error.
    """
    for _ in range(_ATTEMPTS):
        name = f"{ASIDE_PREFIX}{secrets.token_hex(5)}"
        calls.make_directory(name, dir_fd=home_fd, mode=0o700)
        try:
            fd = calls.open_directory(name, dir_fd=home_fd)
        except FileNotFoundError:
            continue  # a recovery took it for one whose owner is dead
        with closing(fd):
            if calls.try_lock(fd) is False or not is_same(home_fd, name, fd):
                continue
            try:
                yield Aside(name, fd)
            finally:
                remove_aside(home_fd, Aside(name, fd))
                calls.unlock(fd)
            return
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), name)


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


def put_back(
    home_fd: int, home: str, aside: Aside, replaced: Callable[[str], bool] = lambda name: False
) -> tuple[str, ...]:
    """Put all that is set aside back to its names; return the new names of what had to get others.

    Args:
        home_fd: The directory that it comes from.
        home: Path of this directory, for messages.
        aside: Where it is.
        replaced: Called with the name of what cannot go back, since its name is in use; returns True if nothing of it
            has to be kept.

    Raises:
        OSError: The operating system reported an error.
    """
    kept = []
    for name in entries(aside):
        try:
            calls.rename_new(name, name, source_fd=aside.fd, target_fd=home_fd, is_directory=_is_directory(aside, name))
            continue
        except FileNotFoundError:
            continue
        except OSError:
            if not calls.exists(name, dir_fd=home_fd):
                raise
        if replaced(name):
            with suppress(FileNotFoundError):  # if it is there, it holds only what the system keeps
                deleted = f"{DELETED_PREFIX}{secrets.token_hex(5)}"
                calls.rename(name, deleted, source_fd=aside.fd, target_fd=home_fd)
            continue
        kept.append(f"{KEPT_PREFIX}{secrets.token_hex(5)}")
        calls.rename(name, kept[-1], source_fd=aside.fd, target_fd=home_fd)
        log(
            logging.WARNING,
            "%s was replaced; what stio did not write, or others have changed, is kept as %s",
            printable(os.path.join(home, name)),
            printable(os.path.join(home, kept[-1])),
        )
    return tuple(kept)


def _is_directory(aside: Aside, name: str) -> bool:
    with suppress(OSError), closing(calls.open_directory(name, dir_fd=aside.fd)):
        return True
    return False
