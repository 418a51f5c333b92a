"""Describes tensors that are to be saved, for the plan of a save, and refuses those that cannot be saved.

For each tensor, only calls of torch that keep the GIL are made (`torch_private`). `copy_out` copies the bytes later.

A tensor may stand for data that is elsewhere. A library that shards or offloads a module leaves a tensor in its place:
with fewer elements, and with attributes that say so. `state_dict()` returns other tensor objects, without these
attributes, over the same memory. So a tensor is compared with the parameters that it may come from.
"""

from __future__ import annotations

import gc
import operator
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import add, attrgetter, gt, sub
from typing import Any

import torch
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from stio.device.copy_out import PLAIN_LAYOUT
from stio.device.cuda import require_streams
from stio.device.tensors import FORMAT_DTYPES, GATHER_FSDP, PLAIN, dense_parts, require_data
from stio.device.torch_private import all_traits_of, traits_of, without_torch_function
from stio.errors import FormatError, UnsupportedDtypeError, printable
from stio.format import TensorSource, tensor_nbytes

_PACKED = (
    "torch packs the weights of a quantized module, and the format cannot hold these. Save the module as it is before "
    "it is quantized, and quantize it again after a load"
)


@dataclass(frozen=True)
class LazyTensor:
    """A tensor that is produced while it is saved, so that it needs memory during its save only.

    Args:
        dtype: Its dtype.
        shape: Its shape in torch.
        produce: Called once, without arguments, on a thread of stio. Returns the tensor, an awaitable of it (awaited on
            stio's event loop), or an iterator of tensors that are consecutive rows of it, `[rows, ...]`.

    Raises:
        TypeError: Not a dtype, not a callable, or a dimension that is no integer.
        ValueError: A negative dimension.
    """

    dtype: torch.dtype
    """Dtype of the produced tensor."""
    shape: Sequence[int]
    """Its shape in torch, stored as a tuple."""
    produce: Callable[[], Any]
    """Returns the tensor, an awaitable of it, or an iterator of its rows."""

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"dtype must be a torch.dtype, not {printable(self.dtype)}")
        if not callable(self.produce):
            raise TypeError(f"produce must be callable, not a {type(self.produce).__name__}")
        shape = tuple(operator.index(size) for size in self.shape)
        if any(size < 0 for size in shape):
            raise ValueError(f"a shape has no negative dimensions: {list(shape)}")
        object.__setattr__(self, "shape", shape)


_CHECK_EVERY = 1000  # tensors; they take a few milliseconds


def describe_tensors(
    tensors: Mapping[str, torch.Tensor | LazyTensor], *, check: Callable[[], None] = lambda: None
) -> list[TensorSource]:
    """Describe tensors for the plan of a save, in the order of the mapping. Copies nothing and waits for no device.

    Parameters, views, expanded, transposed, conjugated and negated tensors are saved by their values. So are subclasses
    that only override torch's functions.

    Args:
        tensors: Name to tensor. They must stay unchanged until their bytes have been copied.
        check: Called now and then; what it raises ends the call.

    Raises:
        TypeError: A name is no string; a value is no tensor, or a tensor without memory of its own (distributed, fake,
            a wrapper of other tensors, inside a function transform such as `torch.vmap`).
        ValueError: A tensor has no data in the usual layout: sparse, nested, on meta, freed, not initialized, or a
            placeholder for data that is elsewhere.
        UnsupportedDtypeError: The format has no such dtype.
        DeviceError: torch cannot copy from this kind of device in the background.
    """
    _require_own_data(tensors, tensors.values())
    _require_scales(tensors)
    sources: list[TensorSource] = []
    names, values = list(tensors), list(tensors.values())
    for start in range(0, len(names), _CHECK_EVERY):
        check()
        rows = slice(start, start + _CHECK_EVERY)
        sources += _plain_sources(names[rows], values[rows]) or map(_source, names[rows], values[rows])
    _require_no_shards(tensors, [source.name for source in sources if source.shape == (0,)])
    return sources


