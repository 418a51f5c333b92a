"""TODO."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT_BUDGET_BYTES", "HUGE_PAGE_BYTES", "PAGE_BYTES", "Limits"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds on what an untrusted file may ask for, checked before anything is allocated."""

    header_bytes: int = 100_000_000
    """Largest header, the format's own limit by default."""
    max_tensors: int = 1_000_000
    """Most tensors in one file."""
    max_rank: int = 64
    """Most dimensions of one tensor (torch's own limit)."""
    state_bytes: int = 100_000_000
    """Longest text of the tree of a nested state."""
    max_state_nodes: int = 4_000_000
    """Most values (containers, keys and leaves) of a nested state."""


DEFAULT_BUDGET_BYTES = 512 << 20


PAGE_BYTES = 4096
"""Alignment of direct reads. Machines with larger base pages take multiples of it just as well."""


HUGE_PAGE_BYTES = 2 << 20
"""Size of a transparent huge page where stio asks for them."""
