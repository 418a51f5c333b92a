"""The hash algorithms of manifests: their names, the length of their digests, and a new hasher by name.

SHA-256 comes from the standard library. XXH3 comes from the package xxhash (extra `hash`), imported at its first use.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import import_module
from typing import Literal, Protocol, cast

from stio.errors import install_command

HashName = Literal["sha256", "xxh3"]
"""Values of `hash=`: SHA-256, or XXH3 with 128 bits (faster, but no protection against forgery)."""

ALGORITHMS: Mapping[str, int] = {"sha256": 64, "xxh3": 32}
"""Number of hexadecimal digits in a digest of each algorithm."""


class Hasher(Protocol):
    """The interface that `hashlib` and `xxhash` share."""

    def update(self, data: memoryview, /) -> None:
        """Add bytes; releases the GIL if there are many."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


def new_hasher(algorithm: str) -> Hasher:
    """Return a new hasher; also the check of a `hash=` argument.

    Raises:
        ValueError: There is no such algorithm.
        ImportError: The algorithm is `xxh3`, and xxhash is not installed.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"hash= takes one of {', '.join(map(repr, ALGORITHMS))}, not {algorithm!r}")
    if algorithm == "sha256":
        return hashlib.sha256()
    try:
        return cast(Hasher, import_module("xxhash").xxh3_128())
    except ImportError as error:
        raise ImportError(f"the hash xxh3 comes from the package xxhash: {install_command('hash')}") from error
