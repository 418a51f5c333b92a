"""Saving: from tensors to a checkpoint that survives a power cut, in one step for its readers.

`api.py` has the public `save` and `Saver`. Each save is a `PendingSave` (`pending.py`); its `_run` shows the life of a
save on a thread of its own. `plan.py` (pure) decides shards, headers and blocks. A `SaveScheduler` fills the blocks by
copying and writes full ones meanwhile; at the end of the snapshot the caller's tensors may change. A transaction of
`stio.storage` commits when all files are durable. `nested.py` takes nested state apart for `save_state`.

Memory: blocks come from a `StagingPool` (one for a save, or one for all saves of a saver), never more than its budget
or one block. A `LazyTensor` is produced when its bytes are needed, one part at a time (`producers.py`).

Invariants: equal tensors and options give equal files. Saves of one saver commit in the order of their calls. Tensors
are released when they are staged. After an error or a cancel no thread uses tensors, blocks or files, and what was
written is removed. This package knows nothing of loads. Start with `pending.py`.
"""
