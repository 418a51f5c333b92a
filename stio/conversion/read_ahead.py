"""Reads the tensors of an open checkpoint in the order in which the save writes them, one window of memory ahead.

Neighbours in that order are read together, so that a small tensor does not cost a read of its own. A tensor larger than
the window is read in rows, so that memory is bounded. Each read is a small load with an `Operation` of its own: the
stop callback and the memory of a load live as long as its operation, and must be released after each read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from stio.format.header import TensorInfo
from stio.loading.body import collect
from stio.loading.open import OpenCheckpoint
from stio.loading.options import LoadOptions
from stio.runtime.operation import Operation

_MAX_NAMES = 4096
"""Most tensors in one read. To plan 4,096 tensors takes some milliseconds."""

_Tensors = dict[str, torch.Tensor]

_Unit = tuple[list[str], slice | None]
"""One read: names of whole tensors, or one name and the rows of that tensor."""


class ReadAhead:
    """Reads ahead by one unit. `take` is called by one thread at a time, in the expected order.

    Args:
        opened: The checkpoint; closed by `close`.
        names: New name of each tensor, with its name in the checkpoint.
        dtype: Cast floating tensors to it.
        window_bytes: Most bytes in one read, unless one row is larger. Two reads are in memory at once.
    """

    def __init__(
        self, opened: OpenCheckpoint, names: Mapping[str, str], *, dtype: torch.dtype | None, window_bytes: int
    ) -> None:
        self._opened = opened
        self._names = names
        self._settings = LoadOptions(dtype=dtype, memory="copy", budget_bytes=window_bytes)
        self._window_bytes = window_bytes
        self._units: Iterator[_Unit] = iter(())
        self._loaded: _Tensors = {}
        self._ahead: Operation[Callable[[], _Tensors]] | None = None
        self._stopped = False

    def expect(self, names: Sequence[str]) -> None:
        """Set the order of the calls of `take`, before the first of them; start the first read."""
        self._units = iter(self._cut(names))
        self._read_next()

    def take(self, name: str) -> torch.Tensor | Iterator[torch.Tensor]:
        """Return a tensor, or an iterator of its rows.

        Raises:
            StioError: The read failed.
        """
        if self._is_cut(name):
            return self._rows(name)
        if name not in self._loaded:
            self._loaded = self._next()
        return self._loaded.pop(name)

    def stop(self) -> None:
        """End the read under way, and start no other. Callable from any thread."""
        self._stopped = True
        ahead = self._ahead
        if ahead is not None:
            ahead.cancel()

    def close(self) -> None:
        """Stop, wait for the read under way, and close the checkpoint. `take` must not be under way."""
        self.stop()
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        self._loaded = {}
        self._opened.close()

    def _rows(self, name: str) -> Iterator[torch.Tensor]:
        for _ in range(len(self._row_cuts(name))):
            yield self._next().pop(name)

    def _next(self) -> _Tensors:
        """Return the tensors that were read ahead, and start the read of the next ones."""
        ahead = self._ahead
        assert ahead is not None, "`take` was called more often than expected"
        take = ahead.result()
        self._read_next()
        return take()

    def _read_next(self) -> None:
        names, rows = next(self._units, ([], None))
        if not names:
            self._ahead = None
            return
        stored = {self._names[name]: name for name in names}
        slices: dict[str, object] = {} if rows is None else dict.fromkeys(stored, rows)

        def body(operation: Operation[Any]) -> Callable[[], _Tensors]:
            take = collect(operation, self._opened, list(stored), self._settings, slices)
            return lambda: {stored[name]: tensor for name, tensor in take().items()}

        operation = Operation(body, name="load")
        self._ahead = operation
        if self._stopped:  # `stop` may have been called before
            operation.cancel()
        operation.start()

    def _cut(self, names: Sequence[str]) -> Iterator[_Unit]:
        together: list[str] = []
        total = 0
        for name in names:
            nbytes = self._info(name).nbytes
            cut = self._is_cut(name)
            if together and (cut or total + nbytes > self._window_bytes or len(together) == _MAX_NAMES):
                yield together, None
                together, total = [], 0
            if cut:
                yield from (([name], rows) for rows in self._row_cuts(name))
            else:
                together.append(name)
                total += nbytes
        if together:
            yield together, None

    def _is_cut(self, name: str) -> bool:
        info = self._info(name)
        return info.nbytes > self._window_bytes and bool(info.shape)

    def _row_cuts(self, name: str) -> list[slice]:
        info = self._info(name)
        num_rows = info.shape[0]
        step = self._window_bytes * num_rows // info.nbytes
        step = max(1, step - step % 2)  # even: two elements of F4 are one byte
        return [slice(begin, min(begin + step, num_rows)) for begin in range(0, num_rows, step)]

    def _info(self, name: str) -> TensorInfo:
        return self._opened.info(self._names[name])
