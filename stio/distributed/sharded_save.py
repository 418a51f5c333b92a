"""One save of many ranks: each writes its parts of the files, and the first rank publishes them.

It is a `PendingSave` with three things of its own. The plan: ranks compare their states, then each plans its parts.
The transaction: the first rank has it, the others join it. The end: a rank agrees when what it writes is durable, and
the first one commits when all have agreed. A rank that fails or is cancelled before that ends the save on all of them.
The others have ended their writes before the first rank removes the files.

How a rank writes depends on the destination: into files that all share (`SaveToFiles`), or to the ranks that upload the
files (`sharded_upload.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch

from stio.device.copy_out import copy_out
from stio.device.describe import LazyTensor
from stio.distributed.agreement import TREE, RankState, Share, difference, merged
from stio.distributed.plan_parts import WrittenPart, data_places, plan_parts
from stio.distributed.ranks import Ranks
from stio.errors import LimitError, MismatchError, RankError, printable
from stio.format.manifest import Hasher
from stio.format.sharding import TensorSource
from stio.format.shared import UNDECLARED, TiedNames, resolve_shared
from stio.format.state_tree import POINTER, STATE_KEY, TREE_TENSOR, sorted_tree, tree_entries
from stio.runtime.memory import Region, allocate
from stio.runtime.notifier import run_blocking
from stio.runtime.operation import Operation
from stio.saving.options import DestinationLike, SaveOptions, SaveResult
from stio.saving.pending import PendingSave
from stio.saving.plan import WritePlan, plan_writes
from stio.storage.base import Ending, FileWriter, Note, Published, Transaction
from stio.storage.commit.transaction import Invitation, JoinedTransaction, LocalTransaction

_MAX_COMPARED_BYTES = 16 << 20
"""Longest tensor that is compared with those of other ranks: SHA-256 takes 10 ms of it."""


class _Compared(msgspec.Struct, array_like=True):
    """What a rank says of its state."""

    digest: str
    meshes: list[str]
    ties: list[list[str]]


class ShardedSave(PendingSave):
    """One save of many ranks, on one of them; there is a subclass for each kind of destination.

    See `PendingSave` for the other arguments.

    Args:
        tensors: What this rank holds of each tensor.
        shares: Which part that is, see `RankState`.
        destination: The destination.
        options: The keywords.
        ranks: The ranks, not entered yet. The caller waits for the save in a block of `Ranks.reports`.
        tied: See `resolve_shared`; the same on all ranks.
    """

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
        self._undo: Callable[[], None] = _nothing
        super().__init__(tensors, destination, options, **arguments)

    def _run(self, operation: Operation[SaveResult]) -> SaveResult:
        try:
            return run_blocking(self._run_on_ranks(operation))
        finally:
            # After this rank has left the others: a failure is reported by then, and deletions may take long. On the
            # first rank the others have left too and ended their writes: some filesystems keep the names of open files.
            undo, self._undo = self._undo, _nothing
            undo()

    async def _run_on_ranks(self, operation: Operation[SaveResult]) -> SaveResult:
        ranks = self._ranks
        ranks.on_failure(operation.cancel)
        operation.on_cancel(ranks.interrupt)
        async with ranks:
            return super()._run(operation)

    # The plan.

    def _make_plans(self, sources: Sequence[TensorSource], block_bytes: int) -> tuple[WritePlan, WritePlan]:
        """Return the plan of the files and that of this rank's parts."""
        plan, parts = self._plan_all(sources, block_bytes)
        self._require_all_parts(plan, parts)
        return plan, self._plan_own(plan, parts, block_bytes)

    def _plan_all(
        self, sources: Sequence[TensorSource], block_bytes: int
    ) -> tuple[WritePlan, Mapping[str, WrittenPart]]:
        """Return the plan of the files and the parts that this rank writes, once all ranks have the same state."""
        options, ranks = self._options, self._ranks
        if options.shared == "error":
            resolve_shared(sources, "error")
        tree = _tree_of(options.metadata, sources)
        state = RankState(
            sources=sources,
            shares=self._shares,
            settings=self._settings(tree),
            values=self._compared_values(sources),
            rank=ranks.rank,
            num_ranks=ranks.num_ranks,
        )
        state, metadata, meshes, ties = self._agree(state, tree)
        whole = state.whole(ties)
        plan = plan_writes(
            whole,
            block_bytes,
            max_shard_bytes=self._max_shard_bytes,
            metadata=metadata,
            shared="dedupe" if ties else "clone",
            tied=self._tied,
        )
        return plan, state.parts(plan.sources, meshes)

    def _require_all_parts(self, plan: WritePlan, parts: Mapping[str, WrittenPart]) -> None:
        places, own_bytes = data_places(plan), [0] * len(plan.shards)
        for name, part in parts.items():
            own_bytes[places[name][0]] += part.source.nbytes
        all_bytes = self._arrive("parts", own_bytes, kind=list[int])
        for number, shard in enumerate(plan.shards):
            of_ranks = [found[number] for found in all_bytes if len(found) == len(own_bytes)]
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
            and 0 < source.nbytes <= _MAX_COMPARED_BYTES
            and (not (source.data.is_floating_point() or source.data.is_complex()) or source.data.numel() == 1)
        ]
        found = {}
        for source in compared:
            region = allocate(source.nbytes).sub(0, source.nbytes)
            copy_out([(source.data, 0, region)], self._ready)
            found[source.name] = hashlib.sha256(region.view()).hexdigest()
        return found

    def _agree(
        self, state: RankState, tree: bytes
    ) -> tuple[RankState, Mapping[str, str] | None, list[list[str]], list[list[str]]]:
        """Compare the states of all ranks.

        Where only their orders differ, for example by the seed of Python's hashes, all ranks take that of the names.

        Returns:
            The state and the metadata to save, the meshes of each rank, and the groups of names that are one tensor on
            all of them.

        Raises:
            MismatchError: The states differ.
            RankError: On another rank.
        """
        metadata = self._options.metadata
        found = self._compare("state", state)
        if _ranks_that_differ(found):
            in_order = sorted_tree(tree) if tree else b""
            state = state.in_order_of_names(hashlib.sha256(in_order).hexdigest() if tree else "")
            state, metadata = _with_tree(state, metadata, in_order)
            found = self._compare("state by names", state)
            if others := _ranks_that_differ(found):
                self._raise_difference(state, in_order, others)
        meshes = [one.meshes for one in found]
        if any(len(one) != len(state.meshes()) for one in meshes):
            raise RankError("a rank has sent another number of meshes than its state has")
        groups = merged(group for one in found for group in one.ties)
        if not groups:
            return state, metadata, meshes, []
        mine = [k for k, group in enumerate(groups) if state.is_tied(group)]
        tied = set(mine).intersection(*self._arrive("ties", mine, kind=list[int]))
        return state, metadata, meshes, [groups[k] for k in sorted(tied)]

    def _compare(self, name: str, state: RankState) -> list[_Compared]:
        ties = state.ties() if self._options.shared == "dedupe" else []
        return self._arrive(name, _Compared(state.digest(), state.meshes(), ties), kind=_Compared)

    def _raise_difference(self, state: RankState, tree: bytes, others: Sequence[int]) -> None:
        rank = self._ranks.rank
        mine: dict[str, str] = {}
        if rank in (0, others[0]):
            described = {**state.settings, **(tree_entries(tree) if tree else {}), **state.described()}
            described.pop(TREE, None)
            mine = {what: text.encode(errors="backslashreplace").decode() for what, text in described.items()}
        if rank == 0:
            try:
                self._ranks.share("described", mine)
            except LimitError:
                self._ranks.share("described", {})  # the difference is not named
        if rank != others[0]:
            run_blocking(self._ranks.fetch("difference", of=others[0]))  # raises what that rank raises
        theirs = run_blocking(self._ranks.fetch("described", kind=dict[str, str])) or mine
        text = difference(mine, theirs, rank)
        raise MismatchError(f"the ranks do not save the same: {text}", path=str(self.destination))

    # The transaction.

    def _begin_transaction(self, operation: Operation[SaveResult], num_shards: int) -> Transaction:
        if self._ranks.rank == 0:
            transaction = super()._begin_transaction(operation, num_shards)
            self._undo = transaction.roll_back
            return self._share(transaction, operation)
        joined = self._join(operation)
        if len(joined.shard_names) != num_shards:
            joined.roll_back()
            raise RankError("rank 0 has sent the names of another number of files", ranks=(0,))
        return joined

    def _arrive(self, name: str, value: object, *, kind: Any) -> list[Any]:
        return run_blocking(self._ranks.arrive(name, value, kind=kind))

    # What depends on the kind of destination.

    def _plan_own(self, plan: WritePlan, parts: Mapping[str, WrittenPart], block_bytes: int) -> WritePlan:
        """Return the plan of what this rank stages and writes."""
        raise NotImplementedError

    def _share(self, transaction: Transaction, operation: Operation[SaveResult]) -> RankTransaction:
        """Return the transaction of the first rank; its `create` lets the others join."""
        raise NotImplementedError

    def _join(self, operation: Operation[SaveResult]) -> RankTransaction:
        """Return that of another rank, once the first one lets it join."""
        raise NotImplementedError