def _is_padded(tensor: object) -> bool:
    """Return whether torch's `CheckpointableTensor` describes a tensor."""
    return hasattr(tensor, "global_offsets") and hasattr(tensor, "local_offsets")


def _require_whole(name: str, tensor: Any) -> None:
    """Require that a tensor that torch's `CheckpointableTensor` describes is the whole one, without padding.

    Raises:
        TypeError: It holds parts of a tensor.
    """
    shape, start = tuple(tensor.shape), (0,) * tensor.dim()
    parts = [tuple(map(tuple, getattr(tensor, kind))) for kind in ("global_offsets", "local_offsets", "local_sizes")]
    if (tuple(tensor.global_shape), *parts) != (shape, (start,), (start,), (shape,)):
        raise TypeError(
            f"tensor {printable(name)!r} holds parts of a tensor of shape {list(tensor.global_shape)} (torch's "
            "CheckpointableTensor), and stio would save its local memory with its padding; save it by "
            "torch.distributed.checkpoint.save, or a DTensor of it"
        )


def _plain_sources(names: Sequence[str], tensors: Sequence[Any]) -> list[TensorSource] | None:
    """Describe contiguous tensors with elements on the CPU; None if one of the tensors is another one.

    As `_source`, but column by column: 10,000 tensors take 20 ms and not 32.
    """
    if not ({*map(type, names)} == {str} and {*map(type, tensors)} <= PLAIN):
        return None
    if not all(traits.is_cpu and traits.is_dense and not any(traits.bits) for traits in all_traits_of(tensors)):
        return None
    dtypes = [FORMAT_DTYPES.get(tensor.dtype, "F4") for tensor in tensors]
    if "F4" in dtypes or not all(map(torch.Tensor.is_contiguous, tensors)) or any(map(_is_padded, tensors)):
        return None
    try:
        storages = list(map(torch.Tensor.untyped_storage, tensors))
        bases = list(map(torch.UntypedStorage.data_ptr, storages))
        held = list(map(torch.UntypedStorage.nbytes, storages))
    except RuntimeError:  # `_source` raises it again
        return None
    sizes = [tensor.nbytes for tensor in tensors]
    begins = list(map(sub, map(torch.Tensor.data_ptr, tensors), bases))
    ends = list(map(add, begins, sizes))
    if not (all(bases) and all(sizes)) or any(map(gt, ends, held)):
        return None
    shapes = map(tuple, map(attrgetter("shape"), tensors))
    keys, spans = zip(repeat(None), bases, held), zip(begins, ends)  # noqa: B905
    return list(map(TensorSource, names, dtypes, shapes, sizes, keys, spans, repeat(PLAIN_LAYOUT), tensors))


def _source(name: str, tensor: Any) -> TensorSource:
    if not isinstance(name, str):
        raise TypeError(f"tensors are saved by name, and a name is a string, not {printable(name)}")
    if isinstance(tensor, LazyTensor):
        return _lazy_source(name, tensor)
    if _is_padded(tensor):
        _require_whole(name, tensor)
    if type(tensor) not in PLAIN:
        tensor = _plain_tensor(name, tensor)
    if tensor.is_meta:
        raise ValueError(f"tensor {printable(name)!r} {_ON_META}")
    if not tensor.is_cpu:
        require_streams(tensor.device)
    try:
        return _dense_source(name, tensor)
    except RuntimeError as error:  # of torch: its tensors under a function transform have no storage
        raise TypeError(
            f"tensor {printable(name)!r}: no memory to save (a value inside torch.func's grad, vmap or "
            "functionalize has none); save outside of the transform. torch says: "
            f"{printable(str(error).partition(chr(10))[0])}"
        ) from error


