"""`follow`: keeps a module at the newest checkpoint of a run, and applies only what differs.

A `Follower` finds the newest checkpoint by the rules of `stio.latest`, on a thread of its own, since a network
filesystem reports no changes. Whoever fills the memory remembers the id of the version that it holds: a `ModuleLoad`
here, a model of a pool in `pool/content.py`. If the newest checkpoint is a chain of deltas on that version, only the
deltas behind it are read (`LoadTarget.update_from`); otherwise the checkpoint is loaded whole. A load that ends early
leaves memory without an id, so the next one is whole.
"""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite
from typing import Any, Literal, NamedTuple, Protocol, Self, TypeAlias

import torch
from torch import nn

from stio import clock
from stio.errors import (
    ChangedDuringReadError,
    CheckpointNotFoundError,
    ClosedError,
    FormatError,
    IndexFormatError,
    MismatchError,
    StioError,
    printable,
)
from stio.format.files import step_of
from stio.limits import DEFAULT_BUDGET_BYTES, Limits
from stio.loading import LoadOptions, fill_from, load_into, open_with_options
from stio.loading.targets import LoadTarget, ModuleTarget, StateTarget
from stio.runtime import AsyncOnly, Notifier, Operation, close_all, runs_blocking
from stio.runtime.reports import Trace
from stio.storage import local_directory, steps_in
from stio.storage.checkpoint import (
    OpenCheckpoint,
    OpenOptions,
    newest_in,
    open_checkpoint,
    read_manifest,
    verify_files,
)
from stio.text import described_by, keywords_for, log


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """A checkpoint that a follower has applied."""

    path: str
    """Its path."""
    step: int | None
    """The step in its name; None: its name has none."""
    kind: Literal["full", "delta"]
    """`"delta"`: only what differs from the version before was read and written."""
    changed_bytes: int
    """Bytes of the tensors, or of the elements, that were written."""
    seconds: float
    """How long that took."""


class Loaded(NamedTuple):
    """What a load has done."""

    content: object
    """Identifies the content of the checkpoint, see `content_of`."""
    kind: Literal["full", "delta"]
    """See `Version`."""
    changed_bytes: int
    """See `Version`."""


Own: TypeAlias = Callable[[Operation[Any]], Operation[Any]]
"""Registers an operation, which is cancelled when the follower is closed; returns it."""


class Loads(Protocol):
    """Loads versions into the memory that holds the version before."""

    is_whole: bool
    """Whether all tensors are of one version. After an error the next load is whole if they are not."""

    async def __call__(self, path: str, own: Own) -> Loaded:
        """Load a checkpoint: what differs from the version before, or all of it."""


def content_of(opened: OpenCheckpoint) -> object:
    """Return what identifies the content of a checkpoint: its id, or the identities of its files if it has none."""
    return opened.id or tuple(file.identity for file in opened.files)


def loaded_whole(opened: OpenCheckpoint) -> Loaded:
    """Return what a load of a whole checkpoint has done."""
    return Loaded(content_of(opened), "full", sum(sum(header.ends) - sum(header.begins) for header in opened.headers))


def _verify(opened: OpenCheckpoint, operation: Operation[Any], options: LoadOptions) -> None:
    """Compare all files with their manifests, or, without `verify=True`, deltas that have one."""
    budget_bytes = options.budget or DEFAULT_BUDGET_BYTES
    if options.verify:
        verify_files(opened, check=operation.check, budget_bytes=budget_bytes)
        return
    for one in opened.apart()[1:]:
        if read_manifest(one) is not None:
            verify_files(one, check=operation.check, budget_bytes=budget_bytes)


