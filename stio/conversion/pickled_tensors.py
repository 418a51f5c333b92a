"""The tensors by name in an unpickled value: where they are, and what `key=` means.

A file of torch.save often holds the tensors below one or more keys, `{"model": {"state_dict": ...}, "epoch": 3}`. The
first error names the paths of keys that lead to tensors by name, so that the second call succeeds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from stio.device.describe import describe_tensors
from stio.errors import (
    AmbiguousCheckpointError,
    FormatError,
    TensorNotFoundError,
    UnsupportedDtypeError,
    listed,
    printable,
)
from stio.runtime.units import counted

Key = str | Sequence[str | int]
"""What `key=` takes: one key, keys joined by dots, or a sequence of keys."""

_MAX_DEPTH, _MAX_VALUES = 16, 20_000
"""Bounds on the search for tensors in a nested value."""

_SAVE_STATE = "stio.save_state(torch.load(FILE), DESTINATION) stores nested values too, and stio.load_state loads them"


def check_key(key: Key | None) -> None:
    """Raise `TypeError` for a value that `key=` does not take."""
    if key is None or isinstance(key, str):
        return
    if not isinstance(key, Sequence) or isinstance(key, bytes) or not all(isinstance(one, str | int) for one in key):
        raise TypeError(f"key= takes text, or a sequence of keys, not {key!r}")


def tensors_in(path: str, loaded: Any, key: Key | None) -> dict[str, torch.Tensor]:
    """Return the tensors by name that a pickle holds, or a part of it.

    Args:
        path: The file, to name in errors.
        loaded: The unpickled value.
        key: Key or path of keys of the part.

    Raises:
        AmbiguousCheckpointError: It holds other values too; the message names the keys that lead to tensors.
        TensorNotFoundError: It has no such key.
        FormatError: It holds no tensors by name.
    """
    value = loaded if key is None else value_at(path, loaded, key)
    if isinstance(value, nn.Module):
        value = value.state_dict()
    if _is_flat(value):
        tensors = dict(value)
        try:
            describe_tensors(tensors)
        except UnsupportedDtypeError as error:
            error.path = path
            raise
        except (TypeError, ValueError) as error:  # the file is wrong here, not the call
            raise FormatError(str(error), path=path) from error
        return tensors
    before = () if key is None else _steps(loaded, key) or ()
    advice = _advice(loaded, [(*before, *steps) for steps in _paths_to_tensors(value)])
    if not isinstance(value, Mapping):
        raise FormatError(
            f"the file holds no tensors by name{f' under this key; {advice}' if key is not None else f'; {advice}'}",
            path=path,
            found=type(value).__name__,
        )
    raise AmbiguousCheckpointError(
        f"the file holds more than tensors by name{' under this key' if key is not None else ''}; {advice}",
        path=path,
        found=listed(_described(value)),
    )


def _is_flat(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and isinstance(one, torch.Tensor) for name, one in value.items()
    )


def value_at(path: str, loaded: Any, key: Key) -> Any:
    """Return what a pickle holds under a key or path of keys; raise `TensorNotFoundError` if it has none."""
    steps = _steps(loaded, key)
    if steps is None:
        raise TensorNotFoundError(
            f"the file has no such key; {_advice(loaded, list(_paths_to_tensors(loaded)))}",
            path=path,
            requested=key if isinstance(key, str) else list(key),
            found=listed(_children(loaded)),
        )
    for step in steps:
        loaded = _children(loaded)[step]
    return loaded


def _steps(value: Any, key: Key) -> tuple[Any, ...] | None:
    """Return the keys that `key=` means in a value, None if there is no such path.

    Text is one key, or keys joined by dots; at each level the longest key that fits is taken first.
    """
    children = _children(value)
    if not isinstance(key, str):
        if not key:
            return ()
        rest = _steps(children[key[0]], key[1:]) if key[0] in children else None
        return None if rest is None else (key[0], *rest)
    known = {str(one): one for one in children}
    if key in known:
        return (known[key],)
    end = key.rfind(".")
    while end > 0:
        if key[:end] in known:
            rest = _steps(children[known[key[:end]]], key[end + 1 :])
            if rest is not None:
                return known[key[:end]], *rest
        end = key.rfind(".", 0, end)
    return None


def _children(value: Any) -> Mapping[Any, Any]:
    """Return the values below a value by their keys; those of a list by their numbers."""
    if isinstance(value, Mapping):
        return value
    return dict(enumerate(value)) if isinstance(value, list | tuple) else {}


def _paths_to_tensors(value: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to tensors by name, those of the most tensors first."""
    found: list[tuple[int, tuple[Any, ...]]] = []
    ahead: deque[tuple[tuple[Any, ...], Any]] = deque([((), value)])
    left = _MAX_VALUES
    while ahead and left:
        left -= 1
        steps, one = ahead.popleft()
        if isinstance(one, nn.Module):
            one = one.state_dict()
        if steps and one and _is_flat(one):
            found.append((len(one), steps))
        elif len(steps) < _MAX_DEPTH:
            ahead += [
                ((*steps, key), child)
                for key, child in _children(one).items()
                if isinstance(child, Mapping | list | tuple | nn.Module)
            ]
    yield from (steps for _, steps in sorted(found, key=lambda item: -item[0]))


def _advice(loaded: Any, paths: Sequence[tuple[Any, ...]]) -> str:
    """Return what to do: the keys that lead to tensors, or how to store a value without any."""
    if not paths:
        return _SAVE_STATE
    shown = [_as_key(loaded, steps) for steps in paths[:2]]
    if len(paths) == 1:
        return f"its tensors are under {shown[0]}"
    more = f" (and {counted(len(paths) - 2, 'other')})" if len(paths) > 2 else ""
    return f"choose one part of it: {' or '.join(shown)}{more}"


def _as_key(loaded: Any, steps: tuple[Any, ...]) -> str:
    """Return an argument `key=` for some keys: text, if that leads to the same place."""
    text = ".".join(map(str, steps))
    return f"key={printable(text)!r}" if _steps(loaded, text) == steps else f"key={steps!r}"


def _described(value: Mapping[Any, Any]) -> Iterator[str]:
    """Yield each entry that is no tensor of a name, with its kind."""
    for name, one in value.items():
        if not (isinstance(name, str) and isinstance(one, torch.Tensor)):
            size = f" of {len(one):,}" if isinstance(one, Mapping | list) else ""
            yield f"{printable(name)!r} ({type(one).__name__}{size})"
