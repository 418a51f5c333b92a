"""`safe_open`: a file whose tensors are made when they are asked for.

The header is read and checked at once, in the caller's thread. A file that was left holds nothing any more; tensors
and slices that came from it go on. torch is imported by the first file that is opened for it, so that numpy's users
need not wait for it.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from types import TracebackType
from typing import Any, Literal, Protocol, Self, cast

from stio.compat.safetensors._arrays import Arrays
from stio.compat.safetensors._errors import SafetensorError, wrong_type
from stio.compat.safetensors._file import Backend, File
from stio.runtime.memory import Region

__all__ = ["PySafeSlice", "path_of", "safe_open"]

_FRAMEWORKS: dict[str, Literal["torch", "numpy", "other"]] = {
    **dict.fromkeys(("pt", "torch", "pytorch"), "torch"),
    **dict.fromkeys(("np", "numpy"), "numpy"),
    **dict.fromkeys(("tf", "tensorflow", "jax", "flax", "mlx", "paddle"), "other"),
}

_DEVICES = ("cuda", "musa", "npu", "xpu", "xla", "mlu", "hpu")

_GROUP_BYTES = 8 << 20
"""Neighbours up to this much together are read by one call, into one piece of memory."""


class _Maker(Protocol):
    """Makes a framework's tensors."""

    def make(
        self,
        region: Region,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        offsets: Sequence[int],
    ) -> dict[str, Any]:
        """Return whole tensors over a region, by name."""

    def whole(self, file: File) -> dict[str, Any] | None:
        """Return all tensors of a file; None where `make` is the way to them."""

    def pick(self, file: File, row: int, index: Any) -> Any:
        """Return a part of a tensor."""


def path_of(filename: object) -> str:
    """Return a path as text.

    Raises:
        TypeError: It is no `str` and no path of one.
    """
    if not isinstance(filename, str | os.PathLike):
        raise TypeError(
            f"argument 'filename': expected str, bytes or os.PathLike object, not {type(filename).__name__}"
        )
    path = os.fspath(filename)
    if not isinstance(path, str):
        raise wrong_type("filename", path, "str")
    return path


def _maker(framework: object, device: str | int) -> Callable[[], _Maker]:
    """Return what makes the maker, once the file has been found."""
    if not isinstance(framework, str):
        raise wrong_type("framework", framework, "str")
    kind = _FRAMEWORKS.get(framework)
    if kind is None:
        raise SafetensorError(f"framework {framework} is invalid")
    if kind == "other":
        raise SafetensorError(f"framework {framework} is not supported here: open the file for 'np', and convert")
    if kind == "numpy":
        return lambda: Arrays(device)
    if device == "cpu":
        return lambda: cast(_Maker, import_module("stio.compat.safetensors._tensors").Tensors(device))
    return lambda: cast(_Maker, import_module("stio.compat.safetensors._onto").Onto(device))


def _device(device: object) -> str | int:
    """Return a device as torch's `to` takes it; `"cpu"` for the host.

    Raises:
        SafetensorError: It is none, or not spelled as one.
        ValueError: Its number is none.
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


class PySafeSlice:
    """One tensor of a file, parts of which are read by indexing it. Made by `safe_open.get_slice`."""

    __module__ = "stio.compat.safetensors"
    __slots__ = ("_file", "_maker", "_row")

    def __init__(self, file: File, maker: _Maker, row: int) -> None:
        self._file, self._maker, self._row = file, maker, row

    def get_shape(self) -> list[int]:
        """Return the tensor's dimensions, as the file has them."""
        return list(self._file.header.shapes[self._row])

    def get_dtype(self) -> str:
        """Return the tensor's dtype, as the format spells it."""
        return self._file.header.dtypes[self._row]

    def __getitem__(self, index: Any) -> Any:
        return self._maker.pick(self._file, self._row, index)


