"""The tree's text: what is written reads back exactly, and whatever else comes is refused, in bounded time."""

from __future__ import annotations

import base64
import json
import math
import struct
import time
from collections import Counter, OrderedDict

import pytest
from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.errors import FormatError, LimitError
from stio.format.gil_slices import WINDOW_BYTES
from stio.format.state.tree import (
    MAX_DEPTH,
    POINTER,
    STATE_KEY,
    TREE_TENSOR,
    Reference,
    check_keys,
    encode_tree,
    is_json_integer,
    parse_tree,
    scalar_node,
)
from stio.limits import Limits

HEAD, TAIL = b'{"stio.state":1,"nodes":[\n', b"\n]}"


def foreign(tag, value):
    if value == "unknown":
        raise ValueError("an unknown value")
    return tag, value


def parse(raw, **limits):
    return parse_tree(raw, path="state.safetensors", limits=Limits(**limits), foreign=foreign)


def load(nodes, resolve=lambda reference: reference.name.upper()):
    return parse(encode_tree(nodes)).fill(resolve)


def text(*lines):
    return HEAD + b",\n".join(line.encode() if isinstance(line, str) else line for line in lines) + TAIL


# Writing, and reading what was written.


def test_the_text_is_this():
    nodes = [("dict", 2), "lr", 0.1, "state", ("dict", 1), 0, ("tensor", "state/0")]
    raw = encode_tree(nodes)
    assert raw == text('["dict",2],"lr",0.1,"state",["dict",1],0,["tensor","state/0"]')
    assert json.loads(raw) == {"stio.state": 1, "nodes": [list(n) if isinstance(n, tuple) else n for n in nodes]}


def test_the_pointer_is_json_of_the_same_version():
    assert json.loads(POINTER) == {STATE_KEY: 1, "tensor": TREE_TENSOR}


SCALARS = [
    None, True, False, 0, 1, -1, 2**63 - 1, -(2**63), 2**63, 2**64 - 1, 2**64, -(2**63) - 1, 10**30, -(7**9000), 1 << 100_000,
    0.0, -0.0, 1.0, 1e22, 1e16, 0.1, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, math.inf, -math.inf, math.nan,
    "", "a", "é", "\0", "\n", "\u2028", '"\\', "😀", "\ud800", "a\udfff", "NaN", "x" * 3000,
    b"", b"\0\xff", bytes(range(256)),
]  # fmt: skip


def bits(value):
    return struct.pack(">d", value) if isinstance(value, float) else value


@pytest.mark.parametrize("which", range(len(SCALARS)))  # pytest could not name them: integers have too many digits
def test_scalars_are_exact(which):
    value = SCALARS[which]
    node = value if value is None or isinstance(value, bool) else scalar_node(value)
    found = load([("list", 1), node])[0]
    assert type(found) is type(value)
    assert bits(found) == bits(value)


@pytest.mark.parametrize("pattern", [0x7FF8000000000001, 0xFFF8DEADBEEF0000, 0x7FF0000000000000, 0xFFF0000000000000])
def test_the_bits_of_what_is_not_finite(pattern):
    (value,) = struct.unpack(">d", struct.pack(">Q", pattern))
    assert struct.pack(">d", load([scalar_node(value)])) == struct.pack(">Q", pattern)


@settings(max_examples=count(75, 300), deadline=None)
@given(st.floats() | st.integers() | st.text(st.characters(exclude_categories=())) | st.binary())
def test_any_scalar_is_exact(value):
    found = load([scalar_node(value)])
    assert type(found) is type(value)
    assert bits(found) == bits(value)


def nodes_of(value):
    """Write plainly what the walk writes step by step."""
    if isinstance(value, dict):
        tag = {dict: "dict", OrderedDict: "ordered_dict", Counter: "counter"}[type(value)]
        return [(tag, len(value))] + [n for pair in value.items() for side in pair for n in nodes_of(side)]
    if isinstance(value, list | tuple):
        return [(type(value).__name__, len(value))] + [n for item in value for n in nodes_of(item)]
    return [value if value is None or isinstance(value, bool) else scalar_node(value)]


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(KEYS, st.integers(), max_size=4).map(Counter)
    ),
    max_leaves=20,
)


