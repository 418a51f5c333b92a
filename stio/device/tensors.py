"""The format's dtypes in torch, and tensors over memory that was filled before.

Each tensor gets a storage of exactly its bytes and a version counter of its own. Views of one large buffer break
`torch.save`, the hub's splitter, `save_model` and in-place changes under autograd. DLPack gives both without a copy,
and holds the GIL. Nearly every other call of torch releases it, which costs up to 5 ms a tensor beside a busy Python
thread. One tensor takes about 1 microsecond.

On a device each tensor is an allocation of its own too: it is freed alone, and a user's `record_stream` protects it.
They are made by calls that keep the GIL (`stio.device.torch_private`).
"""

from __future__ import annotations

import ctypes
import difflib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch

from stio.device.base import Accelerator, Image
from stio.device.torch_private import INTEGERS, from_dlpack, over_storages
from stio.errors import UnsupportedDtypeError, printable
from stio.format.dtypes import BITS, LIBRARY_NAMES, tensor_nbytes
from stio.format.slicing import Selection
from stio.limits import HUGE_PAGE_BYTES
from stio.runtime.memory import Region, allocate
from stio.runtime.process import collection_paused

# DLPack's DLDataTypeCode (dlpack.h 1.1). The others are I, U or F: the place of the letter is the code.
_CODES = {
    "BOOL": 6,
    "F4": 17,
    "F8_E5M2": 12,
    "F8_E4M3": 10,
    "F8_E8M0": 14,
    "F8_E4M3FNUZ": 11,
    "F8_E5M2FNUZ": 13,
    "BF16": 4,
    "C64": 5,
}
_KINDS = "IUF"

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""The types that behave as torch defines, without code of a subclass."""

TORCH_DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, library_name) for name, library_name in LIBRARY_NAMES.items() if hasattr(torch, library_name)
}
"""The format's dtype names that this torch has a type for."""

FORMAT_DTYPES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The name in the format of each of torch's types."""

DtypeLike: TypeAlias = torch.dtype | str
"""A dtype of torch, or a name of one, as torch spells it ("bfloat16") or the format does ("BF16")."""

DtypeOf: TypeAlias = Callable[[str], torch.dtype | None]
"""Returns the dtype that a tensor of this name is cast to; None: as stored."""

DtypesLike: TypeAlias = DtypeLike | Mapping[str, DtypeLike | None] | Callable[[str], DtypeLike | None]
"""What floating tensors are cast to: one dtype; or one for each name, by a mapping from names, whose other names are as
stored, or by a function of the name, which is called on a thread of the load. None as a value: as stored."""

_DLTENSOR_DTYPE_AT = 20  # void* data, int32 device type and id, int32 ndim, then the dtype's four bytes

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def checked_dtype(dtype: object) -> torch.dtype:
    """Return the dtype that an argument `dtype=` means, see `DtypeLike`. Upper and lower case of a name are the same.

    Raises:
        TypeError: It is neither a dtype nor text.
        ValueError: torch has no dtype of this name.
    """
    if isinstance(dtype, torch.dtype):
        return dtype
    if not isinstance(dtype, str):
        raise TypeError(f"dtype= takes a torch.dtype or the name of one, not {dtype!r}")
    found = TORCH_DTYPES.get(dtype.upper()) or vars(torch).get(dtype.lower().removeprefix("torch."))
    if isinstance(found, torch.dtype):
        return found
    every = [one for name in TORCH_DTYPES for one in (LIBRARY_NAMES[name], name)]
    near = difflib.get_close_matches(dtype[:_LONGEST_NAME].upper(), [one.upper() for one in every], n=1)
    nearest = f"; did you mean {next(one for one in every if one.upper() == near[0])!r}?" if near else ""
    raise ValueError(
        "dtype= takes a torch.dtype, or the name of one in torch or in the format, such as 'bfloat16' or 'BF16', not "
        f"{printable(dtype)!r}{nearest}"
    )


