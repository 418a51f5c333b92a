"""Bounds and sizes that the whole package uses: limits for untrusted files, the default budget, sizes of pages.

A limit is checked before memory is allocated, so a wrong number in a file costs an error and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

DEFAULT_BUDGET_BYTES = 512 << 20
"""Memory that a load, a save or a conversion may use for bytes under way, unless `budget_bytes` is given."""

PAGE_BYTES = 4096
"""Alignment of direct reads and writes. Machines with larger base pages accept multiples of 4096 too."""

HUGE_PAGE_BYTES = 2 << 20
"""Size of a transparent huge page where stio requests them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what an untrusted file may request, checked before anything is allocated.

    Raises:
        TypeError: A bound is no whole number.
        ValueError: A bound is negative.
    """

    header_bytes: int = 100_000_000
    """Largest header. The default is the limit of the format itself."""
    max_tensors: int = 1_000_000
    """Most tensors in one file."""
    max_rank: int = 64
    """Most dimensions of one tensor (the limit of torch)."""
    state_bytes: int = 100_000_000
    """Longest description of the tree of a nested state, in bytes of text."""
    max_state_nodes: int = 4_000_000
    """Most values (containers, keys and leaves) of a nested state."""

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{one.name} takes a whole number, not {value!r}")
            if value < 0:
                raise ValueError(f"{one.name} must not be negative, not {value}")


def advice_on_limit(field: str) -> str:
    """Return what to do about a file that exceeds a limit of the caller's: a clause for the end of a message."""
    return f"; if you trust the file, pass limits=stio.Limits({field}=...) with a higher limit"


def check_budget_bytes(budget_bytes: int) -> int:
    """Return `budget_bytes` unchanged if it is valid.

    Raises:
        TypeError: It is no whole number.
        ValueError: It is not positive.
    """
    if not isinstance(budget_bytes, int) or isinstance(budget_bytes, bool):
        raise TypeError(f"budget_bytes takes a number of bytes, not {budget_bytes!r}")
    if budget_bytes <= 0:
        raise ValueError(f"budget_bytes must be positive, not {budget_bytes}")
    return budget_bytes
