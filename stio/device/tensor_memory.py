"""Where in its storage a tensor is, and whether its data is there: checked before it is read or written.

A storage may be freed or made shorter while tensors refer to it: FSDP and the sleep modes of inference servers call
`untyped_storage().resize_`. torch does not check that when it copies, so memory of others would be read or changed, or
the process would end. A tensor over a mapping may be read-only: a write would end the process too. Each tensor is
checked when its load or save begins, and again just before the copy, since another thread may have changed it.

A tensor may stand for data that is elsewhere. A library that shards or offloads a module leaves a tensor in its place:
with fewer elements, and with attributes that say so. `state_dict()` returns other tensor objects, without these
attributes, over the same memory. So a tensor is compared with the parameters that it may come from.
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from stio.device.tensors import PLAIN
from stio.device.torch_private import without_torch_function
from stio.errors import MismatchError, printable
from stio.format.sharding import TensorSource
from stio.runtime.memory import WritableMemory

ON_META = (
    "is on meta: it has no data to save. Load the module first; of one that accelerate offloads, save `module."
    "state_dict() | accelerate.utils.modeling.get_state_dict_offloaded_model(module)`; of one in a warm start, await "
    "`done()` first"
)
"""What an error says about a tensor on meta, after its name."""

GATHER_FSDP = (
    "save what `state_dict()` returns of the module that FullyShardedDataParallel made, with "
    "StateDictType.FULL_STATE_DICT"
)
"""What to do about a tensor of FSDP1."""

_ZERO = (
    "is sharded by DeepSpeed ZeRO-3, and has no data here; gather it first: save the module inside `with "
    "deepspeed.zero.GatheredParameters(list(module.parameters())):`"
)
_FLAT = f"is a part of a flat parameter of FSDP; gather it first: {GATHER_FSDP}"
_QUANTIZED = (
    "holds quantized values, whose scales are not in the mapping; save `state_dict()` of the module, which has both"
)

_FLAT_NAME = re.compile(r"(?:.*\.)?_flat_param\Z", re.DOTALL)
"""Name of a flat parameter in a module that FSDP1 has wrapped."""


def require_own_data(tensors: Mapping[str, object], parameters: Iterable[object]) -> None:
    """Require that no tensor stands for data that is elsewhere. Reads attributes only.

    Args:
        tensors: By name.
        parameters: Parameters over whose memory the tensors may be: those of their module, or the tensors themselves.

    Raises:
        ValueError: One does; the message names it, and what to call first.
    """
    found = dict(_placeholders(parameters))
    for name, tensor in tensors.items() if found else ():
        if isinstance(tensor, torch.Tensor) and (advice := found.get(_place(tensor))) is not None:
            raise ValueError(f"tensor {printable(name)!r} {advice}")


def require_no_placeholders(sources: Sequence[TensorSource]) -> None:
    """Require that no tensor is a parameter that FSDP has flattened, and none without elements is one of this process.

    `state_dict()` loses the attributes. To list all objects takes the collector tens of milliseconds, so this is done
    only where there is a tensor without elements in one dimension, which is rare.

    Raises:
        ValueError: One does; the message names it, and what to call first.
    """
    for name in filter(_FLAT_NAME.match, [source.name for source in sources]):
        _require_no_flat_name(name)
    _require_no_partitions({source.name: source.data for source in sources if source.shape == (0,)})


def require_values(tensors: Mapping[str, object]) -> None:
    """Require that no tensor stands for data that is elsewhere, in any of the ways above.

    For tensors that a library writes, or leaves out, before a save of stio describes them.

    Args:
        tensors: By name; values that are no tensors are ignored.

    Raises:
        ValueError: A tensor stands for data that is elsewhere; the message names it, and what to do first.
    """
    require_own_data(tensors, tensors.values())
    require_scales(tensors)
    empty = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            _require_no_flat_name(name)
            if not tensor.is_nested and tuple(tensor.shape) == (0,):
                empty[name] = tensor
    _require_no_partitions(empty)


def _require_no_flat_name(name: str) -> None:
    if _FLAT_NAME.match(name):
        raise ValueError(f"tensor {printable(name)!r} {_FLAT}")


def _require_no_partitions(empty: Mapping[str, object]) -> None:
    if empty:
        require_own_data(empty, (item for item in gc.get_objects() if issubclass(type(item), torch.nn.Parameter)))


def require_scales(tensors: Mapping[str, object]) -> None:
    """Require that quantized values of bitsandbytes are saved together with their scales.

    Raises:
        ValueError: They are not.
    """
    for name, tensor in tensors.items():
        if type(tensor) is torch.Tensor or not isinstance(tensor, torch.Tensor):
            continue
        if getattr(tensor, "quant_state", None) is not None:
            scales = f"{name}.absmax"
        elif getattr(tensor, "SCB", None) is not None:
            scales = f"{name.removesuffix('weight')}SCB"
        else:
            continue
        if scales not in tensors:
            raise ValueError(f"tensor {printable(name)!r} {_QUANTIZED}")


def _placeholders(parameters: Iterable[object]) -> Iterator[tuple[Hashable, str]]:
    """Yield the place of each parameter that stands for other data, and what to do about it."""
    flattened: defaultdict[int, list[torch.Tensor]] = defaultdict(list)  # by storage: all parts of one flat parameter
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            continue
        if _is_partitioned(parameter):
            yield _place(parameter), _ZERO
        elif type(parameter) is torch.Tensor:
            continue
        elif getattr(parameter, "_is_flat_param", False):
            yield _place(parameter), _FLAT
        elif getattr(parameter, "_fsdp_flattened", False):
            flattened[parameter.untyped_storage()._cdata].append(parameter)
    for parts in flattened.values():
        if all(part.dim() <= 1 for part in parts):  # gathered, they have the shapes of the module
            yield from ((_place(part), _FLAT) for part in parts)


def _is_partitioned(tensor: torch.Tensor) -> bool:
    """Return whether DeepSpeed ZeRO-3 has moved the values of a parameter away."""
    whole = getattr(tensor, "ds_shape", None)
    if whole is not None:
        return tuple(whole) != tuple(tensor.shape)
    if type(tensor) is torch.Tensor or not any(hasattr(tensor, name) for name in ("ds_status", "ds_id", "ds_tensor")):
        return False
    return not tensor.numel()


def _place(tensor: torch.Tensor) -> Hashable:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tuple(tensor.shape)


Extent: TypeAlias = tuple[int, int, int, int]
"""The first byte of a tensor in its storage, the byte after its last one, the storage's address, and its size."""


