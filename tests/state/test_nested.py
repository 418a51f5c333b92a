"""Taking state apart: what is taken, under which name, what is refused and where the message says it stands."""

from __future__ import annotations

import collections
import dataclasses
import enum
import json
import sys
import threading

import anyio
import numpy as np
import pytest
import torch
from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import stio
from stio.device.describe import LazyTensor
from stio.format.state.tree import POINTER, STATE_KEY, TREE_TENSOR
from stio.runtime.notifier import run_blocking
from stio.saving import nested
from stio.saving.nested import StoredTensor, flatten, tree_text


def flattened(state, metadata=None):
    return run_blocking(flatten(state, metadata))


def apart(state, metadata=None):
    tensors, metadata = flattened(state, metadata)
    text = metadata[STATE_KEY]
    if text == POINTER:
        text = bytes(tensors[TREE_TENSOR].tolist()).decode()
    return tensors, json.loads(text)["nodes"]


def test_an_optimizer_reads_well():
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.Adam([weight], lr=0.5)
    weight.sum().backward()
    optimizer.step()
    tensors, nodes = apart(optimizer.state_dict())
    assert list(tensors) == ["state/0/step", "state/0/exp_avg", "state/0/exp_avg_sq"]
    assert nodes[:6] == [["dict", 2], "state", ["dict", 1], 0, ["dict", 3], "step"]


def test_tensors_are_the_callers_own():
    a, b = torch.ones(2), torch.ones(3)
    tensors, nodes = apart([a, {"b": b.t(), 1: a}, (a[1:],)])
    assert list(tensors) == ["0", "1/b", "1/1", "2/0"]
    assert tensors["0"] is tensors["1/1"] is a
    assert nodes == [["list", 3], ["tensor", "0"], ["dict", 2], "b", ["tensor", "1/b"], 1, ["tensor", "1/1"],
                     ["tuple", 1], ["tensor", "2/0"]]  # fmt: skip


def test_what_has_no_memory_is_known_by_itself():
    lazy, empty = LazyTensor(torch.float32, (2,), lambda: torch.ones(2)), torch.empty(0)
    tensors, nodes = apart([lazy, empty, lazy, empty, torch.empty(0)])
    assert list(tensors) == ["0", "1", "4"]
    assert nodes[3:5] == [["tensor", "0"], ["tensor", "1"]]


def test_parameters_keep_their_kind():
    _, nodes = apart({"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.ones(1), requires_grad=False),
                      "c": torch.ones(1, requires_grad=True)})  # fmt: skip
    assert nodes[1:] == ["a", ["parameter", "a"], "b", ["frozen_parameter", "b"], "c", ["tensor", "c"]]


def test_a_root_of_any_kind():
    assert apart(3) == ({}, [3])
    assert apart(None) == ({}, [None])
    assert apart(torch.Size([2, -1]))[1] == [["size", 2], 2, -1]
    tensors, nodes = apart(torch.ones(1))
    assert (list(tensors), nodes) == (["state"], [["tensor", "state"]])


def test_long_bytes_and_a_long_tree_are_tensors():
    tensors, nodes = apart({"a": b"x" * 65537, "b": b"x" * 3})
    assert list(tensors) == ["a"]
    assert bytes(tensors["a"].tolist()) == b"x" * 65537
    assert nodes == [["dict", 2], "a", ["bytes_tensor", "a"], "b", ["bytes", "eHh4"]]
    tensors, _ = apart({"a": ["x" * 100] * 1000, "t": torch.ones(1)})
    assert list(tensors) == [TREE_TENSOR, "t"]
    assert tensors[TREE_TENSOR].dtype is torch.uint8


def test_metadata_are_the_callers_own():
    given = {"step": "3"}
    _, metadata = flattened([1], given)
    assert list(metadata) == ["step", STATE_KEY]
    assert given == {"step": "3"}
    assert flattened([1], {STATE_KEY: ""}) == flattened([1], None)  # of another state


# What is refused.

Point = collections.namedtuple("Point", "x y")


class Color(enum.IntEnum):
    RED = 1


class Text(str):
    pass


@dataclasses.dataclass
class Config:
    x: int = 1


class Stubborn:
    def __reduce__(self):
        raise AssertionError("pickled")

    def __repr__(self):
        raise AssertionError("printed")


