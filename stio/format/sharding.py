"""Tensors to be saved, how they are split into shards, and the bytes of the index over the shards.

Split and index equal those of the hub's saver to the byte, so that its readers read stio's checkpoints. A tensor is
described by a value, `TensorSource`; no torch is needed here.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

from stio.format.gil_slices import row_slices
from stio.format.header import require_text

_TOTAL_SIZE = "total_size"
_TOTAL_PARAMETERS = "total_parameters"


@dataclass(slots=True, kw_only=True)  # not frozen: making 60,000 takes 25 ms instead of 80
class TensorSource:
    """A tensor to be saved, described for packages without torch. It is not changed once it is made."""

    name: str
    """Name in the checkpoint."""
    dtype: str
    """Dtype as the format spells it."""
    shape: tuple[int, ...]
    """Dimensions as in the header: for F4 the last one counts elements, not pairs."""
    nbytes: int
    """Bytes of its data in the file."""
    storage_key: Hashable | None
    """Equal exactly for tensors on one storage; None if the tensor cannot share memory with another."""
    span: tuple[int, int]
    """Range of bytes that the tensor uses in that storage, half-open."""
    layout: Hashable
    """What else must be equal, besides the span, if two names are one tensor: strides, pending conjugation."""
    data: Any
    """The tensor, from which the device package copies the bytes."""


def split_into_shards(sizes: Iterable[tuple[str, int, Hashable | None]], max_shard_bytes: int) -> list[list[str]]:
    """Split tensors into shards by the hub's greedy rule.

    In the order given, a tensor that would make the open shard larger than the maximum starts a new one. One that is
    larger than the maximum by itself becomes a shard of its own at once, before the one that is open.

    Args:
        sizes: Name, bytes and storage of each. Later tensors of one storage join the shard of its first one, and
            are not counted; None is a storage of its own.
        max_shard_bytes: Largest shard, headers not counted.

    Returns:
        The names in each shard; without tensors there are no shards.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    current_bytes = 0
    shard_of: dict[Hashable, list[str]] = {}
    later: list[tuple[Hashable, str]] = []
    for name, nbytes, storage in sizes:
        if storage is not None and storage in shard_of:
            later.append((storage, name))
            continue
        if nbytes > max_shard_bytes:
            shard = [name]
            shards.append(shard)
        else:
            if current_bytes + nbytes > max_shard_bytes:
                shards.append(current)
                current, current_bytes = [], 0
            current.append(name)
            current_bytes += nbytes
            shard = current
        if storage is not None:
            shard_of[storage] = shard
    if current:
        shards.append(current)
    followers: dict[Hashable, list[str]] = {storage: [] for storage in shard_of}
    for storage, name in later:
        followers[storage].append(name)
    for storage, names in followers.items():  # storage by storage, as the hub does: the index keeps this order
        shard_of[storage].extend(names)
    return shards


def build_index(weight_map: Mapping[str, str], total_bytes: int, metadata: Mapping[str, str | int]) -> bytes:
    """Return the bytes of an index, as the hub writes it by `json.dump(indent=2)`.

    Composed line by line (`gil_slices.py`).

    Args:
        weight_map: Shard of each tensor, in the order to be written.
        total_bytes: Bytes of all tensors, each storage counted once.
        metadata: Text to store beside `total_size`; sorted, so that equal checkpoints are equal files. The hub's
            `total_parameters` may be a number.

    Raises:
        TypeError: A name, shard, metadata key or value is not text.
        ValueError: The metadata hold `total_size`, or a text holds half of a surrogate pair.
    """
    entries = {_TOTAL_SIZE: str(operator.index(total_bytes))}
    if _TOTAL_SIZE in metadata:
        raise ValueError(f"the index counts {_TOTAL_SIZE!r} itself; leave it out of the metadata")
    texts: dict[str, Any] = dict(metadata)
    if type(texts.get(_TOTAL_PARAMETERS)) is int:
        entries[_TOTAL_PARAMETERS] = str(texts.pop(_TOTAL_PARAMETERS))
    require_text(list(texts.items()), "metadata")
    entries |= {key: encode_basestring_ascii(value) for key, value in sorted(texts.items())}
    shards = {shard: encode_basestring_ascii(shard) for shard in dict.fromkeys(weight_map.values())}
    pairs = list(weight_map.items())
    parts = []
    for rows in row_slices(len(pairs)):
        part = pairs[rows]
        require_text(part, "weight_map")
        lines = [f"    {encode_basestring_ascii(name)}: {shards[shard]}" for name, shard in part]
        parts.append(",\n".join(lines).encode())
    described = ",\n".join(f"    {encode_basestring_ascii(key)}: {value}" for key, value in entries.items())
    mapped = b"{\n" + b",\n".join(parts) + b"\n  }" if parts else b"{}"
    return b'{\n  "metadata": {\n' + described.encode() + b'\n  },\n  "weight_map": ' + mapped + b"\n}"
