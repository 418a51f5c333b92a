"""Casts and selections of loaded tensors, and the number of values that a cast loses.

A value is lost if it leaves the range of the new dtype: it becomes inf, NaN, 0, the largest number or another integer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch

from stio.device.tensors import E8M0, F4, FORMAT_DTYPES, TORCH_DTYPES, smallest_of, tensors_in, typed
from stio.device.torch_private import INTEGERS
from stio.errors import UnsupportedDtypeError, listed, printable
from stio.format import Selection
from stio.limits import HUGE_PAGE_BYTES
from stio.runtime.memory import allocate
from stio.text import log


@dataclass(frozen=True, slots=True)
class Casts:
    """What a load casts its tensors to. False if it casts none."""

    floating: torch.dtype | None = None
    """The dtype of all floating tensors."""
    by_name: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtypes of tensors that are cast by their names, of any dtype."""

    def __bool__(self) -> bool:
        return self.floating is not None or bool(self.by_name)

    def dtype(self, name: str, own: torch.dtype) -> torch.dtype:
        """Return the dtype that a tensor is cast to, which may be its own."""
        if self.floating is not None and own.is_floating_point:
            return self.floating
        return self.by_name.get(name, own)


def select_and_cast(
    tensors: dict[str, torch.Tensor],
    posts: Mapping[str, Selection],
    casts: Casts | None,
    lost: Lost | None = None,
    *,
    views: bool = False,
) -> dict[str, torch.Tensor]:
    """Apply the selections that a read could not apply, and cast the tensors, on their device.

    Args:
        tensors: By name; the dictionary is changed and returned.
        posts: By name, the selection of a tensor of which more was read than is selected.
        casts: What to cast; None: nothing.
        lost: Where to count the values that leave the range of their new dtype; None: they are not counted.
        views: Selections that slices describe are views of what was read. Otherwise each has memory of its own.

    Raises:
        UnsupportedDtypeError: torch has no cast from a tensor's dtype (packed F4).
    """
    for name, selection in posts.items():
        own = tensors[name].dtype
        # As integers, because torch neither flips nor selects every dtype.
        tensor = tensors[name].view(INTEGERS[own.itemsize])
        is_view = views and selection.post is not None and not selection.flip
        if is_view and all(isinstance(item, slice) for item in selection.post or ()):
            tensors[name] = tensor[selection.post].view(own)
            continue
        tensor = _selected(tensor, selection)
        tensors[name] = typed(tensor, tensor.shape, own)
    if casts is None:
        return tensors
    for name, tensor in tensors.items():
        wanted = casts.dtype(name, tensor.dtype)
        if tensor.dtype != wanted:
            tensors[name] = _cast(name, tensor, wanted) if lost is None else lost.cast(name, tensor, wanted)
    return tensors


def _selected(tensor: torch.Tensor, selection: Selection) -> torch.Tensor:
    """Return the selected part of a tensor of integers, in memory of its own."""
    stages = selection.stages()
    if stages is not None:
        first, joins, last = stages
        tensor = tensor[first]
        for dim, parts in joins:
            pieces = [tensor.narrow(dim, part.start, part.stop - part.start) for part in parts]
            sizes = list(tensor.shape)
            sizes[dim] = sum(piece.shape[dim] for piece in pieces)
            tensor = torch.cat(pieces, dim, out=_empty(sizes, tensor.dtype, tensor.device))
        tensor = tensor[last]
        return tensor.flip(selection.flip) if selection.flip else tensor
    if selection.post is not None:
        tensor = tensor[selection.post]
    return (
        tensor.flip(selection.flip)
        if selection.flip
        else _empty(tensor.shape, tensor.dtype, tensor.device).copy_(tensor)
    )


