"""The hub's serialization helpers, implemented by stio: the same names, files and errors.

    from stio.compat.huggingface_hub import load_torch_model, save_torch_model

`huggingface_hub` itself is not needed. Saves are atomic and durable; the old checkpoint is removed after the new one is
in place. The public functions call each other through this module, so that a patched one is used by the others too.

`split` contains the greedy split into files, with sizes, storages and duplicates of tensors, `save` publishes files
into a directory by the transaction of every save, `load` reads files and indices and fills models.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from stio.compat.huggingface_hub.load import (
    MapLocation,
    OpenFile,
    PathNotFoundError,
    fill,
    load_safetensors,
    missing_and_unexpected,
    not_found,
    only_file,
    open_files,
    read_index,
    require_all,
)
from stio.compat.huggingface_hub.save import HubDirectory, index_text, save_pickles, save_tensors
from stio.compat.huggingface_hub.split import (
    MAX_SHARD_SIZE,
    StateDictSplit,
    as_counted,
    discard_shared,
    get_torch_storage_id,
    get_torch_storage_size,
    parse_size_to_int,
    require_contiguous,
    require_plain,
    split_state_dict_into_shards_factory,
)
from stio.conversion.sources import files_of_index
from stio.device.tensor_memory import require_data_of, require_values
from stio.errors import printable
from stio.format.naming import FILE_SUFFIX, INDEX_SUFFIX
from stio.loading.module_tree import require_memory_of
from stio.runtime.process import contextmanager
from stio.storage.open import open_directory

__all__ = [
    "StateDictSplit",
    "get_torch_storage_id",
    "get_torch_storage_size",
    "load_state_dict_from_file",
    "load_torch_model",
    "parse_size_to_int",
    "save_torch_model",
    "save_torch_state_dict",
    "split_state_dict_into_shards_factory",
    "split_torch_state_dict_into_shards",
]

logger = logging.getLogger("stio")

SAFETENSORS_WEIGHTS_FILE_PATTERN = "model{suffix}.safetensors"
PYTORCH_WEIGHTS_FILE_PATTERN = "pytorch_model{suffix}.bin"

constants = SimpleNamespace(
    PYTORCH_WEIGHTS_FILE_PATTERN=PYTORCH_WEIGHTS_FILE_PATTERN,
    SAFETENSORS_WEIGHTS_FILE_PATTERN=SAFETENSORS_WEIGHTS_FILE_PATTERN,
)
"""The hub's names of these constants."""

_UNSAFE = (
    "pickles can run code when they are loaded: do not load them from sources that you do not trust. If you mean to "
    "share this model, we strongly recommend using safe serialization (safe_serialization=True)"
)


# Splitting.


def split_torch_state_dict_into_shards(
    state_dict: Mapping[str, torch.Tensor],
    *,
    filename_pattern: str = SAFETENSORS_WEIGHTS_FILE_PATTERN,
    max_shard_size: int | str = MAX_SHARD_SIZE,
) -> StateDictSplit:
    """Split torch's tensors into files; see `split_state_dict_into_shards_factory`."""
    return split_state_dict_into_shards_factory(
        state_dict,
        max_shard_size=max_shard_size,
        filename_pattern=filename_pattern,
        get_storage_size=get_torch_storage_size,
        get_storage_id=get_torch_storage_id,
    )


# Saving.


def save_torch_model(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    filename_pattern: str | None = None,
    force_contiguous: bool = True,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    metadata: dict[str, str] | None = None,
    safe_serialization: bool = True,
    is_main_process: bool = True,
    shared_tensors_to_discard: list[str] | None = None,
) -> None:
    """Save a model's `state_dict()`; see `save_torch_state_dict`."""
    save_torch_state_dict(
        state_dict=model.state_dict(),
        filename_pattern=filename_pattern,
        force_contiguous=force_contiguous,
        max_shard_size=max_shard_size,
        metadata=metadata,
        safe_serialization=safe_serialization,
        save_directory=save_directory,
        is_main_process=is_main_process,
        shared_tensors_to_discard=shared_tensors_to_discard,
    )


