"""The staging directory of one save, in which other processes write too.

The process that has the transaction owns the staging directory: it makes it, locks it, creates the files, commits, and
removes it. It gives the others an `Invitation`. They open the directory by its path, and compare a random text in it,
since the same path may lead to another directory on another machine. They hold no lock: if the owner dies, recovery
removes the directory, and what they still write goes into files that have no name any more.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from stio.errors import StorageError
from stio.runtime.hashing import Hasher
from stio.runtime.memory import allocate
from stio.storage.checks import refused
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import LockTimeout
from stio.storage.commit.file_writer import LocalFileWriter
from stio.storage.commit.small_files import closing, read_small
from stio.storage.commit.staging_dir import FILES_NAME
from stio.storage.local import is_local, open_at
from stio.storage.paths import resolve_links

NONCE_NAME = "shared"
"""File in a staging directory with the text that the processes compare."""

_NONCE_BYTES = 64
_VISIBLE_SECONDS = 5.0
"""Longest time after which a network filesystem shows a new directory to another machine."""
_HASHED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """What another process needs to write into the files of a save."""

    staging: str
    """Path of the staging directory."""
    nonce: str
    """Text of the file `NONCE_NAME` in it."""
    destination: str
    """The destination, links followed."""
    shard_names: tuple[str, ...]
    """Names of the files, in the plan's order."""
    is_file: bool
    """Whether the destination is one file."""
    takes_index: bool
    """Whether the commit takes an index."""
    durable: bool
    """Whether complete files must survive a power cut."""

    def to_json(self) -> bytes:
        """Return it as text for another process."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Return the invitation that `to_json` described.

        Raises:
            StorageError: It is none.
        """
        try:
            values = json.loads(text)  # not by msgspec: paths may have surrogates
            found = cls(**{**values, "shard_names": tuple(values["shard_names"])})
            texts = (found.staging, found.nonce, found.destination, *found.shard_names)
            flags = (found.is_file, found.takes_index, found.durable)
            if not (all(isinstance(one, str) for one in texts) and all(isinstance(one, bool) for one in flags)):
                raise TypeError("a field has another type")
            return found
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise StorageError("another process has sent no valid invitation to its save", found=text[:80]) from error

    def final_path(self, name: str) -> str:
        """Return the path that a file will have, for messages."""
        return self.destination if self.is_file else os.path.join(self.destination, name)


class JoinedStaging:
    """The staging directory of another process, to write into its files. Made by `open`.

    Args:
        invitation: The owner's.
        files_fd: The directory with the files; owned by this object.
    """

    def __init__(self, invitation: Invitation, files_fd: int) -> None:
        self.invitation = invitation
        self._files_fd = files_fd
        self._writers: list[LocalFileWriter] = []

    @classmethod
    def open(cls, invitation: Invitation, check: Callable[[], None] = lambda: None) -> Self:
        """Open the owner's staging directory.

        Args:
            invitation: The owner's.
            check: Called while it waits for a network filesystem; it raises to end the wait.

        Raises:
            StorageError: This process does not see that directory.
        """
        found: list[int] = []

        def look() -> bool:
            files_fd = _open_files(invitation)
            if files_fd is not None:
                found.append(files_fd)
            return bool(found) or _is_on_local_filesystem(invitation.staging)

        try:
            LockTimeout(_VISIBLE_SECONDS).wait_until(look, check)
        except StorageError:
            raise
        except (OSError, ValueError) as error:
            raise refused("opening the staging directory of the save", invitation.staging, error) from error
        if not found:
            raise StorageError(
                "this process does not see the files that the owner of the save has made; is the destination on a "
                "filesystem that all processes share?",
                path=invitation.destination,
                errno=errno.ENOENT,
                expected=invitation.staging,
            )
        return cls(invitation, found[0])

    def create(self, own_bytes: Sequence[int]) -> list[LocalFileWriter]:
        """Return a writer for each file, which the owner has created; its `finish` makes this process's part durable.

        Args:
            own_bytes: Bytes that this process writes to each.
        """
        invitation = self.invitation
        for name, nbytes in zip(invitation.shard_names, own_bytes, strict=True):
            path = invitation.final_path(name)
            writer = LocalFileWriter(
                self._files_fd, name, path, nbytes, attributes=None, durable=invitation.durable, is_shared=True
            )
            self._writers.append(writer)
        return self._writers

    def digest(self, name: str, hasher: Hasher, check: Callable[[], None]) -> str:
        """Return the digest of a complete file; see `digest_of_file`."""
        return digest_of_file(self._files_fd, name, self.invitation.final_path(name), hasher, check)

    def close(self) -> None:
        """Close all descriptors. Idempotent; no write may be under way."""
        for writer in self._writers:
            writer.close()
        fd, self._files_fd = self._files_fd, -1
        if fd >= 0:
            calls.close(fd)


def _open_files(invitation: Invitation) -> int | None:
    """Open the directory of the files; None if the staging directory is not there, or is another one."""
    try:
        fd = calls.open_directory(resolve_links(invitation.staging))
    except FileNotFoundError:
        return None
    with closing(fd):
        nonce = read_small(fd, NONCE_NAME, _NONCE_BYTES, where=invitation.staging)
        if nonce != invitation.nonce.encode():
            return None
        try:
            return calls.open_directory(FILES_NAME, dir_fd=fd)
        except FileNotFoundError:
            return None


def _is_on_local_filesystem(staging: str) -> bool:
    """Return whether the directory above a staging directory is here, on a filesystem of this machine."""
    try:
        fd = calls.open_directory(resolve_links(os.path.dirname(staging)))
    except FileNotFoundError:
        return False
    with closing(fd):
        return is_local(fd)


def digest_of_file(dir_fd: int, name: str, path: str, hasher: Hasher, check: Callable[[], None]) -> str:
    """Return the digest of a new file.

    Args:
        dir_fd: Its directory.
        name: Its name.
        path: Name for messages.
        hasher: A new one.
        check: Called between reads; it raises to end them.

    Raises:
        StorageError: The operating system reported an error.
    """
    file = open_at(name, path, dir_fd)
    try:
        nbytes, memory = file.identity.nbytes, allocate(_HASHED_BYTES)
        for offset in range(0, nbytes, memory.nbytes):
            check()
            piece = memory.sub(0, min(memory.nbytes, nbytes - offset))
            file.read_into(offset, [piece])
            hasher.update(piece.view())
        return hasher.hexdigest()
    finally:
        file.close()
