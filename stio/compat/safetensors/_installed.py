"""The objects that `stio.compat.install` puts in the place of safetensors' own.

Functions are the drop-in's, as objects of their own: so `uninstall` finds every module that has taken one of them, and
changes no module that imports the drop-in itself. In addition to the drop-in, `safe_open` passes the frameworks that
stio does not support to the original, and `isinstance` accepts the original's objects.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import update_wrapper
from types import FunctionType
from typing import Any

from stio.compat.safetensors import _open, _tensors
from stio.compat.safetensors import numpy as numpy_names
from stio.compat.safetensors import torch as torch_names

originals: dict[str, Any] = {}
"""What the original's release has of `REPLACEMENTS["safetensors"]`."""


class _KnowsOriginal(type):
    """Type of the classes here: the drop-in's class and the original's are subclasses, for `isinstance` too."""

    drop_in: type
    """The drop-in's class."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(cls, instance) or isinstance(instance, _kinds(cls))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return type.__subclasscheck__(cls, subclass) or issubclass(subclass, _kinds(cls))


def _kinds(cls: _KnowsOriginal) -> tuple[type, ...]:
    if "drop_in" not in vars(cls):  # a subclass of users
        return ()
    return tuple(kind for kind in (cls.drop_in, originals.get(cls.__name__)) if isinstance(kind, type))


class safe_open(_open.safe_open, metaclass=_KnowsOriginal):  # noqa: N801 -- the original's name
    __doc__ = _open.safe_open.__doc__
    __slots__ = ()
    drop_in = _open.safe_open

    def __new__(
        cls,
        filename: str | os.PathLike[str],
        framework: str,
        device: str | int | None = "cpu",
        *,
        backend: str = "mmap",
    ) -> Any:
        if cls is safe_open and _open.FRAMEWORKS.get(framework) == "other":  # only the original serves it
            options = {} if backend == "mmap" else {"backend": backend}  # before 0.8 there is no such argument
            return originals["safe_open"](filename, framework, device, **options)
        return super().__new__(cls)


class PySafeSlice(metaclass=_KnowsOriginal):
    """What `safe_open.get_slice` returns, for `isinstance`."""

    drop_in = _open.PySafeSlice


class PrefetchLoader(metaclass=_KnowsOriginal):
    """What `safe_open.prefetch` returns, for `isinstance`."""

    drop_in = _tensors.PrefetchLoader


class TensorMeta(metaclass=_KnowsOriginal):
    """What `safe_open.get_tensor_meta` returns, for `isinstance`."""

    drop_in = _open.TensorMeta


def _own(function: Callable[..., Any], module: str) -> Any:
    """Return a function as an object of its own, which pickles by its place in this module."""
    assert isinstance(function, FunctionType)
    place = f"{module}_{function.__name__}"
    own = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    own.__kwdefaults__ = function.__kwdefaults__
    update_wrapper(own, function)
    own.__module__, own.__qualname__ = __name__, place
    globals()[place] = own
    return own


_TORCH = ("load", "load_file", "load_model", "save", "save_file", "save_model", "storage_ptr", "storage_size")
_NUMPY = ("load", "load_file", "save", "save_file")

REPLACEMENTS: dict[str, dict[str, Any]] = {
    "safetensors": {
        "PrefetchLoader": PrefetchLoader,
        "PySafeSlice": PySafeSlice,
        "TensorMeta": TensorMeta,
        "deserialize": _own(numpy_names.deserialize, "raw"),
        "safe_open": safe_open,
        "serialize": _own(numpy_names.serialize, "raw"),
        "serialize_file": _own(numpy_names.serialize_file, "raw"),
    },
    "safetensors.torch": {name: _own(getattr(torch_names, name), "torch") for name in _TORCH},
    "safetensors.numpy": {name: _own(getattr(numpy_names, name), "numpy") for name in _NUMPY},
}
"""What stands in place of the names of each module of the original."""
