"""What a save is about to do in a directory, written down so that it can be finished or undone by somebody else.

The record lies in the staging directory and is durable before the first visible change. Every step is repeatable and
looks first: nothing is removed or replaced that is not, by size and time or by content, the very file that the record
means. A record may come with a downloaded directory, so its names are judged: they stay inside.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Literal

import msgspec

from stio.errors import StorageError
from stio.storage.base import Note
from stio.storage.checks import OPEN_FLAGS, require_regular
from stio.storage.commit import syscalls as calls
from stio.storage.commit.file_writer import put

__all__ = [
    "FILES_NAME",
    "MAX_INDEX_BYTES",
    "MAX_NOTE_BYTES",
    "JournalRecord",
    "NoteStep",
    "Stamp",
    "apply_notes",
    "digest_of",
    "finish",
    "is_committed",
    "leads_elsewhere",
    "read_record",
    "read_small",
    "remove_record",
    "replace_files",
    "roll_back",
    "stage_notes",
    "stamp_of",
    "write_record",
]

FILES_NAME = "new"
"""Subdirectory of a staging directory in which the new files are written."""

MAX_INDEX_BYTES = 256 << 20
"""Longest index that is read here; readers stop earlier."""

MAX_NOTE_BYTES = 64 << 20
"""Longest note."""

_INTENT_NAME = "intent.json"
_MAX_INTENT_BYTES = 16 << 20
_VERSION = 1
_INDEX_SUFFIX = ".index.json"


@dataclass(frozen=True, slots=True)
class Stamp:
    """What tells one file of a name from another. No inode: some FUSE filesystems number theirs anew at each look."""

    nbytes: int
    """Size."""
    mtime_ns: int
    """Time of the last change, nanoseconds; a rename keeps it."""


@dataclass(frozen=True, slots=True)
class NoteStep:
    """A note's way through a save; what it says is a SHA-256, None for a note that is not there."""

    name: str
    """Name in the directory."""
    was: str | None
    """Before the save."""
    before: str | None
    """From shortly before the commit on."""
    after: str | None
    """Once the commit is done."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One save's record."""

    version: int
    """Of this format."""
    save_id: str
    """Of the save."""
    commit: Literal["index", "file", "files"]
    """What commits: the rename of the index, of the only file, or this record (then it can only go forward)."""
    last: str
    """Name of the file that is renamed last: the index, or the only file."""
    last_stamp: Stamp
    """Of that new file."""
    last_sha256: str | None
    """Of the new index; None for a file of tensors."""
    old_sha256: str | None
    """Of the index that it replaces, None where there was none."""
    moves: dict[str, Stamp]
    """New files that are moved in before it."""
    unlink: dict[str, Stamp]
    """Old files that go once it is done, in this order: an index that no new one replaces stands first."""
    notes: tuple[NoteStep, ...]
    """Notes that change with it."""


@dataclass(frozen=True, slots=True)
class _Versioned:
    version: int


# Looking.


