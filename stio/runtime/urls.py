"""URLs of remote stores: which text is one, and how it is shown without its secrets. Only text; no I/O."""

from __future__ import annotations

import re

SCHEMES = ("s3", "gs", "az", "http", "https", "hf")
"""Schemes of the stores that stio reads, and of the Hugging Face hub."""
SAVED_SCHEMES = ("s3", "gs", "az")
"""Schemes of the stores to which stio saves."""

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//?)([^/?#]*)(.*)", re.DOTALL)


def is_url(place: object) -> bool:
    """Return whether a source is text that names a store by one of `SCHEMES`."""
    return isinstance(place, str) and place.partition("://")[0].lower() in SCHEMES and "://" in place


def without_secrets(text: str) -> str:
    """Return a URL as it may be shown and logged: without user, password, query and fragment; other text unchanged.

    A query may hold a signature, which gives access to the data. Where a slash is missing, text is a URL if a store's
    scheme says so.
    """
    found = _URL.fullmatch(text)
    if found is None or (found[2] == "/" and found[1].lower() not in SCHEMES):
        return text
    scheme, slashes, host, rest = found.groups()
    return f"{scheme}:{slashes}{host.rpartition('@')[2]}{re.split('[?#]', rest, maxsplit=1)[0]}"
