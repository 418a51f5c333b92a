"""Saves of torch's distributed checkpoint (DCP) as checkpoints in the hub's layout, published by stio's commit.

DCP's planner decides which rank writes which part of which tensor. The coordinator puts these decisions together
(`SaveLayout`). Then `write_data` is one save of many ranks (`save.py`), of the parts that the planner chose.
So DCP's `finish` has nothing to do. The values that are no tensors come from the ranks that the planner chose; the
first rank makes the tree of them, and writes it like its part of a tensor.

DCP has a flat state: tensors and other values, by names that it makes of their paths (`optim.state.w.exp_avg`). Each
tensor is stored under its name. If there are other values, the tensor `TREE_TENSOR` is stored too, with the tree of the
nested state (`format/state/tree.py`), as `stio.load_state` reads it. What a rank writes of the tensors are the items of
its own plan. Several of one tensor are one part.

DCP does not report failures to a writer. So the ranks report them to each other by `Ranks` while they write.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import io
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from math import prod
from typing import Any, NoReturn, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from stio.device import LazyTensor, Readiness, describe_tensors, require_values, tensors_in
from stio.distributed.parts import local_memory, part_of, with_local
from stio.distributed.placements import byte_ranges
from stio.distributed.plan_parts import ByteRange, WrittenPart
from stio.distributed.ranks import RANK_TIMEOUT_SECONDS, Ranks
from stio.distributed.save import HeldTensors, ShardedSave
from stio.errors import MismatchError, SaveInProgressError, printable
from stio.format import TensorSource, TiedNames
from stio.format.files import HashName
from stio.format.state import POINTER, STATE_KEY, TREE_TENSOR, parse_tree, python_path
from stio.limits import Limits, checked_size
from stio.loading.targets import torch_value
from stio.native import PINNED_BYTES
from stio.runtime import Operation, run_blocking
from stio.runtime.memory import Region
from stio.runtime.reports import Progress, Trace
from stio.saving import (
    DEFAULT_PATTERN,
    CommitStep,
    Durability,
    SaveOptions,
    SaveResult,
    ShardNames,
    SharedBySaves,
    StoredTensor,
    WritePlan,
    absolute_destination,
    plan_writes,
    save,
    tree_text,
)
from stio.storage.commit import LOCK_TIMEOUT_SECONDS
from stio.text import described_by, keywords_for, log

_COMMON_OPTIONS = (
    "max_shard_size", "metadata", "filename_pattern", "shard_names", "commit", "durability", "hash",
)  # fmt: skip
"""Those that decide what is written and where: all ranks take the coordinator's."""

_OF_TORCH = ".metadata"
"""The file that torch's own reader of a directory begins with."""