def _empty(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return memory for a contiguous tensor. On the host that of a large one has huge pages.

    To touch small pages for the first time takes longer than to copy into them.
    """
    nbytes = math.prod(sizes) * dtype.itemsize
    if device.type != "cpu" or nbytes < HUGE_PAGE_BYTES or dtype not in FORMAT_DTYPES:
        return torch.empty(sizes, dtype=dtype, device=device)
    return tensors_in(allocate(nbytes), [""], [FORMAT_DTYPES[dtype]], [tuple(sizes)], [0])[""]


# Values that leave the range of a dtype.

_CPU_ELEMENTS = 1 << 18
"""Elements that are compared at a time on the CPU, in its second cache."""

_COUNT_BYTES = 4096
"""Memory on a device for the numbers of one tensor: blocks of torch's allocator."""


class Lost(dict[str, Any]):
    """By name, how many values casts have lost; a tensor on a device until its load has ended."""

    def cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of another dtype, in memory of its own, and count what is lost.

        Raises:
            UnsupportedDtypeError: torch has no such cast (packed F4).
        """
        result = _cast(name, tensor, dtype)
        self.count(name, tensor, result)
        return result

    def count_cast(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
        """Count what a cast of a tensor loses that is made elsewhere."""
        if _may_lose_range(tensor.dtype, dtype):
            self.cast(name, tensor, dtype)

    def count(self, name: str, source: torch.Tensor, result: torch.Tensor) -> None:
        """Add the number of values of a tensor that left the range of the dtype that it was cast to.

        On a device the comparison is queued on the current stream. On the CPU four reductions by numpy show whether a
        part can have lost values. 16 Mi numbers from F32 to BF16 on one thread (x86-64): the cast 11 ms, the reductions
        8 ms, a comparison of all values by torch 250 ms, and 50 ms where it only counts zeros.

        Args:
            name: Name of the tensor.
            source: The tensor.
            result: The same tensor in the other dtype.
        """
        if not _may_lose_range(source.dtype, result.dtype):
            return
        source, result = source.detach().reshape(-1), result.detach().reshape(-1)
        step = _CPU_ELEMENTS if result.is_cpu else _device_elements(result.numel())
        step >>= 2 * (source.itemsize == 1 and not result.is_cpu)  # it is compared as F32
        for begin in range(0, result.numel(), step):
            part = result[begin : begin + step]
            is_known = part.is_cpu and part.is_floating_point() and part.dtype != E8M0
            has_zeros, has_large = _limits_reached(part) if is_known else (True, True)
            if has_zeros or has_large:
                number = _num_lost(source[begin : begin + step].to(part.device), part, has_large=has_large)
                self[name] = self.get(name, 0) + (int(number) if part.is_cpu else number)

    @staticmethod
    def bytes_to_count(numel: int) -> int:
        """Return how much memory on a device `count` takes for a floating tensor."""
        return 2 * min(numel, _device_elements(numel)) + _COUNT_BYTES

    def report(self, path: str) -> dict[str, int]:
        """Warn of the lost values.

        Args:
            path: The checkpoint.

        Returns:
            The numbers by name, without those that are 0; those of a device are waited for.
        """
        numbers = {name: number for name, one in self.items() if (number := int(one))}
        if numbers:
            log(
                logging.WARNING,
                "%s: %s outside the range of the dtype to which they were cast, and became inf, NaN, 0, the largest "
                "number or another integer; choose a dtype with a larger range: %s",
                printable(path),
                "1 value was" if sum(numbers.values()) == 1 else f"{sum(numbers.values()):,} values were",
                listed([f"{printable(name)} ({number:,})" for name, number in numbers.items()]),
            )
        return numbers


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    try:
        return _empty(tensor.shape, dtype, tensor.device).copy_(tensor)
    except NotImplementedError as error:
        message = f"torch cannot cast {printable(name)!r}; leave it out by names=, or load it as it is"
        raise UnsupportedDtypeError(message, expected=str(dtype), found=str(tensor.dtype)) from error


def _device_elements(numel: int) -> int:
    """Return how many elements of a tensor are compared at a time on a device: few launches, and little memory."""
    return max(1 << 17, min(numel >> 3, 1 << 24))


@cache
def _may_lose_range(own: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a dtype has not the range of another one, so that a cast changes values by more than rounding."""
    if own == wanted or own.is_complex or wanted.is_complex or F4 in (own, wanted):
        return False
    if own == torch.bool or wanted == E8M0:
        return wanted == E8M0
    if not wanted.is_floating_point:
        return not own.is_floating_point and not TORCH_DTYPES.holds_all(own, wanted)
    limits = torch.finfo(wanted)
    if not own.is_floating_point:
        return torch.iinfo(own).max > limits.max
    return torch.finfo(own).max > limits.max or smallest_of(own) < smallest_of(wanted)


@cache
def _largest_bits(dtype: torch.dtype) -> int:
    """Return the bits of the largest finite number of a floating dtype. Those of inf and NaN are larger."""
    return int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(INTEGERS[dtype.itemsize]))


