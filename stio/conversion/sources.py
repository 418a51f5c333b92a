"""What a conversion reads from: a safetensors checkpoint, a file of `torch.save`, or several of those under an index.

All are brought to one form, an `Origin`: tensors by name, lazy where they have to be read, which names are ties, and
the text metadata. Names and headers are read here, data when the save asks for it.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from stio.conversion.read_ahead import Window
from stio.conversion.torch_files import is_pickle, read_pickle
from stio.device.save_sources import LazyTensor, sources_of
from stio.device.tensors import TORCH_DTYPES, cast, require_dtypes, torch_shape
from stio.errors import (
    AmbiguousCheckpointError,
    CheckpointNotFoundError,
    FormatError,
    IndexFormatError,
    StorageError,
    TensorNotFoundError,
    UnsupportedDtypeError,
    printable,
)
from stio.format.index import check_shard_name
from stio.format.olmo_names import decode_name, looks_encoded, shown
from stio.format.safe_pickle import PickleRefused, PlainPickles
from stio.format.shared import ALIASES_KEY, resolve_shared
from stio.loading.open import OpenCheckpoint, OpenOptions, open_checkpoint

__all__ = ["Origin", "open_origin"]

_SAFETENSORS = ".safetensors"
_PICKLES = (".pt", ".pth", ".bin", ".ckpt")
_INDEX = ".index.json"
_MAX_INDEX_BYTES = 100_000_000
_SHOWN = 6


@dataclass(kw_only=True)
class Origin:
    """An open source."""

    tensors: Mapping[str, torch.Tensor | LazyTensor]
    """What to save."""
    files: Sequence[str]
    """Paths of what is read."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """Text that the source holds."""
    ties: Mapping[str, str] = field(default_factory=dict)
    """Names that are another one's tensor, to that one, where memory does not tell."""
    window: Window | None = None
    """What reads lazily."""
    opened: OpenCheckpoint | None = None
    """What it reads from."""

    def expect(self, names: Sequence[str]) -> None:
        """Say in which order tensors will be asked for."""
        if self.window is not None:
            self.window.expect(names)

    def stop(self) -> None:
        """End a read under way. Callable from any thread."""
        if self.window is not None:
            self.window.stop()

    def close(self) -> None:
        """Wait for a read under way, and give descriptors back."""
        if self.window is not None:
            self.window.close()
        if self.opened is not None:
            self.opened.close()
        self.tensors = {}


def open_origin(
    path: str,
    *,
    dtype: torch.dtype | None,
    window_bytes: int,
    key: str | None,
    trust_pickle: bool,
    check: Callable[[], None],
) -> Origin:
    """Open a source; blocks.

    Args:
        path: See `stio.convert`.
        dtype: What floating tensors become.
        window_bytes: How much one read brings.
        key: Where the tensors are in a pickle.
        trust_pickle: Unpickle anything.
        check: Called between files; may raise.

    Raises:
        StioError: See `stio.convert`.
        ValueError: A key is given, and the source is no pickle.
    """
    pickles = _pickle_files(path)
    if pickles is None:
        if key is not None:
            raise ValueError("key= is for files of torch.save; a safetensors checkpoint is flat")
        return _open_safetensors(path, dtype, window_bytes, check)
    tensors: dict[str, torch.Tensor] = {}
    for file in pickles:
        check()
        part = _flat(file, read_pickle(file, trust_pickle=trust_pickle, mapped=True), key)
        if doubled := sorted(part.keys() & tensors.keys()):
            raise IndexFormatError("two files hold one name", path=file, found=doubled[0])
        tensors |= part
    return Origin(**_cast(tensors, dtype, path), files=pickles)


# Which files are meant.


def _pickle_files(path: str) -> list[str] | None:
    """Return the files of `torch.save` that a path means, None where it means safetensors or nothing."""
    if os.path.isdir(path):
        return _pickles_in(path)
    if path.endswith(_SAFETENSORS):
        return None
    if path.endswith(_INDEX):
        return _named_by(path)
    if path.endswith(_PICKLES) or is_pickle(path):
        return [path]
    return None


