"""Text for readers: times, sizes and counts, log lines, URLs without their secrets, and docstrings of keywords.

Keywords that several public functions have are described once, in the docstring of each, and passed on by name:

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
import logging
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

from stio import clock
from stio.schemes import READERS, scheme_of

_NUMBER = re.compile("([0-9]+)")


def show_seconds(seconds: float) -> str:
    """Return a time as text: `1.52 s`, `0.42 s`, `20.1 ms`, `7 µs`."""
    if seconds >= 99.95:
        return f"{seconds:,.0f} s"
    if seconds >= 0.09995:
        return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds:.2f} s"
    if seconds >= 0.0009995:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.0f} µs"


def show_bytes(nbytes: float) -> str:
    """Return a size as text, in powers of ten: `512 B`, `32 MB`, `1.74 GB`."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1000
        units.pop(0)
    return f"{value:,.0f} {units[0]}" if value >= 99.95 or units[0] == "B" else f"{value:.3g} {units[0]}"


def counted(number: int, noun: str) -> str:
    """Return a number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def natural_key(name: str) -> tuple[list[Any], str]:
    """Return a key that sorts names with numbers by their values: `layers.2` before `layers.10`."""
    parts: list[Any] = _NUMBER.split(name)
    # By length, then by digits: the interpreter refuses to convert thousands of digits.
    parts[1::2] = ((len(digits), digits) for digits in (part.lstrip("0") for part in parts[1::2]))
    return parts, name


# Log lines. A handler of the user's that raises must not change the outcome of a load or a save.

_logger = logging.getLogger("stio")


def log(level: int, message: str, *values: object) -> None:
    """Log one line under "stio"; errors of filters and handlers are ignored.

    Args:
        level: A level of `logging`.
        message: The line, with `%` placeholders.
        values: Values of the placeholders. Of an error its text is logged: a handler may keep the record, and the error
            refers to the frames of callers.
    """
    with suppress(Exception):
        if _logger.isEnabledFor(level):
            texts = [str(value) if isinstance(value, BaseException) else value for value in values]
            _logger.log(level, message, *texts, stacklevel=2)


class RareWarnings:
    """Levels for failures that may come in large numbers: the first is a warning, then one after growing pauses."""

    def __init__(self) -> None:
        self._quiet_until = 0.0
        self._quiet_seconds = 5.0

    def level(self) -> int:
        """Return the level of a line that is logged now: WARNING, or INFO if there was a warning a short time ago."""
        now = clock.monotonic()
        if now < self._quiet_until:
            return logging.INFO
        self._quiet_until, self._quiet_seconds = now + self._quiet_seconds, 2 * self._quiet_seconds
        return logging.WARNING


# URLs of remote stores.


_PASSWORD = re.compile(r"[^\[\]:]*:(?!\d*$)")  # no port follows the colon
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)([^/?#]*)(.*)", re.DOTALL)


def is_url(place: object) -> bool:
    """Return whether a source is text that names a store by a registered scheme."""
    return isinstance(place, str) and "://" in place and scheme_of(place) in READERS


def without_secrets(text: str) -> str:
    """Return a URL as it may be shown and logged: without user, password, query and fragment; other text unchanged.

    A query may hold a signature, which gives access to the data. Where a slash is missing, text is a URL if a store's
    scheme says so.
    """
    match = _URL.fullmatch(text)
    if match is None or (match[2] == "/" and match[1].lower() not in READERS):
        return text
    scheme, slashes, host, rest = match.groups()
    if _PASSWORD.match(host) and "@" in rest:  # a password with "/", "?" or "#" that is not escaped
        return without_secrets(f"{scheme}:{slashes}{(host + rest).partition('@')[2]}")
    return f"{scheme}:{slashes}{host.rpartition('@')[2]}{re.split('[?#]', rest, maxsplit=1)[0]}"


# Docstrings of keywords.

T = TypeVar("T", bound=Callable[..., Any])

_ENTRIES = re.compile(r"(?<=^Args:\n)(?:    .*\n?)+", re.MULTILINE)
_ENTRY = re.compile(r"^    (\S+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_SEE = re.compile(r"See `stio\.[\w.]+`\.\s*")
_REST = "..."


def keywords_for(takes: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of a caller's arguments that a function or class takes by keyword.

    Args:
        takes: The function or class.
        arguments: The caller's `locals()`, before it has other variables.
    """
    return {name: arguments[name] for name in _keywords_of(takes) if name in arguments}


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
    match = _ENTRIES.search(inspect.cleandoc(text) + "\n")
    return {} if match is None else dict(_ENTRY.findall(match[0]))
