"""What `progress=` takes, made one callable: a function of events, `True` for a bar, or a tqdm class."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeAlias

__all__ = ["Progress", "ProgressEvent", "progress_callback"]


class _Bar:
    """Feeds a tqdm bar; closes it at the last event."""

    def __init__(self, bar_class: type[Any]) -> None:
        self._bar_class = bar_class
        self._bar: Any = None

    def __call__(self, event: ProgressEvent) -> None:
        if self._bar is None:
            self._bar = self._bar_class(total=event.total_bytes, unit="B", unit_scale=True, desc="loading")
        self._bar.update(event.done_bytes - self._bar.n)
        if event.done_tensors == event.total_tensors:
            self._bar.close()


def progress_callback(progress: Progress) -> Callable[[ProgressEvent], object] | None:
    """Return the callable that is meant.

    Raises:
        ImportError: A bar is wanted and tqdm is not installed.
        TypeError: It is none of what `progress=` takes.
    """
    if progress is None or progress is False:
        return None
    if progress is True:
        try:
            return _Bar(import_module("tqdm.auto").tqdm)
        except ImportError as error:
            raise ImportError("progress=True draws its bar with tqdm: pip install tqdm") from error
    if isinstance(progress, type) and hasattr(progress, "update"):
        return _Bar(progress)
    if callable(progress):
        return progress
    raise TypeError(f"progress= takes a callable, True or a tqdm class, not {progress!r}")


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """How far an operation is. `progress=` callables get one at the start and one after each group of tensors."""

    done_bytes: int
    """Bytes of tensors that are where they shall be."""
    total_bytes: int
    """Bytes of all tensors that were asked for."""
    done_tensors: int
    """Tensors that are complete."""
    total_tensors: int
    """Tensors that were asked for."""
    seconds: float
    """Time since the operation began."""


Progress: TypeAlias = Callable[[ProgressEvent], object] | type[Any] | bool | None
"""A callable of `ProgressEvent`, `True` for a tqdm bar, a tqdm class, or nothing."""
