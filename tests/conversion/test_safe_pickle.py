"""Pickles of plain values are read as pickle reads them; everything else is refused, in bounded time, and never run."""

from __future__ import annotations

import collections
import decimal
import os
import pickle
import pickletools
import random
from typing import Any

import pytest
from counts import count
from hypothesis import given, settings
from hypothesis import strategies as st

from stio.conversion.safe_pickle import MAX_DEPTH, PickleRefused, PlainPickles

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
KEYS = st.text() | st.integers() | st.none() | st.binary()
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=20,
)


def loads(data: bytes) -> Any:
    return PlainPickles().loads(data)


@pytest.mark.slow
@settings(max_examples=count(60, 200), deadline=None)
@given(value=VALUES, protocol=st.sampled_from([4, 5]))
def test_reads_what_pickle_wrote(value: object, protocol: int) -> None:
    found = loads(pickle.dumps(value, protocol=protocol))
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol(protocol: int) -> None:
    value = {
        "a": [1, -2, 300, 70_000, 2**70, -(2**2100), 1.5, None, True, "é" * 300, "\ud800"],
        0: ({}, (), (1, 2, 3, 4)),
    }
    assert loads(pickle.dumps(value, protocol=protocol)) == value


def test_random_state_and_what_is_shared() -> None:
    assert loads(pickle.dumps(random.getstate())) == random.getstate()
    inner = [1]
    found = loads(pickle.dumps([inner, inner]))
    assert found[0] is found[1]
    many = list(range(300))  # more than one byte numbers the memo
    assert loads(pickle.dumps([[k] for k in many] + [many], protocol=2)) == [[k] for k in many] + [many]


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("pwned",)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (_Runs(), "mkdir"),
        (collections.OrderedDict(a=1), "collections.OrderedDict"),
        (1j, "complex"),
        (decimal.Decimal(1), "Decimal"),
        (print, "print"),
    ],
)
def test_code_is_named_and_not_run(value: object, named: str, protocol: int, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PickleRefused, match=f"refers to code .*{named}"):
        loads(pickle.dumps([value], protocol=protocol))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "data",
    [
        b"cos\nsystem\n(S'true'\ntR.",  # protocol 0
        b"\x80\x02cos\nsystem\n\x85R.",
        b"\x80\x02Pid\n.",
        b"\x80\x02NQ.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02(ios\nsystem\n.",
        b"\x80\x02}}b.",
        b"\x80\x02))\x81.",
        b"\x80\x05\x97.",
        b"\x80\x02\xff.",
        b"\x80\x02I10\n.",
    ],
)
def test_instructions_that_plain_values_need_not(data: bytes) -> None:
    with pytest.raises(PickleRefused):
        loads(data)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80", b"\x80\x01N.", b"\x80\x06N.", b"N.", b"\x80\x02", b"\x80\x02.", b"\x80\x02NN.", b"\x80\x02N.N",
        b"\x80\x02(.", b"\x80\x02N0.", b"\x80\x02t.", b"\x80\x02(e.", b"\x80\x02Na.", b"\x80\x02NNa.", b"\x80\x02}N(u.",
        b"\x80\x02}(Nu.", b"\x80\x02}(NNNNu.", b"\x80\x02}]Ns.", b"\x80\x02}]\x85Ns.", b"\x80\x02h\x00.", b"\x80\x02q\x00.",
        b"\x80\x02(q\x00h\x00.", b"\x80\x02X\xff\xff\xff\xffa.",
        b"\x80\x04\x8d\xff\xff\xff\xff\xff\xff\xff\x7fa.", b"\x80\x02\x8b\xff\xff\xff\xff.", b"\x80\x02X\x01\x00\x00\x00\xff.",
        b"\x80\x04\x95\xff\x00\x00\x00\x00\x00\x00\x00N.", b"\x80\x02G\x00.", b"\x80\x04\x8f(]\x90.", b"\x80\x04(]\x91.",
    ],
)  # fmt: skip
def test_malformed(data: bytes) -> None:
    with pytest.raises(PickleRefused):
        loads(data)


def test_a_memo_with_a_high_number_is_small() -> None:
    assert loads(b"\x80\x02Nr\xff\xff\xff\x7f.") is None


def test_what_contains_itself() -> None:
    loop: list[Any] = []
    loop.append(loop)
    keyed: dict[str, Any] = {}
    keyed["a"] = (keyed,)
    for value in (loop, keyed):
        with pytest.raises(PickleRefused, match="contains itself"):
            loads(pickle.dumps(value))


def test_bombs_are_refused_before_they_go_off() -> None:
    tuples, lists = (), []  # 2**60 values in 60 objects, and hashing a tuple meets them all
    for _ in range(60):
        tuples, lists = (tuples, tuples), [lists, lists]  # type: ignore[assignment]
    for value in (tuples, lists):
        with pytest.raises(PickleRefused, match="unfolds"):
            loads(pickle.dumps(value))
    body = pickle.dumps(tuples, protocol=2)[2:-1]
    with pytest.raises(PickleRefused, match="a tuple cannot be a key"):
        loads(b"\x80\x02}" + body + b"Ns.")


@pytest.mark.slow
def test_depth() -> None:
    nested: Any = 0
    for _ in range(MAX_DEPTH):
        nested = [nested]
    assert loads(pickle.dumps(nested)) == nested
    with pytest.raises(PickleRefused, match="nested"):
        loads(pickle.dumps([nested]))
    for body in (b"\x85" * 10**6, b"\x91" * 10**6):  # hashing it would overflow the C stack
        with pytest.raises(PickleRefused):
            loads(b"\x80\x04)" + body + b".")
    with pytest.raises(PickleRefused, match="nested"):
        loads(b"\x80\x02" + b"]" * 10**5 + b"a" * (10**5 - 1) + b".")


def test_steps_are_counted_over_a_file() -> None:
    pickles = PlainPickles(max_steps=100)
    data = pickle.dumps(list(range(30)))
    assert len(list(pickletools.genops(data))) <= 50
    pickles.loads(data)
    pickles.loads(data)
    with pytest.raises(PickleRefused, match="longer than"):
        pickles.loads(data)
    with pytest.raises(PickleRefused, match="unfolds"):
        PlainPickles().loads(data, max_nodes=30)


def test_keys_whose_hashes_an_author_can_choose_are_few() -> None:
    some = {k << 61: None for k in range(1, 1000)}
    assert loads(pickle.dumps(some)) == some
    with pytest.raises(PickleRefused, match="too many keys"):
        loads(pickle.dumps({k + 0.5: None for k in range(20_000)}))
    assert len(loads(pickle.dumps(dict.fromkeys(range(20_000))))) == 20_000


@pytest.mark.parametrize("value", [{(1, 2): 3}, {1, 2}, frozenset({1}), bytearray(b"x")])
def test_values_that_no_state_needs(value: object) -> None:
    with pytest.raises(PickleRefused):
        loads(pickle.dumps(value, protocol=5))


def test_one_key_twice() -> None:
    with pytest.raises(PickleRefused, match="twice"):
        loads(b"\x80\x02}(K\x01NK\x01Nu.")


@settings(max_examples=count(75, 300), deadline=None)
@given(value=VALUES, data=st.data())
def test_mutated_pickles_are_read_or_refused(value: object, data: st.DataObject) -> None:
    raw = bytearray(pickle.dumps(value))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(2, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        PlainPickles(max_steps=10_000).loads(bytes(raw))
    except PickleRefused:
        pass
