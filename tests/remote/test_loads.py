"""Loads from URLs: every public function, the requests that they make, cancels, faults, what is shown."""

from __future__ import annotations

import json
import logging
import random
import threading
import time
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from fakes import FakeDevice
from loops import on_all
from servers import Fault, HttpServer, Request
from torch import nn

import stio
from stio.errors import ChangedDuringReadError, CheckpointNotFoundError, StioError, StorageError
from stio.remote.requests import Patience
from stio.remote.source import RemoteRoot
from stio.storage.base import Requests
from stio.storage.open import SingleFileRoot

SIZES = [(300, 257), (64, 64), (), (0, 5), (1000, 33), (7,)]


@pytest.fixture(scope="module")
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {f"layer.{k}.w": torch.randn(shape, generator=generator) for k, shape in enumerate(SIZES)}


@pytest.fixture(scope="module")
def files(tensors: dict[str, torch.Tensor], tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return one checkpoint as a single file and in shards, by path."""
    where = tmp_path_factory.mktemp("checkpoint")
    stio.sync.save(tensors, where / "one.safetensors", hash="sha256")
    stio.sync.save(tensors, where / "sharded", max_shard_size=200_000, hash="sha256")
    return {f"/{path.relative_to(where)}": path.read_bytes() for path in where.rglob("*") if path.is_file()}


@pytest.fixture(params=["http", "s3"])
def place(request: pytest.FixtureRequest, files: dict[str, bytes]) -> str:
    """Put the checkpoint into a store; return the URL of its parent."""
    if request.param == "s3":
        client = request.getfixturevalue("s3")
        for path, data in files.items():
            client.put_object(Bucket="bucket", Key=f"models{path}", Body=data)
        return "s3://bucket/models"
    server = request.getfixturevalue("server")
    server.objects |= files
    return server.url


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


KINDS = ["one.safetensors", "sharded", "sharded/", "sharded/model.safetensors.index.json"]


@pytest.mark.matrix
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_url(place: str, kind: str, tensors: dict[str, torch.Tensor]) -> None:
    assert same(stio.sync.load(f"{place}/{kind}"), tensors)
    assert same(stio.sync.load(f"{place}/{kind}", verify=True, memory="copy"), tensors)


@pytest.mark.matrix
@pytest.mark.anyio
@on_all
async def test_every_function_on_every_loop(place: str, tensors: dict[str, torch.Tensor]) -> None:
    url = f"{place}/sharded"
    assert same(await stio.load(url), tensors)
    async with stio.open(url) as checkpoint:
        assert set(checkpoint.keys()) == set(tensors)
        rows = await checkpoint.read("layer.0.w", np.s_[10:20, 3:50])
        assert torch.equal(rows, tensors["layer.0.w"][10:20, 3:50])
        assert same({name: tensor async for name, tensor in checkpoint.stream()}, tensors)
    module = Layers()
    report = await stio.load_into(module, url)
    assert not report.missing
    assert same(module.state_dict(), tensors)
    with torch.device("meta"):
        empty = Layers()
    async with stio.warm_start(empty, url) as warm:
        await warm.done()
    assert same(empty.state_dict(), tensors)


class Layers(nn.Module):
    """A module with the names and shapes of the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Layer(shape) for shape in SIZES)


class Layer(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape))


def test_a_host_cache_reads_the_store_once(
    server: HttpServer, files: dict[str, bytes], tensors: dict[str, torch.Tensor]
) -> None:
    server.objects |= files
    with stio.sync.HostCache(budget_bytes=64 << 20) as cache:
        for _ in range(2):
            assert same(stio.sync.load(f"{server.url}/sharded", cache=cache), tensors)
        assert (cache.stats().hits, cache.stats().misses) == (cache.stats().entries, cache.stats().entries)
        path, data = next(
            (path, data)
            for path, data in files.items()
            if path.endswith("00001-of-00003.safetensors") or "-00001-" in path
        )
        changed = data[:-4] + bytes(4)
        server.put(path, changed)
        found = stio.sync.load(f"{server.url}/sharded", cache=cache)
        assert not same(found, tensors)
        assert cache.stats().evictions == 1
        cache.evict(f"{server.url}/sharded")
        assert cache.stats().entries == 0
        cache.prefetch(f"{server.url}/one.safetensors")
        before = len(server.requests)
        assert same(stio.sync.load(f"{server.url}/one.safetensors", cache=cache), tensors)
        assert len(server.requests) - before == 2  # opening, and whether it is unchanged


