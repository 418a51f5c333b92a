"""OLMo's nested state in safetensors files: OLMo's functions under another import.

    from stio.compat.olmo import safetensors_file_to_state_dict
    from stio.compat.olmo import state_dict_to_safetensors_file

These functions read and write OLMo's own files: names hold pickled key paths, and a value that is not a tensor is a
pickle in a tensor.

Reading runs no code of a file. Pickles of plain values (numbers, text, bytes, tuples, lists, dicts) are read by a
reader that calls nothing (`stio.conversion.safe_pickle`). Others are refused, or unpickled with
`trust_pickle=True`, which warns. `format="stio"` writes nested state without any pickle; the same functions read it.
"""

from __future__ import annotations

import base64
import os
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

import torch

import stio
from stio.conversion import (
    MAX_KEYS,
    MAX_NAME_BYTES,
    KeyPath,
    PickleRefused,
    PlainPickles,
    decode_name,
    looks_encoded,
    read_pickle,
    shown,
)
from stio.device import describe_tensors, resolve_device
from stio.errors import CheckpointNotFoundError, FormatError, listed, printable
from stio.format.files import FILE_SUFFIX
from stio.format.state import STATE_KEY
from stio.runtime import run_blocking
from stio.saving import PendingSave, SaveOptions, SaveResult, plan_files

__all__ = [
    "load_state_dict",
    "pt_file_to_safetensors_file",
    "safetensors_file_to_state_dict",
    "state_dict_to_safetensors_file",
]

PathLike: TypeAlias = str | os.PathLike[str]

MAX_LEAF_BYTES = 64 << 20
"""Longest pickle of a value that is not a tensor."""

_PROTOCOL = 4
_PLAIN_KEYS = (str, int, float, bool, bytes, type(None))


def state_dict_to_safetensors_file(
    state_dict: Mapping[Any, Any], filename: PathLike, *, format: Literal["olmo", "stio"] = "olmo"
) -> SaveResult:
    """Save nested dicts of tensors and other values to one file; atomic, durable.

    In OLMo's format equal paths have equal names. Empty dicts are saved as pickled values, which OLMo's reader
    accepts. Tensors that share memory are saved separately, because that reader has no ties. A warning names what
    `safetensors_file_to_state_dict` will read with `trust_pickle=True` only, such as numpy's numbers, complex numbers,
    dtypes, and tensors inside lists.

    Args:
        state_dict: Dicts in dicts. Keys are text, numbers other than NaN, bytes or None; values are tensors, or
            anything that can be pickled.
        filename: Ends in `.safetensors`.
        format: "olmo", which OLMo reads; or "stio", without any pickle, which this module and `stio.load_state` read.
            `stio.save_state` lists the types that "stio" saves; types, order and ties are restored.

    Raises:
        TypeError: Not a dict, a key of another type, or a tensor without memory of its own.
        ValueError: A tensor that cannot be saved as it is, a key that is NaN, the name of the file, no such format, or
            a value too long.
        StioError: See `stio.save`; the old file stays.
    """
    return _save(state_dict, os.fspath(filename), format)


def _save(state_dict: Mapping[Any, Any], path: str, format: str) -> SaveResult:
    if not path.endswith(FILE_SUFFIX):
        raise ValueError(f"the name of the file must end in {FILE_SUFFIX}, not {printable(path)!r}")
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be a dict, not {type(state_dict).__name__}")
    if format == "stio":
        return run_blocking(stio.save_state(state_dict, path))
    if format != "olmo":
        raise ValueError(f"format= takes 'olmo' or 'stio', not {printable(format)!r}")
    tensors: dict[str, torch.Tensor] = {}
    pickles, refused = PlainPickles(), dict[str, str]()
    for keys, leaf in _leaves(state_dict):
        is_tensor = isinstance(leaf, torch.Tensor)
        if is_tensor:
            describe_tensors({shown(keys): leaf})  # refuses with a readable name
        name, data = encode_name(keys, is_pickled=not is_tensor), None if is_tensor else _pickled(keys, leaf)
        try:  # as the reader without `trust_pickle` will, with its limits on a whole file
            decode_name(name, pickles)
            if data is not None:
                pickles.loads(data)
        except PickleRefused as error:
            refused[shown(keys)] = str(error)
        tensors[name] = leaf if data is None else torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if refused:
        warnings.warn(
            f"{printable(path)}: only trust_pickle=True will read {listed(refused)}: {next(iter(refused.values()))}; "
            'save numbers as int or float, tensors as values of dicts, or use format="stio"',
            RuntimeWarning,
            stacklevel=3,  # the caller of a function of this module
        )
    return run_blocking(PendingSave(tensors, path, SaveOptions(), planner=plan_files).complete())


