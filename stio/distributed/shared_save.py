"""One save of many ranks: each writes its parts of the files, and the first rank publishes them.

It is a `PendingSave` with three things of its own. The plan: ranks compare their layouts, then each plans its parts.
The transaction: the first rank has it, the others join its staging directory. The end: a rank agrees when its parts
are durable, and the first one commits when all have agreed. A rank that fails or is cancelled before that ends the save
on all of them. The others have closed their files before the first rank removes them.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import torch

from stio.device.describe import LazyTensor
from stio.distributed.layout import Layout, Share, difference, merged
from stio.distributed.ranks import MOST_VALUE_BYTES, Ranks
from stio.errors import MismatchError, printable
from stio.format.sharding import TensorSource
from stio.format.shared import resolve_shared
from stio.format.state_tree import POINTER, STATE_KEY, TREE_TENSOR
from stio.runtime.blocking import run_blocking
from stio.runtime.hashing import Hasher
from stio.runtime.memory import Region
from stio.runtime.operation import Operation
from stio.saving.options import DestinationLike, SaveOptions, SaveResult
from stio.saving.pending import PendingSave
from stio.saving.plan import WritePlan, plan_parts, plan_writes
from stio.storage.base import FileWriter, Note, Transaction
from stio.storage.commit.joined import Invitation, JoinedStaging
from stio.storage.commit.transaction import LocalTransaction

T = TypeVar("T")


class ShardedSave(PendingSave):
    """One save of many ranks, on one of them. See `PendingSave` for the other arguments.

    Args:
        tensors: What this rank holds of each tensor.
        shares: Which part that is, see `Layout`.
        destination: The destination.
        options: The keywords.
        ranks: The ranks, not entered yet.
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
        **arguments: Any,
    ) -> None:
        self._ranks, self._shares = ranks, shares
        self._own_bytes: list[int] = []  # of each file
        self.told = False
        """Whether the other ranks know, or will learn from this save, that this rank has begun or failed."""
        self._undo: Callable[[], None] = _nothing
        self._tree_digest = ""
        if (options.metadata or {}).get(STATE_KEY) == POINTER:
            tree = tensors[TREE_TENSOR]
            assert isinstance(tree, torch.Tensor)
            text = Region(tree.data_ptr(), tree.nbytes, tree).view()
            self._tree_digest = hashlib.sha256(text).hexdigest()
        super().__init__(tensors, destination, options, **arguments)

    async def complete(self) -> SaveResult:
        """See `PendingSave.complete`."""
        return await self._telling(super().complete())

    async def wait_staged(self) -> None:
        """See `PendingSave.wait_staged`."""
        await self._telling(super().wait_staged())

    async def _telling(self, wait: Coroutine[Any, Any, T]) -> T:
        """Wait; tell the other ranks of an interruption that came before this rank has begun."""
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
            # The other ranks have left: they have closed their files. Some filesystems keep the names of open files.
            undo, self._undo = self._undo, _nothing
            undo()

    async def _run_on_ranks(self, operation: Operation[SaveResult]) -> SaveResult:
        ranks, self.told = self._ranks, True
        ranks.on_failure(operation.cancel)
        operation.on_cancel(ranks.interrupt)
        async with ranks:
            return super()._run(operation)

    # The plan.

    def _make_plan(self, sources: Sequence[TensorSource], block_bytes: int) -> WritePlan:
        """Return the plan of this rank's parts, once all ranks have the same layout."""
        options, ranks = self._options, self._ranks
        if options.shared == "error":
            resolve_shared(sources, "error")
        layout = Layout(
            sources=sources, shares=self._shares, settings=self._settings(), rank=ranks.rank, num_ranks=ranks.num_ranks
        )
        meshes, ties = self._agree(layout)
        whole = layout.whole(ties)
        plan = plan_writes(
            whole,
            block_bytes,
            max_shard_bytes=self._max_shard_bytes,
            metadata=options.metadata,
            shared="dedupe" if ties else "clone",
        )
        of_rank = plan_parts(plan, layout.parts(plan.sources, meshes), block_bytes, with_headers=ranks.rank == 0)
        self._own_bytes = [sum(block.file_bytes for block in shard.blocks) for shard in of_rank.shards]
        all_bytes = [json.loads(one) for one in self._arrive("parts", json.dumps(self._own_bytes).encode())]
        for shard, *parts in zip(plan.shards, *all_bytes, strict=True):
            if sum(parts) != shard.nbytes:
                raise MismatchError(
                    "the parts of all ranks do not make up the tensors; are these all the ranks that have a part of "
                    "them (process_group=)?",
                    path=str(self.destination),
                    expected=f"{shard.nbytes:,} bytes of one file",
                    found=f"{sum(parts):,}",
                )
        return of_rank

    def _settings(self) -> dict[str, str]:
        """Return the options that decide what is written and where; they must be equal on all ranks."""
        options = self._options
        found = {
            f"the option {name}": repr(getattr(options, name))
            for name in ("filename_pattern", "shared", "shard_names", "commit", "durability", "hash")
        }
        found["the option max_shard_size"] = repr(self._max_shard_bytes)
        found["the destination"] = str(self._absolute_destination)
        for key, text in sorted((options.metadata or {}).items()):
            what = "what is no tensor" if key == STATE_KEY else f"the metadata under {printable(key)!r}"
            found[what] = self._tree_digest or text if key == STATE_KEY else text
        return found

    def _agree(self, layout: Layout) -> tuple[list[list[str]], list[list[str]]]:
        """Compare the layouts of all ranks.

        Returns:
            The meshes of each rank, and the groups of names that are one tensor on all of them.

        Raises:
            MismatchError: The layouts differ.
            RankError: On another rank.
        """
        ties = layout.ties() if self._options.shared == "dedupe" else []
        mine = {"digest": layout.digest(), "meshes": layout.meshes(), "ties": ties}
        found = [json.loads(value) for value in self._arrive("layout", json.dumps(mine).encode())]
        others = [rank for rank, one in enumerate(found) if one["digest"] != found[0]["digest"]]
        if others:
            self._raise_difference(layout, others)
        meshes = [one["meshes"] for one in found]
        groups = merged(group for one in found for group in one["ties"])
        if not groups:
            return meshes, []
        agreed = self._arrive("ties", json.dumps([layout.is_tied(group) for group in groups]).encode())
        counts = zip(groups, *map(json.loads, agreed), strict=True)
        return meshes, [group for group, *tied in counts if all(tied)]

    def _raise_difference(self, layout: Layout, others: Sequence[int]) -> None:
        rank = self._ranks.rank
        if rank == 0:
            described = zlib.compress(json.dumps(list(layout.described().items())).encode())
            self._ranks.share("described", described if len(described) <= MOST_VALUE_BYTES else b"")
        if rank != others[0]:
            run_blocking(self._ranks.fetch("difference", of=others[0]))  # raises what that rank raises
        described = run_blocking(self._ranks.fetch("described"))
        text = f"names, shapes, options or metadata of rank {rank} differ from those of rank 0"
        if described:
            text = difference(layout.described(), dict(json.loads(zlib.decompress(described))), rank)
        raise MismatchError(f"the ranks do not save the same: {text}", path=str(self.destination))

    # The transaction.

    def _begin_transaction(self, operation: Operation[SaveResult], num_shards: int) -> Transaction:
        ranks = self._ranks
        transaction: _Joined | _Owned
        if ranks.rank == 0:
            local = super()._begin_transaction(operation, num_shards)
            assert isinstance(local, LocalTransaction)
            self._undo = local.roll_back
            transaction = _Owned(local, ranks, self._own_bytes)
        else:
            invitation = Invitation.from_json(run_blocking(ranks.fetch("staging")))
            transaction = _Joined(JoinedStaging.open(invitation, operation.check), ranks, self._own_bytes)
        return transaction

    def _arrive(self, name: str, value: bytes = b"") -> list[bytes]:
        return run_blocking(self._ranks.arrive(name, value))


