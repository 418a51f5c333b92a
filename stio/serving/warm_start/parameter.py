"""Placeholder parameters: on `meta` until their data is loaded, then the real parameters, the same objects.

A parameter without data has the class `PlaceholderParameter`. torch calls its `__torch_function__` for every use from
Python (functional, fused, tied), which blocks until the data is loaded; uses that need no data return at once. torch
calls its `__torch_dispatch__` for uses from below Python (functorch, jit, C++), which raises an error: there the
parameter cannot be replaced any more, and torch 2.13 computes wrong values from meta operands, without an error.
A fill swaps the tensor first and sets the class after that: a parameter of a plain class always has data.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from torch import nn

from stio.errors import WarmStartError, listed, printable

_ATTRIBUTE = "_stio_placeholder"

# torch.utils.swap_tensors does this too, but it sets the class first (another thread would compute with a plain
# parameter on meta), and raises an error for parameters with weak references (those of nn.LSTM have some). Such
# references stay valid here: the object is the same.
_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl

_HOOKS: tuple[Any, ...] = tuple(
    vars(torch._C.TensorBase)[name] for name in ("_backward_hooks", "_post_accumulate_grad_hooks")
)
"""torch's own attributes of gradient hooks, which a subclass may override."""


@dataclass(frozen=True, slots=True)
class MatchedParameter:
    """One parameter of the module, and its data in the checkpoint."""

    parameter: nn.Parameter
    """The parameter, on `meta`."""
    name: str
    """Name of the parameter in the module."""
    source: str | None
    """Name of its data in the checkpoint; None if the checkpoint has no data for it."""
    dtype: torch.dtype
    """Dtype of the filled parameter; the placeholder reports it too."""


class Placeholder:
    """One parameter without data, from its construction until it is filled or restored.

    Args:
        found: The parameter, whose class becomes `PlaceholderParameter`, and its data.
        device: Device of the filled parameter; the placeholder reports it too.
        wait: Called by each use, with all placeholders of one load that the use needs. Blocks until they are filled;
            raises an error if one of them will not be filled.
        has_ended: Whether no more placeholders of its load will be filled.
    """

    def __init__(
        self,
        found: MatchedParameter,
        *,
        device: torch.device,
        wait: Callable[[Sequence[Placeholder]], None],
        has_ended: Callable[[], bool],
    ) -> None:
        parameter = self.parameter = found.parameter
        self.name, self.source, self.dtype, self.device = found.name, found.source, found.dtype, device
        """Of `found`; and where it is loaded to."""
        self.wait = wait
        self.has_ended = has_ended
        self.filled = False
        """Whether the parameter is the real one."""
        self._kind = type(parameter)
        shell = torch.empty(parameter.shape, dtype=self.dtype, device="meta")
        # Made as this class it gets the dispatch key by which torch calls `__torch_dispatch__`.
        self._other: nn.Parameter = torch.Tensor._make_subclass(PlaceholderParameter, shell, parameter.requires_grad)
        parameter.__class__ = PlaceholderParameter
        try:
            _swap(parameter, self._other)  # which now holds the parameter's own tensor on meta
        except BaseException:
            parameter.__class__ = self._kind
            raise
        setattr(parameter, _ATTRIBUTE, self)

    def fill(self, tensor: torch.Tensor) -> None:
        """Make the parameter real: it gets the memory of this tensor; its other attributes are unchanged.

        No code of a subclass of `nn.Parameter` runs: the caller may hold a lock.
        """
        parameter = self.parameter
        with torch._C.DisableTorchFunctionSubclass():
            requires_grad = parameter.requires_grad
            real: Any = nn.Parameter(tensor, requires_grad=requires_grad)
            # `real` gets the old tensor. C++ may still hold a reference to that, and its use must raise an error.
            vars(real)[_ATTRIBUTE] = self
            real.__class__ = PlaceholderParameter
            _swap(parameter, real)
            parameter.__class__ = self._kind
            if real.requires_grad != requires_grad:  # another thread has set it in between
                torch.Tensor.requires_grad_(parameter, real.requires_grad)
            _renew_hooks(parameter)
            if requires_grad and real._use_count() > 1:
                # `autograd.Function.apply` ignores the class, and records the target of gradients before its forward
                # waits.
                real.register_post_accumulate_grad_hook(_forward_gradient(weakref.ref(parameter)))
        # Another thread may still use the object of the old class, so it exists until the warm start has ended.
        self._other = real
        self.filled = True
        del vars(parameter)[_ATTRIBUTE]

    def release(self) -> None:
        """Drop the references to a filled parameter: a reference to its old tensor must not hold its memory."""
        del self.parameter, self._other

    def restore(self) -> None:
        """Undo the constructor: the parameter becomes a plain one on `meta` again."""
        parameter = self.parameter
        with torch._C.DisableTorchFunctionSubclass():
            self._other.requires_grad_(parameter.requires_grad)
            _swap(parameter, self._other)
        parameter.__class__ = self._kind
        delattr(parameter, _ATTRIBUTE)


