"""One save of many ranks: each writes its parts of the files, and the first rank publishes them.

It is a `PendingSave` with three things of its own. The plan: ranks compare their layouts, then each plans its parts.
The transaction: the first rank has it, the others join it. The end: a rank agrees when what it writes is durable, and
the first one commits when all have agreed. A rank that fails or is cancelled before that ends the save on all of them.
The others have ended their writes before the first rank removes the files.

How a rank writes depends on the destination: into files that all share (`shared_files.py`), or to the ranks that upload
the files (`shared_objects.py`).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch

from stio.device.copy_out import copy_out
from stio.device.describe import LazyTensor
from stio.distributed.layout import TREE, Layout, Share, difference, merged
from stio.distributed.ranks import MOST_VALUE_BYTES, Ranks
from stio.errors import MismatchError, printable
from stio.format.sharding import TensorSource
from stio.format.shared import UNDECLARED, TiedNames, resolve_shared
from stio.format.state_tree import POINTER, STATE_KEY, TREE_TENSOR, sorted_tree, tree_entries
from stio.runtime.blocking import run_blocking
from stio.runtime.hashing import Hasher
from stio.runtime.memory import Region, allocate
from stio.runtime.operation import Operation
from stio.saving.options import DestinationLike, SaveOptions, SaveResult
from stio.saving.pending import PendingSave
from stio.saving.plan import WritePlan, plan_writes
from stio.saving.plan_parts import Part, data_places
from stio.storage.base import FileWriter, Note, Published, Transaction

T = TypeVar("T")

_MOST_COMPARED_BYTES = 16 << 20
"""Longest tensor that is compared with those of other ranks: SHA-256 takes 10 ms of it."""


class ShardedSave(PendingSave):
    """One save of many ranks, on one of them; there is a subclass for each kind of destination.

    See `PendingSave` for the other arguments.

    Args:
        tensors: What this rank holds of each tensor.
        shares: Which part that is, see `Layout`.
        destination: The destination.
        options: The keywords.
        ranks: The ranks, not entered yet.
        tied: See `resolve_shared`; the same on all ranks.
    """

    _hashes_blocks = False

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor | LazyTensor],
        shares: Mapping[str, Share],
        destination: DestinationLike,
        options: SaveOptions,
        *,
        ranks: Ranks,
        tied: TiedNames = UNDECLARED,
        **arguments: Any,
    ) -> None:
        self._ranks, self._shares, self._tied = ranks, shares, tied
        self.told = False
        """Whether this rank has begun, or has reported that it failed before that."""
        self._undo: Callable[[], None] = _nothing
        super().__init__(tensors, destination, options, **arguments)

    async def complete(self) -> SaveResult:
        """See `PendingSave.complete`."""
        return await self._telling(super().complete())

    async def wait_staged(self) -> None:
        """See `PendingSave.wait_staged`."""
        await self._telling(super().wait_staged())

    async def _telling(self, wait: Coroutine[Any, Any, T]) -> T:
        """Wait; report an interruption that came before this rank has begun to the others."""
        try:
            return await wait
        except BaseException:
            if not self.told:
                self.told = True
                async with self._ranks:
                    raise
            raise

    def _run(self, operation: Operation[SaveResult]) -> SaveResult:
        try:
            return run_blocking(self._run_on_ranks(operation))
        finally:
            # After this rank has left the others: a failure is reported by then, and deletions may take long. On the
            # first rank the others have left too and ended their writes: some filesystems keep the names of open files.
            undo, self._undo = self._undo, _nothing
            undo()

    async def _run_on_ranks(self, operation: Operation[SaveResult]) -> SaveResult:
        ranks, self.told = self._ranks, True
        ranks.on_failure(operation.cancel)
        operation.on_cancel(ranks.interrupt)
        async with ranks:
            return super()._run(operation)

    # The plan.

    def _make_plans(self, sources: Sequence[TensorSource], block_bytes: int) -> tuple[WritePlan, WritePlan]:
        """Return the plan of the files and that of this rank's parts, once all ranks have the same layout."""
        options, ranks = self._options, self._ranks
        if options.shared == "error":
            resolve_shared(sources, "error")
        tree = _tree_of(options.metadata, sources)
        layout = Layout(
            sources=sources,
            shares=self._shares,
            settings=self._settings(tree),
            values=self._compared_values(sources),
            rank=ranks.rank,
            num_ranks=ranks.num_ranks,
        )
        layout, metadata, meshes, ties = self._agree(layout, tree)
        whole = layout.whole(ties)
        plan = plan_writes(
            whole,
            block_bytes,
            max_shard_bytes=self._max_shard_bytes,
            metadata=metadata,
            shared="dedupe" if ties else "clone",
            tied=self._tied,
        )
        parts = layout.parts(plan.sources, meshes)
        self._require_all_parts(plan, parts)
        return plan, self._plan_own(plan, parts, block_bytes)

    def _require_all_parts(self, plan: WritePlan, parts: Mapping[str, Part]) -> None:
        places, own_bytes = data_places(plan), [0] * len(plan.shards)
        for name, part in parts.items():
            own_bytes[places[name][0]] += part.source.nbytes
        all_bytes = [json.loads(one) for one in self._arrive("parts", json.dumps(own_bytes).encode())]
        for shard, *of_ranks in zip(plan.shards, *all_bytes, strict=True):
            if sum(of_ranks) != shard.data_bytes:
                raise MismatchError(
                    "the parts of all ranks do not make up the tensors; are these all the ranks that have a part of "
                    "them (process_group=)?",
                    path=str(self.destination),
                    expected=f"{shard.data_bytes:,} bytes of one file",
                    found=f"{sum(of_ranks):,}",
                )

    def _settings(self, tree: bytes) -> dict[str, str]:
        """Return the options that decide what is written and where; they must be equal on all ranks."""
        options = self._options
        found = {
            f"the option {name}": repr(getattr(options, name))
            for name in ("filename_pattern", "shared", "shard_names", "commit", "durability", "hash")
        }
        found["the option max_shard_size"] = repr(self._max_shard_bytes)
        found["what the module declares about tied names"] = repr(
            (sorted(self._tied.sources.items()), sorted(self._tied.required))
        )
        found["the destination"] = str(self._absolute_destination)
        for key, text in sorted((options.metadata or {}).items()):
            if key != STATE_KEY:
                found[f"the metadata under {printable(key)!r}"] = text
        if tree:
            found[TREE] = hashlib.sha256(tree).hexdigest()
        return found

    def _compared_values(self, sources: Sequence[TensorSource]) -> dict[str, str]:
        """Return digests of the tensors that must have equal values on all ranks, such as states of generators.

        Copies of weights may differ by rounding, and statistics of a module by the batches of a rank. So tensors of
        several floating-point numbers are not compared, nor are large ones.
        """
        compared = [
            source
            for source in sources
            if source.name not in self._shares
            and source.name != TREE_TENSOR
            and isinstance(source.data, torch.Tensor)
            and 0 < source.nbytes <= _MOST_COMPARED_BYTES
            and (not (source.data.is_floating_point() or source.data.is_complex()) or source.data.numel() == 1)
        ]
        found = {}
        for source in compared:
            region = allocate(source.nbytes).sub(0, source.nbytes)
            copy_out([(source.data, 0, region)], self._ready)
            found[source.name] = hashlib.sha256(region.view()).hexdigest()
        return found

    def _agree(
        self, layout: Layout, tree: bytes
    ) -> tuple[Layout, Mapping[str, str] | None, list[list[str]], list[list[str]]]:
        """Compare the layouts of all ranks.

        Where only their orders differ, for example by the seed of Python's hashes, all ranks take that of the names.

        Returns:
            The layout and the metadata to save, the meshes of each rank, and the groups of names that are one tensor on
            all of them.

        Raises:
            MismatchError: The layouts differ.
            RankError: On another rank.
        """
        metadata = self._options.metadata
        found = self._compare("layout", layout)
        if _ranks_that_differ(found):
            in_order = sorted_tree(tree) if tree else b""
            layout = layout.in_order_of_names(hashlib.sha256(in_order).hexdigest() if tree else "")
            layout, metadata = _with_tree(layout, metadata, in_order)
            found = self._compare("layout by names", layout)
            if others := _ranks_that_differ(found):
                self._raise_difference(layout, in_order, others)
        meshes = [one["meshes"] for one in found]
        groups = merged(group for one in found for group in one["ties"])
        if not groups:
            return layout, metadata, meshes, []
        agreed = self._arrive("ties", json.dumps([layout.is_tied(group) for group in groups]).encode())
        counts = zip(groups, *map(json.loads, agreed), strict=True)
        return layout, metadata, meshes, [group for group, *tied in counts if all(tied)]

    def _compare(self, name: str, layout: Layout) -> list[dict[str, Any]]:
        ties = layout.ties() if self._options.shared == "dedupe" else []
        mine = {"digest": layout.digest(), "meshes": layout.meshes(), "ties": ties}
        return [json.loads(value) for value in self._arrive(name, json.dumps(mine).encode())]

    def _raise_difference(self, layout: Layout, tree: bytes, others: Sequence[int]) -> None:
        rank = self._ranks.rank
        mine: dict[str, str] = {}
        if rank in (0, others[0]):
            mine = {**layout.settings, **(tree_entries(tree) if tree else {}), **layout.described()}
            mine.pop(TREE, None)
        if rank == 0:
            described = zlib.compress(json.dumps(list(mine.items())).encode())
            self._ranks.share("described", described if len(described) <= MOST_VALUE_BYTES else b"")
        if rank != others[0]:
            run_blocking(self._ranks.fetch("difference", of=others[0]))  # raises what that rank raises
        described = run_blocking(self._ranks.fetch("described"))
        theirs = dict(json.loads(zlib.decompress(described))) if described else mine
        text = difference(mine, theirs, rank)
        raise MismatchError(f"the ranks do not save the same: {text}", path=str(self.destination))

    # The transaction.

    def _begin_transaction(self, operation: Operation[SaveResult], num_shards: int) -> Transaction:
        if self._ranks.rank:
            return _OtherRank(self._join(operation), self._ranks)
        transaction = super()._begin_transaction(operation, num_shards)
        self._undo = transaction.roll_back
        return _FirstRank(transaction, self._share(transaction, operation), self._ranks)

    def _arrive(self, name: str, value: bytes = b"") -> list[bytes]:
        return run_blocking(self._ranks.arrive(name, value))

    # What depends on the kind of destination.

    def _plan_own(self, plan: WritePlan, parts: Mapping[str, Part], block_bytes: int) -> WritePlan:
        """Return the plan of what this rank stages and writes."""
        raise NotImplementedError

    def _share(self, transaction: Transaction, operation: Operation[SaveResult]) -> OwnPart:
        """Return what the first rank writes, which has the transaction. Its `create` lets the others join."""
        raise NotImplementedError

    def _join(self, operation: Operation[SaveResult]) -> OwnPart:
        """Return what another rank writes, once the first one lets it join."""
        raise NotImplementedError


