"""`install` and `uninstall`: stio's drop-in in the place of safetensors, for all code of this process.

The attributes of safetensors' modules are replaced, and every global variable of a loaded module that is one of the
original objects (`from safetensors.torch import load_file`). Modules that are imported later find stio's objects in
safetensors' modules. Each place is recorded before it is changed. `uninstall` puts the original back there, and in each
module that took one of stio's objects meanwhile; a name that other code has replaced since stays.

`_settle` alone changes names: it makes them be as the list of installations says, and starts again if a signal handler
has changed the list meanwhile. Each step can be repeated after an interruption.

`SafetensorError` and `TensorSpec` stay the original's. While installed, stio's error class has the original's as its
base, so that every `except` catches it, however it refers to the class. stio's functions take the original's
`TensorSpec`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType, ModuleType
from typing import Any, Self

from stio import process
from stio.process import new_lock

SUPPORTED = ((0, 5), (0, 10))
"""Releases of safetensors of which names, arguments and methods were compared: from the first, before the second."""

_RANGE = "safetensors>=0.5,<0.10"
_RUST = "safetensors._safetensors_rust"  # some programs import from it
_REPLACING = "stio.compat.safetensors._installed"


class _State:
    """What is installed in this process."""

    def __init__(self) -> None:
        self.lock = new_lock(of_callers=True)
        self.installations: list[Installation] = []  # those that are in effect; changed in single steps
        self.places: list[tuple[str, dict[str, Any], str, Any, Any]] = []
        """Module, its globals, name, original and replacement of each global variable that was replaced."""
        self.is_replaced: bool | None = False  # whether stio's objects are in place; None: some may be
        self.originals: dict[int, tuple[Any, Any]] = {}  # replacement and its last original, by the first's identity


_state = _State()


@process.after_fork_in_child
def _settle_in_child() -> None:
    """Complete what a thread of the parent had begun. What was installed stays."""
    _state.lock = new_lock(of_callers=True)
    _settle()


class Installation:
    """What `install` returns. A context manager: leaving the block ends this installation.

    Without a block the installation stays until `uninstall`, or until the process ends.
    """

    __module__ = "stio.compat"

    def __init__(self, version: str) -> None:
        self._version = version

    def __repr__(self) -> str:
        return f"<Installation: safetensors {self._version}, {'active' if self.is_active else 'not active'}>"

    @property
    def version(self) -> str:
        """Version of the safetensors package that was found."""
        return self._version

    @property
    def is_active(self) -> bool:
        """Whether this installation is in effect."""
        return self in _state.installations

    @property
    def replaced(self) -> Mapping[str, tuple[str, ...]]:
        """Names that stio replaced, by the module that has them. Empty when nothing is installed.

        Modules that were imported later are not in it: they took their names from safetensors' modules.
        """
        found: dict[str, list[str]] = {}
        for module, _, name, _, _ in _state.places.copy():
            found.setdefault(module, []).append(name)
        return MappingProxyType({module: tuple(sorted(set(names))) for module, names in sorted(found.items())})

    def uninstall(self) -> None:
        """End this installation. The last one that ends restores safetensors' own objects. Idempotent."""
        with _state.lock:
            try:
                _state.installations.remove(self)
            except ValueError:
                return
            _settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.uninstall()


def install(*, any_version: bool = False) -> Installation:
    """Let every framework of this process use stio where it uses safetensors.

    The call takes effect at once, for modules that are loaded and for those that will be: `safetensors`,
    `safetensors.torch` and `safetensors.numpy`, and each module that has imported names from them. It is for the whole
    process and all threads. It imports torch. A forked child has what its parent had; other child processes call
    `install` themselves.

    Calls may nest. The originals come back when each `Installation` has ended, or at `uninstall`.

    Not replaced, so that they go on using the original: default arguments, closures, entries of dicts and lists,
    attributes of classes and instances, objects that are no modules in `sys.modules`, files that are open, programs in
    Rust. The functions of `safetensors.flax`, `.tensorflow`, `.paddle` and `.mlx` stay too: they read by the original,
    and what they save through `safetensors.numpy` stio saves.

    Args:
        any_version: Also accept a release of safetensors with which stio was not compared. Names, arguments and
            what they do may differ.

    Returns:
        A context manager that ends this installation, with a table of what was replaced.

    Raises:
        ImportError: The package safetensors is not installed.
        RuntimeError: Its release is not supported. Nothing was changed.
    """
    # Imports and checks come before the lock: another thread may import a module that calls `install`.
    version = _supported_version(any_version)
    for module in ("safetensors.torch", "safetensors.numpy", _REPLACING):
        import_module(module)
    installation = Installation(version)
    with _state.lock:
        try:
            _state.installations.append(installation)
            _settle()
        except BaseException:
            installation.uninstall()
            raise
    return installation


