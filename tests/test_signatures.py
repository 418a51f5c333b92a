"""Keywords are spelled out in public signatures: the same names, defaults and order as in the options, and documented."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stio
import stio.distributed
import stio.sync

LOADS = ["load", "load_into", "open", "warm_start", "load_state"]
SAVES = ["save", "save_state"]
CLASSES = ["Checkpoint", "HostCache", "ModelPool", "Saver", "Stream", "WarmStart"]


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def fields(options: type) -> dict[str, Any]:
    """Return the fields that are keywords: what an object takes from the calling thread (its streams) is not shown."""
    return {field.name: field.default for field in dataclasses.fields(options) if field.repr}


@pytest.mark.parametrize("name", LOADS)
def test_loads_take_the_load_options(name: str) -> None:
    expected = fields(stio.LoadOptions)
    if name == "load_state":
        expected["memory"] = "copy"  # training writes in place
    found = defaults(getattr(stio, name))
    assert {key: found.get(key, "missing") for key in expected} == expected
    assert found.keys() - expected.keys() <= {"names", "slices", "placements", "assign", "order"}


@pytest.mark.parametrize("function", [*(getattr(stio, name) for name in SAVES), stio.Saver])
def test_saves_take_the_save_options(function: Callable[..., Any]) -> None:
    expected = fields(stio.SaveOptions)
    found = defaults(function)
    assert {key: found.get(key, "missing") for key in expected} == expected
    assert found.keys() - expected.keys() <= {"budget_bytes", "keep_last", "adopt", "max_pending", "when_full"}


RANKS = {"process_group", "rank_timeout"}
"""Keywords that only functions of many ranks have."""


def test_saves_of_many_ranks_take_what_others_take() -> None:
    many = stio.distributed
    for one, other in ((many.save, stio.save), (many.Saver, stio.Saver)):
        found = defaults(one)
        assert {key: value for key, value in found.items() if key not in RANKS} == defaults(other)
        assert found.keys() >= RANKS
        keywords = list(inspect.signature(one).parameters)
        text = inspect.getdoc(one) or ""
        assert [key for key in keywords if not re.search(rf"^    {key}: \S", text, re.M)] == []
    twins = stio.sync.distributed
    assert defaults(twins.Saver) == defaults(many.Saver) and defaults(twins.save) == defaults(many.save)
    assert issubclass(many.Saver, stio.Saver) and issubclass(twins.Saver, stio.sync.Saver)


@pytest.mark.parametrize("method", [stio.Saver.save, stio.Saver.save_state])
def test_a_savers_saves_inherit_what_is_not_given(method: Callable[..., Any]) -> None:
    found = defaults(method)
    assert found.keys() == fields(stio.SaveOptions).keys()
    assert set(map(repr, found.values())) == {"<the saver's own>"}


@pytest.mark.parametrize("name", [*LOADS, *SAVES, "convert"])
def test_every_keyword_is_explained(name: str) -> None:
    function = getattr(stio, name)
    text = inspect.getdoc(function) or ""
    missing = [key for key in inspect.signature(function).parameters if not re.search(rf"^    {key}: \S", text, re.M)]
    assert missing == []


@pytest.mark.parametrize("name", [*LOADS, *SAVES, "convert"])
def test_twins_have_the_same_signature_and_help(name: str) -> None:
    ours, theirs = getattr(stio.sync, name), getattr(stio, name)
    assert list(inspect.signature(ours).parameters.values()) == list(inspect.signature(theirs).parameters.values())
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_twin_classes_have_the_same_methods(name: str) -> None:
    ours, theirs = getattr(stio.sync, name), getattr(stio, name)
    assert defaults(ours) == defaults(theirs) or name in ("Checkpoint", "Stream", "WarmStart")  # made by functions
    for method, function in inspect.getmembers(theirs, inspect.isfunction):
        if not method.startswith("_") and method != "aclose":
            assert defaults(getattr(ours, method)) == defaults(function), method
    assert callable(ours.close)


CALLS: dict[str, Callable[..., Any]] = {
    "load": stio.sync.load,
    "load_into": lambda **k: stio.sync.load_into(torch.nn.Linear(1, 1), "x", **k),
    "open": stio.open,
    "load_state": stio.sync.load_state,
    "save": lambda **k: stio.sync.save({}, "x", **k),
    "save_state": lambda **k: stio.sync.save_state({}, "x", **k),
    "warm_start": lambda **k: stio.warm_start(torch.nn.Linear(1, 1), "x", **k),
    "convert": lambda **k: stio.sync.convert("x", "y", **k),
    "Saver": stio.Saver,
    "Saver.save": lambda **k: stio.sync.Saver().save({}, "x", **k),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_mistyped_keyword_names_the_function(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name}.*unexpected keyword argument 'devcie'") as caught:
        CALLS[name](devcie="cpu")
    assert "Options" not in str(caught.value)