def _nothing() -> None:
    pass


def _ranks_that_differ(found: Sequence[Mapping[str, Any]]) -> list[int]:
    return [rank for rank, one in enumerate(found) if one["digest"] != found[0]["digest"]]


def _tree_of(metadata: Mapping[str, str] | None, sources: Sequence[TensorSource]) -> bytes:
    """Return the tree of a nested state, from the metadata or from its tensor; empty if there is none."""
    text = (metadata or {}).get(STATE_KEY, "")
    if text != POINTER:
        return text.encode()
    data = next((source.data for source in sources if source.name == TREE_TENSOR), None)
    return b"" if data is None else bytes(Region(data.data_ptr(), data.nbytes, data).view())


def _with_tree(
    layout: Layout, metadata: Mapping[str, str] | None, tree: bytes
) -> tuple[Layout, Mapping[str, str] | None]:
    """Return a layout and the metadata with another text of the tree, in the place where it is."""
    text = (metadata or {}).get(STATE_KEY)
    if text is None or not tree:  # none, or metadata of another checkpoint
        return layout, metadata
    if text != POINTER:
        return layout, {**(metadata or {}), STATE_KEY: tree.decode()}
    data, nbytes = torch.frombuffer(bytearray(tree), dtype=torch.uint8), len(tree)
    sources = [
        replace(one, data=data, shape=(nbytes,), nbytes=nbytes, span=(0, nbytes), storage_key=None)
        if one.name == TREE_TENSOR
        else one
        for one in layout.sources
    ]
    return replace(layout, sources=sources), metadata


