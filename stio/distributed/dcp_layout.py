"""The files of a save by torch's distributed checkpoint (DCP), planned from what DCP's planner has decided.

DCP has a flat state: tensors and other values, by names that it makes of their paths (`optim.state.w.exp_avg`). Each
tensor is stored under its name. If there are other values, the tensor `TREE_TENSOR` is stored too, with the tree of the
nested state (`format/state_tree.py`), as `stio.load_state` reads it. The values are known only when all ranks have
written, so that tensor comes last in the last file, whose header has room for it.

What a rank writes of these files are the items of its own plan. Several of one tensor are one part.
"""

from __future__ import annotations

import codecs
import io
import pickle
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, NoReturn

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from stio.device.describe import LazyTensor, describe_tensors
from stio.distributed.parts import part_of
from stio.distributed.torch_private import NamePath, local_memory, nested_state
from stio.errors import MismatchError, printable
from stio.format.header import LATE_BYTES, with_late_tensor
from stio.format.placements import ByteRange, byte_ranges
from stio.format.state_tree import POINTER, STATE_KEY, TREE_TENSOR
from stio.saving.nested import StoredTensor, tree_text
from stio.saving.plan import WritePlan, plan_writes
from stio.saving.staging_pool import STREAM_BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTask:
    """What a rank needs to write its items; it is in the `storage_data` of its plan."""

    invitation: bytes
    """The `Invitation` of the first rank."""
    num_ranks: int
    """Number of ranks that save."""
    sizes: tuple[int, ...]
    """Bytes of each file when it is created."""
    places: Mapping[str, tuple[int, int]]
    """Where the data of the rank's tensors are: the number of the file, and the first byte in it."""
    num_early: int
    """Number of files, from the first on, that are complete when all ranks have written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveLayout:
    """All files of a save."""

    plan: WritePlan
    """The files when they are created: without the tree, but with room for it in the last header."""
    last_header: bytes
    """Header of the last file without that room."""
    paths: Mapping[str, NamePath]
    """The path in the nested state of each name, in order."""
    values: frozenset[str]
    """Names of what is no tensor."""

    @property
    def num_early(self) -> int:
        """Number of files, from the first on, whose header does not depend on what is no tensor."""
        return len(self.plan.shards) - bool(self.values)

    def completed(self, values: Mapping[str, object], check: Callable[[], None]) -> tuple[WritePlan, bytes]:
        """Return the plan with the headers to write, and the tree; it is empty if there are tensors only.

        Args:
            values: The values by name.
            check: Called now and then; what it raises ends the call.

        Raises:
            MismatchError: The ranks have not written all values.
        """
        if values.keys() != self.values:
            name = min(values.keys() ^ self.values)
            raise MismatchError(f"{printable(name)!r} was not written by the rank that DCP's planner chose")
        if not values:
            return self.plan, b""
        leaves = {name: values[name] if name in values else StoredTensor(name) for name in self.paths}
        tree = tree_text(nested_state(leaves, self.paths), check)
        *others, last = self.plan.shards
        completed = replace(
            last,
            header=with_late_tensor(self.last_header, TREE_TENSOR, last.data_bytes, len(tree)),
            names=(*last.names, TREE_TENSOR),
            listed=(*last.listed, TREE_TENSOR),
            nbytes=last.nbytes + len(tree),
            data_bytes=last.data_bytes + len(tree),
        )
        plan = replace(self.plan, shards=(*others, completed), total_bytes=self.plan.total_bytes + len(tree))
        return plan, tree


def plan_save(
    plans: Sequence[SavePlan], *, max_shard_bytes: int | None, metadata: Mapping[str, str] | None
) -> SaveLayout:
    """Return the files in which all ranks write what DCP's planner assigned to them.

    Args:
        plans: The plan of each rank; no item is in two of them.
        max_shard_bytes: See `plan_writes`.
        metadata: See `plan_writes`.

    Raises:
        MismatchError: The items do not make up the tensors.
        ValueError: See `plan_writes`.
        UnsupportedDtypeError: The format has no such dtype.
    """
    tensors, values = _collected(plans)
    paths = _paths(plans, [*tensors, *values])
    sources = describe_tensors(
        {
            name: LazyTensor(tensors[name].properties.dtype, tuple(tensors[name].size), _never)
            for name in paths
            if name in tensors
        }
    )
    text = dict(metadata or {})
    text.pop(STATE_KEY, None)  # of another checkpoint
    if values:
        if TREE_TENSOR in tensors:
            raise ValueError(f"the name {TREE_TENSOR!r} is stio's own; rename the tensor")
        text[STATE_KEY] = POINTER
    plan = plan_writes(sources, STREAM_BLOCK_BYTES, max_shard_bytes=max_shard_bytes, metadata=text, shared="clone")
    *others, last = plan.shards
    if values:
        header = with_late_tensor(last.header, TREE_TENSOR, last.data_bytes, None)
        plan = replace(plan, shards=(*others, replace(last, header=header, nbytes=last.nbytes + LATE_BYTES)))
    return SaveLayout(plan=plan, last_header=last.header, paths=paths, values=frozenset(values))


def _collected(plans: Iterable[SavePlan]) -> tuple[dict[str, TensorWriteData], dict[str, None]]:
    """Return the tensors, and the names of the other values; all in the order of the plans."""
    tensors: dict[str, TensorWriteData] = {}
    values: dict[str, None] = {}
    elements: defaultdict[str, int] = defaultdict(int)
    for item in (item for plan in plans for item in plan.items):
        name, data = item.index.fqn, item.tensor_data
        if item.type == WriteItemType.BYTE_IO or data is None:
            values[name] = None
            continue
        first = tensors.setdefault(name, data)
        found, expected = _described(data), _described(first)
        if found != expected:
            raise MismatchError(
                f"the ranks do not save the same tensor {printable(name)!r}", expected=expected, found=found
            )
        elements[name] += prod(data.chunk.sizes)
    both = tensors.keys() & values.keys()
    if both:
        raise MismatchError(f"{printable(min(both))!r} is a tensor on one rank, and another value on another rank")
    for name, data in tensors.items():
        if elements[name] != prod(data.size):
            raise MismatchError(
                f"the parts of tensor {printable(name)!r} on all ranks do not make up the tensor; are these all the "
                "ranks that have a part of it?",
                expected=f"{prod(data.size):,} elements",
                found=f"{elements[name]:,}",
            )
    return tensors, values


def _described(data: TensorWriteData) -> str:
    return f"{str(data.properties.dtype).removeprefix('torch.')} {list(data.size)}"


def _paths(plans: Iterable[SavePlan], names: Sequence[str]) -> dict[str, NamePath]:
    """Return the path of each name, in the order of the caller's state as far as the planner says it."""
    known: dict[str, Any] = {}
    for plan in plans:
        data = plan.planner_data  # of the default planner
        if isinstance(data, Mapping) and not data.keys() <= known.keys():
            known.update((name, path) for name, path in data.items() if name not in known)
    wanted = frozenset(names)
    ordered = dict.fromkeys([*(name for name in known if name in wanted), *names])
    return {name: known[name] if isinstance(known.get(name), tuple) else (name,) for name in ordered}


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
        if len(parts) > 1:  # one after the other, as rows of one tensor
            num_elements = sum(map(item_nbytes, parts)) // data.properties.dtype.itemsize
            produce: Callable[[], Any] = partial(_flat_parts, name, parts, planner.resolve_data)
            tensors[name] = LazyTensor(data.properties.dtype, (num_elements,), produce)
        elif is_lazy:
            produce = partial(_resolved, name, parts[0], planner.resolve_data)
            tensors[name] = LazyTensor(data.properties.dtype, tuple(data.chunk.sizes), produce)
        else:
            tensors[name] = _resolved(name, parts[0], planner.resolve_data)
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
    expected = f"{str(item.tensor_data.properties.dtype).removeprefix('torch.')} {list(item.tensor_data.chunk.sizes)}"
    found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
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
        # A part without elements may be anywhere.
        if found != expected and any(all(begin < end for begin, end in one) for one in (expected, found)):
            raise MismatchError(
                f"torch's planner gives another part of {printable(name)!r} to this rank than its placements do; "
                "stio.distributed.save saves it",
                expected=expected,
                found=found,
            )


def values_of_items(items: Sequence[WriteItem], planner: SavePlanner) -> dict[str, object]:
    """Return the values that are no tensors, by name.

    Raises:
        TypeError: One has a type that is not saved.
    """
    values = {item.index.fqn: _value_of(item, planner) for item in items}
    tree_text(values)  # raises before anything is written
    return values


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
