"""Processes that train together by torch.distributed: an error of one of them is raised on all.

Also the states of the random generators of this process, as values that a nested state can hold: those of Python,
numpy, torch, and torch's CUDA devices. A training that is resumed needs them for dropout and for the order of its data.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from stio.errors import StioError


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