class safe_open:  # noqa: N801 -- the name that people import
    """Open a file and get its tensors by name. A context manager.

    Args:
        filename: The file.
        framework: `"pt"` (`"torch"`, `"pytorch"`) or `"np"` (`"numpy"`). Others are not served.
        device: Where torch's tensors shall be: `"cpu"`, `"cuda:1"`, a number, a `torch.device`.
        backend: `"mmap"`: tensors lie on a private mapping of the file, read when they are touched. `"pread"`: on
            memory of their own, read at once.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: The system refuses (`PermissionError`, `IsADirectoryError`).
        SafetensorError: The file breaks the format, or an argument names something unknown.
        TypeError: An argument of a wrong type.
    """

    __module__ = "stio.compat.safetensors"
    __slots__ = ("_file", "_maker")

    def __init__(
        self,
        filename: str | os.PathLike[str],
        framework: str,
        device: str | int | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> None:
        self._file: File | None = None
        path = path_of(filename)
        make = _maker(framework, device := _device(device))
        if not isinstance(backend, str):
            raise wrong_type("backend", backend, "str")
        if backend not in ("mmap", "pread"):
            raise SafetensorError(f'backend "{backend}" is invalid (expected one of: "mmap", "pread")')
        file = File(path, cast(Backend, backend), keep_open=device != "cpu")
        self._maker = make()
        self._file = file

    def _opened(self) -> File:
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
        found = self._opened().metadata
        return None if found is None else dict(found)

    def get_tensor(self, name: str) -> Any:
        """Return a tensor. It lives on after the file is left.

        Raises:
            SafetensorError: There is none of this name, the framework has no type for it, or the file was left.
        """
        file = self._opened()
        row = _row(file, name)
        header = file.header
        begin, end = header.begins[row], header.ends[row]
        region = file.region(begin, end - begin)
        return self._maker.make(region, [name], [header.dtypes[row]], [header.shapes[row]], [0])[name]

    def get_tensors(self) -> dict[str, Any]:
        """Return all tensors by name, in the order of their data.

        Raises:
            SafetensorError: The framework has no type for one of them, or the file was left.
            OSError: The system refuses.
        """
        file = self._opened()
        header = file.header
        whole = self._maker.whole(file)
        if whole is not None:
            return whole
        tensors: dict[str, Any] = {}
        for rows in [slice(0, len(header))] if file.is_mapped else _groups(header.begins, header.ends):
            begins = header.begins[rows]
            start = begins[0] if begins else 0
            nbytes = header.ends[rows][-1] - start if begins else 0
            tensors |= self._maker.make(
                file.region(start, nbytes),
                header.names[rows],
                header.dtypes[rows],
                header.shapes[rows],
                [begin - start for begin in begins],
            )
        return tensors

    def get_slice(self, name: str) -> PySafeSlice:
        """Return a tensor to be read in parts, by indexing it.

        Raises:
            SafetensorError: There is none of this name, or the file was left.
        """
        file = self._opened()
        return PySafeSlice(file, self._maker, _row(file, name))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file = None  # closed when no slice, and no read on another thread, holds it any more


class _safe_open_handle(safe_open):  # noqa: N801 -- the original's name
    """Like `safe_open`, for a file object that has a name.

    Args:
        f: The file object.
        framework: See `safe_open`.
        device: See `safe_open`.
        backend: See `safe_open`.
    """

    __module__ = "stio.compat.safetensors"
    __slots__ = ()

    def __init__(self, f: Any, framework: str, device: str | int | None = "cpu", *, backend: str = "mmap") -> None:
        _ = f.fileno  # what is no file says so
        super().__init__(f.name, framework, device, backend=backend)


def _row(file: File, name: str) -> int:
    if not isinstance(name, str):
        raise wrong_type("name", name, "str")
    try:
        return file.header.index_of(name)
    except KeyError:
        raise SafetensorError(f"File does not contain tensor {name}") from None


def _groups(begins: Sequence[int], ends: Sequence[int]) -> Iterator[slice]:
    """Yield runs of neighbours that are read together; a large tensor is a run of its own."""
    first = 0
    for row in range(len(begins)):
        if row > first and ends[row] - begins[first] > _GROUP_BYTES:
            yield slice(first, row)
            first = row
    if first < len(begins):
        yield slice(first, len(begins))
