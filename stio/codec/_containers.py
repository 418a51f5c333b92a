"""Containers out of the flat list of a tree's nodes, checked on the way.

A container is a row of its tag and its number of items, which follow it. The stack is a list, so depth costs nothing of
the interpreter's own. Nothing is allocated by a number that the text names. Tensors are not there yet: their places
are noted, and a tuple that waits for one is made after it.
"""

from __future__ import annotations

import base64
import re
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, TypeAlias

from stio.errors import FormatError, LimitError

__all__ = ["MAX_DEPTH", "Builder", "Node", "Reference", "Tree", "check_keys", "is_json_integer"]

MAX_DEPTH = 200
"""Most containers inside each other; state that people make has ten."""

Node: TypeAlias = bool | int | float | str | tuple[str, str | int] | None
"""One value of the list: a plain value, or a row of a tag and what belongs to it."""

_I64_MIN, _U64_MAX = -(2**63), 2**64 - 1
_HEX_INTEGER = re.compile("-?[0-9a-f]+")
_HEX_FLOAT = re.compile("[0-9a-f]{16}")

_MAPPINGS: dict[str, Callable[[Any], Any]] = {"dict": dict, "ordered_dict": OrderedDict, "counter": Counter}
_CONTAINERS = frozenset({*_MAPPINGS, "list", "tuple", "size"})
_SCALARS = frozenset({"int", "float", "text", "bytes"})
_FOREIGN = frozenset({"dtype", "device"})
_IN_KEYS = frozenset({"tuple", "float", "text"})
_KEY_TYPES = frozenset({str, int, float, bool, type(None), tuple})

_MAX_TYPED_KEYS = 1 << 17
_MAX_EQUAL_HASHES = 64
_FEW_KEYS = 1000

ReferenceKind: TypeAlias = Literal["tensor", "parameter", "frozen_parameter", "bytes_tensor"]
_REFERENCES: dict[str, ReferenceKind] = {
    "tensor": "tensor",
    "parameter": "parameter",
    "frozen_parameter": "frozen_parameter",
    "bytes_tensor": "bytes_tensor",
}


@dataclass(frozen=True, slots=True)
class Reference:
    """A place in the tree whose bytes stand in a tensor."""

    kind: ReferenceKind
    """What it becomes."""
    name: str
    """The tensor's name."""


@dataclass(slots=True)
class Tree:
    """All of a state but its tensors."""

    root: list[Any]
    """The state as its only item."""
    places: list[tuple[Any, Any, Reference | list[Any]]]
    """What is still to be put where: container, index or key, and a reference or a tuple's items; inner ones first."""
    references: list[Reference]
    """Every reference, in order; names may come more than once."""
    num_nodes: int
    """Size of the tree."""

    def fill(self, resolve: Callable[[Reference], object]) -> Any:
        """Put the tensors in, and return the state. To be called once."""
        for container, key, what in self.places:
            container[key] = tuple(what) if type(what) is list else resolve(what)  # type: ignore[arg-type]
        return self.root[0]


def is_json_integer(value: int) -> bool:
    """Return whether an integer is written as such, and may be a key."""
    return _I64_MIN <= value <= _U64_MAX


def check_keys(keys: Collection[object]) -> None:
    """Require that a mapping of these keys is made in a bounded time.

    Text is hashed with a secret; other keys can be chosen so that they collide, and then each costs as much as
    there are.

    Raises:
        ValueError: Too many of them are no text, or have equal hashes.
    """
    if len(keys) <= _FEW_KEYS:
        return
    typed = [key for key in keys if type(key) is not str]
    if len(typed) > _MAX_TYPED_KEYS:
        raise ValueError(f"a mapping has more than {_MAX_TYPED_KEYS:,} keys that are no text")
    hashes = sorted(map(hash, typed))  # not counted in a dict, which would be as slow as the mapping
    if any(one == other for one, other in zip(hashes, hashes[_MAX_EQUAL_HASHES:], strict=False)):
        raise ValueError("the keys of a mapping have too many equal hashes")


class _Open:
    """A container whose items are being read."""

    __slots__ = ("in_key", "is_mapping", "items", "late", "size", "tag")

    def __init__(self, tag: str, size: int, *, in_key: bool) -> None:
        self.tag = tag
        self.size = size
        """Number of its items, keys and values counted each."""
        self.is_mapping = tag in _MAPPINGS
        self.in_key = in_key
        """Whether it is a key, or stands in one."""
        self.items: list[Any] = []
        self.late: list[tuple[int, Reference | list[Any]]] = []
        """Items that are not there yet."""


