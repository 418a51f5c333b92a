"""The tree of a nested state in a checkpoint: read and checked, before any tensor is read.

The text of the tree is in the metadata, or in a tensor of bytes if it is long (`stio.saving.nested` writes it). Long
`bytes` of the state are such tensors too, and are read here. All other tensors are loaded as in any load.
"""

from __future__ import annotations

import operator
from contextlib import ExitStack
from typing import Any

import torch

from stio.errors import FormatError, printable
from stio.format.state_tree import POINTER, STATE_KEY, TREE_TENSOR, Tree, check_tree_bytes, parse_tree
from stio.loading.open import OpenCheckpoint
from stio.runtime.limits import Limits
from stio.runtime.memory import allocate
from stio.runtime.operation import Operation
from stio.runtime.process import collection_paused


def read_tree(operation: Operation[Any], opened: OpenCheckpoint, limits: Limits) -> tuple[Tree, dict[str, bytes]]:
    """Read and check the tree of a checkpoint with a nested state.

    Returns:
        The tree, and the data of all tensors that hold bytes and no values of a tensor, by name: of the tree's own, if
        it has one, too.

    Raises:
        FormatError: The checkpoint has no nested state, or a malformed one.
        LimitError: The tree exceeds a limit.
    """
    raw, long_bytes = _tree_text(opened, limits)
    with collection_paused(len(raw)):
        tree = parse_tree(raw, path=opened.path, limits=limits, foreign=_torch_value, check=operation.check)
    holds_bytes = {reference.name for reference in tree.references if reference.kind == "bytes_tensor"}
    _require_match(opened, tree, holds_bytes | long_bytes.keys())
    operation.check()
    return tree, long_bytes | {name: _read_bytes(opened, name) for name in holds_bytes}


def _tree_text(opened: OpenCheckpoint, limits: Limits) -> tuple[bytes, dict[str, bytes]]:
    """Return the text of the tree, and by its name the data of the tensor that holds it, if one does."""
    text = opened.metadata.get(STATE_KEY)
    if text is None:
        raise FormatError(
            "a checkpoint without a nested state: its tensors are loaded by `stio.load`",
            path=opened.path,
            expected=f"{STATE_KEY!r} in the metadata, as `stio.save_state` writes it",
        )
    if not isinstance(text, str):
        raise FormatError(f"{STATE_KEY} is not text", path=opened.path, found=type(text).__name__)
    if text != POINTER:
        return text.encode(), {}
    if not any(TREE_TENSOR in header for header in opened.headers):
        raise FormatError("the tensor with the tree of the state is missing", path=opened.path, expected=TREE_TENSOR)
    check_tree_bytes(opened.info(TREE_TENSOR).nbytes, limits, path=opened.path)
    raw = _read_bytes(opened, TREE_TENSOR)
    return raw, {TREE_TENSOR: raw}


def _read_bytes(opened: OpenCheckpoint, name: str) -> bytes:
    """Read the data of a U8 tensor."""
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
    shard = next(k for k, header in enumerate(opened.headers) if header.shard == info.shard)
    region = allocate(info.nbytes).sub(0, info.nbytes)
    with ExitStack() as owned:
        file = opened.open_files([shard], owned)[shard]
        file.read_into(info.file_offset, [region])
        file.check_unchanged()
    return region.tobytes()


def _require_match(opened: OpenCheckpoint, tree: Tree, holds_bytes: set[str]) -> None:
    """Require that the tree and the checkpoint name the same tensors."""
    in_tree = {reference.name for reference in tree.references} | (holds_bytes & {TREE_TENSOR})
    stored = {name for header in opened.headers for name in header.names} | opened.aliases.keys()
    as_tensors = {reference.name for reference in tree.references if reference.kind != "bytes_tensor"}
    for names, message in (
        (in_tree - stored, "the state refers to a tensor that does not exist"),
        (holds_bytes & as_tensors, "the state refers to a tensor that holds bytes of the state"),
        (stored - in_tree, "a tensor has no place in the state"),
    ):
        if names:
            raise FormatError(message, path=opened.path, found=min(names))


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def _torch_value(tag: str, value: Any) -> object:
    """Return a value of a type of torch; see `parse_tree`."""
    if tag == "size":
        return torch.Size(map(operator.index, value))
    if tag == "dtype":
        if value not in _DTYPES:
            raise ValueError("this torch has no such dtype")
        return _DTYPES[value]
    try:
        return torch.device(value)
    except RuntimeError:
        raise ValueError("this torch has no such device") from None
