"""TODO."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from stio.device.copy_out import PLAIN
from stio.device.save_sources import LazyTensor
from stio.errors import LimitError, printable
from stio.format.header_build import MAX_HEADER_BYTES
from stio.format.state_names import key_label, python_path
from stio.format.state_tree import (
    MAX_DEPTH,
    POINTER,
    STATE_KEY,
    TREE_TENSOR,
    Node,
    check_keys,
    encode_tree,
    is_json_integer,
    scalar_node,
)
from stio.runtime.limits import Limits
from stio.runtime.operation import Operation
from stio.runtime.process import collection_paused
from stio.saving.options import SaveKeywords

__all__ = ["flatten", "flatten_blocking"]


_INLINE_BYTES = 64 << 10
"""Longest tree in the metadata, and longest `bytes` in the tree; longer ones are tensors. A header is read and parsed
to its end before anything else is known, and a reader's first look takes 128 KiB; the hub refuses an index of more than
10 MiB, and the tree of 100,000 leaves has 4."""


_STEP_NODES = 2000
"""Values taken apart in one go, about 1 ms: on the caller's thread, or between two looks for a cancel."""


_SMALL = 1 << 62
"""Integers below it are surely written as such."""


_MAX_KEY_DEPTH = 20
"""Most tuples inside each other in a key."""


_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}


_SEQUENCES: dict[type, str] = {list: "list", tuple: "tuple"}


_SCALARS = frozenset({str, float, int})


class _Frame:
    """A container that is being walked."""

    __slots__ = ("container", "is_mapping", "items", "key", "prefix")

    def __init__(self, container: Any, items: Iterator[tuple[Any, Any]], prefix: str, *, is_mapping: bool) -> None:
        self.container = container
        self.items = items
        self.prefix = prefix
        """Begin of the names of the tensors in it."""
        self.is_mapping = is_mapping
        self.key: Any = None
        """Where the walk is."""


