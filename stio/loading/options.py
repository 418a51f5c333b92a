"""`LoadOptions`: the keywords of `open`, `load` and `load_into`, checked once, at the call.

No other module checks them again. Only the device is resolved later, when a load is prepared: that may start the
device's runtime, which takes long, so it is done on the operation's thread. The meaning of `device=` in the calling
thread ("cuda" is its current device) is fixed at the call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

import torch

from stio import process
from stio.device import Accelerator, Lost, TorchAccelerator, with_current_index
from stio.limits import Limits, checked_size
from stio.loading.casts import DtypeOf, DtypesLike, checked_casts
from stio.runtime.reports import Progress, Trace, progress_callback
from stio.storage.checkpoint import CacheLike, FileCache, ObjectCache

DeviceLike: TypeAlias = str | int | torch.device | Accelerator
"""An argument of `torch.device`, `"auto"`, or a device object of your own. A name without a number is
the calling thread's current device of that kind (`torch.cuda.set_device`)."""

DevicesLike: TypeAlias = DeviceLike | Mapping[str, DeviceLike] | Callable[[str], DeviceLike]
"""One device; or one for each tensor: a mapping from names, and prefixes of names that end at a dot, of which the
longest counts (`""` means all others), or a callable that gets a name. It is called on a thread of the load."""

Memory = Literal["auto", "map", "lazy", "copy", "gds"]
"""How tensors on the CPU get their memory; `"gds"`: reads to an accelerator without host memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """The keywords of `open`, `load` and `load_into`; `stio.load` describes them.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is wrong, or two of them contradict each other.
    """

    device: DevicesLike = "cpu"
    """Device of the tensors. Tied names on two devices are one tensor on each, read twice."""
    dtype: DtypesLike | None = None
    """Cast floating tensors to it, or those of some names."""
    memory: Memory = "auto"
    """How tensors on the CPU get their memory. `"gds"`: a file of which at most half is in the page cache is read from
    the disk to a GPU by GPUDirect Storage (NVIDIA's cuFile); if that fails it is staged, with a warning."""
    budget_bytes: int | str | None = None
    """Most bytes under way; None: `DEFAULT_BUDGET_BYTES`, or `ACCELERATOR_BUDGET_BYTES`, less where memory is short."""
    strict: bool = True
    """Index and shards, or module and checkpoint, must hold the same names."""
    limits: Limits | None = None
    """Bounds on the numbers in a file."""
    verify: bool = False
    """Compare every file with the checkpoint's manifest before any tensor is returned."""
    follow_symlinks: bool = False
    """Allow shards that are links to a place outside the checkpoint."""
    progress: Progress = None
    """A callable, a bar, or None."""
    trace: Trace | None = None
    """Records the spans of the load."""
    switch_interval: float | None = None
    """The interpreter's switch interval during a load, in seconds; None: unchanged."""
    cache: CacheLike | None = None
    """A `stio.HostCache`: files in it are not read again, and files that are read may be added to it. Tensors on the
    CPU are then copies. Or a `stio.DiskCache`: objects of URLs are read from files on this machine's disk."""
    streams: Mapping[torch.device, Any] | Literal["copy"] | None = field(default=None, repr=False, compare=False)
    """By device, the stream under which tensors are allocated; None: those that are current in the calling thread.
    `"copy"`: the stream of all copies of loads, which waits for no work of the caller."""
    lost: Lost | None = field(default=None, repr=False, compare=False)
    """Where casts count the values that they lose, for an operation of several loads that reports them itself."""

    casts: torch.dtype | DtypeOf | None = field(init=False, repr=False, compare=False)
    """The dtype to cast to, or a function that returns that of a name; from `dtype`."""
    budget: int | None = field(init=False, repr=False, compare=False)
    """`budget_bytes` as a number."""
    host_cache: FileCache | None = field(init=False, repr=False, compare=False)
    """The cache, if it holds files in memory."""
    disk_cache: ObjectCache | None = field(init=False, repr=False, compare=False)
    """The cache, if it keeps objects of URLs on disk."""

    def __post_init__(self) -> None:
        if self.progress is not None:
            progress_callback(self.progress)  # raises for a wrong value, before the load starts
        if self.switch_interval is not None:
            process.check_switch_interval(self.switch_interval)
        if self.memory not in get_args(Memory):
            raise ValueError(f"memory= takes one of {', '.join(map(repr, get_args(Memory)))}, not {self.memory!r}")
        for name in ("strict", "verify", "follow_symlinks"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}= takes True or False, not {getattr(self, name)!r}")
        if self.limits is not None and not isinstance(self.limits, Limits):
            raise TypeError(f"limits= takes a stio.Limits, not {self.limits!r}")
        if self.trace is not None and not isinstance(self.trace, Trace):
            raise TypeError(f"trace= takes a stio.Trace, not {self.trace!r}")
        dtype = dict(self.dtype) if isinstance(self.dtype, Mapping) else self.dtype  # the caller may change a mapping
        casts = None if dtype is None else checked_casts(dtype)
        host_cache, disk_cache = (None, None) if self.cache is None else self._caches()
        derived = {
            "device": with_current_index(self.device),
            "streams": TorchAccelerator.current_streams() if self.streams is None else self.streams,
            "casts": casts,
            "dtype": casts if isinstance(casts, torch.dtype) else dtype,
            "budget": None if self.budget_bytes is None else checked_size(self.budget_bytes),
            "host_cache": host_cache,
            "disk_cache": disk_cache,
        }
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def _caches(self) -> tuple[FileCache | None, ObjectCache | None]:
        caches: tuple[object, ...] = self.cache if isinstance(self.cache, tuple) else (self.cache,)
        files: FileCache | None = None
        objects: ObjectCache | None = None
        for cache in caches:
            if isinstance(cache, ObjectCache):
                objects = cache
            elif isinstance(cache, FileCache):
                files = cache
            else:
                message = f"cache= takes a stio.HostCache, a stio.DiskCache or a tuple of both, not {self.cache!r}"
                raise TypeError(message)
        if len(caches) != (files is not None) + (objects is not None):
            raise ValueError("cache= takes at most one stio.HostCache and one stio.DiskCache")
        if files is not None and self.memory in ("map", "lazy", "gds"):
            does = "does not use host memory" if self.memory == "gds" else "maps them"
            raise ValueError(f"cache= copies its files, memory={self.memory!r} {does}: choose one of the two")
        return files, objects