def checked_cast(dtype: object) -> torch.dtype:
    """Return the dtype that floating tensors are cast to, of an argument `dtype=`; see `checked_dtype`.

    Raises:
        TypeError: It is neither a dtype nor text.
        ValueError: torch has no dtype of this name, or the cast would lose the values.
    """
    found = checked_dtype(dtype)
    if _rank(found) < _rank(torch.float32):
        raise ValueError(
            f"dtype= casts floating tensors, and {printable(str(found).removeprefix('torch.'))!r} would lose their "
            "values: give a floating dtype, such as 'bfloat16', or none, and cast the loaded tensors yourself"
        )
    return found


def checked_casts(dtype: object) -> torch.dtype | DtypeOf | None:
    """Return what an argument `dtype=` casts, see `DtypesLike`; values of a function are checked when it is called.

    Raises:
        TypeError, ValueError: See `checked_cast`; or a key of a mapping is no name.
    """
    if dtype is None or isinstance(dtype, str | torch.dtype):
        return None if dtype is None else checked_cast(dtype)
    if isinstance(dtype, Mapping):
        for name in dtype:
            if not isinstance(name, str):
                raise TypeError(f"dtype= takes a mapping from names, not from {name!r}")
        return {name: None if one is None else checked_cast(one) for name, one in dtype.items()}.get
    if callable(dtype) and not isinstance(dtype, type):  # `float` is a mistake for torch.float32
        return lambda name: None if (one := dtype(name)) is None else checked_cast(one)
    return checked_cast(dtype)


def _rank(dtype: torch.dtype) -> int:
    """Return the rank of a dtype: 0 whole numbers and truth values, 1 floating, 2 complex.

    A cast to a lower rank loses values, not only precision: the fraction, or the imaginary part.
    """
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


def loses_values(stored: str, dtype: torch.dtype) -> bool:
    """Return whether a copy of a tensor of the format into one of torch would lose its values; see `_rank`."""
    own = TORCH_DTYPES.get(stored)
    return own is not None and _rank(own) > _rank(dtype)


_LONGEST_NAME = 40
"""Characters of an unknown name that are compared with the known ones: the time grows with their square."""


def require_dtypes(dtypes: Sequence[str], *, path: str) -> None:
    """Raise `UnsupportedDtypeError` for the first dtype that this torch cannot hold."""
    for dtype in dict.fromkeys(dtypes):
        if dtype not in TORCH_DTYPES:
            message = "torch has no such dtype; leave these tensors out (names= of stio.load)"
            raise UnsupportedDtypeError(message, path=path, found=dtype)


def torch_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape in torch for a shape of the format: two F4 numbers are one element of torch."""
    return (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape


def fits_shape(dtype: str, shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
    """Return whether a tensor of the format can be loaded into a shape of torch.

    A tensor of shape [1] can be loaded into a scalar, as by torch's `load_state_dict`: scales are written both ways.
    """
    return torch_shape(dtype, shape) == target or (shape == (1,) and not target and dtype != "F4")


def as_scalar(tensor: torch.Tensor) -> torch.Tensor:
    """Return a loaded tensor of shape [1] as one without dimensions, which is no view, and any other as it is."""
    return typed(tensor, FORMAT_DTYPES[tensor.dtype], ()) if tensor.shape == (1,) else tensor


def typed(flat: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor over the whole storage of `flat`, and not a view of `flat`.

    Args:
        flat: Any tensor with a storage of exactly these bytes.
        dtype: The new tensor's dtype, in the format.
        shape: Its shape in torch.
    """
    return over_storages([(flat.untyped_storage(), TORCH_DTYPES[dtype], shape)])[0]


@dataclass(frozen=True, slots=True)
class _Maker:
    """How tensors of one dtype are made over host memory."""

    numpy: np.dtype[Any]
    """numpy's dtype of the same size."""
    torch: torch.dtype
    alignment: int
    """Of a tensor in bytes. Not numpy's: to numpy a C64 is two floats, to torch eight bytes."""
    word: int
    """What to write over the dtype in numpy's DLPack capsule; 0 where the capsule is right."""
    by_dlpack: bool
    """Whether this torch reads the dtype from DLPack. If not, the tensor is made over the storage of a byte tensor."""


