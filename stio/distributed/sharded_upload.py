"""Saves of many ranks to a store: each file has an owner, which uploads it, and the others send it their parts.

The first rank has the transaction of `stio.remote`: it reads what the store has, puts the index, and deletes
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
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from time import perf_counter
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from msgspec import Meta

from stio.distributed.plan_parts import Packet, Window, WrittenPart, plan_stream
from stio.distributed.ranks import Ranks
from stio.distributed.sharded_save import RankTransaction, ShardedSave
from stio.distributed.transfer import RankTransfer
from stio.errors import MismatchError, RankError
from stio.format.manifest import Hasher
from stio.remote.save import RemoteDestination, RemoteTransaction, Uploads
from stio.runtime.calls import LOOK_SECONDS
from stio.runtime.limits import PAGE_BYTES
from stio.runtime.locks import Condition
from stio.runtime.memory import Region
from stio.runtime.notifier import run_blocking
from stio.runtime.operation import Cancelled, Operation, is_interrupted
from stio.runtime.trace import Trace, traced
from stio.saving.options import SaveResult
from stio.saving.plan import WritePlan
from stio.storage.base import Ending, FileWriter, Transaction

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

TABLE_PART = 8
"""The tables of a window have at most one n-th of its size on all ranks together, unless it is a smallest one."""


_MIN_WINDOW_BYTES = 16 * PAGE_BYTES

_WindowBytes = Annotated[int, Meta(ge=_MIN_WINDOW_BYTES, le=WINDOW_BYTES, multiple_of=PAGE_BYTES)]


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
        block_bytes = min(block_bytes, _MAX_BLOCK_BYTES)
        own_bytes = min(self._store.window_bytes, block_bytes)
        window_bytes: int = min(self._arrive("window", own_bytes, kind=_WindowBytes))
        sizes = [shard.nbytes for shard in plan.shards]
        owners = owners_of(sizes, self._ranks.num_ranks)
        windows = cut_windows(sizes, owners, window_bytes)
        own, packets = plan_stream(plan, parts, windows, block_bytes)
        if window_bytes > _MIN_WINDOW_BYTES:
            # The table of many tiny ranges is longer than their bytes.
            max_bytes = window_bytes // TABLE_PART // self._ranks.num_ranks
            long = [one.window for one in packets if table_bytes(one) > max_bytes]
            long_of_all = {number for found in self._arrive("long", long, kind=list[int]) for number in found}
            if long_of_all:
                windows = cut_again(windows, long_of_all, _MIN_WINDOW_BYTES)
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


def table_bytes(packet: Packet) -> int:
    """Return the size of the numbers with which a message begins."""
    return _ITEM_BYTES * (1 + _RUN_NUMBERS * len(packet.runs))


class Exchange(RankTransfer):
    """The exchange on one rank. All ranks start one, and `wait` or `close` it.

    Args:
        plan: What is sent.
        ranks: The ranks.
        uploads: The writers of all files; this rank uses those that it owns.
        save: The operation of the save; its cancel ends the exchange.
        new_hasher: Makes a hasher for each file; None: no digests.
        trace: Records spans.
    """

    def __init__(
        self,
        plan: SendPlan,
        ranks: Ranks,
        uploads: Sequence[FileWriter],
        *,
        save: Operation[Any],
        new_hasher: Callable[[], Hasher] | None = None,
        trace: Trace | None = None,
    ) -> None:
        new_operation = partial(Operation[None], about=plan.path, exit_patience=save.exit_patience)
        super().__init__(ranks, new_operation(self._run, name="send"), "save", range(len(plan.windows)))
        self._plan, self._trace = plan, trace
        self._uploading = new_operation(self._upload, name="upload")
        self._changed = Condition()  # guards what follows
        self.stream = _Messages(plan, self._changed)
        """Takes the bytes of this rank; see `plan_stream`."""
        self._writers = {file: uploads[file] for file, owner in enumerate(plan.owners) if owner == ranks.rank}
        self._hashers = {} if new_hasher is None else {file: new_hasher() for file in self._writers}
        self._images: deque[tuple[Window, _Bytes]] = deque()  # the first one is being uploaded
        save.on_cancel(self._operation.cancel)

    def start(self) -> None:
        """Begin; returns at once.

        Raises:
            StorageError: The system starts no more threads.
        """
        self._operation.start()

    def wait(self) -> None:
        """Wait until the bytes of this rank are sent, and its files are uploaded.

        Raises:
            Cancelled: The exchange was cancelled.
            RankError: A rank has failed.
            StioError: See `Upload`.
        """
        self._operation.join()
        if self._operation.cancelled and self._operation.failure is None:
            raise Cancelled
        self._operation.outcome()

    def close(self) -> None:
        """End it on all ranks, and wait until no thread of it is left on this one."""
        self._operation.close()

    def digests(self) -> dict[int, str]:
        """Return the digest of each file that this rank has uploaded, by its number."""
        return {file: hasher.hexdigest() for file, hasher in self._hashers.items()}

    # On the thread of the exchange.

    def _run(self, operation: Operation[None]) -> None:
        operation.on_cancel(self._uploading.cancel)
        operation.on_cancel(self._ranks.interrupt)
        try:
            self._uploading.start()
            self.run()
            self._uploading.join()
            operation.check()
            self._uploading.outcome()
        except BaseException as error:
            self.stream.end(error)
            raise
        finally:
            self._uploading.close()

    def _failure(self) -> BaseException | None:
        return self._uploading.failure

    def _wait(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait(seconds)

    def _num_ready(self) -> int:
        """Return of how many windows, each of another owner, this rank has its bytes, and room for its own one."""
        owners, nbytes = set[int](), 0
        for number in self._left:
            owner, packet = self._owner_of(number), self.stream.packets.get(number)
            has_room = owner != self._ranks.rank or len(self._images) < _NUM_IMAGES
            nbytes += 0 if packet is None else packet.nbytes
            if owner in owners or not has_room or (packet is not None and self.stream.find(packet) is None):
                break
            if owners and nbytes > self._plan.window_bytes:
                break
            owners.add(owner)
        return len(owners)

    def _owner_of(self, window: int) -> int:
        return self._plan.owners[self._plan.windows[window].file]

    def _send(self, items: Sequence[int]) -> None:
        rank, begin, under_way = self._ranks.rank, perf_counter(), []
        messages = {self._owner_of(number): self.stream.take(number) for number in items}
        received = self._receive_buffers(messages)  # first: if there is no memory, no call may be under way
        for other, data in received.items():
            under_way.append(self._group.recv([torch.from_numpy(data)], other, 0))
        for owner, message in messages.items():
            if owner != rank and len(message):
                under_way.append(self._group.send([torch.from_numpy(message)], owner, 0))
        for work in under_way:
            work.wait()
        if self._trace is not None and under_way:
            num_bytes = sum(len(message) for owner, message in messages.items() if owner != rank)
            self._trace.add("send", begin, perf_counter(), num_bytes=num_bytes)
        for number in items:
            if self._owner_of(number) == rank and not self._operation.cancelled:
                try:
                    self._assemble(self._plan.windows[number], [messages[rank], *received.values()])
                except BaseException as error:
                    self._error = error

    def _receive_buffers(self, messages: Mapping[int, _Bytes]) -> dict[int, _Bytes]:
        """Return memory for the messages of other ranks, by rank.

        Args:
            messages: What this rank sends, by owner.

        Raises:
            MemoryError: There is none. `run` then reports it, and leaves the group, which ends the steps of the others.
        """
        if self._group is None:
            return {}
        sizes, received = torch.zeros(2, self._ranks.num_ranks, dtype=torch.int64, device="cpu")
        for owner, message in messages.items():
            sizes[owner] = len(message) if owner != self._ranks.rank else 0
        self._group.alltoall_base(received, sizes, [], []).wait()
        return {rank: np.empty(size, np.uint8) for rank, size in enumerate(received.tolist()) if size}

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


class _Messages:
    """Has the bytes of this rank until they are sent; an `OrderedWriter`.

    Args:
        plan: What is sent.
        changed: Guards it.
    """

    is_ordered: Literal[True] = True
    """See `OrderedWriter`."""

    def __init__(self, plan: SendPlan, changed: Condition) -> None:
        self.path = plan.path
        """The destination, for messages."""
        self.packets = {packet.window: packet for packet in plan.packets}
        """What is not sent yet, by window."""
        self._changed = changed
        self._blocks: dict[int, Region] = {}  # those with which a thread waits, by their offsets
        self._end = 0  # of the last packet that was taken
        self._error: BaseException | None = None

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
                while self._end < offset + region.nbytes:
                    if self._error is not None:
                        raise self._error
                    if is_interrupted():
                        raise Cancelled
                    self._changed.wait(LOOK_SECONDS)
            finally:
                del self._blocks[offset]

    def finish(self) -> None:
        """Return at once; `Exchange.wait` waits for the uploads."""

    def end(self, error: BaseException) -> None:
        """Make writers raise an error of the exchange."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def find(self, packet: Packet) -> Region | None:
        """Return the bytes of a packet; None if they are not there yet."""
        with self._changed:
            for begin, block in self._blocks.items():
                if begin <= packet.begin < begin + block.nbytes:
                    return block.sub(packet.begin - begin, packet.nbytes)
        return None

    def take(self, window: int) -> _Bytes:
        """Return the message of a window, whose bytes are there; it is empty if this rank has none."""
        with self._changed:
            packet = self.packets.pop(window, None)
            if packet is None:
                return np.empty(0, np.uint8)
            data = self.find(packet)
            if data is None:
                raise Cancelled  # the thread that had them has ended
            message = _message(packet, data)
            self._end = packet.begin + packet.nbytes
            self._changed.notify_all()
            return message


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