def _nothing() -> None:
    pass


def _ranks_that_differ(found: Sequence[_Compared]) -> list[int]:
    return [rank for rank, one in enumerate(found) if one.digest != found[0].digest]


def _tree_of(metadata: Mapping[str, str] | None, sources: Sequence[TensorSource]) -> bytes:
    """Return the tree of a nested state, from the metadata or from its tensor; empty if there is none."""
    text = (metadata or {}).get(STATE_KEY, "")
    if text != POINTER:
        return text.encode()
    data = next((source.data for source in sources if source.name == TREE_TENSOR), None)
    return b"" if data is None else bytes(Region(data.data_ptr(), data.nbytes, data).view())


def _with_tree(
    state: RankState, metadata: Mapping[str, str] | None, tree: bytes
) -> tuple[RankState, Mapping[str, str] | None]:
    """Return a state and the metadata with another text of the tree, in the place where it is."""
    text = (metadata or {}).get(STATE_KEY)
    if text is None or not tree:  # none, or metadata of another checkpoint
        return state, metadata
    if text != POINTER:
        return state, {**(metadata or {}), STATE_KEY: tree.decode()}
    data, nbytes = torch.frombuffer(bytearray(tree), dtype=torch.uint8), len(tree)
    sources = [
        replace(one, data=data, shape=(nbytes,), nbytes=nbytes, span=(0, nbytes), storage_key=None)
        if one.name == TREE_TENSOR
        else one
        for one in state.sources
    ]
    return replace(state, sources=sources), metadata


