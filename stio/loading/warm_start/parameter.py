"""Parameters that wait for their data: on `meta` until it has come, then the real ones, the same objects.

A parameter that waits is of the class `Waiting`. Its `__torch_function__` sees every use from Python, on whatever
path (functional, fused, tied), and holds it until the data is there; questions that need no data are answered at
once. Its `__torch_dispatch__` sees what reaches it from below (functorch, jit, C++) and refuses it: there it could not
become another tensor unnoticed, and torch 2.13 computes garbage from meta operands on the CPU, without an error.
To fill one, the tensor is swapped in first and the class follows: who sees the plain class sees data.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, SupportsIndex

import torch
from torch import nn

from stio.errors import WarmStartError, printable

__all__ = ["Gate", "Slot", "Waiting", "slot_of"]

_SLOT = "_stio_slot"

# torch.utils.swap_tensors does this too, but class first (another thread would compute with a plain parameter on meta),
# and refuses parameters with weak references (those of nn.LSTM have some), which stay right: the object is the same.
_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch._C._swap_tensor_impl


class Gate(Protocol):
    """Where uses wait: one warm start."""

    @property
    def ended(self) -> bool:
        """Whether no more slots will be filled."""

    def wait(self, slots: Sequence[Slot]) -> None:
        """Block until these are filled, or raise because one will never be."""


class Slot:
    """One parameter that waits, from here on until it is filled or restored.

    Args:
        parameter: The parameter; it becomes `Waiting`.
        name: What the module calls it.
        source: What the checkpoint calls its data; None if it has none.
        dtype: What it will be of, and says it is.
        device: Where it will be, and says it is.
        gate: Where its uses wait.
    """

    def __init__(
        self,
        parameter: nn.Parameter,
        *,
        name: str,
        source: str | None,
        dtype: torch.dtype,
        device: torch.device,
        gate: Gate,
    ) -> None:
        self.parameter = parameter
        self.name = name
        self.source = source
        self.dtype = dtype
        self.device = device
        self.gate = gate
        self.filled = False
        """True from the moment on in which the parameter is the real one."""
        self._kind = type(parameter)
        shell = torch.empty(parameter.shape, dtype=dtype, device="meta")
        # Made as `Waiting`, it gets the key by which torch asks `__torch_dispatch__`.
        self._other: nn.Parameter = torch.Tensor._make_subclass(Waiting, shell, parameter.requires_grad)
        parameter.__class__ = Waiting
        try:
            _swap(parameter, self._other)  # which now holds the parameter's own tensor on meta
        except BaseException:
            parameter.__class__ = self._kind
            raise
        setattr(parameter, _SLOT, self)

    def fill(self, tensor: torch.Tensor) -> None:
        """Make the parameter real: with this tensor's memory, and with what it has of its own otherwise."""
        parameter = self.parameter
        with torch._C.DisableTorchFunctionSubclass():
            wants_gradient = parameter.requires_grad
            real: Any = nn.Parameter(tensor, requires_grad=wants_gradient)
            # It takes over what the parameter was: C++ may still hold on to that, and must go on to be refused.
            setattr(real, _SLOT, self)
            real.__class__ = Waiting
            _swap(parameter, real)
            parameter.__class__ = self._kind
            if real.requires_grad != wants_gradient:  # set by another thread meanwhile
                parameter.requires_grad_(real.requires_grad)
            _renew_hooks(parameter)
            if wants_gradient and real._use_count() > 1:
                # `autograd.Function.apply` asks no class, and notes where gradients go before its forward waits.
                real.register_post_accumulate_grad_hook(_pass_on(weakref.ref(parameter)))
        # Another thread may be about to ask what was `Waiting` a moment ago: it lives until the warm start is over.
        self._other = real
        self.filled = True
        delattr(parameter, _SLOT)

    def release(self) -> None:
        """Let go of a parameter that was filled: whoever still holds on to what it was must not hold its memory."""
        del self.parameter, self._other

    def restore(self) -> None:
        """Make the parameter what it was before: on `meta`, and waiting for nobody."""
        parameter = self.parameter
        with torch._C.DisableTorchFunctionSubclass():
            self._other.requires_grad_(parameter.requires_grad)
            _swap(parameter, self._other)
        parameter.__class__ = self._kind
        delattr(parameter, _SLOT)


