"""Compares a module with a checkpoint for a warm start, and rejects modules that cannot have placeholders.

All decisions follow from names, shapes and dtypes, before the first tensor is read. Parameters become placeholders.
Buffers are loaded before the caller's block: a computation with a buffer on `meta` would raise no error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stio.device.tensor_memory import TargetMemory, copy_all
from stio.device.tensors import TORCH_DTYPES, cast, loses_values, require_dtypes
from stio.device.torch_private import copy_of, moved
from stio.errors import MismatchError, TensorNotFoundError, WarmStartError, listed, printable
from stio.format.state_tree import STATE_KEY
from stio.loading.module import ModuleTarget
from stio.loading.module_tree import is_from
from stio.loading.open import OpenCheckpoint
from stio.loading.target import LoadReport
from stio.loading.warm_start.load import MatchedParameter
from stio.loading.warm_start.parameter import PlaceholderParameter, placeholder_of

_FOREIGN = {
    "torch.distributed": "it shards or replicates its parameters",
    "torch.nn.parallel": "it replicates its parameters",
    "torch._dynamo": "it is compiled",
    "torch.jit": "it is compiled, and its parameters are not Python's",
}
"""Python modules whose classes handle parameters themselves, with the reason in the error."""


def require_supported(module: nn.Module) -> None:
    """Raise for modules whose parameters cannot be placeholders.

    Raises:
        WarmStartError: A part of the module, or a parameter, that handles uses of parameters itself.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"warm_start takes a module, not {type(module).__name__}")
    reasons: dict[type[nn.Module], str] = {}  # a model has thousands of modules, of a few kinds
    for name, part in module.named_modules():
        kind = type(part)
        if kind not in reasons:
            reasons[kind] = next((why for package, why in _FOREIGN.items() if is_from(kind, package)), "")
        why = reasons[kind]
        if not why and getattr(part, "_compiled_call_impl", None) is not None:
            why = _FOREIGN["torch._dynamo"]
        if why:
            shown = f"{type(part).__name__} {printable(name)!r}" if name else f"a {type(part).__name__}"
            raise WarmStartError(
                f"{shown} cannot be warm-started, {why}; "
                "warm-start the plain module, and wrap or compile it after `done()`"
            )
        for leaf, tensor in (*part._parameters.items(), *part._buffers.items()):
            if tensor is not None and (why := _unsupported(tensor)):
                shown = f"{name}.{leaf}" if name else leaf
                raise WarmStartError(f"{printable(shown)} cannot be warm-started, {why}")


def _unsupported(tensor: torch.Tensor) -> str:
    """Return why a warm start cannot fill this tensor; empty if it can."""
    kind = type(tensor)
    if isinstance(tensor, PlaceholderParameter):
        placeholder = placeholder_of(tensor)
        return "" if placeholder is None or placeholder.has_ended() else "another warm start has not filled it yet"
    if is_lazy(tensor):
        return "it is lazy: first set its shapes by a forward with an input on 'meta'"
    plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if isinstance(tensor, nn.Parameter):
        plain = plain and kind.__torch_function__ is nn.Parameter.__torch_function__
    if tensor.is_meta and not plain:
        return f"its class {kind.__name__} handles its uses itself; warm-start the module before the conversion"
    return ""


def restore_ended(module: nn.Module) -> None:
    """Restore parameters that an earlier warm start left without data to plain ones on `meta`."""
    for parameter in module.parameters():
        if (
            isinstance(parameter, PlaceholderParameter)
            and (placeholder := placeholder_of(parameter)) is not None
            and placeholder.has_ended()
        ):
            placeholder.restore()


def in_order(names: Sequence[str], order: Iterable[str] | None) -> list[str]:
    """Return names in the caller's order; names that it does not mention come last, in the module's order.

    Args:
        names: The module's, in its own order.
        order: Names of tensors, and of submodules for all tensors in them.

    Raises:
        TensorNotFoundError: `order` has a name that the module does not have.
    """
    if order is None:
        return list(names)
    below: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            below.setdefault(".".join(parts[:k]), []).append(name)
    found: dict[str, None] = {}
    for item in [order] if isinstance(order, str) else order:
        if item not in below:
            raise TensorNotFoundError("order= takes names of the module's parameters and submodules", requested=item)
        found |= dict.fromkeys(below[item])
    return [*found, *(name for name in names if name not in found)]