class ModuleLoads:
    """Loads into a module, or into a dictionary of tensors; see `Loads`.

    Args:
        make_target: Returns a new target for the memory.
        options: Options of the loads.
    """

    def __init__(self, make_target: Callable[[], LoadTarget], options: LoadOptions) -> None:
        self._make_target = make_target
        self._options = options
        self._held = ""  # id of the version that the memory holds; empty while it is written
        self.is_whole = True
        """See `Loads`."""

    async def __call__(self, path: str, own: Own) -> Loaded:
        """See `Loads`."""
        options, target = replace(self._options, streams=None), self._make_target()

        def begin(operation: Operation[Any]) -> tuple[OpenCheckpoint, int | None]:
            with ExitStack() as undo:
                how = replace(options, verify=False)  # what is not read is not verified
                opened = undo.enter_context(closing(open_with_options(operation, path, how, with_manifest=True)))
                changed_bytes = None
                if self._held:
                    on_write = partial(self._write, operation)
                    changed_bytes = target.update_from(
                        opened, self._held, options, check=operation.check, on_write=on_write
                    )
                if changed_bytes is not None:
                    self._held, self.is_whole = opened.id, True
                else:
                    _verify(opened, operation, options)
                undo.pop_all()
                return opened, changed_bytes

        operation = Operation(begin, name="follow", kind="load", about=path, discard=lambda found: found[0].close())
        opened, changed_bytes = await own(operation).wait()
        with closing(opened):
            if changed_bytes is not None:
                return Loaded(content_of(opened), "delta", changed_bytes)
            await fill_from(opened, self._make_target(), options, on_begin=own, fill_first=self._begin_whole_load)
            self._held, self.is_whole = opened.id, True
            return loaded_whole(opened)

    def _write(self, operation: Operation[Any]) -> None:
        operation.refuse_cancel()  # all is in memory: it is copied to the end
        self._held, self.is_whole = "", False

    def _begin_whole_load(self, operation: object, opened: object, target: object, names: list[str]) -> list[str]:
        self._held, self.is_whole = "", False
        return names


class _Applied(NamedTuple):
    """The version that was applied last."""

    path: str
    content: object
    """See `content_of`."""


class _Seen(NamedTuple):
    """What a look has found, until something changes."""

    entries: list[tuple[str, object]]
    """Of the highest step; see `_newest_entries`."""
    held: _Applied | None
    """What was loaded then."""
    state: object
    """Its state; see `_state_of`."""
    found: tuple[str, object] | None
    """Path and state of what is newer than that."""


