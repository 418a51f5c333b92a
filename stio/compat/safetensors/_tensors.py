"""torch tensors over a file's bytes, each with a storage of exactly its bytes.

Over a mapping, nothing is copied but what an index by a list or a mask selects. A part that is contiguous in the file
is a tensor over that range of the mapping; another part is a strided view of its tensor, whose pages are read when they
are used. torch itself does the indexing there. With `pread` the index becomes byte ranges: only those are read, and
short gaps between them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from stio.compat.safetensors._errors import SafetensorError, UnsupportedDtypeError, reading
from stio.compat.safetensors._file import DropInFile, Framework, checked, offsets_in
from stio.device.tensors import TORCH_DTYPES, select_and_cast, tensors_in, torch_shape, typed
from stio.device.torch_private import INTEGERS, moved
from stio.format.header import Header
from stio.format.slicing import WORTHWHILE_STRIDE_BYTES, select
from stio.runtime.memory import Region

Shape = tuple[int, ...]

_WHOLE_ROWS_BYTES = 64 << 20
"""Most bytes that are read at once where only a part of each row is selected (`pread`)."""


def require_torch_dtypes(dtypes: Sequence[str], shapes: Sequence[Shape]) -> None:
    """Raise `UnsupportedDtypeError` for the first tensor that torch cannot hold."""
    for dtype, shape in zip(dtypes, shapes, strict=True):
        if dtype not in TORCH_DTYPES or dtype == "F4":
            _require_torch_dtype(dtype, shape)


def _require_torch_dtype(dtype: str, shape: Shape) -> None:
    if dtype not in TORCH_DTYPES:
        raise UnsupportedDtypeError(
            f"Dtype not understood: {dtype}; torch has no such type, get_slice() tells shape and dtype, "
            "deserialize() gives the bytes"
        )
    if dtype == "F4" and (not shape or shape[-1] % 2):
        raise SafetensorError(f"f4_x2 dtype requires that the last dim be divisible by 2 in torch: got {list(shape)}")


class Tensors(Framework):
    """Makes torch tensors; see `Framework`.

    Args:
        device: Device of the tensors, as torch's `to` takes it.
    """

    def __init__(self, device: str | int) -> None:
        self._device = device

    def make(self, region: Region, header: Header, rows: slice) -> dict[str, torch.Tensor]:
        """Return tensors over a region, or their copies on the device, by name."""
        names, dtypes, shapes = header.names[rows], header.dtypes[rows], header.shapes[rows]
        require_torch_dtypes(dtypes, shapes)
        tensors = tensors_in(region, names, dtypes, shapes, offsets_in(header, rows))
        if self._device != "cpu":
            for name in names:
                tensors[name] = tensors[name].to(self._device)
        return tensors

    def make_part(self, file: DropInFile, row: int, index: Any) -> torch.Tensor:
        header = file.header
        dtype, shape = header.dtypes[row], header.shapes[row]
        _require_torch_dtype(dtype, shape)
        tensor = (_view if file.is_mapped else _read)(file, row, dtype, shape, index)
        return tensor if self._device == "cpu" else moved(tensor, self._device)


def _view(file: DropInFile, row: int, dtype: str, shape: Shape, index: Any) -> torch.Tensor:
    whole = tensors_in(file.region_of(slice(row, row + 1)), [""], [dtype], [shape], [0])[""]
    if dtype == "F4":
        nothing = torch.empty(1, dtype=torch.uint8)  # an index by a mask needs values
        require_whole_pairs(shape, lambda sizes: nothing.expand(sizes)[index].shape)
    # As integers: torch does not index tensors of every dtype, and no bit may change.
    item = whole.itemsize
    numbers = whole.view(INTEGERS[item])
    picked = numbers[index]
    sizes = tuple(picked.shape)
    if not picked.numel():
        return torch.empty(sizes, dtype=TORCH_DTYPES[dtype], device="cpu")
    if picked.untyped_storage().data_ptr() != numbers.untyped_storage().data_ptr():
        return typed(picked.contiguous(), dtype, sizes)  # indexed by a list or mask: a copy already
    if not picked.is_contiguous():
        return picked.view(TORCH_DTYPES[dtype])  # strided, as in the original: a user copies it to its place once
    part = file.region(file.header.begins[row] + int(picked.storage_offset()) * item, picked.numel() * item)
    return tensors_in(part, [""], [dtype], [_format_shape(dtype, sizes)], [0])[""]


def _read(file: DropInFile, row: int, dtype: str, shape: Shape, index: Any) -> torch.Tensor:
    sizes, item = torch_shape(dtype, shape), TORCH_DTYPES[dtype].itemsize
    index = checked(index, shape, negative_steps=False)
    with reading(file.path):
        if dtype == "F4":
            require_whole_pairs(shape, partial(selected_shape, index))
        selection = select(index, sizes, item, gap_bytes=WORTHWHILE_STRIDE_BYTES, image_bytes=_WHOLE_ROWS_BYTES)
    region = file.gather(row, selection)
    tensors = tensors_in(region, [""], [dtype], [_format_shape(dtype, selection.read_shape)], [0])
    if selection.post is not None or selection.flip:
        tensors = select_and_cast(tensors, {"": selection}, None)
    return tensors[""]


def _format_shape(dtype: str, sizes: Shape) -> Shape:
    return (*sizes[:-1], sizes[-1] * 2) if dtype == "F4" else sizes


def selected_shape(index: Any, shape: Shape) -> Sequence[int]:
    """Return the shape of a part that `select` takes; of one whose last dimension is reversed, one without it."""
    selection = select(index, shape, 1)
    return selection.shape[:-1] if len(selection.shape) - 1 in selection.flip else selection.shape


def require_whole_pairs(shape: Shape, part_of: Callable[[Shape], Sequence[int]]) -> None:
    """Refuse an index into packed pairs: it means different elements for the file's shape and for torch's.

    Args:
        shape: The tensor's shape in the file.
        part_of: Returns the shape of the part that the index takes of a shape.
    """
    by_elements = part_of(shape)
    is_whole = bool(by_elements) and by_elements[-1] == shape[-1]
    by_pairs = part_of(torch_shape("F4", shape)) if is_whole else ()
    if not by_pairs or by_pairs[-1] * 2 != shape[-1]:
        raise SafetensorError("F4 packs two elements into a byte: slice its other dimensions, not the last one")