@dataclass(frozen=True, slots=True)
class Match:
    """The tensors that a module and a checkpoint have in common."""

    report: LoadReport
    """Names that only one of them has."""
    parameters: tuple[MatchedParameter, ...]
    """The parameters to be filled, in the order in which they are read."""
    buffers: Mapping[int, str]
    """Name of the data in the checkpoint, by the id of the buffer."""
    casts: Mapping[str, torch.dtype]
    """Dtype to cast to, by the checkpoint's name."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        into: ModuleTarget,
        names: Sequence[str],
        opened: OpenCheckpoint,
        *,
        dtype: torch.dtype | None,
        strict: bool,
    ) -> Match:
        """Compare a module with a checkpoint; reads nothing.

        Args:
            module: The target.
            into: Its tensors.
            names: Their names in the order in which they are read.
            opened: The checkpoint.
            dtype: Cast floating tensors to it. Others are cast to the module's dtype. None: all are.
            strict: Missing or unexpected names are an error.

        Raises:
            MismatchError: Module and checkpoint differ.
            UnsupportedDtypeError: torch has no such dtype, or no such cast.
        """
        stored = opened.dtypes_and_shapes()
        is_state = STATE_KEY in opened.metadata
        _, report = into.match(stored, opened.aliases, strict=strict, path=opened.path, is_state=is_state)
        parameters: list[MatchedParameter] = []
        buffers: dict[int, str] = {}
        casts: dict[str, torch.dtype] = {}
        seen: set[int] = set()
        sources = into.sources
        for name in names:
            source, target = sources[name]
            if source not in stored or id(target) in seen:
                continue
            seen.add(id(target))
            final = _final_dtype(name, stored[source][0], target, dtype, opened.path)
            casts.setdefault(source, final)
            if isinstance(target, nn.Parameter):
                parameters.append(MatchedParameter(target, name, source, final))
            else:
                buffers[id(target)] = source
        _require_meta(module, parameters, seen, opened.path)
        parameters += [
            MatchedParameter(parameter, name, None, parameter.dtype)
            for name, parameter in module.named_parameters()
            if parameter.is_meta and id(parameter) not in seen
        ]
        casts = {name: final for name, final in casts.items() if final != TORCH_DTYPES[stored[name][0]]}
        return cls(report, tuple(parameters), buffers, casts)


def _final_dtype(name: str, stored: str, target: torch.Tensor, cast_to: torch.dtype | None, path: str) -> torch.dtype:
    require_dtypes([stored], path=path)
    own = TORCH_DTYPES[stored]
    final = cast_to if cast_to is not None and own.is_floating_point else target.dtype
    if loses_values(stored, final):
        raise MismatchError(
            "a cast would lose the values of a tensor, whose dtype in the module is of another kind; "
            "load_into(..., assign=True) keeps the dtype of the checkpoint",
            path=path,
            expected=str(final),
            found=f"{stored} for {name}",
        )
    if final != own:
        cast(name, torch.empty(1, dtype=own), final)  # an error of the cast is raised now, and not during the load
    if target.requires_grad and not (final.is_floating_point or final.is_complex):
        raise MismatchError(
            "the parameter requires a gradient, and this dtype cannot have one; call requires_grad_(False) on it first",
            path=path,
            expected="a floating or complex dtype",
            found=f"{final} for {name}",
        )
    return final


def _require_meta(module: nn.Module, parameters: Sequence[MatchedParameter], seen: set[int], path: str) -> None:
    """Require that all parameters to fill are on `meta`, and that no buffer stays there."""
    if real := tuple(matched.name for matched in parameters if not matched.parameter.is_meta):
        raise MismatchError(
            f"these parameters have data, a warm start fills those on 'meta'; load_into copies: {listed(real)}",
            path=path,
        )
    left = tuple(name for name, buffer in module.named_buffers() if buffer.is_meta and id(buffer) not in seen)
    if left:
        raise MismatchError(
            "the checkpoint does not hold these buffers, and a forward would compute without their data; make them on "
            f"a device and not on 'meta': {listed(left)}",
            path=path,
        )


def place_buffers(
    module: nn.Module,
    buffers: Mapping[int, str],
    tensors: Mapping[str, torch.Tensor],
    device: torch.device,
    *,
    path: str,
) -> None:
    """Put loaded buffers into the module, and move all others to the device.

    If a buffer is on the device already, the values are copied into it, so that other references to it have them too.

    Raises:
        MismatchError: The memory of a buffer was freed or shrunk.
    """
    memory = TargetMemory(path)
    made: dict[int, torch.Tensor] = {}
    used: set[str] = set()
    for prefix, part in module.named_modules():
        for leaf, old in part._buffers.items():
            if old is None:
                continue
            if id(old) not in made:
                source, name = buffers.get(id(old)), f"{prefix}.{leaf}" if prefix else leaf
                if source is not None:
                    made[id(old)] = _placed(old, tensors[source], source in used, name, path)
                    used.add(source)
                else:
                    if old.device != device:
                        memory.require(name, old)
                    made[id(old)] = moved(old, device)
            part._buffers[leaf] = made[id(old)]


def _placed(old: torch.Tensor, new: torch.Tensor, is_used: bool, name: str, path: str) -> torch.Tensor:
    if old.device == new.device:
        with torch.no_grad():
            copy_all([old], [new], [name], path=path)
            return old
    return copy_of(new) if is_used else new
