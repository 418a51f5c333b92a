"""The split of tensors of any kind into files, as in the hub: text to sizes, the greedy rule, names by a pattern."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, TypeVar

from stio.errors import printable
from stio.format.naming import index_name
from stio.format.sharding import split_into_shards
from stio.runtime.limits import parse_size

logger = logging.getLogger("stio")

MAX_SHARD_SIZE = "5GB"

T = TypeVar("T")


@dataclass
class StateDictSplit:
    """The result of a split: the files, and the tensors in each."""

    is_sharded: bool = field(init=False)
    """Whether there is more than one file."""
    metadata: dict[str, Any]
    """`total_size`, the bytes of all tensors."""
    filename_to_tensors: dict[str, list[str]]
    """Names of the tensors in each file."""
    tensor_to_filename: dict[str, str]
    """File of each tensor."""

    def __post_init__(self) -> None:
        self.is_sharded = len(self.filename_to_tensors) > 1


def parse_size_to_int(size_as_str: str) -> int:
    """Return a size in bytes.

    Args:
        size_as_str: A number and a unit, in any case: KB, MB, GB, TB are powers of ten, KiB, MiB, GiB, TiB of two.
            Digits alone are bytes.

    Raises:
        ValueError: No such unit, no number, negative or infinite.
    """
    text = size_as_str.strip()
    try:
        return parse_size(text)
    except ValueError:
        pass
    number, num_units = re.subn("(?i)[kmgt]i?b$", "", text)
    try:
        if 0 <= float(number) < 1 and (num_units or number.isdecimal()):
            return 0  # an error in stio; in the hub, a shard for each tensor
    except ValueError:
        if not num_units:
            raise ValueError(
                f"Unit {printable(text[-2:].upper())!r} not supported. Supported units are TB, GB, MB, KB, and TiB, "
                f"GiB, MiB, KiB. Got {printable(text)!r}."
            ) from None
    raise ValueError(
        f"Could not parse the size value from {printable(text)!r}: a positive, finite number and a unit are wanted"
    )


def split_state_dict_into_shards_factory(
    state_dict: Mapping[str, T],
    *,
    get_storage_size: Callable[[T], int],
    filename_pattern: str,
    get_storage_id: Callable[[T], Hashable | None] = lambda tensor: None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> StateDictSplit:
    """Split tensors of any kind into files, greedily, in the order of the keys.

    A tensor larger than the maximum becomes a file of its own. Later tensors of one storage join the file of the
    first one, and are not counted. Values that are text are left out.

    Args:
        state_dict: Tensors by name.
        get_storage_size: Returns the bytes that a tensor takes.
        filename_pattern: Pattern of the files' names; `{suffix}` becomes empty or `-00001-of-00003`.
        get_storage_id: Returns a key that is equal for tensors on one storage, None for a storage of its own.
        max_shard_size: Most bytes in one file; see `parse_size_to_int`.

    Raises:
        ValueError: A pattern without `{suffix}` (files would overwrite each other), or a malformed size.
    """
    max_shard_bytes = _max_bytes(max_shard_size)
    require_suffix(filename_pattern)
    seen: set[Hashable] = set()
    total_bytes = 0

    def sizes() -> Iterator[tuple[str, int, Hashable | None]]:
        nonlocal total_bytes
        for name, tensor in state_dict.items():
            if isinstance(tensor, str):
                logger.info("%s is left out: it is text, as quantizing libraries put beside tensors", printable(name))
                continue
            storage, nbytes = get_storage_id(tensor), 0
            if storage is None or storage not in seen:
                nbytes = get_storage_size(tensor)
                total_bytes += nbytes
                if storage is not None:
                    seen.add(storage)
            yield name, nbytes, storage

    shards = split_into_shards(sizes(), max_shard_bytes)
    num = len(shards)
    suffixes = [""] if num == 1 else [f"-{k + 1:05d}-of-{num:05d}" for k in range(num)]
    files = {filename_pattern.format(suffix=suffix): names for suffix, names in zip(suffixes, shards, strict=True)}
    return StateDictSplit(
        metadata={"total_size": total_bytes},
        filename_to_tensors=files,
        tensor_to_filename={name: file for file, names in files.items() for name in names},
    )


def _max_bytes(size: int | str) -> int:
    if isinstance(size, str):
        return parse_size_to_int(size)
    if size < 0 or not isfinite(size):
        raise ValueError(f"max_shard_size must be zero or more bytes, and finite, not {size}")
    return int(size)


def require_suffix(pattern: str) -> None:
    """Require a pattern that gives each shard a distinct name."""
    try:
        distinct = pattern.format(suffix="-") != pattern.format(suffix="")
    except (KeyError, IndexError):
        distinct = False
    if not distinct:
        raise ValueError(
            f"filename_pattern {printable(pattern)!r} must hold '{{suffix}}', and nothing else in braces: the shards "
            "would overwrite each other"
        )


def require_plain(pattern: str) -> None:
    """Require a pattern that names files of one directory."""
    require_suffix(pattern)
    if set(index_name(pattern)) & {"/", "\\", "\0"}:
        raise ValueError(f"filename_pattern {printable(pattern)!r} must name files, without a directory or NUL")
