"""Transfers of many bytes between ranks: collective calls in steps that all ranks take, or none does.

A collective call cannot be interrupted: a rank that waits in one for a rank that never comes would wait for ever. So
before each step the ranks agree, by the minimum of one number, on how many items they send next. A rank that is not
ready says 0, and a rank that has to stop, because it failed or was cancelled, says `_STOP`: then all leave together. A
rank asks itself again after at most `_PAUSE` seconds, so a cancel is heard while one rank waits for its storage.

The bytes are in the memory of the host, where files are read into and uploads start from, so they go over Gloo, also
beside the NCCL groups of a program. The group is stio's own. It is connected once for each process group, and kept for
the next transfer. If a connection breaks, it is closed, which breaks those of all ranks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from stio import clock
from stio.distributed.ranks import Ranks
from stio.errors import RankError, printable
from stio.runtime import Cancelled, Operation, calls, run_blocking

_STOP = -1
_PAUSE = 0.005
"""Seconds that a rank waits until it is ready, before it asks the others again."""


class RankTransfer:
    """Sends bytes between ranks; there is a subclass for each kind of transfer. All ranks make one, and `run` it.

    Args:
        ranks: The ranks.
        operation: The operation on whose thread it runs. It is cancelled when another rank has failed.
        beside: What this rank does meanwhile on a thread of its own: read what it sends, or upload what it receives.
        about: What they do, for messages.
        items: Numbers of what is sent, in order; the same on all ranks.
    """

    def __init__(
        self, ranks: Ranks, operation: Operation[Any], beside: Operation[None], about: str, items: Iterable[int]
    ) -> None:
        self._ranks, self._operation, self._beside, self._about = ranks, operation, beside, about
        self._left = deque(items)
        self._error: BaseException | None = None
        """Of this rank, in a step; the others learn of it before the next one."""
        self._group: Any = None
        """The `ProcessGroupGloo`, while the transfer runs. One rank alone needs none."""

    # What depends on the kind.

    def _wait(self, seconds: float) -> None:
        """Wait until this rank may be ready for the next item, at most for some seconds."""
        raise NotImplementedError

    def _num_ready(self) -> int:
        """Return how many of the items that are left this rank can send and receive now."""
        raise NotImplementedError

    def _send(self, items: Sequence[int]) -> None:
        """Send the next items, on all ranks.

        It keeps its errors in `_error`. If one leaves it, no call of this rank may be under way.
        """
        raise NotImplementedError

    # How.

    def run(self) -> None:
        """Send all. When this returns or raises, no call in the group is under way, and `beside` has ended.

        Raises:
            Cancelled: The operation was cancelled.
            RankError: A rank has failed, or the connection to it broke.
            BaseException: The error of this rank.
        """
        self._operation.on_cancel(self._beside.cancel)
        try:
            self._beside.start()
            self._send_all()
            self._beside.join()
            self._operation.check()
            self._beside.outcome()
        finally:
            self._beside.close()

    def _send_all(self) -> None:
        ranks, broken = self._ranks, ""
        try:
            name = self._join()
            has_stopped = self._take_steps()
            if self._group is not None:
                ranks.groups.append((name, self._group))
        except (RankError, Cancelled):  # an error of this rank ends its steps by a cancel; that error is reported
            raise
        except RuntimeError as error:  # DistError and its subclasses
            broken, has_stopped = printable(str(error).partition("\n")[0]), True
        except BaseException as error:
            ranks.report_error(error)  # the others get an error of their connections, and look for the cause
            raise
        finally:
            self._group = None  # closes the connections, unless the group is kept
        for own in (self._beside.failure, self._error):
            if own is not None:
                raise own
        self._operation.check()
        if has_stopped:  # the rank that had to stop reports why; the first rank finds out which one was killed
            end = clock.monotonic() + ranks.timeout + 2 * ranks.sign_seconds
            run_blocking(ranks.wait_until(lambda: bool(broken) and clock.monotonic() > end))
            raise RankError(f"the connection to another rank broke during the {self._about} ({broken})")

    def _join(self) -> str:
        """Take the group of the transfer before this one, or make one; return its name.

        A group is used again if all ranks have the same one. After a failure, or while two transfers run at a time, a
        rank may have none, or another one.
        """
        ranks = self._ranks
        if ranks.num_ranks == 1:
            return ""
        name, self._group = ranks.groups.pop() if ranks.groups else ("", None)
        if set(run_blocking(ranks.arrive("group", name, kind=str))) != {name} or not name.endswith(f" {ranks.timeout}"):
            self._group = None
            # On a thread that a failure or a cancel leaves behind: it waits for each of the others.
            name, self._group = calls.Call(ranks.connect).result()
            run_blocking(ranks.arrive("connected"))
        return name

    def _take_steps(self) -> bool:
        """Take steps until all is sent; return whether a rank had to stop before that."""
        while True:
            must_stop = self._operation.cancelled or self._error is not None or self._beside.failure is not None
            number = torch.tensor([_STOP if must_stop else self._num_ready()], dtype=torch.int64, device="cpu")
            if self._group is not None:
                how = dist.AllreduceOptions()
                how.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
                self._group.allreduce([number], how).wait()
            num_items = int(number)
            if num_items == _STOP or not self._left:
                return num_items == _STOP
            if num_items:
                self._send([self._left.popleft() for _ in range(num_items)])
            else:
                self._wait(_PAUSE)
