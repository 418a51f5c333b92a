"""Tensors of an open checkpoint in the order in which somebody else will ask for them, read one window ahead.

Neighbours in that order are read together and a tensor that is larger than the window in rows, so that small tensors do
not cost a read each, and large ones not their size.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from stio.loading.body import collect
from stio.loading.open import OpenCheckpoint
from stio.loading.options import Settings
from stio.runtime.operation import Operation

__all__ = ["Window"]

_MOST_NAMES = 4096
"""In one read: planning 4,096 tensors takes some milliseconds."""

_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Unit:
    """What one read brings."""

    names: tuple[str, ...]
    """Names of whole tensors, or of one."""
    rows: slice | None = None
    """Which rows of that one."""


class Window:
    """Reads ahead by one unit. `take` is called by one thread at a time, in the expected order.

    Args:
        opened: Open until this is closed.
        names: What tensors are called here, to their names in the checkpoint.
        dtype: Cast floating tensors to it.
        window_bytes: Most bytes in one read, unless one row is larger. Two are under way.
    """

    def __init__(
        self, opened: OpenCheckpoint, names: Mapping[str, str], *, dtype: torch.dtype | None, window_bytes: int
    ) -> None:
        self._opened = opened
        self._names = names
        self._settings = Settings(dtype=dtype, memory="copy", budget_bytes=window_bytes)
        self._window_bytes = window_bytes
        self._units: Iterator[_Unit] = iter(())
        self._there: _Tensors = {}
        self._lock = threading.Lock()
        self._ahead: Operation[Callable[[], _Tensors]] | None = None
        self._stopped = False

    def expect(self, names: Sequence[str]) -> None:
        """Say in which order `take` will be called; must come before it."""
        self._units = iter(self._cut(names))
        self._begin()

    def take(self, name: str) -> torch.Tensor | Iterator[torch.Tensor]:
        """Return a tensor, or its rows one after the other.

        Raises:
            StioError: It could not be read.
        """
        if self._is_cut(name):
            return self._rows(name)
        if name not in self._there:
            self._there = self._next()
        return self._there.pop(name)

    def stop(self) -> None:
        """End the read under way, and begin no other. Callable from any thread."""
        with self._lock:
            self._stopped = True
            ahead = self._ahead
        if ahead is not None:
            ahead.cancel()

    def close(self) -> None:
        """Stop, and wait until nobody reads. `take` must not be under way."""
        self.stop()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        self._there = {}

    def _rows(self, name: str) -> Iterator[torch.Tensor]:
        for _ in range(len(self._row_cuts(name))):
            yield self._next().pop(name)

    def _next(self) -> _Tensors:
        """Return what was read ahead, and begin to read what comes after it."""
        ahead = self._ahead
        assert ahead is not None, "more tensors were asked for than were expected"
        take = ahead.result()
        self._begin()
        return take()

    def _begin(self) -> None:
        unit = next(self._units, None)
        if unit is None:
            self._ahead = None
            return
        stored = {self._names[name]: name for name in unit.names}
        slices: dict[str, object] = {} if unit.rows is None else dict.fromkeys(stored, unit.rows)
        options = self._settings.load_options(slices)

        def body(operation: Operation[Any]) -> Callable[[], _Tensors]:
            take = collect(operation, self._opened, list(stored), options)
            return lambda: {stored[name]: tensor for name, tensor in take().items()}

        operation = Operation(body, name="load")
        with self._lock:
            self._ahead = operation
            if self._stopped:
                operation.cancel()
        operation.start()

    def _cut(self, names: Sequence[str]) -> Iterator[_Unit]:
        together: list[str] = []
        total = 0
        for name in names:
            nbytes = self._nbytes(name)
            if not nbytes:
                continue  # nobody asks for it
            cut = self._is_cut(name)
            if together and (cut or total + nbytes > self._window_bytes or len(together) == _MOST_NAMES):
                yield _Unit(tuple(together))
                together, total = [], 0
            if cut:
                yield from (_Unit((name,), rows) for rows in self._row_cuts(name))
            else:
                together.append(name)
                total += nbytes
        if together:
            yield _Unit(tuple(together))

    def _is_cut(self, name: str) -> bool:
        return self._nbytes(name) > self._window_bytes and bool(self._shape(name))

    def _row_cuts(self, name: str) -> list[slice]:
        num_rows = self._shape(name)[0]
        step = self._window_bytes * num_rows // self._nbytes(name)
        step = max(1, step - step % 2)  # even: two elements of F4 are one byte
        return [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]

    def _nbytes(self, name: str) -> int:
        return self._opened.info(self._names[name]).nbytes

    def _shape(self, name: str) -> tuple[int, ...]:
        return self._opened.info(self._names[name]).shape
