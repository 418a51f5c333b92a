"""The argument `progress=`: a callable of events, `True` for a bar, or a class of tqdm; all become one callable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from typing import Any, TypeAlias


@dataclass(frozen=True, slots=True)
class ProgressEvent:
    """Progress of an operation. A `progress=` callable gets one at the start and one after each group of tensors."""

    done_bytes: int
    """Bytes of the tensors that are complete."""
    total_bytes: int
    """Bytes of all tensors of the operation."""
    done_tensors: int
    """Number of tensors that are complete."""
    total_tensors: int
    """Number of all tensors of the operation."""
    seconds: float
    """Time since the operation started."""


Progress: TypeAlias = Callable[[ProgressEvent], object] | type[Any] | bool | None
"""A callable that takes a `ProgressEvent`, `True` for a tqdm bar, a tqdm class, or None for no progress."""


class ProgressReporter:
    """Counts what an operation has completed, and calls its callable with the sums, one call at a time.

    Args:
        callback: What `progress_callback` returned.
        total_bytes: Bytes of all tensors of the operation.
        total_tensors: Number of all tensors of the operation.
        done_tensors: Number of those with nothing to copy.
    """

    def __init__(
        self,
        callback: Callable[[ProgressEvent], object] | None,
        *,
        total_bytes: int,
        total_tensors: int,
        done_tensors: int = 0,
    ) -> None:
        self._callback = callback
        self._total_bytes, self._total_tensors = total_bytes, total_tensors
        self._done_bytes, self._done_tensors = 0, done_tensors
        self._started = perf_counter()
        self._lock = threading.Lock()

    def report(self, nbytes: int = 0, num_tensors: int = 0) -> None:
        """Add what was completed since the last call, and call the callable. It may raise."""
        if self._callback is None:
            return
        with self._lock:
            self._done_bytes += nbytes
            self._done_tensors += num_tensors
            seconds = perf_counter() - self._started
            self._callback(
                ProgressEvent(self._done_bytes, self._total_bytes, self._done_tensors, self._total_tensors, seconds)
            )


class _Bar:
    """Updates a tqdm bar; closes it at the last event."""

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
    """Return the callable for a `progress=` argument, None for no progress.

    Raises:
        ImportError: A bar is requested, and tqdm is not installed.
        TypeError: The argument is none of the forms that `progress=` takes.
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