@described_by(save)
class StioStorageWriter(StorageWriter):
    """Writes what `torch.distributed.checkpoint.save` and `async_save` save, as safetensors files.

        dcp.save(state, storage_writer=StioStorageWriter("out/"))

    The result is a checkpoint in the hub's layout: `stio.load` and every other safetensors reader can open it. A tensor
    has the name that DCP gives it, its path joined by dots. If the state has other values too, the checkpoint is also
    one of nested state, and `stio.load_state` returns the state, with keys of their own types and mappings as dicts.
    These values may be those that `stio.save_state` takes, without tensors in them; others are refused, and nothing is
    pickled into the checkpoint.
    Tied tensors are stored once for each name.

    Nothing is visible before the commit, which is the last step. If one rank fails or is killed, the call raises on all
    of them and the old checkpoint remains. A writer may be used for one save after the other.

    Args:
        path: A path on a filesystem that all ranks share. None: the `checkpoint_id` of the call.
        budget_bytes: Most bytes of staging memory of a rank. None: 512 MiB.
        hash: See `stio.save`. The files are read again for that, each by one rank.
        progress: See `stio.save`. It counts the bytes of this rank.
        process_group: The ranks that save: the same as of `dcp.save`.
        rank_timeout: Seconds without a sign of life of a rank, after which the save fails on all others.
        ...: The other arguments are those of `stio.save`.

    Raises:
        TypeError: A value is of the wrong type.
        ValueError: A value is not allowed, or the path is no local path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        budget_bytes: int | str | None = None,
        max_shard_size: int | str | None = None,
        metadata: Mapping[str, str] | None = None,
        filename_pattern: str = DEFAULT_PATTERN,
        shard_names: ShardNames = "auto",
        commit: CommitStep = "index",
        durability: Durability = "full",
        hash: HashName | None = None,
        lock_timeout: float = LOCK_TIMEOUT_SECONDS,
        progress: Progress = None,
        trace: Trace | None = None,
        switch_interval: float | None = None,
        process_group: ProcessGroup | None = None,
        rank_timeout: float = RANK_TIMEOUT_SECONDS,
    ) -> None:
        super().__init__()
        self._options = SaveOptions(shared="clone", **keywords_for(SaveOptions, locals()))
        self._budget_bytes = None if budget_bytes is None else checked_size(budget_bytes)
        self._process_group, self._rank_timeout = process_group, rank_timeout
        self._path: str | os.PathLike[str] | None = None
        self._is_writing = False
        self._written: SaveResult | None = None
        self.result: SaveResult | None = None
        """Report of the last save, on the coordinator; None before its commit, and on other ranks."""
        if path is not None:
            self._set_path(path)

    # DCP's interface, in the order of its calls.

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a path that can be saved to."""
        try:
            return isinstance(absolute_destination(checkpoint_id), str | os.PathLike)
        except (TypeError, ValueError, ImportError):
            return False

    @property
    def checkpoint_id(self) -> str | os.PathLike[str] | None:
        """The path, as it was given."""
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for a new save.

        Args:
            checkpoint_id: The path of the new save; None: that of the one before.
        """
        if checkpoint_id is not None:
            self._set_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Prepare for a new save, see `reset`. DCP calls this on all ranks, before it sends a message.

        Raises:
            SaveInProgressError: The save before this one has not ended.
            ValueError: There is no path; or each rank would save alone (`use_collectives=False`).
        """
        if self._is_writing:
            raise SaveInProgressError(
                "this writer is writing another save; wait for its end, or make a writer for each save",
                path=os.fsdecode(self._path or ""),
            )
        self._written = self.result = None
        if self._path is None:
            raise ValueError("the writer has no path; pass one to StioStorageWriter, or checkpoint_id=")
        if kwargs.get("use_collectives") is False and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError("use_collectives=False: the ranks of a save by stio agree on one checkpoint; leave it out")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan, with the paths of the values in the state.

        Raises:
            ValueError: It is not complete, because the planner caches plans; or see `state_paths`.
        """
        if not plan.usable:
            raise ValueError(
                "the planner caches plans (enable_plan_caching=True), and the plan of a save by stio is another one "
                "each time; use a planner without it"
            )
        return replace(plan, storage_data=state_paths(plan))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Put the plans of the ranks together. DCP calls this on the coordinator.

        Args:
            plans: The plan of each rank.

        Returns:
            The plans, each with what all ranks save.

        Raises:
            MismatchError: The plans do not fit together.
            ValueError: A name or the process group does not fit.
        """
        if len(plans) > 1 and dist.get_world_size(self._process_group) != len(plans):
            raise ValueError(
                f"{len(plans)} ranks save, and process_group= of the writer has "
                f"{dist.get_world_size(self._process_group)}; pass the process group of dcp.save to the writer too"
            )
        layout = layout_of(plans, {name: getattr(self._options, name) for name in _COMMON_OPTIONS})
        return [SavePlan(plan.items, layout, plan.planner_data, plan.usable) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part of the checkpoint; return when all ranks have, and it is published.

        Args:
            plan: The rank's items.
            planner: Has their data.

        Returns:
            A future that is complete.

        Raises:
            TypeError: A value is neither a tensor nor one that `stio.save_state` takes.
            MismatchError: A tensor is another one than the plan says.
            RankError: Another rank has failed.
            StioError: See `stio.save`.
        """
        self._is_writing = True
        try:
            self._written = run_blocking(self._write(plan, planner))
        finally:
            self._is_writing = False
        future: Future[list[WriteResult]] = Future()
        future.set_result([])
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Set `result`: the checkpoint is published. DCP calls this on the coordinator."""
        self.result = self._written
        if self.result is not None and os.path.lexists(os.path.join(self.result.path, _OF_TORCH)):
            log(
                logging.WARNING,
                "%s: saved, but the directory holds a checkpoint of torch's own writer too, and torch's own reader "
                "reads that one: load with StioStorageReader, or delete %s and the .distcp files",
                printable(self.result.path),
                _OF_TORCH,
            )

    # How.

    def _set_path(self, path: str | os.PathLike[str]) -> None:
        self._options.max_shard_bytes(path)  # for its errors
        if not isinstance(absolute_destination(path), str | os.PathLike):
            raise ValueError(
                f"a writer of DCP saves to a path on a filesystem that all ranks share, not to {printable(str(path))}; "
                "stio.distributed.save takes URLs"
            )
        self._path = path

    async def _write(self, plan: SavePlan, planner: SavePlanner) -> SaveResult:
        layout, path = plan.storage_data, self._path
        if not isinstance(layout, SaveLayout):
            raise ValueError("the planner has dropped the storage_data of the plan, which the writer needs")
        assert path is not None
        ranks = Ranks(
            self._process_group,
            about="save",
            timeout=self._rank_timeout,
            key=layout.key,
            is_alone=layout.num_ranks == 1,
        )
        async with ranks.reports():
            require_right_parts(plan.items, planner)
            require_values(state if isinstance(state := getattr(planner, "state_dict", None), Mapping) else {})
            options = replace(self._options, **layout.options)
            save = _DcpSave(plan, planner, path, options, ranks, saver=SharedBySaves.alone(self._budget_bytes))
            return await save.complete()


class _DcpSave(ShardedSave):
    """The save on one rank, of the parts that DCP's planner has chosen.

    See `ShardedSave` for the other arguments.

    Args:
        plan: What the rank writes, and what all ranks save.
        planner: Has the data.
    """

    def __init__(self, plan: SavePlan, planner: SavePlanner, *arguments: Any, **keywords: Any) -> None:
        self._layout: SaveLayout = plan.storage_data
        self._values = values_of_items([item for item in plan.items if item.tensor_data is None], planner)
        self._own_tree = tree_text(self._values)  # raises for a value that is not saved
        tensors, self._ranges = parts_of_items([item for item in plan.items if item.tensor_data is not None], planner)
        super().__init__(HeldTensors(tensors, {}, TiedNames()), *arguments, **keywords)

    def _plan_all(
        self, sources: Sequence[TensorSource], block_bytes: int
    ) -> tuple[WritePlan, Mapping[str, WrittenPart]]:
        metadata = dict(self._options.metadata or {})
        metadata.pop(STATE_KEY, None)  # of another checkpoint
        parts = {source.name: WrittenPart(source, self._ranges[source.name]) for source in sources}
        tree_bytes = 0
        if self._layout.has_tree:
            metadata[STATE_KEY] = POINTER
            tree_bytes = self._share_tree(parts)
        plan = plan_writes(
            describe_tensors(self._layout.whole(tree_bytes)),
            block_bytes,
            max_shard_bytes=self._max_shard_bytes,
            metadata=metadata,
            shared="clone",
        )
        return plan, parts

    def _share_tree(self, parts: dict[str, WrittenPart]) -> int:
        """Make the tree, from the values of all ranks; it becomes a part of the first one. Return its length."""
        values: dict[str, object] = {}
        for text in run_blocking(self._ranks.arrive("values", self._own_tree, kind=bytes)):
            tree = parse_tree(text, path=str(self.destination), limits=Limits(), foreign=torch_value)
            values |= tree.fill(lambda one: one)
        text = self._layout.tree(values | self._values, self.operation.check)
        if self._ranks.rank == 0:
            tensor = torch.frombuffer(bytearray(text), dtype=torch.uint8)
            parts[TREE_TENSOR] = WrittenPart(describe_tensors({TREE_TENSOR: tensor})[0], [ByteRange(0, len(text))])
        return len(text)


# What all ranks save, and which part of it this one.


StatePath: TypeAlias = tuple[int | tuple[Any], ...]
"""The path of a value in a nested state: indices of lists, and in a tuple each key of a mapping, of its own type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLayout:
    """What all ranks save together; it is in the `storage_data` of the plan of each."""

    key: str
    """A text that identifies the save."""
    num_ranks: int
    """Number of ranks that save."""
    tensors: Mapping[str, tuple[torch.dtype, torch.Size]]
    """Dtype and shape of each whole tensor, in order."""
    paths: Mapping[StatePath, str | None]
    """By its path in the nested state the name of each value, in order; None: an empty mapping."""
    values: frozenset[str]
    """Names of what is no tensor."""
    options: Mapping[str, Any]
    """Options of the coordinator's writer that decide what is written; the same on all ranks."""

    @property
    def has_tree(self) -> bool:
        """Whether names of tensors do not tell the state: for values, empty mappings and keys that are no text."""
        return bool(self.values) or any(
            name is None or any(isinstance(step, tuple) and not isinstance(step[0], str) for step in path)
            for path, name in self.paths.items()
        )

    def whole(self, tree_bytes: int) -> dict[str, torch.Tensor | LazyTensor]:
        """Return all tensors to save, without data; the last one is the tree of so many bytes, if there is one."""
        whole: dict[str, torch.Tensor | LazyTensor] = {
            name: LazyTensor(dtype, tuple(shape), _never) for name, (dtype, shape) in self.tensors.items()
        }
        if tree_bytes:
            whole[TREE_TENSOR] = LazyTensor(torch.uint8, (tree_bytes,), _never)
        return whole

    def tree(self, values: Mapping[str, object], check: Callable[[], None]) -> bytes:
        """Return the tree of the nested state.

        Args:
            values: The values by name.
            check: Called now and then; what it raises ends the call.

        Raises:
            MismatchError: The ranks have not written all values.
        """
        if values.keys() != self.values:
            other = min(values.keys() ^ self.values)
            raise MismatchError(f"{printable(other)!r} was not written by the rank that DCP's planner chose")
        state: dict[Any, Any] = {}
        for path, name in self.paths.items():
            _put(state, path, {} if name is None else values[name] if name in values else StoredTensor(name))
        return tree_text(state, check)


def layout_of(plans: Sequence[SavePlan], options: Mapping[str, Any]) -> SaveLayout:
    """Return what all ranks save together.

    Args:
        plans: The plan of each rank; no item is in two of them.
        options: See `SaveLayout`.

    Raises:
        MismatchError: The items of two ranks are not of the same tensor.
        ValueError: A tensor has the name of the tree.
    """
    tensors: dict[str, TensorWriteData] = {}
    values: set[str] = set()
    for item in (item for plan in plans for item in plan.items):
        name, data = item.index.fqn, item.tensor_data
        if data is None:
            values.add(name)
            continue
        first = tensors.setdefault(name, data)
        found, expected = (_described(one.properties.dtype, one.size) for one in (data, first))
        if found != expected:
            raise MismatchError(
                f"the ranks do not save the same tensor {printable(name)!r}", expected=expected, found=found
            )
    if both := tensors.keys() & values:
        raise MismatchError(f"{printable(min(both))!r} is a tensor on one rank, and another value on another rank")
    if TREE_TENSOR in tensors:
        raise ValueError(f"the name {TREE_TENSOR!r} is stio's own; rename the tensor")
    names = dict.fromkeys(item.index.fqn for plan in plans for item in plan.items)
    paths = _paths(plans, [*tensors, *(name for name in names if name in values)])
    return SaveLayout(
        key=secrets.token_hex(16),
        num_ranks=len(plans),
        tensors={
            name: (tensors[name].properties.dtype, tensors[name].size) for name in paths.values() if name in tensors
        },
        paths=paths,
        values=frozenset(values),
        options=options,
    )


def _described(dtype: torch.dtype, shape: Sequence[int]) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


def state_paths(plan: SavePlan) -> dict[StatePath, str | None]:
    """Return by its path the name of each value of the state that is being saved; None for an empty mapping.

    Args:
        plan: The rank's plan. The paths in it have text in place of each key, and empty mappings are left out.

    Raises:
        ValueError: The planner saves what is not in the state, and text in a path may have been a number.
    """
    data = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    names: dict[StatePath, str] = {
        tuple(key if isinstance(key, int) else (key,) for key in path): name
        for name, path in data.items()
        if isinstance(path, tuple)
    }
    paths: dict[StatePath, str | None] = {}

    def walk(value: object, as_text: StatePath, path: StatePath) -> None:
        if isinstance(value, Mapping):
            if path and not value:
                paths[path] = None
            for key, one in value.items():
                walk(one, (*as_text, (str(key),)), (*path, (key,)))
        elif as_text in names:
            paths[path] = names[as_text]
        elif isinstance(value, list | tuple):
            for number, one in enumerate(value):
                walk(one, (*as_text, number), (*path, number))

    walk(_state_of_save() or {}, (), ())
    if {name for name in paths.values() if name is not None} == set(names.values()):
        return paths
    for path, name in names.items():
        if any(isinstance(key, tuple) and key[0].lstrip("-").isdecimal() for key in path):
            raise ValueError(
                f"{printable(name)!r}: the planner has text in place of keys that may have been numbers, and saves "
                "another state than `dcp.save` was called with; use torch's own planner, or keys of text as "
                "`get_optimizer_state_dict` returns them"
            )
    return dict(names)


def _state_of_save() -> Mapping[Any, Any] | None:
    """Return the state that the `dcp.save` which called this saves; None: it was not called by one.

    A planner has the state with text in place of its keys, and without the empty mappings in it.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "_save_state_dict" and frame.f_globals.get("__name__") == state_dict_saver.__name__:
            state = frame.f_locals.get("state_dict")
            return state if isinstance(state, Mapping) else None
        frame = frame.f_back
    return None


def _put(state: dict[Any, Any], path: StatePath, value: object) -> None:
    """Put a value into a nested state, and make the containers on its path."""
    here: Any = state
    for step, following in zip(path, (*path[1:], None), strict=True):
        inner = value if following is None else [] if isinstance(following, int) else {}
        if isinstance(step, tuple):
            here = here.setdefault(step[0], inner)
        else:
            here += [None] * (step + 1 - len(here))
            if here[step] is None:
                here[step] = inner
            here = here[step]


def _paths(plans: Iterable[SavePlan], names: Sequence[str]) -> dict[StatePath, str | None]:
    """Return the paths of these names and of empty mappings, in the order of the caller's state."""
    paths: dict[StatePath, str | None] = {}
    last: dict[StatePath, str | None] = {}
    for plan in plans:
        own: dict[StatePath, str | None] = plan.storage_data  # see `prepare_local_plan`
        if own != last:  # those of most ranks are equal
            paths.update((path, name) for path, name in own.items() if name is not None or path not in paths)
        last = own
    wanted, placed = frozenset(names), frozenset(paths.values())
    paths = {path: name for path, name in paths.items() if name is None or name in wanted}
    return paths | {((name,),): name for name in names if name not in placed}


def _never() -> NoReturn:
    raise AssertionError("the tensors of a layout have no data")


def item_nbytes(item: WriteItem) -> int:
    """Return the bytes of a tensor's item."""
    assert item.tensor_data is not None
    return prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


def parts_of_items(
    items: Sequence[WriteItem], planner: SavePlanner
) -> tuple[dict[str, torch.Tensor | LazyTensor], dict[str, list[ByteRange]]]:
    """Return what this rank writes of each tensor, and where it is in the whole one."""
    by_name: dict[str, list[WriteItem]] = {}
    for item in items:
        if item_nbytes(item):
            by_name.setdefault(item.index.fqn, []).append(item)
    tensors: dict[str, torch.Tensor | LazyTensor] = {}
    ranges = {}
    is_lazy = _makes_tensors(planner)
    for name, parts in by_name.items():
        data = parts[0].tensor_data
        assert data is not None
        ranges[name] = [one for part in parts for one in _ranges_of(part)]
        if len(parts) == 1 and not is_lazy:
            tensors[name] = _resolved(name, parts[0], planner.resolve_data)
        else:  # one part after the other, as rows of one tensor
            num_elements = sum(map(item_nbytes, parts)) // data.properties.dtype.itemsize
            produce = partial(_flat_parts, name, parts, planner.resolve_data)
            tensors[name] = LazyTensor(data.properties.dtype, (num_elements,), produce)
    return tensors, ranges


def _flat_parts(name: str, parts: Sequence[WriteItem], resolve: Callable[[WriteItem], Any]) -> Iterator[torch.Tensor]:
    for part in parts:
        yield _resolved(name, part, resolve).reshape(-1)


def _ranges_of(item: WriteItem) -> list[ByteRange]:
    """Return where the elements of a tensor's item are in the whole tensor."""
    assert item.tensor_data is not None
    data, chunk = item.tensor_data, item.tensor_data.chunk
    part = [slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
    return byte_ranges(data.size, part, data.properties.dtype.itemsize)


def _resolved(name: str, item: WriteItem, resolve: Callable[[WriteItem], Any]) -> torch.Tensor:
    """Return the tensor of an item.

    Args:
        name: Its name.
        item: The item.
        resolve: The planner's `resolve_data`.

    Raises:
        MismatchError: It is another one than the item says.
    """
    assert item.tensor_data is not None
    tensor = local_memory(resolve(item)).detach()
    expected = _described(item.tensor_data.properties.dtype, item.tensor_data.chunk.sizes)
    found = _described(tensor.dtype, tensor.shape)
    if found != expected:
        raise MismatchError(
            f"the part of tensor {printable(name)!r} on this rank is another one than torch's planner says; "
            "stio.distributed.save takes the parts from the placements themselves",
            expected=expected,
            found=found,
        )
    return tensor


def _makes_tensors(planner: SavePlanner) -> bool:
    """Return whether a planner may make new tensors: then each is made when it is written."""
    own: Any = DefaultSavePlanner
    names = ("resolve_data", "lookup_object", "transform_object")
    return any(getattr(type(planner), name, None) is not getattr(own, name) for name in names)


def require_right_parts(items: Sequence[WriteItem], planner: SavePlanner) -> None:
    """Require that the planner's parts of `DTensor`s are those that their placements give.

    torch computes them wrongly where a dimension is cut twice and unevenly.

    Args:
        items: What this rank writes.
        planner: The planner.
    """
    state = getattr(planner, "state_dict", None)
    if not isinstance(planner, DefaultSavePlanner) or not isinstance(state, Mapping):
        return
    for item in items:
        name, data = item.index.fqn, item.tensor_data
        tensor = state.get(name)
        if not isinstance(tensor, DTensor) or data is None or tuple(data.size) != tuple(tensor.shape):
            continue
        part = part_of(name, tensor)
        assert part is not None  # it is a `DTensor`
        expected = byte_ranges(part.shape, part.index, data.properties.dtype.itemsize)
        if _ranges_of(item) != expected:
            raise MismatchError(
                f"torch's planner gives another part of {printable(name)!r} to this rank than its placements do; "
                "stio.distributed.save saves it",
                expected=part.index,
                found=[data.chunk.offsets, data.chunk.sizes],
            )


def values_of_items(items: Sequence[WriteItem], planner: SavePlanner) -> dict[str, object]:
    """Return the values of items that are no tensors, by name.

    Raises:
        TypeError: The planner has only pickles of them, or saves others than the state has.
    """
    if not items:
        return {}
    if not isinstance(planner, DefaultSavePlanner):
        raise TypeError("values that are no tensors need a planner that derives from torch's DefaultSavePlanner")
    values: dict[str, object] = {}
    for item in items:
        value = values[item.index.fqn] = planner.lookup_object(item.index)
        if not _makes_tensors(planner):
            continue
        data, expected = planner.resolve_data(item), DefaultSavePlanner.transform_object(planner, item, value)
        if not isinstance(data, io.BytesIO) or data.getvalue() != expected.getvalue():
            raise TypeError(
                f"{printable(item.index.fqn)!r}: the planner saves another value than the state has, as a pickle; "
                "change the value in the state"
            )
    return values


# The snapshot of a state for `async_save`, in memory that is used again.


Allocator: TypeAlias = Callable[[int], Region]

_Memory: TypeAlias = tuple[Allocator, Region]
"""Memory, and what has made it."""

_ALIGNMENT = 64

_COPIES_AT_ONCE = 256
"""Between two looks at a cancel."""


class StioStager(AsyncStager):
    """Copies the state of a save into memory of the host, so that it may change while it is written.

        stager = StioStager()
        saved = dcp.async_save(state, storage_writer=StioStorageWriter("out/"), async_stager=stager)

    `stage` returns when the copy is complete. Its memory is pinned if there are tensors of an accelerator, and is used
    again for the next snapshot. A snapshot that is still being written keeps its memory; a second one then gets its
    own. `DTensor`s stay `DTensor`s. All that is no tensor is copied too.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._free: list[_Memory] = []  # not used by any snapshot
        self._is_closed = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of a state; the state may change when this returns.

        Raises:
            TypeError: A tensor has no memory of its own, such as a wrapper of other tensors.
            ValueError: A tensor is sparse, nested, on meta or freed.
            HostMemoryError: There is too little memory.
            DeviceError: A copy failed.
        """
        tensors: dict[str, torch.Tensor] = {}
        seen: set[int] = set()
        for keys, tensor in _tensors_of(state_dict):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                path = python_path([*keys])  # for messages, so long keys are cut: two may have one text
                tensors[path if path not in tensors else f"{path} ({len(tensors)})"] = tensor
        locals_of = {path: local_memory(tensor) for path, tensor in tensors.items()}
        ready = Readiness.now(locals_of)
        copied = Operation(partial(self._copy, locals_of, ready), name="stage").result()
        memo: dict[int, Any] = {}
        for path, tensor in tensors.items():
            local = copied[path]
            memo[id(tensor)] = with_local(tensor, local) if isinstance(tensor, DTensor) else local
        return copy.deepcopy(state_dict, memo)

    def synchronize_staging(self) -> None:
        """Do nothing: `stage` waits."""

    def close(self) -> None:
        """Release the memory that no snapshot uses; that of a snapshot is released with it. Idempotent."""
        self._is_closed = True
        self._free.clear()

    def _copy(
        self, tensors: Mapping[str, torch.Tensor], ready: Readiness, operation: Operation[Any]
    ) -> dict[str, torch.Tensor]:
        sources = describe_tensors(tensors, check=operation.check)
        allocate = ready.staging_allocator()
        sizes = [-(-source.nbytes // _ALIGNMENT) * _ALIGNMENT for source in sources]
        *offsets, nbytes = accumulate(sizes, initial=0)
        region = self._take(max(nbytes, 1), allocate)
        copies = []
        for source, offset in zip(sources, offsets, strict=True):
            # No copy crosses the end of a pinned piece.
            ends = range(PINNED_BYTES - offset % PINNED_BYTES, source.nbytes, PINNED_BYTES)
            for begin, end in pairwise([0, *ends, source.nbytes]):
                copies.append((source.data, begin, region.sub(offset + begin, end - begin)))
        for at in range(0, len(copies), _COPIES_AT_ONCE):
            operation.check()
            ready.copy_out(copies[at : at + _COPIES_AT_ONCE])
        return tensors_in(
            self._lent(allocate, region),
            [source.name for source in sources],
            [source.dtype for source in sources],
            [source.shape for source in sources],
            offsets,
        )

    def _take(self, nbytes: int, allocate: Allocator) -> Region:
        """Return memory that was used before, or new. What is not used now, of other sizes, is released."""
        free = [memory for memory in self._free if memory[0] == allocate and memory[1].nbytes == nbytes]
        self._free = free[1:]
        return free[0][1] if free else allocate(nbytes).sub(0, nbytes)

    def _lent(self, allocate: Allocator, region: Region) -> Region:
        """Return a region over the same memory, which comes back when the last tensor over it is gone."""
        buffer: Any = (ctypes.c_char * region.nbytes).from_address(region.address)
        weakref.finalize(buffer, self._give_back, (allocate, region)).atexit = False
        return Region(region.address, region.nbytes, buffer)

    def _give_back(self, memory: _Memory) -> None:
        if not self._is_closed:
            self._free.append(memory)


def _tensors_of(value: object, keys: tuple[object, ...] = ()) -> Iterator[tuple[tuple[object, ...], torch.Tensor]]:
    """Yield the tensors in mappings, lists and tuples, each with its keys."""
    if isinstance(value, torch.Tensor):
        yield keys, value
    elif isinstance(value, Mapping | list | tuple):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors_of(one, (*keys, key))
