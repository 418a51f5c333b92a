"""The reader of torch's distributed checkpoint (DCP) for checkpoints in the hub's layout.

`read_metadata` opens the checkpoint and describes each tensor as one chunk. From that the planner makes the items that
a rank reads. `read_data` is one load of their slices into the memory that the planner gives for them.

DCP names a value of a nested state by its keys with dots between them. A state of `stio.save_state` has its own names
for tensors, and a tree of all other values: both are brought under DCP's names. DCP unpickles what a reader returns for
a value that is no tensor. So a value is decoded from the tree, and pickled here: nothing in a file is unpickled.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import _nested_dict
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor
from torch.futures import Future
from torch.utils._pytree import tree_leaves

from stio.device import TORCH_DTYPES
from stio.distributed.load import describe_opened, require_same
from stio.distributed.parts import part_of
from stio.errors import ClosedError, MismatchError, StioError, printable
from stio.format.state import STATE_KEY, Reference
from stio.limits import Limits
from stio.loading import LoadOptions, Memory, fill_from, load, open_with_options
from stio.loading.targets import Casting, LocalPart, PartsTarget, checked_casting, read_nested
from stio.runtime import Operation, copy_of, run_blocking
from stio.runtime.reports import Progress, Trace, shown
from stio.storage.checkpoint import CacheLike, OpenCheckpoint, SourceLike
from stio.text import described_by, is_url, keywords_for


@described_by(load)
class StioStorageReader(StorageReader):
    """Reads checkpoints of stio and of the Hugging Face hub in `torch.distributed.checkpoint.load`.

        dcp.load(state_dict, storage_reader=StioStorageReader("model/"))

    Each rank reads the bytes that its `DTensor`s and tensors hold, straight into their memory. The names of a
    checkpoint are those of the state dict, of nested dicts with dots between the keys. A checkpoint of
    `stio.save_state` has the state that was saved. Names and shapes are compared by the planner, dtypes here, before
    any tensor is read. Floating tensors of an ordinary checkpoint are cast to the dtype of the state dict, those of a
    saved state only as `casting` allows; any other difference of dtypes is an error.

    Where torch computes the place of a part wrongly (dimensions that FSDP and tensor parallelism both cut unevenly),
    the place that the placements give is read.

    Args:
        path: What `stio.load` takes as its `source`. `checkpoint_id=` of `dcp.load` replaces it.
        casting: Which dtypes of a saved state may be copied into which; see `stio.distributed.load_into`.
        verify: See `stio.load`. Each rank reads all files for that.
        ...: The other arguments are those of `stio.load`.
    """

    def __init__(
        self,
        path: SourceLike,
        *,
        casting: Casting = "safe",
        memory: Memory = "auto",
        budget_bytes: int | str | None = None,
        limits: Limits | None = None,
        verify: bool = False,
        follow_symlinks: bool = False,
        progress: Progress = None,
        cache: CacheLike | None = None,
        trace: Trace | None = None,
        switch_interval: float | None = None,
    ) -> None:
        super().__init__()
        self._opened: _Opened | None = None
        self._path = path
        self._casting = checked_casting(casting)
        self._options = LoadOptions(**keywords_for(LoadOptions, locals()))

    @property
    def checkpoint_id(self) -> str:
        """The path, as errors name it."""
        return shown(self._path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether there is something at this path; a URL is looked at when it is read."""
        return is_url(os.fspath(checkpoint_id)) or os.path.exists(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Close what is open, and begin with another checkpoint, if one is given."""
        self._close()
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Open the checkpoint, and describe what it has. The files stay open until `read_data` returns.

        Returns:
            The description. If the checkpoint cannot be opened, it raises the error when it is used: torch replaces an
            error of this method by another one.
        """
        self._close()
        source, options = self._path, self._options

        def body(operation: Operation[Any]) -> _Opened:
            opened = open_with_options(operation, source, options)
            try:
                return _described(operation, opened, options.limits or Limits())
            except BaseException:
                opened.close()
                raise

        def discard(found: _Opened) -> None:
            found.checkpoint.close()

        operation = Operation(body, name="open", about=shown(source), discard=discard)
        try:
            self._opened = opened = run_blocking(operation.wait())
            described: Metadata = opened.metadata()
        except StioError as error:
            return _Unreadable(error.with_traceback(None))  # whose frames refer to those of the caller
        return described

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        """Raise the error of `read_metadata`, which opens the checkpoint.

        Raises:
            StioError: The checkpoint could not be opened; see `stio.load`.
        """
        if isinstance(metadata, _Unreadable):
            raise copy_of(metadata.error)  # torch's frames, to which its traceback refers, hold the metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan, with what the coordinator compares."""
        opened = self._opened
        return plan if opened is None else replace(plan, storage_data=describe_opened(opened.checkpoint, self._path))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are.

        Raises:
            ChangedDuringReadError: The checkpoint was replaced while ranks opened it.
        """
        found = [plan.storage_data if isinstance(plan.storage_data, bytes) else b"" for plan in plans]
        require_same(found, path=self.checkpoint_id)
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of a plan by one load; return a future that is done.

        Raises:
            MismatchError: The memory for an item does not fit, or an item is no value of the checkpoint.
            ClosedError: `read_metadata` was not called before.
            StioError: See `stio.load`.
        """
        if self._opened is None:
            raise ClosedError("the checkpoint is not open; read_metadata() opens it", path=self.checkpoint_id)
        try:
            _read(self._opened, plan, planner, self._options, self._casting)
        finally:
            self._close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _close(self) -> None:
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.checkpoint.discard()

    def __del__(self) -> None:
        if hasattr(self, "_opened"):
            self._close()


class _Unreadable(Metadata):
    """The description of a checkpoint that cannot be opened; a use of it raises the error."""

    def __init__(self, error: StioError) -> None:
        self.error = error

    @property
    def state_dict_metadata(self) -> NoReturn:  # type: ignore[override]  # of no value
        """Raise the error."""
        raise copy_of(self.error)


@dataclass(slots=True)
class _Opened:
    """An open checkpoint, and what it has under DCP's names."""

    checkpoint: OpenCheckpoint
    names: dict[str, str] = field(default_factory=dict)
    """Name of each tensor in the checkpoint."""
    values: dict[str, object] = field(default_factory=dict)
    """Values that are no tensors. A tuple has an empty tensor in place of each of its tensors."""
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    """Where each value is in the nested state: keys as text, indices of lists."""

    def metadata(self) -> Metadata:
        """Return all values as DCP describes them.

        Raises:
            UnsupportedDtypeError: torch does not have the dtype of a tensor.
        """
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        stored, aliases = self.checkpoint.dtypes_and_shapes(), self.checkpoint.aliases
        TORCH_DTYPES.require([dtype for dtype, _ in stored.values()], path=self.checkpoint.path)
        for name, source in self.names.items():
            dtype, shape = stored[aliases.get(source, source)]
            size = torch.Size(TORCH_DTYPES.shape(dtype, shape))
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=TORCH_DTYPES[dtype]),
                size,
                [ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)],
            )
        described.update((name, BytesStorageMetadata()) for name in self.values)
        return Metadata(described, planner_data=self.paths, storage_meta=StorageMeta(self.checkpoint.path))


