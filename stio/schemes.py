"""The schemes of URLs, and the modules that read from and save to them.

Packages above the core register their schemes, by the names of modules: these import packages that are not installed
everywhere, and are needed with a URL only. What is registered here is a URL for all of stio.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

READERS: dict[str, str] = {}
"""By scheme, the module that opens a URL for reading."""
SAVERS: dict[str, str] = {}
"""By scheme, the module that opens a URL for saves."""


def register(schemes: Iterable[str], *, reads: str, saves: str | None = None) -> None:
    """Have modules open the URLs with these schemes.

    Args:
        schemes: The schemes, in lower case.
        reads: Name of the module with `open_url` and `place_of_url`, as `stio.storage.open` has them.
        saves: Name of the module with `open_destination`; None: nothing is saved there.
    """
    for scheme in schemes:
        READERS[scheme] = reads
        if saves is not None:
            SAVERS[scheme] = saves


def scheme_of(url: str) -> str:
    """Return the scheme of a URL, in lower case."""
    return url.partition("://")[0].lower()


def reader_of(url: str) -> Any:
    """Return the module that opens a URL for reading."""
    return import_module(READERS[scheme_of(url)])


def saver_of(url: str) -> Any:
    """Return the module that opens a URL for saves; None: nothing is saved there."""
    name = SAVERS.get(scheme_of(url))
    return None if name is None else import_module(name)
