"""Deletes an old checkpoint: its name is removed first, in one step, then its content.

A reader that opened it before can read its open files to the end. A later reader finds nothing, and never a part of it.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Set

from stio.format.naming import MANIFEST_SUFFIX, index_name, is_checkpoint_file, manifest_name
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.small_files import closing, remove_file
from stio.storage.commit.staging_dir import DELETED_PREFIX


def remove_checkpoint(path: str, *, filename_pattern: str | None, whole: bool, spare: Set[str] = frozenset()) -> None:
    """Delete a checkpoint. No link is followed. What does not exist is no error.

    Args:
        path: Path of the checkpoint, a file or a directory, links resolved.
        filename_pattern: Pattern of its file names, in a directory; None: it is one file.
        whole: The directory was made for it and is deleted with all its content; else only the checkpoint's files are.
        spare: Paths of files that stay, since a newer checkpoint consists of them: it may be in the same directory,
            or in one below. A directory with such a file in it is not deleted as a whole.

    Raises:
        StorageError: The operating system reported an error.
    """
    as_file = filename_pattern is None
    as_directory = not as_file and whole and not any(file.startswith(f"{path}{os.sep}") for file in spare)
    where, name = os.path.split(path) if as_file or as_directory else (path, "")
    try:
        with closing(calls.open_directory(where)) as dir_fd:
            if as_directory:
                _remove_directory(name, dir_fd)
            elif filename_pattern is not None:
                _remove_files(dir_fd, path, filename_pattern, spare)
            elif path not in spare:
                calls.unlink(name, dir_fd=dir_fd)
                remove_file(dir_fd, f"{name}{MANIFEST_SUFFIX}")
    except FileNotFoundError:
        return
    except OSError as error:
        raise refused("deleting the old checkpoint", path, error) from error


def _remove_directory(name: str, dir_fd: int) -> None:
    if not stat.S_ISDIR(os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_mode):
        return  # another program has replaced it by something else
    deleted = f"{DELETED_PREFIX}{secrets.token_hex(5)}"
    calls.rename(name, deleted, source_fd=dir_fd, target_fd=dir_fd)
    calls.remove_tree(deleted, dir_fd=dir_fd)


def _remove_files(dir_fd: int, path: str, pattern: str, spare: Set[str]) -> None:
    shards = [name for name in os.listdir(dir_fd) if is_checkpoint_file(name, pattern)]
    # The index first: without it no reader takes the shards for a checkpoint.
    for name in dict.fromkeys((index_name(pattern), manifest_name(pattern), *shards)):
        if os.path.join(path, name) not in spare:
            remove_file(dir_fd, name)