def _leaves(state: Mapping[Any, Any]) -> Iterator[tuple[KeyPath, Any]]:
    """Yield each value that is not a dict, and each empty dict, with its keys.

    Raises:
        ValueError: A dict contains itself, or they are nested too deeply.
    """
    ahead: list[tuple[KeyPath, Any, frozenset[int]]] = [((), state, frozenset())]
    while ahead:
        path, node, above = ahead.pop()
        if isinstance(node, Mapping) and (node or not path):
            if id(node) in above:
                raise ValueError(f"{shown(path)} is a dict that contains itself")
            if len(path) >= MAX_KEYS:
                raise ValueError(f"dicts are nested more than {MAX_KEYS} deep")
            inside = above | {id(node)}
            ahead += [((*path, key), child, inside) for key, child in reversed(list(node.items()))]
        else:
            yield path, node


def _pickled(path: KeyPath, leaf: object) -> bytes:
    try:
        data = pickle.dumps(dict(leaf) if isinstance(leaf, Mapping) else leaf, protocol=_PROTOCOL)
    except MemoryError:
        raise
    except Exception as error:  # the methods of a value that is not plain may raise anything
        raise TypeError(f"{shown(path)} cannot be pickled: {printable(str(error))}") from error
    if len(data) > MAX_LEAF_BYTES:
        raise ValueError(
            f"{shown(path)} is {len(data):,} bytes as a pickle; a value may have "
            f"{MAX_LEAF_BYTES:,}; save it as a tensor"
        )
    return data


def encode_name(path: KeyPath, *, is_pickled: bool) -> str:
    """Return the name of a tensor.

    Args:
        path: Its keys.
        is_pickled: Whether the tensor is the pickle of something else.

    Raises:
        TypeError: A key that cannot be read without running code.
        ValueError: A key that is NaN, or the name would be longer than a reader accepts.
    """
    if len(path) > MAX_KEYS:
        raise ValueError(f"dicts are nested more than {MAX_KEYS} deep")
    for key in path:
        if type(key) not in _PLAIN_KEYS:
            raise TypeError(f"{shown(path)}: a key is text, a number, bytes or None, not a {type(key).__name__}")
        if key != key:
            raise ValueError(f"{shown(path)}: a key is NaN, which equals no key; two of them would get one name")
    # A pickle refers back to a text that is the same object, so equal paths would get different names.
    texts: dict[str | bytes, str | bytes] = {}
    keys = tuple([texts.setdefault(key, key) if type(key) in (str, bytes) else key for key in path])
    data = pickle.dumps((keys, is_pickled), protocol=_PROTOCOL)
    if len(data) > MAX_NAME_BYTES:
        raise ValueError(f"the keys of {shown(path)} are longer than {MAX_NAME_BYTES:,} bytes")
    return base64.urlsafe_b64encode(data).decode("ascii")