def _from_capsule(array: np.ndarray[Any, Any], word: int) -> torch.Tensor:
    capsule = array.__dlpack__()
    if word:
        ctypes.c_uint32.from_address(_capsule_pointer(capsule, b"dltensor") + _DLTENSOR_DTYPE_AT).value = word
    return from_dlpack(capsule)


def _maker(dtype: str) -> _Maker:
    is_plain, lanes = dtype not in _CODES, 2 if dtype == "F4" else 1
    numpy = np.dtype(f"{dtype[0].lower() if is_plain or dtype == 'C64' else 'u'}{BITS[dtype] * lanes // 8}")
    code = _KINDS.index(dtype[0]) if is_plain else _CODES[dtype]
    word = code | BITS[dtype] << 8 | lanes << 16
    wanted = TORCH_DTYPES[dtype]
    try:
        by_dlpack = _from_capsule(np.zeros(2, numpy), word).dtype == wanted
    except (BufferError, RuntimeError, ValueError):
        by_dlpack = False
    is_right = by_dlpack and _from_capsule(np.zeros(2, numpy), 0).dtype == wanted
    return _Maker(numpy, wanted, numpy.itemsize, 0 if is_right else word, by_dlpack)


_MAKERS = {name: _maker(name) for name in TORCH_DTYPES}


def tensors_in(
    region: Region,
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    offsets: Sequence[int],
) -> dict[str, torch.Tensor]:
    """Make tensors over host memory.

    Args:
        region: The memory; each tensor holds a reference to its owner.
        names: Names of the tensors.
        dtypes: Their dtypes in the format, all known to this torch.
        shapes: Their shapes in the format.
        offsets: The first byte of each in the region. A tensor that is not aligned to its elements is copied.

    Returns:
        The tensors by name, each with a storage of exactly its bytes.
    """
    result: dict[str, torch.Tensor] = {}
    owner = region.owner
    base = region.address - ctypes.addressof(owner) if owner is not None else 0
    address, array, word_at = region.address, np.ndarray, ctypes.c_uint32.from_address
    # Locals instead of globals and attributes, for speed: a load may have 100,000 tensors.
    pointer, make, makers = _capsule_pointer, from_dlpack, _MAKERS
    with collection_paused(len(names)):
        for name, dtype, shape, offset in zip(names, dtypes, shapes, offsets, strict=True):
            maker = makers[dtype]
            if dtype == "F4":
                shape = torch_shape(dtype, shape)
            if 0 in shape:
                result[name] = torch.empty(shape, dtype=maker.torch, device="cpu")  # also under another default device
                continue
            data = array(shape, maker.numpy, owner, base + offset)
            if (address + offset) % maker.alignment:
                data = data.copy()
            if not maker.by_dlpack:
                result[name] = typed(torch.from_numpy(data.reshape(-1).view(np.uint8)), dtype, shape)
                continue
            capsule = data.__dlpack__()
            if maker.word:
                word_at(pointer(capsule, b"dltensor") + _DLTENSOR_DTYPE_AT).value = maker.word
            result[name] = make(capsule)
    return result


Casts: TypeAlias = torch.dtype | Mapping[str, torch.dtype]
"""What to cast to: one dtype, for the floating tensors; or by name, for the named tensors of any dtype."""


