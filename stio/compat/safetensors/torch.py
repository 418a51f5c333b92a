"""`safetensors.torch`, implemented by stio: save and load dicts of tensors, and modules.

Tensors are checked before anything is written, with the original's errors. Their values are saved: a pending
conjugation or negation is applied. Each loaded tensor has a storage of exactly its bytes.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from stio.compat.safetensors._errors import SafetensorError, reading, saving
from stio.compat.safetensors._file import copied
from stio.compat.safetensors._open import path_of, safe_open
from stio.compat.safetensors._serialize import header_for, new_bytes, parsed
from stio.compat.safetensors._shared import (
    end_ptr,
    find_shared_tensors,
    is_complete,
    remove_duplicate_names,
    storage_ptr,
    storage_size,
)
from stio.compat.safetensors._specs import checked_metadata, checked_name, unknown_dtype
from stio.compat.safetensors._tensors import Tensors, require_torch_dtypes
from stio.compat.safetensors._write import write_tensors
from stio.device.copy_out import copy_out
from stio.device.describe import describe_tensors
from stio.device.placeholders import require_no_placeholders
from stio.device.tensor_memory import require_data_of
from stio.device.tensors import FORMAT_DTYPES, TORCH_DTYPES, tensors_in
from stio.device.torch_private import copy_of
from stio.loading.module_tree import require_memory_of

__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model", "storage_ptr", "storage_size"]

# Names of the original that other libraries use although they begin with an underscore.
_end_ptr = end_ptr
_find_shared_tensors = find_shared_tensors
_is_complete = is_complete
_remove_duplicate_names = remove_duplicate_names
_TYPES = TORCH_DTYPES
_SIZE = {dtype: dtype.itemsize for dtype in FORMAT_DTYPES}


def save(tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> bytes:
    """Return the bytes of a file.

    Args:
        tensors: By name; contiguous, dense, and without shared memory.
        metadata: Text for the header.

    Raises:
        ValueError: Not a dict of tensors, or a tensor that is sparse or not contiguous.
        RuntimeError: Tensors share memory, or one is on meta.
        SafetensorError: A dtype or name that the format does not have.
        TypeError: A name or metadata that are not text.
    """
    _evaluate_tensors_for_save(tensors)
    text = checked_metadata(metadata)
    with saving():
        sources = {source.name: source for source in describe_tensors(tensors)}
    require_no_placeholders([*sources.values()])
    header, order = header_for(((name, source.dtype, source.shape) for name, source in sources.items()), text)
    result, target = new_bytes(header, sum(source.nbytes for source in sources.values()))
    copies, at = [], 0
    for name in order:
        nbytes = sources[name].nbytes
        copies.append((sources[name].data, 0, target.sub(at, nbytes)))
        at += nbytes
    with saving():
        copy_out(copies)
    return result


def save_file(
    tensors: dict[str, torch.Tensor],
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
) -> None:
    """Write tensors to a file, atomically and durably. They must not change during the call.

    Args:
        tensors: By name; contiguous, dense, and without shared memory.
        filename: The file. Its directory must exist; an existing file is replaced in one step and keeps its mode, and
            a link is followed.
        metadata: Text for the header.

    Raises:
        ValueError: Not a dict of tensors, or a tensor that is sparse or not contiguous.
        RuntimeError: Tensors share memory, or one is on meta.
        SafetensorError: A dtype or name that the format does not have; or the system refuses, and the old file stays.
        TypeError: A name, metadata or path of a wrong type.
    """
    _evaluate_tensors_for_save(tensors)
    write_tensors(tensors, path_of(filename), checked_metadata(metadata))


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors in the bytes of a file, on memory of their own.

    Raises:
        SafetensorError: The bytes break the format, or torch has no type for a dtype.
        TypeError: The argument is not `bytes`.
    """
    header = parsed(data)
    region = copied(memoryview(data)[header.data_start :])
    return Tensors("cpu").make(region, header, slice(0, len(header)))


def load_file(
    filename: str | os.PathLike[str], device: str | int = "cpu", *, backend: str = "mmap"
) -> dict[str, torch.Tensor]:
    """Return the tensors of a file.

    Args:
        filename: The file.
        device: Device of the tensors.
        backend: See `safe_open`.

    Raises:
        FileNotFoundError: There is no such file.
        OSError: The system refuses.
        SafetensorError: The file breaks the format, or torch has no type for a dtype.
    """
    with safe_open(filename, framework="pt", device=device, backend=backend) as file:
        return file.get_tensors()


def save_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    metadata: dict[str, str] | None = None,
    force_contiguous: bool = True,
) -> None:
    """Write a module's tensors to a file. Of several names for the same memory, the first that covers it is written.

    The header's metadata map each name that is left out to the name that has its data.

    Args:
        model: The module.
        filename: The file.
        metadata: Text to put into the header; an entry of a name that is left out stays as it is.
        force_contiguous: Copy tensors that are not contiguous; otherwise they are an error.

    Raises:
        RuntimeError: Tensors share memory, and none of them covers it.
        ValueError: A tensor that cannot be saved as it is, or whose memory was freed or shrunk.
        SafetensorError: See `save_file`.
    """
    tensors = dict(model.state_dict())
    text = checked_metadata(metadata)
    require_data_of(tensors)
    for saved, names in remove_duplicate_names(tensors).items():
        text = {} if text is None else text
        for name in names:
            text.setdefault(name, saved)
            del tensors[name]
    if force_contiguous:
        tensors = {name: tensor if tensor.is_contiguous() else copy_of(tensor) for name, tensor in tensors.items()}
    try:
        save_file(tensors, filename, metadata=text)
    except ValueError as error:
        if force_contiguous:
            raise
        raise ValueError(
            f"{error} Or use save_model(..., force_contiguous=True), read the docs for potential caveats."
        ) from error


