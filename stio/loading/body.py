"""The bodies of loads: open, plan and carry out on one thread, so that a `load` is two handoffs, there and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from stio.device.base import LoadedGroup
from stio.errors import TensorNotFoundError
from stio.loading.group_queue import GroupQueue
from stio.loading.integrity import verify_files
from stio.loading.module import Into, LoadReport
from stio.loading.open import OpenCheckpoint, open_checkpoint
from stio.loading.options import Settings, SourceLike
from stio.loading.plan import Group, Names
from stio.loading.prepare import Transfer, prepare
from stio.loading.targets import LoadOptions
from stio.runtime.limits import DEFAULT_BUDGET_BYTES
from stio.runtime.operation import Operation
from stio.runtime.process import switch_interval as shortened
from stio.runtime.trace import shown, traced

__all__ = ["IntoLoad", "carry_out_stream", "collect", "gather", "start_load", "start_reading", "verify"]

T = TypeVar("T")


def gather(
    operation: Operation[Any], opened: OpenCheckpoint, names: Names | None, options: LoadOptions
) -> list[LoadedGroup]:
    """Load to the end; return the groups, not handed over yet."""
    landed: list[LoadedGroup] = []
    options = _by_target(options, opened)
    transfer = prepare(opened, names, options, deliver=lambda _, group: landed.append(group))
    _carry_out(operation, transfer)
    return landed


def collect(
    operation: Operation[Any], opened: OpenCheckpoint, names: Names | None, options: LoadOptions
) -> Callable[[], dict[str, torch.Tensor]]:
    """Load to the end; return a function that hands everything over to the consumer's thread.

    The tensors come in the order of the checkpoint's data, aliases last.
    """
    landed = gather(operation, opened, names, options)
    headers, aliases = opened.headers, opened.aliases

    def take() -> dict[str, torch.Tensor]:
        tensors: dict[str, torch.Tensor] = {}
        for group in landed:
            tensors |= group.take()
        ordered = {name: tensors[name] for header in headers for name in header.names if name in tensors}
        return ordered | {name: tensors[name] for name in aliases if name in tensors}

    return take


def carry_out_stream(
    operation: Operation[None], feed: GroupQueue, opened: OpenCheckpoint, names: Names | None, options: LoadOptions
) -> None:
    """Deliver groups to a feed until all are there, at the consumer's pace."""
    transfer = prepare(opened, names, _by_target(options, opened), deliver=feed.put, hold=True)
    feed.attach(transfer.run, opened.aliases)
    _carry_out(operation, transfer)


def _carry_out(operation: Operation[Any], transfer: Transfer) -> None:
    operation.remark(transfer.describe)
    operation.on_cancel(transfer.run.stop)
    transfer.carry_out()


def _by_target(options: LoadOptions, opened: OpenCheckpoint) -> LoadOptions:
    """Return the options with slices under the names that have data, aliases resolved."""
    slices = {opened.aliases.get(name, name): index for name, index in options.slices.items()}
    for name in slices:
        if not any(name in header for header in opened.headers):
            raise TensorNotFoundError("slices= names a tensor that is not there", path=opened.path, found=name)
    return replace(options, slices=slices)


def verify(opened: OpenCheckpoint, settings: Settings, operation: Operation[Any]) -> None:
    """Compare the files with their manifest, if the settings ask for that; until then no tensor leaves them."""
    if settings.verify:
        with traced(settings.trace, "verify"):
            verify_files(opened, check=operation.check, budget_bytes=settings.budget_bytes or DEFAULT_BUDGET_BYTES)


def start_load(
    source: SourceLike, settings: Settings, names: Names | None, slices: Mapping[str, object] | None
) -> Operation[Callable[[], dict[str, torch.Tensor]]]:
    """Begin to open, load and close; the result hands the tensors over."""
    return start_reading(
        source, settings, slices, lambda operation, opened, options: collect(operation, opened, names, options)
    )


def start_reading(
    source: SourceLike,
    settings: Settings,
    slices: Mapping[str, object] | None,
    read: Callable[[Operation[Any], OpenCheckpoint, LoadOptions], T],
) -> Operation[T]:
    """Begin to open a checkpoint, verify it, do something with it on the operation's thread, and close it."""

    def body(operation: Operation[Any]) -> T:
        with shortened(settings.switch_interval):
            options = settings.load_options(slices)
            with traced(settings.trace, "open", detail=shown(source)):
                opened = open_checkpoint(source, settings.open_options(), check=operation.check)
            try:
                verify(opened, settings, operation)
                return read(operation, opened, options)
            finally:
                opened.close()

    return Operation(body, name="load", kind="load", about=shown(source)).start()


class IntoLoad:
    """A load into a module: groups that a consumer's thread must put in place come from `feed`."""

    def __init__(
        self, source: SourceLike | OpenCheckpoint, module: nn.Module, settings: Settings, *, assign: bool
    ) -> None:
        self._source = source
        self.into = Into(module, assign=assign)
        """The target."""
        self._settings = settings
        self._landed: list[LoadedGroup] = []
        self.report: LoadReport | None = None
        """What differed; there once the feed has ended."""
        about = source.path if isinstance(source, OpenCheckpoint) else shown(source)
        self.feed = GroupQueue(self._body, name="load_into", about=about, trace=settings.trace)
        """Groups for the consumer's thread; its operation is not begun yet."""

    def _body(self, operation: Operation[None], feed: GroupQueue) -> None:
        settings = self._settings
        with shortened(settings.switch_interval):
            if isinstance(self._source, OpenCheckpoint):
                self._carry_out(operation, feed, self._source)
                return
            with traced(settings.trace, "open", detail=shown(self._source)):
                opened = open_checkpoint(
                    self._source, replace(settings.open_options(), strict=False), check=operation.check
                )
            try:
                self._carry_out(operation, feed, opened)
            finally:
                opened.close()

    def _carry_out(self, operation: Operation[None], feed: GroupQueue, opened: OpenCheckpoint) -> None:
        infos = {name: header.info(name) for header in opened.headers for name in header.names}
        names, report = self.into.match(infos, opened.aliases, strict=self._settings.strict, path=opened.path)
        settings = self._settings
        if opened is not self._source:  # an open checkpoint was verified when it was opened
            verify(opened, settings, operation)
        if not self.into.assigns:
            settings = replace(settings, device=str(self.into.device))  # the copies stay on one device
        options = settings.load_options()
        # Where no device queue orders the copies the workers make them, and the consumer's loop may stand still.
        direct = self.into.on_cpu and options.device == torch.device("cpu")

        def deliver(group: Group, landed: LoadedGroup) -> None:
            if self.into.assigns:
                self._landed.append(landed)  # handed over at the end, with all the others
                self.into.put(landed.tensors)
            elif direct:
                self.into.put(landed.take())
            else:
                feed.put(group, landed)

        transfer = prepare(opened, names, options, deliver=deliver, hold=not (direct or self.into.assigns))
        feed.attach(transfer.run)
        _carry_out(operation, transfer)
        if self.into.assigns:
            self.into.make()
        self.report = report

    def place(self, landed: LoadedGroup) -> None:
        """Put a group in place on the consumer's thread."""
        self.into.put(landed.take())

    def discard(self) -> None:
        """Let go of all tensors after a failure: its traceback may hold this for long."""
        self._landed.clear()
        self.into.discard()

    def complete(self) -> LoadReport:
        """Finish on the consumer's thread, once the feed has ended."""
        for landed in self._landed:
            landed.take()
        self.into.complete()
        self.discard()
        assert self.report is not None
        return self.report
