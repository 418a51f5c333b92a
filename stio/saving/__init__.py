"""Saving: from tensors to a checkpoint that survives a power cut, in one step for its readers.

`api.py` has the public `save` and `Saver`. Each save is a `PendingSave` (`pending.py`) with its own thread; `_run` has
its steps. `tensors.py` has the caller's tensors by name. `plan.py` (pure) decides shards, headers and blocks. A
`SaveScheduler` (`scheduler.py`) fills blocks by copying and writes full ones at the same time, mostly by the engine
(`stio.native`); at the end of the snapshot the caller's tensors may change. A transaction of `stio.storage` commits
when all files are durable. `nested.py` splits nested state into tensors and a tree for `save_state`. `retention.py`
counts the steps of a `Saver` (`keep_last`). Where several processes write the files of one save, each has a plan of its
parts (`plan_parts.py`), and a transaction of them.

Memory: blocks come from a `StagingPool` (`staging_pool.py`; one for a save, or one for all saves of a saver), never
more than its budget or one block. A `LazyTensor` is produced when its bytes are needed, one part at a time
(`tensors.py`).

Invariants: equal tensors and options give equal files. Saves of one saver commit in the order of their calls. Tensors
are released when they are staged. After an error or a cancel no thread uses tensors, blocks or files, and what was
written is removed. This package does not depend on loads. Start with `pending.py`.
"""
