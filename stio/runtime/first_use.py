"""Stand-ins for public names that are used on a running event loop before their modules are imported.

The modules behind `stio.load` and others import torch, which takes seconds. On a running loop `stio.__getattr__`
returns a stand-in: it imports the modules on a thread, when it is awaited or entered, and then calls the real object.
Every other use, as in `stio.Saver | None` or `help(stio.Saver)`, is one of the real object, and imports it at once. A
stand-in stays valid for ever, so it may be kept under another name.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import operator
import os
import sys
from collections.abc import Callable, Collection
from importlib.util import find_spec
from typing import Any

from stio.runtime.operation import Operation

_TORCH_LIBRARIES = {"libtorch_global_deps.so": "RTLD_GLOBAL", "libtorch_python.so": "RTLD_LOCAL"}
"""Libraries of torch in the order and with the modes in which `import torch` loads them."""


def coroutine_function(
    name: str, resolve: Callable[[], Any], find: Callable[[], Callable[..., Any]] | None = None
) -> Callable[..., Any]:
    """Return a coroutine function that imports another one on a thread, and then calls it.

    It is a plain function, because frameworks check the kind of a function before they call it.

    Args:
        name: Its public name.
        resolve: Imports the modules.
        find: Returns the function, once they are imported. None: `resolve` returns it.
    """
    get = find or resolve

    async def call(*args: Any, **kwargs: Any) -> Any:
        await import_on_thread(resolve)
        return await get()(*args, **kwargs)

    call.__name__ = call.__qualname__ = name
    call.__module__ = "stio"
    call.__doc__ = f"Import the module of `{name}` on a thread, and call it. Its own text is there after the import."
    call.__wrapped__ = Factory(get)  # type: ignore[attr-defined]  # for `inspect.signature`
    return call


class StandIn:
    """Stands for an object. What this class and those below it do not define is done by the object itself.

    The object is found, in the calling thread, when this is needed. That may import its modules.

    Args:
        find: Finds or makes the object, and imports its modules.
        methods: Names of coroutine methods that may be called before the object is found.
        resolve: Imports the modules only; these methods call it on a thread.
    """

    _OWN = frozenset({"__reduce_ex__"})
    """Attributes that are not those of the object."""

    def __init__(
        self, find: Callable[[], Any], methods: Collection[str] = (), resolve: Callable[[], Any] | None = None
    ) -> None:
        own = {"find": find, "methods": methods, "resolve": resolve or find, "found": {}}
        for name, value in own.items():
            object.__setattr__(self, f"_{name}", value)

    def __getattribute__(self, name: str) -> Any:
        if name in type(self)._OWN:
            return _own(self, name)
        if name in _own(self, "_methods") and not _own(self, "_found"):
            return coroutine_function(name, _own(self, "_resolve"), lambda: getattr(_real(self), name))
        return getattr(_real(self), name)

    def __repr__(self) -> str:
        return repr(_real(self)) if _own(self, "_found") else object.__repr__(self)

    def __reduce_ex__(self, protocol: object) -> tuple[Callable[..., Any], tuple[Any]]:
        return copy.copy, (_real(self),)  # what is copied and pickled is the object


class Factory(StandIn):
    """Stands for a class, or a function, that makes an asynchronous context manager.

    Args:
        resolve: Imports and returns it.
        methods: Names of coroutine methods of what it makes, which may be called before the block is entered.
    """

    # Not its class either: what says that it is a type, and is none, fails in functions of `type`.
    _OWN = StandIn._OWN | {"__bases__", "__call__", "__class__", "__mro_entries__", "__origin__", "__signature__"}

    def __init__(self, resolve: Callable[[], Any], methods: Collection[str] = ()) -> None:
        super().__init__(resolve)
        object.__setattr__(self, "_methods_of_made", methods)

    def __call__(self, *args: Any, **kwargs: Any) -> Made:
        """Return what stands for the object; its arguments are checked when it is made."""
        return Made(lambda: _real(self)(*args, **kwargs), _own(self, "_methods_of_made"), _own(self, "_find"))

    @property
    def __bases__(self) -> tuple[type, ...]:
        return (_real(self),)  # where `issubclass` looks for the classes above one that is no type

    @property
    def __origin__(self) -> Any:
        return _real(self)  # `help` shows it

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(_real(self))

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        return (_real(self),)


class Made(StandIn):
    """Stands for what a `Factory` makes. The object is made when the block is entered, or when it is needed."""

    _OWN = StandIn._OWN | {"__aenter__", "__aexit__"}

    async def __aenter__(self) -> Any:
        await import_on_thread(_own(self, "_resolve"))
        return await _real(self).__aenter__()

    async def __aexit__(self, *error: Any) -> Any:
        return await _real(self).__aexit__(*error)


_own = object.__getattribute__


def _real(stand_in: StandIn) -> Any:
    found = _own(stand_in, "_found")
    if not found:
        found.setdefault("object", _own(stand_in, "_find")())  # one step: two threads may do this
    return found["object"]


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "__aiter__": aiter,
    "__bool__": bool,
    "__contains__": operator.contains,
    "__delattr__": delattr,
    "__dir__": dir,
    "__enter__": lambda real: real.__enter__(),
    "__eq__": operator.eq,
    "__exit__": lambda real, *error: real.__exit__(*error),
    "__hash__": hash,
    "__instancecheck__": lambda real, value: isinstance(value, real),
    "__iter__": iter,
    "__len__": len,
    "__or__": operator.or_,
    "__ror__": lambda real, other: other | real,
    "__setattr__": setattr,
    "__subclasscheck__": lambda real, kind: issubclass(kind, real),
}
"""What Python looks up in the class of an object, and not by `__getattribute__`."""


def _forward(operation: Callable[..., Any]) -> Callable[..., Any]:
    return lambda stand_in, *args: operation(_real(stand_in), *args)


for _name, _operation in _OPERATIONS.items():
    setattr(StandIn, _name, _forward(_operation))


async def import_on_thread(resolve: Callable[[], object]) -> None:
    """Call a function that imports modules on a thread, and wait for it; a cancel waits too."""

    def body(operation: Operation[None]) -> None:
        load_torch_libraries()
        resolve()

    await Operation(body, name="import").wait()


def load_torch_libraries() -> None:
    """Load the libraries of torch without the GIL; Linux only.

    `import torch` holds the GIL while the system loads and links them: 0.24 s with warm files, seconds with cold ones,
    in which no other thread runs. After this call the longest such time is 0.05 s (torch 2.13 for CPUs, 2 cores).
    """
    if sys.platform != "linux" or "torch" in sys.modules:
        return
    try:
        found = find_spec("torch")
        dlopen = ctypes.CDLL(None).dlopen  # called like this, without the GIL
    except (AttributeError, ImportError, OSError, ValueError):
        return
    if found is None or found.origin is None:
        return
    dlopen.restype, dlopen.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_int]
    for name, mode in _TORCH_LIBRARIES.items():  # one that fails here fails again, with its error, in `import torch`
        path = os.path.join(os.path.dirname(found.origin), "lib", name)
        dlopen(os.fsencode(path), os.RTLD_NOW | getattr(os, mode))