def uninstall() -> None:
    """End all installations: safetensors' own objects are back in each place that still has stio's.

    A name that other code has replaced meanwhile stays as it is. If that code puts stio's object back later
    (`mock.patch`), a further call restores it. Does nothing if nothing was installed.
    """
    with _state.lock:
        _state.installations.clear()
        if _state.originals:
            _state.is_replaced = None
        _settle()


def _supported_version(any_version: bool) -> str:
    try:
        version = str(import_module("safetensors").__version__)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"stio.compat.install() replaces the names of safetensors, which is not installed: pip install '{_RANGE}'"
        ) from error
    found = re.match(r"(\d+)\.(\d+)", version)
    lowest, end = SUPPORTED
    if not any_version and not (found and lowest <= (int(found[1]), int(found[2])) < end):
        raise RuntimeError(
            f"stio.compat.install() supports {_RANGE}, and found {version}: install a release of that range, or call "
            "install(any_version=True) to try it"
        )
    return version


def _settle() -> None:
    """Replace or restore names until they are as `installations` says. The caller holds the lock.

    A signal handler may interrupt it anywhere and call `install` or `uninstall`. The rest of this call may undo what
    that did; the condition of the loop finds it.
    """
    while _state.is_replaced is not (is_wanted := bool(_state.installations)):
        _state.is_replaced = None
        if is_wanted:
            _replace_all()
        else:
            _restore_all()
        _state.is_replaced = is_wanted


def _replace_all() -> None:
    """Replace the originals in all loaded modules."""
    replacing = import_module(_REPLACING)
    homes = [(name, sys.modules[name]) for name in (*replacing.REPLACEMENTS, _RUST) if name in sys.modules]
    pairs: dict[int, tuple[Any, Any]] = {}  # original and replacement, by the original's identity
    for module, home in homes:
        for name, replacement in replacing.REPLACEMENTS["safetensors" if module == _RUST else module].items():
            original = vars(home).get(name, replacement)
            if original is not replacement and callable(original):
                pairs[id(original)] = original, replacement
                _state.originals[id(replacement)] = replacement, original
    for replacement, original in _state.originals.values():  # where the replacement was in place already
        pairs.setdefault(id(original), (original, replacement))
    found = {name: _state.originals.get(id(value)) for name, value in replacing.REPLACEMENTS["safetensors"].items()}
    replacing.originals.update({name: pair[1] for name, pair in found.items() if pair is not None})
    _set_error_base(import_module("safetensors").SafetensorError)
    for _ in range(2):  # again for what another thread imported during the first pass
        for module, namespace in _namespaces():
            _replace(module, namespace, pairs)


def _replace(module: str, namespace: dict[str, Any], pairs: Mapping[int, tuple[Any, Any]]) -> None:
    for name, value in namespace.copy().items():
        pair = pairs.get(id(value))
        if pair is not None:
            _state.places.append((module, namespace, name, *pair))
            namespace[name] = pair[1]


def _restore_all() -> None:
    """Put the originals back: in the places that were changed, and in modules that took a replacement from there."""
    for _, namespace, name, original, replacement in reversed(_state.places):
        if namespace.get(name) is replacement:
            namespace[name] = original
    for _, namespace in _namespaces():
        for name, value in namespace.copy().items():
            pair = _state.originals.get(id(value))
            if pair is not None:
                namespace[name] = pair[1]
    _set_error_base(None)
    _state.places.clear()


def _set_error_base(original: type | None) -> None:
    errors = import_module("stio.compat.safetensors._file")
    errors.SafetensorError.__bases__ = (original or errors.ErrorBase,)


_DICT_OF_MODULE = vars(ModuleType)["__dict__"]


def _namespaces() -> list[tuple[str, dict[str, Any]]]:
    """Return the globals of all loaded modules, without running their code.

    Not those of the module that keeps stio's objects, and of `builtins`: what a test puts in place of a function of
    safetensors may be `print`.
    """
    found = []
    for name, module in sys.modules.copy().items():
        if issubclass(type(module), ModuleType) and name not in (_REPLACING, "builtins"):
            namespace = _DICT_OF_MODULE.__get__(module)
            if type(namespace) is dict:
                found.append((name, namespace))
    return found
