"""Transfers between ranks: in steps, in a Gloo group of their own, which all ranks leave together.

An operation in the group cannot be interrupted: a rank that waits for one that does not take part would wait for ever.
So a transfer consists of steps. At the start of each, the ranks add up a few numbers, among them whether one has to
stop, because it failed or is cancelled. If one has, all leave. A step takes a fraction of a second, also while there is
nothing to send. A rank that closes its connections, or is killed, is an error on the others at once.

The group is made while the ranks can still be interrupted. Torch waits for connections as long as `Ranks.timeout`, so
another thread makes them. The first step begins when all ranks have theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from stio.distributed.ranks import Ranks, named
from stio.errors import RankError, printable
from stio.runtime import clock
from stio.runtime.notifier import run_blocking
from stio.runtime.operation import Cancelled, Operation, start_thread

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.001, 0.02
"""Seconds that a rank waits for a change of its own before the next step; they double while nothing is sent."""

_SILENT_SIGNS = 3
"""After a broken connection, a rank that omits so many signs of life is named as the cause."""


class _GlooStore(Store):
    """The store by which Gloo's processes find each other. Its values are those of `Ranks`.

    So they are deleted with the others, and a wait for one of them ends when a rank has failed or left.
    """

    def __init__(self, ranks: Ranks) -> None:
        super().__init__()
        self._ranks = ranks

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # torch passes bytes
        self._ranks.put(f"gloo/{key}", value)

    def get(self, key: str) -> bytes:
        return run_blocking(self._ranks.values([f"gloo/{key}"]))[0]

    def wait(self, keys: list[str], timeout: timedelta) -> None:  # type: ignore[override]  # Gloo always has one
        end = clock.monotonic() + timeout.total_seconds()
        try:
            run_blocking(self._ranks.values([f"gloo/{key}" for key in keys], ended=lambda: clock.monotonic() > end))
        except Cancelled:
            raise RuntimeError(f"a rank has sent no network address for {timeout.total_seconds():g} s") from None


class SteppedTransfer:
    """Sends bytes between ranks; there is a subclass for each kind of transfer. All ranks make one, and `run` it.

    Args:
        ranks: The ranks.
        about: What they do, for messages.
    """

    def __init__(self, ranks: Ranks, about: str) -> None:
        self._ranks, self._about = ranks, about
        self._error: BaseException | None = None
        """Of this rank, in a step; the others learn of it in the next one."""
        self._group: Any = None
        """The `ProcessGroupGloo` of the transfer while it runs. One rank alone needs none."""

    _operation: Operation[Any]
    """The operation on whose thread it runs. Its cancel wakes the ranks (`Ranks.wake`)."""

    # What depends on the kind.

    def _failure(self) -> BaseException | None:
        """Return an error of another thread of this rank, on which the transfer depends."""
        raise NotImplementedError

    def _wait(self, seconds: float) -> None:
        """Wait until this rank may have something to send, at most for some seconds."""
        raise NotImplementedError

    def _numbers(self) -> list[int]:
        """Return the numbers that all ranks add up, as many on each."""
        raise NotImplementedError

    def _is_complete(self) -> bool:
        """Return whether all is sent; the same on all ranks."""
        raise NotImplementedError

    def _step(self, sums: Sequence[int]) -> bool:
        """Send what all ranks know from the sums; return whether there was something.

        It keeps its errors in `_error`. If one leaves it, no operation of this rank may be under way.
        """
        raise NotImplementedError

    # How.

    def run(self) -> None:
        """Send all. No operation in the group is under way when this returns or raises.

        Raises:
            Cancelled: The operation was cancelled.
            RankError: A rank has failed, or the connection to it broke.
            BaseException: The error of this rank.
        """
        ranks, operation = self._ranks, self._operation
        ended = partial(getattr, operation, "cancelled")
        run_blocking(ranks.arrive("ready", ended=ended))  # Gloo's time limits begin
        broken: str | None = None
        has_stopped = True
        try:
            store = _GlooStore(ranks)  # as long as the group: with TORCH_GLOO_LAZY_INIT Gloo reads it later
            if ranks.num_ranks > 1:
                self._group = _connected(ranks, store, ended)
            run_blocking(ranks.arrive("connected", ended=ended))
            has_stopped = self._send_all()
        except (RankError, Cancelled):  # an error of this rank ends its steps by a cancel; that error is reported
            raise
        except RuntimeError as error:  # DistError and its subclasses
            broken = printable(str(error).partition("\n")[0])
        except BaseException as error:
            ranks.report_error(error)  # the others get an error of their connections, and look for the cause
            raise
        finally:
            self._group = None  # closes the connections
        for own in (self._failure(), self._error):
            if own is not None:
                raise own
        operation.check()
        if broken is not None:
            failure = _broken(ranks, operation, broken, self._about)
            ranks.report_failure(failure.ranks, failure.message)
        if has_stopped:  # the rank that had to stop reports why
            run_blocking(ranks.fetch("failure", ended=ended))

    def _must_stop(self) -> bool:
        return self._operation.cancelled or self._error is not None or self._failure() is not None

    def _send_all(self) -> bool:
        """Take steps until all is sent; return whether a rank had to stop before that."""
        pause = 0.0
        while True:
            if pause:
                self._wait(pause)
            sums = torch.tensor([*self._numbers(), int(self._must_stop())], dtype=torch.int64, device="cpu")
            if self._group is not None:
                self._group.allreduce([sums], dist.AllreduceOptions()).wait()
            *found, stops = sums.tolist()
            if stops:
                return True
            if self._is_complete():
                return False
            has_sent = self._step(found)
            pause = 0.0 if has_sent else max(_SHORTEST_PAUSE, min(2 * pause, _LONGEST_PAUSE))


def _connected(ranks: Ranks, store: Store, ended: Callable[[], bool]) -> Any:
    """Return a `ProcessGroupGloo` of the ranks alone, when it is connected to all of them.

    No other code uses it, so its operations do not mix with those of the caller's groups. Its connections are closed
    with the last reference to it. An operation in it waits `Ranks.timeout` for the others.

    It is made on a thread that a failure or a cancel leaves behind. That thread uses no buffers, and ends after
    `Ranks.timeout` at the latest.
    """
    made: dict[str, Any] = {}  # under "group": it, or the error; the first one counts

    def make() -> None:
        try:
            # Not by `dist.new_group`, which would add it to the groups of the process: not safe on another thread.
            group = dist.ProcessGroupGloo(store, ranks.rank, ranks.num_ranks, timedelta(seconds=ranks.timeout))
            made.setdefault("group", group)
        except BaseException as error:
            made.setdefault("group", error)
        ranks.wake()

    start_thread(make, name="connect")
    try:
        run_blocking(ranks.wait_until(lambda: "group" in made, ended=ended))
    except BaseException:
        made["group"] = None  # one that is there, or comes later, is closed
        raise
    if isinstance(made["group"], BaseException):
        raise made["group"]
    return made["group"]


def _broken(ranks: Ranks, operation: Operation[Any], reason: str, about: str) -> RankError:
    """Return the error after a broken connection; ranks that give no sign of life are named as the cause.

    Raises:
        RankError: A rank has reported why it failed.
        Cancelled: The operation was cancelled.
    """
    end = clock.monotonic() + _SILENT_SIGNS * ranks.sign_seconds
    before = _signs(ranks, operation)
    with suppress(Cancelled):
        run_blocking(ranks.fetch("failure", ended=lambda: operation.cancelled or clock.monotonic() > end))
    operation.check()
    silent = [rank for rank, (old, new) in enumerate(zip(before, _signs(ranks, operation), strict=True)) if old == new]
    if not silent:
        return RankError(f"the connection to another rank broke during the {about} ({reason})")
    text = f"the connection to {named(silent)} broke during the {about}; was it killed? ({reason})"
    return RankError(text, ranks=tuple(silent))


def _signs(ranks: Ranks, operation: Operation[Any]) -> list[bytes]:
    """Return the last sign of life of each rank."""
    keys = [f"sign/{rank}" for rank in range(ranks.num_ranks)]
    return run_blocking(ranks.values(keys, ended=lambda: operation.cancelled))
