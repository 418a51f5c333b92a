"""Names of leaves: readable, never the same for two paths."""

from __future__ import annotations

import math
from urllib.parse import unquote

import pytest
from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.format.header import build_header
from stio.format.state.tree import TREE_TENSOR, key_label, python_path


@pytest.mark.parametrize(
    ("key", "label"),
    [
        ("exp_avg", "exp_avg"),
        ("layers.0.weight", "layers.0.weight"),
        ("0.weight", "0.weight"),
        ("état", "état"),
        ("a b", "a b"),
        (0, "0"),
        (-3, "-3"),
        (1.5, "1.5"),
        (math.inf, "inf"),
        (True, "True"),
        (None, "None"),
        ((1, "a", (None,)), "(1,a,(None))"),
        ((), "()"),
        ("", "%"),
        ("0", "%30"),
        ("-3", "%2D3"),
        ("1.5", "%31.5"),
        ("1e+22", "%31e+22"),
        ("inf", "%69nf"),
        ("-inf", "%2Dinf"),
        ("nan", "%6Ean"),
        ("True", "%54rue"),
        ("None", "%4Eone"),
        ("(1,a)", "%281,a)"),
        (("(1,a)",), "(%281%2Ca%29)"),
        (("",), "(%)"),
        ("a/b", "a%2Fb"),
        ("50%", "50%25"),
        ("\0\n", "%00%0A"),
        ("\ud800", "%ED%A0%80"),
        ("\u202e", "%E2%80%AE"),
        ("__metadata__", "%5F_metadata__"),
    ],
)
def test_labels(key, label):
    assert key_label(key) == label
    if isinstance(key, str) and key and "\ud800" not in key:
        assert unquote(label) == key


KEYS = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False)
    | st.text(st.sampled_from('01-.e+(),/%2FinfnaTrueNo\0\ud800é"'), max_size=4) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=count(100, 400), deadline=None)
@given(st.lists(KEYS, min_size=2, max_size=12))
def test_keys_of_one_mapping_have_labels_of_their_own(keys):
    keys = list(dict.fromkeys(keys))
    labels = [key_label(key) for key in keys]
    assert len(set(labels)) == len(keys)
    for label in labels:
        assert label
        assert "/" not in label
        assert label.isprintable()
        build_header([(label, "U8", (0,))])  # a name that can be written


@pytest.mark.slow
@settings(max_examples=count(100, 400), deadline=None)
@given(st.lists(st.lists(KEYS, min_size=1, max_size=3), min_size=2, max_size=8))
def test_paths_have_names_of_their_own(paths):
    unique = {tuple(map(repr, path)): path for path in paths}
    names = {"/".join(map(key_label, path)) for path in unique.values()}
    assert len(names) == len(unique)
    assert not any(name.startswith("/") for name in names)
    assert TREE_TENSOR not in names


def test_paths_in_messages():
    assert python_path([]) == "state"
    assert python_path(["param_groups", 0, "lr", (1, "\x1b")]) == r"state['param_groups'][0]['lr'][(1, '\x1b')]"
    assert len(python_path(["x" * 10_000])) < 200