def read_small(dir_fd: int, name: str, limit_bytes: int, *, where: str = "") -> bytes | None:
    """Return a small file's bytes, None if it is not there.

    Args:
        dir_fd: Its directory.
        name: Its name; a link is followed.
        limit_bytes: Most that it may hold.
        where: Path of the directory, for messages.

    Raises:
        StorageError: It is larger, or no regular file.
        OSError: The system refused.
    """
    path = os.path.join(where, name)
    try:
        # Looked at before it is opened, since opening a device may act.
        require_regular(os.stat(name, dir_fd=dir_fd), path)
        fd = os.open(name, OPEN_FLAGS, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    with open(fd, "rb") as file:
        require_regular(os.fstat(fd), path)
        data = file.read(limit_bytes + 1)
    if len(data) > limit_bytes:
        raise StorageError(f"the file is larger than {limit_bytes:,} bytes", path=path, errno=errno.EOVERFLOW)
    return data


def digest_of(data: bytes | None) -> str | None:
    """Return the SHA-256 of a content, None for none."""
    return None if data is None else hashlib.sha256(data).hexdigest()


def stamp_of(dir_fd: int, name: str) -> Stamp | None:
    """Return the stamp of a regular file or link, None if there is none of this name."""
    try:
        found = os.stat(name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
        return None
    return Stamp(found.st_size, found.st_mtime_ns)


# The record.


def write_record(staging_fd: int, intent: JournalRecord, *, durable: bool) -> None:
    """Write the record; it is there whole or not at all.

    Raises:
        OSError: The system refused.
    """
    part = _INTENT_NAME + ".part"
    put(staging_fd, part, msgspec.json.encode(intent), durable=durable)
    calls.rename(part, _INTENT_NAME, source_fd=staging_fd, target_fd=staging_fd)
    if durable:
        calls.sync_directory(staging_fd)


def remove_record(staging_fd: int, *, durable: bool) -> None:
    """Take the record back, if there is one.

    Raises:
        OSError: The system refused; it may be there, or come back after a power cut.
    """
    _remove(_INTENT_NAME, staging_fd)
    if durable:
        calls.sync_directory(staging_fd)


def read_record(staging_fd: int) -> JournalRecord | None:
    """Return the record of a staging directory, None if there is none that means anything.

    Raises:
        OSError: The system refused, or the record is of a version that this stio does not know.
    """
    raw = read_small(staging_fd, _INTENT_NAME, _MAX_INTENT_BYTES)
    if raw is None:
        return None
    try:
        if msgspec.json.decode(raw, type=_Versioned).version != _VERSION:
            raise OSError(errno.ENOTSUP, "the record of another version of stio")
        intent = msgspec.json.decode(raw, type=JournalRecord)
    except (msgspec.MsgspecError, RecursionError):
        return None
    names = [intent.last, *intent.moves, *intent.unlink, *(note.name for note in intent.notes)]
    return intent if all(map(_is_plain, names)) else None


def _is_plain(name: str) -> bool:
    return name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


# Notes.


def stage_notes(home_fd: int, staging_fd: int, notes: Sequence[Note], *, durable: bool) -> tuple[NoteStep, ...]:
    """Write what the notes were, will be and will have been into the staging directory.

    Raises:
        OSError: The system refused.
    """
    steps = []
    for k, note in enumerate(notes):
        was = read_small(home_fd, note.name, MAX_NOTE_BYTES)
        mode = _mode_of(home_fd, note.name)
        for when, data in (("was", was), ("before", note.before), ("after", note.after)):
            if data is not None:
                put(staging_fd, _staged_note(k, when), data, mode=mode, durable=durable)
        steps.append(NoteStep(note.name, digest_of(was), digest_of(note.before), digest_of(note.after)))
    return tuple(steps)


def _mode_of(dir_fd: int, name: str) -> int | None:
    try:
        return stat.S_IMODE(os.stat(name, dir_fd=dir_fd).st_mode) & 0o777
    except FileNotFoundError:
        return None


def apply_notes(
    home_fd: int, staging_fd: int, notes: Sequence[NoteStep], step: Literal["before", "after", "was"]
) -> None:
    """Put the notes' next content in place, where the content of the step before it is found.

    What a disk has lost of "after" and "was" is left out: what stands there is right for both checkpoints.

    Raises:
        OSError: The system refused.
    """
    for k, note in enumerate(notes):
        wanted: str | None = getattr(note, step)
        expected = note.was if step == "before" else note.before
        if wanted == expected or digest_of(read_small(home_fd, note.name, MAX_NOTE_BYTES)) != expected:
            continue  # nothing to do, or done, or somebody else's by now
        if wanted is None:
            _remove(note.name, home_fd)
        elif step == "before" or stamp_of(staging_fd, _staged_note(k, step)) is not None:
            calls.rename(_staged_note(k, step), note.name, source_fd=staging_fd, target_fd=home_fd)


def _staged_note(k: int, when: str) -> str:
    return f"note-{k}-{when}"


# Forward and back. The caller holds the directory's lock, where there is one.


def is_committed(home_fd: int, intent: JournalRecord) -> bool:
    """Return whether the file whose rename is the commit stands in its place.

    Raises:
        OSError: The system did not say.
    """
    if intent.last_sha256 is None:
        return stamp_of(home_fd, intent.last) == intent.last_stamp
    return digest_of(read_small(home_fd, intent.last, MAX_INDEX_BYTES)) == intent.last_sha256


def replace_files(home_fd: int, staging_fd: int, files_fd: int, intent: JournalRecord, *, durable: bool) -> None:
    """Replace the old files one by one, from wherever that stopped; only where the record has committed that.

    Raises:
        OSError: The system refused; the rest can be done later.
    """
    apply_notes(home_fd, staging_fd, intent.notes, "before")
    for name in (*intent.moves, intent.last):
        if name == intent.last and durable:
            calls.sync_directory(home_fd)  # an index only over shards that are there
        if stamp_of(files_fd, name) is not None:
            calls.rename(name, name, source_fd=files_fd, target_fd=home_fd)
    if durable:
        calls.sync_directory(home_fd)


def finish(home_fd: int, staging_fd: int, intent: JournalRecord, *, durable: bool) -> None:
    """Do what follows the commit, once that is durable: the notes' last content, the old files' end.

    Raises:
        OSError: The system refused; the rest can be done later.
    """
    apply_notes(home_fd, staging_fd, intent.notes, "after")
    for name, stamp in intent.unlink.items():
        if name != intent.last and name not in intent.moves and stamp_of(home_fd, name) == stamp:
            _remove(name, home_fd)
            if durable and name.endswith(_INDEX_SUFFIX):
                calls.sync_directory(home_fd)  # what it names goes only when nobody is led there any more
    if durable and (intent.notes or intent.unlink):
        calls.sync_directory(home_fd)


def leads_elsewhere(home_fd: int, intent: JournalRecord) -> bool:
    """Return whether an index still stands that had to go with the old files, so that readers look for those.

    Raises:
        OSError: The system did not say.
    """
    return any(
        name.endswith(_INDEX_SUFFIX) and stamp_of(home_fd, name) == stamp for name, stamp in intent.unlink.items()
    )


def roll_back(home_fd: int, staging_fd: int, intent: JournalRecord, *, durable: bool) -> None:
    """Undo what a save did before its commit.

    Raises:
        OSError: The system refused; the rest can be done later.
    """
    named = b""
    if intent.last_sha256 is not None and intent.moves:
        named = read_small(home_fd, intent.last, MAX_INDEX_BYTES) or b""
    for name, stamp in intent.moves.items():
        # An index in place that names it: somebody has taken the file into use. No parsing: a name that is found
        # where it means nothing costs a file that stays, which harms nobody.
        if stamp_of(home_fd, name) == stamp and not _names(named, name):
            _remove(name, home_fd)
    apply_notes(home_fd, staging_fd, intent.notes, "was")
    if durable:
        calls.sync_directory(home_fd)


def _remove(name: str, dir_fd: int) -> None:
    try:
        calls.unlink(name, dir_fd=dir_fd)
    except FileNotFoundError:
        pass  # another janitor was here


def _names(index: bytes, name: str) -> bool:
    return encode_basestring(name).encode() in index or encode_basestring_ascii(name).encode() in index
