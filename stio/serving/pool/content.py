"""The tensors of one model of a pool: how they come to the device, and how they leave it.

A model is a dictionary of tensors, or a module. A module is made once; between two loads its tensors are on `meta`.
Memory counts as free when no storage of the model is referenced any more, by whatever tensor or view.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass, field, replace
from operator import sub
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from stio import clock
from stio.device import TORCH_DTYPES, Lost, TorchAccelerator, resolve_device
from stio.errors import listed, with_article
from stio.format.state import STATE_KEY
from stio.loading import LoadOptions, collect, fill_from, open_with_options, planned_casts, select_tensors
from stio.loading.targets import LoadTarget, ModuleTarget, ModuleTree, StateTarget
from stio.runtime import Operation, run_blocking
from stio.runtime.reports import ProgressEvent
from stio.serving.follower import Loaded, loaded_whole
from stio.storage.checkpoint import OpenCheckpoint, SourceLike

_UPDATE_BYTES = 64 << 20
"""Budget of an update in place. A larger tensor is on the way alone."""

_BLOCK_BYTES = 512
"""Allocators of devices round sizes up to it."""
_PATIENCE_SECONDS = 1.0
"""Threads that have just ended may still refer to tensors for so long."""
_POLL_SECONDS = 0.01
_POLLS_BEFORE_COLLECTION = 5

Make = Callable[[], nn.Module]


@dataclass(frozen=True, slots=True)
class Contents:
    """What a checkpoint holds of a model."""

    nbytes: int
    """Bytes on the device, in the allocator's blocks, with those that casts need on the way."""
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    """Dtype and shape of each tensor, as in the format."""
    update_bytes: int
    """Bytes of the device that an update in place needs on the way."""
    can_replace: bool
    """Whether its tensors can be copied into those that are there."""
    files: Sequence[str]
    """Paths of its files."""
    loaded: Loaded = field(compare=False)
    """What a load of it does."""


