"""torch tensors over a file's bytes, or loaded from it to a device.

Over a mapping, nothing is copied but what an index by a list or a mask selects. A part that is contiguous in the file
is a tensor over that range of the mapping; another part is a strided view of its tensor, whose pages are read when they
are used. torch itself does the indexing there. With `pread` the index becomes byte ranges: only those are read, and
short gaps between them. Each tensor of a whole or contiguous part has a storage of exactly its bytes.

All tensors of a file go to a device by one load of stio, which reads ahead into pinned memory while the device copies.
A single tensor, and all of them on a device without streams in torch, or one that does not exist, go there by torch's
own copy, which raises its own errors.

`safe_open.prefetch` is a load whose tensors are taken by name (`stio.loading.by_name`). The interface is that of
safetensors 0.9.0rc1: `prefetch` returns a `PrefetchLoader`, which returns each tensor once, by `take` or by iteration,
and the file object itself is unchanged. Code for an earlier state of the interface, in which `get_tensor` of the file
object returned these tensors, gets the right ones: it drops the loader, whose reading ends, and `get_tensor` reads each
tensor. Beyond the original: it loads to the CPU too, and to every device of torch; a plan may have any index that
`stio.load` takes in `slices=`, with several intervals along a dimension; and `budget_bytes` bounds what was read and
not taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

import torch

from stio.compat.safetensors._file import (
    DropInFile,
    Framework,
    SafetensorError,
    UnsupportedDtypeError,
    checked,
    offsets_in,
    reading,
    wrong_type,
)
from stio.device import TORCH_DTYPES, Casts, TorchAccelerator, moved, resolve_device, select_and_cast, tensors_in, typed
from stio.errors import DeviceError, DeviceMemoryError
from stio.format import Header, select
from stio.loading import LoadByName, LoadOptions, collect, select_tensors
from stio.process import contextmanager
from stio.runtime import Operation
from stio.runtime.memory import Region
from stio.storage import LocalFile
from stio.storage.checkpoint import OpenCheckpoint

Shape = tuple[int, ...]

_GAP_BYTES = 16 << 10
_WHOLE_ROWS_BYTES = 64 << 20
"""Most bytes that are read at once where only a part of each row is selected (`pread`)."""


def require_torch_dtypes(dtypes: Sequence[str], shapes: Sequence[Shape]) -> None:
    """Raise `UnsupportedDtypeError` for the first tensor that torch cannot hold."""
    for dtype, shape in zip(dtypes, shapes, strict=True):
        if dtype not in TORCH_DTYPES:
            raise UnsupportedDtypeError(
                f"Dtype not understood: {dtype}; torch has no such type, get_slice() tells shape and dtype, "
                "deserialize() gives the bytes"
            )
        if dtype == "F4" and (not shape or shape[-1] % 2):
            raise SafetensorError(
                f"f4_x2 dtype requires that the last dim be divisible by 2 in torch: got {list(shape)}"
            )


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

    def make_all(self, file: DropInFile) -> dict[str, torch.Tensor]:
        """Return all tensors of a file by name, in the order of their data.

        Raises:
            torch.OutOfMemoryError: The device is full; torch's own copy raises the same error.
        """
        target = None if self._device == "cpu" else served(self._device)
        if target is None:
            return super().make_all(file)
        require_torch_dtypes(file.header.dtypes, file.header.shapes)
        opened, options = _opened(file, file.file), LoadOptions(device=target)
        operation = Operation(lambda operation: collect(operation, select_tensors(opened, None, options)), name="load")
        with loading(file.path):
            return operation.result()()

    def make_part(self, file: DropInFile, row: int, index: Any) -> torch.Tensor:
        header = file.header
        dtype, shape = header.dtypes[row], header.shapes[row]
        require_torch_dtypes([dtype], [shape])
        if dtype == "F4":
            require_whole_pairs(index, shape)
        tensor = (_view if file.is_mapped else _read)(file, row, dtype, shape, index)
        return tensor if self._device == "cpu" else moved(tensor, self._device)


def _view(file: DropInFile, row: int, dtype: str, shape: Shape, index: Any) -> torch.Tensor:
    whole = tensors_in(file.region_of(slice(row, row + 1)), [""], [dtype], [shape], [0])[""]
    # As integers: torch does not index tensors of every dtype, and no bit may change.
    item = whole.itemsize
    numbers = whole.view((torch.uint8, torch.int16, torch.int32, torch.int64)[item.bit_length() - 1])
    picked = numbers[index]
    sizes = tuple(picked.shape)
    if not picked.numel():
        return torch.empty(sizes, dtype=TORCH_DTYPES[dtype], device="cpu")
    if picked.untyped_storage().data_ptr() != numbers.untyped_storage().data_ptr():
        return typed(picked.contiguous(), sizes, TORCH_DTYPES[dtype])  # indexed by a list or mask: a copy already
    if not picked.is_contiguous():
        return picked.view(TORCH_DTYPES[dtype])  # strided, as in the original: a user copies it to its place once
    part = file.region(file.header.begins[row] + int(picked.storage_offset()) * item, picked.numel() * item)
    return tensors_in(part, [""], [dtype], [_format_shape(dtype, sizes)], [0])[""]


def _read(file: DropInFile, row: int, dtype: str, shape: Shape, index: Any) -> torch.Tensor:
    sizes, item = TORCH_DTYPES.shape(dtype, shape), TORCH_DTYPES[dtype].itemsize
    index = checked(index, shape, negative_steps=False)
    with reading(file.path):
        selection = select(index, sizes, item, gap_bytes=_GAP_BYTES, image_bytes=_WHOLE_ROWS_BYTES)
    region = file.gather(row, selection)
    tensors = tensors_in(region, [""], [dtype], [_format_shape(dtype, selection.read_shape)], [0])
    if selection.post is not None or selection.flip:
        tensors = select_and_cast(tensors, {"": selection}, Casts())
    return tensors[""]


def _format_shape(dtype: str, sizes: Shape) -> Shape:
    return (*sizes[:-1], sizes[-1] * 2) if dtype == "F4" else sizes


def require_whole_pairs(index: Any, shape: Shape) -> None:
    """Refuse an index into F4 that may cut its last dimension: the elements are packed in pairs there.

    The same number would mean different elements for the file's shape and for torch's.
    """
    terms = index if isinstance(index, tuple) else (index,)
    plain = all(
        term is Ellipsis
        or isinstance(term, int | slice)
        or (isinstance(term, list) and all(isinstance(item, int | slice) for item in term))
        for term in terms
    )
    reaches_last = len(terms) >= len(shape) or any(term is Ellipsis for term in terms[:-1])
    if not plain or (reaches_last and terms and terms[-1] is not Ellipsis and terms[-1] != slice(None)):
        raise SafetensorError("F4 packs two elements into a byte: slice its other dimensions, not the last one")


@contextmanager
def loading(path: str) -> Iterator[None]:
    """Turn the errors of a load inside the block into those of `reading`, and a full device's into torch's."""
    with reading(path):
        try:
            yield
        except DeviceMemoryError as error:
            raise torch.OutOfMemoryError(str(error)) from error


def _opened(file: DropInFile, source: LocalFile) -> OpenCheckpoint:
    # No aliases are passed: stio records them under a metadata key of its own, and this format has none.
    return OpenCheckpoint(file.path, [source], [file.header], file.header.metadata, {})


def served(device: str | int) -> torch.device | None:
    """Return the device if stio's loads copy to it, else None."""
    try:
        resolved = resolve_device(device)
    except DeviceError:
        return None
    return resolved if resolved.type != "cpu" and TorchAccelerator.supports(resolved) else None