class ShortStorageError(Exception):
    """The storage of a tensor does not have all of its bytes; callers raise an error of their own for it."""

    def __init__(self, needed_bytes: int, held_bytes: int) -> None:
        super().__init__("its memory was freed or shrunk (sharded training and the sleep modes of servers do that)")
        self.needed_bytes = needed_bytes
        """Size that the storage must have."""
        self.held_bytes = held_bytes
        """Size that it has."""


def extent_of(tensor: torch.Tensor, storage: torch.UntypedStorage | None = None) -> Extent:
    """Return where a dense tensor is in its storage, or would be in another one.

    Raises:
        ShortStorageError: The storage does not have all of its bytes.
        RuntimeError: It has no storage (inside a function transform of torch).
    """
    nbytes, item = tensor.nbytes, tensor.itemsize
    begin = int(tensor.storage_offset()) * item
    end = begin + nbytes
    if not tensor.is_contiguous():
        end = begin + item
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            end += (size - 1) * stride * item
    storage = storage or tensor.untyped_storage()
    address, held = storage.data_ptr(), storage.nbytes()
    if nbytes and (end > held or not address):
        raise ShortStorageError(end, held if address else 0)
    return begin, end, address, held


def has_overlap(tensor: torch.Tensor) -> bool:
    """Return whether elements of a dense tensor share memory, so that a copy into it has no defined result."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def has_memory(tensor: torch.Tensor) -> bool:
    """Return whether the storage of a dense tensor has all of its bytes now."""
    try:
        extent_of(tensor)
    except ShortStorageError:
        return False
    return True


def dense_parts(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with memory of their own that a tensor consists of: itself, or those that it wraps.

    There are none in one that is lazy, on `meta`, sparse, nested, or handles its data in another way.
    """
    if type(tensor) not in PLAIN:
        if is_lazy(tensor):
            return
        if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            wrapper: Any = tensor
            if is_traceable_wrapper_subclass(wrapper):
                for inner in wrapper.__tensor_flatten__()[0]:
                    yield from dense_parts(getattr(wrapper, inner))
            return
        with without_torch_function():
            tensor = tensor.as_subclass(torch.Tensor)
    if not tensor.is_meta and tensor.layout is torch.strided and not tensor.is_nested:
        yield tensor


