"""Keywords are spelled out in public signatures: the same names, defaults and order as in the options, and described."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crash.zygote import Zygote
from support import run_python

import stio
import stio.distributed
import stio.sync
from stio.text import described_by, descriptions

LOADS = ["load", "load_into", "open", "warm_start", "load_state"]
SAVES = ["save", "save_state"]
CLASSES = ["Checkpoint", "Follower", "HostCache", "ModelPool", "Saver", "Stream", "WarmStart"]


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
    assert found.keys() - expected.keys() <= {
        "base",
        "budget_bytes",
        "keep_last",
        "keep_every",
        "drop_higher",
        "adopt",
        "full_every",
        "max_pending",
        "when_full",
    }


RANKS = {"process_group", "rank_timeout"}
"""Keywords that only functions of many ranks have."""
DELTAS = {"base", "full_every"}
"""Keywords that those do not have: many ranks save no deltas."""


def test_saves_of_many_ranks_take_what_others_take() -> None:
    many = stio.distributed
    for one, other in ((many.save, stio.save), (many.Saver, stio.Saver)):
        found = defaults(one)
        expected = {key: value for key, value in defaults(other).items() if key not in DELTAS}
        assert {key: value for key, value in found.items() if key not in RANKS} == expected
        assert found.keys() >= RANKS
    twins = stio.sync.distributed
    assert defaults(twins.Saver) == defaults(many.Saver) and defaults(twins.save) == defaults(many.save)
    assert issubclass(many.Saver, stio.Saver) and issubclass(twins.Saver, stio.sync.Saver)


@pytest.mark.parametrize("method", [stio.Saver.save, stio.Saver.save_state])
def test_a_savers_saves_inherit_what_is_not_given(method: Callable[..., Any]) -> None:
    found = defaults(method)
    assert found.keys() == fields(stio.SaveOptions).keys()
    assert set(map(repr, found.values())) == {"<the saver's own>"}


DESCRIBED = [
    *(
        f"stio.{name}"
        for name in [*LOADS, *SAVES, "convert", "follow", "Saver", "Saver.save", "Saver.save_state", "ModelPool"]
    ),
    *(f"stio.Checkpoint.{name}" for name in ("load", "read", "stream", "load_into")),
    *(f"stio.ModelPool.{name}" for name in ("add", "use", "prefetch", "update", "follow")),
    *("stio.HostCache", "stio.HostCache.prefetch", "stio.DiskCache"),
    *(f"stio.distributed.{name}" for name in ("load_into", "save", "Saver", "StioStorageReader", "StioStorageWriter")),
]
ROOT = Path(__file__).parents[1]


def found_by(path: str) -> Any:
    found: Any = stio
    for name in path.split(".")[1:]:
        found = getattr(found, name)
    return found


def undescribed(function: Callable[..., Any], text: str) -> list[str]:
    """Return the parameters that a docstring does not describe; a reference to another page is no description."""
    known = descriptions(text)
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    return [name for name in names if re.fullmatch(r"(See `[\w.]+`\.)?", known.get(name, ""))]


@pytest.mark.parametrize("path", DESCRIBED)
def test_every_keyword_is_described(path: str) -> None:
    function = found_by(path)
    text = inspect.getdoc(function) or ""
    assert undescribed(function, text) == []
    assert not any(
        name == "..." or described.startswith("See `stio.") for name, described in descriptions(text).items()
    )


def test_a_keyword_without_a_description_is_found() -> None:
    def function(first: int, second: int, third: int) -> None:
        """Do nothing.

        Args:
            first: A number.
            second: See `stio.load`.
        """

    assert undescribed(function, inspect.getdoc(function) or "") == ["second", "third"]


def test_descriptions_are_taken_over() -> None:
    def first(source: str, *, strict: bool = True, trace: object = None) -> None:
        """Load.

        Args:
            source: A file,
                or a directory.
            strict: All names.
            trace: A trace.

        Returns:
            Nothing.
        """

    @described_by(first)
    def second(module: object, source: str, *, strict: bool = True, trace: object = None) -> None:
        """Load more.

        Args:
            module: The target.
            strict: See `stio.first`. Also of the module.
            ...: The other arguments are those of `stio.first`.

        Raises:
            ValueError: It is wrong.
        """

    assert inspect.getdoc(second) == (
        "Load more.\n\nArgs:\n    module: The target.\n    source: A file,\n        or a directory.\n"
        "    strict: All names.\n        Also of the module.\n    trace: A trace.\n\n"
        "Raises:\n    ValueError: It is wrong."
    )


@pytest.mark.slow
def test_without_docstrings_nothing_is_described(torch_zygote: Zygote) -> None:
    """As with `python -OO`, which would compile all of torch too."""
    code = """
    from importlib.machinery import SourceFileLoader
    SourceFileLoader.get_code = lambda self, _: compile(self.get_data(self.path), self.path, "exec", optimize=2)
    import stio.sync, stio.distributed
    print(stio.load_into.__doc__, stio.sync.Saver.__doc__, stio.Saver.__doc__)
    """
    done = run_python(code, python=torch_zygote.python)
    assert (done.stdout, done.returncode) == ("None None None\n", 0), done.stderr


@pytest.mark.slow
def test_the_site_describes_what_help_describes() -> None:
    """The site reads sources only."""
    griffe = pytest.importorskip("griffe")
    pytest.importorskip("mkdocs")
    extensions = griffe.load_extensions(f"{ROOT / 'docs' / 'hooks.py'}:Keywords")
    package = griffe.load("stio", extensions=extensions, search_paths=[ROOT])
    for path in DESCRIBED:
        described = found_by(path)
        public = package[f"{described.__module__}.{described.__qualname__}".removeprefix("stio.")]
        assert public.docstring.value == inspect.getdoc(described), path
    for name in ("ModelPool", "Saver"):
        expected = list(inspect.signature(getattr(stio, name)).parameters)
        assert [one.name for one in package["sync"][name].parameters] == ["self", *expected]


@pytest.mark.parametrize("name", [*LOADS, *SAVES, "convert", "follow"])
def test_twins_have_the_same_signature_and_help(name: str) -> None:
    ours, theirs = getattr(stio.sync, name), getattr(stio, name)
    assert list(inspect.signature(ours).parameters.values()) == list(inspect.signature(theirs).parameters.values())
    assert inspect.getdoc(ours) == inspect.getdoc(theirs)


@pytest.mark.parametrize("name", CLASSES)
def test_twin_classes_have_the_same_methods(name: str) -> None:
    ours, theirs = getattr(stio.sync, name), getattr(stio, name)
    assert defaults(ours) == defaults(theirs) or name in (
        "Checkpoint",
        "Follower",
        "Stream",
        "WarmStart",
    )  # made by functions
    for method, function in inspect.getmembers(theirs, inspect.isfunction):
        if not method.startswith("_") and method != "aclose":
            assert defaults(getattr(ours, method)) == defaults(function), method
    assert callable(ours.close)


CALLS: dict[str, Callable[..., Any]] = {
    "load": stio.sync.load,
    "load_into": lambda **k: stio.sync.load_into(torch.nn.Linear(1, 1), "x", **k),
    "open": stio.open,
    "follow": lambda **k: stio.follow({}, "x", **k),
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