def select_and_cast(
    tensors: dict[str, torch.Tensor],
    posts: Mapping[str, Selection],
    dtype: Casts | None,
    lost: Lost | None = None,
    *,
    views: bool = False,
) -> dict[str, torch.Tensor]:
    """Apply the selections that a read could not apply, and cast the tensors, on their device.

    Args:
        tensors: By name; the dictionary is changed and returned.
        posts: By name, the selection of a tensor of which more was read than is selected.
        dtype: See `Casts`; None: no cast.
        lost: See `cast`.
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
        tensors[name] = typed(tensor, FORMAT_DTYPES[own], tuple(tensor.shape))
    if dtype is not None:
        for name, tensor in tensors.items():
            wanted = cast_dtype(name, tensor.dtype, dtype)
            if tensor.dtype != wanted:
                tensors[name] = cast(name, tensor, wanted, lost)
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


def cast_dtype(name: str, own: torch.dtype, casts: Casts) -> torch.dtype:
    """Return the dtype that a tensor is cast to, which may be its own."""
    if isinstance(casts, torch.dtype):
        return casts if own.is_floating_point else own
    return casts.get(name) or own


def cast(name: str, tensor: torch.Tensor, dtype: torch.dtype, lost: Lost | None = None) -> torch.Tensor:
    """Return a tensor of another dtype, in memory of its own.

    Args:
        name: Its name.
        tensor: The tensor.
        dtype: The new dtype.
        lost: Where to count the values that leave the range of the new dtype; None: they are not counted.

    Raises:
        UnsupportedDtypeError: torch has no such cast (packed F4).
    """
    try:
        result = _empty(tensor.shape, dtype, tensor.device).copy_(tensor)
    except NotImplementedError as error:
        message = f"torch cannot cast {printable(name)!r}; leave it out by names=, or load it as it is"
        raise UnsupportedDtypeError(message, expected=str(dtype), found=str(tensor.dtype)) from error
    if lost is not None:
        count_lost(lost, name, tensor, result)
    return result


# Values that leave the range of a dtype.

Lost: TypeAlias = dict[str, Any]
"""By name, how many values a cast has made inf, NaN, 0, the largest number or another integer. A tensor on a device."""

_CPU_ELEMENTS = 1 << 18
"""Elements that are compared at a time on the CPU, in its second cache."""

_COUNT_BYTES = 4096
"""Memory on a device for the numbers of one tensor: blocks of torch's allocator."""


def _device_elements(numel: int) -> int:
    """Return how many elements of a tensor are compared at a time on a device: few launches, and little memory."""
    return max(1 << 17, min(numel >> 3, 1 << 24))


def bytes_to_count(numel: int) -> int:
    """Return how much memory on a device `count_lost` takes for a floating tensor."""
    return 2 * min(numel, _device_elements(numel)) + _COUNT_BYTES


def count_lost(lost: Lost, name: str, source: torch.Tensor, result: torch.Tensor) -> None:
    """Add the number of values of a tensor that left the range of the dtype that it was cast to.

    On a device the comparison is queued on the current stream. On the CPU four reductions by numpy show that nothing
    was lost: they take a tenth of the time of the cast, and torch's take longer than the cast.

    Args:
        lost: The numbers so far.
        name: Name of the tensor.
        source: The tensor.
        result: The same tensor in the other dtype.
    """
    if not may_lose_range(source.dtype, result.dtype):
        return
    source, result = source.detach().reshape(-1), result.detach().reshape(-1)
    step = _CPU_ELEMENTS if result.is_cpu else _device_elements(result.numel())
    step >>= 2 * (source.itemsize == 1 and not result.is_cpu)  # it is compared as F32
    for begin in range(0, result.numel(), step):
        part = result[begin : begin + step]
        if not part.is_cpu or not part.is_floating_point() or part.dtype == _E8M0 or not _is_inside(part):
            number = _num_lost(source[begin : begin + step].to(part.device), part)
            lost[name] = lost.get(name, 0) + (int(number) if part.is_cpu else number)


