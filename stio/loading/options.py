"""The keywords of `open`, `load` and `load_into`, checked at the call and resolved on the operation's thread."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, TypedDict

import torch

from stio.device.base import Accelerator, current_device, numbered
from stio.device.placement import resolve_placement
from stio.loading.cache.file_image import FileCache
from stio.loading.open import OpenOptions
from stio.loading.targets import LoadOptions, Memory
from stio.runtime.limits import DEFAULT_BUDGET_BYTES, Limits
from stio.runtime.progress import Progress, progress_callback
from stio.runtime.trace import Trace
from stio.storage.base import AsyncRoot, Root

__all__ = ["DeviceLike", "DevicesLike", "Keywords", "Memory", "Settings", "SourceLike"]

DeviceLike: TypeAlias = str | int | torch.device | Accelerator
"""What `torch.device` takes, `"auto"`, or a device of one's own (`stio.testing`). A name without a number means the
calling thread's current device of that kind (`torch.cuda.set_device`)."""

DevicesLike: TypeAlias = DeviceLike | Mapping[str, DeviceLike] | Callable[[str], DeviceLike]
"""One device; or one for each tensor: a mapping from names, and prefixes of names that end at a dot, of which the
longest counts (`""` stands for all others), or a callable that gets a name. It is called on a thread of the load's."""

SourceLike: TypeAlias = str | os.PathLike[str] | Root | AsyncRoot
"""A `.safetensors` file, an index, a directory, or a root of one's own (`stio.testing`)."""

_MEMORY = ("auto", "map", "lazy", "copy", "gds")


class Keywords(TypedDict, total=False):
    """Keywords that `open`, `load` and `load_into` share; their meaning and defaults stand in `Settings`."""

    device: DevicesLike
    dtype: torch.dtype | None
    memory: Memory
    budget_bytes: int | None
    strict: bool
    limits: Limits | None
    verify: bool
    follow_symlinks: bool
    progress: Progress
    trace: Trace | None
    switch_interval: float | None
    cache: FileCache | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The keywords of `open`, `load` and `load_into`, as they came; see `stio.load` for what they mean."""

    device: DevicesLike = "cpu"
    """Where tensors go. Tied names that go to two devices are a tensor on each, read twice."""
    dtype: torch.dtype | None = None
    """Cast floating tensors to it."""
    memory: Memory = "auto"
    """How tensors on the CPU get their memory. `"gds"`: files of which the page cache holds half at most go from the
    disk to an accelerator by GPUDirect Storage (kvikio); staged, with a warning, where that does not serve."""
    budget_bytes: int | None = None
    """Most bytes under way."""
    strict: bool = True
    """Index and shards, or module and checkpoint, must agree to the name."""
    limits: Limits | None = None
    """Bounds on what a file may ask for."""
    verify: bool = False
    """Compare every file with the checkpoint's manifest before anything is handed out."""
    follow_symlinks: bool = False
    """Let shards be links out of the checkpoint."""
    progress: Progress = None
    """Callable, bar or nothing."""
    trace: Trace | None = None
    """Record of spans."""
    switch_interval: float | None = None
    """Seconds; None leaves the interpreter's alone."""
    cache: FileCache | None = None
    """A `stio.HostCache`: files come from there, or go there on their way. Tensors on the CPU are copies then."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", _from_here(self.device))
        progress_callback(self.progress)  # raises for what it cannot use, before anything begins
        if self.switch_interval is not None and self.switch_interval <= 0:
            raise ValueError(f"switch_interval must be positive, not {self.switch_interval}")
        if self.memory not in _MEMORY:
            raise ValueError(f"memory= takes one of {', '.join(map(repr, _MEMORY))}, not {self.memory!r}")
        if self.cache is not None and not isinstance(self.cache, FileCache):
            raise TypeError(f"cache= takes a stio.HostCache, not {self.cache!r}")
        if self.cache is not None and self.memory in ("map", "lazy", "gds"):
            does = "passes by the host's memory" if self.memory == "gds" else "maps them"
            raise ValueError(f"cache= copies its files, memory={self.memory!r} {does}: choose one of the two")
        if not isinstance(self.verify, bool):
            raise TypeError(f"verify= takes True or False, not {self.verify!r}")
        if self.dtype is not None and not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype= takes a torch.dtype, not {self.dtype!r}")
        if self.budget_bytes is not None and not isinstance(self.budget_bytes, int):
            raise TypeError(f"budget_bytes takes a number of bytes, not {self.budget_bytes!r}")
        if self.budget_bytes is not None and self.budget_bytes <= 0:
            raise ValueError(f"budget_bytes must be positive, not {self.budget_bytes}")

    def open_options(self) -> OpenOptions:
        """Return what concerns opening."""
        return OpenOptions(
            limits=self.limits or Limits(),
            strict=self.strict,
            follow_symlinks=self.follow_symlinks,
            with_manifest=self.verify,
        )

    def load_options(self, slices: Mapping[str, object] | None = None) -> LoadOptions:
        """Return what concerns loading, the device resolved (which may start its runtime: on a thread)."""
        return LoadOptions(
            device=resolve_placement(self.device),
            dtype=self.dtype,
            memory=self.memory,
            budget_bytes=self.budget_bytes or DEFAULT_BUDGET_BYTES,
            slices=slices or {},
            progress=progress_callback(self.progress),
            trace=self.trace,
            cache=self.cache,
        )


def _from_here(device: DevicesLike) -> DevicesLike:
    """Return what `device=` means in the calling thread: "cuda" is the thread's current one of them."""
    current = current_device()
    if isinstance(device, Mapping):  # a copy: the caller's may change before it is looked at
        for name in device:
            if not isinstance(name, str):
                raise TypeError(f"device= takes a mapping from names, not from {name!r}")
        return {name: numbered(where, current) for name, where in device.items()}
    if callable(device) and not isinstance(device, torch.device | Accelerator) and current is not None:
        return lambda name: numbered(device(name), current)
    return numbered(device, current)  # type: ignore[no-any-return]  # what it was, or a device