def load_model(
    model: torch.nn.Module,
    filename: str | os.PathLike[str],
    strict: bool = True,
    device: str | int = "cpu",
    *,
    backend: str = "mmap",
) -> tuple[set[str], list[str]]:
    """Copy a file's tensors into a module.

    Args:
        model: The module.
        filename: The file, as `save_model` writes it: of several names for the same memory, one is enough.
        strict: Whether missing or unexpected names are an error.
        device: Device to which tensors are loaded first.
        backend: See `safe_open`.

    Returns:
        Names of the module that were not loaded, and names of the file that were not used.

    Raises:
        RuntimeError: Names or shapes do not fit.
        OSError: See `load_file`.
        SafetensorError: See `load_file`; or the memory of a tensor of the module was freed or shrunk, or is read-only.
    """
    tensors = load_file(filename, device=device, backend=backend)
    with reading(os.fspath(filename)):
        require_memory_of(model, tensors, path=os.fspath(filename))
    duplicates = remove_duplicate_names(model.state_dict(), preferred_names=tensors)
    result = model.load_state_dict(tensors, strict=False)
    missing, unexpected = set(result.missing_keys), list(result.unexpected_keys)
    for names in duplicates.values():
        unexpected += [
            name for name in names if name not in missing
        ]  # the file has two names for the same memory of the module
        missing -= set(names)
    if strict and (missing or unexpected):
        lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
        for kind, found in (("Missing", sorted(missing)), ("Unexpected", sorted(unexpected))):
            if found:
                lines.append(f"    {kind} key(s) in state_dict: " + ", ".join(f'"{name}"' for name in found))
        raise RuntimeError("\n".join(lines))
    return missing, unexpected


def _evaluate_tensors_for_save(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise the errors that `save` and `save_file` document."""
    if not isinstance(tensors, dict):
        raise ValueError(f"Expected a dict of [str, torch.Tensor] but received {type(tensors)}")
    sparse = []
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"Key `{name}` is invalid, expected torch.Tensor but received {type(tensor)}")
        if tensor.layout != torch.strided:
            sparse.append(name)
    if sparse:
        raise ValueError(
            f"You are trying to save a sparse tensors: `{sparse}` which this library does not support. You can make it "
            "a dense tensor before saving with `.to_dense()` but be aware this might make a much larger file than "
            "needed."
        )
    failing = [names for names in find_shared_tensors(tensors) if len(names) > 1]
    if failing:
        raise RuntimeError(
            "Some tensors share memory, this will lead to duplicate memory on disk and potential differences when "
            f"loading them again: {failing}. A potential way to correctly save your model is to use `save_model`. More "
            "information at https://huggingface.co/docs/safetensors/torch_shared_tensors"
        )
    for name, tensor in tensors.items():
        _evaluate_tensor(name, tensor)


def _evaluate_tensor(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. It either means you are "
            "trying to save tensors which are reference of each other in which case it's recommended to save only the "
            "full tensors, and reslice at load time, or simply call `.contiguous()` on your tensor to pack it before "
            "saving."
        )
    if tensor.device.type == "meta":
        raise NotImplementedError(f"Cannot copy out of meta tensor; no data! (`{name}`)")  # a RuntimeError
    if tensor.dtype not in FORMAT_DTYPES:
        raise unknown_dtype(str(tensor.dtype).removeprefix("torch."))
    if FORMAT_DTYPES[tensor.dtype] == "F4" and not tensor.dim():
        raise SafetensorError(f"Error while serializing: `{name}` is half a byte short: reshape a pair of F4 to [1]")
    checked_name(name)


def _getdtype(dtype_str: str) -> torch.dtype:
    return TORCH_DTYPES[dtype_str]


def _view2torch(safeview: Iterable[tuple[str, dict[str, Any]]]) -> dict[str, torch.Tensor]:
    """Return tensors for the result of `deserialize`, on copies of the data."""
    tensors: dict[str, torch.Tensor] = {}
    for name, entry in safeview:
        dtypes, shapes = [entry["dtype"]], [tuple(entry["shape"])]
        require_torch_dtypes(dtypes, shapes)
        tensors |= tensors_in(copied(entry["data"]), [name], dtypes, shapes, [0])
    return tensors


def _tobytes(tensor: torch.Tensor, name: str) -> bytes:
    """Return the bytes of one tensor, as a file has them."""
    _evaluate_tensors_for_save({name: tensor})
    result, target = new_bytes(b"", tensor.nbytes)
    copy_out([(tensor.detach(), 0, target)])
    return result
