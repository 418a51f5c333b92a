"""Saves of many ranks to a store: each file has an owner, which uploads it, and the others send it their parts.

The first rank has the transaction of `stio.storage.remote`: it reads what the store has, puts the index, and deletes
the old checkpoint. The others upload objects whose names it has chosen. Such an object is no checkpoint until the index
names it. One file alone is uploaded by the first rank, since the end of that upload is the commit.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Annotated, Any

import torch.distributed as dist
from msgspec import Meta

from stio.distributed.exchange import NUM_WINDOWS, TABLE_PART, WINDOW_BYTES, Exchange, SendPlan, table_bytes
from stio.distributed.ranks import Ranks
from stio.distributed.shared_save import RankTransaction, ShardedSave
from stio.format.manifest import Hasher
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.notifier import run_blocking
from stio.runtime.operation import Operation
from stio.saving.options import SaveResult
from stio.saving.plan import WritePlan
from stio.saving.plan_parts import Window, WrittenPart, plan_stream
from stio.storage.base import Ending, FileWriter, Transaction
from stio.storage.remote.save import RemoteDestination, RemoteTransaction, Uploads

_SMALLEST_WINDOW_BYTES = 16 * PAGE_BYTES

_WindowBytes = Annotated[int, Meta(ge=_SMALLEST_WINDOW_BYTES, le=WINDOW_BYTES, multiple_of=PAGE_BYTES)]


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

    def _plan_own(self, plan: WritePlan, parts: Mapping[str, WrittenPart], block_bytes: int) -> WritePlan:
        window_bytes: int = min(self._arrive("window", self._store.window_bytes, kind=_WindowBytes))
        sizes = [shard.nbytes for shard in plan.shards]
        owners = owners_of(sizes, self._ranks.num_ranks)
        windows = cut_windows(sizes, owners, window_bytes)
        own, packets = plan_stream(plan, parts, windows, block_bytes)
        if window_bytes > _SMALLEST_WINDOW_BYTES:
            # The table of many tiny ranges is longer than their bytes.
            most_bytes = window_bytes // TABLE_PART // self._ranks.num_ranks
            long = [one.window for one in packets if table_bytes(one) > most_bytes]
            long_of_all = {number for found in self._arrive("long", long, kind=list[int]) for number in found}
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

    def _share(self, transaction: Transaction, operation: Operation[SaveResult]) -> RankTransaction:
        assert isinstance(transaction, RemoteTransaction)
        transaction.share()
        self._ranks.share("names", transaction.shard_names)
        return self._transaction(transaction, transaction, operation)

    def _join(self, operation: Operation[SaveResult]) -> RankTransaction:
        uploads = self._store.inner.join(run_blocking(self._ranks.fetch("names", kind=tuple[str, ...])))
        self._undo = uploads.roll_back
        return self._transaction(None, uploads, operation)

    def _transaction(
        self, first: Transaction | None, uploads: Uploads, operation: Operation[SaveResult]
    ) -> RankTransaction:
        new_exchange = partial(
            Exchange, self._send_plan, self._ranks, save=operation, new_hasher=self._hasher(), trace=self._options.trace
        )
        return _ObjectTransaction(first, uploads, new_exchange, self._ranks, path=str(self._store))


class _ObjectTransaction(RankTransaction):
    """The transaction of a save to a store.

    Args:
        first: See `RankTransaction`.
        uploads: What this rank uploads; on the first rank the transaction.
        new_exchange: Makes the exchange, with the writers of all files.
        ranks: The ranks.
        path: The destination.
    """

    def __init__(
        self,
        first: Transaction | None,
        uploads: Uploads,
        new_exchange: Callable[[Sequence[FileWriter]], Exchange],
        ranks: Ranks,
        *,
        path: str,
    ) -> None:
        super().__init__(first, ranks, path=path, shard_names=uploads.shard_names)
        self._uploads, self._new_exchange = uploads, new_exchange
        self._exchange: Exchange | None = None

    def _create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Begin the exchange; return what takes the stream of this rank."""
        self._exchange = self._new_exchange(self._uploads.create(nbytes))
        self._exchange.start()
        return [self._exchange.stream]

    def _end(self, ending: Ending) -> None:
        """End the exchange on all ranks, and begin to end the uploads of this one. `ShardedSave` deletes them later."""
        if ending != "published":
            self._uploads.stop()
            if self._exchange is not None:
                self._exchange.close()

    def _digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> dict[int, str]:
        self._finish(check)  # they were computed during the upload
        assert self._exchange is not None
        return self._exchange.digests()

    def _finish(self, check: Callable[[], None]) -> None:
        assert self._exchange is not None
        self._exchange.wait()
        check()

    def _leave(self) -> None:
        # Once the first rank may have published the objects, another one must not delete them.
        self._uploads.leave()


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


# Which rank uploads each file, and in which pieces the other ranks send it the bytes. Pure.


def owners_of(sizes: Sequence[int], num_ranks: int) -> list[int]:
    """Return the rank that uploads each file: the largest files first, each to the rank with the fewest bytes so far.

    One file alone is the first rank's, which commits it.

    Args:
        sizes: Bytes of each file.
        num_ranks: Number of ranks.
    """
    owned = [0] * num_ranks
    owners = [0] * len(sizes)
    for file in sorted(range(len(sizes)), key=lambda file: (-sizes[file], file)):
        owner = owned.index(min(owned))
        owners[file] = owner
        owned[owner] += sizes[file]
    return owners


def cut_windows(sizes: Sequence[int], owners: Sequence[int], window_bytes: int) -> list[Window]:
    """Return the windows of all files, in the order in which they are sent: one of each owner in turn.

    An owner's files follow each other, so that few are under way at one time.

    Args:
        sizes: Bytes of each file.
        owners: The rank that uploads each.
        window_bytes: Size of a window; a multiple of `PAGE_BYTES`.
    """
    of_owner: dict[int, list[Window]] = {owner: [] for owner in sorted(set(owners))}
    for file, (size, owner) in enumerate(zip(sizes, owners, strict=True)):
        of_owner[owner] += _cut(Window(file, 0, size), window_bytes)
    return [window for turn in zip_longest(*of_owner.values()) for window in turn if window is not None]


def cut_again(windows: Sequence[Window], numbers: Container[int], window_bytes: int) -> list[Window]:
    """Return the windows with some of them cut into smaller ones, which take their places.

    Args:
        windows: All of them.
        numbers: Which ones are cut.
        window_bytes: Size of a smaller one; a multiple of `PAGE_BYTES`.
    """
    found: list[Window] = []
    for number, window in enumerate(windows):
        found += _cut(window, window_bytes) if number in numbers else [window]
    return found


def _cut(window: Window, window_bytes: int) -> list[Window]:
    file, begin, end = window
    return [Window(file, at, min(at + window_bytes, end)) for at in range(begin, end, window_bytes)]
