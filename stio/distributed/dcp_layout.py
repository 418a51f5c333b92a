"""What a save by torch's distributed checkpoint (DCP) writes, from what DCP's planner has decided.

DCP has a flat state: tensors and other values, by names that it makes of their paths (`optim.state.w.exp_avg`). Each
tensor is stored under its name. If there are other values, the tensor `TREE_TENSOR` is stored too, with the tree of the
nested state (`format/state_tree.py`), as `stio.load_state` reads it. Each value is on the rank that the planner chose,
so that tree is made when the ranks write.

What a rank writes of the tensors are the items of its own plan. Several of one tensor are one part.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, NoReturn, TypeAlias

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem
from torch.distributed.tensor import DTensor

from stio.device.describe import LazyTensor
from stio.distributed.parts import part_of
from stio.distributed.torch_private import local_memory, state_of_save
from stio.errors import MismatchError, printable
from stio.format.placements import ByteRange, byte_ranges
from stio.format.state_tree import TREE_TENSOR
from stio.saving.nested import StoredTensor, tree_text

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
    names = {path: name for path, name in _text_paths(plan).items() if name is not None}
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

    walk(state_of_save() or {}, (), ())
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


def _text_paths(plan: SavePlan) -> dict[StatePath, str | None]:
    """Return the paths that the default planner has, with text in place of each key."""
    data = plan.planner_data if isinstance(plan.planner_data, Mapping) else {}
    return {
        tuple(key if isinstance(key, int) else (key,) for key in path): name
        for name, path in data.items()
        if isinstance(path, tuple)
    }


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
        own = plan.storage_data if isinstance(plan.storage_data, dict) else _text_paths(plan)
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
        items: What this rank writes.
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
    """Return the values of items that are no tensors, by name.

    Raises:
        TypeError: The planner has only pickles of them, or saves others than the state has.
    """
    if not items:
        return {}
    if not isinstance(planner, DefaultSavePlanner):
        raise TypeError("values that are no tensors need a planner that derives from torch's DefaultSavePlanner")
    own, kind = DefaultSavePlanner, type(planner)
    is_own = (kind.resolve_data, kind.transform_object) == (own.resolve_data, own.transform_object)
    values: dict[str, object] = {}
    for item in items:
        value = values[item.index.fqn] = planner.lookup_object(item.index)
        if is_own:
            continue
        data, expected = planner.resolve_data(item), own.transform_object(planner, item, value)
        if not isinstance(data, io.BytesIO) or data.getvalue() != expected.getvalue():
            raise TypeError(
                f"{printable(item.index.fqn)!r}: the planner saves another value than the state has, as a pickle; "
                "change the value in the state"
            )
    return values