def _dense_source(name: str, tensor: torch.Tensor) -> TensorSource:
    traits = traits_of(tensor)
    if not traits.is_dense:
        what = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        hint = "save its parts" if tensor.is_nested else "call to_dense() first, or save its parts"
        raise ValueError(f"tensor {printable(name)!r} is {what}, and the format has dense ones only: {hint}")
    dtype = FORMAT_DTYPES.get(tensor.dtype) or _format_dtype(name, tensor.dtype)
    sizes, nbytes = tuple(tensor.shape), tensor.nbytes
    shape = _format_shape(name, sizes) if dtype == "F4" else sizes
    layout: tuple[tuple[int, ...] | None, tuple[bool, bool]] | None = None
    key, span = None, (0, 0)
    if not nbytes:
        tensor.untyped_storage().data_ptr()  # raises as below: without elements it has no memory of its own either
    else:
        begin, end, address, held = require_data(name, tensor)
        key, span = (None if traits.is_cpu else tensor.device, address, held), (begin, end)
        layout = PLAIN_LAYOUT
        if not tensor.is_contiguous():
            strides = tensor.stride()
            if 1 in sizes:  # a dimension of one element has any stride
                strides = tuple(stride if size != 1 else 0 for size, stride in zip(sizes, strides, strict=True))
            layout = strides, traits.bits
        elif traits.bits != PLAIN_LAYOUT[1]:
            layout = None, traits.bits  # the strides are those of the shape
    return TensorSource(name, dtype, shape, nbytes, key, span, layout, tensor)


def _lazy_source(name: str, lazy: LazyTensor) -> TensorSource:
    dtype = _format_dtype(name, lazy.dtype)
    sizes = tuple(lazy.shape)
    shape = _format_shape(name, sizes) if dtype == "F4" else sizes
    try:
        nbytes = tensor_nbytes(dtype, shape)
    except FormatError as error:  # the caller's shape, not a file's
        raise ValueError(f"tensor {printable(name)!r}: {error}") from None
    return TensorSource(name, dtype, shape, nbytes, None, (0, nbytes), None, lazy)


def _format_dtype(name: str, dtype: torch.dtype) -> str:
    found = FORMAT_DTYPES.get(dtype)
    if found is None:
        raise UnsupportedDtypeError(
            f"tensor {printable(name)!r}: the safetensors format has no such dtype; convert it first, or save its "
            "parts (real and imaginary; of a quantized tensor `int_repr()`, scales and zero points)",
            found=str(dtype),
        )
    return found


