"""The private names of torch that loads and saves use, each with the reason why no public name does the same.

A new release of torch is checked against this module first. Names that only warm starts need are in their package.

Most of them keep the GIL, or do in one call what public names do in one call a tensor. A call that releases the GIL
needs it again when it ends, which takes up to a switch interval (5 ms) beside a busy Python thread. The deallocation of
a tensor, and so of a view, releases it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack
"""Makes a tensor from a capsule; `torch.from_dlpack` would have the object make a capsule of its own."""

without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Context in which a subclass of `torch.Tensor` does not override torch's functions."""

_reinterpret: Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor]
_reinterpret = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
"""Makes a tensor of another shape over the same storage, which is not a view; compiled models call it too."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes, the dtype by which elements are moved without arithmetic."""

_COPIED_AS_INTEGERS = frozenset({torch.bool, getattr(torch, "float4_e2m1fn_x2", torch.bool)})
"""Dtypes of which the CPU makes no plain copies: BOOL bytes become 0 or 1, and most copies of packed F4 are refused."""

_empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def copy_each(targets: Iterable[torch.Tensor], sources: Iterable[torch.Tensor], *, non_blocking: bool = False) -> None:
    """Copy tensors into others of the same shapes; one call of torch makes all copies. Autograd records nothing.

    Tensors of equal dtypes are copied bit for bit. torch alone does not do so:

    - CUDA's kernels for lists of tensors convert 16-bit floats to float32 and back, which changes NaNs
      (pytorch/pytorch#159333). In some versions of torch they convert 8-bit floats too, in others they refuse them, and
      they write targets of two dtypes as if all had the first one. These kernels take no list with tensors on two
      devices. So a pair on the CPU is added to the list: torch then copies one tensor after the other, and a contiguous
      one as memory.
    - BOOL and packed F4, and what is not contiguous, are copied as integers of the same size.

    To copy all tensors as integers would do, but needs two views a tensor.
    """
    pairs = [_pair_to_copy(*pair) for pair in zip(targets, sources, strict=True)]
    if not pairs:
        return
    # Made anew: one that is kept would be an inference tensor for good if the first call is in inference mode.
    nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
    pairs.append((nothing, nothing))
    with torch.no_grad():
        torch._foreach_copy_([one for one, _ in pairs], [one for _, one in pairs], non_blocking=non_blocking)


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy of a tensor, bit for bit, in memory of its own; see `copy_each`."""
    made = torch.empty_like(tensor, memory_format=torch.contiguous_format, requires_grad=False)
    copy_each([made], [tensor])
    return made


def moved(tensor: torch.Tensor, device: torch.device | str | int) -> torch.Tensor:
    """Return a tensor on a device, bit for bit.

    Before a transfer torch makes a tensor contiguous by a plain copy.
    """
    is_plain = tensor.dtype not in _COPIED_AS_INTEGERS or tensor.is_contiguous()
    return (tensor if is_plain else copy_of(tensor)).to(device)


def has_no_overrides(kind: type[torch.Tensor]) -> bool:
    """Return whether a subclass of `torch.Tensor` has no code of its own for torch's functions, as that of a user."""
    functions = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    has_own = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ or kind.copy_ is not torch.Tensor.copy_
    return functions in _NO_OVERRIDES and not has_own


_NO_OVERRIDES = (getattr(torch.Tensor.__torch_function__, "__func__", None), torch._C._disabled_torch_function_impl)


def _pair_to_copy(target: torch.Tensor, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return two tensors, as integers if torch would otherwise compute with elements of their common dtype."""
    dtype = target.dtype
    if dtype != source.dtype:
        return target, source
    if dtype not in _COPIED_AS_INTEGERS and target.is_contiguous() and source.is_contiguous():
        return target, source
    integer = INTEGERS.get(dtype.itemsize)
    if integer in (None, dtype) or any(conj_neg_bits(target)) or any(conj_neg_bits(source)):
        return target, source
    return target.view(integer), source.view(integer)


def new_tensors(wanted: Iterable[tuple[torch.dtype, Sequence[int]]], device: torch.device) -> list[torch.Tensor]:
    """Return new contiguous tensors on the current device, under its current stream, each with a storage of its own.

    Compiled models allocate by this function of torch. It keeps the GIL, and needs no other tensor meanwhile: beside a
    busy Python thread the deallocation of 400 temporary tensors took 0.13 s (H200). It exists for CUDA and XPU.
    """
    make = EMPTY_STRIDED.get(device.type)
    if make is not None:
        return [make(tuple(shape), strides_of(shape), dtype) for dtype, shape in wanted]
    storage: Any = torch.UntypedStorage
    listed = [(dtype, shape, math.prod(shape) * dtype.itemsize) for dtype, shape in wanted]
    return over_storages([(storage(nbytes, device=device), dtype, shape) for dtype, shape, nbytes in listed])


EMPTY_STRIDED: dict[str, Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]] = {
    kind: getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}")
    for kind in ("cuda", "xpu")
    if hasattr(torch._C._dynamo.guards, f"_empty_strided_{kind}")
}
"""By kind of device, the function of `new_tensors`: takes shape, strides in elements, and dtype."""


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(strides[::-1])


def over_storages(wanted: Iterable[tuple[torch.UntypedStorage, torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
    """Return a tensor over each storage, of this dtype and shape, contiguous and from its first byte.

    Beside a busy Python thread 212 tensors took 0.3 to 0.7 s by `torch.empty` and `Tensor.set_`, 20 to 50 ms if a
    temporary tensor is freed between two of them, and 1.2 ms as here (two cores).
    """
    flats = []
    shapes = []
    for storage, dtype, shape in wanted:
        flats.append(_empty(dtype, storage.device).new(storage))
        shapes.append((shape, strides_of(shape)))
    return [_reinterpret(flat, shape, strides, 0) for flat, (shape, strides) in zip(flats, shapes, strict=True)]


def _empty(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor without elements, for its constructor."""
    found = _empties.get((dtype, device))
    if found is None:
        found = torch.empty(0, dtype=dtype, device=device)
        if type(found) is torch.Tensor:  # under a mode of torch it is another type, for that mode alone
            _empties[dtype, device] = found
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
    """Return the traits of a tensor by one call.

    Some of the public calls release the GIL, and all take twice as long. There are few different sets of keys.
    """
    keys = torch._C._dispatch_keys(tensor).raw_repr()
    found = _known_traits.get(keys)
    if found is None:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        bits = tensor.is_conj(), tensor.is_neg()
        found = _known_traits[keys] = Traits(tensor.is_cpu, is_dense, tensor.is_inference(), bits)
    return found


def all_traits_of(tensors: Iterable[torch.Tensor]) -> set[Traits]:
    """Return the traits that occur among tensors."""
    keys_of = torch._C._dispatch_keys
    return {traits_of(tensor) for tensor in {keys_of(tensor).raw_repr(): tensor for tensor in tensors}.values()}


def conj_neg_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return whether a conjugation and a negation of a tensor are not carried out yet."""
    return traits_of(tensor).bits
