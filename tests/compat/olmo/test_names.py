"""Names of OLMo's nested state: what its own reader makes of them, equal names for equal paths, crafted ones refused."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import pytest
from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.compat.olmo import encode_name, nest
from stio.conversion.safe_pickle import (
    MAX_NAME_BYTES,
    PickleRefused,
    PlainPickles,
    decode_name,
    looks_encoded,
    shown,
)

KEYS = st.text() | st.integers() | st.floats(allow_nan=False) | st.booleans() | st.none() | st.binary()
PATHS = st.lists(KEYS, min_size=1, max_size=5).map(tuple)


def encoded(value: object, protocol: int = 4) -> str:
    return base64.urlsafe_b64encode(pickle.dumps(value, protocol=protocol)).decode()


@settings(max_examples=count(60, 200), deadline=None)
@given(path=PATHS, is_pickled=st.booleans())
def test_round_trip_and_the_other_reader(path: tuple[Any, ...], is_pickled: bool) -> None:
    name = encode_name(path, is_pickled=is_pickled)
    assert pickle.loads(base64.urlsafe_b64decode(name)) == (path, is_pickled)
    assert decode_name(name, PlainPickles()) == (path, is_pickled)
    assert looks_encoded([name])


def test_the_usual_name_is_the_other_writers() -> None:
    assert encode_name(("state", "wte.weight", "exp_avg"), is_pickled=False) == encoded(
        (("state", "wte.weight", "exp_avg"), False)
    )


def test_equal_paths_give_equal_names() -> None:
    one, other = "".join(["ke", "y"]), "".join(["k", "ey"])
    assert one is not other
    assert pickle.dumps((one, one)) != pickle.dumps((one, other))
    assert encode_name((one, one), is_pickled=True) == encode_name((one, other), is_pickled=True)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_names_of_every_protocol(protocol: int) -> None:
    name = encoded((("a", 0), True), protocol)
    assert looks_encoded([name])
    assert decode_name(name, PlainPickles()) == (("a", 0), True)


@pytest.mark.parametrize("names", [[], ["wte.weight"], ["gASx"[:3]], ["", "gASV"], ["gA\x00\x00"]])
def test_other_names_do_not_look_so(names: list[str]) -> None:
    assert not looks_encoded(names)


@pytest.mark.parametrize(
    "name",
    [
        "gAN!", "gANO", "gANé", "", encoded(("a", True)), encoded(((), True)), encoded((["a"], True)), encoded((("a",), 1)),
        encoded((("a",), True, None)), encoded("a"), encoded((([],), True)), encoded(((print,), True)),
        encoded((("a" * 2 * MAX_NAME_BYTES,), True)), encoded((tuple(range(2000)), True)),
    ],
)  # fmt: skip
def test_crafted_names(name: str) -> None:
    with pytest.raises(PickleRefused):
        decode_name(name, PlainPickles())


def test_keys_that_could_not_be_read_back_are_not_written() -> None:
    for key in (print, 1j, frozenset(), b"".join, ("a", 0)):
        with pytest.raises(TypeError, match=r"\['a'\].*a key is text"):
            encode_name(("a", key), is_pickled=False)
    with pytest.raises(ValueError, match="longer than"):
        encode_name(("a" * MAX_NAME_BYTES,), is_pickled=False)


def test_nest() -> None:
    leaf = {"x": 1}
    assert nest([(("a", 0), 1), (("a", "b", None), 2), (("c",), leaf)]) == {"a": {0: 1, "b": {None: 2}}, "c": leaf}
    for paths in ([("a",), ("a",)], [("a",), ("a", "b")], [("a", "b"), ("a",)], [(1,), (True,)]):
        with pytest.raises(PickleRefused):
            nest((path, {}) for path in paths)
    assert shown(("state", 0, "a\x1b")) == r"['state'][0]['a\x1b']"
