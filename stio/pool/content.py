"""The tensors of one model of a pool: how they come to the device, and how they leave it.

A model is a dictionary of tensors, or a module. A module is made once; between two loads its tensors are on `meta`.
Memory counts as free when no storage of the model is referenced any more, by whatever tensor or view.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from stio.device.base import resolve_device
from stio.device.cuda import TorchAccelerator
from stio.device.tensors import TORCH_DTYPES, require_dtypes, torch_shape
from stio.errors import MismatchError, listed, with_article
from stio.format.dtypes import tensor_nbytes
from stio.loading.api import fill_from
from stio.loading.body import collect, open_source, verify
from stio.loading.module import ModuleTarget
from stio.loading.module_tree import ModuleTree
from stio.loading.open import OpenCheckpoint
from stio.loading.options import LoadOptions, SourceLike
from stio.runtime.blocking import run_blocking
from stio.runtime.operation import Operation

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
    files: Sequence[str]
    """Paths of its files."""


class OtherContents(Exception):
    """A checkpoint holds something else than when its headers were read before."""

    def __init__(self, contents: Contents) -> None:
        super().__init__("the files of a model have changed")
        self.contents = contents
        """What it holds now."""


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
        until = time.monotonic() + _PATIENCE_SECONDS
        num_polls = 0
        left = self.now()
        while left is not None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            num_polls += 1
            if num_polls == _POLLS_BEFORE_COLLECTION:
                gc.collect()  # tensors in cycles; it holds the interpreter's lock
            left = left.now()
        return left

    def describe(self) -> str:
        """Return the tensors, and an object that refers to the first of them."""
        name, (storage, _) = next(iter(self.storages.items()))
        holder = _holder_of(storage)
        by = "" if holder is None else f" (for example {name!r} by {holder})"
        return f"{listed(list(self.storages))} of {self.model!r}{by}"


class Content:
    """The tensors of one model on a device.

    Args:
        name: Name of the model.
        make: Makes the module; None: the model is a dictionary.
        options: Options of its loads.
    """

    def __init__(self, name: str, make: Make | None, options: LoadOptions) -> None:
        self._name = name
        self._make = make
        self.options = options
        """See above."""
        self._module: nn.Module | None = None
        self._tensors: dict[str, torch.Tensor] = {}

    def value(self) -> Any:
        """Return what a user gets: the module, or a new dictionary of the tensors."""
        return dict(self._tensors) if self._module is None else self._module

    def with_module(self, make: Make) -> Content:
        """Return the content of the same model with another module."""
        return Content(self._name, make, self.options)

    def measure(self, operation: Operation[Any], source: SourceLike) -> Contents:
        """Read the headers of a checkpoint; make the module, if it is not made yet.

        Raises:
            TypeError: `make` returned something else than a module.
            StioError: See `stio.load`.
        """
        self._require_module()
        with closing(open_source(operation, source, replace(self.options, verify=False))) as opened:
            return self._contents_of(opened)

    def load(self, operation: Operation[Any], source: SourceLike, expected: Contents) -> None:
        """Load all tensors; they are there for every stream.

        Raises:
            OtherContents: The checkpoint holds something else than expected; nothing was loaded.
            ClosedError: The operation was cancelled.
            StioError: See `stio.load` and `stio.load_into`.
        """
        options = self.options
        with closing(open_source(operation, source, options)) as opened:
            if (found := self._contents_of(opened)) != expected:
                raise OtherContents(found)
            verify(operation, opened, options)
            if self._module is None:
                self._tensors = collect(operation, opened, None, options)()
                return
            target = ModuleTarget(self._module, assign=True)
            run_blocking(fill_from(opened, target, options, on_begin=operation.on_cancel))
        device = resolve_device(options.device)
        with _own_stream(device):
            self._move_unstored(device)

    def replace(self, operation: Operation[Any], source: SourceLike) -> None:
        """Copy the tensors of another checkpoint into those that are there; shapes and dtypes are equal.

        Raises:
            StioError: See `load`. Some tensors have new values then.
        """
        module = _module_of(self._tensors) if self._module is None else self._module
        # The device of the target is that of its tensors.
        options = replace(self.options, device="cpu", budget_bytes=_UPDATE_BYTES)
        with _own_stream(resolve_device(self.options.device)):
            run_blocking(fill_from(source, ModuleTarget(module), options, on_begin=operation.on_cancel))

    def can_replace(self) -> bool:
        """Return whether `replace` can find all tensors by their names."""
        return self._module is not None or not _is_nested(self._tensors)

    def evict(self) -> Leftover | None:
        """Remove the tensors from the device; return what is still referenced a second later."""
        left = self.drop()
        return None if left is None else left.later()

    def drop(self) -> Leftover | None:
        """Remove the tensors from the device; return what is still referenced."""
        return Leftover(self._name, self._release()).now()

    def forget(self) -> None:
        """Drop the references to the tensors and to the module, which their users keep."""
        self._module, self._tensors = None, {}

    def _release(self) -> dict[str, tuple[StorageWeakRef, int]]:
        """Drop all references to the tensors; return their storages by name."""
        if self._module is None:
            storages = _storages(self._tensors.items())
            self._tensors.clear()
            return storages
        tree = ModuleTree(self._module)
        storages = _storages((name, tree.get(name)) for name in tree.tensors)
        made: dict[int, torch.Tensor] = {}  # tied names get one tensor
        for name in tree.tensors:
            old = tree.get(name)
            tree.put(name, made.setdefault(id(old), _on_meta(old)))
        tree.tensors.clear()
        with suppress(RuntimeError):  # a device that does not answer
            self._move_unstored(torch.device("cpu"))
        return storages

    def _require_module(self) -> None:
        if self._make is None or self._module is not None:
            return
        made = self._make()
        if not isinstance(made, nn.Module):
            raise TypeError(f"make= of {self._name!r} returned {with_article(type(made).__name__)}, not a module")
        self._module = made

    def _contents_of(self, opened: OpenCheckpoint) -> Contents:
        found = opened.dtypes_and_shapes()
        require_dtypes([dtype for dtype, _ in found.values()], path=opened.path)
        nbytes = sum(map(self._bytes_of, found.values())) + self._unstored_bytes() + self._cast_bytes(found)
        if resolve_device(self.options.device).type != "cpu":
            nbytes += _BLOCK_BYTES  # for a moment, when torch puts a tensor over a storage
        stored = [tensor_nbytes(*pair) for pair in found.values()]
        on_the_way = min(sum(stored), max(_UPDATE_BYTES, max(stored, default=0)))
        blocks = _BLOCK_BYTES * len(stored)
        return Contents(nbytes, found, on_the_way + blocks, [file.path for file in opened.files])

    def _bytes_of(self, described: tuple[str, tuple[int, ...]]) -> int:
        """Return the bytes of a tensor on the device."""
        dtype, shape = described
        stored, wanted = TORCH_DTYPES[dtype], self.options.cast_dtype
        nbytes = tensor_nbytes(dtype, shape)
        if wanted is not None and stored.is_floating_point and wanted != stored:
            nbytes = wanted.itemsize * torch.Size(torch_shape(dtype, shape)).numel()
        return -(-nbytes // _BLOCK_BYTES) * _BLOCK_BYTES

    def _cast_bytes(self, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> int:
        """Return the bytes of a load under way that are not its result: what is cast."""
        wanted = self.options.cast_dtype
        sizes = [
            tensor_nbytes(*pair)
            for pair in found.values()
            if wanted is not None and TORCH_DTYPES[pair[0]].is_floating_point and TORCH_DTYPES[pair[0]] != wanted
        ]
        # A group is at least one tensor, and groups under way are within the budget.
        return min(sum(sizes), (self.options.budget or 0) + max(sizes, default=0))

    def _unstored_bytes(self) -> int:
        if self._module is None:
            return 0
        return sum(-(-one.nbytes // _BLOCK_BYTES) * _BLOCK_BYTES for one in _unstored(self._module).values())

    def _move_unstored(self, device: torch.device) -> None:
        """Move the buffers that no checkpoint holds (`persistent=False`), except those without data."""
        assert self._module is not None
        tree = ModuleTree(self._module)
        for name, old in _unstored(self._module).items():
            if not old.is_meta:
                tree.put(name, old.to(device))


def _own_stream(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which memory and copies are of the stream of all loads; its work has ended at the end."""
    return nullcontext() if device.type == "cpu" else TorchAccelerator(device).on_stream()


