"""What the asynchronous and the blocking `Saver` share: which saves are under way, what failed, what is rotated out."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import replace
from typing import Literal, Unpack
from weakref import WeakSet

from stio.errors import ClosedError, CommitUncertainError, SaveInProgressError, StioError
from stio.runtime.process import after_fork_in_child
from stio.saving.body import Durable
from stio.saving.options import DestinationLike, SaveKeywords, SaveOptions, TensorsLike
from stio.saving.pending import PendingSave
from stio.saving.staging_pool import StagingPool
from stio.storage.commit.retention import remove_checkpoint

__all__ = ["SaverBase", "WhenFull"]

logger = logging.getLogger("stio")

WhenFull = Literal["wait", "error"]


class SaverBase:
    """Saves one after the other, with staging memory that is reused.

    Args:
        keep_last: Delete the saver's own older checkpoints once so many newer ones are durable; None keeps all.
        max_pending: Most saves that are under way at once. Each holds a snapshot of its own.
        when_full: What a save does when as many are under way: wait for the oldest, or raise `SaveInProgressError`.
        budget_bytes: Most bytes of staging memory; None: as many as the snapshots take, so that a save is staged at the
            speed of memory. Below a snapshot's size it is staged while it is written.
        **keywords: Defaults for `save`.
    """

    def __init__(
        self,
        *,
        keep_last: int | None = None,
        max_pending: int = 1,
        when_full: WhenFull = "wait",
        budget_bytes: int | None = None,
        **keywords: Unpack[SaveKeywords],
    ) -> None:
        if keep_last is not None:
            _require_count("keep_last", keep_last)
        _require_count("max_pending", max_pending)
        if when_full not in ("wait", "error"):
            raise ValueError(f"when_full= takes 'wait' or 'error', not {when_full!r}")
        SaveOptions(**keywords)  # raises for what is wrong, before anything depends on it
        self._keep_last = keep_last
        self._max_pending = max_pending
        self._when_full = when_full
        self._keywords = keywords
        self._budget_bytes = budget_bytes
        self._closed = False
        self._start_afresh()
        _savers.add(self)

    def _start_afresh(self) -> None:
        """Know of no save. In a forked child the parent's saves go on there, and its checkpoints stay its own."""
        self._pool = StagingPool(self._budget_bytes)
        self._lock = threading.Lock()
        self._saves: deque[PendingSave] = deque()  # in the order of their calls; the ended ones leave at the next look
        self._failures: deque[BaseException] = deque()
        self._kept: dict[tuple[str, str | None], Durable] = {}  # by place and names, in the order of their saves

    @property
    def pending(self) -> tuple[PendingSave, ...]:
        """Saves that have not ended, the oldest first."""
        with self._lock:
            return tuple(save for save in self._saves if not save.done())

    def _submit(self, tensors: TensorsLike, destination: DestinationLike, keywords: SaveKeywords) -> PendingSave | None:
        """Begin a save; None where one that is under way has to end first (`_oldest`).

        Raises:
            SaveInProgressError: As many are under way as may be, and the caller wants to hear of it.
            BaseException: What an earlier save failed with, if nobody was told.
        """
        settings = SaveOptions(**(self._keywords | keywords))
        with self._lock:
            if self._closed:
                raise ClosedError("the saver is closed", path=str(destination))
            self._look()
            if self._failures:
                raise self._failures.popleft()
            if len(self._saves) >= self._max_pending:
                if self._when_full == "error":
                    raise SaveInProgressError(
                        "a save is under way; await it, or let this one wait by when_full='wait'",
                        path=str(self._saves[0].destination),
                        expected=f"at most {self._max_pending}",
                        found=len(self._saves),
                    )
                return None
            after = self._saves[-1] if self._saves else None
            save = PendingSave(tensors, destination, settings, pool=self._pool, after=after, when_durable=self._rotate)
            self._saves.append(save)
            return save

    def _oldest(self) -> PendingSave | None:
        """Return the save to wait for, None if none is under way."""
        with self._lock:
            return next((save for save in self._saves if not save.done()), None)

    def _look(self) -> None:
        """Take the saves that have ended off the list, and note failures that nobody was told of."""
        while self._saves and self._saves[0].done():
            save = self._saves.popleft()
            if save.delivered:
                continue
            try:
                save.outcome()
            except BaseException as error:
                if save.cancelled and not isinstance(error, CommitUncertainError):
                    continue  # it is rolled back, as was asked for
                logger.error("saving failed, and nobody waited for it: %s", error)
                self._failures.append(error)

    def _close(self) -> None:
        """Take no further saves; from here on those under way get fewer."""
        with self._lock:
            self._closed = True

    def _finish(self) -> BaseException | None:
        """Let go of the memory, once all saves have ended; return the first failure that nobody was told of."""
        with self._lock:
            self._look()
            self._pool.clear()
            failures, self._failures = self._failures, deque()
        return failures[0] if failures else None

    def _rotate(self, saved: Durable) -> None:
        """Delete what is older than the newest `keep_last` (called on the save's thread, once it is durable)."""
        if self._keep_last is None:
            return
        key = saved.path, saved.filename_pattern
        before = self._kept.pop(key, saved)  # saved there again: now the newest, in a directory that is as it was
        self._kept[key] = replace(saved, fresh=before.fresh)
        while len(self._kept) > self._keep_last:
            old = self._kept.pop(next(iter(self._kept)))
            spare = frozenset().union(*(kept.files for kept in self._kept.values()))
            try:
                remove_checkpoint(old.path, filename_pattern=old.filename_pattern, whole=old.fresh, spare=spare)
            except StioError as error:
                logger.warning("an old checkpoint could not be deleted: %s", error)


def _require_count(keyword: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{keyword} takes a number, not {value!r}")
    if value < 1:
        raise ValueError(f"{keyword} must be at least 1, not {value}")


_savers: WeakSet[SaverBase] = WeakSet()


@after_fork_in_child
def _forget_parent() -> None:
    """Start afresh in a forked child: the parent's saves are not here, and had blocks and locks when they were left."""
    for saver in list(_savers):
        saver._start_afresh()
