"""`safe_open`: a file whose tensors are made on request; and numpy's arrays, which need no torch.

The header is read and checked at once, in the caller's thread. After the `with` block the file object holds nothing;
tensors and slices made from it stay valid. torch is imported by the first file that is opened for it.

Whole arrays are views of the mapping, or have memory of their own (`pread`). They are writable; writing never changes
the file. numpy itself has no bfloat16 and no float8: these work once `ml_dtypes` has been imported.
"""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, TypeAlias, cast, final

import numpy as np

from stio.compat.safetensors._file import (
    Backend,
    DropInFile,
    Framework,
    SafetensorError,
    UnsupportedDtypeError,
    checked,
    offsets_in,
    reading,
    require_plain,
    wrong_type,
)
from stio.format import LIBRARY_NAMES, Header, select
from stio.runtime.memory import Region

if TYPE_CHECKING:
    from stio.compat.safetensors._tensors import PrefetchLoader

FRAMEWORKS = {
    **dict.fromkeys(("pt", "torch", "pytorch"), "torch"),
    **dict.fromkeys(("np", "numpy"), "numpy"),
    **dict.fromkeys(("tf", "tensorflow", "jax", "flax", "mlx", "paddle"), "other"),
}

_DEVICES = ("cuda", "musa", "npu", "xpu", "xla", "mlu", "hpu")


def path_of(filename: object) -> str:
    """Return a path as text.

    Raises:
        TypeError: It is neither `str` nor a path object of `str`.
    """
    if not isinstance(filename, str | os.PathLike):
        raise TypeError(
            f"argument 'filename': expected str, bytes or os.PathLike object, not {type(filename).__name__}"
        )
    path = os.fspath(filename)
    if not isinstance(path, str):
        raise wrong_type("filename", path, "str")
    return path


def _framework(name: object, device: str | int) -> Callable[[], Framework]:
    """Return a function that makes the framework; it is called once the file is open, since it may import torch."""
    if not isinstance(name, str):
        raise wrong_type("framework", name, "str")
    kind = FRAMEWORKS.get(name)
    if kind is None:
        raise SafetensorError(f"framework {name} is invalid")
    if kind == "other":
        raise SafetensorError(f"framework {name} is not supported here: open the file for 'np', and convert")
    if kind == "numpy":
        return lambda: Arrays(device)
    return lambda: cast(Framework, import_module("stio.compat.safetensors._tensors").Tensors(device))


def _device(device: object) -> str | int:
    """Return a device as torch's `to` takes it; `"cpu"` for the host.

    Raises:
        SafetensorError: It is no device, or malformed.
        ValueError: Its number is malformed.
    """
    if device is None:
        return "cpu"
    if isinstance(device, str) or type(device).__module__ == "torch":  # a `torch.device`, without importing torch
        name, colon, number = str(device).partition(":")
        if name == "cpu" and (not colon or device != str(device)):
            return "cpu"
        if name in _DEVICES and ":" not in number:
            return f"{name}:{int(number) if colon else 0}"
        if name == "mps" and number in ("", "0"):
            return "mps"
        raise SafetensorError(f"device {device} is invalid")
    try:
        index = operator.index(cast(Any, device))
    except TypeError:
        index = -1
    if index < 0:
        raise SafetensorError(f"device {device!r} is invalid")
    return index


PrefetchPlan: TypeAlias = dict[str, Any]
"""What `safe_open.prefetch` reads: by name, None for the whole tensor, or the index of a part."""


@final
@dataclass(frozen=True, slots=True, eq=False)
class TensorMeta:
    """What the header of a file says of a tensor. Made by `safe_open.get_tensor_meta`."""

    __module__ = "stio.compat.safetensors"

    dtype: str
    """As the format spells it, such as `"F32"`."""
    shape: list[int]
    """Dimensions, as the file has them."""
    data_offsets: tuple[int, int]
    """First byte and end of the tensor's bytes in the data section."""


class PySafeSlice:
    """One tensor of a file; indexing it reads a part. Made by `safe_open.get_slice`."""

    __module__ = "stio.compat.safetensors"
    __slots__ = ("_file", "_framework", "_row")

    def __init__(self, file: DropInFile, framework: Framework, row: int) -> None:
        self._file, self._framework, self._row = file, framework, row

    def get_shape(self) -> list[int]:
        """Return the tensor's dimensions, as the file has them."""
        return list(self._file.header.shapes[self._row])

    def get_dtype(self) -> str:
        """Return the tensor's dtype, as the format spells it."""
        return self._file.header.dtypes[self._row]

    def __getitem__(self, index: Any) -> Any:
        return self._framework.make_part(self._file, self._row, index)