def _unstored(module: nn.Module) -> dict[str, torch.Tensor]:
    tree = ModuleTree(module)
    return {name: tree.get(name) for name in tree.never_stored}


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


def _is_nested(names: Iterable[str]) -> bool:
    """Return whether a name is a part of the path of another one, so that no module has both."""
    names = set(names)
    paths = {name[:at] for name in names for at, one in enumerate(name) if one == "."}
    return bool(names & paths) or any("" in name.split(".") for name in names)


def _module_of(tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return a module that has these tensors as buffers, for a load into them.

    Raises:
        MismatchError: A name cannot be one of a module.
    """
    root = nn.Module()
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        owner = root
        for part in path:
            if part not in owner._modules:
                owner._modules[part] = nn.Module()
            owner = owner._modules[part]  # type: ignore[assignment]
        if hasattr(owner, leaf):
            raise MismatchError("a module has no tensor of this name, so it cannot be updated in place", found=name)
        owner.register_buffer(leaf, tensor)
    return root


def _holder_of(storage: StorageWeakRef) -> str | None:
    """Return what refers to a tensor over a storage, in words."""
    for one in gc.get_objects():
        # By its type: `isinstance` asks an object for its `__class__`, and that of a proxy may raise or warn.
        if not issubclass(type(one), torch.Tensor):
            continue
        try:
            is_over = not one.is_meta and one.untyped_storage()._cdata == storage.cdata
        except Exception:  # sparse, or a subclass: without a storage, or with methods of its own
            continue
        if is_over:
            holders = [
                holder
                for holder in gc.get_referrers(one)
                if not (isinstance(holder, FrameType) and holder.f_code is _holder_of.__code__)
            ]
            holders = [holder for holder in holders if holder is not globals()]
            if not holders:
                return "a variable of a function that runs"
            first = holders[0]
            if isinstance(first, FrameType):
                return f"a variable of {first.f_code.co_qualname}"
            return with_article(type(first).__name__)
    return None


def free_bytes(device: torch.device) -> int | None:
    """Return the memory of a device that torch can still allocate; None if the device does not report it."""
    module: Any = torch.get_device_module(device)
    try:
        free = int(module.mem_get_info(device)[0])
        return free + int(module.memory_reserved(device)) - int(module.memory_allocated(device))
    except (AttributeError, RuntimeError):
        return None
