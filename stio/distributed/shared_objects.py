"""Saves of many ranks to a store: each file has an owner, which uploads it, and the others send it their parts.

The first rank has the transaction of `stio.storage.remote`: it reads what the store has, puts the index, and deletes
the old checkpoint. The others upload objects whose names it has chosen. Such an object is no checkpoint until the index
names it. One file alone is uploaded by the first rank, since the end of that upload is the commit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from stio.distributed.exchange import NUM_WINDOWS, TABLE_PART, WINDOW_BYTES, Exchange, SendPlan, table_bytes
from stio.distributed.shared_save import OwnPart, ShardedSave
from stio.distributed.windows import cut_again, cut_windows, owners_of
from stio.runtime.blocking import run_blocking
from stio.runtime.hashing import Hasher
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.operation import Operation
from stio.saving.options import SaveResult
from stio.saving.plan import WritePlan
from stio.saving.plan_parts import Part, plan_stream
from stio.storage.base import FileWriter, Transaction
from stio.storage.remote.save import RemoteDestination, RemoteTransaction, Uploads

_SMALLEST_WINDOW_BYTES = 16 * PAGE_BYTES


def is_store(destination: object) -> bool:
    """Return whether a destination is one of a store that many ranks can save to."""
    return isinstance(destination, RemoteDestination)


class SaveToStore(ShardedSave):
    """A `ShardedSave` to a URL or a `RemoteRoot`."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        if self._ranks.num_ranks > 1 and not dist.is_gloo_available():
            raise ValueError("saves of many ranks to a store need a torch with Gloo, and this one has none")
        where = self._absolute_destination
        assert isinstance(where, RemoteDestination)
        self._absolute_destination = _Store(where)

    @property
    def _store(self) -> _Store:
        assert isinstance(self._absolute_destination, _Store)
        return self._absolute_destination

    def _plan_own(self, plan: WritePlan, parts: Mapping[str, Part], block_bytes: int) -> WritePlan:
        window_bytes = min(map(int, self._arrive("window", str(self._store.window_bytes).encode())))
        sizes = [shard.nbytes for shard in plan.shards]
        owners = owners_of(sizes, self._ranks.num_ranks)
        windows = cut_windows(sizes, owners, window_bytes)
        own, packets = plan_stream(plan, parts, windows, block_bytes)
        if window_bytes > _SMALLEST_WINDOW_BYTES:
            # The table of many tiny ranges is longer than their bytes.
            most_bytes = window_bytes // TABLE_PART // self._ranks.num_ranks
            long = json.dumps([one.window for one in packets if table_bytes(one) > most_bytes])
            long_of_all = {number for value in self._arrive("long", long.encode()) for number in json.loads(value)}
            if long_of_all:
                windows = cut_again(windows, long_of_all, _SMALLEST_WINDOW_BYTES)
                own, packets = plan_stream(plan, parts, windows, block_bytes)
        self._send_plan = SendPlan(
            path=str(self._store),
            owners=owners,
            headers=[shard.header for shard in plan.shards],
            windows=windows,
            window_bytes=window_bytes,
            packets=packets,
        )
        return own

    def _share(self, transaction: Transaction, operation: Operation[SaveResult]) -> OwnPart:
        assert isinstance(transaction, RemoteTransaction)
        transaction.share()
        self._ranks.share("names", json.dumps(transaction.shard_names).encode())
        return _Objects(transaction, self._exchange(operation), path=str(self._store))

    def _join(self, operation: Operation[SaveResult]) -> OwnPart:
        uploads = self._store.inner.join(json.loads(run_blocking(self._ranks.fetch("names"))))
        self._undo = uploads.roll_back
        return _Objects(uploads, self._exchange(operation), path=str(self._store))

    def _exchange(self, operation: Operation[SaveResult]) -> Callable[[Sequence[FileWriter]], Exchange]:
        """Return what makes the exchange, once the writers are there."""
        return partial(
            Exchange,
            self._send_plan,
            self._ranks,
            save=operation,
            new_hasher=self._hasher(),
            trace=self._options.trace,
        )


class _Objects:
    """What one rank uploads and sends.

    Args:
        uploads: Its uploads; on the first rank the transaction.
        new_exchange: Makes the exchange, with the writers of all files.
        path: The destination.
    """

    def __init__(
        self,
        uploads: Uploads,
        new_exchange: Callable[[Sequence[FileWriter]], Exchange],
        *,
        path: str,
    ) -> None:
        self._uploads, self._new_exchange = uploads, new_exchange
        self.shard_names, self.path = uploads.shard_names, path
        self._exchange: Exchange | None = None

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Begin the exchange; return what takes the stream of this rank."""
        self._exchange = self._new_exchange(self._uploads.create(nbytes))
        self._exchange.start()
        return [self._exchange.stream]

    def digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> dict[int, str]:
        """Return the digests of the files that this rank has uploaded, computed during the upload."""
        self.finish(check)
        assert self._exchange is not None
        return self._exchange.digests()

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until the bytes of this rank are sent, and its files are uploaded."""
        assert self._exchange is not None
        self._exchange.wait()
        check()

    def prepare_commit(self, check: Callable[[], None]) -> None:
        """Nothing to do: the objects are complete."""

    def leave(self) -> None:
        """Leave the objects to the first rank. Once it may have published them, another one must not delete them."""
        self._uploads.leave()

    def roll_back(self) -> None:
        """End the exchange on all ranks, and begin to end the uploads of this one. `ShardedSave` deletes them later."""
        self._uploads.stop()
        if self._exchange is not None:
            self._exchange.close()


@dataclass(frozen=True, slots=True)
class _Store:
    """A store as the destination of many ranks, which needs memory for windows beside that for parts of uploads."""

    inner: RemoteDestination
    """The destination of one rank."""
    window_bytes: int = WINDOW_BYTES
    """Largest window."""

    def __str__(self) -> str:
        return str(self.inner)

    def within(self, budget_bytes: int) -> tuple[_Store, int]:
        """Return it with less memory, and how much that is; see `BufferedDestination`."""
        inner, nbytes = self.inner.within(budget_bytes)
        fits = (budget_bytes - nbytes) // 2 // NUM_WINDOWS // PAGE_BYTES * PAGE_BYTES
        window_bytes = max(_SMALLEST_WINDOW_BYTES, min(WINDOW_BYTES, fits))
        return replace(self, inner=inner, window_bytes=window_bytes), nbytes + NUM_WINDOWS * window_bytes

    def begin(self, **options: Any) -> Transaction:
        """Begin one save; see `RemoteDestination.begin`."""
        return self.inner.begin(**options)
