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
"""Key of the name of a default dict's factory."""

_PLAIN: dict[type, tuple[str, Callable[[Any], Any]]] = {
    type(Path()): ("path", str),
    set: ("set", list),
    frozenset: ("frozenset", list),
    Namespace: ("namespace", vars),
    defaultdict: ("defaultdict", dict),
}
"""By type, its tag, and what makes a plain value of one."""

_RESTORED: dict[str, Callable[[Any], Any]] = {
    "path": Path,
    "set": set,
    "frozenset": frozenset,
    "namespace": lambda value: Namespace(**value),
    "ndarray": lambda value: value.detach().cpu().numpy(),  # of versions whose `save_state` took no arrays, as the next
    "scalar": lambda value: value.detach().cpu().numpy()[()],
}
"""By tag, what restores a value; a default dict needs its factory too."""

_FACTORIES: dict[str | None, type | None] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)
}
_FACTORIES[None] = None


def to_plain(value: Any, depth: int = 0) -> Any:
    """Return a state with tagged dicts; containers are copied, tensors are not.

    Args:
        value: The state, or a part of it.
        depth: Number of containers around it. A value too deep to be saved is not converted, nor is a cycle.

    Raises:
        ValueError: A dict has the key of tagged dicts.
    """
    kind = type(value)
    if depth > MAX_DEPTH:
        return value
    if kind in MAPPING_TAGS:
        if TAG in value:
            raise ValueError(f"the key {TAG!r} is stio's own; rename it")
        return _mapped(lambda item: to_plain(item, depth + 1), value)
    if kind is list or kind is tuple:
        return kind(to_plain(item, depth + 1) for item in value)
    if kind not in _PLAIN:
        return value
    tag, convert = _PLAIN[kind]
    tagged: dict[str, str | None] = {TAG: tag}
    if kind is defaultdict:
        factory = value.default_factory
        tagged[_FACTORY] = None if factory is None else getattr(factory, "__name__", "")
        if _FACTORIES.get(tagged[_FACTORY], tagged) is not factory:
            return value  # any function may be here
    return {**tagged, _VALUE: to_plain(convert(value), depth + 1)}


def _mapped(function: Callable[[Any], Any], source: Any) -> Any:
    """Return a dict of the same type with the results for its values."""
    target = type(source)()
    for key, value in source.items():
        target[key] = function(value)
    return target


def from_plain(value: Any) -> Any:
    """Return the state that `to_plain` converted; containers are copied, tensors are not.

    Raises:
        FormatError: It holds a tag that `to_plain` does not write.
    """
    kind = type(value)
    if kind is list or kind is tuple:
        return kind(map(from_plain, value))
    if kind not in MAPPING_TAGS:
        return value
    return _restored(value) if TAG in value else _mapped(from_plain, value)


def _restored(tagged: dict[Any, Any]) -> Any:
    tag, value = tagged[TAG], from_plain(tagged.get(_VALUE))
    try:
        if tag == "defaultdict":
            return defaultdict(_FACTORIES[tagged[_FACTORY]], value)
        if isinstance(tag, str) and tag in _RESTORED:
            return _RESTORED[tag](value)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        message = f"the state holds a {printable(tag)} with a wrong value: {printable(error)}"
        raise FormatError(message) from None
    raise FormatError("the state holds a type that this version of stio does not have", found=tag)
