"""Nested state in a checkpoint (`format/state/tree.py`): reads its tree, and loads into a state that exists already.

The whole tree is checked before any tensor is read. `stio.load_state` puts new tensors into it. A `StateTarget` is a
state (dictionaries, lists and tuples of tensors and plain values) that is compared with the tree. Its tensors are
filled in place, when their group is loaded. Its plain values are replaced at the end, all together. A checkpoint
without nested state counts as a mapping of its tensors.
"""

from __future__ import annotations

import base64
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch

from stio import process
from stio.errors import FormatError, MismatchError, listed, printable
from stio.format import LIBRARY_NAMES, TensorInfo
from stio.format.state import (
    POINTER,
    STATE_KEY,
    TREE_TENSOR,
    Reference,
    Tree,
    check_tree_bytes,
    parse_tree,
    python_path,
)
from stio.limits import Limits
from stio.loading.casts import require_together
from stio.loading.options import LoadOptions
from stio.loading.targets.base import Casting, LoadReport, LoadTarget, PartOf, Stored
from stio.runtime.memory import Region
from stio.storage.checkpoint import OpenCheckpoint, read_tensor

_PLAIN_VALUES = (
    *(type(None), bool, int, float, str, bytes, torch.Size, torch.dtype, torch.device),
    *(np.ndarray, np.generic),
)

_Keys: TypeAlias = list[object]
"""Keys and indexes that lead to a value of the state."""


@dataclass(frozen=True, slots=True)
class NestedState:
    """A state without its tensors."""

    tree: Tree
    """Containers, plain values, and references to tensors."""
    holds_bytes: frozenset[str]
    """Names of tensors that hold bytes of the state, the tree itself among them."""
    host_values: Mapping[str, object]
    """Bytes and arrays of numpy that are values of the state, by the name of their tensor."""


def read_nested(opened: OpenCheckpoint, limits: Limits, *, check: Callable[[], None] = lambda: None) -> NestedState:
    """Read and check the tree of a checkpoint.

    Args:
        opened: The checkpoint.
        limits: Bounds on the tree.
        check: Called now and then; may raise to end the call.

    Raises:
        FormatError: The checkpoint has no nested state, or a malformed one.
        LimitError: The tree exceeds a limit.
    """
    raw, holds_bytes = _tree_text(opened, limits)
    with process.collection_paused(len(raw)):
        tree = parse_tree(raw, path=opened.path, limits=limits, foreign=torch_value, check=check)
    kinds = {reference.name: reference.kind for reference in tree.references if reference.in_host_memory}
    holds_bytes |= kinds.keys()
    _require_match(opened, tree, holds_bytes)
    check()
    values = {
        name: _read_bytes(opened, name) if kind == "bytes_tensor" else _read_array(opened, name)
        for name, kind in kinds.items()
    }
    return NestedState(tree, frozenset(holds_bytes), values)


def _tree_text(opened: OpenCheckpoint, limits: Limits) -> tuple[bytes, set[str]]:
    """Return the text of the tree, and the name of the tensor that holds it, if one does."""
    text = opened.metadata.get(STATE_KEY)
    if text is None:
        message = "the checkpoint has no nested state: `stio.load` loads its tensors, `stio.save_state` saves a state"
        raise FormatError(message, path=opened.path, expected=f"{STATE_KEY!r} in the metadata")
    if not isinstance(text, str):
        raise FormatError(f"{STATE_KEY} is not text", path=opened.path, found=type(text).__name__)
    if text != POINTER:
        return text.encode(), set()
    if not any(TREE_TENSOR in header for header in opened.headers):
        raise FormatError("the tensor with the tree of the state is missing", path=opened.path, expected=TREE_TENSOR)
    check_tree_bytes(opened.info(TREE_TENSOR).nbytes, limits, path=opened.path)
    return _read_bytes(opened, TREE_TENSOR), {TREE_TENSOR}


def _read_bytes(opened: OpenCheckpoint, name: str) -> bytes:
    """Read the data of a U8 tensor."""
    info = opened.info(name)
    if info.dtype != "U8" or len(info.shape) != 1:
        message, found = f"tensor {printable(name)!r} should hold bytes", f"{info.dtype} {list(info.shape)}"
        raise FormatError(message, path=opened.path, expected="U8 of one dimension", found=found)
    return _read(opened, info).tobytes() if info.nbytes else b""


def _read_array(opened: OpenCheckpoint, name: str) -> np.ndarray[Any, Any]:
    """Read a tensor as an array of numpy."""
    info = opened.info(name)
    dtype = LIBRARY_NAMES.get(info.dtype)
    if dtype is None or dtype not in np.sctypeDict:
        raise FormatError(
            f"tensor {printable(name)!r} should hold an array of numpy", path=opened.path, found=info.dtype
        )
    array = np.empty(info.shape, dtype)
    if info.nbytes:
        region = _read(opened, info)  # its memory ends with it
        array.reshape(-1).view(np.uint8)[:] = np.frombuffer(region.view(), np.uint8)
    return array