class PrefetchLoader:
    """Tensors of one file that are read in the background. Made by `safe_open.prefetch`; a context manager.

    Each tensor is returned once, by `take` or by iteration. It stays valid after the loader is closed. On a device its
    data are there for every stream; a part that a copy cannot cut out (with steps) only for the stream that was current
    at `prefetch`. Several threads may use a loader. It has its own descriptor of the file, so the file object may be
    closed before it. Reading ends, and tensors that were not taken are freed,
    when the loader is closed or deleted. In a forked child it is closed.
    """

    __module__ = "stio.compat.safetensors"
    __slots__ = ("__weakref__", "_load")

    def __init__(self, load: LoadByName) -> None:
        self._load = load

    def names(self) -> list[str]:
        """Return the names of the plan, in the order of their data; also those that were taken."""
        return list(self._load.names)

    def __len__(self) -> int:
        return len(self._load.names)

    def take(self, name: str) -> torch.Tensor:
        """Return a tensor, or the part that the plan has, after a wait for its data if necessary.

        A KeyboardInterrupt during the wait leaves the loader as it was.

        Raises:
            SafetensorError: The plan does not have the name, the tensor was taken before, the loader was closed, or
                the file is shorter than its header says.
            OSError: The system refuses to read, or the file was changed. Every later call raises it too.
            torch.OutOfMemoryError: The device is full.
        """
        load = self._load
        if not isinstance(name, str):
            raise wrong_type("name", name, "str")
        with loading(load.path):
            load.require_open()
            if name not in load.names:
                raise SafetensorError(f"{name} is not in the prefetch plan")
            if not load.claim(name):
                raise SafetensorError(
                    f"{name}: tensor already delivered (each is returned once, by take or by iteration)"
                )
            return load.take(name)

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor of those that were not taken, as they become ready; errors as for `take`."""
        load = self._load
        while True:
            with loading(load.path):
                if (name := load.claim_ready()) is None:
                    return
                tensor = load.take(name)
            yield name, tensor
            del tensor

    def close(self) -> None:
        """End the reading and free what was not taken; wait until no thread of the loader is left. Idempotent."""
        self._load.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_load"):
            self._load.cancel()


def prefetch(
    file: DropInFile,
    plan: Mapping[str, Any] | None,
    device: str | int,
    *,
    threads: int,
    budget_bytes: int | str | None,
) -> PrefetchLoader:
    """Start to read the tensors of a plan; see `safe_open.prefetch`."""
    names, slices = _checked(plan, file)
    loaded_to = torch.device("cpu")
    moved_to = None
    if device != "cpu":
        if (target := served(device)) is not None:
            loaded_to = target
        else:  # torch itself copies each tensor when it is taken
            with reading(file.path):
                moved_to = resolve_device(device)
    options = LoadOptions(device=loaded_to, memory="auto" if file.is_mapped else "copy", budget_bytes=budget_bytes)
    opened = _opened(file, file.opened_again())
    load = LoadByName(opened, dict.fromkeys(names), options, slices=slices, max_workers=threads, moved_to=moved_to)
    try:
        with loading(file.path):
            load.start()
    except BaseException:
        load.close()
        raise
    return PrefetchLoader(load)


def _checked(plan: Mapping[str, Any] | None, file: DropInFile) -> tuple[list[str], dict[str, Any]]:
    """Return the names of a plan in the order of their data, and the indices of those that are sliced."""
    header = file.header
    if plan is None:
        require_torch_dtypes(header.dtypes, header.shapes)
        return list(header.names), {}
    if not isinstance(plan, Mapping):
        raise wrong_type("plan", plan, "dict")
    plan = dict(plan)
    for name in plan:
        if not isinstance(name, str):
            raise SafetensorError(f"prefetch plan keys must be tensor names, got {type(name).__name__}")
        if name not in header:
            raise SafetensorError(f"File does not contain tensor {name}")
    if not plan:
        raise SafetensorError("prefetch plan selects no tensors")
    rows = sorted(map(header.positions.__getitem__, plan))
    require_torch_dtypes([header.dtypes[row] for row in rows], [header.shapes[row] for row in rows])
    slices = {name: index for name, index in plan.items() if index is not None}
    for name, index in slices.items():
        row = header.positions[name]
        if header.dtypes[row] == "F4":
            require_whole_pairs(index, header.shapes[row])
    return [header.names[row] for row in rows], slices
