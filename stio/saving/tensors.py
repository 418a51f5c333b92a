"""The tensors of a save: by name, from a mapping or a module; and which of several names of one tensor a module keeps.

transformers, and libraries with the same layout, read a checkpoint by the names in its files. The classes of such a
module declare in `_tied_weights_keys` which names they restore from others: a mapping of patterns to sources since
transformers 5, before that a list of patterns.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from stio.device.describe import LazyTensor, state_of_object
from stio.device.tensor_memory import require_own_data
from stio.format.shared import UNDECLARED, TiedNames
from stio.runtime.locks import require_unlocked

TensorsLike: TypeAlias = Mapping[str, torch.Tensor] | Mapping[str, torch.Tensor | LazyTensor] | nn.Module
"""Tensors by name, some of which may be lazy, or a module, to save its `state_dict()`."""

_TIED_KEYS = "_tied_weights_keys"


@dataclass(frozen=True, slots=True)
class NamedTensors:
    """What a save begins with."""

    by_name: dict[str, torch.Tensor | LazyTensor]
    """The tensors, in the caller's order; a new dict."""
    tied: TiedNames = UNDECLARED
    """What the module declares, if they are those of a module."""


def tensors_of(tensors: TensorsLike) -> NamedTensors:
    """Return the tensors to save, by name.

    Raises:
        TypeError: Neither a mapping nor a module.
        ValueError: A tensor of the module stands for data that is elsewhere.
    """
    require_unlocked()
    if isinstance(tensors, nn.Module):
        by_name = dict(tensors.state_dict())
        require_own_data(by_name, tensors.parameters())
        return NamedTensors(by_name, tied_names(tensors, by_name))
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"tensors must be a mapping of names to tensors or a module, not {type(tensors).__name__}{_advice(tensors)}"
        )
    return NamedTensors(dict(tensors))


def _advice(value: object) -> str:
    """Return what to pass instead of a value that is neither a mapping nor a module."""
    if isinstance(value, str | os.PathLike):
        return "; the tensors come first, then the destination"
    if isinstance(value, torch.Tensor):
        return '; pass {"name": tensor}'
    if isinstance(value, list | tuple):
        return "; save_state takes lists and other nested state"
    if isinstance(value, Iterator):
        return "; pass dict(...) of names and tensors"
    found = state_of_object(value)
    return f"; save_state takes {found}" if found else ""


def tied_names(module: nn.Module, names: Iterable[str]) -> TiedNames:
    """Return what a module and its submodules declare about the names of its state dict."""
    sources: dict[str, str | None] = {}
    required: set[str] = set()
    for path, submodule in module.named_modules(remove_duplicate=False):
        if not hasattr(submodule, _TIED_KEYS):
            continue
        prefix = f"{path}." if path else ""
        own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        required.update(prefix + name for name in own)
        for pattern, source in _declared(submodule):
            for name in own:
                if source is None and pattern.search(name):
                    sources[prefix + name] = None
                elif source is not None and (found := pattern.match(name)):
                    sources[prefix + name] = f"{prefix}{source}{name[found.end() :]}"
    return TiedNames(sources, required)


def _declared(module: Any) -> Iterator[tuple[re.Pattern[str], str | None]]:
    """Yield the patterns of names that a module restores, each with the start of the name it takes instead."""
    keys = getattr(module, _TIED_KEYS) or ()
    config = getattr(module, "config", None)
    if isinstance(keys, Mapping):
        if config is not None and not getattr(config, "tie_word_embeddings", False):
            return  # transformers ties nothing then, whatever the class declares
        pairs: Iterable[tuple[Any, Any]] = keys.items()
    else:
        pairs = ((key, None) for key in ([keys] if isinstance(keys, str) else keys))
    for key, source in pairs:
        try:
            pattern = re.compile(key)
        except re.error:  # a name, and no pattern
            pattern = re.compile(re.escape(key))
        yield pattern, source
