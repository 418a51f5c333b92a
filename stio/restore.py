"""Nested state on its way in: the tree is checked and made into containers, then its tensors are loaded and put in.

All of it happens on the load's thread; the caller's gets the state as it is. Nothing in a file says which code to run:
what a tag stands for is written here and in `codec/`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import nn

from stio.codec.tree import POINTER, STATE_KEY, TREE_TENSOR, Reference, Tree, parse_tree
from stio.device.base import Landed
from stio.device.tensors import collection_paused
from stio.engine.opened import OpenCheckpoint
from stio.engine.runtime import Operation
from stio.engine.target import LoadOptions
from stio.errors import FormatError, LimitError, printable
from stio.events import Limits
from stio.loading import gather, start_reading
from stio.memory import allocate
from stio.settings import Keywords, Settings, SourceLike

__all__ = ["restore", "start_load_state"]


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


def _filled(tree: Tree, landed: list[Landed], texts: Mapping[str, bytes], path: str) -> Any:
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
