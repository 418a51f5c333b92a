"""The files of one save, written by many ranks: into the same files of a filesystem, or by owners, to a store.

On a filesystem each rank writes its ranges into the files, which the first rank has created. To a store each file has
an owner, which uploads it, and the others send it their parts.

There the first rank has the transaction of `stio.remote`: it reads what the store has, puts the index, and deletes
the old checkpoint. The others upload objects whose names it has chosen. Such an object is no checkpoint until the index
names it. One file alone is uploaded by the first rank, since the end of that upload is the commit.

A store takes an object from its begin to its end, from one process. So the bytes of a file come together at its owner,
window by window. Each rank stages its bytes of all windows, one after the other, and sends those of a window, and where
they go, as one message. The owner puts the messages of a window in their places, and uploads it. A few windows wait for
the upload.

All ranks send in the same order (`transfer.py`). A step has as many windows, each of another owner, as all ranks have
staged, and their owners have room for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from time import perf_counter
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from msgspec import Meta

from stio.distributed.plan_parts import Packet, Window, WrittenPart, plan_parts, plan_stream
from stio.distributed.ranks import Ranks
from stio.distributed.transfer import RankTransfer
from stio.errors import MismatchError, RankError
from stio.format.files import Hasher, new_hasher
from stio.limits import PAGE_BYTES
from stio.process import Condition
from stio.remote import RemoteDestination, RemoteTransaction, Uploads
from stio.runtime import Cancelled, Operation, calls, is_interrupted, run_blocking
from stio.runtime.memory import Region
from stio.runtime.reports import traced
from stio.saving import SaveOptions, SaveResult, WritePlan
from stio.storage import FileWriter, Note, Published, Transaction
from stio.storage.commit import Invitation, JoinedTransaction, LocalTransaction

_Bytes: TypeAlias = "np.ndarray[Any, np.dtype[np.uint8]]"

WINDOW_BYTES = 8 << 20
"""Largest window: a part of an upload. At 1 Gbit/s it takes 70 ms to another host."""

_MAX_BLOCK_BYTES = 16 << 20
"""Largest block of staging memory. It has whole windows."""

_NUM_IMAGES = 3
"""Windows that an owner has: one is uploaded, one waits for that, one is received."""

NUM_WINDOWS = _NUM_IMAGES + 2
"""Windows in the memory of one rank: those, what it sends in a step, and what it receives."""

_ITEM_BYTES = 8
"""A message consists of numbers of this size, then bytes. The numbers: how many runs, and `_RUN_NUMBERS` of each."""

_RUN_NUMBERS = 5

_MIN_WINDOW_BYTES = 16 * PAGE_BYTES

_WindowBytes = Annotated[int, Meta(ge=_MIN_WINDOW_BYTES, le=WINDOW_BYTES, multiple_of=PAGE_BYTES)]


class RankTransaction(Transaction):
    """The transaction of a save on one rank; there is a subclass for each kind of destination.

    The first rank publishes when all have agreed. The others agree, and learn the outcome. `plan` comes first; then
    `begin`, with the transaction that this rank writes in.

    Args:
        ranks: The ranks.
        destination: The destination of the save.
        options: Options of the save.
        save: The operation of the save.
    """

    takes_index = False

    def __init__(self, ranks: Ranks, destination: Any, options: SaveOptions, save: Operation[SaveResult]) -> None:
        self._ranks, self._destination, self._options, self._save = ranks, destination, options, save
        self.path = str(destination)
        self._own: Any = None
        self._first: Transaction | None = None  # that of the first rank, on the first rank

    def begin(self, own: Transaction) -> None:
        """Begin.

        Args:
            own: On the first rank the transaction of the save, on others the result of `join`. The caller rolls it
                back when this rank has left the others.
        """
        self._own, self.shard_names = own, own.shard_names
        if self._ranks.rank == 0:
            self._first, self.takes_index, self.is_recorded = own, own.takes_index, own.is_recorded

    def read_note(self, name: str) -> bytes | None:
        """Return a note on the first rank, which writes the notes."""
        return None if self._first is None else self._first.read_note(name)

    def digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> list[str]:
        """Return the digest of each file; see `Transaction`.

        Raises:
            MismatchError: The ranks have not hashed the files.
        """
        all_digests: dict[int, str] = {}
        own = self._digests(new_hasher, check)
        for digests in run_blocking(self._ranks.arrive("hashed", own, kind=dict[int, str])):
            all_digests.update(digests)
        if all_digests.keys() != set(range(len(self.shard_names))):
            raise MismatchError("the ranks have not hashed the files of this save", path=self.path)
        return [all_digests[number] for number in range(len(self.shard_names))]

    def _prepare(self, check: Callable[[], None]) -> None:
        """On the first rank wait until what the others write is durable."""
        if self._first is not None:
            run_blocking(self._ranks.arrive("agreed"))

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

    # What depends on the kind of destination, beside `_create` for this rank's plan.

    def plan(self, plan: WritePlan, parts: Mapping[str, WrittenPart], block_bytes: int) -> WritePlan:
        """Return the plan of what this rank stages and writes."""
        raise NotImplementedError

    def join(self) -> Transaction:
        """On other ranks, return the transaction to write in, once the first rank lets this one join."""
        raise NotImplementedError

    def _digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> dict[int, str]:
        """Return the digests of some of the files, by number; all ranks together have all."""
        raise NotImplementedError

    def _leave(self) -> None:
        """On other ranks, leave the files to the first rank, which publishes or removes them."""
        raise NotImplementedError

    def _end(self) -> None:
        """End the writes of this rank, before it leaves the others. What they wrote is the first rank's."""
        raise NotImplementedError