class safe_open:  # noqa: N801 -- the original's name
    """Open a file and get its tensors by name. A context manager.

    Args:
        filename: The file.
        framework: `"pt"` (`"torch"`, `"pytorch"`) or `"np"` (`"numpy"`). Others are not supported.
        device: Device of torch's tensors: `"cpu"`, `"cuda:1"`, a number, a `torch.device`.
        backend: `"mmap"`: tensors are views of a private mapping of the file; a page is read when it is first used.
            `"pread"`: tensors have memory of their own, read at once.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: The system refuses (`PermissionError`, `IsADirectoryError`).
        SafetensorError: The file breaks the format, or is one of a delta; or the value of an argument is unknown.
        TypeError: An argument of a wrong type.
    """

    __module__ = "stio.compat.safetensors"
    __slots__ = ("_device", "_file", "_framework")

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: str | int | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        self._file: DropInFile | None = None
        path = path_of(filename)
        make = _framework(framework, device := _device(device))
        if not isinstance(backend, str):
            raise wrong_type("backend", backend, "str")
        if backend not in ("mmap", "pread"):
            raise SafetensorError(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
        file = DropInFile(path, cast(Backend, backend))
        self._framework = make()
        self._device = device
        self._file = file

    def _opened(self) -> DropInFile:
        if self._file is None:
            raise SafetensorError("File is closed")
        return self._file

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._opened().header.names)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of their data."""
        return list(self._opened().header.names)

    def metadata(self) -> dict[str, str] | None:
        """Return the file's text metadata, None if it has none."""
        header = self._opened().header
        return dict(header.metadata) if header.has_metadata else None

    def get_tensor(self, name: str) -> Any:
        """Return a tensor. It stays valid after the file is closed.

        Raises:
            SafetensorError: There is no such name, the framework has no such type, or the file was closed.
        """
        file = self._opened()
        row = _row(file, name)
        rows = slice(row, row + 1)
        return self._framework.make(file.region_of(rows), file.header, rows)[name]

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in the order of their data.

        Raises:
            SafetensorError: The framework has no type for one of them, the file was closed, or zipnn has compressed
                tensors of it (its `safe_open` reads each by `get_tensor`).
            OSError: The system refuses.
        """
        require_plain(self._opened().header.metadata)
        return self._framework.make_all(self._opened())

    def get_slice(self, name: str) -> PySafeSlice:
        """Return a tensor of which parts are read by indexing it.

        Raises:
            SafetensorError: There is no such name, or the file was closed.
        """
        file = self._opened()
        return PySafeSlice(file, self._framework, _row(file, name))

    def get_tensor_meta(self, name: str) -> TensorMeta:
        """Return what the header says of a tensor; no data is read.

        Raises:
            SafetensorError: There is no such name, or the file was closed.
        """
        header, row = self._opened().header, _row(self._opened(), name)
        return TensorMeta(header.dtypes[row], list(header.shapes[row]), (header.begins[row], header.ends[row]))

    def prefetch(
        self,
        plan: PrefetchPlan | None = None,
        *,
        device: str | int | None = None,
        threads: int = 8,
        budget_bytes: int | str | None = None,
    ) -> PrefetchLoader:
        """Start to read tensors in the background, and return the loader from which they are taken.

        The file object does not change, and may have several loaders. A loader lives on when the file is closed.

        Args:
            plan: By name, None for the whole tensor, or the part to read: an index as in `stio.load(slices=)`. A
                list of slices selects several intervals along one dimension, in this order:
                `{"qkv": [slice(0, 8), slice(64, 72)]}`. Other tensors are not read. None: all tensors, whole.
            device: Device of the tensors; None: that of the file.
            threads: Most threads that read. As a rule stio reads with fewer.
            budget_bytes: Most bytes that are read and not taken, with staging memory; None: as for `stio.load`. A
                single larger tensor is read when nothing else is held.

        Raises:
            SafetensorError: The file is not open for `"pt"`, was closed, or has no such tensor; an index does not fit;
                torch has no type for a tensor; or there is no such device.
            TypeError: The plan is no dict.
            ValueError: `threads` or `budget_bytes` is not positive.
            OSError: The system refuses to open the file again, or it was changed or replaced.
        """
        file = self._opened()
        if isinstance(self._framework, Arrays):
            raise SafetensorError('prefetch is only compatible with framework="pt"')
        if operator.index(threads) < 1:
            raise ValueError(f"threads must be positive, not {threads}")
        where = self._device if device is None else _device(device)
        start = import_module("stio.compat.safetensors._tensors").prefetch
        return cast("PrefetchLoader", start(file, plan, where, threads=threads, budget_bytes=budget_bytes))

    def __reduce__(self) -> Any:
        raise TypeError(f"cannot pickle {type(self).__name__!r} object")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file = None  # closed when the last slice, or read on another thread, has released it


class _safe_open_handle(safe_open):  # noqa: N801 -- the original's name, which its own tests use
    """Like `safe_open`, for an open file that has a name.

    Args:
        f: The file object; the file is opened again by its `name`.
        framework: See `safe_open`.
        device: See `safe_open`.
        backend: See `safe_open`.

    Raises:
        AttributeError: It is no file, or has no name.
    """

    __module__ = "stio.compat.safetensors"
    __slots__ = ()

    def __init__(self, f: Any, framework: str, device: str | int | None = "cpu", *, backend: str = "mmap") -> None:
        _ = f.fileno  # an object that is no file raises its own error
        super().__init__(f.name, framework, device, backend=backend)


def _row(file: DropInFile, name: str) -> int:
    if not isinstance(name, str):
        raise wrong_type("name", name, "str")
    try:
        return file.header.positions[name]
    except KeyError:
        raise SafetensorError(f"File does not contain tensor {name}") from None


# numpy arrays.

Array = np.ndarray[Any, Any]


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """Return numpy's dtype for one of the format. numpy finds others than its own once `ml_dtypes` has registered them.

    Raises:
        UnsupportedDtypeError: numpy has none.
    """
    name = LIBRARY_NAMES.get(dtype)
    if name is None or dtype == "F4":  # packed in the file, and in no type of `ml_dtypes`
        raise UnsupportedDtypeError(f"Dtype not understood: {dtype}; numpy has no such type")
    try:
        return np.dtype(name)
    except TypeError as error:
        raise UnsupportedDtypeError(
            f"data type {name!r} not understood: import ml_dtypes first, or use framework='pt'"
        ) from error


class Arrays(Framework):
    """Makes numpy arrays; see `Framework`."""

    def __init__(self, device: str | int) -> None:
        if device != "cpu":
            raise SafetensorError(f"Device {device} is not supported for framework numpy")

    def make(self, region: Region, header: Header, rows: slice) -> dict[str, Array]:
        columns = header.names[rows], header.dtypes[rows], header.shapes[rows], offsets_in(header, rows)
        base = region.address - ctypes.addressof(region.owner)
        return {
            name: _array(region.owner, base + offset, numpy_dtype(dtype), shape)
            for name, dtype, shape, offset in zip(*columns, strict=True)
        }

    def make_part(self, file: DropInFile, row: int, index: Any) -> Array:
        header = file.header
        shape, kind = header.shapes[row], numpy_dtype(header.dtypes[row])
        index = checked(index, shape, negative_steps=True)
        if file.is_mapped:
            rows = slice(row, row + 1)
            return np.asarray(self.make(file.region_of(rows), header, rows)[header.names[row]][index], order="C")
        with reading(file.path):
            selection = select(index, shape, kind.itemsize)
        region = file.gather(row, selection)
        base = region.address - ctypes.addressof(region.owner)
        compact = _array(region.owner, base, kind, selection.read_shape)
        if selection.post is not None:
            compact = compact[(*selection.post, ...)]
        if selection.flip:
            compact = np.flip(compact, selection.flip)
        return np.asarray(compact, order="C")


def _array(owner: Any, at: int, kind: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """Return the array at an offset in memory, or a copy of it if it would not be aligned."""
    if 0 in shape:
        return np.zeros(shape, kind)
    array: Array = np.ndarray(shape, kind, owner, at)
    return array if array.flags.aligned else array.copy()