def _read(opened: OpenCheckpoint, info: TensorInfo) -> Region:
    """Read the data of a tensor into host memory."""
    region = read_tensor(opened, info)
    shards = {next(k for k, header in enumerate(opened.headers) if info.name in header)}
    for patch in opened.patches.get(info.name, ()):
        shards |= {patch.codes.shard, patch.values.shard}
    with ExitStack() as owned:
        files = opened.open_files(shards, owned)
        for shard in shards:
            files[shard].check_unchanged()
    return region


def _require_match(opened: OpenCheckpoint, tree: Tree, holds_bytes: set[str]) -> None:
    """Require that the tree and the checkpoint name the same tensors."""
    in_tree = {reference.name for reference in tree.references} | (holds_bytes & {TREE_TENSOR})
    stored = {name for header in opened.headers for name in header.names} | opened.aliases.keys()
    as_tensors = {reference.name for reference in tree.references if not reference.in_host_memory}
    for names, message in (
        (in_tree - stored, "the state refers to a tensor that does not exist"),
        (holds_bytes & as_tensors, "the state refers to a tensor that holds bytes of the state"),
        (stored - in_tree, "a tensor has no place in the state; stio.load loads all tensors by name"),
    ):
        if names:
            raise FormatError(message, path=opened.path, found=min(names))


_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}


def torch_value(tag: str, value: Any) -> object:
    """Return a value of a type of torch or numpy; see `parse_tree`."""
    if tag in ("ndarray", "numpy_scalar"):
        return _numpy_value(tag, value)
    if tag == "size":
        return torch.Size(map(operator.index, value))
    if tag == "dtype":
        if value not in _DTYPES:
            raise ValueError("this torch has no such dtype")
        return _DTYPES[value]
    try:
        return torch.device(value)
    except RuntimeError:
        raise ValueError("this torch has no such device") from None


_NUMPY = re.compile(
    r"([<>|]?[biufcSUMm][0-9]{1,10}(?:\[[0-9]{0,9}[a-zA-Z]{1,7}\])?);([0-9]*(?:,[0-9]+)*);([A-Za-z0-9+/=]*)"
)


