"""Which of a module's tensors a warm start fills, with what, and which modules it refuses.

Everything is decided from names, shapes and dtypes before the first tensor is read. Parameters wait, buffers do
not: they are loaded before the caller's block begins, since a buffer on `meta` would be computed with unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from stio.device.tensors import TORCH_DTYPES, cast, require_dtypes
from stio.errors import MismatchError, TensorNotFoundError, WarmStartError, printable
from stio.format.header import TensorInfo
from stio.loading.module import Into, LoadReport, listed
from stio.loading.open import OpenCheckpoint
from stio.loading.warm_start.load import Awaited
from stio.loading.warm_start.parameter import Waiting, slot_of

__all__ = ["Fit", "in_order", "install_buffers", "require_fit", "revive"]

_FOREIGN = {
    "torch.distributed": "it shards or replicates its parameters",
    "torch.nn.parallel": "it replicates its parameters",
    "torch._dynamo": "it is compiled",
    "torch.jit": "it is compiled, and its parameters are not Python's",
}
"""Homes of classes that take parameters into their own hands, and what to say of them."""


def require_fit(module: nn.Module) -> None:
    """Raise for what cannot wait.

    Raises:
        WarmStartError: A part of the module, or a parameter, that takes uses of parameters into its own hands.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"warm_start takes a module, not {type(module).__name__}")
    reasons: dict[type[nn.Module], str] = {}  # a model has thousands of modules, of a few kinds
    for name, part in module.named_modules():
        kind = type(part)
        if kind not in reasons:
            reasons[kind] = next((why for home, why in _FOREIGN.items() if _comes_from(kind, home)), "")
        why = reasons[kind]
        if not why and getattr(part, "_compiled_call_impl", None) is not None:
            why = _FOREIGN["torch._dynamo"]
        if why:
            shown = f"{type(part).__name__} {printable(name)!r}" if name else f"a {type(part).__name__}"
            raise WarmStartError(
                f"{shown} cannot be warm-started, {why}; "
                "warm-start the plain module, and wrap or compile it after `done()`"
            )
    for name, tensor in _all_tensors(module):
        if why := _strange(tensor):
            raise WarmStartError(f"{printable(name)} cannot be warm-started, {why}")


def _comes_from(kind: type[nn.Module], home: str) -> bool:
    return any(f"{base.__module__}.".startswith(f"{home}.") for base in kind.__mro__)


def _all_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _strange(tensor: torch.Tensor) -> str:
    kind = type(tensor)
    if isinstance(tensor, Waiting):
        slot = slot_of(tensor)
        return "" if slot is None or slot.gate.ended else "another warm start has not filled it yet"
    if is_lazy(tensor):
        return "it is lazy: let the module find out its shapes first, with an input on 'meta'"
    plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    if isinstance(tensor, nn.Parameter):
        plain = plain and kind.__torch_function__ is nn.Parameter.__torch_function__
    if tensor.is_meta and not plain:
        return f"its class {kind.__name__} has a mind of its own; warm-start the module before you convert it"
    return ""


def revive(module: nn.Module) -> None:
    """Make what an earlier warm start left without data a plain parameter on `meta` again."""
    for parameter in module.parameters():
        if isinstance(parameter, Waiting) and (slot := slot_of(parameter)) is not None and slot.gate.ended:
            slot.restore()


def in_order(names: Sequence[str], order: Iterable[str] | None) -> list[str]:
    """Return names in the caller's order; what that does not mention comes last, as it stands in the module.

    Args:
        names: The module's, in its own order.
        order: Names of tensors and of submodules, which stand for all that is in them.

    Raises:
        TensorNotFoundError: `order` names nothing of the module's.
    """
    if order is None:
        return list(names)
    below: dict[str, list[str]] = {}
    for name in names:
        parts = name.split(".")
        for k in range(1, len(parts) + 1):
            below.setdefault(".".join(parts[:k]), []).append(name)
    found: dict[str, None] = {}
    for wish in [order] if isinstance(order, str) else order:
        if wish not in below:
            raise TensorNotFoundError("order= takes names of the module's parameters and submodules", found=wish)
        found |= dict.fromkeys(below[wish])
    return [*found, *(name for name in names if name not in found)]


