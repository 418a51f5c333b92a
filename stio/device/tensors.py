"""The format's dtypes in torch, tensors over memory that was filled before, and where in its storage a tensor is.

Each tensor gets a storage of exactly its bytes and a version counter of its own. Views of one large buffer break
`torch.save`, the hub's splitter, `save_model` and in-place changes under autograd. DLPack gives both without a copy,
and holds the GIL. Nearly every other call of torch releases it, which costs up to 5 ms a tensor beside a busy Python
thread. One tensor takes about 1 microsecond.

On a device each tensor is an allocation of its own too: it is freed alone, and a user's `record_stream` protects it.
They are made by calls that keep the GIL (`stio.device.torch_private`).

A storage may be freed or made shorter while tensors refer to it: FSDP and the sleep modes of inference servers call
`untyped_storage().resize_`. torch does not check that when it copies, so memory of others would be read or changed, or
the process would end. Each tensor is checked when its load or save begins (`extent_of`), and again just before the
copy, since another thread may have changed it.
"""

from __future__ import annotations

import ctypes
import difflib
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stio import process
from stio.device.base import Accelerator, Image
from stio.device.changes import write_changes
from stio.device.torch_private import from_dlpack, over_storages, without_torch_function
from stio.errors import UnsupportedDtypeError, printable
from stio.format import BITS, LIBRARY_NAMES, tensor_nbytes
from stio.runtime.memory import Region

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