def _nothing() -> None:
    pass


class _Shared:
    """What the transactions of all ranks have in common.

    Args:
        files: The staging directory.
        ranks: The ranks.
        own_bytes: Bytes that this rank writes to each file.
        shard_names: Names of the files.
    """

    def __init__(
        self,
        files: LocalTransaction | JoinedStaging,
        ranks: Ranks,
        own_bytes: Sequence[int],
        shard_names: tuple[str, ...],
    ) -> None:
        self._files, self._ranks, self._own_bytes = files, ranks, own_bytes
        self.shard_names = shard_names

    def digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> list[str]:
        """Return the digest of each file; see `SharedTransaction`. Each rank reads some of the files."""
        ranks, names = self._ranks, self.shard_names
        run_blocking(ranks.arrive("written"))
        own = {
            k: self._files.digest(names[k], new_hasher(), check) for k in range(ranks.rank, len(names), ranks.num_ranks)
        }
        found: dict[int, str] = {}
        for one in run_blocking(ranks.arrive("hashed", json.dumps(list(own.items())).encode())):
            found.update(json.loads(one))
        return [found[k] for k in range(len(names))]

    def require_names(self, *names: str) -> None:
        """Nothing to do: the first rank has."""


class _Owned(_Shared):
    """The transaction on the first rank: it publishes when all ranks have agreed."""

    def __init__(self, local: LocalTransaction, ranks: Ranks, own_bytes: Sequence[int]) -> None:
        super().__init__(local, ranks, own_bytes, local.shard_names)
        self._local = local
        self._nbytes: Sequence[int] = ()
        self.path, self.takes_index = local.path, local.takes_index
        self.read_note = local.read_note
        self.published = local.published

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Create the files, and let the other ranks write into them."""
        self._nbytes = nbytes
        writers = self._local.create(nbytes, self._own_bytes)
        if self._ranks.num_ranks > 1:
            self._ranks.share("staging", self._local.invite().to_json())
        return writers

    def prepare_commit(self, check: Callable[[], None] = _nothing) -> None:
        """Wait until all ranks have agreed, and take the lock that the commit needs."""
        run_blocking(self._ranks.arrive("agreed"))
        for name, nbytes in zip(self.shard_names, self._nbytes, strict=True):
            self._local.finish_file(name, nbytes)
        self._local.prepare_commit(check)

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        """Publish, and tell the other ranks."""
        self._local.commit(index=index, notes=notes)
        self._ranks.share("committed", b"")

    def roll_back(self) -> None:
        """Nothing to do here: `ShardedSave` rolls back when the other ranks have left."""


class _Joined(_Shared):
    """The transaction on the other ranks: they agree, and learn the outcome."""

    def __init__(self, joined: JoinedStaging, ranks: Ranks, own_bytes: Sequence[int]) -> None:
        invitation = joined.invitation
        super().__init__(joined, ranks, own_bytes, invitation.shard_names)
        self._joined = joined
        self.path, self.takes_index = invitation.destination, invitation.takes_index

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Return writers of the files that the first rank has created."""
        return self._joined.create(self._own_bytes)

    def read_note(self, name: str) -> bytes | None:
        """Return None: the first rank writes the notes."""
        return None

    def prepare_commit(self, check: Callable[[], None] = _nothing) -> None:
        """Close the files: nothing is written any more."""
        self._joined.close()

    def commit(self, *, index: bytes | None, notes: Sequence[Note] = ()) -> None:
        """Agree, and wait for the outcome. From here on this rank cannot cancel."""
        self._ranks.share("agreed", b"")
        run_blocking(self._ranks.fetch("committed"))

    def roll_back(self) -> None:
        """Close the files; the first rank removes them."""
        self._joined.close()
