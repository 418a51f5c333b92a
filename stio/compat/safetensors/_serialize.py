"""Raw tensors to the bytes of a file and back, without torch: `TensorSpec`, `serialize`, `deserialize`.

Data are copied once, straight into the bytes that are returned. `serialize_file` goes the way of all of stio's saves,
which needs torch and imports it then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from stio.compat.safetensors._errors import SafetensorError, header_refused, saving, wrong_type
from stio.compat.safetensors._file import header_of
from stio.compat.safetensors._open import path_of
from stio.compat.safetensors._spec import TensorSpec
from stio.errors import FormatError, StioError, printable
from stio.format.dtypes import tensor_nbytes
from stio.format.header import PREFIX_BYTES, Header, parse_header
from stio.format.header_build import build_header
from stio.runtime.memory import Region

__all__ = [
    "checked_metadata",
    "checked_name",
    "deserialize",
    "new_bytes",
    "parsed",
    "serialize",
    "serialize_file",
]

_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address_of_bytes = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


def checked_name(name: object) -> str:
    """Return a tensor's name if it can be saved and found again.

    Raises:
        TypeError: It is no text.
        UnicodeEncodeError: It holds half of a surrogate pair.
        SafetensorError: It is the one that the metadata have, or holds NUL.
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
        TypeError: It is no dict of text.
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
        TypeError: It is no dict of names to `TensorSpec`.
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


def new_bytes(header: bytes, data_bytes: int) -> tuple[bytes, Region]:
    """Return bytes that begin with a header, and the region behind it, which the caller has to fill at once."""
    result: bytes = _new_bytes(None, len(header) + data_bytes)
    address = _address_of_bytes(result)
    ctypes.memmove(address, header, len(header))
    owner: Any = (ctypes.c_char * len(result)).from_address(address)
    owner.keep = result
    return result, Region(address + len(header), data_bytes, owner)


def header_for(
    entries: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None
) -> tuple[bytes, list[str]]:
    """Return the bytes before the data and the order of the data; see `build_header`.

    Raises:
        SafetensorError: A header that cannot be.
    """
    with saving():
        return build_header(entries, metadata)


def serialize(tensor_dict: dict[str, TensorSpec], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a file.

    Args:
        tensor_dict: What to put into it; the memory stays where it is meanwhile.
        metadata: Text to put into its header. None leaves it out, an empty dict does not.

    Raises:
        SafetensorError: A tensor whose size does not fit its shape, or a name that cannot be used.
        TypeError: A value of a wrong type.
    """
    specs = checked_specs(tensor_dict)
    entries = [(name, spec.dtype, spec.shape) for name, spec in specs.items()]
    header, order = header_for(entries, checked_metadata(metadata))
    result, target = new_bytes(header, sum(spec.data_len for spec in specs.values()))
    address = target.address
    for name in order:
        spec = specs[name]
        if spec.data_len:
            ctypes.memmove(address, spec.data_ptr, spec.data_len)
        address += spec.data_len
    return result


def serialize_file(
    tensor_dict: dict[str, TensorSpec],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a file, atomically and durably.

    Args:
        tensor_dict: What to put into it; the memory stays as it is meanwhile.
        filename: Where. Its directory exists; what stands there is replaced in one step and keeps its mode.
        metadata: Text to put into its header. None leaves it out, an empty dict does not.

    Raises:
        SafetensorError: As `serialize`; or the system refuses, and the old file stands.
        TypeError: A value of a wrong type.
    """
    specs, path, text = checked_specs(tensor_dict), path_of(filename), checked_metadata(metadata)
    import_module("stio.compat.safetensors._write").write_specs(specs, path, text)


def parsed(data: bytes) -> Header:
    """Return the checked header of a whole file's bytes.

    Raises:
        TypeError: It is no `bytes`.
        SafetensorError: It breaks the format.
    """
    if not isinstance(data, bytes):
        raise wrong_type("bytes", data, "bytes")
    length = header_of(data[:PREFIX_BYTES], file_bytes=len(data), path="bytes", what="deserializing")
    try:
        return parse_header(
            data[PREFIX_BYTES : PREFIX_BYTES + length], file_bytes=len(data), path="bytes", shard="bytes"
        )
    except StioError as error:
        raise header_refused(error, what="deserializing") from error


def deserialize(bytes: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return what a whole file's bytes hold, in the order of the data.

    Args:
        bytes: The file.

    Returns:
        Names, each with its `shape` (a list), `dtype` (as the format spells it) and `data` (a copy, `bytearray`).

    Raises:
        SafetensorError: It breaks the format.
        TypeError: It is no `bytes`.
    """
    header = parsed(bytes)
    view = memoryview(bytes)[header.data_start :]
    rows = zip(header.names, header.dtypes, header.shapes, header.begins, header.ends, strict=True)
    return [
        (name, {"shape": list(shape), "dtype": dtype, "data": bytearray(view[begin:end])})
        for name, dtype, shape, begin, end in rows
    ]
