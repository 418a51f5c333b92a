"""Nested state split for a save: tensors by name, and a tree of all other values as text (`format/state/tree.py`).

The walk has its own stack, so no depth exhausts the interpreter's. It advances in steps of about a millisecond: a small
state is split at once, a large one on a thread of stio, where a cancel ends it. Only exact types are accepted; a value
of another type is refused by its path in the state, before anything is written.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from stio import process
from stio.device import LazyTensor, how_to_save
from stio.errors import LimitError, printable, with_article
from stio.format import LIBRARY_NAMES, MAX_HEADER_BYTES
from stio.format.state import (
    MAPPING_TAGS,
    MAX_DEPTH,
    POINTER,
    SEQUENCE_TAGS,
    STATE_KEY,
    TREE_TENSOR,
    Node,
    check_keys,
    encode_tree,
    is_json_integer,
    key_label,
    python_path,
    scalar_node,
)
from stio.limits import Limits
from stio.runtime import Operation

Flattened: TypeAlias = tuple[dict[str, torch.Tensor | LazyTensor], dict[str, str]]
"""Tensors by name, and the metadata of the save."""

_INLINE_BYTES = 64 << 10
"""Longest tree in the metadata, longest `bytes` and array in the tree; longer ones become tensors. A reader must parse
the whole header before anything else, and its first read takes 128 KiB; the hub refuses an index of more than 10 MiB,
and the tree of 100,000 leaves has 4 MiB."""

_STEP_NODES = 2000
"""Values visited in one step, about 1 ms: on the caller's thread, or between two checks for a cancel."""

_SMALL = 1 << 62
"""Integers below it always have less than 64 bits."""

_MAX_KEY_DEPTH = 20
"""Most levels of nested tuples in a key."""

_SCALARS = frozenset({str, float, int})

_ADVICE: tuple[tuple[Any, str], ...] = (
    (np.ndarray, "a subclass of an array; pass numpy.asarray(...), of a masked array its data and its mask"),
    (np.random.Generator | np.random.BitGenerator, "pass its state: generator.bit_generator.state"),
    (np.random.RandomState, "pass its get_state()"),
    (tuple, "to restore a named tuple its class would have to be imported; pass tuple(...) or ._asdict()"),
    (dict, "to restore it its class would have to be imported; pass dict(...)"),
    (bytearray | memoryview, "pass bytes(...), or a tensor"),
    (set | frozenset, "pass a list"),
    (bool | int | float | str | list | bytes, "a subclass; pass the plain value"),
    (object, "pass its parts, as containers, tensors and plain values"),
)
"""What to pass instead of a value of these types; the first match applies."""