class _Walk:
    """State that is being taken apart.

    Containers are copied when the walk comes to them; what is in them must not change before it is done.
    """

    def __init__(self, state: object) -> None:
        self._nodes: list[Node] = []
        self._tensors: dict[str, torch.Tensor | LazyTensor] = {}
        self._limits = Limits()  # what is saved can be loaded without asking for more
        self._stack: list[_Frame] = []
        self._open: set[int] = set()
        self._names: dict[int, str] = {}
        self._name_bytes = 0
        self._add(state, "")

    def advance(self, num_nodes: int) -> bool:
        """Walk on, past so many values or a few more; tell whether that was all."""
        nodes, stack = self._nodes, self._stack
        until = len(nodes) + num_nodes
        while stack and len(nodes) < until:
            frame = stack[-1]
            for key, value in frame.items:
                frame.key = key
                if frame.is_mapping:
                    if type(key) is str and key.isascii():
                        nodes.append(key)
                    else:
                        self._add_key(key)
                kind = type(value)
                if kind is bool or value is None or (kind is int and -_SMALL < value < _SMALL):
                    nodes.append(value)
                elif self._add(value, frame.prefix):
                    break  # into the container
                if len(nodes) >= until:
                    break
            else:
                stack.pop()
                self._open.discard(id(frame.container))
            if len(nodes) > self._limits.max_state_nodes:
                raise LimitError(
                    f"{self._path()}: the state has too many values (one container that stands in many places counts "
                    "each time)",
                    expected=f"at most {self._limits.max_state_nodes:,}",
                )
        return not stack

    def complete(self, keywords: SaveKeywords) -> tuple[dict[str, torch.Tensor | LazyTensor], SaveKeywords]:
        """Return the tensors to save, and the keywords with the tree in their metadata."""
        metadata = dict(keywords.get("metadata") or {})
        if STATE_KEY in metadata:
            raise ValueError(f"the metadata key {STATE_KEY!r} is stio's own; leave it out")
        text = encode_tree(self._nodes)
        if len(text) > self._limits.state_bytes:
            raise LimitError(
                "the state's values are too long; save them as tensors",
                expected=f"at most {self._limits.state_bytes:,} bytes",
                found=f"{len(text):,}",
            )
        if len(text) <= _INLINE_BYTES:
            metadata[STATE_KEY] = text.decode()
            return self._tensors, cast(SaveKeywords, {**keywords, "metadata": metadata})
        metadata[STATE_KEY] = POINTER
        return {TREE_TENSOR: _as_tensor(text), **self._tensors}, cast(SaveKeywords, {**keywords, "metadata": metadata})

    def _path(self) -> str:
        return python_path([frame.key for frame in self._stack])

    def _name(self, prefix: str) -> str:
        """Return the name of the tensor at the place where the walk is."""
        name = prefix + key_label(self._stack[-1].key) if self._stack else "state"
        self._name_bytes += len(name)
        if self._name_bytes > MAX_HEADER_BYTES:  # no header could list them
            message = f"{self._path()}: the tensors' names, which are their paths, are too long; shorten the keys"
            raise LimitError(message, expected=f"at most {MAX_HEADER_BYTES:,} characters in all")
        return name

    def _add(self, value: Any, prefix: str) -> bool:
        """Add a value; tell whether it is a container, which the walk enters next."""
        kind = type(value)
        if kind is torch.Tensor:
            self._add_tensor(value, prefix, "tensor")
        elif kind in _SCALARS:
            self._nodes.append(scalar_node(value))
        elif kind in _MAPPINGS or kind in _SEQUENCES:
            self._enter(value, prefix)
            return True
        elif value is None or kind is bool:
            self._nodes.append(value)
        elif isinstance(value, nn.Parameter):
            self._add_tensor(value, prefix, "parameter" if value.requires_grad else "frozen_parameter")
        elif isinstance(value, torch.Tensor | LazyTensor):
            self._add_tensor(value, prefix, "tensor")
        elif kind is bytes:
            self._add_bytes(value, prefix)
        elif kind is torch.Size:
            self._nodes.append(("size", len(value)))
            self._nodes += value
        elif kind is torch.dtype:
            self._nodes.append(("dtype", str(value).removeprefix("torch.")))
        elif kind is torch.device:
            self._nodes.append(("device", str(value)))
        else:
            raise TypeError(f"{self._path()} is a {_type_name(value)}, which save_state does not take: {_hint(value)}")
        return False

    def _enter(self, container: Any, prefix: str) -> None:
        if id(container) in self._open:
            raise ValueError(f"{self._path()} is a container that it stands in itself; a cycle cannot be saved")
        if len(self._stack) >= MAX_DEPTH:
            message = f"{self._path()}: the state is nested too deeply"
            raise LimitError(message, expected=f"at most {MAX_DEPTH} levels")
        inner = f"{prefix}{key_label(self._stack[-1].key)}/" if self._stack else ""
        mapping = _MAPPINGS.get(type(container))
        try:
            check_keys(container if mapping else ())
        except ValueError as error:
            raise LimitError(f"{self._path()}: {error}") from None
        pairs = list(container.items()) if mapping else list(enumerate(container))
        self._nodes.append((mapping or _SEQUENCES[type(container)], len(pairs)))
        self._stack.append(_Frame(container, iter(pairs), inner, is_mapping=mapping is not None))
        self._open.add(id(container))

    def _add_key(self, key: object, depth: int = 0) -> None:
        kind = type(key)
        if kind is str or kind is float:
            if key != key:
                raise ValueError(f"{self._path()}: NaN is no key that could be found again")
            self._nodes.append(scalar_node(key))  # type: ignore[arg-type]
        elif key is None or kind is bool:
            self._nodes.append(key)  # type: ignore[arg-type]
        elif kind is int:
            if not is_json_integer(key):  # type: ignore[arg-type]
                self._refuse_key("is an integer of more than 64 bits")
            self._nodes.append(key)  # type: ignore[arg-type]
        elif kind is tuple:
            if depth >= _MAX_KEY_DEPTH:
                self._refuse_key("has too many tuples inside each other")
            self._nodes.append(("tuple", len(key)))  # type: ignore[arg-type]
            for item in key:  # type: ignore[attr-defined]
                self._add_key(item, depth + 1)
        else:
            self._refuse_key(f"is or holds a {_type_name(key)}")

    def _refuse_key(self, what: str) -> None:
        where = python_path([frame.key for frame in self._stack[:-1]])
        raise TypeError(
            f"{where} has a key that {what}; save_state takes text, integers, floats, bools, None and tuples of those"
        )

    def _add_tensor(self, tensor: torch.Tensor | LazyTensor, prefix: str, tag: str) -> None:
        # What is the same memory the save finds out, and `shared=` decides about it. These have none.
        untied = isinstance(tensor, LazyTensor) or (type(tensor) in PLAIN and not tensor.numel())
        name = self._names.get(id(tensor)) if untied else None
        if name is None:
            name = self._name(prefix)
            self._tensors[name] = tensor
            if untied:
                self._names[id(tensor)] = name
        self._nodes.append((tag, name))

    def _add_bytes(self, value: bytes, prefix: str) -> None:
        if len(value) <= _INLINE_BYTES:
            self._nodes.append(scalar_node(value))
        else:
            name = self._name(prefix)
            self._tensors[name] = _as_tensor(value)
            self._nodes.append(("bytes_tensor", name))


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _type_name(value: object) -> str:
    kind = type(value)
    return printable(kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}")


