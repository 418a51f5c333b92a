"""Saving: from tensors to a checkpoint that survives a power cut, in one step for its readers.

`api.py` has the public `save` and `Saver`. Each save is a `PendingSave` (`pending.py`) with its own thread, and its
states are a table, `LIFE_CYCLE`. It is four values, each made from the one before. *Planned*: `tensors.py` has the
caller's tensors by name, `plan.py` (pure) decides shards, headers and blocks (`PlannedSave`). *Staged*: a
`SaveScheduler` (`scheduler.py`) fills blocks by copying and writes full ones at the same time, mostly by the engine
(`stio.native`); at the end of the snapshot the caller's tensors may change. *Written*: all files are durable
(`WrittenSave`). *Published*: a transaction of `stio.storage` commits them (`SaveResult`). After that `retention.py`
counts the steps of a `Saver` (`keep_last`), and `surroundings.py` logs what lies beside the checkpoint and hides it.
`nested.py` splits nested state into tensors and a tree for `save_state`. `deltas.py` compares a save with the one
before it, so that it writes what changed (`full_every=`, `base=`).

Memory: blocks come from a `StagingPool` (`staging_pool.py`; one for a save, or one for all saves of a saver), never
more than its budget or one block. A `LazyTensor` is produced when its bytes are needed, one part at a time
(`tensors.py`).

Invariants: equal tensors and options give equal files, but for the id of a save that may be in a chain of deltas.
Saves of one saver commit in the order of their calls. Tensors are released when they are staged. After an error or a
cancel no thread uses tensors, blocks or files, and what was written is removed. This package does not depend on loads.
Start with `pending.py`.

A destination is made absolute at the call; its links are resolved when the save begins. A producer must not wait for
the `Saver` that it works for, and a callback on a save's thread that waits for a later save gets an error. At most four
blocks are written at a time; `save` keeps four full ones ready. Where only workers do the work there are six, since
four that fill and write in turn left the disk idle. A save of one block is staged and written on its own thread.

What `keep_last` removes is decided in `retention.py` and removed by `stio.storage.commit.retention`, which compares
device, inode, size and time of each file with those at the commit, and leaves what differs or was added. When an
exception leaves the block of a `Saver`, its saves are waited for; when a cancel leaves it, they are rolled back. A
second Ctrl-C in `stio.sync` is raised before the rollback has ended, so that a program can leave a producer that hangs.
"""

from stio.saving.api import Saver, save
from stio.saving.nested import StoredTensor, flatten, tree_text
from stio.saving.options import (
    DEFAULT_PATTERN,
    CommitStep,
    DestinationLike,
    Durability,
    SaveOptions,
    SaveResult,
    ShardNames,
    absolute_destination,
)
from stio.saving.pending import PendingSave, SharedBySaves
from stio.saving.plan import Piece, Run, ShardPlan, WriteBlock, WritePlan, plan_files, plan_writes
from stio.saving.retention import warn_of_higher_steps
from stio.saving.tensors import tensors_of, tied_names

__all__ = [
    "DEFAULT_PATTERN",
    "CommitStep",
    "DestinationLike",
    "Durability",
    "PendingSave",
    "Piece",
    "Run",
    "SaveOptions",
    "SaveResult",
    "Saver",
    "ShardNames",
    "ShardPlan",
    "SharedBySaves",
    "StoredTensor",
    "WriteBlock",
    "WritePlan",
    "absolute_destination",
    "flatten",
    "plan_files",
    "plan_writes",
    "save",
    "tensors_of",
    "tied_names",
    "tree_text",
    "warn_of_higher_steps",
]