@dataclass(frozen=True, slots=True)
class Leftover:
    """Memory of an evicted model that is still referenced."""

    model: str
    """Name of the model."""
    storages: Mapping[str, tuple[StorageWeakRef, int]]
    """The memory and its size, by the name of its tensor."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return sum(nbytes for _, nbytes in self.storages.values())

    def now(self) -> Leftover | None:
        """Return what of it is still referenced; None if nothing is."""
        left = {name: pair for name, pair in self.storages.items() if not pair[0].expired()}  # type: ignore[no-untyped-call]
        return Leftover(self.model, left) if left else None

    def later(self) -> Leftover | None:
        """Return what of it is still referenced a second later; None as soon as nothing is."""
        until = clock.monotonic() + _PATIENCE_SECONDS
        num_polls = 0
        left = self.now()
        while left is not None and clock.monotonic() < until:
            clock.sleep(_POLL_SECONDS)
            num_polls += 1
            if num_polls == _POLLS_BEFORE_COLLECTION:
                gc.collect()  # tensors in cycles
            left = left.now()
        return left

    def __str__(self) -> str:
        return f"{listed(self.storages)} of {self.model!r}"


class Content:
    """The tensors of one model on a device.

    Args:
        name: Name of the model.
        make: Makes the module; None: the model is a dictionary.
        options: Makes the options of its loads; called with `progress=`.
    """

    def __init__(self, name: str, make: Make | None, options: Callable[..., LoadOptions]) -> None:
        self._name = name
        self._make = make
        self.options = options(progress=self._count)
        """Options of its loads."""
        self.progress = 0.0
        """How much of its load is done, from 0 to 1."""
        self._module: nn.Module | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._held = ""  # id of the version that the tensors are of
        self._opened: OpenCheckpoint | None = None  # from `measure` to a load that follows at once

    def _count(self, event: ProgressEvent) -> None:
        self.progress = event.done_bytes / event.total_bytes if event.total_bytes else 1.0

    def value(self) -> Any:
        """Return what a user gets: the module, or a new dictionary of the tensors."""
        return dict(self._tensors) if self._module is None else self._module

    def measure(self, operation: Operation[Any], source: SourceLike) -> Contents:
        """Read the headers of a checkpoint; make the module, if it is not made yet.

        Raises:
            TypeError: `make` returned something else than a module.
            StioError: See `stio.load`.
        """
        if self._make is not None and self._module is None:
            made = self._make()
            if not isinstance(made, nn.Module):
                raise TypeError(f"make= of {self._name!r} returned {with_article(type(made).__name__)}, not a module")
            self._module = made
        self.close()
        with ExitStack() as closing_opened:
            options = replace(self.options, verify=False) if self.options.verify else self.options
            opened = open_with_options(operation, source, options, with_manifest=bool(self._held))
            closing_opened.callback(opened.close)
            contents = self._contents_of(opened)
            if not self.options.verify:  # which needs the manifest
                closing_opened.pop_all()
                self._opened = opened
            return contents

    def close(self) -> None:
        """Close the files that `measure` left open. The load that would use them did not follow at once."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def _open(self, operation: Operation[Any], source: SourceLike) -> tuple[OpenCheckpoint, bool]:
        """Return the open checkpoint, and whether `measure` has opened it."""
        opened, self._opened = self._opened, None
        if opened is not None:
            return opened, True
        return open_with_options(operation, source, self.options, with_manifest=bool(self._held)), False

    def load(self, operation: Operation[Any], source: SourceLike, expected: Contents) -> Contents:
        """Load all tensors; they are there for every stream.

        Returns:
            What the checkpoint holds. Nothing is loaded if that is not what was expected.

        Raises:
            ClosedError: The operation was cancelled.
            StioError: See `stio.load` and `stio.load_into`.
        """
        options, found = self.options, expected
        opened, is_measured = self._open(operation, source)
        with closing(opened):
            self.progress = 0.0
            if not is_measured and (found := self._contents_of(opened)) != expected:
                return found
            if self._module is None:
                self._tensors = collect(operation, select_tensors(opened, None, options))()
                self._held = opened.id
                return found
            target = ModuleTarget(self._module, assign=True)
            _fill(operation, opened, target, options)
            self._held = opened.id
        device = resolve_device(options.device)
        with _own_stream(device):
            self._move_unstored(device)
        return found

    def replace(self, operation: Operation[Any], source: SourceLike, on_write: Callable[[], object]) -> Loaded:
        """Copy the tensors of another checkpoint, of the same shapes and dtypes, into those that are there.

        If it is a delta on what they hold, only what differs is read, checked and then copied.

        Args:
            operation: A cancel of it ends the call, unless a delta is being copied.
            source: The checkpoint.
            on_write: Called before the first tensor gets new values; after an error behind that, some have them.

        Raises:
            StioError: See `load`.
        """
        # The device of the target is that of its tensors.
        options = replace(self.options, device="cpu")

        def begin_to_write() -> None:
            self._held = ""
            on_write()

        def begin_to_copy() -> None:
            operation.refuse_cancel()
            begin_to_write()

        opened, _ = self._open(operation, source)
        with closing(opened), _own_stream(resolve_device(self.options.device)):
            changed_bytes = self._target().update_from(
                opened,
                self._held,
                replace(options, budget_bytes=None),
                check=operation.check,
                on_write=begin_to_copy,
            )
            if changed_bytes is None:
                begin_to_write()
                _fill(operation, opened, self._target(), replace(options, budget_bytes=_UPDATE_BYTES))
            self._held = opened.id
            return loaded_whole(opened) if changed_bytes is None else Loaded("", "delta", changed_bytes)

    def _target(self) -> LoadTarget:
        return StateTarget(self._tensors) if self._module is None else ModuleTarget(self._module)

    def drop(self) -> Leftover | None:
        """Remove the tensors from the device; return what is still referenced."""
        self.close()
        return Leftover(self._name, self._release()).now()

    def forget(self) -> None:
        """Drop the references to the tensors and to the module, which their users keep."""
        self.close()
        self._module, self._tensors = None, {}

    def _release(self) -> dict[str, tuple[StorageWeakRef, int]]:
        """Drop all references to the tensors; return their storages by name."""
        self._held = ""
        if self._module is None:
            storages = _storages(self._tensors.items())
            self._tensors.clear()
            return storages
        tree = ModuleTree(self._module)
        storages = _storages(tree.tensors.items())
        made: dict[int, torch.Tensor] = {}  # tied names get one tensor
        for name, old in tree.tensors.items():
            tree.put(name, made.setdefault(id(old), _on_meta(old)))
        tree.tensors.clear()
        with suppress(RuntimeError):  # a device that does not answer
            self._move_unstored(torch.device("cpu"))
        return storages

    def _contents_of(self, opened: OpenCheckpoint) -> Contents:
        found = opened.dtypes_and_shapes()
        kinds = {name: dtype for name, (dtype, _) in found.items()}
        TORCH_DTYPES.require([*kinds.values()], path=opened.path)
        casts = planned_casts(kinds, self.options.casts, path=opened.path)
        stored: list[int] = []
        for header in opened.headers:
            stored += map(sub, header.ends, header.begins)
        made, cast, counted = stored.copy(), [0], [0]
        if casts:
            for k, (name, (dtype, shape)) in enumerate(found.items()):
                if (wanted := casts.dtype(name, own := TORCH_DTYPES[dtype])) != own:
                    numel = torch.Size(TORCH_DTYPES.shape(dtype, shape)).numel()
                    made[k] = wanted.itemsize * numel
                    cast.append(stored[k])
                    counted.append(Lost.bytes_to_count(numel))
        if self._module is not None:
            made += [one.nbytes for one in ModuleTree(self._module).never_stored.values()]
        total = sum([-(-nbytes // _BLOCK_BYTES) for nbytes in made]) * _BLOCK_BYTES
        # What is cast is there twice. A group is at least one tensor, and groups under way are within the budget.
        total += min(sum(cast), (self.options.budget or 0) + max(cast)) + max(counted)
        if resolve_device(self.options.device).type != "cpu":
            total += _BLOCK_BYTES  # for a moment, when torch puts a tensor over a storage
        on_the_way = min(sum(stored), max(_UPDATE_BYTES, *stored, 0)) + _BLOCK_BYTES * len(stored)
        can_replace = self._module is not None or STATE_KEY not in opened.metadata
        files = [file.path for file in opened.files]
        return Contents(total, found, on_the_way, can_replace, files, loaded_whole(opened))

    def _move_unstored(self, device: torch.device) -> None:
        """Move the buffers that no checkpoint holds (`persistent=False`), except those without data."""
        assert self._module is not None
        tree = ModuleTree(self._module)
        for name, old in tree.never_stored.items():
            if not old.is_meta:
                tree.put(name, old.to(device))


def _fill(operation: Operation[Any], opened: OpenCheckpoint, target: LoadTarget, options: LoadOptions) -> None:
    run_blocking(fill_from(opened, target, options, on_begin=lambda load: operation.on_cancel(load.cancel)))


def _own_stream(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which memory and copies are of the stream of all loads; its work has ended at the end."""
    return nullcontext() if device.type == "cpu" else TorchAccelerator(device).on_stream()


def _storages(named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[StorageWeakRef, int]]:
    """Return a weak reference to each storage, and its size, by the name of its first tensor."""
    found: dict[str, tuple[StorageWeakRef, int]] = {}
    known = set()
    for name, tensor in named:
        if tensor.is_meta:
            continue
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            known.add(storage._cdata)
            found[name] = StorageWeakRef(storage), storage.nbytes()  # type: ignore[no-untyped-call]
    return found


def _on_meta(old: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(old.detach(), device="meta")
    if not isinstance(old, nn.Parameter):
        return empty
    made = torch.Tensor._make_subclass(type(old), empty, old.requires_grad)
    made.__dict__.update(old.__dict__)
    return made
