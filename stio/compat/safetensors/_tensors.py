"""torch tensors over a file's bytes, each with a storage of exactly its bytes.

Over a mapping nothing is copied: a part that is contiguous in the file is a tensor over that piece of the mapping,
another one is copied, so that only its own pages are read. Indexing is torch's own there. With `pread` the index
becomes byte ranges, and only those are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from stio.compat.safetensors._errors import SafetensorError, UnsupportedDtypeError
from stio.compat.safetensors._file import File
from stio.compat.safetensors._index import checked
from stio.device.tensors import TORCH_DTYPES, finish, tensors_in, torch_shape, typed
from stio.format.slicing import select
from stio.runtime.memory import Region

__all__ = ["Tensors", "require_torch_dtype"]

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Shape = tuple[int, ...]


def require_torch_dtype(dtype: str, shape: Shape) -> None:
    """Raise `UnsupportedDtypeError` for what torch cannot hold."""
    if dtype not in TORCH_DTYPES:
        raise UnsupportedDtypeError(
            f"Dtype not understood: {dtype}; torch has no such type, get_slice() tells shape and dtype, "
            "deserialize() gives the bytes"
        )
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise SafetensorError(f"f4_x2 dtype requires that the last dim be divisible by 2 in torch: got {list(shape)}")


class Tensors:
    """Makes torch tensors.

    Args:
        device: Where they shall be, as torch's `to` takes it.
    """

    def __init__(self, device: str | int) -> None:
        self._device = device

    def make(
        self,
        region: Region,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Shape],
        offsets: Sequence[int],
    ) -> dict[str, torch.Tensor]:
        """Return tensors over a region, or their copies on the device, by name."""
        for dtype, shape in zip(dtypes, shapes, strict=True):
            if dtype not in TORCH_DTYPES or dtype == "F4":
                require_torch_dtype(dtype, shape)
        tensors = tensors_in(region, names, dtypes, shapes, offsets)
        if self._device != "cpu":
            for name in names:
                tensors[name] = tensors[name].to(self._device)
        return tensors

    def whole(self, file: File) -> dict[str, torch.Tensor] | None:
        """Return None: there is no shorter way to all tensors of a file than `make`."""
        return None

    def pick(self, file: File, row: int, index: Any) -> torch.Tensor:
        """Return a part of a tensor; only its bytes are read."""
        header = file.header
        dtype, shape = header.dtypes[row], header.shapes[row]
        require_torch_dtype(dtype, shape)
        tensor = (_view if file.is_mapped else _read)(file, row, dtype, shape, index)
        return tensor if self._device == "cpu" else tensor.to(self._device)


def _view(file: File, row: int, dtype: str, shape: Shape, index: Any) -> torch.Tensor:
    begin, end = file.header.begins[row], file.header.ends[row]
    whole = tensors_in(file.region(begin, end - begin), [""], [dtype], [shape], [0])[""]
    if dtype == "F4":
        asked = torch.empty(shape, device="meta")[index].shape
        got = torch.empty(whole.shape, device="meta")[index].shape
        _require_whole_pairs(shape, asked, got)
    # As integers: torch does not pick numbers of every dtype, and none may change on the way.
    item = whole.itemsize
    numbers = whole.view(_INTEGERS[item])
    picked = numbers[index]
    sizes = tuple(picked.shape)
    if not picked.numel():
        return torch.empty(sizes, dtype=TORCH_DTYPES[dtype], device="cpu")
    if picked.untyped_storage().data_ptr() != numbers.untyped_storage().data_ptr():
        return typed(picked.contiguous(), dtype, sizes)  # picked by a list or mask: a copy already
    if not picked.is_contiguous():
        return typed(picked.clone(memory_format=torch.contiguous_format), dtype, sizes)
    part = file.region(begin + int(picked.storage_offset()) * item, picked.numel() * item)
    return tensors_in(part, [""], [dtype], [_format_shape(dtype, sizes)], [0])[""]


def _read(file: File, row: int, dtype: str, shape: Shape, index: Any) -> torch.Tensor:
    wanted = checked(index, shape, negative_steps=False)
    sizes = torch_shape(dtype, shape)
    selection = select(wanted, sizes, TORCH_DTYPES[dtype].itemsize)
    if dtype == "F4":
        _require_whole_pairs(shape, select(wanted, shape, 1).shape, selection.shape)
    region = file.gather(file.header.begins[row], selection.starts, selection.chunk_bytes)
    tensors = tensors_in(region, [""], [dtype], [_format_shape(dtype, selection.read_shape)], [0])
    return (tensors if selection.post is None else finish(tensors, {"": selection}, None))[""]


def _format_shape(dtype: str, sizes: Shape) -> Shape:
    return (*sizes[:-1], sizes[-1] * 2) if dtype == "F4" else sizes


def _require_whole_pairs(shape: Shape, asked: Sequence[int], got: Sequence[int]) -> None:
    """Refuse an index into packed pairs: the file's shape and torch's would mean different elements by it.

    Args:
        shape: The tensor's shape in the file.
        asked: Shape of the part, if the index counts elements.
        got: Shape of the part, if it counts pairs.
    """
    if not (asked and got and asked[-1] == shape[-1] and got[-1] * 2 == shape[-1]):
        raise SafetensorError("F4 packs two elements into a byte: slice its other dimensions, not the last one")
