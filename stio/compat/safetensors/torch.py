"""`safetensors.torch`, implemented by stio: save and load dicts of tensors, and modules.

Tensors are checked before anything is written, with the original's errors. Their values are saved: a pending
conjugation or negation is applied. Each loaded tensor has a storage of exactly its bytes.

Of names of tensors that share memory, `save_model` saves one. Tensors are on the same storage if its device, address
and size are equal. Of these, tensors overlap if their ranges of addresses do (`stio.format.shared.overlap_groups`).

Files are staged beside the destination, synced and renamed: by an ordinary save, or in the caller's thread if small.

Raw memory is saved as tensors of bytes; the plan puts the true dtypes and shapes into the header. The header is the one
that the original library writes: no metadata unless the caller gives some.
"""

from __future__ import annotations

import ctypes
import os
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from stio.compat.safetensors._file import SafetensorError, reading, saving
from stio.compat.safetensors._open import path_of, safe_open
from stio.compat.safetensors._tensors import Tensors
from stio.compat.safetensors.numpy import (
    TensorSpec,
    checked_metadata,
    checked_name,
    header_for,
    loaded,
    unknown_dtype,
    write_if_small,
)
from stio.device import TORCH_DTYPES, copy_of, describe_tensors, require_values, tensors_in, traits_of
from stio.errors import SharedTensorsError, printable
from stio.format import TensorSource, overlap_groups
from stio.loading.targets import ModuleTree
from stio.runtime import run_blocking
from stio.runtime.memory import Region
from stio.saving import PendingSave, SaveOptions, WritePlan, plan_files
from stio.storage.commit import SingleFile


def storage_ptr(tensor: torch.Tensor) -> int:
    """Return the address of the tensor's storage, 0 where it has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except NotImplementedError:  # sparse
        return 0


def storage_size(tensor: torch.Tensor) -> int:
    """Return the bytes of the tensor's storage."""
    return tensor.untyped_storage().nbytes()


def _end_ptr(tensor: torch.Tensor) -> int:
    """Return the address after the tensor's last element, for any strides."""
    start = tensor.data_ptr()
    if not tensor.numel():
        return start
    steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return start + (steps + 1) * tensor.itemsize


def _find_shared_tensors(tensors: Mapping[str, torch.Tensor]) -> list[set[str]]:
    """Return sets of names whose tensors overlap; a name that overlaps with none is alone in its set.

    Tensors without memory (on meta, or empty) are in no set. With a pending conjugation or negation the same memory has
    other values, which are no duplicate.
    """
    on_storage: defaultdict[Hashable, set[str]] = defaultdict(set)
    for name, tensor in tensors.items():
        if tensor.device.type == "meta":
            continue
        address = storage_ptr(tensor)
        if address and (nbytes := storage_size(tensor)):
            on_storage[tensor.device, address, nbytes, traits_of(tensor).bits].add(name)
    groups = []
    for names in on_storage.values():
        if len(names) == 1:
            groups.append(names)
        else:
            areas = [(tensors[name].data_ptr(), _end_ptr(tensors[name]), name) for name in names]
            groups += [set(group) for group in overlap_groups(areas)]
    return groups


