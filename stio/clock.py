"""The time: what stio reads before it decides that something took too long or is too old, and how it pauses.

Other modules call `clock.monotonic()`, and do not import the functions: tests replace them here (`tests/clocks.py`).
A wait for a lock lasts as long as the system says (`locks.py`, `notifier.py`). Durations that are only reported are
measured by `time.perf_counter`.
"""

from time import monotonic, sleep
from time import time as now

__all__ = ["monotonic", "now", "sleep"]