def require_data(name: str, tensor: torch.Tensor) -> Extent:
    """Return where a tensor is that a save will read.

    Args:
        name: The tensor, for the error; empty: not known.
        tensor: A dense tensor with a storage.

    Raises:
        ValueError: Its storage does not have all of its bytes.
    """
    try:
        return extent_of(tensor)
    except ShortStorageError as error:
        raise _no_data(name, error) from None


def require_held(storage: torch.UntypedStorage, address: int, end: int) -> None:
    """Raise `ValueError` unless a storage still has its memory at an address, with so many bytes."""
    if storage.data_ptr() != address or storage.nbytes() < end:
        raise _no_data("", ShortStorageError(end, storage.nbytes()))


def _no_data(name: str, error: ShortStorageError) -> ValueError:
    what = f"tensor {printable(name)!r}" if name else "a tensor"
    return ValueError(
        f"{what} has no data: {error}; save the model while it is awake or gathered (of FSDP1: {GATHER_FSDP}); "
        f"expected {error.needed_bytes:,} bytes, found {error.held_bytes:,} bytes"
    )


def require_data_of(tensors: Mapping[str, object]) -> None:
    """Raise `ValueError` for the first tensor whose storage does not have all of its bytes; see `dense_parts`."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            for part in dense_parts(tensor):
                require_data(name, part)


def require_memory(
    name: str, tensor: torch.Tensor, *, path: str | None, storage: torch.UntypedStorage | None = None
) -> Extent:
    """Return where a tensor is that a load will write.

    Args:
        name: The tensor, for the error.
        tensor: A dense tensor with a storage.
        path: The checkpoint, for the error.
        storage: The storage that it had, and that the caller holds: another thread may have given it another one.

    Raises:
        MismatchError: Its storage does not have all of its bytes.
    """
    try:
        if type(tensor) in PLAIN:
            return extent_of(tensor, storage)
        with without_torch_function():
            return extent_of(tensor, storage)
    except ShortStorageError as error:
        raise MismatchError(
            f"{printable(name)} cannot be filled: {error}; wake or gather the model first, or resize the memory: "
            f"untyped_storage().resize_({error.needed_bytes})",
            path=path,
            expected=f"{error.needed_bytes:,} bytes",
            found=f"{error.held_bytes:,} bytes",
        ) from None


class TargetMemory:
    """Checks the memory of tensors that one load will write.

    Args:
        path: The checkpoint, for errors.
    """

    def __init__(self, path: str | None) -> None:
        self._path = path
        self._writable: WritableMemory | None = None

    def require(self, name: str, tensor: torch.Tensor) -> None:
        """Raise if a tensor has no memory that can be written.

        Only memory that torch has not allocated itself can be read-only. If there is some, the mappings of the process
        are read once for all tensors.

        Args:
            name: The tensor, for the error.
            tensor: The tensor; see `dense_parts`.

        Raises:
            MismatchError: The memory was freed or shrunk, or is read-only.
        """
        if type(tensor) in PLAIN and tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta:
            self._require(name, tensor)  # without the cost of a generator: a module may have 100,000 tensors
            return
        for part in dense_parts(tensor):
            self._require(name, part)

    def _require(self, name: str, tensor: torch.Tensor) -> None:
        begin, end, address, _ = require_memory(name, tensor, path=self._path)
        if begin == end or not tensor.is_cpu or tensor.untyped_storage().resizable():
            return
        if self._writable is None:
            self._writable = WritableMemory.now()
        if not self._writable.holds(address + begin, end - begin):
            raise MismatchError(
                f"{printable(name)} cannot be filled: its memory is read-only, as that of a file that is mapped for "
                "reading; put a clone() of it into its place first",
                path=self._path,
                expected="memory that can be written",
                found="memory that is read-only or not mapped",
            )