class RankTransaction(Transaction):
    """The transaction of a save on one rank; there is a subclass for each kind of destination.

    The first rank publishes when all have agreed. The others agree, and learn the outcome.

    Args:
        first: The transaction, on the first rank; `ShardedSave` rolls it back when the others have left.
        ranks: The ranks.
        path: The destination.
        shard_names: See `Transaction`.
    """

    def __init__(self, first: Transaction | None, ranks: Ranks, *, path: str, shard_names: tuple[str, ...]) -> None:
        self._first, self._ranks, self.path, self.shard_names = first, ranks, path, shard_names
        self.takes_index = first is not None and first.takes_index
        self.is_recorded = first is not None and first.is_recorded

    def read_note(self, name: str) -> bytes | None:
        """Return a note on the first rank, which writes the notes."""
        return None if self._first is None else self._first.read_note(name)

    def digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> list[str]:
        """Return the digest of each file; see `Transaction`.

        Raises:
            MismatchError: The ranks have not hashed the files.
        """
        own, found = self._digests(new_hasher, check), dict[int, str]()
        for one in run_blocking(self._ranks.arrive("hashed", own, kind=dict[int, str])):
            found.update(one)
        if found.keys() != set(range(len(self.shard_names))):
            raise MismatchError("the ranks have not hashed the files of this save", path=self.path)
        return [found[number] for number in range(len(self.shard_names))]

    def _prepare(self, check: Callable[[], None]) -> None:
        """Finish what this rank writes; on the first rank wait for the others, and take what the commit needs."""
        self._finish(check)
        if self._first is not None:
            run_blocking(self._ranks.arrive("agreed"))
            self._complete(check)

    def published(self) -> Published | None:
        """Return what was published, on the first rank."""
        return None if self._first is None else self._first.published()

    def _publish(self, index: bytes | None, notes: Sequence[Note]) -> None:
        """Publish, or agree and wait for the outcome: a rank that has agreed cannot cancel."""
        if self._first is not None:
            self._first.commit(index=index, notes=notes)
            self._ranks.share("committed")
            return
        self._leave()
        self._ranks.share("agreed")
        run_blocking(self._ranks.fetch("committed"))

    def _end(self, ending: Ending) -> None:
        """End the writes of this rank, before it leaves the others. What they wrote is the first rank's."""
        raise NotImplementedError

    # What depends on the kind of destination, beside `_create` for this rank's plan.

    def _digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> dict[int, str]:
        """Return the digests of some of the files, by number; all ranks together have all."""
        raise NotImplementedError

    def _finish(self, check: Callable[[], None]) -> None:
        """Wait until all that this rank writes is durable; nothing is written after that."""
        raise NotImplementedError

    def _complete(self, check: Callable[[], None]) -> None:
        """On the first rank, complete the files when all ranks have finished."""

    def _leave(self) -> None:
        """On other ranks, leave the files to the first rank, which publishes or removes them."""


