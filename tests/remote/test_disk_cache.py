"""`DiskCache`: what is on disk after a load, what other processes and a kill leave of it, what is removed."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch
from counts import count
from fakes import FakeDevice
from safetensors.torch import save
from servers import Fault, HttpServer, Request
from support import needs_engine, run_python
from torch import nn

import stio
from stio.loading import planned
from stio.loading.engine import EngineExecutor
from stio.remote import disk_cache
from stio.runtime.notifier import run_blocking
from stio.storage.commit import directory_lock, syscalls

NBYTES = 1 << 20
LARGE_BYTES = 40 << 20
NUM_BLOCKS = 6
"""Number of the blocks in which so many bytes, and a header, are fetched."""


def put(server: HttpServer, name: str = "m", *, nbytes: int = NBYTES, seed: int = 0) -> dict[str, torch.Tensor]:
    """Put a checkpoint of four tensors into the store."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"w{k}": torch.randn(nbytes // 16, generator=generator) for k in range(4)}
    server.put(f"/{name}.safetensors", save(tensors))
    return tensors


def url(server: HttpServer, name: str = "m") -> str:
    return f"{server.url}/{name}.safetensors"


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def names(cache: stio.DiskCache) -> list[str]:
    return sorted(os.listdir(cache.path)) if os.path.isdir(cache.path) else []


def suffixes(cache: stio.DiskCache) -> list[str]:
    return sorted(os.path.splitext(name)[1] for name in names(cache))


def sent_bytes(server: HttpServer, since: int = 0) -> int:
    """Return how many bytes the ranges of all requests have."""
    total = 0
    for request in server.requests[since:]:
        first, _, last = request.headers["range"].removeprefix("bytes=").partition("-")
        total += min(int(last) + 1, len(server.objects[request.path])) - int(first)
    return total


@pytest.fixture
def cache(tmp_path: Path) -> stio.DiskCache:
    return stio.DiskCache(tmp_path / "cache", max_bytes=1 << 30)


def wait_for(ready: Callable[[], object]) -> None:
    until = time.monotonic() + 20
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.005)


# What a load finds.


def test_the_second_load_makes_one_request(server: HttpServer, cache: stio.DiskCache) -> None:
    tensors = put(server)
    assert same(stio.sync.load(url(server), cache=cache), tensors)
    assert suffixes(cache) == [".safetensors"]
    assert (Path(cache.path) / names(cache)[0]).read_bytes() == server.objects["/m.safetensors"]
    began = len(server.requests)
    assert same(stio.sync.load(url(server), cache=cache), tensors)
    assert len(server.requests) == began + 1
    assert cache.stats() == stio.CacheStats(
        entries=1, held_bytes=len(server.objects["/m.safetensors"]), hits=1, misses=1, evictions=0
    )
    assert cache.leftovers() == []


@pytest.mark.parametrize("memory", ["auto", "map", "lazy", "copy"])
def test_every_kind_of_memory(server: HttpServer, cache: stio.DiskCache, memory: Any) -> None:
    tensors = put(server)
    for _ in range(2):
        assert same(stio.sync.load(url(server), cache=cache, memory=memory), tensors)
    assert cache.stats().hits == 1


@needs_engine
def test_the_engine_reads_what_is_on_disk(
    server: HttpServer, cache: stio.DiskCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[object] = []
    monkeypatch.setattr(planned, "_AT_ONCE_BYTES", -1)
    monkeypatch.setattr(planned, "EngineExecutor", lambda *a, **k: (made.append(1), EngineExecutor(*a, **k))[1])
    tensors = put(server)
    for _ in range(2):  # fetched, and found
        assert same(stio.sync.load(url(server), cache=cache, memory="copy"), tensors)
    assert made == [1, 1]


def test_to_a_device(server: HttpServer, cache: stio.DiskCache) -> None:
    tensors = put(server)
    for _ in range(2):
        found = stio.sync.load(url(server), cache=cache, device=FakeDevice())
        assert same({name: tensor.cpu() for name, tensor in found.items()}, tensors)
    assert cache.stats().hits == 1


@pytest.mark.matrix
@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])
async def test_every_function_on_every_loop(server: HttpServer, cache: stio.DiskCache, anyio_backend: str) -> None:
    tensors = put(server)
    for k in range(2):
        assert same(await stio.load(url(server), cache=cache), tensors)
        async with stio.open(url(server), cache=cache) as checkpoint:
            assert torch.equal(await checkpoint.read("w1"), tensors["w1"])
            assert same({name: tensor async for name, tensor in checkpoint.stream()}, tensors)
        module = nn.ParameterDict({name: torch.zeros_like(tensor) for name, tensor in tensors.items()})
        await stio.load_into(module, url(server), cache=cache)
        assert same(dict(module.state_dict()), tensors)
        empty = nn.ParameterDict({name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()})
        async with stio.warm_start(empty, url(server), cache=cache) as warm:
            await warm.done()
        assert same(dict(empty.state_dict()), tensors)
        assert cache.stats().misses == 1, k


