"""What trainings of several frameworks share: agreement of processes, random generators, values as nested state.

`on_all` raises an error of one process on all of them. `random_states` returns the states of the random generators
(Python's, numpy's, torch's, and those of CUDA devices) as values that a nested state can hold: a resumed training needs
them for dropout and for the order of its data. `set_optimizer_state` restores an optimizer whose parameters may be
sharded over processes.

Besides what `save_state` takes, the state of a framework holds paths, sets, namespaces and default dicts. `to_plain`
makes them tagged dicts, `{"stio.type": "path", "value": "/data"}`, and `from_plain` restores them. No class is
imported by its name, so no file decides which code runs. A value of any other type is not converted: `save_state`
raises an error that names its place.
"""

from __future__ import annotations

import logging
import pickle
import random
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from stio.distributed.parts import part_of
from stio.errors import FormatError, MismatchError, StioError, printable
from stio.format.state import MAPPING_TAGS, MAX_DEPTH


def gather(num_processes: int, value: Any) -> list[Any]:
    """Return the values of all processes, in order. All processes must call it."""
    if num_processes == 1:
        return [value]
    values: list[Any] = [None] * num_processes
    torch.distributed.all_gather_object(values, value)
    return values


def exchange(num_processes: int, failed: list[Exception], value: Any = None) -> list[Any]:
    """Return the values of all processes, in order. All processes must call it.

    Args:
        num_processes: Their number.
        failed: Errors of this process; the first one is taken out of the list and raised.
        value: The value of this process.

    Raises:
        Exception: The error of this process, or else the first error of another one.
    """
    found = gather(num_processes, (_sendable(failed[0]) if failed and num_processes > 1 else None, value))
    if failed:
        raise failed.pop(0)  # its traceback refers to this frame and the caller's, which must not refer to it
    for process, (error, _) in enumerate(found):
        if error is not None:
            error.add_note(f"process {process} raised it")
            try:
                raise error
            finally:
                del error, found
    return [one for _, one in found]


def on_all(num_processes: int, function: Callable[[], Any]) -> list[Any]:
    """Call a function; return the values of all processes, in order. All processes must call it. See `exchange`."""
    failed: list[Exception] = []
    value = None
    try:
        value = function()
    except Exception as error:  # raised on all processes
        failed.append(error)
    return exchange(num_processes, failed, value)


def _sendable(error: Exception) -> Exception:
    """Return the error, or what describes it if another process cannot receive it."""
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), Exception):
            return error
    except Exception:  # any class may be here
        pass
    return StioError(f"{type(error).__name__}: {error}")


def random_states() -> dict[str, Any]:
    """Return the states."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        # No states of unused devices: the query would initialize them.
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],  # type: ignore[no-untyped-call]
    }


def states_of_rank(of_ranks: Sequence[dict[str, Any]], rank: int) -> dict[str, Any] | None:
    """Return the states that one process saved; None, with a warning, if the checkpoint does not have them."""
    if rank < len(of_ranks):
        return of_ranks[rank]
    message = "the checkpoint has the random generators of %d ranks, and none of rank %d: they are not restored"
    logging.getLogger("stio").warning(message, len(of_ranks), rank)
    return None


def set_random_states(states: Mapping[str, Any]) -> None:
    """Restore the states; those of CUDA devices that this process does not have are left out.

    Raises:
        KeyError, TypeError, ValueError, RuntimeError: They have another form.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    for device, one in zip(range(torch.cuda.device_count()), states["cuda"], strict=False):
        torch.cuda.set_rng_state(one.cpu(), device)


def set_optimizer_state(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> None:
    """Put a saved state into an optimizer; each rank copies its part of the whole tensors of sharded parameters.

    Args:
        optimizer: Its parameters are those of the saved one, in the same order, sharded over any number of ranks.
        saved: What `state_dict` returned, with whole tensors. It may be mapped memory: only the part is read.

    Raises:
        MismatchError: A tensor of the state has not the shape of its parameter, so its part is not known.
    """
    states = dict(saved["state"])
    for number, parameter in enumerate(chain.from_iterable(group["params"] for group in optimizer.param_groups)):
        if isinstance(parameter, DTensor) and number in states:
            states[number] = {
                name: _part(f"{name!r} of parameter {number} in the optimizer", value, parameter)
                for name, value in states[number].items()
            }
    optimizer.load_state_dict({**saved, "state": states})


def _part(what: str, whole: Any, parameter: DTensor) -> Any:
    if not isinstance(whole, torch.Tensor) or whole.dim() == 0:
        return whole
    if whole.shape != parameter.shape:
        raise MismatchError(
            f"{what} cannot be sharded: it has another shape than the parameter",
            expected=list(parameter.shape),
            found=list(whole.shape),
        )
    made = torch.empty_like(parameter.detach(), dtype=whole.dtype)
    part = part_of(what, made)
    assert part is not None  # it is a DTensor
    part.local.copy_(whole[part.index])
    return made


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
