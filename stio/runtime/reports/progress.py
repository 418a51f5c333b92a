"""The argument `progress=`: a callable of events, `True` for a bar, or a class of tqdm; all become one callable."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from time import perf_counter
from typing import Any, TypeAlias

from stio.errors import install_command
from stio.process import new_lock, require_unlocked


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
    """

    def __init__(
        self, callback: Callable[[ProgressEvent], object] | None, *, total_bytes: int, total_tensors: int
    ) -> None:
        self._callback = callback
        if callback is None:
            return
        self._total_bytes, self._total_tensors = total_bytes, total_tensors
        self._done_bytes = self._done_tensors = 0
        self._started = perf_counter()
        self._lock = new_lock()
        self._events: deque[ProgressEvent] = deque()
        self._is_calling = False

    def report(self, nbytes: int = 0, num_tensors: int = 0) -> None:
        """Add what was completed since the last call, and call the callable, which may raise.

        While another thread calls it, that thread takes this event too.
        """
        if self._callback is None:
            return
        with self._lock:
            self._done_bytes += nbytes
            self._done_tensors += num_tensors
            seconds = perf_counter() - self._started
            event = ProgressEvent(self._done_bytes, self._total_bytes, self._done_tensors, self._total_tensors, seconds)
            self._events.append(event)
            if self._is_calling:
                return
            self._is_calling = True
        try:
            while (next_event := self._next_event()) is not None:
                require_unlocked()
                self._callback(next_event)
        except BaseException:
            self._is_calling = False
            raise

    def _next_event(self) -> ProgressEvent | None:
        with self._lock:
            self._is_calling = bool(self._events)
            return self._events.popleft() if self._events else None


class _TqdmBar:
    """Updates a tqdm bar; closes it at the last event, after an error of the bar, or by `close_bar`.

    Args:
        bar_class: Makes the bar.
        description: Text before the bar.
    """

    def __init__(self, bar_class: type[Any], description: str) -> None:
        self._bar_class = bar_class
        self._description = description
        self._bar: Any = None
        self._is_closed = False

    def __call__(self, event: ProgressEvent) -> None:
        if self._is_closed:
            return
        if self._bar is None:
            self._bar = self._bar_class(total=event.total_bytes, unit="B", unit_scale=True, desc=self._description)
        try:
            self._bar.update(event.done_bytes - self._bar.n)
        except BaseException:
            self.close()
            raise
        if event.done_tensors == event.total_tensors:
            self.close()

    def close(self) -> None:
        """Close the bar, if there is one. Idempotent."""
        is_open = self._bar is not None and not self._is_closed
        self._is_closed = True
        if is_open:
            self._bar.close()


def close_bar(callback: Callable[[ProgressEvent], object] | None) -> None:
    """Close the bar behind what `progress_callback` returned, however its operation has ended; never raises.

    Every operation calls it when no more events come. A bar that is already closed, and a callable, need nothing.
    """
    if isinstance(callback, _TqdmBar):
        with suppress(Exception):  # the outcome of the operation counts
            callback.close()


def progress_callback(progress: Progress, description: str = "loading") -> Callable[[ProgressEvent], object] | None:
    """Return the callable for a `progress=` argument, None for no progress.

    Args:
        progress: The argument.
        description: What the operation does; the text before a bar.

    Raises:
        ImportError: A bar is requested, and tqdm is not installed.
        TypeError: The argument is none of the forms that `progress=` takes.
    """
    if progress is None or progress is False:
        return None
    if progress is True:
        try:
            return _TqdmBar(import_module("tqdm.auto").tqdm, description)
        except ImportError as error:
            raise ImportError(f"progress=True draws its bar with tqdm: {install_command('cli')}") from error
    if isinstance(progress, type) and hasattr(progress, "update"):
        return _TqdmBar(progress, description)
    if callable(progress):
        return progress
    raise TypeError(f"progress= takes a callable, True or a tqdm class, not {progress!r}")
