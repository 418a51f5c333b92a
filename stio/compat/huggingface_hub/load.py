"""Loading by the hub's rules: one safetensors file without the faces' warnings, an index judged, ties of a module.

Nothing here unpickles. Tensors come by the same operations as any load of stio's.
"""

from __future__ import annotations

import errno
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PureWindowsPath
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from stio.compat.huggingface_hub.tensors import covers_storage, is_wrapper, storage_id
from stio.errors import (
    AmbiguousCheckpointError,
    FormatError,
    IndexFormatError,
    StorageError,
    UnsafePathError,
    UnsupportedDtypeError,
    printable,
)
from stio.format.header import PREFIX_BYTES, Header
from stio.loading.body import collect
from stio.loading.open import OpenCheckpoint, OpenOptions, open_checkpoint
from stio.loading.options import Settings
from stio.runtime.memory import allocate
from stio.runtime.operation import Operation

__all__ = [
    "MAX_INDEX_BYTES",
    "MapLocation",
    "fill",
    "load_safetensors",
    "missing_and_unexpected",
    "only_file",
    "read_index",
    "require_all",
]

logger = logging.getLogger("stio")

MAX_INDEX_BYTES = 10 * 1024 * 1024
"""Longest index: it is metadata."""

_SUFFIX = ".safetensors"
_INDEX_SUFFIX = ".index.json"
_FORMATS = ("pt", "mlx")
_METADATA_KEY = "__metadata__"
_BY_STIO = ("cpu", "cuda")
"""Devices that tensors are loaded to; to others they are moved from the CPU."""

MapLocation = Any
"""What `torch.load` takes: a device, its name or index, a mapping of them; for pickles a function too."""


def load_safetensors(path: str, map_location: MapLocation, *, safe: bool) -> dict[str, torch.Tensor]:
    """Load one safetensors file.

    Args:
        path: The file, whatever it is called.
        map_location: Device, its name, its index, or a mapping from `"cpu"` to one of them.
        safe: Whether the caller insists on the format, so that what is wrong with the file is said in those terms.

    Raises:
        FormatError: It is no such file.
        StorageError: The metadata name no format that torch's weights come in; or the system refused.
        UnsupportedDtypeError: torch has no type for a tensor's.
        TypeError: A function as `map_location`: there are no storages for it to judge.
        RuntimeError: There is no such device.
    """
    try:
        if path.endswith(_INDEX_SUFFIX):
            raise FormatError("an index holds no tensors", path=path)  # stio's own loads would follow it
        return _load_file(path, map_location)
    except (FormatError, UnsupportedDtypeError) as error:
        if not safe:
            raise
        raise FormatError(
            f"Cannot load '{printable(path)}' as safetensors. If it is a pickle, pass `safe=False` to allow it; a "
            "pickle can run code when it is loaded"
        ) from error


def _load_file(path: str, map_location: MapLocation) -> dict[str, torch.Tensor]:
    device = _device(map_location)
    target = device if device.type in _BY_STIO else torch.device("cpu")
    settings = Settings(device=target)

    def body(operation: Operation[Any]) -> Callable[[], dict[str, torch.Tensor]]:
        opened = open_checkpoint(path, OpenOptions(), check=operation.check)
        try:
            _require_format(opened, path)
            return collect(operation, opened, None, settings.load_options())
        finally:
            opened.close()

    take = Operation(body, name="load", kind="load", about=path).start().result()
    tensors = take()
    return tensors if target == device else {name: tensor.to(device) for name, tensor in tensors.items()}


def _device(map_location: MapLocation) -> torch.device:
    if isinstance(map_location, Mapping):
        map_location = map_location.get("cpu")
    if map_location is None:
        return torch.device("cpu")
    if callable(map_location):
        raise TypeError("map_location is a device or a mapping of devices for safetensors files, not a function")
    device = torch.device(map_location)
    if device.type == "meta":
        logger.warning("there are no tensors without data in a safetensors file; they are loaded to the CPU")
        return torch.device("cpu")
    return device


def _require_format(opened: OpenCheckpoint, path: str) -> None:
    """Require that metadata, where a file has some, name a format that torch's weights come in."""
    header = opened.headers[0]
    found = header.metadata.get("format")
    if found in _FORMATS or (not header.metadata and not _has_empty_metadata(opened, header)):
        return
    raise StorageError(
        "the file does not contain the valid metadata: it was not saved as weights for torch; save it by "
        "`save_torch_model`",
        path=path,
        errno=errno.EINVAL,
        expected=f"format: one of {', '.join(_FORMATS)}",
        found="none" if found is None else found,
    )