def _pickles_in(folder: str) -> list[str] | None:
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        raise StorageError(
            f"the directory cannot be listed: {os.strerror(error.errno or errno.EIO)}", path=folder, errno=error.errno
        ) from error
    if any(name.endswith((_SAFETENSORS, _SAFETENSORS + _INDEX)) for name in names):
        return None
    indices = [name for name in names if name.endswith(tuple(ending + _INDEX for ending in _PICKLES))]
    files = [name for name in names if name.endswith(_PICKLES)]
    if len(indices) == 1:
        return _named_by(os.path.join(folder, indices[0]))
    if not indices and len(files) == 1:
        return [os.path.join(folder, files[0])]
    if not indices and not files:
        return None  # what opens safetensors says best what is missing
    raise AmbiguousCheckpointError(
        "several candidates; give the path of the one you mean", path=folder, found=", ".join(indices or files)
    )


def _named_by(path: str) -> list[str] | None:
    """Return the files that an index names, None if they are safetensors."""
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_INDEX_BYTES + 1)
    except FileNotFoundError:
        raise CheckpointNotFoundError("there is no such index", path=path) from None
    except OSError as error:
        raise StorageError(
            f"the index cannot be read: {os.strerror(error.errno or errno.EIO)}", path=path, errno=error.errno
        ) from error
    try:
        index = json.loads(text)
        weight_map = index["weight_map"]
        files = list(dict.fromkeys(weight_map.values()))
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise IndexFormatError("not an index: JSON with a weight_map of names to files", path=path) from None
    if not all(isinstance(name, str) for name in files) or not files:
        raise IndexFormatError("the weight_map must map names to files", path=path)
    if any(name.endswith(_SAFETENSORS) for name in files):
        return None
    for name in files:
        _check_file_name(name, path)
    return [os.path.join(os.path.dirname(path), name) for name in files]


def _check_file_name(name: str, path: str) -> None:
    check_shard_name(name + _SAFETENSORS, path=path)  # the same rules of every system; the ending is another one


# What is in them.


def _flat(path: str, loaded: Any, key: str | None) -> dict[str, torch.Tensor]:
    """Return the tensors by name that a pickle holds.

    Raises:
        AmbiguousCheckpointError: It holds other things too; the message says what.
        TensorNotFoundError: It has no such key.
        FormatError: There is nothing of the kind.
    """
    if key is not None:
        if not isinstance(loaded, Mapping) or key not in loaded:
            keys = ", ".join(map(printable, list(loaded)[:_SHOWN])) if isinstance(loaded, Mapping) else ""
            raise TensorNotFoundError(
                "the file has no such key", path=path, expected=keys or type(loaded).__name__, found=key
            )
        loaded = loaded[key]
    if isinstance(loaded, nn.Module):
        loaded = loaded.state_dict()
    if not isinstance(loaded, Mapping):
        raise FormatError("the file holds no tensors by name", path=path, found=type(loaded).__name__)
    odd = [name for name, value in loaded.items() if not (isinstance(name, str) and isinstance(value, torch.Tensor))]
    if not odd:
        tensors = dict(loaded)
        try:
            sources_of(tensors)
        except UnsupportedDtypeError as error:
            error.path = path
            raise
        except (TypeError, ValueError) as error:  # the file is at fault here, and not the caller
            raise FormatError(str(error), path=path) from error
        return tensors
    inner = [name for name in odd if isinstance(loaded[name], Mapping) and _has_tensors(loaded[name])]
    hint = f"choose one with key= (--key {printable(inner[0])})" if inner else "it cannot be stored as tensors"
    raise AmbiguousCheckpointError(
        f"the file holds more than tensors by name; {hint}",
        path=path,
        found=", ".join(_described(loaded, [*inner, *(name for name in odd if name not in inner)])),
    )


def _has_tensors(value: Mapping[Any, Any]) -> bool:
    return any(isinstance(item, torch.Tensor) for item in value.values())


