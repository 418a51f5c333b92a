"""Loading: from files to tensors, on the CPU or on accelerators, into dictionaries, streams and modules.

Life of a load. `api.py` checks the keywords once (`LoadOptions`) and starts an operation, whose body (`body.py`) runs
on a thread of stio's own. `open.py` opens every shard and checks its header. `prepare.py` selects the tensors of each
device (a `DeviceLoad` each) and how each file is read for it (a `FileSelection` each). `plan.py` turns that into a
`ReadPlan`: groups of neighbouring tensors that are delivered together, cut into blocks of one read each.
`scheduler.py` executes it: workers take blocks, read paths (`read_paths.py`, `gds_path.py`) read them, and the
last block of a group delivers its tensors (a `LoadedGroup`) to a `load`, to the queue of a stream (`group_queue.py`),
into a module (`module.py`, `module_tree.py`), or into a nested state (`nested.py`).

Invariants. The memory of a group counts against the budget, under the scheduler's lock, from its first block until
its last user has released it. Groups start in the plan's order; a group that is larger than the budget is read alone.
A slot of staging memory is filled again only when the event behind its copies has passed. When a
load returns or raises, no thread and no copy engine touches its buffers.

A cancel calls `LoadScheduler.stop`, which notifies the scheduler's condition: workers that wait for budget wake.
Workers that wait for a slot of staging memory check `stopped` during the wait; workers that read check it after each
piece of 0.04 to 0.25 s (`stio.runtime.pacing`). An error in a worker stops the others in the same manner, and `run`
raises it.

Which file counts as cold is decided in `page_cache.py`; how many workers read, in blocks of what size, in `sizes.py`.
`options.py` has the keywords, `select.py` the names that are loaded, `readers.py` the reads of a block in pieces.
`placed.py` loads the part of each tensor that a rank holds, `parts.py` fills parts of tensors in memory of the caller.
`pull.py` copies a checkpoint from a URL to a directory. `representation.py` shows an open checkpoint at a prompt and in
notebooks. `integrity.py` compares files with a manifest, `cache/` holds files in host memory or on this machine's disk,
`warm_start/` loads a module while its forward runs. Start with `body.py`, then read `prepare.py` and `scheduler.py`.
"""
