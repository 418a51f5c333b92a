"""`safetensors.numpy`, implemented by stio: save and load dicts of arrays; and raw tensors, without torch.

Raw tensors are `TensorSpec`, `serialize` and `deserialize`. Their data are copied once, directly into the bytes that
are returned. `serialize_file` writes a large file by stio's save (`torch.py`), which needs torch and imports it then.

The values of an array are saved, for any strides and byte order. Loading needs no torch.
"""

from __future__ import annotations

import ctypes
import errno
import operator
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np

from stio.compat.safetensors._file import (
    Framework,
    SafetensorError,
    fresh,
    header_of,
    require_plain,
    saving,
    wrong_type,
)
from stio.compat.safetensors._open import Array, Arrays, path_of, safe_open
from stio.errors import FormatError, printable
from stio.format import LIBRARY_NAMES, Header, build_header, tensor_nbytes
from stio.storage.commit import SingleFile, write_small_file

__all__ = ["load", "load_file", "save", "save_file"]

_FORMAT_NAMES = {library_name: name for name, library_name in LIBRARY_NAMES.items()}
"""The format's name for each name of numpy and torch."""


def unknown_dtype(dtype: str) -> SafetensorError:
    """Return the error for a dtype that the format does not have."""
    return SafetensorError(f'Unknown dtype "{printable(dtype)}". Supported dtypes: {", ".join(_FORMAT_NAMES)}')


def _unsigned(value: Any) -> int:
    number = operator.index(value)
    if number < 0:
        raise OverflowError("can't convert negative int to unsigned")
    if number >= 1 << 64:
        raise OverflowError("int too big to convert")
    return number


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorSpec:
    """Dtype, shape and address of a tensor's contiguous bytes. The caller must keep the memory alive and in place.

    Args:
        dtype: Name in numpy and torch, such as `"float32"`.
        shape: Dimensions. For packed F4 the last one counts pairs, as in torch, and is doubled here.
        data_ptr: Address of the first byte.
        data_len: Number of bytes.

    Raises:
        SafetensorError: The format has no such dtype.
        TypeError: A value of a wrong type.
        OverflowError: A number that is negative or above 64 bits.
    """

    __module__ = "stio.compat.safetensors"

    dtype: str
    """Dtype as the format spells it."""
    shape: Sequence[int]
    """Dimensions as in a header, a list."""
    data_ptr: int
    """Address of the first byte."""
    data_len: int
    """Number of bytes."""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str):
            raise wrong_type("dtype", self.dtype, "str")
        if self.dtype not in _FORMAT_NAMES:
            raise unknown_dtype(self.dtype)
        if isinstance(self.shape, str | bytes) or not hasattr(self.shape, "__len__"):
            raise wrong_type("shape", self.shape, "Sequence")
        shape, dtype = [_unsigned(size) for size in self.shape], _FORMAT_NAMES[self.dtype]
        if dtype == "F4" and shape:
            shape[-1] *= 2
        numbers = {"data_ptr": _unsigned(self.data_ptr), "data_len": _unsigned(self.data_len)}
        for name, value in {"dtype": dtype, "shape": shape, **numbers}.items():
            object.__setattr__(self, name, value)


def checked_name(name: object) -> str:
    """Return a tensor's name if it can be saved and read again.

    Raises:
        TypeError: It is not text.
        UnicodeEncodeError: It holds half of a surrogate pair.
        SafetensorError: It is the name of the metadata, or holds NUL.
    """
    if not isinstance(name, str):
        raise wrong_type("tensor_dict", name, "str")
    name.encode()
    if name == "__metadata__" or "\0" in name:
        reason = "the format keeps its metadata there" if "\0" not in name else "readers cannot take a NUL"
        raise SafetensorError(f"Error while serializing: a tensor cannot have the name {printable(name)!r}: {reason}")
    return name


def checked_metadata(metadata: object) -> dict[str, str] | None:
    """Return a copy of text metadata.

    Raises:
        TypeError: It is not a dict of text.
        UnicodeEncodeError: A key or value holds half of a surrogate pair.
    """
    if metadata is None:
        return None
    if not isinstance(metadata, dict):
        raise wrong_type("metadata", metadata, "dict")
    for text in (*metadata, *metadata.values()):
        if not isinstance(text, str):
            raise wrong_type("metadata", text, "str")
        text.encode()
    return dict(metadata)


