"""Raw tensors to the bytes of a file and back, without torch: `serialize`, `deserialize`.

Data are copied once, directly into the bytes that are returned. `serialize_file` uses stio's save (`torch.py`), which
needs torch and imports it then.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

from stio.compat.safetensors._errors import saving, wrong_type
from stio.compat.safetensors._file import header_of
from stio.compat.safetensors._open import path_of
from stio.compat.safetensors._specs import TensorSpec, checked_metadata, checked_specs
from stio.format.header import Header, build_header
from stio.runtime.memory import Region

_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)
_address_of_bytes = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object)(("PyBytes_AsString", ctypes.pythonapi))


def new_bytes(header: bytes, data_bytes: int) -> tuple[bytes, Region]:
    """Return bytes that begin with a header, and the region after it, which the caller must fill at once."""
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
    result, target = new_bytes(header, sum(spec.data_len for spec in specs.values()))
    address = target.address
    for name in order:
        spec = specs[name]
        if spec.data_len:
            ctypes.memmove(address, spec.data_ptr, spec.data_len)
        address += spec.data_len
    return result


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