@cache
def may_lose_range(own: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a dtype has not the range of another one, so that a cast changes values by more than rounding."""
    if own == wanted or own.is_complex or wanted.is_complex or _F4 in (own, wanted):
        return False
    if own == torch.bool or wanted == _E8M0:
        return wanted == _E8M0
    if not wanted.is_floating_point:
        return not own.is_floating_point and not holds_all(own, wanted)
    limits = torch.finfo(wanted)
    if not own.is_floating_point:
        return torch.iinfo(own).max > limits.max
    return torch.finfo(own).max > limits.max or _least(own) < _least(wanted)


@cache
def holds_all(own: torch.dtype, wanted: torch.dtype) -> bool:
    """Return whether a dtype holds all values of another one exactly."""
    if own == wanted:
        return True
    if _F4 in (own, wanted) or wanted == _E8M0 or not (wanted in FORMAT_DTYPES or wanted.is_complex):
        return False
    if own == torch.bool:
        return True
    if wanted == torch.bool or _rank(own) > _rank(wanted):
        return False
    if not _rank(wanted):
        small, large = torch.iinfo(own), torch.iinfo(wanted)
        return large.min <= small.min and small.max <= large.max
    limits = torch.finfo(wanted)
    if not _rank(own):
        return torch.iinfo(own).max <= 2 / limits.eps
    finer = torch.finfo(own)
    return finer.max <= limits.max and finer.eps >= limits.eps and _least(own) >= _least(wanted)


_F4, _E8M0 = TORCH_DTYPES.get("F4"), TORCH_DTYPES.get("F8_E8M0")
"""Two numbers in an element, which torch does not cast; powers of two, without 0, sign and inf."""


def _least(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a dtype."""
    limits = torch.finfo(dtype)
    return limits.tiny * limits.eps


@cache
def _largest_bits(dtype: torch.dtype) -> int:
    """Return the bits of the largest finite number of a floating dtype. Those of inf and NaN are larger."""
    return int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(INTEGERS[dtype.itemsize]))


@cache
def _saturates(dtype: torch.dtype) -> bool:
    """Return whether this torch casts what is too large to the largest number and not to inf or NaN (F8_E4M3)."""
    return bool(torch.tensor(torch.inf).to(dtype).float().isfinite())


def _is_inside(values: torch.Tensor) -> bool:
    """Return whether floating numbers on the CPU have no 0, no inf and no NaN, and none to which torch saturates."""
    size, largest = values.itemsize, _largest_bits(values.dtype) - _saturates(values.dtype)
    words = values.view(INTEGERS[size]).numpy()
    signed, unsigned, sign = words.view(f"i{size}"), words.view(f"u{size}"), 1 << (8 * size - 1)
    return bool(
        signed.max() <= largest
        and int(unsigned.max()) <= largest + sign
        and unsigned.min()
        and int(signed.min()) > -sign
    )


