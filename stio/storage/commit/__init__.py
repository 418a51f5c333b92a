"""A save to a local filesystem: one transaction (`transaction.py`, start there), and the recovery after a crash.

Prepare: `destination.py` describes the destination and plans names and commit step; `staging_dir.py` makes `.stio-<id>`
beside the new files' place and locks it; `file_writer.py` writes the new files into it; `directory_lock.py` excludes
other saves from the directory that is changed. Commit: `publication.py` renames, by the plan; `journal.py` records in
`intent.json` what a save over an existing checkpoint will change, before it changes it. Roll back: the staging
directory is removed. Other processes may write into the staging directory too (`JoinedTransaction`); they hold no
lock, and its owner alone commits. `files.py` (small files, and what a new file keeps of the one it replaces) and
`syscalls.py` (every call that changes a disk) serve all.

After a crash, the next save in the directory, or `collect_garbage` (`stio gc`), cleans up by `recovery.py`:

- a staging directory without a record: removed, with the new files in it; nothing was visible yet;
- one with a record, its commit not in place: rolled back by `journal.py`: new files that were moved into the
  destination are removed, notes get their old content; then the staging directory is removed;
- one with a record, its commit in place: rolled forward: the remaining files are replaced, notes get their new
  content, old files are removed; then the staging directory is removed;
- `.stio-aside-<id>`, a directory for what a deletion or a replacement has set aside: its content is put
  back, or gets a name `.stio-kept-<id>` if its own is in use; what has that name is never deleted;
- `.stio-trash-<id>`, a directory whose deletion was interrupted: deleted.

Invariants: a reader through the index finds the whole old or the whole new checkpoint. Recovery changes only what
has a dead owner: its lock is free and, on a filesystem that is not local, it is old too. No file is removed or replaced
unless its size and time, or its content, are those in the record. `retention.py` deletes old checkpoints (`keep_last`);
it is no part of a transaction. A transaction records what it published (`LocalTransaction.published`), and a deletion
compares with that. `written_list.py` stores such a record with a checkpoint, for deletions by a later process.
"""