def safetensors_file_to_state_dict(
    filename: PathLike, map_location: str | int | torch.device | None = None, *, trust_pickle: bool = False
) -> Any:
    """Load nested state from a file in OLMo's or in stio's format. Nothing in it is run.

    A file in OLMo's format has neither the order of keys nor which dicts were OrderedDicts.

    Args:
        filename: The file.
        map_location: Device of the tensors; the CPU by default.
        trust_pickle: Unpickle values that are not plain, such as numpy's random state. **That can run any code in the
            file**, so a warning with the first such key precedes it.

    Raises:
        CheckpointNotFoundError: There is no such file.
        FormatError: The file is malformed, has another format, or a value that only `trust_pickle=True` reads.
        StioError: See `stio.load`.
    """
    return _load(os.fspath(filename), map_location, trust_pickle)


def _load(path: str, map_location: str | int | torch.device | None, trust_pickle: bool) -> Any:
    if map_location is not None and not isinstance(map_location, str | int | torch.device):
        raise TypeError(f"map_location is a device here, not a {type(map_location).__name__}")
    is_own, loaded = run_blocking(_read(path, "cpu" if map_location is None else map_location))
    if is_own:
        return loaded
    if loaded and not looks_encoded(loaded):
        raise FormatError(
            "the file holds neither OLMo's nor stio's nested state; load its tensors by stio.load",
            path=path,
            found=f"the tensor {printable(next(name for name in loaded if not looks_encoded([name])))!r}",
        )
    return _Reader(path, trust_pickle).state(loaded)


async def _read(path: str, device: str | int | torch.device) -> tuple[bool, Any]:
    """Load stio's nested state, or tensors with OLMo's names; return before it whether it was stio's."""
    async with stio.open(path, device=device, memory="copy") as checkpoint:
        if STATE_KEY not in checkpoint.metadata:
            return False, await checkpoint.load()
    return True, await stio.load_state(path, device=device)


def nest(leaves: Iterable[tuple[KeyPath, Any]]) -> dict[Any, Any]:
    """Return nested dicts with the leaves at their paths.

    No dict has whole paths as keys: a crafted file could choose tuples with equal hashes.

    Raises:
        PickleRefused: A path leads through a leaf.
    """
    result: dict[Any, Any] = {}
    new_dicts = {id(result)}  # a leaf may be a dict too, and no other leaf is put into it
    for path, leaf in leaves:
        target = result
        for key in path[:-1]:
            if key not in target:
                fresh: dict[Any, Any] = {}
                new_dicts.add(id(fresh))
                target[key] = fresh
            target = target[key]
            if id(target) not in new_dicts:
                raise PickleRefused(f"{shown(path)} leads through a value that is not a dict")
        if path[-1] in target:
            raise PickleRefused(f"{shown(path)} is there twice, or has others below it")
        target[path[-1]] = leaf
    return result


class _Reader:
    """Turns the tensors of one file into nested state.

    Args:
        path: File to name in errors.
        trust_pickle: Whether to unpickle values that are not plain.
    """

    def __init__(self, path: str, trust_pickle: bool) -> None:
        self._path = path
        self._trust_pickle = trust_pickle
        self._warned = False
        self._pickles = PlainPickles()

    def state(self, tensors: dict[str, torch.Tensor]) -> dict[Any, Any]:
        try:
            return nest(self._leaf(*item) for item in tensors.items())
        except PickleRefused as error:
            raise FormatError(str(error), path=self._path) from error

    def _leaf(self, name: str, tensor: torch.Tensor) -> tuple[KeyPath, Any]:
        path, is_pickled = self._plain_or_trusted(
            f"the name {printable(name)!r}",
            lambda: decode_name(name, self._pickles),
            lambda: decode_name(name, None),
        )
        if not is_pickled:
            return path, tensor
        if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() > MAX_LEAF_BYTES:
            raise FormatError(
                f"{shown(path)}: a pickled value is a row of bytes",
                path=self._path,
                expected=f"U8, one dimension, at most {MAX_LEAF_BYTES:,} bytes",
                found=f"{tensor.dtype} {list(tensor.shape)}",
            )
        data = tensor.cpu().numpy().tobytes()
        return path, self._plain_or_trusted(shown(path), lambda: self._pickles.loads(data), lambda: pickle.loads(data))

    def _plain_or_trusted(self, what: str, plain: Callable[[], Any], trusted: Callable[[], Any]) -> Any:
        try:
            return plain()
        except PickleRefused as error:
            if not self._trust_pickle:
                raise FormatError(
                    f"{what} is not a pickle of plain values: {error}; trust_pickle=True reads it, and runs what is "
                    "in it",
                    path=self._path,
                ) from error
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"{printable(self._path)}: unpickling {what}, which can run any code, because of trust_pickle=True",
                RuntimeWarning,
                stacklevel=8,  # the caller of a function of this module
            )
        try:
            return trusted()
        except Exception as error:  # unpickled code may raise anything
            raise FormatError(f"{what} cannot be unpickled: {printable(repr(error))}", path=self._path) from error


