"""Raw tensors to the bytes of a file and back, without torch: `TensorSpec`, `serialize`, `deserialize`.

Data are copied once, directly into the bytes that are returned. `serialize_file` uses stio's save (`torch.py`), which
needs torch and imports it then.
"""

from __future__ import annotations

import ctypes
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, SupportsIndex

from stio.compat.safetensors._file import SafetensorError, header_of, saving, wrong_type
from stio.compat.safetensors._open import path_of
from stio.errors import FormatError, printable
from stio.format.dtypes import LIBRARY_NAMES, tensor_nbytes
from stio.format.header import Header, build_header

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
    __slots__ = ("_data_len", "_data_ptr", "_dtype", "_shape")

    def __init__(
        self, *, dtype: str, shape: Sequence[SupportsIndex], data_ptr: SupportsIndex, data_len: SupportsIndex
    ) -> None:
        if not isinstance(dtype, str):
            raise wrong_type("dtype", dtype, "str")
        if dtype not in _FORMAT_NAMES:
            raise unknown_dtype(dtype)
        if isinstance(shape, str | bytes) or not hasattr(shape, "__len__"):
            raise wrong_type("shape", shape, "Sequence")
        self._dtype = _FORMAT_NAMES[dtype]
        self._shape = [_unsigned(size) for size in shape]
        if self._dtype == "F4" and self._shape:
            self._shape[-1] *= 2
        self._data_ptr = _unsigned(data_ptr)
        self._data_len = _unsigned(data_len)

    @property
    def dtype(self) -> str:
        """Dtype as the format spells it."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """Dimensions as in a header."""
        return list(self._shape)

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        return self._data_ptr

    @property
    def data_len(self) -> int:
        """Number of bytes."""
        return self._data_len

    def __repr__(self) -> str:
        return (
            f"TensorSpec(dtype='{self._dtype}', shape={self._shape}, data_ptr={self._data_ptr}, "
            f"data_len={self._data_len})"
        )


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
    """Return a copy of the argument of `serialize`.

    Raises:
        TypeError: It is not a dict from names to `TensorSpec`.
        SafetensorError: A name that cannot be used, or a size that does not fit its shape.
    """
    if not isinstance(tensor_dict, dict):
        raise wrong_type("tensor_dict", tensor_dict, "dict")
    specs: dict[str, TensorSpec] = {}
    for name, spec in tensor_dict.items():
        checked_name(name)
        if not isinstance(spec, TensorSpec):
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
    specs = checked_specs(tensor_dict)
    entries = [(name, spec.dtype, spec.shape) for name, spec in specs.items()]
    header, order = header_for(entries, checked_metadata(metadata))
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
    import_module("stio.compat.safetensors.torch").write_specs(specs, path, text)


def parsed(data: bytes) -> Header:
    """Return the checked header of a whole file's bytes.

    Raises:
        TypeError: The argument is not `bytes`.
        SafetensorError: The header breaks the format.
    """
    if not isinstance(data, bytes):
        raise wrong_type("bytes", data, "bytes")
    return header_of(lambda begin, end: data[begin:end], file_bytes=len(data), path="bytes", what="deserializing")


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