REFUSED = {
    "named tuple": (Point(1, 2), r"Point.*_asdict"),
    "torch's named tuple": (torch.ones(2).max(0), r"return_types\.max.*tuple\("),
    "defaultdict": (collections.defaultdict(list), r"defaultdict.*dict\("),
    "enum": (Color.RED, "Color.*plain value"),
    "text's subclass": (Text("a"), "Text.*plain value"),
    "dataclass": (Config(), "Config.*its parts"),
    "object": (Stubborn(), "Stubborn.*its parts"),
    "function": (len, "builtin_function_or_method"),
    "class": (dict, "its parts"),
    "module": (nn.Linear(1, 1), r"Linear.*state_dict\(\)"),
    "generator": (torch.Generator(), "Generator"),
    "bytearray": (bytearray(b"a"), r"bytearray.*bytes\("),
    "memoryview": (memoryview(b"a"), r"memoryview.*bytes\("),
    "set": ({1}, "set.*list"),
    "frozenset": (frozenset(), "frozenset.*list"),
    "complex": (1j, "complex"),
    "range": (range(3), "range"),
    "deque": (collections.deque(), "deque"),
    "storage": (torch.ones(1).untyped_storage(), "Storage"),
    "slice": (slice(1), "slice"),
    "ellipsis": (..., "ellipsis"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_types_are_refused_by_path(name):
    value, message = REFUSED[name]
    with pytest.raises(TypeError, match=rf"^state\['groups'\]\[1\]\[\(2, 'k'\)\] is an? .*{message}"):
        flattened({"groups": [0, {(2, "k"): value}]})
    with pytest.raises(TypeError, match="^state is a"):
        flattened(value)


BAD_KEYS = {
    "bytes": (b"a", "holds a bytes"),
    "numpy": (np.int64(1), r"numpy\.int64"),
    "enum": (Color.RED, "Color"),
    "frozenset": (frozenset(), "frozenset"),
    "size": (torch.Size([1]), r"torch\.Size"),
    "dtype": (torch.float32, r"torch\.dtype"),
    "65 bits": (2**64, "64 bits"),
    "many digits": (10**5000, "64 bits"),
    "named tuple": (Point(1, 2), "Point"),
    "tuple of bytes": ((1, (b"a",)), "holds a bytes"),
    "complex": (1j, "complex"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_other_keys_are_refused_by_path(name):
    key, message = BAD_KEYS[name]
    with pytest.raises(TypeError, match=rf"^state\['a'\]\[0\] has a key that .*{message}"):
        flattened({"a": [{"fine": 1, key: 2}]})


def test_keys_in_too_many_tuples():
    key = 1
    for _ in range(25):
        key = (key,)
    with pytest.raises(TypeError, match="too many tuples"):
        flattened({key: 1})


@pytest.mark.parametrize("key", [float("nan"), (1, float("nan"))])
def test_nan_is_no_key(key):
    with pytest.raises(ValueError, match=r"^state\['a'\]\[.*nan.*a key is NaN"):
        flattened({"a": {key: 1}})


def test_cycles_are_named():
    state = {"a": [1, {}]}
    state["a"][1]["back"] = state["a"]
    with pytest.raises(ValueError, match=r"^state\['a'\]\[1\]\['back'\] is a container that contains itself"):
        flattened(state)
    own = []
    own.append(own)
    with pytest.raises(ValueError, match=r"^state\[0\] is a container"):
        flattened(own)


def test_one_container_in_two_places_is_no_cycle():
    shared = [1]
    assert apart([shared, shared])[1] == [["list", 2], ["list", 1], 1, ["list", 1], 1]


def test_depth_is_bounded_whatever_the_interpreters_limit():
    def nest(depth):
        state = 1
        for k in range(depth):
            state = [state] if k % 2 else {"k": state}
        return state

    limit, ready = sys.getrecursionlimit(), []
    try:
        sys.setrecursionlimit(150)
        ready.append(flattened(nest(200)))
        with pytest.raises(stio.LimitError, match=r"^state\[.*nested too deeply.*200"):
            flattened(nest(201))
        with pytest.raises(stio.LimitError):
            flattened(nest(100_000))
    finally:
        sys.setrecursionlimit(limit)
    assert ready


def test_a_state_that_counts_double_is_bounded(monkeypatch):
    state = [1]
    for _ in range(60):
        state = [state, state]
    monkeypatch.setattr(nested, "Limits", lambda: stio.Limits(max_state_nodes=50_000))
    with pytest.raises(stio.LimitError, match=r"too many values.*each time.*50,000"):
        flattened(state)


def test_long_names_are_bounded(monkeypatch):
    monkeypatch.setattr(nested, "MAX_HEADER_BYTES", 10_000)
    state = {"x" * 1000: [torch.ones(1)] * 20}
    with pytest.raises(stio.LimitError, match="names.*too long"):
        flattened(state)


def test_long_values_are_bounded(monkeypatch):
    monkeypatch.setattr(nested, "Limits", lambda: stio.Limits(state_bytes=1000))
    with pytest.raises(stio.LimitError, match="at most 1,000 bytes"):
        flattened(["x" * 1000])


def test_keys_that_would_not_be_read_are_not_written():
    with pytest.raises(stio.LimitError, match=r"^state\['a'\]: .*131,072"):
        flattened({"a": dict.fromkeys(range(200_000))})


# In steps, on two threads.


@pytest.mark.matrix
@pytest.mark.anyio
@pytest.mark.parametrize("size", [10, 12_000])
async def test_steps_give_what_one_go_gives(size):
    state = {"a": list(range(size)), "b": {k: [torch.ones(1), str(k)] for k in range(size // 10)}, "c": 1}
    assert repr(await flatten(state, None)) == repr(flattened(state))


@pytest.mark.anyio
async def test_large_states_are_walked_elsewhere(monkeypatch):
    seen = set()

    class Watched(nested._Walk):
        def advance(self, num_nodes):
            seen.add(threading.get_ident())
            return super().advance(num_nodes)

    monkeypatch.setattr(nested, "_Walk", Watched)
    await flatten(list(range(1000)), None)
    assert seen == {threading.get_ident()}
    await flatten(list(range(10_000)), None)
    assert len(seen) == 2
    with pytest.raises(TypeError, match=r"^state\[9999\]"):
        await flatten([*range(9999), 1j], None)


@pytest.mark.anyio
async def test_a_walk_can_be_cancelled(monkeypatch):
    begun, state = threading.Event(), [1]
    for _ in range(60):
        state = [state, state]
    monkeypatch.setattr(nested, "Limits", lambda: stio.Limits(max_state_nodes=10**9))

    class Watched(nested._Walk):
        def advance(self, num_nodes):
            done = super().advance(num_nodes)
            self._nodes.clear()
            begun.set()
            return done

    monkeypatch.setattr(nested, "_Walk", Watched)
    with anyio.fail_after(20):
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as group:
                group.start_soon(flatten, state, None)
                await anyio.to_thread.run_sync(begun.wait)
                scope.cancel()
    assert scope.cancelled_caught


KEYS = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3)
NESTED = st.recursive(
    st.just("tensor"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.tuples(KEYS, KEYS), inner, max_size=3),
    max_leaves=12,
)


@pytest.mark.slow
@settings(max_examples=count(60, 200), deadline=None)
@given(NESTED)
def test_no_two_tensors_get_one_name(state):
    count = 0

    def fresh(value):
        nonlocal count
        if isinstance(value, dict):
            return {key: fresh(item) for key, item in value.items()}
        if isinstance(value, list):
            return [fresh(item) for item in value]
        count += 1
        return torch.ones(1)

    tensors, _ = flattened(fresh(state))
    assert len(tensors) == count


def test_the_tree_of_stored_tensors():
    state = {"w": StoredTensor("model.w"), "long": bytes(100_000), "list": [1, StoredTensor("model.w")]}
    nodes = json.loads(tree_text(state))["nodes"]
    assert nodes[:3] == [["dict", 3], "w", ["tensor", "model.w"]]
    assert nodes[4][0] == "bytes" and len(nodes[4][1]) > 100_000, "no other tensor is made"
    assert nodes[-1] == ["tensor", "model.w"]
    with pytest.raises(TypeError, match=r"state\['a'\]\[0\] is a tensor inside of a value"):
        tree_text({"a": (torch.ones(2),)})
    with pytest.raises(TypeError, match="StoredTensor, which save_state does not take"):
        flattened({"w": StoredTensor("w")})
    with pytest.raises(ZeroDivisionError):
        tree_text(list(range(10_000)), check=lambda: 1 // 0)
