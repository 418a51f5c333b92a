"""The tree of a nested state as text: containers and plain values in order, tensors by name.

The text is JSON, `{"stio.state":1,"nodes":[...]}`, and flat; the depth of containers is bounded. A container is a row
of its tag and its number of items, and the items follow it (of a mapping: key, value, key, value). A plain value is
itself a node. A value that JSON cannot express is a row of a tag and a text. Lines end between nodes only, and a long
line is a single node. A reader decodes line by line, so its memory does not depend on how the text was made (see also
`gil_slices.py`).

Reading checks everything that can be checked before a tensor is read, and makes all containers. `Tree.fill` puts the
tensors in later. No torch is needed here: a function of the caller makes the types of torch and numpy.

Each leaf has a name, as a tensor and in messages. A tensor's name is its path, `state/0/exp_avg`. No two paths have the
same name. Text is escaped where it has a separator or a percent sign, where it is not printable, and where it would be
read as a key of another type (`"0"` beside `0`). An escape is a percent sign and two hexadecimal digits for each byte
of UTF-8; any decoder can undo it.
"""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any, Literal, NoReturn, TypeAlias, cast, get_args

import msgspec

from stio.errors import FormatError, LimitError, printable
from stio.format.dtypes import U64_MAX
from stio.format.gil_slices import WINDOW_BYTES
from stio.format.header import is_encodable
from stio.limits import Limits, limit_error

_PLAIN = re.compile(r"(?!(?:True|False|None|nan|inf|__metadata__)\Z)[A-Za-z_][A-Za-z0-9_.\-]*")
_TYPED = re.compile(r"-?[0-9][0-9.e+-]*|-?inf|nan|True|False|None|\(.*|__metadata__", re.DOTALL)
_SEPARATORS = frozenset("/%")
_SEPARATORS_IN_TUPLES = frozenset("/%,()")


def key_label(key: object) -> str:
    """Return the part of a name that represents a key or an index; never empty, and without a slash.

    Args:
        key: Text, int, float, bool, None or a tuple of those.
    """
    return _text_label(key) if isinstance(key, str) else _typed_label(key)


@lru_cache(maxsize=1024)
def _text_label(key: str) -> str:
    return key if _PLAIN.fullmatch(key) else _escaped(key, _SEPARATORS)


def _typed_label(key: object) -> str:
    if isinstance(key, tuple):
        return f"({','.join(map(_label_in_tuple, key))})"
    return str(key)


def _label_in_tuple(key: object) -> str:
    return _escaped(key, _SEPARATORS_IN_TUPLES) if isinstance(key, str) else _typed_label(key)


def _escaped(text: str, separators: frozenset[str]) -> str:
    if not text:
        return "%"
    label = "".join(c if c.isprintable() and c not in separators else _percent(c) for c in text)
    return _percent(text[0]) + label[1:] if _TYPED.fullmatch(text) and label[0] != "%" else label


def _percent(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode("utf-8", "surrogatepass"))


def python_path(keys: list[object]) -> str:
    """Return a path in Python's syntax, for messages: `state['param_groups'][0]['lr']`."""
    return "state" + "".join(f"[{printable(repr(key))}]" for key in keys)


STATE_KEY = "stio.state"
"""Metadata key of stio: the tree, or `POINTER`."""

TREE_TENSOR = "/stio.state"
"""U8 tensor that holds a long tree. No path of a leaf begins with a slash."""

POINTER = f'{{"{STATE_KEY}":1,"tensor":"{TREE_TENSOR}"}}'
"""Value in the metadata if the tree is in a tensor."""

MAX_DEPTH = 200
"""Most containers inside each other; states in practice have ten."""

Node: TypeAlias = bool | int | float | str | tuple[str, str | int] | None
"""One value of the list: a plain value, or a row of a tag and its number or text."""

MAPPING_TAGS: dict[type[dict[Any, Any]], str] = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}
"""Tag of each type of mapping."""

SEQUENCE_TAGS: dict[type, str] = {list: "list", tuple: "tuple"}
"""Tag of each type of sequence."""

ReferenceKind: TypeAlias = Literal["tensor", "parameter", "frozen_parameter", "bytes_tensor", "array_tensor"]

_MAPPINGS: dict[str, Callable[[Any], dict[Any, Any]]] = {tag: kind for kind, tag in MAPPING_TAGS.items()}
_UNORDERED = frozenset({"dict", "counter"})
_CONTAINERS = frozenset({*_MAPPINGS, *SEQUENCE_TAGS.values(), "size"})
_SCALARS = frozenset({"int", "float", "text", "bytes"})
_FOREIGN = frozenset({"dtype", "device", "ndarray", "numpy_scalar"})
_REFERENCES = frozenset(get_args(ReferenceKind))
_IN_KEYS = frozenset({"tuple", "float", "text"})
_KEY_TYPES = frozenset({str, int, float, bool, type(None), tuple})

