"""Which tensors of a state dict lie on the same memory, and which names to save of those that do.

Tensors are neighbours if device, storage address and storage size agree; among neighbours those overlap whose ranges
of addresses do. Ranges are compared with the furthest end so far, so that a small tensor inside a large one hides no
third.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping

import torch

__all__ = ["end_ptr", "find_shared_tensors", "is_complete", "remove_duplicate_names", "storage_ptr", "storage_size"]

Tensors = Mapping[str, torch.Tensor]


def storage_ptr(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, 0 where it has none."""
    return tensor.untyped_storage().data_ptr()


def storage_size(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's storage."""
    return tensor.untyped_storage().nbytes()


def end_ptr(tensor: torch.Tensor) -> int:
    """Return the address behind the tensor's last element, whatever its strides."""
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
        address, nbytes = storage_ptr(tensor), storage_size(tensor)
        if address and nbytes:
            on_storage[tensor.device, address, nbytes].add(name)
    return [group for names in on_storage.values() for group in _overlapping(names, tensors)]


def _overlapping(names: set[str], tensors: Tensors) -> list[set[str]]:
    if len(names) == 1:
        return [names]
    areas = sorted((tensors[name].data_ptr(), end_ptr(tensors[name]), name) for name in names)
    groups: list[set[str]] = []
    furthest = -1
    for start, end, name in areas:
        if start >= furthest:
            groups.append(set())
        groups[-1].add(name)
        furthest = max(furthest, end)
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
    """Return, for each name that is kept of several on one memory, the names to leave out.

    Kept is, of those that cover the storage: the first by name of the preferred ones; else of those that are not to be
    discarded; else of all.

    Args:
        tensors: By name.
        preferred_names: Names that a file has already.
        discard_names: Names rather not to be kept.

    Raises:
        RuntimeError: None of them covers its storage.
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
        kept = _first_of(complete & preferred, complete - discarded, complete)
        for name in sorted(names - {kept}):
            to_remove[kept].append(name)
    return to_remove


def _first_of(*choices: Collection[str]) -> str:
    return min(next(choice for choice in choices if choice))
