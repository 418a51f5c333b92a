"""Who takes part in the benchmark of the drop-ins: the same calls, of the official package and of stio's modules.

Each gives functions whose imports are done; the child calls them on its clock.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

OFFICIAL, OURS = "safetensors", "stio.compat.safetensors"


@dataclass(frozen=True, slots=True)
class Contestant:
    """One side."""

    label: str
    """For the table."""

    package: str = ""
    """Whose `load_file`, `save_file` and `safe_open` are called."""

    backend: str = "mmap"
    """What `safe_open` is given."""

    sync: bool = False
    """Sync the file and its directory after a save: the package does not do it itself."""

    atomic: bool = False
    """Save to another name, sync, rename and sync the directory: what is atomic and durable costs so much at least."""

    suffix: str = ".safetensors"
    """Of what a nested state is saved to."""

    state: Callable[[], tuple[Callable[[Any, Path], Any], Callable[[Path], Any]]] | None = None
    """Gives how nested state is saved, durably, and loaded."""


def functions(contestant: Contestant) -> tuple[Callable[[Path], Any], Callable[[Any, Path], None]]:
    """Give how tensors are loaded from a file, and how they are saved to one."""
    module = import_module(f"{contestant.package}.torch")

    def save(tensors: Any, path: Path) -> None:
        target = path.with_suffix(".tmp") if contestant.atomic else path
        module.save_file(tensors, target)
        if contestant.sync:
            sync(target)
        if contestant.atomic:
            sync(target, directory=False)
            target.rename(path)
            sync(path.parent, directory=False)

    return module.load_file, save


def opener(contestant: Contestant) -> Callable[[Path], Any]:
    """Give how a file is opened for torch."""
    safe_open = import_module(contestant.package).safe_open
    return lambda path: safe_open(path, framework="pt", backend=contestant.backend)


def sync(path: Path, *, directory: bool = True) -> None:
    """Make a file, and its name too, durable."""
    for each in (path, path.parent) if directory else (path,):
        descriptor = os.open(each, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _stio_state() -> tuple[Callable[[Any, Path], Any], Callable[[Path], Any]]:
    module = import_module("stio.sync")
    return module.save_state, module.load_state


def _torch_state() -> tuple[Callable[[Any, Path], Any], Callable[[Path], Any]]:
    import torch

    def save(state: Any, path: Path) -> None:
        torch.save(state, path)
        sync(path)

    return save, lambda path: torch.load(path, weights_only=True)


CONTESTANTS: dict[str, Contestant] = {
    "stio": Contestant("stio.compat.safetensors", OURS),
    "official": Contestant("safetensors", OFFICIAL),
    "official-fsync": Contestant("safetensors, fsync of file and directory", OFFICIAL, sync=True),
    "official-atomic": Contestant(
        "safetensors to another name, fsync, rename, fsync of directory", OFFICIAL, atomic=True
    ),
    "stio-pread": Contestant('stio.compat.safetensors, backend="pread"', OURS, "pread"),
    "official-pread": Contestant('safetensors, backend="pread"', OFFICIAL, "pread"),
    "stio-state": Contestant("stio.sync.save_state, load_state", state=_stio_state),
    "torch-state": Contestant(
        "torch.save, fsync of file and directory; torch.load(weights_only=True)", suffix=".pt", state=_torch_state
    ),
}