@pytest.mark.slow
def test_s3(s3: Any, cache: stio.DiskCache, tmp_path: Path) -> None:
    tensors = {f"w{k}": torch.randn(1000) for k in range(6)}
    stio.sync.save(tensors, tmp_path / "m", max_shard_size=9000)
    for path in (tmp_path / "m").iterdir():
        s3.put_object(Bucket="bucket", Key=f"m/{path.name}", Body=path.read_bytes())
    for _ in range(2):
        assert same(stio.sync.load("s3://bucket/m", cache=cache), tensors)
    assert cache.stats().hits == cache.stats().misses == cache.stats().entries == 3


def test_local_files_are_not_kept(cache: stio.DiskCache, tmp_path: Path) -> None:
    stio.sync.save({"w": torch.zeros(100)}, tmp_path / "m.safetensors")
    stio.sync.load(tmp_path / "m.safetensors", cache=cache)
    assert not os.path.exists(cache.path)


def test_a_small_part_is_read_from_the_store(server: HttpServer, cache: stio.DiskCache) -> None:
    tensors = put(server)
    assert torch.equal(stio.sync.load(url(server), names="w1", cache=cache)["w1"], tensors["w1"])
    part = {name: slice(0, 10) for name in tensors}
    assert stio.sync.load(url(server), slices=part, cache=cache)["w1"].shape == (10,)
    assert names(cache) == []
    stio.sync.load(url(server), cache=cache)
    began = len(server.requests)
    assert torch.equal(stio.sync.load(url(server), names="w1", cache=cache)["w1"], tensors["w1"])
    assert len(server.requests) == began + 1