def save_torch_state_dict(
    state_dict: Mapping[str, torch.Tensor],
    save_directory: str | os.PathLike[str],
    *,
    filename_pattern: str | None = None,
    force_contiguous: bool = True,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    metadata: dict[str, str] | None = None,
    safe_serialization: bool = True,
    is_main_process: bool = True,
    shared_tensors_to_discard: list[str] | None = None,
) -> None:
    """Save tensors into an existing directory, in shards with an index if they are larger than the maximum.

    When it returns, the files are durable and in place, and those of an older checkpoint of this pattern are removed.
    If it raises, the old checkpoint stays. The caller's dicts do not change.

    Args:
        state_dict: Tensors by name.
        save_directory: The directory.
        filename_pattern: Pattern of the files' names; `model{suffix}.safetensors` or `pytorch_model{suffix}.bin`.
        force_contiguous: Whether tensors in another layout are saved contiguously, or refused.
        max_shard_size: Most bytes in one file: a number, or text with a unit (`"5GB"`, `"4GiB"`).
        metadata: Text for the header, or for the index. Of names that share memory one is saved; each dropped name is
            recorded here with the saved one, `dropped: saved`.
        safe_serialization: Whether to write safetensors; else pickles.
        is_main_process: Whether to remove the files of an older checkpoint. Of several processes, one does that.
        shared_tensors_to_discard: Names to drop if another name shares their memory.

    Raises:
        FileNotFoundError: There is no such directory.
        ValueError: A pattern without `{suffix}`, a malformed size, a tensor that is sparse or not contiguous, or whose
            memory was freed or shrunk.
        RuntimeError: Tensors overlap and none of them covers their storage; a tensor on meta.
        StorageError: The system refused.
    """
    if filename_pattern is None:
        filename_pattern = SAFETENSORS_WEIGHTS_FILE_PATTERN if safe_serialization else PYTORCH_WEIGHTS_FILE_PATTERN
    require_plain(filename_pattern)
    described: dict[str, Any] = dict(metadata or {})
    counted = remaining = dict(state_dict)
    if safe_serialization:
        remaining, dropped = discard_shared(remaining, shared_tensors_to_discard or ())
        described |= {name: other for name, other in dropped.items() if name not in described}
        if not force_contiguous:
            require_contiguous(remaining)
        counted = {name: as_counted(tensor) for name, tensor in remaining.items()}
    else:
        logger.warning(_UNSAFE)
        # torch.save would write a file that nothing can read, or that has no values.
        require_data_of(state_dict)
        require_values(state_dict)
    split = split_torch_state_dict_into_shards(
        counted, filename_pattern=filename_pattern, max_shard_size=max_shard_size
    )
    files = split.filename_to_tensors
    index = index_text({**split.metadata, **described}, split.tensor_to_filename) if split.is_sharded else None
    place = HubDirectory(os.fsdecode(save_directory), filename_pattern, tuple(files), removes=is_main_process)
    if not files:
        place.clear()
    elif safe_serialization:
        save_tensors(place, remaining, files, described, index)
    else:
        save_pickles(place, state_dict, files, index)


# Loading.


def load_torch_model(
    model: nn.Module,
    checkpoint_path: str | os.PathLike[str],
    *,
    strict: bool = False,
    safe: bool = True,
    weights_only: bool = True,
    map_location: MapLocation = None,
    mmap: bool = False,
    filename_pattern: str | None = None,
) -> _IncompatibleKeys:
    """Load a file, a sharded checkpoint, or the only file of a directory into a model.

    All files of a directory are opened, and the headers of safetensors files checked, before the model changes. A file
    of a directory, or its index, may be no link that leads out of the directory, except into the `blobs/` of the same
    repository of the hub's cache. A file that the caller names may be a link to any place.

    Args:
        model: The model; its parameters are filled in place.
        checkpoint_path: A file, or a directory.
        strict: Whether model and checkpoint must have the same names. A name that is tied to a loaded one counts as
            loaded. The check is the last step, so the model may have been changed when it fails.
        safe: Whether only safetensors files are loaded, under any name; else pickles are the fallback.
        weights_only: Whether pickles are read by torch's restricted unpickler.
        map_location: Device on which the tensors are made.
        mmap: Whether pickles are mapped.
        filename_pattern: Pattern of the files; its index is searched.

    Returns:
        Names that only the model has, and names that only the checkpoint has.

    Raises:
        FileNotFoundError: The path, or a shard, does not exist.
        ValueError: It is no checkpoint, or a malformed one; or a file is a link that leads out of its directory; or
            the memory of a tensor of the model was freed or shrunk, or is read-only (`MismatchError`).
        OSError: A file's metadata name another format; the system refused.
        RuntimeError: Names or shapes differ.
    """
    path = Path(checkpoint_path)
    if not path.exists():
        raise PathNotFoundError(f"Checkpoint path {printable(str(path))} does not exist")

    how: dict[str, Any] = {"map_location": map_location, "weights_only": weights_only, "mmap": mmap, "safe": safe}
    if not path.is_file():
        pattern = _choose_pattern(path, filename_pattern, safe=safe)
        if os.path.lexists(path / (pattern.format(suffix="") + INDEX_SUFFIX)):
            return _load_sharded_checkpoint(model, path, strict=strict, filename_pattern=pattern, **how)
    with _opened(path, safe=safe) as file:
        state_dict = load_state_dict_from_file(checkpoint_file=file, **how)
    return fill(model, state_dict, strict=strict, path=str(path))