def _has_empty_metadata(opened: OpenCheckpoint, header: Header) -> bool:
    """Return whether the header has metadata with nothing in them, which is not the same as none."""
    region = allocate(header.data_start - PREFIX_BYTES)
    opened.files[0].read_into(PREFIX_BYTES, [region.sub(0, region.nbytes)])
    text = region.tobytes()
    if _METADATA_KEY.encode() not in text:
        return False
    return json.loads(text).get(_METADATA_KEY) is not None


def only_file(path: Path, *, safe: bool) -> Path:
    """Return the only file of weights in a directory; pickles count where safetensors do not decide, if allowed.

    Raises:
        AmbiguousCheckpointError: There is none, or more.
    """
    found = sorted(path.glob("*" + _SUFFIX))
    if len(found) != 1 and not safe:
        found = sorted(path.glob("*.bin"))
    if len(found) != 1:
        raise AmbiguousCheckpointError(
            f"Directory '{printable(str(path))}' does not contain a valid checkpoint. Expected either a sharded "
            "checkpoint with an index file, or a single model file",
            found=", ".join(file.name for file in found) or "none",
        )
    return found[0]


def read_index(path: str, suffix: str) -> dict[str, str]:
    """Return the map from tensor to shard of an index, each shard's name judged for every system.

    Args:
        path: The index.
        suffix: What the name of a shard ends in.

    Raises:
        IndexFormatError: It is too long, not JSON, or holds no such map; a shard's name ends otherwise.
        UnsafePathError: A shard's name leads out of the directory.
        OSError: The system refused.
    """
    with open(path, "rb") as file:
        raw = file.read(MAX_INDEX_BYTES + 1)

    def wrong(why: str) -> IndexFormatError:
        return IndexFormatError(f"Invalid index file '{printable(path)}': {why}")

    if len(raw) > MAX_INDEX_BYTES:
        raise wrong(f"it is longer than {MAX_INDEX_BYTES} bytes")
    try:
        index = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise wrong(f"it is not JSON: {printable(str(error))}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict):
        raise wrong("expected a JSON object with a 'weight_map' object")
    if not all(isinstance(shard, str) for shard in weight_map.values()):
        raise wrong("all 'weight_map' values must be strings")
    for shard in dict.fromkeys(weight_map.values()):
        _check_shard(shard, suffix, path)
    return weight_map


def _check_shard(shard: str, suffix: str, path: str) -> None:
    # Windows takes both slashes for separators, and has drives: what is safe there is safe everywhere.
    parsed = PureWindowsPath(shard)
    wrong = f"Invalid shard filename '{printable(shard)}' in index file '{printable(path)}'. "
    if parsed.drive or parsed.root or ".." in parsed.parts or "\0" in shard:
        raise UnsafePathError(f"{wrong}Shard filenames must be relative paths without '..' components")
    if not shard.endswith(suffix):
        raise IndexFormatError(f"{wrong}Expected '{suffix}' extension to match the index format")


def missing_and_unexpected(model: nn.Module, loaded: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the model's names that were not loaded, and the loaded names that it does not have, in order."""
    known, given = dict.fromkeys(model.state_dict()), dict.fromkeys(loaded)
    return [name for name in known if name not in given], [name for name in given if name not in known]


def fill(model: nn.Module, state_dict: Any, *, strict: bool) -> _IncompatibleKeys:
    """Put all tensors into a model; what is tied to a loaded name counts as loaded."""
    by_tie = strict and isinstance(state_dict, Mapping) and bool(_tied(model, set(state_dict)))
    result: _IncompatibleKeys = model.load_state_dict(state_dict, strict=strict and not by_tie)
    if by_tie:  # torch knows nothing of ties: its own check, and its own words, only where there are none
        require_all(model, state_dict)
        return _IncompatibleKeys([], [])
    return result


def require_all(model: nn.Module, loaded: Iterable[str]) -> None:
    """Require that the loaded names are the model's; one that is tied to a loaded one is loaded with it.

    Raises:
        RuntimeError: They are not.
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
    same = {id(tensor) for tensor in filled}  # the only sign on meta
    storages = {_storage(tensor) for tensor in filled if not is_wrapper(tensor) and covers_storage(tensor)} - {None}
    return {name for name in missing if id(tensors[name]) in same or _storage(tensors[name]) in storages}


def _storage(value: object) -> tuple[Any, ...] | None:
    """Return what tells a storage from others, None where there is none."""
    key = storage_id(value) if isinstance(value, torch.Tensor) else None
    return key if key is not None and key[2] else None
