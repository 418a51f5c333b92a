"""Work of all ranks in a Gloo group of their own, which they leave together.

An operation in the group cannot be interrupted: a rank that waits for one that has left would wait for ever. So the
work consists of steps. At the start of each, the ranks add up a few numbers, among them whether one has to stop,
because it failed or is cancelled. If one has, all leave. A step takes a fraction of a second, also while there is
nothing to send. A rank that is killed closes its connections, which is an error on the others at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from time import monotonic
from typing import Any

import torch
import torch.distributed as dist

from stio.distributed.ranks import Ranks, named
from stio.errors import RankError, printable
from stio.runtime.blocking import run_blocking
from stio.runtime.operation import Cancelled, Operation

_SILENT_SIGNS = 3
"""After a broken connection, a rank that omits so many signs of life is named as the cause."""


class StepGroup:
    """The group in which ranks take steps. One rank alone needs none.

    Args:
        ranks: The ranks, all of which make one.

    Raises:
        RuntimeError: There is no connection to the others.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._group: Any = ranks.new_gloo_group() if ranks.num_ranks > 1 else None

    def add_up(self, numbers: Sequence[int], *, stop: bool) -> list[int] | None:
        """Begin a step: add up the numbers of all ranks.

        Args:
            numbers: Those of this rank, as many on each.
            stop: Whether this rank has to stop.

        Returns:
            The sums; None if a rank has to stop, and all leave.
        """
        sums = torch.tensor([*numbers, int(stop)], dtype=torch.int64, device="cpu")
        if self._group is not None:
            self._group.allreduce([sums], dist.AllreduceOptions()).wait()
        *found, stops = sums.tolist()
        return None if stops else found

    def broadcast(self, data: torch.Tensor, owner: int) -> Any:
        """Begin to send data of a rank to all others, on which it is filled; return what to `wait()` for."""
        how = dist.BroadcastOptions()
        how.rootRank = owner
        return self._group.broadcast([data], how)

    def send(self, data: torch.Tensor, rank: int) -> Any:
        """Begin to send data to a rank, which receives as many bytes; return what to `wait()` for."""
        return self._group.send([data], rank, 0)

    def receive(self, data: torch.Tensor, rank: int) -> Any:
        """Begin to fill data from a rank; return what to `wait()` for."""
        return self._group.recv([data], rank, 0)


def run_steps(
    ranks: Ranks,
    operation: Operation[Any],
    steps: Callable[[StepGroup], bool],
    raise_own_error: Callable[[], None],
    *,
    about: str,
) -> None:
    """Run a function in a group of the ranks, which all of them leave together.

    Args:
        ranks: The ranks, all of which call this.
        operation: Its cancel wakes the ranks (`Ranks.wake`).
        steps: Called with the group. Returns whether a rank had to stop. It keeps each error of this rank until the
            next step, and then stops all; none leaves it but those of the group.
        raise_own_error: Raises the error of this rank, if it has one.
        about: What the ranks do, for messages.

    Raises:
        Cancelled: The operation was cancelled.
        RankError: A rank has failed, or the connection to it broke.
        BaseException: The error of this rank.
    """
    # From here on, until the group is there, this rank does nothing that may fail: others may wait in it.
    run_blocking(ranks.arrive("ready", interruptible=False))
    broken: str | None = None
    has_stopped = True
    try:
        has_stopped = steps(StepGroup(ranks))
    except RuntimeError as error:  # DistError and its subclasses
        broken = printable(str(error).partition("\n")[0])
    raise_own_error()
    operation.check()
    if broken is not None:
        failure = _broken(ranks, operation, broken, about)
        ranks.report_failure(failure.ranks, failure.message)
    if has_stopped:  # the rank that had to stop tells why
        run_blocking(ranks.fetch("failure", ended=lambda: operation.cancelled))


def _broken(ranks: Ranks, operation: Operation[Any], reason: str, about: str) -> RankError:
    """Return the error after a broken connection; ranks that give no sign of life are named as the cause.

    Raises:
        RankError: A rank has told why it failed.
        Cancelled: The operation was cancelled.
    """
    end = monotonic() + _SILENT_SIGNS * ranks.sign_seconds
    before = _signs(ranks, operation)
    with suppress(Cancelled):
        run_blocking(ranks.fetch("failure", ended=lambda: operation.cancelled or monotonic() > end))
    operation.check()
    silent = [rank for rank, (old, new) in enumerate(zip(before, _signs(ranks, operation), strict=True)) if old == new]
    if not silent:
        return RankError(f"the connection to another rank broke during the {about} ({reason})")
    text = f"the connection to {named(silent)} broke during the {about}; was it killed? ({reason})"
    return RankError(text, ranks=tuple(silent))


def _signs(ranks: Ranks, operation: Operation[Any]) -> list[bytes]:
    """Return the last sign of life of each rank."""
    ended = partial(getattr, operation, "cancelled")
    return [run_blocking(ranks.fetch("sign", rank, ended=ended)) for rank in range(ranks.num_ranks)]