def _numpy_value(tag: str, text: str) -> object:
    """Return an array or a scalar of numpy, made of its dtype, its shape and its bytes."""
    found = _NUMPY.fullmatch(text)
    if found is None:
        raise ValueError("it is no array of numpy")
    try:
        dtype, shape = np.dtype(found[1]), tuple(map(int, filter(None, found[2].split(","))))
        data = base64.b64decode(found[3], validate=True)
        # numpy allocates elements of no bytes too.
        if len(data) != dtype.itemsize * prod(shape) or (not dtype.itemsize and prod(shape) > 1):
            raise ValueError("the bytes do not fit its dtype and shape")
        if tag == "numpy_scalar":
            return _numpy_scalar(dtype, shape, data)
        return np.ndarray(shape, dtype, data).copy()  # an array that owns its memory
    except (TypeError, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from None


def _numpy_scalar(dtype: np.dtype[Any], shape: tuple[int, ...], data: bytes) -> object:
    if shape:
        raise ValueError("a scalar has no shape")
    if dtype.kind == "S":  # an element of an array would lose zeros at its end
        return np.bytes_(data)
    if dtype.kind == "U":
        return np.str_(data.decode("utf-32-be" if dtype.str[0] == ">" else "utf-32-le", "surrogatepass"))
    return np.frombuffer(data, dtype)[0]


class StateTarget(LoadTarget):
    """A nested state as the target of a load.

    Args:
        state: Containers with tensors and plain values. It must not change during the load.
        part_of: Returns the part of a tensor that this process holds; see `stio.loading.targets.base.LocalPart`.
        casting: Which dtypes of a nested state in the checkpoint may be copied into which. Tensors by name may be cast.
    """

    def __init__(self, state: object, *, part_of: PartOf | None = None, casting: Casting = "safe") -> None:
        super().__init__()
        self._of_state = casting
        self._state = state
        self._part_of = part_of
        self._replaced: list[tuple[Any, Any, object]] = []  # container, key or index, new value
        self._missing: list[str] = []
        self._unexpected: list[str] = []
        self._is_nested, self._hint = True, ""
        self._stored: Mapping[str, Stored] = {}
        self._aliases: Mapping[str, str] = {}
        self._host_values: Mapping[str, object] = {}

    def select(self, opened: OpenCheckpoint, options: LoadOptions, check: Callable[[], None]) -> list[str]:
        """See `LoadTarget.select`.

        Raises:
            MismatchError: They differ, or a tensor of the state cannot be filled; the message has its path.
            FormatError: The nested state in the checkpoint is malformed.
        """
        self._begin(opened.path)
        self._stored, self._aliases = opened.dtypes_and_shapes(), opened.aliases
        self._is_nested = STATE_KEY in opened.metadata
        self._casting = self._of_state if self._is_nested else "same_kind"
        self._hint = "" if self._is_nested else "; the checkpoint has tensors by name, and no nested state"
        if self._merge(self._state, self._stored_state(opened, options, check), []) is not self._state:
            message = (
                "the checkpoint has other values, and this state cannot be changed: put it into a list or a dictionary"
            )
            raise MismatchError(message, path=opened.path)
        if options.strict and (self._missing or self._unexpected):
            raise MismatchError(
                "the checkpoint does not fit the state; strict=False loads what both have: "
                f"missing {listed(self._missing)}; unexpected {listed(self._unexpected)}{self._hint}",
                path=opened.path,
            )
        targets = {source: places[0].memory for source, places in self._places.items()}
        if not self._is_nested and isinstance(self._state, Mapping):
            others = {name: one for name, one in self._state.items() if isinstance(one, torch.Tensor)}
            targets = {**others, **targets}
        kinds = {name: dtype for name, (dtype, _) in self._stored.items()}
        require_together(kinds, targets, {source: source for source in self._places}, assigns=False, path=opened.path)
        self._join_parts()
        return list(self._places)

    def _stored_state(self, opened: OpenCheckpoint, options: LoadOptions, check: Callable[[], None]) -> Any:
        """Return the state in the checkpoint, with references in place of its tensors."""
        if not self._is_nested:
            return {name: Reference("tensor", name) for name in (*self._stored, *self._aliases)}
        nested = read_nested(opened, options.limits or Limits(), check=check)
        self._host_values = nested.host_values
        return nested.tree.fill(lambda reference: reference)

    def _merge(self, mine: Any, stored: Any, keys: _Keys) -> Any:
        """Compare a value of the state with the stored one; return what takes its place."""
        if type(stored) is Reference and stored.in_host_memory:
            stored = self._host_values[stored.name]
        if isinstance(mine, torch.Tensor) or type(stored) is Reference:
            if not isinstance(mine, torch.Tensor) or type(stored) is not Reference:
                self._fail(keys, mine, stored)
            path, source = self._shown(keys), self._aliases.get(stored.name, stored.name)
            part = None if self._part_of is None else self._part_of(path, mine)
            self._add(path, mine, part, source, self._stored[source])
            return mine
        if isinstance(mine, _PLAIN_VALUES):
            if not isinstance(stored, _PLAIN_VALUES):
                self._fail(keys, mine, stored)
            return mine if _is_same(mine, stored) else stored
        if isinstance(mine, Mapping) and isinstance(stored, Mapping):
            self._merge_mapping(mine, stored, keys)
            return mine
        if isinstance(mine, list | tuple) and isinstance(stored, list | tuple) and len(mine) == len(stored):
            return self._merge_sequence(mine, stored, keys)
        return self._fail(keys, mine, stored)

    def _merge_mapping(self, mine: Mapping[Any, Any], stored: Mapping[Any, Any], keys: _Keys) -> None:
        for key, value in mine.items():
            if key not in stored:
                self._missing.append(self._shown([*keys, key]))
                continue
            new = self._merge(value, stored[key], [*keys, key])
            if new is value:
                continue
            if not hasattr(type(mine), "__setitem__"):
                where, kind = self._shown([*keys, key]), printable(type(mine).__name__)
                message = f"{where} has another value in the checkpoint, and a {kind} cannot be changed"
                raise MismatchError(message, path=self._path)
            self._replaced.append((mine, key, new))
        self._unexpected += [self._shown([*keys, key]) for key in stored if key not in mine]

    def _merge_sequence(self, mine: list[Any] | tuple[Any, ...], stored: Iterable[Any], keys: _Keys) -> Any:
        new = [self._merge(value, other, [*keys, k]) for k, (value, other) in enumerate(zip(mine, stored, strict=True))]
        if all(one is other for one, other in zip(mine, new, strict=True)):
            return mine
        if isinstance(mine, list):
            self._replaced += [(mine, k, one) for k, one in enumerate(new)]
            return mine
        return type(mine)(*new) if hasattr(mine, "_fields") else tuple(new)

    def _shown(self, keys: _Keys) -> str:
        return python_path(keys) if self._is_nested or len(keys) != 1 else printable(str(keys[0]))

    def _fail(self, keys: _Keys, mine: object, stored: object) -> NoReturn:
        message = f"{self._shown(keys)} is of another kind in the checkpoint{self._hint}"
        raise MismatchError(message, path=self._path, expected=_kind(mine), found=_kind(stored))

    def complete(self) -> LoadReport:
        """Replace the plain values."""
        for container, key, value in self._replaced:
            container[key] = value
        self.discard()
        return LoadReport(tuple(self._missing), tuple(self._unexpected), path=self._path)

    def discard(self) -> None:
        """See `LoadTarget.discard`."""
        super().discard()
        self._replaced.clear()


def _is_same(mine: object, stored: object) -> bool:
    """Return whether a plain value is the stored one; 0.0 and -0.0 are two."""
    if isinstance(mine, np.ndarray | np.generic):
        return False  # replaced in any case
    return type(mine) is type(stored) and mine == stored and (not isinstance(mine, float) or repr(mine) == repr(stored))


def _kind(value: object) -> str:
    if isinstance(value, torch.Tensor | Reference):
        return "a tensor"
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return f"a sequence of {len(value):,}"
    return "a mapping" if isinstance(value, Mapping) else f"a value of the type {type(value).__name__}"