def put_large(server: HttpServer, nbytes: int = 3 << 20, num_tensors: int = 1) -> dict[str, torch.Tensor]:
    """Put one file with random bytes at /m.safetensors."""
    data = torch.from_numpy(np.frombuffer(random.Random(1).randbytes(nbytes), np.uint8).copy())
    tensors = {f"t{k}": part.clone() for k, part in enumerate(data.chunk(num_tensors))}
    server.put("/m.safetensors", stio.sync.dumps(tensors) if hasattr(stio.sync, "dumps") else _file_of(tensors))
    return tensors


def _file_of(tensors: dict[str, torch.Tensor]) -> bytes:
    entries, at = {}, 0
    for name, tensor in tensors.items():
        entries[name] = {"dtype": "U8", "shape": [tensor.numel()], "data_offsets": [at, at + tensor.numel()]}
        at += tensor.numel()
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return (
        len(header).to_bytes(8, "little") + header + b"".join(tensor.numpy().tobytes() for tensor in tensors.values())
    )


def test_one_row_of_a_single_file_is_three_requests(server: HttpServer) -> None:
    tensors = put_large(server)
    part = stio.sync.load(f"{server.url}/m.safetensors", names="t0", slices={"t0": np.s_[1_000_000:1_000_100]})
    assert torch.equal(part["t0"], tensors["t0"][1_000_000:1_000_100])
    assert len(server.requests) == 3
    assert sent_bytes(server) < (128 << 10) + 20_000


def sent_bytes(server: HttpServer) -> int:
    total = 0
    for request in server.requests:
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        total += int(last) + 1 - int(first)
    return total


