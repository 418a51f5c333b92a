"""The submodules of a module as a load sees them: names of tensors, owners, and which of them have code for loads.

Names are those of `load_state_dict`: the path of attributes to a parameter or a persistent buffer. They are found
without a call of `state_dict()`, which hooks may change. A submodule is *custom* if code of its own takes part in a
load: a load hook, an overridden method, or extra state. Such code gets the tensors of its submodule and of all
submodules below it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import _global_parameter_registration_hooks
from torch.nn.parameter import is_lazy

from stio.device import FileNames, TargetMemory, traits_of

_OWN_RULES = (_NormBase._load_from_state_dict, _InstanceNorm._load_from_state_dict)
"""Overridden for files of old versions of torch only; `ModuleTree` follows their rules."""

_REFUSED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel": "it shards its parameters; load before FSDP wraps it",
    "torch.ao.nn.quantized": "its weights are packed, and a file of tensors does not hold them; load before converting",
    "torch.ao.nn.intrinsic.quantized": "its weights are packed; load before converting",
    "torch.ao.nn.sparse.quantized": "its weights are packed; load before converting",
}
"""Python modules whose classes are refused, with the reason in the error."""

_WRAPPED, _WRAPPERS = "_checkpoint_wrapped_module", "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
"""The wrappers of activation checkpointing leave their submodule's own name out of all names."""

_HARMLESS_HOOKS = ("torch.distributed.fsdp._fully_shard.", f"{_WRAPPERS}.")
"""Python modules whose load hooks are not needed by a load in place.

Of `fully_shard` one hook searches for parameters that were replaced; a load fills parameters instead. Another one,
added by the first forward, frees what was gathered; `stio.distributed.load_into` does that. The hook of the wrappers
above changes names as `ModuleTree` does.
"""


class ModuleTree:
    """Tensors and submodules of a module, by name.

    Args:
        module: The root.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Parameters and persistent buffers, in the order of `load_state_dict`."""
        self.never_stored: dict[str, torch.Tensor] = {}
        """Buffers that are not persistent."""
        self._parts: dict[str, nn.Module] = {}  # by the prefix of its tensors' names
        self.custom: dict[str, None] = {}
        """Names of the custom submodules; empty: the module itself."""
        self.may_lack: set[str] = set()
        """Tensors that files of old versions lack: the load is complete without them."""
        self.must_lack: list[str] = []
        """Names that only files of old versions have, and that `load_state_dict` refuses."""
        self.refused: dict[str, str] = {}
        """Why a submodule cannot be loaded into, by its name."""
        self.renames = False
        """Whether `state_dict()` of a submodule that is not custom may have other names."""
        kinds: dict[type[nn.Module], tuple[bool, bool, str]] = {}
        if type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module):
            self.custom[""] = None
        for prefix, part in _parts(module):
            kind = kinds.get(type(part)) or kinds.setdefault(type(part), _known_of(type(part)))
            self._add(prefix, part, *kind)

    def _add(self, prefix: str, part: nn.Module, loads_itself: bool, saves_itself: bool, refused: str) -> None:
        if part._parameters or part._buffers:
            self._parts[prefix] = part
        for leaf, tensor in part._parameters.items():
            if tensor is not None:
                self.tensors[prefix + leaf] = tensor
        for leaf, buffer in part._buffers.items():
            if buffer is not None:
                kind = self.never_stored if leaf in part._non_persistent_buffers_set else self.tensors
                kind[prefix + leaf] = buffer
        name, own = prefix[:-1], vars(part)
        if refused:
            self.refused[name] = refused
        if isinstance(part, _NormBase):
            self._add_rules_of_norms(prefix, part)
        hooks = part._load_state_dict_pre_hooks or part._load_state_dict_post_hooks
        if loads_itself or "_load_from_state_dict" in own or (hooks and not _has_harmless_hooks(part)):
            self.custom[name] = None
        elif saves_itself or part._state_dict_hooks or "state_dict" in own:
            self.renames |= not self.is_custom(name)

    def _add_rules_of_norms(self, prefix: str, part: _NormBase) -> None:
        if part.track_running_stats:
            self.may_lack.add(f"{prefix}num_batches_tracked")
        elif isinstance(part, _InstanceNorm):
            self.must_lack += [f"{prefix}running_mean", f"{prefix}running_var"]

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a tensor as `load_state_dict` does: recurrent modules depend on the call of `setattr`."""
        prefix, dot, leaf = name.rpartition(".")
        owner = self._parts[prefix + dot]
        if (
            type(owner).__setattr__ is nn.Module.__setattr__
            and type(owner).register_parameter is nn.Module.register_parameter
            and type(tensor) is nn.Parameter
            and type(owner._parameters.get(leaf)) is nn.Parameter
            and not _global_parameter_registration_hooks
        ):
            owner._parameters[leaf] = tensor  # all that `setattr` would do, in a tenth of the time
        else:
            setattr(owner, leaf, tensor)

    def require_memory(self, names: Collection[str], *, path: str | None) -> None:
        """Raise unless the tensors that `load_state_dict` of torch would fill have memory that can be written.

        Args:
            names: Names of the loaded tensors.
            path: The checkpoint, for the error.

        Raises:
            MismatchError: The memory of a tensor was freed or shrunk, or is read-only.
        """
        memory = TargetMemory(path)
        for name, tensor in self.tensors.items():
            if name in names or self.is_custom(name):
                memory.require(name, tensor)

    def is_custom(self, name: str) -> bool:
        """Return whether a name is that of a custom submodule, or below one."""
        if not self.custom or "" in self.custom:
            return bool(self.custom)
        return not self.custom.keys().isdisjoint(accumulate(name.split("."), "{}.{}".format))


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield submodules with the prefix of their names; one that has two names comes twice, as in `load_state_dict`."""
    stack = [("", module)]
    while stack:
        prefix, part = stack.pop()
        yield prefix, part
        if part._modules:
            only_wraps = _WRAPPED in part._modules and _is_from(type(part), _WRAPPERS)
            children = [
                (prefix if only_wraps else f"{prefix}{name}.", child)
                for name, child in part._modules.items()
                if child is not None
            ]
            stack.extend(reversed(children))


