"""Saves of many ranks to a filesystem that they share: each rank writes its ranges into the files of one save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from stio.distributed.ranks import Ranks
from stio.distributed.shared_save import OwnPart, ShardedSave
from stio.runtime.blocking import run_blocking
from stio.runtime.hashing import Hasher
from stio.runtime.operation import Operation
from stio.saving.options import SaveResult
from stio.saving.plan import WritePlan
from stio.saving.plan_parts import Part, plan_parts
from stio.storage.base import FileWriter, Transaction
from stio.storage.commit.transaction import FilesTransaction, Invitation, JoinedTransaction, LocalTransaction


class SaveToFiles(ShardedSave):
    """A `ShardedSave` to a path."""

    def _plan_own(self, plan: WritePlan, parts: Mapping[str, Part], block_bytes: int) -> WritePlan:
        own = plan_parts(plan, parts, block_bytes, with_headers=self._ranks.rank == 0)
        self._own_bytes = [sum(block.file_bytes for block in shard.blocks) for shard in own.shards]
        return own

    def _share(self, transaction: Transaction, operation: Operation[SaveResult]) -> OwnPart:
        assert isinstance(transaction, LocalTransaction)
        return _OwnedFiles(transaction, self._ranks, self._own_bytes)

    def _join(self, operation: Operation[SaveResult]) -> OwnPart:
        invitation = Invitation.from_json(run_blocking(self._ranks.fetch("staging")))
        joined = JoinedTransaction(invitation, self._own_bytes, check=operation.check)
        return _JoinedFiles(joined, self._ranks)


class _Files:
    """The parts of one rank of the files.

    Args:
        files: The transaction of this rank.
        ranks: The ranks.
    """

    def __init__(self, files: FilesTransaction, ranks: Ranks) -> None:
        self._files, self._ranks = files, ranks
        self.shard_names, self.path = files.shard_names, files.path

    def digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> dict[int, str]:
        """Return digests of the files that this rank reads for that, when all have written."""
        ranks, names = self._ranks, self.shard_names
        run_blocking(ranks.arrive("written"))
        return {
            k: self._files.digest(names[k], new_hasher(), check) for k in range(ranks.rank, len(names), ranks.num_ranks)
        }


class _OwnedFiles(_Files):
    """Those of the first rank, which has the staging directory."""

    def __init__(self, local: LocalTransaction, ranks: Ranks, own_bytes: Sequence[int]) -> None:
        super().__init__(local, ranks)
        self._local, self._own_bytes = local, own_bytes
        self._nbytes: Sequence[int] = ()

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Create the files, and let the other ranks write into them."""
        self._nbytes = nbytes
        writers = self._local.create(nbytes, self._own_bytes)
        if self._ranks.num_ranks > 1:
            self._ranks.share("staging", self._local.invite().to_json())
        return writers

    def finish(self, check: Callable[[], None]) -> None:
        """Nothing to do: the writers have."""

    def prepare_commit(self, check: Callable[[], None]) -> None:
        """Complete the files, and take the lock that the commit needs."""
        for name, nbytes in zip(self.shard_names, self._nbytes, strict=True):
            self._local.finish_file(name, nbytes)
        self._local.prepare_commit(check)

    def leave(self) -> None:
        """Nothing to do: this rank has the files."""

    def roll_back(self) -> None:
        """Nothing to do: they are removed when the other ranks have left."""


class _JoinedFiles(_Files):
    """Those of another rank."""

    def create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Return writers of the files that the first rank has created."""
        return self._files.create(nbytes)

    def finish(self, check: Callable[[], None]) -> None:
        """Close the files: nothing is written any more."""
        self._files.roll_back()

    def prepare_commit(self, check: Callable[[], None]) -> None:
        """Nothing to do: the first rank does."""

    def leave(self) -> None:
        """Nothing to do: the first rank has the files."""

    def roll_back(self) -> None:
        """Close the files; the first rank removes them."""
        self._files.roll_back()