def _num_lost(source: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Return how many values are other ones because of their size, on the device of the tensors."""
    if not result.is_floating_point():
        # Not all integers can be compared with 0.
        below = [one.long() < 0 if one.dtype.is_signed else False for one in (source, result)]
        return ((result.to(source.dtype) != source) | (below[0] != below[1])).sum()
    if result.dtype == _E8M0:
        source = source if source.is_floating_point() and source.itemsize > 1 else source.float()
        small = (source <= 0).logical_or_(source < _least(result.dtype)).sum()
        # From half a step above the largest one on it is NaN, as inf is.
        return small.add_((source >= 1.5 * torch.finfo(result.dtype).max).sum()).sub_(source.isinf().sum())
    zeros = _num_zeros(result) - _num_zeros(source)
    if not _saturates(result.dtype):
        return zeros + _num_not_finite(result) - _num_not_finite(source)
    limits = torch.finfo(result.dtype)  # a number is lost from half a step above the largest one on
    limit = limits.max + math.ldexp(limits.eps, math.frexp(limits.max)[1] - 2)
    source = source.float() if source.itemsize == 1 else source  # torch compares no F8
    above = (source > limit).logical_or_(source < -limit).sum()
    return zeros + above - (source.isinf().sum() if source.is_floating_point() else 0)


def _num_zeros(values: torch.Tensor) -> torch.Tensor:
    if values.dtype == _E8M0:
        return torch.zeros((), dtype=torch.long, device=values.device)
    return (values == 0 if _is_comparable(values) else _magnitude(values) == 0).sum()


def _num_not_finite(values: torch.Tensor) -> torch.Tensor | int:
    """Return how many numbers are inf or NaN, with a byte or two of memory for each number."""
    if not values.is_floating_point():
        return 0
    if values.dtype == _E8M0:
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


# The bytes of a group, for consumers that copy them.


def is_copied_whole(group: Any, copied: AbstractSet[str]) -> bool:
    """Return whether the bytes of all tensors of a group (`stio.loading.plan.Group`) are copied as they are."""
    return bool(copied) and copied >= set(group.names) and not group.posts


def image_over(memory: torch.Tensor, group: Any) -> Image:
    """Return the image of a group over its bytes."""
    parts = zip(group.names, group.offsets, group.dtypes, group.shapes, strict=True)
    return Image(memory, {name: (at, TORCH_DTYPES[kind], torch_shape(kind, shape)) for name, at, kind, shape in parts})


# The memory of a group on a device.


@dataclass(frozen=True, slots=True)
class GroupMemory:
    """The device memory of one group. A byte of it is addressed by its offset in the group."""

    tensors: dict[str, torch.Tensor]
    """The tensors by name, in their order; none if there is an image."""
    image: Image | None
    """All of the group's bytes."""
    _tensors: Sequence[torch.Tensor]
    _sizes: Sequence[int]
    _starts: Sequence[int]

    @classmethod
    def allocate(
        cls, accelerator: Accelerator, groups: Sequence[Any], copied: AbstractSet[str] = frozenset()
    ) -> list[GroupMemory]:
        """Allocate for the tensors of groups (`stio.loading.plan.Group`), in one call.

        Args:
            accelerator: The device.
            groups: The groups.
            copied: Names of tensors whose bytes the consumer copies as they are. A group of these only gets an image.

        Raises:
            DeviceMemoryError: The device is full; nothing stays allocated.
        """
        as_images = [is_copied_whole(group, copied) for group in groups]
        kinds: list[Sequence[tuple[str, tuple[int, ...]]]] = [
            [("U8", (group.nbytes,))] if as_image else list(zip(group.dtypes, group.shapes, strict=True))
            for group, as_image in zip(groups, as_images, strict=True)
        ]
        wanted = [(TORCH_DTYPES[dtype], torch_shape(dtype, shape)) for some in kinds for dtype, shape in some]
        with collection_paused(sum(len(group.names) for group in groups)):
            tensors = iter(accelerator.allocate(wanted))
            found = []
            for group, as_image, some in zip(groups, as_images, kinds, strict=True):
                own, sizes = list(islice(tensors, len(some))), [tensor_nbytes(*kind) for kind in some]
                if as_image:
                    found.append(cls({}, image_over(own[0], group), own, sizes, (0,)))
                else:
                    found.append(cls(dict(zip(group.names, own, strict=True)), None, own, sizes, group.offsets))
        return found

    def places(self, start: int, nbytes: int) -> Iterator[tuple[torch.Tensor, int, int, int]]:
        """Return where the group's bytes `[start, start + nbytes)` belong: runs of them, each in one tensor.

        Returns:
            Tensor, offset of the byte in it, offset in the group, length. Bytes between tensors belong nowhere.
        """
        stop = start + nbytes
        for k in range(max(0, bisect_right(self._starts, start) - 1), len(self._starts)):
            begin = self._starts[k]
            if begin >= stop:
                break
            low, high = max(start, begin), min(stop, begin + self._sizes[k])
            if low < high:
                yield self._tensors[k], low - begin, low, high - low

    def copies(self, start: int, region: Region) -> list[tuple[torch.Tensor, Region]]:
        """Return the copies out of a region that holds the group's bytes from `start` on, each with its target."""
        return [
            (bytes_of_tensor(tensor, at, length), region.sub(low - start, length))
            for tensor, at, low, length in self.places(start, region.nbytes)
        ]


def device_storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    """Return the storages of tensors on devices, to be held until the tensors are released.

    The end of a tensor releases the GIL. If memory of a device is freed there, a busy thread has time to take the GIL,
    for 5 ms. The end of a storage keeps it.
    """
    return [tensor.untyped_storage() for tensor in tensors if not tensor.is_cpu]


def bytes_of_tensor(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Return bytes of the storage of a tensor as a uint8 tensor `[nbytes]`."""
    storage = tensor.untyped_storage()
    (whole,) = over_storages([(storage, torch.uint8, (storage.nbytes(),))])
    return whole if nbytes == storage.nbytes() else whole[start : start + nbytes]
