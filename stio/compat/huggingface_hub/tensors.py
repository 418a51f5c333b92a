"""Tensors as the hub's serializer sees them: which memory they are on, how large it is, which names to drop.

Names whose tensors overlap on one storage are saved once: the first name among those that cover the storage stays.
Which bytes a tensor touches comes from `device/sources.py`, as for any save; a tensor that shares nothing is saved
whether or not it covers its storage.
"""

from __future__ import annotations

import math
import operator
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stio.device.copy_out import pending
from stio.device.save_sources import sources_of
from stio.errors import DeviceError, SharedTensorsError, printable
from stio.format.sharding import TensorSource

__all__ = [
    "as_counted",
    "covers_storage",
    "discard_shared",
    "is_wrapper",
    "require_contiguous",
    "storage_id",
    "storage_nbytes",
    "tf_nbytes",
]

_DISTRIBUTED = "torch.distributed.tensor"
_SHOWN_NAMES = 5


def _is_distributed(tensor: torch.Tensor) -> bool:
    """Return whether it is a `DTensor`; who has one has imported the module, which is slow to import."""
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


def storage_id(tensor: torch.Tensor) -> tuple[torch.device, int | tuple[Any, ...], int] | None:
    """Return device, address and size of a tensor's storage; None on meta, where nobody can tell."""
    if tensor.device.type == "meta":
        return None
    return tensor.device, _address(tensor), storage_nbytes(tensor)


def _address(tensor: Any) -> int | tuple[Any, ...]:
    """Return the address of a storage; of a wrapper the addresses of what it wraps, nested as they are."""
    if _is_distributed(tensor):
        return int(tensor.to_local().untyped_storage().data_ptr())
    inner = _inner(tensor)
    if inner is not None:
        return tuple(map(_address, inner))
    return int(tensor.untyped_storage().data_ptr())


def storage_nbytes(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's storage: of all of a distributed tensor, of a wrapper the sum."""
    if _is_distributed(tensor):
        return int(tensor.nbytes)
    inner = _inner(tensor)
    if inner is not None:
        return sum(map(storage_nbytes, inner))
    return tensor.untyped_storage().nbytes()


def tf_nbytes(tensor: Any) -> int:
    """Return the bytes of anything that has a `shape` and a `dtype`, by the number of bits in the dtype's name.

    Raises:
        ValueError: The name has none.
    """
    name = str(getattr(tensor.dtype, "name", tensor.dtype))
    found = re.search(r"[0-9]+", name)
    if found is None and not re.search(r"\bbool", name):
        raise ValueError(f"the dtype {printable(name)!r} has no number of bits in its name")
    bits = 1 if found is None else int(found.group())
    return -(-math.prod(int(size) for size in tensor.shape) * bits // 8)


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
    """Return a tensor that counts as many bytes as a file will hold of this one, and shares them with no other."""
    if covers_storage(tensor) and not any(pending(tensor)):
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def require_contiguous(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse tensors that a file would hold in another layout than memory does.

    Raises:
        ValueError: There is one.
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
        discard: Names that are not kept where another will do.

    Returns:
        The tensors that are left, in their order; and for each dropped name the one that was kept for it.

    Raises:
        SharedTensorsError: None of several that overlap covers the storage.
        DeviceError: A tensor on meta.
        TypeError: A value is no tensor, or one without memory of its own; a name is no text.
        ValueError: A tensor that cannot be saved: sparse, nested, freed.
    """
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.is_meta:
            raise DeviceError(f"tensor {printable(name)!r} is on meta: it has no data to save")
    storages: defaultdict[Hashable, list[TensorSource]] = defaultdict(list)
    for source in sources_of(tensors):
        if source.storage_key is not None:
            # What is still to be conjugated or negated is other numbers on the same memory: no duplicate.
            storages[source.storage_key, pending(source.data)].append(source)
    dropped: dict[str, str] = {}
    for storage in storages.values():
        for names in _overlapping(storage):
            kept = _choose(names, tensors, discard)
            dropped |= {name: kept for name in sorted(names) if name != kept}
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}, dropped


def _overlapping(storage: Sequence[TensorSource]) -> Iterator[list[str]]:
    """Yield the names of each set of two and more, on one storage, that hangs together by overlaps."""
    names: list[str] = []
    reach = 0
    for source in sorted(storage, key=operator.attrgetter("span", "name")):
        begin, end = source.span
        if begin >= reach:
            if len(names) > 1:
                yield names
            names = []
        names.append(source.name)
        reach = max(reach, end)
    if len(names) > 1:
        yield names


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
