"""Deleting an old checkpoint: its name goes first, in one step, then what it held.

Who opened it before keeps reading what is open; who comes later finds nothing, and never a part of it.
"""

from __future__ import annotations

import os
import secrets
import stat

from stio.codec.naming import index_name, is_checkpoint_file, manifest_name
from stio.storage import calls
from stio.storage.checks import refused

__all__ = ["remove_checkpoint"]

_SUFFIX = ".safetensors"
_TRASH = ".stio-trash-"


def remove_checkpoint(path: str, *, filename_pattern: str, whole: bool) -> None:
    """Delete a checkpoint. Nothing is followed out of it. What is not there is no error.

    Args:
        path: What it was saved to, links resolved: a file or a directory.
        filename_pattern: Names of its files, in a directory.
        whole: The directory was made for it and goes with all that is in it; else only the checkpoint's files go.

    Raises:
        StorageError: The operating system refused.
    """
    try:
        if path.endswith(_SUFFIX) or whole:
            parent = calls.open_directory(os.path.dirname(path) or ".")
            try:
                _remove_entry(os.path.basename(path), parent)
            finally:
                calls.close(parent)
        else:
            directory = calls.open_directory(path)
            try:
                _remove_files(directory, filename_pattern)
            finally:
                calls.close(directory)
    except FileNotFoundError:
        return
    except OSError as error:
        raise refused("deleting the old checkpoint", path, error) from error


def _remove_entry(name: str, dir_fd: int) -> None:
    if stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
        trash = f"{_TRASH}{secrets.token_hex(5)}"
        calls.rename(name, trash, source_fd=dir_fd, target_fd=dir_fd)
        calls.remove_tree(trash, dir_fd=dir_fd)
        return
    calls.unlink(name, dir_fd=dir_fd)
    _unlink_if_there(f"{name}.manifest.json", dir_fd)


def _remove_files(dir_fd: int, pattern: str) -> None:
    names = os.listdir(dir_fd)
    _unlink_if_there(index_name(pattern), dir_fd)  # first: without it nobody takes the shards for a checkpoint
    _unlink_if_there(manifest_name(pattern), dir_fd)
    for name in names:
        if is_checkpoint_file(name, pattern):
            _unlink_if_there(name, dir_fd)


def _unlink_if_there(name: str, dir_fd: int) -> None:
    try:
        calls.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass
