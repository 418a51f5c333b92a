"""huggingface_hub's serialization over the saves and loads of stio: the same names, files and errors.

    from stio.compat.huggingface_hub import load_torch_model
    from stio.compat.huggingface_hub import save_torch_model

The split into files is huggingface_hub's own; that package must be installed. A load of safetensors fills the model's
own memory, as `stio.load_into` does, and its rules about files of a directory are those of every load of stio.

Saves are atomic and durable, and remove the old checkpoint after the new one is in place. The transaction is that of
every save; its policy is `HubDirectory.plan`. Of names whose tensors overlap on one storage, one is saved: the first of
those that cover the storage. The files always have the hub's names, and the same files are removed as by the hub. A
directory is a `Destination`, so shards are written as in any other save; `torch.save` writes pickles into the
transaction's staging directory. Several processes may save to one directory at once: each publication replaces the
files that exist at that moment.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

import stio
from stio.compat.safetensors.torch import (
    _find_shared_tensors,
    _is_complete,
    _remove_duplicate_names,
    _require_contiguous,
    _require_no_names,
)
from stio.conversion import pickle_files
from stio.device import describe_tensors, require_values
from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    DeviceError,
    FormatError,
    IndexFormatError,
    MismatchError,
    StioError,
    StorageError,
    UnsafePathError,
    install_command,
    printable,
)
from stio.format.files import FILE_SUFFIX, INDEX_SUFFIX, FilePattern, parse_index
from stio.limits import parse_size
from stio.loading.targets import ModuleTree
from stio.process import contextmanager
from stio.runtime import run_blocking
from stio.saving import PendingSave, SaveOptions, plan_files
from stio.storage import refusals
from stio.storage.commit import NamedFiles

try:
    from huggingface_hub import (
        StateDictSplit,
        constants,
        get_torch_storage_id,
        get_torch_storage_size,
        split_state_dict_into_shards_factory,
        split_torch_state_dict_into_shards,
    )
    from huggingface_hub import load_state_dict_from_file as load_pickle
except ModuleNotFoundError as error:
    raise ImportError(
        f"this is a drop-in for huggingface_hub, which is not installed: {install_command('hub')}"
    ) from error

__all__ = [
    "StateDictSplit",
    "get_torch_storage_id",
    "get_torch_storage_size",
    "load_state_dict_from_file",
    "load_torch_model",
    "save_torch_model",
    "save_torch_state_dict",
    "split_state_dict_into_shards_factory",
    "split_torch_state_dict_into_shards",
]

logger = logging.getLogger("stio")

_SAFETENSORS, _PICKLES = constants.SAFETENSORS_WEIGHTS_FILE_PATTERN, constants.PYTORCH_WEIGHTS_FILE_PATTERN
_MAX_SHARD_SIZE = "5GB"

_UNSAFE = (
    "pickles can run code when they are loaded: do not load them from sources that you do not trust. If you mean to "
    "share this model, we strongly recommend using safe serialization (safe_serialization=True)"
)


def save_torch_model(
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    *,
    filename_pattern: str | None = None,
    force_contiguous: bool = True,
    max_shard_size: int | str = _MAX_SHARD_SIZE,
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
    max_shard_size: int | str = _MAX_SHARD_SIZE,
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
    pattern = filename_pattern or (_SAFETENSORS if safe_serialization else _PICKLES)
    _require_plain(pattern)
    described: dict[str, Any] = dict(metadata or {})
    counted = tensors = dict(state_dict)
    if safe_serialization:
        tensors, dropped = _without_duplicates(tensors, shared_tensors_to_discard or ())
        described = {**described, **dropped, **described}
        for name in tensors if not force_contiguous else ():
            _require_contiguous(name, tensors[name])
        counted = {name: _as_counted(tensor) for name, tensor in tensors.items()}
    max_bytes = parse_size(max_shard_size) if isinstance(max_shard_size, str) else max_shard_size
    if max_bytes < 0:
        raise ValueError(f"max_shard_size must be zero or more bytes, not {max_shard_size}")
    split = split_torch_state_dict_into_shards(counted, filename_pattern=pattern, max_shard_size=max_bytes)
    files = split.filename_to_tensors
    listed = {"metadata": {**split.metadata, **described}, "weight_map": split.tensor_to_filename}
    index = json.dumps(listed, indent=2).encode() if split.is_sharded else None
    place = HubDirectory(
        os.fsdecode(save_directory), tuple(files), FilePattern(pattern).index, pattern, is_main_process
    )
    if not files:
        place.clear()
    elif safe_serialization:
        _save_tensors(place, tensors, files, described, index)
    else:
        _save_pickles(place, tensors, files, index)


def _require_plain(pattern: str) -> None:
    """Require a pattern that names files of one directory, each by a name of its own."""
    if set(FilePattern(pattern).index) & {"/", "\\", "\0"}:
        raise ValueError(f"filename_pattern {printable(pattern)!r} must name files, without a directory or NUL")


def _as_counted(tensor: torch.Tensor) -> torch.Tensor:
    """Return what the split counts: a tensor of as many bytes as the file will have, instead of a whole storage.

    huggingface_hub keeps all empty tensors together, as one storage.
    """
    if not tensor.untyped_storage().nbytes():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _without_duplicates(
    tensors: Mapping[str, torch.Tensor], discard: Collection[str]
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the tensors without all but one of the names that share memory, and the saved name of each dropped one.

    A tensor that overlaps with none is saved whether or not it covers its storage.

    Raises:
        SharedTensorsError: Tensors overlap, and none of them covers the storage.
        DeviceError: A tensor on meta.
        TypeError: A value is not a tensor, or a tensor without memory of its own; a name is not text.
        ValueError: A tensor that cannot be saved: sparse, nested, freed.
    """
    on_meta = {name: one for name, one in tensors.items() if isinstance(one, torch.Tensor) and one.is_meta}
    try:
        describe_tensors(on_meta or tensors)  # refuses what cannot be saved
    except ValueError as error:
        raise DeviceError(str(error)) if on_meta else error from None
    groups = [group for group in _find_shared_tensors(tensors) if len(group) > 1]
    shared = {name: tensors[name] for group in groups for name in group}
    duplicates = _remove_duplicate_names(shared, discard_names=discard)
    dropped = {name: saved for saved, names in duplicates.items() for name in names}
    return {name: tensor for name, tensor in tensors.items() if name not in dropped}, dropped


@dataclass(frozen=True, slots=True)
class HubDirectory(NamedFiles):
    """An existing directory with files that have the hub's names, as the destination of a save."""

    pattern: str
    """Pattern of the files' names; contains `{suffix}` once."""
    removes: bool
    """Whether the files of an older checkpoint are removed."""

    def old_names(self, names: Sequence[str], index: bytes | None) -> Sequence[str]:
        """Return the names that the hub removes, the index first, and stio's own shards that the index names."""
        if not self.removes:
            return ()
        before, _, after = self.pattern.partition("{suffix}")
        rule = re.compile(
            rf"{re.escape(before)}(-[0-9]{{5}}-of-[0-9]{{5}})?{re.escape(after)}({re.escape(INDEX_SUFFIX)})?"
        )
        old = [name for name in names if rule.fullmatch(name)]
        if index is not None and self.index.endswith(FILE_SUFFIX + INDEX_SUFFIX):
            with suppress(StioError):  # a broken index names no files
                # Shards with a save id in their names are found by the index only: later saves need it to remove them.
                shards = parse_index(index, path=self.index).shards
                old += [name for name in shards if FilePattern(self.pattern).matches(name)]
        return sorted(dict.fromkeys(old), key=lambda name: not name.endswith(INDEX_SUFFIX))


def _save_tensors(
    place: HubDirectory,
    tensors: Mapping[str, torch.Tensor],
    split: Mapping[str, Sequence[str]],
    metadata: Mapping[str, str],
    index: bytes | None,
) -> None:
    """Save safetensors files; returns when they are durable and in place.

    Args:
        place: The directory.
        tensors: By name.
        split: Names of the tensors in each file.
        metadata: Text for the header, if there is one file.
        index: The index, if there are several.
    """
    header = {"format": "pt", **(metadata if index is None else {})}
    planner = partial(plan_files, files=[(list(names), header) for names in split.values()], index=index)
    # A manifest is found by the pattern. The hub writes safetensors under any name, stio under such patterns only.
    pattern = place.pattern if place.pattern.endswith(FILE_SUFFIX) else place.pattern + FILE_SUFFIX
    run_blocking(PendingSave(tensors, place, SaveOptions(filename_pattern=pattern), planner=planner).complete())


def _save_pickles(
    place: HubDirectory, state_dict: Mapping[str, Any], split: Mapping[str, Sequence[str]], index: bytes | None
) -> None:
    """Save files by `torch.save`; returns when they are durable and in place."""
    logger.warning(_UNSAFE)
    # torch.save would write a file that nothing can read, or that has no values.
    require_values(state_dict)
    transaction = place.begin()
    try:
        with refusals("saving", place.path, caught=(OSError,)):
            for file, names in split.items():
                # By path: torch names the archive's inner directory after the file.
                torch.save({name: state_dict[name] for name in names}, os.path.join(transaction.files_path, file))
                transaction.finish_file(file)
            transaction.commit(index=index)
    finally:
        transaction.roll_back()


# Loading.

MapLocation = Any
"""What `torch.load` takes: a device, its name or index, a mapping of them; for pickles a function too."""

_FORMATS = ("pt", "mlx")


class NoCheckpointError(CheckpointNotFoundError, ValueError):
    """The path of a load has no checkpoint: FileNotFoundError or ValueError, by the release of huggingface_hub."""


class ModelMismatchError(MismatchError, RuntimeError):
    """A model cannot be filled from a checkpoint; torch's own `load_state_dict` raises RuntimeError."""


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
    """Load a file or the checkpoint of a directory into a model.

    All files are opened and checked before the model changes. A file of a directory, or its index, may be no link that
    leads out of the directory, except into the `blobs/` of the same repository of the hub's cache. A file that the
    caller names may be a link to any place.

    Args:
        model: The model; its parameters are filled in place.
        checkpoint_path: A file, or a directory.
        strict: Whether model and checkpoint must have the same names. A name that is tied to a loaded one counts as
            loaded. The check is the last step, so the model may have been changed when it fails.
        safe: Whether only safetensors files are loaded, under any name; else pickles are the fallback.
        weights_only: Whether pickles are read by torch's restricted unpickler.
        map_location: Device on which the tensors of pickles are made; those of safetensors are read into the model.
        mmap: Whether pickles are mapped.
        filename_pattern: Pattern of the files; its index is searched.

    Returns:
        Names that only the model has, and names that only the checkpoint has.

    Raises:
        FileNotFoundError: The path, or a shard, does not exist.
        ValueError: It is no checkpoint, or a malformed one; or a file is a link that leads out of its directory.
        OSError: A file's metadata name another format; the system refused.
        RuntimeError: Names or shapes differ; or the memory of a tensor of the model was freed or shrunk, or is
            read-only (`MismatchError`).
    """
    path = Path(checkpoint_path)
    if not path.exists():
        raise NoCheckpointError(f"Checkpoint path {printable(str(path))} does not exist")
    how: dict[str, Any] = {"strict": strict, "safe": safe}
    how |= {"weights_only": weights_only, "map_location": map_location, "mmap": mmap}
    if path.is_file():
        return _load(model, path, **how)
    if filename_pattern is None:
        is_pickled = not safe and not (path / FilePattern(_SAFETENSORS).index).is_file()
        filename_pattern = _PICKLES if is_pickled else _SAFETENSORS
    elif safe and not _is_safetensors(filename_pattern.format(suffix="")):
        raise ValueError(
            f"`filename_pattern={printable(filename_pattern)!r}` does not describe safetensors files but `safe=True`: "
            "pass `safe=False` to load pickles"
        )
    if os.path.lexists(path / FilePattern(filename_pattern).index):
        return _load_sharded_checkpoint(model, path, filename_pattern=filename_pattern, **how)
    return _load(model, path, **how)


def _load_sharded_checkpoint(
    model: nn.Module, save_directory: str | os.PathLike[str], *, filename_pattern: str = _SAFETENSORS, **how: Any
) -> _IncompatibleKeys:
    """Load the shards of an index into a model; see `load_torch_model`."""
    # In the directory stio takes the whole file if all shards are gone.
    index = "" if filename_pattern == _SAFETENSORS else FilePattern(filename_pattern).index
    return _load(model, Path(save_directory, index), **how)


def _load(model: nn.Module, path: Path, *, strict: bool = False, safe: bool = True, **how: Any) -> _IncompatibleKeys:
    """Load a file, a directory or the shards of an index into a model."""
    with _refusals(path, safe=safe):
        pickles = None if safe else pickle_files(str(path))
        if pickles is None:
            return run_blocking(_fill(model, path, strict=strict))
    loaded: dict[str, None] = {}
    for file in pickles.paths:
        state_dict = load_state_dict_from_file(file, safe=False, **how)
        ModuleTree(model).require_memory(state_dict, path=file)
        model.load_state_dict(state_dict, strict=False)
        loaded |= dict.fromkeys(state_dict)
        del state_dict  # before the next one is loaded
    return _compared(model, loaded, strict=strict)


async def _fill(model: nn.Module, path: Path, *, strict: bool) -> _IncompatibleKeys:
    async with stio.open(path, strict=False) as checkpoint:
        _require_format(checkpoint)
        try:
            report = await checkpoint.load_into(model)
        except MismatchError as error:
            advice = "load by `stio.load_into(assign=True)`"
            raise ModelMismatchError(str(error).replace("pass assign=True", advice)) from error
        return _compared(model, checkpoint.keys(), strict=strict, missing=report.missing)


