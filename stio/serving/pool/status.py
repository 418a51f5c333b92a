"""What a pool tells of itself: where each model is, and what it has done. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Tier = Literal["device", "loading", "host", "source"]
"""Where a model is: on the device, on its way there, in host memory as a whole, or only in its files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """One model of a pool, at one moment."""

    tier: Tier
    """Where it is."""
    nbytes: int | None
    """Bytes that it needs on the device; None: its files were not opened yet."""
    num_users: int
    """Callers that use it."""
    num_waiting: int
    """Callers that wait for it."""
    progress: float
    """How much of its load is done, from 0 to 1; 1 on the device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """A pool in numbers: what it holds now, and counters since it was entered."""

    device_bytes: int = 0
    """Bytes of the device that models occupy, or that are reserved for loads under way."""
    peak_device_bytes: int = 0
    """Most such bytes at one time."""
    leftover_bytes: int = 0
    """Bytes of evicted models that are not free, since tensors are still referenced. Part of `device_bytes`."""
    host_bytes: int = 0
    """Bytes of files that are held in host memory."""
    disk_bytes: int = 0
    """Bytes of files in the `DiskCache`."""
    num_hits: int = 0
    """Uses of a model that was on the device."""
    num_waits: int = 0
    """Uses that had to wait for a load, or for the end of other uses."""
    wait_seconds: float = 0.0
    """Time of all these waits."""
    num_loads: int = 0
    """Loads to the device that succeeded."""
    num_failed: int = 0
    """Loads to the device that failed, and models that did not fit."""
    load_seconds: float = 0.0
    """Time of all loads that succeeded."""
    num_evictions: int = 0
    """Models that were removed from the device."""
    num_updates: int = 0
    """Updates that succeeded."""
