"""A byte budget: how much may be on the way between storage and consumer at once.

Not thread-safe by itself: the load's scheduler calls it under the lock that also guards its queue, so that
deciding and taking are one step. First come, first served is the scheduler's part: it asks for the head of its
queue only, so a large group is never starved by small ones behind it.
"""

from __future__ import annotations

__all__ = ["Budget"]


class Budget:
    """Counts bytes in use against a total.

    Args:
        total_bytes: The most that may be in use, except for one request larger than all of it.

    Raises:
        ValueError: The total is not positive.
    """

    def __init__(self, total_bytes: int) -> None:
        if total_bytes <= 0:
            raise ValueError(f"a budget must be positive, not {total_bytes} bytes")
        self.total_bytes = total_bytes
        """The budget."""
        self.used_bytes = 0
        """What is in use now."""
        self.peak_bytes = 0
        """The most that was in use at once."""

    def try_acquire(self, nbytes: int) -> bool:
        """Take bytes if they fit, or if nothing else is in use (an oversized request runs alone)."""
        if self.used_bytes and self.used_bytes + nbytes > self.total_bytes:
            return False
        self.used_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        return True

    def release(self, nbytes: int) -> None:
        """Give bytes back."""
        if nbytes > self.used_bytes:
            raise ValueError(f"{nbytes} bytes given back, {self.used_bytes} are in use")
        self.used_bytes -= nbytes
