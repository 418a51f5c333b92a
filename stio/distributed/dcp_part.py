"""What one rank writes in a save of torch's distributed checkpoint (DCP): parts of tensors, and other values."""

from __future__ import annotations

import codecs
import io
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from stio.device.describe import LazyTensor
from stio.distributed.dcp_layout import RankTask, ranges_of, resolved
from stio.distributed.parts import part_of
from stio.distributed.ranks import Ranks
from stio.errors import MismatchError, printable
from stio.format.placements import ByteRange
from stio.format.sharding import TensorSource
from stio.runtime.hashing import new_hasher
from stio.runtime.operation import Operation
from stio.saving.nested import tree_text
from stio.saving.options import SaveOptions, SaveResult
from stio.saving.pending import PendingSave
from stio.saving.plan import ShardPlan, WritePlan
from stio.saving.plan_parts import Part, plan_placed
from stio.storage.base import Transaction
from stio.storage.commit.transaction import Invitation, JoinedTransaction


class PartSave(PendingSave):
    """The writes of one rank; see `PendingSave` for the other arguments.

    Args:
        tensors: What the rank writes of each tensor.
        ranges: Where these bytes are in the whole tensor.
        task: The rank's task.
        destination: The destination.
        options: The keywords.
    """

    _hashes_blocks = False

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | LazyTensor],
        ranges: Mapping[str, Sequence[ByteRange]],
        task: RankTask,
        destination: str | os.PathLike[str],
        options: SaveOptions,
        *,
        budget_bytes: int | str | None,
    ) -> None:
        self._ranges, self._task = ranges, task
        self._own_bytes: list[int] = []
        super().__init__(tensors, destination, options, budget_bytes=budget_bytes)

    def _make_plans(self, sources: Sequence[TensorSource], block_bytes: int) -> tuple[WritePlan, WritePlan]:
        task = self._task
        placed: list[list[tuple[int, Part]]] = [[] for _ in task.sizes]
        for source in sources:
            number, begin = task.places[source.name]
            placed[number].append((begin, Part(source, self._ranges[source.name])))
        for of_file in placed:
            of_file.sort(key=lambda one: one[0])
        files = tuple(
            ShardPlan(header=b"", names=(), listed=(), nbytes=nbytes, data_bytes=0, blocks=()) for nbytes in task.sizes
        )
        whole = WritePlan(sources=(), shards=files, aliases={}, total_bytes=0, metadata={})
        plan = plan_placed(whole, placed, block_bytes, with_headers=False)
        self._own_bytes = [sum(block.file_bytes for block in shard.blocks) for shard in plan.shards]
        return plan, plan

    def _begin_transaction(self, operation: Operation[SaveResult], num_shards: int) -> Transaction:
        invitation = Invitation.from_json(self._task.invitation)
        return JoinedTransaction(invitation, self._own_bytes, check=operation.check)


class PlainValue:
    """A value that is no tensor, in the result that a rank returns to the coordinator."""

    def __init__(self, value: object) -> None:
        self.value = value


class FileDigest:
    """The digest of a file, in the result that a rank returns to the coordinator."""

    def __init__(self, text: str) -> None:
        self.text = text


def digests_of_share(task: RankTask, ranks: Ranks) -> list[WriteResult]:
    """Return the digests of every n-th file that is complete, for the coordinator.

    Raises:
        RankError: Another rank has failed.
        StorageError: The operating system reported an error.
    """

    def check() -> None:
        if ranks.failure is not None:
            raise ranks.failure

    assert task.hash is not None
    joined = JoinedTransaction(Invitation.from_json(task.invitation), check=check)
    try:
        names = joined.shard_names[: task.num_early][ranks.rank :: ranks.num_ranks]
        found = [(name, joined.digest(name, new_hasher(task.hash), check)) for name in names]
    finally:
        joined.roll_back()
    return [WriteResult(MetadataIndex(name), size_in_bytes=0, storage_data=FileDigest(text)) for name, text in found]


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
        ranges[name] = [one for part in parts for one in ranges_of(part)]
        if len(parts) > 1:  # one after the other, as rows of one tensor
            num_elements = sum(map(item_nbytes, parts)) // data.properties.dtype.itemsize
            produce: Callable[[], Any] = partial(_flat_parts, name, parts, planner.resolve_data)
            tensors[name] = LazyTensor(data.properties.dtype, (num_elements,), produce)
        elif is_lazy:
            produce = partial(resolved, name, parts[0], planner.resolve_data)
            tensors[name] = LazyTensor(data.properties.dtype, tuple(data.chunk.sizes), produce)
        else:
            tensors[name] = resolved(name, parts[0], planner.resolve_data)
    return tensors, ranges