def _format_shape(name: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the format's shape of packed F4: two elements of the format are one of torch."""
    if not sizes:
        raise ValueError(f"tensor {printable(name)!r} is one pair of F4 without a dimension; reshape it to [1]")
    return (*sizes[:-1], sizes[-1] * 2)


def how_to_save(value: object, call: str = "save_state takes") -> str:
    """Return what to save of an object that is no tensor, such as `save_state takes its state_dict()`.

    Empty if that is not known.
    """
    kind = type(value)
    if isinstance(value, torch.nn.Module) and any(hasattr(part, "_packed_params") for part in value.modules()):
        return _PACKED
    for method in ("state_dict", "get_state", "getstate"):
        if callable(getattr(kind, method, None)):
            return f"{call} its {method}()"
    return f"{call} its bit_generator.state" if kind.__module__.startswith("numpy.random") else ""


def _from_numpy(array: Any) -> str:
    """Return the call that makes a tensor of an array of numpy; torch does not take the dtypes of ml_dtypes."""
    if array.dtype.type.__module__ != "ml_dtypes":
        return "torch.as_tensor()"
    if getattr(torch, array.dtype.name, None) not in FORMAT_DTYPES:
        return "torch.as_tensor(ARRAY.astype('f4'))"
    return f"torch.as_tensor(ARRAY.view('i{array.dtype.itemsize}')).view(torch.{array.dtype.name})"


def _plain_tensor(name: str, tensor: object) -> torch.Tensor:
    """Return a plain tensor over the memory of an instance of a subclass.

    Raises:
        TypeError: It is no tensor, or has no memory of its own.
        ValueError: It has not been initialized.
    """
    shown, kind = printable(name), type(tensor).__name__
    if not isinstance(tensor, torch.Tensor):
        advice = how_to_save(tensor) or "save_state takes nested state and plain values"
        if "_packed_params" in name:
            advice = _PACKED
        elif name.endswith("_extra_state"):  # of torch: what `get_extra_state` returns
            advice = "extra state that is no tensor is saved by stio.save_state(module.state_dict(), ...)"
        elif kind == "ndarray":
            advice = f"{_from_numpy(tensor)} makes one of it, and {advice}"
        raise TypeError(f"{shown!r} is no tensor, its type is {kind}; {advice}")
    if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
        raise ValueError(f"tensor {shown!r} is a lazy parameter without data; run the module once, then save")
    # A subclass that torch dispatches to Python stores its values elsewhere: this object has a shard of them or none.
    if getattr(type(tensor), "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
        hint = "gather it into a plain tensor first (full_tensor(), dequantize() or its parts)"
        if kind == "DTensor":
            hint = f"save it from all ranks by stio.distributed.save, or {hint}"
        elif kind == "ShardedTensor":
            hint = GATHER_FSDP
        raise TypeError(f"tensor {shown!r} is a {kind}, which has no memory of its own to save; {hint}")
    with without_torch_function():
        return tensor.as_subclass(torch.Tensor)


# Tensors whose data is elsewhere.

_ON_META = (
    "is on meta: it has no data to save. Load the module first; of one that accelerate offloads, save `module."
    "state_dict() | accelerate.utils.modeling.get_state_dict_offloaded_model(module)`; of one in a warm start, await "
    "`done()` first"
)

_ZERO = (
    "is sharded by DeepSpeed ZeRO-3, and has no data here; gather it first: save the module inside `with "
    "deepspeed.zero.GatheredParameters(list(module.parameters())):`"
)
_FLAT = f"is a part of a flat parameter of FSDP; gather it first: {GATHER_FSDP}"
_QUANTIZED = (
    "holds quantized values, whose scales are not in the mapping; save `state_dict()` of the module, which has both"
)


def require_values(tensors: Mapping[str, object], parameters: Iterable[object] | None = None) -> None:
    """Require that no tensor stands for data that is elsewhere; `describe_tensors` requires it too.

    For tensors that a library writes, or leaves out, before a save of stio describes them.

    Args:
        tensors: By name; values that are no tensors are ignored.
        parameters: Those of the module whose `state_dict()` these are: only what their attributes say is checked, and
            nothing waits.

    Raises:
        ValueError: A tensor stands for data that is elsewhere, or its memory was freed; the message names it, and what
            to do first.
    """
    if parameters is not None:
        _require_own_data(tensors, parameters)
        return
    _require_own_data(tensors, tensors.values())
    _require_scales(tensors)
    present = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
    _require_no_shards(present, [name for name, one in present.items() if not one.is_nested and one.shape == (0,)])
    for name, tensor in present.items():
        for part in dense_parts(tensor):
            require_data(name, part)


def _require_own_data(tensors: Mapping[str, object], parameters: Iterable[object]) -> None:
    """Require that no tensor is one of the parameters, or over their memory, whose data is elsewhere."""
    elsewhere = dict(_placeholders(parameters))
    for name, tensor in tensors.items() if elsewhere else ():
        if isinstance(tensor, torch.Tensor) and (advice := elsewhere.get(_place(tensor))) is not None:
            raise ValueError(f"tensor {printable(name)!r} {advice}")


def _require_no_shards(tensors: Mapping[str, object], empty: Sequence[str]) -> None:
    """Require that no tensor is a flat parameter of FSDP, and none without elements is a parameter of this process.

    `state_dict()` loses the attributes. To list all objects takes the collector tens of milliseconds, so this is done
    only where there is a tensor without elements in one dimension, which is rare.

    Args:
        tensors: All tensors by name.
        empty: The names of those.
    """
    for name in tensors:
        if "_flat_param" in name and name.rpartition(".")[2] == "_flat_param":
            raise ValueError(f"tensor {printable(name)!r} {_FLAT}")
    if empty:
        parameters = (item for item in gc.get_objects() if issubclass(type(item), torch.nn.Parameter))
        _require_own_data({name: tensors[name] for name in empty}, parameters)


def _require_scales(tensors: Mapping[str, object]) -> None:
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
        if type(parameter) is torch.Tensor and not hasattr(parameter, "ds_shape"):  # nearly always
            continue
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
