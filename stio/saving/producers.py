"""Tensors that are made while they are saved: each is produced once, copied from, and let go.

So a conversion of any size runs in one window of memory: what is produced is held while its bytes go into staging,
and no longer. Awaitables run on the engine's loop, so a producer may be `checkpoint.read(...)` itself.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from stio.device.save_sources import Copy, LazyTensor, sources_of
from stio.errors import printable
from stio.format.sharding import TensorSource
from stio.runtime.event_loop import EngineTask
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled

__all__ = ["Production"]


class Production:
    """The lazy tensors of one save. One worker at a time asks, in the plan's order."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._stopped = False
        self._awaited: EngineTask[Any] | None = None
        self._made: dict[str, _Made] = {}

    def copies(self, source: TensorSource, start: int, region: Region) -> Iterator[Copy]:
        """Yield where the bytes from `start` on come from, until the region is full.

        A copy must be let go before the next is asked for: it holds what was produced.

        Raises:
            ValueError: What was produced is not what was announced, or cannot be saved.
            TypeError: It has no memory of its own.
            Cancelled: `stop` was called.
            RuntimeError: The producer was cancelled, by somebody else than the save.
        Exception: Whatever the producer raises.
        """
        try:
            made = self._made.get(source.name)
            if made is None:
                made = self._made[source.name] = _Made(source, self._produced(source), self._check)
            yield from made.copies(start, region)
            if start + region.nbytes == source.nbytes:
                del self._made[source.name]
                made.require_end()
        except asyncio.CancelledError as error:
            self._check()
            # Raised to a task that nobody has cancelled it would pass for its end, and the failure go unseen.
            raise RuntimeError(f"the producer of {printable(source.name)!r} was cancelled") from error

    def stop(self) -> None:
        """End an awaitable that is awaited, and ask for no more rows; callable from any thread."""
        with self._lock:
            self._stopped = True
            awaited = self._awaited
        if awaited is not None:
            awaited.cancel()

    def clear(self) -> None:
        """Let go of what was not used up."""
        self._made.clear()

    def _check(self) -> None:
        if self._stopped:
            raise Cancelled

    def _produced(self, source: TensorSource) -> Any:
        self._check()
        lazy: LazyTensor = source.data
        value = lazy.produce()
        return self._wait_for(value) if inspect.isawaitable(value) else value

    def _wait_for(self, awaitable: Any) -> Any:
        async def body() -> Any:
            return await awaitable

        try:
            with self._lock:
                if self._stopped:
                    raise Cancelled
                task = self._awaited = EngineTask(body)
            return task.result()
        finally:
            self._awaited = None
            if inspect.iscoroutine(awaitable):
                awaitable.close()  # it may have been cancelled before it began


_END = object()


class _Made:
    """One tensor, whole or in rows as they come.

    Args:
        source: What was announced.
        value: What the producer gave.
        check: Raises where no more rows are to be asked for.
    """

    def __init__(self, source: TensorSource, value: Any, check: Callable[[], None]) -> None:
        self._source = source
        lazy: LazyTensor = source.data
        self._dtype, self._shape = lazy.dtype, tuple(lazy.shape)
        self._check = check
        self._whole = isinstance(value, torch.Tensor)
        try:
            self._parts: Iterator[Any] = iter([value] if self._whole else value)
        except TypeError:  # not even an iterable
            raise self._wrong(type(value).__name__) from None
        self._part: torch.Tensor | None = None
        self._begin = self._end = 0  # bytes of the tensor that the current part covers

    def copies(self, start: int, region: Region) -> Iterator[Copy]:
        done = 0
        while done < region.nbytes:
            if start + done >= self._end:
                self._next()
                continue
            assert self._part is not None
            count = min(region.nbytes - done, self._end - start - done)
            yield self._part, start + done - self._begin, region.sub(done, count)
            done += count

    def require_end(self) -> None:
        """Raise if there is more than was announced."""
        self._part = None
        for part in self._parts:
            self._check()
            if not isinstance(part, torch.Tensor) or part.numel():  # no rows are not too many
                raise self._wrong("more rows")

    def _next(self) -> None:
        self._part = None  # let go before the next is made
        self._check()
        part = next(self._parts, _END)
        if part is _END:
            raise self._wrong(f"{self._end:,} bytes in all")
        if not isinstance(part, torch.Tensor):
            raise self._wrong(type(part).__name__)
        expected = self._shape if self._whole else (*part.shape[:1], *self._shape[1:])
        is_rows = self._whole or part.dim() == len(self._shape) > 0
        if part.dtype != self._dtype or tuple(part.shape) != expected or not is_rows or part.device.type == "meta":
            raise self._wrong(f"{part.dtype} {list(part.shape)} on {part.device}")
        self._begin, self._end = self._end, self._end + part.numel() * part.element_size()
        if self._end > self._source.nbytes:
            raise self._wrong(f"more rows, {self._end:,} bytes so far")
        # What has no memory to copy from is refused by name, as a tensor that was given is; a subclass becomes plain.
        self._part = sources_of({self._source.name: part})[0].data

    def _wrong(self, found: str) -> ValueError:
        return ValueError(
            f"the producer of {printable(self._source.name)!r} gave {found}, not {self._dtype} {list(self._shape)}"
        )
