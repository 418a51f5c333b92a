"""Processes that train together by torch.distributed: an error of one of them is raised on all."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

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
