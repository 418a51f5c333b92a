"""The tensors of a save: by name, from a mapping or a module; and those that are made while they are saved.

transformers, and libraries with the same layout, read a checkpoint by the names in its files. The classes of such a
module declare in `_tied_weights_keys` which names they restore from others: a mapping of patterns to sources since
transformers 5, before that a list of patterns.

A lazy tensor is produced once, copied from, and released. The result of a producer is held only while its bytes are
copied to staging memory, so a conversion of any size needs little memory. Awaitables run on the event loop of
`stio.runtime.event_loop`, so a producer may be `checkpoint.read(...)` itself.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias
from weakref import WeakSet

import torch
from torch import nn

from stio.device import FileNames, LazyTensor, describe_tensors, how_to_save, require_values
from stio.errors import listed, printable
from stio.format import TensorSource, TiedNames
from stio.process import require_unlocked
from stio.runtime import Cancelled, calls
from stio.runtime.memory import Region
from stio.text import log

TensorsLike: TypeAlias = Mapping[str, torch.Tensor] | Mapping[str, torch.Tensor | LazyTensor] | nn.Module
"""Tensors by name, some of which may be lazy, or a module, to save its `state_dict()`."""

_TIED_KEYS = "_tied_weights_keys"
_CHECKED: WeakSet[nn.Module] = WeakSet()
"""Modules whose names have been compared with those that transformers writes."""


def tensors_of(tensors: TensorsLike) -> tuple[dict[str, torch.Tensor | LazyTensor], TiedNames]:
    """Return the tensors to save by name, in the caller's order, and what their module declares, if there is one.

    Raises:
        TypeError: Neither a mapping nor a module.
        ValueError: A tensor of the module stands for data that is elsewhere.
    """
    require_unlocked()
    if isinstance(tensors, nn.Module):
        by_name = dict(tensors.state_dict())
        require_values(by_name, tensors.parameters())
        _warn_of_names(tensors)
        return by_name, tied_names(tensors, by_name)
    if not isinstance(tensors, Mapping):
        raise TypeError(
            f"tensors must be a mapping of names to tensors or a module, not {type(tensors).__name__}{_advice(tensors)}"
        )
    return dict(tensors), TiedNames()


def _warn_of_names(module: nn.Module) -> None:
    """Warn, once for each module, if other programs look for its tensors under other names."""
    if module in _CHECKED:
        return
    _CHECKED.add(module)
    names = FileNames(module)
    if names.in_files:
        log(
            logging.WARNING,
            "transformers writes %s of this module as %s; this save keeps the module's names, which transformers 5 "
            "reads, but other programs begin with new weights in their place: for those, call save_pretrained of the "
            "model after stio.compat.install()",
            listed(names.own.values()),
            listed(names.in_files.values()),
        )


def _advice(value: object) -> str:
    """Return what to pass instead of a value that is neither a mapping nor a module."""
    if isinstance(value, str | os.PathLike):
        return "; the tensors come first, then the destination"
    if isinstance(value, torch.Tensor):
        return '; pass {"name": tensor}'
    if isinstance(value, list | tuple):
        return "; save_state takes lists and other nested state"
    if isinstance(value, Iterator):
        return "; pass dict(...) of names and tensors"
    advice = how_to_save(value)
    return f"; {advice}" if advice else ""


def tied_names(module: nn.Module, names: Iterable[str]) -> TiedNames:
    """Return what a module and its submodules declare about the names of its state dict."""
    sources: dict[str, str | None] = {}
    required: set[str] = set()
    for path, submodule in module.named_modules(remove_duplicate=False):
        if not hasattr(submodule, _TIED_KEYS):
            continue
        prefix = f"{path}." if path else ""
        own = [name.removeprefix(prefix) for name in names if name.startswith(prefix)]
        required.update(prefix + name for name in own)
        for pattern, source in _declared(submodule):
            for name in own:
                if source is None and pattern.search(name):
                    sources[prefix + name] = None
                elif source is not None and (found := pattern.match(name)):
                    sources[prefix + name] = f"{prefix}{source}{name[found.end() :]}"
    return TiedNames(sources, required)


def _declared(module: Any) -> Iterator[tuple[re.Pattern[str], str | None]]:
    """Yield the patterns of names that a module restores, each with the start of the name it takes instead."""
    keys = getattr(module, _TIED_KEYS) or ()
    config = getattr(module, "config", None)
    if isinstance(keys, Mapping):
        if config is not None and not getattr(config, "tie_word_embeddings", False):
            return  # transformers ties nothing then, whatever the class declares
        pairs: Iterable[tuple[Any, Any]] = keys.items()
    else:
        pairs = ((key, None) for key in ([keys] if isinstance(keys, str) else keys))
    for key, source in pairs:
        try:
            pattern = re.compile(key)
        except re.error:  # a name, and no pattern
            pattern = re.compile(re.escape(key))
        yield pattern, source


class ProducedTensors:
    """The lazy tensors of one save. They are copied one after the other, each from its first byte to its last.

    One thread at a time calls `copies`; any thread may call `stop`.
    """

    def __init__(self) -> None:
        self._stopped = False
        self._awaited: calls.LoopTask[Any] | None = None
        self._parts: Iterator[tuple[torch.Tensor, int]] = iter(())
        self._part: torch.Tensor | None = None
        self._begin = self._end = 0  # bytes of the tensor that the current part covers

    def copies(self, source: TensorSource, start: int, region: Region) -> Iterator[tuple[torch.Tensor, int, Region]]:
        """Yield copies that fill a region with the bytes of a tensor from `start` on.

        The caller must drop each copy before it takes the next: a copy holds the tensor that was produced.

        Raises:
            ValueError: The result has not the announced dtype or shape, or cannot be saved.
            TypeError: It has no memory of its own.
            Cancelled: `stop` was called.
            RuntimeError: The producer was cancelled, but not by the save.
            Exception: The producer raised it.
        """
        if not start:
            self._parts, self._begin, self._end = self._produce(source), 0, 0
        try:
            done = 0
            while done < region.nbytes:
                if start + done == self._end:
                    self._part, self._begin = None, self._end  # released before the next part is made
                    self._part, self._end = next(self._parts)
                    continue
                assert self._part is not None
                count = min(region.nbytes - done, self._end - start - done)
                yield self._part, start + done - self._begin, region.sub(done, count)
                done += count
            if start + region.nbytes == source.nbytes:
                self._part = None
                next(self._parts, None)  # runs the producer to its end; raises if there is more
        except asyncio.CancelledError as error:
            self._check()
            # In a task that was not cancelled, this error would look like its end, and the failure would be lost.
            raise RuntimeError(f"the producer of {printable(source.name)!r} was cancelled") from error

    def stop(self) -> None:
        """Cancel an awaitable that is awaited, and read no further parts. Callable from any thread."""
        self._stopped = True
        awaited = self._awaited
        if awaited is not None:
            awaited.cancel()

    def clear(self) -> None:
        """Release the parts that were produced and not copied."""
        self._parts, self._part = iter(()), None

    def _check(self) -> None:
        if self._stopped:
            raise Cancelled

    def _produce(self, source: TensorSource) -> Iterator[tuple[torch.Tensor, int]]:
        """Yield the parts of a tensor, each checked and with the number of bytes up to its end; whole: one part."""
        self._check()
        lazy: LazyTensor = source.data
        require_unlocked()
        value = lazy.produce()
        if inspect.isawaitable(value):
            value = self._wait_for(value)
        is_whole, shape, end, num_rows = isinstance(value, torch.Tensor), tuple(lazy.shape), 0, 0
        try:
            parts: Iterator[Any] = iter((value,) if is_whole else value)
        except TypeError:  # not even an iterable
            raise _wrong(source, type(value).__name__) from None
        del value
        self._check()
        for part in parts:
            if not isinstance(part, torch.Tensor):
                raise _wrong(source, type(part).__name__)
            expected = shape if is_whole else (*part.shape[:1], *shape[1:])
            fits = tuple(part.shape) == expected and (is_whole or part.dim() == len(shape) > 0)
            if not fits or part.dtype != lazy.dtype or part.device.type == "meta":
                raise _wrong(source, f"{part.dtype} {list(part.shape)} on {part.device}")
            end += part.numel() * part.element_size()
            num_rows += len(part) if shape else 0
            if end > source.nbytes or (shape and num_rows > shape[0]):
                raise _wrong(source, f"more rows, {end:,} bytes so far")
            # A tensor without memory to copy from is refused by name here; a subclass becomes a plain tensor.
            described = describe_tensors({source.name: part})[0]
            if part.numel():
                yield described.data, end
            del described, part  # before the next is made
            self._check()
        if end < source.nbytes or (shape and num_rows < shape[0]):
            raise _wrong(source, f"{num_rows:,} rows, {end:,} bytes in all")

    def _wait_for(self, awaitable: Any) -> Any:
        async def body() -> Any:
            return await awaitable

        try:
            task = self._awaited = calls.LoopTask(body)
            if self._stopped:  # `stop` may have been called before there was a task
                task.cancel()
            return task.result()
        finally:
            self._awaited = None
            if inspect.iscoroutine(awaitable):
                awaitable.close()  # it may have been cancelled before it began


def _wrong(source: TensorSource, found: str) -> ValueError:
    lazy: LazyTensor = source.data
    return ValueError(f"the producer of {printable(source.name)!r} gave {found}, not {lazy.dtype} {list(lazy.shape)}")
