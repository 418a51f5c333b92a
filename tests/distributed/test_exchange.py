"""The exchange on one rank alone: order, memory, failures and cancels. With others: test_save_to_stores.py."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from support import eventually

from stio.distributed.plan_parts import ByteRange, WrittenPart, plan_stream
from stio.distributed.ranks import Ranks
from stio.distributed.sharded_write import _NUM_IMAGES, Exchange, SendPlan, cut_windows
from stio.errors import MismatchError
from stio.format.shared import TensorSource
from stio.runtime.memory import Region
from stio.runtime.operation import Cancelled, Operation
from stio.saving import SaveOptions, plan_writes

WINDOW_BYTES = 8192
HEADER = 1000


class File:
    """A file in memory, whose writes wait while it is closed."""

    is_ordered = True
    path = "s3://bucket/x"

    def __init__(self, nbytes: int) -> None:
        self.data = bytearray(nbytes)
        self.at = 0
        self.open = threading.Event()
        self.open.set()
        self.error: Exception | None = None
        self.finished = False

    def write_from(self, offset: int, region: Region) -> None:
        assert offset == self.at, "in order"
        while not self.open.wait(0.01):
            if self.error is not None:
                raise self.error
        self.data[offset : offset + region.nbytes] = region.tobytes()
        self.at += region.nbytes

    def finish(self) -> None:
        assert self.at == len(self.data)
        self.finished = True


class Case:
    """An exchange of random tensors, in files of about 50 KB; `part` of the bytes are packed."""

    def __init__(self, part: float = 1.0) -> None:
        random = np.random.default_rng(1)
        contents = {f"t{k}": random.bytes(7000 + 100 * k) for k in range(20)}
        sources = [
            TensorSource(
                name=name,
                dtype="U8",
                shape=(len(data),),
                nbytes=len(data),
                storage_key=name,
                span=(0, len(data)),
                layout=None,
                data=data,
            )
            for name, data in contents.items()
        ]
        self.plan = plan_writes(sources, WINDOW_BYTES, max_shard_bytes=50_000)
        sizes = [shard.nbytes for shard in self.plan.shards]
        self.expected = [shard.header + b"".join(contents[name] for name in shard.names) for shard in self.plan.shards]
        owners = [0] * len(sizes)
        windows = cut_windows(sizes, owners, WINDOW_BYTES)
        parts = {
            source.name: WrittenPart(source, [ByteRange(0, source.nbytes)])
            for source in sources[: int(part * len(sources))]
        }
        self.own, packets = plan_stream(self.plan, parts, windows, WINDOW_BYTES)
        self.files = [File(nbytes) for nbytes in sizes]
        self.save: Operation[None] = Operation(lambda _: None, name="save")
        send_plan = SendPlan(
            path="s3://bucket/x",
            owners=owners,
            headers=[shard.header for shard in self.plan.shards],
            windows=windows,
            window_bytes=WINDOW_BYTES,
            packets=packets,
        )
        ranks = Ranks(about="save")
        self.exchange = Exchange(send_plan, ranks, self.files, save=self.save, options=SaveOptions(hash="sha256"))
        self.exchange.operation.start()

    def blocks(self) -> Iterator[tuple[int, Region]]:
        for block in self.own.shards[0].blocks:
            data = np.empty(block.nbytes, np.uint8)
            for piece in block.pieces:
                found = self.own.sources[piece.source].data[piece.start : piece.start + piece.nbytes]
                data[piece.at : piece.at + piece.nbytes] = np.frombuffer(found, np.uint8)
            yield block.offset, Region(data.ctypes.data, block.nbytes, data)

    def write(self) -> None:
        for offset, region in self.blocks():
            self.exchange.write_from(offset, region)


def test_files_are_uploaded_in_order() -> None:
    case = Case()
    case.write()
    case.exchange.wait()
    assert [bytes(file.data) for file in case.files] == case.expected
    assert all(file.finished for file in case.files)
    digests = {k: hashlib.sha256(data).hexdigest() for k, data in enumerate(case.expected)}
    assert case.exchange.digests() == digests


def test_memory_is_bounded_while_the_store_is_slow() -> None:
    """Three windows of an owner; the writer of the stream waits."""
    case = Case()
    for file in case.files:
        file.open.clear()
    writer = threading.Thread(target=case.write)
    writer.start()
    stream, images = case.exchange, case.exchange._images
    assert eventually(lambda: len(images) == _NUM_IMAGES)
    assert not eventually(lambda: len(images) > _NUM_IMAGES, 0.2)
    assert 0 < stream._sent_bytes <= _NUM_IMAGES * WINDOW_BYTES and len(stream._blocks) == 1
    for file in case.files:
        file.open.set()
    writer.join()
    case.exchange.wait()
    assert [bytes(file.data) for file in case.files] == case.expected


def test_a_failed_upload_is_raised_where_the_stream_is_written() -> None:
    case = Case()
    case.files[0].open.clear()
    case.files[0].error = OSError("a store that fails")
    with pytest.raises(OSError, match="a store that fails"):
        case.write()
    with pytest.raises(OSError, match="a store that fails"):
        case.exchange.wait()
    case.exchange.operation.close()


def test_a_cancel_ends_all_waits() -> None:
    case = Case()
    for file in case.files:
        file.open.clear()
    raised: list[BaseException] = []

    def write() -> None:
        try:
            case.write()
        except BaseException as error:
            raised.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    assert eventually(lambda: len(case.exchange._images) == _NUM_IMAGES)
    case.save.cancel()
    for file in case.files:
        file.open.set()  # a write that is under way ends
    writer.join()
    assert [type(error) for error in raised] == [Cancelled]
    with pytest.raises(Cancelled):
        case.exchange.wait()
    case.exchange.operation.close()
    assert not all(file.finished for file in case.files)


def test_bytes_that_no_rank_has() -> None:
    """Memory that was never filled is not uploaded."""
    case = Case(part=0.9)
    with pytest.raises(MismatchError, match="do not make up a file"):
        case.write()
        case.exchange.wait()
    case.exchange.operation.close()
