"""Loads by the hub's rules: one safetensors file, the index of a sharded checkpoint, the tied names of a module.

Nothing here unpickles. Tensors are read by the same operation as in any load of stio. A file that the caller names may
be a link to any place. The files of a directory are opened by the rule for shards, all of them before the first tensor
is read (`open_files`).
"""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from stio.compat.huggingface_hub.split import covers_storage, get_torch_storage_id, is_wrapper
from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    StorageError,
    UnsafePathError,
    UnsupportedDtypeError,
    listed,
    printable,
    without_path,
)
from stio.format.directory import require_complete, without_index
from stio.format.header import Header
from stio.format.index import ShardIndex, parse_index
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX
from stio.loading.body import collect, reading_operation
from stio.loading.module_tree import require_memory_of
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.loading.options import LoadOptions
from stio.loading.select import select_tensors
from stio.runtime.contexts import contextmanager
from stio.runtime.memory import allocate
from stio.runtime.operation import Operation
from stio.storage.base import Root
from stio.storage.open import SingleFileRoot, most_open_files

logger = logging.getLogger("stio")

_MAX_INDEX_BYTES = 10 * 1024 * 1024
"""Longest index that the original reads: an index is metadata."""

_FORMATS = ("pt", "mlx")
_BY_STIO = ("cpu", "cuda")
"""Devices that tensors are loaded to; to others they are moved from the CPU."""