def _described(operation: Operation[Any], checkpoint: OpenCheckpoint, limits: Limits) -> _Opened:
    """Return what a checkpoint has under DCP's names."""
    opened = _Opened(checkpoint)
    if STATE_KEY not in checkpoint.metadata:
        every = [name for header in checkpoint.headers for name in header.names] + list(checkpoint.aliases)
        opened.names = {name: name for name in every}
        opened.paths = {name: (name,) for name in every}
        return opened
    nested = read_nested(checkpoint, limits, check=operation.check)
    stored: dict[int, str] = {}  # names, by the tensors that stand for them

    def stand_in(one: Reference) -> object:
        if one.in_host_memory:
            return nested.host_values[one.name]
        tensor = torch.empty(0, device="meta")
        stored[id(tensor)] = one.name
        return tensor

    state = nested.tree.fill(stand_in)
    try:
        flat, opened.paths = _nested_dict.flatten_state_dict(
            dict(state) if isinstance(state, Mapping) else {"state": state}
        )
    except ValueError as error:
        raise MismatchError(
            "two values of the state have one name in torch's distributed checkpoint; stio.load_state loads them",
            path=checkpoint.path,
            found=str(error),
        ) from error
    for name, value in flat.items():
        if isinstance(value, torch.Tensor):
            opened.names[name] = stored[id(value)]
        else:
            opened.values[name] = value
    return opened