def _hint(value: object) -> str:
    """Say what to do instead."""
    if type(value).__module__ == "numpy":
        return "convert it, a scalar by .item(), an array by torch.from_numpy()"
    if isinstance(value, nn.Module):
        return "pass its state_dict()"
    if isinstance(value, tuple):
        return "to restore a named tuple its class would have to be imported; pass tuple(...) or ._asdict()"
    if isinstance(value, dict):
        return "to restore it its class would have to be imported; pass dict(...)"
    if isinstance(value, bytearray | memoryview):
        return "pass bytes(...), or a tensor"
    if isinstance(value, set | frozenset):
        return "pass a list"
    if isinstance(value, bool | int | float | str | list | bytes):
        return "a subclass; pass the plain value"
    return "pass its parts, as containers, tensors and plain values"


async def flatten(state: object, keywords: SaveKeywords) -> tuple[dict[str, torch.Tensor | LazyTensor], SaveKeywords]:
    """Take a state apart; a large one on a thread of stio's own.

    Args:
        state: See `stio.save_state`.
        keywords: Those of the save.

    Returns:
        What `stio.save` takes: tensors by name, and the keywords with the tree in the metadata.

    Raises:
        TypeError: A value or a key that is not taken; the message names its path.
        ValueError: A cycle, or a NaN as key.
        LimitError: Too deep, too many, too long.
    """
    walk = _Walk(state)
    if walk.advance(_STEP_NODES):
        return walk.complete(keywords)
    return await Operation(lambda operation: _finish(walk, keywords, operation.check), name="flatten").start().wait()


def flatten_blocking(
    state: object, keywords: SaveKeywords
) -> tuple[dict[str, torch.Tensor | LazyTensor], SaveKeywords]:
    """Take a state apart in this thread; see `flatten`."""
    return _finish(_Walk(state), keywords, lambda: None)


def _finish(
    walk: _Walk, keywords: SaveKeywords, check: Callable[[], None]
) -> tuple[dict[str, torch.Tensor | LazyTensor], SaveKeywords]:
    with collection_paused(_STEP_NODES):
        while not walk.advance(_STEP_NODES):
            check()
        return walk.complete(keywords)