def _flat_parts(name: str, parts: Sequence[WriteItem], resolve: Callable[[WriteItem], Any]) -> Iterator[torch.Tensor]:
    for part in parts:
        yield resolved(name, part, resolve).reshape(-1)


def _makes_tensors(planner: SavePlanner) -> bool:
    """Return whether a planner may make new tensors: then each is made when it is written."""
    kind: Any = type(planner)
    default: Any = DefaultSavePlanner
    return not (
        isinstance(planner, default)
        and kind.resolve_data is default.resolve_data
        and kind.lookup_object is default.lookup_object
        and kind.transform_object is default.transform_object
    )


def require_right_parts(items: Sequence[WriteItem], planner: SavePlanner) -> None:
    """Require that the planner's parts of `DTensor`s are those that their placements give.

    torch computes them wrongly where a dimension is cut twice and unevenly.

    Args:
        items: What the planner offers to write, copies included.
        planner: The planner.
    """
    state = getattr(planner, "state_dict", None)
    if not isinstance(planner, DefaultSavePlanner) or not isinstance(state, Mapping):
        return
    for item in items:
        name = item.index.fqn
        tensor, data = state.get(name), item.tensor_data
        if not isinstance(tensor, DTensor) or data is None or tuple(data.size) != tuple(tensor.shape):
            continue
        part, chunk = part_of(name, tensor), data.chunk
        assert part is not None  # it is a `DTensor`
        expected = [(one.start, one.stop) for one in part.index]
        found = [(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        if found != expected and any(begin < end for begin, end in expected + found) and _has_elements(expected, found):
            raise MismatchError(
                f"torch's planner gives another part of {printable(name)!r} to this rank than its placements do; "
                "stio.distributed.save saves it",
                expected=expected,
                found=found,
            )


def _has_elements(*parts: list[tuple[int, int]]) -> bool:
    return any(all(begin < end for begin, end in part) for part in parts)


def values_of_items(items: Sequence[WriteItem], planner: SavePlanner) -> list[WriteResult]:
    """Return the values that are no tensors, for the coordinator.

    Raises:
        TypeError: One has a type that is not saved.
    """
    values = {item.index.fqn: _value_of(item, planner) for item in items}
    tree_text(values)  # raises before anything is written
    return [
        WriteResult(index=item.index, size_in_bytes=0, storage_data=PlainValue(values[item.index.fqn]))
        for item in items
    ]


_NUMPY_GLOBALS: list[Any] = [
    *(np.ndarray, np.dtype, codecs.encode, bytes),
    *{np.array([0]).__reduce__()[0], np.float64(0).__reduce__()[0]},  # private functions that make arrays and scalars
    *{type(np.dtype(code)) for code in "?bBhHiIlLqQefdFDSUMm"},
]
"""What pickles of numpy's arrays and scalars refer to; torch takes these files from its own planner."""


def _value_of(item: WriteItem, planner: SavePlanner) -> object:
    if not _makes_tensors(planner):
        assert isinstance(planner, DefaultSavePlanner)
        return planner.lookup_object(item.index)
    data = planner.resolve_data(item)
    try:
        assert isinstance(data, io.BytesIO)
        data.seek(0)
        with torch.serialization.safe_globals(_NUMPY_GLOBALS):
            return torch.load(data, weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, AssertionError) as error:
        raise TypeError(
            f"{printable(item.index.fqn)!r}: what the planner makes of it is no plain value; pass its parts, as "
            "containers, tensors and plain values"
        ) from error