def shape(value):
    """Return what equality leaves out: types, order and signs of zero."""
    if isinstance(value, dict):
        return type(value), [(shape(key), shape(item)) for key, item in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [shape(item) for item in value]
    return type(value), bits(value)


@settings(max_examples=count(75, 300), deadline=None)
@given(VALUES)
def test_any_state_comes_back(value):
    assert shape(load(nodes_of(value))) == shape(value)


@pytest.mark.slow
def test_many_nodes_on_many_lines():
    value = {k: [float(k), str(k), (k,)] for k in range(20_000)}
    raw = encode_tree(nodes_of(value))
    assert max(map(len, raw.split(b"\n"))) < WINDOW_BYTES
    assert parse(raw).fill(None) == value
    assert parse(raw).num_nodes == 1 + 6 * 20_000


def test_long_text_stands_on_a_line_of_its_own():
    value = ["\n" * WINDOW_BYTES, "b", ["c" * WINDOW_BYTES], 1]
    raw = encode_tree(nodes_of(value))
    assert [len(line) > WINDOW_BYTES for line in raw.split(b"\n")] == [0, 0, 1, 0, 0, 1, 0, 0]
    assert parse(raw).fill(None) == value


# Tensors.


def test_references_are_put_where_they_belong():
    nodes = [
        *[("list", 4), ("tensor", "a"), ("tuple", 2), ("tensor", "b"), ("tuple", 1), ("parameter", "c")],
        *[("dict", 1), ("tuple", 1), 1, ("tuple", 1), ("frozen_parameter", "d"), ("ordered_dict", 1), "k"],
        ("bytes_tensor", "e"),
    ]
    tree = parse(encode_tree(nodes))
    assert tree.references == [
        *[Reference("tensor", "a"), Reference("tensor", "b"), Reference("parameter", "c")],
        *[Reference("frozen_parameter", "d"), Reference("bytes_tensor", "e")],
    ]
    assert tree.fill(lambda r: r.name) == ["a", ("b", ("c",)), {(1,): ("d",)}, OrderedDict(k="e")]


@pytest.mark.parametrize("root", [[("tensor", "a")], [("tuple", 1), ("tensor", "a")], [("list", 1), ("tensor", "a")]])
def test_a_root_that_is_or_holds_a_tensor(root):
    assert load(root) == {1: "A"}.get(len(root), ("A",) if root[0][0] == "tuple" else ["A"])


def test_what_the_caller_makes():
    nodes = [("list", 3), ("dtype", "float32"), ("device", "cpu"), ("size", 2), 3, 4]
    assert load(nodes) == [("dtype", "float32"), ("device", "cpu"), ("size", (3, 4))]
    with pytest.raises(FormatError, match="an unknown value"):
        load([("dtype", "unknown")])


# What is refused.

B64 = base64.b64encode(b"x").decode()

MALFORMED = {
    "empty": b"",
    "no nodes": HEAD + b"]}",
    "one empty line": HEAD + TAIL,
    "not json": b"\x80\x04K\x01.",
    "other json": b"{}",
    "no end": HEAD + b"1",
    "cut": text("1")[:-1],
    "text after": text("1") + b" ",
    "spaces": b" " + text("1"),
    "bom": b"\xef\xbb\xbf" + text("1"),
    "a key twice": b'{"stio.state":1,"stio.state":1,"nodes":[\n1\n]}',
    "pretty": json.dumps({"stio.state": 1, "nodes": [1]}, indent=1).encode(),
    "two roots": text("1,2"),
    "two roots, two lines": text("1", "2"),
    "root ends early": text('["list",0],1'),
    "missing item": text('["list",2],1'),
    "missing value": text('["dict",1],"a"'),
    "huge size": text('["list",9223372036854775807],1'),
    "larger size": text(f'["list",{2**64}],1'),
    "negative size": text('["list",-1]'),
    "text size": text('["list","1"]'),
    "bool size": text('["list",true]'),
    "float size": text('["list",1.0],1'),
    "unknown tag": text('["object","os.system"]'),
    "unknown tag with size": text('["set",1],1'),
    "empty tag": text('["",""]'),
    "upper case": text('["Dict",0]'),
    "row of one": text('["list"]'),
    "row of three": text('["list",1,2]'),
    "empty row": text("[]"),
    "nested row": text('["list",[1]]'),
    "object": text('{"a":1}'),
    "number tag": text("[1,1]"),
    "null text": text('["int",null]'),
    "reference without name": text('["tensor",1]'),
    "trailing comma": text("1,"),
    "leading comma": text(",1"),
    "empty line": text('["list",1]', "", "1"),
    "line without comma": HEAD + b'["list",1]\n1' + TAIL,
    "closed and opened": text('["list",1]],[1'),
    "NaN": text("NaN"),
    "Infinity": text("-Infinity"),
    "too large a float": text("1e400"),
    "plain integer above 64 bits": text(str(2**64)),
    "plain integer below 64 bits": text(str(-(2**63) - 1)),
    "digits": text("1" * 5000),
    "leading zero": text("01"),
    "lone surrogate": text('"\\ud800"'),
    "raw newline": text('"a\nb"'),
    "raw control": text('"a\x01b"'),
    "no utf-8": text(b'"\xff"'),
    "int": text('["int","0x1g"]'),
    "int with space": text('["int"," 1"]'),
    "int with underscore": text('["int","1_0"]'),
    "int upper case": text('["int","FF"]'),
    "int of nothing": text('["int",""]'),
    "float short": text('["float","7ff8"]'),
    "float long": text('["float","7ff80000000000000"]'),
    "float text": text('["float","nan"]'),
    "bytes": text('["bytes","a"]'),
    "bytes with newline": text('["bytes","YQ==\\n"]'),
    "bytes with hole": text('["bytes","Y Q=="]'),
    "bytes not ascii": text('["bytes","é"]'),
    "text not utf-8": text('["text","/w=="]'),
    "size of text": text('["size",1],"a"'),
    "size of a list": text('["size",1],["list",0]'),
    "size of a bool": text('["size",1],true'),
    "size of a tensor": text('["size",1],["tensor","a"]'),
    "size too large": text(f'["size",1],{2**63}'),
    "key list": text('["dict",1],["list",0],1'),
    "key dict": text('["dict",1],["dict",0],1'),
    "key tensor": text('["dict",1],["tensor","a"],1'),
    "key bytes": text(f'["dict",1],["bytes","{B64}"],1'),
    "key dtype": text('["dict",1],["dtype","float32"],1'),
    "key size": text('["dict",1],["size",0],1'),
    "key of 65 bits": text('["dict",1],["int","10000000000000000"],1'),
    "key NaN": text('["dict",1],["float","7ff8000000000000"],1'),
    "key tuple of NaN": text('["dict",1],["tuple",1],["float","7ff8000000000000"],1'),
    "key tuple of a list": text('["dict",1],["tuple",1],["list",0],1'),
    "key tuple of a tensor": text('["dict",1],["tuple",1],["tensor","a"],1'),
    "key tuple of a tuple of a dict": text('["dict",1],["tuple",1],["tuple",1],["dict",0],1'),
    "key twice": text('["dict",2],"a",1,"a",2'),
    "key twice, escaped": text('["dict",2],"a",1,"\\u0061",2'),
    "key twice, of two types": text('["dict",2],1,1,true,2'),
    "key twice, float": text('["ordered_dict",2],1,1,1.0,2'),
    "key twice, tuple": text('["counter",2],["tuple",1],1,1,["tuple",1],1.0,2'),
    "key twice, zeros": text('["dict",2],0.0,1,-0.0,2'),
}


@pytest.mark.matrix
@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_text_is_refused(name):
    with pytest.raises(FormatError, match="state") as caught:
        parse(MALFORMED[name])
    assert caught.value.path == "state.safetensors"
    assert not isinstance(caught.value, LimitError)
    str(caught.value).encode()


def test_what_a_message_shows_is_printable():
    with pytest.raises(FormatError) as caught:
        parse(text('["\\u001b[31mred","x"]'))
    assert "\x1b" not in str(caught.value)
    assert "x1b[31mred" in str(caught.value)


def test_another_version_is_named():
    with pytest.raises(FormatError, match="another version.*newer stio.*expected version 1, found version 2"):
        parse(text("1").replace(b":1", b":2", 1))
    with pytest.raises(FormatError, match="version 7"):
        parse(b'{"stio.state":7,"whatever":{}}')


def test_depth_is_bounded():
    deep = [("list", 1)] * MAX_DEPTH + [1]
    value = load(deep)
    for _ in range(MAX_DEPTH):
        value = value[0]
    assert value == 1
    for level in ([("list", 1)], [("tuple", 1)], [("dict", 1), "k"]):
        with pytest.raises(LimitError, match="nested too deeply.*200"):
            load(level * 100_000)
    load([("dict", 1), *[("tuple", 1)] * (MAX_DEPTH - 1), 1, 2])
    with pytest.raises(LimitError, match="nested too deeply"):
        load([("dict", 1), *[("tuple", 1)] * MAX_DEPTH, 1, 2])


@pytest.mark.parametrize("line", [b"[[" * 50_000, b'["list",' * 50_000, b'{"a":' * 50_000, b'["a",["a",' * 10_000])
def test_brackets_do_not_recurse(line):
    with pytest.raises(FormatError):
        parse(text(line))


def test_limits_hold():
    raw = encode_tree([("list", 99), *range(99)])
    assert parse(raw, max_state_nodes=100, state_bytes=len(raw)).num_nodes == 100
    with pytest.raises(LimitError, match="max_state_nodes.*at most 99"):
        parse(raw, max_state_nodes=99)
    with pytest.raises(LimitError, match="state_bytes"):
        parse(raw, state_bytes=len(raw) - 1)


def test_a_long_line_holds_one_node_so_that_no_call_makes_millions():
    line = b"1," * WINDOW_BYTES + b"1"
    with pytest.raises(FormatError, match="malformed line.*length 1"):
        parse(text('["list",1]', line))


@pytest.mark.slow
def test_ten_million_nodes_are_refused_while_they_are_read():
    many = b",".join([b'["list",0]'] * 10_000)
    raw = text('["list",10000000]', *[many] * 1000)
    assert len(raw) > 100_000_000
    start = time.process_time()
    with pytest.raises(LimitError, match="at most 20,000"):
        parse(raw, state_bytes=len(raw), max_state_nodes=20_000)
    assert time.process_time() - start < 1  # about 0.02; all of them take 5
    with pytest.raises(LimitError, match="state_bytes"):
        parse(raw)


def test_parsing_can_be_ended():
    class EndedError(Exception):
        pass

    seen = []

    def check():
        seen.append(1)
        if len(seen) == 3:
            raise EndedError

    with pytest.raises(EndedError):
        parse_tree(encode_tree(nodes_of([1] * 10_000)), path="x", limits=Limits(), foreign=foreign, check=check)


@pytest.mark.slow
def test_keys_that_collide_are_refused():
    """Hashes of integers and tuples are known to all; made to be equal they cost as much as there are, each."""

    class Same(int):
        def __hash__(self):
            return 7

    check_keys([Same(k) for k in range(1000)])
    check_keys([*range(100_000), "a"])
    check_keys([f"{k}" for k in range(200_000)])
    with pytest.raises(ValueError, match="equal hashes"):
        check_keys([Same(k) for k in range(1001)])
    with pytest.raises(ValueError, match="131,072"):
        check_keys(range(200_000))
    nodes = [("dict", 200_000), *[k for pair in enumerate([None] * 200_000) for k in pair]]
    with pytest.raises(FormatError, match="131,072"):
        load(nodes)


def test_integers_that_are_written_as_such():
    assert [is_json_integer(k) for k in (2**64 - 1, 2**64, -(2**63), -(2**63) - 1)] == [True, False, True, False]


@settings(max_examples=count(75, 300), deadline=None)
@given(st.data())
def test_a_changed_text_is_refused_or_read(data):
    raw = bytearray(encode_tree(nodes_of({"a": [1, 2.5, (None, "x")], 3: OrderedDict(b=b"y"), (1, "z"): 2**70})))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(raw) - 1))
        what = data.draw(st.sampled_from([b"", b"[", b"]", b",", b"0", b'"', b"\n", b"\xff", b"-", b"e9"]))
        raw[at : at + data.draw(st.integers(0, 2))] = what
    try:
        parse(bytes(raw)).fill(lambda reference: None)
    except FormatError as error:
        assert error.path == "state.safetensors"