def test_verify_reads_the_store_once(server: HttpServer, cache: stio.DiskCache, tmp_path: Path) -> None:
    stio.sync.save({"w": torch.randn(1 << 18)}, tmp_path / "m.safetensors", hash="sha256")
    for path in tmp_path.glob("m.*"):
        server.put(f"/{path.name}", path.read_bytes())
    nbytes = len(server.objects["/m.safetensors"])
    stio.sync.load(url(server), cache=cache, verify=True)
    assert nbytes <= sent_bytes(server) < 1.5 * nbytes
    data = server.objects["/m.safetensors"]
    server.put("/m.safetensors", data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(stio.IntegrityError):
        stio.sync.load(url(server), cache=cache, verify=True)


def test_verify_removes_a_damaged_file(server: HttpServer, cache: stio.DiskCache, tmp_path: Path) -> None:
    """One that is damaged behind the bytes that came when the object was opened."""
    tensors = {"w": torch.randn(1 << 18)}
    stio.sync.save(tensors, tmp_path / "m.safetensors", hash="sha256")
    for path in tmp_path.glob("m.*"):
        server.put(f"/{path.name}", path.read_bytes())
    stio.sync.load(url(server), cache=cache, verify=True)
    file = Path(cache.path) / names(cache)[0]
    file.chmod(0o600)
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(stio.IntegrityError, match="removed from the cache, so load again") as caught:
        stio.sync.load(url(server), cache=cache, verify=True)
    assert caught.value.path == str(file)
    assert same(stio.sync.load(url(server), cache=cache, verify=True), tensors)
    assert file.read_bytes() == data


@pytest.mark.slow
def test_a_file_with_a_damaged_header_is_removed(server: HttpServer, cache: stio.DiskCache) -> None:
    """Damaged behind the bytes that came when the object was opened: a header may be longer than these."""
    tensors = {f"w{k}": torch.full((100,), k) for k in range(4000)}
    server.put("/m.safetensors", save(tensors))
    stio.sync.load(url(server), cache=cache)
    file = Path(cache.path) / names(cache)[0]
    file.chmod(0o600)
    with pytest.raises(stio.LimitError):
        stio.sync.load(url(server), cache=cache, limits=stio.Limits(header_bytes=1000))
    data = bytearray(file.read_bytes())  # it stays: the limit is the caller's
    data[200_000:200_100] = bytes(100)
    file.write_bytes(data)
    with pytest.raises(stio.FormatError, match="removed from the cache, so load again"):
        stio.sync.load(url(server), cache=cache)
    assert same(stio.sync.load(url(server), cache=cache), tensors)


def test_another_state_of_an_object_is_a_miss(server: HttpServer, cache: stio.DiskCache) -> None:
    for seed in range(2):
        tensors = put(server, seed=seed)
        assert same(stio.sync.load(url(server), cache=cache), tensors)
    assert (cache.stats().entries, cache.stats().misses) == (2, 2)


def test_an_object_without_a_state_is_not_kept(server: HttpServer, cache: stio.DiskCache) -> None:
    tensors = put(server)
    server.fault = lambda number, request: Fault(etag="")
    assert same(stio.sync.load(url(server), cache=cache), tensors)
    assert suffixes(cache) == []


@pytest.mark.slow
def test_an_object_that_changes_during_the_fetch(server: HttpServer, cache: stio.DiskCache) -> None:
    put(server, nbytes=LARGE_BYTES)

    def change(number: int, request: Request) -> None:
        if number == 3:
            put(server, nbytes=LARGE_BYTES, seed=1)

    server.fault = change
    with pytest.raises(stio.ChangedDuringReadError):
        stio.sync.load(url(server), cache=cache)
    assert suffixes(cache) == []


@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_fetched_again(
    server: HttpServer, cache: stio.DiskCache, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = put(server)
    stio.sync.load(url(server), cache=cache)
    file = Path(cache.path) / names(cache)[0]
    file.chmod(0o600)
    data = file.read_bytes()
    file.write_bytes(data[:-1] if damage == "cut" else b"?" + data[1:])
    assert same(stio.sync.load(url(server), cache=cache), tensors)
    assert "the file is damaged" in caplog.text
    assert file.read_bytes() == data


@pytest.mark.parametrize("max_bytes", [0, -1, "1 GBit", True, 1.5])
def test_wrong_sizes(tmp_path: Path, max_bytes: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_bytes"):
        stio.DiskCache(tmp_path, max_bytes=max_bytes)


def test_it_pickles(cache: stio.DiskCache) -> None:
    assert repr(pickle.loads(pickle.dumps(cache))) == repr(cache)


# Room.


def test_the_least_recently_used_goes_first(server: HttpServer, tmp_path: Path) -> None:
    cache = stio.DiskCache(tmp_path, max_bytes=int(2.5 * NBYTES))
    for name in ("a", "b", "a", "c", "a"):
        put(server, name, seed=ord(name))
        stio.sync.load(url(server, name), cache=cache, memory="copy")
    assert cache.stats().held_bytes <= cache.max_bytes
    assert (cache.stats().entries, cache.stats().evictions, cache.stats().hits) == (2, 1, 2)
    stio.sync.load(url(server, "b"), cache=cache, memory="copy")
    assert cache.stats().misses == 4


def test_what_is_used_is_not_removed(server: HttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = stio.DiskCache(tmp_path, max_bytes=int(1.5 * NBYTES))
    first, second = put(server, "a"), put(server, "b", seed=1)
    mapped = stio.sync.load(url(server, "a"), cache=cache, memory="map")
    assert same(stio.sync.load(url(server, "b"), cache=cache, memory="map"), second)
    assert "read without the cache" in caplog.text
    assert cache.stats().entries == 1
    assert cache.evict() == 0
    assert same(mapped, first)
    del mapped
    assert same(stio.sync.load(url(server, "b"), cache=cache), second)
    assert (cache.stats().entries, cache.stats().evictions) == (1, 1)


def test_nothing_is_removed_for_what_does_not_fit(
    server: HttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = stio.DiskCache(tmp_path, max_bytes=int(1.5 * NBYTES))
    put(server, "a")
    large = put(server, "b", nbytes=2 * NBYTES)
    stio.sync.load(url(server, "a"), cache=cache)
    assert same(stio.sync.load(url(server, "b"), cache=cache), large)
    assert "more than max_bytes" in caplog.text
    assert (cache.stats().entries, cache.stats().evictions) == (1, 0)


@pytest.mark.parametrize("call", ["reserve", "write_bytes", "fsync"])
def test_a_full_disk_is_no_error(
    server: HttpServer,
    cache: stio.DiskCache,
    call: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tensors = put(server)

    def fail(*values: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(syscalls, call, fail)
    assert same(stio.sync.load(url(server), cache=cache), tensors)
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert suffixes(cache) == []
    monkeypatch.undo()
    stio.sync.load(url(server), cache=cache)
    assert suffixes(cache) == [".safetensors"]


def test_a_small_disk(server: HttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    where = tmp_path / "disk"
    where.mkdir()
    options = ["-t", "tmpfs", "-o", f"size={NBYTES // 2}", "none", str(where)]
    if os.geteuid() or subprocess.run(["mount", *options], capture_output=True).returncode:
        pytest.skip("no right to mount")
    try:
        tensors = put(server)
        cache = stio.DiskCache(where / "cache", max_bytes=1 << 30)
        assert same(stio.sync.load(url(server), cache=cache), tensors)
        assert os.strerror(errno.ENOSPC) in caplog.text
        assert names(cache) == []
    finally:
        subprocess.run(["umount", str(where)], check=True)


def test_a_directory_that_cannot_be_written(
    server: HttpServer, cache: stio.DiskCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = put(server)
    stio.sync.load(url(server), cache=cache)
    other = put(server, "b", seed=1)
    real = syscalls.open_file

    def read_only(name: str, flags: int, **values: Any) -> int:
        if flags & (os.O_CREAT | os.O_RDWR):  # what root is not refused
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(name, flags, **values)

    monkeypatch.setattr(syscalls, "open_file", read_only)
    began = len(server.requests)
    assert same(stio.sync.load(url(server), cache=cache), tensors)
    assert len(server.requests) == began + 1
    assert same(stio.sync.load(url(server, "b"), cache=cache), other)
    assert os.strerror(errno.EROFS) in caplog.text


def test_a_file_in_place_of_the_directory(server: HttpServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_bytes(b"")
    tensors = put(server)
    assert same(stio.sync.load(url(server), cache=stio.DiskCache(tmp_path / "file", max_bytes=1 << 30)), tensors)
    assert "read without the cache" in caplog.text


def test_files_of_others_stay(server: HttpServer, cache: stio.DiskCache) -> None:
    put(server)
    stio.sync.load(url(server), cache=cache)
    (Path(cache.path) / "README").write_text("mine")
    assert cache.evict() > 0
    assert names(cache) == ["README"]


# Several processes.

CHILD = """
import sys
import stio
stio.sync.load(sys.argv[1], cache=stio.DiskCache(sys.argv[2], max_bytes=int(sys.argv[3])))
"""


def start(zygote: Any, server: HttpServer, cache: stio.DiskCache) -> Any:
    """Start a process that loads the object "m"."""
    return zygote.start(CHILD, url(server), cache.path, cache.max_bytes, NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")


@pytest.mark.slow
def test_twenty_processes_read_the_store_once(server: HttpServer, cache: stio.DiskCache, zygote: Any) -> None:
    """Eight in `make test`."""
    num = count(8, 20)
    tensors = put(server, nbytes=LARGE_BYTES)
    server.latency_seconds = 0.01
    code = f"""
import os, sys, traceback
import stio
from stio.loading import api
cache = stio.DiskCache({cache.path!r}, max_bytes=1 << 30)
children = []
for _ in range({num}):
    child = os.fork()
    if not child:
        try:
            found = stio.sync.load({url(server)!r}, cache=cache)
            total = sum(float(tensor.double().sum()) for tensor in found.values())
            os.write(1, f"{{total}}\\n".encode())  # one call: all write to one pipe
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""
    done = run_python(code, python=zygote.python)
    assert done.returncode == 0, done.stderr
    *sums, statuses = done.stdout.splitlines()
    assert statuses == str([0] * num), done.stderr
    assert set(map(float, sums)) == {sum(float(tensor.double().sum()) for tensor in tensors.values())}
    assert len(sums) == num
    nbytes = len(server.objects["/m.safetensors"])
    opened = [request for request in server.requests if request.headers["range"] == "bytes=0-131071"]
    assert len(opened) == num
    # Each process asks for the state of the object. Beside that, its bytes are read once, and its state at the end.
    assert sent_bytes(server) - sum(num * [131072]) == nbytes + 1
    assert suffixes(cache) == [".safetensors"]


def stop_after(server: HttpServer, num_requests: int) -> threading.Event:
    """Let the server hang after some requests; return what ends that."""
    go_on = threading.Event()

    def fault(number: int, request: Request) -> None:
        if number >= num_requests and not go_on.is_set():
            go_on.wait(60)

    server.fault = fault
    return go_on


def marks(cache: stio.DiskCache, nbytes: int) -> int:
    """Return how many blocks of the only part are complete."""
    for path in Path(cache.path).glob("*.part"):
        return path.read_bytes()[nbytes : nbytes + NUM_BLOCKS].count(1)
    return 0


def kill(child: Any) -> None:
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait().returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("done", [1, pytest.param(NUM_BLOCKS, marks=pytest.mark.slow)])
def test_a_killed_process_is_taken_over(server: HttpServer, cache: stio.DiskCache, zygote: Any, done: int) -> None:
    tensors = put(server, nbytes=LARGE_BYTES)
    nbytes = len(server.objects["/m.safetensors"])
    go_on = stop_after(server, 1 + done)  # the first request opens the object, the last one asks for its state
    child = start(zygote, server, cache)
    try:
        wait_for(lambda: len(server.requests) > 1 + done and marks(cache, nbytes) == done)
    finally:
        kill(child)
        go_on.set()
    assert suffixes(cache) == [".lock", ".part"]
    (left,) = cache.leftovers()
    assert left.endswith(".part")
    began = len(server.requests)
    assert same(stio.sync.load(url(server), cache=cache), tensors)
    assert suffixes(cache) == [".safetensors"]
    assert len(server.requests) - began == 1 + (NUM_BLOCKS - done) + 1


@pytest.mark.slow
def test_what_a_killed_process_left_is_removed_for_others(server: HttpServer, tmp_path: Path, zygote: Any) -> None:
    cache = stio.DiskCache(tmp_path, max_bytes=LARGE_BYTES + NBYTES)
    put(server, nbytes=LARGE_BYTES)
    put(server, "b", nbytes=LARGE_BYTES, seed=1)
    go_on = stop_after(server, 2)
    child = start(zygote, server, cache)
    try:
        wait_for(lambda: ".part" in suffixes(cache))
        go_on.set()
        kill(child)
    finally:
        go_on.set()
    stio.sync.load(url(server, "b"), cache=cache)
    assert suffixes(cache) == [".safetensors"]
    assert cache.stats().held_bytes == len(server.objects["/b.safetensors"])


@pytest.mark.slow
def test_kills_at_any_time(server: HttpServer, cache: stio.DiskCache, zygote: Any) -> None:
    tensors = put(server, nbytes=LARGE_BYTES)
    server.bytes_per_second = 400e6
    expected = sum(float(tensor.double().sum()) for tensor in tensors.values())
    # Each child ends itself after a time; all others must get the right tensors.
    code = f"""
import os, random, signal, sys, threading, time
import stio
random.seed(5)
cache = stio.DiskCache({cache.path!r}, max_bytes=1 << 30)
for k in range({count(6, 200)}):
    seconds = random.uniform(0, 0.3)
    child = os.fork()
    if not child:
        def end():
            time.sleep(seconds)
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Thread(target=end, daemon=True).start()
        for _ in range(100):
            found = stio.sync.load({url(server)!r}, cache=cache, memory="copy")
            if sum(float(tensor.double().sum()) for tensor in found.values()) != {expected!r}:
                os._exit(3)
            if k % 3 == 0:
                cache.evict()
    status = os.waitpid(child, 0)[1]
    assert status in (0, signal.SIGKILL), status
"""
    done = run_python(code, python=zygote.python, timeout=100)
    assert done.returncode == 0, done.stderr
    assert same(stio.sync.load(url(server), cache=cache), tensors)
    assert set(suffixes(cache)) == {".safetensors"}
    assert cache.leftovers() == []


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize(("anyio_backend", "who"), [("asyncio", "owner"), ("trio", "owner"), ("trio", "waiter")])
async def test_a_cancel_is_heard_within_a_second(
    server: HttpServer, cache: stio.DiskCache, zygote: Any, anyio_backend: str, who: str
) -> None:
    tensors = put(server, nbytes=LARGE_BYTES)
    go_on = stop_after(server, 2)
    child = start(zygote, server, cache) if who == "waiter" else None
    try:
        if child is not None:
            await anyio.to_thread.run_sync(wait_for, lambda: len(server.requests) > NUM_BLOCKS)
            server.fault = lambda number, request: None  # what is asked from now on is answered
        with anyio.CancelScope() as scope:
            async with anyio.create_task_group() as tasks:

                async def load() -> None:
                    await stio.load(url(server), cache=cache)

                tasks.start_soon(load)
                asked = len(server.requests) if child is not None else 2
                await anyio.to_thread.run_sync(wait_for, lambda: len(server.requests) > asked)
                await anyio.sleep(0.2)  # it waits for the lock, or for the store
                assert not scope.cancel_called
                began = time.monotonic()
                scope.cancel()
        assert time.monotonic() - began < 1.5
    finally:
        go_on.set()
        if child is not None:
            await anyio.to_thread.run_sync(kill, child)
    assert same(await stio.load(url(server), cache=cache), tensors)
    assert cache.stats().entries == 1


def test_processes_share_the_work(server: HttpServer, cache: stio.DiskCache, tmp_path: Path) -> None:
    """While one process fetches a shard, another one fetches the next."""
    tensors = {f"w{k}": torch.randn(1 << 18) for k in range(2)}
    stio.sync.save(tensors, tmp_path / "m", max_shard_size=1 << 20)
    for path in (tmp_path / "m").iterdir():
        server.put(f"/m/{path.name}", path.read_bytes())
    first, second = sorted(name for name in server.objects if name.endswith(".safetensors"))
    key = disk_cache.object_key(
        f"{server.url}{first}",
        stio.RemoteRoot(f"{server.url}/m").open(first.rpartition("/")[2]).identity,
    )
    os.makedirs(cache.path)
    with disk_cache.opened_directory(cache.path) as dir_fd:
        lock = directory_lock.FileLock(key + ".lock", dir_fd)
        assert lock.try_lock()
        found: list[dict[str, torch.Tensor]] = []
        thread = threading.Thread(target=lambda: found.append(stio.sync.load(f"{server.url}/m", cache=cache)))
        thread.start()
        wait_for(lambda: ".safetensors" in suffixes(cache))
        assert thread.is_alive()
        lock.release()
        thread.join()
    assert same(found[0], tensors)
    assert cache.stats().entries == 2
    assert second


def test_a_forked_child_holds_no_lock(server: HttpServer, cache: stio.DiskCache) -> None:
    os.makedirs(cache.path)
    with disk_cache.opened_directory(cache.path) as dir_fd:
        lock = directory_lock.FileLock("a.lock", dir_fd)
        assert lock.try_lock()
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            os.close(writing)
            os.read(reading, 1)
            os._exit(0)
        os.close(reading)
        try:
            os.close(os.dup(lock._fd))  # as a process that dies: its descriptors are closed, without an unlock
            syscalls._locked.discard(lock._fd)
            os.close(lock._fd)
            other = directory_lock.FileLock("a.lock", dir_fd)
            wait_for(other.try_lock)
            other.release()
        finally:
            os.close(writing)
            os.waitpid(child, 0)


def test_a_forked_child_counts_beside_a_thread_of_the_parent(cache: stio.DiskCache) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(disk_cache._counting.__enter__).result()
        child = os.fork()
        if not child:
            signal.alarm(30)
            cache._count(hits=1)
            os._exit(0 if cache.stats().hits == 1 else 1)
        pool.submit(disk_cache._counting.__exit__).result()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.matrix
@pytest.mark.parametrize("memory", ["auto", "map", "copy"])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_some_files_from_the_disk_and_others_from_the_store(
    server: HttpServer, tmp_path: Path, memory: Any, device: Any
) -> None:
    tensors = {f"w{k}": torch.randn(1 << 18) for k in range(4)}
    stio.sync.save(tensors, tmp_path / "m", max_shard_size=1 << 20)
    for path in (tmp_path / "m").iterdir():
        server.put(f"/m/{path.name}", path.read_bytes())
    cache = stio.DiskCache(tmp_path / "cache", max_bytes=int(2.5 * NBYTES))
    place = FakeDevice() if device == "fake" else "cpu"
    for _ in range(2):
        found = stio.sync.load(f"{server.url}/m", cache=cache, memory=memory, device=place)
        assert same({name: tensor.cpu() for name, tensor in found.items()}, tensors)
        assert 1 <= cache.stats().entries <= 2
        del found


# Beside a cache in host memory.


@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_a_load_through_a_cache_on_disk_and_one_in_memory(
    server: HttpServer, cache: stio.DiskCache, device: str
) -> None:
    """The object goes to the disk once, and from there into memory; the second load reads neither."""
    tensors = put(server)
    target = FakeDevice() if device == "fake" else "cpu"
    with stio.sync.HostCache(1 << 30, device="cpu") as memory:
        for caches in ((cache, memory), (memory, cache)):
            found = stio.sync.load(url(server), cache=caches, device=target)
            assert same({name: tensor.cpu() for name, tensor in found.items()}, tensors)
        assert (cache.stats().misses, cache.stats().hits) == (1, 1)
        assert (memory.stats().misses, memory.stats().hits) == (1, 1)
        assert memory.stats().held_bytes == len(server.objects["/m.safetensors"])


def test_a_prefetch_into_memory_fetches_to_the_disk_first(server: HttpServer, cache: stio.DiskCache) -> None:
    tensors = put(server)
    options = stio.LoadOptions(cache=cache)
    with stio.sync.HostCache(1 << 30, device="cpu") as memory:
        run_blocking(memory.prefetch_by(url(server), options))
        assert suffixes(cache) == [".safetensors"]
        assert memory.stats().held_bytes == len(server.objects["/m.safetensors"])
        began = sent_bytes(server)
        assert same(stio.sync.load(url(server), cache=(cache, memory)), tensors)
        assert memory.stats().hits == 1
        assert sent_bytes(server) - began < NBYTES // 4


def test_a_tuple_of_caches_has_one_of_each_kind(cache: stio.DiskCache) -> None:
    with stio.sync.HostCache(1 << 20, device="cpu") as memory:
        for caches in ((cache, cache), (memory, memory), (cache, memory, cache)):
            with pytest.raises(ValueError, match=r"at most one stio\.HostCache and one stio\.DiskCache"):
                stio.sync.load("m.safetensors", cache=caches)
        for wrong in ((cache, "path"), ("path",), [cache, memory], (None,)):
            with pytest.raises(TypeError, match=r"cache= takes a stio\.HostCache"):
                stio.sync.load("m.safetensors", cache=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="memory='map'"):
            stio.sync.load("m.safetensors", cache=(cache, memory), memory="map")


@pytest.mark.slow
def test_a_pool_reads_a_store_once(server: HttpServer, cache: stio.DiskCache) -> None:
    """A model that is evicted comes back from host memory, and from the disk where that has no room."""
    expected = [put(server, f"m{k}", seed=k) for k in range(3)]
    file_bytes = len(server.objects["/m0.safetensors"])
    with stio.sync.ModelPool(device="cpu", device_bytes=NBYTES + 4096, host_bytes=file_bytes, disk=cache) as pool:
        for k in range(3):
            pool.add(str(k), url(server, f"m{k}"))
        pool.prefetch("0")
        assert pool.status("0").tier in ("source", "host")  # its headers were not read yet
        for k in (0, 1, 2, 0, 1, 2, 2):
            with pool.use(str(k)) as tensors:
                assert same(tensors, expected[k])
        assert pool.stats().num_loads == 6
        assert cache.stats().misses == 3
        assert pool.stats().disk_bytes == 3 * file_bytes and pool.stats().host_bytes == file_bytes
        tiers = sorted(pool.status(str(k)).tier for k in range(2))
        assert tiers == ["source", "source"] and pool.status("2").tier == "device"
        server.put("/m1.safetensors", save({name: tensor + 1 for name, tensor in expected[1].items()}))
        with pool.use("1") as tensors:
            assert same(tensors, {name: tensor + 1 for name, tensor in expected[1].items()})