def _compared(
    model: nn.Module, loaded: Iterable[str], *, strict: bool, missing: Iterable[str] | None = None
) -> _IncompatibleKeys:
    """Return the names that only the model or only the checkpoint has.

    Args:
        model: The model.
        loaded: Names of the checkpoint.
        strict: Whether they must be those of the model, but for names on memory that was filled under another name.
        missing: Names that are missing for `strict`; None: all that only the model has.

    Raises:
        RuntimeError: They must, and are not.
    """
    known, loaded = model.state_dict(), dict.fromkeys(loaded)
    absent, unexpected = [name for name in known if name not in loaded], [name for name in loaded if name not in known]
    if not strict:
        return _IncompatibleKeys(absent, unexpected)
    tensors = {name: value for name, value in known.items() if isinstance(value, torch.Tensor)}
    filled = {get_torch_storage_id(value) for name, value in tensors.items() if name in loaded and _is_complete(value)}
    tied = {name for name, value in tensors.items() if get_torch_storage_id(value) in filled}
    missing = set(absent if missing is None else missing) - tied
    _require_no_names(model, sorted(missing), unexpected)
    return _IncompatibleKeys([], [])


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
        TypeError: A function as `map_location` of safetensors: it would need storages, and there are none.
        OSError: Its metadata name another format; the system refused.
    """
    path = os.fsdecode(checkpoint_file)
    if not Path(path).is_file():
        raise CheckpointNotFoundError(
            f"No checkpoint file found at '{printable(path)}'; is the path right, and the download complete?"
        )
    if not safe and not _is_safetensors(path):
        return load_pickle(checkpoint_file, map_location, weights_only, mmap, safe=False)
    device = _device(map_location)

    async def load() -> dict[str, torch.Tensor]:
        async with stio.open(path, device=device) as checkpoint:
            _require_format(checkpoint)
            return await checkpoint.load()

    with _refusals(path, safe=safe):
        if path.endswith(INDEX_SUFFIX):
            raise FormatError("an index holds no tensors", path=path)  # stio would load its shards
        return run_blocking(load())


def _device(map_location: MapLocation) -> torch.device:
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    if callable(map_location):
        raise TypeError("map_location is a device or a mapping of devices for safetensors files, not a function")
    device = torch.device("cpu" if map_location is None else map_location)
    if device.type == "meta":
        logger.warning("map_location='meta' is not possible for a safetensors file; its tensors are loaded to the CPU")
        return torch.device("cpu")
    return device


def _is_safetensors(filename: str) -> bool:
    """Return whether a name is that of a safetensors file; some systems ignore case."""
    return filename.lower().endswith(FILE_SUFFIX)


def _require_format(checkpoint: stio.Checkpoint) -> None:
    """Require that metadata, where they name a format, name one of torch's weights."""
    found = checkpoint.metadata.get("format", "pt")
    if found not in _FORMATS:
        raise StorageError(
            "the file does not contain the valid metadata: it was not saved as weights for torch",
            errno=errno.EINVAL,
            expected=f"format: one of {', '.join(_FORMATS)}",
            found=found,
        )


@contextmanager
def _refusals(path: str | os.PathLike[str], *, safe: bool) -> Iterator[None]:
    """Raise errors about files in the words of the hub."""
    shown = printable(os.fspath(path))
    none = f"{'Directory ' if os.path.isdir(path) else ''}'{shown}' does not contain a valid checkpoint"
    try:
        yield
    except FormatError as error:
        if not safe:
            raise
        raise FormatError(
            f"Cannot load '{shown}' as safetensors. If it is a pickle, pass `safe=False` to allow it; a pickle can run "
            "code when it is loaded"
        ) from error
    except CheckpointNotFoundError as error:
        raise NoCheckpointError(f"{none}: {error}") from error
    except (AmbiguousCheckpointError, IndexFormatError, UnsafePathError) as error:
        message = error.message.replace("pass follow_symlinks=True", "load by `stio.load_into(follow_symlinks=True)`")
        if isinstance(error, AmbiguousCheckpointError):
            message = f"{none}: {message}"
        elif message.startswith(("shard name", "this is an index of files of torch.save")):
            message = (
                f"Invalid shard filename in index file: {message}. Expected '{FILE_SUFFIX}' extension; shard filenames "
                "must be relative paths without '..' components"
            )
        elif isinstance(error, IndexFormatError):
            message = f"Invalid index file: {message}"
        error.message = message
        error.args = (error.message,)
        raise
