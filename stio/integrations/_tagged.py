"""Converts the state of a framework to a nested state for `save_state`, and back.

Besides what `save_state` takes such a state holds paths, sets, namespaces and default dicts. They become tagged dicts,
`{"stio.type": "path", "value": "/data"}`, and are restored from these. No class is imported by its name, so no file
decides which code runs. A value of any other type is not converted: `save_state` raises an error that names its place.
"""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from stio.errors import FormatError, printable
from stio.format.state.tree import MAPPING_TAGS, MAX_DEPTH

TAG = "stio.type"
"""Key of a dict that represents a value of another type."""

_VALUE = "value"
_FACTORY = "factory"

_PATH = type(Path())
_FACTORIES: dict[str, type] = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}
_LEAVES = frozenset({str, bool, int, float, bytes, type(None), torch.Tensor, torch.nn.Parameter})


def to_plain(value: Any, depth: int = 0) -> Any:
    """Return a state with tagged dicts; containers are copied, tensors are not.

    Args:
        value: The state, or a part of it.
        depth: Number of containers around it. A value too deep to be saved is not converted, nor is a cycle.

    Raises:
        ValueError: A dict has the key of tagged dicts.
    """
    kind = type(value)
    if kind in _LEAVES or depth > MAX_DEPTH:
        return value
    if kind in MAPPING_TAGS:
        if TAG in value:
            raise ValueError(f"the key {TAG!r} is stio's own; rename it")
        return _mapped(value, kind(), depth)
    if kind is list or kind is tuple:
        return kind(to_plain(item, depth + 1) for item in value)
    if kind is _PATH:
        return {TAG: "path", _VALUE: str(value)}
    if kind is set or kind is frozenset:
        return {TAG: kind.__name__, _VALUE: [to_plain(item, depth + 2) for item in value]}
    if kind is Namespace:
        return {TAG: "namespace", _VALUE: _mapped(vars(value), {}, depth + 1)}
    if kind is defaultdict:
        return _default_dict(value, depth)
    return value


def _mapped(source: Any, target: Any, depth: int) -> Any:
    for key, value in source.items():
        target[key] = to_plain(value, depth + 1)
    return target


def _default_dict(value: defaultdict[Any, Any], depth: int) -> Any:
    factory = value.default_factory
    name = getattr(factory, "__name__", "")
    if factory is not None and _FACTORIES.get(name) is not factory:
        return value  # any function may be here
    return {TAG: "defaultdict", _FACTORY: name or None, _VALUE: _mapped(value, {}, depth + 1)}


def from_plain(value: Any) -> Any:
    """Return the state that `to_plain` converted; containers are copied, tensors are not.

    Raises:
        FormatError: It holds a tag that `to_plain` does not write.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind is list or kind is tuple:
        return kind(map(from_plain, value))
    if kind in MAPPING_TAGS:
        if TAG in value:
            return _restored(value)
        result: Any = kind()
        for key, item in value.items():
            result[key] = from_plain(item)
        return result
    return value


def _restored(tagged: dict[Any, Any]) -> Any:
    tag, value = tagged[TAG], from_plain(tagged.get(_VALUE))
    try:
        if tag == "path":
            return Path(value)
        if tag == "set" or tag == "frozenset":
            return set(value) if tag == "set" else frozenset(value)
        if tag == "namespace":
            return Namespace(**value)
        if tag == "defaultdict":
            name = tagged[_FACTORY]
            return defaultdict(None if name is None else _FACTORIES[name], value)
        if tag == "ndarray" or tag == "scalar":  # of versions whose `save_state` took no arrays
            array = value.detach().cpu().numpy()
            return array if tag == "ndarray" else array[()]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"the state holds a {printable(tag)} with a wrong value: {printable(error)}"
        raise FormatError(message) from None
    raise FormatError("the state holds a type that this version of stio does not have", found=tag)
