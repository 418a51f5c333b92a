"""Nested state, for people: `save_state` and `load_state`, for optimizers, schedulers and what a training loop keeps.

The bytes go the way of any checkpoint (`stio.saving.api`, `stio.loading.body`); `stio.state` takes the state apart and puts it
together. There is no pickle in it: a file cannot make a load run code, and what is of another type is refused.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, Unpack, cast

import torch
from torch import nn

from stio.device.base import LoadedGroup
from stio.errors import FormatError, LimitError, printable
from stio.format.state_tree import (
    POINTER,
    STATE_KEY,
    TREE_TENSOR,
    Reference,
    Tree,
    parse_tree,
)
from stio.loading.body import gather, start_reading
from stio.loading.open import OpenCheckpoint
from stio.loading.options import Keywords, Settings, SourceLike
from stio.loading.targets import LoadOptions
from stio.runtime.limits import Limits
from stio.runtime.memory import allocate
from stio.runtime.operation import Operation
from stio.runtime.process import collection_paused
from stio.saving.api import save
from stio.saving.nested import flatten
from stio.saving.options import DestinationLike, SaveKeywords, SaveResult

__all__ = ["load_state", "restore", "save_state", "start_load_state"]


async def save_state(
    state: object, destination: DestinationLike, *, budget_bytes: int | None = None, **keywords: Unpack[SaveKeywords]
) -> SaveResult:
    """Save nested state, atomically and durably: `optimizer.state_dict()`, a scheduler's, a random generator's.

    What it may hold: dict, OrderedDict, Counter (keys: text, integers of 64 bits, floats but NaN, bools, None, tuples
    of those), list, tuple; tensors, parameters (restored as such, with their `requires_grad`), `stio.LazyTensor`;
    text, integers, floats, bools, None, bytes; `torch.Size`, `torch.dtype`, `torch.device`. Of a tensor its numbers are
    saved, as by `stio.save`; of a container its items, not its attributes (`_metadata` of a module's state_dict).

    The same tensor in several places is saved once and restored as one. Tensors that only overlap, and containers that
    stand in several places, are saved each by itself: the tie is lost.

    On disk it is a checkpoint that any safetensors reader opens, `stio.load` too. A tensor's name is its path,
    `state/0/exp_avg`; the tree of everything else stands in the metadata under `stio.state`, or in a U8 tensor
    `/stio.state` where it is long.

    Args:
        state: The state. It must not change meanwhile; a `Saver` returns earlier.
        destination: See `stio.save`.
        budget_bytes: See `stio.save`.
        **keywords: See `SaveKeywords`.

    Raises:
        TypeError: A value or key of another type; the message says where it stands. Nothing was written.
        ValueError: A container that stands in itself, or a NaN as key.
        LimitError: More than `stio.Limits` lets a reader take, or containers nested more than 200 deep.
        StioError: See `stio.save`.
    """
    tensors, keywords = await flatten(state, keywords)
    return await save(tensors, destination, budget_bytes=budget_bytes, **keywords)


async def load_state(source: SourceLike, **keywords: Unpack[Keywords]) -> Any:
    """Load what `save_state` saved.

    Nothing that stands in the file is executed. The tree is checked to its end before any tensor is read.

    Args:
        source: See `stio.load`.
        **keywords: See `Keywords`. `memory` is `"copy"` unless said otherwise: training writes in place, and a mapping
            pays for that page by page. `limits` bounds the tree too.

    Returns:
        The state, with its types, its order and its ties.

    Raises:
        FormatError: The checkpoint holds no nested state (`stio.load` loads its tensors), or a malformed one.
        StioError: See `stio.load`.
    """
    take = await start_load_state(source, keywords).wait()
    return take()


def start_load_state(source: SourceLike, keywords: Keywords) -> Operation[Callable[[], Any]]:
    """Begin to load a state; the result hands it over to the consumer's thread."""
    settings = Settings(**cast(Keywords, {"memory": "copy", **keywords}))
    limits = settings.limits or Limits()
    return start_reading(
        source, settings, None, lambda operation, opened, options: restore(operation, opened, options, limits)
    )


def restore(
    operation: Operation[Any], opened: OpenCheckpoint, options: LoadOptions, limits: Limits
) -> Callable[[], Any]:
    """Load the state of an open checkpoint; return a function that hands it over to the consumer's thread.

    Raises:
        FormatError: It holds no nested state, or a malformed one.
        StioError: See `stio.load_state`.
    """
    raw, hidden = _tree_text(opened, limits)
    with collection_paused(len(raw)):
        tree = parse_tree(raw, path=opened.path, limits=limits, foreign=_foreign, check=operation.check)
    hidden |= {reference.name for reference in tree.references if reference.kind == "bytes_tensor"}
    _match(opened, tree, hidden)
    operation.check()
    texts = {name: _read_bytes(opened, name) for name in hidden if name != TREE_TENSOR}
    shown = (lambda name: name not in hidden) if hidden else None
    landed = gather(operation, opened, shown, options)
    with collection_paused(tree.num_nodes):
        state = _filled(tree, landed, texts, opened.path)

    def take() -> Any:
        for group in landed:
            group.take()
        return state

    return take


def _tree_text(opened: OpenCheckpoint, limits: Limits) -> tuple[bytes, set[str]]:
    """Return the text of the tree, and the names of the tensors that it stands in."""
    text = opened.metadata.get(STATE_KEY)
    if text is None:
        raise FormatError(
            "a checkpoint without a nested state: its tensors are loaded by `stio.load`",
            path=opened.path,
            expected=f"{STATE_KEY!r} in the metadata, as `stio.save_state` writes it",
        )
    if not isinstance(text, str):
        raise FormatError(f"{STATE_KEY} is no text", path=opened.path, found=type(text).__name__)
    if text != POINTER:
        return text.encode(), set()
    if not any(TREE_TENSOR in header for header in opened.headers):
        raise FormatError("the tensor with the tree of the state is missing", path=opened.path, expected=TREE_TENSOR)
    nbytes = opened.info(TREE_TENSOR).nbytes
    if nbytes > limits.state_bytes:
        raise LimitError(
            "the tree of the state is longer than the limit `state_bytes`",
            path=opened.path,
            expected=f"at most {limits.state_bytes:,} bytes",
            found=f"{nbytes:,}",
        )
    return _read_bytes(opened, TREE_TENSOR), {TREE_TENSOR}


def _read_bytes(opened: OpenCheckpoint, name: str) -> bytes:
    """Read the bytes of a U8 tensor, as they are."""
    info = opened.info(name)
    if info.dtype != "U8" or len(info.shape) != 1:
        raise FormatError(
            f"tensor {printable(name)!r} should hold bytes",
            path=opened.path,
            expected="U8 of one dimension",
            found=f"{info.dtype} {list(info.shape)}",
        )
    if not info.nbytes:
        return b""
    file = next(file for file, header in zip(opened.files, opened.headers, strict=True) if header.shard == info.shard)
    region = allocate(info.nbytes).sub(0, info.nbytes)
    file.read_into(info.file_offset, [region])
    file.check_unchanged()
    return region.tobytes()


def _match(opened: OpenCheckpoint, tree: Tree, hidden: set[str]) -> None:
    """Require that the tree speaks of the tensors that there are, and of no other."""
    wanted = {reference.name for reference in tree.references} | (hidden & {TREE_TENSOR})
    there = {name for header in opened.headers for name in header.names}
    missing = wanted - there - opened.aliases.keys()
    if missing:
        message = "the state speaks of a tensor that is not there"
        raise FormatError(message, path=opened.path, found=min(missing))
    both = hidden.intersection(reference.name for reference in tree.references if reference.kind != "bytes_tensor")
    if both:
        message = "the state takes bytes that are its own for a tensor"
        raise FormatError(message, path=opened.path, found=min(both))
    extra = (there | opened.aliases.keys()) - wanted
    if extra:
        message = "a tensor belongs nowhere in the state"
        raise FormatError(message, path=opened.path, found=min(extra))


def _filled(tree: Tree, landed: list[LoadedGroup], texts: Mapping[str, bytes], path: str) -> Any:
    """Put tensors into the tree. They are the device's still: nothing but their handles is touched."""
    tensors = {name: tensor for group in landed for name, tensor in group.tensors.items()}
    parameters: dict[tuple[int, bool], nn.Parameter] = {}

    def resolve(reference: Reference) -> object:
        if reference.kind == "bytes_tensor":
            return texts[reference.name]
        tensor = tensors[reference.name]
        if reference.kind == "tensor":
            return tensor
        wants_grad = reference.kind == "parameter"
        key = id(tensor), wants_grad
        if key not in parameters:  # one and the same wherever it stands
            try:
                parameters[key] = nn.Parameter(tensor, requires_grad=wants_grad)
            except RuntimeError:  # of integers, with a gradient
                message = f"tensor {printable(reference.name)!r} cannot be a parameter"
                raise FormatError(message, path=path, found=str(tensor.dtype)) from None
        return parameters[key]

    return tree.fill(resolve)


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _foreign(tag: str, value: Any) -> object:
    """Make what torch has a type for; see `parse_tree`."""
    if tag == "size":
        return torch.Size(map(operator.index, value))
    if tag == "dtype":
        if value not in _DTYPES:
            raise ValueError("this torch has no such dtype")
        return _DTYPES[value]
    try:
        return torch.device(value)
    except RuntimeError:
        raise ValueError("this torch knows no such device") from None