class OwnPart(Protocol):
    """What one rank writes of the files of a save, and how."""

    path: str
    """The destination."""
    shard_names: tuple[str, ...]
    """See `Transaction`."""

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Return what the blocks of this rank are written with: see `Transaction.create`, for this rank's plan."""

    def digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> dict[int, str]:
        """Return the digests of some of the files, by number; all ranks together have all. See `Transaction`."""

    def finish(self, check: Callable[[], None]) -> None:
        """Wait until all that this rank writes is durable; nothing is written after that."""

    def prepare_commit(self, check: Callable[[], None]) -> None:
        """On the first rank, complete the files when all ranks have finished; see `Transaction`."""

    def leave(self) -> None:
        """On other ranks, leave the files to the first rank, which publishes or removes them."""

    def roll_back(self) -> None:
        """End the writes, before this rank leaves the others. Never raises; idempotent; does nothing after `leave`."""


class _SharedTransaction(Transaction):
    """What the transactions of all ranks have in common."""

    def __init__(self, part: OwnPart, ranks: Ranks) -> None:
        self._part, self._ranks = part, ranks
        self.path, self.shard_names = part.path, part.shard_names

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """See `OwnPart`."""
        return self._part.create(nbytes)

    def roll_back(self) -> None:
        """See `OwnPart`."""
        self._part.roll_back()

    def digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> list[str]:
        """Return the digest of each file; see `Transaction`."""
        own = list(self._part.digests(new_hasher, check).items())
        found: dict[int, str] = {}
        for one in run_blocking(self._ranks.arrive("hashed", json.dumps(own).encode())):
            found.update(json.loads(one))
        return [found[k] for k in range(len(self.shard_names))]


