"""A save to a local filesystem: one transaction (`transaction.py`, start there), and the recovery after a crash.

Prepare: `destination.py` describes the destination and plans names and commit step; `journal.py` makes `.stio-<id>`
beside the new files' place and locks it; `files.py` writes the new files into it; `directory_lock.py` excludes other
saves from the directory that is changed. Commit: `publication.py` renames, by the plan; before it changes an existing
checkpoint, it records in `intent.json` what it will change (`journal.py`). Roll back: the staging directory is removed.
Other processes may write into the staging directory too (`JoinedTransaction`); they hold no lock, and its owner alone
commits. `syscalls.py` has every call that changes a disk.

After a crash, the next save in the directory, or `collect_garbage` (`stio gc`), cleans up by `recovery.py`:

- a staging directory without a record: removed, with the new files in it; nothing was visible yet. If it holds a
  directory that another one was to replace, its content is put back before, or gets a name `.stio-kept-<id>` if its own
  is in use; what has that name is never deleted;
- one with a record, its commit not in place: rolled back: new files that were moved into the destination are removed,
  notes get their old content; then the staging directory is removed;
- one with a record, its commit in place: rolled forward: the remaining files are replaced, notes get their new
  content, old files are removed; then the staging directory is removed;
- `.stio-trash-<id>`, a directory whose deletion was interrupted: deleted;
- `.stio-<id>.file`, a small file that was not renamed (`write_small_file`): deleted.

Invariants: a reader through the index finds the whole old or the whole new checkpoint. Recovery changes only what
has a dead owner: its lock is free and, on a filesystem that is not local, it is old too. No file is removed or replaced
unless its size and time, or its content, are those in the record. `retention.py` deletes old checkpoints (`keep_last`);
it is no part of a transaction. A transaction records what it published (`LocalTransaction.published`), and a deletion
compares with that, once, right before it deletes: what another program puts in the place of a file or directory after
that comparison, within microseconds, is deleted with it.

A file that replaces another one gets its mode, and its owner and group as far as the process may set them. Access
control lists and extended attributes are not copied (`files.py`).

Locks. The directory's lock is held for the commit, except when the destination is a new directory; it is taken before
the save refuses a cancel (`prepare_commit`), and all waits of a save share `lock_timeout=`. Then the directory is
compared with what the save began with; a change is a `ConcurrentSaveError`. The recovery before a save waits for the
lock for at most a second, and leaves the rest to a later recovery. In a directory such as /tmp it follows only records
of its own user and of the directory's owner. What another version of stio has left is never deleted; a save there is
refused.

Of several savers the last one wins. If it writes a single file where an index was, removing the index is the commit for
readers, and that removal is durable before the old shards are deleted. `CommitUncertainError` is also raised where
`commit="files"` was interrupted between files, and where an index that readers still follow could not be removed; the
next save there, or `stio gc`, completes the commit. Which links a save follows is decided by `stio.storage.checks`.
"""

from stio.storage.commit import syscalls
from stio.storage.commit.destination import SingleFile, is_one_file
from stio.storage.commit.directory_lock import LOCK_TIMEOUT_SECONDS, FileLock, LockTimeout, boot_id
from stio.storage.commit.files import LocalFileWriter, read_small, status_at, write_small, write_whole
from stio.storage.commit.recovery import MAX_AGE_SECONDS, GarbageReport, collect_garbage
from stio.storage.commit.retention import EarlierSave, WrittenFiles, find_earlier_saves
from stio.storage.commit.transaction import (
    Invitation,
    JoinedTransaction,
    LocalTransaction,
    NamedFiles,
    begin_directory,
    begin_local,
    write_small_file,
)

__all__ = [
    "LOCK_TIMEOUT_SECONDS",
    "MAX_AGE_SECONDS",
    "EarlierSave",
    "FileLock",
    "GarbageReport",
    "Invitation",
    "JoinedTransaction",
    "LocalFileWriter",
    "LocalTransaction",
    "LockTimeout",
    "NamedFiles",
    "SingleFile",
    "WrittenFiles",
    "begin_directory",
    "begin_local",
    "boot_id",
    "collect_garbage",
    "find_earlier_saves",
    "is_one_file",
    "read_small",
    "status_at",
    "syscalls",
    "write_small",
    "write_small_file",
    "write_whole",
]
