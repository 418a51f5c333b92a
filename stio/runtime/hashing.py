"""TODO."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib import import_module
from typing import Literal, Protocol, cast

__all__ = ["ALGORITHMS", "HashName", "Hasher", "new_hasher"]


HashName = Literal["sha256", "xxh3"]
"""What `hash=` takes: SHA-256, or the 128 bits of XXH3 (faster, and no protection against forgery)."""


ALGORITHMS: Mapping[str, int] = {"sha256": 64, "xxh3": 32}
"""Hexadecimal digits of each algorithm's digest."""


class Hasher(Protocol):
    """What `hashlib` and `xxhash` give."""

    def update(self, data: memoryview, /) -> None:
        """Take in further bytes; without the GIL if they are many."""

    def hexdigest(self) -> str:
        """Return the digest of all bytes so far."""


def new_hasher(algorithm: str) -> Hasher:
    """Return a fresh hasher; also the check of what `hash=` was given.

    Raises:
        ValueError: There is no such algorithm.
        ImportError: It is `xxh3`, and xxhash is not installed.
    """
    if algorithm not in ALGORITHMS:
        raise ValueError(f"hash= takes one of {', '.join(map(repr, ALGORITHMS))}, not {algorithm!r}")
    if algorithm == "sha256":
        return hashlib.sha256()
    try:
        return cast(Hasher, import_module("xxhash").xxh3_128())
    except ImportError as error:
        raise ImportError("the hash xxh3 comes from the package xxhash: pip install xxhash") from error