@pytest.mark.slow
def test_many_small_tensors_are_few_requests(server: HttpServer) -> None:
    tensors = put_large(server, 4 << 20, 20_000)
    root = RemoteRoot(server.url, requests=Requests(256 << 10, 8, 1 << 20))
    assert same(stio.sync.load(SingleFileRoot(root, "m.safetensors")), tensors)
    needed = -(-(4 << 20) // (256 << 10))
    header = 2 + -(-2_000_000 // (256 << 10))  # opening, and a header of about 1.5 MB
    assert len(server.requests) <= 1.2 * needed + header + 1


@pytest.mark.slow
def test_a_hundred_thousand_small_tensors(server: HttpServer) -> None:
    """At most 1.2 times the requests that the bytes of the file need at 8 MiB, opening and header included."""
    num, nbytes = 100_000, 1000
    entries = {
        f"layer.{k}.w": {"dtype": "U8", "shape": [nbytes], "data_offsets": [k * nbytes, (k + 1) * nbytes]}
        for k in range(num)
    }
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    server.put("/m.safetensors", len(header).to_bytes(8, "little") + header + bytes(num * nbytes))
    found = stio.sync.load(f"{server.url}/m.safetensors")
    assert len(found) == num
    assert sum(tensor.nbytes for tensor in found.values()) == num * nbytes
    assert len(server.requests) <= 1.2 * len(server.objects["/m.safetensors"]) / (8 << 20)


def test_gaps_are_read_if_that_is_less_than_a_request(server: HttpServer) -> None:
    put_large(server, 4 << 20, 64)
    for gap_bytes, most in ((1 << 20, 2), (1, 34)):
        server.requests.clear()
        root = RemoteRoot(server.url, requests=Requests(8 << 20, 8, gap_bytes))
        names = [f"t{k}" for k in range(4, 64, 2)]
        assert len(stio.sync.load(SingleFileRoot(root, "m.safetensors"), names=names)) == 30
        assert len(server.requests) - 2 in range(most - 5, most + 1)


@pytest.mark.slow
def test_requests_under_way_and_their_memory_stay_within_the_budget(server: HttpServer) -> None:
    tensors = put_large(server, 8 << 20, 8)
    # The first latency is longer than a busy machine takes to start eight threads.
    for budget_bytes, most, latency_seconds in ((32 << 20, 8, 0.1), (2 << 20, 1, 0.02)):
        server.most_at_once, server.latency_seconds = 0, latency_seconds
        root = RemoteRoot(server.url, requests=Requests(1 << 20, 8, 1 << 20))
        source = SingleFileRoot(root, "m.safetensors")
        with stio.sync.open(source, budget_bytes=budget_bytes) as checkpoint:
            found = {name: tensor.clone() for name, tensor in checkpoint.stream()}
        assert same(found, tensors)
        assert server.most_at_once <= most
        assert most == 1 or server.most_at_once > 4


@pytest.mark.parametrize("memory", ["map", "lazy"])
def test_a_url_is_never_mapped(server: HttpServer, memory: Any) -> None:
    put_large(server)
    with pytest.raises(ValueError, match="maps files of this machine"):
        stio.sync.load(f"{server.url}/m.safetensors", memory=memory)


IMPATIENT = Patience(num_attempts=2, first_pause_seconds=0.001, stall_seconds=0.4)
FAULTS = [
    Fault(status=503),
    Fault(status=403),
    Fault(status=404),
    Fault(status=412),
    Fault(cut_bytes=3),
    Fault(length=-1),
    Fault(length=1),
    Fault(shift=1),
    Fault(reset=True),
    Fault(hang_after=0),
    Fault(unranged=True),
    Fault(etag='"other"'),
]


@pytest.mark.matrix
@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("fault", FAULTS, ids=repr)
def test_every_fault_at_every_request(
    server: HttpServer, files: dict[str, bytes], tensors: dict[str, torch.Tensor], fault: Fault, forever: bool
) -> None:
    """Right bytes or a typed error, in bounded time."""
    server.objects |= files
    number, outcomes = 0, []
    while True:
        server.requests.clear()
        server.fault = lambda k, request, n=number: fault if k == n or (forever and k > n) else None
        began = time.monotonic()
        try:
            assert same(stio.sync.load(RemoteRoot(f"{server.url}/sharded", patience=IMPATIENT)), tensors)
            outcomes.append("loaded")
        except StioError as error:
            outcomes.append(type(error).__name__)
            assert server.url in str(error)
        assert time.monotonic() - began < 10
        if len(server.requests) <= number:
            break
        number += 1
    assert outcomes[-1] == "loaded"
    assert number > 4
    if (
        forever and fault.etag is None and not fault.unranged
    ):  # another state, or no ranges, from the opening on is no fault
        assert "loaded" not in outcomes[:-1]


@pytest.mark.matrix
@pytest.mark.anyio
@pytest.mark.parametrize("fault", [Fault(hang=True), Fault(hang_after=10), Fault(status=503)], ids=repr)
@pytest.mark.parametrize("number", [0, 1, 2])
async def test_a_cancel_is_heard_within_a_second(server: HttpServer, fault: Fault, number: int) -> None:
    put_large(server)
    asked = threading.Event()

    def answer(k: int, request: Request) -> Fault | None:
        if k < number:
            return None
        asked.set()
        return fault

    server.fault = answer
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def load() -> None:
                await stio.load(f"{server.url}/m.safetensors")

            group.start_soon(load)
            await anyio.to_thread.run_sync(asked.wait)
            began = time.monotonic()
            scope.cancel()
    assert time.monotonic() - began < 2.0  # one second, and some for a busy machine


def test_a_failure_ends_the_requests_beside_it(server: HttpServer) -> None:
    """One request is refused while others hang: the error does not wait for them."""
    put_large(server, 4 << 20, 4)
    root = RemoteRoot(server.url, requests=Requests(1 << 20, 4, 0), patience=Patience(stall_seconds=600))
    hung = threading.Event()

    def answer(k: int, request: Request) -> Fault | None:
        if k == 0:
            return None
        if k < 3:
            return Fault(hang=True)
        return Fault(status=403)

    server.fault = answer
    began = time.monotonic()
    with pytest.raises(StorageError, match="refuses access"):
        stio.sync.load(SingleFileRoot(root, "m.safetensors"))
    assert time.monotonic() - began < 5
    assert not hung.is_set()


def test_c91_an_object_that_is_replaced_during_a_load(server: HttpServer) -> None:
    """Also by one with the same bytes before and after: the state at the end is compared."""
    put_large(server)
    data = server.objects["/m.safetensors"]

    def answer(k: int, request: Request) -> Fault | None:
        if k == 1:
            server.put("/m.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
        return None

    server.fault = answer
    with pytest.raises(ChangedDuringReadError) as caught:
        stio.sync.load(f"{server.url}/m.safetensors")
    assert caught.value.path == f"{server.url}/m.safetensors"


@pytest.mark.matrix
def test_what_is_missing(place: str) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        stio.sync.load(f"{place}/none.safetensors")
    assert caught.value.path == f"{place}/none.safetensors"
    with pytest.raises(CheckpointNotFoundError):
        stio.sync.load(f"{place}/none")


def test_a_missing_shard(server: HttpServer, files: dict[str, bytes]) -> None:
    server.objects |= {path: data for path, data in files.items() if "-00002-" not in path and "_00002_" not in path}
    assert len(server.objects) < len(files)
    with pytest.raises(CheckpointNotFoundError, match="the index names a shard that does not exist"):
        stio.sync.load(f"{server.url}/sharded")


def test_nothing_shows_a_secret(server: HttpServer, caplog: pytest.LogCaptureFixture) -> None:
    put_large(server)
    caplog.set_level(logging.DEBUG, logger="stio")
    trace = stio.Trace()
    url = f"{server.url.replace('//', '//me:PASSWORD@')}/m.safetensors?signature=SECRET"
    stio.sync.load(url, trace=trace)
    checkpoint = stio.open(url)
    with pytest.raises(StioError) as closed:
        checkpoint.keys()
    server.objects.clear()
    with pytest.raises(StioError) as missing:
        stio.sync.load(url)
    shown = f"{trace.spans} {caplog.text} {closed.value} {missing.value} {missing.value!r}"
    assert server.url in shown
    assert "SECRET" not in shown
    assert "PASSWORD" not in shown


def test_a_url_as_a_path_is_explained() -> None:
    with pytest.raises(CheckpointNotFoundError, match="a pathlib.Path removes one"):
        stio.sync.load(Path("s3://bucket/m.safetensors"))


@pytest.mark.matrix
@pytest.mark.parametrize(("budget_bytes", "most"), [(512 << 20, 32), (8 << 20, 4)])
def test_to_a_device(server: HttpServer, budget_bytes: int, most: int) -> None:
    """The slots of staging memory and the answers that the source holds share the budget."""
    server.latency_seconds = 0.01
    tensors = put_large(server, 12 << 20, 7)
    device = FakeDevice()
    found = stio.sync.load(f"{server.url}/m.safetensors", device=device, budget_bytes=budget_bytes)
    assert same(found, tensors)
    assert server.most_at_once <= most
    largest = max(
        int(last) + 1 - int(first)
        for first, last in (request.headers["range"][6:].split("-") for request in server.requests)
    )
    assert 2 * largest * server.most_at_once <= budget_bytes


@pytest.mark.slow
def test_a_load_with_a_small_budget_uses_little_memory(server: HttpServer) -> None:
    server.latency_seconds = 0.01
    put_large(server, 400_000, 3)
    stio.sync.load(f"{server.url}/m.safetensors", budget_bytes=1)
    assert len(server.requests) > 50
    assert server.most_at_once == 1


def test_shards_are_opened_together(server: HttpServer, tmp_path: Path) -> None:
    stio.sync.save({f"w{k}": torch.full((1000,), float(k)) for k in range(12)}, tmp_path / "m", max_shard_size=4000)
    shards = [path for path in (tmp_path / "m").iterdir() if path.suffix == ".safetensors"]
    assert len(shards) == 12
    for path in (tmp_path / "m").iterdir():
        server.put(f"/m/{path.name}", path.read_bytes())
    server.latency_seconds = 0.05
    with stio.sync.open(f"{server.url}/m") as checkpoint:
        assert len(checkpoint) == 12
    assert server.most_at_once > 6
    assert len(server.requests) == 13  # the index, and one for each shard


@pytest.mark.slow
def test_large_tensors_keep_all_connections_busy(server: HttpServer) -> None:
    """Groups that are returned as they are need no memory beside the result, so they do not wait for the budget."""
    server.latency_seconds = 0.05
    tensors = put_large(server, 12 << 20, 2)
    assert same(stio.sync.load(f"{server.url}/m.safetensors", budget_bytes=16 << 20), tensors)
    assert server.most_at_once > 6  # 8 MiB for answers of 1 MiB; both tensors with theirs would not fit beside them


@pytest.mark.matrix
@pytest.mark.anyio
async def test_many_loads_at_one_time(
    server: HttpServer, files: dict[str, bytes], tensors: dict[str, torch.Tensor]
) -> None:
    server.objects |= files
    found: list[dict[str, torch.Tensor]] = []

    async def load() -> None:
        found.append(await stio.load(f"{server.url}/one.safetensors"))

    async with anyio.create_task_group() as tasks:
        for _ in range(8):
            tasks.start_soon(load)
    assert len(found) == 8
    assert all(same(one, tensors) for one in found)
