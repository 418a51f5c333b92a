"""The base of stio: threads, memory and measurements, without types for checkpoints, storage or tensors.

An `Operation` (`operation.py`) is one piece of cancellable work on a thread of its own; each load and each save is one.
A `Notifier` (`notifier.py`) wakes the tasks and the threads that wait for it; `run_blocking` there runs the same
coroutines without an event loop. A `WorkerPool` (`workers.py`) is a few threads that work on one queue. `calls.py`
makes calls that a cancel can leave, and runs coroutines of storages and producers.
`process.py` holds what belongs to the whole process: fork hooks, the interpreter's switch interval, pauses of the
garbage collector. A `Region` (`memory.py`) is host memory by address. A `Trace` (`trace.py`) records what each thread
did and when; `spans.py` adds it up, `timeline.py` draws it. `stats.py` counts. `locks.py` makes all
locks of stio and says which threads may hold one. `clock.py` has the time for every decision that depends on it, and
the pauses. `control_groups.py` reads the limits of memory and processors. `svg.py` draws, `text.py` makes text for
readers: sizes, log lines, URLs. `limits.py` bounds what a file may request, `progress.py` reports how far a call is.

Invariants: no user code runs while a lock of this package is held; callers' threads hold no lock that stio's threads
take; a forked child has none of its parent's operations. No module here imports torch. Start with `operation.py`.
"""