async def flatten(state: object, metadata: Mapping[str, str] | None) -> Flattened:
    """Split a state; a large one on a thread of stio.

    Args:
        state: See `stio.save_state`.
        metadata: The caller's metadata of the save.

    Returns:
        What `stio.save` takes: tensors by name, and the metadata with the tree in it.

    Raises:
        TypeError: A value or a key of a type that cannot be saved; the message names its path.
        ValueError: A cycle, or a NaN as key.
        LimitError: Too deep, too many values, or too long.
    """
    walk = _Walk(state)
    if walk.advance(_STEP_NODES):
        return walk.complete(metadata)

    def walk_on(operation: Operation[Flattened]) -> Flattened:
        with process.collection_paused(_STEP_NODES):
            while not walk.advance(_STEP_NODES):
                operation.check()
            return walk.complete(metadata)

    return await Operation(walk_on, name="flatten").wait()


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Stands in a state for a tensor that is stored under this name already."""

    name: str


def tree_text(state: object, check: Callable[[], None] = lambda: None) -> bytes:
    """Return the tree of a state whose tensors are stored, as the text of the tensor `TREE_TENSOR`.

    Args:
        state: See `stio.save_state`; a `StoredTensor` is in the place of each tensor.
        check: Called now and then; what it raises ends the call.

    Raises:
        TypeError: A tensor, or a value or a key of a type that cannot be saved; the message names its path.
        ValueError: See `flatten`.
        LimitError: See `flatten`.
    """
    walk = _Walk(state, are_stored=True)
    while not walk.advance(_STEP_NODES):
        check()
    return walk.text()


@dataclass(slots=True)
class _Frame:
    """A container with items that are being visited."""

    container: Any
    items: Iterator[tuple[Any, Any]]
    prefix: str
    """The names of the tensors in it begin with this."""
    is_mapping: bool
    key: Any = None
    """Key or index of the item that is being visited."""


class _Walk:
    """A walk through a state, which makes the tree's nodes and names the tensors.

    A container is copied when the walk reaches it; the values in it must not change before the walk has ended.

    Args:
        state: The state.
        are_stored: Whether its tensors are stored already: then only a `StoredTensor` may occur, and long `bytes` stay
            in the tree.
    """

    def __init__(self, state: object, *, are_stored: bool = False) -> None:
        self._are_stored = are_stored
        self._nodes: list[Node] = []
        self._tensors: dict[str, torch.Tensor | LazyTensor] = {}
        self._limits = Limits()  # the defaults of loads, so that each saved state can be loaded
        self._stack: list[_Frame] = []
        self._open_ids: set[int] = set()
        self._names_by_id: dict[int, str] = {}
        self._name_bytes = 0
        self._add(state, "")

    def advance(self, num_nodes: int) -> bool:
        """Visit this many values or a few more; return whether the walk has ended."""
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
                    break  # to visit the container
                if len(nodes) >= until:
                    break
            else:
                stack.pop()
                self._open_ids.discard(id(frame.container))
            if len(nodes) > self._limits.max_state_nodes:
                raise LimitError(
                    f"{self._path()}: the state has too many values (one container that stands in many places counts "
                    "each time)",
                    expected=f"at most {self._limits.max_state_nodes:,}",
                )
        return not stack

    def complete(self, metadata: Mapping[str, str] | None) -> Flattened:
        """Return the tensors to save, and the metadata with the tree in it."""
        metadata = dict(metadata or {})  # a tree of another state in it is replaced
        text = self.text()
        if len(text) <= _INLINE_BYTES:
            metadata[STATE_KEY] = text.decode()
            return self._tensors, metadata
        metadata[STATE_KEY] = POINTER
        return {TREE_TENSOR: _as_tensor(text), **self._tensors}, metadata

    def text(self) -> bytes:
        """Return the text of the tree."""
        text = encode_tree(self._nodes)
        if len(text) > self._limits.state_bytes:
            raise LimitError(
                "the state's values are too long; save them as tensors",
                expected=f"at most {self._limits.state_bytes:,} bytes",
                found=f"{len(text):,}",
            )
        return text

    def _path(self) -> str:
        return python_path([frame.key for frame in self._stack])

    def _name(self, prefix: str) -> str:
        """Return the name of the tensor that is being visited."""
        name = prefix + key_label(self._stack[-1].key) if self._stack else "state"
        self._name_bytes += len(name)
        if self._name_bytes > MAX_HEADER_BYTES:  # no header could list them
            message = f"{self._path()}: the tensors' names, which are their paths, are too long; shorten the keys"
            raise LimitError(message, expected=f"at most {MAX_HEADER_BYTES:,} characters in all")
        return name

    def _add(self, value: Any, prefix: str) -> bool:
        """Add a value; return whether it is a container, which the walk enters next."""
        kind = type(value)
        if kind is torch.Tensor:
            self._add_tensor(value, prefix, "tensor")
        elif kind in _SCALARS:
            self._nodes.append(scalar_node(value))
        elif kind in MAPPING_TAGS or kind in SEQUENCE_TAGS:
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
        elif kind is np.ndarray or isinstance(value, np.generic):
            self._add_numpy(value, prefix)
        elif kind is StoredTensor and self._are_stored:
            self._nodes.append(("tensor", value.name))
        else:
            raise TypeError(f"{self._path()} is {_of_type(value)}, which save_state does not take: {_advice(value)}")
        return False

    def _enter(self, container: Any, prefix: str) -> None:
        if id(container) in self._open_ids:
            raise ValueError(f"{self._path()} is a container that contains itself; a cycle cannot be saved")
        if len(self._stack) >= MAX_DEPTH:
            message = f"{self._path()}: the state is nested too deeply"
            raise LimitError(message, expected=f"at most {MAX_DEPTH} levels")
        inner = f"{prefix}{key_label(self._stack[-1].key)}/" if self._stack else ""
        mapping_tag = MAPPING_TAGS.get(type(container))
        try:
            check_keys(container if mapping_tag else ())
        except ValueError as error:
            raise LimitError(f"{self._path()}: {error}") from None
        pairs = list(container.items()) if mapping_tag else list(enumerate(container))
        self._nodes.append((mapping_tag or SEQUENCE_TAGS[type(container)], len(pairs)))
        self._stack.append(_Frame(container, iter(pairs), inner, is_mapping=mapping_tag is not None))
        self._open_ids.add(id(container))

    def _add_key(self, key: object, depth: int = 0) -> None:
        kind = type(key)
        if kind is str or kind is float:
            if key != key:
                raise ValueError(f"{self._path()}: a key is NaN, which no look-up finds again; use another key")
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
            self._refuse_key(f"is or holds {_of_type(key)}")

    def _refuse_key(self, what: str) -> None:
        where = python_path([frame.key for frame in self._stack[:-1]])
        raise TypeError(
            f"{where} has a key that {what}; save_state takes text, integers, floats, bools, None and tuples of those"
        )

    def _add_tensor(self, tensor: torch.Tensor | LazyTensor, prefix: str, tag: str) -> None:
        if self._are_stored:
            raise TypeError(
                f"{self._path()} is a tensor inside of a value that is saved as a whole, such as a tuple; pass a list"
            )
        # The save finds tensors that share memory, and `shared=` decides about them. These have no memory.
        no_memory = isinstance(tensor, LazyTensor) or (
            type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.numel()
        )
        name = self._names_by_id.get(id(tensor)) if no_memory else None
        if name is None:
            name = self._name(prefix)
            self._tensors[name] = tensor
            if no_memory:
                self._names_by_id[id(tensor)] = name
        self._nodes.append((tag, name))

    def _add_bytes(self, value: bytes, prefix: str) -> None:
        if len(value) <= _INLINE_BYTES or self._are_stored:
            self._nodes.append(scalar_node(value))
        else:
            name = self._name(prefix)
            self._tensors[name] = _as_tensor(value)
            self._nodes.append(("bytes_tensor", name))

    def _add_numpy(self, value: Any, prefix: str) -> None:
        dtype = value.dtype
        if dtype.kind not in _ARRAY_KINDS or dtype.char in _LONG_DOUBLES:
            raise TypeError(
                f"{self._path()} is {_of_type(value)} of dtype {printable(str(dtype))}, which save_state does not "
                "take: convert it to numbers, text or dates of numpy"
            )
        is_array = type(value) is np.ndarray
        as_tensor = dtype.isnative and dtype.name in _TENSOR_DTYPES and not self._are_stored
        if is_array and value.nbytes > _INLINE_BYTES and as_tensor:
            name = self._name(prefix)
            # A copy: it may be read-only, or share memory with a tensor of the state.
            self._tensors[name] = torch.from_numpy(np.array(value, order="C"))
            self._nodes.append(("array_tensor", name))
            return
        spelled, data = dtype.str, value.tobytes()
        if not is_array and dtype.kind == "S":  # numpy gives empty text a byte
            spelled, data = f"|S{len(value)}", bytes(value)
        elif not is_array and dtype.kind == "U":
            spelled, data = f"<U{len(value)}", str(value).encode("utf-32-le", "surrogatepass")
        text = f"{spelled};{','.join(map(str, value.shape))};{base64.b64encode(data).decode()}"
        self._nodes.append(("ndarray" if is_array else "numpy_scalar", text))


_ARRAY_KINDS = frozenset("biufcSUMm")
_LONG_DOUBLES = frozenset("gG")
"""Numbers whose size depends on the machine."""

_TENSOR_DTYPES = frozenset(LIBRARY_NAMES.values())


def _as_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _of_type(value: object) -> str:
    """Return the name of a value's type with its article."""
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return with_article(name)


def _advice(value: object) -> str:
    return how_to_save(value, "pass") or next(advice for types, advice in _ADVICE if isinstance(value, types))
