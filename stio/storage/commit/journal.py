"""The staging directory of a save, and the journal's record in it: by them recovery completes or undoes a dead save.

A save works in `.stio-<id>`, and holds a lock on the file `lock` in it until it ends. By a free lock recovery
recognises a dead owner. The directory's mode is 0700, so other users cannot hold that lock.

A save that changes an existing directory writes its record there, durable before the first visible change. Every step
can be repeated, and compares first: no file is removed or replaced unless its size and time, or its content, are those
in the record. The record may come from a downloaded directory, so its names are checked: they stay inside the
directory.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Literal

import msgspec

from stio.format.files import INDEX_SUFFIX
from stio.storage.base import Note
from stio.storage.checks import UNSUPPORTED
from stio.storage.commit import syscalls as calls
from stio.storage.commit.directory_lock import FileLock, is_same
from stio.storage.commit.files import (
    MAX_INDEX_BYTES,
    Stamp,
    attributes_at,
    closing,
    digest_of,
    read_small,
    stamp_of,
    write_small,
)
from stio.text import log

STAGING_PREFIX = ".stio-"
"""Prefix of a staging directory's name; the rest is the save's id."""

STAGED_FILE_SUFFIX = ".file"
"""Suffix of the name of a small file that is staged without a directory; before it, prefix and id."""

DELETED_PREFIX = ".stio-trash-"
"""Prefix of the name of a directory whose deletion has started."""

KEPT_BY_SYSTEM = (".fuse_hidden", ".nfs")
"""Prefixes of the names that network and user-space filesystems give to files that are removed while they are open."""

LOCK_NAME = "lock"
"""File in a staging directory; its owner holds the lock on it."""

FILES_NAME = "new"
"""Directory in a staging directory for the new files."""


class NoRenameError(OSError):
    """The filesystem renames no directories."""


class StagingDirectory:
    """The staging directory of one save, and the lock on it.

    Args:
        home_fd: The directory that will hold it; the caller keeps it open.
        save_id: Random; end of its name.

    Raises:
        FileExistsError: The name is taken, or a recovery took the directory before it was locked.
        NoRenameError: The filesystem renames no directories, so that nothing could be published.
        OSError: The operating system reported an error.
    """

    def __init__(self, home_fd: int, save_id: str) -> None:
        self._home_fd, self.save_id = home_fd, save_id
        self._lock: FileLock | None = None
        self.fd = self.files_fd = -1
        name = STAGING_PREFIX + save_id
        calls.make_directory(name, dir_fd=home_fd, mode=0o700)
        try:
            self.fd = calls.open_directory(name, dir_fd=home_fd)
            self._lock = FileLock(LOCK_NAME, self.fd, stays=True)
            if not self._lock.try_lock() or not is_same(home_fd, name, self.fd):
                raise FileNotFoundError
            _make_and_rename(self.fd)
            self.files_fd = calls.open_directory(FILES_NAME, dir_fd=self.fd)
        except BaseException as error:
            self.release()  # first: some filesystems keep the names of open files
            if isinstance(error, FileNotFoundError):
                raise FileExistsError(errno.EEXIST, "a recovery has taken the staging directory") from error
            calls.remove_tree(name, dir_fd=home_fd)
            raise

    def remove(self) -> None:
        """Remove the directory and its content as far as possible, and close it. Idempotent; never raises."""
        if self.fd < 0:
            return
        name = None
        try:
            name = rename_for_deletion(self._home_fd, STAGING_PREFIX + self.save_id)
        except FileNotFoundError:
            pass  # another program has removed it, or all of the destination
        except OSError as error:
            message = "a staging directory is left, the next save here or `stio gc` removes it: %s"
            log(logging.WARNING, message, error)
        if name is not None:
            with suppress(OSError):
                calls.unlink(LOCK_NAME, dir_fd=self.fd)
        # Before the removal: filesystems in user space keep the names of open files, and the directory with them. By
        # its new name it belongs to whoever deletes it.
        self.release()
        if name is not None:
            try:
                calls.remove_directory(name, dir_fd=self._home_fd)
            except OSError:
                calls.remove_tree(name, dir_fd=self._home_fd)

    def release(self) -> None:
        """Close the directory and release its lock; the next recovery handles it. Idempotent."""
        if self._lock is not None:
            self._lock.release()
        fds, self.fd, self.files_fd = (self.files_fd, self.fd), -1, -1
        for fd in fds:
            if fd >= 0:
                calls.close(fd)


def _make_and_rename(fd: int) -> None:
    """Make the directory for the new files by a rename: a mounted bucket would refuse that of the commit too."""
    calls.make_directory(f"{FILES_NAME}.made", dir_fd=fd)
    try:
        calls.rename(f"{FILES_NAME}.made", FILES_NAME, source_fd=fd, target_fd=fd)
    except OSError as error:
        if error.errno in UNSUPPORTED or error.errno == errno.EXDEV:
            raise NoRenameError(*error.args[:2]) from error
        raise


def rename_for_deletion(home_fd: int, name: str) -> str:
    """Rename a directory of stio to a name with `DELETED_PREFIX`, before it is deleted; return the new name.

    Where the filesystem has no renames it keeps its name, and loses its record.

    Raises:
        OSError: The operating system reported an error.
    """
    # Before any file is deleted: recovery must not roll a half-deleted staging directory forward.
    deleted = DELETED_PREFIX + name.removeprefix(STAGING_PREFIX)
    try:
        calls.rename(name, deleted, source_fd=home_fd, target_fd=home_fd)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        with closing(calls.open_directory(name, dir_fd=home_fd)) as fd:
            remove_record(fd, durable=False)
        return name
    return deleted


MAX_NOTE_BYTES = 64 << 20
"""Longest note."""

_RECORD_NAME = "intent.json"
_MAX_RECORD_BYTES = 16 << 20
_VERSION = 1


@dataclass(frozen=True, slots=True)
class NoteDigests:
    """The SHA-256 of a note's content in each phase of a save; None where the note does not exist."""

    name: str
    """Name in the directory."""
    was: str | None
    """Before the save."""
    before: str | None
    """From shortly before the commit on."""
    after: str | None
    """After the commit."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """The record of one save, as it is stored."""

    version: int
    """Version of this format."""
    save_id: str
    """Id of the save."""
    commit: Literal["index", "file", "files"]
    """The step that commits: the rename of the index, of the only file, or this record (then it is always rolled
    forward)."""
    last: str
    """Name of the file that is renamed last: the index, or the only file."""
    last_stamp: Stamp
    """Stamp of that new file."""
    last_sha256: str | None
    """SHA-256 of the new index; None for a file of tensors."""
    old_sha256: str | None
    """SHA-256 of the index that it replaces, None if there was none."""
    moves: dict[str, Stamp]
    """New files that are moved into the directory before `last`."""
    unlink: dict[str, Stamp]
    """Old files to remove after the commit, in this order: an index that no new one replaces is the first."""
    notes: tuple[NoteDigests, ...]
    """Notes that change with the commit."""


class UnknownRecordError(OSError):
    """Another version of stio wrote what an interrupted save has left: only that version can complete it or undo it."""


# The record.


def write_record(staging_fd: int, record: JournalRecord, *, durable: bool) -> None:
    """Write the record, in one step: recovery never reads a part of it.

    Raises:
        OSError: The operating system reported an error.
    """
    part = _RECORD_NAME + ".part"
    write_small(staging_fd, part, msgspec.json.encode(record), durable=durable)
    calls.rename(part, _RECORD_NAME, source_fd=staging_fd, target_fd=staging_fd)
    if durable:
        calls.sync_directory(staging_fd)


def remove_record(staging_fd: int, *, durable: bool) -> None:
    """Remove the record, if there is one.

    Raises:
        OSError: The operating system reported an error; the record may still be there, or come back after a power cut.
    """
    calls.unlink(_RECORD_NAME, dir_fd=staging_fd)
    if durable:
        calls.sync_directory(staging_fd)


def read_record(staging_fd: int) -> JournalRecord | None:
    """Return the record of a staging directory, None if there is no valid one.

    Raises:
        UnknownRecordError: Another version of stio wrote the record.
        OSError: The operating system reported an error.
    """
    raw = read_small(staging_fd, _RECORD_NAME, _MAX_RECORD_BYTES)
    if raw is None:
        return None
    try:
        record = msgspec.json.decode(raw, type=JournalRecord)
    except (msgspec.MsgspecError, RecursionError):
        record = None
    if (record is None and has_version(raw)) or (record is not None and record.version != _VERSION):
        raise UnknownRecordError(errno.ENOTSUP, "the record of another version of stio")
    if record is None:
        return None
    names = [record.last, *record.moves, *record.unlink, *(note.name for note in record.notes)]
    return record if all(map(is_plain, names)) else None


def has_version(raw: bytes) -> bool:
    """Return whether a text is a JSON object with a version, as each record of stio has."""
    try:
        return "version" in msgspec.json.decode(raw, type=dict[str, object])
    except (msgspec.MsgspecError, RecursionError):
        return False


def is_plain(name: str) -> bool:
    """Return whether a name is that of an entry of a directory, without a path to another directory."""
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


# Notes.


def stage_notes(home_fd: int, staging_fd: int, notes: Sequence[Note], *, durable: bool) -> tuple[NoteDigests, ...]:
    """Write the notes' content of each phase into the staging directory.

    Raises:
        OSError: The operating system reported an error.
    """
    staged = []
    for k, note in enumerate(notes):
        was = read_small(home_fd, note.name, MAX_NOTE_BYTES)
        attributes = attributes_at(home_fd, note.name)
        for phase, data in (("was", was), ("before", note.before), ("after", note.after)):
            if data is not None:
                write_small(staging_fd, _staged_note(k, phase), data, attributes=attributes, durable=durable)
        staged.append(NoteDigests(note.name, digest_of(was), digest_of(note.before), digest_of(note.after)))
    return tuple(staged)


def apply_notes(
    home_fd: int, staging_fd: int, notes: Sequence[NoteDigests], phase: Literal["before", "after", "was"]
) -> None:
    """Replace each note by its content of a phase, if it has the content of the phase before.

    If a crash has lost the staged file of "after" or "was", the note is skipped: its present content is valid for both
    checkpoints.

    Raises:
        OSError: The operating system reported an error.
    """
    for k, note in enumerate(notes):
        new: str | None = getattr(note, phase)
        expected = note.was if phase == "before" else note.before
        if new == expected or digest_of(read_small(home_fd, note.name, MAX_NOTE_BYTES)) != expected:
            continue  # nothing to do, or done already, or another program has changed it
        if new is None:
            calls.unlink(note.name, dir_fd=home_fd)
        elif phase == "before" or stamp_of(staging_fd, _staged_note(k, phase)) is not None:
            calls.rename(_staged_note(k, phase), note.name, source_fd=staging_fd, target_fd=home_fd)


def _staged_note(k: int, phase: str) -> str:
    return f"note-{k}-{phase}"


# Roll forward and back. The caller holds the directory's lock, where locks exist.


def is_committed(home_fd: int, record: JournalRecord) -> bool:
    """Return whether the file whose rename is the commit is in place.

    Raises:
        OSError: The operating system reported an error.
    """
    if record.last_sha256 is None:
        return stamp_of(home_fd, record.last) == record.last_stamp
    return digest_of(read_small(home_fd, record.last, MAX_INDEX_BYTES)) == record.last_sha256


def make_visible(home_fd: int, staging_fd: int, files_fd: int, record: JournalRecord, *, durable: bool) -> None:
    """Make the changes of a commit, or the rest of them. The last one is the commit, if the record is not.

    Raises:
        FileExistsError: A name that was free is in use.
        OSError: The operating system reported an error.
    """
    replaces = record.commit == "files"
    apply_notes(home_fd, staging_fd, record.notes, "before")
    for name in (*record.moves, record.last):
        if name == record.last and durable and (record.moves or record.notes):
            calls.sync_directory(home_fd)  # the shards are durable before an index that names them
        if not replaces or stamp_of(files_fd, name) is not None:
            rename = calls.rename if replaces or name == record.last else calls.rename_new
            rename(name, name, source_fd=files_fd, target_fd=home_fd)


def clean_up(home_fd: int, staging_fd: int, record: JournalRecord, *, durable: bool) -> None:
    """Clean up after a durable commit: write the notes' last content, remove the old files.

    Raises:
        OSError: The operating system reported an error; the rest can be done later.
    """
    apply_notes(home_fd, staging_fd, record.notes, "after")
    for name, stamp in record.unlink.items():
        if name != record.last and name not in record.moves and stamp_of(home_fd, name) == stamp:
            calls.unlink(name, dir_fd=home_fd)
            if durable and name.endswith(INDEX_SUFFIX):
                calls.sync_directory(home_fd)  # its shards are removed only when no reader can find the index
    if durable and (record.notes or record.unlink):
        calls.sync_directory(home_fd)


def has_old_index(home_fd: int, record: JournalRecord) -> bool:
    """Return whether there may be an old index that `clean_up` removes: until then, readers load the old files."""
    try:
        return any(
            name.endswith(INDEX_SUFFIX) and stamp_of(home_fd, name) == stamp for name, stamp in record.unlink.items()
        )
    except OSError:
        return True


def roll_back(home_fd: int, staging_fd: int, record: JournalRecord, *, durable: bool) -> None:
    """Undo the changes that a save made before its commit.

    Raises:
        OSError: The operating system reported an error; the rest can be done later.
    """
    index = b""
    if record.last_sha256 is not None and record.moves:
        index = read_small(home_fd, record.last, MAX_INDEX_BYTES) or b""
    for name, stamp in record.moves.items():
        # A file that the present index names is in use. The index is not parsed: if a name occurs in it by chance, one
        # superfluous file stays, which does no harm.
        is_named = any(quote(name).encode() in index for quote in (encode_basestring, encode_basestring_ascii))
        if stamp_of(home_fd, name) == stamp and not is_named:
            calls.unlink(name, dir_fd=home_fd)
    apply_notes(home_fd, staging_fd, record.notes, "was")
    if durable:
        calls.sync_directory(home_fd)
