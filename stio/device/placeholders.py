"""Tensors that stand for data which is elsewhere: how each kind is recognised, and what to call first.

A library that shards or offloads a module leaves a tensor in its place: with fewer elements, and with attributes that
say so. `state_dict()` returns other tensor objects, without these attributes, over the same memory. So a tensor is
compared with the parameters that it may come from.
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence

import torch

from stio.errors import printable
from stio.format.sharding import TensorSource

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
    for source in sources:
        _require_no_flat_name(source.name)
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
