"""`safetensors.numpy`, implemented by stio: save and load dicts of arrays.

The values of an array are saved, for any strides and byte order. Loading needs no torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from stio.compat.safetensors._file import require_plain
from stio.compat.safetensors._open import numpy_dtype, safe_open
from stio.compat.safetensors._serialize import TensorSpec, deserialize, parsed, serialize, serialize_file

__all__ = ["load", "load_file", "save", "save_file"]

Array = np.ndarray[Any, Any]


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
    entries = deserialize(data)
    require_plain(parsed(data).metadata)
    return {
        name: np.frombuffer(entry["data"], dtype=numpy_dtype(entry["dtype"])).reshape(entry["shape"])
        for name, entry in entries
    }


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
        array = np.asarray(value)
        order = value.dtype.byteorder
        if order == ">" or (order == "=" and sys.byteorder != "little"):
            array = array.astype(array.dtype.newbyteorder("<"))
        if not array.flags.c_contiguous:
            array = array.copy(order="C")
        keep_alive_buffer.append(array)
        specs[name] = TensorSpec(
            dtype=array.dtype.name, shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes
        )
    return specs