class Follower(AsyncOnly, AsyncIterator[Version]):
    """Follows the newest checkpoint of a run, made by `stio.follow` or `ModelPool.follow`.

    Entering the block waits until there is a checkpoint, and loads it. Leaving it ends what is under way. Inside,
    iterate over the versions, each of which is applied before it is returned; or call `wait` and `apply`.

    Args:
        path: The directory of the run, or a checkpoint that is replaced in its place.
        load: Loads a version.
        poll_seconds: Time between two looks at the directory.
        options: How `load` opens checkpoints.
    """

    _sync_name = "follow"

    def __init__(self, path: str | os.PathLike[str], load: Loads, poll_seconds: float, options: LoadOptions) -> None:
        if isinstance(poll_seconds, bool) or not isinstance(poll_seconds, int | float):
            raise TypeError(f"poll_seconds= takes a number of seconds, not {poll_seconds!r}")
        if not (poll_seconds > 0 and isfinite(poll_seconds)):
            raise ValueError(f"poll_seconds must be positive, not {poll_seconds!r}")
        self._path = local_directory(path, "stio.follow")
        self._load = load
        self._poll_seconds = poll_seconds
        self._open_options = OpenOptions(
            limits=options.limits or Limits(), follow_symlinks=options.follow_symlinks, warn=lambda _: None
        )
        self._version: Version | None = None
        self._held: _Applied | None = None
        self._seen: _Seen | None = None
        self._left_out: list[str] = []  # what the log names already
        self._is_open = self._applies = False
        # By id, as those of a `Checkpoint`.
        self._operations: weakref.WeakValueDictionary[int, Operation[Any]] = weakref.WeakValueDictionary()

    @property
    def version(self) -> Version | None:
        """The version that was applied last; None: there was none yet."""
        return self._version

    async def wait(self, timeout: float | None = None) -> str | None:
        """Wait until there is a newer checkpoint, and return its path; nothing is loaded.

        Args:
            timeout: Longest wait in seconds; None: no limit.

        Returns:
            The path; None after the timeout.

        Raises:
            ClosedError: The block was left, or was not entered.
            StioError: See `stio.latest`. A later call looks again.
        """
        until = inf if timeout is None else clock.monotonic() + timeout
        notifier = Notifier()

        def body(operation: Operation[Any]) -> str | None:
            operation.on_cancel(notifier.notify)
            while (found := self._look()) is None:
                operation.check()
                left = until - clock.monotonic()
                if left <= 0:
                    return None
                notifier.block_until(lambda: operation.cancelled, min(self._poll_seconds, left))
            return found[0]

        found: str | None = await self._own(Operation(body, name="follow", about=self._path)).wait()
        return found

    async def apply(self) -> Version | None:
        """Load the newest checkpoint, if it is not the one that is loaded; only what differs, if that is possible.

        Each delta is read and checked before the first tensor is changed, and a cancel has no effect while its elements
        are copied. After an error or a cancel of any other load, some tensors may be new (an error says so), and the
        next call loads all of them.

        Returns:
            What was applied; None: there is nothing newer.

        Raises:
            ClosedError: The block was left, or was not entered.
            RuntimeError: Another call of it has not ended.
            StioError: See `stio.load_into`.
        """
        if self._applies:
            raise RuntimeError("another call of apply() has not ended")
        self._applies = True
        try:
            return await self._apply()
        finally:
            self._applies = False

    async def _apply(self) -> Version | None:
        began, failed = time.perf_counter(), None
        while found := await self._own(Operation(lambda _: self._look(), name="follow", about=self._path)).wait():
            path, state = found
            try:
                loaded = await self._load(path, self._own)
            except Exception as error:
                self._seen = None
                is_gone = isinstance(error, CheckpointNotFoundError | ChangedDuringReadError)
                if is_gone and failed != found:  # a checkpoint that was deleted or replaced: look again
                    failed = found
                    continue
                self._advise(error)
                raise
            self._held = _Applied(path, loaded.content)
            if self._seen is not None and self._seen.found == found:
                self._seen = _Seen(self._seen.entries, self._held, state, None)
            seconds, changed_bytes = time.perf_counter() - began, loaded.changed_bytes
            self._version = Version(
                path=path, step=self._step(path), kind=loaded.kind, changed_bytes=changed_bytes, seconds=seconds
            )
            return self._version
        if not self._load.is_whole:
            gone = CheckpointNotFoundError("there is no checkpoint any more", path=self._path)
            self._advise(gone)
            raise gone
        return None

    def _advise(self, error: Exception) -> None:
        """Add to an error whether what is followed must be loaded again."""
        if self._load.is_whole:
            return
        advice = "some tensors are of another version than others: do not use them before apply(), which loads all"
        if isinstance(error, StioError):
            error.message += f"; {advice}"
            error.args = (error.message,)
        else:
            error.add_note(advice)

    def _step(self, path: str) -> int | None:
        """Return the step in the name of a checkpoint: its own, or that of the folder in the run that holds it."""
        name = path[len(self._path) :].lstrip(os.sep).split(os.sep)[0] or self._path.rpartition(os.sep)[2]
        step = step_of(name)
        return None if step is None else step.number

    def _look(self) -> tuple[str, object] | None:
        """Return the path and the state of the newest checkpoint; None if there is none, or it is loaded. Blocks."""
        held = self._held if self._load.is_whole else None
        now = self._newest_entries(), held, None if held is None else _state_of(held.path)
        if self._seen is not None and self._seen[:3] == now:
            return self._seen.found  # nothing has changed: no file is opened
        path = self._newest()
        if path is None:
            return None
        found: tuple[str, object] | None = path, _state_of(path)
        if held is not None and path == held.path and self._holds(held.content, path):
            found = None
        if any(path == entry or path.startswith(entry + os.sep) for entry, _ in now[0]):  # else it may be completed
            self._seen = _Seen(*now, found)
        return found

    def _holds(self, content: object, path: str) -> bool:
        """Return whether a checkpoint still has a content, beside which something else was written."""
        try:
            with closing(open_checkpoint(path, self._open_options)) as opened:
                return content_of(opened) == content
        except (CheckpointNotFoundError, ChangedDuringReadError):
            return False  # it was deleted meanwhile

    def _newest_entries(self) -> list[tuple[str, object]]:
        """Return the paths that name the highest step, or that of the run, each with its state."""
        try:
            by_step = steps_in(self._path)
        except OSError:
            by_step = {}
        steps = [step for step in by_step if step is not None]
        return [(entry, _state_of(entry)) for entry in (by_step[max(steps)] if steps else [self._path])]

    def _newest(self) -> str | None:
        left_out: list[str] = []
        if os.path.isdir(self._path):
            with suppress(CheckpointNotFoundError):  # a step that was deleted meanwhile
                path, left_out = newest_in(self._path, follow_symlinks=self._open_options.follow_symlinks)
                if path is not None:
                    return path
        with suppress(CheckpointNotFoundError, FormatError, IndexFormatError, MismatchError):  # it is not complete
            open_checkpoint(self._path, self._open_options).close()
            return self._path
        if left_out[:1] != self._left_out:
            self._left_out = left_out[:1]
            for text in self._left_out:
                log(logging.WARNING, "%s has no complete checkpoint of a step; left out: %s", self._path, text)
        return None

    async def __aenter__(self) -> Self:
        if self._version is not None or self._is_open:
            raise RuntimeError("a follower is entered once; make another one by stio.follow")
        self._is_open = True
        try:
            await self.__anext__()
        except BaseException:
            self._is_open = False
            raise
        return self

    async def __aexit__(self, kind: object, *error: object) -> None:
        await self._close(may_wait=kind is not GeneratorExit or runs_blocking())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Version:
        while True:
            await self.wait()
            if (version := await self.apply()) is not None:
                return version

    async def aclose(self) -> None:
        """Cancel what is under way, and wait until it has ended. Idempotent."""
        await self._close()

    async def _close(self, *, may_wait: bool = True) -> None:
        self._is_open = False
        # After the assignment: `_own` registers an operation first, and looks at `_is_open` then.
        operations = [one for known in self._operations.valuerefs() if (one := known()) is not None]
        await close_all(operations, may_wait=may_wait)

    def _own(self, operation: Operation[Any]) -> Operation[Any]:
        self._operations[id(operation)] = operation
        if not self._is_open:
            raise ClosedError("the follower is not open; use it inside its block", path=self._path)
        return operation


