"""The base of stio: threads, memory and measurements, without types for checkpoints, storage or tensors.

An `Operation` (`operation.py`) is one piece of cancellable work on a thread of its own; each load and each save is one.
A `Notifier` (`notifier.py`) wakes the tasks and the threads that wait for it; `run_blocking` there runs the same
coroutines without an event loop. A `WorkerPool` (`workers.py`) is a few threads that work on one queue. `calls.py`
makes calls that a cancel can leave, and runs coroutines of storages and producers.
What belongs to the whole process (locks, forks, settings) is in `stio.process`.

Two parts have faces of their own. `memory.py`: host memory by address (a `Region`), and how much of it this process may
use. `reports/`: progress, traces, and the counters of the process.

Invariants: a forked child has none of its parent's operations. No module here imports torch. Start with `operation.py`.

Mappings above 128 MiB are unmapped on a thread of their own. At the interpreter's exit operations are cancelled and
waited for, for at most 10 seconds; saves are waited for as long as they make progress (`stio.saving.pending`). There is
no second event loop between a caller and its threads, since each handoff costs up to a switch interval beside a busy
Python thread; the loop of `calls.py` serves coroutines of storages and producers only.

Without the GIL, which is not tested. These hold on a free-threaded Python too: single operations on lists, deques,
dicts and sets, which lock the object; "register first, then read", where both sides operate on the same object (a
notifier's wakers, a condition's sleepers, callbacks of a cancel, the queue of a pool); locks; the engine; values that
are replaced as a whole. These would have to change first:

- an iterator that several workers advance (`stio.loading.scheduler`, `stio.remote.folder`) may yield an item
  twice;
- flags read without an operation on a common object (`cancelled`, `done`, `is_closed`) may be seen late, so a cancel
  may arrive one step later;
- objects made on first use without a lock (`functools.cache`) may be made twice;
- calls into C that keep the GIL no longer exclude each other.
"""

from stio.runtime import calls, memory
from stio.runtime.notifier import AsyncOnly, Notifier, in_event_loop, run_blocking, runs_blocking
from stio.runtime.operation import (
    Cancelled,
    Operation,
    PanicError,
    close_all,
    copy_of,
    current_operation,
    end_all_at_exit,
    is_interrupted,
    mark_progress,
    start_thread,
    without_panic,
)
from stio.runtime.workers import WorkerPool

__all__ = [
    "AsyncOnly",
    "Cancelled",
    "Notifier",
    "Operation",
    "PanicError",
    "WorkerPool",
    "calls",
    "close_all",
    "copy_of",
    "current_operation",
    "end_all_at_exit",
    "in_event_loop",
    "is_interrupted",
    "mark_progress",
    "memory",
    "run_blocking",
    "runs_blocking",
    "start_thread",
    "without_panic",
]