def checked_specs(tensor_dict: object) -> dict[str, TensorSpec]:
    """Return a copy of the argument of `serialize`; its values may have the forms of all supported releases.

    Raises:
        TypeError: It is not a dict from names to `TensorSpec`.
        SafetensorError: A name that cannot be used, or a size that does not fit its shape.
    """
    if not isinstance(tensor_dict, dict):
        raise wrong_type("tensor_dict", tensor_dict, "dict")
    specs: dict[str, TensorSpec] = {}
    for name, spec in tensor_dict.items():
        checked_name(name)
        if isinstance(spec, dict) and spec.keys() >= {"dtype", "shape", "data"}:  # of safetensors before 0.8
            buffer = np.frombuffer(spec["data"], np.uint8)
            spec = TensorSpec(
                dtype=spec["dtype"], shape=spec["shape"], data_ptr=buffer.ctypes.data, data_len=buffer.nbytes
            )
        if type(spec).__name__ != "TensorSpec":  # the original's has the same attributes
            raise wrong_type("tensor_dict", spec, "TensorSpec")
        shown = f"tensor {printable(name)!r}"
        try:
            nbytes = tensor_nbytes(spec.dtype, spec.shape)
        except FormatError as error:
            phrase = "overflow computing buffer size from shape and/or element type"
            if "overflow" not in error.message:
                phrase = "invalid shape, data type, or offset for tensor"
            raise SafetensorError(f"Error while serializing: {phrase}: {shown}: {error}") from error
        if nbytes != spec.data_len or (nbytes and not spec.data_ptr):
            raise SafetensorError(
                "Error while serializing: invalid shape, data type, or offset for tensor: "
                f"{shown} of {nbytes} bytes is given by {spec.data_len} bytes at {spec.data_ptr:#x}"
            )
        specs[name] = spec
    return specs


def header_for(
    entries: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[str]]:
    """Return the bytes before the data and the order of the data; see `build_header`.

    Raises:
        SafetensorError: No valid header has these entries.
    """
    with saving():
        return build_header(entries, metadata)


