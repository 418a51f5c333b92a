"""The tree of a nested state as text: containers and plain values in order, tensors by name. Pure; no torch.

The text is JSON, `{"stio.state":1,"nodes":[...]}`, and flat: a container is a row of its tag and its number of items,
which follow it (of a mapping: key, value, key, value), so nothing recurses. A plain value stands for itself; what JSON
has no word for is a row of a tag and a text. Lines end between nodes only, and a line is short or one node: whoever
reads decodes line by line, and neither memory nor the interpreter's lock is at the mercy of the text.

Reading checks all that can be checked before any tensor is read, and makes all containers; tensors are put in later.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from stio.codec._containers import (
    MAX_DEPTH,
    Builder,
    Node,
    Reference,
    Tree,
    check_keys,
    is_json_integer,
)
from stio.codec._turns import WINDOW_BYTES
from stio.errors import FormatError, LimitError
from stio.events import Limits

__all__ = [
    "MAX_DEPTH",
    "POINTER",
    "STATE_KEY",
    "TREE_TENSOR",
    "Node",
    "Reference",
    "Tree",
    "check_keys",
    "encode_tree",
    "is_json_integer",
    "parse_tree",
    "scalar_node",
]

STATE_KEY = "stio.state"
"""Metadata key of stio's own: the tree, or where it stands."""

TREE_TENSOR = "/stio.state"
"""U8 tensor that holds a long tree. No path of a leaf begins with a slash."""

POINTER = f'{{"{STATE_KEY}":1,"tensor":"{TREE_TENSOR}"}}'
"""What the metadata say where the tree stands in a tensor."""

_HEAD = b'{"stio.state":1,"nodes":[\n'
_TAIL = b"\n]}"
_VERSION = re.compile(rb'\{"stio\.state":([0-9]{1,9}),')
_NODES_A_LINE = 512

_decode_line = msgspec.json.Decoder(list[Node]).decode
_decode_node = msgspec.json.Decoder(tuple[Node]).decode
_encode = msgspec.json.Encoder().encode


# Writing.


def scalar_node(value: int | float | str | bytes) -> Node:
    """Return the node of a plain value.

    Integers above 64 bits are written in base 16: no length makes that slow, and no limit on digits applies.
    """
    if isinstance(value, bytes):
        return "bytes", base64.b64encode(value).decode()
    if isinstance(value, str):
        if value.isascii() or _is_encodable(value):
            return value
        return "text", base64.b64encode(value.encode("utf-8", "surrogatepass")).decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else ("float", struct.pack(">d", value).hex())
    return value if is_json_integer(value) else ("int", format(value, "x"))


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def encode_tree(nodes: Sequence[Node]) -> bytes:
    """Return the text of a tree; equal nodes give equal bytes."""
    lines = []
    for start in range(0, len(nodes), _NODES_A_LINE):
        some = nodes[start : start + _NODES_A_LINE]
        line = _encode(some)[1:-1]
        lines += [line] if len(line) < WINDOW_BYTES else [_encode([node])[1:-1] for node in some]
    return _HEAD + b",\n".join(lines) + _TAIL


# Reading.


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
        foreign: Makes what only the caller knows from a tag and a value: `dtype` and `device` from text, `size` from a
            tuple of integers. Raises ValueError for what it does not know.
        check: Called once a line; may raise to end the parsing.

    Raises:
        FormatError: It is no such text, of another version, or its nodes do not fit together.
        LimitError: Too long, too many nodes, or too deep.
    """
    if len(raw) > limits.state_bytes:
        raise LimitError(
            "the tree of the state is longer than the limit `state_bytes`",
            path=path,
            expected=f"at most {limits.state_bytes:,} bytes",
            found=f"{len(raw):,}",
        )
    builder = Builder(path, foreign)
    for nodes in _lines(raw, path):
        if builder.num_nodes + len(nodes) > limits.max_state_nodes:
            raise LimitError(
                "the state has more values than the limit `max_state_nodes`",
                path=path,
                expected=f"at most {limits.max_state_nodes:,}",
            )
        builder.add(nodes)
        check()
    return builder.complete()


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
        except (ValueError, RecursionError) as error:
            raise FormatError(
                f"the tree of the state has a malformed line: {error}", path=path, found=line[:40]
            ) from None
        pos = end + 1 if last else stop + 1
