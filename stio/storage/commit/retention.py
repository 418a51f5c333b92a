"""Deleting an old checkpoint: its name goes first, in one step, then what it held.

Who opened it before keeps reading what is open; who comes later finds nothing, and never a part of it.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Set

from stio.format.naming import MANIFEST_SUFFIX, index_name, is_checkpoint_file, manifest_name
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls

__all__ = ["remove_checkpoint"]

_TRASH = ".stio-trash-"


def remove_checkpoint(path: str, *, filename_pattern: str | None, whole: bool, spare: Set[str] = frozenset()) -> None:
    """Delete a checkpoint. Nothing is followed out of it. What is not there is no error.

    Args:
        path: What it was saved to, links resolved: a file or a directory.
        filename_pattern: Names of its files, in a directory; None: it is one file.
        whole: The directory was made for it and goes with all that is in it; else only the checkpoint's files go.
        spare: Paths of files that stay, for a newer checkpoint consists of them: it may stand in the same directory,
            or in one below. A directory with such a file in it does not go as a whole.

    Raises:
        StorageError: The operating system refused.
    """
    try:
        if filename_pattern is None or (whole and not any(file.startswith(f"{path}{os.sep}") for file in spare)):
            where, name = os.path.split(path)
            parent = calls.open_directory(where)
            try:
                if filename_pattern is not None:
                    _remove_directory(name, parent)
                elif path not in spare:
                    calls.unlink(name, dir_fd=parent)
                    _unlink_if_there(f"{name}{MANIFEST_SUFFIX}", parent)
            finally:
                calls.close(parent)
        else:
            directory = calls.open_directory(path)
            try:
                _remove_files(directory, path, filename_pattern, spare)
            finally:
                calls.close(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise refused("deleting the old checkpoint", path, error) from error


def _remove_directory(name: str, dir_fd: int) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
        return  # somebody has put something else there
    trash = f"{_TRASH}{secrets.token_hex(5)}"
    calls.rename(name, trash, source_fd=dir_fd, target_fd=dir_fd)
    calls.remove_tree(trash, dir_fd=dir_fd)


def _remove_files(dir_fd: int, path: str, pattern: str, spare: Set[str]) -> None:
    shards = [name for name in os.listdir(dir_fd) if is_checkpoint_file(name, pattern)]
    # The index first: without it nobody takes the shards for a checkpoint.
    for name in dict.fromkeys((index_name(pattern), manifest_name(pattern), *shards)):
        if os.path.join(path, name) not in spare:
            _unlink_if_there(name, dir_fd)


def _unlink_if_there(name: str, dir_fd: int) -> None:
    try:
        calls.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