class Dtypes(dict[str, torch.dtype]):
    """The dtypes of the format that this torch has, by their names in the format."""

    def name(self, dtype: torch.dtype) -> str:
        """Return the name in the format of a dtype of torch; empty if the format has no such dtype."""
        return FORMAT_DTYPES.get(dtype, "")

    def shape(self, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in torch for a shape of the format: two F4 numbers are one element of torch."""
        return (*shape[:-1], shape[-1] // 2) if dtype == "F4" else shape

    def fits(self, dtype: str, shape: tuple[int, ...], target: tuple[int, ...]) -> bool:
        """Return whether a tensor of the format can be loaded into a shape of torch.

        A tensor of shape [1] can be loaded into a scalar, as by torch's `load_state_dict`: scales are written both
        ways.
        """
        return self.shape(dtype, shape) == target or (shape == (1,) and not target and dtype != "F4")

    def require(self, dtypes: Iterable[str], *, path: str) -> None:
        """Raise `UnsupportedDtypeError` for the first dtype that this torch cannot hold."""
        for dtype in dict.fromkeys(dtypes):
            if dtype not in self:
                message = "torch has no such dtype; leave these tensors out (names= of stio.load)"
                raise UnsupportedDtypeError(message, path=path, found=dtype)

    def loses_values(self, stored: str, dtype: torch.dtype) -> bool:
        """Return whether a copy of a tensor of the format into one of torch would lose its values; see `rank_of`."""
        own = self.get(stored)
        return own is not None and rank_of(own) > rank_of(dtype)

    @staticmethod
    @cache
    def holds_all(own: torch.dtype, wanted: torch.dtype) -> bool:
        """Return whether a dtype holds all values of another one exactly."""
        if own == wanted:
            return True
        if F4 in (own, wanted) or wanted == E8M0 or not (wanted in FORMAT_DTYPES or wanted.is_complex):
            return False
        if own == torch.bool:
            return True
        if wanted == torch.bool or rank_of(own) > rank_of(wanted):
            return False
        if not rank_of(wanted):
            small, large = torch.iinfo(own), torch.iinfo(wanted)
            return large.min <= small.min and small.max <= large.max
        limits = torch.finfo(wanted)
        if not rank_of(own):
            return torch.iinfo(own).max <= 2 / limits.eps
        finer = torch.finfo(own)
        return finer.max <= limits.max and finer.eps >= limits.eps and smallest_of(own) >= smallest_of(wanted)

    def parse(self, dtype: object) -> torch.dtype:
        """Return the dtype that an argument `dtype=` means: a dtype of torch, or a name of one, in any case.

        A name is spelled as in torch ("bfloat16") or in the format ("BF16").

        Raises:
            TypeError: It is neither a dtype nor text.
            ValueError: torch has no dtype of this name.
        """
        if isinstance(dtype, torch.dtype):
            return dtype
        if not isinstance(dtype, str):
            raise TypeError(f"dtype= takes a torch.dtype or the name of one, not {dtype!r}")
        known = self.get(dtype.upper()) or vars(torch).get(dtype.lower().removeprefix("torch."))
        if isinstance(known, torch.dtype):
            return known
        spelled = {name.upper(): name for pair in LIBRARY_NAMES.items() if pair[0] in self for name in pair[::-1]}
        near = difflib.get_close_matches(dtype[:_LONGEST_NAME].upper(), spelled, n=1)
        raise ValueError(
            "dtype= takes a torch.dtype, or the name of one in torch or in the format, such as 'bfloat16' or 'BF16', "
            f"not {printable(dtype)!r}{f'; did you mean {spelled[near[0]]!r}?' if near else ''}"
        )


TORCH_DTYPES = Dtypes(
    {name: getattr(torch, library_name) for name, library_name in LIBRARY_NAMES.items() if hasattr(torch, library_name)}
)
"""See `Dtypes`."""

FORMAT_DTYPES: dict[torch.dtype, str] = {dtype: name for name, dtype in TORCH_DTYPES.items()}
"""The name in the format of each of torch's types."""

F4, E8M0 = TORCH_DTYPES.get("F4"), TORCH_DTYPES.get("F8_E8M0")
"""Two numbers in an element, which torch does not cast; powers of two, without 0, sign and inf."""


def smallest_of(dtype: torch.dtype) -> float:
    """Return the smallest positive number of a dtype."""
    limits = torch.finfo(dtype)
    return limits.tiny * limits.eps


_LONGEST_NAME = 40
"""Characters of an unknown name that are compared with the known ones: the time grows with their square."""


def rank_of(dtype: torch.dtype) -> int:
    """Return the rank of a dtype: 0 whole numbers and truth values, 1 floating, 2 complex.

    A cast to a lower rank loses values, not only precision: the fraction, or the imaginary part.
    """
    return 2 if dtype.is_complex else 1 if dtype.is_floating_point else 0


_DLTENSOR_DTYPE_AT = 20  # void* data, int32 device type and id, int32 ndim, then the dtype's four bytes

_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def typed(flat: torch.Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of another shape over the whole storage of `flat`, and not a view of `flat`.

    Args:
        flat: Any tensor with a storage of exactly these bytes.
        shape: The new tensor's shape.
        dtype: Its dtype; None: that of `flat`.
    """
    return over_storages([(flat.untyped_storage(), dtype or flat.dtype, shape)])[0]


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
    with process.collection_paused(len(names)):
        for name, dtype, shape, offset in zip(names, dtypes, shapes, offsets, strict=True):
            maker = makers[dtype]
            if dtype == "F4":
                shape = TORCH_DTYPES.shape(dtype, shape)
            if 0 in shape:
                result[name] = torch.empty(shape, dtype=maker.torch, device="cpu")  # also under another default device
                continue
            data = array(shape, maker.numpy, owner, base + offset)
            if (address + offset) % maker.alignment:
                data = data.copy()
            if not maker.by_dlpack:
                result[name] = typed(torch.from_numpy(data.reshape(-1).view(np.uint8)), shape, maker.torch)
                continue
            capsule = data.__dlpack__()
            if maker.word:
                word_at(pointer(capsule, b"dltensor") + _DLTENSOR_DTYPE_AT).value = maker.word
            result[name] = make(capsule)
    return result


# Where a tensor is in its storage.

GATHER_FSDP = (
    "save what `state_dict()` returns of the module that FullyShardedDataParallel made, with "
    "StateDictType.FULL_STATE_DICT"
)
"""What to do about a tensor of FSDP1."""

Extent: TypeAlias = tuple[int, int, int, int]
"""The first byte of a tensor in its storage, the byte after its last one, the storage's address, and its size."""


class ShortStorageError(Exception):
    """The storage of a tensor does not have all of its bytes; callers raise an error of their own for it."""

    def __init__(self, needed_bytes: int, held_bytes: int) -> None:
        super().__init__("its memory was freed or shrunk (sharded training and the sleep modes of servers do that)")
        self.needed_bytes = needed_bytes
        """Size that the storage must have."""
        self.held_bytes = held_bytes
        """Size that it has."""


def extent_of(tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> Extent:
    """Return where a dense tensor is in its storage, or would be in another one.

    Raises:
        ShortStorageError: The storage does not have all of its bytes.
        RuntimeError: It has no storage (inside a function transform of torch).
    """
    nbytes, item = tensor.nbytes, tensor.itemsize
    begin = int(tensor.storage_offset()) * item
    end = begin + nbytes
    if not tensor.is_contiguous():
        end = begin + item
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            end += (size - 1) * stride * item
    storage = storage or tensor.untyped_storage()
    address, held = storage.data_ptr(), storage.nbytes()
    if nbytes and (end > held or not address):
        raise ShortStorageError(end, held if address else 0)
    return begin, end, address, held


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own that a tensor consists of: itself, or those that it wraps.

    There are none in one that is lazy, on `meta`, sparse, nested, or handles its data in another way.
    """
    if type(tensor) not in PLAIN:
        if is_lazy(tensor):
            return
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            wrapper: Any = tensor
            if is_traceable_wrapper_subclass(wrapper):
                for name in wrapper.__tensor_flatten__()[0]:
                    if isinstance(inner := getattr(wrapper, name), torch.Tensor):  # a DTensor names its mesh too
                        yield from dense_parts(inner)
            return
        with without_torch_function():
            tensor = tensor.as_subclass(torch.Tensor)
    if not tensor.is_meta and tensor.layout is torch.strided and not tensor.is_nested:
        yield tensor


def require_data(name: str, tensor: torch.Tensor) -> Extent:
    """Return where a tensor is that a save will read.

    Args:
        name: The tensor, for the error; empty: not known.
        tensor: A dense tensor with a storage.

    Raises:
        ValueError: Its storage does not have all of its bytes.
    """
    try:
        return extent_of(tensor)
    except ShortStorageError as error:
        raise _no_data(name, error) from None


def require_held(storage: torch.UntypedStorage, address: int, end: int) -> None:
    """Raise `ValueError` unless a storage still has its memory at an address, with so many bytes."""
    if storage.data_ptr() != address or storage.nbytes() < end:
        raise _no_data("", ShortStorageError(end, storage.nbytes()))


def _no_data(name: str, error: ShortStorageError) -> ValueError:
    what = f"tensor {printable(name)!r}" if name else "a tensor"
    return ValueError(
        f"{what} has no data: {error}; save the model while it is awake or gathered (of FSDP1: {GATHER_FSDP}); "
        f"expected {error.needed_bytes:,} bytes, found {error.held_bytes:,} bytes"
    )


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
        as_images = [cls.is_copied_whole(group, copied) for group in groups]
        kinds: list[Sequence[tuple[str, tuple[int, ...]]]] = [
            [("U8", (group.nbytes,))] if as_image else list(zip(group.dtypes, group.shapes, strict=True))
            for group, as_image in zip(groups, as_images, strict=True)
        ]
        wanted = [(TORCH_DTYPES[dtype], TORCH_DTYPES.shape(dtype, shape)) for some in kinds for dtype, shape in some]
        with process.collection_paused(sum(len(group.names) for group in groups)):
            tensors = iter(accelerator.allocate(wanted))
            found = []
            for group, as_image, some in zip(groups, as_images, kinds, strict=True):
                own, sizes = list(islice(tensors, len(some))), [tensor_nbytes(*kind) for kind in some]
                if as_image:
                    found.append(cls({}, cls.image_over(own[0], group), own, sizes, (0,)))
                else:
                    found.append(cls(dict(zip(group.names, own, strict=True)), None, own, sizes, group.offsets))
        return found

    @staticmethod
    def is_copied_whole(group: Any, copied: AbstractSet[str]) -> bool:
        """Return whether the bytes of all tensors of a group are copied as they are."""
        return bool(copied) and copied >= set(group.names) and not group.posts

    @staticmethod
    def image_over(memory: torch.Tensor, group: Any) -> Image:
        """Return the image of a group over its bytes."""
        parts = zip(group.names, group.offsets, group.dtypes, group.shapes, strict=True)
        tensors = {name: (at, TORCH_DTYPES[kind], TORCH_DTYPES.shape(kind, shape)) for name, at, kind, shape in parts}
        return Image(memory, tensors)

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

    def write_changes(
        self,
        changes: Iterable[tuple[torch.Tensor, torch.Tensor, int]],
        pieces: Sequence[tuple[int, int, int]],
    ) -> None:
        """Write changed elements of one tensor, on the current stream.

        Args:
            changes: The oldest first: codes, values and bytes of an element; see `write_changes` in `changes.py`.
            pieces: What the group has of it: first element, number of elements, offset in the group. Ascending.
        """
        (tensor, start, _, _) = next(self.places(pieces[0][2], 1))
        memory = bytes_of_tensor(tensor, 0, tensor.untyped_storage().nbytes())
        places = [(first, number, at - pieces[0][2] + start) for first, number, at in pieces]
        for codes, values, item_bytes in changes:
            write_changes(memory, codes, values, item_bytes, places)

    def copies(self, start: int, region: Region) -> list[tuple[torch.Tensor, Region]]:
        """Return the copies out of a region that holds the group's bytes from `start` on, each with its target."""
        return [
            (bytes_of_tensor(tensor, at, length), region.sub(low - start, length))
            for tensor, at, low, length in self.places(start, region.nbytes)
        ]


def bytes_of_tensor(tensor: torch.Tensor, start: int, nbytes: int) -> torch.Tensor:
    """Return bytes of the storage of a tensor as a uint8 tensor `[nbytes]`."""
    storage = tensor.untyped_storage()
    (whole,) = over_storages([(storage, torch.uint8, (storage.nbytes(),))])
    return whole if nbytes == storage.nbytes() else whole[start : start + nbytes]