MapLocation = Any
"""What `torch.load` takes: a device, its name or index, a mapping of them; for pickles a function too."""


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file of a directory that `open_files` has checked. It is a path for functions that take one."""

    path: str
    """The file."""
    opened: OpenCheckpoint | None
    """The open file with its header; None: a pickle."""

    def __fspath__(self) -> str:
        return self.path


@contextmanager
def open_files(root: Root, names: Sequence[str], *, safe: bool) -> Iterator[list[OpenFile]]:
    """Open files of a directory and check their headers; closes them at the end. No link may lead out.

    If they are more than may be open at once, each is opened again when it is loaded, and must be the same file then.

    Args:
        root: The directory.
        names: Names of the files, relative to the directory.
        safe: Whether the caller requires safetensors. Else pickles are checked for their place and kind only.

    Raises:
        CheckpointNotFoundError: A file does not exist.
        UnsafePathError: A file is a link that leads out of the directory.
        FormatError: A header is wrong.
        UnsupportedDtypeError: Another program has compressed the tensors of a file.
        StorageError: A file is no regular one, or its metadata name another format; or the system refused.
    """
    with ExitStack() as stack:
        files = []
        in_turns = len(names) > most_open_files()
        for name in names:
            path, opened = os.path.join(root.path, name), None
            with _explained(path, safe=safe), _refusals(path):
                if safe or name.lower().endswith(FILE_SUFFIX):
                    opened = stack.enter_context(closing(open_checkpoint(SingleFileRoot(root, name), strict=False)))
                    opened.require_plain()
                    _require_format(opened.headers[0], path)
                    if in_turns:
                        opened.files[0].close()
                        opened.openers = (partial(root.open, name),)
                else:
                    root.open(name).close()
            files.append(OpenFile(path, opened))
        yield files


class PathNotFoundError(CheckpointNotFoundError, ValueError):
    """There is nothing at the path of a load: FileNotFoundError in huggingface_hub 2.4, ValueError in 1.29."""


def not_found(path: str) -> CheckpointNotFoundError:
    """Return the error for a file that is not there."""
    return CheckpointNotFoundError(
        f"No checkpoint file found at '{printable(path)}'; is the path right, and the download complete?"
    )


@contextmanager
def _refusals(path: str) -> Iterator[None]:
    """Raise errors about a file that a directory or an index names in the words of the hub."""
    try:
        yield
    except CheckpointNotFoundError:
        raise not_found(path) from None
    except UnsafePathError as error:
        message = (
            "the file is a link that leads out of the checkpoint; replace it by the file, or load the checkpoint by "
            "`stio.load_into(..., follow_symlinks=True)`, if you trust it"
        )
        raise UnsafePathError(message, path=error.path, expected=error.expected, found=error.found) from None


@contextmanager
def _explained(path: str, *, safe: bool) -> Iterator[None]:
    """If the caller requires safetensors, let an error about the format say so."""
    try:
        yield
    except (FormatError, UnsupportedDtypeError) as error:
        is_packed = isinstance(error, UnsupportedDtypeError) and error.found is None  # see `require_plain`
        if not safe or is_packed:
            raise
        raise FormatError(
            f"Cannot load '{printable(path)}' as safetensors. If it is a pickle, pass `safe=False` to allow it; a "
            "pickle can run code when it is loaded"
        ) from error


def load_safetensors(
    path: str, map_location: MapLocation, *, safe: bool, opened: OpenCheckpoint | None = None
) -> dict[str, torch.Tensor]:
    """Load one safetensors file.

    Args:
        path: The file, under any name.
        map_location: Device, its name, its index, or a mapping from `"cpu"` to one of them.
        safe: Whether the caller requires the format; then every error says that the file is not of this format.
        opened: The open file; None: it is opened by its path.

    Raises:
        FormatError: The file is not of the format.
        StorageError: The metadata name no format of torch's weights; or the system refused.
        UnsupportedDtypeError: torch has no type for a tensor's dtype, or another program has compressed the tensors.
        TypeError: A function as `map_location`: it would need storages, and there are none.
        RuntimeError: There is no such device.
    """
    with _explained(path, safe=safe):
        if path.endswith(INDEX_SUFFIX):
            raise FormatError("an index holds no tensors", path=path)  # stio's own loads would load its shards
        return _load_file(path, opened, map_location)


def _load_file(path: str, opened: OpenCheckpoint | None, map_location: MapLocation) -> dict[str, torch.Tensor]:
    device = _device(map_location)
    loaded_to = device if device.type in _BY_STIO else torch.device("cpu")
    options = LoadOptions(device=loaded_to)

    def read(operation: Operation[Any], opened: OpenCheckpoint) -> Callable[[], dict[str, torch.Tensor]]:
        _require_format(opened.headers[0], path)
        return collect(operation, select_tensors(opened, None, options), options)

    if opened is None:
        operation = reading_operation(path, options, read)
    else:
        operation = Operation(partial(read, opened=opened), name="load", kind="load", about=path).start()
    tensors = operation.result()()
    return tensors if loaded_to == device else {name: tensor.to(device) for name, tensor in tensors.items()}


def _device(map_location: MapLocation) -> torch.device:
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    if map_location is None:
        return torch.device("cpu")
    if callable(map_location):
        raise TypeError("map_location is a device or a mapping of devices for safetensors files, not a function")
    device = torch.device(map_location)
    if device.type == "meta":
        logger.warning("map_location='meta' is not possible for a safetensors file; its tensors are loaded to the CPU")
        return torch.device("cpu")
    return device


def _require_format(header: Header, path: str) -> None:
    """Require that metadata, where a file has some, name a format of torch's weights."""
    found = header.metadata.get("format")
    if found in _FORMATS or not header.has_metadata:
        return
    raise StorageError(
        "the file does not contain the valid metadata: it was not saved as weights for torch; save it by "
        "`save_torch_model`",
        path=path,
        errno=errno.EINVAL,
        expected=f"format: one of {', '.join(_FORMATS)}",
        found="none" if found is None else found,
    )


def only_file(path: Path, *, safe: bool) -> str:
    """Return the only file of weights in a directory; without a single safetensors file, the only pickle if allowed.

    Raises:
        AmbiguousCheckpointError: There is none, or more.
        CheckpointNotFoundError: It is a shard, and the others are missing.
    """
    names = sorted(os.listdir(path))
    found = [file for one in without_index(names, (FILE_SUFFIX,)) for file in one.files]
    if len(found) != 1 and not safe:
        found = [file for one in without_index(names, (".bin",)) for file in one.files]
    if len(found) != 1:
        raise AmbiguousCheckpointError(
            f"Directory '{printable(str(path))}' does not contain a valid checkpoint. Expected either a sharded "
            "checkpoint with an index file, or a single model file",
            found=listed(map(str, found)) if found else "none",
        )
    require_complete(found, path=str(path))
    return found[0]