def load_state_dict(
    checkpoint_dir: PathLike,
    fname: str,
    *,
    local_cache: PathLike | None = None,
    map_location: str | int | torch.device | None = None,
    trust_pickle: bool = False,
) -> Any:
    """Load a file of a checkpoint; for `foo.pt` its `foo.safetensors` if that exists.

    A `foo.safetensors` that exists and cannot be read is an error: the older file does not replace it.

    Args:
        checkpoint_dir: A local directory.
        fname: A name in it, ending in `.pt` or `.safetensors`.
        local_cache: A directory that is searched first.
        map_location: Device of the tensors; the CPU by default, also for `.pt` files.
        trust_pickle: See `safetensors_file_to_state_dict`; without it a `.pt` file is read with `weights_only=True`.

    Raises:
        CheckpointNotFoundError: Neither file exists.
        DeviceError: There is no such device.
        FormatError: See `safetensors_file_to_state_dict`.
        ValueError: `fname` has another ending.
    """
    if not fname.endswith((".pt", FILE_SUFFIX)):
        raise ValueError(f"fname ends in .pt or {FILE_SUFFIX}, not {printable(fname)!r}")
    folders = [os.fspath(folder) for folder in (local_cache, checkpoint_dir) if folder is not None]
    names = [fname.removesuffix(".pt") + FILE_SUFFIX, fname] if fname.endswith(".pt") else [fname]
    for path in (os.path.join(folder, name) for name in names for folder in folders):
        if not os.path.lexists(path):
            continue
        if path.endswith(FILE_SUFFIX):
            return _load(path, map_location, trust_pickle)
        if isinstance(map_location, int):  # torch.load takes no index
            map_location = resolve_device(map_location)
        where = "cpu" if map_location is None else map_location
        return read_pickle(path, map_location=where, trust_pickle=trust_pickle)
    raise CheckpointNotFoundError(
        "there is no such file", path=os.path.join(folders[-1], fname), expected=" or ".join(names)
    )


def pt_file_to_safetensors_file(
    filename: PathLike,
    destination: PathLike | None = None,
    *,
    format: Literal["olmo", "stio"] = "olmo",
    trust_pickle: bool = False,
) -> SaveResult:
    """Convert a file with nested state that `torch.save` wrote.

    Args:
        filename: The file, usually `.pt`.
        destination: The new file; by default in the same directory with the ending `.safetensors`, where
            `load_state_dict` finds it.
        format: See `state_dict_to_safetensors_file`.
        trust_pickle: Unpickle anything (`torch.load(weights_only=False)`), which can run any code in the file.

    Raises:
        FormatError: The file is malformed, has no dict, or a value that only `trust_pickle=True` reads.
        StioError: See `state_dict_to_safetensors_file`.
    """
    path = os.fspath(filename)
    state = read_pickle(path, trust_pickle=trust_pickle, mapped=True)
    if not isinstance(state, Mapping):
        raise FormatError("the file holds no dict", path=path, found=type(state).__name__)
    return _save(state, os.fspath(destination or os.path.splitext(path)[0] + FILE_SUFFIX), format)
