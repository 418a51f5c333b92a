"""The submodules of a module as a load sees them: names of tensors, owners, and the parts that load in their own way.

Names are those of `load_state_dict`: the path of attributes to a parameter or a persistent buffer. They are found
without a call of `state_dict()`, which hooks may change. A submodule is *hooked* if code of its own takes part in a
load: a hook, or an overridden method. A hook gets the tensors of its submodule and of all submodules below it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.module import _global_parameter_registration_hooks
from torch.nn.parameter import is_lazy

from stio.device.names_in_files import as_in_files
from stio.device.tensor_memory import TargetMemory, has_overlap
from stio.device.torch_private import traits_of
from stio.loading.warm_start.parameter import PlaceholderParameter

_EXTRA_STATE = "_extra_state"
_OWN_RULES = (_NormBase._load_from_state_dict, _InstanceNorm._load_from_state_dict)
"""Overridden for files of old versions of torch only; `ModuleTree` follows their rules."""

_REFUSED = {
    "torch.distributed.fsdp.fully_sharded_data_parallel": "it shards its parameters; load before FSDP wraps it",
    "torch.ao.nn.quantized": "its weights are packed, and a file of tensors does not hold them; load before converting",
    "torch.ao.nn.intrinsic.quantized": "its weights are packed; load before converting",
    "torch.ao.nn.sparse.quantized": "its weights are packed; load before converting",
}
"""Python modules whose classes are refused, with the reason in the error."""

_WRAPPED = "_checkpoint_wrapped_module"
_WRAPPERS = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"
_WRAPPER_HOOK = f"{_WRAPPERS}.ActivationWrapper._pre_load_state_dict_hook"
"""The modules of `checkpoint_wrapper`, which private names of torch identify; see `_only_wraps`."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What is known of a class of modules."""

    loads_itself: bool
    """It overrides how a load treats its own tensors."""
    saves_itself: bool
    """It overrides `state_dict`, so its names there may be others."""
    sets_extra_state: bool
    """It keeps state that is neither parameter nor buffer."""
    refused: str
    """Why it cannot be loaded into; empty if it can."""

    @classmethod
    def of(cls, kind: type[nn.Module]) -> _Kind:
        """Return what is known of a class."""
        why = next((why for package, why in _REFUSED.items() if is_from(kind, package)), "")
        load = kind._load_from_state_dict
        return cls(
            loads_itself=load is not nn.Module._load_from_state_dict and load not in _OWN_RULES,
            saves_itself=kind.state_dict is not nn.Module.state_dict
            or kind._save_to_state_dict is not nn.Module._save_to_state_dict,
            sets_extra_state=kind.set_extra_state is not nn.Module.set_extra_state,
            refused=why,
        )