@dataclass(frozen=True, slots=True)
class Fit:
    """How a module and a checkpoint go together."""

    report: LoadReport
    """What differs."""
    wishes: tuple[Awaited, ...]
    """The parameters that wait, in the order in which they are read."""
    buffers: Mapping[int, str]
    """By the id of a buffer, the checkpoint's name of its data."""
    casts: Mapping[str, torch.dtype]
    """By the checkpoint's name, what to cast to."""

    @classmethod
    def of(
        cls,
        module: nn.Module,
        into: Into,
        names: Sequence[str],
        opened: OpenCheckpoint,
        *,
        dtype: torch.dtype | None,
        strict: bool,
    ) -> Fit:
        """Compare a module with a checkpoint; reads nothing.

        Args:
            module: The target.
            into: Its tensors.
            names: Their names in the order in which they are wanted.
            opened: The checkpoint.
            dtype: Cast floating tensors to it; others, and all without it, go to the module's dtype.
            strict: Missing or unexpected names are an error.

        Raises:
            MismatchError: They do not go together.
            UnsupportedDtypeError: torch has no such dtype, or no such cast.
        """
        infos = {name: header.info(name) for header in opened.headers for name in header.names}
        _, report = into.match(infos, opened.aliases, strict=strict, path=opened.path)
        wishes: list[Awaited] = []
        buffers: dict[int, str] = {}
        casts: dict[str, torch.dtype] = {}
        seen: set[int] = set()
        registered = {id(buffer) for buffer in module.buffers()}
        sources = into.sources
        with_data: dict[int, str] = {}  # of tied names, the first that has data brings it
        for name in names:
            if sources[name][0] in infos:
                with_data.setdefault(id(sources[name][1]), name)
        for name in dict.fromkeys(with_data[key] for n in names if (key := id(sources[n][1])) in with_data):
            source, target = sources[name]
            seen.add(id(target))
            final = _final_dtype(name, infos[source], target, dtype, opened.path)
            casts.setdefault(source, final)
            if isinstance(target, nn.Parameter):
                wishes.append(Awaited(target, name, source, final))
            elif id(target) in registered:
                buffers[id(target)] = source
            else:
                raise MismatchError(
                    "state_dict() shows what is neither parameter nor buffer", path=opened.path, found=name
                )
        _require_meta(module, wishes, seen, opened.path)
        wishes += [
            Awaited(parameter, name, None, parameter.dtype)
            for name, parameter in module.named_parameters()
            if parameter.is_meta and id(parameter) not in seen
        ]
        casts = {name: final for name, final in casts.items() if final != TORCH_DTYPES[infos[name].dtype]}
        return cls(report, tuple(wishes), buffers, casts)


def _final_dtype(name: str, info: TensorInfo, target: torch.Tensor, wish: torch.dtype | None, path: str) -> torch.dtype:
    require_dtypes([info.dtype], path=path)
    own = TORCH_DTYPES[info.dtype]
    final = wish if wish is not None and own.is_floating_point else target.dtype
    if final != own:
        cast(name, torch.empty(1, dtype=own), final)  # it raises now what it would raise when all is under way
    if target.requires_grad and not (final.is_floating_point or final.is_complex):
        raise MismatchError(
            "the parameter wants a gradient, which this dtype cannot have",
            path=path,
            expected="floating",
            found=f"{final} for {name}",
        )
    return final


def _require_meta(module: nn.Module, wishes: Sequence[Awaited], seen: set[int], path: str) -> None:
    """Parameters must be on `meta`, or have nothing in the checkpoint; buffers must not be left there."""
    if real := tuple(wish.name for wish in wishes if not wish.parameter.is_meta):
        raise MismatchError(
            f"these parameters have data already, a warm start fills those on 'meta'; load_into copies: {listed(real)}",
            path=path,
        )
    left = tuple(name for name, buffer in module.named_buffers() if buffer.is_meta and id(buffer) not in seen)
    if left:
        raise MismatchError(
            "the checkpoint does not hold these buffers, and a forward would compute with what is on 'meta'; make them "
            f"on a device: {listed(left)}",
            path=path,
        )


def install_buffers(
    module: nn.Module, buffers: Mapping[int, str], tensors: Mapping[str, torch.Tensor], device: torch.device
) -> None:
    """Put loaded buffers in place, and all others on the device too.

    What is on the right device already is copied into, so that whoever holds it sees the new values.
    """
    made: dict[int, torch.Tensor] = {}
    used: set[str] = set()
    for part in module.modules():
        for leaf, old in part._buffers.items():
            if old is None:
                continue
            if id(old) not in made:
                source = buffers.get(id(old))
                made[id(old)] = old.to(device) if source is None else _placed(old, tensors[source], source in used)
                if source is not None:
                    used.add(source)
            part._buffers[leaf] = made[id(old)]


def _placed(old: torch.Tensor, new: torch.Tensor, is_used: bool) -> torch.Tensor:
    if old.device == new.device:
        with torch.no_grad():
            return old.copy_(new)
    return new.clone() if is_used else new
