"""The private names of torch that loads and saves use, each with the reason why no public name does the same.

A new release of torch is checked against this module first. Names that only warm starts need are in their package.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack
"""Makes a tensor from a capsule; `torch.from_dlpack` would have the object make a capsule of its own."""

foreach_copy: Callable[..., None] = torch._foreach_copy_
"""Copies a list of tensors into another list in one call, which releases the GIL once."""


def _clone_each(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    return [tensor.clone() for tensor in tensors]


foreach_clone: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]] = getattr(torch, "_foreach_clone", _clone_each)
"""Clones a list of tensors in one call, which releases the GIL once. torch 2.6 has no such call."""

without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Context in which a subclass of `torch.Tensor` does not override torch's functions."""

unflatten_like: Callable[[torch.Tensor, list[torch.Tensor]], list[torch.Tensor]] = torch._C._nn.unflatten_dense_tensors
"""Cuts a one-dimensional tensor into views of the shapes of others, in one call."""

_reinterpret: Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor]
_reinterpret = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""Makes a tensor of another shape over the same storage, which is not a view; compiled models call it too."""

_empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}
_MOST_TEMPLATES = 10_000
_templates: dict[tuple[int, ...], torch.Tensor] = {}


def unflatten(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Return views of a one-dimensional tensor, one behind the other, in one call; no shape may be empty.

    `torch.split` does so for one-dimensional views only.
    """
    if len(_templates) > _MOST_TEMPLATES:
        _templates.clear()
    return unflatten_like(flat, [_template(shape) for shape in shapes])


def new_bytes(sizes: Sequence[int], device: torch.device) -> list[torch.Tensor]:
    """Return new uint8 tensors `[size]` on a device, allocated under the current stream; holds the GIL."""
    make: Any = torch.UntypedStorage
    return [_empty(torch.uint8, device).new(make(size, device=device)) for size in sizes]


def over_storages(wanted: Iterable[tuple[torch.UntypedStorage, torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
    """Return a tensor over each storage, of this dtype and shape, contiguous and from its first byte; holds the GIL.

    `torch.empty` and `Tensor.set_` release the GIL, and so does the deallocation of a tensor. Beside a busy Python
    thread 212 tensors took 0.3 to 0.7 s by those, 20 to 50 ms if a temporary tensor is freed between two of them, and
    1.2 ms as here (two cores).
    """
    flats = []
    shapes = []
    for storage, dtype, shape in wanted:
        flats.append(_empty(dtype, storage.device).new(storage))
        strides, step = [], 1
        for size in reversed(shape):
            strides.append(step)
            step *= max(size, 1)
        shapes.append((shape, strides[::-1]))
    return [_reinterpret(flat, shape, strides, 0) for flat, (shape, strides) in zip(flats, shapes, strict=True)]


def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without elements, for its constructor."""
    found = _empties.get((dtype, device))
    if found is None:
        found = torch.empty(0, dtype=dtype, device=device)
        if type(found) is torch.Tensor:  # under a mode of torch it is another type, for that mode alone
            _empties[dtype, device] = found
    return found


def _template(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor of this shape without data; many tensors have the same few shapes."""
    found = _templates.get(shape)
    if found is None:
        found = _templates[shape] = torch.empty(shape, device="meta")
    return found


class Traits(NamedTuple):
    """What torch keeps in a tensor's set of dispatch keys."""

    is_cpu: bool
    """Whether it is on the CPU."""
    is_dense: bool
    """Whether it has strides: neither sparse nor nested."""
    is_inference: bool
    """Whether it was made in inference mode."""
    bits: tuple[bool, bool]
    """Whether a conjugation and a negation are not carried out yet."""


_known_traits: dict[int, Traits] = {}


def traits_of(tensor: torch.Tensor) -> Traits:
    """Return the traits of a tensor by one call, which holds the GIL.

    Some of the public calls release it, and together they take twice as long. There are few different sets of keys.
    """
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    found = _known_traits.get(keys)
    if found is None:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        bits = tensor.is_conj(), tensor.is_neg()
        found = _known_traits[keys] = Traits(tensor.is_cpu, is_dense, tensor.is_inference(), bits)
    return found


def conj_neg_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return whether a conjugation and a negation of a tensor are not carried out yet."""
    return traits_of(tensor).bits


def _keep() -> None:
    """Do nothing: this build of torch has no host allocator."""


empty_host_cache: Callable[[], None] = getattr(
    torch.accelerator, "empty_host_cache", getattr(torch._C, "_host_emptyCache", _keep)
)
"""Returns all free pinned memory to the system. The public name is new; before it there is one for CUDA."""