def serialize(tensor_dict: dict[str, TensorSpec], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a file.

    Args:
        tensor_dict: Tensors by name; their memory must not move during the call.
        metadata: Text for the header. An empty dict is written too, None is not.

    Raises:
        SafetensorError: The size of a tensor does not fit its shape, or a name that cannot be used.
        TypeError: A value of a wrong type.
    """
    return _joined(checked_specs(tensor_dict), checked_metadata(metadata))


def _joined(specs: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None) -> bytes:
    header, order = header_for([(name, spec.dtype, spec.shape) for name, spec in specs.items()], metadata)
    given = [specs[name] for name in order if specs[name].data_len]
    return b"".join([header, *((ctypes.c_char * spec.data_len).from_address(spec.data_ptr) for spec in given)])


def serialize_file(
    tensor_dict: dict[str, TensorSpec], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Write a file, atomically and durably.

    Args:
        tensor_dict: Tensors by name; their memory must not change during the call.
        filename: The file. Its directory must exist; an existing file is replaced in one step and keeps its mode.
        metadata: Text for the header. An empty dict is written too, None is not.

    Raises:
        SafetensorError: As `serialize`; or the system refuses, and the old file stays.
        TypeError: A value of a wrong type.
    """
    specs, path, text = checked_specs(tensor_dict), path_of(filename), checked_metadata(metadata)
    if not write_if_small(path, sum(spec.data_len for spec in specs.values()), lambda: _joined(specs, text)):
        import_module("stio.compat.safetensors.torch").write_specs(specs, path, text)


_SMALL_BYTES = 4 << 20
"""Most data of a file that the caller's thread writes: 1 MiB takes half of the time of a save with a thread."""


def write_if_small(path: str, nbytes: int, serialized: Callable[[], bytes]) -> bool:
    """Write a small file in this thread; return False if it is not small, or needs a save with a transaction.

    Args:
        path: The file.
        nbytes: Size of its data.
        serialized: Returns its bytes.

    Raises:
        SafetensorError: The system refuses, or `serialized` raises it.
    """
    # stio makes missing directories. The original raises an error, by which its callers find a wrong path.
    if not os.path.isdir(os.path.dirname(path) or ".") or not path:
        reason = f"{os.strerror(errno.ENOENT)} (os error {errno.ENOENT})"
        raise SafetensorError(f'Error while serializing: I/O error: {reason} at path "{path}"')
    if nbytes > _SMALL_BYTES:
        return False
    with saving():
        return write_small_file(SingleFile(path), serialized())


def parsed(data: bytes) -> Header:
    """Return the checked header of a whole file's bytes.

    Raises:
        TypeError: The argument is not `bytes`.
        SafetensorError: The header breaks the format.
    """
    if not isinstance(data, bytes):
        raise wrong_type("bytes", data, "bytes")
    return header_of(lambda begin, end: data[begin:end], file_bytes=len(data), path="bytes", what="deserializing")


def loaded(data: bytes, framework: Framework) -> dict[str, Any]:
    """Return the tensors in the bytes of a whole file by name, on memory of their own.

    Raises:
        TypeError: The argument is not `bytes`.
        SafetensorError: The header breaks the format, or the framework has no type for a dtype.
    """
    header = parsed(data)
    require_plain(header.metadata)
    region = fresh(len(data) - header.data_start)
    address = ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
    ctypes.memmove(region.address, address + header.data_start, region.nbytes)
    return framework.make(region, header, slice(0, len(header)))


def deserialize(bytes: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the tensors in the bytes of a whole file, in the order of the data.

    Args:
        bytes: The file.

    Returns:
        Names, each with its `shape` (a list), `dtype` (as the format spells it) and `data` (a copy, `bytearray`).

    Raises:
        SafetensorError: The bytes break the format.
        TypeError: The argument is not `bytes`.
    """
    header = parsed(bytes)
    view = memoryview(bytes)[header.data_start :]
    rows = zip(header.names, header.dtypes, header.shapes, header.begins, header.ends, strict=True)
    return [
        (name, {"shape": list(shape), "dtype": dtype, "data": bytearray(view[begin:end])})
        for name, dtype, shape, begin, end in rows
    ]


# Arrays.


def save(tensor_dict: dict[str, Array], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a file.

    Args:
        tensor_dict: Arrays by name.
        metadata: Text for the header.

    Raises:
        SafetensorError: A dtype or name that the format does not have.
        AttributeError: A value that is not an array.
        TypeError: A name or metadata that are not text.
    """
    keep_alive: list[Array] = []
    return serialize(_flatten(tensor_dict, keep_alive), metadata=metadata)


def save_file(
    tensor_dict: dict[str, Array], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
) -> None:
    """Write arrays to a file, atomically and durably. They must not change during the call.

    Args:
        tensor_dict: Arrays by name.
        filename: The file; see `serialize_file`.
        metadata: Text for the header.

    Raises:
        SafetensorError: A dtype or name that the format does not have; or the system refuses, and the old file stays.
        AttributeError: A value that is not an array.
        TypeError: A name, metadata or path of a wrong type.
    """
    keep_alive: list[Array] = []
    serialize_file(_flatten(tensor_dict, keep_alive), filename, metadata=metadata)


def load(data: bytes) -> dict[str, Array]:
    """Return the arrays in the bytes of a file, on memory of their own.

    Raises:
        SafetensorError: The bytes break the format, or numpy has no type for a dtype.
        TypeError: The argument is not `bytes`.
    """
    return loaded(data, Arrays("cpu"))


def load_file(filename: str | os.PathLike[str], *, backend: str = "mmap") -> dict[str, Array]:
    """Return the arrays of a file.

    Args:
        filename: The file.
        backend: See `safe_open`.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: The system refuses.
        SafetensorError: The file breaks the format, or numpy has no type for a dtype.
    """
    with safe_open(filename, framework="np", backend=backend) as file:
        return file.get_tensors()


def _flatten(tensor_dict: Mapping[str, Array], keep_alive_buffer: list[Array]) -> dict[str, TensorSpec]:
    """Return the arrays as raw memory, and append each array that owns it to the second argument."""
    specs = {}
    for name, value in tensor_dict.items():
        array = np.asarray(value, order="C")
        if value.dtype.byteorder == ">":
            array = array.astype(array.dtype.newbyteorder("<"))
        keep_alive_buffer.append(array)
        specs[name] = TensorSpec(
            dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
    return specs
