"""Keywords that several public functions have: described once, in the docstring of each, and passed on by name.

    @described_by(load)
    def load_into(module, source, *, assign=False, device="cpu", ...):

In the source, the section `Args:` of `load_into` has what differs from `load`, and a last line that begins with `...:`
and names the page of the other keywords. When the function is defined, this line becomes their entries, in the order of
the signature, and the words "See `stio.load`." at the begin of an entry become the text that `load` has. So `help()`
shows all descriptions, and so does the site (`docs/hooks.py` does the same with the sources). An editor that reads the
source shows what is written there. Under `python -OO` there are no docstrings, and nothing is done.
"""

from __future__ import annotations

import inspect
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T", bound=Callable[..., Any])

_ENTRIES = re.compile(r"(?<=^Args:\n)(?:    .*\n?)+", re.MULTILINE)
_ENTRY = re.compile(r"^    (\S+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_SEE = re.compile(r"See `stio\.[\w.]+`\.\s*")
_REST = "..."


def keywords_for(takes: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a caller's arguments that a function or class takes by keyword.

    Args:
        takes: The function or class.
        given: The caller's `locals()`, before it has other variables.
    """
    return {name: given[name] for name in _keywords_of(takes) if name in given}


@cache
def _keywords_of(takes: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters of a function or class: to find them takes longer than a small load's other preparation."""
    return tuple(inspect.signature(takes).parameters)


def described_by(*sources: Callable[..., Any]) -> Callable[[T], T]:
    """Return a decorator that completes a docstring by those of others; of these the first counts."""

    def complete(target: T) -> T:
        if target.__doc__:
            names = inspect.signature(target).parameters
            target.__doc__ = completed(target.__doc__, names, [source.__doc__ or "" for source in sources])
        return target

    return complete


def completed(text: str, names: Iterable[str], sources: Iterable[str]) -> str:
    """Return a docstring with the descriptions that other docstrings have of the same keywords.

    Args:
        text: The docstring.
        names: Names of the parameters, in their order.
        sources: The other docstrings; the first one that describes a keyword counts.
    """
    own, known = descriptions(text), dict(ChainMap(*map(descriptions, sources)))
    entries = []
    for name in names:
        if name in own:
            added = _SEE.sub("", own[name], count=1) if _SEE.match(own[name]) and name in known else None
            described = own[name] if added is None else f"{known[name]}\n        {added}".rstrip()
        elif _REST in own and name in known:
            described = known[name]
        else:
            continue
        entries.append(f"    {name}: {described}\n")
    return _ENTRIES.sub(lambda _: "".join(entries), inspect.cleandoc(text) + "\n", count=1).rstrip()


def descriptions(text: str) -> dict[str, str]:
    """Return what a docstring says of each parameter."""
    found = _ENTRIES.search(inspect.cleandoc(text) + "\n")
    return {} if found is None else dict(_ENTRY.findall(found[0]))