def _read(opened: _Opened, plan: LoadPlan, planner: LoadPlanner, options: LoadOptions, casting: Casting) -> None:
    """Read all items of a plan, and give them to the planner."""
    path = opened.checkpoint.path
    items = [item for item in plan.items if item.type is not LoadItemType.BYTE_IO]
    parts: list[tuple[str, LocalPart]] = []
    commits: list[Callable[[], None]] = []
    for item in _placed(items, planner, opened):
        name = item.storage_index.fqn
        if name not in opened.names:
            raise MismatchError("the checkpoint has no such tensor", path=path, requested=name)
        memory = planner.resolve_tensor(item).detach()
        info = opened.checkpoint.info(opened.names[name])
        index = tuple(
            slice(first, first + length) for first, length in zip(item.storage_offsets, item.lengths, strict=True)
        )
        parts.append((opened.names[name], LocalPart(memory, TORCH_DTYPES.shape(info.dtype, info.shape), index)))
        commits.append(lambda item=item, memory=memory: planner.commit_tensor(item, memory))  # type: ignore[misc]
    _require_text_keys([item for item in plan.items if item.type is LoadItemType.BYTE_IO], planner, path)
    pickled = [
        (item, _pickled(item.storage_index.fqn, opened)) for item in plan.items if item.type is LoadItemType.BYTE_IO
    ]
    casting = casting if STATE_KEY in opened.checkpoint.metadata else "same_kind"
    run_blocking(fill_from(opened.checkpoint, PartsTarget(parts, casting), options))
    for commit in commits:
        commit()
    for item, value in pickled:
        planner.load_bytes(item, value)


def _require_text_keys(items: list[ReadItem], planner: LoadPlanner, path: str) -> None:
    """Require that the default planner puts plain values where they are in the state: it has text as keys."""
    if not isinstance(planner, DefaultLoadPlanner) or not planner.flatten_state_dict:
        return
    for item in items:
        here: Any = planner.original_state_dict
        for key in planner.mappings[item.dest_index.fqn]:
            if isinstance(here, Mapping) and key not in here:
                raise MismatchError(
                    f"{printable(item.dest_index.fqn)} is a plain value in a dict with keys that are not text, and "
                    "torch's distributed checkpoint would put it beside the old one; stio.load_state and "
                    "stio.distributed.load_into load it",
                    path=path,
                )
            here = here[key]


def _pickled(name: str, opened: _Opened) -> io.BytesIO:
    """Return a value of the state in the form that DCP unpickles."""
    path = opened.checkpoint.path
    if name not in opened.values:
        raise MismatchError("the checkpoint has no plain value of this name", path=path, requested=name)
    value = opened.values[name]
    if any(isinstance(one, torch.Tensor) for one in tree_leaves(value)):
        raise MismatchError(
            f"{printable(name)} is a tuple with tensors, which torch's distributed checkpoint loads as one value; "
            "save a list, or load it by stio.load_state",
            path=path,
        )
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _placed(items: list[ReadItem], planner: LoadPlanner, opened: _Opened) -> list[ReadItem]:
    """Return items with the places that the placements of `DTensor`s give; torch's planner may have others.

    Raises:
        MismatchError: See `part_of`.
    """
    if not isinstance(planner, DefaultLoadPlanner):
        return items
    if type(planner).create_local_plan is not DefaultLoadPlanner.create_local_plan:
        return items  # its items may be others than one for each tensor
    state = planner.state_dict
    sharded = {name: value for name, value in state.items() if isinstance(value, DTensor) and name in opened.names}
    found = [item for item in items if item.dest_index.fqn not in sharded]
    for name, tensor in sharded.items():
        part = part_of(name, tensor)
        assert part is not None  # it is a `DTensor`
        if part.local.numel():
            offsets, sizes = torch.Size([one.start for one in part.index]), torch.Size(part.local.shape)
            start = torch.Size([0] * len(sizes))
            to, source = MetadataIndex(name, offsets), MetadataIndex(name, start)
            found.append(ReadItem(LoadItemType.TENSOR, to, start, source, offsets, sizes))
    return found
