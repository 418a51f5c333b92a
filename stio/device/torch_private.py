"""The private names of torch that loads and saves use, each with the reason why no public name does the same.

A new release of torch is checked against this module first. Where it lacks one of them (`PUBLIC_WAYS`), public names
do the same, slower. Names that only warm starts need are in their package.

Most of them keep the GIL, or do in one call what public names do in one call a tensor. A call that releases the GIL
needs it again when it ends, which takes up to a switch interval (5 ms) beside a busy Python thread. The deallocation of
a tensor, and so of a view, releases it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

PUBLIC_WAYS = {
    "_C._from_dlpack": "torch.from_dlpack of an object that has the capsule",
    "_C._dynamo.guards._reinterpret_tensor": "Tensor.set_",
    "_foreach_copy_": "Tensor.copy_ of each tensor",
    "_C._dispatch_keys": "properties of the tensor, each asked alone",
}
"""The private names that a release of torch may lack, and what is called then."""


def _private(name: str) -> Any:
    """Return what a private name of torch stands for, None if there is nothing."""
    found: Any = torch
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


class _Exporter:
    """What `torch.from_dlpack` makes a tensor from: has a capsule of host memory."""

    def __init__(self, capsule: Any) -> None:
        self._capsule = capsule

    def __dlpack__(self, **_: object) -> Any:
        return self._capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # kDLCPU


def _from_dlpack(capsule: Any) -> torch.Tensor:
    return torch.utils.dlpack.from_dlpack(_Exporter(capsule))


from_dlpack: Callable[[Any], torch.Tensor] = _private("_C._from_dlpack") or _from_dlpack
"""Makes a tensor from a capsule; `torch.from_dlpack` would have the object make a capsule of its own."""

without_torch_function: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Context in which a subclass of `torch.Tensor` does not override torch's functions."""


def _set(flat: torch.Tensor, shape: Sequence[int], strides: Sequence[int], offset: int) -> torch.Tensor:
    return torch.empty(0, dtype=flat.dtype, device=flat.device).set_(flat.untyped_storage(), offset, shape, strides)


_reinterpret: Callable[[torch.Tensor, Sequence[int], Sequence[int], int], torch.Tensor]
_reinterpret = _private("_C._dynamo.guards._reinterpret_tensor") or _set
"""Makes a tensor of another shape over the same storage, which is not a view; compiled models call it too."""

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By size in bytes, the dtype by which elements are moved without arithmetic."""

_COPIED_AS_INTEGERS = frozenset({torch.bool, getattr(torch, "float4_e2m1fn_x2", torch.bool)})
"""Dtypes of which the CPU makes no plain copies: BOOL bytes become 0 or 1, and most copies of packed F4 are refused."""

_empties: dict[tuple[torch.dtype, torch.device], torch.Tensor] = {}


def _copy_one_by_one(targets: list[torch.Tensor], sources: list[torch.Tensor], *, non_blocking: bool) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=non_blocking)


_copy_all: Callable[..., object] = _private("_foreach_copy_") or _copy_one_by_one


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
        _copy_all([one for one, _ in pairs], [one for _, one in pairs], non_blocking=non_blocking)


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
    kind: make for kind in ("cuda", "xpu") if (make := _private(f"_C._dynamo.guards._empty_strided_{kind}")) is not None
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
        shapes.append((tuple(shape), strides_of(shape)))  # torch 2.15 takes no `torch.Size`
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


_known_traits: dict[Hashable, Traits] = {}


def _keys(tensor: torch.Tensor) -> Hashable:
    """Return what has the traits of a tensor: its set of dispatch keys."""
    return torch._C._dispatch_keys(tensor).raw_repr()


def _properties(tensor: torch.Tensor) -> Hashable:
    """Return the same as properties."""
    kind = tensor.device.type, tensor.layout, tensor.is_nested, tensor.is_inference()
    return kind, tensor.is_conj(), tensor.is_neg()


if _private("_C._dispatch_keys") is None:
    _keys = _properties


def traits_of(tensor: torch.Tensor) -> Traits:
    """Return the traits of a tensor by one call.

    Some of the public calls release the GIL, and all take twice as long. There are few different sets of keys.
    """
    found = _known_traits.get(keys := _keys(tensor))
    if found is None:
        is_dense = tensor.layout is torch.strided and not tensor.is_nested
        bits = tensor.is_conj(), tensor.is_neg()
        found = _known_traits[keys] = Traits(tensor.is_cpu, is_dense, tensor.is_inference(), bits)
    return found


def all_traits_of(tensors: Iterable[torch.Tensor]) -> set[Traits]:
    """Return the traits that occur among tensors."""
    return {traits_of(tensor) for tensor in {_keys(tensor): tensor for tensor in tensors}.values()}


def conj_neg_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return whether a conjugation and a negation of a tensor are not carried out yet."""
    return traits_of(tensor).bits
