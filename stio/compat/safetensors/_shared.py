"""Which tensors of a state dict share memory, and which of their names to save.

Tensors are on the same storage if its device, address and size are equal. Of these, tensors overlap if their ranges
of addresses do (`stio.format.shared.overlap_groups`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import torch

from stio.format.shared import overlap_groups

Tensors = Mapping[str, torch.Tensor]


def storage_ptr(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # sparse
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's storage."""
    return tensor.untyped_storage().nbytes()


def end_ptr(tensor: torch.Tensor) -> int:
    """Return the address after the tensor's last element, for any strides."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start + (steps + 1) * tensor.itemsize


def find_shared_tensors(tensors: Tensors) -> list[set[str]]:
    """Return sets of names whose tensors overlap; a name that overlaps with none is alone in its set.

    Tensors without memory (on meta, or empty) are in no set.
    """
    on_storage: defaultdict[tuple[torch.device, int, int], set[str]] = defaultdict(set)
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            continue
        address = storage_ptr(tensor)
        if address and (nbytes := storage_size(tensor)):
            on_storage[tensor.device, address, nbytes].add(name)
    groups = []
    for names in on_storage.values():
        if len(names) == 1:
            groups.append(names)
        else:
            areas = [(tensors[name].data_ptr(), end_ptr(tensors[name]), name) for name in names]
            groups += [set(group) for group in overlap_groups(areas)]
    return groups


def is_complete(tensor: torch.Tensor) -> bool:
    """Return whether a tensor covers its whole storage."""
    return tensor.data_ptr() == storage_ptr(tensor) and tensor.numel() * tensor.itemsize == storage_size(tensor)


def remove_duplicate_names(
    tensors: Tensors,
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
) -> dict[str, list[str]]:
    """Return, for each group of names on the same memory, the name to save and the names to leave out.

    The name to save is the first of those that cover the storage and are preferred; else of those that cover it and are
    not to be discarded; else of those that cover it.

    Args:
        tensors: By name.
        preferred_names: Names that a file has already.
        discard_names: Names to avoid.

    Raises:
        RuntimeError: No name of a group covers its storage.
    """
    preferred, discarded = set(preferred_names or ()), set(discard_names or ())
    to_remove: defaultdict[str, list[str]] = defaultdict(list)
    for names in find_shared_tensors(tensors):
        complete = {name for name in names if is_complete(tensors[name])}
        if not complete:
            raise RuntimeError(
                "Error while trying to find names to remove to save state dict, but found no suitable name to keep for "
                f"saving amongst: {names}. None is covering the entire storage. Refusing to save/load the model since "
                "you could be storing much more memory than needed; clone what is a part of something larger."
            )
        saved = min(complete & preferred or complete - discarded or complete)
        for name in sorted(names - {saved}):
            to_remove[saved].append(name)
    return to_remove