def _described(loaded: Mapping[Any, Any], names: Sequence[Any]) -> Iterator[str]:
    for name in names[:_SHOWN]:
        value = loaded[name]
        kind = (
            f"{type(value).__name__} of {len(value):,}" if isinstance(value, Mapping | list) else type(value).__name__
        )
        yield f"{printable(name)!r} ({kind})"
    if len(names) > _SHOWN:
        yield f"{len(names) - _SHOWN} others"


def _cast(tensors: dict[str, torch.Tensor], dtype: torch.dtype | None, path: str) -> dict[str, Any]:
    """Return tensors to be cast as lazy ones, and the ties that they no longer show."""
    if dtype is None:
        return {"tensors": tensors}
    _, ties = resolve_shared(sources_of(tensors), "dedupe")
    lazy = {
        name: LazyTensor(dtype, tensor.shape, partial(_rows, name, tensor.detach(), dtype))
        if tensor.is_floating_point() and tensor.dtype != dtype
        else tensor
        for name, tensor in tensors.items()
    }
    return {
        "tensors": lazy,
        "ties": {alias: kept for alias, kept in ties.items() if isinstance(lazy[kept], LazyTensor)},
    }


def _rows(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> Any:
    """Return a tensor, or its rows, cast, about 16 MiB at a time."""
    if not tensor.dim():
        return cast(name, tensor, dtype)
    count = max(1, (16 << 20) * len(tensor) // max(1, tensor.nbytes))
    return (cast(name, tensor[begin : begin + count], dtype) for begin in range(0, len(tensor), count))


def _open_safetensors(path: str, dtype: torch.dtype | None, window_bytes: int, check: Callable[[], None]) -> Origin:
    opened = open_checkpoint(path, OpenOptions(), check=check)
    try:
        names = {**_plain_names(opened), **opened.aliases}
        infos = {name: opened.info(stored) for name, stored in names.items()}
        require_dtypes([info.dtype for info in infos.values()], path=opened.path)
        window = Window(opened, names, dtype=dtype, window_bytes=window_bytes)
        tensors: dict[str, torch.Tensor | LazyTensor] = {}
        for name, info in infos.items():
            own = TORCH_DTYPES[info.dtype]
            shown_dtype = dtype if dtype is not None and own.is_floating_point else own
            shape = torch_shape(info.dtype, info.shape)
            tensors[name] = LazyTensor(shown_dtype, shape, partial(window.take, name))
        return Origin(
            tensors=tensors,
            files=[file.path for file in opened.files],
            metadata={
                key: value
                for key, value in opened.metadata.items()
                if isinstance(value, str) and key not in (ALIASES_KEY, "total_size")
            },
            ties=dict(opened.aliases),
            window=window,
            opened=opened,
        )
    except BaseException:
        opened.close()
        raise


def _plain_names(opened: OpenCheckpoint) -> dict[str, str]:
    """Return the name that each tensor gets, to the one that it has.

    Raises:
        FormatError: It is a file of OLMo's that holds more than tensors, or two paths that join to one name.
    """
    stored = [name for header in opened.headers for name in header.names]
    if not looks_encoded(stored):
        return {name: name for name in stored}
    pickles = PlainPickles()
    names: dict[str, str] = {}
    others = []
    try:
        for name in stored:
            keys, is_pickled = decode_name(name, pickles)
            if is_pickled:
                others.append(shown(keys))
                continue
            joined = ".".join(map(str, keys))
            if joined in names:
                raise FormatError("two key paths give one name", path=opened.path, found=joined)
            names[joined] = name
    except PickleRefused as error:
        raise FormatError(f"a name of OLMo's cannot be read: {error}", path=opened.path, found=name) from error
    if others:
        raise FormatError(
            "a file of OLMo's nested state with values that are no tensors, which plain safetensors cannot hold; "
            "stio.compat.olmo loads it",
            path=opened.path,
            found=", ".join(others[:_SHOWN]) + (f" and {len(others) - _SHOWN} others" if len(others) > _SHOWN else ""),
        )
    return names
