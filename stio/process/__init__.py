"""What belongs to the whole process: locks, forks, the interpreter's switch interval, its garbage collector.

`locks.py` makes all locks of stio, and says which threads may hold one. `settings.py` has the hooks of a forked child,
settings that operations beside each other share, and the context managers that leave no reference cycle behind.

Settings are counted, and the last user restores them: the switch interval (unchanged by default) and the garbage
collector, which pauses while more than 1,000 tensors are made. No user code runs while a lock of stio is held, and
callers' threads hold no lock that stio's threads take. Nothing here needs an event loop, so a program that imports
`stio.compat` alone imports none.
"""

from stio.process.locks import Condition, new_lock, release_waiting, require_unlocked
from stio.process.settings import (
    after_fork_in_child,
    be_nice,
    check_switch_interval,
    collection_paused,
    contextmanager,
    switch_interval,
    this_thread,
    thread_name,
)

__all__ = [
    "Condition",
    "after_fork_in_child",
    "be_nice",
    "check_switch_interval",
    "collection_paused",
    "contextmanager",
    "new_lock",
    "release_waiting",
    "require_unlocked",
    "switch_interval",
    "this_thread",
    "thread_name",
]