def _is_complete(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are exactly its storage, in any order of dimensions."""
    if tensor.storage_offset() or tensor.nbytes != storage_size(tensor):
        return False
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)) if tensor.nbytes else ():
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _remove_duplicate_names(
    tensors: Mapping[str, torch.Tensor],
    *,
    preferred_names: Iterable[str] | None = None,
    discard_names: Iterable[str] | None = None,
) -> dict[str, list[str]]:
    """Return, for each group of names on the same memory, the name to save and the names to leave out.

    The name to save is the first of those that cover the storage and are preferred; else of those that cover it and are
    not to be discarded; else of those that cover it.

    Args:
        tensors: By name.
        preferred_names: Names that a file has already.
        discard_names: Names to avoid.

    Raises:
        SharedTensorsError: No name of a group covers its storage.
    """
    preferred, discarded = set(preferred_names or ()), set(discard_names or ())
    to_remove: defaultdict[str, list[str]] = defaultdict(list)
    for names in _find_shared_tensors(tensors):
        complete = {name for name in names if _is_complete(tensors[name])}
        if not complete:
            raise SharedTensorsError(
                "Error while trying to find names to remove to save state dict, but found no suitable name to keep for "
                f"saving amongst: {names}. None is covering the entire storage. Refusing to save/load the model since "
                "you could be storing much more memory than needed; clone what is a part of something larger."
            )
        saved = min(complete & preferred or complete - discarded or complete)
        for name in sorted(names - {saved}):
            to_remove[saved].append(name)
    return to_remove


__all__ = ["load", "load_file", "load_model", "save", "save_file", "save_model", "storage_ptr", "storage_size"]


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
    return _joined(tensors, checked_metadata(metadata))


def _joined(tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None) -> bytes:
    with saving():
        sources = {source.name: source for source in describe_tensors(tensors)}
    header, order = header_for(((name, source.dtype, source.shape) for name, source in sources.items()), metadata)
    return b"".join([header, *(_bytes_of(sources[name].data) for name in order)])


def _bytes_of(tensor: torch.Tensor) -> Any:
    """Return an array over the bytes of a contiguous tensor, or over those of a copy on the CPU."""
    return tensor.detach().cpu().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8).numpy()


def save_file(
    tensors: dict[str, torch.Tensor], filename: str | os.PathLike[str], metadata: dict[str, str] | None = None
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
    path, text = path_of(filename), checked_metadata(metadata)
    if not write_if_small(path, sum(tensor.nbytes for tensor in tensors.values()), lambda: _joined(tensors, text)):
        _write(tensors, path, partial(plan_files, metadata=text))


def load(data: bytes) -> dict[str, torch.Tensor]:
    """Return the tensors in the bytes of a file, on memory of their own.

    Raises:
        SafetensorError: The bytes break the format, or torch has no type for a dtype.
        TypeError: The argument is not `bytes`.
    """
    return loaded(data, Tensors("cpu"))


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
    require_values(tensors)
    for saved, names in _remove_duplicate_names(tensors).items():
        text = {} if text is None else text
        for name in names:
            text.setdefault(name, saved)
            del tensors[name]
    if force_contiguous:
        tensors = {name: tensor if tensor.is_contiguous() else copy_of(tensor) for name, tensor in tensors.items()}
    try:
        save_file(tensors, filename, metadata=text)
    except ValueError as error:
        if not force_contiguous:
            error.args = (
                f"{error} Or use save_model(..., force_contiguous=True), read the docs for potential caveats.",
            )
        raise


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
        if isinstance(model, torch.nn.Module):  # or something else with a `load_state_dict`
            ModuleTree(model).require_memory(tensors, path=os.fspath(filename))
    duplicates = _remove_duplicate_names(model.state_dict(), preferred_names=tensors)
    result = model.load_state_dict(tensors, strict=False)
    missing, unexpected = set(result.missing_keys), list(result.unexpected_keys)
    for names in duplicates.values():
        unexpected += [
            name for name in names if name not in missing
        ]  # the file has two names for the same memory of the module
        missing -= set(names)
    if strict:
        _require_no_names(model, sorted(missing), sorted(unexpected))
    return missing, unexpected


def _require_no_names(model: torch.nn.Module, missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Raise RuntimeError, as torch does, if a model and its checkpoint have not the same names."""
    lines = [f"Error(s) in loading state_dict for {type(model).__name__}:"]
    for kind, names in (("Missing", missing), ("Unexpected", unexpected)):
        if names:
            lines.append(f"    {kind} key(s) in state_dict: " + ", ".join(f'"{printable(name)}"' for name in names))
    if len(lines) > 1:
        raise RuntimeError("\n".join(lines))


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
    failing = [names for names in _find_shared_tensors(tensors) if len(names) > 1]
    if failing:
        raise RuntimeError(
            "Some tensors share memory, this will lead to duplicate memory on disk and potential differences when "
            f"loading them again: {failing}. A potential way to correctly save your model is to use `save_model`. More "
            "information at https://huggingface.co/docs/safetensors/torch_shared_tensors"
        )
    for name, tensor in tensors.items():
        _evaluate_tensor(name, tensor)


def _require_contiguous(name: str, tensor: torch.Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(
            f"You are trying to save a non contiguous tensor: `{name}` which is not allowed. It either means you are "
            "trying to save tensors which are reference of each other in which case it's recommended to save only the "
            "full tensors, and reslice at load time, or simply call `.contiguous()` on your tensor to pack it before "
            "saving."
        )


def _evaluate_tensor(name: str, tensor: torch.Tensor) -> None:
    _require_contiguous(name, tensor)
    if tensor.device.type == "meta":
        raise NotImplementedError(f"Cannot copy out of meta tensor; no data! (`{name}`)")  # a RuntimeError
    dtype = TORCH_DTYPES.name(tensor.dtype)
    if not dtype:
        raise unknown_dtype(str(tensor.dtype).removeprefix("torch."))
    if dtype == "F4" and not tensor.dim():
        raise SafetensorError(f"Error while serializing: `{name}` is half a byte short: reshape a pair of F4 to [1]")
    checked_name(name)


# Files.


def write_specs(specs: Mapping[str, TensorSpec], path: str, metadata: Mapping[str, str] | None) -> None:
    """Write raw memory to a file.

    Args:
        specs: Dtype, shape and address of each tensor, checked.
        path: The file.
        metadata: Text for the header.

    Raises:
        SafetensorError: The system refused, or there is no valid header for these tensors.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, spec in specs.items():  # bytes `[data_len]`, without a copy; the caller keeps the memory allocated
        owner = (ctypes.c_char * spec.data_len).from_address(spec.data_ptr) if spec.data_len else None
        memory = Region(spec.data_ptr, spec.data_len, owner)
        tensors |= tensors_in(memory, [name], ["U8"], [(spec.data_len,)], [0])

    def plan(sources: Sequence[TensorSource], block_bytes: int) -> WritePlan:
        true = [
            replace(source, dtype=specs[source.name].dtype, shape=tuple(specs[source.name].shape)) for source in sources
        ]
        return plan_files(true, block_bytes, metadata=metadata)

    _write(tensors, path, plan)


def _write(
    tensors: Mapping[str, torch.Tensor], path: str, planner: Callable[[Sequence[TensorSource], int], WritePlan]
) -> None:
    with saving():
        run_blocking(PendingSave(tensors, SingleFile(path), SaveOptions(), planner=planner).complete())