@contextmanager
def _opened(path: Path, *, safe: bool) -> Iterator[Path | OpenFile]:
    """Yield a file that the caller named, or the only file of a directory, opened."""
    if path.is_file():
        yield path
        return
    name = only_file(path, safe=safe)
    with open_directory(path, follow_symlinks=False) as root, open_files(root, [name], safe=safe) as (file,):
        yield file


def _choose_pattern(path: Path, pattern: str | None, *, safe: bool) -> str:
    if pattern is None:
        index = path / (SAFETENSORS_WEIGHTS_FILE_PATTERN.format(suffix="") + INDEX_SUFFIX)
        return SAFETENSORS_WEIGHTS_FILE_PATTERN if safe or index.is_file() else PYTORCH_WEIGHTS_FILE_PATTERN
    if safe and not _is_safetensors(pattern.format(suffix="")):
        raise ValueError(
            f"`filename_pattern={printable(pattern)!r}` does not describe safetensors files but `safe=True`: pass "
            "`safe=False` to load pickles"
        )
    return pattern


def _load_sharded_checkpoint(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    strict: bool = False,
    weights_only: bool = True,
    safe: bool = True,
    filename_pattern: str = SAFETENSORS_WEIGHTS_FILE_PATTERN,
    map_location: MapLocation = None,
    mmap: bool = False,
) -> _IncompatibleKeys:
    """Load a sharded checkpoint into a model, one shard at a time; see `load_torch_model`."""
    directory = Path(save_directory)
    load = partial(
        load_state_dict_from_file,
        map_location="cpu" if map_location is None else map_location,
        weights_only=weights_only,
        mmap=mmap,
        safe=safe,
    )
    whole = filename_pattern.format(suffix="")
    loaded: dict[str, None] = {}
    with open_directory(directory, follow_symlinks=False) as root:
        name, suffix = whole + INDEX_SUFFIX, Path(whole).suffix
        index = read_index(root, name, suffix)
        shards = files_of_index(root.path, name, whole, index.shards, root.listdir(), (suffix,))
        with open_files(root, shards, safe=safe) as files:
            require_memory_of(model, index.weight_map, path=str(directory))
            for shard, file in zip(shards, files, strict=True):
                state_dict = load(checkpoint_file=file)
                if shard in index.shards:  # a stale tensor, which the index has in another shard
                    for name in [name for name in state_dict if index.weight_map.get(name, shard) != shard]:
                        del state_dict[name]
                loaded |= dict.fromkeys(state_dict)
                fill(model, state_dict, strict=False, path=file.path)
                del state_dict  # before the next one is loaded
    # The loaded names are those in the shards: the index may differ from them.
    unexpected = [name for name in loaded if name not in index.weight_map]
    if unexpected and shards == index.shards:
        logger.warning("the shards hold tensors that the index does not name: %s", printable(sorted(unexpected)))
    if strict:
        require_all(model, loaded)
        return _IncompatibleKeys([], [])
    return _IncompatibleKeys(*missing_and_unexpected(model, loaded))


def load_state_dict_from_file(
    checkpoint_file: str | os.PathLike[str],
    map_location: MapLocation = None,
    weights_only: bool = True,
    mmap: bool = False,
    *,
    safe: bool = True,
) -> dict[str, torch.Tensor] | Any:
    """Load one file.

    Args:
        checkpoint_file: A safetensors file, or a pickle.
        map_location: Device on which the tensors are made.
        weights_only: Whether pickles are read by torch's restricted unpickler.
        mmap: Whether pickles are mapped.
        safe: Whether the file is read as safetensors under any name. Else its name decides.

    Returns:
        Tensors by name; for pickles any pickled value.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It is not a safetensors file (`FormatError`).
        OSError: Its metadata name another format; the system refused.
    """
    path = os.fsdecode(checkpoint_file)
    opened = checkpoint_file.opened if isinstance(checkpoint_file, OpenFile) else None
    if opened is None and not Path(path).is_file():
        raise not_found(path)
    if safe or _is_safetensors(path):
        return load_safetensors(path, map_location, safe=safe, opened=opened)
    if not weights_only:
        logger.warning(
            "%s is loaded without torch's restricted unpickler: it can execute arbitrary code at load time. Trust "
            "where it comes from",
            printable(path),
        )
    return torch.load(checkpoint_file, map_location=map_location, weights_only=weights_only, mmap=mmap)


def _is_safetensors(filename: str | os.PathLike[str]) -> bool:
    """Return whether a name is that of a safetensors file; some systems ignore case."""
    return os.fsdecode(filename).lower().endswith(FILE_SUFFIX)