class ModuleTree:
    """Tensors and submodules of a module, by name.

    Args:
        module: The root.
    """

    def __init__(self, module: nn.Module) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        """Parameters and persistent buffers, in the order of `load_state_dict`."""
        self.never_stored: list[str] = []
        """Buffers that are not persistent."""
        self._owners: dict[str, nn.Module] = {}
        self.extra_states: dict[str, nn.Module] = {}
        """Submodules with extra state, by the name of that state."""
        self.hooked: set[str] = set()
        """Prefixes of the outermost hooked submodules."""
        self.may_lack: set[str] = set()
        """Tensors that files of old versions lack: the load is complete without them."""
        self.must_lack: list[str] = []
        """Names that only files of old versions have, and that `load_state_dict` refuses."""
        self.refused: dict[str, str] = {}
        """Why a submodule cannot be loaded into, by its name."""
        self.renames = False
        """Whether `state_dict()` of a submodule that is not hooked may have other names."""
        self._accepts_old_names: set[str] = set()
        kinds: dict[type[nn.Module], _Kind] = {}
        if type(module).load_state_dict is not nn.Module.load_state_dict or "load_state_dict" in vars(module):
            self.hooked.add("")
        for prefix, part in _parts(module):
            kind = kinds.get(type(part)) or kinds.setdefault(type(part), _Kind.of(type(part)))
            self._add(prefix, part, kind)

    def _add(self, prefix: str, part: nn.Module, kind: _Kind) -> None:
        for leaf, tensor in part._parameters.items():
            if tensor is not None:
                self.tensors[prefix + leaf] = tensor
                self._owners[prefix + leaf] = part
        for leaf, buffer in part._buffers.items():
            if buffer is None:
                continue
            self._owners[prefix + leaf] = part
            if leaf in part._non_persistent_buffers_set:
                self.never_stored.append(prefix + leaf)
            else:
                self.tensors[prefix + leaf] = buffer
        if kind.refused:
            self.refused[prefix[:-1]] = kind.refused
        if isinstance(part, _NormBase):
            self._add_rules_of_norms(prefix, part)
        is_below = bool(self.hooked) and self.is_hooked(prefix)
        if kind.sets_extra_state and not is_below:
            self.extra_states[prefix + _EXTRA_STATE] = part
        if is_below:
            return
        post_hooks = any(not _is_of_fsdp(hook) for hook in part._load_state_dict_post_hooks.values())
        if kind.loads_itself or "_load_from_state_dict" in vars(part) or post_hooks:
            self.hooked.add(prefix)
        elif hooks := [hook for hook in part._load_state_dict_pre_hooks.values() if not _is_of_fsdp(hook)]:
            if all(map(_is_for_old_names, hooks)):
                self._accepts_old_names.add(prefix)
            else:
                self.hooked.add(prefix)
        if prefix not in self.hooked:
            attributes = vars(part)
            self.renames |= kind.saves_itself or bool(part._state_dict_hooks) or "state_dict" in attributes

    def _add_rules_of_norms(self, prefix: str, part: _NormBase) -> None:
        if part.track_running_stats:
            self.may_lack.add(f"{prefix}num_batches_tracked")
        elif isinstance(part, _InstanceNorm):
            self.must_lack += [f"{prefix}running_mean", f"{prefix}running_var"]

    def get(self, name: str) -> torch.Tensor:
        """Return the tensor that the module has under a name."""
        owner, leaf = self._owners[name], name.rpartition(".")[2]
        found = owner._parameters[leaf] if leaf in owner._parameters else owner._buffers[leaf]
        assert found is not None
        return found

    def has_no_data(self, name: str) -> bool:
        """Return whether the tensor that the module has under a name, if it has one, is on `meta`."""
        owner, leaf = self._owners.get(name), name.rpartition(".")[2]
        found = None if owner is None else owner._parameters.get(leaf, owner._buffers.get(leaf))
        return found is not None and is_on_meta(found)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """Replace a tensor as `load_state_dict` does: recurrent modules depend on the call of `setattr`."""
        owner, leaf = self._owners[name], name.rpartition(".")[2]
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

    def expects(self, name: str) -> bool:
        """Return whether the module has a tensor or extra state of this name."""
        return name in self.tensors or name in self.extra_states

    def is_hooked(self, name: str) -> bool:
        """Return whether a name is that of a hooked submodule, or below one."""
        if not self.hooked or "" in self.hooked:
            return bool(self.hooked)
        at = name.find(".")
        while at >= 0:
            if name[: at + 1] in self.hooked:
                return True
            at = name.find(".", at + 1)
        return False

    def hook(self, prefixes: Iterable[str]) -> None:
        """Treat submodules as hooked."""
        self.hooked.update(prefix for prefix in list(prefixes) if not self.is_hooked(prefix))
        for name in [name for name in self.extra_states if self.is_hooked(name)]:
            del self.extra_states[name]

    def hook_for_old_names(self, names: Iterable[str]) -> None:
        """Treat submodules as hooked if a checkpoint has names for them that only their hooks know."""
        if self._accepts_old_names:
            strange = {name[: name.rfind(".") + 1] for name in names if not self.expects(name)}
            self.hook(self._accepts_old_names & strange)

    @property
    def hooked_names(self) -> list[str]:
        """Names of the hooked submodules, for a message."""
        return [prefix[:-1] or "the module itself" for prefix in self.hooked]


def require_memory_of(module: object, names: Collection[str], *, path: str | None) -> None:
    """Raise unless the tensors that `load_state_dict` of torch would fill have memory that can be written.

    Args:
        module: The module.
        names: Names of the loaded tensors.
        path: The checkpoint, for the error.

    Raises:
        MismatchError: The memory of a tensor was freed or shrunk, or is read-only.
    """
    if not isinstance(module, nn.Module):
        return  # something else with a `load_state_dict`
    tree, memory = ModuleTree(module), TargetMemory(path)
    for name, tensor in tree.tensors.items():
        if name in names or tree.is_hooked(name):
            memory.require(name, tensor)