def read_index(root: Root, name: str, suffix: str) -> ShardIndex:
    """Read an index and check the names of its shards, by the rules of `stio.format.index`.

    Args:
        root: The directory of the index.
        name: Name of the index.
        suffix: Required end of each shard's name.

    Raises:
        IndexFormatError: It is too long, malformed, or a shard's name has another end.
        UnsafePathError: The index is a link that leads out of the directory, or a shard's name leads out.
        StorageError: It is no regular file, or the system refused.
    """
    path = os.path.join(root.path, name)
    with _refusals(path), closing(root.open(name)) as file:
        nbytes = min(file.identity.nbytes, _MAX_INDEX_BYTES + 1)
        memory = allocate(max(nbytes, 1)).sub(0, nbytes)
        file.read_into(0, [memory])
        raw = memory.tobytes()
    where = f"index file '{printable(path)}'"
    if len(raw) > _MAX_INDEX_BYTES:
        raise IndexFormatError(f"Invalid {where}: it is longer than {_MAX_INDEX_BYTES} bytes")
    try:
        return parse_index(raw, path=path, suffix=suffix)
    except (UnsafePathError, IndexFormatError) as error:
        shard = str(error.found or "")
        if not error.message.startswith("shard name") or (
            isinstance(error, IndexFormatError) and shard.endswith(suffix)
        ):
            raise type(error)(f"Invalid {where}: {without_path(error)}") from error
        if isinstance(error, UnsafePathError):
            rule = "Shard filenames must be relative paths without '..' components"
        else:
            rule = f"Expected '{suffix}' extension, as that of the index"
        message = f"Invalid shard filename '{printable(shard)}' in {where}: {error.message}. {rule}"
        raise type(error)(message) from error


def missing_and_unexpected(model: nn.Module, loaded: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the model's names that were not loaded, and the loaded names that it does not have, in order."""
    known, given = dict.fromkeys(model.state_dict()), dict.fromkeys(loaded)
    return [name for name in known if name not in given], [name for name in given if name not in known]


def fill(model: nn.Module, state_dict: Any, *, strict: bool, path: str) -> _IncompatibleKeys:
    """Load all tensors into a model; a name that is tied to a loaded one counts as loaded.

    Raises:
        MismatchError: The memory of a tensor of the model was freed or shrunk, or is read-only.
    """
    if isinstance(state_dict, Mapping):
        require_memory_of(model, state_dict, path=path)
    by_tie = strict and isinstance(state_dict, Mapping) and bool(_tied(model, set(state_dict)))
    result: _IncompatibleKeys = model.load_state_dict(state_dict, strict=strict and not by_tie)
    if by_tie:  # torch's own check ignores ties, so it runs only where there are none
        require_all(model, state_dict)
        return _IncompatibleKeys([], [])
    return result


def require_all(model: nn.Module, loaded: Iterable[str]) -> None:
    """Require that the loaded names are those of the model; a name that is tied to a loaded one counts as loaded.

    Raises:
        RuntimeError: Names are missing or unexpected.
    """
    loaded = set(loaded)
    missing, unexpected = missing_and_unexpected(model, loaded)
    missing = sorted(set(missing) - _tied(model, loaded))
    if not missing and not unexpected:
        return
    message = f"Error(s) in loading state_dict for {type(model).__name__}"
    for what, names in (("Missing", missing), ("Unexpected", sorted(unexpected))):
        if names:
            listed = ",".join(f'"{printable(name)}"' for name in names)
            message += f"\n{what} key(s): {listed}."
    raise RuntimeError(message)


def _tied(model: nn.Module, loaded: set[str]) -> set[str]:
    """Return the names that were not loaded, but whose memory was filled under another name."""
    tensors = model.state_dict(keep_vars=True)
    missing = tensors.keys() - loaded
    if not missing:
        return set()
    filled = [tensor for name, tensor in tensors.items() if name in loaded and isinstance(tensor, torch.Tensor)]
    same = {id(tensor) for tensor in filled}  # on meta there is no address to compare
    storages = {_storage(tensor) for tensor in filled if not is_wrapper(tensor) and covers_storage(tensor)} - {None}
    return {name for name in missing if id(tensors[name]) in same or _storage(tensors[name]) in storages}


def _storage(value: object) -> tuple[Any, ...] | None:
    """Return a key of a value's storage, None if it has none."""
    key = get_torch_storage_id(value) if isinstance(value, torch.Tensor) else None
    return key if key is not None and key[2] else None
