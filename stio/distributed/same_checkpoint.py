"""Whether ranks have opened the same checkpoint: a save may have replaced it between the opens of two of them.

Each rank describes what it has opened. Ranks that have opened files at one place must have opened the same files. A
place is a path on one filesystem of one machine, or a URL: other hosts may have copies of their own.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence

from stio.errors import ChangedDuringReadError
from stio.loading.open import OpenCheckpoint
from stio.runtime.urls import is_url
from stio.storage.commit.directory_lock import boot_id

_DIGEST_BYTES = 16


def describe_opened(opened: OpenCheckpoint, source: object) -> bytes:
    """Return what ranks compare by `require_same`; empty if another rank cannot compare it.

    Args:
        opened: The checkpoint.
        source: As the caller named it: a link may lead elsewhere now.
    """
    if not isinstance(source, str | os.PathLike):
        return b""
    name, identities = os.fspath(source), [file.identity for file in opened.files]
    if all(one.etag for one in identities):
        place, states = repr(name), [one.etag for one in identities]
    elif boot_id() and all(one.device for one in identities):
        devices = sorted({one.device for one in identities})
        place = repr((boot_id(), name if is_url(name) else os.path.abspath(name), devices))
        states = [f"{one.nbytes} {one.mtime_ns}" for one in identities]
    else:
        return b""
    files = [(header.shard, state) for header, state in zip(opened.headers, states, strict=True)]
    return _digest(place) + _digest(repr(files))


def require_same(found: Sequence[bytes], *, path: str) -> None:
    """Require that ranks have opened the same checkpoint.

    Args:
        found: `describe_opened` of each rank.
        path: For messages.

    Raises:
        ChangedDuringReadError: Two ranks have opened different files at the same place.
    """
    first: dict[bytes, int] = {}
    for rank, one in enumerate(found):
        other = first.setdefault(one[:_DIGEST_BYTES], rank)
        if found[other] != one:
            raise ChangedDuringReadError(
                f"ranks {other} and {rank} have opened different checkpoints: it was replaced between their opens; "
                "load it again",
                path=path,
            )


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