def _known_of(kind: type[nn.Module]) -> tuple[bool, bool, str]:
    """Return whether a class takes part in loads, whether it overrides `state_dict`, and why it is refused if it is."""
    load = kind._load_from_state_dict
    loads_itself = load is not nn.Module._load_from_state_dict and load not in _OWN_RULES
    saves_itself = (
        kind.state_dict is not nn.Module.state_dict or kind._save_to_state_dict is not nn.Module._save_to_state_dict
    )
    refused = next((why for package, why in _REFUSED.items() if _is_from(kind, package)), "")
    return loads_itself or kind.set_extra_state is not nn.Module.set_extra_state, saves_itself, refused


def _has_harmless_hooks(part: nn.Module) -> bool:
    hooks = (*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values())
    return all(f"{getattr(hook, '__module__', '')}.".startswith(_HARMLESS_HOOKS) for hook in hooks)


def _is_from(kind: type[nn.Module], package: str) -> bool:
    """Return whether a class, or a base of it, is of a Python module, or of one below it."""
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in kind.__mro__)


_PLAIN = (nn.Parameter, torch.Tensor)


def _handles_its_data(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and not getattr(
        kind, "_is_placeholder", False
    )


def is_on_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on `meta`; a lazy one has few attributes."""
    return tensor.device.type == "meta" if tensor.__class__ not in _PLAIN and is_lazy(tensor) else tensor.is_meta


Span: TypeAlias = tuple[int, int]
"""Addresses of the first byte of a tensor's memory, and of the byte after its last one. Without memory: two equal
negative numbers, unique for the object."""


def span_of(tensor: torch.Tensor) -> Span:
    """Return where the memory of a tensor is."""
    if (
        (tensor.__class__ not in _PLAIN and (is_lazy(tensor) or _handles_its_data(tensor)))
        or tensor.is_meta
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or not (start := tensor.data_ptr())
    ):
        return -id(tensor), -id(tensor)
    if tensor.is_contiguous():
        return start, start + tensor.nbytes
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (1 + steps) * tensor.itemsize


def span_to_fill(tensor: torch.Tensor) -> Span | None:
    """Return where the memory of an ordinary tensor is, which a load can fill; None: other functions look closer.

    Most tensors of a module are plain, dense and contiguous, in memory that torch has allocated.
    """
    try:
        if (
            tensor.__class__ not in _PLAIN
            or tensor.layout is not torch.strided
            or tensor.is_nested
            or tensor.is_quantized
            or tensor.is_meta
            or tensor._version < 0
            or not tensor.is_contiguous()
        ):
            return None
    except RuntimeError:  # a tensor of inference mode has no version
        return None
    storage, nbytes = tensor.untyped_storage(), tensor.nbytes
    begin, address = int(tensor.storage_offset()) * tensor.itemsize, storage.data_ptr()
    if not address or begin + nbytes > storage.nbytes() or not storage.resizable():
        return None
    return address + begin, address + begin + nbytes


def memory_key(tensor: torch.Tensor, span: Span) -> object:
    """Return a key that all tensors of the same elements in memory share; unique for tensors without memory."""
    start, _ = span
    return start if start < 0 else (start, tensor.device, tensor.shape, tensor.stride(), tensor.dtype)


def tied_names(tensors: Mapping[str, torch.Tensor], spans: Mapping[str, Span]) -> dict[str, list[str]]:
    """Return for each name whose tensor has other names too all of these, in their order."""
    if len({start for start, _ in spans.values()}) == len(spans):
        return {}
    names: dict[object, list[str]] = {}
    for name, span in spans.items():
        names.setdefault(memory_key(tensors[name], span), []).append(name)
    return {name: own for own in names.values() if len(own) > 1 for name in own}


def overlapping(spans: Iterable[Span]) -> bool:
    """Return whether tensors of different `memory_key`s share memory, so that the order of copies decides."""
    # Those of all devices together: an address that two of them have costs time only.
    return any(end > following for (_, end), (following, _) in pairwise(sorted(spans)))


def views_in_files(
    names: FileNames, tensors: Mapping[str, torch.Tensor], *, may_share: bool = True
) -> dict[str, torch.Tensor]:
    """Return `names.convert`, if filling these tensors in any order fills the module's; otherwise an empty dict.

    Args:
        names: The names.
        tensors: Tensors of the module, by name.
        may_share: Whether two of the views may have the same memory, as those of layers that share weights.
    """
    views = names.convert(tensors)
    spans = {name: span_of(view) for name, view in views.items()}
    distinct = {memory_key(views[name], span): span for name, span in spans.items()}
    memory, filled = ({one.untyped_storage()._cdata for one in some.values()} for some in (tensors, views))
    is_apart = len(distinct) == len(views) or (may_share and not overlapping(distinct.values()))
    return views if filled == memory and is_apart else {}


def why_refused(tensor: torch.Tensor) -> str:
    """Return why a load cannot fill this tensor in any way; empty if it can."""
    if tensor.__class__ in _PLAIN:
        return "it is a nested tensor" if tensor.is_nested else ""
    if is_lazy(tensor):
        return ""  # a hook of lazy modules gives it the shape of the loaded tensor
    if type(tensor).__name__ == "DTensor":
        return "it is a DTensor, sharded over ranks; stio.distributed.load_into fills it"
    if _handles_its_data(tensor):
        return (
            f"its class {type(tensor).__name__} handles its data itself; load into the plain module, and distribute, "
            "shard or convert it after that"
        )
    return "it is a nested tensor" if tensor.is_nested else ""


def why_not_copied(tensor: torch.Tensor, *, in_inference_mode: bool, can_assign: bool = True) -> str:
    """Return why values cannot be copied into this tensor, which has memory, and what to do; empty if they can.

    Args:
        tensor: The tensor.
        in_inference_mode: Whether the load was called in it.
        can_assign: Whether the load takes `assign=True`, which replaces tensors.
    """
    if tensor.__class__ not in _PLAIN and is_lazy(tensor):
        return ""
    also = ", or pass assign=True" if can_assign else ""
    if tensor.layout is not torch.strided:
        return f"its layout is {tensor.layout}; give a dense tensor{also}"
    if tensor.is_quantized:
        return f"it is a quantized tensor; give a floating one{also}"
    if not in_inference_mode and traits_of(tensor).is_inference:
        return f"it was made in inference mode; load inside torch.inference_mode(){also}"
    if _has_overlap(tensor):
        return f"its elements share memory (expand, as_strided); give a clone() of it{also}"
    return ""


def _has_overlap(tensor: torch.Tensor) -> bool:
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