_MAX_TYPED_KEYS = 1 << 17
_MAX_EQUAL_HASHES = 64
_FEW_KEYS = 1000

_I64_MIN = -(2**63)
_HEX_INTEGER = re.compile("-?[0-9a-f]+")
_HEX_FLOAT = re.compile("[0-9a-f]{16}")

_HEAD = b'{"stio.state":1,"nodes":[\n'
_TAIL = b"\n]}"
_VERSION = re.compile(rb'\{"stio\.state":([0-9]{1,9}),')
_NODES_A_LINE = 512

_decode_line = msgspec.json.Decoder(list[Node]).decode
_decode_node = msgspec.json.Decoder(tuple[Node]).decode
_encode = msgspec.json.Encoder().encode


def is_json_integer(value: int) -> bool:
    """Return whether an integer is written as such, and may be a key."""
    return _I64_MIN <= value <= U64_MAX


def check_keys(keys: Collection[object]) -> None:
    """Require that a mapping of these keys can be made in bounded time.

    Text is hashed with a secret. Other keys can be chosen so that their hashes are equal; then each insertion takes
    time proportional to the number of keys.

    Raises:
        ValueError: Too many of them are not text, or have equal hashes.
    """
    if len(keys) <= _FEW_KEYS:
        return
    typed = [key for key in keys if type(key) is not str]
    if len(typed) > _MAX_TYPED_KEYS:
        raise ValueError(f"a mapping has more than {_MAX_TYPED_KEYS:,} keys that are not text")
    hashes = sorted(map(hash, typed))  # not counted in a dict, which would be as slow as the mapping
    if any(low == high for low, high in zip(hashes, hashes[_MAX_EQUAL_HASHES:], strict=False)):
        raise ValueError("the keys of a mapping have too many equal hashes")


# Writing.


def scalar_node(value: int | float | str | bytes) -> Node:
    """Return the node of a plain value.

    Integers above 64 bits are written in base 16: no length makes that slow, and no limit on digits applies.
    """
    if isinstance(value, bytes):
        return "bytes", base64.b64encode(value).decode()
    if isinstance(value, str):
        if value.isascii() or is_encodable(value):
            return value
        return "text", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else ("float", struct.pack(">d", value).hex())
    return value if is_json_integer(value) else ("int", format(value, "x"))


def encode_tree(nodes: Sequence[Node]) -> bytes:
    """Return the text of a tree; equal nodes give equal bytes."""
    lines = []
    for start in range(0, len(nodes), _NODES_A_LINE):
        some = nodes[start : start + _NODES_A_LINE]
        line = _encode(some)[1:-1]
        lines += [line] if len(line) < WINDOW_BYTES else [_encode([node])[1:-1] for node in some]
    return _HEAD + b",\n".join(lines) + _TAIL


# Comparing.


def sorted_tree(raw: bytes) -> bytes:
    """Return a tree that `encode_tree` has made, with the items of each dict in the order of their keys as text."""
    nodes = _all_nodes(raw)

    def walk() -> list[Node]:
        node = next(nodes)
        if type(node) is not tuple or node[0] not in _CONTAINERS:
            return [node]
        count = cast(int, node[1])
        if node[0] not in _MAPPINGS:
            return [node, *(inner for _ in range(count) for inner in walk())]
        pairs = [(walk(), walk()) for _ in range(count)]
        if node[0] in _UNORDERED:
            pairs.sort(key=lambda pair: _encode(pair[0]))
        return [node, *(inner for key, value in pairs for inner in (*key, *value))]

    return encode_tree(walk())


def tree_entries(raw: bytes) -> dict[str, str]:
    """Return a text for each value of a tree that `encode_tree` has made, by its path in Python's syntax."""
    nodes = _all_nodes(raw)
    entries: dict[str, str] = {}

    def key() -> object:
        node = next(nodes)
        if type(node) is not tuple:
            return node
        return tuple(key() for _ in range(node[1])) if isinstance(node[1], int) else node[1]

    def walk(path: list[object]) -> None:
        node, here = next(nodes), python_path(path)
        if type(node) is not tuple:
            entries[here] = repr(node)
            return
        tag, value = node
        if not isinstance(value, int):
            entries[here] = tag if tag in _REFERENCES else f"{tag} {value}"
            return
        entries[here] = tag if tag in _MAPPINGS else f"{tag} of {value}"
        for number in range(value):
            walk([*path, key() if tag in _MAPPINGS else number])

    walk([])
    return entries


