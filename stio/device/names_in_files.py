"""The names and shapes in which transformers 5 writes the tensors of a model, where they are not those of the module.

`save_pretrained` renames, splits and transposes tensors of many models, and `from_pretrained` reverses that. The
function of transformers that does it is called here, on the module's own tensors, if a program has imported it: nothing
of transformers is imported, and nothing is copied. Loads fill the resulting views, and saves warn of other names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode


class FileNames:
    """The names that transformers gives to the tensors of a module in files, where these differ from the module's.

    Args:
        module: A model of transformers, or a module with such submodules.
        as_read: A model that `from_pretrained` has read from files with other names is written with those; False: with
            the names that a new model is written with.
    """

    def __init__(self, module: nn.Module, *, as_read: bool = True) -> None:
        self._module, self._as_read = module, as_read
        self.own: dict[str, str] = {}
        """A name of each kind that only the module has, by its form with 0 for each number."""
        self.in_files: dict[str, str] = {}
        """A name of each kind that only the files have."""
        if next(_models_of_transformers(module), None) is None:
            return
        named = chain(module.named_parameters(), module.named_buffers())
        tensors = {_unnumbered(name): (name, tensor) for name, tensor in named if not is_lazy(tensor)}
        empty = {name: torch.empty(one.shape, dtype=one.dtype, device="meta") for name, one in tensors.values()}
        own, files = ({_unnumbered(name): name for name in names} for names in (empty, self.convert(empty)))
        self.own = {key: name for key, name in own.items() if key not in files}
        self.in_files = {key: name for key, name in files.items() if key not in own}

    def has_any(self, names: Iterable[str]) -> bool:
        """Return whether a name is one of those that only the files have, but for numbers."""
        return bool(self.in_files) and not self.in_files.keys().isdisjoint(map(_unnumbered, names))

    def convert(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors of the module under the names, and in the shapes, in which transformers 5 writes them.

        Its own function is called, if a program has imported it. Copies nothing that torch can describe as a view of
        the same memory. Where the conversion fails, the tensors are returned as they are.
        """
        result = dict(tensors)
        for prefix, part in _models_of_transformers(self._module):
            own = {name.removeprefix(prefix): result[name] for name in tensors if name.startswith(prefix)}
            with suppress(Exception), torch.no_grad(), _Views():  # of a quantizer, or of another library's class
                if not self._as_read:
                    part = copy(part)
                    part.__dict__.pop("_weight_conversions", None)
                converted = sys.modules["transformers.core_model_loading"].revert_weight_conversion(part, own)
                result = {name: tensor for name, tensor in result.items() if not name.startswith(prefix)}
                result.update((prefix + name, tensor) for name, tensor in converted.items())
        return result


def _models_of_transformers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost ones, each with the prefix of its names."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None or "transformers.core_model_loading" not in sys.modules:  # before transformers 5
        return
    outermost = "\0"
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(part, kind) and not prefix.startswith(outermost):
            outermost = prefix
            yield prefix, part


class _Views(TorchFunctionMode):
    """Keeps views as they are where the code inside would copy them."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if function is torch.Tensor.contiguous else function(*args, **(kwargs or {}))


def _unnumbered(name: str) -> str:
    """Return a name with 0 for each of its numbers: names of all layers, and of all experts, become one."""
    return ".".join("0" if part.isdigit() else part for part in name.split("."))