class _FirstRank(_SharedTransaction):
    """The transaction on the first rank: it publishes when all ranks have agreed.

    `ShardedSave` rolls it back when the other ranks have left.
    """

    def __init__(self, transaction: Transaction, part: OwnPart, ranks: Ranks) -> None:
        super().__init__(part, ranks)
        self._transaction = transaction
        self.takes_index, self.is_recorded = transaction.takes_index, transaction.is_recorded

    def read_note(self, name: str) -> bytes | None:
        """See `Transaction`."""
        return self._transaction.read_note(name)

    def prepare_commit(self, check: Callable[[], None] = _nothing) -> None:
        """Wait until all ranks have agreed, and take what the commit needs."""
        self._part.finish(check)
        run_blocking(self._ranks.arrive("agreed"))
        self._part.prepare_commit(check)

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        """Publish, and share that with the other ranks."""
        self._transaction.commit(index=index, notes=notes)
        self._ranks.share("committed", b"")

    def published(self) -> Published | None:
        """Return what was published."""
        return self._transaction.published()


class _OtherRank(_SharedTransaction):
    """The transaction on the other ranks: they agree, and learn the outcome."""

    takes_index = False

    def prepare_commit(self, check: Callable[[], None] = _nothing) -> None:
        """Finish what this rank writes."""
        self._part.finish(check)

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        """Agree, and wait for the outcome. From here on this rank cannot cancel."""
        self._part.leave()
        self._ranks.share("agreed", b"")
        run_blocking(self._ranks.fetch("committed"))