def _all_nodes(raw: bytes) -> Iterator[Node]:
    return (node for line in _lines(raw, "") for node in line)


# Reading.


@dataclass(frozen=True, slots=True)
class Reference:
    """A place in the tree with its bytes in a tensor."""

    kind: ReferenceKind
    """Type of the value that the tensor becomes."""
    name: str
    """The tensor's name."""

    @property
    def in_host_memory(self) -> bool:
        """Whether the tensor becomes `bytes` or an array of numpy, whatever the device of the load."""
        return self.kind in ("bytes_tensor", "array_tensor")


@dataclass(slots=True)
class Tree:
    """A state without its tensors."""

    root: list[Any]
    """A list with the state as its only item."""
    places: list[tuple[Any, Any, Reference | list[Any]]]
    """Values that are still missing: container, index or key, and a reference or a tuple's items; inner ones first."""
    references: list[Reference]
    """Every reference, in order; names may occur more than once."""
    num_nodes: int
    """Size of the tree."""

    def fill(self, resolve: Callable[[Reference], object]) -> Any:
        """Put the tensors in, and return the state. To be called once."""
        for container, key, what in self.places:
            container[key] = tuple(what) if type(what) is list else resolve(what)  # type: ignore[arg-type]
        return self.root[0]


def check_tree_bytes(nbytes: int, limits: Limits, *, path: str) -> None:
    """Raise `LimitError` for a text of so many bytes that exceeds the limit; to be called before it is read."""
    if nbytes > limits.state_bytes:
        what = "the tree of the state is longer than"
        raise limit_error(what, "state_bytes", limits.state_bytes, path=path, found=f"{nbytes:,}")


def parse_tree(
    raw: bytes,
    *,
    path: str,
    limits: Limits,
    foreign: Callable[[str, Any], object],
    check: Callable[[], None] = lambda: None,
) -> Tree:
    """Parse and check the text of a tree.

    Args:
        raw: The text.
        path: File to name in errors.
        limits: Bounds on its length and on its number of nodes.
        foreign: Makes the types of other libraries from a tag and a value: `dtype`, `device`, `ndarray` and
            `numpy_scalar` from text, `size` from a tuple of integers. Raises ValueError for an unknown value.
        check: Called once a line; may raise to end the parsing.

    Raises:
        FormatError: It is no such text, it has another version, or its nodes do not fit together.
        LimitError: Too long, too many nodes, or too deep.
    """
    check_tree_bytes(len(raw), limits, path=path)
    return _Parser(raw, path, limits, foreign, check).parse()


def _lines(raw: bytes, path: str) -> Iterator[Sequence[Node]]:
    """Yield the nodes of each line."""
    if not raw.startswith(_HEAD) or not raw.endswith(_TAIL):
        version = _VERSION.match(raw)
        if version is not None and int(version[1]) != 1:
            message = "the state was saved in another version of the format; a newer stio may read it"
            raise FormatError(message, path=path, expected="version 1", found=f"version {int(version[1])}")
        raise FormatError("the tree of the state is malformed", path=path, expected=repr(_HEAD)[1:], found=raw[:40])
    pos, end = len(_HEAD), len(raw) - len(_TAIL)
    while pos <= end:
        stop = raw.find(b"\n", pos, end)
        last = stop < 0
        line = raw[pos : end if last else stop - 1]
        if not line or not (last or raw[stop - 1] == 0x2C):  # a comma
            raise FormatError("the tree of the state has a malformed line", path=path, found=line[:40])
        try:
            yield (_decode_line if len(line) < WINDOW_BYTES else _decode_node)(b"[" + line + b"]")
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            message = f"the tree of the state has a malformed line: {error}"
            raise FormatError(message, path=path, found=line[:40]) from None
        pos = end + 1 if last else stop + 1