class Builder:
    """Makes containers from nodes, a few at a time.

    Args:
        path: File to name in errors.
        foreign: See `stio.codec.tree.parse_tree`.
    """

    def __init__(self, path: str, foreign: Callable[[str, Any], object]) -> None:
        self._path = path
        self._foreign = foreign
        self._outermost = _Open("list", 1, in_key=False)
        self._stack = [self._outermost]
        self._places: list[tuple[Any, Any, Reference | list[Any]]] = []
        self._references: list[Reference] = []
        self._root: list[Any] | None = None
        self.num_nodes = 0
        """How many were added."""

    def _fail(self, message: str, *, expected: object = None, found: object = None) -> NoReturn:
        raise FormatError(
            f"the tree of the state, value {self.num_nodes}: {message}", path=self._path, expected=expected, found=found
        )

    def add(self, nodes: Sequence[Node]) -> None:
        """Take in the nodes that follow."""
        first = self.num_nodes
        frame = self._stack[-1] if self._stack else None
        for number, node in enumerate(nodes, first):
            if frame is None:
                self.num_nodes = number
                self._fail("it goes on after the state's end")
            kind = type(node)
            if kind is tuple:
                self.num_nodes = number
                self._add_row(frame, node)  # type: ignore[arg-type]
                frame = self._stack[-1] if self._stack else None
                continue
            if kind is int and not _I64_MIN <= node <= _U64_MAX:  # type: ignore[operator]
                self._fail("an integer of more than 64 bits must be text")
            items = frame.items
            items.append(node)
            if len(items) == frame.size:
                self.num_nodes = number
                self._close()
                frame = self._stack[-1] if self._stack else None
        self.num_nodes = first + len(nodes)

    def complete(self) -> Tree:
        """Return the tree, once all nodes were added."""
        if self._root is None:
            self._fail("the text ends before the state does")
        return Tree(self._root, self._places, self._references, self.num_nodes)

    def _add_row(self, frame: _Open, row: tuple[str, str | int]) -> None:
        tag, value = row
        in_key = frame.in_key or (frame.is_mapping and len(frame.items) % 2 == 0)
        if in_key and tag not in _IN_KEYS:
            self._fail("no key of a mapping", expected=sorted(_IN_KEYS), found=tag)
        if tag in _CONTAINERS:
            self._open(tag, value, in_key=in_key)
            return
        if not isinstance(value, str):
            self._fail("a row of a tag and text was expected", found=tag)
        if tag in _SCALARS:
            item = self._scalar(tag, value)
            if in_key and item != item:
                self._fail("NaN is no key: nobody could find it again")
            frame.items.append(item)
        elif tag in _FOREIGN:
            frame.items.append(self._made_by_caller(tag, value))
        elif tag in _REFERENCES:
            reference = Reference(_REFERENCES[tag], value)
            self._references.append(reference)
            frame.late.append((len(frame.items), reference))
            frame.items.append(None)
        else:
            self._fail("unknown tag; a newer stio may know it", found=tag)
        if len(frame.items) == frame.size:
            self._close()

    def _open(self, tag: str, size: str | int, *, in_key: bool) -> None:
        if not isinstance(size, int) or size < 0:
            self._fail("the number of items was expected", found=size)
        if len(self._stack) > MAX_DEPTH:
            raise LimitError("the state is nested too deeply", path=self._path, expected=f"at most {MAX_DEPTH} levels")
        # Nothing is allocated by this number: it only says when the container ends.
        self._stack.append(_Open(tag, 2 * size if tag in _MAPPINGS else size, in_key=in_key))
        if not size:
            self._close()

    def _scalar(self, tag: str, text: str) -> object:
        try:
            if tag == "int" and _HEX_INTEGER.fullmatch(text):
                return int(text, 16)
            if tag == "float" and _HEX_FLOAT.fullmatch(text):
                return struct.unpack(">d", bytes.fromhex(text))[0]
            if tag == "bytes":
                return base64.b64decode(text, validate=True)
            if tag == "text":
                return base64.b64decode(text, validate=True).decode("utf-8", "surrogatepass")
        except ValueError:
            pass
        return self._fail(f"malformed {tag}", found=text)

    def _made_by_caller(self, tag: str, value: object) -> object:
        try:
            return self._foreign(tag, value)
        except ValueError as error:
            self._fail(str(error), found=value)

    def _close(self) -> None:
        """Make the innermost container, and each that ends with it."""
        while self._stack and len(self._stack[-1].items) == self._stack[-1].size:
            frame = self._stack.pop()
            made = self._made(frame)
            if not self._stack:
                self._root = frame.items
                return
            parent = self._stack[-1]
            if frame.late and frame.tag == "tuple":  # it cannot be changed later, so it is made later
                parent.late.append((len(parent.items), made))
            parent.items.append(made)

    def _made(self, frame: _Open) -> Any:
        items = frame.items
        if frame.is_mapping:
            made = self._mapping(frame.tag, items[0::2], items[1::2])
            self._places += [(made, items[index - 1], what) for index, what in frame.late]
            return made
        if frame.late:
            if frame.tag == "size":
                self._fail("a size holds integers only")
            self._places += [(items, index, what) for index, what in frame.late]
            return items
        if frame.tag == "tuple":
            return tuple(items)
        if frame.tag == "size":
            if any(type(item) is not int or item >= 2**63 for item in items):
                self._fail("a size holds integers of 64 bits only")
            return self._made_by_caller("size", tuple(items))
        return items

    def _mapping(self, tag: str, keys: list[Any], values: list[Any]) -> Any:
        if not _KEY_TYPES.issuperset(map(type, keys)):
            self._fail("no key of a mapping")
        try:
            check_keys(keys)
        except ValueError as error:
            self._fail(str(error))
        made = _MAPPINGS[tag](dict(zip(keys, values, strict=True)))
        if len(made) != len(keys):
            self._fail("a key stands in a mapping twice")
        return made