def _renew_hooks(parameter: nn.Parameter) -> None:
    """Hooks for gradients stay with the object, but torch reads them from the tensor inside."""
    for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        if hooks := getattr(parameter, name, None):
            setattr(parameter, name, hooks)


def _pass_on(parameter: weakref.ref[nn.Parameter]) -> Callable[[torch.Tensor], None]:
    """Return a hook that gives a gradient for what a parameter was to the parameter."""

    def pass_on(other: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient, other.grad = other.grad, None
        owner = parameter()
        if owner is not None and gradient is not None:
            owner.grad = gradient if owner.grad is None else owner.grad + gradient

    return pass_on


class Waiting(nn.Parameter):
    """A parameter without data; see the file's strategy. Nobody makes one: parameters become it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Hold a use from Python until the data is there, then let it go on with the real parameter."""
        kwargs = kwargs or {}
        slots = list(dict.fromkeys(_slots_in((args, kwargs))))
        if slots and func not in _ANSWERED:
            if func in _OF_THE_DEVICE:
                return _OF_THE_DEVICE[func](slots[0].device)
            _wait(slots)
            if left := list(_slots_in((args, kwargs))):  # what a parameter was, kept by C++ and wrapped again
                raise _too_deep(func, left)
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stubs show a function where a class method is meant
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Refuse a use from below Python, where it is too late to wait.

        Raises:
            WarmStartError: Always.
        """
        raise _too_deep(func, _slots_in((args, kwargs)))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        _wait(list(_slots_in(self)))
        return copy.deepcopy(self, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        _wait(list(_slots_in(self)))
        return self.__reduce_ex__(protocol)

    def __repr__(self) -> str:  # type: ignore[override]  # as nn.Parameter's
        slot = slot_of(self)
        if slot is None:
            return "Parameter whose data has come this moment"
        what = "has no data" if slot.gate.ended else "waits for its data"
        return f"Parameter {printable(slot.name)} {what}: {list(self.shape)}, {slot.dtype}, {slot.device}"


def slot_of(parameter: Waiting) -> Slot | None:
    """Return where a parameter waits; None if its data came a moment ago."""
    return vars(parameter).get(_SLOT)


def _slots_in(value: Any) -> Iterator[Slot]:
    """Yield the slots of all parameters that still wait in nested arguments."""
    if isinstance(value, Waiting):
        if (slot := slot_of(value)) is not None:
            yield slot
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _slots_in(item)
    elif isinstance(value, dict):
        yield from _slots_in(list(value.values()))


def _too_deep(func: Any, slots: Iterable[Slot]) -> WarmStartError:
    names = ", ".join(printable(slot.name) for slot in dict.fromkeys(slots)) or "a parameter"
    return WarmStartError(
        f"{func} came to {names} below torch's Python functions, or through what was captured before the data was "
        "there; trace, script and transform the module after `done()`"
    )


def _wait(slots: Sequence[Slot]) -> None:
    for gate in dict.fromkeys(slot.gate for slot in slots):
        gate.wait([slot for slot in slots if slot.gate is gate])


def _getters(*names: str) -> list[Any]:
    return [getattr(torch.Tensor, name).__get__ for name in names]


_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous"),
    *("is_floating_point", "is_complex", "is_signed", "is_inference", "requires_grad_", "__len__", "__hash__"),
)
_ANSWERED = frozenset(
    [
        *_getters("shape", "dtype", "layout", "ndim", "itemsize", "nbytes", "is_meta", "is_sparse", "is_quantized"),
        *_getters("is_nested", "is_mkldnn", "requires_grad", "grad", "grad_fn", "is_leaf", "retains_grad", "output_nr"),
        *_getters("_version"),
        vars(torch._C.TensorBase)["requires_grad"].__set__,
        *(getattr(torch.Tensor, name) for name in _METHODS),
        *(torch.numel, torch.is_floating_point, torch.is_complex, torch.is_signed, torch.is_inference),
    ]
)
"""What is known of a parameter without its data. None of it lets go of the GIL, so none runs while it is swapped."""

_OF_THE_DEVICE: dict[Any, Callable[[torch.device], Any]] = dict(
    zip(
        _getters("device", "is_cpu", "is_cuda"),
        (lambda device: device, lambda device: device.type == "cpu", lambda device: device.type == "cuda"),
        strict=True,
    )
)
"""Where a parameter will be: `x.to(weight.device)` must not send x to `meta`."""