class _Parser:
    """Makes containers from nodes. Containers inside containers are made by calls inside calls, up to `MAX_DEPTH`.

    Args: See `parse_tree`.
    """

    def __init__(
        self,
        raw: bytes,
        path: str,
        limits: Limits,
        foreign: Callable[[str, Any], object],
        check: Callable[[], None],
    ) -> None:
        self._raw = raw
        self._path = path
        self._limits = limits
        self._foreign = foreign
        self._check = check
        self._nodes = self._all_nodes()
        self._depth = 0
        self._places: list[tuple[Any, Any, Reference | list[Any]]] = []
        self._references: list[Reference] = []
        self._num_nodes = 0  # those of the lines that were read

    def parse(self) -> Tree:
        """Return the tree."""
        root, late = self._items(1)
        self._places += [(root, index, what) for index, what in late]
        if next(self._nodes, self) is not self:
            self._fail("there are values after the state's end")
        return Tree(root, self._places, self._references, self._num_nodes)

    def _all_nodes(self) -> Iterator[Node]:
        for line in _lines(self._raw, self._path):
            self._num_nodes += len(line)
            max_nodes = self._limits.max_state_nodes
            if self._num_nodes > max_nodes:
                raise limit_error("the state has more values than", "max_state_nodes", max_nodes, path=self._path)
            yield from line
            self._check()

    def _fail(self, message: str, *, expected: object = None, found: object = None) -> NoReturn:
        where = f"the tree of the state, among its first {self._num_nodes:,} values"
        raise FormatError(f"{where}: {message}", path=self._path, expected=expected, found=found)

    def _items(
        self, size: int, *, in_key: bool = False, is_mapping: bool = False
    ) -> tuple[list[Any], list[tuple[int, Reference | list[Any]]]]:
        """Return the items of a container, and index and content of those that are made later.

        No memory is allocated by the size: it only determines when the container ends.

        Args:
            size: Number of its items; keys and values are counted separately.
            in_key: Whether it is a key or a part of a key.
            is_mapping: Whether its items are keys and values in turn.
        """
        items: list[Any] = []
        late: list[tuple[int, Reference | list[Any]]] = []
        for node in islice(self._nodes, min(size, sys.maxsize)):
            kind = type(node)
            if kind is int and not _I64_MIN <= node <= U64_MAX:  # type: ignore[operator]
                self._fail("an integer of more than 64 bits must be text")
            if kind is tuple:
                is_key = in_key or (is_mapping and len(items) % 2 == 0)
                node, later = self._row(*node, in_key=is_key)  # type: ignore[misc]
                if later is not None:
                    late.append((len(items), later))
            items.append(node)
        if len(items) != size:
            self._fail("the text ends before the state does")
        return items, late

    def _row(self, tag: str, value: str | int, *, in_key: bool) -> tuple[Any, Reference | list[Any] | None]:
        """Return the value of a row, and what it becomes later."""
        if in_key and tag not in _IN_KEYS:
            self._fail("this tag cannot be a key of a mapping", expected=sorted(_IN_KEYS), found=tag)
        if tag in _CONTAINERS:
            return self._container(tag, value, in_key=in_key)
        if tag not in _SCALARS and tag not in _FOREIGN and tag not in _REFERENCES:
            self._fail("unknown tag; a newer stio may know it", found=tag)
        if not isinstance(value, str):
            self._fail("a row of a tag and text was expected", found=tag)
        if tag in _SCALARS:
            item = self._scalar(tag, value)
            if in_key and item != item:
                self._fail("a key is NaN, which no look-up could find again")
            return item, None
        if tag in _FOREIGN:
            return self._made_by_caller(tag, value), None
        reference = Reference(cast(ReferenceKind, tag), value)
        self._references.append(reference)
        return None, reference

    def _container(self, tag: str, size: str | int, *, in_key: bool) -> tuple[Any, list[Any] | None]:
        if not isinstance(size, int) or size < 0:
            self._fail("the number of items was expected", found=size)
        if self._depth >= MAX_DEPTH:
            raise LimitError("the state is nested too deeply", path=self._path, expected=f"at most {MAX_DEPTH} levels")
        self._depth += 1
        is_mapping = tag in _MAPPINGS
        items, late = self._items(2 * size if is_mapping else size, in_key=in_key, is_mapping=is_mapping)
        self._depth -= 1
        if is_mapping:
            mapping = self._mapping(tag, items[0::2], items[1::2])
            self._places += [(mapping, items[index - 1], what) for index, what in late]
            return mapping, None
        self._places += [(items, index, what) for index, what in late]
        if tag == "tuple":  # it cannot be changed later, so it is made later
            return (items, items) if late else (tuple(items), None)
        if tag == "size":
            if late or any(type(item) is not int or item >= 2**63 for item in items):
                self._fail("a size holds integers of 64 bits only")
            return self._made_by_caller("size", tuple(items)), None
        return items, None

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

    def _mapping(self, tag: str, keys: list[Any], values: list[Any]) -> Any:
        if not _KEY_TYPES.issuperset(map(type, keys)):
            self._fail("a value of this type cannot be a key of a mapping")
        try:
            check_keys(keys)
        except ValueError as error:
            self._fail(str(error))
        mapping = _MAPPINGS[tag](dict(zip(keys, values, strict=True)))
        if len(mapping) != len(keys):
            self._fail("a key occurs twice in a mapping")
        return mapping