def _renew_hooks(parameter: nn.Parameter) -> None:
    """Set the gradient hooks again: they are attributes of the object, but torch reads them from the tensor inside."""
    for hooks_of in _HOOKS:
        if hooks := hooks_of.__get__(parameter):
            hooks_of.__set__(parameter, hooks)


def _forward_gradient(parameter: weakref.ref[nn.Parameter]) -> Callable[[torch.Tensor], None]:
    """Return a hook that moves a gradient of the old tensor to the parameter."""

    def forward_gradient(other: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient, other.grad = other.grad, None
        owner = parameter()
        if owner is not None and gradient is not None:
            owner.grad = gradient if owner.grad is None else owner.grad + gradient

    return forward_gradient


class PlaceholderParameter(nn.Parameter):
    """A parameter without data; see the module's docstring. `Placeholder` sets this class; none is constructed."""

    _is_placeholder = True  # for `stio.loading.targets.module_tree`: a load gives it its data

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Block a use from Python until the data is loaded, then run it with the real parameter."""
        kwargs = kwargs or {}
        placeholders = list(dict.fromkeys(_placeholders_in((args, kwargs))))
        if placeholders and func not in _NEED_NO_DATA:
            if func in _DEVICE_QUERIES:
                return _DEVICE_QUERIES[func](placeholders[0].device)
            _wait(placeholders)
            if left := list(_placeholders_in((args, kwargs))):  # the old tensor, which C++ held and wrapped again
                raise _use_error(func, left)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs show a function where a class method is meant
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Raise an error for a use from below Python, where it is too late to wait.

        Raises:
            WarmStartError: Always.
        """
        raise _use_error(func, _placeholders_in((args, kwargs)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait(list(_placeholders_in(self)))
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        _wait(list(_placeholders_in(self)))
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]  # as nn.Parameter's
        placeholder = placeholder_of(self)
        if placeholder is None:
            return "Parameter that another thread has just filled"
        what = "has no data" if placeholder.has_ended() else "waits for its data"
        name = printable(placeholder.name)
        return f"Parameter {name} {what}: {list(self.shape)}, {placeholder.dtype}, {placeholder.device}"


def placeholder_of(parameter: PlaceholderParameter) -> Placeholder | None:
    """Return the placeholder of a parameter; None if it has just been filled."""
    return vars(parameter).get(_ATTRIBUTE)


def _placeholders_in(value: Any) -> Iterator[Placeholder]:
    """Yield the placeholders of all parameters without data in nested arguments."""
    if isinstance(value, PlaceholderParameter):
        if (placeholder := placeholder_of(value)) is not None:
            yield placeholder
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _placeholders_in(item)
    elif isinstance(value, dict):
        yield from _placeholders_in(list(value.values()))


def _use_error(func: Any, placeholders: Iterable[Placeholder]) -> WarmStartError:
    found = [placeholder.name for placeholder in dict.fromkeys(placeholders)]
    names = listed(found) if found else "a parameter"
    return WarmStartError(
        f"{func} uses {names} below torch's Python functions, or by a graph that was captured before the data was "
        "loaded; trace, script and transform the module after `done()`"
    )


def _wait(placeholders: Sequence[Placeholder]) -> None:
    for wait in dict.fromkeys(placeholder.wait for placeholder in placeholders):  # one for each load
        wait([placeholder for placeholder in placeholders if placeholder.wait == wait])


def _getters(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "requires_grad_", "__len__", "__hash__"),
)
_NEED_NO_DATA = frozenset(
    [
        *_getters("shape", "dtype", "layout", "ndim", "itemsize", "nbytes", "is_meta", "is_sparse", "is_quantized"),
        *_getters("is_nested", "is_mkldnn", "requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "output_nr"),
        *_getters("_version"),
        vars(torch._C.TensorBase)["requires_grad"].__set__,
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference),
    ]
)
"""Uses that need no data. None of them releases the GIL, so none runs while a parameter is swapped."""

_DEVICE_QUERIES: dict[Any, Callable[[torch.device], Any]] = dict(
    zip(
        _getters("device", "is_cpu", "is_cuda"),
        (lambda device: device, lambda device: device.type == "cpu", lambda device: device.type == "cuda"),
        strict=True,
    )
)
"""Uses that return the device of the filled parameter: `x.to(weight.device)` must not send x to `meta`."""
