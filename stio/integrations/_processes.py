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


def exchange(num_processes: int, failed: Exception | None, value: Any = None) -> list[Any]:
    """Return the values of all processes, in order. All processes must call it.

    Args:
        num_processes: Their number.
        failed: The error of this process.
        value: The value of this process.

    Raises:
        Exception: The error of this process, or else the first error of another one.
    """
    sent = failed if failed is None or num_processes == 1 else _sendable(failed)
    found = gather(num_processes, (sent, value))
    if failed is not None:
        raise failed
    for process, (error, _) in enumerate(found):
        if error is not None:
            error.add_note(f"process {process} raised it")
            raise error
    return [one for _, one in found]


def on_all(num_processes: int, function: Callable[[], Any]) -> list[Any]:
    """Call a function; return the values of all processes, in order. All processes must call it. See `exchange`."""
    failed: Exception | None = None
    value = None
    try:
        value = function()
    except Exception as error:  # raised on all processes
        failed = error
    return exchange(num_processes, failed, value)


def _sendable(error: Exception) -> Exception:
    """Return the error, or what describes it if another process cannot receive it."""
    try:
        if isinstance(pickle.loads(pickle.dumps(error)), Exception):
            return error
    except Exception:  # any class may be here
        pass
    return StioError(f"{type(error).__name__}: {error}")