def _parts(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield submodules with the prefix of their names; one that has two names comes twice, as in `load_state_dict`."""
    stack = [("", module)]
    while stack:
        prefix, part = stack.pop()
        if _only_wraps(part):
            stack.append((prefix, part._modules[_WRAPPED]))  # type: ignore[arg-type]  # it is there
            continue
        yield prefix, part
        if part._modules:
            children = [(f"{prefix}{name}.", child) for name, child in part._modules.items() if child is not None]
            stack.extend(reversed(children))


def _only_wraps(part: nn.Module) -> bool:
    """Return whether this is a wrapper of activation checkpointing, whose hooks do nothing but leave it out of names.

    Without this, the modules inside it would count as hooked, and could not be loaded when they are sharded.
    """
    if part._modules.keys() != {_WRAPPED} or part._parameters or part._buffers or len(part._state_dict_hooks) != 1:
        return False
    hooks = [*part._load_state_dict_pre_hooks.values(), *part._load_state_dict_post_hooks.values()]
    strange = [hook for hook in hooks if not _is_of_fsdp(hook)]
    return is_from(type(part), _WRAPPERS) and [_origin(hook) for hook in strange] == [_WRAPPER_HOOK]


def is_from(kind: type[nn.Module], package: str) -> bool:
    """Return whether a class, or a base of it, is of a Python module, or of one below it."""
    return any(f"{base.__module__}.".startswith(f"{package}.") for base in kind.__mro__)


def _is_for_old_names(hook: object) -> bool:
    """Return whether a hook does nothing but accept names of `torch.nn.utils.weight_norm`."""
    return _origin(hook) == "torch.nn.utils.parametrizations.weight_norm.<locals>._weight_norm_compat_hook"


def _origin(hook: object) -> str:
    """Return module and name of a hook's function."""
    function = getattr(hook, "hook", hook)
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def _is_of_fsdp(hook: object) -> bool:
    """Return whether a hook is one of `fully_shard`.

    One of them searches for parameters that were replaced; a load fills parameters instead. The other one, added by the
    first forward, frees what was gathered; `stio.distributed.load_into` does that.
    """
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard.")


_PLAIN = (nn.Parameter, torch.Tensor)


def _handles_its_data(tensor: torch.Tensor) -> bool:
    kind = type(tensor)
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and kind is not PlaceholderParameter


def is_on_meta(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is on `meta`; a lazy one has few attributes."""
    return tensor.device.type == "meta" if is_lazy(tensor) else tensor.is_meta


def memory_key(tensor: torch.Tensor) -> object:
    """Return a key that all tensors of the same elements in memory share; unique for tensors without memory."""
    start = _address(tensor)
    return start if start < 0 else (start, tensor.device, tensor.shape, tensor.stride(), tensor.dtype)


def memory_keys(tensors: Mapping[str, torch.Tensor]) -> dict[str, object]:
    """Return for each name a key that names of the same elements in memory share; see `memory_key`."""
    keys: dict[str, object] = {name: _address(tensor) for name, tensor in tensors.items()}
    if len(set(keys.values())) < len(keys):
        counts = Counter(keys.values())
        keys.update((name, memory_key(tensors[name])) for name, key in keys.items() if counts[key] > 1)
    return keys


def _address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor's memory; a negative number, unique for the object, if it has none."""
    if tensor.__class__ not in _PLAIN and (is_lazy(tensor) or _handles_its_data(tensor)):
        return -id(tensor)
    if tensor.is_meta or tensor.layout is not torch.strided or tensor.is_nested:
        return -id(tensor)
    return tensor.data_ptr() or -id(tensor)


def overlapping(tensors: Mapping[str, torch.Tensor], names: Mapping[object, str]) -> bool:
    """Return whether two different tensors share memory, so that the order of copies decides.

    Args:
        tensors: By name.
        names: A name for each `memory_key`.
    """
    ends: dict[int, int] = {}  # of all devices together: an address that two of them have costs time only
    for key, name in names.items():
        start = key if isinstance(key, int) else key[0] if isinstance(key, tuple) else 0
        if start > 0:
            tensor = tensors[name]
            if start in ends:
                return True
            ends[start] = start + (tensor.nbytes if tensor.is_contiguous() else _extent_bytes(tensor))
    return any(ends[start] > following for start, following in pairwise(sorted(ends)))


def views_in_files(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], *, as_read: bool = True
) -> dict[str, torch.Tensor]:
    """Return `as_in_files`, if filling these tensors in any order fills the module's; otherwise an empty dict."""
    views = as_in_files(module, tensors, as_read=as_read)
    keys = {key: name for name, key in memory_keys(views).items()}
    memory, filled = ({one.untyped_storage()._cdata for one in some.values()} for some in (tensors, views))
    return views if filled == memory and not overlapping(views, keys) else {}


def _extent_bytes(tensor: torch.Tensor) -> int:
    steps = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (1 + steps) * tensor.itemsize


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
    if has_overlap(tensor):
        return f"its elements share memory (expand, as_strided); give a clone() of it{also}"
    return ""
