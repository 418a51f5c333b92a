"""What the asynchronous and the blocking face share: a checkpoint and a stream, all but the waiting."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from stio.device.base import LoadedGroup
from stio.errors import ClosedError
from stio.format.header import TensorInfo
from stio.loading.body import IntoLoad, carry_out_stream, collect, verify
from stio.loading.group_queue import GroupQueue
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.loading.options import Settings, SourceLike
from stio.loading.plan import Names
from stio.runtime.operation import Operation
from stio.runtime.process import switch_interval as shortened
from stio.runtime.trace import shown, traced

__all__ = ["CheckpointBase", "StreamBase"]


class CheckpointBase:
    """What is known of a checkpoint, and the operations on it; the faces wait for them.

    Args:
        source: What to open.
        settings: Keywords of `open`.
    """

    def __init__(self, source: SourceLike, settings: Settings) -> None:
        self._source = source
        self._settings = settings
        self._opened: OpenCheckpoint | None = None
        self._operations: weakref.WeakSet[Operation[Any]] = weakref.WeakSet()
        self._closing = threading.Lock()

    @property
    def _now(self) -> OpenCheckpoint:
        if self._opened is None:
            raise ClosedError("the checkpoint is not open; use it inside its `with` block", path=str(self._source))
        return self._opened

    def keys(self) -> list[str]:
        """Return the names of all tensors in the order of their data, aliases last."""
        opened = self._now
        return [name for header in opened.headers for name in header.names] + list(opened.aliases)

    def __len__(self) -> int:
        return sum(len(header) for header in self._now.headers) + len(self._now.aliases)

    def __contains__(self, name: object) -> bool:
        return any(name in header for header in self._now.headers) or name in self._now.aliases

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    @property
    def metadata(self) -> Mapping[str, Any]:
        """Text metadata of the shards, and of the index above it."""
        return self._now.metadata

    @property
    def aliases(self) -> Mapping[str, str]:
        """Names that share another tensor's data (tied weights), to that tensor's name."""
        return self._now.aliases

    def info(self, name: str) -> TensorInfo:
        """Return what the header says of a tensor.

        Raises:
            TensorNotFoundError: There is none of this name.
        """
        return self._now.info(name)

    def _start_open(self) -> Operation[OpenCheckpoint]:
        options = self._settings.open_options()

        def body(operation: Operation[Any]) -> OpenCheckpoint:
            with traced(self._settings.trace, "open", detail=shown(self._source)):
                opened = open_checkpoint(self._source, options, check=operation.check)
            operation.remark(lambda: f"{len(opened.files):,} files")
            try:
                verify(opened, self._settings, operation)
            except BaseException:
                opened.close()
                raise
            return opened

        if self._opened is not None:
            raise RuntimeError("the checkpoint is open already")
        return Operation(body, name="open", about=shown(self._source), discard=OpenCheckpoint.close).start()

    def _start_load(
        self, names: Names | None, slices: Mapping[str, object] | None
    ) -> Operation[Callable[[], dict[str, torch.Tensor]]]:
        opened, settings = self._now, self._settings

        def body(operation: Operation[Any]) -> Callable[[], dict[str, torch.Tensor]]:
            with shortened(settings.switch_interval):
                return collect(operation, opened, names, settings.load_options(slices))

        return self._own(Operation(body, name="load", kind="load", about=opened.path)).start()

    def _feed(self, names: Names | None, slices: Mapping[str, object] | None) -> GroupQueue:
        """Return a feed of groups, not begun yet."""
        opened, settings = self._now, self._settings

        def body(operation: Operation[None], feed: GroupQueue) -> None:
            with shortened(settings.switch_interval):
                carry_out_stream(operation, feed, opened, names, settings.load_options(slices))

        feed = GroupQueue(body, name="stream", about=opened.path, trace=settings.trace)
        self._own(feed.operation)
        return feed

    def _one(self, name: str, index: object) -> tuple[str, Mapping[str, object] | None]:
        return name, None if index is None else {self._now.aliases.get(name, name): index}

    def _into(self, module: nn.Module, *, strict: bool | None, assign: bool) -> IntoLoad:
        settings = self._settings if strict is None else replace(self._settings, strict=strict)
        load = IntoLoad(self._now, module, settings, assign=assign)
        self._own(load.feed.operation)
        return load

    def _own(self, operation: Operation[Any]) -> Operation[Any]:
        with self._closing:
            if self._opened is None:
                raise ClosedError("the checkpoint was closed", path=str(self._source))
            self._operations.add(operation)
        return operation

    def _begin_close(self) -> tuple[OpenCheckpoint | None, list[Operation[Any]]]:
        """Let no further operation in and cancel all that are; they must have ended before the files are closed."""
        with self._closing:
            opened, self._opened = self._opened, None
            operations = list(self._operations)
        for operation in operations:
            operation.cancel()
        return opened, operations


class StreamBase:
    """What both kinds of stream share: the feed, and the group that is being given out.

    Args:
        feed: Not begun yet.
    """

    def __init__(self, feed: GroupQueue) -> None:
        self._feed = feed
        self._batch: dict[str, torch.Tensor] = {}
        self._names: list[str] = []
        self._begun = self._closed = False
        self._turn = threading.Lock()

    def promote(self, names: Iterable[str]) -> None:
        """Have these tensors read before all that has not begun yet."""
        self._feed.promote(set(names))

    def _begin(self) -> None:
        if self._closed:
            raise ClosedError("the stream was closed")
        if not self._begun:
            self._begun = True
            self._feed.operation.start()

    def _unpack(self, landed: LoadedGroup) -> None:
        fresh = landed.take()
        self._batch |= fresh  # another consumer may have put a group here meanwhile
        self._names[:0] = reversed(fresh)

    def _pop(self) -> tuple[str, torch.Tensor]:
        name = self._names.pop()
        return name, self._batch.pop(name)

    def _end(self) -> None:
        self._closed = True
        self._batch, self._names = {}, []

    def __del__(self) -> None:
        if hasattr(self, "_feed"):
            self._feed.operation.cancel()
