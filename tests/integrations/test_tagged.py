"""What frameworks keep in their states, through nested state and back."""

from __future__ import annotations

import random
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict
from enum import Enum, StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from support import same

import stio
from stio import sync
from stio.integrations._training import TAG, from_plain, to_plain


class Kind(Enum):
    ONE = 1


class Text(StrEnum):
    A = "a"


class Pair(NamedTuple):
    one: int


class MyDict(dict[str, int]):
    pass


KEPT = {
    "plain": {"a": [1, (2.5, None, True)], 3: b"bytes", "text": "x"},
    "containers": OrderedDict(a=Counter("aab"), b=(), c=[], d={}),
    "tensors": {"w": torch.arange(4), "p": [torch.zeros(())]},
    "path": {"at": Path("/data/x"), "here": Path()},
    "sets": [{1, "a", (2, 3)}, frozenset({None}), set()],
    "namespace": Namespace(rate=0.1, inner=Namespace(paths=[Path("a")])),
    "factories": [defaultdict(list, a=[1]), defaultdict(None, b=2), defaultdict(int)],
    "numpy": [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.float64(0.1),
        np.int16(-3),
        np.bool_(True),
        np.zeros((0, 2)),
    ],
    "views": [np.arange(12.0).reshape(3, 4).T, np.broadcast_to(np.float32(2), (2, 2))],
    "generators": [
        random.getstate(),
        np.random.default_rng(3).bit_generator.state["state"]["inc"] % 2**64,
        np.random.get_state(),
    ],
    "optimizer": torch.optim.Adam([torch.ones(2, requires_grad=True)]).state_dict(),
}


@pytest.mark.parametrize("value", KEPT.values(), ids=KEPT)
def test_comes_back_as_it_was(tmp_path: Path, value: Any) -> None:
    sync.save_state(to_plain({"value": value}), tmp_path / "s.safetensors")
    found = from_plain(sync.load_state(tmp_path / "s.safetensors"))["value"]
    if isinstance(value, list) and value and isinstance(value[0], defaultdict):
        assert [one.default_factory for one in found] == [one.default_factory for one in value]
    assert same(found, value)


@pytest.mark.parametrize(
    "value",
    [Kind.ONE, Text.A, Pair(1), MyDict(a=1), object(), print, Kind, defaultdict(lambda: 1), np.array([None]), torch.nn.Linear(1, 1), 1j],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_of_another_type_is_refused_where_it_stands(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"state\['a'\]\[0\] is an? .*, which save_state does not take"):
        sync.save_state(to_plain({"a": [value]}), tmp_path / "s.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_the_given_state_is_not_changed() -> None:
    state = {"a": [Path("x")], "b": {"c": {1}}}
    to_plain(state)
    assert state == {"a": [Path("x")], "b": {"c": {1}}}


def test_a_cycle_or_too_many_levels_end(tmp_path: Path) -> None:
    cycle: list[Any] = []
    cycle.append(cycle)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (cycle, deep):
        with pytest.raises((ValueError, stio.LimitError)):
            sync.save_state(to_plain(value), tmp_path / "s.safetensors")


def test_the_tag_is_no_key_of_the_callers() -> None:
    with pytest.raises(ValueError, match=r"'stio.type' is stio's own"):
        to_plain({"a": {TAG: "path"}})


@pytest.mark.parametrize(
    "tagged",
    [
        {TAG: "module", "value": 1},
        {TAG: ["path"], "value": 1},
        {TAG: "path", "value": 1},
        {TAG: "path"},
        {TAG: "set", "value": [[]]},
        {TAG: "set", "value": 3},
        {TAG: "namespace", "value": {1: 2}},
        {TAG: "namespace", "value": [1]},
        {TAG: "defaultdict", "value": {}},
        {TAG: "defaultdict", "value": {}, "factory": "eval"},
        {TAG: "defaultdict", "value": 3, "factory": "list"},
    ],
)
def test_a_tag_that_is_wrong(tagged: dict[str, Any]) -> None:
    with pytest.raises(stio.FormatError):
        from_plain([tagged])


def test_an_unknown_tag_is_shown_safely() -> None:
    with pytest.raises(stio.FormatError, match=r"found x\\x1b") as caught:
        from_plain({TAG: "x\x1b[31m", "value": 1})
    assert "\x1b" not in str(caught.value)
