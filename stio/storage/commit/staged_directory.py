"""A directory that several saves and other programs' files make up together, and that is published whole.

It is built in a save's staging directory beside its place, under a lock that says that its owner lives, so the janitor
that cleans up after dead saves cleans up here too. Publishing makes every file in it durable, then one rename
gives it its name: whoever finds a directory of that name finds all of it.
"""

from __future__ import annotations

import os

from stio.errors import CommitUncertainError
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.journal import FILES_NAME
from stio.storage.commit.recovery import reclaim
from stio.storage.commit.staging_dir import PREFIX, Staging, locked, to_trash
from stio.storage.commit.target import make_parents

__all__ = ["StagedDirectory"]


class StagedDirectory:
    """A directory that nobody sees until it is whole. `publish` or `remove` ends it.

    Args:
        home: Directory that it will stand in, made with its parents where they are missing.
        durable: Whether to sync what is published.

    Raises:
        StorageError: The operating system refused.
    """

    def __init__(self, home: str, *, durable: bool) -> None:
        self._durable = durable
        try:
            make_parents(os.path.abspath(home), durable=durable)
            self._home = os.path.realpath(home)
            self._home_fd = calls.open_directory(self._home)
        except OSError as error:
            raise refused("making the checkpoint's directory", home, error) from error
        try:
            reclaim(self._home_fd, self._home)
            self._staging = Staging.create(self._home_fd)
        except OSError as error:
            calls.close(self._home_fd)
            raise refused("staging the checkpoint", self._home, error) from error
        except BaseException:
            calls.close(self._home_fd)
            raise

    @property
    def path(self) -> str:
        """Where its files are put until it is published."""
        return os.path.join(self._home, PREFIX + self._staging.save_id, FILES_NAME)

    def publish(self, name: str) -> str:
        """Give it its name, over a directory that has it, and return its path.

        Where one has that name it is moved away just before: a process that dies between these two steps leaves
        neither, and what was published before under other names.

        Raises:
            ConcurrentSaveError: Somebody else has been publishing there for a minute.
            CommitUncertainError: It is in place, but the system did not confirm that it is durable.
            StorageError: The operating system refused; nothing was published.
        """
        path = os.path.join(self._home, name)
        try:
            if self._durable:
                _sync_tree(self.path)
            with locked(self._home_fd, self._home):
                trash = self._replace(name)
        except OSError as error:
            raise refused("publishing the checkpoint", path, error) from error
        try:
            if self._durable:
                calls.sync_directory(self._home_fd)
        except OSError as error:
            raise CommitUncertainError(
                f"the checkpoint is in place, but syncing its directory failed: {error.strerror}",
                path=path,
                errno=error.errno,
            ) from error
        finally:
            if trash is not None:
                calls.remove_tree(trash, dir_fd=self._home_fd)
            self.remove()
        return path

    def _replace(self, name: str) -> str | None:
        """Give it its name; return the name of what is to be deleted now, None if nothing stood there."""
        try:
            trash = to_trash(self._home_fd, name)
        except FileNotFoundError:
            trash = None
        try:
            calls.rename(FILES_NAME, name, source_fd=self._staging.fd, target_fd=self._home_fd)
        except OSError:
            if trash is not None:
                calls.rename(trash, name, source_fd=self._home_fd, target_fd=self._home_fd)
            raise
        return trash

    def remove(self) -> None:
        """Remove what was not published, as far as that goes. Idempotent, never raises."""
        if self._home_fd >= 0:
            self._staging.remove()
            calls.close(self._home_fd)
            self._home_fd = -1


def _sync_tree(path: str) -> None:
    """Make all files below a directory durable, whoever wrote them, and the directories that name them."""
    for _, _, names, fd in os.fwalk(path, topdown=False):
        for name in names:
            file = calls.open_file(name, os.O_RDONLY, dir_fd=fd)
            try:
                calls.fsync(file)
            finally:
                calls.close(file)
        calls.sync_directory(fd)