class SaveToFiles(ShardedSave):
    """A `ShardedSave` to a path on a filesystem that all ranks share: each writes its ranges into the same files."""

    def _plan_own(self, plan: WritePlan, parts: Mapping[str, WrittenPart], block_bytes: int) -> WritePlan:
        own = plan_parts(plan, parts, block_bytes, with_headers=self._ranks.rank == 0)
        self._own_bytes = [sum(block.file_bytes for block in shard.blocks) for shard in own.shards]
        return own

    def _share(self, transaction: Transaction, operation: Operation[SaveResult]) -> RankTransaction:
        assert isinstance(transaction, LocalTransaction)
        return FileTransaction(transaction, self._ranks, self._own_bytes)

    def _join(self, operation: Operation[SaveResult]) -> RankTransaction:
        invitation = Invitation.from_json(run_blocking(self._ranks.fetch("staging")))
        return FileTransaction(JoinedTransaction(invitation, operation.check), self._ranks, self._own_bytes)


class FileTransaction(RankTransaction):
    """The transaction of a save into files that all ranks write.

    Args:
        files: On the first rank the transaction, on others what has joined it.
        ranks: The ranks.
        own_bytes: Bytes that this rank writes to each file.
    """

    def __init__(self, files: LocalTransaction | JoinedTransaction, ranks: Ranks, own_bytes: Sequence[int]) -> None:
        first = files if isinstance(files, LocalTransaction) else None
        super().__init__(first, ranks, path=files.path, shard_names=files.shard_names)
        self._files, self._own_bytes = files, own_bytes
        self._nbytes: Sequence[int] = ()

    def _create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Return writers of the files; the first rank creates them, and lets the others write into them."""
        self._nbytes = nbytes
        writers = self._files.create(nbytes, self._own_bytes)
        if isinstance(self._files, LocalTransaction) and self._ranks.num_ranks > 1:
            self._ranks.share("staging", self._files.invite().to_json())
        return writers

    def _end(self, ending: Ending) -> None:
        """Close the files; `ShardedSave` removes them on the first rank."""
        if self._first is None:
            self._files.roll_back()

    def _digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> dict[int, str]:
        ranks, names = self._ranks, self.shard_names
        run_blocking(ranks.arrive("written"))
        numbers = range(ranks.rank, len(names), ranks.num_ranks)
        return {number: self._files.digest(names[number], new_hasher(), check) for number in numbers}

    def _finish(self, check: Callable[[], None]) -> None:
        if self._first is None:
            self._files.roll_back()  # nothing is written any more

    def _complete(self, check: Callable[[], None]) -> None:
        assert isinstance(self._files, LocalTransaction)
        for name, nbytes in zip(self.shard_names, self._nbytes, strict=True):
            self._files.finish_file(name, nbytes)
            check()
        self._files.prepare_commit(check)