class FileTransaction(RankTransaction):
    """The transaction of a save to a path on a filesystem that all ranks share: all write into the same files."""

    _own: LocalTransaction | JoinedTransaction
    _nbytes: Sequence[int] = ()

    def plan(self, plan: WritePlan, parts: Mapping[str, WrittenPart], block_bytes: int) -> WritePlan:
        """Return the plan of this rank's ranges of the files."""
        own = plan_parts(plan, parts, block_bytes, with_headers=self._ranks.rank == 0)
        self._own_bytes = [sum(block.file_bytes for block in shard.blocks) for shard in own.shards]
        return own

    def join(self) -> Transaction:
        """See `RankTransaction`."""
        invitation = Invitation.from_json(run_blocking(self._ranks.fetch("staging")))
        return JoinedTransaction(invitation, self._save.check)

    def begin(self, own: Transaction) -> None:
        """See `RankTransaction`."""
        super().begin(own)
        self.path = own.path

    def _create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Return writers of the files; the first rank creates them, and lets the others write into them."""
        self._nbytes = nbytes
        writers = self._own.create(nbytes, self._own_bytes)
        if isinstance(self._own, LocalTransaction) and self._ranks.num_ranks > 1:
            self._ranks.share("staging", self._own.invite().to_json())
        return writers

    def _digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> dict[int, str]:
        ranks, names = self._ranks, self.shard_names
        run_blocking(ranks.arrive("written"))
        numbers = range(ranks.rank, len(names), ranks.num_ranks)
        return {number: self._own.digest(names[number], new_hasher(), check) for number in numbers}

    def _prepare(self, check: Callable[[], None]) -> None:
        super()._prepare(check)
        if isinstance(self._own, LocalTransaction):
            for name, nbytes in zip(self.shard_names, self._nbytes, strict=True):
                self._own.finish_file(name, nbytes)
                check()
            self._own.prepare_commit(check)

    def _leave(self) -> None:
        self._own.roll_back()  # closes the files

    def _end(self) -> None:
        if self._first is None:
            self._leave()


class StoreTransaction(RankTransaction):
    """The transaction of a save to a store."""

    _own: Uploads
    _exchange: Exchange | None = None

    def plan(self, plan: WritePlan, parts: Mapping[str, WrittenPart], block_bytes: int) -> WritePlan:
        """Return the plan of the stream that this rank sends."""
        block_bytes = min(block_bytes, _MAX_BLOCK_BYTES)
        own_bytes = min(self._destination.window_bytes, block_bytes)
        window_bytes: int = min(run_blocking(self._ranks.arrive("window", own_bytes, kind=_WindowBytes)))
        sizes = [shard.nbytes for shard in plan.shards]
        owners = owners_of(sizes, self._ranks.num_ranks)
        windows = cut_windows(sizes, owners, window_bytes)
        own, packets = plan_stream(plan, parts, windows, block_bytes)
        self._send_plan = SendPlan(
            path=self.path,
            owners=owners,
            headers=[shard.header for shard in plan.shards],
            windows=windows,
            window_bytes=window_bytes,
            packets=packets,
        )
        return own

    def join(self) -> Transaction:
        """See `RankTransaction`."""
        names = run_blocking(self._ranks.fetch("names", kind=tuple[str, ...]))
        uploads: Uploads = self._destination.inner.join(names)
        return uploads

    def begin(self, own: Transaction) -> None:
        """See `RankTransaction`."""
        super().begin(own)
        if isinstance(own, RemoteTransaction):
            own.share()
            self._ranks.share("names", own.shard_names)

    def _create(self, nbytes: Sequence[int]) -> Sequence[FileWriter]:
        """Begin the exchange; return what takes the stream of this rank."""
        self._exchange = Exchange(
            self._send_plan, self._ranks, self._own.create(nbytes), save=self._save, options=self._options
        )
        self._exchange.operation.start()
        return [self._exchange]

    def _digests(self, new_hasher: Callable[[], Hasher], check: Callable[[], None]) -> dict[int, str]:
        assert self._exchange is not None
        self._exchange.wait()
        check()
        return self._exchange.digests()  # they were computed during the upload

    def _prepare(self, check: Callable[[], None]) -> None:
        assert self._exchange is not None
        self._exchange.wait()
        check()
        super()._prepare(check)

    def _leave(self) -> None:
        # Once the first rank may have published the objects, another one must not delete them.
        self._own.leave()

    def _end(self) -> None:
        """End the exchange on all ranks, and begin to end the uploads of this one; they are deleted later."""
        if self.state != "published":
            self._own.stop()
            if self._exchange is not None:
                self._exchange.operation.close()


@dataclass(frozen=True, slots=True)
class Store:
    """A store as the destination of many ranks, which needs memory for windows beside that for parts of uploads."""

    inner: RemoteDestination
    """The destination of one rank."""
    window_bytes: int = WINDOW_BYTES
    """Largest window."""

    def __str__(self) -> str:
        return str(self.inner)

    def within(self, budget_bytes: int) -> tuple[Store, int]:
        """Return it with less memory, and how much that is; see `BufferedDestination`."""
        inner, nbytes = self.inner.within(budget_bytes)
        fits = (budget_bytes - nbytes) // 2 // NUM_WINDOWS // PAGE_BYTES * PAGE_BYTES
        window_bytes = max(_MIN_WINDOW_BYTES, min(WINDOW_BYTES, fits))
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
        begins = range(0, size, window_bytes)
        of_owner[owner] += [Window(file, begin, min(begin + window_bytes, size)) for begin in begins]
    return [window for turn in zip_longest(*of_owner.values()) for window in turn if window is not None]


# The exchange.


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPlan:
    """What is sent in which order; the same on all ranks, but for the packets."""

    path: str
    """The destination, for messages."""
    owners: Sequence[int]
    """The rank that uploads each file."""
    headers: Sequence[bytes]
    """The header of each file, which its owner adds."""
    windows: Sequence[Window]
    """See `cut_windows`."""
    window_bytes: int
    """Size of the largest window."""
    packets: Sequence[Packet]
    """What this rank has of the windows."""


class Exchange(RankTransfer):
    """The exchange on one rank; all ranks make one. It is a `FileWriter`, in order, of the stream of this rank.

    Args:
        plan: What is sent.
        ranks: The ranks.
        uploads: The writers of all files; this rank uses those that it owns.
        save: The operation of the save; its cancel ends the exchange.
        options: Options of the save.
    """

    is_ordered = True
    """See `FileWriter`."""

    def __init__(
        self,
        plan: SendPlan,
        ranks: Ranks,
        uploads: Sequence[FileWriter],
        *,
        save: Operation[Any],
        options: SaveOptions,
    ) -> None:
        new_operation = partial(Operation[None], about=plan.path, exit_patience=save.exit_patience)
        self.operation: Operation[None] = new_operation(self._exchange, name="send")
        """Sends and receives on a thread of its own; the caller starts it, and calls `wait` or closes it."""
        uploading = new_operation(self._upload, name="upload")
        super().__init__(ranks, self.operation, uploading, "save", range(len(plan.windows)))
        self.path = plan.path
        """The destination, for messages."""
        self._plan, self._trace = plan, options.trace
        self._changed = Condition()  # guards what follows
        self._packets = {packet.window: packet for packet in plan.packets}  # what is not sent yet, by window
        self._blocks: dict[int, Region] = {}  # those with which a thread waits, by their offsets in the stream
        self._sent_bytes = 0  # of the stream
        self._failed: BaseException | None = None
        self._writers = {file: uploads[file] for file, owner in enumerate(plan.owners) if owner == ranks.rank}
        self._hashers = {} if options.hash is None else {file: new_hasher(options.hash) for file in self._writers}
        self._images: deque[tuple[Window, _Bytes]] = deque()  # the first one is being uploaded
        save.on_cancel(self.operation.cancel)

    def write_from(self, offset: int, region: Region) -> None:
        """Wait until all packets in a block are taken.

        Raises:
            Cancelled: The thread should end, or the exchange was cancelled.
            BaseException: The exchange has failed.
        """
        with self._changed:
            self._blocks[offset] = region
            self._changed.notify_all()
            try:
                while self._sent_bytes < offset + region.nbytes:
                    if self._failed is not None:
                        raise self._failed
                    if is_interrupted():
                        raise Cancelled
                    self._changed.wait(calls.LOOK_SECONDS)
            finally:
                del self._blocks[offset]

    def finish(self) -> None:
        """Return at once; `wait` waits for the uploads."""

    def wait(self) -> None:
        """Wait until the bytes of this rank are sent, and its files are uploaded.

        Raises:
            Cancelled: The exchange was cancelled.
            RankError: A rank has failed.
            StioError: See `Upload`.
        """
        self.operation.join()
        if self.operation.cancelled and self.operation.failure is None:
            raise Cancelled
        self.operation.outcome()

    def digests(self) -> dict[int, str]:
        """Return the digest of each file that this rank has uploaded, by its number."""
        return {file: hasher.hexdigest() for file, hasher in self._hashers.items()}

    # On the thread of the exchange.

    def _exchange(self, operation: Operation[None]) -> None:
        operation.on_cancel(self._ranks.interrupt)
        try:
            self.run()
        except BaseException as error:
            self._failed = error  # for threads that wait with their blocks
            self._changed.wake()
            raise

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

    def _num_ready(self) -> int:
        """Return of how many windows, each of another owner, this rank has its bytes, and room for its own one."""
        owners, nbytes = set[int](), 0
        for number in self._left:
            owner, packet = self._owner_of(number), self._packets.get(number)
            has_room = owner != self._ranks.rank or len(self._images) < _NUM_IMAGES
            nbytes += 0 if packet is None else packet.nbytes
            if owner in owners or not has_room or (packet is not None and self._find(packet) is None):
                break
            if owners and nbytes > self._plan.window_bytes:
                break
            owners.add(owner)
        return len(owners)

    def _owner_of(self, window: int) -> int:
        return self._plan.owners[self._plan.windows[window].file]

    def _send(self, items: Sequence[int]) -> None:
        begin, messages = perf_counter(), [np.empty(0, np.uint8)] * self._ranks.num_ranks
        for number in items:
            messages[self._owner_of(number)] = self._take(number)
        num_bytes = sum(map(len, messages)) - len(messages[self._ranks.rank])
        received = messages if self._group is None else self._swap(messages)
        if self._trace is not None and self._group is not None:
            self._trace.add("send", begin, perf_counter(), num_bytes=num_bytes)
        for number in items:
            if self._owner_of(number) == self._ranks.rank and not self._operation.cancelled:
                try:
                    self._assemble(self._plan.windows[number], received)
                except BaseException as error:
                    self._error = error

    def _find(self, packet: Packet) -> Region | None:
        """Return the bytes of a packet; None if they are not there yet."""
        with self._changed:
            for begin, block in self._blocks.items():
                if begin <= packet.begin < begin + block.nbytes:
                    return block.sub(packet.begin - begin, packet.nbytes)
        return None

    def _take(self, window: int) -> _Bytes:
        """Return the message of a window, whose bytes are there; it is empty if this rank has none."""
        with self._changed:
            packet = self._packets.pop(window, None)
            if packet is None:
                return np.empty(0, np.uint8)
            data = self._find(packet)
            if data is None:
                raise Cancelled  # the thread that had them has ended
            message = _message(packet, data)
            self._sent_bytes = packet.begin + packet.nbytes
            self._changed.notify_all()
            return message

    def _swap(self, messages: list[_Bytes]) -> list[_Bytes]:
        """Send a message to each rank, and return those of all ranks; empties the list, to release the memory.

        Raises:
            MemoryError: There is none. `run` then reports it, and leaves the group, which ends the steps of the others.
        """
        sizes = torch.tensor([len(message) for message in messages], device="cpu")
        new_sizes = torch.empty_like(sizes)
        self._group.alltoall_base(new_sizes, sizes, [], []).wait()
        sent, received = np.concatenate(messages), np.empty(int(new_sizes.sum()), np.uint8)
        messages.clear()
        data = torch.from_numpy(received)
        self._group.alltoall_base(data, torch.from_numpy(sent), new_sizes.tolist(), sizes.tolist()).wait()
        return np.split(received, new_sizes.cumsum(0)[:-1].tolist())

    def _assemble(self, window: Window, messages: Sequence[_Bytes]) -> None:
        """Put the bytes of a window in their places, for the upload."""
        image = np.empty(window.end - window.begin, np.uint8)
        header = self._plan.headers[window.file][window.begin : window.end]
        image[: len(header)] = np.frombuffer(header, np.uint8)
        nbytes = len(header) + sum(_unpack(message, image, window.begin) for message in messages if len(message))
        if nbytes != len(image):
            raise MismatchError(
                "the parts of all ranks do not make up a file",
                path=self._plan.path,
                expected=f"{len(image):,} bytes from {window.begin:,} on",
                found=f"{nbytes:,}",
            )
        with self._changed:
            self._images.append((window, image))
            self._changed.notify_all()

    # On the thread of the uploads.

    def _upload(self, operation: Operation[None]) -> None:
        """Upload the files of this rank, window by window."""
        operation.on_cancel(self._changed.wake)
        for _ in range(sum(window.file in self._writers for window in self._plan.windows)):
            with self._changed:
                self._changed.wait_for(lambda: self._images or operation.cancelled)
                operation.check()
                window, image = self._images[0]
            with traced(self._trace, "upload", num_bytes=len(image), detail=f"shard {window.file + 1}"):
                region = Region(image.ctypes.data, len(image), image)
                if window.file in self._hashers:
                    self._hashers[window.file].update(region.view())
                self._writers[window.file].write_from(window.begin, region)
            with self._changed:
                self._images.popleft()
                self._changed.notify_all()
        for writer in self._writers.values():
            writer.finish()


def _message(packet: Packet, data: Region) -> _Bytes:
    """Return a copy of the bytes of a packet, behind what says where they go."""
    numbers = np.array([len(packet.runs), *chain.from_iterable(packet.runs)], np.int64)
    return np.concatenate([numbers.view(np.uint8), np.frombuffer(data.view(), np.uint8)])


def _unpack(message: _Bytes, image: _Bytes, begin: int) -> int:
    """Put the bytes of a message in their places in a window; return how many there are.

    Args:
        message: The message, of any content.
        image: The window.
        begin: Its first byte in the file.

    Raises:
        RankError: The message names bytes that it does not have, or places that are not in the window.
    """
    num_runs = int.from_bytes(message[:_ITEM_BYTES].tobytes(), "little")
    data_at = _ITEM_BYTES * (1 + _RUN_NUMBERS * num_runs)
    if not _ITEM_BYTES <= data_at <= len(message):
        raise RankError(f"a rank has sent a message of {len(message):,} bytes that has {num_runs:,} ranges")
    table = np.frombuffer(message[_ITEM_BYTES:data_at].tobytes(), np.int64).reshape(num_runs, _RUN_NUMBERS)
    data, found = message[data_at:], 0
    for offset, at, nbytes, num_ranges, stride in map(np.ndarray.tolist, table):
        first, length = offset - begin, nbytes * num_ranges
        last = first + stride * (num_ranges - 1) + nbytes
        is_run = num_ranges == 1 or (num_ranges > 1 and stride >= nbytes)
        if nbytes <= 0 or not is_run or first < 0 or last > len(image) or at < 0 or at + length > len(data):
            raise RankError(
                f"a rank has sent bytes {offset:,} to {begin + last:,} for the window that begins at {begin:,}, from "
                f"byte {at:,} on of {len(data):,}"
            )
        target = image[first:last]
        if num_ranges > 1:
            target = np.lib.stride_tricks.as_strided(target, (num_ranges, nbytes), (stride, 1))
        target[...] = data[at : at + length].reshape(target.shape)
        found += length
    return found