def _state_of(path: str) -> object:
    """Return what changes when a file, or one of those in a directory, is written or replaced; None: there is none."""
    try:
        if not os.path.isdir(path):
            return _stamp(os.stat(path))
        with os.scandir(path) as entries:
            return sorted((entry.name, *_stamp(entry.stat())) for entry in entries)
    except OSError:
        return None


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@described_by(load_into)
def follow(
    module: nn.Module | Mapping[str, torch.Tensor],
    path: str | os.PathLike[str],
    *,
    poll_seconds: float = 0.5,
    budget_bytes: int | str | None = None,
    strict: bool = True,
    limits: Limits | None = None,
    verify: bool = False,
    follow_symlinks: bool = False,
    trace: Trace | None = None,
) -> Follower:
    """Return a follower, which keeps a module at the newest checkpoint of a run.

        async with stio.follow(model, "run/") as updates:
            async for version in updates:
                print(version.path, version.kind, version.seconds)

    Entering the block waits until there is a checkpoint, and loads it as `stio.load_into` does. Of a newer one only the
    elements that differ are read and written, in place, if it is a delta on the version that is loaded, or a chain of
    them. Otherwise it is loaded whole.

    Nobody else may write to the tensors, and while a version is applied nobody should read them: call `wait` and then
    `apply` between two batches, instead of iterating.

    Args:
        module: A module; or a dictionary of tensors with the names of the checkpoint.
        path: The directory of a run, whose newest checkpoint is that of `stio.latest`, or a checkpoint that is replaced
            in its place. It need not exist yet.
        poll_seconds: Time between two looks at the directory.
        budget_bytes: See `stio.load`. Deltas of more bytes are not read: the checkpoint is loaded whole then. None: the
            deltas behind the loaded version are in host memory at one time, whatever their size.
        verify: See `stio.load`. Deltas with a manifest are always compared with it.
        ...: The other arguments are those of `stio.load_into`.

    Returns:
        The follower; it can be entered once.

    Raises:
        TypeError: An argument is of the wrong type.
        ValueError: An argument has a wrong value, or the path is a URL.
        StioError: On entering the block; see `stio.load_into`.
    """
    options = LoadOptions(**keywords_for(LoadOptions, locals()))
    if isinstance(module, nn.Module):
        make: Callable[[], LoadTarget] = partial(ModuleTarget, module)
    elif isinstance(module, Mapping) and all(isinstance(one, torch.Tensor) for one in module.values()):
        make = partial(StateTarget, module)
    else:
        raise TypeError(f"follow takes a module or a dictionary of tensors, not {printable(repr(module))}")
    return Follower(path, ModuleLoads(make, options), poll_seconds, options)
