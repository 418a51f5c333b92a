"""What the hub's serializer does with tensors: their storages and sizes, names to drop, and the split into files.

Of names whose tensors overlap on one storage, one is saved: the first of those that cover the storage. The bytes that a
tensor uses come from `stio.device.describe`, as in any save. A tensor without overlap is saved whether or not it covers
its storage.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stio.device.describe import describe_tensors
from stio.device.tensor_memory import ON_META
from stio.device.torch_private import conj_neg_bits
from stio.errors import DeviceError, SharedTensorsError, printable
from stio.format.naming import index_name
from stio.format.sharding import TensorSource, split_into_shards
from stio.format.shared import overlap_groups
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
    """Return a size in bytes, by the rules of the original. `max_shard_size` takes more; see `stio.save`.

    Args:
        size_as_str: A number and a unit, in any case: KB, MB, GB or TB, which are powers of ten.

    Raises:
        ValueError: Another unit, no number, or not a positive, finite size.
    """
    text = size_as_str.strip()
    if text[-2:].upper() not in _UNITS:
        units = ", ".join(_UNITS)
        raise ValueError(
            f"Unit '{printable(text[-2:].upper())}' not supported: {printable(text)!r} has none of {units}"
        )
    return _size_of(text)


_UNITS = ("KB", "MB", "GB", "TB")


def _size_of(size: str) -> int:
    try:
        return parse_size(size)
    except ValueError as error:
        raise ValueError(f"Could not parse the size value from {printable(size)!r}: {error}") from None


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
        max_shard_size: Most bytes in one file: a number, or text with a unit (`"5GB"`, `"4GiB"`).

    Raises:
        ValueError: A pattern without `{suffix}` (files would overwrite each other), or a malformed size.
    """
    max_shard_bytes = _max_bytes(max_shard_size)
    index_name(filename_pattern)  # raises for a pattern by which files would overwrite each other
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
        return _size_of(size)
    if not 0 <= size < inf:
        raise ValueError(f"max_shard_size must be zero or more bytes, and finite, not {size}")
    return int(size)


def require_plain(pattern: str) -> None:
    """Require a pattern that names files of one directory."""
    if set(index_name(pattern)) & {"/", "\\", "\0"}:
        raise ValueError(f"filename_pattern {printable(pattern)!r} must name files, without a directory or NUL")


_DISTRIBUTED = "torch.distributed.tensor"
_SHOWN_NAMES = 5


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a `DTensor`. The module is slow to import; without it there is no such tensor."""
    module = sys.modules.get(_DISTRIBUTED)
    return module is not None and isinstance(tensor, module.DTensor)


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is a subclass around others, with no memory of its own."""
    return is_traceable_wrapper_subclass(tensor)


def _inner(tensor: Any) -> list[torch.Tensor] | None:
    """Return the tensors that a wrapper subclass consists of, None for one that is no wrapper."""
    if not is_wrapper(tensor):
        return None
    names, _ = tensor.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def get_torch_storage_id(tensor: torch.Tensor) -> tuple[torch.device, int | tuple[Any, ...], int] | None:
    """Return a key that is equal for tensors on one storage: device, address, size; None on meta.

    The address is that of the local part for a distributed tensor, and a nested tuple for a wrapper around others.
    """
    if tensor.device.type == "meta":
        return None
    return tensor.device, _address(tensor), get_torch_storage_size(tensor)


def _address(tensor: Any) -> int | tuple[Any, ...]:
    """Return the address of a storage; for a wrapper the addresses of the tensors in it, nested in the same way."""
    if _is_distributed(tensor):
        return int(tensor.to_local().untyped_storage().data_ptr())
    inner = _inner(tensor)
    if inner is not None:
        return tuple(map(_address, inner))
    return int(tensor.untyped_storage().data_ptr())


def get_torch_storage_size(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage: all of a distributed tensor, the sum over the tensors in a wrapper."""
    if _is_distributed(tensor):
        return int(tensor.nbytes)
    inner = _inner(tensor)
    if inner is not None:
        return sum(map(get_torch_storage_size, inner))
    return tensor.untyped_storage().nbytes()


def covers_storage(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are exactly its storage, in any order of dimensions."""
    if tensor.storage_offset() or tensor.nbytes != tensor.untyped_storage().nbytes():
        return False
    if not tensor.nbytes:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def as_counted(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with a storage of its own, of as many bytes as this one needs in a file."""
    if covers_storage(tensor) and not any(conj_neg_bits(tensor)):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def require_contiguous(tensors: Mapping[str, torch.Tensor]) -> None:
    """Require that all tensors have the layout of a file.

    Raises:
        ValueError: A tensor is not contiguous.
    """
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            raise ValueError(
                f"the tensor {printable(name)!r} is non contiguous, and a file holds contiguous ones; call "
                "`.contiguous()` on it, or save with `force_contiguous=True`"
            )


def discard_shared(
    tensors: Mapping[str, torch.Tensor], discard: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Drop all but one of the names that share memory.

    Args:
        tensors: By name; not changed.
        discard: Names to drop if another name of the same memory can be saved.

    Returns:
        The remaining tensors, in their order; and for each dropped name the name that is saved instead.

    Raises:
        SharedTensorsError: Tensors overlap, and none of them covers the storage.
        DeviceError: A tensor on meta.
        TypeError: A value is not a tensor, or a tensor without memory of its own; a name is not text.
        ValueError: A tensor that cannot be saved: sparse, nested, freed.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise DeviceError(f"tensor {printable(name)!r} {ON_META}")
    storages: defaultdict[Hashable, list[TensorSource]] = defaultdict(list)
    for source in describe_tensors(tensors):
        if source.storage_key is not None:
            # With a pending conjugation or negation the same memory has other values: no duplicate.
            storages[source.storage_key, conj_neg_bits(source.data)].append(source)
    dropped: dict[str, str] = {}
    for storage in storages.values():
        for names in overlap_groups((*source.span, source.name) for source in storage):
            if len(names) > 1:
                chosen = _choose(names, tensors, discard)
                dropped |= {name: chosen for name in sorted(names) if name != chosen}
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}, dropped


def _choose(names: Sequence[str], tensors: Mapping[str, torch.Tensor], discard: Collection[str]) -> str:
    covering = sorted(name for name in names if covers_storage(tensors[name]))
    if not covering:
        shown = ", ".join(repr(printable(name)) for name in sorted(names)[:_SHOWN_NAMES])
        raise SharedTensorsError(
            f"found no suitable name to keep for saving amongst: {shown}{', ...' * (len(names) > _SHOWN_NAMES)}. They "
            "share memory, and none is covering the entire storage: without the others it would not be all there. "
            "Clone them first, each by itself, or save by `stio.save`, which saves such tensors"
        )
    return next((name for name in covering if name not in discard), covering[0])