@cache
def _saturates(dtype: torch.dtype) -> bool:
    """Return whether this torch casts what is too large to the largest number and not to inf or NaN (F8_E4M3)."""
    return bool(torch.tensor(torch.inf).to(dtype).float().isfinite())


def _limits_reached(values: torch.Tensor) -> tuple[bool, bool]:
    """Return whether floating numbers on the CPU have a 0; and inf, NaN, or the number to which torch saturates."""
    size, largest = values.itemsize, _largest_bits(values.dtype) - _saturates(values.dtype)
    words = values.view(INTEGERS[size]).numpy()
    signed, unsigned, sign = words.view(f"i{size}"), words.view(f"u{size}"), 1 << (8 * size - 1)
    has_zeros = not unsigned.min() or int(signed.min()) == -sign
    return has_zeros, bool(signed.max() > largest or int(unsigned.max()) > largest + sign)


def _num_lost(source: torch.Tensor, result: torch.Tensor, *, has_large: bool) -> torch.Tensor:
    """Return how many values are other ones because of their size, on the device of the tensors.

    Args:
        source: The values.
        result: The values after the cast.
        has_large: Whether some may be too large.
    """
    if not result.is_floating_point():
        # Not all integers can be compared with 0.
        below = [one.long() < 0 if one.dtype.is_signed else False for one in (source, result)]
        return ((result.to(source.dtype) != source) | (below[0] != below[1])).sum()
    if result.dtype == E8M0:
        source = source if source.is_floating_point() and source.itemsize > 1 else source.float()
        small = (source <= 0).logical_or_(source < smallest_of(result.dtype)).sum()
        # From half a step above the largest one on it is NaN, as inf is.
        return small.add_((source >= 1.5 * torch.finfo(result.dtype).max).sum()).sub_(source.isinf().sum())
    zeros = _num_zeros(result) - _num_zeros(source)
    if not has_large:
        return zeros
    if not _saturates(result.dtype):
        return zeros + _num_not_finite(result) - _num_not_finite(source)
    limits = torch.finfo(result.dtype)  # a number is lost from half a step above the largest one on
    limit = limits.max + math.ldexp(limits.eps, math.frexp(limits.max)[1] - 2)
    source = source.float() if source.itemsize == 1 else source  # torch compares no F8
    above = (source > limit).logical_or_(source < -limit).sum()
    return zeros + above - (source.isinf().sum() if source.is_floating_point() else 0)


_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""torch counts nothing in these on the CPU."""


def _num_zeros(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == E8M0:
        return torch.zeros((), dtype=torch.long, device=values.device)
    values = values if _is_comparable(values) else _magnitude(values)
    if values.dtype in _UNSIGNED:
        values = values.view(INTEGERS[values.itemsize])
    # On a device, where the memory is counted, with a byte for each number.
    return values.numel() - torch.count_nonzero(values) if values.is_cpu else (values == 0).sum()


def _num_not_finite(values: torch.Tensor) -> torch.Tensor | int:
    """Return how many numbers are inf or NaN, with a byte or two of memory for each number."""
    if not values.is_floating_point():
        return 0
    if values.dtype == E8M0:
        return (values.view(torch.uint8) == 255).sum()
    if not _is_comparable(values):
        return (_magnitude(values) > _largest_bits(values.dtype)).sum()
    largest = torch.finfo(values.dtype).max
    return values.numel() - (values >= -largest).logical_and_(values <= largest).sum()


def _is_comparable(values: torch.Tensor) -> bool:
    return not values.is_floating_point() or values.itemsize > 1


def _magnitude(values: torch.Tensor) -> torch.Tensor:
    """Return the bits of floating numbers without their sign."""
    return values.view(INTEGERS[values.itemsize]) & ((1 << (8 * values.itemsize - 1)) - 1)
